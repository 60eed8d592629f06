"""The methods that an atlas compares, from their names.

A name is a recipe, or own code that makes a chain, which takes the place of the run's; `KEY=VALUE`
changes what else a method is made of: "sign", "mine.py:chain", "loss.surrogate=gspo",
"dr_grpo+loss.reduction=constant", "grpo+loss.surrogate={ use = 'clip', high = 0.28 }".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgrpo.advantages.registry import recipes
from jaxgrpo.config import files as configs
from jaxgrpo.config import methods, off_policy, own_code
from jaxgrpo.config.keys import KEYS, config_folder
from jaxgrpo.core.errors import ConfigError, InputError, suggest
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.update.atlas import RUN, Atlases, Contender
from jaxgrpo.update.preparing import Preparer

CHANGES = ("recipe", "loss")
"""Tables and keys of a config that a contender may change."""


def make_atlases(
    preparer: Preparer,
    names: Sequence[str],
    tables: Mapping[str, Any],
    source: Path | None,
    rewards: Sequence[Reward],
    num_rows: int,
    brought: Collection[str],
) -> Atlases | None:
    """The atlases of a run and of `atlas.methods`; None without any.

    Args:
      preparer: of the run; names: `atlas.methods`; num_rows, brought: as in `Atlases`; the rest as
        in `make_contenders`.

    Raises: InputError where a method cannot be built, or reads what the run does not make.
    """
    if not names:
        return None
    run_method = Contender(preparer.blueprint.chain, preparer.blueprint.objective)
    contenders = make_contenders(names, "atlas.methods", tables, source, rewards)
    # Metrics name them as the file of the config does.
    named = {key.replace(f"{config_folder(source)}/", ""): c for key, c in contenders.items()}
    return Atlases(preparer, {RUN: run_method, **named}, num_rows, brought)


def make_contenders(
    names: Sequence[str],
    where: str,
    tables: Mapping[str, Any],
    source: Path | None,
    rewards: Sequence[Reward],
) -> dict[str, Contender]:
    """Name -> method, as a run with this config but for what the name says.

    Args:
      where: the key or option that names them, for messages.
      tables, source: the config, and the file that it came from.

    Raises: InputError where a name is none, is there twice, or says what cannot be built.
    """
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise InputError(f"{where}: {twice[0]} is there twice; leave one out")
    contenders = {}
    for name in names:
        overrides = _overrides(name, f"{where}: {name}")
        try:
            changed = configs.from_dict(tables, overrides, source=source, is_stored=True)
        except ConfigError as error:
            raise InputError(f"{where}: {name}: {'; '.join(error.problems)}") from None
        recipe = methods.make_recipe(changed.named_chain, rewards)
        longest = changed.rollout.max_completion_tokens
        objective = methods.make_objective(changed.loss, longest)
        contenders[name] = Contender(methods.make_chain(changed.loss, recipe), objective)
        if column := changed.data.completion:
            key = f"{where}: {name}: {off_policy.completion_key(column)}"
            off_policy.refuse_weights(key, *contenders[name])
    return contenders


def split_names(text: str, separator: str = ",") -> list[str]:
    """The parts of a text between separators that stand in no brackets.

    >>> split_names("grpo, loss.surrogate={ use = 'clip', high = 0.28 }")
    ['grpo', "loss.surrogate={ use = 'clip', high = 0.28 }"]
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _overrides(name: str, where: str) -> list[str]:
    """What a name changes in a config, as `--set` takes it; a recipe comes first.

    Raises: InputError where it is no recipe and no change of a method.
    """
    overrides = []
    for change in split_names(name, "+"):
        key, assigned, value = change.partition("=")
        if not assigned and change not in recipes and not own_code.is_reference(change):
            raise InputError(
                f"{where}: no recipe is called {change!r}: {suggest(change, recipes)}; of a "
                'surrogate or a reduction give the key, as "loss.surrogate=gspo"'
            )
        if assigned and key.partition(".")[0] not in CHANGES:
            raise InputError(f"{where}: {key} is no part of a method; give recipe or loss.…")
        overrides.append(_override(key, value, change) if assigned else f"recipe={change}")
    return sorted(overrides, key=lambda override: not override.startswith("recipe="))


def _override(key: str, value: str, change: str) -> str:
    """A part of the loss may be named alone: "loss.surrogate=gspo", or "=mine.py:surrogate"."""
    takes_part = key in KEYS and "Part" in str(KEYS[key].type)
    is_name = takes_part and not value.strip().startswith(("{", "[", '"'))
    return f'{key}={{ use = "{value.strip()}" }}' if is_name else change
