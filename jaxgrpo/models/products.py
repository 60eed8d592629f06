"""Products with weights, and what writes a backward pass by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

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


@custom_vjp(2)
def product(x: Array, kernel: Array, contracted: int) -> Array:
    """The last `contracted` dimensions of x with the first of the kernel, as `jnp.tensordot`.

    Computed in the dtype of x. The kernel may be held in more bits: its gradient is summed, over
    tokens and devices, in the dtype in which it is held.

    The kernel's gradient is the product of x and the output's cotangent, in that order. In the
    other, which JAX takes, XLA on a CPU writes the cotangent out transposed, together with the
    operations before it: a third of the time of a feed-forward block's gradient. Only reverse mode,
    once.
    """
    return jnp.tensordot(x, kernel.astype(x.dtype), axes=contracted)


def _product(x: Array, kernel: Array, contracted: int) -> tuple[Array, tuple[Array, Array]]:
    # Not by `product`: what recomputes layers by a policy would not see that it multiplies.
    return jnp.tensordot(x, kernel.astype(x.dtype), axes=contracted), (x, kernel)


def _product_backward(
    contracted: int, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, kernel = saved
    outputs = tuple(range(contracted, kernel.ndim))
    over = tuple(range(cotangent.ndim - len(outputs), cotangent.ndim))
    batch = tuple(range(x.ndim - contracted))
    d_x = jnp.tensordot(cotangent, kernel.astype(x.dtype), axes=(over, outputs))
    d_kernel = jnp.tensordot(x, cotangent, axes=(batch, batch), preferred_element_type=kernel.dtype)
    return d_x, d_kernel


product.defvjp(_product, _product_backward)


def rounded(x: Array, dtype: Any) -> Array:
    """x in a dtype; not a mere conversion, which XLA may leave out where another one follows."""
    if x.dtype == dtype:
        return x
    if x.dtype.itemsize <= jnp.dtype(dtype).itemsize:
        return x.astype(dtype)
    narrow = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, narrow.nexp, narrow.nmant).astype(dtype)


def as_sampled(weights: Array, dtype: Any) -> Array:
    """Weights rounded to a dtype, in which a sampler reads them; the gradient is not rounded.

    For what is not multiplied in that dtype, as scales of norms.
    """
    narrow = rounded(weights, dtype)
    if narrow is weights:
        return weights
    return weights + jax.lax.stop_gradient(narrow.astype(weights.dtype) - weights)


def pieces(x: Array, dtype: Any, most: int | None = None) -> list[Array]:
    """Numbers of a narrower dtype whose sum x is: the first holds the leading bits.

    Args:
      most: how many there may be; with fewer than it takes x is rounded.
    """
    needed = -(-(jnp.finfo(x.dtype).nmant + 1) // (jnp.finfo(dtype).nmant + 1))
    parts: list[Array] = []
    for _ in range(needed if most is None else min(most, needed)):
        parts.append(rounded(x, dtype))
        x = x - parts[-1].astype(x.dtype)
    return parts


@custom_vjp(2, 3)
def product_in_pieces(x: Array, kernel: Array, contracted: int, dtype: str) -> Array:
    """`product` of x in float32 with a kernel of a narrower dtype, in float32.

    x is multiplied as the sum of two numbers of that dtype, so of bfloat16 with 16 of its 24 bits,
    side by side: the kernel is read once. An x of that dtype is multiplied as it is. Gradients are
    those of `product`: x and the cotangent are rounded, and only that of x is kept.
    """
    return _in_pieces(x, kernel, contracted, dtype)[0]


def _in_pieces(
    x: Array, kernel: Array, contracted: int, dtype: str
) -> tuple[Array, tuple[Array, Array, Array]]:
    parts, narrow = pieces(x, dtype, most=2), rounded(kernel, dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    products = jnp.tensordot(jnp.stack(parts), narrow, axes=contracted, preferred_element_type=wide)
    return functools.reduce(jnp.add, products), (parts[0], kernel, jnp.zeros(0, x.dtype))


def _backward_of_pieces(
    contracted: int, dtype: str, saved: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    first, kernel, like = saved
    d_x, d_kernel = _product_backward(contracted, (first, kernel), rounded(cotangent, dtype))
    return d_x.astype(like.dtype), d_kernel


product_in_pieces.defvjp(_in_pieces, _backward_of_pieces)
