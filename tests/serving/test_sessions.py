"""What a program is, and how long the session of its sample is there."""

from __future__ import annotations

import functools
import gc

import chatting

from jaxgrpo.environments import calls
from jaxgrpo.environments.serving.dialect import Dialect, Limits
from jaxgrpo.environments.serving.endpoint import Session, Sessions, is_program


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


def test_the_session_of_a_sample_that_broke_is_there_no_longer_than_the_sample():
    """Its partner is not used again, so nothing would take it out."""
    dialect = Dialect(
        "policy", chatting.chat(), Limits(8, 8, 8, 1.0, 1.0, 0, 0.0), lambda: calls.hermes, [1]
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
