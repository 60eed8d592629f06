"""Sampling: the distribution drawn from, what it says of it, and on what it does not depend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrpo.core.types import Prompts
from jaxgrpo.models import decoder, sharding
from jaxgrpo.rollout.sampler import SamplingSettings, draw, make_sampler, sample

KEY = jax.random.key_data(jax.random.key(3))
GROUP, STEPS = 3, 12


@functools.cache
def sampler(config=tiny.UNIFORM, **changes):
    settings = SamplingSettings(GROUP, STEPS, 1.0, (tiny.END,), tiny.PAD, 8)
    return make_sampler(tiny.model(config), settings._replace(**changes))


def run(prompts=None, config=tiny.UNIFORM, key=KEY, **changes):
    prompts = tiny.prompts() if prompts is None else prompts
    return sample(sampler(config, **changes), tiny.params(config), prompts, key)


@pytest.mark.slow
@pytest.mark.parametrize("config", [tiny.UNIFORM, tiny.LOCAL_GLOBAL], ids=["uniform", "local"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logps_are_those_of_a_plain_pass_over_the_whole_sequence(config, temperature):
    rollouts = run(config=config, temperature=temperature)
    want = tiny.whole_logps(config, tiny.params(config), rollouts, temperature)
    np.testing.assert_allclose(rollouts.behavior_logp, want, atol=3e-5)
    assert float(jnp.abs(want).max()) > 0.5


@pytest.mark.slow
def test_greedy_takes_the_likeliest_token_and_states_its_probability_at_temperature_1():
    rollouts = run(temperature=0.0)
    want = tiny.whole_logps(tiny.UNIFORM, tiny.params(), rollouts)
    np.testing.assert_allclose(rollouts.behavior_logp, want, atol=3e-5)
    np.testing.assert_array_equal(
        rollouts.completion_tokens, rollouts.completion_tokens[:, :1].repeat(GROUP, 1)
    )


def test_draws_follow_the_softmax():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=37) * 1.5, jnp.float32)
    count = 40_000
    keys = jax.random.split(jax.random.key(0), (1, count))
    token, logp = jax.jit(draw, static_argnums=2)(
        keys, jnp.broadcast_to(logits, (1, count, 37)), 0.8
    )
    prob = np.exp(np.asarray(logits, np.float64) / 0.8)
    prob /= prob.sum()
    seen = np.bincount(np.asarray(token[0]), minlength=37)
    statistic = ((seen - count * prob) ** 2 / (count * prob)).sum()
    assert statistic < 68  # chi-square with 36 degrees of freedom: p = 0.001
    np.testing.assert_allclose(logp[0], np.log(prob)[np.asarray(token[0])], atol=1e-4)


def test_a_sample_ends_at_the_stop_token_which_belongs_to_it():
    rollouts = run(prompts=tiny.prompts(8, seed=5))
    tokens, mask = np.asarray(rollouts.completion_tokens), np.asarray(rollouts.token_mask)
    ends = 0
    for row, live, cut in zip(
        tokens.reshape(-1, STEPS), mask.reshape(-1, STEPS), rollouts.truncated.ravel(), strict=True
    ):
        hits = np.flatnonzero(row == tiny.END)
        length = hits[0] + 1 if hits.size else STEPS
        np.testing.assert_array_equal(live, np.arange(STEPS) < length)
        assert (row[length:] == tiny.PAD).all()
        assert cut == (not hits.size)
        ends += bool(hits.size)
    assert 0 < ends < mask.shape[0] * GROUP
    np.testing.assert_array_equal(np.where(mask, 0, rollouts.behavior_logp), 0)


def test_samples_differ_within_a_group_and_between_steps_and_purposes():
    tokens = np.asarray(run().completion_tokens)
    assert (tokens[:, 0] != tokens[:, 1]).any(-1).all()
    assert (tokens != np.asarray(run(prompts=tiny.prompts(step=1)).completion_tokens)).any()
    assert (tokens != np.asarray(run(purpose=1).completion_tokens)).any()
    again = run(key=jax.random.key_data(jax.random.key(4)))
    assert (tokens != np.asarray(again.completion_tokens)).any()


def test_a_sample_depends_on_nothing_that_stands_beside_it():
    whole = run()
    prompts = tiny.prompts()
    order = np.array([2, 0, 3])
    picked = Prompts(
        prompt_tokens=prompts.prompt_tokens[order],
        prompt_mask=prompts.prompt_mask[order],
        ordinal=prompts.ordinal[order],
        row=prompts.row[order],
        step=prompts.step,
    )
    part = run(prompts=picked)
    np.testing.assert_array_equal(part.completion_tokens, whole.completion_tokens[order])


def test_one_row_drawn_twice_gets_different_samples():
    prompts = tiny.prompts(2)
    same = jax.tree.map(np.copy, prompts)
    same.prompt_tokens[1], same.prompt_mask[1] = same.prompt_tokens[0], same.prompt_mask[0]
    tokens = np.asarray(run(prompts=same).completion_tokens)
    assert (tokens[0] != tokens[1]).any()


@pytest.mark.parametrize("segment", [1, 5, 64])
def test_the_length_of_a_segment_changes_nothing(segment):
    np.testing.assert_array_equal(
        run(segment_tokens=segment).completion_tokens, run().completion_tokens
    )


def test_padding_of_prompts_changes_nothing():
    prompts = tiny.prompts()
    noisy = np.where(prompts.prompt_mask, prompts.prompt_tokens, 7).astype(np.int32)
    other = run(prompts=Prompts(**{**vars(prompts), "prompt_tokens": noisy}))
    np.testing.assert_array_equal(other.completion_tokens, run().completion_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_four_devices_sample_what_one_samples(axis):
    one = run(temperature=1.0)
    sizes = {"data": 1, axis: 4} if axis != "tensor" else {"data": 2, "tensor": 2}
    mesh = sharding.make_mesh(**sizes)
    model = decoder.build(tiny.UNIFORM, constrain=sharding.constrain(mesh))
    layout = sharding.param_shardings(mesh, model.axes, model.shapes, sharding.SAMPLING)
    params = jax.device_put(tiny.params(), layout)
    settings = sampler().settings
    prompts = jax.tree.map(
        lambda leaf: sharding.put(leaf, sharding.named(mesh, *("bins", None)[: np.ndim(leaf)])),
        tiny.prompts(),
    )
    four = sample(make_sampler(model, settings, sharding.constrain(mesh)), params, prompts, KEY)
    np.testing.assert_array_equal(four.completion_tokens, one.completion_tokens)
    np.testing.assert_allclose(four.behavior_logp, one.behavior_logp, atol=3e-5)
    bins = sharding.num_bins(mesh)
    assert len(four.completion_tokens.sharding.device_set) == 4
    assert four.completion_tokens.addressable_shards[0].data.shape[0] == 4 // bins
