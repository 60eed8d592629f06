"""Experience: right samples of earlier steps, one of which stands in some groups of a step.

A share of a step's prompts are rows that were sampled before, whose samples were neither all right
nor all wrong. G samples of each are drawn; one of those that were right before replaces the last.
The group is judged as any other, so its mean is that of the mixed group.

    bucket N     rows whose latest group had N right samples, 0 < N < n of n drawn
    p(bucket)    proportional to exp(-(N - G / 2)^2 / 2), over buckets with a row; rows uniformly
    the sample   of the row's kept ones, that of the largest mean log-prob under the policy of now

A row all of whose drawn samples were right leaves, with what was kept of it; met again it may come
back. Samples that the length limit cut are not kept.

Source: ExGRPO, arXiv 2510.02245, with buckets in counts as its code has them. There the buffer has
no bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxgrpo.core import records
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import (
    PROMPT_ARRAYS,
    REPLAYED,
    SAMPLE_ARRAYS,
    Experience,
    Params,
    Prompts,
    Rollouts,
    Stream,
    only_tokens,
)
from jaxgrpo.rollout.policies import SuccessJudge
from jaxgrpo.rollout.selection import pad_prompts

FIRST_ORDINAL = 2**30
"""Prompts of experience count from here, so that their draws are none of the stream's."""

Rank = Callable[[Params, Rollouts], Any]
"""(what `sync` gave, samples) -> log-prob of each token, [P, G, T]"""


def no_experience(size: int, tokens: int, num_rows: int) -> Experience:
    """Room for `size` samples of so many tokens, without any."""
    return Experience(
        row=np.full(size, -1, np.int32),
        step=np.zeros(size, np.int32),
        tokens=np.zeros((size, tokens), np.int32),
        logp=np.full((size, tokens), np.nan, np.float32),
        version=np.zeros(size, np.int32),
        successes=np.full(num_rows, -1, np.int32),
        started=np.zeros((), bool),
        count=np.zeros((), np.int32),
    )


def choose_rows(
    experience: Experience, number: int, group_size: int, random: np.random.Generator
) -> np.ndarray:
    """At most `number` different rows, by their buckets, int32.

    >>> experience = no_experience(4, 1, 3)._replace(row=np.array([0, 2, 2, -1]))
    >>> experience = experience._replace(successes=np.array([1, 1, 4]))
    >>> choose_rows(experience, 2, 4, np.random.default_rng(0)).tolist()  # row 2 is solved
    [0]
    """
    all_rows = np.unique(experience.row[experience.row >= 0])
    successes = experience.successes[all_rows]
    rows = dict(zip(all_rows.tolist(), successes.tolist(), strict=True))
    rows = {row: count for row, count in rows.items() if 0 < count < group_size}
    rows_drawn: list[int] = []
    while rows and len(rows_drawn) < number:
        counts = np.array([*rows.values()])
        buckets, sizes = np.unique(counts, return_counts=True)
        exponents = -((buckets - group_size / 2) ** 2) / 2
        weights = np.exp(exponents - exponents.max())  # in large groups all could be 0
        share = (weights / weights.sum() / sizes)[np.searchsorted(buckets, counts)]
        # By a draw in [0, 1): what NumPy makes of one may change, the draw may not.
        place = int(np.searchsorted(np.cumsum(share), random.random() * share.sum(), "right"))
        row = [*rows][min(place, len(counts) - 1)]
        rows_drawn.append(row)
        del rows[row]
    return np.array(rows_drawn, np.int32)


def keep(
    experience: Experience, rollouts: Rollouts, right: np.ndarray, scored: np.ndarray, per_row: int
) -> Experience:
    """The experience after a step: its right samples kept, solved rows without any.

    Args:
      rollouts: host arrays, with the field `REPLAYED`.
      right, scored: [P, G] bool.
      per_row: samples of a row that stay, the latest. Where there is no room the oldest of all go.
    """
    fresh = ~np.asarray(rollouts.fields[REPLAYED], bool) & scored
    arrays = {name: value.copy() for name, value in experience._asdict().items()}
    for place, row in enumerate(np.asarray(rollouts.row).tolist()):
        drawn, won = fresh[place].sum(), fresh[place] & right[place]
        if not drawn:
            continue
        count = int(won.sum())
        arrays["successes"][row] = count
        if count == drawn:
            arrays["row"][arrays["row"] == row] = -1
            continue
        for sample in np.flatnonzero(won & ~np.asarray(rollouts.truncated)[place]).tolist():
            slot = _slot(arrays["row"], arrays["step"], row, per_row)
            mask = np.asarray(rollouts.token_mask)[place, sample]
            arrays["row"][slot], arrays["step"][slot] = row, int(rollouts.step)
            arrays["version"][slot] = rollouts.policy_version[place, sample]
            arrays["tokens"][slot] = np.asarray(rollouts.completion_tokens)[place, sample]
            logp = np.asarray(rollouts.behavior_logp)[place, sample]
            arrays["logp"][slot] = np.where(mask, logp, np.nan)
    return Experience(**arrays)


def _slot(rows: np.ndarray, steps: np.ndarray, row: int, per_row: int) -> int:
    """Where a sample of a row goes: over the row's oldest, into an empty place, or over the oldest
    of all; of samples of one step, over the first."""
    same_row, empty = np.flatnonzero(rows == row), np.flatnonzero(rows < 0)
    if len(same_row) >= per_row:
        return int(same_row[np.argmin(steps[same_row])])
    return int(empty[0]) if len(empty) else int(np.argmin(steps))


def num_groups(share: float, num_prompts: int) -> int:
    """The groups of a step that a share of its prompts is, rounded down.

    >>> num_groups(0.29, 100), 0.29 * 100
    (29, 28.999999999999996)
    """
    return int(share * num_prompts * (1 + 1e-9))


class Experiencer(NamedTuple):
    """What a run does with its experience; all of it on the host, alike in every process."""

    share: float  # of a step's prompts
    start: float  # success rate of a step, from which on
    per_row: int
    judge: SuccessJudge
    encoded: Sequence[np.ndarray]  # tokens of each row's prompt
    num_prompts: int  # of a step
    group_size: int
    seed: int
    rank: Rank

    def select(
        self, fresh: Callable[..., tuple[Stream, Prompts]], stream: Stream, step: int
    ) -> tuple[Stream, Prompts]:
        """A step's prompts: fresh ones of the stream first, then those of experience.

        Args:
          fresh: (stream, step, number) -> (stream, prompts)
        """
        experience, random = (
            _experience(stream),
            np.random.default_rng([self.seed, step, FIRST_ORDINAL]),
        )
        number = num_groups(self.share, self.num_prompts) if experience.started else 0
        rows = choose_rows(experience, number, self.group_size, random)
        stream, prompts = fresh(stream, step, self.num_prompts - len(rows))
        if not len(rows):
            return stream, prompts
        ordinal = FIRST_ORDINAL + int(experience.count) + np.arange(len(rows), dtype=np.int32)
        width = prompts.prompt_tokens.shape[1]
        again = pad_prompts([self.encoded[row] for row in rows], width, ordinal, rows, step)
        arrays = {
            name: np.concatenate([getattr(prompts, name), getattr(again, name)])
            for name in PROMPT_ARRAYS
        }
        count = np.asarray(experience.count + len(rows), np.int32)
        stream = _with(stream, experience._replace(count=count))
        return stream, dataclasses.replace(prompts, **arrays)

    def mix(self, params: Params, stream: Stream, rollouts: Rollouts) -> Rollouts:
        """The rollouts with a sample of experience as the last of each group of experience."""
        experience = _experience(stream)
        replayed = np.zeros(np.shape(rollouts.truncated), bool)
        places = np.flatnonzero(np.asarray(rollouts.ordinal) >= FIRST_ORDINAL)
        arrays: dict[str, Any] = {n: np.array(getattr(rollouts, n)) for n in SAMPLE_ARRAYS}
        slots = self._likeliest(params, experience, rollouts, places) if len(places) else []
        for place, slot in zip(places.tolist(), slots, strict=True):
            last, logp = (place, -1), experience.logp[slot]
            arrays["completion_tokens"][last] = experience.tokens[slot]
            arrays["token_mask"][last] = mask = ~np.isnan(logp)
            arrays["behavior_logp"][last] = np.where(mask, logp, 0)
            arrays["truncated"][last] = False
            arrays["policy_version"][last] = experience.version[slot]
            replayed[last] = True
        fields: Any = records.emptied(rollouts.fields, replayed)  # of the samples that made room
        fields |= {REPLAYED: replayed}
        return dataclasses.replace(rollouts, **arrays, fields=fields)

    def observe(self, stream: Stream, rollouts: Rollouts) -> tuple[Stream, Metrics]:
        """The stream after a step's rollouts were judged, and what to log."""
        experience, rewards = _experience(stream), dict(rollouts.rewards)
        right, scored = self.judge.wins({n: np.asarray(value) for n, value in rewards.items()})
        replayed = np.asarray(rollouts.fields[REPLAYED], bool)
        after = keep(experience, rollouts, right, scored, self.per_row)
        fresh = scored & ~replayed
        rate = (right & fresh).sum() / max(1, fresh.sum())
        after = after._replace(started=np.asarray(bool(after.started) or rate >= self.start))
        filled = after.row >= 0
        age = int(rollouts.step) - np.asarray(rollouts.policy_version)[replayed]
        metrics: Metrics = {
            "experience/samples": mean(jnp.float32(filled.sum())),
            "experience/rows": mean(jnp.float32(len(np.unique(after.row[filled])))),
            "experience/groups": mean(jnp.float32(replayed.any(1).mean())),
            "experience/age": mean(jnp.asarray(age, jnp.float32)),
        }
        return _with(stream, after), metrics

    def _likeliest(
        self, params: Params, experience: Experience, rollouts: Rollouts, places: np.ndarray
    ) -> list[int]:
        """For each of these groups the kept sample of its row that is now the likeliest."""
        slots = np.full((len(rollouts.row), self.per_row), -1)
        for place in places.tolist():
            same_row = np.flatnonzero(experience.row == rollouts.row[place])
            slots[place, : len(same_row)] = same_row
        is_slot, sources = slots >= 0, np.maximum(slots, 0)
        mask = is_slot[..., None] & ~np.isnan(experience.logp[sources])
        candidates = only_tokens(rollouts, experience.tokens[sources], mask)
        logp = np.where(mask, self.rank(params, candidates), 0).sum(-1)
        best = np.where(is_slot, logp / np.maximum(mask.sum(-1), 1), -np.inf).argmax(1)
        return [int(slots[place, best[place]]) for place in places]


def _experience(stream: Stream) -> Experience:
    experience = stream.waiting.experience
    assert experience is not None
    return experience


def _with(stream: Stream, experience: Experience) -> Stream:
    waiting = stream.waiting._replace(experience=experience)
    return dataclasses.replace(stream, waiting=waiting)
