"""Rows as cuDNN's sequences are the plain ones; lowered for a GPU, they are its kernel.

Its arithmetic needs a GPU. Here the sequences that it is given go through the formula that JAX has
for the same arguments, so layout, lengths and windows are checked, and the kernel itself is not.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import attended
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attended import ALONE, SEVERAL, assert_same, rows, with_gradients
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from planned import NEEDS_CUDA

from jaxgrpo.models import attention
from jaxgrpo.models.api import AttentionKind, KeyValue
from jaxgrpo.models.kernels import cudnn

SEQUENCES = functools.partial(cudnn.sequences, implementation="xla")
KINDS = [AttentionKind(), AttentionKind(window=4)]
CONTEXT, PROMPT = 4096, 1000
H100 = Path(__file__).parent.parent / "support" / "h100.txtpb"


@pytest.mark.parametrize("kind", KINDS, ids=attended.name)
def test_rows_of_one_sample_are_the_plain_ones_with_their_gradients(kind):
    *inputs, cotangent = map(jnp.asarray, attended.draws(ALONE, np.float32))
    actual, expected = (
        with_gradients(functools.partial(rows, implementation, ALONE, kind), cotangent, *inputs)
        for implementation in (
            functools.partial(cudnn.rows_with_prefix, sequences=SEQUENCES),
            attention.rows_with_prefix,
        )
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("kind", KINDS, ids=attended.name)
def test_prompts_are_the_plain_ones_with_their_gradients(kind):
    query, key, value, *_, cotangent = map(jnp.asarray, attended.draws(ALONE, np.float32))
    position = jnp.broadcast_to(jnp.arange(12), (1, 3, 12))
    valid = position < jnp.asarray([12, 7, 0])[:, None]
    cotangent = cotangent * valid[..., None, None]

    def attend(implementation, query, key, value):
        return implementation(position, valid)(query, key, value, None, kind)[0]

    actual, expected = (
        with_gradients(functools.partial(attend, implementation), cotangent, query, key, value)
        for implementation in (
            functools.partial(cudnn.causal, sequences=SEQUENCES),
            attention.causal,
        )
    )
    assert_same(actual, expected)


@pytest.mark.full
@pytest.mark.slow
def test_a_row_of_several_samples_gives_nan_and_leaves_others_alone():
    *inputs, _ = map(jnp.asarray, attended.draws(SEVERAL, np.float32))
    kernel = functools.partial(cudnn.rows_with_prefix, sequences=SEQUENCES)
    out = rows(kernel, SEVERAL, KINDS[0], *inputs)
    expected = rows(attention.rows_with_prefix, SEVERAL, KINDS[0], *inputs)
    assert np.isnan(out[0, [0, 2]]).all()  # of two samples, and of three
    np.testing.assert_allclose(out[0, 1], expected[0, 1], atol=2e-5)


def test_a_soft_cap_never_reaches_the_kernel():
    *inputs, _ = map(jnp.asarray, attended.draws(ALONE, np.float32))
    with pytest.raises(NotImplementedError, match="soft-capped scores: it has none"):
        rows(cudnn.rows_with_prefix, ALONE, AttentionKind(soft_cap=30.0), *inputs)


def lowered(monkeypatch, layout: Any) -> Any:
    """The gradient of rows lowered for a GPU; cuDNN's version is given, since it is not here."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 90800)
    kind = AttentionKind(window=512)

    def spec(*shape: int, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=layout)

    def loss(arrays, *placed):
        query, key, value, *prompts = arrays
        attend = cudnn.rows_with_prefix(*placed)
        return attend(query, key, value, KeyValue(*prompts), kind)[0].astype(jnp.float32).sum()

    inputs = [*(spec(1, 2, CONTEXT, heads, 128) for heads in (8, 2, 2))]
    inputs += [spec(1, 1, PROMPT, 2, 128)] * 2
    placed = [spec(*shape, dtype="int32") for shape in ((1, 2, CONTEXT),) * 2 + ((1, 2), (1, 1))]
    traced = jax.jit(jax.value_and_grad(loss)).trace(inputs, *placed)
    return traced.lower(lowering_platforms=("cuda",))


def quadratic(text: str, shape: str) -> list[str]:
    """The arrays with two dimensions of the context."""
    shapes = set(re.findall(shape, text))
    return [
        sizes for sizes in shapes if sum(int(d) >= CONTEXT for d in re.findall(r"\d+", sizes)) > 1
    ]


def test_lowered_for_a_gpu_it_is_two_kernels_with_the_right_mask(monkeypatch):
    text = lowered(monkeypatch, None).as_text()
    assert set(re.findall(r"@(__cudnn\$\w+)", text)) == {
        "__cudnn$fmhaSoftmax",
        "__cudnn$fmhaSoftmaxBackward",
    }
    plain = text.replace("\\22", '"')
    assert set(re.findall(r'"mask_type": "(\w+)"', plain)) == {"PADDING_CAUSAL"}
    assert set(re.findall(r'"sliding_window_length": (\d+)', plain)) == {"512"}
    assert set(re.findall(r'"fmha_scale": ([\d.]+)', plain)) == {"1.0"}  # the query comes scaled
    assert quadratic(text, r"tensor<[\dx]+") == []


@pytest.mark.full
@NEEDS_CUDA
def test_compiled_for_an_h100_it_keeps_no_scores(monkeypatch):
    chips = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", target_config=H100.read_text(), topology="1x1x1"
    )
    text = lowered(monkeypatch, SingleDeviceSharding(chips.devices[0])).compile().as_text()
    assert "__cudnn$fmhaSoftmax" in text
    assert "__cudnn$fmhaSoftmaxBackward" in text
    assert quadratic(text, r"\w\[[\d,]+\]") == []
