"""Wrong input of every kind ends a command with a message, soon, and with nothing written."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from pathlib import Path

import bad_commands
import faulty_runs
import pytest

from jaxgrpo.cli.main import main

pytestmark = pytest.mark.fault(20)

SECONDS = 20.0
ROWS = '{"prompt": "1+1=", "answer": "2"}\n' * 4


@pytest.fixture
def home(base, tmp_path) -> Path:
    faulty_runs.write(base, tmp_path, **{"model.path": str(tmp_path / "base")})
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text(ROWS)
    return tmp_path


def files(home: Path) -> set[str]:
    return {
        str(path.relative_to(home)) for path in home.rglob("*") if "__pycache__" not in str(path)
    }


@pytest.mark.parametrize("name", bad_commands.WRONG)
def test_it_is_refused_in_words_and_nothing_is_written(name, home, capfd, monkeypatch):
    wrong = bad_commands.WRONG[name]
    for variable, value in wrong.environment:
        monkeypatch.setenv(variable, value)
    if wrong.change is not None:
        wrong.change(home)
    before, began = files(home), time.monotonic()
    code = main([argument.replace("{home}", str(home)) for argument in wrong.argv])
    seconds = time.monotonic() - began
    output, errors = capfd.readouterr()
    assert code == 2, (output[-500:], errors[-500:])
    assert "Traceback" not in output + errors
    assert "error: " in errors, errors[:300]
    assert re.search(wrong.message, errors, re.DOTALL), errors[:600]
    assert "secret" not in errors
    assert len(errors) < 3_000
    assert seconds < SECONDS
    left = files(home) - before
    assert {name for name in left if not name.startswith(("r/.lock", "r"))} == set(), left
    assert not (home / "r" / "metrics.jsonl").exists()


def test_there_are_entries_of_every_kind():
    counts = Counter(wrong.kind for wrong in bad_commands.WRONG.values())
    expected = """config data columns template tokenizer weights adapter GGUF rollouts reward
        command mesh environment model"""
    assert counts.keys() == {*expected.split()}
    assert counts.total() > 180
