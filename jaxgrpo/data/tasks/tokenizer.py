"""A tokenizer of single characters, for the base models of generated tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet`, after the pad, end and unknown tokens.

    Encoding adds no special token; decoding joins the characters and puts nothing between them.
    A character outside the alphabet becomes the unknown token.

    Raises: ValueError where a character stands twice in the alphabet.
    >>> tokenizer = character_tokenizer("0123456789+= ")
    >>> tokenizer.decode(tokenizer("4+7= 11")["input_ids"])
    '4+7= 11'
    """
    # Lazily: naming a task or scoring it needs no tokenizer.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if len(set(alphabet)) < len(alphabet):
        raise ValueError(f"alphabet {alphabet!r} holds a character twice: name each once")
    words = [PAD, END, UNKNOWN, *alphabet]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
