"""The fields of a query: what is drawn, and what would be drawn differently than it says.

A field that would change what is drawn, and is not served, is refused and not ignored. So is one
that is not known.

Source: OpenAI's API reference, and the protocol of vLLM 0.32, whose names these are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jaxgrpo.core.errors import suggest
from jaxgrpo.environments.serving.server import Refusal

SAMPLES = 128  # of a prompt, at most

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "stream": (False,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "top_logprobs": (0,),
    "detokenize": (True, False),
    "output_mode": ("tokens",),
    "bad_words": ([],),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "functions": ([],),
    "mm_processor_kwargs": ({},),
}
"""Field -> the values with which it changes nothing; `null` is one for all of them."""

HARMLESS = frozenset(
    [
        *("user", "metadata", "store", "service_tier", "priority", "cache_salt", "request_id"),
        *("stream_options", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        "routed_experts_prompt_start",
    ]
)
"""Fields that never change what is drawn."""

SAMPLING = frozenset(
    [
        *("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"),
        *("stop", "stop_token_ids", "skip_special_tokens", "logprobs"),
    ]
)
"""Fields that are read, of every route that draws."""

REASONS = {
    "stream": "ids come in one piece",
    "top_logprobs": "the log-prob of the drawn token is known, and of no other one",
    "logprobs": "the log-prob of the drawn token is known, and of no other one",
    "tool_choice": "where no tool may be called, leave the tools out",
}


class Limits(NamedTuple):
    """What a model and an engine allow."""

    vocab_size: int
    longest: int  # tokens of a prompt and its completion
    max_tokens: int  # of a completion
    temperature: float
    top_p: float
    top_k: int  # 0: all
    min_p: float
    is_turn: bool = False
    """a completion is a turn of a sample: what is left of this bounds it, and no query ends it"""
    ends: frozenset[int] = frozenset()  # tokens that end a turn anyway
    stop_strings: tuple[str, ...] = ()  # that do, too, and are cut off its text


class Wish(NamedTuple):
    """What is to be drawn."""

    prompts: list[list[int]]
    samples: int  # of each prompt
    max_tokens: int
    is_greedy: bool
    seed: int | None
    stop: tuple[str, ...] = ()  # texts that end a completion
    stop_tokens: tuple[int, ...] = ()  # beside the model's


class Completion(NamedTuple):
    """What was drawn."""

    tokens: list[int]  # with the one that ended it
    logp: list[float]  # nats, of the distribution drawn from
    finish: str  # "stop" or "length"
    stop: str | int | None = None  # of the query, that ended it
    version: int = 0  # of the parameters


class Fields:
    """Reads the fields of a document, each with its problem.

    Args:
      names: fields that the route reads beside SAMPLING.
    """

    def __init__(self, document: Mapping[str, Any], names: Collection[str]):
        self.values: dict[str, Any] = {k: v for k, v in document.items() if v is not None}
        readable = SAMPLING | set(names)
        for name, value in self.values.items():
            if name in readable or name in HARMLESS:
                continue
            if name not in NEUTRAL:
                hint = suggest(name, readable | NEUTRAL.keys() | HARMLESS).partition(" Known")[0]
                hint = hint if hint.startswith("did") else "leave it out"
                raise Refusal(400, f"{name}: this server does not know it; {hint}", name)
            if not any(_is_same(value, allowed) for allowed in NEUTRAL[name]):
                self.refuse(name, " or ".join(map(repr, NEUTRAL[name])))

    def refuse(self, name: str, allowed: str) -> NoReturn:
        """Raises: Refusal of the field's value."""
        reason = REASONS.get(name)
        because = f" ({reason})" if reason else ""
        value = repr(self.values[name])
        value = value if len(value) <= 80 else f"{value[:77]}..."
        raise Refusal(400, f"{name} = {value}: expected {allowed}{because}, or null", name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def integer(self, name: str, low: int, high: int, default: int) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, f"a whole number from {low} to {high}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text, or a list of texts, none empty."""
        value = self.values.get(name, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
            self.refuse(name, "a text or a list of texts, none empty")
        return tuple(texts)

    def tokens(self, name: str, value: Any, vocab_size: int) -> list[int]:
        """A list of ids, at least one."""
        if not isinstance(value, list) or not value:
            self.refuse(name, "ids of tokens, at least one")
        for token in value:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise Refusal(400, f"{name}: {token!r} is none of the {vocab_size} tokens", name)
        return value

    def asks_logp(self, most: int = 0) -> bool:
        """Whether `logprobs` asks for log-probs: true, or a number up to `most`."""
        value = self.values.get("logprobs", False)
        if not isinstance(value, bool) and not (type(value) is int and 0 <= value <= most):
            self.refuse("logprobs", "true or 0" + " or 1" * most)
        return value is not False


def read_wish(
    fields: Fields, prompts: list[list[int]], limits: Limits, max_tokens: int | None
) -> Wish:
    """What a query asks for.

    Args:
      max_tokens: where the query says nothing; None: all that fit.

    Raises: Refusal where that cannot be drawn.
    """
    values, longest_prompt = fields.values, max(map(len, prompts))
    room = limits.longest - longest_prompt
    if room < 1:
        raise Refusal(
            400,
            f"the prompt has {longest_prompt} tokens, and with a completion at most "
            f"{limits.longest} are allowed (max_model_len, the maximum context length): shorten it",
        )
    fitting = min(room, limits.max_tokens)
    count = fields.integer("max_tokens", 1, 2**31, min(fitting, max_tokens or fitting))
    if limits.is_turn:
        count = min(count, fitting)
    if count > fitting:
        raise Refusal(
            400,
            f"max_tokens = {count}: at most {fitting} behind a prompt of {longest_prompt} tokens; "
            f"a completion has at most {limits.max_tokens}, and prompt and completion together "
            f"{limits.longest}",
            "max_tokens",
        )
    stop, stop_tokens = fields.texts("stop"), values.get("stop_token_ids") or []
    stop_tokens = stop_tokens and fields.tokens("stop_token_ids", stop_tokens, limits.vocab_size)
    ends_turns = {*stop} <= {*limits.stop_strings} and limits.ends.issuperset(stop_tokens)
    if limits.is_turn and not ends_turns:
        raise Refusal(400, "stop: what ends a turn is part of the policy; leave it out", "stop")
    seed = values.get("seed")
    if seed is not None:
        seed = fields.integer("seed", -(2**63), 2**64 - 1, 0)
    return Wish(
        prompts,
        fields.integer("n", 1, SAMPLES, 1),
        count,
        _is_greedy(fields, limits),
        seed,
        stop,
        () if limits.is_turn else tuple(stop_tokens),
    )


def _is_greedy(fields: Fields, limits: Limits) -> bool:
    """Whether the likeliest tokens are asked for.

    Raises: Refusal where another distribution is asked for than the engine draws from.
    """
    values = fields.values
    temperature = values.get("temperature", limits.temperature)
    if _is_number(temperature) and temperature == 0:
        return True
    allowed = {
        "temperature": (limits.temperature,),
        "top_p": (limits.top_p,),
        "top_k": (limits.top_k, *((-1,) if limits.top_k == 0 else ())),
        "min_p": (limits.min_p,),
    }
    for name, numbers in allowed.items():
        value = values.get(name, numbers[0])
        is_equal = _is_number(value) and any(math.isclose(value, number) for number in numbers)
        if not is_equal:
            also = ", or 0 for the likeliest tokens" if name == "temperature" else ""
            fields.refuse(name, f"{numbers[0]:g}, with which all samples here are drawn{also}")
    return False


def read_prompts(fields: Fields, limits: Limits, encode: Any) -> list[list[int]]:
    """The prompts of a text completion: a text, ids, or a list of one of both.

    Args:
      encode: text -> ids.
    """
    value = fields.values.get("prompt")
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise Refusal(400, "prompt: expected a text, ids of tokens, or a list of these", "prompt")
    if type(value[0]) is int:
        value = [value]
    if len(value) > SAMPLES:
        raise Refusal(400, f"prompt: {len(value)} prompts, at most {SAMPLES}", "prompt")
    ids: Sequence[Any] = [encode(part) if isinstance(part, str) else part for part in value]
    return [fields.tokens("prompt", part, limits.vocab_size) for part in ids]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_same(value: Any, allowed: Any) -> bool:
    """Equality, in which true is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
