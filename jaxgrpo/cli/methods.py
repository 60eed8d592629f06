"""`jaxgrpo methods`: everything that a config can name, with its source, needs and page.

Sources are read off the docstrings, which give them as "Source: DAPO, arXiv 2503.14476".
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from jaxgrpo.advantages.registry import parts, recipes
from jaxgrpo.cli.advantages import FIELDS
from jaxgrpo.core.scores import OF_ANSWERS, SCORES, score_text
from jaxgrpo.losses.registry import entropies, penalties, reductions, surrogates
from jaxgrpo.rewards.registry import rewards
from jaxgrpo.rollout.policies import policies
from jaxgrpo.training.records.console import Document, show_whole, terminal_table

KINDS: dict[str, tuple[str, Mapping[str, Callable[..., Any]]]] = {
    "recipe": ("advantages.md#recipes", recipes),
    "part of chains": ("api/advantages.md", parts),
    "surrogate": ("losses.md#surrogates", surrogates),
    "reduction": ("api/losses.md", reductions),
    "penalty": ("losses.md#penalties", {**penalties, **entropies}),
    "reward": ("rewards.md", rewards),
    "prompt policy": ("configuration.md#prompt-policies", policies),
}
"""What a function may be -> the page of docs/ about it, and all of its kind by name."""

TESTS: Path = Path(__file__).with_name("tests.json")
"""Kind -> name -> the file of the repository that tests it, written by docs/make_papers.py."""

SCORE = "score"
"""The kind of what a pass of a model gives: a part that needs it gets it."""

NUMBER = re.compile(r"arXiv:? ?(\d{4}\.\d{4,5})")
BREAK = re.compile(r"[:;(](?: |$)|, |\. (?!GRPO|\d)|\((?=the)|\b(?:of|by|after|as|the|for) ")
NAME = re.compile(r"[A-Z]|\w+-[A-Z]")
"""How the paper is called stands between the last break and its number, and begins like this."""


class Paper(NamedTuple):
    """A paper that a docstring names as a source."""

    number: str  # of arXiv
    label: str  # how it is called; "" where the number stands alone


class Method(NamedTuple):
    """Something that a config can name."""

    name: str
    kind: str
    summary: str  # the first paragraph of its docstring
    sources: tuple[str, ...]  # numbers of arXiv; (): none is given, or the idea is ours
    needs: tuple[str, ...] | None  # fields beside rewards; None: it depends on its options
    page: str  # in docs/
    test: str  # in the repository


def papers(text: str) -> Iterator[Paper]:
    """The papers of a docstring on one line, in order."""
    begin = 0
    for number in NUMBER.finditer(text):
        label = BREAK.split(text[begin : number.start()].strip(" ,("))[-1].partition("'s ")[0]
        yield Paper(number[1], label if NAME.match(label) else "")
        begin = number.end()


def methods() -> Iterator[Method]:
    """All of them, by kind and name."""
    tests = json.loads(TESTS.read_text(encoding="utf-8"))
    for kind, (page, factories) in KINDS.items():
        for name, factory in sorted(factories.items()):
            text = inspect.getdoc(factory) or ""
            numbers = dict.fromkeys(paper.number for paper in papers(" ".join(text.split())))
            summary = " ".join(text.partition("\n\n")[0].split())
            about = summary, tuple(numbers), _needs(factory), page, tests[kind][name]
            yield Method(name, kind, *about)
    for name, field in SCORES.items():
        summary = f"{score_text(field)}, {field.shape}"
        yield Method(name, SCORE, summary, (), (), "advantages.md", "tests/update/test_scores.py")
    for name, field in OF_ANSWERS.items():
        summary = f"{FIELDS[name].meaning}, {field.shape}"
        about = (), (), "data.md#reference-answers", "tests/update/test_answers.py"
        yield Method(name, SCORE, summary, *about)


def _needs(factory: Callable[..., Any]) -> tuple[str, ...] | None:
    """The fields that it reads with its default options; None where it has options without."""
    if any(factory is reward for reward in rewards.values()):
        return ()
    try:
        built = factory()
    except (TypeError, ValueError):
        return None
    return tuple(sorted(getattr(built, "needs", ())))


def main(as_json: bool = False) -> int | Document:
    """The command: prints a table. Returns the exit code."""
    entries = list(methods())
    if as_json:
        return Document({"methods": [entry._asdict() for entry in entries]})
    rows = [["kind", "name", "arXiv", "needs", "what it does"]]
    for entry in entries:
        needs = "its options say" if entry.needs is None else ", ".join(entry.needs)
        rows.append([entry.kind, entry.name, " ".join(entry.sources), needs, entry.summary])
    show_whole(Console(highlight=False), terminal_table(rows))
    return 0
