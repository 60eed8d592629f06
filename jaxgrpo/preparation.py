"""From judged rollouts to the update batch: score, advantage, weights, plan, gather."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgrpo import advantages, packing, sharding
from jaxgrpo.diagnostics import group_metrics
from jaxgrpo.metrics import Mean, Metrics, maximum, mean, merge
from jaxgrpo.packing import Geometry
from jaxgrpo.parts import Parts, forward, micro_batch
from jaxgrpo.types import FIELDS, Params, Rollouts, TrainBatch, TrainState

Score = Callable[[Params, TrainBatch], tuple[Array, Array]]
"""(parameters, batch) -> (log-probs, entropies) [K, D, R, Q] of its live micro-batches"""


class Prepared(NamedTuple):
    """What `prepare` hands on: the batch to update on, and what the log shows of it."""

    batch: TrainBatch
    advantage: Array  # [P, G], the mean over a sample's tokens
    live: np.ndarray  # [P, G] bool, samples that can move the parameters
    metrics: Metrics


def make_scorer(parts: Parts) -> Score:
    def score(params: Params, batch: TrainBatch) -> tuple[Array, Array]:
        def body(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            values = forward(parts, params, micro_batch(batch, index))
            return jax.tree.map(lambda all_, one: all_.at[index].set(one), carry, values)

        empty = jnp.zeros(batch.tokens.shape, jnp.float32)
        return jax.lax.fori_loop(0, batch.num_live, body, (empty, empty))

    return score


def make_preparer(parts: Parts) -> Callable[[TrainState, Rollouts], tuple[TrainState, Prepared]]:
    geometry, objective = parts.geometry, parts.objective
    score = jax.jit(make_scorer(parts))
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

    def score_fields(state: TrainState, names: Collection[str], batch: TrainBatch):
        fields: dict[str, Array] = {}
        for policy in sorted({FIELDS[name].policy for name in names}):
            params = state.trainable if policy == "trainer" else state.frozen[policy]
            logp, entropy = score(params, batch)
            for name in names:
                if FIELDS[name].policy == policy:
                    fields[name] = logp if FIELDS[name].quantity == "logp" else entropy
        return fields

    def add_fields(state: TrainState, rollouts: Rollouts, names: Collection[str]) -> Rollouts:
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
    signal, state, metrics = parts.chain.update(advantages.start(rollouts), state, rollouts)
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
    metrics = merge(metrics, _rollout_metrics(rollouts, live, advantage, parts.reward_weights))
    per_sample = advantage.sum(-1) / jnp.maximum(mask.sum(-1), 1)
    return _Judged(state, advantage, weight, mask, live, per_sample, metrics)


def _rollout_metrics(
    rollouts: Rollouts, live: Array, advantage: Array, weights: Mapping[str, float] | None
) -> Metrics:
    """Metrics of rewards and completions, under TRL's names where TRL has one."""
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
        scored = jnp.isfinite(reward)
        metrics[f"rewards/{name}/mean"] = mean(jnp.where(scored, reward, 0), scored)
        metrics[f"rewards/{name}/unscored"] = mean(~scored)
    return merge(metrics, group_metrics(rollouts.rewards, weights))


def _per_token(value: Array, geometry: Geometry) -> Array:
    """A field [P], [P, G] or [P, G, T] at every token."""
    value = value.reshape(*value.shape, *[1] * (3 - value.ndim))
    return jnp.broadcast_to(value, _sample_shape(geometry))


def _sample_shape(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.num_prompts, geometry.group_size, geometry.max_completion_tokens
