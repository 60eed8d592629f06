"""The engine with slots: a prompt is computed once per group, and free slots take the next sample.

The host's part: it keeps places, rows and slots filled, and reads what a segment of decoding
counted while the next one runs. The devices' part is `jaxgrpo.rollout.slots.decoding`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Params
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model
from jaxgrpo.models.sequences import check_tokens
from jaxgrpo.rollout.engine import Request, SamplingSettings, Turn
from jaxgrpo.rollout.slots import shrinking
from jaxgrpo.rollout.slots.capacity import (
    Sizes,
    capacity,
    fitting_slots,
    parks,
    refuse_unaddressed,
)
from jaxgrpo.rollout.slots.programs import Programs, make_programs
from jaxgrpo.rollout.slots.rows import Rows, prefill_batches
from jaxgrpo.rollout.slots.shrinking import Shrinking, Size
from jaxgrpo.rollout.slots.state import READ, Counters, DecodeState, Drawn, Finals
from jaxgrpo.rollout.slots.table import (
    Group,
    Leaver,
    Table,
    chunks_of_replies,
    group_requests,
    make_turns,
)


class SlotEngine:
    """An engine that decodes on the devices of this process.

    Requests that are submitted when nothing is under way open a session, whose sizes follow from
    them: as many places as they have prompts, for groups as large as their largest. Later ones take
    places that fall free; once the slots of a session have become fewer they wait for the next. It
    has the places of the first since `load`, and none smaller, so that no size is compiled for what
    happens to wait.

    Args:
      mesh: that parameters are laid out on; None: one device.
      width: tokens that a prompt may have.
      free: bytes of each device that decoding may take; decides on the slots where `settings` does
        not. None: every sample has one.

    Raises: InputError for settings that the model cannot be drawn with.
    """

    def __init__(
        self,
        model: Model,
        settings: SamplingSettings,
        mesh: Mesh | None = None,
        *,
        width: int,
        free: int | None = None,
    ):
        if model.config.recurs and settings.max_turns > 1 and settings.stop_strings is not None:
            raise InputError(
                "rollout.stop_strings: a model with layers that recur cannot take back tokens "
                "behind a string that ends a turn, since they are in its states; with samples of "
                "several turns let tokens end them (eos_token_id of generation_config.json)"
            )
        self.model, self.settings, self.mesh = model, settings, mesh
        self.width, self.free = width, free
        self.programs: Programs = make_programs(model, settings, mesh)
        self.compiled: shrinking.Compiled = {}
        self.slot_steps: Array | int = 0  # of the last session: decoding steps times slots
        self._batches: Counter[int] = Counter()
        self._largest: tuple[int, int] = 0, 0  # since `load`: places of a session, and samples
        self._group = 0  # since `load`: samples that a prompt will have
        self._requested: dict[int, set[int]] = {}  # and those that were asked for, by ordinal
        self._params: Params | None = None
        self._version = 0
        self._waiting: list[Group] = []
        self._session: _Session | None = None

    def expect(self, group: int, batches: int) -> None:
        """Says how many batches of groups of that size will be drawn.

        On a CPU programs are compiled where they save more than they cost; without a word here,
        very many batches are expected.
        """
        self._batches[group] = max(self._batches[group], batches)

    def limit(self, free: int) -> None:
        """Decoding takes at most so many bytes of each device from now on, or fewer, as before."""
        self.free = free if self.free is None else min(free, self.free)

    def slots_for(self, prompts: int, group: int, rounds: int = 0) -> int:
        """The slots, over all bins, that so many prompts are decoded with.

        Args:
          rounds: as in `fitting_slots`.

        Raises: InputError where a kernel cannot address so many.
        """
        slots, sizes = self.settings.slots, (prompts, group, self.width)
        if self.mesh is None:
            return slots
        if not slots and self.free is not None:
            facts = self.model, self.settings, self.mesh, *sizes, self.free, rounds
            slots = fitting_slots(*facts)
        settings = self.settings._replace(slots=slots)
        refuse_unaddressed(slots, capacity(self.model, settings, self.mesh, *sizes))
        return slots

    def load(self, params: Params, version: int) -> None:
        """As `Engine.load`. Raises: ValueError while turns are under way."""
        if self._waiting or self._session is not None:
            raise ValueError("load while turns are under way: poll until all have ended")
        self._params, self._version = self.programs.split(params), version
        self._largest = 0, 0
        self._group, self._requested = 0, {}

    def submit(self, requests: Sequence[Request], group_size: int = 0) -> None:
        """As `Engine.submit`."""
        table = None if self._session is None else self._session.table
        is_further = [table is not None and table.is_paused(request) for request in requests]
        pairs = [*zip(requests, is_further, strict=True)]
        groups = group_requests(request for request, goes_on in pairs if not goes_on)
        for group in groups:
            self._check(group)
        self._group = max(self._group, group_size)
        for request in requests:  # further turns are of samples that were asked for before
            self._requested.setdefault(request.ordinal, set()).add(request.sample)
        for request, goes_on in pairs:
            if table is not None and goes_on:
                table.go_on(request)
        if self._session is None:
            self._waiting.extend(groups)
        else:
            self._session.add(groups)

    def poll(self, coming: int = 0, going_on: Collection[tuple[int, int]] = ()) -> list[Turn]:
        """As `Engine.poll`. Raises: ValueError where no parameters are loaded."""
        if self._params is None:
            raise ValueError("poll without parameters: load them first")
        if self._session is not None:
            self._session.reply(going_on)
        turns: list[Turn] = []
        while not turns and (self._waiting or self._session is not None):
            if self._session is None:
                self._session = self._open(self._params)
            is_complete = all(len(samples) >= self._group for samples in self._requested.values())
            if not self._session.has_ended:
                turns = self._session.step(self._version, coming if is_complete else None)
            if self._session.has_ended and not (self.settings.max_turns > 1 and (turns or coming)):
                self._waiting, self.slot_steps = self._session.close()
                self._session = None
            elif coming:
                break
        return turns

    def unload(self) -> None:
        """As `Engine.unload`."""
        if self._session is not None:
            self._session.reply(())
            if self._session.has_ended:  # further turns could have come
                _, self.slot_steps = self._session.close()
        self._params, self._session, self._waiting = None, None, []

    def _open(self, params: Params) -> _Session:
        groups, self._waiting = self._waiting, []
        places, largest = self._largest
        samples = [len(group.requests) for group in groups]
        # A sample that begins otherwise than the rest of its prompt's is a group of its own here.
        prompts = {group.requests[0].ordinal for group in groups}
        places, largest = places or len(prompts), max(largest, self._group, *samples)
        self._largest = places, largest
        bins = 1 if self.mesh is None else sharding.num_bins(self.mesh)
        slots = self.slots_for(-(-places // bins) * bins, largest)
        turn_tokens, has_turns = self.settings.turn_tokens, self.settings.max_turns > 1
        may_park = parks(self.settings, _platform(params))
        sizes = Sizes.for_prompts(slots, bins, places, largest, self.width, turn_tokens, may_park)
        choose = lambda size: self._choose(size, largest)  # noqa: E731
        slot_sizes = Shrinking(self.programs, sizes, choose, self.compiled, has_turns)
        session = _Session(self.programs, self.settings, sizes, slot_sizes, params)
        session.add(groups)
        return session

    def _choose(self, size: Size, group: int) -> list[Size]:
        """The smaller sizes that pay."""
        devices = jax.devices() if self.mesh is None else self.mesh.devices.flat
        # Elsewhere a step takes as long as it takes to read the weights, and runs are long.
        # The samples of a prompt may come in parts.
        group = min((size for size in self._batches if size >= group), default=group)
        batches = self._batches[group] if devices[0].platform == "cpu" else 0
        below = shrinking.sizes_below(size)
        if not batches or not below:
            return below
        price = shrinking.estimate_price(self.model, batches)
        return shrinking.worthwhile(size, self.settings.max_completion_tokens, price)

    def _check(self, group: Group) -> None:
        """Raises InputError for a group that cannot be drawn."""
        longest, vocab_size = self.settings.max_completion_tokens, self.model.config.vocab_size
        label = f"prompt {group.requests[0].ordinal}"
        (request, *_), width = group.requests, self.width
        width += request.offset if request.chunked else 0
        if not 1 <= len(group.prompt) <= width:
            raise InputError(f"{label}: {len(group.prompt)} tokens, expected 1 to {width}")
        if request.offset and request.chunked and self.settings.max_turns == 1:
            raise InputError(
                f"{label}: a further turn, and the engine's settings have max_turns = 1"
            )
        if request.offset and request.chunked and not self.settings.own_rows:
            raise InputError(
                f"{label}: its tokens are to be computed in chunks, and the engine's settings have "
                "own_rows = False"
            )
        for tokens in (group.prompt, *(r.tokens for r in group.requests if r.offset)):
            check_tokens(label, tokens, np.ones(len(tokens), bool), vocab_size)
        for request in group.requests:
            if request.limit < 1 or request.offset + request.limit > longest:
                raise InputError(
                    f"{label}: {request.limit} tokens behind {request.offset}, expected 1 or more "
                    f"and at most max_completion_tokens = {longest} together"
                )


def _platform(params: Params) -> str:
    """Of the devices that hold the parameters."""
    return next(iter(jax.tree.leaves(params)[0].devices())).platform


class _Session:
    """From the first sample under way to the last."""

    def __init__(
        self,
        programs: Programs,
        settings: SamplingSettings,
        sizes: Sizes,
        slots: Shrinking,
        params: Params,
    ):
        self.programs, self.settings, self.params, self.slots = programs, settings, params, slots
        self.table, self.rows = Table(sizes, settings, _platform(params)), Rows(sizes)
        self.state: DecodeState = programs.begin(sizes)
        self.aside = programs.aside(self.state, sizes.parked) if sizes.parked else None
        self.segment = 0  # the number of the next one
        self.admitted = 0  # the first segment with all that was admitted
        self.unread: tuple[int, Counters, Drawn | None] | None = None  # of the segment before
        self.leaving: list[tuple[Sequence[Leaver], Finals]] = []

    def add(self, groups: Sequence[Group]) -> None:
        self.table.add(groups)

    @property
    def has_ended(self) -> bool:
        """Whether no sample is under way; groups may wait for the next session."""
        is_idle = self.segment > 0 and self.table.is_empty and not self.leaving
        return is_idle and not (self.slots.size.has_turns and self.table.has_waiting)

    def step(self, version: int, coming: int | None) -> list[Turn]:
        """Dispatches a segment, and follows up the one before: the devices never wait for the host.

        Args:
          version: of the parameters.
          coming: samples that will ask for slots; None: unknown, and no slot is given up.
        """
        if self.table.is_empty:
            self._admit()
        may_shrink = coming is not None and not self.table.has_waiting
        may_shrink &= not self.slots.size.has_turns
        smaller = self.slots.next_slots if may_shrink else None
        self.state, counters = self.slots.decode(
            self.params, self.state, np.int32(-1 if smaller is None else smaller)
        )
        strings = self.settings.stop_strings
        drawn = None if strings is None else self.programs.drawn(self.state.samples)
        unread, self.unread = self.unread, (self.segment, counters, drawn)
        self.segment += 1
        return [] if unread is None else self._follow(unread, version, coming)

    def reply(self, going_on: Collection[tuple[int, int]]) -> None:
        """Lets samples go on whose next turns were submitted, and those go that will not."""
        self.table.parking.slots = self.slots.size.slots
        if (replies := self.table.replies(going_on, self.segment, self.rows)) is not None:
            self.state, self.aside = self.programs.reply(self.state, self.aside, replies)
            for chunk in chunks_of_replies(self.table.sizes, replies.chunked):
                self.state = self.programs.give(self.params, self.state, *chunk)

    def close(self) -> tuple[list[Group], Array]:
        """Returns: the groups that wait for the next session, and the slot-steps of this one."""

        def uncut(state: DecodeState) -> DecodeState:
            if self.settings.stop_strings is None:
                return state
            return self.programs.cut(state, np.full(state.samples.length.shape, -1, np.int32))

        slot_steps = jax.numpy.copy(self.state.slot_steps)
        self.slots.compile_remaining(self.params, self.state, uncut)
        return self.table.take_waiting(), slot_steps

    def _follow(
        self, unread: tuple[int, Counters, Drawn | None], version: int, coming: int | None
    ) -> list[Turn]:
        """Reads what a segment counted, and does what follows from it."""
        segment, on_device, drawn = unread
        counters, drawn = sharding.to_host((on_device._replace(finals=None), drawn))
        turns = self._read(version)
        if drawn is not None:  # the devices may be a segment ahead of what its text says
            self.state = self.programs.cut(self.state, self.table.stops(drawn, segment))
        leavers = self.table.leave(counters.ended, segment, self.rows)
        if on_device.finals is not None:  # which need not wait for the segment that is under way
            leavers.sort(key=lambda leaver: leaver.place)
            self.leaving.append((leavers[:READ], on_device.finals))
            leavers = leavers[READ:]
        self._fetch(leavers)
        if self.slots.size.has_turns:
            turns += self._read(version)
        if self.table.is_empty and not self.table.has_waiting:
            return turns + self._read(version)
        self._admit()
        smaller = self.slots.next_slots
        is_drained = counters.drained and segment >= self.admitted and not self.table.has_waiting
        if coming is None or smaller is None or not is_drained:
            return turns
        if self._under_way(counters, coming) <= smaller:
            self.state = self.slots.shrink(self.params, self.state)
        return turns

    def _under_way(self, counters: Counters, coming: int) -> int:
        """The samples of the fullest bin that are in slots, or, where samples have turns, that may
        come to be."""
        if not self.slots.size.has_turns:
            return int(counters.live)
        return self.table.most_samples + max(0, coming - self.table.paused)

    def _fetch(self, leavers: Sequence[Leaver]) -> None:
        """Begins to fetch samples that have left their places."""
        for begin in range(0, len(leavers), READ):
            part = leavers[begin : begin + READ]
            places = np.asarray([leaver.place for leaver in part], np.int32)
            places = np.resize(places, READ)
            self.leaving.append((part, self.programs.finals(self.state.samples, places)))

    def _read(self, version: int) -> list[Turn]:
        """The turns of samples that were to be fetched."""
        leaving, self.leaving = self.leaving, []
        turns: list[Turn] = []
        for leavers, values in leaving:
            finals = sharding.to_host(values)
            turns += make_turns(leavers, finals, version)
            places = [leaver.place for leaver in leavers]
            self.table.length.flat[places] = finals.length[: len(places)]
        return turns

    def _admit(self) -> None:
        """Lets groups come to free places, and begin where there are free rows."""
        if self.slots.has_begun and not self.slots.size.has_turns:
            return
        if (entries := self.table.enter(self.segment)) is not None:
            if self.segment or not self.table.is_in_order:
                self.slots.open()
            self.state = self.programs.enter(self.state, entries)
        if (fillings := self.table.fill(self.rows)) is None:
            return
        for batch in prefill_batches(self.table.sizes, fillings):
            self.state = self.programs.prefill(self.params, self.state, *batch)
        queue: Any = self.table.queue, self.rows.row, self.rows.reader
        queue += self.rows.length, self.table.ready
        # Copies: the device may read a host array after the call has returned.
        self.state = self.programs.admit(self.state, *(array.copy() for array in queue))
        self.admitted = self.segment
