"""Computes the table of docs/papers.md: which part comes from which paper.

    python -m docs.make_papers     (make docs)

It is read off the docstrings, which give their sources as "Source: DAPO, arXiv 2503.14476".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from docs.pages import FOLDER, arxiv_link, between, markdown, write
from jaxgrpo.cli.methods import KINDS, papers

PACKAGE = FOLDER.parent / "jaxgrpo"
PAGE = FOLDER / "papers.md"


class Mention(NamedTuple):
    """A place in the code that names a paper as its source."""

    number: str
    label: str  # "" where the docstring gives the number alone
    module: str  # "jaxgrpo.advantages.masks"
    name: str  # of the function or class; "" for the module itself


def mentions() -> Iterator[Mention]:
    """Every source with a number in the docstrings of the package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        tree = ast.parse(file.read_text())
        for node in [tree, *tree.body]:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split())
                yield from sources(text, module, getattr(node, "name", ""))


def sources(text: str, module: str, name: str) -> Iterator[Mention]:
    """The papers of a docstring on one line."""
    for paper in papers(text):
        yield Mention(paper.number, paper.label, module, name)


def describe_kind(mention: Mention) -> tuple[str, str]:
    """What it is, with a link to its page, and its name; with dots if it is not chosen by name."""
    place = (mention.module, mention.name)
    for kind, (about, factories) in KINDS.items():
        for name, factory in factories.items():
            if (factory.__module__, getattr(factory, "__name__", "")) == place:
                return f"[{kind}]({about})", name
    public = mention.name and not mention.name.startswith("_")
    return "", f"{mention.module}.{mention.name}" if public else mention.module


def table(all_mentions: list[Mention]) -> str:
    """The table of papers, newest last, in Markdown."""
    rows = []
    for number in sorted({mention.number for mention in all_mentions}):
        paper_mentions = [mention for mention in all_mentions if mention.number == number]
        labels = ", ".join(
            dict.fromkeys(mention.label for mention in paper_mentions if mention.label)
        )
        by_kind: dict[str, list[str]] = {}
        for mention in paper_mentions:
            kind, name = describe_kind(mention)
            by_kind.setdefault(kind, []).append(f"`{name}`")
        order = sorted(by_kind, key=lambda kind: kind == "")
        cells = [f"{kind} {', '.join(dict.fromkeys(by_kind[kind]))}".strip() for kind in order]
        rows.append((arxiv_link(number), labels or "–", "; ".join(cells)))
    return markdown(("paper", "called", "what comes from it"), rows)


def page() -> str:
    """What docs/papers.md should hold."""
    text = PAGE.read_text()
    return between(text, "<!-- papers -->\n", "\n<!-- end -->", table(list(mentions())))


if __name__ == "__main__":
    write({PAGE: page()})
