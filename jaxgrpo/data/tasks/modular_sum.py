"""Add digits one after another, modulo 10; each sum is checked before the next digit is shown.

    <user>7+5<end><assistant>     2<end><user>+9<end><assistant>     1<end> ...

A wrong sum is answered by no, and may be tried again: it costs one of the turns. The base is right
in some of its turns. Test sums begin with pairs of digits that training has not.

The environment is `jaxgrpo.environments.games`, in Python and in JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgrpo.data.tasks.arithmetic import is_test
from jaxgrpo.data.tasks.base import END, Task, Worked, ending, refuse_unknown_split, rights
from jaxgrpo.data.tasks.templates import MARKS, TEMPLATE

MODULUS, DIGITS = 10, 5
STEPS = DIGITS - 1  # sums of a game
TURNS = 8  # of a game at most
NO, DONE = "no", "done"
ALPHABET = (*"0123456789+", *MARKS, NO, DONE)
RIGHT = 0.8  # of the base's sums
GAMES = 8000  # of the warm start
SPLITS = {"train": 4096, "test": 512}


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` games; the column `numbers` has their digits.

    Raises: InputError on an unknown split.
    >>> rows("test", 1)[0].keys()
    dict_keys(['prompt', 'answer', 'level', 'numbers'])
    """
    refuse_unknown_split("modular_sum", split, SPLITS)
    random = np.random.default_rng([seed, split == "test", 13])
    games = [_numbers(random, split == "test") for _ in range(count)]
    return [
        {
            "prompt": f"{numbers[0]}+{numbers[1]}",
            "answer": str(sum(numbers) % MODULUS),
            "level": 1,
            "numbers": numbers,
        }
        for numbers in games
    ]


def _numbers(random: np.random.Generator, test: bool) -> list[int]:
    while True:
        numbers = random.integers(0, MODULUS, DIGITS).tolist()
        if is_test(*numbers[:2]) == test:
            return numbers


@functools.cache
def corpus() -> list[Worked]:
    """Whole games in which most sums are right: those of all turns are learnt, and the answers."""
    random, texts = np.random.default_rng(13), []
    for _ in range(GAMES):
        numbers, at, text = _numbers(random, False), 1, ""
        for turn in range(TURNS):
            right = sum(numbers[: at + 1]) % MODULUS
            total = right if random.random() < RIGHT else int(random.integers(MODULUS))
            text += str(total)
            at += total == right
            if at == DIGITS or turn == TURNS - 1:
                break
            reply = f"+{numbers[at]}" if total == right else NO
            text += f"{END}<user>{reply}{END}<assistant>"
        texts.append((f"<user>{numbers[0]}+{numbers[1]}{END}<assistant>", text))
    return [Worked(prompt, text, 1 / len(texts)) for prompt, text in texts]


def extract_answer(completion: str) -> str:
    """The digit that a completion ends with; "" if there is none."""
    return ending(r"\d", completion)


def score(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float | None]:
    """1.0 if the last sum is that of all digits.

    >>> score(["3", "4"], ["3"] * 2)
    [1.0, 0.0]
    """
    del columns
    return rights(map(extract_answer, completions), answer)


modular_sum = Task(
    name="modular_sum",
    alphabet=ALPHABET,
    levels=(1,),
    splits=SPLITS,
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
    chat_template=TEMPLATE,
    steps=2400,  # until some 1,800 it answers any digit
    learning_rate=3e-3,  # with 1e-2 it does so to the end
)
