"""docs/losses.md: its tables are computed again."""

from __future__ import annotations

import pytest

from docs import make_losses as maker
from jaxgrpo.losses import registry


@pytest.fixture(scope="module")
def text(repository):
    return (repository / "docs" / "losses.md").read_text()


@pytest.mark.slow
def test_the_page_is_what_the_script_computes(text):
    assert maker.page(text) == text, "docs/losses.md is out of date: make docs"


@pytest.mark.parametrize("table", ["surrogates", "penalties", "entropies"])
def test_every_part_says_its_formula_and_where_it_is_from(table):
    for name, factory in getattr(registry, table).items():
        assert maker.formula(factory) != "–", f"{name}: begin its docstring's body with a formula"
        assert maker.paper(factory) != "–", f'{name}: its docstring needs "Source: ..., arXiv ..."'


def test_a_surrogate_made_of_others_says_whose_pull_it_has(text):
    (row,) = [line for line in text.splitlines() if line.startswith("| `by_sample` |")]
    assert "that of `then`, or of `otherwise`" in row
    assert "missing" not in row  # the message of an error


@pytest.mark.slow
def test_no_distance_is_near_the_line_between_same_and_other():
    """Equal to rounding, or plainly another gradient: the table does not hang on SAME."""
    for name, distance in maker.compare().items():
        if name.startswith("gradient "):
            worst = distance.max(0)
            assert ((worst < 1e-12) | (worst > 1e-2)).all(), name
