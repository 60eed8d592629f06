"""The same step in plain PyTorch: `python -m benchmarks.versus.torch_step FOLDER`.

`generate` of transformers, advantages, the clipped loss over all tokens of the step, AdamW: for
machines without TRL, whose loss and gradients it has (proof.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.versus.work import THREADS, Teller, Work, generation

CLIP = 0.2  # of the ratio, to both sides
EPS = 1e-4  # beside the deviation of a group


class Batch(NamedTuple):
    """N samples of prompts padded on the left and completions padded on the right."""

    prompt: Tensor  # [N, S] token ids
    prompt_mask: Tensor  # [N, S]
    completion: Tensor  # [N, T]
    completion_mask: Tensor  # [N, T]

    def part(self, start: int, size: int) -> Batch:
        return Batch(*(array[start : start + size] for array in self))


def advantages(rewards: Tensor) -> Tensor:
    """[P, G] -> [P, G]: less the mean of the group, over its deviation."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + EPS)


def log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """[N, T], of the completions' tokens."""
    tokens = torch.cat([batch.prompt, batch.completion], 1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], 1)
    length = batch.completion.shape[1]
    logits = model(tokens, attention_mask=mask, logits_to_keep=length + 1).logits[:, :-1]
    logp = -nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.completion.flatten(), reduction="none"
    )
    return logp.view(batch.completion.shape)


def clipped_loss(
    logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, total: Tensor
) -> Tensor:
    """-sum(min(ratio A, clip(ratio) A)) over tokens, divided by the tokens of the whole step."""
    ratio = (logp - old).exp()
    advantage = advantage[:, None]
    gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -(gain * mask).sum() / total


def accumulate(
    model: nn.Module, batch: Batch, advantage: Tensor, micro: int, old: Tensor | None = None
) -> float:
    """Adds the gradient of the step's loss, `micro` samples at a time. Returns the loss.

    Args:
      old: log-probs [N, T] that the ratio is measured from; None: those of this model.
    """
    total, loss = batch.completion_mask.sum(), 0.0
    for start in range(0, len(batch.prompt), micro):
        part = batch.part(start, micro)
        logp = log_probs(model, part)
        old_logp = logp.detach() if old is None else old[start : start + micro]
        part_advantage = advantage[start : start + micro]
        part_loss = clipped_loss(logp, old_logp, part_advantage, part.completion_mask, total)
        part_loss.backward()
        loss += part_loss.item()
    return loss


def make_optimizer(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


class Trainer:
    """The model, its optimizer, and the prompts of a workload."""

    def __init__(self, work: Work) -> None:
        from transformers import AutoTokenizer, Qwen3ForCausalLM

        torch.set_num_threads(THREADS)
        loaded: Any = Qwen3ForCausalLM.from_pretrained(work.model, dtype=work.dtype)
        self.work, self.model = work, loaded.to(work.device).train()
        self.optimizer = make_optimizer(self.model.parameters(), work.learning_rate)
        self.rows = work.rows()
        tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
        texts = [row["prompt"] for row in self.rows for _ in range(work.samples)]
        encoded = tokenizer(texts, padding=True, return_tensors="pt").to(work.device)
        self.prompt, self.prompt_mask = encoded["input_ids"], encoded["attention_mask"]

    def sample(self) -> Batch:
        work = self.work
        settings = generation(work.completion, work.end, work.pad)
        options = {"attention_mask": self.prompt_mask, "generation_config": settings}
        with torch.no_grad():
            tokens = self.model.generate(self.prompt, **options)
        completion = tokens[:, self.prompt.shape[1] :]
        ended = (completion == work.end).cumsum(1) - (completion == work.end).long()
        return Batch(self.prompt, self.prompt_mask, completion, (ended == 0).long())

    def judge(self, batch: Batch, reward: Callable[..., list[float]]) -> Tensor:
        """Advantages [N]."""
        work = self.work
        pairs = zip(batch.completion.tolist(), batch.completion_mask.sum(1).tolist(), strict=True)
        ids = [tokens[:length] for tokens, length in pairs]
        hard = [row["hard"] for row in self.rows for _ in range(work.samples)]
        values = torch.tensor(reward(completion_ids=ids, hard=hard))
        return advantages(values.view(work.prompts, work.samples)).flatten().to(work.device)

    def update(self, batch: Batch, advantage: Tensor) -> None:
        accumulate(self.model, batch, advantage, self.work.micro)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.work.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    work = Work.read(sys.argv[1])
    teller = Teller(work, torch.cuda.max_memory_allocated)
    trainer = Trainer(work)
    while True:
        marks = [time.perf_counter()]
        batch = trainer.sample()
        marks.append(time.perf_counter())
        advantage = trainer.judge(batch, teller.reward)
        marks.append(time.perf_counter())
        trainer.update(batch, advantage)
        teller.stepped({"sample": marks[1] - marks[0], "reward": marks[2] - marks[1], "score": 0.0})


if __name__ == "__main__":
    main()
