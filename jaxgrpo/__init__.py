"""Group-relative reinforcement learning of language models in JAX, made of small parts.

The public words are loaded when they are first used: `import jaxgrpo` loads neither Flax nor
transformers, and `jaxgrpo.advantages` needs only JAX. Read core/types.py,
advantages/recipes/ and training/loop.py, in this order.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the public words as type checkers see them; `_WORDS` has the same
    from jaxgrpo import advantages, losses, models, rewards
    from jaxgrpo.advantages import (
        AdvantageTransform,
        chain,
        divide_by_group_std,
        mask_truncated,
        mask_zero_variance,
        per_reward,
        sign,
        stream,
        subtract_group_mean,
        sum_rewards,
        to_tokens,
        transform,
    )
    from jaxgrpo.cli.inference import evaluate
    from jaxgrpo.cli.sampling import sample
    from jaxgrpo.config.files import Config
    from jaxgrpo.config.files import load as load_config
    from jaxgrpo.core.errors import ConfigError, InputError
    from jaxgrpo.core.metrics import Max, Mean
    from jaxgrpo.core.types import (
        Learner,
        Prompts,
        Rollouts,
        RolloutSpec,
        Signal,
        Stream,
        TrainBatch,
    )
    from jaxgrpo.data import tasks
    from jaxgrpo.environments.rules import Rules
    from jaxgrpo.experiments.probe.command import probe
    from jaxgrpo.models.hf.folders import load_model, save_model
    from jaxgrpo.models.sequences import logits, token_logp
    from jaxgrpo.training.checkpoints import parameter_hash
    from jaxgrpo.training.loop import Run, train
    from jaxgrpo.training.setup import Setup, setup

__version__ = "0.1.0"

_WORDS = {
    "jaxgrpo.advantages": (
        *("AdvantageTransform", "chain", "transform", "per_reward", "stream", "sum_rewards"),
        *("subtract_group_mean", "divide_by_group_std", "sign", "to_tokens"),
        *("mask_truncated", "mask_zero_variance"),
    ),
    "jaxgrpo.cli.inference": ("evaluate",),
    "jaxgrpo.cli.sampling": ("sample",),
    "jaxgrpo.config.files": ("Config", "load_config"),
    "jaxgrpo.core.errors": ("ConfigError", "InputError"),
    "jaxgrpo.core.metrics": ("Max", "Mean"),
    "jaxgrpo.environments.rules": ("Rules",),
    "jaxgrpo.experiments.probe.command": ("probe",),
    "jaxgrpo.models.hf.folders": ("load_model", "save_model"),
    "jaxgrpo.models.sequences": ("logits", "token_logp"),
    "jaxgrpo.training.setup": ("Setup", "setup"),
    "jaxgrpo.training.checkpoints": ("parameter_hash",),
    "jaxgrpo.training.loop": ("Run", "train"),
    "jaxgrpo.core.types": (
        *("Learner", "Prompts", "RolloutSpec", "Rollouts", "Signal", "Stream", "TrainBatch"),
    ),
}
_MODULES = {
    **{name: f"jaxgrpo.{name}" for name in ("advantages", "losses", "models", "rewards")},
    "tasks": "jaxgrpo.data.tasks",
}
_NAMES_AT_HOME = {"load_config": "load"}  # where the word alone would say too little
_HOME = {word: module for module, words in _WORDS.items() for word in words}

__all__ = [
    "AdvantageTransform",
    "Config",
    "ConfigError",
    "InputError",
    "Learner",
    "Max",
    "Mean",
    "Prompts",
    "RolloutSpec",
    "Rollouts",
    "Rules",
    "Run",
    "Setup",
    "Signal",
    "Stream",
    "TrainBatch",
    "__version__",
    "advantages",
    "chain",
    "divide_by_group_std",
    "evaluate",
    "load_config",
    "load_model",
    "logits",
    "losses",
    "mask_truncated",
    "mask_zero_variance",
    "models",
    "parameter_hash",
    "per_reward",
    "probe",
    "rewards",
    "sample",
    "save_model",
    "setup",
    "sign",
    "stream",
    "subtract_group_mean",
    "sum_rewards",
    "tasks",
    "to_tokens",
    "token_logp",
    "train",
    "transform",
]

if not TYPE_CHECKING:  # hidden, or a misspelt word would be one of any type

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            value = getattr(importlib.import_module(_HOME[name]), _NAMES_AT_HOME.get(name, name))
        elif name in _MODULES:
            value = importlib.import_module(_MODULES[name])
        else:
            from jaxgrpo.core.errors import suggest

            raise AttributeError(f"jaxgrpo has no {name!r}: {suggest(name, __all__)}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
