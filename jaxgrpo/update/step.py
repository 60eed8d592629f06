"""The jitted functions of one training step: sample, prepare, update, sync.

prompts -> sample -> reward -> prepare (score, advantage) -> update -> log
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxgrpo.core.metrics import Metrics, empty_like, maximum, mean, merge
from jaxgrpo.core.types import Params, Prompts, Rollouts, TrainBatch, TrainState
from jaxgrpo.losses import Tokens, token_loss
from jaxgrpo.models import sharding
from jaxgrpo.rollout import sampler as sampling
from jaxgrpo.update.forward import (
    Blueprint,
    as_computed,
    forward,
    micro_batch,
    opt_layout,
    param_layout,
)
from jaxgrpo.update.prepare import Prepared, make_preparer

Share = Callable[[str, Callable[[], Any]], Any]
"""(name, make) -> what `make` gives, or gave an earlier run that shares it"""


def alone(name: str, make: Callable[[], Any]) -> Any:
    """Shares nothing."""
    return make()


class Steps(NamedTuple):
    """The functions of training: state in, state out. `update` donates the state it gets."""

    sample: Callable[[Params, Prompts, Array], Rollouts]
    prepare: Callable[[TrainState, Rollouts], tuple[TrainState, Prepared]]
    update: Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]
    sync: Callable[[TrainState], Params]
    update_program: Any
    """the jitted (trainable, opt_state, objective_state, anchors, batch) -> (trainable, opt_state,
    objective_state, metrics) of `update`"""


def build_steps(blueprint: Blueprint, share: Share = alone) -> Steps:
    """Jits the functions of a training step for one model, method, geometry and mesh.

    Args:
      share: asked for "sampler", "update" and "method", the programs that runs may have in common.
    """
    constrain = sharding.constrain(blueprint.mesh)
    sampler = share(
        "sampler", lambda: sampling.make_sampler(blueprint.model, blueprint.sampling, constrain)
    )
    program = share("update", lambda: _update_program(blueprint))
    return Steps(
        sample=lambda params, prompts, key: sampling.sample(sampler, params, prompts, key),
        prepare=make_preparer(blueprint),
        update=_updater(program, blueprint.objective.anchors),
        sync=_syncer(blueprint),
        update_program=program,
    )


def _syncer(blueprint: Blueprint) -> Callable[[TrainState], Params]:
    """Trained parameters as the sampler reads them: cast and gathered over fsdp, or as they are."""
    narrow = jnp.finfo(blueprint.model.config.dtype).bits < 32
    if blueprint.mesh.shape["fsdp"] == 1 and not narrow:
        return lambda state: state.trainable
    layout = param_layout(blueprint, sharding.SAMPLING)
    sync = jax.jit(functools.partial(as_computed, blueprint.model), out_shardings=layout)
    return lambda state: sync(state.trainable)


def _updater(
    program: Any, anchors: frozenset[str]
) -> Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]:
    def update(state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        frozen = {name: state.frozen[name] for name in sorted(anchors)}
        trainable, opt_state, objective_state, metrics = program(
            state.trainable, state.opt_state, state.objective_state, frozen, batch
        )
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            trainable=trainable,
            opt_state=opt_state,
            objective_state=objective_state,
        )
        return state, metrics

    return update


def _update_program(blueprint: Blueprint) -> Any:
    """One optimizer step on the gradient of the whole batch.

    Without a live sample, or with a gradient that is not finite, parameters, optimizer state and
    what the penalties remember stay as they are, and the step is counted.
    """

    def run(
        trainable: Params, opt_state: Any, objective_state: Any, anchors: Any, batch: TrainBatch
    ):
        loss_of = functools.partial(_loss, blueprint, objective_state, anchors)
        loss, grads, metrics = _accumulate(loss_of, param_layout(blueprint), trainable, batch)
        norm = optax.tree_utils.tree_norm(grads)
        finite = jnp.isfinite(norm)
        no_live = batch.num_live == 0

        def step(_):
            updates, new_state = blueprint.optimizer.update(grads, opt_state, trainable)
            observed = blueprint.objective.observe(objective_state, metrics)
            return optax.apply_updates(trainable, updates), new_state, observed

        old = (trainable, opt_state, objective_state)
        new = jax.lax.cond(finite & ~no_live, step, lambda _: old, None)
        counted = {
            "loss": loss,
            "grad_norm": norm,
            "skipped_updates/no_live_sample": no_live,
            "skipped_updates/not_finite": ~finite,
        }
        return *new, metrics | {name: mean(value) for name, value in counted.items()}

    everywhere = sharding.replicated(blueprint.mesh)
    layout = (param_layout(blueprint), opt_layout(blueprint), everywhere, everywhere)
    return jax.jit(run, donate_argnums=(0, 1), out_shardings=layout)


def _accumulate(
    loss_of: Callable[[Params, TrainBatch], Any],
    layout: Params,
    trainable: Params,
    batch: TrainBatch,
):
    """Loss, gradients and metrics summed over the live micro-batches, in one loop."""

    def one(index: Array):
        with_gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, metrics), grads = with_gradient(trainable, micro_batch(batch, index))
        return loss, grads, metrics

    def body(index: Array, carry):
        loss, grads, metrics = one(index)
        return carry[0] + loss, jax.tree.map(jnp.add, carry[1], grads), merge(carry[2], metrics)

    def zeros(leaf: Any, layout: Any) -> Array:
        wide = jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
        return jax.lax.with_sharding_constraint(wide, layout)

    loss, grads, metrics = jax.eval_shape(one, jnp.int32(0))
    start = (
        jnp.zeros(loss.shape, loss.dtype),
        jax.tree.map(zeros, grads, layout),
        empty_like(metrics),
    )
    return jax.lax.fori_loop(0, batch.num_live, body, start)


def _loss(
    blueprint: Blueprint,
    objective_state: dict[str, Any],
    anchors: dict[str, Params],
    params: Params,
    micro: TrainBatch,
) -> tuple[Array, Metrics]:
    objective = blueprint.objective
    scored = forward(blueprint, params, micro, objective.entropy, anchors.get("reference"))
    assert scored.entropy is not None
    logp = jnp.where(micro.mask, scored.logp, 0)
    tokens = Tokens(
        logp=logp,
        proximal_logp=micro.proximal_logp,
        advantage=micro.advantage,
        mask=micro.mask,
        segment=micro.segment,
        fields=micro.fields | scored.fields,
    )
    per_token, metrics = token_loss(
        objective.surrogate, objective.penalties, tokens, objective_state
    )
    gap = jnp.abs(jax.lax.stop_gradient(logp) - micro.fields["behavior_logp"])
    # An entropy term reports the entropy itself, which then replaces ours.
    metrics = {
        "entropy": mean(jax.lax.stop_gradient(scored.entropy), micro.mask),
        "sampling/sampling_logp_difference/mean": mean(gap, micro.mask),
        "sampling/sampling_logp_difference/max": maximum(gap, micro.mask),
    } | metrics
    return jnp.where(micro.mask, micro.weight * per_token, 0).sum(), metrics
