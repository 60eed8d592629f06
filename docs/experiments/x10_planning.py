"""X10: what HICRA's expected gradient is on planning tokens, and what a placebo's is.

python -m docs.experiments.x10_planning
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.common import Check, Result, below
from jaxgrpo import advantages

NAME = "x10_planning"
VOCABULARY, TOKENS = 3, 2  # the first token plans, the second carries out
SIZES = (2, 3, 4)
ALPHAS = (0.2, 0.5)
SPREADS, FAVOURS = (0.0, 1.0, 3.0), (-2.0, 0.0, 4.0)  # of the policies' logits
PLAN = (True, False)
EXECUTION = (False, True)
SEQUENCES = common.sequences(VOCABULARY, TOKENS)
RIGHT = np.isin(np.arange(len(SEQUENCES)), (0, 4, 5))  # no plan is always right


class Policy(NamedTuple):
    """A softmax policy over plans, and over what follows each plan."""

    chance: np.ndarray  # [N] of every sequence
    score: np.ndarray  # [N, T, S, V], grad log pi of each token with respect to the logits

    @property
    def rate(self) -> float:
        return float(self.chance[RIGHT].sum())

    def slope(self) -> np.ndarray:
        """The gradient of the success rate through each token, [T, S, V]."""
        return np.einsum("n,ntsv->tsv", self.chance * RIGHT, self.score)


def policy(spread: float, favour: float) -> Policy:
    """Random logits of a deviation; `favour` is added to those of the right sequences' tokens."""
    states = 1 + VOCABULARY
    logits = spread * np.random.default_rng(0).normal(size=(states, VOCABULARY))
    state = common.prefixes(SEQUENCES, VOCABULARY)
    logits[state[RIGHT], SEQUENCES[RIGHT]] += favour  # a token of several is raised once

    def token_logp(logits: jax.Array) -> jax.Array:
        return common.token_logp(logits, state, SEQUENCES)

    logp = token_logp(jnp.asarray(logits))
    return Policy(
        np.exp(np.asarray(logp).sum(1)), np.asarray(jax.jacobian(token_logp)(jnp.asarray(logits)))
    )


@functools.cache
def advantage(size: int, alpha: float, raised: tuple[bool, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Every group of sequences [N, G], and its advantages [N, G, T].

    Args:
      raised: [T], the tokens that HICRA raises.
    """
    groups = np.array(list(itertools.product(range(len(SEQUENCES)), repeat=size)))
    tokens = np.ones((*groups.shape, TOKENS), bool)
    fields = {"token_mask": tokens, "planning": tokens & raised}
    rewards = RIGHT[groups].astype(float)
    value = advantages.evaluate("hicra", rewards, options={"alpha": alpha}, **fields)[0]
    return groups, np.asarray(value)


def update(actor: Policy, size: int, alpha: float, raised: tuple[bool, ...]) -> np.ndarray:
    """E[(1/G) sum_i A_it grad log pi(y_it)] through each token, over every group; [T, S, V].

    Args: as in `advantage`.
    """
    groups, value = advantage(size, alpha, raised)
    weight = actor.chance[groups].prod(1)[:, None, None] * value / size
    per_sequence = np.zeros((len(SEQUENCES), TOKENS))
    np.add.at(per_sequence, groups, weight)
    return np.einsum("nt,ntsv->tsv", per_sequence, actor.score)


def factor(alpha: float, rate: float) -> float:
    """What HICRA multiplies the expected gradient of a planning token by."""
    return 1 + alpha * (1 - 2 * rate)


def placebo(actor: Policy, size: int, alpha: float) -> np.ndarray:
    """The mean over placebos that raise one of the two tokens, each as likely."""
    updates = (update(actor, size, alpha, raised) for raised in (PLAN, EXECUTION))
    return sum(updates, np.zeros(())) / 2


class Row(NamedTuple):
    """One policy, group size and alpha: gradients divided by (1 - 1/G) grad p."""

    rate: float
    size: int
    alpha: float
    planning: float
    execution: float
    random: float  # of the planning token under the placebo


def ratio(gradient: np.ndarray, slope: np.ndarray) -> float:
    return float((gradient * slope).sum() / (slope * slope).sum())


def measure() -> tuple[list[Row], list[Check]]:
    """Every policy, size and alpha."""
    rows: list[Row] = []
    errors: dict[str, list[float]] = {"planning": [], "execution": [], "placebo": [], "joint": []}
    actors = itertools.starmap(policy, itertools.product(SPREADS, FAVOURS))
    for actor, size, alpha in itertools.product(actors, SIZES, ALPHAS):
        slope = (1 - 1 / size) * actor.slope()
        scale = factor(alpha, actor.rate)
        gradient = update(actor, size, alpha, PLAN)
        random = placebo(actor, size, alpha)
        errors["planning"].append(np.abs(gradient[0] - scale * slope[0]).max())
        errors["execution"].append(np.abs(gradient[1] - slope[1]).max())
        half = factor(alpha / 2, actor.rate)
        errors["placebo"].append(np.abs(random - half * slope).max())
        joint = update(actor, size, alpha, (True, True))
        errors["joint"].append(np.abs(joint - scale * slope).max())
        planning, execution = (ratio(gradient[t], slope[t]) for t in range(TOKENS))
        row = Row(actor.rate, size, alpha, planning, execution, ratio(random[0], slope[0]))
        rows.append(row)
    rates = [row.rate for row in rows]
    claims = {
        "planning": "planning tokens: (1 − 1/G) (1 + α (1 − 2p)) grad p",
        "execution": "other tokens: (1 − 1/G) grad p, as without HICRA",
        "placebo": "a placebo of one token in two: all tokens times 1 + α/2 (1 − 2p)",
        "joint": "if all tokens plan: dr_grpo at the rate 1 + α (1 − 2p)",
    }
    return rows, [
        *(below(claim, errors[name]) for name, claim in claims.items()),
        Check("the policies reach from hard to easy: p below .1 and above .9",
              f"{min(rates):.3f} to {max(rates):.3f}", min(rates) < 0.1 and max(rates) > 0.9),
    ]  # fmt: skip


def figure(rows: list[Row]) -> Figure:
    """The factors by success rate, and what they do to learning from prompts of two rates."""
    drawing, (left, right) = common.panels(2, 8.5, 3.3)
    p = np.linspace(0, 1, 101)
    for colour, alpha in zip(("C0", "C3"), ALPHAS, strict=True):
        left.plot(p, 1 + alpha * (1 - 2 * p), color=colour, label=f"planning, α = {alpha}")
        left.plot(p, 1 + alpha / 2 * (1 - 2 * p), "--", color=colour, lw=1, label="placebo")
        for row in rows:
            if row.alpha == alpha:
                left.plot(row.rate, row.planning, "o", color=colour, ms=3)
                left.plot(row.rate, row.random, "o", color=colour, mfc="white", ms=3)
    left.axhline(1, color="k", lw=0.8, label="other tokens")
    left.set(title="factor on the expected gradient", xlabel="success rate p")
    left.legend(fontsize=7)
    steps = np.arange(301)
    for colour, alpha in zip(("k", "C0", "C3"), (0.0, *ALPHAS), strict=True):
        right.plot(steps, flow(alpha, len(steps)), color=colour, label=f"α = {alpha}")
    right.set(title="p of one plan, exact gradient steps", xlabel="step", ylabel="success rate")
    right.legend(fontsize=7)
    return drawing


def flow(alpha: float, steps: int, rate: float = 0.1, start: float = 0.05) -> np.ndarray:
    """p over exact gradient steps of a single plan with logit z: dz = rate factor p (1 - p)."""
    logit, rates = np.log(start / (1 - start)), []
    for _ in range(steps):
        p = 1 / (1 + np.exp(-logit))
        rates.append(p)
        logit += rate * factor(alpha, p) * p * (1 - p)
    return np.array(rates)


def run() -> Result:
    with jax.enable_x64(True):
        rows, checks = measure()
    shown = sorted((row for row in rows if row.size == SIZES[-1]), key=lambda row: row[2::-2])
    header = ("p", "G", "α", "planning", "others", "planning, placebo", "1 + α (1 − 2p)")
    lines = [
        [row.rate, row.size, str(row.alpha), row.planning, row.execution, row.random,
         factor(row.alpha, row.rate)]
        for row in shown
    ]  # fmt: skip
    return Result({"factors": common.table(header, lines)}, checks, lambda: figure(rows))


if __name__ == "__main__":
    common.command(NAME, run)
