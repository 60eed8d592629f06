"""`jaxgrpo init`: a first run of one's own, in four files that train as they are."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from jaxgrpo.cli import start
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import tasks
from jaxgrpo.training import process

RUN = """\
model.path = "base"               # a Hugging Face folder, or owner/name on the hub
data.path = "data.jsonl"          # also .csv, .parquet, a folder, owner/name on the hub
data.prompt = "{question}="       # a column, or text with {columns} in it
rewards = [{ use = "reward.py:correct" }]  # your function, in the file beside this one
recipe = "grpo"                   # jaxgrpo advantages lists others; your own: advantage = [...]
optimizer.learning_rate = 3e-4    # this model is tiny; 1e-6 is usual for billions of parameters
rollout.prompts_per_step = 16     # prompts of a step ...
rollout.group_size = 8            # ... with so many samples each
rollout.max_prompt_tokens = 16    # longer prompts are refused, or dropped: data.too_long
rollout.max_completion_tokens = 24  # longer samples are cut and counted as truncated
train.steps = 30
run.dir = "runs/first"            # metrics, samples, report.html, checkpoints, model
"""

REWARD = '''\
"""Rewards are functions in TRL's protocol: lists by keyword in, one number per completion out."""


def correct(completions, answer, **columns):
    """1 where the completion ends with the answer; None would mean "could not be scored"."""
    return [
        float(completion.split(" ")[-1] == right)
        for completion, right in zip(completions, answer, strict=True)
    ]
'''

ROWS = 400


def main(folder: str) -> int:
    """Writes run.toml, reward.py, data.jsonl and a small base model. Returns the exit code.

    Raises: InputError where one of them is there already.
    """
    home = Path(folder)
    names = ("run.toml", "reward.py", "data.jsonl", "base")
    there = [name for name in names if (home / name).exists()]
    if there:
        raise InputError(
            f"init {folder}: {', '.join(there)} is there already; nothing was written. Take "
            "another folder: jaxgrpo init DIR"
        )
    home.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    console.print(process.start())
    rows = tasks.load("task:arithmetic:train", count=ROWS)
    lines = [
        json.dumps({"question": row["prompt"].rstrip("="), "answer": row["answer"]}) for row in rows
    ]
    (home / "data.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (home / "reward.py").write_text(REWARD, encoding="utf-8")
    start.make_base(console, home / "base", "arithmetic")
    (home / "run.toml").write_text(RUN, encoding="utf-8")
    where = "" if folder == "." else f"cd {folder} && "
    console.print(f"written: {', '.join(names)}\ntrain:   {where}jaxgrpo train run.toml")
    return 0
