"""Attention by latents: what decoding keeps, DeepSeek-V3 as it is published, and gradients."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import planned
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

import jaxgrpo
from jaxgrpo.cli.main import main
from jaxgrpo.config import files
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import counts, decoder, lora
from jaxgrpo.models.api import Caller, LoraConfig
from jaxgrpo.models.attention import causal
from jaxgrpo.models.hf import fp8, weights
from jaxgrpo.models.hf.families import FAMILIES, config_fields, model_config

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""DeepSeek-AI 2024, arXiv 2412.19437, section 4.2, in the fields of its folder on the hub."""


def test_deepseek_v3_has_671_billion_weights_of_which_a_token_passes_37():
    config = model_config(DEEPSEEK_V3, "config.json")
    model = decoder.build(config)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(model.shapes))
    assert round(numbers / 1e9, 1) == 671.0
    assert round(counts.count_weights(model).work / 1e9) == 37
    assert config.cached(config.attention[0]) == (1, 576, 512)
    assert config.query_scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    kimi = {**DEEPSEEK_V3, "model_type": "kimi_k2", "num_attention_heads": 64}
    kimi |= {"num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1}
    kimi |= {"vocab_size": 163840, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827}
    shapes = decoder.build(model_config(kimi, "config.json")).shapes
    assert round(sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e12, 2) == 1.03


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave = False: only True built"),
        # By which transformers turns halves too.
        ({"rope_interleave": None}, "rope_interleave = None: only True built"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy': only 'noaux_tc' built"),
        (
            {"rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale_all_dim": 1e308, "mscale": 0}},
            "rope_scaling = .*: float32 cannot hold the factor of scores that mscale_all_dim gives",
        ),
        ({"n_routed_experts": 10**6}, "n_routed_experts = 1000000: expected .* from 1 to 4,096"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8: expected num_attention_heads = 128"),
        ({"head_dim": 128}, "head_dim = 128: expected qk_rope_head_dim = 64"),
        ({"quantization_config": {"quant_method": "gptq"}}, "only fp8 in blocks of 128 x 128"),
        ({"quantization_config": {"fmt": "e4m3"}}, "without a quant_method; of quantised weights"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes, message):
    with pytest.raises(InputError, match=message):
        model_config({**DEEPSEEK_V3, **changes}, "config.json")


def small(tmp_path: Path, **fields: Any) -> Any:
    theirs = checkpoints.saved(checkpoints.transformers_config("deepseek_v3", **fields), tmp_path)
    return theirs, *jaxgrpo.load_model(tmp_path)


@pytest.mark.full
def test_latents_as_keys_give_what_each_heads_keys_do(tmp_path):
    """With adapters on all maps."""
    _, model, params = small(tmp_path)
    settings = LoraConfig(rank=2, alpha=4.0, targets="attention/.*")
    fused = tuple(FAMILIES["deepseek_v3"].fused.values())
    model = decoder.build(dataclasses.replace(model.config, lora=settings, fused=fused))
    adapters = jax.tree.map(lambda leaf: leaf + 0.3, lora.init(model, jax.random.key(0)))
    params, (tokens, mask) = lora.join(adapters, params), checkpoints.batch()
    position = jnp.maximum(jnp.cumsum(jnp.asarray(mask), 1) - 1, 0)
    attend = causal(position, jnp.asarray(mask, bool))
    expanded, absorbed = (
        model.apply(
            params, jnp.asarray(tokens), position, Caller(attend, keeps_latents=keeps), None
        )
        for keeps in (False, True)
    )
    np.testing.assert_allclose(absorbed[0][mask > 0], expanded[0][mask > 0], atol=2e-4, rtol=0)
    shapes = (jax.tree.leaves(memory)[0].shape[-2:] for _, memory in (absorbed, expanded))
    assert (*shapes,) == ((1, 18), (4, 16))


@pytest.mark.slow
@pytest.mark.parametrize("is_fused", [True, pytest.param(False, marks=pytest.mark.full)])
def test_small_adapters_beside_bfloat16_act_on_latents_as_on_each_heads_keys(is_fused):
    """Of .1% of the weights: added to them in bfloat16, most of that would be lost, where XLA does
    not keep such sums in float32."""
    config = model_config(
        checkpoints.config_fields("deepseek_v3", first_k_dense_replace=3), "config.json"
    )
    model = decoder.build(
        dataclasses.replace(
            config,
            dtype="bfloat16",
            fused=config.fused if is_fused else (),
            lora=LoraConfig(rank=2, alpha=4.0, targets="attention/(key|value)"),
            **dict.fromkeys(("float32_activations", "float32_attention", "float32_head"), True),
        )
    )
    adapters, weights = lora.split(tiny.large_params(model))
    small = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 0.0018 if path[-1].key == "lora_b" else leaf, adapters
    )
    tokens = jnp.asarray(checkpoints.batch()[0])
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = causal(position, position >= 0)

    as_written = {"xla_allow_excess_precision": False}

    @functools.partial(jax.jit, static_argnames="keeps", compiler_options=as_written)
    def logits(adapters, keeps):
        params, caller = lora.join(adapters, weights), Caller(attend, keeps_latents=keeps)
        return model.unembed(params, model.apply(params, tokens, position, caller, None)[0])

    no_adapters = jax.tree.map(jnp.zeros_like, adapters)
    by_latents, by_heads = (
        np.asarray(logits(small, keeps=keeps) - logits(no_adapters, keeps=keeps))
        for keeps in (True, False)
    )
    assert np.linalg.norm(by_latents - by_heads) < 0.1 * np.linalg.norm(by_heads)


def test_an_export_of_kimi_k2_has_the_model_type_that_transformers_reads():
    kimi = {**DEEPSEEK_V3, "model_type": "kimi_k2", "auto_map": {"AutoConfig": "a.B"}}
    fields = config_fields(model_config(kimi, "config.json"), "bfloat16")
    assert "auto_map" not in fields
    theirs = AutoConfig.for_model(**fields)
    assert (theirs.model_type, theirs.n_routed_experts) == ("deepseek_v3", 256)


@pytest.mark.full
def test_gradients_of_latents_are_those_of_pytorch(tmp_path):
    import torch

    theirs, model, params = small(tmp_path, num_hidden_layers=2)
    tokens = np.random.default_rng(0).integers(3, checkpoints.VOCAB, (2, checkpoints.LENGTH))

    def loss(params):
        return (jaxgrpo.logits(model, params, tokens, np.ones_like(tokens)) ** 2).mean()

    gradient = jax.jit(jax.grad(loss))(params)
    (theirs(torch.as_tensor(tokens)).logits ** 2).mean().backward()
    jaxgrpo.save_model(model, gradient, tmp_path / "ours")
    ours, compared = load_file(tmp_path / "ours/model.safetensors"), 0
    for name, tensor in theirs.named_parameters():
        if ".self_attn." in name or "layernorm" in name:
            expected = tensor.grad.numpy()
            error = np.linalg.norm(ours[name] - expected)
            assert error < 2e-4 * np.linalg.norm(expected), name
            compared += 1
    assert compared == 2 * 12


@pytest.mark.slow
def test_weights_in_fp8_are_read_by_blocks_and_written_as_bfloat16(tmp_path):
    sizes = {"hidden_size": 160, "num_hidden_layers": 2, "q_lora_rank": 130}
    small(tmp_path / "plain", **sizes, num_attention_heads=4)
    fields = json.loads((tmp_path / "plain/config.json").read_text())
    expected, stored = {}, {}
    rng = np.random.default_rng(0)
    tensors = load_file(tmp_path / "plain/model.safetensors")
    # A layer that guesses further, which an export keeps.
    tensors["model.layers.2.eh_proj.weight"] = rng.normal(0, 0.02, (160, 320)).astype(np.float32)
    for name, tensor in tensors.items():
        stored[name] = tensor
        if tensor.ndim < 2 or "embed" in name or "lm_head" in name or name.endswith("gate.weight"):
            continue
        blocks = [-(-size // fp8.BLOCK) for size in tensor.shape]
        scales = rng.uniform(0.001, 0.01, blocks).astype(np.float32)
        values = (100 * tensor).astype(ml_dtypes.float8_e4m3fn)
        stored |= {name: values, name + fp8.SCALES: scales}
        by_entry = scales.repeat(128, 0).repeat(128, 1)[: tensor.shape[0], : tensor.shape[1]]
        expected[name] = (values.astype(np.float32) * by_entry).astype(ml_dtypes.bfloat16)
    (tmp_path / "fp8").mkdir()
    save_file(stored, tmp_path / "fp8/model.safetensors")
    fields |= {"quantization_config": DEEPSEEK_V3["quantization_config"]}
    (tmp_path / "fp8/config.json").write_text(json.dumps(fields))
    model, params = jaxgrpo.load_model(tmp_path / "fp8", dtype="bfloat16")
    jaxgrpo.save_model(model, params, tmp_path / "ours", base=tmp_path / "fp8")
    written = load_file(tmp_path / "ours/model.safetensors")
    assert len(expected) > 20
    assert all(np.array_equal(written[name], tensor) for name, tensor in expected.items())
    assert not any(name.endswith(fp8.SCALES) for name in written)
    assert "quantization_config" not in json.loads((tmp_path / "ours/config.json").read_text())


def test_weights_in_fp8_take_a_descriptor_only_while_they_are_read(tmp_path):
    """DeepSeek-V3 has 45,000 such tensors."""
    parts = {"": np.ones((4, 4), ml_dtypes.float8_e4m3fn), fp8.SCALES: np.full((1, 1), 0.5, "f4")}
    names = [f"{k}.weight" for k in range(20)]
    stored = {name + ending: part for name in names for ending, part in parts.items()}
    save_file(stored, tmp_path / "model.safetensors")
    before = len(os.listdir("/dev/fd"))
    with weights.opened(tmp_path) as files:
        assert all((files[name].get_slice(name)[1:3] == 0.5).all() for name in names)
        assert len(os.listdir("/dev/fd")) <= before + 1


@pytest.mark.parametrize(
    ("kind", "shape", "scales", "message"),
    [
        (ml_dtypes.float8_e5m2, (160, 256), (2, 2), r"F8_E5M2 \[160, 256\] and F32"),
        (ml_dtypes.float8_e4m3fn, (160, 256), (3, 4), r"F32 \[3, 4\]: expected F8_E4M3"),
        (ml_dtypes.float8_e4m3fn, (160, 256), (160, 1), r"F32 \[160, 1\]: expected F8_E4M3"),
        (ml_dtypes.float8_e4m3fn, (2, 160, 256), (2, 2, 2), r"\[2, 160, 256\] and F32"),
        (np.int8, (160, 256), (2, 2), r"I8 \[160, 256\] and F32"),
    ],
)
def test_other_numbers_with_scales_are_refused(tmp_path, kind, shape, scales, message):
    stored = {"a": np.ones(shape, kind), "a" + fp8.SCALES: np.ones(scales, np.float32)}
    save_file(stored, tmp_path / "model.safetensors")
    refused = pytest.raises(InputError, match=message)
    with refused, weights.opened(tmp_path):
        pass


@pytest.mark.full
def test_deepseek_v3_is_described_and_planned_from_its_config_json(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert main(["model", str(tmp_path), "--json", "--set", "model.dtype='bfloat16'"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["parameters"] == 671_026_419_200
    assert round(described["active"] / 1e9) == 37
    assert described["bytes"]["cached"] == 61 * (576 + 512) * 2
    changes = {
        "model": {"path": str(tmp_path), "dtype": "bfloat16"},
        "mesh": {"fsdp": 16, "tensor": 32},
        "rollout.prompts_per_step": 64,
    }
    (tmp_path / "run.toml").write_text(files.to_toml(planned.config(**changes)))
    options = ("--formula", "--topology", "v5p:8x8x8", "--json")
    assert main(["plan", str(tmp_path / "run.toml"), *options]) == 0
    plan = json.loads(capsys.readouterr().out)
    # A sampler's device has a 32nd of what experts, heads and the vocabulary are divided over.
    assert (
        2 / 32 < plan["parts_by_formula"]["sampler's weights, logits"] / 671_026_419_200 < 2.2 / 32
    )
    assert plan["fits"]
