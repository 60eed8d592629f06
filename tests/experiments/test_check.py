"""`jaxgrpo check`: its expected updates beside an enumeration written apart, the mistakes that it
finds, and what it says of what is shipped."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxgrpo.advantages import registry
from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.experiments.check import verdict
from jaxgrpo.experiments.check.expectation import expect
from jaxgrpo.experiments.check.games import GAMES, make_policies
from jaxgrpo.experiments.check.laws import LAWS, broken, check_laws
from jaxgrpo.experiments.check.method import make_method, read_method
from jaxgrpo.losses import build_penalty

MISTAKES = Path(__file__).parents[1] / "support" / "mistakes.py"
SMALL = {("bandit", 1): (2, 3), ("bigram", 1): (2,), ("bandit", 2): (2,), ("bigram", 2): (2,)}
UNIT, SIZE, SCALE = "unit scale", "group size", "scale invariance"


@pytest.fixture
def small(monkeypatch):
    """Groups of two and three samples: what is said of a method, in seconds."""
    monkeypatch.setattr(verdict, "SIZES", SMALL)


# The papers' formulas, r [M, G] of M groups, and log-probs of the samples [M, G].


def centred(r, *_):
    return r - r.mean(1, keepdims=True)


def normalised(r, *_):
    deviation = r.std(1, ddof=1, keepdims=True)
    return np.where(np.ptp(r, axis=1, keepdims=True) > 0, centred(r) / (deviation + 1e-6), 0)


def leave_one_out(r, *_):
    return r - (r.sum(1, keepdims=True) - r) / (r.shape[1] - 1)


def best_less_second(r, *_):
    ordered = np.sort(r, axis=1)
    gap = (ordered[:, -1] - ordered[:, -2]) / (r.std(1, ddof=1) + 1e-6)
    return np.where(np.arange(r.shape[1]) == r.argmax(1)[:, None], gap[:, None], 0)


def above_mean(r, *_):
    mean = r.mean(1, keepdims=True)
    return np.where(mean > 0, (r - mean) / np.where(mean > 0, mean, 1), 0)


def towards_filtered(r, logp, base_logp):
    """alpha 0.5, cap 10, Z the group's mean of base v / policy, at most 1 and at least 1e-4."""
    weight = np.exp(base_logp - logp) * r
    z = np.minimum(weight.mean(1, keepdims=True), 1)
    pseudo = np.minimum(np.sqrt(weight / np.where(z > 0, z, 1e-4)) - 1, 10)
    flat = np.ptp(pseudo, axis=1, keepdims=True) == 0
    return np.where(flat, 0, leave_one_out(pseudo))


FORMULAS = {
    "grpo": normalised,
    "dr_grpo": centred,
    "rloo": leave_one_out,
    "sign": lambda r, *_: 2 * r - 1,
    "reinforce": lambda r, *_: r,
    "passk": best_less_second,
    "maxrl": above_mean,
    "alpha_dpg": towards_filtered,
}


def enumerate_update(game, logits, reference, reward, samples, formula):
    """(expected update [S, V], expected square of its norm), term by term in NumPy."""
    shifted = logits - logits.max(-1, keepdims=True)
    policy = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    anchor = np.exp(reference) / np.exp(reference).sum(-1, keepdims=True)
    logp, base_logp, slopes = [], [], []
    for tokens, states, mask in zip(game.tokens, game.state, game.mask, strict=True):
        slope, total, base_total = np.zeros_like(logits), 0.0, 0.0
        for token, state in zip(tokens[mask], states[mask], strict=True):
            slope[state] -= policy[state]
            slope[state, token] += 1
            total += np.log(policy[state, token])
            base_total += np.log(anchor[state, token])
        logp.append(total), base_logp.append(base_total), slopes.append(slope)
    logp, base_logp, slopes = np.array(logp), np.array(base_logp), np.array(slopes)
    index = np.array(list(itertools.product(range(len(logp)), repeat=samples)))
    advantage = formula(reward[index], logp[index], base_logp[index])
    updates = np.einsum("mg,mgsv->msv", advantage / samples, slopes[index])
    chance = np.exp(logp[index].sum(1))
    return np.einsum("m,msv->sv", chance, updates), chance @ (updates**2).sum((1, 2))


@pytest.mark.parametrize("name", FORMULAS)
def test_the_expected_update_is_that_of_the_papers_formula(name):
    for game in GAMES.values():
        tables, reward = make_policies(game), game.rewards["binary"]
        with jax.enable_x64(True):
            drawn = tables._replace(behavior=tables.policy)
            expected = expect(read_method(name), game, 3, 1, reward, drawn)
        for place, logits in enumerate(tables.policy):
            update, square = enumerate_update(
                game, logits, tables.reference[place], reward, 3, FORMULAS[name]
            )
            np.testing.assert_allclose(expected.update[place], update, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(expected.square[place], square, rtol=1e-9)


MISTAKEN = {
    "batch_deviation": {"groups apart"},
    "times_length": {"length", SCALE},
    "mask_after_mean": {"masked samples", SCALE},
    "grown_mask": {"mask shrinks", SCALE, "shift invariance"},
    "sees_its_batch": {"past state", "groups apart", SCALE, "shift invariance"},
    "mean_per_micro_batch": {"micro-batches", SCALE},
    "clipped_on_the_wrong_side": {"way back", SCALE},
    "without_ratio": {"stale ratio", SCALE},
}
"""What laws of one batch say of each mistake. SCALE is no mistake: the plain method breaks it."""


@pytest.mark.parametrize("name", MISTAKEN)
def test_a_mistake_is_found_by_the_law_that_it_breaks(name):
    with jax.enable_x64(True):
        assert set(broken(check_laws(read_method(f"{MISTAKES}:{name}")))) == MISTAKEN[name]


def test_the_plain_method_breaks_no_law_but_scale_invariance():
    with jax.enable_x64(True):
        assert broken(check_laws(make_method("plain"))) == [SCALE]


def test_a_wrong_sign_descends_the_mean_reward(small):
    report = verdict.check(read_method(f"{MISTAKES}:wrong_sign"))
    assert (report.climbs, round(report.cosine, 9)) == ("other", -1)
    np.testing.assert_allclose(report.scale, [-1, -1], rtol=1e-9)


def test_a_baseline_that_holds_its_sample_leaves_out_a_share_and_a_reward_twice_doubles(small):
    report = verdict.check(read_method(f"{MISTAKES}:sees_itself"))
    np.testing.assert_allclose(report.scale, [1 / 2, 2 / 3], rtol=1e-9)
    assert set(broken(report.laws)) == {SCALE, SIZE, UNIT}
    report = verdict.check(read_method(f"{MISTAKES}:reward_twice"))
    np.testing.assert_allclose(report.scale, [2, 2], rtol=1e-9)
    assert set(broken(report.laws)) == {SCALE, UNIT}


def test_a_kl_of_the_wrong_direction_is_named(small):
    report = verdict.check(read_method(f"{MISTAKES}:k3_for_reverse_kl"))
    assert report.penalty["climbs"] == "KL(reference || policy) at each visited state"
    assert set(broken(report.laws)) == {SCALE, "KL"}
    right = verdict.check(make_method("k2", penalties=(build_penalty({"use": "k2", "beta": 0.1}),)))
    assert right.penalty["climbs"] == "KL(policy || reference) at each visited state"
    assert broken(right.laws) == [SCALE]
