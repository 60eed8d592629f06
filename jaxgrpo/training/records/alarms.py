"""Warnings: what the metrics of a run say is going wrong, with the cause and the remedy.

A pure function of the lines of metrics.jsonl: `see` takes one line after the other, `replay` all.
Each warning is given once, when it begins; it can begin again once it has cleared. A threshold is
compared with the mean of the last few steps, and clears at CLEARS of itself, so that one odd step
neither raises nor repeats it.
"""

from __future__ import annotations

import fnmatch
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxgrpo.rewards.consensus import AGREEMENT
from jaxgrpo.training.records.reading import is_number

CLEARS = 0.9
"""A warning ends where its metric is no more than this share of the threshold."""

EVALUATION_FALL = 0.05
"""eval/accuracy this far below its best is a fall."""

WINDOW = 5
"""Steps of reward compared on either side of a fall: after the best evaluation, and before now."""

DEVIATIONS = 2.0
"""The reward rises where the two means differ by more than so many standard errors."""

Line = Mapping[str, Any]
"""One line of metrics.jsonl: {"step": n, name: number or None, ...}."""


class Rule(NamedTuple):
    """A threshold: raised where the mean of a metric over the last `steps` steps is above it."""

    name: str
    when: str  # metric > threshold; a "*" stands for the name of a reward, or of a step of a chain
    says: str  # {value} is the mean, {star} what "*" stands for
    remedy: str
    steps: int = 3
    hides: tuple[str, ...] = ()  # rules that say the same in weaker words

    @property
    def metric(self) -> str:
        return self.when.split(" > ")[0]

    @property
    def above(self) -> float:
        return float(self.when.split(" > ")[1])


WRONG_PROGRAM = (
    "one of the two programs is wrong, and every ratio with it: if own code samples or gives "
    "attention, look there first; else please report it with the config. Until then "
    'loss.proximal = "trainer" keeps it out of the ratio'
)
NEEDS_WORKERS = "what needs the main thread of a process, as signals do, needs rollout.call_workers"
KL = Rule(
    "kl",
    "kl > 1",
    "the policy is {value:.2g} nats per token from the reference",
    "lower optimizer.learning_rate, or raise loss.kl.beta",
)
RULES = (
    Rule(
        "no end",
        "completions/clipped_ratio > 0.999",
        "no completion ends: all are cut at the length limit",
        "raise rollout.max_completion_tokens; if texts run on past the answer, the tokenizer's end "
        "token is not the one that the model was trained to write",
        hides=("truncated",),
    ),
    Rule(
        "truncated",
        "completions/clipped_ratio > 0.5",
        "{value:.0%} of completions are cut at the length limit",
        "raise rollout.max_completion_tokens, or ask for shorter answers",
    ),
    Rule(
        "all fail",
        "groups/all_fail > 0.9",
        "in {value:.0%} of groups every sample fails alike: there is nothing to learn from",
        "read samples/: does the model see its format, does the reward accept a right answer? "
        "Else take easier prompts, a larger rollout.group_size or a denser reward",
        hides=("flat", "no update"),
    ),
    Rule(
        "all pass",
        "groups/all_pass > 0.9",
        "in {value:.0%} of groups every sample earns the same, above 0: nothing is left to learn",
        "where answers are right take harder prompts, or stop; else the reward cannot tell them "
        "apart",
        hides=("flat", "no update"),
    ),
    Rule(
        "flat",
        "frac_reward_zero_std > 0.9",
        "in {value:.0%} of groups all rewards are equal, so their advantage is 0",
        "take prompts of middle difficulty, a larger rollout.group_size or a denser reward",
        hides=("no update",),
    ),
    Rule(
        "no update",
        "skipped_updates/no_live_sample > 0.999",
        "no update learned from a sample: no sample had an advantage",
        'where each reward is None on the rows of the others, recipe = "like_trl" or the part '
        "sum_scored adds up what was scored; else see rewards and advantages in samples/",
    ),
    Rule(
        "unscored",
        "rewards/*/unscored > 0.1",
        "the reward {star} could not score {value:.0%} of completions",
        "see which in samples/ (null) and mend the reward, or the columns it reads; if it leaves "
        'rows to other rewards, recipe = "like_trl" or the part sum_scored adds up what was '
        "scored, and with it nothing is wrong",
    ),
    Rule(
        "calls raise",
        "tools/raised_frequency > 0.9",
        "{value:.0%} of the calls of tools raise an error, which the model reads as the answer",
        f"read what they answer in samples/ and mend the tools; {NEEDS_WORKERS}",
    ),
    Rule(
        "refused",
        "*/refused > 0",
        "{star} left out {value:.2g} of the samples: their reward is neither 0 nor 1",
        "give its option threshold, the lowest reward that is a success, or weigh the rewards so "
        "that their sum is 0 or 1",
        steps=1,
    ),
    Rule(
        "identical",
        "groups/identical > 0.9",
        "in {value:.0%} of groups all completions are the same",
        "where they are right these prompts are learnt; else the policy has collapsed: raise "
        "rollout.temperature, lower optimizer.learning_rate or add loss.kl",
        hides=("all pass", "flat"),
    ),
    Rule(
        "dead experts",
        "routing/dead > 0.25",
        "no token of a step passes {value:.0%} of the experts",
        "with few tokens a step it is chance; else see step 1: if the base used them, lower "
        "optimizer.learning_rate, or train adapters, which leave routers as they are",
        steps=5,
    ),
    Rule(
        "mismatch",
        # NeMo-RL's alarm: mean exp|difference| above 1.05
        "sampling/sampling_logp_difference/mean > 0.05",
        "sampler and trainer disagree by {value:.2g} nats per token about the same texts",
        'set model.dtype = "float32", and leave out rollout.weight_dtype and kv_cache_dtype, to '
        'see whether it is rounding, or loss.proximal = "trainer" to keep it out of the ratio',
        hides=("disagreement", "ratio", "policy kl"),
    ),
    Rule(
        "disagreement",
        "sampling/disagreement > 1",
        "at some token sampler and trainer disagree by {value:.2g} times what rounding explains, "
        "about parameters that are the same",
        WRONG_PROGRAM,
    ),
    Rule(
        "mean disagreement",
        "sampling/mean_disagreement > 1",
        "sampler and trainer disagree by {value:.2g} times what rounding explains in the mean over "
        "tokens, about parameters that are the same",
        WRONG_PROGRAM,
        hides=("disagreement", "mismatch"),
    ),
    Rule(
        "ratio",
        "ratio_max > 10",
        "the ratio of current to sampling policy reaches {value:.3g}",
        "lower optimizer.learning_rate",
    ),
    Rule(
        "policy kl",
        "policy_kl > 0.1",
        "the policy is {value:.2g} nats per token from the one that sampled",
        "lower optimizer.learning_rate",
    ),
    KL,
    KL._replace(when="*/kl > 1"),  # of a step of the chain, as k1_in_reward is
    Rule(
        "not finite",
        "skipped_updates/not_finite > 0",
        "a gradient, log-prob or entropy was not finite, and the update was left out",
        "lower optimizer.learning_rate; look at the rewards of this step",
        steps=1,
    ),
)
EVALUATION = "evaluation falls"
"""A rule that is no threshold: eval/accuracy falls while reward rises."""

COVERAGE = "pass@k below base"
"""Another: eval/pass@16 falls below that of the base, beyond both intervals."""

CONSENSUS = "consensus drifts"
"""Another: samples agree more and more, and eval/accuracy does not rise with it."""

AGREEMENT_RISE = 0.1
"""The mean agreement of the last WINDOW steps this far above that of the first is a rise."""

TRIES = 16
"""k of that pass@k; where it is not evaluated the largest k that is."""

LARGEST = 1e100
"""That rules count with: a file of metrics may hold anything."""

GROWTH = 10.0
"""A run ends if one update makes the norm of the weights more than so many times as large."""

NAMES = (*(rule.name for rule in RULES), EVALUATION, COVERAGE, CONSENSUS)
_REMEMBERED_STEPS = max(WINDOW, *(rule.steps for rule in RULES))


class Alarm(NamedTuple):
    """A warning, at the step where it began."""

    name: str  # of its rule, with the reward it is about
    step: int
    text: str


class State(NamedTuple):
    """What is remembered of the lines seen: no more than the rules read."""

    recent: tuple[Line, ...] = ()
    first: Line | None = None  # with the evaluation of the base, at step 0
    best: Line | None = None  # of those with an evaluation, by eval/accuracy
    rewards_after: tuple[float, ...] = ()  # of the first steps after the best
    agreements: tuple[float, ...] = ()  # of the first steps
    active: frozenset[str] = frozenset()


def see(state: State, line: Line) -> tuple[State, tuple[Alarm, ...]]:
    """(state after this line, the warnings that begin with it)."""
    if line["step"] > 0:
        state = state._replace(recent=(*state.recent, line)[-_REMEMBERED_STEPS:])
    rewards = (*state.rewards_after, *_values([line], "reward"))
    agreements = (*state.agreements, *_values([line], AGREEMENT))
    state = state._replace(rewards_after=rewards[:WINDOW], agreements=agreements[:WINDOW])
    holds = _thresholds(state)
    if _values([line], "eval/accuracy"):
        # A first evaluation at a later step is not the base's: the run began without any.
        first = state.first or (line if line["step"] == 0 else None)
        best = state.best or line
        if best is line or line["eval/accuracy"] > best["eval/accuracy"]:
            state = state._replace(first=first, best=line, rewards_after=())
        holds |= _evaluation(state, best, line)
        if first:
            holds |= _coverage(first, line) | _consensus(state, first, line)
    else:  # what held at the last evaluation still does
        holds |= dict.fromkeys(state.active & {EVALUATION, COVERAGE, CONSENSUS}, "")
    hidden = {name for rule in RULES if rule.name in holds for name in rule.hides}
    active = frozenset(holds.keys() - hidden)
    new_alarms = tuple(
        Alarm(name, line["step"], text)
        for name, text in holds.items()
        if name in active - state.active
    )
    return state._replace(active=active), new_alarms


def weights_problem(line: Line) -> str | None:
    """What says that the weights behind this step are of no use any more; None if nothing does."""
    growth = line["weights/growth"]
    if growth <= GROWTH:
        return None
    norm = f"weights/norm = {line['weights/norm']:.3g}"
    if math.isfinite(growth):
        return f"one update made the weights {growth:.3g} times as large ({norm})"
    return f"an update left weights that are not finite ({norm})"


def is_not_finite(line: Line) -> bool:
    """Whether a step computed something that is not finite, so that its update was left out. Where
    nothing was sampled, as by `jaxgrpo sft`, only an update can be so."""
    return line["skipped_updates/not_finite"] > 0 or line.get("sampling/not_finite", 0) > 0


def replay(lines: Iterable[Line]) -> tuple[State, list[Alarm]]:
    """(state after the last line, all warnings in their order)."""
    state, alarms = State(), []
    for line in lines:
        state, new_alarms = see(state, line)
        alarms += new_alarms
    return state, alarms


def count(alarms: Sequence[Alarm]) -> dict[str, int]:
    """How often each warning was given."""
    return dict(Counter(alarm.name for alarm in alarms))


def _thresholds(state: State) -> dict[str, str]:
    """name -> text of the rules that hold."""
    holds = {}
    for rule in RULES:
        for metric in _names(rule.metric, state.recent):
            prefix, _, suffix = rule.metric.partition("*")
            star = metric.removeprefix(prefix).removesuffix(suffix)
            name = f"{rule.name} {star}" if "*" in rule.metric else rule.name
            values = _values(state.recent[-rule.steps :], metric)
            if len(values) < rule.steps:  # too little is known to begin or to end
                if name in state.active:
                    holds[name] = ""
                continue
            value = statistics.fmean(values)
            limit = rule.above * (CLEARS if name in state.active else 1)
            # Metrics are float32: a tenth of them is 0.1000000015.
            if value > limit and not math.isclose(value, limit, rel_tol=1e-6):
                span = f" over {rule.steps} steps" if rule.steps > 1 else ""
                says = rule.says.format(value=value, star=star)
                reading = f"{metric} = {value:.3g}, above {rule.above:g}{span}"
                holds[name] = f"{says} ({reading}): {rule.remedy}"
    return holds


def _names(pattern: str, lines: Sequence[Line]) -> list[str]:
    if "*" not in pattern:
        return [pattern]
    return fnmatch.filter(lines[-1], pattern) if lines else []


def _evaluation(state: State, best: Line, line: Line) -> dict[str, str]:
    """The text of the fall of eval/accuracy below its best while reward rises, if it is one."""
    metric = "eval/accuracy"
    rise = _rise(state.rewards_after, _values(state.recent[-WINDOW:], "reward"))
    if line[metric] > best[metric] - EVALUATION_FALL or rise is None:
        return {}
    return {
        EVALUATION: f"evaluation falls while reward rises ({metric} = {line[metric]:.3f}, "
        f"{best[metric]:.3f} at step {best['step']}; reward up by {rise:.3g}): the reward is being "
        "earned without the skill: read samples/, mend the reward, add loss.kl, or take the model "
        f"of step {best['step']}"
    }


def _coverage(first: Line, line: Line) -> dict[str, str]:
    """The text of the fall of pass@k below the base's, beyond both intervals, if it is one."""
    matches = [re.fullmatch(r"eval/pass@([0-9]{1,9})/low", name) for name in first]
    sizes = [int(match[1]) for match in matches if match and f"{match[0][:-3]}high" in line]
    metric = f"eval/pass@{TRIES if TRIES in sizes else max(sizes, default=TRIES)}"
    places = (line, f"{metric}/high"), (first, f"{metric}/low"), (line, metric), (first, metric)
    values = [value for entries, name in places for value in _values([entries], name)]
    if len(values) < len(places) or values[0] >= values[1]:
        return {}
    return {
        COVERAGE: "the policy solves fewer prompts than the base did "
        f"({metric} = {values[2]:.3f}, {values[3]:.3f} at step {first['step']}; "
        "their 95% intervals do not meet): it has narrowed "
        "to some of the base's answers: lower optimizer.learning_rate, add loss.kl, take a recipe "
        "that keeps answers diverse (passk, darling, alpha_dpg), or the model of an earlier step"
    }


def _consensus(state: State, first: Line, line: Line) -> dict[str, str]:
    """The text of agreement that rises while eval/accuracy stays at the base's, if it does."""
    now = _values(state.recent[-WINDOW:], AGREEMENT)
    if min(len(now), len(state.agreements)) < WINDOW:
        return {}
    began, ends = statistics.fmean(state.agreements), statistics.fmean(now)
    accuracy, base = line["eval/accuracy"], first["eval/accuracy"]
    if ends < began + AGREEMENT_RISE or accuracy > base:
        return {}
    return {
        CONSENSUS: f"samples agree more ({AGREEMENT} from {began:.3f} to {ends:.3f}) and are right "
        f"no more often (eval/accuracy = {accuracy:.3f}, {base:.3f} at step {first['step']}): the "
        "majority is wrong and is being learnt: take prompts that the base solves more often than "
        "not, more votes, loss.kl, or gold answers"
    }


def _rise(old_rewards: Sequence[float], new_rewards: Sequence[float]) -> float | None:
    """The difference of the means; None unless it is more than DEVIATIONS standard errors."""
    if min(len(old_rewards), len(new_rewards)) < 3:
        return None
    difference = statistics.fmean(new_rewards) - statistics.fmean(old_rewards)
    errors = (statistics.variance(values) / len(values) for values in (old_rewards, new_rewards))
    return difference if difference > DEVIATIONS * math.sqrt(sum(errors)) else None


def _values(lines: Sequence[Line], metric: str) -> list[float]:
    """`finite_values` for rules, at most LARGEST, so that sums and squares are finite too."""
    return [max(-LARGEST, min(LARGEST, value)) for value in finite_values(lines, metric)]


def finite_values(lines: Sequence[Line], metric: str) -> list[float]:
    """The values of a metric in these lines, where they are finite numbers."""
    return [float(line[metric]) for line in lines if is_number(line.get(metric))]
