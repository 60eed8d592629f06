"""Sampling and update compile for a TPU on a machine that has none."""

import functools

import jax
import numpy as np
import optax
import pytest
import tiny
from jax.experimental import topologies

from jaxgrpo import advantages, losses
from jaxgrpo.models import decoder, sharding
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.capacity import Sizes
from jaxgrpo.rollout.slots.programs import make_programs
from jaxgrpo.update.forward import Blueprint, opt_layout
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.step import build_steps

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("error:Some donated buffers")]

TOPOLOGY = "v5e:2x2"


@pytest.fixture(scope="module", params=[tiny.UNIFORM, tiny.LOCAL_GLOBAL], ids=["uniform", "local"])
def blueprint(request):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = sharding.make_mesh(fsdp=2, tensor=2, devices=devices)
    model = decoder.build(request.param, constrain=sharding.constrain(mesh))
    return Blueprint(
        model=model,
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=optax.adamw(1e-3),
        geometry=Geometry(4, 4, 8, 16, 2, 96),
        sampling=SamplingSettings(16, 1.0, (tiny.END,), tiny.PAD, 8),
        mesh=mesh,
    )


def placed(mesh, tree, *axes):
    """Shapes of host or device arrays, as arrays on the mesh would have them."""

    def shape(leaf):
        names = axes[: np.ndim(leaf)]
        return jax.ShapeDtypeStruct(
            np.shape(leaf), leaf.dtype, sharding=sharding.named(mesh, *names)
        )

    return jax.tree.map(shape, tree)


def parameters(blueprint, rules=sharding.TRAINING):
    layout = sharding.param_shardings(
        blueprint.mesh, blueprint.model.axes, blueprint.model.shapes, rules
    )
    return with_layout(blueprint.model.shapes, layout)


def with_layout(shapes, layout):
    """Shapes with shardings: a tree of them, or a compiled program that returns such values."""
    if hasattr(layout, "output_shardings"):
        layout = layout.output_shardings
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        layout,
    )


def compiled(function, *arguments):
    return function.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def test_prefill_and_decoding_compile(blueprint):
    settings = blueprint.sampling._replace(slots=8)  # half of the samples wait
    programs = make_programs(blueprint.model, settings, blueprint.mesh)
    params = parameters(blueprint, sharding.SAMPLING)
    split = compiled(jax.jit(programs.split), params)
    params = with_layout(jax.eval_shape(programs.split, params), split)
    sizes = Sizes.for_prompts(settings.slots, sharding.num_bins(blueprint.mesh), 4, 4, 8)
    begin = compiled(programs.begin, sizes)
    state = with_layout(jax.eval_shape(functools.partial(programs.begin, sizes)), begin)
    tokens = placed(blueprint.mesh, np.zeros((2, 2, 7), np.int32))
    at = placed(blueprint.mesh, np.zeros((2, 2), np.int32))
    caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.memory))
    for program in (
        compiled(programs.prefill, params, state, tokens, at, at),
        compiled(programs.decode, False, params, state, placed(blueprint.mesh, np.int32(4))),
    ):
        # Donated: no second copy of a cache.
        assert program.memory_analysis().alias_size_in_bytes >= caches / 4


def test_the_update_compiles_and_donates_its_state(blueprint):
    update = build_steps(blueprint).update_program
    params = parameters(blueprint)
    opt_state = with_layout(
        jax.eval_shape(blueprint.optimizer.init, params),
        opt_layout(blueprint.model, blueprint.mesh, blueprint.optimizer),
    )
    batch = jax.eval_shape(functools.partial(_batch, blueprint))
    batch = placed(blueprint.mesh, batch, None, "bins", None, None)
    program = compiled(update, params, opt_state, {}, {}, batch)
    shard = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) / 4
    assert program.memory_analysis().alias_size_in_bytes >= 3 * shard  # weights and two moments


def _batch(blueprint):
    import jax.numpy as jnp

    from jaxgrpo.update import packing

    shape = (blueprint.geometry.num_prompts, blueprint.geometry.group_size)
    rollouts = tiny.rollouts(np.ones(shape), steps=16, width=8)
    lengths = jax.eval_shape(packing.measure_lengths, rollouts)
    filled = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), lengths)
    everyone = packing.plan(filled, np.ones(shape, bool), blueprint.geometry)
    zero = jnp.zeros(rollouts.token_mask.shape)
    fields = {"behavior_logp": zero, "sampled_now": zero > 0}
    return packing.gather(rollouts, everyone, zero, zero, rollouts.token_mask, fields)
