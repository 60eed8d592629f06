"""Rewards from known answers, against loops written from the papers and their codes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo import advantages as adv
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Rollouts

P, G, T, J = 3, 4, 5, 3
NAN = np.nan


@pytest.fixture
def fields():
    """Answers of 3, 1 and no tokens; of the first prompt two samples are alike."""
    random = np.random.default_rng(4)
    logp = -random.exponential(size=(P, G, J)).astype(np.float32)
    logp[0, 1] = logp[0, 0]
    thought = random.integers(1, T + 1, (P, G))
    thought[0, 1] = thought[0, 0]
    thought[1, 0] = 0
    return {
        "answer_logp": logp,
        "masked_answer_logp": -random.exponential(size=(P, J)).astype(np.float32),
        "answer_mask": np.arange(J) < np.array([3, 1, 0])[:, None],
        "thought_tokens": thought,
        "answer_reached": np.ones((P, G), bool),
        "token_mask": np.ones((P, G, T), bool),
    }


def stream(part, fields, rewards=None):
    """What a part adds to rewards of 0, and where; of the fields those that it reads."""
    names = part.needs & fields.keys()
    rewards = np.zeros((P, G)) if rewards is None else rewards
    steps = [part, adv.sum_rewards()]
    value, mask = adv.evaluate(steps, rewards, **{name: fields[name] for name in names})
    return np.asarray(value), np.asarray(mask)


def answer(fields, p, g=None):
    """The log-probs of an answer's tokens."""
    row = fields["masked_answer_logp"][p] if g is None else fields["answer_logp"][p, g]
    return row[fields["answer_mask"][p]].astype(np.float64)


@pytest.mark.full
@pytest.mark.parametrize("over", ["mean", "product"])
@pytest.mark.parametrize("masked_thought", [False, True])
def test_a_known_answers_probability_is_a_reward(fields, over, masked_thought):
    value, mask = stream(adv.answer_probability(over, masked_thought), fields)
    assert mask.tolist() == [[True] * G, [True] * G, [False] * G]  # the last has no answer
    judge = {"mean": lambda l: np.exp(l).mean(), "product": lambda l: np.exp(l.sum())}[over]  # noqa: E741
    for p, g in np.ndindex(2, G):
        want = judge(answer(fields, p, g))
        if masked_thought:
            want = min(max(want - judge(answer(fields, p)), 0), 1)
        assert value[p, g] == pytest.approx(want, rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_the_product_is_the_expected_reward_of_exact_match():
    """Answers of two tokens of three: the reward of those drawn, times their chance, summed."""
    random = np.random.default_rng(0)
    first = np.log(random.dirichlet(np.ones(3)))
    second = np.log(random.dirichlet(np.ones(3), size=3))
    gold = (2, 1)
    exact = sum(
        np.exp(first[a] + second[a, b]) * ((a, b) == gold) for a in range(3) for b in range(3)
    )
    logp = np.array([[[first[2], second[2, 1]]]])
    names = {"answer_logp": logp, "answer_mask": np.ones((1, 2), bool)}
    value, _ = adv.evaluate(
        [adv.answer_probability("product"), adv.sum_rewards()], [[0.0]], **names
    )
    assert float(value[0, 0]) == pytest.approx(exact, rel=1e-6)


def places_by_sorting(fields, p, efficiency):
    """NOVER's code, prompt by prompt; equal samples share what sorting would deal out."""
    cost = np.array([-answer(fields, p, g).mean() for g in range(G)])
    length = fields["thought_tokens"][p]
    norm = np.maximum(1 + np.log10(np.maximum(length, 1)), 1)
    perplexity = np.exp(cost / norm)
    order = np.argsort(perplexity, kind="stable")
    reward = np.zeros(G)
    for rank, sample in enumerate(order):
        reward[sample] = (G - rank) / G
    for sample in range(G):
        alike = perplexity == perplexity[sample]
        reward[alike] = reward[alike].mean()
    better = (length[:, None] < length[None]) & (perplexity[:, None] < perplexity[None])
    return reward + efficiency * better.sum(1) / (G - 1)


@pytest.mark.slow
@pytest.mark.parametrize("efficiency", [0.0, 0.7])
def test_places_by_perplexity_are_those_of_sorting(fields, efficiency):
    value, mask = stream(adv.perplexity_rank(efficiency), fields)
    assert mask[:2].all()
    assert not mask[2].any()
    for p in range(2):
        np.testing.assert_allclose(value[p], places_by_sorting(fields, p, efficiency), rtol=1e-5)
    assert value[0, 0] == value[0, 1]


@pytest.mark.full
@pytest.mark.parametrize("efficiency", [0.0, 0.7])
def test_a_sample_without_an_answer_has_0_and_no_place(fields, efficiency):
    fields["answer_reached"][1, [0, 2]] = fields["answer_reached"][0, 1:] = False
    value, mask = stream(adv.perplexity_rank(efficiency), fields)
    assert mask[:2].all()  # it counts in the group's mean
    assert value[1, [0, 2]].tolist() == [0, 0]
    assert value[0].tolist() == [1, 0, 0, 0]
    names = "answer_logp", "thought_tokens", "answer_reached"
    judged = {name: fields[name][1:2, [1, 3]] for name in names}
    judged["answer_mask"] = fields["answer_mask"][1:2]
    steps = [adv.perplexity_rank(efficiency), adv.sum_rewards()]
    alone, _ = adv.evaluate(steps, np.zeros((1, 2)), **judged)
    np.testing.assert_array_equal(value[1, [1, 3]], alone[0])


@pytest.mark.slow
def test_a_sample_without_an_answer_has_probability_0(fields):
    fields["answer_reached"][0, 2] = False
    part = adv.answer_probability("product", must_reach=True)
    value, mask = stream(part, fields)
    expected, _ = stream(adv.answer_probability("product"), fields)
    assert mask[0].all()
    np.testing.assert_array_equal(value, expected * fields["answer_reached"])


@pytest.mark.full
def test_verifree_holds_a_sample_that_never_answers_against_itself():
    """Rewards 1, 0 instead of 0.5, and 0.5: the mean of the others is taken off."""
    logp = np.log([[[1.0], [0.5], [0.5]]])
    names = {"answer_logp": logp, "answer_mask": [[True]], "token_mask": np.ones((1, 3, 2), bool)}
    names |= {"answered": [[[0, 1], [0, 0], [0, 1]]], "answer_reached": [[True, False, True]]}
    options = {"weights": {"reward": 0.0}}
    value, _ = adv.evaluate("verifree", np.zeros((1, 3)), options=options, **names)
    np.testing.assert_allclose(value[0], [[0.75, 1], [-0.75, -0.75], [0, 0.5]], atol=1e-6)


@pytest.mark.slow
def test_answers_are_weighed_by_the_scorer_of_the_reward():
    """Rewards 0.8 and 0.2 by the base, whatever the trained policy finds."""
    names = {"answer_logp": np.zeros((1, 2, 1)), "base_answer_logp": np.log([[[0.8], [0.2]]])}
    names |= {"answer_mask": [[True]], "token_mask": np.ones((1, 2, 2), bool)}
    names |= {"answered": [[[0, 1], [0, 1]]], "answer_reached": [[True, True]]}
    options = {"scorer": "base", "answer": 0.5, "weights": {"reward": 0.0}}
    value, _ = adv.evaluate("verifree", np.zeros((1, 2)), options=options, **names)
    np.testing.assert_allclose(value[0], [[0.6, 0.4], [-0.6, 0.1]], atol=1e-6)


@pytest.mark.slow
def test_a_sample_that_no_answer_judges_has_no_place(fields):
    fields["answer_logp"][0, 3, 1] = NAN
    value, mask = stream(adv.perplexity_rank(), fields)
    assert mask[0].tolist() == [True, True, True, False]
    assert sorted(np.round(value[0, :3] * 3)) in ([1, 2, 2], [1, 2, 3], [2, 2, 3])


def test_only_thoughts_are_trained(fields):
    names = {name: fields[name] for name in ("thought_tokens", "token_mask")}
    value, mask = adv.evaluate(adv.keep_thoughts(), np.ones((P, G)), **names)
    within = np.arange(T) < fields["thought_tokens"][..., None]
    np.testing.assert_array_equal(mask, within)
    np.testing.assert_array_equal(value, within.astype(np.float32))


def test_answers_are_trained_by_their_probability(fields):
    logp = fields["answer_logp"]
    names = {name: fields[name] for name in ("answer_logp", "answer_mask", "token_mask")}
    names["answered"] = np.arange(T) >= np.array([2, 3, 5])[:, None, None] + np.zeros((P, G, 1))
    names["token_mask"][0, 3] = False
    value, mask = adv.evaluate(adv.train_on_answers(0.5), np.full((P, G), 3.0), **names)
    np.testing.assert_array_equal(mask, names["token_mask"])
    for p, g, t in np.ndindex(P, G, T):
        chance = np.exp(logp[p, g][fields["answer_mask"][p]].astype(np.float64).sum())
        expected = 0.5 * chance if names["answered"][p, g, t] else 3.0
        assert float(value[p, g, t]) == pytest.approx(expected * bool(mask[p, g, t]), rel=1e-5)


@pytest.mark.full
def test_both_terms_are_the_gradient_of_the_probability_of_the_answer():
    """A thought of one token of three, then an answer of one of two; groups of two, enumerated."""
    theta = np.array([0.3, -0.2, 0.5]), np.array([[0.1, 0.4], [-0.6, 0.2], [0.9, 0.3]])
    soft = lambda z: np.exp(z) / np.exp(z).sum(-1, keepdims=True)  # noqa: E731
    thought, behind = soft(theta[0]), soft(theta[1])
    right = behind[:, 1]  # the answer is the second token
    expected = thought * (right - thought @ right)
    slope = np.zeros(3), np.zeros((3, 2))
    for pair in np.ndindex(3, 3):
        chance = thought[pair[0]] * thought[pair[1]]
        names = {"answer_logp": np.log(right)[list(pair)][None, :, None]}
        names |= {"answer_mask": [[True]], "answered": [[[False, True]] * 2]}
        names["answer_reached"] = [[True, True]]
        names["token_mask"] = np.ones((1, 2, 2), bool)
        options = {"weights": {"reward": 0.0}}
        value, _ = adv.evaluate("verifree", [[0.0, 0.0]], options=options, **names)
        for place, z in enumerate(pair):
            a = np.asarray(value[0, place], np.float64)
            slope[0][:] += chance / 2 * a[0] * (np.eye(3)[z] - thought)
            slope[1][z] += chance / 2 * a[1] * (np.eye(2)[1] - behind[z])
    np.testing.assert_allclose(slope[0], expected, atol=1e-7)
    by_answer = thought[:, None] * right[:, None] * (np.eye(2)[1] - behind)
    np.testing.assert_allclose(slope[1], by_answer, atol=1e-7)


@pytest.mark.full
def test_groups_that_differ_less_than_of_late_leave():
    """RLPR's filter over three batches: the threshold is half the mean deviation so far."""
    part = adv.chain(adv.sum_rewards(), adv.mask_below_running_deviation(0.5, decay=0.9))
    batches = [[[0.0, 2.0], [1.0, 1.0]], [[0.0, 1.0], [0.0, 0.1]], [[0.0, 0.5], [3.0, 3.0]]]
    deviations = [np.array(batch).std(1, ddof=1) for batch in batches]
    state, total, weight = None, 0.0, 0.0
    for batch, deviation in zip(batches, deviations, strict=True):
        empty = dict.fromkeys(Rollouts.__dataclass_fields__)
        rollouts = Rollouts(
            **{**empty, "step": jnp.int32(0), "fields": {}, "rewards": {"r": jnp.asarray(batch)}}
        )
        state = part.init(adv.spec_of(rollouts)) if state is None else state
        signal, state, metrics = adv.compute(part, rollouts, state)
        threshold = 0.5 * total / weight if weight else 0.0
        np.testing.assert_array_equal(signal.mask, (deviation >= threshold)[:, None].repeat(2, 1))
        name = "mask_below_running_deviation/threshold"
        assert metrics[name].result() == pytest.approx(threshold, rel=1e-5)
        total, weight = 0.9 * total + deviation.mean(), 0.9 * weight + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adv.answer_probability("sum"), "over = 'sum', expected one of mean, product"),
        (lambda: adv.answer_probability(scorer="me"), "scorer = 'me', expected one of trainer"),
        (lambda: adv.train_on_answers(scorer="me"), "scorer = 'me', expected one of trainer"),
        (lambda: adv.perplexity_rank(-1.0), "efficiency = -1.0, expected 0 or more"),
        (lambda: adv.mask_below_running_deviation(decay=1.0), "decay = 1.0, expected 0 or more"),
        (lambda: adv.build("passk", {"std": True}), "std and threshold are of the advantage of k"),
        (lambda: adv.build("passk", {"threshold": 0.5}), "of k samples: give k too"),
        (lambda: adv.build("passk", {"k": 2, "ddof": 0}), "leave eps and ddof out"),
    ],
)
def test_options_without_sense_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
