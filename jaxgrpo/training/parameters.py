"""The parameters of a run and its learner: as it begins, and in a checkpoint.

Without adapters all of them are trained. With adapters (`[lora]`) the weights are read from
model.path, stay as they are, and are in no checkpoint: `to_save` and `with_weights`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgrpo.config.keys import CheckpointKeys, LoraKeys, ModelKeys, ReferenceKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.scores import POLICIES
from jaxgrpo.core.types import WEIGHTS, Learner, Params, RolloutSpec, Stream
from jaxgrpo.data import sources
from jaxgrpo.data.storage import Place
from jaxgrpo.models import lora, sharding
from jaxgrpo.models.api import LoraConfig, Model, ModelConfig
from jaxgrpo.models.hf import adapters, folders
from jaxgrpo.update.forward import Blueprint, as_computed, opt_layout, trained_layout


def model_config_for_run(
    keys: ModelKeys,
    lora_keys: LoraKeys,
    stored: ModelConfig,
    without_text: tuple[tuple[int, int], ...] = (),
) -> ModelConfig:
    """The stored model as a config asks for it: dtypes, adapters.

    Args:
      without_text: as in ModelConfig, where the tokenizer is known.

    Raises: InputError if there are no such adapters.
    """
    return dataclasses.replace(
        stored,
        dtype=keys.dtype,
        float32_head=keys.float32_head,
        float32_activations=keys.float32_activations,
        float32_attention=keys.float32_attention,
        lora=_adapters(lora_keys, stored),
        without_text=without_text,
    )


def _adapters(keys: LoraKeys, stored: ModelConfig) -> LoraConfig | None:
    if keys.path is not None:
        return adapters.read_config(keys.path, stored)
    if not keys.rank:
        return None
    return LoraConfig(
        rank=keys.rank,
        alpha=keys.alpha,
        targets=adapters.targets_from_peft(keys.targets, stored),
        use_rslora=keys.use_rslora,
    )


def adapters_line(model: Model) -> str:
    """What is trained and what is not, if the model has adapters; else nothing."""
    settings = model.config.lora
    if settings is None:
        return ""
    count = sum(leaf.size for leaf in jax.tree.leaves(lora.split(model.shapes)[1]))
    names = ", ".join(model.config.adapted)
    return f" of adapters (rank {settings.rank}, of {names}); {count:,} stay as they are"


def base_line(path: str | None, base: str, revision: str | None) -> str:
    """Says that an adapter folder names another base than `base`; empty where it does not.

    Names on the hub are compared alone: a copy of a model may lie anywhere.
    """
    fields = {} if path is None else json.loads(adapters.adapter_files(path)[0].read_text("utf-8"))
    names = str(fields.get("base_model_name_or_path")), base
    revisions = fields.get("revision"), revision
    old, new = (f"{name} ({at or 'main'})" for name, at in zip(names, revisions, strict=True))
    if old == new or not all(sources.is_name(name) and not os.path.isdir(name) for name in names):
        return ""
    return f"lora.path = {path}: its adapter was trained over {old}, and is added to {new}"


def first_learner(
    blueprint: Blueprint,
    params: Params,
    num_rows: int,
    rewards: tuple[str, ...],
    teachers: Mapping[str, Params] | None = None,
) -> Learner:
    """The learner before the first step, laid out on the mesh.

    Args:
      teachers: path of each -> its parameters.
    """
    replicated = sharding.replicated(blueprint.mesh)
    # Geometry and RolloutSpec begin with the same four sizes.
    spec = RolloutSpec(*blueprint.geometry[:4], rewards=rewards, num_rows=num_rows)
    trainable, frozen = params, {}
    if blueprint.model.config.lora is not None:
        trainable, frozen[WEIGHTS] = lora.split(params)
    # Copies of their own, since the trainable parameters are donated.
    held_layout = trained_layout(blueprint.model, blueprint.mesh)
    duplicate = lambda tree: jax.tree.map(lambda leaf: leaf + 0, tree)  # noqa: E731
    copy = jax.jit(
        lambda tree: duplicate(as_computed(blueprint.model, tree)), out_shardings=held_layout
    )
    average = jax.jit(duplicate, out_shardings=held_layout)
    put = lambda value: sharding.put(value, replicated)  # noqa: E731
    layout = opt_layout(blueprint.model, blueprint.mesh, blueprint.optimizer)
    for name in blueprint.policies:
        frozen[name] = (average if name == "ema" else copy)(trainable)
    return Learner(
        step=put(np.int32(0)),
        trainable=trainable,
        frozen={**frozen, **(teachers or {})},
        opt_state=jax.jit(blueprint.optimizer.init, out_shardings=layout)(trainable),
        advantage_state=jax.tree.map(put, blueprint.chain.init(spec)),
        objective_state=jax.tree.map(put, blueprint.objective.init()),
    )


def refuse_average(policies: Sequence[str], has_adapters: bool, keys: ReferenceKeys) -> None:
    """Raises: InputError where the policy "ema" cannot be, or its decay acts on nothing.

    Args:
      policies: `Blueprint.policies`.
    """
    if "ema" not in policies:
        if keys.ema_decay != ReferenceKeys().ema_decay:
            raise InputError(
                f"reference.ema_decay = {keys.ema_decay}: nothing in the run reads the policy "
                '"ema" (a part that needs ema_logp does, and an entry of scores); leave it out'
            )
    elif has_adapters:
        raise InputError(
            'lora: the method reads the policy "ema", and a mean of adapters is no mean of '
            "policies, since what they add is a product of two matrices: train all weights, or "
            'take the policy "reference" with reference.reset_every, a lagged copy'
        )


class Saved(NamedTuple):
    """What a checkpoint holds: all that resuming needs but weights that are not trained."""

    learner: Learner
    stream: Stream


def to_save(learner: Learner, stream: Stream) -> Saved:
    """What a checkpoint holds of them."""
    frozen = {name: params for name, params in learner.frozen.items() if name in POLICIES}
    return Saved(dataclasses.replace(learner, frozen=frozen), stream)


def count_saves(keys: CheckpointKeys, evaluated_every: int, steps: int) -> int:
    """The most checkpoints that a run writes if no signal stops it: those of checkpoint.every, that
    of the last step, and with checkpoint.keep_best those of evaluations, each the best so far.

    Args:
      evaluated_every, steps: `eval.every` and `train.steps`.

    >>> count_saves(CheckpointKeys(every=50), 10, 100)
    2
    >>> count_saves(CheckpointKeys(every=50, keep_best="eval/accuracy"), 20, 100)
    6
    """
    due = {*range(keys.every, steps + 1, keys.every), steps}
    if keys.keep_best is not None:
        due.update(range(evaluated_every, steps + 1, evaluated_every))
    return len(due)


def save_copy_bytes(saved: Saved, saves: int) -> int:
    """Bytes of the copy that lies in memory while the next step is taken, until it is written as a
    checkpoint; 0 where only the last step writes one.

    Args:
      saves: `count_saves` of the run.
    """
    if saves == 1:
        return 0
    return sum(leaf.nbytes for leaf in jax.tree.leaves(saved))


def with_weights(restored: Learner, first: Learner) -> Learner:
    """A restored learner, with the weights and teachers of the one that the run began with."""
    weights = {name: params for name, params in first.frozen.items() if name not in POLICIES}
    return dataclasses.replace(restored, frozen=restored.frozen | weights)


def adapter_identity(folder: Path, model: Model) -> dict[str, Any] | None:
    """What a checkpoint holds about a run's adapters, as JSON values; None: it has none.

    Their settings, and what tells the weights in `folder` from others.
    """
    if model.config.lora is None:
        return None
    fingerprint = folders.fingerprint(folder)
    weights = {name: value for name, value in fingerprint.items() if name.endswith(".safetensors")}
    settings = dataclasses.asdict(model.config.lora)
    ranks = [list(rank) for rank in settings.pop("ranks")]  # as JSON gives them back
    settings |= {"ranks": ranks} if ranks else {}
    return {"settings": settings, "weights": weights}


def saved_adapters(meta: Mapping[str, Any]) -> LoraConfig | None:
    """The settings of the adapters that a checkpoint holds.

    Args:
      meta: what it holds beside its state.
    """
    if "lora" not in meta:
        return None
    settings = dict(meta["lora"]["settings"])
    ranks = tuple((name, rank, alpha) for name, rank, alpha in settings.pop("ranks", ()))
    return LoraConfig(**settings, ranks=ranks)


def refuse_changed_adapters(
    path: str, meta: Mapping[str, Any], identity: dict[str, Any] | None
) -> None:
    """Refuses to go on from a checkpoint over other weights, or with other settings.

    Args:
      path: `model.path`.
      identity: `adapter_identity` of the run.
    """
    saved = meta.get("lora")
    if saved == identity:
        return
    if saved and identity and saved["weights"] == identity["weights"]:
        names = (f"{name} = {value}" for name, value in saved["settings"].items())
        raise InputError(f"lora: the run's adapters have {', '.join(names)}: set this back")
    raise InputError(
        f"model.path = {path}: its weights are not those that this run's adapters "
        "were trained over, and a checkpoint holds the adapters alone; put the weights back"
    )


def refuse_unwritable(bases: Sequence[str], trains_adapters: bool, folder: Place) -> None:
    """Raises: InputError where a run's folder holds in its model's place what the end of the run
    must leave.

    Args:
      bases: what the run begins from, as its config names it.
    """
    folders.refuse_unless_ours(folder / "model", bases)
    if trains_adapters:
        adapters.refuse_unless_ours(folder / "adapter", bases)
