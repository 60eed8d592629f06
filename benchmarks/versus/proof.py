"""That jaxgrpo and its peers compute the same: loss and gradient of one step, then AdamW.

jaxgrpo samples a step and records it (`run.rollouts_every`). The recorded behaviour log-probs are
shifted so that ratios spread over RATIOS, with tokens that the clipping stops. Every contender then
computes loss and gradient of that file: ours by `jaxgrpo.train(..., rollouts=...)` with plain SGD,
whose step is the gradient. Last, our AdamW takes a peer's gradient and must arrive where it did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file, save_file

import jaxgrpo
from benchmarks.common import verdict
from benchmarks.versus import files
from benchmarks.versus.work import Work
from benchmarks.workloads import Workload
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders
from jaxgrpo.training.records import rollout_files
from jaxgrpo.update.optimizer import make_optimizer

WORKLOAD = Workload(prompts=4, samples=4, shortest=16, longest=64, completion=64, ragged=True)
RATIOS = 0.7, 1.4
LIMITS = {"loss": 1e-5, "gradient": 1e-4, "adamw": 1e-6}
RATE = 1e-3  # of AdamW, as in gradients.py
LARGE = 100.0
"""Rate of the SGD step: the gradient is read from a difference of parameters in float32, which then
rounds it by 1e-7 x |parameter| / LARGE."""

WEIGHTS, EMBEDDING = "model.safetensors", "model.embed_tokens.weight"
Arrays = dict[str, np.ndarray]


def show(folder: Path, against: Sequence[str], console: Console) -> dict[str, Any]:
    """Computes the differences and prints them. Raises: SystemExit where one is too large."""
    work = files.write("S/C", folder, WORKLOAD)
    file = record(work)
    loss, gradient = ours(work, file)
    differences: dict[str, dict[str, float]] = {}
    for name in against:
        module = "benchmarks.versus.gradients"
        hushed = os.environ | {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", module, name, str(folder), str(file)]
        process = subprocess.run(command, env=hushed, capture_output=True, text=True, check=False)
        if process.returncode:
            raise SystemExit(f"{name} computed no gradient:\n{process.stderr[-3000:]}")
        theirs = load_file(folder / f"{name}_gradient.safetensors")
        their_loss = json.loads((folder / f"{name}.json").read_text())["loss"]
        differences[name] = {
            "loss": abs(loss - their_loss),
            "gradient": worst(gradient, theirs, work.pad),
            "adamw": after_adamw(work, name),
        }
    console.print(f"the same computation? loss {loss:.6f}, {len(gradient)} arrays of gradients")
    refuse_different(differences, console)
    return differences | {"value": loss}


def refuse_different(differences: dict[str, dict[str, float]], console: Console) -> None:
    """Prints what contenders differ by. Raises: SystemExit where it is too much."""
    table = Table("against", "what", "difference", "limit", "")
    wrong = False
    for name, values in differences.items():
        for what, value in values.items():
            wrong |= not value <= LIMITS[what]
            judgement = verdict(value <= LIMITS[what])
            table.add_row(name, what, f"{value:.1e}", f"{LIMITS[what]:g}", judgement)
    console.print(table)
    if wrong:
        raise SystemExit("the contenders compute different things: their times mean nothing")


def record(work: Work) -> Path:
    """A file of one step's rollouts, with behaviour log-probs that are not the policy's."""
    config = files.run_config(work, steps=1)
    config["run"]["rollouts_every"] = 1
    run = silent(config)
    rollouts = rollout_files.load(next((run.path / "rollouts").glob("*.safetensors")))
    ratio = np.random.default_rng(0).uniform(*RATIOS, rollouts.behavior_logp.shape)
    shifted = np.where(rollouts.token_mask, rollouts.behavior_logp - np.log(ratio), 0)
    logp: Any = shifted.astype(np.float32)
    file = Path(work.folder) / "rollouts.safetensors"
    rollout_files.save(file, dataclasses.replace(rollouts, behavior_logp=logp), 1)
    shutil.rmtree(run.path)
    return file


def ours(work: Work, file: Path) -> tuple[float, Arrays]:
    """Loss, and gradients under the names of a Hugging Face checkpoint."""
    config = files.run_config(work, steps=1)
    config["optimizer"] = {"use": "sgd", "learning_rate": LARGE, "clip_norm": 0.0}
    run = silent(config, rollouts=[file])
    before, after = (load_file(place / WEIGHTS) for place in (work.model, run.path / "model"))
    return run.metrics[-1]["loss"], {
        name: (before[name].astype(np.float64) - after[name]) / LARGE for name in before
    }


def silent(config: dict[str, Any], **options: Any) -> jaxgrpo.Run:
    """`jaxgrpo.train` that prints nothing."""
    with contextlib.redirect_stdout(io.StringIO()):
        return jaxgrpo.train(config, **options)


def worst(ours: Arrays, theirs: Arrays, pad: int) -> float:
    """The largest |a - b| / |b| of the arrays, by their norms.

    The embedding of the token `pad` is left out: PyTorch gives it no gradient, even where it was
    sampled as any other token.
    """
    ours[EMBEDDING][pad] = theirs[EMBEDDING][pad] = 0
    if ours.keys() != theirs.keys():
        raise SystemExit(f"gradients of other arrays: {sorted(ours.keys() ^ theirs.keys())}")
    norm = np.linalg.norm
    return max(float(norm(ours[name] - theirs[name]) / norm(theirs[name])) for name in ours)


def after_adamw(work: Work, name: str) -> float:
    """The largest difference of a parameter after one AdamW step from the peer's gradient."""
    folder = Path(work.folder)
    gradients = folder / f"{name}_gradient"
    shutil.copytree(work.model, gradients)
    save_file(load_file(folder / f"{name}_gradient.safetensors"), gradients / WEIGHTS)
    model = decoder.build(folders.read_config(work.model))
    params, gradient = (folders.read_params(place, model) for place in (work.model, gradients))
    options: Any = {"use": "adamw", "learning_rate": RATE, "options": {"weight_decay": 0.0}}
    optimizer = make_optimizer(model.axes, updates=1, **options)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    stepped: Any = optax.apply_updates(params, updates)
    folders.save_model(model, stepped, folder / f"{name}_ours")
    mine = load_file(folder / f"{name}_ours" / WEIGHTS)
    theirs = load_file(folder / f"{name}_stepped.safetensors")
    return max(float(np.abs(mine[key] - theirs[key]).max()) for key in theirs)
