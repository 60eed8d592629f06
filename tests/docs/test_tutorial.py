"""docs/tutorial.md: what its files and commands give is what it says."""

from __future__ import annotations

import re
import subprocess

import pytest

MISTAKEN, CORRECTED = 0, 1
SHOWN = re.compile(r"^```\n\$ (jaxgrpo (\w+) [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs" / "tutorial.md").read_text()


def files(page: str, name: str) -> list[str]:
    """The contents that the page gives a file: blocks after a paragraph that ends with its name."""
    pattern = rf"`{re.escape(name)}`(?:, corrected)?:\n\n(?:<!--.*?-->\n)?```\w+\n(.*?)^```$"
    return re.findall(pattern, page, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(page, tmp_path):
    """Makes the folder with a version of middle.py."""

    def make(version: int):
        (tmp_path / "middle.py").write_text(files(page, "middle.py")[version])
        (tmp_path / "test_middle.py").write_text(files(page, "test_middle.py")[0])
        return tmp_path

    return make


def failures(folder, python, environment) -> set[str]:
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_middle.py"]
    run = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert " passed" in run.stdout, run.stdout + run.stderr
    return {*re.findall(r"^FAILED test_middle.py::(\w+)", run.stdout, re.MULTILINE)}


@pytest.mark.full
@pytest.mark.slow
def test_the_mistake_fails_the_tests_that_the_page_names(page, folder, python, environment):
    named = {*re.findall(r"^FAILED test_middle.py::(\w+)", page, re.MULTILINE)}
    assert len(named) == 2
    assert failures(folder(MISTAKEN), python, environment) == named


@pytest.mark.full
@pytest.mark.slow
def test_the_corrected_step_passes_its_tests(folder, python, environment):
    assert failures(folder(CORRECTED), python, environment) == set()


@pytest.mark.full
def test_the_signal_is_shown_as_on_the_page(page, folder, python, environment):
    ((command, _, output),) = [shown for shown in SHOWN.findall(page) if shown[1] == "advantages"]
    for version in (MISTAKEN, CORRECTED):
        run = subprocess.run(
            [python, "-m", *command.split()],
            cwd=folder(version),
            env={**environment(), "COLUMNS": "80"},
            capture_output=True,
            text=True,
            check=True,
        )
        printed = "".join(f"{line.rstrip()}\n" for line in run.stdout.splitlines())
        assert (printed == output) == (version == MISTAKEN)
        assert ("warning" in printed) == (version == MISTAKEN)


@pytest.mark.full
def test_the_commands_of_the_page_run(page, folder, python, environment):
    """The comparison with one seed and one rate: its numbers take minutes."""
    place = folder(CORRECTED)

    def command(*words: str) -> str:
        full = [python, "-m", "jaxgrpo", *words]
        run = subprocess.run(full, cwd=place, env=environment(), capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    command("init", "idea")
    for name in ("middle.py", "test_middle.py"):
        (place / name).rename(place / "idea" / name)
    place = place / "idea"
    config, (advantage,) = place / "run.toml", re.findall(r"^```toml\n(adv.*)\n```", page, re.M)
    config.write_text(re.sub(r"^recipe = .*$", advantage, config.read_text(), flags=re.M))
    comparison = files(page, "compare.toml")[0]
    for line in ("learning_rates = [1e-3]", "seeds = 1"):
        key = line.partition(" =")[0]
        comparison = re.sub(rf"^{key} = .*$", line, comparison, flags=re.M)
    (place / "compare.toml").write_text(comparison)
    commands = dict(re.findall(r"^\$ jaxgrpo (\w+) (.*)$", page, re.MULTILINE))
    assert commands.keys() == {"advantages", "probe", "train", "compare", "export"}
    command("train", "run.toml", "--dry-run")
    for name, rest in commands.items():
        command(name, *rest.split())
    assert (place / "my-model" / "model.safetensors").is_file()
