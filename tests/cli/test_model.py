"""`jaxgrpo model`: what it says of a Llama and a Gemma 3 folder, and of what it cannot read."""

from __future__ import annotations

import json
import shutil
import time

import checkpoints
import pytest
from minimal_config import MINIMAL
from safetensors import safe_open

from jaxgrpo.cli import main as cli
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models.hf import weights

LEAVES = 19, 15  # kinds of parameters: Llama with biases, Gemma 3 with two more norms


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a Llama with a tokenizer and of a Gemma 3 without one."""
    home = tmp_path_factory.mktemp("model")
    for family in ("llama", "gemma3_text"):
        checkpoints.saved(checkpoints.transformers_config(family), home / family)
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(home / "llama")
    return home


@pytest.fixture
def show(capsys):
    """Runs the command -> (exit code, what it printed, its JSON or None)."""

    def run(*arguments):
        words = ["model", *map(str, arguments)]
        code = cli.main(words)
        streams = capsys.readouterr()
        assert cli.main([*words, "--json"]) == code
        document = capsys.readouterr().out
        return code, streams.out + streams.err, json.loads(document) if document else None

    return run


def test_a_llama_with_a_tokenizer(saved, show):
    code, output, description = show(saved / "llama")
    assert code == 0, output
    assert (description["family"], description["architecture"]) == ("llama", "LlamaForCausalLM")
    assert description["rope"] == "llama3"
    assert description["layers"] == ["full, theta 500, frequencies x 0.25 to 0.6366"] * 3
    with safe_open(saved / "llama" / "model.safetensors", "numpy") as file:
        sizes = [file.get_tensor(name).size for name in file.keys()]  # noqa: SIM118
    assert (
        description["parameters"]
        == sum(sizes)
        == sum(leaf["numbers"] for leaf in description["leaves"])
    )
    assert description["stored"] == {"float32": len(sizes)}
    assert description["bytes"] == pytest.approx(
        {
            "computed": 4 * sum(sizes),
            "trained": 4 * sum(sizes),
            "optimizer": 8 * sum(sizes),
            "cached": 3 * 2 * description["num_kv_heads"] * 16 * 4,
            "states": 0,
        },
        abs=64,  # the optimizer counts its updates
    )
    assert (description["chat_template"], description["unsupported"]) == (True, {})
    assert "training" in description["supported"]
    words = len(character_tokenizer("0123456789+="))
    assert description["without_text"] == description["vocab_size"] - words > 0
    assert (
        f"{description['vocab_size']} ({description['without_text']} without text, never drawn)"
        in output
    )
    (query,) = (
        leaf for leaf in description["leaves"] if leaf["name"] == "layer/attention/query/kernel"
    )
    assert (query["axes"], query["shape"]) == (["embed", "heads", "head_dim"], [32, 4, 16])
    assert (query["count"], query["numbers"]) == (3, 3 * 32 * 64)
    assert len(description["leaves"]) == LEAVES[0]
    for words in ("adapters (LoRA)", "a chat template", "37,248", "head of its own"):
        assert words in output


HYBRID = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.slow
def test_experts_and_states_are_counted(show, tmp_path):
    """What a token passes of the experts, and what a sample keeps beside keys and values."""
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    code, output, description = show(tmp_path, "--dtype", "bfloat16")
    assert code == 0, output
    expert = 3 * 32 * 24
    kernels = sum(leaf["numbers"] for leaf in description["leaves"] if "kernel" in leaf["name"])
    assert description["active"] == kernels - 4 * (8 - 2) * expert + 32 * 64
    assert f"of which a token is multiplied by {description['active']:,}" in output
    matrices, inputs = 4 * 8 * 16 * 4, 3 * (2 * 2 * 8 + 4 * 16) * 2
    assert description["bytes"]["states"] == 3 * (matrices + inputs)
    assert "for the states of a sample" in output
    assert description["bytes"]["cached"] == 2 * 2 * 16 * 2


def test_a_gemma_without_a_tokenizer(saved, show):
    code, output, description = show(saved / "gemma3_text", "--dtype", "bfloat16")
    assert code == 0, output
    local, full = "window 5, theta 100", "full, theta 1000, frequencies x 0.25"
    assert description["layers"] == [local, local, full]
    assert f"3: 2 x ({local}), 1 x ({full})" in output
    assert description["tie_embeddings"] is True
    assert description["bytes"]["computed"] == 2 * description["parameters"]
    assert description["bytes"]["trained"] == 4 * description["parameters"]
    assert description["unsupported"] == dict.fromkeys(("sampling", "training"), "no tokenizer")
    assert description["end_tokens"] == {"2": ""}
    assert len(description["leaves"]) == LEAVES[1]
    assert "limit       none" in output


@pytest.mark.full
@pytest.mark.parametrize("with_index", [False, True])
def test_a_folder_without_weights_says_what_its_config_says(saved, show, tmp_path, with_index):
    """An index of weights in shards is fetched from the hub with the other texts."""
    shutil.copytree(saved / "llama", tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    if with_index:
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (tmp_path / "m" / weights.INDEX).write_text(json.dumps(index))
    code, output, description = show(tmp_path / "m")
    assert code == 0, output
    expected = show(saved / "llama")[2]
    changed = {"path": str(tmp_path / "m"), "stored": None}
    assert description == {**expected, **changed}


def test_keys_and_values_are_counted_in_the_dtype_that_they_are_kept_in(saved, show):
    _, output, wide = show(saved / "llama")
    assert "for the keys and values of a token, in float32" in output
    _, output, narrow = show(saved / "llama", "--set", "rollout.kv_cache_dtype=bfloat16")
    assert "for the keys and values of a token, in bfloat16" in output
    assert 2 * narrow["bytes"]["cached"] == wide["bytes"]["cached"]
    code, output, _ = show(
        *(saved / "llama", "--dtype", "bfloat16"), *("--set", "rollout.kv_cache_dtype=float32")
    )
    assert code == 2
    assert "take twice the memory and change no sample; leave it out" in output


@pytest.mark.full
@pytest.mark.slow
def test_bytes_are_those_of_a_device_of_a_mesh_that_is_not_here(saved, show):
    alone = show(saved / "gemma3_text")[2]["bytes"]
    code, output, description = show(
        saved / "gemma3_text", "--set", "mesh.fsdp=16", "mesh.tensor=2"
    )
    assert code == 2
    assert "is not divisible by 2 (mesh axes tensor)" in output  # 61 tokens
    code, output, description = show(saved / "gemma3_text", "--set", "mesh.fsdp=16", "mesh.data=64")
    assert code == 0, output
    assert description["mesh"] == {"data": 64, "fsdp": 16, "tensor": 1, "context": 1}
    # All but the norms, which every device has whole, is divided by 16.
    norms = sum(leaf["numbers"] for leaf in description["leaves"] if leaf["axes"] == ["norm"])
    expected = 4 * (norms + (description["parameters"] - norms) / 16)
    assert description["bytes"]["trained"] == expected < alone["trained"] / 10


def test_no_weight_is_read_and_it_takes_a_moment(saved, show, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(weights, "read_leaf", refuse)
    monkeypatch.setattr(weights, "_check_tied", refuse)
    begun = time.process_time()
    assert show(saved / "llama")[0] == 0
    assert time.process_time() - begun < 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lama"}, "'lama' is not built: did you mean 'llama'"),
        ({"hidden_size": 36}, "but config.json asks for"),
        ({"mystery": 1}, "mystery = 1: not built, and it may change"),
    ],
)
def test_a_wrong_folder_is_refused_with_what_is_wrong(saved, show, tmp_path, fields, message):
    folder = tmp_path / "wrong"
    shutil.copytree(saved / "llama", folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    code, output, description = show(folder)
    assert (code, description) == (2, None)
    assert message in output
    assert output.startswith("error: ")


def test_what_is_no_model_is_refused_in_one_line(saved, show, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "config.toml").write_text(MINIMAL)
    for arguments, message in {
        (tmp_path / "none",): "is no folder",
        (tmp_path / "a run",): f"jaxgrpo export '{tmp_path}/a run' OUT, and give OUT",
        (tmp_path / "empty",): "config.json does not exist",
        (saved / "llama", "--family", "mine"): 'model.family = "mine": expected a family',
        (saved / "llama", "--revision", "main"): "is a local path",
        (saved / "llama", "--dtype", "int8"): "invalid choice: 'int8'",
    }.items():
        code, output, _ = show(*arguments)
        assert code == 2
        assert message in output
