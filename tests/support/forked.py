"""Commands that tests start from one process that has imported JAX: the client of fork_server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

SERVER = Path(__file__).with_name("fork_server.py")
START = 120.0  # seconds that a server may take to import


class Forked:
    """A started command, with what tests use of a `subprocess.Popen`."""

    def __init__(self, connection: socket.socket, stdout: TextIO, stderr: TextIO | None):
        self.stdout, self.stderr, self._connection = stdout, stderr, connection
        self._answers = connection.makefile("r")
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative where a signal ended it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises: subprocess.TimeoutExpired."""
        if self.returncode is None:
            import select

            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """The command as a shell knows it; the kernel ends its child with it."""
        self.send_signal(signal.SIGKILL)

    def kill_group(self) -> None:
        """The command with all that it has started; if it has ended its number may be another's."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote on stdout and stderr that was not read before, and its end.

        Raises: subprocess.TimeoutExpired.
        """
        over = None if timeout is None else time.monotonic() + timeout
        texts = {"stdout": "", "stderr": ""}
        threads = []
        for name in texts:
            if (stream := getattr(self, name)) is not None and not stream.closed:
                read = lambda n=name, s=stream: texts.__setitem__(n, s.read())  # noqa: E731
                threads.append(threading.Thread(target=read, daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join(None if over is None else max(0.0, over - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        self.wait(None if over is None else max(0.0, over - time.monotonic()))
        return texts["stdout"], texts["stderr"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


class ForkServer:
    """Starts commands in an environment; JAX's variables in it are those of the server."""

    def __init__(self, environment: Mapping[str, str]):
        self._folder = tempfile.TemporaryDirectory(prefix="jaxgrpo-fork-")
        self._path = f"{self._folder.name}/socket"
        # What an import may start threads for, it starts none for.
        quiet = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), self._path], env={**environment, **quiet}
        )
        over = time.monotonic() + START
        while not os.path.exists(self._path):
            assert self._process.poll() is None, "the server of forks has ended"
            assert time.monotonic() < over, f"the server of forks was not ready in {START:g} s"
            time.sleep(0.02)

    def start(
        self,
        *arguments: Any,
        env: Mapping[str, str],
        program: str | None = None,
        merged: bool = True,
        limit: int | None = None,
        is_powerless: bool = False,
        folder: Path | str | None = None,
    ) -> Forked:
        """A started `jaxgrpo` command, or a program.

        Args:
          env: its environment.
          program: Python source to run in place of a command.
          merged: stderr goes where stdout goes.
          limit: bytes that a file may have, as on a full disk; None: any number.
          is_powerless: as root, reads and writes only what modes of files allow.
          folder: to work in; None: the test's own.
        """
        reads, writes = zip(*(os.pipe() for _ in range(1 if merged else 2)), strict=True)
        request: dict[str, Any] = {
            "arguments": list(map(str, arguments)),
            "environment": dict(env),
            "folder": str(folder or os.getcwd()),
            "program": program,
            "limit": limit,
            "is_powerless": is_powerless,
        }
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        sent = writes * 2 if merged else writes
        socket.send_fds(connection, [json.dumps(request).encode()], sent)
        for end in writes:
            os.close(end)
        streams = [os.fdopen(end, "r", encoding="utf-8", errors="replace") for end in reads]
        return Forked(connection, streams[0], None if merged else streams[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the server, and with it what it has started."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


@contextlib.contextmanager
def ending(*commands: Forked) -> Iterator[Sequence[Forked]]:
    """Kills the commands behind the block."""
    try:
        yield commands
    finally:
        for command in commands:
            command.kill_group()
