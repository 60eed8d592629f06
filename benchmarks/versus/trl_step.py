"""TRL's GRPOTrainer as a contender, set up for speed on a CPU.

    python -m benchmarks.versus.trl_step FOLDER

float32 without autocast, no gradient checkpointing (both are slower here), the whole step in one
batch unless its logits would not fit, no reference model, no files and no reports.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import torch
from transformers import AutoTokenizer, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.versus.work import THREADS, Teller, Work


class Clock:
    """Seconds of the phases of a step; those of a phase within another count for the inner one."""

    def __init__(self) -> None:
        self.seconds = {"sample": 0.0, "reward": 0.0, "score": 0.0}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began, inside = time.perf_counter(), sum(self.seconds.values())
        yield
        spent = time.perf_counter() - began
        self.seconds[phase] += spent - (sum(self.seconds.values()) - inside)

    def take_seconds(self) -> dict[str, float]:
        """The seconds so far; counts again."""
        seconds = self.seconds
        self.seconds = dict.fromkeys(seconds, 0.0)
        return seconds


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer whose phases are timed."""

    clock = Clock()

    def _generate(self, *arguments: Any, **options: Any) -> Any:
        with self.clock("sample"):
            return super()._generate(*arguments, **options)

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Any:
        with self.clock("reward"):
            return super()._calculate_rewards(*arguments, **options)

    def _generate_and_score_completions(self, *arguments: Any, **options: Any) -> Any:
        with self.clock("score"):
            return super()._generate_and_score_completions(*arguments, **options)


class Steps(TrainerCallback):
    """Between two steps: everything from the begin of one to the begin of the next is one step."""

    def __init__(self, teller: Teller, clock: Clock) -> None:
        self.teller, self.clock, self.first = teller, clock, True

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.first:
            self.teller.stepped(self.clock.take_seconds())
        self.first = False


def make_trainer(work: Work, reward: Callable[..., Any], folder: str, **more: Any) -> TimedTrainer:
    """A trainer that takes the steps of a workload."""
    samples = work.prompts * work.samples
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": 10**6,  # it is ended from outside
        "per_device_train_batch_size": work.micro,
        "gradient_accumulation_steps": samples // work.micro,
        "num_generations": work.samples,
        "max_completion_length": work.completion,
        "learning_rate": work.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": work.dtype},
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }
    return TimedTrainer(
        model=str(work.model),
        args=GRPOConfig(**arguments | more),
        reward_funcs=[reward],
        train_dataset=datasets.Dataset.from_list(work.rows()),
        processing_class=AutoTokenizer.from_pretrained(work.model),
    )


def main() -> None:
    work = Work.read(sys.argv[1])
    teller = Teller(work, torch.cuda.max_memory_allocated)
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(work, teller.reward, folder)
        trainer.add_callback(Steps(teller, trainer.clock))
        trainer.train()


if __name__ == "__main__":
    main()
