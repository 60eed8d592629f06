"""What the docs say of the code is so."""

import dataclasses
import re

import pytest
from minimal_config import keys

from jaxgrpo.cli.commands import COMMANDS, JSON
from jaxgrpo.config.files import RESUMABLE
from jaxgrpo.models.hf.families import FAMILIES
from jaxgrpo.training.processes.process import EXIT_CODES


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
