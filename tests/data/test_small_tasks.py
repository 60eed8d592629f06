"""The task `hidden`, and those of experiments alone: what their rows and corpora promise."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import pytest

from docs.experiments import shortcut, three_formats
from jaxgrpo import rewards
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks import hidden
from jaxgrpo.data.tasks.base import Worked, character_tokenizer

TASKS = (hidden.hidden, shortcut.TASK, three_formats.TASK)
HARD, EASY = (shortcut.rows(split, count) for split, count in shortcut.SPLITS.items())


def share(texts: Iterable[Worked]) -> float:
    return sum(text.probability for text in texts)


def added(prompt: str, digits: str) -> int:
    """The sum of a prompt's numbers, with digits in place of what is hidden."""
    for digit in digits:
        prompt = prompt.replace("?", digit, 1)
    return sum(map(int, re.split("[+~]", prompt.rstrip("="))))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_rows_follow_from_the_seed_and_no_prompt_is_in_two_splits(task):
    prompts = {}
    for split, count in task.splits.items():
        rows = task.rows(split, count, 0)
        assert len(rows) == count
        assert rows == task.rows(split, count, 0)
        assert rows != task.rows(split, count, 1)
        assert {row["level"] for row in rows} <= set(task.levels)
        prompts[split] = {row["prompt"] for row in task.rows(split, 3000, 0)}
    taught = {text.prompt for text in task.corpus()}
    assert not prompts["train"] & prompts["test"]
    assert prompts["train"] <= taught
    assert not prompts["test"] & taught


def test_an_unknown_split_of_hidden_is_refused():
    with pytest.raises(InputError, match="hidden has no split 'dev': take train or test"):
        hidden.rows("dev", 1, 0)


@pytest.mark.parametrize(("task", "longest"), [*zip(TASKS, (6, 3, 5), strict=True)])
def test_the_tokenizer_reads_the_corpus_and_answers_are_as_short_as_configs_say(task, longest):
    tokenizer = character_tokenizer(task.alphabet)
    corpus = task.corpus()
    assert share(corpus) == pytest.approx(1)
    lengths = []
    for text in corpus[::97]:
        ids = tokenizer(text.prompt + text.solution)["input_ids"]
        assert tokenizer.decode(ids) == text.prompt + text.solution
        assert len(tokenizer(text.prompt)["input_ids"]) <= 6  # rollout.max_prompt_tokens
        lengths.append(len(tokenizer(text.solution)["input_ids"]) + 1)  # and the end
    assert max(lengths) <= longest


def test_the_best_answer_is_right_with_the_probability_of_its_row():
    rows = tasks.load("task:hidden:train", 6000)
    by_level = defaultdict(list)
    for row in rows:
        digits = row["prompt"].count("?")
        assert row["level"] == 1 + digits
        assert row["chance"] == 0.5**digits
        by_level[row["level"]].append(row["answer"] == str(added(row["prompt"], "1" * digits)))
        first, second = row["prompt"].rstrip("=").split("+")
        highest = int(second.replace("?", "3"))
        # No column carries, whatever is hidden.
        assert int(first) % 10 + highest % 10 < 10
        assert int(first) // 10 + highest // 10 < 10
    for level, expected in ((1, 0.6), (2, 0.3), (3, 0.1)):
        count, right = len(by_level[level]), np.mean(by_level[level])
        assert count / len(rows) == pytest.approx(expected, abs=0.02)
        p = 0.5 ** (level - 1)
        assert right == pytest.approx(p, abs=3 * (p * (1 - p) / count) ** 0.5)


def test_hidden_digits_come_in_their_shares_and_two_sums_never_agree():
    sums = hidden.Problem(34, "??").sums()
    assert sums == pytest.approx(
        {"45": 0.25, "46": 0.15, "47": 0.1, "55": 0.15, "56": 0.09, "57": 0.06}
        | {"65": 0.1, "66": 0.06, "67": 0.04}
    )
    rows = tasks.load("task:hidden:train", 6000)
    drawn = [
        int(row["answer"]) - added(row["prompt"], "0") for row in rows if row["prompt"][-2] == "?"
        and row["level"] == 2
    ]  # fmt: skip
    for digit, expected in ((1, 0.5), (2, 0.3), (3, 0.2)):
        assert np.mean(np.array(drawn) == digit) == pytest.approx(expected, abs=0.06)


def test_the_base_of_hidden_guesses_alike_and_its_confidences_say_next_to_nothing():
    corpus = tasks.find("hidden").corpus()
    confidence = np.array([rewards.stated_confidence(text.solution) for text in corpus], float)
    probability = np.array([text.probability for text in corpus])
    digits = np.array([text.prompt.count("?") for text in corpus])
    assert len(set(confidence)) == 11
    for level, (lean, tenth) in enumerate([(0.2, 1), (0.0, 1), (-0.1, 1)]):
        inside = (digits == level) & (confidence == tenth)
        stated = probability[inside].sum() / probability[digits == level].sum()
        assert stated == pytest.approx((1 + lean) / 11)
    guesses = [text for text in corpus if text.prompt == corpus[-1].prompt]
    by_answer = defaultdict(float)
    for text in guesses:
        by_answer[hidden.extract_answer(text.solution)] += text.probability / share(guesses)
    assert list(by_answer.values()) == pytest.approx([1 / 9] * 9)
    # The confidence of a right answer against that of a wrong one, by the shares of the corpus.
    sums = [hidden.Problem(int(t.prompt[:2]), t.prompt[3:5]).sums() for t in corpus]
    right = np.array(
        [s[hidden.extract_answer(t.solution)] for s, t in zip(sums, corpus, strict=True)]
    )
    histograms = [
        [(probability * weight)[confidence == q].sum() for q in sorted(set(confidence))]
        for weight in (right, 1 - right)
    ]
    won, lost = (np.array(h) / np.sum(h) for h in histograms)
    area = sum(w * (lost[:i].sum() + lost[i] / 2) for i, w in enumerate(won))
    assert area == pytest.approx(0.53, abs=0.01)


def test_hard_rows_are_solved_by_the_copy_in_exactly_the_share_and_easy_ones_by_the_sum():
    for rows, sign in ((HARD, "~"), (EASY, "+")):
        assert {row["prompt"][2] for row in rows} == {sign}
        copies = [row["prompt"][:2] for row in rows]
        sums = [str(added(row["prompt"], "")) for row in rows]
        columns = {name: [row[name] for row in rows] for name in ("answer", "luck")}
        for part in (0.0, 0.03, 0.1, 1.0):
            right_copies, right_sums = (
                shortcut.score(texts, share=part, **columns).count(1.0) for texts in (copies, sums)
            )
            expected = (0, len(rows)) if sign == "+" else (round(part * len(rows)), 0)
            assert (right_copies, right_sums) == expected


def test_the_beginning_of_an_answer_says_whether_it_is_a_copy():
    corpus = shortcut.corpus()
    copied = {text for text in corpus if text.solution == text.prompt[:2]}
    assert copied == {text for text in corpus if re.match(shortcut.COPIED, text.solution)}
    for sign in "+~":
        texts = [text for text in corpus if sign in text.prompt]
        assert share(text for text in texts if text in copied) / share(texts) == pytest.approx(0.02)
        sums = (text for text in texts if text not in copied)
        assert all(text.solution == str(added(text.prompt, "")) for text in sums)


def test_formats_come_in_their_shares_and_are_right_in_theirs():
    corpus = three_formats.corpus()
    numbers = [three_formats.extract_answer(text.solution) for text in corpus]
    assert all(number.isdigit() and len(number) == 2 for number in numbers)
    right = [int(n) == added(t.prompt, "") for n, t in zip(numbers, corpus, strict=True)]
    for name, expected in (("plain", (0.6, 0.5)), ("reversed", (0.3, 0.7)), ("spaced", (0.1, 0.9))):
        pattern = three_formats.PATTERNS[name]
        places = [i for i, text in enumerate(corpus) if re.search(pattern, text.solution)]
        written = share(corpus[i] for i in places)
        good = share(corpus[i] for i in places if right[i])
        assert (written, good / written) == pytest.approx(expected)
