"""Samples that are answered: exact tokens, whenever a reply comes, and what is known of turns."""

from __future__ import annotations

import functools
import random
import time
from types import SimpleNamespace
from typing import Any

import chatting
import jax
import numpy as np
import pytest
import tiny

from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.calls import Call, Reading
from jaxgrpo.environments.conversations import Conversation, Conversations
from jaxgrpo.environments.partners import Opening, make_kind
from jaxgrpo.rewards import Reward
from jaxgrpo.rewards.calling import RewardLog
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.dialogue import CALLS, OF_CALLS, ThreadedDialogue, Turns, all_rounds
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.judging import Judge
from jaxgrpo.rollout.selection import pad_prompts
from jaxgrpo.rollout.slots.driver import SlotEngine

KEY = jax.random.key_data(jax.random.key(3))
PROMPTS, GROUP, STEPS, WIDTH, TURNS, LIMIT = 4, 3, 60, 24, 4, 10
(END,) = chatting.ids("<|end|>")


def parse(text):
    """Two turns of three have a call."""
    is_call = sum(map(ord, text)) % 3
    return Reading(text, [Call("look", {"words": text})] if is_call else [])


def look(words: str) -> str:
    """Looks.

    Args:
        words: for what
    """
    return words[::-1][: len(words) % 7]


class Random:
    """Says something else to every sample."""

    def reset(self, seed, **row):
        self.random = np.random.default_rng(seed)
        return f" {self.random.integers(1000)}"

    def look(self, words: str) -> str:
        """Looks.

        Args:
            words: for what
        """
        return str(self.random.integers(1000))

    def get_reward(self):
        return float(self.random.integers(10))


class Renewed(SlotEngine):
    """Its weights are renewed while it draws: each token has the version after that before it."""

    def poll(self, coming=0, going_on=()):
        versions = lambda turn: turn.version + np.arange(len(turn.tokens), dtype=np.int32)  # noqa: E731
        return [turn._replace(version=versions(turn)) for turn in super().poll(coming, going_on)]


def talk(
    factory: Any = None,
    functions=(look,),
    style=None,
    delay=0.0,
    slots=0,
    steps=STEPS,
    engine_type: Any = SlotEngine,
) -> Any:
    """A batch that has been drawn: rollouts, its dialogue, the slot-steps."""
    built, params = tiny.model_and_params(len(chatting.tokenizer()))
    rows = [{"prompt": "abcdef"[: number + 1], "answer": "1"} for number in range(PROMPTS)]
    if style is not None:
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]

    def slowly(function):
        def run(**arguments):
            time.sleep(random.random() * delay)
            return function(**arguments)

        return run

    tools = {function.__name__: slowly(function) for function in functions}
    kind = make_kind(factory, tools, (), lambda: parse, 5.0, "environment")
    talks = Conversations({"": kind}, chatting.chat(style), [END], rows)
    settings = SamplingSettings(steps, 1.0, (END,), tiny.PAD, 4, slots=slots, max_turns=TURNS)
    engine = engine_type(built, settings, width=WIDTH)
    bare = [np.asarray(chatting.ids("x"), np.int32)] * PROMPTS
    prompts = pad_prompts(bare, WIDTH, np.arange(PROMPTS), np.arange(PROMPTS), 0)
    converse = lambda longest, seed: ThreadedDialogue(talks, Turns(TURNS, LIMIT), longest, seed)  # noqa: E731
    drawing = draw(engine, params, prompts, KEY, GROUP, converse=converse)
    return drawing.finish(), drawing.dialogue, int(engine.slot_steps)


@functools.cache
def expected():
    return talk()


def assert_same(rollouts, alike):
    for name in ("prompt_tokens", "completion_tokens", "token_mask", "truncated"):
        np.testing.assert_array_equal(getattr(rollouts, name), getattr(alike, name))
    np.testing.assert_allclose(rollouts.behavior_logp, alike.behavior_logp, atol=1e-5)
    for name, field in alike.fields.items():
        np.testing.assert_array_equal(rollouts.fields[name], field)


@pytest.mark.full
def test_samples_do_not_depend_on_slots():
    assert_same(talk(slots=4, delay=0.05)[0], expected()[0])


@pytest.mark.full
@pytest.mark.slow
def test_whatever_time_tools_take_all_is_the_same_bit_for_bit():
    rollouts, _, slot_steps = talk(delay=0.1)
    alike, _, steps = expected()
    for name, array in vars(rollouts).items():
        jax.tree.map(np.testing.assert_array_equal, array, getattr(alike, name))
    assert slot_steps == steps


@pytest.mark.slow
def test_what_a_tool_says_stands_between_the_turns_and_is_not_the_models():
    rollouts, dialogue, _ = expected()
    several = 0
    for place, sample in np.ndindex(PROMPTS, GROUP):
        tokens, mask = rollouts.completion_tokens[place, sample], rollouts.token_mask[place, sample]
        turn = rollouts.fields["turn"][place, sample]
        (conversation,) = dialogue.spoken([place], GROUP)[sample : sample + 1]
        roles = [message["role"] for message in conversation.messages]
        assert roles == ["assistant", "tool"] * (len(roles) // 2) + ["assistant"] * (len(roles) % 2)
        for number, message in enumerate(conversation.messages):
            is_drawn = message["role"] == "assistant"
            written = tokens[(turn == number // 2) & (mask == is_drawn)]
            text = chatting.text(written).removesuffix("<|end|>")
            assert text == message["content"]
        assert not rollouts.behavior_logp[place, sample][~mask].any()
        several += len(roles) > 2
    assert several >= 4


@pytest.mark.full
@pytest.mark.slow
def test_a_conversation_with_a_template_is_what_the_template_writes():
    rollouts, dialogue, _ = talk(style="closed", steps=200)
    chat = chatting.chat("closed")
    for place, sample in np.ndindex(PROMPTS, GROUP):
        (conversation,) = dialogue.spoken([place], GROUP)[sample : sample + 1]
        prompt = rollouts.prompt_tokens[place][rollouts.prompt_mask[place]]
        tokens, turn = rollouts.completion_tokens[place, sample], rollouts.fields["turn"]
        written = chatting.text([*prompt, *tokens[turn[place, sample] >= 0]])
        # Calls are in the words already; the model's own marks stay as it drew them.
        messages = [{**m, "tool_calls": None} for m in conversation.messages]
        options = {"chat_template": chat.template, "tokenize": False}
        rendered = chat.tokenizer.apply_chat_template([*conversation.prompt, *messages], **options)
        assert rendered.startswith(written) or rendered.removesuffix("\n") == written


@pytest.mark.full
def test_environments_that_say_something_else_to_each_sample():
    rollouts, dialogue, _ = talk(Random, ())
    for place in range(PROMPTS):
        prompt = rollouts.prompt_tokens[place][rollouts.prompt_mask[place]]
        for sample, conversation in enumerate(dialogue.spoken([place], GROUP)):
            turn = rollouts.fields["turn"][place, sample]
            begin = rollouts.completion_tokens[place, sample][: int((turn >= 0).argmax())]
            assert chatting.text([*prompt, *begin]) == conversation.prompt
            assert not rollouts.token_mask[place, sample][: len(begin)].any()
    assert_same(talk(Random, (), slots=4)[0], rollouts)


@pytest.mark.full
@pytest.mark.slow
def test_each_token_has_the_version_that_drew_it():
    rollouts, _, _ = talk(engine_type=Renewed)
    turn, version = rollouts.fields["turn"], rollouts.fields["version"]
    assert version.dtype == np.int32
    for place in np.ndindex(PROMPTS, GROUP):
        drawn = rollouts.token_mask[place]
        assert (version[place][~drawn] == -1).all()
        for number in range(turn[place].max() + 1):
            of_turn = version[place][drawn & (turn[place] == number)]
            np.testing.assert_array_equal(of_turn, np.arange(len(of_turn)))
    assert (turn.max(-1) > 0).any()


@pytest.mark.slow
def test_turns_that_their_limit_cut_are_told_from_those_that_ended():
    rollouts, _, _ = expected()
    turn, cut = rollouts.fields["turn"], rollouts.fields["turn_truncated"]
    for place in np.ndindex(PROMPTS, GROUP):
        count = turn[place].max() + 1
        for number in range(count):
            drawn = rollouts.token_mask[place] & (turn[place] == number)
            assert cut[place][number] == (rollouts.completion_tokens[place][drawn][-1] != END)
        assert not cut[place][count:].any()
        assert cut[place][count - 1] == rollouts.truncated[place]
    assert 0 < cut.sum() < (turn.max(-1) + 1).sum()


@pytest.mark.full
def test_a_sample_ends_at_its_last_turn_or_where_a_reply_leaves_no_room():
    rollouts, dialogue, _ = talk(steps=26)
    turns = rollouts.fields["turn"].max(-1) + 1
    assert turns.max() <= TURNS
    ends = rollouts.token_mask[..., -1]
    assert rollouts.truncated[ends].all() or not ends.any()
    assert dialogue.metrics(PROMPTS * GROUP)["turns/mean"] == pytest.approx(turns.mean())


@pytest.mark.slow
def test_rewards_of_turns_and_hashes_of_states_are_fields():
    class Pays:
        def reset(self, seed):
            self.turns = 0

        def step(self, text):
            self.turns += 1
            return "same", self.turns, self.turns == 3

    rollouts, dialogue, _ = talk(Pays, ())
    reward, state = rollouts.fields["turn_reward"], rollouts.fields["state_hash"]
    turns = rollouts.fields["turn"].max(-1) + 1
    assert (turns <= 3).all()
    for place, sample in np.ndindex(PROMPTS, GROUP):
        # A turn that ends the sample by its length is not answered.
        answered = int((reward[place, sample] != 0).sum())
        assert answered in (turns[place, sample] - 1, turns[place, sample])
        np.testing.assert_array_equal(reward[place, sample][:answered], np.arange(answered) + 1)
    # Before a first turn there is the prompt, before all others the same answer.
    assert (state[..., 0][..., None] == state[:, :1, :1]).all()
    assert len({*state[..., 0].ravel().tolist()}) == PROMPTS
    later = state[..., 1:][np.arange(1, TURNS) < turns[..., None]]
    assert later.size
    assert len({*later.tolist()}) == 1
    total = [c.reward() for place in range(PROMPTS) for c in dialogue.spoken([place], GROUP)]
    np.testing.assert_array_equal(np.reshape(total, (PROMPTS, GROUP)), reward.sum(-1))


@pytest.mark.full
@pytest.mark.slow
def test_a_sample_whose_environment_breaks_is_not_scored_and_the_others_go_on():
    class Fragile(Random):
        def look(self, words: str) -> str:
            """Looks.

            Args:
                words: for what
            """
            return str(self.random.integers(1000))

        def get_reward(self):
            if self.random.integers(2):
                raise RuntimeError("lost the board")
            return 1.0

    _, dialogue, _ = talk(Fragile, ())
    rewards = [[c.reward() for c in dialogue.spoken([place], GROUP)] for place in range(PROMPTS)]
    unscored = dialogue.unscored(PROMPTS, GROUP)
    np.testing.assert_array_equal(unscored, np.isnan(rewards))
    assert 0 < unscored.sum() < PROMPTS * GROUP
    broken = dialogue.metrics(PROMPTS * GROUP)["environment/broken"]
    assert broken == pytest.approx(unscored.mean())
    _, log = dialogue.without_broken({"look": np.ones((PROMPTS, GROUP))}, RewardLog({}, {}, {}, {}))
    expected = "Fragile: get_reward raised RuntimeError: lost the board"
    assert log.messages == {"environment": expected}


def test_rewards_never_see_a_sample_whose_environment_broke():
    seconds = []

    def second(completions, environments, group_ids, log_extra):
        log_extra("length", [len(messages) for messages in completions])
        seconds.append(group_ids)
        return [environment.second for environment in environments]

    def talked(number):
        problem = "reset raised KeyError" if number in (1, 2, 3) else ""
        game = SimpleNamespace() if problem else SimpleNamespace(second=number)
        question = [{"role": "user", "content": "hi"}]
        return Conversation("Game", game, lambda: None, question, [{}] * number, problem)

    rewards = [Reward("second", second)]
    judge = Judge(chatting.tokenizer(), rewards, [{"prompt": "hi"}])
    tokens = np.full((3, 2, 1), 5)
    rows, talks = np.zeros(3, int), [talked(number) for number in range(6)]
    judged = judge.groups(rewards, np.arange(3), rows, tokens, tokens > 0, None, talks)
    np.testing.assert_array_equal(judged.scores["second"], [[0, np.nan], [np.nan] * 2, [4, 5]])
    assert seconds == [[0, 2, 2]]
    assert judged.log.columns["second"] == {"length": [0, None, None, None, 4, 5]}
    assert [bool(problem) for problem in judged.log.columns[""]["problem"]] == [0, 1, 1, 1, 0, 0]
    broken = judge.groups(
        rewards, np.arange(1), rows[:1], tokens[:1], tokens[:1] > 0, None, talks[1:3]
    )
    assert np.isnan(broken.scores["second"]).all()
    assert len(seconds) == 1


def test_a_prompt_that_an_environment_makes_too_long_is_refused():
    class Wordy(Random):
        def reset(self, **row):
            return "x" * WIDTH

    with pytest.raises(InputError, match=r"row 0: with what its environment says .* 25 tokens"):
        talk(Wordy, ())


def test_a_prompt_that_is_there_twice_is_answered_where_its_first_place_is_judged():
    places: list[int] = []
    kind = make_kind(None, {"look": look}, (), lambda: parse, 5.0, "tools")
    rows = [{"prompt": "ab"}, {"prompt": "cd"}, {"prompt": "ef"}]
    is_local = lambda place: not places.append(place)  # noqa: E731
    talks = Conversations({"": kind}, chatting.chat(None), [END], rows, is_local)
    numbers = np.asarray([0, 1, 2, 0])  # as an evaluation fills up its bins
    bare = [np.asarray(chatting.ids("x"), np.int32)] * len(numbers)
    dialogue = ThreadedDialogue(talks, Turns(TURNS, LIMIT), STEPS, (1,))
    dialogue.open(pad_prompts(bare, WIDTH, numbers, numbers, 0), GROUP)
    assert places == [0, 1, 2]


def test_samples_of_a_prompt_that_begin_with_different_tokens_are_refused(monkeypatch):
    """As programs may: the prompt of a group is what is common to its samples."""
    opened = {(0, 0): Opening([1, 2], None), (0, 1): Opening([3, 2], None)}
    kind = make_kind(None, {"look": look}, (), lambda: parse, 5.0, "tools")
    talks = Conversations({"": kind}, chatting.chat(None), [END], [{"prompt": "ab"}])
    monkeypatch.setattr(talks, "open", lambda *arguments: opened)
    prompts = pad_prompts([np.asarray([1], np.int32)], WIDTH, np.arange(1), np.arange(1), 0)
    dialogue = ThreadedDialogue(talks, Turns(TURNS, LIMIT), STEPS, (1,))
    with pytest.raises(InputError, match=r"row 0: .* another first token in each sample: let"):
        dialogue.open(prompts, 2)
    opened[0, 1] = Opening([1, 3], None)
    common, begin = dialogue.open(prompts, 2)
    assert common.prompt_tokens[0, 0] == 1
    assert common.prompt_mask.sum() == 1
    assert [ids.tolist() for ids in begin.values()] == [[2], [3]]


def test_what_is_said_to_each_sample_alone_counts_as_its_completion_and_leaves_room_to_draw():
    class Apart(Random):
        def reset(self, seed, **row):
            return f"{seed:0>10}"[::-1] + "x" * WIDTH

    rollouts, dialogue, _ = talk(Apart, ())
    assert not rollouts.token_mask[:, :, :34].any()
    assert rollouts.token_mask.any(-1).all()
    assert len(dialogue.spoken([0], GROUP)[0].prompt) == 35
    with pytest.raises(
        InputError, match=r"row 0: .* 34 tokens that differ .*tokens = 34: raise it"
    ):
        talk(Apart, (), steps=34)


def test_the_metrics_of_a_step_are_of_the_calls_and_samples_of_all_its_rounds():
    first = {"turns/mean": 1.0, CALLS: 0.0, OF_CALLS[0]: 0.0, "calls/timed_out": 0.0}
    second = {"turns/mean": 2.0, CALLS: 2.0, OF_CALLS[0]: 0.5, "calls/timed_out": 3.0}
    joined = {"turns/mean": 1.5, CALLS: 1.0, OF_CALLS[0]: 0.5, "calls/timed_out": 3.0}
    assert all_rounds([first, second]) == joined
    assert all_rounds([first, first]) == first
    assert all_rounds([second]) == second
    assert all_rounds([]) == {}
