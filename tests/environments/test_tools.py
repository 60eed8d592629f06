"""Tools: schemas, answers, failures in words, limits of time and number."""

from __future__ import annotations

import asyncio
import functools
import time
import types
import warnings

import numpy as np
import pandas as pd
import pytest
from called import add, fail, later

from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.calls import Call
from jaxgrpo.environments.tools import (
    MOST_CALLS,
    find_built_in,
    make_tools,
    run_calls,
    tool_methods,
)
from jaxgrpo.rewards.python import SANDBOXES


def sleep(a: int) -> str:
    """Takes long.

    Args:
        a: nothing
    """
    for _ in range(1000):
        time.sleep(0.01)
    return "done"


async def ask(a: int) -> str:
    """Asks a server that is late itself.

    Args:
        a: nothing
    """
    raise TimeoutError("the server took 3 s")


def promise(a: int):
    """Gives what an async function makes.

    Args:
        a: what comes back
    """
    return later(a)


TOOLS = {function.__name__: function for function in (add, later, fail, sleep, ask, promise)}


def answers(*calls: Call, seconds: float = 5.0):
    results = run_calls(calls, TOOLS, seconds)
    return [result.text for result in results], [result.problem for result in results]


def test_a_schema_is_made_of_hints_and_docstring():
    (tool,) = make_tools([add], "tools")
    function = tool.schema["function"]
    assert function["name"] == "add"
    assert function["description"] == "Adds two numbers."
    assert function["parameters"]["required"] == ["a"]


def test_answers_are_texts_in_order_and_async_ones_wait_side_by_side():
    began = time.monotonic()
    calls = [Call("later", {"a": n}) for n in range(10)]
    texts, problems = answers(Call("add", {"a": 1}), *calls, Call("add", {"a": 1, "b": 5}))
    assert texts == ["3", *(f"late {n}" for n in range(10)), "6"]
    assert not any(problems)
    assert time.monotonic() - began < 0.4  # ten times 0.05, one after another, would be more


def test_what_a_plain_function_promises_is_waited_for():
    assert answers(Call("promise", {"a": 3}))[0] == ["late 3"]


def test_async_calls_begin_behind_the_others():
    log = []

    async def slow():
        log.append("begins")
        await asyncio.sleep(0.05)
        log.append("ends")
        return "slow"

    def quick():
        log.append("quick")
        return "quick"

    results = run_calls([Call("slow", {}), Call("quick", {})], {"slow": slow, "quick": quick}, 5.0)
    assert [result.text for result in results] == ["slow", "quick"]
    assert log == ["quick", "begins", "ends"]


def test_content_blocks_are_their_texts():
    blocks = [{"type": "text", "text": "It "}, {"type": "text", "text": "is 3."}]
    cars = [{"type": "car", "name": "T"}]
    picture = [{"type": "text", "text": "See"}, {"type": "image", "image": object()}]
    tools = {"blocks": lambda: blocks, "cars": lambda: cars, "picture": lambda: picture}
    results = run_calls([Call(name, {}) for name in tools], tools, 5.0)
    assert [result.text for result in results[:2]] == ["It is 3.", str(cars)]
    assert "it returned content of type 'image': models read texts alone" in results[2].text
    assert [result.problem for result in results] == ["", "", "raised"]


def test_an_array_or_a_table_answers_with_its_text():
    """Neither has one truth value."""
    values = np.arange(3), pd.DataFrame({"price": [1, 2]}), np.zeros(0), []
    tools = {str(n): lambda value=value: value for n, value in enumerate(values)}
    results = run_calls([Call(name, {}) for name in tools], tools, 5.0)
    assert [(result.text, result.problem) for result in results] == [(str(v), "") for v in values]


class Slow:
    def __str__(self) -> str:
        for _ in range(500):
            time.sleep(0.01)
        return "late"


def test_the_text_of_what_a_tool_returns_counts_in_its_time():
    """It was written outside of the limit: a turn was waited for as long as that took."""
    began = time.monotonic()
    (result,) = run_calls([Call("look", {})], {"look": Slow}, 0.2)
    assert result.text == "{'error': 'it took more than 0.2 s'}"
    assert time.monotonic() - began < 3


class Wordless(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


def test_an_error_that_has_no_words_answers_too():
    def plain():
        raise Wordless

    async def later():
        raise Wordless

    results = run_calls([Call("plain", {}), Call("later", {})], {"plain": plain, "later": later}, 5)
    assert [result.problem for result in results] == ["raised", "raised"]
    assert all("a Wordless that cannot be written" in result.text for result in results)


@pytest.mark.parametrize(
    ("call", "problem", "words"),
    [
        (Call("fail", {"a": 3}), "raised", "no 3"),
        (Call("add", {"c": 3}), "raised", "unexpected keyword argument 'c'"),
        (Call("later", {"c": 3}), "raised", "unexpected keyword argument 'c'"),
        (Call("ad", {"a": 3}), "unknown", "Tool ad not found. There are: add, later"),
        (Call("", {}, "a tool call that cannot be read: x"), "malformed", "cannot be read: x"),
        (Call("sleep", {"a": 1}), "timed_out", "it took more than 0.2 s"),
        (Call("ask", {"a": 1}), "raised", "the server took 3 s"),
    ],
)
def test_a_failure_answers_in_words(call, problem, words):
    texts, problems = answers(call, Call("add", {"a": 1}), seconds=0.2)
    assert problems == [problem, ""]
    assert texts[1] == "3"
    assert texts[0].startswith("{'error': ")
    assert words in texts[0]


def test_calls_beyond_the_limit_of_a_turn_are_not_run():
    texts, problems = answers(*[Call("add", {"a": 1})] * (MOST_CALLS + 2))
    assert problems == [""] * MOST_CALLS + ["too_many"] * 2
    assert f"a turn may have {MOST_CALLS} calls" in texts[-1]


def test_tools_that_cannot_be_tools_are_refused():
    def bare(a):
        return a

    with pytest.raises(InputError, match=r"tools: no schema can be made of bare .*type hint"):
        make_tools([bare], "tools")
    with pytest.raises(InputError, match="tools: two tools are called 'add': rename one"):
        make_tools([add, add], "tools")
    with pytest.raises(InputError, match=r"no schema can be made of max \(no signature found"):
        make_tools([max], "tools")
    with pytest.raises(InputError, match="tools: a int: give a function"):
        make_tools([3], "tools")  # pyright: ignore[reportArgumentType]


def test_public_methods_of_an_object_are_tools_and_properties_are_not_asked():
    class Env:
        def __init__(self):
            self.find = types.MethodType(lambda self: None, self)
            self.plain = lambda: None

        @property
        def broken(self):
            raise AssertionError("a property was read")

        def reset(self): ...
        def get_reward(self): ...
        def _hidden(self): ...
        def look(self): ...

        @functools.cache  # noqa: B019
        def search(self): ...
        @functools.cached_property
        def lazy(self):
            raise AssertionError("a property was read")

        @classmethod
        def rules(cls): ...
        @staticmethod
        def helper(): ...

    assert [*tool_methods(Env())] == ["find", "look", "rules", "search"]


@pytest.fixture
def python_tool():
    """The built-in tool `python`, in the sandbox that this machine has."""
    problems = [module.find_problem() for module in SANDBOXES.values()]
    if None not in problems:
        pytest.skip(f"no sandbox: {problems}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that bubblewrap is not there
        (tool,) = make_tools([find_built_in("python")], "tools")
        yield tool


def test_the_tool_python_says_what_its_code_prints_returns_and_raises(python_tool):
    def answer(code):
        (result,) = run_calls(
            [Call("python", {"code": code})], {"python": python_tool.function}, 30
        )
        return result.text

    assert python_tool.schema["function"]["name"] == "python"
    assert python_tool.schema["function"]["parameters"]["required"] == ["code"]
    assert answer("print('a')\nvalue = 6 * 7\nvalue") == "a\n42\n"
    assert answer("value = 1") == ""
    assert "NameError" in answer("value")  # nothing is kept
    assert "ZeroDivisionError" in answer("print('first')\n1 / 0")
    assert answer("print('first')\n1 / 0").startswith("first\n")
    assert "SyntaxError" in answer("1 +")
    assert "root:" not in answer("print(open('/etc/passwd').read())")


def test_a_tool_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"tool.*pyton.*python"):
        find_built_in("pyton")
