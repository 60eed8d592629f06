"""A softmax policy over single answers, some of them right: gradients by class, in closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Bandit(NamedTuple):
    """A softmax policy over answers, some of them right."""

    policy: np.ndarray  # [K]
    right: np.ndarray  # [K] bool
    score: np.ndarray  # [K, K], grad log pi(y) with respect to the logits

    @property
    def rate(self) -> float:
        return float(self.policy[self.right].sum())

    def class_mean(self, success: bool) -> np.ndarray:
        """E[grad log pi(y) | success], [K]."""
        chance = np.where(self.right == success, self.policy, 0)
        return chance @ self.score / chance.sum()

    def class_square(self, success: bool) -> float:
        """E[|grad log pi(y)|^2 | success]."""
        chance = np.where(self.right == success, self.policy, 0)
        return float(chance @ (self.score**2).sum(1) / chance.sum())


def bandit(rate: float, spread: float = 0.0, right: int = 2, answers: int = 20) -> Bandit:
    """A bandit of success rate `rate`; spread is that of the logits within a class."""
    logits = spread * np.random.default_rng(0).normal(size=answers)
    wins = np.arange(answers) < right
    policy = np.exp(logits)
    policy = np.where(wins, rate * policy / policy[wins].sum(), policy)
    policy = np.where(wins, policy, (1 - rate) * policy / policy[~wins].sum())
    score = np.asarray(jax.jacobian(jax.nn.log_softmax)(jnp.log(policy)))
    return Bandit(policy, wins, score)


def slope(game: Bandit, function: Callable[[jax.Array], jax.Array] = lambda p: p) -> np.ndarray:
    """The gradient of a function of the success rate with respect to the logits, by autodiff."""

    def value(logits: jax.Array) -> jax.Array:
        return function(jnp.where(game.right, jax.nn.softmax(logits), 0).sum())

    return np.asarray(jax.grad(value)(jnp.log(game.policy)))
