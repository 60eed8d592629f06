"""A run as data, and a page of it as a browser would take it."""

from __future__ import annotations

import html.parser
from typing import Any

from jaxgrpo.training.records.report.record import FINISHED, Record

EVIL = (
    '<img src=x onerror="alert(1)"></pre></td><script>alert(2)</script>\u202e\x1b[31m\udc80\'&amp;'
)


def row(**changes: Any) -> dict[str, Any]:
    sample = {
        "step": 3,
        "ordinal": 0,
        "row": 0,
        "sample": 0,
        "prompt": "1+1=",
        "completion": "2",
        "completion_ids": [3],
        "logps": [-0.1],
        "rewards": {"right": 1.0},
        "advantage": 0.5,
        "truncated": False,
    }
    return sample | changes


def record(**changes: Any) -> Record:
    lines = [{"step": 0, "eval/accuracy": 0.25, "eval/pass@16": 0.5, "eval/pass@4": 0.4}]
    for step in range(1, 4):
        lines.append(
            {
                "step": step,
                "reward": 0.1 * step,
                "rewards/right/mean": 0.1 * step,
                "groups/all_fail": 0.5,
                "groups/mixed": 0.25,
                "groups/all_pass": 0.25,
                "grad_norm": 10.0**-step,
                "kl": None,
                "num_tokens": 100,
                "time/step": 2.0,
            }
        )
    lines[-1] |= {"eval/accuracy": 0.75, "eval/pass@4": 0.9}
    values = {
        "name": "run",
        "status": FINISHED,
        "config": {"train": {"steps": 3}, "model": {"path": "a/b/base"}, "recipe": "grpo"},
        "lines": lines,
        "summary": {"step": 3},
        "samples": [row()],
        "warnings": [],
        "active": frozenset(),
    }
    return Record(**(values | changes))


class Seen(html.parser.HTMLParser):
    """Tags, attributes and texts as a browser would take them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


ALLOWED = {"html", "head", "meta", "link", "title", "style", "body", "h1", "h2", "div", "span", "b"}
ALLOWED |= {"ul", "li", "p", "figure", "figcaption", "img", "table", "tr", "th", "td", "pre"}
