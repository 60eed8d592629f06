"""From the names in a config to a run's method: chain, objective, prompt policy, columns read.

`loss.kl` and `loss.mismatch` may add steps behind the run's recipe or chain: KL-control as a
return, and weights for samples of a sampler that is not quite the trainer. Weights come last, since
they weigh all that a token is trained on.
"""

from __future__ import annotations

import contextlib
import json
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from jaxgrpo import advantages, losses
from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.advantages.chains import trace_shapes
from jaxgrpo.config import own_code
from jaxgrpo.config.keys import LossKeys, Part, RolloutKeys, part_options
from jaxgrpo.config.ranges import LARGEST
from jaxgrpo.core.errors import (
    InputError,
    NotGiven,
    call,
    explaining_own_code,
    find,
    refusing,
)
from jaxgrpo.core.scores import ANSWERED, OF_SAMPLES, SCORES, Score
from jaxgrpo.core.types import RolloutSpec
from jaxgrpo.data.prompts import name_row
from jaxgrpo.data.sources import Mixture
from jaxgrpo.losses import Objective, Penalty
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout.policies import build_policy
from jaxgrpo.rollout.selection import PromptPolicy

IN_REWARD = "k1_in_reward"
"""The name in `loss.kl` that makes the KL a part of the return, and no penalty in the loss."""

CORRECTIONS: dict[str, Callable[..., AdvantageTransform]] = {
    make.__name__: make
    for make in (
        *(advantages.truncated_importance, advantages.masked_importance),
        *(advantages.geometric_rejection, advantages.sequence_rejection),
    )
}

SUMS = ("sum_rewards", "sum_scored", "dvao")
"""Parts of a chain that add rewards up; each weight is an option of the name of its reward."""

CHARGING = ("add_kl_return", "add_kl_return_for_validity", "kl_in_reward")
"""Parts that charge a sample for how far the policy was from another one at its tokens."""

INNER_PARTS = ("then", "otherwise", "transform")
"""Options that are parts themselves."""

WITHOUT_REWARDS = ("distill", "add_information_gain")
"""Parts that say what a sample is worth where all rewards are 0, beside those that add a stream."""

COMPARED_GROUPS = (
    "compares the groups of a batch, so that a group that rollout.refill took for live may be flat "
    "among those that the step trains on; judge each group by itself (drop = 0, or a threshold "
    "instead of drop), or leave rollout.refill out"
)
"""Why groups cannot be replaced where which of them are live depends on the others."""

COUNTED_FLAT = (
    "remembers all groups, and rollout.refill discards flat ones uncounted, so that what it "
    "remembers would be of mixed groups alone; leave rollout.refill out, or take what judges each "
    "group by itself: mask_group_difficulty, mask_low_variance with a threshold, "
    'divide_by_group_std, z = "group", or k1_in_reward with beta'
)
"""Why groups cannot be replaced where flat ones move what a part remembers."""


def make_chain(
    loss: LossKeys, recipe: AdvantageTransform, refills: bool = False
) -> AdvantageTransform:
    """The advantage of a run: its recipe, and the steps that loss.kl and loss.mismatch add.

    Args:
      refills: whether groups are replaced (`rollout.refill`).

    Raises: InputError where a KL of the policy's samples meets answers that are none; if groups are
      to be replaced and a step compares them with each other, or remembers flat ones.
    """
    tail = build_tail(_load_part(loss.kl), _load_part(loss.mismatch))
    chain = advantages.extend(recipe, *tail)
    for name, step in chain.steps if refills else ():
        if problem := refill_problem(step):
            raise InputError(f"{name} {problem}")
    charging = next((name for name, step in chain.steps if step.name in CHARGING), None)
    if charging and ANSWERED in chain.needs:
        raise InputError(
            f"{charging} charges for the tokens that the policy drew, and the method trains known "
            "answers that it did not draw (train_on_answers): leave one of the two out, or take a "
            'KL in the loss, loss.kl = { use = "k2", beta = 0.001 }'
        )
    return chain


def refill_problem(step: AdvantageTransform) -> str:
    """Why flat groups cannot be replaced where a method has this step; "" where they can."""
    if step.compares_groups:
        return COMPARED_GROUPS
    return COUNTED_FLAT if step.counts_flat else ""


def make_recipe(
    named: Part | Sequence[Part] | AdvantageTransform, rewards: Sequence[Reward]
) -> AdvantageTransform:
    """The chain that says what a sample is worth.

    Args:
      named: a recipe, a list of parts, or the chain itself.
    """
    is_chain = isinstance(named, AdvantageTransform)
    recipe = named if is_chain else _build_chain(named, rewards)
    return recipe if recipe.steps else advantages.chain(recipe, name=recipe.name)


def _build_chain(named: Part | Sequence[Part], rewards: Sequence[Reward]) -> AdvantageTransform:
    if not isinstance(named, Mapping):
        return advantages.build(with_weights([*map(_load_part, named)], rewards))
    recipe = _load_part(named)
    use, options = recipe["use"], part_options(recipe)
    if isinstance(use, str):
        return advantages.build(use, {"weights": _weights(rewards), **options})
    where = f"recipe {own_code.short_name(named['use'])}"
    steps = call(where, use, options)
    if not isinstance(steps, list | tuple | str):  # a transform is a tuple
        raise InputError(
            f"{where} returned {type(steps).__name__}, expected a chain, jaxgrpo.chain(...), or the"
            " list of its steps; a function (signal, rollouts) -> signal is a step: advantage = "
            f'[{{ use = "sum_rewards" }}, {{ use = "{named["use"]}" }}]'
        )
    with explaining_own_code(where):
        return advantages.build(steps)


def takes_weights(part: Mapping[str, Any]) -> bool:
    """Whether a part of a chain adds rewards up by the weights that they have in the config: it
    names none itself."""
    options = {"use", "eps"} if part["use"] == "dvao" else {"use"}
    return part["use"] in SUMS and part.keys() <= options


def with_weights(parts: Sequence[Part], rewards: Sequence[Reward]) -> list[Part]:
    """The parts of a chain; those that `takes_weights`, with the weights of the rewards. A stream
    that an earlier part adds weighs 1."""
    weights, weighed = _weights(rewards), list[Part]()
    if all(weight == 1 for weight in weights.values()):
        return [*parts]
    for part in parts:
        if takes_weights(part):
            steps = advantages.build(weighed).steps if weighed else ()
            added = (name for _, step in steps for name in step.provides)
            part = {**part, **dict.fromkeys(added, 1.0), **weights}
        weighed.append(part)
    return weighed


def trace_chain(
    rollout: RolloutKeys,
    chain: AdvantageTransform,
    rewards: Sequence[Reward],
    num_rows: int,
    fields: Mapping[str, Any],
    scores: Mapping[str, Score] = SCORES,
    trains_texts: bool = False,
) -> None:
    """Runs the advantage of a run on shapes, as `make_objective` runs its loss.

    Args:
      scores: that passes of models give; those of every run are known.
      fields: name -> array of what the data bring, [rows, ...] or [P, ...].
      trains_texts: samples are texts of the data, which no policy drew.

    Raises: InputError where own code fails, before anything is compiled, and where a part reads how
      likely texts were to what drew them.
    """
    spec = RolloutSpec(
        num_prompts=rollout.prompts_per_step,
        group_size=rollout.group_size,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_completion_tokens=rollout.max_completion_tokens,
        rewards=tuple(reward.name for reward in rewards),
        num_rows=num_rows,
    )
    shape = spec.num_prompts, spec.group_size, spec.max_completion_tokens
    added = {
        name: jax.ShapeDtypeStruct((*shape, *scores[name].entries), np.float32)
        for name in chain.needs & scores.keys() - SCORES.keys()
    }
    unknown = ("behavior_logp",) if trains_texts else ()
    try:
        trace_shapes(chain, spec, {**fields, **added}, unknown)
    except NotGiven as error:
        if error.name not in unknown:
            raise
        raise InputError(
            f"data.completion: {str(error).partition(' reads ')[0]} reads {error.name}, how likely "
            "samples were to the policy that drew them, and that is not known for texts: leave the "
            "part out"
        ) from None


def make_policy(
    named: Part,
    rewards: Sequence[Reward],
    mixture: Mixture | None = None,
    sum_scored: bool = False,
) -> PromptPolicy:
    """The prompt policy that `rollout.prompts` names; `sum_scored`: as in `build_policy`."""
    return build_policy(_load_part(named), _weights(rewards), mixture, sum_scored)


def make_objective(loss: LossKeys, max_completion_tokens: int) -> Objective:
    """Surrogate, reduction and penalties of a run.

    Raises: InputError where own code fails, before anything is read or compiled.
    """
    entropy = [losses.build_entropy(_load_part(loss.entropy))] if loss.entropy else []
    objective = Objective(
        surrogate=losses.build_surrogate(_load_part(loss.surrogate)),
        reduction=build_reduction(_load_part(loss.reduction), max_completion_tokens),
        penalties=(*build_penalties(_load_part(loss.kl)), *entropy),
        penalties_on=loss.penalties_on,
        proximal=loss.proximal,
    )
    if objective.penalties_on == "live" and objective._replace(penalties=()).acts_on_all:
        raise InputError(
            f'loss.penalties_on = "live": {objective.surrogate.name} keeps samples without an '
            "advantage in the update, and penalties act on all that are in it; leave penalties_on "
            "out, or take another surrogate"
        )
    objective.trace()
    return objective


def build_reduction(part: Part, max_completion_tokens: int) -> losses.Reduction:
    """The reduction of a run; `constant` divides by the longest completion by default."""
    length = {"length": max_completion_tokens} if part["use"] == "constant" else {}
    return losses.build_reduction({**length, **part})


def without_weights(
    recipe: Mapping[str, Any], chain: AdvantageTransform | None, rewards: Sequence[str]
) -> str:
    """What is wrong where no reward of a config has a weight, and what to do.

    Args:
      chain: of the recipe; None: there is none that could be built.
      rewards: that the recipe would weigh; none: a chain of parts or own code takes no weights.
    """
    logged = "and metrics and evaluations are of their weighted sum; leave the weights out"
    if not rewards:
        return f"{logged}: what samples are worth is what the chain says"
    steps = [] if chain is None else [step for _, step in chain.steps]
    if not any(step.provides or step.name in WITHOUT_REWARDS for step in steps):
        return (
            "so there is nothing to train on; give one of them another weight, or leave it out: it "
            "is then 1"
        )
    weights = ", ".join(f"{name} = 0" for name in rewards)
    return (
        f"{logged}, and let {recipe['use']} read none of them: recipe = {{ use = "
        f"{json.dumps(recipe['use'])}, weights = {{ {weights} }} }}"
    )


def needed_columns(
    needs: frozenset[str],
    rows: Sequence[Mapping[str, Any]],
    rewards: Sequence[Reward],
    scores: Collection[str] = tuple(SCORES),
) -> dict[str, np.ndarray]:
    """The data columns that a method reads as fields, as arrays [rows, ...].

    Args:
      needs: of the chain and the loss, without `OF_ANSWERS` of the chain.
      scores: names of what passes of models give.

    Raises: InputError for a field that no pass, column or reward produces, and for a column that
    holds no numbers.
    """
    names = needs - {*scores} - {reward.name for reward in rewards}
    if missing := sorted(names - rows[0].keys()):
        raise InputError(
            f"the method needs {', '.join(missing)}, which nothing makes: passes of a model give "
            f"{', '.join(scores)}; the data have the columns {', '.join(sorted(rows[0]))}"
            f"{_sample_field_hint(missing)}"
        )
    return {name: _numbers(name, rows) for name in sorted(names)}


def refuse_wide(needs: Set[str], fields: Mapping[str, Any], sizes: tuple[int, ...]) -> None:
    """Raises: InputError for a field that the loss reads and that is of no row, sample or token.

    Args:
      needs: of the loss.
      fields: name -> array, columns [rows, ...] or fields of samples [P, ...].
      sizes: (rows,), or (P, G, T).
    """
    for name in sorted(needs & fields.keys()):
        if (shape := np.shape(fields[name]))[:3] != sizes[: len(shape)]:
            expected = " or ".join(str([*sizes[: n + 1]]) for n in range(len(sizes)))
            raise InputError(
                f"the loss reads {name}, which has shape {[*shape]}, and takes one number for each "
                f"row, sample or token, {expected}: write each number of a row in its own column"
            )


def _numbers(name: str, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The values of a column, [rows, ...].

    Raises: InputError with the first row that holds something else than the first row's count of
      numbers, or a number that a device's 32 bits cannot hold.
    """
    column = []
    for place, row in enumerate(rows):
        value = row[name]
        where = (
            f"the method needs the data column {name!r} as numbers, but {name_row(rows, place)} "
            f"holds {value!r}"
        )
        with refusing(f"{where}: write numbers, the same count in every row", ValueError):
            array = np.asarray(value)
            if array.dtype == object and all(isinstance(x, numbers.Number) for x in array.flat):
                array = array.astype(np.float64)  # decimals, and whole numbers beyond 64 bits
            if array.dtype.kind not in "biuf" or (column and array.shape != column[0].shape):
                raise ValueError
        limit = np.finfo(np.float32).max if array.dtype.kind == "f" else LARGEST
        if np.any(np.isfinite(array) & (np.abs(array) > limit)):
            raise InputError(f"{where}: give numbers of at most {limit:g}, which 32 bits hold")
        column.append(array)
    return np.asarray(column)


def _sample_field_hint(missing: Sequence[str]) -> str:
    """What to do about missing fields that belong to the samples."""
    fields = [f"{name} {OF_SAMPLES[name]}" for name in missing if name in OF_SAMPLES]
    if not fields:
        return ""
    return (
        f". No pass makes {'; '.join(fields)}; what no key of a config brings comes with rollouts "
        "of your own, by jaxgrpo.advantages.compute (rollouts.fields) or evaluate"
    )


def build_penalties(kl: Mapping[str, Any] | None) -> tuple[Penalty, ...]:
    """The penalties in the loss that `loss.kl` asks for.

    Raises: InputError on unknown names and options, and a target_validity that no loss can reach.
    """
    if kl is None or kl["use"] == IN_REWARD:
        return ()
    if isinstance(kl["use"], str) and "target_validity" in kl:
        raise InputError(
            f"{kl['use']}: target_validity is reached by KL-control alone, and the loss"
            f' {kl["use"]} has another fixed point: take {{ use = "{IN_REWARD}", target_validity'
            f" = {kl['target_validity']} }}, or give beta"
        )
    return (losses.build_penalty(kl),)


def build_tail(
    kl: Mapping[str, Any] | None, mismatch: Mapping[str, Any] | None
) -> tuple[AdvantageTransform, ...]:
    """The steps behind a run's recipe or chain. Raises: InputError on wrong names and options."""
    control = [_kl_return(part_options(kl))] if kl and kl["use"] == IN_REWARD else []
    return (*control, *([_correction(mismatch)] if mismatch else []))


def inner_code(part: Mapping[str, Any]) -> str:
    """What to do where a part should take own code for a part inside it; "" where it does not."""
    for option in INNER_PARTS:
        inner = part.get(option)
        steps = inner if isinstance(inner, Sequence) and not isinstance(inner, str) else [inner]
        names = [step.get("use") if isinstance(step, Mapping) else step for step in steps]
        if any(isinstance(name, str) and own_code.is_reference(name) for name in names):
            return (
                f"; {option} takes built-in parts: write a function of yours that returns "
                f"{part['use']}({option}=...) with the part, and name that function"
            )
    return ""


def _weights(rewards: Sequence[Reward]) -> dict[str, float]:
    return {reward.name: reward.weight for reward in rewards}


def _load_part(part: Part | None) -> Any:
    """A part with the function that "file.py:function" or "package.module:function" names."""
    if part is None:
        return None
    use = part["use"]
    is_own = isinstance(use, str) and own_code.is_reference(use)
    return {**part, "use": own_code.load_part(use) if is_own else use}


def _kl_return(options: dict[str, Any]) -> AdvantageTransform:
    if ("beta" in options) == ("target_validity" in options):
        raise InputError(
            f"{IN_REWARD} takes beta or target_validity, one of the two: beta = 0.01, the price of"
            " a nat; or target_validity = 0.9, the target success rate"
        )
    validity = "target_validity" in options
    factory = advantages.add_kl_return_for_validity if validity else advantages.add_kl_return
    with _naming(factory.__name__):
        step = call(IN_REWARD, factory, options)
    named = lambda part: part._replace(init=_naming(step.name)(part.init))  # noqa: E731
    return named(step)._replace(shrunk=lambda alone: named(step.shrunk(alone)))


@contextlib.contextmanager
def _naming(step: str) -> Iterator[None]:
    """Errors name a step by what the user wrote for it, k1_in_reward."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace(f"{step}:", f"{IN_REWARD}:", 1)) from None


def _correction(part: Mapping[str, Any]) -> AdvantageTransform:
    if not isinstance(part["use"], str):
        try:
            return advantages.build([part]).steps[0][1]
        except InputError as error:  # the list is ours, not the user's
            raise InputError(str(error).replace("advantage[0]", "loss.mismatch", 1)) from None
    return call(part["use"], find("mismatch", part["use"], CORRECTIONS), part_options(part))
