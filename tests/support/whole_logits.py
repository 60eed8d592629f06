"""Logits of whole sequences: those of transformers in PyTorch, and ours, to compare."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.models.api import Caller, Model
from jaxgrpo.models.attention import causal


def torch_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """[rows, positions, vocabulary] of a causal language model of transformers."""
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(tokens)).logits.numpy()


def our_logits(model: Model, params: Any, tokens: np.ndarray) -> np.ndarray:
    """[rows, positions, vocabulary] of our own forward pass."""

    @jax.jit
    def forward(params):
        position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        attend = causal(position, position >= 0)
        hidden, _ = model.apply(params, jnp.asarray(tokens), position, Caller(attend), None)
        return model.unembed(params, hidden)

    return np.asarray(forward(params))
