"""`jaxgrpo sft`: the loss of the answers, what it teaches, and the folder that it leaves."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import small_run
from rich.console import Console

import jaxgrpo
from jaxgrpo.cli.main import main
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.experiments import sft
from jaxgrpo.models.hf import folders
from jaxgrpo.training import memory
from jaxgrpo.training.processes import peers
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

ROWS = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n}"} for n in range(1, 9)]
STEPS = 60
CODE = '''
class Judge:
    def reset(self, seed):
        """Begins."""

    def step(self, text):
        return "", 1.0, True


def look(words: str) -> str:
    """Looks.

    Args:
        words: for what
    """
    return words


def parse(text):
    return text, []
'''


def write(folder: Path, rows: Any = ROWS, **changes: Any) -> Path:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "data.path": str(data),
        "train.steps": STEPS,
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.0},
        "rewards": [{"use": "math"}],
        "recipe": "dapo",
        "eval": {"data": "task:arithmetic:test", "every": 1},
        "train.minibatches": 2,
        **changes,
    }
    return small_run.write(folder / "run.toml", folder / "run", **keys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished warm start."""
    folder = tmp_path_factory.mktemp("sft")
    assert main(["sft", str(write(folder))]) == 0
    return folder / "run-sft"


def test_the_loss_is_the_mean_nll_of_the_answers_with_their_end_and_falls(trained):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_run.base())
    model = AutoModelForCausalLM.from_pretrained(small_run.base(), dtype="float32")
    total, right, count = 0.0, 0, 0
    for row in ROWS:  # the first step takes all of them
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logp = logits.double().log_softmax(-1)
        total -= logp[range(len(answer)), answer].sum().item()
        right += (logits.argmax(-1) == torch.tensor(answer)).sum().item()
        count += len(answer)
    lines = small_run.metrics(trained)
    assert lines[0]["num_tokens"] == count
    assert lines[0]["loss"] == pytest.approx(total / count, rel=1e-5)
    assert lines[0]["token_accuracy"] == pytest.approx(right / count)
    assert lines[-1]["loss"] < 0.1 < 1 < lines[0]["loss"]
    assert lines[-1]["token_accuracy"] == 1


@pytest.mark.full
def test_its_folder_is_a_model_that_answers_greedily_and_that_a_run_begins_with(trained, tmp_path):
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in ROWS))
    out = tmp_path / "out.jsonl"
    words = ("--prompts", prompts, "--out", out, "--temperature", "0", "--samples", "1")
    limits = ("--set", "rollout.max_prompt_tokens=8", "rollout.max_completion_tokens=8")
    assert main(["sample", str(trained / "model"), *map(str, words), *limits]) == 0
    answers = [json.loads(line)["completion"] for line in out.read_text().splitlines()]
    assert answers == [row["answer"] for row in ROWS]
    run = jaxgrpo.train(
        small_run.config(tmp_path / "r", **{"model.path": str(trained / "model"), "train.steps": 1})
    )
    assert run.metrics[0]["step"] == 1


@pytest.mark.full
def test_a_warm_start_that_is_continued_ends_as_one_that_was_not(trained, tmp_path, capsys):
    file = write(tmp_path)
    assert main(["sft", str(file), "--set", "train.steps=7"]) == 0
    assert main(["sft", str(file), "--resume", "auto"]) == 0
    ends = [
        json.loads((run / "summary.json").read_text()) for run in (trained, tmp_path / "run-sft")
    ]
    assert ends[0]["parameter_hash"] == ends[1]["parameter_hash"]
    assert len(small_run.metrics(tmp_path / "run-sft")) == STEPS
    assert main(["sft", str(file), "--resume", "auto"]) == 0  # which is finished, and stays so
    assert json.loads((tmp_path / "run-sft" / "summary.json").read_text()) == ends[1]
    write(tmp_path, ROWS[::-1])
    for more in ([], ["--dry-run"]):
        capsys.readouterr()
        assert main(["sft", str(file), "--resume", "auto", *more, "--set", "train.steps=61"]) == 2
        assert "rows: 8 rows" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.fault(18)
def test_a_warm_start_whose_weights_are_of_no_use_ends_in_a_line(tmp_path, capsys):
    file, key = write(tmp_path), "optimizer.learning_rate"
    assert main(["sft", str(file), "--set", "train.steps=9", f"{key}=1e6"]) == 5
    error = capsys.readouterr().err
    assert "run-sft: step 1: one update made the weights" in error
    assert f"no checkpoint is from before; begin a new run with a lower {key} (1e+06 here)" in error
    assert not (tmp_path / "run-sft" / "model").exists()


@pytest.mark.full
@pytest.mark.fault(13)
def test_a_warm_start_on_a_full_disk_ends_in_a_line_and_is_continued(trained, tmp_path, capsys):
    file, size = write(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    command = ["sft", str(file), "--set", "train.steps=8"]
    assert main(["sft", str(file), "--set", "train.steps=4"]) == 0
    capsys.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, size[1]))
    try:
        assert main([*command, "--resume", "auto"]) == 74
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, size)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: step 8: ")
    assert line.endswith("make space and go on by --resume auto")
    assert main([*command, "--resume", "auto"]) == 0
    assert small_run.metrics(tmp_path / "run-sft") == small_run.metrics(trained)[:8]


@pytest.mark.full
def test_adapters_alone_are_trained_and_merged(tmp_path):
    changes = {"lora": {"rank": 4}, "train.steps": 2, "train.minibatches": 1}
    read = sft.config_for(write(tmp_path, **changes))
    sft.train(Console(quiet=True), read)
    folder = tmp_path / "run-sft"
    assert (folder / "adapter" / "adapter_config.json").exists()
    model, params = jaxgrpo.load_model(folder / "model")
    before = folders.read_params(small_run.base(), model)
    same = [
        np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (params, before)), strict=True)
    ]
    assert any(same)
    assert not all(same)


@pytest.mark.full
def test_a_dry_run_shows_the_first_answer_and_writes_nothing(tmp_path, capsys):
    assert main(["sft", str(write(tmp_path)), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for word in ("first prompt", "its answer", "copies 0 B", "[optimizer]"):
        assert word in shown
    assert not (tmp_path / "run-sft").exists()


def test_no_memory_is_asked_for_samples_that_a_warm_start_does_not_draw(tmp_path, monkeypatch):
    config = sft.config_for(write(tmp_path))
    needed, sampled = (setup(config, **{**sft.SETUP, "samples": n}).memory for n in (False, True))
    assert needed.peak == needed.persistent < sampled.peak
    monkeypatch.setattr(memory, "device_bytes", lambda mesh: needed.persistent)
    setup(config, **sft.SETUP)
    with pytest.raises(InputError, match="the run does not fit its devices"):
        setup(config, **{**sft.SETUP, "samples": True})
    with pytest.raises(InputError, match=r"the run does not fit its devices .* update: working"):
        sft.main(str(tmp_path / "run.toml"), dry_run=True)


def test_answers_that_are_missing_or_too_long_are_refused_before_the_first_step(
    tmp_path, monkeypatch
):
    watch = SimpleNamespace(timeout=15.0)
    monkeypatch.setattr(peers, "_watch", watch)

    def train(rows: Any) -> None:
        config = sft.config_for(write(tmp_path, rows, **{"run.peer_timeout": 77}))
        sft.train(Console(quiet=True), config)

    with pytest.raises(InputError, match=r"1 of 9 answers are longer .* = 24 with their end token"):
        train([*ROWS, {"prompt": "1+1=", "answer": "2" * 24}])
    with pytest.raises(InputError, match="1 of 9 rows hold no answer"):
        train([*ROWS, {"prompt": "1+1=", "answer": None}])
    assert watch.timeout == 77, "other processes may be silent for as long as the config says"


def test_the_config_of_a_warm_start_reads_no_method_of_the_run(tmp_path):
    file = write(tmp_path, **{"loss.kl": {"use": "k2", "beta": 0.1}, "rollout.temperature": 0.5})
    read = sft.config_for(file)
    assert (read.loss.kl, read.eval.data, read.rollout.temperature) == (None, None, 1.0)
    assert read.run.dir.endswith("run-sft")
    assert sft.config_for(file, ["run.dir=x"]).run.dir == "x"
    samples = {
        "tree": {"branch": "uniform", "trees": 1, "nodes": 1, "rounds": 3},
        "atlas": {"methods": ["sign", "grpo"]},
        "scores": [{"name": "hot_entropy", "quantity": "entropy", "temperature": 2.0}],
        "loss.entropy": {"use": "bonus", "coefficient": 0.001},
        "rollout.top_k": 5,
        "train.support": "replay",
        "data.answer_prefix": "so",
        "train.minibatches": 1,
    }
    assert sft.config_for(write(tmp_path, **samples)) == read
    shared = {"experience": {"share": 0.5}, "train.routing": "fresh", "data.completion": "answer"}
    assert sft.config_for(write(tmp_path, **shared)) == read
    assert configs.from_dict(configs.to_tables(read)) == read


@pytest.mark.full
def test_an_environment_that_rewards_does_not_change_the_loss_of_the_answers(trained, tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    changes = {"environment": f"{tmp_path}/mine.py:Judge", "train.steps": 1}
    sft.train(Console(quiet=True), sft.config_for(write(tmp_path, **changes)))
    (line,) = small_run.metrics(tmp_path / "run-sft")
    assert line["loss"] == pytest.approx(small_run.metrics(trained)[0]["loss"], rel=1e-6)


def test_a_warm_start_reads_the_format_of_calls_of_a_run_with_tools(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    tools = {"tools": [f"{tmp_path}/mine.py:look"], "rollout.max_turns": 3}
    parse = f"{tmp_path}/mine.py:parse"
    file = write(tmp_path, **tools, **{"rollout.call_format": parse})
    read = sft.config_for(file)
    assert (read.rollout.call_format, read.rollout.max_turns) == (parse, 8)
    assert setup(read, **sft.SETUP).inputs.chat.tools[0]["function"]["name"] == "look"
    read = sft.config_for(file, ["rollout.call_format=hermes"])
    assert read.rollout.call_format == "hermes"


def test_the_delimiter_of_an_evaluation_is_not_read(tmp_path):
    (tmp_path / "e.csv").write_text("prompt;answer\n1;2\n")
    (tmp_path / "t.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    for name, delimiter in (("t.jsonl", ","), ("e.csv", ";")):
        paths = {"data.path": str(tmp_path / name), "eval.data": str(tmp_path / "e.csv")}
        file = write(tmp_path, **paths, **{"data.delimiter": ";"})
        assert sft.config_for(file).data.delimiter == delimiter
