"""A reward without gold answers: samples of a prompt vote, and those that agree with the most earn.

Agreement is not truth. A policy can earn all of it by always giving one wrong answer: evaluate on
data with gold answers, and read the warning "consensus drifts".
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jaxgrpo.core.errors import find
from jaxgrpo.data.tasks import tasks
from jaxgrpo.rewards.builtin import completion_text, final_number
from jaxgrpo.rewards.reasoning import read_answer

AGREEMENT = "consensus/agreement"
"""The metric: the mean over prompts of the majority's share among the samples."""


def _voting(read: Callable[[str], str]) -> Callable[[str], str | None]:
    """A task's way to read answers, for votes: "", where a completion has none, does not vote."""

    @functools.wraps(read)
    def read_vote(completion: str) -> str | None:
        return read(completion) or None

    return read_vote


EXTRACTORS: dict[str, Callable[[str], Hashable]] = {
    **{task.name: _voting(task.extract_answer) for task in tasks.values()},
    "gsm8k_answer": final_number,
    "reasoning_gym": read_answer,
}
"""The answer that a completion gives, for votes: of the rewards that judge an answer. None does not
vote."""


def consensus(
    completions: Sequence[Any],
    group_ids: Sequence[int],
    extract: str = "gsm8k_answer",
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float]:
    """1.0 if the answer is the most frequent one among the samples of its prompt, else 0.0.

    Of answers given equally often the one that came first wins. A completion without an answer
    neither votes nor is paid.

    Args:
      completions: texts, or messages.
      group_ids: which prompt each is a sample of.
      extract: whose way to read an answer is used, a name in EXTRACTORS.

    Metrics: consensus/agreement.
    Source: TTRL, Zuo et al. 2025, arXiv 2504.16084, which votes over 64 samples and trains on 32
    of them: the recipe `ttrl`.

    >>> consensus(["so 4", "4", "5", "none"], group_ids=[0, 0, 0, 0])
    [1.0, 1.0, 0.0, 0.0]
    """
    del columns
    read = find("extract", extract, EXTRACTORS)
    answers = [read(completion_text(completion)) for completion in completions]
    votes: dict[int, Counter[Hashable]] = {group: Counter() for group in group_ids}
    for group, answer in zip(group_ids, answers, strict=True):
        if answer is not None:
            votes[group][answer] += 1
    # Counters keep the order of first votes, and most_common is stable.
    majority = {group: count.most_common(1) for group, count in votes.items()}
    sizes = Counter(group_ids)
    if log_metric is not None and votes:
        shares = [sum(n for _, n in majority[group]) / size for group, size in sizes.items()]
        log_metric(AGREEMENT, sum(shares) / len(shares))
    winners = {group: best[0][0] for group, best in majority.items() if best}
    return [
        float(answer is not None and winners[group] == answer)
        for group, answer in zip(group_ids, answers, strict=True)
    ]


def check_extract(extract: Any = "gsm8k_answer") -> None:
    """Raises: InputError on an unknown way to read answers, with the nearest name."""
    find("extract", extract, EXTRACTORS)
