"""Rows of prompts and answers, and their tokens.

A source is told by its form: "task:NAME:SPLIT" is a built-in task, a name that ends in ".jsonl" a
file with one JSON object per line. Both give the same rows, and nothing after this knows of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrpo import tasks
from jaxgrpo.errors import InputError

Row = dict[str, Any]


def load_rows(
    path: str | os.PathLike[str], prompt: str = "prompt", answer: str = "answer"
) -> list[Row]:
    """The rows of a source, each with all its columns, its prompt also under "prompt" and its
    answer under "answer".

    Args:
      path: "task:NAME:SPLIT" or a .jsonl file.
      prompt: the column that holds the prompt, a text.
      answer: the column that holds what the rewards compare with; "" where there is none.
    Raises: InputError where the source or a column does not exist, a line cannot be read, a prompt
      is no text, or there are no rows.
    """
    path = os.fspath(path)
    if path.startswith("task:"):
        located = ((f"{path}, row {i}", row) for i, row in enumerate(tasks.load(path)))
    elif path.endswith(".jsonl"):
        located = _jsonl(Path(path))
    else:
        raise InputError(
            f"data.path = {path!r} is no source of rows: give task:NAME:SPLIT "
            "(task:arithmetic:train) or a .jsonl file with one JSON object per line"
        )
    rows = [_row(where, raw, prompt, answer) for where, raw in located]
    if not rows:
        raise InputError(f"data.path = {path!r} holds no rows: give a source with at least one")
    return rows


def _jsonl(file: Path) -> Iterator[tuple[str, Row]]:
    """(where, object) of each line that is not blank."""
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise InputError(f"data.path = {str(file)!r} {what} (looked for {file.absolute()})")
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                raw = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                # Not the error's own text: its "line 1" is not the file's.
                reason = getattr(error, "msg", "bytes that are no UTF-8")
                raise InputError(f"{where}: not JSON ({reason}): mend the line") from error
            if not isinstance(raw, dict):
                kind = type(raw).__name__
                raise InputError(f"{where}: a JSON {kind}: write an object, {{column: value}}")
            yield where, raw


def _row(where: str, raw: Row, prompt: str, answer: str) -> Row:
    for key, column in (("data.prompt", prompt), ("data.answer", answer)):
        if column not in raw and not (key == "data.answer" and column == ""):
            there = ", ".join(raw) or "none"
            none = ' (or to "" where no reward needs it)' if key == "data.answer" else ""
            raise InputError(
                f"{where}: no column {column!r}; columns there: {there}; set {key} to one{none}"
            )
    if not isinstance(raw[prompt], str):
        raise InputError(
            f"{where}: column {prompt!r} holds {type(raw[prompt]).__name__} where a prompt is a "
            "text: write the prompt as one string"
        )
    row = {**raw, "prompt": raw[prompt]}
    if answer:
        row["answer"] = raw[answer]
    return row


def encode_prompts(
    rows: Sequence[Row], tokenizer: Callable[..., Any], max_prompt_tokens: int
) -> list[np.ndarray]:
    """The tokens of each row's prompt, int32 [length], as the tokenizer gives them for a text.

    Special tokens are the tokenizer's own: a model that wants a begin token has a tokenizer that
    adds it.

    Args:
      tokenizer: a transformers tokenizer.
      max_prompt_tokens: the longest prompt, in tokens.
    Raises: InputError where prompts are longer, with how many and the longest, or empty.
    """
    encoded = tokenizer([row["prompt"] for row in rows])["input_ids"]
    tokens = [np.asarray(ids, np.int32) for ids in encoded]
    lengths = np.array([len(ids) for ids in tokens])
    empty = np.flatnonzero((lengths == 0) | np.array([not row["prompt"] for row in rows]))
    if empty.size:
        raise InputError(
            f"{empty.size} of {len(rows)} prompts are empty or give no token (the first is row "
            f"{empty[0]}, {rows[empty[0]]['prompt']!r}): take them out of data.path"
        )
    over = np.flatnonzero(lengths > max_prompt_tokens)
    if over.size:
        longest = int(lengths.argmax())
        raise InputError(
            f"{over.size} of {len(rows)} prompts are longer than rollout.max_prompt_tokens = "
            f"{max_prompt_tokens} (the longest, row {longest}, has {lengths[longest]} tokens): set "
            f"it to {lengths[longest]}, or take them out of data.path"
        )
    return tokens
