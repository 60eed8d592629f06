"""`jaxgrpo train --dry-run`: what a run would do, without a step of it."""

from __future__ import annotations

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.core.errors import without_passwords
from jaxgrpo.data import chat
from jaxgrpo.models import sharding
from jaxgrpo.models.hf import families
from jaxgrpo.rollout import refill
from jaxgrpo.training import inputs, memory, parameters, process, setup
from jaxgrpo.training.console import facts
from jaxgrpo.training.folder import refuse_unusable


def dry_run(config: Config, resume: bool = False) -> None:
    """Prints what `train` would do: devices, sizes, memory, the first prompt; then the config.

    Raises: InputError where `train` would refuse before its first step.
    """
    console = Console(highlight=False)
    refuse_unusable(config.run.dir, resume)
    console.print(process.start(config.mesh.platform), soft_wrap=True)
    run = setup.setup(config)
    geometry = run.blueprint.geometry
    prompts, _ = run.select(run.state)
    first = int(sharding.to_host(prompts.row)[0])
    ids = run.encoded[first]
    count = sum(leaf.size for leaf in jax.tree.leaves(run.state.trainable))
    needed = memory.of_run(config, run.blueprint)
    planned = memory.plan(run.update_program, run.blueprint, run.state)
    needed = needed._replace(update=planned)
    unread = families.unread(run.model.config)
    steps, objective = dict(run.blueprint.chain.steps), run.blueprint.objective
    facts(
        console,
        {
            "model": config.model.path,
            **({"  not read": unread} if unread else {}),
            "method": f"{run.blueprint.chain.name} ({', '.join(steps)}), "
            f"{objective.surrogate.name} loss, {objective.reduction.name}",
            "mesh": _mesh(run.mesh, run.blueprint.samples_on),
            "parameters": f"{count:,}{parameters.adapters_line(run.model)}",
            **needed.lines(memory.of_device(run.mesh)),
            "a step": f"{geometry.num_prompts} prompts x {geometry.group_size} samples = "
            f"{setup.samples_of(config)} completions of at most "
            f"{geometry.max_completion_tokens} tokens, "
            f"{run.blueprint.sampling.slots} decoded at once{_budget(config)}",
            "an update": f"at most {geometry.micro_batches} micro-batches of {geometry.bins} bins "
            f"x {geometry.tokens} tokens ({geometry.rows} rows){_updates(config)}",
            "data": f"{len(run.rows)} rows, {config.train.steps} steps draw "
            f"{'at least ' if config.rollout.refill else ''}"
            f"{config.train.steps * geometry.num_prompts}",
            "too long": inputs.dropped_line(config, len(run.rows), run.dropped),
            **_mixture(run) | _evaluation(run),
            "rewards": ", ".join(f"{r.name} x {r.weight:g}" for r in run.rewards),
            **({"answers": inputs.answers_line(run.answers)} if run.answers else {}),
            "chat template": f"{run.chat.name}{_time(run)}",
            "first prompt": f"row {first}, {len(ids)} tokens: {run.tokenizer.decode(ids)!r}",
        },
    )
    inputs.show_previews(console, run.rewards, run.rows[0], run.tokenizer, config.train.steps)
    text = without_passwords(configs.to_toml(config))
    console.print(f"\nthe whole config:\n\n{text}", markup=False, soft_wrap=True)
    memory.refuse_too_large(needed, run.mesh)


def _time(run: setup.Setup) -> str:
    """What to say of a chat template that writes the date or the time."""
    if not chat.writes_time(run.chat, (row["prompt"] for row in run.rows)):
        return ""
    first = "a run writes that of its first start; data.template_time sets another"
    return f"; it writes the date or time, now {run.chat.time}: {first}"


def _mixture(run: setup.Setup) -> dict[str, str]:
    """The share and the rows of each source, where data.path names several."""
    if run.mixture is None:
        return {}
    total = sum(run.mixture.weights)
    parts = zip(run.mixture.names, run.mixture.weights, run.mixture.sizes, strict=True)
    words = (f"{name} {weight / total:.3g} ({size} rows)" for name, weight, size in parts)
    return {"sources": "shares " + ", ".join(words)}


def _evaluation(run: setup.Setup) -> dict[str, str]:
    """What is evaluated, and whether the KL to the base is measured; {} without eval.data."""
    if run.held_out is None:
        return {}
    keys, distance = run.config.eval, "without the KL to the base"
    if run.config.measures_kl_to_base:
        distance = "with the KL to the base, which stays in memory (eval.kl_to_base)"
    prompts = len(run.held_out.rows[: keys.prompts])
    return {"evaluation": f"{prompts} prompts x {keys.samples} samples, {distance}"}


def _budget(config: Config) -> str:
    """How many groups a step may generate, where it may be more than it trains on."""
    rollout = config.rollout
    if rollout.refill is None:
        return ""
    rounds = refill.max_rounds(rollout.refill["factor"])
    return (
        f"; flat groups are replaced until {rounds * rollout.prompts_per_step} groups are generated"
    )


def _updates(config: Config) -> str:
    """How many updates a step makes, where it may be more than one."""
    times, parts = config.train.num_iterations, config.train.minibatches
    if times * parts == 1:
        return ""
    prompts = config.rollout.prompts_per_step // parts
    return f"; a step makes {times * parts}: {times} x {parts} minibatches of {prompts} prompts"


def _mesh(mesh: Mesh, sampling_mesh: Mesh) -> str:
    """The sizes of a run's mesh, and of the one that it samples on, where that is another."""
    meshes = (mesh,) if sampling_mesh == mesh else (mesh, sampling_mesh)
    sizes = (", ".join(f"{name} {size}" for name, size in one.shape.items()) for one in meshes)
    return "; samples on ".join(sizes)
