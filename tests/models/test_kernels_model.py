"""A model's forward pass over a micro-batch, and its gradients, are the same by every kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import attended
import family_runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attended import ALONE, SEVERAL
from quick import LONG, full_but

from jaxgrpo.core.types import TrainBatch
from jaxgrpo.models import decoder
from jaxgrpo.models.api import AttentionKind, LayerKind, ModelConfig
from jaxgrpo.models.attention import XLA, Kernel
from jaxgrpo.models.hf.families import FAMILIES
from jaxgrpo.models.kernels import cudnn, plain, splash
from jaxgrpo.update.flat import flatten, hidden_states

pytestmark = pytest.mark.slow

MODEL = ModelConfig(
    vocab_size=13,
    hidden_size=16,
    intermediate_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    pattern=(LayerKind(AttentionKind(window=4)), LayerKind()),
)
CAPPED = dataclasses.replace(
    MODEL, pattern=(LayerKind(AttentionKind(window=4, soft_cap=1.5)), LayerKind())
)
OF_TPU = Kernel(
    "splash",
    functools.partial(splash.causal, interpret=True),
    functools.partial(splash.rows_with_prefix, interpret=True),
)
BY_FORMULA = functools.partial(cudnn.sequences, implementation="xla")
OF_GPU = Kernel(
    "cudnn",
    functools.partial(cudnn.causal, sequences=BY_FORMULA),
    functools.partial(cudnn.rows_with_prefix, sequences=BY_FORMULA),
)


def micro_batch(packed: attended.Packed) -> TrainBatch:
    rng = np.random.default_rng(0)
    prompt_shape = (*packed.prompt_length.shape, packed.width)
    nothing = np.zeros(packed.segment.shape, np.float32)
    arrays: dict[str, Any] = {
        "prompt_tokens": rng.integers(0, 13, prompt_shape, np.int32),
        **{name: rng.integers(0, 13, nothing.shape, np.int32) for name in ("tokens", "targets")},
        **dict.fromkeys(("advantage", "weight", "proximal_logp"), nothing),
        **{name: getattr(packed, name) for name in ("segment", "position", "row_prompt")},
        "prompt_length": packed.prompt_length,
        "prompt": packed.prompt_length,
        "mask": packed.segment > 0,
        "fields": {},
        "num_live": np.int32(1),
    }
    return jax.tree.map(jnp.asarray, TrainBatch(**arrays))


def hidden_and_gradients(config: ModelConfig, packed: attended.Packed, kernel: Kernel):
    """Hidden states of the real tokens, and the gradients of a random product with them."""
    model = decoder.build(config, remat="full")
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(scale=0.4, size=leaf.shape), leaf.dtype), model.shapes
    )
    micro = micro_batch(packed)
    size = int((packed.segment > 0).sum() + packed.prompt_length.sum())

    def loss(params):
        flat = flatten(micro, size)
        hidden, _ = hidden_states(model, params, micro, flat, kernel)
        return (hidden * jnp.asarray(rng.normal(size=hidden.shape))).sum(), hidden

    rng = np.random.default_rng(2)
    (_, hidden), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return hidden, gradients


def assert_same(actual, expected):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for actual_leaf, expected_leaf in pairs:
        error, size = jnp.linalg.norm(actual_leaf - expected_leaf), jnp.linalg.norm(expected_leaf)
        assert float(error) <= 1e-5 * float(size)


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "packed", "kernel"),
    [
        pytest.param(CAPPED, SEVERAL, OF_TPU, id="splash"),
        pytest.param(MODEL, ALONE, OF_GPU, id="cudnn", marks=pytest.mark.full),
    ],
)
def test_a_model_by_a_kernel_is_the_model_by_xla(config, packed, kernel):
    assert_same(
        hidden_and_gradients(config, packed, kernel), hidden_and_gradients(config, packed, XLA)
    )


@pytest.mark.full
def test_a_model_in_blocks_is_the_model_in_one(monkeypatch):
    with jax.enable_x64(True):
        config = dataclasses.replace(CAPPED, dtype="float64")
        unblocked = hidden_and_gradients(config, SEVERAL, XLA)
        monkeypatch.setattr(plain, "BLOCK_BYTES", 3 * 3 * 4 * 17 * 8)  # blocks of 3 queries
        blocks = hidden_and_gradients(config, SEVERAL, XLA)
        for blocked_leaf, unblocked_leaf in zip(
            jax.tree.leaves(blocks), jax.tree.leaves(unblocked), strict=True
        ):
            np.testing.assert_allclose(blocked_leaf, unblocked_leaf, rtol=0, atol=1e-9)


SOFT_CAPPED, WITH_SINKS = ["gemma2"], ["gpt_oss"]
WITH_LATENTS = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"]
SOON = {("gemma2", "splash"), ("gemma2", "blocks"), ("phi3", "cudnn")}
"""Compared by `make test` too, not only by `make test-all`."""
LARGE = ("qwen3_next", "qwen3_moe", "qwen3_5_moe_text")
"""Kinds of others together: their layers are those of qwen3_5_text, their experts gpt_oss's."""


def marks(family: str, name: str) -> tuple[Any, ...]:
    """Of a family by a kernel."""
    if (family, name) in SOON:
        return ()
    full = FAMILIES if name == "splash" else family_runs.KINDS
    return (pytest.mark.full,) if family in full and family not in LARGE else LONG


KERNELS = {"blocks": XLA, "splash": OF_TPU, "cudnn": OF_GPU}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=marks(family, name))
        for family in sorted(FAMILIES)
        for name in KERNELS
        if name == "blocks"
        or (family not in WITH_SINKS + WITH_LATENTS and (name, family) != ("cudnn", "gemma2"))
    ],
)
def test_a_family_by_a_kernel_has_the_log_probs_of_whole_sequences(family, name, monkeypatch):
    if name == "blocks":
        monkeypatch.setattr(plain, "BLOCK_BYTES", 2 * 3 * 4 * 21 * 4)  # 2 queries of 3 rows
    alone = name == "cudnn"  # one sample in each row
    run = family_runs.run(family, family_runs.shortest(family), kernel=KERNELS[name])
    expected, _ = family_runs.plain(family, alone)
    # In float32 the largest error found, of all families, is 2e-5 (Qwen2).
    np.testing.assert_allclose(family_runs.scored(run, alone), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "family",
    full_but(("llama", "deepseek_v3", *SOFT_CAPPED, *WITH_SINKS), sorted(FAMILIES)),
)
def test_soft_caps_sinks_and_latents_alone_keep_a_family_from_a_kernel(family):
    config = dataclasses.replace(family_runs.read(family)[0].config, dtype="bfloat16")
    caps = ["soft-capped scores: it has none"] if family in SOFT_CAPPED else []
    sinks = ["sinks: it has none"] if family in WITH_SINKS else []
    latents = (
        ["latents, whose values have another size than keys: it has none"]
        if family in WITH_LATENTS
        else []
    )
    assert cudnn.refusals(config, samples_per_row=1) == caps + sinks + latents
    assert splash.refusals(config, row=family_runs.SHORT) == sinks + latents
    wide = dataclasses.replace(config, float32_activations=True, float32_attention=True)
    (problem, *_) = cudnn.refusals(wide, samples_per_row=1)
    assert problem == "model.float32_attention: it takes queries, keys and values of 16 bits"
    if caps or sinks:
        run = family_runs.run(family, family_runs.SHORT, kernel=OF_GPU)
        with pytest.raises(NotImplementedError, match="it has none"):
            family_runs.scored(run, alone=True)
