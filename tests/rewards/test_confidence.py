"""Rewards for stated confidences: what RLCR adds up, and that calibration is what pays most."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import small_run

from jaxgrpo import rewards
from jaxgrpo.advantages import evaluate
from jaxgrpo.config import files
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.rewards import RewardError

RIGHT, WRONG = "6*7=42 42", "6*7=41 41"


def stating(text, value):
    return f"{text}<confidence>{value}</confidence>"


def scores(name, *completions, answer="42"):
    options = {} if name == "confidence_format" else {"scorer": "arithmetic"}
    reward: Any = rewards.build(name, **options)
    return reward(completions=list(completions), answer=[answer] * len(completions))


def test_a_right_answer_pays_by_its_confidence_and_a_wrong_one_by_its_doubt():
    completions = [stating(text, q) for text in (RIGHT, WRONG) for q in (0, 0.25, 1)]
    c, q = np.repeat([1.0, 0.0], 3), np.tile([0, 0.25, 1], 2)
    assert scores("accuracy", *completions) == c.tolist()
    np.testing.assert_allclose(scores("brier", *completions), 1 - (c - q) ** 2)
    assert scores("confidence_format", *completions) == [1] * 6


@pytest.mark.parametrize(
    "text",
    [
        RIGHT,
        stating(RIGHT, "high"),
        stating(RIGHT, 1.5),
        stating("  ", 1),
        stating(RIGHT, 1) + " and so on",
        stating(stating(RIGHT, 1), 0),
        f"{RIGHT}<confidence>1",
        f"<confidence>1</confidence>{RIGHT}",
    ],
)
def test_without_the_form_all_three_are_0(text):
    for name in ("accuracy", "brier", "confidence_format"):
        assert scores(name, text) == [0.0]


def test_what_the_scorer_cannot_score_is_not_scored():
    text = stating("#### 4", 0.5)
    for name in ("accuracy", "brier"):
        assert rewards.build(name)(completions=[text, "4"], answer=["none"] * 2) == [None, 0.0]


def test_messages_are_read_by_their_last_text():
    messages = [{"role": "assistant", "content": stating(RIGHT, 1)}]
    assert scores("brier", messages) == [1.0]


def test_an_unknown_scorer_is_refused_with_the_nearest():
    with pytest.raises(RewardError, match=r"rewards\.brier: unknown scorer 'arithmatic': did you"):
        rewards.build("brier", scorer="arithmatic")


@pytest.mark.slow
def test_the_recipe_finds_the_rewards_and_weights_that_its_config_names(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = files.load("rlcr")
    weights = {reward.title: reward.weight for reward in config.rewards}
    assert weights == {"accuracy": 0.5, "brier": 0.5, "format": 0.5}  # the recipe's own
    completions = [stating(RIGHT, 0.9), stating(WRONG, 0.9), stating(WRONG, 0.1), RIGHT]
    built = {reward.title: rewards.build(reward.use, **reward.options) for reward in config.rewards}
    scores_by_reward = {
        n: [f(completions=completions, answer=["42"] * 4)] for n, f in built.items()
    }
    value, _ = evaluate("rlcr", scores_by_reward)
    total = np.array([1 + 0.99 + 1, 0.19 + 1, 0.99 + 1, 0]) / 2
    np.testing.assert_allclose(value[0], total - total.mean(), rtol=1e-5)


@pytest.mark.full
def test_the_recipe_teaches_the_base_to_be_right_and_to_know_when(tmp_path, python, environment):
    variables = environment(XLA_FLAGS="")
    for words in ("make-base confidence runs/confident-base", "train rlcr"):
        process = small_run.command(python, *words.split(), cwd=tmp_path, env=variables)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
    summary = json.loads((tmp_path / "runs" / "rlcr" / "summary.json").read_text())
    base, trained = summary["base"], summary["trained"]
    assert base["brier"] > 0.3  # it states 0.1, 0.5 and 0.9 nearly alike, whatever the problem
    assert trained["accuracy"] > base["accuracy"]
    # Who adds well and knows what is noise: accuracy 0.75, Brier score 0.125, AUROC 0.83.
    assert trained["brier"] < 0.16
    assert base["auroc"] < 0.6
    assert trained["auroc"] > 0.75


def test_half_of_the_problems_are_noise_that_the_prompt_does_not_tell():
    for split, count in (("train", 3072), ("test", 256)):
        rows = tasks.load(f"task:confidence:{split}")
        more = {"+": [], "~": []}
        for row in rows:
            first, sign, second = re.split("([+~])", row["prompt"].rstrip("="))
            more[sign].append(int(row["answer"]) - int(first) - int(second))
        assert set(more["+"]) == {0}
        assert set(more["~"]) == {0, 1}
        bound = 3 * 0.5 * count**0.5  # three deviations of `count` coins
        assert abs(len(more["~"]) - count / 2) < bound
        assert abs(sum(more["~"]) - len(more["~"]) / 2) < bound
        assert rows == tasks.load(f"task:confidence:{split}")


def test_the_base_of_the_task_states_confidences_that_say_next_to_nothing():
    task = tasks.find("confidence")
    tokenizer = character_tokenizer(task.alphabet)
    corpus = task.corpus()
    assert sum(text.probability for text in corpus) == pytest.approx(1)
    texts = [corpus[place].solution for place in range(0, len(corpus), 997)]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert len(ids) < 32  # rollout.max_completion_tokens of configs/rlcr.toml
    assert scores("confidence_format", *texts) == [1.0] * len(texts)
    stated = {rewards.stated_confidence(text) for text in texts}
    assert stated == {0.1, 0.5, 0.9}
    for sign in "+~":
        texts = [text for text in corpus if sign in text.prompt]
        confidences = [rewards.stated_confidence(text.solution) or 0 for text in texts]
        mean = np.average(confidences, weights=[text.probability for text in texts])
        assert mean == pytest.approx({"+": 0.54, "~": 0.5}[sign])
    assert task.score([corpus[0].solution, "1+1=2 3"], ["0", "3"])[1] == 1.0
