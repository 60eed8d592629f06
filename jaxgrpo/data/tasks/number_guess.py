"""Find a number from 1 to 15 by guesses, each answered by less, more or right.

    <user>guess<end><assistant>     08<end><user>less<end><assistant>     04<end> ...

What a guess asks is a question with a bit of information at most, so the fewest questions are a
search by halves: 49/15 in the mean. All prompts are alike, and the numbers to find are the same in
training and test: what is learnt is how to ask. The base guesses what is still possible in some of
its turns, and else anything.

The environment is `jaxgrpo.environments.games`, in Python and in JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgrpo.data.tasks.base import END, Task, Worked, ending, refuse_unknown_split, rights
from jaxgrpo.data.tasks.templates import MARKS, TEMPLATE

HIGHEST = 15
TURNS = 8  # questions that a game has at most
LESS, MORE, RIGHT, UNREADABLE = "less", "more", "right", "?"
NUMBERS = tuple(f"{number:02}" for number in range(1, HIGHEST + 1))
ALPHABET = (*NUMBERS, *MARKS, "guess", LESS, MORE, RIGHT, UNREADABLE)
POSSIBLE = 0.6  # of the base's guesses, those that are sure to be among what is still possible
FEWEST = sum(k * min(2 ** (k - 1), HIGHEST - 2 ** (k - 1) + 1) for k in range(1, 5)) / HIGHEST
"""Questions in the mean of a search by halves"""
GAMES = 6000  # of the warm start
SPLITS = {"train": 4096, "test": 480}


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` games, of all numbers alike as far as they go.

    Raises: InputError on an unknown split.
    >>> rows("test", 1)[0].keys()
    dict_keys(['prompt', 'answer', 'level', 'secret'])
    """
    refuse_unknown_split("number_guess", split, SPLITS)
    random = np.random.default_rng([seed, split == "test", 11])
    repeats = -(-count // HIGHEST)
    secrets = [random.permutation(HIGHEST) + 1 for _ in range(repeats)]
    return [
        {"prompt": "guess", "answer": NUMBERS[secret - 1], "level": 1, "secret": secret}
        for secret in np.concatenate(secrets)[:count].tolist()
    ]


@functools.cache
def corpus() -> list[Worked]:
    """Whole games: the guesses of all turns are learnt, and what answers them."""
    random, texts = np.random.default_rng(11), []
    for _ in range(GAMES):
        low, high, secret = 1, HIGHEST, int(random.integers(1, HIGHEST + 1))
        text = ""
        for turn in range(TURNS):
            among = (low, high + 1) if random.random() < POSSIBLE else (1, HIGHEST + 1)
            guess = int(random.integers(*among))
            text += NUMBERS[guess - 1]
            if guess == secret or turn == TURNS - 1:
                break
            reply = LESS if secret < guess else MORE
            low, high = (
                (low, min(high, guess - 1)) if secret < guess else (max(low, guess + 1), high)
            )
            text += f"{END}<user>{reply}{END}<assistant>"
        texts.append(text)
    return [Worked(f"<user>guess{END}<assistant>", text, 1 / len(texts)) for text in texts]


def extract_answer(completion: str) -> str:
    """The number that a completion ends with; "" if there is none."""
    return ending(r"\d+", completion)


def score(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float | None]:
    """1.0 if the last guess is the number, however many came before it.

    >>> score(["07", "7", "08"], ["07"] * 3)
    [1.0, 0.0, 0.0]
    """
    del columns
    return rights(map(extract_answer, completions), answer)


number_guess = Task(
    name="number_guess",
    alphabet=ALPHABET,
    levels=(1,),
    splits=SPLITS,
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
    chat_template=TEMPLATE,
    learning_rate=3e-3,  # with 1e-2 it does not come to read what was answered
)
