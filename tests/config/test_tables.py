"""The keys that type checkers know are the keys that a config has, with the same types."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest

import jaxgrpo as jg
from jaxgrpo.config import keys, tables
from jaxgrpo.config.keys import HINTS, SECTIONS, PartKeys
from jaxgrpo.config.ranges import Range

OVERRIDES: list[tuple[Callable[..., Any], Any]] = [
    (jg.train, tables.TrainOverrides),
    (jg.evaluate, tables.AskOverrides),
    (jg.probe, tables.AskOverrides),
    (jg.sample, tables.SampleOverrides),
]


def type_for_checkers(hint: Any, limits: Range) -> Any:
    """The type of a key for checkers, from its type in keys.py: what a call from Python takes.

    A choice of texts is a Literal, a list any sequence, a table any mapping, and None is None.
    """
    if isinstance(hint, types.UnionType):
        options = [type_for_checkers(option, limits) for option in typing.get_args(hint)]
        return functools.reduce(operator.or_, options)
    if hint is types.NoneType:
        return hint
    text = Literal[limits.choices] if limits.choices else str
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return Sequence[tables.SourceTable] if inner[0] is PartKeys else Sequence[text]
    if origin in (dict, Mapping):
        return Mapping[str, inner[1]]
    return text if hint is str else hint


def type_keys(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name != "options"]
    limits = {field.name: field.metadata["range"] for field in fields}
    return {name: type_for_checkers(hints[name], limit) for name, limit in limits.items()}


def section_table(section: str) -> Any:
    return getattr(tables, SECTIONS[section].__name__.replace("Keys", "Table"))


@pytest.mark.parametrize("section", SECTIONS)
def test_a_table_has_the_keys_of_the_config_with_their_types(section):
    assert typing.get_type_hints(section_table(section)) == type_keys(SECTIONS[section])


def test_an_entry_of_a_mixture_has_the_keys_of_the_config():
    assert typing.get_type_hints(tables.SourceTable) == type_keys(PartKeys)


def test_an_entry_of_scores_has_the_keys_of_the_config():
    models = {"policies": Mapping[str, str]}  # where reading says which entry is no text
    assert typing.get_type_hints(tables.ScoreTable) == {**type_keys(keys.ScoreKeys), **models}


@pytest.mark.parametrize(("function", "overrides"), OVERRIDES)
def test_a_call_takes_every_table_once(function, overrides):
    hints = typing.get_type_hints(overrides)
    parameters = inspect.signature(function).parameters
    assert hints.keys() & parameters.keys() == set()
    arguments = {"data", "rewards", "advantage", "tools"} & parameters.keys()
    assert hints.keys() | arguments == HINTS.keys()
    for section in SECTIONS.keys() - arguments - {"optimizer"}:
        assert hints[section] is section_table(section)
    assert hints["optimizer"] == tables.OptimizerTable | tables.Part
    (last,) = (
        parameter for parameter in parameters.values() if parameter.kind is parameter.VAR_KEYWORD
    )
    assert last.annotation == f"Unpack[{overrides.__name__}]"


def test_only_an_optimizer_has_options_among_its_keys():
    options = [name for name, cls in SECTIONS.items() if "options" in cls.__dataclass_fields__]
    assert options == ["optimizer"]
    assert "options" in keys.RewardKeys.__dataclass_fields__  # so rewards are tables of any keys
