"""A tokenizer of characters with chat templates of several styles, and what samples talk to."""

from __future__ import annotations

import functools
import string
from typing import Any

from jaxgrpo.data.chat import Chat
from jaxgrpo.data.tasks.base import character_tokenizer

MARKS = ("<|start|>", "<|end|>", "<|call|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|head|>")
LETTERS = "".join(sorted(set(string.ascii_letters + string.digits + string.punctuation + " \n")))

CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}"
)
HEAD = "{% for t in tools or [] %}<|head|>{{ t.function.name }}\n{% endfor %}"
TEMPLATES = {
    # Every turn is closed by its own mark.
    "closed": HEAD + "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}" + CALLS
    + "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    # A turn is closed by the mark of the next one's role, as GLM's.
    "open": HEAD + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + CALLS
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    # Calls end with another mark than words, as GPT-OSS's.
    "called": HEAD + "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}" + CALLS
    + "{% if m.tool_calls %}<|call|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    # The last turn has an empty thought in front, which earlier ones have not, as Qwen3's.
    "thinking": HEAD + "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    + CALLS + "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    # It writes no calls.
    "deaf": "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    # It ends turns with text that ends no sample.
    "endless": "{% for m in messages %}{{ m.role }}: {{ m.content }}" + CALLS + "\n{% endfor %}",
}  # fmt: skip
STOPS = {
    "closed": ["<|end|>"],
    "open": ["<|user|>", "<|tool|>"],
    "called": ["<|end|>", "<|call|>"],
    "thinking": ["<|end|>"],
    "deaf": ["<|end|>"],
    "endless": ["<|end|>"],
}


@functools.cache
def tokenizer() -> Any:
    """One token for each character and mark."""
    return character_tokenizer([*LETTERS, *MARKS])


def chat(style: str | None = "closed") -> Chat:
    template = None if style is None else TEMPLATES[style]
    return Chat(tokenizer(), template, f"the template {style}", None, {})


def stop_tokens(style: str) -> frozenset[int]:
    return frozenset(tokenizer().convert_tokens_to_ids(STOPS[style]))


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def text(tokens: Any) -> str:
    return tokenizer().decode(tokens)
