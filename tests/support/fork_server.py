"""A process that has imported jaxgrpo and JAX once, and forks the commands that tests start.

    python fork_server.py SOCKET

A client connects, sends a request as JSON with the descriptors of the command's stdout and stderr,
and is answered by the process id in NUMBER bytes, with a descriptor of the process, and by a line
with the exit status once the command has ended. A byte that it sends in between kills the command
with its group: here it is certain that the number is still the command's.
JAX starts threads in its backend, which is made in the child: until then there is one thread, and a
fork is safe. A command starts in a tenth of a second instead of several.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import types
from typing import Any

PRELOADED = (
    *("jaxgrpo.cli.start", "jaxgrpo.cli.main", "jaxgrpo.training.loop", "jaxgrpo.data.tasks"),
    *("jaxgrpo.training.records.report.html", "jaxgrpo.planning.preview", "jaxgrpo.cli.launch"),
    *("jax.experimental.multihost_utils", "transformers.models.auto.tokenization_auto"),
    *("transformers.tokenization_utils_tokenizers", "tokenizers", "jinja2", "safetensors.numpy"),
    *("dill", "jaxgrpo.evaluation.evaluate", "jaxgrpo.training.stored_policy", "html.parser"),
    *("tensorboardX", "jaxgrpo.training.records.report.charts", "jaxgrpo.models.kernels"),
)
FIXED = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS")
"""Variables of JAX that jaxgrpo reads when a command starts; others JAX reads as it is imported."""

NUMBER = 12
"""Bytes in which a client is told the id of the process that it has asked for."""

Request = dict[str, Any]


def main(path: str) -> None:
    """Serves until its own parent ends; in a child it becomes the command of a request."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the tests
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector of a child then writes into no page that all of them share
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would lose all but this one"
    become(serve(path))


def serve(path: str) -> Request:
    """Forks a child for each request, and returns in the child with what it is to become."""
    bell, rope = os.pipe()
    os.set_blocking(rope, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(rope)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)  # it appears once it listens
    commands: dict[int, socket.socket] = {}
    import select

    while True:
        ready, _, _ = select.select([bell, listener, *commands.values()], [], [])
        if bell in ready:
            os.read(bell, 4096)
        for child, client in commands.items():
            if client in ready:  # it asks for the end of its command, or has left
                with contextlib.suppress(OSError):
                    client.recv(1)
                os.killpg(child, signal.SIGKILL)  # not reaped: its number is no other's
        _answer(commands)
        if listener in ready and (request := _fork(listener, commands)):
            signal.set_wakeup_fd(-1)
            for descriptor in (bell, rope):
                os.close(descriptor)
            return request


def _fork(listener: socket.socket, commands: dict[int, socket.socket]) -> Request | None:
    """Forks for the next request, which it returns in the child; None here."""
    client, _ = listener.accept()
    descriptors: list[int] = []
    try:
        data, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 3)
        request = json.loads(data)
        child = os.fork()
    except (OSError, ValueError) as error:  # the client is gone, or there is room for no process
        print(f"no command was forked: {error}", file=sys.stderr, flush=True)
        child, request = -1, None
    if child:
        for descriptor in descriptors:
            os.close(descriptor)
        if child < 0:
            client.close()
            return None
        os.setpgid(child, child)
        commands[child] = client
        handle = os.pidfd_open(child)
        with contextlib.suppress(OSError):  # of a client that is gone
            socket.send_fds(client, [f"{child:<{NUMBER}}".encode()], [handle])
        os.close(handle)
        return None
    for connection in (listener, client, *commands.values()):
        connection.close()
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
    for descriptor in set(descriptors) - {1, 2}:
        os.close(descriptor)
    return request


def _answer(commands: dict[int, socket.socket]) -> None:
    """Tells the clients of commands that have ended how they did."""
    while commands:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        client = commands.pop(child)
        with contextlib.suppress(OSError):  # a client that waits no more
            client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        client.close()


def become(request: Request) -> None:
    """Runs a command of jaxgrpo, or a program, as the process that a shell would have started."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.setpgid(0, 0)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = request["environment"]
    before = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
    after = {n: v for n, v in environment.items() if n.startswith("JAX_") and n not in FIXED}
    assert before == after, f"JAX was imported with {before}, not with {after}"
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    if request.get("limit"):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], limit))
    if request.get("is_powerless"):
        give_up_powers()
    arguments = request["arguments"]
    if (program := request.get("program")) is not None:
        sys.argv = ["-c", *arguments]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(program, "<string>", "exec"), vars(module))
        return
    sys.argv = ["jaxgrpo", *arguments]
    from jaxgrpo.cli.main import run

    run()


def give_up_powers() -> None:
    """Root reads and writes whatever a file's mode says; from here on this process does not."""
    if os.geteuid():
        return
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the call, and this process
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, data) == 0, os.strerror(ctypes.get_errno())
    for word in range(2):  # effective and permitted: without CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        data[word] &= ~0b110
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    main(sys.argv[1])
