"""Tiny random models, prompts and rollouts that tests share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.core.types import Params, Prompts, Rollouts
from jaxgrpo.models import decoder
from jaxgrpo.models.api import AttentionKind, DeltaKind, LayerKind, Model, ModelConfig, Rope
from jaxgrpo.models.sequences import call_alone
from jaxgrpo.rollout.selection import pad_prompts

VOCAB = 40
PAD, END = 0, 1

UNIFORM = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)

LOCAL_GLOBAL = ModelConfig(
    family="random",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_layers=4,  # one period of three, and one layer that is left over
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    pattern=(
        LayerKind(AttentionKind(window=3)),
        LayerKind(AttentionKind(window=3, rope=Rope(theta=500.0))),
        LayerKind(),
    ),
    activation="gelu_tanh",
    norms="both",
    norm_offset=1.0,
    embedding_scale=32**0.5,
)


DELTA = LayerKind(DeltaKind(key_heads=2, value_heads=4, key_dim=8, value_dim=8))
HYBRID = dataclasses.replace(
    UNIFORM,
    family="random",
    num_layers=4,  # one period of three, and one layer that is left over
    pattern=(DELTA, DELTA, LayerKind(AttentionKind(rope=Rope(share=0.25)))),
    norm_offset=1.0,
    attention_gate=True,
)


@functools.cache
def model(config: ModelConfig = UNIFORM) -> Model:
    return decoder.build(config)


def params(config: ModelConfig = UNIFORM, seed: int = 0, scale: float = 15.0):
    """Parameters whose distributions are far from uniform, so that differences show."""
    values = jax.jit(model(config).init)(jax.random.key(seed))
    # States that remember some ten tokens, and not one.
    slower = lambda path, leaf: leaf - 4 if path[-1].key == "log_rate" else leaf  # noqa: E731
    values = jax.tree_util.tree_map_with_path(slower, values)
    return {**values, "head": jax.tree.map(lambda leaf: leaf * scale, values["head"])}


@functools.cache
def model_and_params(words: int, sharpness: float = 15.0) -> tuple[Model, Params]:
    """A model of so many tokens that prefers some of them, and its parameters."""
    config = dataclasses.replace(UNIFORM, vocab_size=words)
    return model(config), params(config, scale=sharpness)


def large_params(model: Model) -> Params:
    """Parameters so large that every layer and every adapter moves the logits; no leaf is 0."""
    rng = np.random.default_rng(1)

    def draw(path, spec):
        is_scale = path[-1].key == "scale"
        return jnp.asarray(is_scale + rng.normal(scale=0.2, size=spec.shape), spec.dtype)

    return jax.tree_util.tree_map_with_path(draw, model.shapes)


def normal_params(model: Model, seed: int = 0) -> Params:
    """Parameters that are standard normal draws."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(size=spec.shape), spec.dtype), model.shapes
    )


def cast_params(config: ModelConfig) -> Params:
    """The parameters of `config` in float32, in its own dtypes."""
    values = params(dataclasses.replace(config, dtype="float32"))
    return jax.tree.map(lambda leaf, spec: leaf.astype(spec.dtype), values, model(config).shapes)


def leaf_bytes(params: Params) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


def prompts(count: int = 4, width: int = 6, seed: int = 0, step: int = 0) -> Prompts:
    """Random prompts of 1 to `width` tokens; the first has one token, the second all."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, width + 1, count)
    length[: min(2, count)] = [1, width][: min(2, count)]
    tokens = rng.integers(2, VOCAB, (count, width))
    ragged = [row[:number] for row, number in zip(tokens, length, strict=True)]
    order = np.arange(count)
    return pad_prompts(ragged, width, order, order, step)


def rollouts(
    rewards: np.ndarray, steps: int = 5, width: int = 6, seed: int = 0, **changes
) -> Rollouts:
    """Rollouts with random tokens and ragged lengths for the given rewards [P, G]."""
    rewards = np.asarray(rewards, np.float32)
    count = len(rewards)
    prompt_batch = prompts(count, width, seed)
    rng = np.random.default_rng(seed + 1)
    length = rng.integers(1, steps + 1, rewards.shape)
    mask = np.arange(steps) < length[..., None]
    tokens = np.where(mask, rng.integers(2, VOCAB, mask.shape), PAD)
    values: dict[str, Any] = {
        "prompt_tokens": prompt_batch.prompt_tokens,
        "prompt_mask": prompt_batch.prompt_mask,
        "completion_tokens": tokens.astype(np.int32),
        "token_mask": mask,
        "behavior_logp": np.where(mask, rng.normal(-2, 0.3, mask.shape), 0).astype(np.float32),
        "rewards": {"reward": rewards},
        "truncated": length == steps,
        "ordinal": prompt_batch.ordinal,
        "row": prompt_batch.row,
        "policy_version": np.zeros(rewards.shape, np.int32),
        "step": np.int32(0),
        "fields": {},
    }
    return jax.tree.map(jnp.asarray, Rollouts(**{**values, **changes}))


@functools.partial(jax.jit, static_argnums=0)  # of one operation at a time each is compiled
def whole_logps(config: ModelConfig, values, rollouts: Rollouts, temperature: float = 1.0):
    """Log-probs [P, G, T] by one plain causal pass per sample, as an oracle; 0 where masked."""
    table = whole_tables(config, values, rollouts, temperature)
    logp = jnp.take_along_axis(table, rollouts.completion_tokens[..., None], -1)[..., 0]
    return jnp.where(rollouts.token_mask, logp, 0)


@functools.partial(jax.jit, static_argnums=0)
def whole_tables(config: ModelConfig, values, rollouts: Rollouts, temperature: float = 1.0):
    """Log-probs [P, G, T, V] of every token, in the same way."""

    def sequence_logp(prompt, length, completion):
        # The sequence without padding between prompt and completion, by position.
        steps = completion.shape[0]
        index = jnp.arange(prompt.shape[0] + steps)
        offset = index - length
        tokens = jnp.where(
            offset < 0, jnp.pad(prompt, (0, steps))[index], completion[offset % steps]
        )
        position = index[None]
        caller = call_alone(position, jnp.ones_like(position, bool))
        hidden, _ = model(config).apply(values, tokens[None], position, caller, None)
        logits = model(config).unembed(values, hidden)[0] / temperature
        wide = jnp.promote_types(logits.dtype, jnp.float32)
        logp = jax.nn.log_softmax(logits.astype(wide), -1)
        at = length - 1 + jnp.arange(steps)
        return logp[at]

    length = rollouts.prompt_mask.sum(-1)
    over_samples = jax.vmap(sequence_logp, in_axes=(None, None, 0))
    return jax.vmap(over_samples)(rollouts.prompt_tokens, length, rollouts.completion_tokens)
