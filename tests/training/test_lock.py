"""The lock of a run folder: one trainer at a time, and none that has ended."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import time

import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.records.lock import is_about_to_end, take_lock
from jaxgrpo.training.records.reading import read_metrics


def test_two_trainers_cannot_share_a_folder(tmp_path):
    first = RunFolder(tmp_path)
    with pytest.raises(InputError, match=r"in use by another trainer \(process \d+ on "):
        RunFolder(tmp_path, resume=True)
    first.close()
    RunFolder(tmp_path, resume=True).close()


def test_a_run_that_came_and_went_between_look_and_lock_is_seen(tmp_path, monkeypatch):
    def take_late(path, name):
        (path / "metrics.jsonl").write_text('{"step": 1}\n')
        return take_lock(path, name)

    monkeypatch.setattr("jaxgrpo.training.records.folder.take_lock", take_late)
    with pytest.raises(InputError, match=r"not empty \(it holds metrics.jsonl\)"):
        RunFolder(tmp_path)
    monkeypatch.undo()
    RunFolder(tmp_path, resume=True).close()  # the lock is free


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.EAGAIN, r"in use by another trainer"),
        (errno.EIO, r"cannot be written \(Input/output error\)"),
        (errno.ESTALE, r"cannot be written \(Stale file handle\)"),
    ],
)
def test_a_disk_that_does_not_answer_is_no_trainer(number, problem, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(InputError, match=problem):
        RunFolder(tmp_path)


HOLD = """
import sys, time
from jaxgrpo.training.records.folder import RunFolder
run = RunFolder(sys.argv[1])
run.write_metrics(1, {"loss": 1.0})
print("held", flush=True)
time.sleep(60)
"""


def test_the_lock_of_a_killed_trainer_is_free(tmp_path, python, environment):
    command = [python, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {holder.pid} on"):
            RunFolder(tmp_path, resume=True)
        holder.kill()
    with RunFolder(tmp_path, resume=True):
        assert len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize("ends", [RunFolder.unlock, RunFolder.close], ids=["killed", "closed"])
def test_a_process_that_outlives_the_trainer_does_not_hold_its_lock(tmp_path, ends):
    """The system closes the descriptor of a trainer that is killed; the child has closed its own by
    then. One that closes the folder gives up the lock whether it has or not."""
    run = RunFolder(tmp_path / "run")
    begun, begins = os.pipe()
    with pytest.warns(RuntimeWarning, match="fork"):  # of JAX; the child does nothing
        child = os.fork()
    if child == 0:
        os.write(begins, b".")
        signal.pause()
    try:
        if ends is RunFolder.unlock:
            assert os.read(begun, 1) == b"."
        ends(run)
        with RunFolder(tmp_path / "run", resume=True):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(begun)
        os.close(begins)


SLOW_END = """
import ctypes, os, platform, sys, threading, time
from jaxgrpo.training.records.lock import take_lock
from pathlib import Path
take_lock(Path(sys.argv[1]), "r")
threading.Thread(target=lambda: (time.sleep(1.0), os._exit(0))).start()
print("held", flush=True)
# Its first thread ends, as in a process that is being ended.
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


@pytest.mark.slow
def test_a_start_waits_for_a_holder_that_is_ending_and_for_no_other(tmp_path, python, environment):
    command = [python, "-c", SLOW_END, str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        machine = os.uname().nodename
        deadline = time.monotonic() + 10
        while not is_about_to_end(f"process {holder.pid} on {machine}"):
            assert time.monotonic() < deadline
        began = time.monotonic()
        with RunFolder(tmp_path):
            assert 0.1 < time.monotonic() - began < 5
            began = time.monotonic()
            with pytest.raises(InputError, match="in use by another trainer"):
                RunFolder(tmp_path, resume=True)
            assert time.monotonic() - began < 0.5
    for name in (f"process {os.getpid()} on {machine}", f"process {holder.pid} on {machine}"):
        assert not is_about_to_end(name)
    for name in ("", "process 1 on nowhere", f"process {10**9} on {machine}", "process x on y"):
        assert not is_about_to_end(name)
