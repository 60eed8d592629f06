"""The samples of a run with turns, turn by turn, which a reader filters and sorts in the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxgrpo.data.storage import Place
from jaxgrpo.training.records.reading import is_number, read_samples, sample_steps
from jaxgrpo.training.records.report.blocks import cut_text, number, section, text
from jaxgrpo.training.records.report.record import (
    RewardSum,
    mean_advantage,
    strongest_first,
    total_reward,
)

MAX_STEPS = 8
MAX_ROWS = 24  # of a step

Row = Mapping[str, Any]

CONTROLS = """
<div class="box choose" id="choose" role="group" aria-label="which samples, in which order" hidden>
<label>Step <select id="step"><option value="">all</option>{steps}</select></label>
<label>Reward from <input id="reward-from" type="number" step="any"></label>
<label>to <input id="reward-to" aria-label="Reward to" type="number" step="any"></label>
<label>Tokens from <input id="length-from" type="number" min="0"></label>
<label>to <input id="length-to" aria-label="Tokens to" type="number" min="0"></label>
<label>Sort by <select id="sort"><option value="">latest step</option>
<option>reward</option><option>length</option><option>step</option></select></label>
<label>Order <select id="order"><option value="-1">highest first</option>
<option value="1">lowest first</option></select></label>
<p role="status" id="count"></p></div>
"""

SCRIPT = """
"use strict";
const at = id => document.getElementById(id);
const list = at("samples"), samples = [...list.children];
function isWithin(sample, name) {
  const value = sample.dataset[name], from = at(name + "-from").value, to = at(name + "-to").value;
  if (from === "" && to === "") return true;
  return value !== "" && (from === "" || +value >= +from) && (to === "" || +value <= +to);
}
function show() {
  const step = at("step").value, key = at("sort").value, sign = +at("order").value;
  let count = 0;
  for (const sample of samples) {
    const fits = (step === "" || sample.dataset.step === step)
      && isWithin(sample, "reward") && isWithin(sample, "length");
    sample.hidden = !fits;
    count += fits;
  }
  const sorted = [...samples];
  if (key) sorted.sort((a, b) => {
    const [x, y] = [a.dataset[key], b.dataset[key]];
    return (x === "") - (y === "") || sign * (x - y);
  });
  list.append(...sorted);
  at("order").disabled = !key;
  at("count").textContent = count + " of " + samples.length + " samples";
}
at("choose").hidden = false;
at("choose").addEventListener("input", show);
show();
"""
"""It reads numbers of the page and moves what is there; no text becomes markup."""


def read(folder: Place) -> list[dict[str, Any]]:
    """The samples of a run that a page shows: of the last step, the first, and some between them
    the groups with the largest advantages; [] where samples have no turns."""
    steps = sorted(sample_steps(folder))
    count = min(MAX_STEPS, len(steps))
    places = [round(place * (len(steps) - 1) / max(1, count - 1)) for place in range(count)]
    rows: list[Any] = []
    for place in reversed(places):
        step_rows = read_samples(folder, steps[place])
        if not any(row.get("turns") for row in step_rows):
            break
        rows += strongest_first(step_rows)[:MAX_ROWS]
    return rows


def render(rows: Sequence[Row], summing: RewardSum) -> str:
    """A section with every sample turn by turn, and what filters and sorts them by `SCRIPT`.

    Args:
      summing: how the run adds up rewards.
    """
    steps = sorted({row["step"] for row in rows})
    has_rewards = any(turn["reward"] for row in rows for turn in row.get("turns", ()))
    options = "".join(f"<option>{step}</option>" for step in steps)
    samples = "\n".join(_sample(row, summing, has_rewards) for row in rows)
    names = f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(map(str, steps))}"
    note = (
        f'<p class="muted">At most {MAX_ROWS} of a step, of the groups with the largest advantages.'
        " Striped text was not drawn by the policy: it is masked in the loss. All samples:"
        " jaxgrpo samples RUN --step N</p>"
    )
    body = f'{CONTROLS.format(steps=options)}<ol class="samples" id="samples">{samples}</ol>'
    return section(f"Conversations of {names}", note + body)


def _sample(row: Row, summing: RewardSum, has_rewards: bool) -> str:
    total, length = total_reward(row, summing), len(row["completion_ids"])
    measures = {"step": row["step"], "reward": "" if total is None else total, "length": length}
    attributes = " ".join(f'data-{name}="{text(value)}"' for name, value in measures.items())
    title = f"Step {row['step']}, row {row['row']}, sample {row['sample']}"
    parts = [_part("prompt", "prompt", row["prompt"])]
    for place, turn in enumerate(row.get("turns") or _single(row), start=1):
        parts += _turn(place, turn, has_rewards)
    return (
        f'<li class="box" {attributes}><h3>{text(title)}</h3>'
        f'<p class="muted">{text(" · ".join(_facts(row, total)))}</p>{"".join(parts)}</li>'
    )


def _single(row: Row) -> list[dict[str, Any]]:
    """A sample without turns, as one."""
    length = len(row["completion_ids"])
    turn = {"text": row["completion"], "tokens": length, "reply": "", "reply_tokens": 0}
    return [{**turn, "reward": None}]


def _facts(row: Row, total: float | None) -> Iterator[str]:
    rewards = ", ".join(
        f"{name} {number(value) if is_number(value) else 'not scored'}"
        for name, value in row["rewards"].items()
    )
    yield f"reward {'not scored' if total is None else number(total)} ({rewards})"
    yield f"advantage {number(mean_advantage(row['advantage']), '+.2f')}"
    turns = row.get("turns", ())
    masked, length = sum(turn["reply_tokens"] for turn in turns), len(row["completion_ids"])
    yield f"{length} tokens, {masked} of them masked"
    yield f"{len(turns)} turn{'s' * (len(turns) != 1)}"
    if row["truncated"]:
        yield "cut at the limit"
    if problem := row.get("problem"):
        yield f"its environment broke: {problem}"


def _turn(place: int, turn: Row, has_rewards: bool) -> Iterator[str]:
    reward = f" · reward {number(turn['reward'])}" if has_rewards else ""
    yield _part("drawn", f"turn {place} · {turn['tokens']} tokens{reward}", turn["text"])
    if turn["reply_tokens"]:
        yield _part("masked", f"answer · {turn['reply_tokens']} tokens, masked", turn["reply"])


def _part(kind: str, label: str, value: Any) -> str:
    return (
        f'<div class="part {kind}"><span class="muted">{text(label)}</span>'
        f"<pre>{cut_text(value)}</pre></div>"
    )
