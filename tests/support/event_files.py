"""The files of TensorBoard and Weights & Biases, read back record by record."""

from __future__ import annotations

import importlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024  # bytes of a block of wandb's files


def records(folder: Path) -> Iterator[Any]:
    """Every Event in the event files, oldest file first.

    A record is its length as uint64, a checksum, the bytes of an Event, a checksum.
    """
    event_pb2 = importlib.import_module("tensorboardX.proto.event_pb2")
    for file in sorted((folder / "tensorboard").iterdir()):
        data, place = file.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            yield event_pb2.Event.FromString(data[place + 12 : place + 12 + length])
            place += length + 16


def events(folder: Path) -> list[tuple[int, str, float]]:
    """(step, tag, value) of every scalar."""
    return [
        (event.step, value.tag, value.simple_value)
        for event in records(folder)
        for value in event.summary.value
    ]


def wandb_history(folder: Path, lines: int) -> list[dict[str, str]]:
    """name -> JSON of each logged line of the one offline run; waits until there are so many.

    wandb's own process writes them, at the latest when the run's process ends.
    """
    end = time.monotonic() + 60
    while len(history := _history_now(folder)) < lines and time.monotonic() < end:
        time.sleep(0.1)
    return history


def _history_now(folder: Path) -> list[dict[str, str]]:
    """What is written by now."""
    wandb_pb2 = importlib.import_module("wandb.proto.wandb_internal_pb2")
    history = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _wandb_records(file.read_bytes()):
            record = wandb_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                history.append({"/".join(i.nested_key) or i.key: i.value_json for i in items})
    return history


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format behind a head of 7 bytes, as far as they are written.

    Blocks of 32 KiB hold pieces: checksum, length as uint16, kind, bytes. A piece is a whole record
    (1), or its first (2), a middle (3) or its last part (4). Nothing begins in the last 6 bytes.
    """
    place, record = 7, b""
    while place + 7 < len(data):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        assert kind in (1, 2, 3, 4)
        if place + 7 + length > len(data):
            return  # half written
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""
