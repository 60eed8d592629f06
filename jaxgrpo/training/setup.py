"""From a config to the functions and the first state of a run.

`setup` builds them, and `Shared` lets runs of one process reuse what they have in common.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import files as configs
from jaxgrpo.config import methods
from jaxgrpo.config.files import Config
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics
from jaxgrpo.core.types import (
    Params,
    Prompts,
    Rollouts,
    TrainState,
)
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.data.sources import Mixture, Rows
from jaxgrpo.models import attention, decoder, sharding
from jaxgrpo.models.api import Model
from jaxgrpo.models.hf import folders
from jaxgrpo.models.hf.weights import IN_A_COPY
from jaxgrpo.rewards import RewardLog, Rewards
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rewards.registry import Preview
from jaxgrpo.rollout import refill
from jaxgrpo.rollout.answers import Answers
from jaxgrpo.rollout.judging import Judged, make_judge, put_prompts, rollout_progress, step_progress
from jaxgrpo.rollout.overlap import sample_and_judge
from jaxgrpo.rollout.sampler import SamplingSettings
from jaxgrpo.rollout.selection import PromptPolicy, prompt_metrics, source_metrics
from jaxgrpo.rollout.stopping import EarlyStop, StopStrings
from jaxgrpo.training import inputs, memory, parameters
from jaxgrpo.training.replay import (
    Replay,
    RolloutSource,
    SavedRollouts,
    make_rollout_source,
    read_files,
)
from jaxgrpo.update import diagnostics, packing, step
from jaxgrpo.update.forward import (
    Blueprint,
    held_dtype,
    param_layout,
    trained,
)
from jaxgrpo.update.optimizer import make_optimizer

DIVIDED = {
    "prompts_per_step": "bins",
    "max_completion_tokens": "sequence",
    "max_prompt_tokens": "sequence",
}
"""Sizes of a rollout that the devices divide among them: key -> axis of the mesh."""

_SAMPLING_KEYS = ("model", "lora", "mesh", "rollout")
_INPUT_KEYS = ("model", "lora", "mesh", "data", "eval", "rollout.max_prompt_tokens", "train.remat")
_LAYOUT_KEYS = ("train.tokens_per_micro_batch", "train.remat")
_COUNT_KEYS = ("train.steps", "train.num_iterations", "train.minibatches")
_STEP_KEYS = ("loss", "optimizer", "train.on_no_live_sample")
_UPDATE_KEYS = (*_SAMPLING_KEYS, *_STEP_KEYS, *_COUNT_KEYS, *_LAYOUT_KEYS)
DEPENDS: dict[str, tuple[str, ...]] = {
    "inputs": _INPUT_KEYS,
    "sampler": _SAMPLING_KEYS,
    "update": _UPDATE_KEYS,
    "method": (*_UPDATE_KEYS, "recipe", "advantage", "rewards"),
    "evaluator": (*_SAMPLING_KEYS, *_INPUT_KEYS, "rewards", "train.tokens_per_micro_batch"),
}
"""What runs can share -> the tables, or single keys, of a config that it depends on. Neither the
seed nor the run's folder matters to any of it."""

_STEP_FUNCTIONS = ("prepare", "live_groups", "update", "sync", "update_program")
"""Functions of step.Steps that `Setup` has."""

CALLS = 100
"""Steps that programs of sampling are chosen for; not train.steps, since a run may be prolonged."""


class Collected(NamedTuple):
    """What `Setup.collect` returns: the rollouts of a step, and what the log shows of them."""

    rollouts: Rollouts
    reward_log: RewardLog  # what the rewards logged
    metrics: Metrics


class Setup(NamedTuple):
    """A run, ready to be stepped: functions, the first state, and what they were built from."""

    config: Config
    mesh: Mesh
    folder: Path  # of the model
    model: Model
    tokenizer: Any
    chat: Chat  # how prompts are written out
    rows: list[dict[str, Any]]
    encoded: list[np.ndarray]  # token ids of each row's prompt
    dropped: int  # rows left out because their prompts are too long
    mixture: Mixture | None  # of the rows, where they are from several sources
    held_out: PromptData | None  # of eval.data
    replay: Replay | None  # the rollouts that it trains on, if they are saved ones
    rewards: tuple[Reward, ...]
    answers: Answers | None  # of each row, where the chain reads what a pass over them gives
    blueprint: Blueprint
    state: TrainState
    policy: PromptPolicy
    select: Callable[[TrainState], tuple[Prompts, TrainState]]
    sample: step.Sample  # (sync(state), prompts, state.key)
    reward: Callable[..., tuple[TrainState, Rollouts, RewardLog]]  # (state, rollouts, early=())
    prepare: step.Prepare
    live_groups: Callable[[TrainState, Rollouts], np.ndarray]  # of step.Steps
    update: step.Update
    sync: step.Sync
    update_program: Any  # of step.Steps

    def collect(
        self,
        state: TrainState,
        phase: Callable[[str], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> tuple[TrainState, Collected]:
        """Rollouts for one step: select, sample, reward; with `rollout.refill` until it is full.

        Args:
          phase: a context round each "sample" and each "reward".
        """
        with phase("sample"):
            params = self.sync(state)

        def generate(state: TrainState) -> tuple[TrainState, Rollouts, RewardLog]:
            with phase("sample"):
                prompts, state = self.select(state)
                rollouts, early = self._sample_step(params, prompts, state.key)
                jax.block_until_ready(rollouts.completion_tokens)
            with phase("reward"):
                return self.reward(state, rollouts, early)

        def judge(state: TrainState, rollouts: Rollouts) -> refill.Verdict:
            with phase("prepare"):
                live = self.live_groups(state, rollouts)
            return refill.Verdict(live, *self._summed_rewards(rollouts))

        first_state, refill_keys = state, self.config.rollout.refill
        if refill_keys is None:
            state, rollouts, reward_log = generate(state)
            metrics: Metrics = {}
        else:
            rounds = refill.max_rounds(refill_keys["factor"])
            state, filled, reward_log, metrics = refill.fill(state, generate, judge, rounds)
            rollouts = put_prompts(self.mesh, filled)
        metrics |= prompt_metrics(self.policy, first_state, state, len(rollouts.row))
        if self.mixture is not None:
            row = sharding.to_host(rollouts.row)
            metrics |= source_metrics(self.mixture, row, *self._summed_rewards(rollouts))
        return state, Collected(rollouts, reward_log, metrics)

    def _summed_rewards(self, rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray]:
        """The weighted sum of each sample's rewards and whether it was scored, [P, G], on the
        host."""
        weights = self.blueprint.reward_weights
        rewards = jax.tree.map(jnp.asarray, sharding.to_host(rollouts.rewards))
        summed = diagnostics.as_summed(rewards, weights, self.blueprint.chain)
        return sharding.to_host(diagnostics.weighted_sum(summed, weights))

    def try_rewards(self) -> dict[str, Preview]:
        """What every reward gives row 0's gold answer and the empty text, called as in step 1."""
        rows, settings = self.rows, self.blueprint.sampling
        prompts, steps = self.blueprint.geometry.num_prompts, self.config.train.steps
        state = step_progress(0, 0, prompts, len(rows), steps)
        return inputs.try_rewards(
            self.rewards, rows[0], self.tokenizer, settings.stop_tokens, state
        )

    def _sample_step(
        self, params: Params, prompts: Prompts, key: jax.Array
    ) -> tuple[Rollouts, list[Judged]]:
        """Samples, and where the engine can tell, what was judged before it ended."""
        tells = "finished" in inspect.signature(self.sample).parameters
        judge = make_judge(self.tokenizer, self.rewards, self.rows)
        if not (self.config.rollout.overlap_rewards and tells and judge.per_sample):
            return self.sample(params, prompts, key), []
        progress = rollout_progress(prompts, len(self.rows), self.config.train.steps)
        return sample_and_judge(self.sample, params, prompts, key, judge, progress)


def setup(
    config: Config,
    *,
    rewards: Rewards | None = None,
    advantage: AdvantageTransform | None = None,
    dataset: Rows | None = None,
    rollouts: SavedRollouts | None = None,
    share: step.Share = step.share_nothing,
    check: Callable[[Mapping[str, Any]], None] = lambda disk_inputs: None,
    mesh: Mesh | None = None,
    state_of: Callable[[Blueprint], TrainState] | None = None,
) -> Setup:
    """Builds everything a run needs; no step is compiled or taken.

    Args:
      rewards, advantage, dataset: Python objects instead of what the config names. Rewards
        are functions or built-in names, with weight 1; {name: function} names them. The data set
        is one that `jaxgrpo.train` takes, read by the config's data keys.
      rollouts: files of saved rollouts, one per step, to train on instead of sampling and
        rewarding (docs/rollouts.md). Only the names and weights of the rewards count then.
      share: of `Shared`, in a process that takes several runs fully described by their configs.
      check: gets the fields of Setup that are read from disk, before weights are, and may raise.
      mesh, state_of: of a run that is planned, on devices that need not be here; no weights are
        read then.

    Raises: InputError where parts do not fit one another.
    """
    disk_inputs = share("inputs", lambda: _read_inputs(config, dataset, rollouts, mesh))
    check(disk_inputs)
    model_setup = ModelSetup(*(disk_inputs[name] for name in ModelSetup._fields))
    row = None if disk_inputs["replay"] else disk_inputs["rows"][0]
    run_rewards = inputs.resolve_rewards(config, rewards, row)
    method = functools.partial(build_method, config, model_setup, run_rewards, advantage, share)
    blueprint, steps = share("method", method)
    memory.refuse_too_large(memory.run_memory(config, blueprint), model_setup.mesh)
    source = make_rollout_source(config, disk_inputs, blueprint, steps, run_rewards)
    read_state = functools.partial(_read_state, config, disk_inputs, source, run_rewards)
    return Setup(
        config=inputs.at_time(config, disk_inputs["chat"].time),
        **disk_inputs,
        rewards=run_rewards,
        answers=source.answers,
        blueprint=blueprint,
        state=(state_of or read_state)(blueprint),
        policy=source.policy,
        select=source.select,
        sample=source.sample,
        reward=source.reward,
        **{name: getattr(steps, name) for name in _STEP_FUNCTIONS},
    )


def _read_state(
    config: Config,
    disk_inputs: Mapping[str, Any],
    rollout_source: RolloutSource,
    rewards: Sequence[Reward],
    blueprint: Blueprint,
) -> TrainState:
    """The first state, with the weights of the model."""
    model, seed = disk_inputs["model"], config.train.seed
    names = tuple(reward.name for reward in rewards)
    start = rollout_source.policy, len(disk_inputs["rows"]), seed, names
    dtype, layout = held_dtype(model), param_layout(blueprint)
    params = parameters.read_start(config, disk_inputs["folder"], model, dtype, layout)
    return parameters.first_state(blueprint, params, *start, leftover=rollout_source.leftover)


class ModelSetup(NamedTuple):
    """The model that a config names, without weights, on the devices that it names."""

    mesh: Mesh
    folder: Path
    tokenizer: Any
    model: Model


def find_model(config: Config, mesh: Mesh | None = None, fetch_weights: bool = True) -> ModelSetup:
    """The model of a config, on a mesh of its own by default.

    Args:
      fetch_weights: as of `inputs.find_config`.

    Raises: InputError where there is no such model, a file of it cannot be read, or it has no
    positions for prompt and completion.
    """
    if mesh is None:
        sizes = config.mesh
        mesh = sharding.make_mesh(sizes.data, sizes.fsdp, sizes.tensor, sizes.context)
    folder, stored = inputs.find_config(config, fetch_weights)
    inputs.check_length(config, stored)
    tokenizer, size = folders.read_tokenizer(folder), stored.vocab_size
    ends = folders.read_end_tokens(folder, tokenizer, size)
    without_text = folders.tokens_without_text(tokenizer, ends, size)
    model_config = parameters.model_config_for_run(config, stored, without_text)
    remat = _remat(config, mesh)
    model = decoder.build(model_config, constrain=sharding.constrain(mesh), remat=remat)
    return ModelSetup(mesh, folder, tokenizer, model)


def _read_inputs(
    config: Config,
    dataset: Rows | None,
    rollouts: SavedRollouts | None,
    mesh: Mesh | None,
) -> dict[str, Any]:
    """The fields of Setup that are read from disk. Each run reads the weights itself: its update
    overwrites them."""
    model_setup = find_model(config, mesh, fetch_weights=mesh is None)
    vocab_size = model_setup.model.config.vocab_size
    chat = inputs.make_chat(config, model_setup.tokenizer, vocab_size)
    replay = None
    if rollouts is None:
        prompts = inputs.load_prompts(config, chat, dataset)
    elif dataset is not None:
        raise InputError("dataset and rollouts are both given: saved rollouts bring their prompts")
    else:
        ends = folders.read_end_tokens(model_setup.folder, model_setup.tokenizer, vocab_size)
        replay = read_files(config, rollouts, model_setup.tokenizer, model_setup.model.config, ends)
        prompts = replay.data
    source = inputs.eval_source(config) if config.eval.data else None
    held_out = inputs.load_prompts(config, chat, source) if source else None
    run_inputs = {"chat": chat, "held_out": held_out, "replay": replay}
    return {**model_setup._asdict(), **prompts._asdict(), **run_inputs}


def build_method(
    config: Config,
    model_setup: ModelSetup,
    rewards: Sequence[Reward],
    advantage: AdvantageTransform | None = None,
    share: step.Share = step.share_nothing,
    sampling: SamplingSettings | None = None,
) -> tuple[Blueprint, step.Steps]:
    """The static description of a run, checked as a whole, and the functions built from it.

    Args:
      sampling: how it samples; None: as the tokenizer of the model says.
    """
    mesh, model = model_setup.mesh, model_setup.model
    sampling_mesh, geometry = _sampling_mesh(config, mesh), _geometry(config, mesh)
    recipe = methods.make_recipe(config, rewards, advantage)
    chain = methods.make_chain(config, recipe)
    objective = methods.make_objective(config)
    methods.refuse_double_weights(chain, objective.surrogate, objective.proximal)
    optimizer = make_optimizer(
        trained(model, model.axes), updates=config.train.updates, **vars(config.optimizer)
    )
    blueprint = Blueprint(
        model=model,
        chain=chain,
        recipe=recipe,
        objective=objective,
        optimizer=optimizer,
        geometry=geometry,
        sampling=sampling or sampling_settings(config, model_setup),
        mesh=mesh,
        sampling_mesh=sampling_mesh,
        reward_weights={reward.name: reward.weight for reward in rewards},
        num_iterations=config.train.num_iterations,
        on_no_live_sample=config.train.on_no_live_sample,
        kernel=attention.choose_kernel(
            config.model.attention,
            mesh.devices.flat[0].platform,
            model.config,
            row=max(geometry.max_completion_tokens, geometry.max_prompt_tokens),
            mesh=mesh,
        ),
    )
    policies = memory.copied_policies(config, blueprint)
    if config.train.tokens_per_micro_batch is None:
        blueprint = memory.with_fitting_tokens(blueprint, policies, _remat(config, mesh))
    blueprint = memory.with_slots(blueprint, policies)
    return blueprint, step.build_steps(blueprint, share)


def _geometry(config: Config, mesh: Mesh) -> packing.Geometry:
    rollout, train = config.rollout, config.train
    sizes = (
        *(rollout.prompts_per_step, rollout.group_size),
        *(rollout.max_prompt_tokens, rollout.max_completion_tokens),
    )
    geometry = packing.make_geometry(sizes, mesh, train.tokens_per_micro_batch, train.minibatches)
    packing.check_geometry(geometry)
    sharding.check_divides(mesh, "train.tokens_per_micro_batch", geometry.tokens, "sequence")
    return geometry


def _sampling_mesh(config: Config, mesh: Mesh) -> Mesh:
    """The mesh that a config samples on. Raises: InputError where sizes do not divide over both."""
    rollout, tensor = config.rollout, config.mesh.sampling_tensor
    for name, axis in DIVIDED.items():
        sharding.check_divides(mesh, f"rollout.{name}", getattr(rollout, name), axis)
    sampling_mesh = sharding.sampling_mesh(mesh, tensor)
    where = f"mesh.sampling_tensor = {tensor}: rollout.prompts_per_step"
    sharding.check_divides(sampling_mesh, where, rollout.prompts_per_step, "bins")
    return sampling_mesh


def _remat(config: Config, mesh: Mesh) -> decoder.Remat:
    return decoder.choose_remat(config.train.remat, mesh.devices.flat[0].platform)


def samples_per_step(config: Config) -> int:
    """Samples of a step."""
    return config.rollout.prompts_per_step * config.rollout.group_size


def sampling_settings(config: Config, model_setup: ModelSetup | Setup) -> SamplingSettings:
    """How a config samples from a model.

    Raises: InputError where no token ends a sample.
    """
    tokenizer, size = model_setup.tokenizer, model_setup.model.config.vocab_size
    ends = folders.read_end_tokens(model_setup.folder, tokenizer, size)
    if not ends:
        raise InputError(
            f"model.path = {config.model.path}: its tokenizer has no end token, so no sample could "
            f"end; set eos_token in tokenizer_config.json {IN_A_COPY}"
        )
    pad, strings = tokenizer.pad_token_id, config.rollout.stop_strings
    if pad is None or pad >= size:
        pad = ends[0]
    return make_sampling_settings(
        config,
        ends,
        pad,
        StopStrings(tokenizer, strings) if strings else None,
    )


def make_sampling_settings(
    config: Config, ends: tuple[int, ...], pad: int, strings: StopStrings | None = None
) -> SamplingSettings:
    """How a config samples from a model whose tokens `ends` end a sample."""
    rollout = config.rollout
    return SamplingSettings(
        group_size=rollout.group_size,
        max_completion_tokens=rollout.max_completion_tokens,
        temperature=rollout.temperature,
        stop_tokens=ends,
        pad_token=pad,
        segment_tokens=rollout.segment_tokens,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        min_completion_tokens=rollout.min_completion_tokens,
        slots=rollout.slots or 0,
        stop_strings=strings,
        early_stop=EarlyStop(**rollout.early_stop) if rollout.early_stop else None,  # pyright: ignore[reportArgumentType]
        kv_cache_dtype=rollout.kv_cache_dtype,
        calls=CALLS,
    )


class Shared:
    """Keeps what one run has built for the next one, in one process and on one set of devices.

    Only for runs fully described by their config: Python objects are not part of the key.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def for_config(self, config: Config) -> step.Share:
        """A function (name in DEPENDS, make) that makes the thing, or returns the one it kept."""
        flat = configs.flat(configs.to_tables(config))
        if config.optimizer.schedule == "constant":  # the number of steps is in no program
            del flat["train.steps"]

        def share(name: str, make: Callable[[], Any]) -> Any:
            keys = DEPENDS[name]
            tables = tuple(f"{key}." for key in keys)
            settings = {key: flat[key] for key in sorted(flat) if f"{key}.".startswith(tables)}
            place = json.dumps([name, settings], default=str)
            if place not in self._values:
                self._values[place] = make()
            return self._values[place]

        return share
