"""How rows pass the matrices of their experts: sorted by expert, or in slots of each expert.

On a TPU rows are sorted, so that each expert's are side by side, and multiplied by `grouped`.
Elsewhere as many first rows of each expert come into slots, whose products are one batch, and what
is left is multiplied in blocks; few rows are sorted there too. Nothing is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped

from jaxgrpo.models.products import custom_vjp

LEAST_BLOCK, BLOCK = 8, 512
"""Rows of one expert that are multiplied at once: at the least, and at most but on a CPU."""


class Sorting(NamedTuple):
    """Rows, (token, place among its experts), and how they are sorted by expert."""

    expert: Array  # [rows], of each; as many as there are: none of those that are here
    order: Array  # [rows], the permutation that sorts
    inverse: Array  # [rows]
    sizes: Array  # [experts], rows of each


def sort(expert: Int[Array, " rows"], number: int) -> Sorting:
    """Sorts rows by their experts, of which there are so many, stable."""
    order = jnp.argsort(expert, stable=True)
    places = jnp.arange(expert.size, dtype=order.dtype)
    inverse = jnp.zeros_like(order).at[order].set(places)
    return Sorting(expert, order, inverse, jnp.bincount(expert, length=number))


def passed(
    through: Any, k: int, x: Float[Array, "tokens I"], sorting: Sorting, weights: Sequence[Array]
) -> Float[Array, "rows O"]:
    """What experts give for the rows, k for each token.

    Args:
      through: (times, per_row, rows, weights) -> what experts give for rows, where times(rows,
        matrices of experts) multiplies each by that of its expert, and per_row(vectors of experts)
        gives that of each row's expert.
    """
    by_rows = functools.partial(_by_rows, through, k)
    slots = _slots(sorting.order.size, len(sorting.sizes))
    if not slots:
        return by_rows(x, sorting, weights)
    by_slots = functools.partial(_by_slots, through, k, slots)
    return jax.lax.platform_dependent(x, sorting, [*weights], tpu=by_rows, default=by_slots)


def _by_rows(through: Any, k: int, x: Array, sorting: Sorting, weights: Sequence[Array]) -> Array:
    """[rows, O]: sorted rows, each expert's side by side, multiplied by `grouped`."""
    flat, order, inverse, sizes = sorting
    expert = jnp.minimum(flat[order], len(sizes) - 1)  # of each sorted row
    times = functools.partial(_grouped_by, sizes)
    rows = permuted(x, order, inverse, k)
    return permuted(through(times, lambda leaf: leaf[expert], rows, weights), inverse, order, 1)


def _grouped_by(sizes: Array, rows: Array, kernel: Array) -> Array:
    return grouped(rows, kernel, sizes)


@custom_vjp(0, 1, 2)
def _by_slots(
    through: Any, k: int, slots: int, x: Array, sorting: Sorting, weights: Sequence[Array]
) -> Array:
    """[rows, O]: as many first rows of all experts at once, and what is left in blocks.

    Rows stay in their slots from the first product to the last: sorted ones would move into slots
    and back for each, which takes twice the memory of an update.
    """
    return _in_slots(through, k, slots, x, sorting, weights)[0]


def _in_slots(
    through: Any, k: int, slots: int, x: Array, sorting: Sorting, weights: Sequence[Array]
) -> tuple[Array, Any]:
    part = functools.partial(through, times, _per_row)
    row, _ = _rows_of_slots(sorting, slots)
    y, pullback = jax.vjp(part, x[row // k], weights)
    out = y.reshape(-1, y.shape[-1])[_slot_of_row(sorting, slots)[0]]
    blocks = jax.custom_batching.sequential_vmap(functools.partial(_left, part, k, slots))
    return blocks(out, x, sorting, weights), (x, sorting, weights, pullback)


def _in_slots_backward(
    through: Any, k: int, slots: int, saved: Any, cotangent: Array
) -> tuple[Array, None, Sequence[Array]]:
    x, sorting, weights, pullback = saved
    row, is_real = _rows_of_slots(sorting, slots)
    d_slots, d_weights = pullback(jnp.where(is_real[..., None], cotangent[row], 0))
    slot, is_there = _slot_of_row(sorting, slots)
    d_rows = jnp.where(is_there[:, None], d_slots.reshape(-1, x.shape[-1])[slot], 0)
    part = functools.partial(through, times, _per_row)
    blocks = jax.custom_batching.sequential_vmap(functools.partial(_left_backward, part, k, slots))
    d_rows, d_weights = blocks(d_rows, d_weights, cotangent, x, sorting, weights)
    return d_rows.reshape(len(x), k, -1).sum(1), None, d_weights


_by_slots.defvjp(_in_slots, _in_slots_backward)


def _rows_of_slots(sorting: Sorting, slots: int) -> tuple[Array, Array]:
    """[experts, slots]: the row in each slot, and whether there is one."""
    place, sizes = jnp.arange(slots), sorting.sizes
    at = (jnp.cumsum(sizes) - sizes)[:, None] + place
    return sorting.order[jnp.minimum(at, len(sorting.order) - 1)], place < sizes[:, None]


def _slot_of_row(sorting: Sorting, slots: int) -> tuple[Array, Array]:
    """[rows]: the slot of each row, and whether it has one."""
    number = len(sorting.sizes)
    expert = jnp.minimum(sorting.expert, number - 1)
    place = sorting.inverse - (jnp.cumsum(sorting.sizes) - sorting.sizes)[expert]
    is_there = (sorting.expert < number) & (place < slots)
    return expert * slots + jnp.minimum(place, slots - 1), is_there


def _per_row(leaf: Array) -> Array:
    return leaf[..., None, :]


def _left(
    part: Any,
    k: int,
    slots: int,
    out: Array,
    x: Array,
    sorting: Sorting,
    weights: Sequence[Array],
) -> Array:
    """`out` with the rows that have no slots, in blocks of half as many."""
    blocks = _blocks(len(out), sorting.sizes, max(LEAST_BLOCK, slots // 2), slots)

    def step(i: Array, out: Array) -> Array:
        row, is_own, expert = blocks.rows(i, sorting.order)
        y = part(x[row // k], [leaf[expert] for leaf in weights])
        return out.at[jnp.where(is_own, row, len(out))].set(y, mode="drop")

    return blocks.each(step, out)


def _left_backward(
    part: Any,
    k: int,
    slots: int,
    d_rows: Array,
    d_weights: Sequence[Array],
    cotangent: Array,
    x: Array,
    sorting: Sorting,
    weights: Sequence[Array],
) -> tuple[Array, Sequence[Array]]:
    """The gradients with those of the rows that have no slots."""
    blocks = _blocks(len(d_rows), sorting.sizes, max(LEAST_BLOCK, slots // 2), slots)

    def step(i: Array, gradients: Any) -> Any:
        d_rows, d_weights = gradients
        row, is_own, expert = blocks.rows(i, sorting.order)
        _, pullback = jax.vjp(part, x[row // k], [leaf[expert] for leaf in weights])
        d_block, d_leaves = pullback(jnp.where(is_own[:, None], cotangent[row], 0))
        d_rows = d_rows.at[jnp.where(is_own, row, len(d_rows))].set(d_block, mode="drop")
        pairs = zip(d_weights, d_leaves, strict=True)
        return d_rows, [total.at[expert].add(leaf) for total, leaf in pairs]

    return blocks.each(step, (d_rows, [*d_weights]))


@custom_vjp()
def times(x: Shaped[Array, "*E rows I"], kernel: Shaped[Array, "*E I O"]) -> Array:
    """Rows times the matrices of their experts, as `products.product` of one matrix."""
    return x @ kernel.astype(x.dtype)


def _times(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel.astype(x.dtype), (x, kernel)


def _times_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = saved
    d_x = cotangent @ jnp.swapaxes(kernel.astype(x.dtype), -1, -2)
    turned = jnp.swapaxes(x, -1, -2)
    return d_x, jnp.matmul(turned, cotangent, preferred_element_type=kernel.dtype)


times.defvjp(_times, _times_backward)


@custom_vjp(3)
def permuted(values: Array, order: Array, inverse: Array, copies: int) -> Array:
    """The permutation `order` of values that are each there so often, one after another.

    Its gradient is a permutation too, and a sum over copies.
    """
    del inverse
    return values[order // copies]


def _permuted(values: Array, order: Array, inverse: Array, copies: int) -> tuple[Array, Array]:
    return values[order // copies], inverse


def _permuted_backward(copies: int, inverse: Array, cotangent: Array) -> tuple[Array, None, None]:
    gradient = cotangent[inverse]
    return gradient.reshape(-1, copies, gradient.shape[-1]).sum(1), None, None


permuted.defvjp(_permuted, _permuted_backward)


@custom_vjp()
def grouped(
    x: Float[Array, "rows I"], kernel: Shaped[Array, "experts I O"], sizes: Int[Array, " experts"]
) -> Float[Array, "rows O"]:
    """The rows of each expert, side by side in their order, times its matrix.

    Computed in the dtype of x; the kernel's gradient is summed in the kernel's own. Only reverse
    mode, once.
    """
    return _multiplied(x, kernel.astype(x.dtype), sizes)


def _multiplied(x: Array, kernel: Array, sizes: Array, turned: bool = False) -> Array:
    """Args: turned: by the transposed matrices, [experts, outputs, inputs]."""
    # In the batches of `sharding.over_data`, one on each device, a loop must not run for all.
    one_by_one = jax.custom_batching.sequential_vmap

    def ragged(x: Array, kernel: Array, sizes: Array) -> Array:
        return jax.lax.ragged_dot(x, jnp.swapaxes(kernel, 1, 2) if turned else kernel, sizes)

    in_blocks = functools.partial(_in_blocks, turned=turned)
    return jax.lax.platform_dependent(
        x, kernel, sizes, tpu=one_by_one(ragged), default=one_by_one(in_blocks)
    )


def _grouped(x: Array, kernel: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _multiplied(x, kernel.astype(x.dtype), sizes), (x, kernel, sizes)


def _grouped_backward(
    saved: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array, None]:
    x, kernel, sizes = saved
    d_x = _multiplied(cotangent, kernel.astype(x.dtype), sizes, turned=True)
    summed = functools.partial(_outer_in_blocks, dtype=kernel.dtype)
    d_kernel = jax.custom_batching.sequential_vmap(summed)(x, cotangent, sizes)
    return d_x, d_kernel, None


grouped.defvjp(_grouped, _grouped_backward)


class _Blocks(NamedTuple):
    """Blocks of `size` rows of one expert each."""

    size: int
    count: Array  # []: how many there are
    expert: Array  # [more than that], of each
    first: Array  # row
    end: Array  # behind the last row of the expert
    even: int  # how many there are where all experts have as many rows

    def at(self, i: Array, rows: int) -> tuple[Array, Array]:
        """(where block i is sliced from an array of so many rows; bool [size, 1], what is in it)"""
        start = jnp.minimum(self.first[i], rows - self.size)
        row = start + jnp.arange(self.size)
        return start, ((row >= self.first[i]) & (row < self.end[i]))[:, None]

    def rows(self, i: Array, order: Array) -> tuple[Array, Array, Array]:
        """Of block i: the rows that are sorted to it, [size]; which of them are its own; and its
        expert."""
        start, is_own = self.at(i, len(order))
        row = jax.lax.dynamic_slice_in_dim(order, start, self.size)
        return row, is_own[:, 0], self.expert[i]

    def each(self, body: Callable[[Array, Any], Any], start: Any) -> Any:
        """Runs through all, as `jax.lax.fori_loop`. A plan reads from the loop's name how often, as
        `even` says (`planning.hlo`): its end is computed."""
        with jax.named_scope(f"trips_{self.even}"):
            return jax.lax.fori_loop(0, self.count, body, start)


def _slots(rows: int, number: int) -> int:
    """Rows of each expert that are multiplied at once but on a TPU; 0: so few that a product for
    all experts would read more matrices than are needed."""
    step = LEAST_BLOCK * number
    return min(rows, -(-rows * 5 // (4 * step)) * LEAST_BLOCK) if rows >= number else 0


def _blocks(rows: int, sizes: Array, size: int, skipped: int) -> _Blocks:
    """All rows of experts but for the first ones in blocks."""
    size, ends, number = min(size, rows), jnp.cumsum(sizes), len(sizes)
    even = min(rows, number) * -(-max(-(-rows // number) - skipped, 0) // size)
    counts = -(-jnp.maximum(sizes - skipped, 0) // size)
    last = jnp.cumsum(counts)
    block = jnp.arange(-(-rows // size) + number)
    expert = jnp.minimum(jnp.searchsorted(last, block, side="right"), number - 1)
    first = (ends - sizes)[expert] + skipped + (block - (last - counts)[expert]) * size
    return _Blocks(size, last[-1], expert, first, ends[expert], even)


def _in_blocks(x: Array, kernel: Array, sizes: Array, turned: bool) -> Array:
    """Few rows, block by block: XLA's own ragged_dot multiplies all rows by the matrices of all
    experts but on a TPU (JAX 0.10.2)."""
    rows, outputs = len(x), kernel.shape[1 if turned else 2]
    blocks = _blocks(rows, sizes, LEAST_BLOCK, 0)

    def multiply(i: Array, out: Array) -> Array:
        start, is_own = blocks.at(i, rows)
        block = jax.lax.dynamic_slice_in_dim(x, start, blocks.size)
        before = jax.lax.dynamic_slice_in_dim(out, start, blocks.size)
        matrix = kernel[blocks.expert[i]]
        product = jnp.where(is_own, block @ (matrix.T if turned else matrix), before)
        return jax.lax.dynamic_update_slice_in_dim(out, product, start, 0)

    return blocks.each(multiply, jnp.zeros((rows, outputs), x.dtype))


def _outer_in_blocks(x: Array, cotangent: Array, sizes: Array, dtype: Any) -> Array:
    """The gradients of kernels: without blocks XLA for a TPU multiplies all rows by the matrices of
    all experts (JAX 0.10.2)."""
    rows, number = len(x), len(sizes)
    blocks = _blocks(rows, sizes, max(LEAST_BLOCK, min(BLOCK, rows // number)), 0)

    def add(i: Array, total: Array) -> Array:
        start, is_own = blocks.at(i, rows)
        block, other_block = (
            jax.lax.dynamic_slice_in_dim(leaf, start, blocks.size) for leaf in (x, cotangent)
        )
        block = jnp.where(is_own, block, 0)
        product = jnp.matmul(block.T, other_block, preferred_element_type=dtype)
        return total.at[blocks.expert[i]].add(product)

    return blocks.each(add, jnp.zeros((number, x.shape[1], cotangent.shape[1]), dtype))
