"""Commands that one forked process runs one after another, which traces and compiles once for all.

A run of seconds spends nearly all of them on its programs. What is tried with the files of a run,
and not with its process, needs no process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import tempfile
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from forked import ForkServer

START = 60.0  # seconds that the process may take to ask for its first command
PROGRAM = """
import json, os, resource, socket, sys
import programs
from jaxgrpo.cli.main import main

nothing, hard = os.open(os.devnull, os.O_WRONLY), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
tests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
tests.connect(sys.argv[1])
with programs.shared_by_all_runs():
    while True:
        text, (*outputs,), _, _ = socket.recv_fds(tests, 1 << 16, 1)
        if not text:
            break
        order = json.loads(text)
        for number in (1, 2):
            os.dup2(outputs[0] if number in order["streams"] else nothing, number)
        os.close(outputs[0])
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"] or hard, hard))
        try:
            code = main(order["arguments"])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            for number, stream in ((1, sys.stdout), (2, sys.stderr)):
                stream.flush()
                os.dup2(nothing, number)
        tests.send(str(code).encode())
"""


class Ended(NamedTuple):
    """A command that has ended."""

    returncode: int
    output: str


class Series:
    """The process, until `close`.

    Args: env, is_powerless: as `ForkServer.start`.
    """

    def __init__(self, server: ForkServer, env: Mapping[str, str], is_powerless: bool = False):
        with (
            tempfile.TemporaryDirectory(prefix="jaxgrpo-series-") as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        ):
            path = f"{folder}/socket"
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(START)
            self._process = server.start(path, env=env, program=PROGRAM, is_powerless=is_powerless)
            self._connection, _ = listener.accept()

    def run(
        self, *arguments: Any, merged: bool = True, limit: int | None = None, seconds: float = 120.0
    ) -> Ended:
        """A command's exit code, and what it wrote: on stderr alone where not `merged`.

        Args:
          limit: bytes that a file may have, as on a full disk; None: any number.
          seconds: that it may take.

        Raises: TimeoutError; ChildProcessError where the process has ended with it.
        """
        order = {"arguments": [*map(str, arguments)], "limit": limit}
        order["streams"] = [1, 2] if merged else [2]
        read, write = os.pipe()
        socket.send_fds(self._connection, [json.dumps(order).encode()], [write])
        os.close(write)
        over, written = time.monotonic() + seconds, bytearray()
        with os.fdopen(read, "rb", buffering=0) as stream:
            while select.select([stream], [], [], max(0.0, over - time.monotonic()))[0]:
                if not (more := stream.read(1 << 16)):
                    break
                written += more
        output = written.decode(errors="replace")
        if not select.select([self._connection], [], [], max(1.0, over - time.monotonic()))[0]:
            raise TimeoutError(f"{arguments} took more than {seconds} s: {output}")
        if not (code := self._connection.recv(64)):
            raise ChildProcessError(f"{arguments} ended its process: {output}")
        return Ended(int(code), output)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()
        self._process.kill_group()
