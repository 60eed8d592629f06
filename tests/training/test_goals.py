"""`rollout.goals`: drawn by their shares, conditioned on, hidden from rewards, not trained on."""

from __future__ import annotations

import json

import by_hand
import jax.numpy as jnp
import numpy as np
import pytest
import resuming
import small_run

from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import sharding
from jaxgrpo.rollout.goals import goal_metrics, make_goals
from jaxgrpo.rollout.texts import decode_texts
from jaxgrpo.training.loop import train
from jaxgrpo.training.setup import setup
from jaxgrpo.update import diagnostics

SHARES = {"7 ": 0.75, "=": 0.25}
TOKENIZER = character_tokenizer("0123456789+= ")
ROWS = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n}"} for n in range(1, 9)]


def test_goals_are_drawn_by_their_shares_whatever_else_is_drawn():
    goals = make_goals({"7 ": 3, "=": 1}, TOKENIZER, 8, seed=5)
    assert goals is not None
    assert goals.shares == (0.75, 0.25)
    drawn = goals.draw(np.arange(5000), 8)
    # Four standard errors of 40,000 draws.
    assert (drawn == 0).mean() == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / 40_000))
    np.testing.assert_array_equal(goals.draw(np.array([17, 3]), 8), drawn[[17, 3]])
    np.testing.assert_array_equal(goals.draw(np.arange(9), 4), drawn[:9, :4])
    assert (goals._replace(seed=6).draw(np.arange(50), 8) != drawn[:50]).any()
    ids = [TOKENIZER(text)["input_ids"] for text in SHARES]
    np.testing.assert_array_equal(goals.tokens, [ids[0], [*ids[1], -1]])
    np.testing.assert_array_equal(goals.prefixes([3], 8)[0], goals.tokens[drawn[3]])
    assert goals.names == ("7", "1")  # "=" has no letter
    assert make_goals(None, TOKENIZER, 8, 0) is None


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["7 ", "7=", "9"], ("0", "1", "9")),  # the letters of two goals
        (["=1", "=0", "+1"], ("0", "1", "2")),  # those of one are another's number
    ],
)
def test_each_goal_has_a_name_of_its_own_in_metrics(texts, names):
    goals = make_goals(dict.fromkeys(texts, 1), TOKENIZER, 8, seed=5)
    assert goals is not None
    assert goals.names == names
    advantage = np.zeros((8, 4))
    values = goal_metrics(goals, np.arange(8), advantage, advantage == 0, advantage)
    assert sum(value for name, value in values.items() if name.endswith("/share")) == 1


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"7": 0.0}, "'7' = 0.0: expected how often it is drawn, a number above 0"),
        ({"7": "often"}, "'7' = 'often': expected"),
        ({"": 1.0}, "'' is 0 tokens: it takes one or more"),
        ({"12345678": 1.0}, "8 tokens: .*fewer than rollout.max_completion_tokens = 8"),
    ],
)
def test_goals_that_cannot_be_are_refused(shares, message):
    with pytest.raises(InputError, match=f"rollout.goals: .*{message}"):
        make_goals(shares, TOKENIZER, 8, 0)


def test_a_reward_without_weight_leaves_no_sample_of_a_goal_out():
    goals = make_goals({"7 ": 3, "=": 1}, TOKENIZER, 8, seed=5)
    assert goals is not None
    first = goals.draw(np.arange(8), 4) == 0
    rewards = {"right": jnp.where(first, 1.0, 0.25), "logged": jnp.full((8, 4), jnp.nan)}
    total, scored = diagnostics.weighted_sum(rewards, {"right": 2.0, "logged": 0.0})
    advantage = np.where(first, 1.0, -1.0)
    values = goal_metrics(goals, np.arange(8), np.asarray(total), np.asarray(scored), advantage)
    assert (values["goals/7/reward"], values["goals/1/reward"]) == (2.0, 0.5)
    assert (values["goals/7/advantage"], values["goals/1/advantage"]) == (1.0, -1.0)
    assert values["goals/7/share"] == first.mean()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that died after its third step and went on, with samples that wait for theirs."""
    changes = {
        "rollout.goals": SHARES,
        "rollout.refill": {"factor": 2.0},
        "rollout.staleness": 1,
        "rewards": [{"use": f"{small_run.__file__}:digits"}],
        "train.steps": 4,
        "run.samples_every": 1,
    }
    return resuming.died_and_resumed(
        small_run.config(tmp_path_factory.mktemp("goals") / "r", **changes), step=3
    )


@pytest.mark.full
@pytest.mark.slow
def test_sampler_and_trainer_are_under_the_same_goals_and_a_resumed_run_repeats_itself(
    resumed, tmp_path
):
    lines = small_run.metrics(resumed.path)
    assert lines[0]["sampling/sampling_logp_difference/max"] < 1e-4
    for line in lines:
        assert line["goals/7/share"] + line["goals/1/share"] == pytest.approx(1)
        assert line["goals/7/share"] > line["goals/1/share"]
        parts = [line[f"goals/{name}/share"] * line[f"goals/{name}/reward"] for name in ("7", "1")]
        assert sum(parts) == pytest.approx(line["reward"], abs=0.01)  # but for unscored samples
    config = resumed.path / "config.toml"
    again = train(str(config), run={"dir": str(tmp_path / "again")})
    assert again.summary["parameter_hash"] == resumed.summary["parameter_hash"]
    resuming.assert_same_bits(again.stream, resumed.stream)


@pytest.mark.full
@pytest.mark.slow
def test_rewards_and_rows_begin_behind_the_goal(tmp_path):
    changes = {"rollout.goals": SHARES, "eval.data": "task:arithmetic:test", "eval.prompts": 4}
    judged = []

    def watching(completions, completion_ids, **columns):
        judged.extend(zip(completions, map(tuple, completion_ids), strict=True))
        return [float(len(text)) for text in completions]

    run = setup(small_run.config(tmp_path / "r", **changes), rewards=[watching])
    _, collected = by_hand.collect(run, run.learner, run.stream)
    rollouts = sharding.to_host(collected.rollouts)
    goals = run.collector.source.goals
    assert goals is not None
    prefix = goals.prefixes(rollouts.ordinal, 4)
    np.testing.assert_array_equal(rollouts.forced_prefix, prefix)
    for place in np.ndindex(8, 4):
        begin = (prefix[place] >= 0).sum()
        assert rollouts.completion_tokens[place][:begin].tolist() == prefix[place][:begin].tolist()
        assert not rollouts.token_mask[place][:begin].any()
        sampled = rollouts.completion_tokens[place][rollouts.token_mask[place]]
        (text,) = decode_texts(run.inputs.pretrained.tokenizer, [sampled.tolist()])
        assert (text, tuple(sampled.tolist())) in judged
    assert len(judged) == 32


@pytest.mark.full
def test_conditions_that_differ_make_groups_differ(tmp_path):
    """RC-GRPO's point: behind a first stage on good and bad answers with their goals, a group of
    one condition is flat and one of both is not. The first stage alone is the control."""
    answers = [
        {"prompt": row["prompt"], "answer": goal + str(2 * n + wrong)}
        for n, row in enumerate(ROWS, start=1)
        for goal, wrong in (("+", 0), ("=", 1))
    ]
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    stage = {
        "data.path": str(tmp_path / "both.jsonl"),
        "train.steps": 120,
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.0},
        "rollout.prompts_per_step": 16,
        "rewards": [{"use": "math"}],
    }
    small_run.write(tmp_path / "sft.toml", tmp_path / "first", **stage)
    assert main(["sft", str(tmp_path / "sft.toml")]) == 0

    def run(goals):
        changes = {
            "model.path": str(tmp_path / "first-sft" / "model"),
            "data.path": str(tmp_path / "rows.jsonl"),
            "rollout.goals": goals,
            "rewards": [{"use": f"{__file__}:right"}],
            "train.steps": 1,
            "eval.data": str(tmp_path / "rows.jsonl"),
            "eval.samples": 4,
            "optimizer": {"learning_rate": 0.0},
        }
        name = "".join(goals)
        config = small_run.config(tmp_path / name, **changes)
        return train(config)

    good, mixed = run({"+": 1.0}), run({"+": 0.5, "=": 0.5})
    assert small_run.metrics(good.path)[-1]["groups/mixed"] < 0.3
    line = small_run.metrics(mixed.path)[-1]
    assert line["groups/mixed"] > 0.6
    assert line["goals/0/reward"] > 0.9 > 0.1 > line["goals/1/reward"]
    assert line["goals/0/advantage"] > 0 > line["goals/1/advantage"]
    # Evaluations ask for the first goal.
    assert mixed.summary["trained"]["accuracy"] > 0.9


def right(completions, answer, **columns):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]
