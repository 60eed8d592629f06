"""From a config to the functions and the first state of a run.

`setup` builds them, and `Shared` lets runs of one process reuse what they have in common.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import files as configs
from jaxgrpo.config import methods
from jaxgrpo.config.contenders import make_atlases
from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import ReferenceKeys, RolloutKeys, TrainKeys
from jaxgrpo.config.world import COLUMNS, KEYS, Factories
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Learner, Params, Rollouts, Stream
from jaxgrpo.data.sources import Rows
from jaxgrpo.losses import Objective
from jaxgrpo.models import attention, decoder, sharding
from jaxgrpo.rewards import Rewards
from jaxgrpo.rewards.protocol import Reward, reads_any
from jaxgrpo.rewards.registry import Preview
from jaxgrpo.rollout import refill
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.engine import SamplingSettings, record_shapes
from jaxgrpo.rollout.judging import RolloutSource, make_judge, step_progress
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training import inputs, memory, parameters, teachers
from jaxgrpo.training.collecting import Collected, Collector
from jaxgrpo.training.experience import with_experience
from jaxgrpo.training.growing import brought_fields, make_trees, make_writer
from jaxgrpo.training.inputs import Inputs
from jaxgrpo.training.memory import Memory
from jaxgrpo.training.pretrained import Pretrained, check_recurrent, sampling_settings
from jaxgrpo.training.replay import SavedRollouts
from jaxgrpo.training.resets import may_reset
from jaxgrpo.training.rollout_source import first_stream, make_rollout_source
from jaxgrpo.update import packing, step
from jaxgrpo.update.atlas import Atlases
from jaxgrpo.update.balance import COEFFICIENT, RATE, make_balance
from jaxgrpo.update.forward import Blueprint, held_dtype, param_layout, params_of, trained
from jaxgrpo.update.optimizer import make_optimizer
from jaxgrpo.update.preparing import Preparer

DIVIDED = {
    "prompts_per_step": "bins",
    "max_completion_tokens": "sequence",
    "max_prompt_tokens": "sequence",
}
"""Sizes of a rollout that the devices divide among them: key -> axis of the mesh."""

BATCHES = 100
"""Batches that programs of decoding are chosen for; not train.steps: a run may be prolonged."""

_TURN_KEYS = ("tools", "environment", *(f"rollout.{name}" for name in KEYS))
_SAMPLING_KEYS = ("model", "lora", "mesh", "rollout", "tools", "environment", "train.support")
_INPUT_KEYS = (
    *("model", "lora", "mesh", "data", "eval", "rollout.max_prompt_tokens", "train.remat"),
    *_TURN_KEYS,
)
_LAYOUT_KEYS = ("train.tokens_per_micro_batch", "train.remat", "train.routing")
_COUNT_KEYS = ("train.steps", "train.num_iterations", "train.minibatches")
_STEP_KEYS = ("loss", "optimizer", "train.on_no_live_sample", COEFFICIENT, RATE)
_UPDATE_KEYS = (*_SAMPLING_KEYS, *_STEP_KEYS, *_COUNT_KEYS, *_LAYOUT_KEYS)
_METHOD_KEYS = (
    *("recipe", "advantage", "rewards", "scores"),
    *("reference.ema_decay", "data.answer_cuts", "data.history", "experience.share"),
)
DEPENDS: dict[str, tuple[str, ...]] = {
    "inputs": _INPUT_KEYS,
    "engine": _SAMPLING_KEYS,
    "update": _UPDATE_KEYS,
    "method": (*_UPDATE_KEYS, *_METHOD_KEYS),
    "evaluator": (*_SAMPLING_KEYS, *_INPUT_KEYS, "rewards", "train.tokens_per_micro_batch"),
}
"""What runs can share -> the tables, or single keys, of a config that it depends on. Neither the
seed nor the run's folder matters to any of it."""


class Method(NamedTuple):
    """How a run trains and samples: what is built for a model and a method, whatever the data."""

    blueprint: Blueprint
    memory: Memory  # that it takes, but for the update's working memory
    engine: SlotEngine  # draws samples, of evaluations too
    steps: step.Steps


class Setup(NamedTuple):
    """A run, ready to be stepped: functions, where they begin, and what they were built from."""

    config: Config
    inputs: Inputs
    rewards: tuple[Reward, ...]
    blueprint: Blueprint
    memory: Memory
    engine: SlotEngine
    steps: step.Steps
    collector: Collector
    atlases: Atlases | None  # of `atlas.methods`
    learner: Learner
    stream: Stream

    @property
    def sync(self) -> step.Sync:
        """`step.Steps.sync`: learner -> parameters to sample with."""
        return self.steps.sync

    def params_to_evaluate(self, learner: Learner) -> Params:
        """The policy as evaluations take it: as `sync` gives it, but on a CPU as the update has it.

        Nothing overwrites it there meanwhile, and the sampler's copy is gone when the second pass
        begins, which would stack it again.
        """
        blueprint = self.blueprint
        mesh, config = blueprint.mesh, blueprint.model.config
        takes_as_is = blueprint.samples_on == mesh and mesh.shape["fsdp"] == 1
        if takes_as_is and mesh.devices.flat[0].platform == "cpu" and config.dtype == "float32":
            return params_of(learner)
        return self.sync(learner)

    @property
    def collect(self) -> Callable[..., tuple[Stream, Collected]]:
        """`Collector.collect`: (params, version, stream) -> (stream, rollouts and more)."""
        return self.collector.collect

    @property
    def prepare(self) -> step.Prepare:
        """`step.Steps.prepare`: (learner, rollouts) -> (learner, batches and more)."""
        return self.steps.prepare

    @property
    def live_groups(self) -> Callable[[Learner, Rollouts], np.ndarray]:
        """`step.Steps.live_groups`: (learner, rollouts) -> [P] bool."""
        return self.steps.live_groups

    @property
    def update(self) -> step.Update:
        """`step.Steps.update`: (learner, batches) -> (learner, metrics)."""
        return self.steps.update

    def try_rewards(self) -> dict[str, Preview]:
        """What every reward gives row 0's gold answer and the empty text, called as in step 1."""
        rows, settings = self.inputs.prompts.rows, self.blueprint.sampling
        num_prompts, steps = self.blueprint.geometry.num_prompts, self.config.train.steps
        state = step_progress(0, 0, num_prompts, len(rows), steps)
        tokenizer = self.inputs.pretrained.tokenizer
        # What reads conversations is tried on the first samples.
        rewards = [reward for reward in self.rewards if not reads_any(reward.function, COLUMNS)]
        return inputs.try_rewards(rewards, rows[0], tokenizer, settings.stop_tokens, state)


def setup(
    config: Config,
    *,
    rewards: Rewards | None = None,
    advantage: AdvantageTransform | None = None,
    dataset: Rows | None = None,
    rollouts: SavedRollouts | None = None,
    tools: Sequence[Callable[..., Any] | str] = (),
    environment: Factories | None = None,
    share: step.Share = step.share_nothing,
    check: Callable[[Inputs], None] = lambda run_inputs: None,
    mesh: Mesh | None = None,
    make_learner: Callable[[Blueprint], Learner] | None = None,
) -> Setup:
    """Builds everything a run needs; no step is compiled or taken.

    Args:
      rewards, advantage, dataset: Python objects instead of what the config names. Rewards
        are functions or built-in names, with weight 1; {name: function} names them. The data set
        is one that `jaxgrpo.train` takes, read by the config's data keys.
      rollouts: files of saved rollouts, one per step, to train on instead of sampling and
        rewarding (docs/rollouts.md). Only the names and weights of the rewards count then.
      tools, environment: as of `jaxgrpo.train`.
      share: of `Shared`, in a process that takes several runs fully described by their configs.
      check: gets what is read from disk, before weights are, and may raise.
      mesh, make_learner: of a run that is planned, on devices that need not be here; no weights
        are read then.

    Raises: InputError where parts do not fit one another.
    """
    run_inputs = share(
        "inputs", lambda: inputs.read_inputs(config, dataset, rollouts, mesh, tools, environment)
    )
    check(run_inputs)
    rows = () if run_inputs.replay else run_inputs.prompts.rows
    longest = config.rollout.max_completion_tokens
    given_rewards = config.rewards, longest, rewards, rows, config.folder
    run_rewards = inputs.resolve_rewards(*given_rewards, COLUMNS if run_inputs.world else ())
    if run_inputs.world is not None:
        run_rewards += tuple(run_inputs.world.rewards(run_rewards))
    if not run_rewards:
        raise InputError(
            "rewards: missing, and the environment has no get_reward: give at least one, "
            'rewards = [{ use = "..." }]'
        )
    pretrained, support = run_inputs.pretrained, config.train.support
    sampling = sampling_settings(config.rollout, pretrained, run_inputs.world, support)
    parts = config, pretrained, run_rewards, sampling, advantage, share
    method = functools.partial(build_method, *parts)
    return _assemble(config, run_inputs, run_rewards, share("method", method), make_learner)


def _assemble(
    config: Config,
    run_inputs: Inputs,
    rewards: tuple[Reward, ...],
    method: Method,
    make_learner: Callable[[Blueprint], Learner] | None,
) -> Setup:
    """The run of a method on its inputs. Its weights are read last."""
    blueprint, pretrained, rows = method.blueprint, run_inputs.pretrained, run_inputs.prompts.rows
    memory.refuse_too_large(method.memory, pretrained.mesh)
    keys = config.rollout, config.data, config.train, config.scores
    grown = make_trees(config.tree, config.rollout, config.experience)
    lacking = blueprint.chain.needs.difference(*rows[:1])
    share, has_turns, forks = config.experience.share, config.has_turns, config.data.forks
    recorded = record_shapes(blueprint.model.config.kinds, blueprint.sampling.support)
    brought = brought_fields(grown, config.rollout, share, has_turns, lacking, forks, recorded)
    converse = None if (world := run_inputs.world) is None else world.converse(rows)
    options = {"group_size": config.rollout.group_size, "grown": grown, "converse": converse}
    draw_groups = functools.partial(draw, method.engine, **options)
    if (column := config.data.completion) is not None:
        reading = blueprint.sampling, blueprint.chain, blueprint.objective
        draw_groups = make_writer(column, rows, pretrained, config.rollout, *reading, brought)
    source = make_rollout_source(*keys, run_inputs, blueprint, draw_groups, rewards, brought)
    again = config.experience, config.rollout, run_inputs, rewards, config.train.seed
    source = with_experience(source, *again, blueprint.samples_on)
    # Saved rollouts have ended all at once, and groups with experience are mixed first.
    waits = bool(run_inputs.replay) or config.experience.share > 0
    parts = config.rollout, config.train.steps, run_inputs, rewards, method
    collector = _make_collector(*parts, source, waits)
    start = config.train.seed, pretrained, len(rows), rewards
    atlas = config.atlas.methods, configs.to_tables(config), config.source, rewards
    return Setup(
        config=config.at_time(run_inputs.chat.time),
        inputs=run_inputs,
        rewards=rewards,
        **method._asdict(),
        collector=collector,
        atlases=make_atlases(Preparer(blueprint), *atlas),
        learner=(make_learner or functools.partial(_read_learner, *start))(blueprint),
        stream=first_stream(source, len(rows), config.train.seed),
    )


def _make_collector(
    rollout: RolloutKeys,
    steps: int,
    run_inputs: Inputs,
    rewards: Sequence[Reward],
    method: Method,
    source: RolloutSource,
    waits: bool,
) -> Collector:
    """What collects the rollouts of a run of `steps` steps; where it waits, no reward judges a
    group before all have ended."""
    rows, refilling = run_inputs.prompts.rows, rollout.refill
    judge = make_judge(run_inputs.pretrained.tokenizer, rewards, rows)
    judges_early = rollout.overlap_rewards and judge.per_sample and not waits
    blueprint, interruption = method.blueprint, method.engine.settings.interruption
    return Collector(
        source=source,
        mesh=blueprint.mesh,
        chain=blueprint.chain,
        reward_weights=blueprint.reward_weights,
        mixture=run_inputs.prompts.mixture,
        num_rows=len(rows),
        max_steps=steps,
        early_judge=judge if judges_early else None,
        max_rounds=refill.max_rounds(refilling["factor"]) if refilling else None,
        staleness=rollout.staleness,
        interrupted_after=interruption and interruption.after,
        stops_early=rollout.early_stop is not None,
    )


def _read_learner(
    seed: int,
    pretrained: Pretrained,
    num_rows: int,
    rewards: Sequence[Reward],
    blueprint: Blueprint,
) -> Learner:
    """The learner before the first step, with the weights of the model."""
    names = tuple(reward.name for reward in rewards)
    model = pretrained.model
    layout = held_dtype(model), param_layout(model, blueprint.mesh)
    params = pretrained.read_params(seed, model, *layout)
    read = teachers.read_teachers(blueprint.teachers, blueprint.mesh)
    return parameters.first_learner(blueprint, params, num_rows, names, read)


def build_method(
    config: Config,
    pretrained: Pretrained,
    rewards: Sequence[Reward],
    sampling: SamplingSettings,
    advantage: AdvantageTransform | None = None,
    share: step.Share = step.share_nothing,
) -> Method:
    """The static description of a run, checked as a whole, and what is built from it."""
    mesh, model, rollout, train = pretrained.mesh, pretrained.model, config.rollout, config.train
    sampling_mesh = _sampling_mesh(rollout, config.mesh.sampling_tensor, mesh)
    recorded = record_shapes(model.config.kinds, sampling.support, train.routing == "replay")
    geometry = _geometry(rollout, train, mesh, config.data.forks)._replace(records=recorded)
    named = config.named_chain if advantage is None else advantage
    recipe = methods.make_recipe(named, rewards, rollout.refill is not None)
    chain = methods.make_chain(config.loss, recipe)
    objective = methods.make_objective(config.loss, rollout.max_completion_tokens)
    scores = teachers.method_scores(config.scores, chain.needs, objective)
    methods.refuse_double_weights(chain, objective.surrogate, objective.proximal)
    methods.refuse_all_stale(rollout.staleness, train.steps)
    _refuse_stale(chain, objective, rollout.staleness, config.experience.share)
    scoring = teachers.find_teachers(config.teachers, pretrained, config.model.attention, geometry)
    models = model, *(teacher.model for teacher in scoring.values())
    geometry = check_recurrent(geometry.for_models(models), mesh)
    keys = vars(config.optimizer)
    optimizer = make_optimizer(trained(model, model.axes), updates=train.updates, **keys)
    blueprint = Blueprint(
        model=model,
        chain=chain,
        recipe=recipe,
        objective=objective,
        optimizer=optimizer,
        geometry=geometry,
        sampling=sampling,
        mesh=mesh,
        sampling_mesh=sampling_mesh,
        reward_weights={reward.name: reward.weight for reward in rewards},
        num_iterations=train.num_iterations,
        on_no_live_sample=train.on_no_live_sample,
        kernel=_choose_kernel(config.model.attention, pretrained, geometry),
        scores=scores,
        teachers=scoring,
        answer_cuts=config.data.answer_cuts,
        ema_decay=config.reference.ema_decay,
        balance=make_balance(train.router_aux_loss_coef, train.router_bias_update_rate, model),
    )
    policies = blueprint.policies, pretrained, config.reference
    kl, two_meshes = config.measures_kl_to_base, blueprint.has_two_meshes
    copies = _copies(*policies, measures_kl=kl, has_two_meshes=two_meshes)
    return _fit_to_devices(blueprint, pretrained, copies, train, share)


def _refuse_stale(
    chain: AdvantageTransform, objective: Objective, staleness: int, share: float
) -> None:
    """Args: staleness, share: `rollout.staleness` and `experience.share`."""
    for name, value in {"rollout.staleness": staleness, "experience.share": share}.items():
        if value:
            methods.refuse_stale(chain, objective, f"{name} = {value:g}")


def _copies(
    policies: Sequence[str],
    pretrained: Pretrained,
    reference: ReferenceKeys,
    *,
    measures_kl: bool,
    has_two_meshes: bool,
) -> tuple[str, ...]:
    """`memory.copied_policies` of a run whose method reads `policies`."""
    has_adapters = pretrained.model.config.lora is not None
    parameters.refuse_average(policies, has_adapters, reference)
    return memory.copied_policies(
        policies,
        measures_kl=measures_kl,
        resets=may_reset(reference),
        has_fresh_adapters=pretrained.has_fresh_adapters,
        has_two_meshes=has_two_meshes,
    )


def _fit_to_devices(
    blueprint: Blueprint,
    pretrained: Pretrained,
    copies: Sequence[str],
    train: TrainKeys,
    share: step.Share,
) -> Method:
    """The method with as many slots, tokens of a micro-batch and logits of a chunk as fit beside
    what a run keeps.

    Args:
      copies: `memory.copied_policies` of the run.
      train: the config's, which may say how many tokens a micro-batch has.
    """
    mesh, geometry = blueprint.mesh, blueprint.geometry
    persistent = memory.count(blueprint, copies).persistent
    sizes = blueprint.model, mesh, blueprint.optimizer, geometry, persistent
    logits, remat = memory.fitting_passes(train.remat, *sizes)
    if remat != decoder.choose_remat(train.remat, mesh.devices.flat[0].platform):
        constrain = sharding.constrain(mesh)
        model = decoder.build(blueprint.model.config, constrain=constrain, remat=remat)
        blueprint = blueprint._replace(model=model)
    blueprint = blueprint._replace(logits_per_chunk=logits, remat=remat)
    if train.tokens_per_micro_batch is None:
        blueprint = blueprint._replace(geometry=memory.fitting_geometry(*sizes, remat, logits))
    parts = pretrained, blueprint.sampling, blueprint.samples_on, geometry, persistent
    engine = share("engine", lambda: _make_engine(*parts))
    slots = engine.slots_for(geometry.num_prompts, geometry.group_size)
    blueprint = blueprint._replace(sampling=blueprint.sampling._replace(slots=slots))
    usage = memory.count(blueprint, copies)
    return Method(blueprint, usage, engine, step.build_steps(blueprint, share))


def _make_engine(
    pretrained: Pretrained,
    settings: SamplingSettings,
    mesh: Mesh,
    geometry: packing.Geometry,
    persistent: int,
) -> SlotEngine:
    """The engine of a run, for its steps and its evaluations.

    Args:
      mesh: that it samples on.
      persistent: bytes of what the run keeps, on each device.
    """
    meshes = pretrained.mesh, mesh
    weights = memory.weights_to_sample(pretrained.model, *meshes, settings.weight_dtype)
    free = memory.free_beside(mesh, persistent + weights)
    sampled, width = pretrained.model_on(mesh), geometry.max_prompt_tokens
    engine = SlotEngine(sampled, settings, mesh, width=width, free=free)
    engine.expect(geometry.group_size, BATCHES)
    return engine


def _choose_kernel(
    name: str, pretrained: Pretrained, geometry: packing.Geometry
) -> attention.Kernel:
    """The kernel of attention that `model.attention` names, for the rows of an update."""
    mesh, model_config = pretrained.mesh, pretrained.model.config
    sizes = {"row": geometry.longest, "samples_per_row": geometry.samples_per_row}
    platform = mesh.devices.flat[0].platform
    return attention.choose_kernel(name, platform, model_config, **sizes, mesh=mesh)


def _geometry(
    rollout: RolloutKeys, train: TrainKeys, mesh: Mesh, has_forks: bool
) -> packing.Geometry:
    sizes = (
        *(rollout.prompts_per_step, rollout.group_size),
        *(rollout.max_prompt_tokens, rollout.max_completion_tokens),
    )
    tokens, minibatches = train.tokens_per_micro_batch, train.minibatches
    geometry = packing.make_geometry(sizes, mesh, tokens, minibatches, has_forks=has_forks)
    packing.check_geometry(geometry)
    sharding.check_divides(mesh, "train.tokens_per_micro_batch", geometry.tokens, "sequence")
    return geometry


def _sampling_mesh(rollout: RolloutKeys, tensor: int, mesh: Mesh) -> Mesh:
    """The mesh that a config samples on. Raises: InputError where sizes do not divide over both."""
    for name, axis in DIVIDED.items():
        sharding.check_divides(mesh, f"rollout.{name}", getattr(rollout, name), axis)
    sampling_mesh = sharding.sampling_mesh(mesh, tensor)
    where = f"mesh.sampling_tensor = {tensor}: rollout.prompts_per_step"
    sharding.check_divides(sampling_mesh, where, rollout.prompts_per_step, "bins")
    return sampling_mesh


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
