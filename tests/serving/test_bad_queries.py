"""Queries that cannot be used: each gets an error in words, and the server answers the next one."""

from __future__ import annotations

import json
import socket

import chatting
import pytest
import served

from jaxgrpo.cli import serve
from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.serving.server import LARGEST, Server

pytestmark = pytest.mark.slow
TEXT, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
GO = [{"role": "user", "content": "Go."}]
LONG = [5] * (served.WIDTH + served.LONGEST)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served.serving(served.save(tmp_path_factory.mktemp("served") / "tiny")) as entry:
        yield entry


@pytest.fixture
def unharmed(server):
    """After the test the server answers."""
    yield
    status, document = server.ask(TEXT, {"prompt": [5, 6], "max_tokens": 2, "temperature": 0})
    assert status == 200, document


TEXTS = [
    ({}, "prompt: expected a text, ids of tokens, or a list of these"),
    ({"prompt": ""}, "prompt = '': expected ids of tokens, at least one"),
    ({"prompt": []}, "prompt: expected a text"),
    ({"prompt": {"a": 1}}, "prompt: expected a text"),
    ({"prompt": [5, 10_000]}, "prompt: 10000 is none of the 10"),
    ({"prompt": [5, -1]}, "prompt: -1 is none of the 10"),
    ({"prompt": [5, True]}, "prompt: True is none of the 10"),
    ({"prompt": [5, 1.0]}, "prompt: 1.0 is none of the 10"),
    ({"prompt": [[5], "a", 3]}, "prompt = [[5], 'a', 3]: expected ids"),
    ({"prompt": [[5]] * 129}, "prompt: 129 prompts, at most 128"),
    ({"prompt": LONG}, "the prompt has 184 tokens, and with a completion at most 184 are allowed"),
    ({"prompt": LONG[:-2], "max_tokens": 3}, "max_tokens = 3: at most 2 behind a prompt of 182"),
    ({"prompt": "a", "max_tokens": 25}, "max_tokens = 25: at most 24 behind a prompt of 1 tokens"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens = 0: expected a whole number from 1"),
    ({"prompt": "a", "max_tokens": "3"}, "max_tokens = '3': expected a whole number"),
    ({"prompt": "a\ud800"}, "half of a surrogate pair: write the character"),
    ({"prompt": "a", "stop": "\udc00"}, "half of a surrogate pair: write the character"),
    ({"prompt": "a", "n": 0}, "n = 0: expected a whole number from 1 to 128"),
    ({"prompt": "a", "temperature": 0.7}, "temperature = 0.7: expected 1, with which all samples"),
    ({"prompt": "a", "temperature": 10**400}, "temperature = 1000"),
    ({"prompt": "a", "temperature": "hot"}, "temperature = 'hot': expected 1"),
    ({"prompt": "a", "top_p": 0.5}, "top_p = 0.5: expected 1"),
    ({"prompt": "a", "top_k": 5}, "top_k = 5: expected 0"),
    ({"prompt": "a", "logprobs": 2}, "logprobs = 2: expected true or 0 (the log-prob of the drawn"),
    ({"prompt": "a", "seed": 2**64}, "seed = 18446744073709551616: expected a whole number"),
    ({"prompt": "a", "stop": [""]}, "stop = ['']: expected a text or a list of texts, none empty"),
    ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids: 999 is none of the 10"),
    ({"prompt": "a", "stream": 1}, "stream = 1: expected False"),
    ({"prompt": "a", "echo": True}, "echo = True: expected False"),
    ({"prompt": "a", "top_pp": 0.5}, "top_pp: this server does not know it; did you mean 'top_p'?"),
    ({"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs: this server does not know it"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias = {'5': 1}: expected {}"),
    ({"prompt": "a", "return_token_ids": 1}, "return_token_ids = 1: expected true or false"),
]
CHATS = [
    ({}, "messages: expected a list of messages"),
    ({"messages": []}, "messages: expected a list of messages"),
    ({"messages": ["hi"]}, 'messages[0]: expected {"role": ..., "content": ...}'),
    ({"messages": [{"role": "user"}]}, "messages[0].content: expected a text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content: only parts of type text are read",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: expected a text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "messages[0].content: only parts of type text are read",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        "messages[0].tool_calls: expected a list of calls",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]},
        "messages[0].tool_calls: expected functions with name and arguments",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                }
            ]
        },
        "messages[0].tool_calls: the arguments are no JSON",
    ),
    ({"messages": GO, "tools": [{"name": "f"}]}, "tools = [{'name': 'f'}]: expected"),
    ({"messages": GO, "tool_choice": "required"}, "tool_choice = 'required': expected \"auto\""),
    ({"messages": GO, "top_logprobs": 3}, "top_logprobs = 3: expected 0 (the log-prob of the"),
    ({"messages": GO, "continue_final_message": True}, "set add_generation_prompt = false to"),
    ({"messages": GO, "add_generation_prompt": False}, "or leave both out to begin a new"),
    (
        {"messages": GO, "add_generation_prompt": False, "continue_final_message": True},
        "continue the assistant's last message, or leave both out",
    ),
    ({"messages": GO, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens differ"),
    ({"messages": GO, "chat_template_kwargs": {"think": True}}, "chat_template_kwargs.think: the"),
    ({"messages": GO, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
    ({"messages": GO, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools: the"),
    ({"messages": GO, "response_format": {"type": "json_object"}}, "response_format = "),
]
GENERATES = [
    ({}, "token_ids = []: expected ids of tokens, at least one"),
    ({"token_ids": "abc"}, "token_ids = 'abc': expected ids of tokens"),
    ({"token_ids": [10_000]}, "token_ids: 10000 is none of the 10"),
    ({"token_ids": [5], "sampling_params": 3}, "sampling_params = 3: expected an object"),
    ({"token_ids": [5], "max_tokens": 3}, "max_tokens: write it into sampling_params"),
    ({"token_ids": [5], "sampling_params": {"top_pp": 1}}, "top_pp: this server does not know it"),
    ({"token_ids": [5], "sampling_params": {"ignore_eos": True}}, "ignore_eos = True: expected"),
    (
        {"token_ids": [5], "sampling_params": {"logprobs": 2}},
        "logprobs = 2: expected true or 0 or 1",
    ),
    ({"token_ids": [5], "stream": True}, "stream = True: expected False (ids come in one piece)"),
]
CASES = [(TEXT, *case) for case in TEXTS] + [(CHAT, *case) for case in CHATS]
CASES += [(GENERATE, *case) for case in GENERATES]


def test_every_bad_document_is_answered_with_its_problem(server, unharmed):
    wrong = []
    for path, document, words in CASES:
        status, answer = server.ask(path, document)
        error = answer.get("error", {"message": "answered"})
        is_right = status == error.get("code") == 400 and words in error["message"]
        wrong += [] if is_right else [(path, document, status, error["message"])]
    assert wrong == []
    assert len(CASES) > 50


def test_a_query_that_is_no_query_is_refused(server, unharmed):
    deep = b"[" * 100_000
    big = b'{"prompt": "' + b"a" * LARGEST + b'"}'
    cases = {
        ("/v1/completions", b"{", served.TOKEN): (400, "the document is no JSON"),
        ("/v1/completions", b"[1]", served.TOKEN): (400, "the document is a list"),
        ("/v1/completions", b"\xff\xfe", served.TOKEN): (400, "the document is no JSON"),
        ("/v1/completions", deep, served.TOKEN): (400, "the document is no JSON"),
        ("/v1/completions", big, served.TOKEN): (413, f"at most {LARGEST} are read"),
        ("/v1/completions", b'{"prompt": "a"}', "guessed"): (401, "Authorization: Bearer TOKEN"),
        ("/v1/completions", b'{"prompt": "a"}', None): (401, "the token is wrong or missing"),
        ("/v1/completions", b'{"model": "x"}', served.TOKEN): (404, "there is only 'tiny'"),
        ("/v1/embeddings", b"{}", served.TOKEN): (404, "there is no such path"),
        ("/v1/models", b"{}", served.TOKEN): (405, "POST is not served; use GET"),
        ("/v1/completions", None, served.TOKEN): (405, "GET is not served; use POST"),
    }
    for (path, body, token), (status, words) in cases.items():
        found_status, answer = server.ask(path, body, token)
        assert (found_status, answer["error"]["code"]) == (status, status), body
        assert words in answer["error"]["message"]
        assert set(answer["error"]) == {"message", "type", "param", "code"}


def speak(server, content: bytes) -> bytes:
    """What comes back before the connection closes."""
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_what_is_no_http_does_no_harm(server, unharmed):
    start = b"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer secret\r\n"
    assert speak(server, b"") == b""
    assert b"400" in speak(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n")
    assert b" 405 " in speak(server, b"DELETE /v1/models HTTP/1.1\r\n\r\n")
    assert b" 411 " in speak(server, start + b"\r\n{}")
    assert b" 411 " in speak(server, start + b"Content-Length: -1\r\n\r\n{}")
    assert b" 411 " in speak(server, start + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    assert b" 400 " in speak(server, start + b'Content-Length: 99\r\n\r\n{"prompt"')


def test_a_client_that_goes_away_does_no_harm(server, unharmed):
    document = {"prompt": chatting.ids("Say"), "max_tokens": 24, "n": 40}
    body = json.dumps(document).encode()
    head = "POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer secret\r\n"
    head += f"Content-Length: {len(body)}"
    for _ in range(3):
        with socket.create_connection((server.host, server.port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)


def test_a_connection_goes_on_behind_an_answer_and_ends_behind_a_refusal(server):
    query = b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n"
    assert speak(server, query + query).count(b" 200 OK") == 2
    refused = b"GET /v1/models HTTP/1.1\r\n\r\n"
    answer = speak(server, refused + query)
    assert (answer.count(b" 401 "), answer.count(b" 200 ")) == (1, 0)


def test_a_template_that_shows_no_tools_is_told(server):
    tool = {"type": "function", "function": {"name": "f"}}
    status, answer = server.ask(CHAT, {"messages": GO, "tools": [tool], "max_tokens": 1})
    assert status == 200, answer
    chat = chatting.chat("deaf")._replace(tokenizer=server.policy.tokenizer)
    dialect = serve.make_dialect(server.answerer._replace(chat=chat), "tiny")
    query = serve.Query("POST", CHAT, "", {"messages": GO, "tools": [tool]})
    with pytest.raises(InputError, match="tools: the template deaf does not write them"):
        dialect.answer(CHAT, query, lambda prompted: [])
    answerer = server.answerer._replace(chat=chat._replace(template=None))
    bare = serve.make_dialect(answerer, "tiny")
    with pytest.raises(InputError, match="there is no chat template"):
        bare.answer(CHAT, query, lambda prompted: [])


def test_an_address_that_is_taken_is_refused(server):
    with pytest.raises(InputError, match="cannot be listened at"):
        Server(server.host, server.port, lambda query: {}, lambda method, path, bearer: None)


@pytest.mark.parametrize("token", ["two words", "é", "line\n"])
def test_a_token_that_no_header_holds_is_refused(token):
    with pytest.raises(InputError, match="printable ASCII without spaces"):
        serve.read_token(token)


def test_a_new_token_is_long_and_another_one_each_time():
    assert serve.read_token("mine") == "mine"
    tokens = {serve.read_token(value) for value in (None, "", None)}
    assert len(tokens) == 3
    assert min(map(len, tokens)) >= 32
