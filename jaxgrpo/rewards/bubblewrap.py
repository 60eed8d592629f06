"""Programs in CPython, each in a process that bubblewrap shuts in.

The process sees Python and the system's libraries, read-only, and no other file; it has no network,
sees no other process, may start none, writes nowhere, and maps at most MEMORY bytes. It ends at its
limit of processor time or wall time, when it prints too much, and with the process that began it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxgrpo.rewards.programs import (
    MEMORY,
    PRINTED,
    SLACK,
    Printed,
    Sandbox,
    Tests,
    Verdict,
)

PROGRAM = Path(__file__).with_name("sandbox_program.py")
LONGEST = 16 * 2**20  # bytes of a line of values
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
USERS = range(60_001, 64_000)
"""A user for each process where we are root, whose processes the system does not count."""


def find_problem() -> str | None:
    """Why bubblewrap runs no program on this machine; None: it does."""
    if shutil.which("bwrap") is None:
        return "there is no program bwrap"
    return _try_run()


def make_sandbox() -> Sandbox:
    """The sandbox; `find_problem` says whether it can be used here."""
    return Sandbox("bwrap", run, judge)


def run(program: str, stdin: str, seconds: float, shows_value: bool) -> Printed:
    """What a program prints; see `Sandbox`."""
    code = program.encode(errors="replace")
    with contextlib.ExitStack() as stack:
        # A file and no pipe: a program that does not read its input must not block us.
        memory = stack.enter_context(os.fdopen(os.memfd_create("stdin"), "w+b"))
        memory.write(code + stdin.encode(errors="replace"))
        memory.seek(0)
        options = "1" if shows_value else "0", str(len(code))
        process = stack.enter_context(_Process("run", seconds, options, memory))
        printed = process.read(PRINTED + 1)
        text, problem = printed[:PRINTED].decode(errors="replace"), "stopped"
        if len(printed) <= PRINTED:
            exit_code = process.wait()
            problem = "" if exit_code == 0 else "failed" if 0 < exit_code < 128 else "stopped"
    return Printed(text, problem)


def judge(program: str, tests: Tests, seconds: float, stops: bool) -> Verdict:
    """How a program does in tests, which run in a second process; see `Sandbox`.

    Between the two go names, arguments and values. An answer is handed on as it is: what a program
    claims to have computed has to be right, and that is all it can claim.
    """
    passed, total, problem = 0, len(tests.cases), ""
    with _Process("calls", seconds) as solver, _Process("tests", seconds) as judging:
        solver.write(json.dumps(program).encode() + b"\n")
        judging.write(json.dumps(tests).encode() + b"\n")
        count = 0
        while count < total and (line := judging.read_line()):
            kind = json.loads(line)[0]
            if kind == "broken":
                return Verdict(0, total, kind)
            if kind == "call":
                solver.write(line)
                answer = solver.read_line()
                if answer is None:
                    exit_code = solver.wait()
                    problem = "failed" if 0 <= exit_code < 128 else "stopped"
                    break
                judging.write(answer)
                continue
            count += 1
            passed += kind == "passed"
            if stops and kind != "passed":
                break
    return Verdict(passed, total, problem)


class _Process:
    """A process in a sandbox, which is killed at the latest when the block ends."""

    def __init__(
        self, role: str, seconds: float, options: tuple[str, ...] = (), stdin: Any = subprocess.PIPE
    ):
        user = secrets.choice(USERS) if os.geteuid() == 0 else 0
        limits = map(str, (math.ceil(seconds), MEMORY, user))
        bwrap, *rest = _command(os.geteuid() == 0)
        reading, writing = os.pipe()
        with os.fdopen(reading) as report:
            try:
                self._process = subprocess.Popen(
                    [bwrap, "--info-fd", str(writing), *rest, _source(), role, *limits, *options],
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[writing],
                    # Sets and dicts have the same order each time.
                    env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
                )
            finally:
                os.close(writing)
            facts = report.read()
        self._first = _open_process(json.loads(facts)["child-pid"]) if facts else None
        self._timer = threading.Timer(seconds + SLACK, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> _Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._timer.join()
        self._kill()
        if self._first is not None:
            os.close(self._first)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()

    def _kill(self) -> None:
        """Ends the first process inside, and with it all others; bwrap sees to what is left."""
        with contextlib.suppress(ProcessLookupError):
            if self._first is None:
                self._process.kill()
            else:
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    def write(self, line: bytes) -> None:
        """Hands it a line; one that has ended reads none."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def read(self, count: int) -> bytes:
        """So many bytes, or all if it ends before."""
        assert self._process.stdout is not None
        return self._process.stdout.read(count)

    def read_line(self) -> bytes | None:
        """The next line; None if it ends before, or the line does not."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline(LONGEST)
        return line if line.endswith(b"\n") else None

    def wait(self) -> int:
        """Its exit code; 128 and more, or below 0, where a signal ended it."""
        return self._process.wait()


def _open_process(number: int) -> int | None:
    """A descriptor of a process: its number may soon be another's. None where it has ended, or
    the system has no such descriptors."""
    try:
        return os.pidfd_open(number)
    except (AttributeError, OSError):
        return None


@functools.cache
def _source() -> str:
    return PROGRAM.read_text()


@functools.cache
def _command(is_root: bool) -> tuple[str, ...]:
    """bwrap with its options and Python with its own, up to `-c`."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = str(Path(sys.base_prefix, "bin", f"python{version}").resolve())
    separate = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts")
    # Root becomes another user inside, which a user namespace would not let it.
    privileges = (
        ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
        if is_root
        else ("--unshare-user", "--cap-drop", "ALL")
    )
    return (
        *(shutil.which("bwrap") or "bwrap", *separate, "--unshare-cgroup-try", *privileges),
        *("--die-with-parent", "--new-session"),
        *_mounts(python),
        *("--remount-ro", "/", "--chdir", "/", "--"),
        *(python, "-P", "-s", "-S", "-B", "-c"),
    )


def _mounts(python: str) -> Iterator[str]:
    """The files that are there: Python, the libraries of the system, and /dev/null.

    Not installed packages, and not ctypes, by which a program could call the system directly:
    neither those of this Python nor of another one beside it, as the system's. Where ctypes is no
    file but a part of Python, the program inside refuses it.
    """
    bases = dict.fromkeys(("base", "platbase", "installed_base", "installed_platbase"))
    paths = sysconfig.get_paths(vars=dict.fromkeys(bases, sys.base_prefix))
    library = str(Path(sys.base_prefix, "lib"))
    # By default folders above these are root's alone.
    for folder in ("/dev", *reversed(Path(library).parents), *reversed(Path(python).parents)):
        yield from ("--dir", str(folder))
    for folder in LIBRARIES:
        if os.path.islink(folder):
            yield from ("--symlink", os.readlink(folder), folder)
        elif os.path.isdir(folder):
            yield from ("--ro-bind", folder, folder)
    if library not in LIBRARIES:
        yield from ("--ro-bind", library, library)
    yield from ("--ro-bind", python, python)
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    yield from ("--dev-bind", "/dev/null", "/dev/null")
    libraries = [Path(paths["stdlib"])]
    for root in (*LIBRARIES, library):
        if root not in LIBRARIES or not os.path.islink(root):
            libraries += [place for place in Path(root).glob("python3*") if not place.is_symlink()]
    folders = {str(folder) for place in libraries for folder in place.glob("*-packages")}
    for folder in sorted({paths["purelib"], paths["platlib"]} | folders):
        if os.path.isdir(folder) and not os.path.islink(folder):
            yield from ("--tmpfs", folder, "--remount-ro", folder)
    modules = {file for place in libraries for file in place.glob("lib-dynload/_ctypes.*")}
    for file in sorted(modules):
        yield from ("--ro-bind", "/dev/null", str(file))


@functools.cache
def _try_run() -> str | None:
    """What comes of a first program; None where it does as it should."""
    command = [*_command(os.geteuid() == 0), "print(6 * 7)"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=60, env={})
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not run: {error}"
    if process.stdout.strip() != "42":
        return f"bwrap does not run: {process.stderr.strip()[-300:] or process.returncode}"
    printed = run("print(6 * 7)", "", 10.0, False)
    return (
        None if printed == Printed("42\n") else f"bwrap runs Python, but not a program: {printed}"
    )
