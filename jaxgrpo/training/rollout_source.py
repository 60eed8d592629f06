"""What the rollouts of a run come from, and where its stream of them begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxgrpo.config import methods
from jaxgrpo.config.keys import DataKeys, RolloutKeys, ScoreKeys, TrainKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.scores import ANSWERS_OF_POLICIES, OF_ANSWERS, prompt_field
from jaxgrpo.core.types import Params, Rollouts, Stream, Waiting
from jaxgrpo.evaluation.rescoring import make_rescorer
from jaxgrpo.models import sharding
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout import refill
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT, Answers
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.goals import with_goals
from jaxgrpo.rollout.judging import (
    RolloutSource,
    make_judge,
    make_rewarder,
    make_selector,
    put_prompts,
)
from jaxgrpo.rollout.selection import PromptPolicy
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.trees import Trees
from jaxgrpo.training import inputs, prompted
from jaxgrpo.training.inputs import Inputs
from jaxgrpo.training.pretrained import Pretrained, run_goals
from jaxgrpo.training.replay import Replay, rollout_source_from_files
from jaxgrpo.update.answers import ANSWER, answer_geometry, behind_thoughts, pick_answer_logp
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
        other_prompts = {score.prompt for score in blueprint.scores.values()} - {None}
        needs |= {prompt_field(str(name)) for name in other_prompts}
        needs |= {FORCED, THOUGHT, MASK} if scored else set()
        return _replayed(run_inputs.replay, names, needs, trace)
    policy = methods.make_policy(rollout.prompts, rewards, mixture)
    read = blueprint.chain.needs | policy.needs
    answers = inputs.load_answers(
        data, rollout, pretrained, read, blueprint.sampling.stop_tokens, rows
    )
    columns = methods.needed_columns(needs - brought.keys(), rows, rewards, blueprint.scores)
    prompting = scores, rollout, run_inputs, blueprint.policy_model
    columns |= prompted.prompt_columns(*prompting)
    trace({**columns, **brought})
    functions = prompted.prompt_functions(*prompting)
    sizes = geometry.num_prompts, geometry.max_prompt_tokens
    select = make_selector(policy, prompts.encoded, *sizes, seed, mixture)
    goals = run_goals(rollout, pretrained.tokenizer, seed)
    if goals is not None:
        select = with_goals(select, goals, geometry.group_size)
    reward = make_rewarder(
        policy,
        make_judge(pretrained.tokenizer, rewards, rows),
        {entry.name: entry.flip for entry in rewards if entry.flip},
        columns,
        [source.fields for source in ([answers] if answers else []) + functions],
        _make_answer_scorer(policy, answers, pretrained, blueprint),
        train.steps,
        seed,
    )
    room = columns | {entry.field: np.empty((0, entry.width), np.int32) for entry in functions}
    sizes = geometry, names, room, answers, goals and goals.tokens.shape[1]
    waiting = _first_waiting(rollout, functools.partial(refill.no_groups, *sizes))
    draw_groups = functools.partial(draw, engine, group_size=geometry.group_size, grown=grown)
    return RolloutSource(policy, select, draw_groups, reward, waiting, answers, goals)


def _make_answer_scorer(
    policy: PromptPolicy, answers: Answers | None, pretrained: Pretrained, blueprint: Blueprint
) -> Callable[[Params, Rollouts], dict[str, np.ndarray]] | None:
    """What scores reference answers for a prompt policy, by the parameters that sampled; None where
    it needs no scores.

    Raises: InputError where it needs other fields.
    """
    if wrong := sorted(policy.needs - ANSWERS_OF_POLICIES):
        expected = ", ".join(sorted(ANSWERS_OF_POLICIES))
        raise InputError(
            f"rollout.prompts: {policy.name} needs {', '.join(wrong)}, and a prompt policy may need "
            f"{expected} alone"
        )
    quantities = {
        name: OF_ANSWERS[name].quantity for name in sorted(policy.needs) if OF_ANSWERS[name].policy
    }
    if answers is None or not quantities:
        return None
    mesh, options = blueprint.samples_on, dict.fromkeys(quantities.values(), True)
    geometry = answer_geometry(blueprint.geometry, answers.longest, 1, False, mesh)
    temperature, model = blueprint.sampling.temperature, pretrained.model_on(mesh)
    rescore = make_rescorer(model, mesh, temperature=temperature, **options)
    assert rescore is not None
    behind = jax.jit(functools.partial(behind_thoughts, geometry=geometry))
    pick = jax.jit(pick_answer_logp)

    def score(params: Params, rollouts: Rollouts) -> dict[str, np.ndarray]:
        rollouts = put_prompts(mesh, rollouts)
        values = rescore(params, behind(rollouts))
        return sharding.to_host(
            {
                name: pick(values[quantity], rollouts)[ANSWER]
                for name, quantity in quantities.items()
            }
        )

    return score


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
