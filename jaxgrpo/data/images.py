"""Images of rows, which TRL shows to a model with its prompt: here models are shown texts alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxgrpo.core.errors import InputError

NAMES = ("image", "images")
"""The columns of TRL."""


def refuse_columns(where: str, features: Any) -> None:
    """Refuses the columns of a data set that are of images, before any of them is decoded.

    Args:
      features: of `datasets`; None: of other rows.

    Raises: InputError with the column.
    """
    for name in NAMES:
        if isinstance(features, Mapping) and "Image(" in repr(features.get(name)):
            raise _refusal(where, name)


def refuse(where: str, row: Mapping[str, Any]) -> None:
    """Refuses a row with an image. Raises: InputError with its column."""
    for name in NAMES:
        value = row.get(name)
        if any(map(_is_image, value if isinstance(value, (list, tuple)) else [value])):
            raise _refusal(where, name)


def _is_image(value: Any) -> bool:
    """Whether it is an image of Pillow, an array of pixels, or what a file of one holds."""
    if isinstance(value, Mapping):  # as `datasets` stores them
        return value.keys() == {"bytes", "path"} and any(value.values())
    is_array = isinstance(value, np.ndarray) and value.ndim > 1
    return is_array or isinstance(value, bytes) or hasattr(value, "getpixel")


def _refusal(where: str, name: str) -> InputError:
    return InputError(
        f"{where}: column {name!r} holds images, and models are shown texts alone: take the column "
        "out, or give it another name where rewards alone read it"
    )
