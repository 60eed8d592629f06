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
from jaxtyping import Float

from jaxgrpo.core.errors import InputError, refusing
from jaxgrpo.core.types import Params
from jaxgrpo.models.api import Model, ModelConfig
from jaxgrpo.models.attention import causal
from jaxgrpo.models.logprobs import token_logprobs


def logits(
    model: Model,
    params: Params,
    tokens: Any,
    mask: Any,
) -> Float[Array, "B T V"]:
    """Logits of the token after each position, in at least float32.

    Positions count the real tokens of a row, so that padding may stand on either side. Where `mask`
    is 0 the logits mean nothing.

    Args:
      params: of the model, as `load_model` gives them.
      tokens: [B, T], whole numbers: an array or lists.
      mask: [B, T], 1 or True at real tokens.

    Raises: InputError for sequences for which this model's positions are not built, for tokens that
    it does not have, and for what is no whole number.
    """
    return _logits(model.apply, model.unembed, params, *_checked(model, tokens, mask))


def token_logp(
    model: Model,
    params: Params,
    tokens: Any,
    mask: Any,
) -> Float[Array, "B T"]:
    """log p(token | the real tokens before it), in nats, at temperature 1.

    0 at the first real token of a row, before which there is nothing, and where `mask` is 0. No
    array of the size of the logits is kept, in the backward pass neither.

    Args, Raises: as `logits`.
    """
    return _token_logp(model.apply, model.unembed, params, *_checked(model, tokens, mask))


def check_length(config: ModelConfig, length: int, what: str, remedy: str | None = None) -> None:
    """Raises: InputError if positions of so long a sequence are not built for the model."""
    limit = config.position_limit
    if limit is not None and length > limit:
        raise InputError(
            f"{what}: {length} tokens, but this model's positions are built up to {limit}: beyond "
            "it the angles of all positions change with the length (in config.json: "
            "max_position_embeddings of rope type dynamic, original_max_position_embeddings of "
            f"longrope); {remedy or f'keep to {limit} tokens'}"
        )


def _checked(model: Model, tokens: Any, mask: Any) -> tuple[Array, Array]:
    tokens = _numbers("tokens", tokens, "iu", "whole numbers, as int32")
    mask = _numbers("mask", mask, "iubf", "1 or True at real tokens, else 0")
    if tokens.ndim != 2 or tokens.shape != mask.shape:
        raise InputError(
            f"tokens of shape {tokens.shape} and a mask of {mask.shape}: expected [B, T] for both"
        )
    check_length(model.config, tokens.shape[1], "tokens")
    if isinstance(tokens, np.ndarray) and isinstance(mask, np.ndarray):
        if (odd := mask[(mask != 0) & (mask != 1)]).size:
            raise InputError(f"mask holds {odd[0]}: give 1 or True at real tokens, else 0")
        size = model.config.vocab_size
        if (odd := tokens[(mask == 1) & ((tokens < 0) | (tokens >= size))]).size:
            raise InputError(
                f"tokens hold {odd[0]}, which the mask counts as real: the model has the tokens 0 "
                f"to {size - 1}"
            )
    return jnp.asarray(tokens), jnp.asarray(mask, bool)


def _numbers(name: str, value: Any, kinds: str, expected: str) -> Any:
    """The value as a NumPy array, if its numbers can be read; one under jit stays.

    Raises: InputError if they are not of these kinds of dtypes.
    """
    if not (isinstance(value, Tracer) or getattr(value, "is_fully_addressable", True) is False):
        with refusing(f"{name}: {{reason}}: give {expected} [B, T]", TypeError, ValueError):
            value = np.asarray(value)
    if value.dtype.kind not in kinds:
        raise InputError(f"{name} of dtype {value.dtype}: give {expected}")
    return value


_jitted = functools.partial(jax.jit, static_argnums=(0, 1))


@_jitted
def _logits(apply: Any, unembed: Any, params: Params, tokens: Array, real: Array) -> Array:
    return unembed(params, _hidden(apply, params, tokens, real))


@_jitted
def _token_logp(apply: Any, unembed: Any, params: Params, tokens: Array, real: Array) -> Array:
    hidden = _hidden(apply, params, tokens, real)
    at = jnp.arange(tokens.shape[1])
    # The last real position before each one; -1 where there is none.
    seen = jax.lax.cummax(jnp.where(real, at, -1), axis=1)
    before = jnp.pad(seen[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    hidden = jnp.take_along_axis(hidden, jnp.maximum(before, 0)[..., None], axis=1)
    logp, _ = token_logprobs(lambda hidden: unembed(params, hidden), hidden, tokens)
    return jnp.where(real & (before >= 0), logp, 0)


def _hidden(apply: Any, params: Params, tokens: Array, real: Array) -> Array:
    position = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    hidden, _ = apply(params, tokens, position, causal(position, real), None)
    return hidden
