"""Rules in JAX, which answer within the loop: they and a class in Python make the same samples."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import playing
import pytest

from jaxgrpo.environments.rules import Rules
from jaxgrpo.rollout.slots import driver, shrinking

BOTH = pytest.mark.parametrize(
    "name", [pytest.param("number_guess", marks=pytest.mark.full), "modular_sum"]
)


@functools.cache
def in_python(name, **options):
    return playing.play(playing.GAMES[name], in_jax=False, **options)


def assert_same(played, alike):
    for name in ("prompt_tokens", "completion_tokens", "token_mask", "truncated"):
        np.testing.assert_array_equal(
            getattr(played.rollouts, name), getattr(alike.rollouts, name), err_msg=name
        )
    logp = played.rollouts.behavior_logp
    np.testing.assert_allclose(logp, alike.rollouts.behavior_logp, atol=1e-5)
    assert not logp[~played.rollouts.token_mask].any()
    assert played.rollouts.fields.keys() == alike.rollouts.fields.keys()
    for name, field in alike.rollouts.fields.items():
        np.testing.assert_array_equal(played.rollouts.fields[name], field, err_msg=name)


def conversations(played):
    return played.dialogue.spoken(range(playing.PROMPTS), playing.GROUP)


@pytest.mark.full
@pytest.mark.slow
@BOTH
def test_both_forms_give_the_same_tokens_turns_rewards_and_words(name):
    played, alike = playing.play(playing.GAMES[name], in_jax=True), in_python(name)
    assert_same(played, alike)
    for talk, expected in zip(conversations(played), conversations(alike), strict=True):
        assert (talk.prompt, talk.messages) == (expected.prompt, expected.messages)
        assert talk.reward() == pytest.approx(expected.reward(), rel=1e-6)
    for metric in ("turns/mean", "turns/cut"):
        assert played.dialogue.metrics(24)[metric] == alike.dialogue.metrics(24)[metric]
    assert (played.rollouts.fields["turn"].max(-1) >= 3).any()
    assert played.rollouts.fields["turn_reward"].any()


BOUNDS = [{"turns": 2}, {"limit": 1}, {"turns": 1}, {"limit": 40}, {"steps": 9}]
BOUNDS += [{"has_template": False, "limit": 2}]
QUICK = {("modular_sum", 1)}
CASES = [
    pytest.param(
        name,
        options,
        id=f"{name}-{options}",
        marks=() if (name, number) in QUICK else pytest.mark.full,
    )
    for name in playing.GAMES
    for number, options in enumerate(BOUNDS)
]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES)
def test_both_forms_bound_samples_alike(name, options):
    options = {"turns": 6} | options
    played = playing.play(playing.GAMES[name], in_jax=True, **options)
    expected = in_python(name, **options) if options["turns"] > 1 else None
    if expected is not None:
        assert_same(played, expected)
    number = played.rollouts.fields["turn"].max(-1) + 1
    assert (number <= options["turns"]).all()
    assert (number >= 1).all()


@pytest.mark.slow
@BOTH
def test_samples_do_not_depend_on_slots(name):
    assert_same(playing.play(playing.GAMES[name], in_jax=True, slots=4), in_python(name))


@pytest.mark.full
def test_a_turn_without_a_reward_leaves_those_of_others_at_their_turns_and_keys_may_be_kept():
    """A reward of NaN is none, as in Python."""

    def reset(key, row):
        return key, jnp.int32(0)

    def step(state, tokens, length):
        (key, count), reply = state, jnp.ones(1, jnp.int32)
        key, _ = jax.random.split(key)
        reward = jnp.where(count == 0, jnp.nan, count.astype(jnp.float32))
        return (key, count + 1), reply, jnp.int32(1), reward, count == 2

    game = playing.GAMES["modular_sum"]._replace(rules=Rules(reset, step))
    played = playing.play(game, in_jax=True, has_template=False, limit=2)
    number = played.rollouts.fields["turn"].max(-1) + 1
    assert number.max() == 3
    expected = np.arange(6) * (np.arange(6) < number[..., None])
    np.testing.assert_array_equal(played.rollouts.fields["turn_reward"], expected)
    totals = [talk.reward() for talk in conversations(played)]
    np.testing.assert_array_equal(totals, expected.sum(-1).ravel())


@pytest.mark.full
def test_the_host_looks_as_often_whatever_the_number_of_turns(monkeypatch):
    looks = []
    step = driver._Session.step

    def counted(self, *arguments):
        looks.append(0)
        return step(self, *arguments)

    monkeypatch.setattr(driver._Session, "step", counted)
    numbers = {}
    for turns, limit in ((1, 32), (8, 4)):
        looks.clear()
        game = playing.GAMES["modular_sum"]
        options = {"turns": turns, "limit": limit, "steps": 32, "prompts": 8, "group": 8}
        played = playing.play(game, in_jax=True, has_template=False, **options)
        numbers[turns] = len(looks), int((played.rollouts.fields["turn"].max(-1) + 1).max())
    assert numbers[8][1] >= 6
    # A segment has four tokens here, and each of fewer slots begins one; two are not read yet.
    most = 32 // 4 + len(shrinking.sizes_below(shrinking.Size(64, 8, True))) + 2
    assert max(number for number, _ in numbers.values()) <= most
