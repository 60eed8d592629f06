"""What several keys of a config must fulfil together, and whether the parts it names exist.

Every check takes the values that are right by themselves (config_reading.py), is silent where one
that it reads is missing, and yields its problems: where, what was given, what to do.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxgrpo.config import evaluation_checks, loss_checks
from jaxgrpo.config.keys import OptimizerKeys, RewardKeys
from jaxgrpo.config.own_code import file_of, installed, is_reference, short_name
from jaxgrpo.config.reading import Values, show
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.names import suggest
from jaxgrpo.core.types import RolloutSpec
from jaxgrpo.data.chat import CHOICES
from jaxgrpo.data.hub import is_name
from jaxgrpo.data.sources import FILES, FORMS
from jaxgrpo.data.tasks import PREFIX, tasks
from jaxgrpo.data.templates import is_template, placeholders


def check(values: Values) -> Iterator[str]:
    """All problems of a config whose values are right one by one."""
    for check_some in (
        *(_one_chain, _groups, _schedule, evaluation_checks.check, loss_checks.check, _rewards),
        *(_tracking, _sources, _revision, _prompts, _parts, _optimizer),
    ):
        yield from check_some(values)


def _one_chain(values: Values) -> Iterator[str]:
    if "recipe" in values and "advantage" in values:
        yield (
            f"recipe = {show(values['recipe'])} and advantage are both given: a recipe is a whole "
            "chain; keep one of the two"
        )


def _groups(values: Values) -> Iterator[str]:
    if values.get("rollout.group_size") != 1:
        return
    recipe = values.get("recipe")
    for part in [_recipe_part(recipe)] if recipe else values.get("advantage", ()):
        if _is_relative(part):
            yield (
                f"rollout.group_size = 1: {part['use']} compares the samples of a prompt with "
                'each other and needs at least 2; set it to 2 or more, or take recipe = "sign"'
            )
            return


def _schedule(values: Values) -> Iterator[str]:
    warmup, steps = values.get("optimizer.warmup_steps"), values.get("train.steps")
    if warmup is not None and steps is not None and warmup > steps:
        yield (
            f"optimizer.warmup_steps = {warmup}: more than train.steps = {steps}, so the learning "
            f"rate would never be reached; set it to {steps} or less"
        )


def _tracking(values: Values) -> Iterator[str]:

    options = values.get("tracking.wandb")
    if options is not None and (problem := wandb_problem(options)):
        yield problem


def _rewards(values: Values) -> Iterator[str]:
    seen: dict[str, int] = {}
    for index, reward in enumerate(values.get("rewards", ())):
        for option in reward.options:
            if near := _misspelt(option, RewardKeys):
                yield f"rewards[{index}].{option}: unknown key; did you mean {near}?"
        name = reward.name or short_name(reward.use)
        if name in seen:
            yield (
                f"rewards[{index}]: {name!r} is the name of rewards[{seen[name]}] too; give one of "
                'them another, name = "..."'
            )
        seen.setdefault(name, index)


def _misspelt(option: str, keys: Any) -> str | None:
    """The key of a table that an option was meant to be.

    As long, with some letters changed; of several words, and almost the same.
    """
    names = [name for name in keys.__dataclass_fields__ if name != "flip"]  # "clip" is likelier
    same = [name for name in names if len(name) == len(option)]
    near = difflib.get_close_matches(option, same, n=1, cutoff=0.75)
    words = [name for name in names if "_" in name]
    near += difflib.get_close_matches(option, words, n=1, cutoff=0.85)
    return near[0] if near else None


def _sources(values: Values) -> Iterator[str]:
    for where, keys in (
        ("data.path", ("subset", "split", "revision")),
        ("eval.data", ("subset", "split")),
    ):
        path = values.get(where)
        if path is None:
            continue
        if path.startswith(PREFIX):
            yield from _task(where, path)
        elif Path(path).suffix in FILES and not Path(path).is_file():
            yield (
                f"{where} = {show(path)}: there is no such file; relative paths begin at the "
                "folder of the config"
            )
        elif not (Path(path).suffix in FILES or Path(path).is_dir() or is_name(path)):
            known = "is no file of rows" if Path(path).exists() else "does not exist"
            yield f"{where} = {show(path)}: {known}; give {FORMS}"
        table = where.partition(".")[0]
        if path.startswith(PREFIX) or Path(path).suffix in FILES:
            for name in keys:
                if values.get(f"{table}.{name}") is not None:
                    yield f"{table}.{name}: {show(path)} has none; leave it out"


def _revision(values: Values) -> Iterator[str]:
    path, revision = values.get("model.path"), values.get("model.revision")
    if path is not None and revision is not None and not is_name(path):
        yield (
            f"model.revision = {show(revision)}: model.path = {show(path)} is a local path; leave "
            "it out, or name a model on the hub"
        )


def _prompts(values: Values) -> Iterator[str]:
    prompt, template = values.get("data.prompt", ""), values.get("data.chat_template")
    if is_template(prompt):
        try:
            placeholders(prompt)
        except InputError as error:
            yield str(error)
    if template is not None and template not in CHOICES and not Path(template).is_file():
        yield (
            f"data.chat_template = {show(template)}: there is no such file; give a Jinja file, "
            '"auto" or "none"'
        )
    for name in ("system", "chat_template_kwargs"):
        if template == "none" and values.get(f"data.{name}"):
            yield (
                f'data.{name}: nothing reads it where data.chat_template = "none"; leave one of '
                "the two out"
            )


def _task(where: str, path: str) -> Iterator[str]:
    _, name, *split = path.split(":")
    task = tasks.get(name)
    if task is None:
        yield f"{where} = {show(path)}: unknown task {name!r}: {suggest(name, tasks)}"
    elif len(split) != 1 or split[0] not in task.splits:
        known = " or ".join(f'"task:{name}:{split}"' for split in task.splits)
        yield f"{where} = {show(path)}: expected {known}"


def _parts(values: Values) -> Iterator[str]:
    """Unknown parts and options; of own code only whether its file is there."""
    from jaxgrpo import advantages, losses, rewards
    from jaxgrpo.config.chain_tail import build_penalties, build_tail
    from jaxgrpo.rollout.selection import build_policy

    weights = {r.name or short_name(r.use): r.weight for r in values.get("rewards", ())} or None

    def advantage(part: Mapping[str, Any]) -> None:
        advantages.build([part])

    def recipe(part: Mapping[str, Any]) -> None:
        advantages.build(*_split(part))

    def reduction(part: Mapping[str, Any]) -> None:
        # The trainer fills in the length where the config leaves it out.
        length = {"length": 1} if part["use"] == "constant" else {}
        losses.build_reduction({**length, **part})

    def kl(part: Mapping[str, Any]) -> None:
        build_penalties(part)
        for step in build_tail(part, None):
            step.init(_spec(tuple(weights or ("reward",))))

    def reward(part: Mapping[str, Any]) -> None:
        name, options = _split(part)
        known = {key: options[key] for key in options if not _misspelt(key, RewardKeys)}
        limit = values.get("rollout.max_completion_tokens", 1)
        rewards.build(name, **rewards.with_lengths(name, known, limit))

    for index, entry in enumerate(values.get("rewards", ())):
        yield from _try(f"rewards[{index}]", _table(entry), reward)
    for index, part in enumerate(values.get("advantage", ())):
        yield from _try(f"advantage[{index}]", part, advantage)
    if named := values.get("recipe"):
        yield from _try("recipe", _recipe_part(named), recipe)
    builders: dict[str, Callable[[dict[str, Any]], Any]] = {
        "loss.surrogate": losses.build_surrogate,
        "loss.reduction": reduction,
        "loss.kl": kl,
        "loss.mismatch": lambda part: build_tail(None, part),
        "loss.entropy": losses.build_entropy,
        "rollout.prompts": lambda part: build_policy(part, weights),
    }
    for where, build in builders.items():
        if part := values.get(where):
            yield from _try(where, part, build)


def _spec(rewards: tuple[str, ...]) -> RolloutSpec:
    """Rollouts of these rewards, from rows that return; the sizes stand for any."""
    return RolloutSpec(1, 1, 1, 1, rewards, num_rows=1)


def _try(where: str, part: Mapping[str, Any], build: Callable[[Any], Any]) -> Iterator[str]:
    name = part["use"]
    if is_reference(name):
        file = file_of(name)
        if file is not None and not Path(file).is_file():
            yield f"{where}: there is no file {file}, named by {name!r}"
        return
    try:
        build(part)
    except (ValueError, TypeError) as error:
        yield f"{where}: {error}"


def _recipe_part(recipe: Any) -> dict[str, Any]:
    return {"use": recipe} if isinstance(recipe, str) else recipe


def _is_relative(part: Mapping[str, Any]) -> bool:
    """Whether a recipe or part compares the samples of a prompt; of own code nobody knows."""
    from jaxgrpo import advantages
    from jaxgrpo.advantages import registry

    name, options = _split(part)
    try:
        if name in registry.recipes:
            return advantages.build(name, options).relative
        return name in registry.parts and advantages.build([part]).relative
    except (ValueError, TypeError):  # reported by _parts
        return False


def _split(part: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return part["use"], {name: value for name, value in part.items() if name != "use"}


def _table(reward: RewardKeys) -> dict[str, Any]:
    return {"use": reward.use, **reward.options}


def _optimizer(values: Values) -> Iterator[str]:
    from jaxgrpo.update.optimizer import make_optimizer

    names = OptimizerKeys.__dataclass_fields__
    keys: Any = {
        name: values[f"optimizer.{name}"] for name in names if f"optimizer.{name}" in values
    }
    if len(keys) < len(names):
        return
    for name in keys["options"]:
        if near := _misspelt(name, OptimizerKeys):
            yield f"optimizer.{name}: unknown key; did you mean optimizer.{near}?"
            return
    try:
        make_optimizer({}, steps=values.get("train.steps", 1), **keys)
    except (ValueError, TypeError) as error:
        yield str(error)


WANDB_OURS = ("dir", "config", "id", "resume", "settings")
"""Arguments of `wandb.init` that the run itself gives."""


def wandb_problem(options: Mapping[str, Any]) -> str | None:
    """Why `tracking.wandb` cannot be followed; None where it can."""
    if not installed("wandb"):
        return (
            "tracking.wandb is given, but wandb is not installed: pip install 'jaxgrpo[wandb]', or "
            "take tracking.wandb out; metrics.jsonl and report.html are written in any case"
        )
    import wandb

    known = inspect.signature(wandb.init).parameters.keys() - set(WANDB_OURS)
    for name in options:
        if name in WANDB_OURS:
            return f"tracking.wandb.{name}: the run gives this itself; take it out"
        if name not in known:
            return f"tracking.wandb.{name}: no option of wandb.init: {suggest(name, known)}"
    return None
