"""Parts of losses one by one: sums over segments, reductions, mixtures, what is refused."""

from __future__ import annotations

import dataclasses
import doctest
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_pairs import SURROGATES

from jaxgrpo.config import own_code
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Mean
from jaxgrpo.losses import (
    BatchField,
    Objective,
    Penalty,
    Reduction,
    Surrogate,
    Tokens,
    build_penalty,
    build_reduction,
    build_surrogate,
    by_sample,
    cispo,
    clip,
    constant,
    dppo_tv,
    dual_clip,
    gmpo,
    gspo,
    policy_loss,
    prompt_mean,
    registry,
    sapo,
    segment_mean,
    segment_sum,
    sequence_mean,
    sequence_sum,
    shaped_ratio,
    token_loss,
    vespo,
)

ONES = jnp.ones((2, 3))
MASK = jnp.ones((2, 3), bool)


def refuses(message: str):
    return pytest.raises(InputError, match=re.escape(message))


def test_sums_over_segments_read_their_own_tokens_alone():
    value = jnp.array([[1.0, 2.0, np.nan, 4.0, 8.0, 16.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    segment = jnp.array([[2, 2, 2, 1, 0, 1], [6, 6, 6, 6, 6, 6]])
    mask = jnp.array([[True, True, False, True, False, True], [True] * 5 + [False]])
    total = [[3.0, 3.0, 3.0, 20.0, 0.0, 20.0], [5.0] * 6]
    np.testing.assert_array_equal(segment_sum(value, mask, segment), total)
    mean = [[1.5, 1.5, 1.5, 10.0, 0.0, 10.0], [1.0] * 6]
    np.testing.assert_array_equal(segment_mean(value, mask, segment), mean)
    slope = jax.grad(lambda value: segment_mean(value, mask, segment)[0, 3])(value)
    np.testing.assert_array_equal(slope, [[0, 0, 0, 0.5, 0, 0.5], [0] * 6])


def test_a_long_row_takes_no_square_of_its_length():
    length = 2**17
    row = jax.ShapeDtypeStruct((1, length), jnp.float32)
    mask, segment = (jax.ShapeDtypeStruct((1, length), kind) for kind in (bool, jnp.int32))
    compiled = jax.jit(segment_mean).lower(row, mask, segment).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 40 * length


def test_new_reductions_are_their_denominators():
    mask = np.zeros((3, 2, 4), bool)
    mask[0, 0, :4] = mask[0, 1, :1] = mask[1, 1, 1:3] = True  # three sequences of six, two prompts
    token_mask = jnp.asarray(mask)
    np.testing.assert_allclose(sequence_sum().weights(token_mask), mask / 3, rtol=1e-6)
    np.testing.assert_allclose(sequence_sum(True).weights(token_mask), mask / 6, rtol=1e-6)
    np.testing.assert_allclose(constant(5, True).weights(token_mask), mask / 30, rtol=1e-6)
    length = np.maximum(mask.sum(-1, keepdims=True), 1)
    expected = mask / length / 6
    np.testing.assert_allclose(sequence_mean(True).weights(token_mask), expected, rtol=1e-6)
    of_prompt = np.array([5, 2, 1])[:, None, None]
    np.testing.assert_allclose(prompt_mean().weights(token_mask), mask / of_prompt / 2, rtol=1e-6)
    for reduction in (sequence_sum(), prompt_mean(), sequence_mean(True)):
        assert (np.asarray(reduction.weights(token_mask & False)) == 0).all()


def test_plain_numbers_of_both_parts_count_by_the_tokens_of_each():
    def reporting(number):
        return lambda tokens: (0 * tokens.logp, {"rate": number})

    replayed = jnp.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])

    def rate(then, otherwise, field):
        mixed = by_sample("replayed", reporting(then), reporting(otherwise))
        tokens = Tokens.from_ratios(ONES, replayed=field)
        tokens = dataclasses.replace(tokens, mask=MASK.at[0, 2].set(False))
        return token_loss(mixed, [], tokens)[1]["rate"].result()

    assert rate(1.0, 2.0, replayed) == pytest.approx((2 * 1.0 + 3 * 2.0) / 5)
    # A part without a token may report the largest of nothing.
    assert rate(-jnp.inf, 2.0, jnp.zeros_like(replayed)) == 2.0


def test_a_field_that_is_nan_is_not_true():
    mixed = by_sample("reward", {"use": "shaped_ratio", "offset": 0.5}, "clip")
    tokens = Tokens.from_ratios([1.5, 1.5], reward=jnp.array([1.0, jnp.nan]))
    np.testing.assert_allclose(mixed.compute(tokens)[0], [-0.75, -1.2], rtol=1e-6)


@pytest.mark.slow
def test_by_sample_gives_each_token_its_own_surrogate():
    random = np.random.default_rng(0)
    logp, proximal, advantage = (jnp.asarray(random.normal(size=(2, 3))) for _ in range(3))
    field = jnp.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    mask = MASK.at[0, 2].set(False)
    mixed = by_sample("replayed", {"use": "shaped_ratio", "offset": 0.5}, "clip")
    assert mixed.needs == {"replayed"}
    tokens = Tokens(
        logp=logp,
        proximal_logp=proximal,
        advantage=advantage,
        mask=mask,
        segment=jnp.ones((2, 3), jnp.int32),
        fields={"replayed": field},
    )
    loss, metrics = mixed.compute(tokens)
    apart = [surrogate.compute(tokens)[0] for surrogate in (shaped_ratio(0.5), clip())]
    np.testing.assert_array_equal(loss, jnp.where(field == 1, *apart))
    assert metrics["ratio_max"].result() == pytest.approx(
        float(jnp.exp(jnp.where(mask, logp - proximal, -9)).max()), rel=1e-6
    )
    every, clipped = metrics["policy_kl"], metrics["clip_ratio/region_mean"]
    assert isinstance(every, Mean)
    assert isinstance(clipped, Mean)
    assert (float(every.weight), float(clipped.weight)) == (5, 3)
    with refuses("by_sample reads fields['replayed'], one number per token; given: no fields"):
        mixed.compute(dataclasses.replace(tokens, fields={}))


@pytest.mark.full
@pytest.mark.parametrize("part", ["rewards_as_labels", "kl_cov", "gvpo"])
def test_what_by_sample_reads_of_the_batch_is_of_its_samples_alone(part):
    random = np.random.default_rng(1)
    logp, old = (jnp.asarray(random.normal(size=(6, 4)), jnp.float32) for _ in range(2))
    advantage, group = jnp.array([1.0, 1.0, -1.0, 2.0, -1.0, 1.0]), jnp.array([0, 0, 0, 1, 1, 1])
    replayed = jnp.array([0, 1, 0, 0, 0, 1])
    fresh = np.flatnonzero(replayed == 0)
    mixed = {"use": "by_sample", "field": "replayed", "then": "on_policy", "otherwise": part}

    def slope(spec, rows, **fields):
        mask = jnp.ones((len(rows), 4), bool)

        @jax.grad
        def gradient(logp):
            return policy_loss(
                spec,
                "sequence_sum",
                logp,
                old[rows],
                advantage[rows],
                mask,
                group=group[rows],
                **fields,
            )[0]

        return gradient(logp[rows])

    field = jnp.broadcast_to(replayed[:, None], (6, 4))
    together, apart = 6 * slope(mixed, np.arange(6), replayed=field)[fresh], 4 * slope(part, fresh)
    np.testing.assert_allclose(together, apart, rtol=1e-5)


@pytest.mark.full
def test_dual_clip_bounds_the_loss_of_negative_advantages():
    log_ratio = jnp.log(jnp.array([[2.0, 4.0, 4.0]]))
    tokens = Tokens.from_ratios(jnp.ones((1, 3)), jnp.array([[-1.0, -1.0, 1.0]]))

    def loss(logp, surrogate):
        return surrogate.compute(dataclasses.replace(tokens, logp=logp))

    value, metrics = loss(log_ratio, dual_clip())
    np.testing.assert_allclose(value, [[2.0, 3.0, -1.2]], rtol=1e-6)
    slope = jax.grad(lambda logp: loss(logp, dual_clip())[0].sum())(log_ratio)
    np.testing.assert_allclose(slope, [[2.0, 0.0, 0.0]], rtol=1e-6)
    assert metrics["clip_ratio/delta_mean"].result() == pytest.approx(1 / 3)
    np.testing.assert_array_equal(value, loss(log_ratio, clip(delta=3.0))[0])


@pytest.mark.slow
@pytest.mark.parametrize("distance", [-3.0, 40.0])
def test_a_price_of_the_log_ratio_pulls_from_any_distance(distance):
    """Also beyond the 20 nats at which ratios are clamped. A is 0: only the price has a slope."""
    tokens = Tokens.from_ratios(jnp.ones((1, 4)), 0.0, kl_cov_tokens=1.0)

    def total(logp, part):
        return build_surrogate(part).compute(dataclasses.replace(tokens, logp=logp))[0].sum()

    prices = {"use": "mirror_descent", "tau": 0.5}
    for part, slope in (
        (prices, 0.5 * 4 * distance),  # of the sequence's four tokens
        ({**prices, "level": "token"}, 0.5 * distance),
        ({"use": "kl_cov", "coefficient": 0.7}, 0.7 * np.sign(distance)),
    ):
        gradient = jax.grad(total)(jnp.full((1, 4), distance), part)
        np.testing.assert_allclose(gradient, np.full((1, 4), slope), rtol=1e-5)


def test_exgrpos_function_of_the_ratio():
    """f(1) = 1 / 1.1; it rises and never reaches 1."""
    ratio = jnp.array([[1e-8, 0.1, 1.0, 1e8]])
    loss, _ = shaped_ratio().compute(Tokens.from_ratios(ratio))
    np.testing.assert_allclose(loss, [[-1e-7, -0.5, -1 / 1.1, -1.0]], rtol=1e-5)


def test_numbers_that_make_no_sense_are_refused():
    for make, options, message in [
        (clip, {"delta": 1.2}, "clip: delta = 1.2, expected a ratio above 1 + high = 1.2"),
        (dual_clip, {"floor": 1.0}, "dual_clip: floor = 1.0, expected a ratio above 1 + high"),
        (dual_clip, {"low": 2.0}, "dual_clip: low = 2.0, high = 0.2; expected 0 <= low <= 1"),
        (cispo, {"low": 0.3, "high": 0.2}, "cispo: low = 0.3, high = 0.2; expected 0 <= low < hi"),
        (cispo, {"high": np.nan}, "cispo: low = None, high = nan"),
        (sapo, {"tau_negative": 0.0}, "sapo: tau_negative = 0.0, expected a positive number"),
        (gspo, {"low": -1.0}, "gspo: low = -1.0, high = 0.0004; expected 0 <= low <= 1"),
        (gmpo, {"high": np.inf}, "gmpo: low = 0.4, high = inf; expected finite numbers >= 0"),
        (dppo_tv, {"cap": 0.0}, "dppo_tv: cap = 0.0, expected a positive ratio"),
        (vespo, {"k_positive": 0.0}, "vespo: k and lambda = (0.0, 3.0, 3.0, 2.0), expected posit"),
        (shaped_ratio, {"offset": 0.0}, "shaped_ratio: offset = 0.0, expected a positive number"),
    ]:
        with refuses(message):
            make(**options)
    with refuses("surrogate by_sample: missing a required argument: 'field'"):
        build_surrogate("by_sample")


@pytest.mark.slow
def test_layouts_that_do_not_fit_are_refused():
    arrays = (ONES, ONES, ONES, MASK)
    with refuses("prompt_mean needs to know which rows answer the same prompt: give `group`"):
        policy_loss("clip", "prompt_mean", *arrays)
    with refuses("advantage [B] is one number per row: with segment give it as [B, T]"):
        policy_loss("clip", "token_mean", ONES, ONES, ONES[:, 0], MASK, jnp.ones((2, 3), int))
    with refuses("segment has shape (2,)"):
        policy_loss("clip", "token_mean", *arrays, jnp.ones(2, int))
    halved = Reduction("own", lambda mask: mask.astype(jnp.float32) * 0.5)
    loss, _ = policy_loss("clip", halved, *arrays)
    assert float(loss) == -3  # six tokens of -1, halved
    with refuses("reduction own is defined on masks [P, G, T] alone: leave out segment and group"):
        policy_loss("clip", halved, *arrays, jnp.ones((2, 3), int))


def test_the_surrogate_of_the_examples_is_importance_sampling_at_power_1(repository):
    make = own_code.load(f"{repository}/examples/own_surrogate.py:power_of_ratio")
    tokens = Tokens.from_ratios([4.0, 0.25], [1.0, -1.0])
    np.testing.assert_allclose(build_surrogate({"use": make}).compute(tokens)[0], [-4.0, 1.0])
    np.testing.assert_allclose(make(power=1.0).compute(tokens)[0], [-4.0, 0.25])
    slope = jax.grad(
        lambda x: make(power=0.5).compute(dataclasses.replace(tokens, logp=x))[0].sum()
    )
    np.testing.assert_allclose(slope(tokens.logp), [-2.0, 0.5], rtol=1e-6)  # -A rho^power


@pytest.mark.full
def test_the_penalty_of_the_examples_pulls_no_harder_beyond_its_limit(repository):
    make = own_code.load(f"{repository}/examples/own_penalty.py:huber_kl")
    penalty = build_penalty({"use": make, "beta": 0.5, "limit": 2.0})
    tokens = Tokens.from_ratios(np.exp([1.0, -3.0]).astype(np.float32), reference_logp=0.0)
    value, metrics = penalty.compute(tokens)
    np.testing.assert_allclose(value, [0.5 * 0.5, 0.5 * 2 * (3 - 1)], rtol=1e-6)
    _, metrics = token_loss(clip(), [penalty], tokens)
    assert metrics["huber_kl/beyond"].result() == 0.5
    slope = jax.grad(lambda x: penalty.compute(dataclasses.replace(tokens, logp=x))[0].sum())
    np.testing.assert_allclose(slope(tokens.logp), [0.5, -1.0], rtol=1e-6)


def test_a_function_of_tokens_is_a_surrogate_and_its_plain_numbers_are_means_over_tokens():
    def mine(tokens):
        return -tokens.logp, {"mine/size": 3, "mine/sum": tokens.mask.sum()}

    loss, metrics = policy_loss(mine, "token_mean", ONES, ONES, ONES, MASK.at[0, 0].set(False))
    assert float(loss) == -1
    assert build_surrogate({"use": mine}).name == "mine"
    assert metrics["mine/size"].result() == 3
    size = metrics["mine/size"]
    assert isinstance(size, Mean)
    assert (float(size.total), float(size.weight)) == (15, 5)  # adds up over micro-batches
    assert metrics["mine/sum"].result() == 5


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda tokens: tokens.logp, "surrogate <lambda> returned ArrayImpl, expected (loss per"),
        (lambda tokens: (tokens.logp.sum(), {}), "a loss of shape (), expected one number per tok"),
        (lambda tokens: (tokens.mask, {}), "returned a loss of dtype bool, expected floats"),
        (lambda tokens: (tokens.logp, 3), "surrogate <lambda> reported int, expected its metrics"),
        (
            lambda tokens: (tokens.logp, {"a": tokens.logp}),
            "metric a has shape (2, 3): expected a n",
        ),
        (
            lambda tokens: (tokens.logp, {"a": "x"}),
            "metric a is a str: expected a number, or a Mean",
        ),
        (lambda: 3, "surrogate <lambda> gave int, expected a Surrogate or a function that returns"),
    ],
)
def test_what_an_own_surrogate_returns_is_named_if_it_is_no_loss(returned, message):
    with refuses(message):
        policy_loss({"use": returned}, "token_mean", ONES, ONES, ONES, MASK)


def remembering(**changes):
    """A penalty with a memory."""
    functions = {
        "init": lambda: jnp.float32(0),
        "observe": lambda state, metrics: state + 1,
        "compute": lambda tokens, state: (state * tokens.logp, {}),
    }
    return Penalty("mine", **{**functions, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observe": lambda state, metrics: state[1]}, "penalty mine ("),
        ({"observe": lambda state, metrics: metrics["kl"]}, "raised KeyError: 'kl'"),
        (
            {"observe": lambda state, metrics: (state, state)},
            "penalty mine: its state is float32[] at first and (float32[], float32[]) after an",
        ),
        ({"init": lambda: 1 / 0}, "raised ZeroDivisionError"),
    ],
)
def test_a_memory_that_does_not_fit_is_refused_on_shapes(changes, message):
    parts = build_surrogate("clip"), build_reduction("token_mean")
    Objective(*parts, (build_penalty(remembering()),)).trace()
    with refuses(message):
        Objective(*parts, (build_penalty(remembering(**changes)),)).trace()


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (
            lambda tokens, group, count: tokens.logp.mean(),
            "mine: m has shape (), expected a number",
        ),
        (lambda tokens, group: tokens.logp, "write m(tokens, group, count), and read tokens.logp"),
        (lambda tokens, group, count: tokens.fields["none"], "raised KeyError: 'none'"),
    ],
)
def test_what_an_own_surrogate_makes_of_the_update_is_tried_on_shapes(compute, message):
    def loss(tokens):
        return tokens.logp * tokens.fields["m"], {}

    part = Surrogate("mine", loss, needs=frozenset({"m"}), batch_fields=(BatchField("m", compute),))
    with refuses(message):
        Objective(build_surrogate(part), build_reduction("token_mean")).trace()


def test_a_memory_is_read_and_moved_and_needs_are_names():
    with refuses("penalty mine: init and observe go together: give both, or neither"):
        build_penalty(remembering(observe=None))
    text, names = cast(Any, "row"), cast(Any, ["row"])
    with refuses("surrogate mine: needs = 'row', expected names of fields"):
        build_surrogate(Surrogate("mine", lambda tokens: (tokens.logp, {}), needs=text))
    part = build_surrogate(Surrogate("mine", lambda tokens: (tokens.logp, {}), needs=names))
    assert part.needs == {"row"}


def test_a_part_reads_the_proximal_policy_if_its_loss_does_and_not_its_metrics_alone():
    def readers(surrogate, *penalties):
        built = build_surrogate(surrogate), build_reduction("token_mean")
        return Objective(*built, tuple(map(build_penalty, penalties))).proximal_readers()

    assert readers("reinforce", {"use": "k2", "beta": 0.1}, {"use": "full_kl", "beta": 0.1}) == []
    mask = {"use": "off_policy_mask", "threshold": 0.1, "then": "reinforce"}
    assert readers(mask) == []  # of the sampler's log-probs
    mask |= {"sampler": "proximal"}
    assert readers(mask) == ["surrogate off_policy_mask"]
    sides = {"use": "by_sample", "field": "new", "then": "on_policy"}
    assert readers({**sides, "otherwise": "reinforce"}) == []
    assert readers({**sides, "otherwise": mask}) == ["surrogate by_sample"]
    plain = Surrogate("plain", lambda tokens: (tokens.logp, {}), frozenset({"group_log_ratio"}))
    assert readers(plain) == []
    reads_group = lambda tokens: (tokens.logp * tokens.fields["group_log_ratio"], {})  # noqa: E731
    assert readers(plain._replace(compute=reads_group)) == ["surrogate plain"]
    penalty = {"use": "reverse_kl_off_policy", "beta": 0.1}
    mine = Penalty("mine", lambda tokens: (jnp.exp(tokens.logp - tokens.proximal_logp), {}))
    names = ["penalty reverse_kl_off_policy", "penalty mine"]
    assert readers("reinforce", penalty, mine) == names
    for surrogate in SURROGATES.values():
        assert readers(surrogate) == [f"surrogate {surrogate.name}"] * surrogate.weighs


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (lambda mask: mask.mean(-1), "gave weights of shape (2, 3) and dtype float32 for a mask"),
        (lambda mask: mask, "reduction mine gave weights of shape (2, 3, 4) and dtype bool"),
        (lambda mask: 1.0, "gave weights of shape () and dtype float32 for a mask (2, 3, 4)"),
        (lambda mask: mask / len(mask[0, 0, 0]), "reduction mine ("),
    ],
)
def test_a_reduction_gives_a_float_for_each_token(weights, message):
    with refuses(message):
        Objective(build_surrogate("clip"), Reduction("mine", weights)).trace()


@pytest.mark.full
def test_examples_in_docstrings_hold():
    results = doctest.testmod(registry)
    assert results.attempted
    assert results.failed == 0
