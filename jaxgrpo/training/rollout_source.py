"""What the rollouts of a run come from, and where its stream of them begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgrpo.config import methods
from jaxgrpo.config.keys import DataKeys, RolloutKeys, ScoreKeys, TrainKeys
from jaxgrpo.core import records
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.scores import (
    ANSWERED,
    ANSWERS_OF_POLICIES,
    OF_ANSWERS,
    OF_BATCH,
    Score,
    choice_field,
    prompt_field,
)
from jaxgrpo.core.types import Params, Rollouts, Stream, Waiting
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.evaluation.rescoring import make_rescorer
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout import refill
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT
from jaxgrpo.rollout.batch import Drawing
from jaxgrpo.rollout.dialogue import FORK, TURN
from jaxgrpo.rollout.drift import DRIFT, Drift
from jaxgrpo.rollout.experience import Rank
from jaxgrpo.rollout.goals import Goals, with_goals
from jaxgrpo.rollout.judging import (
    RolloutSource,
    Select,
    make_judge,
    make_rewarder,
    make_selector,
    put_prompts,
)
from jaxgrpo.rollout.prefixes import Prefixes, make_prefixes
from jaxgrpo.rollout.selection import PromptPolicy
from jaxgrpo.rollout.trees import DEPTH
from jaxgrpo.training import inputs, prompted
from jaxgrpo.training.experience import make_rank
from jaxgrpo.training.inputs import Inputs
from jaxgrpo.training.pretrained import run_goals
from jaxgrpo.training.replay import Replay, needed_support, rollout_source_from_files
from jaxgrpo.update.answers import ANSWER, answer_geometry, behind_thoughts, pick_answer_logp
from jaxgrpo.update.forward import Blueprint
from jaxgrpo.update.packing import Geometry

_OF_TOKENS = {
    TURN: "tools or environment",
    DEPTH: "tree.branch",
    records.EXPERTS: "train.routing",
    records.SUPPORT: "train.support",
}
"""Field of the tokens that were drawn -> the key that brings it."""


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
    draw_groups: Callable[..., Drawing],
    rewards: Sequence[Reward],
    brought: Mapping[str, Any] = {},
) -> RolloutSource:
    """The prompt policy with what draws and rewards, or the files of a replay. `brought` holds the
    shapes of fields that drawing and the collector add.

    Raises: InputError where the method reads a field that nothing brings, or files lack a reward.
    """
    names, geometry = [reward.name for reward in rewards], blueprint.geometry
    # A loss reads nothing of reference answers: no token of theirs is one of its samples'.
    scored = blueprint.chain.needs & OF_ANSWERS.keys()
    needs = (blueprint.chain.needs - scored) | (blueprint.update_needs - OF_BATCH.keys())
    pretrained, rows = run_inputs.pretrained, run_inputs.prompts.rows
    tracing = rollout, blueprint.chain, rewards, len(rows)
    trace = functools.partial(methods.trace_chain, *tracing, scores=blueprint.scores)
    _refuse_other_tokens(scored, records.without(brought, dict(geometry.records)))
    if run_inputs.replay:
        reading = bool(scored), blueprint.sampling.support > 0, blueprint.objective.proximal
        return _replayed(run_inputs.replay, names, needs, blueprint.scores, trace, *reading)
    mesh, temperature = blueprint.samples_on, blueprint.sampling.temperature
    scoring = pretrained.model_on(mesh), mesh
    rank = make_rank(*scoring, temperature) if DRIFT in brought else None
    policy, prefixes = _make_policy(rollout, run_inputs, rewards, train.seed, rank)
    read, ends = blueprint.chain.needs | policy.needs, blueprint.sampling.stop_tokens
    _refuse_whole_samples(geometry.has_forks, read | needs, blueprint.scores)
    answers = inputs.load_answers(data, rollout, pretrained, read, ends, rows)
    columns = methods.needed_columns(needs.difference(brought), rows, rewards, blueprint.scores)
    prompting = scores, rollout, run_inputs, blueprint.policy_model
    score_columns, functions = prompted.read_prompts(*prompting, names)
    columns = {name: on_device(column) for name, column in {**columns, **score_columns}.items()}
    trace({**columns, **brought})
    goals = run_goals(rollout, pretrained.tokenizer, train.seed)
    select = _make_select(policy, run_inputs.prompts, goals, geometry, train.seed, prefixes)
    scoring = answers.longest if answers else 0, *scoring, geometry, temperature
    score_answers = make_answer_scorer(policy, *scoring)
    add_fields = [source.fields for source in ([answers] if answers else []) + functions]
    judging = make_judge(pretrained.tokenizer, rewards, rows), columns, add_fields, score_answers
    room = columns | {entry.field: entry.no_prompts for entry in functions}
    sizes = geometry, names, {**room, **brought}, answers, goals and goals.tokens.shape[1]
    waiting = _first_waiting(rollout, functools.partial(refill.no_groups, *sizes))
    reward = make_rewarder(policy, *judging, train.steps, train.seed)
    return RolloutSource(policy, select, draw_groups, reward, waiting, answers, goals, prefixes)


def _make_policy(
    rollout: RolloutKeys,
    run_inputs: Inputs,
    rewards: Sequence[Reward],
    seed: int,
    rank: Rank | None,
) -> tuple[PromptPolicy, Prefixes | None]:
    """The prompt policy, and the texts that prompts begin with, which it then watches. `rank` gives
    log-probs where it brings the drift."""
    policy = methods.make_policy(rollout.prompts, rewards, run_inputs.prompts.mixture)
    if rank is not None:
        policy = Drift(policy, rollout.max_completion_tokens, rank).watch()
    weights = {reward.name: reward.weight for reward in rewards}
    written = run_inputs.prompts, run_inputs.chat, rollout.max_prompt_tokens
    prefixes = make_prefixes(rollout.prefixes, *written, weights, seed)
    return policy if prefixes is None else prefixes.watch(policy), prefixes


def _make_select(
    policy: PromptPolicy,
    prompts: PromptData,
    goals: Goals | None,
    geometry: Geometry,
    seed: int,
    prefixes: Prefixes | None,
) -> Select:
    sizes = geometry.num_prompts, geometry.max_prompt_tokens
    select = make_selector(policy, prompts.encoded, *sizes, seed, prompts.mixture, prefixes)
    return select if goals is None else with_goals(select, goals, geometry.group_size)


def on_device(values: np.ndarray) -> np.ndarray:
    """Values of a column, in the dtype that they have on a device."""
    return values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)


def make_answer_scorer(
    policy: PromptPolicy,
    longest: int,
    model: Model,
    mesh: Mesh,
    geometry: Geometry,
    temperature: float,
) -> Callable[[Params, Rollouts], dict[str, np.ndarray]]:
    """What gives the fields of reference answers that a prompt policy needs, by the parameters that
    sampled.

    Args:
      longest: tokens of the longest prefix and answer.
      model, mesh: that sample.

    Raises: InputError where it needs other fields.
    """
    if wrong := sorted(policy.needs - ANSWERS_OF_POLICIES):
        expected = ", ".join(sorted(ANSWERS_OF_POLICIES))
        raise InputError(
            f"rollout.prompts: {policy.name} needs {', '.join(wrong)}, and a prompt policy may "
            f"need {expected} alone"
        )
    scores = {name: OF_ANSWERS[name] for name in sorted(policy.needs) if OF_ANSWERS[name].policy}
    quantities = {score.quantity for score in scores.values()}
    longer = answer_geometry(geometry, longest, 1, False, mesh)
    rescore = make_rescorer(
        model,
        mesh,
        temperature=temperature,
        logp="logp" in quantities,
        rank="rank" in quantities,
        tokens=longer.tokens,
    )
    if rescore is None:
        return lambda params, rollouts: {}
    behind = jax.jit(functools.partial(behind_thoughts, geometry=longer))
    pick = jax.jit(pick_answer_logp)

    def score_answers(params: Params, rollouts: Rollouts) -> dict[str, np.ndarray]:
        rollouts = put_prompts(mesh, rollouts)
        values = rescore(params, behind(rollouts))
        picked = {name: pick(values[score.quantity], rollouts) for name, score in scores.items()}
        return sharding.to_host({name: fields[ANSWER] for name, fields in picked.items()})

    return score_answers


def _replayed(
    replay: Replay,
    rewards: Sequence[str],
    needs: Collection[str],
    scores: Mapping[str, Score],
    trace: Callable[[Any], None],
    scores_answers: bool,
    takes_support: bool,
    proximal: str,
) -> RolloutSource:
    """The files of a replay, whose fields the method can read.

    Args:
      takes_support: whether updates take again what tokens were drawn among.
      proximal: `loss.proximal`.
    """
    needs = {*needs} | ({FORCED, THOUGHT, MASK} if scores_answers else set())
    needs |= needed_support(replay, takes_support, proximal == "behavior")
    has_forks = any(FORK in names for names in replay.fields)
    _refuse_whole_samples(has_forks, needs, scores)
    fields = needs - scores.keys() - {*rewards}
    fields |= {prompt_field(score.prompt) for score in scores.values() if score.prompt is not None}
    fields |= {choice_field(name) for name, score in scores.items() if score.policies}
    source = rollout_source_from_files(replay, rewards, fields)
    trace(replay.load(0).fields)
    return source


def _refuse_whole_samples(has_forks: bool, needs: Set[str], scores: Mapping[str, Score]) -> None:
    """Raises: InputError where samples fork, for scores of them as one sequence behind a prompt."""
    names = {*OF_ANSWERS, DRIFT}
    for name, score in scores.items():
        names |= {name} if score.prompt is not None or score.quantity == "effective_rank" else set()
    if has_forks and (wrong := sorted(needs & names)):
        raise InputError(
            f'data.history = "fork": the method reads {wrong[0]}, which takes a sample for one '
            "sequence behind a prompt; leave one of the two out"
        )


def _refuse_other_tokens(needs: Set[str], brought: Collection[str]) -> None:
    """Raises: InputError where fields of the samples' tokens meet known answers that replace some
    of these."""
    for name, key in _OF_TOKENS.items():
        if ANSWERED in needs and name in brought:
            raise InputError(
                f"{key}: the method trains known answers in place of what samples went on with "
                f"(train_on_answers), and {name} is of the tokens that were drawn; leave one of "
                "the two out"
            )


def _first_waiting(rollout: RolloutKeys, room: Callable[[], Rollouts]) -> Waiting:
    """What waits when a run begins: nothing, with room for what will."""
    ahead = tuple(room() for _ in range(rollout.staleness))
    return Waiting(room() if rollout.refill else None, ahead)
