"""`jaxgrpo serve`: a model behind a URL, for programs that ask OpenAI's or vLLM's server.

The token that queries carry is that of the variable JAXGRPO_TOKEN, or a new one that is printed.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxgrpo.cli.sampling import check_temperature, option_changes
from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.serving.dialect import Dialect
from jaxgrpo.environments.serving.fields import Limits
from jaxgrpo.environments.serving.server import Document, Query, Refusal, Server
from jaxgrpo.rollout.desk import Desk
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.console import telling
from jaxgrpo.training.stored_policy import Answerer, StoredPolicy, find_answerer

PLACES = 16  # samples under way at once, where the config has no rollout.slots
TOKEN = "JAXGRPO_TOKEN"
HEALTH = "GET", "/health"  # what takes no token
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    target: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Answers queries until a stop signal comes.

    Args:
      host, port: to listen at.
      name: of the model in queries; None: that of its folder.
      temperature, top_k, top_p, max_tokens: of all samples, by default as the run or config says;
        a query may ask for the likeliest tokens instead.

    Raises: InputError before anything is loaded, where an argument cannot be used.
    """
    check_temperature(temperature)
    token = read_token(os.environ.get(TOKEN))
    console = Console(highlight=False)
    changes = option_changes(None, top_k, top_p, max_tokens)
    answerer = find_answerer(console, target, changes, overrides, temperature)
    if jax.process_count() > 1:
        raise InputError("serve runs in one process: start it without others of a cluster")
    desk = open_desk(answerer.policy)
    dialect = make_dialect(answerer, name or Path(target).resolve().name)
    reply = lambda query: dialect.answer(query.path, query, desk.draw)  # noqa: E731
    server = Server(host, port, *routes(reply, token))
    try:
        with telling(console, "loading the model"):
            desk.open(answerer.policy.read_params(), 0)
        server.start()
        shown = f"token {token}" if not os.environ.get(TOKEN) else f"token as in {TOKEN}"
        reach = "this machine alone" if host in LOOPBACK else f"all that reach {host}"
        line = f"{dialect.name} at {server.url}/v1 for {reach}; {shown}"
        console.print(line, soft_wrap=True, markup=False)
        _wait(desk)
    finally:
        server.close()
        desk.close()
    return 0


def read_token(value: str | None) -> str:
    """The token that queries carry; None or empty: a new one.

    Raises: InputError where a header cannot hold it.
    """
    if not value:
        return secrets.token_urlsafe(24)
    if not (value.isascii() and value.isprintable()) or " " in value:
        raise InputError(f"{TOKEN}: a header cannot hold it: use printable ASCII without spaces")
    return value


def open_desk(policy: StoredPolicy) -> Desk:
    """What draws by a policy; no parameters are read yet."""
    settings, engine = policy.engine.settings, policy.engine
    return Desk(engine, engine.width, settings.slots or PLACES, policy.tokenizer, policy.seed)


def make_dialect(answerer: Answerer, name: str) -> Dialect:
    """How queries for a policy are read and answered."""
    policy, settings = answerer.policy, answerer.policy.engine.settings
    limits = Limits(
        vocab_size=policy.model.config.vocab_size,
        longest=policy.engine.width + settings.max_completion_tokens,
        max_tokens=settings.max_completion_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
    )
    return Dialect(name, answerer.chat, limits, answerer.parse, settings.stop_tokens)


def routes(reply: Callable[[Query], Document], token: str) -> tuple[Any, Any]:
    """The functions `answer` and `admit` of a server; `reply` answers all queries but HEALTH."""

    def answer(query: Query) -> Document:
        return {"status": "ok"} if (query.method, query.path) == HEALTH else reply(query)

    def admit(method: str, path: str, bearer: str) -> None:
        is_free = (method, path) == HEALTH
        if not is_free and not hmac.compare_digest(bearer.encode(), token.encode()):
            raise Refusal(401, "the token is wrong or missing: send Authorization: Bearer TOKEN")

    return answer, admit


def _wait(desk: Desk) -> None:
    """Returns never. Raises: process.StopRequested, or what the engine died of."""
    with process.stop_signals(after="segment of decoding"):
        while not process.stop_requested(0):
            if desk.problem is not None:
                raise desk.problem
            time.sleep(0.1)
        raise process.StopRequested("stopped; what was under way is not answered")
