"""Dynamic sampling: a step's flat groups are replaced by further prompts, within a budget.

A group is live if the run's recipe gives one of its tokens an advantage that is not 0, and flat if
not. It is judged once, when it is generated.

A step trains on the live groups that the step before left over, then on its own in the order in
which they were generated. It generates rounds of as many prompts as a step has until these are
enough or the budget is spent; flat groups fill what is missing. Live groups beyond the need are
left over for the next step. They are fewer than a step has, so none waits for longer.

Source: DAPO, arXiv 2503.14476, section 3.2, whose code generates at most 10 rounds and drops live
groups beyond the need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.core.errors import differing_names
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, Stream, rollout_arrays
from jaxgrpo.models import sharding
from jaxgrpo.rewards.calling import RewardLog
from jaxgrpo.rollout.answers import Answers
from jaxgrpo.rollout.judging import merge_logs


class Plan(NamedTuple):
    """What becomes of the groups that there are; int arrays of their places."""

    used: np.ndarray  # [at most the need] to train on: live ones, then flat ones to fill up
    leftover: np.ndarray  # live ones for the next step
    discarded: np.ndarray  # flat ones
    shortfall: int  # live groups that are missing


def plan(live: np.ndarray, need: int) -> Plan:
    """Which groups a step trains on.

    Args:
      live: [groups] bool, oldest first.
      need: groups of a step.

    >>> plan(np.array([False, True, True, False]), need=3)
    Plan(used=array([1, 2, 0]), leftover=array([], dtype=int64), discarded=array([3]), shortfall=1)
    >>> plan(np.array([False, True, True]), need=1)
    Plan(used=array([1]), leftover=array([2]), discarded=array([0]), shortfall=0)
    """
    alive, flat = np.flatnonzero(live), np.flatnonzero(~live)
    shortfall = max(0, need - len(alive))
    used = np.concatenate([alive[:need], flat[:shortfall]])
    return Plan(used, alive[need:], flat[shortfall:], shortfall)


def max_rounds(factor: float) -> int:
    """The rounds of a step, each of as many prompts as it trains on, within `factor` times that."""
    return int(factor)


class Verdict(NamedTuple):
    """What the groups of a round are worth."""

    live: np.ndarray  # [P] bool
    total: np.ndarray  # [P, G] weighted sum of the rewards
    scored: np.ndarray  # [P, G] bool: there is one


Generate = Callable[[Stream], tuple[Stream, Rollouts, RewardLog]]
"""Selects, samples and rewards one round of prompts."""


def fill(
    stream: Stream,
    generate: Generate,
    judge: Callable[[Rollouts], Verdict],
    rounds: int,
) -> tuple[Stream, Rollouts, RewardLog, Metrics]:
    """The groups that a step trains on, after at most so many rounds.

    Everything here is on the host, and alike on every process.

    Returns: the stream with the new leftover groups; rollouts as host arrays; what rewards logged,
      where metrics and failures are of all rounds and columns are of the rollouts, None where a
      group was judged in the step before.
    Raises: ValueError if rollouts have other fields than those that a stream has room for.
    """
    room: Any = stream.waiting.leftover
    need, samples = room.policy_version.shape
    groups = [_take(room, np.flatnonzero(room.ordinal >= 0))]
    live, logs = np.ones(len(groups[0].ordinal), bool), []
    judged: list[Verdict] = []
    planned = plan(live, need)
    while planned.shortfall and len(logs) < rounds:
        stream, rollouts, log = generate(stream)
        groups.append(_checked(sharding.to_host(rollouts), room))
        judged.append(judge(rollouts))
        logs.append(log)
        live = np.concatenate([live, judged[-1].live])
        planned = plan(live, need)
    sizes = [len(part.ordinal) for part in groups]
    all_groups: Rollouts = jax.tree.map(_joined, *groups)
    used = _take(all_groups, planned.used)
    # The first groups are left over by the step before, whose logs are gone.
    round_places = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])[1:]
    merged_log = merge_logs(logs, round_places, sum(sizes), samples)
    places = (planned.used[:, None] * samples + np.arange(samples)).ravel()
    columns = {
        reward: {column: [values[place] for place in places] for column, values in logged.items()}
        for reward, logged in merged_log.columns.items()
    }
    metrics = _metrics(all_groups, planned, sizes[0], live, judged)
    leftover = _stored(_take(all_groups, planned.leftover), need)
    stream = dataclasses.replace(stream, waiting=stream.waiting._replace(leftover=leftover))
    return stream, used, merged_log._replace(columns=columns), metrics


def no_groups(
    geometry: Any,
    rewards: Iterable[str],
    columns: Mapping[str, Any],
    answers: Answers | None = None,
    prefix: int | None = None,
) -> Any:
    """Room for the groups of a step, without any: what waits when a run begins.

    Args:
      geometry: an `update.packing.Geometry`.
      columns: numeric columns of the data, [rows, ...], that rollouts have as fields.
      answers: of the rows, where rollouts have their fields.
      prefix: tokens of the longest goal; None: samples have none.
    """
    prompts, samples = geometry[:2]
    fields: Any = {
        name: np.zeros((prompts, *column.shape[1:]), jax.dtypes.canonicalize_dtype(column.dtype))
        for name, column in columns.items()
    }
    zeros: Any = np.zeros
    arrays = rollout_arrays(zeros, *geometry[:4])
    room = Rollouts(
        **arrays | {"ordinal": arrays["ordinal"] - 1},
        rewards={name: zeros((prompts, samples), np.float32) for name in rewards},
        fields=fields,
        forced_prefix=None if prefix is None else zeros((prompts, samples, prefix), np.int32),
    )
    if answers is None:
        return room
    answer_fields: Any = answers.fields(room, [[]] * (prompts * samples))
    return dataclasses.replace(room, fields=fields | jax.tree.map(np.zeros_like, answer_fields))


def _stored(groups: Rollouts, size: int) -> Rollouts:
    """Groups in room for `size` of them, which checkpoints restore by its shape."""

    def pad(leaf: np.ndarray) -> np.ndarray:
        if leaf.ndim == 0:
            return leaf
        return np.concatenate([leaf, np.zeros((size - len(leaf), *leaf.shape[1:]), leaf.dtype)])

    stored: Any = jax.tree.map(pad, groups)
    is_there = np.arange(size) < len(groups.ordinal)
    return dataclasses.replace(stored, ordinal=np.where(is_there, stored.ordinal, np.int32(-1)))


def _take(groups: Rollouts, places: np.ndarray) -> Rollouts:
    return jax.tree.map(lambda leaf: leaf[places] if leaf.ndim else leaf, groups)


def _joined(*leaves: np.ndarray) -> np.ndarray:
    """One array of all groups; the newest of what there is one of, as the step."""
    return np.concatenate(leaves) if leaves[-1].ndim else leaves[-1]


def _checked(rollouts: Rollouts, room: Rollouts) -> Rollouts:
    """The rollouts of a round. Raises: ValueError if a stream has no room for an array."""

    def shapes(groups: Rollouts) -> dict[str, str]:
        named = {
            jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(groups)
        }
        return {name: f"{leaf.dtype} {list(leaf.shape)}" for name, leaf in named.items()}

    actual, expected = shapes(rollouts), shapes(room)
    if wrong := differing_names(actual, expected):
        actual_array = actual.get(wrong[0], "nothing")
        expected_array = expected.get(wrong[0], "nothing")
        raise ValueError(
            f"rollout.refill: rollouts hold {actual_array} as {wrong[0]}, and a stream has room "
            f"for {expected_array} there: add it to jaxgrpo.rollout.refill.no_groups"
        )
    return rollouts


def _metrics(
    groups: Rollouts,
    planned: Plan,
    num_leftover: int,
    live: np.ndarray,
    judged: list[Verdict],
) -> Metrics:
    """What a step generated, beside what it trains on.

    Args:
      num_leftover: how many of the groups the step before left over.
      judged: of each round.
    """
    total = np.concatenate([verdict.total for verdict in judged])
    scored = np.concatenate([verdict.scored for verdict in judged])
    low = np.where(scored, total, np.inf).min(axis=1)
    equal, has_score = low >= np.where(scored, total, -np.inf).max(axis=1), scored.any(axis=1)
    counts = {
        "num_tokens": groups.token_mask[num_leftover:].sum(),
        "refill/groups": len(live) - num_leftover,
        "refill/discarded_groups": len(planned.discarded),
        "refill/discarded_tokens": groups.token_mask[planned.discarded].sum(),
        "refill/shortfall": planned.shortfall,
        "refill/leftover": len(planned.leftover),
        "refill/older": np.mean(planned.used < num_leftover),
    }
    metrics: Metrics = {name: mean(jnp.float32(value)) for name, value in counts.items()}
    metrics["refill/reward"] = mean(jnp.asarray(total), jnp.asarray(scored))
    metrics["refill/frac_reward_zero_std"] = mean(jnp.asarray(equal), jnp.asarray(has_score))
    return metrics
