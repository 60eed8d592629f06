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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from fork_server import NUMBER

SERVER = Path(__file__).with_name("fork_server.py")
START = 120.0  # seconds that a server may take to import
END = 60.0  # seconds until a command that is killed has ended


class Forked:
    """A started command, with what tests use of a `subprocess.Popen`.

    Its number is another's as soon as it has ended and the server knows: signals go through a
    descriptor of the process, and its group is killed by the server.

    Args:
      explain: says what has become of the server.
    """

    def __init__(
        self,
        connection: socket.socket,
        streams: tuple[TextIO, TextIO | None],
        explain: Callable[[], str],
    ):
        (self.stdout, self.stderr), self._connection = streams, connection
        self._explain = explain
        number, handles, _, _ = socket.recv_fds(connection, NUMBER, 1)
        if not handles:
            raise ChildProcessError(f"no command was started: {explain()}")
        self.pid, self._handle = int(number), handles[0]
        os.set_inheritable(self._handle, False)
        weakref.finalize(self, os.close, self._handle)
        self._answers = connection.makefile("r")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative where a signal ended it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises: subprocess.TimeoutExpired; ChildProcessError if the server has ended, and it too.
        """
        if self.returncode is None:
            import select

            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            line = self._answers.readline()
            self._connection.close()
            if not line:
                raise ChildProcessError(f"nothing is known of {self.pid}: {self._explain()}")
            self.returncode = int(line)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """The command as a shell knows it; the kernel ends its child with it."""
        self.send_signal(signal.SIGKILL)

    def kill_group(self) -> None:
        """Ends the command with its group, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                self._connection.sendall(b"k")
            self.wait(END)

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
        self._errors = Path(self._folder.name, "errors")
        with open(self._errors, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), self._path],
                env={**environment, **quiet},
                stderr=errors,
                process_group=0,  # what is sent to the group of the tests does not reach it
            )
        over = time.monotonic() + START
        while not os.path.exists(self._path):
            assert self._process.poll() is None, self.explain()
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
        return Forked(connection, (streams[0], None if merged else streams[1]), self.explain)

    def explain(self) -> str:
        """How the process that forks commands ended, if it has, and what it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code, errors = self._process.returncode, self._errors.read_text("utf-8", "replace")
        state = "runs" if code is None else f"has ended with exit code {code}"
        return f"the process that forks commands {state}; it wrote: {errors[-2000:] or 'nothing'}"

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
