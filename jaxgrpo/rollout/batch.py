"""A batch of prompts as requests to an engine, and the turns that come back as rollouts."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxgrpo.core import records
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.records import EXPERTS, SUPPORT
from jaxgrpo.core.types import GENERATOR, Params, Prompts, Rollouts
from jaxgrpo.models import sharding
from jaxgrpo.rollout import trees
from jaxgrpo.rollout.dialogue import VERSION, Converse, Dialogue
from jaxgrpo.rollout.engine import COMPLETE, Engine, Request, SamplingSettings, Turn
from jaxgrpo.rollout.trees import Branch, Trees

Item = TypeVar("Item")


class Batch:
    """Prompts and G samples of each, as host arrays that fill up as turns end.

    A token is drawn with the key folded from (key, purpose, step, ordinal, sample, token), so a
    sample depends on nothing else: not on how many are drawn at once, and not on what is drawn
    beside it. A prompt that is there twice, with one ordinal, is drawn once.

    Args:
      prompts: with `forced_prefix`, samples begin with tokens that are given.
      settings: of the engine.
      grown: where samples grow as the leaves of trees.
      dialogue: where samples are answered; their prompts are then what it opens with.

    Raises: InputError where `forced_prefix` does not fit.
    """

    def __init__(
        self,
        prompts: Prompts,
        group_size: int,
        settings: SamplingSettings,
        grown: Trees | None = None,
        dialogue: Dialogue | None = None,
    ):
        self.prompts: Any = sharding.to_host(prompts)
        self.dialogue = dialogue
        self._openings: dict[tuple[int, int], np.ndarray] = {}  # that samples begin with
        if dialogue is not None:
            self.prompts, self._openings = dialogue.open(self.prompts, group_size)
        count, longest = len(self.prompts.ordinal), settings.max_completion_tokens
        shape = count, group_size, longest
        _check_forced(self.prompts.forced_prefix, shape)
        self.tokens: np.ndarray = np.full(shape, settings.pad_token, np.int32)
        self.mask: np.ndarray = np.zeros(shape, bool)
        self._logp = np.zeros(shape, np.float32)
        stop = self._stop = settings.early_stop
        self._confidence = None if stop is None else np.zeros(shape, np.float32)
        self._records: dict[str, np.ndarray] = {}  # of those that come with turns
        self._support = settings.support
        self._truncated = np.zeros(shape[:2], bool)
        self._version = np.zeros(shape[:2], np.int32)
        self._versions: Any = np.zeros(shape, np.int32) if dialogue is not None else None
        self._missing = np.full(count, group_size)
        self._interruption, self._has_own_rows = settings.interruption, settings.own_rows
        self._under_way: dict[tuple[int, int], Request] = {}
        self._more: list[Request] = []
        self._begun: set[tuple[int, int]] = set()
        self._trees = grown
        self._grown: dict[int, list[Branch]] = {}  # ordinal -> its samples so far
        self._running: Counter[int] = Counter()  # ordinal -> samples that have not ended
        self._rounds: Counter[int] = Counter()
        self._places: dict[int, list[int]] = {}
        for place, ordinal in enumerate(self.prompts.ordinal.tolist()):
            self._places.setdefault(ordinal, []).append(place)
        has_warmup = stop is not None and stop.percentile is not None
        self._first = min(stop.warmup, group_size) if stop and has_warmup else group_size
        fixed = -np.inf if stop is None or stop.confidence is None else stop.confidence
        self._thresholds = dict.fromkeys(self._places, fixed)

    def requests(self, key: ArrayLike, purpose: int = 0, greedy: int = 0) -> list[Request]:
        """What is asked of an engine.

        Args:
          key: [2] uint32, the data of the run's key.
          purpose: folded into the key: evaluation never repeats training's draws.
          greedy: of each group so many, the last ones, take the likeliest tokens.
        """
        prompts, group_size = self.prompts, self.tokens.shape[1]
        self._seed = [int(word) for word in np.asarray(key).ravel()] + [purpose]
        self._keys = np.asarray(
            _sample_keys(key, purpose, prompts.step, prompts.ordinal, group_size)
        )
        self._greedy = group_size - greedy
        requests = []
        for ordinal in self._places:
            if self._trees is not None:
                requests += self._grow(ordinal, trees.first_branches(self._trees))
            else:
                requests += self._requests(ordinal, range(self._first))
        return requests

    def _requests(self, ordinal: int, samples: Iterable[int]) -> list[Request]:
        """The first requests of samples that each begin by themselves."""
        place = self._places[ordinal][0]
        return [self._request(ordinal, sample, self._prefix(place, sample)) for sample in samples]

    def _request(self, ordinal: int, sample: int, prefix: np.ndarray, drawn: int = 0) -> Request:
        """The first request of a sample that begins with some tokens, `drawn` of which were."""
        place = self._places[ordinal][0]
        prompt = self.prompts.prompt_tokens[place][self.prompts.prompt_mask[place]]
        request = Request(
            ordinal=ordinal,
            sample=sample,
            tokens=np.concatenate([prompt, prefix]) if len(prefix) else prompt,
            offset=len(prefix),
            limit=self._limit((ordinal, sample), len(prefix)),
            key=self._keys[place, sample],
            is_greedy=sample >= self._greedy,
            threshold=self._thresholds[ordinal],
            chunked=self._has_own_rows,
            state=None if self.dialogue is None else self.dialogue.first_state((ordinal, sample)),
            drawn=drawn,
        )
        if request.is_greedy and self._first < self.tokens.shape[1]:
            request = request._replace(threshold=-np.inf)
        self._under_way[ordinal, sample] = request
        self._running[ordinal] += 1
        return request

    def _grow(self, ordinal: int, branches: Sequence[Branch]) -> list[Request]:
        """The requests of branches, whose samples get the tokens that are another's."""
        self._grown.setdefault(ordinal, []).extend(branches)
        arrays = [self.tokens, self.mask, self._logp]
        arrays += [*self._records.values()]
        requests = []
        for branch in branches:
            for place in self._places[ordinal] if branch.cut else ():
                for array in arrays:
                    start = array[place, branch.parent, : branch.cut]
                    array[place, branch.sample, : branch.cut] = start
            place = self._places[ordinal][0]
            prefix = self.tokens[place, branch.parent, : branch.cut].copy()
            requests.append(self._request(ordinal, branch.sample, prefix, drawn=branch.cut))
        return requests

    def _leaves(self, ordinal: int) -> list[trees.Leaf]:
        """The samples of a prompt, all of which have ended."""
        place = self._places[ordinal][0]
        return [
            trees.Leaf(
                branch.tree,
                branch.parent,
                branch.cut,
                self._logp[place, branch.sample][self.mask[place, branch.sample]],
            )
            for branch in self._grown[ordinal]
        ]

    def _next_round(self, ordinal: int) -> list[Request]:
        """What a prompt asks for once all samples that it has asked for have ended."""
        number = self._rounds[ordinal] = self._rounds[ordinal] + 1
        if self._trees is not None:
            random = np.random.default_rng([*self._seed, ordinal, number])
            leaves = self._leaves(ordinal)
            return self._grow(ordinal, trees.next_branches(self._trees, leaves, number, random))
        rest = range(self._first, self.tokens.shape[1])
        if number > 1 or not rest or self._stop is None or self._confidence is None:
            return []
        at = self._places[ordinal][0], slice(self._first)
        confidence, mask = self._confidence[at], self.mask[at]
        drawn = [values[is_drawn] for values, is_drawn in zip(confidence, mask, strict=True)]
        self._thresholds[ordinal] = self._stop.threshold(drawn)
        return self._requests(ordinal, rest)

    def more_requests(self) -> list[Request]:
        """What the turns added since the last call lead to: further turns of interrupted samples,
        and the next samples of prompts whose first ones have ended."""
        more, self._more = self._more, []
        return more

    def _limit(self, key: tuple[int, int], offset: int) -> int:
        """The new tokens of a turn that begins behind `offset` tokens of its sample."""
        if self.dialogue is not None:
            return self.dialogue.limit(key, offset)
        interruption, longest = self._interruption, self.tokens.shape[-1]
        is_first = interruption is not None and offset < interruption.after
        return (interruption.after if is_first and interruption else longest) - offset

    def _go_on(self, turn: Turn) -> Request | None:
        """The request behind the text that interrupts a sample; None: it has ended."""
        request, interruption = self._under_way[turn.ordinal, turn.sample], self._interruption
        end = request.offset + len(turn.tokens)
        if interruption is None or turn.reason != "length" or end != interruption.after:
            return None
        text = np.asarray(interruption.text, np.int32)
        longest = self.tokens.shape[-1]
        return request._replace(
            tokens=np.concatenate([request.tokens, turn.tokens, text]),
            offset=interruption.end,
            limit=longest - interruption.end,
        )

    def add(self, turns: Sequence[Turn]) -> np.ndarray:
        """Writes turns. Returns: the places of the groups that are complete with them, [n] int."""
        complete: list[int] = []
        for turn in turns:
            request, more = self._under_way[turn.ordinal, turn.sample], self._go_on(turn)
            for place in self._places[turn.ordinal]:
                self._write((place, turn.sample), request, turn)
            if self.dialogue is not None and self.dialogue.take(request, turn):
                tokens = np.concatenate([request.tokens, turn.tokens])
                offset = request.offset + len(turn.tokens)
                request = request._replace(tokens=tokens, offset=offset)
                self._under_way[turn.ordinal, turn.sample] = request
            elif more is not None:
                self._under_way[turn.ordinal, turn.sample] = more
                self._more.append(more)
            else:
                complete += self._end(turn.ordinal)
        return np.asarray(complete, int)

    def hear(self, is_idle: bool) -> np.ndarray:
        """Takes the replies to samples that are due; samples that go on are among `more_requests`.

        Args:
          is_idle: no sample is under way: the next ones are due.

        Returns: as `add`.
        """
        complete: list[int] = []
        for reply in [] if self.dialogue is None else self.dialogue.replies(is_idle):
            key = reply.ordinal, reply.sample
            if reply.tokens is None:
                complete += self._end(reply.ordinal)
                continue
            request, words = self._under_way[key], np.asarray(reply.tokens, np.int32)
            offset = request.offset + len(words)
            before = request.tokens[: 0 if reply.is_fork else None]
            tokens, limit = np.concatenate([before, words]), self._limit(key, offset)
            more = request._replace(
                tokens=tokens, offset=offset, limit=limit, chunked=reply.is_fork
            )
            self._under_way[key] = more
            self._more.append(more)
        return np.asarray(complete, int)

    @property
    def going_on(self) -> Collection[tuple[int, int]]:
        """Samples that wait for a reply."""
        return () if self.dialogue is None else self.dialogue.waiting

    @property
    def is_complete(self) -> bool:
        """Whether all samples have ended."""
        return not self._missing.any()

    def _end(self, ordinal: int) -> list[int]:
        """Counts a sample of a prompt that has ended. Returns: the places complete with it."""
        places = self._places[ordinal]
        self._missing[places] -= 1
        self._running[ordinal] -= 1
        if not self._running[ordinal]:
            self._more += self._next_round(ordinal)
        return [place for place in places if not self._missing[place]]

    def _write(self, at: tuple[int, int], request: Request, turn: Turn) -> None:
        """Writes a turn, and what its sample was before it."""
        begin = request.offset
        drawn = slice(begin, begin + len(turn.tokens))
        if at not in self._begun:
            self._begun.add(at)
            self._version[at] = turn.version[0]
        before = request.tokens[-begin:] if begin else request.tokens[:0]  # of a fork, no more
        self.tokens[at][begin - len(before) : begin] = before
        self.tokens[at][drawn], self._logp[at][drawn] = turn.tokens, turn.logp
        self.mask[at][drawn] = True
        if turn.answered is not None:
            ends, begins = turn.answered.ends[:-1], turn.answered.begins[1:]
            for end, next_begin in zip(ends, begins, strict=True):
                self.mask[at][begin + end : begin + next_begin] = False
        if self._versions is not None:
            self._versions[at][drawn] = turn.version
        if self._confidence is not None:
            self._confidence[at][drawn] = turn.confidence
        for name, record in {EXPERTS: turn.experts, SUPPORT: turn.support}.items():
            self._write_record(name, at, drawn, record)
        self._truncated[at] = turn.reason not in COMPLETE

    def _write_record(
        self, name: str, at: tuple[int, int], drawn: slice, record: np.ndarray | None
    ) -> None:
        """Writes what a turn records of its tokens, if anything."""
        if record is None:
            if name == SUPPORT and self._support:
                raise InputError(
                    f'train.support = "replay": the engine draws among {self._support} tokens '
                    "at most and does not say which; take one that gives the support of its "
                    'turns, or set train.support = "full" and loss.proximal = "trainer"'
                )
            return
        if name not in self._records:
            self._records[name] = records.no_record(name, *self.tokens.shape, *record.shape[1:])
        self._records[name][at][drawn] = record

    def rollouts(self) -> Rollouts:
        """The batch as rollouts without rewards, host arrays.

        `behavior_logp` is of the distribution drawn from; for temperature 0, and for greedy
        samples, of the model's own at temperature 1.
        """
        values: dict[str, Any] = {
            "completion_tokens": self.tokens,
            "token_mask": self.mask,
            "behavior_logp": self._logp,
            "rewards": {},
            "truncated": self._truncated,
            "policy_version": self._version,
            "fields": self._records | self._more_fields(),
        }
        return Rollouts(**vars(self.prompts), **values)

    def _more_fields(self) -> dict[str, np.ndarray]:
        """What `Dialogue.fields` or `trees.fields` gives for all groups."""
        if self.dialogue is not None:
            fields = self.dialogue.fields(self.prompts.ordinal.tolist(), self.mask)
            return fields | {VERSION: np.where(self.mask, self._versions, np.int32(-1))}
        if self._trees is None:
            return {}
        steps, by_ordinal = self.tokens.shape[-1], {}
        for ordinal in self._places:
            by_ordinal[ordinal] = trees.fields(self._trees, self._leaves(ordinal), steps)
        groups = [by_ordinal[ordinal] for ordinal in self.prompts.ordinal.tolist()]
        names = (trees.TREE, trees.ANCESTORS, trees.DEPTH)
        return dict(zip(names, map(np.stack, zip(*groups, strict=True)), strict=True))

    def _prefix(self, place: int, sample: int) -> np.ndarray:
        """The tokens that a sample begins with."""
        if self.dialogue is not None:
            key = int(self.prompts.ordinal[place]), sample
            return self._openings.get(key, self.tokens[0, 0, :0])
        if self.prompts.forced_prefix is None:
            return self.tokens[0, 0, :0]
        forced = self.prompts.forced_prefix[place, sample]
        return forced[forced >= 0]


def _check_forced(forced: np.ndarray | None, shape: tuple[int, int, int]) -> None:
    if forced is None:
        return
    if forced.ndim != 3 or forced.shape[:2] != shape[:2] or forced.shape[2] >= shape[2]:
        raise InputError(
            f"forced_prefix has shape {list(forced.shape)}: expected [{shape[0]}, {shape[1]}, F] "
            f"with F below max_completion_tokens = {shape[2]}, so that a token is left to draw"
        )


class Groups(NamedTuple):
    """Groups of a batch that have ended."""

    places: np.ndarray  # [n] int, which of its prompts
    tokens: np.ndarray  # [n, G, T] int32
    mask: np.ndarray  # [n, G, T] bool, as `Rollouts.token_mask`


class Drawing(NamedTuple):
    """A batch that is being drawn."""

    ended: Generator[Groups]
    """draws; yields groups that have ended while others are drawn, but not the last ones"""
    rollouts: Callable[[], Rollouts]  # host arrays, once `ended` has none left
    dialogue: Dialogue | None = None  # of samples that are answered

    def finish(self) -> Rollouts:
        """Draws what is left. Returns: all, as `Batch.rollouts`."""
        for _ in self.ended:
            pass
        return self.rollouts()


def draw(
    engine: Engine,
    params: Params,
    prompts: Prompts,
    key: ArrayLike,
    group_size: int,
    *,
    purpose: int = 0,
    greedy: int = 0,
    grown: Trees | None = None,
    converse: Converse | None = None,
) -> Drawing:
    """Completions of every prompt, `group_size` of each.

    Args: as in `Batch` and `Batch.requests`; `grown` is its `trees`, and `converse` gives its
      dialogue.
    """
    seed = *(int(word) for word in np.asarray(key).ravel()), purpose
    longest = engine.settings.max_completion_tokens
    dialogue = None if converse is None else converse(longest, seed)
    batch = Batch(prompts, group_size, engine.settings, grown, dialogue)
    requests = batch.requests(key, purpose, greedy)
    return Drawing(_ended(engine, params, batch, requests), batch.rollouts, dialogue)


def _ended(
    engine: Engine, params: Params, batch: Batch, requests: Sequence[Request]
) -> Generator[Groups]:
    engine.load(params, int(batch.prompts.step))
    try:
        engine.submit(requests, batch.tokens.shape[1])
        under_way = len(requests)
        while not batch.is_complete:
            turns = engine.poll(len(batch.going_on), batch.going_on)
            under_way -= len(turns)
            if not turns and not batch.going_on:
                raise RuntimeError(
                    f"the engine has nothing under way, and {under_way} turns are missing"
                )
            places = batch.add(turns)
            places = np.concatenate([places, batch.hear(is_idle=not under_way)])
            if more := batch.more_requests():
                engine.submit(more)
            under_way += len(more)
            if len(places) and not batch.is_complete:
                yield Groups(places, batch.tokens[places], batch.mask[places])
    finally:
        engine.unload()


def in_background(items: Generator[Item]) -> Generator[Item]:
    """The items, made by a thread while the caller works on those before.

    Closing this iterator ends the thread at its next item; with several processes the thread makes
    all items, since the others would wait for this one.
    """
    ready: queue.SimpleQueue[tuple[Item] | None] = queue.SimpleQueue()
    is_closed = threading.Event()
    # Options of JAX that are set by a `with` hold in one thread only.
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]

    def run() -> None:
        with (
            jax.default_matmul_precision(precision) if precision else contextlib.nullcontext(),
            contextlib.closing(items),
        ):
            for item in items:
                if is_closed.is_set() and jax.process_count() == 1:
                    return
                ready.put((item,))

    with ThreadPoolExecutor(1, thread_name_prefix="sampling") as executor:
        future = executor.submit(run)
        future.add_done_callback(lambda _: ready.put(None))
        try:
            while (item := ready.get()) is not None:
                yield item[0]
        finally:
            is_closed.set()
    future.result()


@functools.partial(jax.jit, static_argnums=4)
def _sample_keys(
    key: ArrayLike, purpose: ArrayLike, step: ArrayLike, ordinals: Array, group_size: int
) -> Array:
    """Key data [P, G, 2]."""
    key = jax.random.wrap_key_data(jnp.asarray(key), impl=GENERATOR)
    key = jax.random.fold_in(key, purpose)
    key = jax.random.fold_in(key, step)
    prompt_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ordinals)
    fold_samples = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = jax.vmap(fold_samples, in_axes=(0, None))(prompt_keys, jnp.arange(group_size))
    return jax.random.key_data(keys)
