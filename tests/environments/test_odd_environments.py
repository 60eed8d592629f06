"""Environments that break, and those that are made in another way than most."""

from __future__ import annotations

import time

import chatting
import numpy as np
import pytest
from small_environments import Counter, Guess, kind

from jaxgrpo.config.keys import RolloutKeys
from jaxgrpo.config.world import make_world
from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.calls import Reading
from jaxgrpo.environments.partners import Broken


class Wraps(Counter):
    """Gives everything else of what it holds."""

    def __init__(self):
        self.inner = Guess()

    def __getattr__(self, name):
        return getattr(self.inner, name)


class WrapsAlone:
    def __init__(self):
        self.reset = (inner := Guess()).reset
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_a_step_that_is_found_in_no_list_of_names_makes_no_environment_of_tools_gyms():
    wrapping = kind(Wraps)
    assert [tool.name for tool in wrapping.tools] == ["up"]
    assert not wrapping.answers_last
    assert kind(WrapsAlone).answers_last


class Judge:
    """It has nothing to call."""

    def reset(self, **row):
        return " Say hi."

    def get_reward(self) -> float:
        return 1.0


def test_an_environment_without_tools_needs_no_template_that_writes_calls():
    stops = chatting.ids("<|end|>")
    rollout = RolloutKeys(
        prompts_per_step=1, group_size=2, max_prompt_tokens=8, max_completion_tokens=64
    )
    answers = make_world((), {"": Judge}, rollout, chatting.chat("deaf"), stops)
    assert answers is not None
    partner = answers.kinds[""].make()
    assert partner.open({}, 0) == " Say hi."
    answer = partner.answer(' <tool_call>{"name": "up"}</tool_call>')
    assert (answer.messages, answer.calls, partner.reward()) == ([], 0, 1)
    assert answer.reading == Reading(' <tool_call>{"name": "up"}</tool_call>', [])
    with pytest.raises(InputError, match="the chat template shows none of"):
        make_world((), {"": Counter}, rollout, chatting.chat("deaf"), stops)


def test_an_object_that_lacks_a_tool_answers_that_there_is_none():
    class Less:
        def reset(self, **row): ...

    classes = iter([Counter, Counter, Less])  # two examples, and a sample's
    partner = kind(lambda: next(classes)()).make()
    partner.open({}, 0)
    (message,) = partner.answer("up").messages
    assert message["content"].startswith("{'error': 'Tool up not found")


class Plain(Counter):
    reset = dict  # pyright: ignore[reportAssignmentType]


def test_a_reset_written_in_c_takes_what_it_takes():
    plain = kind(Plain)
    plain.check_row({"prompt": "Go."})
    with pytest.raises(Broken, match="reset returned a dict: return a text or None"):
        plain.make().open({"prompt": "Go."}, 0)


def test_a_long_observation_is_cut_off():
    class Prints(Guess):
        def step(self, action):
            return "a" * 200_000, 0.0, False

    partner = kind(Prints).make()
    partner.open({}, 0)
    (message,) = partner.answer("go").messages
    assert message["content"] == "a" * 100_000 + " ... (100000 characters left out)"


class Raises(Counter):
    def reset(self, **row):
        raise KeyError("board")


class Talks(Counter):
    def reset(self, **row):
        return ["hello"]


class Draws(Counter):
    def reset(self, **row):
        return np.zeros(2)


class Slow(Counter):
    def up(self) -> str:
        """Takes long."""
        for _ in range(500):
            time.sleep(0.01)
        return "late"


class Judges(Counter):
    def get_reward(self):
        return "good"


class Steps(Guess):
    def step(self, action):
        return "no"


class Pays(Guess):
    def step(self, action):
        return "no", None, False


class Shows(Counter):
    def reset(self, **row):
        return "a" * 200_000


def play(factory):
    partner = kind(factory, seconds=0.2).make()
    partner.open({}, 0)
    partner.answer("up")
    return partner.reward()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Raises, "reset raised KeyError: 'board'"),
        (Talks, "reset returned a list: return a text or None"),
        (Draws, "reset returned a ndarray: return a text or None"),
        (Shows, "reset returned 200000 characters: return at most 100000"),
        (Slow, "up took more than 0.2 s"),
        (Judges, "get_reward returned the reward 'good': return a number"),
        (Steps, "step returned a str: return observation, reward, done"),
        (Pays, "step returned the reward None: return a number"),
    ],
)
def test_an_environment_that_breaks_says_how(factory, message):
    with pytest.raises(Broken, match=message):
        play(factory)
