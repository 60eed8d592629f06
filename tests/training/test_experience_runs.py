"""Runs with `experience.share`: what comes again, what it is trained by, and how it is resumed."""

from __future__ import annotations

import dataclasses
from typing import Any

import by_hand
import numpy as np
import pytest
import resuming
import small_run

from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.core.types import Rollouts
from jaxgrpo.training import loop
from jaxgrpo.training.records import rollout_files
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

EXGRPO = {
    "recipe": "dr_grpo",
    "loss.surrogate": {"use": "by_sample", "field": "replayed", "otherwise": "on_policy"},
    "loss.reduction": {"use": "constant"},
    "data.path": "task:arithmetic:train",
    "experience.share": 0.5,
    "experience.start": 0.0,
    "experience.reward": "digits",
    "experience.success": 0.9,
    "experience.size": 64,
    "train.steps": 4,
    "checkpoint.every": 1,
    "run.samples_every": 1,
    "run.rollouts_every": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return loop.train(small_run.config(tmp_path_factory.mktemp("experience") / "r", **EXGRPO))


@pytest.mark.full
def test_right_samples_come_again_with_the_log_probs_that_they_were_drawn_by(run):
    logps, replays = {}, 0
    for file in sorted((run.path / "rollouts").glob("*.safetensors")):
        rollouts = rollout_files.load(file)
        replayed = np.asarray(rollouts.fields["replayed"])
        fresh = {}
        for place in np.ndindex(*replayed.shape):
            mask = rollouts.token_mask[place]
            key = int(rollouts.row[place[0]]), rollouts.completion_tokens[place][mask].tobytes()
            logp = rollouts.behavior_logp[place][mask]
            if replayed[place]:
                replays += 1
                assert place[1] == replayed.shape[1] - 1
                assert rollouts.rewards["digits"][place] >= 0.9
                # A short text may have been drawn in several steps, each with other log-probs.
                assert any(np.array_equal(earlier, logp) for earlier in logps[key])
            else:
                fresh.setdefault(key, []).append(logp)
        for key, values in fresh.items():
            logps.setdefault(key, []).extend(values)
    assert replays > 0
    lines = small_run.metrics(run.path)
    assert lines[0]["experience/groups"] == 0
    assert lines[-1]["experience/groups"] == 0.5
    assert lines[-1]["experience/age"] >= 1
    assert lines[-1]["experience/rows"] > 0


@pytest.mark.full
def test_a_replay_by_another_method_knows_the_samples_of_earlier_steps(run, tmp_path):
    files = sorted((run.path / "rollouts").glob("*.safetensors"))
    changes = {name: value for name, value in EXGRPO.items() if "experience" not in name}
    changes |= {"loss.surrogate": {"use": "clip"}, "run.rollouts_every": 0}
    again = loop.train(small_run.config(tmp_path / "r", **changes), rollouts=files)
    measured, expected = (
        [line["entropy_estimated"] for line in small_run.metrics(finished.path)]
        for finished in (again, run)
    )
    assert measured == expected


@pytest.mark.full
def test_tokens_are_counted_that_the_step_drew(tmp_path):
    run = setup(small_run.config(tmp_path, **EXGRPO))
    drawn, draw_samples = [], run.collector.source.draw

    def draw(*arguments):
        drawing = draw_samples(*arguments)
        return drawing._replace(rollouts=lambda: drawn.append(drawing.rollouts()) or drawn[-1])

    source = run.collector.source._replace(draw=draw)
    run = run._replace(collector=dataclasses.replace(run.collector, source=source))
    learner, stream = run.learner, run.stream
    for _ in range(2):
        learner, stream, collected, _ = by_hand.take_step(run, learner, stream)
    number = drawn[-1].token_mask.sum()
    assert collected.metrics["num_tokens"].result() == number
    assert np.asarray(collected.rollouts.fields["replayed"]).any()
    assert np.asarray(collected.rollouts.token_mask).sum() != number  # others made room


@pytest.mark.parametrize(("recipe", "rate"), [("like_trl", 1.0), ("dr_grpo", np.nan)])
def test_a_success_is_of_the_sum_that_the_chain_makes(tmp_path, recipe, rate):
    changes = {name: value for name, value in EXGRPO.items() if name != "experience.reward"}
    changes |= {"recipe": recipe, "rollout.prompts": {"use": "difficulty_band"}}
    source = setup(small_run.config(tmp_path, **changes)).collector.source
    rewards = {"arithmetic": np.ones((1, 2)), "digits": np.full((1, 2), np.nan)}
    empty: dict[str, Any] = {**dict.fromkeys(Rollouts.__dataclass_fields__), "fields": {}}
    rollouts = Rollouts(**{**empty, "row": np.zeros(1, np.int32), "rewards": rewards})
    state: Any = source.policy.observe(source.policy.init(3, 0), rollouts)
    assert source.experiencer is not None
    rates = [state["rate"][0], *source.experiencer.judge.rates(rewards)]
    np.testing.assert_array_equal(rates, rate)


@pytest.mark.full
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(run, tmp_path):
    again = resuming.died_and_resumed(small_run.config(tmp_path / "r", **EXGRPO), step=3)
    assert again.summary["parameter_hash"] == run.summary["parameter_hash"]
    resuming.assert_same_bits(again.stream.waiting, run.stream.waiting)


@pytest.mark.full
def test_without_experience_yet_a_run_is_that_of_its_fresh_samples(tmp_path):
    # No sample is ever right, so that nothing is kept.
    none = {**EXGRPO, "experience.success": 9.0, "train.steps": 2}
    plain = {name: value for name, value in none.items() if not name.startswith("experience")}
    plain["loss.surrogate"] = {"use": "on_policy"}
    first = loop.train(small_run.config(tmp_path / "none", **none))
    second = loop.train(small_run.config(tmp_path / "plain", **plain))
    assert first.summary["parameter_hash"] == second.summary["parameter_hash"]


@pytest.mark.full
def test_the_command_trains_with_experience(tmp_path):
    changes = {**EXGRPO, "train.steps": 1}
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)
    assert main(["train", str(file)]) == 0
    assert small_run.metrics(tmp_path / "r")[0]["experience/samples"] > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.refill": {"factor": 2.0}}, "with rollout.refill a group is judged by"),
        ({"rollout.staleness": 1}, "with rollout.staleness what is right now"),
        ({"rollout.goals": {"7": 1.0}}, "with rollout.goals a kept sample"),
        ({"experience.share": 0.1}, "that is no whole prompt; set it to 0.125 or more"),
        ({"experience.reward": "digit"}, "is none of the rewards: did you mean 'digits'"),
        ({"loss.surrogate": {"use": "reinforce"}}, "takes samples of older parameters for samples"),
        ({"experience.share": 0.0, "loss.surrogate": {"use": "clip"}}, "nothing reads it without"),
        ({"experience.share": 0.0}, "(set experience.share)"),
    ],
)
def test_what_cannot_have_experience_is_refused(tmp_path, changes, message):
    with pytest.raises(InputError) as caught:
        setup(small_run.config(tmp_path, **{**EXGRPO, **changes}))
    assert message in str(caught.value)


def test_a_share_of_all_prompts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"experience.share = 1.0: expected 0 to 0.9"):
        small_run.config(tmp_path, **{**EXGRPO, "experience.share": 1.0})
