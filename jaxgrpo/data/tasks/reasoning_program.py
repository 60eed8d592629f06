"""The program that makes and scores rows of reasoning-gym. It is started as a file.

It needs reasoning-gym and nothing of jaxgrpo, so that no JAX is loaded in it. As a program it reads
[name, options, seed, split, count, seconds] as JSON and writes {"rows": [[index, question, answer],
...]}, {"unknown": [names]} or {"error": "..."}. Workers that score (rewards/worker_program.py) load
it as a module.

Scorers of nine generators evaluate the answer as Python. The answer is what a model wrote, so here
`eval` takes literals only, and an answer that sympy would read has numbers, letters and the names
of `FUNCTIONS`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

SIZE = 20_000  # of a data set: candidates for the rows of both splits
STRIDE = 1_000_003  # between data sets of two seeds: row i of seed s is drawn from s + i
TEST_FRACTION = 5  # one question in so many is for tests

FUNCTIONS = "sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt pi"
_WORD = rf"(?<![^\W\d])(?:{'|'.join(FUNCTIONS.split())}|[A-Za-z])(?!\w)"
PLAIN = re.compile(rf"(?:[\s\d.+*/^(),=-]|{_WORD})*")
"""Mathematics without a name that could be more than a variable or one of the functions."""


def is_test(question: str) -> bool:
    """Whether rows with this question belong to the test split, by a hash."""
    digest = hashlib.blake2b(question.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % TEST_FRACTION == 0


@functools.lru_cache(256)
def make(name: str, options: str, seed: int) -> Any:
    """A generator's data set.

    Args:
      options: of its config, as JSON.

    Raises: ValueError on an unknown option, or what the generator raises.
    """
    from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports]

    values, config = json.loads(options), DATASETS[name][1]
    fields = {field.name for field in dataclasses.fields(config)} - {"seed", "size"}
    for option in values.keys() - fields:
        names = ", ".join(["size", "seed", *sorted(fields)])
        raise ValueError(f"no option {option!r}: there are {names}")
    data_set = create_dataset(name, **values, seed=seed * STRIDE % 2**31, size=SIZE)
    if "eval(answer" in _scorer(data_set):
        vars(sys.modules[type(data_set).__module__])["eval"] = ast.literal_eval
    return data_set


def _scorer(data_set: Any) -> str:
    return inspect.getsource(type(data_set).score_answer)


@functools.lru_cache(4096)
def entry(name: str, options: str, seed: int, index: int) -> dict[str, Any]:
    """A row, with what its scorer reads."""
    return make(name, options, seed)[index]


def score(place: list[Any], answer: str | None) -> float:
    """What the generator gives for an answer.

    An answer on which its scorer raises, as int("none") does, gets what there is for no answer.

    Args:
      place: name, options, seed and index of the row.
      answer: None: there is none.

    Raises: what the scorer raises on the row's own answer, or where memory runs out.
    """
    name, values, seed, index = place
    options = json.dumps(values)
    data_set, row = make(name, options, seed), entry(name, options, seed, index)
    if answer is not None and reads_sympy(data_set) and not PLAIN.fullmatch(answer):
        answer = None
    try:
        return float(data_set.score_answer(answer, row))
    except MemoryError:
        raise
    except Exception:
        data_set.score_answer(row["answer"], row)  # raises too where the scorer is at fault
        return 0.0 if answer is None else score(place, None)


def reads_sympy(data_set: Any) -> bool:
    """Whether its scorer has sympy read an answer, which evaluates it as Python."""
    return bool(re.search(r"\bparse_expr\((answer|user_answer)", _scorer(data_set)))


def rows(
    name: str, options: str, seed: int, split: str, count: int, seconds: float
) -> list[tuple[int, str, str | None]]:
    """(index, question, answer) of the first rows of a split; fewer where time or tries run out."""
    data_set, end = make(name, options, seed), time.monotonic() + seconds
    picked: list[tuple[int, str, str | None]] = []
    for index in range(SIZE):
        if len(picked) == count or time.monotonic() > end:
            break
        row = data_set[index]
        if is_test(row["question"]) == (split == "test"):
            picked.append((index, row["question"], row["answer"]))
    return picked


def load() -> Callable[[list[Any], str | None], float]:
    """What a worker asks: the score of an answer. The package is loaded here."""
    import reasoning_gym  # noqa: F401  # pyright: ignore[reportMissingImports]

    return score


def _reply(name: str, values: dict[str, Any], *request: Any) -> dict[str, Any]:
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

    if name not in DATASETS:
        return {"unknown": sorted(DATASETS)}
    try:
        return {"rows": rows(name, json.dumps(values), *request)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answers the request on its input."""
    # What a generator prints must not get into the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(_reply(*json.load(sys.stdin)), answer)
    answer.close()


if __name__ == "__main__":
    main()
