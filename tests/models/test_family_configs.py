"""Configs drawn from each family's whole range, beside transformers; gradients beside PyTorch's."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import FULL, LLAMA3, SLIDING, YARN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quick import long_but

import jaxgrpo
from jaxgrpo.models.hf.families import FAMILIES

CLOSE = 2e-4  # of logits, which are of order 1
LAYERED = ("gemma3_text", "olmo3")  # a rope for each type of layer
TYPED = (
    *("qwen2", "qwen3", "ministral", "gemma2", "exaone4", "cohere2", "gpt_oss"),
    *LAYERED,
)  # read layer_types
MASKED = ("ministral", "gemma2", "cohere2", "gpt_oss", *LAYERED)
"""transformers makes a mask of the window even where no layer has one, and fails without."""
GATED = ("qwen3_5_moe_text", "qwen3_next")
HYBRID = ("qwen3_5_text", "olmo_hybrid", *GATED)
EXPERTS: dict[str, str] = {
    **dict.fromkeys(("qwen3_moe", "olmoe", *GATED), "num_experts"),
    **dict.fromkeys(("gpt_oss", "granitemoe"), "num_local_experts"),
}
LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
BIASED = (
    *(*EXPERTS, *LATENTS, "glm4_moe", "arcee", "hunyuan_v1_dense", "glm4", "cohere2"),
    *("qwen3", "llama", "smollm3", "granite", "seed_oss", "gemma2", "gemma3_text", *LAYERED),
)

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")

flags = st.booleans()
factors = st.floats(1.0, 8.0)
thetas = st.floats(20.0, 1e5)
scales = st.floats(0.2, 4.0)
windows = st.integers(1, 7)


def maybe(**values: st.SearchStrategy) -> st.SearchStrategy[dict[str, Any]]:
    """Some of these fields."""
    return st.fixed_dictionaries({}, optional=values)


def ropes(nested: bool) -> st.SearchStrategy[dict[str, Any]]:
    plain = st.fixed_dictionaries({"rope_type": st.just("default"), "rope_theta": thetas})
    scaled = st.builds(
        lambda kind, theta, factor: {"rope_type": kind, "rope_theta": theta, "factor": factor},
        *(st.sampled_from(("linear", "dynamic")), thetas, factors),
    )
    llama3 = st.builds(
        lambda **more: {**LLAMA3, **more},
        rope_theta=thetas,
        factor=factors,
        low_freq_factor=st.floats(0.1, 3.0),
        high_freq_factor=st.floats(0.1, 9.0),
        original_max_position_embeddings=st.integers(4, 60),
    )
    optional = {
        "factor": factors,
        "attention_factor": scales,
        "beta_fast": st.floats(1.0, 40.0),
        "beta_slow": st.floats(0.01, 2.0),
        "mscale": scales,
        "mscale_all_dim": scales,
        **({} if nested else {"truncate": flags}),
    }
    yarn = st.builds(
        lambda theta, more: {**YARN, "rope_theta": theta, **more}, thetas, maybe(**optional)
    )
    return plain | scaled | llama3 | yarn


@st.composite
def longropes(draw: st.DrawFn, head_dim: int) -> dict[str, Any]:
    """Rotary positions of Phi-3, which has two types."""
    share = draw(st.sampled_from((0.25, 0.5, 1.0)))
    rope = {"rope_theta": draw(thetas), "partial_rotary_factor": share, "rope_type": "default"}
    if draw(flags):
        return rope
    of_pairs = st.lists(factors, min_size=(pairs := int(head_dim * share) // 2), max_size=pairs)
    more = draw(maybe(factor=factors, attention_factor=scales))
    long = {"short_factor": draw(of_pairs), "long_factor": draw(of_pairs)}
    return {**rope, "rope_type": "longrope", **long, **more}


@st.composite
def experts(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Fields of families that have some."""
    fields: dict[str, Any] = {}
    if family in EXPERTS:
        fields[EXPERTS[family]] = draw(st.sampled_from((4, 5, 8)))
        fields["num_experts_per_tok"] = draw(st.integers(1, 4))
        if family not in ("gpt_oss", "qwen3_5_moe_text"):
            fields["norm_topk_prob"] = draw(flags)
    if family in HYBRID:
        sizes = st.sampled_from((1, 2))
        keys = draw(sizes)
        fields |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * draw(sizes)}
        if family == "olmo_hybrid":
            fields["linear_allow_neg_eigval"] = draw(flags)
            fields["linear_num_value_heads"] = keys  # as in `checkpoints.RICH`
        else:
            fields |= {"full_attention_interval": draw(st.integers(1, 3))}
    if family in GATED:
        fields["shared_expert_intermediate_size"] = draw(st.integers(3, 20))
    if family == "qwen3_next":
        fields["decoder_sparse_step"] = draw(st.integers(1, 2))
    if family in ("glm4_moe", *LATENTS):
        fields |= {"n_group": draw(st.sampled_from((1, 2, 4))), "topk_group": 1}
        fields |= {"num_experts_per_tok": draw(st.integers(1, 2))}
        fields["routed_scaling_factor"] = draw(scales)
        fields["norm_topk_prob"] = draw(flags)
    if family in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        fields["first_k_dense_replace"] = draw(st.integers(0, 3))
    if family == "glm4_moe":
        fields["use_qk_norm"] = draw(flags)
    if family == "deepseek_v2":
        fields["topk_method"] = draw(st.sampled_from(("greedy", "group_limited_greedy")))
    if family in LATENTS:
        names = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        fields |= {name: draw(st.sampled_from((8, 10, 12))) for name in names}
        fields["qk_rope_head_dim"] = draw(st.sampled_from((4, 6)))
        fields["q_lora_rank"] = draw(st.none() | st.integers(8, 20))
    return fields


@st.composite
def _single(draw: st.DrawFn, family: str, layers: int, heads: int) -> dict[str, Any]:
    """Fields that single families have."""
    fields: dict[str, Any] = {}
    if family == "granitemoehybrid":
        fields["layer_types"] = [FULL] * layers
        fields["position_embedding_type"] = draw(st.sampled_from((None, "rope")))
        fields["shared_intermediate_size"] = draw(st.integers(8, 40))
    if family in LATENTS:
        fields["num_key_value_heads"] = heads
    if family == "glm4_moe_lite":
        kinds = st.sampled_from(("dense", "sparse"))
        fields["mlp_layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    if family == "smollm3":
        fields["no_rope_layers"] = draw(
            st.lists(st.sampled_from((0, 1)), min_size=layers, max_size=layers)
        )
    if family in ("granite", "granitemoe", "granitemoehybrid"):
        names = ("embedding", "attention", "residual")
        fields |= {f"{name}_multiplier": draw(scales) for name in names}
        # Divided by less, the logits of experts are of order 10.
        fields["logits_scaling"] = draw(st.floats(1.0, 4.0) if family in EXPERTS else scales)
    if family.startswith("gemma"):
        fields["query_pre_attn_scalar"] = draw(st.integers(1, 30))
        fields["final_logit_softcapping"] = draw(st.none() | scales)
    if family == "gemma2":
        fields["attn_logit_softcapping"] = draw(st.none() | scales)
    return fields


@st.composite
def changes(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Fields of config.json over those of the family's small model."""
    heads = draw(st.sampled_from((2, 4)))
    # transformers wants a layer of OLMo-Hybrid that recurs.
    layers = draw(st.integers(2 if family == "olmo_hybrid" else 1, 5))
    activation = "hidden_activation" if family.startswith("gemma") else "hidden_act"
    fields = {
        "vocab_size": draw(st.integers(checkpoints.VOCAB, 99)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from((1, 2, heads))),
        "head_dim": draw(st.sampled_from(HEADS.get(family, (8, 10, 16)))),
        "tie_word_embeddings": draw(flags),
        activation: draw(st.sampled_from(ACTIVATIONS[: 1 if family in HYBRID else None])),
        "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
        "sliding_window": draw((st.nothing() if family in MASKED else st.none()) | windows),
        "layer_types": None,
    }
    kinds = [FULL] if fields["sliding_window"] is None else [FULL, SLIDING]
    if family in TYPED:
        fields["layer_types"] = draw(
            st.lists(st.sampled_from(kinds), min_size=layers, max_size=layers)
        )
    optional = {
        "attention_bias": family in BIASED,
        "attention_out_bias": family == "seed_oss",
        "mlp_bias": family == "deepseek_v2"
        or family in ("llama", "smollm3", "granite", "seed_oss", "arcee"),
        "use_bias": family == "ernie4_5",
    }
    fields |= {name: draw(flags) for name, has in optional.items() if has}
    if family in ("qwen2", "qwen3", "qwen3_moe", "smollm3"):
        fields["use_sliding_window"] = fields["sliding_window"] is not None
    fields |= draw(experts(family))
    fields |= draw(_single(family, layers, heads))
    if family == "cohere2":
        fields["logit_scale"] = draw(scales)
        fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
        del fields["head_dim"]
    return fields | {"rope_parameters": draw(_draw_ropes(family, 64 // heads))}


def _draw_ropes(family: str, phi_head_dim: int) -> st.SearchStrategy[dict[str, Any]]:
    if family == "phi3":
        return longropes(phi_head_dim)
    if family in LAYERED:
        return st.fixed_dictionaries({FULL: ropes(True), SLIDING: ropes(True)})
    if family == "ministral3":
        more = {
            "llama_4_scaling_beta": scales,
            "original_max_position_embeddings": st.integers(2, 9),
        }
        return st.builds(
            lambda rope, more: {**rope, **more}, ropes(False), st.fixed_dictionaries(more)
        )
    if family == "hunyuan_v1_dense":
        dynamic = {"rope_type": "dynamic", "factor": 1.0}
        alphas = st.builds(lambda **more: {**dynamic, **more}, rope_theta=thetas, alpha=scales)
        return ropes(False) | alphas
    if family == "olmo_hybrid":
        return ropes(False) | st.just({"rope_type": "default", "rope_theta": None})
    return ropes(False)


WINDOWLESS = (
    *(
        "llama",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        *LATENTS,
        "seed_oss",
        "olmo2",
        "olmoe",
        "glm4_moe",
    ),
    *("arcee", "hunyuan_v1_dense", "glm4", "ernie4_5", *HYBRID),
)
HEADS = {"glm4_moe": (8, 16), "glm4": (8, 12, 16), **dict.fromkeys(HYBRID, (16, 24))}
"""Sizes of heads, where a part of each turns."""
DRAWN = ("llama", "gemma3_text", "phi3", "olmo3", "cohere2", "ministral3", "granitemoehybrid")
DRAWN += ("qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_next", "deepseek_v3")
"""Families that `make test-all` draws configs of: between them they have every kind of field."""


@pytest.mark.parametrize("family", long_but(DRAWN, sorted(FAMILIES)))
def test_a_drawn_config_gives_the_logits_of_transformers(family):
    @settings(
        max_examples=6,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    )
    @given(changes(family))
    def law(fields: dict[str, Any]) -> None:
        gone = set() if family in (*TYPED, *HYBRID, "granitemoehybrid") else {"layer_types"}
        gone |= {"sliding_window"} if family in WINDOWLESS else set()
        fields = {name: value for name, value in fields.items() if name not in gone}
        with TemporaryDirectory() as folder:
            compare(family, fields, Path(folder))

    law()


def compare(family: str, fields: dict[str, Any], folder: Path) -> None:
    theirs = checkpoints.redrawn(checkpoints.config_fields(family, **fields), folder)
    model, params = jaxgrpo.load_model(folder)
    tokens, mask = checkpoints.batch()
    logits = np.asarray(jaxgrpo.logits(model, params, tokens, mask))
    assert checkpoints.distance(theirs, folder, logits, tokens, mask, CLOSE) <= CLOSE


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_gradients_are_those_of_pytorch(family, tmp_path):
    """Of a sum of the log-probabilities that real tokens have."""
    import torch

    theirs = checkpoints.saved(checkpoints.transformers_config(family), tmp_path)
    model, params = jaxgrpo.load_model(tmp_path)
    tokens, mask = checkpoints.batch()
    weights = np.random.default_rng(1).normal(size=(*tokens.shape, checkpoints.VOCAB))
    weights = (weights * mask[..., None]).astype(np.float32)

    def scalar(params: Any) -> jax.Array:
        return jnp.vdot(jaxgrpo.logits(model, params, tokens, mask), weights)

    ours = jax.grad(scalar)(params)
    position = np.maximum(mask.cumsum(1) - 1, 0)
    inputs = [torch.as_tensor(array) for array in (tokens, mask, position)]
    logits = theirs(inputs[0], attention_mask=inputs[1], position_ids=inputs[2]).logits
    (logits * torch.as_tensor(weights)).sum().backward()
    named = dict(theirs.named_parameters())
    period = model.config.periods > 1
    layer = ours["blocks"]["0"]
    pairs = {
        "model.layers.0.self_attn.q_proj.weight": layer["attention"]["query"]["kernel"],
        "model.layers.0.mlp.down_proj.weight": layer["feed_forward"]["down"]["kernel"],
    }
    assert period or len(layer["attention"]["query"]["kernel"]) == 1
    for name, gradient in pairs.items():
        expected = named[name].grad.numpy()
        gradient = np.asarray(gradient)[0].reshape(expected.shape[1], expected.shape[0]).T
        np.testing.assert_allclose(gradient, expected, atol=1e-3 * np.abs(expected).max(), rtol=0)
