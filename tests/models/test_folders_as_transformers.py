"""Folders that are read as transformers reads them: end tokens, tensors, tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import whole_logits
from safetensors.numpy import load_file, save_file
from transformers import LogitsProcessor, LogitsProcessorList, Qwen2Config, Qwen2ForCausalLM

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import prompts
from jaxgrpo.data.chat import make_chat
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models.decoder import build
from jaxgrpo.models.hf import folders, texts

TOKENIZER: Any = character_tokenizer("0123456789+=")
VOCABULARY = len(TOKENIZER)
END = TOKENIZER.eos_token_id
OTHER_END = TOKENIZER.convert_tokens_to_ids("7")
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, size=(2, 6))


@pytest.fixture
def folder(tmp_path):
    """A tied model that transformers saved, whose config.json has a second end token."""
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "eos_token_id": [END, OTHER_END],
    }
    config = Qwen2Config(**fields)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    return tmp_path


class Always(LogitsProcessor):
    """Leaves one token to draw."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores):
        scores = torch.full_like(scores, -torch.inf)
        scores[:, self.token] = 0.0
        return scores


def ends_at(folder: Path, token: int) -> bool:
    """Whether transformers' generate ends at a token."""
    model: Any = Qwen2ForCausalLM.from_pretrained(folder)
    only = LogitsProcessorList([Always(token)])
    drawn = model.generate(torch.tensor([[5]]), max_new_tokens=3, logits_processor=only)
    return drawn.shape[1] == 2


@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        (None, (END, OTHER_END)),
        ({"do_sample": True}, (END,)),
        ({"eos_token_id": None}, (END,)),
        ({"eos_token_id": OTHER_END}, (END, OTHER_END)),
    ],
)
def test_samples_end_where_generate_ends(folder, generation, ends):
    file = folder / "generation_config.json"
    file.unlink()
    if generation is not None:
        file.write_text(json.dumps(generation))
    assert folders.read_end_tokens(folder, TOKENIZER, VOCABULARY) == ends
    assert ends_at(folder, OTHER_END) == (OTHER_END in ends)


def assert_logits_are_theirs(folder):
    model = build(folders.read_config(folder))
    ours = whole_logits.our_logits(model, folders.read_params(folder, model), TOKENS)
    theirs = whole_logits.torch_logits(Qwen2ForCausalLM.from_pretrained(folder).eval(), TOKENS)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    folders.read_dtypes(folder, model)


def test_tensors_computed_from_the_config_are_not_read(folder):
    file = folder / "model.safetensors"
    frequency = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.full(2, np.nan, np.float32)}
    save_file(load_file(file) | frequency, file, metadata={"format": "pt"})
    assert_logits_are_theirs(folder)


def test_a_tied_model_may_hold_its_embedding_as_the_head_only(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    assert_logits_are_theirs(folder)


def test_a_single_file_goes_before_the_index_of_older_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    save_file({name: 2 * array for name, array in tensors.items()}, folder / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_logits_are_theirs(folder)


def test_a_tensor_that_would_count_is_still_refused(folder):
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"v_head.summary.weight": np.zeros(8, np.float32)}, file)
    with pytest.raises(InputError, match=r"unknown: v_head\.summary\.weight"):
        folders.read_params(folder, build(folders.read_config(folder)))


def test_a_token_without_embedding_is_refused_only_where_a_text_uses_it():
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    chat = make_chat(tokenizer, "none", None, {}, "m")._replace(vocab_size=VOCABULARY)
    assert len(prompts.encode([{"prompt": "1+1="}], chat)[0]) == 4
    message = rf"row 1: the prompt has the token {VOCABULARY}, '<image>', .*vocab_size = "
    with pytest.raises(InputError, match=message):
        prompts.encode([{"prompt": "1+1="}, {"prompt": "1<image>"}], chat)


@pytest.mark.parametrize(
    "fields", [{}, {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}]
)
def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path, fields):
    """transformers builds it of special tokens alone, with ids that are not the model's."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    if fields:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match=r"Qwen2Tokenizer has no vocabulary: .*tokenizer\.json"):
        folders.read_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    assert folders.read_tokenizer(tmp_path)("abb")["input_ids"] == [2, 1]


@pytest.mark.parametrize("name", ["tokenizer.model.v3", "qwen.tiktoken"])
def test_a_vocabulary_that_transformers_does_not_read_is_none(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / name).write_text("YQ== 0")
    with pytest.raises(InputError, match="LlamaTokenizer has no vocabulary"):
        folders.read_tokenizer(tmp_path)


def test_the_tokenizer_of_mistral_common_is_replaced_by_that_of_the_folder_s_files(
    tmp_path, monkeypatch
):
    """transformers prefers it wherever it is installed; its vocabulary lacks parts of characters,
    which then count as tokens without text."""
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    plain = folders.read_tokenizer(tmp_path)

    class MistralCommonBackend:
        def get_vocab(self):
            return {"a": 0}

    def preferred(*arguments, **options):
        return MistralCommonBackend()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", preferred)
    tokenizer = folders.read_tokenizer(tmp_path)
    assert tokenizer.get_vocab() == plain.get_vocab()
    assert tokenizer.backend_tokenizer.to_str() == plain.backend_tokenizer.to_str()
    assert tokenizer.chat_template == plain.chat_template


def test_tokens_that_are_not_those_of_the_file_are_reported_with_what_takes_them(tmp_path):
    """A class of transformers that divides texts by its own rules, though the file has others."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    letters = {text: number for number, text in enumerate("0123456789Ġabcdeit'sĊ")}
    numbers = {"12": len(letters), "34": len(letters) + 1}
    merges = [(text[0], text[1]) for text in numbers]
    full = Tokenizer(models.BPE(vocab=letters | numbers, merges=merges))
    signs = pre_tokenizers.Split(Regex("."), behavior="isolated")
    full.pre_tokenizer = pre_tokenizers.Sequence(
        [signs, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    full.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = folders.read_tokenizer(tmp_path)
    assert tokenizer("12")["input_ids"] != full.encode("12").ids
    line = texts.tokenizer_line(tmp_path, tokenizer)
    assert "rules of GPT2Tokenizer" in line
    assert "PreTrainedTokenizerFast" in line
    file.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer = folders.read_tokenizer(tmp_path)
    assert tokenizer("12")["input_ids"] == full.encode("12").ids
    assert texts.tokenizer_line(tmp_path, tokenizer) == ""


def test_tokens_behind_a_special_one_are_compared_with_those_of_the_file_too(tmp_path):
    """There LlamaTokenizer writes no space in front of a text, where older files say so."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers

    vocabulary = {text: number for number, text in enumerate(("</s>", "▁", "a", "b", "▁a", "▁b"))}
    merges = [("▁", "a"), ("▁", "b")]
    full = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    full.normalizer = normalizers.Sequence(parts)
    full.add_special_tokens([AddedToken("</s>", normalized=False)])
    full.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    settings = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert full.encode("a</s>b").ids == [4, 0, 5]
    tokenizer = folders.read_tokenizer(tmp_path)
    assert tokenizer("a</s>b", add_special_tokens=False)["input_ids"] == [4, 0, 3]
    line = texts.tokenizer_line(tmp_path, tokenizer)
    assert line.startswith("the tokens of 'a</s>b' are not those of tokenizer.json")
