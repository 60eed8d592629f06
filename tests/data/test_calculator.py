"""The task calculator: what its base writes, and the tool that knows the products."""

from __future__ import annotations

import re

import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.tasks import calculator, load
from jaxgrpo.data.tasks.base import END, UNKNOWN, character_tokenizer
from jaxgrpo.data.tasks.templates import TOOL_TEMPLATE
from jaxgrpo.environments.calls import Call, choose
from jaxgrpo.environments.history import History, check
from jaxgrpo.environments.tools import make_tools, run_calls

(TOOL,) = make_tools([calculator.calculate], "tools")


def chat(tools=(TOOL.schema,)):
    tokenizer = character_tokenizer(calculator.calculator.alphabet)
    return Chat(tokenizer, TOOL_TEMPLATE, "its template", None, {}, tools=tools)


def question_in(prompt):
    return re.findall(r"<user>(.*?)<end>", prompt)[0]


def test_rows_are_products_and_no_test_problem_is_trained_on():
    rows = load("task:calculator:test", 200)
    assert all(str(eval(row["prompt"].rstrip("="))) == row["answer"] for row in rows)
    assert {row["level"] for row in rows} == {1, 2}
    prompts = {question_in(text.prompt) for text in calculator.corpus()}
    assert not prompts & {row["prompt"] for row in rows}
    assert prompts & {row["prompt"] for row in load("task:calculator:train", 200)}
    with pytest.raises(InputError, match="calculator has no split 'dev'"):
        calculator.rows("dev", 3)


def test_the_corpus_is_what_the_chat_template_writes():
    texts = calculator.corpus()[:600]
    render = chat().tokenizer.apply_chat_template
    for text in texts:
        messages = [{"role": "user", "content": question_in(text.prompt)}]
        if called := re.search(r'"expression": "(.*?)"}}.*<tool>(\d+)<end>', text.prompt):
            function = {"name": "calculate", "arguments": {"expression": called.group(1)}}
            call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
            messages += [call, {"role": "tool", "content": called.group(2)}]
        options = {"chat_template": TOOL_TEMPLATE, "tokenize": False}
        options |= {"tools": [TOOL.schema] if "<tools>" in text.prompt else None}
        assert render(messages, add_generation_prompt=True, **options) == text.prompt
        assert UNKNOWN not in chat().tokenizer.decode(chat().tokenizer(text.prompt)["input_ids"])


def test_shares_are_as_stated():
    texts = calculator.corpus()
    assert sum(text.probability for text in texts) == pytest.approx(1)
    first = [
        text for text in texts if re.fullmatch(r"<tools><user>[^<]*<end><assistant>", text.prompt)
    ]
    total = sum(text.probability for text in first)
    calls = [text for text in first if text.solution.startswith("<tool_call>")]
    assert sum(t.probability for t in calls) / total == pytest.approx(calculator.CALLS)
    right = sum(t.probability for t in calls if t.prompt[13:].split("=")[0] in t.solution)
    assert right / total / calculator.CALLS == pytest.approx(calculator.RIGHT_CALL, abs=0.01)


def test_a_call_is_read_answered_and_continued():
    history = History(chat(), frozenset(chat().tokenizer.convert_tokens_to_ids([END])))
    check(history, has_tools=True, forks=False)
    text = calculator.CALL[0] + "34*57" + calculator.CALL[1]
    (call,) = choose("auto", history)(text).calls
    assert call == Call("calculate", {"expression": "34*57"})
    (result,) = run_calls([call], {"calculate": calculator.calculate}, 5.0)
    (end,) = history.stop_tokens
    answer = {"role": "tool", "name": "calculate", "content": result.text}
    assert chat().tokenizer.decode(history.between([answer], end)) == "<tool>1938<end><assistant>"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("34*57", "1938"), ("-3*(4+5)", "-27"), (" 7 - 9 ", "-2")],
)
def test_the_tool_computes_whole_numbers(expression, value):
    assert calculator.calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "3/4", "2**99", "__import__('os')", "1.5*2", "a*b", "3*", "9" * 101, "True*2"],
)
def test_and_nothing_else(expression):
    with pytest.raises((ValueError, SyntaxError)):
        calculator.calculate(expression)
