"""The process that a shell knows: it starts the command in a child, and waits for it.

A call into C that holds the interpreter's lock lets no Python of its process run: a run in it hears
no signal, and its watchdog cannot end it. So on Linux a command runs in a child of this process,
which passes stop signals on, kills the child where it does not end in time, and returns the exit
code. It also sees that a child which `os._exit(0)` ended has not done its work. It forks before JAX
is imported, and imports the standard library only. Where Python calls jaxgrpo there is no parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import importlib.util
import io
import math
import mmap
import os
import re
import resource
import signal
import struct
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What asks a command to stop."""

ECHO = 0.2  # seconds in which a signal that all processes get comes again from the parent
GRACE = 5.0  # seconds that a command has to stop in, unless it says otherwise
MORE = 2.0  # seconds behind that: the watchdog of a run ends it by itself, where it can
TICK = 0.25  # seconds between two looks while something is awaited
PR_SET_PDEATHSIG = 1  # of Linux' prctl
SI_KERNEL = 0x80  # Linux' si_code of a signal that a terminal sends, as Ctrl-C
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""How the system names a disk that takes no more: it is full, or read-only since a fault."""
STACKS = signal.SIGUSR2  # makes a child write the stacks of its threads, in C
SHOWN = 30  # lines of these


class _Shared:
    """What a child and its parent share: seconds of grace, and whether the command is over."""

    memory: mmap.mmap | None = None
    layout = struct.Struct("d?")
    parent = 0
    stacks = 2  # the descriptor that stacks of threads are written to

    @classmethod
    def write(cls, grace: float, is_over: bool) -> None:
        if cls.memory is not None:
            cls.layout.pack_into(cls.memory, 0, grace, is_over)

    @classmethod
    def read(cls) -> tuple[float, bool]:
        assert cls.memory is not None
        return cls.layout.unpack_from(cls.memory)


def allow(grace: float) -> None:
    """Says how many seconds this process has from now on to end after a stop signal."""
    _Shared.write(grace, is_over=False)


def finished() -> None:
    """Says that the command is over, so that an exit code of 0 means what it says."""
    _Shared.write(math.inf, is_over=True)


def stacks() -> int:
    """Where faulthandler writes the stacks of all threads: the parent prints the last lines."""
    return _Shared.stacks


def rests() -> bool:
    """Whether the parent of this process is stopped, as by SIGSTOP: a shell knows that one."""
    if _Shared.memory is None:
        return False
    with contextlib.suppress(OSError):  # where the parent is gone, or there is no /proc
        stat = Path(f"/proc/{_Shared.parent}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"
    return False


def is_child() -> bool:
    """Whether a shell knows the parent of this process, and not this one."""
    return _Shared.memory is not None


def end_with_parent() -> None:
    """The kernel kills this process, a new child, if its parent is killed and can end nothing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def open_standard_files() -> None:
    """Opens /dev/null in place of stdin, stdout and stderr, where a shell has closed them.

    Otherwise the next file that is opened, such as a lock or metrics, would get what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def print_any_text() -> None:
    """Lets stdout write what its encoding does not have in escapes, as stderr does: a completion
    may have any character, and a name of a file bytes that are none."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # it was a file, and something made a pipe of it
            sys.stdout.reconfigure(errors="backslashreplace")


def discard_output(descriptor: int) -> None:
    """From now on what is written to stdout or stderr goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:  # as it is where the descriptor was closed and is the lowest
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    os.set_inheritable(descriptor, True)


def say(text: str) -> None:
    """Writes on stderr, past its buffer, if it takes that: a terminal that is gone does not."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode("utf-8", "backslashreplace"))


@contextlib.contextmanager
def reaching_output(descriptor: int) -> Iterator[None]:
    """Within it what is printed may be lost: a run does not end because it cannot be read.

    Where the disk is full, what comes later is tried again. Where the terminal is gone, as after
    its window was closed over a run under nohup, nothing more is printed.
    Raises: BrokenPipeError where a reader has closed its end, as `head` does.
    """
    _open_again(descriptor)
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno not in FULL or descriptor == 2:
            discard_output(descriptor)


def write_error(text: str) -> None:
    """Writes on sys.stderr, if there is one and it is read."""
    if sys.stderr is None:  # as where a shell closes it
        return
    try:
        with reaching_output(2):
            sys.stderr.write(text)
            sys.stderr.flush()
    except BrokenPipeError:
        discard_output(2)  # Python would try again at its end


def _open_again(descriptor: int) -> None:
    """Opens sys.stdout or sys.stderr where code that a run called, a reward for example, has closed
    it. That leaves its descriptor open, as a rule."""
    name = "stderr" if descriptor == 2 else "stdout"
    if not getattr(getattr(sys, name), "closed", False):
        return
    try:
        os.fstat(descriptor)
    except OSError:
        discard_output(descriptor)
    stream = os.fdopen(descriptor, "w", 1, errors="backslashreplace", closefd=False)
    setattr(sys, name, stream)


def keep_interrupts() -> None:
    """Lets Ctrl-C come again where Python has ignored it.

    It raises an exception wherever the main thread is. In a function that Python's garbage
    collector calls, as JAX has one, that exception is printed and lost, and the command goes on.
    """

    def hear(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(ignored)
            return
        arguments = threading.main_thread().ident, signal.SIGINT
        again = threading.Timer(TICK / 10, signal.pthread_kill, arguments)  # now it would be lost
        again.daemon = True
        again.start()

    sys.unraisablehook = hear


def is_nohup(number: int) -> bool:
    """Whether this is SIGHUP, and is ignored, as under nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def run(command: Callable[[], int]) -> int:
    """Runs the command in a child and returns its exit code; in the child: in this process.

    The process has a single thread. A child that a signal ends ends this process by it, too.
    """
    if sys.platform != "linux":
        return command()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signals = {signal.SIGCHLD, signal.SIGCONT, *(n for n in STOP_SIGNALS if not is_nohup(n))}
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _Shared.memory, _Shared.parent = mmap.mmap(-1, _Shared.layout.size), os.getpid()
    _Shared.stacks = os.memfd_create("stacks")
    allow(GRACE)
    child = os.fork()
    if child:
        return _Waiting(child, signals).wait()
    end_with_parent()
    if os.getppid() != _Shared.parent:  # it was killed before the line above
        os._exit(128 + signal.SIGKILL)
    faulthandler.register(STACKS, file=_Shared.stacks)
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    try:
        code = command()
    except KeyboardInterrupt:  # while the command is loaded
        forget_echo()
        sys.stderr.write("interrupted\n")
        code = 128 + signal.SIGINT
    finished()
    return code


def forget_echo() -> None:
    """After Ctrl-C: the same from the parent would hit this process while it ends."""
    if _Shared.memory is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Waiting:
    """Waits for a child, with all of `signals` blocked."""

    def __init__(self, child: int, signals: Collection[int]):
        self.child, self.signals = child, signals
        self.first: tuple[int, float] | None = None  # the first stop signal, and when it came
        self.is_urgent = False  # Ctrl-C has come again
        self.wakes = 0  # how often the child is still to be continued

    def wait(self) -> int:
        """Returns the exit code of the child."""
        while True:
            patient = self.first is None and not self.wakes
            info = signal.sigtimedwait(self.signals, 3600.0 if patient else TICK)
            if info is not None and info.si_signo != signal.SIGCHLD:
                self._pass_on(info.si_signo, info.si_code == SI_KERNEL)
            if self.wakes:  # more than once: it may be about to stop, as its watchdog does
                self.wakes -= 1
                os.kill(self.child, signal.SIGCONT)
            ended, status = os.waitpid(self.child, os.WNOHANG)
            if ended:
                return self._code(status)
            if self.first is not None and time.monotonic() > self._deadline(*self.first):
                return self._kill(self.first[0])

    def _pass_on(self, number: int, by_terminal: bool) -> None:
        if number == signal.SIGCONT:
            self.wakes = 8
            return
        if not by_terminal:  # which has sent it to both
            os.kill(self.child, number)
        now = time.monotonic()
        if self.first is None:
            self.first = number, now
        elif number == signal.SIGINT and now - self.first[1] > ECHO:
            self.first, self.is_urgent = (number, now), True

    def _deadline(self, number: int, since: float) -> float:
        return since + (1.0 if self.is_urgent else _Shared.read()[0] + MORE)

    def _kill(self, number: int) -> int:
        grace = 1.0 if self.is_urgent else _Shared.read()[0]
        text = (
            f"\nasked to stop by {signal.Signals(number).name}, it did not within {grace:g} s, and "
            "is killed: code in C, for example a regular expression, lets no thread run; what is "
            "saved stays; give a reward a timeout, or run such code in a process of its own; "
            "what the threads were doing:\n"
        )
        say(text)
        os.kill(self.child, STACKS)
        time.sleep(1.0)  # they are written in C, at once
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        _print_stacks()
        return 128 + number

    def _code(self, status: int) -> int:
        code, is_over = os.waitstatus_to_exitcode(status), _Shared.read()[1]
        _print_stacks()
        if code == 0 and not is_over:
            text = (
                "error: the process ended with exit code 0 before its command was over: code that "
                "it called, a reward for example, has ended it, as os._exit(0) does; what was "
                "saved before stays\n"
            )
            say(text)
            return 1
        if code >= 0:
            return code
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left the one core
        with contextlib.suppress(OSError):  # SIGKILL has no other
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
        return 128 - code  # in a container's first process the signal does nothing


def _print_stacks() -> None:
    """What the threads of the child were doing, if it has written it; the main thread is last."""
    lines = os.pread(_Shared.stacks, 2**24, 0).decode("utf-8", "replace").splitlines()
    if len(lines) > SHOWN:
        lines[1 : 1 - SHOWN] = [f"  ... ({len(lines) - SHOWN} lines left out)"]
    say("".join(f"{line}\n" for line in lines))


_NO_DRIVER = re.compile(
    rb"(WARNING: All log messages before absl::InitializeLog\(\)[^\n]*\n)?"
    rb"[^\n]*Could not find cuda drivers[^\n]*\n"
)
_CUDA = ("cuda12", "cuda13")


def hide_cuda() -> None:
    """Keeps JAX from loading its plugin for CUDA, where it is installed to compile for GPUs and
    this machine has no driver. Before JAX is imported."""
    if not _only_compiles():
        return
    for name in _CUDA:
        sys.modules[f"jax_{name}_plugin"] = None  # pyright: ignore[reportArgumentType]
        plugin: Any = types.ModuleType(f"jax_plugins.xla_{name}")
        plugin.initialize = lambda: None
        sys.modules[plugin.__name__] = plugin


@contextlib.contextmanager
def without_cuda_lines() -> Iterator[None]:
    """Leaves out of stderr that there is no CUDA driver, where the plugin is loaded to compile.

    Other lines come at the end of the block.
    """
    if not _only_compiles():
        yield
        return
    with tempfile.TemporaryFile() as capture:
        try:
            stderr = os.dup(2)
        except OSError:  # it is closed
            yield
            return
        os.dup2(capture.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            capture.seek(0)
            if lines := _NO_DRIVER.sub(b"", capture.read()):
                say(lines.decode("utf-8", "replace"))


def has_cuda() -> bool:
    """Whether JAX's plugin for CUDA is installed and there is a driver that it can use."""
    return _has_plugin() and not _only_compiles()


def _only_compiles() -> bool:
    """Whether JAX's plugin for CUDA is installed and there is no driver that it could use."""
    return _has_plugin() and not has_driver()


def has_driver() -> bool:
    """Whether there is a driver of CUDA."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _has_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_{name}_plugin") for name in _CUDA)
