"""Odd surroundings of a run: names, closed files, few descriptors, rewards that change the process.

Each ends as the undisturbed run, bit for bit, or is refused in a line.
"""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import faulty_runs
import pytest
from processes import together

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.prompts import load_rows
from jaxgrpo.data.sources import Source
from jaxgrpo.training.records.folder import UNREADABLE, RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.fault(20)]

COMMAND = """
import os, resource, sys
sys.argv[0] = "jaxgrpo"
{before}
from jaxgrpo.cli.main import run
run()
"""
FULL = "os.dup2(os.open('/dev/full', os.O_WRONLY), {})"
SURVIVED = {
    "stdin is closed": "os.close(0)",
    "stdout is closed": "os.close(1)",
    "stderr is closed": "os.close(2)",
    "all three are closed": "os.close(0); os.close(1); os.close(2)",
    "no home": "del os.environ['HOME']",
    "an unknown time zone": "os.environ['TZ'] = 'Nowhere/Else'",
    "a clock that goes back": (
        "import itertools, time; real, back = time.time, itertools.count(); "
        "time.time = lambda: real() - 3600 * next(back)"
    ),
    "a clock before 1971": (
        "import time; real = time.time; now = real(); time.time = lambda: real() - now"
    ),
    "few descriptors": "resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))",
    "a full disk behind stdout": FULL.format(1),
    "a full disk behind stderr": FULL.format(2),
    "a full disk behind both": f"{FULL.format(1)}\n{FULL.format(2)}",
    "a file system without locks": (
        "import errno, fcntl\ndef flock(*_): raise OSError(errno.ENOSYS, 'not implemented')\n"
        "fcntl.flock = flock"
    ),
    "no folder for temporary files": "os.environ['TMPDIR'] = '/absent'",
    "a user without a name and a home": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nos.chmod('.', 0o777)\n"
        "for name in ('HOME', 'USER', 'LOGNAME', 'XDG_CACHE_HOME', 'JAX_COMPILATION_CACHE_DIR'):\n"
        "    os.environ.pop(name, None)\n"
        "if os.geteuid() == 0:\n"
        "    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS: files of root stay readable\n"
        "    os.setgid(54321)\n    os.setuid(54321)\n"
        "    header = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"
        "    assert libc.capset(header, (ctypes.c_uint32 * 6)(6, 6, 0, 0, 0, 0)) == 0"
    ),
    "a stack of 16 MiB": "resource.setrlimit(resource.RLIMIT_STACK, (1 << 24, 1 << 24))",
    "files for the user alone": "os.umask(0o077)",
    "an odd host": "os.environ.update(HOSTNAME='\\udcff', LANG='xx_YY', LC_ALL='xx_YY.nothing')",
}
"""What a command begins with, after which its run is as any other."""

NAMES = ("r [1]*?", "r %20#&;'\"", "-r", "r\\n\\", "~", "$HOME", "r:5", "r.jsonl")

HARM = """
np.seterr(all="raise")
warnings.simplefilter("error")
decimal.getcontext().prec = 2
for draw in (random.seed, np.random.seed):
    draw(step)
os.chdir("/")
os.umask(0o077)
socket.setdefaulttimeout(1e-6)
gc.disable()
os.environ.pop("HOME", None)
logging.disable()
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
np.set_printoptions(precision=1)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # JAX warns of forks
    if os.fork() == 0:
        os._exit(5)
print("x" * (1 << 22))
completions = list(completions)
columns.clear()
"""
LIBRARIES = (
    "import decimal, gc, logging, os, random, signal, socket, threading, time, warnings\n"
    "import numpy as np"
)


def finish(run: Any) -> str:
    """Its errors, once it has ended in order."""
    output, errors = run.communicate(timeout=faulty_runs.SECONDS)
    assert run.returncode == 0, (output[-1000:], errors[-3000:])
    assert faulty_runs.disorder(errors) == []
    return errors


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory, fork_server, environment) -> dict[str, Any]:
    """What a run of two steps comes to."""
    home = tmp_path_factory.mktemp("straight")
    run = fork_server.start("train", write(base, home), env=environment(), merged=False)
    finish(run)
    return faulty_runs.outcome(home / "r")


def write(base: Path, home: Path, harm: str = "", setup: str = "", **changes: Any) -> Path:
    return faulty_runs.write(base, home, harm, setup, **{"train.steps": 2, **changes})


PRINTS = r"""
from jaxgrpo.training.processes import parent
parent.print_any_text()
print("\u2026 caf\u00e9 \udcff")
"""


@pytest.mark.parametrize("encoding", ["ascii:strict", "latin-1", "utf-8"])
def test_what_an_encoding_does_not_have_is_printed_in_escapes(encoding, environment):
    """In a process that begins with it, as none from the server does."""
    variables = environment(PYTHONIOENCODING=encoding)
    run = subprocess.run([sys.executable, "-c", PRINTS], env=variables, capture_output=True)
    name = encoding.partition(":")[0]
    assert run.stdout.decode(name) == (
        "\u2026 caf\u00e9 \udcff\n".encode(name, "backslashreplace").decode(name)
    ), run.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", SURVIVED)
def test_a_run_ends_the_same_whatever_it_is_started_with(name, base, tmp_path, start, straight):
    program = COMMAND.format(before=SURVIVED[name])
    file = write(base, tmp_path)
    finish(start("train", file, program=program, folder=tmp_path, merged=False))
    assert faulty_runs.differences(straight, tmp_path / "r") == []


@pytest.mark.full
def test_a_run_goes_on_when_its_terminal_is_gone(base, tmp_path, start, straight):
    """Its window was closed, and SIGHUP is ignored, as under nohup."""
    terminal, other_end = pty.openpty()
    name = os.ttyname(other_end)
    before = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        f"end = os.open({name!r}, os.O_RDWR | os.O_NOCTTY)\n"
        "for number in (0, 1, 2): os.dup2(end, number)"
    )
    harm = "if step == 2 and not is_called_to_try:\n    time.sleep(1.5)"
    file = write(base, tmp_path, harm, "import time")
    run = start("train", file, program=COMMAND.format(before=before), folder=tmp_path)
    shown = b""
    while b"   1 reward" not in shown:
        shown += os.read(terminal, 1 << 16)
    for end in (terminal, other_end):
        os.close(end)
    assert run.wait(faulty_runs.SECONDS) == 0
    assert faulty_runs.differences(straight, tmp_path / "r") == []


@pytest.mark.full
@pytest.mark.fault(16)
@pytest.mark.parametrize("signals", [("SIGSTOP", "SIGCONT"), ("SIGTSTP", "SIGCONT")])
def test_a_run_that_was_stopped_for_longer_than_it_may_be_stuck_goes_on(
    signals, base, tmp_path, start, straight
):
    """By `kill -STOP` of the process that a shell knows, and by Ctrl-Z, which all of them get."""
    harm = (
        "if step == 2 and not is_called_to_try:\n    print('here', flush=True)\n"
        "    for _ in range(300): time.sleep(0.01)"
    )
    file = write(base, tmp_path, harm, "import time", **{"run.stuck_after": 4})
    run = start("train", file)
    assert any("here" in line for line in run.stdout)
    for number in (getattr(signal, name) for name in signals):
        if signals[0] == "SIGTSTP":
            os.killpg(run.pid, number)
        else:
            run.send_signal(number)
        time.sleep(8.0 if number != signal.SIGCONT else 0.0)
    finish(run)
    assert faulty_runs.differences(straight, tmp_path / "r") == []


JOINS = """
import jax
from jaxgrpo.training.processes import process
process.start("cpu")
print(jax.device_count())
"""


@pytest.mark.full
def test_processes_find_each_other_where_a_proxy_is_set(start):
    """gRPC would ask it, and it does not answer."""
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy")
    proxies = dict.fromkeys(names, "http://10.255.255.1:3128")
    runs = [
        start(program=JOINS, more={**proxies, **process}, merged=False) for process in together()
    ]
    for run in runs:
        output, _ = run.communicate(timeout=30.0)
        assert (run.returncode, output) == (0, "2\n")


@pytest.mark.full
def test_a_name_that_the_locale_cannot_write_is_refused_in_a_line(
    base, tmp_path, environment, python
):
    """Its encoding is that of the interpreter from its start on."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    file = write(base, tmp_path, **{"run.dir": str(tmp_path / "r\u00e9sum\u00e9")})
    command = [python, "-m", "jaxgrpo", "train", str(file)]
    run = subprocess.run(command, env=environment(**ascii_only), capture_output=True, timeout=100)
    errors = run.stderr.decode("ascii")
    assert (run.returncode, errors.count("\n")) == (2, 1), errors
    assert r"has no '\xe9': set LC_ALL=C.UTF-8" in errors


@pytest.mark.full
def test_a_run_continues_an_hour_before_it_began_and_where_its_link_points_now(
    base, tmp_path, start, straight
):
    """The clock was put back between two starts, and the folder was moved to another disk."""
    file = write(base, tmp_path, tracking={"tensorboard": True})
    (tmp_path / "first").mkdir()
    (tmp_path / "r").symlink_to("first")
    finish(start("train", file, "--set", "train.steps=1", merged=False))
    (tmp_path / "first").rename(tmp_path / "second")
    gone = start("train", file, "--resume", "auto", merged=False)
    _, errors = gone.communicate(timeout=faulty_runs.SECONDS)
    assert gone.returncode == 2
    assert f"is a link to {tmp_path / 'first'}, not there" in errors
    (tmp_path / "r").unlink()
    (tmp_path / "r").symlink_to("second")
    before = "import time; real = time.time; time.time = lambda: real() - 3600"
    program = COMMAND.format(before=before)
    finish(start("train", file, "--resume", "auto", program=program, merged=False))
    assert faulty_runs.differences(straight, tmp_path / "r") == []


def test_without_a_working_directory_a_command_is_refused_in_a_line(base, tmp_path, start):
    gone = "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    program = COMMAND.format(before=gone)
    run = start("train", write(base, tmp_path), program=program, folder=tmp_path, merged=False)
    _, errors = run.communicate(timeout=faulty_runs.SECONDS)
    assert (run.returncode, errors.count("\n")) == (2, 1), errors
    assert errors.startswith("error: the working directory was removed or moved: change to")


def test_closed_standard_files_do_not_become_files_of_the_run(tmp_path, start):
    program = COMMAND.partition("from jaxgrpo")[0].format(before="os.close(1); os.close(2)")
    program += """
from jaxgrpo.training.processes.parent import open_standard_files
open_standard_files()
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
    os.write(1, b"out"); os.write(2, b"err"); print("printed", flush=True)
"""
    run = start(tmp_path / "file", program=program)
    assert run.wait(30) == 0
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.full
def test_a_reward_that_changes_its_process_changes_nothing_of_the_run(
    base, tmp_path, start, straight
):
    finish(start("train", write(base, tmp_path, HARM, LIBRARIES), merged=False))
    assert faulty_runs.differences(straight, tmp_path / "r") == []


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_folders_and_files_may_have_odd_names(name, base, tmp_path, series, straight):
    """Of the run, the model and the file of rewards, which is saved and continued."""
    home = tmp_path / name
    home.mkdir()
    shutil.copytree(base, home / "model")
    run = (tmp_path if UNREADABLE & {*name} else home) / "r"
    file = write(base, home, **{"run.dir": str(run), "model.path": os.fspath(home / "model")})
    for words in (("--set", "train.steps=1"), ("--resume", "auto")):
        code, errors = series.run("train", file, *words, merged=False)
        assert code == 0, errors
        assert faulty_runs.disorder(errors) == []
    assert faulty_runs.differences(straight, run) == []


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_read_from_a_file_in_a_folder_of_an_odd_name(name, tmp_path):
    (tmp_path / name).mkdir()
    for file, content in {
        "rows.jsonl": '{"prompt": "a", "answer": "b"}\n' * 2,
        "rows.csv": "prompt,answer\na,b\na,b\n",
    }.items():
        (tmp_path / name / file).write_text(content)
        rows = load_rows(Source(str(tmp_path / name / file)), "prompt", "answer")
        assert [row["prompt"] for row in rows] == ["a", "a"]


@pytest.mark.parametrize("name", ["r [1]", "r\\n", "[/r"])
def test_a_run_is_not_begun_where_its_checkpoints_would_not_be_found_again(name, tmp_path):
    with pytest.raises(InputError, match=r"its path has .*: give a path without"):
        RunFolder(tmp_path / name)
    assert not any(tmp_path.iterdir())
