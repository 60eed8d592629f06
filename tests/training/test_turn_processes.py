"""Runs with tools that take any time: the same samples on any devices, in any number of processes,
and after a kill."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest
import small_run
from processes import together

from jaxgrpo.training import loop
from jaxgrpo.training.records.rollout_files import load as load_rollouts

pytestmark = pytest.mark.slow

CODE = '''
import os
import random
import time


def parse(text):
    return text, [{"name": "look", "arguments": {"words": text}}] if sum(map(ord, text)) % 3 else []


class Slow:
    """Answers after a while that nothing decides."""

    def reset(self, seed, **row):
        self.seed, self.looks = seed, 0
        return f"{seed % 10}+"

    def look(self, words: str) -> str:
        """Looks.

        Args:
            words: for what
        """
        time.sleep(random.SystemRandom().random() * float(os.environ.get("LONGEST", "0")))
        self.looks += 1
        return str(len(words) * self.looks + self.seed % 7)

    async def wait(self, words: str) -> str:
        """Waits.

        Args:
            words: for what
        """
        return words

    def get_reward(self):
        return float(self.looks)


class Lacking(Slow):
    """Has what it reads on the first host alone."""

    def get_reward(self):
        if os.environ["JAX_PROCESS_ID"] == "1":
            raise FileNotFoundError("boards.json")
        return 1.0
'''
MESH = {"mesh": {"data": 2, "fsdp": 2}}
LIMIT = 300  # seconds of a run
STEPS = 3


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(CODE)
    return path


def changes(code, **more: Any) -> dict[str, Any]:
    values = {
        "environment": f"{code}:Slow",
        "rollout.call_format": f"{code}:parse",
        "rollout.max_completion_tokens": 40,
        "rollout.max_prompt_tokens": 12,
        "rollout.max_turns": 3,
        "optimizer": {"use": "sgd", "learning_rate": 0.1},
        "train.steps": STEPS,
        "checkpoint.every": 1,
        "run.rollouts_every": 1,
    }
    return {**values, **more}


def files(folder) -> list[Any]:
    paths = sorted((folder / "rollouts").iterdir())
    assert len(paths) == STEPS
    return paths


def assert_same_samples(folder, expected) -> None:
    for file, again in zip(files(folder), files(expected), strict=True):
        left, right = load_rollouts(file), load_rollouts(again)
        for name in ("completion_tokens", "token_mask", "prompt_tokens", "truncated"):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
        assert left.fields.keys() == right.fields.keys() >= {"turn", "state_hash", "version"}
        for name, field in left.fields.items():
            np.testing.assert_array_equal(field, right.fields[name], err_msg=name)
        np.testing.assert_array_equal(left.rewards["Slow"], right.rewards["Slow"])
        np.testing.assert_allclose(left.behavior_logp, right.behavior_logp, atol=1e-4)
        assert (left.fields["turn"].max(-1) == 2).any()


def start(python, environment, file, count: int, *arguments: str):
    """`count` processes that train as one run on four devices, with tools of up to .3 seconds."""
    each = together(count) if count > 1 else [{}]
    return [
        small_run.command(
            *(python, "train", file, *arguments),
            env=environment(devices=4 // count, LONGEST="0.3", **variables),
        )
        for variables in each
    ]


def end(processes) -> list[str]:
    """Waits for the processes. Returns their outputs."""
    outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


@pytest.mark.full
def test_four_devices_draw_the_samples_of_one_whatever_time_tools_take(tmp_path, code, monkeypatch):
    single = loop.train(small_run.config(tmp_path / "one", **changes(code)))
    monkeypatch.setenv("LONGEST", "0.3")
    four = loop.train(small_run.config(tmp_path / "four", **changes(code, **MESH)))
    assert_same_samples(four.path, single.path)


def assert_same_evaluations(folder, expected) -> None:
    single, several = small_run.metrics(expected), small_run.metrics(folder)
    assert [line["step"] for line in several] == [*range(STEPS + 1)]
    evaluated = 0
    for left, right in zip(single, several, strict=True):
        measured = {name: value for name, value in left.items() if name.startswith("eval/")}
        evaluated += bool(measured)
        assert {name: right[name] for name in measured} == pytest.approx(measured, nan_ok=True)
    assert evaluated == 2  # of the base, and behind the last step


@pytest.mark.full
def test_two_processes_draw_the_samples_of_one_also_after_a_kill(
    tmp_path, code, python, environment
):
    """And evaluate a number of prompts that their devices do not divide."""
    folders = {name: tmp_path / name for name in ("one", "two", "killed")}
    evaluated = {"eval.data": "task:arithmetic:test", "eval.prompts": 3, "eval.samples": 2}
    more = {**MESH, **evaluated}
    configured = {
        name: small_run.write(tmp_path / f"{name}.toml", folder, **changes(code, **more))
        for name, folder in folders.items()
    }
    end(start(python, environment, configured["one"], 1))
    end(start(python, environment, configured["two"], 2))
    assert_same_samples(folders["two"], folders["one"])
    assert_same_evaluations(folders["two"], folders["one"])
    doomed = start(python, environment, configured["killed"], 2)
    log, began = folders["killed"] / "metrics.jsonl", time.monotonic()
    while not log.exists() or log.read_text().count("\n") < 2:  # the base's line, and step 1
        assert time.monotonic() - began < LIMIT
        assert doomed[1].poll() is None, doomed[1].communicate()[0]
        time.sleep(0.05)
    time.sleep(0.2)  # tools are running
    doomed[1].send_signal(signal.SIGKILL)
    outputs = [process.communicate(timeout=LIMIT)[0] for process in doomed]
    assert doomed[1].returncode == -signal.SIGKILL
    assert doomed[0].returncode not in (0, None), outputs[0]
    end(start(python, environment, configured["killed"], 2, "--resume", "auto"))
    for file, again in zip(files(folders["two"]), files(folders["killed"]), strict=True):
        assert file.read_bytes() == again.read_bytes()
    weights = [folders[name] / "model" / "model.safetensors" for name in ("two", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.full
def test_the_first_process_says_how_an_environment_of_another_broke(
    tmp_path, code, python, environment
):
    more = {**MESH, "environment": f"{code}:Lacking", "train.steps": 1}
    file = small_run.write(tmp_path / "run.toml", tmp_path / "run", **changes(code, **more))
    output, _ = end(start(python, environment, file, 2))
    assert "process 1: Lacking: get_reward raised FileNotFoundError: boards.json" in output
    (line,) = small_run.metrics(tmp_path / "run")
    assert line["environment/broken"] == 0.5
