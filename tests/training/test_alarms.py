"""Warnings of a metric history: when each begins, that it is said once, and when it clears."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxgrpo.training.records import alarms
from jaxgrpo.training.records.alarms import RULES, replay, see


def lines(metric: str, values: list[Any], start: int = 1) -> list[dict[str, Any]]:
    return [{"step": start + i, metric: value} for i, value in enumerate(values)]


def raised_alarms(history: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(alarm.name, alarm.step) for alarm in replay(history)[1]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_threshold_is_held_against_the_mean_of_its_steps(rule):
    metric = rule.metric.replace("*", "mine")
    name = f"{rule.name} mine" if "*" in rule.metric else rule.name
    above = rule.above + 1e-3 if rule.above < 1 else rule.above * 1.01
    assert name in dict(raised_alarms(lines(metric, [above] * rule.steps)))
    assert name not in dict(raised_alarms(lines(metric, [rule.above] * 10)))
    (alarm,) = [a for a in replay(lines(metric, [above] * 9))[1] if a.name == name]
    assert alarm.step == rule.steps
    assert metric in alarm.text
    assert f"above {rule.above:g}" in alarm.text
    assert alarm.text.endswith(rule.remedy)


def test_weights_that_leave_are_seen_in_the_step_they_leave_in():
    fine = {"weights/norm": 5.0, "weights/growth": 10.0}
    assert alarms.weights_problem(fine) is None
    left = alarms.weights_problem(fine | {"weights/growth": 2e5, "weights/norm": 1e6})
    assert left == "one update made the weights 2e+05 times as large (weights/norm = 1e+06)"
    for value in (math.nan, math.inf):
        problem = alarms.weights_problem({"weights/norm": value, "weights/growth": value})
        assert problem is not None
        assert problem.startswith("an update left weights that are not finite (weights/norm = ")


def test_a_warning_names_cause_metric_and_remedy_on_one_line():
    (alarm,) = replay(lines("groups/all_fail", [1.0, 0.95, 0.99]))[1]
    assert alarm.text == (
        "in 98% of groups every sample fails alike: there is nothing to learn from "
        "(groups/all_fail = 0.98, above 0.9 over 3 steps): read samples/: does the model see its "
        "format, does the reward accept a right answer? Else take easier prompts, a larger "
        "rollout.group_size or a denser reward"
    )


def test_one_odd_step_raises_nothing():
    assert raised_alarms(lines("completions/clipped_ratio", [0.1, 0.9, 0.1, 0.2, 0.9, 0.2])) == []


def test_a_warning_is_said_once_until_it_clears_and_then_again():
    history = lines("completions/clipped_ratio", [0.6] * 5 + [0.48] * 5 + [0.1] * 3 + [0.6] * 3)
    # 0.48 is under the threshold of 0.5 but not under nine tenths of it.
    assert raised_alarms(history) == [("truncated", 3), ("truncated", 16)]
    assert alarms.count(replay(history)[1]) == {"truncated": 2}


def test_what_says_the_same_in_weaker_words_stays_unsaid():
    none_ends = lines("completions/clipped_ratio", [1.0] * 6)
    assert raised_alarms(none_ends) == [("no end", 3)]
    failing = [
        {**line, "frac_reward_zero_std": 1.0} for line in lines("groups/all_fail", [1.0] * 4)
    ]
    assert raised_alarms(failing) == [("all fail", 3)]
    half = {"groups/all_fail": 0.5, "groups/all_pass": 0.45, "frac_reward_zero_std": 0.95}
    assert raised_alarms([{"step": step, **half} for step in (1, 2, 3)]) == [("flat", 3)]


def test_rewards_that_cannot_score_are_told_apart():
    row = {"rewards/judge/unscored": 0.2, "rewards/format/unscored": 0.0}
    history = [{"step": step, **row} for step in (1, 2, 3)]
    state, (alarm,) = replay(history)
    assert alarm.name == "unscored judge"
    assert alarm.text.startswith("the reward judge could not score 20% of completions")
    assert state.active == {"unscored judge"}


def test_a_run_in_which_no_sample_is_scored_is_told_that_nothing_was_learned_and_what_helps():
    row = {
        "rewards/sums/unscored": 0.5,
        "rewards/words/unscored": 0.5,
        "frac_reward_zero_std": None,
        "skipped_updates/no_live_sample": 1.0,
    }
    state, raised = replay([{"step": step, **row} for step in (1, 2, 3)])
    assert state.active == {"unscored sums", "unscored words", "no update"}
    assert all('recipe = "like_trl" or the part sum_scored' in alarm.text for alarm in raised)
    # A run that has it is told the same.
    assert sum("with it nothing is wrong" in alarm.text for alarm in raised) == 2
    flat = row | {"frac_reward_zero_std": 1.0}
    assert "no update" not in replay([{"step": step, **flat} for step in (1, 2, 3)])[0].active


def test_rewards_that_sign_refuses_are_said_at_once_with_the_option_that_helps():
    _, (alarm,) = replay(lines("sign/refused", [0.25, 0.25]))
    assert (alarm.name, alarm.step) == ("refused sign", 1)
    assert alarm.text.startswith("sign left out 0.25 of the samples: their reward is neither 0 nor")
    assert "give its option threshold" in alarm.text
    assert raised_alarms(lines("sign/refused", [0.0, 0.0])) == []


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, "absent"])
def test_a_step_without_the_number_neither_raises_nor_clears(missing):
    history = lines("kl", [2.0, missing, 2.0, 2.0, 2.0, missing, 2.0])
    history = [{k: v for k, v in line.items() if v != "absent"} for line in history]
    assert raised_alarms(history) == [("kl", 5)]
    assert replay(history)[0].active == {"kl"}


def evaluated(rewards: list[float], accuracies: dict[int, float]) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = [
        {"step": step, "reward": reward} for step, reward in enumerate(rewards, start=1)
    ]
    history.insert(0, {"step": 0})
    for step, accuracy in accuracies.items():
        history[step]["eval/accuracy"] = accuracy
    return history


RISING = [0.1, 0.12, 0.11, 0.13, 0.12, 0.3, 0.4, 0.5, 0.52, 0.51, 0.6, 0.62]
FLAT = [0.1, 0.12, 0.11, 0.13, 0.12, 0.1, 0.13, 0.11, 0.12, 0.1, 0.13, 0.12]


def test_an_evaluation_that_falls_while_reward_rises_is_said():
    (alarm,) = replay(evaluated(RISING, {0: 0.5, 6: 0.48, 12: 0.3}))[1]
    assert (alarm.name, alarm.step) == ("evaluation falls", 12)

    # The first five steps earned 0.116 in the mean, the last five 0.55.
    assert "eval/accuracy = 0.300, 0.500 at step 0; reward up by 0.434" in alarm.text


@pytest.mark.parametrize(
    ("rewards", "accuracies"),
    [
        (FLAT, {0: 0.5, 12: 0.3}),  # reward stays
        (RISING, {0: 0.5, 12: 0.46}),  # within the noise of an evaluation
        (RISING, {0: 0.3, 12: 0.5}),  # both rise
        (RISING[:2], {0: 0.5, 2: 0.1}),  # too few steps to say
    ],
)
def test_an_evaluation_alone_or_a_reward_alone_raises_nothing(rewards, accuracies):
    assert raised_alarms(evaluated(rewards, accuracies)) == []


def test_a_fall_of_the_evaluation_clears_when_it_recovers():
    history = evaluated(RISING + [0.65] * 4, {0: 0.5, 12: 0.3, 16: 0.5})
    state, (alarm,) = replay(history)
    assert alarm.step == 12
    assert state.active == frozenset()
    assert replay(history[:15])[0].active == {"evaluation falls"}


def agreeing(shares: list[float], accuracies: dict[int, float]) -> list[dict[str, Any]]:
    history = evaluated([0.1] * len(shares), accuracies)
    for line, share in zip(history[1:], shares, strict=True):
        line["consensus/agreement"] = share
    return history


GROWING = [0.4, 0.42, 0.38, 0.4, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.8, 0.85]


def test_samples_that_agree_more_and_are_right_no_more_often_drift():
    history = agreeing(GROWING, {0: 0.5, 6: 0.52, 12: 0.5})
    (alarm,) = replay(history)[1]
    assert (alarm.name, alarm.step) == ("consensus drifts", 12)
    assert "from 0.400 to 0.780" in alarm.text
    assert "eval/accuracy = 0.500, 0.500 at step 0" in alarm.text


@pytest.mark.parametrize(
    ("shares", "accuracies"),
    [
        (GROWING, {0: 0.5, 12: 0.6}),  # and are right more often
        ([0.4] * 12, {0: 0.5, 12: 0.5}),  # they agree no more
        (GROWING[:4], {0: 0.5, 4: 0.4}),  # too few steps to say
        (GROWING, {12: 0.5}),  # nothing is known of the base
    ],
)
def test_agreement_alone_is_no_drift(shares, accuracies):
    assert raised_alarms(agreeing(shares, accuracies)) == []


def measured(step: int, **values: tuple[float, float, float]) -> dict[str, Any]:
    """A line with an evaluation: pass_16=(value, low, high)."""
    line: dict[str, Any] = {"step": step, "eval/accuracy": 0.5}
    for name, numbers in values.items():
        metric = "eval/" + name.replace("_", "@")
        names = (metric, f"{metric}/low", f"{metric}/high")
        line |= dict(zip(names, numbers, strict=True))
    return line


BASE = measured(0, pass_1=(0.3, 0.25, 0.35), pass_16=(0.8, 0.75, 0.85), pass_64=(0.9, 0.88, 0.93))


def test_pass_at_16_below_the_base_beyond_both_intervals_is_said_with_a_remedy():
    fallen = measured(
        9, pass_1=(0.6, 0.5, 0.7), pass_16=(0.7, 0.65, 0.74), pass_64=(0.9, 0.88, 0.93)
    )
    (alarm,) = replay([BASE, {"step": 1}, fallen])[1]
    assert (alarm.name, alarm.step) == ("pass@k below base", 9)
    assert "eval/pass@16 = 0.700, 0.800 at step 0" in alarm.text
    assert "passk, darling, alpha_dpg" in alarm.text
    assert "pass@k below base" in alarms.NAMES


@pytest.mark.parametrize(
    "values",
    [
        {"pass_16": (0.74, 0.69, 0.75)},  # the intervals touch
        {"pass_16": (0.9, 0.85, 0.95)},
        {"pass_16": (0.8, 0.75, 0.85), "pass_64": (0.1, 0.05, 0.2)},  # 16 is what counts
        {"pass_4": (0.1, 0.0, 0.2)},  # the base was not asked for it
        {},
    ],
)
def test_a_pass_at_16_within_the_intervals_is_no_fall(values):
    assert raised_alarms([BASE, measured(9, **values)]) == []


def test_a_first_evaluation_after_some_steps_is_not_taken_for_the_base():
    late = {**BASE, "step": 5}
    assert raised_alarms([late, measured(9, pass_16=(0.1, 0.0, 0.2))]) == []


def test_where_16_is_not_evaluated_the_largest_k_counts():
    history = [
        measured(0, pass_1=(0.5, 0.4, 0.6), pass_4=(0.7, 0.6, 0.8)),
        measured(5, pass_1=(0.5, 0.4, 0.6), pass_4=(0.4, 0.3, 0.5)),
    ]
    assert raised_alarms(history) == [("pass@k below base", 5)]
    assert raised_alarms([{**line, "eval/pass@4/high": None} for line in history]) == []


def test_a_fall_below_the_base_holds_between_evaluations_and_clears_when_it_recovers():
    fallen = {"pass_16": (0.7, 0.65, 0.74)}
    history = [BASE, measured(4, **fallen), {"step": 5}, measured(6, **fallen)]
    state, alarms_given = replay(history)
    assert [alarm.step for alarm in alarms_given] == [4]
    assert state.active == {"pass@k below base"}
    assert see(state, measured(8, pass_16=(0.8, 0.75, 0.85)))[0].active == frozenset()


def test_seeing_line_by_line_is_replaying_and_changes_no_state_given():
    history = evaluated(RISING, {0: 0.5, 12: 0.3})
    for line in history:
        line |= {"completions/clipped_ratio": 0.7}
    state, begun = alarms.State(), []
    for line in history:
        before = state
        state, new = see(state, line)
        assert see(before, line) == (state, new)
        begun += new
    assert (state, begun) == replay(history)


def test_a_resumed_history_goes_on_without_repeating():
    history = lines("completions/clipped_ratio", [0.7] * 8)
    state, first = replay(history[:5])
    for line in history[5:]:
        state, more = see(state, line)
        assert more == ()
    assert len(first) == 1


def test_what_is_remembered_does_not_grow_with_the_run():
    state, _ = replay(lines("reward", [0.1] * 1000))
    assert len(state.recent) <= 10


def test_every_rule_is_explained_in_the_documentation(repository):
    text = (repository / "docs" / "metrics.md").read_text()
    for name in alarms.NAMES:
        assert f"| {name} |" in text
    for rule in RULES:
        assert f"`{rule.metric.replace('*', 'NAME')}` > {rule.above:g}" in text
