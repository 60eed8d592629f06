"""Plain data of any framework as arrays: nested lists with None, NumPy, torch; and their shapes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, ensure_compile_time_eval, numpy_dtype_promotion
from jax.core import Tracer

from jaxgrpo.core.errors import InputError, refusing
from jaxgrpo.core.types import ARRAYS

UNSCORED = "None = not scored"


def as_array(name: str, value: Any, none: bool = False) -> Array:
    """The numbers of nested lists, of an array, or of a torch tensor, whatever its device.

    A tensor is detached; its numbers of less than 32 bits become float32, which holds them all.

    Args:
      name: opens the message of an error.
      none: whether None may stand for a number; it becomes NaN.

    Raises: InputError on lists that differ in length, with their places, on what is no number, and
    on finite numbers that the array could not hold.

    >>> as_array("rewards", [[1, None], (0.5, 0)], none=True).tolist()
    [[1.0, nan], [0.5, 0.0]]
    """
    numbers, _ = _read(name, value, none, ())
    says = f"{name}: {{reason}}: give numbers"
    # Lists may mix whole numbers, truth values and floats, however strictly arrays are promoted.
    failing = refusing(says, TypeError, ValueError, OverflowError)
    with failing, numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is refused below
        array = jnp.asarray(numbers)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    if not (isinstance(numbers, Array) or isinstance(array, Tracer) or array.dtype == bool):
        limit = float(jnp.finfo(array.dtype).max) if is_float else jnp.iinfo(array.dtype).max
        lost = _lost(numbers, limit) if not is_float or _overflows(array) else None
        if lost is not None:
            raise InputError(
                f"{name} holds {lost:g}, and {array.dtype} holds numbers from {-limit:g} to "
                f"{limit:g}: scale them"
            )
    return array


def _overflows(array: Array) -> bool:
    """Whether an array with known values, also inside a jitted function, holds an infinite one."""
    with ensure_compile_time_eval():
        return bool(jnp.isinf(array).any())


def _lost(value: Any, limit: float) -> float | None:
    """A finite number in what `_read` returns that is larger: 1e39 would be infinite in float32,
    and 3,000,000,000 of a NumPy array negative in int32."""
    if isinstance(value, (list, tuple)):
        return next(filter(None, (_lost(entry, limit) for entry in value)), None)
    if isinstance(value, Array) or getattr(getattr(value, "dtype", None), "kind", "f") not in "iuf":
        return None
    if not hasattr(value, "dtype"):
        return value if limit < abs(value) < math.inf else None
    flat = value.ravel()
    large = flat[((flat > limit) & (flat < math.inf)) | ((flat < -limit - 1) & (flat > -math.inf))]
    return float(large[0]) if large.size else None


def check_shapes(arrays: Mapping[str, Array], sizes: Mapping[str, int]) -> None:
    """Refuses an array of the rollouts whose axes do not fit the rewards, or one another.

    Args:
      arrays: by name; those that not all rollouts have are not looked at.
      sizes: letter of an axis -> its size: P and G, those of the rewards.

    Raises: InputError with the array's name, its shape and the expected one.
    """
    axis_sizes = dict(sizes)
    for name, array in arrays.items():
        if name not in ARRAYS:
            continue
        letters, _ = ARRAYS[name]
        fits = len(letters) == array.ndim and all(
            axis_sizes.setdefault(letter, size) == size
            for letter, size in zip(letters, array.shape, strict=True)
        )
        if not fits:
            shape = tuple(axis_sizes.get(letter, letter) for letter in letters)
            axes = ", ".join(letters)
            expected = ", ".join(map(str, shape))
            raise InputError(
                f"{name} has shape {array.shape}, expected [{axes}] = [{expected}]: P prompts with"
                " G samples each, as the rewards have"
            )


def _read(name: str, value: Any, none: bool, place: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    """What `jnp.asarray` understands, and its shape."""
    if type(value) in (float, int, bool):  # first: there may be a million
        return value, ()
    value = _from_framework(value)
    if isinstance(value, (list, tuple)):
        return _read_list(name, value, none, place)
    where = name + "".join(f"[{index}]" for index in place)
    if value is None:
        if none:
            return float("nan"), ()
        raise InputError(f"{where} is None: give a number; only rewards may be {UNSCORED}")
    if isinstance(value, (str, bytes, Mapping)):
        expected = f"a number, or {UNSCORED}" if none else "a number"
        raise InputError(f"{where} = {value!r}, a {type(value).__name__}: expected {expected}")
    return value, tuple(getattr(value, "shape", ()))


def _read_list(
    name: str, values: list[Any] | tuple[Any, ...], none: bool, place: tuple[int, ...]
) -> tuple[list[Any], tuple[int, ...]]:
    entries = [_read(name, value, none, (*place, index)) for index, value in enumerate(values)]
    shapes = [shape for _, shape in entries]
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            where, first_where = (
                "".join(f"[{i}]" for i in (*place, number)) for number in (index, 0)
            )
            sizes = (_size(shape), _size(shapes[0]))
            fill = UNSCORED if none else "padding that a mask leaves out"
            raise InputError(
                f"{name}{where} has {sizes[0]}, but {name}{first_where} has {sizes[1]}: every list"
                f" of a level must have the same length; fill up with {fill}"
            )
    return [entry for entry, _ in entries], (len(values), *(shapes[0] if shapes else ()))


def _size(shape: tuple[int, ...]) -> str:
    if len(shape) < 2:
        return f"{shape[0]} entries" if shape else "one number"
    return f"shape {shape}"


def _from_framework(value: Any) -> Any:
    """A torch tensor as a NumPy array; an array of objects as lists; anything else as it is."""
    if hasattr(value, "detach") and hasattr(value, "is_floating_point"):
        value = value.detach().cpu()
        narrow = value.is_floating_point() and value.element_size() < 4
        return (value.float() if narrow else value).numpy()  # NumPy has no bfloat16
    return value.tolist() if getattr(getattr(value, "dtype", None), "kind", "") == "O" else value
