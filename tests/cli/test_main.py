"""The commands, in this process but where a process is what is tested."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import subprocess
import sys

import pytest
import quickstarts

import jaxgrpo
from jaxgrpo.cli import make_base
from jaxgrpo.cli.commands import COMMANDS
from jaxgrpo.cli.main import _parser, main
from jaxgrpo.training.processes.process import EXIT_CODES


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model that has learned next to nothing."""
    path = tmp_path_factory.mktemp("base") / "model"
    assert main(["make-base", "arithmetic", str(path), "--steps", "1", "--hidden-size", "32"]) == 0
    return path


def test_a_misspelt_key_names_the_nearest_without_a_traceback(capsys):
    assert main(["train", "quickstart", "--set", "train.stepz=3"]) == 2
    errors = capsys.readouterr().err
    assert "train.stepz: unknown key; did you mean train.steps?" in errors
    assert "Traceback" not in errors


def test_two_wrong_keys_come_in_one_message(capsys):
    assert main(["train", "quickstart", "--set", "train.stepz=3", "rollout.temprature=1"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("did you mean") == 2
    assert errors.splitlines()[0].endswith("quickstart.toml: 2 problems")


def test_set_may_be_given_again(capsys):
    assert main(["train", "quickstart", "--set", "a.b=1", "--set", "c.d=1"]) == 2
    assert "2 problems" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["trian"], "error: unknown command 'trian': did you mean 'train'? Known: advantages, "),
        (["eval", "m", "--samples", "e.jsonl"], "to write answers to a file: --answers FILE"),
        (["probe", "m", "-n", "many"], "-n/--samples/--num-samples: invalid int value: 'many'\n"),
        (["train"], "required: CONFIG"),
        (["train", "--set", "a.b=1", "quickstart"], "--set takes all words up to the next opt"),
        (["rescore", "--rewards", "math", "r"], "required: RUN: --rewards takes all words up to"),
        (["train", "quickstart", "--resume", "never"], "invalid choice: 'never'"),
        (["train", "quickstart", "--resum-e", "auto"], "--resum-e auto: did you mean --resume? "),
        (["train", "--config", "run.toml"], "arguments: --config: a config stands by itself, as"),
        (["train", "--config=run.toml"], "required: CONFIG: a config stands by itself, as jaxgrp"),
        (["train", "quickstart", "--lr", "1e-4"], "--lr 1e-4: Keys of the config follow --set, "),
        (["train", "quickstart", "train.steps=3"], "train.steps=3: Keys of the config follow --s"),
        (["report", "r", "--txt"], "usage: jaxgrpo report "),
        (["report", "r", "--txt"], "unrecognized arguments: --txt: did you mean --text?\n"),
        (["train", "absent.toml"], "absent.toml: 1 problem\n  there is no such file"),
        (["train", "quickstrat"], "no shipped config: did you mean 'quickstart'"),
        (["quickstart", "--family", "lama"], "did you mean 'llama'"),
        (["quickstart", "--set", "eval.data=", "eval.every=0"], "and eval.data is unset: name it"),
        (["make-base", "arithmetics", "x"], "did you mean 'arithmetic'"),
        (["make-base", "arithmetic", "x", "--steps", "0"], "steps = 0: give 1 or more"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_says_why(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["advantages", "grpo", "--rewards", "-1,0", "-.5,-1"], "rewards", ["-1,0", "-.5,-1"]),
        (["losses", "clip", "--advantage", "-1,1"], "advantages", "-1,1"),
        (["serve", "m", "--temperature", "-1e-3"], "temperature", -1e-3),
    ],
)
def test_a_value_may_begin_with_a_minus_sign(words, name, value):
    assert vars(_parser().parse_args(words))[name] == value


@pytest.mark.parametrize(
    "words",
    [
        "sample m --prompts p.jsonl --out",
        "eval m --answers",
        "rescore r --rewards length --out",
        "diff a b --out",
        "probe m --html",
        "check grpo --figure",
        "check grpo --json",
    ],
)
def test_a_file_to_write_may_be_in_the_home_folder(words):
    options = vars(_parser().parse_args(f"{words}=~/written".split()))
    assert os.path.expanduser("~/written") in options.values()


def test_help_lists_the_commands_and_version_is_the_packages(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(command in listed for command in ("quickstart", "train", "make-base", "doctor"))
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxgrpo {jaxgrpo.__version__}\n"


def test_the_help_of_a_command_says_what_it_does(capsys):
    for name, (text, *_) in COMMANDS.items():
        assert main([name, "--help"]) == 0
        assert text in " ".join(capsys.readouterr().out.split()), name


def test_the_help_of_every_command_names_its_defaults():
    for name, (_, calls, *arguments) in COMMANDS.items():
        further = make_base.make_base if name == "make-base" else main  # what options are passed to
        functions = (further, pkgutil.resolve_name(calls))
        takes = {
            k: v
            for function in functions
            for k, v in inspect.signature(function).parameters.items()
        }
        for flags, options in arguments:
            default = takes[options.get("dest") or flags[-1].strip("-").replace("-", "_")].default
            if default not in (inspect.Parameter.empty, None, False, ()):
                assert f"{default} by default" in options["help"], (name, flags)


@pytest.mark.slow
def test_no_command_says_that_torch_is_missing(environment):
    program = (
        "import sys; sys.modules['torch'] = None;"  # as if it were not installed
        "from jaxgrpo.cli.main import main; main(['train', 'absent.toml']); import transformers"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True
    )
    assert run.returncode == 0
    assert run.stderr == "error: absent.toml: 1 problem\n  there is no such file\n"


def test_the_package_runs_as_a_module_and_answers_before_jax_is_loaded(environment):
    program = (
        "import sys; from jaxgrpo.cli.main import main;"
        "main(['--version']); assert 'jax' not in sys.modules"
    )
    for command in (["-m", "jaxgrpo", "--version"], ["-c", program]):
        run = subprocess.run(
            [sys.executable, *command],
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout == f"jaxgrpo {jaxgrpo.__version__}\n"


def test_python_m_jaxgrpo_is_called_jaxgrpo_in_its_usage(environment):
    for words, usage in {
        (): "usage: jaxgrpo [-h] [--version] COMMAND ...",
        ("eval",): "usage: jaxgrpo eval [-h] ",
    }.items():
        process = subprocess.run(
            [sys.executable, "-m", "jaxgrpo", *words],
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert process.returncode == 2
        assert process.stderr.startswith(usage)
        assert "__main__" not in process.stderr


def test_the_help_names_every_exit_code(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.partition("exit codes: ")[2]
    assert {int(number) for number in re.findall(r"\b\d+\b", listed)} == EXIT_CODES.keys()


PLUGIN = """
import os, sys
os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written\\n")
os.write(2, b"I0000 00:00 31 cudart_stub.cc:31] Could not find cuda drivers on your machine.\\n")
os.write(2, b"another line\\n")
raise ImportError
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "left"),
    [("doctor", ""), pytest.param("plan", "another line\n", marks=pytest.mark.full)],
)
def test_nothing_is_said_of_a_missing_cuda_driver(
    python, environment, repository, tmp_path, command, left
):
    (tmp_path / "jax_cuda12_plugin").mkdir()
    (tmp_path / "jax_cuda12_plugin" / "__init__.py").write_text(PLUGIN)
    words = [command, *(("quickstart",) if command == "plan" else ())]
    run = subprocess.run(
        [python, "-m", "jaxgrpo", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment(PYTHONPATH=f"{repository}:{tmp_path}"),
    )
    assert "Could not find cuda drivers" not in run.stderr
    assert "absl" not in run.stderr
    assert ("another line" in run.stderr) == bool(left)
    assert (run.returncode == 0) == (command == "doctor")


@pytest.mark.full
@pytest.mark.slow
def test_make_base_writes_an_ordinary_model_folder(base):
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(base))
    # Who may read one of them may read the weights.
    modes = {(base / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


@pytest.mark.slow
def test_a_quickstart_of_a_family_refuses_the_base_of_another(base, capsys):
    assert main(["quickstart", "--family", "llama", "--set", f"model.path={base}"]) == 2
    assert f"error: quickstart --family llama: {base} is a qwen3" in capsys.readouterr().err


def test_make_quickstarts_fails_and_names_what_learned_too_little(monkeypatch, capsys):
    def run(name, folder):
        if "llama" in trained:
            return {"base": {"accuracy": 0.45}, "trained": {"accuracy": trained[name]}}
        raise subprocess.CalledProcessError(5, name)

    monkeypatch.setattr(quickstarts, "run", run)
    trained = dict.fromkeys(quickstarts.VARIANTS, 0.85) | {"gemma3_text": 0.84}
    assert quickstarts.main() == 1
    *_, last, missed = capsys.readouterr().out.splitlines()
    assert last.startswith("lora         0.450 -> 0.850")
    assert missed == "gemma3_text: the trained model has 0.840, less than 0.85"
    trained["gemma3_text"] = 0.85
    assert quickstarts.main() == 0
    trained.clear()
    assert quickstarts.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "lora: exit code 5"


@pytest.mark.full
@pytest.mark.slow
def test_a_dry_run_shows_the_run_and_leaves_nothing_behind(base, tmp_path, capsys):
    run_dir = tmp_path / "run"
    keys = [f"model.path={base}", f"run.dir={run_dir}", "rollout.group_size=4"]
    assert main(["train", "quickstart", "--dry-run", "--set", *keys]) == 0
    shown = capsys.readouterr().out
    for word in ("group_size = 4", "parameters", "micro-batches", "first prompt", " tokens: '"):
        assert word in shown
    assert shown.index("grpo (sum_rewards, ") < shown.index("empty text") < shown.index("[rollout]")
    assert not run_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["--help", "advantages", pytest.param("model BASE", marks=pytest.mark.full)]
)
def test_a_command_whose_output_is_closed_ends_quietly(words, base):
    arguments = [str(base) if word == "BASE" else word for word in words.split()]
    piped = subprocess.Popen(
        [sys.executable, "-m", "jaxgrpo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": ""},
        text=True,
    )
    assert piped.stdout is not None
    piped.stdout.close()  # as `head` does once it has its lines
    assert piped.communicate()[1] == ""
    assert piped.returncode == 141


def test_a_pipe_that_breaks_elsewhere_is_a_crash_with_its_traceback(monkeypatch, capfd):
    def broken():
        raise BrokenPipeError("of a reward's process")

    monkeypatch.setattr("jaxgrpo.cli.doctor.main", broken)
    assert main(["doctor"]) == 1
    assert "BrokenPipeError: of a reward's process" in capfd.readouterr().err


def test_a_command_without_an_output_ends_well():
    process = subprocess.run(
        f"{sys.executable} -m jaxgrpo --version >&-", shell=True, capture_output=True, text=True
    )
    assert (process.returncode, "Traceback" in process.stderr) == (0, False)
