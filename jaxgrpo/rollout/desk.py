"""Draws for queries that come at any time, from any number of threads, by one engine.

A thread submits and polls. All queries share the slots, and what one of them gets depends on no
other: a sample's token n is drawn by the key of its seed and n alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import GENERATOR, Params
from jaxgrpo.environments.serving.dialect import Prompted
from jaxgrpo.environments.serving.fields import Completion, Wish
from jaxgrpo.environments.serving.server import Refusal
from jaxgrpo.rollout.engine import COMPLETE, Engine, Request, Turn
from jaxgrpo.rollout.stopping import StopStrings

WAIT = 0.1  # seconds between two looks whether an idle desk was closed


@dataclasses.dataclass
class _Order:
    """The samples of a query, on their way."""

    requests: list[Request]  # without ordinals
    turns: dict[int, Turn] = dataclasses.field(default_factory=dict)  # by place in `requests`
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    problem: Exception | None = None


class Desk:
    """Draws what queries ask for.

    Args:
      engine: whose settings have max_turns = 2 or more, so that requests come at any time, and
        own_rows, so that further tokens may be computed in chunks.
      width: tokens that the engine takes as a prompt; the end of a longer one takes the room of a
        sample, so that a completion behind it may have fewer.
      places: samples under way at once; further ones wait.
      tokenizer: writes the text in which stop strings are looked for.
      seed: of queries that give none.
    """

    def __init__(self, engine: Engine, width: int, places: int, tokenizer: Any, seed: int):
        self.engine, self.width, self.places = engine, width, places
        self.tokenizer, self.seed = tokenizer, seed
        self.problem: BaseException | None = None  # that the engine died of
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._free = [*range(places)]  # ordinals: the engine keeps a count of each
        self._waiting: list[tuple[_Order, int]] = []
        self._under_way: dict[int, tuple[_Order, int]] = {}  # by ordinal
        self._closed = threading.Event()
        self._count = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="jaxgrpo-desk", daemon=True)

    def open(self, params: Params, version: int) -> None:
        """Loads parameters, draws a token in every place so that all is compiled, and begins."""
        self.engine.load(params, version)
        key = np.zeros(2, np.uint32)
        first = [
            Request(ordinal, 0, np.zeros(1, np.int32), 0, 1, key) for ordinal in range(self.places)
        ]
        self.engine.submit(first)
        ended = 0
        while ended < self.places:
            ended += len(self.engine.poll(self.places))
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. What is under way is refused."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def draw(self, prompted: Prompted) -> list[list[Completion]]:
        """As `dialect.Draw`; waits for all."""
        wish = prompted.wish
        order = _Order(self._requests(wish))
        self._orders.put(order)
        while not order.ended.wait(WAIT):
            if not self._thread.is_alive():
                raise Refusal(503, "the server is ending")
        if order.problem is not None:
            raise order.problem
        drawn = [self._completion(order.turns[n], wish) for n in range(len(order.requests))]
        size = wish.samples
        return [drawn[begin : begin + size] for begin in range(0, len(drawn), size)]

    def _requests(self, wish: Wish) -> list[Request]:
        seed, number = wish.seed, 0
        if seed is None:
            with self._lock:
                self._count += 1
                seed, number = self.seed, self._count
        requests = []
        for place, tokens in enumerate(wish.prompts):
            offset, ids = max(0, len(tokens) - self.width), np.asarray(tokens, np.int32)
            for sample in range(wish.samples):
                key = np.asarray(_draw_key(_words(seed), number, place, sample))
                requests.append(
                    Request(
                        0,
                        0,
                        ids,
                        offset,
                        wish.max_tokens,
                        key,
                        wish.is_greedy,
                        chunked=bool(offset),
                        prompt_tail=offset,
                    )
                )
        return requests

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._take(is_idle=not self._under_way)
                self._submit()
                for turn in self.engine.poll(self.places) if self._under_way else ():
                    self._hand_over(turn)
        except BaseException as error:
            self.problem = error
        finally:
            self.engine.unload()

    def _take(self, is_idle: bool) -> None:
        """Takes new orders; waits for a moment for the first, where there is nothing to do."""
        with contextlib.suppress(queue.Empty):
            order = self._orders.get(timeout=WAIT) if is_idle else self._orders.get_nowait()
            while True:
                self._waiting += [(order, number) for number in range(len(order.requests))]
                order = self._orders.get_nowait()

    def _submit(self) -> None:
        """Submits as many requests as there are places. One that cannot be drawn ends its order."""
        while self._waiting and self._free:
            order, number = self._waiting.pop(0)
            if order.problem is not None:
                continue
            ordinal = self._free.pop()
            try:
                self.engine.submit([order.requests[number]._replace(ordinal=ordinal)])
            except InputError as error:
                self._free.append(ordinal)
                order.problem = error
                order.ended.set()
                continue
            self._under_way[ordinal] = order, number

    def _hand_over(self, turn: Turn) -> None:
        order, number = self._under_way.pop(turn.ordinal)
        self._free.append(turn.ordinal)
        order.turns[number] = turn
        if len(order.turns) == len(order.requests):
            order.ended.set()

    def _completion(self, turn: Turn, wish: Wish) -> Completion:
        """A turn as it is answered: it ends where the query says, if the engine's end is later."""
        tokens, settings = turn.tokens, self.engine.settings
        finish = "stop" if turn.reason in COMPLETE else "length"
        strings = () if settings.stop_strings is None else settings.stop_strings.strings
        stop: str | int | None = None
        if turn.reason == "string":
            stop = self._first_text(tokens, strings)
        at = np.flatnonzero(np.isin(tokens, wish.stop_tokens))
        ends = [int(at[0]) + 1] if len(at) else []
        if wish.stop and (end := StopStrings(self.tokenizer, wish.stop).end(tokens, 0)):
            ends.append(end)
        if ends:
            tokens, finish = tokens[: min(ends)], "stop"
            is_token = len(at) and min(ends) == at[0] + 1
            stop = int(tokens[-1]) if is_token else self._first_text(tokens, wish.stop)
        logp = [float(value) for value in turn.logp[: len(tokens)]]
        return Completion(tokens.tolist(), logp, finish, stop, int(turn.version[0]))

    def _first_text(self, tokens: np.ndarray, strings: Sequence[str]) -> str:
        """Of the strings in a text, the first one."""
        text = self.tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        return min((string for string in strings if string in text), key=text.index)


def _words(seed: int) -> np.ndarray:
    """A seed of 64 bits as the data of a key."""
    return np.asarray([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


@jax.jit
def _draw_key(data: Any, number: Any, place: Any, sample: Any) -> Any:
    """Key data [2] of a sample of a prompt of a query."""
    key = jax.random.wrap_key_data(data, impl=GENERATOR)
    for part in (number, place, sample):
        key = jax.random.fold_in(key, part)
    return jax.random.key_data(key)
