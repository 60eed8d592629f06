"""The memory of a policy that is sampled or evaluated and not trained."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Params
from jaxgrpo.evaluation import rescoring
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.capacity import capacity
from jaxgrpo.training import memory
from jaxgrpo.training.memory import shown

DECODING, SECOND_PASS = "decoding", "a second pass"

REMEDIES = {
    DECODING: "fewer rollout.slots, a shorter rollout.max_prompt_tokens or max_completion_tokens",
    SECOND_PASS: "evaluations without a base to compare with (eval.kl_to_base = false) and without "
    "eval.confidence",
}
"""Phase -> what would make it smaller."""


class SampledMemory(NamedTuple):
    """Bytes on one device, but for keys and values."""

    weights: int  # as the sampler reads them, each layer's apart
    copy: int  # in 8 bits, or of layers with adapters merged, where samples are drawn from that
    base: int  # of the model that evaluations compare with
    second_pass: int  # of evaluations that look at samples again: the layers stacked, logits

    @property
    def persistent(self) -> int:
        """As long as samples are drawn."""
        return self.weights + self.copy + self.base


def count(
    model: Model,
    mesh: Mesh,
    weight_dtype: str = "auto",
    has_base: bool = False,
    has_second_pass: bool = False,
) -> SampledMemory:
    """The memory of a policy on each device of a mesh.

    Args:
      weight_dtype: as in `SamplingSettings`.
      has_base: whether another model of its size is compared with.
      has_second_pass: whether evaluations look at samples again.
    """
    config = model.config
    weights, layers = memory.bytes_to_sample(model, mesh)
    logits = rescoring.second_pass_bytes(config.hidden_size, config.vocab_size)
    return SampledMemory(
        weights=weights,
        copy=memory.copied_to_sample(model, mesh, weight_dtype),
        base=memory.parameters(model, mesh) if has_base else 0,
        second_pass=layers + logits // mesh.shape["tensor"] if has_second_pass else 0,
    )


def least_decoding(
    model: Model, settings: SamplingSettings, mesh: Mesh, prompts: int, group: int, width: int
) -> int:
    """Bytes that decoding takes with the slots that are asked for, or else with one for each bin.

    Args:
      prompts: of all batches; no more slots are in use than they have samples.
      group, width: samples of a prompt, and tokens that it may have.
    """
    bins = sharding.num_bins(mesh)
    settings = settings._replace(slots=settings.slots or bins)
    rows = min(-(-settings.slots // (group * bins)), -(-prompts // bins))
    return capacity(model, settings, mesh, bins * max(1, rows), group, width).total


def refuse_too_large(
    path: str, model: Model, mesh: Mesh, sampled: SampledMemory, decoding: int
) -> None:
    """Refuses a policy that does not fit its devices.

    Args:
      path: `model.path`, for the message.
      decoding: as `least_decoding` gives it.

    Raises: InputError.
    """
    phases = {DECODING: decoding, SECOND_PASS: sampled.second_pass}
    limit, total = memory.device_bytes(mesh), sampled.persistent + max(phases.values())
    if total <= limit:
        return
    weights = {"weights": sampled.weights, "their copy": sampled.copy, "the base": sampled.base}
    parts = {name: size for name, size in (weights | phases).items() if size}
    remedies = ["mesh.tensor over more devices"]
    if model.config.dtype == "float32":
        remedies.insert(0, 'model.dtype = "bfloat16"')
    if sampled.persistent <= limit:
        remedies.insert(0, REMEDIES[max(phases, key=lambda name: phases[name])])
    raise InputError(
        f"{path} does not fit: {shown(total)} of {shown(limit)} on each device at the least ("
        + ", ".join(f"{name} {shown(size)}" for name, size in parts.items())
        + "): take "
        + ", ".join(remedies)
    )


def release(blocks: Params) -> Params:
    """Stacked arrays that nothing else reads, each as an array of objects, one for each layer.

    They are taken apart one after another, and freed then, so that a model that just fits can be
    read. `memory_per_layer` puts the layers in their order.
    """

    def take_apart(stacked: Array) -> np.ndarray:
        apart = np.empty(stacked.shape[0], object)
        apart[:] = jax.block_until_ready(_slices(stacked))
        stacked.delete()
        return apart

    return jax.tree.map(take_apart, blocks)


@jax.jit
def _slices(stacked: Array) -> tuple[Array, ...]:
    return tuple(stacked[i] for i in range(stacked.shape[0]))
