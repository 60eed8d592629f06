"""Local and global layers, sandwich and offset norms against transformers' Gemma 3 in PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import whole_logits
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from jaxgrpo.models.api import LayerKind, ModelConfig
from jaxgrpo.models.decoder import build

TOKENS = np.random.default_rng(0).integers(0, 29, size=(2, 14))
CONFIG = ModelConfig(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    pattern=(LayerKind(window=4), LayerKind(window=4), LayerKind(rope_theta=1e6)),
    tie_embeddings=True,
    activation="gelu_tanh",
    norm_offset=1.0,
    sandwich_norms=True,
    embedding_scale=4.0,  # sqrt(hidden_size)
    query_scale=0.25,  # query_pre_attn_scalar ** -0.5
)
NAMES = {
    "attention_norm/scale": "input_layernorm",
    "attention_out_norm/scale": "post_attention_layernorm",
    "feed_forward_norm/scale": "pre_feedforward_layernorm",
    "feed_forward_out_norm/scale": "post_feedforward_layernorm",
    "attention/query/kernel": "self_attn.q_proj",
    "attention/key/kernel": "self_attn.k_proj",
    "attention/value/kernel": "self_attn.v_proj",
    "attention/out/kernel": "self_attn.o_proj",
    "attention/query_norm/scale": "self_attn.q_norm",
    "attention/key_norm/scale": "self_attn.k_norm",
    "feed_forward/gate/kernel": "mlp.gate_proj",
    "feed_forward/up/kernel": "mlp.up_proj",
    "feed_forward/down/kernel": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def theirs() -> Gemma3ForCausalLM:
    local, whole = "sliding_attention", "full_attention"
    config = Gemma3TextConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        layer_types=[local, local, whole, local],
        rope_parameters={
            local: {"rope_type": "default", "rope_theta": 1e4},
            whole: {"rope_type": "default", "rope_theta": 1e6},
        },
        query_pre_attn_scalar=16,
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def converted(model, theirs):
    """Our parameters with the values of theirs."""
    tensors = {name: tensor.detach().numpy() for name, tensor in theirs.named_parameters()}

    def tensor(layer: int, name: str, shape):
        value = tensors[f"model.layers.{layer}.{NAMES[name]}.weight"]
        return (value.T if name.endswith("kernel") else value).reshape(shape)

    def leaf(path, spec):
        kind, *rest = (key.key for key in path)
        if kind == "blocks":  # one period: layer k is period 0 of blocks["k"]
            value = tensor(int(rest[0]), "/".join(rest[1:]), spec.shape)
        elif kind == "rest":
            value = tensor(3 + int(rest[0]), "/".join(rest[1:]), spec.shape)
        else:
            value = tensors[
                {"embed": "model.embed_tokens", "final_norm": "model.norm"}[kind] + ".weight"
            ]
        return jnp.asarray(value)

    return jax.tree_util.tree_map_with_path(leaf, model.shapes)


def test_a_local_and_global_decoder_gives_the_logits_of_gemma_3(theirs):
    model = build(CONFIG)
    params = converted(model, theirs)
    expected = whole_logits.of_torch(theirs, TOKENS)
    assert expected.std() > 0.5
    np.testing.assert_allclose(whole_logits.of_ours(model, params, TOKENS), expected, atol=1e-4)
