"""Queries as bytes on a connection: where one ends, and what is no query."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator

import pytest

from jaxgrpo.cli import serve
from jaxgrpo.environments.serving.fields import Fields
from jaxgrpo.environments.serving.server import Query, Refusal, Server

HIDDEN = b"GET /hidden HTTP/1.1\r\n\r\n"


@pytest.fixture
def server() -> Iterator[tuple[Server, list[str]]]:
    """A server that answers all paths but /closed, and the paths that were asked for."""
    paths: list[str] = []

    def answer(query: Query) -> dict[str, str]:
        paths.append(query.path)
        return {"path": query.path * (2**22 if query.path == "/large" else 1)}

    def admit(method: str, path: str, bearer: str) -> None:
        if path == "/closed":
            raise Refusal(401, "no")

    built = Server("127.0.0.1", 0, answer, admit)
    built.start()
    yield built, paths
    built.close()


def speak(server: Server, content: bytes) -> list[str]:
    """The status of each answer up to the end of the connection."""
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        answers = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    return re.findall(r"HTTP/1.1 (\d+)", answers)


def head(method: str, *lines: str, path: str = "/health") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


@pytest.mark.parametrize("path", ["/health", "/closed"])
@pytest.mark.parametrize("line", [f"Content-Length: {len(HIDDEN)}", "Transfer-Encoding: chunked"])
def test_a_query_in_the_document_of_another_one_is_not_answered(server, line, path):
    served, paths = server
    statuses = speak(served, head("GET", line, path=path) + HIDDEN + HIDDEN)
    assert statuses == ["200" if path == "/health" else "401"]
    assert "/hidden" not in paths


def test_a_document_of_two_lengths_is_refused(server):
    served, paths = server
    lines = "Content-Length: 2", f"Content-Length: {2 + len(HIDDEN)}"
    assert speak(served, head("POST", *lines) + b"{}" + HIDDEN) == ["411"]
    assert speak(served, head("POST", lines[0], lines[0]) + b"{}" + HIDDEN) == ["200", "200"]
    assert paths == ["/health", "/hidden"]


def test_a_query_without_a_document_leaves_its_connection_open(server):
    served, paths = server
    assert speak(served, head("GET", "Content-Length: 0") + head("GET") + HIDDEN) == ["200"] * 3
    assert paths == ["/health", "/health", "/hidden"]


def test_a_length_may_have_spaces_around_it_and_nothing_else(server):
    served, _ = server
    for text in ("2", " 2 ", "\t2\t"):
        assert speak(served, head("POST", f"Content-Length:{text}") + b"{}") == ["200"]
    for text in ("", "+2", "0x2", "2, 2", "2_0", "\N{SUPERSCRIPT TWO}"):
        assert speak(served, head("POST", f"Content-Length: {text}") + b"{}") == ["411"]


@pytest.mark.slow
def test_behind_an_answer_that_a_client_does_not_read_stands_no_other_one(server):
    served, paths = server
    served._server.RequestHandlerClass.timeout = 1.0
    with socket.create_connection((served.host, served.port), timeout=30) as connection:
        connection.sendall(head("GET", path="/large") + HIDDEN)
        time.sleep(2.5)
    assert paths == ["/large"]


def test_every_error_has_a_status(server):
    served, _ = server
    assert speak(served, b"GET /health HTTP/2.0\r\n\r\n") == ["505"]
    assert speak(served, b"\x16\x03\x01\x02\x00\x01\r\n\r\n") == ["400"]
    assert speak(served, head("OPTIONS")) == ["405"]


def test_a_field_that_would_change_what_is_drawn_is_not_ignored():
    """How long an answer is to be was taken for harmless."""
    neutral = {"verbosity": "medium", "n": 1, "best_of": None, "user": "me", "logit_bias": {}}
    assert Fields(neutral, ()).values.keys() == neutral.keys() - {"best_of"}
    with pytest.raises(Refusal, match="verbosity = 'low': expected 'medium', or null"):
        Fields({"verbosity": "low"}, ())


def test_no_document_is_read_of_those_without_a_token():
    """Anyone could have 32 MiB of JSON read at /health."""
    answer, admit = serve.routes(lambda query: {"path": query.path}, "secret")
    admit("GET", "/health", "")
    assert answer(Query("GET", "/health", "", {})) == {"status": "ok"}
    assert answer(Query("GET", "/v1/models", "", {})) == {"path": "/v1/models"}
    for method, path in (("POST", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
        admit(method, path, "secret")
        with pytest.raises(Refusal, match="the token is wrong or missing"):
            admit(method, path, "guessed")
