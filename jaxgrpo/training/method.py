"""How a run trains and samples: built from a config for a model, whatever the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import methods, off_policy
from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import ReferenceKeys, RolloutKeys, TrainKeys
from jaxgrpo.core import records
from jaxgrpo.core.types import REPLAYED
from jaxgrpo.losses import Objective
from jaxgrpo.models import attention, decoder, routing, sharding
from jaxgrpo.models.api import LayerKind
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout.engine import SamplingSettings, record_shapes
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training import memory, parameters, teachers
from jaxgrpo.training.memory import Memory
from jaxgrpo.training.pretrained import Pretrained, check_recurrent
from jaxgrpo.training.resets import may_reset
from jaxgrpo.update import packing, step
from jaxgrpo.update.balance import make_balance, replays
from jaxgrpo.update.forward import Blueprint, Teacher, trained
from jaxgrpo.update.optimizer import make_optimizer

DIVIDED = {
    "prompts_per_step": "bins",
    "max_completion_tokens": "sequence",
    "max_prompt_tokens": "sequence",
}
"""Sizes of a rollout that the devices divide among them: key -> axis of the mesh."""

BATCHES = 100
"""Batches that programs of decoding are chosen for; not train.steps: a run may be prolonged."""


class Method(NamedTuple):
    """How a run trains and samples: what is built for a model and a method, whatever the data."""

    blueprint: Blueprint
    memory: Memory  # that it takes, but for the update's working memory
    engine: SlotEngine  # draws samples, of evaluations too
    steps: step.Steps


def build_method(
    config: Config,
    pretrained: Pretrained,
    rewards: Sequence[Reward],
    sampling: SamplingSettings,
    advantage: AdvantageTransform | None = None,
    share: step.Share = step.share_nothing,
    has_forks: bool = False,  # in files of rollouts, whatever the config says
) -> Method:
    """The static description of a run, checked as a whole, and what is built from it."""
    mesh, model, rollout, train = pretrained.mesh, pretrained.model, config.rollout, config.train
    sampling_mesh = _sampling_mesh(rollout, config.mesh.sampling_tensor, mesh)
    kinds, forks = model.config.kinds, has_forks or config.data.forks
    recorded = record_shapes(kinds, sampling.support, replays(train.routing, model))
    geometry = _geometry(rollout, train, mesh, forks, kinds, recorded)
    named, keys = advantage or config.named_chain, vars(config.optimizer)
    recipe = methods.make_recipe(named, rewards)
    chain = methods.make_chain(config.loss, recipe, rollout.refill is not None)
    objective = methods.make_objective(config.loss, rollout.max_completion_tokens)
    scores = teachers.method_scores(config.scores, chain.needs, objective)
    off_policy.refuse_double_weights(chain, objective.surrogate, objective.proximal)
    _refuse_stale(chain, objective, rollout.staleness, config.experience.share, train.steps)
    scoring = teachers.find_teachers(config.teachers, pretrained, config.model.attention, geometry)
    models = model, *(teacher.model for teacher in scoring.values())
    teachers.refuse_too_many(objective.counts, models)
    geometry = check_recurrent(geometry.for_models(models), mesh)
    blueprint = Blueprint(
        model=model,
        chain=chain,
        recipe=recipe,
        objective=objective,
        optimizer=make_optimizer(trained(model, model.axes), updates=train.updates, **keys),
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
        trains_texts=config.data.completion is not None,
    )
    kl, two_meshes = config.measures_kl_to_base, blueprint.has_two_meshes
    copies = _copies(blueprint.policies, pretrained, config.reference, kl, two_meshes)
    return _fit_to_devices(blueprint, pretrained, copies, train, share)


def _refuse_stale(
    chain: AdvantageTransform, objective: Objective, staleness: int, share: float, steps: int
) -> None:
    """Args: staleness, share, steps: `rollout.staleness`, `experience.share`, `train.steps`."""
    off_policy.refuse_all_stale(staleness, steps)
    if share:  # which rollout.staleness does not go with
        off_policy.refuse_stale(chain, objective, f"experience.share = {share:g}", REPLAYED)
    elif staleness:
        off_policy.refuse_stale(chain, objective, f"rollout.staleness = {staleness}")


def _copies(
    policies: Sequence[str],
    pretrained: Pretrained,
    reference: ReferenceKeys,
    measures_kl: bool,
    has_two_meshes: bool,
) -> tuple[str, ...]:
    """The policies of which a run holds a copy beside the trained one: those of its method, and the
    base that its evaluations measure the KL to, where no other holds it (`find_base`)."""
    parameters.refuse_average(policies, pretrained.model.config.lora is not None, reference)
    names = {"base"} if may_reset(reference) else {"base", "reference"}
    holds_base = not names.isdisjoint(policies) or pretrained.has_fresh_adapters
    needs_base = measures_kl and (has_two_meshes or not holds_base)
    return (*policies, *((memory.EVAL_BASE,) if needs_base else ()))


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
      copies: of other policies, as `_copies` names them.
      train: the config's, which may say how many tokens a micro-batch has.
    """
    model, mesh, geometry = blueprint.model, blueprint.mesh, blueprint.geometry
    persistent, objective = memory.count(blueprint, copies).persistent, blueprint.objective
    logits, remat = memory.fitting_passes(
        train.remat, model, mesh, blueprint.optimizer, geometry, persistent, objective
    )
    blueprint = blueprint._replace(logits_per_chunk=logits, remat=remat)
    if train.tokens_per_micro_batch is None:
        fitting = memory.fitting_geometry(
            model, mesh, blueprint.optimizer, geometry, persistent, remat, logits, objective
        )
        blueprint = blueprint._replace(geometry=fitting)
    if remat != decoder.choose_remat(train.remat, mesh.devices.flat[0].platform):
        rebuilt = decoder.build(model.config, constrain=sharding.constrain(mesh), remat=remat)
        blueprint = blueprint._replace(model=rebuilt)
    settings, sampling_mesh = blueprint.sampling, blueprint.samples_on
    weights = memory.weights_to_sample(model, mesh, sampling_mesh, settings.weight_dtype)
    free = memory.free_beside(mesh, persistent + weights)
    engine = share(
        "engine", lambda: _make_engine(pretrained, settings, sampling_mesh, geometry, free)
    )
    engine.limit(free)  # a run that shares it may keep more beside it
    slots = engine.slots_for(geometry.num_prompts, geometry.group_size)
    blueprint = blueprint._replace(sampling=blueprint.sampling._replace(slots=slots))
    usage = memory.count(blueprint, copies)
    return Method(blueprint, usage, engine, step.build_steps(blueprint, share))


def _make_engine(
    pretrained: Pretrained,
    settings: SamplingSettings,
    mesh: Mesh,
    geometry: packing.Geometry,
    free: int,
) -> SlotEngine:
    """The engine of a run, for its steps and its evaluations.

    Args:
      mesh: that it samples on.
      free: bytes of each device that it may take.
    """
    sampled, width = pretrained.model_on(mesh), geometry.max_prompt_tokens
    engine = SlotEngine(sampled, settings, mesh, width=width, free=free)
    engine.expect(geometry.group_size, BATCHES)
    return engine


def _choose_kernel(
    name: str, pretrained: Pretrained, geometry: packing.Geometry
) -> attention.Kernel:
    """The kernel of attention that `model.attention` names, for the rows of an update."""
    mesh, model_config = pretrained.mesh, pretrained.model.config
    platform = mesh.devices.flat[0].platform
    return attention.choose_kernel(
        name,
        platform,
        model_config,
        row=geometry.longest,
        samples_per_row=geometry.samples_per_row,
        mesh=mesh,
    )


def attention_lines(
    kernel: attention.Kernel, taught_by: Mapping[str, Teacher], engine: SlotEngine
) -> dict[str, str]:
    """Stage -> the kernel of its attention, or why it has none; without stages that need no word,
    since XLA computes them as on any platform."""
    kernels: dict[str, attention.Kernel | attention.Decoding] = {
        "attention": kernel,
        "decoding": engine.programs.attention,
        **{f"attention of {path}": teacher.kernel for path, teacher in taught_by.items()},
    }
    return {
        stage: f"by {kernel.name}" + (f": {kernel.why}" if kernel.why else "")
        for stage, kernel in kernels.items()
        if kernel.name != "xla" or kernel.why
    }


def _geometry(
    rollout: RolloutKeys,
    train: TrainKeys,
    mesh: Mesh,
    has_forks: bool,
    kinds: Sequence[LayerKind],
    recorded: records.Shapes,
) -> packing.Geometry:
    sizes = (
        *(rollout.prompts_per_step, rollout.group_size),
        *(rollout.max_prompt_tokens, rollout.max_completion_tokens),
    )
    tokens, minibatches = train.tokens_per_micro_batch, train.minibatches
    has = {"has_forks": has_forks, "has_experts": routing.has_experts(kinds)}
    geometry = packing.make_geometry(sizes, mesh, tokens, minibatches, **has)
    packing.check_geometry(geometry)
    sharding.check_divides(mesh, "train.tokens_per_micro_batch", geometry.tokens, "sequence")
    return geometry._replace(records=recorded)


def _sampling_mesh(rollout: RolloutKeys, tensor: int, mesh: Mesh) -> Mesh:
    """The mesh that a config samples on. Raises: InputError where sizes do not divide over both."""
    for name, axis in DIVIDED.items():
        sharding.check_divides(mesh, f"rollout.{name}", getattr(rollout, name), axis)
    sampling_mesh = sharding.sampling_mesh(mesh, tensor)
    where = f"mesh.sampling_tensor = {tensor}: rollout.prompts_per_step"
    sharding.check_divides(sampling_mesh, where, rollout.prompts_per_step, "bins")
    return sampling_mesh
