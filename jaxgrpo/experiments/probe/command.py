"""`jaxgrpo probe`: before training, whether groups of samples would carry signal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Unpack

from rich.console import Console

from jaxgrpo.config import own_code
from jaxgrpo.config.contenders import split_names
from jaxgrpo.config.files import Config, flat, named_keys
from jaxgrpo.config.keys import DataKeys, EvalKeys
from jaxgrpo.config.tables import AskOverrides
from jaxgrpo.config.world import COLUMNS
from jaxgrpo.core.errors import InputError, without_passwords
from jaxgrpo.data.sources import Rows
from jaxgrpo.data.storage import Place, write_atomically
from jaxgrpo.evaluation.evaluate import Answers, Questions, make_asker, make_questions
from jaxgrpo.evaluation.intervals import LEVEL
from jaxgrpo.evaluation.rescoring import make_rescorer
from jaxgrpo.experiments.probe import atlas, measure, report
from jaxgrpo.experiments.probe.advice import advise
from jaxgrpo.rewards import RewardFunction
from jaxgrpo.rewards.protocol import reads_any
from jaxgrpo.rollout.judging import progress_after
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.console import Document, telling
from jaxgrpo.training.records.report.html import check_can_draw, check_writable
from jaxgrpo.training.rewarding import print_failures, show_previews, try_rewards
from jaxgrpo.training.stored_policy import (
    NO_REWARD,
    StoredPolicy,
    config_for,
    find_policy,
    judge_name,
    resolve_judge,
    say_dropped,
    seed_key,
    source_or_rows,
)

PURPOSE = 2  # folded into the key: a probe repeats the draws of neither training nor evaluation


def probe(
    target: str | Place,
    *,
    data: str | Place | Rows | None = None,
    reward: str | RewardFunction | None = None,
    samples: int | None = None,
    prompts: int | None = None,
    level: float = LEVEL,
    methods: Sequence[str] = (),
    **overrides: Unpack[AskOverrides],
) -> dict[str, Any]:
    """What `jaxgrpo probe` finds: whether groups of samples would carry a signal, before training.

    Args:
      target: a model folder, a run folder, a config file, or a shipped config's name.
      data: as data.path, or rows; by default the training data of the run or config; of
        a run on rows from Python or saved rollouts its eval.data.
      reward: the name of one or a function; by default the first of the run or config.
      samples: N per prompt; 16 by default.
      prompts: how many, from the start of the data; all by default.
      level: of the intervals.
      methods: two or more, as "sign", "dr_grpo+loss.reduction=constant": how alike the updates are
        that they would make of the samples of one step, and nothing else.
      overrides: tables of the config, rollout={"temperature": 0.5}, as in `train`.

    Returns: the numbers, in the structure that docs/probe.md describes, "advice" last.
    Raises: InputError before anything is sampled, if an argument cannot be used.
    """
    own_code.forget_changed()
    if isinstance(methods, str):
        names = split_names(methods)
        raise InputError(f"methods = {methods!r}: give a list of names, as {names!r}")
    if methods:
        refuse_with_methods(samples=samples, prompts=prompts)
        return atlas.probe_atlas(target, methods, data, reward, (), overrides)
    source, rows = source_or_rows(data)
    judge = judge_name(reward)
    eval_keys = {"data": source, "scorer": judge, "samples": samples, "prompts": prompts}
    console = Console(highlight=False)
    config = _config(target, eval_keys, (), overrides, rows, console)
    return _probe(console, target, config, level, rows, reward)


def main(
    target: str,
    *,
    data: str | None = None,
    reward: str | None = None,
    samples: int | None = None,
    prompts: int | None = None,
    level: float = LEVEL,
    methods: str | None = None,
    as_json: bool = False,
    html_out: str | None = None,
    overrides: Sequence[str] = (),
) -> int | Document:
    """The command: prints what was found, and writes a page where asked. Returns the exit code.

    Args: as in `probe`, with methods as one text, and
      overrides: keys of the config, also of its table `eval`, which is ignored otherwise.

    Raises: InputError before anything is sampled, if an argument cannot be used.
    """
    outs = check_writable(html_out, inputs=[target, data])
    if html_out:
        check_can_draw(f"{html_out} needs", "leave --html out")
    console = Console(highlight=False)
    if methods is not None:
        refuse_with_methods(samples=samples, num_prompts=prompts)
        if level != LEVEL:
            raise InputError("--level: an atlas has no intervals; leave it out")
        names = split_names(methods)
        with telling(console, "probe: atlas"):
            numbers = atlas.probe_atlas(target, names, data, reward, overrides, {})
        shown = atlas
    else:
        eval_keys = {"data": data, "scorer": reward, "samples": samples, "prompts": prompts}
        config = _config(target, eval_keys, overrides, console=console)
        numbers = _probe(console, target, config, level)
        shown = report
    if not process.is_main():
        return 0
    if not as_json:
        shown.show(console, numbers)
    for out in outs:
        write_atomically(out, shown.render(numbers))
        console.print(f"written: {out}", markup=False, soft_wrap=True)
    return Document(numbers) if as_json else 0


def refuse_with_methods(**options: int | None) -> None:
    """Raises: InputError for what an atlas does not read."""
    for name, value in options.items():
        if value is not None:
            raise InputError(
                f"--{name.replace('_', '-')}: an atlas is of the samples of a step; say how many "
                "with --set rollout.prompts_per_step=… rollout.group_size=…"
            )


def _probe(
    console: Console,
    target: str | Place,
    config: Config,
    level: float,
    rows: Rows | None = None,
    reward: str | RewardFunction | None = None,
) -> dict[str, Any]:
    """Probes the model of a config with `rows`, or with its eval.data."""
    if not 0.5 <= level < 1:
        raise InputError(f"--level {level}: expected a share from 0.5 to below 1, as 0.99")
    policy, held_out = find_policy(console, config, rows, target=target)
    say_dropped(console, held_out, config.rollout.max_prompt_tokens)
    longest, world = config.rollout.max_completion_tokens, policy.world
    judge = resolve_judge(config.eval.scorer, config.rewards, longest, reward, world)
    progress = functools.partial(progress_after, max_steps=config.train.steps)
    name, answering = config.scorer_name, policy.converse
    questions = make_questions(config.eval, held_out, judge, name, progress, answering)
    if process.is_main():
        first, ends = questions.rows[0], policy.engine.settings.stop_tokens
        tried = [] if reads_any(judge.function, COLUMNS) else [judge]
        previews = try_rewards(tried, first, policy.tokenizer, ends, progress(0))
        show_previews(console, [judge], first, previews)
    with contextlib.closing(policy), telling(console, "probe: sampling"):
        train = config.train
        answers = draw(
            policy, questions, config.eval.samples, train.seed, train.tokens_per_micro_batch
        )
        numbers = _numbers(
            answers,
            questions,
            policy.engine.settings.temperature,
            config.rollout.prompts_per_step,
            level,
        )
    print_failures(console, answers.messages)
    data = without_passwords(config.eval.data or "") if rows is None else "rows"
    model = without_passwords(str(target))
    return {"model": model, "data": data, "reward": judge.name, **numbers}


def _config(
    target: str | Place,
    eval_keys: Mapping[str, str | int | None],
    overrides: Sequence[str],
    tables: Mapping[str, Any] = MappingProxyType({}),
    rows: Rows | None = None,
    console: Console | None = None,
) -> Config:
    """The config of an evaluation with `eval_keys`, those of `eval` that are not None.

    The eval.* settings of a run or config are ignored unless given on the command line: what a run
    is evaluated on, how often and by whom is another question than whether it would learn.

    Args:
      overrides: of the command line; `tables`: of Python, nested or dotted.
      rows: that are asked instead of eval.data.
      console: as in `config_for`.
    """
    changes = {f"eval.{name}": value for name, value in eval_keys.items() if value is not None}
    config = config_for(target, {**tables, **changes}, overrides, console)
    user_keys = {*changes, *flat(tables), *named_keys(overrides)}
    eval_keys_of_data = _eval_keys(config.eval, config.data, user_keys, rows is not None)
    config = dataclasses.replace(config, eval=eval_keys_of_data)
    samples = config.eval.samples
    if config.eval.data is None and rows is None:
        problem = "no prompts to probe with; give --data, as task:NAME:train"
    elif config.scorer_name == NO_REWARD:
        judges = "gsm8k_answer, math, or path/file.py:function"
        problem = f"nothing judges the answers; give --reward, as {judges}"
    elif samples < 2:
        problem = (
            f"--samples {samples}: a group needs 2 or more; 16 tell of groups of 2, 4, 8 and 16"
        )
    else:
        return config
    raise InputError(f"probe {target}: {problem}")


def _eval_keys(
    keys: EvalKeys, data: DataKeys, user_keys: Collection[str], has_rows: bool
) -> EvalKeys:
    """`keys`; those that are not in `user_keys` are those of the training data, or defaults.

    Args: has_rows: whether rows are asked in place of any data.
    """
    default = EvalKeys()
    values = {name: getattr(default, name) for name in ("samples", "prompts", "scorer")}
    if "eval.data" in user_keys:
        values |= {"subset": default.subset, "split": default.split}
    elif isinstance(data.path, tuple) and not has_rows:
        raise InputError(f"data.path mixes {', '.join(data.paths)}: give --data, one of them")
    elif isinstance(data.path, str):
        values |= {"data": data.path, "subset": data.subset, "split": data.split}
    values = {name: value for name, value in values.items() if f"eval.{name}" not in user_keys}
    return dataclasses.replace(keys, **values)


def draw(
    policy: StoredPolicy, questions: Questions, samples: int, seed: int, tokens: int | None
) -> Answers:
    """Judged answers to each question, with "logp" recomputed as in training.

    Args:
      tokens: of a micro-batch, as `train.tokens_per_micro_batch`.
    """
    rescore = make_rescorer(
        policy.model,
        policy.mesh,
        temperature=policy.engine.settings.temperature,
        quantities={"logp"},
        tokens=tokens,
        has_forks=policy.engine.settings.own_rows,
    )
    ask = make_asker(policy, questions, samples, rescore, purpose=PURPOSE)
    return ask(policy.read_params(), seed_key(seed), 0)


def _numbers(
    answers: Answers, questions: Questions, temperature: float, per_step: int, level: float
) -> dict[str, Any]:
    """How fresh samples were drawn, what `measure.measure` finds in them, and the advice."""
    numbers = measure.measure(answers, questions, prompts_per_step=per_step, level=level)
    return {
        "prompts": len(questions.rows),
        "samples": answers.tokens.shape[1],
        "temperature": temperature,
        "prompts_per_step": per_step,
        "level": level,
        **numbers,
        "advice": [advice._asdict() for advice in advise(numbers)],
    }
