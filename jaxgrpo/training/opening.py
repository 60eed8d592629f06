"""What a run does before its first step, in this order (`open_run`):

1. its folder is locked, and its config compared with that of its last start
2. what it reads is read, and compared with what its checkpoint says
3. its rewards are called, before a state is restored
4. learner and stream are restored
5. what was logged after the checkpoint is put aside and the config is written: from here on the
   folder is that of this start
6. signals are caught, and what saves, watches and logs begins
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxgrpo.config import files as configs
from jaxgrpo.config import off_policy
from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import CheckpointKeys
from jaxgrpo.core.errors import InputError, refusing
from jaxgrpo.core.types import Learner, Stream, Waiting
from jaxgrpo.data import storage
from jaxgrpo.data.storage import Place
from jaxgrpo.models import sharding
from jaxgrpo.models.hf import families, texts
from jaxgrpo.training import fingerprints, parameters
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.collecting.replay import refuse_other_files, to_json
from jaxgrpo.training.inputs import Inputs, answers_line, dropped_line, shared_line
from jaxgrpo.training.method import attention_lines
from jaxgrpo.training.processes import process
from jaxgrpo.training.processes.recovery import MAX_UNSAVED, Keeper, Progress, describe
from jaxgrpo.training.processes.watchdog import Watchdog
from jaxgrpo.training.records.console import Display
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.records.logbook import Logbook
from jaxgrpo.training.records.reading import read_metrics, sample_steps
from jaxgrpo.training.rewarding import gold_problem
from jaxgrpo.training.setup import Setup, setup
from jaxgrpo.training.step_files import refuse_other_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that is about to take its next step."""

    run: Setup  # with the learner and the stream to go on from
    finished_steps: int
    folder: RunFolder
    checkpoints: Checkpoints
    display: Display
    keeper: Keeper
    watch: Watchdog
    log: Logbook


def open_run(
    stack: contextlib.ExitStack,
    config: Config,
    setup_options: Mapping[str, Any],
    *,
    resume: bool,
    devices_line: str,
    shown: bool,
) -> OpenRun:
    """Opens a run, in the order above.

    Args:
      stack: closes what was opened.
      setup_options: of `setup` beside the config.
      resume, devices_line, shown: as in `loop.take`.
    """
    process.broadcast(lambda: refuse_moved(config.source, config.run.dir) if resume else None)
    start = functools.partial(fingerprints.config_facts, config)
    fingerprints.refuse_other_start(start, config.teachers, config.scorer_name)
    folder = stack.enter_context(RunFolder(config.run.dir, resume=resume))
    text = process.broadcast(folder.config)
    config, last_config = refuse_other_config(folder.place, text, config)
    checkpoints = stack.enter_context(Checkpoints(folder.checkpoints, config.checkpoint.keep))
    step, meta = newest_checkpoint(checkpoints, folder.places, last_config.checkpoint)
    run, facts = set_up(config, meta, setup_options)
    problems = [check_rewards(run, folder, meta), *folder.problems(step, meta.get("logged"))]
    if step is not None:
        learner, stream = restore(run, checkpoints, step)
        run = run._replace(learner=learner, stream=stream)
    aside_folder = begin_folder(run, folder, step)
    display = Display(config.train.steps, step or 0, active=shown and process.is_main())
    stack.enter_context(display.showing_bar())
    say_start(run, display, devices_line, problems, aside_folder)
    stack.enter_context(process.stop_signals(config.run.stop_grace))
    progress, limit = Progress.from_meta(meta), config.train.stop_after_not_finite
    sources = *replay_and_adapters(run.inputs, meta), gives_objects(setup_options)
    keeper = Keeper(config.source, limit, folder, checkpoints, display, progress, facts, *sources)
    grace, stuck_after = config.run.stop_grace, config.run.stuck_after
    watch = Watchdog(display.under_way, keeper.saved_line, grace, stuck_after)
    log = Logbook(config.run, config.tracking, configs.to_toml(config), folder, display, step or 0)
    return OpenRun(
        run=run,
        finished_steps=step or 0,
        folder=folder,
        checkpoints=checkpoints,
        display=display,
        keeper=keeper,
        watch=stack.enter_context(watch),
        log=stack.enter_context(log),
    )


def refuse_moved(source: Path | None, path: str) -> None:
    """Refuses to continue the run of a folder whose config names another folder: it was moved or
    copied, or its run.dir is relative and the command comes from another working directory. A run
    would begin there again, or the one there would go on.

    Args:
      source: the config's file, if it has one.
      path: the config's run.dir.

    Raises: InputError, unless run.dir is not what the file says, as where --set gives it.
    """
    if source is None or source.name != "config.toml" or storage.is_url(path):
        return
    home, folder = source.parent, Path(storage.place(path))
    is_of_run = (home / "metrics.jsonl").is_file() and (home / "checkpoints").is_dir()
    if not is_of_run or folder.resolve() == home.resolve():
        return
    if configs.read_tables(source)[0].get("run", {}).get("dir") == path:
        raise InputError(
            f"{source} is of the run in {home}, and its run.dir = {path} is {folder}: add --set "
            f"run.dir={shlex.quote(str(home))} to continue the run in {home}; for a run in "
            f"{folder} give another config"
        )


def refuse_other_config(place: Place, text: str | None, config: Config) -> tuple[Config, Config]:
    """A run goes on only with the config it began with, but for keys that may change.

    Nor may it write its model over its base, or its config over a file of the user's.

    Args:
      text: the config.toml of the run folder `place`; None: there is none yet.

    Returns: the config, with the time of the run's first start, and that of its last start.
    """
    last_config = config
    if text is not None:
        last_config = configs.from_text(text, str(place / "config.toml"))
        is_written = text == configs.to_toml(last_config)
        process.broadcast(lambda: None if is_written else refuse_config_without_run(place))
    if None in (config.data.template_time, last_config.data.template_time):
        config = config.at_time(last_config.data.template_time)
    # Of process 0: paths of own code and inputs may be others elsewhere (`config_facts`).
    difference = process.broadcast(lambda: configs.resume_difference(last_config, config))
    if difference:
        raise InputError(
            f"{place}: the run began with another config; these keys may not change:\n  "
            + "\n  ".join(difference)
            + "\nset them back, or set run.dir to another folder"
        )
    has_adapters = bool(config.lora.rank or config.lora.path)
    process.broadcast(lambda: parameters.refuse_unwritable(config.bases, has_adapters, place))
    return config, last_config


def refuse_config_without_run(place: Place) -> None:
    """Raises: InputError where no run has begun in a folder, so that its config.toml is a file of
    the user's, which a run would replace. A run has its checkpoints' folder before its config."""
    if storage.is_url(place):  # a bucket has no empty folders
        return
    if not any((place / name).exists() for name in ("checkpoints", "metrics.jsonl")):
        raise InputError(
            f"{place / 'config.toml'}: no run has begun in this folder, and the config of a run "
            f"would replace the file: set run.dir to another folder, such as {place / 'run'}"
        )


def refuse_to_forget(place: Place, path: Place, most_steps: int) -> None:
    """Raises: InputError where a run has no checkpoint to go on from, and must have had one.

    A run that was killed before its first checkpoint was complete, or whose disk was full, may
    start again: it logs the same lines again. One that ended, whose folder of checkpoints is
    gone, or that has logged more steps than that, has lost what it could continue from.

    Args:
      place, path: of a `RunFolder`; of one in a bucket both may be the bucket's.
      most_steps: that a run may log before its first checkpoint is complete.
    """
    logged = [entry["step"] for entry in read_metrics(path)] + sample_steps(path)
    if not logged:
        return
    checkpoints = place / "checkpoints"
    # A bucket has no empty folders: one that is gone looks like one not yet begun.
    is_missing = not storage.is_url(place) and not checkpoints.is_dir()
    has_ended = (path / "summary.json").exists()
    if is_missing or has_ended or max(logged) > most_steps:
        raise InputError(
            f"{place} holds the metrics of {max(logged)} steps and no checkpoint to go on "
            f"from ({checkpoints} {'does not exist' if is_missing else 'holds none'}); "
            "starting at step 1 would do it all again: put the checkpoints back, or start "
            "again without --resume and with another run.dir, or move this folder away"
        )


def newest_checkpoint(
    checkpoints: Checkpoints, places: tuple[Place, Place], keys: CheckpointKeys
) -> tuple[int | None, dict[str, Any]]:
    """The step that a run continues from and what was saved beside it; (None, {}) at its start.

    Args:
      places: `RunFolder.places`.
      keys: `checkpoint` of its last start.

    Raises: InputError where it has lost what it could continue from, or all steps are damaged.
    """
    if process.broadcast(checkpoints.latest) is None:
        # Saves may have failed until the run ended, and another may have been under way.
        most_steps = (MAX_UNSAVED + 2) * keys.every
        process.broadcast(lambda: refuse_to_forget(*places, most_steps))
        return None, {}
    step = checkpoints.choose()
    return step, checkpoints.meta(step)


def set_up(
    config: Config, meta: Mapping[str, Any], setup_options: Mapping[str, Any]
) -> tuple[Setup, dict[str, Any]]:
    """A run, and what tells what it reads from something else; as its checkpoint says, and the same
    in all processes.

    Args:
      meta: what the checkpoint holds beside its arrays; {} where there is none.
      setup_options: of `setup`.
    """
    facts: dict[str, Any] = {}

    def check(inputs: Inputs) -> None:
        fingerprints.refuse_other_rows(inputs)
        facts.update(
            fingerprints.input_facts(
                inputs,
                config.data.chat_template,
                config.lora.path,
                config.teachers,
                config.own_files,
            )
        )
        if meta:
            pretrained = inputs.pretrained
            adapters = parameters.adapter_identity(pretrained.folder, pretrained.model)
            parameters.refuse_changed_adapters(pretrained.path, meta, adapters)
            paths = {"data.path": config.data.path, "model.path": config.model.path}
            changes = config.run, paths, meta["inputs"], facts
            process.broadcast(lambda: fingerprints.refuse_changes(*changes))

    return setup(config, check=check, **setup_options), facts


def check_rewards(run: Setup, folder: RunFolder, meta: Mapping[str, Any]) -> str | None:
    """Calls every reward, so that one that cannot be called is found before the first samples.

    Args: meta: what the checkpoint holds beside its arrays; {} where there is none.
    Returns: what to say of the gold answer; see `gold_problem`. None for a replay, whose rewards
      are in its files: that they are those of the folder is what can be tried.
    """
    has_begun = lambda: folder.config() is not None  # noqa: E731
    replay = run.inputs.replay
    process.broadcast(lambda: refuse_other_files(folder.replay(), has_begun(), replay, meta))
    if replay:
        return None
    return gold_problem(run.rewards, run.try_rewards())


def begin_folder(run: Setup, folder: RunFolder, step: int | None) -> Path | None:
    """Puts aside what was logged after a step, and writes what this start is made from.

    Returns: the folder of what was put aside. Raises: InputError where a file cannot be written.
    """
    with refusing(lambda error: f"run.dir cannot be written: {describe(error)}", OSError):
        aside_folder = folder.rewind(step)
        record(run, folder)
    return aside_folder


def record(run: Setup, folder: RunFolder) -> None:
    """Writes what a run is made from: its config, own code and the files that it replays.

    What run.allow_changes permits is permitted to this start alone.
    """
    if run.inputs.replay:
        folder.write_replay(to_json(run.inputs.replay))
    lasting_keys = dataclasses.replace(run.config.run, allow_changes=())
    folder.write_config(configs.to_toml(dataclasses.replace(run.config, run=lasting_keys)))
    folder.copy_code(run.config.own_files)


def replay_and_adapters(
    inputs: Inputs, meta: Mapping[str, Any]
) -> tuple[bool, dict[str, Any] | None]:
    """Whether a run replays saved rollouts, and what its checkpoints hold about adapters: what they
    held before, if there are any, as `set_up` has compared."""
    pretrained = inputs.pretrained
    adapters = meta.get("lora") or parameters.adapter_identity(pretrained.folder, pretrained.model)
    return bool(inputs.replay), adapters


def gives_objects(setup_options: Mapping[str, Any]) -> bool:
    """Whether a call from Python gives what no config holds, so that no command resumes its run.

    Args:
      setup_options: of `setup` beside the config.
    """
    names = ("rewards", "advantage", "dataset", "environment")
    has_objects = any(setup_options.get(name) is not None for name in names)
    return has_objects or bool(setup_options.get("tools"))


def restore(run: Setup, checkpoints: Checkpoints, step: int) -> tuple[Learner, Stream]:
    """The learner and the stream that were saved at a step.

    Raises: InputError as `Checkpoints.restore`, and as `refuse_missing_rows`.
    """
    first = parameters.to_save(run.learner, run.stream)
    # The first learner makes room, and keeps its shapes: a device holds one, not two.
    jax.tree.map(lambda leaf: leaf.delete() if isinstance(leaf, jax.Array) else None, first)
    (learner, stream), _ = checkpoints.restore(first, step)
    refuse_other_step(checkpoints.folder, step, int(sharding.to_host(learner.step)))
    refuse_missing_rows(stream.waiting, len(run.inputs.prompts.rows))
    return parameters.with_weights(learner, run.learner), stream


def refuse_missing_rows(waiting: Waiting, num_rows: int) -> None:
    """Raises: InputError where a group that waits for a step is of a row beyond the last one."""
    groups = [waiting.leftover, *waiting.ahead]
    rows = [room.row[room.ordinal >= 0] for room in groups if room is not None]
    last = max((int(part.max(initial=-1)) for part in rows), default=-1)
    if last >= num_rows:
        raise InputError(
            f"the data have {num_rows} rows, and a group that waits in the checkpoint is of row "
            f"{last}, counted from 0: put the rows back, or set run.dir to another folder"
        )


def say_start(
    run: Setup,
    display: Display,
    devices_line: str,
    problems: Sequence[str | None],
    aside_folder: Path | None,
) -> None:
    """Says what a run begins with: devices, its attention, prompts left out, or both trained on and
    held out, answers, problems, and where the lines and files are that it will write again.
    """
    display.say(devices_line)
    inputs, pretrained = run.inputs, run.inputs.pretrained
    unread = families.unread(pretrained.model.config)
    base = parameters.base_line(pretrained.adapter_path, pretrained.path, pretrained.revision)
    tokens = texts.tokenizer_line(pretrained.folder, pretrained.tokenizer)
    for line in filter(None, (unread, base, tokens)):
        display.say(line)
    for stage, line in attention_lines(
        run.blueprint.kernel, run.blueprint.teachers, run.engine
    ).items():
        display.say(f"{stage} {line}")
    for name, prompts in {"": inputs.prompts, "eval.data: ": inputs.held_out}.items():
        if prompts and prompts.dropped:
            line = dropped_line(prompts, run.config.rollout.max_prompt_tokens)
            display.say(f"{name}{line}")
    if line := shared_line(inputs, run.config.eval.prompts, bool(run.config.environment)):
        display.say(f"eval.data: {line}")
    if answers := run.collector.source.answers:
        display.say(f"reference answers: {answers_line(answers)}")
    if line := off_policy.low_bit_line(
        run.blueprint.chain, run.blueprint.objective, run.blueprint.sampling
    ):
        display.say(line)
    for problem in filter(None, problems):
        display.say(problem)
    if aside_folder is not None:
        display.say(f"what was logged after the checkpoint is in {aside_folder}")
