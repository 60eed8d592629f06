"""The models and workloads that the comparisons with TRL, Tunix and transformers share."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgrpo.core.types import Params, Prompts
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import Model, ModelConfig
from jaxgrpo.rollout.selection import pad_prompts

MODELS = {  # hidden, layers, vocabulary
    "S": (256, 4, 512),
    "M": (512, 8, 4096),
    "V": (256, 4, 151_936),
}
PAD, END, UNKNOWN = 0, 1, 2  # the special tokens, which no prompt holds


class Workload(NamedTuple):
    """What one step samples. Completions are of exactly `completion` tokens unless ragged."""

    prompts: int
    samples: int
    shortest: int  # prompt tokens
    longest: int
    completion: int
    ragged: bool = False  # samples end by themselves, after at most `completion` tokens

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return (END,) if self.ragged else ()


WORKLOADS = {
    "A": Workload(8, 8, 64, 64, 128),
    "B": Workload(4, 16, 256, 256, 64),
    "C": Workload(16, 8, 32, 256, 256, ragged=True),
}


def model_config(name: str) -> ModelConfig:
    hidden, layers, vocab = MODELS[name]
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        num_kv_heads=hidden // 128,
        head_dim=64,
    )


def build(config: ModelConfig, ragged: bool, mesh: Mesh | None = None) -> tuple[Model, Params]:
    """A model with random weights; if `ragged`, one whose samples end by themselves.

    Then component 0 of every embedding is 1 and the end token's head reads it with weight .45. At
    shape S a sample ends with a probability of 1 to 2% per token: some after a few, some never.
    The parameters are laid out for sampling on `mesh`, if there is one.
    """
    constrain = None if mesh is None else sharding.constrain(mesh)
    model = decoder.build(config, constrain=constrain)
    params = jax.jit(model.init)(jax.random.key(0))
    if ragged:
        params["embed"]["table"] = params["embed"]["table"].at[:, 0].set(1.0)
        params["head"]["table"] = params["head"]["table"].at[END, 0].set(0.45)
    if mesh is not None:
        layout = sharding.param_shardings(mesh, model.axes, model.shapes, sharding.SAMPLING)
        params = jax.device_put(params, layout)
    return model, params


def prompts_of(workload: Workload, vocab: int, seed: int = 0, step: int = 0) -> Prompts:
    """Random prompts with lengths from `shortest` to `longest`, both drawn from `seed`."""
    random = np.random.default_rng(seed)
    lengths = random.integers(workload.shortest, workload.longest + 1, workload.prompts)
    tokens = [random.integers(UNKNOWN + 1, vocab, length) for length in lengths]
    order = np.arange(workload.prompts)
    return pad_prompts(tokens, workload.longest, order, order, step)
