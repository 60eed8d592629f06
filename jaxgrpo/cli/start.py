"""`jaxgrpo quickstart`: a base model, GRPO on it, and what that changed, in one command.

`jaxgrpo init`: a first run of one's own: files that train, compare and sample as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from jaxgrpo.cli import make_base as warmstart
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import tasks
from jaxgrpo.training import loop, process
from jaxgrpo.training.console import comparison, facts, is_summary


def quickstart(overrides: Sequence[str] = ()) -> int:
    """Builds the base where it is missing, trains it, prints the table. Returns the exit code."""
    config = configs.load("quickstart", overrides)
    console = Console(highlight=False)
    process.start(config.mesh.platform)
    if jax.process_count() > 1:
        raise InputError(
            f"quickstart runs in one process, not {jax.process_count()}: make the base once with "
            "`jaxgrpo make-base arithmetic runs/base`, then `jaxgrpo train quickstart` in each"
        )
    base = Path(config.model.path)
    if not (base / "config.json").exists():
        make_base(console, base, "arithmetic", seed=config.train.seed)
    show(console, loop.train(config, resume="auto"))
    return 0


def make_base(console: Console, out: str | Path, task: str, **options: Any) -> None:
    """`warmstart.make_base` with a bar, and a line on what came of it."""
    console.print(f"base model for {task}: supervised warm start")
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("warm start", total=None)

        def report(done: int, steps: int, loss: float) -> None:
            progress.update(bar, completed=done, total=steps, description=f"loss {loss:.3f}")

        made = warmstart.make_base(out, task, progress=report, **options)
    console.print(
        f"{made['path']}: {made['parameters']:,} parameters, loss {made['loss']:.4f} nats per token"
        f" (no model is below {made['loss_floor']:.4f}), {made['seconds']:.0f} s",
        soft_wrap=True,
    )


def show(console: Console, run: loop.Run) -> None:
    """The table of the end, from summary.json's own numbers."""
    summary = run.summary
    several = [name for name in summary["base"] if is_summary(name)]
    several.sort(key=lambda name: (name.split("@")[0] != "pass", int(name.split("@")[1])))
    names = ["accuracy", *several]
    columns = {"base": summary["base"], "trained": summary["trained"]}
    console.print(comparison("test problems", columns, [*names, "flat_groups"]))
    speed = summary["time/tokens_per_second"]
    facts(
        console,
        {
            "seconds": f"{summary['time/seconds']:.0f}",
            "sampled tokens per second": "–" if speed is None else f"{speed:,.0f}",
            "model": summary["model"],
            "summary": run.path / "summary.json",
            "metrics": summary["metrics"],
            "samples": run.path / "samples",
        },
    )


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

EXPERIMENT = """\
base = "run.toml"                 # the config that all arms begin from
dir = "runs/compare"              # report.html, tables and every run go here
control = "grpo"                  # the arm that the others are compared with
learning_rates = [1e-4, 3e-4]     # every arm is trained at every rate ...
seeds = 2                         # ... with every seed; six or more are needed for p below 0.05
metric = "eval/pass@1"

[set.eval]                        # keys that hold in every arm
data = "task:arithmetic:test"
prompts = 64
samples = 4                       # of each prompt

[arms]
grpo = { recipe = "grpo" }
sign = { recipe = "sign" }        # learns from groups whose samples all agree too
"""

PROMPTS = """\
12+34=
47+38=
95+17=
"""

ROWS = 400
TEXTS = {
    "run.toml": RUN,
    "reward.py": REWARD,
    "experiment.toml": EXPERIMENT,
    "prompts.txt": PROMPTS,
}


def init(folder: str) -> int:
    """Writes TEXTS, data.jsonl and a small base model. Returns the exit code.

    Raises: InputError if one of them is there already.
    """
    home = Path(folder)
    names = (*TEXTS, "data.jsonl", "base")
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
    make_base(console, home / "base", "arithmetic")
    for name, text in TEXTS.items():
        (home / name).write_text(text, encoding="utf-8")
    where = "" if folder == "." else f"cd {folder} && "
    console.print(f"written: {', '.join(names)}\ntrain:   {where}jaxgrpo train run.toml")
    return 0
