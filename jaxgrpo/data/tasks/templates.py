"""Chat templates of the built-in tasks that have turns, and the words that they are made of."""

from __future__ import annotations

MARKS = ("<user>", "<assistant>")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

TOOL_MARKS = ("<tools>", *MARKS, "<tool>")
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Calls in the format of Hermes and Qwen."""
