"""`jaxgrpo train --dry-run`: what a run would do, without a step of it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from rich.console import Console

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import CheckpointKeys, MeshKeys, PlanKeys, RolloutKeys, TrainKeys
from jaxgrpo.core.types import WEIGHTS, Learner, Stream
from jaxgrpo.data import chat, storage
from jaxgrpo.data.sources import Mixture
from jaxgrpo.losses import Objective
from jaxgrpo.models import sharding
from jaxgrpo.models.hf import families, texts
from jaxgrpo.planning import programs, topologies
from jaxgrpo.rollout import refill
from jaxgrpo.rollout.answers import Answers
from jaxgrpo.training import inputs, memory, opening, parameters, rewarding, setup
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.collecting.replay import refuse_other_files
from jaxgrpo.training.inputs import Inputs
from jaxgrpo.training.method import attention_lines
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.console import facts, show_config
from jaxgrpo.training.records.folder import refuse_unusable
from jaxgrpo.training.records.reading import read_replay, read_text
from jaxgrpo.update.packing import Geometry


def dry_run(config: Config, resume: bool = False) -> None:
    """Prints what `train` would do: devices, sizes, memory, the first prompt; then the config.

    Raises: InputError where `train` would refuse before its first step.
    """
    console = Console(highlight=False)
    refuse_unusable(config.run.dir, resume)
    mesh = _start(console, config.mesh, config.plan)
    earlier_run = find_earlier_run(config) if resume else None
    config, meta = (config, {}) if earlier_run is None else (earlier_run.config, earlier_run.meta)
    run = _set_up(config, meta, mesh)
    pretrained, prompts = run.inputs.pretrained, run.inputs.prompts
    geometry, slots = run.blueprint.geometry, run.blueprint.sampling.slots
    needed = run.memory
    needed = needed._replace(update=_update_bytes(run, compiles=mesh is None))
    saves = parameters.count_saves(config.checkpoint, config.eval.every, config.train.steps)
    if mesh is None:
        copied = parameters.save_copy_bytes(parameters.to_save(run.learner, run.stream), saves)
        needed = needed._replace(process=memory.process_bytes(pretrained.mesh, copied))
    unread = families.unread(pretrained.model.config)
    facts(
        console,
        {
            **({} if earlier_run is None else {"continues": earlier_run.summary}),
            "model": config.model.path,
            **({"  not read": unread} if unread else {}),
            "method": _method(run.blueprint.chain, run.blueprint.objective),
            "mesh": _mesh(pretrained.mesh, run.blueprint.samples_on),
            **({} if mesh is None else {"  planned": _not_built(mesh)}),
            "parameters": _parameters(run),
            **needed.lines(memory.device_bytes(pretrained.mesh)),
            "disk": disk_line(config.checkpoint, saves, config.run.dir, run.learner, run.stream),
            **_sizes(config.rollout, config.train, geometry, slots),
            **attention_lines(run.blueprint.kernel, run.blueprint.teachers, run.engine),
            "data": f"{len(prompts.rows)} rows, {config.train.steps} steps draw "
            f"{'at least ' if config.rollout.refill else ''}"
            f"{config.train.steps * config.rollout.prompts_per_step}",
            "too long": inputs.dropped_line(prompts, config.rollout.max_prompt_tokens),
            **_mixture(prompts.mixture) | _evaluation(run) | _answers(run.collector.source.answers),
            "rewards": ", ".join(f"{r.name} x {r.weight:g}" for r in run.rewards),
            **_texts(run.inputs),
            "first prompt": _first_prompt(run),
        },
    )
    rewarding.show_previews(console, run.rewards, prompts.rows[0], run.try_rewards())
    show_config(console, configs.to_toml(config))
    memory.refuse_too_large(needed, pretrained.mesh)


def _answers(answers: Answers | None) -> dict[str, str]:
    return {} if answers is None else {"answers": inputs.answers_line(answers)}


def _sizes(
    rollout: RolloutKeys, train: TrainKeys, geometry: Geometry, slots: int
) -> dict[str, str]:
    """How large a step and an update are."""
    return {
        "a step": f"{geometry.num_prompts} prompts x {geometry.group_size} samples = "
        f"{geometry.num_prompts * geometry.group_size} completions of at most "
        f"{geometry.max_completion_tokens} tokens, "
        f"{slots} decoded at once{_budget(rollout)}",
        "an update": f"at most {geometry.micro_batches} micro-batches of {geometry.bins} bins "
        f"x {geometry.tokens} tokens ({geometry.rows} rows)"
        f"{_updates(train, rollout.prompts_per_step)}",
    }


def _method(chain: AdvantageTransform, objective: Objective) -> str:
    """A method in a line: its advantage with the steps of that, and its loss."""
    steps = dict(chain.steps)
    loss = f"{objective.surrogate.name} loss, {objective.reduction.name}"
    return f"{chain.name} ({', '.join(steps)}), {loss}"


def _parameters(run: setup.Setup) -> str:
    """How many numbers are trained."""
    count = sum(leaf.size for leaf in jax.tree.leaves(run.learner.trainable))
    return f"{count:,}{parameters.adapters_line(run.inputs.pretrained.model)}"


def disk_line(
    checkpoint: CheckpointKeys, saves: int, folder: str, learner: Learner, stream: Stream
) -> str:
    """What a run writes at the most, but for its logs, and what the disk has free.

    A checkpoint holds what is trained, the optimizer's moments and the method's other policies. One
    more than `checkpoint.keep` lies there while the next is written, and the best one.

    Args:
      saves: `parameters.count_saves` of the run.
    """
    step = _bytes(parameters.to_save(learner, stream))
    count = min(checkpoint.keep + 1 + (checkpoint.keep_best is not None), saves)
    model_bytes = _bytes(learner.trainable)
    if WEIGHTS in learner.frozen:  # merged, beside the adapters
        model_bytes += _bytes(learner.frozen[WEIGHTS])
    checkpoints = f"{count} x {memory.shown(step)} of checkpoints"
    text = f"{memory.shown(count * step + model_bytes)} at the most: {checkpoints}, "
    return f"{text}model {memory.shown(model_bytes)}{_free(folder)}"


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _free(folder: str) -> str:
    """What the disk of a folder, which need not be there yet, has free; nothing of a bucket."""
    if storage.is_url(folder):
        return ""
    path = Path(folder).absolute()
    existing_path = next(place for place in (path, *path.parents) if place.exists())
    return f"; {memory.shown(shutil.disk_usage(existing_path).free)} are free"


def planned_mesh(sizes: MeshKeys, keys: PlanKeys) -> Mesh | None:
    """The mesh of a config for more devices than there are, of stand-ins; None: they are here.

    They stand for those of `plan.topology`, or else for more of those that are here.

    Raises: InputError where the sizes of the mesh do not fit `plan.topology`, its slices and hosts.
    """
    real_devices = jax.devices()
    axes = (sizes.data, sizes.fsdp, sizes.tensor, sizes.context)
    number = max(math.prod(size or 1 for size in axes), sizes.sampling_tensor)
    if number <= len(real_devices):
        return None
    if keys.topology:
        where = f'plan.topology = "{keys.topology}", plan.slices = {keys.slices}'
        devices = topologies.stand_ins(keys.topology, keys.slices, where)
    else:
        device, limit = (
            real_devices[0],
            memory.device_bytes(sharding.make_mesh(devices=real_devices)),
        )
        kind = device.platform, device.device_kind, limit
        devices = [topologies.StandIn(place, *kind) for place in range(number)]
    if sharding.islands(devices).number > 1:
        return sharding.make_mesh(*axes, devices=devices)
    shape = sharding.mesh_shape(*axes, len(devices))
    return Mesh(
        np.array(devices).reshape(shape), sharding.AXES, axis_types=(AxisType.Auto,) * len(shape)
    )


class EarlierRun(NamedTuple):
    """The run that a folder holds."""

    config: Config  # of the run that continues it
    meta: dict[str, Any]  # of its newest checkpoint, which is compared
    summary: str


def find_earlier_run(config: Config) -> EarlierRun | None:
    """The run that `train --resume auto` would continue; None: the folder holds none.

    Raises: InputError where the folder was moved, where the run began with another config, or
      replays saved rollouts, and where it could not continue.
    """
    opening.refuse_moved(config.source, config.run.dir)
    place = storage.place(config.run.dir)
    text = read_text(file) if (file := place / "config.toml").exists() else None
    config, last_config = opening.refuse_other_config(place, text, config)
    with Checkpoints(place / "checkpoints", config.checkpoint.keep) as checkpoints:
        keys = last_config.checkpoint
        step, meta = opening.newest_checkpoint(checkpoints, (place, place), keys)
        refuse_other_files(read_replay(place), text is not None, None, meta)
        if step is None:
            start = f"{place}, from its beginning: it has no checkpoint"
            return None if text is None else EarlierRun(config, {}, start)
        summary = (
            f"{place}, from step {step}: rows, template, tokenizer, base and code are the same"
        )
        if config.run.allow_changes:
            summary += f", but for {', '.join(config.run.allow_changes)}, which may change"
        if text is None:
            summary += "; config.toml is gone: that this config is the run's was not compared"
        return EarlierRun(config, meta, summary)


def _start(console: Console, sizes: MeshKeys, keys: PlanKeys) -> Mesh | None:
    """Takes the devices, which it prints. Returns: a mesh as in `planned_mesh`."""
    # What is planned for other devices need not be of the platform that is here.
    console.print(process.start("cpu" if sizes.platform == "cpu" else "auto"), soft_wrap=True)
    mesh = planned_mesh(sizes, keys)
    if mesh is None:
        process.start(sizes.platform)
    return mesh


def _set_up(config: Config, meta: dict[str, Any], mesh: Mesh | None) -> setup.Setup:
    """A run; what it reads is compared with what its checkpoint says, if there is one.

    Args:
      mesh: of stand-ins, where no weights are read; None: the devices are here.
    """
    is_planned = {"mesh": mesh, "make_learner": programs.abstract_learner}
    options: dict[str, Any] = {} if mesh is None else is_planned
    return opening.set_up(config, meta, options)[0] if meta else setup.setup(config, **options)


def _first_prompt(run: setup.Setup) -> str:
    """The prompt of the first group, as the model reads it."""
    inputs = run.inputs
    _, prompts = run.collector.source.select(run.stream, 0)
    row = int(prompts.row[0])
    ids = inputs.prompts.encoded[row]
    return f"row {row}, {len(ids)} tokens: {inputs.pretrained.tokenizer.decode(ids)!r}"


def _update_bytes(run: setup.Setup, compiles: bool) -> int:
    """The working memory of an update: as its program is compiled, or by formula."""
    if compiles:
        sizes = run.blueprint.geometry, run.blueprint.objective, run.blueprint.mesh
        return memory.plan(run.steps.update_program, *sizes, run.learner)
    blueprint = run.blueprint
    sizes = blueprint.model, blueprint.mesh, blueprint.optimizer, blueprint.geometry.tokens
    passes = blueprint.remat, blueprint.logits_per_chunk, blueprint.objective
    return sum(memory.update_bytes(*sizes, *passes).values())


def _not_built(mesh: Mesh) -> str:
    """What to say of a mesh of stand-ins."""
    number, kind = mesh.size, mesh.devices.flat[0].device_kind
    count = len(jax.devices())
    return (
        f"not built: it is for {number} devices ({kind}), and there {'is' if count == 1 else 'are'}"
        f" {count}; memory is by formula, and weights are not read"
    )


def _texts(run_inputs: Inputs) -> dict[str, str]:
    """How prompts become tokens."""
    pretrained, template = run_inputs.pretrained, f"{run_inputs.chat.name}{_time(run_inputs)}"
    line = texts.tokenizer_line(pretrained.folder, pretrained.tokenizer)
    return {"chat template": template, **({"tokenizer": line} if line else {})}


def _time(run_inputs: Inputs) -> str:
    """What to say of a chat template that writes the date or the time."""
    prompts = (row["prompt"] for row in run_inputs.prompts.rows)
    if not chat.writes_time(run_inputs.chat, prompts):
        return ""
    first = "a run writes that of its first start; data.template_time sets another"
    return f"; it writes the date or time, now {run_inputs.chat.time}: {first}"


def _mixture(mixture: Mixture | None) -> dict[str, str]:
    """The share and the rows of each source, where data.path names several."""
    if mixture is None:
        return {}
    total = sum(mixture.weights)
    parts = zip(mixture.names, mixture.weights, mixture.sizes, strict=True)
    words = (f"{name} {weight / total:.3g} ({size} rows)" for name, weight, size in parts)
    return {"sources": "shares " + ", ".join(words)}


def _evaluation(run: setup.Setup) -> dict[str, str]:
    """What is evaluated, and whether the KL to the base is measured; {} without eval.data."""
    if run.inputs.held_out is None:
        return {}
    keys, distance = run.config.eval, "without the KL to the base"
    if run.config.measures_kl_to_base:
        distance = "with the KL to the base, which lies in memory for it (eval.kl_to_base)"
    prompts = len(run.inputs.held_out.rows[: keys.prompts])
    shared = inputs.shared_line(run.inputs, keys.prompts, bool(run.config.environment))
    return {
        "evaluation": f"{prompts} prompts x {keys.samples} samples, {distance}",
        **({"  trained on": shared} if shared else {}),
    }


def _budget(rollout: RolloutKeys) -> str:
    """How many groups a step may generate, where it may be more than it trains on."""
    if rollout.refill is None:
        return ""
    rounds = refill.max_rounds(rollout.refill["factor"])
    return (
        f"; flat groups are replaced until {rounds * rollout.prompts_per_step} groups are generated"
    )


def _updates(train: TrainKeys, prompts_per_step: int) -> str:
    """How many updates a step makes, where it may be more than one."""
    times, parts = train.num_iterations, train.minibatches
    if times * parts == 1:
        return ""
    prompts = prompts_per_step // parts
    return f"; a step makes {times * parts}: {times} x {parts} minibatches of {prompts} prompts"


def _mesh(mesh: Mesh, sampling_mesh: Mesh) -> str:
    """The sizes of a run's mesh, and of the one that it samples on, where that is another."""
    meshes = (mesh,) if sampling_mesh == mesh else (mesh, sampling_mesh)
    sizes = (
        ", ".join(f"{name} {size}" for name, size in device_mesh.shape.items())
        for device_mesh in meshes
    )
    return "; samples on ".join(sizes)
