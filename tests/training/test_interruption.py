"""`rollout.interrupt`: text forced into samples that have not ended, and no choice of theirs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import resuming
import small_run

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.rollout.stopping import make_interruption
from jaxgrpo.training import loop
from jaxgrpo.training.records import rollout_files

AFTER, TEXT = 3, "=7"
CHANGES = {"train.steps": 3, "run.rollouts_every": 1, "run.samples_every": 1}
INTERRUPT = {"rollout.interrupt": {"after": AFTER, "text": TEXT}}
TOKENIZER = character_tokenizer("0123456789+= ")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The rollouts of a first step with and without interruption, and the run with."""
    folder = tmp_path_factory.mktemp("interrupt")
    run = loop.train(small_run.config(folder / "with", **CHANGES, **INTERRUPT))
    plain = loop.train(small_run.config(folder / "without", **{**CHANGES, "train.steps": 1}))
    return run, *(
        rollout_files.load(path / "rollouts" / "00000001.safetensors")
        for path in (run.path, plain.path)
    )


@pytest.mark.full
def test_a_sample_goes_on_behind_the_text_which_is_not_its_choice(runs):
    run, interrupted, plain = runs
    ids = TOKENIZER(TEXT, add_special_tokens=False)["input_ids"]
    behind = slice(AFTER, AFTER + len(ids))
    lengths = plain.token_mask.sum(-1)
    counted = 0
    for place in np.ndindex(*lengths.shape):
        mask, tokens = interrupted.token_mask[place], interrupted.completion_tokens[place]
        np.testing.assert_array_equal(tokens[:AFTER], plain.completion_tokens[place][:AFTER])
        np.testing.assert_allclose(
            interrupted.behavior_logp[place][:AFTER], plain.behavior_logp[place][:AFTER], atol=1e-6
        )
        if lengths[place] <= AFTER and not plain.truncated[place]:
            assert mask.sum() == lengths[place]
            continue
        counted += 1
        assert tokens[behind].tolist() == ids
        assert mask[: behind.stop + 1].tolist() == [True] * AFTER + [False] * len(ids) + [True]
        assert (interrupted.behavior_logp[place][behind] == 0).all()
    assert 0 < counted < lengths.size
    lines = small_run.metrics(run.path)
    assert lines[0]["sampling/interrupted"] == pytest.approx(counted / lengths.size)
    for line in lines:  # sampler and trainer agree behind the text too
        assert line["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.full
def test_rewards_and_rows_hold_the_text(runs):
    run, *_ = runs
    rows = [
        json.loads(line)
        for line in (run.path / "samples" / "step_1.jsonl").read_text().splitlines()
    ]
    long = [row for row in rows if len(row["completion_ids"]) > AFTER]
    assert long
    for row in long:
        assert row["completion"][AFTER : AFTER + len(TEXT)] == TEXT
        expected = sum(c.isdigit() for c in row["completion"]) / len(row["completion"])
        assert row["rewards"]["digits"] == pytest.approx(expected)


@pytest.mark.full
def test_a_run_that_died_and_went_on_ends_as_another_and_evaluations_are_not_interrupted(
    runs, tmp_path
):
    changes = {"checkpoint.every": 1, "eval.data": "task:arithmetic:test", "eval.prompts": 4}
    changes |= {"eval.samples": 4}
    config = small_run.config(tmp_path / "r", **CHANGES, **INTERRUPT, **changes)
    resumed = resuming.died_and_resumed(config, step=2)
    assert resumed.summary["parameter_hash"] == runs[0].summary["parameter_hash"]
    lines = small_run.metrics(resumed.path)
    training = [line for line in lines if "sampling/interrupted" in line]
    assert 0 < len(training) < len(lines)
    for line in training:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"after": 3}, "expected { after = 1000, text ="),
        ({"after": 3, "text": "=", "more": 1}, "expected { after = 1000, text ="),
        ({"after": 3.0, "text": "="}, "a number of tokens and a text"),
        ({"after": 0, "text": "="}, "expected 1 or more of each"),
        ({"after": 3, "text": ""}, "0 of the text, expected 1 or more of each"),
        ({"after": 7, "text": "="}, "fewer than rollout.max_completion_tokens = 8 together"),
    ],
)
def test_what_interrupts_nothing_is_refused(value, message):
    with pytest.raises(InputError) as caught:
        make_interruption(value, TOKENIZER, 8)
    assert message in str(caught.value)
    assert make_interruption(None, TOKENIZER, 8) is None
