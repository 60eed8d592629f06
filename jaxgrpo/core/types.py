"""The data that flow through a training step. This file is the specification: read it first.

Shape letters: P prompts, G samples per prompt, S prompt positions, T completion positions; in the
update batch K micro-batches, D bins (one per shard of data x fsdp), A prompts and R rows per bin
and micro-batch, Q positions per row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array

from jaxgrpo.core.errors import InputError

Params = dict[str, Any]
"""Nested dicts of arrays: all that leaves `models/` of a Flax module."""

GENERATOR = "threefry2x32"
"""What all keys are of, whatever `jax_default_prng_impl` is set to: of the others what a key draws
depends on the keys that it is drawn beside."""

Data = TypeVar("Data", bound=type)


def register(data: Data) -> Data:
    """A decorator: JAX takes the dataclass as a tree of its fields."""
    return jax.tree_util.register_dataclass(data)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of one step, each once, as tokens. Right-padded: position = index."""

    prompt_tokens: Array  # [P, S] int32
    prompt_mask: Array  # [P, S] bool, True on the prompt's own tokens
    ordinal: Array  # [P] int32, place in the run's prompt stream
    row: Array  # [P] int32, row in the data set
    step: Array  # [] int32
    forced_prefix: Array | None = None
    """[P, G, F] int32: tokens that each sample begins with instead of drawing them, -1 behind the
    last. They are part of the completion, with token_mask False, and rewards do not see them:
    goals."""


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts(Prompts):
    """Prompts, their fields once per group, with G samples each.

    A group is one row of every [P, ...] array and never splits.
    """

    completion_tokens: Array  # [P, G, T] int32, the end token included
    token_mask: Array  # [P, G, T] bool, chosen by the policy (tool output, forced text: False)
    behavior_logp: Array  # [P, G, T] float32, of the distribution sampled from; 0 where masked
    rewards: dict[str, Array]  # name -> [P, G] float32, NaN = could not be scored
    truncated: Array  # [P, G] bool, stopped by the length limit
    policy_version: Array  # [P, G] int32, the step whose parameters sampled it
    fields: dict[str, Array]  # name -> [P, ...] or [P, G, ...]: what a method brings


REPLAYED = "replayed"
"""The field [P, G] bool: the sample is of an earlier step."""

ARRAYS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "prompt_tokens": ("PS", np.int32),
        "prompt_mask": ("PS", np.bool_),
        "ordinal": ("P", np.int32),
        "row": ("P", np.int32),
        "step": ("", np.int32),
        "completion_tokens": ("PGT", np.int32),
        "token_mask": ("PGT", np.bool_),
        "behavior_logp": ("PGT", np.float32),
        "truncated": ("PG", np.bool_),
        "policy_version": ("PG", np.int32),
    }
)
"""The arrays that all `Rollouts` have -> the letters of their axes, and their dtypes."""
PROMPT_ARRAYS = tuple(name for name, (axes, _) in ARRAYS.items() if axes in ("P", "PS"))
SAMPLE_ARRAYS = tuple(name for name, (axes, _) in ARRAYS.items() if axes.startswith("PG"))
TOKEN_ARRAYS = tuple(name for name, (axes, _) in ARRAYS.items() if axes == "PGT")
"""Those of them with an entry for each prompt, for each sample, and for each of its tokens."""


def rollout_arrays(make: Callable[..., Any], *sizes: int) -> dict[str, Any]:
    """`make(shape, dtype)` of each of `ARRAYS`, by name, for sizes P, G, S and T."""
    size = dict(zip("PGST", sizes, strict=True))
    return {
        name: make(tuple(size[letter] for letter in axes), dtype)
        for name, (axes, dtype) in ARRAYS.items()
    }


def only_tokens(prompts: Prompts, tokens: Any, mask: Any) -> Rollouts:
    """Samples [P, G, T] of prompts, of which nothing is known but their tokens.

    Log-probs are 0, no policy of the run drew them (version -1), and there are no rewards. The new
    arrays are NumPy's or JAX's, as the mask is.
    """
    namespace, per_sample = mask.__array_namespace__(), mask.shape[:2]
    return Rollouts(
        **{name: getattr(prompts, name) for name in Prompts.__dataclass_fields__},
        completion_tokens=tokens,
        token_mask=mask,
        behavior_logp=namespace.zeros(mask.shape, np.float32),
        rewards={},
        truncated=namespace.zeros(per_sample, bool),
        policy_version=namespace.full(per_sample, -1, np.int32),
        fields={},
    )


class RolloutSpec(NamedTuple):
    """What a transform may know before the first rollout: sizes, names, whether rows return."""

    num_prompts: int
    group_size: int
    max_prompt_tokens: int
    max_completion_tokens: int
    rewards: tuple[str, ...] = ("reward",)
    fields: frozenset[str] = frozenset()
    num_rows: int | None = None  # rows of the data set; None: a stream, no row returns


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Signal:
    """An advantage on its way through a chain."""

    value: Array  # [P, G] or [P, G, T]; finite, 0 where masked
    mask: Array  # same shape, bool; only shrinks


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """The update batch: whole completions in rows, prompts once per bin, padding nowhere trusted.

    The last prompt token opens every sample's row, so each position predicts its own target.
    Attention masks come from (segment, position) alone.
    """

    prompt_tokens: Array  # [K, D, A, S] int32, right-padded, without the last prompt token
    prompt_length: Array  # [K, D, A] int32, tokens of it that are real
    tokens: Array  # [K, D, R, Q] int32
    targets: Array  # [K, D, R, Q] int32
    segment: Array  # [K, D, R, Q] int32, 0 = padding, samples of a row counted from 1
    position: Array  # [K, D, R, Q] int32
    advantage: Array  # [K, D, R, Q] float32
    weight: Array  # [K, D, R, Q] float32, the reduction's token weight
    mask: Array  # [K, D, R, Q] bool, tokens the loss may read
    proximal_logp: Array  # [K, D, R, Q] float32
    fields: dict[str, Array]  # name -> [K, D, R, Q]
    prompt: Array  # [K, D, A] int32, its number among those of the step; -1: none
    row_prompt: Array  # [K, D, R] int32, index into A of the same bin
    num_live: Array  # [] int32, micro-batches to run


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """What an update changes and reads, on the devices of the update, which donates it."""

    step: Array  # [] int32, finished steps
    trainable: Params  # all parameters, or the adapters if the model has them
    frozen: dict[str, Params]  # "reference", "base", ...: only those a method asks for; WEIGHTS
    opt_state: Any
    advantage_state: Any
    objective_state: dict[str, Any] = dataclasses.field(default_factory=dict)
    """name of a penalty -> what it remembers, as the coefficient of `adaptive_entropy`"""


class Experience(NamedTuple):
    """Right samples of earlier steps, [n] each, and what is known of the rows of the data."""

    row: np.ndarray  # [n] int32, of the data; -1: the place is empty
    step: np.ndarray  # [n] int32, in which it was drawn
    tokens: np.ndarray  # [n, T] int32
    logp: np.ndarray  # [n, T] float32, of the distribution drawn from; NaN: not drawn
    version: np.ndarray  # [n] int32, as policy_version
    successes: np.ndarray  # [rows] int32, right samples of the row's latest group; -1: none yet
    started: np.ndarray  # [] bool, whether steps take any
    count: np.ndarray  # [] int32, prompts taken so far


class Waiting(NamedTuple):
    """Rollouts that were generated and not trained on yet, or will be again, as host arrays.

    Their shapes do not change during a run. A place without a group has the ordinal -1.
    """

    leftover: Rollouts | None = None
    """live groups that the next step trains on first, with room for P; None without
    `rollout.refill`"""
    ahead: tuple[Rollouts, ...] = ()
    """the next steps' rollouts, the next one's first: as many as `rollout.staleness`"""
    experience: Experience | None = None
    """right samples of earlier steps; None without `experience.share`"""


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """Where a run is in its prompts, as host arrays, the same in every process.

    With the Learner it is everything that resuming needs, and nothing else.
    """

    cursor: np.ndarray  # [] int32, next ordinal of the prompts
    key: np.ndarray  # [2] uint32, key data of the run's key
    prompt_policy_state: Any
    waiting: Waiting = dataclasses.field(default_factory=Waiting)


WEIGHTS = "weights"
"""In `Learner.frozen` of a model with adapters: the weights that all its policies share. What is
trained and the other policies are then adapters."""


def refuse_other_state(where: str, before: Any, after: Any) -> None:
    """Raises: InputError where what a part remembers has changed its form in an update."""
    forms = [
        (jax.tree.structure(state), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)])
        for state in (before, after)
    ]
    if forms[0] != forms[1]:
        texts = [
            str(jax.tree.map(lambda leaf: f"{leaf.dtype}{[*leaf.shape]}", state)).replace("'", "")
            for state in (before, after)
        ]
        raise InputError(
            f"{where}: its state is {texts[0]} at first and {texts[1]} after an update: return the"
            " same structure, shapes and dtypes"
        )
