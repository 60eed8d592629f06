"""The Python of README.md and docs/ runs and gives what it says; names and paths in them exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from quick import all_but

from jaxgrpo.cli import init

CHECKED = {
    "README.md": 2,
    "docs/index.md": 2,
    "docs/tutorial.md": 2,
    "docs/advantages.md": 6,
    "docs/losses.md": 4,
    "docs/check.md": 2,
    "docs/rewards.md": 0,
    "docs/configuration.md": 2,
    "docs/models.md": 2,
}
"""Every page with Python that runs -> how many of its lines say what they give."""
SLOW = {"docs/check.md", "docs/models.md"}

BLOCK = re.compile(
    r"^(<!-- not run: ([^\n]+) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def pages(repository: Path) -> dict[str, str]:
    files = [repository / "README.md", repository / "CONTRIBUTING.md"]
    files += sorted((repository / "docs").rglob("*.md"))
    return {str(page.relative_to(repository)): page.read_text() for page in files}


def run(code: str, names: dict) -> int:
    """Runs a block; an expression with a comment must have its value. Returns how many had."""
    checked = 0
    for node in ast.parse(code).body:
        text = ast.get_source_segment(code, node) or ""
        comment = code.splitlines()[(node.end_lineno or 1) - 1].partition("  # ")[2]
        if isinstance(node, ast.Expr) and comment:
            assert repr(eval(text, names)) == comment
            checked += 1
        else:
            exec(text, names)
    return checked


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    all_but(SLOW, CHECKED),
)
def test_the_python_of_a_page_runs_and_gives_what_it_says(repository, page):
    names: dict = {}
    blocks = BLOCK.findall((repository / page).read_text())
    runs = [code for _, reason, code in blocks if not reason]
    assert runs
    assert sum(run(code, names) for code in runs) == CHECKED[page]


def test_every_page_with_python_is_run_or_says_why_not(repository):
    for page, text in pages(repository).items():
        blocks = BLOCK.findall(text)
        begun = re.findall(r"^ *```python$", text, re.MULTILINE)
        assert len(blocks) == len(begun), f"{page}: a block that is not found"
        for _, reason, code in blocks:
            assert page in CHECKED or reason, f"{page}: not run, without a reason: {code}"


def test_a_wrong_comment_is_found():
    assert run("x = 1\nx + 1  # 2\n", {}) == 1
    with pytest.raises(AssertionError):
        run("1 + 1  # 3\n", {})


def test_the_names_in_the_pages_exist(repository):
    """`jaxgrpo.x.y`, paths below jaxgrpo/, tests/, docs/, examples/ and configs/, and files of
    Python by paths that begin in jaxgrpo/ or at the root."""
    for page, text in pages(repository).items():
        for name in re.findall(r"`(jaxgrpo(?:\.\w+)+)", text):
            assert exists(name), f"{page}: {name}"
        places = r"`((?:jaxgrpo|tests|docs|examples|configs)/[\w/.]+)`"
        for path in re.findall(places, text):
            assert (repository / path).exists(), f"{page}: {path}"
        for path in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
            homes = (repository, repository / "jaxgrpo")
            assert any((home / path).exists() for home in homes), f"{page}: {path}"


def exists(name: str) -> bool:
    """Whether a dotted name is a module or something in one."""
    if importlib.util.find_spec("jaxgrpo") is None:
        return False
    value, rest = importlib.import_module("jaxgrpo"), name.split(".")[1:]
    for part in rest:
        if not hasattr(value, part):
            try:
                importlib.import_module(f"{value.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
        value = getattr(value, part)
    return True


def test_names_that_do_not_exist_are_found():
    assert exists("jaxgrpo.evaluation.intervals.studentised")
    assert exists("jaxgrpo.train")
    assert not exists("jaxgrpo.intervals")
    assert not exists("jaxgrpo.train.nothing")


def test_the_packages_and_files_of_the_design_exist(repository):
    """Names as `advantages/` and `config/keys.py`, which begin at jaxgrpo/."""
    text = (repository / "docs" / "design.md").read_text()
    built = text[: text.index("## Rooms to come")] + text[text.index("## Decisions") :]
    named = re.findall(r"`([a-z]+/(?:[\w/]+\.py)?)`", built)
    assert len(named) > 20
    for path in named:
        places = (repository, repository / "jaxgrpo")
        assert any((place / path).exists() for place in places), path


@pytest.mark.parametrize("page", ["README.md", "docs/design.md"])
def test_every_package_is_explained(repository, page):
    folders = {file.parent.name for file in (repository / "jaxgrpo").glob("*/__init__.py")}
    named = re.findall(r"^(?:\| `|- \*\*)(\w+)(?:`|\*\*)", (repository / page).read_text(), re.M)
    assert [name for name in named if name in folders] == sorted(
        folders, key=lambda name: named.index(name) if name in named else -1
    )


def test_every_file_that_the_commands_of_the_readme_read_is_written_by_one_before(repository):
    text = (repository / "README.md").read_text()
    (block,) = re.findall(r"^```\npip.*?^```", text, re.MULTILINE | re.DOTALL)
    written = {*init.file_texts(init.SMALL), "base"}
    for line in block.splitlines():
        command = line.partition("#")[0].split()
        for word in command[2:]:
            if word.endswith((".toml", ".txt")):
                assert word in written, line
            if word.startswith("runs/"):
                assert f'run.dir = "{word}"' in init.run_toml(init.SMALL), line
