"""What to generate next: the prompt stream, and what a policy that selects from it is.

The stream has no end. Ordinal i is one row: each epoch visits every row once, in an order drawn
from (seed, epoch) alone, so that a run resumes from its cursor and nothing else.

A policy may leave rows of the stream out: it takes an ordinal if a draw from (seed, ordinal) alone
falls below the chance of its row, so a resumed run repeats itself. Host code in NumPy, the same on
every process. `rollout.policies` has the built-in ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Prompts, Rollouts, Stream
from jaxgrpo.data.sources import Mixture


class PromptPolicy(NamedTuple):
    """Which prompts to sample next. On the host, pure, the same on every process; state is saved.

    State is a tree of numpy arrays whose structure, shapes and dtypes do not change.
    """

    name: str
    init: Callable[[int, int], Any]  # (num_rows, seed) -> state
    select: Callable[[Any, int, int], np.ndarray]
    """(state, cursor, n) -> int32 [n], ordinals to sample; the cursor is the next unused one"""
    observe: Callable[[Any, Rollouts], Any]
    """(state, judged rollouts) -> state; it gets every group generated, once, when it is judged"""
    chance: Callable[[Any, int], np.ndarray] | None = None
    """(state, n) -> [rows] in [0, 1]: how likely `select` takes each; None: it leaves none out"""
    needs: frozenset[str] = frozenset()
    """fields of reference answers (`core.scores.ANSWERS_OF_POLICIES`) that `observe` reads"""
    bring: Callable[[Any, Any, Rollouts], dict[str, Any]] | None = None
    """(state, parameters that sampled, rollouts) -> fields that it adds to them; None: none"""


def with_memory(
    policy: PromptPolicy,
    init: Callable[[int], dict[str, Any]],
    observe: Callable[[Any, Rollouts], dict[str, Any]],
    bring: Callable[[Any, Any, Rollouts], dict[str, Any]],
) -> PromptPolicy:
    """`policy`, whose state holds more beside its own ("policy"), and which brings fields by it.

    Args:
      init: num_rows -> what more it holds.
      observe: (the whole state, judged rollouts) -> the same after them.
      bring: as `PromptPolicy.bring`, of the whole state.
    """
    chance = policy.chance

    def all_fields(state: Any, params: Any, rollouts: Rollouts) -> dict[str, Any]:
        inner = {} if policy.bring is None else policy.bring(state["policy"], params, rollouts)
        return {**inner, **bring(state, params, rollouts)}

    return policy._replace(
        init=lambda num_rows, seed: {"policy": policy.init(num_rows, seed), **init(num_rows)},
        select=lambda state, cursor, n: policy.select(state["policy"], cursor, n),
        observe=lambda state, rollouts: {
            "policy": policy.observe(state["policy"], rollouts),
            **observe(state, rollouts),
        },
        bring=all_fields,
        chance=chance and (lambda state, n: chance(state["policy"], n)),
    )


def sequential() -> PromptPolicy:
    """Takes the next n ordinals: every row once per epoch. Remembers nothing."""
    return PromptPolicy(
        name="sequential",
        init=lambda num_rows, seed: {},
        select=lambda state, cursor, n: np.arange(cursor, cursor + n, dtype=np.int32),
        observe=lambda state, rollouts: state,
    )


def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the rows, [num_rows], from the raw words of a counter-based generator.

    `Generator.permutation` may change between NumPy releases; these words may not.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    words = np.random.Philox(key=key).random_raw(num_rows)
    order = np.argsort(words, kind="stable").astype(np.int32)
    order.flags.writeable = False  # every caller gets the cached array
    return order


_epoch_order = functools.lru_cache(maxsize=4)(_order)


@functools.lru_cache(maxsize=2)
def _orders(sizes: tuple[int, ...], seed: int) -> tuple[Callable[[int], np.ndarray], ...]:
    """Of each source what gives the order of an epoch. It remembers two: a block of ordinals reads
    all sources, a large one in two epochs at most."""
    return tuple(
        # Sources of the same size have orders of their own; seeds are below 2**32.
        functools.lru_cache(maxsize=2)(functools.partial(_order, size, seed + (number << 32)))
        for number, size in enumerate(sizes)
    )


def _in_epochs(
    ordinals: np.ndarray, num_rows: int, order: Callable[[int], np.ndarray]
) -> np.ndarray:
    """The rows of ordinals of one source, int32 [...]."""
    rows = np.empty(ordinals.shape, np.int32)
    for epoch in np.unique(ordinals // num_rows):
        in_epoch = ordinals // num_rows == epoch
        rows[in_epoch] = order(int(epoch))[ordinals[in_epoch] % num_rows]
    return rows


BLOCK = 4096
"""Ordinals whose sources are worked out together."""


@functools.lru_cache(maxsize=8)
def _draws(weights: tuple[float, ...], block: int) -> tuple[np.ndarray, np.ndarray]:
    """The source that each ordinal of a block draws from, and that source's draws before it.

    Draw j of a source of weight w stands at time (j + 1/2) / w, and ordinals count by time: among
    any first n of them a source is drawn within (number of sources) of its share. [BLOCK] each.
    """
    # Further draws on both sides: until a time each source is off its share by up to a half.
    first, margin, total = block * BLOCK, len(weights) + 1, sum(weights)
    times = (first - margin) / total, (first + BLOCK + margin) / total
    bounds = [[max(0, math.ceil(time * w - 0.5)) for time in times] for w in weights]
    source = np.repeat(np.arange(len(weights)), [stop - start for start, stop in bounds])
    draw = np.concatenate([np.arange(*bound) for bound in bounds])
    order = np.lexsort((source, (draw + 0.5) / np.asarray(weights)[source]))
    order = order[first - sum(start for start, _ in bounds) :][:BLOCK]
    return source[order], draw[order]


def _rows_of_block(mixture: Mixture, seed: int, block: int) -> np.ndarray:
    """The rows of a block of ordinals, int64 [BLOCK]. Each source has epochs of its own."""
    source, draw = _draws(mixture.weights, block)
    rows, first = np.empty(BLOCK, np.int64), 0
    orders = _orders(mixture.sizes, seed)
    for number, (size, order) in enumerate(zip(mixture.sizes, orders, strict=True)):
        drawn = source == number
        rows[drawn] = first + _in_epochs(draw[drawn], size, order)
        first += size
    return rows


def row_of(
    ordinal: int | np.ndarray, num_rows: int, seed: int, mixture: Mixture | None = None
) -> np.ndarray:
    """The row of the data set that an ordinal of the stream selects.

        row = order(seed, ordinal // num_rows)[ordinal % num_rows]

    Args:
      mixture: of several sources, which are drawn from in proportion to their weights. Each has an
        order and epochs of its own, so that none of its rows comes again before all have come.

    Shapes: ordinal [...] -> int32 [...].
    Raises: ValueError on a negative ordinal or an empty data set.
    >>> sorted(row_of(np.arange(4, 8), num_rows=4, seed=0).tolist())  # the second epoch
    [0, 1, 2, 3]
    """
    ordinals = np.asarray(ordinal)
    if num_rows < 1 or (ordinals < 0).any():
        raise ValueError(
            f"row_of got num_rows = {num_rows} and ordinals from {ordinals.min(initial=0)}: "
            "it needs at least one row and no negative ordinal"
        )
    if mixture is None:
        return _in_epochs(ordinals, num_rows, functools.partial(_epoch_order, num_rows, seed))
    rows = np.empty(ordinals.shape, np.int32)
    for block in np.unique(ordinals // BLOCK):
        in_block = ordinals // BLOCK == block
        rows[in_block] = _rows_of_block(mixture, seed, int(block))[ordinals[in_block] % BLOCK]
    return rows


def pad_prompts(
    tokens: Sequence[np.ndarray], width: int, ordinal: Any, row: Any, step: int
) -> Prompts:
    """Prompts as host arrays, right-padded with 0: they go to the devices with the jitted call.

    Args:
      tokens: of each prompt, int32 [length <= width].
      ordinal, row: places in the stream and in the data set, int32 [P].
      step: finished steps.
    Raises: ValueError if one is longer; `data.prompts.prepare` refuses such data before.
    """
    padded = np.zeros((len(tokens), width), np.int32)
    length = np.array([len(ids) for ids in tokens])
    if length.max(initial=0) > width:
        raise ValueError(f"a prompt has {length.max()} tokens, more than the {width} there are")
    for place, ids in enumerate(tokens):
        padded[place, : len(ids)] = ids
    mask: Any = np.arange(width) < length[:, None]
    arrays: dict[str, Any] = {"prompt_tokens": padded, "ordinal": ordinal, "row": row, "step": step}
    arrays = {name: np.asarray(value, np.int32) for name, value in arrays.items()}
    return Prompts(prompt_mask=mask, **arrays)


def prompt_metrics(
    policy: PromptPolicy, before: Stream, after: Stream, steps: int, n: int
) -> Metrics:
    """What a policy that leaves rows out chose from, and how many prompts it has passed over.

    Args:
      before: the stream that it selected with.
      after: the stream after that, whose cursor has moved.
      steps: for which it has selected prompts by then.
      n: prompts of a step.
    """
    if policy.chance is None:
        return {}
    logged = {"prompts/eligible": policy.chance(before.prompt_policy_state, n).mean()}
    waiting = before.waiting
    if waiting.leftover is None and waiting.experience is None:  # every step has taken n
        logged["prompts/skipped"] = int(after.cursor) - steps * n
    return {name: mean(jnp.float32(value)) for name, value in logged.items()}


def part_metrics(
    names: Sequence[str], number: np.ndarray, reward: np.ndarray, scored: np.ndarray
) -> Metrics:
    """Of each part of a step's prompts its share of them and their mean reward: prompts/NAME and
    reward/NAME.

    Args:
      names: of the parts, as source_NAME for a source of the data.
      number: the part of each prompt.

    Shapes: number [P]; reward, the weighted sum, and whether it was scored [P, G].
    """
    metrics = {}
    for place, name in enumerate(names):
        drawn = number == place
        mask = jnp.asarray(scored & drawn[:, None])
        metrics[f"prompts/{name}"] = mean(jnp.asarray(drawn))
        metrics[f"reward/{name}"] = mean(jnp.where(mask, jnp.asarray(reward), 0), mask)
    return metrics


def reinstated(eligible: np.ndarray, cost: np.ndarray, n: int) -> np.ndarray:
    """Chances 0 and 1 of rows; at least `n` are 1 (if there are as many), the cheapest ones."""
    missing = min(n, len(eligible)) - int(eligible.sum())
    if missing > 0:
        eligible = eligible.copy()
        order = np.argsort(np.where(eligible, np.inf, cost), kind="stable")
        eligible[order[:missing]] = True
    return eligible.astype(np.float64)


def walk(
    chance: np.ndarray, seed: int, cursor: int, n: int, mixture: Mixture | None = None
) -> np.ndarray:
    """The next n ordinals that are taken, int32 [n].

    It ends after two epochs, which hold every row at least once (of a mixture those of its larger
    weights): what is missing is taken from the ordinals passed over, first those of rows with any
    chance. So no row fills a whole step.
    """
    num_rows = len(chance)
    limit = cursor + 2 * (num_rows + n)
    accepted, rejected, start, size = [], [], cursor, max(4 * n, 64)
    while start < limit and sum(map(len, accepted)) < n:
        ordinals = np.arange(start, min(start + size, limit))
        chances = chance[row_of(ordinals, num_rows, seed, mixture)]
        hit = draw(ordinals, seed) < chances
        accepted.append(ordinals[hit])
        rejected.append(ordinals[~hit & (chances > 0)])
        start, size = start + size, 2 * size
    selected = np.concatenate(accepted)[:n]
    if len(selected) < n:
        rejected_ordinals = np.concatenate(rejected)
        remaining_ordinals = np.setdiff1d(
            np.arange(cursor, limit), np.concatenate([selected, rejected_ordinals])
        )
        selected = np.sort(np.concatenate([selected, rejected_ordinals, remaining_ordinals])[:n])
    return selected.astype(np.int32)


def draw(ordinals: np.ndarray, seed: int) -> np.ndarray:
    """A number in [0, 1) for each ordinal, of (seed, ordinal) alone: SplitMix64, Steele 2014."""
    with np.errstate(over="ignore"):
        state = _mixed(np.asarray([seed ^ 0x5851F42D4C957F2D], np.uint64))
        bits = _mixed(state + ordinals.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
