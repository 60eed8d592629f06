"""Wrong input of every kind ends a command with a message, soon, and with nothing written."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from pathlib import Path

import faulty_runs
import pytest
import wrong_inputs
from quick import every_third

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


def files(home: Path) -> dict[str, bytes]:
    """Path -> content, empty of what is no file."""
    paths = [path for path in home.rglob("*") if "__pycache__" not in str(path)]
    return {
        str(path.relative_to(home)): path.read_bytes() if path.is_file() else b"" for path in paths
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    every_third(wrong_inputs.WRONG),  # a third of them in `make test`
)
def test_it_is_refused_in_words_and_nothing_is_written(name, home, capfd, monkeypatch):
    wrong = wrong_inputs.WRONG[name]
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
    after = files(home)
    assert after.keys() - before <= {"r", "r/.lock", "r-replay", "r-replay/.lock"}
    assert {name for name in before if before[name] != after.get(name)} <= {"r/.lock"}


def test_there_are_300_entries_and_ten_of_every_kind():
    counts = Counter(wrong.kind for wrong in wrong_inputs.WRONG.values())
    expected = """config data columns template tokenizer weights adapter GGUF rollouts reward
        command mesh environment model checkpoint"""
    assert counts.keys() == {*expected.split()}
    assert min(counts.values()) >= 10, counts
    assert counts.total() >= 300
