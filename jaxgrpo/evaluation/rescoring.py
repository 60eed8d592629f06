"""A second pass over sampled completions: how confident each token was, how far from the base."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.core import records
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Params, Rollouts, TrainBatch
from jaxgrpo.models import decoder, routing, sharding
from jaxgrpo.models.api import Model, ModelConfig, stacked_params
from jaxgrpo.models.distributions import full_kl
from jaxgrpo.models.logprobs import chunk_tokens
from jaxgrpo.rollout.slots.capacity import LOGITS
from jaxgrpo.update import packing
from jaxgrpo.update.flat import flatten, hidden_states, in_rows
from jaxgrpo.update.forward import Pass, in_micro_batches, token_values

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
    quantities: Set[str] = frozenset(),
    base: Base | None = None,
    tokens: int | None = None,
    has_forks: bool = False,
) -> Rescore | None:
    """The function that gives what is asked for, in the micro-batches of training's scoring: the
    quantities, and where there is a base

        kl, clamped   KL(policy || base) of each next token over the whole vocabulary, as `full_kl`
        logp_gap      log-prob of each token less that under the base

    No array holds the logits of more than a chunk of tokens. None if nothing is asked for.

    Args:
      quantities: of `core.scores.QUANTITIES`, as training scores them: logp, confidence, rank. What
        tokens were drawn among plays no part.
      base: what kl, clamped and logp_gap are measured from; None: they are left out.
      temperature: of the sampling distribution before top-k and top-p, for both policies.
      tokens: per bin and micro-batch, as in training. None: see `update.packing.default_tokens`.
      has_forks: whether conversations may be rewritten (`dialogue.FORK`).

    Raises: InputError if the base has another vocabulary, or a model recurs where has_forks.
    """
    if not quantities and base is None:
        return None
    model, anchor = _build_models(model, base, mesh, has_forks)
    models = [model] if anchor is None else [model, anchor]
    # Greedy sampling has no distribution: its confidence is that of the model itself.
    settings = Pass(model, mesh, 0, temperature or 1.0)
    program = jax.jit(functools.partial(_rescore, settings, anchor, quantities), static_argnums=4)
    measure = jax.jit(packing.measure_lengths)

    def rescore(params: Params, rollouts: Rollouts) -> dict[str, Array]:
        sharding.give_back(mesh)  # what sampling took
        base_params = {} if base is None else base.read()
        groups, samples, steps = rollouts.token_mask.shape
        sizes = groups, samples, rollouts.prompt_tokens.shape[1], steps
        has_experts = any(routing.has_experts(model.config.kinds) for model in models)
        geometry = packing.make_geometry(sizes, mesh, tokens, has_experts=has_experts)
        geometry = geometry.for_models(models)
        lengths = sharding.to_host(measure(rollouts))
        plan = packing.plan(lengths, np.ones((groups, samples), bool), geometry)
        return program(params, base_params, rollouts, plan, geometry.tokens)

    return rescore


def _build_models(
    model: Model, base: Base | None, mesh: Mesh, has_forks: bool
) -> tuple[Model, Model | None]:
    """The policy and the base, if there is one, as they score. Raises: as `make_rescorer`."""
    model = decoder.to_sample(model, mesh)
    anchor = None if base is None else _build_base(model.config, base.model.config, mesh)
    if has_forks and (model.config.recurs or (anchor is not None and anchor.config.recurs)):
        raise InputError(
            'data.history = "fork": samples cannot be scored again by a model with layers that '
            "recur: a rewritten conversation begins inside a row, and states begin with chunks; "
            "leave out what asks for it (a probe, eval.confidence, a KL to the base), or set it to "
            '"exact"'
        )
    return model, anchor


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


def _rescore(
    settings: Pass,
    anchor: Model | None,
    quantities: Set[str],
    params: Params,
    base_params: Params,
    rollouts: Rollouts,
    plan: packing.Plan,
    tokens: int,
) -> dict[str, Array]:
    """What is asked for of every sample, in the loop and layout of training's scoring."""
    settings = settings._replace(tokens=tokens)
    params = stacked_params(settings.model.config, params)
    # Evaluations and ranks are of all tokens and of the model's own experts.
    rollouts = dataclasses.replace(rollouts, fields=records.without(rollouts.fields, ()))
    mask, constrain = rollouts.token_mask, sharding.constrain(settings.mesh)
    zero = jnp.float32(0)
    batch = packing.gather(rollouts, plan, zero, zero, mask, {}, constrain)
    look = functools.partial(_look, settings, anchor, quantities, params, base_params)
    return {
        name: jnp.where(mask, packing.scatter(value, plan, mask), 0)
        for name, value in in_micro_batches(look, batch).items()
    }


def _look(
    settings: Pass,
    anchor: Model | None,
    quantities: Set[str],
    params: Params,
    base_params: Params,
    micro: TrainBatch,
) -> dict[str, Array]:
    """What is asked for of one micro-batch, [D, R, Q] each."""
    flat, names = flatten(micro, settings.tokens), {*quantities}

    def look(model: Model, params: Params, names: Set[str]) -> Any:
        unembed = functools.partial(model.unembed, params)
        hidden, _ = hidden_states(model, params, micro, flat)
        model_pass = settings._replace(model=model)
        values = token_values(model_pass, unembed, unembed, hidden, micro, flat, names)
        return (unembed, hidden), values

    if anchor is None:
        _, values = look(settings.model, params, names)
    else:
        policy, values = look(settings.model, params, names | {"logp"})
        base, base_values = look(anchor, base_params, {"logp"})
        kl = full_kl(*policy, *base, temperature=settings.temperature)
        values["kl"], values["clamped"] = kl
        values["logp_gap"] = values["logp"] - base_values["logp"]
        names |= {"kl", "clamped", "logp_gap"}
    return {name: in_rows(micro, flat, values[name]) for name in sorted(names)}


def second_pass_bytes(hidden: int, vocab: int) -> int:
    """Bytes of an evaluation's second pass beside the base: the two heads as a CPU multiplies with
    them, and logits of both policies."""
    return 2 * (LOGITS * 4 * chunk_tokens(vocab, vocab) * vocab + 4 * hidden * vocab)
