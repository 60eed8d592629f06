"""Replays of runs with an environment that asks for columns of the data."""

from __future__ import annotations

import json

import pytest
import small_run

from jaxgrpo.training import loop

pytestmark = pytest.mark.slow
CODE = """
class Secret:
    def reset(self, secret: int, **row):
        self.secret = secret

    def get_reward(self):
        return float(self.secret)


class Other(Secret):
    pass
"""


@pytest.mark.full
@pytest.mark.parametrize("several", [False, True], ids=["a class", "two"])
def test_a_replay_needs_none_of_the_columns_that_the_environment_reads(tmp_path, several):
    code, data = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    code.write_text(CODE)
    rows = [
        {"prompt": f"1+{n}=", "answer": f"{n + 1}", "secret": n, "environment": "ab"[n % 2]}
        for n in range(9)
    ]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    classes = {"a": f"{code}:Secret", "b": f"{code}:Other"}
    changes = {
        "data": {"path": str(data)},
        "environment": classes if several else f"{code}:Secret",
        "run.rollouts_every": 1,
        "train.steps": 1,
    }
    run = loop.train(small_run.config(tmp_path / "run", **changes))
    (file,) = (run.path / "rollouts").iterdir()
    again = loop.train(small_run.config(tmp_path / "again", **changes), rollouts=file)
    assert again.summary["parameter_hash"] == run.summary["parameter_hash"]
