"""What the value of a config's key may be, stated beside the key and its default."""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxgrpo.config.own_code import installed
from jaxgrpo.core.errors import one_line, suggest

KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: 'a text in quotes, "..."',
    dict: 'a table, {{ {holds} = "..." }}',
    Mapping: "a table, {{ name = value }}",
    tuple: 'a list of texts, ["..."], none of them empty',
}

LARGEST = 2**31 - 1
"""Of a whole number, where its key says nothing else: devices count in 32 bits."""
LARGEST_SEED = 2**32 - 1
"""JAX reads 32 bits: 2**32 would draw as 0."""
LONGEST = 10**9
"""Seconds: what waits for longer overflows in Python's threads and alarms."""
HEAT = {"at_least": 1e-6, "at_most": 10**6}
"""Of a temperature: logits over it stay finite and different in float32."""


class Range(NamedTuple):
    """What a key's value may be, beside its type."""

    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    choices: tuple[str, ...] = ()
    may_be_empty: bool = False
    holds: str = "use"  # of a table: the entry that it must have
    entries: Any = None  # a dataclass: a list of such tables is allowed too

    def __str__(self) -> str:
        if self.choices:
            return " or ".join(f'"{choice}"' for choice in self.choices)
        if self.above > -math.inf:
            limit = f", {self.at_most:g} at most" if self.at_most < math.inf else ""
            return f"above {self.above:g}{limit}"
        if self.at_most < math.inf:
            return f"{self.at_least:g} to {self.at_most}"
        return f"{self.at_least:g} or more"

    def allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if isinstance(value, str):
            return self.may_be_empty or bool(value)
        return self.at_least <= value <= self.largest(value) and value > self.above

    def largest(self, value: Any) -> float:
        """The largest number that may be given where `value` is."""
        is_free = self.at_most == math.inf and type(value) is int
        return LARGEST if is_free else self.at_most


def key(default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """A key with its default (none: the key must be given) and its range."""
    is_table = isinstance(default, dict)  # a fresh one for every config
    arguments: Any = {"default_factory": default.copy} if is_table else {"default": default}
    return dataclasses.field(**arguments, metadata={"range": Range(**limits)})


def kind_for(hint: Any) -> type:
    """int, float, str, dict, Mapping or tuple: the type of a hint, which may be optional."""
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    return typing.get_origin(hint) or hint


def expected_value(hint: Any, limits: Range) -> str:
    """What is allowed, for messages."""
    if limits.choices:
        return str(limits)
    text = KINDS[kind_for(hint)].format(holds=limits.holds)
    return text if limits == Range() else f"{text}, {limits}"


WANDB_OURS = ("dir", "config", "id", "resume", "settings")
"""Arguments of `wandb.init` that the run itself gives."""


def wandb_problem(options: Mapping[str, Any]) -> str | None:
    """Why wandb cannot be given the options of `tracking.wandb`; None if it can."""
    if not installed("wandb"):
        return (
            "tracking.wandb is given, but wandb is not installed: pip install 'jaxgrpo[wandb]', or "
            "take tracking.wandb out; metrics.jsonl and report.html are written in any case"
        )
    try:
        import wandb
    except Exception as error:  # as where its packages are of other versions
        reason = f"{type(error).__name__}: {one_line(error)}"
        return f"tracking.wandb is given, but wandb cannot be imported ({reason}): mend that"

    parameters = inspect.signature(wandb.init).parameters.keys() - set(WANDB_OURS)
    for name in options:
        if name in WANDB_OURS:
            return f"tracking.wandb.{name}: the run gives this itself; take it out"
        if name not in parameters:
            return f"tracking.wandb.{name}: no option of wandb.init: {suggest(name, parameters)}"
    return None
