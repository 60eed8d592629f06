"""The models and workloads that the comparisons with TRL, Tunix and transformers share.

S, M and V are small, for CPUs, in float32, and so is L, SmolLM2-135M's shape; Q is Qwen3-0.6B in
bfloat16, for a GPU. SR and MR are S and M as Qwen3.5, three of four layers recurring, SX and MX
with 8 of 64 experts; feed-forward parts are as wide as the FLOPs of S and M on workload A allow.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgrpo.core.types import Params, Prompts
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import Model, ModelConfig
from jaxgrpo.models.hf import families
from jaxgrpo.rollout.selection import pad_prompts

SMALL = {  # hidden, layers, vocabulary
    "S": (256, 4, 512),
    "M": (512, 8, 4096),
    "V": (256, 4, 151_936),
}
OF_KINDS = {"SR": 624, "MR": 1312, "SX": 96, "MX": 192}  # the size of what is fed forward
MODELS = (*SMALL, *OF_KINDS, "L", "Q")
PAD, END, UNKNOWN = 0, 1, 2  # the special tokens, which no prompt holds


class Workload(NamedTuple):
    """What one step samples. Completions are of exactly `completion` tokens unless ragged."""

    prompts: int
    samples: int
    shortest: int  # prompt tokens
    longest: int
    completion: int
    ragged: bool = False  # samples end by themselves, after at most `completion` tokens
    flat: float = 0.0  # share of the groups whose samples all earn the same

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return (END,) if self.ragged else ()


WORKLOADS = {
    "A": Workload(8, 8, 64, 64, 128),
    "B": Workload(4, 16, 256, 256, 64),
    "C": Workload(16, 8, 32, 256, 256, ragged=True),
    "D": Workload(16, 8, 32, 256, 256, ragged=True, flat=0.6),
    "E": Workload(8, 8, 44, 48, 64),
    "H": Workload(8, 8, 512, 512, 1024),
    "G": Workload(32, 8, 64, 512, 1024, ragged=True),  # a step of configs/gsm8k_qwen3_0p6b.toml
}


def model_config(name: str) -> ModelConfig:
    if name == "Q":
        return qwen3_0p6b()
    if name == "L":
        return smollm2_135m()
    if name in OF_KINDS:
        return mixed(name)
    hidden, layers, vocab = SMALL[name]
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        num_kv_heads=hidden // 128,
        head_dim=64,
    )


def mixed(name: str) -> ModelConfig:
    """S or M with layers that recur, or with experts, as its config.json would say it."""
    hidden, layers, vocab = SMALL[name[0]]
    fields = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
    }
    if name[1] == "X":
        experts = {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True}
        sizes = {"intermediate_size": 3 * hidden, "moe_intermediate_size": OF_KINDS[name]}
        fields |= {"model_type": "qwen3_moe", **experts, **sizes}
    else:
        heads = {"linear_num_key_heads": hidden // 128, "linear_num_value_heads": hidden // 64}
        sizes = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64)
        fields |= {"model_type": "qwen3_5_text", "intermediate_size": OF_KINDS[name]}
        fields |= {**heads, **sizes}
    return families.model_config(fields, f"benchmarks.workloads, {name}")


def smollm2_135m() -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        query_key_norm="none",
        tie_embeddings=True,
    )


def qwen3_0p6b(layers: int = 28) -> ModelConfig:
    """Qwen3-0.6B, or some of its layers, whose caches fit into no cache of a chip."""
    return ModelConfig(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        tie_embeddings=True,
        dtype="bfloat16",
    )


def matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of each matrix of a layer."""
    hidden, wide = config.hidden_size, config.intermediate_size
    heads, kv_heads = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    attention = [(hidden, heads), (hidden, kv_heads), (hidden, kv_heads), (heads, hidden)]
    return [*attention, (hidden, wide), (hidden, wide), (wide, hidden)]


def build(config: ModelConfig, ragged: bool, mesh: Mesh | None = None) -> tuple[Model, Params]:
    """A model with random weights; if `ragged`, one whose samples end by themselves.

    Then component 0 of every embedding is 1 and the end token's head reads it with weight .45. At
    shape S a sample ends with a probability of 1 to 2% per token: some after a few, some never.
    Where head and embeddings are one table, as in Q, the component is 8 and the end token's 7.8
    more: 28 random layers leave little of a smaller one, and 151,936 tokens compete with the end
    token, which so has a probability of .7 to 2.3%.
    The parameters are laid out for sampling on `mesh`, if there is one.
    """
    constrain = None if mesh is None else sharding.constrain(mesh)
    model = decoder.build(config, constrain=constrain)
    params = jax.jit(model.init)(jax.random.key(0))
    if ragged:
        table = params["embed"]["table"]
        if config.tie_embeddings:
            params["embed"]["table"] = table.at[:, 0].set(8.0).at[END, 0].set(8.0 + 7.8)
        else:
            params["embed"]["table"] = table.at[:, 0].set(1.0)
            params["head"]["table"] = params["head"]["table"].at[END, 0].set(0.45)
    if mesh is not None:
        rules = sharding.sampling_rules(mesh, config.kinds)
        layout = sharding.param_shardings(mesh, model.axes, model.shapes, rules)
        params = jax.device_put(params, layout)
    return model, params


def make_prompts(workload: Workload, vocab: int, seed: int = 0, step: int = 0) -> Prompts:
    """Random prompts with lengths from `shortest` to `longest`, both drawn from `seed`."""
    random = np.random.default_rng(seed)
    lengths = random.integers(workload.shortest, workload.longest + 1, workload.prompts)
    tokens = [random.integers(UNKNOWN + 1, vocab, length) for length in lengths]
    order = np.arange(workload.prompts)
    return pad_prompts(tokens, workload.longest, order, order, step)
