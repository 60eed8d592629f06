"""The rollouts of a step: prompts are selected, sampled and rewarded until there are enough.

With a lag they wait for some steps before they are trained on.
Source: PipelineRL, arXiv 2509.19128.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.core.metrics import Mean, Metrics, mean, merge
from jaxgrpo.core.types import Params, Prompts, Rollouts, Stream
from jaxgrpo.data.sources import Mixture
from jaxgrpo.models import sharding
from jaxgrpo.rewards import RewardLog
from jaxgrpo.rollout import refill, trees
from jaxgrpo.rollout.dialogue import Dialogue, all_rounds
from jaxgrpo.rollout.experience import Experiencer
from jaxgrpo.rollout.judging import (
    Judge,
    Judged,
    RolloutSource,
    judge_early,
    merge_logs,
    put_prompts,
    rollout_progress,
)
from jaxgrpo.rollout.prefixes import PREFIX
from jaxgrpo.rollout.selection import part_metrics, prompt_metrics
from jaxgrpo.update import diagnostics

LiveGroups = Callable[[Rollouts], np.ndarray]
"""rollouts -> bool [P], the groups that teach something: `live_groups` of a learner"""

Phase = Callable[[str], contextlib.AbstractContextManager[None]]
"""A context round a named part of a step."""


class Collected(NamedTuple):
    """The rollouts of a step, and what the log shows of them."""

    rollouts: Rollouts
    reward_log: RewardLog  # what the rewards logged
    metrics: Metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collector:
    """Makes the rollouts of one step after another from a stream of prompts."""

    source: RolloutSource
    mesh: Mesh  # of the update
    chain: AdvantageTransform  # says how rewards that it reads one by one are summed
    reward_weights: Mapping[str, float] | None
    mixture: Mixture | None  # of the rows, where they are from several sources
    num_rows: int
    max_steps: int  # of the run, for the rewards' `trainer_state`
    early_judge: Judge | None
    """judges groups that have ended while others are drawn; None: none"""
    max_rounds: int | None  # of `rollout.refill`; None: groups are not replaced
    staleness: int = 0  # of `rollout.staleness`
    interrupted_after: int | None = None  # tokens; None: samples are not interrupted
    stops_early: bool = False  # whether too little confidence ends samples

    def collect(
        self,
        params: Params,
        version: int,
        stream: Stream,
        live_groups: LiveGroups | None = None,
        phase: Phase = contextlib.nullcontext,
    ) -> tuple[Stream, Collected]:
        """Rollouts for one step: select, sample, reward; with `rollout.refill` until it is full.

        With `rollout.staleness` = k these are those of step n + k, which wait in the stream, and
        those of step n are given, of the parameters of step n - k. The first call makes k + 1
        steps' rollouts, so that steps 1 to k + 1 train on those of the first parameters.

        Args:
          params: what `sync` gave.
          version: the finished steps of the learner that they are from.
          live_groups: which groups teach something; read with `rollout.refill` alone.
          phase: called round each "sample", "reward" and "prepare".

        Raises: ValueError where groups are to be replaced and `live_groups` is not given, and where
          rollouts have waited for more steps than `rollout.staleness`.
        """
        ahead = [rollouts for rollouts in stream.waiting.ahead if rollouts.ordinal[0] >= 0]
        logs: list[RewardLog] = []
        metrics: Metrics = {}
        while len(ahead) <= self.staleness:
            before = stream
            stream, rollouts, log, measured = self._generate(
                params, version, stream, live_groups, phase
            )
            ahead.append(sharding.to_host(rollouts))
            logs.append(log)
            if self.staleness:
                drawn = ahead[-1].token_mask.sum()
                measured = {"num_tokens": mean(jnp.float32(drawn))} | measured
            count, steps = len(rollouts.row), version + 1 + self.staleness
            metrics = _joined(metrics, measured)
            metrics |= prompt_metrics(self.source.policy, before, stream, steps, count)
        rollouts, waiting = ahead[0], stream.waiting._replace(ahead=tuple(ahead[1:]))
        stream = dataclasses.replace(stream, waiting=waiting)
        reward_log = logs[0]
        if self.staleness:  # the logs are of rollouts that later steps train on
            reward_log = _without_columns(logs)
            metrics["sampling/staleness"] = self._staleness(rollouts, version)
        metrics |= self._shape_metrics(rollouts)
        rollouts = put_prompts(self.mesh, rollouts)
        metrics |= self._part_metrics(rollouts)
        return stream, Collected(rollouts, reward_log, metrics)

    def _shape_metrics(self, rollouts: Rollouts) -> Metrics:
        """What interruptions, early stops and trees did to the samples."""
        mask, metrics = rollouts.token_mask, {}
        if self.interrupted_after is not None:
            behind = mask[..., self.interrupted_after :]
            metrics["sampling/interrupted"] = mean(jnp.asarray(behind.any(-1)))
        if self.stops_early:
            metrics["sampling/stopped"] = mean(jnp.asarray(rollouts.truncated & ~mask[..., -1]))
        names = trees.ANCESTORS, trees.DEPTH
        if {*names} <= rollouts.fields.keys():
            arrays = [rollouts.fields[name] for name in names]
            drawn = trees.count_drawn(*map(np.asarray, (*arrays, mask)))
            metrics["num_tokens"] = mean(jnp.float32(drawn))
        return metrics

    def _part_metrics(self, rollouts: Rollouts) -> Metrics:
        """Of sources of the data, and of texts that prompts begin with."""
        metrics, mixture, prefixes = Metrics(), self.mixture, self.source.prefixes
        if mixture is not None:
            names = [f"source_{name}" for name in mixture.names]
            number = mixture.source_numbers(sharding.to_host(rollouts.row))
            metrics |= part_metrics(names, number, *self.summed_rewards(rollouts))
        if prefixes is not None:
            names = [f"prefix_{number}" for number in range(len(prefixes.texts))]
            number = sharding.to_host(rollouts.fields[PREFIX])
            metrics |= part_metrics(names, number, *self.summed_rewards(rollouts))
        return metrics

    def _staleness(self, rollouts: Rollouts, version: int) -> Mean:
        """Steps between the parameters that drew rollouts and those that they train."""
        steps = version - rollouts.policy_version
        # Groups that refilling left over are of the step before.
        if steps.max() > self.staleness + (self.max_rounds is not None):
            raise ValueError(
                f"rollouts of step {version + 1} were drawn {steps.max()} steps before, and "
                f"rollout.staleness = {self.staleness}: call collect once for each update"
            )
        return mean(jnp.float32(steps.mean()))

    def _generate(
        self,
        params: Params,
        version: int,
        stream: Stream,
        live_groups: LiveGroups | None,
        phase: Phase,
    ) -> tuple[Stream, Rollouts, RewardLog, Metrics]:
        """The rollouts of a step, what rewards logged, and metrics of turns and of
        `rollout.refill`."""
        rounds: list[dict[str, float]] = []

        def generate(stream: Stream) -> tuple[Stream, Rollouts, RewardLog]:
            with phase("sample"):
                stream, prompts = self.source.select(stream, version)
                rollouts, early, dialogue = self._sample(params, prompts, stream.key)
            with phase("reward"):
                judged = self.source.reward(stream, rollouts, early, params, dialogue)
            if dialogue is not None:
                rounds.append(dialogue.metrics(rollouts.truncated.size))
            return judged

        if self.source.experiencer is not None:
            return self._with_experience(self.source.experiencer, params, version, stream, phase)
        if self.max_rounds is None:
            return *generate(stream), _turn_metrics(rounds)
        judge = self._judge_live(live_groups, phase)
        filled = refill.fill(stream, generate, judge, self.max_rounds)
        return *filled[:3], filled[3] | _turn_metrics(rounds)

    def _with_experience(
        self,
        experiencer: Experiencer,
        params: Params,
        version: int,
        stream: Stream,
        phase: Phase,
    ) -> tuple[Stream, Rollouts, RewardLog, Metrics]:
        """As `_generate`, some of whose groups hold a right sample of an earlier step."""
        with phase("sample"):
            stream, prompts = experiencer.select(self.source.select, stream, version)
            rollouts, *_ = self._sample(params, prompts, stream.key)
            rollouts = sharding.to_host(rollouts)
            num_tokens = mean(jnp.float32(rollouts.token_mask.sum()))  # of those that make room too
            rollouts = experiencer.mix(params, stream, rollouts)
        with phase("reward"):
            stream, rollouts, log = self.source.reward(stream, rollouts, (), params)
        stream, metrics = experiencer.observe(stream, sharding.to_host(rollouts))
        return stream, rollouts, log, metrics | {"num_tokens": num_tokens}

    def _judge_live(
        self, live_groups: LiveGroups | None, phase: Phase
    ) -> Callable[[Rollouts], refill.Verdict]:
        if live_groups is None:
            raise ValueError(
                "rollout.refill replaces groups that teach nothing: give collect live_groups, as "
                "functools.partial(run.live_groups, learner)"
            )

        def judge(rollouts: Rollouts) -> refill.Verdict:
            with phase("prepare"):
                live = live_groups(put_prompts(self.mesh, rollouts))
            return refill.Verdict(live, *self.summed_rewards(rollouts))

        return judge

    def summed_rewards(self, rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray]:
        """The weighted sum of each sample's rewards and whether it was scored, [P, G], on the
        host."""
        rewards = jax.tree.map(jnp.asarray, sharding.to_host(rollouts.rewards))
        summed = diagnostics.as_summed(rewards, self.reward_weights, self.chain)
        return sharding.to_host(diagnostics.weighted_sum(summed, self.reward_weights))

    def _sample(
        self, params: Params, prompts: Prompts, key: np.ndarray
    ) -> tuple[Rollouts, Sequence[Judged], Dialogue | None]:
        """Samples, what was judged before their end, and where they were answered."""
        drawing, early = self.source.draw(params, prompts, key), []
        if self.early_judge is not None:
            progress = rollout_progress(prompts, self.num_rows, self.max_steps)
            row = np.asarray(prompts.row)
            early = judge_early(self.early_judge, drawing.ended, row, progress, drawing.dialogue)
        return drawing.finish(), early, drawing.dialogue


SUMS = ("num_tokens", "refill/groups", "refill/discarded_", "refill/shortfall", "calls/")
"""How names of metrics begin that count something in the samples of a step."""


def _joined(metrics: Metrics, more: Metrics) -> Metrics:
    """The metrics of several batches that a step draws: sums of counts, and means of the rest."""
    counts = {
        name: mean(jnp.float32(metrics[name].result() + metric.result()))
        for name, metric in more.items()
        if name in metrics and name.startswith(SUMS)
    }
    return merge(metrics, more) | counts


def _without_columns(logs: Sequence[RewardLog]) -> RewardLog:
    """What was logged in several batches, but for values of single samples."""
    bare = [log._replace(columns={}) for log in logs]
    return merge_logs(bare, [np.arange(0)] * len(bare), 0, 0)


def _turn_metrics(rounds: Sequence[Mapping[str, float]]) -> Metrics:
    """Of the dialogues of a step, where samples were answered."""
    return {name: mean(jnp.float32(value)) for name, value in all_rounds(rounds).items()}
