"""Advice follows from numbers, names them, and names only what there is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxgrpo.advantages import registry
from jaxgrpo.experiments.probe.advice import advise, advised_size
from jaxgrpo.rollout import policies


def group(measured, iid=0.5, low=-0.01, **changes) -> dict[str, Any]:
    gap = measured - iid
    defaults = {
        "measured": measured,
        "iid": iid,
        "gap": gap,
        "ci": (low, gap + 0.05),
        "all_fail": measured / 2,
        "all_pass": measured / 2,
        "live_groups_per_1000_samples": 100.0,
        "lucky": 0.0,
    }
    return {**defaults, **changes}


def numbers(**changes: Any) -> dict[str, Any]:
    """A probe of a model in middle difficulty, with nothing wrong; changes are whole parts."""
    defaults = {
        "success": {"rate": 0.5, "at_zero": 0.0, "at_one": 0.0, "unscored": 0.0},
        "pass_at": {1: {"value": 0.5}, 16: {"value": 0.9}},
        "degeneracy": {2: group(0.5), 4: group(0.1, 0.12), 8: group(0.05, 0.06)},
        "format": {"cut": 0.0},
        "calibration": None,
        "agreement": {"mean": 1e-6},
    }
    return {**defaults, **changes}


def advice_by_topic(probe) -> dict[str, list[str]]:
    sentences: dict[str, list[str]] = {}
    for item in advise(probe):
        sentences.setdefault(item.about, []).append(f"{item.says} because {item.why}")
    return sentences


NAN = float("nan")
HARD = numbers(
    success={"rate": 0.04, "at_zero": 0.8, "at_one": 0.0, "unscored": 0.2},
    pass_at={1: {"value": 0.04}, 16: {"value": 0.07}},
    degeneracy={
        2: group(0.97, 0.9, 0.05, all_fail=0.95, lucky=0.6),
        4: group(0.92, 0.8, 0.05, all_fail=0.9, lucky=0.5),
    },
    format={"cut": 0.7},
    calibration={"stated": 0.9, "ece": 0.3},
    agreement={"mean": 0.2},
)
EASY = numbers(
    success={"rate": 0.8, "at_zero": 0.0, "at_one": 0.5, "unscored": 0.0},
    degeneracy={2: group(0.7, 0.6, 0.05), 4: group(0.69, 0.4, 0.2, all_fail=0.4)},
)
SPREAD = numbers(degeneracy={2: group(0.5, 0.4, 0.05), 4: group(0.2, 0.12, 0.04)})
HOPELESS = numbers(
    success={"rate": 0.0, "at_zero": 1.0, "at_one": 0.0, "unscored": 0.0},
    pass_at={1: {"value": 0.0}, 16: {"value": 0.0}},
    degeneracy={2: group(1.0, 1.0, NAN, lucky=NAN), 4: group(1.0, 1.0, NAN, lucky=NAN)},
)
UNSURE = numbers(degeneracy={2: group(0.5, 0.4, -0.05), 4: group(0.2, 0.12, -0.1)})
EVERY = {
    "middle": numbers(),
    "hard": HARD,
    "easy": EASY,
    "spread": SPREAD,
    "hopeless": HOPELESS,
    "unsure": UNSURE,
}


def test_the_group_size_is_the_smallest_with_nine_tenths_of_the_live_groups_there_are():
    assert advised_size({2: group(0.8), 4: group(0.63), 8: group(0.6)}) == 4
    assert advised_size({2: group(0.8), 4: group(0.65), 8: group(0.6)}) == 8
    assert advised_size({2: group(0.5), 4: group(NAN)}) == 2
    assert "rollout.group_size = 4" in advice_by_topic(numbers())["group size"][0]
    assert "90% of groups of 4 are live" in advice_by_topic(numbers())["group size"][0]
    assert "no group size measured here" in advice_by_topic(HOPELESS)["group size"][0]
    assert "100% of prompts never succeed" in advice_by_topic(HOPELESS)["group size"][0]


@pytest.mark.parametrize(
    ("probe", "policy"),
    [
        (HARD, "difficulty_band"),
        (EASY, "no_positive_resampling"),
        (SPREAD, "spo_priority"),
        (numbers(), "no filter of prompts"),
        (UNSURE, "too wide to tell"),
    ],
)
def test_prompts_are_chosen_where_the_interval_of_the_gap_is_above_zero(probe, policy):
    assert policy in advice_by_topic(probe)["filter"][0]


def test_without_live_groups_of_any_size_no_method_is_named():
    assert [item.about for item in advise(HOPELESS)] == ["headroom", "group size"]
    nearly = {2: group(0.99, 0.98, all_fail=0.99), 4: group(0.96, 0.95, all_fail=0.96)}
    topics = [
        item.about for item in advise({**HOPELESS, "degeneracy": nearly, "format": {"cut": 0.9}})
    ]
    assert topics == ["health", "headroom", "group size"]
    some = {**nearly, 4: group(0.94, 0.93, all_fail=0.94)}
    assert "advantage" in advice_by_topic({**HOPELESS, "degeneracy": some})


def test_methods_that_keep_flat_groups_alive_are_named_where_many_all_fail():
    assert "advantage" not in advice_by_topic(SPREAD) or "`ema`" not in str(
        advice_by_topic(SPREAD)["advantage"]
    )
    (easy, *_) = advice_by_topic(EASY)["advantage"]
    assert "`sign`" in easy.partition("because")[0]
    (hard, *_) = advice_by_topic(HARD)["advantage"]
    assert "`ema`" in hard
    assert "`sign`" not in hard.partition("because")[0]  # there it is mostly noise


def test_what_is_wrong_with_the_samples_comes_first():
    topics = [item.about for item in advise(HARD)]
    assert topics[:3] == ["health"] * 3
    assert "health" not in topics[3:]
    texts = " ".join(advice_by_topic(HARD)["health"])
    assert "70% of completions are cut at the length limit" in texts
    assert "disagree by 0.2 nats per token" in texts
    assert "could not score 20%" in texts
    assert "health" not in advice_by_topic(numbers())
    assert "not finite" in str(advice_by_topic(numbers(agreement={"mean": NAN}))["health"])


def test_lucky_successes_small_groups_truncation_and_calibration_have_their_say():
    hard = str(advice_by_topic(HARD))
    for name in ("`dr_grpo`", "`mask_difficulty_band`", "`rloo`", "`mask_truncated`", "`rlcr`"):
        assert name in hard
        if name != "`rloo`":
            assert name not in str(advice_by_topic(numbers()))
    # (G - 1) / sqrt(G) with the deviation of n - 1, 1 - 1/G without.
    assert "its advantage is 1.50, without 0.75" in hard
    assert "expect little" in hard
    assert "something to amplify" in str(advice_by_topic(numbers()))


@pytest.mark.parametrize("name", EVERY)
def test_every_number_is_in_the_probe_and_every_name_exists(name):
    registered = {*registry.recipes, *registry.parts}
    for item in advise(EVERY[name]):
        assert item.numbers
        for path in item.numbers:
            at: Any = EVERY[name]
            for key in path.split("."):
                at = at[int(key) if key.isdigit() else key]
            assert at is not None
        assert set(re.findall(r"`(\w+)`", item.says + item.why)) <= registered
        for policy in re.findall(r'use = "(\w+)"', item.says):
            assert callable(getattr(policies, policy))
