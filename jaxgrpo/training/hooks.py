"""What follows a step: evaluation, resets, files, logs and checks.

A hook takes the end of a step and returns it, with more metrics or another reference in it. Their
order, in `make_hooks`, matters: evaluations come first, since resets are decided by them; resets
before the log, which holds their count; the log before what may end the run, so that the step that
ended it is there to be read; a function of the user's last, since it gets all metrics.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxgrpo.advantages.streams import sums_scored
from jaxgrpo.core.errors import InputError, differing_names, one_line
from jaxgrpo.core.types import Learner, Params, Rollouts, Stream
from jaxgrpo.data.limits import ending_forks, restoring_process
from jaxgrpo.evaluation.diversity import absent_metrics
from jaxgrpo.evaluation.evaluate import Evaluate
from jaxgrpo.models import sharding
from jaxgrpo.rewards.protocol import RewardError
from jaxgrpo.rollout.goals import Goals, goal_metrics
from jaxgrpo.rollout.sample_rows import sample_rows
from jaxgrpo.training import fingerprints
from jaxgrpo.training.collecting.collector import Collected
from jaxgrpo.training.opening import OpenRun
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.folder import plain
from jaxgrpo.training.records.reading import evaluation_metrics
from jaxgrpo.training.records.report.record import RewardSum
from jaxgrpo.training.resets import is_better, make_resetter, refuse_unknown_best, see
from jaxgrpo.training.rewarding import say_failures
from jaxgrpo.training.stored_policy import policy_for_run
from jaxgrpo.update.work import count_step, split_scoring, step_flops

OnStep = Callable[[int, dict[str, float]], object]
"""Called after a step with its number and metrics."""


@dataclasses.dataclass(frozen=True)
class StepEnd:
    """A step that has been taken."""

    number: int
    learner: Learner
    stream: Stream
    collected: Collected
    advantage: Array  # [P, G], the mean over a sample's tokens
    values: dict[str, float]  # its metrics, as they are logged
    failure: Exception | None = None  # in its evaluation, or in what rewards logged

    def with_values(self, values: dict[str, float]) -> StepEnd:
        """The same with more metrics."""
        return dataclasses.replace(self, values=self.values | values)


Hook = Callable[[StepEnd], StepEnd]


def make_hooks(
    opened: OpenRun, evaluations: Evaluations | None, on_step: OnStep | None
) -> list[Hook]:
    """The hooks of a run, in order.

    Args:
      on_step: of the user's.
    """
    hooks: list[Hook] = [count_work(opened)]
    if evaluations is not None:
        hooks.append(evaluations.after_step)
    if (goals := opened.run.collector.source.goals) is not None:
        hooks.append(compare_goals(goals, opened.run.collector.summed_rewards))
    hooks += [reset_reference(opened), write_samples(opened), write_log(opened)]
    if on_step is not None:
        hooks.append(call_user(on_step, opened))
    return hooks


def is_due(number: int, interval: int) -> bool:
    """Whether a step is one of every so many; of none where that is 0."""
    return bool(interval) and number % interval == 0


def count_work(opened: OpenRun) -> Hook:
    """Adds up tokens, operations and seconds, and says once per reward what it failed with."""
    progress, display = opened.keeper.progress, opened.display
    blueprint = opened.run.blueprint
    scored = blueprint.chain.needs, blueprint.scored, blueprint.policy_model
    scoring = split_scoring(blueprint.scores, *scored)
    method = blueprint.model, blueprint.objective, blueprint.num_iterations
    work = count_step(*method, *scoring, is_drawn=not blueprint.trains_texts)

    def hook(step: StepEnd) -> StepEnd:
        progress.tokens += step.values["num_tokens"]
        progress.seconds += step.values["time/step"]
        # rewards/NAME/errors counts the rest.
        say_failures(display.say, step.collected.reward_log.messages, progress.reported)
        flops = step_flops(work, step.collected.rollouts, step.values)
        return step.with_values({"flops": flops})

    return hook


def compare_goals(
    goals: Goals, summed_rewards: Callable[[Rollouts], tuple[np.ndarray, np.ndarray]]
) -> Hook:
    """Measures the samples of each goal; `summed_rewards` as `Collector.summed_rewards`."""

    def hook(step: StepEnd) -> StepEnd:
        rollouts = step.collected.rollouts
        ordinal, advantage = sharding.to_host((rollouts.ordinal, step.advantage))
        reward, scored = summed_rewards(rollouts)
        return step.with_values(goal_metrics(goals, ordinal, reward, scored, advantage))

    return hook


def reset_reference(opened: OpenRun) -> Hook:
    """Resets the reference where that is due."""
    run, progress = opened.run, opened.keeper.progress
    reset = make_resetter(run.config.reference, run.config.eval.every, run.blueprint)

    def hook(step: StepEnd) -> StepEnd:
        learner, progress.resets = reset(step.learner, progress.resets, step.number, step.values)
        step = dataclasses.replace(step, learner=learner)
        return step.with_values(progress.resets.metrics(run.config.reference))

    return hook


def write_samples(opened: OpenRun) -> Hook:
    """Writes files of samples and rollouts where they are due."""
    keys, inputs, log = opened.run.config.run, opened.run.inputs, opened.log
    blueprint = opened.run.blueprint
    summing = RewardSum(blueprint.reward_weights or {}, sums_scored(blueprint.chain))
    prompts, tokenizer = inputs.prompts, inputs.pretrained.tokenizer
    prefixes = opened.run.collector.source.prefixes

    def hook(step: StepEnd) -> StepEnd:
        number, rollouts, reward_log = (step.number, *step.collected[:2])
        if number == 1 or is_due(number, keys.samples_every):
            rows = sample_rows(
                tokenizer,
                prompts.rows,
                rollouts,
                step.advantage,
                number,
                reward_log,
                prompts.mixture,
                prefixes,
            )
            log.samples(number, rows, summing)
        if is_due(number, keys.rollouts_every):
            log.rollouts(number, sharding.to_host(rollouts))
        return step

    return hook


def write_log(opened: OpenRun) -> Hook:
    """Shows and logs the metrics. Raises: process.Diverged where the weights are of no use."""

    def hook(step: StepEnd) -> StepEnd:
        opened.display.step(step.number, step.values)
        opened.log.step(step.number, step.values)
        opened.keeper.refuse_diverged(step.number, step.values)
        return step

    return hook


def check_on_step(on_step: Any) -> None:
    """Raises: InputError where it takes no step's number and metrics, or is async."""
    called = "it is called with a step's number and its metrics, def on_step(number, metrics)"
    if inspect.iscoroutinefunction(on_step):
        raise InputError(f"on_step is async, and nothing awaits it: {called}")
    try:
        if on_step is not None:
            inspect.signature(on_step).bind(1, {})
    except TypeError as error:
        raise InputError(f"on_step: {one_line(error)}: {called}") from None
    except ValueError:  # some functions written in C have no signature
        pass


def call_user(on_step: OnStep, opened: OpenRun) -> Hook:
    """Calls a function of the user's. Where it raises, or calls sys.exit, its step is saved, which
    is whole: by a run of one process, since of several it may raise in one."""
    keeper = opened.keeper

    def hook(step: StepEnd) -> StepEnd:
        opened.watch.phase(f"step {step.number}: on_step")
        try:
            with ending_forks("on_step"), restoring_process():
                on_step(step.number, step.values)
        except (Exception, SystemExit) as error:
            if jax.process_count() == 1:
                try:
                    keeper.save(step.learner, step.stream, step.number, must=True)
                except process.NotSaved as unsaved:
                    error.add_note(str(unsaved))
                line, command = keeper.saved_line(), keeper.resume_command()
                error.add_note(f"on_step raised after step {step.number}; {line}; go on: {command}")
            raise
        return step

    return hook


def make_evaluations(opened: OpenRun, evaluate: Evaluate | None) -> Evaluations | None:
    """The evaluations of a run; None where it has none."""
    forget_other_best(opened)
    if evaluate is None:
        opened.keeper.progress.owes_evaluation = False
        return None
    return Evaluations(opened, evaluate)


def forget_other_best(opened: OpenRun) -> None:
    """Forgets a best step by another metric than checkpoint.keep_best, or by an unknown one."""
    progress, metric = opened.keeper.progress, opened.run.config.checkpoint.keep_best
    if progress.best and progress.best_metric != metric:
        step = progress.best[0]
        old_metric = progress.best_metric or "a metric that was not saved"
        opened.display.say(f"step {step} was the best by {old_metric}: it is kept no longer")
        progress.forget_best()
    progress.best_metric = metric


class EvaluationStopped(Exception):
    """A stop signal has ended an evaluation."""


def refuse_stop(number: int) -> None:
    """Raises: EvaluationStopped after a stop signal. Args: number: of the step; all call it."""
    if process.stop_requested(number):
        raise EvaluationStopped


class Evaluations:
    """The evaluations of a run: of its base, after steps, and which of them was the best."""

    def __init__(self, opened: OpenRun, evaluate: Evaluate):
        self.opened, self.evaluate = opened, evaluate
        self.progress = opened.keeper.progress

    def after_step(self, step: StepEnd) -> StepEnd:
        """A hook: evaluates after the last step, and every eval.every steps.

        A stop signal, a scorer that fails or, in a run of one process, another failure ends the
        evaluation, so that the step is saved, and the next start makes it: but where it decides
        about a reset of the reference, which is a part of the step.
        """
        run, number = self.opened.run, step.number
        last = number == run.config.train.steps
        if not (last or is_due(number, run.config.eval.every)):
            return step
        if run.config.reference.reset_patience:
            with self.opened.keeper.saving(number):
                return step.with_values(self.measure(run.params_to_evaluate(step.learner), number))
        obey = functools.partial(refuse_stop, number)
        try:
            params = run.params_to_evaluate(step.learner)
            return step.with_values(self.measure(params, number, before_batch=obey))
        except Exception as error:
            in_all = isinstance(error, (EvaluationStopped, RewardError))
            if not in_all and jax.process_count() > 1:
                raise
            self.progress.owes_evaluation = True
            self.opened.display.say(f"step {number} is evaluated when the run goes on")
            failure = step.failure if isinstance(error, EvaluationStopped) else error
            return dataclasses.replace(step, failure=failure)

    def evaluate_owed(self, learner: Learner, step: int) -> None:
        """Evaluates the last step of the start before, whose evaluation was ended.

        Args:
          step: finished steps.
        """
        opened = self.opened
        if not self.progress.owes_evaluation:
            return
        # An earlier start may have made it, and saved no step since.
        if logged := process.broadcast(lambda: opened.folder.evaluation(step)):
            self.note_best(step, logged)
        else:
            values = self.measure_or_end(opened.run.params_to_evaluate(learner), step)
            opened.log.add_evaluation(step, values)
        self.progress.owes_evaluation = False

    def measure_or_end(self, params: Params, number: int) -> dict[str, float]:
        """As `measure`, before the first step of a start.

        Raises: process.RewardFailed where the scorer fails, process.StopRequested after a stop
          signal: the next start makes the evaluation.
        """
        keeper, last = self.opened.keeper, self.opened.run.config.train.steps
        obey = functools.partial(refuse_stop, number)
        try:
            with keeper.saving(number):
                return self.measure(params, number, before_batch=obey)
        except EvaluationStopped:
            raise process.StopRequested(
                f"stopped after step {number} of {last}, in its evaluation, which is made when the "
                f"run goes on; {keeper.saved_line()}; go on with: {keeper.resume_command()}"
            ) from None

    def measure(self, params: Params, number: int, **options: Any) -> dict[str, float]:
        """The metrics of an evaluation of the policy after step `number`, as they are logged;
        options are those of `Evaluate`."""
        began, opened = time.monotonic(), self.opened
        opened.watch.phase(f"step {number}: evaluate")
        evaluation = self.evaluate(params, opened.run.stream.key, number, **options)
        say_failures(opened.display.say, evaluation.messages, self.progress.reported)
        metrics = evaluation.metrics
        opened.display.evaluated(number, metrics)
        self.note_best(number, metrics)
        named = {f"eval/{name}": value for name, value in metrics.items()}
        return named | {"time/evaluate": time.monotonic() - began}

    def note_best(self, number: int, metrics: Mapping[str, Any]) -> None:
        """Remembers step `number` where none was better by checkpoint.keep_best; of logged metrics
        those that are not finite are None. An evaluation may lack the metric, as the accuracy of a
        format that no sample has: it is no best one then."""
        best, metric = self.progress.best, self.opened.run.config.checkpoint.keep_best
        if metric is not None and number > 0:
            value = metrics.get(metric.removeprefix("eval/"))
            if value is not None and is_better(value, best[1] if best else None):
                self.progress.replace_best(number, value)

    def refuse_unknown(self, metrics: Mapping[str, Any]) -> None:
        """Raises: InputError where no evaluation has a metric of the name by which steps are
        compared, or resets decided. That of the base may lack some that later ones have."""
        config = self.opened.run.config
        names = {*metrics, *absent_metrics(config.eval.formats)}
        refuse_unknown_best(config.checkpoint.keep_best, names)
        if config.reference.reset_patience:
            refuse_unknown_best(config.reference.reset_metric, names, "reference.reset_metric")

    def evaluate_base(self, learner: Learner, step: int) -> None:
        """Evaluates the base before the first step, and again where something else is asked now.

        Args:
          step: finished steps.

        Raises: InputError as `refuse_unknown`, and where other questions would decide about resets
          of the reference.
        """
        opened, run, progress = self.opened, self.opened.run, self.progress
        if run.inputs.held_out is None:
            return
        config, held_out = run.config, run.inputs.held_out
        facts = fingerprints.evaluation_facts(
            config.eval, config.scorer_name, config.measures_kl_to_base, held_out
        )
        saved_base = progress.base or {"asked": {}, "metrics": {}}
        saved_facts, metrics = saved_base["asked"], saved_base["metrics"]
        logged = plain(metrics)
        # A start with other questions may have been killed before it saved a step.
        if process.broadcast(
            lambda: saved_facts == facts and opened.folder.evaluation(0) == logged
        ):
            self.refuse_unknown(metrics)
            return
        if step == 0:
            values = self.measure_or_end(run.params_to_evaluate(learner), 0)
            self.refuse_unknown(evaluation_metrics(values))
            progress.resets = see(run.config.reference, progress.resets, values)
            opened.log.step(0, values)
        else:
            self._say_changed(saved_facts, facts, step)
            progress.forget_best()
            values = self.measure_or_end(policy_for_run(run).read_params(), 0)
            self.refuse_unknown(evaluation_metrics(values))
            opened.log.replace_evaluations(step, {0: values})
        progress.base = {"asked": facts, "metrics": plain(evaluation_metrics(values))}

    def evaluate_last(self, learner: Learner, step: int) -> None:
        """Evaluates the policy of a start that takes no step, where its step was logged without: it
        was not the last one then, as train.steps was more, or something else is asked now.

        Args:
          step: finished steps.
        """
        opened, run = self.opened, self.opened.run
        is_over = step >= run.config.train.steps
        if is_over and not process.broadcast(lambda: opened.folder.evaluation(step)):
            values = self.measure_or_end(run.params_to_evaluate(learner), step)
            opened.log.add_evaluation(step, values)

    def _say_changed(self, saved_facts: dict[str, Any], facts: dict[str, Any], step: int) -> None:
        """Says why the base is evaluated again.

        Raises: InputError where evaluations decide about resets of the reference.
        """
        names = differing_names(saved_facts, facts)
        changed = f"{', '.join(names)} changed" if names else "another base is logged"
        changed = changed if saved_facts else "the base's was not saved"
        if saved_facts and names and self.opened.run.config.reference.reset_patience:
            raise InputError(
                f"{changed} after step {step}, and evaluations decide when the reference is "
                "reset: put back what the run began with, or set run.dir to another folder"
            )
        self.opened.display.say(
            f"evaluation until step {step}: {changed}; the base is evaluated again"
        )
