"""Methods of papers train: runs of seconds, whose parameters move and whose numbers are finite."""

from __future__ import annotations

import math

import pytest
import small_run

from jaxgrpo.training import loop

pytestmark = [pytest.mark.slow, pytest.mark.full]

LOGGED = {"arithmetic": 0, "digits": 0}
"""Rewards of weight 0: the method has its own."""
TWICE = {"train.num_iterations": 2, "train.minibatches": 2}
"""Several updates of a step's samples, so that ratios leave 1."""
SUM, MEAN = {"use": "sequence_sum"}, {"use": "sequence_mean"}
RUNS = {
    "ce_gppo": {"loss.surrogate": {"use": "ce_gppo"}, **TWICE},
    "off_policy_mask": {"loss.surrogate": {"use": "off_policy_mask", "threshold": 1e-4}, **TWICE},
    "topr": {"loss.surrogate": {"use": "topr"}, "loss.reduction": SUM, **TWICE},
    "mirror_descent": {
        "loss.surrogate": {"use": "mirror_descent"},
        "loss.reduction": SUM,
        "recipe": "dr_grpo",
        **TWICE,
    },
    "clip_cov": {"loss.surrogate": {"use": "clip_cov", "share": 0.1, "least": 0.1}, **TWICE},
    "kl_cov": {"loss.surrogate": {"use": "kl_cov", "share": 0.1}, **TWICE},
    "rewards_as_labels": {
        "loss.surrogate": {"use": "rewards_as_labels"},
        "loss.reduction": SUM,
        "recipe": {"use": "sign", "threshold": 0.15},
        **TWICE,
    },
    "dcpo": {
        "loss.surrogate": {"use": "dynamic_clip"},
        "loss.reduction": MEAN,
        "recipe": "dcpo_smooth",
        **TWICE,
    },
    "top_entropy": {"recipe": "top_entropy"},
    "optimal_token_baseline": {"recipe": "optimal_token_baseline"},
    "intuitor": {"recipe": {"use": "intuitor", "weights": LOGGED}},
    "passk": {"recipe": {"use": "passk", "k": 2, "std": True, "threshold": 0.15}},
    "rlpr": {"recipe": {"use": "rlpr", "weights": LOGGED}, "data.answer_prefix": " "},
    "verifree": {"recipe": {"use": "verifree", "weights": LOGGED}, "data.answer_prefix": " "},
    "nover": {"recipe": {"use": "nover", "weights": LOGGED}, "data.answer_prefix": " "},
}
EXPECTED = {
    "ce_gppo": "clip_ratio/region_mean",
    "off_policy_mask": "off_policy/masked",
    "clip_cov": "clip_ratio/covariance_mean",
    "kl_cov": "clip_ratio/covariance_mean",
    "dcpo": "smooth_standardise/visits",
    "top_entropy": "keep_top_entropy/entropy",
    "optimal_token_baseline": "subtract_optimal_token_baseline/spread",
    "intuitor": "score_mean/mean",
    "rlpr": "answer_probability/without_thought",
    "verifree": "train_on_answers/room",
    "nover": "perplexity_rank/perplexity",
}
"""A metric of the method that is above 0."""


@pytest.mark.parametrize("name", RUNS)
def test_the_method_trains(tmp_path, name):
    run = loop.train(small_run.config(tmp_path / "r", **{"train.steps": 2, **RUNS[name]}))
    lines = small_run.metrics(run.path)
    assert len(lines) == 2
    for line in lines:
        numbers = [value for value in line.values() if isinstance(value, float)]
        assert all(map(math.isfinite, numbers))
        assert line["grad_norm"] > 0
        assert line["skipped_updates/not_finite"] == 0
    if name in EXPECTED:
        assert lines[-1][EXPECTED[name]] > 0
