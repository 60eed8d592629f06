"""Experience: which rows come again, which samples are experience, and what stands in a group."""

from __future__ import annotations

import collections
import dataclasses
import re

import numpy as np
import pytest
import tiny

from jaxgrpo.config.keys import ExperienceKeys, RolloutKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import finalise
from jaxgrpo.core.types import REPLAYED, Stream, Waiting
from jaxgrpo.rollout.experience import (
    FIRST_ORDINAL,
    Experiencer,
    choose_rows,
    keep,
    no_experience,
    num_groups,
)
from jaxgrpo.rollout.policies import SuccessJudge
from jaxgrpo.training.collecting.experience import refuse

G, STEPS, ROWS = 8, 5, 30


def buckets(counts, group_size):
    """How likely each row is, from the definition."""
    eligible = {row: n for row, n in enumerate(counts) if 0 < n < group_size}
    sizes = collections.Counter(eligible.values())
    weight = {n: np.exp(-((n - group_size / 2) ** 2) / 2) for n in sizes}
    total = sum(weight.values())
    return {row: weight[n] / total / sizes[n] for row, n in eligible.items()}


def test_rows_come_again_as_often_as_their_buckets_say():
    counts = np.array([1, 2, 2, 4, 5, 7, 8, 0, 3, 3])
    experience = no_experience(20, STEPS, len(counts))
    experience = experience._replace(row=np.arange(20, dtype=np.int32) % 10, successes=counts)
    random, number = np.random.default_rng(0), 20_000
    drawn = np.array([int(choose_rows(experience, 1, G, random)[0]) for _ in range(number)])
    expected = buckets(counts, G)
    assert {*drawn.tolist()} == expected.keys()  # neither the solved row nor the hopeless one
    observed = np.array([(drawn == row).sum() for row in expected])
    frequencies = number * np.array([*expected.values()])
    assert (
        (observed - frequencies) ** 2 / frequencies
    ).sum() < 20.1  # chi-square, 8 - 1 degrees, p = .005
    several = choose_rows(experience, 99, G, random)
    assert sorted(several.tolist()) == sorted(expected)  # each once
    nothing = experience._replace(row=np.full(20, -1, np.int32))
    assert choose_rows(nothing, 3, G, random).tolist() == []


def test_rows_far_from_half_right_come_again_in_large_groups_too():
    experience = no_experience(4, STEPS, 4)._replace(row=np.arange(4, dtype=np.int32))
    experience = experience._replace(successes=np.ones(4, np.int32))
    random = np.random.default_rng(0)
    with np.errstate(all="raise"):  # exp(-39^2 / 2) is 0
        drawn = [int(choose_rows(experience, 1, 80, random)[0]) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=4), 1000, atol=4 * np.sqrt(750))


def judged(rewards, rows, step=0, replayed=(), truncated=()):
    """Rollouts of rows with rewards [P, G]; those at `replayed` are of earlier steps."""
    rewards = np.asarray(rewards, np.float32)
    rollouts = tiny.rollouts(rewards, STEPS, seed=step)
    flags, cut = np.zeros(rewards.shape, bool), np.zeros(rewards.shape, bool)
    for place in replayed:
        flags[place] = True
    for place in truncated:
        cut[place] = True
    return dataclasses.replace(
        rollouts,
        row=np.asarray(rows, np.int32),
        step=np.int32(step),
        truncated=cut,
        fields={REPLAYED: flags},
    )


def after(experience, rollouts, per_row=2):
    rewards = np.asarray(rollouts.rewards["reward"])
    return keep(experience, rollouts, rewards >= 0.5, np.isfinite(rewards), per_row)


def test_right_samples_are_kept_with_what_they_were_drawn_by_and_solved_rows_leave():
    empty = no_experience(5, STEPS, ROWS)
    first = judged([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], [4, 5, 6])
    experience = after(empty, first)
    assert experience.row.tolist() == [4, 4, -1, -1, -1]
    assert experience.successes[[4, 5, 6, 7]].tolist() == [2, 0, 4, -1]
    for slot, sample in enumerate((0, 2)):
        mask = np.asarray(first.token_mask)[0, sample]
        assert ((~np.isnan(experience.logp[slot])) == mask).all()
        tokens, logp = first.completion_tokens[0, sample], first.behavior_logp[0, sample]
        np.testing.assert_array_equal(experience.tokens[slot][mask], np.asarray(tokens)[mask])
        np.testing.assert_array_equal(experience.logp[slot][mask], np.asarray(logp)[mask])
    assert (empty.row == -1).all()  # what was given stays
    solved = after(experience, judged([[1, 1, 1, 1]], [4], step=1))
    assert solved.row.tolist() == [-1] * 5
    back = after(solved, judged([[0, 1, 0, 0]], [4], step=2))
    assert back.row.tolist() == [4, -1, -1, -1, -1]
    assert back.successes[4] == 1


def test_only_fresh_scored_whole_samples_count():
    rollouts = judged(
        [[1, 1, 1, 0], [1, 0, np.nan, 1]], [0, 1], replayed=[(0, 3)], truncated=[(1, 0)]
    )
    experience = after(no_experience(5, STEPS, ROWS), rollouts, per_row=4)
    assert experience.successes[[0, 1]].tolist() == [
        3,
        2,
    ]  # row 0 is solved by its three fresh ones
    assert experience.row.tolist() == [1, -1, -1, -1, -1]  # the other right one was cut
    unscored = judged([[np.nan] * 4], [1], step=1)
    assert after(experience, unscored).row.tolist() == experience.row.tolist()


def test_the_oldest_samples_make_room():
    experience = no_experience(3, STEPS, ROWS)
    experience = after(experience, judged([[1, 0], [1, 0]], [0, 1], step=1), per_row=2)
    experience = after(experience, judged([[1, 0]], [0], step=2), per_row=2)
    assert experience.row.tolist() == [0, 1, 0]
    experience = after(experience, judged([[1, 0]], [0], step=3), per_row=2)  # its same_row oldest
    assert (experience.row.tolist(), experience.step.tolist()) == ([0, 1, 0], [3, 1, 2])
    experience = after(experience, judged([[1, 0]], [2], step=4), per_row=2)  # the oldest of all
    assert (experience.row.tolist(), experience.step.tolist()) == ([0, 2, 0], [3, 4, 2])


def experiencer(rank, share=0.5, start=0.35, per_row=2):
    encoded = [np.array([2 + row % 7, 3], np.int32) for row in range(ROWS)]
    judge = SuccessJudge("experience", 0.0, None, 0.5, None)
    return Experiencer(share, start, per_row, judge, encoded, 4, 4, 0, rank)


def make_stream(experience):
    zero = np.zeros((), np.int32)
    return Stream(
        cursor=zero, key=zero, prompt_policy_state={}, waiting=Waiting(None, (), experience)
    )


def fresh(stream, step, number):
    """The next rows of a stream, in order."""
    prompts = tiny.prompts(max(number, 2), step=step)
    cursor = int(stream.cursor)
    order = np.arange(cursor, cursor + number, dtype=np.int32)
    arrays = {
        name: np.asarray(getattr(prompts, name))[:number]
        for name in ("prompt_tokens", "prompt_mask")
    }
    prompts = dataclasses.replace(prompts, **arrays, ordinal=order, row=order % ROWS)
    return dataclasses.replace(stream, cursor=np.int32(cursor + number)), prompts


def test_the_likeliest_kept_sample_is_the_last_of_its_group():
    logp = {}

    def rank(params, rollouts):
        mask = np.asarray(rollouts.token_mask)
        first = np.asarray(rollouts.completion_tokens)[..., :1]
        logp["candidates"] = mask.sum()
        return np.where(mask, -first.astype(float), 0)  # the smaller its first token

    again = experiencer(rank)
    experience = after(no_experience(6, STEPS, ROWS), judged([[1, 0, 1, 0], [0, 1, 0, 0]], [9, 3]))
    experience = experience._replace(started=np.asarray(True))
    stream, prompts = again.select(fresh, make_stream(experience), 1)
    assert prompts.ordinal.tolist() == [0, 1, FIRST_ORDINAL, FIRST_ORDINAL + 1]
    assert sorted(prompts.row.tolist()[2:]) == [3, 9]
    assert int(stream.cursor) == 2
    drawn = tiny.rollouts(np.zeros((4, 4)), STEPS, seed=3)
    drawn = dataclasses.replace(drawn, ordinal=prompts.ordinal, row=prompts.row, rewards={})
    mixed = again.mix({}, stream, drawn)
    replayed = np.asarray(mixed.fields[REPLAYED])
    assert replayed.sum() == 2
    assert replayed[2:, -1].all()
    for place in (2, 3):
        same_row = np.flatnonzero(experience.row == prompts.row[place])
        best = same_row[np.argmin(experience.tokens[same_row, 0])]
        mask = np.asarray(mixed.token_mask)[place, -1]
        np.testing.assert_array_equal(mask, ~np.isnan(experience.logp[best]))
        np.testing.assert_array_equal(mixed.completion_tokens[place, -1], experience.tokens[best])
        logp = np.asarray(mixed.behavior_logp)[place, -1]
        np.testing.assert_array_equal(logp, np.where(mask, experience.logp[best], 0))
    for name in ("completion_tokens", "token_mask", "behavior_logp"):
        np.testing.assert_array_equal(getattr(mixed, name)[:2], getattr(drawn, name)[:2])
        np.testing.assert_array_equal(getattr(mixed, name)[2:, :3], getattr(drawn, name)[2:, :3])
    _, prompts = again.select(fresh, stream, 2)
    assert prompts.ordinal.tolist()[2:] == [FIRST_ORDINAL + 2, FIRST_ORDINAL + 3]


def test_text_that_was_forced_into_a_sample_comes_again_and_is_not_trained_on():
    rollouts_before = judged([[1, 0, 1, 0]], [9])
    mask = np.array([True, True, False, True, False])  # one token forced, one behind the end
    tokens, logp = np.arange(2, 2 + STEPS, dtype=np.int32), np.full(STEPS, -0.5, np.float32)
    forced = {"token_mask": mask, "completion_tokens": tokens, "behavior_logp": logp * mask}
    arrays = {name: np.array(getattr(rollouts_before, name)) for name in forced}
    for name, value in forced.items():
        arrays[name][0, 2] = value
    experience = after(
        no_experience(6, STEPS, ROWS), dataclasses.replace(rollouts_before, **arrays)
    )
    places = []

    def rank(params, rollouts):  # what a token costs that nobody drew does not count
        places.append(np.asarray(rollouts.token_mask)[0])
        return np.where(rollouts.completion_tokens == tokens, np.where(mask, -0.1, -99), -5)

    again = experiencer(rank)
    drawn = tiny.rollouts(np.zeros((1, 4)), STEPS, seed=3)
    drawn = dataclasses.replace(
        drawn, ordinal=np.array([FIRST_ORDINAL]), row=np.array([9]), rewards={}
    )
    mixed = again.mix({}, make_stream(experience), drawn)
    assert mask.tolist() in places[0].tolist()
    for name, value in forced.items():
        np.testing.assert_array_equal(getattr(mixed, name)[0, -1], value)


def test_without_experience_a_step_is_that_of_the_stream():
    again = experiencer(lambda params, rollouts: pytest.fail("there is nothing to rank"))
    empty = make_stream(no_experience(6, STEPS, ROWS)._replace(started=np.asarray(True)))
    plain_stream, plain_prompts = fresh(empty, 0, 4)
    stream, prompts = again.select(fresh, empty, 0)
    assert stream.cursor == plain_stream.cursor
    np.testing.assert_array_equal(prompts.prompt_tokens, plain_prompts.prompt_tokens)
    drawn = dataclasses.replace(tiny.rollouts(np.zeros((4, 4)), STEPS), ordinal=prompts.ordinal)
    mixed = again.mix({}, stream, drawn)
    assert not np.asarray(mixed.fields[REPLAYED]).any()
    np.testing.assert_array_equal(mixed.completion_tokens, drawn.completion_tokens)


def test_experience_begins_once_a_step_is_good_enough_and_does_not_end():
    again = experiencer(lambda params, rollouts: np.zeros(rollouts.token_mask.shape), start=0.5)
    stream = make_stream(no_experience(6, STEPS, ROWS))
    states = []
    for step, rewards in enumerate(([[1, 0, 0, 0]], [[1, 0, 1, 0]], [[0, 0, 0, 0]])):
        stream, metrics = again.observe(stream, judged(rewards, [step], step=step))
        assert stream.waiting.experience is not None
        states.append(bool(stream.waiting.experience.started))
        rows = finalise(metrics)["experience/rows"]
    assert states == [False, True, True]
    assert rows == 2  # the third has no right sample


@pytest.mark.parametrize("prompts", [3, 7, 8, 768])
def test_the_share_that_a_message_gives_is_one_prompt(prompts):
    rollout = RolloutKeys(
        prompts_per_step=prompts, group_size=4, max_prompt_tokens=8, max_completion_tokens=8
    )
    with pytest.raises(InputError, match="that is no whole prompt") as caught:
        refuse(ExperienceKeys(share=0.9 / prompts), rollout, [])
    share = float(re.findall("set it to (.*) or more", str(caught.value))[0])
    refuse(ExperienceKeys(share=share), rollout, [])
    assert num_groups(share, prompts) == 1
