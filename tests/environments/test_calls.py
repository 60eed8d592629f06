"""Calls of tools in what models write: each format, and what is no call."""

from __future__ import annotations

import chatting
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.calls import FORMATS, Call, choose, hermes, llama3, qwen_xml, read

ADD = Call("add", {"a": 1, "b": [2, "x"]})
JSON = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'


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
    ],
)
def test_a_call_is_read(parse, text):
    reading = parse(text)
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
    (call,) = hermes(text).calls
    assert problem in call.problem
    assert call.problem.startswith("a tool call that cannot be read: ")


def test_xml_without_a_function_and_half_an_object_have_a_problem_too():
    assert qwen_xml("<tool_call>add</tool_call>").calls[0].problem
    assert llama3('{"name": "add", "parameters": {').calls[0].problem


def test_arguments_may_be_json_in_a_text_or_be_left_out():
    assert read({"name": "add", "arguments": '{"a": 1}'}) == Call("add", {"a": 1})
    assert read({"name": "now"}) == Call("now", {})
    assert read({"name": "now", "arguments": None}) == Call("now", {})


@pytest.mark.parametrize(
    ("template", "parse"),
    [
        ("... <tool_call> ...", hermes),
        ("<tool_call>\n<function=example>", qwen_xml),
        ("<|start_header_id|>ipython", llama3),
        (None, hermes),
    ],
)
def test_a_template_shows_how_its_model_calls(template, parse):
    assert choose("auto", template, chatting.tokenizer()) is parse


def test_a_format_that_is_not_there_or_not_shown_is_refused():
    with pytest.raises(InputError, match=r"rollout.call_format 'hermess'.*did you mean 'hermes'"):
        choose("hermess", None, chatting.tokenizer())
    with pytest.raises(InputError, match=r'"auto": the chat template shows none of hermes'):
        choose("auto", "{{ messages }}", chatting.tokenizer())
