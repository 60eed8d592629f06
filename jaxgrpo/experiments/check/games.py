"""The two games of `jaxgrpo check`, and the policies that play them: all of it can be enumerated.

A policy is a table of logits, a row for each state. In the bandit a sample is one of four answers.
In the bigram game it is drawn token by token, each in the state of the token before it, until the
end token or the limit of two tokens, which cuts it.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

RATES = (0.08, 0.25, 0.45, 0.7, 0.92)
"""Success rates that the policies of a game come near to: each is the policy on a prompt."""
DRAWS = 400
"""Random tables that the policies are picked from."""
WIDTH = 1.6
"""Standard deviation of their logits."""
DISTANCES = {"behavior": 0.04, "reference": 0.5}
"""Standard deviation of the logits of further policies about those of the policy: of the one that
drew the samples where they are stale, near enough that PPO's bounds of 0.2 cut nothing; and of the
reference, which is the base too."""


class Game(NamedTuple):
    """Every sample that can be drawn, N of at most T tokens, and what it is worth."""

    name: str
    tokens: np.ndarray  # [N, T] int32
    mask: np.ndarray  # [N, T] bool
    state: np.ndarray  # [N, T] int32, the row of the table that a token is drawn from
    truncated: np.ndarray  # [N] bool
    shape: tuple[int, int]  # states and tokens of the table
    rewards: dict[str, np.ndarray]  # "binary" and "graded" -> [N]


class Policies(NamedTuple):
    """Tables of logits, [K, S, V] each, of NumPy or JAX."""

    policy: Any
    behavior: Any  # drew the samples, where they are stale
    reference: Any


def bandit() -> Game:
    """One of four answers: two are right."""
    column = np.arange(4, dtype=np.int32)[:, None]
    unmasked, state = np.ones((4, 1), bool), np.zeros((4, 1), np.int32)
    rewards = {"binary": np.array([1.0, 1, 0, 0]), "graded": np.array([1.0, 0.6, 0.3, 0])}
    return Game("bandit", column, unmasked, state, np.zeros(4, bool), (1, 4), rewards)


def bigram() -> Game:
    """Two tokens and an end, 2: the end alone is right, and so is 1 before it; the rest is wrong,
    and a sample of two tokens without an end is cut."""
    samples, states, right = [], [], {(2,): 1.0, (1, 2): 1.0}
    for pair in itertools.product(range(3), repeat=2):
        sample = pair[:1] if pair[0] == 2 else pair
        if sample not in samples:
            samples.append(sample)
            states.append((0, sample[0] + 1)[: len(sample)])
    graded = {**right, (0, 2): 0.4, (0, 1): 0.2}
    rewards = {
        "binary": np.array([right.get(sample, 0.0) for sample in samples]),
        "graded": np.array([graded.get(sample, 0.0) for sample in samples]),
    }
    length = np.array([len(sample) for sample in samples])
    mask = np.arange(2) < length[:, None]
    tokens, state = (
        np.array([[*row, *[0] * (2 - len(row))] for row in rows], np.int32)
        for rows in (samples, states)
    )
    truncated = np.array([sample[-1] != 2 for sample in samples])
    return Game("bigram", tokens, mask, state, truncated, (3, 3), rewards)


def sample_logp(game: Game, logits: Array) -> Array:
    """Log-prob of every sample, [N], under a table [S, V]."""
    return jnp.where(game.mask, token_logp(game, logits), 0).sum(-1)


def token_logp(game: Game, logits: Array) -> Array:
    """Log-prob of each token of every sample, [N, T]; any number where masked."""
    return jax.nn.log_softmax(logits)[game.state, game.tokens]


def make_policies(game: Game) -> Policies:
    """The policies of a game, one near each of `RATES`: the same in every call."""
    random = np.random.default_rng(0)
    tables = WIDTH * random.normal(size=(DRAWS, *game.shape))
    odds = tables - np.log(np.exp(tables).sum(-1, keepdims=True))
    logp = np.where(game.mask, odds[:, game.state, game.tokens], 0).sum(-1)
    rate = np.exp(logp) @ game.rewards["binary"]
    policy = tables[[int(np.abs(rate - goal).argmin()) for goal in RATES]]
    near = {
        name: policy + distance * random.normal(size=policy.shape)
        for name, distance in DISTANCES.items()
    }
    return Policies(policy, **near)


def groups(game: Game, prompts: int, samples: int) -> np.ndarray:
    """Every batch of a game, [N^(prompts samples), prompts, samples]: which samples are drawn."""
    places = itertools.product(range(len(game.tokens)), repeat=prompts * samples)
    return np.array(list(places), np.int32).reshape(-1, prompts, samples)


GAMES: dict[str, Game] = {game.name: game for game in (bandit(), bigram())}
