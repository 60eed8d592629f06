"""The tokenizer of a GGUF file gives the ids and texts of the one that it was written from."""

import json
import random
from typing import Any

import gguf_files
import pytest
import transformers
from gguf import TokenType
from gguf_files import CONFIGS, arrays, plain_tokenizer, random_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers.convert_slow_tokenizer import TikTokenConverter

from jaxgrpo.models.gguf.importing import import_gguf
from jaxgrpo.models.hf.folders import read_tokenizer

WORDS = (
    *("The", "price", "of", "1234567", "apples", "is", "$3.50,", "isn't", "it?", "We'll", "see:"),
    *("naïve", "café", "Ünïcode", "straße.", "日本語のテキスト", "и", "кириллица", "🙂👍🏽"),
    *("def", "f(x):\n\treturn", "x", "**", "2\n\n\n", "", "indented\r\nline", "end"),
)


def texts():
    """200 texts of words, digits, spaces and whatever else Unicode has."""
    draw = random.Random(0)
    spaces = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000"]
    odd = ["e\u0301", "\u1e9b\u0323", "\u200d", "\ufeff", "½", "Ⅻ", "٣", "'LL", "'s", "<|im", "▁"]
    samples = ["", " ", "1234567890", "  two", "three   ", *spaces]
    while len(samples) < 200:
        pieces = [
            draw.choice(draw.choice([WORDS, spaces, odd, [str(draw.randrange(10**9))]]))
            for _ in range(draw.randrange(1, 20))
        ]
        pieces.append(chr(draw.choice([*range(0x20, 0x2FF), *range(0x1F300, 0x1F700)])))
        samples.append("".join(pieces))
    return samples


def trained(pre_tokenizer, special):
    """(vocab, merges) of bytes, learned from our texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts() * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


BYTES_ALONE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def qwen2():
    vocab, merges = trained(BYTES_ALONE, SPECIAL)
    joins: Any = merges
    theirs: Any = transformers.Qwen2Tokenizer(vocab=vocab, merges=joins, eos_token="<|im_end|>")
    theirs.add_tokens([AddedToken("<think>", normalized=False)])
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return theirs, vocab, merges, {"pre": "qwen2"}


def llama3():
    vocab, merges = trained(BYTES_ALONE, SPECIAL)
    pattern = TikTokenConverter().pattern
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES_ALONE]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    theirs: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    theirs.add_tokens([AddedToken("<think>", normalized=False)])
    return theirs, vocab, merges, {"pre": "llama-bpe", "begins": 0}


def smollm():
    digits = pre_tokenizers.Digits(individual_digits=True)
    parts = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    vocab, merges = trained(parts, SPECIAL)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer, backend.decoder = parts, decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    theirs: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    theirs.add_tokens([AddedToken("<think>", normalized=False)])
    return theirs, vocab, merges, {"pre": "smollm"}


@pytest.mark.parametrize("make", [qwen2, llama3, smollm])
def test_byte_level_tokenizers_come_back_with_the_same_ids_of_200_texts(make, tmp_path):
    theirs, vocab, merges, options = make()
    vocab = {**vocab, "<think>": len(vocab), "[PAD601]": len(vocab) + 1}
    kinds = dict.fromkeys(range(len(SPECIAL)), TokenType.CONTROL)
    kinds |= {vocab["<think>"]: TokenType.USER_DEFINED, vocab["[PAD601]"]: TokenType.UNUSED}
    add = gguf_files.byte_level(
        vocab=vocab, merges=merges, kinds=kinds, ends=[vocab["<|im_end|>"], 0], **options
    )
    config = CONFIGS["llama"]
    gguf_files.write(tmp_path / "m.gguf", config, arrays(random_model(config)), add)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    ours = read_tokenizer(tmp_path / "out")
    assert len(texts()) == 200
    for text in [*texts(), "<|im_start|>user\nhi<|im_end|>", " <think> so</think>"]:
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert len(ours) == len(theirs)
    assert ours.eos_token == "<|im_end|>"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [vocab["<|im_end|>"], 0]


def test_a_tokenizer_with_scores_comes_back_with_the_same_ids_of_200_texts(tmp_path):
    """Gemma's: transformers' own class on the merges, the file with their ranks as scores."""
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\n\n"]
    byte = [f"<0x{k:02X}>" for k in range(256)]
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in texts()], trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    letters = [text for text in learned["vocab"] if len(text) == 1]
    merges = [tuple(pair) for pair in learned["merges"]]
    joined = list(dict.fromkeys(left + right for left, right in merges))
    joined = [text for text in joined if text not in first]
    names = [*first, *byte, *joined, *letters]
    vocab = {text: k for k, text in enumerate(names)}
    # Each token that can be joined, by its rank; of several ways to join it, by the pieces' ids.
    ranks = {text: -float(k) for k, text in enumerate(joined)}
    every = [
        (left, right)
        for text in ranks
        for left, right in sorted(
            ((text[:k], text[k:]) for k in range(1, len(text))),
            key=lambda pair: (-len(pair[0]), -len(pair[1])),
        )
        if left in vocab and right in vocab
    ]
    joins: Any = every
    theirs: Any = transformers.GemmaTokenizer(vocab=vocab, merges=joins)
    theirs.add_tokens([AddedToken("\n\n", normalized=False)])
    scores = [ranks.get(text, -1e6) for text in names]
    kinds = [TokenType.CONTROL] * 5 + [TokenType.USER_DEFINED] + [TokenType.BYTE] * 256
    kinds[3] = TokenType.UNKNOWN
    kinds += [TokenType.NORMAL] * (len(names) - len(kinds))
    config = CONFIGS["gemma3"]
    gguf_files.write(
        tmp_path / "m.gguf",
        config,
        arrays(random_model(config)),
        gguf_files.sentencepiece(names, scores, kinds, prefix=False),
    )
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    ours = read_tokenizer(tmp_path / "out")
    for text in [*texts(), "<bos>hi<eos>", "a\n\nb"]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours(text, add_special_tokens=False)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours("hi")["input_ids"][0] == 2  # <bos>
    assert (ours.pad_token, ours.eos_token, ours.unk_token) == ("<pad>", "<eos>", "<unk>")


def test_chat_templates_and_how_to_draw_are_kept(tmp_path):
    def add(writer):
        writer.add_chat_template(
            [
                {"name": "default", "template": "A {{ messages }}"},
                {"name": "tool_use", "template": "B {{ tools }}"},
            ]
        )
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_string("general.license", "apache-2.0")

    config = CONFIGS["qwen2"]
    state = arrays(random_model(config))
    gguf_files.write(tmp_path / "m.gguf", config, state, plain_tokenizer, more=[add])
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    template = read_tokenizer(tmp_path / "out").chat_template
    assert template == {"default": "A {{ messages }}", "tool_use": "B {{ tools }}"}
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    drawn = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    assert {name: generation[name] for name in drawn} == drawn
    assert "license: apache-2.0" in (tmp_path / "out" / "README.md").read_text()
