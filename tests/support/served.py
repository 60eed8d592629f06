"""A tiny model with a chat template behind a URL, and a plain client of it."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import chatting
import jax
from rich.console import Console

from jaxgrpo.cli import serve
from jaxgrpo.cli.make_base import base_config
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.environments.serving.server import Server
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders
from jaxgrpo.training.stored_policy import Answerer, StoredPolicy, find_answerer

TOKEN = "secret"
WIDTH, LONGEST, PLACES = 160, 24, 8
(END,) = chatting.ids("<|end|>")


class Served(NamedTuple):
    folder: Path
    policy: StoredPolicy
    params: Any
    answerer: Answerer
    url: str
    host: str
    port: int

    def ask(self, path: str, document: Any = None, token: str | None = TOKEN) -> tuple[int, Any]:
        """(status, document of the answer); bytes are sent as they are."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        with contextlib.closing(connection):
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            method, body = ("GET", None) if document is None else ("POST", body)
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())


def save(folder: Path) -> Path:
    """A model folder with random weights, whose distributions are far from uniform."""
    alphabet = [*chatting.LETTERS, *chatting.MARKS]
    tokenizer = character_tokenizer(alphabet, chatting.TEMPLATES["closed"])
    model = decoder.build(base_config(len(tokenizer), 32))
    params = jax.jit(model.init)(jax.random.key(0))
    params = {**params, "embed": jax.tree.map(lambda leaf: leaf * 5, params["embed"])}
    ends = {"eos_token_id": [tokenizer.eos_token_id, END]}
    folders.save_model(model, params, folder, tokenizer, generation_config=ends)
    return folder


@contextlib.contextmanager
def serving(folder: Path, **rollout: Any) -> Iterator[Served]:
    """A server for the model of a folder; `rollout` holds further keys of that table."""
    sizes = {"max_prompt_tokens": WIDTH, "max_completion_tokens": LONGEST, "slots": PLACES}
    changes = {f"rollout.{name}": value for name, value in ({**sizes, **rollout}).items()}
    answerer = find_answerer(Console(quiet=True), folder, changes, (), 1.0)
    policy = answerer.policy
    desk, params = serve.open_desk(policy), policy.read_params()
    dialect = serve.make_dialect(answerer, "tiny")
    reply = lambda query: dialect.answer(query.path, query, desk.draw)  # noqa: E731
    server = Server("127.0.0.1", 0, *serve.routes(reply, TOKEN))
    try:
        desk.open(params, 0)
        server.start()
        yield Served(folder, policy, params, answerer, server.url, server.host, server.port)
    finally:
        server.close()
        desk.close()
