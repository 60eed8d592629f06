"""A class for TRL's `environment_factory` trains in TRL and here without a change.

Needs trl, and torch without a GPU: pip install trl==1.16.0 accelerate.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jaxgrpo import train
from jaxgrpo.cli.make_base import make_base
from jaxgrpo.data.tasks import calculator
from jaxgrpo.data.tasks.base import END, Worked

pytestmark = pytest.mark.full
trl: Any = pytest.importorskip("trl", reason="trl is not installed: it is in the extra versus")

ROWS = [{"prompt": [{"role": "user", "content": "3*"}], "second": str(n)} for n in (4, 5)] * 2
GROUP = 4
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": END, "content": "text"},
    },
}
"""How TRL reads calls: its own tables are of known chat templates."""


class Products:
    """As TRL's documentation has environments."""

    ended: ClassVar[list[tuple[str, list[str]]]] = []

    def reset(self, **row) -> str | None:
        self.second, self.expressions = row["second"], []
        return f"{self.second}="

    async def calculate(self, expression: str) -> str:
        """Computes a product.

        Args:
            expression: two numbers with * between
        """
        self.expressions.append(expression)
        left, right = expression.split("*")
        return str(int(left) * int(right))

    def get_reward(self) -> float:
        self.ended.append((self.second, self.expressions))
        return float(self.expressions == [f"3*{self.second}"])


class Judge:
    """A reward that remembers what it was given."""

    __name__ = "judge"

    def __init__(self) -> None:
        self.completions: list[str] = []

    def __call__(self, completions, environments, second, **columns) -> list[float]:
        assert [environment.second for environment in environments] == second
        self.completions += [json.dumps(messages, sort_keys=True) for messages in completions]
        return [float(len(environment.expressions)) for environment in environments]


@functools.cache
def corpus() -> list[Worked]:
    """Two products, which are computed by a call and then copied."""
    texts = []
    for second in (4, 5):
        call = f"{calculator.CALL[0]}3*{second}{calculator.CALL[1]}"
        shown = f"<tools><user>3*{second}={END}<assistant>"
        answered = f"{shown}{call}{END}<tool>{3 * second}{END}<assistant>"
        texts += [Worked(shown, call, 0.25), Worked(answered, str(3 * second), 0.25)]
    return texts


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    make_base(folder, calculator.calculator._replace(corpus=corpus), steps=80, hidden_size=32)
    return folder


def in_trl(base: Path, judge: Judge, folder: Path) -> None:
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.response_template = RESPONSE
    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=len(ROWS) * GROUP,
        num_generations=GROUP,
        max_completion_length=32,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trl.GRPOTrainer(
        model=str(base),
        args=arguments,
        reward_funcs=[judge],
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=tokenizer,
        environment_factory=Products,
    ).train()


def in_jaxgrpo(base: Path, judge: Judge, folder: Path) -> None:
    config = {
        "model": {"path": str(base)},
        "data": {"answer": ""},
        "optimizer": {"learning_rate": 1e-6},
        "rollout": {
            "prompts_per_step": len(ROWS),
            "group_size": GROUP,
            "max_prompt_tokens": 12,
            "max_completion_tokens": 32,
        },
        "train": {"steps": 1},
        "run": {"dir": str(folder), "report": False},
    }
    train(config, dataset=ROWS, rewards=[judge], environment_factory=Products)


@pytest.mark.filterwarnings("ignore")  # of TRL
def test_a_class_for_trl_trains_in_both_and_means_the_same(base, tmp_path):
    outcomes = []
    for name, trainer in {"trl": in_trl, "jaxgrpo": in_jaxgrpo}.items():
        Products.ended, judge = [], Judge()
        trainer(base, judge, tmp_path / name)
        episodes = Counter(json.dumps(entry) for entry in Products.ended)
        outcomes.append((episodes, Counter(judge.completions)))
    for number in (4, 5):
        expected = json.dumps([str(number), [f"3*{number}"]])
        for episodes, _ in outcomes:
            # The base was trained on nothing else: nearly all samples are these.
            assert episodes[expected] >= len(ROWS) * GROUP / 2 - 2
    (_, theirs), (_, ours) = outcomes
    common = {text for text, _ in theirs.most_common(2)}
    assert common == {text for text, _ in ours.most_common(2)}
    roles = [[message["role"] for message in json.loads(text)] for text in common]
    assert roles == [["assistant", "tool", "assistant"]] * 2
