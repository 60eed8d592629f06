"""The optimizer: any factory of optax by name, with clipping, a schedule and what the axes decide.

The logical axes of the parameters, and not their number of dimensions, say which of them decay and
which of them muon makes orthogonal: scales of norms, stacked over layers, have two dimensions too.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxgrpo.core.errors import InputError, refuse_another_kind, refusing
from jaxgrpo.core.types import Params
from jaxgrpo.update import moments

RATES = ("b1", "b2", "b3", "momentum", "beta", "adam_b1", "adam_b2")
"""Options of optax that are the share of a moment that a step keeps."""

MASKS = ("mask", "weight_decay_mask")
"""Arguments that tell optax's factories what decays."""

_INNER = "inner_state"  # of optax.inject_hyperparams: the state of the factory itself


def make_optimizer(
    axes: Params,
    *,
    use: str,
    learning_rate: float,
    updates: int,
    clip_norm: float = 0.0,
    warmup_steps: int = 0,
    schedule: str = "constant",
    state_dtype: str = "float32",
    options: Mapping[str, Any] | None = None,
) -> optax.GradientTransformation:
    """clip by global norm -> the factory `use` of optax, under a learning-rate schedule.

    The rate rises linearly over `warmup_steps` updates, then stays ("constant") or falls along a
    line ("linear") or half a cosine ("cosine") that is at 0 after the last of all `updates`; the
    last is made just above it, as in transformers. Updates skipped as not finite do not count. If
    the factory takes a mask of what decays, only matrices do. `muon` makes the matrices of layers
    orthogonal, each layer's by itself; all other parameters have its adam.

    Args:
      axes: logical axes of the parameters; {} where there is no model yet, and then it is not
        tried whether the factory can be used.
      use: a factory of optax or of optax.contrib that needs gradients and parameters only.
      clip_norm: largest global gradient norm; 0 leaves gradients as they are.
      state_dtype: of moments between updates, "float32" or "bfloat16" (`moments.in_bfloat16`).
      options: further keyword arguments of the factory, as optax names them.

    Raises: InputError for an unknown factory or option, with the nearest name.
    """
    options = dict(options or {})
    where, factory = _factory(use)
    accepted = inspect.signature(factory).parameters
    _check_options(where, options, accepted)
    if axes:
        _try(where, factory, options, state_dtype)
    if options.get("weight_decay", 1):
        options |= {name: decay_mask(axes) for name in MASKS if name in accepted}
    if factory is optax.contrib.muon:
        options["muon_weight_dimension_numbers"] = _by_place(muon_dimensions(axes))
    rate = make_schedule(learning_rate, updates, warmup_steps, schedule)
    static = tuple(name for name in accepted if name != "learning_rate")
    inner = optax.inject_hyperparams(factory, static_args=static)(learning_rate=rate, **options)
    if state_dtype == "bfloat16":
        inner = moments.in_bfloat16(inner)
    if not clip_norm:
        return inner
    return optax.chain(optax.clip_by_global_norm(clip_norm), inner)


def make_schedule(
    learning_rate: float, updates: int, warmup_steps: int, schedule: str
) -> optax.Schedule:
    """Warm-up, then the named decay; a function of the number of updates made."""
    decay_updates = max(1, updates - warmup_steps)
    decays = {
        "constant": lambda: optax.constant_schedule(learning_rate),
        "linear": lambda: optax.linear_schedule(learning_rate, 0.0, decay_updates),
        "cosine": lambda: optax.cosine_decay_schedule(learning_rate, decay_updates),
    }
    if schedule not in decays:
        raise InputError(f"optimizer.schedule = {schedule!r}: use one of {', '.join(decays)}")
    if not warmup_steps:
        return decays[schedule]()
    # The first update already moves: step 0 of n warm-up steps has rate 1/n, not 0.
    warmup = optax.linear_schedule(
        learning_rate / warmup_steps, learning_rate, max(1, warmup_steps - 1)
    )
    return optax.join_schedules([warmup, decays[schedule]()], [warmup_steps])


def current_rate(opt_state: Any) -> jax.Array:
    """The learning rate of the last update made (of the first one, before it)."""
    states = filter(_is_injected, jax.tree.leaves(opt_state, is_leaf=_is_injected))
    return next(states).hyperparams["learning_rate"]


def fresh_moments(optimizer: optax.GradientTransformation, params: Params, opt_state: Any) -> Any:
    """The optimizer's first state for these parameters, on a schedule that continues.

    What it remembers of gradients is gone; the learning rate neither warms up nor decays again.
    """
    return copy_schedule(opt_state, optimizer.init(params))


def copy_schedule(scheduled: Any, opt_state: Any) -> Any:
    """`opt_state` at the place in the schedule of another state; its moments stay as they are."""

    def replace_rate(state: Any, scheduled_state: Any) -> Any:
        if not _is_injected(state):
            return state
        return state._replace(
            **{name: getattr(scheduled_state, name) for name in state._fields if name != _INNER}
        )

    return jax.tree.map(replace_rate, opt_state, scheduled, is_leaf=_is_injected)


def decay_mask(axes: Params) -> Params:
    """True for the weights that decay: matrices, which have one of SIDES beside another axis.

    Norm scales and biases do not.
    """
    return jax.tree.map(_is_matrix, axes, is_leaf=lambda node: isinstance(node, tuple))


def muon_dimensions(axes: Params) -> Params:
    """Inputs and outputs of the matrices that muon makes orthogonal; None for all other parameters.

    These are the kernels of attention and feed-forward blocks, "embed" on one side and all else, as
    heads and their dimensions, on the other; of adapters "rank" is the one side. "layers" is on
    neither: each layer is a matrix of its own. Embeddings and the output head, which have "vocab",
    are none of them.

    Source: Jordan 2024, kellerjordan.github.io/posts/muon, which leaves embeddings, output head and
    vectors to AdamW.
    """

    def dimensions(names: tuple[str | None, ...]) -> Any:
        if not _is_matrix(names) or "vocab" in names:
            return None
        side_name = next(name for name in SIDES if name in names)
        side = (names.index(side_name),)
        opposite = tuple(
            place for place, name in enumerate(names) if name not in (*STACKED, side_name)
        )
        sides = (side, opposite) if side < opposite else (opposite, side)  # kernels: inputs first
        return optax.contrib.MuonDimensionNumbers(*sides)

    return jax.tree.map(dimensions, axes, is_leaf=lambda node: isinstance(node, tuple))


def _by_place(dimensions: Params) -> Callable[[Any], Any]:
    """params -> the dimensions of each: a function, since optax asks for parts of a tree too."""
    is_leaf = lambda node: not isinstance(node, dict)  # noqa: E731
    by_path = dict(jax.tree_util.tree_leaves_with_path(dimensions, is_leaf=is_leaf))
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: by_path[path], params)


STACKED = ("layers", "experts")
"""Logical axes along which a parameter is several."""
SIDES = ("rank", "embed", "latent")
"""Those of which a matrix has one on one side, and all else on the other; the first that it has."""


def _is_matrix(names: tuple[str | None, ...]) -> bool:
    return not {*SIDES}.isdisjoint(names) and len(set(names) - {*STACKED}) > 1


def _factory(use: str) -> tuple[str, Any]:
    """(its full name, the factory), of optax before optax.contrib."""
    places = {"optax": vars(optax), "optax.contrib": vars(optax.contrib)}
    for place, members in places.items():
        if _takes_rate(members.get(use)):
            return f"{place}.{use}", members[use]
    names = [
        name
        for members in places.values()
        for name, value in members.items()
        if name[0] != "_" and not inspect.isclass(value) and _takes_rate(value)
    ]
    suggestions = difflib.get_close_matches(use, names, 3) or sorted(names)
    raise InputError(
        f"optimizer.use = {use!r}: optax has no such optimizer; try {', '.join(suggestions)}"
    )


def _check_options(where: str, options: Mapping[str, Any], accepted: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in accepted:
            suggestions = difflib.get_close_matches(name, accepted, 1)
            hint = (
                f"did you mean {suggestions[0]!r}?"
                if suggestions
                else f"it takes {', '.join(accepted)}"
            )
            raise InputError(f"optimizer.{name}: {where} has no such option; {hint}")
        refuse_another_kind(f"optimizer.{name}", value, accepted[name])
        limit = 1 if name in RATES else math.inf
        if isinstance(value, (int, float)) and not 0 <= value < limit:
            below = ", and below 1" if name in RATES else ", and finite"
            raise InputError(f"optimizer.{name} = {value}: expected 0 or more{below}")
    if options.get("adam_weight_decay"):
        raise InputError(
            f"optimizer.adam_weight_decay: {where} would let norms and biases decay too; leave it "
            "out: weight_decay acts on the matrices of layers, embeddings do not decay"
        )


def _try(where: str, factory: Any, options: Mapping[str, Any], state_dtype: str) -> None:
    """One update of a small matrix and a vector. Raises: InputError where an update of a run would
    fail, and where the state holds weights, which bfloat16 would round to those of other steps."""
    params = {"kernel": jnp.full((2, 2), 0.7), "scale": jnp.full(3, 0.7)}
    reason = f"optimizer.use: an update by {where} with these options fails ({{kind}}: {{reason}})"
    remedy = "; take an optimizer that needs gradients and parameters only"
    with refusing(reason + remedy, TypeError, ValueError):
        optimizer = factory(learning_rate=1.0, **options)
        state = optimizer.init(params)
        jax.eval_shape(optimizer.update, params, state, params)
    weights = [leaf for leaf in jax.tree.leaves(state) if jnp.shape(leaf) == (2, 2)]
    if state_dtype == "bfloat16" and any(bool((leaf == 0.7).any()) for leaf in weights):
        raise InputError(
            f'optimizer.state_dtype = "bfloat16": the state of {where} holds weights beside '
            'moments, and steps of them would be rounded away; take "float32", or another optimizer'
        )


def _is_injected(node: Any) -> bool:
    """Whether it is a state of optax.inject_hyperparams."""
    return hasattr(node, "hyperparams")


def _takes_rate(function: Any) -> bool:
    try:
        return "learning_rate" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
