"""Several processes judge a batch together: each gets everything, and none waits for a dead one."""

import json
import math
import subprocess
from pathlib import Path

import pytest
from processes import together

pytestmark = [pytest.mark.slow, pytest.mark.fault(17)]

PROGRAM = Path(__file__).parent.with_name("support") / "judging_program.py"


def outputs(count, mode, python, environment):
    processes = [
        subprocess.Popen(
            [python, PROGRAM, mode],
            env=environment(**process),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in together(count)
    ]
    return [(process.communicate(timeout=120)[0], process.returncode) for process in processes]


@pytest.mark.full
def test_every_process_gets_all_scores_and_all_that_was_logged(python, environment):
    (first_output, code_one), (second_output, code_two) = outputs(
        2, "unscored", python, environment
    )
    assert (code_one, code_two) == (0, 0), first_output + second_output
    first, second = (text.splitlines()[-1] for text in (first_output, second_output))
    assert first == second
    scores, log = json.loads(first)
    # Tokens count 0 1 2 3 4 5 6 0 1 ...; 0 was not sampled: no text begins or ends with it.
    texts = ["ab", "cde", "f`a", "bcd", "ef", "abc", "def", "ab"]
    assert log["extra"]["text"] == texts
    # Process 1 judged the groups 1 and 3.
    assert log["extra"]["second"] == [None, None, None, "bcd", None, None, "def", "ab"]
    flat = [value for group in scores["lengths"] for value in group]
    assert flat == pytest.approx([len(text) + 0.1 for text in texts])
    breaks = [math.isnan(value) for group in scores["breaks"] for value in group]
    assert breaks == [False, False, True, True, False, False, True, True]
    assert log["numbers"] == {"calls": 0.5, "rewards/breaks/errors": 4}
    assert "completion = 'f`a'" in log["messages"]["breaks"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "error"),
    [("raise", "OSError"), pytest.param("exit", "SystemExit", marks=pytest.mark.full)],
)
def test_a_reward_that_fails_in_one_process_ends_both_with_its_message(
    mode, error, python, environment
):
    for output, code in outputs(2, mode, python, environment):
        assert code == 2, output
        assert f"rewards.breaks raised {error}" in output
        assert "Traceback" not in output
        assert f"in {PROGRAM}:breaks, line " in output  # of the reward, in every process
