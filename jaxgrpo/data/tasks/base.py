"""What a generated task is, and the tokenizer of single characters for its base models."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.written import text_of_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"


class Worked(NamedTuple):
    """One text of a warm start, and the probability that a draw from the corpus is this one."""

    prompt: str
    solution: str
    probability: float


class Task(NamedTuple):
    """A generated, verifiable task. All its randomness comes from the seed of `rows`."""

    name: str
    alphabet: Sequence[str]  # every character of its prompts and solutions, and words such as tags
    levels: tuple[int, ...]  # values of the column "level", easiest first
    splits: Mapping[str, int]  # split -> rows taken if no count is given
    rows: Callable[[str, int, int], list[dict[str, Any]]]  # (split, count, seed)
    corpus: Callable[[], list[Worked]]  # of the supervised warm start; holds no test problem
    extract_answer: Callable[[str], str]  # completion -> the answer that it ends with
    score: Callable[..., list[float | None]]  # (completions, answer, **columns), 1.0 iff right
    chat_template: str | None = None  # of its base models; None: prompts are texts
    steps: int = 800  # of the supervised warm start
    learning_rate: float = 1e-2  # of it


def refuse_unknown_split(task: str, split: str, splits: Iterable[str]) -> None:
    """Raises: InputError where a task has no such split."""
    if split not in splits:
        raise InputError(f"{task} has no split {split!r}: take {' or '.join(splits)}")


def is_for_tests(text: str) -> bool:
    """Whether what a text names belongs to the test split, as one in five does, by a hash."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 5 == 0


def ending(pattern: str, completion: str) -> str:
    r"""What a completion ends with that matches a pattern, before space; "" if nothing does.

    Args:
      pattern: one that matches the same texts backwards.

    >>> ending(r"\d+", "it is 38 <end>"), ending(r"\d+", "38 it is")
    ('38', '')
    """
    # From the end: a search from the front takes the square of the length of a run that does not.
    match = re.match(pattern, completion.removesuffix(END).rstrip()[::-1])
    return match.group()[::-1] if match else ""


def gold_text(gold: object) -> str:
    """A row's answer as a text, a number as it is read; "" where a row has none.

    >>> gold_text("085"), gold_text(85.0), gold_text(None), gold_text(float("nan"))
    ('085', '85', '', '')
    """
    is_nan = gold != gold
    return "" if gold is None or is_nan else text_of_value(gold)


def rights(answers: Iterable[str], golds: Iterable[object]) -> list[float | None]:
    """1.0 for each answer that is its gold one, character by character, else 0.0; None, which is
    not scored, where there is no gold one, or it is "".

    >>> rights(["85", "85", "", ""], [85.0, "86", "", None])
    [1.0, 0.0, None, None]
    """
    pairs = zip(answers, map(gold_text, golds), strict=True)
    return [float(answer == gold) if gold else None for answer, gold in pairs]


def token_ids(alphabet: Sequence[str]) -> dict[str, int]:
    """The tokens of an alphabet, as `character_tokenizer` has them.

    >>> token_ids("01")
    {'<pad>': 0, '<end>': 1, '<unknown>': 2, '0': 3, '1': 4}
    """
    return {word: number for number, word in enumerate([PAD, END, UNKNOWN, *alphabet])}


def character_tokenizer(
    alphabet: Sequence[str], chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """One token per character or word of `alphabet`, after the pad, end and unknown tokens.

    Encoding adds no special token; decoding joins the characters and puts nothing between them.
    A character outside the alphabet becomes the unknown token.

    Raises: ValueError if the alphabet holds a character twice.
    >>> tokenizer = character_tokenizer("0123456789+= ")
    >>> tokenizer.decode(tokenizer("4+7= 11")["input_ids"])
    '4+7= 11'
    """
    # Lazily: naming a task or scoring it needs no tokenizer.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if len(set(alphabet)) < len(alphabet):
        raise ValueError(f"alphabet {alphabet!r} holds a character twice: name each once")
    tokenizer = Tokenizer(models.WordLevel(vocab=token_ids(alphabet), unk_token=UNKNOWN))
    longer = "".join(f"{re.escape(word)}|" for word in alphabet if len(word) > 1)
    pieces = Regex(rf"{longer}[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )
