"""Tools and environments in processes: every way in which a call can go wrong, with real ones."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import called
import psutil
import pytest
from quick import all_but

from jaxgrpo.config import own_code
from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.calls import Call, Reading
from jaxgrpo.environments.partners import Broken, make_kind
from jaxgrpo.environments.processes import Processes
from jaxgrpo.environments.tools import LONGEST_TEXT, run_calls

PARTS = {**called.TOOLS, **{cls.__name__: cls for cls in (called.Game, called.Walk, called.Talks)}}
PARTS |= {"Refuses": called.Refuses, "str": str}

BAD = pytest.mark.parametrize(
    "name",
    all_but(("spin", "sleep"), called.BAD),
)


def parse(text):
    """Every word is a call, "bad:die" with an argument."""
    words = [word.partition(":") for word in text.split()]
    return Reading(text, [Call(name, {"name": value} if value else {}) for name, _, value in words])


@pytest.fixture(scope="module")
def processes():
    built = Processes(PARTS, 2, 1.0)
    yield built
    built.close()


def answers(processes, *calls, seconds=5.0):
    tools = {name: processes.tool(name) for name in PARTS}
    results = run_calls(calls, tools, seconds)
    return [result.text for result in results], [result.problem for result in results]


def kind(factory, processes, seconds=2.0):
    name = factory.__name__
    has_tools = factory is not called.Walk  # which is Gym's
    tools = {"die": processes.tool("die")} if processes is not None and has_tools else {}
    return make_kind(factory, tools, (), lambda: parse, seconds, name, processes)


def is_alive(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_dies(process, seconds=5.0):
    deadline = time.monotonic() + seconds
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(process)


def children():
    """The processes that this one has started, and theirs."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_a_tool_answers_as_in_a_thread(processes):
    calls = [Call("add", {"a": 1}), Call("later", {"a": 3}), Call("fail", {"a": 3})]
    calls += [Call("add", {"c": 1}), Call("leave", {}), Call("nowhere", {})]
    in_thread = run_calls(calls[:-1], called.TOOLS, 5.0)
    texts, problems = answers(processes, *calls)
    assert [*zip(texts, problems, strict=True)][:-1] == [tuple(result) for result in in_thread]
    assert problems == ["", "", "raised", "raised", "raised", "unknown"]
    assert texts[:3] == ["3", "late 3", "{'error': 'no 3'}"]
    assert answers(processes, Call("lock", {}))[0][0].startswith("<unlocked _thread.lock object")
    (long,), _ = answers(processes, Call("str", {"object": "é" * (LONGEST_TEXT + 5)}))
    assert long == "é" * LONGEST_TEXT + " ... (5 characters left out)"


def limit(name):
    """Seconds for a call: those that do not wait end by themselves, however slow the machine is."""
    return 1.5 if called.BAD[name] == "timed_out" else 20.0


@pytest.mark.slow
@BAD
def test_a_tool_that_ends_its_process_answers_in_words_and_the_next_call_has_another(
    processes, name
):
    began, seconds = time.monotonic(), limit(name)
    texts, problems = answers(processes, Call(name, {}), Call("add", {"a": 1}), seconds=seconds)
    assert problems == [called.BAD[name], ""]
    words = {"timed_out": "it took more than 1.5 s", "crashed": "it ended its process"}
    words["memory"] = "it needed more memory than rollout.call_memory"
    assert texts == [str({"error": words[called.BAD[name]]}), "3"]
    assert time.monotonic() - began < max(5, seconds)


def test_what_a_tool_has_started_ends_with_its_process(processes):
    (program, _), _ = answers(processes, Call("spawn", {}), Call("add", {"a": 1}))
    assert is_alive(int(program))
    processes.close()
    assert_dies(int(program))


@pytest.mark.slow
def test_no_more_calls_run_at_once_than_there_are_workers():
    """Twelve calls at once are answered by as many processes as there are workers."""
    for count in (1, 3):
        pool = Processes({"where": called.where, "sleep": called.sleep}, count, 1.0)
        with ThreadPoolExecutor(12) as threads:
            calls = [threads.submit(answers, pool, Call("where", {})) for _ in range(24)]
            names = {call.result()[0][0] for call in calls}
        assert len(names) <= count
        pool.close()


def play(factory, processes, *turns, seed=3, **row):
    """What an environment says and gives, or how it breaks."""
    partner = kind(factory, processes).make()
    words = [partner.open(row, seed)]
    replies = [partner.answer(turn) for turn in turns]
    messages = [[message["content"] for message in reply.messages] for reply in replies]
    return words, messages, [reply.reward for reply in replies], partner.reward()


@pytest.mark.parametrize(
    ("factory", "turns"),
    [(called.Game, ("up up", "soon up", "up")), (called.Walk, ("go", "1", "onwards"))],
)
def test_an_environment_keeps_its_state_and_says_what_it_says_here(processes, factory, turns):
    assert repr(play(factory, processes, *turns)) == repr(play(factory, None, *turns))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (called.Refuses, "reset raised KeyError: 'board'"),
        (called.Talks, "reset returned a list: return a text or None"),
    ],
)
def test_an_environment_breaks_in_the_words_of_a_thread(processes, factory, message):
    with pytest.raises(Broken, match=message) as error:
        play(factory, processes)
    assert error.value.ending == ""


@pytest.mark.slow
@BAD
def test_an_environment_whose_process_ends_is_broken_by_name_and_its_neighbours_go_on(
    processes, name
):
    game = kind(called.Game, processes, limit(name))
    first, second = game.make(), game.make()
    assert first.open({"start": 1}, 0) == second.open({"start": 1}, 0) == " From 1."
    with pytest.raises(Broken) as error:
        first.answer(f"up bad:{name} up")
    assert error.value.ending == called.BAD[name]
    assert str(error.value).startswith("bad ")
    with pytest.raises(Broken) as again:
        first.reward()
    assert again.value.ending == called.BAD[name]
    assert second.answer("up").messages[0]["content"] == "2"
    assert second.reward() == 2
    assert first.open({"start": 5}, 0) == " From 5."  # in another process


def test_a_step_and_a_reward_may_end_their_process_too(processes):
    walk = kind(called.Walk, processes).make()
    walk.open({}, 1)
    with pytest.raises(Broken, match="step ended its process"):
        walk.answer("die")
    game = kind(called.Game, processes).make()
    game.open({"start": 100}, 0)
    with pytest.raises(Broken, match="get_reward ended its process"):
        game.reward()


def test_a_tool_that_dies_leaves_the_environment_beside_it_alone(processes):
    game = kind(called.Game, processes).make()
    game.open({"start": 1}, 0)
    answer = game.answer("up die up")
    assert [message["content"] for message in answer.messages][::2] == ["2", "3"]
    assert answer.problems == ("crashed",)


def test_a_killed_process_breaks_its_own_sample_and_the_parent_of_all_begins_again(processes):
    game = kind(called.Game, processes)
    partners = [game.make() for _ in range(3)]
    for partner in partners:
        partner.open({}, 0)
    numbers = [int(partner.answer("where").messages[0]["content"]) for partner in partners]
    os.kill(numbers[0], signal.SIGKILL)
    assert_dies(numbers[0])
    with pytest.raises(Broken, match="up ended its process"):
        partners[0].answer("up")
    assert partners[1].answer("up").messages[0]["content"] == "1"
    psutil.Process(numbers[1]).parent().kill()  # pyright: ignore[reportOptionalMemberAccess]
    assert_dies(numbers[1])
    with pytest.raises(Broken, match="up ended its process"):
        partners[1].answer("up")
    assert partners[1].open({}, 0) == " From 0."
    assert play(called.Game, processes, "up", seed=0)[-1] == 1


@pytest.mark.slow
def test_nothing_is_left_running():
    before = children()
    pool = Processes(PARTS, 2, 1.0)
    game = kind(called.Game, pool)
    partners = [game.make() for _ in range(3)]
    for partner in partners:
        partner.open({}, 0)
    answers(pool, Call("add", {"a": 1}), Call("spawn", {}))
    assert len(children() - before) >= 6  # their parent, a tool's and what it began, three games
    pool.close()
    assert children() <= before
    partners[0].open({}, 0)  # another run in the same interpreter
    assert children() - before
    del partners, partner, game, pool
    gc.collect()
    assert children() <= before


def test_what_is_refused_before_its_first_call_leaves_no_process():
    before = children()
    pool = Processes(PARTS, 2, 1.0)
    with pytest.raises(InputError, match=r"cannot be loaded in a process of 0\.01 GiB") as refused:
        Processes(PARTS, 2, 0.01)
    assert children() <= before, refused  # which holds what was begun
    assert answers(pool, Call("add", {"a": 1}))[1] == [""]
    assert children() - before
    pool.close()


PROGRAM = """
import os, signal, sys, threading
import called
from jaxgrpo.environments.calls import Call
from jaxgrpo.environments.processes import Processes
from jaxgrpo.environments.tools import run_calls

pool = Processes({"spin": called.spin, "where": called.where, "spawn": called.spawn}, 2, 1.0)
tools = {name: pool.tool(name) for name in ("spin", "where", "spawn")}
results = run_calls([Call("where", {}), Call("spawn", {})], tools, 5.0)
threading.Thread(target=run_calls, args=([Call("spin", {})], tools, 60.0), daemon=True).start()
(second,) = run_calls([Call("where", {})], tools, 5.0)
print(*(result.text for result in (*results, second)), flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["exit", "kill"])
def test_all_end_with_the_program_that_began_them_however_it_ends(python, environment, ending):
    variables = environment()
    support = os.path.dirname(called.__file__)
    paths = [support, *filter(None, [variables.get("PYTHONPATH")])]
    run = subprocess.run(
        [python, "-c", PROGRAM, ending],
        env={**variables, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == (0 if ending == "exit" else -signal.SIGKILL), run.stderr
    for number in run.stdout.split():
        assert_dies(int(number))


def test_what_another_process_cannot_load_is_refused_by_name():
    with pytest.raises(InputError, match=r"rollout.call_workers: .*cannot load tools.f \(.*path/"):
        Processes({"tools.f": lambda: 1}, 1, 1.0)
    with pytest.raises(InputError, match=r"rollout.call_workers: str cannot be loaded in a proc"):
        Processes({"str": str}, 1, 0.01)


def test_a_partial_of_a_file_of_its_own_is_found_as_the_class_is(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import functools\nclass Sized:\n    def __init__(self, size):\n        self.size = size\n"
        "    def reset(self, **row):\n        return str(self.size)\n"
        "big = functools.partial(functools.partial(Sized, 7))\n"
    )
    big = own_code.load(f"{file}:big")
    built = Processes({"big": big}, 1, 1.0)
    try:
        partner = make_kind(big, {}, (), lambda: parse, 9.0, "big", built).make()
        assert partner.open({}, 0) == "7"
    finally:
        built.close()


def test_rewards_cannot_read_it(processes):
    game = kind(called.Game, processes).make()
    with pytest.raises(InputError, match=r"environments\[...\].count: with rollout.call_workers"):
        _ = game.environment.count
    with contextlib.suppress(AttributeError):
        game.environment.__array__  # noqa: B018
