"""Recorded experts: what the sampler records, and updates that take it again."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import cpu_mesh, draw_all, make_blueprint, make_engine, take_step
from flax import nnx

from jaxgrpo.core.records import EXPERTS, NONE
from jaxgrpo.models import decoder, routing, sharding
from jaxgrpo.models.api import Caller, ExpertsKind, LayerKind
from jaxgrpo.models.attention import causal
from jaxgrpo.models.experts import Experts
from jaxgrpo.rollout.engine import SamplingSettings, record_shapes
from jaxgrpo.rollout.slots.capacity import capacity
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.step import build_steps

pytestmark = pytest.mark.slow

FEED = ExpertsKind(number=6, top_k=2, size=16)
CONFIG = dataclasses.replace(tiny.UNIFORM, pattern=(LayerKind(feed=FEED),))
SINGLE = dataclasses.replace(tiny.UNIFORM, pattern=(LayerKind(feed=FEED._replace(top_k=1)),))
KEY = np.asarray(jax.random.key_data(jax.random.key(3)))
PROMPTS, GROUP, WIDTH, STEPS = 4, 3, 6, 12


@functools.cache
def params(config=CONFIG):
    """Experts that differ: their maps are 15 times as large as they begin."""
    values = tiny.params(config)
    blocks = jax.tree.map(lambda leaf: leaf * 15, values["blocks"]["0"]["experts"])
    return {**values, "blocks": {"0": {**values["blocks"]["0"], "experts": blocks}}}


SETTINGS = SamplingSettings(STEPS, 1.0, (tiny.END,), tiny.PAD, 8, slots=5)


@functools.cache
def drawn(config=CONFIG, width=WIDTH, settings=SETTINGS):
    prompts = tiny.prompts(PROMPTS, width)
    engine = make_engine(tiny.model(config), settings, prompts)
    rollouts = draw_all(engine, params(config), prompts, KEY, GROUP)
    rng = np.random.default_rng(0)
    rewards = {"reward": rng.normal(size=(PROMPTS, GROUP)).astype(np.float32)}
    return dataclasses.replace(rollouts, rewards=rewards)


@functools.cache
def steps(config=CONFIG, routed=True, mesh=(1, 1, 1), width=WIDTH):
    sizes = PROMPTS, GROUP, width, STEPS
    recorded = {"records": record_shapes(config.kinds, 0, routed)}
    blueprint = make_blueprint(config, sizes, 40, mesh=mesh, geometry_options=recorded)
    return build_steps(blueprint), blueprint


def updated(rollouts, values, config=CONFIG, **options):
    """(metrics, what each parameter moved by) of one update."""
    return take_step(*steps(config, **options), values, rollouts)


def plain_experts(config, values, rollouts):
    """[P, G, T, layers, k] by a plain pass over each sample."""

    @jax.jit
    def chosen_by_router(tokens):
        position = jnp.arange(tokens.shape[-1])[None]
        attend = causal(position, position >= 0)
        model = decoder.build(config, remat="full")
        _, memory = model.apply(values, tokens[None], position, Caller(attend), None)
        return jnp.moveaxis(memory["blocks"]["0"].experts[:, 0], 0, 1)

    recorded = routing.recorded(config.kinds) or ()
    expected = np.full((*rollouts.token_mask.shape, *recorded), -1)
    for p, g in np.ndindex(PROMPTS, GROUP):
        prompt = rollouts.prompt_tokens[p][rollouts.prompt_mask[p]]
        length = int(rollouts.token_mask[p, g].sum())
        tokens = np.concatenate([prompt, rollouts.completion_tokens[p, g]])
        padded = np.resize(np.pad(tokens, (0, WIDTH)), WIDTH + STEPS)
        begin = len(prompt) - 1
        expected[p, g, :length] = chosen_by_router(padded)[begin : begin + length]
    return expected


@pytest.mark.full
def test_the_sampler_records_the_experts_of_what_each_token_is_drawn_from():
    rollouts = drawn()
    record = rollouts.fields[EXPERTS]
    assert record.dtype == np.int16
    np.testing.assert_array_equal(record, plain_experts(CONFIG, params(), rollouts))
    assert set(np.unique(record)) >= set(range(FEED.number))
    logp = tiny.whole_logps(CONFIG, params(), rollouts)
    np.testing.assert_allclose(rollouts.behavior_logp, logp, atol=3e-5)


@pytest.mark.full
def test_a_sampler_that_is_to_record_no_experts_draws_the_same_and_takes_less_memory():
    settings = SETTINGS._replace(records_experts=False)
    rollouts, recorded = drawn(settings=settings), drawn()
    assert EXPERTS not in rollouts.fields
    np.testing.assert_array_equal(rollouts.completion_tokens, recorded.completion_tokens)
    np.testing.assert_allclose(rollouts.behavior_logp, recorded.behavior_logp, atol=1e-5)
    sizes = cpu_mesh(1), PROMPTS, GROUP, WIDTH
    less, more = (capacity(tiny.model(CONFIG), s, *sizes).state for s in (settings, SETTINGS))
    assert more - less == recorded.fields[EXPERTS].nbytes > 0


@pytest.mark.full
def test_replay_is_fresh_routing_where_the_weights_are_those_that_drew():
    (replayed, gradient), (fresh, expected) = (
        updated(drawn(), params(), routed=routed) for routed in (True, False)
    )
    assert replayed["routing/rerouted"] == 0
    assert "routing/rerouted" not in fresh
    assert replayed["routing/load"] == fresh["routing/load"] > 1
    jax.tree.map(np.testing.assert_array_equal, gradient, expected)
    assert replayed["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.full
def test_where_a_router_has_moved_ratios_are_1_under_replay_alone():
    """A single expert has the gate 1, whatever its score, so the choice is all that can differ.

    Prompts have one token, which opens each sample: those before it would be routed afresh.
    """
    values, router = params(SINGLE), np.random.default_rng(4).normal(size=(2, 32, 6))
    block = values["blocks"]["0"]
    moved = {**block["experts"], "router": {"kernel": jnp.asarray(router, jnp.float32)}}
    values = {**values, "blocks": {"0": {**block, "experts": moved}}}
    replayed, fresh = (
        updated(drawn(SINGLE, width=1), values, SINGLE, routed=routed, width=1)[0]
        for routed in (True, False)
    )
    assert replayed["routing/rerouted"] > 0.5
    assert replayed["sampling/sampling_logp_difference/max"] < 5e-5
    assert fresh["sampling/sampling_logp_difference/max"] > 0.1


@pytest.mark.full
def test_what_was_not_recorded_is_routed_afresh():
    rollouts = drawn()
    nothing = np.full_like(rollouts.fields[EXPERTS], NONE)
    unknown = dataclasses.replace(rollouts, fields={EXPERTS: nothing})
    _, gradient = updated(unknown, params())
    _, expected = updated(rollouts, params())
    jax.tree.map(np.testing.assert_array_equal, gradient, expected)


@pytest.mark.full
def test_a_changed_token_changes_no_other_sample():
    rollouts = drawn()
    tokens = rollouts.completion_tokens.copy()
    tokens[1, 0, 1] = (tokens[1, 0, 1] + 5) % tiny.VOCAB
    changed = dataclasses.replace(rollouts, completion_tokens=tokens)
    before, after = (scored(values) for values in (rollouts, changed))
    differs = (before != after).any(-1)
    assert differs[1, 0]
    differs[1, 0] = False
    assert not differs.any()


def scored(rollouts):
    """Log-probs [P, G, T] of the trainer, in packed rows."""
    functions, blueprint = steps()
    preparer = functions.prepare.__self__
    learner = first_learner(blueprint, params(), PROMPTS, ("reward",))
    rollouts = jax.tree.map(jnp.asarray, rollouts)
    lengths = sharding.to_host(preparer.measure(rollouts))
    geometry = blueprint.geometry
    fields = preparer.score_samples(learner, ["trainer_logp"], rollouts, lengths, geometry)
    return np.asarray(fields["trainer_logp"])


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 1)])
def test_four_devices_make_the_update_of_one(mesh):
    (metrics, gradient), (one_device, expected) = (
        updated(drawn(), params(), mesh=sizes) for sizes in (mesh, (1, 1, 1))
    )
    assert metrics["loss"] == pytest.approx(one_device["loss"], abs=1e-6)
    for leaf, single in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(leaf - single) < 2e-4 * np.linalg.norm(single)


@pytest.mark.full
def test_a_replayed_gradient_is_that_of_the_chosen_experts_written_out():
    """Of one layer of experts, whose record is not what its router would choose."""
    feed = ExpertsKind(number=3, top_k=2, size=4)
    config = dataclasses.replace(tiny.UNIFORM, hidden_size=8)
    module = Experts(config, feed, nnx.Rngs(0))
    graph, state = nnx.split(module)
    values = nnx.to_pure_dict(state)
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    values, x = jax.tree.map(lambda leaf: draw(leaf.shape), values), draw((1, 5, 8))
    record = np.asarray([[[0, 2], [1, 0], [2, 1], [1, 2], [0, 1]]])
    weight = draw(x.shape)

    def ours(values, x):
        out, rerouted = nnx.merge(graph, values)(
            x, routing.replay, sharding.on_one_device, jnp.asarray(record), feed
        )
        return (out * weight).sum(), rerouted

    def written_out(values, x):
        total, share = 0.0, jax.nn.softmax(x @ values["router"]["kernel"])
        for token in range(5):
            first, second = record[0, token]
            both_shares = share[0, token, first] + share[0, token, second]
            for expert in (first, second):
                gate, up, down = (values[n]["kernel"][expert] for n in ("gate", "up", "down"))
                inner = jax.nn.silu(x[0, token] @ gate) * (x[0, token] @ up)
                out = share[0, token, expert] / both_shares * (inner @ down)
                total += (out * weight[0, token]).sum()
        return total

    (loss, rerouted), gradient = jax.value_and_grad(ours, (0, 1), has_aux=True)(values, x)
    expected_loss, expected = jax.value_and_grad(written_out, (0, 1))(values, x)
    assert rerouted.any()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5), gradient, expected
    )
