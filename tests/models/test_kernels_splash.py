"""The TPU's kernel, interpreted on a CPU, is the plain formula; compiled, it keeps no scores."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import attended
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attended import KINDS, SEVERAL, assert_same, rows, with_gradients
from jax.experimental import topologies

from jaxgrpo.models import attention, sharding
from jaxgrpo.models.api import AttentionKind, KeyValue
from jaxgrpo.models.kernels import splash

LONG = attended.packed([[60, 100, 90], [256]], [1, 0], [130, 40], width=140, size=260)
"""Several blocks of 128, of prompts and of rows; a prompt that fills no block and one and a bit."""
BOTH = AttentionKind(window=70, soft_cap=1.5)
ENDS = [KINDS[0], *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[1:3]), KINDS[3]]
"""In every run of the tests neither a window nor a cap, and both."""


class Placed(NamedTuple):
    """What `rows` reads of a Packed."""

    placed: Any


interpreted = functools.partial(splash.rows_with_prefix, interpret=True)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS, ids=attended.name)
def test_rows_are_the_plain_ones_with_their_gradients(kind):
    *inputs, cotangent = map(jnp.asarray, attended.draws(SEVERAL, np.float32))
    actual, expected = (
        with_gradients(functools.partial(rows, implementation, SEVERAL, kind), cotangent, *inputs)
        for implementation in (interpreted, attention.rows_with_prefix)
    )
    assert_same(actual, expected, 2e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", ENDS, ids=attended.name)
def test_segments_that_are_alone_see_no_prompt(kind):
    """As rows of another prompt, one without a token, whichever kernel computes them."""
    alone = jnp.asarray(SEVERAL.segment > 1)
    length = np.take(SEVERAL.prompt_length[0], SEVERAL.row_prompt[0])[:, None]
    position = jnp.asarray(np.where(alone, SEVERAL.position - length, SEVERAL.position))
    *inputs, cotangent = map(jnp.asarray, attended.draws(SEVERAL, np.float32))
    segment, _, row_prompt, prompt_length = SEVERAL.placed
    placed = segment, position, row_prompt, prompt_length

    def attended_alone(implementation, *inputs):
        attend = implementation(*placed, alone)
        return attend(*inputs[:3], KeyValue(*inputs[3:]), kind)[0]

    def with_two_prompts(*inputs):
        """A pass in which no prompt has a token, for the segments that are alone."""
        passes: Any = [
            attention.rows_with_prefix(*placed[:3], lengths)
            for lengths in (prompt_length, jnp.zeros_like(prompt_length))
        ]
        parts = *inputs[:3], KeyValue(*inputs[3:]), kind
        behind, by_itself = (attend(*parts)[0] for attend in passes)
        return jnp.where(alone[..., None, None], by_itself, behind)

    expected = with_gradients(with_two_prompts, cotangent, *inputs)
    for implementation in (interpreted, attention.rows_with_prefix):
        function = functools.partial(attended_alone, implementation)
        assert_same(with_gradients(function, cotangent, *inputs), expected, 2e-5)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(AttentionKind(), marks=pytest.mark.full), BOTH], ids=attended.name
)
def test_rows_of_several_blocks_are_the_plain_ones(kind):
    *inputs, cotangent = map(jnp.asarray, attended.draws(LONG, np.float32))
    actual, expected = (
        with_gradients(functools.partial(rows, implementation, LONG, kind), cotangent, *inputs)
        for implementation in (interpreted, attention.rows_with_prefix)
    )
    assert_same(actual, expected, 5e-5)


@pytest.mark.full
def test_prompts_are_the_plain_ones_with_their_gradients():
    query, key, value, *_, cotangent = map(jnp.asarray, attended.draws(SEVERAL, np.float32))
    position = jnp.broadcast_to(jnp.arange(12), (1, 3, 12))
    valid = position < jnp.asarray([12, 7, 0])[:, None]
    cotangent = cotangent * valid[..., None, None]

    def attend(implementation, kind, query, key, value):
        return implementation(position, valid)(query, key, value, None, kind)[0]

    for kind in KINDS[::3]:
        actual, expected = (
            with_gradients(
                functools.partial(attend, implementation, kind), cotangent, query, key, value
            )
            for implementation in (
                functools.partial(splash.causal, interpret=True),
                attention.causal,
            )
        )
        assert_same(actual, expected, 2e-5)


@pytest.mark.full
def test_its_gradients_are_those_of_finite_differences():
    kind = AttentionKind(window=4, soft_cap=1.5)
    *inputs, cotangent = map(jnp.asarray, attended.draws(SEVERAL, np.float32))

    @jax.jit
    def loss(step, along):
        moved = [leaf + step * way for leaf, way in zip(inputs, along, strict=True)]
        return (rows(interpreted, SEVERAL, kind, *moved) * cotangent).sum()

    step = 1e-2
    _, back = jax.vjp(functools.partial(rows, interpreted, SEVERAL, kind), *inputs)
    for i, gradient in enumerate(back(cotangent)):
        along = [jnp.zeros_like(leaf) for leaf in inputs]
        along[i] = gradient / jnp.linalg.norm(gradient)  # the way on which it matters most
        slope = (loss(step, along) - loss(-step, along)) / (2 * step)
        np.testing.assert_allclose(slope, jnp.linalg.norm(gradient), rtol=2e-3)


def test_blocks_beyond_a_window_are_left_out():
    of_row = splash.Reach((512, 1024), splash.Sees(prefix=512, window=128))
    slices = [slice(start, start + 128) for start in range(0, 1024, 128)]
    computed = [[of_row[queries, shown].any() for shown in slices] for queries in slices[:4]]
    # The last block of the prompt, for a sample that may begin anywhere; of the row, two.
    expected = np.zeros((4, 8), bool)
    expected[:, 3] = True
    for i in range(4):
        expected[i, 4 + max(0, i - 1) : 5 + i] = True
    np.testing.assert_array_equal(computed, expected)


@pytest.mark.full
@pytest.mark.parametrize("break_it", ["position", "segment"])
def test_a_row_that_is_not_in_order_gives_nan_and_leaves_others_alone(break_it):
    *inputs, _ = map(jnp.asarray, attended.draws(SEVERAL, np.float32))
    changed = getattr(SEVERAL, break_it).copy()
    changed[0, 0, 3] += 1 if break_it == "position" else 2
    broken = SEVERAL._replace(**{break_it: changed})
    out, good = (rows(interpreted, packed, KINDS[0], *inputs) for packed in (broken, SEVERAL))
    assert np.isnan(out[0, 0]).all()
    np.testing.assert_array_equal(out[0, 1:], good[0, 1:])


@pytest.mark.full
@pytest.mark.slow
def test_on_a_mesh_every_device_computes_its_bins_and_heads():
    kind, devices = AttentionKind(window=4), jax.devices()
    *inputs, _ = map(jnp.asarray, attended.draws(SEVERAL, np.float32))
    twice = [jnp.concatenate([leaf, -leaf]) for leaf in inputs]
    doubled = SEVERAL._replace(
        **{k: np.repeat(v, 2, 0) for k, v in SEVERAL._asdict().items() if k != "width"}
    )
    mesh = sharding.make_mesh(fsdp=2, tensor=2, devices=devices)
    on_mesh = functools.partial(interpreted, mesh=mesh)
    actual = jax.jit(functools.partial(rows, on_mesh, doubled, kind))(*twice)
    assert actual.sharding.is_equivalent_to(
        sharding.named(mesh, "bins", "rows", None, "heads", None), actual.ndim
    )
    expected = rows(attention.rows_with_prefix, doubled, kind, *twice)
    real = doubled.segment > 0
    np.testing.assert_allclose(actual[real], expected[real], atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("topology", ["one chip", "eight chips"])
def test_compiled_for_a_tpu_it_is_three_kernels_and_no_scores(topology):
    """Forward, and backward for queries and for keys; with windows, soft caps and odd sizes."""
    context, prompt, kind = 4096, 1000, AttentionKind(window=512, soft_cap=30.0)
    if topology == "one chip":
        options = {"chips_per_host_bounds": (1, 1, 1)}
        chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", **options)
        mesh = sharding.make_mesh(devices=chips.devices)
    else:
        chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
        mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2, devices=chips.devices)
    bins = sharding.num_bins(mesh)

    def spec(*shape: int, dtype="bfloat16"):
        axes = ("bins", None, None, "heads", None)[: len(shape)]
        layout = sharding.named(mesh, *axes)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=layout)

    def loss(operands, *placed):
        implementation = functools.partial(splash.rows_with_prefix, mesh=mesh)
        return rows(implementation, Placed(placed), kind, *operands).astype(jnp.float32).sum()

    row_specs = [spec(bins, 2, context, heads, 128) for heads in (8, 2, 2)]
    placed = [
        spec(bins, *shape, dtype="int32") for shape in ((2, context), (2, context), (2,), (1,))
    ]
    specs = [*row_specs, *[spec(bins, 1, prompt, 2, 128)] * 2]
    traced = jax.jit(jax.value_and_grad(loss)).trace(specs, *placed)
    text = traced.lower(lowering_platforms=("tpu",)).compile().as_text() or ""
    for phase in ("fwd_segmented_residuals", "dq_segmented_no", "dkv_segmented_no"):
        assert f"splash_mha_{phase}" in text
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    sizes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)]
    assert (1, 2, context, 8 // mesh.shape["tensor"], 128) in sizes
    assert not [shape for shape in sizes if sum(size >= context for size in shape) > 1]
