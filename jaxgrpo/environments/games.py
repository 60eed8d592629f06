"""The environments of the tasks number_guess and modular_sum, in Python and in JAX.

The two forms of each say and give the same: the one reads the text of a turn, the other its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxgrpo.data.tasks import modular_sum, number_guess
from jaxgrpo.data.tasks.base import token_ids
from jaxgrpo.environments.rules import Rules

GUESS_IDS = token_ids(number_guess.ALPHABET)
SUM_IDS = token_ids(modular_sum.ALPHABET)


class NumberGuess:
    """Gym's protocol; a right guess number k is worth (K + 1 - k) / K, of K at most."""

    def reset(self, seed: int, secret: int) -> None:
        """Begins a game; it says nothing first."""
        del seed
        self.secret, self.guesses = secret, 0

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answers a guess: observation, reward, done."""
        self.guesses += 1
        if text not in number_guess.NUMBERS:
            return number_guess.UNREADABLE, 0.0, False
        if int(text) == self.secret:
            most = number_guess.TURNS
            return number_guess.RIGHT, (most + 1 - self.guesses) / most, True
        return number_guess.LESS if self.secret < int(text) else number_guess.MORE, 0.0, False


class ModularSum:
    """Gym's protocol; each right sum is worth its share of all."""

    def reset(self, seed: int, numbers: Sequence[int]) -> None:
        """Begins a game; the prompt has the first sum."""
        del seed
        self.numbers, self.at = numbers, 1

    def step(self, text: str) -> tuple[str, float, bool]:
        """Checks a sum: observation, reward, done."""
        if text != str(sum(self.numbers[: self.at + 1]) % modular_sum.MODULUS):
            return modular_sum.NO, 0.0, False
        self.at += 1
        is_done = self.at == len(self.numbers)
        reply = modular_sum.DONE if is_done else f"+{self.numbers[self.at]}"
        return reply, 1 / modular_sum.STEPS, is_done


class Guessing(NamedTuple):
    """The state of a game of guesses."""

    secret: Array  # [] int32
    guesses: Array  # [] int32


class Summing(NamedTuple):
    """The state of a game of sums."""

    numbers: Array  # [DIGITS] int32
    at: Array  # [] int32, which number was added last


def _begin_guessing(key: Array, row: Mapping[str, Array]) -> Guessing:
    del key
    return Guessing(row["secret"], jnp.int32(0))


def _guess(state: Guessing, tokens: Array, length: Array) -> Any:
    number = 1 + tokens[0] - GUESS_IDS[number_guess.NUMBERS[0]]
    readable = (length == 1) & (number >= 1) & (number <= number_guess.HIGHEST)
    is_right, guesses = readable & (number == state.secret), state.guesses + 1
    compared = jnp.where(
        state.secret < number, GUESS_IDS[number_guess.LESS], GUESS_IDS[number_guess.MORE]
    )
    words = jnp.where(readable, compared, GUESS_IDS[number_guess.UNREADABLE])
    words = jnp.where(is_right, GUESS_IDS[number_guess.RIGHT], words)
    most = number_guess.TURNS
    reward = jnp.where(is_right, (most + 1 - guesses) / most, 0)
    return Guessing(state.secret, guesses), words[None], jnp.int32(1), reward, is_right


def _begin_summing(key: Array, row: Mapping[str, Array]) -> Summing:
    del key
    return Summing(row["numbers"], jnp.int32(1))


def _sum(state: Summing, tokens: Array, length: Array) -> Any:
    numbers, at = state.numbers, state.at
    total = jnp.where(jnp.arange(len(numbers)) <= at, numbers, 0).sum() % modular_sum.MODULUS
    is_right = (length == 1) & (tokens[0] == SUM_IDS["0"] + total)
    at = at + is_right
    is_done = at == len(numbers)
    zero, next_number = SUM_IDS["0"], numbers[jnp.minimum(at, len(numbers) - 1)]
    shown = jnp.stack([jnp.int32(SUM_IDS["+"]), zero + next_number])
    word = jnp.where(is_right, SUM_IDS[modular_sum.DONE], SUM_IDS[modular_sum.NO])
    shows = is_right & ~is_done
    reply = jnp.where(shows, shown, word)
    reward = jnp.where(is_right, 1 / modular_sum.STEPS, 0)
    return Summing(numbers, at), reply, jnp.where(shows, 2, 1), reward, is_done


guess_rules = Rules(_begin_guessing, _guess, "number_guess")
sum_rules = Rules(_begin_summing, _sum, "modular_sum")
