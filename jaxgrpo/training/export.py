"""A step of a run as a Hugging Face folder, with its model card."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import jax
import numpy as np

import jaxgrpo
from jaxgrpo.config.files import Config
from jaxgrpo.core.errors import InputError, refusing
from jaxgrpo.core.types import Params
from jaxgrpo.data import storage
from jaxgrpo.data.storage import Place
from jaxgrpo.evaluation.intervals import without_ends
from jaxgrpo.models import decoder, lora
from jaxgrpo.models.api import Model, in_dtype
from jaxgrpo.models.hf import folders, replacing, texts
from jaxgrpo.training import parameters
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.inputs import make_chat
from jaxgrpo.training.pretrained import find_config
from jaxgrpo.training.processes.recovery import Progress
from jaxgrpo.training.records.reading import evaluation_metrics, is_number, read_metrics
from jaxgrpo.training.records.report.record import accuracy_first, with_interval
from jaxgrpo.training.step_files import refuse_other_step
from jaxgrpo.training.stored_policy import read_run
from jaxgrpo.update.forward import trained

DTYPES = ("float32", "bfloat16")  # of exported weights


def export(
    run: str | Place,
    out: str | Place,
    step: str | SupportsIndex = "last",
    dtype: str | None = None,
    overwrite: bool = False,
) -> Place:
    """Writes the model of one step of a run, with tokenizer, generation config and model card.

    Args:
      run: a run folder, or its URL.
      out: the folder to write, or a URL; a model there that we wrote is replaced.
      step: a number of finished steps, "last", or "best" by the run's checkpoint.keep_best.
      dtype: of the weights; None: as they were trained.
      overwrite: replace a model that someone else wrote too, but never the base of the run.

    Returns: `out`.

    Raises: InputError where the run, the step or the dtype is none, or `out` is not ours.
    """
    folder, config = read_run(run)
    out = os.path.expanduser(out)
    home, stored = find_config(config.model)
    target = _target(out, [home, *config.bases], overwrite)
    tokenizer = make_chat(config.data, config.model.path, folders.read_tokenizer(home)).tokenizer
    ends = texts.end_fields(folders.read_end_tokens(home, tokenizer, stored.vocab_size))
    # On the host and without the rest of the state: neither the mesh of the run is needed for it,
    # nor its data, rewards and method, which may have come from Python.
    with Checkpoints(folder / "checkpoints", config.checkpoint.keep) as checkpoints:
        number = _number(folder, config.checkpoint.keep_best, step, checkpoints)
        number = checkpoints.choose(number)
        meta = checkpoints.meta(number)
        model = decoder.build(dataclasses.replace(stored, lora=parameters.saved_adapters(meta)))
        zeros = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), trained(model, model.shapes))
        abstract = {"learner": {"step": np.zeros((), np.int32), "trainable": zeros}}
        saved, _ = checkpoints.restore(abstract, number, partial=True)
        params = saved["learner"]["trainable"]
        refuse_other_step(checkpoints.folder, number, int(saved["learner"]["step"]))
    if model.config.lora is not None:
        identity = parameters.adapter_identity(home, model)
        parameters.refuse_changed_adapters(config.model.path, meta, identity)
        model, params = _merged(model, params, home, config.lora.path)
    if dtype is not None:
        model, params = _cast(model, params, dtype)
    card = model_card(config, number, _evaluation(folder, number))
    with _local_folder(out) as local:
        folders.save_model(
            model, params, local, tokenizer, ends, card=card, overwrite=overwrite, base=home
        )
    return target


def _target(out: str | Place, bases: Iterable[str | Path], overwrite: bool) -> Place:
    """Where to export to. Raises: InputError where what is there may not be replaced."""
    target = storage.place_as_named(out)
    with refusing(f"{out} cannot be read ({{reason}})", OSError):
        folders.refuse_unless_ours(target, bases, overwrite)
    return target


def _merged(
    model: Model, adapters: Params, home: Path, adapter_path: str | None
) -> tuple[Model, Params]:
    """The model without adapters, and the weights of `home` with these merged in.

    Args:
      adapter_path: `lora.path`.
    """
    base = lora.base_model(model)
    weights = folders.read_params(home, base, "float32", adapter=adapter_path)
    return base, lora.merge(model, lora.join(jax.device_put(adapters), weights))


def _cast(model: Model, params: Params, dtype: str) -> tuple[Model, Params]:
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: use {' or '.join(DTYPES)}")
    model = decoder.build(dataclasses.replace(model.config, dtype=dtype))
    return model, in_dtype(params, dtype)


def _evaluation(folder: Place, step: int) -> dict[str, Any]:
    """What was evaluated at a step of a run."""
    lines = [line for line in read_metrics(folder) if line["step"] == step]
    values = {name: value for line in lines for name, value in evaluation_metrics(line).items()}
    return {name: float(value) for name, value in values.items() if is_number(value)}


@contextlib.contextmanager
def _local_folder(out: str | Place) -> Iterator[Path]:
    """A folder of this host: `out`, or one whose files are copied there at the end."""
    if not storage.is_url(out):
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="jaxgrpo-export-") as temporary:
        yield (local := Path(temporary, "model"))
        with refusing(f"{out} cannot be written ({{reason}})", OSError):
            storage.upload_folder(local, os.fspath(out))


def model_card(config: Config, step: int, evaluation: Mapping[str, float]) -> str:
    """README.md of an exported model, with the metadata block that the hub reads."""
    path = config.data.path or "own rows"
    data = "`, `".join(p.title for p in path) if isinstance(path, tuple) else Path(path).name
    steps = [config.method] if config.method else config.advantage or ()
    method = " -> ".join(str(part["use"]) for part in steps)
    revision = f" (revision `{config.model.revision}`)" if config.model.revision else ""
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [jaxgrpo, reinforcement-learning, grpo]",
        "---",
        f"{replacing.CARD_TITLE} {jaxgrpo.__version__}",
        "",
        f"Base model `{Path(config.model.path).name}`{revision}, {step} of {config.train.steps} "
        f"steps of `{method}` on `{data}` ({config.rollout.prompts_per_step} prompts "
        f"x {config.rollout.group_size} samples a step, {config.optimizer.use} at learning rate "
        f"{config.optimizer.learning_rate:g}, seed {config.train.seed}).",
    ]
    if evaluation:
        held_out = Path(str(config.eval.data)).name
        lines += ["", f"Evaluated on `{held_out}`, with 95% intervals over prompts:"]
        lines += ["", "| | |", "|---|---|"]
        names = sorted(without_ends(evaluation), key=accuracy_first)
        lines += [f"| {name} | {with_interval(evaluation, name)} |" for name in names]
    return "\n".join(lines) + "\n"


def _number(
    folder: Place, keep_best: str | None, step: str | SupportsIndex, checkpoints: Checkpoints
) -> int | None:
    """The step to restore; None for the newest."""
    text = str(step)  # NumPy's numbers too
    if text == "last":
        return None
    if text == "best":
        return _best_step(folder, keep_best or "", checkpoints)
    if text.isdecimal():
        return int(text)
    raise InputError(f"--step {step}: use last, best or a number of steps")


def _best_step(folder: Place, metric: str, checkpoints: Checkpoints) -> int:
    """The best step by a metric, as the newest intact checkpoint says. That step itself may be
    better, where a later start has evaluated it; where the checkpoint knows no best one by this
    metric and on these questions, metrics.jsonl says it. Raises: InputError where there is none.
    """
    newest = None if checkpoints.latest() is None else checkpoints.choose()
    progress = Progress.from_meta({} if newest is None else checkpoints.meta(newest))
    lines, base = read_metrics(folder), progress.base
    measured = [line for line in lines if line["step"] > 0 and is_number(line.get(metric))]
    values = {line["step"]: line[metric] for line in measured}
    asks_others = lines and base and evaluation_metrics(lines[0]) != base["metrics"]
    if progress.best and progress.best_metric == metric and not asks_others:
        best_step, value = progress.best
        values = {best_step: value} | {n: values[n] for n in values if n == newest}
    if not values:
        raise InputError(
            f"{folder}: no best step was kept; set checkpoint.keep_best before training, "
            "or name a step"
        )
    return max(values, key=lambda number: (values[number], -number))
