"""Tables and verdicts from numbers that were written down, without a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxgrpo.experiments.compare import numbers, report, results
from jaxgrpo.experiments.compare.experiment import Experiment
from jaxgrpo.experiments.compare.results import Outcome

SEEDS = tuple(range(7))
NOISE = np.array([0.01, -0.02, 0.0, 0.02, -0.01, 0.03, -0.03])


def compared(values: dict[str, dict[float, Any]], **changes: Any):
    """(experiment, outcomes) from arm -> rate -> one number per seed, tuning seeds last."""
    rates = {arm: tuple(by_rate) for arm, by_rate in values.items()}
    experiment = Experiment(
        base="none",
        dir="none",
        arms={arm: {} for arm in values},
        control="control",
        learning_rates=rates["control"],
        own_rates=rates,
        seeds=SEEDS,
        **{"metric": "m", **changes},
    )
    seeds = (*SEEDS, *experiment.tuning_seeds)
    passes, curve = np.array([0.5, 0.75]), {"groups/all_fail": np.zeros(3)}
    outcomes = {
        (arm, rate): {
            seed: Outcome(None, {"m": float(value)}, curve, passes, passes, {})  # pyright: ignore
            for seed, value in zip(seeds, row, strict=True)
        }
        for arm, by_rate in values.items()
        for rate, row in by_rate.items()
    }
    return experiment, outcomes


def best(experiment, outcomes):
    return {row.arm: row for row in results.at_best(experiment, outcomes)}


@pytest.mark.parametrize(
    ("better", "word", "opposite"), [("higher", "better", "worse"), ("lower", "worse", "better")]
)
def test_gains_losses_and_neither_are_told_in_the_same_words(better, word, opposite):
    values = {
        "control": {0.1: 0.5 + NOISE},
        "more": {0.1: 0.6 + NOISE},
        "less": {0.1: 0.4 + NOISE},
        "same": {0.1: 0.5 - NOISE},
    }
    experiment, outcomes = compared(values, better=better, tests=("more", "less"))
    rows = best(experiment, outcomes)
    assert {name: results.standing(experiment, rows[name]) for name in ("more", "less")} == {
        "more": word,
        "less": opposite,
    }
    # Two tested arms, both as far from 0 in every seed: 2 x 2 / 2^7.
    assert rows["more"].corrected == rows["less"].corrected == 4 / 128
    assert rows["same"].p is None, "it was not to be tested"
    experiment, outcomes = compared(values, better=better, tests=("more", "less", "same"))
    first, second, third = report._answer(experiment, results.at_best(experiment, outcomes)).text
    assert first == (
        f"more against control: {word}. m differs by +0.100 (95% interval +0.100 to +0.100), "
        "corrected p = 0.047."
    )
    assert second == first.replace("more", "less").replace(word, opposite).replace("+", "-")
    assert third.startswith("same against control: no difference shown. m differs by +0.000")


def test_with_five_comparisons_nothing_can_be_shown_and_it_is_said():
    values = {"control": {0.1: NOISE}} | {f"a{i}": {0.1: NOISE + 9} for i in range(5)}
    experiment, outcomes = compared(values)
    rows = best(experiment, outcomes)
    assert {results.standing(experiment, rows[f"a{i}"]) for i in range(5)} == {
        "no difference shown"
    }
    sentences = report.describe_detectable(experiment)
    assert "no p below 0.016, and none below 0.078 corrected for 5 comparisons" in sentences
    assert "no difference can be shown, however large: take 8 seeds or more" in sentences


def test_rates_are_chosen_on_tuning_seeds_where_there_are_some():
    ahead, behind = np.append(NOISE + 0.9, [0.1, 0.1]), np.append(NOISE + 0.2, [0.8, 0.8])
    values = {"control": {0.1: ahead, 0.2: behind}, "other": {0.1: behind, 0.2: ahead}}
    experiment, outcomes = compared(values, tuning_seeds=(7, 8))
    rows = best(experiment, outcomes)
    assert (rows["control"].rate, rows["other"].rate) == (0.2, 0.1)
    assert rows["control"].metric.value == pytest.approx(0.2), "of the seeds that count"
    without = {arm: {rate: v[:7] for rate, v in by.items()} for arm, by in values.items()}
    rows = best(*compared(without))
    assert (rows["control"].rate, rows["other"].rate) == (0.1, 0.2)
    rows = best(*compared(without, better="lower"))
    assert (rows["control"].rate, rows["other"].rate) == (0.2, 0.1)


def test_the_test_makes_the_choice_again_only_where_rates_are_the_control_s():
    random = np.random.default_rng(3)
    many = {rate: random.normal(size=7) for rate in (0.1, 0.2, 0.3)}
    single_rate = {0.1: random.normal(size=7)}
    for control, arm in ((many, {**many}), (single_rate, single_rate)):
        assert best(*compared({"control": control, "arm": arm}))["arm"].p == 1
    turned = {rate: -many[rate] for rate in (0.3, 0.1, 0.2)}
    sorted_rates = {rate: turned[rate] for rate in many}
    p = [best(*compared({"control": many, "arm": arm}))["arm"].p for arm in (turned, sorted_rates)]
    assert p[0] == p[1] is not None, "the order of rates does not count"
    tuned = {rate: np.append(values, [rate == 0.2]) for rate, values in many.items()}
    alone = {0.1: np.append(single_rate[0.1], [0.0])}
    rows = best(*compared({"control": tuned, "arm": alone}, tuning_seeds=(7,)))
    difference = single_rate[0.1] - many[0.2]
    signs = np.array(np.meshgrid(*[[1, -1]] * 7)).reshape(7, -1).T
    expected = (abs(signs @ difference) >= abs(difference.sum()) - 1e-9).mean()
    assert rows["arm"].p == pytest.approx(expected)


def test_rates_of_its_own_chosen_on_the_judged_seeds_give_no_p_and_it_is_said():
    values = {
        "control": {0.1: NOISE},
        "own": {0.1: NOISE, 0.2: NOISE + 9, 0.3: NOISE},
        "one": {0.4: NOISE + 9},
    }
    experiment, outcomes = compared(values)
    rows = best(experiment, outcomes)
    assert (rows["own"].p, rows["own"].corrected) == (None, None)
    assert rows["one"].corrected == rows["one"].p == 2 / 2**7, "neither has a choice"
    table = results.at_best(experiment, outcomes)
    own_rates, shared_rates = report._answer(experiment, table).text
    assert own_rates.startswith("own against control: not tested. m differs by +9.000")
    assert own_rates.endswith(report.NO_P)
    assert shared_rates.startswith("one against control: better.")
    assert report.format_rows(experiment, table)[2][-2:] == ["–", "–"]
    sentences = report.describe_detectable(experiment)
    assert "corrected for 1 comparison (one with control)" in sentences
    assert "own: No p: " in sentences
    only, _ = compared(values, tests=("own",))
    assert report.describe_detectable(only) == f"own: {report.NO_P}"


def test_above_twelve_seeds_exchanges_are_said_to_be_drawn():
    experiment, _ = compared({"control": {0.1: NOISE}, "arm": {0.1: NOISE}})
    assert "two-sided, exact;" in report._how_chosen(experiment)
    many = dataclasses.replace(experiment, seeds=tuple(range(13)))
    assert "two-sided, 20000 drawn exchanges;" in report._how_chosen(many)


def test_a_table_of_a_rate_that_the_control_lacks_shows_no_difference():
    values = {"control": {0.1: NOISE}, "other": {0.1: NOISE, 0.2: NOISE + 1}}
    experiment, outcomes = compared(values)
    (row,) = results.at_rate(experiment, outcomes, 0.2)
    assert (row.arm, row.difference, row.p) == ("other", None, None)
    assert [row.arm for row in results.at_rate(experiment, outcomes, 0.1)] == [
        "control",
        "other",
    ]


def with_distance(better: str, drop: tuple[str, ...] = ()):
    """Two arms of seven seeds; the second gains twice as much and goes four times as far."""
    experiment, outcomes = compared(
        {"control": {0.1: NOISE}, "arm": {0.1: NOISE}}, metric="eval/ece", better=better
    )
    for (arm, _), by_seed in outcomes.items():
        times = 1 + (arm == "arm")
        for seed, run in by_seed.items():
            gain = times * (0.2 + NOISE[seed])
            values = {"base/ece": 0.5, "eval/ece": 0.5 + gain, "eval/kl_to_base": times**2 / 4}
            run.numbers.clear()
            run.numbers.update({name: v for name, v in values.items() if name not in drop})
    return experiment, report.best_runs(experiment, outcomes)


@pytest.mark.parametrize(("better", "sign"), [("higher", 1), ("lower", -1)])
def test_gain_is_set_against_the_distance_from_the_base(better, sign):
    experiment, runs = with_distance(better)
    points = numbers.distances(experiment, runs)
    gains = {arm: sign * times * (0.2 + NOISE) for arm, times in (("control", 1), ("arm", 2))}
    for arm, distance in (("control", 0.25), ("arm", 1.0)):
        np.testing.assert_allclose(points[arm], [[distance] * 7, gains[arm]])
    axes = Figure().add_subplot()
    report.distance(axes, points)
    places = [np.stack(line.get_data(), axis=1) for line in axes.lines]
    assert [len(shown) for shown in places] == [7, 1, 7, 1]
    np.testing.assert_allclose(places[3][0], [1.0, sign * 0.4])


def test_the_table_of_distances_has_the_gain_per_nat_and_intervals():
    experiment, runs = with_distance("higher")
    (section,) = report._distance_section(experiment.metric, numbers.distances(experiment, runs))
    gain = 0.2 + NOISE
    half = 2.446912 * gain.std(ddof=1) / 7**0.5  # Student's t with 6 degrees of freedom
    interval = f"{0.2 - half:+.3f} to {0.2 + half:+.3f}"
    distance = ("0.250", "0.250 to 0.250")
    assert section.rows[1] == ["control", "+0.200", interval, *distance, "0.800"]
    assert section.rows[2][-1] == "0.400"
    assert report._distance_section(experiment.metric, {}) == []


@pytest.mark.parametrize("name", ["eval/kl_to_base", "base/ece"])
def test_without_a_distance_or_a_base_nothing_is_said_of_it(name):
    experiment, runs = with_distance("lower", drop=(name,))
    assert numbers.distances(experiment, runs) == {}


def test_of_one_seed_there_is_no_interval_and_none_is_shown():
    values = {"control": {0.1: 0.5 + NOISE}, "arm": {0.1: 0.6 + NOISE}}
    experiment, outcomes = compared(values)
    alone = dataclasses.replace(experiment, seeds=(0,))
    table = results.at_best(alone, outcomes)
    (text,) = report._answer(alone, table).text
    assert text == (
        "arm against control: no difference shown. m differs by +0.100, corrected p = 1."
    )
    assert report.format_rows(alone, table)[2] == ["arm", "0.610", "–", "+0.100", "–", "1", "1"]
    assert report.describe_detectable(alone).startswith("1 seed: an exchange of labels")


def test_steps_without_a_scored_sample_count_in_no_share_of_groups():
    """Of 20 steps the first and the last two are shown."""
    nan = np.nan
    curves = [
        np.array([nan, 0.25, *[0.5] * 16, nan, nan]),
        np.array([0.75, 0.5, *[0.5] * 16, nan, nan]),
    ]
    runs = [
        Outcome(None, {}, dict.fromkeys(numbers.GROUPS, curve), *[np.zeros(1)] * 2, {})  # pyright: ignore
        for curve in curves
    ]
    shares = numbers.groups({"arm": runs})["arm"]["groups/mixed"]
    assert shares["first"] == pytest.approx((0.25 + 0.75 + 0.5) / 3)
    assert np.isnan(shares["last"])
    assert report._groups_section({"arm": runs}).rows[1] == ["arm", *["0.500, –"] * 4]
