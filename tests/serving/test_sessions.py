"""How long the session of a sample is there."""

from __future__ import annotations

import gc
from typing import Any

from jaxgrpo.environments.serving.endpoint import Session, Sessions


def test_the_session_of_a_sample_that_broke_is_there_no_longer_than_the_sample():
    """Its partner is not used again, so nothing would take it out."""
    dialect: Any = None
    sessions, session = Sessions(), Session(dialect, [1])
    try:
        sessions.open(session)
        assert len(sessions._sessions) == 1
        del session
        gc.collect()
        assert len(sessions._sessions) == 0
    finally:
        sessions._server.close()
