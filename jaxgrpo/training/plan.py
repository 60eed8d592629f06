"""`jaxgrpo train --dry-run`: what a run would do, without doing it."""

from __future__ import annotations

import jax
from rich.console import Console

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.models import sharding
from jaxgrpo.training import process
from jaxgrpo.training.console import facts
from jaxgrpo.training.inputs import dropped_line
from jaxgrpo.training.rewarding import show_previews
from jaxgrpo.training.setup import setup


def dry_run(config: Config) -> None:
    """Prints what `train` would do: config, devices, geometry, parameters, the first prompt."""
    console = Console(highlight=False)
    console.print(process.start(config.mesh.platform))
    parts = setup(config)
    geometry = parts.parts.geometry
    prompts, _ = parts.select(parts.state)
    first = int(sharding.to_host(prompts.row)[0])
    ids = parts.encoded[first]
    count = sum(leaf.size for leaf in jax.tree.leaves(parts.state.trainable))
    console.print(configs.to_toml(config), markup=False)
    samples = geometry.num_prompts * geometry.group_size
    facts(
        console,
        {
            "mesh": ", ".join(f"{name} {size}" for name, size in parts.mesh.shape.items()),
            "parameters": f"{count:,}",
            "a step": f"{geometry.num_prompts} prompts x {geometry.group_size} samples = {samples} "
            f"completions of at most {geometry.max_completion_tokens} tokens",
            "an update": f"at most {geometry.micro_batches} micro-batches of {geometry.bins} bins "
            f"x {geometry.rows} rows ({geometry.prompts_per_bin} prompts each)",
            "data": f"{len(parts.rows)} rows, {config.train.steps} steps draw "
            f"{config.train.steps * geometry.num_prompts}",
            "too long": dropped_line(config, len(parts.rows), parts.dropped),
            "rewards": ", ".join(f"{r.name} x {r.weight:g}" for r in parts.rewards),
            "chat template": parts.chat.name,
            "first prompt": f"row {first}, {len(ids)} tokens: {parts.tokenizer.decode(ids)!r}",
        },
    )
    show_previews(console, parts.rewards, parts.rows[0], parts.tokenizer, config.train.steps)
