"""What a chat template writes behind a turn: exactly that, and never a word of the model anew."""

from __future__ import annotations

import chatting
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.calls import Reading, read
from jaxgrpo.environments.history import TURN, History, check

ANSWER = {"role": "tool", "name": "look", "content": "42"}
GOOD = ["closed", "open", "called", "thinking"]


def history(style: str) -> History:
    return History(chatting.chat(style), chatting.stop_tokens(style))


@pytest.mark.parametrize(
    ("style", "last", "between"),
    [
        ("closed", "<|end|>", "\n<|start|>tool\n42<|end|>\n<|start|>assistant\n"),
        ("open", "<|tool|>", "42<|assistant|>"),
        # The model closed its turn as if the user were next: its token stays.
        ("open", "<|user|>", "42<|assistant|>"),
        ("called", "<|call|>", "<|start|>tool\n42<|end|><|start|>assistant\n"),
        ("thinking", "<|end|>", "\n<|start|>tool\n42<|end|>\n<|start|>assistant\n"),
        # A turn that was cut is closed first.
        ("closed", "x", "<|end|>\n<|start|>tool\n42<|end|>\n<|start|>assistant\n"),
        ("open", "x", "<|tool|>42<|assistant|>"),
        ("called", "x", "<|call|><|start|>tool\n42<|end|><|start|>assistant\n"),
    ],
)
def test_the_reply_follows_what_the_model_drew(style, last, between):
    (token,) = chatting.ids(last)
    assert chatting.text(history(style).between([ANSWER], token)) == between


@pytest.mark.parametrize("style", ["closed", "open", "called", "thinking"])
def test_a_conversation_in_parts_is_the_rendered_one(style):
    """Where the model writes as the template would; an empty thought is none of its words."""
    call = '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'
    chat = chatting.chat(style)
    function = {"name": "look", "arguments": {"a": 1}}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    question = {"role": "user", "content": "what?"}
    render = chat.tokenizer.apply_chat_template
    options = {"chat_template": chat.template, "tokenize": False, "add_generation_prompt": True}
    last = {"closed": "<|end|>", "open": "<|tool|>", "called": "<|call|>", "thinking": "<|end|>"}
    prompt = render([question], **options)
    drawn = chatting.ids(call + last[style])
    between = history(style).between([ANSWER], drawn[-1])
    rendered = render([question, turn, ANSWER], **options)
    assert prompt + chatting.text(drawn) + chatting.text(between) == rendered


def test_several_answers_stand_in_order_and_one_of_the_user_too():
    answers = [ANSWER, {**ANSWER, "content": "43"}]
    (end,) = chatting.ids("<|end|>")
    written = chatting.text(history("closed").between(answers, end))
    assert written.index("42") < written.index("43") < written.index("assistant")
    user = {"role": "user", "content": "warmer"}
    written = chatting.text(history("closed").between([user], end))
    assert written == "\n<|start|>user\nwarmer<|end|>\n<|start|>assistant\n"


def test_an_answer_may_hold_the_word_that_stands_for_a_turn():
    """As a tool that reads our files: all before the word was lost."""
    words = f"{TURN}, {TURN}n"
    (end,) = chatting.ids("<|end|>")
    written = chatting.text(history("closed").between([{**ANSWER, "content": words}], end))
    assert written == f"\n<|start|>tool\n{words}<|end|>\n<|start|>assistant\n"
    user = {"role": "user", "content": words}
    written = chatting.text(history("open").between([user], None))
    assert written == f"<|user|>{words}<|assistant|>"


def test_without_a_template_an_answer_stands_as_it_is():
    plain = History(chatting.chat(None), frozenset([1]))
    check(plain, has_tools=True, forks=False)
    assert chatting.text(plain.between([ANSWER, ANSWER], None)) == "4242"


@pytest.mark.parametrize("style", GOOD)
def test_templates_that_go_on_are_taken(style):
    for has_tools in (True, False):
        check(history(style), has_tools, forks=False)


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ("deaf", "the template deaf does not write calls of tools"),
        ("endless", r"the template endless ends a turn with none of the tokens .*<\|end\|>"),
    ],
)
def test_a_template_that_cannot_go_on_is_refused_before_anything_starts(style, message):
    with pytest.raises(InputError, match=message):
        check(history(style), has_tools=True, forks=False)


COUNTED = (
    "{% for m in messages %}{{ loop.index }} {{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}<|end|>{% endfor %}{{ messages | length }}"
)


def test_a_template_that_counts_is_taken_only_where_conversations_are_written_again():
    counting = history("closed")
    counting = counting._replace(chat=counting.chat._replace(template=COUNTED))
    for has_tools in (True, False):
        with pytest.raises(InputError, match=r'behind a second turn .*: set data.history = "fork"'):
            check(counting, has_tools, forks=False)
        check(counting, has_tools, forks=True)


def test_a_template_that_does_not_show_the_tools_is_refused():
    chat = history("closed").chat
    blind = str(chat.template).replace(chatting.HEAD, "")
    shown = chat._replace(tools=({"type": "function", "function": {"name": "look"}},))
    stop_tokens = chatting.stop_tokens("closed")
    check(History(shown, stop_tokens), has_tools=True, forks=False)
    with pytest.raises(InputError, match="does not show the tools that there are: set"):
        check(History(shown._replace(template=blind), stop_tokens), has_tools=True, forks=False)


CALLED_FIRST = (
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('an answer without a call') }}{% endif %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}<|end|>{% endfor %}"
)


def test_an_answer_to_a_call_that_could_not_be_read_is_written_by_every_template():
    turns = [{"role": "assistant", "content": "<tool_call>{"}, ANSWER]
    assert "<tool_call>{<|end|>\n<|start|>tool" in history("closed").write("what?", turns)
    strict = history("closed")
    strict = strict._replace(chat=strict.chat._replace(template=CALLED_FIRST))
    written = strict.write("what?", turns)
    assert written == "user: what?<|end|>assistant: <tool_call>{(look)<|end|>tool: 42<|end|>"


@pytest.mark.parametrize("style", ["closed", None])
def test_a_reply_with_a_token_that_the_model_lacks_is_refused(style):
    """A tokenizer may have more tokens than its model; what the engine refuses ends a run."""
    chat = chatting.chat(style)._replace(vocab_size=1)
    lacking = History(chat, chatting.stop_tokens("closed"))
    with pytest.raises(InputError, match=r"has the token \d+, '.+', but the model .* 0 to 0: take"):
        lacking.between([ANSWER], None)


def test_every_rendering_is_given_the_same_tools():
    schema = {"type": "function", "function": {"name": "look"}}
    shown = chatting.chat("closed")._replace(tools=(schema,))
    # Names of tools stand at the head, before the turn: nothing of them follows it.
    (end,) = chatting.ids("<|end|>")
    with_tools = History(shown, chatting.stop_tokens("closed")).between([ANSWER], end)
    assert with_tools == history("closed").between([ANSWER], end)


NUMBERED = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids of nine') }}{% endif %}"
    "({{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}){% endfor %}<|end|>"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids of nine') }}{% endif %}"
    "[{{ m.content }}, {{ m.tool_call_id }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_template_that_asks_for_ids_of_calls_gets_them():
    """As Mistral's: those that a parser reads, or else what stands for one."""
    numbered = history("closed")
    numbered = numbered._replace(chat=numbered.chat._replace(template=NUMBERED))
    check(numbered, has_tools=True, forks=False)
    (end,) = chatting.ids("<|end|>")
    assert chatting.text(numbered.between([ANSWER], end)) == "[42, jaxgrpo00]"
    call = read({"name": "look", "arguments": {}, "id": "abc123xyz"})
    answer = {**ANSWER, "tool_call_id": call.id}
    assert chatting.text(numbered.between([answer], end)) == "[42, abc123xyz]"
    turns = [Reading("", [call]).as_message(), answer]
    assert numbered.write("what?", turns) == "what?(look{}abc123xyz)<|end|>[42, abc123xyz]"
