"""The rules of the house, read off every file: who may import whom, and how large things are."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import jaxgrpo

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "jaxgrpo"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 500
MIN_FILE_LINES = 60
MAX_FUNCTION_LINES = 50
MAX_FOLDER_FILES = 20  # beside __init__.py
MAX_PACKAGES = 15

SHORT = {
    "data/tasks/templates.py": "tasks of one kind of turns share theirs",
    "data/images.py": "sources refuse them by columns, and prompts by rows",
    "rollout/exchange.py": "batches and judging exchange alike, and neither is the other's",
    "environments/call_program.py": "other processes load it, and this one does not",
    "config/precision.py": "what it refuses is of no other check, and checks.py is full",
    "cli/importing.py": "a command and what it prints; the files are read in models/gguf",
    "training/records/unwritten.py": "a part of folder.py, which is as long as a file may be",
    **{
        f"models/hf/families/{name}.py": "families have a file per relative"
        for name in ("mistral", "olmo", "qwen")
    },
}
"""Files below MIN_FILE_LINES, each with its reason."""


class Package(NamedTuple):
    """What a package may read of the others, and of other distributions; None: any of them."""

    reads: frozenset[str]
    outside: frozenset[str] | None = None
    pure: bool = False  # no files, clocks, host randomness or printing


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CORE = words("jax jaxtyping")
HOUSE = {
    "core": Package(words(""), CORE | words("numpy"), pure=True),
    "advantages": Package(words("core"), CORE, pure=True),
    "losses": Package(words("core"), CORE, pure=True),
    "data": Package(words("core")),
    "models": Package(words("core"), CORE | words("numpy flax"), pure=True),
    "models.hf": Package(words("core data models")),
    "models.gguf": Package(words("core data models")),
    "rewards": Package(words("core data")),
    "environments": Package(words("core data rewards")),
    "rollout": Package(
        words("core data environments models rewards"), CORE | words("numpy"), pure=True
    ),
    "update": Package(
        words("core advantages losses models rollout"), CORE | words("numpy optax"), pure=True
    ),
    "config": Package(
        words("core advantages losses data environments models rewards rollout update")
    ),
}
for above in ("evaluation", "training", "planning", "experiments", "cli"):
    HOUSE[above] = Package(frozenset(name for name in HOUSE if "." not in name))
"""The packages from the ground up. One may read only packages that stand above it in this table."""

IMPURE_MODULES = words("io logging os pathlib random shutil socket subprocess tempfile time")
IMPURE_CALLS = words("open print input")


def module_name(file: Path) -> str:
    """The module of a file inside the package: "data.hub"; a package has its own name."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def find_package(module: str) -> str:
    """The entry of HOUSE that a module belongs to: the longest name that leads to it."""
    entries = [name for name in HOUSE if module == name or module.startswith(f"{name}.")]
    assert entries, f"{module} is in no package of HOUSE: put it in one"
    return max(entries, key=len)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module imported anywhere in a file; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def may_import(module: str, imported: str) -> bool:
    """Whether `module` of the package may import "jaxgrpo.x.y" or "numpy.linalg"."""
    name, (top, *rest) = find_package(module), imported.split(".")
    package = HOUSE[name]
    if top == "jaxgrpo":
        if not rest or rest[0] == "__version__":
            return package.outside is None
        target = ".".join(rest)
        if target.startswith("models.gguf") and name == "models.hf":
            return False
        if target.startswith(("models.hf", "models.gguf")) and not name.startswith("models."):
            return package.outside is None and "models" in package.reads
        return rest[0] in package.reads | {name.split(".")[0]}
    if top in sys.stdlib_module_names:
        return not (package.pure and top in IMPURE_MODULES)
    return package.outside is None or top in package.outside


def wrong_imports(module: str, source: str) -> list[str]:
    names = imported_modules(ast.parse(source))
    return [f"{module} imports {name}" for name in names if not may_import(module, name)]


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


def inside() -> Iterator[tuple[str, str]]:
    """(module, source) of every file in a package."""
    for file in FILES:
        if file.parent != PACKAGE:
            yield module_name(file), file.read_text()


@pytest.mark.slow
def test_a_module_imports_only_what_lies_below_it():
    assert [wrong for module, source in inside() for wrong in wrong_imports(module, source)] == []


def test_only_the_upper_packages_open_print_or_ask():
    impure = {
        module: impure_calls(source)
        for module, source in inside()
        if HOUSE[find_package(module)].pure
    }
    assert len(impure) > 40
    assert {module: calls for module, calls in impure.items() if calls} == {}


@pytest.mark.slow
def test_the_files_of_a_package_do_not_import_each_other_in_circles():
    modules = {module_name(file): file for file in FILES}
    reads = {}
    for module, file in modules.items():
        names = [
            name.removeprefix("jaxgrpo.") for name in imported_modules(ast.parse(file.read_text()))
        ]
        homes = {name if name in modules else name.rpartition(".")[0] for name in names}
        reads[module] = homes & modules.keys()
    while free := [module for module, below in reads.items() if not below & reads.keys()]:
        for module in free:
            del reads[module]
    assert reads == {}


def test_a_package_reads_only_packages_above_it_in_the_table():
    names = [name for name in HOUSE if "." not in name]
    for place, name in enumerate(names):
        assert HOUSE[name].reads <= set(names[:place])


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("advantages.base", "import flax"),
        ("advantages.base", "import numpy as np"),
        ("advantages.base", "from jaxgrpo.update import step"),
        ("advantages.base", "def f():\n    import time"),
        ("advantages.base", "from jaxgrpo.losses import clip"),
        ("losses.registry", "from jaxgrpo.config.files import Config"),
        ("update.packing", "from jaxgrpo.models.hf import folders"),
        ("models.hf.folders", "from jaxgrpo.models.gguf import files"),
        ("update.step", "from jaxgrpo.data import prompts"),
        ("core.types", "import os"),
        ("models.decoder", "import jaxgrpo"),
        ("models.decoder", "from jaxgrpo.models.hf import weights"),
        ("data.prompts", "from jaxgrpo.training.loop import train"),
    ],
)
def test_an_upward_or_foreign_import_is_found(module, source):
    assert len(wrong_imports(module, source)) == 1


def test_opening_and_printing_are_found():
    assert impure_calls("print(open('x'))") == ["print", "open"]


def test_a_file_in_no_package_is_found():
    with pytest.raises(AssertionError, match="in no package"):
        find_package("utils")


@pytest.mark.slow
def test_files_and_functions_are_short_and_folders_small():
    wrong = []
    for top in ("jaxgrpo", "tests", "examples", "benchmarks", "docs"):
        for file in sorted((REPOSITORY / top).rglob("*.py")):
            source, place = file.read_text(), file.relative_to(REPOSITORY)
            count = len(source.splitlines())
            wrong += [f"{place}: {count} lines"] * (count > MAX_FILE_LINES)
            wrong += [f"{place}: {function}" for function in long_functions(source)]
    assert wrong == []


def test_a_short_file_has_a_reason_and_a_folder_few_files():
    folders: dict[Path, int] = {}
    for file in FILES:
        place = file.relative_to(PACKAGE)
        if file.name.startswith("__"):
            continue
        folders[file.parent] = folders.get(file.parent, 0) + 1
        short = len(file.read_text().splitlines()) < MIN_FILE_LINES
        assert not short or str(place) in SHORT, f"{place}: merge it, or give a reason in SHORT"
    assert max(folders.values()) <= MAX_FOLDER_FILES
    assert len([entry for entry in PACKAGE.iterdir() if entry.is_dir()]) <= MAX_PACKAGES
    assert {file.name for file in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.slow
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
        getattr(jaxgrpo, "Rolouts")  # noqa: B009


def test_no_package_has_the_name_of_a_public_function():
    packages = {file.name for file in PACKAGE.iterdir() if file.is_dir()}
    public = {"advantages", "losses", "models", "rewards"}
    assert (packages - public) & set(jaxgrpo.__all__) == set()


LINES = {
    "advantages": 4170,  # with masks, weights by turn, known answers, teachers, baselines of rows
    "losses": 1412,  # with 290 of surrogates that see an update as a whole, or have other bounds
    "core": 730,  # with what launches and short collectives take
    "data": 2771,  # with four tasks of experiments, four of several turns, and reasoning-gym's
    "models": 8696,  # with kernels for GPUs, 8 bits, 2,600 of kinds, experts, latents and families
    "rewards": 2732,  # with two sandboxes, what runs in one of them, and forks for calls
    "environments": 2812,  # 950 of it what answers over HTTP, 190 processes of calls, 130 formats
    "rollout": 4786,  # with turns, samples that wait beside their slots, recorded experts
    "update": 2577,  # with kernels' choice, experts and their balance, 240 of the atlas, teachers
    "config": 2913,  # with tools and environments, other methods by name, scores of several models
    "evaluation": 792,  # with how two judgements agree
    "training": 9069,  # 127 of it faults around a run; conversations, damaged runs, sampled memory
    "planning": 1872,  # 110 of it what compiled programs move, which benchmarks had
    "experiments": 4170,  # 1,135 of it what methods climb, by enumeration; 87 the atlas
    "cli": 3695,  # with saved samples judged again, queries answered, small models of 33 families
}
"""Lines of code that a package may have, without comments, docstrings and empty lines."""

WHOLE = {"Config": 25, "Setup": 16, "Blueprint": 11, "ModelConfig": 48}
"""Functions that may take an object of each of these types, which hold far more than one function
uses. Build a part once, where it is checked, and hand on what was built: these numbers only fall.
"""


def code_lines(source: str) -> int:
    """Lines that hold code."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        statements = getattr(node, "body", None)
        for statement in statements if isinstance(statements, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                documented |= {*range(statement.lineno, (statement.end_lineno or 0) + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - documented)


LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}


def takers(source: str) -> Iterator[tuple[str, str]]:
    """(function, type) of each parameter annotated by a type in WHOLE."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        arguments = node.args
        starred = [item for item in (arguments.vararg, arguments.kwarg) if item is not None]
        for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred):
            for part in ast.walk(item.annotation or ast.Constant(None)):
                name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
                if name in WHOLE:
                    yield node.name, name


def unchecked_protocols(source: str) -> Iterator[str]:
    """Protocols that `isinstance` refuses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
            decorators = {ast.unparse(item) for item in node.decorator_list}
            if "Protocol" in bases and "runtime_checkable" not in decorators:
                yield node.name


@pytest.mark.slow
def test_a_protocol_can_be_checked_at_run_time():
    """`make test-all` checks the arguments of every function, and cannot check another one's."""
    assert [*unchecked_protocols("class A(Protocol): ...\nclass B(Protocol[X]): ...")] == ["A", "B"]
    assert [name for _, source in inside() for name in unchecked_protocols(source)] == []


def test_code_without_words_is_counted():
    text = '"""Text.\n\nMore."""\n\n# a comment\n'
    source = text + 'def f(x):\n    """Text."""\n\n    return (\n        x\n    )\n'
    assert code_lines(source) == 4


def test_a_function_that_takes_a_whole_object_is_found():
    source = (
        "def f(config: Config, *runs: setup.Setup, x: int) -> Config: ...\nasync def g(a: X): ..."
    )
    assert [*takers(source)] == [("f", "Config"), ("f", "Setup")]


@pytest.mark.slow
def test_packages_are_no_larger_and_few_functions_take_whole_objects():
    lines, functions = dict.fromkeys(LINES, 0), {name: set[str]() for name in WHOLE}
    for module, source in inside():
        lines[module.partition(".")[0]] += code_lines(source)
        for function, name in takers(source):
            functions[name].add(f"{module}.{function}")
    assert {name: count for name, count in lines.items() if count > LINES[name]} == {}
    counts = {name: len(places) for name, places in functions.items()}
    assert {name: count for name, count in counts.items() if count > WHOLE[name]} == {}
