"""Packed rows by two calls of cuDNN are the plain ones; lowered for a GPU, they are its kernels.

Its arithmetic needs a GPU. Here formulas stand for its calls, so layout, lengths, the joining and
the gradients are checked; that its kernels compute those formulas is checked on a GPU by
`benchmarks.gpu_attention` (benchmarks/results/2026-11-27-h200.md).
"""

from __future__ import annotations

import functools
import re
from typing import Any

import attended
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attended import ALONE, APART, SEVERAL, assert_same, rows, with_gradients
from jax._src.cudnn import fused_attention_stablehlo

from jaxgrpo.models import attention
from jaxgrpo.models.api import AttentionKind, KeyValue
from jaxgrpo.models.kernels import cudnn, cudnn_packed
from jaxgrpo.models.kernels.cudnn_packed import Parts, Samples

PLAIN = AttentionKind()
EMPTY = attended.packed([[5, 6], [], [3, 4, 2]], [1, 0, 0], [0, 4], width=5, size=12)
"""A row without a sample, prompts of no token, and places without a token."""


def probabilities(query, key, spans, sums=None):
    """exp(score - L) [B, kv_heads, heads per kv head, Q, N], and L [B, Q, heads]."""
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
    scores = jnp.einsum("bqkgd,bnkd->bkgqn", grouped, key, precision="highest")
    if isinstance(spans, Samples):
        index, place = spans.index, spans.place
        mask = (index[:, :, None] == index[:, None]) & (place[:, :, None] >= place[:, None])
        mask &= (index < spans.length.shape[1])[:, :, None]
    else:
        mask = (jnp.arange(key.shape[1]) < jnp.maximum(spans, 1)[:, None])[:, None]
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    if sums is None:
        sums = jax.nn.logsumexp(scores, -1).transpose(0, 3, 1, 2).reshape(*query.shape[:3])
    total = sums.reshape(*sums.shape[:2], key.shape[2], -1).transpose(0, 2, 3, 1)
    return jnp.exp(scores - total[..., None]), sums


def forward(query, key, value, spans):
    weight, sums = probabilities(query, key, spans)
    out = jnp.einsum("bkgqn,bnkd->bqkgd", weight, value, precision="highest").reshape(query.shape)
    # Where there is no token cuDNN leaves what was there.
    real = jnp.isfinite(sums)
    return jnp.where(real[..., None], out, jnp.nan), jnp.where(real, sums, jnp.nan)


def backward(query, key, value, spans, out, sums, slope):
    weight, _ = probabilities(query, key, spans, sums)
    grouped = [
        leaf.reshape(*leaf.shape[:2], key.shape[2], -1, leaf.shape[-1])
        for leaf in (query, out, slope)
    ]
    dots = functools.partial(jnp.einsum, precision="highest")
    towards = dots("bqkgd,bnkd->bkgqn", grouped[2], value)
    d_scores = weight * (towards - dots("bqkgd,bqkgd->bkgq", *grouped[1:])[..., None])
    d_query = dots("bkgqn,bnkd->bqkgd", d_scores, key).reshape(query.shape)
    d_key = dots("bkgqn,bqkgd->bnkd", d_scores, grouped[0])
    d_value = dots("bkgqn,bqkgd->bnkd", weight, grouped[2])
    real = jnp.arange(key.shape[1]) < (
        (spans.start + spans.length)[:, -1:] if isinstance(spans, Samples) else spans[:, None]
    )
    d_key, d_value = (jnp.where(real[..., None, None], leaf, jnp.nan) for leaf in (d_key, d_value))
    return d_query, d_key, d_value


FORMULAS = Parts(forward, backward)


@pytest.mark.full
@pytest.mark.parametrize(
    "packed", [SEVERAL, APART, ALONE, EMPTY], ids=["several", "apart", "one", "empty"]
)
def test_packed_rows_are_the_plain_ones_with_their_gradients(packed):
    *inputs, cotangent = map(jnp.asarray, attended.draws(packed, np.float32))
    actual, expected = (
        with_gradients(functools.partial(rows, implementation, packed, PLAIN), cotangent, *inputs)
        for implementation in (
            functools.partial(cudnn_packed.rows_with_prefix, most=3, parts=FORMULAS),
            attention.rows_with_prefix,
        )
    )
    assert_same(actual, expected)


@pytest.mark.full
def test_rows_whose_samples_are_in_pieces_or_out_of_order_give_nan_and_leave_others_alone():
    *inputs, _ = map(jnp.asarray, attended.draws(SEVERAL, np.float32))
    kernel = functools.partial(cudnn_packed.rows_with_prefix, parts=FORMULAS)
    cut, turned = SEVERAL.segment.copy(), SEVERAL.segment.copy()
    cut[0, 0, 2] = 0  # no token in the middle of a sample
    turned[0, 0, :11] = 2 - (np.arange(11) >= 5)  # the second sample is the first
    for segment in (cut, turned):
        odd = SEVERAL._replace(segment=segment)
        out = rows(functools.partial(kernel, most=3), odd, PLAIN, *inputs)
        assert np.isnan(out[0, 0]).all()
        assert np.isfinite(out[0, 1:]).all()
    out = rows(functools.partial(kernel, most=2), SEVERAL, PLAIN, *inputs)
    assert np.isnan(out[0, 2]).all()  # of three samples
    assert np.isfinite(out[0, :2]).all()


@pytest.mark.full
def test_samples_stay_at_their_place_in_what_cudnn_keeps_of_rows_with_fewer():
    length = jnp.asarray([[3, 2, 0, 0], [1, 0, 0, 0], [2, 2, 2, 2]], jnp.int32)
    start = jnp.cumsum(length, 1, dtype=jnp.int32) - length
    query, key = (jnp.zeros((3, 8, heads, 16), jnp.bfloat16) for heads in (4, 2))
    spans = Samples(length, start, length, length)
    _, (*lengths, query_starts, _) = cudnn_packed._arguments(query, spans)
    # What JAX makes of them for cuDNN, which numbers samples over all rows.
    count: Any = fused_attention_stablehlo._fix_seqlen_offsets
    counted = count(*lengths, query_starts, query_starts, query, key)
    np.testing.assert_array_equal(counted[0].reshape(-1), length.reshape(-1))
    first = (start + 8 * jnp.arange(3)[:, None]).reshape(-1)
    np.testing.assert_array_equal(counted[2].reshape(-1)[: first.size], first * 4 * 16)


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["packed", "sequences"])
def test_sequences_of_odd_lengths_are_computed_with_a_place_more(kernel):
    widths = []

    def forward_even(query, key, value, spans):
        widths.extend(leaf.shape[1] for leaf in (query, key, value))
        return forward(query, key, value, spans)

    def sequences(query, key, value, length, window):
        widths.extend(leaf.shape[1] for leaf in (query, key, value))
        return cudnn.sequences(query, key, value, length, window, implementation="xla")

    packed = attended.packed([[5], [4]], [1, 0], [3, 4], width=5, size=9)
    *inputs, _ = map(jnp.asarray, attended.draws(packed, np.float32))
    if kernel == "packed":
        parts = Parts(forward_even, backward)
        attend = functools.partial(cudnn_packed.rows_with_prefix, most=1, parts=parts)
    else:
        attend = functools.partial(cudnn.rows_with_prefix, sequences=sequences)
    real = (packed.segment > 0)[..., None, None]
    actual = rows(attend, packed, PLAIN, *inputs) * real
    assert packed.segment.shape[2] % 2
    assert packed.width % 2
    assert not any(length % 2 for length in widths)
    assert_same(actual, rows(attention.rows_with_prefix, packed, PLAIN, *inputs) * real)


@pytest.mark.slow
def test_windows_and_soft_caps_never_reach_the_kernel():
    *inputs, _ = map(jnp.asarray, attended.draws(SEVERAL, np.float32))
    for kind in (AttentionKind(soft_cap=30.0), AttentionKind(window=4)):
        attend = cudnn_packed.rows_with_prefix(*SEVERAL.placed, most=3)
        with pytest.raises(NotImplementedError, match="it has none"):
            attend(inputs[0], inputs[1], inputs[2], KeyValue(*inputs[3:]), kind)


def test_lowered_for_a_gpu_they_are_four_kernels_without_scores(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 90800)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    size, prompt = 4096, 1000

    def spec(*shape: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def loss(arrays, *placed):
        query, key, value, *prompts = arrays
        attend = cudnn_packed.rows_with_prefix(*placed, most=8)
        return attend(query, key, value, KeyValue(*prompts), PLAIN)[0].astype(jnp.float32).sum()

    inputs = [*(spec(1, 2, size, heads, 128) for heads in (8, 2, 2))]
    inputs += [spec(1, 1, prompt, 2, 128)] * 2
    placed = [spec(*shape, dtype="int32") for shape in ((1, 2, size),) * 2 + ((1, 2), (1, 1))]
    traced = jax.jit(jax.value_and_grad(loss)).trace(inputs, *placed)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"@__cudnn\$fmhaSoftmax\b\(", text)) == 2
    assert len(re.findall(r"@__cudnn\$fmhaSoftmaxBackward\(", text)) == 2
    masks = re.findall(r'"mask_type": "(\w+)"', text.replace("\\22", '"'))
    assert sorted(masks) == ["PADDING"] * 2 + ["PADDING_CAUSAL"] * 2
    shapes = set(re.findall(r"tensor<[\dx]+", text))
    quadratic = [
        shape for shape in shapes if sum(int(d) >= size for d in re.findall(r"\d+", shape)) > 1
    ]
    assert quadratic == []
