"""Conversations that the template writes again with each reply: what the model reads and draws.

The oracle is one plain causal pass over each rewritten conversation.
"""

from __future__ import annotations

import dataclasses
import functools
import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrpo.config.keys import RolloutKeys
from jaxgrpo.config.world import make_world
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.environments.calls import Reading
from jaxgrpo.environments.conversations import Conversations
from jaxgrpo.environments.games import guess_rules
from jaxgrpo.environments.partners import make_kind
from jaxgrpo.models import sequences
from jaxgrpo.models.api import stacked_params
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.dialogue import FORK, ThreadedDialogue, Turns
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.sample_rows import turn_entries
from jaxgrpo.rollout.selection import pad_prompts
from jaxgrpo.rollout.slots.driver import SlotEngine

KEY = jax.random.key_data(jax.random.key(3))
PROMPTS, GROUP, STEPS, WIDTH, TURNS, LIMIT = 3, 4, 110, 8, 4, 6
MARKS = ("<|start|>", "<|end|>", "<think>", "</think>")
ROLES = "<|start|>{{ m.role[0] }}"
NEXT = "{% if add_generation_prompt %}<|start|>a{% endif %}"
TEMPLATES = {
    # As Qwen3's: of an earlier turn only what follows its thought.
    "forgetful": "{% for m in messages %}"
    + ROLES
    + "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>"
    + "{% endfor %}"
    + NEXT,
    # It refuses to write a conversation in which a thought has ended.
    "picky": "{% for m in messages %}"
    + "{% if '</think>' in m.content %}{{ raise_exception('no thoughts') }}{% endif %}"
    + ROLES
    + "{{ m.content }}<|end|>{% endfor %}"
    + NEXT,
    "faithful": "{% for m in messages %}" + ROLES + "{{ m.content }}<|end|>{% endfor %}" + NEXT,
}


class Counts:
    def reset(self, seed):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return f"{self.turns}{len(text) % 7}", 1.0, False


class Opens(Counts):
    def reset(self, seed):
        super().reset(seed)
        return f"{seed % 1000}"


@functools.cache
def tokenizer() -> Any:
    return character_tokenizer([*string.ascii_lowercase[:21], *string.digits, *MARKS])


def model():
    return tiny.model_and_params(len(tokenizer()), 5.0)


def chat(name: str) -> Chat:
    return Chat(tokenizer(), TEMPLATES[name], name, None, {})


@functools.cache
def talk(template: str, forks: bool, slots: int = 0, steps: int = STEPS, game: Any = Counts) -> Any:
    """A batch that has been drawn, and its dialogue."""
    rows = [{"prompt": [{"role": "user", "content": "abc"[: n + 1]}]} for n in range(PROMPTS)]
    (end,) = tokenizer()("<|end|>")["input_ids"]
    kind = make_kind(game, {}, (), lambda: lambda text: Reading(text, []), 5.0, "environment")
    talks = Conversations({"": kind}, chat(template), [end], rows, forks=forks)
    settings = SamplingSettings(steps, 1.0, (end,), tiny.PAD, 4, slots=slots, max_turns=TURNS)
    settings = settings._replace(own_rows=True)
    built, params = model()
    engine = SlotEngine(built, settings, width=WIDTH)
    bare = [np.ones(1, np.int32)] * PROMPTS
    prompts = pad_prompts(bare, WIDTH, np.arange(PROMPTS), np.arange(PROMPTS), 0)
    converse = lambda longest, seed: ThreadedDialogue(talks, Turns(TURNS, LIMIT), longest, seed)  # noqa: E731
    drawing = draw(engine, params, prompts, KEY, GROUP, converse=converse)
    return drawing.finish(), drawing.dialogue


def text(ids) -> str:
    return tokenizer().decode(ids)


def plain_logp(ids):
    """Log-probs of all tokens of a sequence, by one pass."""
    built, params = model()
    padded = np.zeros((1, 128), np.int32)
    padded[0, : len(ids)] = ids
    stacked = stacked_params(built.config, params)
    mask = np.arange(128)[None] < len(ids)
    return np.asarray(sequences.token_logp(built, stacked, jnp.asarray(padded), mask))[
        0, : len(ids)
    ]


@pytest.mark.full
@pytest.mark.slow
def test_a_turn_follows_the_conversation_as_the_template_writes_it_and_is_scored_behind_it():
    rollouts, dialogue = talk("forgetful", True)
    fork, forgotten = rollouts.fields[FORK], 0
    for place, sample in np.ndindex(PROMPTS, GROUP):
        (conversation,) = dialogue.spoken([place], GROUP)[sample : sample + 1]
        tokens, mask = rollouts.completion_tokens[place, sample], rollouts.token_mask[place, sample]
        turn, logp = rollouts.fields["turn"][place, sample], rollouts.behavior_logp[place, sample]
        last, drawn_in = int(np.flatnonzero(mask)[-1]), fork[place, sample]
        prompt = rollouts.prompt_tokens[place][rollouts.prompt_mask[place]]
        for number in range(turn.max() + 1):
            at = np.flatnonzero(mask & (turn == number))
            (sequence,) = {*drawn_in[at].tolist()}
            inside = np.flatnonzero((drawn_in == sequence) & (np.arange(STEPS) <= last))
            read = [*([] if sequence else prompt), *tokens[inside]]
            before = len(read) - len(inside) + int(at[0] - inside[0])
            messages = [*conversation.prompt, *conversation.messages[: 2 * number]]
            written = tokenizer().apply_chat_template(
                messages, chat_template=TEMPLATES["forgetful"], tokenize=False,
                add_generation_prompt=True,
            )  # fmt: skip
            assert text(read[:before]) == written
            expected = plain_logp(read)[before : before + len(at)]
            np.testing.assert_allclose(logp[at], expected, atol=1e-5)
            forgotten += (
                sequence > 0 and "</think>" in conversation.messages[2 * number - 2]["content"]
            )
    assert forgotten >= 3
    assert not rollouts.behavior_logp[~rollouts.token_mask].any()
    forked = dialogue.metrics(PROMPTS * GROUP)["turns/forked"]
    assert 0 < forked == (fork * rollouts.token_mask).any(-1).mean() < 1


@pytest.mark.full
def test_samples_with_forks_do_not_depend_on_slots():
    (few, _), (alike, _) = talk("forgetful", True, slots=2), talk("forgetful", True)
    for name in ("completion_tokens", "token_mask", "truncated"):
        np.testing.assert_array_equal(getattr(few, name), getattr(alike, name))
    np.testing.assert_array_equal(few.fields[FORK], alike.fields[FORK])


@pytest.mark.full
def test_a_template_that_writes_all_that_was_said_gives_the_same_bits():
    (again, _), (exact, _) = talk("faithful", True), talk("faithful", False)
    fields = dict(again.fields)
    assert not fields.pop(FORK).any()
    jax.tree.map(np.testing.assert_array_equal, dataclasses.replace(again, fields=fields), exact)


@pytest.mark.full
def test_a_conversation_that_leaves_no_room_when_it_is_rewritten_ends():
    rollouts, dialogue = talk("forgetful", True, steps=50)
    assert dialogue.metrics(PROMPTS * GROUP)["turns/cut"] > 0
    assert rollouts.fields[FORK].any()


@pytest.mark.full
@pytest.mark.slow
def test_a_template_that_fails_on_what_was_said_breaks_its_sample_alone():
    rollouts, dialogue = talk("picky", True)
    assert rollouts.fields["turn"].max() > 0
    problems = [t.problem for n in range(PROMPTS) for t in dialogue.spoken([n], GROUP)]
    assert 0 < sum(map(bool, problems)) < len(problems)
    assert any("no thoughts" in problem for problem in problems)
    np.testing.assert_array_equal(
        dialogue.unscored(PROMPTS, GROUP).ravel(), np.array(problems) != ""
    )


def test_rules_in_jax_are_refused():
    keys = RolloutKeys(
        prompts_per_step=1, group_size=2, max_prompt_tokens=8, max_completion_tokens=8
    )
    with pytest.raises(InputError, match="rules in JAX write behind what"):
        make_world((), {"": guess_rules}, keys, chat("faithful"), [1], forks=True)


@pytest.mark.slow
def test_rows_of_saved_samples_say_which_replies_are_the_conversation_again():
    rollouts, _ = talk("forgetful", True)
    place = tuple(np.argwhere(rollouts.fields[FORK].any(-1))[0].tolist())
    span = slice(0, int(np.flatnonzero(rollouts.token_mask[place])[-1]) + 1)
    entries = turn_entries(tokenizer(), rollouts, place, span)
    assert any(entry["forked"] for entry in entries)
    for entry in entries:
        assert entry["forked"] == entry["reply"].startswith("<|start|>u" + "abc"[: place[0] + 1])


@pytest.mark.full
@pytest.mark.slow
def test_samples_that_begin_otherwise_than_their_group_take_no_more_places(monkeypatch):
    engines = []

    class Noted(SlotEngine):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            engines.append(self)

    monkeypatch.setitem(globals(), "SlotEngine", Noted)
    rollouts, dialogue = talk("faithful", True, game=Opens)
    (engine,) = engines
    assert engine._largest == (PROMPTS, GROUP)
    openings = {talk.prompt[-1]["content"] for talk in dialogue.spoken([0], GROUP)}
    assert len(openings) > 1
    assert rollouts.token_mask.any(-1).all()
