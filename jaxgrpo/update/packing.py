"""The update batch: a host plan of who goes where, and the one jitted gather that moves it.

The plan is a pure function of the live flags, the same in every process. This packer is plain:
one sample per row, rows in order, whole groups per bin. The layout has room for denser packers.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import OF_PASS, Rollouts, TrainBatch
from jaxgrpo.models.api import Constrain


class Geometry(NamedTuple):
    """The static sizes of a run's batches."""

    num_prompts: int  # P
    group_size: int  # G
    max_prompt_tokens: int  # S
    max_completion_tokens: int  # T
    bins: int  # D
    rows: int  # R, per bin and micro-batch

    @property
    def prompts_per_bin(self) -> int:
        """A, prompts per bin and micro-batch."""
        return max(1, self.rows // self.group_size)

    @property
    def micro_batches(self) -> int:
        """K, enough for a step in which every sample is live."""
        if self.rows >= self.group_size:
            full_bins = -(-self.num_prompts // self.prompts_per_bin)
        else:
            full_bins = self.num_prompts * (self.group_size // self.rows)
        return -(-full_bins // self.bins)


class Plan(NamedTuple):
    """Who goes where. Indices count samples p * G + g and prompts p; -1 is empty."""

    sample: np.ndarray  # [K, D, R] int32
    prompt: np.ndarray  # [K, D, A] int32
    row_prompt: np.ndarray  # [K, D, R] int32
    num_live: np.ndarray  # [] int32


def check_geometry(geometry: Geometry) -> None:
    """Raises InputError if rows and groups do not fit one another."""
    rows, group = geometry.rows, geometry.group_size
    if rows < 1 or (rows % group and group % rows):
        raise InputError(
            f"train.rows_per_micro_batch = {rows}: must be a multiple or a divisor of "
            f"rollout.group_size = {group}, so that groups fill bins evenly"
        )


def plan(live: np.ndarray, geometry: Geometry) -> Plan:
    """Places the live samples [P, G] into micro-batches, bins and rows, in order.

    A bin takes whole groups (their live members) as long as `prompts_per_bin` allows, or pieces of
    one group of `rows` samples if a group is larger than a bin.
    """
    groups = [np.flatnonzero(row) + p * geometry.group_size for p, row in enumerate(live)]
    groups = [group for group in groups if group.size]
    # Bins, each a list of sample indices by prompt.
    if (rows := geometry.rows) >= geometry.group_size:
        per_bin = geometry.prompts_per_bin
        pieces = [groups[i : i + per_bin] for i in range(0, len(groups), per_bin)]
    else:
        pieces = [[group[i : i + rows]] for group in groups for i in range(0, group.size, rows)]
    shape = (geometry.micro_batches, geometry.bins)
    sample = np.full((*shape, geometry.rows), -1, np.int32)
    prompt = np.full((*shape, geometry.prompts_per_bin), -1, np.int32)
    row_prompt = np.zeros_like(sample)
    for number, content in enumerate(pieces):
        at = divmod(number, geometry.bins)
        members = np.concatenate(content)
        sample[at][: members.size] = members
        prompt[at][: len(content)] = [group[0] // geometry.group_size for group in content]
        row_prompt[at][: members.size] = np.repeat(
            np.arange(len(content)), [group.size for group in content]
        )
    num_live = np.int32(-(-len(pieces) // geometry.bins))
    return Plan(sample, prompt, row_prompt, np.asarray(num_live))


def gather(
    rollouts: Rollouts,
    plan: Plan,
    advantage: Array,
    weight: Array,
    mask: Array,
    fields: dict[str, Array],
    constrain: Constrain = lambda value, axes: value,
) -> TrainBatch:
    """Moves samples into the rows that the plan gives them. Pure; jitted by the caller.

    Args:
      constrain: lays an array out on the caller's mesh by logical axis names: D over the bins.

    Shapes: advantage, weight, mask and every field [P, G, T]; the rest as in the types.
    """
    present = plan.sample >= 0  # [K, D, R]
    row = jnp.maximum(plan.sample, 0)
    length = rollouts.prompt_mask.sum(-1, dtype=jnp.int32)  # [P]
    _, group, steps = rollouts.completion_tokens.shape

    def move(value: Array) -> Array:
        moved = value.reshape(-1, steps)[row]
        return jnp.where(present[..., None], moved, jnp.asarray(0, value.dtype))

    target = move(rollouts.completion_tokens)
    of_row = row // group  # [K, D, R] prompt index
    last = jnp.take_along_axis(rollouts.prompt_tokens, length[:, None] - 1, axis=1)[:, 0]
    tokens = jnp.concatenate([last[of_row][..., None], target[..., :-1]], axis=-1)
    real = move(_completion_length_mask(rollouts.token_mask))
    prompt = jnp.maximum(plan.prompt, 0)
    prompt_length = jnp.where(plan.prompt >= 0, length[prompt] - 1, 0)
    within = jnp.arange(rollouts.prompt_tokens.shape[1]) < prompt_length[..., None]
    batch = TrainBatch(
        prompt_tokens=jnp.where(within, rollouts.prompt_tokens[prompt], 0),
        prompt_length=prompt_length,
        tokens=jnp.where(real, tokens, 0),
        targets=jnp.where(real, target, 0),
        segment=real.astype(jnp.int32),
        position=length[of_row][..., None] - 1 + jnp.arange(steps, dtype=jnp.int32),
        advantage=move(advantage),
        weight=move(weight),
        mask=move(mask),
        proximal_logp=move(rollouts.behavior_logp),
        fields={name: move(value) for name, value in fields.items()},
        row_prompt=jnp.asarray(plan.row_prompt),
        num_live=jnp.asarray(plan.num_live),
    )
    return jax.tree.map(functools.partial(_over_bins, constrain), batch)


def abstract_batch(geometry: Geometry, needs: Collection[str]) -> TrainBatch:
    """The shapes and dtypes of the whole batch that `gather` makes.

    Args:
      needs: fields that the objective reads.
    """
    sizes = geometry.micro_batches, geometry.bins
    asked, rows = geometry.prompts_per_bin, geometry.rows
    width, steps = geometry.max_prompt_tokens, geometry.max_completion_tokens

    def of(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*sizes, *shape), jnp.dtype(dtype))

    per_token = of("float32", rows, steps)
    token, names = of("int32", rows, steps), {"behavior_logp", *needs}
    flag = of("bool", rows, steps)
    fields = dict.fromkeys(sorted(names - OF_PASS.keys()), per_token)
    arrays: Any = {
        "prompt_tokens": of("int32", asked, width),
        "prompt_length": of("int32", asked),
        **dict.fromkeys(("tokens", "targets", "segment", "position"), token),
        **dict.fromkeys(("advantage", "weight", "proximal_logp"), per_token),
        "mask": flag,
        "fields": fields | {"sampled_now": flag},
        "row_prompt": of("int32", rows),
        "num_live": jax.ShapeDtypeStruct((), jnp.int32),
    }
    return TrainBatch(**arrays)


def _over_bins(constrain: Constrain, leaf: Array) -> Array:
    return constrain(leaf, (None, "bins", *[None] * (leaf.ndim - 2))) if leaf.ndim else leaf


def scatter(values: Array, plan: Plan, shape: tuple[int, int, int]) -> Array:
    """The way back: row values [K, D, R, T] to samples [P, G, T]; 0 if a sample had no row."""
    groups, samples, steps = shape
    index = jnp.where(plan.sample >= 0, plan.sample, groups * samples).reshape(-1)
    flat = jnp.zeros((groups * samples, steps), values.dtype)
    return flat.at[index].set(values.reshape(-1, steps), mode="drop").reshape(shape)


def _completion_length_mask(token_mask: Array) -> Array:
    """True up to the last token the policy chose: forced text after it teaches nothing."""
    return jnp.flip(jnp.cumsum(jnp.flip(token_mask, -1), -1) > 0, -1)
