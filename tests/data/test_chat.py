"""Chat templates and message lists: what the model reads, and what rewards get."""

from __future__ import annotations

import datetime
import json
import threading
import time

import gsm8k
import numpy as np
import pytest
from transformers.utils import chat_template_utils

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import prompts as data
from jaxgrpo.data.chat import TIMES, _clock_at, for_rewards, make_chat, read_messages, write
from jaxgrpo.data.tasks.demonstrated import show_answer
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout.texts import Texts, call_on_texts
from jaxgrpo.training.prompted import successful_sibling

USER = {"role": "user", "content": "2+2?"}
BEGUN = {"role": "assistant", "content": "It is"}
TURN = "<|im_start|>user\n2+2?<|im_end|>\n"
OPENED = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return gsm8k.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def bare(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    return tokenizer


def chat_with(tokenizer, choice="auto", system=None, **options):
    return make_chat(tokenizer, str(choice), system, options, "base")


def test_a_text_becomes_one_user_message_after_the_system_text(tokenizer):
    assert write(chat_with(tokenizer), "2+2?", "row 0") == TURN + OPENED
    brief = write(chat_with(tokenizer, system="Be brief."), "2+2?", "row 0")
    assert brief == "<|im_start|>system\nBe brief.<|im_end|>\n" + TURN + OPENED


def test_a_conversation_goes_as_it_is_and_options_reach_the_template(tokenizer):
    chat = chat_with(tokenizer, enable_thinking=False)
    assert write(chat, [USER], "row 0") == TURN + OPENED + "<think>\n\n</think>\n\n"
    assert write(chat_with(tokenizer, enable_thinking=True), [USER], "row 0") == TURN + OPENED


def test_of_several_templates_that_for_tools_writes_them_as_in_transformers(tokenizer, monkeypatch):
    for_tools = "{{ tools[0].function.name }}{% if strict %}!{% endif %} {{ messages[0].content }}"
    named = {"default": "{{ messages[0].content }}", "tool_use": for_tools}
    monkeypatch.setattr(tokenizer, "chat_template", named)
    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    chat = chat_with(tokenizer, strict=True)
    assert write(chat, [USER], "row 0") == "2+2?"
    text = write(chat._replace(tools=tools), [USER], "row 0")
    options = {"tokenize": False, "strict": True}
    assert text == tokenizer.apply_chat_template([USER], [*tools], **options) == "add! 2+2?"


def test_a_last_message_by_the_assistant_is_gone_on_with(tokenizer):
    assert write(chat_with(tokenizer), [USER, BEGUN], "row 0") == TURN + OPENED + "It is"


@pytest.mark.parametrize("content", ["The answer ", "<think>\n", " It", "\n", "It is"])
@pytest.mark.parametrize("filter_of", ["", " | trim", ".strip()", ".rstrip()", ".lstrip()"])
def test_a_template_that_strips_what_the_model_continues_is_refused(
    tokenizer, tmp_path, content, filter_of
):
    """Rewards would get white space that the model never read."""
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content" + filter_of + " }}{% endfor %}"
    )
    chat, prompt = chat_with(tokenizer, tmp_path / "t.jinja"), [USER, {**BEGUN, "content": content}]
    strip = {"": str, ".rstrip()": str.rstrip, ".lstrip()": str.lstrip}.get(filter_of, str.strip)
    if strip(content) == content:
        assert write(chat, prompt, "row 0") == f"<user>2+2?<assistant>{content}"
        return
    with pytest.raises(InputError, match=r"row 0: .*t\.jinja strips white space off the message"):
        write(chat, prompt, "row 0")


HEADED = (  # as Llama 3's and Gemma's
    "{% for m in messages %}<{{ m.role }}>\n\n{{ m.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n\n{% endif %}"
)


def test_an_empty_last_message_by_the_assistant_opens_its_turn(tokenizer, tmp_path):
    """It was read without the line end in front of the text."""
    (tmp_path / "t.jinja").write_text(HEADED)
    for chat in (chat_with(tokenizer, tmp_path / "t.jinja"), chat_with(tokenizer)):
        opened = write(chat, [USER], "row 0")
        assert opened.endswith("assistant>\n\n" if "t.jinja" in chat.name else OPENED)
        empty = {**BEGUN, "content": ""}
        assert write(chat, [USER, empty], "row 0") == opened
        assert write(chat, [USER, {**empty, "name": "calculator"}], "row 0") == opened
    prompts, completions = for_rewards([[USER, empty]], ["4"])
    assert (prompts, completions[0][0]["content"]) == ([[USER]], "4")


@pytest.mark.parametrize("content", ["\n", "\n\n", "\nIt is", "\n\nIt is"])
def test_white_space_of_the_template_is_not_that_of_the_message(tokenizer, tmp_path, content):
    for filter_of in ("| trim", ".lstrip()"):
        (tmp_path / "t.jinja").write_text(HEADED.replace("| trim", filter_of))
        chat = chat_with(tokenizer, tmp_path / "t.jinja")
        with pytest.raises(InputError, match="strips white space off the message"):
            write(chat, [USER, {**BEGUN, "content": content}], "row 0")


def test_tokens_are_those_of_transformers_own_chat_encoding(tokenizer):
    prompts = [[USER], [USER, {**BEGUN, "content": "4"}, USER]]
    rows = [{"prompt": prompt} for prompt in prompts]
    ours = [ids.tolist() for ids in data.encode(rows, chat_with(tokenizer))]
    theirs = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
    assert ours == theirs
    assert ours[0][0] == tokenizer.convert_tokens_to_ids(gsm8k.BEGIN)


def test_without_a_template_texts_go_as_they_are(tokenizer, bare):
    for chat in (chat_with(bare), chat_with(tokenizer, "none")):
        assert write(chat, "2+2?", "row 0") == "2+2?"
        with pytest.raises(InputError, match=r"row 3: the prompt is a list of messages, but there"):
            write(chat, [USER], "row 3")


def test_a_file_takes_the_place_of_the_tokenizers_template(tokenizer, tmp_path):
    file = tmp_path / "chat.jinja"
    for encoding in ("utf-8", "utf-8-sig"):
        text = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        file.write_text(text, encoding=encoding)
        assert write(chat_with(tokenizer, file), "ü", "row 0") == "[user]ü"


def test_system_text_and_options_need_a_template_that_reads_them(tokenizer, bare, tmp_path):
    with pytest.raises(InputError, match=r"data.system is given, .* tokenizer of base has none"):
        chat_with(bare, system="Be brief.")
    with pytest.raises(InputError, match=r"data\.chat_template_kwargs is given, but there is"):
        chat_with(bare, enable_thinking=False)
    (tmp_path / "chat.jinja").write_text(gsm8k.CHAT_TEMPLATE)
    file = tmp_path / "chat.jinja"
    with pytest.raises(InputError, match=r"enable_thinkin: .* does not read it; did you mean 'e"):
        chat_with(bare, file, enable_thinkin=False)
    with pytest.raises(InputError, match="add_generation_prompt: the role of a prompt's last mess"):
        chat_with(bare, file, add_generation_prompt=False)
    with pytest.raises(InputError, match=r"kwargs\.tools: the key tools says which there are; l"):
        chat_with(bare, file, tools=[])
    with pytest.raises(InputError, match=r"thinking = 'False': a text, .* write false without q"):
        chat_with(bare, file, enable_thinking="False")


def test_two_system_messages_are_refused(tokenizer):
    with pytest.raises(InputError, match=r"row 2: the conversation opens with a system message"):
        write(
            chat_with(tokenizer, system="A."), [{"role": "system", "content": "B."}, USER], "row 2"
        )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", r"fails \(TemplateError: no system role\)"),
        ("a\n{% for %}", r"fails in line 2 \(TemplateSyntaxError: "),
        ("{{ messages[0].nothing.here }}", r"fails \(UndefinedError: "),
    ],
)
def test_a_template_that_fails_is_named_with_its_row_and_reason(
    tokenizer, tmp_path, template, message
):
    (tmp_path / "chat.jinja").write_text(template)
    with pytest.raises(InputError, match=rf"row 5: the chat template .*chat.jinja {message}"):
        write(chat_with(tokenizer, tmp_path / "chat.jinja"), "x", "row 5")


def test_a_template_file_that_cannot_be_read_is_refused(tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"no.jinja' cannot be read \(FileNotFoundError\)"):
        chat_with(tokenizer, tmp_path / "no.jinja")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"cannot be read \(UnicodeDecodeError\)"):
        chat_with(tokenizer, tmp_path / "bytes.jinja")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "line 4 holds no message"),
        (["2+2?"], r"line 4, message 0: expected \{\"role\": \"user\", .* but got '2\+2\?'"),
        ([USER, {"role": "user"}], "line 4, message 1: expected"),
        ([{"role": "user", "content": [{"type": "image"}]}], "line 4, message 0: expected"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(value, message):
    with pytest.raises(InputError, match=message):
        read_messages(value, "line 4")


CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"n": 2}}}],
}
CALLS = (  # as Qwen's templates write them
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}{% endfor %}<a>"
)


def test_a_message_of_calls_alone_is_written_and_a_call_that_is_left_out_is_refused(
    tokenizer, tmp_path
):
    (call,) = CALLING["tool_calls"]
    function = {"name": "look_up", "arguments": {"n": 2, "argument of other calls": None}}
    padded = {**CALLING, "tool_calls": [{**call, "function": function, "id": None}]}
    for message in (CALLING, {**CALLING, "tool_calls": np.array(CALLING["tool_calls"])}, padded):
        prompt = read_messages([USER, message, {"role": "tool", "content": "4"}], "line 4")
        assert prompt[1] == {**CALLING, "content": ""}
        (tmp_path / "chat.jinja").write_text(CALLS)
        chat = chat_with(tokenizer, tmp_path / "chat.jinja")
        assert write(chat, prompt, "row 0") == '<user>2+2?<assistant>(look_up {"n": 2})<tool>4<a>'
        (tmp_path / "chat.jinja").write_text(CALLS.replace("tool_calls", "calls"))
        chat = chat_with(tokenizer, tmp_path / "chat.jinja", "Be brief.")
        with pytest.raises(InputError, match=r"row 3: .* write the call of 'look_up' in mess.* 1"):
            write(chat, prompt, "row 3")
    with pytest.raises(InputError, match="line 4, message 0: expected"):
        read_messages([{**CALLING, "tool_calls": []}], "line 4")


def test_values_of_messages_that_json_does_not_know_are_texts():
    """Prompts stand in samples/: a date in a message ended a run at its first step."""
    odd = {"at": datetime.date(2026, 11, 28), "turn": np.int64(1), "board": object(), "no": None}
    (message,) = read_messages(({**USER, **odd},), "line 4")
    stored = {"at": "datetime.date(2026, 11, 28)", "turn": 1, "board": "<object object>"}
    assert json.loads(json.dumps(message)) == {**USER, **stored}


def test_rewards_get_texts_for_texts_and_messages_for_messages():
    assert for_rewards(["2+2="], ["4"]) == (["2+2="], ["4"])
    prompts, completions = for_rewards([[USER], [USER, BEGUN]], ["4", " 4"])
    assert prompts == [[USER], [USER]]
    assert completions == [
        [{"role": "assistant", "content": "4"}],
        [{"role": "assistant", "content": "It is 4"}],
    ]
    assert for_rewards([], []) == ([], [])


def test_rewards_get_the_begun_message_in_the_first_turn_of_an_answered_sample():
    got = {}

    def reward(prompts, completions, **columns):
        got.update(prompts=prompts, completions=completions)
        return [0.0] * len(prompts)

    tool, last = {"role": "tool", "content": "4"}, {"role": "assistant", "content": "4."}
    turns = [[{"role": "assistant", "content": text}, tool, last] for text in (" asked", "Asked")]
    prompts = [[USER, BEGUN], [USER]]
    texts = Texts(prompts, ["", ""], [[1], [2]], [0, 1], turns)
    call_on_texts([Reward("mine", reward)], texts, {}, None)
    assert got["prompts"] == [[USER], [USER]]
    first = {"role": "assistant", "content": "It is asked"}
    assert got["completions"] == [[first, tool, last], turns[1]]
    assert prompts[0] == [USER, BEGUN]


IF_KNOWN = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant', 'system') %}"
    "<{{ m.role }}>{{ m.content.split('</think>')[-1] | trim }}{% endif %}{% endfor %}<assistant>"
)
PARTS_ONLY = (  # as SmolVLM and LLaVA write messages
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
LAST_SYSTEM = (  # as DeepSeek-R1-Distill writes system messages
    "{% set ns = namespace(text='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.text = m.content %}{% endfor %}{{ ns.text }}"
    "{% for m in messages if m.role == 'user' %}<user>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "prompt", "system", "lost"),
    [
        (IF_KNOWN, [{**USER, "role": "human"}], None, "message 0, '2+2?' with role 'human'"),
        (
            IF_KNOWN,
            [USER, {"role": "tool", "content": "4"}],
            None,
            "message 1, '4' with role 'tool",
        ),
        # Found by chance: in what another message or the template itself writes.
        (IF_KNOWN, [USER, {**USER, "role": "human"}], None, "message 1, '2+2?' with role 'human'"),
        (IF_KNOWN, [USER, {"role": "tool", "content": "assist"}], None, "message 1, 'assist' with"),
        (PARTS_ONLY, "2+2?", None, "message 0, '2+2?' with role 'user'"),
        (LAST_SYSTEM, [{"role": "system", "content": "a"}] * 2 + [USER], None, "message 0, 'a'"),
        ("{{ messages[-1].content }}", "2+2?", "Be brief.", "data.system, 'Be brief.' with role"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(
    tokenizer, tmp_path, template, prompt, system, lost
):
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    with pytest.raises(InputError) as refused:
        data.encode([{"prompt": prompt}], chat_with(tokenizer, file, system))
    assert f"does not write the text of {lost}" in str(refused.value)
    assert "use a role that the template writes" in str(refused.value)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (IF_KNOWN, [USER, {**BEGUN, "content": "<think>so</think>\n\n4"}, USER]),
        (IF_KNOWN, [{**USER, "content": "  2+2?\n"}]),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", 'a "b"\n\\c'),
        (IF_KNOWN, [{"role": "system", "content": ""}, USER]),
    ],
)
def test_thoughts_of_earlier_turns_spaces_and_json_are_no_lost_text(
    tokenizer, tmp_path, template, prompt
):
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    assert len(data.encode([{"prompt": prompt}], chat_with(tokenizer, file))[0])


OF_ASSISTANT = (  # as DeepSeek-R1 writes messages
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] "
    "if m.role == 'assistant' else m.content }}{% endfor %}"
)


@pytest.mark.parametrize("start", ["<think>\n", ""])
def test_an_answer_is_shown_with_its_thoughts_and_a_begun_message_stays_the_last(
    tokenizer, tmp_path, start
):
    """It was put into the begun message, which templates without thoughts then refused."""
    file = tmp_path / "chat.jinja"
    file.write_text(OF_ASSISTANT)
    prompt, texts = [USER, {**BEGUN, "content": start}], ["2+2 is 4</think>4", "5"]
    _, shown = successful_sibling({"prompt": prompt}, texts, {"right": [1.0, 0.0]})
    right = show_answer("2+2?", f"{start}2+2 is 4</think>4")
    assert shown == [{**USER, "content": right}, prompt[1]]
    text = write(chat_with(tokenizer, file), shown, "row 0")
    assert text == f"<user>{right}" + (f"<assistant>{start}" if start else "")
    assert prompt[0] == USER


def test_an_answer_is_shown_behind_what_the_user_said_last():
    roles = ("system", "user", "assistant", "user", "tool")
    prompt = [{"role": role, "content": role} for role in roles]
    texts = [*roles[:3], show_answer("user", "4"), "tool"]
    shown = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    assert show_answer(prompt, "4") == shown
    with pytest.raises(InputError, match="no message of the user to show an answer in"):
        show_answer(prompt[:1], "4")


def test_a_template_that_cuts_the_users_text_at_a_thought_is_refused(tokenizer, tmp_path):
    """The question was lost where an answer with thoughts stands behind it."""
    file = tmp_path / "chat.jinja"
    file.write_text(IF_KNOWN)
    prompt = show_answer([USER], "<think>2+2</think>4")
    with pytest.raises(InputError, match="does not write the text of message 0, '2"):
        write(chat_with(tokenizer, file), prompt, "row 0")


def test_threads_that_write_templates_leave_the_clock_as_it_was():
    clock, is_late = vars(chat_template_utils)["datetime"], threading.Event()

    def come_late() -> None:
        with _clock_at(TIMES[1]):
            is_late.set()
            time.sleep(0.1)

    thread = threading.Thread(target=come_late)
    with _clock_at(TIMES[0]):
        thread.start()
        is_late.wait(0.05)
    thread.join()
    assert is_late.is_set()
    assert vars(chat_template_utils)["datetime"] is clock
