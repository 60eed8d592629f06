"""--json: one document on stdout in place of the tables, and nothing else there."""

from __future__ import annotations

import json
import subprocess
import types

import numpy as np
import pytest

from jaxgrpo.cli import start
from jaxgrpo.cli.commands import COMMANDS, JSON
from jaxgrpo.cli.main import main
from jaxgrpo.training import loop
from jaxgrpo.training.records.console import Document

WITH_TABLES = {
    *("quickstart", "plan", "probe", "eval", "model", "import", "report", "samples", "diff"),
    *("fit", "methods", "rescore"),
    *("compare", "plasticity", "advantages", "losses", "doctor"),
}

NOISY = """
import subprocess

print("read", flush=True)
subprocess.run(["echo", "from a process"])


def noisy(signal, rollouts):
    print("called")
    return signal
"""


def test_every_command_that_prints_a_table_takes_the_switch():
    assert {name for name, (_, _, *arguments) in COMMANDS.items() if JSON in arguments} == (
        WITH_TABLES
    )
    flags, options = JSON
    assert (flags, options["action"]) == (["--json"], "store_true")


def test_numbers_are_numbers_and_what_is_not_finite_is_null():
    value = {"a": np.float32(0.5), "b": np.array([1.0, np.nan]), 3: (np.inf, True, None, "é\x1b")}
    text = Document(value).text()
    assert json.loads(text) == {"a": 0.5, "b": [1.0, None], "3": [None, True, None, "é\x1b"]}
    assert text.isascii()
    assert "\x1b" not in text
    assert text.endswith("}\n")


@pytest.mark.full
@pytest.mark.slow
def test_what_own_code_and_its_processes_print_goes_to_stderr(
    python, environment, repository, tmp_path
):
    (tmp_path / "mine.py").write_text(NOISY)
    words = ["advantages", "mine.py:noisy", "--rewards", "1,0"]
    command = [python, "-m", "jaxgrpo", *words]
    process, table = (
        subprocess.run(
            [*command, *more], cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
        for more in (["--json"], [])
    )
    assert process.returncode == table.returncode == 0, process.stderr
    assert json.loads(process.stdout)["alive"] == [[True, False]]
    for line in ("read", "from a process", "called"):
        assert line in process.stderr.splitlines()
        assert line in table.stdout.splitlines()


@pytest.mark.full
@pytest.mark.slow
def test_a_document_comes_where_stderr_is_closed_and_none_where_stdout_is(
    python, environment, tmp_path
):
    for closed, is_given in (("2>&-", True), (">&-", False)):
        process = subprocess.run(
            f"{python} -m jaxgrpo losses token_mean --json {closed}",
            shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        assert bool(process.stdout) == is_given
        assert not is_given or json.loads(process.stdout)["name"] == "token_mean"


def test_a_mistake_is_a_message_and_no_document(capsys):
    assert main(["advantages", "grop", "--json"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "did you mean 'grpo'" in streams.err


def test_a_file_name_after_the_switch_is_refused(capsys):
    assert main(["eval", "runs/first", "--json", "out.json"]) == 2
    assert "unrecognized arguments: out.json" in capsys.readouterr().err


def test_the_quickstart_gives_the_summary_of_its_run(monkeypatch, capsys):
    def train(config, resume):
        print("  16 reward  0.531 live  50%")
        return types.SimpleNamespace(summary={"base": {"accuracy": 0.25}, "model": "m"})

    monkeypatch.setattr(start, "make_small_base", lambda console, *_, **__: console.print("base"))
    monkeypatch.setattr(loop, "train", train)
    assert main(["quickstart", "--json", "--set", "model.path=none"]) == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out) == {"base": {"accuracy": 0.25}, "model": "m"}
    assert streams.err == "base\n  16 reward  0.531 live  50%\n"


@pytest.mark.parametrize("name", ["train", "sample", "export", "init"])
def test_a_command_without_a_table_has_no_such_switch(name, capsys):
    assert main([name, "--help"]) == 0
    assert "--json" not in capsys.readouterr().out
