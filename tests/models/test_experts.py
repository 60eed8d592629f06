"""Experts: products of sorted rows, what a checkpoint holds, what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec
from planned import NEEDS_CUDA
from safetensors.numpy import load_file, save_file

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.records import NONE
from jaxgrpo.models import counts, experts, lora, routing, sharding
from jaxgrpo.models.api import Caller, ExpertsKind, LayerKind, LoraConfig
from jaxgrpo.models.decoder import build
from jaxgrpo.models.hf.families import model_config
from jaxgrpo.models.kernels import expert_rows
from jaxgrpo.planning.topologies import topology

FEED = ExpertsKind(number=6, top_k=2, size=16)
CONFIG = dataclasses.replace(tiny.UNIFORM, pattern=(LayerKind(feed=FEED),))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        (40, 0, 0),
        *(
            pytest.param(sizes, marks=pytest.mark.full)
            for sizes in ((0, 0, 40), (7, 33, 0), (1, 2, 37), (13, 13, 14))
        ),
        (1, 0, 1),
    ],
)
def test_rows_are_multiplied_by_the_matrix_of_their_expert(sizes):
    rng = np.random.default_rng(0)
    x, kernel, weight = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((sum(sizes), 5), (3, 5, 4), (sum(sizes), 4))
    )
    expert = np.repeat(np.arange(3), sizes)

    def total(multiply, x, kernel):
        return (multiply(x, kernel) * weight).sum()

    ours = functools.partial(total, lambda x, k: expert_rows.grouped(x, k, jnp.asarray(sizes)))
    plain = functools.partial(total, lambda x, k: jnp.einsum("ri,rio->ro", x, k[expert]))
    pairs = zip(
        *(jax.jit(jax.value_and_grad(f, (0, 1)))(x, kernel)[1] for f in (ours, plain)), strict=True
    )
    for gradient, expected in pairs:
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours(x, kernel), plain(x, kernel), rtol=1e-5)


def test_a_row_has_the_same_bits_whatever_the_others_are():
    rng = np.random.default_rng(1)
    x, kernel = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((64, 16), (4, 16, 8)))
    multiply = jax.jit(expert_rows.grouped)
    first = multiply(x, kernel, jnp.asarray([10, 30, 4, 20]))
    moved = jnp.roll(x, 3, axis=0)
    again = multiply(moved, kernel, jnp.asarray([13, 30, 4, 17]))
    np.testing.assert_array_equal(first[:10], again[3:13])
    np.testing.assert_array_equal(first[10:40], again[13:43])


def mixture(number, top_k, tokens, inputs=5, size=4, seed=0, crowded=0.0):
    """(x, experts, gates, weights), of tokens that crowd at some experts the more."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(tokens, number)) + crowded * np.arange(number)
    shapes = {"gate": (inputs, size), "up": (inputs, size), "down": (size, inputs)}
    weights = {
        **{(name, "kernel"): rng.normal(size=(number, *shape)) for name, shape in shapes.items()},
        ("gate", "bias"): rng.normal(size=(number, size)),
        ("gate", "lora_a"): rng.normal(size=(number, inputs, 2)),
        ("gate", "lora_b"): rng.normal(size=(number, 2, size)),
        ("up", "lora_b"): rng.normal(size=(number, 2, size)),  # its A is that of gate
    }
    return (
        jnp.asarray(rng.normal(size=(tokens, inputs)), jnp.float32),
        jnp.asarray(np.argsort(-scores)[:, :top_k], jnp.int32),
        jnp.asarray(rng.uniform(size=(tokens, top_k)), jnp.float32),
        {name: jnp.asarray(weight, jnp.float32) for name, weight in weights.items()},
    )


COMBINE = functools.partial(experts.gated, jax.nn.silu)


def mix(x, numbers, gates, weights, local=None):
    scales, names = {"gate": 0.25, "up": 0.5}, (*weights,)
    local = jnp.arange(len(weights["gate", "kernel"])) if local is None else local
    return experts.mixed(COMBINE, names, scales, x, numbers, gates, local, *weights.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("number", "tokens", "crowded"),
    [
        (6, 20, 0.0),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((6, 70, 3.0), (7, 3, 0.0))),
        (6, 2, 0.0),
    ],
    ids=["in slots", "crowded", "a row each", "few"],
)
def test_tokens_pass_their_experts_and_gradients_are_those_of_plain_products(
    number, tokens, crowded, dtype
):
    """In slots where rows are more than experts; a crowded expert has some in blocks too."""
    x, numbers, gates, weights = mixture(number, 2, tokens, crowded=crowded)
    x, gates = x.astype(dtype), gates.astype(dtype)

    def plain(x, gates, weights):
        of = {name: weight.astype(x.dtype)[numbers] for name, weight in weights.items()}
        times = functools.partial(jnp.einsum, "...i,...io->...o")
        rows = jnp.broadcast_to(x[:, None], (*numbers.shape, x.shape[-1]))
        low = times(rows, of["gate", "lora_a"])
        half = times(rows, of["gate", "kernel"]) + times(low, of["gate", "lora_b"]) * 0.25
        up = times(rows, of["up", "kernel"]) + times(low, of["up", "lora_b"]) * 0.5
        middle = COMBINE(half + of["gate", "bias"], up)
        return (times(middle, of["down", "kernel"]) * gates[..., None]).sum(1)

    target = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

    def loss(function):
        total = lambda *arguments: (function(*arguments) * target).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(x, gates, weights)

    ours, expected = loss(lambda x, gates, weights: mix(x, numbers, gates, weights)), loss(plain)
    close = 1e-5 if dtype == jnp.float32 else 0.04
    for value, plain_value in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        values = np.asarray(value, np.float64), np.asarray(plain_value, np.float64)
        np.testing.assert_allclose(*values, rtol=close, atol=close * np.abs(values[1]).max())


@pytest.mark.slow
def test_a_token_has_the_same_bits_whatever_the_others_are():
    x, numbers, gates, weights = mixture(4, 2, 40)
    multiply = jax.jit(mix)
    alone = multiply(x, numbers, gates, weights)
    order = np.random.default_rng(2).permutation(40)
    np.testing.assert_array_equal(
        multiply(x[order], numbers[order], gates[order], weights), alone[order]
    )
    crowd = numbers.at[1:].set(jnp.asarray([0, 1]))  # some rows come to blocks, others to slots
    np.testing.assert_array_equal(multiply(x, crowd, gates, weights)[:1], alone[:1])


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_experts_divided_over_devices_give_what_a_device_with_all_gives(bias, monkeypatch):
    """Whatever products of rows without an expert are."""
    config = dataclasses.replace(CONFIG, pattern=(LayerKind(feed=FEED._replace(bias=bias)),))
    mesh = sharding.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    rules = {**sharding.SAMPLING, "experts": "tensor"}
    params, tokens = tiny.params(config), jnp.arange(24).reshape(2, 12) % tiny.VOCAB
    position = jnp.broadcast_to(jnp.arange(12), tokens.shape)
    caller = Caller(attend=lambda query, key, value, *more, **options: (query, None))

    def hidden(constrain, params):
        model = build(config, constrain=constrain)
        return jax.jit(lambda: model.apply(params, tokens, position, caller, None)[0])()

    expected = hidden(None, params)
    layout = sharding.param_shardings(mesh, build(config).axes, build(config).shapes, rules)
    kernel = layout["blocks"]["0"]["experts"]["down"]["kernel"]
    assert kernel.spec == PartitionSpec(None, "tensor", None, None)
    by_slots = expert_rows._by_slots

    def poisoned(*arguments):
        sorting, out = arguments[4], by_slots(*arguments)
        return jnp.where((sorting.expert < len(sorting.sizes))[:, None], out, jnp.nan)

    monkeypatch.setattr(expert_rows, "_by_slots", poisoned)
    divided = hidden(sharding.constrain(mesh, rules), jax.device_put(params, layout))
    np.testing.assert_allclose(divided, expected, rtol=1e-5, atol=1e-6)


def test_a_tpu_divides_experts_where_parameters_are_gathered_and_their_number_can_be():
    chips = functools.partial(sharding.make_mesh, devices=topology("v5p:2x2x1").devices)
    kinds = LayerKind(feed=FEED), LayerKind()
    odd = (LayerKind(feed=FEED._replace(number=7)),)
    cpus = sharding.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    divided = sharding.sampling_rules(chips(fsdp=2, tensor=2), kinds)
    assert divided == {**sharding.SAMPLING, "experts": "tensor"}
    assert sharding.sampling_rules(chips(fsdp=2, tensor=2), odd) is sharding.SAMPLING
    assert sharding.sampling_rules(chips(fsdp=2, tensor=2), kinds[1:]) is sharding.SAMPLING
    assert sharding.sampling_rules(chips(data=2, tensor=2), kinds) is sharding.SAMPLING
    assert sharding.sampling_rules(chips(fsdp=4), kinds) is sharding.SAMPLING
    assert sharding.sampling_rules(cpus, kinds) is sharding.SAMPLING


@pytest.mark.slow
def test_no_array_has_all_tokens_at_all_experts():
    """9 tokens at 2 of 6 experts are 18 rows, and not 54."""
    model = build(CONFIG)
    log_probs: Any = tiny.whole_logps
    program = jax.jit(functools.partial(log_probs.__wrapped__, CONFIG)).lower(
        model.shapes, tiny.rollouts(np.zeros((1, 1)), 5, 4)
    )
    text = str(program.compile().as_text())
    tokens = 5 + 4
    assert re.search(rf"[\[,]{tokens * FEED.top_k},32\]", text)
    assert not re.search(rf"[\[,]{FEED.number},{tokens},(32|16)\]", text)
    assert not re.search(rf"[\[,]{FEED.number},{tokens * FEED.top_k},(32|16)\]", text)


@pytest.mark.slow
@NEEDS_CUDA
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_compiled_for_a_gpu_no_array_has_all_rows_at_all_experts():
    tokens, number, top_k, inputs, size = 256, 16, 2, 32, 64
    place = jax.sharding.SingleDeviceSharding(topology("h100:1x1").devices[0])

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    matrices = {
        ("gate", "kernel"): array(number, inputs, size),
        ("up", "kernel"): array(number, inputs, size),
        ("down", "kernel"): array(number, size, inputs),
    }
    numbers = array(tokens, top_k, dtype=jnp.int32)

    def gradient(x, numbers, gates, weights):
        total = lambda x, weights: mix(x, numbers, gates, weights).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(total, (0, 1))(x, weights)

    arguments = array(tokens, inputs), numbers, array(tokens, top_k), matrices
    lowered = jax.jit(gradient).trace(*arguments).lower(lowering_platforms=("cuda",))
    shapes = re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", str(lowered.compile().as_text()))
    largest = max(np.prod([int(size) for size in shape.split(",")]) for shape in shapes)
    rows = tokens * top_k
    assert rows * size <= largest <= 2.5 * rows * size  # gate and up may be one product, in slots


def test_a_token_works_with_its_experts_and_all_are_held():
    weights = counts.count_weights(build(CONFIG))
    attention, router, expert = 32 * 8 * (4 + 2 + 2) + 4 * 8 * 32, 32 * 6, 3 * 32 * 16
    only = LoraConfig(rank=5, alpha=1.0, targets="experts/(gate|up|down)")
    adapted = counts.count_weights(build(dataclasses.replace(CONFIG, lora=only)))
    low = 5 * (32 + 16 + 16) + 5 * (16 + 32)  # of an expert: gate and up share A; down
    assert adapted.layers - weights.layers == 2 * 6 * low
    assert adapted.active - weights.active == 2 * 2 * low
    assert weights.layers == 2 * (attention + router + 6 * expert)
    assert weights.active == 2 * (attention + router + 2 * expert)
    maps = {(m.inputs, m.outputs, m.experts, m.active) for m in counts.linear_maps(build(CONFIG))}
    assert {(32, 16, 6, 2), (16, 32, 6, 2), (32, 6, 1, 1)} <= maps


def test_what_experts_cannot_do_is_refused():
    cases = {
        "top_k must be from 1": {"pattern": (LayerKind(feed=FEED._replace(top_k=7)),)},
        "several top_k": {
            "pattern": (LayerKind(feed=FEED), LayerKind(feed=FEED._replace(top_k=1)))
        },
        "'feed_forward/.*': matches none of": {
            "lora": LoraConfig(rank=2, alpha=2.0, targets="feed_forward/.*")
        },
    }
    for message, changes in cases.items():
        with pytest.raises(InputError, match=message):
            build(dataclasses.replace(CONFIG, **changes))


def test_what_transformers_loss_reads_changes_no_model():
    fields = checkpoints.config_fields("qwen3_moe")
    asking = {**fields, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    assert model_config(asking, "config.json") == model_config(fields, "config.json")


def test_the_fields_that_qwen3_coder_has_besides_change_no_model():
    """Queries and keys of the family are always normed, and none has a shared expert."""
    fields = checkpoints.config_fields("qwen3_moe")
    more = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}
    assert model_config(fields | more, "config.json") == model_config(fields, "config.json")


def test_experts_a_shared_one_and_its_gate_have_adapters_and_the_router_has_none():
    kind = LayerKind(feed=FEED._replace(shared=16, shared_gate=True))
    config = dataclasses.replace(CONFIG, pattern=(kind,), lora=LoraConfig(rank=2, alpha=2.0))
    adapted = lora.split(build(config).shapes)[0]["blocks"]["0"]
    assert adapted.keys() == {"attention", "experts"}
    assert adapted["experts"].keys() == {"gate", "up", "down", "shared", "shared_gate"}
    assert adapted["experts"]["shared"].keys() == {"gate", "up", "down"}
    shapes = {
        f"{name}/{leaf}": spec.shape
        for name in ("gate", "up", "down")
        for leaf, spec in adapted["experts"][name].items()
    }
    assert shapes == {
        "gate/lora_a": (2, 6, 32, 2),
        "gate/lora_b": (2, 6, 2, 16),
        "up/lora_b": (2, 6, 2, 16),  # its A is that of gate
        "down/lora_a": (2, 6, 16, 2),
        "down/lora_b": (2, 6, 2, 32),
    }


@pytest.mark.slow
def test_the_load_of_experts_is_counted_where_there_are_records():
    record = np.full((1, 1, 4, 2, 2), NONE, np.int16)
    record[0, 0, :3, 0] = [[0, 1], [0, 2], [0, 3]]  # of the second layer nothing is known
    record[0, 0, :3, 1] = [[4, 5], [4, 5], [4, 5]]
    metrics: Any = routing.load_metrics(CONFIG.kinds, jnp.asarray(record))
    load, dead = (metrics[f"routing/{name}"] for name in ("load", "dead"))
    assert float(load.total / load.weight) == 3.0  # 3 of 6 tokens' experts, over 6 experts
    assert float(dead.total / dead.weight) == (2 + 4) / 12


@pytest.mark.slow
def test_the_load_of_few_tokens_is_over_the_mean_of_the_experts_that_a_layer_has():
    kinds = [LayerKind(feed=FEED._replace(number=number)) for number in (8, 4, 4)]
    record = np.full((1, 1, 2, 3, 2), NONE, np.int16)
    record[0, 0, :, 0] = [[0, 1], [0, 7]]  # 4 choices of 8 experts, 2 of them of the first
    record[0, 0, 0, 1] = [0, 3]  # 2 choices of 4; of the third layer nothing is known
    metrics: Any = routing.load_metrics(kinds, jnp.asarray(record))
    assert metrics["routing/load"].result() == pytest.approx((2 / (4 / 8) + 1 / (2 / 4)) / 3)
    assert metrics["routing/dead"].result() == pytest.approx((5 + 2 + 4) / 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3_moe")
    checkpoints.saved(checkpoints.transformers_config("qwen3_moe"), path)
    return path


def edited(folder, target, change):
    """A copy of a folder with other tensors."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


def without(part):
    return lambda tensors: {n: value for n, value in tensors.items() if part not in n}


def fused(tensors):
    """All experts of a layer as transformers 5 may save them."""
    rest = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in (0, 2):

        def stack(part, layer=layer):
            prefix = f"model.layers.{layer}.mlp.experts"
            return np.stack([tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(6)])

        gate_up = np.concatenate([stack("gate"), stack("up")], axis=1)
        rest[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = gate_up
        rest[f"model.layers.{layer}.mlp.experts.down_proj"] = stack("down")
    return rest


def test_fused_experts_are_read_and_written_as_they_were(folder, tmp_path):
    joined = edited(folder, tmp_path / "fused", fused)
    (model, params), (_, expected) = (jaxgrpo.load_model(path) for path in (joined, folder))
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert model.config.fused_experts
    jaxgrpo.save_model(model, params, tmp_path / "again")
    written = load_file(tmp_path / "again/model.safetensors")
    stored = load_file(joined / "model.safetensors")
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(written[name], tensor)


def test_experts_in_mxfp4_are_read_as_transformers_unpacks_them(tmp_path):
    """And written as bfloat16, which config.json then says."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    fields = checkpoints.config_fields("gpt_oss", **sizes, layer_types=[checkpoints.FULL])
    checkpoints.redrawn(fields, tmp_path / "plain")
    rng, unpacked = np.random.default_rng(0), {}

    def packed(tensors):
        rest = dict(tensors)
        for name in ("gate_up_proj", "down_proj"):
            full = f"model.layers.0.mlp.experts.{name}"
            number, inputs, outputs = rest.pop(full).shape
            blocks = rng.integers(0, 256, (number, outputs, inputs // 32, 16)).astype(np.uint8)
            scales = rng.integers(120, 130, blocks.shape[:-1]).astype(np.uint8)
            rest |= {full + "_blocks": blocks, full + "_scales": scales}
            tensor = convert_moe_packed_tensors(*map(torch.as_tensor, (blocks, scales)))
            unpacked[full] = tensor.float().numpy()
        return rest

    path = edited(tmp_path / "plain", tmp_path / "packed", packed)
    fields |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (path / "config.json").write_text(json.dumps(fields))
    model, params = jaxgrpo.load_model(path)
    jaxgrpo.save_model(model, params, tmp_path / "ours")
    written = load_file(tmp_path / "ours/model.safetensors")
    for name, tensor in unpacked.items():
        np.testing.assert_array_equal(written[name], tensor)
    assert "quantization_config" not in json.loads((tmp_path / "ours/config.json").read_text())
    odd = {"of quantised": {"quant_method": "gptq"}, "without a quant_method; of": {"bits": 4}}
    for message, settings in odd.items():
        (path / "config.json").write_text(json.dumps(fields | {"quantization_config": settings}))
        with pytest.raises(InputError, match=f"{message}.* only mxfp4 is read"):
            jaxgrpo.load_model(path)


@pytest.mark.slow
def test_layers_that_guess_further_are_carried_and_do_not_say_how_experts_are_stored(tmp_path):
    """Qwen3-Next's tensors under mtp.; and its shared expert needs its gate."""
    checkpoints.saved(checkpoints.transformers_config("qwen3_next"), tmp_path / "plain")
    guessing = {"mtp.layers.0.mlp.experts.gate_up_proj": np.arange(8, dtype=np.float32)}
    path = edited(tmp_path / "plain", tmp_path / "mtp", lambda tensors: {**tensors, **guessing})
    model, params = jaxgrpo.load_model(path)
    assert not model.config.fused_experts
    jaxgrpo.save_model(model, params, tmp_path / "again", base=path)
    written, stored = (
        load_file(place / "model.safetensors") for place in (tmp_path / "again", path)
    )
    assert written.keys() == stored.keys()
    assert all(np.array_equal(written[name], stored[name]) for name in stored)
    path = edited(path, tmp_path / "gateless", without("layers.0.mlp.shared_expert_gate"))
    with pytest.raises(InputError, match=r"missing: \S*0\.mlp\.shared_expert_gate\.weight: copy"):
        jaxgrpo.load_model(path)
