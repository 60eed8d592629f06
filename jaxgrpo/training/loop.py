"""`jaxgrpo.train`: the loop over steps, with evaluation, logs, checkpoints and a clean stop.

prompts -> sample -> reward -> prepare (score, advantage) -> update -> log

How a run begins, or goes on from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
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
from jaxgrpo.core.types import Rollouts, TrainState
from jaxgrpo.evaluation.evaluate import Evaluate
from jaxgrpo.models import sharding
from jaxgrpo.models.hf import folders
from jaxgrpo.rewards import RewardLog
from jaxgrpo.rollout.judging import sample_rows
from jaxgrpo.training import process
from jaxgrpo.training.checkpoints import Checkpoints, parameter_hash
from jaxgrpo.training.console import Display
from jaxgrpo.training.export import export, is_better, refuse_unknown_best
from jaxgrpo.training.folder import RunFolder, read_metrics, read_samples
from jaxgrpo.training.inputs import dropped_line, try_rewards, with_logged
from jaxgrpo.training.logbook import Logbook
from jaxgrpo.training.policy import evaluator_of
from jaxgrpo.training.resets import Resets, make_resetter, see
from jaxgrpo.training.setup import Setup, setup
from jaxgrpo.update.optimizer import current_rate
from jaxgrpo.update.prepare import Prepared


class Run(NamedTuple):
    """A finished run, as its folder tells of it."""

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
      rewards, advantage, dataset: Python objects in the place of what the config names; the data
        set a datasets.Dataset or a list of dicts, read by the config's data keys.
      overrides: keys of the config, train={"steps": 20} or **{"train.steps": 20}.

    Returns: the run; its model stands in `path / "model"` as a Hugging Face folder.

    Raises: InputError before anything long starts; runtime.StopRequested after a stop signal, when
    everything is saved.
    """
    if resume not in (None, "auto"):
        raise InputError(f'resume = {resume!r}: use "auto", or leave it out for a new run')
    config = config_of(config, overrides, rewards, advantage)
    line = process.start(config.mesh.platform)

    def make() -> Setup:
        return setup(config, rewards=rewards, advantage=advantage, dataset=dataset)

    return take(config, make, evaluator_of, resume=resume == "auto", opening=line)


def take(
    config: Config,
    make: Callable[[], Setup],
    evaluator: Callable[[Setup], Evaluate],
    *,
    resume: bool = False,
    opening: str = "",
    shown: bool = True,
) -> Run:
    """Takes one run from its first or restored step to its last: `train` without what precedes it.

    Args:
      make: builds the run; called once its folder is known to be usable.
      evaluator: makes the evaluation, where the config has eval.data.
      opening: printed first.
      shown: whether steps are shown in the terminal.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(RunFolder(config.run.dir, resume=resume))
        refuse_other_config(folder, config)
        checkpoints = stack.enter_context(Checkpoints(folder.checkpoints, config.checkpoint.keep))
        run = make()
        # A reward that cannot be called is found now and not after the first samples.
        try_rewards(run.rewards, run.rows[0], run.tokenizer, config.train.steps)
        state, done, meta = first_or_restored(run, checkpoints)
        run = run._replace(state=state)
        begin(folder, config, None if checkpoints.latest() is None else done)
        display = stack.enter_context(
            Display(config.train.steps, done, active=shown and jax.process_index() == 0)
        )
        display.say(opening)
        _say_dropped(run, display)
        stack.enter_context(process.stop_signals())
        log = stack.enter_context(Logbook(config, folder, display, done))
        evaluate = evaluator(run) if config.eval.data is not None else None
        loop = _Loop(run, folder, checkpoints, display, log, evaluate)
        loop.recall(meta)
        state = loop.take_steps(state, done)
        checkpoints.wait()
        summary = loop.finish(state)
    return Run(Path(config.run.dir), summary, state)


def _say_dropped(run: Setup, display: Display) -> None:
    """Says which prompts were left out, of training and of evaluation."""
    if run.dropped:
        display.say(dropped_line(run.config, len(run.rows), run.dropped))
    if run.held_out and run.held_out.dropped:
        kept, dropped = len(run.held_out.rows), run.held_out.dropped
        display.say(f"eval.data: {dropped_line(run.config, kept, dropped)}")


class _Loop:
    """One run under way: what its steps share."""

    def __init__(
        self,
        run: Setup,
        folder: RunFolder,
        saved: Checkpoints,
        display: Display,
        log: Logbook,
        evaluate: Evaluate | None,
    ):
        self.run, self.folder, self.checkpoints, self.display = run, folder, saved, display
        self.log = log
        self.config = run.config
        self.evaluate = evaluate
        self.best: tuple[int, float] | None = None  # step and value, by checkpoint.keep_best
        self.resets = Resets()
        self.reset = make_resetter(self.config, run.blueprint)
        self.started = time.monotonic()
        self.reported: set[str] = set()  # rewards whose failure was shown
        self.tokens = 0.0
        self.seconds = 0.0

    def recall(self, meta: Mapping[str, Any]) -> None:
        """Takes up what a checkpoint says beside its state; nothing where there is none."""
        self.best = tuple(meta["best"]) if meta.get("best") else None
        self.resets = Resets(**meta.get("resets", {}))

    def take_steps(self, state: TrainState, done: int) -> TrainState:
        last = self.config.train.steps
        if done == 0 and self.evaluate:
            values = self._measure(state, 0)
            self.resets = see(self.config, self.resets, values)
            self.log.step(0, values)
        for number in range(done + 1, last + 1):
            state = self._step(state, number)
            stop = process.stop_requested(number)
            is_best = self.best is not None and self.best[0] == number
            due = is_best or _due(number, self.config.checkpoint.every)
            if stop or number == last or due:
                self._save(state, number)
            if stop and number < last:
                self.checkpoints.wait()
                raise process.StopRequested(self._how_to_go_on(number))
        return state

    def _save(self, state: TrainState, number: int) -> None:
        self.checkpoints.best = self.best[0] if self.best else None
        meta = {"jaxgrpo": jaxgrpo.__version__, "best": self.best, "resets": self.resets._asdict()}
        self.checkpoints.save(number, state, meta)

    def finish(self, state: TrainState) -> dict[str, Any]:
        """The model as a Hugging Face folder, and the summary."""
        model = self.folder.path / "model"
        folders.save_model(
            model,
            self.run.model,
            state.trainable,
            self.run.tokenizer,
            folders.end_fields(self.run.blueprint.sampling.stop_tokens),
        )
        summary: dict[str, Any] = {
            "step": int(sharding.to_host(state.step)),
            "parameter_hash": parameter_hash(state.trainable),
            "dropped_prompts": self.run.dropped,
            "model": str(model),
            "metrics": str(self.folder.path / "metrics.jsonl"),
            "time/seconds": time.monotonic() - self.started,
            "time/tokens_per_second": self.tokens / self.seconds if self.seconds else None,
        }
        if self.evaluate and process.is_main():
            base, trained = _evaluations(self.folder)
            summary |= {"base": base, "trained": trained}
        if self.best:
            summary["best"] = {"step": self.best[0], self.config.checkpoint.keep_best: self.best[1]}
        summary = self.log.finish(summary)
        self.display.say(f"parameter hash {summary['parameter_hash']}")
        self.display.say(f"{self.folder.path}: report.html, model, metrics.jsonl, samples")
        return summary

    def _step(self, state: TrainState, number: int) -> TrainState:
        clock, run = _Clock(), self.run
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
        self.tokens += values["num_tokens"]
        self.seconds += values["time/step"]
        self._report(said)
        if self.evaluate and self._evaluates(number):
            values |= self._measure(state, number)
        state, self.resets = self.reset(state, self.resets, number, values)
        values |= self.resets.metrics(self.config)
        self._log(number, rollouts, prepared, values, said.extra)
        return state

    def _report(self, said: RewardLog) -> None:
        """Shows what a reward raised, once per run; rewards/NAME/errors counts the rest."""
        for name, message in said.messages.items():
            if name not in self.reported:
                self.reported.add(name)
                self.display.say(f'{message}\nleft unscored, as on_error = "unscored" says')

    def _log(
        self,
        number: int,
        rollouts: Rollouts,
        prepared: Prepared,
        values: dict[str, float],
        extra: Mapping[str, Sequence[Any]],
    ) -> None:
        if _due(number, self.config.run.samples_every) or number == 1:
            weights = {reward.name: reward.weight for reward in self.run.rewards}
            rows = sample_rows(
                self.run.tokenizer, self.run.rows, rollouts, prepared.advantage, number, extra
            )
            self.log.samples(number, rows, weights)
        self.display.step(number, values)
        self.log.step(number, values)

    def _evaluates(self, number: int) -> bool:
        return number == self.config.train.steps or _due(number, self.config.eval.every)

    def _measure(self, state: TrainState, number: int) -> dict[str, float]:
        began = time.monotonic()
        evaluate = self.evaluate
        assert evaluate is not None
        metrics = evaluate(self.run.sync(state), state.key, number).metrics
        self.display.evaluated(number, metrics)
        self._note_best(number, metrics)
        named = {f"eval/{name}": value for name, value in metrics.items()}
        return named | {"time/evaluate": time.monotonic() - began}

    def _note_best(self, number: int, metrics: Mapping[str, float]) -> None:
        metric = self.config.checkpoint.keep_best
        refuse_unknown_best(metric, metrics)
        if metric is None or number == 0:
            return
        value = metrics[metric.removeprefix("eval/")]
        if is_better(value, self.best[1] if self.best else None):
            self.best = (number, value)

    def _how_to_go_on(self, number: int) -> str:
        source = self.config.source or self.folder.path / "config.toml"
        return (
            f"stopped after step {number} of {self.config.train.steps}, saved in {self.folder.path}"
            f"; go on with: jaxgrpo train {source} --resume auto (and the same --set)"
        )


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


def _evaluations(folder: RunFolder) -> tuple[dict[str, float], dict[str, float]]:
    """The first and the last evaluation of a run, by their logged lines."""
    measured = [
        {name.removeprefix("eval/"): value for name, value in line.items() if "eval/" in name}
        for line in read_metrics(folder.path / "metrics.jsonl")
    ]
    measured = [line for line in measured if line]
    return measured[0], measured[-1]


def _due(number: int, every: int) -> bool:
    return bool(every) and number % every == 0


def begin(folder: RunFolder, config: Config, done: int | None) -> None:
    """Drops what was logged behind the restored step, and records the config and own code."""
    folder.rewind(done)
    folder.write_config(configs.to_toml(config))
    folder.copy_code(config.own_files)


def refuse_other_config(folder: RunFolder, config: Config) -> None:
    """A run goes on only with the config it began with, but for keys that may change."""
    text = folder.config()
    if text is None:
        return
    before = configs.from_dict(tomllib.loads(text))
    difference = configs.resume_difference(before, config)
    if difference:
        raise InputError(
            f"{folder.path}: the run began with another config; these keys may not change:\n  "
            + "\n  ".join(difference)
            + "\nset them back, or set run.dir to another folder"
        )


def first_or_restored(
    run: Setup, checkpoints: Checkpoints
) -> tuple[TrainState, int, dict[str, Any]]:
    """State, finished steps and what was saved beside it."""
    if checkpoints.latest() is None:
        return run.state, 0, {}
    wanted = jax.tree.map(_without_values, run.state)
    # The first state makes room: a device holds one, not two.
    jax.tree.map(lambda leaf: leaf.delete() if isinstance(leaf, jax.Array) else None, run.state)
    state, meta = checkpoints.restore(wanted)
    return state, int(sharding.to_host(state.step)), meta


def _without_values(leaf: Any) -> Any:
    """The shape of an array on devices, and where it lies; an array of the host as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
