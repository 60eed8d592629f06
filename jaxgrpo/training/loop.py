"""`jaxgrpo.train`: the loop over steps, with evaluation, logs, checkpoints and a clean stop.

collect (prompts -> sample -> reward) -> prepare (score, advantage) -> update -> log
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
from safetensors import SafetensorError

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config.files import Config, make_config
from jaxgrpo.config.tables import TrainOverrides
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import finalise, merge
from jaxgrpo.core.types import Learner, Params, Stream
from jaxgrpo.data.sources import Rows
from jaxgrpo.data.storage import Place
from jaxgrpo.evaluation.evaluate import Evaluate
from jaxgrpo.models import sharding
from jaxgrpo.models.hf import texts
from jaxgrpo.rewards import Rewards
from jaxgrpo.rollout.judging import sample_rows
from jaxgrpo.training import fingerprints, memory, opening, parameters
from jaxgrpo.training.checkpoints import Checkpoints, parameter_hash
from jaxgrpo.training.export import export
from jaxgrpo.training.inputs import (
    with_logged,
)
from jaxgrpo.training.processes import peers, process
from jaxgrpo.training.processes.recovery import Keeper, Progress
from jaxgrpo.training.processes.watchdog import Watchdog
from jaxgrpo.training.records.console import Display
from jaxgrpo.training.records.folder import (
    RunFolder,
    evaluation_metrics,
    plain,
    read_metrics,
    read_samples,
)
from jaxgrpo.training.records.logbook import Clock, Logbook
from jaxgrpo.training.replay import SavedRollouts
from jaxgrpo.training.resets import is_better, make_resetter, refuse_unknown_best, see
from jaxgrpo.training.setup import Setup
from jaxgrpo.training.stored_policy import base_params, evaluator_for_run
from jaxgrpo.update.optimizer import current_rate

OnStep = Callable[[int, dict[str, float]], object]
"""Called after a step with its number and metrics."""


class Run(NamedTuple):
    """A finished run, read from its folder."""

    path: Place
    summary: dict[str, Any]
    learner: Learner
    stream: Stream

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
        step: str | int = "last",
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
      on_step: called after each step with its number and its metrics, as in metrics.jsonl.
      profile: trace a step that compiles nothing into RUN/profile, for TensorBoard or Perfetto.
      overrides: tables of the config, train={"steps": 20}, whose keys a type checker knows;
        **{"train.steps": 20}, which it does not, means the same.

    Returns: the run; its model is in `path / "model"`, as a Hugging Face folder.

    Raises: InputError before anything long starts; process.StopRequested after a stop signal, when
    everything is saved.
    """
    if resume not in (None, "auto"):
        raise InputError(f'resume = {resume!r}: use "auto", or leave it out for a new run')
    config = make_config(config, overrides, rewards, advantage)
    line = process.start(config.mesh.platform)
    options: dict[str, Any] = {"rewards": rewards, "advantage": advantage, "dataset": dataset}
    options |= {"rollouts": rollouts, "on_step": on_step, "profile": profile}
    return take(config, evaluator_for_run, resume=resume == "auto", devices_line=line, **options)


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
        fingerprints.refuse_unless_alike(lambda: fingerprints.config_facts(config))
        folder = stack.enter_context(RunFolder(config.run.dir, resume=resume))
        text = process.broadcast(folder.config)
        config, last_config = opening.refuse_other_config(folder.place, text, config)
        checkpoints = stack.enter_context(Checkpoints(folder.checkpoints, config.checkpoint.keep))
        step, meta = opening.newest_checkpoint(checkpoints, folder, last_config.checkpoint.every)
        run, inputs = opening.set_up(config, meta, setup_options)
        problem = opening.check_rewards(run, folder)
        if step is not None:
            learner, stream = opening.restore(run, checkpoints, step)
            run = run._replace(learner=learner, stream=stream)
        finished_steps = step or 0
        aside_folder = folder.rewind(None if step is None else finished_steps)
        opening.record(run, folder)
        display = Display(config.train.steps, finished_steps, active=shown and process.is_main())
        stack.enter_context(display.bar)
        opening.say_start(run, display, devices_line, problem, aside_folder)
        stack.enter_context(process.stop_signals(config.run.stop_grace))
        limits = (config.run.stop_grace, config.run.stuck_after)
        facts = (Progress.from_meta(meta), inputs, *opening.replay_and_adapters(run, meta))
        keeper = Keeper(config, folder, checkpoints, display, *facts)
        watch = stack.enter_context(Watchdog(display.under_way, keeper.saved_line, *limits))
        log = stack.enter_context(Logbook(config, folder, display, finished_steps))
        evaluate = evaluator(run) if config.eval.data is not None else None
        loop = _Loop(run, keeper, display, log, evaluate, watch, on_step, profile)
        learner, stream = loop.take_steps(run.learner, run.stream, finished_steps)
        watch.phase("end of the run")
        checkpoints.wait()
        summary = loop.finish(learner)
        process.meet()
    return Run(folder.place, summary, learner, stream)


@dataclasses.dataclass
class _Loop:
    """One run under way: what its steps share."""

    run: Setup
    keeper: Keeper
    display: Display
    log: Logbook
    evaluate: Evaluate | None
    watch: Watchdog
    on_step: OnStep | None
    profile: bool

    def __post_init__(self) -> None:
        self.config = self.run.config
        self.folder, self.progress = self.keeper.folder, self.keeper.progress
        self.reset = make_resetter(self.config, self.run.blueprint)

    def take_steps(
        self, learner: Learner, stream: Stream, finished_steps: int
    ) -> tuple[Learner, Stream]:
        """Steps finished_steps + 1 to train.steps. Raises: StopRequested after a stop signal."""
        last, progress = self.config.train.steps, self.progress
        self._forget_other_best()
        if self.evaluate and self.run.inputs.held_out:
            facts = fingerprints.evaluation_facts(self.config, self.run.inputs.held_out)
            self._evaluate_base(self.evaluate, facts, learner, finished_steps)
        for number in range(finished_steps + 1, last + 1):
            # The first step compiles.
            traced = self.profile and number == min(finished_steps + 2, last)
            trace = jax.profiler.trace(self.folder.path / "profile") if traced else None
            with trace or contextlib.nullcontext():
                learner, stream = self._step(learner, stream, number)
            stop = process.stop_requested(number)
            best = progress.best[0] if progress.best else None
            due = number in (best, last) or _due(number, self.config.checkpoint.every)
            if stop or due:
                self.watch.phase(f"step {number}: save")
                self.keeper.checkpoints.best = best
                self.keeper.save(learner, stream, number, must=bool(stop) or number == last)
            if stop and number < last:
                raise process.StopRequested(
                    f"stopped after step {number} of {last}, saved in {self.folder.place}; go on "
                    f"with: {self.keeper.resume_command()}"
                )
        return learner, stream

    def _forget_other_best(self) -> None:
        """Forgets a best step by another metric than checkpoint.keep_best, or by an unknown one."""
        progress, metric = self.progress, self.config.checkpoint.keep_best
        if progress.best and progress.best_metric != metric:
            step = progress.best[0]
            old_metric = progress.best_metric or "a metric that was not saved"
            self.display.say(f"step {step} was the best by {old_metric}: it is kept no longer")
            progress.best = None
        progress.best_metric = metric

    def _evaluate_base(
        self, evaluate: Evaluate, facts: dict[str, Any], learner: Learner, step: int
    ) -> None:
        """Evaluates the base before the first step, and again where something else is asked now.

        Raises: InputError where other questions would decide about resets of the reference.
        """
        run, progress, config = self.run, self.progress, self.config
        saved_base = progress.base or {"asked": {}, "metrics": {}}
        saved_facts, metrics = saved_base["asked"], saved_base["metrics"]
        # A start with other questions may have been killed before it saved a step.
        if saved_facts == facts and process.broadcast(self.folder.base) == plain(metrics):
            return
        if step == 0:
            values = self._measure(evaluate, run.sync(learner), 0)
            progress.resets = see(config, progress.resets, values)
            self.log.step(0, values)
        else:
            names = sorted(n for n in saved_facts | facts if saved_facts.get(n) != facts.get(n))
            changed = f"{', '.join(names)} changed" if names else "another base is logged"
            changed = changed if saved_facts else "the base's was not saved"
            if saved_facts and names and config.reference.reset_patience:
                raise InputError(
                    f"{changed} after step {step}, and evaluations decide when the reference is "
                    "reset: put back what the run began with, or set run.dir to another folder"
                )
            self.display.say(
                f"evaluation until step {step}: {changed}; the base is evaluated again, and "
                f"earlier numbers are eval_until_{step}/... in metrics.jsonl"
            )
            progress.best = None
            values = self._measure(evaluate, base_params(run), 0)
            lines = {0: values}
            if step == config.train.steps:
                lines[step] = self._measure(evaluate, run.sync(learner), step)
            self.log.replace_evaluations(step, lines)
        progress.base = {"asked": facts, "metrics": plain(evaluation_metrics(values))}

    def finish(self, learner: Learner) -> dict[str, Any]:
        """Writes the model as a Hugging Face folder, and the summary."""
        run, progress, model = self.run, self.progress, self.folder.place / "model"
        pretrained = run.inputs.pretrained
        ends = texts.end_fields(run.blueprint.sampling.stop_tokens)
        self.keeper.refuse_moved(self.config.train.steps)
        try:
            target = (self.folder.path, self.config, pretrained.folder)
            parameters.save(pretrained.model, learner, *target, pretrained.tokenizer, ends)
        except (OSError, SafetensorError) as error:
            raise process.NotSaved(f"{model} could not be written: {error}") from error
        speed = progress.tokens / progress.seconds if progress.seconds else None
        summary: dict[str, Any] = {
            "step": int(sharding.to_host(learner.step)),
            "parameter_hash": parameter_hash(learner.trainable),
            "dropped_prompts": run.inputs.prompts.dropped,
            "model": str(model),
            "metrics": str(self.folder.place / "metrics.jsonl"),
            "time/seconds": time.monotonic() - progress.started,
            "time/tokens_per_second": speed,
        }
        if self.evaluate and process.is_main():
            measured = list(filter(None, map(evaluation_metrics, read_metrics(self.folder.path))))
            base = progress.base["metrics"] if progress.base else None
            summary |= {"base": base, "trained": measured[-1]}
        if progress.best:
            step, value = progress.best
            summary["best"] = {"step": step, progress.best_metric: value}
        summary = self.log.finish(summary)
        self.keeper.publish()
        self.display.say(f"parameter hash {summary['parameter_hash']}")
        adapter = "" if pretrained.model.config.lora is None else "adapter, "
        files = f"model, {adapter}metrics.jsonl"
        self.display.say(f"{self.folder.place}: report.html, {files}, samples")
        return summary

    def _step(self, learner: Learner, stream: Stream, number: int) -> tuple[Learner, Stream]:
        clock = Clock(lambda phase: self.watch.phase(f"step {number}: {phase}"))
        run, progress, inputs = self.run, self.progress, self.run.inputs
        with self.keeper.saving(number, (learner, stream)):
            with clock("sample"):
                params = run.sync(learner)
            live_groups = functools.partial(run.live_groups, learner)
            stream, collected = run.collect(params, number - 1, stream, live_groups, clock)
        del params, live_groups  # what is sampled with makes room for the update
        memory.give_back(inputs.pretrained.mesh)
        rollouts, reward_log = collected.rollouts, collected.reward_log
        with clock("prepare"):
            learner, prepared = run.prepare(learner, rollouts)
        with clock("update"):
            learner, metrics = run.update(learner, prepared.batches)
            # Of all that was sampled, where `collect` and `prepare` count the same.
            metrics = merge(prepared.metrics, metrics) | collected.metrics
            values = finalise(sharding.to_host(metrics))
        values = with_logged(values, reward_log)
        values["learning_rate"] = float(sharding.to_host(current_rate(learner.opt_state)))
        values |= clock.seconds
        progress.tokens += values["num_tokens"]
        progress.seconds += values["time/step"]
        # Once per reward and run; rewards/NAME/errors counts the rest.
        for name, message in reward_log.messages.items():
            if name not in progress.reported:
                progress.reported.add(name)
                self.display.say(f'{message}\nleft unscored, as on_error = "unscored" says')
        last = number == self.config.train.steps
        if self.evaluate and (last or _due(number, self.config.eval.every)):
            values |= self._measure(self.evaluate, run.sync(learner), number)
        learner, progress.resets = self.reset(learner, progress.resets, number, values)
        values |= progress.resets.metrics(self.config)
        if number == 1 or _due(number, self.config.run.samples_every):
            weights = {reward.name: reward.weight for reward in run.rewards}
            prompts, tokenizer = inputs.prompts, inputs.pretrained.tokenizer
            data = (tokenizer, prompts.rows, rollouts, prepared.advantage, number)
            sampled = sample_rows(*data, reward_log.extra, prompts.mixture)
            self.log.samples(number, sampled, weights)
        if _due(number, self.config.run.rollouts_every):
            self.log.rollouts(number, sharding.to_host(rollouts))
        self.display.step(number, values)
        self.log.step(number, values)
        self.keeper.refuse_diverged(number, values)
        if self.on_step is not None:
            self.on_step(number, values)
        return learner, stream

    def _measure(self, evaluate: Evaluate, params: Params, number: int) -> dict[str, float]:
        """The metrics of an evaluation of the policy after step `number`, as they are logged."""
        began = time.monotonic()
        self.watch.phase(f"step {number}: evaluate")
        with self.keeper.saving(number):
            metrics = evaluate(params, self.run.stream.key, number).metrics
        self.display.evaluated(number, metrics)
        best, metric = self.progress.best, self.config.checkpoint.keep_best
        refuse_unknown_best(metric, metrics)
        if metric is not None and number > 0:
            value = metrics[metric.removeprefix("eval/")]
            if is_better(value, best[1] if best else None):
                self.progress.best = (number, value)
        named = {f"eval/{name}": value for name, value in metrics.items()}
        return named | {"time/evaluate": time.monotonic() - began}


def _due(number: int, interval: int) -> bool:
    return bool(interval) and number % interval == 0
