"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from quick import full_but

import jaxgrpo

pytestmark = pytest.mark.slow

PACKAGE = Path(jaxgrpo.__file__).parent
FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if ">>> " in file.read_text()]

COMPILE = {PACKAGE / "advantages", PACKAGE / "losses"}
SHORT = [file for file in FILES if COMPILE.isdisjoint(file.parents)]
"""Those of which few compile anything."""


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)


@pytest.mark.parametrize(
    "file", full_but(SHORT, FILES), ids=lambda file: str(file.relative_to(PACKAGE))
)
def test_examples_hold(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(module_name(file)))
    assert results.attempted > 0
    assert results.failed == 0


def test_an_example_that_does_not_hold_is_found(tmp_path):
    file = tmp_path / "wrong.txt"
    file.write_text(">>> 1 + 1\n3\n")
    assert doctest.testfile(str(file), module_relative=False, report=False).failed == 1
