"""Where the rollouts of a run come from: its own policy and rewards, or files of saved ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax import Array
from jax.sharding import Mesh

from jaxgrpo.config import methods
from jaxgrpo.config.files import Config
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import FIELDS, OF_ANSWERS, Params, Prompts, Rollouts, TrainState
from jaxgrpo.models import sharding
from jaxgrpo.rewards import RewardLog
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout import refill
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT, Answers
from jaxgrpo.rollout.judging import make_rewarder, make_selector, put_prompts
from jaxgrpo.rollout.selection import PromptPolicy, sequential
from jaxgrpo.training import inputs
from jaxgrpo.training.replay import Replay
from jaxgrpo.update.forward import Blueprint
from jaxgrpo.update.step import Sample, Steps


class Origin(NamedTuple):
    """What the rollouts of a run come from."""

    policy: PromptPolicy
    select: Callable[[TrainState], tuple[Prompts, TrainState]]
    sample: Sample
    reward: Callable[..., tuple[TrainState, Rollouts, RewardLog]]
    leftover: Rollouts | None  # of the first state
    answers: Answers | None  # of each row, where the chain reads what a pass over them gives


def origin_of(
    config: Config,
    read: Mapping[str, Any],
    blueprint: Blueprint,
    steps: Steps,
    rewards: Sequence[Reward],
) -> Origin:
    """The policy with its sampler and rewards; or the files of a replay.

    Args:
      read: fields of `Setup` by name: what was read from disk.

    Raises: InputError where the method reads a field that nothing brings, and where files have
      other rewards than the run.
    """
    names, geometry = tuple(reward.name for reward in rewards), blueprint.geometry
    # A loss reads nothing of reference answers: no token of theirs is one of its samples'.
    scored = blueprint.chain.needs & OF_ANSWERS.keys()
    needs = (blueprint.chain.needs - scored) | blueprint.objective.needs
    tokenizer, rows, mesh = read["tokenizer"], read["rows"], blueprint.mesh
    if read["replay"]:
        needs = needs - FIELDS.keys() - set(names)
        needs |= {FORCED, THOUGHT, MASK} if scored else set()
        return of_files(read["replay"], mesh, names, needs)
    answers = inputs.load_answers(config, blueprint, tokenizer, rows)
    columns = methods.needed_columns(needs, rows, rewards)
    policy, seed = methods.make_policy(config, rewards), config.train.seed
    there = blueprint.samples_on  # until `prepare`, which brings the rollouts to the update's mesh
    select = make_selector(there, policy, read["encoded"], geometry, seed)
    reward = make_rewarder(
        there, policy, tokenizer, rewards, rows, columns, answers, config.train.steps, seed
    )
    is_kept = config.rollout.refill is not None
    leftover = refill.no_leftover(geometry, names, columns, answers) if is_kept else None
    return Origin(policy, select, steps.sample, reward, leftover, answers)


def of_files(
    replay: Replay, mesh: Mesh, rewards: Collection[str], fields: Collection[str]
) -> Origin:
    """Saved rollouts: each function returns its part of what the file of the step holds.

    The prompt policy that comes with them is never asked.

    Args:
      rewards: names of the run's rewards.
      fields: names of those that its method reads; others in the files are left out.

    Raises: InputError where a file has other rewards, or lacks a field.
    """
    for path, named, brought in zip(replay.files, replay.rewards, replay.fields, strict=True):
        if named != set(rewards):
            raise InputError(
                f"{path}: holds rewards called {', '.join(sorted(named))}, but the config's are "
                f"called {', '.join(sorted(rewards))}: give these the names, by `name` in rewards"
            )
        if missing := sorted(set(fields) - brought):
            raise InputError(
                f"{path}: the method reads the fields {', '.join(missing)}, which are not there; "
                f"it holds {', '.join(sorted(brought)) or 'none'}: write fields.{missing[0]} too"
            )

    def saved(step: Any) -> Rollouts:
        return replay.load(int(sharding.to_host(step)) % len(replay.files))

    def select(state: TrainState) -> tuple[Prompts, TrainState]:
        names = [field.name for field in dataclasses.fields(Prompts) if field.name != "step"]
        one = saved(state.step)
        own: dict[str, Any] = {name: getattr(one, name) for name in names}
        return put_prompts(mesh, Prompts(**own, step=sharding.to_host(state.step))), state

    def sample(params: Params, prompts: Prompts, key: Array) -> Rollouts:
        names = ("completion_tokens", "token_mask", "behavior_logp", "truncated", "policy_version")
        one = saved(prompts.step)
        own: dict[str, Any] = {name: getattr(one, name) for name in names}
        return Rollouts(**vars(prompts), **put_prompts(mesh, own), rewards={}, fields={})

    def reward(
        state: TrainState, rollouts: Rollouts, early: Sequence[Any] = ()
    ) -> tuple[TrainState, Rollouts, RewardLog]:
        one = saved(rollouts.step)
        kept = {name: one.fields[name] for name in sorted(fields)}
        placed: dict[str, Any] = put_prompts(mesh, {"rewards": one.rewards, "fields": kept})
        return state, dataclasses.replace(rollouts, **placed), RewardLog({}, {}, {}, {})

    return Origin(sequential(), select, sample, reward, None, None)
