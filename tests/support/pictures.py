"""Charts of a page, and where in them a legend stands."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

GROUP = "{http://www.w3.org/2000/svg}g"


def pictures(page: str) -> list[str]:
    """The SVG texts of a page."""
    encoded = re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", page)
    return [base64.b64decode(text).decode() for text in encoded]


def legends(svg: str) -> tuple[int, int]:
    """How many legends a chart has in all, and how many in its axes, over the curves."""
    root = ElementTree.fromstring(svg)
    axes = [group for group in root.iter(GROUP) if group.get("id", "").startswith("axes_")]
    return _count(root), sum(map(_count, axes))


def _count(element: ElementTree.Element) -> int:
    return sum(group.get("id", "").startswith("legend_") for group in element.iter(GROUP))
