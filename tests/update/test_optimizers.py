"""The optimizer: which factories there are, what decays, what muon does, and layouts on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxgrpo import advantages, losses
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import decoder, sharding
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.update.forward import Blueprint, opt_layout, param_layout
from jaxgrpo.update.optimizer import decay_mask, make_optimizer, muon_dimensions
from jaxgrpo.update.packing import Geometry


def test_matrices_decay_and_norms_and_biases_do_not():
    config = dataclasses.replace(tiny.UNIFORM, attention_bias=True)
    model = decoder.build(config)
    for path, decays in jax.tree_util.tree_leaves_with_path(decay_mask(model.axes)):
        assert decays == (path[-1].key in ("kernel", "table")), jax.tree_util.keystr(path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("use", "state_dtype"),
    [
        *(("adamw", "float32"), ("adamw", "bfloat16"), ("adafactor", "float32")),
        *(("adafactor", "bfloat16"), ("muon", "float32")),
        pytest.param("muon", "bfloat16", marks=pytest.mark.full),
    ],
)
def test_the_state_of_an_optimizer_is_laid_out_on_a_mesh(use, state_dtype):
    mesh = sharding.make_mesh(data=2, fsdp=2)
    model = tiny.model()
    options = {"min_dim_size_to_factor": 4} if use == "adafactor" else {}
    settings = {"use": use, "state_dtype": state_dtype, "options": options}
    blueprint = Blueprint(
        model=model,
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=make_optimizer(
            model.axes, learning_rate=0.1, updates=2, clip_norm=1.0, **settings
        ),
        geometry=Geometry(4, 4, 6, 5, sharding.num_bins(mesh), 100),
        sampling=SamplingSettings(5, 1.0, (tiny.END,), tiny.PAD),
        mesh=mesh,
    )
    params = jax.device_put(tiny.params(), param_layout(blueprint.model, blueprint.mesh))
    layout = opt_layout(blueprint.model, blueprint.mesh, blueprint.optimizer)
    state = jax.jit(blueprint.optimizer.init, out_shardings=layout)(params)
    large = max(jax.tree.leaves(state), key=lambda leaf: leaf.size)
    share = large.addressable_shards[0].data.size / large.size
    assert use == "adafactor" or share == 1 / 2  # of fsdp
    if use == "muon":
        step = jax.jit(
            blueprint.optimizer.update,
            out_shardings=(param_layout(blueprint.model, blueprint.mesh), layout),
        )
        updates, after = step(params, state, params)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        alone = jax.jit(blueprint.optimizer.update)(
            tiny.params(), blueprint.optimizer.init(tiny.params()), tiny.params()
        )[0]
        for sharded, single in zip(jax.tree.leaves(updates), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(sharded, single, atol=1e-4)


def newton_schulz(matrix):
    """Five steps of the quintic iteration of Jordan 2024, in float64."""
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


def muon_by_hand(history, decayed):
    """The last update of one matrix [inputs, outputs]: Nesterov's momentum, orthogonal, scaled."""
    momentum, beta = np.zeros_like(history[0]), 0.95
    for number, gradient in enumerate(history, 1):
        momentum = beta * momentum + (1 - beta) * gradient
        ahead = beta * momentum / (1 - beta ** (number + 1))
        ahead = ahead + (1 - beta) * gradient / (1 - beta**number)
    inputs, outputs = ahead.shape
    return -0.1 * (newton_schulz(ahead) * np.sqrt(max(1, outputs / inputs)) + 0.2 * decayed)


def as_matrix(path, leaf):
    """A layer's kernel as [inputs, outputs]: of the output projection the last is the output."""
    last = path[-2].key in ("out", "down")
    return leaf.reshape(-1, leaf.shape[-1]) if last else leaf.reshape(leaf.shape[0], -1)


@pytest.fixture(scope="module")
def by_muon():
    """(parameters, gradients of two updates, the second update) in float64."""
    with jax.enable_x64(True):
        config = dataclasses.replace(tiny.LOCAL_GLOBAL, dtype="float64")
        params, axes = tiny.params(config), tiny.model(config).axes
        optimizer = make_optimizer(
            axes, use="muon", learning_rate=0.1, updates=9, options={"weight_decay": 0.2}
        )
        rng = np.random.default_rng(0)
        history = [jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params) for _ in "ab"]
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for gradient in history:
            updates, state = update(gradient, state, params)
        return jax.tree.map(np.asarray, (params, history, updates))


@pytest.mark.full
def test_muon_makes_the_matrix_of_each_layer_orthogonal_by_itself(by_muon):
    params, history, updates = by_muon
    kernels = 0
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        if path[-1].key != "kernel":
            continue
        stacked = path[0].key == "blocks"
        for layer in range(len(update) if stacked else 1):

            def matrix(leaf):
                return as_matrix(path, leaf[layer] if stacked else leaf)  # noqa: B023

            want = muon_by_hand(
                [matrix(at(gradients, path)) for gradients in history],
                matrix(at(params, path)),
            )
            np.testing.assert_allclose(matrix(update), want, rtol=1e-6, atol=1e-9)
            kernels += 1
    assert kernels == 4 * 7


def at(tree, path):
    """The leaf of a tree at a path."""
    for key in path:
        tree = tree[key.key]
    return tree


@pytest.mark.slow
def test_embeddings_head_and_norms_have_the_adam_of_muon_and_do_not_decay(by_muon):
    params, history, updates = by_muon
    with jax.enable_x64(True):
        adam = optax.nadam(0.1)
        state, update = adam.init(params), jax.jit(adam.update)
        for gradient in history:
            want, state = update(gradient, state)
    compared = 0
    for (path, leaf), expected in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(want), strict=True
    ):
        if path[-1].key != "kernel":
            np.testing.assert_allclose(
                leaf, expected, rtol=1e-6, err_msg=jax.tree_util.keystr(path)
            )
            compared += 1
    assert compared > 4


def test_biases_are_no_matrices_of_muon():
    config = dataclasses.replace(tiny.UNIFORM, attention_bias=True)
    all_dimensions = muon_dimensions(decoder.build(config).axes)
    is_leaf = lambda node: node is None or isinstance(node, tuple)  # noqa: E731
    for path, dimensions in jax.tree_util.tree_leaves_with_path(all_dimensions, is_leaf=is_leaf):
        assert (dimensions is not None) == (path[-1].key == "kernel"), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use": "moun"}, "optimizer.use = 'moun': optax has no such optimizer; try muon"),
        ({"use": "adamww"}, "try adamw"),
        ({"use": "lbfgs"}, "an update by optax.lbfgs with these options fails"),
        (
            {"use": "dpsgd", "options": {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "seed": 0}},
            "an update by optax.contrib.dpsgd with these options fails",
        ),
        ({"use": "momo"}, "optax.contrib.momo .* take an optimizer that needs gradients and"),
        ({"use": "muon", "options": {"ns_step": 3}}, "optax.contrib.muon has no such option; did"),
        ({"use": "muon", "options": {"beta": 1.0}}, "optimizer.beta = 1.0: expected 0 or more"),
        ({"use": "muon", "options": {"adam_weight_decay": 0.1}}, "norms and biases decay too"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(settings, message):
    with pytest.raises(InputError, match=message):
        make_optimizer(tiny.model().axes, learning_rate=0.1, updates=2, **settings)


@pytest.mark.full
@pytest.mark.parametrize("use", ["sgd", "lion", "lars", "ademamix", "adopt"])
def test_factories_of_optax_and_of_its_contributions_make_updates(use):
    optimizer = make_optimizer(tiny.model().axes, use=use, learning_rate=0.1, updates=2)
    params = tiny.params()
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
