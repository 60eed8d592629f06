"""Pages with computed parts: writing between markers, and what docstrings say of their sources."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


def between(text: str, opening: str, closing: str, content: str, problem: str = "") -> str:
    """A page with new content between two markers.

    Args:
      problem: what to say where a marker is missing.

    Raises: SystemExit with `problem`.
    """
    head, start_mark, remainder = text.partition(opening)
    _, end_mark, tail = remainder.partition(closing)
    if not start_mark or not end_mark:
        raise SystemExit(problem or f"there is no {opening} ... {closing} to write between")
    return f"{head}{opening}{content}{closing}{tail}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rule = "|" + "---|" * len(header)
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


def write(pages: Mapping[Path, str]) -> None:
    """Writes pages, and prints which of them changed."""
    for path, text in pages.items():
        changed = path.read_text() != text
        path.write_text(text)
        sys.stdout.write(f"{path}: {'written' if changed else 'as it was'}\n")


def paragraph(factory: Callable[..., Any], opening: str) -> str:
    """What follows an opening in the docstring, up to the end of the paragraph, on one line."""
    doc = inspect.getdoc(factory) or ""
    match = re.search(rf"{opening}(.*?)(?=\n\n|\n[A-Z]\w+:|\Z)", doc, re.DOTALL)
    return " ".join(match[1].split()) if match else ""


def paper(factory: Callable[..., Any]) -> str:
    """Links to the papers of "Source:"; without a number, its first sentence."""
    source = paragraph(factory, "Source:")
    numbers = dict.fromkeys(re.findall(r"arXiv:? ?(\d{4}\.\d{4,5})", source))
    return ", ".join(map(arxiv_link, numbers)) or re.split(r"[.;:] ", source)[0].rstrip(".")


def arxiv_link(number: str) -> str:
    """A link to a paper, such as "2402.03300", in Markdown."""
    return f"[{number}](https://arxiv.org/abs/{number})"
