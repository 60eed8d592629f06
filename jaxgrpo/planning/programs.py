"""The programs of a run, compiled for devices that need not be here; no array is made.

They are those that `training.method` builds for a run. What they are given is shapes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from huggingface_hub import try_to_load_from_cache

from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import LoraKeys, ModelKeys
from jaxgrpo.config.world import plan_sampling
from jaxgrpo.core import records
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.scores import Score, ScoringPass, passes
from jaxgrpo.core.types import WEIGHTS, Learner
from jaxgrpo.data import sources
from jaxgrpo.models import decoder, lora, sharding
from jaxgrpo.models.api import LAYERS, ModelConfig
from jaxgrpo.models.hf import families, folders
from jaxgrpo.rollout.dialogue import FORK
from jaxgrpo.rollout.slots.capacity import Sizes, chunk_shape
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training import memory, method, parameters, rewarding
from jaxgrpo.training.memory import Memory
from jaxgrpo.training.pretrained import (
    Pretrained,
    check_length,
    make_mesh,
    make_sampling_settings,
    own_family,
    support_size,
    with_segments,
)
from jaxgrpo.update import step
from jaxgrpo.update.forward import (
    Blueprint,
    as_computed,
    held_dtype,
    opt_layout,
    param_layout,
    params_of,
    sampling_layout,
)

NAMES = ("sync", "prefill", "decode", "score", "update")
"""The programs of a step, in its order."""


class Run(NamedTuple):
    """A run without arrays."""

    config: Config
    blueprint: Blueprint
    memory: Memory
    engine: SlotEngine
    steps: step.Steps
    learner: Learner  # of jax.ShapeDtypeStruct, each with its sharding


class Program(NamedTuple):
    """A compiled program."""

    name: str  # of NAMES
    compiled: Any
    seconds: float  # of tracing, lowering and compiling it
    arguments: Any  # what it was compiled for
    donated: int  # bytes of them on each device that it may overwrite


def read_model_config(keys: ModelKeys, lora: LoraKeys) -> ModelConfig:
    """The model of a config without its weights, and without the network.

    Raises: InputError where neither a local folder nor `model.config` says what it is.
    """
    user_family = own_family(keys.family)
    if keys.config:
        stored = families.model_config(
            keys.config, "model.config", user_family, keys.ignore, keys.text_only
        )
    elif (folder := _local_folder(keys)) is not None:
        stored = folders.read_config(folder, user_family, keys.ignore, keys.text_only)
    else:
        raise InputError(
            f"model.path = {keys.path!r} is no folder here and not in the hub's cache, and a plan "
            "uses no network: give a folder with the model's config.json, or its fields in the "
            "table [model.config]"
        )
    return parameters.model_config_for_run(keys, lora, stored)


def _local_folder(keys: ModelKeys) -> Path | None:
    """A model's folder, or that of the hub's cache, as `init --model` leaves it there."""
    if (folder := Path(keys.path).expanduser()).is_dir():
        return folder
    if not sources.is_name(keys.path):
        return None
    file = try_to_load_from_cache(keys.path, "config.json", revision=keys.revision)
    return Path(file).parent if isinstance(file, str) else None


def build_run(config: Config, devices: Sequence[Any]) -> Run:
    """The run of a config on devices that need not be here, as those of a topology.

    Raises: InputError where the model, the method, the sizes and the mesh do not fit together.
    """
    model, mesh = read_model_config(config.model, config.lora), make_mesh(config.mesh, devices)
    check_length(config.rollout, config.model.path, model)
    remat = decoder.choose_remat(config.train.remat, mesh.devices.flat[0].platform)
    built = decoder.build(model, constrain=sharding.constrain(mesh), remat=remat)
    rewards = rewarding.resolve_rewards(config.rewards, config.rollout.max_completion_tokens)
    # Which tokens end a sample changes no shape, so no tokenizer is read.
    path = config.model.path
    model_on_mesh = Pretrained(
        path, mesh, Path(path), None, built, config.lora.path, config.model.attention
    )
    sampling = make_sampling_settings(config.rollout, (0,), 0)
    support = support_size(config.rollout.top_k, config.train.support, model.vocab_size)
    sampling = sampling._replace(attention=config.model.attention, support=support)
    if config.has_turns:
        sampling = plan_sampling(sampling, config.rollout, config.environments, config.data.history)
    sampling = with_segments(sampling, config.rollout.segment_tokens)
    built_method = method.build_method(config, model_on_mesh, rewards, sampling)
    return Run(config, *built_method, abstract_learner(built_method.blueprint))


def abstract_learner(blueprint: Blueprint) -> Learner:
    """The shapes of what `parameters.first_learner` makes, but for its chain's state."""
    model, replicated = blueprint.model, sharding.replicated(blueprint.mesh)
    params = placed(model.shapes, param_layout(model, blueprint.mesh))
    trainable, frozen = params, {}
    if model.config.lora is not None:
        trainable, frozen[WEIGHTS] = lora.split(params)
    master = jax.tree.map(lambda leaf: leaf.update(dtype=held_dtype(model)), trainable)
    # Leaves of its own for each: a plan tells arrays apart by them.
    copies = {
        name: jax.tree.map(copy.copy, master if name == "ema" else trainable)
        for name in blueprint.policies
    }
    for path, teacher in blueprint.teachers.items():
        copies[path] = placed(teacher.model.shapes, param_layout(teacher.model, blueprint.mesh))
    moments = jax.eval_shape(blueprint.optimizer.init, master)
    small: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    remembered = jax.eval_shape(blueprint.objective.init)
    return Learner(
        step=small,
        trainable=master,
        frozen=frozen | copies,
        opt_state=placed(moments, opt_layout(model, blueprint.mesh, blueprint.optimizer)),
        advantage_state=(),
        objective_state=placed(remembered, jax.tree.map(lambda _: replicated, remembered)),
    )


def placed(shapes: Any, layout: Any) -> Any:
    """A tree of shapes with the shardings of another."""
    return jax.tree.map(lambda leaf, spec: leaf.update(sharding=spec), shapes, layout)


def program_names(run: Run, names: Collection[str] = NAMES) -> list[str]:
    """Those of `names` that a run has, in the order of a step."""
    absent = ("sync",) * (not is_moved(run)) + ("score",) * (not run.blueprint.scored)
    return [name for name in NAMES if name in names and name not in absent]


def compiled(run: Run, names: Collection[str] = NAMES) -> Iterator[Program]:
    """The programs `program_names(run, names)`, compiled one after the other.

    Raises: jax.errors.JaxRuntimeError where the compiler finds no room for one.
    """
    names = program_names(run, names)
    if "sync" in names:
        yield compile_program(run, "sync", jax.jit(run.steps.sync), run.learner)
    if sampling := {"prefill", "decode"} & {*names}:
        yield from _sampling(run, sampling)
    if "score" in names:
        yield _score(run)
    if "update" in names:
        arguments = update_arguments(run)
        program = run.steps.update_program
        yield compile_program(run, "update", program, *arguments, donated=arguments[:2])


def update_arguments(run: Run) -> tuple[Any, ...]:
    """What the update program is compiled for."""
    blueprint = run.blueprint
    return memory.update_arguments(
        blueprint.geometry, blueprint.objective, blueprint.mesh, run.learner
    )


def compile_program(
    run: Run, name: str, function: Any, *arguments: Any, donated: Any = ()
) -> Program:
    """Compiles a jitted function for the devices of a run."""
    began = time.perf_counter()
    lowered = function.trace(*arguments).lower(lowering_platforms=(lowering_platform(run),))
    program = lowered.compile()
    seconds = time.perf_counter() - began
    return Program(name, program, seconds, arguments, memory.on_device(donated))


def lowering_platform(run: Run) -> str:
    """The platform of a run's devices, as JAX lowers for it."""
    platform = run.blueprint.mesh.devices.flat[0].platform
    return "cuda" if platform == "gpu" else platform


def sampler_params(run: Run) -> Any:
    """The shapes of what `sync` gives where it casts or moves, stacked."""
    blueprint = run.blueprint
    cast = functools.partial(as_computed, blueprint.model)
    params = jax.eval_shape(cast, params_of(run.learner))
    return placed(params, sampling_layout(blueprint.model, blueprint.samples_on))


def is_moved(run: Run) -> bool:
    """Whether `sync` casts or lays out the parameters for the sampler, beside slicing them."""
    learner, params, blueprint = run.learner, sampler_params(run), run.blueprint
    in_place = blueprint.mesh.shape["fsdp"] == 1 and not blueprint.has_two_meshes
    if blueprint.sampling.weight_dtype != "auto" and in_place:
        return False  # the engine reads those that are trained
    if blueprint.model.config.lora is not None and in_place:
        return not _alike(lora.split(params)[0], learner.trainable)
    return not _alike(params, params_of(learner))


def left_by_sync(run: Run) -> Any:
    """The shapes of what `sync` gives and stays beside a copy that the sampler makes of it, with
    adapters merged or in 8 bits; {}: it makes none, or makes it of what is trained."""
    params, config = sampler_params(run), run.blueprint.model.config
    sampled = run.engine.programs.model.config
    if sampled == config or not is_moved(run):
        return {}
    if sampled.weight_dtype is not None:
        return params
    if run.blueprint.mesh.shape["fsdp"] == 1 and not run.blueprint.has_two_meshes:
        return lora.split(params)[0]  # cast; the weights are those under them
    return {part: params[part] for part in LAYERS if part in params}  # others are not copied


def _alike(left: Any, right: Any) -> bool:
    """Whether one is the other, dtype and sharding included."""
    matches = jax.tree.map(lambda a, b: (a.dtype, a.sharding) == (b.dtype, b.sharding), left, right)
    return all(jax.tree.leaves(matches))


def _sampling(run: Run, names: Collection[str]) -> Iterator[Program]:
    """Prefill and decoding, or one of them."""
    blueprint, programs = run.blueprint, run.engine.programs
    mesh, geometry = blueprint.samples_on, blueprint.geometry
    replicated, bins = sharding.replicated(mesh), sharding.num_bins(mesh)

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

    def laid_out(function: Any, *arguments: Any) -> Any:
        """The shapes of what a small function returns, as the compiler lays them out."""
        traced = function.trace(*arguments)
        out = traced.lower(lowering_platforms=(lowering_platform(run),)).compile().output_shardings
        return placed(traced.out_info, out)

    sizes = Sizes.for_prompts(
        blueprint.sampling.slots,
        bins,
        geometry.num_prompts,
        geometry.group_size,
        geometry.max_prompt_tokens,
        blueprint.sampling.turn_tokens,
    )
    params = laid_out(jax.jit(programs.split), sampler_params(run))
    state = laid_out(programs.begin, sizes)
    shape = (bins, *chunk_shape(sizes))
    if "prefill" in names:
        yield compile_program(
            run,
            "prefill",
            programs.prefill,
            params,
            state,
            array(jnp.int32, *shape),
            array(jnp.int32, *shape[:2]),
            array(jnp.int32, *shape[:2]),
            donated=state,
        )
    if "decode" not in names:
        return
    yield compile_program(
        run,
        "decode",
        programs.decode,
        sizes.aligned,
        params,
        state,
        array(jnp.int32),
        donated=state,
    )


def scoring_passes(run: Run) -> list[tuple[ScoringPass, dict[str, Score]]]:
    """The passes that give them, and what each gives."""
    return [*passes(run.blueprint.scores, run.blueprint.scored)]


def _score(run: Run) -> Program:
    """The largest of the passes that give the fields which the method reads."""
    blueprint, learner = run.blueprint, run.learner

    def size(scoring_pass: ScoringPass) -> int:
        params = params_of(learner, scoring_pass.policy)
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    scoring_pass, scores = max(scoring_passes(run), key=lambda entry: size(entry[0]))
    *_, batch = update_arguments(run)
    # What the chain reads is scored before there is anything else, what the loss reads after that.
    early = blueprint.chain.needs & blueprint.scores.keys()
    names = blueprint.scored
    before = {FORK, *records.DTYPES} & batch.fields.keys() if early else batch.fields.keys() - names
    fields = {name: batch.fields[name] for name in before}
    # Tokens that another pass names are laid out as what is scored at them.
    fields |= {by: batch.fields[n] for n in scores if (by := blueprint.scores[n].named_by)}
    batch = dataclasses.replace(batch, fields=fields)
    params = params_of(learner, scoring_pass.policy)
    return compile_program(
        run,
        "score",
        run.steps.score,
        params,
        batch,
        tuple(scores),
        blueprint.geometry,
        scoring_pass.policy,
    )
