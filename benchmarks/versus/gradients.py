"""Loss, gradient and an AdamW step of recorded rollouts, by a PyTorch contender.

    python -m benchmarks.versus.gradients trl|torch FOLDER ROLLOUTS.safetensors

Writes NAME.json with the loss, and NAME_gradient.safetensors and NAME_stepped.safetensors with the
arrays of a Hugging Face checkpoint, into FOLDER.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.versus import torch_step
from benchmarks.versus.torch_step import Batch
from benchmarks.versus.work import THREADS, Work

RATE = 1e-3
"""Of the AdamW step. The workload's own would move nothing."""

Arrays = dict[str, Tensor]


def real_tokens(tokens: Tensor, mask: Tensor) -> list[list[int]]:
    """The real tokens of each row."""
    return [row[mask_row].tolist() for row, mask_row in zip(tokens, mask.bool(), strict=True)]


def left(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows padded on the right as rows padded on the left."""
    width = mask.shape[1]
    place = (torch.arange(width) + mask.sum(1, keepdim=True)) % width
    return tokens.long().gather(1, place), mask.gather(1, place)


def by_trl(work: Work, recorded: Arrays) -> tuple[nn.Module, float, torch.optim.Optimizer]:
    """TRL's trainer, whose sampling alone is replaced: what was recorded comes from there."""
    from benchmarks.versus.trl_step import make_trainer

    prompts = real_tokens(recorded["prompt_tokens"], recorded["prompt_mask"])
    prompts = [ids for ids in prompts for _ in range(work.samples)]
    tokens, mask = (recorded[name].flatten(0, 1) for name in ("completion_tokens", "token_mask"))
    completions, rewards = real_tokens(tokens, mask), recorded["rewards.reward"].flatten().tolist()
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = make_trainer(work, lambda **_: rewards, folder, learning_rate=RATE)
    texts = trainer.processing_class.batch_decode(completions)
    sampled = prompts, completions, None, texts, None, {}, None, None
    trainer._generate = lambda _prompts: sampled
    trainer.model.train()
    rows = [row for row in work.rows() for _ in range(work.samples)]
    inputs = trainer._generate_and_score_completions(rows)
    longest = inputs["completion_ids"].shape[1]
    inputs["old_per_token_logps"] = recorded["behavior_logp"].flatten(0, 1)[:, :longest]
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return trainer.model, loss.item(), trainer.create_optimizer()


def by_torch(work: Work, recorded: Arrays) -> tuple[nn.Module, float, torch.optim.Optimizer]:
    """torch_step.py, a few samples at a time."""
    trainer = torch_step.Trainer(work)
    flat = {name: array.flatten(0, 1) for name, array in recorded.items() if array.ndim == 3}
    completion, mask = flat["completion_tokens"].long(), flat["token_mask"].long()
    # In the order of the run, not of the data.
    prompts = left(recorded["prompt_tokens"], recorded["prompt_mask"].long())
    prompt, prompt_mask = (array.repeat_interleave(work.samples, 0) for array in prompts)
    batch = Batch(prompt, prompt_mask, completion, mask)
    advantage = torch_step.advantages(recorded["rewards.reward"]).flatten()
    old = flat["behavior_logp"]
    loss = torch_step.accumulate(trainer.model, batch, advantage, work.samples, old)
    return trainer.model, loss, torch_step.make_optimizer(trainer.model.parameters(), RATE)


def main() -> None:
    name, folder, file = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    work = Work.read(folder)
    torch.set_num_threads(THREADS)
    model, loss, optimizer = {"trl": by_trl, "torch": by_torch}[name](work, load_file(file))
    named = dict(model.named_parameters())
    gradient = {
        key: parameter.grad.contiguous()
        for key, parameter in named.items()
        if parameter.grad is not None
    }
    save_file(gradient, folder / f"{name}_gradient.safetensors")
    optimizer.step()
    stepped = {key: parameter.detach().contiguous() for key, parameter in named.items()}
    save_file(stepped, folder / f"{name}_stepped.safetensors")
    (folder / f"{name}.json").write_text(json.dumps({"loss": loss}))


if __name__ == "__main__":
    main()
