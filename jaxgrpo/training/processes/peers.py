"""The processes of a run watch one another: the end of one is the end of all, with its reason.

Each has a thread that sends a sign of life to process 0 once a second, and process 0 sends one to
each. Who fails says so before it ends; the kernel closes the connection of one that is killed; one
that is frozen falls silent. Process 0 passes the first failure on to all, and is the last to go:
with it goes JAX's coordination service, and JAX ends a process that has lost it without a reason.

JAX watches too, by heartbeats that no lock of Python holds up, but it ends a process with a stack
of C++ that does not say who failed. It reads the time of day, which leaps where a machine sleeps
or is moved; this watch reads a clock that does not. So JAX gets much more time, 300 s
(`process._HEARTBEAT`): it ends a run that this watch does not see, as where a port is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import jax

LOST = 6
"""The exit code if another process of the run is killed, frozen or out of reach."""

STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")
"""What the runtime's messages about collectives that broke begin with."""

TIMEOUT = 15.0
"""Seconds of silence after which a process is lost, until `run.peer_timeout` is known.

Signs of life come each second from a thread of its own, which compiling and computing leave free.
What holds it up is code in C that keeps the interpreter's lock, and a machine that swaps: seconds.
A run has to end within 30.
"""

TICK = 1.0  # seconds between two signs of life
PARTING = 5.0  # seconds that a process waits for the others to hear of a failure, or for its cause
LONGEST = 16_000  # characters of a failure that others print
STRANGERS = 64  # connections without the token, beyond one for each process, before the oldest ends
TOKEN_SECONDS = 10.0  # that a connection has to send the token
TOKEN_BYTES = 1_000  # that it may send before
KEY = "jaxgrpo/peers"  # of the coordination service: where process 0 listens
LOOPBACK = ("127.0.0.1", "localhost")


class Failure(NamedTuple):
    """Why a run ends: which process, its exit code, and what it printed or what is known of it."""

    process: int
    code: int
    text: str

    def describe(self) -> str:
        """What another process prints."""
        if self.code == LOST:
            return f"{self.text}; this process ends with it, the last checkpoint stands"
        return f"process {self.process} failed (exit code {self.code}):\n{self.text.rstrip()}"


class _Link:
    """A connection: messages as lines of JSON, and when the last one came."""

    def __init__(self, end: socket.socket, number: int | None):
        self.socket, self.number = end, number  # of the process at the other end; None: not known
        self.last_heard, self.has_left, self.partial = time.monotonic(), False, b""
        self.since = self.last_heard
        end.settimeout(TICK)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # a broken one is noticed when it is read
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None at the end of the connection."""
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        *lines, self.partial = (self.partial + data).split(b"\n")
        if self.number is None and len(self.partial) > TOKEN_BYTES:
            return None
        self.last_heard = time.monotonic()
        try:
            messages = [dict(json.loads(line)) for line in lines]
        except (
            ValueError,
            TypeError,
            RecursionError,
        ):  # a stranger, as one that looks for open ports
            return None
        return messages if data else None


class Peers:
    """The watch of one process.

    Args:
      index, count: its number, and how many there are.
      token: what a process that connects has to know.
      listener: where process 0 is connected to; None in the others.
      links: the connection to process 0; [] there.
    """

    def __init__(
        self,
        index: int,
        count: int,
        token: str,
        listener: socket.socket | None,
        links: list[_Link],
    ):
        self.index: int = index
        self.count: int = count
        self.timeout: float = TIMEOUT
        self._token, self._listener, self._links = token, listener, links
        self._bell, self._rope = os.pipe()
        self._first_failure: Failure | None = None  # of the run, as far as is known here
        self._own_failure: tuple[Failure, float] | None = None  # of this process, told from then on
        self._is_effect = False  # the failure of this process, perhaps of another's
        self._lost_process: int | None = None  # a silent process, which closes no connection
        self._sent_at = 0.0  # when this process told others of a failure
        self._leaves = False
        threading.Thread(target=self._watch, name="jaxgrpo-peers", daemon=True).start()

    def fail(self, code: int, text: str, is_effect: bool = False) -> NoReturn:
        """Ends this process, and so all: prints the first failure of the run, then `text`.

        Args:
          is_effect: perhaps another process failed, and this one only notices. Its reason is
            waited for.
        """
        self._is_effect, wait = is_effect, PARTING if is_effect else 0.0
        self._own_failure = Failure(self.index, code, text[-LONGEST:]), time.monotonic() + wait
        os.write(self._rope, b"\0")
        time.sleep(4 * PARTING)  # the thread ends the process
        _end(code, text)

    def leave(self) -> None:
        """This process comes to its end in order; from then on another may end unheard."""
        self._leaves = True
        os.write(self._rope, b"\0")

    def _watch(self) -> None:
        try:
            self._exchange()
        except BaseException:  # without this thread the others do not hear of a failure
            _end(1, f"the watch of the processes failed:\n{traceback.format_exc()}")

    def _exchange(self) -> None:
        last_beat, has_announced = 0.0, False
        while True:
            self._read(TICK / 2)
            now = time.monotonic()
            if self._leaves and not has_announced:
                has_announced = True
                self._send(left=True)
            if now > last_beat + TICK:
                last_beat = now
                self._send(beat=True)
                self._judge(now)
            self._settle(now)

    def _send(self, **message: Any) -> None:
        for link in self._links:
            if link.number is not None:  # strangers hear nothing
                link.send(**message)

    def _read(self, seconds: float) -> None:
        """Waits for messages, and takes those that have come."""
        listener = [] if self._listener is None else [self._listener]
        sources: list[Any] = [self._bell, *listener, *self._links]
        with selectors.PollSelector() as selector:  # needs no descriptor, and has no highest one
            for source in sources:
                selector.register(source, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(seconds)]
        if self._bell in ready:
            os.read(self._bell, 64)
        if self._listener in ready and self._listener is not None:
            with contextlib.suppress(OSError):  # it has gone already
                self._links.append(_Link(self._listener.accept()[0], None))
        for link in [link for link in self._links if link in ready]:
            messages = link.receive()
            for message in messages or []:
                self._take(link, message)
            if messages is None:
                self._lose(link)
        strangers = [link for link in self._links if link.number is None]
        late = time.monotonic() - TOKEN_SECONDS
        excess = len(strangers) - STRANGERS - self.count
        for order, link in enumerate(strangers):  # the oldest first
            if order < excess or link.since < late:
                self._lose(link)

    def _take(self, link: _Link, message: dict[str, Any]) -> None:
        if link.number is None:
            if message.get("token") != self._token:
                with contextlib.suppress(OSError):  # it has gone already
                    link.socket.shutdown(socket.SHUT_RDWR)  # the next look finds its end
                return
            link.number = message["process"]
        link.has_left |= "left" in message
        if "failed" in message and self._first_failure is None:
            self._first_failure = Failure(*message["failed"])

    def _lose(self, link: _Link) -> None:
        """A connection has ended."""
        self._links.remove(link)
        link.socket.close()
        in_order = link.has_left or (self._leaves and self.index > 0)
        if link.number is not None and not in_order and self._first_failure is None:
            text = f"process {link.number} is gone: it was killed, or its machine is down"
            self._first_failure = Failure(link.number, LOST, text)

    def _judge(self, now: float) -> None:
        for link in self._links:
            is_silent = self.timeout and now - link.last_heard > self.timeout
            if is_silent and link.number is not None and self._first_failure is None:
                why = f"has not been heard of for {self.timeout:g} s (run.peer_timeout)"
                cause = "it is frozen, or cannot be reached"
                text = f"process {link.number} {why}: {cause}"
                self._lost_process = link.number
                self._first_failure = Failure(link.number, LOST, text)

    def _settle(self, now: float) -> None:
        """Tells others of a failure, and ends this process when they have heard of it."""
        own_failure = (
            self._own_failure[0] if self._own_failure and now >= self._own_failure[1] else None
        )
        if self.index == 0 and self._first_failure is None:
            self._first_failure = own_failure
        tells = self._first_failure if self.index == 0 else own_failure
        if tells and not self._sent_at:
            self._sent_at = now
            self._send(failed=tells)
        if self.index == 0:
            waits = any(link.number not in (None, self._lost_process) for link in self._links)
        else:  # process 0 answers with the first failure of all
            waits = self._first_failure is None and bool(self._links)
        first = self._first_failure or own_failure
        if first and not (waits and now < self._sent_at + PARTING):
            self._finish(first)

    def _finish(self, first: Failure) -> NoReturn:
        own_failure = self._own_failure[0] if self._own_failure else None
        text = own_failure.text if own_failure else ""
        if first.process != self.index and first.text != text:
            text = f"{first.describe()}\n{text}"
        _end(own_failure.code if own_failure and not self._is_effect else first.code, text)


@contextlib.contextmanager
def without_proxies() -> Iterator[None]:
    """Hides the variables of proxies, such as http_proxy, while processes of a run join.

    gRPC would ask the proxy for process 0, and wait for it until JAX ends the process.
    """
    names = [name for name in os.environ if name.lower().endswith("_proxy")]
    values = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(values)


_watch: Peers | None = None


def watch() -> None:
    """Begins to watch the other processes. Called by all, as soon as they have joined."""
    global _watch
    from jax._src import distributed  # JAX has no public name for its key-value store

    state = distributed.global_state
    if _watch is not None or state.num_processes == 1:
        return
    client: Any = state.client
    host = str(state.coordinator_address).rpartition(":")[0].strip("[]")
    listener, links = None, []
    if state.process_id == 0:
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "")
        token, listener = secrets.token_hex(16), _listen(host, bind)
        client.key_value_set(KEY, f"{listener.getsockname()[1]} {token}")
    else:
        port, token = client.blocking_key_value_get(KEY, 60_000).split()
        try:
            links = [_Link(socket.create_connection((host, int(port)), timeout=10), 0)]
        except OSError as error:
            sys.stderr.write(
                f"process {state.process_id} cannot reach process 0 at {host}:{port} ({error}): "
                "if one fails, the others end later, and without its reason; open the ports "
                "between the machines of the run\n"
            )
            return
        links[0].send(process=state.process_id, token=token)
    _watch = Peers(state.process_id, state.num_processes, token, listener, links)
    sys.excepthook = _on_uncaught


def set_timeout(seconds: float) -> None:
    """Seconds of silence after which another process is lost; 0: never."""
    if _watch is not None:
        _watch.timeout = seconds


def leave() -> None:
    """To be called before a process ends in order."""
    if _watch is not None:
        _watch.leave()


def fail(code: int, text: str, error: BaseException | None = None) -> None:
    """Ends this process and the others with it, if there are any; else nothing happens.

    Args:
      code: the exit code of this one, and of others unless one has failed before.
      text: what this one prints, and others as its reason.
      error: what was raised; a collective that breaks may have done so since another is gone.
    """
    if _watch is not None:
        _watch.fail(code, text, is_effect=error is not None and _may_be_effect(error))


def _may_be_effect(error: BaseException) -> bool:
    """Whether an exception may come from the loss of another process.

    A collective that breaks raises JaxRuntimeError, or, where it ran before its call returned,
    ValueError with the status of the runtime.
    """
    return any(
        "RESOURCE_EXHAUSTED" not in str(cause)
        and (
            isinstance(cause, jax.errors.JaxRuntimeError)
            or (isinstance(cause, ValueError) and STATUS.match(str(cause)) is not None)
        )
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _listen(host: str, bind: str = "") -> socket.socket:
    """A socket that the other processes connect to: on the loopback if the run is on it.

    Args:
      bind: HOST:PORT that JAX's coordination service listens on; "" if it was not set. The watch
        listens on the same host, at a port of its own.
    """
    address = bind.rpartition(":")[0].strip("[]")
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family)
    if host in LOOPBACK:
        return socket.create_server(("127.0.0.1", 0))
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # a machine without IPv6
        return socket.create_server(("", 0))


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Of a program that runs without `process.guard`, as examples/own_loop.py."""
    code = 130 if issubclass(kind, KeyboardInterrupt) else 1
    fail(code, "".join(traceback.format_exception(kind, error, trace)), error)


def _end(code: int, text: str) -> NoReturn:
    """Ends this process at once: at a normal exit it would wait for the others."""
    try:
        os.write(2, f"{text.rstrip()}\n".encode("utf-8", "replace"))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(code)
