"""`jaxgrpo probe`: before training, whether groups of samples would carry signal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import EvalKeys
from jaxgrpo.core.errors import InputError, without_passwords
from jaxgrpo.evaluation.evaluate import Answers, Questions, make_asker, questions_of
from jaxgrpo.evaluation.intervals import LEVEL
from jaxgrpo.evaluation.rescoring import make_rescorer
from jaxgrpo.experiments.probe import measure, report
from jaxgrpo.experiments.probe.advice import advise
from jaxgrpo.training import process
from jaxgrpo.training.console import telling
from jaxgrpo.training.folder import plain, write_atomically
from jaxgrpo.training.inputs import resolve_scorer, show_previews
from jaxgrpo.training.policy import NO_REWARD, StoredPolicy, config_for, find_policy, key_of
from jaxgrpo.training.report.html import check_can_draw

PURPOSE = 2  # folded into the key: a probe repeats the draws of neither training nor evaluation


def main(
    target: str,
    *,
    data: str | None = None,
    reward: str | None = None,
    samples: int | None = None,
    prompts: int | None = None,
    level: float = LEVEL,
    json_out: str | None = None,
    html_out: str | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Probes a model; prints what was found, and writes it where asked.

    Args:
      target: a model folder, a run folder, or a config, whose model is probed.
      data, reward: by default the training data and the first reward of the run or config.
      samples: N per prompt; 16 by default.
      prompts: the first so many of the data; all by default.
      level: of the intervals.
      overrides: keys of the config, also of its table `eval`, which is ignored otherwise.

    Raises: InputError before anything is sampled, if an argument cannot be used.
    """
    given = {"data": data, "scorer": reward, "samples": samples, "prompts": prompts}
    config = _config(target, given, overrides)
    if not 0.5 <= level < 1:
        raise InputError(f"--level {level}: expected a share from 0.5 to below 1, as 0.99")
    outs = _writable(json_out, html_out)
    if html_out:
        check_can_draw(f"{html_out} needs", "leave --html out")
    console = Console(highlight=False)
    policy, held_out = find_policy(console, config)
    judge = resolve_scorer(config)
    questions = questions_of(config, held_out, judge)
    if process.is_main():
        show_previews(console, [judge], questions.rows[0], policy.tokenizer, 0)
    with telling(console, "probe: sampling"):
        found = _numbers(config, policy, questions, level)
    data_shown = without_passwords(str(config.eval.data))
    named = {"model": without_passwords(target), "data": data_shown, "reward": judge.name}
    whole = {**named, **found}
    if process.is_main():
        report.show(console, whole)
        if json_out:
            write_atomically(Path(json_out), json.dumps(plain(whole), indent=2) + "\n")
        if html_out:
            write_atomically(Path(html_out), report.render(whole))
        for out in outs:
            console.print(f"written: {out}", markup=False, soft_wrap=True)
    return 0


def _config(target: str, given: Mapping[str, str | int | None], overrides: Sequence[str]) -> Config:
    """The config of an evaluation with the keys of `eval` that are `given`.

    The eval.* settings of a run or config are ignored unless given on the command line: what a run
    is evaluated on, how often and by whom is another question than whether it would learn.
    """
    changes = {f"eval.{name}": value for name, value in given.items() if value is not None}
    config = config_for(target, changes, overrides)
    named = {*changes, *(one.partition("=")[0].replace(" ", "") for one in overrides)}
    config = dataclasses.replace(config, eval=_asked(config, named))
    samples = config.eval.samples
    if config.eval.data is None:
        problem = "no prompts to probe with; give --data, as task:NAME:train"
    elif config.eval.scorer is None and config.rewards[0].use == NO_REWARD:
        judges = "gsm8k_answer, math, or path/file.py:function"
        problem = f"nothing judges the answers; give --reward, as {judges}"
    elif samples < 2:
        problem = (
            f"--samples {samples}: a group needs 2 or more; 16 tell of groups of 2, 4, 8 and 16"
        )
    else:
        return config
    raise InputError(f"probe {target}: {problem}")


def _asked(config: Config, named: Collection[str]) -> EvalKeys:
    """config.eval; keys that are not `named` are those of the training data, or defaults."""
    of, default = config.data, EvalKeys()
    kept = {name: getattr(default, name) for name in ("samples", "prompts", "scorer")}
    if "eval.data" in named:
        kept |= {"subset": default.subset, "split": default.split}
    elif of.path is not None:
        kept |= {"data": of.path, "subset": of.subset, "split": of.split}
    kept = {name: value for name, value in kept.items() if f"eval.{name}" not in named}
    return dataclasses.replace(config.eval, **kept)


def draw(config: Config, policy: StoredPolicy, questions: Questions) -> Answers:
    """eval.samples judged answers to each question, with "logp" recomputed as in training."""
    rescore = make_rescorer(
        policy.model,
        policy.mesh,
        temperature=policy.settings.temperature,
        logp=True,
        tokens=config.train.tokens_per_micro_batch,
    )
    ask = make_asker(policy, questions, config.eval.samples, rescore, purpose=PURPOSE)
    return ask(policy.read_params(), key_of(config), 0)


def _numbers(
    config: Config, policy: StoredPolicy, questions: Questions, level: float
) -> dict[str, Any]:
    """How fresh samples are drawn, what `measure.measure` finds in them, and the advice."""
    per_step = config.rollout.prompts_per_step
    answers = draw(config, policy, questions)
    found = measure.measure(answers, questions, prompts_per_step=per_step, level=level)
    return {
        "prompts": len(questions.rows),
        "samples": config.eval.samples,
        "temperature": policy.settings.temperature,
        "prompts_per_step": per_step,
        "level": level,
        **found,
        "advice": [one._asdict() for one in advise(found)],
    }


def _writable(*names: str | None) -> list[Path]:
    """The files that are given. Raises: InputError if one cannot be written."""
    outs = [Path(name) for name in names if name]
    for out in outs:
        if out.is_dir():
            raise InputError(f"{out}: is a folder; give the name of a file to write")
        if not out.parent.is_dir():
            raise InputError(f"{out}: there is no folder {out.parent}; make it first")
    return outs
