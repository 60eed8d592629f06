"""A feed-forward part of experts: each token passes those that the caller's `route` names.

Tokens are sorted by expert, so that each expert's are side by side, and multiplied by `grouped`.
Nothing is dropped, and no array has both all tokens and all experts but the router's scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Shaped

from jaxgrpo.models.api import ExpertsKind, ModelConfig, Route, Spread
from jaxgrpo.models.layers import ACTIVATIONS, Dense, FeedForward, LinearMap, matrix, scaled_by
from jaxgrpo.models.products import as_sampled, custom_vjp, rounded

LEAST_BLOCK, BLOCK = 8, 512
"""Rows of one expert that are multiplied at once: at the least, and at most but on a CPU."""
LEAVES = ("kernel", "kernel_scale", "bias", "lora_a", "lora_b")
TINY = 1e-20
"""Added to a sum of sigmoids that is divided by, as transformers does."""


class Router(nnx.Module):
    """Scores of the experts, in at least float32 whatever the model's dtype.

    The correction is added to scores where experts are chosen, and to no gate; nothing trains it.
    """

    def __init__(self, config: ModelConfig, kind: ExpertsKind, rngs: nnx.Rngs):
        sizes = {"embed": config.hidden_size, "router": kind.number}
        self.dtype: str = config.dtype
        self.kernel: nnx.Param[Array] = matrix((*sizes.values(),), (*sizes,), config.dtype, rngs)
        bias = jnp.zeros(kind.number, config.dtype)
        self.bias: nnx.Param[Array] | None = (
            nnx.Param(bias, axes=("router",)) if kind.bias else None
        )
        zeros = jnp.zeros(kind.number, jnp.promote_types(config.dtype, jnp.float32))
        self.correction: nnx.Param[Array] | None = (
            nnx.Param(zeros, axes=("router",)) if kind.scores == "sigmoid" else None
        )

    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B experts"]:
        """The scores before softmax or sigmoid."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        kernel = as_sampled(self.kernel[...], self.dtype).astype(wide)
        # By default a TPU multiplies float32 in bfloat16, and would choose other experts.
        logits = jnp.tensordot(x.astype(wide), kernel, axes=1, precision="highest")
        if self.bias is None:
            return logits
        return logits + as_sampled(self.bias[...], self.dtype).astype(wide)

    def choice(
        self, scores: Float[Array, "*B experts"], kind: ExpertsKind
    ) -> Float[Array, "*B experts"]:
        """What experts are chosen by: without gradient, -inf in groups that a token does not pass.

        A group's score is the sum of its two highest, without corrections its highest.
        """
        scores = jax.lax.stop_gradient(scores)
        if self.correction is not None:
            scores = scores + jax.lax.stop_gradient(self.correction[...])
        if kind.groups == 1:
            return scores
        by_group = scores.reshape(*scores.shape[:-1], kind.groups, -1)
        group_scores = jax.lax.top_k(by_group, 1 + (self.correction is not None))[0].sum(-1)
        first = jax.lax.top_k(group_scores, kind.top_groups)[1]
        is_first = (jnp.arange(kind.groups) == first[..., None]).any(-2)
        return jnp.where(is_first[..., None], by_group, -jnp.inf).reshape(scores.shape)


class ExpertMap(LinearMap):
    """A linear map of each expert: kernel [experts, inputs, outputs], bias [experts, outputs].

    With adapters lora_a [experts, inputs, rank], which gate and up have together, and lora_b
    [experts, rank, outputs]; in 8 bits kernel_scale [experts, outputs].
    """

    def leaves(self) -> dict[str, tuple[Array, tuple[str | None, ...]]]:
        """The arrays by their names, each with its logical axes; of inputs and outputs only "mlp"
        may be divided."""
        params = {name: getattr(self, name) for name in LEAVES}
        return {
            name: (
                param[...],
                tuple(
                    axis if axis in ("experts", "mlp") else None
                    for axis in param.get_metadata("axes")
                ),
            )
            for name, param in params.items()
            if param is not None
        }


class Experts(nnx.Module):
    """y = sum over the token's experts of gate_e * down_e(activation(gate_e(x)) * up_e(x)).

    Gates are the experts' scores by a softmax over all or a sigmoid of each, in float32;
    `normalised` ones are divided by their sum. A shared expert is added for all tokens, in some
    models times sigmoid(shared_gate(x)).
    """

    def __init__(self, config: ModelConfig, kind: ExpertsKind, rngs: nnx.Rngs):
        embed, mlp = {"embed": config.hidden_size}, {"mlp": kind.size}
        self.router: Router = Router(config, kind, rngs)
        stacked: Any = {"bias": kind.bias, "stacked": {"experts": kind.number}}
        self.gate: ExpertMap = ExpertMap("experts/gate", embed, mlp, config, rngs, **stacked)
        self.up: ExpertMap = ExpertMap("experts/up", embed, mlp, config, rngs, **stacked)
        self.down: ExpertMap = ExpertMap("experts/down", mlp, embed, config, rngs, **stacked)
        self.shared: FeedForward | None = (
            FeedForward(config, kind.shared, rngs, "experts/shared") if kind.shared else None
        )
        self.shared_gate: Dense | None = (
            Dense("experts/shared_gate", embed, {"router": 1}, config, rngs)
            if kind.shared and kind.shared_gate
            else None
        )
        self.activation: str = config.activation
        self.dtype: str = config.dtype

    def __call__(
        self, x: Float[Array, "*B E"], route: Route, spread: Spread, memory: Any, kind: ExpertsKind
    ) -> tuple[Float[Array, "*B E"], Any]:
        is_softmax = kind.scores == "softmax"
        scores = (jax.nn.softmax if is_softmax else jax.nn.sigmoid)(self.router(x))
        shares = scores if is_softmax else scores / (scores.sum(-1, keepdims=True) + TINY)
        experts, memory = route(self.router.choice(scores, kind), shares, memory, kind)
        gates = jnp.take_along_axis(scores, experts, axis=-1)
        if kind.normalised:
            gates = gates / (gates.sum(-1, keepdims=True) + (0.0 if is_softmax else TINY))
        gates = gates if kind.scale == 1.0 else gates * kind.scale
        names = (*("bins", *["rows"] * (x.ndim - 3), "sequence")[: x.ndim - 1], None)
        if kind.clamp is None:
            combine = functools.partial(gated, ACTIVATIONS[self.activation])
        else:
            combine = functools.partial(clamped, *kind.clamp)
        inputs = rounded(x, self.dtype)
        tokens = (inputs, names), (experts, names), (gates.astype(inputs.dtype), names)
        maps = {"gate": self.gate, "up": self.up, "down": self.down}
        weights = {
            (name, leaf): value
            for name, linear in maps.items()
            for leaf, value in linear.leaves().items()
            if (name, leaf) != ("down", "bias")
        }
        scales = {name: linear.scale for name, linear in maps.items()}
        mix = functools.partial(mixed, combine, (*weights,), scales)
        numbers = jnp.arange(kind.number), ("experts",)
        mixed_tokens = spread(mix, tokens, (numbers, *weights.values()))
        if self.down.bias is not None:  # once, and not by each device that has a part of mlp
            bias = as_sampled(self.down.bias[...], self.dtype)
            biases = bias[experts] * gates[..., None]
            mixed_tokens += biases.sum(-2).astype(inputs.dtype)
        if self.shared is None:
            return mixed_tokens, memory
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(self.shared_gate(x))
        return mixed_tokens + shared, memory


def gated(activation: Any, gate: Array, up: Array) -> Array:
    """activation(gate) * up."""
    return activation(gate) * up


def clamped(alpha: float, limit: float, gate: Array, up: Array) -> Array:
    """gate * sigmoid(alpha gate) * (up + 1), with gate at most the limit and up within it."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(scaled_by(gate, alpha)) * (up + 1)


def mixed(
    combine: Any,
    names: Sequence[tuple[str, str]],
    scales: Mapping[str, float],
    x: Float[Array, "*B E"],
    experts: Int[Array, "*B k"],
    gates: Float[Array, "*B k"],
    local: Int[Array, " experts"],
    *weights: Shaped[Array, "experts ..."],
) -> Float[Array, "*B E"]:
    """What the experts give for the tokens, times their gates and summed.

    Args:
      local: the numbers, one after another, of the experts whose weights are here; what a token's
        others give counts as 0.
      names: of the weights, (map, leaf of an ExpertMap).
      scales: of each map's adapters.
    """
    leaves, k = dict(zip(names, weights, strict=True)), experts.shape[-1]
    is_local = (experts >= local[0]) & (experts <= local[-1])
    flat = jnp.where(is_local, experts - local[0], len(local)).reshape(-1)  # others behind
    order, inverse = _sorted(flat)  # of (token, place among its experts), by expert
    sizes = jnp.bincount(flat, length=len(local))
    rows = permuted(x.reshape(-1, x.shape[-1]), order, inverse, k)
    expert = jnp.minimum(flat[order], len(local) - 1)  # of each row

    def low(name: str, rows: Array) -> Array | None:
        """rows · lora_a, of maps that have one."""
        return grouped(rows, leaves[name, "lora_a"], sizes) if (name, "lora_a") in leaves else None

    def apply(name: str, rows: Array, inner: Array | None) -> Array:
        y = grouped(rows, leaves[name, "kernel"], sizes)
        if (name, "kernel_scale") in leaves:
            y = (y * leaves[name, "kernel_scale"][expert]).astype(y.dtype)
        if (name, "lora_b") in leaves:
            assert inner is not None  # a map with a lora_b has a lora_a, or shares gate's
            added = grouped(inner, leaves[name, "lora_b"], sizes)
            y = y + scaled_by(added, scales[name])
        bias = leaves.get((name, "bias"))
        return y if bias is None else y + bias.astype(y.dtype)[expert]

    inner = low("gate", rows)
    half, inner = apply("gate", rows, inner), low("up", rows) if inner is None else inner
    middle = combine(half, apply("up", rows, inner))
    out = permuted(apply("down", middle, low("down", middle)), inverse, order, 1)
    out = out.reshape(-1, k, x.shape[-1]) * gates.reshape(-1, k, 1)
    out = jnp.where(is_local.reshape(-1, k, 1), out, 0)  # others may be anything, NaN too
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return out.sum(1, dtype=wide).astype(x.dtype).reshape(x.shape)


def _sorted(numbers: Array) -> tuple[Array, Array]:
    """The permutation that sorts, stable, and its inverse."""
    order = jnp.argsort(numbers, stable=True)
    places = jnp.arange(numbers.size, dtype=order.dtype)
    return order, jnp.zeros_like(order).at[order].set(places)


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

    def elsewhere(x: Array, kernel: Array, sizes: Array) -> Array:
        return jax.lax.ragged_dot(x, jnp.swapaxes(kernel, 1, 2) if turned else kernel, sizes)

    in_slots = functools.partial(_in_slots, turned=turned)
    return jax.lax.platform_dependent(
        x, kernel, sizes, tpu=one_by_one(elsewhere), default=one_by_one(in_slots)
    )


def _grouped(x: Array, kernel: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _multiplied(x, kernel.astype(x.dtype), sizes), (x, kernel, sizes)


def _grouped_backward(
    saved: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array, None]:
    x, kernel, sizes = saved
    d_x = _multiplied(cotangent, kernel.astype(x.dtype), sizes, turned=True)

    def summed(function: Any) -> Any:
        return jax.custom_batching.sequential_vmap(functools.partial(function, dtype=kernel.dtype))

    d_kernel = jax.lax.platform_dependent(
        x, cotangent, sizes, tpu=summed(_outer_in_blocks), default=summed(_outer_in_slots)
    )
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

    def each(self, body: Callable[[Array, Array], Array], start: Array) -> Array:
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


def _first_rows(x: Array, sizes: Array, slots: int, masked: bool) -> Array:
    """[experts, slots, ...]: the first rows of each; behind its last one others, or 0."""
    place = jnp.arange(slots)
    row = (jnp.cumsum(sizes) - sizes)[:, None] + place
    first = x[jnp.minimum(row, len(x) - 1)]
    return jnp.where((place < sizes[:, None])[..., None], first, 0) if masked else first


def _in_slots(x: Array, kernel: Array, sizes: Array, turned: bool) -> Array:
    """The first rows of all experts by one batched product, what is left in blocks of half as many.

    XLA's own ragged_dot multiplies all rows by the matrices of all experts there (JAX 0.10.2).
    """
    rows, slots = len(x), _slots(len(x), len(sizes))
    blocks = _blocks(rows, sizes, max(LEAST_BLOCK, slots // 2), slots)
    turn = (lambda matrices: jnp.swapaxes(matrices, -1, -2)) if turned else (lambda same: same)

    def multiply(i: Array, out: Array) -> Array:
        start, is_own = blocks.at(i, rows)
        block = jax.lax.dynamic_slice_in_dim(x, start, blocks.size)
        before = jax.lax.dynamic_slice_in_dim(out, start, blocks.size)
        product = jnp.where(is_own, block @ turn(kernel[blocks.expert[i]]), before)
        return jax.lax.dynamic_update_slice_in_dim(out, product, start, 0)

    if slots:
        row, ends = jnp.arange(rows), jnp.cumsum(sizes)
        expert = jnp.searchsorted(ends, row, side="right", method="compare_all")
        place = jnp.minimum(row - (ends - sizes)[expert], slots - 1)
        product = _first_rows(x, sizes, slots, masked=turned) @ turn(kernel)
        out = product.reshape(-1, product.shape[-1])[expert * slots + place]
    else:
        out = jnp.zeros((rows, kernel.shape[1 if turned else 2]), x.dtype)
    return blocks.each(multiply, out)


def _outer_in_slots(x: Array, cotangent: Array, sizes: Array, dtype: Any) -> Array:
    slots = _slots(len(x), len(sizes))
    if not slots:
        return _outer_in_blocks(x, cotangent, sizes, dtype)
    first = _first_rows(x, sizes, slots, masked=False)
    first_cotangent = _first_rows(cotangent, sizes, slots, masked=True)
    total = jnp.einsum("eci,eco->eio", first, first_cotangent, preferred_element_type=dtype)
    return _outer_in_blocks(x, cotangent, sizes, dtype, slots, total)


def _outer_in_blocks(
    x: Array, cotangent: Array, sizes: Array, dtype: Any, slots: int = 0, total: Any = None
) -> Array:
    """The gradients of kernels, added to `total`: without blocks XLA for a TPU multiplies all rows
    by the matrices of all experts (JAX 0.10.2)."""
    rows, number = len(x), len(sizes)
    size = max(LEAST_BLOCK, slots // 2 or min(BLOCK, rows // number))
    blocks = _blocks(rows, sizes, size, slots)

    def add(i: Array, total: Array) -> Array:
        start, is_own = blocks.at(i, rows)
        block, other_block = (
            jax.lax.dynamic_slice_in_dim(leaf, start, blocks.size) for leaf in (x, cotangent)
        )
        block = jnp.where(is_own, block, 0)
        product = jnp.matmul(block.T, other_block, preferred_element_type=dtype)
        return total.at[blocks.expert[i]].add(product)

    if total is None:
        total = jnp.zeros((number, x.shape[1], cotangent.shape[1]), dtype)
    return blocks.each(add, total)
