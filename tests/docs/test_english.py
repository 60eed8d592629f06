"""Docs, docstrings, comments and messages are in plain English: a list of words that are not."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

TICS = {
    r"bears|bear|borne": "tolerates, has, must allow",
    r"nobody|no\s+one|whoever": "nothing, no user, anyone who: name who it is",
    r"(?:is|are|was|were|be|been)\s+told(?!\s+apart)": "is reported, is given, is found by",
    r"(?:stands?|stood|standing)\s+(?:behind|beside)": "comes after, is next to",
    r"shall": "must, should, will",
    r"turn(?:s|ed|ing)?\s+over": "flipped",
    r"says?\s+whole": "describes fully",
    r"none\s+(?:it|they|we)\s+knows?": "none, where none is known",
    r"knows\s+(?:nothing\s+)?of": "knows, has, reads",
    r"says\s+of": "says about",
    r"goes\s+by": "uses, follows",
    r"held\s+against": "compared with",
    r"the\s+so\s+many": "the k, as many",
    r"(?:came|comes?|became|becomes?)\s+of\s+(?:it|them)": "happened to",
    r"in\s+the\s+place\s+of": "instead of",
    r"price\s+(?:that\s+)?leads?\s+to": "the target",
    r"whence|thereof|wherein|lest|henceforth|aught|nought|thereby": "a word of this century",
}
"""An expression, matched as whole words in any case, and what to write instead."""

ANY = re.compile("|".join(rf"\b(?:{tic})\b" for tic in TICS), re.IGNORECASE)
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")


def prose_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of a page, without what it shows as code."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    yield 1, CODE.sub(blank, FENCE.sub(blank, source))


def prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of comments, docstrings and messages. A string of one word is a value."""
    block, begins, ends = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if line != ends + 1:  # a sentence may go through several lines of comments
                yield begins, block
                block, begins = "", line
            block, ends = f"{block}{token.string.lstrip('#')}\n", line
    yield begins, block
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def hits(source: str, python: bool) -> list[tuple[int, str]]:
    """(line, words) of every tic in a file."""
    places = {
        (begins + text.count("\n", 0, match.start()), " ".join(match[0].split()))
        for begins, text in (prose_of_python if python else prose_of_markdown)(source)
        for match in ANY.finditer(text)
    }
    return sorted(places)


def files(repository: Path) -> Iterator[Path]:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        yield repository / name
    yield from sorted((repository / "docs").rglob("*.md"))
    for folder in ("docs", "examples", "jaxgrpo"):
        yield from sorted((repository / folder).rglob("*.py"))


def test_sentences_are_plain(repository):
    wrong = []
    for file in files(repository):
        for line, words in hits(file.read_text(), file.suffix == ".py"):
            wrong.append(f"{file.relative_to(repository)}:{line}: {words}")
    assert wrong == [], "write it as TICS says, in " + __file__


def test_a_planted_sentence_is_found_where_it_is():
    page = "# Noise\n\nThe share that is turned\nover. `nobody` and\n\n```\nshall\n```\n"
    assert hits(page, python=False) == [(3, "turned over")]
    code = (
        'NOBODY = name("nobody")\n'
        '"""One line.\n\n    Group sizes are told\n    of.\n"""\n'
        "x = 1  # a unit\n# that nobody\n# gives\n"
        'raise ValueError(f"{x} stands behind the chain")\n'
    )
    assert hits(code, python=True) == [(4, "are told"), (8, "nobody"), (10, "stands behind")]


def test_honest_english_is_not_found():
    text = (
        "Bearing on this, forbear. He told us. The two are not told apart. It stands alone."
        " A shallow net turns overfit. Marshall knows. The page says offline."
    )
    assert hits(text, python=False) == []
