"""Batches of the games that exist in Python and in JAX, drawn by a small model."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import tiny

from jaxgrpo.core.types import Rollouts
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.tasks import modular_sum, number_guess
from jaxgrpo.data.tasks.base import Task, character_tokenizer
from jaxgrpo.environments import calls, games
from jaxgrpo.environments.conversations import Conversations
from jaxgrpo.environments.history import History
from jaxgrpo.environments.partners import make_kind
from jaxgrpo.environments.rules import Answering, Rules, number_columns
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.dialogue import Dialogue, ThreadedDialogue, Turns
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.selection import pad_prompts
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.traced import TracedDialogue

KEY = jax.random.key_data(jax.random.key(3))
PROMPTS, GROUP, WIDTH = 4, 6, 12


class Game(NamedTuple):
    """A game in both forms."""

    task: Task
    environment: Any
    rules: Rules


GAMES = {
    "number_guess": Game(number_guess.number_guess, games.NumberGuess, games.guess_rules),
    "modular_sum": Game(modular_sum.modular_sum, games.ModularSum, games.sum_rules),
}


class Played(NamedTuple):
    """A batch that has been drawn."""

    rollouts: Rollouts
    dialogue: Dialogue
    engine: SlotEngine


def play(
    game: Game,
    *,
    in_jax: bool,
    slots: int = 0,
    steps: int = 40,
    turns: int = 6,
    limit: int = 3,
    has_template: bool = True,
    prompts: int = PROMPTS,
    group: int = GROUP,
    mesh: Any = None,
) -> Played:
    """Draws `group` samples of `prompts` games, answered by threads or within the loop."""
    template = game.task.chat_template if has_template else None
    tokenizer = character_tokenizer(game.task.alphabet, template)
    chat, (end,) = (
        Chat(tokenizer, template, "a template", None, {}),
        tokenizer("<end>")["input_ids"],
    )
    rows = game.task.rows("train", prompts, 0)
    texts = [row["prompt"] for row in rows]
    if has_template:
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
        texts = [f"<user>{text}<end><assistant>" for text in texts]
    built, params = tiny.model_and_params(len(tokenizer), 6.0)
    settings = SamplingSettings(steps, 1.0, (end,), tiny.PAD, 4, slots=slots)
    history = History(chat, frozenset([end]))
    if in_jax:
        answering = Answering(game.rules, turns, limit, history.frame())
        settings, columns = settings._replace(answering=answering), number_columns(rows)
        converse = lambda *sizes: TracedDialogue(answering, history, rows, columns, *sizes)  # noqa: E731
    else:
        kind = make_kind(game.environment, {}, (), lambda: calls.hermes, 5.0, "environment")
        talks = Conversations({"": kind}, chat, [end], rows)
        settings, bounds = settings._replace(max_turns=turns), Turns(turns, limit)
        converse = lambda *sizes: ThreadedDialogue(talks, bounds, *sizes)  # noqa: E731
    ids = [np.asarray(tokenizer(text)["input_ids"], np.int32) for text in texts]
    padded = pad_prompts(ids, WIDTH, np.arange(prompts), np.arange(prompts), 0)
    engine = SlotEngine(built, settings, mesh, width=WIDTH)
    drawing = draw(engine, params, padded, KEY, group, converse=converse)
    rollouts = drawing.finish()
    assert drawing.dialogue is not None
    return Played(rollouts, drawing.dialogue, engine)
