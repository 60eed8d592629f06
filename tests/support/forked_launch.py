"""`jaxgrpo launch` whose processes are forked from one that has imported JAX, as a program.

The launcher is the real one and starts each process as it does: with its environment, its output,
a process group of its own. What it spares is a new interpreter and its imports for each of them.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from jaxgrpo.cli import launch
from jaxgrpo.cli.main import run


class Child:
    """What the launcher uses of a `subprocess.Popen`.

    Args:
      command: an interpreter, "-m", "jaxgrpo" and the command of jaxgrpo.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdin: int | None,
        stdout: IO[bytes] | None,
        stderr: IO[bytes] | None,
        process_group: int,
        preexec_fn: Callable[[], Any],
    ):
        assert command[1:3] == ["-m", "jaxgrpo"]
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        os.setpgid(0, process_group)
        preexec_fn()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if stdin == subprocess.DEVNULL:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in ((1, stdout), (2, stderr)):
            if stream is not None:
                os.dup2(stream.fileno(), number)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["jaxgrpo", *command[3:]]
        end_as_an_interpreter(run)

    def poll(self) -> int | None:
        if self.returncode is None:
            self._note(os.waitpid(self.pid, os.WNOHANG))
        return self.returncode

    def wait(self) -> None:
        if self.returncode is None:
            self._note(os.waitpid(self.pid, 0))

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def _note(self, ended: tuple[int, int]) -> None:
        if ended[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])


def end_as_an_interpreter(command: Callable[[], None]) -> None:
    """Runs a command and ends the process; the frames above are those of the launcher."""
    code = 1
    try:
        command()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


launch.subprocess = types.SimpleNamespace(Popen=Child, DEVNULL=subprocess.DEVNULL)
sys.argv[0] = "jaxgrpo"
run()
