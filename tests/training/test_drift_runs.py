"""SPO whose tracker forgets by how far the policy has moved on each row's last completion."""

from __future__ import annotations

import json

import by_hand
import numpy as np
import pytest
import small_run
from resuming import assert_same_bits, died_and_resumed

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import finalise
from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.models import sharding
from jaxgrpo.models.sequences import logits
from jaxgrpo.rollout.drift import DRIFT
from jaxgrpo.training import loop
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

SPO = {"recipe": {"use": "spo", "drift": DRIFT}, "rollout.temperature": 0.8}


def rows_file(tmp_path, rows=12, **columns):
    """A step has 8 prompts, so some rows come again in the second step and all by the third."""
    path = tmp_path / "rows.jsonl"
    lines = [{**row, **columns} for row in arithmetic.rows("train", rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def plain_logp(run, params, prompt, completion, temperature):
    """Log-probs of a completion's tokens by a pass over it alone, float64 [n]."""
    sequence = np.zeros((1, 64), np.int32)
    total = len(prompt) + len(completion)
    sequence[0, :total] = [*prompt, *completion]
    table = logits(run.blueprint.model, params, sequence, np.arange(64)[None] < total)
    scaled = np.asarray(table, np.float64)[0] / temperature
    logp = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    places = np.arange(len(prompt) - 1, total - 1)
    return logp[places, completion]


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"rollout.prefixes": {"texts": ["", "1"], "every": 5}},
    ],
)
def test_the_drift_is_the_mean_change_of_log_probs_on_the_last_completion(tmp_path, changes):
    changes = {**SPO, **changes, "data.path": rows_file(tmp_path), "rollout.max_prompt_tokens": 9}
    run = setup(small_run.config(tmp_path / "run", **changes))
    learner, stream, last = run.learner, run.stream, {}
    measured = 0
    for _ in range(3):
        params = sharding.to_host(learner.trainable)  # an update takes the arrays themselves
        learner, stream, collected, _ = by_hand.take_step(run, learner, stream)
        rollouts = sharding.to_host(collected.rollouts)
        drift = rollouts.fields[DRIFT]
        for p, row in enumerate(rollouts.row.tolist()):
            if row not in last:
                assert np.isnan(drift[p])
                continue
            prompt, tokens, then = last[row]
            now = plain_logp(run, params, prompt, tokens, 0.8)
            np.testing.assert_allclose(drift[p], np.abs(now - then).mean(), atol=2e-5)
            measured += 1
        for p, row in enumerate(rollouts.row.tolist()):
            prompt = rollouts.prompt_tokens[p][rollouts.prompt_mask[p]]
            at, mask = (p, -1), rollouts.token_mask[p, -1]
            tokens, logp = rollouts.completion_tokens[at][mask], rollouts.behavior_logp[at][mask]
            last[row] = prompt, tokens, logp
    assert measured >= 8  # those of a row that comes twice in a step are judged by that before it
    assert learner.step == 3


@pytest.mark.full
def test_it_keeps_less_of_the_counts_the_further_the_policy_has_moved(tmp_path):
    """The tracker's metric `kept` is the rho of the drifts, as computed by hand."""
    changes = {**SPO, "data.path": rows_file(tmp_path, rows=8), "optimizer.learning_rate": 1e-2}
    run = setup(small_run.config(tmp_path / "run", **changes))
    learner, stream = run.learner, run.stream
    for step in range(2):
        stream, collected = by_hand.collect(run, learner, stream)
        learner, prepared = run.prepare(learner, collected.rollouts)
        learner, _ = run.update(learner, prepared.batches)
        drift = sharding.to_host(collected.rollouts).fields[DRIFT].astype(np.float64)
        rho = np.where(np.isfinite(drift), np.clip(2 ** (-drift / 0.06), 0.875, 0.96), 0.96)
        share_kept = finalise(prepared.metrics)["subtract_tracked_success/kept"]
        np.testing.assert_allclose(share_kept, rho.mean(), rtol=1e-5)
        assert (rho < 0.96).any() == (step == 1)


@pytest.mark.full
def test_a_run_is_resumed_bit_for_bit_with_staleness(tmp_path):
    changes = {**SPO, "data.path": rows_file(tmp_path), "checkpoint.every": 1, "train.steps": 5}
    changes["rollout.staleness"] = 1
    run = loop.train(small_run.config(tmp_path / "run", **changes))
    again = died_and_resumed(small_run.config(tmp_path / "again", **changes), 3)
    for part in ("learner", "stream"):
        assert_same_bits(*(sharding.to_host(getattr(r, part)) for r in (run, again)))
    assert small_run.metrics(tmp_path / "run") == small_run.metrics(tmp_path / "again")


@pytest.mark.full
def test_a_column_of_that_name_is_read_in_its_place(tmp_path):
    changes = {**SPO, "data.path": rows_file(tmp_path, drift=0.5)}
    run = setup(small_run.config(tmp_path / "run", **changes))
    assert "last_tokens" not in run.stream.prompt_policy_state
    _, collected = by_hand.collect(run, run.learner, run.stream)
    assert (sharding.to_host(collected.rollouts).fields[DRIFT] == 0.5).all()


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [("top_p", 0.9, "some of the tokens"), ("weight_dtype", "int8", "a policy in 8 bits")],
)
def test_log_probs_of_another_distribution_are_no_movement(tmp_path, key, value, what):
    changes = {**SPO, "loss.proximal": "trainer", f"rollout.{key}": value}
    with pytest.raises(InputError, match=f"rollout.{key} = .*: samples come with .* of {what}"):
        setup(small_run.config(tmp_path / "run", **changes))
