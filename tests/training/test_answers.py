"""Runs whose method scores reference answers: from the config to parameters that move."""

from __future__ import annotations

import json
import math
import re

import by_hand
import jax
import numpy as np
import pytest
import resuming
import small_run

from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.scores import REACHED
from jaxgrpo.models import sharding
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT
from jaxgrpo.training import loop
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

# The thought is what stands before the first space, and nothing but R3 is trained on.
ALONE = {
    "recipe": {"use": "dro_r3", "masked_thought": True, "weights": {"arithmetic": 0, "digits": 0}},
    "data.answer_prefix": " ",
}


def three(completions, **columns):
    """The second sample of each group of four is right; the first group is not scored."""
    return [None if place < 4 else float(place % 4 == 1) for place in range(len(completions))]


@pytest.mark.full
def test_parts_of_thoughts_train_from_the_command_line_and_are_resumed(tmp_path):
    changes = {"recipe": {"use": "l2t", "beta": 0.1}, "data.answer_prefix": " "}
    changes |= {"data.answer_cuts": 2, "checkpoint.every": 1}
    file = small_run.write(tmp_path / "run.toml", tmp_path / "whole", **changes)
    assert main(["train", str(file)]) == 0
    for line in small_run.metrics(tmp_path / "whole"):
        assert math.isfinite(line["add_information_gain/gain"])
        assert line["live_samples"] > 0.5  # flat groups have a signal too
    again = resuming.died_and_resumed(small_run.config(tmp_path / "again", **changes), 2)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert again.summary["parameter_hash"] == summary["parameter_hash"]
    with pytest.raises(InputError, match="answer_cuts = 2: nothing reads it"):
        setup(small_run.config(tmp_path, **{"data.answer_cuts": 2}))


@pytest.mark.full
def test_r3_alone_trains_from_the_command_line(tmp_path, capsys):
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **ALONE)
    before = setup(small_run.config(tmp_path / "r", **ALONE)).learner.trainable
    before = jax.tree.map(np.asarray, before)
    assert main(["train", str(file), "--dry-run"]) == 0
    notice = "at most 3 tokens are scored behind each thought, after ' '"
    assert notice in capsys.readouterr().out
    assert main(["train", str(file)]) == 0
    assert notice in capsys.readouterr().out
    lines = small_run.metrics(tmp_path / "r")
    assert len(lines) == 3
    for line in lines:
        numbers = [value for value in line.values() if isinstance(value, float)]
        assert all(map(math.isfinite, numbers))
        assert line["reasoning_reflection/spread"] > 0
        assert 0 < line["live_samples"] <= 1 - line["reasoning_reflection/dropped"] < 1
        assert line["grad_norm"] > 0
    trained = setup(
        small_run.config(tmp_path / "x", **ALONE, **{"model.path": str(tmp_path / "r" / "model")})
    ).learner.trainable
    moved = jax.tree.map(lambda old, new: np.abs(old - new).max(), before, trained)
    assert min(jax.tree.leaves(moved)) > 0


def test_fields_are_of_the_samples_thoughts_and_the_rows_answers(tmp_path):
    run = setup(small_run.config(tmp_path / "r", **ALONE))
    (space,) = run.inputs.pretrained.tokenizer(" ")["input_ids"]
    _, collected = by_hand.collect(run, run.learner, run.stream)
    rollouts = sharding.to_host(collected.rollouts)
    for p, g in np.ndindex(8, 4):
        row = run.inputs.prompts.rows[rollouts.row[p]]
        forced = rollouts.fields[FORCED][p]
        assert run.inputs.pretrained.tokenizer.decode(forced[forced >= 0]) == f" {row['answer']}"
        assert rollouts.fields[MASK][p].sum() == len(row["answer"])
        ids = rollouts.completion_tokens[p, g][rollouts.token_mask[p, g]].tolist()
        ids = [*ids, run.inputs.pretrained.tokenizer.eos_token_id]
        ends = [ids.index(space)] if space in ids else []
        assert rollouts.fields[THOUGHT][p, g] == min([*ends, ids.index(ids[-1])])
        reached = space in ids and not rollouts.truncated[p, g]
        assert rollouts.fields[REACHED][p, g] == reached


@pytest.mark.full
def test_groups_that_are_left_over_keep_their_thoughts_for_the_next_step(tmp_path):
    changes = {
        "recipe": {"use": "dro_r3", "drop": 0.0},
        "data.answer_prefix": " ",
        "rewards": [{"use": f"{__file__}:three"}],
        "rollout.refill": {"factor": 4.0},
        "rollout.overlap_rewards": False,
        "rollout.prompts_per_step": 4,
    }
    finished = loop.train(small_run.config(tmp_path / "r", **changes))
    lines = small_run.metrics(finished.path)
    assert [line["refill/shortfall"] for line in lines] == [0, 0, 0]
    assert all(line["grad_norm"] > 0 for line in lines)
    run = setup(small_run.config(tmp_path / "x", **changes))
    stream, _ = by_hand.collect(run, run.learner, run.stream)
    waiting = stream.waiting.leftover
    assert waiting is not None
    left = waiting.ordinal >= 0
    assert left.any()
    _, second = by_hand.collect(run, run.learner, stream)
    after = sharding.to_host(second.rollouts)
    for name in (FORCED, THOUGHT, MASK, REACHED):
        np.testing.assert_array_equal(after.fields[name][: left.sum()], waiting.fields[name][left])
    assert (after.fields[FORCED] >= 0).any(1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"recipe": "grpo", "data.answer_prefix": "A"},
            r"data\.answer_prefix = 'A': nothing reads",
        ),
        ({"recipe": "grpo", "data.max_answer_tokens": 3}, r"data\.max_answer_tokens = 3: nothing"),
        ({"recipe": "dro_r3", "data.answer": ""}, r'data\.answer = "": the method scores the ref'),
        (
            {"recipe": "dro_r3"},
            r"1 of 9 rows hold no answer .the first is row 8 .line 9., None",
        ),
    ],
)
def test_answers_that_are_missing_or_unread_are_refused_by_the_dry_run(
    tmp_path, capsys, changes, message
):
    rows = [{"prompt": f"{n}+1=", "gold": str(n + 1) if n < 8 else None} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data.path": str(tmp_path / "rows.jsonl"), "data.answer": "gold", **changes}
    changes["rewards"] = [{"use": f"{small_run.__file__}:digits"}]
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)
    assert main(["train", str(file), "--dry-run"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_answers_for_which_the_model_has_no_positions_are_refused(tmp_path):
    rows = [{"prompt": f"{n}+1=", "answer": "4" * 40_000} for n in range(8)]
    changes = {"recipe": "dro_r3", "rewards": [{"use": f"{small_run.__file__}:digits"}]}
    with pytest.raises(
        InputError, match=r"answer .* 40000 tokens, are .* set data\.max_answer_tokens"
    ):
        setup(small_run.config(tmp_path / "r", **changes), dataset=rows)
    changes["data.max_answer_tokens"] = 5
    run = setup(small_run.config(tmp_path / "r", **changes), dataset=rows)
    assert run.collector.source.answers is not None
    assert (run.collector.source.answers.longest, run.collector.source.answers.num_cut) == (5, 8)


@pytest.mark.full
def test_a_frozen_a_lagged_and_the_trained_scorer_begin_alike_and_part(tmp_path):
    lines = {}
    for scorer in ("trainer", "base", "reference"):
        changes = {**ALONE, "recipe": {**ALONE["recipe"], "scorer": scorer}, "train.steps": 4}
        if scorer == "reference":
            changes["reference"] = {"reset_every": 2}
        loop.train(small_run.config(tmp_path / scorer, **changes))
        lines[scorer] = [
            line["reasoning_reflection/spread"] for line in small_run.metrics(tmp_path / scorer)
        ]
    assert lines["trainer"][0] == lines["base"][0] == lines["reference"][0]
    assert lines["base"][1] == lines["reference"][1] != lines["trainer"][1]  # not reset yet
    assert lines["base"][2] != lines["reference"][2]
