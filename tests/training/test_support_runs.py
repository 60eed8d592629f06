"""Runs that sample among few tokens and train on log-probs among the same ones."""

from __future__ import annotations

import numpy as np
import pytest
import small_run
from resuming import died_and_resumed
from safetensors.numpy import load_file, save_file

from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.training import loop
from jaxgrpo.training.records.rollout_files import load
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

K = 6
CUT = {
    "rollout.top_k": K,
    "rollout.top_p": 0.9,
    "rollout.min_completion_tokens": 2,
    "train.support": "replay",
}
MAX = "sampling/sampling_logp_difference/max"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of two updates each that write their rollouts and take leftover groups."""
    changes = {"train.steps": 2, "train.minibatches": 2, "run.rollouts_every": 1}
    changes |= {"rollout.refill": {"factor": 2.0}}
    folder = tmp_path_factory.mktemp("support") / "r"
    return loop.train(small_run.config(folder, **CUT, **changes))


@pytest.mark.full
def test_a_run_agrees_with_its_sampler_and_learns_from_ratios(run):
    for line in small_run.metrics(run.path):
        assert 0 < line[MAX] < 1e-4
        assert line["sampling/disagreement"] < 0.1
        assert line["grad_norm"] > 0
        assert line["entropy"] > 0


@pytest.mark.full
def test_saved_rollouts_hold_what_was_drawn_among(run):
    for file in sorted((run.path / "rollouts").iterdir()):
        arrays = load_file(file)
        support, mask = arrays["fields.sample_support"], arrays["token_mask"]
        assert support.shape == (*mask.shape, K)
        np.testing.assert_array_equal((support >= 0).any(-1), mask)
        assert (support == arrays["completion_tokens"][..., None]).any(-1)[mask].all()
        is_single = (support >= 0).sum(-1) == 1
        np.testing.assert_allclose(arrays["behavior_logp"][is_single], 0, atol=1e-6)


@pytest.mark.full
def test_a_replay_of_its_files_ends_with_the_parameters_of_the_run(run, tmp_path):
    files = sorted((run.path / "rollouts").iterdir())
    changes = {**CUT, "train.steps": 2, "train.minibatches": 2}
    again = loop.train(small_run.config(tmp_path / "r", **changes), rollouts=files)
    assert again.summary["parameter_hash"] == run.summary["parameter_hash"]


@pytest.mark.full
def test_files_go_with_runs_that_read_their_support_alone(run, tmp_path):
    (file, *_) = sorted((run.path / "rollouts").iterdir())
    reads_all = small_run.config(tmp_path / "r", **{"train.steps": 1})
    with pytest.raises(
        InputError, match=r"among the tokens of fields\.sample_support, and the trainer's"
    ):
        loop.train(reads_all, rollouts=[file])
    contents = load_file(file)
    del contents["fields.sample_support"]
    metadata = {"format": "jaxgrpo-rollouts", "version": "1", "step": "1"}
    save_file(contents, tmp_path / "x.safetensors", metadata)
    replayed = small_run.config(tmp_path / "r", **CUT, **{"train.steps": 1})
    with pytest.raises(
        InputError, match="the method reads the fields sample_support, which are not there"
    ):
        loop.train(replayed, rollouts=[tmp_path / "x.safetensors"])


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"loss.kl": {"use": "forward_kl_k3", "beta": 0.05}, "lora.rank": 2},
        {"rollout.staleness": 1},
        {
            "loss.entropy": {"use": "bonus", "coefficient": 0.01},
            "loss.kl": {"use": "full_kl", "beta": 0.05},
        },
        {"mesh.fsdp": 2, "mesh.data": 2, "rollout.interrupt": {"after": 8, "text": "+"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_it_goes_with_what_else_a_run_may_do_and_resumes_bit_for_bit(changes, tmp_path):
    changes = {**CUT, **changes, "train.steps": 3, "checkpoint.every": 1}
    unbroken = loop.train(small_run.config(tmp_path / "whole", **changes))
    resumed = died_and_resumed(small_run.config(tmp_path / "parts", **changes), 2)
    assert resumed.summary["parameter_hash"] == unbroken.summary["parameter_hash"]
    lines = small_run.metrics(tmp_path / "whole")
    assert lines[0].get("kl", 0) < 1e-6  # the reference is among the same tokens
    for line in lines:
        assert (line.get(MAX) or 0) < 1e-4  # nothing where another policy drew the samples
        assert np.isfinite(line["grad_norm"])


@pytest.mark.full
def test_leaves_of_trees_bring_the_support_of_the_tokens_that_they_share(tmp_path):
    changes = {"rollout.group_size": 6, "tree.branch": "uniform", "tree.trees": 2, "tree.nodes": 2}
    changes |= {"tree.segment": 2, "train.steps": 1, "run.rollouts_every": 1}
    loop.train(small_run.config(tmp_path / "r", **CUT, **changes, recipe="tree_grpo"))
    (line,) = small_run.metrics(tmp_path / "r")
    assert 0 < line[MAX] < 1e-4
    rollouts = load(tmp_path / "r" / "rollouts" / "00000001.safetensors")
    recorded = (np.asarray(rollouts.fields["sample_support"]) >= 0).any(-1)
    np.testing.assert_array_equal(recorded, rollouts.token_mask)


class Twice:
    """An environment that answers a first turn and ends with the second."""

    def reset(self, seed):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return "+", float(len(text) > 3), self.turns > 1


@pytest.mark.full
def test_what_an_environment_writes_between_turns_has_no_support(tmp_path):
    changes = {"environment": f"{__file__}:Twice", "rollout.max_turns": 3, "train.steps": 1}
    changes |= {"rollout.max_completion_tokens": 40, "rollout.max_prompt_tokens": 12}
    changes |= {"run.rollouts_every": 1}
    loop.train(small_run.config(tmp_path / "r", **CUT, **changes))
    (line,) = small_run.metrics(tmp_path / "r")
    assert 0 < line[MAX] < 1e-4
    rollouts = load(tmp_path / "r" / "rollouts" / "00000001.safetensors")
    mask = np.asarray(rollouts.token_mask)
    recorded = (np.asarray(rollouts.fields["sample_support"]) >= 0).any(-1)
    np.testing.assert_array_equal(recorded, mask)
    last = mask.shape[-1] - mask[..., ::-1].argmax(-1)
    assert (mask.any(-1) & (mask.sum(-1) < last)).any()  # some tokens between two turns


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.top_k": 0}, "without rollout.top_k they may be the vocabulary; set rollout"),
        ({"experience.share": 0.5}, "experience.share = 0.5 scores samples of earlier steps"),
        (
            {"data.completion": "answer", "rollout.group_size": 1, "recipe": "sign"},
            "texts have no sample_support",
        ),
    ],
    ids=str,
)
def test_what_has_no_support_is_refused(changes, message, tmp_path):
    with pytest.raises((ConfigError, InputError), match=message):
        setup(small_run.config(tmp_path / "r", **{**CUT, **changes}))
