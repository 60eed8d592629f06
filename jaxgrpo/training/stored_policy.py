"""A policy outside its training: to sample from, to evaluate, to compare with."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike
from rich.console import Console

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import DataKeys, EvalKeys, MeshKeys, RewardKeys, RolloutKeys, config_folder
from jaxgrpo.config.own_code import python_name
from jaxgrpo.config.world import World, find_parser
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.core.types import GENERATOR, WEIGHTS, Params
from jaxgrpo.data import storage
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.data.sources import Rows, Source
from jaxgrpo.data.storage import Place
from jaxgrpo.environments.calls import Parser
from jaxgrpo.evaluation.evaluate import (
    Evaluate,
    Evaluation,
    Policy,
    make_evaluator,
    make_questions,
)
from jaxgrpo.evaluation.rescoring import Base
from jaxgrpo.models import decoder, lora, sharding
from jaxgrpo.models.api import LAYERS, memory_per_layer
from jaxgrpo.models.resharding import moved
from jaxgrpo.rewards import RewardFunction, callable_name
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout.dialogue import Converse
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.judging import progress_after
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training import fingerprints, memory, sampled_memory
from jaxgrpo.training.inputs import (
    begin_conversations,
    dropped_line,
    eval_source,
    load_prompts,
    make_chat,
)
from jaxgrpo.training.pretrained import (
    Pretrained,
    find_config,
    find_model,
    make_mesh,
    run_goals,
    sampling_settings,
    usable_mesh,
)
from jaxgrpo.training.processes import peers, process
from jaxgrpo.training.records.reading import read_text
from jaxgrpo.training.resets import may_reset
from jaxgrpo.training.rewarding import resolve_scorer
from jaxgrpo.training.setup import Setup
from jaxgrpo.update.forward import (
    full_params,
    param_layout,
    sampling_layout,
)
from jaxgrpo.update.step import Share, share_nothing

SLOTS = 64  # samples decoded at once where no run says how many
NO_REWARD = python_name("no_reward")  # what the config made for a model folder names as its reward

DEFAULTS: dict[str, Any] = {
    "rollout": {
        "prompts_per_step": SLOTS // 8,
        "group_size": 8,
        "max_prompt_tokens": 1024,
        "max_completion_tokens": 1024,
    },
    "rewards": [{"use": NO_REWARD}],
    "recipe": "sign",
    "loss": {"proximal": "trainer"},  # so that rollout.top_k and top_p may be set
    "optimizer": {"learning_rate": 0.0},
    "train": {"steps": 1},
    "run": {"dir": "runs/none"},
}
"""What a config must say and a model folder does not; `--set` replaces it. Nothing is trained."""
LIMITS = ("rollout.max_prompt_tokens", "rollout.max_completion_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredPolicy(Policy):
    """A policy whose weights are in a model folder and not read yet."""

    pretrained: Pretrained
    seed: int  # of fresh adapters
    world: World | None = None  # what answers its samples

    def converse(self, rows: Sequence[Mapping[str, Any]]) -> Converse | None:
        """What gives the dialogue of a batch of rows; None: samples are not answered."""
        return None if self.world is None else self.world.converse(rows)

    def close(self) -> None:
        """Ends what answers its samples; the next ones begin it again."""
        if self.world is not None:
            self.world.close()

    def read_params(self) -> Params:
        """The weights as the sampler reads them."""
        layout = sampling_layout(self.model, self.mesh)
        params = self.pretrained.read_params(self.seed, self.model, layout=layout)
        apart = {**params, "blocks": sampled_memory.release(params["blocks"])}
        shared = {name: tree for name, tree in params.items() if name not in LAYERS}
        return {**shared, "layers": memory_per_layer(self.model.config, apart)}


def config_for(
    target: str | Place,
    changes: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> Config:
    """The config by which a target is sampled: a run's own, a config's, or DEFAULTS for a model.

    A model of fewer positions than those of DEFAULTS has as many tokens. With a console, for what
    samples on the devices of this machine, the mesh of a run is its `usable_mesh`.

    Raises: ConfigError with all problems; InputError where there is no such model.
    """
    tables: dict[str, Any]
    is_model, is_stored = False, is_run(target)
    if is_stored:
        folder, config = read_run(target)
        tables, source = configs.to_tables(config), config.source
        tables["model"] = {**tables["model"], "path": str(storage.place(folder / "model"))}
        tables["model"].pop("revision", None)
        tables.pop("lora", None)  # merged there
    elif is_config(target):
        raw, source = configs.read_tables(target)
        tables = configs.absolute(raw, config_folder(source))
    else:
        tables, is_model, source = {**DEFAULTS, "model": {"path": os.fspath(target)}}, True, None
    replacements = {name: value for name, value in (changes or {}).items() if value is not None}
    names = configs.flat(replacements)  # they may be nested
    eval_keys = tables.get("eval", {})
    if "eval.data" in names and isinstance(eval_keys, Mapping):
        # Subset and split are those of the data before.
        tables["eval"] = {name: eval_keys[name] for name in eval_keys.keys() - {"subset", "split"}}

    def config_with(**limits: Any) -> Config:
        changed = configs.absolute(tables, Path.cwd())
        try:
            configs.replace(changed, {**limits, **replacements}, Path.cwd())
        except ConfigError:
            configs.from_dict(changed, overrides, source=source)  # says which table is none
            raise
        return configs.from_dict(changed, overrides, source=source, is_stored=is_stored)

    config, user_keys = config_with(), {*names, *configs.named_keys(overrides)}
    if is_stored and console is not None:
        return dataclasses.replace(config, mesh=usable_mesh(console, config.mesh, user_keys))
    if is_model:
        positions = find_config(config.model, fetch_weights=False)[1].longest
        return config_with(**_fitting(config.rollout, positions, user_keys))
    return config


def _fitting(rollout: RolloutKeys, positions: int, user_keys: Collection[str]) -> dict[str, int]:
    """The limits of prompt and completion that are not in `user_keys`, where those of the config
    are more tokens than its model has positions."""
    limits = {key: getattr(rollout, key.partition(".")[2]) for key in LIMITS}
    free_limits = {key: limit for key, limit in limits.items() if key not in user_keys}
    if not free_limits or sum(limits.values()) <= positions:
        return {}
    room = positions - sum(limits[key] for key in limits.keys() - free_limits.keys())
    return {key: max(1, min(limit, room // len(free_limits))) for key, limit in free_limits.items()}


def find_policy(
    console: Console,
    config: Config,
    rows: Rows | None = None,
    has_base: bool = False,
    temperature: float | None = None,
    target: str | Place | None = None,
) -> tuple[StoredPolicy, PromptData]:
    """The policy of a config, and the prompts of rows; of eval.data by default.

    Args:
      has_base: whether another model of its size is in memory with it.
      temperature: instead of the config's.
      target: as in `eval_source_for`.

    Raises: InputError where there is no such model, or a prompt cannot be read or does not fit.
    """
    process.start(config.mesh.platform)
    peers.set_timeout(config.run.peer_timeout)
    facts = functools.partial(fingerprints.config_facts, config)
    fingerprints.refuse_other_start(facts, config.teachers, config.scorer_name)
    start = config.model, config.lora, config.rollout, config.train.remat
    pretrained, chat = _find_model(console, start, config.mesh, config.data)
    rollout, answers = config.rollout, (config.tools, config.environments)
    chat, world = begin_conversations(chat, pretrained.folder, rollout, config.data.forks, *answers)
    source = eval_source_for(target, config.eval, config.data) if rows is None else rows
    prompts = load_prompts(config.data, rollout.max_prompt_tokens, chat, source)
    describe = functools.partial(fingerprints.describe_rows, prompts.rows, prompts.encoded)
    fingerprints.refuse_unless_alike(lambda: {"prompts": describe()})
    settings = sampling_settings(rollout, pretrained, world, config.train.support)
    rescores, seed = has_base or config.eval.confidence, config.train.seed
    parts = pretrained, settings, config.mesh, rollout, seed, temperature
    policy = _policy_with_engine(*parts, len(prompts.rows), has_base, rescores)
    _say_decoding(console, policy.engine)
    return dataclasses.replace(policy, world=world), prompts


def eval_source_for(target: str | Place | None, keys: EvalKeys, data: DataKeys) -> Source:
    """Where the prompts come from that a target is asked: of a run those of its own evaluations,
    also where it was trained on rows from Python or on saved rollouts. Tables are of its config."""
    has_rows = False
    if target is not None and is_run(target):
        has_rows = data.path is None and bool(data.prompt)
        has_rows |= (storage.place_as_named(target) / "replay.json").exists()
    return eval_source(keys, data, has_rows)


def say_dropped(console: Console, prompts: PromptData, max_prompt_tokens: int) -> None:
    """Says how many prompts were left out, where some were."""
    if prompts.dropped and process.is_main():
        console.print(dropped_line(prompts, max_prompt_tokens), soft_wrap=True)


class Answerer(NamedTuple):
    """A policy to answer queries, and how these are read and written."""

    policy: StoredPolicy  # its engine takes requests at any time
    chat: Chat
    parse: Callable[[], Parser]  # of calls; raises InputError where the template shows none


def find_answerer(
    console: Console,
    target: str | Place,
    changes: Mapping[str, Any],
    overrides: Sequence[str],
    temperature: float | None = None,
) -> Answerer:
    """What answers queries for a target.

    The tools, the environments and the rows of its config are not read, and nothing interrupts a
    sample or ends it early.

    Args: as in `config_for`; and `temperature`, instead of the config's; None: that one.
    Raises: InputError where there is no such model, or it cannot be sampled.
    """
    config = config_for(target, changes, overrides, console)
    start = config.model, config.lora, config.rollout, config.train.remat
    pretrained, chat = _find_model(console, start, config.mesh, config.data)
    settings = sampling_settings(config.rollout, pretrained)
    settings = settings._replace(max_turns=2, own_rows=True, interruption=None, early_stop=None)
    parts = pretrained, settings, config.mesh, config.rollout, config.train.seed, temperature
    policy = _policy_with_engine(*parts, settings.slots or 1)
    _say_decoding(console, policy.engine)
    keys, ends = config.rollout, settings.stop_tokens
    parser = functools.partial(find_parser, keys.call_format, chat, ends, keys.call_timeout)
    return Answerer(policy, chat, parser)


def _find_model(
    console: Console, start: Any, mesh: MeshKeys, data: DataKeys
) -> tuple[Pretrained, Chat]:
    """The model of a config, whose weights may not be here yet, and how its prompts are written
    out; `start`: what `find_model` takes of a config."""
    line = process.start(mesh.platform)
    if process.is_main():
        console.print(line, soft_wrap=True)
    pretrained = find_model(*start, mesh=make_mesh(mesh), fetch_weights=False)
    size = pretrained.model.config.vocab_size
    return pretrained, make_chat(data, pretrained.path, pretrained.tokenizer, size)


def _policy_with_engine(
    pretrained: Pretrained,
    settings: SamplingSettings,
    mesh_keys: MeshKeys,
    rollout: RolloutKeys,
    seed: int,
    temperature: float | None,
    prompts: int,
    has_base: bool = False,
    rescores: bool = False,
) -> StoredPolicy:
    """Args: as in `find_policy`; `prompts`, how many there are at the least, and `rescores`,
    whether evaluations look at samples again."""
    settings = settings._replace(records_experts=False)
    if temperature is not None:
        settings = settings._replace(temperature=temperature)
    mesh = sharding.sampling_mesh(pretrained.mesh, mesh_keys.sampling_tensor)
    model, width = pretrained.model_on(mesh), rollout.max_prompt_tokens
    sampled = sampled_memory.count(model, mesh, settings.weight_dtype, has_base, rescores)
    decoding = sampled_memory.least_decoding(
        model, settings, mesh, prompts, rollout.group_size, width
    )
    sampled_memory.refuse_too_large(pretrained.path, model, mesh, sampled, decoding)
    free = memory.free_beside(mesh, sampled.persistent)
    engine = SlotEngine(model, settings, mesh, width=width, free=free)
    pretrained = pretrained.with_weights()
    return _policy(pretrained, engine, mesh, rollout, seed)


def _say_decoding(console: Console, engine: Any) -> None:
    """Says why the platform's kernels do not decode, where they do not."""
    kernel = engine.programs.attention
    if kernel.why and process.is_main():
        console.print(f"decoding by {kernel.name}: {kernel.why}", soft_wrap=True, markup=False)


def judge_name(scorer: str | RewardFunction | None) -> str | None:
    """How a config names what judges: a function from Python is python:NAME."""
    return python_name(callable_name(scorer)) if callable(scorer) else scorer


def resolve_judge(
    use: str | None,
    keys: Sequence[RewardKeys],
    max_completion_tokens: int,
    scorer: str | RewardFunction | None,
    world: World | None,
) -> Reward:
    """What judges the answers: a function from Python, or what the config names.

    Args:
      use, keys, max_completion_tokens: as in `resolve_scorer`.
      scorer: None, or a name: as the config says.
      world: whose environments judge where the config names no reward.
    """
    if callable(scorer):
        judge = Reward(callable_name(scorer), scorer)
    else:
        judge = resolve_scorer(use, keys, max_completion_tokens, world=world)
    if world is not None:
        world.refuse_readers([judge])
    return judge


def _policy(
    pretrained: Pretrained, engine: SlotEngine, mesh: Mesh, rollout: RolloutKeys, seed: int
) -> StoredPolicy:
    goals = run_goals(rollout, pretrained.tokenizer, seed)
    return StoredPolicy(
        model=engine.model,
        tokenizer=pretrained.tokenizer,
        mesh=mesh,
        engine=engine,
        group_size=rollout.group_size,
        goal=None if goals is None else goals.first,
        pretrained=pretrained,
        seed=seed,
    )


def seed_key(seed: int) -> np.ndarray:
    """The key data of a seed."""
    return np.asarray(jax.random.key_data(jax.random.key(seed, impl=GENERATOR)))


def load_base(pretrained: Pretrained, mesh: Mesh, seed: int) -> Base:
    """A model as a base on a mesh: what it reads is one more copy of its parameters in memory.

    Fresh adapters add nothing; those of lora.path belong to it.
    """
    base = pretrained.model_on(mesh)
    if pretrained.has_fresh_adapters:
        base = decoder.build(lora.base_config(base.config), constrain=sharding.constrain(mesh))
    layout = sharding.param_shardings(mesh, base.axes, base.shapes)
    return Base(base, lambda: pretrained.read_params(seed, base, layout=layout))


def find_base(run: Setup) -> Base:
    """The base of a run: a policy that it holds anyway, where there is one; else read from disk."""
    blueprint, frozen = run.blueprint, run.learner.frozen
    model = run.engine.model
    layouts = [
        param_layout(blueprint.model, blueprint.mesh),
        sampling_layout(blueprint.model, blueprint.samples_on),
    ]
    names = ("base",) if may_reset(run.config.reference) else ("base", "reference")
    if name := next((name for name in names if name in frozen), None):
        params = full_params(frozen[name], frozen)
    elif WEIGHTS in frozen and run.inputs.pretrained.has_fresh_adapters:  # they add nothing
        params, layouts = frozen[WEIGHTS], (lora.split(layouts[0])[1], lora.split(layouts[1])[1])
        constrain = sharding.constrain(blueprint.samples_on)
        model = decoder.build(lora.base_config(model.config), constrain=constrain)
    else:
        return load_base(run.inputs.pretrained, blueprint.samples_on, run.config.train.seed)
    if blueprint.has_two_meshes:
        return Base(model, functools.partial(jax.jit(functools.partial(_move, layouts)), params))
    return Base(model, lambda: params)


def _move(layouts: Sequence[Params], params: Params) -> Params:
    """Parameters in the second layout instead of the first."""
    return jax.tree.map(moved, params, *layouts)


def policy_for_run(run: Setup) -> StoredPolicy:
    """The policy that a run began with; its parameters, laid out for sampling, are on disk."""
    config, mesh = run.config, run.blueprint.samples_on
    return _policy(run.inputs.pretrained, run.engine, mesh, config.rollout, config.train.seed)


def evaluator_for_run(run: Setup, share: Share = share_nothing) -> Evaluate:
    """The evaluation that a run's config asks for; `share` as in `setup`."""

    def make() -> Evaluate:
        config, inputs = run.config, run.inputs
        held_out, keys, rollout = inputs.held_out, config.eval, config.rollout
        if held_out is None:
            source = eval_source(keys, config.data)
            held_out = load_prompts(config.data, rollout.max_prompt_tokens, inputs.chat, source)
        longest = rollout.max_completion_tokens
        scorer = resolve_scorer(keys.scorer, config.rewards, longest, run.rewards, inputs.world)
        answering = None if inputs.world is None else inputs.world.converse
        sizes = {"num_prompts": rollout.prompts_per_step, "num_rows": len(inputs.prompts.rows)}
        progress = functools.partial(progress_after, **sizes, max_steps=config.train.steps)
        questions = make_questions(keys, held_out, scorer, config.scorer_name, progress, answering)
        base = find_base(run) if config.measures_kl_to_base else None
        tokens = config.train.tokens_per_micro_batch
        if base is None:
            return make_evaluator(keys, policy_for_run(run), questions, None, tokens)
        read = functools.cache(base.read)
        base = base._replace(read=read)
        evaluate = make_evaluator(keys, policy_for_run(run), questions, base, tokens)
        if not memory.rereads_base(run.blueprint.samples_on):
            return evaluate

        def evaluate_and_forget(
            params: Params, key: ArrayLike, step: int, **options: Any
        ) -> Evaluation:
            try:
                return evaluate(params, key, step, **options)
            finally:
                read.cache_clear()

        return evaluate_and_forget

    return share("evaluator", make)


def source_or_rows(data: str | Place | Rows | None) -> tuple[str | None, Rows | None]:
    """What `data` of a call from Python is: the name of a source, or rows."""
    if isinstance(data, (str, os.PathLike)):
        return os.fspath(data), None
    return None, data


def is_run(target: str | Place) -> bool:
    """Whether it is the folder of a run. Raises: InputError where a bucket does not answer."""
    if not storage.is_url(target):
        return Path(os.path.expanduser(target), "config.toml").exists()
    try:
        return storage.read(f"{os.fspath(target).rstrip('/')}/config.toml") is not None
    except OSError as error:
        raise InputError(f"{target} cannot be read: {error}") from error


def is_config(target: str | Place) -> bool:
    """Whether it is a TOML file, or the name of a shipped config and no folder that is there."""
    is_shipped = os.fspath(target) in configs.shipped() and not os.path.exists(target)
    return is_shipped or Path(target).suffix == ".toml"


def read_run(run: str | Place) -> tuple[Place, Config]:
    """The folder and the config of a run. Raises: InputError where it holds no run."""
    folder = storage.place_as_named(run)
    file = folder / "config.toml"
    if not is_run(run) or (text := read_text(file)) is None:
        raise InputError(f"{folder}: no run folder (there is no config.toml in it)")
    return folder, configs.from_text(text, str(file))
