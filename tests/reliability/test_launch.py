"""`jaxgrpo launch`: several processes of a command on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import small_run

from jaxgrpo.cli import launch
from jaxgrpo.cli.commands import COMMANDS, JOIN, JOINING
from jaxgrpo.cli.launch import environments
from jaxgrpo.cli.main import main
from jaxgrpo.training.processes import peers
from jaxgrpo.training.processes.process import PROCESS_VARIABLES

JUDGES = '''
"""Rewards that hold their process up, or end it, in their second call but one of process 0 or 1."""

import os
import signal
import time


def _is(index):
    return os.environ.get("JAX_PROCESS_ID") == str(index)


def judge(completions, trainer_state, **columns):
    with open(os.environ["SEEN"] + os.environ.get("JAX_PROCESS_ID", "0"), "a") as file:
        file.write(f"{trainer_state.global_step}\\n")
    if trainer_state.global_step == 2 and _is(os.environ["AT"]):
        how = os.environ["HOW"]
        if how == "raise":
            raise ValueError("no grader")
        if how == "exit":
            os._exit(9)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(0.5)
    return [float(len(text) % 3) for text in completions]
'''


FORKED_LAUNCH = (Path(__file__).parents[1] / "support" / "forked_launch.py").read_text("utf-8")


def start(*arguments, environment, server=None, **more) -> Any:
    """Starts `launch`; by a server, all processes are forked from one that has imported JAX."""
    if server is not None:
        variables = environment(**more)
        program = FORKED_LAUNCH
        return server.start("launch", *arguments, env=variables, program=program, merged=False)
    return subprocess.Popen(
        [sys.executable, "-m", "jaxgrpo", "launch", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
    )


def test_each_process_is_told_who_it_is_and_gets_its_own_devices():
    variables = {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=8", "B": "2"}
    first, second = environments(variables, 2, 3)
    names = set(PROCESS_VARIABLES)
    assert names < first.keys()
    assert [e["JAX_PROCESS_ID"] for e in (first, second)] == ["0", "1"]
    assert [e["JAX_LOCAL_DEVICE_IDS"] for e in (first, second)] == ["0,1,2", "3,4,5"]
    assert first["JAX_COORDINATOR_ADDRESS"] == second["JAX_COORDINATOR_ADDRESS"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", first["JAX_COORDINATOR_ADDRESS"])
    assert first["XLA_FLAGS"].split() == ["--a=1", "--xla_force_host_platform_device_count=3"]
    assert first["B"] == "2"
    assert environments(variables, 1)[0]["XLA_FLAGS"] == variables["XLA_FLAGS"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "launch: give a command of jaxgrpo"),
        (["launch", "train", "x"], "launch: give a command of jaxgrpo"),
        (["trian", "x"], "launch: unknown command 'trian': did you mean 'train'?"),
        (["--processes", "0", "train", "x"], "launch --processes 0: expected 1 or more"),
        (["--devices-per-process", "0", "train"], "--devices-per-process 0: expected 1 or more"),
    ],
)
def test_what_cannot_be_launched_is_refused(argv, message, capsys):
    assert main(["launch", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_signal_that_comes_before_a_process_is_there_reaches_it(environment):
    """It would run to its end, and the scheduler that asked for it would kill it."""

    class EarlyStopped(launch._Job):
        def _start(self, index, environment):
            signal.raise_signal(signal.SIGTERM)
            super()._start(index, environment)

    job = EarlyStopped(["report", "absent"], environments(environment(), 1))  # alone: exit code 2
    assert job.run() == 128 + signal.SIGTERM


@pytest.mark.full
def test_the_launcher_loads_no_jax(environment):
    program = (
        "import sys; from jaxgrpo.cli import launch;"
        "launch.main(['report', 'absent'], processes=1); assert 'jax' not in sys.modules"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "[0] ended with exit code 2" in run.stderr


def test_a_process_is_named_by_all_three_options_or_by_none(capsys, monkeypatch):
    for name in PROCESS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "quickstart", "--process-id", "0"]) == 2
    assert (
        "--process-id without --coordinator, --num-processes: give all" in capsys.readouterr().err
    )
    options = ["--coordinator", "a:1", "--num-processes", "2", "--process-id", "7"]
    assert main(["eval", "absent", *options]) == 2
    assert [os.environ[variable] for variable, *_ in JOIN.values()] == ["a:1", "2", "7"]
    assert set(JOINING) < COMMANDS.keys()
    for name in PROCESS_VARIABLES:  # monkeypatch knows only what it has set
        del os.environ[name]


UNREAD = """
import os
from jaxgrpo.cli import launch
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
for line in ("[1] ended with exit code 143", "[0] ended with exit code 141"):
    launch._say(line)
print("the others may end")
"""


def test_a_launcher_whose_output_is_read_no_more_kills_no_process_for_it(environment):
    """As behind `2>&1 | head`: a process may still save its step."""
    run = subprocess.run(
        [sys.executable, "-c", UNREAD], env=environment(), capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, "the others may end\n")


@pytest.mark.full
@pytest.mark.slow
def test_output_of_process_0_is_shown_as_it_is_and_of_others_where_they_fail(environment):
    run = start("doctor", environment=environment)
    output, errors = run.communicate(timeout=100)
    assert run.returncode == 0, errors
    assert output.count("devices: 2 cpu devices (cpu) in 2 processes") == 1
    assert "[1]" not in errors
    run = start("--devices-per-process", "2", "report", "absent", environment=environment)
    output, errors = run.communicate(timeout=100)
    assert run.returncode == 2
    ends = re.findall(r"^\[1\] .*absent.*$", errors, re.MULTILINE)
    assert len(ends) == 1
    assert len(re.findall(r"^error: .*absent.*$", errors, re.MULTILINE)) == 1


@pytest.fixture
def config(tmp_path) -> Path:
    judges = tmp_path / "judges.py"
    judges.write_text(JUDGES)
    changes = {
        "train.steps": 4,
        "checkpoint.every": 1,
        "rewards": [{"use": f"{judges}:judge"}],
    }
    return small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)


def wait_for(condition, seconds: float = 300.0) -> None:
    over = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < over
        time.sleep(0.05)


@pytest.mark.fault(14)
@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_stop_signal_is_passed_on_once_and_the_run_is_saved(
    config, tmp_path, environment, fork_server, number
):
    more = {"SEEN": str(tmp_path / "seen"), "AT": "-1", "HOW": "SIGKILL"}
    command = ("train", config, "--set", "train.steps=500")
    run = start(*command, environment=environment, server=fork_server, **more)
    wait_for((tmp_path / "r" / "metrics.jsonl").exists)
    run.send_signal(number)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + number
    assert "stopped after step" in errors
    assert "ended at once" not in errors


@pytest.mark.full
@pytest.mark.fault(15)
def test_processes_end_with_a_launcher_that_is_killed(config, tmp_path, environment):
    more = {"SEEN": str(tmp_path / "seen"), "AT": "-1", "HOW": "SIGKILL"}
    run = start(*("train", config, "--set", "train.steps=500"), environment=environment, **more)
    wait_for((tmp_path / "r" / "metrics.jsonl").exists)
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) == 4  # two commands, each in a child of the process that a shell knows
    run.kill()
    run.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, environment, fork_server) -> list[dict]:
    """The metrics of the run that no process of is harmed."""
    home = tmp_path_factory.mktemp("undisturbed")
    (home / "judges.py").write_text(JUDGES)
    rewards = {"rewards": [{"use": f"{home}/judges.py:judge"}]}
    changes = {"train.steps": 4, "checkpoint.every": 1, **rewards}
    file = small_run.write(home / "run.toml", home / "r", **changes)
    more = {"SEEN": str(home / "seen"), "AT": "-1", "HOW": "raise"}
    run = start("train", file, environment=environment, server=fork_server, **more)
    _, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    return small_run.metrics(home / "r")


HARM = [("raise", 0), ("raise", 1), ("SIGKILL", 0), ("SIGKILL", 1), ("SIGSTOP", 0), ("SIGSTOP", 1)]


@pytest.mark.fault(15)
@pytest.mark.full
@pytest.mark.parametrize(("how", "at"), HARM)
def test_harm_to_one_process_ends_all_soon_with_the_reason_and_the_run_goes_on(
    config, tmp_path, environment, fork_server, how, at, undisturbed
):
    more = {"SEEN": str(tmp_path / "seen"), "AT": str(at), "HOW": how}
    run = start("train", config, environment=environment, server=fork_server, **more)
    children = []

    def harmed() -> bool:
        running = psutil.Process(run.pid).children()
        children[:] = max(children, running, key=len)  # the harmed one may be gone already
        marker = tmp_path / f"seen{at}"
        return marker.exists() and "2" in marker.read_text().split()

    wait_for(harmed)
    began = time.monotonic()
    _, errors = run.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert len(children) == 2
    assert not [child for child in children if child.is_running()]
    code, *reasons = {
        "raise": (3, "raised ValueError on completion 0: no grader", ":judge, line ", "process"),
        "SIGKILL": (137, f"[{at}] ended by SIGKILL"),
        "SIGSTOP": (6, f"process {at} has not been heard of for 15 s"),
    }[how]
    assert run.returncode == code, errors
    for reason in reasons:
        assert reason in errors
    if how == "raise":
        assert errors.count(": no grader") >= 2  # of process 0, and of 1 with [1]
    more["AT"] = "-1"
    command = ("train", config, "--resume", "auto")
    run = start(*command, environment=environment, server=fork_server, **more)
    _, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    assert small_run.metrics(tmp_path / "r") == undisturbed


@pytest.mark.parametrize("codes", [[6, 9], [9, 6], [6, -9]])
def test_a_process_that_follows_another_does_not_hide_its_exit_code(codes):
    """Both have ended before the launcher looks: the one that follows may come first."""
    job = launch._Job(["train"], [{}, {}])
    for code in codes:
        body = f"os.kill(os.getpid(), {-code})" if code < 0 else f"os._exit({code})"
        command = [sys.executable, "-c", f"import os; {body}"]
        job.children.append(subprocess.Popen(command))
        job.outputs.append(None)
    for child in job.children:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    job._look()
    assert job.ended_processes == {0, 1}
    assert job.first == (137 if -9 in codes else 9)
    assert launch.LOST == peers.LOST
