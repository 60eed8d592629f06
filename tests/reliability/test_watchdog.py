"""A run that hangs, or does not stop when it is asked to, ends and says where it hung."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import come_to, end, starting, together
from rich.console import Console
from rich.text import Text

from jaxgrpo.training.processes import process
from jaxgrpo.training.processes.watchdog import STUCK, TICK, Watchdog
from jaxgrpo.training.records import console
from jaxgrpo.training.records.console import Display

pytestmark = pytest.mark.fault(16)

# Hangs in a reward of its second step, as its arguments say; the others wait for it.
RUN = """
import re, signal, sys, time
import jax, numpy as np
from jax.experimental import multihost_utils
from jaxgrpo.rewards import Reward, call_rewards
from jaxgrpo.training.processes import process, watchdog

def judge(completions):
    if "busy" in sys.argv:
        return [0.0]
    if "deaf" in sys.argv:  # other threads get the signal, and no call of this one ends by it
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("hangs", flush=True)
    if "regex" in sys.argv:
        re.match("(a+)+$", "a" * 60 + "b")
    time.sleep(600)

def command():
    process.start("cpu")
    watchdog.BACKSTOP = 1.0
    grace, stuck = (float(argument) for argument in sys.argv[1:3])
    with process.stop_signals(grace):
        with watchdog.Watchdog(lambda *_: None, lambda: "r holds step 1", grace, stuck) as watch:
            for step in (1, 2):
                watch.phase(f"step {step}: reward")
                for _ in range(12 * ("busy" in sys.argv)):  # each call is over before a look
                    call_rewards([Reward("judge", judge)], ["p"], ["c"], [[1]], {})
                    time.sleep(0.2)
                if step == 2 and "waits" not in sys.argv:
                    call_rewards([Reward("judge", judge)], ["p"], ["c"], [[1]], {})
                if step == 2:
                    print("waits", flush=True)
                multihost_utils.process_allgather(np.float32(step))

sys.exit(process.guard(command))
"""


@pytest.fixture
def begin(environment, fork_server):
    with starting(RUN, environment, fork_server) as begin:
        yield begin


def two(begin, *times: str) -> list[subprocess.Popen]:
    """Two processes of one run: the first waits for the second."""
    first, second = together()
    return [begin(*times, "waits", **first), begin(*times, **second)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deaf", pytest.param("hears", marks=pytest.mark.full)])
def test_a_stop_signal_in_a_hung_reward_ends_it_after_the_grace(begin, how):
    process = begin("1", "0", how)
    come_to(process, "hangs")
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, errors = end(process)
    assert time.monotonic() - began < 10
    assert code == 143
    assert errors.count("stopping after this step, in 1 s at the latest") == 1
    assert "(run.stop_grace = 1 s): step 2: reward (judge)" in errors
    assert "r holds step 1; what the threads are doing" in errors
    assert "in judge" in errors, "the stack of the main thread"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"), [("sleeps", STUCK), pytest.param("regex", 1, marks=pytest.mark.full)]
)
def test_a_stuck_run_ends_with_its_phase_its_reward_and_its_stacks(begin, how, code):
    ended, errors = end(begin("60", "1", how))
    assert ended == code
    assert "in judge" in errors
    # A regular expression lets no thread of Python run: what ends it is written in C.
    if how == "sleeps":
        assert "no progress for run.stuck_after = 1 s: step 2: reward (judge)" in errors
    assert code in process.EXIT_CODES


@pytest.mark.full
def test_short_calls_of_rewards_are_progress_however_long_their_phase_is(begin):
    ended, errors = end(begin("60", "1", "busy"))
    assert ended == 0, errors


@pytest.mark.slow
def test_a_process_that_waits_for_a_hung_one_obeys_a_stop_signal_and_both_end(begin):
    first, second = two(begin, "1", "0")
    come_to(first, "waits")
    come_to(second, "hangs")
    first.send_signal(signal.SIGTERM)
    code, errors = end(first)
    assert code == 143
    assert "(run.stop_grace = 1 s): step 2: reward" in errors
    assert end(second)[0] != 0


@pytest.mark.full
@pytest.mark.slow
def test_a_hung_reward_of_one_process_ends_all(begin):
    for started in two(begin, "60", "2"):
        code, errors = end(started)
        assert code == STUCK, errors
        assert "no progress for run.stuck_after = 2 s: step 2: reward" in errors


@pytest.mark.full
@pytest.mark.parametrize("stops", [False, True], ids=["stuck", "SIGTERM"])
def test_one_of_two_that_holds_the_interpreters_lock_ends_both(begin, stops):
    """No thread of the second runs: a timer in C ends it, or the first that hears nothing of it."""
    first, second = together()
    times = ("2", "0") if stops else ("60", "2")
    waiting, holding = begin(*times, "waits", **first), begin(*times, "regex", **second)
    come_to(waiting, "waits")
    come_to(holding, "hangs")
    if stops:
        waiting.send_signal(signal.SIGTERM)
    code, errors = end(waiting)
    assert code == (143 if stops else STUCK), errors
    holding.communicate(timeout=60)
    assert holding.returncode != 0


@pytest.mark.full
@pytest.mark.slow
def test_a_watchdog_that_is_left_watches_no_more():
    reports = []
    with Watchdog(lambda *report: reports.append(report), lambda: "", 60, 0.7) as watch:
        for number in range(4):
            watch.phase(f"step {number}")
            time.sleep(0.3)
    count = len(reports)
    assert {doing for doing, _ in reports} <= {"start", "step 0", "step 1", "step 2", "step 3"}
    assert count >= 2
    time.sleep(1.5)
    assert len(reports) == count


def test_a_run_with_more_than_1024_open_files_is_watched(monkeypatch):
    """As where an environment holds connections, or many processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1500:
        pytest.skip("this user may not open as many")
    ended: list[str] = []
    monkeypatch.setattr(Watchdog, "_end", lambda watch, code, text: ended.append(text))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Watchdog(lambda *_: None, lambda: "", 60.0, 0.0) as watch:
            time.sleep(0.1)
            watch._thread.join(1.5 * TICK)
            assert watch._thread.is_alive(), ended
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ended == []


def make_display(terminal, clock):
    display = Display(steps=9, finished_steps=2, active=True, clock=clock)
    display.console = Console(file=io.StringIO(), force_terminal=terminal, width=300)
    return display


def printed_lines(display):
    return Text.from_ansi(display.console.file.getvalue()).plain.splitlines()


def test_a_thread_that_fails_beside_a_run_is_told_in_a_line(capfd):
    """tensorboardX's, for example, where a reward has closed all files."""

    def fails():
        raise OSError("closed")

    before = threading.excepthook
    with Watchdog(lambda *_: None, lambda: "", 5.0, 0.0):
        thread = threading.Thread(target=fails, name="writer")
        thread.start()
        thread.join()
    assert threading.excepthook is before
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("writer ended with OSError: closed (")
    assert "test_watchdog.py, line " in line


@contextlib.contextmanager
def piped_output() -> Iterator[int]:
    """Within it stdout is a pipe; gives the end that reads it."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield reader


@pytest.mark.parametrize("first", ["the watch", "the run"])
def test_a_run_whose_output_is_read_no_more_stops_after_its_step(first, monkeypatch):
    """The thread that watches it may be the first to print: it would take that for its own end."""
    monkeypatch.setattr(process._Stop, "request", None)
    now = [0.0]
    display = Display(9, 2, active=True, clock=lambda: now[0])
    now[0] += console.SILENCE
    with piped_output() as reader:
        os.close(reader)
        with process.stop_signals():
            assert not process.stop_requested(3)
            if first == "the watch":
                display.under_way("step 3: sample", 10.0)
            display.say("   3 reward")
            assert process.stop_requested(3)
            display.say("   4 reward")  # goes nowhere

    def stop() -> None:
        raise process.StopRequested("saved")

    assert process.guard(stop) == 141


def test_a_command_without_steps_ends_where_its_output_is_read_no_more():
    display = Display(9, 2, active=True)
    with piped_output() as reader:
        os.close(reader)
        with pytest.raises(SystemExit) as ended:
            display.say("a line")
        assert isinstance(ended.value.__context__, BrokenPipeError)


def test_what_ends_a_run_is_not_lost_where_its_output_is_read_no_more():
    display = Display(9, 2, active=True)
    with piped_output() as reader:

        def fail() -> None:
            os.close(reader)
            raise ValueError("no grader")

        with pytest.raises(ValueError, match="no grader"), display.showing_bar():
            fail()


def test_a_thread_that_watches_survives_that_its_output_is_read_no_more():
    """Of a run in a thread, which no signal stops."""
    display = Display(9, 2, active=True)
    with piped_output() as reader:
        os.close(reader)
        display.under_way("step 3: sample", console.FIRST)


@pytest.mark.fault(14)
def test_a_stop_signal_is_heard_where_a_library_has_taken_it(monkeypatch, capfd):
    monkeypatch.setattr(process._Stop, "request", None)
    with process.stop_signals(60.0), Watchdog(lambda *_: None, lambda: "", 60.0, 0.0) as watch:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, lambda *_: None)
        watch.phase("step 3: update")
        os.kill(os.getpid(), signal.SIGTERM)
        over = time.monotonic() + 10
        while not process.stop_requested(3):
            assert time.monotonic() < over
            time.sleep(0.01)
    assert "stopping after this step, in 60 s at the latest" in capfd.readouterr().err


def test_a_long_reward_is_shown_in_the_bar_and_in_lines_ever_farther_apart():
    display = make_display(terminal=True, clock=lambda: 0.0)
    for seconds in (1, 59, 60, 61, 119, 120, 239, 240):
        display.under_way("step 3: reward (judge)", seconds)
    assert display.bar.tasks[0].description == "step 3: reward (judge), 240 s"
    display.under_way("step 4: reward (judge)", 1)
    display.under_way("step 4: reward (judge)", 60)
    assert printed_lines(display) == [
        "step 3: reward (judge): for 60 s now",
        "step 3: reward (judge): for 120 s now",
        "step 3: reward (judge): for 240 s now",
        "step 4: reward (judge): for 60 s now",
    ]


def test_a_log_is_never_silent_for_ten_seconds_however_short_its_phases_are():
    now = [0.0]
    display = make_display(terminal=False, clock=lambda: now[0])
    for tick in range(1, 60):
        now[0] = tick / 2
        display.under_way(f"phase {tick // 12}", tick % 12 / 2)  # each lasts six seconds
        if tick == 40:
            display.say("a line")
    assert printed_lines(display) == [
        "phase 1: for 3 s now",
        "phase 3: for 0 s now",
        "a line",
        "phase 4: for 5 s now",
    ]


def test_a_line_says_once_how_many_programs_were_compiled_and_where_they_are():
    process.Programs.listen()
    now = [0.0]
    display = make_display(terminal=False, clock=lambda: now[0])
    for size in (3, 5):
        jax.jit(lambda x: jnp.sin(x) * size).lower(np.ones(size)).compile()  # noqa: B023
    now[0] += 10
    display.under_way("step 1: sample", 10)
    now[0] += 10
    display.under_way("step 1: sample", 20)
    first, second = printed_lines(display)
    assert "step 1: sample: for 10 s now; compiling 2 programs (first run of these shapes" in first
    assert second == "step 1: sample: for 20 s now"
    assert process.Programs.under_way() == 0


@pytest.mark.slow
def test_what_takes_long_beside_a_run_is_told_too(monkeypatch):
    monkeypatch.setattr(console, "SILENCE", 0.2)
    monkeypatch.setattr(console, "TICK", 0.1)
    log = io.StringIO()
    into = Console(file=log, force_terminal=False)
    with console.telling(into, "probe: sampling"):
        time.sleep(0.7)
    lines = log.getvalue().splitlines()
    assert len(lines) >= 2
    assert {line.partition(" for")[0] for line in lines} == {"probe: sampling:"}
    time.sleep(0.4)
    assert log.getvalue().splitlines() == lines
