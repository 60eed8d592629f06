"""However a run ends, it says so in a few lines, without a traceback."""

from __future__ import annotations

import subprocess

import pytest
import small_run

from jaxgrpo.cli.main import main

REWARD = """
import os, resource, shutil, signal, sys, time
from pathlib import Path

RUN = Path(__file__).parent / "r"

def fill():
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))

def reward(completions, trainer_state, **columns):
    if trainer_state.global_step >= 2 and len(completions) > 2:
        {harm}
    return [float(len(text)) for text in completions]
"""

ENDINGS = {
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", 143, "saved in"),
    "SIGINT": ("os.kill(os.getpid(), signal.SIGINT)", 130, "saved in"),
    "parent": ("os.kill(os.getppid(), signal.SIGHUP); time.sleep(1)", 129, "saved in"),
    "too long": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)", 143, "run.stop_grace"),
    "full disk": ("fill()", 74, "could not be saved"),
    "raises": ("1 / 0", 3, "raised ZeroDivisionError on completion 0: division by zero"),
    "huge text": ("raise ValueError('x' * 50_000_000)", 3, "raised ValueError"),
    "many lines": ("raise ValueError('x\\\\n' * 100_000)", 3, "lines left out"),
    "sys.exit": ("sys.exit(0)", 3, "raised SystemExit on completion 0: 0"),
    "os._exit": ("os._exit(0)", 1, "ended with exit code 0 before its command was over"),
    "closes files": ("os.closerange(3, 1000)", 1, "may have closed its files"),
    "deletes the run": ("shutil.rmtree(RUN)", 74, "is not the folder that this run began in"),
    "too large": ("return [1e30] * len(completions)", 3, "beyond"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_that_ends_early_says_why_in_a_few_lines(name, tmp_path, python, environment):
    harm, code, reason = ENDINGS[name]
    (tmp_path / "mine.py").write_text(REWARD.format(harm=harm))
    changes = {
        "rewards": [{"use": f"{tmp_path}/mine.py:reward"}],
        "checkpoint.every": 1,
        "checkpoint.keep": 20,
        "run.stop_grace": 5.0,
        "train.steps": 12,
    }
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)
    command = [python, "-m", "jaxgrpo", "train", str(file)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    said = ended.stderr
    assert ended.returncode == code, said
    assert reason in said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 50, said
    assert len(said) < 20_000


FILES = {"exits": "import sys\nsys.exit(0)\n", "broken": "def f(:\n", "raises": "1 / 0\n"}
KEYS = {
    "rewards": lambda use: [{"use": use}],
    "advantage": lambda use: [{"use": use}],
    "loss.surrogate": lambda use: {"use": use},
    "rollout.prompts": lambda use: {"use": use},
    "model.family": lambda use: use,
    "eval.scorer": lambda use: use,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "name"), [*((key, "exits") for key in KEYS), ("rewards", "broken"), ("rewards", "raises")]
)
def test_a_file_of_own_code_that_cannot_be_loaded_is_one_message(key, name, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FILES[name])
    use = f"{tmp_path}/mine.py:f"
    changes = {key: KEYS[key](use), "eval.data": "task:arithmetic:test"}
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)
    assert main(["train", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"{use}' cannot be loaded ({tmp_path}/mine.py" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "r" / "metrics.jsonl").exists()
