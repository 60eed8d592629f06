"""Asks a model before and after training: accuracy, samples, and whether groups carry a signal."""

from pathlib import Path

import jaxgrpo as jg
from jaxgrpo import tasks
from jaxgrpo.config.tables import RolloutTable

SIZES: RolloutTable = {"temperature": 1.0, "max_completion_tokens": 32}


def exactly(completions: list[str], answer: list[str]) -> list[bool]:
    return [text.strip() == right for text, right in zip(completions, answer, strict=True)]


def compare_on_rows(base: str, trained: str | Path) -> dict[str, tuple[float, float]]:
    rows = tasks.load("task:arithmetic:test", count=64)
    before = jg.evaluate(base, data=rows, scorer=exactly, samples=8)
    after = jg.evaluate(trained, data=rows, scorer=exactly, samples=8, rollout={"top_k": 20})
    return {name: (value, after[name]) for name, value in before.items()}


def what_it_writes(model: str) -> list[str]:
    chat = [{"role": "user", "content": "What is 17+25?"}]
    rows = jg.sample(model, [chat, "17+25="], samples=4, temperature=0.7, max_tokens=64)
    texts: list[str] = [row["completion"] for row in rows if not row["truncated"]]
    return texts


def is_worth_training(model: str) -> bool:
    try:
        probed = jg.probe(
            model,
            data="task:arithmetic:train",
            reward="arithmetic",
            samples=16,
            prompts=64,
            rollout=SIZES,
            mesh={"platform": "cpu"},
        )
    except jg.InputError as error:
        print(error)
        return False
    return not probed["advice"]


def main(base: str, trained: Path) -> None:
    if is_worth_training(base):
        print(compare_on_rows(base, trained), what_it_writes(base))
