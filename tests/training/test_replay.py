"""Training from saved rollouts: the run that wrote them again, and other samples than its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

import by_hand
import numpy as np
import pytest
import resuming
import small_run
from safetensors.numpy import load_file, save_file

from jaxgrpo.cli import main as cli
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError, differing_names
from jaxgrpo.models import sharding
from jaxgrpo.planning import preview
from jaxgrpo.training import loop
from jaxgrpo.training.collecting import replay
from jaxgrpo.training.setup import setup

REQUIRED = (
    *("prompt_tokens", "prompt_mask", "completion_tokens", "token_mask", "behavior_logp"),
    *("rewards.arithmetic", "rewards.digits"),
)
METADATA = {"format": "jaxgrpo-rollouts", "version": "1"}
GAP = "sampling/sampling_logp_difference/max"


def never(completions, **columns):
    raise AssertionError("a reward was called")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of a run that writes its rollouts."""
    folder = tmp_path_factory.mktemp("replay") / "r"
    changes = {"train.steps": 2, "run.rollouts_every": 1, "run.samples_every": 1}
    return loop.train(small_run.config(folder, **changes))


@pytest.fixture(scope="module")
def files(run):
    return sorted((run.path / "rollouts").iterdir())


def config(folder, **changes):
    return small_run.config(folder, **{"train.steps": 2, "run.samples_every": 1, **changes})


def edited(path, file, **changes):
    """A file with some arrays changed by functions; None takes one out."""
    arrays = load_file(file)
    for name, change in changes.items():
        value = change(arrays.pop(name))
        arrays |= {} if value is None else {name: np.ascontiguousarray(value)}
    save_file(arrays, path, METADATA)
    return path


def test_a_replay_ends_with_the_parameters_and_metrics_of_the_run(run, files, tmp_path):
    assert [file.name for file in files] == ["00000001.safetensors", "00000002.safetensors"]
    unread = {  # a data set is not named, and a reward that is called fails
        "data": {},
        "rewards": [
            {"use": f"{__file__}:never", "name": "arithmetic"},
            {"use": f"{__file__}:never", "name": "digits", "weight": 0.2},
        ],
    }
    again = loop.train(config(tmp_path / "r", **unread), rollouts=files)
    assert again.summary["parameter_hash"] == run.summary["parameter_hash"]
    assert small_run.metrics(again.path) == small_run.metrics(run.path)
    for name in ("step_1.jsonl", "step_2.jsonl"):
        ours, theirs = (
            [
                json.loads(line)
                for line in (finished.path / "samples" / name).read_text().splitlines()
            ]
            for finished in (again, run)
        )
        for row, expected in zip(ours, theirs, strict=True):
            assert {**row, "row": 0} == {**expected, "row": 0}
    noted = json.loads((again.path / "replay.json").read_text())
    assert noted["files"] == [str(file) for file in files]


def test_a_replay_of_one_file_trains_on_it_in_every_step(files, tmp_path):
    finished = loop.train(config(tmp_path / "r", **{"train.steps": 3}), rollouts=files[:1])
    lines = small_run.metrics(finished.path)
    assert len({line["reward"] for line in lines}) == 1
    assert [line["ratio_max"] == pytest.approx(1, abs=1e-3) for line in lines] == [
        *(True, False, False),
    ]
    # From the second step on the samples are of an older policy, which explains the difference.
    assert lines[0][GAP] < 1e-3
    assert lines[1][GAP] is None


@pytest.mark.full
def test_log_probs_of_another_distribution_make_ratios(files, tmp_path):
    def lower(logp):
        return np.where(logp == 0, 0, logp - np.float32(0.5))

    file = edited(tmp_path / "x.safetensors", files[0], behavior_logp=lower)
    changes = {"train.steps": 1, "optimizer.learning_rate": 0.0}
    (line,) = small_run.metrics(loop.train(config(tmp_path / "a", **changes), rollouts=file).path)
    assert line["ratio_max"] == pytest.approx(np.exp(0.5), rel=1e-3)
    assert line[GAP] == pytest.approx(0.5, abs=1e-3)
    old = edited(tmp_path / "y.safetensors", file, policy_version=lambda version: version - 1)
    (line,) = small_run.metrics(loop.train(config(tmp_path / "b", **changes), rollouts=old).path)
    assert line["ratio_max"] == pytest.approx(np.exp(0.5), rel=1e-3)
    assert line[GAP] is None


@pytest.mark.full
def test_where_other_weights_have_sampled_no_version_is_that_of_the_run(files, tmp_path):
    """The numbers of steps in a run's own files are those of its weights, not of these."""
    base = shutil.copytree(small_run.base(), tmp_path / "base")
    elsewhere = [shutil.copy(file, tmp_path) for file in files]
    for changes, paths, versions in (
        ({}, files, [0, 1]),
        ({"rewards": small_run.tables("")["rewards"][::-1], "train.steps": 9}, files, [0, -1]),
        ({"train.steps": 9}, files, [0, 1]),  # a run that goes on
        ({"recipe": "dr_grpo"}, files, [0, -1]),
        ({"optimizer.learning_rate": 0.01}, files, [0, -1]),
        ({"model": {"path": str(base)}}, files, [-1, -1]),
        ({"train.seed": 1}, files, [-1, -1]),
        ({"recipe": "dr_grpo"}, elsewhere, [0, 1]),  # what the files say
    ):
        read = setup(config(tmp_path / "r", **changes), rollouts=paths).inputs.replay
        assert read is not None
        read_versions = [set(np.ravel(read.load(place).policy_version)) for place in (0, 1)]
        assert read_versions == [{version} for version in versions], changes


@pytest.mark.parametrize(
    ("overrides", "name", "value", "decides"),
    [
        ((), "scores", [{"name": "teacher_logp", "policy": "another"}], True),
        ((), "data.answer_cuts", 2, True),
        ((), "eval.samples", 3, False),
        (("loss.kl={use='k2', beta=0.1}", "reference.reset_patience=2"), "eval.samples", 3, True),
        (("optimizer.schedule=linear",), "train.steps", 3, True),
        ((), "train.steps", 3, False),
    ],
)
def test_what_decides_the_weights_of_a_run(overrides, name, value, decides):
    keys = configs.flat(configs.to_tables(configs.load("opd", overrides)))
    before, after = (replay.decisive_keys(flat) for flat in (keys, {**keys, name: value}))
    assert differing_names(before, after) == [name] * decides


def test_versions_of_tokens_are_read_as_those_of_samples_are(run, files, tmp_path):
    folder = shutil.copytree(run.path, tmp_path / "run") / "rollouts"
    for file in sorted(folder.iterdir()):
        arrays = load_file(file)
        drawn, sampled = arrays["token_mask"], arrays["policy_version"][..., None]
        arrays["fields.version"] = np.where(drawn, sampled, np.int32(-1))
        save_file(arrays, file, METADATA)
    for recipe, versions in (("grpo", [{-1, 0}, {-1, 1}]), ("dr_grpo", [{-1, 0}, {-1}])):
        again = config(tmp_path / "r", recipe=recipe)
        read = setup(again, rollouts=sorted(folder.iterdir())).inputs.replay
        assert read is not None
        fields = [read.load(place).fields["version"] for place in (0, 1)]
        assert [{*np.ravel(field).tolist()} for field in fields] == versions
        assert {field.dtype for field in fields} == {np.dtype(np.int32)}


def test_what_pytorch_writes_is_trained_on(run, files, tmp_path):
    import torch
    from safetensors.torch import save_file

    for place, file in enumerate(files):
        tensors = {name: torch.tensor(array) for name, array in load_file(file).items()}
        length = int(tensors["prompt_mask"].sum(-1).max())
        arrays = {name: tensors[name] for name in REQUIRED}
        for name in ("prompt_tokens", "prompt_mask"):
            arrays[name] = arrays[name][:, :length].contiguous()
        arrays = {
            name: array.long() if array.dtype in (torch.int32, torch.bool) else array
            for name, array in arrays.items()
        }
        save_file(arrays, tmp_path / f"{place}.safetensors", METADATA)
    written = [tmp_path / f"{place}.safetensors" for place in range(2)]
    again = loop.train(config(tmp_path / "r"), rollouts=written)
    assert again.summary["parameter_hash"] == run.summary["parameter_hash"]
    theirs = [line["completions/clipped_ratio"] for line in small_run.metrics(run.path)]
    assert [line["completions/clipped_ratio"] for line in small_run.metrics(again.path)] == theirs
    assert small_run.metrics(again.path)[0][GAP] is None


def test_shorter_arrays_are_padded_and_the_method_gets_the_fields_that_it_reads(files, tmp_path):
    complete, length = load_file(files[0]), 20
    arrays = {name: complete[name] for name in REQUIRED}
    for name in ("completion_tokens", "token_mask", "behavior_logp"):
        arrays[name] = np.ascontiguousarray(arrays[name][..., :length])
    arrays["fields.token_value"] = value = np.random.default_rng(0).random((8, 4, length))
    arrays["fields.unread"] = np.arange(8)
    arrays["fields.trainer_logp"] = arrays["behavior_logp"]
    save_file(arrays, tmp_path / "x.safetensors", METADATA)
    chain = [{"use": "sum_rewards"}, {"use": "to_tokens", "place": "last"}, {"use": "gae"}]
    run = setup(config(tmp_path / "r", advantage=chain), rollouts=tmp_path / "x.safetensors")
    _, (rollouts, reward_log, metrics) = by_hand.collect(run, run.learner, run.stream)
    host = sharding.to_host(rollouts)
    assert host.fields.keys() == {"token_value"}
    np.testing.assert_allclose(host.fields["token_value"][..., :length], value, rtol=1e-6)
    for padded in (host.fields["token_value"], host.completion_tokens, host.token_mask):
        assert padded.shape == (8, 4, 24)
        assert not padded[..., length:].any()
    for name in ("completion_tokens", "token_mask", "behavior_logp"):
        assert getattr(host, name)[..., :length].tobytes() == arrays[name].tobytes()
    assert (reward_log.numbers(), metrics) == ({}, {})
    for place in range(8):
        ids = run.inputs.prompts.encoded[host.row[place]]
        assert ids.tolist() == host.prompt_tokens[place][host.prompt_mask[place]].tolist()
        text = run.inputs.pretrained.tokenizer.decode(ids)
        assert run.inputs.prompts.rows[host.row[place]] == {"prompt": text}


@pytest.mark.full
def test_a_resumed_replay_goes_on_with_its_files_and_no_others(files, tmp_path, monkeypatch):
    settings = {"train.steps": 3, "checkpoint.every": 1}
    straight = loop.train(config(tmp_path / "whole", **settings), rollouts=files)
    run_config = config(tmp_path / "r", **settings)

    def die(number):
        if number == 2:
            raise resuming.Killed
        return False

    with monkeypatch.context() as patch:
        patch.setattr(loop.process, "stop_requested", die)
        with pytest.raises(resuming.Killed):
            loop.train(run_config, rollouts=files)
    named = tmp_path / "r" / "replay.json"
    named.rename(tmp_path / "replay.json")
    for again in (files, None):
        with pytest.raises(InputError, match=r"replay\.json, which names them, is gone: put it"):
            loop.train(run_config, rollouts=again, resume="auto")
    with pytest.raises(InputError, match=r"replay\.json, which names them, is gone: put it"):
        preview.dry_run(run_config, resume=True)
    (tmp_path / "replay.json").rename(named)
    for wrong in (files[:1], files[::-1], None):
        with pytest.raises(InputError, match=r"replays 2 files of rollouts.*by `jaxgrpo replay`"):
            loop.train(run_config, rollouts=wrong, resume="auto")
    with pytest.raises(InputError, match=r"replays 2 files of rollouts.*by `jaxgrpo replay`"):
        preview.dry_run(run_config, resume=True)
    moved = [shutil.copy(file, tmp_path / file.name) for file in files]
    resumed = loop.train(run_config, rollouts=moved, resume="auto")
    assert resumed.summary["parameter_hash"] == straight.summary["parameter_hash"]
    assert small_run.metrics(resumed.path) == small_run.metrics(straight.path)


def test_a_run_that_samples_is_not_gone_on_with_from_files(run, files):
    changes = {"run.rollouts_every": 1}
    with pytest.raises(InputError, match="samples for itself: go on with it by `jaxgrpo train`"):
        loop.train(config(run.path, **changes), rollouts=files, resume="auto")


@pytest.mark.full
def test_methods_that_remember_rows_replay_too(tmp_path):
    changes: dict[str, Any] = {"recipe": "spo", "rollout.prompts": {"use": "spo_priority"}}
    first = config(tmp_path / "a", **{**changes, "run.rollouts_every": 1})
    sampled = loop.train(first)
    files = sorted((sampled.path / "rollouts").iterdir())
    again = loop.train(config(tmp_path / "b", **changes), rollouts=files)
    assert again.summary["parameter_hash"] == sampled.summary["parameter_hash"]


def test_the_command_takes_the_config_of_the_run_and_a_folder_beside_it(
    run, files, tmp_path, capsys
):
    moved = tmp_path / "moved"
    shutil.copytree(run.path, moved)
    text = (moved / "config.toml").read_text().replace(str(run.path), str(moved))
    text = text.replace("task:arithmetic:train", f"{tmp_path}/gone.jsonl")  # it reads no data
    assert "gone.jsonl" in text
    (moved / "config.toml").write_text(text)
    paths = [str(moved / "rollouts" / file.name) for file in files]
    assert cli.main(["replay", *paths]) == 0, capsys.readouterr()
    beside = tmp_path / "moved-replay"
    summary = json.loads((beside / "summary.json").read_text())
    assert summary["parameter_hash"] == run.summary["parameter_hash"]
    assert not (beside / "rollouts").exists()
    capsys.readouterr()
    assert cli.main(["replay", *paths]) == 2
    assert "go on with that run by --resume auto" in capsys.readouterr().err


def test_the_command_sets_steps_and_folder_unless_they_are_given(run, files, tmp_path, monkeypatch):
    names = [str(file) for file in files]
    read = replay.replay_config(names)
    assert (read.train.steps, read.run.rollouts_every) == (2, 0)
    assert read.run.dir == f"{run.path}-replay"
    read = replay.replay_config(names, None, ["train.steps=7", "run.dir=x", "run.rollouts_every=3"])
    assert (read.train.steps, read.run.dir, read.run.rollouts_every) == (7, "x", 3)
    alone = shutil.copy(files[0], tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=r"which config\? there is no .*: give --config CONFIG"):
        replay.replay_config([alone])
    with pytest.raises(InputError, match=r"which config\? they are of several runs"):
        replay.replay_config([files[0], alone])
    file = tmp_path / "own.toml"
    file.write_text(configs.to_toml(config("own")))
    assert replay.replay_config([alone], str(file)).run.dir == "own-replay"


SIZES = {
    "other prompts": ({"rollout": ("prompts_per_step", 4)}, "--set rollout.prompts_per_step=8"),
    "other samples": ({"rollout": ("group_size", 2)}, "--set rollout.group_size=4"),
    "shorter completions": (
        {"rollout": ("max_completion_tokens", 12)},
        "8 prompts x 4 samples, 8 prompt and 24 completion positions, but "
        "rollout.max_completion_tokens = 12: give --set rollout.max_completion_tokens=24",
    ),
    "shorter prompts": ({"rollout": ("max_prompt_tokens", 4)}, "rollout.max_prompt_tokens=8"),
}


@pytest.mark.parametrize("case", SIZES)
def test_rollouts_of_other_sizes_are_refused_with_the_keys_to_set(case, files, tmp_path):
    change, message = SIZES[case]
    table = config(tmp_path / "r")
    for section, (name, value) in change.items():
        smaller = dataclasses.replace(getattr(table, section), **{name: value})
        table = dataclasses.replace(table, **{section: smaller})
    with pytest.raises(InputError) as caught:
        setup(table, rollouts=files)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(files[0]))


def test_what_does_not_fit_a_replay_is_refused(files, tmp_path):
    run_config = config(tmp_path / "r")

    def refused(message, config=run_config, **objects):
        with pytest.raises(InputError, match=message):
            setup(config, **{"rollouts": files, **objects})

    fewer_rewards = config(tmp_path / "r", rewards=[{"use": "arithmetic"}])
    refused(
        "holds rewards called arithmetic, digits, but the config's are called arithmetic",
        fewer_rewards,
    )
    refill = config(tmp_path / "r", **{"rollout.refill": {"factor": 2.0}})
    refused("replay: with rollout.refill no flat group can be replaced; leave the key", refill)
    steps = [{"use": "sum_rewards"}, {"use": "gae", "field": "guess"}]
    needy = config(tmp_path / "r", advantage=steps)
    refused("the method reads the fields guess, which are not there; it holds none", needy)
    refused("dataset and rollouts are both given", dataset=[{"prompt": "1", "answer": "1"}])
    refused("rollouts: no file is given", rollouts=[])
    refused("there is no such file of rollouts", rollouts=tmp_path / "absent")
    lost = edited(tmp_path / "lost.safetensors", files[0], token_mask=lambda mask: None)
    refused(r"lost\.safetensors:\n  token_mask: missing", rollouts=[files[0], lost])
    unknown = edited(tmp_path / "u.safetensors", files[0], completion_tokens=lambda ids: ids + 99)
    refused("the model's tokens", rollouts=unknown)


def test_a_file_that_changes_during_a_replay_is_noticed(files, tmp_path):
    file = shutil.copy(files[0], tmp_path / "x.safetensors")
    saved = setup(config(tmp_path / "r"), rollouts=[files[0], file]).inputs.replay
    assert saved is not None
    saved.load(1)
    saved.load(0)  # so that the other is read again
    edited(file, files[0], behavior_logp=lambda logp: logp - 0.5)
    with pytest.raises(InputError, match=r"x\.safetensors: its crc32 is .* when the run began"):
        saved.load(1)
    shutil.copy(files[0], file)
    saved.load(1)
