"""What is refused of a Hugging Face folder, and with which words; what a save may replace."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import leaf_bytes, normal_params

from jaxgrpo.core.errors import InputError
from jaxgrpo.models.api import AttentionKind, LayerKind, ModelConfig, Rope
from jaxgrpo.models.decoder import build
from jaxgrpo.models.hf.families import find_family
from jaxgrpo.models.hf.folders import read_config, read_params, read_tokenizer, save_model
from jaxgrpo.models.hf.weights import has_weights

pytestmark = pytest.mark.fault(20)

CONFIG = ModelConfig(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    pattern=(LayerKind(AttentionKind(rope=Rope(theta=1e6))),),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name -> folder of a small model."""
    folders = {}
    for name, tied in (("tied", True), ("untied", False)):
        model = build(dataclasses.replace(CONFIG, tie_embeddings=tied))
        folders[name] = tmp_path_factory.mktemp("models") / name
        save_model(model, normal_params(model), folders[name])
    return folders


@pytest.fixture
def copy(saved, tmp_path):
    """copy(**fields of config.json to change) -> a folder to spoil."""

    def make(name="untied", **fields):
        folder = tmp_path / "copy"
        shutil.copytree(saved[name], folder)
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def test_configs_of_transformers_4_and_5_say_the_same(copy):
    folder = copy("untied")
    expected = read_config(folder)
    assert expected == CONFIG
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    del fields["rope_theta"]
    path.write_text(json.dumps(fields))
    assert read_config(folder) == expected
    del fields["rope_parameters"]
    fields["torch_dtype"] = fields.pop("dtype")
    path.write_text(json.dumps(fields | {"rope_theta": 1e6, "rope_scaling": None}))
    assert read_config(folder) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["Qwen3MoeForCausalLM"]),
        ("rope_scaling", {"rope_type": "axial", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "yarn"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 4.0, "beta_fast": 32}),
        (
            "rope_parameters",
            {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
        ),
        ("attention_chunk_size", 128),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("hidden_act", "tanh"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("dtype", "float8_e4m3fn"),
        ("use_bidirectional_attention", True),
    ],
)
def test_a_config_that_asks_for_what_is_not_built_is_refused_by_field(copy, field, value):
    with pytest.raises(InputError, match=rf"config\.json is not .*\n  {field} = "):
        read_config(copy(**{field: value}))


def test_weights_of_mlx_in_few_bits_are_refused_with_the_way_to_plain_ones(copy):
    bits = {"group_size": 64, "bits": 4}
    with pytest.raises(InputError, match=r"quantization = .*take the plain checkpoint") as caught:
        read_config(copy(quantization=bits, quantization_config=bits))
    assert "model.ignore" not in str(caught.value)


def test_a_family_that_is_not_built_is_refused_with_the_nearest(copy):
    with pytest.raises(InputError, match="'lfm2' is not built: it needs layers of short conv"):
        find_family("lfm2")
    with pytest.raises(InputError, match="'mixtral' is not built: Known: arcee, "):
        find_family("mixtral")
    with pytest.raises(InputError, match=r"model_type = 'lama' is not built: did you mean 'llama'"):
        read_config(copy(model_type="lama"))


def test_all_problems_of_a_config_come_in_one_message(copy):
    folder = copy(hidden_act="tanh", attention_chunk_size=128)
    fields = json.loads((folder / "config.json").read_text())
    del fields["vocab_size"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InputError) as caught:
        read_config(folder)
    for part in ("hidden_act = 'tanh'", "attention_chunk_size = 128", "vocab_size: missing"):
        assert part in str(caught.value)


def spoiled(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return lambda: read_params(folder, build(read_config(folder)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(copy, value):
    folder = copy("untied")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][[1, 3]] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = r"model\.norm\.weight holds 2 values that are not finite .* of 16"
    with pytest.raises(InputError, match=message):
        read_params(folder, build(read_config(folder)))


@pytest.mark.parametrize(
    ("stored", "computed", "value", "message"),
    [
        ("float64", "float32", 1e300, r"1e\+300, which float32 cannot hold .*take another"),
        ("float64", "bfloat16", -1e300, r"-1e\+300, which bfloat16 cannot hold .*take another"),
        ("float32", "bfloat16", 3.4e38, r"3\.39.*e\+38, which bfloat16 .* model.dtype = .float32"),
        ("float32", "float16", -65520.0, "-65520, which float16 cannot hold .at most 6.55e"),
        ("float32", "float32", 3.4e38, ""),
        ("float32", "bfloat16", 3.39e38, ""),
        ("float64", "float64", 1e300, ""),
    ],
)
@pytest.mark.parametrize("param_dtype", [None, "float32"])
def test_weights_that_overflow_in_the_dtype_of_the_model_are_refused(
    copy, stored, computed, value, message, param_dtype
):
    """In training too, where it holds them in float32 and casts them where they are read."""
    folder = copy("untied")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    tensors["model.norm.weight"][2] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with jax.enable_x64(computed == "float64"):
        model = build(dataclasses.replace(read_config(folder), dtype=computed))
        param_dtype = "float64" if computed == "float64" else param_dtype
        if not message:
            scale = read_params(folder, model, param_dtype)["final_norm"]["scale"]
            assert np.isfinite(np.asarray(scale).astype(computed)).all()
            return
        with pytest.raises(InputError, match=rf"model\.norm\.weight holds {message}"):
            read_params(folder, model, param_dtype)


def test_missing_and_unknown_tensors_are_named(copy):
    def change(tensors):
        tensors["model.layers.1.mlp.gate.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")

    with pytest.raises(InputError) as caught:
        spoiled(copy(), change)()
    assert "missing: model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "unknown: model.layers.1.mlp.gate.weight" in str(caught.value)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(copy):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()

    with pytest.raises(InputError, match=r"model\.norm\.weight has shape \(15,\).*\(16,\)"):
        spoiled(copy(), change)()


def test_a_tied_checkpoint_may_repeat_its_embedding_but_not_contradict_it(copy):
    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    folder = copy("tied")
    assert "head" not in spoiled(folder, repeat)()

    def contradict(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    with pytest.raises(InputError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        spoiled(folder, contradict)()


def test_a_missing_head_is_named_with_the_field_that_ties_it(copy):
    folder = copy("tied", tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"missing: lm_head\.weight: .*tie_word_embeddings true"):
        read_params(folder, build(read_config(folder)))


def test_pickles_damaged_files_and_missing_shards_are_refused(copy):
    folder = copy()
    model = build(read_config(folder))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(InputError, match="no readable safetensors file"):
        read_params(folder, model)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin, a pickle"):
        read_params(folder, model)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"lists model-00001-of-00001\.safetensors, not in the"):
        read_params(folder, model)


def test_pointers_of_git_lfs_are_told_from_damaged_files(copy):
    """As they lie in a repository that was cloned without it."""
    folder = copy()
    model = build(read_config(folder))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    for name, read in (
        ("model.safetensors", lambda: read_params(folder, model)),
        ("tokenizer.json", lambda: read_tokenizer(folder)),
    ):
        (folder / name).write_bytes(pointer)
        with pytest.raises(InputError, match=rf"{name} is a pointer of Git LFS .*git lfs pull"):
            read()


def test_a_folder_without_safetensors_says_what_it_has_in_their_place(copy):
    folder = copy()
    model = build(read_config(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no model\.safetensors\.index\.json: give a .* weights$"):
        read_params(folder, model)
    snapshot = folder.parent / "snapshots/0"  # of the hub's cache, where no other weights are
    shutil.copytree(folder, snapshot)
    with pytest.raises(InputError, match=r"no pickles, and .*\): .*GGUF files of the hub are not"):
        read_params(snapshot, model)
    (snapshot / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(InputError, match=r"only as pytorch_model\.bin, a pickle"):
        read_params(snapshot, model)
    (folder / "m.gguf").touch()
    with pytest.raises(InputError, match=r"jaxgrpo import \S+m\.gguf OUT writes one"):
        read_params(folder, model)


def test_a_snapshot_of_the_hub_that_is_fetched_in_part_is_one_without_weights(tmp_path):
    """As a fetch that was broken off leaves it: what reads no weights takes none for granted."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    for folder in (tmp_path / "copy", tmp_path / "snapshots/0"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert not has_weights(folder)
        (folder / names[0]).touch()
        assert has_weights(folder) == (folder.name == "copy")
        (folder / names[1]).touch()
        assert has_weights(folder)


def test_an_adapter_beside_the_model_is_refused_unless_it_is_read_with_it(copy):
    folder = copy()
    (folder / "adapter_config.json").write_text("{}")
    model = build(read_config(folder))
    with pytest.raises(InputError, match=r"holds an adapter beside the model \(adapter_config"):
        read_params(folder, model)
    with pytest.raises(InputError, match="holds an adapter beside the model"):
        read_params(folder, model, adapter=folder.parent)
    read_params(folder, model, adapter=folder)


def test_a_path_that_is_no_folder_says_what_it_was_taken_for(tmp_path):
    with pytest.raises(InputError, match="is no folder: give one that holds a Hugging Face model"):
        read_config(tmp_path / "absent")
    with pytest.raises(InputError, match="'nobody/absent' is no local path, and as a model"):
        read_config("nobody/absent")  # the tests run with the hub switched off
    with pytest.raises(InputError, match=r"config\.json does not exist"):
        read_config(tmp_path)


def test_saving_replaces_a_model_folder_but_nothing_else(tmp_path):
    model = build(CONFIG)
    params, later = normal_params(model), normal_params(model, seed=1)
    folder = tmp_path / "m"
    save_model(model, params, folder)
    save_model(model, later, folder)
    assert leaf_bytes(read_params(folder, model)) == leaf_bytes(later)
    (folder / "notes.md").write_text("mine")
    with pytest.raises(InputError, match=r"holds notes\.md"):
        save_model(model, params, folder)
    assert (folder / "notes.md").read_text() == "mine"
    (folder / "notes.md").unlink()

    class Unsavable:
        def save_pretrained(self, folder):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_model(model, params, folder, Unsavable())
    assert leaf_bytes(read_params(folder, model)) == leaf_bytes(later)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"README.md": "my thesis", "tokenizer_notes.txt": "mine"}, "README.md, which is no file"),
        ({"config.json": "{}", "model.safetensors": "x"}, "a model that jaxgrpo did not write"),
        ({"README.md": "# Trained with jaxgrpo 0.1.0"}, "README.md and not a model"),
        ({"config.json": "{}"}, "config.json and not a model"),
        ({"model.safetensors": "x"}, "model.safetensors and not a model"),
        ({"config.json": "{}", "model.safetensors": "x", "adapter.safetensors": "x"}, "adapter"),
        ({"config.json": "{}", "model.safetensors": "x", "README.md": "mine"}, "README.md"),
    ],
)
def test_a_folder_that_is_not_wholly_a_model_of_ours_keeps_its_files(tmp_path, files, named):
    model, folder = build(CONFIG), tmp_path / "thesis"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(InputError, match=f"holds {named}.*it is not replaced; choose another"):
        save_model(model, normal_params(model), folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


def test_a_model_with_our_card_and_an_empty_folder_are_replaced(tmp_path):
    model, folder = build(CONFIG), tmp_path / "m"
    params = normal_params(model)
    folder.mkdir()
    save_model(model, params, folder, card="# Trained with jaxgrpo 0.1.0\n", max_shard_bytes=8_000)
    save_model(model, params, folder)
    assert (folder / "README.md").read_text() == "# Trained with jaxgrpo\n"
    assert leaf_bytes(read_params(folder, model)) == leaf_bytes(params)


def test_a_model_that_qwen3_cannot_express_is_refused_by_field(tmp_path):
    config = dataclasses.replace(
        CONFIG, pattern=(LayerKind(AttentionKind(window=4)),), embedding_scale=4.0
    )
    model = build(config)
    with pytest.raises(InputError, match=r"(?s)pattern = .*embedding_scale = 4\.0"):
        save_model(model, model.shapes, tmp_path / "m")
    sandwich = build(dataclasses.replace(config, norms="both"))
    with pytest.raises(InputError, match="attention_out_norm/scale"):
        save_model(sandwich, sandwich.shapes, tmp_path / "m")
    assert not (tmp_path / "m").exists()
