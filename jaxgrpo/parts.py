"""What a run's programs are built from, and the forward pass that scoring and updating share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from jaxgrpo import sharding
from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.logprobs import Entropy, token_logprobs
from jaxgrpo.losses import Penalty, Reduction, Surrogate
from jaxgrpo.models.api import Model
from jaxgrpo.models.attention import causal, rows_with_prefix
from jaxgrpo.packing import Geometry
from jaxgrpo.sampling import SamplingSettings
from jaxgrpo.types import Params, TrainBatch


class Objective(NamedTuple):
    """What an update minimises: sum(weight * (surrogate + penalties))."""

    surrogate: Surrogate
    reduction: Reduction
    penalties: tuple[Penalty, ...] = ()
    penalties_on: str = "all"  # "live": dead samples are free of penalties, and leave the update
    proximal: str = "behavior"  # the policy ratios are measured from; "trainer" scores it again

    @property
    def needs(self) -> frozenset[str]:
        parts = (self.surrogate, *self.penalties)
        own = frozenset[str]().union(*(part.needs for part in parts))
        return own | ({"trainer_logp"} if self.proximal == "trainer" else frozenset())


class Parts(NamedTuple):
    """Everything static that the programs of a run are built from."""

    model: Model
    chain: AdvantageTransform
    objective: Objective
    optimizer: optax.GradientTransformation
    geometry: Geometry
    sampling: SamplingSettings
    mesh: Mesh
    reward_weights: Mapping[str, float] | None = None  # of the logged reward; None: all 1
    compact: bool = True  # False keeps dead samples in the update: slower, the same result


def forward(
    parts: Parts, params: Params, micro: TrainBatch, entropy: Entropy = "none"
) -> tuple[Array, Array | None]:
    """(logp, entropy) [D, R, Q] of one micro-batch: prompts once, then rows that read them.

    The entropy is None unless asked for, and carries gradient for "gradient" only.
    """
    params = as_computed(parts.model, params)
    bins, prompts, width = micro.prompt_tokens.shape
    position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (bins, prompts, width))
    valid = position < micro.prompt_length[..., None]
    _, memory = parts.model.apply(
        params, micro.prompt_tokens, position, causal(position, valid), None
    )
    attend = rows_with_prefix(micro.segment, micro.position, micro.row_prompt, micro.prompt_length)
    hidden, _ = parts.model.apply(params, micro.tokens, micro.position, attend, memory)
    rows = micro.tokens.shape
    values = token_logprobs(
        lambda hidden: parts.model.unembed(params, hidden),
        hidden.reshape(bins, -1, hidden.shape[-1]),
        micro.targets.reshape(bins, -1),
        # Greedy sampling has no distribution: its ratios are those of the model itself.
        temperature=parts.sampling.temperature or 1.0,
        entropy=entropy,
    )
    return jax.tree.map(lambda value: value.reshape(rows), values)


def held_dtype(model: Model) -> str:
    """The dtype in which trained parameters are held, at least float32.

    bfloat16 has 8 bits: a step of 1e-6 from a weight of 0.02 would be rounded away.
    """
    return str(jnp.promote_types(model.config.dtype, jnp.float32))


def as_computed(model: Model, params: Params) -> Params:
    """The parameters in the dtypes that the model computes in."""
    return jax.tree.map(lambda leaf, spec: leaf.astype(spec.dtype), params, model.shapes)


def micro_batch(batch: TrainBatch, index: Array) -> TrainBatch:
    """Micro-batch `index` of a batch: every array without its leading K."""
    take = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)  # noqa: E731
    rest = dataclasses.replace(batch, num_live=jnp.zeros(batch.tokens.shape[0], jnp.int32))
    return jax.tree.map(take, rest)


def param_layout(parts: Parts, rules: sharding.Rules = sharding.TRAINING) -> Params:
    """The shardings of the parameters."""
    return sharding.param_shardings(parts.mesh, parts.model.axes, parts.model.shapes, rules)


def opt_layout(parts: Parts) -> Any:
    """The shardings of the optimizer's state: moments as their parameters, the rest everywhere.

    A moment of another shape than its parameter's, as a row or column of adafactor's, is small.
    """
    everywhere = sharding.replicated(parts.mesh)
    return optax.tree_utils.tree_map_params(
        parts.optimizer,
        lambda leaf, layout, param: layout if leaf.shape == param.shape else everywhere,
        jax.eval_shape(parts.optimizer.init, parts.model.shapes),
        param_layout(parts),
        parts.model.shapes,
        transform_non_params=lambda _: everywhere,
    )
