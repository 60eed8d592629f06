"""A run that is asked to stop, whatever it does then, saves its step and continues from it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import faulty_runs
import pytest
from processes import together
from series import Series

pytestmark = [pytest.mark.full, pytest.mark.fault(14)]

PHASES = ("sample", "reward", "prepare", "update", "save", "evaluate")
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
HERE = "a moment of "
STEPS = 60

PROGRAM = f"""
import os, sys, time
from jaxgrpo.training.processes import watchdog

name_of_phase = watchdog.Watchdog.phase

def rest_in(self, name):
    name_of_phase(self, name)
    if os.environ["PHASE"] == name.split(": ")[-1] or os.environ["PHASE"] == name:
        print("{HERE}" + name, flush=True)
        time.sleep(0.3)

watchdog.Watchdog.phase = rest_in
from jaxgrpo.cli.main import run
run()
"""
"""A command that rests for a while at the beginning of a phase, so that a signal comes in it."""

JUDGE = f"""
if os.environ.get("PHASE") == "reward" and not is_called_to_try:
    print("{HERE}reward", flush=True)
    time.sleep(0.3)
"""


def write(base: Path, home: Path, **changes: Any) -> Path:
    """A run in which each phase comes in each step."""
    evaluation = {"eval.data": "task:arithmetic:test", "eval.every": 1, "eval.prompts": 2}
    reference = {"loss.kl": {"use": "k2", "beta": 0.01}, "eval.samples": 1}
    changes = {"train.steps": STEPS, "checkpoint.every": 1, **evaluation, **reference, **changes}
    return faulty_runs.write(base, home, JUDGE, "import os, time", **changes)


def come_to_phase(run: Any) -> None:
    """Waits until the run is in the phase that it rests in."""
    read = []
    for line in run.stdout:
        read.append(line)
        if HERE in line:
            return
    raise AssertionError("".join(read))


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_in_any_phase_saves_the_step_and_the_run_ends_the_same(
    number, base, tmp_path, start, series, tries
):
    """One run, stopped once in each phase; the update of its first step compiles."""
    file, phases = write(base, tmp_path), ["step 1: update", *PHASES]
    for phase in phases:
        more = {"PHASE": phase}
        run = start("train", file, "--resume", "auto", program=PROGRAM, more=more)
        come_to_phase(run)
        run.send_signal(number)
        output, _ = run.communicate(timeout=faulty_runs.SECONDS)
        assert run.returncode == 128 + number, (phase, output)
        assert "stopped after step" in output, phase
        assert faulty_runs.disorder(output) == [], (phase, output)
        tries()
    logged = [line["step"] for line in faulty_runs.lines(tmp_path / "r")]
    assert logged == list(range(logged[-1] + 1))
    end_and_compare(base, tmp_path, series, logged[-1] + 1)


def end_and_compare(base: Path, home: Path, series: Series, steps: int) -> None:
    """Ends the run, which then differs in nothing from one that no signal has reached."""
    straight = home / "straight"
    for folder, resume in ((home, ("--resume", "auto")), (straight, ())):
        file = write(base, folder, **{"train.steps": steps})
        code, output = series.run("train", file, *resume)
        assert code == 0, output
    assert faulty_runs.differences(faulty_runs.outcome(straight / "r"), home / "r") == []


def test_ctrl_c_twice_in_any_phase_ends_at_once_and_keeps_what_was_saved(
    base, tmp_path, start, series, tries
):
    file, phases = write(base, tmp_path), ["step 1: update", *PHASES]
    for phase in phases:
        more = {"PHASE": phase}
        run = start("train", file, "--resume", "auto", program=PROGRAM, more=more)
        come_to_phase(run)
        run.send_signal(signal.SIGINT)
        with pytest.raises(Exception, match="timed out"):
            run.wait(0.25)
        run.send_signal(signal.SIGINT)
        run.wait(5.0)
        output, _ = run.communicate(timeout=5.0)
        assert run.returncode == 130, (phase, output)
        assert faulty_runs.disorder(output) == [], (phase, output)
        tries()
    end_and_compare(base, tmp_path, series, 9)


@pytest.mark.parametrize("at", [0, 1])
def test_a_signal_to_one_of_two_processes_in_any_phase_stops_both(at, base, tmp_path, start, tries):
    """Either gets every signal, and a signal in every phase."""
    changes = {"mesh": {"data": 2}, "rollout.slots": 8}
    file = write(base, tmp_path, **changes)
    phases = ["step 1: update", *PHASES]
    for place, phase in enumerate(phases):
        number = SIGNALS[(place + 2 * at) % len(SIGNALS)]
        runs = [
            start("train", file, "--resume", "auto", program=PROGRAM, more={"PHASE": "", **process})
            if index != at
            else start(
                *("train", file, "--resume", "auto"),
                program=PROGRAM,
                more={**process, "PHASE": phase},
            )
            for index, process in enumerate(together())
        ]
        come_to_phase(runs[at])
        runs[at].send_signal(number)
        outputs = [run.communicate(timeout=faulty_runs.SECONDS)[0] for run in runs]
        codes = [run.returncode for run in runs]
        assert codes[at] == 128 + number, (phase, *outputs)
        assert codes[1 - at] in (143, 128 + number), (phase, *outputs)
        assert "stopped after step" in outputs[0], (phase, *outputs)
        assert [faulty_runs.disorder(output) for output in outputs] == [[], []], outputs
        tries()
    logged = [line["step"] for line in faulty_runs.lines(tmp_path / "r")]
    assert logged == list(range(logged[-1] + 1))
