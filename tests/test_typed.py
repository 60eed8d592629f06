"""What a type checker, an editor and a prompt know of jaxgrpo before anything runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pydoc
import re
import rlcompleter
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxgrpo

SCRIPTS = Path(__file__).resolve().parent / "support" / "user_scripts"
RIGHT, WRONG = (sorted(SCRIPTS.glob(f"{kind}_*.py")) for kind in ("right", "wrong"))
WORDS = sorted({*jaxgrpo.__all__} - {"__version__"})


@pytest.fixture(scope="module")
def pyright(python, environment):
    """pyright with these arguments -> what it prints as JSON; jaxgrpo is an installed package."""

    def check(*arguments: str) -> dict[str, Any]:
        command = [python, "-m", "pyright", "--pythonpath", python, "--outputjson", *arguments]
        run = subprocess.run(
            command, env=environment(), cwd=SCRIPTS, capture_output=True, text=True
        )
        assert run.returncode in (0, 1), run.stdout + run.stderr
        return json.loads(run.stdout)

    return check


@pytest.fixture(scope="module")
def findings(pyright) -> dict[str, dict[int, set[str]]]:
    """Script -> line -> the rules that pyright finds broken there."""
    report = pyright("--project", str(SCRIPTS))
    assert report["summary"]["filesAnalyzed"] == len(RIGHT) + len(WRONG)
    scripts: dict[str, dict[int, set[str]]] = {file.name: {} for file in (*RIGHT, *WRONG)}
    for finding in report["generalDiagnostics"]:
        lines = scripts[Path(finding["file"]).name]
        lines.setdefault(finding["range"]["start"]["line"] + 1, set()).add(finding["rule"])
    return scripts


def error_marks(script: Path) -> dict[int, str]:
    """Line -> the rule that its comment says it breaks."""
    lines = enumerate(script.read_text().splitlines(), start=1)
    marks = {number: re.search(r"# error: (\w+)$", line) for number, line in lines}
    return {number: mark[1] for number, mark in marks.items() if mark}


def test_there_are_five_right_scripts_and_five_wrong_ones():
    assert len(RIGHT) == len(WRONG) == 5


@pytest.mark.slow
@pytest.mark.parametrize("script", RIGHT, ids=lambda file: file.stem)
def test_a_right_script_has_no_finding(script, findings):
    assert findings[script.name] == {}


@pytest.mark.slow
@pytest.mark.parametrize("script", WRONG, ids=lambda file: file.stem)
def test_a_wrong_script_has_its_findings_on_the_lines_that_are_wrong(script, findings):
    marks, lines = error_marks(script), findings[script.name]
    assert lines.keys() == marks.keys() != set()
    assert {line: rule for line, rule in marks.items() if rule not in lines[line]} == {}


@pytest.mark.slow
def test_what_an_editor_shows_of_each_public_word_has_no_unknown_part(pyright, tmp_path):
    """By reveal_type. pyright --verifytypes is no measure: in some environments it takes jax.Array
    itself for unknown where it stands in an alias, and in others it does not."""
    modules = ("advantages", "losses", "rewards")
    words = [*WORDS, *(f"{m}.{word}" for m in modules for word in getattr(jaxgrpo, m).__all__)]
    shown = "\n".join(f"reveal_type(jg.{word})" for word in words)
    (tmp_path / "shown.py").write_text(f"import jaxgrpo as jg\n{shown}\n")
    messages = [
        diagnostic["message"]
        for diagnostic in pyright(str(tmp_path / "shown.py"))["generalDiagnostics"]
    ]
    assert len(messages) == len(words) > 150
    assert [text for text in messages if "Unknown" in text or not text.startswith("Type of")] == []


def imports_for_checkers() -> dict[str, tuple[str, str]]:
    """Word -> (module, name there), as the block under `if TYPE_CHECKING` imports it."""
    tree = ast.parse(Path(jaxgrpo.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    (block,) = (block for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING")
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_checkers_see_the_words_that_a_program_gets():
    words = {
        word: (module, jaxgrpo._NAMES_AT_HOME.get(word, word))
        for word, module in jaxgrpo._HOME.items()
    }
    for word, module in jaxgrpo._MODULES.items():
        package, _, name = module.rpartition(".")
        words[word] = package, name
    assert imports_for_checkers() == words
    assert sorted(jaxgrpo.__all__) == sorted(["__version__", *words])


@pytest.mark.parametrize("name", ["advantages", "losses", "rewards"])
def test_a_package_exports_what_it_imports(name):
    package = importlib.import_module(f"jaxgrpo.{name}")
    tables = dict if name == "rewards" else ()
    public = {
        word
        for word, value in vars(package).items()
        if word[0] != "_" and (callable(value) or isinstance(value, tables))
    }
    assert public <= {*package.__all__}  # which has names of types too
    assert {*package.__all__} <= vars(package).keys()


def test_the_package_says_that_it_is_typed():
    assert (Path(jaxgrpo.__file__).parent / "py.typed").is_file()


def test_importing_the_package_loads_no_other(python, environment):
    program = (
        "import sys; before = set(sys.modules); import jaxgrpo;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    run = subprocess.run([python, "-c", program], env=environment(), capture_output=True, text=True)
    assert {*run.stdout.split()} - sys.stdlib_module_names == {"jaxgrpo"}, run.stderr


def test_dir_help_and_completion_have_every_word():
    assert {*WORDS} <= {*dir(jaxgrpo)}
    shown = pydoc.plain(pydoc.render_doc(jaxgrpo))
    entry = r"^    (?:class )?{}(?:\(| = | \(package\)$|$)"
    assert [word for word in WORDS if not re.search(entry.format(word), shown, re.M)] == []
    completions = rlcompleter.Completer({"jg": jaxgrpo}).attr_matches("jg.")
    assert {*WORDS} <= {re.split(r"[.(]", text)[1] for text in completions}


@pytest.mark.parametrize("word", [word for word in WORDS if callable(getattr(jaxgrpo, word))])
def test_a_word_says_what_it_is_and_what_it_takes(word):
    value = getattr(jaxgrpo, word)
    parameters = inspect.signature(value).parameters.values()
    assert all(parameter.annotation is not parameter.empty for parameter in parameters)
    assert inspect.getdoc(value)
