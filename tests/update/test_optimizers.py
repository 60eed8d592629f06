"""The optimizer: what decays, and how its state lies on a mesh."""

import dataclasses

import jax
import pytest
import tiny

from jaxgrpo import advantages, losses
from jaxgrpo.models import decoder, sharding
from jaxgrpo.rollout.sampler import SamplingSettings
from jaxgrpo.update.forward import Blueprint, opt_layout, param_layout
from jaxgrpo.update.optimizer import decay_mask, make_optimizer
from jaxgrpo.update.packing import Geometry


def test_matrices_decay_and_norms_and_biases_do_not():
    config = dataclasses.replace(tiny.UNIFORM, attention_bias=True)
    model = decoder.build(config)
    for path, decays in jax.tree_util.tree_leaves_with_path(decay_mask(model.axes)):
        assert decays == (path[-1].key in ("kernel", "table")), jax.tree_util.keystr(path)


@pytest.mark.parametrize("use", ["adamw", "adafactor"])
def test_the_state_of_an_optimizer_is_laid_out_on_a_mesh(use):
    mesh = sharding.make_mesh(data=2, fsdp=2)
    model = tiny.model()
    options = {"min_dim_size_to_factor": 4} if use == "adafactor" else {}
    blueprint = Blueprint(
        model=model,
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=make_optimizer(
            model.axes, use=use, learning_rate=0.1, updates=2, clip_norm=1.0, options=options
        ),
        geometry=Geometry(4, 4, 6, 5, sharding.num_bins(mesh), 100),
        sampling=SamplingSettings(4, 5, 1.0, (tiny.END,), tiny.PAD),
        mesh=mesh,
    )
    params = jax.device_put(tiny.params(), param_layout(blueprint))
    state = jax.jit(blueprint.optimizer.init, out_shardings=opt_layout(blueprint))(params)
    large = max(jax.tree.leaves(state), key=lambda leaf: leaf.size)
    share = large.addressable_shards[0].data.size / large.size
    assert use == "adafactor" or share == 1 / 2  # of fsdp
