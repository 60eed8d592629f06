"""Conversations of 1 to 6 turns with replies of 0 to 300 tokens, against plain passes over them.

The engine's log-probs are those of one causal pass over the whole conversation. The update's loss
and gradient, packed, with shared prompts and in several micro-batches, are those of such passes in
float64, sample by sample.
"""

from __future__ import annotations

import dataclasses
import functools
import string
from typing import Any

import chatting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import make_blueprint

from jaxgrpo import advantages
from jaxgrpo.core.metrics import finalise
from jaxgrpo.core.types import Rollouts
from jaxgrpo.environments.calls import hermes
from jaxgrpo.environments.conversations import Conversations
from jaxgrpo.environments.partners import make_kind
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.dialogue import ThreadedDialogue, Turns
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.selection import pad_prompts
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.step import build_steps

pytestmark = pytest.mark.slow

P, G, WIDTH, STEPS, LIMIT, TURNS = 6, 4, 6, 980, 8, 6
REPLIES = (0, 1, 17, 63, 64, 65, 300)  # tokens; prompts are computed in chunks of 64
(END,) = chatting.ids("<|end|>")
NARROW = dataclasses.replace(tiny.UNIFORM, vocab_size=len(chatting.tokenizer()))
WIDE = dataclasses.replace(NARROW, dtype="float64")
REWARDS = np.random.default_rng(0).integers(0, 2, (P, G)).astype(np.float32)
REWARDS[0] = 1.0  # a group that leaves the update
KEY = jax.random.key_data(jax.random.key(3))


class Speaker:
    """Answers so many turns as the row says, by random letters."""

    def reset(self, seed, turns):
        self.left, self.random, self.room = turns, np.random.default_rng(seed), 900

    def step(self, text):
        size = self.random.choice([size for size in REPLIES if size <= self.room])
        letters = self.random.choice([*string.ascii_letters], size)
        self.left, self.room = self.left - 1, self.room - size
        return "".join(letters), 0.0, not self.left


@functools.cache
def conversations() -> Rollouts:
    """Drawn by the engine: of each prompt four, the number of whose turns is that of the prompt."""
    rows = [{"prompt": "abcdef"[: turns + 1], "turns": turns + 1} for turns in range(P)]
    kind = make_kind(Speaker, {}, (), lambda: hermes, 5.0, "environment")
    talks = Conversations({"": kind}, chatting.chat(None), [END], rows)
    settings = SamplingSettings(STEPS, 1.0, (END,), tiny.PAD, 4, slots=8, max_turns=TURNS)
    engine = SlotEngine(tiny.model(NARROW), settings, width=WIDTH)
    bare = [np.asarray(chatting.ids("x"), np.int32)] * P
    prompts = pad_prompts(bare, WIDTH, np.arange(P), np.arange(P), 0)
    converse: Any = lambda *sizes: ThreadedDialogue(talks, Turns(TURNS, LIMIT), *sizes)  # noqa: E731
    drawing = draw(engine, tiny.params(NARROW), prompts, KEY, G, converse=converse)
    return dataclasses.replace(drawing.finish(), rewards={"reward": REWARDS})


def alone(rollouts: Rollouts, place: int, sample: int) -> Rollouts:
    """One of the samples."""
    names = ("completion_tokens", "token_mask", "behavior_logp")
    cut: dict[str, Any] = {
        name: getattr(rollouts, name)[place, sample][None, None] for name in names
    }
    cut |= {name: getattr(rollouts, name)[[place]] for name in ("prompt_tokens", "prompt_mask")}
    return dataclasses.replace(rollouts, **cut, fields={}, rewards={})


@pytest.mark.full
def test_conversations_have_all_numbers_of_turns_and_lengths_of_replies():
    rollouts = conversations()
    turn, mask = rollouts.fields["turn"], rollouts.token_mask
    assert (turn.max(-1) == np.arange(P)[:, None]).all()
    replies = {
        int((~mask[at] & (turn[at] == number)).sum())
        for at in np.ndindex(P, G)
        for number in range(turn[at].max())
    }
    assert replies == {*REPLIES}


@pytest.mark.full
def test_the_engines_log_probs_are_those_of_a_pass_over_the_whole_conversation():
    rollouts, params = conversations(), tiny.params(NARROW)
    for place in np.ndindex(P, G):
        logp = tiny.whole_logps(NARROW, params, alone(rollouts, *place))
        np.testing.assert_allclose(rollouts.behavior_logp[place], logp[0, 0], atol=1e-5)


@functools.cache
def plain() -> tuple[Any, float]:
    """(gradient, loss) of clipped ratios, the mean over all tokens: one sample after the other."""
    rollouts = off_policy()
    advantage = np.float64(REWARDS) - REWARDS.mean(1, keepdims=True)
    weight = float(np.float32(1 / rollouts.token_mask.sum()))  # as the update has it

    def loss(params, sample, signal):
        logp = tiny.whole_logps(WIDE, params, sample)
        ratio = jnp.exp(logp - sample.behavior_logp)
        clipped = jnp.minimum(ratio * signal, jnp.clip(ratio, 0.8, 1.2) * signal)
        return weight * jnp.where(sample.token_mask, -clipped, 0).sum()

    with_slope = jax.jit(jax.value_and_grad(loss))
    params, total = tiny.params(WIDE), 0.0
    gradient = jax.tree.map(np.zeros_like, params)
    for place in np.ndindex(P, G):
        value, slope = with_slope(params, alone(rollouts, *place), advantage[place])
        gradient = jax.tree.map(np.add, gradient, slope)
        total += float(value)
    return gradient, total


def off_policy() -> Rollouts:
    """The conversations as if another policy had drawn them, so that some ratios are clipped."""
    rollouts = conversations()
    noise = np.random.default_rng(5).normal(0, 0.3, rollouts.behavior_logp.shape)
    logp: Any = np.where(rollouts.token_mask, rollouts.behavior_logp + noise, 0.0)
    return dataclasses.replace(rollouts, behavior_logp=logp)


@pytest.mark.full
@pytest.mark.parametrize("tokens", [STEPS + WIDTH, 3000])
def test_the_update_is_the_gradient_of_passes_over_whole_conversations(tokens):
    conversations()
    with jax.enable_x64(True):
        sizes, chain = (P, G, WIDTH, STEPS), advantages.build("dr_grpo")
        settings = SamplingSettings(STEPS, 1.0, (END,), tiny.PAD)
        blueprint = make_blueprint(WIDE, sizes, tokens, chain=chain, sampling=settings)
        steps = build_steps(blueprint)
        learner = first_learner(blueprint, tiny.params(WIDE), P, ("reward",))
        before = jax.tree.map(np.asarray, learner.trainable)
        rollouts = jax.tree.map(jnp.asarray, off_policy())
        learner, prepared = steps.prepare(learner, rollouts)
        (batch,) = prepared.batches
        assert (int(batch.num_live) > 1) == (tokens < 3000)
        assert int(batch.segment.max()) > 1  # samples share rows
        learner, metrics = steps.update(learner, prepared.batches)
        assert 0 < finalise(metrics)["clip_ratio/region_mean"] < 1
        want, loss = plain()
        # The metric is summed in float32.
        assert finalise(metrics)["loss"] == pytest.approx(loss, rel=1e-6)
        for old, new, slope in zip(
            *map(jax.tree.leaves, (before, learner.trainable, want)), strict=True
        ):
            moved = old - np.asarray(new)
            assert moved.dtype == np.float64
            assert np.linalg.norm(moved - slope) <= 1e-9 * np.linalg.norm(slope)
