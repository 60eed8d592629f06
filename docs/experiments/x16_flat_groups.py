"""X16: what the formulas make of groups whose rewards are all equal, in float32.

python -m docs.experiments.x16_flat_groups
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.common import Check, Result
from docs.make_advantages import fields
from jaxgrpo import advantages
from jaxgrpo.advantages import registry
from jaxgrpo.advantages.registry import plain_rollouts

NAME = "x16_flat_groups"
SIZES = tuple(range(6, 13))
CONSTANTS = 400
EPS = (1e-8, 1e-6, 1e-4)
MIXED = 64
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "grpo": [{"eps": 1e-8}, {"eps": 0.0}],
    "passk": [{"eps": 1e-8}],
    "like_trl": [
        {"scale_rewards": "batch"},
        {"scale_rewards": "none"},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    "like_verl": [
        {"adv_estimator": estimator}
        for estimator in (
            "grpo_passk",
            "rloo",
            "rloo_vectorized",
            "opo",
            "reinforce_plus_plus_baseline",
            "gdpo",
        )
    ],
}
"""Options of recipes that are run beside their defaults."""

WEIGHTS = {"first": 0.1, "second": 0.6, "third": 0.7}
"""Rewards of which the first two together are worth the third."""

SUMMED: dict[str, dict[str, Any]] = {
    "grpo": {"eps": 1e-8},
    **{name: {} for name in ("dapo", "dr_grpo", "dvao", "hicra", "like_trl", "like_verl")},
    **{name: {} for name in ("lite_ppo", "maxrl", "passk", "rloo", "scale_rl", "tree_grpo")},
}
"""Recipes that see nothing of several rewards but their weighted sum, with options."""


def constants(number: int = CONSTANTS) -> np.ndarray:
    """Rewards that few float32 hold exactly, [number, 1]."""
    return np.random.default_rng(0).uniform(0, 1, (number, 1)).astype(np.float32)


def total(value: np.ndarray) -> np.ndarray:
    """The sum over a group, one sample after the other, in float32; [N, 1]."""
    return functools.reduce(np.add, value.T)[:, None]


def centred(reward: np.ndarray) -> np.ndarray:
    return reward - total(reward) / np.float32(reward.shape[1])


def deviation(reward: np.ndarray, ddof: int = 1) -> np.ndarray:
    degrees = np.float32(reward.shape[1] - ddof)
    return np.sqrt(total(np.square(centred(reward))) / degrees)


def literal(reward: np.ndarray, eps: float, ddof: int = 1) -> np.ndarray:
    """(r - mean) / (std + eps), as it is written."""
    return centred(reward) / (deviation(reward, ddof) + np.float32(eps))


def leave_one_out(reward: np.ndarray) -> np.ndarray:
    """r - mean of the others, as it is written."""
    return reward - (total(reward) - reward) / np.float32(reward.shape[1] - 1)


def literal_rows() -> list[list[Any]]:
    """For each group size: share of flat groups that are not 0, and the largest |A|."""
    rows = []
    for size in SIZES:
        reward = np.repeat(constants(), size, 1)
        assert reward.dtype == literal(reward, 1e-6).dtype == np.float32
        share = f"{(centred(reward) != 0).any(1).mean():.0%}"
        by_std = [np.abs(literal(reward, eps)).max() for eps in EPS]
        by_n = np.abs(literal(reward, EPS[0], 0)).max()
        rows.append([size, share, *by_std, by_n, np.abs(leave_one_out(reward)).max()])
    return rows


def relative() -> dict[str, advantages.AdvantageTransform]:
    """Every recipe that compares the samples of a group, by default and with options."""
    recipes = {}
    for name in sorted(registry.recipes):
        for options in ({}, *OPTIONS.get(name, ())):
            recipe = advantages.build(name, options)
            option_text = ", ".join(f"{key}={value}" for key, value in options.items())
            if recipe.relative:
                recipes[f"{name}({option_text})" if option_text else name] = recipe
    return recipes


def rewards(number: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(rewards by name, which groups are flat): flat groups of each size, and mixed ones."""
    widest = SIZES[-1]
    size = np.append(np.repeat(SIZES, number), [widest] * MIXED)
    flat = np.arange(len(size)) < number * len(SIZES)
    in_group = np.arange(widest) < size[:, None]
    random = np.random.default_rng(1)
    named = {}
    for name in ("accuracy", "brier", "format"):
        value = np.repeat(np.tile(constants(number), (len(SIZES), 1)), widest, 1)
        if name != "accuracy":
            value = random.permuted(value, axis=0)[:, :1].repeat(widest, 1)
        mixed = random.integers(0, 2, (MIXED, widest)).astype(np.float32)
        if name == "accuracy":
            mixed = (np.arange(widest) == np.arange(MIXED)[:, None] % widest).astype(np.float32)
        value = np.concatenate([value, mixed])
        named[name] = np.where(in_group, value, np.float32(np.nan))
    return named, flat


def alike(arrays: dict[str, np.ndarray], flat: np.ndarray) -> dict[str, np.ndarray]:
    """Samples of flat groups that differ in nothing: then nothing may set them apart."""
    equal_arrays = {}
    for name, value in arrays.items():
        if value.shape[:2] == (len(flat), SIZES[-1]):
            rows = flat.reshape(-1, *[1] * (value.ndim - 1))
            value = np.where(rows, value[:, :1], value)
        equal_arrays[name] = value
    return equal_arrays


def recipe_rows(number: int = CONSTANTS) -> list[list[Any]]:
    """For each recipe: largest |A| on flat groups, share of mixed groups with a signal."""
    named, flat = rewards(number)
    single_reward = {"reward": named["accuracy"]}
    recipes = relative()
    rewards_by_recipe = {name: named if name == "rlcr" else single_reward for name in recipes}
    return chain_rows(recipes, rewards_by_recipe, named["accuracy"], flat)


def chain_rows(
    recipes: Mapping[str, advantages.AdvantageTransform],
    rewards_by_recipe: Mapping[str, dict[str, np.ndarray]],
    success: np.ndarray,
    flat: np.ndarray,
) -> list[list[Any]]:
    """Runs recipes, each on its rewards, in one program; samples of flat groups are alike."""

    @jax.jit
    def run(rewards_by_recipe: Any, sample_fields: Any) -> dict[str, jax.Array]:
        values = {}
        for name, recipe in recipes.items():
            rollouts, spec = plain_rollouts(rewards_by_recipe[name], **sample_fields)
            values[name] = advantages.compute(recipe, rollouts, recipe.init(spec))[0].value
        return values

    sample_fields = alike(fields(np.nan_to_num(success)), flat)
    # A teacher who differs, and known answers that are trained, teach flat groups too.
    disagrees = np.where(flat[:, None], 0, np.nan_to_num(success))[..., None]
    sample_fields["teacher_logp"] = sample_fields["trainer_logp"] + disagrees
    sample_fields["answered"] = np.zeros_like(sample_fields["answered"])
    values = run(*jax.tree.map(jnp.asarray, (dict(rewards_by_recipe), sample_fields)))
    return [_row(name, value, flat) for name, value in values.items()]


def sum_rows(number: int = CONSTANTS) -> list[list[Any]]:
    """As `recipe_rows`, where samples of a flat group earned other rewards of one exact total."""
    random = np.random.default_rng(2)
    shape = number, SIZES[-1]
    pair = random.integers(0, 2, shape)
    pair[:, :2] = 0, 1  # both are in every group
    alone = 1 - pair
    pair, alone = (
        np.concatenate([x, random.integers(0, 2, (MIXED, SIZES[-1]))]) for x in (pair, alone)
    )
    named = dict(zip(WEIGHTS, (pair, pair, alone), strict=True))
    named = {name: value.astype(np.float32) for name, value in named.items()}
    flat = (pair + alone == 1).all(1)
    recipes = {
        name: advantages.build(name, {"weights": WEIGHTS, **options})
        for name, options in SUMMED.items()
    }
    success = pair.astype(np.float32)
    return chain_rows(recipes, dict.fromkeys(recipes, named), success, flat)


def _row(name: str, value: jax.Array, flat: np.ndarray) -> list[Any]:
    """Name, number of flat groups, largest |A| there, share of the others with a signal."""
    signal = np.abs(np.asarray(value)).reshape(len(flat), -1)
    alive = (signal[~flat] > 0).any(1).mean()
    return [f"`{name}`", int(flat.sum()), float(signal[flat].max()), f"{alive:.0%}"]


def figure() -> Figure:
    """|A| over the constants at G = 7, and the largest |A| over group sizes."""
    drawing, (left, right) = common.panels(2, 8.2, 3.3)
    value = constants()
    for eps, colour in zip(EPS, ("C3", "C1", "C0"), strict=True):
        size = np.abs(literal(np.repeat(value, 7, 1), eps)).max(1)
        left.plot(value[size > 0], size[size > 0], ".", ms=3, color=colour, label=f"eps = {eps:g}")
        largest = [np.abs(literal(np.repeat(value, g, 1), eps)).max() for g in SIZES]
        right.plot(SIZES, largest, "o-", ms=3, color=colour, label=f"eps = {eps:g}")
    left.set(title="seven equal rewards: |A|", xlabel="the reward", yscale="log", ylim=(1e-5, 2))
    right.set(title="largest |A| of 400 flat groups", xlabel="group size", yscale="log")
    right.set_ylim(1e-5, 2)
    right.text(6, 1.5e-5, "jaxgrpo: exactly 0", fontsize=8)
    left.legend(fontsize=7, loc="lower right")
    return drawing


def run(number: int = CONSTANTS) -> Result:
    by_size, by_recipe, by_sum = literal_rows(), recipe_rows(number), sum_rows(number)
    largest = np.array([row[2:5] for row in by_size], float).max(0)
    loud, loud_sums = ([row[0] for row in rows if row[2] != 0] for rows in (by_recipe, by_sum))
    silent = [row[0] for row in by_recipe + by_sum if row[3] == "0%"]
    checks = [
        Check(
            f"max |A| is exactly 0 in {len(by_recipe)} relative recipes",
            ", ".join(loud) or "0 in all",
            not loud,
        ),
        Check(
            f"and in {len(by_sum)} where totals of several rewards differ by rounding alone",
            ", ".join(loud_sums) or "0 in all",
            not loud_sums,
        ),
        Check("each of them gives mixed groups a signal", ", ".join(silent) or "yes", not silent),
        Check(
            "as written, eps 1e-8 and 1e-6 reach |A| > 0.5 and > 0.05",
            f"{largest[0]:.2f} and {largest[1]:.2f}",
            bool(largest[0] > 0.5 and largest[1] > 0.05),
        ),
    ]
    header = ["G", "not 0", *(f"eps {eps:g}" for eps in EPS), "eps 1e-08, by n", "r − others"]
    columns = ("recipe", "flat groups", "max |A| there", "mixed groups with a signal")
    parts = {
        "literal": common.table(header, by_size),
        "recipes": common.table(columns, by_recipe),
        "sums": common.table(columns, by_sum),
    }
    return Result(parts, checks, figure)


if __name__ == "__main__":
    common.command(NAME, run)
