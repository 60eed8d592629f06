"""A policy to sample from without training it, and the policies that evaluations compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config, config_of
from jaxgrpo.config.own_code import python_name
from jaxgrpo.core.types import Params
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.evaluation.evaluate import Evaluate, Policy, make_evaluator, questions_of
from jaxgrpo.evaluation.rescoring import Base
from jaxgrpo.models import sharding
from jaxgrpo.models.hf import folders
from jaxgrpo.models.hf import folders as huggingface
from jaxgrpo.training import process
from jaxgrpo.training.export import read_run
from jaxgrpo.training.inputs import eval_source, load_prompts, make_chat, resolve_scorer
from jaxgrpo.training.resets import may_reset
from jaxgrpo.training.setup import Setup, find_model, sampling_settings
from jaxgrpo.update.step import Share, alone

SLOTS = 64  # samples decoded at once where no run says how many


NOBODY = python_name("nobody")  # stands where a config must name a reward and none is asked for


DEFAULTS: dict[str, Any] = {
    "rollout": {
        "prompts_per_step": SLOTS // 8,
        "group_size": 8,
        "max_prompt_tokens": 1024,
        "max_completion_tokens": 1024,
    },
    "rewards": [{"use": NOBODY}],
    "recipe": "sign",
    "loss": {"proximal": "trainer"},  # so that rollout.top_k and top_p may be set
    "optimizer": {"learning_rate": 0.0},
    "train": {"steps": 1},
    "run": {"dir": "runs/none"},
}
"""What a config must say and a model folder does not; `--set` replaces it. Nothing is trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredPolicy(Policy):
    """A policy whose weights are in a model folder and not read yet."""

    folder: Path

    def read_params(self) -> Params:
        """The weights, laid out for sampling."""
        rules, model = sharding.SAMPLING, self.model
        layout = sharding.param_shardings(self.mesh, model.axes, model.shapes, rules)
        return huggingface.read_params(self.folder, model, shardings=layout)


def config_for(
    target: str, changes: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Config:
    """The config by which a target is sampled: a run's own, a TOML file, or DEFAULTS for a model.

    Raises: ConfigError with all problems.
    """
    tables: dict[str, Any]
    if (Path(target) / "config.toml").exists():
        folder, config = read_run(target)
        tables, source = configs.tables_of(config), config.source
        tables["model"] = {**tables["model"], "path": str((folder / "model").absolute())}
        tables["model"].pop("revision", None)
    elif Path(target).suffix == ".toml":
        read = configs.load(target)
        tables, source = configs.tables_of(read), read.source
    else:
        tables, source = {**DEFAULTS, "model": {"path": target}}, None
    kept = {name: value for name, value in (changes or {}).items() if value is not None}
    config = config_of(tables, kept)
    return configs.from_dict(configs.tables_of(config), overrides, source=source)


def find_policy(
    console: Console, config: Config, rows: Iterable[Any] | None = None
) -> tuple[StoredPolicy, PromptData]:
    """The policy of a config, and the prompts of eval.data (or `rows`).

    Raises: InputError where there is no such model, or a prompt cannot be read or does not fit.
    """
    line = process.start(config.mesh.platform)
    if process.is_main():
        console.print(line)
    keys = config.mesh
    mesh = sharding.make_mesh(keys.data, keys.fsdp, keys.tensor, keys.context)
    folder, tokenizer, model = find_model(config, mesh)
    chat = make_chat(config, tokenizer)
    prompts = load_prompts(config, chat, rows if rows is not None else eval_source(config))
    ends = huggingface.read_end_tokens(folder, tokenizer)
    policy = StoredPolicy(
        model=model,
        tokenizer=tokenizer,
        mesh=mesh,
        settings=sampling_settings(config, tokenizer, ends),
        width=config.rollout.max_prompt_tokens,
        slots=config.rollout.prompts_per_step * config.rollout.group_size,
        folder=folder,
    )
    return policy, prompts


def key_of(config: Config) -> Any:
    """The key data of a config's seed."""
    return jax.random.key_data(jax.random.key(config.train.seed))


def load_base(config: Config, mesh: Mesh) -> Base:
    """The model that a config names, as a base: one more copy of its parameters in memory."""
    folder, _, model = find_model(config, mesh)
    layout = sharding.param_shardings(mesh, model.axes, model.shapes, sharding.TRAINING)
    return Base(model, folders.read_params(folder, model, shardings=layout))


def base_of(run: Setup) -> Base:
    """The base of a run: a policy that it holds anyway, where there is one; else read anew."""
    held = ("base",) if may_reset(run.config) else ("base", "reference")
    for name in held:
        if name in run.state.frozen:
            return Base(run.model, run.state.frozen[name])
    return load_base(run.config, run.mesh)


def evaluator_of(run: Setup, share: Share = alone) -> Evaluate:
    """The evaluation that a run's config asks for.

    Args:
      share: as of `assembly.setup`.
    """
    return share("evaluator", lambda: _make_evaluator_of(run))


def _make_evaluator_of(run: Setup) -> Evaluate:
    config = run.config
    held_out = run.held_out or load_prompts(config, run.chat, eval_source(config))
    questions = questions_of(config, held_out, resolve_scorer(config, run.rewards))
    geometry = run.parts.geometry
    base = base_of(run) if config.eval.kl_to_base else None
    policy = Policy(
        model=run.model,
        tokenizer=run.tokenizer,
        mesh=run.mesh,
        settings=run.parts.sampling,
        width=geometry.max_prompt_tokens,
        slots=geometry.num_prompts * geometry.group_size,
    )
    return make_evaluator(config, policy, questions, base)
