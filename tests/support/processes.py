"""Processes that tests start: programs that are ended with their test, and several of one run."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from forked import ForkServer


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def together(count: int = 2) -> list[dict[str, str]]:
    """What the environment of each of `count` processes of one run says, over the loopback."""
    address = f"127.0.0.1:{free_port()}"
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    return [{**shared, "JAX_PROCESS_ID": str(index)} for index in range(count)]


def come_to(process: Any, place: str) -> None:
    """Waits until a process prints a line; other libraries print too."""
    assert any(line == f"{place}\n" for line in process.stdout)


def end(process: Any) -> tuple[int, str]:
    """The exit code of a process, and what it wrote to stderr."""
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@contextlib.contextmanager
def starting(
    program: str, environment: Callable[..., dict[str, str]], server: ForkServer | None = None
) -> Iterator[Callable]:
    """begin(*arguments, **environment) -> a started process that runs `program`; ended behind it.

    Args:
      program: Python source.
      environment: the fixture of that name.
      server: forks the processes, for programs that load JAX; None: each is started by itself.
    """
    started = []

    def begin(*arguments: str, **more: str) -> Any:
        variables = environment(**more)
        if server is not None:
            process = server.start(*arguments, env=variables, program=program, merged=False)
        else:
            process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()
