"""`jaxgrpo export`: a step of a run as an ordinary Hugging Face folder with a model card."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxgrpo
from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.folder import read_metrics
from jaxgrpo.training.inputs import make_chat

DTYPES = ("float32", "bfloat16")


def export(
    run: str | Path, out: str | Path, step: str | int = "last", dtype: str | None = None
) -> Path:
    """Writes the model of one step of a run, with tokenizer, generation config and model card.

    Args:
      run: a run folder.
      out: the folder to write; a model folder there is replaced.
      step: a number of finished steps, "last", or "best" by the run's checkpoint.keep_best.
      dtype: of the weights; None: as they were trained.

    Returns: `out`.

    Raises: InputError where the run, the step or the dtype is none.
    """
    folder, config = read_run(run)
    number = _number(folder, config, step)
    home = folders.find_folder(config.model.path, config.model.revision)
    tokenizer = folders.read_tokenizer(home)
    make_chat(config, tokenizer)
    ends = folders.end_fields(folders.read_end_tokens(home, tokenizer))
    model = decoder.build(folders.read_config(home))
    # On the host and without the rest of the state: neither the mesh of the run is needed for it,
    # nor its data, rewards and method, which may have come from Python.
    empty = lambda leaf: np.zeros(leaf.shape, np.float32)  # noqa: E731
    wanted = {"step": np.zeros((), np.int32), "trainable": jax.tree.map(empty, model.shapes)}
    with Checkpoints(folder / "checkpoints", config.checkpoint.keep) as checkpoints:
        state, _ = checkpoints.restore(wanted, number, partial=True)
    number, params = int(state["step"]), state["trainable"]
    if dtype is not None:
        if dtype not in DTYPES:
            raise InputError(f"--dtype {dtype}: use {' or '.join(DTYPES)}")
        model = decoder.build(dataclasses.replace(model.config, dtype=dtype))
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    card = model_card(config, number, _evaluation(folder, number))
    folders.save_model(out, model, params, tokenizer, ends, card=card)
    return Path(out)


def read_run(run: str | Path) -> tuple[Path, Config]:
    """The folder and the config of a run. Raises: InputError where it holds no run."""
    folder = Path(run)
    file = folder / "config.toml"
    if not file.exists():
        raise InputError(f"{folder}: no run folder (there is no config.toml in it)")
    return folder, configs.from_dict(tomllib.loads(file.read_text(encoding="utf-8")))


def best_step(folder: Path, metric: str | None) -> tuple[int, float] | None:
    """The first step, after training began, with the highest value of a metric, and that value."""
    if metric is None or not (folder / "metrics.jsonl").exists():
        return None
    lines = read_metrics(folder / "metrics.jsonl")
    values = [
        (line[metric], -line["step"])
        for line in lines
        if line["step"] > 0 and line.get(metric) is not None
    ]
    if not values:
        return None
    value, step = max(values)
    return -step, value


def refuse_unknown_best(
    metric: str | None, metrics: Mapping[str, float], key: str = "checkpoint.keep_best"
) -> None:
    """Raises InputError where a key names no metric of the evaluation, whose names are bare."""
    if metric is not None and metric.removeprefix("eval/") not in metrics:
        raise InputError(
            f'{key} = "{metric}": the evaluation has no such metric; '
            + suggest(metric, [f"eval/{name}" for name in metrics])
        )


def is_better(value: float, best: float | None) -> bool:
    """Whether a value is above the best so far; what is not finite is never better, nor a best.

    >>> is_better(0.1, None), is_better(float("nan"), None), is_better(0.1, float("nan"))
    (True, False, True)
    """
    if not math.isfinite(value):
        return False
    return best is None or not math.isfinite(best) or value > best


def model_card(config: Config, step: int, evaluation: Mapping[str, float]) -> str:
    """README.md of an exported model, with the metadata block that the hub reads."""
    data = Path(config.data.path or "own rows").name
    steps = [config.method] if config.method else config.advantage or ()
    method = " -> ".join(str(part["use"]) for part in steps)
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [jaxgrpo, reinforcement-learning, grpo]",
        "---",
        f"# Trained with jaxgrpo {jaxgrpo.__version__}",
        "",
        f"Base model `{Path(config.model.path).name}`, {step} of {config.train.steps} steps of "
        f"`{method}` on `{data}` ({config.rollout.prompts_per_step} prompts "
        f"x {config.rollout.group_size} samples a step, {config.optimizer.use} at learning rate "
        f"{config.optimizer.learning_rate:g}, seed {config.train.seed}).",
    ]
    if evaluation:
        lines += [
            "",
            f"Evaluated on `{Path(str(config.eval.data)).name}`:",
            "",
            "| | |",
            "|---|---|",
        ]
        lines += [f"| {name} | {value:.4f} |" for name, value in sorted(evaluation.items())]
    return "\n".join(lines) + "\n"


def _number(folder: Path, config: Config, step: str | int) -> int | None:
    """The step to restore; None for the newest."""
    if step == "last":
        return None
    if step == "best":
        best = best_step(folder, config.checkpoint.keep_best)
        if best is None:
            raise InputError(
                f"{folder}: no best step was kept; set checkpoint.keep_best before training, "
                "or name a step"
            )
        return best[0]
    if isinstance(step, int) or step.isdecimal():
        return int(step)
    raise InputError(f"--step {step}: use last, best or a number of steps")


def _evaluation(folder: Path, step: int) -> dict[str, float]:
    """What was measured at a step."""
    lines: list[dict[str, Any]] = read_metrics(folder / "metrics.jsonl")
    return {
        name.removeprefix("eval/"): value
        for line in lines
        if line["step"] == step
        for name, value in line.items()
        if name.startswith("eval/") and value is not None
    }
