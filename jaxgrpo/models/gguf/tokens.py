"""The tokenizer of a GGUF file, as one of Hugging Face.

The file has the tokens, their types and the merges or scores, and names how a text is divided
before: `tokenizer.ggml.pre` for byte-level BPE. The rules by those names are the ones of the
tokenizer.json files that the models were published with.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

from jaxgrpo.core.errors import InputError, refusing
from jaxgrpo.models.gguf.files import OTHERWISE, Gguf

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How GPT-4's kind of tokenizer divides a text: endings, words, numbers of so many digits, signs,
line ends, spaces."""
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
    "sep_token": "seperator_token_id",  # sic
}
"""What a tokenizer calls a token -> the key of its id."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""general.sampling.* -> the field of generation_config.json."""


class Kind(enum.IntEnum):
    """The types of tokens in tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read(gguf: Gguf, max_length: int) -> Any:
    """The tokenizer of a file, with its chat templates.

    Args:
      max_length: tokens of the longest text that the model was made for.

    Raises: InputError on a kind of tokenizer or a pre-tokenizer that is not read.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = _tokens(gguf)
    with refusing(
        f"{gguf.path}: its tokenizer cannot be built ({{kind}}: {{reason}}): fetch it again"
    ):
        backend = _backend(gguf, tokens)
        special_tokens = {
            name: tokens[number]
            for name, key in SPECIAL.items()
            if 0 <= (number := _setting(gguf, key, -1)) < len(tokens)
        }
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            model_max_length=max_length,
            clean_up_tokenization_spaces=False,
            **special_tokens,
        )
    tokenizer.chat_template = _templates(gguf)
    return tokenizer


def kind(gguf: Gguf) -> str:
    """What kind of tokenizer a file has, in words."""
    if gguf.metadata.get("tokenizer.huggingface.json"):
        return "as its tokenizer.json"
    model, pre = _setting(gguf, "model", None), _setting(gguf, "pre", None)
    return f"byte-level BPE ({pre})" if model == "gpt2" else "SentencePiece"


def generation_fields(gguf: Gguf) -> dict[str, Any]:
    """The fields of generation_config.json: all tokens that end an answer, and how to draw."""
    ends = dict.fromkeys(_setting(gguf, key, None) for key in ENDS)
    tokens = [token for token in ends if token is not None]
    drawn = {
        field: gguf.metadata[f"general.sampling.{key}"]
        for key, field in SAMPLING.items()
        if f"general.sampling.{key}" in gguf.metadata
    }
    return {
        **({"eos_token_id": tokens[0] if len(tokens) == 1 else tokens} if tokens else {}),
        **({"do_sample": True, **drawn} if drawn else {}),
    }


def _setting(gguf: Gguf, key: str, default: Any) -> Any:
    return gguf.metadata.get(f"tokenizer.ggml.{key}", default)


def _tokens(gguf: Gguf) -> list[str]:
    tokens, kinds = _setting(gguf, "tokens", None), _setting(gguf, "token_type", None)
    if not isinstance(tokens, list) or not isinstance(kinds, list) or len(tokens) != len(kinds):
        raise InputError(
            f"{gguf.path}: expected tokenizer.ggml.tokens and as many tokenizer.ggml.token_type: "
            "take a file with its tokenizer"
        )
    return tokens


def _templates(gguf: Gguf) -> str | dict[str, str] | None:
    """The chat template; where there are several, by name."""
    start = "tokenizer.chat_template"
    first = gguf.metadata.get(start)
    templates = {
        key.removeprefix(f"{start}."): text
        for key, text in gguf.metadata.items()
        if key.startswith(f"{start}.")
    }
    return {"default": first, **templates} if templates and first else first


def _backend(gguf: Gguf, tokens: list[str]) -> Any:
    """The tokenizer as the library `tokenizers` has it."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer_json = gguf.metadata.get("tokenizer.huggingface.json")
    if tokenizer_json:
        return Tokenizer.from_str(tokenizer_json)
    model = _setting(gguf, "model", None)
    if model not in MODELS:
        raise InputError(
            f"{gguf.path}: tokenizer.ggml.model = {model!r} is not read, known are "
            f"{', '.join(sorted(MODELS))}: {OTHERWISE}"
        )
    backend = MODELS[model](gguf, tokens)
    token_types = _setting(gguf, "token_type", [])
    for added_type in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED):
        special = added_type != Kind.USER_DEFINED
        texts = [
            text
            for text, token_type in zip(tokens, token_types, strict=True)
            if token_type == added_type
        ]
        backend.add_tokens([AddedToken(text, normalized=False, special=special) for text in texts])
    return backend


def _byte_level(gguf: Gguf, tokens: list[str]) -> Any:
    """BPE of bytes, as GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    name = _setting(gguf, "pre", "qwen2" if gguf.architecture.startswith("qwen") else None)
    if name not in PRE_TOKENIZERS:
        raise InputError(
            f"{gguf.path}: tokenizer.ggml.pre = {name!r} is not read, known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}: {OTHERWISE}"
        )
    kinds, last = _setting(gguf, "token_type", []), len(tokens)
    while last and kinds[last - 1] == Kind.UNUSED:  # up to a round size of the embedding
        last -= 1
    vocabulary = {text: number for number, text in enumerate(tokens[:last])}
    merges = [tuple(pair.split(" ", 1)) for pair in _setting(gguf, "merges", [])]
    is_llama = name in LLAMA3_NAMES
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=is_llama))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = _around(gguf, tokens, begins=is_llama)
    return backend


def _sentencepiece(gguf: Gguf, tokens: list[str]) -> Any:
    """BPE of characters with scores, as SentencePiece's: the better piece is joined first."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    vocabulary = {text: number for number, text in enumerate(tokens)}
    scores = dict(zip(tokens, _setting(gguf, "scores", []), strict=True))
    kinds = dict(zip(tokens, _setting(gguf, "token_type", []), strict=True))
    joined = {
        text: score
        for text, score in scores.items()
        if kinds[text] in (Kind.NORMAL, Kind.USER_DEFINED)
    }
    unknown = _setting(gguf, "unknown_token_id", 0)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=generate_merges(vocabulary, joined),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", "▁")
    ending = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if _setting(gguf, "add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        ending.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(ending)
    backend.post_processor = _around(gguf, tokens, begins=True)
    return backend


def _around(gguf: Gguf, tokens: list[str], begins: bool) -> Any:
    """What puts the begin and the end token around a text, where the model wants them.

    Args:
      begins: whether there is a begin token if the file does not say.
    """
    from tokenizers import processors

    first = ("bos_token", _setting(gguf, "bos_token_id", None))
    last = ("eos_token", _setting(gguf, "eos_token_id", None))
    first = first if _setting(gguf, "add_bos_token", begins) else (None, None)
    last = last if _setting(gguf, "add_eos_token", False) else (None, None)
    ids = [number for _, number in (first, last) if number is not None]
    if not ids:
        return processors.ByteLevel(trim_offsets=False)
    text = " ".join(
        [
            *([tokens[first[1]]] if first[1] is not None else []),
            "$A",
            *([tokens[last[1]]] if last[1] is not None else []),
        ]
    )
    special = [(tokens[number], number) for number in ids]
    return processors.TemplateProcessing(single=text, special_tokens=special)


def _digits_alone() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _gpt2() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _divided(digits: str) -> Callable[[], Any]:
    def build() -> Any:
        from tokenizers import Regex, pre_tokenizers

        pattern = Regex(SPLIT.format(digits=digits))
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
PRE_TOKENIZERS: Mapping[Any, Callable[[], Any]] = {
    **dict.fromkeys(LLAMA3_NAMES, _divided("{1,3}")),
    "qwen2": _divided(""),
    "smollm": _digits_alone,
    "gpt-2": _gpt2,
}
"""tokenizer.ggml.pre -> what divides a text before its parts are merged."""
MODELS: Mapping[Any, Callable[[Gguf, list[str]], Any]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
"""tokenizer.ggml.model -> what builds it."""
