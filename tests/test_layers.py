"""Who may import whom, by reading every file of the package; and the sizes that style asks for."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import jaxgrpo

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "jaxgrpo"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 50


class Layer(NamedTuple):
    """Modules of one row; a name stands for the module, or the package and all that is in it."""

    modules: frozenset[str]
    reads: frozenset[str]  # of the package, beside each module's own package
    outside: frozenset[str] | None  # other distributions; None: any
    pure: bool = True  # no files, clocks, host randomness or printing


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BASE = words("types metrics errors names onepass")
CORE = words(
    "advantages losses logprobs exact_kl diagnostics calibration confidence group_signal symptoms"
)
FAST = words("sharding packing sampling prompts policies")
STEPS = words("steps optimizers parts preparation")
HOST = words("io rewards tasks")
TOP = words(
    "__init__ __main__ advice alarms assembly beginning chain_tail cli comparing config"
    " config_checks config_keys config_reading console doctor evaluation evaluation_checks"
    " explaining exporting from_python gathering given_rollouts inference inputs intervals"
    " logbook loss_checks measuring methods planning probing quickstart reports rescoring"
    " resetting resuming rewarding rollouts runtime sharing training variety voting warmstart"
)
LAYERS = (
    Layer(BASE, BASE, words("jax jaxtyping")),
    Layer(CORE, BASE | words("advantages.stats diagnostics logprobs"), words("jax jaxtyping")),
    Layer(words("models"), BASE, words("jax jaxtyping numpy flax")),
    Layer(
        FAST,
        BASE | FAST | words("logprobs models.api models.attention models.config"),
        words("jax numpy"),
    ),
    Layer(
        STEPS,
        BASE | CORE | FAST | STEPS | words("models"),
        words("jax jaxtyping numpy optax"),
    ),
    Layer(HOST, BASE | HOST | words("models"), None, pure=False),
    Layer(TOP, BASE | CORE | FAST | STEPS | HOST | TOP | words("models"), None, pure=False),
)
IMPURE_MODULES = words("io logging os pathlib random shutil socket subprocess tempfile time")
IMPURE_CALLS = words("open print input")


def name_of(file: Path) -> str:
    """The module of a file inside the package: "io.callables"; a package bears its own name."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def layer_of(module: str) -> Layer:
    rows = [layer for layer in LAYERS if module.split(".")[0] in layer.modules]
    assert len(rows) == 1, f"{module} is in {len(rows)} rows of LAYERS: put it in one"
    return rows[0]


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every module imported anywhere in a file; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def may_import(module: str, imported: str) -> bool:
    """Whether `module` of the package may import "jaxgrpo.x.y" or "numpy.linalg"."""
    layer, (top, *rest) = layer_of(module), imported.split(".")
    if top == "jaxgrpo":
        target = ".".join(rest)
        own = {module.split(".")[0]}
        if not rest or target == "__version__":
            return layer.modules == TOP
        return any(target == name or target.startswith(f"{name}.") for name in layer.reads | own)
    if top in sys.stdlib_module_names:
        return not (layer.pure and top in IMPURE_MODULES)
    return layer.outside is None or top in layer.outside


def wrong_imports(module: str, source: str) -> list[str]:
    tree = ast.parse(source)
    return [f"{module} imports {name}" for name in imports_of(tree) if not may_import(module, name)]


def impure_calls(source: str) -> list[str]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = (call.func.id for call in calls if isinstance(call.func, ast.Name))
    return [name for name in names if name in IMPURE_CALLS]


def long_functions(source: str) -> list[str]:
    lines = {
        f"{node.name}, line {node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    return [f"{name}: {count} lines" for name, count in lines.items() if count > MAX_FUNCTION_LINES]


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_module_imports_only_what_lies_below_it(file):
    assert wrong_imports(name_of(file), file.read_text()) == []


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_only_the_upper_layers_open_print_or_ask(file):
    if layer_of(name_of(file)).pure:
        assert impure_calls(file.read_text()) == []


def test_every_row_of_the_table_names_modules_that_do_not_stand_in_another():
    names = [name for layer in LAYERS for name in layer.modules]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("advantages.base", "import flax"),
        ("advantages.base", "import numpy as np"),
        ("advantages.base", "from jaxgrpo import steps"),
        ("advantages.base", "def f():\n    import time"),
        ("advantages.base", "from jaxgrpo.losses import clip"),
        ("losses.registry", "from jaxgrpo.config import Config"),
        ("packing", "from jaxgrpo.models.decoder import build"),
        ("steps", "from jaxgrpo.io import data"),
        ("types", "import os"),
        ("models.decoder", "import jaxgrpo"),
        ("io.data", "from jaxgrpo.training import train"),
    ],
)
def test_an_upward_or_foreign_import_is_found(module, source):
    assert len(wrong_imports(module, source)) == 1


def test_opening_and_printing_are_found():
    assert impure_calls("print(open('x'))") == ["print", "open"]


def test_a_file_in_no_row_is_found():
    with pytest.raises(AssertionError, match="0 rows"):
        layer_of("utils")


@pytest.mark.parametrize(
    "file",
    [file for top in ("jaxgrpo", "tests", "examples", "benchmarks", "docs")
     for file in sorted((REPOSITORY / top).rglob("*.py"))],
    ids=lambda file: str(file.relative_to(REPOSITORY)),
)  # fmt: skip
def test_a_file_and_its_functions_are_short(file):
    source = file.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert long_functions(source) == []


@pytest.mark.parametrize("module", ["jaxgrpo", "jaxgrpo.advantages", "jaxgrpo.losses"])
def test_the_core_loads_nothing_that_jax_and_jaxtyping_do_not(module, environment, python):
    program = (
        "import sys, jax, jax.numpy, jaxtyping; before = set(sys.modules);"
        f"import {module}; print(*{{name.split('.')[0] for name in set(sys.modules) - before}})"
    )
    run = subprocess.run(
        [python, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert set(run.stdout.split()) - sys.stdlib_module_names == {"jaxgrpo"}


@pytest.mark.parametrize("word", jaxgrpo.__all__)
def test_a_public_word_is_found_and_stays_the_same(word):
    assert getattr(jaxgrpo, word) is getattr(jaxgrpo, word)
    assert word in dir(jaxgrpo)


def test_a_word_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'Rollouts'"):
        jaxgrpo.Rolouts  # noqa: B018


def test_no_module_bears_the_name_of_a_public_word():
    modules = {name_of(file).split(".")[0] for file in FILES}
    packages = {"advantages", "losses", "models", "rewards", "tasks"}
    assert (modules - packages) & set(jaxgrpo.__all__) == set()
