"""How values are written: numbers in prompts, gold answers and rewards, values in JSON, options.

A module by itself, since data, rewards, environments and rollout must write and read them alike.
"""

from __future__ import annotations

import decimal
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxgrpo.core.errors import InputError, written


def text_of_value(value: Any) -> str:
    """A value as text: a number with the fewest digits that tell it, and without an exponent.

    A float32 is the shortest number that is this float32, and so for other widths.

    >>> text_of_value(1e-5), text_of_value(1e16), text_of_value(np.float32(0.1))
    ('0.00001', '10000000000000000', '0.1')
    >>> text_of_value(decimal.Decimal("1.50")), text_of_value(2.0), text_of_value("1e-5")
    ('1.5', '2', '1e-5')
    """
    if isinstance(value, (float, np.floating)):
        return np.format_float_positional(value, trim="-")
    if isinstance(value, decimal.Decimal):
        text = format(value, "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    return str(value)


def is_too_long(value: Any) -> bool:
    """Whether it is a whole number of too many digits: Python reads and writes some 14,000 bits.

    >>> is_too_long(10**3000), is_too_long(10**4000)
    (False, True)
    """
    return isinstance(value, int) and value.bit_length() > 12_000


def widen(value: Any, bits: int) -> Any:
    """A float that came from a column of `bits` as the shortest number that is that float.

    >>> widen(float(np.float32(0.1)), 32)
    0.1
    """
    narrow = {16: np.float16, 32: np.float32}[bits]
    return None if value is None else float(text_of_value(narrow(value)))


WIDTHS = {"halffloat": 16, "float": 32}
"""The names of narrow floats in Arrow -> their bits."""


def widened(value: Any, kind: Any) -> Any:
    """A value of an Arrow type with its narrow floats as their shortest numbers, however deep."""
    if value is None:
        return None
    if width := WIDTHS.get(str(kind)):
        return widen(value, width)
    if hasattr(kind, "item_type"):  # a map, as a list of pairs
        return [(widened(k, kind.key_type), widened(v, kind.item_type)) for k, v in value]
    if isinstance(value, Mapping):
        return {name: widened(entry, kind.field(name).type) for name, entry in value.items()}
    inner = getattr(kind, "value_type", None)
    if inner is None:
        return value
    is_list = hasattr(value, "__len__") and not isinstance(value, (str, bytes))
    return [widened(entry, inner) for entry in value] if is_list else widened(value, inner)


def as_lists(value: Any) -> Any:
    """A value whose arrays are lists, however deep: pandas reads the lists of a table as arrays.

    >>> as_lists({"a": np.array([{"b": np.array([1, 2])}])})
    {'a': [{'b': [1, 2]}]}
    """
    if isinstance(value, Mapping):
        return {name: as_lists(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray):
        return as_lists(value.tolist())
    return list(map(as_lists, value)) if isinstance(value, (list, tuple)) else value


def storable(value: Any) -> Any:
    """A value as JSON holds it: arrays as lists, what is no number or text as its repr.

    >>> storable({"at": np.array([1]), 2: decimal.Decimal("0.5")})
    {'at': [1], '2': "Decimal('0.5')"}
    """
    if is_too_long(value):
        return written(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return storable(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): storable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [storable(entry) for entry in value]
    return without_addresses(written(value))


def without_addresses(text: str) -> str:
    """The repr of an object without its place in memory, which differs from start to start.

    >>> without_addresses("<Board at 0x7f2c>")
    '<Board>'
    """
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def as_json(text: str) -> str | None:
    """How JSON writes what Python reads as a truth value, None or a number, and JSON not at all.

    Read as a text it would pass for an option: "False" counts as true. None: it is another text.

    >>> as_json("False"), as_json("None"), as_json("-.5"), as_json("runs/7"), as_json("007")
    ('false', 'null', '-0.5', None, None)
    """
    words = {"True": "true", "False": "false", "None": "null"}
    is_number = re.fullmatch(r"[+-]?(\.\d+|\d+\.)(e[+-]?\d+)?", text, re.IGNORECASE)
    return repr(float(text)) if is_number else words.get(text)


def split_options(name: str) -> tuple[str, dict[str, Any]]:
    """A name and the options written behind it, as in an address.

    A value that is JSON is read as such, any other one is a text.

    Raises: InputError on an option without a value, one that stands twice, or one as Python writes
      it and JSON does not.
    >>> split_options("FrozenLake-v1?is_slippery=false&map_name=8x8")
    ('FrozenLake-v1', {'is_slippery': False, 'map_name': '8x8'})
    >>> split_options("chain_sum")
    ('chain_sum', {})
    """
    base, _, tail = name.partition("?")
    options: dict[str, Any] = {}
    for entry in tail.split("&") if tail else ():
        option, equals, text = entry.partition("=")
        if not option or not equals or option in options:
            raise InputError(f"{name!r}: write options once each, as {base}?size=100&seed=1")
        if right := as_json(text):
            raise InputError(f"{name!r}: {option}={text} would be a text: write {option}={right}")
        try:
            options[option] = json.loads(text)
        except ValueError:
            options[option] = text
    return base, options
