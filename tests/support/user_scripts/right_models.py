"""Loads a Hugging Face folder, reads probabilities off it, and writes it back."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxgrpo as jg
from jaxgrpo.models import lora


def perplexities(folder: str, texts: list[list[int]]) -> list[float]:
    """exp of the mean negative log-probability of the tokens after the first, text by text."""
    model, params = jg.load_model(folder, "float32")
    longest = max(map(len, texts))
    tokens = np.array([text + [0] * (longest - len(text)) for text in texts])
    mask = np.array([[place < len(text) for place in range(longest)] for text in texts])
    logp = jg.token_logp(model, params, tokens, mask)
    counts = jnp.maximum(mask.sum(axis=1) - 1, 1)
    return jnp.exp(-logp.sum(axis=1) / counts).tolist()


def likeliest(folder: Path, tokens: list[int], count: int = 5) -> list[int]:
    """The tokens that the model holds for the likeliest next ones."""
    model, params = jg.load_model(folder)
    scores = jg.logits(model, params, np.array([tokens]), np.ones((1, len(tokens)), bool))
    return jnp.argsort(-scores[0, -1])[:count].tolist()


def merged(folder: str, adapter: str, out: Path) -> str:
    """A model with the adapters of a PEFT folder, as one folder; returns the parameters' hash."""
    model, params = jg.load_model(folder, adapter=adapter)
    plain_model, weights = lora.base_model(model), lora.merge(model, params)
    jg.save_model(plain_model, weights, out, base=folder, overwrite=True)
    print(plain_model.config.num_layers, plain_model.config.family)
    return jg.parameter_hash(weights)
