"""The built-in prompt policies: those with memory keep a success rate, or a rank, for each row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.errors import InputError, build, suggest
from jaxgrpo.core.types import REPLAYED, Rollouts
from jaxgrpo.data.sources import Mixture
from jaxgrpo.models import sharding
from jaxgrpo.rollout.selection import PromptPolicy, draw, reinstated, sequential, walk

State = dict[str, np.ndarray]

LOWEST_LOGP = -30.0
"""Log-probs below it count as it, so that none decides a spread alone; as in R3."""

Weights = Mapping[str, float]


def no_positive_resampling(
    threshold: float = 0.9,
    decay: float = 0.0,
    reward: str | None = None,
    success: float = 0.5,
    weights: Weights | None = None,
    mixture: Mixture | None = None,
    sum_scored: bool = False,
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
      sum_scored: whether a reward that could not score a sample counts 0 in the sum, as in the part
        of that name; else the sample is in no rate. A config fills in what its chain does.

    Source: ScaleRL, arXiv 2510.13786 (there 0.9, on the whole history).
    """
    if not 0 < threshold <= 1:
        raise InputError(f"no_positive_resampling: threshold = {threshold}, expected in (0, 1]")

    measures = decay, reward, success, weights, mixture, sum_scored
    judge = SuccessJudge("no_positive_resampling", *measures)
    return _thinned(judge, lambda rate, n: reinstated(~(rate >= threshold), rate, n))


def difficulty_band(
    low: float = 0.125,
    high: float = 0.875,
    decay: float = 0.0,
    reward: str | None = None,
    success: float = 0.5,
    weights: Weights | None = None,
    mixture: Mixture | None = None,
    sum_scored: bool = False,
) -> PromptPolicy:
    """Leaves out rows whose success rate is known and outside [low, high].

    Rows not yet sampled are taken. If fewer rows are left than a step has prompts, those nearest
    to the band come back. A row that left is not measured again; to keep sampling it and only leave
    it out of the update, use the advantage part `mask_difficulty_band`.

    Args:
      low, high: the band, 0 <= low <= high <= 1.
      decay, reward, success, weights, mixture, sum_scored: as in `no_positive_resampling`.
    """
    if not 0 <= low <= high <= 1:
        raise InputError(
            f"difficulty_band: low = {low}, high = {high}: expected 0 <= low <= high <= 1"
        )

    def chance(rate: np.ndarray, n: int) -> np.ndarray:
        beyond = np.maximum(low - rate, rate - high)
        return reinstated(~(beyond > 0), beyond, n)

    measures = decay, reward, success, weights, mixture, sum_scored
    return _thinned(SuccessJudge("difficulty_band", *measures), chance)


def spo_priority(
    decay: float = 0.875,
    floor: float = 0.05,
    reward: str | None = None,
    success: float = 0.5,
    weights: Weights | None = None,
    mixture: Mixture | None = None,
    sum_scored: bool = False,
) -> PromptPolicy:
    """Takes a row the more often, the less certain its outcome is.

        weight = sqrt(v (1 - v)) + floor,   chance = weight / largest weight of any row

    An ordinal of the stream is taken with that chance: over the epochs rows come in proportion to
    their weights, and within one epoch none comes twice.

    Args:
      decay: v <- decay v + (1 - decay) (rate of the group), from 0.5. 0.875 remembers some eight
        groups, as SPO's tracker at its shortest.
      floor: keeps rows of certain outcome in the stream; above 0.
      reward, success, weights, mixture, sum_scored: as in `no_positive_resampling`.

    Source: SPO, arXiv 2509.13232, which draws each batch from the weights without epochs.
    """
    if not floor > 0:
        raise InputError(f"spo_priority: floor = {floor}, expected above 0: no row may starve")

    def chance(rate: np.ndarray, n: int) -> np.ndarray:
        # In float64: the square root of NumPy is the same on every machine.
        wide = rate.astype(np.float64)
        weight = np.sqrt(wide * (1 - wide)) + floor
        return weight / weight.max()

    measures = decay, reward, success, weights, mixture, sum_scored
    return _thinned(SuccessJudge("spo_priority", *measures), chance, unknown=0.5)


def query_filter(
    top_k: float = 20,
    share: float = 0.1,
    every: int = 100,
    carry: float = 0.1,
    drop: float = 0.0,
    mixture: Mixture | None = None,
) -> PromptPolicy:
    """Leaves out rows whose reference answer stays unlikely behind every thought of the group.

        rank[g] = mean of the ceil(share J) largest answer_rank[g, j] of the answer's J tokens
        spread  = max over j of std over g of answer_logp[g, j]

    A row is left out if min over g of rank[g] >= top_k, and so is the share `drop` of lowest spread
    among the other rows. Each row is judged when training samples it, so the verdicts cost no
    further samples. A round lasts `every` steps. Then all rows come again and are judged again; of
    those that the round had left in, the share `carry`, drawn at random, stays in through the next
    round, whatever its verdict. If fewer rows are left than a step has prompts, those of the lowest
    rank come back.

    Args:
      top_k: tokens of the vocabulary, above 0. A rank is the number of tokens that are likelier, so
        a token among the k likeliest has one below k.
      share: of an answer's tokens, the worst ones, in (0, 1].
      every: steps of a round; 0: the first verdict stays.
      carry: share of the rows that the round before left in, in [0, 1].
      drop: in [0, 1), rounded down to rows.
      mixture: of several sources; a config fills it in.

    Fields: answer_rank and, with drop, answer_logp [P, G, J]; answer_mask [P, J].
    Source: DRO, arXiv 2506.13351: both stages and carry 0.1. It judges all rows before training and
      at intervals, with samples for this alone. The other numbers are ours.
    """
    if not (top_k > 0 and 0 < share <= 1 and every >= 0 and 0 <= carry <= 1 and 0 <= drop < 1):
        raise InputError(
            f"query_filter: top_k = {top_k}, share = {share}, every = {every}, carry = {carry}, "
            f"drop = {drop}: expected top_k > 0, 0 < share <= 1, every >= 0, 0 <= carry <= 1 and "
            "0 <= drop < 1"
        )
    keys = _QueryFilter(top_k, share, every, carry, drop)
    needs = frozenset(("answer_rank", "answer_mask", *(("answer_logp",) if drop else ())))

    def select(state: State, cursor: int, n: int) -> np.ndarray:
        return walk(keys.chance(state, n), int(state["seed"]), cursor, n, mixture)

    return PromptPolicy("query_filter", keys.init, select, keys.observe, keys.chance, needs)


class _QueryFilter(NamedTuple):
    """The options of `query_filter`, and what it does."""

    top_k: float
    share: float
    every: int
    carry: float
    drop: float

    def init(self, num_rows: int, seed: int) -> State:
        return {
            "rank": np.full(num_rows, np.nan, np.float32),  # NaN: not judged in this round
            "spread": np.zeros(num_rows, np.float32),
            "carried": np.zeros(num_rows, bool),
            "round": np.zeros((), np.int32),
            "seed": np.asarray(seed % 2**64, np.uint64),
        }

    def chance(self, state: State, n: int) -> np.ndarray:
        return reinstated(self.passing(state), state["rank"], n)

    def observe(self, state: State, rollouts: Rollouts) -> State:
        row, step, fields = sharding.to_host((rollouts.row, rollouts.step, dict(rollouts.fields)))
        number = int(step) // self.every if self.every else 0
        if number > state["round"]:
            state = self.begin_round(state, number)
        rank, spread, mask = state["rank"].copy(), state["spread"].copy(), fields["answer_mask"]
        rank[row] = worst_ranks(fields["answer_rank"], mask, self.share).min(1)
        if self.drop:
            logp = np.maximum(fields["answer_logp"], LOWEST_LOGP)
            spread[row] = np.where(mask, np.std(logp, axis=1), 0).max(1)
        return {**state, "rank": rank, "spread": spread}

    def passing(self, state: State) -> np.ndarray:
        """The rows that may come, bool [rows]."""
        is_passing = ~(state["rank"] >= self.top_k)
        judged = np.flatnonzero(is_passing & ~np.isnan(state["rank"]))
        lowest_first = judged[np.argsort(state["spread"][judged], kind="stable")]
        is_passing[lowest_first[: int(self.drop * len(judged) * (1 + 1e-9))]] = False
        return is_passing | state["carried"]

    def begin_round(self, state: State, number: int) -> State:
        """No row is judged, and some of those that stayed in the round before are carried over."""
        seed = int(state["seed"])
        stayed = self.passing(state) & (state["carried"] | ~np.isnan(state["rank"]))
        rows = np.flatnonzero(stayed)
        order = np.argsort(draw(number * len(stayed) + rows, seed), kind="stable")
        fresh = {**self.init(len(stayed), seed), "round": np.asarray(number, np.int32)}
        fresh["carried"][rows[order[: int(self.carry * len(rows) + 0.5)]]] = True
        return fresh


def worst_ranks(rank: np.ndarray, mask: np.ndarray, share: float) -> np.ndarray:
    """The mean of the largest `share` of the ranks of each thought's answer, float64 [P, G].

    Shapes: rank [P, G, J], mask [P, J].
    """
    number = np.ceil(share * (1 - 1e-9) * mask.sum(1, keepdims=True)).clip(1)
    falling = -np.sort(-np.where(mask[:, None], rank, 0).astype(np.float64), axis=2)
    return np.where((np.arange(rank.shape[2]) < number)[:, None], falling, 0).sum(2) / number


policies: dict[str, Callable[..., PromptPolicy]] = {
    "sequential": sequential,
    "no_positive_resampling": no_positive_resampling,
    "difficulty_band": difficulty_band,
    "spo_priority": spo_priority,
    "query_filter": query_filter,
}


def build_policy(
    spec: Mapping[str, Any],
    weights: Weights | None = None,
    mixture: Mixture | None = None,
    sum_scored: bool = False,
) -> PromptPolicy:
    """The policy that {"use": name or an own factory, option: value, ...} names.

    Args:
      weights: of the run's rewards, for built-in policies that judge success.
      mixture: of the run's data, for those policies too.
      sum_scored: whether the run's chain sums what scored a sample, for those that judge success.

    Raises: InputError with the nearest name or option.
    """
    use, reward = spec.get("use"), spec.get("reward")
    if weights is not None and isinstance(use, str) and use in policies:
        if reward is not None and reward not in weights:
            raise InputError(
                f"prompt policy {use}: reward = {reward!r} is none of the rewards:"
                f" {suggest(reward, weights)}"
            )
        options = inspect.signature(policies[use]).parameters
        run_options = {"weights": weights, "mixture": mixture, "sum_scored": sum_scored}
        spec = {name: run_options[name] for name in run_options if name in options} | {**spec}
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
    sum_scored: bool = False  # unscored rewards count 0 in a sum with a scored one

    def rates(
        self, rewards: Mapping[str, np.ndarray], replayed: np.ndarray | None = None
    ) -> np.ndarray:
        """The success rate of each group, float64 [P]; NaN if no sample was scored.

        Args:
          replayed: [P, G], samples of an earlier step, which come again since they are right: they
            say nothing of the policy. None: there are none.
        """
        won, scored = self.wins(rewards)
        if replayed is not None:
            won, scored = won & (replayed == 0), scored & (replayed == 0)
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
        if self.sum_scored and parts:
            scored = np.isfinite(parts)
            return np.where(scored.any(0), np.where(scored, parts, 0).sum(0), np.nan)
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
        return walk(chance(state["rate"], n), int(state["seed"]), cursor, n, judge.mixture)

    def observe(state: dict[str, np.ndarray], rollouts: Rollouts) -> dict[str, np.ndarray]:
        row, rewards = sharding.to_host((rollouts.row, dict(rollouts.rewards)))
        replayed = sharding.to_host(rollouts.fields.get(REPLAYED))
        rate = state["rate"].copy()
        for place, new_rate in zip(row, judge.rates(rewards, replayed), strict=True):
            if np.isfinite(new_rate):
                old_rate = rate[place] if np.isfinite(rate[place]) else new_rate
                rate[place] = judge.decay * float(old_rate) + (1 - judge.decay) * new_rate
        return {**state, "rate": rate}

    return PromptPolicy(
        judge.name, init, select, observe, lambda state, n: chance(state["rate"], n)
    )
