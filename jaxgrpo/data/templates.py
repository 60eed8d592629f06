"""Prompts made of columns: "{question} Think step by step."

Between braces stands the name of a column, whatever its characters; "{{" and "}}" are braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxgrpo.core.errors import InputError

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def is_template(text: str) -> bool:
    """Whether a text is a template and no column's name: by its braces.

    >>> is_template("{question} Think."), is_template("question")
    (True, False)
    """
    return "{" in text or "}" in text


def placeholders(template: str) -> list[str]:
    """The columns that a template names, each once.

    Raises: InputError on a brace without its partner, and where no column is named.
    >>> placeholders("{a} of {{b}} and {c}")
    ['a', 'c']
    """
    names = []
    for piece in _PIECE.finditer(template):
        if piece.group() in ("{", "}") or piece.group(1) == "":
            what = "names no column" if piece.group(1) == "" else "has no partner"
            raise InputError(
                f"data.prompt = {template!r}: the brace at character {piece.start()} {what}: "
                "write {column} for a column's value, {{ or }} for a brace"
            )
        if piece.group(1) is not None:
            names.append(piece.group(1))
    if not names:
        raise InputError(
            f"data.prompt = {template!r} names no column, so all prompts would be the same: "
            "write {column} where a column's value stands"
        )
    return list(dict.fromkeys(names))


def fill(template: str, row: Mapping[str, Any]) -> str:
    """The template with the values of a row, which has all its columns.

    >>> fill("{{{n}}} + {n}", {"n": 3})
    '{3} + 3'
    """

    def value(piece: re.Match[str]) -> str:
        name = piece.group(1)
        return piece.group()[0] if name is None else str(row[name])

    return _PIECE.sub(value, template)
