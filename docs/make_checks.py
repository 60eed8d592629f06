"""Computes the tables of what methods climb, in docs/advantages.md and docs/losses.md, and
that of the laws in docs/check.md.

    python -m docs.make_checks     (make checks, some minutes)

Each row is what `jaxgrpo check` finds for a recipe, a surrogate, a reduction or a penalty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from docs.make_losses import OF_OTHERS
from docs.pages import FOLDER, between, markdown, write
from jaxgrpo.advantages import registry as recipes
from jaxgrpo.core.errors import InputError
from jaxgrpo.experiments.check.command import scale_text
from jaxgrpo.experiments.check.laws import LAWS, broken
from jaxgrpo.experiments.check.method import make_method, read_method
from jaxgrpo.experiments.check.targets import ENTROPY
from jaxgrpo.experiments.check.verdict import EXACT, SIZES, Report, Sizes, check
from jaxgrpo.losses import registry as losses

OF_LOSSES: Sizes = {**SIZES, ("bandit", 1): (4,), ("bigram", 1): (2,)}
"""The group sizes of the tables of losses, whose chain is `rloo`, the same for every size."""
OPTIONS: dict[str, dict[str, Any]] = {"constant": {"length": 2.0}}
"""Of a reduction that has no default."""
PENALTIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{
        f"`{name}`, {level}": (losses.penalties[name], {"beta": 1.0, "level": level})
        for name in ("k2", "forward_kl_k3", "reverse_kl_off_policy")
        for level in ("token", "sequence")
    },
    "`full_kl`": (losses.penalties["full_kl"], {"beta": 1.0}),
    "`bonus`": (losses.entropies["bonus"], {"coefficient": 1.0}),
}
"""How a penalty is called in its table -> what makes it, and its options."""


@functools.cache
def report_recipe(name: str) -> Report | str:
    """What is said of a recipe; or why it cannot be checked."""
    try:
        return check(read_method(name))
    except InputError as error:
        return str(error).partition(": ")[2].partition(";")[0]


@functools.cache
def report_surrogate(name: str) -> Report | str:
    """What is said of a surrogate; or why it cannot be checked."""
    try:
        return check(make_method(name, surrogate=name), OF_LOSSES)
    except InputError as error:
        return str(error).partition(": ")[2].partition(";")[0]


@functools.cache
def report_reduction(name: str) -> Report:
    return check(make_method(name, reduction={"use": name, **OPTIONS.get(name, {})}), OF_LOSSES)


def recipe_table(names: Sequence[str] | None = None) -> str:
    """What every recipe climbs, in Markdown."""
    header = (
        *("recipe", "climbs", "times its gradient", "off by", "cosine, 0/1", "cosine, graded"),
        *("noise", "all fail; all pass", "does not keep"),
    )
    return markdown(header, map(_recipe_row, sorted(recipes.recipes) if names is None else names))


def _recipe_row(name: str) -> list[str]:
    report = report_recipe(name)
    if isinstance(report, str):
        return [f"`{name}`", f"not checked: {report}", *["–"] * 7]
    graded = [row.cosine for row in report.rows
              if row.rewards == "graded" and not row.staleness and row.size > EXACT]  # fmt: skip
    flat = [report.flat_groups[end] for end in ("all_fail", "all_pass")]
    return [
        f"`{name}`",
        *_climbs(report),
        f"{report.cosine:.3f}",
        f"{np.mean(graded):.3f}" if graded else "refused",
        f"{report.noise:.2f}",
        "; ".join("left out" if value is None else f"{value:+.3g}" if value else "0"
                  for value in flat),
        _broken(report),
    ]  # fmt: skip


def surrogate_table() -> str:
    """What every surrogate climbs, in Markdown."""
    header = ("surrogate", "climbs", "times its gradient", "off by", "stale: cosine", "off by",
              "does not keep")  # fmt: skip
    rows = []
    for name in sorted(losses.surrogates.keys() - OF_OTHERS.keys()):
        report = report_surrogate(name)
        if isinstance(report, str):
            rows.append([f"`{name}`", f"not checked: {report}", *["–"] * 5])
            continue
        stale = [row for row in report.rows if row.staleness and row.rewards == "binary"]
        means = [np.mean([row.cosine for row in stale]),
                 np.mean([row.bias[report.target] for row in stale])]  # fmt: skip
        stale_cells = [f"{means[0]:.4f}", f"{means[1]:.1%}"]
        rows.append([f"`{name}`", *_climbs(report), *stale_cells, _broken(report)])
    return markdown(header, rows)


def reduction_table() -> str:
    """What every reduction climbs, in Markdown."""
    header = ("reduction", "climbs", "times its gradient", "off by", "does not keep")
    rows = []
    for name in sorted(losses.reductions):
        report = report_reduction(name)
        rows.append([f"`{name}`", *_climbs(report), _broken(report)])
    return markdown(header, rows)


def penalty_table() -> str:
    """What the penalties climb by themselves, in Markdown."""
    rows = []
    for label, (factory, options) in PENALTIES.items():
        method = make_method("penalty", penalties=(factory(**options),))
        penalty = check(method, OF_LOSSES).penalty or {}
        what = penalty["climbs"]
        sign = "up" if what == ENTROPY else "down"
        if what == "other":
            what = f"none; nearest {penalty['nearest']}"
        what = what.replace("policy", "π").replace("reference", "ref").replace(" || ", "‖")
        rows.append([label, sign, what, f"{penalty['cosine']:.3f}"])
    return markdown(("penalty", "goes", "the gradient of", "cosine with −∇KL(π‖ref)"), rows)


def law_table() -> str:
    """What every law says, in Markdown."""
    return markdown(("law", "holds where"), [(name, text) for name, text in LAWS.items()])


def _climbs(report: Report) -> list[str]:
    if report.climbs in ("other", "nothing"):
        return [report.climbs, scale_text(report), f"{report.bias:.1%}"]
    bias = "0" if report.bias < EXACT else f"{report.bias:.1%}"
    is_down = report.climbs == "divergence"
    target = f"minus a divergence, nearest {report.target}" if is_down else report.target
    return [target, scale_text(report), bias]


def _broken(report: Report) -> str:
    return ", ".join(broken(report.laws)) or "–"


def pages(names: Sequence[str] = ("check.md", "advantages.md", "losses.md")) -> dict[Path, str]:
    """Pages with tables of checks -> what they should hold."""
    tables: Mapping[str, Mapping[str, Callable[[], str]]] = {
        "check.md": {"laws": law_table},
        "advantages.md": {"climbs": recipe_table},
        "losses.md": {
            "surrogates climb": surrogate_table,
            "reductions climb": reduction_table,
            "penalties climb": penalty_table,
        },
    }
    written = {}
    for name in names:
        text = (FOLDER / name).read_text()
        for marker, make in tables[name].items():
            text = between(text, f"<!-- {marker} -->\n", "\n<!-- end -->", make())
        written[FOLDER / name] = text
    return written


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    write(pages())
