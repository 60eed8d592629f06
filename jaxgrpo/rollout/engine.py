"""What draws tokens: the interface of every engine, and what goes into it and comes out.

Training, evaluation, probe and `jaxgrpo sample` submit requests and poll for turns. Which engine
answers is nothing to them: `slots.driver.SlotEngine` decodes in this process, and one that
asks another process keeps to the same functions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxgrpo.core import records
from jaxgrpo.core.records import EXPERTS, SUPPORT
from jaxgrpo.core.types import Params
from jaxgrpo.environments.rules import Answering, State
from jaxgrpo.models import routing
from jaxgrpo.models.api import LayerKind
from jaxgrpo.rollout.stopping import EarlyStop, Interruption, StopStrings

Reason = Literal["end", "length", "string", "confidence"]
"""What ended a turn: a token that ends samples, the limit, a stop string, too little confidence"""

COMPLETE: frozenset[Reason] = frozenset({"end", "string"})
"""The reasons of turns that ended by themselves. The others were truncated."""


SEGMENT, SEGMENT_OF_TURNS = 16, 4
"""Tokens of a segment by default, and where the host answers turns: there a sample waits for its
next slot. With 16 three turns took 1.87 times the slot-steps of one, with 4 1.2 times
(benchmarks.turns)."""


class SamplingSettings(NamedTuple):
    """What an engine draws all its samples by."""

    max_completion_tokens: int
    temperature: float  # 0: the likeliest token
    stop_tokens: tuple[int, ...]
    pad_token: int
    segment_tokens: int = SEGMENT  # decoded between two looks of the host
    top_k: int = 0  # draw from the top_k likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the fewest likeliest tokens of this probability
    min_p: float = 0.0  # draw from tokens of this share of the likeliest one's probability
    min_completion_tokens: int = 0  # before so many no stop token is drawn
    support: int = 0
    """give the ids of the tokens that each is drawn among, at most so many: of more that are
    equally likely those of lower ids are drawn from; 0: give none"""
    slots: int = 0  # samples decoded at once, over all devices; 0: all, or as many as fit
    stop_strings: StopStrings | None = None
    early_stop: EarlyStop | None = None
    interruption: Interruption | None = None  # asked for by who makes requests: an engine has turns
    attention: str = "auto"  # `model.attention`: with "xla" decoding takes no kernels
    kv_cache_dtype: str = "auto"  # that keys and values are kept in; "auto": the model's
    weight_dtype: str = "auto"  # of the layers' kernels; "auto": the model's
    max_turns: int = 1  # that a sample is drawn in; above 1 each is given back once it has ended
    own_rows: bool = False  # a row for each sample: some begin with their own tokens
    answering: Answering | None = None  # how the engine answers turns by itself; `max_turns` is 1
    records_experts: bool = True  # of a model that has some; updates alone read them

    @property
    def turn_tokens(self) -> int:
        """Tokens that rows have beside those of prompts."""
        return self.max_completion_tokens if self.own_rows else 0

    @property
    def is_cut(self) -> bool:
        """Whether tokens are never drawn, and it is not recorded which."""
        cuts = self.top_k or self.top_p < 1 or self.min_p or self.min_completion_tokens
        return bool(cuts) and not self.support


class Request(NamedTuple):
    """One turn of one sample."""

    ordinal: int  # of its prompt; requests of one ordinal and prompt share the prompt's keys
    sample: int  # of that prompt
    tokens: np.ndarray  # int32: the prompt, and all of the sample before this turn
    offset: int  # how many of the tokens are the sample's
    limit: int  # new tokens at most, 1 or more
    key: np.ndarray  # [2] uint32; the sample's token n is drawn with fold_in(key, n)
    is_greedy: bool = False  # it takes the likeliest tokens
    threshold: float = -np.inf  # nats; less confidence than that ends it, as `EarlyStop` says
    chunked: bool = False
    """the sample's tokens are computed in chunks, as its prompt's are, and not fed one by one"""
    state: State = None  # of `SamplingSettings.answering`, as `Rules.reset` gives it
    drawn: int = 0
    """how many of the last tokens were drawn, in another sample: a stop string may begin in them"""
    prompt_tail: int = 0
    """how many of `offset` are the end of a prompt that no row has room for: they take the sample's
    room, and its first token comes behind them"""


class Answered(NamedTuple):
    """The turns of a sample that the engine answered by itself, in tokens of the request."""

    begins: np.ndarray  # [k] int32, where each turn begins
    ends: np.ndarray  # [k] int32; between an end and the next begin stands a reply
    rewards: np.ndarray  # [j] float32, of those that were answered: all, or all but the last
    is_done: bool  # the environment has ended it


class Turn(NamedTuple):
    """The new tokens of a request, n of them, at least one."""

    ordinal: int
    sample: int
    tokens: np.ndarray  # [n] int32, the end token included
    logp: np.ndarray  # [n] float32, of the distribution drawn from
    version: np.ndarray  # [n] int32, of the parameters that drew each token
    reason: Reason
    confidence: np.ndarray | None = None  # [n] nats, of each token; with `early_stop` alone
    answered: Answered | None = None  # with `answering` alone; replies are among the tokens
    experts: np.ndarray | None = None  # [n, layers, k], of what each token was drawn from
    support: np.ndarray | None = None
    """[n, K], the tokens that each was drawn among, -1 behind the last and where all were; with
    `SamplingSettings.support` alone"""


def record_shapes(
    kinds: Sequence[LayerKind], support: int, replays_experts: bool = True
) -> records.Shapes:
    """What is recorded of each token that a model draws, by the names of `core.records`.

    Args:
      support: as in `SamplingSettings`.
      replays_experts: whether experts are among what is asked for.
    """
    experts = routing.recorded(kinds) if replays_experts else None
    of_experts = () if experts is None else ((EXPERTS, experts),)
    return (*of_experts, (SUPPORT, (support,))) if support else of_experts


@runtime_checkable
class Engine(Protocol):
    """Draws the turns that are asked for.

    With several processes all submit the same requests and poll as often; each gets every turn.
    """

    settings: SamplingSettings

    def load(self, params: Params, version: int) -> None:
        """Takes parameters, as `sync` gives them, for what is drawn from now on."""
        ...

    def submit(self, requests: Sequence[Request], group_size: int = 0) -> None:
        """Puts requests into the queue, at any time.

        Args:
          group_size: samples that each prompt will have, where further ones are asked for later.

        Raises: InputError for one it cannot draw.
        """
        ...

    def poll(self, coming: int = 0, going_on: Collection[tuple[int, int]] = ()) -> list[Turn]:
        """Turns that have ended: at least one, where any is under way and no sample is to come.

        Args:
          coming: samples whose next turns will be submitted. The engine keeps places for them, and
            comes back soon, with turns or without, so that they can be.
          going_on: their ordinals and samples, as far as they have had turns. What the engine keeps
            of a sample whose turn has ended is kept from poll to poll while it is among them.
        """
        ...

    def unload(self) -> None:
        """Lets go of parameters and caches, and of what is under way."""
        ...
