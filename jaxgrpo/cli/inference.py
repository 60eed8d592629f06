"""`jaxgrpo eval` and `export`: a model, or that of a run, without training it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from rich.console import Console
from rich.table import Table

from jaxgrpo.config import own_code
from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import EvalKeys, LoraKeys, ModelKeys, is_path
from jaxgrpo.config.tables import AskOverrides
from jaxgrpo.core.errors import InputError, without_passwords
from jaxgrpo.data import storage
from jaxgrpo.data.sources import Rows
from jaxgrpo.data.storage import Place, write_atomically
from jaxgrpo.evaluation.evaluate import (
    Evaluation,
    Questions,
    answer_rows,
    make_evaluator,
    make_questions,
)
from jaxgrpo.evaluation.intervals import read_interval, without_ends
from jaxgrpo.evaluation.rescoring import refuse_other_vocabulary
from jaxgrpo.models.hf import folders
from jaxgrpo.rewards import RewardFunction
from jaxgrpo.rollout.judging import progress_after
from jaxgrpo.training import export as exporting
from jaxgrpo.training import fingerprints
from jaxgrpo.training.pretrained import find_config, find_model
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.console import Document, show_whole, telling, terminal_table
from jaxgrpo.training.records.folder import plain
from jaxgrpo.training.records.report.html import check_writable
from jaxgrpo.training.rewarding import print_failures
from jaxgrpo.training.stored_policy import (
    NO_REWARD,
    config_for,
    find_policy,
    is_config,
    is_run,
    judge_name,
    load_base,
    read_run,
    resolve_judge,
    say_dropped,
    seed_key,
    source_or_rows,
)


def evaluate(
    target: str | Place,
    *,
    data: str | Place | Rows | None = None,
    scorer: str | RewardFunction | None = None,
    samples: int | None = None,
    prompts: int | None = None,
    base: str | Place | None = None,
    **overrides: Unpack[AskOverrides],
) -> dict[str, float]:
    """What `jaxgrpo eval` measures: greedy accuracy, pass@k, majority votes, their intervals.

    Args:
      target: a model folder, a run folder, a config file, or a shipped config's name.
      data: as data.path, or rows; of a run its eval.data by default.
      scorer: the name of a reward or a function that judges success, above 0.5; by
        default that of the run or config.
      samples: per prompt; of a run or config its eval.samples by default, else 16.
      prompts: how many, from the start of the data; of a run or config its eval.prompts by
        default, else all.
      base: a model folder or a name on the hub that the KL is measured from.
      overrides: tables of the config, rollout={"temperature": 0.5}, as in `train`.

    Returns: name -> number, as docs/metrics.md describes them; NAME/low and NAME/high are the ends
    of NAME's 95% interval over prompts.
    Raises: InputError before anything is sampled, if something cannot be used.
    """
    own_code.forget_changed()
    source, rows = source_or_rows(data)
    judge = judge_name(scorer)
    eval_keys = {"data": source, "scorer": judge, "samples": samples, "prompts": prompts}
    console = Console(highlight=False)
    config = config_for(target, {**overrides, **_eval_changes(eval_keys)}, console=console)
    base_path = base and os.fspath(base)
    _, evaluation = _measure(console, target, config, rows, scorer, base_path)
    return evaluation.metrics


def print_evaluation(
    target: str,
    *,
    data: str | None = None,
    scorer: str | None = None,
    samples: int | None = None,
    prompts: int | None = None,
    answers: str | None = None,
    as_json: bool = False,
    base: str | None = None,
    overrides: Sequence[str] = (),
) -> int | Document:
    """The command: prints an evaluation, and writes its answers where asked.

    Args: as in `evaluate`, and
      answers: a file for the rows of all answers, the greedy one of each prompt and its samples;
        "greedy" tells them apart.

    Returns: the exit code, or what `evaluate` returns.
    Raises: InputError where there is no data or no scorer, or one of them cannot be used.
    """
    eval_keys = {"data": data, "scorer": scorer, "samples": samples, "prompts": prompts}
    console = Console(highlight=False)
    config = config_for(target, _eval_changes(eval_keys), overrides, console)
    check_writable(answers, inputs=[target, config.eval.data])
    questions, evaluation = _measure(console, target, config, None, None, base)
    if not process.is_main():
        return 0
    if not as_json:
        title = without_passwords(f"{target} on {config.eval.data}")
        show_whole(console, metrics_table(evaluation.metrics, title))
    if answers:
        name = config.scorer_name
        write_rows(answers, _all_rows(evaluation, questions, name))
    return Document(evaluation.metrics) if as_json else 0


def _measure(
    console: Console,
    target: str | Place,
    config: Config,
    rows: Rows | None,
    scorer: str | RewardFunction | None,
    base: str | None,
) -> tuple[Questions, Evaluation]:
    """Evaluates the model of a config on `rows`, or on its eval.data."""
    _refuse_unjudged(target, config.eval, config.scorer_name, rows)
    measures_kl = base is not None or config.measures_kl_to_base
    base_keys = _find_base(target, config.model, config.eval, base) if measures_kl else None
    policy, held_out = find_policy(console, config, rows, base_keys is not None, target=target)
    say_dropped(console, held_out, config.rollout.max_prompt_tokens)
    keys, longest = config.eval, config.rollout.max_completion_tokens
    judge = resolve_judge(keys.scorer, config.rewards, longest, scorer, policy.world)
    anchor, train = None, config.train
    progress = functools.partial(progress_after, max_steps=train.steps)
    name, answering = config.scorer_name, policy.converse
    questions = make_questions(keys, held_out, judge, name, progress, answering)
    if base_keys is not None:
        pretrained = find_model(*base_keys, config.rollout, train.remat, policy.mesh)
        fingerprints.refuse_unless_alike(lambda: {"base": folders.fingerprint(pretrained.folder)})
        anchor = load_base(pretrained, policy.mesh, train.seed)
        anchor = anchor._replace(read=functools.cache(anchor.read))
    tokens = train.tokens_per_micro_batch
    run = make_evaluator(keys, policy, questions, anchor, tokens)
    with contextlib.closing(policy), telling(console, "evaluation"):
        evaluation = run(policy.read_params(), seed_key(train.seed), 0)
    print_failures(console, evaluation.messages)
    return questions, evaluation


def _eval_changes(eval_keys: Mapping[str, Any]) -> dict[str, Any]:
    return {f"eval.{name}": value for name, value in eval_keys.items() if value is not None}


def export(
    run: str,
    out: str,
    step: str | int = "last",
    dtype: str | None = None,
    overwrite: bool = False,
) -> int:
    """Writes a step of a run as a Hugging Face folder. Returns the exit code."""
    print(process.start())  # noqa: T201
    folder = exporting.export(run, out, step, dtype, overwrite)
    print(f"{folder}: model, tokenizer, generation config and model card")  # noqa: T201
    return 0


def metrics_table(metrics: Mapping[str, float], title: str) -> Table:
    """Numbers of an evaluation, with their intervals where they have one; a dash for none, as for
    the AUROC where all samples are right."""
    rows = [["", "value", "95% interval"]]
    for name in without_ends(metrics):
        ends, value = read_interval(metrics, name), metrics[name]
        shown = f"{value:.3f}" if math.isfinite(value) else "–"
        rows.append([name, shown, "{:.3f} to {:.3f}".format(*ends) if ends else ""])
    return terminal_table(rows, title=title, title_justify="center")


def _all_rows(evaluation: Evaluation, questions: Questions, name: str) -> Iterator[dict[str, Any]]:
    """The rows of each prompt's greedy answer, and of its samples."""
    for greedy, answers in ((True, evaluation.greedy), (False, evaluation.sampled)):
        for row in answer_rows(answers, questions, name):
            yield {"greedy": greedy, **row}


def _refuse_unjudged(
    target: str | Place, keys: EvalKeys, scorer_name: str, rows: Rows | None
) -> None:
    if keys.data is None and rows is None:
        raise InputError(f"eval {target}: nothing to evaluate on; give --data")
    if scorer_name == NO_REWARD:
        raise InputError(
            f"eval {target}: nothing judges the answers; give --scorer, as "
            "gsm8k_answer, math, or path/file.py:function"
        )


def _find_base(
    target: str | Place, model: ModelKeys, keys: EvalKeys, base: str | None
) -> tuple[ModelKeys, LoraKeys] | None:
    """`model` and `lora` of what the KL is measured from; None where nothing says what it is, and
    the KL was not asked for by name.

    Raises: InputError where it was, or the base does not exist or has another vocabulary.
    """
    if base is not None:
        path = str(storage.place(base)) if is_path(base, Path.cwd()) else base
        base_model = dataclasses.replace(model, path=path, revision=None, family=None, config={})
        adapters = LoraKeys()
    elif is_run(target):
        run = read_run(target)[1]
        base_model, adapters = run.model, run.lora
    elif keys.kl_to_base is None:
        return None
    else:
        reason = "a model folder does not say what it was trained from"
        if is_config(target):
            reason = "the policy of a config is its own base, so that the KL is 0"
        raise InputError(
            f"eval {target}: eval.kl_to_base = true, and {reason}; give --base MODEL, or --set "
            "eval.kl_to_base=false"
        )
    refuse_other_vocabulary(*(find_config(variant)[1] for variant in (model, base_model)))
    return base_model, adapters


def write_rows(path: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a line of JSON for each row; numbers that are not finite are null."""
    lines = [json.dumps(plain(dict(row)), ensure_ascii=False) for row in rows]
    write_atomically(Path(path), "".join(f"{line}\n" for line in lines))
