"""The steps of a run, taken by hand."""

from __future__ import annotations

import functools
from typing import Any

from jaxgrpo.core.metrics import Metrics
from jaxgrpo.core.types import Learner, Stream
from jaxgrpo.training.collecting.collector import Collected
from jaxgrpo.training.setup import Setup


def collect(run: Setup, learner: Learner, stream: Stream) -> tuple[Stream, Collected]:
    """What the next step trains on."""
    live_groups = functools.partial(run.live_groups, learner)
    return run.collect(run.sync(learner), int(learner.step), stream, live_groups)


def take_step(
    run: Setup, learner: Learner, stream: Stream
) -> tuple[Learner, Stream, Collected, Metrics]:
    """The next step, and the metrics of its updates."""
    stream, collected = collect(run, learner, stream)
    learner, prepared = run.prepare(learner, collected.rollouts)
    learner, metrics = run.update(learner, prepared.batches)
    return learner, stream, collected, metrics


def take_steps(run: Setup, count: int) -> tuple[Learner, Stream, list[Any]]:
    """The first steps, and for each the stream that it began with and what it collected."""
    learner, stream, steps = run.learner, run.stream, []
    for _ in range(count):
        before = stream
        learner, stream, collected, _ = take_step(run, learner, stream)
        steps.append((before, collected))
    return learner, stream, steps
