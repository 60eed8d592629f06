"""Top-k and top-p: which tokens stay, what is drawn from them, and where they are refused."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import draw_all, make_engine

from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.drawing import Distribution, draw, named_support, truncate
from jaxgrpo.training.stored_policy import DEFAULTS

LOGITS = np.random.default_rng(0).normal(size=(40, 37)).astype(np.float32) * 3
LOGITS[::2] = np.round(LOGITS[::2])  # with ties, and zeros of both signs
CUTS = [(0, 1.0), (1, 1.0), (5, 1.0), (36, 1.0), (99, 1.0), (0, 0.3), (0, 0.9), (9, 0.7), (0, 1e-6)]


def kept_by_sorting(logits, top_k, top_p):
    """The tokens that stay of one row, one by one from the likeliest, ties together."""
    in_top_k = np.ones(len(logits), bool)
    if 0 < top_k < len(logits):
        in_top_k = logits >= np.sort(logits)[-top_k]
    weight = np.where(in_top_k, np.exp(logits.astype(np.float64) - logits.max()), 0)
    weight /= weight.sum()
    for threshold in sorted(set(logits[in_top_k].tolist()), reverse=True):
        nucleus = in_top_k & (logits >= threshold)
        if weight[nucleus].sum() >= top_p - 1e-9:
            return nucleus
    return in_top_k


@pytest.mark.full
@pytest.mark.parametrize(("top_k", "top_p"), CUTS)
def test_what_stays_is_what_sorting_finds(top_k, top_p):
    cut = np.asarray(jax.jit(truncate, static_argnums=(1, 2))(LOGITS, top_k, top_p))
    for row, got in zip(LOGITS, cut, strict=True):
        remaining = kept_by_sorting(row, top_k, top_p)
        np.testing.assert_array_equal(got, np.where(remaining, row, -np.inf))


def test_draws_follow_the_cut_softmax_and_state_its_probabilities():
    logits = LOGITS[1]
    count = 20_000
    keys = jax.random.split(jax.random.key(0), (1, count))
    many = jnp.broadcast_to(jnp.asarray(logits), (1, count, 37))
    run = jax.jit(functools.partial(draw, distribution=Distribution(2.0, 12, 0.9)))
    token, logp = run(keys, many)
    remaining = kept_by_sorting(logits / 2, 12, 0.9)
    assert 3 < remaining.sum() < 12
    prob = np.where(remaining, np.exp(logits.astype(np.float64) / 2), 0)
    prob /= prob.sum()
    counts = np.bincount(np.asarray(token[0]), minlength=37)
    assert counts[~remaining].sum() == 0
    statistic = ((counts - count * prob)[remaining] ** 2 / (count * prob)[remaining]).sum()
    assert statistic < 31  # chi-square with at most 11 degrees of freedom: p = 0.001
    np.testing.assert_allclose(logp[0], np.log(prob[np.asarray(token[0])]), atol=1e-5)


@pytest.mark.slow
def test_the_sampler_cuts_and_the_likeliest_token_of_top_1_has_probability_1():
    settings = SamplingSettings(6, 1.0, (tiny.END,), tiny.PAD, 6)
    key = jax.random.key_data(jax.random.key(3))

    def run(settings):
        prompts = tiny.prompts()
        engine = make_engine(tiny.model(), settings, prompts)
        return draw_all(engine, tiny.params(), prompts, key, 3)

    cut, greedy = run(settings._replace(top_k=1)), run(settings._replace(temperature=0.0))
    np.testing.assert_array_equal(cut.completion_tokens, greedy.completion_tokens)
    np.testing.assert_allclose(cut.behavior_logp, 0, atol=1e-6)


@pytest.mark.full
def test_of_ties_at_the_limit_those_of_lower_ids_are_named():
    """Every second row has whole logits, so that the 5 likeliest are often more."""
    several = 0
    for shards in (1, 3):
        cut, ids = named_support(jnp.asarray(LOGITS), Distribution(1.0, 5, 0.9), 5, shards)
        for row, got, named in zip(LOGITS, np.asarray(cut), np.asarray(ids), strict=True):
            remaining = np.flatnonzero(kept_by_sorting(row, 5, 0.9))
            several += len(remaining) > 5
            expected = sorted(remaining.tolist(), key=lambda id, row=row: (-row[id], id))[:5]
            assert named.tolist() == expected + [-1] * (5 - len(expected))
            np.testing.assert_array_equal(np.flatnonzero(got > -np.inf), sorted(expected))
            np.testing.assert_array_equal(got[expected], row[expected])
    assert several > 2


def refused(**changes):
    tables = copy.deepcopy(DEFAULTS)
    tables["train"]["support"] = changes.pop("support", "full")
    tables["model"] = {"path": "some/model"}
    tables["rewards"] = [{"use": "gsm8k_answer"}]
    tables["loss"] = {"proximal": changes.pop("proximal", "behavior")}
    tables["rollout"] |= changes
    try:
        configs.from_dict(tables)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("cut", [{"top_k": 20}, {"top_p": 0.9}], ids=str)
def test_ratios_to_a_cut_distribution_are_refused(cut):
    ((name, value),) = cut.items()
    assert f"rollout.{name} = {value}" in refused(**cut)
    assert 'loss.proximal = "trainer"' in refused(**cut)
    assert "rollout." not in refused(**cut, proximal="trainer")
    replayed = refused(**cut, support="replay")
    assert ("without rollout.top_k" in replayed) == ("top_k" not in cut)
    assert f"rollout.{name} = {value}" not in replayed


def test_a_top_p_beyond_1_is_refused():
    assert "rollout.top_p = 1.5: a probability" in refused(top_p=1.5, proximal="trainer")
