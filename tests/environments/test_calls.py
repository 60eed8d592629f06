"""Calls of tools in what models write: each format, and what is no call."""

from __future__ import annotations

import copy
import time
from typing import Any

import chatting
import pytest

from jaxgrpo.config.world import find_parser
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.written import storable
from jaxgrpo.environments.calls import (
    FORMATS,
    Call,
    Reading,
    cast,
    choose,
    glm,
    hermes,
    llama3,
    qwen_xml,
    read,
)
from jaxgrpo.environments.history import History

ADD = Call("add", {"a": 1, "b": [2, "x"]})
JSON = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'


def schema(**types):
    """The schema of a tool `add` with arguments of these types."""
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": properties}},
    }


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (hermes, f"<tool_call>\n{JSON}\n</tool_call>"),
        (hermes, f"Let me see.\n<tool_call>{JSON}</tool_call>"),
        (hermes, f"<tool_call>{JSON}"),  # cut behind the JSON
        (llama3, JSON.replace("arguments", "parameters")),
        (llama3, f"<|python_tag|>{JSON}"),
        (
            qwen_xml,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
            '[2, "x"]\n</parameter>\n</function>\n</tool_call>',
        ),
        (
            glm,
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
            '<arg_key>b</arg_key>\n<arg_value>[2, "x"]</arg_value>\n</tool_call>',
        ),
    ],
)
def test_a_call_is_read(parse, text):
    reading = cast(parse(text), [schema(a="integer", b="array")])
    assert reading.calls == [ADD]
    assert reading.content in ("", "Let me see.")
    message = reading.as_message()
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": ADD.arguments}


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (hermes, f"<tool_call>{JSON}</tool_call> and <tool_call>{JSON}</tool_call>"),
        (llama3, f"{JSON}; {JSON}"),
        (llama3, f"{JSON}\n{JSON}"),
    ],
)
def test_several_calls_are_read_in_order(parse, text):
    assert parse(text).calls == [ADD, ADD]


@pytest.mark.parametrize("parse", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("text", ["", "It is 3.", "{", "<tool", '{"a": 1}', "tool_call"])
def test_what_is_no_call_is_said(parse, text):
    reading = parse(text)
    assert reading.calls == []
    assert reading.content == text
    assert "tool_calls" not in reading.as_message()


TAGS = (
    *("<tool_call>", "<function=f", "<parameter=a", "<parameter=a>\n", "\n", " x"),
    *("<arg_key>x</arg_key><arg_value>1", "<arg_key>x", "</arg_key><arg_value>", '{"name": "f"} '),
)


@pytest.mark.parametrize("parse", FORMATS.values(), ids=FORMATS)
def test_tags_that_nothing_closes_are_read_in_time_that_grows_with_their_number(parse):
    for opening in ("", "<tool_call><function=f>", "<tool_call>f<arg_key>a</arg_key>", "f"):
        for tag in TAGS:
            began = time.monotonic()
            parse(f"{opening}{tag * 5000}.")
            assert time.monotonic() - began < 1, (opening, tag)


def test_spaces_around_a_call_are_no_part_of_it_and_those_of_a_value_are():
    assert glm("<tool_call>\n f\n</tool_call>").calls == [Call("f", {}, is_text=True)]
    text = "<tool_call>f<arg_key>b</arg_key><arg_value> <arg_x></arg_value></tool_call>"
    assert glm(text).calls[0].arguments == {"b": " <arg_x>"}
    text = "<tool_call><function=f><parameter=b>\n\n2\n\n</parameter></tool_call>"
    assert qwen_xml(text).calls[0].arguments == {"b": "\n2\n"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call></tool_call>", "JSONDecodeError"),
        ('<tool_call>{"name": "add"', "JSONDecodeError"),
        ("<tool_call>[1]</tool_call>", 'it has no "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'it has no "name"'),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "its arguments are a int"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "RecursionError"),
    ],
)
def test_a_call_that_cannot_be_read_is_one_with_a_problem(text, problem):
    reading = hermes(f"So: {text}")
    (call,) = reading.calls
    assert problem in call.problem
    assert call.problem.startswith("a tool call that cannot be read: ")
    # What was written stays what was written, and is no call of nothing.
    assert reading.as_message() == {"role": "assistant", "content": f"So: {text}"}


def test_xml_without_a_function_and_half_an_object_have_a_problem_too():
    assert qwen_xml("<tool_call>add</tool_call>").calls[0].problem
    assert llama3('{"name": "add", "parameters": {').calls[0].problem


FIRST = {
    "qwen_xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n",
}
SECOND = {
    "qwen_xml": "<parameter=b>\n<function=sub>\n2 </function>",
    "glm": "<arg_key>b</arg_key>\n<arg_value>",
}


@pytest.mark.parametrize("name", FIRST)
def test_a_call_that_breaks_off_does_not_run_with_the_arguments_that_are_complete(name):
    parse, (call,) = FORMATS[name], FORMATS[name](FIRST[name] + "</tool_call>").calls
    assert call == Call("add", {"a": "1"}, is_text=True)
    for text in (FIRST[name], FIRST[name] + SECOND[name], "<tool_call>", "<tool_call>add"):
        (call,) = parse(text).calls
        assert call.problem == "a tool call that cannot be read: it breaks off"
        assert parse(text).content == text.strip()
    (call,) = qwen_xml(FIRST["qwen_xml"] + "</function>\n").calls
    assert call == Call("add", {"a": "1"}, is_text=True)


@pytest.mark.parametrize("name", FIRST)
def test_a_call_does_not_run_without_an_argument_that_nothing_closes(name):
    parse = FORMATS[name]
    begun = "<parameter=b>2" if name == "qwen_xml" else "<arg_key>b</arg_key><arg_value>2"
    function = "</function>" * (name == "qwen_xml")
    first = FIRST[name].index("<parameter" if function else "<arg_key")
    for place in (first, len(FIRST[name])):
        written = FIRST[name][:place] + begun + FIRST[name][place:]
        (call,) = parse(f"{written}{function}</tool_call>").calls
        assert call.problem == "a tool call that cannot be read: an argument of it is not closed"
    (call,) = parse(f"{FIRST[name][:first]}{begun}{function}</tool_call>").calls
    assert call.problem == "a tool call that cannot be read: an argument of it is not closed"
    (call,) = parse(f"{FIRST[name]}{function}</tool_call>").calls
    assert call == Call("add", {"a": "1"}, is_text=True)


@pytest.mark.parametrize(
    "text",
    [
        f"{FIRST['qwen_xml']}</function>\n<function=sub>\n<parameter=b>\n2\n</parameter>",
        f"{FIRST['qwen_xml']}</function>\n<function=sub>",
        "<tool_call><function=now></function><function=sub><parameter=b>\n2\n</parameter>",
        f"{FIRST['glm']}sub\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>",
        f"{FIRST['glm']}sub\n",
    ],
)
def test_several_functions_between_two_tags_are_not_called_as_the_first_of_them(text):
    parse = qwen_xml if "<function" in text else glm
    (call,) = parse(f"{text}</tool_call>").calls
    assert "it names several functions" in call.problem


def test_an_argument_may_hold_what_names_a_function():
    named = "<function=sub>\n</function>"
    for name, text in FIRST.items():
        (call,) = FORMATS[name](text.replace("1", named) + "</tool_call>").calls
        assert call == Call("add", {"a": named}, is_text=True)


def test_an_answer_in_json_is_no_call():
    for text in ('{"name": "Bob", "age": 5}', '{"is": {"name": "Bob"}}', f"{JSON}; {{'name': 1}}"):
        text = text.replace("'", '"')
        assert llama3(text) == Reading(text, [])
    assert llama3('<|python_tag|>{"name": "now"}').calls == [Call("now", {})]


def test_beside_a_call_that_cannot_be_read_the_others_are_calls():
    good, bad = '<tool_call>{"name": "add"}</tool_call>', "<tool_call>{}</tool_call>"
    message = hermes(f"First {good} then {bad}.").as_message()
    assert message["content"] == f"First  then {bad}."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]
    assert qwen_xml("<tool_call>add</tool_call>").content == "<tool_call>add</tool_call>"
    half = '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {'
    assert llama3(half).content == '{"name": "add", "parameters": {'
    assert [call.name for call in llama3(half).calls] == ["add", ""]


def test_arguments_may_be_json_in_a_text_or_be_left_out():
    assert read({"name": "add", "arguments": '{"a": 1}'}) == Call("add", {"a": 1})
    assert read({"name": "now"}) == Call("now", {})
    assert read({"name": "now", "arguments": None}) == Call("now", {})


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("2024", "string", "2024"),
        ("2024", "integer", 2024),
        ("3.0", "integer", 3),
        ("2.5", "integer", "2.5"),
        ("1e5", "number", 1e5),
        ("NaN", "number", "NaN"),
        ("True", "boolean", True),
        ("false", "boolean", False),
        ("1", "boolean", True),
        ("0", "boolean", False),
        ("FALSE", "boolean", False),
        ("2", "boolean", "2"),
        ("007", "integer", 7),
        ("+3", "number", 3),
        (".5", "number", 0.5),
        ("007", "string", "007"),
        ("007", ["string", "integer"], "007"),
        ("9" * 5000, "number", "9" * 5000),
        ("7", 7, "7"),  # no schema
        ("7", [7, {"a": 1}, "integer"], 7),
        ("None", ["string", "null"], None),
        ("7", ["string", "integer"], 7),
        ('{"a": 1}', "object", {"a": 1}),
        ("[" * 100_000, "array", "[" * 100_000),
        ("[1]", "string", "[1]"),
    ],
)
def test_a_text_is_the_value_that_the_schema_of_its_tool_says(text, types, value):
    call = f"<tool_call><function=add><parameter=a>\n{text}\n</parameter></function></tool_call>"
    (typed,) = cast(qwen_xml(call), [schema(a=types)]).calls
    assert typed.arguments == {"a": value}
    assert type(typed.arguments["a"]) is type(value)
    (untyped,) = cast(qwen_xml(call), []).calls
    assert untyped.arguments == {"a": text}


def test_values_of_json_have_their_types_already():
    (call,) = cast(
        hermes('<tool_call>{"name": "add", "arguments": {"a": "7"}}'), [schema(a="integer")]
    ).calls
    assert call.arguments == {"a": "7"}


def history(template, response=None):
    tokenizer = copy.copy(chatting.tokenizer())
    tokenizer.response_template = response
    chat = chatting.chat()._replace(template=template, tokenizer=tokenizer)
    return History(chat, chatting.stop_tokens("closed"))


def styled(call, opening="<|start|>assistant\n", thought=""):
    """A template with calls of a style, and how it opens turns."""
    calls = f"{{% for c in m.tool_calls or [] %}}{thought}{call}{{% endfor %}}"
    opened = f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    closed = chatting.TEMPLATES["closed"].replace(chatting.CALLS, calls)
    return closed.partition("{% if add_generation_prompt")[0] + opened


VALUES = "{% for k, v in c.function.arguments.items() %}"
CALLED = {
    "hermes": chatting.CALLS.partition("%}")[2].rpartition("{%")[0],
    "qwen_xml": "<tool_call>\n<function={{ c.function.name }}>\n" + VALUES
    + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm": "<tool_call>{{ c.function.name }}\n" + VALUES
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n"
    "{% endfor %}</tool_call>",
    "llama3": '{"name": "{{ c.function.name }}", '
    '"parameters": {{ c.function.arguments | tojson }}}',
}  # fmt: skip
WRITTEN = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "qwen_xml": "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "llama3": '{"name": "add", "parameters": {"a": 1}}',
}
THINKING = "<|start|>assistant\n<think>\n"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("opening", ["<|start|>assistant\n", THINKING])
def test_a_template_shows_how_its_model_calls(name, opening):
    parse = choose("auto", history(styled(CALLED[name], opening)))
    thought = "</think>" if opening is THINKING else ""
    (call,) = cast(parse(thought + WRITTEN[name]), [schema(a="integer")]).calls
    assert call == Call("add", {"a": 1})


def test_without_a_template_calls_are_json():
    assert choose("auto", history(None)) is hermes


def test_a_format_that_is_not_there_or_not_shown_is_refused():
    with pytest.raises(InputError, match=r"rollout.call_format 'hermess'.*did you mean 'hermes'"):
        choose("hermess", history(None))
    with pytest.raises(InputError, match=r'"auto": the chat template shows none of hermes'):
        choose("auto", history(chatting.TEMPLATES["deaf"]))
    with pytest.raises(InputError, match=r"it writes ''\)"):
        choose("auto", history("{{ tools | tojson }}" + chatting.TEMPLATES["deaf"]))
    pythonic = "[{{ c.function.name }}(" + VALUES + "{{ k }}={{ v }},{% endfor %})]"
    with pytest.raises(InputError, match=r"it writes '\[jaxgrpo_tool\(text=7,.*mine.py:parse"):
        choose("auto", history(styled(pythonic)))
    with pytest.raises(InputError, match=r"response template fails .*name the format"):
        choose("auto", history(styled(CALLED["hermes"]), {"fields": {}}))


@pytest.mark.parametrize(
    ("text", "opening", "count"),
    [
        (f"<think>\nI might write <tool_call> and then\n</think>\n\n{WRITTEN['hermes']}", "", 1),
        ("<think>\nI might write <tool_call> and then\n</think>\n\nIt is 4.", "", 0),
        (f"<think>\n{WRITTEN['hermes']}", "", 0),
        (f"I might call {WRITTEN['hermes']}\n</think>\n\nIt is 4.", THINKING, 0),
        (f"I might call {WRITTEN['hermes']}", THINKING, 0),
        (f"So </think>\n\nIt is 4. {WRITTEN['hermes']}", THINKING, 1),
        (WRITTEN["hermes"], "<think>\n\n</think>\n\n", 1),
    ],
)
def test_calls_in_thoughts_are_none_and_what_is_said_stays(text, opening, count):
    reading = choose("hermes", history(styled(CALLED["hermes"], opening)))(text)
    assert reading.calls == [Call("add", {"a": 1})] * count
    assert reading.content == (text.removesuffix(WRITTEN["hermes"]).rstrip() if count else text)


RESPONSE: dict[str, Any] = {
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


@pytest.mark.parametrize("end", ["", "<|end|>"])
def test_a_response_template_reads_turns_behind_what_opens_them(end):
    response = copy.deepcopy(RESPONSE)
    response["fields"]["tool_calls"]["close"] += end
    parse = choose("auto", history(styled(CALLED["hermes"], THINKING), response))
    assert parse(f"So </think>{WRITTEN['hermes']}") == Reading(
        "", [Call("add", {"a": 1}, is_text=True)], {"reasoning_content": "So"}
    )
    assert parse("So </think>It is 3.").content == "It is 3."
    reading = parse("So </think><tool_call>{</tool_call>")
    assert reading.content == "So </think><tool_call>{</tool_call>"
    (call,) = reading.calls
    assert call.problem.startswith("a tool call that cannot be read: ")
    assert parse(f"So {WRITTEN['hermes']}").calls == []  # the thought goes on


def test_a_response_template_that_reads_other_values_leaves_them_to_a_format():
    response = copy.deepcopy(RESPONSE)
    arguments: dict[str, Any] = {
        "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_"
    }
    arguments["value_parser"] = {"name": "json", "args": {"allow_non_json": True}}
    response["fields"]["tool_calls"] |= {
        "open_pattern": r"<tool_call>(?P<name>\w+)",
        "content": "xml-inline",
        "content_args": arguments,
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    }
    del response["fields"]["tool_calls"]["open"]
    parse = choose("auto", history(styled(CALLED["glm"]), response))
    assert parse(WRITTEN["glm"]).calls == glm(WRITTEN["glm"]).calls


def test_a_response_template_reads_no_call_that_breaks_off():
    response = copy.deepcopy(RESPONSE)
    pattern = r"<parameter=(?P<key>[^<>\n]+)>\n(?P<value>.*?)\n</parameter>"
    response["fields"]["tool_calls"] |= {
        "open_pattern": r"<tool_call>\n<function=(?P<name>[^<>\n]+)>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": pattern},
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    }
    del response["fields"]["tool_calls"]["open"]
    parse = choose("auto", history(styled(CALLED["qwen_xml"]), response))
    closed = f"{FIRST['qwen_xml']}</function>\n</tool_call>"
    assert parse(closed).calls == [Call("add", {"a": "1"}, is_text=True)]
    for text, count in ((FIRST["qwen_xml"], 1), (closed + FIRST["qwen_xml"], 2)):
        calls = parse(text).calls
        assert len(calls) == count
        assert calls[-1].problem == "a tool call that cannot be read: it breaks off"


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (hermes, r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}'),
        (hermes, '<tool_call>{"name": "add", "arguments": "' + "[" * 100_000 + '"}'),
        (llama3, '{"name": "add", "parameters": {"a": ' + "[" * 100_000),
    ],
)
def test_what_no_text_or_no_stack_holds_is_a_call_that_cannot_be_read(parse, text):
    (call,) = parse(text).calls
    assert call.problem.startswith("a tool call that cannot be read: ")
    assert call.arguments == {}


def test_a_parser_that_raises_gives_a_call_that_cannot_be_read(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def parse(text):\n    return text, [{'name': text.split()[1]}]\n")
    parse = find_parser(f"{file}:parse", chatting.chat(), (), 9)
    assert parse("call add").calls == [Call("add", {})]
    (call,) = parse("").calls
    assert call.problem == "a tool call that cannot be read: IndexError: list index out of range"
    lazy = tmp_path / "lazy.py"
    lazy.write_text("def parse(text):\n    return text, ({'name': w[1]} for w in [text.split()])\n")
    parse = find_parser(f"{lazy}:parse", chatting.chat(), (), 9)
    assert parse("").calls == [call]


def test_a_parser_that_takes_too_long_gives_a_call_that_cannot_be_read(tmp_path):
    """A regular expression that goes back for ever would leave the run waiting."""
    file = tmp_path / "mine.py"
    file.write_text("import time\ndef parse(text):\n    while True:\n        time.sleep(0.01)\n")
    began = time.monotonic()
    reading = find_parser(f"{file}:parse", chatting.chat(), (), 0.2)("call add")
    assert time.monotonic() - began < 5
    assert reading.content == "call add"
    assert reading.calls[0].problem.endswith("mine.py:parse took more than 0.2 s for it")


def test_a_parser_may_say_nothing_beside_calls_and_gives_a_list_of_them(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def parse(text):\n    return None, eval(text)\n")
    parse = find_parser(f"{file}:parse", chatting.chat(), (), 9)
    assert parse("({'name': name} for name in 'ab')") == Reading("", [Call("a", {}), Call("b", {})])
    for wrong in ("None", "'add'", "{'name': 'add'}", "3"):
        with pytest.raises(InputError, match=r"it returned \(None, .*\): return what was said and"):
            parse(wrong)


def test_arguments_that_are_nested_too_deep_are_not_read():
    """JSON reads a thousand levels, and what copied the messages of a sample half as many: a call
    of 500 ended the run."""
    deep, flat = ("[" * count + "]" * count for count in (400, 60))
    for values in (deep, flat):
        text = f'{{"name": "add", "arguments": {{"a": {values}}}}}'
        (call,) = hermes(f"<tool_call>{text}</tool_call>").calls
        assert call == llama3(text).calls[0]
        assert ("nested in more than 64 levels" in call.problem) == (values == deep)
        pair = f"<arg_key>a</arg_key><arg_value>{values}</arg_value>"
        reading = cast(glm(f"<tool_call>add{pair}</tool_call>"), [schema(a="array")])
        assert isinstance(reading.calls[0].arguments["a"], str) == (values == deep)
        assert storable(copy.deepcopy(reading.as_message()))["content"] == ""
