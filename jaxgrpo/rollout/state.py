"""The settings of sampling, and what decoding changes: samples, queue of prompts, slots, caches.

D bins, shards of the batch, have N slots each, P prompts, M = P x G samples of at most T tokens,
and a cache with a row for each of A prompts. Sample s belongs to the bin's prompt s // G.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from jaxgrpo.core.types import register
from jaxgrpo.rollout.drawing import Distribution
from jaxgrpo.rollout.stopping import EarlyStop, StopStrings


class SamplingSettings(NamedTuple):
    """What is fixed while a program samples."""

    group_size: int
    max_completion_tokens: int
    temperature: float  # 0: the likeliest token
    stop_tokens: tuple[int, ...]
    pad_token: int
    segment_tokens: int = 16  # tokens decoded between two looks of the host
    purpose: int = 0  # folded into the key: evaluation never repeats training's draws
    top_k: int = 0  # draw from the top_k likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the fewest likeliest tokens of this probability
    min_p: float = 0.0  # draw from tokens of this share of the likeliest one's probability
    min_completion_tokens: int = 0  # before so many no stop token is drawn
    slots: int = 0  # samples decoded at once, over all devices; 0: all
    untempered: bool = False  # give log-probs of the model itself too, at temperature 1
    stop_strings: StopStrings | None = None
    early_stop: EarlyStop | None = None
    kv_cache_dtype: str = "auto"  # that keys and values are kept in; "auto": the model's
    greedy: int = 0  # of each group so many, the last ones, take the likeliest tokens
    calls: int = 0  # of a sampler, which decide what is worth compiling; 0: very many

    @property
    def distribution(self) -> Distribution:
        return Distribution(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def is_cut(self) -> bool:
        """Whether some tokens of the model's distribution are never drawn."""
        return bool(self.top_k or self.top_p < 1 or self.min_p or self.min_completion_tokens)


class Finished(NamedTuple):
    """Groups that have ended while others decode, on the host."""

    places: np.ndarray  # [n] int, which of the call's prompts
    tokens: np.ndarray  # [n, G, T] int32
    mask: np.ndarray  # [n, G, T] bool, as `Rollouts.token_mask`


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a call: what they begin with, and what they are so far. M = prompts x G."""

    keys: Array  # [D, M, 2] uint32
    forced: Array | None  # [D, M, F] int32, -1 behind the last forced token
    tokens: Array  # [D, M, T] int32
    logp: Array  # [D, M, T] float32
    untempered: Array | None  # [D, M, T] float32
    confidence: Array | None  # [D, M, T] float32, of all drawn tokens up to this one, summed
    length: Array  # [D, M] int32, tokens so far
    stopped: Array  # [D, M] bool, by a stop token or string
    ended: Array  # [D, M] bool, by anything


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Queue:
    """The prompts of each bin in the order in which their samples begin."""

    row: Array  # [D, P] int32, of the cache
    last: Array  # [D, P] int32, the last prompt token
    ready: Array  # [D] int32, prompts whose rows are filled
    next: Array  # [D] int32, the sample that begins next


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """All that decoding changes; donated from one segment to the next."""

    sample: Array  # [D, N] int32, the sample in each slot
    live: Array  # [D, N] bool
    index: Array  # [D, N] int32, tokens of the sample so far
    token: Array  # [D, N] int32, the token fed next
    samples: Samples
    queue: Queue
    row_length: Array  # [D, A] int32, tokens in each row of the prompts' cache
    memory: Any  # per layer: (prompts', slots'), Cache and Ring of models.cache
    clock: Array  # [] int32, decoding steps so far
    slot_steps: Array  # [] int32, decoding steps times slots
