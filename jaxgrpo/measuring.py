"""The numbers of a probe, from judged samples: whether groups of each size would carry signal."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgrpo import calibration, diagnostics, group_signal, intervals
from jaxgrpo.evaluation import SUCCESS, Answers
from jaxgrpo.rewards import stated_confidence
from jaxgrpo.rewards.forms import has_format

GROUP_SIZES = (2, 4, 8, 16)
PER = 1000  # samples, of which live groups are told at equal cost

Extract = Callable[[str], Hashable]


def measure(
    answers: Answers,
    extract: Extract | None,
    *,
    prompts_per_step: int,
    level: float = intervals.LEVEL,
) -> dict[str, Any]:
    """Everything that the samples of a probe say, as JSON holds it but for NaN.

        success      rate and its interval; at_zero, at_one: shares of prompts whose samples all
                     fail or all succeed; histogram: prompts by successes, 0 to N; unscored
        pass_at      k -> value and ci, for k = 1, 2, 4, ... up to N
        degeneracy   G -> measured, iid, gap and ci of the gap (`diagnostics.jensen_gap`);
                     all_fail and all_pass; of a step, live_groups and live_tokens;
                     live_groups_per_1000_samples; lucky (`group_signal.lucky_share`)
        diversity, format, calibration    see `_diversity`, `_format`, `_calibration`

    Samples that could not be scored are left out: a prompt has n <= N, and takes part in what needs
    no more than n.

    Args:
      extract: text -> the answer in it, None where there is none; None where nobody can say.
      prompts_per_step: P of the step that live groups and tokens are told of.
      level: of every interval.
    """
    scored = np.isfinite(answers.scores)
    right = scored & (answers.scores > SUCCESS)
    correct, samples = (jnp.asarray(what.sum(1), jnp.int32) for what in (right, scored))
    lengths = answers.mask.sum(-1)
    tokens = [jnp.asarray((lengths * of).sum(1), jnp.float32) for of in (right, scored & ~right)]
    width = answers.scores.shape[1]
    sizes = tuple(size for size in GROUP_SIZES if size <= width)
    groups = jax.device_get(_groups(sizes, correct, samples, *tokens))
    powers = tuple(2**power for power in range(20) if 2**power <= width)
    passes = jax.device_get(_passes(powers, correct, samples))
    return {
        "success": _success(np.asarray(correct), np.asarray(samples), width, level),
        "pass_at": {k: _mean(value, level) for k, value in passes.items()},
        "degeneracy": {
            size: _degeneracy(group, size, prompts_per_step, level)
            for size, group in groups.items()
        },
        "diversity": _diversity(answers.texts, extract),
        "format": _format(answers, right, scored, extract),
        "calibration": _calibration(answers, right, scored),
    }


@functools.partial(jax.jit, static_argnums=0)
def _passes(powers: tuple[int, ...], correct: Array, samples: Array) -> dict[int, Array]:
    return {k: diagnostics.pass_at_k(correct, samples, k) for k in powers}


@functools.partial(jax.jit, static_argnums=0)
def _groups(
    sizes: tuple[int, ...], correct: Array, samples: Array, right: Array, wrong: Array
) -> dict[int, dict[str, Array]]:
    """G -> what is known of groups of that size, numbers and [P]."""
    found = {}
    for size in sizes:
        measured, iid, gap = diagnostics.jensen_gap(correct, samples, size)
        shares = group_signal.group_shares(correct, samples, size)
        found[size] = {
            "measured": measured,
            "iid": iid,
            "gap": gap,
            "influence": group_signal.gap_influence(correct, samples, size),
            "usable": samples >= size,
            "all_fail": shares.all_fail,
            "all_pass": shares.all_pass,
            "mixed": shares.mixed,
            "tokens": group_signal.live_tokens(correct, samples, right, wrong, size),
            "lucky": group_signal.lucky_share(correct, samples, size),
        }
    return found


def _degeneracy(group: dict[str, Any], size: int, prompts: int, level: float) -> dict[str, Any]:
    gap, influence = float(group["gap"]), group["influence"][group["usable"]]
    low, high = intervals.studentised(gap, influence, level)
    share = {name: _nan_mean(group[name]) for name in ("all_fail", "all_pass", "mixed", "tokens")}
    return {
        "measured": float(group["measured"]),
        "iid": float(group["iid"]),
        "gap": gap,
        # Prompts that differ only make groups flat: an interval below 0 has seen no flat group
        # where a few were to be expected.
        "ci": (low, max(high, 0.0)),
        "all_fail": share["all_fail"],
        "all_pass": share["all_pass"],
        "live_groups": prompts * share["mixed"],
        "live_tokens": prompts * share["tokens"],
        f"live_groups_per_{PER}_samples": PER / size * share["mixed"],
        "lucky": float(group["lucky"]),
    }


def _success(correct: np.ndarray, samples: np.ndarray, width: int, level: float) -> dict[str, Any]:
    known = samples > 0
    correct, samples = correct[known], samples[known]
    rate = correct / samples
    # Where some samples are not scored, to the nearest of N; the ends hold none but themselves.
    place = np.clip(np.rint(rate * width), 1, width - 1)
    place = np.where(correct == 0, 0, np.where(correct == samples, width, place)).astype(int)
    mean = _mean(rate, level)
    return {
        "rate": mean["value"],
        "ci": mean["ci"],
        "at_zero": _nan_mean(correct == 0),
        "at_one": _nan_mean(correct == samples),
        "histogram": np.bincount(place, minlength=width + 1),
        "unscored": float(1 - samples.sum() / (width * len(known))),
    }


def _mean(values: np.ndarray, level: float) -> dict[str, Any]:
    """The mean over prompts and its interval; prompts of which nothing is known are NaN."""
    values = np.asarray(values, float)
    values = values[np.isfinite(values)]
    value = _nan_mean(values)
    return {"value": value, "ci": intervals.studentised(value, values - value, level, (0.0, 1.0))}


def _nan_mean(values: Any) -> float:
    values = np.asarray(values, float)
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else float("nan")


def _diversity(texts: Sequence[Sequence[str]], extract: Extract | None) -> dict[str, float]:
    """How much the samples of a prompt differ, mean over prompts.

    distinct_completions, distinct_answers   different ones among the N
    same_completion, same_answer             probability that two samples agree, which does not
                                             depend on N: sum_a m_a (m_a - 1) / (N (N - 1))
    """
    found = _distinct("completion", texts)
    if extract is not None:
        answered = [
            [answer for text in row if (answer := extract(text)) is not None] for row in texts
        ]
        found |= _distinct("answer", answered)
    return found


def _distinct(name: str, rows: Sequence[Sequence[Hashable]]) -> dict[str, float]:
    counts = [np.array(list(Counter(row).values())) for row in rows]
    pairs = [
        (many * (many - 1)).sum() / (many.sum() * (many.sum() - 1))
        for many in counts
        if many.sum() > 1
    ]
    return {
        f"distinct_{name}s": _nan_mean([len(many) for many in counts]),
        f"same_{name}": _nan_mean(pairs),
    }


def _format(
    answers: Answers, right: np.ndarray, scored: np.ndarray, extract: Extract | None
) -> dict[str, float]:
    """Shares of samples, and their mean lengths in tokens.

    cut       at the length limit              blank   nothing but white space
    tags      <think>...</think><answer>...</answer> and nothing else, as the reward `format`
    answered  an answer can be read; where somebody can say
    """
    texts = [text for row in answers.texts for text in row]
    lengths = answers.mask.sum(-1)
    found = {
        "cut": float(answers.truncated.mean()),
        "blank": _nan_mean([not text.strip() for text in texts]),
        "tags": _nan_mean(has_format(texts)),
    }
    if extract is not None:
        found["answered"] = _nan_mean([extract(text) is not None for text in texts])
    return found | {
        "mean_tokens": float(lengths.mean()),
        "mean_tokens_right": _nan_mean(lengths[right]),
        "mean_tokens_wrong": _nan_mean(lengths[scored & ~right]),
    }


def _calibration(
    answers: Answers, right: np.ndarray, scored: np.ndarray
) -> dict[str, float] | None:
    """How good stated confidences are, over the samples that state one; None where none does.

    stated            share of samples with a confidence (`rewards.stated_confidence`)
    mean_confidence, brier, ece, auroc    see `jaxgrpo.calibration`
    """
    said = [stated_confidence(text) for row in answers.texts for text in row]
    known = np.array([one is not None for one in said])
    mask = known & scored.ravel()
    if not mask.any():
        return None
    confidence = np.array([0.0 if one is None else one for one in said])
    given = jnp.asarray(confidence, jnp.float32), jnp.asarray(right.ravel()), jnp.asarray(mask)
    measures = {
        name: float(getattr(calibration, name)(*given)) for name in ("brier", "ece", "auroc")
    }
    stated = {"stated": _nan_mean(known), "mean_confidence": _nan_mean(confidence[mask])}
    return stated | measures
