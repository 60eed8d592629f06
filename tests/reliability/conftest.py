"""What the tests of faults share: how runs are started, and a folder of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faulty_runs
import pytest
from checkpointed import saved as saved
from forked import Forked
from series import Series

Start = Callable[..., Forked]


@pytest.fixture
def start(fork_server, environment) -> Iterator[Start]:
    """start(*arguments, devices=1, more={}, **options) -> a started command of jaxgrpo.

    It is killed with its test; `more` is added to its environment, options are those of
    `ForkServer.start`.
    """
    started: list[Forked] = []

    def begin(
        *arguments: Any, devices: int = 1, more: dict[str, str] | None = None, **options: Any
    ) -> Forked:
        variables = environment(devices, **(more or {}))
        started.append(fork_server.start(*arguments, env=variables, **options))
        return started[-1]

    yield begin
    for command in started:
        command.kill_group()


@pytest.fixture(scope="module")
def series(fork_server, environment) -> Iterator[Series]:
    """A process that runs the commands of a module's tests one after another."""
    commands = Series(fork_server, environment())
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def powerless_series(fork_server, environment) -> Iterator[Series]:
    """The same, which as root reads and writes only what modes of files allow."""
    commands = Series(fork_server, environment(), is_powerless=True)
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A model that was not trained."""
    return faulty_runs.make_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def space() -> Iterator[None]:
    """Files may again be of any size behind the test."""
    yield
    faulty_runs.limit_files()
