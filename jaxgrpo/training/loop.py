"""`jaxgrpo.train`: the loop over steps, with evaluation, logs, checkpoints and a clean stop.

collect (prompts -> sample -> reward) -> prepare (score, advantage) -> update -> log
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex, Unpack

import jax

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import own_code
from jaxgrpo.config.files import Config, make_config
from jaxgrpo.config.tables import TrainOverrides
from jaxgrpo.config.world import Factories
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import finalise, merge
from jaxgrpo.core.types import Learner, Stream
from jaxgrpo.data.sources import Rows
from jaxgrpo.data.storage import Place
from jaxgrpo.evaluation.diversity import find_collapse
from jaxgrpo.evaluation.evaluate import Evaluate
from jaxgrpo.models import sharding
from jaxgrpo.models.hf import texts
from jaxgrpo.rewards import RewardError, Rewards
from jaxgrpo.training.checkpoints import parameter_hash
from jaxgrpo.training.collecting.replay import SavedRollouts
from jaxgrpo.training.export import export
from jaxgrpo.training.fingerprints import refuse_changed_base
from jaxgrpo.training.hooks import (
    OnStep,
    StepEnd,
    check_on_step,
    is_due,
    make_evaluations,
    make_hooks,
)
from jaxgrpo.training.opening import OpenRun, open_run
from jaxgrpo.training.processes import peers, process
from jaxgrpo.training.processes.recovery import writing_results
from jaxgrpo.training.records.logbook import Clock
from jaxgrpo.training.records.reading import evaluation_metrics, read_metrics, read_samples
from jaxgrpo.training.records.report.html import NAME as REPORT
from jaxgrpo.training.rewarding import with_logged
from jaxgrpo.training.setup import Setup
from jaxgrpo.training.stored_policy import evaluator_for_run
from jaxgrpo.update.optimizer import current_rate


class Run(NamedTuple):
    """A finished run, read from its folder."""

    path: Place
    summary: dict[str, Any]
    learner: Learner
    stream: Stream

    def __repr__(self) -> str:
        # Not its arrays: a notebook shows the value of a cell, and they may be gigabytes.
        return f"Run({os.fspath(self.path)!r}, step {self.summary['step']})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one per step."""
        return read_metrics(self.path / "metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The rows of the newest file of samples."""
        return read_samples(self.path)

    def export(
        self,
        out: str | Path,
        step: str | SupportsIndex = "last",
        dtype: str | None = None,
        overwrite: bool = False,
    ) -> Place:
        """Writes a step's model as a Hugging Face folder; "best" by `checkpoint.keep_best`."""
        return export(self.path, out, step, dtype, overwrite)


def train(
    config: Config | Mapping[str, Any] | str | Path,
    *,
    resume: str | None = None,
    rewards: Rewards | None = None,
    advantage: AdvantageTransform | None = None,
    dataset: Rows | None = None,
    rollouts: SavedRollouts | None = None,
    tools: Sequence[Callable[..., Any] | str] = (),
    environment_factory: Factories | None = None,
    on_step: OnStep | None = None,
    profile: bool = False,
    **overrides: Unpack[TrainOverrides],
) -> Run:
    """Trains as a config says, and writes everything into its run folder. Works in a notebook.

    Args:
      config: a Config, its tables as dicts, a TOML file, or a shipped config's name.
      resume: "auto" goes on from the newest checkpoint, or starts where nothing is lost by it.
      rewards, advantage, dataset: Python objects instead of what the config names; the data
        set a list of dicts, a dict of columns, a datasets.Dataset or a pandas DataFrame, read by
        the config's data keys.
      rollouts: files of saved rollouts, to train on instead of sampling and rewarding; step n
        takes file (n - 1) mod their number (docs/rollouts.md).
      tools: functions that the model may call, or names as in a config (docs/environments.md).
      environment_factory: makes the environment of a sample; of several, {name: factory}, the
        row's column "environment" names one.
      on_step: called after each step with its number and its metrics, as in metrics.jsonl; where
        it raises, the run ends with its error, and a run of one process has saved the step.
      profile: trace a step that compiles nothing into RUN/profile, for TensorBoard or Perfetto. On
        an NVIDIA GPU the run has no CUDA graphs then: the profiler would end the process.
      overrides: tables of the config, train={"steps": 20}, whose keys a type checker knows;
        **{"train.steps": 20}, which it does not, means the same.

    Returns: the run; its model is in `path / "model"`, as a Hugging Face folder.

    Raises: InputError before anything long starts; process.StopRequested after a stop signal, when
    everything is saved, in the last step when the run is complete.
    """
    if resume not in (None, "auto"):
        raise InputError(f'resume = {resume!r}: use "auto", or leave it out for a new run')
    check_on_step(on_step)
    own_code.forget_changed()
    objects: dict[str, Any] = {"rewards": rewards, "advantage": advantage, "dataset": dataset}
    objects |= {"tools": tools, "environment": environment_factory}
    config = make_config(config, overrides, **objects, is_stored=rollouts is not None)
    line = process.start(config.mesh.platform, profile)
    options = objects | {"rollouts": rollouts, "on_step": on_step, "profile": profile}
    options |= {"resume": resume == "auto", "devices_line": line}
    return unless_stopped(take(config, evaluator_for_run, **options))


def unless_stopped(run: Run) -> Run:
    """The run, which is complete.

    Raises: process.StopRequested where a stop signal came too late to end it sooner: a script would
      go on, and begin its next run.
    """
    if process.stop_requested(run.summary["step"]):
        stopped = process.StopRequested(
            f"stopped by request; the run in {run.path} is complete, and its model is "
            f"{run.summary['model']}"
        )
        stopped.run = run
        raise stopped
    return run


def take(
    config: Config,
    evaluator: Callable[[Setup], Evaluate],
    *,
    resume: bool = False,
    devices_line: str = "",
    shown: bool = True,
    on_step: OnStep | None = None,
    profile: bool = False,
    **setup_options: Any,
) -> Run:
    """Runs the loop, from the first step or from the newest checkpoint.

    Args:
      evaluator: makes the evaluation, where the config has eval.data.
      devices_line, shown: a line to print first, and whether steps are shown in the terminal.
      on_step, profile, setup_options: as in `train`, and of `setup` beside the config.
    """
    peers.set_timeout(config.run.peer_timeout)
    with contextlib.ExitStack() as stack:
        opened = open_run(
            stack, config, setup_options, resume=resume, devices_line=devices_line, shown=shown
        )
        run, last = opened.run, opened.run.config.train.steps
        stack.callback(run.inputs.close)
        evaluate = evaluator(run) if run.config.eval.data is not None else None
        evaluations = make_evaluations(opened, evaluate)
        hooks = make_hooks(opened, evaluations, on_step)
        if evaluations is not None:
            evaluations.evaluate_base(run.learner, opened.finished_steps)
            evaluations.evaluate_owed(run.learner, opened.finished_steps)
            evaluations.evaluate_last(run.learner, opened.finished_steps)
        learner, stream = run.learner, run.stream
        for number in range(opened.finished_steps + 1, last + 1):
            # The first step compiles.
            traced = profile and number == min(opened.finished_steps + 2, last)
            trace = jax.profiler.trace(opened.folder.path / "profile") if traced else None
            with trace or contextlib.nullcontext():
                step = take_step(opened, learner, stream, number)
                for hook in hooks:
                    step = hook(step)
            learner, stream = step.learner, step.stream
            save_if_due(opened, step)
        opened.watch.phase("end of the run")
        opened.checkpoints.wait()
        sharding.give_back(opened.run.inputs.pretrained.mesh)
        summary = write_results(opened, learner, evaluate is not None)
        process.meet()
    return Run(opened.folder.place, summary, learner, stream)


def take_step(opened: OpenRun, learner: Learner, stream: Stream, number: int) -> StepEnd:
    """Step `number`: what it trained, and its metrics."""
    clock = Clock(lambda phase: opened.watch.phase(f"step {number}: {phase}"))
    run = opened.run
    atlas: dict[str, float] = {}
    # Until the update, which is given the learner, what was before the step is there.
    with opened.keeper.saving(number, (learner, stream)):
        with clock("sample"):
            params = run.sync(learner)
        live_groups = functools.partial(run.live_groups, learner)
        stream, collected = run.collect(params, number - 1, stream, live_groups, clock)
        del params, live_groups  # what is sampled with makes room for the update
        sharding.give_back(run.inputs.pretrained.mesh)
        with clock("prepare"):
            learner, prepared = run.prepare(learner, collected.rollouts)
        if run.atlases is not None and (number == 1 or is_due(number, run.config.atlas.every)):
            with clock("atlas"):
                atlas = run.atlases.draw(learner, collected.rollouts).metrics()
    with clock("update"):
        learner, metrics = run.update(learner, prepared.batches)
        # Of all that was sampled, where `collect` and `prepare` count the same.
        metrics = merge(prepared.metrics, metrics) | collected.metrics
        values = finalise(sharding.to_host(metrics))
    failure = None
    try:
        values = with_logged(values, collected.reward_log)
    except RewardError as error:
        if number < 2:
            raise
        failure = error  # the step is whole but for what was logged, and is saved
    values["learning_rate"] = float(sharding.to_host(current_rate(learner.opt_state)))
    values |= clock.seconds | atlas
    return StepEnd(number, learner, stream, collected, prepared.advantage, values, failure)


def save_if_due(opened: OpenRun, step: StepEnd) -> None:
    """Saves a step that is the last, the best or one of checkpoint.every, or that a signal, or a
    reward, a scorer or an evaluation that has failed, ends.

    Raises: StopRequested after a stop signal, RewardFailed where a reward or a scorer has failed;
      the error of an evaluation that failed otherwise; both say where the step was not saved.
    """
    config, keeper, best = opened.run.config, opened.keeper, opened.keeper.progress.best
    number, last = step.number, config.train.steps
    stop = process.stop_requested(number)
    ends = bool(stop) or step.failure is not None
    best_step = best[0] if best else None
    problem = ""
    if ends or number in (best_step, last) or is_due(number, config.checkpoint.every):
        opened.watch.phase(f"step {number}: save")
        sharding.give_back(opened.run.inputs.pretrained.mesh)
        try:
            keeper.save(step.learner, step.stream, number, must=ends or number == last)
        except process.NotSaved as unsaved:
            if step.failure is None:
                raise
            problem = f"{unsaved}; "
    if step.failure is not None:
        line, command = f"{problem}{keeper.saved_line()}", keeper.resume_command()
        if isinstance(step.failure, RewardError):
            raise keeper.reward_failed(number, step.failure, line) from step.failure
        step.failure.add_note(f"the evaluation of step {number} failed; {line}; go on: {command}")
        raise step.failure
    if stop and (number < last or keeper.progress.owes_evaluation):
        raise process.StopRequested(
            f"stopped after step {number} of {last}, saved in {opened.folder.place}; go on "
            f"with: {keeper.resume_command()}"
        )


def write_results(opened: OpenRun, learner: Learner, has_evaluation: bool) -> dict[str, Any]:
    """Writes the model as a Hugging Face folder, and the summary, which it returns."""
    run, folder, keeper = opened.run, opened.folder, opened.keeper
    progress, model, pretrained = keeper.progress, folder.place / "model", run.inputs.pretrained
    ends = texts.end_fields(run.blueprint.sampling.stop_tokens)
    with writing_results(model):
        keeper.refuse_moved(run.config.train.steps)
        facts = run.inputs, run.config.data.chat_template, keeper.inputs
        process.broadcast(lambda: refuse_changed_base(*facts))
        pretrained.save(learner, folder.path, ends)
    speed = progress.tokens / progress.seconds if progress.seconds else None
    summary: dict[str, Any] = {
        "step": int(sharding.to_host(learner.step)),
        "parameter_hash": parameter_hash(learner.trainable),
        "dropped_prompts": run.inputs.prompts.dropped,
        "model": str(model),
        "metrics": str(folder.place / "metrics.jsonl"),
        "time/seconds": time.monotonic() - progress.started,
        "time/tokens_per_second": speed,
    }
    if has_evaluation and process.is_main():
        lines = read_metrics(folder.path)
        if collapse := find_collapse(lines):
            summary["format_collapse"] = collapse
        measured = list(filter(None, map(evaluation_metrics, lines)))
        base = progress.base["metrics"] if progress.base else None
        summary |= {"base": base, "trained": measured[-1]}
    if progress.best:
        step, value = progress.best
        summary["best"] = {"step": step, progress.best_metric: value}
    with writing_results(folder.path / "summary.json"):
        summary = opened.log.finish(summary)
    keeper.publish()
    opened.display.say(f"parameter hash {summary['parameter_hash']}")
    has_adapter = pretrained.model.config.lora is not None
    files = [REPORT] * (folder.path / REPORT).is_file() + ["model"] + ["adapter"] * has_adapter
    opened.display.say(f"{folder.place}: {', '.join(files)}, metrics.jsonl, samples")
    return summary
