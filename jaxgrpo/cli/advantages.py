"""`jaxgrpo advantages`: which recipes and parts there are, and what one does, step by step.

jaxgrpo advantages NAME --rewards 1,0,0,0 --field truncated=0,0,0,1 --lengths 3,2,4,1
"""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from jaxgrpo.advantages import AdvantageTransform, chain, chains, registry, sum_rewards
from jaxgrpo.config import own_code
from jaxgrpo.config.files import wrong_values
from jaxgrpo.core.errors import InputError, NotGiven, refusing, suggest
from jaxgrpo.core.metrics import finalise
from jaxgrpo.core.scores import OF_ANSWERS, SCORES, score_text
from jaxgrpo.core.types import Rollouts, Signal
from jaxgrpo.training.processes.backend import start_backend
from jaxgrpo.training.records.console import Document, show_whole, terminal_table


class Field(NamedTuple):
    """A field that parts read: its shape, type and meaning."""

    shape: str
    kind: type
    meaning: str


def _answer_text(name: str) -> str:
    behind = "without a thought" if "masked" in name else "behind each thought"
    if "cut" in name:
        behind = "together, behind 0 to all parts of each thought"
    values = "ranks" if "rank" in name else "log-probs"
    return f"{values} of the reference answer's tokens {behind}"


PER_TOKEN = "[P, G, T]"
FIELDS: dict[str, Field] = {
    "truncated": Field("[P, G]", bool, "whether the length limit cut the sample"),
    "token_mask": Field(PER_TOKEN, bool, "whether the policy chose the token"),
    "completion_tokens": Field(PER_TOKEN, int, "the tokens"),
    "behavior_logp": Field(PER_TOKEN, float, "log-prob under the policy that sampled"),
    **{name: Field(score.shape, float, score_text(score)) for name, score in SCORES.items()},
    "token_value": Field(PER_TOKEN, float, "estimated return from the token on"),
    "planning": Field(PER_TOKEN, bool, "whether the token plans"),
    "token_depth": Field(PER_TOKEN, int, "depth of the tree's node that the token belongs to"),
    "turn": Field(PER_TOKEN, int, "the turn that the token belongs to, -1 for none"),
    "turn_reward": Field("[P, G, K]", float, "what the environment gave for each turn"),
    "state_hash": Field("[P, G, K]", int, "a hash of what was said before each turn"),
    "turn_truncated": Field("[P, G, K]", bool, "whether its limit stopped each turn"),
    "answer_mask": Field("[P, J]", bool, "which of the answer's tokens there are"),
    "thought_tokens": Field("[P, G]", int, "tokens of each sample that are its thought"),
    "answer_reached": Field("[P, G]", bool, "whether the sample came to an answer by itself"),
    "answered": Field(PER_TOKEN, bool, "whether the token is one of the known answer's"),
    **{
        name: Field(score.shape, float, f"{_answer_text(name)}, by the {score.policy} policy")
        for name, score in OF_ANSWERS.items()
        if score.policy
    },
    "rubric": Field("[P, G]", float, "1 where the sample meets the rubric, else 0"),
    "classes": Field("[P, G]", float, "id of the kind of answer"),
    "tree": Field("[P, G]", int, "id of the tree that the sample is a leaf of"),
    "ancestors": Field("[P, G, D]", int, "ids of its nodes, root first, -1 for none"),
    "row": Field("[P]", int, "row of the prompt in the data set"),
    "ordinal": Field("[P]", int, "place of the prompt in the run"),
    "step": Field("[]", int, "the training step"),
}
"""What parts read beside rewards. A run scores those of SCORES and OF_ANSWERS by itself."""

LONGEST = 10_000  # tokens of a sample
HINT = "jaxgrpo advantages NAME describes one; --rewards 1,0,0,0 shows it step by step"
TABLES = {"recipes": registry.recipes, "parts": registry.parts}


def main(
    name: str | None = None,
    rewards: Sequence[str] = (),
    options: Sequence[str] = (),
    fields: Sequence[str] = (),
    lengths: Sequence[str] = (),
    as_json: bool = False,
) -> int | Document:
    """Lists everything, describes one recipe or part, or shows it at work on rewards."""
    console = Console(highlight=False)
    if name is None or not rewards:
        texts_by_option = {"rewards": rewards, "option": options, "field": fields}
        for option, texts in {**texts_by_option, "lengths": lengths}.items():
            if texts:
                missing = "--rewards 1,0,0,0" if name else "a NAME"
                raise InputError(f"advantages --{option} {texts[0]}: give {missing} too")
        about = first_lines(TABLES) if name is None else _about(name)
        if as_json:
            return Document(about)
        if name is None:
            show_list(console, about, HINT)
        else:
            _describe(console, about)
        return 0
    start_backend()
    reward_arrays = {
        key: np.array(rows) for key, rows in groups("--rewards", rewards, "reward").items()
    }
    shape = next(iter(reward_arrays.values())).shape
    field_arrays = read_fields(fields, shape)
    if lengths:
        field_arrays["token_mask"] = token_mask(lengths, shape)
    document = _document(name, *explain(name, reward_arrays, options, field_arrays))
    if as_json:
        return Document(document)
    _show(console, document)
    return 0


def explain(
    name: str, rewards: Mapping[str, Any], options: Sequence[str], fields: Mapping[str, Any]
) -> tuple[list[chains.Stage], list[str]]:
    """What each step of a recipe, a part or own code leaves of the rewards, and what is odd there.

    As in training the chain is compiled; before that it is run as it stands, since some errors
    need to see values.

    Args:
      name: of a recipe, a part, or "path/file.py:function".
      options: "key=value" of it; the value is TOML, or plain text as it stands.
      fields: name -> array of what it reads beside rewards.

    Raises: InputError naming every field that it needs and was not given, and if the chain cannot
    be compiled.
    """
    transform = _over_streams(_find(name, dict(map(read_option, options))), len(rewards))
    registry.refuse_unread(transform, fields)
    if missing := sorted(transform.needs - {*fields, *rewards}):
        needs_tokens = any(FIELDS[field].shape == PER_TOKEN for field in missing if field in FIELDS)
        if needs_tokens and "token_mask" not in fields:
            missing.append("token_mask")
        raise InputError(_missing_text(name, missing))
    rollouts, spec = registry.plain_rollouts(rewards, **fields)
    try:
        state = transform.init(spec)
        chains.trace(transform, rollouts, state)
    except NotGiven as error:
        raise InputError(_missing_text(name, [error.name])) from None
    stages = _compiled(transform, rollouts, state)
    problems = _not_finite(stages)
    if own_code.is_reference(name):
        problems += _outside_mask(transform, rollouts, state, stages)
    return stages, problems


def _compiled(transform: AdvantageTransform, rollouts: Rollouts, state: Any) -> list[chains.Stage]:
    """The stages of the chain in one compiled program."""

    def run(rollouts: Rollouts, state: Any) -> list[tuple[Any, Any]]:
        return [(stage.signal, stage.metrics) for stage in chains.trace(transform, rollouts, state)]

    message = (
        f"{transform.name} runs, but training compiles it, and there a value is not known yet:"
        " write jnp.where instead of a Python if, and jax.numpy instead of numpy, float() and int()"
        " ({reason})"
    )
    with refusing(message, jax.errors.JAXTypeError):
        stage_arrays = jax.jit(run)(rollouts, state)
    names = ("rewards", *(key for key, _ in transform.steps))
    return [chains.Stage(key, *arrays) for key, arrays in zip(names, stage_arrays, strict=True)]


def _not_finite(stages: Sequence[chains.Stage]) -> list[str]:
    """Which step was the first to leave inf or NaN at an unmasked place, and where."""
    for stage in stages:
        for stream, (value, mask) in _streams(stage).items():
            odd = mask & ~np.isfinite(value)
            if odd.any():
                first = tuple(np.argwhere(odd)[0].tolist())
                source = f"{stage.name} ({stream})" if stream else stage.name
                return [
                    f"{source} made {value[first]} of {_place(first)}; {odd.sum()} of {mask.sum()}"
                    " values are inf or NaN: in training they would reach the parameters"
                ]
    return []


def _outside_mask(
    transform: AdvantageTransform, rollouts: Rollouts, state: Any, stages: Sequence[chains.Stage]
) -> list[str]:
    """What each step left at masked places, before the chain set it to 0 and masked it again."""
    problems = []
    for stage, (key, step) in zip(stages, transform.steps, strict=False):
        inputs = stage.signal
        if step.kind == "signal->signal" and not isinstance(inputs, Signal):
            (inputs,) = inputs.values()
        outputs, _, _ = step.update(inputs, state[key], rollouts)
        for name, output in ({"": outputs} if isinstance(outputs, Signal) else outputs).items():
            input_signal = inputs if isinstance(inputs, Signal) else inputs.get(name, output)
            value, mask = np.asarray(output.value), np.asarray(output.mask, bool)
            is_masked = ~np.asarray(input_signal.mask).reshape(
                input_signal.mask.shape + (1,) * (value.ndim - input_signal.mask.ndim)
            )
            for places, says in (
                (is_masked & (value != 0), "left {}"),
                (is_masked & mask, "unmasked {}"),
            ):
                if places.any():
                    first = tuple(np.argwhere(places)[0].tolist())
                    problems.append(
                        f"{key} {says.format(value[first])} at a masked place, {_place(first)}:"
                        " the chain sets it to 0 and keeps it masked; see that no mean or maximum"
                        " of the step reads it"
                    )
    return problems


def _place(index: Sequence[int]) -> str:
    words = ("group", "sample", "token")
    return ", ".join(f"{word} {position + 1}" for word, position in zip(words, index, strict=False))


def find_factories(
    kind: str, name: str, tables: Mapping[str, Mapping[str, Callable[..., Any]]]
) -> list[Callable[..., Any]]:
    """Own code; or what has that name in each table that has it.

    Args:
      kind: what is looked for, for messages.

    Raises: InputError if none has it.
    """
    if own_code.is_reference(name):
        return [own_code.load_part(name)]
    if factories := [table[name] for table in tables.values() if name in table]:
        return factories
    hint = suggest(name, {key for table in tables.values() for key in table})
    raise InputError(f"unknown {kind} {name!r}: {hint}; own code is path/file.py:function")


def _factories(name: str) -> list[registry.Factory]:
    return find_factories("recipe or part", name, TABLES)


def _find(name: str, options: Mapping[str, Any]) -> AdvantageTransform:
    factory = _factories(name)[0]
    if name in registry.recipes:
        return registry.build(name, options)
    if own_code.is_reference(name):
        return registry.build([{"use": factory, **options}])
    try:
        return registry.build([{"use": name, **options}])
    except InputError as error:  # the list is ours, not the user's
        raise InputError(str(error).removeprefix("advantage[0]: ")) from None


def _over_streams(transform: AdvantageTransform, streams: int) -> AdvantageTransform:
    """The chain, with the sum that a part by itself lacks where there are several rewards."""
    steps = [step for _, step in transform.steps]
    if streams == 1 or any(step.kind == "streams->signal" for step in steps):
        return transform
    steps.insert(0 if transform.kind == "signal->signal" else len(steps), sum_rewards())
    return chain(*steps, name=transform.name)


def _missing_text(name: str, missing: Sequence[str]) -> str:
    lines = [f"{name} needs more than rewards:"]
    for field in missing:
        if field not in FIELDS:
            lines.append(f"  {field}: a reward, or a column of the data: --field {field}=0.5,1,0,0")
            continue
        shape, _, meaning = FIELDS[field]
        hint = f"--field {field}=" + {"[P, G]": "0,1,1,0"}.get(shape, "'[[...], ...]'")
        if field == "token_mask":
            hint = "--lengths 3,2,4,1 (tokens of each sample)"
        lines.append(f"  {field} {shape}, {meaning}: {hint}")
    return "\n".join(lines)


def read_option(text: str) -> tuple[str, Any]:
    """ "key=value" of a part; the value is TOML, or plain text as it stands."""
    name, equals, value_text = text.partition("=")
    if not equals or not name:
        raise InputError(f"--option {text}: expected key=value")
    try:
        value = tomllib.loads(f"value = {value_text}")["value"]
    except (ValueError, RecursionError):
        value = value_text
    for problem in wrong_values(value, f"--option {name}"):
        raise InputError(problem)
    return name, value


def first_lines(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """title -> name -> the first line of the docstring of what has that name."""
    return {
        title: {
            name: (inspect.getdoc(table[name]) or "").partition("\n")[0] for name in sorted(table)
        }
        for title, table in tables.items()
    }


def show_list(console: Console, tables: Mapping[str, Mapping[str, str]], hint: str) -> None:
    """Prints what `first_lines` returns; `hint` is the last line, of what to do with a name."""
    for title, lines in tables.items():
        table = Table(Column(no_wrap=True), Column(), title=title, title_justify="left", box=None)
        table.show_header = False
        for line in lines.items():
            table.add_row(*map(Text, line))
        show_whole(console, table, wraps=True)
        console.print()
    console.print(hint)


def describe(name: str, factory: Callable[..., Any]) -> dict[str, str | None]:
    """A recipe or part: its name, docstring and options; of own code these are not known."""
    options = str(inspect.signature(factory)).partition(" ->")[0]
    return {
        "name": name,
        "description": inspect.getdoc(factory),
        "options": None if own_code.is_reference(name) else options,
    }


def show_description(console: Console, about: Mapping[str, Any]) -> None:
    """Prints what `describe` returns."""
    # Without markup: formulas hold brackets.
    console.print(about["description"] or f"{about['name']} has no docstring", markup=False)
    if about["options"]:
        console.print(f"\noptions: {about['options']}", markup=False)


def _about(name: str) -> dict[str, Any]:
    """`describe` of a name; a part that has the name of a recipe is in "part"."""
    about, *parts = (describe(name, factory) for factory in _factories(name))
    return {**about, **({"part": parts[0]} if parts else {})}


def _describe(console: Console, about: Mapping[str, Any]) -> None:
    name = about["name"]
    show_description(console, about)
    if "part" in about:
        console.print(f"\nThe part {name}: {about['part']['description']}", markup=False)
    hint = f"jaxgrpo advantages {name} --rewards 1,0,0,0 shows what each step does"
    if not own_code.is_reference(name) and registry.needs_function(_factories(name)[0]):
        hint = registry.how_to_give_a_function(name)
    console.print(f"\n{hint}", markup=False)


def _streams(stage: chains.Stage) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """name of a stream -> its values and mask; one signal alone has the name ""."""
    streams = {"": stage.signal} if isinstance(stage.signal, Signal) else stage.signal
    return {
        name: (np.asarray(signal.value), np.asarray(signal.mask))
        for name, signal in streams.items()
    }


def _show(console: Console, document: Mapping[str, Any]) -> None:
    """Prints what `_document` returns."""
    signals = [
        ((step["step"], stream), signal["value"], signal["mask"])
        for step in document["steps"]
        for stream, signal in step.get("streams", {"": step}).items()
    ]
    width = max(len(f"{number:.4g}") for _, value, _ in signals for number in value.flat)
    # Of tokens, the place is group.sample.
    rows = [["step", "stream", "group", "value", "mask"]]
    for name, value, mask in signals:
        for place in np.ndindex(value.shape[:-1]):
            labels = ("", "") if any(place) else name
            numbers = " ".join(f"{number:.4g}".rjust(width) for number in value[place])
            bits = " ".join("01"[bit] for bit in mask[place] * 1)
            rows.append([*labels, ".".join(str(index + 1) for index in place), numbers, bits])
    table = terminal_table(rows, text=range(5), no_wrap=True, box=None, pad_edge=False)
    show_whole(console, table)
    for name, value in document["metrics"].items():
        console.print(f"{name} = {value:.4g}", markup=False)
    alive = enumerate(document["alive"], start=1)
    each = "; ".join(f"group {number}: {row.sum()} of {row.size}" for number, row in alive)
    console.print(f"alive (unmasked and not 0): {each}")
    for problem in document["problems"]:
        console.print(f"warning: {problem}", markup=False, style="yellow")


def _document(name: str, stages: Sequence[chains.Stage], problems: Sequence[str]) -> dict[str, Any]:
    """What `explain` found, for `_show` and for --json."""
    steps = []
    for stage in stages:
        signals = {
            stream: {"value": value, "mask": mask}
            for stream, (value, mask) in _streams(stage).items()
        }
        steps.append({"step": stage.name, **(signals.pop("", None) or {"streams": signals})})
    metrics = {
        f"{stage.name}/{metric}": value
        for stage in stages
        for metric, value in finalise(stage.metrics).items()
    }
    value, mask = next(iter(_streams(stages[-1]).values()))
    live = mask & (value != 0)  # the sample can move the parameters
    return {
        "name": name,
        "steps": steps,
        "metrics": metrics,
        "alive": live.any(-1) if live.ndim == 3 else live,
        "problems": problems,
    }


def groups(flag: str, texts: Sequence[str], default: str | None = None) -> dict[str, list[Any]]:
    """Named groups of numbers from "1,0,nan" and "name=1,0,nan": name -> list of groups.

    >>> groups("--rewards", ["1,0", "0,0"], default="reward")
    {'reward': [[1.0, 0.0], [0.0, 0.0]]}
    """
    numbers_by_name: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, value_text = text.rpartition("=")
        if not equals and default is None:
            raise InputError(f"{flag} {text}: expected name=value,value,...")
        try:
            numbers = [float(word) for word in value_text.split(",")]
        except ValueError:
            raise InputError(
                f"{flag} {text}: expected numbers with commas between, as 1,0,0.5,nan (nan: not"
                " scored), with name= before them where there are several"
            ) from None
        numbers_by_name.setdefault(name or default or "", []).append(numbers)
    counts = {
        "groups": {name: len(rows) for name, rows in numbers_by_name.items()},
        "samples": {text: text.count(",") + 1 for text in texts},
    }
    for noun, sizes in counts.items():
        if len(set(sizes.values())) > 1:
            each = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise InputError(f"{flag}: {noun} differ in number ({each}); fill up with nan")
    return numbers_by_name


def read_fields(texts: Sequence[str], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Fields from "name=0,1,1,0", one list per group or one for all, or "name=[[...]]" in JSON."""
    lists, values = dict[str, list[Any]](), dict[str, Any]()
    for text in texts:
        name, _, value_text = text.partition("=")
        if value_text.lstrip().startswith("["):
            with refusing(f"--field {text}: not JSON: {{reason}}"):
                values[name] = json.loads(value_text)
        else:
            ((name, (numbers,)),) = groups("--field", [text]).items()
            lists.setdefault(name, []).append(numbers)
    values = {name: _spread(name, rows, shape) for name, rows in lists.items()} | values
    return {name: _field(name, value, shape) for name, value in values.items()}


def _spread(name: str, rows: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Lists of a field: one for each group, or of one number each for what belongs to a prompt."""
    field_shape = FIELDS[name].shape if name in FIELDS else "[P]?" if shape[1] > 1 else "[P, G]"
    if field_shape == "[P]" and len(rows) == 1:
        rows = [[number] for number in rows[0]]
    rows = rows * shape[0] if len(rows) == 1 and name != "step" else rows
    are_single = field_shape.startswith("[P]") and all(len(row) == 1 for row in rows)
    return [row[0] for row in rows] if are_single else rows


def _field(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The array of a field, of the dtype and sizes that are known of it."""
    sizes, field = dict(zip("PG", shape, strict=True)), FIELDS.get(name)
    with refusing(f"--field {name}: its lists differ in length, or an entry is no number"):
        array = np.array(value, float)
    if field and field.kind is not float:
        with np.errstate(invalid="ignore"):
            cast_array = array.astype(field.kind)
        odd_values = array[cast_array != array]
        if odd_values.size:
            expected = "true or false" if field.kind is bool else "whole numbers"
            raise InputError(f"--field {name} = {odd_values.flat[0]:g}: expected {expected}")
        array = cast_array
    array = array.squeeze() if name == "step" else array
    letters = [*filter(None, field.shape[1:-1].split(", "))] if field else ["P", "G"][: array.ndim]
    fits = [sizes.get(*pair) == pair[1] for pair in zip(letters, array.shape, strict=False)]
    if not all(fits) or (field and array.ndim != len(letters)):
        expected = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
        expected = f"[{expected}]" if letters else "one number"
        raise InputError(f"--field {name} has shape {array.shape}, expected {expected}")
    return array


def token_mask(texts: Sequence[str], shape: tuple[int, ...]) -> np.ndarray:
    """[P, G, T], True at the tokens of each sample, from "3,2,4,1": how many it has."""
    length = read_fields([f"lengths={text}" for text in texts], shape)["lengths"]
    if odd := [n for n in length.flat if not (0 <= n <= LONGEST and n == int(n))]:
        raise InputError(f"--lengths {odd[0]:g}: expected numbers of tokens, 0 to {LONGEST}")
    length = np.broadcast_to(length.reshape(shape[0], -1), shape)
    return np.arange(max(int(length.max()), 1)) < length[..., None]
