"""The host's record of the samples on the devices: which groups wait, and which is at which place.

What the host reads is of a segment that was dispatched before; groups may have come to their places
since. So each has the number of the first segment that it is in, and what is read of earlier ones
says nothing of it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.rollout.engine import Reason, Request, SamplingSettings, Turn
from jaxgrpo.rollout.slots.capacity import Sizes
from jaxgrpo.rollout.slots.rows import Filling, Rows
from jaxgrpo.rollout.slots.state import Entries, Finals


class Group(NamedTuple):
    """Requests that share a prompt."""

    prompt: np.ndarray  # int32
    requests: list[Request]


def group_requests(requests: Iterable[Request]) -> list[Group]:
    """The groups of requests, in the order of their first ones."""
    groups: dict[tuple[int, bytes], Group] = {}
    for request in requests:
        prompt = request.tokens[: len(request.tokens) - request.offset]
        key = request.ordinal, prompt.tobytes()
        groups.setdefault(key, Group(prompt, [])).requests.append(request)
    return [*groups.values()]


class Seat(NamedTuple):
    """A group at its place."""

    group: Group
    first_segment: int  # that it is in


Place = tuple[int, int]
"""(bin, place in it)"""


class Table:
    """The groups of a session, waiting or at places."""

    def __init__(self, sizes: Sizes, settings: SamplingSettings):
        self.sizes, self.settings = sizes, settings
        self.seats: dict[Place, Seat] = {}
        self.queue: np.ndarray = np.zeros((sizes.bins, sizes.prompts), np.int32)  # `Queue.place`
        self.ready: np.ndarray = np.zeros(sizes.bins, np.int32)
        self._waiting: list[deque[Group]] = [deque() for _ in range(sizes.bins)]
        self._free = [deque(range(sizes.prompts)) for _ in range(sizes.bins)]
        self._rowless: list[deque[int]] = [deque() for _ in range(sizes.bins)]
        samples = sizes.bins, sizes.prompts * sizes.group
        self._searched = np.zeros(samples, int)  # drawn tokens that were searched for stop strings
        self._is_cut = np.zeros(samples, bool)

    def add(self, groups: Sequence[Group]) -> None:
        """Puts groups behind those that wait, as many in each bin, the idlest one first."""
        largest = self.sizes.group
        groups = [
            Group(group.prompt, group.requests[begin : begin + largest])
            for group in groups
            for begin in range(0, len(group.requests), largest)
        ]
        seated = Counter(bin_ for bin_, _ in self.seats)
        bins = range(self.sizes.bins)
        order = sorted(bins, key=lambda bin_: len(self._waiting[bin_]) + seated[bin_])
        per_bin = math.ceil(len(groups) / self.sizes.bins)
        for number, bin_ in enumerate(order):
            self._waiting[bin_].extend(groups[number * per_bin : (number + 1) * per_bin])

    @property
    def is_empty(self) -> bool:
        """Whether no group is at a place."""
        return not self.seats

    @property
    def has_waiting(self) -> bool:
        """Whether groups wait for a place or a row."""
        return any(self._waiting) or any(self._rowless)

    def take_waiting(self) -> list[Group]:
        """The groups without a place, which then wait no longer here."""
        groups = [group for waiting in self._waiting for group in waiting]
        for waiting in self._waiting:
            waiting.clear()
        return groups

    def enter(self, segment: int) -> Entries | None:
        """Gives waiting groups free places, from a segment on. Returns: what changes; None: nothing
        does."""
        new: dict[Place, Group] = {}
        for bin_, (waiting, free) in enumerate(zip(self._waiting, self._free, strict=True)):
            while waiting and free:
                new[bin_, free[0]] = waiting.popleft()
                self._rowless[bin_].append(free.popleft())
        for place, group in new.items():
            self.seats[place] = Seat(group, segment)
            self._searched[self._samples(place)] = 0
            self._is_cut[self._samples(place)] = False
        return self._entries(new) if new else None

    def fill(self, rows: Rows) -> list[list[Filling]] | None:
        """Gives rows to groups at places, in order. Returns: their prompts, by bin; None: no group
        gets one."""
        fillings: list[list[Filling]] = [[] for _ in self._rowless]
        for bin_, rowless in enumerate(self._rowless):
            while rowless and rows.has_free(bin_):
                place = rowless.popleft()
                # The last token opens the slots, the others make up the row.
                tokens = self.seats[bin_, place].group.prompt[:-1]
                row = rows.give(bin_, place, len(tokens))
                fillings[bin_].append(Filling(tokens, row))
                self.queue[bin_, self.ready[bin_] % self.sizes.prompts] = place
                self.ready[bin_] += 1
        return fillings if any(fillings) else None

    def ended(self, is_ended: np.ndarray, segment: int) -> list[Place]:
        """The places whose groups have ended, as a segment's counters [D, P] say."""
        places = [(int(bin_), int(place)) for bin_, place in np.argwhere(is_ended)]
        return [place for place in places if self._is_seated(place, segment)]

    def stops(self, drawn: np.ndarray, segment: int) -> np.ndarray:
        """After how many tokens stop strings end samples, [D, M]; -1: not this one.

        Args:
          drawn: [D, M, T], -1 where no token was drawn by the end of the segment.
        """
        strings = self.settings.stop_strings
        assert strings is not None
        number, length = (drawn >= 0).sum(-1), np.full(drawn.shape[:2], -1, np.int32)
        for bin_, sample in zip(*np.nonzero(number > self._searched), strict=True):
            place = int(bin_), int(sample)
            if not self._is_seated((place[0], place[1] // self.sizes.group), segment):
                continue
            begin = int((drawn[place] >= 0).argmax())  # behind the tokens that were given
            tokens = drawn[place][begin : begin + number[place]]
            fewest = self.settings.min_completion_tokens - begin
            end = strings.end(tokens, int(self._searched[place]), fewest)
            self._searched[place] = number[place] if end is None else drawn.shape[-1]
            length[place] = -1 if end is None else begin + end
        self._is_cut |= length >= 0
        return length

    def leave(self, place: Place) -> tuple[Group, np.ndarray]:
        """Frees a place. Returns: its group, and which of its samples a stop string ended."""
        self._free[place[0]].append(place[1])
        is_cut = self._is_cut[self._samples(place)].copy()
        return self.seats.pop(place).group, is_cut

    def _is_seated(self, place: Place, segment: int) -> bool:
        return place in self.seats and self.seats[place].first_segment <= segment

    def _samples(self, place: Place) -> tuple[int, slice]:
        group = self.sizes.group
        return place[0], slice(place[1] * group, (place[1] + 1) * group)

    def _entries(self, new: dict[Place, Group]) -> Entries:
        sizes, longest = self.sizes, self.settings.max_completion_tokens
        places, samples = (sizes.bins, sizes.prompts), (sizes.bins, sizes.prompts * sizes.group)
        is_new, last = np.zeros(places, bool), np.zeros(places, np.int32)
        keys, limit = np.zeros((*samples, 2), np.uint32), np.zeros(samples, np.int32)
        greedy, threshold = np.zeros(samples, bool), np.zeros(samples, np.float32)
        longest_prefix = max(request.offset for group in new.values() for request in group.requests)
        # Powers of two, so that few sizes are compiled.
        width = 1 << (longest_prefix - 1).bit_length() if longest_prefix else 0
        prefix = np.full((*samples, min(width, longest)), -1, np.int32)
        for place, group in new.items():
            is_new[place], last[place] = True, group.prompt[-1]
            for sample, request in enumerate(group.requests, place[1] * sizes.group):
                at = place[0], sample
                keys[at], greedy[at] = request.key, request.is_greedy
                threshold[at] = request.threshold
                limit[at] = request.offset + request.limit
                prefix[at][: request.offset] = request.tokens[len(group.prompt) :]
        has_limit = (limit[np.repeat(is_new, sizes.group, axis=1)] != longest).any()
        return Entries(
            is_new,
            last,
            keys,
            threshold,
            limit if has_limit else None,
            greedy if greedy.any() else None,
            prefix if width else None,
        )


def make_turns(
    groups: Sequence[tuple[Group, np.ndarray]], finals: Finals, version: int
) -> list[Turn]:
    """The turns of groups that have ended.

    Args:
      groups: as `Table.leave` gives them.
      finals: of the same groups in the same order, on the host; more may follow.
      version: of the parameters that drew them.
    """
    turns: list[Turn] = []
    arrays: Any = finals
    for number, (group, is_cut) in enumerate(groups):
        for sample, request in enumerate(group.requests):
            at = number, sample
            length = int(arrays.length[at])
            new = slice(request.offset, length)
            reason: Reason = "string" if is_cut[sample] else "end"
            if not arrays.stopped[at]:
                is_full = length >= request.offset + request.limit
                reason = "length" if is_full else "confidence"
            raw, sums = arrays.untempered, arrays.confidence
            turns.append(
                Turn(
                    request.ordinal,
                    request.sample,
                    arrays.tokens[at][new],
                    arrays.logp[at][new],
                    np.full(max(0, length - request.offset), version, np.int32),
                    reason,
                    None if raw is None else raw[at][new],
                    None if sums is None else np.diff(sums[at][new], prepend=np.float32(0)),
                )
            )
    return turns
