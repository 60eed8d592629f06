"""The files of TensorBoard and Weights & Biases, read back record by record."""

from __future__ import annotations

import importlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
    while len(found := _history_now(folder)) < lines and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _history_now(folder: Path) -> list[dict[str, str]]:
    """What is written by now.

    After a head of 7 bytes, records of checksum, length as uint16, kind 1 = whole, and the bytes.
    """
    wandb_pb2 = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, place = file.read_bytes(), 7
        while place + 7 < len(data):
            _, length, kind = struct.unpack_from("<IHB", data, place)
            assert kind == 1
            if place + 7 + length > len(data):
                break  # half written
            record = wandb_pb2.Record()
            record.ParseFromString(data[place + 7 : place + 7 + length])
            place += 7 + length
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append({"/".join(i.nested_key) or i.key: i.value_json for i in items})
    return found
