"""The end of one process is the end of all, soon, with the reason of the first."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import jax
import pytest
from processes import come_to, starting, together

from jaxgrpo.training.processes import peers
from jaxgrpo.training.processes import process as runtime

pytestmark = pytest.mark.fault(15)

LIMIT = 30.0
"""Seconds until all have to be gone."""

# Collectives until something happens; `alone` computes and waits for nobody.
RUN = """
import sys, time
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
from jaxgrpo.training.processes import process as runtime

def reward():
    raise ValueError("no grader")

def command():
    runtime.start("cpu")
    print("ready", flush=True)
    for step in range(1, 100_000):
        if "alone" not in sys.argv:
            multihost_utils.process_allgather(jnp.float32(step))
        if "fail" in sys.argv and step == 5:
            reward()
        if "leave" in sys.argv and step == 5:
            return 0
        if step == 3:
            print("steps", flush=True)
        time.sleep(0.05)

if "bare" in sys.argv:
    command()
sys.exit(runtime.guard(command))
"""


@pytest.fixture
def begin(environment, fork_server):
    with starting(RUN, environment, fork_server) as begin:
        yield begin


def pair(begin, place: int, *special: str, usual: tuple[str, ...] = ()) -> list[subprocess.Popen]:
    """Two processes of one run; the process at `place` gets other arguments."""
    return [
        begin(*(special if index == place else usual), **variables)
        for index, variables in enumerate(together())
    ]


def ends(processes) -> list[tuple[int, str]]:
    """Exit code and stderr of each, all within LIMIT from now."""
    over = time.monotonic() + LIMIT
    endings = []
    for process in processes:
        _, errors = process.communicate(timeout=max(0.1, over - time.monotonic()))
        endings.append((process.returncode, errors))
    return endings


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", ["guarded", "bare"])
def test_a_traceback_is_printed_by_all_and_all_have_its_exit_code(begin, failing, how):
    processes = pair(begin, failing, "fail", how, usual=(how,))
    endings = ends(processes)
    for code, errors in endings:
        assert code == 1, errors
        assert errors.count("ValueError: no grader") == 1
        assert "in reward" in errors
    assert f"process {failing} failed (exit code 1):\nTraceback" in endings[1 - failing][1]
    assert "failed (exit" not in endings[failing][1]


@pytest.mark.parametrize(
    ("error", "may_be"),
    [
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: Connection reset by peer"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (ValueError("no grader"), False),
        (ValueError("the answer is UNKNOWN: 3"), False),
        (OSError("UNKNOWN: a file"), False),
    ],
)
def test_what_a_broken_collective_raises_may_come_of_the_loss_of_another(error, may_be):
    wrapped = RuntimeError("in a step")
    wrapped.__cause__ = error
    assert peers._may_be_effect(error) == peers._may_be_effect(wrapped) == may_be


@pytest.mark.slow
@pytest.mark.parametrize("work", ["together", "alone"])
def test_a_killed_process_is_named_at_once(begin, work):
    first, second = pair(begin, 1, work, usual=(work,))
    for process in (first, second):
        come_to(process, "steps")
    began = time.monotonic()
    second.kill()
    (code, errors), _ = ends([first, second])
    assert time.monotonic() - began < 10
    assert code == peers.LOST, errors
    reason = "process 1 is gone: it was killed, or its machine is down; this process ends with it"
    assert reason in errors
    # A collective breaks as well, and what it raises comes after the reason.
    assert "Traceback" not in errors.partition(reason)[0]


@pytest.mark.slow
def test_without_process_0_the_others_end_and_say_so(begin):
    first, second = pair(begin, 0, "alone", usual=("alone",))
    for process in (first, second):
        come_to(process, "steps")
    first.kill()
    code, errors = ends([second])[0]
    assert code != 0
    assert "process 0 is gone" in errors


@pytest.mark.full
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_is_named_and_ends_when_it_goes_on(begin, frozen):
    processes = pair(begin, frozen)
    for process in processes:
        come_to(process, "steps")
    processes[frozen].send_signal(signal.SIGSTOP)
    [(code, errors)] = ends([processes[1 - frozen]])
    assert code == peers.LOST, errors
    assert errors.startswith(f"process {frozen} has not been heard of for 15 s (run.peer_timeout)")
    assert "Check failure stack trace" not in errors
    processes[frozen].send_signal(signal.SIGCONT)
    assert ends([processes[frozen]])[0][0] != 0


@pytest.mark.full
@pytest.mark.slow
def test_a_process_that_ends_in_order_is_not_missed(begin):
    first, second = pair(begin, 1, "alone", "leave", usual=("alone", "leave"))
    assert [code for code, _ in ends([first, second])] == [0, 0]


@pytest.mark.slow
def test_one_that_dies_while_others_start_is_named(begin):
    first, second = pair(begin, 1)
    come_to(second, "ready")
    second.kill()
    (code, errors), _ = ends([first, second])
    assert code != 0
    assert "process 1 is gone" in errors


def test_a_failure_is_told_with_its_process_and_a_loss_without_an_exit_code():
    crash = peers.Failure(3, 1, "Traceback ...\nValueError: x\n")
    assert crash.describe() == "process 3 failed (exit code 1):\nTraceback ...\nValueError: x"
    lost = peers.Failure(2, peers.LOST, "process 2 is gone")
    assert lost.describe().startswith("process 2 is gone; this process ends with it")
    assert peers.LOST in runtime.EXIT_CODES


@pytest.mark.full
@pytest.mark.slow
def test_a_stranger_who_connects_is_no_process_of_the_run():
    listener = peers._listen("127.0.0.1")
    watch = peers.Peers(0, 2, "secret", listener, [])
    watch.timeout = 0.5
    address = listener.getsockname()
    for message in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"process": 1, "failed": [1, 1, "x"]}\n',
        b"[1]\n",
    ):
        with socket.create_connection(address, timeout=10) as stranger:
            stranger.sendall(message)
            while stranger.recv(1 << 16):  # signs of life, then the end
                pass
    with socket.create_connection(address, timeout=10):
        time.sleep(2.5)  # a silent one
    assert watch._first_failure is None


STRANGERS = """
import resource, socket, sys, time
from jaxgrpo.training.processes import peers

resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
peers.TOKEN_SECONDS = float(sys.argv[1])
listener = peers._listen("127.0.0.1")
pipes = [socket.socketpair() for _ in range(600)]  # so that new descriptors are above 1,024
watch = peers.Peers(0, 2, "secret", listener, [])
address, count = listener.getsockname(), int(sys.argv[2])
crowd = [socket.create_connection(address, timeout=10) for _ in range(count)]
long = socket.create_connection(listener.getsockname(), timeout=10)
long.sendall(b"x" * 5_000)
process = peers._Link(socket.create_connection(listener.getsockname(), timeout=10), 0)
process.send(process=1, token="secret")
time.sleep(2.5)
print(sum(link.number is None for link in watch._links), [one.number for one in watch._links][-1])
watch._links.append(None)
time.sleep(5)
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "crowd", "left"), [("10", 200, 65), ("1", 200, 0), ("10", 2_000, 65)]
)
def test_a_crowd_of_strangers_is_bounded_and_a_broken_watch_ends_the_process(seconds, crowd, left):
    run = subprocess.run(
        [sys.executable, "-c", STRANGERS, seconds, str(crowd)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout.split() == [str(left), "1"]
    assert run.returncode == 1
    assert "the watch of the processes failed" in run.stderr


def test_the_watch_listens_where_the_coordination_service_does():
    with peers._listen("10.0.0.2", "127.0.0.1:8476") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.getsockname()[1] != 8476


def test_alone_nothing_is_watched_and_a_failure_ends_nothing():
    peers.set_timeout(1.0)
    peers.leave()
    peers.fail(1, "not printed")
    assert peers._watch is None
