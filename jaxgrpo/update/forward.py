"""What a run's programs are built from, and the forward pass that scoring and updating share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.core.types import Params, TrainBatch
from jaxgrpo.losses import Objective
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model
from jaxgrpo.models.attention import causal, rows_with_prefix
from jaxgrpo.models.logprobs import Entropy, full_kl, token_logprobs
from jaxgrpo.rollout.sampler import SamplingSettings
from jaxgrpo.update.packing import Geometry


class Blueprint(NamedTuple):
    """Everything static that the jitted functions of a run are built from."""

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
    blueprint: Blueprint,
    params: Params,
    micro: TrainBatch,
    entropy: Entropy = "none",
    reference: Params | None = None,
) -> tuple[Array, dict[str, Array]]:
    """One micro-batch under `params`, against the whole distributions of `reference` if given.

    Returns: (log-probs of the chosen tokens, the quantities of OF_PASS and what goes with them),
    [D, R, Q] each. There is a policy_entropy where `entropy` asks for it, with gradient for
    "gradient" only.
    """
    params = as_computed(blueprint.model, params)
    hidden = hidden_states(blueprint.model, params, micro)
    # Greedy sampling has no distribution: its ratios are those of the model itself.
    temperature = blueprint.sampling.temperature or 1.0
    unembed = functools.partial(blueprint.model.unembed, params)
    targets = micro.targets.reshape(hidden.shape[0], -1)
    logp, values = token_logprobs(
        unembed, hidden, targets, temperature=temperature, entropy=entropy
    )
    fields = {} if values is None else {"policy_entropy": values}
    if reference is not None:
        anchor = as_computed(blueprint.model, reference)
        fields["full_kl"], fields["full_kl_clamped"] = full_kl(
            unembed,
            hidden,
            functools.partial(blueprint.model.unembed, anchor),
            hidden_states(blueprint.model, anchor, micro),
            temperature=temperature,
        )
    return jax.tree.map(lambda leaf: leaf.reshape(micro.tokens.shape), (logp, fields))


def hidden_states(model: Model, params: Params, micro: TrainBatch) -> Array:
    """Hidden states [D, R * Q, E]: prompts once, then rows that read them."""
    bins, prompts, width = micro.prompt_tokens.shape
    position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (bins, prompts, width))
    valid = position < micro.prompt_length[..., None]
    _, memory = model.apply(params, micro.prompt_tokens, position, causal(position, valid), None)
    attend = rows_with_prefix(micro.segment, micro.position, micro.row_prompt, micro.prompt_length)
    hidden, _ = model.apply(params, micro.tokens, micro.position, attend, memory)
    return hidden.reshape(bins, -1, hidden.shape[-1])


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


def param_layout(blueprint: Blueprint, rules: sharding.Rules = sharding.TRAINING) -> Params:
    """The shardings of the parameters."""
    model = blueprint.model
    return sharding.param_shardings(blueprint.mesh, model.axes, model.shapes, rules)


def opt_layout(blueprint: Blueprint) -> Any:
    """The shardings of the optimizer's state: moments as their parameters, the rest everywhere.

    A moment of another shape than its parameter's, as a row or column of adafactor's, is small.
    """
    everywhere = sharding.replicated(blueprint.mesh)
    return optax.tree_utils.tree_map_params(
        blueprint.optimizer,
        lambda leaf, layout, param: layout if leaf.shape == param.shape else everywhere,
        jax.eval_shape(blueprint.optimizer.init, blueprint.model.shapes),
        param_layout(blueprint),
        blueprint.model.shapes,
        transform_non_params=lambda _: everywhere,
    )
