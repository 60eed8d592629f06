"""The optimizer: any optax factory by name, with clipping, a schedule and a weight-decay mask."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping
from typing import Any

import jax
import optax

from jaxgrpo.core.errors import InputError, refuse_no_number
from jaxgrpo.core.types import Params

RATES = ("b1", "b2", "b3", "momentum")
"""Options of optax that are the share of a moment that a step keeps."""

_INNER = "inner_state"  # of optax.inject_hyperparams: the state of the factory itself


def make_optimizer(
    axes: Params,
    *,
    use: str,
    learning_rate: float,
    steps: int,
    clip_norm: float = 0.0,
    warmup_steps: int = 0,
    schedule: str = "constant",
    options: Mapping[str, Any] | None = None,
) -> optax.GradientTransformation:
    """clip by global norm -> the optax factory `use`, under a learning-rate schedule.

    The rate rises linearly over `warmup_steps` updates, then stays ("constant") or falls to 0 at
    `steps` along a line ("linear") or half a cosine ("cosine"). Skipped updates do not count.

    Args:
      axes: logical axes of the parameters; if the factory takes a `mask`, only matrices decay.
      clip_norm: largest global gradient norm; 0 leaves gradients as they are.
      options: further keyword arguments of the factory, as optax names them.

    Raises: InputError for an unknown factory or option, with the nearest name.
    """
    options = dict(options or {})
    factory = _factory(use)
    accepted = inspect.signature(factory).parameters
    for name, value in options.items():
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(accepted)}"
            raise InputError(f"optimizer.{name}: optax.{use} has no such option; {hint}")
        refuse_no_number(f"optimizer.{name}", value, accepted[name])
        limit = 1 if name in RATES else math.inf
        if isinstance(value, (int, float)) and not 0 <= value < limit:
            below = ", and below 1" if name in RATES else ", and finite"
            raise InputError(f"optimizer.{name} = {value}: expected 0 or more{below}")
    if "mask" in accepted and options.get("weight_decay", 1):
        options["mask"] = decay_mask(axes)
    rate = make_schedule(learning_rate, steps, warmup_steps, schedule)
    static = tuple(name for name in accepted if name != "learning_rate")
    inner = optax.inject_hyperparams(factory, static_args=static)(learning_rate=rate, **options)
    if not clip_norm:
        return inner
    return optax.chain(optax.clip_by_global_norm(clip_norm), inner)


def make_schedule(
    learning_rate: float, steps: int, warmup_steps: int, schedule: str
) -> optax.Schedule:
    """Warm-up, then the named decay; a function of the number of updates made."""
    rest = max(1, steps - warmup_steps)
    decays = {
        "constant": lambda: optax.constant_schedule(learning_rate),
        "linear": lambda: optax.linear_schedule(learning_rate, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(learning_rate, rest),
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

    What it remembers of gradients is gone; the learning rate neither warms up nor decays anew.
    """

    def keep_rate(new: Any, old: Any) -> Any:
        if not _is_injected(new):
            return new
        return new._replace(**{name: getattr(old, name) for name in new._fields if name != _INNER})

    return jax.tree.map(keep_rate, optimizer.init(params), opt_state, is_leaf=_is_injected)


def decay_mask(axes: Params) -> Params:
    """True for the weights that decay: matrices, which have "embed" and another dimension.

    Norm scales and biases do not. By logical axes, not by ndim: stacked scales have two.
    """

    def decays(names: tuple[str | None, ...]) -> bool:
        return "embed" in names and len(set(names) - {"layers"}) > 1

    return jax.tree.map(decays, axes, is_leaf=lambda node: isinstance(node, tuple))


def _factory(use: str) -> Any:
    factory = getattr(optax, use, None)
    if _takes_rate(factory):
        return factory
    found = {name: value for name, value in vars(optax).items() if not inspect.isclass(value)}
    names = [name for name in found if name[0] != "_" and _takes_rate(found[name])]
    near = difflib.get_close_matches(use, names, 3) or sorted(names)
    raise InputError(f"optimizer.use = {use!r}: optax has no such optimizer; try {', '.join(near)}")


def _is_injected(node: Any) -> bool:
    """Whether it is a state of optax.inject_hyperparams."""
    return hasattr(node, "hyperparams")


def _takes_rate(function: Any) -> bool:
    try:
        return "learning_rate" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
