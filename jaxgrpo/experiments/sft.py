"""`jaxgrpo sft`: a supervised warm start. The reference answers of the data are the completions.

Its update is that of a run: one sample per prompt with the advantage 1, and -A log p as loss of a
token, is the mean negative log-likelihood of the answers. Data, model, optimizer, mesh and sizes
are those of the config; its rewards, method and evaluation are not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.config.own_code import python_name
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import finalise
from jaxgrpo.core.types import Learner, Rollouts, Stream, only_tokens
from jaxgrpo.models import sharding
from jaxgrpo.models.hf import texts
from jaxgrpo.models.sequences import token_is_likeliest
from jaxgrpo.planning.preview import find_earlier_run
from jaxgrpo.rollout.answers import answer_end_tokens, read_answers
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.rollout.selection import pad_prompts, row_of
from jaxgrpo.training import memory, opening, parameters
from jaxgrpo.training.checkpoints import Checkpoints, parameter_hash
from jaxgrpo.training.fingerprints import (
    config_facts,
    refuse_changed_base,
    refuse_other_start,
)
from jaxgrpo.training.pretrained import Pretrained
from jaxgrpo.training.processes import peers, process
from jaxgrpo.training.processes.process import StopRequested
from jaxgrpo.training.processes.recovery import Keeper, Progress, writing_results
from jaxgrpo.training.processes.watchdog import Watchdog
from jaxgrpo.training.records.console import Display, facts, show_config
from jaxgrpo.training.records.folder import RunFolder, refuse_unusable
from jaxgrpo.training.records.reading import read_metrics
from jaxgrpo.training.setup import Setup
from jaxgrpo.update.forward import params_of
from jaxgrpo.update.optimizer import current_rate

REWARD = "answers"
ROLLOUT = ("prompts_per_step", "max_prompt_tokens", "max_completion_tokens", "call_format")
STEPS = ("steps", "seed", "tokens_per_micro_batch", "remat", "stop_after_not_finite")
UNREAD = ("advantage", "reference", "scores", "experience", "tree", "atlas", "eval")
UNREAD_OF_DATA = ("answer_prefix", "answer_cuts", "max_answer_tokens", "completion")
"""Keys of a run, and of its table `data`, that are about samples and what scores them."""
LOGGED = ("loss", "grad_norm", "weights/norm", "weights/growth", "skipped_updates/not_finite")
"""Metrics of an update that a line of metrics.jsonl has beside those of the answers."""
LINES = 20  # about so many steps are shown


def main(
    config: str, resume: str | None = None, dry_run: bool = False, overrides: Sequence[str] = ()
) -> int:
    """Trains on the answers, or prints what would be trained. Returns the exit code."""
    sft_config = config_for(config, overrides)
    console = Console(highlight=False)
    console.print(process.start(sft_config.mesh.platform), soft_wrap=True)
    if dry_run:
        refuse_unusable(sft_config.run.dir, resume == "auto")
        earlier_run = find_earlier_run(sft_config) if resume == "auto" else None
        run_config, meta = (sft_config, {}) if earlier_run is None else earlier_run[:2]
        _show(console, opening.set_up(run_config, meta, SETUP)[0])
    else:
        train(console, sft_config, resume == "auto")
    return 0


def config_for(config: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a warm start, from that of a run; its folder ends with "-sft".

    Args:
      overrides: as in `config.files.load`; a run.dir in them is taken as it is.

    Raises: ConfigError with all problems.
    """
    run_config = configs.load(config, overrides)
    tables = configs.to_tables(run_config)
    if "run.dir" not in configs.named_keys(overrides):
        tables["run"]["dir"] = f"{run_config.run.dir.rstrip('/')}-sft"
    for name in UNREAD:
        tables.pop(name, None)
    for name in UNREAD_OF_DATA:
        tables["data"].pop(name, None)
    if not any(path.endswith(".csv") for path in run_config.data.paths):
        tables["data"].pop("delimiter", None)  # it was for eval.data
    tables["checkpoint"].pop("keep_best", None)
    tables |= {
        "train": {name: value for name, value in tables["train"].items() if name in STEPS},
        "rewards": [{"use": python_name(REWARD)}],
        "recipe": "sign",
        "loss": {"surrogate": {"use": "reinforce"}, "reduction": {"use": "token_mean"}},
        "rollout": {"group_size": 1} | {name: tables["rollout"][name] for name in ROLLOUT},
    }
    return configs.from_dict(tables, source=run_config.source)


def train(console: Console, config: Config, resume: bool = False) -> dict[str, Any]:
    """Trains as `config_for` says and writes RUN/model. Returns what summary.json holds.

    Raises: InputError before anything long starts; StopRequested after a stop signal, when the
    step is saved; NotSaved where it cannot be; Diverged where the weights are of no use.
    """
    peers.set_timeout(config.run.peer_timeout)
    with contextlib.ExitStack() as stack:
        refuse_other_start(lambda: config_facts(config), config.teachers, config.scorer_name)
        folder = stack.enter_context(RunFolder(config.run.dir, resume=resume))
        text = process.broadcast(folder.config)
        config, saved = opening.refuse_other_config(folder.place, text, config)
        checkpoints = stack.enter_context(Checkpoints(folder.checkpoints, config.checkpoint.keep))
        saved_step, meta = opening.newest_checkpoint(checkpoints, folder.places, saved.checkpoint)
        run, input_facts = opening.set_up(config, meta, SETUP)
        batch = make_answer_batches(run)
        if saved_step is not None:
            learner, stream = opening.restore(run, checkpoints, saved_step)
            run = run._replace(learner=learner, stream=stream)
        for problem in folder.problems(saved_step, meta.get("logged")):
            _say(console, problem)
        if (aside_folder := opening.begin_folder(run, folder, saved_step)) is not None:
            _say(console, f"what was logged after the checkpoint is in {aside_folder}")
        grace, limit = config.run.stop_grace, config.train.stop_after_not_finite
        stack.enter_context(process.stop_signals(grace))
        last, pretrained = config.train.steps, run.inputs.pretrained
        adapters = parameters.adapter_identity(pretrained.folder, pretrained.model)
        display, progress = Display(last, 0, process.is_main()), Progress.from_meta(meta)
        state = folder, checkpoints, display, progress, input_facts
        keeper = Keeper(config.source, limit, *state, adapters=adapters)
        watch = Watchdog(display.under_way, keeper.saved_line, grace, config.run.stuck_after)
        stack.enter_context(watch)
        numbers = range((saved_step or 0) + 1, last + 1)
        step = lambda learner, number: _step(run, learner, batch(number - 1))  # noqa: E731
        begin, every = (run.learner, run.stream), config.checkpoint.every
        learner, line = _take_steps(step, begin, keeper, watch, numbers, every)
        watch.phase("end of the run")
        # A run that was finished before has the metrics of its last step in its file.
        line = line or process.broadcast(lambda: [{}, *read_metrics(folder.path)][-1])
        summary = {"step": last, **line, "model": str(folder.place / "model")}
        summary["parameter_hash"] = parameter_hash(learner.trainable)
        ends = texts.end_fields(run.blueprint.sampling.stop_tokens)
        with writing_results(folder.place):
            keeper.refuse_moved(last)
            base = run.inputs, config.data.chat_template, input_facts
            process.broadcast(lambda: refuse_changed_base(*base))
            _write(folder, pretrained, learner, ends, summary)
        display.say(f"{summary['model']}: for model.path of a run")
        process.meet()
    return summary


def _take_steps(
    step: Callable[[Learner, int], tuple[Learner, dict[str, float]]],
    begin: tuple[Learner, Stream],
    keeper: Keeper,
    watch: Watchdog,
    numbers: range,
    every: int,
) -> tuple[Learner, dict[str, float]]:
    """The learner after the last step, and the metrics of that; {} where none was left to take.

    Args: every: after so many steps one is saved, and after the last.
    """
    (learner, stream), line, last = begin, {}, numbers.stop - 1
    for number in numbers:
        watch.phase(f"step {number}: update")
        learner, line = step(learner, number)
        with contextlib.suppress(OSError):  # it waits for space, and no step is saved without
            keeper.folder.write_metrics(number, line)
        keeper.refuse_diverged(number, line)
        if number == last or number % -(-last // LINES) == 0:
            keeper.display.say(f"step {number} of {last}: {_words(line)}")
        stop = process.stop_requested(number)
        if stop or number == last or number % every == 0:
            watch.phase(f"step {number}: save")
            keeper.save(learner, stream, number, must=bool(stop) or number == last)
        if stop and number < last:
            raise StopRequested(
                f"stopped after step {number} of {last}, saved in {keeper.folder.place}; continue "
                "with the same command and --resume auto"
            )
    return learner, line


def _write(
    folder: RunFolder,
    pretrained: Pretrained,
    learner: Learner,
    ends: Mapping[str, Any],
    summary: Mapping[str, Any],
) -> None:
    """Writes the model and a summary.

    Args: ends: fields of generation_config.json that say where texts end.
    """
    pretrained.save(learner, folder.path, ends)
    folder.write_summary(summary)
    folder.publish()


def make_answer_batches(run: Setup) -> Callable[[int], Rollouts]:
    """finished steps -> the prompts of the next step, each with its answer and an end token.

    Raises: InputError if a row has no answer, or one that is too long.
    """
    geometry, pretrained, data = run.blueprint.geometry, run.inputs.pretrained, run.inputs.prompts
    end = answer_end_tokens(pretrained.tokenizer, run.blueprint.sampling.stop_tokens)
    reader = "a warm start trains on the reference answer of each row"
    references = read_answers(pretrained.tokenizer, data.rows, reader=reader)
    answers = [np.append(ids, end) for ids in references.forced]
    longest, limit = max(map(len, answers)), geometry.max_completion_tokens
    if longest > limit:
        too_long = sum(len(ids) > limit for ids in answers)
        raise InputError(
            f"{too_long} of {len(answers)} answers are longer than rollout.max_completion_tokens = "
            f"{limit} with their end token (the longest has {longest}): set it to {longest} (--set "
            f"rollout.max_completion_tokens={longest}), or take them out of the data"
        )
    count, seed = geometry.num_prompts, run.config.train.seed

    def batch(step: int) -> Rollouts:
        ordinals = np.arange(step * count, (step + 1) * count, dtype=np.int32)
        rows = row_of(ordinals, len(data.rows), seed, data.mixture)
        encoded = [data.encoded[row] for row in rows]
        prompts = pad_prompts(encoded, geometry.max_prompt_tokens, ordinals, rows, step)
        tokens, mask = np.zeros((count, 1, limit), np.int32), np.zeros((count, 1, limit), bool)
        for place, row in enumerate(rows):
            tokens[place, 0, : len(answers[row])] = answers[row]
            mask[place, 0, : len(answers[row])] = True
        full = np.ones((count, 1), np.float32)
        # An environment that rewards has judged no answer.
        rewards: Any = {reward.name: full * (reward.name == REWARD) for reward in run.rewards}
        rollouts = dataclasses.replace(only_tokens(prompts, tokens, mask), rewards=rewards)
        return put_prompts(pretrained.mesh, rollouts)

    return batch


def _step(run: Setup, learner: Learner, rollouts: Rollouts) -> tuple[Learner, dict[str, float]]:
    """An update on the answers, and its line of metrics, of the policy before it."""
    tokens = jnp.concatenate([rollouts.prompt_tokens, rollouts.completion_tokens[:, 0]], 1)
    mask = jnp.concatenate([rollouts.prompt_mask, rollouts.token_mask[:, 0]], 1)
    likeliest = token_is_likeliest(run.inputs.pretrained.model, params_of(learner), tokens, mask)
    right = likeliest[:, rollouts.prompt_tokens.shape[1] :].sum()
    counts = sharding.to_host((right, rollouts.token_mask.sum()))
    learner, prepared = run.prepare(learner, rollouts)
    learner, metrics = run.update(learner, prepared.batches)
    values = finalise(sharding.to_host(metrics))
    line = {name: values[name] for name in LOGGED}
    line["token_accuracy"] = float(counts[0]) / float(counts[1])
    line["num_tokens"] = int(counts[1])
    line["learning_rate"] = float(sharding.to_host(current_rate(learner.opt_state)))
    return learner, line


def _show(console: Console, run: Setup) -> None:
    """Prints what `train` would do: memory, the first prompt and answer, the config.

    Raises: InputError where a device has less memory than that takes.
    """
    config, first = run.config, sharding.to_host(make_answer_batches(run)(0))
    pretrained, rows = run.inputs.pretrained, run.inputs.prompts.rows
    update_bytes = memory.plan(
        run.steps.update_program,
        run.blueprint.geometry,
        run.blueprint.objective,
        run.blueprint.mesh,
        run.learner,
    )
    saves = parameters.count_saves(config.checkpoint, config.eval.every, config.train.steps)
    copied = parameters.save_copy_bytes(parameters.to_save(run.learner, run.stream), saves)
    process_bytes = memory.process_bytes(pretrained.mesh, copied)
    usage = run.memory._replace(update=update_bytes, process=process_bytes)
    prompt, answer = (
        first.prompt_tokens[0][first.prompt_mask[0]],
        first.completion_tokens[0, 0][first.token_mask[0, 0]],
    )
    decode = functools.partial(pretrained.tokenizer.decode, clean_up_tokenization_spaces=False)
    facts(
        console,
        {
            "model": config.model.path,
            **usage.lines(memory.device_bytes(pretrained.mesh)),
            "data": f"{len(rows)} rows, {config.train.steps} steps draw "
            f"{config.train.steps * config.rollout.prompts_per_step}",
            "chat template": run.inputs.chat.name,
            "first prompt": f"row {first.row[0]}, {len(prompt)} tokens: {decode(prompt)!r}",
            "its answer": f"{len(answer)} tokens: {decode(answer)!r}",
        },
    )
    show_config(console, configs.to_toml(config))
    memory.refuse_too_large(usage, pretrained.mesh)


def _say(console: Console, text: str) -> None:
    if process.is_main():
        console.print(text, soft_wrap=True, markup=False)


def _words(line: Mapping[str, float]) -> str:
    return f"loss {line['loss']:.4f}, token accuracy {line['token_accuracy']:.3f}"


def _reward_answer(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The reward of a warm start: every answer is right."""
    return [1.0] * len(completions)


SETUP: dict[str, Any] = {"rewards": {REWARD: _reward_answer}, "samples": False}
"""What `setup` gets for a warm start beside its config."""
