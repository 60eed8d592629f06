"""`jaxgrpo compare EXPERIMENT.toml`: every run, then tables, charts and a CSV file.

The runs are taken one after the other in one process, so that they share inputs and programs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.typing import ArrayLike
from rich.console import Console

from jaxgrpo.config import methods
from jaxgrpo.config.files import flat, to_tables
from jaxgrpo.core.errors import ConfigError, InputError, differing_names, refusing
from jaxgrpo.core.scores import OF_ANSWERS
from jaxgrpo.core.types import Params
from jaxgrpo.data.storage import write_atomically
from jaxgrpo.evaluation.evaluate import Answers, Evaluate, Evaluation
from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.experiments.compare import numbers, report, results
from jaxgrpo.experiments.compare.experiment import Case, Experiment
from jaxgrpo.experiments.compare.results import Outcomes
from jaxgrpo.experiments.sections import Section
from jaxgrpo.models import sharding
from jaxgrpo.rollout import prefixes
from jaxgrpo.training import loop
from jaxgrpo.training.collecting import experience
from jaxgrpo.training.collecting.growing import brought_fields, make_trees
from jaxgrpo.training.inputs import load_rows, local_time
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.console import Document, telling
from jaxgrpo.training.records.report.html import check_can_draw
from jaxgrpo.training.rewarding import resolve_rewards
from jaxgrpo.training.setup import Shared
from jaxgrpo.training.stored_policy import evaluator_for_run, read_run
from jaxgrpo.training.teachers import method_scores


def compare(path: str | Path, dry_run: bool = False, as_json: bool = False) -> int | Document:
    """Takes the runs that are not finished and reports all of them. Returns the exit code.

        DIR/experiment.toml   the file, as it was
        DIR/differences.md    the keys in which the arms' configs differ
        DIR/runs/ARM/lr_RATE/seed_SEED   each run, as `jaxgrpo train` leaves it
        DIR/results.csv       arm, lr, seed, metric, value
        DIR/tables.md         the same bytes for the same runs
        DIR/report.html

    Args:
      path: the file, or a shipped experiment's name.
      dry_run: only checks the file, the configs, own code of methods and what `dir` holds, and
        shows the plan; models and data are checked when runs begin.
      as_json: returns plan and result as numbers in place of the tables.
    Raises: InputError with all problems before the first run, and before anything is written.
    """
    console = Console(highlight=False)
    experiment = experiments.load(path)
    cases = experiments.make_cases(experiment)
    check_can_draw("report.html needs", "read results.csv")
    differing = report.difference_section(experiments.differences(cases))
    if not as_json:
        _show_plan(console, experiment, cases, differing)
    finished_paths = find_finished(console, experiment, cases)
    plan = numbers.describe_plan(experiment, cases, finished_paths)
    if dry_run:
        _check_methods(experiment, cases)
        return Document(plan) if as_json else 0
    finished_cases = take_all(
        console,
        experiment,
        cases,
        finished_paths,
        f"continue with: jaxgrpo compare {path}",
        lambda: _begin(experiment, differing),
    )
    if not process.is_main():
        return 0
    outcomes = results.read_all(finished_cases)
    sections = _finish(experiment, outcomes, differing)
    if not as_json:
        return _show_result(console, experiment.dir, sections)
    best = report.best_runs(experiment, outcomes)
    result = numbers.describe_result(experiment, outcomes, best)
    return Document({**plan, "finished": len(finished_cases), **result})


def find_finished(console: Console, experiment: Experiment, cases: Sequence[Case]) -> set[Path]:
    """The folders of the finished runs; warns if own code has changed since they were taken.

    Raises: InputError if a folder holds a run with another config.
    """
    finished = [case for case in cases if is_finished(case)]
    _warn_of_code(console, experiment.number_of_runs, finished)
    return {case.path for case in finished}


def is_finished(case: Case) -> bool:
    """Whether the run is complete: its summary is written last.

    Raises: InputError if its folder holds a run with another config, or one that another command
      finished.
    """
    if not (case.path / "config.toml").exists():
        return False
    saved_keys, case_keys = (
        flat(to_tables(config)) for config in (read_run(case.path)[1], case.config)
    )
    for key in ("run.dir", "run.allow_changes"):  # the whole folder may have been moved
        saved_keys[key] = case_keys[key]
    if (key := "data.template_time") not in case_keys:
        saved_keys.pop(key, None)
    changes = [
        f"\n  {key}: {saved_keys.get(key, 'not set')} -> {case_keys.get(key, 'not set')}"
        for key in differing_names(saved_keys, case_keys)
    ]
    if changes:
        raise InputError(
            f"{case.path}: holds a run with another config:{''.join(changes)}\n"
            "remove the folder to run it again, or set dir to another one"
        )
    if not (case.path / "summary.json").exists():
        return False
    last = case.path / "successes" / f"step_{case.config.train.steps}.json"
    if not last.exists():
        raise InputError(
            f"{case.path}: holds a finished run without {last.name}, as jaxgrpo train leaves it: a "
            "comparison also writes which prompts succeeded; remove the folder to run it again"
        )
    return True


def _show_plan(
    console: Console, experiment: Experiment, cases: Sequence[Case], differing: Section
) -> None:
    """What will be run, in what the arms differ, and which differences the seeds can show."""
    seeds = len(experiment.seeds) + len(experiment.tuning_seeds)
    best = experiment.judge_rates == "best"
    rates = "tuning seeds at all rates, the others at the best" if best else "at all rates"
    arms, counted_seeds = len(experiment.arms), f"{seeds} seed{'s' * (seeds != 1)}"
    runs = f"{experiment.number_of_runs} runs: {arms} arms, {counted_seeds}, {rates}"
    summary = f"{runs}; {experiment.metric}, control {experiment.control}"
    console.print(summary, markup=False)
    title = "the arms differ in this, and in nothing else"
    differing._replace(title=title, text=[report.describe_detectable(experiment)]).show(console)


def _check_methods(experiment: Experiment, cases: Sequence[Case]) -> None:
    """Builds the method of every arm, and traces its advantage, losses and penalties.

    Data are read where an advantage needs a column of them. A method that only an environment
    rewards is built when its run begins, which knows that reward.

    Raises: ConfigError with the problems of all arms, where own code fails.
    """
    problems = []
    for arm, config in {case.arm: case.config for case in cases if case.config.rewards}.items():
        try:
            rollout, loss = config.rollout, config.loss
            longest, refills = rollout.max_completion_tokens, rollout.refill is not None
            rewards = resolve_rewards(config.rewards, longest)
            recipe = methods.make_recipe(config.named_chain, rewards)
            chain = methods.make_chain(loss, recipe, refills)
            reward_names = {reward.name for reward in rewards}
            objective = methods.make_objective(loss, longest)
            scores = method_scores(config.scores, chain.needs, objective)
            grown = make_trees(config.tree, rollout, config.experience.share)
            brought = brought_fields(
                grown, rollout, config.experience.share, config.has_turns, chain.needs
            )
            sources = scores.keys() | OF_ANSWERS.keys() | reward_names | brought.keys()
            names = chain.needs - sources
            rows = load_rows(config.data)[0] if names else []
            columns = methods.needed_columns(names, rows, rewards, scores) if names else {}
            fields = {**columns, **brought}
            methods.trace_chain(rollout, chain, rewards, len(rows) or 1, fields, scores)
            methods.make_policy(rollout.prompts, rewards)
            experience.refuse(config.experience, rollout, rewards)
            if rollout.prefixes is not None:
                prefixes.check(rollout.prefixes, reward_names)
        except InputError as error:
            problems.append(f"arms.{arm}: {error}")
    if problems:
        raise ConfigError(str(experiment.source or "experiment"), problems)


def _warn_of_code(console: Console, number_of_runs: int, finished: Sequence[Case]) -> None:
    """Warns before further runs if own files have changed since the finished ones were taken."""
    is_unfinished = len(finished) < number_of_runs
    outdated = [case for case in finished if is_unfinished and results.has_other_code(case)]
    if outdated:
        console.print(
            f"warning: own code has changed since {len(outdated)} of {len(finished)} finished runs "
            f"were taken, first {outdated[0].path}; remove these runs to take them again",
            markup=False,
        )


def _begin(experiment: Experiment, differing: Section) -> None:
    folder = Path(experiment.dir)
    copied_file, source = folder / "experiment.toml", experiment.source
    where, remedy = f"dir = {folder} cannot be written", "set it to a folder that can"
    with refusing(lambda error: f"{where} ({error.strerror}): {remedy}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if source and not (copied_file.exists() and copied_file.samefile(source)):
            write_atomically(copied_file, Path(source).read_bytes())
        write_atomically(folder / "differences.md", differing.markdown())


def _finish(experiment: Experiment, outcomes: Outcomes, differing: Section) -> list[Section]:
    """Writes the files. Returns: the sections of the report."""
    folder = Path(experiment.dir)
    write_atomically(folder / "results.csv", results.csv_text(experiment, outcomes))
    results.check_complete(experiment.metric, outcomes)
    sections = report.sections(experiment, outcomes)
    page = report.render(experiment, outcomes, sections, differing)
    write_atomically(folder / "tables.md", report.markdown(sections))
    write_atomically(folder / "report.html", page)
    return sections


def _show_result(console: Console, folder: str, sections: Sequence[Section]) -> int:
    for section in sections:
        if not section.title.startswith("At learning rate"):  # those are in the files only
            section.show(console)
    files = f"{folder}: report.html, tables.md, results.csv"
    console.print(files, markup=False, soft_wrap=True)
    return 0


class Runner:
    """Takes runs, which share inputs, programs and the base's evaluation."""

    def __init__(self) -> None:
        self._shared = Shared()
        self._base: dict[Any, Evaluation] = {}  # of the seed under way
        self._seed: int | None = None

    def run(self, case: Case, template_time: str | None = None, shown: bool = False) -> None:
        """Takes a run to its end, from where a killed process left it, as `jaxgrpo train` would.

        Its checkpoints are removed at the end.

        Args:
          template_time: what its chat template writes, if it writes the time.
          shown: whether its steps are.
        """
        if case.seed != self._seed:  # runs come seed by seed
            self._base.clear()
            self._seed = case.seed
        config = case.config
        config = config.at_time(config.data.template_time or template_time)
        share = self._shared.for_config(config)
        with contextlib.chdir("."):  # a reward may change the folder that the next run begins in
            loop.take(
                config,
                lambda run: self._remembering(evaluator_for_run(run, share), case.path),
                resume=True,
                shown=shown,
                share=share,
            )
        if process.is_main():
            shutil.rmtree(case.path / "checkpoints", ignore_errors=True)

    def _remembering(self, evaluate: Evaluate, folder: Path) -> Evaluate:
        """Evaluates the base once per seed, and writes down how often each prompt succeeded."""

        def remembering(params: Params, key: ArrayLike, step: int, **options: Any) -> Evaluation:
            # Before the first step the parameters are those of the base, whatever the method.
            place = (id(evaluate), sharding.to_host(key).tobytes()) if step == 0 else None
            evaluation = self._base.get(place) or evaluate(params, key, step, **options)
            if place is not None:
                self._base[place] = evaluation
            write_successes(folder, step, evaluation.sampled)
            return evaluation

        return remembering


def write_successes(folder: Path, step: int, sampled: Answers) -> None:
    """successes/step_N.json: of how many samples, and how many were right, by prompt."""
    if process.is_main():
        counts = {"samples": sampled.right.shape[1], "correct": sampled.right.sum(1).tolist()}
        (folder / "successes").mkdir(exist_ok=True)
        write_atomically(folder / "successes" / f"step_{step}.json", json.dumps(counts) + "\n")


def take_all(
    console: Console,
    experiment: Experiment,
    cases: Sequence[Case],
    finished_paths: Collection[Path],
    how_to_continue: str,
    begin: Callable[[], None] = lambda: None,
    check: Callable[[Case], object] | None = None,
) -> list[Case]:
    """Takes every run that is not complete; refuses an unknown metric after the first one.

    Args:
      begin: called in the first process before the first run, once methods can be built.
      check: called with the first run, finished, and raises for a metric that it does not have;
        None: `results.check_metric`.

    Returns: all runs that count. Some of `cases` do not where seeds are judged at the best rates.
    Raises: process.StopRequested after a stop signal, once the run under way has saved its state.
    """
    line = process.start(cases[0].config.mesh.platform)
    _check_methods(experiment, cases)
    if process.is_main():
        begin()
    say = console.print if process.is_main() else lambda text: None
    say(line)
    check = check or functools.partial(results.check_metric, experiment)
    taker = _Taker(experiment, say, how_to_continue, check)
    taker.template_time = process.broadcast(lambda: _first_time(cases) or local_time())
    for stage in _stages(experiment, cases):
        taker.take(stage, finished_paths)
    counted_paths = {case.path for case in taker.finished_cases}
    return [case for case in cases if case.path in counted_paths]


def _stages(experiment: Experiment, cases: Sequence[Case]) -> Iterator[list[Case]]:
    """All runs at once, or those of the tuning seeds and then the others at the best rates."""
    if experiment.judge_rates == "all":
        yield list(cases)
        return
    tuning = [case for case in cases if case.seed in experiment.tuning_seeds]
    yield tuning
    best = process.broadcast(lambda: _best_rates(experiment, tuning))
    judged_cases = (case for case in cases if case.seed in experiment.seeds)
    yield [case for case in judged_cases if case.rate == best[case.arm]]


def _best_rates(experiment: Experiment, tuning: Sequence[Case]) -> dict[str, float]:
    outcomes = results.read_all(tuning)
    results.check_complete(experiment.metric, outcomes)
    return results.best_rates(experiment, outcomes)


class _Taker:
    """Takes runs, says how far it is, and stops where a signal asks for it."""

    def __init__(
        self,
        experiment: Experiment,
        say: Callable[[str], None],
        how_to_continue: str,
        check: Callable[[Case], object],
    ) -> None:
        self._experiment, self._say, self._how_to_continue = experiment, say, how_to_continue
        self._check = check
        self._runner, self._start_time, self._taken_now = Runner(), time.monotonic(), 0
        self.finished_cases: list[Case] = []
        # What the chat template writes, if it writes the time.
        self.template_time: str | None = None

    def take(self, stage: Sequence[Case], finished_paths: Collection[Path]) -> None:
        count = self._experiment.number_of_runs
        finished = [case for case in stage if case.path in finished_paths]
        if finished:
            self._check(finished[0])
            self._say(f"{len(finished)} of {count} runs are finished already")
        self.finished_cases += finished
        for case in stage:
            if case.path not in finished_paths:
                self._take_one(case, count)

    def _take_one(self, case: Case, count: int) -> None:
        start, first = time.monotonic(), self._taken_now == 0
        name = f"{len(self.finished_cases) + 1:4d} of {count}: {case.arm}, rate {case.rate:g}, "
        name += f"seed {case.seed}"
        # The first run compiles, so its steps are shown; then a line for each run is enough.
        quiet = contextlib.nullcontext() if first else telling(Console(highlight=False), name)
        try:
            with quiet:
                self._runner.run(case, self.template_time, shown=first)
        except process.StopRequested as stopped:
            reason = stopped.args[0].partition(";")[0]
            raise process.StopRequested(f"{reason}; {self._how_to_continue}") from None
        except process.RunEnded as error:
            remedy = _remedy(error, case, self._experiment, self._how_to_continue)
            raise type(error)(f"{error}. {remedy}") from None
        if first:
            self._check(case)
        if not self._experiment.keep_models and process.is_main():
            shutil.rmtree(case.path / "model")
        self.finished_cases.append(case)
        self._taken_now += 1
        now, runs_left = time.monotonic(), count - len(self.finished_cases)
        seconds_left = (now - self._start_time) / self._taken_now * runs_left
        self._say(f"{name}: {now - start:.1f} s, {_duration(seconds_left)} left")
        if process.stop_requested(0) and runs_left:
            raise process.StopRequested(f"stopped behind a run; {self._how_to_continue}")


def _remedy(
    error: process.RunEnded, case: Case, experiment: Experiment, how_to_continue: str
) -> str:
    """What to do about a run that has ended early. Its own message is for a run by itself, and
    `jaxgrpo train` writes no `successes`."""
    if isinstance(error, process.Diverged) and experiment.source is not None:
        return (
            f"A comparison takes every run of its file: take {case.rate:g} out of learning_rates, "
            f"or of arms.{case.arm}.learning_rates; finished runs are kept"
        )
    hint = ""
    if isinstance(error, process.RewardFailed):
        hint = f"; where the file of the reward has changed, remove {case.path} first"
    command = f"{how_to_continue}{hint}"
    return f"This is a run of a comparison, which jaxgrpo train does not finish: {command}"


def _first_time(cases: Iterable[Case]) -> str | None:
    """The time that chat templates write in the runs that have begun, if they write it."""
    configs = (read_run(case.path)[1] for case in cases if (case.path / "config.toml").exists())
    return next(
        (config.data.template_time for config in configs if config.data.template_time), None
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
