"""The sums of `arithmetic`, by a base that also reads a solution which it is shown.

    47+38=                                    7+8=15 4+3+1=8 85      one in five is right
    47+38=
                                              what the solution was, right or not
    An answer that is right:

    7+8=15 4+3+1=8 85

    Answer now.

So the policy behind a solution can teach itself without one: `configs/opsd.toml`, where the column
`shown` holds the prompt with the row's right solution, and `configs/sdpo.toml`, where another
sample of the group is shown (`jaxgrpo.training.prompted.successful_sibling`, whose words these
are). In the warm-start corpus the solution that is shown is right as often as a plain text's, and
what follows repeats it: the base has to read it, and does not learn that a longer prompt means
care. Each mark round it is one token.
"""

from __future__ import annotations

import functools
from typing import Any

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.chat import Conversation
from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.data.tasks.base import Task, Worked

ANSWER_MARKS = "\n\nAn answer that is right:\n\n", "\n\nAnswer now."
"""What stands before and behind an answer in a prompt that shows it."""

SHARE = 0.5  # of the corpus that is shown a solution


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Those of `arithmetic`, with the column `shown`.

    Raises: InputError on an unknown split.
    >>> rows("test", 1)[0].keys()
    dict_keys(['prompt', 'answer', 'level', 'shown'])
    """
    return [
        {**row, "shown": show_answer(row["prompt"], solve(row["prompt"]))}
        for row in arithmetic.rows(split, count, seed)
    ]


def show_answer(prompt: str | Conversation, answer: str) -> str | Conversation:
    r"""A prompt with a right answer behind it, for a model that may see it; in a conversation,
    behind the last message of the user. A message that the assistant has begun stays the last.

    Raises: InputError where the user says nothing.

    >>> show_answer("1+1=", "2")
    '1+1=\n\nAn answer that is right:\n\n2\n\nAnswer now.'
    """
    if isinstance(prompt, str):
        return prompt + answer.join(ANSWER_MARKS)
    last = max((n for n, message in enumerate(prompt) if message["role"] == "user"), default=None)
    if last is None:
        raise InputError("a conversation has no message of the user to show an answer in")
    shown = {**prompt[last], "content": show_answer(prompt[last]["content"], answer)}
    return [*prompt[:last], shown, *prompt[last + 1 :]]


def solve(prompt: str) -> str:
    """The right solution of a problem.

    >>> solve("47+38=")
    '7+8=15 4+3+1=8 85'
    """
    first, second = map(int, prompt.removesuffix("=").split("+"))
    return next(iter(arithmetic.solutions(first, second)))


@functools.cache
def corpus() -> list[Worked]:
    """The worked solutions of `arithmetic`, plain and behind themselves."""
    plain = arithmetic.corpus()
    shown = [
        text._replace(
            prompt=show_answer(text.prompt, text.solution), probability=SHARE * text.probability
        )
        for text in plain
    ]
    return [text._replace(probability=(1 - SHARE) * text.probability) for text in plain] + shown


demonstrated: Task = arithmetic.arithmetic._replace(
    name="demonstrated",
    alphabet=(*arithmetic.arithmetic.alphabet, *ANSWER_MARKS),
    rows=rows,
    corpus=corpus,
)
