"""Long runs, many rewards, many strangers, long reports: nothing grows and nothing waits."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import faulty_runs
import numpy as np
import pytest
import small_run

from benchmarks.programs import compilations
from jaxgrpo.rewards import Reward, RewardError, call_rewards
from jaxgrpo.training import loop

STEPS, WARM_UP = 500, 100

GAUGES = """
if step % 20 == 0 and not is_called_to_try:
    gc.collect()
    pages = int(open("/proc/self/statm").read().split()[1])
    state = [step, pages * 4, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]
    state += [len(jax.live_arrays()), process.Programs.begun]
    with open(__file__ + ".gauges", "a") as file:
        file.write(json.dumps(state) + chr(10))
"""
IMPORTS = "import gc, json, os\nimport jax\nfrom jaxgrpo.training.processes import process"


@pytest.mark.fault(6)
@pytest.mark.full
def test_500_steps_take_no_more_memory_descriptors_threads_or_programs_than_100(
    base, tmp_path, start, tries
):
    """Ragged ones: the number of micro-batches and the lengths differ from step to step."""
    changes = {"train.steps": STEPS, "checkpoint.every": 50, "run.samples_every": 100}
    changes |= {"train.tokens_per_micro_batch": 64, "tracking": {"tensorboard": True}}
    file = faulty_runs.write(base, tmp_path, GAUGES, IMPORTS, **changes)
    run = start("train", file)
    output, _ = run.communicate(timeout=400)
    assert run.returncode == 0, output[-2000:]
    text = (tmp_path / "mine.py.gauges").read_text()
    gauges = np.array([json.loads(line) for line in text.splitlines()])
    steps, kilobytes, *counts = gauges[gauges[:, 0] >= WARM_UP].T
    slope = np.polyfit(steps, kilobytes, 1)[0]
    assert slope * (STEPS - WARM_UP) < 20_000, f"{slope:.1f} kB a step"
    for name, values in zip(("descriptors", "threads", "arrays", "programs"), counts, strict=True):
        halves = values[: len(values) // 2], values[len(values) // 2 :]
        if name == "threads":
            # A save under way has one that ends with it; what stays shows. A pool begins one more
            # when it is first needed: over 1,500 steps no second came. One of each save were four.
            before, after = map(np.median, halves)
        else:
            before, after = (half.max() for half in halves)
        assert after <= before + (name != "programs"), (name, values.tolist())
    lines = faulty_runs.lines(tmp_path / "r")
    assert len({line["update/micro_batches"] for line in lines}) > 1
    assert len({line["completions/mean_length"] for line in lines}) > 50
    tries(STEPS)


@pytest.mark.fault(6)
@pytest.mark.full
def test_a_hundred_ragged_steps_compile_nothing_after_the_first_ones(tmp_path):
    counts: list[int] = []
    with compilations() as seconds:
        changes = {"train.steps": 30, "checkpoint.every": 30, "run.samples_every": 0}
        changes |= {"train.tokens_per_micro_batch": 128}
        loop.train(
            small_run.config(tmp_path / "r", **changes),
            on_step=lambda *_: counts.append(len(seconds)),
        )
    assert counts[0] > 0
    assert counts[5] == counts[-1]


KINDS = ("hangs", "raises", "a text", "right")
CALLS, LIMIT = 100_000, 0.02


@pytest.mark.fault(17)
@pytest.mark.full
def test_of_100000_rewards_none_is_lost_though_many_hang_raise_or_are_texts(tries):
    """5% hang, 5% raise, 5% return a text; hung and raising ones are unscored, and texts named."""
    draw = random.Random(0)
    kinds = draw.choices(KINDS, weights=(5, 5, 5, 85), k=CALLS)
    number = [0]

    def reward(completions: list[str], **columns: Any) -> Any:
        kind = kinds[number[0]]
        if kind == "hangs":
            while True:
                pass
        if kind == "raises":
            raise ValueError("no grader")
        return ["1.0"] if kind == "a text" else [float(number[0] % 7)]

    rewards = [Reward("r", reward, on_error="unscored", timeout=LIMIT)]
    longest, outcomes = 0.0, Counter[str]()
    for number[0] in range(CALLS):
        began = time.monotonic()
        try:
            scores, _ = call_rewards(rewards, ["p"], ["c"], [[1]], {})
            score = float(scores["r"][0])
            kind = kinds[number[0]]
            assert (score == number[0] % 7) if kind == "right" else (np.isnan(score), kind)
            outcomes["unscored" if np.isnan(score) else "right"] += 1
        except RewardError as error:
            outcomes["a text" if kinds[number[0]] == "a text" else str(error)] += 1
        longest = max(longest, time.monotonic() - began)
    assert longest < LIMIT + 2
    counts = Counter(kinds)
    assert outcomes["right"] == counts["right"]
    assert outcomes["unscored"] == counts["hangs"] + counts["raises"]
    assert outcomes["a text"] == counts["a text"]
    assert outcomes.total() == CALLS
    tries(CALLS)


@pytest.mark.fault(6)
@pytest.mark.full
def test_a_report_of_10000_steps_takes_seconds_and_a_few_megabytes(base, tmp_path, start):
    file = faulty_runs.write(base, tmp_path, **{"train.steps": 2})
    run = start("train", file)
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 0, output
    folder = tmp_path / "r"
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    with open(folder / "metrics.jsonl", "a") as metrics:
        for step in range(3, 10_001):
            values = {name: value for name, value in last.items() if name != "step"}
            metrics.write(json.dumps({"step": step, **values}) + "\n")
    began = time.monotonic()
    report = start("report", folder)
    output, _ = report.communicate(timeout=100)
    assert report.returncode == 0, output
    assert time.monotonic() - began < 60
    assert (folder / "report.html").stat().st_size < 5 << 20


@pytest.mark.fault(17)
@pytest.mark.full
@pytest.mark.parametrize("first", ["the run", "its watch"])
def test_a_reader_that_closes_its_pipe_ends_the_run_with_141_and_its_steps_stay(
    first, base, tmp_path, start
):
    """The watch prints first where a step takes long. The last step alone is due to be saved."""
    harm = "if step == 3 and not is_called_to_try: time.sleep(12)" * (first == "its watch")
    changes = {"train.steps": 50, "checkpoint.every": 50}
    file = faulty_runs.write(base, tmp_path, harm, "import time", **changes)
    run = start("train", file, merged=False)
    for line in run.stdout:
        if "   2 reward" in line:
            break
    run.stdout.close()
    _, errors = run.communicate(timeout=100)
    assert run.returncode == 141
    assert faulty_runs.disorder(errors) == []
    (saved,) = (int(step.name) for step in (tmp_path / "r" / "checkpoints").iterdir())
    assert f"stopped after step {saved} of 50, saved in {tmp_path / 'r'}; go on with" in errors
    run = start("train", file, "--resume", "auto", "--set", f"train.steps={saved + 1}")
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 0, output
    assert [line["step"] for line in faulty_runs.lines(tmp_path / "r")] == [*range(1, saved + 2)]


HOMES = {
    "C locale": {"LC_ALL": "C", "PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"},
    "no home": {"HOME": ""},
    "home that is none": {"HOME": "/proc", "XDG_CACHE_HOME": "/proc"},
    "no place for temporary files": {"TMPDIR": "/nowhere"},
    "no colours, no width": {"COLUMNS": "1", "TERM": "dumb"},
    "ten columns": {"COLUMNS": "10"},
}


@pytest.mark.fault(20)
@pytest.mark.full
def test_whatever_the_environment_says_the_run_ends_the_same(base, tmp_path, start, tries):
    digests = {}
    for name, more in {"": {}, **HOMES}.items():
        folder = tmp_path / f"r \u00fc\u2028{name}\nx"
        file = faulty_runs.write(base, tmp_path, **{"train.steps": 2, "run.dir": str(folder)})
        run = start("train", file, more=more, merged=False)
        _, errors = run.communicate(timeout=100)
        assert run.returncode == 0, (name, errors)
        assert faulty_runs.disorder(errors) == [], (name, errors)
        digests[name] = faulty_runs.outcome(folder)["hash"]
        tries()
    assert len({*digests.values()}) == 1


MOVES = {
    "renamed": "os.rename(RUN, RUN + '2')",
    "deleted": "shutil.rmtree(RUN)",
    "replaced": "os.rename(RUN, RUN + '2'); os.mkdir(RUN); open(RUN + '/.lock', 'w').close()",
}


@pytest.mark.fault(12)
@pytest.mark.full
@pytest.mark.parametrize("how", MOVES)
def test_a_folder_that_is_moved_away_under_a_run_ends_it_in_a_line(how, base, tmp_path, start):
    harm = f"if step == 3 and not is_called_to_try: {MOVES[how]}"
    setup = f"import os, shutil\nRUN = {os.fspath(tmp_path / 'r')!r}"
    file = faulty_runs.write(base, tmp_path, harm, setup)
    run = start("train", file, merged=False)
    _, errors = run.communicate(timeout=100)
    assert run.returncode == 74, errors
    assert "is not the folder that this run began in" in errors
    assert faulty_runs.disorder(errors) == []
    assert not Path(tmp_path / "r" / "metrics.jsonl").exists()
