"""A second pass over sampled completions: how confident each token was, how far from the base."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Params, Rollouts, TrainBatch
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import Constrain, Model, ModelConfig, stacked_params
from jaxgrpo.models.distributions import full_kl
from jaxgrpo.models.logprobs import LIKELIEST, token_confidence, token_logprobs, token_rank
from jaxgrpo.update import packing
from jaxgrpo.update.flat import flatten, hidden_states, in_rows
from jaxgrpo.update.forward import micro_batch

Rescore = Callable[[Params, Rollouts], dict[str, Array]]
"""(parameters that sampled, rollouts) -> name -> [P, G, T], 0 where the token mask is False"""


class Base(NamedTuple):
    """The policy that an evaluation measures the distance from."""

    model: Model
    read: Callable[[], Params]


def make_rescorer(
    model: Model,
    mesh: Mesh,
    *,
    temperature: float,
    confidence: bool = False,
    logp: bool = False,
    rank: bool = False,
    base: Base | None = None,
    tokens: int | None = None,
) -> Rescore | None:
    """The function that runs what is asked for, in the micro-batches of training's scoring.

        confidence    of each token, as `token_confidence`
        logp          log-prob of each token, as training computes it again
        rank          of each token, as `token_rank`
        kl, clamped   KL(policy || base) of each next token over the whole vocabulary, as `full_kl`
        logp_gap      log-prob of each token less that under the base

    No array holds the logits of more than a chunk of tokens. None if nothing is asked for.

    Args:
      temperature: of the sampling distribution before top-k and top-p, for both policies.
      tokens: per bin and micro-batch, as in training. None: see `update.packing.default_tokens`.

    Raises: InputError if the base has another vocabulary.
    """
    if not (confidence or logp or rank or base is not None):
        return None
    model = decoder.to_sample(model, mesh)
    anchor = None if base is None else _build_base(model.config, base.model.config, mesh)
    models = [model] if anchor is None else [model, anchor]
    # Greedy sampling has no distribution: its confidence is that of the model itself.
    look = functools.partial(_look, model, anchor, temperature or 1.0, confidence, logp, rank)
    constrain = sharding.constrain(mesh)
    program = functools.partial(_in_micro_batches, look, model.config, constrain)
    program = jax.jit(program, static_argnums=4)
    measure = jax.jit(packing.measure_lengths)

    def rescore(params: Params, rollouts: Rollouts) -> dict[str, Array]:
        sharding.give_back(mesh)  # what sampling took
        base_params = {} if base is None else base.read()
        groups, samples, steps = rollouts.token_mask.shape
        sizes = groups, samples, rollouts.prompt_tokens.shape[1], steps
        geometry = packing.make_geometry(sizes, mesh, tokens).for_models(models)
        lengths = sharding.to_host(measure(rollouts))
        plan = packing.plan(lengths, np.ones((groups, samples), bool), geometry)
        return program(params, base_params, rollouts, plan, geometry.tokens)

    return rescore


def _build_base(policy: ModelConfig, base: ModelConfig, mesh: Mesh) -> Model:
    """The base over the tokens that the policy can draw: its tokenizer may be another one."""
    refuse_other_vocabulary(policy, base)
    shared = dataclasses.replace(base, without_text=policy.without_text)
    return decoder.build(shared, constrain=sharding.constrain(mesh))


def refuse_other_vocabulary(policy: ModelConfig, base: ModelConfig) -> None:
    """Raises InputError if a KL between two models is not defined."""
    if policy.vocab_size != base.vocab_size:
        raise InputError(
            f"the base has {base.vocab_size} tokens and the model {policy.vocab_size}: a KL "
            "between them is not defined; name the model that training began with"
        )


def _look(
    model: Model,
    anchor: Model | None,
    temperature: float,
    confidence: bool,
    logp: bool,
    rank: bool,
    params: Params,
    base_params: Params,
    micro: TrainBatch,
    tokens: int,
) -> dict[str, Array]:
    """What is asked for of one micro-batch, [D, R, Q] each."""
    flat = flatten(micro, tokens)
    hidden, _ = hidden_states(model, params, micro, flat)
    unembed = functools.partial(model.unembed, params)

    def log_probs(unembed: Callable[[Array], Array], hidden: Array) -> Array:
        return token_logprobs(
            unembed, hidden, flat.targets, temperature=temperature, count=flat.count
        )[0]

    values: dict[str, Array] = {}
    if confidence:
        number = min(LIKELIEST, model.config.num_drawable)
        values["confidence"] = token_confidence(unembed, hidden, k=number, temperature=temperature)
    if logp:
        values["logp"] = log_probs(unembed, hidden)
    if rank:
        values["rank"] = token_rank(unembed, hidden, flat.targets)
    if anchor is not None:
        policy_pass = (unembed, hidden)
        base_unembed = functools.partial(anchor.unembed, base_params)
        base_pass = (base_unembed, hidden_states(anchor, base_params, micro, flat)[0])
        values["kl"], values["clamped"] = full_kl(*policy_pass, *base_pass, temperature=temperature)
        values["logp_gap"] = log_probs(*policy_pass) - log_probs(*base_pass)
    return {name: in_rows(micro, flat, value) for name, value in values.items()}


def _in_micro_batches(
    look: Callable[..., dict[str, Array]],
    config: ModelConfig,
    constrain: Constrain,
    params: Params,
    base_params: Params,
    rollouts: Rollouts,
    plan: packing.Plan,
    tokens: int,
) -> dict[str, Array]:
    """`look` at every sample, in the loop and layout of training's scoring."""
    mask, params = rollouts.token_mask, stacked_params(config, params)
    zero = jnp.zeros(mask.shape, jnp.float32)
    batch = packing.gather(rollouts, plan, zero, zero, mask, {}, constrain)

    def rescore(micro: TrainBatch) -> dict[str, Array]:
        return look(params, base_params, micro, tokens)

    def body(index: Array, buffers: dict[str, Array]) -> dict[str, Array]:
        values = rescore(micro_batch(batch, index))
        return {name: buffers[name].at[index].set(values[name]) for name in buffers}

    shapes = jax.eval_shape(rescore, jax.eval_shape(micro_batch, batch, 0))
    start = {name: jnp.zeros(batch.tokens.shape, leaf.dtype) for name, leaf in shapes.items()}
    values = jax.lax.fori_loop(0, batch.num_live, body, start)
    return {
        name: jnp.where(mask, packing.scatter(value, plan, mask), 0)
        for name, value in values.items()
    }
