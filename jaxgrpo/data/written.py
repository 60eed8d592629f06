"""How a number is written: the text that prompts, gold answers and rewards see of it.

A module by itself, since data, rewards and rollout must write a number alike.
"""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np


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


def widen(value: Any, bits: int) -> Any:
    """A float that came from a column of `bits` as the shortest number that is that float.

    >>> widen(float(np.float32(0.1)), 32)
    0.1
    """
    narrow = {16: np.float16, 32: np.float32}[bits]
    return None if value is None else float(text_of_value(narrow(value)))
