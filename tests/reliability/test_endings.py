"""However a run ends, it says so in a few lines, without a traceback."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import jax
import pytest
import small_run
from faulty_runs import limit_files, wait_until
from quick import full_but

from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.training import loop
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.processes import process

pytestmark = pytest.mark.fault(17)


def fill() -> None:
    """From now on files of more bytes than the texts of a run have fail, as on a full disk."""
    limit_files(40_000)


def raise_(error: BaseException) -> None:
    raise error


def ask(number: int) -> None:
    os.kill(os.getpid(), number)


ENDINGS = {
    "SIGTERM": (lambda run: ask(signal.SIGTERM), 143, "saved in"),
    "SIGINT": (lambda run: ask(signal.SIGINT), 130, "saved in"),
    "full disk": (lambda run: fill(), 74, "could not be saved"),
    "raises": (lambda run: 1 / 0, 3, "raised ZeroDivisionError on completion 0: division by zero"),
    "huge text": (lambda run: raise_(ValueError("x" * 50_000_000)), 3, "characters left out"),
    "many lines": (lambda run: raise_(ValueError("x\n" * 100_000)), 3, "lines left out"),
    "sys.exit": (lambda run: sys.exit(0), 3, "raised SystemExit on completion 0: 0"),
    "run deleted": (lambda run: shutil.rmtree(run), 74, "is not the folder that this run began"),
    "too large": (lambda run: [1e30], 3, "1e+30"),
}
SOON = {"raises"}
"""Run by `make test` too, not only by `make test-reliability`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    full_but(SOON, ENDINGS),
)
def test_a_run_that_ends_early_says_why_in_a_few_lines(name, tmp_path, capfd, space):
    harm, code, reason = ENDINGS[name]
    run = tmp_path / "r"
    saved = run / "checkpoints" / "2"

    def reward(completions, trainer_state, **columns):
        values = [float(len(text)) for text in completions]
        if trainer_state.global_step >= 2 and len(completions) > 2:
            if trainer_state.global_step == 2:  # it is saved while the next is sampled
                wait_until(lambda: saved.exists() or not run.exists())  # as in a second part
            values[:1] = harm(tmp_path / "r") or values[:1]
        return values

    changes = {"checkpoint.every": 1, "checkpoint.keep": 20, "train.steps": 12}
    config = small_run.config(tmp_path / "r", **changes)

    def command():
        loop.train(config, rewards=[reward])

    assert process.guard(command) == code
    errors = capfd.readouterr().err
    assert reason in errors
    refuse_long(errors)
    if name != "run deleted":
        with Checkpoints(tmp_path / "r" / "checkpoints") as checkpoints:
            assert 2 in checkpoints.steps()


def refuse_long(errors: str) -> None:
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert len(errors.splitlines()) <= 50, errors
    assert len(errors) < 20_000


def test_saves_that_fail_leave_no_tracebacks_of_threads_behind(tmp_path, capfd, space):
    arrays = {
        str(number): jax.random.normal(jax.random.key(number), (500, 200)) for number in range(4)
    }
    with Checkpoints(tmp_path) as checkpoints:
        fill()
        for step in range(1, 6):
            with pytest.raises(OSError, match="could not be saved"):
                _save(checkpoints, step, arrays)
    refuse_long(capfd.readouterr().err)


def _save(checkpoints: Checkpoints, step: int, arrays: dict[str, jax.Array]) -> None:
    checkpoints.save(step, arrays, {})
    checkpoints.wait()


REWARD = """
import os, signal, time

def reward(completions, trainer_state, **columns):
    if trainer_state.global_step >= 2 and len(completions) > 2:
        {harm}
    return [float(len(text)) for text in completions]
"""

OF_A_PROCESS = {
    "parent": ("os.kill(os.getppid(), signal.SIGHUP); time.sleep(1)", 129, "saved in"),
    "too long": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)", 143, "run.stop_grace"),
    "closes files": ("os.closerange(3, 1000); time.sleep(5)", 1, "may have closed its files"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OF_A_PROCESS)
def test_a_process_that_ends_early_says_why_in_a_few_lines(name, tmp_path, start):
    harm, code, reason = OF_A_PROCESS[name]
    (tmp_path / "mine.py").write_text(REWARD.format(harm=harm))
    changes = {
        "rewards": [{"use": f"{tmp_path}/mine.py:reward"}],
        "checkpoint.every": 1,
        "run.stop_grace": 5.0,
        "train.steps": 12,
    }
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)
    run = start("train", file, merged=False)
    _, errors = run.communicate(timeout=100)
    assert run.returncode == code, errors
    assert reason in errors
    refuse_long(errors)


@pytest.mark.full
@pytest.mark.slow
def test_a_step_in_which_a_reward_logs_a_number_of_the_trainer_is_saved(tmp_path):
    """This run saves its last step alone, and the names of an update are known behind it."""

    def reward(completions, trainer_state, log_metric, **columns):
        if trainer_state.global_step == 2 and len(completions) > 2:
            log_metric("grad_norm", 1.0)
        return [float(len(text)) for text in completions]

    config = small_run.config(tmp_path / "r", **{"train.steps": 4, "checkpoint.every": 50})
    message = r"(?s)log_metric\('grad_norm', ...\), the name of a .*in step 3; .*holds step 3;"
    with pytest.raises(process.RewardFailed, match=message):
        loop.train(config, rewards=[reward])
    lines = small_run.metrics(tmp_path / "r")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert loop.train(config, rewards=[reward], resume="auto").summary["step"] == 4


@pytest.mark.full
def test_a_stop_signal_in_the_last_step_completes_the_run_and_ends_the_call(tmp_path):
    """And not a command, which takes no further run."""
    config = small_run.config(tmp_path / "r", **{"train.steps": 1})
    message = f"stopped by request; the run in {tmp_path}/r is complete, and its model is "
    with pytest.raises(process.StopRequested, match=message) as stopped:
        loop.train(config, on_step=lambda *_: ask(signal.SIGTERM))
    assert stopped.value.run.summary["step"] == 1
    assert (tmp_path / "r" / "model" / "config.json").exists()
    assert loop.train(config, resume="auto").summary["step"] == 1
    (tmp_path / "mine.py").write_text(REWARD.format(harm="os.kill(os.getpid(), signal.SIGTERM)"))
    rewards = {"rewards": [{"use": f"{tmp_path}/mine.py:reward"}]}
    file = small_run.write(tmp_path / "a.toml", tmp_path / "a", **rewards)
    assert main(["train", str(file)]) == 0
    assert (tmp_path / "a" / "model" / "config.json").exists()
    assert process._Stop.number == signal.SIGTERM


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
    ("key", "name"),
    [*((key, "exits") for key in KEYS), ("rewards", "broken"), ("rewards", "raises")],
)
def test_a_file_of_own_code_that_cannot_be_loaded_is_one_message(key, name, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FILES[name])
    use = f"{tmp_path}/mine.py:f"
    changes = {key: KEYS[key](use), "eval.data": "task:arithmetic:test"}
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)
    assert main(["train", str(file)]) == 2
    errors = capsys.readouterr().err
    assert f"{use}' cannot be loaded ({tmp_path}/mine.py" in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "problem"),
    [("", "/base' is no folder: "), ("tokenizer.json", ": tokenizer.json changed since the run b")],
)
def test_a_base_that_goes_away_under_a_run_costs_no_step(name, problem, tmp_path):
    """As where somebody cleans the cache of a hub. The model is written with files of the base."""
    base, aside = tmp_path / "base", tmp_path / "aside"
    shutil.copytree(small_run.base(), base)
    config = small_run.config(tmp_path / "r", **{"model.path": str(base), "train.steps": 1})
    message = rf"r/model could not be written: .*{problem}.*; all steps are saved: go on by --resum"
    with pytest.raises(InputError, match=message):
        loop.train(config, on_step=lambda *_: (base / name).rename(aside))
    with Checkpoints(tmp_path / "r" / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 1
    assert not (tmp_path / "r" / "model").exists()
    aside.rename(base / name)
    assert loop.train(config, resume="auto").summary["step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [KeyError("pruned"), pytest.param(SystemExit("pruned"), marks=pytest.mark.full)]
)
def test_a_step_after_which_the_function_of_the_user_raises_is_saved(error, tmp_path):
    """This run saves its last step alone."""
    changes = {"train.steps": 3, "checkpoint.every": 50}
    config, undisturbed = (small_run.config(tmp_path / name, **changes) for name in "rw")

    def raise_after_two(number, _):
        if number == 2:
            raise error

    with pytest.raises(type(error), match="pruned") as raised:
        loop.train(config, on_step=raise_after_two)
    start = f"on_step raised after step 2; {tmp_path / 'r'} holds step 2; go on: jaxgrpo train "
    assert raised.value.__notes__[0].startswith(start)
    assert loop.train(config, resume="auto").summary["step"] == 3
    loop.train(undisturbed)
    assert small_run.metrics(tmp_path / "r") == small_run.metrics(tmp_path / "w")
