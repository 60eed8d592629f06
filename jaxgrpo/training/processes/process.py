"""The start and the end of a process: devices, several processes, stop signals, exit codes."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import math
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

import jaxgrpo
from jaxgrpo.core.errors import InputError, comes_from, cut, refusing, without_passwords
from jaxgrpo.data import storage
from jaxgrpo.rewards import limits
from jaxgrpo.rewards.protocol import RewardError
from jaxgrpo.training.processes import parent, peers
from jaxgrpo.training.processes.backend import (
    check_platform,
    devices_line,
    prepare_profile,
    quiet_libtpu,
    start_backend,
)
from jaxgrpo.training.processes.parent import STOP_SIGNALS

EXIT_CODES = {
    0: "done",
    1: "crashed; the traceback says where; or code that it called ended the process with 0; of "
    "`plan`: the run does not fit",
    2: "what was given cannot be used; the message says why; of `doctor`: JAX cannot use the "
    "devices of the machine",
    3: "a reward failed in a run under way; the steps before are saved, in an "
    "evaluation those up to the newest checkpoint",
    4: "stuck, or a reward did not end at its timeout; the last checkpoint stands",
    5: "diverged: weights or gradients are not finite any more; the last good checkpoint stands",
    peers.LOST: "another process of the run was killed, is frozen or out of reach; the message says"
    " which; the last checkpoint stands",
    74: "the disk is full or cannot be written, so that nothing was saved; the message says where",
    129: "stopped by SIGHUP (its terminal was closed), saved as after SIGTERM",
    130: "stopped by Ctrl-C (SIGINT), saved where there was something to save",
    128 + signal.SIGUSR1: "stopped by SIGUSR1 (a scheduler's warning), saved as after SIGTERM",
    141: "what read the output has closed it, as `head` does; a run has saved its step",
    143: "stopped by SIGTERM; saved, unless the step under way outlasted run.stop_grace",
}

PROCESS_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Set in every process of a run over several; a cluster that JAX knows sets its own instead."""

BY_HAND = (
    "say it by --coordinator HOST:PORT --num-processes N --process-id I (of one process: "
    "localhost:8476 1 0)"
)
_JOIN = 300  # seconds that a process waits at its start for the others
_HEARTBEAT = 300  # without a sign of life JAX ends all processes: see peers
_SHUTDOWN = 60  # seconds that processes wait for one another at their end, after `meet`

_CACHE_MIN_SECONDS = 0.03  # compilations shorter than this are not worth a file
_COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event for each program
_READ = "/jax/compilation_cache/cache_retrieval_time_sec"  # and for each that it had on disk
_COLLECT_AFTER = (20_000, 10, 10)
"""gc.set_threshold: tracing makes objects by the 100,000. Python's collector, which by itself looks
after each 700, took 0.9 s until the end of a first step on two cores; so it takes 0.3."""


class StopRequested(Exception):
    """A run has stopped by request, after saving. The message says how to go on."""

    run: Any = None  # the `loop.Run`, where it is complete all the same


class RunEnded(Exception):
    """A run has ended before its last step. The message says what is saved and what to do."""

    code: int


class NotSaved(RunEnded):
    """A run could not be saved. The message says where and why."""

    code = 74


class RewardFailed(RunEnded, RewardError):
    """A reward failed in a run under way."""

    code = 3


class Diverged(RunEnded):
    """A run cannot go on from the weights it has. The message names the last good checkpoint."""

    code = 5


class Programs:
    """Counts what this process compiles, from `start` on."""

    _lock, _listens = threading.Lock(), False
    begun: int = 0
    ended: int = 0
    read: int = 0  # from the compile cache, in no time

    @classmethod
    def listen(cls) -> None:
        """Counts from now on; calling it again changes nothing."""
        if not cls._listens:
            cls._listens = True
            jax.monitoring.register_scalar_listener(lambda event, *_, **__: cls._count(event, True))
            jax.monitoring.register_event_duration_secs_listener(
                lambda event, *_, **__: cls._count(event, False)
            )

    @classmethod
    def _count(cls, name: str, begins: bool) -> None:
        with cls._lock:
            cls.begun += begins and name == _COMPILED
            cls.ended += not begins and name == _COMPILED
            cls.read += name == _READ

    @classmethod
    def compiled(cls) -> int:
        """How many have been compiled, or are being compiled."""
        return cls.begun - cls.read

    @classmethod
    def under_way(cls) -> int:
        """How many are being compiled."""
        return cls.begun - cls.ended


def compiling_line(number: int) -> str:
    """What to say of so many programs that are compiled.

    >>> compiling_line(1).partition(" (")[0]
    'compiling 1 program'
    """
    options = jax.config.values
    folder = options["jax_compilation_cache_dir"]
    cached = folder and options["jax_enable_compilation_cache"]
    place = f"; kept in {folder}" if cached else ""
    return f"compiling {number} program{'s' * (number != 1)} (first run of these shapes{place})"


class _Stop:
    """The last stop signal that this process got, None so far; and how long it may wait."""

    number: int | None = None
    request: int | None = None  # as a signal, where no handler of ours has heard it: `ask_to_stop`
    since = 0.0  # time.monotonic()
    listens = False  # within `stop_signals`
    grace: float = math.inf
    notice: ClassVar[list[bytes]] = []  # what to say of the first one, until it has been said


def start(platform: str = "auto", profile: bool = False) -> str:
    """Joins the other processes, takes the devices and returns a line that names them.

    To be called before anything is computed; calling it again only checks the platform.

    Args:
      platform: "cpu", "gpu", "tpu", or "auto" for the best one there is.
      profile: steps will be traced, which on a GPU takes a flag of XLA.

    Raises: InputError where JAX cannot start, or the devices are not of that platform; with
    "auto", where there is a GPU or TPU that this JAX cannot use; where it is too late for that
    flag. Nothing falls back to the CPU in silence.
    """
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    gc.set_threshold(*_COLLECT_AFTER)
    quiet_libtpu(os.environ)
    if profile:
        prepare_profile(os.environ)
    _join(os.environ)
    backend = start_backend()
    check_platform(platform, backend)
    _keep_compilations(os.environ, backend)
    Programs.listen()
    return f"jaxgrpo {jaxgrpo.__version__} on {devices_line()}, jax {jax.__version__}"


def is_main() -> bool:
    """Whether this process is the one that writes and prints for all."""
    return jax.process_index() == 0


def broadcast(decide: Callable[[], Any]) -> Any:
    """What `decide` returns in process 0, in every process. It is called there alone.

    Called by all processes: two that decide by what each finds on its own disk may do different
    things, and then wait for each other for ever.

    Args:
      decide: returns a JSON value.
    Raises: the InputError that it raises, in every process.
    """
    if jax.process_count() == 1:
        return decide()
    from jaxgrpo.rollout.exchange import gather_json

    value, problem = None, None
    if jax.process_index() == 0:
        try:
            value = decide()
        except InputError as error:
            problem = str(error)
    value, problem = gather_json([value, problem])[0]
    if problem is not None:
        raise InputError(problem)
    return value


@contextlib.contextmanager
def stop_signals(grace: float = math.inf, after: str = "step") -> Iterator[None]:
    """Within it, STOP_SIGNALS ask the loop inside to stop. A second Ctrl-C ends the process at
    once; at a prompt of Python it raises KeyboardInterrupt.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    An exception raised wherever the signal arrives is lost now and then, and the loop goes on.

    Args:
      grace: seconds that the message names; training/processes/watchdog.py ends the process then.
      after: what the loop finishes before it stops.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    latest = f", in {grace:g} s at the latest" if grace < math.inf else ""
    text = f"\nstopping after this {after}{latest}; Ctrl-C again ends at once, without saving\n"
    _Stop.number = _Stop.request = None
    _Stop.grace, _Stop.notice, _Stop.listens = grace, [text.encode()], True
    numbers = [number for number in STOP_SIGNALS if not parent.is_nohup(number)]
    previous_handlers = {number: signal.signal(number, _on_signal) for number in numbers}
    # Own code may have let it end the process, as scripts do that are read by `head`.
    previous_handlers[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    parent.allow(grace)
    try:
        yield
    finally:
        # After a stop signal nothing is hung any more, and the end may take its time.
        parent.allow(math.inf if _Stop.number or _Stop.request else parent.GRACE)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        _Stop.listens = False


def stop_requested(step: int) -> bool:
    """Whether to save and stop now; the same answer in every process of a run.

    Args:
      step: the number of the step, the same in every process; all have to call this.
    """
    # What has stopped a run of the main thread is nothing to a later one of another thread.
    is_heard = _Stop.listens or threading.current_thread() is threading.main_thread()
    is_stopping = is_heard and bool(_Stop.number or _Stop.request)
    if jax.process_count() == 1:
        return is_stopping
    from jax.experimental import multihost_utils

    steps, stops = multihost_utils.process_allgather(np.array([step, is_stopping], np.int32)).T
    if steps.min() != steps.max():
        raise RuntimeError(f"the processes of this run are at different steps: {steps.tolist()}")
    return bool(stops.any())


def ask_to_stop(number: int) -> bool:
    """Asks the loop within `stop_signals` to stop as by a signal, whose handler need not be ours.

    Returns: whether there is such a loop.
    """
    if _Stop.listens and _Stop.request is None:
        _Stop.request = number
    return _Stop.listens


def meet() -> None:
    """Waits for the other processes: the first may write for long after the rest is done."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("the end of a run")


def guard(command: Callable[[], int | None]) -> int:
    """Runs a command and returns its exit code, EXIT_CODES.

    A mistake of the user becomes its message, without a traceback. With several processes a
    failure ends this one at once, and the others with its reason: at a normal exit it would wait
    for them, and they for it. So does a thread that a reward left running: a normal exit would
    wait for it.
    """
    text, failed, raised = "", True, None
    try:
        code = command() or 0
        failed = code != 0  # perhaps in this process alone, as where its output is closed
    except StopRequested as stopped:
        parent.forget_echo()  # all is saved: Ctrl-C again need not break the end of Python
        text, failed = f"{stopped}\n", False
        code = 128 + (_Stop.number or _Stop.request or signal.SIGTERM)
    except (InputError, RunEnded) as error:
        text = "\n".join([f"error: {error}", *getattr(error, "__notes__", ())]) + "\n"
        code = error.code if isinstance(error, RunEnded) else 2
    except KeyboardInterrupt:
        parent.forget_echo()
        text = "interrupted\n"  # outside the training loop, where nothing is lost
        code = 128 + signal.SIGINT
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) and error.errno in parent.FULL:
            where = "" if error.filename else ": the output, or a file that was open"
            text, code = f"error: {error}{where}; make space there\n", NotSaved.code
        elif isinstance(error, PermissionError) and (place := error.filename2 or error.filename):
            text, code = f"error: {place}: {error.strerror}: give this user the permission\n", 2
        elif comes_from(error, KeyboardInterrupt):  # by way of Orbax, for example
            parent.forget_echo()
            text, code = "interrupted\n", 128 + signal.SIGINT
        else:
            text, code, raised = traceback.format_exc(), 1, error
    text = f"{cut(without_passwords(text.rstrip()))}\n" if text else ""
    several = jax.distributed.is_initialized()
    if several and failed:
        peers.fail(code, text, raised)
    parent.write_error(text)
    peers.leave()
    if limits.has_left_threads() and several and not failed:
        jax.distributed.shutdown()
    if limits.has_left_threads() or (several and failed):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):  # it is read no more, or was closed
                stream.flush()
        parent.finished()
        os._exit(code)
    return code


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where compiled programs are kept: JAX's own variable, else the user's cache folder."""
    if environment.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(environment["JAX_COMPILATION_CACHE_DIR"])
    return storage.cache_folder(environment) / "xla"


def several_processes(environment: Mapping[str, str]) -> dict[str, str | int] | None:
    """Arguments of jax.distributed.initialize: {} lets JAX ask the cluster, None is one process.

    Args:
      environment: with PROCESS_VARIABLES, or without; a cluster is looked for in os.environ, since
        JAX does so.
    Raises: InputError where only some of PROCESS_VARIABLES are set, or no numbers; where JAX finds
    a cluster, and not how many processes it has.
    """
    variables = {name: environment[name] for name in PROCESS_VARIABLES if environment.get(name)}
    if not variables:
        return {} if _cluster_size() > 1 else None
    missing = [name for name in PROCESS_VARIABLES if name not in variables]
    if missing:
        raise InputError(
            f"{', '.join(variables)} is set but {', '.join(missing)} is not: set all three in "
            "every process, or none"
        )
    address, *numbers = (variables[name] for name in PROCESS_VARIABLES)
    if not all(number.isdecimal() for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        raise InputError(
            f"JAX_NUM_PROCESSES = {numbers[0]} and JAX_PROCESS_ID = {numbers[1]}: expected whole "
            "numbers, the second from 0 to one less than the first"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(
            f"JAX_COORDINATOR_ADDRESS = {address}: expected HOST:PORT of process 0, as 10.0.0.2:84"
        )
    count, index = map(int, numbers)
    return {"coordinator_address": address, "num_processes": count, "process_id": index}


def _cluster_size() -> int:
    """How many processes the cluster has that JAX finds this one in: 1 where it finds none.

    It knows Open MPI, SLURM, TPU pods on GKE and on GCE, and jobs of Kubernetes, and looks for them
    in this order. It has no public function that asks without joining.
    """
    from jax._src.clusters import ClusterEnv, K8sCluster

    indexed = "JOB_COMPLETION_INDEX" in os.environ  # JAX needs it, and a pod alone has none
    for cluster in ClusterEnv._cluster_types:
        if cluster.opt_in_only_method or (cluster is K8sCluster and not indexed):
            continue
        if cluster is K8sCluster and importlib.util.find_spec("kubernetes") is None:
            raise InputError(
                "this is a pod of an indexed job of Kubernetes, and the package by which JAX finds "
                f"its other pods is missing: pip install kubernetes; or {BY_HAND}"
            )
        problem = f"how many processes there are cannot be read as {cluster.__name__} does"
        with refusing(f"{problem} ({{kind}}: {{reason}}): mend its variables, or {BY_HAND}"):
            if cluster.is_env_present():  # Open MPI 5 asks mpi4py
                return cluster.get_process_count()
    return 1


def _join(environment: Mapping[str, str]) -> None:
    arguments = None if jax.distributed.is_initialized() else several_processes(environment)
    if arguments is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # JAX would take SIGTERM for itself, and a process that waits for another never obey it.
        jax.config.update("jax_enable_preemption_service", False)
        options: Any = arguments
        problem = (
            f"the processes cannot join ({{kind}}: {{reason}}): look at the port, or {BY_HAND}"
        )
        with refusing(problem), _waiting_for_others(options), peers.without_proxies():
            jax.distributed.initialize(
                **options,
                initialization_timeout=_JOIN + 60,  # JAX would end the process with a stack of C++
                heartbeat_timeout_seconds=_HEARTBEAT,
                shutdown_timeout_seconds=_SHUTDOWN,
            )
    if jax.distributed.is_initialized():
        peers.watch()


@contextlib.contextmanager
def _waiting_for_others(options: Mapping[str, Any]) -> Iterator[None]:
    """Says every 30 s who is waited for, and ends this process after _JOIN seconds."""
    has_joined, deadline = threading.Event(), time.monotonic() + _JOIN
    address = options.get("coordinator_address", "the address that the cluster gives")

    def wait() -> None:
        while not has_joined.wait(30.0):
            parent.say(f"waiting for the other processes, process 0 at {address}\n")
            if time.monotonic() > deadline:
                parent.say(f"error: they did not all come within {_JOIN} s\n")
                os._exit(peers.LOST)

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        has_joined.set()


def _keep_compilations(environment: Mapping[str, str], platform: str) -> None:
    """Keeps compiled programs on disk; not those of several CPU devices, unless told to.

    Read back, such a program forgets the order of its collectives (XLA of JAX 0.10.2): devices wait
    in different ones, for ever.
    """
    is_set = "JAX_ENABLE_COMPILATION_CACHE" in environment
    if platform == "cpu" and jax.device_count() > 1 and not is_set:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    try:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder(environment)))
    except InputError:  # a user without a home, as in a container: nothing is kept
        jax.config.update("jax_enable_compilation_cache", False)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in environment:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _CACHE_MIN_SECONDS)


def _on_signal(number: int, frame: object) -> None:
    now = time.monotonic()
    if number == _Stop.number and now - _Stop.since < parent.ECHO:
        return
    if _Stop.number is not None and number == signal.SIGINT:
        if limits.in_session():  # where it is lost, the user asks again
            raise KeyboardInterrupt("ended at once; what was saved before is kept")
        parent.say("\nended at once; what was saved before is kept\n")  # allowed in a handler
        os._exit(128 + number)
    if number == signal.SIGHUP:
        _leave_closed_terminal()
    _Stop.number, _Stop.since = number, now
    announce_stop()


def announce_stop() -> None:
    """Says that a stop signal has come, once: the first of two that hear it does.

    A handler runs when the main thread comes back to Python, and from a hung call it never does.
    """
    with contextlib.suppress(IndexError, OSError):  # said already; stderr is closed
        os.write(2, _Stop.notice.pop())


def _leave_closed_terminal() -> None:
    """Sends output to nowhere if its terminal is closed: writing to it would end the run."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            parent.discard_output(descriptor)
