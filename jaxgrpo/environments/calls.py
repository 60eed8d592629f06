"""Calls of tools in what a model wrote: one parser for each way of writing them.

A parser takes the text of a turn, without the token that ended it, and gives what was said beside
calls, and the calls in their order. A call that cannot be read is a call too, with its problem,
which the model reads.

Sources: the chat templates of the models, as transformers renders them. Hermes and Qwen2.5 to Qwen3
write JSON between tags, Qwen3.5 and Qwen3-Coder XML between the same tags, GLM-4.5 and later pairs
of keys and values, Llama 3.1 and later JSON alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxgrpo.core.errors import InputError, cut, find, one_line, refusing
from jaxgrpo.environments.history import TOOL, TURN, History


class Call(NamedTuple):
    """A call of a tool as a model wrote it."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""  # why it cannot be read; empty: it can
    is_text: bool = False  # values that are texts may stand for others, as `cast` says
    id: str = ""  # that the answer names; empty: the model writes none

    def as_message(self) -> dict[str, Any]:
        """The entry of a message's "tool_calls", as chat templates read it."""
        entry = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return entry | ({"id": self.id} if self.id else {})


class Reading(NamedTuple):
    """What a model wrote in a turn."""

    content: str  # with the calls that cannot be read, as they were written
    calls: list[Call]
    more: Mapping[str, Any] = {}  # further fields of the message, as "reasoning_content"

    def as_message(self) -> dict[str, Any]:
        """The assistant's message, as TRL gives it to rewards."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, **self.more}
        if calls := [call.as_message() for call in self.calls if not call.problem]:
            message["tool_calls"] = calls
        return message


Parser = Callable[..., Reading]
"""(text of a turn, text before it; by default the prompt of a first turn) -> what it says"""

UNREADABLE = "a tool call that cannot be read: {}"
BROKEN_OFF = "it breaks off"
DEEPEST = 64  # lists in lists of arguments: what copies and writes them goes down by itself

_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\n]+)>")
# No group crosses a tag: many tags that nothing closes would take the cube of their number.
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL
)
_NAME = re.compile(r"\A([^\s<>{}]+)\s*(?=<arg_key>|\Z)")
_WORDS = r"((?:(?!</?arg_(?:key|value)>).)*+)"
_PAIR = re.compile(rf"<arg_key>{_WORDS}</arg_key>\s*<arg_value>{_WORDS}</arg_value>", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")  # what they may be called in JSON


class _Style(NamedTuple):
    """A call between tags whose values are texts. `opening`, `closing` and `further` are looked for
    in the parts of a call that are no argument."""

    name: re.Pattern[str]
    argument: re.Pattern[str]
    opening: re.Pattern[str]  # of an argument that nothing closes
    closing: re.Pattern[str] | None  # at the beginning of a part: what ends a call, beside its tag
    further: re.Pattern[str]  # the name of a second function
    nameless: str  # the problem of a call without a name


_QWEN_XML = _Style(
    name=_FUNCTION,
    argument=_PARAMETER,
    opening=re.compile("<parameter="),
    closing=re.compile(r"\s*</function>"),
    further=_FUNCTION,
    nameless="it names no <function=...>",
)
_GLM = _Style(
    name=_NAME,
    argument=_PAIR,
    opening=re.compile("<arg_(?:key|value)>"),
    closing=None,
    further=re.compile(r"\A\s*\w[^\s<>{}]*\s*\Z"),
    nameless="it begins with no name",
)


def hermes(text: str) -> Reading:
    """JSON between tags, any number of calls.

    >>> hermes('So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')[:2]
    ('So:', [Call(name='add', arguments={'a': 1}, problem='', is_text=False, id='')])
    >>> hermes('<tool_call>{"name": "add"').calls[0].problem[:34]
    'a tool call that cannot be read: J'
    """
    calls = [_from_json(part.strip()) for part, _ in _TAGGED.findall(text)]
    return Reading(_beside(calls, text), calls)


def qwen_xml(text: str) -> Reading:
    """XML between the same tags; values are texts.

    >>> qwen_xml("<tool_call><function=add><parameter=a>1</parameter></function></tool_call>").calls
    [Call(name='add', arguments={'a': '1'}, problem='', is_text=True, id='')]
    """
    return _tagged_texts(text, _QWEN_XML)


def glm(text: str) -> Reading:
    """A name and pairs of keys and values between the same tags; values are texts.

    >>> glm("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>").calls
    [Call(name='f', arguments={'a': '1'}, problem='', is_text=True, id='')]
    """
    return _tagged_texts(text, _GLM)


def _tagged_texts(text: str, style: _Style) -> Reading:
    calls = [_from_texts(part.strip(), bool(end), style) for part, end in _TAGGED.findall(text)]
    return Reading(_beside(calls, text), calls)


def _from_texts(part: str, is_closed: bool, style: _Style) -> Call:
    """A call from what follows its tag.

    Args:
      is_closed: by the second tag.
    """
    match = style.name.search(part)
    pieces = style.argument.split(part[match.end() if match else 0 :])  # rest, name, value, ...
    rests = pieces[::3]
    if not is_closed and not (style.closing and any(map(style.closing.match, rests))):
        return unreadable(BROKEN_OFF)
    if not match:
        return unreadable(style.nameless)
    if any(map(style.further.search, rests)):
        return unreadable("it names several functions: write each between tags of its own")
    if any(map(style.opening.search, rests)):
        return unreadable("an argument of it is not closed")
    arguments = dict(zip(pieces[1::3], pieces[2::3], strict=True))
    return Call(match.group(1).strip(), arguments, is_text=True)


def _beside(calls: Sequence[Call], text: str) -> str:
    """The text without the calls between its tags that can be read."""
    in_order = iter(calls)
    return _TAGGED.sub(lambda part: part.group() if next(in_order).problem else "", text).strip()


def llama3(text: str) -> Reading:
    """JSON and nothing else, with "parameters" for the arguments; several calls with ";" between.
    Without a tag in front, an object that has no arguments is an answer in JSON.

    >>> llama3('{"name": "add", "parameters": {"a": 1}}').calls
    [Call(name='add', arguments={'a': 1}, problem='', is_text=False, id='')]
    >>> llama3("It is 3.")[:2], llama3('{"name": "Bob", "age": 5}').calls
    (('It is 3.', []), [])
    """
    written = text.strip().removeprefix(_PYTHON_TAG).strip()
    is_tagged = text.strip().startswith(_PYTHON_TAG)
    if not is_tagged and not (written.startswith("{") and '"name"' in written):
        return Reading(text.strip(), [])
    decoder, calls, place, content = json.JSONDecoder(), [], 0, []
    while place < len(written):
        begin = place
        try:
            value, place = decoder.raw_decode(written, place)
            if not is_tagged and isinstance(value, dict) and value.keys().isdisjoint(_ARGUMENTS):
                return Reading(text.strip(), [])
            calls.append(read(value))
        except (ValueError, RecursionError) as error:
            calls, place = [*calls, unreadable(error)], len(written)
        content += [written[begin:place]] * bool(calls[-1].problem)
        place += len(written[place:]) - len(written[place:].lstrip("; \n"))
    return Reading("; ".join(content), calls)


FORMATS: dict[str, Parser] = {"hermes": hermes, "qwen_xml": qwen_xml, "glm": glm, "llama3": llama3}

_TYPES = {"text": "string", "number": "integer", "flag": "boolean", "turn": "string"}
EXAMPLE = Call(TOOL, {"text": "7", "number": 7, "flag": False, "turn": TURN})
"""A call whose values tell what a format makes of their types."""
_PROPERTIES = {name: {"type": kind, "description": name} for name, kind in _TYPES.items()}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": [*_TYPES]}
_FUNCTION_SCHEMA = {"name": TOOL, "description": TOOL, "parameters": _PARAMETERS}
_SCHEMA = {"type": "function", "function": _FUNCTION_SCHEMA}

_NAMES = {int: {"integer", "number"}, float: {"number"}, bool: {"boolean"}, type(None): {"null"}}
"""What JSON calls types of Python."""
_NAMES |= {list: {"array"}, dict: {"object"}}
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def choose(name: str, history: History) -> Parser:
    """The parser of a name; "auto" is the first that reads `EXAMPLE` back from what the chat
    template writes of it: the tokenizer's response template, or one of FORMATS.

    Raises: InputError where there is no such parser, or none reads what the template writes.
    """
    chat = history.chat
    history = history._replace(chat=chat._replace(tools=(_SCHEMA,)))
    opening = history.opening()
    if name != "auto":
        return _behind_thoughts(find("rollout.call_format", name, FORMATS), opening)
    if chat.template is None:
        return hermes
    turn, end = history.written(Reading("", [EXAMPLE]).as_message())
    parsers = [_behind_thoughts(parse, opening) for parse in FORMATS.values()]
    if getattr(chat.tokenizer, "response_template", None):  # some need the end of a turn
        parsers = [_by_tokenizer(chat.tokenizer, opening, stop) for stop in ("", end)] + parsers
    if _is_thinking(opening) and "</think>" not in turn:  # an empty thought is not always written
        turn = f"</think>{turn}"
    for parse in parsers:
        calls = cast(parse(turn), [_SCHEMA]).calls
        if [call._replace(id="") for call in calls] == [EXAMPLE]:
            return parse
    raise InputError(
        f'rollout.call_format = "auto": the chat template shows none of {", ".join(FORMATS)} '
        f"(it writes {cut(repr(turn))}): name the format that the model writes, or a parser of "
        "your own, mine.py:parse"
    )


def _is_thinking(before: str) -> bool:
    """Whether a turn behind this text begins inside a thought."""
    return before.rstrip().endswith("<think>")


def _behind_thoughts(parse: Callable[[str], Reading], opening: str) -> Parser:
    """Reads no calls in thoughts: what a model considers is not yet what it does."""

    def read_turn(text: str, before: str = opening) -> Reading:
        thought, end, rest = text.rpartition("</think>")
        if rest.lstrip().startswith("<think>") or (not end and _is_thinking(before)):
            return Reading(text, [])
        reading = parse(rest)
        space = rest[: len(rest) - len(rest.lstrip())] if reading.content else ""
        return reading._replace(content=(thought + end + space).lstrip() + reading.content)

    return read_turn


def _by_tokenizer(tokenizer: Any, opening: str, end: str) -> Parser:
    """By the tokenizer's response template, which reads thoughts too, and `end` behind each turn. A
    text that it fails on is a call that cannot be read, if one begins in it."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    problem = 'rollout.call_format = "auto": the tokenizer\'s response template fails ({reason}): '
    with refusing(f"{problem}mend it, or name the format that the model writes"):
        field = load_response_template(tokenizer.response_template).fields.get("tool_calls")
    opens = None if field is None else field.open_re
    # JSON says itself whether it is complete.
    closes = None if field is None or field.content == "json" else field.close_re

    def read_turn(text: str, before: str = opening) -> Reading:
        try:
            message = tokenizer.parse_response(text + end, prefix=before)
            entries = message.get("tool_calls", ())
            calls = [read({**entry, **entry.get("function", {})}) for entry in entries]
        except Exception as error:  # whatever its expressions raise on what a model wrote
            return Reading(text, [unreadable(error)] if opens and opens.search(text) else [])
        if calls and opens and closes:
            begin = max((match.end() for match in opens.finditer(text + end)), default=0)
            if not closes.search(text + end, begin):
                calls[-1] = unreadable(BROKEN_OFF)
        if any(call.problem for call in calls):
            return Reading(text, calls)
        more = {k: v for k, v in message.items() if k not in ("role", "content", "tool_calls")}
        calls = [call._replace(is_text=True) for call in calls]
        return Reading((message.get("content") or "").removesuffix(end), calls, more)

    return read_turn


def cast(reading: Reading, tools: Sequence[Any]) -> Reading:
    """The reading with values of the types that the schemas of tools give its calls.

    A text that stands for no value of the type stays a text. Source: transformers' `parse_response`
    with `tools`.
    """

    def typed(call: Call) -> Call:
        schemas = (_entry(tool, "function") for tool in tools)
        schema = next((entry for entry in schemas if _entry(entry, "name") == call.name), None)
        arguments = {
            name: _value_of_type(value, _types(_entry(schema, "parameters", "properties", name)))
            for name, value in call.arguments.items()
        }
        return call._replace(arguments=arguments, is_text=False)

    return reading._replace(calls=[typed(c) if c.is_text else c for c in reading.calls])


def _entry(value: Any, *names: str) -> Any:
    """What stands in mappings under these names; None where there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _types(schema: Any) -> list[str]:
    """The names of JSON's types that a schema allows; what is no schema allows none."""
    declared = _entry(schema, "type")
    names = declared if isinstance(declared, list) else [declared]
    names = [name for name in names if isinstance(name, str)]
    for kind in ("anyOf", "oneOf"):
        choices = _entry(schema, kind)
        for choice in choices if isinstance(choices, list) else ():
            names += _types(choice)
    return names + ["null"] * bool(_entry(schema, "nullable"))


def _value_of_type(value: Any, types: Sequence[str]) -> Any:
    """What a text stands for.

    >>> [_value_of_type("7", [kind]) for kind in ("string", "integer", "number", "boolean")]
    ['7', 7, 7, '7']
    >>> _value_of_type("False", ["boolean"]), _value_of_type("null", ["string", "null"])
    (False, None)
    """
    if not isinstance(value, str):
        return value
    names = {"True": "true", "False": "false", "None": "null"}
    parsed = _value(names.get(value.strip(), value))
    if isinstance(parsed, float) and parsed.is_integer() and "number" not in types:
        parsed = int(parsed)
    if _NAMES.get(type(parsed), set()) & {*types}:
        return parsed
    return value if "string" in types else _python_value(value, types)


def _python_value(text: str, types: Sequence[str]) -> Any:
    """What Python reads in a text that is no JSON of these types.

    >>> [_python_value(text, ["integer"]) for text in ("007", "+3", "1.5", "seven")]
    [7, 3, '1.5', 'seven']
    >>> _python_value(".5", ["number"]), _python_value("0", ["boolean"])
    (0.5, False)
    """
    words = text.strip().lower()
    if "boolean" in types and words in _FLAGS:
        return _FLAGS[words]
    readers = [int] * bool({"integer", "number"} & {*types}) + [float] * ("number" in types)
    for read_number in readers:
        with contextlib.suppress(ValueError):
            number = read_number(text)
            return number if abs(number) < math.inf else text
    return text


def _value(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return text if _is_deep(value) else value


def _is_deep(value: Any) -> bool:
    """Whether lists and objects are nested in more than DEEPEST levels.

    >>> _is_deep([{"a": [1, 2]}]), _is_deep(json.loads("[" * 65 + "]" * 65))
    (False, True)
    """
    level = [[value]]
    for _ in range(DEEPEST + 1):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [
            entry for part in parts for entry in part if isinstance(entry, (dict, list, tuple))
        ]
    return bool(level)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _from_json(text: str) -> Call:
    try:
        return read(json.loads(text))
    except (ValueError, RecursionError) as error:
        return unreadable(error)


def unreadable(problem: str | Exception) -> Call:
    """A call that cannot be read: why, or what was raised on it."""
    if isinstance(problem, Exception):
        problem = f"{type(problem).__name__}: {one_line(problem)}"
    return Call("", {}, UNREADABLE.format(problem))


def read(value: Any) -> Call:
    """A call from {"name": ..., "arguments": {...}}; these may be JSON in a text, or left out. It
    may have an "id"."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return unreadable('it has no "name" that is a text')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _value(arguments)
    if not isinstance(arguments, dict) and arguments is not None:
        kind = type(arguments).__name__
        problem = UNREADABLE.format(f"its arguments are a {kind}, expected an object")
        return Call(value["name"], {}, problem)
    try:  # what is said again must be text that a tokenizer reads
        identity = str(value.get("id") or "")
        json.dumps([value["name"], identity, arguments], ensure_ascii=False, default=str).encode()
    except (ValueError, TypeError, RecursionError) as error:
        return unreadable(error)
    if _is_deep(arguments):
        problem = UNREADABLE.format(f"its arguments are nested in more than {DEEPEST} levels")
        return Call(value["name"], {}, problem)
    return Call(value["name"], arguments or {}, id=identity)
