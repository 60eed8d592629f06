"""What things are called: a name says what a value is, not how it came about."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FILES = sorted(
    file
    for folder in ("jaxgrpo", "benchmarks", "docs", "examples", "tests")
    for file in (REPOSITORY / folder).rglob("*.py")
)

WORDS = """
    one ones own whole other others both here there such found given kept asked made said told
    chosen taken wanted done seen known held meant left_over anew thing things
"""
REFUSED = frozenset(WORDS.split())
"""Pronouns and participles: a reader has to look up each time what they stand for."""

PUBLIC = frozenset({"params_of", "row_of", "spec_of"})
"""Functions that pages and error messages name: users' code calls them so."""


def bound_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names of variables, parameters, fields, functions and classes that a module binds.

    `other` as a parameter of a method called __NAME__ is not among them.
    """
    operands = {
        id(argument)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name.startswith("__")
        for argument in function.args.args
        if argument.arg == "other"
    }
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg() if id(node) not in operands:
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


def is_refused(name: str) -> bool:
    return name.strip("_") in REFUSED


def is_riddle(name: str) -> bool:
    """Whether a function is called by a preposition, where a noun or a verb would say what it
    returns or does."""
    bare = name.strip("_")
    if name in PUBLIC:
        return False
    return bare == "of" or bare.startswith("of_") or bare.endswith("_of")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_a_name_says_what_the_thing_is(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    refused = [f"line {line}: {name}" for name, line in bound_names(tree) if is_refused(name)]
    refused += [
        f"line {node.lineno}: {node.name}()"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_riddle(node.name)
    ]
    assert not refused, "call it by what it is or does (CONTRIBUTING.md)"


def test_the_lint_finds_what_it_is_for():
    code = """
def of_rows(given, *, weights): ...
class Table:
    kept: int
    def __eq__(self, other): ...
for one, row in (): found = [other for other in row]
self._said = 1
"""
    names = [name for name, _ in bound_names(ast.parse(code))]
    refused = sorted(filter(is_refused, names))
    assert refused == ["_said", "found", "given", "kept", "one", "other"]
    assert [is_riddle(name) for name in ("of_rows", "rows_of", "_of", "offset", "rows")] == [
        *(True, True, True, False, False)
    ]
