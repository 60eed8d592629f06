"""Memory of attention grows with the context, not with its square; read from compiled programs."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxgrpo import advantages, losses
from jaxgrpo.core.types import TrainBatch
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import AttentionKind, KeyValue, LayerKind, ModelConfig
from jaxgrpo.models.attention import rows_with_prefix
from jaxgrpo.models.kernels import plain
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.update.forward import Blueprint, forward
from jaxgrpo.update.packing import Geometry

CONTEXTS = (8192, 16384, 32768)
PROMPT = 128
MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    pattern=(LayerKind(AttentionKind(window=1024)), LayerKind(AttentionKind(soft_cap=20.0))),
)


def spec(*shape: int, dtype="int32") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def temporary_bytes(function, *specs) -> int:
    """Temporary memory of a compiled function."""
    analysis: Any = jax.jit(function).lower(*specs).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def growth(sizes: list[int]) -> list[float]:
    return [after / before for before, after in itertools.pairwise(sizes)]


def layer_bytes(context: int) -> int:
    """Bytes of the gradient of one layer's attention over a row of this many tokens."""
    rows = [spec(1, 1, context, heads, 64, dtype="float32") for heads in (4, 2, 2)]
    prompts = [spec(1, 1, PROMPT, 2, 64, dtype="float32")] * 2

    def loss(arrays, segment, position, row_prompt, prompt_length):
        query, key, value, *prompts = arrays
        attend = rows_with_prefix(segment, position, row_prompt, prompt_length)
        return attend(query, key, value, KeyValue(*prompts), AttentionKind())[0].sum()

    sizes = spec(1, 1, context), spec(1, 1, context), spec(1, 1), spec(1, 1)
    return temporary_bytes(jax.value_and_grad(loss), [*rows, *prompts], *sizes)


def model_bytes(context: int, remat: decoder.Remat) -> int:
    """Bytes of the gradient of the log-probs of one row, through prompt, layers and head."""
    tokens = context + PROMPT
    blueprint = Blueprint(
        model=decoder.build(MODEL, remat=remat),
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=None,  # type: ignore[arg-type]  # of no use here
        geometry=Geometry(1, 2, PROMPT, context, 1, tokens),
        sampling=SamplingSettings(context, 1.0, (1,), 0, 8),
        mesh=sharding.make_mesh(devices=jax.devices()[:1]),
    )
    token, number = spec(1, 1, context), spec(1, 1, context, dtype="float32")
    arrays: dict[str, Any] = {
        **dict.fromkeys(("tokens", "targets", "segment", "position"), token),
        **dict.fromkeys(("advantage", "weight", "proximal_logp"), number),
    }
    micro = TrainBatch(
        prompt_tokens=spec(1, 1, PROMPT),
        prompt_length=spec(1, 1),
        **arrays,
        mask=spec(1, 1, context, dtype="bool"),
        fields={},
        prompt=spec(1, 1),
        row_prompt=spec(1, 1),
        num_live=spec(),
    )

    def loss(params, micro):
        return forward(blueprint.passes, params, micro)[0].sum()

    return temporary_bytes(jax.value_and_grad(loss), blueprint.model.shapes, micro)


@pytest.mark.slow
def test_memory_of_a_layer_grows_with_its_context():
    sizes = [layer_bytes(context) for context in CONTEXTS]
    print([round(size / 2**20) for size in sizes], "MiB")
    assert max(growth(sizes)) <= 2.2
    assert sizes[-1] < 4 * 4 * CONTEXTS[-1] ** 2 / 4  # a quarter of one array of scores


@pytest.mark.slow
def test_without_blocks_it_grows_with_the_square(monkeypatch):
    monkeypatch.setattr(plain, "BLOCK_BYTES", 2**60)
    sizes = [layer_bytes(context) for context in CONTEXTS]
    print([round(size / 2**20) for size in sizes], "MiB")
    assert min(growth(sizes)) > 3.5  # or the test above would show nothing


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "full", "attention"])
def test_memory_of_a_model_grows_with_its_context(remat):
    sizes = [model_bytes(context, remat) for context in CONTEXTS]
    print([round(size / 2**20) for size in sizes], "MiB")
    assert max(growth(sizes)) <= 2.2
