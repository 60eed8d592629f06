"""Hugging Face folders, both ways: the oracle is transformers with PyTorch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import checkpoints
import jax
import jax.numpy as jnp
import minimal_config
import numpy as np
import pytest
import torch
import whole_logits
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from processes import free_port
from safetensors.numpy import load_file, save_file
from tiny import leaf_bytes
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from jaxgrpo.data import storage
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models.api import AttentionKind, LayerKind, Rope
from jaxgrpo.models.decoder import build
from jaxgrpo.models.hf import wrapped
from jaxgrpo.models.hf.folders import read_config, read_params, read_tokenizer, save_model
from jaxgrpo.training import pretrained, teachers
from jaxgrpo.update import packing

SIZES = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
VARIANTS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e6}},
    "bias": {"tie_word_embeddings": False, "attention_bias": True},
}
TOKENS = np.random.default_rng(0).integers(0, 29, size=(2, 12))


def torch_model(**changes) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that every weight matters
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def torch_logits(model: Qwen3ForCausalLM) -> np.ndarray:
    return whole_logits.torch_logits(model, TOKENS)


def our_logits(folder, **config_changes) -> np.ndarray:
    model = build(dataclasses.replace(read_config(folder), **config_changes))
    return whole_logits.our_logits(model, read_params(folder, model), TOKENS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name of a variant -> folder saved by transformers, and its PyTorch model."""
    folders_by_name = {}
    for name, changes in VARIANTS.items():
        folder, model = tmp_path_factory.mktemp(name), torch_model(**changes)
        model.save_pretrained(folder)
        folders_by_name[name] = folder, model
    return folders_by_name


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_our_logits_are_those_of_transformers_and_so_are_those_of_what_we_save(
    name, folders, tmp_path
):
    folder, theirs = folders[name]
    expected = torch_logits(theirs)
    assert expected.std() > 0.5
    np.testing.assert_allclose(our_logits(folder), expected, atol=1e-4)

    model = build(read_config(folder))
    params = read_params(folder, model)
    count = sum(parameter.numel() for parameter in theirs.parameters())
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
    save_model(model, params, tmp_path / "saved")
    again = Qwen3ForCausalLM.from_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(torch_logits(again), expected)
    assert read_config(tmp_path / "saved") == read_config(folder)
    assert leaf_bytes(read_params(tmp_path / "saved", model)) == leaf_bytes(params)


def test_a_pattern_of_two_equal_kinds_reads_the_layer_left_over(folders):
    kinds = (LayerKind(AttentionKind(rope=Rope(theta=1e6))),) * 2
    folder = folders["untied"][0]
    np.testing.assert_allclose(our_logits(folder, pattern=kinds), our_logits(folder), atol=1e-5)


def test_files_in_shards_are_read_and_written(folders, tmp_path):
    folder, theirs = folders["tied"]
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    model = build(read_config(folder))
    params = read_params(tmp_path / "theirs", model)
    assert leaf_bytes(params) == leaf_bytes(read_params(folder, model))

    save_model(model, params, tmp_path / "ours", max_shard_bytes=8_000)
    files = sorted(path for path in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 1
    assert all(path.stat().st_size < 8_000 + 2_000 for path in files)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(len, leaf_bytes(params)))
    again = Qwen3ForCausalLM.from_pretrained(tmp_path / "ours")
    np.testing.assert_array_equal(torch_logits(again), torch_logits(theirs))


def test_bfloat16_weights_keep_their_bits(tmp_path):
    theirs = torch_model()
    theirs.bfloat16()
    theirs.save_pretrained(tmp_path / "theirs")
    config = read_config(tmp_path / "theirs")
    assert config.dtype == "bfloat16"
    model = build(config)
    params = read_params(tmp_path / "theirs", model)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    save_model(model, params, tmp_path / "ours")
    their_tensors, our_tensors = (
        load_file(tmp_path / who / "model.safetensors") for who in ("theirs", "ours")
    )
    assert {name: leaf.tobytes() for name, leaf in their_tensors.items()} == {
        name: leaf.tobytes() for name, leaf in our_tensors.items()
    }
    wide = read_params(tmp_path / "theirs", model, dtype="float32")
    np.testing.assert_array_equal(wide["embed"]["table"], params["embed"]["table"])
    assert wide["embed"]["table"].dtype == jnp.float32


def test_parameters_are_read_into_shardings_and_saved_from_them(folders, tmp_path):
    folder = folders["bias"][0]
    model = build(read_config(folder))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    rules = {"embed": "x", "heads": "y", "kv_heads": "y", "mlp": "y"}
    shardings = jax.tree.map(
        lambda axes: NamedSharding(mesh, PartitionSpec(*map(rules.get, axes))),
        model.axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    # Over the stacked layers too: each device then keeps some periods only.
    shardings["blocks"]["0"]["feed_forward_norm"]["scale"] = NamedSharding(
        mesh, PartitionSpec(None, ("x", "y"))
    )
    params = read_params(folder, model, shardings=shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
    assert leaf_bytes(params) == leaf_bytes(read_params(folder, model))
    save_model(model, params, tmp_path / "saved")
    assert leaf_bytes(read_params(tmp_path / "saved", model)) == leaf_bytes(params)


def test_a_leaf_split_over_its_layers_is_read_where_it_belongs(folders):
    folder = folders["untied"][0]
    model = build(read_config(folder))
    mesh = Mesh(np.array(jax.devices()[:3]), ("x",), axis_types=(AxisType.Auto,))
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), model.shapes)
    shardings["blocks"] = jax.tree.map(
        lambda _: NamedSharding(mesh, PartitionSpec("x")), model.shapes["blocks"]
    )
    params = read_params(folder, model, shardings=shardings)
    kernel = params["blocks"]["0"]["attention"]["out"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(1, 4, 8, 16)}
    assert leaf_bytes(params) == leaf_bytes(read_params(folder, model))


def test_read_parameters_may_be_donated_without_touching_what_was_read(folders):
    folder = folders["untied"][0]
    model = build(read_config(folder))
    params = read_params(folder, model)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree), donate_argnums=0)
    table = np.asarray(doubled(params)["embed"]["table"])
    np.testing.assert_array_equal(table, 2 * read_params(folder, model)["embed"]["table"])


def test_the_tokenizer_travels_with_the_model_and_names_its_special_tokens(folders, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "a": 2, "b": 3}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>"
    )
    folder = folders["untied"][0]
    model = build(read_config(folder))
    params = read_params(folder, model)
    save_model(model, params, tmp_path / "m", tokenizer, {"temperature": 0.5, "do_sample": True})
    read = read_tokenizer(tmp_path / "m")
    assert read("a b b")["input_ids"] == [2, 3, 3]
    assert (read.pad_token_id, read.eos_token_id) == (0, 1)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((tmp_path / "m" / name).read_text())
        assert (fields["pad_token_id"], fields["eos_token_id"]) == (0, 1)
    assert fields["temperature"] == 0.5
    assert Qwen3ForCausalLM.from_pretrained(tmp_path / "m").generation_config.eos_token_id == 1


def test_what_we_save_states_the_base_frequency_for_older_readers_too(folders, tmp_path):
    model = build(read_config(folders["untied"][0]))
    save_model(model, read_params(folders["untied"][0], model), tmp_path / "m")
    fields = json.loads((tmp_path / "m" / "config.json").read_text())
    assert fields["rope_theta"] == fields["rope_parameters"]["rope_theta"] == 1e6
    rope = Qwen3Config.from_pretrained(tmp_path / "m").rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 1e6}


TWO_PROCESSES = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxgrpo.models.hf.folders import read_config, read_params, save_model
from jaxgrpo.models.decoder import build

address, process, source, target = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(process))
mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
model = build(read_config(source))
rules = {"embed": "x"}
shardings = jax.tree.map(
    lambda axes: NamedSharding(mesh, PartitionSpec(*map(rules.get, axes))),
    model.axes,
    is_leaf=lambda node: isinstance(node, tuple),
)
params = read_params(source, model, shardings=shardings)
assert not params["embed"]["table"].is_fully_addressable
save_model(model, params, target)
read_params(target, model)  # the folder stands on every process
"""


def fused(folder: Path) -> None:
    """Writes a model with experts, all of a layer as one tensor."""
    checkpoints.saved(checkpoints.transformers_config("qwen3_moe"), folder)
    stored = load_file(folder / "model.safetensors")
    rest = {name: array for name, array in stored.items() if ".experts." not in name}
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([stored[f"{prefix}.{e}.{part}_proj.weight"] for e in range(6)])
            for part in ("gate", "up", "down")
        )
        rest[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        rest[f"{prefix}.down_proj"] = down
    save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})


def with_a_head(folder: Path) -> None:
    """Writes the text part of a Mistral 3 whose two fields differ: a head in the files counts."""
    checkpoints.saved(checkpoints.transformers_config("mistral"), folder)
    spelling = wrapped.SPELLINGS[0]
    stored = load_file(folder / "model.safetensors")
    renamed = {spelling.name(name): array for name, array in stored.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    full = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    fields = full | {"tie_word_embeddings": True, "text_config": text}
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("write", [fused, with_a_head])
def test_what_names_of_tensors_say_is_known_before_weights_are_fetched(
    write, tmp_path, monkeypatch
):
    """Of a model in a bucket or on the hub whose one file no index lists."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, url = tmp_path / "base", f"memory://weights/{write.__name__}"
    write(folder)
    alphabet = "".join(map(chr, range(65, 65 + checkpoints.VOCAB - 3)))
    character_tokenizer(alphabet).save_pretrained(folder)
    for file in folder.iterdir():
        storage.write(f"{url}/{file.name}", file.read_bytes())
    lengths = ("rollout.max_prompt_tokens=8", "rollout.max_completion_tokens=8")
    config = minimal_config.read(f"model.path={url}", "model.text_only=true", *lengths)
    start = config.model, config.lora, config.rollout, config.train.remat
    mesh = pretrained.make_mesh(config.mesh)
    policy = pretrained.find_model(*start, mesh, fetch_weights=False)
    expected = read_config(folder, text_only=True)
    is_fused, is_tied = expected.fused_experts, expected.tie_embeddings
    assert (is_fused, is_tied) == (write is fused, False)
    facts = policy.model.config
    assert (facts.fused_experts, facts.tie_embeddings) == (is_fused, is_tied)
    params = policy.with_weights().read_params(0, policy.model)
    stored = read_params(folder, build(expected))
    jax.tree.map(np.testing.assert_array_equal, params, stored)
    sizes = packing.Geometry(1, 1, 8, 8, bins=1, tokens=16)
    by_path = teachers.find_teachers([url], policy, "xla", sizes)
    jax.tree.map(
        np.testing.assert_array_equal, teachers.read_teachers(by_path, mesh), {url: stored}
    )


@pytest.mark.full
@pytest.mark.slow
def test_two_processes_read_their_parts_and_save_the_whole(folders, tmp_path, python, environment):
    folder = folders["untied"][0]
    command = [python, "-c", TWO_PROCESSES, f"127.0.0.1:{free_port()}"]
    started = [
        subprocess.Popen(
            [*command, str(process), str(folder), str(tmp_path / "saved")],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in started:
            process.kill()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    original = load_file(folder / "model.safetensors")
    assert set(saved) == set(original)
    for name, tensor in original.items():
        np.testing.assert_array_equal(saved[name], tensor)
