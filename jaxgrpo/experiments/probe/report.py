"""A probe in the terminal: tables of its numbers, then the advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxgrpo.experiments.probe.measure import PER
from jaxgrpo.training.report.record import visible

BAR = 30  # characters of a full bar
KINDS = {
    "diversity": {
        "distinct_completions": "different completions per prompt",
        "same_completion": "two completions of a prompt are the same",
        "distinct_answers": "different answers per prompt",
        "same_answer": "two answers of a prompt are the same",
    },
    "format": {
        "cut": "cut at the length limit",
        "blank": "blank",
        "tags": "think and answer tags",
        "answered": "an answer can be read",
        "mean_tokens": "mean length, tokens",
        "mean_tokens_right": "of right ones",
        "mean_tokens_wrong": "of wrong ones",
    },
    "calibration": {
        "stated": "a confidence is stated",
        "mean": "mean confidence",
        "brier": "Brier score",
        "ece": "calibration error, ten bins",
        "auroc": "AUROC",
    },
    "agreement": {
        "mean": "sampler against trainer, mean",
        "max": "sampler against trainer, largest",
        "kl": "KL(sampler || trainer)",
    },
}
"""Further numbers, and what they are called."""

SHARES = frozenset(["same_completion", "same_answer", "cut", "blank", "tags", "answered", "stated"])


def show(console: Console, found: Mapping[str, Any]) -> None:
    """Everything that a probe found, as `probing.main` puts it together."""
    console.print(Text(title(found), style="bold"))
    console.print(_successes(found))
    console.print(_passes(found))
    console.print(_groups(found))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in others(found):
        table.add_row(name, value)
    console.print(table)
    advice = Table.grid(padding=(0, 2))
    for one in found["advice"]:
        why = Text(f"because {visible(one['why'])}", style="dim")
        advice.add_row(Text(one["about"], style="bold"), Text(visible(one["says"])))
        advice.add_row("", why)
    console.print(Text("what to make of it", style="bold"))
    console.print(advice)


def title(found: Mapping[str, Any]) -> str:
    """What was asked."""
    names = {name: visible(str(found[name])) for name in ("model", "data", "reward")}
    return (
        f"{names['model']} on {found['prompts']} prompts of {names['data']}: {found['samples']} "
        f"samples each at temperature {found['temperature']:g}, judged by {names['reward']}"
    )


def number(value: float | None, form: str = ".3f") -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None or value != value else format(value, form)


def span(ends: Any, form: str = ".3f") -> str:
    """An interval."""
    low, high = ends
    return "–" if low != low else f"{low:{form}} to {high:{form}}"


def ranges(samples: int) -> list[range]:
    """Counts of successes that share a bar: none, all, and up to four parts between.

    >>> ranges(16)
    [range(0, 1), range(1, 5), range(5, 9), range(9, 13), range(13, 16), range(16, 17)]
    """
    parts = min(4, samples - 1)
    step = -(-(samples - 1) // parts)
    inner = [range(low, min(low + step, samples)) for low in range(1, samples, step)]
    return [range(1), *inner, range(samples, samples + 1)]


def others(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, number) of all that has no table of its own."""
    for kind, names in KINDS.items():
        of = found.get(kind) or {}
        for name, label in names.items():
            if name in of:
                form = ".1%" if name in SHARES else ".2e" if kind == "agreement" else ".3g"
                unit = " nats per token" if kind == "agreement" and of[name] == of[name] else ""
                yield label, number(of[name], form) + unit
    for name, value in found["format"].get("formats", {}).items():
        yield visible(name), number(value)


def _successes(found: Mapping[str, Any]) -> Table:
    success, samples = found["success"], found["samples"]
    counts = success["histogram"]
    rate = f"mean success rate {number(success['rate'])} ({span(success['ci'])})"
    if success["unscored"]:
        rate += f"; {success['unscored']:.1%} of the samples could not be scored"
    table = _table(rate, "successes", "prompts", "share", "")
    for among in ranges(samples):
        name = f"{among[0]}" if len(among) == 1 else f"{among[0]} to {among[-1]}"
        held = int(sum(counts[k] for k in among))
        share = held / max(sum(counts), 1)
        table.add_row(f"{name} of {samples}", f"{held}", f"{share:.1%}", "█" * round(share * BAR))
    table.columns[-1].justify = "left"
    return table


def _passes(found: Mapping[str, Any]) -> Table:
    table = _table("at least one of k samples is right", "", "value", _interval(found))
    for k, one in found["pass_at"].items():
        table.add_row(f"pass@{k}", number(one["value"]), span(one["ci"]))
    return table


def _groups(found: Mapping[str, Any]) -> Table:
    step = f"live groups and tokens per step of {found['prompts_per_step']} prompts"
    shares = ("flat", "fail", "pass", "i.i.d.", "gap")
    names = ("G", *shares, _interval(found), "live", "tokens", f"per {PER}", "lucky")
    title = (
        "flat groups, of these all fail and all pass, and i.i.d.;\n"
        f"{step}, and per {PER} samples; of live groups, lucky ones"
    )
    table = _table(title, *names)
    for size, group in found["degeneracy"].items():
        table.add_row(
            str(size),
            *(number(group[name]) for name in ("measured", "all_fail", "all_pass", "iid", "gap")),
            span(group["ci"]),
            number(group["live_groups"], ".1f"),
            number(group["live_tokens"], ".0f"),
            number(group[f"live_groups_per_{PER}_samples"], ".0f"),
            number(group["lucky"]),
        )
    return table


def _interval(found: Mapping[str, Any]) -> str:
    return f"{found['level'] * 100:g}% interval"


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table
