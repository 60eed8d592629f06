"""Calls of tools in what a model wrote: one parser for each way of writing them.

A parser takes the text of a turn, without the token that ended it, and gives what was said beside
calls, and the calls in their order. A call that cannot be read is a call too, with its problem,
which the model reads.

Sources: the chat templates of the models, as transformers renders them. Hermes and Qwen2.5 to Qwen3
write JSON between tags, Qwen3.5 and Qwen3-Coder XML between the same tags, Llama 3.1 and later JSON
alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxgrpo.core.errors import InputError, find


class Call(NamedTuple):
    """A call of a tool as a model wrote it."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""  # why it cannot be read; empty: it can

    def as_message(self) -> dict[str, Any]:
        """The entry of a message's "tool_calls", as chat templates read it."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Reading(NamedTuple):
    """What a model wrote in a turn."""

    content: str
    calls: list[Call]

    def as_message(self) -> dict[str, Any]:
        """The assistant's message, as TRL gives it to rewards."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [call.as_message() for call in self.calls]
        return message


Parser = Callable[[str], Reading]

UNREADABLE = "a tool call that cannot be read: {}"

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


def hermes(text: str) -> Reading:
    """JSON between tags, any number of calls.

    >>> hermes('So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    Reading(content='So:', calls=[Call(name='add', arguments={'a': 1}, problem='')])
    >>> hermes('<tool_call>{"name": "add"').calls[0].problem[:34]
    'a tool call that cannot be read: J'
    """
    calls = [_from_json(part) for part in _TAGGED.findall(text)]
    return Reading(_TAGGED.sub("", text).strip(), calls)


def qwen_xml(text: str) -> Reading:
    """XML between the same tags; a value that is JSON is read as such, any other one is a text.

    >>> qwen_xml("<tool_call><function=add><parameter=a>1</parameter></function></tool_call>").calls
    [Call(name='add', arguments={'a': 1}, problem='')]
    """
    calls = []
    for part in _TAGGED.findall(text):
        match = _FUNCTION.search(part)
        if match is None:
            calls.append(Call("", {}, UNREADABLE.format("it names no <function=...>")))
            continue
        arguments = {name: _value(value) for name, value in _PARAMETER.findall(match.group(2))}
        calls.append(Call(match.group(1).strip(), arguments))
    return Reading(_TAGGED.sub("", text).strip(), calls)


def llama3(text: str) -> Reading:
    """JSON and nothing else, with "parameters" for the arguments; several calls with ";" between.

    >>> llama3('{"name": "add", "parameters": {"a": 1}}').calls
    [Call(name='add', arguments={'a': 1}, problem='')]
    >>> llama3("It is 3."), llama3('{"a": 1}').calls
    (Reading(content='It is 3.', calls=[]), [])
    """
    written = text.strip().removeprefix(_PYTHON_TAG).strip()
    is_tagged = text.strip().startswith(_PYTHON_TAG)
    if not is_tagged and not (written.startswith("{") and '"name"' in written):
        return Reading(text.strip(), [])
    decoder, calls, place = json.JSONDecoder(), [], 0
    while place < len(written):
        try:
            value, place = decoder.raw_decode(written, place)
        except ValueError as error:
            return Reading("", [*calls, Call("", {}, UNREADABLE.format(error))])
        calls.append(read(value))
        place += len(written[place:]) - len(written[place:].lstrip("; \n"))
    return Reading("", calls)


FORMATS: dict[str, Parser] = {"hermes": hermes, "llama3": llama3, "qwen_xml": qwen_xml}


def choose(name: str, template: str | None, tokenizer: Any) -> Parser:
    """The parser of a name; "auto" is the tokenizer's own, or that which its template shows.

    Raises: InputError where there is no such parser, or a template that shows none.
    """
    if name != "auto":
        return find("rollout.call_format", name, FORMATS)
    if any(getattr(tokenizer, key, None) for key in ("response_template", "response_schema")):
        return lambda text: by_tokenizer(tokenizer, text)
    if template is not None and "<function=" in template:
        return qwen_xml
    if template is None or "<tool_call>" in template:
        return hermes
    if "ipython" in template or _PYTHON_TAG in template:
        return llama3
    formats = ", ".join(FORMATS)
    raise InputError(
        f'rollout.call_format = "auto": the chat template shows none of {formats}: name one of '
        "them, or a parser of your own, mine.py:parse"
    )


def by_tokenizer(tokenizer: Any, text: str) -> Reading:
    """By the tokenizer's response template or schema; a text that it cannot read has no calls."""
    try:
        message = tokenizer.parse_response(text)
        calls = [read(entry.get("function", entry)) for entry in message.get("tool_calls") or ()]
    except Exception:  # whatever the tokenizer's expressions raise on what a model wrote
        return Reading(text, [])
    return Reading(message.get("content") or "", calls)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_json(text: str) -> Call:
    try:
        return read(json.loads(text))
    except (ValueError, RecursionError) as error:
        return Call("", {}, UNREADABLE.format(f"{type(error).__name__}: {error}"))


def read(value: Any) -> Call:
    """A call from {"name": ..., "arguments": {...}}; these may be JSON in a text, or left out."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", {}, UNREADABLE.format('it has no "name" that is a text'))
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _value(arguments)
    if not isinstance(arguments, dict) and arguments is not None:
        kind = type(arguments).__name__
        problem = UNREADABLE.format(f"its arguments are a {kind}, expected an object")
        return Call(value["name"], {}, problem)
    return Call(value["name"], arguments or {})
