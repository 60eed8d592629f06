"""What the processes of tools and environments do: each runs one tool after another, or one
environment (`processes`)."""

from __future__ import annotations

import base64
import inspect
import pickle
from collections.abc import Callable
from typing import Any

from jaxgrpo.core.errors import one_line, written
from jaxgrpo.data.limits import EventLoop, without_exit
from jaxgrpo.environments import partners  # loaded before forks are made
from jaxgrpo.rewards.worker_program import load as load_file

LOOP = EventLoop("jaxgrpo-calls")


def load(options: bytes) -> Callable[[str], list[Any]]:
    """The function that runs a call. Raises: what the user's files raise."""
    files, pickled = pickle.loads(options)
    for name, file in files:
        load_file(file, name)
    functions = {where: pickle.loads(data) for where, data in pickled.items()}
    environments: dict[str, Any] = {}  # one at most

    def run(call: str) -> Any:
        where, method, read, positional, arguments = pickle.loads(base64.b64decode(call))
        function = functions[where]
        if method:
            if where not in environments:
                environments[where] = function()
            function = getattr(environments[where], method)
        result = function(*positional, **arguments)
        if inspect.iscoroutine(result):
            result = LOOP.begin(without_exit(result))(None)
        return read(result)

    def answer(call: str) -> list[Any]:
        try:
            return ["", run(call)]
        except MemoryError:
            return ["memory"]
        except partners.Broken as error:
            return ["broken", str(error)]
        except Exception as error:
            return ["raised", type(error).__name__, written(error, str)]
        except BaseException as error:  # as in threads
            return ["raised", "RuntimeError", f"{type(error).__name__}: {one_line(error)}"]

    return answer
