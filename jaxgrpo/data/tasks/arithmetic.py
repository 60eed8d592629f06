"""Addition of two two-digit numbers with scratch work, in characters.

    47+38=   7+8=15 4+3+1=8 85        the carried 1 is added in the tens
    72+56=   2+6=8 7+5=12 128         the tens' own carry is written in front

A solution goes through the columns from the right and ends with the answer, after the last space.
The warm-start corpus also holds *careless* solutions that lose a carry, or add one that is not
there; each is right everywhere else:

    47+38=   7+8=15 4+3=7 75
    72+56=   2+6=8 7+5=12 28

They outnumber the right ones wherever there is a carry. So the base model, which learns both, is
bimodal in its success per prompt: near 1 without carries, rarely right with them. Rewarding
the answer amplifies what the base already does now and then.

Where this differs from the pilot it follows (a base with few carry *problems*): the success rate
is set by `CARE`, and does not depend on how far the base happens to generalise.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgrpo.data.tasks.base import Task, Worked, is_for_tests, refuse_unknown_split, rights

LOWEST, HIGHEST = 10, 99  # operands
LEVELS = (1, 2, 3)  # one more than the number of columns with a carry
SHARE = {1: 0.45, 2: 0.40, 3: 0.15}  # of each level among rows, and in the corpus
CARE = {1: 0.97, 2: 0.20, 3: 0.10}  # probability that a corpus solution of the level is right


def level(first: int, second: int) -> int:
    """1, 2 or 3: one more than the number of carries in first + second."""
    ones_carry = first % 10 + second % 10 >= 10
    tens_carry = first // 10 + second // 10 + ones_carry >= 10
    return 1 + ones_carry + tens_carry


def is_test(first: int, second: int) -> bool:
    """Whether the problem belongs to the test split: a hash of the pair, in either order."""
    low, high = sorted((first, second))
    return is_for_tests(f"{low}+{high}")


def solution(first: int, second: int, carry: bool, hundreds: bool) -> str:
    """The worked solution that adds a carry in the tens, and writes one in front, as asked.

    >>> solution(47, 38, carry=True, hundreds=True), solution(47, 38, carry=False, hundreds=True)
    ('7+8=15 4+3+1=8 85', '7+8=15 4+3=7 75')
    """
    ones_sum = first % 10 + second % 10
    tens_sum = first // 10 + second // 10 + carry
    front = str(tens_sum) if hundreds else str(tens_sum % 10)
    steps = f"{first % 10}+{second % 10}={ones_sum} {first // 10}+{second // 10}"
    return f"{steps}{'+1' if carry else ''}={tens_sum} {front}{ones_sum % 10}"


def solutions(first: int, second: int) -> dict[str, float]:
    """Every worked solution of a problem with its probability; the right one comes first.

    Without a carry the careless one adds a 1 all the same. With one carry it is lost; with two,
    the first, the second or both are, equally often.
    """
    ones_carry = first % 10 + second % 10 >= 10
    right = solution(first, second, ones_carry, True)
    if level(first, second) == 1:
        careless = [solution(first, second, True, True)]
    else:
        ways = itertools.product({ones_carry, False}, (True, False))
        careless = [solution(first, second, *way) for way in ways]
        careless = [text for text in dict.fromkeys(careless) if text != right]
    care = CARE[level(first, second)]
    return {right: care} | {text: (1 - care) / len(careless) for text in careless}


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` problems of a split: prompt, answer and level, in `SHARE` of each level.

    No problem comes twice before its level has run out. The first rows of a longer list are not
    those of a shorter one.

    Raises: InputError on an unknown split.
    >>> rows("test", 2, seed=0) == rows("test", 2, seed=0)
    True
    """
    refuse_unknown_split("arithmetic", split, SPLITS)
    random = np.random.default_rng([seed, split == "test"])
    picked: list[tuple[int, int]] = []
    counts = _share_out(count)
    for number in LEVELS:
        pool = problems(split == "test", number)
        laps = -(-counts[number] // len(pool))
        order = np.concatenate([random.permutation(len(pool)) for _ in range(max(laps, 1))])
        picked += [pool[i] for i in order[: counts[number]]]
    order = random.permutation(count)
    return [_row(*picked[i]) for i in order]


def corpus() -> list[Worked]:
    """Every worked solution of every training problem; the probabilities add up to 1."""
    pools = {number: problems(False, number) for number in LEVELS}
    return [
        Worked(f"{first}+{second}=", text, SHARE[number] / len(pool) * probability)
        for number, pool in pools.items()
        for first, second in pool
        for text, probability in solutions(first, second).items()
    ]


def score(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float | None]:
    """1.0 if the text after the last space is the answer, character by character; else 0.0.

    The scratch work is not judged: a right answer after a wrong step counts.

    >>> score(["7+8=15 4+3+1=8 85", "7+8=15 4+3=7 75", "85", "7+8=15 4+3+1=8 85 "], ["85"] * 4)
    [1.0, 0.0, 1.0, 0.0]
    """
    del columns
    return rights(map(extract_answer, completions), answer)


def extract_answer(completion: str) -> str:
    """The text after the last space.

    >>> extract_answer("7+8=15 4+3+1=8 85")
    '85'
    """
    return completion.rsplit(" ", 1)[-1]


SPLITS = {"train": 3072, "test": 256}

arithmetic: Task = Task(
    name="arithmetic",
    alphabet="0123456789+= ",
    levels=LEVELS,
    splits=SPLITS,
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
)


def _row(first: int, second: int) -> dict[str, Any]:
    return {
        "prompt": f"{first}+{second}=",
        "answer": str(first + second),
        "level": level(first, second),
    }


@functools.cache
def problems(test: bool, number: int) -> tuple[tuple[int, int], ...]:
    """All problems of a split and level, in order: pairs of operands."""
    operands = range(LOWEST, HIGHEST + 1)
    pairs = itertools.product(operands, operands)
    return tuple(pair for pair in pairs if level(*pair) == number and is_test(*pair) == test)


def _share_out(count: int) -> dict[int, int]:
    """`count` in whole numbers per level; what rounding leaves over goes to the first."""
    counts = {number: int(SHARE[number] * count) for number in LEVELS}
    counts[LEVELS[0]] += count - sum(counts.values())
    return counts
