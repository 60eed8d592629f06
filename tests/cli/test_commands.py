"""The commands around training, run as a user runs them, one after the other."""

import functools
import json
import shutil

import pytest
import small_run
from safetensors.numpy import load_file

from jaxgrpo.cli import inference, init, make_base
from jaxgrpo.cli import main as cli
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders
from jaxgrpo.training import loop
from jaxgrpo.training.checkpoints import parameter_hash
from jaxgrpo.training.stored_policy import config_for


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands") / "r"
    changes = {"eval.data": "task:arithmetic:test", "eval.prompts": 12, "eval.samples": 4}
    return loop.train(small_run.config(folder, **{"train.steps": 2, **changes}))


def main(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    streams = capsys.readouterr()
    return code, streams.out + streams.err


def document(capsys, *arguments):
    """(what --json prints on stdout, what is on stderr)"""
    code = cli.main([*map(str, arguments), "--json"])
    streams = capsys.readouterr()
    assert code == 0, streams.err
    return json.loads(streams.out), streams.err


@pytest.mark.slow
def test_eval_of_a_run_asks_what_the_run_asked(run, tmp_path, capsys):
    rows = tmp_path / "e.jsonl"
    measured, output = document(capsys, "eval", run.path, "--answers", rows)
    assert "in 1 process, jax " in output, "notes go to stderr"
    trained = run.summary["trained"]
    assert measured["accuracy"] == trained["accuracy"]
    assert {"pass@4", "maj@4", "maj@4/low", "pass@4/high", "unscored"} <= measured.keys()
    answers = [json.loads(line) for line in rows.read_text().splitlines()]
    greedy = [answer["rewards"]["arithmetic"] for answer in answers if answer["greedy"]]
    assert len(greedy) == 12
    assert sum(greedy) / 12 == pytest.approx(measured["accuracy"])
    samples = [answer for answer in answers if not answer["greedy"]]
    assert len(samples) == 12 * 4
    scores = [sample["rewards"]["arithmetic"] for sample in samples]
    assert sum(scores) / len(scores) == pytest.approx(measured["pass@1"])
    code, output = main(capsys, "eval", run.path)
    assert code == 0, output
    assert "95% interval" in output
    assert f"{measured['accuracy']:.3f}" in output


@pytest.mark.slow
def test_eval_of_a_run_of_more_devices_takes_all_that_there_are_and_says_so(run, tmp_path, capsys):
    folder = tmp_path / "r"
    shutil.copytree(run.path, folder)
    tables, file = configs.read_tables(folder / "config.toml")
    tables["mesh"] |= {"fsdp": 64, "sampling_tensor": 8}
    file.write_text(configs.write_toml(tables))
    measured, notes = document(capsys, "eval", folder)
    refused, overrides = "fsdp 64, sampling_tensor 8", "mesh.fsdp=1 mesh.sampling_tensor=0"
    line = f"the run's mesh ({refused}) does not fit 4 devices: used with --set {overrides}"
    assert line in notes
    assert measured["accuracy"] == run.summary["trained"]["accuracy"]
    code, output = main(capsys, "eval", folder, "--set", "mesh.sampling_tensor=0")
    assert (code, "fsdp 64" in output, "choose sizes whose product" in output) == (2, True, True)
    assert config_for(folder).mesh.fsdp == 64  # as of `model`, which needs no devices


@pytest.mark.full
@pytest.mark.slow
def test_eval_of_a_model_folder_needs_data_and_a_scorer(run, capsys):
    model = run.path / "model"
    assert main(capsys, "eval", model) == (
        2,
        f"error: eval {model}: nothing to evaluate on; give --data\n",
    )
    code, output = main(capsys, "eval", model, "--data", "task:arithmetic:test")
    assert code == 2
    assert "give --scorer" in output
    measured, _ = document(
        capsys,
        *("eval", model, "--data", "task:arithmetic:test", "--scorer", "arithmetic"),
        *("-n", 2, "--num-prompts", 8),
        *("--set", "rollout.max_completion_tokens=24", "rollout.max_prompt_tokens=8"),
    )
    assert measured["pass@1/low"] >= 0


@pytest.mark.full
def test_probe_of_a_run_asks_its_training_prompts_and_its_own_reward(run, capsys):
    words = ("probe", run.path, "-n", 4, "--num-prompts", 8)
    probe, output = document(capsys, *words)
    assert "rewards on row 0" in output
    assert "what to make of it" not in output
    assert (probe["data"], probe["reward"]) == ("task:arithmetic:train", "arithmetic")
    assert (probe["prompts"], probe["samples"]) == (8, 4)
    assert list(probe["degeneracy"]) == ["2", "4"]
    assert probe["agreement"]["max"] < 1e-3
    code, output = main(capsys, *words)
    assert code == 0, output
    assert "what to make of it" in output


@pytest.mark.full
def test_eval_measures_the_distance_from_a_base(run, tmp_path, capsys):
    base = small_run.base()
    options = ("--set", "eval.confidence=true", "eval.confidence_window=4")

    def measured(*arguments):
        return document(capsys, "eval", *arguments, *options)[0]

    trained = measured(run.path, "--base", base)
    assert trained["kl_to_base"] > 1e-3
    assert trained["kl_to_base/low"] <= trained["kl_to_base"] <= trained["kl_to_base/high"]
    assert {"deepconf@4/least", "deepconf/tail/auroc"} <= trained.keys()
    # Of a run the base is known.
    assert measured(run.path, "--set", "eval.kl_to_base=true") == trained
    sizes = ("rollout.max_completion_tokens=24", "rollout.max_prompt_tokens=8")
    alone = ("--data", "task:arithmetic:test", "--scorer", "arithmetic", "-n", 2)
    alone = (base, *alone, "--num-prompts", 8, "--set", *sizes)
    assert measured(*alone, "--base", base)["kl_to_base"] == pytest.approx(0, abs=1e-5)
    code, output = main(capsys, "eval", *alone, "--set", "eval.kl_to_base=true")
    assert code == 2
    assert "give --base MODEL" in output
    code, output = main(capsys, "eval", *alone, "--base", tmp_path / "none")
    assert code == 2
    assert str(tmp_path / "none") in output


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("quickstart", "the policy of a config is its own base, so that the KL is 0"),
        ("models/none", "a model folder does not say what it was trained from"),
    ],
)
def test_a_kl_to_no_other_model_is_refused_with_the_reason(target, reason):
    config = configs.load("quickstart", ["eval.kl_to_base=true"])
    remedy = "give --base MODEL, or --set eval.kl_to_base=false"
    with pytest.raises(InputError, match=f"eval {target}: .*{reason}; {remedy}"):
        inference._find_base(target, config.model, config.eval, None)


@pytest.mark.slow
def test_sample_writes_rows_for_lines_of_text(run, tmp_path, capsys):
    prompts, out = tmp_path / "p.txt", tmp_path / "s.jsonl"
    prompts.write_text("12+34=\n\n55+66=\n")
    arguments = ("sample", run.path, "--prompts", prompts, "--out", out, "-n", 3)
    code, output = main(capsys, *arguments)
    assert code == 0, output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["12+34="] * 3 + ["55+66="] * 3
    assert all(len(row["logps"]) == len(row["completion_ids"]) for row in rows)
    main(capsys, *arguments[:-2], "--temperature", 0, "-n", 2, "--overwrite")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[0]["completion"] == rows[1]["completion"]
    code, output = main(capsys, *arguments[:3], tmp_path / "none.txt", "--out", out)
    assert code == 2
    assert "there is no such file" in output


@pytest.mark.slow
def test_export_gives_what_was_trained_back(run, tmp_path, capsys):
    out = tmp_path / "out"
    code, output = main(capsys, "export", run.path, out)
    assert code == 0, output
    model = decoder.build(folders.read_config(out))
    assert parameter_hash(folders.read_params(out, model)) == run.summary["parameter_hash"]
    assert {"README.md", "generation_config.json", "tokenizer.json"} <= {
        file.name for file in out.iterdir()
    }
    card = (out / "README.md").read_text()
    assert f"| accuracy | {run.summary['trained']['accuracy']:.3f} (" in card
    assert "accuracy/low" not in card
    code, output = main(capsys, "export", run.path, out, "--dtype", "bfloat16")
    assert code == 0, output
    assert {str(tensor.dtype) for tensor in load_file(out / "model.safetensors").values()} == {
        "bfloat16"
    }
    for step, reason in {"7": "no complete step 7", "best": "keep_best", "x": "--step x"}.items():
        code, output = main(capsys, "export", run.path, tmp_path / "no", "--step", step)
        assert code == 2
        assert reason in output
    assert f"error: {tmp_path}: no run folder" in main(capsys, "export", tmp_path, out)[1]


def test_an_init_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(make_base, "make_base", interrupted)
    assert main(capsys, "init", tmp_path / "new" / "first")[0] == 130
    assert main(capsys, "init", tmp_path)[0] == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full  # `make readme` runs the same commands
def test_what_init_writes_trains_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = functools.partial(make_base.make_base, steps=40)  # of 800: the same files, sooner
    monkeypatch.setattr(make_base, "make_base", short)
    code, output = main(capsys, "init", "first")
    assert code == 0, output
    assert (tmp_path / "first" / "run.toml").read_text() == init.run_toml(init.SMALL)
    monkeypatch.chdir(tmp_path / "first")
    code, output = main(capsys, "train", "run.toml", "--set", "train.steps=2")
    assert code == 0, output
    assert (tmp_path / "first" / "runs" / "first" / "report.html").exists()
    code, output = main(capsys, "init", ".")
    assert code == 2
    names = "run.toml, reward.py, experiment.toml, prompts.txt, data.jsonl, test.jsonl, base"
    assert f"{names} is there already" in output


@pytest.mark.full
def test_what_init_writes_compares_and_samples_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in init.file_texts(init.SMALL).items():
        (tmp_path / name).write_text(text)
    make_base.make_base("base", "arithmetic", steps=1)
    code, output = main(capsys, "compare", "experiment.toml", "--dry-run")
    assert code == 0, output
    assert all(name in output for name in ("grpo", "sign", "12 runs"))
    code, output = main(capsys, "sample", "base", "--prompts", "prompts.txt", "--out", "out.jsonl")
    assert code == 0, output
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "out.jsonl").open()]
    assert prompts == (tmp_path / "prompts.txt").read_text().split()
    code, output = main(capsys, "init", ".")
    assert code == 2
    assert "experiment.toml, prompts.txt, data.jsonl, test.jsonl, base is there" in output
