"""From a config to the functions and the first state of a run.

`setup` builds them, and `Shared` lets runs of one process reuse what they have in common.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.advantages.streams import sums_scored
from jaxgrpo.config import files as configs
from jaxgrpo.config.contenders import make_atlases
from jaxgrpo.config.evaluating import READ_BY_RUNS
from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import EvalKeys, RewardKeys, RolloutKeys
from jaxgrpo.config.off_policy import completion_key, refuse_weights
from jaxgrpo.config.world import COLUMNS, KEYS, Factories
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Learner, Params, Rollouts, Stream
from jaxgrpo.data.sources import Rows
from jaxgrpo.evaluation.evaluate import check_scorer
from jaxgrpo.rewards import Rewards
from jaxgrpo.rewards.protocol import Reward, reads_any
from jaxgrpo.rewards.registry import Preview
from jaxgrpo.rollout import refill
from jaxgrpo.rollout.batch import Drawing, draw
from jaxgrpo.rollout.engine import record_shapes
from jaxgrpo.rollout.judging import Judge, RolloutSource, step_progress
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.trees import Trees
from jaxgrpo.training import inputs, memory, parameters, rewarding, teachers
from jaxgrpo.training.collecting.collector import Collected, Collector
from jaxgrpo.training.collecting.experience import with_experience
from jaxgrpo.training.collecting.growing import (
    brought_fields,
    make_trees,
    make_writer,
    refuse_unread,
)
from jaxgrpo.training.collecting.replay import SavedRollouts
from jaxgrpo.training.collecting.source import first_stream, make_rollout_source
from jaxgrpo.training.inputs import Inputs
from jaxgrpo.training.memory import Memory
from jaxgrpo.training.method import Method, build_method
from jaxgrpo.training.pretrained import Pretrained, sampling_settings
from jaxgrpo.update import step
from jaxgrpo.update.atlas import Atlases
from jaxgrpo.update.balance import COEFFICIENT, RATE
from jaxgrpo.update.forward import Blueprint, held_dtype, param_layout, params_of
from jaxgrpo.update.preparing import Preparer

_TURN_KEYS = ("tools", "environment", *(f"rollout.{name}" for name in KEYS))
_SAMPLING_KEYS = ("model", "lora", "mesh", "rollout", "tools", "environment", "train.support")
_INPUT_KEYS = (
    *("model", "lora", "mesh", "data", "eval", "rollout.max_prompt_tokens", "train.remat"),
    *_TURN_KEYS,
)
_LAYOUT_KEYS = ("train.tokens_per_micro_batch", "train.remat", "train.routing")
_COUNT_KEYS = ("train.steps", "train.num_iterations", "train.minibatches")
_CHAT_KEYS = tuple(
    f"data.{name}" for name in ("history", "chat_template", "chat_template_kwargs", "template_time")
)
_STEP_KEYS = ("loss", "optimizer", "train.on_no_live_sample", COEFFICIENT, RATE)
_UPDATE_KEYS = (
    *(*_SAMPLING_KEYS, *_STEP_KEYS, *_COUNT_KEYS, *_LAYOUT_KEYS),
    "data.completion",
)
_METHOD_KEYS = (
    *("recipe", "advantage", "rewards", "scores"),
    *("reference", "eval.data", "eval.kl_to_base", "data.answer_cuts", "experience.share"),
    *_CHAT_KEYS,
)
DEPENDS: dict[str, tuple[str, ...]] = {
    "inputs": _INPUT_KEYS,
    "engine": (*_SAMPLING_KEYS, *_CHAT_KEYS),
    "update": _UPDATE_KEYS,
    "method": (*_UPDATE_KEYS, *_METHOD_KEYS),
    "evaluator": (
        *(*_SAMPLING_KEYS, *_INPUT_KEYS, "rewards"),
        *("train.tokens_per_micro_batch", "train.steps"),  # of `trainer_state`
    ),
}
"""What runs can share -> the tables, or single keys, of a config that it depends on. Neither the
seed nor the run's folder matters to any of it."""


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
        return rewarding.try_rewards(rewards, rows[0], tokenizer, settings.stop_tokens, state)


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
    samples: bool = True,
) -> Setup:
    """Builds everything a run needs; no step is compiled or taken.

    Args:
      rewards, advantage, dataset: Python objects instead of what the config names. Rewards are
        functions or built-in names, with weight 1, or {name: function}; the rest as in `train`.
      rollouts: files of saved rollouts, one per step, to train on instead of sampling and
        rewarding (docs/rollouts.md). Only the names and weights of the rewards count then.
      tools, environment: as in `jaxgrpo.train`.
      share: of `Shared`, in a process that takes several runs fully described by their configs.
      check: gets what is read from disk, before weights are, and may raise.
      mesh, make_learner: of a run that is planned: its devices may be absent, no weight is read.
      samples: whether the run draws any, which takes memory; a warm start does not.

    Raises: InputError where parts do not fit one another.
    """
    configs.refuse_other_objects(rewards, advantage, tools)
    if config.eval.data is None:
        refuse_unread(config.eval, "eval.data", '"task:arithmetic:test"', READ_BY_RUNS)
    run_inputs = share(
        "inputs", lambda: inputs.read_inputs(config, dataset, rollouts, mesh, tools, environment)
    )
    check(run_inputs)
    longest, folder = config.rollout.max_completion_tokens, config.folder
    run_rewards = _make_rewards(config.rewards, config.eval, longest, folder, run_inputs, rewards)
    pretrained, support = run_inputs.pretrained, config.train.support
    sampling = sampling_settings(config.rollout, pretrained, run_inputs.world, support)
    has_forks = run_inputs.replay is not None and run_inputs.replay.has_forks
    parts = config, pretrained, run_rewards, sampling, advantage, share, has_forks
    method = share("method", lambda: build_method(*parts))
    if not samples:
        method = method._replace(memory=method.memory._replace(sampler=0, decode=0))
    return _assemble(config, run_inputs, run_rewards, method, make_learner)


def _make_rewards(
    keys: Sequence[RewardKeys],
    eval_keys: EvalKeys,
    max_completion_tokens: int,
    folder: Path,
    run_inputs: Inputs,
    user_rewards: Rewards | None,
) -> tuple[Reward, ...]:
    """The rewards of a run, as `rewarding.resolve_rewards` makes them.

    Raises: InputError where there is none, or what judges evaluations cannot judge the rows that
      these ask.
    """
    rows = () if run_inputs.replay else run_inputs.prompts.rows
    held_out, world, longest = run_inputs.held_out, run_inputs.world, max_completion_tokens
    rewards = rewarding.resolve_rewards(keys, longest, user_rewards, rows, folder, world)
    if not rewards:
        raise InputError(
            "rewards: missing, and the environment has no get_reward: give at least one, "
            'rewards = [{ use = "..." }]'
        )
    if held_out is not None:
        scorer = rewarding.resolve_scorer(eval_keys.scorer, keys, longest, rewards, world)
        check_scorer(scorer, held_out.rows[: eval_keys.prompts], world is not None)
    return rewards


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
    data, rollout, train = config.data, config.rollout, config.train
    grown = make_trees(config.tree, rollout, config.experience.share)
    lacking = blueprint.chain.needs.difference(*rows[:1])
    share, has_turns, forks = config.experience.share, config.has_turns, data.forks
    recorded = record_shapes(blueprint.model.config.kinds, blueprint.sampling.support)
    brought = brought_fields(grown, rollout, share, has_turns, lacking, forks, recorded)
    draw_groups = _make_drawing(data.completion, rollout, run_inputs, method, grown, brought)
    contenders, tables, replay = config.atlas.methods, configs.to_tables(config), run_inputs.replay
    present = brought if replay is None else replay.common_fields
    atlases = make_atlases(
        Preparer(blueprint), contenders, tables, config.source, rewards, len(rows), present
    )
    parts = rollout, data, train, config.scores, run_inputs, blueprint, draw_groups, rewards
    read_by_atlases = frozenset() if atlases is None else atlases.needs
    source = make_rollout_source(*parts, brought, read_by_atlases.intersection(present))
    mesh, seed, sums = blueprint.samples_on, train.seed, sums_scored(blueprint.chain)
    source = with_experience(
        source, config.experience, rollout, run_inputs, rewards, seed, mesh, sums
    )
    # Saved rollouts have ended all at once, and groups with experience are mixed first.
    waits = replay is not None or share > 0
    collector = _make_collector(rollout, train.steps, run_inputs, rewards, method, source, waits)
    if make_learner is None:
        learner = _read_learner(seed, pretrained, len(rows), rewards, blueprint)
    else:
        learner = make_learner(blueprint)
    return Setup(
        config=config.at_time(run_inputs.chat.time),
        inputs=run_inputs,
        rewards=rewards,
        **method._asdict(),
        collector=collector,
        atlases=atlases,
        learner=learner,
        stream=first_stream(source, len(rows), seed),
    )


def _make_drawing(
    completion: str | None,
    rollout: RolloutKeys,
    run_inputs: Inputs,
    method: Method,
    grown: Trees | None,
    brought: Mapping[str, Any],
) -> Callable[..., Drawing]:
    """What draws the samples of prompts: the engine, or, with `data.completion`, texts of the data.
    A replay, which has no rows but prompts, draws none.

    Args:
      grown, brought: the trees of samples, and the fields that come with them.
    """
    rows, blueprint, world = run_inputs.prompts.rows, method.blueprint, run_inputs.world
    is_replay, group = run_inputs.replay is not None, rollout.group_size
    if is_replay and completion is not None:
        refuse_weights(completion_key(completion), blueprint.chain, blueprint.objective)
    if is_replay or completion is None:
        converse = None if is_replay or world is None else world.converse(rows)
        return functools.partial(
            draw, method.engine, group_size=group, grown=grown, converse=converse
        )
    return make_writer(
        completion,
        rows,
        run_inputs.pretrained,
        rollout,
        blueprint.sampling,
        blueprint.chain,
        blueprint.objective,
        brought,
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
    judge = Judge(run_inputs.pretrained.tokenizer, rewards, rows)
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
    params = pretrained.read_params(
        seed, model, held_dtype(model), param_layout(model, blueprint.mesh)
    )
    read = teachers.read_teachers(blueprint.teachers, blueprint.mesh)
    return parameters.first_learner(blueprint, params, num_rows, names, read)


class Shared:
    """Keeps what one run has built for the next one, in one process and on one set of devices.

    Only for runs fully described by their config: Python objects are not part of the key.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def for_config(self, config: Config) -> step.Share:
        """A function (name in DEPENDS, make) that makes the thing, or returns the one it kept."""
        flat = configs.flat(configs.to_tables(config))
        has_steps = config.optimizer.schedule != "constant"  # in its programs

        def share(name: str, make: Callable[[], Any]) -> Any:
            keys = set(DEPENDS[name])
            if not has_steps and name != "evaluator":
                keys.discard("train.steps")
            tables = tuple(f"{key}." for key in keys)
            settings = {key: flat[key] for key in sorted(flat) if f"{key}.".startswith(tables)}
            place = json.dumps([name, settings], default=str)
            if place not in self._values:
                self._values[place] = make()
            return self._values[place]

        return share
