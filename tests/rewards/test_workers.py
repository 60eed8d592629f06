"""Children that hang, die or cannot begin, told to do so by the questions they get."""

import os
import subprocess
import sys
import time

import pytest

from jaxgrpo.rewards.workers import Answer, WorkerError, Workers, _is_unreaped

pytestmark = pytest.mark.fault(17)

OBEDIENT = """
import json, os, signal, sys, time
print("{}", flush=True)
for line in sys.stdin:
    seconds, order = json.loads(line)
    if str(order).startswith("hang"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if order == "die":
        os._exit(3)
    if order == "fork":
        order = os.fork() or time.sleep(600)
    if order == "mumble":
        print("what?", flush=True)
    if str(order).startswith("give up"):
        print('{"problem": "timed out"}', flush=True)
        continue
    print(json.dumps(os.getpid() if str(order).startswith("who") else order), flush=True)
"""


@pytest.fixture
def workers():
    started = []

    def make(count=1, time_limit=5.0, program=OBEDIENT, budget=30.0):
        command = [sys.executable, "-c", program]
        started.append(Workers(command, count, time_limit, budget, grace=0.0))
        return started[-1]

    yield make
    for started_workers in started:
        started_workers.close()


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_answers_come_in_order_from_several_children(workers):
    questions = [["text", "ü\n", number, None] for number in range(50)]
    pool = workers(count=3)
    assert pool.ask(questions) == [Answer(question) for question in questions]
    assert 1 <= len({who.value for who in pool.ask([f"who {number}" for number in range(50)])}) <= 3


def test_a_child_stays_for_the_next_batch(workers):
    pool = workers()
    assert pool.ask(["who"]) == pool.ask(["who"])


@pytest.mark.slow
def test_forks_of_a_child_are_killed_with_it(workers):
    pool = workers()
    (fork,) = pool.ask(["fork"])
    assert alive(fork.value)
    pool.close()
    began = time.monotonic()
    while alive(fork.value) and time.monotonic() - began < 5:
        time.sleep(0.05)
    assert not alive(fork.value)


def test_a_hanging_child_is_killed_and_replaced(workers):
    pool = workers(time_limit=0.5)
    (first,) = pool.ask(["who"])
    began = time.monotonic()
    answers = pool.ask(["a", "hang", "who", "b"])
    assert time.monotonic() - began < 5
    assert answers[1] == Answer(None, "timed out")
    assert [answers[0].value, answers[3].value] == ["a", "b"]
    assert answers[2].value != first.value
    assert not alive(first.value)


def test_a_question_that_hung_is_not_asked_again_and_equal_questions_are_asked_once(workers):
    pool = workers(time_limit=0.5)
    assert pool.ask(["hang", "a", "hang"])[2] == Answer(None, "timed out")
    (who,) = pool.ask(["who"])
    assert pool.ask(["b", "hang"]) == [Answer("b"), Answer(None, "timed out")]
    assert pool.ask(["who"]) == [who]  # so no child was lost


def test_a_child_that_says_it_has_no_answer_stays(workers):
    pool = workers()
    (who,) = pool.ask(["who"])
    assert pool.ask(["give up", "a"]) == [Answer(None, "timed out"), Answer("a")]
    assert pool.ask(["who"]) == [who]


@pytest.mark.full
@pytest.mark.slow
def test_beyond_the_budget_of_a_batch_each_question_has_little_time_and_the_rest_is_answered(
    workers,
):
    """40 that hang would take 2 children 40 * 5 / 2 = 100 s; here 2 + (40 - 8) * 0.1 / 2 = 4."""
    pool = workers(count=2, budget=2.0)
    questions = [f"hang {number}" if number % 2 else number for number in range(80)]
    began = time.monotonic()
    answers = pool.ask(questions)
    assert time.monotonic() - began < 25
    assert [answer.value for answer in answers[::2]] == questions[::2]
    assert set(answers[1::2]) == {Answer(None, "timed out")}


@pytest.mark.parametrize("order", ["die", "mumble"])
def test_a_child_that_dies_or_talks_nonsense_is_replaced(workers, order):
    answers = workers().ask(["a", order, "b"])
    assert answers == [Answer("a"), Answer(None, "crashed"), Answer("b")]


def test_a_child_killed_between_two_batches_costs_one_answer(workers):
    pool = workers()
    (who,) = pool.ask(["who"])
    os.kill(who.value, 9)
    answers = pool.ask(["a", "b"])
    assert answers == [Answer(None, "crashed"), Answer("b")]


def test_a_child_that_cannot_begin_says_why(workers):
    pool = workers(program='print(\'{"error": "no library"}\')')
    with pytest.raises(WorkerError, match="no library"):
        pool.ask(["a"])
    with pytest.raises(WorkerError, match="crashed"):
        workers(program="raise SystemExit(1)").ask(["a"])


def test_closed_children_are_gone_and_begin_again(workers):
    pool = workers()
    (who,) = pool.ask(["who"])
    pool.close()
    assert not alive(who.value)
    assert pool.ask(["a"]) == [Answer("a")]


def test_children_end_with_their_parent(python, environment, tmp_path):
    program = (
        "import sys\nfrom jaxgrpo.rewards.workers import Workers\n"
        f"print(Workers([sys.executable, '-c', {OBEDIENT!r}], 1, 5.0, 30.0).ask(['who'])[0].value)"
    )
    run = subprocess.run(
        [python, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    deadline = time.monotonic() + 5
    while alive(int(run.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(run.stdout))


def test_a_child_that_the_system_has_reaped_is_not_killed_by_its_number():
    """As where a reward ignores SIGCHLD: the number may be that of another group by then."""
    process = subprocess.Popen([sys.executable, "-c", "pass"], process_group=0)
    os.waitpid(process.pid, 0)
    assert not _is_unreaped(process, 1.0)
    process = subprocess.Popen([sys.executable, "-c", "pass"], process_group=0)
    assert _is_unreaped(process, 10.0)
    os.killpg(process.pid, 0)  # it is there, and its number with it
    assert process.wait() == 0
