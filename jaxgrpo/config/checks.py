"""What several keys of a config must fulfil together, and whether the parts it names exist.

Every check takes the values that are right by themselves (config_reading.py), is silent where one
that it reads is missing, and yields its problems: where, what was given, what to do.

What the keys of `loss` and `reference` must fulfil together, and with those that they act on.

A part of config_checks.py: silent where a value is missing, and yields its problems.

What the keys of evaluation must fulfil together, checked as config_checks.py says.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxgrpo.config.keys import OptimizerKeys, ReferenceKeys, RewardKeys
from jaxgrpo.config.own_code import file_of, installed, is_reference, short_name
from jaxgrpo.config.reading import Values, show
from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.core.types import RolloutSpec
from jaxgrpo.data.chat import CHOICES
from jaxgrpo.data.prompts import is_template, placeholders
from jaxgrpo.data.sources import FILES, FORMS, is_name
from jaxgrpo.data.tasks import PREFIX, tasks


def check(values: Values) -> Iterator[str]:
    """All problems of a config whose values are right one by one."""
    for check_some in (
        *(_one_chain, _groups, _schedule, check_evaluation, check_loss, _rewards),
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
    from jaxgrpo.config.methods import build_penalties, build_tail
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


METRIC = ReferenceKeys().reset_metric


def check_loss(values: Values) -> Iterator[str]:
    """All problems of the loss and of the resets of its reference."""
    for check_some in (_penalties, _truncation, _mismatch, _resets):
        yield from check_some(values)


def _penalties(values: Values) -> Iterator[str]:
    from jaxgrpo.config.methods import IN_REWARD

    kl = values.get("loss.kl", 0)
    none = kl is None or (kl and kl["use"] == IN_REWARD)
    none = none and values.get("loss.entropy", 0) is None
    if values.get("loss.penalties_on") == "live" and none:
        yield (
            'loss.penalties_on = "live": there is no penalty; add loss.kl = { use = "k2", beta = '
            "0.01 } or loss.entropy, or leave penalties_on out"
        )


def _truncation(values: Values) -> Iterator[str]:
    top_k, top_p = values.get("rollout.top_k", 0), values.get("rollout.top_p", 1.0)
    if top_p > 1:
        yield f"rollout.top_p = {top_p:g}: a probability; set it to 1 (off) or less"
        return
    name = f"rollout.top_k = {top_k}" if top_k else f"rollout.top_p = {top_p:g}"
    if (top_k or top_p < 1) and values.get("loss.proximal") == "behavior":
        yield (
            f"{name}: the sampler's log-probs are then those of the cut distribution and the "
            "trainer's of the whole one, so their ratio is off by the probability cut away; set "
            'loss.proximal = "trainer", or sample from all tokens'
        )


def _mismatch(values: Values) -> Iterator[str]:
    from jaxgrpo.config.methods import weighed_twice

    if values.get("loss.proximal") != "behavior" or not _weighs(values.get("loss.surrogate")):
        return
    mismatch = values.get("loss.mismatch")
    parts = {f"loss.mismatch = {show(mismatch)}": mismatch} if mismatch else {}
    for index, part in enumerate(values.get("advantage", ())):
        parts[f"advantage[{index}] = {show(part)}"] = part
    for where, part in parts.items():
        if _is_importance(part):
            yield f"{where}: {weighed_twice()}"


def _weighs(surrogate: Mapping[str, Any] | None) -> bool:
    """Whether a surrogate holds a ratio; of own code it is seen when the run is built."""
    from jaxgrpo import losses

    try:
        return bool(surrogate) and losses.build_surrogate(surrogate).weighs
    except (ValueError, TypeError):  # own code, or reported with the other parts
        return False


def _is_importance(part: Mapping[str, Any]) -> bool:
    from jaxgrpo import advantages

    try:
        return advantages.build([part]).importance
    except (ValueError, TypeError):  # own code, or reported with the other parts
        return False


def _resets(values: Values) -> Iterator[str]:
    names = ("reset_every", "reset_kl_above", "reset_patience")
    metric = values.get("reference.reset_metric", METRIC)
    if metric != METRIC and values.get("reference.reset_patience") == 0:
        yield (
            f"reference.reset_metric = {show(metric)}: nothing reads it; set "
            "reference.reset_patience, the evaluations without a new best until a reset"
        )
    asked = [f"reference.{name}" for name in names if values.get(f"reference.{name}")]
    if not asked or "loss.kl" not in values:
        return
    kl = values["loss.kl"]
    # A chain of one's own may read the reference: that is seen when the run is built.
    own = "advantage" in values or _is_own(values.get("recipe"))
    if (kl is None and not own) or (kl and "target_validity" in kl):
        why = "there is no reference" if kl is None else "target_validity measures from the base"
        yield (
            f"{asked[0]}: {why}, so that nothing could be reset; take loss.kl = {{ use = "
            '"k2", beta = 0.001 }, or leave it out'
        )
    if values.get("reference.reset_patience"):
        if not metric.startswith("eval/"):
            yield f'reference.reset_metric = {show(metric)}: expected "eval/NAME"'
        if not values.get("eval.every", 1) or values.get("eval.data", 1) is None:
            yield (
                "reference.reset_patience: nothing is evaluated between the start and the end; set "
                "eval.data and eval.every"
            )


def _is_own(recipe: Any) -> bool:
    name = recipe["use"] if isinstance(recipe, Mapping) else recipe
    return name is not None and is_reference(name)


def check_evaluation(values: Values) -> Iterator[str]:
    """All problems of what is evaluated and how."""
    for check_some in (_data, _best, _formats, _kept, _second_pass):
        yield from check_some(values)


def _data(values: Values) -> Iterator[str]:
    if values.get("eval.every") and "eval.data" in values and values["eval.data"] is None:
        yield (
            f"eval.every = {values['eval.every']}: there is nothing to evaluate on; name "
            'eval.data, as "task:arithmetic:test", or leave eval.every out'
        )


def _best(values: Values) -> Iterator[str]:
    best = values.get("checkpoint.keep_best")
    if best is None:
        return
    if not best.startswith("eval/"):
        yield f'checkpoint.keep_best = {show(best)}: expected "eval/NAME", as "eval/accuracy"'
    if not values.get("eval.every", 1):
        yield (
            f"checkpoint.keep_best = {show(best)}: nothing is evaluated between the start and the "
            "end; set eval.data and eval.every"
        )


def _formats(values: Values) -> Iterator[str]:
    from jaxgrpo.config.keys import OTHER_FORMAT

    for name, pattern in values.get("eval.formats", {}).items():
        where = f"eval.formats.{name} = {show(pattern)}"
        if name == OTHER_FORMAT:
            yield f"{where}: {OTHER_FORMAT} is the name of what fits no format; give another name"
        if not isinstance(pattern, str):
            yield f"{where}: expected a regular expression as a text"
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"{where}: is no regular expression: {error}"


def _kept(values: Values) -> Iterator[str]:
    kept = values.get("eval.confidence_kept", 1.0)
    if kept > 1:
        yield f"eval.confidence_kept = {kept:g}: a share of the voters; set it to 1 (all) or less"


def _second_pass(values: Values) -> Iterator[str]:
    for name in ("eval.confidence", "eval.kl_to_base"):
        if values.get(name) and "eval.data" in values and values["eval.data"] is None:
            yield f"{name} = true: there is nothing to evaluate on; name eval.data, or leave it out"
