"""The host's record of the samples on the devices: which groups wait, and who is at which place.

What the host reads is of a segment that was dispatched before; samples may have come to their
places since. So each has the number of the first segment that it is in, and what is read of earlier
ones says nothing of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgrpo.rollout.engine import Answered, Reason, Request, SamplingSettings, Turn
from jaxgrpo.rollout.slots.capacity import CHUNK, CHUNK_TOKENS, Sizes
from jaxgrpo.rollout.slots.parking import Parking
from jaxgrpo.rollout.slots.rows import Filling, Rows
from jaxgrpo.rollout.slots.state import Drawn, Entries, Finals, Replies

NEVER = np.iinfo(np.int32).max
LEAST_CHUNKED = {"cpu": NEVER}
"""By platform, tokens of a reply from which on they are computed in chunks, and not fed one by one.

A chunk takes as long however few of its tokens are real. On two cores feeding replies of 64 tokens
took .74 of the time, and of 256 .71 (docs/performance.md)."""
ELSEWHERE = 32
FEWEST_FED = 16  # tokens that the devices get for each place: so many, or four times as many, ...


class Group(NamedTuple):
    """Requests that read one row, and open with its next token."""

    prompt: np.ndarray  # int32: the row's tokens, and the one that opens the slots
    requests: list[Request]


def row_tokens(request: Request) -> int:
    """How many of a request's tokens are computed in chunks, the one that opens its slot too."""
    return len(request.tokens) - (0 if request.chunked else request.offset)


def group_requests(requests: Iterable[Request]) -> list[Group]:
    """The groups of requests, in the order of their first ones."""
    groups: dict[tuple[int, bytes], Group] = {}
    for request in requests:
        prompt = request.tokens[: row_tokens(request)]
        key = request.ordinal, prompt.tobytes()
        groups.setdefault(key, Group(prompt, [])).requests.append(request)
    return [*groups.values()]


class Party:
    """A group at its places, which leave together, or each when its sample has ended."""

    def __init__(self, group: Group, places: Sequence[int], alone: bool):
        self.group = group
        self.requests: dict[int, Request] = dict(zip(places, group.requests, strict=True))
        self.alone = alone  # each leaves by itself
        self.row: int | None = None

    def leaving(self, ended: Iterable[int]) -> list[int]:
        """Of the places whose samples have ended, those that leave now."""
        places = [place for place in ended if place in self.requests]
        return places if self.alone or len(places) == len(self.requests) else []


class Leaver(NamedTuple):
    """A sample whose turn has ended, and which has left its place unless it may go on."""

    request: Request
    place: int  # counted over all bins
    begin: int  # the first token of its turn there
    is_cut: bool  # by a stop string


class Paused(NamedTuple):
    """A sample whose turn has ended, and which may go on from where it is."""

    bin: int
    place: int
    party: Party

    @property
    def at(self) -> tuple[int, int]:
        return self.bin, self.place


class Table:
    """The samples of a session, waiting or at places."""

    def __init__(self, sizes: Sizes, settings: SamplingSettings, platform: str):
        self.sizes, self.settings = sizes, settings
        self._least_chunked = LEAST_CHUNKED.get(platform, ELSEWHERE)
        places = sizes.bins, sizes.prompts * sizes.group
        self.queue: np.ndarray = np.zeros(places, np.int32)  # `Queue.place`
        self.ready: np.ndarray = np.zeros(sizes.bins, np.int32)
        self._parties: list[list[Party]] = [[] for _ in range(sizes.bins)]
        self._waiting: list[deque[Group]] = [deque() for _ in range(sizes.bins)]
        self._free = [deque(range(places[1])) for _ in range(sizes.bins)]
        self._rowless: list[deque[Party]] = [deque() for _ in range(sizes.bins)]
        self._since = np.full(places, NEVER)  # the first segment that its sample is in
        self._searched = np.zeros(places, int)  # drawn tokens that were searched for stop strings
        self._drawn = np.zeros((*places, settings.max_completion_tokens), np.int32)  # and these
        self._earlier: dict[tuple[int, int], np.ndarray] = {}  # as `Request.drawn` says
        self._is_cut = np.zeros(places, bool)
        self._begin = np.zeros(places, int)  # the first token of its turn, at its place
        self._start = np.zeros(places, int)  # `Samples.start`
        self.length: np.ndarray = np.zeros(places, int)  # tokens when its turn had ended
        self._paused: dict[tuple[int, int], Paused] = {}  # by ordinal and sample
        self._replies: dict[tuple[int, int], tuple[Paused, Request]] = {}  # by bin and place
        self.parking = Parking(sizes)

    def add(self, groups: Sequence[Group]) -> None:
        """Puts groups behind those that wait, as many in each bin, the idlest one first.

        Groups have at most as many samples as a row has readers.
        """
        largest = self.sizes.readers
        groups = [
            Group(group.prompt, group.requests[begin : begin + largest])
            for group in groups
            for begin in range(0, len(group.requests), largest)
        ]
        bins = range(self.sizes.bins)
        order = sorted(bins, key=lambda bin_: len(self._waiting[bin_]) + len(self._parties[bin_]))
        per_bin = math.ceil(len(groups) / self.sizes.bins)
        for number, bin_ in enumerate(order):
            self._waiting[bin_].extend(groups[number * per_bin : (number + 1) * per_bin])

    @property
    def is_empty(self) -> bool:
        """Whether no sample is at a place."""
        return not any(self._parties)

    @property
    def has_waiting(self) -> bool:
        """Whether groups wait for a place or a row."""
        return any(self._waiting) or any(self._rowless)

    @property
    def most_samples(self) -> int:
        """Samples at places of the bin that has most."""
        return max(sum(len(party.requests) for party in parties) for parties in self._parties)

    @property
    def paused(self) -> int:
        """Samples that may go on."""
        return len(self._paused)

    def is_paused(self, request: Request) -> bool:
        """Whether it is the next turn of a sample that goes on; one whose conversation was
        rewritten begins again."""
        key = request.ordinal, request.sample
        return bool(request.offset) and not request.chunked and key in self._paused

    def go_on(self, request: Request) -> None:
        """Takes the next turn of a sample that goes on."""
        paused = self._paused.pop((request.ordinal, request.sample))
        self._replies[paused.at] = paused, request
        if self.parking.is_aside(paused.at):
            self.parking.answer(paused.at)

    def replies(
        self, going_on: Collection[tuple[int, int]], segment: int, rows: Rows
    ) -> Replies | None:
        """Lets samples go on from a segment on, and frees the places of those that will not.

        Args:
          going_on: the ordinals and samples of those that will be answered.

        Returns: what changes; None: nothing does.
        """
        self.parking.begin()
        places = self.queue.shape
        leaves, goes_on = np.zeros(places, bool), np.zeros(places, bool)
        for key in [key for key in self._paused if key not in going_on]:
            bin_, place, party = self._paused.pop(key)
            leaves[bin_, place] = True
            self._leave(bin_, place, party, rows)
        in_slots = [at for at in self._replies if not self.parking.is_aside(at)]
        waiting = (paused.at for paused in self._paused.values())
        moves, back = self.parking.move(at for at in waiting if not self.parking.is_aside(at))
        going = [self._replies.pop(at) for at in (*in_slots, *back)]
        if not going and not leaves.any() and not self.parking.moves_any(moves):
            return None
        limit, start, chunked = (np.zeros(places, np.int32) for _ in range(3))
        fed: dict[tuple[int, int], np.ndarray] = {}
        for paused, request in going:
            before, at = paused.party.requests[paused.place], paused.at
            goes_on[at], paused.party.requests[paused.place] = True, request
            turn, start[at] = self.length[at] - self._begin[at], self.length[at]
            fed[at] = request.tokens[len(before.tokens) + turn :]
            self._begin[at] = start[at] + len(fed[at])
            chunked[at] = len(fed[at]) if len(fed[at]) >= self._least_chunked else 0
            limit[at] = self._begin[at] + request.limit
            self._await_strings(at, request, segment)
        tokens = _padded(fed, places, self.settings.max_completion_tokens)
        return Replies(leaves, goes_on, start, tokens, chunked, limit, moves)

    @property
    def is_in_order(self) -> bool:
        """Whether the n-th samples of all bins read the rows n // G: the order of aligned slots."""
        group = self.sizes.group
        return all(
            len(party.requests) == group or party is parties[-1]
            for parties in self._parties
            for party in parties
        )

    def take_waiting(self) -> list[Group]:
        """The groups without places, which then wait no longer here."""
        groups = [group for waiting in self._waiting for group in waiting]
        for waiting in self._waiting:
            waiting.clear()
        return groups

    def enter(self, segment: int) -> Entries | None:
        """Gives waiting groups free places, from a segment on. Returns: what changes; None: nothing
        does."""
        new: dict[tuple[int, int], tuple[Group, Request]] = {}
        for bin_, (waiting, free) in enumerate(zip(self._waiting, self._free, strict=True)):
            while waiting and len(waiting[0].requests) <= len(free):
                group = waiting.popleft()
                places = [free.popleft() for _ in group.requests]
                party = Party(group, places, self.settings.max_turns > 1)
                self._parties[bin_].append(party)
                self._rowless[bin_].append(party)
                for place, request in party.requests.items():
                    new[bin_, place] = group, request
        for place, (group, request) in new.items():
            self._await_strings(place, request, segment)
            self._begin[place] = len(request.tokens) - len(group.prompt)
            before = request.offset - request.prompt_tail
            self._start[place] = before - self._begin[place]
        return self._entries(new) if new else None

    def fill(self, rows: Rows) -> list[list[Filling]] | None:
        """Gives rows to groups at places, in order. Returns: their prompts, by bin; None: no group
        gets one."""
        fillings: list[list[Filling]] = [[] for _ in self._rowless]
        for bin_, rowless in enumerate(self._rowless):
            while rowless and rows.has_free(bin_):
                party = rowless.popleft()
                # The last token opens the slots, the others make up the row.
                tokens = party.group.prompt[:-1]
                party.row = rows.give(bin_, [*party.requests], len(tokens))
                fillings[bin_].append(Filling(tokens, party.row))
                self.parking.queue(bin_, len(party.requests))
                for place in party.requests:
                    self.queue[bin_, self.ready[bin_] % self.queue.shape[1]] = place
                    self.ready[bin_] += 1
        return fillings if any(fillings) else None

    def leave(self, ended_bits: np.ndarray, segment: int, rows: Rows) -> list[Leaver]:
        """Frees the places of samples that have ended, as a segment's counters say, and the
        rows that no sample reads any more; those with turns keep theirs. Returns: whose turns have
        ended."""
        leavers: list[Leaver] = []
        is_ended = np.unpackbits(ended_bits, axis=-1, count=self.queue.shape[1]).astype(bool)
        is_ended &= self._since <= segment
        for bin_, parties in enumerate(self._parties):
            if not is_ended[bin_].any():
                continue
            ended = set(np.flatnonzero(is_ended[bin_]).tolist())
            for party in [*parties]:
                for place in party.leaving(sorted(ended & party.requests.keys())):
                    at, request = (bin_, place), party.requests[place]
                    number, begin = bin_ * self.queue.shape[1] + place, int(self._begin[at])
                    leavers.append(Leaver(request, number, begin, bool(self._is_cut[at])))
                    self._since[at] = NEVER
                    if party.alone:
                        self._paused[request.ordinal, request.sample] = Paused(bin_, place, party)
                    else:
                        self._leave(bin_, place, party, rows)
        return leavers

    def _leave(self, bin_: int, place: int, party: Party, rows: Rows) -> None:
        """Frees a place, and with the last of a group its row."""
        self.parking.leave((bin_, place))
        del party.requests[place]
        self._free[bin_].append(place)
        if not party.requests:
            assert party.row is not None
            rows.release(bin_, party.row)
            self._parties[bin_].remove(party)

    def _await_strings(self, at: tuple[int, int], request: Request, segment: int) -> None:
        """From this segment on the request's tokens, none so far, are searched for stop strings."""
        self._since[at], self._searched[at], self._is_cut[at] = segment, 0, False
        self._earlier[at] = request.tokens[len(request.tokens) - request.drawn :]

    def stops(self, drawn: Drawn, segment: int) -> np.ndarray:
        """After how many tokens stop strings end samples, [D, M]; -1: not this one.

        Args:
          drawn: at the end of the segment, on the host; called for every segment, in order.
        """
        strings = self.settings.stop_strings
        assert strings is not None
        arrays: Any = drawn
        length = np.full(arrays.number.shape, -1, np.int32)
        is_new = (arrays.number > self._searched) & (self._since <= segment)
        for at in zip(*np.nonzero(is_new), strict=True):
            number, searched = int(arrays.number[at]), int(self._searched[at])
            tokens, begin = self._drawn[at], int(self._begin[at])
            tokens[searched:number] = arrays.newest[at][searched - number :]
            fewest = self.settings.min_completion_tokens - int(self._start[at]) - begin
            text, earlier = tokens[:number], self._earlier[at]  # in which a string may begin
            if before := len(earlier):
                text = np.concatenate([earlier, text])
            end = strings.end(text, before + searched, before + fewest)
            self._searched[at] = number if end is None else len(tokens)
            length[at] = -1 if end is None else begin - before + end
        self._is_cut |= length >= 0
        return length

    def _entries(self, new: dict[tuple[int, int], tuple[Group, Request]]) -> Entries:
        places, longest = self.queue.shape, self.settings.max_completion_tokens
        is_new, opening = np.zeros(places, bool), np.zeros(places, np.int32)
        keys, threshold = np.zeros((*places, 2), np.uint32), np.zeros(places, np.float32)
        limit, start = np.zeros(places, np.int32), np.zeros(places, np.int32)
        greedy = np.zeros(places, bool)
        fed: dict[tuple[int, int], np.ndarray] = {}
        for at, (group, request) in new.items():
            is_new[at], opening[at], keys[at] = True, group.prompt[-1], request.key
            greedy[at], threshold[at] = request.is_greedy, request.threshold
            fed[at] = request.tokens[len(group.prompt) :]
            limit[at], start[at] = len(fed[at]) + request.limit, self._start[at]
        has_turns = self.settings.max_turns > 1
        has_limit = has_turns or (limit[is_new] != longest).any()
        return Entries(
            is_new,
            keys,
            opening,
            threshold,
            start if has_turns or start.any() else None,
            limit if has_limit else None,
            greedy if greedy.any() else None,
            _padded(fed, places, longest) if any(map(len, fed.values())) else None,
            self._states(new),
        )

    def _states(self, new: dict[tuple[int, int], tuple[Group, Request]]) -> Any:
        """The states of the rules that answer samples, at their places; None: none answer."""
        if self.settings.answering is None:
            return None
        places = tuple(map(np.asarray, zip(*new, strict=True)))

        def by_place(*leaves: Any) -> np.ndarray:
            values = np.stack(leaves)
            array = np.zeros((*self.queue.shape, *values.shape[1:]), values.dtype)
            array[places] = values
            return array

        return jax.tree.map(by_place, *(request.state for _, request in new.values()))


def _padded(
    fed: Mapping[tuple[int, int], np.ndarray], places: tuple[int, ...], longest: int
) -> np.ndarray:
    """[D, M, F]: the tokens of some places, -1 behind the last; F is one of few numbers, since each
    is compiled."""
    most, width = max(map(len, fed.values()), default=0), FEWEST_FED
    while width < most:
        width *= 4
    width = min(longest, width)
    array = np.full((*places, width), -1, np.int32)
    for at, tokens in fed.items():
        array[at][: len(tokens)] = tokens
    return array


def chunks_of_replies(
    sizes: Sizes, chunked: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """What `replying.give` is called with, for so many tokens [D, M] of replies: place, size and
    left."""
    side, left = min(CHUNK_TOKENS // CHUNK, sizes.slots), chunked.copy()
    while left.any():
        place = np.argsort(-left, axis=1, kind="stable")[:, :side].astype(np.int32)
        before = np.take_along_axis(left, place, 1)
        size = np.minimum(before, CHUNK)
        np.put_along_axis(left, place, before - size, 1)
        yield np.where(size > 0, place, chunked.shape[1]).astype(np.int32), size, before


def make_turns(leavers: Sequence[Leaver], finals: Finals, version: int) -> list[Turn]:
    """The turns of samples that have ended.

    Args:
      leavers: as `Table.leave` gives them.
      finals: of the same samples in the same order, on the host; more may follow.
      version: of the parameters that drew them.
    """
    turns: list[Turn] = []
    arrays: Any = finals
    sums = arrays.confidence
    for at, (request, _, begin, is_cut) in enumerate(leavers):
        length = int(arrays.length[at])
        new = slice(begin, length)
        reason: Reason = "string" if is_cut else "end"
        if not arrays.stopped[at]:
            reason = "confidence" if arrays.unsure[at] else "length"
        turns.append(
            Turn(
                request.ordinal,
                request.sample,
                arrays.tokens[at][new],
                arrays.logp[at][new],
                np.full(max(0, length - begin), version, np.int32),
                reason,
                None if sums is None else np.diff(sums[at], prepend=np.float32(0))[new],
                None if arrays.plays is None else _answered(arrays.plays, at, length),
                *(
                    None if record is None else record[at][new]
                    for record in (arrays.experts, arrays.support)
                ),
            )
        )
    return turns


def _answered(plays: Any, at: int, length: int) -> Answered:
    """The turns of a sample of so many tokens; its last one may have no answer."""
    count = int(plays.count[at])
    number = count + bool((plays.begins[at][count : count + 1] >= 0).any())
    begins, ends = plays.begins[at][:number], plays.ends[at][:number].copy()
    ends[count:] = length
    return Answered(begins, ends, plays.rewards[at][:count], bool(plays.is_done[at]))
