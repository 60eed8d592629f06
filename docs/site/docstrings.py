"""How the site reads docstrings: what follows "Source:" or "Raises:" is a paragraph of its own,
examples are code, and the fields of a class are a list, each with its docstring or its comment."""

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


def described(field: Attribute) -> str:
    """What is said about a field: in its docstring, or in the comment on its first line."""
    if field.docstring is not None:
        return " ".join(field.docstring.value.split())
    comment = COMMENT.search(field.source.splitlines()[0]) if field.source else None
    if comment:
        return comment[1]
    return f"`{field.value}` by default" if field.value is not None else "required"


class OurDocstrings(Extension):
    """Rewrites the docstrings after they are read; a class lists its fields in its own."""

    def on_object(self, *, obj: Object, loader: GriffeLoader, **kwargs: Any) -> None:
        """Called once for every module, class, function and attribute."""
        if isinstance(obj, Attribute) and obj.parent is not None and obj.parent.is_class:
            return  # it is listed by its class
        text = as_markdown(obj.docstring.value) if obj.docstring is not None else ""
        fields: list[str] = []
        for member in obj.members.values() if obj.is_class else ():
            if isinstance(member, Attribute) and member.annotation and not member.is_private:
                fields.append(f"  {member.name}: {escaped(described(member))}")
                member.docstring = None  # so that it has no heading of its own
        if fields:
            text = "\n".join([text, "", "Attributes:", *fields])
        if text:
            parser, options = loader.docstring_parser, loader.docstring_options
            obj.docstring = Docstring(text, parent=obj, parser=parser, parser_options=options)
