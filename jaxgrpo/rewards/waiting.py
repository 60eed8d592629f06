"""Awaiting async rewards together, from code that is not async."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple


class Raised(NamedTuple):
    """What a call raised in the place of a value."""

    error: BaseException


def wait_for(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of all, which run at the same time; Raised(error) where one fails.

    They run in one event loop of a thread of its own. So this works where a loop is running
    already, as in a notebook, and what a reward keeps between calls (a session, a lock) stays with
    its loop.
    """
    future = asyncio.run_coroutine_threadsafe(_gather(awaitables), _loop())
    try:
        return future.result()
    except BaseException:  # a signal, while waiting
        future.cancel()
        raise


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="jaxgrpo-rewards", daemon=True).start()
    return loop


async def _gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*map(_outcome, awaitables)))


async def _outcome(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except BaseException as error:  # one that left its task would end the loop's thread
        return Raised(error)
