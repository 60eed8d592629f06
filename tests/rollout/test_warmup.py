"""The threshold of confidence that the first samples of each prompt set for the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import draw_all

from benchmarks.programs import compilations
from jaxgrpo.evaluation.voting import trace_confidence
from jaxgrpo.models import decoder, sharding
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.stopping import ROUNDING, EarlyStop, Interruption

KEY = jax.random.key_data(jax.random.key(3))
PROMPTS, GROUP, STEPS, WIDTH, TEMPERATURE = 9, 8, 12, 6, 0.8
PERCENTILE = 60.0
STOP = EarlyStop(window=4, tokens=5, percentile=PERCENTILE, warmup=3)


@functools.cache
def engine(mesh=None, **changes):
    settings = SamplingSettings(STEPS, TEMPERATURE, (tiny.END,), tiny.PAD, 4)
    model = tiny.model()
    if mesh is not None:
        model = decoder.build(tiny.UNIFORM, constrain=sharding.constrain(mesh))
    return SlotEngine(model, settings._replace(**changes), mesh, width=WIDTH)


def run(prompts=None, params=None, mesh=None, greedy=1, **changes):
    prompts = tiny.prompts(PROMPTS, WIDTH, seed=5) if prompts is None else prompts
    params = tiny.params() if params is None else params
    return draw_all(engine(mesh, **changes), params, prompts, KEY, GROUP, greedy=greedy)


def confidences(rollouts):
    """Minus the mean log-prob of the 5 likeliest tokens, [P, G, T], by a pass of its own."""
    tables = tiny.whole_tables(tiny.UNIFORM, tiny.params(), rollouts, TEMPERATURE)
    return -np.sort(np.asarray(tables, np.float64))[..., -STOP.tokens :].mean(-1)


def windows(confidence):
    number = len(confidence) - STOP.window + 1
    return np.array([confidence[n : n + STOP.window].mean() for n in range(number)])


def expected_lengths(plain, turns=((0, STEPS),)):
    """The drawn tokens [P, G] of samples, as the paper says, from those that nothing ended.

    Args:
      turns: places of tokens that were drawn in one go.
    """
    confidence, mask = confidences(plain), plain.token_mask
    lengths = mask.sum(-1)
    for prompt in range(PROMPTS):
        first = [confidence[prompt, g][mask[prompt, g]] for g in range(STOP.warmup)]
        least = [windows(c).min() if len(c) >= STOP.window else c.mean() for c in first]
        threshold = np.percentile(least, PERCENTILE) * (1 - ROUNDING)
        for sample in range(STOP.warmup, GROUP - 1):  # the last one is greedy
            before = 0
            for begin, end in turns:
                drawn = confidence[prompt, sample, begin:end][mask[prompt, sample, begin:end]]
                means = windows(drawn)
                assert (np.abs(means - threshold) > 1e-5).all()
                if (means < threshold).any():
                    lengths[prompt, sample] = before + (means < threshold).argmax() + STOP.window
                    break
                before += len(drawn)
    return lengths


def assert_stopped(stopped, plain, lengths):
    ended = lengths < plain.token_mask.sum(-1)
    assert 5 < ended.sum() < ended.size - PROMPTS * (STOP.warmup + 1)
    mask = plain.token_mask & (plain.token_mask.cumsum(-1) <= lengths[..., None])
    np.testing.assert_array_equal(stopped.token_mask, mask)
    np.testing.assert_array_equal(stopped.completion_tokens[mask], plain.completion_tokens[mask])
    np.testing.assert_allclose(stopped.behavior_logp[mask], plain.behavior_logp[mask], atol=1e-5)
    np.testing.assert_array_equal(stopped.truncated[ended], True)
    np.testing.assert_array_equal(stopped.truncated[~ended], plain.truncated[~ended])


@functools.cache
def plain_run():
    return run()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("slots", [4, pytest.param(64, marks=pytest.mark.full)])
def test_samples_end_below_the_percentile_of_the_first_ones_of_their_prompt(slots):
    plain = plain_run()
    lengths = expected_lengths(plain)
    warmup = plain.token_mask.sum(-1)[:, : STOP.warmup]
    assert (warmup < STOP.window).any()
    assert (warmup > STOP.window).any()
    assert_stopped(run(early_stop=STOP, slots=slots), plain, lengths)


@pytest.mark.full
@pytest.mark.slow
def test_four_devices_end_the_samples_of_one():
    mesh = sharding.make_mesh(data=4)
    model = decoder.build(tiny.UNIFORM, constrain=sharding.constrain(mesh))
    layout = sharding.param_shardings(mesh, model.axes, model.shapes, sharding.SAMPLING)
    params = jax.device_put(tiny.params(), layout)
    stopped = run(params=params, mesh=mesh, early_stop=STOP, slots=8)
    assert_stopped(stopped, plain_run(), expected_lengths(plain_run()))


@pytest.mark.full
@pytest.mark.parametrize("after", [7, STOP.window])
def test_a_text_that_interrupts_samples_is_in_no_window(after):
    text = Interruption(after, (5, 6))
    plain = run(interruption=text)
    lengths = expected_lengths(plain, turns=((0, after), (text.end, STEPS)))
    assert (lengths[plain.token_mask[..., -1]] == after).any()  # by the last window before the text
    stopped = run(interruption=text, early_stop=STOP)
    assert_stopped(stopped, plain, lengths)


@pytest.mark.full
@pytest.mark.slow
def test_samples_that_equal_the_first_ones_do_not_end_by_rounding():
    stop = STOP._replace(percentile=99)
    likeliest = {"temperature": 0.0, "greedy": 0}
    stopped, plain = run(early_stop=stop, slots=8, **likeliest), run(**likeliest)
    assert (plain.completion_tokens == plain.completion_tokens[:, :1]).all()
    np.testing.assert_array_equal(stopped.token_mask, plain.token_mask)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("group", [2, pytest.param(3, marks=pytest.mark.full)])
def test_groups_that_are_no_larger_than_the_warmup_are_drawn_as_without_it(group):
    prompts = tiny.prompts(PROMPTS, WIDTH, seed=5)
    stopped = draw_all(engine(early_stop=STOP), tiny.params(), prompts, KEY, group)
    np.testing.assert_array_equal(stopped.token_mask, plain_run().token_mask[:, :group])


@pytest.mark.full
def test_no_later_batch_compiles_whatever_waits():
    changes = {"early_stop": STOP, "slots": 20, "segment_tokens": 2}
    first, *later = (tiny.prompts(PROMPTS, WIDTH, seed=seed) for seed in range(5, 8))
    run(first, **changes)
    with compilations() as seconds:
        for prompts in later:
            run(prompts, **changes)
    assert not seconds


@pytest.mark.full
@pytest.mark.parametrize("window", [1, 3, 40])
def test_a_threshold_is_of_the_least_windows_that_votes_weigh_by(window):
    random = np.random.default_rng(0)
    lengths = random.integers(1, 30, 16)
    confidence = random.gamma(8, 1.0, (16, 30)).astype(np.float32)
    mask = np.arange(30) < lengths[:, None]
    least = trace_confidence(jnp.asarray(confidence), jnp.asarray(mask), window).least
    stop = EarlyStop(window=window, percentile=25, warmup=16)
    threshold = stop.threshold([row[:n] for row, n in zip(confidence, lengths, strict=True)])
    assert threshold == pytest.approx(np.percentile(least, 25) * (1 - ROUNDING), rel=1e-5)
