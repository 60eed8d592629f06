"""GGUF files of small models, written by the gguf package as llama.cpp's converter writes them.

The rules of the format are said here a second time, row by row and key by key: what reads files in
jaxgrpo shares no code with it.
"""

from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import TokenType
from tokenizers import pre_tokenizers

NAMES: dict[str, str] = {"gemma3_text": "gemma3"}  # the others are called as their model_type
ENDS = {"weight": ".weight", "bias": ".bias"}


SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(
        **SIZES, head_dim=16, rope_parameters=_rope(5e5), rms_norm_eps=1e-5
    ),
    "llama tied": transformers.LlamaConfig(
        **SIZES, head_dim=16, tie_word_embeddings=True, attention_bias=True
    ),
    "qwen2": transformers.Qwen2Config(**SIZES, rope_parameters=_rope(1e6)),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "gemma3": transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7},
        head_dim=32,
        sliding_window=8,
        query_pre_attn_scalar=32,
        pad_token_id=0,
    ),
}


def random_model(config, as_kind=None):
    """A random model of transformers, each tensor of which differs from what it begins with.

    Args:
      as_kind: its matrices hold what is left of them in this type.
    """
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    steps = 2.0**-12  # so that a norm's weight is the same after 1 was added and taken off
    with torch.no_grad():
        for weight in model.parameters():
            values = torch.randn(weight.shape) * 0.1
            values = (values / steps).round() * steps
            if as_kind is not None and weight.ndim > 1:
                blocks = gguf.quants.quantize(values.numpy(), as_kind)
                values = torch.tensor(gguf.quants.dequantize(blocks, as_kind))
            weight.copy_(values)
    return model.eval()


def arrays(model):
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def plain_tokenizer(writer):
    """Of bytes, without merges: enough where tokens are not what is tested."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: k for k, letter in enumerate(letters)} | {"<|end|>": len(letters)}
    kinds = {len(letters): TokenType.CONTROL}
    byte_level("gpt-2", vocab, [], kinds, [len(letters)])(writer)


def write(path, config: Any, state, tokenizer=None, kind=Kind.F32, more=(), changes=None):
    """Writes one file.

    Args:
      config: of transformers.
      state: Hugging Face's name -> array in float32.
      tokenizer: a function of the writer.
      kind: of matrices; vectors stay in float32.
      more: functions of the writer.
      changes: stored name -> array or None (left out); may add names.
    """
    architecture = str(NAMES.get(config.model_type, config.model_type))
    writer = gguf.GGUFWriter(path, architecture)
    sizes(writer, config)
    for add in (*((tokenizer,) if tokenizer else ()), *more):
        add(writer)
    tensors = dict(stored(config, state)) | (changes or {})
    for name, array in tensors.items():
        if array is None:
            continue
        of = kind if array.ndim > 1 else Kind.F32
        data = array if of is Kind.F32 else gguf.quants.quantize(array, of)
        writer.add_tensor(name, data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sizes(writer, config: Any):
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if config.model_type in ("qwen3", "gemma3_text"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)


def stored(config: Any, state):
    """(GGUF's name, array) of each tensor of a model."""
    architecture = str(NAMES.get(config.model_type, config.model_type))
    (number,) = (key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, array in state.items():
        module, end = name.rsplit(".", 1)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "llama" and module.endswith(("q_proj", "k_proj")):
            is_query = module.endswith("q_proj")
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            array = as_pairs(array, heads)
        if config.model_type == "gemma3_text" and module.endswith("norm"):
            array = array + np.float32(1)
        yield f"{table.get_name(module)}{ENDS[end]}", array


def as_pairs(array, heads):
    """Rows k and k + half of each head next to each other, as llama.cpp turns them."""
    rows = np.empty_like(array)
    size = len(array) // heads
    for head in range(heads):
        for k in range(size // 2):
            rows[head * size + 2 * k] = array[head * size + k]
            rows[head * size + 2 * k + 1] = array[head * size + k + size // 2]
    return rows


def byte_level(pre, vocab, merges, kinds, ends, begins=None):
    """A tokenizer of bytes: vocab is token -> id, kinds id -> TokenType, ends the end tokens."""

    def add(writer):
        texts = sorted(vocab, key=vocab.get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(texts)
        writer.add_token_types([kinds.get(vocab[text], TokenType.NORMAL) for text in texts])
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_eos_token_id(ends[0])
        if len(ends) > 1:
            writer.add_eot_token_id(ends[1])
        if begins is not None:
            writer.add_bos_token_id(begins)
            writer.add_add_bos_token(True)

    return add


def sentencepiece(texts, scores, kinds, prefix):
    """A tokenizer with scores: <pad>, <eos>, <bos>, <unk> are its first tokens."""

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(texts)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_add_space_prefix(prefix)
        writer.add_pad_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_bos_token_id(2)
        writer.add_unk_token_id(3)

    return add
