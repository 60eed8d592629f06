"""Group-relative reinforcement learning of language models in JAX, made of small parts.

The public words are loaded when they are first used: `import jaxgrpo` loads neither Flax nor
transformers, and `jaxgrpo.advantages` needs only JAX. Read core/types.py,
advantages/recipes/ and training/loop.py, in this order.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the public words as type checkers see them; `_WORDS` has the same
    from jaxgrpo import advantages as advantages
    from jaxgrpo import losses as losses
    from jaxgrpo import models as models
    from jaxgrpo import rewards as rewards
    from jaxgrpo.advantages import AdvantageTransform as AdvantageTransform
    from jaxgrpo.advantages import chain as chain
    from jaxgrpo.advantages import divide_by_group_std as divide_by_group_std
    from jaxgrpo.advantages import mask_truncated as mask_truncated
    from jaxgrpo.advantages import mask_zero_variance as mask_zero_variance
    from jaxgrpo.advantages import per_reward as per_reward
    from jaxgrpo.advantages import sign as sign
    from jaxgrpo.advantages import stream as stream
    from jaxgrpo.advantages import subtract_group_mean as subtract_group_mean
    from jaxgrpo.advantages import sum_rewards as sum_rewards
    from jaxgrpo.advantages import to_tokens as to_tokens
    from jaxgrpo.advantages import transform as transform
    from jaxgrpo.cli.inference import evaluate as evaluate
    from jaxgrpo.cli.sampling import sample as sample
    from jaxgrpo.config.files import Config as Config
    from jaxgrpo.config.files import load as _load
    from jaxgrpo.core.errors import ConfigError as ConfigError
    from jaxgrpo.core.errors import InputError as InputError
    from jaxgrpo.core.metrics import Max as Max
    from jaxgrpo.core.metrics import Mean as Mean
    from jaxgrpo.core.types import Prompts as Prompts
    from jaxgrpo.core.types import Rollouts as Rollouts
    from jaxgrpo.core.types import RolloutSpec as RolloutSpec
    from jaxgrpo.core.types import Signal as Signal
    from jaxgrpo.core.types import TrainBatch as TrainBatch
    from jaxgrpo.core.types import TrainState as TrainState
    from jaxgrpo.data import tasks as tasks
    from jaxgrpo.experiments.probe.command import probe as probe
    from jaxgrpo.models.hf.folders import load_model as load_model
    from jaxgrpo.models.hf.folders import save_model as save_model
    from jaxgrpo.models.sequences import logits as logits
    from jaxgrpo.models.sequences import token_logp as token_logp
    from jaxgrpo.training.checkpoints import parameter_hash as parameter_hash
    from jaxgrpo.training.loop import Run as Run
    from jaxgrpo.training.loop import train as train
    from jaxgrpo.training.setup import Setup as Setup
    from jaxgrpo.training.setup import setup as setup

    load_config = _load  # a checker takes a name that an import changes for a private one

__version__: str = "0.1.0"

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

if not TYPE_CHECKING:  # hidden, or a misspelt word would be one of any type
    __all__ = ["__version__", *sorted(_HOME), *_MODULES]

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
