"""The compiled programs of a test session: which are kept on disk, shared by runs, and dropped."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import cache_key, compiler

MAX_MAPS = 40_000
"""Memory maps of the process at which programs are dropped. Linux allows 65,530; with more the
process ends in a segmentation fault, and each program holds several."""
MAX_BYTES = 5 << 30
"""Memory of the process at which programs are dropped: a worker would come to hold 8 GB of them."""
MORE_BYTES = 1 << 30
"""What it may grow by before they are dropped again: some of its memory is not given back, and then
they would be dropped behind every tenth test."""


COMPILED: dict[str | None, Any] = {}
"""The newest programs of this process by JAX's key of the compile cache: of those that took
MIN_SECONDS or more at most MAX_COMPILED, as each holds memory maps."""
MIN_SECONDS, MAX_COMPILED, LOCK = 0.05, 600, threading.Lock()


def compile_each_program_once() -> None:
    """A program that this process has compiled is not compiled again for another `jit` of it.

    The compile cache would do so, but only programs of one device are written to it and read back.
    A program of several CPU devices that is read back may wait for ever (JAX 0.10.2): its devices
    can meet in different collectives. JAX has one switch for all programs, so this is done around
    the function that reads and writes the cache.
    """
    cached = compiler.compile_or_get_cached

    def compile_(backend, computation, devices, options, callbacks, executable, *rest: Any):
        arguments = (computation, devices, options, backend)
        key = None if callbacks else cache_key.get(*arguments)
        if (program := COMPILED.get(key)) is not None:
            return program
        began = time.perf_counter()
        if devices.size == 1:
            program = cached(backend, computation, devices, options, callbacks, executable, *rest)
        else:
            program = compiler.backend_compile_and_load(
                backend, computation, executable, options, callbacks
            )
        if key is not None and time.perf_counter() - began >= MIN_SECONDS:
            with LOCK:  # programs are compiled in the background too
                COMPILED[key] = program
                if len(COMPILED) > MAX_COMPILED:
                    del COMPILED[next(iter(COMPILED))]
        return program

    compiler.compile_or_get_cached = compile_


@contextlib.contextmanager
def shared_by_all_runs() -> Iterator[None]:
    """`train` shares inputs and programs between all runs of the session.

    A run given Python objects shares what does not depend on them: the engine and the update.
    """
    from jaxgrpo.training import loop, opening, setup, stored_policy

    shared = setup.Shared()

    def share_for(config: Any, objects: bool) -> Any:
        share = shared.for_config(config)
        fixed = ("engine", "update") if objects else tuple(setup.DEPENDS)
        return lambda name, make: share(name, make) if name in fixed else make()

    def make_setup(
        config: Any, share: Any = None, check: Any = lambda read: None, **python_objects: Any
    ) -> Any:
        objects = any(value is not None for value in python_objects.values())
        share = share or share_for(config, objects)
        run = setup.setup(config, check=check, share=share, **python_objects)
        described[:] = [(run.rewards, objects)]
        return run

    def evaluator(run: Any) -> Any:
        ((rewards, objects),) = described  # the run that was set up last
        assert rewards is run.rewards
        return stored_policy.evaluator_for_run(run, share_for(run.config, objects))

    described: list[tuple[Any, bool]] = []  # of the newest run: its rewards, has it objects
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "setup", make_setup)
        patch.setattr(loop, "evaluator_for_run", evaluator)
        yield


class Dropping:
    """Drops every compiled program where they have too many memory maps or too much memory."""

    def __init__(self) -> None:
        self.most_bytes = MAX_BYTES  # of the process, at which they are dropped

    def drop_if_many(self) -> None:
        maps = Path("/proc/self/maps")
        if not maps.exists():
            return
        if maps.read_bytes().count(b"\n") > MAX_MAPS or resident_bytes() > self.most_bytes:
            COMPILED.clear()
            jax.clear_caches()
            gc.collect()
            give_back()
            self.most_bytes = max(MAX_BYTES, resident_bytes() + MORE_BYTES)


def resident_bytes() -> int:
    """The memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Gives free memory back to the system, which glibc keeps for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
