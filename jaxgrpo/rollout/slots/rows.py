"""The host's record of the prompts' cache: which place reads which row, and what fills the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxgrpo.rollout.slots.capacity import CHUNK, Sizes, chunk_shape


class Filling(NamedTuple):
    """A prompt, without its last token, and the row that it comes to."""

    tokens: np.ndarray
    row: int


class Rows:
    """Which rows of each bin are free, and which place reads which of the others."""

    def __init__(self, sizes: Sizes):
        places = sizes.bins, sizes.prompts * sizes.group
        self.row: np.ndarray = np.zeros(places, np.int32)  # by place
        self.reader: np.ndarray = np.zeros(places, np.int32)  # which of its row's, by place
        self.length: np.ndarray = np.zeros((sizes.bins, sizes.rows), np.int32)
        self._free = [list(range(sizes.rows)) for _ in range(sizes.bins)]

    def has_free(self, bin_: int) -> bool:
        """Whether a bin has a row for another group."""
        return bool(self._free[bin_])

    def give(self, bin_: int, places: Sequence[int], length: int) -> int:
        """Gives the places of a group the next free row, for so many tokens of its prompt."""
        row = self._free[bin_].pop(0)
        self.row[bin_, places], self.reader[bin_, places] = row, np.arange(len(places))
        self.length[bin_, row] = length
        return row

    def release(self, bin_: int, row: int) -> None:
        """Takes a row back: the samples that read it have ended."""
        self._free[bin_].append(row)


def prefill_batches(
    sizes: Sizes, fillings: Sequence[Sequence[Filling]]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """What `decoding.prefill` is called with to fill rows of each bin: tokens, row, start.

    Chunks of one prompt follow one another: all first ones come before all second ones.
    """
    side, width = chunk_shape(sizes)
    levels = [_chunks(bin_fillings) for bin_fillings in fillings]
    for level in range(max(map(len, levels))):
        chunks = [each[level] if level < len(each) else [] for each in levels]
        for begin in range(0, max(map(len, chunks)), side):
            yield _batch([each[begin : begin + side] for each in chunks], side, width)


def _chunks(fillings: Sequence[Filling]) -> list[list[tuple[Filling, int]]]:
    """The chunks of prompts, each with where it starts, by how many are before it."""
    levels: list[list[tuple[Filling, int]]] = []
    for filling in fillings:
        for level, start in enumerate(range(0, len(filling.tokens), CHUNK)):
            levels.extend([] for _ in range(level + 1 - len(levels)))
            levels[level].append((filling, start))
    return levels


def _batch(
    chunks: Sequence[Sequence[tuple[Filling, int]]], side: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = (len(chunks), side)
    tokens = np.full((*shape, width), -1, np.int32)
    row, start = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for bin_, bin_chunks in enumerate(chunks):
        for index, (filling, begin) in enumerate(bin_chunks):
            part = filling.tokens[begin : begin + width]
            tokens[bin_, index, : len(part)] = part
            row[bin_, index], start[bin_, index] = filling.row, begin
    return tokens, row, start
