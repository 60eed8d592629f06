"""Environments as pure functions of token arrays: they are traced into the loop that draws.

A turn that ends is answered in the step that draws its last token, so the host has no part in it,
however many turns a sample has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgrpo.core.errors import InputError, explaining_own_code, one_line
from jaxgrpo.core.types import GENERATOR
from jaxgrpo.data.written import as_lists
from jaxgrpo.environments.history import Frame

State = Any


class Rules(NamedTuple):
    """An environment in JAX: a pair of pure functions, as an optax transform is.

    Both are of one sample; the engine maps them over all with `jax.vmap`.

    Args:
      reset: (key, row) -> state. The key is a typed one of the sample, and may be in the state; the
        row holds the columns of the data set that are numbers, or lists of as many numbers in each
        row, as arrays.
      step: (state, tokens, length) -> (state, reply, reply_length, reward, done), with tokens [W]
        int32 of a turn, `length` of them, -1 behind, without the token that ended it; reply [R]
        int32, of which `reply_length` count, with any R; reward float32, NaN: none; done bool.
      name: of its reward, the sum over turns.

    The chat template's words around a reply are put there by the engine.
    """

    reset: Callable[[Array, Mapping[str, Array]], State]
    step: Callable[[State, Array, Array], tuple[State, Array, Array, Array, Array]]
    name: str = "environment"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["impl"])
@dataclasses.dataclass(frozen=True)
class _Key:
    """A typed key as host arrays can hold it."""

    words: Array
    impl: Any


def _as_words(state: State) -> State:
    """A state with the words of its typed keys."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return _Key(jax.random.key_data(value), jax.random.key_impl(value))
        return value

    return jax.tree.map(leaf, state)


def _as_keys(state: State) -> State:
    """The state of `_as_words`."""

    def leaf(value: Any) -> Any:
        is_key = isinstance(value, _Key)
        return jax.random.wrap_key_data(value.words, impl=value.impl) if is_key else value

    return jax.tree.map(leaf, state, is_leaf=lambda value: isinstance(value, _Key))


class Answering(NamedTuple):
    """How an engine answers the turns of samples by itself."""

    rules: Rules
    turns: int  # of a sample, at most
    tokens: int  # of a turn, at most
    frame: Frame  # what stands around a reply

    def step(self, state: State, tokens: Array, length: Array) -> Any:
        """`Rules.step` of states as `reset_all` gives them."""
        after, *rest = self.rules.step(_as_keys(state), tokens, length)
        return _as_words(after), *rest


def number_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The columns that `Rules.reset` gets, of all rows: float32, bool, or what fits into int32.

    >>> {name: column.tolist() for name, column in number_columns([{"a": 1, "b": "x"}]).items()}
    {'a': [1]}
    """
    columns = {}
    for name in rows[0]:
        values = [as_lists(row.get(name)) for row in rows]
        if not all(_is_numbers(value) for value in values):
            continue
        with contextlib.suppress(ValueError):  # lists of several lengths
            array = np.asarray(values)
            kinds = {"i": np.int32, "u": np.int32, "f": np.float32}
            narrow = array.astype(kinds.get(array.dtype.kind, bool))
            if array.dtype.kind == "f" or (narrow == array).all():
                columns[name] = narrow
    return columns


def reset_all(
    rules: Rules, columns: Mapping[str, np.ndarray], rows: np.ndarray, seeds: np.ndarray
) -> Any:
    """The first states of samples, n of them, as host arrays; of keys their words.

    Shapes: rows, seeds [n] int32 -> leaves [n, ...].
    """
    by_sample = {name: column[rows] for name, column in columns.items()}
    return jax.device_get(_reset(rules.reset, seeds, by_sample))


def check(rules: Rules, columns: Mapping[str, np.ndarray], tokens: int, where: str) -> None:
    """Traces both functions.

    Args:
      tokens: W, of a turn.
      where: opens messages.

    Raises: InputError where one of them fails, or gives something else than it should.
    """
    row = _Row({name: jnp.asarray(column[0]) for name, column in columns.items()})
    try:
        with explaining_own_code(where):
            state = jax.eval_shape(lambda: rules.reset(jax.random.key(0, impl=GENERATOR), row))
            result = jax.eval_shape(
                rules.step,
                state,
                jax.ShapeDtypeStruct((tokens,), np.int32),
                jax.ShapeDtypeStruct((), np.int32),
            )
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: it cannot be traced ({one_line(error)})") from error
    expected = "(state, reply, reply_length, reward, done)"
    if not isinstance(result, tuple) or len(result) != 5:
        raise InputError(f"{where}: step returns a {type(result).__name__}: return {expected}")
    after, reply, *scalars = result
    if (before := _form(state)) != _form(after):
        raise InputError(
            f"{where}: step makes a state {_form(after)} of {before}: keep its shapes and dtypes"
        )
    if not _is_leaf(reply) or reply.ndim != 1 or reply.dtype != np.int32:
        raise InputError(f"{where}: step replies with {_form(reply)}: give int32 tokens [R]")
    for name, value in zip(("reply_length", "reward", "done"), scalars, strict=True):
        if not _is_leaf(value) or value.shape:
            raise InputError(f"{where}: step gives {name} as {_form(value)}: give a scalar")


class _Row(dict[str, Array]):
    """Columns of a row, which says what there is where one is missing."""

    def __missing__(self, name: str) -> Array:
        names = ", ".join(self) or "none"
        raise InputError(
            f"environment: reset asks for the column {name!r}, and those of numbers are {names}: "
            "add it to the data, as a number in each row"
        )


def _is_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_numbers(entry) for entry in value)
    return isinstance(value, (int, float, np.number, np.bool_))


def _is_leaf(tree: Any) -> bool:
    """Whether it is an array, and not in a list or `None`."""
    return jax.tree.structure(tree) == jax.tree.structure(0)


def _form(tree: Any) -> str:
    leaves, structure = jax.tree.flatten(tree)
    forms = ", ".join(f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in leaves)
    return forms if _is_leaf(tree) else f"{structure} of {forms or 'no array'}"


def _reset_each(reset: Callable[..., Any], seeds: Array, columns: Mapping[str, Array]) -> Any:
    def begin(seed: Array, row: Mapping[str, Array]) -> Any:
        return _as_words(reset(jax.random.key(seed, impl=GENERATOR), row))

    return jax.vmap(begin)(seeds, columns)


_reset = jax.jit(_reset_each, static_argnums=0)
