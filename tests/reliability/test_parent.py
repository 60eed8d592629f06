"""The parent of a command ends it where it cannot end itself, and chooses its exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest
import small_run
from processes import starting

from jaxgrpo.training.checkpoints import Checkpoints

pytestmark = pytest.mark.fault(16)

# A command that does what its arguments say.
PROGRAM = """
import ctypes, os, re, signal, subprocess, sys, time
from jaxgrpo.training.processes import parent

def lock_twice():
    mutex = ctypes.create_string_buffer(64)  # of zeros: a plain pthread_mutex_t
    for _ in range(2):  # the second time for ever, and no signal ends that, as it would a sleep
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

HOLDS_THE_LOCK = {
    "sum": lambda: sum(range(10**15)),
    "regex": lambda: re.match("(a+)+$", "a" * 60 + "b"),
    "ignores": lock_twice,
}
ENDS = {
    "returns": lambda: 0,
    "wrong": lambda: 2,
    "sys.exit": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(0),
    "C": lambda: ctypes.CDLL(None)._exit(0),
    "execv": lambda: os.execv("/bin/true", ["true"]),
    "9": lambda: os._exit(9),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda: ctypes.string_at(0),
}

def command():
    how, *grace = sys.argv[1:]
    if grace:
        parent.allow(float(*grace))
        for number in parent.STOP_SIGNALS:
            signal.signal(number, lambda *_: None)  # "after this step"
    print(os.getpid(), flush=True)
    if how == "counts":
        for number in range(1000):
            time.sleep(0.05)
            if parent.rests():
                os.kill(os.getpid(), signal.SIGSTOP)
            print(number, flush=True)
    return {**HOLDS_THE_LOCK, **ENDS, "sleeps": lambda: time.sleep(600)}[how]()

sys.exit(parent.run(command))
"""

EARLY = "ended with exit code 0 before its command was over"


@pytest.fixture
def begin(environment):
    with starting(PROGRAM, environment) as begin:
        yield begin


def child_process(process: subprocess.Popen) -> psutil.Process:
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    assert child.ppid() == process.pid
    return child


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("returns", 0, ""),
        ("wrong", 2, ""),
        ("9", 9, ""),
        ("os._exit", 1, EARLY),
        ("C", 1, EARLY),
        ("execv", 1, EARLY),
        ("sys.exit", 1, EARLY),  # without process.guard, which makes an exit code of it
        ("killed", -signal.SIGKILL, ""),
        ("crashes", -signal.SIGSEGV, ""),
    ],
)
def test_only_a_command_that_came_to_its_end_ends_with_0(begin, how, code, says):
    process = begin(how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert says in errors
    assert bool(says) == bool(errors)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("sum", signal.SIGTERM),
        ("sum", signal.SIGINT),
        ("regex", signal.SIGTERM),
        ("ignores", signal.SIGHUP),
    ],
)
def test_a_command_that_holds_the_interpreters_lock_is_killed_after_its_grace(begin, how, number):
    process = begin(how, "0.3")
    child = child_process(process)
    began = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 128 + number
    assert not child.is_running()
    assert f"asked to stop by {number.name}, it did not within 0.3 s" in errors
    assert "in command" in errors, "the stack of the main thread"


@pytest.mark.slow
def test_ctrl_c_within_garbage_collection_is_heard(environment):
    """There Python prints the exception and goes on. Other exceptions are printed as they were."""
    script = """if True:
        import gc, os, signal, time
        from jaxgrpo.training.processes import parent
        parent.keep_interrupts()
        def hook(phase, info):
            gc.callbacks.remove(hook)
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(9999))
        class Broken:
            def __del__(self):
                raise ValueError("as it is")
        gc.callbacks.append(hook)
        Broken()
        try:
            gc.collect()
            print("not in the collection", flush=True)
            time.sleep(20)
        except KeyboardInterrupt:
            print("heard")
    """
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=15,
    )
    assert run.stdout == "not in the collection\nheard\n"
    assert "KeyboardInterrupt" not in run.stderr
    assert "ValueError: as it is" in run.stderr


@pytest.mark.full
def test_ctrl_c_twice_kills_it_at_once_however_long_its_grace_is(begin):
    process = begin("sum", "inf")
    child_process(process)
    for _ in range(2):
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_a_command_that_has_nothing_to_save_obeys_at_once(begin, number, code):
    process = begin("sleeps")
    child_process(process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert "asked to stop" not in errors  # it need not be killed when its grace is over


@pytest.mark.full
def test_a_command_is_killed_with_its_parent(begin):
    process = begin("sleeps")
    child = child_process(process)
    process.kill()
    assert child.wait(10) is None or not child.is_running()


def test_a_command_rests_with_its_parent_and_goes_on_with_it(begin):
    process = begin("counts")
    child = child_process(process)
    process.send_signal(signal.SIGSTOP)
    over = time.monotonic() + 10
    while child.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < over
        time.sleep(0.05)
    process.send_signal(signal.SIGCONT)
    while child.status() == psutil.STATUS_STOPPED:
        assert time.monotonic() < over
        time.sleep(0.05)


REWARD = """
import os, time

def reward(completions, trainer_state, **columns):
    if trainer_state.global_step >= 2 and len(completions) > 2:
        while not os.path.exists(f"{{os.path.dirname(__file__)}}/r/checkpoints/2/manifest.json"):
            time.sleep(0.05)  # it is saved in the background
        print("here", flush=True)
        {harm}
    return [float(len(text)) for text in completions]
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("harm", "number", "code"),
    [
        ("sum(range(10**15))", signal.SIGTERM, 143),
        ("__import__('re').match('(a+)+b', 'a' * 60)", signal.SIGINT, 130),
        ("os._exit(0)", None, 1),
    ],
)
def test_a_run_ends_with_the_code_of_a_stop_and_keeps_its_steps(
    tmp_path, start, harm, number, code
):
    (tmp_path / "mine.py").write_text(REWARD.format(harm=harm))
    changes = {
        "rewards": [{"use": f"{tmp_path}/mine.py:reward"}],
        "checkpoint.every": 1,
        "run.stop_grace": 2.0,
        "train.steps": 5,
    }
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)
    process = start("train", file)
    assert process.stdout is not None
    assert any(line == "here\n" for line in process.stdout)
    began = time.monotonic()
    if number is not None:
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert process.returncode == code, output
    with Checkpoints(tmp_path / "r" / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 2
    assert [line["step"] for line in small_run.metrics(tmp_path / "r")] == [1, 2]
