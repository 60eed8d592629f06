"""Rewards that judge each sample by itself, of finished groups while other groups still decode.

Sampling runs in a thread of its own, which mostly waits for the device; the rewards run in the
thread that asked for the rollouts, so that their time limits, which need the main thread, hold.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxgrpo.core.types import Params, Prompts, Rollouts
from jaxgrpo.models import sharding
from jaxgrpo.rollout.judging import Judge, Judged, is_own
from jaxgrpo.rollout.state import Finished

Sample = Callable[..., Rollouts]
"""(params, prompts, key, finished=None) -> Rollouts, as `rollout.sampler.sample`"""


class _Stopped(Exception):
    """Ends sampling whose rewards have failed."""


class _Groups:
    """What the sampling thread hands over: finished groups, then None."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        self.stopped = False

    def put(self, groups: Finished) -> None:
        if self.stopped:
            raise _Stopped
        self.items.put(groups)

    def end(self, _: Future[Any]) -> None:
        self.items.put(None)


def sample_and_judge(
    sample: Sample, params: Params, prompts: Prompts, key: ArrayLike, judge: Judge, progress: Any
) -> tuple[Rollouts, list[Judged]]:
    """Samples, and calls the rewards in `judge.per_sample` on this process's groups as they end,
    but for the last ones.

    Args:
      progress: the rewards' `trainer_state`.

    With several processes a reward that fails is left to `Judge.rollouts`, which calls it again and
    fails in all of them.

    Raises: RewardError as the rewards do; sampling then ends at its next finished group.
    """
    rows, groups = sharding.to_host(prompts.row), _Groups()
    # Options of JAX that are set by a `with` hold in one thread only.
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]

    def run() -> Rollouts:
        with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
            return sample(params, prompts, key, groups.put)

    def judge_groups(finished: Finished) -> Judged:
        is_local = is_own(finished.places)
        places, tokens, mask = (array[is_local] for array in finished)
        return judge.groups(judge.per_sample, places, rows[places], tokens, mask, progress)

    early: list[Judged] = []
    failed = False
    with ThreadPoolExecutor(1, thread_name_prefix="sampling") as executor:
        future = executor.submit(run)
        future.add_done_callback(groups.end)
        try:
            while (batch := groups.items.get()) is not None:
                if failed or not is_own(batch.places).any():
                    continue
                try:
                    early.append(judge_groups(batch))
                except Exception:
                    if jax.process_count() == 1:
                        raise
                    failed = True
        except BaseException:
            groups.stopped = jax.process_count() == 1  # others would wait for this process
            raise
    return future.result(), early
