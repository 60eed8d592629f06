"""Off-policy weights and rejections against their formulas, written out in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.advantages import (
    chain,
    compute,
    geometric_rejection,
    masked_importance,
    sequence_rejection,
    spec_of,
    sum_rewards,
    to_tokens,
    truncated_importance,
)
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Rollouts

pytestmark = pytest.mark.usefixtures("float64")

RANDOM = np.random.default_rng(0)
P, G, T = 4, 5, 6
MASK = np.arange(T) < RANDOM.integers(1, T + 1, (P, G, 1))
MASK[0, 0], MASK[1, 1, 0] = False, False  # no token at all; a first token that was not chosen
BEHAVIOR = np.where(MASK, -RANDOM.exponential(size=(P, G, T)), np.nan)
DRIFT = RANDOM.normal(scale=0.4, size=(P, G, T))
REWARD = RANDOM.normal(size=(P, G))
REWARD[2, 3] = np.nan
SCORED = np.isfinite(REWARD)
TOKENS = MASK & SCORED[..., None]
DRIFT_SUM = np.where(MASK, DRIFT, 0).sum(-1)
LENGTH = MASK.sum(-1)
DRIFT_MEAN = DRIFT_SUM / np.maximum(LENGTH, 1)


def run(*steps, drift: Any = DRIFT, reward: Any = REWARD):
    """(value, mask, metrics) of a chain on the rollouts of this file."""
    columns: dict[str, Any] = dict.fromkeys(Rollouts.__dataclass_fields__) | {
        "step": jnp.int32(0),
        "rewards": {"reward": jnp.asarray(reward)},
        "token_mask": jnp.asarray(MASK),
        "behavior_logp": jnp.asarray(BEHAVIOR),
        "fields": {"trainer_logp": jnp.asarray(BEHAVIOR + drift)},
    }
    rollouts, transform = Rollouts(**columns), chain(sum_rewards(), *steps)
    state = transform.init(spec_of(rollouts))
    signal, _, metrics = jax.jit(lambda rollouts: compute(transform, rollouts, state))(rollouts)
    metrics = {name.split("/")[1]: metric.result() for name, metric in metrics.items()}
    return np.asarray(signal.value), np.asarray(signal.mask), metrics


def expected(factor, tokens):
    """The rewards times a factor, 0 where masked."""
    if not tokens:
        return np.where(SCORED, np.nan_to_num(REWARD) * factor, 0)
    factor = factor if np.ndim(factor) == 3 else factor[..., None]
    return np.where(TOKENS, np.nan_to_num(REWARD)[..., None] * factor, 0)


def band(ratio, low, high):
    return (ratio >= low) & (ratio <= high)


RATIO, PRODUCT, GEOMETRIC = np.exp(DRIFT), np.exp(DRIFT_SUM), np.exp(DRIFT_MEAN)
FORMULAS = {  # name: (step, factor, acts on tokens)
    "TIS": (truncated_importance(1.2), np.minimum(RATIO, 1.2), True),
    "TIS of samples": (
        truncated_importance(1.2, level="sequence"),
        np.minimum(PRODUCT, 1.2),
        False,
    ),
    "MIS": (masked_importance(0.8, 1.3), RATIO * band(RATIO, 0.8, 1.3), True),
    "MIS of samples": (
        masked_importance(0.8, 1.3, level="sequence"),
        PRODUCT * band(PRODUCT, 0.8, 1.3),
        False,
    ),
    "geometric": (geometric_rejection(0.9, 1.1), band(GEOMETRIC, 0.9, 1.1) * 1.0, False),
    "sequence": (sequence_rejection(0.7, 1.5), band(PRODUCT, 0.7, 1.5) * 1.0, False),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_each_weight_is_its_formula_and_the_mask_stays(name):
    step, factor, tokens = FORMULAS[name]
    value, mask, _ = run(*([to_tokens()] if tokens else []), step)
    np.testing.assert_allclose(value, expected(factor, tokens), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(mask, TOKENS if tokens else SCORED)
    assert 0 < (value == 0).sum() < value.size


def test_a_weight_of_samples_is_the_same_before_and_after_they_are_widened():
    for step in (truncated_importance(level="sequence"), sequence_rejection(0.7, 1.5)):
        early, _, _ = run(step, to_tokens())
        late, _, _ = run(to_tokens(), step)
        np.testing.assert_array_equal(early, late)


def test_where_trainer_and_sampler_agree_nothing_changes_to_the_last_bit():
    plain, _, _ = run(to_tokens())
    every = (
        truncated_importance(),
        truncated_importance(cap=1.0, level="sequence"),
        masked_importance(low=1.0, high=1.0),
        masked_importance(level="sequence", denominator="shrink"),
        geometric_rejection(1.0, 1.0),
        sequence_rejection(1.0, 1.0, denominator="shrink"),
    )
    for step in every:
        value, mask, metrics = run(to_tokens(), step, drift=0.0)
        np.testing.assert_array_equal(value, plain)
        np.testing.assert_array_equal(mask, TOKENS)
        assert metrics["ratio_max"] == metrics["ratio_min"] == 1
        for name in ("weight", "effective_sample_size"):
            assert metrics.get(name, 1) == 1
        for name in ("dropped_samples", "dropped_tokens", "capped"):
            assert metrics.get(name, 0) == 0


def test_weights_of_trainer_over_sampler_stand_once_in_a_chain():
    inner = chain(masked_importance(), name="inner")
    for steps, names in (
        ((truncated_importance(), inner), "truncated_importance and inner"),
        ((inner, masked_importance()), "inner and masked_importance"),
    ):
        with pytest.raises(InputError, match=f"{names} each weigh by trainer over sampler"):
            chain(sum_rewards(), *steps)
    chain(sum_rewards(), sequence_rejection(), inner)


def test_shrink_takes_what_is_dropped_out_of_the_mask():
    _, mask, _ = run(to_tokens(), masked_importance(0.8, 1.3, denominator="shrink"))
    np.testing.assert_array_equal(mask, TOKENS & band(RATIO, 0.8, 1.3))
    _, mask, _ = run(sequence_rejection(0.7, 1.5, denominator="shrink"))
    np.testing.assert_array_equal(mask, SCORED & band(PRODUCT, 0.7, 1.5))


def test_a_ratio_beyond_the_clamp_stays_finite_and_is_counted():
    wild = DRIFT.copy()
    first = tuple(np.argwhere(TOKENS)[0])
    wild[first] = 1000.0
    value, _, metrics = run(to_tokens(), masked_importance(0.0, 1e30), drift=wild)
    assert value[first] == pytest.approx(REWARD[first[:2]] * np.exp(20))
    assert metrics["log_ratio_clamped"] == pytest.approx(1 / TOKENS.sum())
    assert metrics["ratio_max"] == pytest.approx(np.exp(20))


def test_metrics_of_weights_are_those_of_the_unmasked():
    _, _, metrics = run(to_tokens(), truncated_importance(1.2))
    ratio = RATIO[TOKENS]
    weight = np.minimum(ratio, 1.2)
    assert metrics["capped"] == pytest.approx((ratio > 1.2).mean())
    assert metrics["weight"] == pytest.approx(weight.mean())
    share = weight.sum() ** 2 / (weight**2).sum() / weight.size
    assert metrics["effective_sample_size"] == pytest.approx(share)
    assert metrics["ratio_max"] == pytest.approx(ratio.max())
    assert metrics["ratio_min"] == pytest.approx(ratio.min())


def test_the_product_rule_drops_long_samples_where_the_geometric_one_does_not():
    """Every token drifts by the same 0.1: exp(0.1 T) leaves the band of 1.5 behind 4 tokens."""
    _, _, product = run(sequence_rejection(0.5, 1.5), drift=0.1)
    _, _, geometric = run(geometric_rejection(0.8, 1.2), drift=0.1)
    length = LENGTH[SCORED]
    longer = length > np.median(length)
    assert product["dropped_long"] == pytest.approx((length > 4)[longer].mean())
    assert product["dropped_short"] == pytest.approx((length > 4)[~longer].mean())
    assert product["dropped_long"] > product["dropped_short"]
    assert product["dropped_samples"] == pytest.approx((length > 4).mean())
    assert product["dropped_tokens"] == pytest.approx(length[length > 4].sum() / length.sum())
    assert geometric["dropped_samples"] == geometric["dropped_long"] == 0
    assert geometric["ratio_max"] == pytest.approx(np.exp(0.1))


def test_dropped_tokens_are_counted_by_the_length_of_their_sample():
    _, _, metrics = run(to_tokens(), masked_importance(0.8, 1.3))
    outside = ~band(RATIO, 0.8, 1.3)
    longer = (np.median(LENGTH[SCORED]) < LENGTH)[..., None]
    assert metrics["dropped_tokens"] == pytest.approx(outside[TOKENS].mean())
    assert metrics["dropped_long"] == pytest.approx(outside[TOKENS & longer].mean())
    assert metrics["dropped_short"] == pytest.approx(outside[TOKENS & ~longer].mean())


def test_where_nothing_is_scored_no_metric_holds_a_number():
    for step in (
        *(truncated_importance(level=level) for level in ("token", "sequence")),
        *(masked_importance(level=level) for level in ("token", "sequence")),
        *(geometric_rejection(), sequence_rejection()),
    ):
        value, mask, metrics = run(step, reward=np.full((P, G), np.nan))
        assert not value.any()
        assert not mask.any()
        # As of any maximum and minimum of nothing; logs leave out what is not finite.
        assert metrics.pop("ratio_max") == -np.inf
        assert metrics.pop("ratio_min") == np.inf
        assert np.isnan(list(metrics.values())).all()  # means of weight 0


def test_wrong_options_say_what_is_allowed():
    wrong = {
        "cap = 0.5, expected at least 1": lambda: truncated_importance(0.5),
        "level = 'sample', expected one of token, sequence": lambda: masked_importance(
            level="sample"
        ),
        "low = 1.1, expected 0 <= low <= 1": lambda: sequence_rejection(low=1.1),
        "high = 0.9, expected at least 1": lambda: geometric_rejection(high=0.9),
        "denominator = 'drop', expected one of keep, shrink": lambda: masked_importance(
            denominator="drop"
        ),
    }
    for message, make in wrong.items():
        with pytest.raises(InputError, match=message):
            make()


def test_token_weights_widen_a_signal_of_samples_as_to_tokens_does():
    for step in (truncated_importance(1.2), masked_importance(0.8, 1.3, denominator="shrink")):
        (alone, mask, _), (after, same, _) = run(step), run(to_tokens(), step)
        np.testing.assert_array_equal(alone, after)
        np.testing.assert_array_equal(mask, same)
