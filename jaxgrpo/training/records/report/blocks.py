"""The blocks that HTML pages are made of.

A page loads nothing. It runs nothing, or the one script that is named by its hash in the page's own
policy. Every text that a model, a data set or a user wrote goes through `text`. Should one ever
slip by, the policy still forbids other scripts, connections and any image that is not in the file.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgrpo.training.records.report.record import shown, visible

MAX_CHARACTERS = 1500  # of a prompt or completion
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
CSS = """
body { font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; color: #1f2933; background: #f4f6f8;
  margin: 0 auto; max-width: 1320px; padding: 20px 24px; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 16px; margin: 26px 0 8px; }
.muted { color: #5b6770; } .status { font-size: 12px; border-radius: 9px; padding: 2px 9px;
  background: #dde5ec; vertical-align: 3px; margin-left: 8px; font-weight: normal; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin-top: 14px; }
.tile, figure, .box { background: #fff; border: 1px solid #dfe4e9; border-radius: 8px; }
.tile { padding: 8px 16px 9px; min-width: 120px; } .tile b { font-size: 20px; display: block; }
.tile span { font-size: 12px; color: #5b6770; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); gap: 10px; }
figure { margin: 0; padding: 6px 6px 8px; } figure img { width: 100%; display: block; }
figcaption { font-size: 12px; color: #5b6770; padding: 0 6px; }
.box { padding: 4px 14px; overflow-x: auto; } ul.box { list-style: none; margin: 0; }
ul.box li { padding: 5px 0; border-top: 1px solid #eceff2; } ul.box li:first-child { border: 0; }
.holds { color: #a4410a; font-weight: 600; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 5px 12px 5px 0; vertical-align: top;
  border-top: 1px solid #eceff2; } tr:first-child th { border-top: 0; color: #5b6770; }
td.n, th.n { text-align: right; white-space: nowrap; width: 1%; padding-left: 22px;
  font-variant-numeric: tabular-nums; }
.fit { display: inline-block; max-width: 100%; } .fit table { width: auto; }
.fit .n { width: auto; } .fit th { vertical-align: bottom; }
.fit th.n { white-space: normal; }
tr.group td { border-top: 2px solid #cfd6dd; }
pre { margin: 0; font: 12px/1.4 "DejaVu Sans Mono", ui-monospace, monospace;
  display: inline-block; max-width: 100%; max-height: 12em; vertical-align: middle;
  white-space: pre-wrap; overflow-wrap: anywhere; overflow-y: auto; unicode-bidi: plaintext; }
.choose { display: flex; flex-wrap: wrap; gap: 6px 16px; align-items: baseline; padding: 8px 14px; }
.choose[hidden] { display: none; } .choose input { width: 6em; } .choose p { margin: 0; }
ol.samples { list-style: none; padding: 0; } ol.samples li { margin-top: 10px; }
h3 { font-size: 14px; margin: 6px 0 0; } li p { margin: 0 0 4px; } .part { margin: 0 0 6px; }
.part span { font-size: 12px; } .part pre { display: block; max-height: none; padding: 4px 8px;
  border-left: 4px solid #cfd6dd; } .drawn pre { border-color: #2563a8; background: #f2f6fb; }
.masked pre { border-color: #d9822b; border-left-style: dashed; background:
  repeating-linear-gradient(135deg, #fff, #fff 6px, #f5efe6 6px, #f5efe6 9px); }
td.prompt { width: 32%; } td.good { color: #23724b; } td.bad { color: #a23b3b; }
"""


def number(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None else f"{value:{form}}"


def section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>\n{body}"


def nothing(why: str) -> str:
    return f'<div class="box muted"><p>{why}</p></div>'


def document(title: str, body: str, script: str = "") -> str:
    """The page. Args: script: that it runs at its end."""
    end = f"<script>{script}</script>\n" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{text(title)} - jaxgrpo</title>\n'
        f"<style>{CSS}</style></head>\n<body>\n{body}\n{end}</body></html>\n"
    )


def _policy(script: str) -> str:
    """POLICY, which also allows this script and no other."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return f"{POLICY}; script-src 'sha256-{digest}'" if script else POLICY


def text(value: Any) -> str:
    """As text between tags or in quotes, whatever it holds."""
    return html.escape(visible(str(value)), quote=True)


def tiles(values: Mapping[str, str]) -> str:
    """Label -> number, side by side."""
    blocks = "".join(
        f'<div class="tile"><b>{text(value)}</b><span>{text(label)}</span></div>'
        for label, value in values.items()
    )
    return f'<div class="tiles">{blocks}</div>'


def table(rows: Sequence[Sequence[str]]) -> str:
    """Cells as texts; the first row is the head, every column but the first holds numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        kind = [""] + [' class="n"'] * (len(cells) - 1)
        return "".join(
            f"<{tag}{k}>{text(cell)}</{tag}>" for k, cell in zip(kind, cells, strict=True)
        )

    head, *body = rows
    lines = [f"<tr>{line(head, 'th')}</tr>", *(f"<tr>{line(row, 'td')}</tr>" for row in body)]
    return f'<div class="box fit"><table>{"".join(lines)}</table></div>'


def figure(title: str, svg: str, note: str) -> str:
    """A chart, drawn as an image that can run nothing."""
    data = base64.b64encode(svg.encode()).decode("ascii")
    return (
        f'<figure><img alt="{text(title)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{text(note)}</figcaption></figure>"
    )


def cut_text(value: Any) -> str:
    """A prompt, a completion or a part of one, whose end is left out where it is long."""
    full_text = shown(value)
    excess = len(full_text) - MAX_CHARACTERS
    return text(
        f"{full_text[:MAX_CHARACTERS]}… ({excess:,} more characters)" if excess > 0 else full_text
    )
