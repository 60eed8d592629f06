"""X1: prompts of unlike difficulty make more flat groups than their mean success rate predicts.

python -m docs.experiments.x1_degeneracy
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from docs.experiments import common
from docs.experiments.common import Check, Result
from jaxgrpo.cli import make_base
from jaxgrpo.evaluation.evaluate import make_questions, no_progress
from jaxgrpo.evaluation.intervals import studentised
from jaxgrpo.experiments.probe.command import draw
from jaxgrpo.experiments.probe.measure import gap_influence
from jaxgrpo.training.rewarding import resolve_scorer
from jaxgrpo.training.stored_policy import config_for, find_policy
from jaxgrpo.update.diagnostics import jensen_gap

NAME = "x1_degeneracy"
SIZES = (2, 4, 8)
PROMPTS, SAMPLES = 1024, 64


class Drawn(NamedTuple):
    """Judged samples of the base model."""

    right: np.ndarray  # [P, N] bool
    level: np.ndarray  # [P], one more than the columns with a carry


class Gap(NamedTuple):
    """Degeneracy of groups of one size, by the samples of one half."""

    measured: float
    iid: float
    gap: float
    low: float
    high: float


def sample(prompts: int, samples: int, **base_options: Any) -> Drawn:
    """Makes the quickstart's base model and samples answers to training problems."""
    with tempfile.TemporaryDirectory() as folder:
        base = str(Path(folder) / "base")
        make_base.make_base(base, "arithmetic", **base_options)
        changes = {
            "eval.data": "task:arithmetic:train",
            "eval.scorer": "arithmetic",
            "eval.samples": samples,
            "eval.prompts": prompts,
            "rollout.prompts_per_step": 128,  # with 8 samples each: 1024 are decoded at once
            "rollout.max_prompt_tokens": 8,
            "rollout.max_completion_tokens": 24,
        }
        config = config_for(base, changes)
        policy, held_out = find_policy(Console(quiet=True), config)
        questions = make_questions(
            config.eval,
            held_out,
            resolve_scorer(
                config.eval.scorer, config.rewards, config.rollout.max_completion_tokens
            ),
            config.scorer_name,
            no_progress,
        )
        train = config.train
        drawn = config.eval.samples, train.seed, train.tokens_per_micro_batch
        answers = draw(policy, questions, *drawn)
    level = np.array([row["level"] for row in questions.rows])
    return Drawn(answers.scores > 0.5, level)


def estimate_gap(right: np.ndarray, size: int) -> Gap:
    """The estimates and the 99% interval of `jaxgrpo probe`."""
    correct = jnp.asarray(right.sum(1), jnp.int32)
    samples = jnp.full_like(correct, right.shape[1])
    measured, iid, gap = (float(estimate) for estimate in jensen_gap(correct, samples, size))
    influence = np.asarray(gap_influence(correct, samples, size))
    return Gap(measured, iid, gap, *studentised(gap, influence, 0.99))


def counted(right: np.ndarray, size: int) -> float:
    """The share of flat groups among groups of consecutive samples, as a run would see it."""
    wins = right.reshape(len(right), -1, size).sum(-1)
    return float(((wins == 0) | (wins == size)).mean())


def twice_the_variance(right: np.ndarray) -> float:
    """2 Var_x p_x, by the covariance of the rates of two halves, whose noise is independent."""
    half = right.shape[1] // 2
    return float(2 * np.cov(right[:, :half].mean(1), right[:, half:].mean(1))[0, 1])


def shuffled(right: np.ndarray) -> np.ndarray:
    """The same answers given to prompts at random: all prompts are equally hard."""
    return np.random.default_rng(0).permutation(right.ravel()).reshape(right.shape)


def level_rows(drawn: Drawn) -> list[list[object]]:
    rows = []
    for level in np.unique(drawn.level):
        right = drawn.right[drawn.level == level]
        rate = right.mean(1)
        flat = [estimate_gap(right, size).measured for size in SIZES]
        ends = [f"{share:.0%}" for share in ((rate < 0.05).mean(), (rate > 0.95).mean())]
        rows.append([int(level) - 1, len(right), float(rate.mean()), *ends, *flat])
    return rows


def checks(gaps: Sequence[Gap], control: Sequence[Gap], twice: float) -> list[Check]:
    criteria = [
        Check(
            f"measured less i.i.d. degeneracy at G = {size} is above 0, with 99% confidence",
            f"{gap.gap:.3f} ({gap.low:.3f} to {gap.high:.3f})",
            gap.low > 0,
        )
        for size, gap in zip(SIZES, gaps, strict=True)
    ]
    pair_gap = gaps[0]
    criteria.append(
        Check(
            "at G = 2 it is 2 Var p, estimated from other samples, within its interval",
            f"{twice:.3f}",
            pair_gap.low <= twice <= pair_gap.high,
        )
    )
    contains_zero = [gap.low <= 0 <= gap.high for gap in control]
    criteria.append(
        Check(
            "with the same answers assigned to prompts at random, each interval contains 0",
            ", ".join(f"{gap.gap:+.4f}" for gap in control),
            all(contains_zero),
        )
    )
    return criteria


def figure(drawn: Drawn, gaps: Sequence[Gap]) -> Figure:
    """Success rates; E f_G(p) above f_G(E p); degeneracy by group size."""
    drawing, (left, middle, right) = common.panels(3, 10.5, 3.3)
    rate = drawn.right.mean(1)
    edges = (np.arange(drawn.right.shape[1] + 2) - 0.5) / drawn.right.shape[1]
    left.hist(rate, edges, color="C0", weights=np.full(len(rate), 1 / len(rate)))
    left.axvline(rate.mean(), color="C1", lw=1.2, label=f"mean {rate.mean():.2f}")
    left.set(title="prompts by success rate", xlabel="success rate", ylabel="share of prompts")
    left.legend(fontsize=8)
    p = np.linspace(0, 1, 201)
    for size, gap, colour in zip(SIZES, gaps, ("C0", "C2", "C3"), strict=True):
        middle.plot(p, p**size + (1 - p) ** size, color=colour, lw=1)
        middle.plot([rate.mean()] * 2, [gap.iid, gap.measured], ":", color=colour, lw=1)
        middle.plot(rate.mean(), gap.iid, "o", color=colour, mfc="white", ms=5)
        middle.plot(rate.mean(), gap.measured, "o", color=colour, ms=5)
        middle.text(rate.mean() + 0.03, gap.measured, f"G = {size}", color=colour, va="center")
    middle.set(title="chance of a flat group", ylim=(-0.02, 1.02))
    middle.set_xlabel("success rate; full: mean over prompts, hollow: at their mean", fontsize=8)
    places = np.arange(len(SIZES))
    around = np.array([[gap.gap - gap.low, gap.high - gap.gap] for gap in gaps]).T
    right.bar(places - 0.2, [gap.measured for gap in gaps], 0.38, color="C0", label="measured")
    right.bar(places + 0.2, [gap.iid for gap in gaps], 0.38, color="C1", label="i.i.d.")
    right.errorbar(
        places - 0.2, [gap.measured for gap in gaps], around, fmt="none", ecolor="k", capsize=3
    )
    right.set(title="flat groups, 99% interval of the gap", ylim=(0, 1.02))
    right.set_xticks(places, [f"G = {size}" for size in SIZES])
    right.legend(fontsize=8)
    return drawing


def run(prompts: int = PROMPTS, samples: int = SAMPLES, **base_options: Any) -> Result:
    """Args: base_options: of `make_base.make_base`, to make a smaller base faster."""
    drawn = sample(prompts, samples, **base_options)
    first_half, second_half = np.split(drawn.right, 2, axis=1)
    gaps = [estimate_gap(first_half, size) for size in SIZES]
    control = [estimate_gap(shuffled(first_half), size) for size in SIZES]
    twice = twice_the_variance(second_half)
    rows = [
        [size, gap.measured, counted(second_half, size), gap.iid, gap.gap,
         f"{gap.low:.3f} to {gap.high:.3f}", gap.measured / gap.iid]
        for size, gap in zip(SIZES, gaps, strict=True)
    ]  # fmt: skip
    flat = [f"flat at G = {size}" for size in SIZES]
    parts = {
        "degeneracy": common.table(
            ("G", "measured", "counted", "i.i.d.", "gap", "99% interval", "ratio"), rows
        ),
        "levels": common.table(
            ("carries", "prompts", "success rate", "below 5%", "above 95%", *flat),
            level_rows(drawn),
        ),
        "pairs": f"2 Var p = {common.number(twice)}, and the gap at G = 2 is "
        f"{common.number(gaps[0].gap)}. The mean success rate is "
        f"{common.number(float(drawn.right.mean()))}, over {prompts} prompts.",
    }
    return Result(parts, checks(gaps, control, twice), lambda: figure(drawn, gaps))


if __name__ == "__main__":
    common.command(NAME, run)
