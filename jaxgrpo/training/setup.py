"""From a configuration to the functions and the state of a run.

What runs of one process have in common, made once: inputs read, programs compiled.

`jaxgrpo train --dry-run`: what a run would do, without doing it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from rich.console import Console

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.config.methods import (
    make_chain,
    make_objective,
    make_policy,
    needed_columns,
    refuse_double_weights,
)
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import (
    FIELDS,
    Params,
    Prompts,
    Rollouts,
    RolloutSpec,
    TrainBatch,
    TrainState,
)
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import Model
from jaxgrpo.models.hf import folders
from jaxgrpo.rewards import RewardLog
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout.judging import make_rewarder, make_selector
from jaxgrpo.rollout.sampler import SamplingSettings
from jaxgrpo.rollout.selection import PromptPolicy
from jaxgrpo.training import process
from jaxgrpo.training.console import facts
from jaxgrpo.training.inputs import (
    dropped_line,
    eval_source,
    load_prompts,
    make_chat,
    resolve_rewards,
    show_previews,
)
from jaxgrpo.update import packing
from jaxgrpo.update.forward import Blueprint, as_computed, held_dtype, opt_layout, param_layout
from jaxgrpo.update.optimizer import make_optimizer
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.prepare import Prepared, make_observer
from jaxgrpo.update.step import Share, Steps, alone, build_steps


class Setup(NamedTuple):
    """A run, ready to be stepped: functions, the first state, and what they were built from."""

    config: Config
    mesh: Mesh
    model: Model
    tokenizer: Any
    chat: Chat  # how prompts are written out
    rows: list[dict[str, Any]]
    encoded: list[np.ndarray]  # token ids of each row's prompt
    dropped: int  # rows left out because their prompts are too long
    held_out: PromptData | None  # of eval.data
    rewards: tuple[Reward, ...]
    blueprint: Blueprint
    state: TrainState
    select: Callable[[TrainState], tuple[Prompts, TrainState]]
    sample: Callable[[Params, Prompts, Array], Rollouts]  # (sync(state), prompts, state.key)
    reward: Callable[[Rollouts], tuple[Rollouts, RewardLog]]
    prepare: Callable[[TrainState, Rollouts], tuple[TrainState, Prepared]]
    update: Callable[[TrainState, TrainBatch], tuple[TrainState, Any]]
    sync: Callable[[TrainState], Params]


def setup(
    config: Config,
    *,
    rewards: Sequence[Callable[..., Any] | str] | Mapping[str, Any] | None = None,
    advantage: AdvantageTransform | None = None,
    dataset: Iterable[Any] | None = None,
    share: Share = alone,
) -> Setup:
    """Builds everything a run needs; no step is compiled or taken.

    Args:
      rewards, advantage, dataset: Python objects in the place of what the config names. Rewards
        are functions or built-in names, with weight 1; {name: function} names them. The data set
        is a datasets.Dataset or a list of dicts, read by the config's data keys.
      share: of sharing.Shared, where the process takes more runs that a config says whole.

    Raises: InputError where parts do not fit one another.
    """
    inputs = share("inputs", lambda: _read_inputs(config, dataset))
    mesh, folder, model, tokenizer, _, (rows, encoded, dropped), _ = inputs
    chosen = resolve_rewards(config, rewards, rows[0])
    method = functools.partial(_make_method, config, inputs, chosen, advantage, share)
    blueprint, steps = share("method", method)
    columns = needed_columns(blueprint.chain.needs | blueprint.objective.needs, rows, chosen)
    params = folders.read_params(folder, model, held_dtype(model), param_layout(blueprint))
    policy = make_policy(config, chosen)
    names = tuple(reward.name for reward in chosen)
    state = first_state(blueprint, params, policy, len(rows), config.train.seed, names)
    return Setup(
        config=config,
        mesh=mesh,
        model=model,
        tokenizer=tokenizer,
        chat=inputs.chat,
        rows=rows,
        encoded=encoded,
        dropped=dropped,
        held_out=inputs.held_out,
        rewards=chosen,
        blueprint=blueprint,
        state=state,
        select=make_selector(mesh, policy, encoded, blueprint.geometry, config.train.seed),
        sample=steps.sample,
        reward=make_rewarder(
            mesh, tokenizer, chosen, rows, columns, config.train.steps, config.train.seed
        ),
        prepare=make_observer(policy, blueprint.geometry.num_prompts, steps.prepare),
        update=steps.update,
        sync=steps.sync,
    )


class _Inputs(NamedTuple):
    """What is read from disk, but for the weights: those are donated, and read by every run."""

    mesh: Mesh
    folder: Path
    model: Model
    tokenizer: Any
    chat: Chat
    prompts: PromptData
    held_out: PromptData | None


def _read_inputs(config: Config, dataset: Iterable[Any] | None) -> _Inputs:
    mesh = sharding.make_mesh(**_mesh_sizes(config))
    folder, tokenizer, model = find_model(config, mesh)
    chat = make_chat(config, tokenizer)
    prompts = load_prompts(config, chat, dataset)
    held_out = load_prompts(config, chat, eval_source(config)) if config.eval.data else None
    return _Inputs(mesh, folder, model, tokenizer, chat, prompts, held_out)


def _make_method(
    config: Config,
    inputs: _Inputs,
    rewards: Sequence[Reward],
    advantage: AdvantageTransform | None,
    share: Share,
) -> tuple[Blueprint, Steps]:
    mesh, folder, model, tokenizer = inputs[:4]
    ends = folders.read_end_tokens(folder, tokenizer)
    blueprint = make_blueprint(config, mesh, model, tokenizer, ends, rewards, advantage)
    return blueprint, build_steps(blueprint, share)


def find_model(config: Config, mesh: Mesh) -> tuple[Path, Any, Model]:
    """The folder of the model that a config names, its tokenizer, and the model without weights.

    Raises: InputError where there is no such model, or a file of it cannot be read.
    """
    folder = folders.find_folder(config.model.path, config.model.revision)
    model_config = folders.read_config(folder)
    tokenizer = folders.read_tokenizer(folder)
    model_config = dataclasses.replace(
        model_config, dtype=config.model.dtype, float32_head=config.model.float32_head
    )
    return folder, tokenizer, decoder.build(model_config, constrain=sharding.constrain(mesh))


def make_blueprint(
    config: Config,
    mesh: Mesh,
    model: Model,
    tokenizer: Any,
    end_tokens: tuple[int, ...],
    rewards: Sequence[Reward],
    advantage: AdvantageTransform | None,
) -> Blueprint:
    """The static description of a run, checked against one another."""
    rollout = config.rollout
    bins = sharding.num_bins(mesh)
    sharding.check_divides(mesh, "rollout.prompts_per_step", rollout.prompts_per_step, "bins")
    sharding.check_divides(
        mesh, "rollout.max_completion_tokens", rollout.max_completion_tokens, "sequence"
    )
    sharding.check_divides(mesh, "rollout.max_prompt_tokens", rollout.max_prompt_tokens, "sequence")
    whole_step = rollout.prompts_per_step * rollout.group_size // bins
    geometry = Geometry(
        num_prompts=rollout.prompts_per_step,
        group_size=rollout.group_size,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_completion_tokens=rollout.max_completion_tokens,
        bins=bins,
        rows=config.train.rows_per_micro_batch or whole_step,
    )
    packing.check_geometry(geometry)
    chain = make_chain(config, rewards, advantage)
    objective = make_objective(config)
    refuse_double_weights(chain, objective.surrogate, objective.proximal)
    optimizer = config.optimizer
    return Blueprint(
        model=model,
        chain=chain,
        objective=objective,
        optimizer=make_optimizer(
            model.axes,
            use=optimizer.use,
            learning_rate=optimizer.learning_rate,
            steps=config.train.steps,
            clip_norm=optimizer.clip_norm,
            warmup_steps=optimizer.warmup_steps,
            schedule=optimizer.schedule,
            options=optimizer.options,
        ),
        geometry=geometry,
        sampling=sampling_settings(config, tokenizer, end_tokens),
        mesh=mesh,
        reward_weights={reward.name: reward.weight for reward in rewards},
    )


def sampling_settings(
    config: Config, tokenizer: Any, end_tokens: tuple[int, ...]
) -> SamplingSettings:
    if not end_tokens:
        raise InputError(
            f"model.path = {config.model.path}: its tokenizer has no end token, so no sample could "
            "end; set eos_token in its tokenizer_config.json"
        )
    pad = tokenizer.pad_token_id
    return SamplingSettings(
        group_size=config.rollout.group_size,
        max_completion_tokens=config.rollout.max_completion_tokens,
        temperature=config.rollout.temperature,
        stop_tokens=end_tokens,
        pad_token=end_tokens[0] if pad is None else pad,
        segment_tokens=config.rollout.segment_tokens,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
    )


def first_state(
    blueprint: Blueprint,
    params: Params,
    policy: PromptPolicy,
    num_rows: int,
    seed: int,
    rewards: tuple[str, ...],
) -> TrainState:
    """The state before the first step, laid out on the mesh."""
    everywhere = sharding.replicated(blueprint.mesh)
    layout = param_layout(blueprint)
    geometry = blueprint.geometry
    spec = RolloutSpec(
        num_prompts=geometry.num_prompts,
        group_size=geometry.group_size,
        max_prompt_tokens=geometry.max_prompt_tokens,
        max_completion_tokens=geometry.max_completion_tokens,
        rewards=rewards,
        num_rows=num_rows,
    )
    # A copy of its own, since the trainable parameters are donated.
    copy = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: leaf + 0, as_computed(blueprint.model, tree)),
        out_shardings=layout,
    )
    put = lambda value: sharding.put(value, everywhere)  # noqa: E731
    key = jax.random.key_data(jax.random.key(seed))
    return TrainState(
        step=put(np.int32(0)),
        trainable=params,
        frozen={name: copy(params) for name in _anchors(blueprint)},
        opt_state=jax.jit(blueprint.optimizer.init, out_shardings=opt_layout(blueprint))(params),
        advantage_state=jax.tree.map(put, blueprint.chain.init(spec)),
        prompt_policy_state=policy.init(num_rows, seed),
        cursor=put(np.int32(0)),
        key=put(np.asarray(key)),
        objective_state=jax.tree.map(put, blueprint.objective.init()),
    )


def _anchors(blueprint: Blueprint) -> list[str]:
    """The frozen policies that a method asks for."""
    needs = blueprint.chain.needs | blueprint.objective.needs
    scored = {FIELDS[name].policy for name in needs & FIELDS.keys()} - {"trainer"}
    return sorted(scored | blueprint.objective.anchors)


def _mesh_sizes(config: Config) -> dict[str, int]:
    mesh = config.mesh
    return {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor, "context": mesh.context}


T = TypeVar("T")

_SAMPLED = ("model", "mesh", "rollout")
_INPUTS = ("model", "mesh", "data", "eval", "rollout.max_prompt_tokens")
_UPDATED = (*_SAMPLED, "loss", "optimizer", "train.steps", "train.rows_per_micro_batch")
DEPENDS = {
    "inputs": _INPUTS,
    "sampler": _SAMPLED,
    "update": _UPDATED,
    "method": (*_UPDATED, "recipe", "advantage", "rewards"),
    "evaluator": (*_SAMPLED, *_INPUTS, "rewards", "train.rows_per_micro_batch"),
}
"""What can be shared, and the keys of a config that it depends on: tables, or keys of one. None of
them depends on the seed, nor on where a run is kept."""


class Shared:
    """Keeps what one run has made for the next. It belongs to one process and one set of devices.

    Only for runs that a config says whole: objects given from Python are not told apart.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def of(self, config: Config) -> Share:
        """The function (name in DEPENDS, make) -> what is shared under that name by this config."""
        flat = configs.flat(configs.tables_of(config))

        def share(name: str, make: Callable[[], T]) -> T:
            keys = DEPENDS[name]
            chosen = {key: flat[key] for key in sorted(flat) if _within(key, keys)}
            place = json.dumps([name, chosen], default=str)
            if place not in self._made:
                self._made[place] = make()
            return self._made[place]

        return share


def _within(key: str, tables: tuple[str, ...]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def dry_run(config: Config) -> None:
    """Prints what `train` would do: config, devices, geometry, parameters, the first prompt."""
    console = Console(highlight=False)
    console.print(process.start(config.mesh.platform))
    run = setup(config)
    geometry = run.blueprint.geometry
    prompts, _ = run.select(run.state)
    first = int(sharding.to_host(prompts.row)[0])
    ids = run.encoded[first]
    count = sum(leaf.size for leaf in jax.tree.leaves(run.state.trainable))
    console.print(configs.to_toml(config), markup=False)
    samples = geometry.num_prompts * geometry.group_size
    facts(
        console,
        {
            "mesh": ", ".join(f"{name} {size}" for name, size in run.mesh.shape.items()),
            "parameters": f"{count:,}",
            "a step": f"{geometry.num_prompts} prompts x {geometry.group_size} samples = {samples} "
            f"completions of at most {geometry.max_completion_tokens} tokens",
            "an update": f"at most {geometry.micro_batches} micro-batches of {geometry.bins} bins "
            f"x {geometry.rows} rows ({geometry.prompts_per_bin} prompts each)",
            "data": f"{len(run.rows)} rows, {config.train.steps} steps draw "
            f"{config.train.steps * geometry.num_prompts}",
            "too long": dropped_line(config, len(run.rows), run.dropped),
            "rewards": ", ".join(f"{r.name} x {r.weight:g}" for r in run.rewards),
            "chat template": run.chat.name,
            "first prompt": f"row {first}, {len(ids)} tokens: {run.tokenizer.decode(ids)!r}",
        },
    )
    show_previews(console, run.rewards, run.rows[0], run.tokenizer, config.train.steps)
