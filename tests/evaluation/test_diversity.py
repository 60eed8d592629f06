"""Formats, distinct answers and stated confidences of samples, by hand."""

import numpy as np
import pytest

from jaxgrpo.evaluation.diversity import (
    distinct,
    find_collapse,
    find_format,
    format_metrics,
    stated_metrics,
)

FORMATS = {"code": r"```.*def", "tags": "<answer>", "number": r"^\d+$"}
CODE, TAGS, NUMBER, NONE = "```\ndef f", "so <answer>7</answer>", "7", "seven"


def test_the_first_format_that_is_found_counts_over_all_lines():
    texts = [CODE, TAGS, NUMBER, NONE, "", f"{TAGS}{CODE}", "7\n7"]
    formats = [find_format(text, FORMATS) for text in texts]
    assert formats == ["code", "tags", "number", "other", "other", "code", "other"]
    assert find_format(f"{TAGS}{CODE}", dict(reversed(FORMATS.items()))) == "tags"


def test_shares_accuracy_entropy_and_diversity_by_hand():
    texts = [[CODE, CODE, TAGS, TAGS], [CODE, CODE, CODE, CODE]]
    success = np.array([[True, False, True, True], [False] * 4])
    metrics = format_metrics(texts, success, FORMATS)
    assert metrics == {
        "format/code": 0.75,
        "format/code/accuracy": pytest.approx(1 / 6),
        "format/tags": 0.25,
        "format/tags/accuracy": 1.0,
        "format/number": 0.0,
        "format/other": 0.0,
        "format_entropy": pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25)),
        # Of the six pairs of the first prompt four differ, of the second none.
        "format_diversity": pytest.approx((4 / 6 + 0) / 2),
    }


def test_shares_sum_to_one_and_the_entropy_lies_between_one_format_and_all_alike():
    rng = np.random.default_rng(0)
    kinds = np.array([CODE, TAGS, NUMBER, NONE])
    texts = kinds[rng.integers(0, 4, (50, 8))].tolist()
    metrics = format_metrics(texts, np.zeros((50, 8), bool), FORMATS)
    assert sum(metrics[f"format/{name}"] for name in [*FORMATS, "other"]) == pytest.approx(1)
    assert 0 < metrics["format_entropy"] < np.log(4)
    evenly = format_metrics([kinds.tolist()], np.zeros((1, 4), bool), FORMATS)
    assert evenly["format_entropy"] == pytest.approx(np.log(4))
    assert evenly["format_diversity"] == 1
    alike = format_metrics([[CODE] * 4], np.zeros((1, 4), bool), FORMATS)
    assert alike["format_entropy"] == 0
    assert alike["format_diversity"] == 0


def test_names_of_formats_do_not_matter_to_entropy_and_diversity():
    texts = [[CODE, TAGS, TAGS, NONE], [NUMBER, NUMBER, CODE, TAGS]]
    success = np.zeros((2, 4), bool)
    renamed = {f"x{i}": pattern for i, pattern in enumerate(FORMATS.values())}
    named, anonymous = (format_metrics(texts, success, names) for names in (FORMATS, renamed))
    for name in ("format_entropy", "format_diversity"):
        assert named[name] == pytest.approx(anonymous[name])


def test_one_sample_per_prompt_says_nothing_of_diversity():
    assert "format_diversity" not in format_metrics([[CODE]], np.zeros((1, 1), bool), FORMATS)


def test_distinct_answers_are_counted_per_prompt_and_none_is_none():
    assert distinct([["7", "8", "7", None], ["1"] * 4, [None] * 4]) == pytest.approx(1)


def stating(*values):
    return [f"7 <confidence>{value}</confidence>" for value in values]


def test_stated_confidences_are_judged_where_they_can_be_read():
    texts = [stating(0.9, 0.5, "high"), [*stating(0.2), "7", *stating(1)]]
    success = np.array([[True, False, True], [False, True, False]])
    scored = np.array([[True, True, True], [True, True, False]])
    metrics = stated_metrics(texts, success, scored)
    assert metrics == {
        "confidence/stated": pytest.approx(4 / 6),
        "confidence/mean": pytest.approx((0.9 + 0.5 + 0.2 + 1) / 4),
        # The one that states 1 could not be scored: three are left.
        "brier": pytest.approx((0.1**2 + 0.5**2 + 0.2**2) / 3),
        "ece": pytest.approx((0.1 + 0.5 + 0.2) / 3),
        "auroc": pytest.approx(1),
    }


def test_texts_without_a_confidence_have_no_calibration():
    assert stated_metrics([["7", "0.9"]], np.zeros((1, 2), bool), np.ones((1, 2), bool)) == {}
    unread = stated_metrics([stating("high")], np.zeros((1, 1), bool), np.ones((1, 1), bool))
    assert unread == {}


def test_the_step_of_a_collapse_is_the_first_at_nine_tenths():
    def line(step, code, box, **more):
        shares = {"eval/format/code": code, "eval/format/box": box, "eval/format/other": None}
        return {"step": step, "eval/format/box/accuracy": 0.99, **shares, **more}

    history = [line(0, 0.6, 0.4), {"step": 1}, line(2, 0.3, 0.7), line(4, 0.1, 0.9), line(6, 0, 1)]
    assert find_collapse(history) == {"step": 4, "format": "box"}
    assert find_collapse(history[:3]) is None
    assert find_collapse([{"step": 0}]) is None
    assert find_collapse([line(0, 0.95, 0.05), *history[1:]]) is None  # the base wrote one format
