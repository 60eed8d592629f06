"""`prepare`: from scored samples to the batches of a step's updates.

What the chain needs is scored on all samples, the chain judges them, minibatches are dealt and
planned, and what only the loss needs is scored on the live ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgrpo import advantages
from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.advantages.chains import at_tokens
from jaxgrpo.core import records
from jaxgrpo.core.metrics import Metrics, merge
from jaxgrpo.core.records import EXPERTS, SUPPORT
from jaxgrpo.core.scores import (
    ANSWERED,
    OF_ANSWERS,
    SCORES,
    TOKEN_DRAW,
    Score,
    answer_field,
    choice_field,
    passes,
    prompt_field,
)
from jaxgrpo.core.types import TOKEN_ARRAYS, Learner, Params, Rollouts, Signal, TrainBatch
from jaxgrpo.losses import Reduction
from jaxgrpo.models import routing, sharding
from jaxgrpo.models.api import Constrain
from jaxgrpo.rollout.answers import FORCED
from jaxgrpo.update import answers, diagnostics, packing
from jaxgrpo.update.batch_losses import token_draw
from jaxgrpo.update.forward import Blueprint, params_of, score_batch


class Prepared(NamedTuple):
    """What `prepare` returns: the batches to update on, and what the log shows of them."""

    batches: tuple[TrainBatch, ...]  # one per update, in order
    advantage: Array  # [P, G], the mean over a sample's tokens
    live: np.ndarray  # [P, G] bool, samples that can move the parameters
    metrics: Metrics


Jitted = Callable[..., Any]
"""A function that jax.jit has compiled."""

_Judged = tuple[Array, Array, Array]
"""(advantage, mask, tokens that the reduction counts), each [P, G, T]"""


class Preparer:
    """The jitted functions of `prepare`, and what the host does between them."""

    def __init__(self, blueprint: Blueprint):
        self.blueprint: Blueprint = blueprint
        shape = blueprint.geometry.num_prompts, blueprint.geometry.group_size
        shape = *shape, blueprint.geometry.max_completion_tokens
        self.score: Jitted = jax.jit(self._score, static_argnums=(2, 3, 4))
        moving = {SUPPORT, *blueprint.naming(blueprint.scores)}
        behind_prompt = functools.partial(_behind_prompt, moving)
        self.behind_prompt: Jitted = jax.jit(behind_prompt, static_argnums=1)
        self.per_sample: Jitted = jax.jit(functools.partial(_per_sample, shape))
        judged = blueprint.chain, blueprint.objective.acts_on_all, blueprint.reward_weights
        judged = *judged, blueprint.drawn_at, blueprint.mesh
        self.judge: Jitted = jax.jit(functools.partial(_judge, *judged))
        self.recipe: AdvantageTransform = blueprint.recipe or blueprint.chain
        self.live: Jitted = jax.jit(functools.partial(_live, self.recipe, blueprint.mesh))
        self.weigh: Jitted = jax.jit(functools.partial(_weigh, blueprint.objective.reduction))
        constrain = sharding.constrain(blueprint.mesh)
        self.move_rollouts: Jitted = jax.jit(functools.partial(_move_rollouts, constrain))
        self.gather: Jitted = jax.jit(functools.partial(packing.gather, constrain=constrain))
        load = functools.partial(routing.load_metrics, blueprint.model.config.kinds)
        self.load: Jitted = jax.jit(load)
        self.scatter: Jitted = jax.jit(packing.scatter)
        self.measure: Jitted = jax.jit(packing.measure_lengths)
        self.draw: Jitted = jax.jit(token_draw)
        self.drift: Jitted = jax.jit(diagnostics.drift_metrics, static_argnums=3)
        self.behind_thoughts: Jitted = jax.jit(answers.behind_thoughts, static_argnums=(1, 2))
        self.pick_answer_logp: Jitted = jax.jit(answers.pick_answer_logp, static_argnums=2)
        self.with_answers: Jitted = jax.jit(answers.with_answers)

    def prepare(self, learner: Learner, rollouts: Rollouts) -> tuple[Learner, Prepared]:
        compact, geometry = self.blueprint.compact, self.blueprint.geometry
        if self.blueprint.has_two_meshes:
            rollouts = self.move_rollouts(rollouts)
        load = self.load(rollouts.fields[EXPERTS]) if EXPERTS in rollouts.fields else {}
        drawn = rollouts = self.recorded(rollouts)
        rollouts, lengths = self.with_fields(learner, rollouts, self.blueprint.chain.needs)
        advantage_state, judged, live, per_sample, metrics = self.judge(
            learner.advantage_state, rollouts, drawn
        )
        live, metrics = sharding.to_host(live), merge(metrics, load)
        plans, batches = [], []
        planned = live if compact else np.ones_like(live)
        rollouts = self.with_fields_apart(learner, rollouts, planned)
        for prompts, plan in _plans(lengths, planned, geometry):
            metrics = merge(metrics, packing.work(plan, lengths, geometry))
            batches.append(self.assemble(learner, rollouts, judged, prompts, plan))
            plans.append(plan)
        learner = dataclasses.replace(learner, advantage_state=advantage_state)
        for name in diagnostics.ANCHORS if self.blueprint.drawn_at is not None else ():
            if name not in rollouts.fields and name in batches[0].fields:
                # Of all completions or of none: those that the loss leaves out are no random ones.
                mask = diagnostics.fresh_tokens(rollouts) & bool(live.all() or not compact)
                rows = [batch.fields[name] for batch in batches]
                anchor_logp = self.rows_to_samples(rows, plans, rollouts.token_mask)
                drift = self.drift(rollouts.behavior_logp, anchor_logp, mask, SCORES[name].policy)
                metrics = merge(metrics, drift)
        updates = _in_order(batches, self.blueprint.num_iterations)
        return learner, Prepared(updates, per_sample, live, metrics)

    def recorded(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts without records, but for those that updates take again."""
        fields = records.without(rollouts.fields, dict(self.blueprint.geometry.records))
        return dataclasses.replace(rollouts, fields=fields)

    def live_groups(self, learner: Learner, rollouts: Rollouts) -> np.ndarray:
        """Groups [P] of which the recipe gives a token an advantage that is not 0."""
        if self.blueprint.has_two_meshes:
            rollouts = self.move_rollouts(rollouts)
        rollouts, _ = self.with_fields(learner, self.recorded(rollouts), self.recipe.needs)
        return sharding.to_host(self.live(learner.advantage_state, rollouts))

    def with_fields(
        self, learner: Learner, rollouts: Rollouts, needs: frozenset[str]
    ) -> tuple[Rollouts, packing.Lengths]:
        """The rollouts with what a chain needs, scored on every sample, and how long they then are:
        known answers may have taken the place of what followed the thoughts."""
        scores, geometry = self.blueprint.scores, self.blueprint.geometry
        scored = {OF_ANSWERS[name].policy for name in needs & OF_ANSWERS.keys()} - {""}
        fields: dict[str, Array] = {}
        for policy in sorted(scored):
            fields |= self.score_answers(learner, rollouts, policy)
        if ANSWERED in needs:
            rollouts = self.with_answers(rollouts, fields[answers.ANSWER])
        lengths = sharding.to_host(self.measure(rollouts))
        names = needs & scores.keys()
        apart = {name for name in names if not scores[name].is_of_batch}
        fields |= self.score_samples(learner, names - apart, rollouts, lengths, geometry)
        rollouts = self.score_apart(learner, apart, rollouts)
        fields = {**rollouts.fields, **fields}
        return dataclasses.replace(rollouts, fields=fields), lengths

    def with_fields_apart(self, learner: Learner, rollouts: Rollouts, live: np.ndarray) -> Rollouts:
        """The rollouts with what only the loss reads and no batch has (`Score.is_of_batch`), on
        live samples."""
        scores = self.blueprint.scores
        names = self.blueprint.objective.needs & scores.keys() - rollouts.fields.keys()
        apart = {name for name in names if not scores[name].is_of_batch}
        return self.score_apart(learner, apart, rollouts, live)

    def score_apart(
        self,
        learner: Learner,
        names: Collection[str],
        rollouts: Rollouts,
        live: np.ndarray | None = None,
    ) -> Rollouts:
        """The rollouts with the named fields, of samples with another prompt before them, or of
        rows that several policies share. NaN where a sample has no such prompt.

        Args:
          live: [P, G], the samples that are scored; None: all.
        """
        fields, scores = {}, self.blueprint.scores
        by_samples: dict[Any, list[str]] = {}
        for name in sorted(names):
            key = scores[name].prompt, name if scores[name].policies else None
            by_samples.setdefault(key, []).append(name)
        with_names = self.with_named_tokens(learner, names, rollouts, live)
        for (column, chooser), group in by_samples.items():
            moved, geometry = self.moved_behind(with_names, column)
            lengths = sharding.to_host(self.measure(moved))
            scored = np.ones(rollouts.token_mask.shape[:2], bool) if live is None else live
            scored = scored.reshape(lengths.completion.shape) & (lengths.prompt >= 0)[:, None]
            for policy, member in self.members(rollouts, scores[group[0]], chooser):
                rows = scored & np.repeat(member, len(scored) // len(member))[:, None]
                parts = self.score_samples(learner, group, moved, lengths, geometry, rows, policy)
                for name, part in parts.items():  # no sample is in two of them
                    part = self.per_sample(part, moved.prompt_mask)
                    fields[name] = fields[name] + part if name in fields else part
        return dataclasses.replace(rollouts, fields={**rollouts.fields, **fields})

    def with_named_tokens(
        self,
        learner: Learner,
        names: Collection[str],
        rollouts: Rollouts,
        live: np.ndarray | None,
    ) -> Rollouts:
        """The rollouts with the tokens that the named scores take from others (`Score.named_by`),
        behind the rows' prompts."""
        if not (fields := self.blueprint.naming(names)):
            return rollouts
        lengths = sharding.to_host(self.measure(rollouts))
        tokens = self.score_samples(
            learner, fields, rollouts, lengths, self.blueprint.geometry, live
        )
        return dataclasses.replace(rollouts, fields={**rollouts.fields, **tokens})

    def moved_behind(
        self, rollouts: Rollouts, column: str | None
    ) -> tuple[Rollouts, packing.Geometry]:
        """The samples behind another prompt, if there is a column of them, and their sizes."""
        geometry, mesh = self.blueprint.geometry, self.blueprint.mesh
        if column is None:
            return rollouts, geometry
        moved = self.behind_prompt(rollouts, column)
        prompts, samples = moved.token_mask.shape[:2]
        wide = geometry._replace(num_prompts=prompts, group_size=samples)
        wide = wide._replace(max_prompt_tokens=moved.prompt_tokens.shape[1])
        least = sharding.rounded_up(mesh, wide.widest, "sequence")
        return moved, wide._replace(tokens=max(geometry.tokens, least))

    def members(
        self, rollouts: Rollouts, score: Score, chooser: str | None
    ) -> Iterator[tuple[str | None, np.ndarray]]:
        """(policy, the groups [P] that it scores) of each policy of a score that has any; without a
        chooser None, for every policy of scores that may have several, and all groups."""
        if chooser is None:
            yield None, np.ones(len(rollouts.row), bool)
            return
        choice = sharding.to_host(rollouts.fields[choice_field(chooser)])
        for policy in score.scored_by:
            numbers = [place for place, name in enumerate(score.policies) if name == policy]
            if (member := np.isin(choice, numbers)).any():
                yield policy, member

    def score_answers(self, learner: Learner, rollouts: Rollouts, policy: str) -> dict[str, Array]:
        """How likely the reference answers are, in a pass over them and the thoughts."""
        blueprint, longest = self.blueprint, rollouts.fields[FORCED].shape[1]
        needs = blueprint.chain.needs
        is_cut = answer_field(answers.CUT, policy) in needs
        masked = is_cut or answer_field(answers.MASKED, policy) in needs
        cuts = blueprint.answer_cuts if is_cut else 1
        geometry = answers.answer_geometry(
            blueprint.geometry, longest, cuts, masked, blueprint.mesh
        )
        longer = self.behind_thoughts(rollouts, geometry, cuts)
        lengths = sharding.to_host(self.measure(longer))
        logp, ranked = f"{policy}_logp", policy == "trainer" and answers.RANK in needs
        names = {logp, "token_rank"} if ranked else {logp}
        scored = self.score_samples(learner, names, longer, lengths, geometry)
        picked = {
            name: self.pick_answer_logp(values, rollouts, cuts) for name, values in scored.items()
        }
        fields = {answer_field(field, policy): value for field, value in picked[logp].items()}
        if ranked:
            fields[answers.RANK] = picked["token_rank"][answers.ANSWER]
        return {name: value for name, value in fields.items() if name in needs}

    def score_samples(
        self,
        learner: Learner,
        names: Collection[str],
        rollouts: Rollouts,
        lengths: packing.Lengths,
        geometry: packing.Geometry,
        live: np.ndarray | None = None,
        policy: str | None = None,
    ) -> dict[str, Array]:
        """The named fields [P, G, T, ...] of every sample, or of those that are live, 0 of others;
        of all their policies, or of one."""
        if not names:
            return {}
        mask, plans, scored = rollouts.token_mask, [], []
        zero = jnp.float32(0)
        live = np.ones(mask.shape[:2], bool) if live is None else live
        read = self.blueprint.naming(names) & rollouts.fields.keys()
        tokens = {name: rollouts.fields[name] for name in read}
        for _, plan in _plans(lengths, live, geometry):
            batch = self.gather(rollouts, plan, zero, zero, mask, tokens)
            scored.append(self.score_fields(learner, names, batch, geometry, policy))
            plans.append(plan)
        return {
            name: self.rows_to_samples([fields[name] for fields in scored], plans, mask)
            for name in sorted(names)  # in the same order in every process
        }

    def rows_to_samples(
        self, rows: Sequence[Array], plans: Sequence[packing.Plan], token_mask: Array
    ) -> Array:
        """Values [K, D, R, Q] in the rows of each minibatch as those of the samples, [P, G, T]."""
        parts = (
            self.scatter(values, plan, token_mask) for values, plan in zip(rows, plans, strict=True)
        )
        return functools.reduce(jnp.add, parts)  # no token has a place in two of them

    def assemble(
        self,
        learner: Learner,
        rollouts: Rollouts,
        judged: _Judged,
        prompts: np.ndarray,
        plan: packing.Plan,
    ) -> TrainBatch:
        """The batch of one minibatch, with what only the loss needs scored on its samples alone."""
        needs, (advantage, mask, counted) = self.blueprint.objective.needs, judged
        weight = self.weigh(counted, mask, prompts)
        # As for the parts of a chain, a need may be the name of a reward.
        available_fields = {**rollouts.rewards, **rollouts.fields}
        fields = {name: available_fields[name] for name in needs & available_fields.keys()}
        fields["behavior_logp"] = rollouts.behavior_logp
        fields["sampled_now"] = rollouts.policy_version == learner.step
        if ANSWERED in rollouts.fields:  # known answers were not sampled
            drawn = rollouts.fields[ANSWERED] == 0
            fields["sampled_now"] = fields["sampled_now"][..., None] & drawn
        if TOKEN_DRAW in needs:
            fields[TOKEN_DRAW] = self.draw(rollouts)
        batch = self.gather(rollouts, plan, advantage, weight, mask, fields)
        names = (needs & self.blueprint.scores.keys()) - fields.keys()
        late = self.score_fields(learner, names, batch, self.blueprint.geometry)
        batch = dataclasses.replace(batch, fields={**batch.fields, **late})
        if self.blueprint.objective.proximal == "trainer":
            batch = dataclasses.replace(batch, proximal_logp=batch.fields["trainer_logp"])
        return batch

    def score_fields(
        self,
        learner: Learner,
        names: Collection[str],
        batch: TrainBatch,
        geometry: packing.Geometry,
        policy: str | None = None,
    ) -> dict[str, Array]:
        """The named fields [K, D, R, Q, ...], by as few passes as give them."""
        fields: dict[str, Array] = {}
        naming = self.blueprint.naming(names) - batch.fields.keys()
        dependent = {name for name in names if self.blueprint.scores[name].named_by}
        for stage in ({*names} - dependent | naming, dependent):
            for scoring_pass, scores in passes(self.blueprint.scores, stage):
                if policy in (None, scoring_pass.policy):
                    params = params_of(learner, scoring_pass.policy)
                    fields |= self.score(
                        params, batch, tuple(scores), geometry, scoring_pass.policy
                    )
            tokens = {name: fields[name] for name in naming}
            batch = dataclasses.replace(batch, fields={**batch.fields, **tokens})
        return {name: value for name, value in fields.items() if name in names}

    def _score(
        self,
        params: Params,
        batch: TrainBatch,
        names: tuple[str, ...],
        geometry: packing.Geometry,
        policy: str,
    ) -> dict[str, Array]:
        """The named scores, of one pass, as in `score_batch`."""
        scores = {name: self.blueprint.scores[name] for name in names}
        settings = self.blueprint.score_pass(scores[names[0]], policy)
        kernel = settings.kernel.for_rows(geometry.longest, geometry.samples_per_row)
        settings = settings._replace(tokens=geometry.tokens, kernel=kernel)
        return score_batch(settings, params, batch, scores)


def _move_rollouts(constrain: Constrain, rollouts: Rollouts) -> Rollouts:
    """The rollouts, which another mesh has sampled, with their prompts over the update's bins."""

    def move(leaf: Array) -> Array:
        return constrain(leaf, ("bins", *[None] * (leaf.ndim - 1))) if leaf.ndim else leaf

    return jax.tree.map(move, rollouts)


def _plans(
    lengths: packing.Lengths, live: np.ndarray, geometry: packing.Geometry
) -> Iterator[tuple[np.ndarray, packing.Plan]]:
    """(its prompts, the plan of their live samples) of each minibatch."""
    for prompts in packing.deal(lengths, live, geometry):
        member = np.isin(np.arange(len(live)), prompts)
        yield prompts, packing.plan(lengths, live & member[:, None], geometry)


def _behind_prompt(names: Collection[str], rollouts: Rollouts, column: str) -> Rollouts:
    """The samples behind another prompt, whose tokens are in `scores.prompt_field(column)`: of each
    group, or of each sample, which then is a group by itself. `names` are fields that stay."""
    tokens = rollouts.fields[prompt_field(column)]
    # Behind any prompt a token was drawn among the same ones; experts are another prompt's.
    fields = {name: rollouts.fields[name] for name in rollouts.fields.keys() & names}
    arrays: Any = {"fields": fields}
    if tokens.ndim == 3:
        arrays |= {name: getattr(rollouts, name) for name in TOKEN_ARRAYS}
        arrays = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, *leaf.shape[2:]), arrays)
        tokens = tokens.reshape(-1, tokens.shape[-1])
    real = tokens >= 0
    arrays |= {"prompt_tokens": jnp.where(real, tokens, 0), "prompt_mask": real}
    return dataclasses.replace(rollouts, **arrays)


def _per_sample(shape: tuple[int, ...], values: Array, prompt_mask: Array) -> Array:
    """Scores of samples, or of samples that were each a group, as [P, G, T, ...]; NaN without a
    prompt."""
    has_prompt = prompt_mask.any(-1).reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(has_prompt, values, jnp.nan).reshape(*shape, *values.shape[3:])


def _live(
    recipe: advantages.AdvantageTransform, mesh: Mesh, state: Any, rollouts: Rollouts
) -> Array:
    """Groups [P] with an advantage, by the beginning of a chain and the state of all of it."""
    recipe_state = {name: state[name] for name, _ in recipe.steps}
    signal, _, _ = recipe.update(advantages.start(rollouts), recipe_state, rollouts)
    advantage, _ = _at_tokens(signal, rollouts)
    live = (advantage != 0).any((1, 2))
    return jax.lax.with_sharding_constraint(live, sharding.replicated(mesh))


def _at_tokens(signal: Signal, rollouts: Rollouts) -> tuple[Array, Array]:
    """(advantage, mask) [P, G, T] of what a chain returned, in the dtype of batches."""
    advantage, mask = at_tokens(signal, rollouts.token_mask)
    return advantage.astype(jnp.float32), mask


def _judge(
    chain: AdvantageTransform,
    acts_on_all: bool,
    reward_weights: Mapping[str, float] | None,
    drawn_at: float | None,
    mesh: Mesh,
    state: Any,
    rollouts: Rollouts,
    drawn: Rollouts,
) -> tuple[Any, _Judged, Array, Array, Metrics]:
    """The chain on the whole step, and who is alive.

    Args:
      acts_on_all: whether samples without an advantage matter to the loss too.
      drawn_at: `Blueprint.drawn_at`.
      drawn: the rollouts as they were drawn, where the update trains known answers instead.

    Returns: the chain's state, what batches are made of, live and mean advantage [P, G], metrics.
    """
    signal, state, metrics = chain.update(advantages.start(rollouts), state, rollouts)
    advantage, mask = _at_tokens(signal, rollouts)
    live = (advantage != 0).any(-1)
    if acts_on_all:
        live = mask.any(-1)
    summed_rewards = diagnostics.as_summed(rollouts.rewards, reward_weights, chain)
    metrics = merge(
        metrics,
        diagnostics.rollout_metrics(
            reward_weights, summed_rewards, drawn_at, rollouts, drawn, live, advantage, mask
        ),
    )
    per_sample = advantage.sum(-1) / jnp.maximum(mask.sum(-1), 1)
    # The dead are not in the metrics of the update, which penalties may remember.
    alive = mask & live[..., None]
    replicated = sharding.replicated(mesh)
    state, live, per_sample, metrics = jax.lax.with_sharding_constraint(
        (state, live, per_sample, metrics), replicated
    )
    return state, (advantage, alive, mask), live, per_sample, metrics


def _weigh(reduction: Reduction, counted: Array, mask: Array, prompts: Array) -> Array:
    """The reduction's weights [P, G, T] for the update of `prompts`; 0 elsewhere.

    They are normalised over `counted` tokens of these prompts, the whole batch of the update. The
    dead weigh nothing and carry no penalty, so that leaving them out changes nothing.
    """
    weight = reduction.weights(counted[prompts]).astype(jnp.float32)
    alive = mask[prompts].any(-1, keepdims=True)
    return jnp.zeros(mask.shape, jnp.float32).at[prompts].set(jnp.where(alive, weight, 0))


def _in_order(batches: Sequence[TrainBatch], num_iterations: int) -> tuple[TrainBatch, ...]:
    """The batch of each update of a step: all minibatches, as often as there are iterations.

    Only the first update is of the parameters that sampled.
    """
    if len(batches) * num_iterations == 1:
        return tuple(batches)
    flags = batches[0].fields["sampled_now"]
    all_false = sharding.put(np.zeros(flags.shape, bool), flags.sharding)
    later_batches = [
        dataclasses.replace(batch, fields={**batch.fields, "sampled_now": all_false})
        for batch in batches
    ]
    return (batches[0], *later_batches[1:], *later_batches * (num_iterations - 1))
