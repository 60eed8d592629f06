"""What the rollouts of a run come from, and where its stream of them begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgrpo.advantages.streams import sums_scored
from jaxgrpo.config import methods
from jaxgrpo.config.keys import DataKeys, RolloutKeys, ScoreKeys, TrainKeys
from jaxgrpo.core import records
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.scores import (
    ANSWERED,
    ANSWERS_OF_POLICIES,
    OF_ANSWERS,
    OF_BATCH,
    REACHED,
    Score,
    choice_field,
    prompt_field,
)
from jaxgrpo.core.types import GENERATOR, Params, Rollouts, Stream, Waiting
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.evaluation.rescoring import make_rescorer
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model
from jaxgrpo.models.low_bit import DTYPES as LOW_BIT
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout import refill
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT, Answers
from jaxgrpo.rollout.batch import Drawing
from jaxgrpo.rollout.dialogue import TURN
from jaxgrpo.rollout.drift import DRIFT, Drift
from jaxgrpo.rollout.experience import Rank
from jaxgrpo.rollout.goals import Goals, with_goals
from jaxgrpo.rollout.judging import (
    Judge,
    RolloutSource,
    Select,
    make_rewarder,
    make_selector,
    put_prompts,
)
from jaxgrpo.rollout.prefixes import Prefixes, make_prefixes
from jaxgrpo.rollout.selection import PromptPolicy
from jaxgrpo.rollout.trees import DEPTH
from jaxgrpo.training import inputs, prompted
from jaxgrpo.training.collecting.experience import make_rank
from jaxgrpo.training.collecting.replay import Replay, needed_support, rollout_source_from_files
from jaxgrpo.training.inputs import Inputs
from jaxgrpo.training.pretrained import run_goals
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
        key=np.asarray(jax.random.key_data(jax.random.key(seed, impl=GENERATOR))),
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
    replayed: Set[str] = frozenset(),
) -> RolloutSource:
    """The prompt policy with what draws and rewards, or the files of a replay. `brought`: shapes of
    fields that drawing and the collector add; `replayed`: fields of files read beside the method's.

    Raises: InputError where a field is missing or too wide for the loss, or files lack a reward.
    """
    chain, geometry, pretrained = blueprint.chain, blueprint.geometry, run_inputs.pretrained
    rows, names = run_inputs.prompts.rows, [reward.name for reward in rewards]
    replay, loss = run_inputs.replay, blueprint.objective
    needs, scored = _needs(chain.needs, blueprint.update_needs)
    options: Any = {"scores": blueprint.scores, "trains_texts": blueprint.trains_texts}
    trace = functools.partial(methods.trace_chain, rollout, chain, rewards, len(rows), **options)
    _refuse_other_tokens(scored, records.without(brought, dict(geometry.records)))
    if replay:
        needs |= {FORCED, THOUGHT, MASK, REACHED} if scored else set()
        needs |= needed_support(replay, blueprint.sampling.support > 0, loss.proximal == "behavior")
        return _replayed(replay, names, needs | replayed, blueprint.scores, loss.needs, trace)
    mesh, sums, sampling = blueprint.samples_on, sums_scored(chain), blueprint.sampling
    model = pretrained.model_on(mesh)
    rank = make_rank(model, mesh, sampling.temperature) if DRIFT in brought else None
    policy, prefixes = _make_policy(rollout, run_inputs, rewards, train.seed, rank, sums)
    read, ends = chain.needs | policy.needs, sampling.stop_tokens
    _refuse_whole_samples(geometry.has_forks, read | needs, blueprint.scores)
    answers = inputs.load_answers(data, rollout, pretrained, read, ends, rows)
    longest, model_for = answers.longest if answers else 0, blueprint.policy_model
    score_answers = make_answer_scorer(policy, longest, model, mesh, geometry, sampling.temperature)
    columns = methods.needed_columns(needs.difference(brought), rows, rewards, blueprint.scores)
    methods.refuse_wide(loss.needs, columns, (len(rows),))
    score_columns, functions = prompted.read_prompts(scores, rollout, run_inputs, model_for, names)
    columns = {name: on_device(column) for name, column in {**columns, **score_columns}.items()}
    trace({**columns, **brought})
    goals = run_goals(rollout, pretrained.tokenizer, train.seed)
    select = _make_select(policy, run_inputs.prompts, goals, geometry, train.seed, prefixes)
    judge = Judge(pretrained.tokenizer, rewards, rows)
    fields = [entry.fields for entry in ([answers] if answers else []) + functions]
    reward = make_rewarder(policy, judge, columns, fields, score_answers, train.steps, train.seed)
    room = columns | {entry.field: entry.no_prompts for entry in functions} | dict(brought)
    waiting = _first_waiting(rollout, geometry, names, room, answers, goals)
    return RolloutSource(policy, select, draw_groups, reward, waiting, answers, goals, prefixes)


def _needs(
    chain_needs: frozenset[str], update_needs: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """(fields that rollouts come with, fields of reference answers, which the chain alone reads: no
    token of theirs is one of the loss's samples')."""
    scored = chain_needs.intersection(OF_ANSWERS)  # & with keys is a set
    return (chain_needs - scored) | (update_needs - OF_BATCH.keys()), scored


def _make_policy(
    rollout: RolloutKeys,
    run_inputs: Inputs,
    rewards: Sequence[Reward],
    seed: int,
    rank: Rank | None,
    sum_scored: bool,
) -> tuple[PromptPolicy, Prefixes | None]:
    """The prompt policy, and the texts that prompts begin with, which it then watches.

    Args:
      rank: gives log-probs where it brings the drift.
      sum_scored: whether the chain of the run sums what scored a sample.

    Raises: InputError where samples come with log-probs of another distribution than the policy's.
    """
    mixture = run_inputs.prompts.mixture
    policy = methods.make_policy(rollout.prompts, rewards, mixture, sum_scored)
    if rank is not None:
        _refuse_other_distribution(rollout)
        sizes = rollout.max_completion_tokens, rollout.max_prompt_tokens
        policy = Drift(policy, *sizes, rank).watch()
    weights = {reward.name: reward.weight for reward in rewards}
    prefixes = make_prefixes(
        rollout.prefixes,
        run_inputs.prompts,
        run_inputs.chat,
        rollout.max_prompt_tokens,
        weights,
        seed,
        sum_scored,
    )
    return policy if prefixes is None else prefixes.watch(policy), prefixes


def _refuse_other_distribution(rollout: RolloutKeys) -> None:
    """Raises: InputError where the drift would be that of the sampler from the policy."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_completion_tokens": 0}
    cuts = [name for name, value in off.items() if getattr(rollout, name) != value]
    low = [n for n in ("kv_cache_dtype", "weight_dtype") if getattr(rollout, n) in LOW_BIT]
    for name in (*cuts, *low):
        what = "some of the tokens" if name in cuts else "a policy in 8 bits"
        raise InputError(
            f"rollout.{name} = {getattr(rollout, name)!r}: samples come with log-probs of {what}, "
            "which the drift of a recipe compares with those of the policy later; leave one of the "
            "two out"
        )


def _make_select(
    policy: PromptPolicy,
    prompts: PromptData,
    goals: Goals | None,
    geometry: Geometry,
    seed: int,
    prefixes: Prefixes | None,
) -> Select:
    select = make_selector(
        policy,
        prompts.encoded,
        geometry.num_prompts,
        geometry.max_prompt_tokens,
        seed,
        prompts.mixture,
        prefixes,
    )
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
    longer = answer_geometry(geometry, longest, 1, False, mesh)
    rescore = make_rescorer(
        model,
        mesh,
        temperature=temperature,
        quantities={score.quantity for score in scores.values()},
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
    needs: Set[str],
    scores: Mapping[str, Score],
    read_by_loss: Set[str],
    trace: Callable[[Any], None],
) -> RolloutSource:
    """The files of a replay, whose fields the method can read."""
    _refuse_whole_samples(replay.has_forks, needs, scores)
    fields = needs - scores.keys() - {*rewards}
    fields |= {prompt_field(score.prompt) for score in scores.values() if score.prompt is not None}
    fields |= {choice_field(name) for name, score in scores.items() if score.policies}
    source = rollout_source_from_files(replay, rewards, fields)
    first = replay.load(0)
    methods.refuse_wide(read_by_loss, first.fields, first.token_mask.shape)
    trace(first.fields)
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


def _first_waiting(
    rollout: RolloutKeys,
    geometry: Geometry,
    rewards: Sequence[str],
    columns: Mapping[str, Any],
    answers: Answers | None,
    goals: Goals | None,
) -> Waiting:
    """What waits when a run begins: nothing, with room for what will."""
    longest_goal = None if goals is None else goals.tokens.shape[1]

    def room() -> Rollouts:
        return refill.no_groups(geometry, rewards, columns, answers, longest_goal)

    ahead = tuple(room() for _ in range(rollout.staleness))
    return Waiting(room() if rollout.refill else None, ahead)
