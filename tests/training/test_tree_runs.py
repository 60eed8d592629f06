"""Runs with `tree.branch`: leaves as the trainer scores them, chains, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import resuming
import small_run
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxgrpo.core.errors import InputError
from jaxgrpo.training import loop
from jaxgrpo.training.records import rollout_files
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

TREE = {
    "rollout.group_size": 6,
    "tree.branch": "uniform",
    "tree.trees": 2,
    "tree.nodes": 2,
    "tree.segment": 2,
    "checkpoint.every": 1,
    "run.rollouts_every": 1,
}
TOKENS = [
    {"use": "sum_rewards"},
    {"use": "tree_process"},
    {"use": "token_share_weights"},
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("branch", "method"),
    [
        pytest.param("uniform", {"recipe": "tree_grpo"}, marks=pytest.mark.full),
        ("surprise", {"advantage": TOKENS}),
    ],
)
def test_leaves_are_scored_as_alone_and_a_resumed_run_repeats_itself(branch, method, tmp_path):
    changes = {**TREE, **method, "tree.branch": branch}
    run = loop.train(small_run.config(tmp_path / "run", **changes))
    for line in small_run.metrics(tmp_path / "run"):
        # The trainer scores each leaf by itself: what it shares was drawn as it stands there.
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
        assert line["grad_norm"] > 0
    rollouts = rollout_files.load(tmp_path / "run" / "rollouts" / "00000001.safetensors")
    mask, tokens = np.asarray(rollouts.token_mask), np.asarray(rollouts.completion_tokens)
    path, depth = rollouts.fields["ancestors"], rollouts.fields["token_depth"]
    shared = 0
    for p, g, t in np.argwhere(mask):
        node = path[p, g, depth[p, g, t]]
        assert node > 0
        same = (path[p] == node).any(-1)
        assert len(set(tokens[p, same, t].tolist())) == 1
        assert np.ptp(rollouts.behavior_logp[p, same, t]) == 0
        shared += same.sum() > 1
    assert shared > 0
    nodes = np.take_along_axis(np.asarray(path), np.asarray(depth), -1)
    drawn = sum(
        len({*nodes[p, mask[p, :, t], t]}) for p in range(len(mask)) for t in range(mask.shape[-1])
    )
    assert small_run.metrics(tmp_path / "run")[0]["num_tokens"] == drawn < mask.sum()
    again = resuming.died_and_resumed(small_run.config(tmp_path / "again", **changes), 2)
    assert again.summary["parameter_hash"] == run.summary["parameter_hash"]


@pytest.mark.full
def test_a_replay_of_leaves_by_a_plain_method_counts_shared_tokens_once(tmp_path):
    changes = {**TREE, "train.steps": 2, "recipe": "tree_grpo"}
    sampled = loop.train(small_run.config(tmp_path / "run", **changes))
    files = sorted((sampled.path / "rollouts").iterdir())
    plain = {"train.steps": 2, "rollout.group_size": 6, "recipe": "grpo"}
    loop.train(small_run.config(tmp_path / "again", **plain), rollouts=files)
    runs = [small_run.metrics(tmp_path / name) for name in ("run", "again")]
    assert [line["num_tokens"] for line in runs[0]] == [line["num_tokens"] for line in runs[1]]
    # Ancestors alone, as of another program, do not say which tokens are shared.
    arrays = load_file(files[0])
    del arrays["fields.token_depth"]
    with safe_open(files[0], "numpy") as content:
        save_file(arrays, tmp_path / "x.safetensors", content.metadata())
    changed = {**plain, "recipe": "tree_po", "train.steps": 1}
    loop.train(small_run.config(tmp_path / "x", **changed), rollouts=tmp_path / "x.safetensors")
    (line,) = small_run.metrics(tmp_path / "x")
    assert line["num_tokens"] == arrays["token_mask"].sum() > runs[0][0]["num_tokens"]


@pytest.mark.full
def test_trees_of_one_leaf_are_the_plain_samples(tmp_path):
    plain = {"recipe": "grpo", "train.steps": 2}
    chains = {**plain, "tree.branch": "uniform", "tree.trees": 4, "tree.rounds": 0}
    first = loop.train(small_run.config(tmp_path / "plain", **plain))
    second = loop.train(small_run.config(tmp_path / "chains", **chains))
    assert first.summary["parameter_hash"] == second.summary["parameter_hash"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.group_size": 4}, "are 6 samples, but rollout.group_size = 4: set it to 6"),
        ({"rollout.refill": {"factor": 2.0}}, "with rollout.refill groups that are left over"),
        ({"rollout.staleness": 1, "train.steps": 4}, "with rollout.staleness samples that wait"),
        ({"experience.share": 0.5}, "a sample of experience is no leaf"),
        (
            {"rollout.early_stop": {"percentile": 5, "warmup": 2, "window": 4}},
            "set rollout.early_stop.confid",
        ),
        ({"tree.branch": None}, "nothing reads it without tree.branch"),
    ],
)
def test_what_cannot_grow_is_refused(tmp_path, changes, message):
    settings = {**TREE, **changes}
    if settings["tree.branch"] is None:
        del settings["tree.branch"]
    with pytest.raises(InputError) as caught:
        setup(small_run.config(tmp_path, **settings))
    assert message in str(caught.value)


def test_a_method_on_trees_without_trees_is_told_which_key_brings_them(tmp_path):
    with pytest.raises(InputError, match=r"the tree that each sample is a leaf of \(set tree"):
        setup(small_run.config(tmp_path, recipe="tree_grpo"))
