"""Runs whose prompt policy filters by the ranks of reference answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import by_hand
import jax
import numpy as np
import pytest
import small_run
from resuming import assert_same_bits, died_and_resumed

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.models import sharding
from jaxgrpo.models.sequences import logits
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT
from jaxgrpo.rollout.selection import PromptPolicy, sequential
from jaxgrpo.training import loop
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

FILTER = {"use": "query_filter", "top_k": 2.0, "share": 0.5, "every": 2, "carry": 0.5}
CHANGES = {
    "rollout.prompts": FILTER,
    "data.path": "task:arithmetic:train",
    "data.answer_prefix": " ",
}


def needing(name: str) -> PromptPolicy:
    return sequential()._replace(name="needing", needs=frozenset((name,)))


def plain_rank(run, params, sequence):
    """Places of all tokens but the first in a stable sort of the logits before them, [n - 1]."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(sequence)] = sequence
    mask = np.arange(64)[None] < len(sequence)
    table = np.asarray(logits(run.blueprint.model, params, tokens, mask), np.float64)[0]
    order = np.argsort(-table[: len(sequence) - 1], axis=-1, kind="stable")
    return np.argmax(order == np.array(sequence[1:])[:, None], axis=-1)


@pytest.mark.full
@pytest.mark.parametrize("refill", [None, {"factor": 2.0}])
def test_the_policy_sees_ranks_of_the_answers_behind_each_thought(tmp_path, refill):
    changes = CHANGES if refill is None else {**CHANGES, "rollout.refill": refill}
    run = setup(small_run.config(tmp_path, **changes))
    stream, collected = by_hand.collect(run, run.learner, run.stream)
    rollouts, state = sharding.to_host(collected.rollouts), stream.prompt_policy_state
    assert "answer_rank" not in rollouts.fields  # no part of the method reads it
    if refill is None:
        assert sorted(np.flatnonzero(~np.isnan(state["rank"]))) == sorted(rollouts.row)
    params = run.learner.trainable
    for p, row in enumerate(rollouts.row):
        prompt = rollouts.prompt_tokens[p][rollouts.prompt_mask[p]].tolist()
        forced = rollouts.fields[FORCED][p]
        forced, count = forced[forced >= 0].tolist(), int(rollouts.fields[MASK][p].sum())
        means = []
        for g in range(4):
            thought = rollouts.completion_tokens[p, g, : rollouts.fields[THOUGHT][p, g]].tolist()
            ranks = plain_rank(run, params, prompt + thought + forced)[-count:]
            worst = sorted(ranks.tolist())[-max(1, -(-count // 2)) :]
            means.append(sum(worst) / len(worst))
        np.testing.assert_allclose(state["rank"][row], min(means), rtol=1e-6)


@pytest.mark.full
def test_a_filtered_run_leaves_rows_out_and_is_resumed_bit_for_bit(tmp_path):
    changes = {**CHANGES, "checkpoint.every": 1, "train.steps": 6, "recipe": "dro_r3"}
    changes |= {"data.path": rows_file(tmp_path), "rollout.prompts": {**FILTER, "drop": 0.2}}
    run = loop.train(small_run.config(tmp_path / "run", **changes))
    logged = small_run.metrics(tmp_path / "run")
    assert min(line["prompts/eligible"] for line in logged) < 0.9
    again = died_and_resumed(small_run.config(tmp_path / "again", **changes), 3)
    states = [sharding.to_host(r.stream.prompt_policy_state) for r in (run, again)]
    assert_same_bits(*states)
    assert int(states[0]["round"]) == 2
    assert states[0]["carried"].any()
    assert_same_bits(*(sharding.to_host(r.learner.trainable) for r in (run, again)))
    assert logged == small_run.metrics(tmp_path / "again")


def rows_file(tmp_path):
    """Twenty rows: that many are seen more than once in six steps."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in arithmetic.rows("train", 20)))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.answer": "", "data.path": "gold.jsonl"},
            'data.answer = "": the method scores the reference answer',
        ),
        ({"rollout.goals": {"1": 1.0}}, "rollout.goals: a method that scores reference answers"),
        (
            {
                "rollout.prompts": {"use": f"{__file__}:needing", "name": "trainer_logp"},
                "data.answer_prefix": "",
            },
            "rollout.prompts: needing needs trainer_logp, and a prompt policy may need answer_logp",
        ),
    ],
)
def test_what_cannot_be_ranked_is_refused_before_the_run(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("gold.jsonl").write_text('{"prompt": "1+1=", "gold": "2"}\n')
    changes = {**CHANGES, "rewards": [{"use": f"{small_run.__file__}:digits"}], **changes}
    with pytest.raises(InputError, match=re.escape(message)):
        setup(small_run.config(tmp_path, **changes))


@pytest.mark.full
def test_a_device_of_four_sees_the_same_ranks(tmp_path):
    runs = [
        setup(small_run.config(tmp_path, **CHANGES, **mesh))
        for mesh in ({}, {"mesh.data": 2, "mesh.fsdp": 2})
    ]
    ranks = [
        by_hand.collect(run, run.learner, run.stream)[0].prompt_policy_state["rank"] for run in runs
    ]
    assert jax.device_count() >= 4
    np.testing.assert_array_equal(*ranks)
