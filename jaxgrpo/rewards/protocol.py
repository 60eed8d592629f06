"""How a reward is called, and what it may return.

    fn(prompts=[...], completions=[...], completion_ids=[...], group_ids=[...], **columns,
       trainer_state=..., log_extra=..., log_metric=...) -> [1.0, 0.0, None, ...]

One call judges N completions; there is none for N = 0. Prompts, completions, their token ids, the
number of the group that each belongs to, and the columns are lists of N entries: what belongs to a
prompt is repeated for each of its samples, which are all in one call.
Prompts are texts, or lists of messages; then each completion is a list of one message. A reward,
sync or async, names the keywords it wants and gets only those, or takes all of them by **kwargs,
but for group_ids.
It returns one number per completion; None or NaN: could not be scored.

    trainer_state              the progress of the run: TrainerState
    log_extra(column, values)  adds a column to the sample rows, one value per completion
    log_metric(name, value)    adds a number to the step's metrics, the mean if it is logged twice

Source: the protocol of TRL's GRPOTrainer, called by keyword.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, SupportsFloat, runtime_checkable

import numpy as np

from jaxgrpo.core.errors import InputError, keywords, one_line, suggest, written


@runtime_checkable
class ScoreArray(Protocol):
    """A 1-d array of NumPy, JAX, torch or pandas."""

    def __len__(self) -> int: ...
    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


Scores = Sequence[SupportsFloat | None] | ScoreArray
"""A number for each completion; None where it could not be scored."""
RewardFunction = Callable[..., Scores | Awaitable[Scores]]
"""Called by keyword; returns a list, or a 1-d array, of N numbers or None, or awaits one."""
BuiltIn = Callable[..., Sequence[float | None]]
Rewards = Sequence[RewardFunction | str] | Mapping[str, RewardFunction | str]
"""Functions, or names as a config may use them; a mapping names them."""

LISTS = ("prompts", "completions", "completion_ids", "group_ids")
BY_NAME = ("group_ids",)
"""Keywords that only a reward which names them gets: TRL's trainer passes none of them."""
PASSED = (*LISTS, "trainer_state", "log_extra", "log_metric")
"""Keywords that every reward may ask for; no column may have these names."""

SHOWN = 60  # characters of a value in a message
LARGEST = 1e15
"""The largest absolute reward. Squares of such rewards, weighted and summed, are finite in float32;
beyond it a deviation would be infinite, and the advantage of every sample silently 0."""


EXPECTED = "return a list with one number per completion, None = not scored"


class RewardError(InputError):
    """A reward that cannot be called, fails or returns something else than one number each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The progress of the run, under the names that transformers' TrainerState has."""

    global_step: int = 0  # updates done: 0 while the first step's samples are judged
    max_steps: int = 0  # train.steps
    epoch: float = 0.0  # passes through the data so far
    num_train_epochs: int = 0  # passes begun when the run ends
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True

    if not TYPE_CHECKING:  # or a checker takes any name for an attribute

        def __getattr__(self, name: str) -> Any:
            names = [field.name for field in dataclasses.fields(self)]
            raise AttributeError(f"trainer_state has no {name!r}: {suggest(name, names)}")


def callable_name(function: Any) -> str:
    """What a function is called; a callable object by its own name or its class's.

    >>> callable_name(functools.partial(max, 1))
    'max'
    """
    if isinstance(function, functools.partial):
        return callable_name(function.func)
    return getattr(function, "__name__", type(function).__name__)


def check(name: str, function: Any, columns: Iterable[str]) -> None:
    """Refuses a reward that needs a keyword that does not exist, and columns with reserved names.

    Raises: RewardError that names the reward, the keyword and the columns there are.
    """
    columns = list(columns)
    reserved = sorted(set(columns) & set(PASSED))
    if reserved:
        raise RewardError(
            f"column {reserved[0]!r} has a name that rewards get from the trainer: rename it"
        )
    if not callable(function):
        raise RewardError(f"rewards.{name} is a {type(function).__name__}: give a function")
    named, takes_all = _parameters(function)
    if not named and not takes_all:
        raise RewardError(
            f"rewards.{name} takes no argument by keyword, and rewards are called by keyword: "
            "write def reward(completions, **columns), without / and *"
        )
    available = [*PASSED, *columns]
    missing = [
        repr(key) for key, has_default in named.items() if key not in available and not has_default
    ]
    if missing:
        raise RewardError(
            f"rewards.{name} asks for {', '.join(missing)}, which does not exist (there are: "
            f"{', '.join(available)}): rename the argument, give it as an option of the reward, or "
            "add the column to the data"
        )


def bind(
    name: str, function: RewardFunction, options: Mapping[str, Any], *, strict: bool = False
) -> RewardFunction:
    """The reward with its options fixed; a column of the same name does not replace an option.

    Args:
      strict: options are only the arguments with a default, even if it takes any keyword.

    Raises: RewardError if the function takes no argument of an option's name.
    """
    if not options:
        return function
    named, takes_all = _parameters(function)
    allowed = option_names(function) if strict else list(named)
    unknown = [option for option in options if option not in allowed]
    if unknown and (strict or not takes_all):
        takes = ", ".join(parameter for parameter in allowed if parameter not in PASSED) or "none"
        raise RewardError(f"rewards.{name}: no option {unknown[0]!r}: it takes {takes}")
    return functools.partial(function, **options)


def option_names(function: RewardFunction) -> list[str]:
    """The arguments of a reward that have a default, besides those every reward may ask for."""
    named, _ = _parameters(function)
    return [key for key, has_default in named.items() if has_default and key not in PASSED]


def default_options(function: RewardFunction) -> dict[str, Any]:
    """The options of a reward that has a signature, with their defaults."""
    parameters = inspect.signature(function).parameters
    return {name: parameters[name].default for name in option_names(function)}


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """`core.errors.keywords` of a function."""
    try:
        return keywords(inspect.signature(function))
    except ValueError:  # some functions written in C have no signature
        return {}, True


def accepted(
    function: RewardFunction, arguments: Mapping[str, Any], by_name: Collection[str] = BY_NAME
) -> dict[str, Any]:
    """The keywords to pass: those it names, or all but `by_name`; never one that `bind` fixed."""
    named, takes_all = _parameters(function)
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    return {
        keyword: values
        for keyword, values in arguments.items()
        if keyword in named or (takes_all and keyword not in by_name)
        if keyword not in fixed
    }


def reads_any(function: RewardFunction, keywords: Iterable[str]) -> bool:
    """Whether a reward names one of some keywords."""
    named, _ = _parameters(function)
    return any(keyword in named for keyword in keywords)


def numbers(name: str, values: Any, count: int) -> np.ndarray:
    """The returned values as float32 [N], None as NaN.

    Raises: RewardError where they are something else, or cannot be read, as where `__len__` or
    `__float__` of own code raises.
    """
    try:
        return _read_numbers(name, values, count)
    except RewardError:
        raise
    except Exception as error:
        kind = type(values).__name__
        raise RewardError(
            f"rewards.{name} returned a {kind} that cannot be read ({type(error).__name__}: "
            f"{one_line(error)}): {EXPECTED}"
        ) from error


def _read_numbers(name: str, values: Any, count: int) -> np.ndarray:
    kind = type(values).__name__
    if callable(values):
        raise RewardError(
            f"rewards.{name} returned a {kind}: it makes a reward and is none itself; call it in a "
            "file of your own, reward = make(...), and name file.py:reward"
        )
    if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(values, "__len__"):
        raise RewardError(f"rewards.{name} returned a {kind}: {EXPECTED}")
    if getattr(values, "ndim", 1) != 1:
        raise RewardError(f"rewards.{name} returned an array of shape {values.shape}: {EXPECTED}")
    if len(values) != count:
        raise RewardError(
            f"rewards.{name} returned {len(values)} values for {count} completions: {EXPECTED}"
        )
    scores = np.empty(count, np.float32)
    for place, value in enumerate(values):
        where = f"rewards.{name} returned {_shown(value)} for completion {place}"
        try:
            # float("1") would hide a missing conversion, and NumPy's drops an imaginary part.
            if isinstance(value, (str, bytes, complex, np.complexfloating)):
                raise TypeError
            number = math.nan if value is None else float(value)
        except OverflowError:  # a whole number of Python
            number = math.inf
        except Exception:
            raise RewardError(f"{where}, a {type(value).__name__}: {EXPECTED}") from None
        if abs(number) > LARGEST:
            raise RewardError(
                f"{where}: give a number from -{LARGEST:g} to {LARGEST:g}, or None = not scored"
            )
        scores[place] = number
    return scores


def _shown(value: Any) -> str:
    text = written(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


class Reward(NamedTuple):
    """One reward of a run: its stream's name, its function, its weight in the recipe's sum."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    on_error: str = "raise"  # if it raises: end the run, or leave the scores NaN ("unscored")
    flip: float = 0.0  # label noise: the share of 0/1 rewards flipped in training
    timeout: float | None = None  # seconds for one call; what follows is that of raising
