"""The server that forks the commands of tests: it kills what it is asked to kill, and no other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import ForkServer

LAST_NUMBER = Path("/proc/sys/kernel/ns_last_pid")
SLEEP = "import time; print('ready', flush=True); time.sleep(600)"


def start_as(number: int) -> subprocess.Popen[bytes] | None:
    """A process, the first of a group, with a number of our choice; None where it cannot be had."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    for _ in range(200):
        LAST_NUMBER.write_text(str(number - 1))
        process = subprocess.Popen(command, process_group=0)
        if process.pid == number:
            return process
        process.kill()
        process.wait()
    return None


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access(LAST_NUMBER, os.W_OK), reason="the number of a process is root's to choose"
)
def test_an_ended_command_whose_number_is_used_again_is_not_killed(start):
    command = start(program="pass")
    assert command.wait(30) == 0
    stranger = start_as(command.pid)
    if stranger is None:
        pytest.skip(f"the number {command.pid} is another's")
    with stranger:
        command.kill_group()
        command.kill()
        command.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert stranger.poll() is None
        os.killpg(command.pid, signal.SIGKILL)  # what the number alone would have come to
        assert stranger.wait(10) == -signal.SIGKILL


@pytest.mark.slow
def test_a_command_is_killed_with_its_group_and_signals_reach_it(start):
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"
    command = start(program=program)
    assert command.stdout.readline() == "ready\n"
    command.kill_group()
    assert command.returncode == -signal.SIGKILL
    assert command.stdout.read() == ""  # its child holds the pipe no more
    command = start(program=SLEEP)
    assert command.stdout.readline() == "ready\n"
    command.send_signal(signal.SIGTERM)
    assert command.wait(10) == -signal.SIGTERM
    command.kill_group()
    assert start(program="raise SystemExit(7)").wait(10) == 7


@pytest.mark.slow
def test_a_command_ends_with_its_client_and_nonsense_ends_nothing(
    start, fork_server, environment, tmp_path
):
    marker = tmp_path / "alive"
    program = (
        "import os, sys, time; from pathlib import Path\n"
        "while True: Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(0.02)"
    )
    request = {"arguments": [str(marker)], "environment": environment(), "folder": str(tmp_path)}
    for content in (b"", b"no json", json.dumps({**request, "program": program}).encode()):
        with socket.socket(socket.AF_UNIX) as client, open(os.devnull, "w") as output:
            client.connect(fork_server._path)
            if content:
                socket.send_fds(client, [content], [output.fileno()])
            if content.startswith(b"{"):
                over = time.monotonic() + 30
                while not marker.exists():
                    assert time.monotonic() < over
                    time.sleep(0.01)
    time.sleep(0.2)
    marker.unlink(missing_ok=True)
    time.sleep(0.2)
    assert not marker.exists()
    assert start(program="print('still there')").communicate(30)[0] == "still there\n"


@pytest.mark.full
def test_a_server_that_is_gone_is_named_and_is_no_exit_code_of_its_command(environment):
    with ForkServer(environment()) as server:
        command = server.start(env=environment(), program=SLEEP)
        assert command.stdout.readline() == "ready\n"
        server._process.kill()
        with pytest.raises(ChildProcessError, match="has ended with exit code -9; it wrote: nothi"):
            command.wait(10)
