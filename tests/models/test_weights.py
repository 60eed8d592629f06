"""Checkpoints and parameters: fused tensors, parts of devices; the oracle is NumPy."""

from __future__ import annotations

import collections
import dataclasses
import errno
import itertools
import resource
import subprocess
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from processes import free_port
from safetensors.numpy import load_file, save_file
from tiny import leaf_bytes, normal_params

from jaxgrpo.core.errors import InputError
from jaxgrpo.models.api import AttentionKind, LayerKind, ModelConfig, Rope
from jaxgrpo.models.decoder import build
from jaxgrpo.models.hf import folders, mapping, weights, wrapped
from jaxgrpo.models.hf.families import base, mistral

FUSED = mistral.PHI3.fused
JOINED = frozenset(itertools.chain(*FUSED.values()))


def names(modules: Mapping[str, str], fused: Mapping[str, tuple[str, ...]]) -> base.Family:
    """A family as far as the mapping reads it."""
    return mistral.PHI3._replace(modules=modules, fused=fused)


PLAIN = names(base.MODULES, {})
PHI = names({ours: name for ours, name in base.MODULES.items() if ours not in JOINED}, FUSED)
FAMILIES = {"plain": PLAIN, "fused": PHI}
FAMILIES |= {
    f"{name} in pairs": family._replace(in_pairs=True) for name, family in FAMILIES.items()
}


def drawn_config(seed: int, **changes) -> ModelConfig:
    """A model of sizes that differ from each other, with a layer left over where there are two."""
    rng = np.random.default_rng(seed)
    kv_heads, groups, pattern = (int(rng.integers(1, 4)) for _ in range(3))
    return ModelConfig(
        vocab_size=int(rng.integers(5, 40)),
        hidden_size=int(rng.integers(3, 20)),
        intermediate_size=int(rng.integers(3, 20)),
        num_layers=int(rng.integers(1, 6)),
        num_heads=groups * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=2 * int(rng.integers(1, 5)),
        pattern=(LayerKind(),) * pattern,
        tie_embeddings=bool(rng.integers(2)),
        attention_bias=bool(rng.integers(2)),
        **changes,
    )


EVEN = ModelConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=12,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    attention_bias=True,
    query_key_norm="whole",
)
"""Every dimension divides over four devices."""


def write(folder, model, params, family):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    parts = mapping.by_tensor(jax.tree.leaves(params), mapping.entries(model, family))
    weights.write(folder, parts, 10**9)
    return folder


def read(folder, model, family, shardings=None, counts=None):
    """The parameters of a folder; adds the elements that are read of each tensor to `counts`."""
    with weights.opened(folder) as files:
        of_leaves, tied_head, _ = wrapped.find_tensors(files, model, family, str(folder))
        weights.check(folder, files, of_leaves, tied_head)
        if counts is not None:
            files = {name: Counting(file, counts) for name, file in files.items()}
        return weights.read_leaves(folder, files, model.shapes, of_leaves, None, shardings)


class Counting:
    """An open file that counts the elements that are read of each tensor."""

    def __init__(self, file, counts):
        self.file, self.counts = file, counts

    def get_slice(self, name):
        return CountingSlice(self.file.get_slice(name), name, self.counts)


class CountingSlice:
    def __init__(self, stored, name, counts):
        self.stored, self.name, self.counts = stored, name, counts

    def __getitem__(self, where):
        part = self.stored[where]
        self.counts[self.name] += part.size
        return part


def spoil(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))]
)
def test_what_is_written_is_read_again_bit_for_bit(seed, family, dtype, tmp_path):
    model = build(drawn_config(seed, dtype=dtype))
    params, names = normal_params(model), FAMILIES[family]
    folder = write(tmp_path / "m", model, params, names)
    assert leaf_bytes(read(folder, model, names)) == leaf_bytes(params)
    first = load_file(folder / "model.safetensors")
    again = write(tmp_path / "n", model, read(folder, model, names), names)
    assert {name: tensor.tobytes() for name, tensor in first.items()} == {
        name: tensor.tobytes() for name, tensor in load_file(again / "model.safetensors").items()
    }


def test_a_fused_tensor_has_the_outputs_of_its_parts_one_after_another(tmp_path):
    model = build(EVEN)
    params = normal_params(model)
    folder = write(tmp_path / "m", model, params, PHI)
    tensors = load_file(folder / "model.safetensors")
    layer = jax.tree.map(lambda leaf: np.asarray(leaf)[2], params["blocks"]["0"])
    attention = layer["attention"]
    expected = [attention[part]["kernel"].reshape(16, -1).T for part in ("query", "key", "value")]
    name = "model.layers.2.self_attn.qkv_proj"
    np.testing.assert_array_equal(tensors[f"{name}.weight"], np.concatenate(expected))
    assert tensors[f"{name}.weight"].shape == (32 + 16 + 16, 16)
    biases = [attention[part]["bias"].reshape(-1) for part in ("query", "key", "value")]
    np.testing.assert_array_equal(tensors[f"{name}.bias"], np.concatenate(biases))
    gate_up = [layer["feed_forward"][part]["kernel"].T for part in ("gate", "up")]
    np.testing.assert_array_equal(
        tensors["model.layers.2.mlp.gate_up_proj.weight"], np.concatenate(gate_up)
    )
    assert not any(key.endswith((".q_proj.weight", ".up_proj.weight")) for key in tensors)


def test_the_rows_of_a_head_that_turn_together_stand_side_by_side(tmp_path):
    model = build(
        dataclasses.replace(
            EVEN, head_dim=6, pattern=(LayerKind(AttentionKind(rope=Rope(share=0.7))),)
        )
    )
    params = normal_params(model)
    folder = write(tmp_path / "m", model, params, FAMILIES["plain in pairs"])
    tensors = load_file(folder / "model.safetensors")
    attention = jax.tree.map(lambda leaf: np.asarray(leaf)[1], params["blocks"]["0"]["attention"])
    order = [0, 2, 1, 3, 4, 5]  # four of six turn
    for part in ("query", "key"):
        name = f"model.layers.1.self_attn.{part[0]}_proj"
        kernel, bias = attention[part]["kernel"], attention[part]["bias"]
        expected = kernel[:, :, order].reshape(16, -1).T
        np.testing.assert_array_equal(tensors[f"{name}.weight"], expected)
        np.testing.assert_array_equal(tensors[f"{name}.bias"], bias[:, order].reshape(-1))
    value = attention["value"]["kernel"].reshape(16, -1).T
    np.testing.assert_array_equal(tensors["model.layers.1.self_attn.v_proj.weight"], value)


def test_the_rows_and_scales_of_each_layer_stand_as_its_own_rope_turns_them(tmp_path):
    shares = (0.7, 1.0)
    kinds = tuple(LayerKind(AttentionKind(rope=Rope(share=share))) for share in shares)
    model = build(dataclasses.replace(EVEN, head_dim=6, pattern=kinds))
    params = normal_params(model)
    folder = write(tmp_path / "m", model, params, FAMILIES["plain in pairs"])
    tensors = load_file(folder / "model.safetensors")
    for layer, order in enumerate(([0, 2, 1, 3, 4, 5], [0, 3, 1, 4, 2, 5])):
        parts = jax.tree.map(lambda leaf: np.asarray(leaf)[0], params["blocks"][str(layer)])
        attention, names = parts["attention"], f"model.layers.{layer}.self_attn"
        bias, scale = attention["query"]["bias"], attention["query_norm"]["scale"]
        np.testing.assert_array_equal(tensors[f"{names}.q_proj.bias"], bias[:, order].ravel())
        np.testing.assert_array_equal(tensors[f"{names}.q_norm.weight"], scale[:, order].ravel())


def test_a_norm_over_all_heads_is_stored_flat(tmp_path):
    model = build(EVEN)
    params = normal_params(model)
    folder = write(tmp_path / "m", model, params, PLAIN)
    scale = params["blocks"]["0"]["attention"]["query_norm"]["scale"]
    assert scale.shape == (4, 8, 4)
    stored = load_file(folder / "model.safetensors")["model.layers.3.self_attn.q_norm.weight"]
    np.testing.assert_array_equal(stored, np.asarray(scale)[3].reshape(32))
    assert leaf_bytes(read(folder, model, PLAIN)) == leaf_bytes(params)


LAYOUTS = {  # logical axis -> mesh axes
    "inputs": {"embed": ("x", "y")},
    "outputs": {"heads": "y", "kv_heads": "y", "mlp": "y", "vocab": "y", "embed": "x"},
    "within heads": {"head_dim": "y", "heads": "x", "kv_heads": "x", "mlp": "x"},
    "layers": {"layers": "x", "head_dim": "y", "vocab": ("x", "y")},
}


@pytest.mark.parametrize("rules", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_part_is_read_once_and_is_that_of_its_device(rules, family, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "PIECE", 10)  # so that every matrix is read in pieces
    model, names = build(EVEN), FAMILIES[family]
    params = normal_params(model)
    folder = write(tmp_path / "m", model, params, names)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    shardings = jax.tree.map(
        lambda axes: NamedSharding(mesh, PartitionSpec(*map(LAYOUTS[rules].get, axes))),
        model.axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    counts = collections.Counter()
    loaded = read(folder, model, names, shardings, counts)
    assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == shardings
    assert leaf_bytes(loaded) == leaf_bytes(params)
    sizes = {name: part.size for name, part in load_file(folder / "model.safetensors").items()}
    if names.in_pairs:  # half of a head stands among the other's rows
        counts = {name: min(count, sizes[name]) for name, count in counts.items()}
    assert counts == sizes


@pytest.mark.parametrize("seed", range(40))
def test_pieces_are_plain_slices_that_make_up_just_the_part_that_is_asked_for(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(size) for size in rng.integers(1, 7, size=rng.integers(1, 4)))
    inputs = [None, *range(len(shape))][rng.integers(len(shape) + 1)]
    split = 1 if inputs is None else inputs
    groups = (shape[:split], shape[split:]) if inputs is None else (shape[split:], shape[:split])
    flat = [int(np.prod(group)) for group in groups if group] or [1]
    first, more = (int(n) for n in rng.integers(0, 5, size=2))
    hf_shape = (first + flat[0] + more, *(shape[1:] if inputs is None else flat[1:]))
    entry = mapping.Entry("t", (), shape, inputs, (first, first + flat[0]), hf_shape)
    tensor = np.arange(np.prod(hf_shape)).reshape(hf_shape)
    ours = tensor[first : first + flat[0]]
    ours = (ours if inputs is None else ours.T).reshape(shape)
    np.testing.assert_array_equal(mapping.to_hf(entry, ours), tensor[first : first + flat[0]])

    box = tuple(tuple(sorted(rng.choice(size + 1, 2, replace=False).tolist())) for size in shape)
    limit, visits = int(rng.integers(1, 40)), np.zeros(shape, int)
    for piece, where in mapping.pieces(entry, box, limit):
        index = tuple(slice(*span) for span in piece)
        visits[index] += 1
        values = tensor[where]
        assert values.size <= limit
        rows: Any = where[0]
        assert rows.start >= first
        np.testing.assert_array_equal(
            mapping.to_ours(entry, values, ours[index].shape), ours[index]
        )
    expected = np.zeros(shape, int)
    expected[tuple(slice(*span) for span in box)] = 1
    np.testing.assert_array_equal(visits, expected)


def test_a_fused_tensor_of_another_shape_or_dtype_is_refused_as_a_whole(tmp_path):
    model = build(EVEN)
    folder = write(tmp_path / "m", model, normal_params(model), PHI)
    name = "model.layers.1.mlp.gate_up_proj.weight"
    spoil(folder, lambda tensors: tensors.update({name: tensors[name][:-1].copy()}))
    with pytest.raises(InputError, match=r"1\.mlp\.gate_up_proj\.weight has shape \(23, 16\).*24"):
        read(folder, model, PHI)
    spoil(folder, lambda tensors: tensors.update({name: np.ones((24, 16), np.int8)}))
    with pytest.raises(InputError, match=r"gate_up_proj\.weight holds I8, expected float32, bfl"):
        read(folder, model, PHI)


@pytest.mark.parametrize("place", [(0, 0), (23, 15), (12, 7)])
def test_a_value_that_is_not_finite_is_found_by_the_device_that_reads_it(place, tmp_path):
    model = build(EVEN)
    folder = write(tmp_path / "m", model, normal_params(model), PHI)
    name = "model.layers.3.mlp.gate_up_proj.weight"

    def change(tensors):
        tensors[name][place] = tensors[name][1, 1] = np.nan

    spoil(folder, change)
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec("x")), model.shapes)
    del shardings["final_norm"], shardings["rest"]
    shardings |= {"final_norm": {"scale": NamedSharding(mesh, PartitionSpec())}, "rest": {}}
    with pytest.raises(InputError, match=r"3\.mlp\.gate_up_proj\.weight holds 2 values .* of 384"):
        read(folder, model, PHI, shardings)


def test_a_head_that_differs_from_the_embedding_in_its_last_value_is_refused(tmp_path):
    config = dataclasses.replace(EVEN, vocab_size=40_000, tie_embeddings=True, num_layers=1)
    model = build(config)
    folder = write(tmp_path / "m", model, normal_params(model), PLAIN)
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    assert config.vocab_size * config.hidden_size > weights.PIECE
    spoil(folder, lambda tensors: tensors.update({head: tensors[embed].copy()}))
    assert "head" not in read(folder, model, PLAIN)

    def change(tensors):
        tensors[head][-1, -1] += 1

    spoil(folder, change)
    with pytest.raises(InputError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        read(folder, model, PLAIN)
    spoil(folder, lambda tensors: tensors.update({head: np.ones((3, 4), np.float32)}))
    with pytest.raises(InputError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        read(folder, model, PLAIN)


def test_a_parameter_without_a_name_is_refused_by_its_path():
    model = build(dataclasses.replace(EVEN, norms="both"))
    with pytest.raises(
        InputError, match=r"blocks/0/attention_out_norm/scale: family \"qwen3\" has"
    ):
        mapping.entries(model, PLAIN)


TWO_PROCESSES = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxgrpo.core.errors import InputError
from jaxgrpo.models.hf.folders import read_config, read_params
from jaxgrpo.models.decoder import build

address, process, source = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(process))
mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
model = build(read_config(source))
shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), model.shapes)
shardings["embed"]["table"] = NamedSharding(mesh, PartitionSpec("x"))
try:
    read_params(source, model, shardings=shardings)
except InputError as error:
    print(error)
"""


@pytest.mark.full
@pytest.mark.slow
def test_every_process_ends_when_one_finds_a_wrong_value(tmp_path, python, environment):
    config = dataclasses.replace(EVEN, query_key_norm="head", attention_bias=False)
    model = build(config)
    folders.save_model(model, normal_params(model), tmp_path / "m")

    def change(tensors):
        tensors["model.embed_tokens.weight"][-1, 3] = np.inf  # which the second process reads

    spoil(tmp_path / "m", change)
    command = [python, "-c", TWO_PROCESSES, f"127.0.0.1:{free_port()}"]
    started = [
        subprocess.Popen(
            [*command, str(process), str(tmp_path / "m")],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        (first, errors), (second, more) = (loader.communicate(timeout=120) for loader in started)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], errors + more
    assert "not read in process 1 (processes count from 0): see the message there" in first
    assert "model.embed_tokens.weight holds 1 values that are not finite" in second


def test_a_full_disk_under_a_file_of_tensors_is_an_error_of_the_system_with_its_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    size, read = {"a": 400_000}, lambda name: np.ones(100_000, np.float32)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            weights.write_tensors(tmp_path, size, read, 10**9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert error.value.errno == errno.EFBIG
    assert error.value.filename == str(tmp_path / "model.safetensors")
    weights.write_tensors(tmp_path, size, read, 10**9)
    mode = (tmp_path / "config.json").stat().st_mode
    assert (tmp_path / "model.safetensors").stat().st_mode == mode
