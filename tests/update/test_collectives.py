"""What devices exchange in an update, read from the program compiled for a TPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
import tiny
from jax.experimental import topologies

from jaxgrpo import advantages, losses
from jaxgrpo.models import decoder, sharding
from jaxgrpo.planning import hlo
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.update import packing
from jaxgrpo.update.forward import Blueprint, opt_layout, param_layout
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.step import build_steps

pytestmark = pytest.mark.slow

VOCAB = 5120  # a size that nothing else has
MODEL = dataclasses.replace(
    tiny.UNIFORM,
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    dtype="bfloat16",
)


def program(**sizes: int) -> str:
    """The update of a model whose head dominates, compiled for eight chips."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = sharding.make_mesh(**sizes, devices=devices)
    blueprint = Blueprint(
        model=decoder.build(MODEL, constrain=sharding.constrain(mesh)),
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=optax.adamw(1e-3),
        geometry=Geometry(16, 8, 64, 128, sharding.num_bins(mesh), 2176),
        sampling=SamplingSettings(128, 1.0, (tiny.END,), tiny.PAD, 8),
        mesh=mesh,
    )

    def on(layout, shapes, dtype=None):
        return jax.tree.map(
            lambda leaf, leaf_sharding: jax.ShapeDtypeStruct(
                leaf.shape, dtype or leaf.dtype, sharding=leaf_sharding
            ),
            shapes,
            layout,
        )

    params = on(
        param_layout(blueprint.model, blueprint.mesh), blueprint.model.shapes, jnp.float32
    )  # as they are trained
    opt_state = on(
        opt_layout(blueprint.model, blueprint.mesh, blueprint.optimizer),
        jax.eval_shape(blueprint.optimizer.init, params),
    )
    batch = packing.abstract_batch(blueprint.geometry, ())
    names = jax.tree.map(
        lambda leaf: sharding.named(mesh, *(None, "bins", None, None)[: leaf.ndim]), batch
    )
    update = build_steps(blueprint).update_program
    traced = update.trace(params, opt_state, {}, {}, on(names, batch))
    return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


def exchanged(**sizes: int) -> list[hlo.Collective]:
    """The collectives of the update on a mesh of eight chips."""
    return hlo.collectives(program(**sizes), {axis: sizes.get(axis, 1) for axis in sharding.AXES})


def spans_vocabulary(collective: hlo.Collective, tensor: int = 1) -> bool:
    """Whether one of its arrays has a dimension of the vocabulary, or a device's part of it."""
    return any({VOCAB, VOCAB // tensor} & {*array.shape} for array in collective.arrays)


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
@pytest.mark.full
def test_the_head_is_gathered_once_and_its_gradient_added_up_once(sizes):
    collectives = exchanged(**sizes)
    # One loop is that over micro-batches; inside it are those over layers and chunks of tokens.
    assert max(op.depth for op in collectives) >= 2
    large = [op for op in collectives if spans_vocabulary(op, sizes.get("tensor", 1))]
    assert [op for op in large if op.depth > 0] == []
    gathered = [array for op in large if op.kind == "all-gather" for array in op.arrays]
    assert any(array.dtype == "bf16" for array in gathered)  # in the dtype that it is read in


@pytest.mark.full
def test_gradients_are_added_up_over_data_after_the_loop_once_and_in_float32():
    """What crosses "data" may cross the network between slices: nothing large does in the loop."""
    over_data = [op for op in exchanged(data=2, fsdp=4) if "data" in op.axes]
    inside = [op for op in over_data if op.depth > 0 and op.sent > 1024]
    assert inside == []
    sums = [op for op in over_data if op.kind in ("all-reduce", "reduce-scatter")]
    assert any(spans_vocabulary(op) for op in sums)
    assert {array.dtype for op in sums for array in op.arrays} <= {"f32", "s32", "pred"}
