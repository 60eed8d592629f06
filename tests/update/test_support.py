"""Replayed support: what the sampler records, and updates whose log-probs are among it."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import draw_all, make_blueprint, make_engine, take_step

from jaxgrpo import losses
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.records import SUPPORT
from jaxgrpo.models import decoder, sharding
from jaxgrpo.rollout.batch import Batch
from jaxgrpo.rollout.engine import SamplingSettings, record_shapes
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update import forward, packing
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.step import build_steps

pytestmark = pytest.mark.slow

KEY = np.asarray(jax.random.key_data(jax.random.key(3)))
PROMPTS, GROUP, WIDTH, STEPS, TEMPERATURE = 4, 3, 6, 12, 0.8
CUTS = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "min_completion_tokens": 3}
SETTINGS = SamplingSettings(STEPS, TEMPERATURE, (tiny.END,), tiny.PAD, 8, slots=5, **CUTS)
REPLAYS = SETTINGS._replace(support=CUTS["top_k"])
WIDE = dataclasses.replace(tiny.UNIFORM, dtype="float64")
MAX = "sampling/sampling_logp_difference/max"


@functools.cache
def drawn(settings=REPLAYS, prefix=False):
    prompts = tiny.prompts(PROMPTS, WIDTH)
    if prefix:
        forced = np.full((PROMPTS, GROUP, 2), 7, np.int32)
        forced[:, 1, 1], forced[:, 2] = -1, -1
        prompts = dataclasses.replace(prompts, forced_prefix=forced)
    engine = make_engine(tiny.model(), settings, prompts)
    rollouts = draw_all(engine, tiny.params(), prompts, KEY, GROUP)
    rng = np.random.default_rng(0)
    rewards = {"reward": rng.normal(size=(PROMPTS, GROUP)).astype(np.float32)}
    return dataclasses.replace(rollouts, rewards=rewards, forced_prefix=None)


@functools.cache
def steps(replays=True, mesh=(1, 1, 1)):
    settings, config = REPLAYS if replays else SETTINGS, tiny.UNIFORM
    sizes = PROMPTS, GROUP, WIDTH, STEPS
    recorded = {"records": record_shapes(config.kinds, settings.support)}
    blueprint = make_blueprint(
        config, sizes, 40, mesh=mesh, geometry_options=recorded, sampling=settings
    )
    return build_steps(blueprint), blueprint


def updated(rollouts, **options):
    """(metrics, what each parameter moved by) of one update."""
    return take_step(*steps(**options), tiny.params(), rollouts)


def cut_by_sorting(log_p, place):
    """The ids that a token at a place of its sample is drawn among, the likeliest first, in float64
    and one by one."""
    log_p = np.array(log_p, np.float64)
    if place < CUTS["min_completion_tokens"]:
        log_p[tiny.END] = -np.inf
    ids = np.argsort(-log_p, kind="stable")[: CUTS["top_k"]]
    share = np.exp(log_p[ids]) / np.exp(log_p[ids]).sum()
    number = int(np.searchsorted(np.cumsum(share), CUTS["top_p"])) + 1
    return [int(id) for id in ids[:number] if log_p[id] >= log_p[ids[0]] + np.log(CUTS["min_p"])]


def renormalised(table, rollouts):
    """Log-probs [P, G, T] of the tokens among their recorded support, from those of all [.., V]."""
    table, logp = np.asarray(table, np.float64), np.zeros(rollouts.token_mask.shape)
    for place in zip(*np.nonzero(rollouts.token_mask), strict=True):
        ids = [id for id in np.asarray(rollouts.fields[SUPPORT])[place] if id >= 0]
        total = np.log(np.exp(table[place][ids or slice(None)]).sum())
        logp[place] = table[place][rollouts.completion_tokens[place]] - total
    return logp


def tables(rollouts, temperature=TEMPERATURE):
    return tiny.whole_tables(tiny.UNIFORM, tiny.params(), rollouts, temperature)


@pytest.mark.full
def test_the_sampler_records_what_each_token_is_drawn_among():
    rollouts = drawn()
    record, table = rollouts.fields[SUPPORT], np.asarray(tables(rollouts))
    assert record.dtype == np.int32
    sizes = []
    for place in np.ndindex(rollouts.token_mask.shape):
        ids = [id for id in record[place].tolist() if id >= 0]
        assert record[place].tolist() == ids + [-1] * (CUTS["top_k"] - len(ids))
        if rollouts.token_mask[place]:
            assert ids == cut_by_sorting(table[place], place[-1])
            assert rollouts.completion_tokens[place] in ids
            sizes.append(len(ids))
        else:
            assert ids == []
    assert min(sizes) < max(sizes)
    np.testing.assert_allclose(rollouts.behavior_logp, renormalised(table, rollouts), atol=3e-5)


@pytest.mark.full
def test_the_samples_are_those_of_a_run_that_records_nothing():
    rollouts, plain = drawn(), drawn(SETTINGS)
    assert SUPPORT not in plain.fields
    np.testing.assert_array_equal(rollouts.completion_tokens, plain.completion_tokens)
    np.testing.assert_array_equal(rollouts.behavior_logp, plain.behavior_logp)


def test_at_temperature_0_the_likeliest_token_is_taken_from_all():
    rollouts = drawn(REPLAYS._replace(temperature=0.0, min_completion_tokens=0))
    table, mask = np.asarray(tables(rollouts, 1.0)), rollouts.token_mask
    np.testing.assert_array_equal(rollouts.completion_tokens[mask], table.argmax(-1)[mask])
    np.testing.assert_allclose(rollouts.behavior_logp[mask], table.max(-1)[mask], atol=3e-5)
    assert (rollouts.fields[SUPPORT] == -1).all()


@pytest.mark.full
def test_what_is_given_has_no_support():
    rollouts = drawn(prefix=True)
    recorded = (rollouts.fields[SUPPORT] >= 0).any(-1)
    np.testing.assert_array_equal(recorded, rollouts.token_mask)
    assert not rollouts.token_mask[:, 0, :2].any()
    assert rollouts.token_mask[:, 1, 1].all()


@pytest.mark.full
@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_ratios_at_the_weights_that_drew_are_1_under_replay_alone(name):
    settings = SETTINGS._replace(top_p=1.0, min_p=0.0, min_completion_tokens=0)
    settings = settings._replace(**{name: CUTS[name]}, support=CUTS["top_k"])
    rollouts = drawn(settings)
    (replayed, _), (full, _) = (updated(rollouts, replays=replays) for replays in (True, False))
    assert 0 < replayed[MAX] < 1e-5
    assert replayed["sampling/disagreement"] == pytest.approx(replayed[MAX] / 1e-3)
    assert full[MAX] > 0.1
    assert "sampling/disagreement" not in full
    assert replayed["entropy"] == pytest.approx(full["entropy"], abs=1e-6)  # of all tokens


def test_what_a_run_counts_before_it_starts_is_the_batch_that_it_makes():
    functions, blueprint = steps()
    learner = first_learner(blueprint, tiny.params(), PROMPTS, ("reward",))
    _, prepared = functions.prepare(learner, jax.tree.map(jnp.asarray, drawn()))
    planned = packing.abstract_batch(blueprint.geometry, blueprint.objective.needs)
    assert planned.fields[SUPPORT].shape[-1] == CUTS["top_k"]
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch)
        for batch in (planned, prepared.batches[0])
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.full
def test_packed_log_probs_are_those_of_each_sample_alone():
    functions, blueprint = steps()
    preparer = functions.prepare.__self__
    learner = first_learner(blueprint, tiny.params(seed=1), PROMPTS, ("reward",))
    rollouts = drawn()
    on_device = jax.tree.map(jnp.asarray, rollouts)
    lengths = sharding.to_host(preparer.measure(on_device))
    fields = preparer.score_samples(
        learner, ["trainer_logp"], on_device, lengths, blueprint.geometry
    )
    table = tiny.whole_tables(tiny.UNIFORM, tiny.params(seed=1), rollouts, TEMPERATURE)
    np.testing.assert_allclose(fields["trainer_logp"], renormalised(table, rollouts), atol=1e-4)


def test_two_draws_agree_as_often_as_among_the_tokens_of_the_support():
    functions, blueprint = steps()
    preparer, rollouts = functions.prepare.__self__, drawn()
    learner = first_learner(blueprint, tiny.params(seed=1), PROMPTS, ("reward",))
    on_device = jax.tree.map(jnp.asarray, rollouts)
    lengths = sharding.to_host(preparer.measure(on_device))
    names, geometry = ["token_collision"], blueprint.geometry
    (collision,) = preparer.score_samples(learner, names, on_device, lengths, geometry).values()
    table = tiny.whole_tables(tiny.UNIFORM, tiny.params(seed=1), rollouts, TEMPERATURE)
    is_in = (rollouts.fields[SUPPORT][..., None] == np.arange(tiny.VOCAB)).any(-2)
    share = np.where(is_in, np.exp(np.asarray(table, np.float64)), 0)
    share = share / np.maximum(share.sum(-1, keepdims=True), 1e-9)
    expected = np.where(rollouts.token_mask, (share**2).sum(-1), 0)
    np.testing.assert_allclose(collision, expected, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 1)])
def test_four_devices_make_the_update_of_one(mesh):
    (metrics, gradient), (one_device, expected) = (
        updated(drawn(), mesh=sizes) for sizes in (mesh, (1, 1, 1))
    )
    assert metrics[MAX] < 1e-5
    assert metrics["loss"] == pytest.approx(one_device["loss"], abs=1e-6)
    for leaf, single in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(leaf - single) < 2e-4 * np.linalg.norm(single)


@pytest.mark.full
def test_an_engine_that_gives_no_support_is_refused():
    prompts = tiny.prompts(PROMPTS, WIDTH)
    engine, batch = make_engine(tiny.model(), SETTINGS, prompts), Batch(prompts, 1, REPLAYS)
    engine.load(tiny.params(), 0)
    engine.submit(batch.requests(KEY), 1)
    with pytest.raises(InputError, match=r"draws among 5 tokens at most and does not say which"):
        batch.add(engine.poll())
    engine.unload()


ACTIONS = 3  # of each decision of the games below, so that all samples can be written down


def enumerated(length):
    """Every sample of `length` decisions, each among the likeliest tokens at the weights that draw,
    [P, A ** length, T], with their support, and a random reward for each."""
    count = ACTIONS**length
    values, shape = tiny.params(WIDE), (PROMPTS, count, length)
    tokens, support = np.zeros(shape, np.int32), np.zeros((*shape, ACTIONS), np.int32)
    rewards = np.random.default_rng(5).normal(size=shape[:2])
    for place in range(length):
        table = np.asarray(tiny.whole_tables(WIDE, values, game(tokens, support, rewards)))
        support[..., place, :] = np.argsort(-table[..., place, :], -1)[..., :ACTIONS]
        choice = np.array([*itertools.product(range(ACTIONS), repeat=length)])[:, place]
        rows = np.arange(count)
        tokens[..., place] = support[:, rows, place, choice]
    return game(tokens, support, rewards)


def game(tokens, support, rewards):
    rollouts = tiny.rollouts(rewards, steps=tokens.shape[-1], width=WIDTH)
    arrays = {"completion_tokens": tokens, "token_mask": np.ones(tokens.shape, bool)}
    arrays |= {"behavior_logp": np.zeros(tokens.shape), "fields": {SUPPORT: support}}
    return dataclasses.replace(rollouts, **jax.tree.map(jnp.asarray, arrays))


def sample_logp(values, rollouts):
    """Log-probs [P, G, T] of the policy cut to the recorded support, by a masked softmax."""
    table = tiny.whole_tables(WIDE, values, rollouts)
    ids = rollouts.fields[SUPPORT]
    is_in = (ids[..., None] == jnp.arange(tiny.VOCAB)).any(-2)
    log_p = jax.nn.log_softmax(jnp.where(is_in, table, -jnp.inf), -1)
    return jnp.take_along_axis(log_p, rollouts.completion_tokens[..., None], -1)[..., 0]


def gradient_of_draws(values, rollouts, chance, surrogate, replays=True):
    """Of the loss, in expectation over all samples: each weighs what its chance is to be drawn."""
    groups, samples, length = rollouts.token_mask.shape
    geometry = Geometry(groups, samples, WIDTH, length, 1, tokens=60)
    lengths = sharding.to_host(packing.measure_lengths(rollouts))
    plan = packing.plan(lengths, np.ones((groups, samples), bool), geometry)
    reward = rollouts.rewards["reward"][..., None].astype(chance.dtype)
    wide = functools.partial(jnp.broadcast_to, shape=rollouts.token_mask.shape)
    if not replays:
        rollouts = dataclasses.replace(rollouts, fields={})
    arrays = wide(reward), wide(chance[..., None]), rollouts.token_mask
    batch = packing.gather(rollouts, plan, *arrays, {})
    objective = losses.Objective(surrogate, losses.token_mean())
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    settings = forward.Pass(decoder.build(WIDE), mesh, geometry.tokens, 1.0)

    def loss(values):
        micro_batches = (
            forward.micro_batch(batch, jnp.int32(k)) for k in range(int(plan.num_live))
        )
        parts = (forward.loss_of_tokens(settings, objective, values, m, {}) for m in micro_batches)
        return sum(part[0] for part in parts)

    return jax.jit(jax.grad(loss))(values)


def expected_gradient(values, rollouts):
    """Of minus the expected reward of the policy cut to the recorded support, written out."""

    def cost(values):
        chance = jnp.exp(sample_logp(values, rollouts).sum(-1))
        return -(chance * rollouts.rewards["reward"].astype(chance.dtype)).sum()

    return jax.jit(jax.grad(cost))(values)


def distance(gradient, expected):
    """Largest difference of two trees, in units of the largest entry."""
    pairs = [*zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True)]
    largest = max(np.abs(written_out).max() for _, written_out in pairs)
    return max(np.abs(leaf - written_out).max() for leaf, written_out in pairs) / largest


@pytest.mark.full
def test_the_mean_update_over_all_draws_climbs_the_reward_of_the_cut_policy():
    """On policy, of two decisions: the weights have moved since the support was recorded."""
    with jax.enable_x64(True):
        rollouts, values = enumerated(2), tiny.params(WIDE, seed=1)
        chance = jnp.exp(sample_logp(values, rollouts).sum(-1))
        np.testing.assert_allclose(chance.sum(-1), 1, atol=1e-12)
        arguments = values, rollouts, chance, losses.reinforce()
        expected = expected_gradient(values, rollouts)
        assert distance(gradient_of_draws(*arguments), expected) < 1e-9
        assert distance(gradient_of_draws(*arguments, replays=False), expected) > 0.05


@pytest.mark.full
def test_ratios_correct_the_mean_update_after_the_weights_have_moved():
    """Drawn by other weights, at which other tokens are the likeliest."""
    with jax.enable_x64(True):
        rollouts, values = enumerated(1), tiny.params(WIDE, seed=1)
        drew = sample_logp(tiny.params(WIDE), rollouts)
        rollouts = dataclasses.replace(rollouts, behavior_logp=drew)
        table = np.asarray(tiny.whole_tables(WIDE, values, rollouts))
        now = np.argsort(-table, -1)[..., :ACTIONS]
        assert (np.sort(now) != np.sort(rollouts.fields[SUPPORT])).any(-1).all()
        arguments = values, rollouts, jnp.exp(drew[..., 0]), losses.clip(1.0, 1e9)
        expected = expected_gradient(values, rollouts)
        assert distance(gradient_of_draws(*arguments), expected) < 1e-9
        assert distance(gradient_of_draws(*arguments, replays=False), expected) > 0.05
