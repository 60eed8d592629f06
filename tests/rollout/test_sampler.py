"""Sampling: the distribution drawn from, what it says of it, and on what it does not depend."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import draw_all, make_engine

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Prompts
from jaxgrpo.models import decoder, sharding
from jaxgrpo.rollout.batch import _sample_keys
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.selection import pad_prompts
from jaxgrpo.rollout.slots.drawing import Distribution, draw
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training.stored_policy import seed_key

KEY = jax.random.key_data(jax.random.key(3))
GROUP, STEPS = 3, 12


@functools.cache
def make(width, config=tiny.UNIFORM, **changes):
    settings = SamplingSettings(STEPS, 1.0, (tiny.END,), tiny.PAD, 8)
    return SlotEngine(tiny.model(config), settings._replace(**changes), width=width)


def run(prompts=None, config=tiny.UNIFORM, key=KEY, purpose=0, greedy=0, **changes):
    prompts = tiny.prompts() if prompts is None else prompts
    engine = make(prompts.prompt_tokens.shape[1], config, **changes)
    options = {"purpose": purpose, "greedy": greedy}
    return draw_all(engine, tiny.params(config), prompts, key, GROUP, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        (tiny.UNIFORM, 1.0),
        pytest.param(tiny.LOCAL_GLOBAL, 0.6, marks=pytest.mark.full),
        (tiny.HYBRID, 1.0),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((tiny.UNIFORM, 0.6), (tiny.LOCAL_GLOBAL, 1.0), (tiny.HYBRID, 0.6))
        ),
    ],
    ids=["uniform-1", "local-0.6", "states-1", "uniform-0.6", "local-1", "states-0.6"],
)
def test_logps_are_those_of_a_plain_pass_over_the_whole_sequence(config, temperature):
    rollouts = run(config=config, temperature=temperature)
    want = tiny.whole_logps(config, tiny.params(config), rollouts, temperature)
    np.testing.assert_allclose(rollouts.behavior_logp, want, atol=3e-5)
    assert float(jnp.abs(want).max()) > 0.5


@pytest.mark.full
@pytest.mark.slow
def test_greedy_takes_the_likeliest_token_and_states_its_probability_at_temperature_1():
    rollouts = run(temperature=0.0)
    want = tiny.whole_logps(tiny.UNIFORM, tiny.params(), rollouts)
    np.testing.assert_allclose(rollouts.behavior_logp, want, atol=3e-5)
    np.testing.assert_array_equal(
        rollouts.completion_tokens, rollouts.completion_tokens[:, :1].repeat(GROUP, 1)
    )


@pytest.mark.full
@pytest.mark.parametrize("slots", [0, 5])
def test_the_last_samples_of_each_group_may_take_the_likeliest_tokens(slots):
    mixed = run(temperature=0.6, greedy=1, slots=slots)
    drawn, likeliest = run(temperature=0.6, slots=slots), run(temperature=0.0, slots=slots)
    for name, tolerance in (("completion_tokens", 0), ("token_mask", 0), ("behavior_logp", 3e-5)):
        parts = np.split(np.asarray(getattr(mixed, name)), [GROUP - 1], axis=1)
        for part, unmixed in zip(parts, (drawn, likeliest), strict=True):
            want = np.asarray(getattr(unmixed, name))[:, : part.shape[1]]
            np.testing.assert_allclose(part, want, atol=tolerance)


@pytest.mark.full
def test_draws_follow_the_softmax():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=37) * 1.5, jnp.float32)
    count = 40_000
    keys = jax.random.split(jax.random.key(0), (1, count))
    many = jnp.broadcast_to(logits, (1, count, 37))
    token, logp = jax.jit(draw, static_argnums=2)(keys, many, Distribution(0.8))
    prob = np.exp(np.asarray(logits, np.float64) / 0.8)
    prob /= prob.sum()
    counts = np.bincount(np.asarray(token[0]), minlength=37)
    statistic = ((counts - count * prob) ** 2 / (count * prob)).sum()
    assert statistic < 68  # chi-square with 36 degrees of freedom: p = 0.001
    np.testing.assert_allclose(logp[0], np.log(prob)[np.asarray(token[0])], atol=1e-4)


@pytest.mark.slow
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


@pytest.mark.slow
def test_samples_differ_within_a_group_and_between_steps_and_purposes():
    tokens = np.asarray(run().completion_tokens)
    assert (tokens[:, 0] != tokens[:, 1]).any(-1).all()
    assert (tokens != np.asarray(run(prompts=tiny.prompts(step=1)).completion_tokens)).any()
    assert (tokens != np.asarray(run(purpose=1).completion_tokens)).any()
    again = run(key=jax.random.key_data(jax.random.key(4)))
    assert (tokens != np.asarray(again.completion_tokens)).any()


@pytest.mark.slow
def test_a_sample_depends_on_nothing_that_stands_beside_it():
    full_batch = run()
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
    np.testing.assert_array_equal(part.completion_tokens, full_batch.completion_tokens[order])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (tiny.UNIFORM, (3, 64)),
        pytest.param(tiny.HYBRID, (3,), marks=pytest.mark.full),
        pytest.param(tiny.UNIFORM, (1, 8), marks=pytest.mark.full),
        pytest.param(tiny.LOCAL_GLOBAL, (1, 3, 8, 64), marks=pytest.mark.full),
        pytest.param(tiny.HYBRID, (1, 8, 64), marks=pytest.mark.full),
    ],
    ids=["uniform", "states", "uniform, more", "local", "states, more"],
)
def test_the_number_of_slots_changes_no_token(config, sizes):
    prompts = tiny.prompts(9, seed=5)
    want = run(prompts=prompts, config=config)
    tokens = int(want.token_mask.sum())
    for slots in sizes:
        engine = make(6, config, slots=slots)
        rollouts = draw_all(engine, tiny.params(config), prompts, KEY, GROUP)
        np.testing.assert_array_equal(rollouts.completion_tokens, want.completion_tokens)
        np.testing.assert_array_equal(rollouts.token_mask, want.token_mask)
        np.testing.assert_array_equal(rollouts.truncated, want.truncated)
        np.testing.assert_allclose(rollouts.behavior_logp, want.behavior_logp, atol=1e-5)
        # Nothing idles but while the last samples end, each of at most STEPS tokens.
        assert tokens <= engine.slot_steps <= tokens + min(slots, 27) * STEPS
    assert np.asarray(want.truncated).any()
    assert not np.asarray(want.truncated).all()


@pytest.mark.full
@pytest.mark.slow
def test_prompts_that_wait_for_a_row_of_the_cache_are_sampled_like_others():
    prompts = tiny.prompts(12, seed=7)
    want = run(prompts=prompts)
    rollouts = run(prompts=prompts, slots=2)  # two rows of the cache for twelve prompts
    np.testing.assert_array_equal(rollouts.completion_tokens, want.completion_tokens)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [tiny.UNIFORM, pytest.param(tiny.HYBRID, marks=pytest.mark.full)],
    ids=["uniform", "states"],
)
def test_a_prompt_of_several_chunks_is_sampled_as_from_one_plain_pass(config):
    prompts = tiny.prompts(3, width=150)
    rollouts = run(prompts=prompts, config=config, slots=4)
    want = tiny.whole_logps(config, tiny.params(config), rollouts)
    np.testing.assert_allclose(rollouts.behavior_logp, want, atol=3e-5)


@pytest.mark.full
def test_samples_begin_with_the_tokens_that_are_forced():
    prompts = tiny.prompts()
    forced = np.full((4, GROUP, 3), -1, np.int32)
    forced[0, 0], forced[2, 1, :2] = [7, 8, 9], [5, tiny.END]  # a forced end token ends nothing
    plain, prefixed = run(), run(prompts=dataclasses.replace(prompts, forced_prefix=forced))
    same = np.ones((4, GROUP), bool)
    same[0, 0] = same[2, 1] = False
    np.testing.assert_array_equal(
        np.asarray(prefixed.completion_tokens)[same], np.asarray(plain.completion_tokens)[same]
    )
    for place, tokens in (((0, 0), [7, 8, 9]), ((2, 1), [5, tiny.END])):
        count = len(tokens)
        assert prefixed.completion_tokens[place][:count].tolist() == tokens
        assert not prefixed.token_mask[place][:count].any()
        assert prefixed.token_mask[place][count]
        assert not prefixed.behavior_logp[place][:count].any()
    want = tiny.whole_logps(tiny.UNIFORM, tiny.params(), prefixed)
    np.testing.assert_allclose(prefixed.behavior_logp, want, atol=3e-5)


def test_a_forced_prefix_that_leaves_nothing_to_draw_is_refused():
    forced = np.zeros((4, GROUP, STEPS), np.int32)
    with pytest.raises(InputError, match=r"expected \[4, 3, F\] with F below"):
        run(prompts=dataclasses.replace(tiny.prompts(), forced_prefix=forced))


def test_prompts_with_tokens_that_the_model_does_not_have_are_refused():
    prompts = tiny.prompts()
    tokens = np.array(prompts.prompt_tokens)
    tokens[0, -1] = tiny.VOCAB  # padding, which nothing reads
    assert run(dataclasses.replace(prompts, prompt_tokens=tokens)).token_mask.any()
    tokens[1, -1] = tiny.VOCAB
    message = r"prompt 1\[5\] = 40, expected a whole number from 0 to 39"
    with pytest.raises(InputError, match=message):
        run(dataclasses.replace(prompts, prompt_tokens=tokens))


@pytest.mark.full
@pytest.mark.slow
def test_no_sample_ends_before_its_fewest_tokens():
    prompts = tiny.prompts(24, seed=5)
    lengths = np.asarray(run(prompts=prompts).token_mask).sum(-1)
    later = run(prompts=prompts, min_completion_tokens=6)
    assert lengths.min() < 6 <= np.asarray(later.token_mask).sum(-1).min()
    ends = np.asarray(later.completion_tokens) == tiny.END
    assert ends.any()
    assert not ends[..., :6].any()


TABLE = [0.40, 0.30, 0.20, 0.06, 0.04]
CUT = {
    "temperature .7": ({"temperature": 0.7}, [0.46766, 0.31006, 0.17374, 0.03111, 0.01743]),
    "top-p .8": ({"top_p": 0.8}, [0.4444, 0.3333, 0.2222, 0, 0]),
    "top-k 2": ({"top_k": 2}, [0.5714, 0.4286, 0, 0, 0]),
    "min-p .45": ({"min_p": 0.45}, [0.4444, 0.3333, 0.2222, 0, 0]),
    "both": ({"temperature": 0.7, "top_p": 0.8}, [0.49152, 0.32588, 0.18260, 0, 0]),
    "plain": ({}, TABLE),
}


def table_model():
    """A model and parameters whose next token follows TABLE, whatever came before."""
    config = dataclasses.replace(tiny.UNIFORM, vocab_size=5, hidden_size=8, num_layers=1)
    model = decoder.build(config)
    zero = jax.tree.map(jnp.zeros_like, jax.jit(model.init)(jax.random.key(0)))
    first = jnp.zeros(8).at[0].set(1.0)
    logits = jnp.log(jnp.asarray(TABLE)) / jnp.sqrt(8.0)  # the norm makes 1 of 8 into sqrt(8)
    zero["embed"]["table"] = jnp.broadcast_to(first, (5, 8))
    zero["head"]["table"] = logits[:, None] * first
    return model, {**zero, "final_norm": {"scale": jnp.ones(8)}}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_100_000_draws_follow_the_distribution_that_their_log_probs_state(name):
    changes, expected = CUT[name]
    model, params = table_model()
    settings = SamplingSettings(100, 1.0, (), 0, 100, slots=250)._replace(**changes)
    prompts = pad_prompts([np.array([1, 2])] * 10, 2, np.arange(10), np.zeros(10), 0)
    rollouts = draw_all(make_engine(model, settings, prompts), params, prompts, KEY, 100)
    tokens = np.asarray(rollouts.completion_tokens).ravel()
    assert tokens.size == 100_000
    expected = np.asarray(expected) / np.sum(expected)
    counts = np.bincount(tokens, minlength=5)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    expected_counts = expected[possible] * tokens.size
    statistic = ((counts[possible] - expected_counts) ** 2 / expected_counts).sum()
    assert statistic < 18.5  # chi-square with at most 4 degrees of freedom: p = 0.001
    stated = np.log(expected, where=possible, out=np.zeros(5))[tokens]
    np.testing.assert_allclose(np.asarray(rollouts.behavior_logp).ravel(), stated, atol=2e-4)


def test_the_generator_that_jax_is_set_to_changes_no_draw():
    key = seed_key(7)
    words = np.asarray(_sample_keys(key, 1, 2, np.arange(3), 2))
    assert words.shape == (3, 2, 2)
    for name in ("rbg", "unsafe_rbg"):
        with jax.default_prng_impl(name):
            np.testing.assert_array_equal(seed_key(7), key)
            again = _sample_keys(key, 1, 2, np.arange(3), 2)
        np.testing.assert_array_equal(again, words)


def test_each_key_of_the_package_names_its_generator():
    calls = re.compile(r"jax\.random\.(?:key|wrap_key_data)\((?:[^()]|\([^()]*\))*\)")
    all_calls = [
        call.group()
        for file in Path(jaxgrpo.__file__).parent.rglob("*.py")
        for call in calls.finditer(file.read_text("utf-8"))
    ]
    assert len(all_calls) > 10
    assert [call for call in all_calls if "impl=" not in call] == []


@pytest.mark.full
def test_one_row_drawn_twice_gets_different_samples():
    prompts = tiny.prompts(2)
    same = jax.tree.map(np.copy, prompts)
    same.prompt_tokens[1], same.prompt_mask[1] = same.prompt_tokens[0], same.prompt_mask[0]
    tokens = np.asarray(run(prompts=same).completion_tokens)
    assert (tokens[0] != tokens[1]).any()


@pytest.mark.full
@pytest.mark.parametrize("segment", [1, 5, 64])
def test_the_length_of_a_segment_changes_nothing(segment):
    np.testing.assert_array_equal(
        run(segment_tokens=segment).completion_tokens, run().completion_tokens
    )


def test_padding_of_prompts_changes_nothing():
    prompts = tiny.prompts()
    noisy = np.where(prompts.prompt_mask, prompts.prompt_tokens, 7).astype(np.int32)
    rollouts = run(prompts=Prompts(**{**vars(prompts), "prompt_tokens": noisy}))
    np.testing.assert_array_equal(rollouts.completion_tokens, run().completion_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axis", [*(pytest.param(axis, marks=pytest.mark.full) for axis in ("data", "fsdp")), "tensor"]
)
def test_four_devices_sample_what_one_samples(axis):
    single = run(temperature=1.0)
    sizes = {"data": 1, axis: 4} if axis != "tensor" else {"data": 2, "tensor": 2}
    mesh = sharding.make_mesh(**sizes)
    model = decoder.build(tiny.UNIFORM, constrain=sharding.constrain(mesh))
    layout = sharding.param_shardings(mesh, model.axes, model.shapes, sharding.SAMPLING)
    params = jax.device_put(tiny.params(), layout)
    prompts = tiny.prompts()
    engine = make_engine(model, make(6).settings, prompts, mesh)
    four = draw_all(engine, params, prompts, KEY, GROUP)
    np.testing.assert_array_equal(four.completion_tokens, single.completion_tokens)
    np.testing.assert_allclose(four.behavior_logp, single.behavior_logp, atol=3e-5)
