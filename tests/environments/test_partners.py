"""Environments of TRL's and of Gym's protocol: what each of their methods does to a sample."""

from __future__ import annotations

import gc
import math
import sqlite3
import threading
import time

import chatting
import numpy as np
import pytest
from small_environments import Counter, Guess, kind

from jaxgrpo.config.keys import RolloutKeys
from jaxgrpo.config.world import _environment_reward, make_world
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import limits
from jaxgrpo.data.prompts import encode, load_rows
from jaxgrpo.environments.calls import Call, Reading
from jaxgrpo.environments.conversations import (
    Conversation,
    Conversations,
    check_rows,
    joined,
)
from jaxgrpo.environments.partners import Broken
from jaxgrpo.environments.serving.fields import Completion

ROLLOUT = RolloutKeys(
    prompts_per_step=1, group_size=2, max_prompt_tokens=8, max_completion_tokens=64
)


def test_trls_protocol():
    partner = kind(Counter).make()
    assert partner.open({"start": 3, "answer": "x"}, 0) == " From 3."
    answer = partner.answer("up up down")
    assert [message["content"] for message in answer.messages][:2] == ["4", "5"]
    assert answer.messages[2]["content"].startswith("{'error': 'Tool down not found")
    assert [message["role"] for message in answer.messages] == ["tool"] * 3
    assert (answer.calls, answer.problems) == (3, ("unknown",))
    assert partner.answer("").messages == []
    assert partner.reward() == 5
    assert partner.open({}, 0) is None
    assert partner.reward() == 0
    assert [tool.name for tool in kind(Counter).tools] == ["up"]


def test_a_seed_is_given_where_reset_names_one():
    class Seeded(Counter):
        def reset(self, seed, **row):
            return str(seed)

    assert kind(Seeded).make().open({}, 7) == "7"
    assert kind(Seeded).make().open({"seed": 9}, 7) == "9"  # a column of the data


def test_a_row_without_a_seed_among_rows_with_one_has_its_samples():
    """It was None, of which nothing can be repeated."""

    class Seeded(Counter):
        def reset(self, seed, **row):
            return f"{seed} {sorted(row)}"

    class Every(Counter):
        def reset(self, **row):
            return str(row)

    rows = load_rows([{"prompt": "a", "seed": 9}, {"prompt": "b"}], "prompt", "")
    assert rows[1]["seed"] is None
    assert [kind(Seeded).make().open(row, 7) for row in rows] == ["9 ['prompt']", "7 ['prompt']"]
    assert kind(Every).make().open({"seed": None}, 7) == "{'seed': None}"  # which names none
    partner = kind(Guess).make()
    numbers = []
    for seed in (1, None):
        partner.open({"seed": seed, "low": 10}, 3)
        numbers.append(partner.environment.number)
    assert numbers == [11, 13]


def test_a_program_has_a_seed_where_its_row_has_none():
    seeds = []

    def agent(base_url, seed):
        seeds.append(seed)
        raise ValueError("over")

    stops = chatting.ids("<|end|>")
    answers = make_world((), {"": agent}, ROLLOUT, chatting.chat(None), stops)
    assert answers is not None
    for row in ({"prompt": "a", "seed": 9}, {"prompt": "b", "seed": None}):
        with pytest.raises(Broken, match="agent raised ValueError: over"):
            answers.kinds[""].make().open(row, 7)
    assert seeds == [9, 7]


def test_gyms_protocol():
    partner = kind(Guess).make()
    assert partner.open({"low": 3, "answer": "x"}, 4) == "guess"
    assert partner.environment.number == 7
    answer = partner.answer("8")
    assert answer.messages == [{"role": "user", "content": "no"}]
    assert answer.reward == 0.25
    assert partner.answer("9").messages == []
    assert partner.reward() == 0.5
    assert kind(Guess).tools == ()
    assert kind(Guess).has_reward


class Described:
    """As gymnasium's base class."""

    def reset(self, *, seed=None):
        return None

    def step(self, action):
        """Acts.

        Args:
            action: an action
        """
        return action, 1.0, True

    def render(self, mode):
        """It would be no tool."""


class Inherits(Described):
    def step(self, action: str):
        return action, 1.0, True


class Typed(Described):
    def step(self, action: str, seconds: float = 1.0) -> tuple[str, float, bool]:
        """Acts.

        Args:
            action: an action
            seconds: that it may take
        """
        return action, 1.0, True


class HasTool(Counter):
    def step(self, number: int) -> str:
        """Counts up by a number.

        Args:
            number: to add
        """
        self.count += number
        return str(self.count)


@pytest.mark.parametrize("factory", [Described, Inherits, Typed])
def test_a_step_of_gyms_protocol_may_be_described(factory):
    assert kind(factory).answers_last


def test_a_step_that_is_described_as_a_tool_is_a_tool():
    assert [tool.name for tool in kind(HasTool).tools] == ["step", "up"]


def test_a_reset_and_a_done_of_the_older_form():
    class Old:
        def reset(self, seed=None):
            return None

        def step(self, text):
            return text.upper(), 1, text == "stop"

    partner = kind(Old).make()
    assert partner.open({}, 0) is None
    assert partner.answer("a").messages[0]["content"] == "A"
    assert partner.answer("stop").messages == []


def test_a_last_turn_is_read_as_every_turn():
    rows = [{"prompt": [{"role": "user", "content": "Count."}]}]
    talks = Conversations({"": kind(Counter)}, chatting.chat(), chatting.ids("<|end|>"), rows)
    talks.open([(0, 0, 0)], 1, (1,))
    ids = chatting.ids("up<|end|>")
    talks.end((0, 0), Completion(ids, [0.0] * len(ids), "stop"))
    assert talks.spoken((0, 0)).messages == [Reading("up", [Call("up", {})]).as_message()]


class Shop:
    """What it has belongs to a thread."""

    def __init__(self):
        self.tables = sqlite3.connect(":memory:")

    def reset(self, **row):
        self.tables.execute("create table if not exists t (x)")
        self.tables.execute("insert into t values (1)")

    def count(self) -> str:
        """Counts."""
        return str(self.tables.execute("select count(*) from t").fetchone()[0])

    def get_reward(self) -> float:
        return float(self.count())


class Priced(Shop):
    def reset(self, seed):  # pyright: ignore[reportIncompatibleMethodOverride]
        super().reset()

    def step(self, text):
        return self.count(), 1, True


def test_what_belongs_to_a_thread_serves_all_calls_of_an_environment():
    partner = kind(Shop).make()
    for number in (1, 2):
        assert partner.open({}, 0) is None
        answer = partner.answer("count count")
        assert [message["content"] for message in answer.messages] == [str(number)] * 2
        assert (partner.reward(), answer.error) == (number, "")
    partner = kind(Priced).make()
    partner.open({}, 0)
    assert partner.answer("x").reward == 1


def test_the_threads_of_environments_end_with_them():
    threads = []

    class Noted(Counter):
        def __init__(self):
            threads.append(threading.current_thread())

    counter = kind(Noted)
    examples = len(threads)
    partners = [counter.make() for _ in range(200)]
    assert len({*threads[examples:]}) == len(partners)
    assert all(thread.is_alive() for thread in threads[examples:])
    gc.disable()
    try:
        assert partners[0].answer("up").error  # it has not begun
        partners.clear()
        deadline = time.monotonic() + 9
        for thread in threads:
            thread.join(max(0, deadline - time.monotonic()))
        assert [thread for thread in threads if thread.is_alive()] == []
    finally:
        gc.enable()


def test_an_environment_without_a_thread_is_refused(monkeypatch):
    counter = kind(Counter)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(InputError, match=r"beside \d+ there is none .*new thread\): take fewer"):
        counter.make()


class Narrow:
    """A tokenizer in Python, which raises on an id of the model that it has no token for."""

    def __call__(self, text, **options):
        return chatting.tokenizer()(text, **options)

    def decode(self, ids, **options):
        raise IndexError("piece id is out of range")


def test_a_turn_that_cannot_be_decoded_ends_the_run_and_is_not_waited_for():
    chat = chatting.chat(None)._replace(tokenizer=Narrow())
    rows = [{"prompt": "Count."}]
    talks = Conversations({"": kind(Counter)}, chat, chatting.ids("<|end|>"), rows)
    talks.open([(0, 0, 0)], 1, (1,))
    talks.answer((0, 0), Completion(chatting.ids("up"), [0.0] * 2, "length"), 500)
    with pytest.raises(IndexError, match="piece id is out of range"):
        limits.within(9, talks.replies)


def test_the_first_error_of_a_batch_is_remembered():
    class Fails(Counter):
        def up(self) -> str:
            """Fails."""
            raise ValueError(f"no {self.count}")

    rows = [{"prompt": "Count.", "start": 3}]
    talks = Conversations({"": kind(Fails)}, chatting.chat(None), chatting.ids("<|end|>"), rows)
    talks.open([(0, 0, 0)], 1, (1,))
    talks.answer((0, 0), Completion(chatting.ids("up up"), [0.0] * 5, "length"), 500)
    talks.replies()
    assert talks.counts == {"calls": 2, "raised": 2}
    assert talks.error == "{'error': 'no 3'}"


class Asks(Counter):
    """What it says is in TRL's blocks, and its server is late."""

    def reset(self, **row):
        self.count = 0
        return [{"type": "text", "text": " Go."}]

    async def up(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Counts up."""
        raise TimeoutError("the server took 3 s")


def test_a_late_server_of_an_async_tool_breaks_no_environment():
    partner = kind(Asks).make()
    assert partner.open({}, 0) == " Go."
    assert partner.answer("up").error == "{'error': 'the server took 3 s'}"


class NoReset:
    def up(self): ...


class Untyped(Counter):
    def down(self, number):
        return number


def explode():
    raise OSError("no such board")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (NoReset, "environment: NoReset has no method reset: give a class"),
        (Untyped, "environment: Untyped: no schema can be made of down"),
        (explode, r"environment \(.*explode.*no such board"),
    ],
)
def test_what_is_no_environment_is_refused(factory, message):
    with pytest.raises(InputError, match=message):
        kind(factory)


def test_a_tool_and_a_method_of_one_name_are_refused():
    with pytest.raises(InputError, match="Counter and tools have both a tool 'up'"):
        kind(Counter, functions={"up": print})


def test_tools_beside_an_environment_of_gyms_protocol_are_refused():
    with pytest.raises(InputError, match=r"environment: `step` of Guess reads .*leave `tools` out"):
        kind(Guess, functions={"up": print})


def test_what_reset_says_joins_the_last_message_and_leaves_the_row_alone():
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "Play."}]
    assert joined(prompt, " Go.")[-1]["content"] == "Play. Go."
    assert prompt[-1]["content"] == "Play."


def test_rows_name_one_of_several_environments():
    kinds = {"game": kind(Counter), "guess": kind(Guess)}
    check_rows(kinds, [{"environment": "game"}, {"environment": "guess"}])
    with pytest.raises(InputError, match=r"row 1: .* holds 'gam': write one of game, guess"):
        check_rows(kinds, [{"environment": "game"}, {"environment": "gam"}])
    with pytest.raises(InputError, match=r"row 0: .* holds array\(.*: write one of game, guess"):
        check_rows(kinds, [{"environment": np.array(["game", "game"])}])
    with pytest.raises(InputError, match=r"no column .environment. \(Known: prompt"):
        check_rows(kinds, [{"prompt": "x"}])
    check_rows({"": kind(Counter)}, [{"prompt": "x"}])


def test_a_mapping_of_one_environment_reads_the_column_where_there_is_one():
    class Bare(Counter):
        def reset(self):  # pyright: ignore[reportIncompatibleMethodOverride]
            self.count = 0

    kinds = {"game": kind(Bare)}
    check_rows(kinds, [{"environment": "game"}])  # which is not for `reset`, as in TRL
    check_rows(kinds, [{}])
    with pytest.raises(InputError, match=r"row 1: .* holds 'gam': write one of game"):
        check_rows(kinds, [{"environment": "game"}, {"environment": "gam"}])


def test_reset_gets_the_columns_of_the_data_alone():
    class Strict(Counter):
        def reset(self, answer):  # pyright: ignore[reportIncompatibleMethodOverride]
            return f"What is {answer}?"

    (row,) = load_rows([{"answer": "1"}], "", "answer")
    check_rows({"": kind(Strict)}, [row])
    talks = Conversations({"": kind(Strict)}, chatting.chat(), chatting.ids("<|end|>"), [row])
    talks.open([(0, 0, 0)], 1, (1,))
    assert talks.spoken((0, 0)).prompt == [{"role": "user", "content": "What is 1?"}]
    with pytest.raises(InputError, match="reset is called with answer, prompt"):
        check_rows({"": kind(Strict)}, load_rows([{"answer": "1", "prompt": "x"}], "prompt", ""))


def test_what_an_environment_does_to_its_row_reaches_no_other_sample():
    class Takes(Counter):
        def reset(self, board, **row):
            self.count = 0
            board.pop()
            return str(board)

    rows = [{"prompt": "Play.", "board": [1, 2, 3]}]
    check_rows({"": kind(Takes)}, rows)
    talks = Conversations({"": kind(Takes)}, chatting.chat(None), chatting.ids("<|end|>"), rows)
    talks.open([(0, 0, 0)], 2, (1,))
    assert [talks.spoken((0, sample)).prompt for sample in range(2)] == ["Play.[1, 2]"] * 2
    assert rows[0]["board"] == [1, 2, 3]
    with pytest.raises(InputError, match=r"the column 'board' cannot be copied \(TypeError: "):
        check_rows({"": kind(Takes)}, [{"prompt": "Play.", "board": threading.Lock()}])


def test_words_of_reset_with_a_token_that_the_model_lacks_break_their_sample_alone():
    class Says(Counter):
        def reset(self, word, **row):
            return word

    rows = [{"prompt": "Go.", "word": word} for word in "~a"]
    chat = chatting.chat(None)._replace(vocab_size=chatting.ids("~")[0])
    talks = Conversations({"": kind(Says)}, chat, chatting.ids("<|end|>"), rows)
    opened = talks.open([(0, 0, 0), (1, 1, 1)], 1, (1,))
    assert [chatting.text(opened[key, 0].tokens) for key in range(2)] == ["Go.", "Go.a"]
    problems = [talks.spoken((key, 0)).problem for key in range(2)]
    assert problems[0].startswith("reset: the text has the token")
    assert problems[1] == ""


def test_words_of_reset_that_the_template_refuses_break_their_sample_alone():
    class Says(Counter):
        def reset(self, word, **row):
            return word

    template = chatting.TEMPLATES["closed"] + (
        "{% if 'BAD' in messages[-1].content %}{{ raise_exception('no such word') }}{% endif %}"
    )
    rows = [{"prompt": [{"role": "user", "content": "Go."}], "word": w} for w in ("BAD", "a")]
    chat = chatting.chat()._replace(template=template)
    talks = Conversations({"": kind(Says)}, chat, chatting.ids("<|end|>"), rows)
    talks.open([(0, 0, 0), (1, 1, 1)], 1, (1,))
    assert "no such word" in talks.spoken((0, 0)).problem
    assert talks.spoken((1, 0)).problem == ""


def test_a_reward_that_is_not_given_is_none():
    class Silent(Counter):
        get_reward = None  # pyright: ignore[reportAssignmentType]

    assert math.isnan(math.nan if kind(Silent).make().reward() is None else 0)


def test_rewards_of_environments_are_asked_for_side_by_side():
    class Late(Counter):
        def get_reward(self):
            time.sleep(0.2)
            return float(self.count)

    partners = [kind(Late).make() for _ in range(16)]
    for number, partner in enumerate(partners):
        partner.open({"start": number}, 0)
    talks = [Conversation("Late", None, partner.reward) for partner in partners]
    talks.append(Conversation("Other", None, talks[0].total))
    began = time.monotonic()
    assert _environment_reward("Late")(talks) == [*map(float, range(16)), 0]
    assert time.monotonic() - began < 1.6  # half of what they take one after another


def test_a_class_without_a_reward_takes_no_sample_out_that_has_the_name_of_another():
    class Env(Counter):
        pass

    silent = type("Env", (Counter,), {"get_reward": None})
    stops = chatting.ids("<|end|>")
    answers = make_world((), {"math": Env, "code": silent}, ROLLOUT, chatting.chat(None), stops)
    assert answers is not None
    rows = [{"prompt": "Go.", "start": 3, "environment": name} for name in ("math", "code")]
    talks = Conversations(answers.kinds, answers.chat, stops, rows)
    talks.open([(0, 0, 0), (1, 1, 1)], 1, (1,))
    (reward,) = answers.rewards()
    assert reward.function([talks.spoken((row, 0)) for row in range(2)]) == [3, 0]


def test_prompts_are_counted_with_the_tools_of_their_own_environment():
    factories, stops = {"game": Counter, "shop": HasTool}, chatting.ids("<|end|>")
    answers = make_world((), factories, ROLLOUT, chatting.chat(), stops)
    assert answers is not None
    rows = [{"prompt": "Play.", "environment": name} for name in ("game", "shop", "gaem")]
    texts = [chatting.text(ids) for ids in encode(rows, answers.first_chat)]
    assert ["step" in text for text in texts] == [False, True, False]
