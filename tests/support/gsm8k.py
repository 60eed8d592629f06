"""GSM8K for tests: its rows, a tokenizer trained on them, a random Qwen3 checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"
"""The data set beside the checkout; where it is absent, rows are written in its format."""

PAD, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 512
QUESTION = (
    "{name} sold {first} clips in April and {second} times as many in May. How many clips did "
    "{name} sell altogether in April and May?"
)
ANSWER = (
    "{name} sold {first}*{second} = <<{first}*{second}={product}>>{product} clips in May.\n"
    "{name} sold {first}+{product} = <<{first}+{product}={total}>>{total} clips altogether.\n"
    "#### {total:,}"
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""In the format of Qwen3's: messages between two tokens, thinking switched off by an empty one."""


def rows(split: str = "train", count: int | None = None) -> list[dict[str, str]]:
    """The first rows of a split, each with `question` and `answer`, the answer after "#### "."""
    file = DATA / f"{split}.jsonl"
    if not file.is_file():
        return _written(split)[:count]
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line) for line in lines]


def source(folder: Path, split: str = "train", count: int | None = None) -> Path:
    """Those rows as a .jsonl file in a folder."""
    file = folder / f"{split}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(split, count)))
    return file


def tokenizer(folder: Path) -> Any:
    """A byte-level tokenizer trained on the text, saved into a folder, with a chat template.

    Padding is <|endoftext|>, the end of a turn <|im_end|>, as for Qwen3.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        special_tokens=[PAD, BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (row[column] for row in rows(count=1000) for column in ("question", "answer"))
    words.train_from_iterator(texts, trainer)
    words.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE
    )
    fast_tokenizer.save_pretrained(folder)
    return fast_tokenizer


def checkpoint(folder: Path, **sizes: int) -> Any:
    """A random Qwen3 model with that tokenizer in a folder, by transformers and PyTorch.

    Args:
      sizes: fields of Qwen3Config in the place of the smallest.
    Returns: the PyTorch model.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    words = tokenizer(folder)
    smallest = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
    }
    torch.manual_seed(0)
    tokens = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    config = Qwen3Config(**{**smallest, **sizes}, tie_word_embeddings=True, **tokens)
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def _written(split: str) -> list[dict[str, str]]:
    """Problems of one kind with other numbers and names, none of the train split in the test's."""
    names = ("Natalia", "Weng", "Betty", "Julie", "James", "Mark", "Albert", "Ken")
    problems = []
    for place in range(2400):
        first, second = 12 + place % 300, 2 + place // 300
        if (place % 6 == 0) != (split == "test"):
            continue
        product = first * second
        values = {
            "name": names[place % len(names)],
            "first": first,
            "second": second,
            "product": product,
            "total": first + product,
        }
        problems.append({"question": QUESTION.format(**values), "answer": ANSWER.format(**values)})
    return problems
