"""Adapters of experts: products and gradients by a loop, layouts, PEFT's folders of both kinds."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Params
from jaxgrpo.models import decoder, experts, lora, sharding
from jaxgrpo.models.api import LINEAR, Caller, ExpertsKind, LayerKind, LoraConfig
from jaxgrpo.models.attention import causal
from jaxgrpo.models.hf import adapters, families
from jaxgrpo.models.hf.families import FAMILIES

NUMBER, K, EMBED, SIZE, RANK = 5, 2, 6, 8, 3
SHAPES = {
    ("gate", "kernel"): (NUMBER, EMBED, SIZE),
    ("gate", "lora_a"): (NUMBER, EMBED, RANK),
    ("gate", "lora_b"): (NUMBER, RANK, SIZE),
    ("up", "kernel"): (NUMBER, EMBED, SIZE),
    ("up", "bias"): (NUMBER, SIZE),
    ("up", "lora_b"): (NUMBER, RANK, SIZE),
    ("down", "kernel"): (NUMBER, SIZE, EMBED),
    ("down", "lora_a"): (NUMBER, SIZE, RANK),
    ("down", "lora_b"): (NUMBER, RANK, EMBED),
}
SCALES = {"gate": 0.5, "up": 0.7, "down": 1.3}
KIND = LayerKind(feed=ExpertsKind(number=6, top_k=2, size=16))
CONFIG = dataclasses.replace(
    tiny.UNIFORM,
    family="qwen3_moe",
    pattern=(KIND,),
    lora=LoraConfig(rank=2, alpha=3.0, targets="experts/.*|attention/query"),
)
CLOSE = 2e-4  # of logits, which are of order 1
BATCH = checkpoints.batch()
REAL = BATCH[1].astype(bool)


def by_a_loop(x: Any, passed: np.ndarray, gates: Any, weights: dict[tuple[str, str], Any]) -> Any:
    """Each token at each of its experts, with the adapters added to its matrices."""
    rows = []
    for t, row in enumerate(x):
        total = 0.0
        for k, e in enumerate(passed[t]):
            a = {"gate": weights["gate", "lora_a"][e], "down": weights["down", "lora_a"][e]}
            a["up"] = a["gate"]
            full = {
                name: weights[name, "kernel"][e]
                + SCALES[name] * a[name] @ weights[name, "lora_b"][e]
                for name in SCALES
            }
            up = row @ full["up"] + weights["up", "bias"][e]
            total += gates[t, k] * (jax.nn.silu(row @ full["gate"]) * up) @ full["down"]
        rows.append(total)
    return jnp.stack(rows)


# Fewer rows of tokens than experts are, and more.
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [pytest.param(3, marks=pytest.mark.full), 9])
def test_values_and_gradients_are_those_of_a_loop_over_experts(tokens):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, cotangent = (jnp.asarray(rng.normal(size=(tokens, EMBED))) for _ in range(2))
        passed = np.argsort(rng.random((tokens, NUMBER)), axis=1)[:, :K]
        gates = jnp.asarray(rng.random((tokens, K)))
        weights = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}
        combine = functools.partial(experts.gated, jax.nn.silu)

        def ours(x, weights):
            mix = functools.partial(experts.mixed, combine, (*weights,), SCALES)
            out = mix(x, jnp.asarray(passed), gates, jnp.arange(NUMBER), *weights.values())
            return (out * cotangent).sum()

        def loop(x, weights):
            return (by_a_loop(x, passed, gates, weights) * cotangent).sum()

        pairs = [jax.jit(jax.value_and_grad(f, (0, 1)))(x, weights) for f in (ours, loop)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), *pairs)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(pairs[0]))


def drawn(model: Any) -> Params:
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(scale=0.2, size=spec.shape), spec.dtype), model.shapes
    )


@pytest.mark.full
@pytest.mark.slow
def test_on_four_devices_they_lie_as_their_weights_and_compute_the_same():
    model = decoder.build(CONFIG)
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, tiny.VOCAB, (4, 6)))
    mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2)
    layout = sharding.param_shardings(mesh, model.axes, model.shapes)
    layer = layout["blocks"]["0"]["experts"]
    assert {
        f"{name}/{leaf}": tuple(layer[name][leaf].spec)
        for name in ("gate", "up", "down")
        for leaf in lora.NAMES
        if leaf in layer[name]
    } == {
        "gate/lora_a": (None, None, "fsdp", None),
        "gate/lora_b": (None, None, None, "tensor"),
        "up/lora_b": (None, None, None, "tensor"),
        "down/lora_a": (None, None, "tensor", None),
        "down/lora_b": (None, None, None, "fsdp"),
    }
    position = jnp.broadcast_to(jnp.arange(6), tokens.shape)

    def total(model, adapter, base):
        caller = Caller(causal(position, position >= 0))
        params = lora.join(adapter, base)
        hidden, _ = model.apply(params, tokens, position, caller, None)
        return jax.nn.log_softmax(model.unembed(params, hidden))[..., 3].mean()

    params = drawn(model)
    spread = decoder.build(CONFIG, constrain=sharding.constrain(mesh))
    results = [
        jax.jit(jax.value_and_grad(functools.partial(total, built)))(*lora.split(values))
        for built, values in ((model, params), (spread, jax.device_put(params, layout)))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return folder, checkpoints.saved(
        checkpoints.transformers_config("qwen3_moe", mlp_only_layers=[]), folder
    )


def single_experts(folder, theirs, **changes: Any) -> dict[str, np.ndarray]:
    """An adapter as PEFT wrote it with transformers 4, of all experts and of queries."""
    rng, config = np.random.default_rng(3), theirs.config
    sizes = {"gate": (32, 24), "up": (32, 24), "down": (24, 32)}
    tensors = {}
    for layer in range(3):
        prefix = f"base_model.model.model.layers.{layer}"
        maps = {
            f"{prefix}.mlp.experts.{e}.{name}_proj": pair
            for e in range(config.num_experts)
            for name, pair in sizes.items()
        }
        for name, (inputs, outputs) in maps.items():
            tensors[f"{name}.lora_A.weight"] = rng.normal(size=(3, inputs)) * 0.25
            tensors[f"{name}.lora_B.weight"] = rng.normal(size=(outputs, 3)) * 0.25
        name = f"{prefix}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = rng.normal(size=(3, 32)) * 0.25
        tensors[f"{name}.lora_B.weight"] = rng.normal(size=(64, 3)) * 0.25
    tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    folder.mkdir()
    save_file(tensors, folder / adapters.WEIGHTS, metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"],
    }
    fields |= changes
    (folder / adapters.CONFIG).write_text(json.dumps(fields))
    return tensors


@pytest.mark.full
@pytest.mark.slow
def test_adapters_of_single_experts_are_read_as_peft_joins_them(base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, theirs = base
    without = checkpoints.transformers_logits(theirs, *BATCH)
    single_experts(tmp_path / "experts", theirs)
    model, params = jaxgrpo.load_model(folder, adapter=tmp_path / "experts")
    assert model.config.lora == LoraConfig(
        rank=3,
        alpha=5.0,
        targets="attention/query|experts/gate|experts/up|experts/down",
        ranks=(("experts/gate", 6, 10.0), ("experts/up", 6, 10.0)),
    )
    adapter, _ = lora.split(params)
    adapters.save(model, adapter, tmp_path / "ours", base=str(folder))
    logits = np.asarray(jaxgrpo.logits(model, params, *BATCH))
    for name in ("experts", "ours"):
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        wrapped = PeftModel.from_pretrained(plain, str(tmp_path / name)).eval()
        expected = checkpoints.transformers_logits(wrapped, *BATCH)
        np.testing.assert_allclose(logits[REAL], expected[REAL], atol=CLOSE, rtol=0)
        assert np.abs(expected - without)[REAL].max() > 0.1
    again, read = jaxgrpo.load_model(folder, adapter=tmp_path / "ours")
    assert again.config.lora == model.config.lora
    jax.tree.map(np.testing.assert_array_equal, lora.split(read)[0], adapter)


@pytest.mark.full
@pytest.mark.slow
def test_all_linear_maps_beside_a_shared_expert_and_dense_layers_are_loaded_by_peft(tmp_path):
    """PEFT would take target_modules that end in gate_proj for experts: they are parameters."""
    from peft import PeftModel

    config = checkpoints.transformers_config("glm4_moe", first_k_dense_replace=1)
    theirs = checkpoints.saved(config, tmp_path / "base")
    model, weights = jaxgrpo.load_model(tmp_path / "base")
    targets = adapters.targets_from_peft("all-linear", model.config)
    settings = LoraConfig(rank=2, alpha=3.0, targets=targets)
    model = decoder.build(dataclasses.replace(model.config, lora=settings))
    adapter, _ = lora.split(drawn(model))
    adapters.save(model, adapter, tmp_path / "ours", base=str(tmp_path / "base"))
    fields = json.loads((tmp_path / "ours" / adapters.CONFIG).read_text())
    assert fields["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert len(fields["target_parameters"]) == 2 + 3 + 3
    logits = np.asarray(jaxgrpo.logits(model, lora.join(adapter, weights), *BATCH))
    wrapped = PeftModel.from_pretrained(theirs, str(tmp_path / "ours")).eval()
    expected = checkpoints.transformers_logits(wrapped, *BATCH)
    np.testing.assert_allclose(logits[REAL], expected[REAL], atol=CLOSE, rtol=0)
    _, read = jaxgrpo.load_model(tmp_path / "base", adapter=tmp_path / "ours")
    jax.tree.map(np.testing.assert_array_equal, lora.split(read)[0], adapter)


MOE_TARGETS = {
    "all-linear": {"attention/query", "experts/gate", "experts/down"},
    r".*experts[.](gate_up|down)_proj": {"experts/gate", "experts/down"},
    r".*[.](gate|up|down)_proj": {"experts/gate", "experts/down"},
    ("experts.gate_up_proj",): {"experts/gate"},
    ("gate_proj", "up_proj", "q_proj"): {"experts/gate", "attention/query"},
}


@pytest.mark.parametrize("target", MOE_TARGETS, ids=str)
def test_a_config_names_experts_as_either_transformers_does(target):
    value = target if isinstance(target, str) else [*target]
    names = set(adapters.targets_from_peft(value, CONFIG).split("|"))
    some = {"attention/query", "experts/gate", "experts/down"}
    assert names & some == MOE_TARGETS[target]
    assert ("experts/up" in names) == ("experts/gate" in names)


WITH_EXPERTS = [name for name, family in FAMILIES.items() if family.experts]


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_the_advice_for_adapters_without_those_of_experts_adapts_attention(family):
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    advice = re.search(r'without them:\s+`lora.targets = "(.*)"`', text)
    assert advice is not None
    config = families.model_config(checkpoints.config_fields(family), "config.json")
    names = [name for name in LINEAR if any(kind.has(name) for kind in config.kinds)]
    expected = {name for name in names if name.startswith("attention/")}
    assert {*adapters.targets_from_peft(advice[1], config).split("|")} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_parameters": ["gate.weight"]}, "has mlp.gate: only linear maps"),
        ({"target_parameters": ["experts.w1"]}, "'experts.w1' is none of "),
        ({"target_parameters": ["layers.1.mlp.experts.down_proj"]}, "in layers .1. only: adapt"),
        ({"target_modules": ["gate"]}, "has mlp.gate: only linear maps"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern = .*: expected regular expressions"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern = .*: expected regular"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern = .*: expected regular"),
        ({"rank_pattern": {r"layers\.0\..*q_proj": 7}}, "self_attn.q_proj has several, by layer"),
    ],
)
def test_adapters_of_routers_and_of_a_part_are_refused(changes, message, tmp_path):
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / adapters.CONFIG).write_text(json.dumps({**fields, **changes}))
    with pytest.raises(InputError, match=message):
        adapters.read_config(tmp_path, CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("excluded", [["experts", "o_proj", "q_proj"], r".*(experts.*|[oq]_proj)"])
def test_parameters_are_adapted_whatever_modules_are_excluded(excluded, tmp_path):
    """As by PEFT, which excludes modules only."""
    pytest.importorskip("peft")
    theirs = checkpoints.redrawn(checkpoints.config_fields("qwen3_moe"), tmp_path / "base")
    checkpoints.peft_model(
        theirs,
        tmp_path / "theirs",
        target_modules=["q_proj", "v_proj"],
        target_parameters=["experts.down_proj", "o_proj.weight"],
        exclude_modules=excluded,
    )
    # Refused where the adapters in the file are others.
    model, _ = jaxgrpo.load_model(tmp_path / "base", adapter=tmp_path / "theirs")
    assert model.config.lora is not None
    names = {"attention/value", "attention/out", "experts/down"}
    assert set(model.config.lora.targets.split("|")) == names


def test_a_part_of_gate_and_up_has_no_adapter():
    with pytest.raises(InputError, match=r"a part of mlp.experts.gate_up_proj only: adapt all"):
        adapters.targets_from_peft(["up_proj"], CONFIG)


def test_ranks_by_pattern_are_read_and_written(tmp_path):
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"]}
    fields |= {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {".*k_proj": 1}}
    (tmp_path / adapters.CONFIG).write_text(json.dumps(fields))
    settings = adapters.read_config(tmp_path, tiny.UNIFORM)
    assert settings.ranks == (("attention/query", 2, 8.0), ("attention/key", 4, 1.0))
    model = decoder.build(dataclasses.replace(tiny.UNIFORM, lora=settings))
    adapters.save(model, lora.split(drawn(model))[0], tmp_path / "again")
    assert adapters.read_config(tmp_path / "again", tiny.UNIFORM) == settings
    saved = load_file(tmp_path / "again" / adapters.WEIGHTS)
    assert {len(value) for name, value in saved.items() if "q_proj.lora_A" in name} == {2}
