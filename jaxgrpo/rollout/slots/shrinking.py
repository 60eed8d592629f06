"""Fewer slots as the last samples end: the numbers of slots, and their programs.

Each number of slots is a program of its own, and a large model compiles for a minute. So the first
call that shrinks compiles all the smaller programs, side by side on the host's cores.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgrpo.core.types import Params
from jaxgrpo.models.api import Model
from jaxgrpo.rollout.slots.capacity import Sizes
from jaxgrpo.rollout.slots.programs import Programs
from jaxgrpo.rollout.slots.state import Counters, DecodeState

SHRINK = 0.625
"""Share of the slots that the next smaller size keeps, rounded up to a multiple of 8.

With halves, slots that idle while the last samples end cost 1.2 times the tokens, with this 1.12
(lengths of exponential tail, as many samples waiting as decoding).
"""
FEWEST_SLOTS = 4
COMPILING = (5.0, 0.35)  # seconds of a CPU for a decode program, and for each layer of it
ARITHMETIC = 3e10  # operations that a CPU does in a second, about
OVERHEAD = 2e-6  # seconds that each layer of a token takes beside its arithmetic
SLOT_ARRAYS = ("sample", "live", "pauses", "index", "token")
"""The fields [D, N] of `DecodeState`."""
MEAN = 0.25  # length of samples, about, as a share of the longest


class Size(NamedTuple):
    """What a bin decodes with."""

    slots: int
    rows: int  # of the prompts' cache
    aligned: bool  # slot n reads row n // (slots / rows), always, and no sample waits
    has_turns: bool = False  # samples come again, with rows of their own: no slot keeps its row


def next_slots(slots: int) -> int | None:
    """The number of slots that a bin keeps when so few are in use; None: all of them.

    >>> next_slots(64), next_slots(40), next_slots(24), next_slots(16), next_slots(8), next_slots(4)
    (40, 32, 16, 8, 4, None)
    """
    smaller = slots // 2 if slots <= 16 else -(-int(slots * SHRINK) // 8) * 8
    return smaller if FEWEST_SLOTS <= smaller < slots else None


def sizes_below(size: Size) -> list[Size]:
    """The sizes that follow `size`, the next one first.

    Where slots are no more than the rows of the prompts' cache, each gets its own copy of the row
    that it reads, once: no sample waits, so a slot keeps its prompt to the end.
    """
    below, most = [], max(size.rows, 2 * FEWEST_SLOTS)
    while slots := next_slots(size.slots):
        aligned = (size.aligned and size.slots == size.rows) or slots <= most
        aligned = aligned and not size.has_turns
        size = Size(slots, slots if aligned else size.rows, aligned, size.has_turns)
        below.append(size)
    return below


class Price(NamedTuple):
    """What smaller sizes cost and save, in seconds of a CPU."""

    program: float  # of one size
    slot_step: float  # of a token that a slot decodes, or of an idle one, over all calls


def estimate_price(model: Model, calls: int) -> Price:
    """The price of sizes for a model that is sampled from so often."""
    layers, numbers = model.config.num_layers, sum(x.size for x in jax.tree.leaves(model.shapes))
    slot_step = 2 * numbers / ARITHMETIC + OVERHEAD * layers
    program, layer = COMPILING
    return Price(program + layer * layers, slot_step * calls)


def idle_steps(slots: int, sizes: Sequence[Size], longest: int) -> float:
    """Slot-steps of one bin that are idle while its last samples end, of exponential length.

    >>> round(idle_steps(64, [], 24)), round(idle_steps(64, sizes_below(Size(64, 8, False)), 24))
    (1438, 103)
    """
    numbers = [slots, *(size.slots for size in sizes)]
    idle = (
        (min(number for number in numbers if number >= live) - live) / live
        for live in range(1, slots)
    )
    return MEAN * longest * sum(idle)


def worthwhile(size: Size, longest: int, price: Price) -> list[Size]:
    """Of the sizes below, those that together save more than it costs to compile them.

    Args:
      longest: tokens of a sample.
    """
    below = sizes_below(size)
    choices = [[], *([single] for single in below)]
    choices += [below[skip - 1 :: skip] for skip in range(1, len(below))]

    def cost(sizes: list[Size]) -> float:
        idle = idle_steps(size.slots, sizes, longest)
        return len(sizes) * price.program + idle * price.slot_step

    return min(choices, key=cost)


Compiled = dict[Any, dict[Size, Any]]
"""Programs of smaller sizes, by what they were compiled for."""


class Shrinking:
    """The slots of a session, which become fewer as its last samples end."""

    def __init__(
        self,
        programs: Programs,
        sizes: Sizes,
        choose: Callable[[Size], list[Size]],
        compiled: Compiled,
        has_turns: bool = False,
    ):
        """Args:
        choose: the sizes to come, of that which there is.
        compiled: by earlier sessions; this one adds to it.
        """
        self.programs, self.choose = programs, choose
        self.size: Size = Size(sizes.slots, sizes.rows, sizes.aligned and not has_turns, has_turns)
        self.has_begun: bool = False
        self._sizes, self._below, self._compiled = sizes, choose(self.size), compiled
        self._smaller: dict[Size, Any] = {}
        self._compiles = False  # the first of all sessions that needs them

    @property
    def next_slots(self) -> int | None:
        """The slots of the next size; None: there is none."""
        return self._below[0].slots if self._below else None

    def open(self) -> None:
        """From now on samples come to slots in any order."""
        if self.size.aligned:
            self.size = self.size._replace(aligned=False)
            self._below = self.choose(self.size)

    def decode(
        self, params: Params, state: DecodeState, enough: np.int32
    ) -> tuple[DecodeState, Counters]:
        """A segment with the slots that there are; arguments as in `decoding.segment`."""
        if self.size in self._smaller:
            return self._smaller[self.size].result()(params, state, enough)
        return self.programs.decode(self.size.aligned, params, state, enough)

    def shrink(self, params: Params, state: DecodeState) -> DecodeState:
        """Goes on with the next smaller size: the slots that decode, and the rows they read."""
        self.has_begun = True
        if not self._smaller:
            self._smaller = self._smaller_programs(params, state)
        take, old = self.programs.take, self.size
        size = self.size = self._below.pop(0)
        order, rows = self.programs.staying(state, size.slots, old.aligned)
        slot_arrays = take({name: getattr(state, name) for name in SLOT_ARRAYS}, order)
        memory, aligned = list(state.memory), size.aligned
        row_length = take(state.row_length, rows) if aligned else state.row_length
        state = dataclasses.replace(state, **slot_arrays, row_length=row_length, memory=())
        # Layer by layer, so that the slots that leave are never in memory beside all that stay.
        for layer in range(len(memory)):
            prompts, ring = memory[layer]
            ring = self.programs.take_slots(ring, order)
            memory[layer] = (take(prompts, rows) if aligned else prompts, ring)
            del prompts, ring
        return dataclasses.replace(state, memory=tuple(memory))

    def compile_remaining(
        self, params: Params, state: DecodeState, also: Callable[[DecodeState], DecodeState]
    ) -> None:
        """In the first session that shrinks: what sizes need that it did not come to.

        So that no later one compiles, whatever the lengths of its samples.

        Args:
          also: what else is called at each size.
        """
        if not self._compiles:
            return
        while self._below:
            state = also(self.shrink(params, state))
        for program in self._smaller.values():
            program.result()

    def _smaller_programs(self, params: Params, state: DecodeState) -> dict[Size, Any]:
        """The programs of all smaller sizes, which the first session that needs one compiles."""
        layout = tuple((leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(params))
        key = (self._sizes, self.size, layout, jax.tree.structure(state.samples))
        self._compiles = key not in self._compiled
        if self._compiles:
            self._compiled[key] = compile_all(self.programs.decode, params, state, self._below)
        return self._compiled[key]


def resized(state: DecodeState, size: Size) -> DecodeState:
    """The state at another size as shapes, laid out as this one is.

    Args:
      state: of arrays or shapes.
    """
    bins, slots = state.sample.shape

    def abstract(leaf: Any, *sizes: int) -> jax.ShapeDtypeStruct:
        shape = (*sizes, *leaf.shape[len(sizes) :])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)

    def abstract_slots(leaf: Any) -> jax.ShapeDtypeStruct:
        return abstract(leaf, bins, size.slots)

    def abstract_rows(leaf: Any) -> jax.ShapeDtypeStruct:
        return abstract(leaf, bins, size.rows)

    def abstract_ring(leaf: Any) -> jax.ShapeDtypeStruct:
        return abstract(leaf, leaf.shape[0] // slots * size.slots)

    memory = [
        (jax.tree.map(abstract_rows, prompts), jax.tree.map(abstract_ring, ring))
        for prompts, ring in state.memory
    ]
    state = jax.tree.map(abstract, dataclasses.replace(state, memory=()))
    return dataclasses.replace(
        state,
        **{name: jax.tree.map(abstract_slots, getattr(state, name)) for name in SLOT_ARRAYS},
        row_length=abstract_rows(state.row_length),
        memory=tuple(memory),
    )


def compile_all(
    decode: Any, params: Params, state: DecodeState, sizes: Sequence[Size]
) -> dict[Size, Future[Callable[..., Any]]]:
    """The programs that decode at some sizes, being compiled; called with all but `aligned`.

    Args:
      decode: jitted; (aligned, params, state, enough), the first one static.
      state: laid out as the programs will find theirs; of any size.
    """
    layouts = jax.tree.map(lambda leaf: leaf.sharding, state)
    shapes = resized(state, Size(state.sample.shape[1], state.row_length.shape[1], False))
    # With several processes all compile in the same order. More at a time than there are cores take
    # more memory (2.4 GB instead of 1.8 for seven programs of a small model) and no less time.
    at_once = min(len(sizes), multiprocessing.cpu_count())
    workers = 1 if jax.process_count() > 1 else at_once
    executor = ThreadPoolExecutor(workers, thread_name_prefix="compiling")

    def program(lowered: Any) -> Callable[..., Any]:
        compiled = lowered.compile()
        return lambda params, state, enough: compiled(
            params, jax.tree.map(_laid_out, state, layouts), enough
        )

    futures = {}
    for size in sizes:  # traced here: options of JAX that a `with` sets hold in one thread only
        traced = decode.trace(size.aligned, params, resized(shapes, size), np.int32(0))
        futures[size] = executor.submit(program, traced.lower())
    executor.shutdown(wait=False)
    return futures


def _laid_out(leaf: jax.Array, sharding: Any) -> jax.Array:
    is_equivalent = leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    return leaf if is_equivalent else jax.device_put(leaf, sharding)
