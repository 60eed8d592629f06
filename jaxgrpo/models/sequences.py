"""Logits and log-probabilities of whole sequences, for notebooks and checks.

Training has its own way (`update.forward`), which keeps no [B, T, V] array and computes a prompt
once for all its samples.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, Float, Int

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Params
from jaxgrpo.models import delta, sharding
from jaxgrpo.models.api import Caller, Model, ModelConfig
from jaxgrpo.models.attention import causal
from jaxgrpo.models.logprobs import token_logprobs, token_rank

_Host = Array | np.ndarray


def logits(
    model: Model,
    params: Params,
    tokens: Int[_Host, "B T"],
    mask: Bool[_Host, "B T"] | Int[_Host, "B T"],
) -> Float[Array, "B T V"]:
    """Logits of the token after each position, in at least float32.

    Positions count the real tokens of a row, so that padding may stand on either side. Where `mask`
    is 0 the logits mean nothing.

    Args:
      params: of the model, as `load_model` gives them.
      mask: 1 or True at real tokens.

    Raises: InputError for sequences for which this model's positions are not built, and for tokens
    that it does not have, unless they are traced.
    """
    return _logits(model.apply, model.unembed, params, *_checked(model, tokens, mask))


def token_logp(
    model: Model,
    params: Params,
    tokens: Int[_Host, "B T"],
    mask: Bool[_Host, "B T"] | Int[_Host, "B T"],
) -> Float[Array, "B T"]:
    """log p(token | the real tokens before it), in nats, at temperature 1.

    0 at the first real token of a row, before which there is nothing, and where `mask` is 0. No
    array of the size of the logits is kept, in the backward pass neither.

    Args, Raises: as `logits`.
    """
    return _token_logp(model.apply, model.unembed, params, *_checked(model, tokens, mask))


def token_is_likeliest(
    model: Model,
    params: Params,
    tokens: Int[_Host, "B T"],
    mask: Bool[_Host, "B T"] | Int[_Host, "B T"],
) -> Bool[Array, "B T"]:
    """Whether each token is the likeliest after the real tokens before it; False where there are
    none, and where `mask` is 0.

    Args, Raises: as `logits`.
    """
    return _is_likeliest(model.apply, model.unembed, params, *_checked(model, tokens, mask))


def check_length(config: ModelConfig, length: int, label: str, remedy: str | None = None) -> None:
    """Raises: InputError if positions of so long a sequence are not built for the model."""
    limit = config.position_limit
    if limit is not None and length > limit:
        raise InputError(
            f"{label}: {length} tokens, but this model's positions are built up to {limit}: beyond "
            "it the angles of all positions change with the length (in config.json: "
            "max_position_embeddings, or of longrope original_max_position_embeddings in "
            f"rope_parameters, once rope_scaling); {remedy or f'keep to {limit} tokens'}"
        )


def check_tokens(label: str, tokens: _Host, mask: _Host, vocab_size: int) -> None:
    """Refuses tokens that a model does not have; what `mask` leaves out may be anything.

    Of traced arrays only the dtype is looked at: inside jit no value is known.

    Raises: InputError with the first such token and its place.
    """
    remedy = "the tokens of this model: encode the text with its tokenizer"
    allowed = f"expected a whole number from 0 to {vocab_size - 1}, {remedy}"
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InputError(f"{label}: holds {tokens.dtype}, {allowed}")
    if isinstance(tokens, Tracer) or isinstance(mask, Tracer):
        return
    tokens, mask = sharding.to_host((tokens, mask))
    wrong = mask.astype(bool) & ((tokens < 0) | (tokens >= vocab_size))
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0].tolist())
        raise InputError(f"{label}{list(place)} = {tokens[place]}, {allowed}")


def _checked(model: Model, tokens: Any, mask: Any) -> tuple[Array, Array]:
    tokens, real = (x if isinstance(x, Array) else np.asarray(x) for x in (tokens, mask))
    if tokens.ndim != 2 or tokens.shape != real.shape or not tokens.size:
        shapes = f"tokens of shape {tokens.shape} and a mask of {real.shape}"
        raise InputError(f"{shapes}: expected [B, T] for both, with B and T of 1 or more")
    check_length(model.config, tokens.shape[1], "tokens")
    check_tokens("tokens", tokens, real, model.config.vocab_size)
    if not isinstance(real, Tracer) and (odd := real[(real != 0) & (real != 1)]).size:
        raise InputError(f"mask holds {odd[0]}: give 1 or True at real tokens, else 0")
    return jnp.asarray(tokens), jnp.asarray(real, bool)


_jitted = functools.partial(jax.jit, static_argnums=(0, 1))


@_jitted
def _logits(apply: Any, unembed: Any, params: Params, tokens: Array, real: Array) -> Array:
    return unembed(params, _hidden(apply, params, tokens, real))


@_jitted
def _token_logp(apply: Any, unembed: Any, params: Params, tokens: Array, real: Array) -> Array:
    hidden, follows = _hidden_before(apply, params, tokens, real)
    logp, _ = token_logprobs(lambda hidden: unembed(params, hidden), hidden, tokens)
    return jnp.where(follows, logp, 0)


@_jitted
def _is_likeliest(apply: Any, unembed: Any, params: Params, tokens: Array, real: Array) -> Array:
    hidden, follows = _hidden_before(apply, params, tokens, real)
    return follows & (token_rank(lambda hidden: unembed(params, hidden), hidden, tokens) == 0)


def call_alone(position: Int[Array, "B T"], real: Bool[Array, "B T"]) -> Caller:
    """What a model leaves to its caller, for rows that are a sequence each."""
    return Caller(causal(position, real), recur=delta.sequences(real))


def _hidden_before(apply: Any, params: Params, tokens: Array, real: Array) -> tuple[Array, Array]:
    """The hidden states at the last real token before each one, and whether both are real."""
    hidden = _hidden(apply, params, tokens, real)
    # -1 where there is none.
    last = jax.lax.cummax(jnp.where(real, jnp.arange(tokens.shape[1]), -1), axis=1)
    previous = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    hidden = jnp.take_along_axis(hidden, jnp.maximum(previous, 0)[..., None], axis=1)
    return hidden, real & (previous >= 0)


def _hidden(apply: Any, params: Params, tokens: Array, real: Array) -> Array:
    position = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    hidden, _ = apply(params, tokens, position, call_alone(position, real), None)
    return hidden
