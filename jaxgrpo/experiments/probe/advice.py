"""What to do about the numbers of a probe: explicit rules, each naming the numbers it reads.

A rule reads measured numbers alone and says what is worth *comparing*: before training it is not
known which advantage wins. On one prompt the group baselines, sign and REINFORCE have the same
expected direction; they differ in scale, in noise and in what they make of flat groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxgrpo.training.records.alarms import RULES

GAIN = 0.9
"""The group size advised is the smallest with this share of the live groups of the largest."""

NO_SIGNAL = 0.05
"""Fewer live groups than this at every size: no group size helps."""

MUCH = 0.1
"""From this share of prompts, groups or samples on, something should be done about them."""

SMALL_GAP = 0.05
"""If the interval of the gap ends below this, prompts are practically equally hard."""

STARVED = 0.3
"""From this share of all-fail groups on, methods that learn from them are worth a comparison."""

SELDOM = 0.1
"""Below this success rate an advantage that punishes every failure is mostly noise."""

CUT = 0.05
"""From this share on, cut completions matter: groups count them as failures, right or wrong."""

WATCHED = {
    "completions/clipped_ratio": "format.cut",
    "sampling/sampling_logp_difference/mean": "agreement.mean",
}
"""Metrics of training whose alarms apply to a probe, and their paths in its JSON."""


class Advice(NamedTuple):
    """What to do, and the numbers that say so."""

    about: str
    says: str
    why: str
    numbers: tuple[str, ...]  # paths in the probe's JSON


def advise(numbers: Mapping[str, Any]) -> list[Advice]:
    """All advice that follows from the numbers of a probe.

    If no group size has live groups, nothing is said about methods: none of them helps before there
    is a signal, and a comparison would compare noise.
    """
    advice = [*_health(numbers)]
    live = live_shares(numbers["degeneracy"])
    if not live:
        return advice
    size = advised_size(numbers["degeneracy"])
    advice += [_headroom(numbers), _group_size(numbers, size)]
    if max(live.values()) >= NO_SIGNAL:
        advice += [
            *_prompt_filter(numbers, size),
            *_masks(numbers, size),
            *_advantages(numbers, size),
        ]
    return advice


def live_shares(groups: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """Group size -> share of live groups, of the sizes for which it is known."""
    live = {size: 1 - group["measured"] for size, group in groups.items()}
    return {size: share for size, share in live.items() if share == share}


def advised_size(groups: Mapping[int, Mapping[str, float]]) -> int:
    """The smallest group size that has GAIN of the live groups that the largest has."""
    live = live_shares(groups)
    return next(size for size in live if live[size] >= GAIN * live[max(live)])


def value_at(numbers: Mapping[str, Any], path: str) -> Any:
    """The number at a path of the probe's JSON, as "format.cut"; None if it has none."""
    value: Any = numbers
    for name in path.split("."):
        value = None if value is None else value.get(name)
    return value


def _health(numbers: Mapping[str, Any]) -> Iterator[Advice]:
    """The alarms of training that the samples raise already."""
    hidden: tuple[str, ...] = ()
    for rule in RULES:
        path = WATCHED.get(rule.metric)
        if path and value_at(numbers, path) > rule.above and rule.name not in hidden:
            hidden += rule.hides
            why = rule.says.format(value=value_at(numbers, path))
            yield Advice("health", rule.remedy, why, (path,))
    if not math.isfinite(numbers["agreement"]["mean"]):
        says = "do not train it like this: look at the weights, and at model.dtype"
        why = "log-probs of sampler or trainer are not finite"
        yield Advice("health", says, why, ("agreement.mean",))
    unscored = numbers["success"]["unscored"]
    if unscored > MUCH:
        why = f"the reward could not score {unscored:.0%} of the samples"
        says = "mend the reward, or the columns that it reads, before anything is concluded"
        yield Advice("health", says, why, ("success.unscored",))


def _headroom(numbers: Mapping[str, Any]) -> Advice:
    passes = numbers["pass_at"]
    largest = max(k for k, estimate in passes.items() if estimate["value"] == estimate["value"])
    once, often = passes[1]["value"], passes[largest]["value"]
    says = "there is something to amplify; watch that pass@k does not fall while pass@1 rises"
    if often - once < MUCH:
        says = "expect little: what the model can do in many tries it does in one, or in none"
    why = f"pass@1 is {once:.3f}, pass@{largest} is {often:.3f}"
    return Advice("headroom", says, why, ("pass_at.1.value", f"pass_at.{largest}.value"))


def _group_size(numbers: Mapping[str, Any], size: int) -> Advice:
    groups, success = numbers["degeneracy"], numbers["success"]
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
    counts = {g: f"{groups[g]['live_groups_per_1000_samples']:.0f}" for g in (smallest, size)}
    says, why = f"rollout.group_size = {size}", f"{live[size]:.0%} of groups of {size} are live"
    if size == largest:
        says += ", the largest measured: probe with more --samples to see whether more would help"
    else:
        why += f", and no more than {live[largest]:.0%} of groups of {largest}"
    if size != smallest:
        more = (
            f"{counts[smallest]} per 1000 samples against {counts[size]}, each with less to compare"
        )
        why += f"; for the same samples G = {smallest} gives more of them, {more}"
    return Advice("group size", says, why, tuple(f"degeneracy.{g}.measured" for g in live))


def _prompt_filter(numbers: Mapping[str, Any], size: int) -> Iterator[Advice]:
    group, success = numbers["degeneracy"][size], numbers["success"]
    low, high = group["ci"]
    ends = f"{success['at_zero']:.0%} of prompts never succeed and {success['at_one']:.0%} always"
    why = f"the gap to equal prompts is {group['gap']:.3f} ({low:.3f} to {high:.3f}) at G = {size}"
    if low > 0:
        action, policy = "prefer uncertain prompts", "spo_priority"
        if success["at_zero"] >= MUCH:
            action, policy = "choose prompts", "difficulty_band"
        elif success["at_one"] >= MUCH:
            action, policy = "leave out what is solved", "no_positive_resampling"
        says = f'{action}: rollout.prompts = {{ use = "{policy}" }}'
        why = f"prompts differ in difficulty and more samples do not help the ends: {why}; {ends}"
    elif high < SMALL_GAP:
        says = "no filter of prompts: flat groups come by chance, and larger groups make them rarer"
    elif low <= 0 <= high:
        says = "the interval is too wide to tell whether a filter helps: probe with more prompts"
    else:  # nothing is known of the gap
        return
    paths = (f"degeneracy.{size}.ci", "success.at_zero", "success.at_one")
    yield Advice("filter", says, why, paths)


def _masks(numbers: Mapping[str, Any], size: int) -> Iterator[Advice]:
    """What to leave out of the loss: flat groups, completions that were cut."""
    flat, cut = numbers["degeneracy"][size]["measured"], numbers["format"]["cut"]
    if flat >= MUCH:
        says = "compare `grpo` with `dapo`, which takes flat groups out of the denominator"
        why = f"{flat:.0%} of groups of {size} are flat: they add nothing, and dilute the others"
        yield Advice("filter", says, why, (f"degeneracy.{size}.measured",))
    if cut >= CUT:
        says = "compare with `mask_truncated` in front of the baseline, or allow longer completions"
        why = f"{cut:.0%} of completions are cut at the limit, whatever they would have answered"
        yield Advice("filter", says, why, ("format.cut",))


def _advantages(numbers: Mapping[str, Any], size: int) -> Iterator[Advice]:
    group, calibration = numbers["degeneracy"][size], numbers.get("calibration")
    if group["all_fail"] >= STARVED:
        yield _alive_when_all_fail(group["all_fail"], numbers["success"]["rate"], size)
    if group["lucky"] >= MUCH:
        says = "compare `grpo` with `dr_grpo`, and with `mask_difficulty_band`"
        lone = "a hard prompt's with a single success"
        lone = f"{group['lucky']:.0%} of live groups of {size} are {lone}"
        divided = f"divided by the group's deviation its advantage is {(size - 1) / size**0.5:.2f}"
        why = f"{lone}; {divided}, without {1 - 1 / size:.2f}"
        yield Advice("advantage", says, why, (f"degeneracy.{size}.lucky",))
    if size <= 4:
        says = "compare with `rloo`, whose baseline leaves the sample itself out"
        why = f"at G = {size} the group's mean shrinks every gradient by {1 / size:.0%}"
        yield Advice("advantage", says, why, (f"degeneracy.{size}.measured",))
    if calibration and calibration["stated"] >= MUCH and calibration["ece"] >= MUCH:
        says = "compare with `rlcr`, which rewards confidences that are right"
        missed = f"{calibration['ece']:.2f} on average"
        why = f"stated confidences miss the share of right answers by {missed}"
        yield Advice("advantage", says, why, ("calibration.ece",))


def _alive_when_all_fail(all_fail: float, rate: float, size: int) -> Advice:
    why = (
        f"in {all_fail:.0%} of groups of {size} all fail, and a group baseline learns nothing there"
    )
    methods = "`sign`, `conditional_sign` and `ema`"
    effect = "failures can be pushed away without drowning it"
    if rate < SELDOM:
        methods = "`ema`"
        effect = "`sign` would be mostly noise, while `ema` weighs failures by that rate"
    says = f"compare `grpo` with {methods} at several learning rates each"
    why += f"; at a success rate of {rate:.3f} {effect}"
    return Advice("advantage", says, why, (f"degeneracy.{size}.all_fail", "success.rate"))
