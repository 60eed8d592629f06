"""`jaxgrpo.train`: the loop over steps, with evaluation, logs, checkpoints and a clean stop.

prompts -> sample -> reward -> prepare (score, advantage) -> update -> log
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxgrpo
from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config, config_of
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import finalise, merge
from jaxgrpo.core.types import TrainState
from jaxgrpo.evaluation.evaluate import Evaluate
from jaxgrpo.models import sharding
from jaxgrpo.models.hf import folders
from jaxgrpo.rollout.judging import sample_rows
from jaxgrpo.training import process
from jaxgrpo.training.checkpoints import Checkpoints, parameter_hash
from jaxgrpo.training.console import Display
from jaxgrpo.training.folder import RunFolder, evaluation_of, read_metrics, read_samples
from jaxgrpo.training.inputs import dropped_line, gold_problem, try_rewards, with_logged
from jaxgrpo.training.logbook import Logbook
from jaxgrpo.training.policy import evaluator_of, export
from jaxgrpo.training.resets import Resets, is_better, make_resetter, refuse_unknown_best, see
from jaxgrpo.training.setup import Setup, setup
from jaxgrpo.update.optimizer import current_rate


class Run(NamedTuple):
    """A finished run, read from its folder."""

    path: Path
    summary: dict[str, Any]
    state: TrainState

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one per step."""
        return read_metrics(self.path / "metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The rows of the newest file of samples."""
        return read_samples(self.path)

    def export(self, out: str | Path, step: str | int = "last", dtype: str | None = None) -> Path:
        """Writes a step's model as a Hugging Face folder; "best" by `checkpoint.keep_best`."""
        return export(self.path, out, step, dtype)


def train(
    config: Config | Mapping[str, Any] | str | Path,
    *,
    resume: str | None = None,
    rewards: Sequence[Callable[..., Any] | str] | Mapping[str, Any] | None = None,
    advantage: AdvantageTransform | None = None,
    dataset: Iterable[Any] | None = None,
    **overrides: Any,
) -> Run:
    """Trains as a config says, and writes everything into its run folder. Works in a notebook.

    Args:
      config: a Config, its tables as dicts, a TOML file, or a shipped config's name.
      resume: "auto" goes on from the newest checkpoint, or starts where there is none.
      rewards, advantage, dataset: Python objects instead of what the config names; the data
        set a datasets.Dataset or a list of dicts, read by the config's data keys.
      overrides: keys of the config, train={"steps": 20} or **{"train.steps": 20}.

    Returns: the run; its model is in `path / "model"`, as a Hugging Face folder.

    Raises: InputError before anything long starts; process.StopRequested after a stop signal, when
    everything is saved.
    """
    if resume not in (None, "auto"):
        raise InputError(f'resume = {resume!r}: use "auto", or leave it out for a new run')
    config = config_of(config, overrides, rewards, advantage)
    line = process.start(config.mesh.platform)
    given = {"rewards": rewards, "advantage": advantage, "dataset": dataset}
    return take(config, evaluator_of, resume=resume == "auto", opening=line, **given)


def take(
    config: Config,
    evaluator: Callable[[Setup], Evaluate],
    *,
    resume: bool = False,
    opening: str = "",
    shown: bool = True,
    **given: Any,
) -> Run:
    """Runs the loop, from the first step or from the newest checkpoint.

    Args:
      evaluator: makes the evaluation, where the config has eval.data.
      opening: printed first.
      shown: whether steps are shown in the terminal.
      given: of `setup`, beside the config.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(RunFolder(config.run.dir, resume=resume))
        _refuse_other_config(folder, config)
        checkpoints = stack.enter_context(Checkpoints(folder.checkpoints, config.checkpoint.keep))
        run = setup(config, **given)
        # A reward that cannot be called is found now and not after the first samples.
        tried = try_rewards(run.rewards, run.rows[0], run.tokenizer, config.train.steps)
        restored = checkpoints.latest() is not None
        state, meta = _restored(run, checkpoints) if restored else (run.state, {})
        run, done = run._replace(state=state), int(sharding.to_host(state.step))
        folder.rewind(done if restored else None)
        folder.write_config(configs.to_toml(config))
        folder.copy_code(config.own_files)
        display = Display(config.train.steps, done, active=shown and process.is_main())
        stack.enter_context(display.bar)
        display.say(opening)
        _say_dropped(run, display)
        if problem := gold_problem(run.rewards, tried):
            display.say(problem)
        stack.enter_context(process.stop_signals())
        log = stack.enter_context(Logbook(config, folder, display, done))
        evaluate = evaluator(run) if config.eval.data is not None else None
        loop = _Loop(run, folder, checkpoints, display, log, evaluate, _Progress.of(meta))
        state = loop.take_steps(state, done)
        checkpoints.wait()
        summary = loop.finish(state)
    return Run(Path(config.run.dir), summary, state)


def _refuse_other_config(folder: RunFolder, config: Config) -> None:
    """A run goes on only with the config it began with, but for keys that may change."""
    text = folder.config()
    before = config if text is None else configs.from_dict(tomllib.loads(text))
    difference = configs.resume_difference(before, config)
    if difference:
        raise InputError(
            f"{folder.path}: the run began with another config; these keys may not change:\n  "
            + "\n  ".join(difference)
            + "\nset them back, or set run.dir to another folder"
        )


def _restored(run: Setup, checkpoints: Checkpoints) -> tuple[TrainState, dict[str, Any]]:
    """The newest state that was saved, and what was saved beside it."""
    # The first state makes room, and keeps its shapes: a device holds one, not two.
    jax.tree.map(lambda leaf: leaf.delete() if isinstance(leaf, jax.Array) else None, run.state)
    return checkpoints.restore(run.state)


def _say_dropped(run: Setup, display: Display) -> None:
    """Says which prompts were left out, of training and of evaluation."""
    if run.dropped:
        display.say(dropped_line(run.config, len(run.rows), run.dropped))
    if run.held_out and run.held_out.dropped:
        kept, dropped = len(run.held_out.rows), run.held_out.dropped
        display.say(f"eval.data: {dropped_line(run.config, kept, dropped)}")


@dataclasses.dataclass
class _Progress:
    """What a run remembers beside its state. Checkpoints hold the first two."""

    best: tuple[int, float] | None  # step and value, by checkpoint.keep_best
    resets: Resets
    started: float = dataclasses.field(default_factory=time.monotonic)
    reported: set[str] = dataclasses.field(default_factory=set)  # rewards whose failure was shown
    tokens: float = 0.0
    seconds: float = 0.0  # of steps

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> _Progress:
        """From what a checkpoint holds beside its state; {} at the start of a run."""
        best = tuple(meta["best"]) if meta.get("best") else None
        return cls(best, Resets(**meta.get("resets", {})))

    def meta(self) -> dict[str, Any]:
        """What is saved, as JSON values."""
        resets = self.resets._asdict()
        return {"jaxgrpo": jaxgrpo.__version__, "best": self.best, "resets": resets}


@dataclasses.dataclass
class _Loop:
    """One run under way: what its steps share."""

    run: Setup
    folder: RunFolder
    checkpoints: Checkpoints
    display: Display
    log: Logbook
    evaluate: Evaluate | None
    progress: _Progress

    def __post_init__(self) -> None:
        self.config = self.run.config
        self.reset = make_resetter(self.config, self.run.blueprint)

    def take_steps(self, state: TrainState, done: int) -> TrainState:
        """Steps done + 1 to train.steps. Raises: StopRequested after a stop signal."""
        last, progress = self.config.train.steps, self.progress
        if done == 0 and self.evaluate:
            values = self._evaluated(self.evaluate, state, 0)
            progress.resets = see(self.config, progress.resets, values)
            self.log.step(0, values)
        for number in range(done + 1, last + 1):
            state = self._step(state, number)
            stop = process.stop_requested(number)
            best = progress.best[0] if progress.best else None
            due = number in (best, last) or _due(number, self.config.checkpoint.every)
            if stop or due:
                self.checkpoints.best = best
                self.checkpoints.save(number, state, progress.meta())
            if stop and number < last:
                self.checkpoints.wait()
                source = self.config.source or self.folder.path / "config.toml"
                raise process.StopRequested(
                    f"stopped after step {number} of {last}, saved in {self.folder.path}; go on "
                    f"with: jaxgrpo train {source} --resume auto (and the same --set)"
                )
        return state

    def finish(self, state: TrainState) -> dict[str, Any]:
        """Writes the model as a Hugging Face folder, and the summary."""
        run, progress, model = self.run, self.progress, self.folder.path / "model"
        ends = folders.end_fields(run.blueprint.sampling.stop_tokens)
        folders.save_model(model, run.model, state.trainable, run.tokenizer, ends)
        speed = progress.tokens / progress.seconds if progress.seconds else None
        summary: dict[str, Any] = {
            "step": int(sharding.to_host(state.step)),
            "parameter_hash": parameter_hash(state.trainable),
            "dropped_prompts": run.dropped,
            "model": str(model),
            "metrics": str(self.folder.path / "metrics.jsonl"),
            "time/seconds": time.monotonic() - progress.started,
            "time/tokens_per_second": speed,
        }
        if self.evaluate and process.is_main():
            measured = list(filter(None, map(evaluation_of, read_metrics(self.folder.path))))
            summary |= {"base": measured[0], "trained": measured[-1]}
        if progress.best:
            step, value = progress.best
            summary["best"] = {"step": step, self.config.checkpoint.keep_best: value}
        summary = self.log.finish(summary)
        self.display.say(f"parameter hash {summary['parameter_hash']}")
        self.display.say(f"{self.folder.path}: report.html, model, metrics.jsonl, samples")
        return summary

    def _step(self, state: TrainState, number: int) -> TrainState:
        clock, run, progress = _Clock(), self.run, self.progress
        with clock("sample"):
            prompts, state = run.select(state)
            rollouts = run.sample(run.sync(state), prompts, state.key)
            jax.block_until_ready(rollouts.completion_tokens)
        with clock("reward"):
            rollouts, said = run.reward(rollouts)
        with clock("prepare"):
            state, prepared = run.prepare(state, rollouts)
        with clock("update"):
            state, metrics = run.update(state, prepared.batch)
            values = finalise(sharding.to_host(merge(prepared.metrics, metrics)))
        values = with_logged(values, said)
        values["learning_rate"] = float(sharding.to_host(current_rate(state.opt_state)))
        values |= clock.seconds
        progress.tokens += values["num_tokens"]
        progress.seconds += values["time/step"]
        # Once per reward and run; rewards/NAME/errors counts the rest.
        for name, message in said.messages.items():
            if name not in progress.reported:
                progress.reported.add(name)
                self.display.say(f'{message}\nleft unscored, as on_error = "unscored" says')
        last = number == self.config.train.steps
        if self.evaluate and (last or _due(number, self.config.eval.every)):
            values |= self._evaluated(self.evaluate, state, number)
        state, progress.resets = self.reset(state, progress.resets, number, values)
        values |= progress.resets.metrics(self.config)
        if number == 1 or _due(number, self.config.run.samples_every):
            weights = {reward.name: reward.weight for reward in run.rewards}
            drawn = (run.tokenizer, run.rows, rollouts, prepared.advantage)
            self.log.samples(number, sample_rows(*drawn, number, said.extra), weights)
        self.display.step(number, values)
        self.log.step(number, values)
        return state

    def _evaluated(self, evaluate: Evaluate, state: TrainState, number: int) -> dict[str, float]:
        """The metrics of an evaluation after step `number`, as they are logged."""
        began = time.monotonic()
        metrics = evaluate(self.run.sync(state), state.key, number).metrics
        self.display.evaluated(number, metrics)
        best, metric = self.progress.best, self.config.checkpoint.keep_best
        refuse_unknown_best(metric, metrics)
        if metric is not None and number > 0:
            value = metrics[metric.removeprefix("eval/")]
            if is_better(value, best[1] if best else None):
                self.progress.best = (number, value)
        named = {f"eval/{name}": value for name, value in metrics.items()}
        return named | {"time/evaluate": time.monotonic() - began}


class _Clock:
    """Wall-clock seconds of the phases of a step, as metrics."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        spent = time.monotonic() - began
        self.seconds[f"time/{phase}"] = spent
        self.seconds["time/step"] = self.seconds.get("time/step", 0.0) + spent


def _due(number: int, every: int) -> bool:
    return bool(every) and number % every == 0
