"""Group-relative reinforcement learning of language models in JAX, made of small parts.

The public words are loaded when they are first used: `import jaxgrpo` loads neither Flax nor
transformers, and `jaxgrpo.advantages` needs only JAX. Read core/types.py,
advantages/recipes/ and training/loop.py, in this order.
"""

from __future__ import annotations

import importlib
from typing import Any

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
    "jaxgrpo.experiments.probe.command": ("probe",),
    "jaxgrpo.models.hf.folders": ("load_model", "save_model"),
    "jaxgrpo.models.sequences": ("logits", "token_logp"),
    "jaxgrpo.training.setup": ("Setup", "setup"),
    "jaxgrpo.training.checkpoints": ("parameter_hash",),
    "jaxgrpo.training.loop": ("Run", "train"),
    "jaxgrpo.core.types": (
        *("Prompts", "RolloutSpec", "Rollouts", "Signal", "TrainBatch", "TrainState"),
    ),
}
_MODULES = {
    **{name: f"jaxgrpo.{name}" for name in ("advantages", "losses", "models", "rewards")},
    "tasks": "jaxgrpo.data.tasks",
}
_NAMES_AT_HOME = {"load_config": "load"}  # where the word alone would say too little
_HOME = {word: module for module, words in _WORDS.items() for word in words}

__all__ = ["__version__", *sorted(_HOME), *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


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
