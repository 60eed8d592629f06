"""`jaxgrpo launch`: several processes of one command on this machine, as a cluster has them.

It imports no JAX. The environment of each process says who it is (process.PROCESS_VARIABLES).
The output of process 0 is shown as it is, that of another on stderr where it fails. When one fails,
the others have a few seconds to say why and to end; what is left is killed, frozen ones too.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

from jaxgrpo.cli.commands import COMMANDS
from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.training.processes.parent import (
    STOP_SIGNALS,
    end_with_parent,
    is_nohup,
    write_error,
)

TICK = 0.1  # seconds between two looks
GRACE = 7.0
"""Seconds for the others to end by themselves after one has failed; they have a watch of their own.

A frozen process is noticed by them after 15 s, and the whole job has to be gone within 30.
"""
STOPPED = tuple(128 + number for number in STOP_SIGNALS)
"""Exit codes of a process that was asked to stop, and that waits for no other."""
LOST = 6
"""Exit code of a process that ends because of another (training.peers.LOST, which imports JAX)."""

DEVICES = "--xla_force_host_platform_device_count"


def main(command: Sequence[str], processes: int = 2, devices: int | None = None) -> int:
    """Runs the command in so many processes. Returns the exit code of the first that fails.

    A process that ends only because of another (exit code 6) counts where no other has failed.

    Args:
      command: of jaxgrpo, with its arguments.
      processes: how many.
      devices: of each; None: one GPU, or as many CPU devices as XLA_FLAGS and JAX_NUM_CPU_DEVICES
        say (JAX's default is one).
    Raises: InputError.
    """
    command = list(command[1:] if command[:1] == ["--"] else command)
    if not command or command[0].startswith("-") or command[0] == "launch":
        raise InputError("launch: give a command of jaxgrpo behind the options, as train CONFIG")
    if command[0] not in COMMANDS:
        raise InputError(f"launch: unknown command {command[0]!r}: {suggest(command[0], COMMANDS)}")
    for name, value in (("processes", processes), ("devices-per-process", devices)):
        if value is not None and value < 1:
            raise InputError(f"launch --{name} {value}: expected 1 or more")
    return _Job(command, environments(os.environ, processes, devices)).run()


def environments(
    environment: Mapping[str, str], processes: int, devices: int | None = None
) -> list[dict[str, str]]:
    """The environment of each process.

    JAX_LOCAL_DEVICE_IDS gives each its own GPUs, in order; CPU devices are made by XLA_FLAGS.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    shared = {
        **environment,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
    }
    if devices is not None:
        flags = re.sub(rf"{DEVICES}=\S*", "", environment.get("XLA_FLAGS", ""))
        shared["XLA_FLAGS"] = f"{flags} {DEVICES}={devices}".strip()
        shared.pop("JAX_NUM_CPU_DEVICES", None)
    each = devices or 1
    return [
        {
            **shared,
            "JAX_PROCESS_ID": str(index),
            "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(index * each, (index + 1) * each))),
        }
        for index in range(processes)
    ]


class _Job:
    """The processes of one command, from their start until the last is gone."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]):
        self.command, self.environments = command, environments
        self.children: list[subprocess.Popen[bytes]] = []
        self.outputs: list[IO[bytes] | None] = []
        self.first: int | None = None  # exit code of the first that failed
        self.deadline: float | None = None  # when those that are left are killed
        self.ended_processes: set[int] = set()  # processes whose end has been seen
        self.signals: list[int] = []  # that came so far

    def run(self) -> int:
        old_handlers = {n: signal.signal(n, self._pass_on) for n in STOP_SIGNALS if not is_nohup(n)}
        try:
            for index, environment in enumerate(self.environments):
                self._start(index, environment)
            while len(self.ended_processes) < len(self.children):
                time.sleep(TICK)
                self._look()
        finally:
            for child in self.children:
                _kill(child)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
        return self.first or 0

    def _start(self, index: int, environment: Mapping[str, str]) -> None:
        output = tempfile.TemporaryFile() if index else None  # noqa: SIM115 (closed with the job)
        self.outputs.append(output)
        child = subprocess.Popen(
            [sys.executable, "-m", "jaxgrpo", *self.command],
            env=environment,
            stdin=subprocess.DEVNULL if index else None,
            stdout=output,
            stderr=output,
            process_group=0,  # Ctrl-C reaches it once: from here
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
        self.children.append(child)
        for number in dict.fromkeys(self.signals):  # that came before it could be passed on
            child.send_signal(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)

    def _look(self) -> None:
        """Takes note of who has ended, and kills what is left behind when its time is over."""
        for index, child in enumerate(self.children):
            if index in self.ended_processes or child.poll() is None:
                continue
            self.ended_processes.add(index)
            self._end(index, child.returncode)
        if self.deadline is not None and time.monotonic() > self.deadline:
            indices = [i for i, child in enumerate(self.children) if child.poll() is None]
            for index in indices:
                _kill(self.children[index])
                _say(f"[{index}] killed: it did not end within {GRACE:g} s of the first failure")
                self._print(index)
            self.ended_processes.update(indices)

    def _end(self, index: int, code: int) -> None:
        """Process `index` has ended with `code`; below 0: by that signal."""
        if code == 0:
            return
        if self.first in (None, LOST):  # one that follows another may be seen before it
            self.first = code if code > 0 else 128 - code
        if code < 0:
            _say(f"[{index}] ended by {signal.Signals(-code).name}")
        else:
            _say(f"[{index}] ended with exit code {code}")
        self._print(index)
        if code not in STOPPED and self.deadline is None:
            self.deadline = time.monotonic() + GRACE

    def _print(self, index: int) -> None:
        """What process `index` wrote, if it was not shown at once."""
        output = self.outputs[index]
        if output is not None:
            output.seek(0)
            for line in output.read().decode("utf-8", "replace").splitlines():
                _say(f"[{index}] {line}")


def _say(line: str) -> None:
    """Also where stderr is read no more: processes that still save would be killed."""
    write_error(f"{line}\n")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """With what it has started: each has a process group of its own."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
