"""A feed-forward part of experts: each token passes those that the caller's `route` names.

Nothing is dropped, and no array has both all tokens and all experts but the router's scores
(`kernels/expert_rows.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Shaped

from jaxgrpo.models.api import ExpertsKind, ModelConfig, Route, Spread
from jaxgrpo.models.kernels import expert_rows
from jaxgrpo.models.layers import ACTIVATIONS, Dense, FeedForward, LinearMap, matrix, scaled_by
from jaxgrpo.models.products import as_sampled, rounded

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
    k = experts.shape[-1]
    is_local = (experts >= local[0]) & (experts <= local[-1])
    flat = jnp.where(is_local, experts - local[0], len(local)).reshape(-1)  # others behind
    sorting = expert_rows.sort(flat, len(local))
    through = functools.partial(_through, combine, names, scales)
    out = expert_rows.passed(through, k, x.reshape(-1, x.shape[-1]), sorting, weights)
    out = out.reshape(-1, k, x.shape[-1]) * gates.reshape(-1, k, 1)
    out = jnp.where(is_local.reshape(-1, k, 1), out, 0)  # others may be anything, NaN too
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return out.sum(1, dtype=wide).astype(x.dtype).reshape(x.shape)


def _through(
    combine: Any,
    names: Sequence[tuple[str, str]],
    scales: Mapping[str, float],
    times: Callable[[Array, Array], Array],
    per_row: Callable[[Array], Array],
    rows: Array,
    weights: Sequence[Array],
) -> Array:
    """What experts give for rows.

    Args:
      combine, names, scales: as in `mixed`.
      times, per_row: as in `expert_rows.passed`.
    """
    leaves = dict(zip(names, weights, strict=True))

    def low(name: str, rows: Array) -> Array | None:
        """rows · lora_a, of maps that have one."""
        return times(rows, leaves[name, "lora_a"]) if (name, "lora_a") in leaves else None

    def apply(name: str, rows: Array, inner: Array | None) -> Array:
        y = times(rows, leaves[name, "kernel"])
        if (name, "kernel_scale") in leaves:
            y = (y * per_row(leaves[name, "kernel_scale"])).astype(y.dtype)
        if (name, "lora_b") in leaves:
            assert inner is not None  # a map with a lora_b has a lora_a, or gate has theirs
            added = times(inner, leaves[name, "lora_b"])
            y = y + scaled_by(added, scales[name])
        bias = leaves.get((name, "bias"))
        return y if bias is None else y + per_row(bias.astype(y.dtype))

    inner = low("gate", rows)  # and of up
    middle = combine(apply("gate", rows, inner), apply("up", rows, inner))
    return apply("down", middle, low("down", middle))
