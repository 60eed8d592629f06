"""X2: expected gradients of advantages in closed form, and how noisy each is.

python -m docs.experiments.x2_closed_forms
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.bandit import Bandit, bandit, slope
from docs.experiments.common import Check, Result, below
from jaxgrpo import advantages
from jaxgrpo.advantages.registry import plain_rollouts

NAME = "x2_closed_forms"
SIZES = tuple(range(2, 9))
RATES = (0.02, 0.1, 0.3, 0.5, 0.9)
BASELINE, COST = 0.37, 0.7
RECIPES: dict[str, Any] = {
    "grpo": ("grpo", {"eps": 0.0, "ddof": 0}),
    "grpo, n - 1": ("grpo", {"eps": 0.0}),
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce": "reinforce",
    "fixed baseline": ("reinforce", {"baseline": BASELINE}),
    "ema": "ema",
    "sign": "sign",
    "asymmetric": ("asymmetric", {"cost": COST}),
    "conditional_sign": "conditional_sign",
    "maxrl": "maxrl",
    "max_minus_second": [advantages.sum_rewards(), advantages.max_minus_second()],
    "passk, k = 2": ("passk", {"k": 2}),
    "contrastive_pairs": [advantages.sum_rewards(), advantages.contrastive_pairs()],
}


def std_weight(size: int, p: Any) -> Any:
    """E over N ~ Bin(G, p) of sqrt(N (G - N)) / (G p q)."""
    terms = (
        math.comb(size, n) * p**n * (1 - p) ** (size - n) * math.sqrt(n * (size - n))
        for n in range(size + 1)
    )
    return sum(terms) / (size * p * (1 - p))


CLOSED: dict[str, tuple[str, Callable[[int, Any], Any]]] = {
    "grpo": ("E √(N(G−N)) / (G p q)", std_weight),
    "grpo, n - 1": ("the same · √(1 − 1/G)", lambda g, p: std_weight(g, p) * math.sqrt(1 - 1 / g)),
    "dr_grpo": ("1 − 1/G", lambda g, p: 1 - 1 / g + 0 * p),
    "rloo": ("1", lambda g, p: 1 + 0 * p),
    "reinforce": ("1", lambda g, p: 1 + 0 * p),
    "fixed baseline": ("1, whatever it is", lambda g, p: 1 + 0 * p),
    "ema": ("1", lambda g, p: 1 + 0 * p),
    "sign": ("2", lambda g, p: 2 + 0 * p),
    "asymmetric": ("1 + c", lambda g, p: 1 + COST + 0 * p),
    "conditional_sign": (
        "1 − 1/G + p^(G−1) + q^(G−1)",
        lambda g, p: 1 - 1 / g + p ** (g - 1) + (1 - p) ** (g - 1),
    ),
    "maxrl": ("(1 − q^(G−1)) / p", lambda g, p: (1 - (1 - p) ** (g - 1)) / p),
    "max_minus_second": ("q^(G−1)", lambda g, p: (1 - p) ** (g - 1)),
    "passk, k = 2": ("2 q for G > 2", lambda g, p: (g > 2) * 2 * (1 - p)),
    "contrastive_pairs": ("1 − 1/G", lambda g, p: 1 - 1 / g + 0 * p),
}
"""Name -> (in words, weight on grad p) with rewards in {0, 1} and success rate p = 1 - q."""


class Groups(NamedTuple):
    """Every group of {0, 1}^G of all sizes, short ones filled up with unscored samples."""

    rewards: np.ndarray  # [N, G]
    size: np.ndarray  # [N]
    values: dict[str, np.ndarray]  # name of the recipe -> advantages [N, G]

    def select(self, size: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(rewards, advantages) of the groups of one size."""
        has_size = self.size == size
        return self.rewards[has_size, :size], self.values[name][has_size, :size]


@functools.cache
def groups() -> Groups:
    """The advantages of jaxgrpo's recipes, in float64."""
    rows = [bits for size in SIZES for bits in itertools.product([0.0, 1.0], repeat=size)]
    rewards = np.array([[*bits, *[np.nan] * (SIZES[-1] - len(bits))] for bits in rows])

    def run(rewards: jax.Array) -> dict[str, jax.Array]:
        values = {}
        for name, spec in RECIPES.items():
            recipe, options = spec if isinstance(spec, tuple) else (spec, None)
            recipe_chain = advantages.build(recipe, options)
            rollouts, rollout_spec = plain_rollouts(rewards)
            state = recipe_chain.init(rollout_spec)
            if name == "ema":  # its baseline is what it remembers of an earlier batch
                earlier, _ = plain_rollouts(jnp.full_like(rewards, BASELINE))
                state = advantages.compute(recipe_chain, earlier, state)[1]
            values[name] = advantages.compute(recipe_chain, rollouts, state)[0].value
        return values

    values = jax.jit(run)(jnp.asarray(rewards))
    return Groups(rewards, np.isfinite(rewards).sum(1), jax.tree.map(np.asarray, values))


def update(
    game: Bandit, rewards: np.ndarray, advantage: np.ndarray, where: Any = 1.0
) -> np.ndarray:
    """E[(1/G) sum_i A_i grad log pi(y_i) 1{where}]: all groups, each with its probability."""
    wins, size = rewards.sum(1), rewards.shape[1]
    chance = game.rate**wins * (1 - game.rate) ** (size - wins) * where
    up = chance @ (advantage * rewards).mean(1)
    down = chance @ (advantage * (1 - rewards)).mean(1)
    return up * game.class_mean(True) + down * game.class_mean(False)


def signal_to_noise(game: Bandit, rewards: np.ndarray, advantage: np.ndarray) -> float:
    """|E g|^2 / tr Cov g of the group's gradient; given who succeeded, samples are independent."""
    wins, size = rewards.sum(1), rewards.shape[1]
    chance = game.rate**wins * (1 - game.rate) ** (size - wins)
    mean = np.stack([game.class_mean(False), game.class_mean(True)])
    square = np.array([game.class_square(False), game.class_square(True)])
    drawn = rewards.astype(int)
    terms = mean[drawn] * advantage[..., None]
    total = (terms.sum(1) ** 2).sum(-1) - (terms**2).sum((1, 2))
    total = total + (advantage**2 * square[drawn]).sum(1)
    expected = (update(game, rewards, advantage) ** 2).sum()
    return float(expected / (chance @ total / size**2 - expected))


def listed_signal_to_noise(game: Bandit, size: int, advantage: Callable[..., np.ndarray]) -> float:
    """The same by listing every group of answers."""
    drawn = np.array(list(itertools.product(range(len(game.policy)), repeat=size)))
    chance = game.policy[drawn].prod(1)
    value = advantage(game.right[drawn].astype(float))
    gradient = (value[..., None] * game.score[drawn]).mean(1)
    expected = chance @ gradient
    square = (expected**2).sum()
    return float(square / (chance @ (gradient**2).sum(1) - square))


def weight_checks(all_groups: Groups) -> list[Check]:
    """Expected gradients against closed forms."""
    errors = {name: [] for name in RECIPES}
    split, eighth, limits = [], [], []
    for size, rate in itertools.product(SIZES, RATES):
        game = bandit(rate, spread=1.0)
        direction = slope(game)
        for name in RECIPES:
            expected = CLOSED[name][1](size, rate) * direction
            errors[name].append(
                np.abs(update(game, *all_groups.select(size, name)) - expected).max()
            )
        rewards, sign = all_groups.select(size, "sign")
        wins = rewards.sum(1)
        fail, won = (1 - rate) ** (size - 1), rate ** (size - 1)
        for where, weight in (
            (wins == 0, fail),
            (wins == size, won),
            ((wins > 0) & (wins < size), 2 - fail - won),
        ):
            split.append(np.abs(update(game, rewards, sign, where) - weight * direction).max())
        pass_at_g = slope(game, lambda p, size=size: 1 - (1 - p) ** size)
        all_fail = update(game, *all_groups.select(size, "asymmetric"), wins == 0)
        eighth.append(np.abs(all_fail - COST / size * pass_at_g).max())
        climbed = slope(
            game, lambda p, size=size: sum(((1 - (1 - p) ** k) / k for k in range(2, size)), p)
        )
        limits.append(np.abs(update(game, *all_groups.select(size, "maxrl")) - climbed).max())
        best = slope(game, lambda p, size=size: (1 - (1 - p) ** size) / size)
        limits.append(
            np.abs(update(game, *all_groups.select(size, "max_minus_second")) - best).max()
        )
    return [
        below(f"expected gradients of {len(RECIPES)} advantages", [*errors.values()]),
        below("Sign, split into all-fail, all-pass and mixed groups", split),
        below("equation 8: all-fail groups at cost c give (c/G) grad pass@G", eighth),
        below("maxrl climbs Σ_{k<G} pass@k / k, max_minus_second pass@G / G", limits),
    ]


def value_checks(all_groups: Groups) -> list[Check]:
    """What holds group by group: pairs, the largest advantage, the probability of flat groups."""
    pairs, largest, flat = [], [], []
    game = bandit(0.3, spread=1.0, right=2, answers=4)
    for size in SIZES:
        rewards, centred = all_groups.select(size, "dr_grpo")
        pairs.append(np.abs(centred - all_groups.select(size, "contrastive_pairs")[1]).max())
        top = [np.abs(all_groups.select(size, name)[1]).max() for name in ("grpo", "grpo, n - 1")]
        largest += [top[0] - math.sqrt(size - 1), top[1] - (size - 1) / math.sqrt(size)]
        wins = rewards.sum(1)
        for rate in RATES:
            chance = rate**wins * (1 - rate) ** (size - wins)
            counted = chance @ (all_groups.select(size, "grpo")[1] == 0).all(1)
            flat.append(counted - rate**size - (1 - rate) ** size)
    rewards, centred = all_groups.select(4, "dr_grpo")
    drawn = np.array(list(itertools.product(range(4), repeat=4)))
    for row in drawn:
        won, score = game.right[row], game.score[row]
        group = (rewards == won).all(1).argmax()
        listed = sum((a - b for a in score[won] for b in score[~won]), np.zeros(4)) / 4
        pairs.append(np.abs(centred[group] @ score - listed).max())
    gap = [  # prompts of two success rates, half of each: flat groups of two
        (sum(p**2 + (1 - p) ** 2 for p in two) / 2 - (m**2 + (1 - m) ** 2)) - 2 * np.var(two)
        for two in itertools.combinations(RATES, 2)
        for m in [np.mean(two)]
    ]
    return [
        below("centring is success − failure summed over pairs, / G", pairs),
        below("largest |A|: √(G−1) by n, (G−1)/√G by n − 1", largest),
        below("a group is flat with probability p^G + q^G", flat),
        below("Jensen: prompts of differing p have 2 Var p more flat pairs", gap),
    ]


NOISE = {
    "A = r": "reinforce",
    "sign": "sign",
    "centred": "dr_grpo",
    "std": "grpo",
    "oracle r − p": None,
}
FAILURE_COLUMNS = ("A = r", "sign", "centred")
CASES = ((0.02, 4), (0.1, 2), (0.1, 4), (0.3, 2), (0.3, 4), (0.5, 4), (0.9, 4))


def noise_rows(all_groups: Groups) -> list[list[Any]]:
    rows = []
    for rate, size in CASES:
        game, row = bandit(rate), [str(rate), size]
        for recipe in NOISE.values():
            rewards, advantage = all_groups.select(size, recipe or "reinforce")
            advantage = advantage if recipe else rewards - rate
            row.append(signal_to_noise(game, rewards, advantage))
        rows.append(row)
    return rows


WRONG_ANSWERS = (1, 2, 5, 18)
SPREAD_RATES = (0.02, 0.1, 0.3)


def failure_rows(all_groups: Groups) -> list[list[Any]]:
    """Signal to noise at G = 4 by the number of wrong answers, with one right answer."""
    rows = []
    for rate, wrong in itertools.product(SPREAD_RATES, WRONG_ANSWERS):
        game = bandit(rate, right=1, answers=1 + wrong)
        noise = [
            signal_to_noise(game, *all_groups.select(4, NOISE[name])) for name in FAILURE_COLUMNS
        ]
        rows.append([str(rate), wrong, *noise, noise[1] / noise[2]])
    return rows


def failure_checks(rows: list[list[Any]]) -> list[Check]:
    ratio = {(row[0], row[1]): row[-1] for row in rows}
    single, several = ratio["0.02", 1], ratio["0.02", 5]
    return [
        Check("at p = .02, G = 4 and one wrong answer Sign has > 3 times the signal to noise of"
              " centring", f"{single:.1f}", single > 3),
        Check("with five wrong answers it has < 1/5 of it",
              f"1/{1 / several:.1f}", several < 1 / 5),
    ]  # fmt: skip


def noise_checks(all_groups: Groups, rows: list[list[Any]]) -> list[Check]:
    game = bandit(0.3, spread=1.0)
    errors = []
    for size, name in ((2, "sign"), (2, "dr_grpo"), (3, "grpo"), (3, "reinforce")):
        rewards, advantage = all_groups.select(size, name)

        def look_up(group_rewards: np.ndarray, rewards=rewards, advantage=advantage) -> np.ndarray:
            code = 2 ** np.arange(group_rewards.shape[1])
            order = np.argsort(rewards @ code)
            return advantage[order[(group_rewards @ code).astype(int)]]

        listed = listed_signal_to_noise(game, size, look_up)
        errors.append(signal_to_noise(game, rewards, advantage) - listed)
    worse = rows[0][2] / rows[0][3]
    return [
        below("signal to noise by class = by listing 20² and 20³ groups", errors),
        Check("at p = .02, G = 4, 18 wrong answers Sign has < 1/5 of the signal to noise of A = r",
              f"1/{worse:.1f}", worse > 5),
    ]  # fmt: skip


def weight_table(all_groups: Groups) -> str:
    rows = []
    for name, (words, _) in CLOSED.items():
        measured = []
        for size, rate in itertools.product((2, 4, 8), (0.02, 0.5)):
            game = bandit(rate, spread=1.0)
            direction = slope(game)
            gradient = update(game, *all_groups.select(size, name))
            measured.append(float(gradient @ direction / (direction @ direction)))
        rows.append([f"`{name}`", words, *measured])
    header = [f"G={g}, p={p}" for g, p in itertools.product((2, 4, 8), (0.02, 0.5))]
    return common.table(["advantage", "weight on grad p", *header], rows)


def figure(rows: list[list[Any]]) -> Figure:
    """Weights over p at G = 8, that of GRPO for several G, and signal to noise."""
    drawing, (left, middle, right) = common.panels(3, 10.5, 3.4)
    p = np.linspace(0.01, 0.99, 197)
    for name in ("sign", "conditional_sign", "reinforce", "dr_grpo", "grpo", "maxrl"):
        label = "reinforce, rloo, ema" if name == "reinforce" else name
        left.plot(p, CLOSED[name][1](8, p), label=label)
    left.plot(p, CLOSED["max_minus_second"][1](8, p), "--", label="max_minus_second")
    left.set(title="weight on grad p, G = 8", xlabel="success rate p", yscale="log", ylim=(0.01, 9))
    left.legend(fontsize=6.5, ncols=2, loc="lower left")
    for size in (2, 3, 4, 8):
        middle.plot(p, std_weight(size, p), label=f"G = {size}")
    middle.plot(p, 1 / np.sqrt(p * (1 - p)), "k:", label="G → ∞: 1/√(pq)")
    middle.set(title="GRPO's weight by group size", xlabel="success rate p", ylim=(0, 6))
    middle.legend(fontsize=7)
    four = [row for row in rows if row[1] == 4]
    for column, name in enumerate(NOISE, start=2):
        rates, noise = [float(row[0]) for row in four], [row[column] for row in four]
        right.plot(rates, noise, "o:" if name == "std" else "o-", ms=3, label=name)
    right.set(title="|E g|² / tr Cov g, G = 4", xlabel="success rate p", yscale="log")
    right.legend(fontsize=7)
    return drawing


def run() -> Result:
    with jax.enable_x64(True):
        all_groups = groups()
        rows = noise_rows(all_groups)
        failures = failure_rows(all_groups)
        checks = [
            *weight_checks(all_groups),
            *value_checks(all_groups),
            *noise_checks(all_groups, rows),
        ]
        checks += failure_checks(failures)
        parts = {
            "weights": weight_table(all_groups),
            "noise": common.table(["p", "G", *NOISE], rows),
            "failures": common.table(
                ["p", "wrong answers", *FAILURE_COLUMNS, "sign / centred"], failures
            ),
        }
    return Result(parts, checks, lambda: figure(rows))


if __name__ == "__main__":
    common.command(NAME, run)
