"""Functions whose backward pass is written by hand, with the type that they had."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import jax

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result", covariant=True)


@runtime_checkable
class WithBackward(Protocol[Arguments, Result]):
    """A function whose backward pass is written by hand."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result: ...

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], /) -> None: ...


def custom_vjp(
    *static: int,
) -> Callable[[Callable[Arguments, Result]], WithBackward[Arguments, Result]]:
    """`jax.custom_vjp`, whose own type forgets what the function takes and returns.

    Args:
      static: places of arguments that are no arrays.
    """
    decorator: Any = functools.partial(jax.custom_vjp, nondiff_argnums=static)
    return decorator
