"""The host's record of samples that wait beside their slots for a reply, so that others decode
there.

A sample whose turn has ended keeps its slot as long as no other waits for one. Where one does, what
the slot holds of the sample moves to a place aside. Once the reply is there, the sample goes on in
whatever slot is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from jaxgrpo.rollout.slots.capacity import Sizes
from jaxgrpo.rollout.slots.state import Moves

At = tuple[int, int]
"""A bin, and a place of it."""


class Parking:
    """How many slots of each bin are in use, and which samples are aside.

    The devices fill free slots from their queue as soon as there are some, so their number is known
    without asking them.
    """

    def __init__(self, sizes: Sizes):
        self.slots = sizes.slots  # of a bin, now
        self._shape = sizes.bins, sizes.parked
        self._none = sizes.prompts * sizes.group  # no place
        self._in_use = [0] * sizes.bins
        self._queued = [0] * sizes.bins  # samples whose rows are filled, and which wait for a slot
        self._free = [deque(range(sizes.parked)) for _ in range(sizes.bins)]
        self._aside: dict[At, int] = {}
        self._answered: list[deque[At]] = [deque() for _ in range(sizes.bins)]

    def is_aside(self, at: At) -> bool:
        return at in self._aside

    def queue(self, bin_: int, number: int) -> None:
        """So many more samples wait for slots."""
        self._queued[bin_] += number

    def begin(self) -> None:
        """The devices have filled their free slots."""
        for bin_, queued in enumerate(self._queued):
            number = min(queued, self._free_slots(bin_))
            self._queued[bin_] -= number
            self._in_use[bin_] += number

    def leave(self, at: At) -> None:
        """A sample will not go on."""
        if (aside := self._aside.pop(at, None)) is None:
            self._in_use[at[0]] -= 1
        else:
            self._free[at[0]].append(aside)

    def answer(self, at: At) -> None:
        """The reply to a sample that is aside is there: it takes the next slot that is free."""
        self._answered[at[0]].append(at)

    def moves_any(self, moves: Moves) -> bool:
        """Whether any sample moves."""
        return any((places < self._none).any() for places in moves)

    def move(self, paused: Iterable[At]) -> tuple[Moves, list[At]]:
        """Moves samples aside as far as others wait for slots, and those that are answered back.

        Args:
          paused: samples in slots that wait for a reply, those that have waited longest first.

        Returns: what moves, and which samples come back.
        """
        out, back = (np.full(self._shape, self._none, np.int32) for _ in range(2))
        coming: list[At] = []
        waiting: list[list[At]] = [[] for _ in self._in_use]
        for at in paused:
            waiting[at[0]].append(at)
        for bin_, answered in enumerate(self._answered):
            demand = self._queued[bin_] + len(answered) - self._free_slots(bin_)
            while demand > 0 and waiting[bin_] and self._free[bin_]:
                at, aside = waiting[bin_].pop(), self._free[bin_].popleft()
                self._aside[at], out[bin_, aside] = aside, at[1]
                self._in_use[bin_] -= 1
                demand -= 1
            freed: list[int] = []
            while answered and self._free_slots(bin_):
                at = answered.popleft()
                freed.append(aside := self._aside.pop(at))
                back[bin_, aside] = at[1]
                self._in_use[bin_] += 1
                coming.append(at)
            self._free[bin_].extend(freed)
        return Moves(out, back), coming

    def _free_slots(self, bin_: int) -> int:
        return self.slots - self._in_use[bin_]
