"""A whole run: what it writes, that it moves what it should, and nothing else."""

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run

import jaxgrpo
from jaxgrpo.cli import inference
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders, texts
from jaxgrpo.planning import preview
from jaxgrpo.training import loop, stored_policy
from jaxgrpo.training.checkpoints import parameter_hash
from jaxgrpo.training.processes import process

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    config = small_run.config(
        folder, **{"eval.data": "task:arithmetic:test", "eval.prompts": 20, "eval.samples": 4}
    )
    steps, out = [], io.StringIO()
    with contextlib.redirect_stdout(out):
        finished = loop.train(config, on_step=lambda *step: steps.append(step), profile=True)
    # run.report is off: no report is named that is not there.
    assert f"\n{folder}: model, metrics.jsonl, samples\n" in out.getvalue()
    assert list(folder.rglob("*.xplane.pb"))  # a trace of the second step
    assert [number for number, _ in steps] == [1, 2, 3]
    assert steps[1][1]["loss"] == small_run.metrics(finished.path)[2]["loss"]
    return config, finished


def read_model(path):
    return decoder.build(folders.read_config(path))


def folder_hash(path):
    return parameter_hash(folders.read_params(path, read_model(path)))


def test_a_run_leaves_config_metrics_samples_summary_checkpoint_and_model(run):
    config, finished = run
    assert configs.load(finished.path / "config.toml") == config
    lines = small_run.metrics(finished.path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert {"reward", "loss", "grad_norm", "live_groups", "entropy"} <= lines[1].keys()
    summary = json.loads((finished.path / "summary.json").read_text())
    assert summary["step"] == 3
    assert summary["parameter_hash"] == folder_hash(finished.path / "model")
    assert summary["base"]["accuracy"] == lines[0]["eval/accuracy"]
    assert summary["trained"]["pass@4"] == lines[3]["eval/pass@4"]
    assert (finished.path / "code" / "small_run.py").exists()


def test_sample_rows_say_what_was_sampled_and_what_it_earned(run):
    config, finished = run
    rows = [
        json.loads(line)
        for line in (finished.path / "samples" / "step_1.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 32
    line = small_run.metrics(finished.path)[1]
    rewards = [row["rewards"]["arithmetic"] for row in rows]
    assert np.mean(rewards) == pytest.approx(line["rewards/arithmetic/mean"])
    tokenizer = folders.read_tokenizer(config.model.path)
    for row in rows:
        assert len(row["logps"]) == len(row["completion_ids"])
        assert (
            tokenizer.decode(row["completion_ids"], skip_special_tokens=True) == row["completion"]
        )
    total = [row["rewards"]["arithmetic"] + 0.2 * row["rewards"]["digits"] for row in rows]
    centred = np.reshape(total, (8, 4)) - np.reshape(total, (8, 4)).mean(1, keepdims=True)
    assert np.sign(centred).ravel().tolist() == pytest.approx(
        np.sign([row["advantage"] for row in rows]).tolist()
    )


@pytest.mark.full
def test_samples_of_a_run_end_with_its_stop_strings_and_without_confidence(tmp_path):
    stopping = {"stop_strings": ["3", "5"], "early_stop": {"confidence": 1e6, "window": 4}}
    changes = {f"rollout.{name}": value for name, value in stopping.items()}
    finished = loop.train(small_run.config(tmp_path / "r", **changes, **{"train.steps": 1}))
    file = finished.path / "samples" / "step_1.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    ended = [row for row in rows if set(row["completion"]) & set("35")]
    assert 0 < len(ended) < len(rows)
    for row in ended:
        assert set(row["completion"][:-1]).isdisjoint("35")
        assert not row["truncated"]
    assert max(len(row["completion_ids"]) for row in rows) == 4  # no confidence is so high


def test_training_moves_the_parameters(run):
    config, finished = run
    assert folder_hash(config.model.path) != finished.summary["parameter_hash"]


@pytest.mark.full
@pytest.mark.parametrize(
    "control", ["zero reward", pytest.param("learning rate 0", marks=pytest.mark.full)]
)
def test_without_signal_or_rate_the_weights_stay_byte_for_byte(tmp_path, control):
    changes: dict[str, Any] = {"run.samples_every": 0}
    if control == "zero reward":
        changes["rewards"] = [{"use": f"{small_run.__file__}:nothing"}]
        changes["train.on_no_live_sample"] = "skip"  # adamw's decay would move them
    else:
        changes["optimizer"] = {"learning_rate": 0.0}
    finished = loop.train(small_run.config(tmp_path / "r", **changes))
    base = (finished.path / "model" / "model.safetensors").read_bytes()
    with open(f"{small_run.base()}/model.safetensors", "rb") as file:
        assert file.read() == base
    skipped = small_run.metrics(finished.path)[-1]["skipped_updates/no_live_sample"]
    assert skipped == (control == "zero reward")


def test_the_loop_written_out_by_hand_ends_with_the_same_parameters(
    tmp_path, repository, monkeypatch, capsys, run
):
    _, finished = run
    file = small_run.write(tmp_path / "own.toml", tmp_path / "unused")
    example = repository / "examples" / "own_loop.py"
    assert len(example.read_text().splitlines()) <= 40
    monkeypatch.setattr(sys, "argv", [str(example), str(file)])
    runpy.run_path(str(example), run_name="__main__")
    assert finished.summary["parameter_hash"] in capsys.readouterr().out


@pytest.mark.full
def test_own_parts_of_the_examples_train(tmp_path, repository):
    examples = repository / "examples"
    advantage = [
        {"use": "sum_rewards"},
        {"use": f"{examples}/own_advantage.py:subtract_group_median"},
        {"use": f"{examples}/own_advantage.py:soft_clip", "limit": 3.0},
    ]
    rewards = [{"use": f"{examples}/own_reward.py:short_and_right", "limit": 12}]
    prompts = {"use": f"{examples}/own_prompts.py:rest_when_solved", "reward": "short_and_right"}
    changes = {
        "advantage": advantage,
        "rewards": rewards,
        "loss.surrogate": {"use": f"{examples}/own_surrogate.py:power_of_ratio", "power": 0.25},
        "loss.kl": {"use": f"{examples}/own_penalty.py:huber_kl", "beta": 0.1},
        "rollout.prompts": prompts,
        "train.steps": 1,
    }
    finished = loop.train(small_run.config(tmp_path / "r", **changes))
    line = small_run.metrics(finished.path)[0]
    assert line["reward"] < 0 < line["grad_norm"]
    assert line["power_of_ratio/clamped"] == line["huber_kl/beyond"] == 0
    assert {file.name for file in (finished.path / "code").iterdir()} == {
        *("own_advantage.py", "own_reward.py", "own_prompts.py"),
        *("own_surrogate.py", "own_penalty.py"),
    }


@pytest.mark.full
def test_python_objects_take_the_place_of_what_the_config_names(tmp_path):
    colours = []

    def count(completions, colour, **columns):
        colours.extend(colour)
        return [float(len(text)) for text in completions]

    dataset = [{"prompt": f"1{n}+20=", "answer": "", "colour": "red"} for n in range(9)]
    import jaxgrpo as jg

    finished = loop.train(
        small_run.config(tmp_path / "r", **{"train.steps": 1}),
        rewards=[count],
        advantage=jg.chain(jg.sum_rewards(), jg.subtract_group_mean()),
        dataset=dataset,
    )
    assert colours == ["red"] * (2 + 32)  # the trial on row 0, and a step
    assert "rewards/count/mean" in small_run.metrics(finished.path)[0]


@pytest.mark.full
def test_a_run_that_diverges_ends_and_names_the_last_good_checkpoint(tmp_path, capsys):
    def spoiled(signal, rollouts):
        value = jnp.where(rollouts.step > 0, jnp.nan, signal.value)
        return dataclasses.replace(signal, value=value)

    chain = jaxgrpo.chain(jaxgrpo.advantages.sum_rewards(), spoiled)
    keys = {"train.steps": 9, "train.stop_after_not_finite": 2, "checkpoint.every": 1}
    config = small_run.config(tmp_path / "r", **keys)
    with pytest.raises(process.Diverged) as caught:
        loop.train(config, advantage=chain)
    lines = small_run.metrics(tmp_path / "r")
    assert [line["skipped_updates/not_finite"] for line in lines] == [0, 1, 1]
    message = str(caught.value)
    assert "step 3: gradient, log-probs or entropy are not finite, 2 steps in a row" in message
    assert f"is of step 1, `jaxgrpo export {tmp_path / 'r'} OUT --step 1`" in message
    assert not (tmp_path / "r" / "model").exists()

    again = small_run.config(tmp_path / "again", **keys)
    loop.train(again, advantage=chain, train={"steps": 2})
    with pytest.raises(process.Diverged, match=r"step 3: .* 2 steps in a row"):
        loop.train(again, advantage=chain, resume="auto")

    config = small_run.config(tmp_path / "large", **{"optimizer.learning_rate": 1e6})
    assert process.guard(lambda: loop.train(config) and 0) == 5
    message = capsys.readouterr().err
    assert "step 1: one update made the weights" in message
    assert "no checkpoint is from before" in message
    assert "lower optimizer.learning_rate (1e+06 here)" in message


def test_a_method_that_needs_what_nobody_produces_is_refused(tmp_path):
    import jaxgrpo as jg

    needy = jg.transform(lambda signal, rollouts: signal, name="needy")._replace(
        needs=frozenset({"answer_length"})
    )
    with pytest.raises(InputError, match=r"needs answer_length.*reference_logp.*prompt"):
        loop.train(small_run.config(tmp_path / "r"), advantage=jg.chain(jg.sum_rewards(), needy))


@pytest.mark.full
def test_a_numeric_column_of_the_data_is_a_field_of_the_method(tmp_path):
    import jaxgrpo as jg

    def by_level(signal, rollouts):
        harder = (rollouts.fields["level"] > 1)[:, None]
        return dataclasses.replace(signal, mask=signal.mask & harder)

    step = jg.transform(by_level)._replace(needs=frozenset({"level"}))
    config = small_run.config(tmp_path / "r", **{"train.steps": 1})
    loop.train(config, advantage=jg.chain(jg.sum_rewards(), step))
    import jaxgrpo

    rows = jaxgrpo.tasks.load("task:arithmetic:train")
    lines = (tmp_path / "r" / "samples" / "step_1.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    easy = [sample["advantage"] for sample in samples if rows[sample["row"]]["level"] == 1]
    hard = [sample["advantage"] for sample in samples if rows[sample["row"]]["level"] > 1]
    assert not any(easy)
    assert any(hard)


def test_a_run_goes_on_only_with_its_own_config(tmp_path, run):
    config, _ = run
    reseeded = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1))
    with pytest.raises(InputError, match=r"train\.seed: 0 -> 1"):
        loop.train(reseeded, resume="auto")
    with pytest.raises(InputError, match="--resume auto"):
        loop.train(config)


@pytest.mark.full
def test_a_finished_run_can_be_trained_further(tmp_path):
    config = small_run.config(tmp_path / "r", **{"train.steps": 2})
    loop.train(config)
    longer = small_run.config(tmp_path / "r")
    checkpoints = tmp_path / "r" / "checkpoints"
    checkpoints.rename(tmp_path / "kept")
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"no checkpoint to go on from .* does not exist"):
        loop.train(longer, resume="auto")
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before
    (tmp_path / "kept").rename(checkpoints)
    finished = loop.train(longer, resume="auto")
    straight = loop.train(small_run.config(tmp_path / "s"))
    assert finished.summary["parameter_hash"] == straight.summary["parameter_hash"]
    assert small_run.metrics(tmp_path / "r") == small_run.metrics(tmp_path / "s")


def test_a_dry_run_shows_config_geometry_and_the_first_prompt(tmp_path, capsys):
    held_out = {"data": "task:arithmetic:train", "prompts": 3, "kl_to_base": False}
    preview.dry_run(small_run.config(tmp_path / "r", eval=held_out))
    shown = capsys.readouterr().out
    for part in [
        "3 of 3 prompts are training prompts too",
        "parameters",
        "8 prompts x 4 samples = 32",
        "first prompt",
        "tokens: '",
        "seed = 0",
    ]:
        assert part in shown
    assert not (tmp_path / "r").exists()


@pytest.mark.full
def test_the_best_step_by_an_evaluation_stays_and_is_exported(tmp_path):
    changes = {
        "eval": {"data": "task:arithmetic:test", "every": 1, "prompts": 8, "samples": 4},
        "checkpoint": {"every": 4, "keep": 1, "keep_best": "eval/mean_length"},
        "optimizer": {"learning_rate": 0.02},
        "train.steps": 4,
    }
    finished = loop.train(small_run.config(tmp_path / "r", **changes))
    lengths = [line["eval/mean_length"] for line in finished.metrics][1:]
    best = 1 + int(np.argmax(lengths))
    assert best < 4, "the example must not be at its best in the end"
    assert finished.summary["best"] == {"step": best, "eval/mean_length": max(lengths)}
    saved_steps = sorted(int(folder.name) for folder in (tmp_path / "r" / "checkpoints").iterdir())
    assert saved_steps == [best, 4]
    exported = finished.export(tmp_path / "best", step="best")
    assert folder_hash(exported) != finished.summary["parameter_hash"]
    assert folder_hash(finished.export(tmp_path / "last")) == finished.summary["parameter_hash"]
    assert f"{best} of 4 steps" in (exported / "README.md").read_text()
    last = finished.export(tmp_path / "number", step=np.int64(4))  # as of a table of metrics
    assert folder_hash(last) == finished.summary["parameter_hash"]
    half = finished.export(tmp_path / "half", dtype="bfloat16")
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.full
@pytest.mark.parametrize("key", ["checkpoint.keep_best", "reference.reset_metric"])
def test_a_best_step_by_an_unknown_metric_is_refused_before_training(key, tmp_path):
    changes = {
        "eval": {"data": "task:arithmetic:test", "every": 1, "prompts": 4, "samples": 4},
        "reference.reset_patience": 2,
        "loss.kl": {"use": "k2", "beta": 0.01},
        key: "eval/acuracy",
    }
    with pytest.raises(InputError, match=r"did you mean .eval/accuracy"):
        loop.train(small_run.config(tmp_path / "r", **changes))
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_a_config_is_put_together_from_dicts_objects_and_keys(tmp_path):
    tables = small_run.tables(tmp_path / "r")
    del tables["rewards"]

    def short(completions, **columns):
        return [-float(len(text)) for text in completions]

    seed: dict[str, Any] = {"train.seed": 5}
    finished = loop.train(tables, rewards=[short], train={"steps": 1}, **seed)
    recorded = configs.load(finished.path / "config.toml")
    assert (recorded.train.steps, recorded.train.seed) == (1, 5)
    assert [reward.use for reward in recorded.rewards] == ["python:short"]
    assert finished.metrics[0]["reward"] < 0
    assert {row["step"] for row in finished.samples} == {1}
    with pytest.raises(InputError, match="begun from Python with the object short"):
        loop.train(recorded, resume="auto")
    further = loop.train(recorded, resume="auto", rewards=[short], train={"steps": 2})
    assert further.summary["step"] == 2


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"run\.dir = /proc/nowhere cannot be written"):
        loop.train(small_run.config("/proc/nowhere"))


@pytest.mark.parametrize(
    ("values", "reason"), [([1.0], "returned 1 values for 2"), (["a", "b"], "'a' for completion 0")]
)
def test_a_reward_of_wrong_length_or_type_is_refused_before_the_first_step(
    tmp_path, values, reason
):
    def wrong(completions, **columns):
        return values

    with pytest.raises(InputError, match=reason):
        loop.train(small_run.config(tmp_path / "r"), rewards=[wrong])
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


@pytest.mark.full
def test_bfloat16_computes_and_float32_is_trained(tmp_path):
    changes = {"model.dtype": "bfloat16", "loss.kl": {"use": "k2", "beta": 0.01}}
    changes["optimizer"] = {"learning_rate": 1e-6}  # lost in bfloat16
    finished = loop.train(small_run.config(tmp_path / "r", **changes))
    before = folders.read_params(small_run.base(), read_model(small_run.base()))
    trained = finished.learner.trainable
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(trained)} == {"float32"}
    frozen = finished.learner.frozen["reference"]
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(frozen)} == {"bfloat16"}
    kernel = ("blocks", "0", "feed_forward", "up", "kernel")
    was, now = (functools.reduce(lambda tree, key: tree[key], kernel, p) for p in (before, trained))
    assert 1e-6 < np.abs(np.asarray(now) - np.asarray(was)).max() < 1e-5
    assert 0 < finished.metrics[0]["sampling/sampling_logp_difference/max"] < 0.1


@pytest.mark.full
def test_a_run_on_rows_and_rewards_from_python_is_exported(tmp_path):
    tables = small_run.tables(tmp_path / "r", **{"train.steps": 1, "mesh.fsdp": 2})
    del tables["data"]
    finished = loop.train(
        configs.from_dict(tables),
        rewards=[lambda completions, **columns: [float(len(text)) for text in completions]],
        dataset=[{"prompt": f"1{n}+20=", "answer": ""} for n in range(9)],
    )
    elsewhere = configs.from_dict({**tables, "mesh": {"fsdp": 64}})  # more devices than here
    (tmp_path / "r" / "config.toml").write_text(configs.to_toml(elsewhere))
    exported = finished.export(tmp_path / "out")
    assert folder_hash(exported) == finished.summary["parameter_hash"]


@pytest.mark.full
def test_every_end_token_ends_a_sample_and_what_is_written_has_the_files_of_the_base(tmp_path):
    path = tmp_path / "base"
    shutil.copytree(small_run.base(), path)
    (five,) = folders.read_tokenizer(path)("5", add_special_tokens=False)["input_ids"]
    fields = json.loads((path / "generation_config.json").read_text())
    ends = [fields["eos_token_id"], five]
    (path / "generation_config.json").write_text(json.dumps({**fields, "eos_token_id": ends}))
    (path / "merges.txt").write_text("a b")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rotary_pct": 1.0}))
    changes = {"model.path": str(path), "model.ignore": ["rotary_pct"], "train.steps": 1}
    changes |= {"data.chat_template": str(template)}
    finished = loop.train(small_run.config(tmp_path / "r", **changes))
    with_five = [row for row in finished.samples if "5" in row["completion"]]
    assert with_five
    for row in with_five:
        assert row["completion"].index("5") == len(row["completion"]) - 1
        assert not row["truncated"]
    for folder in (finished.path / "model", finished.export(tmp_path / "out")):
        for file in texts.text_files(path):
            assert (folder / file.name).read_bytes() == file.read_bytes()
        assert (folder / "chat_template.jinja").read_text() == template.read_text()


@pytest.mark.full
def test_a_run_that_goes_on_holds_one_state_on_its_devices(tmp_path):
    def live_bytes(completions, log_metric, **columns):
        log_metric(
            "held", sum(leaf.nbytes for leaf in jax.live_arrays() if id(leaf) not in earlier)
        )
        return [float(len(text)) for text in completions]

    sizes = []
    for steps, resume in ((2, None), (4, "auto")):
        before = jax.live_arrays()  # of other tests; held, for their ids to stay theirs
        earlier = set(map(id, before))
        config = small_run.config(tmp_path / "r", **{"train.steps": steps})
        finished = loop.train(config, resume=resume, rewards=[live_bytes])
        sizes.append(finished.metrics[-1]["held"])
        del finished, before
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


def test_a_run_is_shown_without_its_arrays():
    arrays: Any = jnp.zeros(9)
    run = loop.Run(Path("runs", "x"), {"step": 3}, arrays, arrays)
    assert (repr(run), f"{run}") == ("Run('runs/x', step 3)",) * 2
    assert run._replace(summary={}).learner is arrays


def test_a_home_folder_may_be_named_by_its_mark(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    small_run.write(tmp_path / "run.toml", tmp_path / "r")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.toml").write_bytes((tmp_path / "run.toml").read_bytes())
    assert configs.load("~/run.toml").train.steps == 3
    assert stored_policy.is_run("~/r")
    assert stored_policy.read_run("~/r")[0] == tmp_path / "r"
    assert stored_policy.config_for("~/r").model.path == str(tmp_path / "r" / "model")
    (tmp_path / "base").symlink_to(small_run.base())
    config = small_run.config(tmp_path / "r")
    base = inference._find_base("~/r", config.model, config.eval, "~/base")
    assert base is not None
    assert base[0].path == str(tmp_path / "base")


async def follow(number, metrics):
    return number, metrics


@pytest.mark.parametrize(
    ("on_step", "message"),
    [
        (lambda metrics: None, "on_step: too many positional arguments: it is called with a step"),
        (5, "on_step: 5 is not a callable object: it is called with a step's number"),
        (follow, "on_step is async, and nothing awaits it"),
    ],
)
def test_a_function_that_cannot_follow_a_step_is_refused_before_the_run(tmp_path, on_step, message):
    train = inspect.unwrap(loop.train)  # of the check that make test-all has around it
    with pytest.raises(InputError, match=message):
        train(small_run.config(tmp_path / "r"), on_step=on_step)
    assert not (tmp_path / "r").exists()
