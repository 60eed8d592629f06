"""The numbers of a probe, from judged samples: would groups of each size carry signal?

A group of G is a draw of G of a prompt's n samples, none twice; every expectation below is exact
over all such draws, and so unbiased for groups that a run would sample.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxgrpo.evaluation import diversity, intervals
from jaxgrpo.evaluation.evaluate import Answers, Questions, extract_answers, powers
from jaxgrpo.evaluation.voting import FinalAnswers
from jaxgrpo.rewards.builtin import has_format
from jaxgrpo.update import diagnostics
from jaxgrpo.update.diagnostics import drawn_alike, flat_share

GROUP_SIZES = (2, 4, 8, 16)
PER = 1000  # samples: live groups are also reported per so many, at equal cost
HARD = 0.125  # a success rate below it makes a prompt hard: the low end of `mask_difficulty_band`


def measure(
    answers: Answers,
    questions: Questions,
    *,
    prompts_per_step: int,
    level: float = intervals.LEVEL,
) -> dict[str, Any]:
    """All numbers of a probe, in the structure of its JSON (which has null for NaN).

        success      rate and its interval; at_zero, at_one: shares of prompts whose samples all
                     fail or all succeed; histogram: prompts by successes, 0 to N; unscored
        pass_at      k -> value and ci, for k = 1, 2, 4, ... up to N
        degeneracy   G -> measured, iid, gap and ci of the gap (`diagnostics.jensen_gap`);
                     all_fail and all_pass; of a step, live_groups and live_tokens;
                     live_groups_per_1000_samples; lucky (`lucky_share`)
        diversity, format, agreement    see the functions of these names
        calibration  stated, mean, brier, ece, auroc of `diversity.stated_metrics`; None if no
                     completion states a confidence

    Samples that could not be scored are left out: a prompt has n <= N, and takes part in what needs
    no more than n.

    Args:
      answers: with "logp" of a second pass, for the agreement.
      questions: only `extract` and `formats` are used.
      prompts_per_step: P of a step, for live groups and tokens per step.
      level: of every interval.
    """
    final_answers = extract_answers(answers, questions)
    right, scored = answers.right, answers.scored
    correct, samples = (jnp.asarray(mask.sum(1), jnp.int32) for mask in (right, scored))
    length = answers.mask.sum(-1)
    tokens = [jnp.asarray((length * mask).sum(1), jnp.float32) for mask in (right, scored & ~right)]
    width = answers.scores.shape[1]
    sizes = tuple(size for size in GROUP_SIZES if size <= width)
    groups = jax.device_get(_groups(sizes, correct, samples, *tokens))
    passes = jax.device_get(_passes(powers(2, width), correct, samples))
    stated = diversity.stated_metrics(answers.texts, right, scored).items()
    return {
        "success": _success(np.asarray(correct), np.asarray(samples), width, level),
        "pass_at": {k: _mean(value, level) for k, value in passes.items()},
        "degeneracy": {
            size: _degeneracy(group, size, prompts_per_step, level)
            for size, group in groups.items()
        },
        "diversity": _diversity(answers, final_answers),
        "format": _format(answers, final_answers, questions.formats),
        "calibration": {name.removeprefix("confidence/"): value for name, value in stated} or None,
        "agreement": _agreement(answers),
    }


@functools.partial(jax.jit, static_argnums=0)
def _passes(sizes: tuple[int, ...], correct: Array, samples: Array) -> dict[int, Array]:
    return {k: diagnostics.pass_at_k(correct, samples, k) for k in sizes}


@functools.partial(jax.jit, static_argnums=0)
def _groups(
    sizes: tuple[int, ...], correct: Array, samples: Array, right: Array, wrong: Array
) -> dict[int, dict[str, Array]]:
    """G -> what is known of groups of that size, numbers and [P]."""
    groups = {}
    for size in sizes:
        gap = diagnostics.jensen_gap(correct, samples, size)
        groups[size] = dict(zip(("measured", "iid", "gap"), gap, strict=True)) | {
            **group_shares(correct, samples, size)._asdict(),
            "influence": gap_influence(correct, samples, size),
            "usable": samples >= size,
            "tokens": live_tokens(correct, samples, right, wrong, size),
            "lucky": lucky_share(correct, samples, size),
        }
    return groups


def _degeneracy(group: dict[str, Any], size: int, prompts: int, level: float) -> dict[str, Any]:
    mean = {name: intervals.finite_mean(value) for name, value in group.items()}
    influence = group["influence"][group["usable"]]
    low, high = intervals.studentised(mean["gap"], influence, level)
    return {
        **{name: mean[name] for name in ("measured", "iid", "gap")},
        # Prompts that differ only make groups flat: an interval below 0 has seen no flat group
        # although a few were to be expected.
        "ci": (low, max(high, 0.0)),
        **{name: mean[name] for name in ("all_fail", "all_pass")},
        "live_groups": prompts * mean["mixed"],
        "live_tokens": prompts * mean["tokens"],
        f"live_groups_per_{PER}_samples": PER / size * mean["mixed"],
        "lucky": mean["lucky"],
    }


def _success(correct: np.ndarray, samples: np.ndarray, width: int, level: float) -> dict[str, Any]:
    is_scored = samples > 0
    correct, samples = correct[is_scored], samples[is_scored]
    rate = correct / samples
    # Where some samples are not scored, to the nearest of N; the ends hold none but themselves.
    place = np.clip(np.rint(rate * width), 1, width - 1)
    place = np.where(correct == 0, 0, np.where(correct == samples, width, place)).astype(int)
    mean = _mean(rate, level)
    return {
        "rate": mean["value"],
        "ci": mean["ci"],
        "at_zero": intervals.finite_mean(correct == 0),
        "at_one": intervals.finite_mean(correct == samples),
        "histogram": np.bincount(place, minlength=width + 1),
        "unscored": float(1 - samples.sum() / (width * len(is_scored))),
    }


def _mean(values: np.ndarray, level: float) -> dict[str, Any]:
    """The mean over prompts of shares, and its interval; NaN: nothing is known of a prompt."""
    values = np.asarray(values, float)
    values = values[np.isfinite(values)]
    return {"value": intervals.finite_mean(values), "ci": intervals.mean_of_shares(values, level)}


def _diversity(answers: Answers, final_answers: FinalAnswers | None) -> dict[str, float]:
    """How much the samples of a prompt differ, mean over prompts.

    distinct_completions, distinct_answers   different ones among the N
    same_completion, same_answer             probability that two samples agree, which does not
                                             depend on N: sum_a m_a (m_a - 1) / (N (N - 1))
    """
    rows = {
        "completion": diversity.completion_keys(answers.tokens, answers.mask),
        "answer": final_answers,
    }
    metrics = {}
    for name, values in rows.items():
        if values is not None:
            metrics[f"distinct_{name}s"] = diversity.distinct(values)
            metrics[f"same_{name}"] = intervals.finite_mean([_agreeing(row) for row in values])
    return metrics


def _agreeing(row: Sequence[Hashable]) -> float:
    """The probability that two samples, none twice, have the same value; None is none."""
    counts = np.array(list(Counter(value for value in row if value is not None).values()))
    number = counts.sum()
    return (counts * (counts - 1)).sum() / (number * (number - 1)) if number > 1 else float("nan")


def _format(
    answers: Answers, final_answers: FinalAnswers | None, formats: Mapping[str, str]
) -> dict[str, Any]:
    """Shares of samples, and their mean lengths in tokens.

    cut       at the length limit              blank   nothing but white space
    tags      <think>...</think><answer>...</answer> and nothing else, as the reward `format`
    answered  an answer can be read; only if there is a function that reads answers
    formats   of eval.formats, as `diversity.format_metrics`
    """
    texts = [text for row in answers.texts for text in row]
    lengths = answers.mask.sum(-1)
    metrics: dict[str, Any] = {
        "cut": float(answers.truncated.mean()),
        "blank": intervals.finite_mean([not text.strip() for text in texts]),
        "tags": intervals.finite_mean(has_format(texts)),
    }
    if final_answers is not None:
        metrics["answered"] = intervals.finite_mean(
            [answer is not None for row in final_answers for answer in row]
        )
    if formats:
        judged = answers.right, formats, answers.scored
        metrics["formats"] = diversity.format_metrics(answers.texts, *judged)
    return metrics | {
        "mean_tokens": float(lengths.mean()),
        "mean_tokens_right": intervals.finite_mean(lengths[answers.right]),
        "mean_tokens_wrong": intervals.finite_mean(lengths[answers.scored & ~answers.right]),
    }


def _agreement(answers: Answers) -> dict[str, float]:
    """How far the sampler's log-probs are from those that training recomputes, in nats per token.

        mean, max   of |trainer - sampler| over sampled tokens
        kl          mean of exp(d) - 1 - d, d = trainer - sampler: KL(sampler || trainer) by k3
        tokens      how many there were

    Both have the same weights and texts: they differ by their programs' rounding, and by
    rollout.top_k and top_p, which the trainer does not apply.
    """
    trainer, sampler = answers.rescored["logp"].astype(float), answers.logp.astype(float)
    difference = (trainer - sampler)[answers.mask]
    number = max(1, len(difference))
    return {
        "mean": float(np.abs(difference).sum() / number),
        "max": float(np.abs(difference).max(initial=0)),
        "kl": float((np.expm1(difference) - difference).sum() / number),
        "tokens": len(difference),
    }


class GroupShares(NamedTuple):
    """Per prompt, the probabilities of the kinds of group; NaN where n < G. Each [P]."""

    all_fail: Array
    all_pass: Array
    mixed: Array
    one_success: Array  # a part of mixed, but for G = 1


def group_shares(
    correct: Int[Array, "P"], samples: Int[Array, "P"], group_size: int
) -> GroupShares:
    """How often a group of G all fails, all passes, is mixed, or holds a single success.

        all_fail     C(n - c, G) / C(n, G)
        all_pass     C(c, G) / C(n, G)
        one_success  c C(n - c, G - 1) / C(n, G) = G c / n C(n - c, G - 1) / C(n - 1, G - 1)

    Args:
      correct, samples: successes c and samples n per prompt.
      group_size: G, static, at least 1.
    """
    failures = samples - correct
    all_fail, all_pass = (drawn_alike(kind, samples, group_size) for kind in (failures, correct))
    rate = _rate(correct, samples)
    if group_size == 1:
        one_success = jnp.where(samples >= 1, rate, jnp.nan)
    else:
        one_success = group_size * rate * drawn_alike(failures, samples - 1, group_size - 1)
    return GroupShares(all_fail, all_pass, 1 - all_fail - all_pass, one_success)


def live_tokens(
    correct: Int[Array, "P"],
    samples: Int[Array, "P"],
    right_tokens: Float[Array, "P"],
    wrong_tokens: Float[Array, "P"],
    group_size: int,
) -> Float[Array, "P"]:
    """Expected tokens of a group of G that lie in a mixed group: a flat one counts 0.

        G (c/n - all_pass) (mean length of successes) + G ((n-c)/n - all_fail) (that of failures)

    since a success is in a mixed group unless its group all passes.

    Args:
      right_tokens, wrong_tokens: the sums of tokens over a prompt's successes and failures.
    """
    shares = group_shares(correct, samples, group_size)
    rate = _rate(correct, samples)
    right = (rate - shares.all_pass) * _per_sample(right_tokens, correct)
    wrong = (1 - rate - shares.all_fail) * _per_sample(wrong_tokens, samples - correct)
    return group_size * (right + wrong)


def lucky_share(
    correct: Int[Array, "P"], samples: Int[Array, "P"], group_size: int
) -> Float[Array, ""]:
    """Of mixed groups, the share that are a hard prompt's with a single success.

        sum_{x: c_x / n_x < HARD} one_success_x / sum_x mixed_x

    Such a success, the right answer by whatever way, is all that its group learns from. The rate is
    that of the same samples, so a prompt must have more than 1 / HARD of them to be hard and yet
    succeed once.

    Returns: NaN if no prompt has more than 1 / HARD samples and at least G, or none is mixed.
    Source: the rare accidental success as exemplar, arXiv 2605.28388; the metric is ours.
    """
    usable = (samples >= group_size) & (samples > int(1 / HARD))
    shares = group_shares(correct, samples, group_size)
    hard = usable & (_rate(correct, samples) < HARD)
    lone_successes = jnp.where(hard, shares.one_success, 0).sum()
    mixed = jnp.where(usable, shares.mixed, 0).sum()
    return jnp.where(mixed > 0, lone_successes / jnp.where(mixed > 0, mixed, 1), jnp.nan)


def gap_influence(
    correct: Int[Array, "P"], samples: Int[Array, "P"], group_size: int
) -> Float[Array, "P"]:
    """What each prompt adds to the error of `diagnostics.jensen_gap`, to first order.

        a_x = f_x - mean f - G (r_x - p) (p^(G-1) - (1 - p)^(G-1))

    with f_x the prompt's unbiased share of flat groups, r_x = c_x / n_x and p their mean. The gap
    less its expectation is the mean of a_x, up to terms of order 1 / P: so the deviation of a_x
    over sqrt(P) is its standard error. Drawing prompts again and computing the gap of each draw is
    no substitute: a prompt drawn twice then counts as two that are independent and agree.

    Returns: 0 for a prompt that has fewer than G samples, which the gap leaves out.
    Source: Hoeffding's projection of a U-statistic, Ann. Math. Statist. 19 (1948).
    """
    usable = samples >= group_size
    flat = jnp.where(usable, flat_share(correct, samples, group_size), 0)
    number = jnp.maximum(usable.sum(), 1).astype(flat.dtype)
    rate = jnp.where(usable, _rate(correct, samples), 0)
    p = rate.sum() / number
    slope = group_size * (p ** (group_size - 1) - (1 - p) ** (group_size - 1))
    return jnp.where(usable, flat - flat.sum() / number - slope * (rate - p), 0)


def _rate(correct: Array, samples: Array) -> Array:
    dtype = jnp.result_type(float)
    return correct.astype(dtype) / jnp.maximum(samples, 1).astype(dtype)


def _per_sample(total: Array, count: Array) -> Array:
    return total / jnp.maximum(count, 1).astype(total.dtype)
