"""Products of two numbers below 100, which a small model cannot work out, and a tool that can.

    <tools><user>34*57=<end><assistant>     <tool_call>{"name": "calculate", ...}</tool_call><end>
    <tool>1938<end><assistant>              1938<end>

The base calls the tool in some of its samples, with the right numbers in most of these, and copies
what the tool says in most; else it guesses. Where no tools are shown it guesses always. So with the
tool a policy can be right nearly always, and without it hardly ever.

Words that a call has in every sample are one token each. Nothing here is special to the task but
these words: the tool is an ordinary function, and the chat template an ordinary template.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgrpo.data.tasks.arithmetic import is_test
from jaxgrpo.data.tasks.base import END, Task, Worked, ending, refuse_unknown_split, rights
from jaxgrpo.data.tasks.templates import TOOL_MARKS, TOOL_TEMPLATE

CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
CALLS, RIGHT_CALL, RIGHT_COPY = 0.5, 0.8, 0.9
"""Of the base's samples where tools are shown: the share that calls, of these with the right
numbers, and of what follows the answer of the tool the share that copies it."""
LEVELS = (1, 2)  # products of one digit and two, and of two and two
SPLITS = {"train": 4096, "test": 512}

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    """Computes an expression.

    Args:
        expression: whole numbers with +, -, * and brackets, such as "3*(4+5)"
    """
    if len(expression) > 100:
        raise ValueError("the expression is longer than 100 characters")
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("only whole numbers, +, -, * and brackets can be computed")


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` products, half of each level.

    Raises: InputError on an unknown split.
    >>> rows("test", 1)[0].keys()
    dict_keys(['prompt', 'answer', 'level'])
    """
    refuse_unknown_split("calculator", split, SPLITS)
    random = np.random.default_rng([seed, split == "test", 7])
    levels = random.choice(LEVELS, count).tolist()
    pairs = [
        _pairs(split == "test", level)[random.integers(len(_pairs(split == "test", level)))]
        for level in levels
    ]
    return [
        {"prompt": f"{a}*{b}=", "answer": str(a * b), "level": level}
        for (a, b), level in zip(pairs, levels, strict=True)
    ]


@functools.cache
def _pairs(test: bool, level: int) -> tuple[tuple[int, int], ...]:
    """All pairs of a split and level, in order."""
    seconds = range(2, 10) if level == 1 else range(11, 100)
    return tuple(
        (a, b)
        for a in range(11, 100)
        for b in seconds
        if is_test(a, b) == test and a % 10 and b % 10
    )


@functools.cache
def corpus() -> list[Worked]:
    """For every training pair a turn without tools, a first one with tools and a second one."""
    random, texts = np.random.default_rng(7), []
    pools = [_pairs(False, level) for level in LEVELS]
    shares = {pair: 1 / len(pool) / len(pools) for pool in pools for pair in pool}
    for (a, b), share in shares.items():
        question = f"<user>{a}*{b}={END}<assistant>"
        guess, shown = _like(random, a * b), f"<tools>{question}"
        call, wrong = (f"{CALL[0]}{x}*{y}{CALL[1]}" for x, y in ((a, b), (b, _like(random, a))))
        # What the tool says is any number here, so that the base learns to copy it.
        reply = _like(random, a * b)
        answered = f"{shown}{call}{END}<tool>{reply}{END}<assistant>"
        texts += [
            Worked(question, guess, share / 8),
            Worked(shown, guess, share * 3 / 8 * (1 - CALLS)),
            Worked(shown, call, share * 3 / 8 * CALLS * RIGHT_CALL),
            Worked(shown, wrong, share * 3 / 8 * CALLS * (1 - RIGHT_CALL)),
            Worked(answered, reply, share / 2 * RIGHT_COPY),
            Worked(answered, _like(random, a * b), share / 2 * (1 - RIGHT_COPY)),
        ]
    return texts


def _like(random: np.random.Generator, number: int) -> str:
    """A number with as many digits."""
    low = 10 ** (len(str(number)) - 1)
    return str(random.integers(low, 10 * low))


def extract_answer(completion: str) -> str:
    """The number that a completion ends with; "" if there is none."""
    return ending(r"\d+", completion)


def score(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float | None]:
    """1.0 if a completion ends with the product.

    >>> score(["1938", "it is 1938", "19 38"], ["1938"] * 3)
    [1.0, 1.0, 0.0]
    """
    del columns
    return rights(map(extract_answer, completions), answer)


calculator = Task(
    name="calculator",
    alphabet=(*"0123456789*+-()=", *TOOL_MARKS, *CALL),
    levels=LEVELS,
    splits=SPLITS,
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
    chat_template=TOOL_TEMPLATE,
    steps=1600,  # after 800 it copies four of five answers of the tool
)
