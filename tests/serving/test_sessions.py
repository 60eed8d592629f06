"""What a program is, and how long the session of its sample is there."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import chatting
import pytest

from jaxgrpo.config import world
from jaxgrpo.config.keys import RolloutKeys
from jaxgrpo.environments.calls import glm, hermes, qwen_xml
from jaxgrpo.environments.serving import endpoint
from jaxgrpo.environments.serving.dialect import Dialect
from jaxgrpo.environments.serving.endpoint import REWRITTEN, Session, Sessions, is_program
from jaxgrpo.environments.serving.fields import Completion, Limits
from jaxgrpo.environments.serving.server import Query, Refusal


def agent(base_url, prompt, depth=1):
    return 1.0


class Client:
    """As OpenEnv's: an environment behind an address of its own."""

    def __init__(self, base_url):
        self.base_url = base_url


def test_a_function_that_asks_for_an_address_is_a_program_and_what_has_one_is_none():
    assert is_program(agent)
    assert is_program(functools.partial(agent, depth=2))
    assert not is_program(functools.partial(agent, base_url="http://localhost:8001"))
    assert not is_program(Client)
    assert not is_program(functools.partial(Client, base_url="http://localhost:8001"))
    assert not is_program(functools.partial(functools.partial(Client, "http://localhost:8001")))


@pytest.mark.slow
def test_the_session_of_a_sample_that_broke_is_there_no_longer_than_the_sample():
    """Its partner is not used again, so nothing would take it out."""
    dialect = Dialect(
        "policy", chatting.chat(), Limits(8, 8, 8, 1.0, 1.0, 0, 0.0), lambda: hermes, [1]
    )
    sessions, session = Sessions(), Session(dialect, [1])
    try:
        sessions.open(session)
        assert len(sessions._sessions) == 1
        del session
        gc.collect()
        assert len(sessions._sessions) == 0
    finally:
        sessions._server.close()


def post(base_url: str, prompt: str, **headers: str) -> Any:
    """The answer's document. Raises: urllib.error.HTTPError."""
    query = json.dumps({"prompt": prompt, "return_token_ids": True}).encode()
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(f"{base_url}/completions", query, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def make_world(program: Any) -> Any:
    rollout = RolloutKeys(
        prompts_per_step=1,
        group_size=2,
        max_prompt_tokens=8,
        max_completion_tokens=8,
        call_format="hermes",
    )
    return world.make_world((), {"": program}, rollout, chatting.chat(), [END])


def test_programs_that_begin_at_once_have_one_server():
    """Each thread of a first batch could make one, which then did not know the others' samples."""
    addresses, count = [], 32
    endpoint._make_sessions.cache_clear()

    def asks(base_url, prompt):
        addresses.append(base_url)
        with contextlib.suppress(urllib.error.HTTPError):
            post(base_url, prompt)

    answers, begin = make_world(asks), threading.Barrier(count)

    partners = [answers.kinds[""].make() for _ in range(count)]

    def open_partner(partner: Any) -> None:
        begin.wait()
        partner.open({"prompt": "ab"}, 1)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(open_partner, partners))
    answers.close()
    assert len(addresses) == count
    assert len({address.partition("/samples/")[0] for address in addresses}) == 1


def test_a_program_that_waits_for_its_turn_ends_with_the_run():
    """In a notebook, where a run was interrupted, its client and its threads waited for ever."""
    codes = []

    def waits(base_url, prompt):
        try:
            post(base_url, prompt)
        except urllib.error.HTTPError as error:
            codes.append(error.code)

    answers = make_world(waits)
    before = {*threading.enumerate()}
    partners = [answers.kinds[""].make() for _ in range(2)]
    for partner in partners:
        assert partner.open({"prompt": "ab"}, 1).tokens == chatting.ids("ab")
    programs = [thread for thread in {*threading.enumerate()} - before if "program" in thread.name]
    assert len(programs) == 2
    answers.close()
    for program in programs:
        program.join(10)
        assert not program.is_alive()
    assert codes == [400, 400]
    answers.close()


(END,) = chatting.ids("<|end|>")
QUICK = chatting.TEMPLATES["closed"].replace(
    "assistant\n{% endif %}", "assistant\n{% if quick %}<think></think>{% endif %}{% endif %}"
)
"""As Qwen3's: a turn may begin with an empty thought, which earlier turns have not."""
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]


def begin(template: str, forks: bool = False, parse: Any = hermes) -> tuple[Dialect, Session]:
    """A sample that has not begun."""
    chat = chatting.chat()._replace(template=template)
    limits = Limits(len(chat.tokenizer), 900, 9, 1.0, 1.0, 0, 0.0, is_turn=True)
    dialect = Dialect("policy", chat, limits, lambda: lambda text, before: parse(text), [END])
    return dialect, Session(dialect, [END], forks)


CHAT = "/v1/chat/completions"


def ask(
    dialect: Dialect, session: Session, drawn: str, path: str = CHAT, **document: Any
) -> tuple[str, Any]:
    """What a query adds to the sample, and the turn that is then drawn: a message or a text."""
    with ThreadPoolExecutor(1) as client:
        query = Query("POST", path, "", document)
        answer = client.submit(dialect.answer, query.path, query, session.draw)
        while session.events.empty() and not answer.done():
            time.sleep(0.005)
        text = ""
        if not session.events.empty():
            question: Any = session.events.get()
            text, tokens = chatting.text(question.tokens), chatting.ids(drawn)
            session.give(Completion(tokens, [0.0] * len(tokens), "stop"), is_last=False)
        reply: Any = answer.result(9)
    (choice,) = reply["choices"]
    return text, choice.get("message", choice.get("text"))


def talk(queries: Sequence[dict[str, Any]], forks: bool = False) -> list[str]:
    """Asks one query after another, each behind the messages before it; what each adds to the
    sample."""
    (dialect, session), messages, texts = begin(QUICK, forks), [], []
    for number, fields in enumerate(queries):
        messages.append({"role": "user", "content": f"Turn {number}."})
        drawn = f"Word {number}<|end|>"
        text, message = ask(dialect, session, drawn, messages=[*messages], **fields)
        texts.append(text)
        messages.append(message)
    return texts


def test_the_variables_of_a_query_hold_where_its_history_is_not_what_was_drawn():
    """A thought that was switched off came back with the second turn."""
    options = {"chat_template_kwargs": {"quick": True}}
    first, second, third = talk([options, options, {}])
    assert first.endswith("<|start|>assistant\n<think></think>")
    opening = "\n<|start|>user\nTurn {}.<|end|>\n<|start|>assistant\n"
    assert second == opening.format(1) + "<think></think>"
    assert third == opening.format(2)


def test_a_query_that_is_repeated_gets_the_same_turn_again():
    """Clients ask again where a connection broke: it was taken for a rewritten history."""
    dialect, session = begin(QUICK)
    messages = [{"role": "user", "content": "Go."}]
    added, first = ask(dialect, session, "a<|end|>", messages=messages)
    assert added != ""
    assert ask(dialect, session, "", messages=messages) == ("", first)
    further = [*messages, first, {"role": "user", "content": "On."}]
    added, second = ask(dialect, session, "b<|end|>", messages=further)
    assert added == "\n<|start|>user\nOn.<|end|>\n<|start|>assistant\n"
    session.give(None, is_last=True)
    assert ask(dialect, session, "", messages=further) == ("", second)
    with pytest.raises(Refusal):
        ask(dialect, session, "", messages=messages)
    # Where conversations may be rewritten, it is one more branch.
    dialect, session = begin(QUICK, forks=True)
    ask(dialect, session, "a<|end|>", messages=messages)
    added, again = ask(dialect, session, "b<|end|>", messages=messages)
    assert (added != "", again["content"]) == (True, "b")


def retried(count: Any) -> dict[str, str]:
    """The header of OpenAI's clients."""
    return {"x-stainless-retry-count": str(count)}


def status(client: Any, *arguments: Any, **headers: str) -> int:
    """Of a query that is refused."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        client(*arguments, **headers)
    with refused.value as answer:
        return answer.code


@pytest.mark.parametrize("ends", ["answered", "refused", "forks"])
def test_a_query_that_is_sent_again_waits_for_its_turn(ends):
    """A client whose patience ended got 409, tried again, and the sample broke."""
    _, session = begin(QUICK, forks=ends == "forks")
    sessions, tokens = Sessions(), chatting.ids("ab<|end|>")
    url = sessions.open(session)
    with ThreadPoolExecutor(2) as clients:
        first = clients.submit(post, url, "Go: ")
        session.events.get(timeout=30)
        again = clients.submit(post, url, "Go: ", **retried(1))
        for prompt, count in (("Go: ", 0), ("Go: ", "no number"), ("Go on: ", 1)):
            assert status(post, url, prompt, **retried(count)) == 409
        time.sleep(0.3)
        assert again.done() == (ends == "forks")
        if ends == "refused":
            session.close("the program took too long")
            assert [status(client.result) for client in (first, again)] == [409, 409]
        else:
            session.give(Completion(tokens, [0.0] * len(tokens), "stop"), is_last=False)
            choices = first.result()["choices"]
            assert choices[0]["token_ids"] == tokens
        if ends == "forks":
            assert status(again.result) == 409
        if ends == "answered":
            assert again.result()["choices"] == choices
            assert post(url, "Go: ", **retried(2))["choices"] == choices
    assert session.events.empty()
    sessions._server.close()


SAID = "{{ m.content }}"
LOOP = "{% for part in m.content %}{{ part.text | trim }}{% endfor %}"
CONTENTS = {
    "written as they are": (SAID, "\n"),
    "texts alone": ("{{ '' + m.content }}", "\n"),
    "parts": (f"{{% if m.content is string %}}{SAID}{{% else %}}{LOOP}{{% endif %}}", ""),
}


@pytest.mark.parametrize(("written", "between"), CONTENTS.values(), ids=CONTENTS)
def test_parts_of_a_message_are_put_together_as_in_vllm(written, between):
    """A template that reads parts puts nothing between them; vLLM hands others lines."""
    dialect, session = begin(QUICK.replace(SAID, written))
    parts = [{"type": "text", "text": text} for text in ("Look.", "Where?")]
    message = {"role": "user", "content": parts}
    text, turn = ask(dialect, session, "North.<|end|>", messages=[message])
    assert text == f"<|start|>user\nLook.{between}Where?<|end|>\n<|start|>assistant\n"
    further = [message, turn, message]
    text, _ = ask(dialect, session, "So.<|end|>", messages=further)
    assert text == f"\n<|start|>user\nLook.{between}Where?<|end|>\n<|start|>assistant\n"


def test_tools_may_be_left_out_and_none_comes_that_the_model_has_not_seen():
    shown = [{"tools": TOOLS}, {"tools": TOOLS[1:]}, {}, {"tools": TOOLS}]
    assert [text.count("<|head|>") for text in talk(shown)] == [2, 0, 0, 0]
    further = [{"tools": TOOLS[:1]}, {"tools": TOOLS}]
    assert [text.count("<|head|>") for text in talk(further, forks=True)] == [1, 2]
    with pytest.raises(Refusal) as refused:
        talk(further)
    assert (refused.value.status, str(refused.value)) == (409, REWRITTEN)


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_text_goes_on_behind_the_text_before_also_where_it_is_alone_in_a_list(is_listed):
    dialect, session = begin(QUICK)
    asks = functools.partial(ask, dialect, session, path="/v1/completions")
    listed = lambda text: [text] if is_listed else text  # noqa: E731
    drawn = f"a{chatting.tokenizer().pad_token}b<|end|>"  # which a text does not show
    _, text = asks(drawn, prompt=listed("Go: "))
    assert text == "ab"
    assert asks("c<|end|>", prompt=listed("Go: ab!"))[0] == "!"


def test_the_token_that_ends_a_turn_stands_once_where_a_text_writes_it_too():
    dialect, session = begin(QUICK)
    asks = functools.partial(ask, dialect, session, path="/v1/completions")
    asks(f"a{chatting.tokenizer().pad_token}b<|end|>", prompt="Go: ")
    assert asks("c<|end|>", prompt="Go: ab<|end|>\nAnd?")[0] == "\nAnd?"


@pytest.mark.parametrize("skips", [True, False])
def test_the_token_that_ends_a_completion_is_not_in_its_text(skips):
    """As in vLLM: one of `stop_token_ids` was, and with skip_special_tokens = false every one."""
    dialect, _ = begin(QUICK)
    (dot,) = chatting.ids(".")
    for text, stop in (("ab.", dot), ("ab<|end|>", None)):
        tokens = chatting.ids(text)
        completion = Completion(tokens, [0.0] * len(tokens), "stop", stop)
        assert dialect.text(completion, skips) == "ab"


_MESSAGES = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids of nine') }}{% endif %}"
    "<|start|>{{ call.name }} {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}<|start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% set call.name = c.function.name %}"
    """<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ '' + c.function.arguments }}"""
    "}</tool_call>{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
PARTICULAR = "{% set call = namespace(name='') %}" + chatting.HEAD + _MESSAGES
"""Arguments are a text as in DeepSeek's; an answer has the name in the call as in GPT-OSS's, and an
id of nine characters as in Mistral's."""


@pytest.mark.parametrize("space", ["", " "], ids=["by messages", "by ids"])
@pytest.mark.parametrize("forks", [False, True])
def test_an_answer_of_a_tool_stands_as_its_template_writes_it(space, forks):
    """The second query was refused, or had random ids and another name."""
    call = f'{{"name":{space}"go",{space}"arguments":{space}{{"to":{space}"north"}}}}'
    question = {"role": "user", "content": "Where?"}
    texts, turns = [], []
    for _ in range(2):
        dialect, session = begin(PARTICULAR, forks)
        drawn = f"<tool_call>{call}</tool_call><|end|>"
        _, turn = ask(dialect, session, drawn, messages=[question], tools=TOOLS)
        answer = {"role": "tool", "content": "A wall.", "tool_call_id": turn["tool_calls"][0]["id"]}
        messages = [question, turn, answer]
        texts.append(ask(dialect, session, "So.<|end|>", messages=messages, tools=TOOLS)[0])
        turns.append(turn)
    assert turns[0] == turns[1]
    identity = turns[0]["tool_calls"][0]["id"]
    assert len(identity) == 9
    assert identity.isalnum()
    behind = f"\n<|start|>go {identity}\nA wall.<|end|>\n<|start|>assistant\n"
    is_rewritten = forks and not space
    assert [text.endswith(behind) for text in texts] == [True, True]
    assert [text == behind for text in texts] == [not is_rewritten] * 2


def test_the_id_of_a_call_that_the_model_wrote_is_that_of_the_answer():
    dialect, session = begin(PARTICULAR)
    drawn = '<tool_call>{"id": "abcdef123", "name": "go", "arguments": {}}</tool_call><|end|>'
    question = {"role": "user", "content": "Where?"}
    _, turn = ask(dialect, session, drawn, messages=[question], tools=TOOLS)
    assert [call["id"] for call in turn["tool_calls"]] == ["abcdef123"]


def test_several_calls_of_a_turn_have_ids_of_their_own():
    dialect, session = begin(PARTICULAR)
    call = '<tool_call>{"name": "go", "arguments": {}}</tool_call>'
    question = {"role": "user", "content": "Where?"}
    _, turn = ask(dialect, session, f"{call}{call}<|end|>", messages=[question], tools=TOOLS)
    assert len({call["id"] for call in turn["tool_calls"]}) == 2


def test_a_stop_string_of_the_run_is_not_in_the_text_and_may_be_asked_for():
    """Behind `serve`, and vLLM, it is cut off: an agent read another text than in training."""
    dialect, session = begin(QUICK)
    dialect.limits = dialect.limits._replace(stop_strings=("</go>", "."))
    question = {"role": "user", "content": "Where?"}
    _, turn = ask(dialect, session, "<go>on</go>", messages=[question], stop=["</go>"])
    assert turn["content"] == "<go>on"
    further = [question, turn, {"role": "user", "content": "So?"}]
    text, turn = ask(dialect, session, "No<|end|>", messages=further)
    assert text == "<|end|>\n<|start|>user\nSo?<|end|>\n<|start|>assistant\n"
    assert turn["content"] == "No"
    with pytest.raises(Refusal, match="stop: what ends a turn is part of the policy"):
        ask(dialect, session, "", messages=[*further, turn, question], stop="</so>")


@pytest.mark.parametrize(
    ("parse", "call"),
    [
        (glm, "go<arg_key>to</arg_key><arg_value>north</arg_value>"),
        (qwen_xml, "<function=go><parameter=to>north</parameter>"),
    ],
)
def test_a_stop_string_that_closes_a_call_leaves_it_a_call(parse, call):
    """It is not in the text, and without it the call would break off."""
    dialect, session = begin(QUICK, parse=parse)
    dialect.limits = dialect.limits._replace(stop_strings=("</tool_call>",))
    question = {"role": "user", "content": "Where?"}
    drawn = f"There.<tool_call>{call}</tool_call>"
    _, turn = ask(dialect, session, drawn, messages=[question], tools=TOOLS)
    assert turn["content"] == "There."
    (entry,) = turn["tool_calls"]
    assert entry["function"] == {"name": "go", "arguments": '{"to": "north"}'}


@pytest.mark.parametrize(
    ("further", "added"),
    [
        ("</go>\n\n<wall>", "<wall>"),
        ("</go> <wall>", " <wall>"),
        ("\n\n<wall>", "\n\n<wall>"),
    ],
    ids=["all that was cut", "the string alone", "none of it"],
)
def test_a_stop_string_that_a_text_puts_back_stands_once(further, added):
    """It came again behind the drawn tokens that hold it. The padding, which no text shows, stands
    for a tokenizer that makes other ids of a text; a last token may hold more than the string."""
    dialect, session = begin(QUICK)
    dialect.limits = dialect.limits._replace(stop_strings=("</go>",))
    asks = functools.partial(ask, dialect, session, path="/v1/completions")
    _, text = asks(f"<go>{chatting.tokenizer().pad_token}on</go>\n\n", prompt="Go: ")
    assert text == "<go>on"
    assert asks("So.<|end|>", prompt=f"Go: {text}{further}")[0] == added
