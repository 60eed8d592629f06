"""How the site reads docstrings: what follows "Source:" or "Raises:" is a paragraph of its own,
examples are code, and a field whose comment describes it has that comment as its docstring."""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Docstring, Extension, GriffeLoader, Object

LABELS = "Raises|Source|Signal|Metrics|Shapes|Streams|Fields|State|Returns|Yields|Args|Reads"
LABEL = re.compile(rf"(^|(?<=[.)]) {{1,2}})({LABELS}): (?=\S)")
SECTION = re.compile(r"^(Args|Returns|Yields|Raises):$")
COMMENT = re.compile(r"  # (.+)$")
CODE = re.compile(r"(`[^`]*`)")


def escaped(line: str) -> str:
    """Prose in which `<` is no HTML."""
    return "".join(
        part if part.startswith("`") else part.replace("<", "&lt;") for part in CODE.split(line)
    )


def as_markdown(text: str) -> str:
    """A docstring of ours as Markdown with Google's sections."""
    lines: list[str] = []
    example = section = False
    for line in text.splitlines():
        if example and not line.strip():
            lines.append("```")
            example = False
        if not example and line.startswith(">>> "):
            lines += ["", "```pycon"]
            example = True
        section = bool(SECTION.match(line)) or (section and bool(line.strip()))
        if example or (line.startswith("    ") and not section):
            lines.append(line)
        elif line.startswith(" "):
            lines.append(escaped(line))
        else:
            lines += LABEL.sub(r"\n\n**\2:** ", escaped(line)).split("\n")
    return "\n".join([*lines, "```"] if example else lines)


class OurDocstrings(Extension):
    """Rewrites the docstrings after they are read."""

    def on_object(self, *, obj: Object, loader: GriffeLoader, **kwargs: Any) -> None:
        """Called once for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        elif isinstance(obj, Attribute) and obj.parent is not None and obj.parent.is_class:
            found = COMMENT.search(obj.source.splitlines()[0]) if obj.source else None
            if found:
                obj.docstring = Docstring(escaped(found[1]), parent=obj)
