"""What a trained model's folder keeps of the base: every file but weights, byte for byte."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import sources
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.api import in_dtype
from jaxgrpo.models.hf import families, folders

CONFIG = {
    "_name_or_path": "somewhere",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": [2, 9],
    "hidden_size": 8,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "unsloth_version": "2025.1",
    "vocab_size": 20,
}
GENERATION = {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 9], "unknown": [1]}
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
LISTED = {
    **TOKENIZER,
    "chat_template": [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "rag", "template": "x"},
    ],
}
TEXTS = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION,
    "tokenizer_config.json": TOKENIZER,
    **{f"{name}.json": {"<s>": 1} for name in ("special_tokens_map", "added_tokens", "vocab")},
    **dict.fromkeys(("merges.txt", "tokenizer.model", "tiktoken.model"), "a b\r\n"),
    "chat_template.jinja": "{{ messages }}\r\n",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
}
LEFT = {"README.md": "# Llama", "modeling.py": "", "pytorch_model.bin": "", "data.json": {"a": 1}}


def written(folder: Path, files: dict[str, Any]) -> Path:
    """Files in another form than ours: indented by four, without a last line end."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=4)
        file.write_bytes(text.encode())
    return folder


def saved(base: Path, folder: Path, dtype: str = "float32", **options: Any) -> Path:
    model = decoder.build(dataclasses.replace(folders.read_config(base), dtype=dtype))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), model.shapes)
    jaxgrpo.save_model(model, params, folder, base=base, **options)
    return folder


def changed(base: Path, folder: Path) -> set[str]:
    """The files of the base that the folder lacks or has with other bytes."""
    files = (file.relative_to(base) for file in base.rglob("*") if file.is_file())

    def is_kept(file: Path) -> bool:
        return (folder / file).exists() and (folder / file).read_bytes() == (
            base / file
        ).read_bytes()

    return {file.as_posix() for file in files if not is_kept(file)}


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def test_every_text_of_the_base_is_kept_byte_for_byte_and_nothing_else(tmp_path):
    base = written(tmp_path / "base", {**TEXTS, **LEFT})
    out = saved(base, tmp_path / "out", generation_config={"eos_token_id": [9, 2]})
    assert changed(base, out) == set(LEFT)
    ours = {"README.md", "model.safetensors"}
    assert {f.relative_to(out).as_posix() for f in out.rglob("*") if f.is_file()} == {*TEXTS, *ours}
    saved(base, out)  # a second time: it holds nothing foreign


def test_a_vocabulary_with_a_version_in_its_name_is_read_fetched_counted_and_exported(tmp_path):
    name = "tokenizer.4.0.0.json"
    character_tokenizer("0123456789").save_pretrained(tmp_path / "base")
    base = written(tmp_path / "base", {"config.json": CONFIG})
    (base / "tokenizer.json").rename(base / name)
    fields = read(base / "tokenizer_config.json") | {"fast_tokenizer_files": [name]}
    written(base, {"tokenizer_config.json": fields})
    names = {file.name for file in base.iterdir()}
    assert set(filter_repo_objects(names, **sources.model_files(with_weights=False))) == names
    out = saved(base, tmp_path / "out")
    assert changed(base, out) == set()
    expected = folders.read_tokenizer(base).get_vocab()
    assert len(expected) > 10
    assert folders.read_tokenizer(out).get_vocab() == expected
    assert names <= folders.fingerprint(out).keys()
    saved(base, out)  # a second time: it holds nothing foreign


def test_code_that_is_not_copied_is_not_named(tmp_path):
    """transformers would look for it in the folder."""
    named = ("config.json", "tokenizer_config.json", "processor_config.json")
    texts = {name: TEXTS.get(name, {"processor_class": "Mine"}) for name in named}
    maps = {"auto_map": {"AutoModel": "modeling.Model"}}
    base = written(tmp_path / "base", {name: text | maps for name, text in texts.items()})
    out = saved(base, tmp_path / "out")
    assert {name: read(out / name) for name in named} == texts


def test_another_dtype_changes_one_field(tmp_path):
    base = written(tmp_path / "base", TEXTS)
    out = saved(base, tmp_path / "out", "bfloat16")
    assert changed(base, out) == {"config.json"}
    assert read(out / "config.json") == {**CONFIG, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("names", [("dtype",), ("dtype", "torch_dtype"), ()])
def test_the_dtype_stands_where_the_base_has_it(tmp_path, names):
    fields = {name: value for name, value in CONFIG.items() if name != "torch_dtype"}
    fields |= dict.fromkeys(names, "float32")
    base = written(tmp_path / "base", {"config.json": fields})
    assert not changed(base, saved(base, tmp_path / "same"))
    bfloat16_fields = read(saved(base, tmp_path / "other", "bfloat16") / "config.json")
    assert bfloat16_fields == fields | dict.fromkeys(names or ["dtype"], "bfloat16")


@pytest.mark.parametrize(
    ("files", "places"),
    [
        ({}, {"chat_template.jinja"}),
        ({"tokenizer_config.json": TOKENIZER}, {"tokenizer_config.json"}),
        (
            {"tokenizer_config.json": LISTED},
            {"tokenizer_config.json"},
        ),
        ({"chat_template.jinja": "x"}, {"chat_template.jinja"}),
        (
            {"tokenizer_config.json": TOKENIZER, "chat_template.jinja": "x"},
            {"tokenizer_config.json", "chat_template.jinja"},
        ),
        ({"chat_template.json": {"chat_template": "x"}}, {"chat_template.json"}),
        (
            {"tokenizer_config.json": TOKENIZER, "additional_chat_templates/rag.jinja": "x"},
            {"tokenizer_config.json"},
        ),
        (
            {"tokenizer_config.json": TOKENIZER, "chat_template.json": {"chat_template": "x"}},
            {"tokenizer_config.json", "chat_template.json"},
        ),
        (
            {"processor_config.json": {"chat_template": "x", "image_seq_length": 4}},
            {"processor_config.json"},
        ),
    ],
)
def test_a_template_that_the_config_sets_replaces_that_of_the_base(tmp_path, files, places):
    base = tmp_path / "base"
    tokenizer: Any = character_tokenizer("0123456789")
    tokenizer.save_pretrained(base)
    written(base, {"config.json": CONFIG, **files})
    tokenizer = folders.read_tokenizer(base)
    assert not changed(base, saved(base, tmp_path / "same", tokenizer=tokenizer))
    tokenizer.chat_template = "{{ messages[0].content }}"
    out = saved(base, tmp_path / "out", tokenizer=tokenizer)
    assert changed(base, out) == places & {file.name for file in base.iterdir()}
    again: Any = AutoTokenizer.from_pretrained(out)
    assert again.get_chat_template() == "{{ messages[0].content }}"
    if isinstance(again.chat_template, dict):
        assert again.chat_template["rag"] == "x"


def test_a_template_that_only_the_processor_has_is_read_and_stays_where_it_is(tmp_path):
    base = tmp_path / "base"
    character_tokenizer("0123456789").save_pretrained(base)
    written(base, {"config.json": CONFIG, "chat_template.json": {"chat_template": "x"}})
    tokenizer = folders.read_tokenizer(base)
    assert tokenizer.chat_template == "x"
    out = saved(base, tmp_path / "out", tokenizer=tokenizer)
    assert not (out / "chat_template.jinja").exists()
    tokenizer.chat_template = "y"
    out = saved(base, tmp_path / "other", tokenizer=tokenizer)
    assert read(out / "chat_template.json") == {"chat_template": "y"}
    assert folders.read_tokenizer(out).chat_template == "y"


def test_end_tokens_that_the_base_lacks_join_its_other_settings(tmp_path):
    base = written(tmp_path / "base", TEXTS)
    out = saved(base, tmp_path / "out", generation_config={"eos_token_id": [2, 9, 7]})
    assert changed(base, out) == {"generation_config.json"}
    assert read(out / "generation_config.json") == {**GENERATION, "eos_token_id": [2, 9, 7]}


def test_without_generation_config_the_end_tokens_of_config_json_count(tmp_path):
    config = {**CONFIG, "temperature": 0.5}
    base = written(tmp_path / "base", {"config.json": config})
    out = saved(base, tmp_path / "same", generation_config={"eos_token_id": [9, 2]})
    assert not changed(base, out)
    assert not (out / "generation_config.json").exists()
    out = saved(base, tmp_path / "out", generation_config={"eos_token_id": 7})
    drawn = {"bos_token_id": 1, "pad_token_id": 0, "temperature": 0.5, "eos_token_id": 7}
    assert read(out / "generation_config.json") == drawn


def test_begin_and_pad_tokens_beyond_the_vocabulary_are_left_out(tmp_path):
    beyond = {"bos_token_id": 20, "pad_token_id": 32000}
    files = {"config.json": {**CONFIG, **beyond}, "generation_config.json": GENERATION | beyond}
    out = saved(written(tmp_path / "base", files), tmp_path / "out")
    for name in files:
        assert {read(out / name)[token] for token in beyond} == {None}
    tokenizer: Any = character_tokenizer("0123456789abcdefghij")  # its pad token is 0
    tokenizer.bos_token = "j"
    assert tokenizer.bos_token_id == 22
    model = decoder.build(folders.read_config(out))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), model.shapes)
    jaxgrpo.save_model(model, params, tmp_path / "first", tokenizer)
    assert read(tmp_path / "first" / "config.json")["bos_token_id"] is None
    assert read(tmp_path / "first" / "config.json")["pad_token_id"] == 0


def test_a_tokenizer_that_we_write_is_in_the_words_of_transformers_4(tmp_path):
    tokenizer: Any = character_tokenizer("0123456789")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
    tokenizer.save_pretrained(tmp_path / "theirs")
    model = decoder.build(families.model_config(CONFIG, "a test"))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), model.shapes)
    original = folders.read_tokenizer(tmp_path / "theirs")
    jaxgrpo.save_model(model, params, tmp_path / "m", original)
    fields = read(tmp_path / "m" / "tokenizer_config.json")
    assert fields["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert fields["additional_special_tokens"] == ["<x>"]
    newer = {"is_local", "local_files_only", "backend", "extra_special_tokens"}
    assert not newer & set(fields)
    again = folders.read_tokenizer(tmp_path / "m")
    assert again("1<x>2")["input_ids"] == original("1<x>2")["input_ids"]
    assert again.decode([4, 13, 5], skip_special_tokens=True) == "12"


LLAMA3 = {name: value for name, value in checkpoints.LLAMA3.items() if name != "rope_theta"}
YARN = {name: value for name, value in checkpoints.YARN.items() if name != "rope_theta"}
LONG = {"type": "longrope"} | {
    name: checkpoints.RICH["phi3"]["rope_parameters"][name]
    for name in ("short_factor", "long_factor")
}


@pytest.mark.parametrize(
    ("family", "older"),
    [
        ("qwen3", {"rope_theta": 1e4}),
        ("llama", {"rope_theta": 500.0, "rope_scaling": LLAMA3}),
        (
            "gemma3_text",
            {
                "rope_theta": 1000.0,
                "rope_local_base_freq": 100.0,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
        ),
        ("olmo3", {"rope_theta": 300.0, "rope_scaling": YARN}),
        (
            "phi3",
            {
                "rope_theta": 300.0,
                "rope_scaling": LONG,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
)
def test_positions_are_there_in_the_fields_of_transformers_4_too(family, older):
    """Read by transformers 4.57.6 they give the logits of every family bit for bit."""
    fields = checkpoints.config_fields(family)
    config = families.model_config(fields, "a test")
    exported_fields = families.config_fields(config, "float32")
    assert exported_fields == {
        **exported_fields,
        **older,
        "rope_parameters": fields["rope_parameters"],
    }
    assert families.model_config(exported_fields, "a test") == config


def test_the_number_of_experts_is_there_by_the_name_of_transformers_4_too():
    """It assumes 128 in a Qwen3-MoE that transformers 5 has saved, by another name."""
    fields = checkpoints.config_fields("qwen3_moe")
    number = fields["num_local_experts"]
    assert "num_experts" not in fields
    config = families.model_config(fields, "a test")
    exported_fields = families.config_fields(config, "float32")
    assert exported_fields["num_experts"] == number
    assert families.model_config(exported_fields, "a test") == config
    with pytest.raises(InputError, match=f"num_experts = 9: expected num_local_experts = {number}"):
        families.model_config({**fields, "num_experts": 9}, "a test")
    del fields["num_local_experts"]
    config = families.model_config({**fields, "num_experts": number}, "a test")
    assert "num_local_experts" not in families.config_fields(config, "float32")


def test_a_share_of_1_is_written_for_transformers_4_which_assumes_half_for_glm4():
    turned = {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 1.0}
    config = families.model_config(
        checkpoints.config_fields("glm4", rope_parameters=turned), "a test"
    )
    exported_fields = families.config_fields(config, "float32")
    assert exported_fields["partial_rotary_factor"] == 1.0
    assert families.model_config(exported_fields, "a test") == config


@pytest.mark.full
def test_tensors_keep_the_dtype_that_the_base_has_them_in(tmp_path):
    """Some in float32 beside bfloat16, as Qwen3.5 is published."""
    changes = {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "dtype": "bfloat16"}
    fields = checkpoints.config_fields("qwen3_5_text", **changes)
    model = decoder.build(families.model_config(fields, "a test"))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), model.shapes)
    base, delta = tmp_path / "base", "model.layers.0.linear_attn"
    jaxgrpo.save_model(model, params, base)
    stored = load_file(base / "model.safetensors")
    assert stored[f"{delta}.norm.weight"].dtype == np.float32
    for name, dtype in ((f"{delta}.dt_bias", jnp.bfloat16), ("model.norm.weight", np.float32)):
        stored[name] = stored[name].astype(dtype)
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    model, params = jaxgrpo.load_model(base, "bfloat16")
    trained = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)  # as runs hold weights
    for number, weights in enumerate((params, in_dtype(trained, "bfloat16"))):
        jaxgrpo.save_model(model, weights, tmp_path / str(number), base=base)
        ours = load_file(tmp_path / str(number) / "model.safetensors")
        assert {name: tensor.dtype for name, tensor in ours.items()} == {
            name: tensor.dtype for name, tensor in stored.items()
        }
        assert all(np.array_equal(ours[name], stored[name]) for name in stored)
    jaxgrpo.save_model(model, trained, tmp_path / "trained", base=base)
    ours = load_file(tmp_path / "trained/model.safetensors")
    assert {str(tensor.dtype) for tensor in ours.values()} == {"float32"}
