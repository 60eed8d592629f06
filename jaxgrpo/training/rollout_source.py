"""What the rollouts of a run come from, and where its stream of them begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxgrpo.config import methods
from jaxgrpo.config.keys import DataKeys, RolloutKeys, ScoreKeys, TrainKeys
from jaxgrpo.core.scores import OF_ANSWERS, prompt_field
from jaxgrpo.core.types import Rollouts, Stream, Waiting
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout import refill
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.goals import with_goals
from jaxgrpo.rollout.judging import RolloutSource, make_rewarder, make_selector
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.trees import Trees
from jaxgrpo.training import inputs, teachers
from jaxgrpo.training.inputs import Inputs
from jaxgrpo.training.pretrained import run_goals
from jaxgrpo.training.replay import Replay, rollout_source_from_files
from jaxgrpo.update.forward import Blueprint


def first_stream(source: RolloutSource, num_rows: int, seed: int) -> Stream:
    """The stream before the first step."""
    return Stream(
        cursor=np.zeros((), np.int32),
        key=np.asarray(jax.random.key_data(jax.random.key(seed))),
        prompt_policy_state=source.policy.init(num_rows, seed),
        waiting=source.waiting,
    )


def make_rollout_source(
    rollout: RolloutKeys,
    data: DataKeys,
    train: TrainKeys,
    scores: Sequence[ScoreKeys],
    run_inputs: Inputs,
    blueprint: Blueprint,
    engine: SlotEngine,
    rewards: Sequence[Reward],
    grown: Trees | None = None,
    brought: Mapping[str, Any] = {},
) -> RolloutSource:
    """The prompt policy with the engine and rewards, or the files of a replay. `brought` holds the
    shapes of fields that drawing and the collector add.

    Raises: InputError where the method reads a field that nothing brings, and where files have
      other rewards than the run.
    """
    names, geometry = tuple(reward.name for reward in rewards), blueprint.geometry
    # A loss reads nothing of reference answers: no token of theirs is one of its samples'.
    scored = blueprint.chain.needs & OF_ANSWERS.keys()
    needs = (blueprint.chain.needs - scored) | blueprint.objective.needs
    prompts, pretrained = run_inputs.prompts, run_inputs.pretrained
    rows, mixture, seed = prompts.rows, prompts.mixture, train.seed
    trace = functools.partial(methods.trace_chain, rollout, blueprint.chain, rewards, len(rows))
    trace = functools.partial(trace, scores=blueprint.scores)
    if run_inputs.replay:
        needs = needs - blueprint.scores.keys() - set(names)
        needs |= {prompt_field(entry.prompt) for entry in scores if entry.prompt is not None}
        needs |= {FORCED, THOUGHT, MASK} if scored else set()
        return _replayed(run_inputs.replay, names, needs, trace)
    answers = inputs.load_answers(
        data, rollout, pretrained, blueprint.chain.needs, blueprint.sampling.stop_tokens, rows
    )
    columns = methods.needed_columns(needs - brought.keys(), rows, rewards, blueprint.scores)
    columns |= teachers.prompt_columns(scores, rollout, run_inputs, blueprint.policy_model)
    trace({**columns, **brought})
    policy = methods.make_policy(rollout.prompts, rewards, mixture)
    sizes = geometry.num_prompts, geometry.max_prompt_tokens
    select = make_selector(policy, prompts.encoded, *sizes, seed, mixture)
    goals = run_goals(rollout, pretrained.tokenizer, seed)
    if goals is not None:
        select = with_goals(select, goals, geometry.group_size)
    reward = make_rewarder(
        policy, pretrained.tokenizer, rewards, rows, columns, answers, train.steps, seed
    )
    sizes = geometry, names, columns, answers, goals and goals.tokens.shape[1]
    waiting = _first_waiting(rollout, functools.partial(refill.no_groups, *sizes))
    draw_groups = functools.partial(draw, engine, group_size=geometry.group_size, grown=grown)
    return RolloutSource(policy, select, draw_groups, reward, waiting, answers, goals)


def _replayed(
    replay: Replay, rewards: Sequence[str], needs: Collection[str], trace: Callable[[Any], None]
) -> RolloutSource:
    """The files of a replay, whose fields the method can read."""
    source = rollout_source_from_files(replay, rewards, needs)
    trace(replay.load(0).fields)
    return source


def _first_waiting(rollout: RolloutKeys, room: Callable[[], Rollouts]) -> Waiting:
    """What waits when a run begins: nothing, with room for what will."""
    ahead = tuple(room() for _ in range(rollout.staleness))
    return Waiting(room() if rollout.refill else None, ahead)
