"""What to generate next: the prompt stream, and the policies that select from it.

The stream has no end. Ordinal i is one row: each epoch visits every row once, in an order drawn
from (seed, epoch) alone, so that a run resumes from its cursor and nothing else.

A policy with memory keeps one success rate per row and decides which rows of the stream to leave
out: it takes an ordinal if a draw from (seed, ordinal) alone falls below the chance of its row, so
a resumed run repeats itself. Host code in NumPy, the same on every process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxgrpo.core.errors import InputError, build, suggest
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Prompts, Rollouts, Stream
from jaxgrpo.data.sources import Mixture
from jaxgrpo.models import sharding


class PromptPolicy(NamedTuple):
    """Which prompts to sample next. On the host, pure, the same on every process; state is saved.

    State is a tree of numpy arrays whose structure, shapes and dtypes do not change.
    """

    name: str
    init: Callable[[int, int], Any]  # (num_rows, seed) -> state
    select: Callable[[Any, int, int], np.ndarray]
    """(state, cursor, n) -> int32 [n], ordinals to sample; the cursor is the next unused one"""
    observe: Callable[[Any, Rollouts], Any]
    """(state, judged rollouts) -> state; it gets every group generated, once, when it is judged"""
    chance: Callable[[Any, int], np.ndarray] | None = None
    """(state, n) -> [rows] in [0, 1]: how likely `select` takes each; None: it leaves none out"""


def sequential() -> PromptPolicy:
    """Takes the next n ordinals: every row once per epoch. Remembers nothing."""
    return PromptPolicy(
        name="sequential",
        init=lambda num_rows, seed: {},
        select=lambda state, cursor, n: np.arange(cursor, cursor + n, dtype=np.int32),
        observe=lambda state, rollouts: state,
    )


Weights = Mapping[str, float]


@functools.lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the rows, [num_rows], from the raw words of a counter-based generator.

    `Generator.permutation` may change between NumPy releases; these words may not.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    words = np.random.Philox(key=key).random_raw(num_rows)
    order = np.argsort(words, kind="stable").astype(np.int32)
    order.flags.writeable = False  # every caller gets the cached array
    return order


BLOCK = 4096
"""Ordinals whose sources are worked out together."""


@functools.lru_cache(maxsize=8)
def _draws(weights: tuple[float, ...], block: int) -> tuple[np.ndarray, np.ndarray]:
    """The source that each ordinal of a block draws from, and that source's draws before it.

    Draw j of a source of weight w stands at time (j + 1/2) / w, and ordinals count by time: among
    any first n of them a source is drawn within (number of sources) of its share. [BLOCK] each.
    """
    # Further draws on both sides: until a time each source is off its share by up to a half.
    first, margin, total = block * BLOCK, len(weights) + 1, sum(weights)
    times = (first - margin) / total, (first + BLOCK + margin) / total
    bounds = [[max(0, math.ceil(time * w - 0.5)) for time in times] for w in weights]
    source = np.repeat(np.arange(len(weights)), [stop - start for start, stop in bounds])
    draw = np.concatenate([np.arange(*bound) for bound in bounds])
    order = np.lexsort((source, (draw + 0.5) / np.asarray(weights)[source]))
    order = order[first - sum(start for start, _ in bounds) :][:BLOCK]
    return source[order], draw[order]


def _rows_of_block(mixture: Mixture, seed: int, block: int) -> np.ndarray:
    """The rows of a block of ordinals, int64 [BLOCK]. Each source has epochs of its own."""
    source, draw = _draws(mixture.weights, block)
    rows, first = np.empty(BLOCK, np.int64), 0
    for number, size in enumerate(mixture.sizes):
        drawn = source == number
        # Sources of the same size have orders of their own; seeds are below 2**32.
        rows[drawn] = first + row_of(draw[drawn], size, seed + (number << 32))
        first += size
    return rows


def row_of(
    ordinal: int | np.ndarray, num_rows: int, seed: int, mixture: Mixture | None = None
) -> np.ndarray:
    """The row of the data set that an ordinal of the stream selects.

        row = order(seed, ordinal // num_rows)[ordinal % num_rows]

    Args:
      mixture: of several sources, which are drawn from in proportion to their weights. Each has an
        order and epochs of its own, so that none of its rows comes again before all have come.

    Shapes: ordinal [...] -> int32 [...].
    Raises: ValueError on a negative ordinal or an empty data set.
    >>> sorted(row_of(np.arange(4, 8), num_rows=4, seed=0).tolist())  # the second epoch
    [0, 1, 2, 3]
    """
    ordinals = np.asarray(ordinal)
    if num_rows < 1 or (ordinals < 0).any():
        raise ValueError(
            f"row_of got num_rows = {num_rows} and ordinals from {ordinals.min(initial=0)}: "
            "it needs at least one row and no negative ordinal"
        )
    rows = np.empty(ordinals.shape, np.int32)
    if mixture is not None:
        for block in np.unique(ordinals // BLOCK):
            in_block = ordinals // BLOCK == block
            rows[in_block] = _rows_of_block(mixture, seed, int(block))[ordinals[in_block] % BLOCK]
        return rows
    for epoch in np.unique(ordinals // num_rows):
        in_epoch = ordinals // num_rows == epoch
        rows[in_epoch] = _epoch_order(num_rows, seed, int(epoch))[ordinals[in_epoch] % num_rows]
    return rows


def pad_prompts(
    tokens: Sequence[np.ndarray], width: int, ordinal: Any, row: Any, step: int
) -> Prompts:
    """Prompts as host arrays, right-padded with 0: they go to the devices with the jitted call.

    Args:
      tokens: of each prompt, int32 [length <= width].
      ordinal, row: places in the stream and in the data set, int32 [P].
      step: finished steps.
    Raises: ValueError if one is longer; `data.prompts.prepare` refuses such data before.
    """
    padded = np.zeros((len(tokens), width), np.int32)
    length = np.array([len(ids) for ids in tokens])
    if length.max(initial=0) > width:
        raise ValueError(f"a prompt has {length.max()} tokens, more than the {width} there are")
    for place, ids in enumerate(tokens):
        padded[place, : len(ids)] = ids
    mask: Any = np.arange(width) < length[:, None]
    arrays: dict[str, Any] = {"prompt_tokens": padded, "ordinal": ordinal, "row": row, "step": step}
    arrays = {name: np.asarray(value, np.int32) for name, value in arrays.items()}
    return Prompts(prompt_mask=mask, **arrays)


def no_positive_resampling(
    threshold: float = 0.9,
    decay: float = 0.0,
    reward: str | None = None,
    success: float = 0.5,
    weights: Weights | None = None,
    mixture: Mixture | None = None,
) -> PromptPolicy:
    """Leaves out rows whose success rate has reached a threshold: they are solved.

    A row that is not sampled keeps its rate, so it stays out, unless fewer rows are left than a
    step has prompts: then those of the lowest rate come back, as many as are missing.

    Args:
      threshold: the lowest success rate that leaves, in (0, 1].
      decay: rate <- decay rate + (1 - decay) (rate of the group); 0 keeps the last group's.
      reward: the one that judges success; None takes the weighted sum.
      success: the lowest value of it that is a success.
      weights: of the sum; a config fills in those of its rewards.
      mixture: of several sources; a config fills it in.

    Source: ScaleRL, arXiv 2510.13786 (there 0.9, on the whole history).
    """
    if not 0 < threshold <= 1:
        raise InputError(f"no_positive_resampling: threshold = {threshold}, expected in (0, 1]")

    judge = SuccessJudge("no_positive_resampling", decay, reward, success, weights, mixture)
    return _thinned(judge, lambda rate, n: _reinstated(~(rate >= threshold), rate, n))


def difficulty_band(
    low: float = 0.125,
    high: float = 0.875,
    decay: float = 0.0,
    reward: str | None = None,
    success: float = 0.5,
    weights: Weights | None = None,
    mixture: Mixture | None = None,
) -> PromptPolicy:
    """Leaves out rows whose success rate is known and outside [low, high].

    Rows not yet sampled are taken. If fewer rows are left than a step has prompts, those nearest
    to the band come back. A row that left is not measured again; to keep sampling it and only leave
    it out of the update, use the advantage part `mask_difficulty_band`.

    Args:
      low, high: the band, 0 <= low <= high <= 1.
      decay, reward, success, weights, mixture: as of `no_positive_resampling`.
    """
    if not 0 <= low <= high <= 1:
        raise InputError(
            f"difficulty_band: low = {low}, high = {high}: expected 0 <= low <= high <= 1"
        )

    def chance(rate: np.ndarray, n: int) -> np.ndarray:
        beyond = np.maximum(low - rate, rate - high)
        return _reinstated(~(beyond > 0), beyond, n)

    return _thinned(
        SuccessJudge("difficulty_band", decay, reward, success, weights, mixture), chance
    )


def spo_priority(
    decay: float = 0.875,
    floor: float = 0.05,
    reward: str | None = None,
    success: float = 0.5,
    weights: Weights | None = None,
    mixture: Mixture | None = None,
) -> PromptPolicy:
    """Takes a row the more often, the less certain its outcome is.

        weight = sqrt(v (1 - v)) + floor,   chance = weight / largest weight of any row

    An ordinal of the stream is taken with that chance: over the epochs rows come in proportion to
    their weights, and within one epoch none comes twice.

    Args:
      decay: v <- decay v + (1 - decay) (rate of the group), from 0.5. 0.875 remembers some eight
        groups, as SPO's tracker at its shortest.
      floor: keeps rows of certain outcome in the stream; above 0.
      reward, success, weights, mixture: as of `no_positive_resampling`.

    Source: SPO, arXiv 2509.13232, which draws each batch from the weights without epochs.
    """
    if not floor > 0:
        raise InputError(f"spo_priority: floor = {floor}, expected above 0: no row may starve")

    def chance(rate: np.ndarray, n: int) -> np.ndarray:
        # In float64: the square root of NumPy is the same on every machine.
        wide = rate.astype(np.float64)
        weight = np.sqrt(wide * (1 - wide)) + floor
        return weight / weight.max()

    return _thinned(
        SuccessJudge("spo_priority", decay, reward, success, weights, mixture), chance, unknown=0.5
    )


def prompt_metrics(
    policy: PromptPolicy, before: Stream, after: Stream, steps: int, n: int
) -> Metrics:
    """What a policy that leaves rows out chose from, and how many prompts it has passed over.

    Args:
      before: the stream that it selected with.
      after: the stream after that, whose cursor has moved.
      steps: for which it has selected prompts by then.
      n: prompts of a step.
    """
    if policy.chance is None:
        return {}
    logged = {"prompts/eligible": policy.chance(before.prompt_policy_state, n).mean()}
    waiting = before.waiting
    if waiting.leftover is None and waiting.experience is None:  # every step has taken n
        logged["prompts/skipped"] = int(after.cursor) - steps * n
    return {name: mean(jnp.float32(value)) for name, value in logged.items()}


def source_metrics(
    mixture: Mixture, row: np.ndarray, reward: np.ndarray, scored: np.ndarray
) -> Metrics:
    """Of each source the share of a step's prompts and their mean reward: prompts/source_NAME and
    reward/source_NAME.

    Shapes: row [P]; reward, the weighted sum, and whether it was scored [P, G].
    """
    source, metrics = mixture.source_numbers(row), {}
    for number, name in enumerate(mixture.names):
        drawn = source == number
        mask = jnp.asarray(scored & drawn[:, None])
        metrics[f"prompts/source_{name}"] = mean(jnp.asarray(drawn))
        metrics[f"reward/source_{name}"] = mean(jnp.where(mask, jnp.asarray(reward), 0), mask)
    return metrics


policies: dict[str, Callable[..., PromptPolicy]] = {
    "sequential": sequential,
    "no_positive_resampling": no_positive_resampling,
    "difficulty_band": difficulty_band,
    "spo_priority": spo_priority,
}


def build_policy(
    spec: Mapping[str, Any], weights: Weights | None = None, mixture: Mixture | None = None
) -> PromptPolicy:
    """The policy that {"use": name or an own factory, option: value, ...} names.

    Args:
      weights: of the run's rewards, for built-in policies that judge success.
      mixture: of the run's data, for those policies too.

    Raises: InputError with the nearest name or option.
    """
    use, reward = spec.get("use"), spec.get("reward")
    if weights is not None and isinstance(use, str) and use in policies:
        if reward is not None and reward not in weights:
            raise InputError(
                f"prompt policy {use}: reward = {reward!r} is none of the rewards:"
                f" {suggest(reward, weights)}"
            )
        if use != "sequential":
            spec = {"weights": weights, "mixture": mixture, **spec}
    policy = build("prompt policy", spec, policies)
    if not isinstance(policy, PromptPolicy):
        name = getattr(use, "__name__", repr(use))
        raise InputError(
            f"prompt policy {name} returned {type(policy).__name__}, expected a PromptPolicy"
        )
    return policy


class SuccessJudge(NamedTuple):
    """How a policy measures success, and how long it remembers."""

    name: str
    decay: float
    reward: str | None
    success: float
    weights: Weights | None
    mixture: Mixture | None = None

    def rates(self, rewards: Mapping[str, np.ndarray]) -> np.ndarray:
        """The success rate of each group, float64 [P]; NaN if no sample was scored."""
        won, scored = self.wins(rewards)
        number = scored.sum(1)
        return np.where(number > 0, won.sum(1) / np.maximum(number, 1), np.nan)

    def wins(self, rewards: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Whether each sample succeeded, and whether it was scored, bool [P, G]."""
        wide = {name: np.asarray(value, np.float64) for name, value in rewards.items()}
        value = self._value({name: np.where(np.isfinite(x), x, np.nan) for name, x in wide.items()})
        scored = ~np.isnan(value)
        # In float32, as rewards come: 0.9 reaches a threshold of 0.9.
        reached = np.where(scored, value, 0).astype(np.float32) >= np.float32(self.success)
        return scored & reached, scored

    def _value(self, rewards: Mapping[str, np.ndarray]) -> np.ndarray:
        if self.reward is not None:
            if self.reward not in rewards:
                hint = suggest(self.reward, rewards)
                raise InputError(f"{self.name}: there is no reward {self.reward!r}; {hint}")
            return rewards[self.reward]
        weights = {name: (self.weights or {}).get(name, 1.0) for name in rewards}
        # A reward of weight 0 is not read, as in sum_rewards: it may leave samples unscored.
        parts = [weight * rewards[name] for name, weight in weights.items() if weight]
        return sum(parts, np.zeros_like(next(iter(rewards.values()))))


def _thinned(
    judge: SuccessJudge, chance: Callable[[np.ndarray, int], np.ndarray], unknown: float = np.nan
) -> PromptPolicy:
    """A policy that remembers rates and takes the stream's ordinals by the chance of their rows.

    Args:
      chance: (rates [rows], n prompts of a step) -> chance of each row to be taken, float64.
      unknown: the rate of a row that was never sampled.
    """
    if not 0 <= judge.decay < 1:
        raise InputError(f"{judge.name}: decay = {judge.decay}, expected 0 or more and below 1")

    def init(num_rows: int, seed: int) -> dict[str, np.ndarray]:
        rate = np.full(num_rows, unknown, np.float32)
        return {"rate": rate, "seed": np.asarray(seed % 2**64, np.uint64)}

    def select(state: dict[str, np.ndarray], cursor: int, n: int) -> np.ndarray:
        return _walk(chance(state["rate"], n), int(state["seed"]), cursor, n, judge.mixture)

    def observe(state: dict[str, np.ndarray], rollouts: Rollouts) -> dict[str, np.ndarray]:
        row, rewards = sharding.to_host((rollouts.row, dict(rollouts.rewards)))
        rate = state["rate"].copy()
        for place, new_rate in zip(row, judge.rates(rewards), strict=True):
            if np.isfinite(new_rate):
                old_rate = rate[place] if np.isfinite(rate[place]) else new_rate
                rate[place] = judge.decay * float(old_rate) + (1 - judge.decay) * new_rate
        return {**state, "rate": rate}

    return PromptPolicy(
        judge.name, init, select, observe, lambda state, n: chance(state["rate"], n)
    )


def _reinstated(eligible: np.ndarray, cost: np.ndarray, n: int) -> np.ndarray:
    """Chances 0 and 1 of rows; at least `n` are 1 (if there are as many), the cheapest ones."""
    missing = min(n, len(eligible)) - int(eligible.sum())
    if missing > 0:
        eligible = eligible.copy()
        order = np.argsort(np.where(eligible, np.inf, cost), kind="stable")
        eligible[order[:missing]] = True
    return eligible.astype(np.float64)


def _walk(
    chance: np.ndarray, seed: int, cursor: int, n: int, mixture: Mixture | None = None
) -> np.ndarray:
    """The next n ordinals that are taken, int32 [n].

    It ends after two epochs, which hold every row at least once (of a mixture those of its larger
    weights): what is missing is taken from the ordinals passed over, first those of rows with any
    chance. So no row fills a whole step.
    """
    num_rows = len(chance)
    limit = cursor + 2 * (num_rows + n)
    accepted, rejected, start, size = [], [], cursor, max(4 * n, 64)
    while start < limit and sum(map(len, accepted)) < n:
        ordinals = np.arange(start, min(start + size, limit))
        chances = chance[row_of(ordinals, num_rows, seed, mixture)]
        hit = _draw(ordinals, seed) < chances
        accepted.append(ordinals[hit])
        rejected.append(ordinals[~hit & (chances > 0)])
        start, size = start + size, 2 * size
    selected = np.concatenate(accepted)[:n]
    if len(selected) < n:
        rejected_ordinals = np.concatenate(rejected)
        remaining_ordinals = np.setdiff1d(
            np.arange(cursor, limit), np.concatenate([selected, rejected_ordinals])
        )
        selected = np.sort(np.concatenate([selected, rejected_ordinals, remaining_ordinals])[:n])
    return selected.astype(np.int32)


def _draw(ordinals: np.ndarray, seed: int) -> np.ndarray:
    """A number in [0, 1) for each ordinal, of (seed, ordinal) alone: SplitMix64, Steele 2014."""
    with np.errstate(over="ignore"):
        state = _mixed(np.asarray([seed ^ 0x5851F42D4C957F2D], np.uint64))
        bits = _mixed(state + ordinals.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
