"""How completions of a prompt differ: tokens, answers, formats, stated confidences."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxgrpo.config.evaluating import OTHER_FORMAT
from jaxgrpo.evaluation.voting import auroc, brier, ece
from jaxgrpo.rewards import stated_confidence

SHARE = "eval/format/"
"""What opens the names of formats in metrics.jsonl."""

COLLAPSED = 0.9
"""The share of one format from which on the others count as lost; ours."""

MEASURES = (brier, ece, auroc)
STATED = ("confidence/stated", "confidence/mean", *(measure.__name__ for measure in MEASURES))

Texts = Sequence[Sequence[str]]
"""[N][n] completions of N prompts"""


def completion_keys(tokens: np.ndarray, mask: np.ndarray) -> list[list[bytes]]:
    """[N][n], equal where two completions have the same tokens, [N, n, T]."""
    return [[sample.tobytes() for sample in row] for row in np.where(mask, tokens, -1)]


def distinct(values: Sequence[Sequence[Hashable]]) -> float:
    """The mean over prompts of how many different values its samples have; None is none.

    >>> distinct([["7", "8", "7", None], ["1", "1", "1", "1"]])
    1.5
    """
    return float(np.mean([len(set(row) - {None}) for row in values]))


def find_format(text: str, formats: Mapping[str, str]) -> str:
    """The first named format whose regular expression is found in the text; else "other".

    `.` matches line ends too, and nothing is anchored: use ^ and $ for the text's two ends.

    >>> forms = {"code": "```python", "box": r"boxed[{]"}
    >>> [find_format(text, forms) for text in ("```python", "so boxed{7}", "7")]
    ['code', 'box', 'other']
    """
    fit = (name for name, pattern in formats.items() if re.search(pattern, text, re.DOTALL))
    return next(fit, OTHER_FORMAT)


def find_collapse(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The first evaluation in which one format has COLLAPSED of the samples: its step and the
    format; None: none has. A run that begins so has not collapsed.

    Args:
      lines: of metrics.jsonl.

    Source: Echo Chamber, arXiv 2504.07912, where policies settle on one format of their base.

    >>> find_collapse([{"step": 0, "eval/format/code": 0.6}, {"step": 9, "eval/format/code": 0.95}])
    {'step': 9, 'format': 'code'}
    """
    for line in lines:
        shares = {
            name.removeprefix(SHARE): value
            for name, value in line.items()
            if name.startswith(SHARE) and not name.endswith("/accuracy")
            if isinstance(value, (int, float))
        }
        if shares and max(shares.values()) >= COLLAPSED:
            name = max(shares, key=shares.__getitem__)
            return {"step": line["step"], "format": name} if line["step"] else None
    return None


def format_metrics(
    texts: Texts,
    success: np.ndarray,
    formats: Mapping[str, str],
    scored: np.ndarray | None = None,
) -> dict[str, float]:
    """How completions are written, by named formats.

        format/NAME            s: the share of completions in that format, "other" among them
        format/NAME/accuracy   the share of these that are right; absent if there are none
        format_entropy         - sum s log s, in nats: 0 if one format is left
        format_diversity       the chance that two samples of a prompt differ in format, unbiased

    Entropy that falls with diversity is a collapse within prompts; diversity that falls alone, a
    format for each kind of prompt. Without a second sample there is no diversity.

    Args:
      formats: name -> regular expression, as `find_format` takes them.
      scored: which samples an accuracy counts; None: all, and what could not be scored is wrong.

    Shapes: texts [N][n], success and scored [N, n].
    Source: Zhao et al. 2025 (Echo Chamber), arXiv 2504.07912, for shares, tagged in a fixed order.
    """
    tags = np.array([[find_format(text, formats) for text in row] for row in texts])
    count, samples = tags.shape
    metrics: dict[str, float] = {}
    entropy, alike = 0.0, np.zeros(count)
    for name in (*formats, OTHER_FORMAT):
        has_format = tags == name
        share = float(has_format.mean())
        metrics[f"format/{name}"] = share
        judged = success[has_format if scored is None else has_format & scored]
        if judged.size:
            metrics[f"format/{name}/accuracy"] = float(judged.mean())
        if share:
            entropy -= share * np.log(share)
        number = has_format.sum(1)
        alike += number * (number - 1)
    metrics["format_entropy"] = float(entropy)
    if samples > 1:
        metrics["format_diversity"] = float(1 - (alike / (samples * (samples - 1))).mean())
    return metrics


def stated_metrics(texts: Texts, success: np.ndarray, scored: np.ndarray) -> dict[str, float]:
    """How good the confidences are that completions state; {} if none states one.

        confidence/stated   the share of completions that state one, as `stated_confidence` reads it
        confidence/mean     the mean of these
        brier, ece, auroc   as in `jaxgrpo.evaluation.voting`, over those that could be scored

    Shapes: texts [N][n], success and scored [N, n].
    """
    stated_values = [stated_confidence(text) for row in texts for text in row]
    has_confidence = np.array([value is not None for value in stated_values])
    if not has_confidence.any():
        return {}
    confidence = np.array([value or 0.0 for value in stated_values], np.float32)
    mask = has_confidence & scored.ravel()
    arrays = jnp.asarray(confidence), jnp.asarray(success.ravel()), jnp.asarray(mask)
    shares = has_confidence.mean(), confidence[has_confidence].mean()
    values = *shares, *(measure(*arrays) for measure in MEASURES)
    return dict(zip(STATED, map(float, values), strict=True))


def absent_metrics(formats: Iterable[str]) -> tuple[str, ...]:
    """The metrics that an evaluation lacks where no sample has a format, or states a confidence.

    Args:
      formats: names of `eval.formats`.

    >>> absent_metrics(["box"])[:3]
    ('format/box/accuracy', 'format/other/accuracy', 'confidence/stated')
    """
    names = [*formats]
    names += [OTHER_FORMAT] if names else []
    return (*(f"format/{name}/accuracy" for name in names), *STATED)
