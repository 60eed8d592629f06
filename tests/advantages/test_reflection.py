"""R3 against NumPy written from the paper; its filter; one variance for both."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from jaxgrpo import advantages as adv
from jaxgrpo.advantages import stats
from jaxgrpo.advantages.reflection import LOWEST_LOGP, log_propagation
from jaxgrpo.config.methods import needed_columns
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.scores import OF_ANSWERS

P, G, J = 6, 4, 5
ZEROS = np.zeros((P, G))
KINDS = ("var", "sigma", "top", "uniform")


def alone(**options) -> adv.AdvantageTransform:
    """R3 by itself: the value is the stream, the mask its filter."""
    return adv.chain(adv.reasoning_reflection(**options), adv.sum_rewards(reward=0.0, r3=1.0))


def reflect(logp, tokens=None, rewards=None, masked=None, **options):
    """(value, mask) of R3, as NumPy in float64."""
    logp = np.asarray(logp, np.float64)
    tokens = np.ones((len(logp), logp.shape[2]), bool) if tokens is None else tokens
    fields: dict[str, Any] = {"answer_logp": logp, "answer_mask": tokens}
    if masked is not None:
        fields["masked_answer_logp"] = masked
        options["masked_thought"] = True
    with jax.enable_x64(True):
        rewards = jnp.zeros(logp.shape[:2]) if rewards is None else jnp.asarray(rewards)
        run = jax.jit(lambda rewards, fields: adv.evaluate(alone(**options), rewards, **fields))
        return [np.asarray(leaf) for leaf in run(rewards, fields)]


def table(seed=0, prompts=P):
    """(log-probs [P, G, J], answer tokens [P, J], masked-thought log-probs [P, J])."""
    random = np.random.default_rng(seed)
    tokens = np.arange(J) < random.integers(3, J + 1, (prompts, 1))
    logp = -random.exponential(size=(prompts, G, J)) * random.exponential(size=(prompts, 1, J))
    return logp, tokens, -random.exponential(size=(prompts, J))


def oracle(logp, tokens, kind, share=0.5, masked=None, gamma=0.0):
    """R3, and both statistics of the filter, of one prompt without padding: loops, float64."""
    logp = np.maximum(logp[:, tokens], LOWEST_LOGP)
    sigma = np.array([np.std(column) for column in logp.T])
    order = np.sort(sigma)[::-1][: int(np.ceil(share * len(sigma)))]
    weight = {
        "var": sigma**2,
        "sigma": sigma,
        "top": (sigma >= order[-1]) * 1.0,
        "uniform": np.ones_like(sigma),
    }[kind]
    weight = weight / weight.sum()
    score = logp - (np.zeros(len(sigma)) if masked is None else masked[tokens])
    for j in range(len(sigma) if gamma else 0):
        for k in range(j):
            if weight[k] > 1 / len(sigma):
                p = np.exp(logp[:, k])
                score[:, j] += np.log(p + (1 - p) * (1 - np.exp(-gamma * (j - k))))
    return score @ weight, weight @ sigma**2, sigma.max()


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_r3_and_its_filter_are_the_papers_formulas(kind):
    logp, tokens, _ = table()
    value, mask = reflect(logp, tokens, kind=kind, share=0.5, drop=0.5)
    rows = [oracle(logp[p], tokens[p], kind) for p in range(P)]
    live_groups = np.array([row[1] for row in rows]) >= np.sort([row[1] for row in rows])[P // 2]
    assert mask.tolist() == [[keep] * G for keep in live_groups]
    np.testing.assert_allclose(
        value, np.array([row[0] for row in rows]) * live_groups[:, None], 1e-12
    )
    threshold = np.median([row[2] for row in rows])
    _, mask = reflect(logp, tokens, kind=kind, drop=0.0, threshold=threshold, spread="max")
    assert mask[:, 0].tolist() == [row[2] > threshold for row in rows]
    assert mask.sum() == P // 2 * G


def test_a_masked_thought_and_propagation_are_taken_off():
    logp, tokens, masked = table()
    value, _ = reflect(logp, tokens, masked=masked, propagation=0.3, drop=0.0)
    plain, _ = reflect(logp, tokens, drop=0.0)
    expected = [oracle(logp[p], tokens[p], "var", masked=masked[p], gamma=0.3)[0] for p in range(P)]
    np.testing.assert_allclose(value, expected, 1e-12)
    assert np.abs(value - plain).min() > 1e-3


def test_what_all_thoughts_share_changes_neither_weights_nor_advantages():
    logp, tokens, _ = table()
    shift = -np.random.default_rng(1).random((P, 1, J))
    weights = {"weights": {"reward": 0.0, "r3": 1.0}}
    chains = [adv.build("dro_r3", {"kind": kind, **weights}) for kind in KINDS]

    @jax.jit
    def run(logp):
        rollout_fields = {"answer_logp": logp, "answer_mask": tokens}
        return [adv.evaluate(transform, ZEROS, **rollout_fields) for transform in chains]

    with jax.enable_x64(True):
        for plain, shifted in zip(run(logp), run(logp + shift), strict=True):
            np.testing.assert_allclose(plain[0], shifted[0], atol=1e-8)
            np.testing.assert_array_equal(plain[1], shifted[1])
            assert np.abs(plain[0]).max() > 0.5


@pytest.mark.slow
def test_weights_sum_to_one_and_follow_their_positions():
    logp, _, _ = table()
    order, samples = [3, 0, 4, 1, 2], [2, 3, 1, 0]
    for kind in KINDS:
        value, _ = reflect(logp, kind=kind, drop=0.0)
        lower, _ = reflect(logp - 0.7, kind=kind, drop=0.0)
        np.testing.assert_allclose(lower, value - 0.7, 1e-10)
        moved, _ = reflect(logp[:, samples][:, :, order], kind=kind, drop=0.0)
        np.testing.assert_allclose(moved, value[:, samples], 1e-12)
    value, _ = reflect(logp, kind="uniform", drop=0.0)
    np.testing.assert_allclose(value, logp.mean(-1), 1e-12)


def test_a_repeated_sample_reaches_the_others_through_the_weights_alone():
    logp, _, _ = table()
    once = np.concatenate([logp, logp[:, :1]], 1)
    twice = np.concatenate([logp, logp], 1)
    for kind, repeated in (("uniform", once), ("var", twice)):
        value, _ = reflect(logp, kind=kind, drop=0.0)
        more, _ = reflect(repeated, kind=kind, drop=0.0)
        np.testing.assert_allclose(more[:, :G], value, 1e-12)
    value, _ = reflect(once, drop=0.0)
    expected = [oracle(once[p], np.ones(J, bool), "var")[0] for p in range(P)]
    np.testing.assert_allclose(value, expected, 1e-12)


def test_a_higher_threshold_and_a_larger_drop_never_bring_a_query_back():
    logp, tokens, _ = table(prompts=20)
    for name, steps in (("threshold", (0.0, 1.0, 3.0, 9.0)), ("drop", (0.0, 0.2, 0.21, 0.6))):
        masks = [reflect(logp, tokens, **{"drop": 0.0, name: at})[1] for at in steps]
        sizes = [int(mask[:, 0].sum()) for mask in masks]
        for before, after in itertools.pairwise(masks):
            assert not (after & ~before).any()
        assert sizes[0] == 20
        if name == "drop":
            assert sizes == [20, 16, 16, 8]  # 0.21 of 20 is 4 prompts, rounded down
        else:
            assert sizes[0] > sizes[1] > sizes[2] > sizes[3]


def test_the_propagation_factor_goes_from_the_earlier_tokens_probability_to_one():
    logp = jnp.log(jnp.array([1e-6, 0.3, 0.999, 1.0]))
    distance = jnp.ones(4)
    near = log_propagation(logp, distance, 1e-9)
    np.testing.assert_allclose(near, logp, atol=2e-3)
    assert (log_propagation(logp, distance, 200.0) == 0).all()
    half = log_propagation(logp, 2 * distance, float(np.log(2) / 2))
    np.testing.assert_allclose(jnp.exp(half), [0.5 + 5e-7, 0.65, 0.9995, 1.0], 1e-6)
    assert (half <= 0).all()


@pytest.mark.full
def test_positions_where_nothing_varies_weigh_exactly_nothing():
    logp, _, _ = table()
    logp[:, :, 2] = -0.1
    changed = logp.copy()
    changed[:, :, 2] = -23.7
    for kind in ("var", "sigma", "top"):
        for plain_value, changed_value in zip(
            reflect(logp, kind=kind), reflect(changed, kind=kind), strict=True
        ):
            np.testing.assert_array_equal(plain_value, changed_value)
    flat = stats.cross_rollout_variance(jnp.full((1, 7, 1), 0.1), jnp.ones((1, 7, 1), bool))
    assert flat.tolist() == [[[0.0]]]  # seven float32 of 0.1 have a variance of 5e-17 otherwise


def test_queries_that_cannot_tell_are_masked_and_count_as_nothing():
    logp, tokens, _ = table()
    logp[0] = logp[0, :1]  # identical samples
    tokens[1] = False  # no answer token
    rewards = np.zeros((P, G))
    rewards[2, 1:] = np.nan  # one sample
    rewards[3] = np.nan  # none
    logp[4, 0, 0], logp[4, 1, 1] = np.nan, -np.inf  # a failed pass; an impossible token
    value, mask = reflect(logp, tokens, rewards, drop=0.0)
    assert np.isfinite(value).all()
    assert mask.any(1).tolist() == [False, False, False, False, True, True]
    assert mask[4].tolist() == [False, True, True, True]
    expected = oracle(np.maximum(logp[4, 1:], -30), tokens[4], "var")[0]
    np.testing.assert_allclose(value[4, 1:], expected, 1e-12)
    for shape in ((2, 3, 0), (2, 1, 4)):  # no answer at all; groups of one
        value, mask = reflect(np.full(shape, -1.0))
        assert value.tolist() == np.zeros(shape[:2]).tolist()
        assert not mask.any()
    value, mask = reflect(np.full((1, 1, 4), -1.0), threshold=-1.0)
    assert (value.tolist(), mask.tolist()) == ([[-1.0]], [[True]])  # uniform weights


def test_samples_that_an_earlier_step_masked_do_not_enter_the_variance():
    logp, tokens, _ = table()
    truncated = np.zeros((P, G), bool)
    truncated[:, 3] = True
    steps = adv.per_reward(adv.mask_truncated()), *(step for _, step in alone(drop=0.0).steps)
    fields = {"answer_logp": jnp.asarray(logp, jnp.float32), "answer_mask": jnp.asarray(tokens)}
    run = jax.jit(lambda fields: adv.evaluate(adv.chain(*steps), ZEROS, **fields))
    value, mask = run({**fields, "truncated": jnp.asarray(truncated)})
    assert not mask[:, 3].any()
    expected = [oracle(logp[p, :3], tokens[p], "var")[0] for p in range(P)]
    np.testing.assert_allclose(value[:, :3], expected, 1e-5)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of the jaxprs inside it too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for leaf in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(leaf, "jaxpr", leaf)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def variances(transform: adv.AdvantageTransform) -> tuple[int, int]:
    """(squares of [P, G, J] floats, reductions of them over samples) in the jaxpr of a chain."""
    rollouts = laws.make_rollouts()
    shape = rollouts.fields["answer_logp"].shape
    jaxpr = jax.make_jaxpr(lambda rollouts: adv.compute(transform, rollouts)[0].value)(rollouts)
    squares = sums = 0
    for equation in equations(jaxpr.jaxpr):
        first = equation.invars[0].aval if equation.invars else None
        if getattr(first, "shape", None) != shape or first is None:
            continue
        if not jnp.issubdtype(first.dtype, jnp.floating):
            continue
        name = equation.primitive.name
        squares += name == "square" or (name == "integer_pow" and equation.params["y"] == 2)
        squares += name == "mul" and equation.invars[0] is equation.invars[1]
        sums += name == "reduce" and equation.params["dimensions"] == (1,)
    return squares, sums


def test_weights_and_filter_share_one_variance_in_the_jaxpr():
    def separate_filter(signal, rollouts):
        logp = rollouts.fields["answer_logp"]
        mask = signal.mask[..., None] & rollouts.fields["answer_mask"][:, None]
        spread = stats.cross_rollout_variance(logp, mask).sum(-1)
        return dataclasses.replace(signal, mask=signal.mask & (spread > 0))

    twice = adv.chain(*(step for _, step in adv.build("dro_r3").steps), separate_filter)
    assert variances(adv.build("dro_r3")) == (1, 1)
    assert variances(twice) == (2, 2)


def test_r3_ranks_thoughts_where_the_sum_of_log_probs_ranks_style():
    """Spearman with the thought's correctness: 3 of 120 tokens reflect it, style moves the rest."""
    random = np.random.default_rng(0)
    prompts, samples, length = 64, 16, 120
    right = np.stack([random.permutation(samples) < samples // 2 for _ in range(prompts)])
    style = random.normal(size=(prompts, samples, 1))
    logp = -1 + 0.35 * style + 0.1 * random.normal(size=(prompts, samples, length))
    logp[:, :, [10, 50, 90]] += np.where(right, 0, -3.8)[..., None]

    def spearman(value):
        ranks = value.argsort(1).argsort(1)  # correctness is binary: its ranks are linear in it
        return np.mean([np.corrcoef(*pair)[0, 1] for pair in zip(ranks, right, strict=True)])

    by = {kind: spearman(reflect(logp, kind=kind, drop=0.0)[0]) for kind in KINDS}
    assert by["var"] >= 0.8
    assert spearman(logp.sum(-1)) <= 0.4
    assert by["uniform"] == pytest.approx(spearman(logp.sum(-1)))
    assert by["var"] > by["sigma"] > by["uniform"]


def test_the_recipe_counts_r3_once_whatever_the_other_weights_are():
    logp, tokens, _ = table()
    rewards = np.random.default_rng(2).random((P, G))
    score = np.array([oracle(logp[p], tokens[p], "var")[0] for p in range(P)])

    @jax.jit
    def run(rewards, logp):
        rollout_fields = {"answer_logp": logp, "answer_mask": tokens}
        tables = (None, {"reward": 0.2}, {"reward": 1.0, "r3": 3.0})
        options = [{"drop": 0.0, "eps": 0.0, "weights": weights} for weights in tables]
        return [
            adv.evaluate("dro_r3", rewards, options=each, **rollout_fields)[0] for each in options
        ]

    with jax.enable_x64(True):
        values = run(jnp.asarray(rewards), jnp.asarray(logp))
    for value, (first, second) in zip(values, ((1, 1), (0.2, 1), (1, 3)), strict=True):
        total = first * rewards + second * score
        centred = total - total.mean(1, keepdims=True)
        np.testing.assert_allclose(value, centred / total.std(1, ddof=1, keepdims=True), atol=1e-10)


def test_the_length_of_the_answer_is_a_stream_of_its_own():
    transform = adv.chain(
        adv.answer_length(beta=0.5), adv.sum_rewards(reward=0.0, answer_length=1.0)
    )
    tokens = np.array([[True, True, True, True], [False] * 4])
    length = np.array([[4, 2, 8, 0], [1, 2, 3, 4]])
    value, mask = adv.evaluate(
        transform, np.zeros((2, 4)), answer_mask=tokens, answer_tokens=length
    )
    assert value.tolist() == [[1.0, 0.75, 0.5, 0.5], [0.0] * 4]
    assert mask.tolist() == [[True] * 4, [False] * 4]


def test_wrong_options_shapes_and_names_are_refused():
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"kind": "varr"}, "did you mean 'var'"),
        ({"spread": "maxx"}, "did you mean 'max'"),
        ({"drop": 1.0}, r"drop = 1.0, expected a share in \[0, 1\)"),
        ({"share": 0.0}, r"share = 0.0, expected"),
        ({"propagation": 0.0}, "expected a rate above 0"),
    )
    for options, message in wrong:
        with pytest.raises(InputError, match=message):
            adv.reasoning_reflection(**options)
    logp, tokens, _ = table()
    with pytest.raises(InputError, match=r"answer_logp has shape \(6, 5\), expected \[P, G, J\]"):
        adv.evaluate(alone(), np.zeros((P, G)), answer_logp=logp[:, 0], answer_mask=tokens)
    with pytest.raises(InputError, match=r"answer_mask has shape \(6, 4\), expected .* \(6, 5\)"):
        adv.evaluate(alone(), np.zeros((P, G)), answer_logp=logp, answer_mask=tokens[:, 1:])
    with pytest.raises(InputError, match="stream 'r3' exists already"):
        adv.evaluate("dro_r3", {"r3": np.zeros((P, G))}, answer_logp=logp, answer_mask=tokens)


def test_training_says_what_it_does_not_make_and_where_it_can_be_brought():
    needs = adv.answer_length().needs.difference(OF_ANSWERS)
    with pytest.raises(InputError, match=r"answer_tokens \[P, G\], tokens of .*compute"):
        needed_columns(needs, [{"prompt": "1+1=", "answer": "2"}], [])


def test_a_prompt_whose_masked_thought_is_not_known_is_not_scored():
    logp, tokens, masked = table(prompts=3)
    masked[0, 0], masked[1, -1], tokens[1, -1] = np.nan, np.nan, False
    value, mask = reflect(logp, tokens, masked=masked, drop=0.0)
    assert np.isfinite(value).all()
    assert mask.any(1).tolist() == [False, True, True]


def by_loop(reward, logp, thought, token_mask, alpha, beta, clip):
    """`add_information_gain`, sample by sample."""
    cuts, length = logp.shape[2] - 1, token_mask.shape[2]
    worth = np.full((*reward.shape, cuts), np.nan)
    part_of = np.full(token_mask.shape, -1)
    for p, g in np.ndindex(*reward.shape):
        ends = [math.ceil(thought[p, g] * k / cuts) for k in range(cuts + 1)]
        for k in range(cuts):
            part_of[p, g, ends[k] : ends[k + 1]] = k
            if ends[k + 1] > ends[k]:
                gain = np.clip(logp[p, g, k + 1] - logp[p, g, k], -clip, clip)
                worth[p, g, k] = gain - beta * (ends[k + 1] - ends[k]) / length
    value = np.where(token_mask, reward[..., None], 0.0)
    for p, g, t in np.ndindex(*token_mask.shape):
        k = part_of[p, g, t]
        if token_mask[p, g, t] and k >= 0:
            value[p, g, t] += alpha * (worth[p, g, k] - np.nanmean(worth[p, :, k]))
    return value


@pytest.mark.full
def test_gains_of_parts_are_added_as_a_loop_over_tokens_does():
    random = np.random.default_rng(4)
    lengths = random.integers(1, 8, (3, 4))
    token_mask = np.arange(7) < lengths[..., None]
    thought = random.integers(0, lengths + 1)
    logp, reward = -random.exponential(3, (3, 4, 4)), random.normal(size=(3, 4))
    alpha, beta, clip = 0.5, 2.0, 1.5
    value, mask = adv.evaluate(
        adv.add_information_gain(alpha, beta, clip),
        reward,
        cut_answer_logp=logp,
        thought_tokens=thought,
        token_mask=token_mask,
    )
    expected = by_loop(reward, logp, thought, token_mask, alpha, beta, clip)
    np.testing.assert_allclose(value, expected, atol=1e-5)
    np.testing.assert_array_equal(mask, token_mask)


@pytest.mark.full
def test_a_sample_with_a_nan_gets_no_gain_and_gives_none():
    fields = {
        "cut_answer_logp": [[[-3.0, -2.0], [-3.0, -1.0], [np.nan, -1.0]]],
        "thought_tokens": [[1, 1, 1]],
        "token_mask": [[[1], [1], [1]]],
    }
    value, _ = adv.evaluate(adv.add_information_gain(), [[0.0, 0.0, 5.0]], **fields)
    assert value[0, :, 0].tolist() == [-0.5, 0.5, 5.0]
    fields["cut_answer_logp"] = [[[1.0], [1.0], [1.0]]]
    with pytest.raises(InputError, match=r"expected \[P, G, K \+ 1\]"):
        adv.evaluate(adv.add_information_gain(), [[0.0, 0.0, 5.0]], **fields)
