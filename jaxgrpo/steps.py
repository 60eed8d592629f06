"""The jitted functions of one training step: sample, prepare, update, sync.

prompts -> sample -> reward -> prepare (score, advantage) -> update -> log
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from jaxgrpo import packing, sampling, sharding
from jaxgrpo.advantages.base import AdvantageTransform
from jaxgrpo.losses import Penalty, Reduction, Surrogate
from jaxgrpo.logprobs import token_logprobs
from jaxgrpo.metrics import Max, Mean, Metrics, maximum, mean, merge
from jaxgrpo.models.api import Model
from jaxgrpo.models.attention import causal, rows_with_prefix
from jaxgrpo.packing import Geometry
from jaxgrpo.types import FIELDS, Params, Prompts, Rollouts, TrainBatch, TrainState


class Objective(NamedTuple):
    """What an update minimises: sum(weight * (surrogate + penalties))."""

    surrogate: Surrogate
    reduction: Reduction
    penalties: tuple[Penalty, ...] = ()
    penalties_on: str = "all"  # "live": dead samples are free of penalties, and leave the update
    proximal: str = "behavior"  # the policy ratios are measured from; "trainer" scores it again

    @property
    def needs(self) -> frozenset[str]:
        parts = (self.surrogate, *self.penalties)
        own = frozenset[str]().union(*(part.needs for part in parts))
        return own | ({"trainer_logp"} if self.proximal == "trainer" else frozenset())


class Prepared(NamedTuple):
    """What `prepare` hands on: the batch to update on, and what the log shows of it."""

    batch: TrainBatch
    advantage: Array  # [P, G], the mean over a sample's tokens
    live: np.ndarray  # [P, G] bool, samples that can move the parameters
    metrics: Metrics


class Steps(NamedTuple):
    """The functions of training. All are pure: state in, state out."""

    sample: Callable[[Params, Prompts, Array], Rollouts]
    prepare: Callable[[TrainState, Rollouts], tuple[TrainState, Prepared]]
    update: Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]
    sync: Callable[[TrainState], Params]
    score: Callable[[Params, TrainBatch], tuple[Array, Array]]


class Parts(NamedTuple):
    """Everything static that the programs of a run are built from."""

    model: Model
    chain: AdvantageTransform
    objective: Objective
    optimizer: optax.GradientTransformation
    geometry: Geometry
    sampling: sampling.SamplingSettings
    mesh: Mesh
    compact: bool = True  # False keeps dead samples in the update: slower, the same result


def build_steps(parts: Parts) -> Steps:
    """Jits the functions of a training step for one model, method, geometry and mesh."""
    sampler = sampling.make_sampler(parts.model, parts.sampling, sharding.constrain(parts.mesh))
    axes, shapes = parts.model.axes, parts.model.shapes
    training = sharding.param_shardings(parts.mesh, axes, shapes)
    for_sampling = sharding.param_shardings(parts.mesh, axes, shapes, sharding.SAMPLING)
    gathered = jax.jit(lambda params: params, out_shardings=for_sampling)
    same = parts.mesh.shape["fsdp"] == 1
    score = jax.jit(_scorer(parts))
    return Steps(
        sample=lambda params, prompts, key: sampling.sample(sampler, params, prompts, key),
        prepare=_preparer(parts, score),
        update=_updater(parts, training),
        sync=lambda state: state.trainable if same else gathered(state.trainable),
        score=score,
    )


# ---- scoring and preparation


def _forward(parts: Parts, params: Params, micro: TrainBatch) -> tuple[Array, Array]:
    """(logp, entropy) [D, R, Q] of one micro-batch: prompts once, then rows that read them."""
    bins, prompts, width = micro.prompt_tokens.shape
    position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (bins, prompts, width))
    valid = position < micro.prompt_length[..., None]
    _, memory = parts.model.apply(
        params, micro.prompt_tokens, position, causal(position, valid), None
    )
    attend = rows_with_prefix(micro.segment, micro.position, micro.row_prompt, micro.prompt_length)
    hidden, _ = parts.model.apply(params, micro.tokens, micro.position, attend, memory)
    rows = micro.tokens.shape
    logp, entropy = token_logprobs(
        lambda hidden: parts.model.unembed(params, hidden),
        hidden.reshape(bins, -1, hidden.shape[-1]),
        micro.targets.reshape(bins, -1),
        # Greedy sampling has no distribution: its ratios are those of the model itself.
        temperature=parts.sampling.temperature or 1.0,
    )
    return logp.reshape(rows), entropy.reshape(rows)


def _micro(batch: TrainBatch, index: Array) -> TrainBatch:
    """Micro-batch `index` of a batch: every array without its leading K."""
    take = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)  # noqa: E731
    rest = dataclasses.replace(batch, num_live=jnp.zeros(batch.tokens.shape[0], jnp.int32))
    return jax.tree.map(take, rest)


def _scorer(parts: Parts) -> Callable[[Params, TrainBatch], tuple[Array, Array]]:
    def score(params: Params, batch: TrainBatch) -> tuple[Array, Array]:
        def body(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            values = _forward(parts, params, _micro(batch, index))
            return jax.tree.map(lambda all_, one: all_.at[index].set(one), carry, values)

        empty = jnp.zeros(batch.tokens.shape, jnp.float32)
        return jax.lax.fori_loop(0, batch.num_live, body, (empty, empty))

    return score


def _preparer(parts: Parts, score) -> Callable[[TrainState, Rollouts], tuple[TrainState, Prepared]]:
    geometry, objective = parts.geometry, parts.objective
    judge = jax.jit(
        lambda state, rollouts: _judge(parts, state, rollouts),
        out_shardings=sharding.replicated(parts.mesh),
    )
    lay_out = sharding.constrain(parts.mesh)

    @jax.jit
    def gather(rollouts, where, advantage, weight, mask, fields) -> TrainBatch:
        batch = packing.gather(rollouts, where, advantage, weight, mask, fields)
        axes = lambda leaf: (None, "bins", *[None] * (leaf.ndim - 2))  # noqa: E731
        return jax.tree.map(
            lambda leaf: lay_out(leaf, axes(leaf)) if leaf.ndim > 1 else leaf, batch
        )

    everyone = packing.plan(np.ones((geometry.num_prompts, geometry.group_size), bool), geometry)
    scatter = jax.jit(lambda values, where: packing.scatter(values, where, _sample_shape(geometry)))

    def score_fields(state: TrainState, names: frozenset[str], batch: TrainBatch):
        fields: dict[str, Array] = {}
        for policy in sorted({FIELDS[name].policy for name in names}):
            params = state.trainable if policy == "trainer" else state.frozen[policy]
            logp, entropy = score(params, batch)
            for name in names:
                if FIELDS[name].policy == policy:
                    fields[name] = logp if FIELDS[name].quantity == "logp" else entropy
        return fields

    def add_fields(state: TrainState, rollouts: Rollouts, names: frozenset[str]) -> Rollouts:
        if not names:
            return rollouts
        zero = jnp.zeros(_sample_shape(geometry), jnp.float32)
        batch = gather(rollouts, everyone, zero, zero, rollouts.token_mask, {})
        scored = score_fields(state, names, batch)
        fields = {name: scatter(value, everyone) for name, value in scored.items()}
        return dataclasses.replace(rollouts, fields={**rollouts.fields, **fields})

    def prepare(state: TrainState, rollouts: Rollouts) -> tuple[TrainState, Prepared]:
        rollouts = add_fields(state, rollouts, parts.chain.needs & FIELDS.keys())
        judged = judge(state.advantage_state, rollouts)
        live = sharding.to_host(judged.live)
        kept = live if parts.compact else np.ones_like(live)
        where = packing.plan(kept, geometry)
        known = {
            name: _per_token(rollouts.fields[name], geometry)
            for name in objective.needs & rollouts.fields.keys()
        }
        known["behavior_logp"] = rollouts.behavior_logp
        batch = gather(rollouts, where, judged.advantage, judged.weight, judged.mask, known)
        late = score_fields(state, (objective.needs & FIELDS.keys()) - known.keys(), batch)
        batch = dataclasses.replace(batch, fields={**batch.fields, **late})
        if objective.proximal == "trainer":
            batch = dataclasses.replace(batch, proximal_logp=batch.fields["trainer_logp"])
        state = dataclasses.replace(state, advantage_state=judged.state)
        return state, Prepared(batch, judged.per_sample, live, judged.metrics)

    return prepare


class _Judged(NamedTuple):
    state: Any
    advantage: Array  # [P, G, T]
    weight: Array  # [P, G, T]
    mask: Array  # [P, G, T]
    live: Array  # [P, G]
    per_sample: Array  # [P, G]
    metrics: Metrics


def _judge(parts: Parts, state: Any, rollouts: Rollouts) -> _Judged:
    """The chain, the reduction's weights on the whole batch, and who is alive."""
    from jaxgrpo.advantages import start

    signal, state, metrics = parts.chain.update(start(rollouts), state, rollouts)
    tokens = rollouts.token_mask
    value, mask = signal.value, signal.mask
    if value.ndim == 2:
        value, mask = value[..., None], mask[..., None]
    mask = jnp.broadcast_to(mask, tokens.shape) & tokens
    advantage = jnp.where(mask, value, 0).astype(jnp.float32)
    weight = parts.objective.reduction.weights(mask).astype(jnp.float32)
    live = (advantage != 0).any(-1)
    if parts.objective.penalties and parts.objective.penalties_on == "all":
        live = mask.any(-1)
    else:
        # The dead carry no penalty, so that leaving them out changes nothing.
        weight = jnp.where(live[..., None], weight, 0)
    metrics = merge(metrics, _rollout_metrics(rollouts, live, advantage))
    per_sample = advantage.sum(-1) / jnp.maximum(mask.sum(-1), 1)
    return _Judged(state, advantage, weight, mask, live, per_sample, metrics)


def _rollout_metrics(rollouts: Rollouts, live: Array, advantage: Array) -> Metrics:
    """Metrics of rewards and completions, under TRL's names where TRL has one."""
    from jaxgrpo.diagnostics import group_metrics

    tokens = rollouts.token_mask
    length = tokens.sum(-1)
    sampled = rollouts.truncated
    metrics: Metrics = {
        "completions/mean_length": mean(length),
        "completions/max_length": maximum(length),
        "completions/clipped_ratio": mean(sampled),
        "num_tokens": Mean(total=length.sum(dtype=jnp.float32), weight=jnp.float32(1)),
        "advantage/abs_max": maximum(jnp.abs(advantage)),
        "live_samples": mean(live),
        "live_groups": mean(live.any(-1)),
        "live_tokens": mean(live[..., None], tokens),
    }
    for name, reward in rollouts.rewards.items():
        scored = ~jnp.isnan(reward)
        metrics[f"rewards/{name}/mean"] = mean(jnp.where(scored, reward, 0), scored)
        metrics[f"rewards/{name}/unscored"] = mean(~scored)
    return merge(metrics, group_metrics(rollouts.rewards))


def _per_token(value: Array, geometry: Geometry) -> Array:
    """A field [P], [P, G] or [P, G, T] at every token."""
    value = value.reshape(*value.shape, *[1] * (3 - value.ndim))
    return jnp.broadcast_to(value, _sample_shape(geometry))


def _sample_shape(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.num_prompts, geometry.group_size, geometry.max_completion_tokens


# ---- update


def _updater(parts: Parts, shardings: Params):
    def run(trainable: Params, opt_state: Any, batch: TrainBatch):
        loss, grads, metrics = _accumulate(parts, shardings, trainable, batch)
        norm = optax.tree_utils.tree_norm(grads)
        finite = jnp.isfinite(norm)
        apply = finite & (batch.num_live > 0)

        def step(_):
            updates, new_state = parts.optimizer.update(grads, opt_state, trainable)
            return optax.apply_updates(trainable, updates), new_state

        new = jax.lax.cond(apply, step, lambda _: (trainable, opt_state), None)
        one = jnp.float32(1)
        metrics |= {
            "loss": Mean(total=loss, weight=one),
            "grad_norm": Mean(total=norm, weight=one),
            "skipped_updates/no_live_sample": Mean(
                total=(batch.num_live == 0).astype(jnp.float32), weight=one
            ),
            "skipped_updates/not_finite": Mean(total=(~finite).astype(jnp.float32), weight=one),
        }
        return *new, metrics

    jitted = jax.jit(run, donate_argnums=(0, 1))

    def update(state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        trainable, opt_state, metrics = jitted(state.trainable, state.opt_state, batch)
        return dataclasses.replace(
            state, step=state.step + 1, trainable=trainable, opt_state=opt_state
        ), metrics

    return update


def _accumulate(parts: Parts, shardings: Params, trainable: Params, batch: TrainBatch):
    """Loss, gradients and metrics summed over the live micro-batches, in one loop."""

    def objective(params: Params, micro: TrainBatch):
        return _loss(parts, params, micro)

    def one(micro: TrainBatch):
        (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(trainable, micro)
        return loss, grads, metrics

    def widen(leaf: Array, layout: Any = None) -> Array:
        wide = jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
        return wide if layout is None else jax.lax.with_sharding_constraint(wide, layout)

    _, _, shapes = jax.eval_shape(one, _micro(batch, jnp.int32(0)))
    empty = jax.tree.map(
        lambda metric: (
            Max(value=jnp.full((), -jnp.inf, metric.value.dtype))
            if isinstance(metric, Max)
            else jax.tree.map(widen, metric)
        ),
        shapes,
        is_leaf=lambda node: isinstance(node, (Mean, Max)),
    )

    def body(index: Array, carry):
        loss, grads, metrics = carry
        micro_loss, micro_grads, micro_metrics = one(_micro(batch, index))
        grads = jax.tree.map(jnp.add, grads, micro_grads)
        return loss + micro_loss, grads, merge(metrics, micro_metrics)

    start = (jnp.float32(0), jax.tree.map(widen, trainable, shardings), empty)
    return jax.lax.fori_loop(0, batch.num_live, body, start)


def _loss(parts: Parts, params: Params, micro: TrainBatch) -> tuple[Array, Metrics]:
    logp, entropy = _forward(parts, params, micro)
    logp = jnp.where(micro.mask, logp, 0)
    arguments = (logp, micro.proximal_logp, micro.advantage, micro.mask, micro.segment)
    per_token, metrics = parts.objective.surrogate.compute(*arguments, micro.fields)
    for penalty in parts.objective.penalties:
        value, more = penalty.compute(*arguments, micro.fields)
        per_token, metrics = per_token + value, merge(metrics, more)
    gap = jnp.abs(jax.lax.stop_gradient(logp) - micro.fields["behavior_logp"])
    metrics = merge(
        metrics,
        {
            "entropy": mean(jax.lax.stop_gradient(entropy), micro.mask),
            "sampling/sampling_logp_difference/mean": mean(gap, micro.mask),
            "sampling/sampling_logp_difference/max": maximum(gap, micro.mask),
        },
    )
    return jnp.where(micro.mask, micro.weight * per_token, 0).sum(), metrics
