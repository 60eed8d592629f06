"""From rows to prompts: which columns, in which words, as which tokens.

A template makes prompts of columns: "{question} Think step by step." The name between braces is a
column's, with any characters; "{{" and "}}" are braces.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import itertools
import numbers
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.errors import InputError, no_text, refusing
from jaxgrpo.data import chat as conversations
from jaxgrpo.data import images, limits, sources
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.sources import Located, Mixture, Row, Rows, Source
from jaxgrpo.data.written import text_of_value

SHOWN = 60  # characters of a text in a message
NO_PROMPT = ' (or to "" where an environment says what is asked)'
NO_ANSWER = ' (or to "" where no reward needs it)'
PLACEHOLDER: Any = [{"role": "user", "content": ""}]  # this very object, of data without prompts
DATES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64, np.timedelta64)
CHUNK, SECONDS = 256, 60.0  # rows that are tokenised at once, and the time for them

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")  # of a template


class FileRow(dict[str, Any]):
    """A row of a file."""

    line: int | None = None  # of the file, from 1; None: it has no lines


def name_row(rows: Sequence[Mapping[str, Any]], place: int) -> str:
    """Words for a row in a message: its number in the run, and its line in the file.

    Blank lines, and rows that are left out, are not counted in the number.
    """
    line = getattr(rows[place], "line", None)
    return f"row {place}" if line is None else f"row {place} (line {line})"


class PromptData(NamedTuple):
    """The prompts of a run. Row numbers everywhere else count `rows`."""

    rows: list[Row]  # all columns, with the prompt under "prompt" and the answer under "answer"
    encoded: list[np.ndarray]  # int32 [length], the tokens of each row's prompt
    dropped: int  # rows left out because their prompts are too long
    mixture: Mixture | None = None  # of several sources


def load_rows(
    source: Source | Rows,
    prompt: str,
    answer: str,
    split: str | None = None,
    completion: str | None = None,
) -> list[Row]:
    """The rows of a source, or of a Python object, each with its prompt also under "prompt" and its
    answer under "answer". All have the same columns; what a row lacks is None.

    Args:
      prompt: the column that holds the prompt, a text or a list of messages; or a template; or ""
        for a message of the user without a word.
      answer: the column that holds what the rewards compare with; "" if there is none.
      split: of a DatasetDict given from Python.
      completion: a further column of a CSV file that is taken as it is written.
    Raises: InputError if the source or a column does not exist, a line cannot be read, prompts
      or answers are of several kinds, a prompt has an image, or there are no rows.
    """
    table = source.columns_table if isinstance(source, Source) else "data"
    key, otherwise = f"{table}.prompt", NO_PROMPT if table == "data" else ""
    needed = placeholders(prompt, key) if is_template(prompt) else [prompt] * bool(prompt)
    if isinstance(source, Source):
        texts = [*needed, *filter(None, (answer, completion))]
        located = sources.read(source, text_columns=texts)
    else:
        located = sources.from_python(source, split)
    for where, row in located:
        for name in needed:
            _check_column(where, row, name, key, otherwise)
        if answer:
            _check_column(where, row, answer, f"{table}.answer", NO_ANSWER)
    columns = dict.fromkeys(name for _, row in located for name in row)
    rows: list[Row] = []
    for where, raw in located:
        row = FileRow({name: raw.get(name) for name in columns})
        line = where.rpartition(", line ")[2]
        row.line = int(line) if line.isdecimal() else None
        row["prompt"] = read_prompt(where, raw, prompt, needed, key)
        if answer:
            row["answer"] = None if sources.is_gap(raw[answer]) else raw[answer]
        _check_texts(where, row)
        images.refuse(where, row)
        if answer:
            _check_answer(where, row["answer"])
        rows.append(row)
    _check_one_kind(located, [row["prompt"] for row in rows], "prompts")
    if answer:
        _check_one_kind(located, [row["answer"] for row in rows], f"column {answer!r}")
    return rows


def join(parts: Mapping[str, list[Row]], answered: Collection[str]) -> list[Row]:
    """The rows of several sources, name -> rows as in `load_rows`, one source after the other. All
    have the same columns; what a row lacks is None.

    Args: answered: the sources that have a column of answers.
    Raises: InputError if prompts or answers are of several kinds.
    """
    numbered = {
        name: [(f"{name}, row {n}", row) for n, row in enumerate(rows)]
        for name, rows in parts.items()
    }
    located = list(itertools.chain.from_iterable(numbered.values()))
    columns = dict.fromkeys(name for _, row in located for name in row)
    rows = [{name: row.get(name) for name in columns} for _, row in located]
    _check_one_kind(located, [row["prompt"] for row in rows], "prompts")
    located = [entry for name in answered for entry in numbered[name]]
    _check_one_kind(located, [row["answer"] for _, row in located], "answers")
    return rows


def prepare(
    rows: list[Row],
    chat: Chat,
    max_prompt_tokens: int,
    too_long: str,
    mixture: Mixture | None = None,
) -> PromptData:
    """The rows whose prompts fit, with their tokens.

    Special tokens are those of the chat template, if there is one, else those that the tokenizer
    adds to a text: never both.

    Args:
      chat: how prompts are written out.
      max_prompt_tokens: the longest prompt, in tokens.
      too_long: "error", or "drop" for leaving longer ones out.
      mixture: what the rows are from, if that is several sources.
    Raises: InputError if prompts are empty, cannot be written out, or are longer, with how many
      and the longest.
    """
    encoded = encode(rows, chat)
    lengths = np.array([len(ids) for ids in encoded])
    over = np.flatnonzero(lengths > max_prompt_tokens)
    if over.size and (too_long == "error" or over.size == len(rows)):
        longest = int(lengths.argmax())
        remedy = "" if too_long == "drop" else ', or data.too_long to "drop"'
        raise InputError(
            f"{over.size} of {len(rows)} prompts are longer than rollout.max_prompt_tokens = "
            f"{max_prompt_tokens} (the longest, {name_row(rows, longest)}, has {lengths[longest]} "
            f"tokens): set it to {lengths[longest]} "
            f"(--set rollout.max_prompt_tokens={lengths[longest]}){remedy}"
        )
    fitting_rows = np.flatnonzero(lengths <= max_prompt_tokens).tolist()
    mixture = mixture.keeping(fitting_rows) if mixture else None
    return PromptData(
        [rows[i] for i in fitting_rows], [encoded[i] for i in fitting_rows], int(over.size), mixture
    )


def encode(rows: Sequence[Row], chat: Chat) -> list[np.ndarray]:
    """The tokens of each row's prompt as the model reads them, int32 [length].

    Raises: InputError as `encode_texts`, and if rows differ and all prompts are the same tokens.
    """
    tokens = encode_texts(rows, chat)
    _check_differ(rows, tokens, chat)
    return tokens


def encode_texts(rows: Sequence[Row], chat: Chat) -> list[np.ndarray]:
    """`encode` for rows that are no data set, whose prompts may all be the same tokens.

    Raises: InputError if a prompt is empty, gives no token, cannot be written out in full or has a
      token that the model does not have, if a text is written out already, or if the tokenizer
      ends each text.
    """
    prompts = {name_row(rows, place): row["prompt"] for place, row in enumerate(rows)}
    texts = [
        conversations.write(chat.for_row(row), prompt, where)
        for row, (where, prompt) in zip(rows, prompts.items(), strict=True)
    ]
    conversations.check_roles(chat, prompts)
    encoded = token_ids(chat.tokenizer, texts, "prompt", special=chat.template is None)
    tokens = [np.asarray(ids, np.int32) for ids in encoded]
    empty = [place for place, row in enumerate(rows) if not row["prompt"] or not len(tokens[place])]
    if empty:
        raise InputError(
            f"{len(empty)} of {len(rows)} prompts are empty or give no token (the first is "
            f"{name_row(rows, empty[0])}, {rows[empty[0]]['prompt']!r}): take them out of the data"
        )
    if chat.template is None:
        _check_begin(rows, texts, tokens, chat.tokenizer)
        _check_open(chat.tokenizer, texts[0], tokens[0])
    else:
        _check_unwritten(rows, chat)
    if chat.vocab_size is not None:
        check_tokens(rows, tokens, chat.tokenizer, chat.vocab_size, "prompt")
    return tokens


def token_ids(
    tokenizer: Any, texts: Sequence[str], column: str, special: bool = False
) -> list[list[int]]:
    """The tokens of texts. For CHUNK of them a tokenizer has SECONDS, and as much more for each
    million characters.

    Args:
      column: what the texts are, for messages: one is in each row.
      special: whether the tokenizer adds special tokens.

    Raises: InputError with the rows where it fails or takes longer.
    """
    ids: list[list[int]] = []
    for first in range(0, len(texts), CHUNK):
        chunk = list(texts[first : first + CHUNK])
        seconds = SECONDS * (1 + sum(map(len, chunk)) / 1e6)
        encode = functools.partial(tokenizer, chunk, add_special_tokens=special)
        where = f"{column} of row {first} to {first + len(chunk) - 1}: the tokenizer"
        remedy = "look at the patterns in its tokenizer.json, or take another model"
        with refusing(f"{where} fails ({{kind}}: {{reason}}): {remedy}"):
            try:
                ids += limits.left_after(seconds, encode)["input_ids"]
            except limits.TimedOut:
                raise InputError(f"{where} takes more than {seconds:.0f} s: {remedy}") from None
    return ids


def _check_differ(rows: Sequence[Row], tokens: Sequence[np.ndarray], chat: Chat) -> None:
    """Refuses rows that differ and whose prompts are all the same tokens."""
    differ = any(row["prompt"] != rows[0]["prompt"] for row in rows)
    if differ and all(np.array_equal(ids, tokens[0]) for ids in tokens):
        text = chat.tokenizer.decode(tokens[0])[:SHOWN]
        raise InputError(
            f"the {len(rows)} rows differ, but all prompts are the same {len(tokens[0])} tokens, "
            f"{text!r}: write them with characters that the tokenizer knows, or set "
            "data.chat_template"
        )


def _check_begin(
    rows: Sequence[Mapping[str, Any]],
    texts: Sequence[str],
    tokens: Sequence[np.ndarray],
    tokenizer: Any,
) -> None:
    """Refuses texts with the begin token that the tokenizer puts in front of them again."""
    mark, begin = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    for place, (text, ids) in enumerate(zip(texts, tokens, strict=True)):
        if mark and text.startswith(mark) and ids[:2].tolist() == [begin, begin]:
            raise InputError(
                f"{name_row(rows, place)}: the prompt begins with {mark!r}, and the tokenizer puts "
                "another one in front: take it out of the prompts"
            )


def _check_unwritten(rows: Sequence[Mapping[str, Any]], chat: Chat) -> None:
    """Refuses texts that a chat template has written: it would be written around them again."""
    texts = {
        place: row["prompt"].lstrip()
        for place, row in enumerate(rows)
        if isinstance(row["prompt"], str)
    }
    if not texts:
        return
    first = next(iter(texts))
    frame = conversations.write(chat.for_row(rows[first]), "jaxgrpo", name_row(rows, first))
    added = getattr(chat.tokenizer, "added_tokens_decoder", {}).values()
    marks = tuple(token.content for token in added if token.special and token.content in frame)
    for place, text in texts.items():
        if text.startswith(marks):
            mark = next(mark for mark in marks if text.startswith(mark))
            raise InputError(
                f"{name_row(rows, place)}: the prompt begins with {mark!r}, which {chat.name} "
                'writes around it: it is written out already; set data.chat_template = "none", or '
                "give what the user says alone, or messages"
            )


def _check_open(tokenizer: Any, text: str, ids: np.ndarray) -> None:
    """Refuses a tokenizer that puts its end token behind a text: a prompt would be a finished one.

    Args:
      ids: what it makes of the text.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    if ids[-1] == end and token_ids(tokenizer, [text], "prompt")[0][-1:] != [end]:
        raise InputError(
            f"the tokenizer puts its end token {tokenizer.eos_token!r} behind each prompt, as if "
            "that were finished: turn off add_eos_token in its config, or take the token out of "
            "the post_processor of tokenizer.json, in a copy; or set data.chat_template"
        )


def check_tokens(
    rows: Sequence[Mapping[str, Any]],
    encoded: Sequence[np.ndarray],
    tokenizer: Any,
    vocab_size: int,
    column: str,
) -> None:
    """Refuses tokens without an embedding. A tokenizer may have more tokens than its model (Gemma
    3's has one for images), which matters only where a text uses them.

    Raises: InputError with the first row that does.
    """
    for place, tokens in enumerate(encoded):
        if len(tokens) and (token := int(tokens.max())) >= vocab_size:
            raise InputError(
                f"{name_row(rows, place)}: the {column} has the token {token}, "
                f"{tokenizer.convert_ids_to_tokens(token)!r}, but config.json's vocab_size = "
                f"{vocab_size} gives embeddings to 0 to {vocab_size - 1}: take this text out of "
                "the row or the chat template, or take the tokenizer of this model"
            )


def _check_column(where: str, row: Row, name: str, key: str, otherwise: str) -> None:
    if name in row:
        return
    matches = difflib.get_close_matches(name, map(str, row), n=1)
    suggestion = f" (did you mean {matches[0]!r}?)" if matches else ""
    column_names = ", ".join(map(str, row)) or "none"
    if len(row) == 1 and any(mark in column_names for mark in ";\t|"):
        otherwise += ", or set data.delimiter to what is between the columns"
    raise InputError(
        f"{where}: no column {name!r}{suggestion}; columns there: {column_names}; set {key} "
        f"to one{otherwise}"
    )


def read_prompt(
    where: str, row: Row, prompt: str, needed: Sequence[str] = (), key: str = "data.prompt"
) -> Any:
    """A row's prompt: a text, or messages.

    Args:
      prompt: its column, or a template of the columns `needed`; "": as in `load_rows`.
      key: of the config that holds the template, for messages.

    Raises: InputError, which begins with `where`, for another value.
    """
    if not prompt:
        return PLACEHOLDER
    if is_template(prompt):
        for name in needed:
            is_written = isinstance(row[name], (str, numbers.Number))
            if not is_written or sources.is_gap(row[name]):
                kind = "NaN" if is_written else _kind(row[name])
                raise InputError(
                    f"{where}: column {name!r} holds {kind} where {key} needs a "
                    "text or a number: write one, or take the row out"
                )
        return fill(prompt, row)
    value = row[prompt]
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple, np.ndarray)):
        return conversations.read_messages(value, f"{where}: column {prompt!r}")
    raise InputError(
        f"{where}: column {prompt!r} holds {_kind(value)} where a prompt is a text or a list of "
        "messages: write the prompt as one string"
    )


def _check_texts(where: str, row: Row) -> None:
    """Refuses halves of surrogate pairs, which JSON can write and no tokenizer reads."""
    messages = row["prompt"] if isinstance(row["prompt"], list) else []
    texts = {"prompt": row["prompt"], "answer": row.get("answer")}
    texts |= {f"prompt[{place}]": entry.get("content") for place, entry in enumerate(messages)}
    for name, text in texts.items():
        if isinstance(text, str) and "\0" not in text and (problem := no_text(text)):
            raise InputError(f"{where}: {name} {text[:SHOWN]!a}: {problem}")


def _check_answer(where: str, answer: Any) -> None:
    """Refuses answers that no completion equals: bytes, infinite numbers, dates and times."""
    if isinstance(answer, bytes):
        raise InputError(f"{where}: answer {answer[:SHOWN]!r} holds bytes: write it as text")
    if isinstance(answer, (float, np.floating)) and np.isinf(answer):
        raise InputError(
            f"{where}: answer {answer} is infinite, or too large for a float: write null where "
            "there is none, or take the row out"
        )
    entries = answer if isinstance(answer, (list, tuple, np.ndarray)) else [answer]
    if dates := [entry for entry in entries if isinstance(entry, DATES)]:
        raise InputError(
            f"{where}: answer {dates[0]} is a {type(dates[0]).__name__}, and nothing says how its "
            "text was written: write it as text; or, where `datasets` took a text for a date, name "
            "the .jsonl file itself in place of its folder"
        )


def _check_one_kind(located: Sequence[Located], values: Sequence[Any], label: str) -> None:
    """Refuses values of several kinds, as texts in some rows and numbers in others."""
    first_places: dict[str, str] = {}  # kind -> the first row of it
    for (where, _), value in zip(located, values, strict=True):
        if value is not None:
            first_places.setdefault(_kind(value), where)
    if len(first_places) > 1:
        (first_kind, first_where), (kind, where), *_ = first_places.items()
        raise InputError(
            f"{where}: {label} of several kinds: {kind} here, {first_kind} in {first_where}: "
            "write one kind in all rows"
        )


def _kind(value: Any) -> str:
    """Words for the type of a value."""
    if isinstance(value, numbers.Number) and not isinstance(value, bool):
        return "a number"
    names: dict[str, tuple[type, ...]] = {
        "a text": (str,),
        "a list": (list, tuple, np.ndarray),
        "true or false": (bool, np.bool_),
        "nothing (null)": (type(None),),
    }
    matches = (name for name, kinds in names.items() if isinstance(value, kinds))
    return next(matches, f"a {type(value).__name__}")


def is_template(text: str) -> bool:
    """Whether a text is a template and no column's name: by its braces.

    >>> is_template("{question} Think."), is_template("question")
    (True, False)
    """
    return "{" in text or "}" in text


def placeholders(template: str, key: str = "data.prompt") -> list[str]:
    """The columns that a template names, each once.

    Args: key: of the config that holds it, for messages.
    Raises: InputError on a brace without its partner, or if no column is named.
    >>> placeholders("{a} of {{b}} and {c}")
    ['a', 'c']
    """
    names = []
    for piece in _PIECE.finditer(template):
        if piece.group() in ("{", "}") or piece.group(1) == "":
            fault = "names no column" if piece.group(1) == "" else "has no partner"
            raise InputError(
                f"{key} = {template!r}: the brace at character {piece.start()} {fault}: "
                "write {column} for a column's value, {{ or }} for a brace"
            )
        if piece.group(1) is not None:
            names.append(piece.group(1))
    if not names:
        raise InputError(
            f"{key} = {template!r} names no column, so all prompts would be the same: "
            "write {column} where a column's value stands"
        )
    return list(dict.fromkeys(names))


def fill(template: str, row: Mapping[str, Any]) -> str:
    """The template with the values of a row, which has all its columns.

    >>> fill("{{{n}}} + {n}", {"n": 3})
    '{3} + 3'
    """

    def value(piece: re.Match[str]) -> str:
        name = piece.group(1)
        return piece.group()[0] if name is None else text_of_value(row[name])

    return _PIECE.sub(value, template)
