"""What the docs say of the code is so."""

import dataclasses
import inspect
import re

import pytest
from minimal_config import keys

from jaxgrpo.cli.commands import COMMANDS, JSON, TARGET
from jaxgrpo.config.files import RESUMABLE
from jaxgrpo.config.keys import KEYS
from jaxgrpo.core.scores import QUANTITIES
from jaxgrpo.data import tasks
from jaxgrpo.experiments.probe import advice
from jaxgrpo.models.hf.families import FAMILIES
from jaxgrpo.training.processes.process import EXIT_CODES
from jaxgrpo.training.records.console import Display
from jaxgrpo.training.stored_policy import DEFAULTS, LIMITS


@pytest.fixture(scope="module")
def rows(repository):
    text = (repository / "docs" / "configuration.md").read_text()
    return dict(re.findall(r"^\| `([a-z0-9_.]+)` \| ([^|]*?) \|", text, re.MULTILINE))


def test_every_key_is_described_and_no_other(rows):
    assert set(rows) == {name for name, _ in keys()}


def test_the_defaults_described_are_those_in_force(rows):
    for name, default in keys():
        stated = rows[name]
        if isinstance(default, bool | int | float | str):
            written = str(default).lower() if isinstance(default, bool) else str(default)
            assert stated.strip("`").strip('"') == written, name
        elif default is dataclasses.MISSING:
            assert stated == "–" or stated.startswith("`{"), name


def test_the_keys_that_may_change_on_resume_are_named(repository):
    text = (repository / "docs" / "configuration.md").read_text().partition("## Resuming a run")[2]
    assert [key for key in RESUMABLE if f"`{key}`" not in text] == []


def test_the_quantities_of_scores_are_named(repository):
    text = (repository / "docs" / "configuration.md").read_text().partition("\n## Scores\n")[2]
    assert [name for name in QUANTITIES if f'`"{name}"`' not in text] == []


def test_the_exit_codes_described_are_those_of_the_program(repository):
    text = (repository / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES


def test_the_commands_that_print_json_are_named(repository):
    text = (repository / "docs" / "commands.md").read_text()
    listed = text.partition("takes `--json`: ")[2].partition(". ")[0]
    taking = {name for name, (_, _, *arguments) in COMMANDS.items() if JSON in arguments}
    assert {*re.findall(r"`([a-z-]+)`", listed)} == taking


def test_links_of_the_docs_lead_somewhere(repository):
    for page in [repository / "README.md", *(repository / "docs").glob("**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tests_and_families_that_the_page_of_models_names_are_there(repository):
    text = (repository / "docs" / "models.md").read_text()
    tests = "".join(file.read_text() for file in (repository / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) >= 10
    assert [name for name in named if f"def {name}(" not in tests] == []
    proofs = r"\| A \| B \| C \| D \| E \| D, E, F \| G, H[^|]*\| I"
    rows = re.findall(rf"^\|[^|]*`(\w+)` \|[^|]*{proofs}", text, re.MULTILINE)
    assert sorted(rows) == sorted(FAMILIES)


def test_every_command_is_listed_with_what_its_help_says(repository):
    text = (repository / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| \[`([a-z-]+)`\]\([^)]+\) \| (.*) \|$", text, re.MULTILINE)
    assert rows == [(name, command[0]) for name, command in COMMANDS.items()]


def test_what_a_model_folder_is_asked_by_is_said(repository):
    page = (repository / "docs" / "commands.md").read_text()
    section = page.partition("\n## A model, a run or a config\n")[2].partition("\n## ")[0]
    text = " ".join(section.split())
    taking = {name for name, (_, _, *arguments) in COMMANDS.items() if TARGET in arguments}
    assert {*re.findall(r"`([a-z]+)`", text.partition(" take any ")[0])} == taking
    for key in LIMITS:
        table, _, name = key.partition(".")
        assert f"{DEFAULTS[table][name]:,} tokens each" in text, key
    assert f"at temperature {KEYS['rollout.temperature'].default:g}," in text
    assert f"computed in {KEYS['model.dtype'].default}." in text


def test_the_line_of_a_step_is_shown_as_the_terminal_prints_it(repository, monkeypatch):
    printed: list[str] = []
    monkeypatch.setattr(Display, "say", lambda display, text: printed.append(text))
    display = Display(60, 0, active=False)
    display.step(
        10, {"reward": 0.5, "live_groups": 0.5, "grad_norm": 0.1, "loss": -0.01, "time/step": 0.2}
    )
    number = r"[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?"
    form = re.sub(r" +", " +", re.sub(number, lambda _: number, printed[0].strip()))
    shown = [
        f"{page.name}: {line}"
        for page in [repository / "README.md", *(repository / "docs").glob("**/*.md")]
        for line in re.findall(r"^ *\d+ reward .*$", page.read_text(), re.MULTILINE)
    ]
    assert len(shown) > 3
    assert [line for line in shown if not re.fullmatch(form, line.partition(":")[2].strip())] == []


def test_every_task_has_its_row(repository):
    text = (repository / "docs" / "data.md").read_text()
    table = text.partition("### Tasks")[2].partition("### Several sources")[0]
    first_cells = re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)
    assert {*re.findall(r"`(\w+)`", " ".join(first_cells))} == {*tasks.tasks}


def test_the_numbers_of_the_quickstart_are_the_same_wherever_they_stand(repository):
    page = (repository / "docs" / "quickstart.md").read_text()
    measured = page.partition("## Measured")[2].partition("## What it does not show")[0]
    rows = re.findall(
        r"^\| ([a-z@0-9 ]+?)(?: \(greedy\))? \| ([\d.]+) \| ([\d.]+) \|$", measured, re.M
    )
    readme = (repository / "README.md").read_text()
    table = re.findall(r"^│ (\S+) +│ ([\d.]+) │ +([\d.]+) │$", readme, re.MULTILINE)
    assert len(rows) >= 5
    named = [(name.replace(" ", "_"), *values) for name, *values in rows]
    assert [row for row in named if row not in table] == []


def test_what_advice_is_about_is_said_as_in_the_json(repository):
    text = (repository / "docs" / "probe.md").read_text().partition("| `about` | rule |")[2]
    described = {*re.findall(r"^\| ([a-z ]+) \|", text.partition("\n\n")[0], re.MULTILINE)}
    source = inspect.getsource(advice)
    assert described == {*re.findall(r'\bAdvice\(\s*"([a-z ]+)"', source)}


def test_the_limits_of_size_are_those_that_are_tested(repository):
    source = (repository / "tests" / "test_house.py").read_text()
    limits = dict(re.findall(r"^(M[A-Z_]+) = (\d+)", source, re.MULTILINE))
    text = " ".join((repository / "CONTRIBUTING.md").read_text().split())
    for form, name in (
        ("Files have at most {} lines", "MAX_FILE_LINES"),
        ("A file below {} lines", "MIN_FILE_LINES"),
        ("Functions have at most {} lines", "MAX_FUNCTION_LINES"),
        ("folders {} files", "MAX_FOLDER_FILES"),
        ("at most {} packages", "MAX_PACKAGES"),
    ):
        assert form.format(limits[name]) in text, name
