"""What to do about the numbers of a probe: explicit rules, each naming the numbers it reads.

A rule reads measured numbers alone and says what is worth *comparing*: nobody knows before training
which advantage wins. On one prompt the group baselines, sign and REINFORCE have the same expected
direction; they differ in scale, in noise and in what they make of flat groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxgrpo.training.alarms import RULES

GAIN = 0.9
"""The group size advised is the smallest with this share of the live groups of the largest."""

NO_SIGNAL = 0.05
"""Fewer live groups than this at every size: no group size helps."""

MUCH = 0.1
"""A share of prompts, groups or samples that is worth doing something about."""

SMALL_GAP = 0.05
"""Where the interval of the gap ends below, prompts are as good as equally hard."""

STARVED = 0.3
"""So many groups that all fail: methods that keep them alive are worth a comparison."""

SELDOM = 0.1
"""Below this success rate an advantage that punishes every failure is mostly noise."""

CUT = 0.05
"""This many completions cut: they may stand in a group as failures that were none."""

WATCHED = {
    "completions/clipped_ratio": "format.cut",
    "sampling/sampling_logp_difference/mean": "agreement.mean",
}
"""Metrics of training whose alarms hold for a probe, and where it has them."""


class Advice(NamedTuple):
    """What to do, and the numbers that say so."""

    about: str
    says: str
    why: str
    numbers: tuple[str, ...]  # paths in the probe's JSON

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "numbers": list(self.numbers)}


Rule = Callable[[Mapping[str, Any], int], Advice | None]
"""(numbers of a probe, advised group size) -> advice, or None where its numbers call for none"""


def advise(found: Mapping[str, Any]) -> list[Advice]:
    """All advice that follows from the numbers of a probe.

    Without live groups of any size nothing is said of methods: none of them helps before there is
    a signal, and what would be compared is noise.
    """
    advice = _health(found)
    live = live_shares(found["degeneracy"])
    if not live:
        return advice
    rules = FIRST if max(live.values()) < NO_SIGNAL else (*FIRST, *METHODS)
    size = advised_size(found["degeneracy"])
    given = (rule(found, size) for rule in rules)
    return advice + [one for one in given if one is not None]


def live_shares(groups: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """Group size -> share of live groups, of the sizes of which it is known."""
    live = {size: 1 - group["measured"] for size, group in groups.items()}
    return {size: share for size, share in live.items() if share == share}


def advised_size(groups: Mapping[int, Mapping[str, float]]) -> int:
    """The smallest group size that has GAIN of the live groups that the largest has."""
    live = live_shares(groups)
    return next(size for size in live if live[size] >= GAIN * live[max(live)])


def _health(found: Mapping[str, Any]) -> list[Advice]:
    """The alarms of training that the samples raise already."""
    given, hidden = [], set[str]()
    for rule in RULES:
        path = WATCHED.get(rule.metric)
        value = _at(found, path) if path else None
        if value is None or not value > rule.above or rule.name in hidden:
            continue
        hidden |= set(rule.hides)
        given.append(Advice("health", rule.remedy, rule.says.format(value=value), (str(path),)))
    if not math.isfinite(found["agreement"]["mean"]):
        says = "do not train it like this: look at the weights, and at model.dtype"
        why = "log-probs of sampler or trainer are not finite"
        given.append(Advice("health", says, why, ("agreement.mean",)))
    unscored = found["success"]["unscored"]
    if unscored > MUCH:
        why = f"the reward could not score {unscored:.0%} of the samples"
        says = "mend the reward, or the columns that it reads, before anything is concluded"
        given.append(Advice("health", says, why, ("success.unscored",)))
    return given


def _headroom(found: Mapping[str, Any], size: int) -> Advice:
    del size
    passes = found["pass_at"]
    most = max(k for k, one in passes.items() if one["value"] == one["value"])
    once, often = passes[1]["value"], passes[most]["value"]
    numbers = ("pass_at.1.value", f"pass_at.{most}.value")
    why = f"pass@1 is {once:.3f}, pass@{most} is {often:.3f}"
    if often - once < MUCH:
        says = "expect little: what the model can do in many tries it does in one, or in none"
    else:
        says = "there is something to amplify; watch that pass@k does not fall while pass@1 rises"
    return Advice("headroom", says, why, numbers)


def _group_size(found: Mapping[str, Any], size: int) -> Advice:
    groups, success = found["degeneracy"], found["success"]
    live = live_shares(groups)
    largest, smallest = max(live), min(live)
    if max(live.values()) < NO_SIGNAL:
        return Advice(
            "group size",
            "change prompts or reward first: no group size measured here gives signal",
            f"{live[largest]:.1%} of groups of {largest} are live; {success['at_zero']:.0%} of "
            f"prompts never succeed, {success['at_one']:.0%} always",
            (f"degeneracy.{largest}.measured", "success.at_zero", "success.at_one"),
        )
    per = {g: groups[g]["live_groups_per_1000_samples"] for g in (smallest, size)}
    why = f"{live[size]:.0%} of groups of {size} are live"
    if size != largest:
        why += f", and no more than {live[largest]:.0%} of groups of {largest}"
    if size != smallest:
        why += (
            f"; for the same samples G = {smallest} gives more of them, {per[smallest]:.0f} per "
            f"1000 samples against {per[size]:.0f}, each with less to compare"
        )
    says = f"rollout.group_size = {size}"
    if size == largest:
        says += ", the largest measured: probe with more --samples to see whether more would help"
    return Advice("group size", says, why, tuple(f"degeneracy.{g}.measured" for g in live))


def _prompt_filter(found: Mapping[str, Any], size: int) -> Advice | None:
    group, success = found["degeneracy"][size], found["success"]
    low, high = group["ci"]
    ends = f"{success['at_zero']:.0%} of prompts never succeed and {success['at_one']:.0%} always"
    numbers = (f"degeneracy.{size}.ci", "success.at_zero", "success.at_one")
    gap = f"the gap to equal prompts is {group['gap']:.3f} ({low:.3f} to {high:.3f}) at G = {size}"
    if low > 0:
        if success["at_zero"] >= MUCH:
            says = 'choose prompts: rollout.prompts = { use = "difficulty_band" }'
        elif success["at_one"] >= MUCH:
            says = 'leave out what is solved: rollout.prompts = { use = "no_positive_resampling" }'
        else:
            says = 'prefer uncertain prompts: rollout.prompts = { use = "spo_priority" }'
        why = f"prompts differ in difficulty and more samples do not help the ends: {gap}; {ends}"
        return Advice("filter", says, why, numbers)
    if high < SMALL_GAP:
        says = "no filter of prompts: flat groups come by chance, and larger groups make them rarer"
        return Advice("filter", says, gap, numbers)
    if low <= 0 <= high:
        says = "the interval is too wide to tell whether a filter helps: probe with more prompts"
        return Advice("filter", says, gap, numbers)
    return None


def _denominator(found: Mapping[str, Any], size: int) -> Advice | None:
    flat = found["degeneracy"][size]["measured"]
    if flat < MUCH:
        return None
    says = "compare `grpo` with `dapo`, which takes flat groups out of the denominator"
    why = f"{flat:.0%} of groups of {size} are flat: they add nothing, and dilute the others"
    return Advice("filter", says, why, (f"degeneracy.{size}.measured",))


def _cut(found: Mapping[str, Any], size: int) -> Advice | None:
    del size
    cut = found["format"]["cut"]
    if cut < CUT:
        return None
    says = "compare with `mask_truncated` in front of the baseline, or allow longer completions"
    why = f"{cut:.0%} of completions are cut at the limit, whatever they would have answered"
    return Advice("filter", says, why, ("format.cut",))


def _alive_when_all_fail(found: Mapping[str, Any], size: int) -> Advice | None:
    failed, rate = found["degeneracy"][size]["all_fail"], found["success"]["rate"]
    if failed < STARVED:
        return None
    why = f"in {failed:.0%} of groups of {size} all fail, and a group baseline learns nothing there"
    if rate < SELDOM:
        says = "compare `grpo` with `ema` at several learning rates each"
        why += (
            f"; at a success rate of {rate:.3f} `sign` would be mostly noise, while `ema` weighs "
            "failures by that rate"
        )
    else:
        says = "compare `grpo` with `sign`, `conditional_sign` and `ema` at several learning rates "
        says += "each"
        why += f"; at a success rate of {rate:.3f} failures can be pushed away without drowning it"
    return Advice("advantage", says, why, (f"degeneracy.{size}.all_fail", "success.rate"))


def _lucky(found: Mapping[str, Any], size: int) -> Advice | None:
    lucky = found["degeneracy"][size]["lucky"]
    if not lucky >= MUCH:
        return None
    says = "compare `grpo` with `dr_grpo`, and with `mask_difficulty_band`"
    divided, centred = (size - 1) / size**0.5, 1 - 1 / size
    why = (
        f"{lucky:.0%} of live groups of {size} are a hard prompt's with a single success; divided "
        f"by the group's deviation its advantage is {divided:.2f}, without {centred:.2f}"
    )
    return Advice("advantage", says, why, (f"degeneracy.{size}.lucky",))


def _small_groups(found: Mapping[str, Any], size: int) -> Advice | None:
    if size > 4:
        return None
    says = "compare with `rloo`, whose baseline leaves the sample itself out"
    why = f"at G = {size} the group's mean shrinks every gradient by {1 / size:.0%}"
    return Advice("advantage", says, why, (f"degeneracy.{size}.measured",))


def _calibration(found: Mapping[str, Any], size: int) -> Advice | None:
    del size
    stated = found.get("calibration")
    if not stated or stated["stated"] < MUCH or not stated["ece"] >= MUCH:
        return None
    says = "compare with `rlcr`, which rewards confidences that are right"
    why = f"stated confidences miss the share of right answers by {stated['ece']:.2f} on average"
    return Advice("advantage", says, why, ("calibration.ece",))


FIRST: tuple[Rule, ...] = (_headroom, _group_size)
"""Rules that hold whether there is a signal or none."""

METHODS: tuple[Rule, ...] = (
    _prompt_filter,
    _denominator,
    _cut,
    _alive_when_all_fail,
    _lucky,
    _small_groups,
    _calibration,
)


def _at(found: Mapping[str, Any], path: str) -> float | None:
    value: Any = found
    for name in path.split("."):
        if name not in value:
            return None
        value = value[name]
    return value
