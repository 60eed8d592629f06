"""What is refused of checkpoints with experts or layers that recur: one line each, before values
are read."""

from __future__ import annotations

import json

import checkpoints
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import families

pytestmark = pytest.mark.fault(20)

KINDS = {
    "qwen3_moe": {},
    "qwen3_5_text": {"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
    "gpt_oss": {
        "num_hidden_layers": 1,
        "layer_types": [checkpoints.FULL],
        "intermediate_size": 32,
    },
    "glm4_moe": {"num_hidden_layers": 2},
}
EXPERTS, DELTA = "model.layers.0.mlp.experts", "model.layers.0.linear_attn"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Family -> the folder of a small model of ours."""
    folders = {}
    for family, changes in KINDS.items():
        fields = checkpoints.config_fields(family, **changes)
        model = decoder.build(families.model_config(fields, "a test"))
        rng = np.random.default_rng(0)
        draw = lambda spec, rng=rng: rng.normal(size=spec.shape).astype(spec.dtype)  # noqa: E731
        folders[family] = tmp_path_factory.mktemp("bases") / family
        jaxgrpo.save_model(model, jax.tree.map(draw, model.shapes), folders[family])
    return folders


def without(ending):
    return lambda tensors: {n: value for n, value in tensors.items() if not n.endswith(ending)}


def changed(name, change):
    return lambda tensors: {**tensors, name: np.ascontiguousarray(change(tensors[name]))}


def joined(tensors, parts=("gate", "up"), name="gate_up_proj", layers=(0, 2), keeps=False):
    """Maps of experts as one tensor of all of them."""
    joined = dict(tensors)
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts"
        stacks = [
            np.stack([tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(6)])
            for part in parts
        ]
        for part in () if keeps else parts:
            for e in range(6):
                del joined[f"{prefix}.{e}.{part}_proj.weight"]
        joined[f"{prefix}.{name}"] = np.concatenate(stacks, axis=1)
    return joined


def fused(tensors, **options):
    return joined(joined(tensors, **options), ("down",), "down_proj", **options)


def apart(tensors):
    """Gates and ups as a tensor each of all experts."""
    for part in ("gate", "up", "down"):
        tensors = joined(tensors, (part,), f"{part}_proj")
    return tensors


def in_blocks(tensors, scale_groups=1, keeps=False, kind: type[np.integer] = np.uint8, damaged=0):
    """The outer maps of GPT-OSS in MXFP4."""
    name = f"{EXPERTS}.down_proj"
    number, inputs, outputs = tensors[name].shape
    rest = tensors if keeps else without(name)(tensors)
    blocks = np.full((number, outputs, inputs // 32, 16), 0x77, kind)
    scales = np.full((number, outputs, scale_groups), 127, np.uint8)
    scales[:damaged, 0] = 255  # of powers of two beyond all numbers
    return {**rest, f"{name}_blocks": blocks, f"{name}_scales": scales}


def turned_fused(tensors):
    return changed(f"{EXPERTS}.gate_up_proj", lambda t: t.swapaxes(1, 2))(fused(tensors))


def not_finite(tensor):
    tensor = tensor.copy()
    tensor[0] = np.nan
    return tensor


MANY = {"num_experts": 8}
CASES = [
    (
        "qwen3_moe",
        MANY,
        dict,
        r"missing: \S+experts\.6\.down_proj\.weight, .*copy the folder again",
    ),
    ("qwen3_moe", {"num_experts": 4}, dict, r"unknown: \S+experts\.4\.down_proj\.weight, "),
    ("qwen3_moe", MANY, fused, r"experts\.\S+ has shape \(6, .* asks for \(8, "),
    ("qwen3_moe", {}, without("0.mlp.gate.weight"), r"missing: \S+0\.mlp\.gate\.weight: copy"),
    (
        "qwen3_moe",
        {},
        changed("model.layers.0.mlp.gate.weight", lambda t: t[:4]),
        r"\(4, 32\).*\(6",
    ),
    ("qwen3_moe", {}, turned_fused, r"gate_up_proj has shape \(6, 32, 48\), .*\(6, 48, 32\)"),
    ("qwen3_moe", {}, apart, r"unknown: \S+experts\.down_proj, \S+experts\.gate_proj, "),
    ("qwen3_moe", {}, lambda t: fused(t, keeps=True), r"unknown: \S+experts\.0\.down_proj\.weight"),
    ("qwen3_moe", {}, lambda t: fused(t, layers=(0,)), r"missing: \S+2\.mlp\.experts\.down_proj"),
    (
        "qwen3_moe",
        {},
        changed(f"{EXPERTS}.3.up_proj.weight", not_finite),
        r"experts\.3\.up_proj\.weight holds 32 values that are not finite",
    ),
    *(
        ("qwen3_5_text", {}, without(f"{DELTA}.{name}"), rf"missing: \S+linear_attn\.{name}: copy")
        for name in ("A_log", "dt_bias", "conv1d.weight", "in_proj_a.weight")
    ),
    (
        "qwen3_5_text",
        {},
        changed(f"{DELTA}.conv1d.weight", lambda t: t[:, 0]),
        r"conv1d\.weight has shape \(96, 4\), .* asks for \(96, 1, 4\)",
    ),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 3}, dict, r"\(96, 1, 4\), .*\(96, 1, 3\)"),
    ("qwen3_5_text", {}, changed(f"{DELTA}.A_log", not_finite), r"A_log holds 1 values that are"),
    ("gpt_oss", {}, without("_proj_bias"), r"missing: \S+down_proj_bias, \S+gate_up_proj_bias: "),
    ("gpt_oss", {}, without(".sinks"), r"missing: \S+self_attn\.sinks: "),
    (
        "gpt_oss",
        {},
        lambda t: in_blocks(t, 2),
        r"U8 \[6, 32, 2\]: expected U8 \[experts, outputs, ",
    ),
    (
        "gpt_oss",
        {},
        lambda t: in_blocks(t, keeps=True),
        r"down_proj is .*, and as a whole: expected",
    ),
    (
        "gpt_oss",
        {},
        lambda t: in_blocks(t, kind=np.int8),
        r"blocks and scales, I8 \[6, 32, 1, 16\]",
    ),
    (
        "gpt_oss",
        {},
        lambda t: in_blocks(t, damaged=2),
        r"experts\.down_proj holds 64 values that are not finite .* of 6144",
    ),
    ("gpt_oss", {}, lambda t: without("_scales")(in_blocks(t)), r"unknown: \S+down_proj_blocks"),
    ("glm4_moe", {}, without("correction_bias"), r"missing: \S+e_score_correction_bias: "),
    ("glm4_moe", {}, without("shared_experts.up_proj.weight"), r"missing: \S+shared_experts\.up"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fields", "change", "message"), CASES)
def test_weights_that_do_not_fit_are_one_line(bases, family, fields, change, message, tmp_path):
    base = bases[family]
    config_json = json.loads((base / "config.json").read_text()) | fields
    config_json.pop("num_local_experts" if "num_experts" in fields else "", None)
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    tensors = change(load_file(base / "model.safetensors"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=message) as caught:
        jaxgrpo.load_model(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, r"index\.json has no weight_map"),
        ({"weight_map": {"a": 3}}, r"index\.json: a is in 3, expected the name of a file"),
        ({"weight_map": {"a": "model-00002-of-00002.safetensors"}}, r"lists model-00002-of-00002"),
    ],
)
def test_an_index_that_is_none_is_one_line(bases, index, message, tmp_path):
    (tmp_path / "config.json").write_text((bases["qwen3_moe"] / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=message):
        jaxgrpo.load_model(tmp_path)
