"""`jaxgrpo init`: the files that a first run takes, for a small base that it makes, or for a model.

All or nothing: they are made in a folder beside, and then moved.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from jaxgrpo.cli.start import make_small_base
from jaxgrpo.core.errors import InputError, refusing
from jaxgrpo.training.processes import process

ROWS, HELD_OUT = 400, 64
COMMENT = 44  # the column of comments

RATES = {10**7: 1e-4, 5 * 10**8: 1e-5, 10**9: 3e-6}
"""Models with fewer parameters -> learning rate of all weights; larger ones: LARGEST."""
LARGEST = 1e-6
TOKENS = 256  # of a prompt, and of a completion

REWARD = '''\
"""Rewards are functions in TRL's protocol: lists by keyword in, one number per completion out."""

import re


def correct(completions, answer, **columns):
    """1 where the last number is the answer; None would mean "could not be scored"."""
    last = [re.findall(r"-?\\d+", completion)[-1:] for completion in completions]
    return [float(found == [str(right)]) for found, right in zip(last, answer, strict=True)]
'''

EXPERIMENT = """\
base = "run.toml"                 # the config that all arms begin from
dir = "runs/compare"              # report.html, tables and every run go here
control = "grpo"                  # the arm that the others are compared with
learning_rates = [{rate}]           # every arm is trained at every rate ...
seeds = 6                         # ... with every seed; fewer cannot give p below 0.05
metric = "eval/pass@1"

[arms]
grpo = {{ recipe = "grpo" }}
sign = {{ recipe = "sign" }}        # learns from groups whose samples all agree too
"""


class Project(NamedTuple):
    """What is written into run.toml and, for the prompts, into prompts.txt."""

    model: str  # as model.path
    prompt: str  # as data.prompt
    rate: float
    why: str  # of the rate
    prompts: int  # of a step
    prompt_tokens: int
    completion_tokens: int
    steps: int
    stop: str | None = None  # a text that ends a completion
    text_only: bool = False  # as model.text_only
    thinks: bool = False  # unless enable_thinking = false


SMALL = Project(
    model="base",
    prompt="{question}=",
    rate=3e-4,
    why="this model is tiny; 1e-6 is usual for billions of parameters",
    prompts=16,
    prompt_tokens=16,
    completion_tokens=24,
    steps=30,
)
"""For the base that `init` makes."""


def init(folder: str = ".", model: str | None = None) -> int:
    """Writes a config, data, a reward and all else that training takes. Returns the exit code.

    Args:
      model: a Hugging Face folder, or a name on the hub, to train; None: a small base is made.

    Raises: InputError if a file is there already, the folder is a file, or there is no such model.
    """
    home = Path(folder)
    names = list(file_texts(SMALL)) + ["base"] * (model is None)
    existing = [name for name in names if os.path.exists(home / name)]
    if existing:
        raise InputError(
            f"init {folder}: {', '.join(existing)} is there already; nothing was written. Take "
            "another folder: jaxgrpo init DIR"
        )
    parent = next(path for path in (home, *home.absolute().parents) if os.path.lexists(path))
    if not parent.is_dir():
        raise InputError(f"init {folder}: no folder can be made there ({parent} is a file)")
    console = Console(highlight=False)
    console.print(process.start())
    project = SMALL if model is None else project_for(model)
    with contextlib.ExitStack() as stack:
        with refusing(f"init {folder}: no folder can be made there ({{reason}})", OSError):
            temporary_folder = tempfile.TemporaryDirectory(prefix=".jaxgrpo-init-", dir=parent)
        work_folder = Path(stack.enter_context(temporary_folder))
        if model is None:
            make_small_base(console, work_folder / "base", "arithmetic", label="base")
        for name, text in file_texts(project).items():
            (work_folder / name).write_text(text, encoding="utf-8")
        home.mkdir(parents=True, exist_ok=True)
        for name in names:
            os.rename(work_folder / name, home / name)
    where = "" if folder == "." else f"cd {shlex.quote(folder)} && "
    rows = "" if model is None else "rows:    sums; put yours into data.jsonl and test.jsonl\n"
    console.print(
        f"written: {', '.join(names)}\n{rows}train:   {where}jaxgrpo train run.toml",
        markup=False,
        soft_wrap=True,
    )
    return 0


def project_for(model: str) -> Project:
    """What fits a model: its learning rate by its size, its prompts by its chat template.

    Raises: InputError where there is no such model, or it is not built.
    """
    from jaxgrpo.config.keys import is_path
    from jaxgrpo.data import storage
    from jaxgrpo.models import decoder
    from jaxgrpo.models.hf import folders

    folder = folders.find_folder(model, with_weights=False)
    stored = folders.read_config(folder, text_only=True)
    count = sum(leaf.size for leaf in jax.tree.leaves(decoder.build(stored).shapes))
    template = folders.read_tokenizer(folder).chat_template
    has_chat = bool(template)
    tokens = min(TOKENS, stored.max_positions // 2)
    return Project(
        model=str(storage.place(model)) if is_path(model, Path.cwd()) else model,
        prompt="What is {question}? Answer with the number only." if has_chat else "{question}=",
        rate=rate_for(count),
        why=f"by size, {count / 1e9:.2g}B parameters: 1e-5 at 0.1B, 1e-6 from 1B on",
        prompts=8,
        prompt_tokens=tokens,
        completion_tokens=tokens,
        steps=100,
        stop=None if has_chat else "\n",
        text_only=stored.text_only,
        thinks="enable_thinking" in str(template),
    )


def rate_for(parameters: int) -> float:
    """The learning rate to begin with, of all weights by AdamW.

    >>> rate_for(135_000_000), rate_for(600_000_000), rate_for(8_000_000_000)
    (1e-05, 3e-06, 1e-06)
    """
    return next((rate for below, rate in RATES.items() if parameters < below), LARGEST)


def file_texts(project: Project) -> dict[str, str]:
    """Name -> text of every file."""
    from jaxgrpo.data import tasks

    row_sets = [
        [{**row, "question": row["prompt"].rstrip("=")} for row in tasks.load(spec, count=count)]
        for spec, count in (("task:arithmetic:train", ROWS), ("task:arithmetic:test", HELD_OUT))
    ]
    prompts = [project.prompt.format(**row) for row in row_sets[1][:3]]
    return {
        "run.toml": run_toml(project),
        "reward.py": REWARD,
        "experiment.toml": EXPERIMENT.format(rate=toml_number(project.rate)),
        "prompts.txt": "".join(f"{prompt}\n" for prompt in prompts),
        **dict(zip(("data.jsonl", "test.jsonl"), map(_jsonl, row_sets), strict=True)),
    }


def _jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = [json.dumps({name: row[name] for name in ("question", "answer")}) for row in rows]
    return "".join(f"{line}\n" for line in lines)


def toml_number(rate: float) -> str:
    """A learning rate as people write it.

    >>> toml_number(0.0003), toml_number(1e-06)
    ('3e-4', '1e-6')
    """
    digits, _, power = f"{rate:.0e}".partition("e")
    return f"{digits}e{int(power)}"


def run_toml(project: Project) -> str:
    """The config, each key with what it is for."""
    return "".join(
        f"{line:<{COMMENT - 2}}  # {comment}\n" if comment else f"{line}\n"
        for line, comment in _lines(project)
    )


def _lines(project: Project) -> Iterator[tuple[str, str]]:
    """Each line of the config, and its comment."""
    # TOML's texts are JSON's, but for characters written as two halves of a surrogate pair.
    quoted = functools.partial(json.dumps, ensure_ascii=False)
    yield f"model.path = {quoted(project.model)}", "a Hugging Face folder, or owner/name on the hub"
    if project.text_only:
        yield "model.text_only = true", "the rest of the model is exported as it is"
    yield 'data.path = "data.jsonl"', "also .csv, .parquet, a folder, owner/name on the hub"
    yield f"data.prompt = {quoted(project.prompt)}", "a column, or text with {columns} in it"
    if project.thinks:
        key = "data.chat_template_kwargs = { enable_thinking = false }"
        yield key, "its thoughts are longer than samples here"
    yield 'rewards = [{ use = "reward.py:correct" }]', "your function, in the file beside this one"
    yield 'recipe = "grpo"', "jaxgrpo advantages lists others; your own: advantage = [...]"
    yield f"optimizer.learning_rate = {toml_number(project.rate)}", project.why
    yield f"rollout.prompts_per_step = {project.prompts}", "prompts of a step ..."
    yield "rollout.group_size = 8", "... with so many samples each"
    limit = f"rollout.max_prompt_tokens = {project.prompt_tokens}"
    yield limit, "longer prompts are refused, or dropped: data.too_long"
    limit = f"rollout.max_completion_tokens = {project.completion_tokens}"
    yield limit, "longer samples are cut and counted as truncated"
    if project.stop is not None:
        yield f"rollout.stop_strings = [{quoted(project.stop)}]", "such a text ends a sample"
    yield f"train.steps = {project.steps}", ""
    yield 'run.dir = "runs/first"', "metrics, samples, report.html, checkpoints, model"
    yield "", ""
    yield "[eval]", "before and after training, on rows that it never sees"
    yield 'data = "test.jsonl"', ""
    yield f"prompts = {HELD_OUT}", ""
    yield "samples = 4", "of each prompt: pass@1, pass@4"
    if project.model == SMALL.model:
        yield "kl_to_base = false", "the base knows nothing that it could forget"
