"""What several keys of a config must fulfil together, and whether the parts it names can be built.

Every check reads values that are right by themselves (reading.py), is silent if one that it needs
is missing, and yields its problems: where, what was given, what to do.
"""

from __future__ import annotations

import datetime
import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxgrpo import advantages, losses, rewards
from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import evaluating, keys, methods, off_policy, precision, scoring, world
from jaxgrpo.config.keys import Part, RewardKeys, part_options
from jaxgrpo.config.own_code import installed, is_reference, named_file
from jaxgrpo.config.ranges import LARGEST, wandb_problem
from jaxgrpo.config.reading import TRL, Values, show
from jaxgrpo.core.errors import InputError, pattern_problem
from jaxgrpo.core.types import RolloutSpec
from jaxgrpo.data import tasks
from jaxgrpo.data.chat import CHOICES
from jaxgrpo.data.prompts import is_template, placeholders
from jaxgrpo.data.sources import FILES, FORMS, is_name
from jaxgrpo.data.storage import is_url
from jaxgrpo.data.tasks import PREFIX
from jaxgrpo.rollout.policies import build_policy
from jaxgrpo.rollout.stopping import early_stop_problems
from jaxgrpo.update.balance import COEFFICIENT, RATE
from jaxgrpo.update.optimizer import make_optimizer


class Absent(str):
    """A problem of this machine: a file or a package that is not there."""


BuiltParts = dict[str, tuple[Part, Any]]
"""Place in the config -> a part, and what is built from it."""

SOURCE_OPTIONS = ("subset", "split", "revision")

METRIC = keys.ReferenceKeys().reset_metric


def check(values: Values) -> Iterator[str]:
    """All problems of a config whose values are right one by one."""
    parts: BuiltParts = {}
    wrong_parts = list(_build_parts(values, parts))
    yield from _method(values, parts)
    yield from _refill(values, parts)
    yield from _rewards(values, parts)
    checks = (_updates, evaluating.check, _loss, _sampling, precision.check, _early_stop, _resets)
    for find_problems in (*checks, scoring.check, world.check, _data, _template, _lora):
        yield from find_problems(values)
    yield from wrong_parts
    yield from _optimizer(values)
    every = values.get("atlas.every", keys.AtlasKeys().every)
    if every != keys.AtlasKeys().every and values.get("atlas.methods") == ():
        reason = 'nothing reads it without atlas.methods; set that, as ["sign"], or leave it out'
        yield f"atlas.every = {every}: {reason}"
    wandb = values.get("tracking.wandb")
    if wandb is not None and (problem := wandb_problem(wandb)):
        yield problem if installed("wandb") else Absent(problem)


def _lora(values: Values) -> Iterator[str]:
    """Keys of adapters that would do nothing, or contradict those that the run begins with."""
    default = vars(keys.LoraKeys())
    user_keys = [
        name for name in default if values.get(f"lora.{name}", default[name]) != default[name]
    ]
    adapter_keys = ", ".join(f"lora.{name}" for name in user_keys if name != "path")
    if problem := pattern_problem(targets := values.get("lora.targets", "")):
        yield f"lora.targets = {show(targets)}: {problem}"
    if "path" in user_keys and adapter_keys:
        yield f"{adapter_keys}: the adapter of lora.path says this itself; leave one of the two out"
    elif adapter_keys and "rank" not in user_keys:
        yield f"{adapter_keys}: acts on adapters, and there are none; set lora.rank or lora.path"


def _build_parts(values: Values, parts: BuiltParts) -> Iterator[str]:
    """Builds every part into `parts`, by its place; yields unknown parts and options.

    Own code is not run: only a missing file of it is a problem.
    """
    for where, part, build in _parts(values):
        name = part["use"]
        file = named_file(name)
        if file is not None and not os.path.isfile(file):
            yield Absent(f"{where}: there is no file {file}, named by {name!r}")
        if is_reference(name):
            continue
        try:
            parts[where] = part, build(part)
        except (ValueError, TypeError) as error:
            problem = str(error).removeprefix("advantage[0]: ")
            yield f"{where}: {problem}{methods.inner_code(part)}"


def _parts(values: Values) -> Iterator[tuple[str, Part, Callable[[Part], Any]]]:
    """(place, part, what builds it) of every part that a config names."""
    limit = values.get("rollout.max_completion_tokens", 1)
    weights = {reward.title: reward.weight for reward in values.get("rewards", ())} or None

    def reward(part: Part) -> None:
        options = {key: part[key] for key in part_options(part) if not _misspelt(key, RewardKeys)}
        rewards.build(part["use"], **rewards.with_lengths(part["use"], options, limit))

    def kl(part: Part) -> tuple[AdvantageTransform, ...]:
        methods.build_penalties(part)
        # Rollouts of these rewards, from rows that return; their sizes do not matter.
        spec = RolloutSpec(1, 1, 1, 1, tuple(weights or ("reward",)), num_rows=1)
        tail = methods.build_tail(part, None)
        for step in tail:
            step.init(spec)
        return tail

    for index, entry in enumerate(values.get("rewards", ())):
        yield f"rewards[{index}]", {"use": entry.use, **entry.options}, reward
    for index, part in enumerate(values.get("advantage", ())):
        yield f"advantage[{index}]", part, lambda part: advantages.build([part])
    builders: dict[str, Callable[[Part], Any]] = {
        "recipe": lambda part: advantages.build(part["use"], part_options(part)),
        "loss.surrogate": losses.build_surrogate,
        "loss.reduction": lambda part: methods.build_reduction(part, limit),
        "loss.kl": kl,
        "loss.mismatch": lambda part: methods.build_tail(None, part)[0],
        "loss.entropy": losses.build_entropy,
        "rollout.prompts": lambda part: build_policy(part, weights),
    }
    for where, build in builders.items():
        if part := values.get(where):
            yield where, {"use": part} if isinstance(part, str) else part, build


def _method(values: Values, parts: BuiltParts) -> Iterator[str]:
    """Recipe or chain, together with group size, steps and the surrogate's ratio."""
    if "recipe" in values and "advantage" in values:
        yield (
            f"recipe = {show(values['recipe'])} and advantage are both given: a recipe is a whole "
            "chain; keep one of the two"
        )
    chain = [entry for place, entry in parts.items() if place.startswith(("recipe", "advantage"))]
    relative = [part["use"] for part, step in chain if step.relative]
    if relative and values.get("rollout.group_size") == 1:
        yield (
            f"rollout.group_size = 1: {relative[0]} compares the samples of a prompt with "
            'each other and needs at least 2; set it to 2 or more, or take recipe = "sign"'
        )
    _, surrogate = parts.get("loss.surrogate", ({}, None))  # own code is seen when the run is built
    in_chain = ("recipe", "advantage", "loss.mismatch")
    weighing = [
        (place, f"{place} = {show(part)}")
        for place, (part, step) in parts.items()
        if place.startswith(in_chain) and step.importance
    ]
    if values.get("loss.proximal") == "behavior" and surrogate and surrogate.weighs:
        yield from (f"{where}: {off_policy.WEIGHED_TWICE}" for _, where in weighing)
    for _, where in weighing[1:]:
        yield f"{where}: {weighing[0][0]} weighs by trainer over sampler too; keep one of the two"


def _updates(values: Values) -> Iterator[str]:
    """Whether prompts divide among minibatches, warm-up ends within the updates of the run, and
    they take the experts again whose load they even out."""
    names = ("steps", "num_iterations", "minibatches")
    steps, iterations, minibatches = (values.get(f"train.{name}") for name in names)
    prompts = values.get("rollout.prompts_per_step")
    if prompts and minibatches and prompts % minibatches:
        yield (
            f"train.minibatches = {minibatches}: does not divide rollout.prompts_per_step = "
            f"{prompts} prompts into parts of the same size; take a divisor of it"
        )
    for name in (COEFFICIENT, RATE):
        if (value := values.get(name)) and values.get("train.routing") == "fresh":
            problem = "reads the recorded experts of an update, which are then not those it takes"
            yield f'{name} = {value:g}: {problem}; set train.routing = "replay", or leave it out'
        if value and values.get("data.completion"):
            problem = "reads the experts that drew a sample, and no policy drew texts of the data"
            yield f"{name} = {value:g}: {problem}; leave it out, or data.completion"
    if not (steps and iterations and minibatches):
        return
    warmup, updates = values.get("optimizer.warmup_steps", 0), steps * iterations * minibatches
    if warmup > updates:
        product = " x train.num_iterations x train.minibatches" if updates > steps else ""
        yield (
            f"optimizer.warmup_steps = {warmup}: more than train.steps{product} = {updates} "
            f"updates, so the learning rate would never be reached; set it to {updates} or less"
        )


def _refill(values: Values, parts: BuiltParts) -> Iterator[str]:
    """Whether flat groups can be replaced, and whether nothing is learnt from them."""
    refill = values.get("rollout.refill")
    if refill is None:
        return
    where, expected = f"rollout.refill = {show(refill)}", "expected { factor = 3.0 }"
    factor = refill.get("factor")
    if unknown := sorted(refill.keys() - {"factor"}):
        yield f"rollout.refill.{unknown[0]}: unknown key; {expected}"
    elif type(factor) not in (int, float) or not 1 <= factor <= LARGEST:
        yield (
            f"{where}: {expected}, the groups that a step may generate over those that it trains "
            "on, a finite number of 1 or more"
        )
    chain = [entry for place, entry in parts.items() if place.startswith(("recipe", "advantage"))]
    steps = 1 if values.get("recipe") else len(values.get("advantage", ()))
    is_known = 0 < steps == len(chain)  # own code and what cannot be built is not among them
    if values.get("rollout.group_size") == 1 and not is_known:
        yield (
            f"{where}: with rollout.group_size = 1 every group is flat, so that all would be "
            "replaced; set it to 2 or more, or leave rollout.refill out"
        )
    elif is_known and not any(step.relative for _, step in chain):
        method = " -> ".join(part["use"] for part, _ in chain)
        yield (
            f"{where}: {method} learns from flat groups too; "
            'leave it out, or take a method that compares the samples of a group, recipe = "grpo"'
        )
    kl, tail = parts.get("loss.kl", ({}, ()))
    for part, step in (*chain, *((kl, step) for step in tail)):
        if problem := methods.refill_problem(step):
            yield f"{where}: {part['use']} {problem}"


def _loss(values: Values) -> Iterator[str]:
    kl, entropy = values.get("loss.kl", {"use": ""}), values.get("loss.entropy", 0)
    no_penalty = entropy is None and (kl is None or kl["use"] == methods.IN_REWARD)
    if values.get("loss.penalties_on") == "live" and no_penalty:
        yield (
            'loss.penalties_on = "live": there is no penalty; add loss.kl = { use = "k2", beta = '
            "0.01 } or loss.entropy, or leave penalties_on out"
        )


def _sampling(values: Values) -> Iterator[str]:
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_completion_tokens": 0}
    rollout = {name: values.get(f"rollout.{name}", default) for name, default in off.items()}
    for name in ("top_p", "min_p"):
        if rollout[name] > 1:
            limits = f"set it to {off[name]:g} (off), or to 1 at the most"
            yield f"rollout.{name} = {rollout[name]:g}: a probability; {limits}"
    cuts = [f"rollout.{name} = {rollout[name]:g}" for name in off if rollout[name] != off[name]]
    if values.get("train.support") == "replay":
        if not rollout["top_k"]:
            yield (
                'train.support = "replay": the tokens that one is drawn among are recorded, and '
                "without rollout.top_k they may be the vocabulary; set rollout.top_k, for example "
                "to 50, or leave train.support out"
            )
    elif cuts and values.get("loss.proximal") == "behavior":
        yield (
            f"{cuts[0]}: the sampler's log-probs are then those of the cut distribution and the "
            "trainer's of the whole one, so their ratio is off by the probability cut away; set "
            'train.support = "replay" with a rollout.top_k, so that both are of the cut one, or '
            'loss.proximal = "trainer", or sample from all tokens'
        )
    min_tokens = rollout["min_completion_tokens"]
    max_tokens = values.get("rollout.max_completion_tokens")
    if max_tokens is not None and min_tokens >= max_tokens:
        yield (
            f"rollout.min_completion_tokens = {min_tokens}: no end token could be drawn within "
            f"rollout.max_completion_tokens = {max_tokens}; set it lower"
        )


def _early_stop(values: Values) -> Iterator[str]:
    if (early_stop := values.get("rollout.early_stop")) is not None:
        where = f"rollout.early_stop = {show(early_stop)}"
        sizes = (values.get(f"rollout.{n}") for n in ("group_size", "max_completion_tokens"))
        yield from early_stop_problems(where, early_stop, *sizes)


def _resets(values: Values) -> Iterator[str]:
    names = ("reset_every", "reset_kl_above", "reset_patience")
    metric = values.get("reference.reset_metric", METRIC)
    if metric != METRIC and values.get("reference.reset_patience") == 0:
        yield (
            f"reference.reset_metric = {show(metric)}: nothing reads it; set "
            "reference.reset_patience, the evaluations without a new best until a reset"
        )
    reset_keys = [f"reference.{name}" for name in names if values.get(f"reference.{name}")]
    if not (reset_keys and "loss.kl" in values):
        return
    kl, recipe = values["loss.kl"], values.get("recipe") or ""
    part = {"use": recipe} if isinstance(recipe, str) else recipe
    # A chain of one's own may read the reference: that is seen when the run is built.
    own_chain = "advantage" in values or is_reference(part["use"])
    entries = values.get("scores", ())
    policies = [name for entry in entries for name in (entry.policy, *entry.policies.values())]
    may_read = own_chain or "reference" in (part.get("scorer"), part.get("teacher"), *policies)
    if not may_read and (kl is None or "target_validity" in kl):
        why = "there is no reference" if kl is None else "target_validity measures from the base"
        yield (
            f"{reset_keys[0]}: {why}, so that nothing could be reset; take loss.kl = {{ use = "
            '"k2", beta = 0.001 }, or leave it out'
        )
    if values.get("reference.reset_patience"):
        if not metric.startswith("eval/"):
            yield f'reference.reset_metric = {show(metric)}: expected "eval/NAME"'
        if not values.get("eval.every", 1) or values.get("eval.data", 1) is None:
            yield f"reference.reset_patience: {evaluating.UNEVALUATED}"


def _rewards(values: Values, parts: BuiltParts) -> Iterator[str]:
    index_by_title: dict[str, int] = {}
    entries, use = values.get("rewards", ()), values.get("recipe", ":")
    if entries and not any(reward.weight for reward in entries):
        # Own code takes no weights of ours.
        own_recipe = is_reference(use if isinstance(use, str) else use["use"])
        part, chain = parts.get("recipe", ({}, None))
        titles = [] if own_recipe else [reward.title for reward in entries]
        yield f"rewards: every weight is 0, {methods.without_weights(part, chain, titles)}"
    for index, reward in enumerate(entries):
        for option in reward.options:
            if near := _misspelt(option, RewardKeys):
                yield f"rewards[{index}].{option}: unknown key; did you mean {near}?"
        if (first := index_by_title.setdefault(reward.title, index)) != index:
            yield (
                f"rewards[{index}]: {reward.title!r} is the name of rewards[{first}] too; give one "
                'of them another, name = "..."'
            )


def _misspelt(option: str, table: Any) -> str | None:
    """The key of a table that an option was meant to be.

    As long, with some letters behind the first changed; of several words, and almost the same.
    """
    names = [name for name in table.__dataclass_fields__ if name != "flip"]  # "clip" is likelier
    same_length = [n for n in names if (len(n), n[0]) == (len(option), option[:1])]
    matches = difflib.get_close_matches(option, same_length, n=1, cutoff=0.75)
    words = [name for name in names if "_" in name]
    matches += difflib.get_close_matches(option, words, n=1, cutoff=0.85)
    return matches[0] if matches else None


def _data(values: Values) -> Iterator[str]:
    """What is trained and evaluated on, the model's revision and the columns of prompts."""
    parts = values.get("data.path")
    if isinstance(parts, tuple):
        yield from _mixture(values, parts)
    else:
        yield from _source(parts, "data.path", _source_options(values, "data"))
    yield from _source(values.get("eval.data"), "eval.data", _source_options(values, "eval"))
    model, revision = values.get("model.path"), values.get("model.revision")
    if model is not None and revision is not None and not is_name(model):
        yield (
            f"model.revision = {show(revision)}: model.path = {show(model)} is a local path; leave "
            "it out, or name a model on the hub"
        )
    family = values.get("model.family")
    if family is not None and not is_reference(family):
        yield (
            f"model.family = {show(family)}: expected a family of your own, "
            '"path/file.py:family"; leave it out for one that is built in'
        )
    for where in ("model.family", "eval.scorer"):
        if (file := named_file(values.get(where) or "")) and not os.path.isfile(file):
            yield Absent(f"{where}: there is no file {file}, named by {values[where]!r}")
    delimiter = values.get("data.delimiter", ",")
    paths = (*keys.source_paths(parts), values.get("eval.data") or "")
    csv_files = [path for path in paths if path.endswith(".csv") and not os.path.isdir(path)]
    if len(delimiter) != 1 or delimiter in '"\r\n':
        problem = 'expected one character, as ; or a tab, written "\\t"'
        yield f"data.delimiter = {show(delimiter)}: {problem}"
    elif delimiter != "," and not csv_files:
        yield f"data.delimiter = {show(delimiter)}: no .csv file is read; leave it out"
    yield from _prompt_template(values.get("data.prompt", ""))


def _template(values: Values) -> Iterator[str]:
    """How prompts are written out."""
    template = values.get("data.chat_template")
    if template is not None and template not in CHOICES and not os.path.isfile(template):
        yield Absent(
            f"data.chat_template = {show(template)}: there is no such file; give a Jinja file, "
            '"auto" or "none"'
        )
    time = values.get("data.template_time")
    try:
        datetime.datetime.fromisoformat(time or "2026-11-25")
    except ValueError:
        yield (
            f"data.template_time = {show(time)}: expected a date, or a date and a time, as "
            '"2026-11-25" or "2026-11-25T09:30:00"'
        )
    for name in ("system", "chat_template_kwargs", "template_time"):
        if template == "none" and values.get(f"data.{name}"):
            yield (
                f'data.{name}: nothing reads it where data.chat_template = "none"; leave one of '
                "the two out"
            )


def _source_options(values: Values, table: str) -> dict[str, Any]:
    """The options of a table's source beside its path: full name -> value."""
    names = (f"{table}.{name}" for name in SOURCE_OPTIONS)
    return {name: values[name] for name in names if values.get(name) is not None}


def _mixture(values: Values, parts: tuple[keys.PartKeys, ...]) -> Iterator[str]:
    """Whether each source of a mixture can be read, and has a name of its own."""
    for name, value in _source_options(values, "data").items():
        problem = f"{name} = {show(value)}: data.path is a list"
        yield f"{problem}; write it into the entries that it is for"
    index_by_title: dict[str, int] = {}
    for index, part in enumerate(parts):
        where = f"data.path[{index}]"
        options = {f"{where}.{name}": getattr(part, name) for name in SOURCE_OPTIONS}
        options = {name: value for name, value in options.items() if value is not None}
        yield from _source(part.path, f"{where}.path", options)
        if part.prompt is not None:
            yield from _prompt_template(part.prompt, f"{where}.prompt")
        if (first := index_by_title.setdefault(part.title, index)) != index:
            yield (
                f"{where}: {part.title!r} is the name of data.path[{first}] too; give one of them "
                'another, name = "..."'
            )


def _prompt_template(prompt: str, key: str = "data.prompt") -> Iterator[str]:
    if is_template(prompt):
        try:
            placeholders(prompt, key)
        except InputError as error:
            yield str(error)


def _source(path: Any, where: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Whether a source can be read, and takes the options that the config gives it."""
    if path is None:
        return
    is_folder, is_task = os.path.isdir(path), path.startswith(PREFIX)
    is_file = Path(path).suffix in FILES and not is_folder
    if is_task:
        try:
            tasks.parse(path)
        except InputError as error:
            yield f"{where} = {show(path)}: {error}"
    elif is_url(path):  # looked for by the command that reads it
        pass
    elif is_file and not os.path.isfile(path):
        yield Absent(
            f"{where} = {show(path)}: there is no such file; relative paths begin at the "
            "folder of the config, those of options at the working directory"
        )
    elif not (is_file or is_folder or is_name(path)):
        reason = "is no file of rows" if os.path.exists(path) else "does not exist"
        yield Absent(f"{where} = {show(path)}: {reason}; give {FORMS}")
    unread = SOURCE_OPTIONS if is_task or is_file else ("revision",) * is_folder
    for name in options:
        if name.endswith(unread):
            yield f"{name}: {show(path)} has none; leave it out"


def _optimizer(values: Values) -> Iterator[str]:
    names = keys.OptimizerKeys.__dataclass_fields__
    if any(f"optimizer.{name}" not in values for name in names):
        return
    settings: Any = {name: values[f"optimizer.{name}"] for name in names}
    try:
        make_optimizer({}, updates=values.get("train.steps", 1), **settings)
    except (ValueError, TypeError) as error:
        where, _, problem = str(error).partition(": ")
        name = where.removeprefix("optimizer.")
        near = _misspelt(name, keys.OptimizerKeys)
        likely_key = TRL.get(name) or (near and f"optimizer.{near}")
        # Only then: muon has an option of its own that TRL has too, `beta`.
        is_unknown = likely_key not in (None, where) and "has no such option" in problem
        yield f"{where}: unknown key; did you mean {likely_key}?" if is_unknown else str(error)
