"""A book in which a tool looks up what nobody can know, and a program that plays it.

`books_taskset` is the same for verifiers. Nothing here needs more than Python.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

BOOK = {str(key): str((7 * key + 3) % 10) for key in range(10)}
TOOL = {
    "name": "look_up",
    "description": "Looks a key up.",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
}


def look_up(key: str) -> str:
    return BOOK.get(key, "=")


def agent(base_url, idx):
    """As verifiers plays task `idx`."""
    messages: list[Any] = [{"role": "user", "content": f"{idx}="}]
    while True:
        fields = {"messages": messages, "tools": [{"type": "function", "function": TOOL}]}
        request = urllib.request.Request(
            f"{base_url}/chat/completions", json.dumps(fields).encode()
        )
        with urllib.request.urlopen(request) as answer:
            message = json.load(answer)["choices"][0]["message"]
        if not message["tool_calls"]:
            return float((message["content"] or "").strip() == BOOK[str(idx)])
        messages.append(message)
        for call in message["tool_calls"]:
            words = look_up(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": words})
