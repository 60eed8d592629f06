"""`jaxgrpo import`: models written by the gguf package come back as they were, or are refused."""

import json

import gguf
import gguf_files
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf_files import CONFIGS, SIZES, arrays, plain_tokenizer, random_model
from quick import full_but

import jaxgrpo as jg
from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.models.gguf import files
from jaxgrpo.models.gguf.importing import import_gguf
from jaxgrpo.models.hf.folders import load_model

IDS = torch.tensor([[5, 300, 17, 2, 9, 31, 250, 8, 77, 120, 3, 66], [1, 2, 3, 4] * 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    full_but(("llama", "gemma3"), CONFIGS),
)
def test_a_model_comes_back_bit_for_bit_and_computes_the_same(name, tmp_path):
    config = CONFIGS[name]
    model = random_model(config)
    gguf_files.write(tmp_path / "m.gguf", config, arrays(model), plain_tokenizer)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    ).eval()
    assert type(back) is type(model)
    state = back.state_dict()
    assert state.keys() == model.state_dict().keys()
    for tensor, value in model.state_dict().items():
        np.testing.assert_array_equal(state[tensor].numpy(), value.numpy(), err_msg=tensor)
    with torch.no_grad():
        expected = model(IDS).logits.numpy()
        np.testing.assert_array_equal(back(IDS).logits.numpy(), expected)
    ours, params = load_model(tmp_path / "out")
    logits = jg.logits(ours, params, IDS.numpy(), np.ones(IDS.shape, bool))
    np.testing.assert_allclose(np.asarray(logits), expected, atol=2e-4)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0])
def test_what_is_left_of_a_quantised_model_is_read_exactly(kind, tmp_path):
    config = CONFIGS["llama"]
    model = random_model(config, kind)
    gguf_files.write(tmp_path / "m.gguf", config, arrays(model), plain_tokenizer, kind)
    report = import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    dtype = {Kind.F16: "float16"}.get(kind, "float32")  # bfloat16 cannot hold the norms of this one
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert f"{kind.name}" in report["tensors"]
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    ).state_dict()
    for tensor, value in arrays(model).items():
        # Halves are read as they are; a block's numbers are quantised once more here.
        width = np.abs(value).max() if kind not in (Kind.F16, Kind.BF16) else 0
        np.testing.assert_allclose(back[tensor].numpy(), value, rtol=0, atol=1e-3 * width)


@pytest.mark.slow
def test_a_model_in_bfloat16_stays_in_bfloat16(tmp_path):
    for name in ("qwen2", "gemma3"):
        model = random_model(CONFIGS[name])
        state = {key: value.to(torch.bfloat16).float() for key, value in model.state_dict().items()}
        state = {key: value.numpy() for key, value in state.items()}
        path = tmp_path / f"{name}.gguf"
        gguf_files.write(path, CONFIGS[name], state, plain_tokenizer, Kind.BF16)
        import_gguf(path, tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"
        back = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.bfloat16
        ).state_dict()
        for key, value in state.items():
            np.testing.assert_array_equal(back[key].float().numpy(), value, err_msg=key)


def make_block(kind, random_state):
    """One block of 256 numbers: its bytes, and the numbers by the definition of the type."""
    scale, least = np.float16(0.03), np.float16(0.01)
    if kind is Kind.Q6_K:  # 4 low bits, 2 high bits, 16 scales of 16 numbers each, one scale
        low = random_state.integers(0, 256, 128, np.uint8)
        high = random_state.integers(0, 256, 64, np.uint8)
        scales = random_state.integers(-128, 128, 16).astype(np.int8)
        numbers = np.empty(256)
        for k in range(256):
            half, inside = divmod(k, 128)
            quarter, place = divmod(inside, 32)
            nibble = low[64 * half + 32 * (quarter % 2) + place] >> (4 * (quarter // 2)) & 15
            top = high[32 * half + place] >> (2 * quarter) & 3
            numbers[k] = float(scale) * scales[k // 16] * (int(nibble | top << 4) - 32)
        data = np.concatenate([low, high, scales.view(np.uint8), np.array([scale]).view(np.uint8)])
        return data, numbers
    scales = random_state.integers(0, 256, 12, np.uint8)
    quants = random_state.integers(0, 256, 128, np.uint8)
    numbers = np.empty(256)
    for k in range(256):
        part, place = divmod(k, 32)
        if part < 4:
            by, minus = scales[part] & 63, scales[part + 4] & 63
        else:
            by = scales[part + 4] & 15 | scales[part - 4] >> 6 << 4
            minus = scales[part + 4] >> 4 | scales[part] >> 6 << 4
        nibble = quants[32 * (part // 2) + place] >> (4 * (part % 2)) & 15
        numbers[k] = float(scale) * int(by) * int(nibble) - float(least) * int(minus)
    header = np.array([scale, least], np.float16).view(np.uint8)
    return np.concatenate([header, scales, quants]), numbers


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_blocks_of_256_are_read_by_their_definition(kind, tmp_path):
    random_state = np.random.default_rng(0)
    blocks = [make_block(kind, random_state) for _ in range(6)]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    data = np.stack([data for data, _ in blocks]).reshape(3, -1)
    writer.add_tensor("matrix", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = files.read(tmp_path / "m.gguf").tensors["matrix"]
    assert tensor.shape == (3, 512)
    expected = np.stack([numbers for _, numbers in blocks]).reshape(3, 512)
    np.testing.assert_allclose(tensor.read(), expected, rtol=1e-5, atol=1e-6)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_the_scaling_of_llama_3_is_found_in_its_divisors(tmp_path):
    sizes = {**SIZES, "max_position_embeddings": 131_072}
    config = transformers.LlamaConfig(
        **sizes, head_dim=16, rope_parameters={"rope_theta": 5e5, **LLAMA3}
    )
    model = random_model(config)
    plain = 1 / 5e5 ** (np.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    written = (tmp_path / "m.gguf", config, arrays(model), plain_tokenizer)
    gguf_files.write(*written, changes={"rope_freqs.weight": divisors})
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"] == LLAMA3
    gguf_files.write(*written, changes={"rope_freqs.weight": divisors * 1.1})
    with pytest.raises(InputError, match=r"rope_freqs\.weight: expected the divisors of Llama 3"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "other")


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("linear", {"rope_type": "linear", "factor": 8.0}),
        (None, {"rope_type": "linear", "factor": 8.0}),  # as llama.cpp reads it
        ("yarn", {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}),
    ],
)
def test_scaled_positions_are_kept(kind, written, tmp_path):
    def add(writer):
        if kind is not None:
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(8.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(64)

    config = CONFIGS["qwen3"]
    state = arrays(random_model(config))
    gguf_files.write(tmp_path / "m.gguf", config, state, plain_tokenizer, more=[add])
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"] == written


# What is refused.


def number(key, value):
    return lambda writer: writer.add_uint32(key, value)


ODD = {
    "missing": ({"blk.1.attn_q.weight": None}, [], r"missing: blk\.1\.attn_q\.weight$"),
    "unknown": (
        {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)},
        [],
        r"unknown: blk\.0\.ffn_gate_inp\.weight$",
    ),
    "shape": (
        {"blk.2.ffn_up.weight": np.ones((32, 64), np.float32)},
        [],
        r"tensor blk\.2\.ffn_up\.weight has shape \(32, 64\), .* ask for \(96, 64\)",
    ),
    "not finite": (
        {"output_norm.weight": np.full(64, np.nan, np.float32)},
        [],
        r"tensor output_norm\.weight holds inf or NaN",
    ),
    "no embedding": ({"token_embd.weight": None}, [], r"the tensor token_embd\.weight: missing"),
    "experts": ({}, [number("llama.expert_count", 8)], r"llama\.expert_count = 8: not read"),
    "reads on": (
        {},
        [lambda writer: writer.add_causal_attention(False)],
        r"llama\.attention\.causal = False: a policy reads what is before",
    ),
    "key": (
        {},
        [number("llama.attention.value_length", 8)],
        r"llama\.attention\.value_length = 8: expected 16, the size of a head",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_missing_unknown_or_of_another_shape_is_named_and_nothing_is_written(
    name, tmp_path
):
    changes, more, message = ODD[name]
    config = CONFIGS["llama"]
    gguf_files.write(
        *(tmp_path / "m.gguf", config, arrays(random_model(config)), plain_tokenizer),
        more=more,
        changes=changes,
    )
    with pytest.raises(InputError, match=message) as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert "\n" not in str(caught.value).strip() or "cannot be imported" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_files_that_are_none_or_end_early_are_refused(tmp_path):
    config = CONFIGS["llama"]
    path = tmp_path / "m.gguf"
    gguf_files.write(path, config, arrays(random_model(config)), plain_tokenizer)
    content = path.read_bytes()
    for size in (0, 3, 100, len(content) // 3, len(content) - 100):
        path.write_bytes(content[:size])
        with pytest.raises(InputError, match=r"m\.gguf.*is no GGUF file that can be read"):
            import_gguf(path, tmp_path / "out")
    path.write_bytes(b"GGML" + content[4:])
    with pytest.raises(InputError, match="magic invalid"):
        import_gguf(path, tmp_path / "out")
    with pytest.raises(InputError, match=r"none\.gguf is no file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "out")


def test_a_list_longer_than_its_file_is_refused_at_once(tmp_path):
    """gguf's own reader makes an entry for each of the 2^40, until no memory is left."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_array("general.tags", [1] * 77)
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file):
        part()
    writer.close()
    content = path.read_bytes()
    count = (77).to_bytes(8, "little")
    assert content.count(count) == 1
    path.write_bytes(content.replace(count, (2**40).to_bytes(8, "little")))
    with pytest.raises(InputError, match=r"no GGUF file .* bytes, and announces \d+ or more"):
        files.read(path)


def test_other_architectures_and_tokenizers_are_refused_by_name(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen35")  # no slip of the pen for qwen3
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InputError, match=r"general\.architecture = 'qwen35' is not read, known"):
        import_gguf(path, tmp_path / "out")
    config = CONFIGS["llama"]
    state = arrays(random_model(config))
    add = gguf_files.byte_level("tekken", {"a": 0}, [], {}, [0])
    gguf_files.write(path, config, state, add)
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.pre = 'tekken' is not read"):
        import_gguf(path, tmp_path / "out")
    gguf_files.write(path, config, state)
    with pytest.raises(InputError, match="take a file with its tokenizer"):
        import_gguf(path, tmp_path / "out")


def test_only_what_was_imported_is_replaced(tmp_path):
    config = CONFIGS["qwen2"]
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    gguf_files.write(path, config, arrays(random_model(config)), plain_tokenizer)
    import_gguf(path, out)
    import_gguf(path, out)
    (out / "README.md").unlink()
    with pytest.raises(InputError, match="Imported with jaxgrpo"):
        import_gguf(path, out)
    import_gguf(path, out, overwrite=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"notes\.txt"):
        import_gguf(path, out, overwrite=True)


def test_what_was_read_is_printed_as_words_and_as_numbers(tmp_path, capsys):
    config = CONFIGS["qwen3"]
    model = random_model(config)
    gguf_files.write(tmp_path / "m.gguf", config, arrays(model), plain_tokenizer)
    words = ["import", str(tmp_path / "m.gguf"), str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    numbers = model.num_parameters()
    assert (document["family"], document["parameters"], document["out"]) == (
        "qwen3",
        numbers,
        words[2],
    )
    assert sum(document["tensors"].values()) == len([*model.parameters()])
    assert document["chat_template"] in (True, False)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert f"{document['model']} (qwen3)" in shown
    assert f"{numbers:,}" in shown
    assert f"{document['tokens']} tokens, {document['tokenizer']}" in shown
    for kind, count in document["tensors"].items():
        assert f"{count} {kind}" in shown


def test_a_model_in_parts_is_read_whole(tmp_path):
    config = CONFIGS["qwen3"]
    model = random_model(config)
    names = [tmp_path / f"m-0000{k}-of-00002.gguf" for k in (1, 2)]
    state = [*arrays(model).items()]
    half = len(state) // 2
    for path, part in zip(names, (state[:half], state[half:]), strict=True):
        gguf_files.write(path, config, dict(part), plain_tokenizer)
    import_gguf(names[1], tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for tensor, value in model.state_dict().items():
        np.testing.assert_array_equal(back[tensor].numpy(), value.numpy())
    names[0].unlink()
    with pytest.raises(InputError, match=r"m-00001-of-00002\.gguf is not beside it"):
        import_gguf(names[1], tmp_path / "other")


def test_where_a_folder_is_expected_a_gguf_file_is_told_how_to_become_one(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"m\.gguf' is a GGUF file: jaxgrpo import .*m\.gguf OUT"):
        jg.load_model(str(path))
    with pytest.raises(InputError, match=r"config\.json does not exist.*jaxgrpo import .*m\.gguf"):
        jg.load_model(tmp_path)


def test_a_file_in_another_byte_order_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InputError, match="byte order of other machines"):
        import_gguf(path, tmp_path / "out")


@pytest.mark.parametrize("windowed", [[1, 0, 1, 1, 0, 1, 0], [1, 0]])
def test_a_list_says_which_layers_of_gemma_3_have_the_window(windowed, tmp_path):
    def add(writer):
        writer.add_sliding_window_pattern([bool(has_window) for has_window in windowed])

    config = CONFIGS["gemma3"]
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    gguf_files.write(path, config, arrays(random_model(config)), plain_tokenizer, more=[add])
    if len(windowed) != config.num_hidden_layers:
        with pytest.raises(InputError, match="expected a flag for each of 7 layers"):
            import_gguf(path, out)
        return
    import_gguf(path, out)
    types = json.loads((out / "config.json").read_text())["layer_types"]
    assert [name == "sliding_attention" for name in types] == [
        bool(has_window) for has_window in windowed
    ]
