"""Surrogates, reductions and penalties: formulas, the peers' numbers, and what they withstand."""

from __future__ import annotations

import doctest
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.losses import (
    Penalty,
    Surrogate,
    Tokens,
    build_penalty,
    build_reduction,
    build_surrogate,
    clip,
    constant,
    forward_kl_k3,
    k2,
    objective,
    policy_loss,
    sequence_mean,
    token_mean,
)

NAN = np.nan
OLD = [[-1.0, -0.5, -2.0, -0.2], [-0.7, -1.5, NAN, NAN]]
NEW = [[-0.8, -0.9, -1.0, -0.21], [-0.2, -2.5, NAN, NAN]]
MASK = [[True] * 4, [True, True, False, False]]


def refuses(message: str):
    return pytest.raises(InputError, match=re.escape(message))


def make_tokens(logp, proximal_logp, advantage, mask, fields=None):
    """Each row one sequence."""
    return Tokens(
        logp=logp,
        proximal_logp=proximal_logp,
        advantage=advantage,
        mask=mask,
        segment=mask.astype(jnp.int32),
        fields=fields or {},
    )


def clip_loss(logp, proximal, advantage, mask, **more):
    """The clip surrogate of lists, jitted: (loss, metrics)."""
    arrays = [jnp.asarray(value, jnp.float32) for value in (logp, proximal, advantage)]
    run = jax.jit(lambda *args: policy_loss("clip", "token_mean", *args, **more))
    return run(*arrays, jnp.asarray(mask))


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", -0.472668),
        ("sequence_mean", -0.201456),
        ({"use": "constant", "length": 8}, -0.177251),
    ],
)
def test_the_peers_golden_losses_are_met(reduction, expected):
    arrays = [jnp.array(NEW), jnp.array(OLD), jnp.array([1.0, -0.5]), jnp.array(MASK)]
    loss, _ = jax.jit(lambda *args: policy_loss("clip", reduction, *args))(*arrays)
    assert float(loss) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_the_clip_surrogate_is_the_smaller_of_two_products():
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        new, old, advantage = (jnp.asarray(random.normal(size=(5, 7))) for _ in range(3))
        mask = jnp.ones((5, 7), bool)
        loss, metrics = clip(0.1, 0.3).compute(make_tokens(new, old, advantage, mask))
    ratio = np.exp(np.asarray(new - old))
    weight = np.asarray(advantage)
    expected = -np.minimum(ratio * weight, np.clip(ratio, 0.9, 1.3) * weight)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    low, high = (ratio < 0.9) & (weight < 0), (ratio > 1.3) & (weight > 0)
    assert low.any()
    assert high.any()
    result = {name: metric.result() for name, metric in metrics.items()}
    np.testing.assert_allclose(result["clip_ratio/low_mean"], low.mean())
    np.testing.assert_allclose(result["clip_ratio/high_mean"], high.mean())
    np.testing.assert_allclose(result["clip_ratio/region_mean"], (low | high).mean())
    np.testing.assert_allclose(result["ratio_max"], ratio.max())
    np.testing.assert_allclose(result["policy_kl"], (ratio - 1 - np.log(ratio)).mean())
    assert result["clip_ratio/log_ratio_clamped"] == 0


@pytest.mark.slow
def test_clipped_tokens_get_no_gradient_and_the_others_the_whole():
    log_ratio = jnp.log(jnp.array([[0.5, 1.5, 0.5, 1.5, 1.0]]))
    advantage = jnp.array([[1.0, 1.0, -2.0, -2.0, 3.0]])
    mask = jnp.ones((1, 5), bool)

    def total(logp):
        return clip().compute(make_tokens(logp, jnp.zeros_like(logp), advantage, mask))[0].sum()

    # ratio 1.5 with A > 0 and ratio 0.5 with A < 0 have gone where they wanted to.
    np.testing.assert_allclose(jax.grad(total)(log_ratio), [[-0.5, 0, 0, 3.0, -3.0]], rtol=1e-6)


def test_reductions_are_denominators_and_empty_rows_are_no_sequences():
    mask = np.zeros((2, 3, 4), bool)
    mask[0, 0, :4] = mask[0, 1, :1] = mask[1, 2, 1:3] = True  # three sequences of six rows
    token_mask = jnp.asarray(mask)
    np.testing.assert_allclose(token_mean().weights(token_mask), mask / 7, rtol=1e-6)
    np.testing.assert_allclose(constant(10).weights(token_mask), mask / 30, rtol=1e-6)
    length = np.maximum(mask.sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(sequence_mean().weights(token_mask), mask / length / 3, rtol=1e-6)
    for reduction in (token_mean(), sequence_mean(), constant(10)):
        assert (np.asarray(reduction.weights(jnp.zeros((2, 3, 4), bool))) == 0).all()
        assert reduction.weights(token_mask).dtype == jnp.float32


def test_a_token_count_beyond_float32_is_exact():
    wide = jax.eval_shape(token_mean().weights, jax.ShapeDtypeStruct((1, 1, 1), bool))
    assert wide.dtype == jnp.float32
    many = jnp.ones((1, 2**9, 2**15 + 1), bool)  # 2**24 + 2**9 tokens
    total = jax.jit(lambda mask: token_mean().weights(mask)[0, 0, 0])(many)
    assert float(total) == np.float32(1) / np.float32(2**24 + 2**9)


@pytest.mark.slow
def test_penalties_are_their_formulas_and_report_k3_without_beta():
    logp, reference = jnp.array([[-1.0, -2.0, NAN]]), jnp.array([[-1.5, -0.5, NAN]])
    mask = jnp.array([[True, True, False]])
    fields = {"reference_logp": reference}
    ratio = np.array([0.5, -1.5])
    value = np.exp(-ratio) - 1 + ratio
    for penalty, expected, slope in [
        (k2(0.1), 0.1 * ratio**2 / 2, 0.1 * ratio),
        (forward_kl_k3(0.1), 0.1 * value, 0.1 * (1 - np.exp(-ratio))),
    ]:
        run = lambda logp: penalty.compute(make_tokens(logp, logp, logp, mask, fields))  # noqa: B023, E731
        per_token, metrics = run(logp)
        np.testing.assert_allclose(per_token, [[*expected, 0]], rtol=1e-6)
        gradient = jax.grad(lambda logp: run(logp)[0].sum())(logp)  # noqa: B023
        np.testing.assert_allclose(gradient, [[*slope, 0]], rtol=1e-6)
        assert metrics["kl"].result() == pytest.approx(value.mean())
        assert metrics["kl_clamped"].result() == 0
        assert penalty.needs == {"reference_logp"}


@pytest.mark.slow
def test_expected_penalty_gradients_are_those_of_the_kl_they_are_named_for():
    """One state, all tokens enumerated: k2 is reverse KL, k3 is forward KL."""
    with jax.enable_x64(True):
        random = np.random.default_rng(3)
        logits, anchor = (jnp.asarray(random.normal(size=6)) for _ in range(2))
        log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(anchor)
        p, mask = jnp.exp(log_p), jnp.ones(6, bool)
        reverse = jax.grad(lambda x: _kl(jax.nn.log_softmax(x), log_q))(logits)
        forward = jax.grad(lambda x: _kl(log_q, jax.nn.log_softmax(x)))(logits)
        for penalty, expected in [(k2(1.0), reverse), (forward_kl_k3(1.0), forward)]:

            def loss(logits):
                logp = jax.nn.log_softmax(logits)
                fields = {"reference_logp": log_q}
                value, _ = penalty.compute(make_tokens(logp, logp, logp, mask, fields))  # noqa: B023
                return (p * value).sum()  # p held: tokens were sampled, the loss is differentiated

            np.testing.assert_allclose(jax.grad(loss)(logits), expected, atol=1e-12)


def _kl(log_p, log_q):
    return (jnp.exp(log_p) * (log_p - log_q)).sum()


def test_extreme_log_ratios_are_clamped_and_counted():
    logp, proximal = [[100.0, -100.0, 0.0, NAN]], [[0.0, 0.0, 0.0, NAN]]
    mask = [[True, True, True, False]]
    for advantage in (1.0, -1.0):
        loss, metrics = clip_loss(logp, proximal, [advantage], mask)
        assert np.isfinite(loss)
        assert metrics["clip_ratio/log_ratio_clamped"].result() == pytest.approx(2 / 3)
        assert metrics["ratio_max"].result() == pytest.approx(np.exp(20), rel=1e-5)
    for penalty in (k2(1.0), forward_kl_k3(1.0)):
        field = {"reference_logp": jnp.asarray(proximal)}
        logps, live = jnp.asarray(logp), jnp.asarray(mask)
        value, metrics = penalty.compute(make_tokens(logps, logps, logps, live, field))
        assert np.isfinite(value).all()
        assert metrics["kl_clamped"].result() == pytest.approx(2 / 3)


@pytest.mark.slow
def test_fields_and_rows_that_do_not_fit_are_refused():
    logp, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    with refuses("k2 reads fields['reference_logp']"):
        policy_loss("clip", "token_mean", logp, logp, logp, mask, penalties=[k2(0.1)])
    with refuses("proximal_logp has shape (2,) and logp (1, 2): both must be [B, T]"):
        policy_loss("clip", "token_mean", logp, logp[0], logp, mask)
    with refuses("advantage has shape (1, 1) and logp (1, 2): both must be [B, T], or the adv"):
        policy_loss("clip", "token_mean", logp, logp, jnp.ones((1, 1)), mask)
    with refuses("extra has shape (1,) and logp (1, 2)"):
        policy_loss("clip", "token_mean", logp, logp, logp, mask, extra=jnp.zeros(1))


def test_numbers_that_make_no_sense_are_refused():
    for low, high in [(-0.1, 0.2), (0.2, -0.1), (1.5, 0.2), (0.2, np.inf), (NAN, 0.2)]:
        with refuses("expected 0 <= low <= 1 and high >= 0"):
            clip(low, high)
    for length in (0, -3, NAN, np.inf):
        with refuses("expected a positive number of tokens"):
            constant(length)
    for make in (k2, forward_kl_k3):
        for beta in (-0.1, NAN, np.inf):
            with refuses(f"{make.__name__}: beta = {beta}, expected a number >= 0"):
                make(beta)


def test_parts_are_found_by_name_or_taken_as_they_are():
    assert build_surrogate("clip").name == "clip"
    assert build_reduction({"use": "constant", "length": 4}).name == "constant"
    assert build_penalty({"use": "k2"}, {"beta": 0.1}).name == "k2"
    user_surrogate = Surrogate("own", lambda tokens: (tokens.logp, {}))
    assert build_surrogate(user_surrogate) is user_surrogate
    assert build_surrogate({"use": lambda scale: user_surrogate, "scale": 2.0}) is user_surrogate
    with refuses("unknown surrogate 'clipp': did you mean 'clip'?"):
        build_surrogate("clipp")
    with refuses("surrogate clip: unknown option 'hihg': did you mean 'high'? Known: delta, high"):
        build_surrogate({"use": "clip", "hihg": 0.3})
    with refuses("unknown reduction 'token_means': did you mean 'token_mean'?"):
        build_reduction("token_means")
    with refuses("reduction constant: missing a required argument: 'length'"):
        build_reduction("constant")
    with refuses("unknown penalty 'k3': Known: forward_kl_k3, full_kl, k2, reverse_kl_off_policy"):
        build_penalty("k3")
    with refuses("penalty {'beta': 0.1} has no name"):
        build_penalty({"beta": 0.1})
    with refuses("surrogate own is finished and takes no options"):
        build_surrogate(user_surrogate, {"low": 0.1})
    with refuses("gave Surrogate, expected a Penalty"):
        build_penalty({"use": lambda: user_surrogate})
    assert isinstance(build_penalty(k2(0.1)), Penalty)


def six_arrays(logp, proximal_logp, advantage, mask, segment, fields):
    return -advantage * logp, {}


@pytest.mark.slow
def test_a_loss_of_ones_own_in_the_old_form_is_told_the_new_one():
    pairs: Any = ((build_surrogate, Surrogate), (build_penalty, Penalty))
    for make, kind in pairs:
        with refuses("missing a required argument: 'proximal_logp': write compute(tokens), and"):
            make(kind("own", six_arrays))
        with refuses("read tokens.logp, tokens.proximal_logp, tokens.advantage, tokens.mask, "):
            make({"use": lambda: kind("own", six_arrays)})  # noqa: B023
    remembers = Penalty("own", lambda tokens: (tokens.logp, {}), init=dict, observe=max)
    with refuses("penalty own: too many positional arguments: write compute(tokens, state)"):
        build_penalty(remembers)


def power(tokens, exponent=2.0):
    return -tokens.without_gradient(tokens.advantage) * tokens.logp**exponent, {"loss": 7.0}


def to_the_power(exponent):
    return lambda tokens: power(tokens, exponent)


@pytest.mark.slow
def test_a_computation_keeps_its_defaults_and_takes_options_by_a_factory():
    tokens = Tokens.from_ratios([np.exp(3.0)])
    loss, _ = build_surrogate(power).compute(tokens)
    assert float(loss[0]) == pytest.approx(-9)
    says = "surrogate power(tokens, exponent=2.0) takes no options: make it a factory, def power("
    with refuses(says):
        build_surrogate({"use": power, "exponent": 3.0})
    with refuses("def power(exponent): return lambda tokens: ..."):
        build_penalty(power, {"exponent": 3.0})
    part = build_surrogate({"use": to_the_power, "exponent": 3.0})
    assert part.name == "to_the_power"
    assert float(part.compute(tokens)[0][0]) == pytest.approx(-27)
    arrays = jnp.full((1, 2), 3.0), jnp.zeros((1, 2)), jnp.ones(1), jnp.ones((1, 2), bool)
    loss, metrics = policy_loss(power, "token_mean", *arrays)
    assert float(loss) == metrics["loss"].result() == pytest.approx(-9), "whatever it calls a loss"


@pytest.mark.slow
def test_examples_in_docstrings_hold():
    assert doctest.testmod(objective).failed == 0
