r"""Sums up to 20 + 20 behind four examples: the task of `configs/smollm2_sums.toml`.

    11+5=16
    13+2=15
    3+18=21
    4+12=16
    7+9=            the model goes on: 16

For small pretrained models: the examples say what is asked, so that one that was never trained to
follow instructions is right now and then. The columns `first` and `second` are for prompts of one's
own, as `data.prompt = "What is {first} + {second}?"`.

The warm-start corpus, for a base without pretraining, is right half of the time and otherwise off
by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgrpo.data.tasks.base import Task, Worked, refuse_unknown_split, rights

HIGHEST = 20  # operands are 1 to HIGHEST
EXAMPLES = (
    (11, 5),
    (13, 2),
    (3, 18),
    (4, 12),
)
SPLITS = {"train": 296, "test": 100}  # all sums but the examples
LEVELS = (1, 2, 3)  # of 1, one of or both operands with two digits
CARE = {0: 0.5, -1: 0.25, 1: 0.25}  # what a corpus solution is off by -> its probability


def prompt(first: int, second: int) -> str:
    r"""The examples, and the problem on the last line.

    >>> prompt(7, 9)
    '11+5=16\n13+2=15\n3+18=21\n4+12=16\n7+9='
    """
    lines = [f"{left}+{right}={left + right}" for left, right in EXAMPLES]
    return "\n".join([*lines, f"{first}+{second}="])


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` problems of a split, none twice before all have come.

    Raises: InputError on an unknown split.
    """
    refuse_unknown_split("sums", split, SPLITS)
    problems = _problems(split)
    random = np.random.default_rng([seed, split == "test", 2])
    laps = -(-count // len(problems))
    order = np.concatenate([random.permutation(len(problems)) for _ in range(laps)])[:count]
    return [_row(*problems[place]) for place in order]


def _row(first: int, second: int) -> dict[str, Any]:
    return {
        "prompt": prompt(first, second),
        "answer": str(first + second),
        "first": first,
        "second": second,
        "level": 1 + (first >= 10) + (second >= 10),
    }


def _problems(split: str) -> list[tuple[int, int]]:
    """The problems of a split, always the same ones."""
    operands = range(1, HIGHEST + 1)
    pairs = [pair for pair in itertools.product(operands, operands) if pair not in EXAMPLES]
    order = np.random.default_rng(0).permutation(len(pairs))
    places = order[: SPLITS["test"]] if split == "test" else order[SPLITS["test"] :]
    return [pairs[place] for place in places]


def corpus() -> list[Worked]:
    """The answers of the training problems, right and off by one."""
    problems = _problems("train")
    return [
        Worked(prompt(first, second), str(first + second + offset), share / len(problems))
        for first, second in problems
        for offset, share in CARE.items()
    ]


def extract_answer(completion: str) -> str:
    r"""The first line.

    >>> extract_answer(" 16\n8+1=9")
    '16'
    """
    return completion.split("\n", 1)[0].strip()


def score(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float | None]:
    r"""1.0 if the first line is the answer, else 0.0.

    >>> score(["16", " 16\n1+1=2", "16.", "116"], ["16"] * 4)
    [1.0, 1.0, 0.0, 0.0]
    """
    del columns
    return rights(map(extract_answer, completions), answer)


sums = Task(
    name="sums",
    alphabet="0123456789+=\n",
    levels=LEVELS,
    splits=SPLITS,
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
)
