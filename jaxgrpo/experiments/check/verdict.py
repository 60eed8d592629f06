"""What a method climbs: its expected updates beside the gradients that they may be.

All policies of a game are taken together, as the prompts of one batch: the update of a method is
one vector over all of them. So the gradients of the mean reward and of pass@k differ, which on a
single prompt with rewards in {0, 1} all have one direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgrpo.core.errors import InputError
from jaxgrpo.experiments.check import targets
from jaxgrpo.experiments.check.expectation import Expected, expect, spec
from jaxgrpo.experiments.check.games import GAMES, Game, make_policies
from jaxgrpo.experiments.check.laws import check_laws
from jaxgrpo.experiments.check.method import Method
from jaxgrpo.losses import Surrogate

Sizes = Mapping[tuple[str, int], Sequence[int]]
SIZES: Sizes = {
    ("bandit", 1): (2, 4, 8),
    ("bigram", 1): (2, 4),
    ("bandit", 2): (2, 4),
    ("bigram", 2): (2,),
}
"""(game, groups in a batch) -> the group sizes whose batches are all enumerated."""
EXACT = 1e-6
"""Of the length of an update: what is nearer to a gradient than this is that gradient."""
NEAR = 0.4
"""A divergence is called what is climbed if the update is no farther from its gradient."""
OF_REFERENCE = frozenset(("reference_logp", "base_logp", "ema_logp", "full_kl"))
"""What a penalty on the distance from another policy reads."""
NOTHING = Surrogate("nothing", lambda tokens: (0 * tokens.logp, {}))


class Row(NamedTuple):
    """The expected updates of one setting, beside the gradients that they may be."""

    game: str
    rewards: str  # "binary" or "graded"
    group_size: int
    staleness: int  # 1: the samples are of the policy before
    rate: np.ndarray  # [K], success rates
    size: float  # of the update, in sizes of the gradient of the mean reward
    cosine: float  # with the gradient of the mean reward
    bias: dict[str, float]  # target -> distance from a multiple of its gradient, by the size
    scale: dict[str, np.ndarray]  # target -> [K], of its gradient in the update on each prompt
    aside: np.ndarray  # [K], the part of the update on each prompt across the mean reward's
    noise: float  # variance of one group's update by the square of the expected one
    flat: tuple[float | None, float | None]  # advantages where all fail, all pass; None: masked
    flat_share: float  # of the update, from groups that are flat
    skipped: float  # largest chance of a batch whose update is not finite


class Report(NamedTuple):
    """What `jaxgrpo check` finds for a method."""

    name: str
    climbs: str  # "mean reward", "pass@k", "log success", "divergence", "other" or "nothing"
    target: str  # the same in full: "pass@G", or of "other" the mean reward, which it is beside
    cosine: float  # with the gradient of the mean reward
    scale: tuple[float, float]
    bias: float
    noise: float
    flat_groups: dict[str, float | None]
    laws: dict[str, bool | None]  # None: not judged
    penalty: dict[str, Any] | None
    rows: list[Row]

    def numbers(self) -> dict[str, Any]:
        """For --json."""
        document = self._asdict()
        rows = document.pop("rows")
        document["settings"] = [row._asdict() for row in rows]
        return document


def check(method: Method, sizes: Sizes = SIZES) -> Report:
    """Everything that is found out about a method: what it climbs without its penalties, and they.

    Args:
      sizes: as `SIZES`.

    Raises: InputError if its chain takes none of the group sizes.
    """
    bare = method._replace(objective=method.objective._replace(penalties=()))
    with jax.enable_x64(True):
        laws: dict[str, bool | None] = {**check_laws(method)}
        rows = measure(bare, 1 if laws["groups apart"] else 2, sizes)
        penalty = measure_penalty(method)
        laws["KL"] = pulls_as_kl(method, penalty)
    main = main_rows(rows)
    climbs, target = name_target(main)
    scales = np.array([row.scale[target] for row in main])
    low, high = scales.min(), scales.max()
    even = all(row.bias[target] < EXACT for row in main)
    laws["finite"] = not any(row.skipped for row in rows)
    laws["group size"] = _is_for_every_size(main, target)
    laws["unit scale"] = even and abs(low - 1) < EXACT and abs(high - 1) < EXACT
    last = max(bandit_rows(main), key=lambda row: row.group_size)
    flat = {"all_fail": last.flat[0], "all_pass": last.flat[1], "share": last.flat_share}
    cosine, bias = (float(np.mean(v)) for v in ([r.cosine for r in main],
                                                [r.bias[target] for r in main]))  # fmt: skip
    ends = float(low), float(high)
    return Report(
        *(method.name, climbs, target, cosine, ends, bias, last.noise, flat, laws, penalty, rows)
    )


def _is_for_every_size(rows: Sequence[Row], target: str) -> bool | None:
    """Whether an update is the same multiple of a target's gradient for every group size; None
    where the chain takes a single size."""
    scales: dict[str, list[np.ndarray]] = {}
    for row in rows:
        scales.setdefault(row.game, []).append(row.scale[target])
    several = [np.stack(by_size) for by_size in scales.values() if len(by_size) > 1]
    largest = max((np.abs(by_size).max() for by_size in several), default=0.0)
    spans = [np.ptp(by_size, axis=0).max() for by_size in several]
    return bool(max(spans) < EXACT * max(EXACT, largest)) if spans else None


def measure(method: Method, prompts: int, sizes: Sizes) -> list[Row]:
    """The rows of every setting that the chain takes. Args: prompts: groups of a batch."""
    rows, problem = [], None
    for game in GAMES.values():
        tables = make_policies(game)
        for samples in sizes[game.name, prompts]:
            if refusal := _refusal(method, game, samples, prompts):
                problem = refusal
                continue
            for stale in (0, 1):
                drawn = tables if stale else tables._replace(behavior=tables.policy)
                for kind, reward in game.rewards.items():
                    expected = expect(method, game, samples, prompts, reward, drawn)
                    if not expected.refused:
                        setting = game, kind, samples, stale
                        rows.append(_compare(method, setting, tables.policy, expected))
    if not any(row.rewards == "binary" for row in rows):
        numbers = ", ".join(map(str, sizes["bandit", prompts]))
        raise InputError(
            f"check {method.name}: its chain takes no groups of {numbers} samples with rewards of "
            f"0 and 1, and others are not enumerated: {problem or 'it leaves such rewards out'}"
        )
    return rows


def _refusal(method: Method, game: Game, samples: int, prompts: int) -> InputError | None:
    """Why a method's chain takes no groups of so many samples; None where it does."""
    try:
        method.chain.init(spec(method, game, samples, prompts))
    except InputError as error:
        return error
    return None


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that a method is named by: rewards of 0 and 1, samples of the policy itself, and an
    update that is not 0, if there is such a row."""
    plain = [row for row in rows if row.rewards == "binary" and not row.staleness]
    return [row for row in plain if row.size > EXACT] or plain


def bandit_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows in which length plays no part, if there are any."""
    return [row for row in rows if row.game == "bandit"] or [*rows]


def name_target(rows: Sequence[Row]) -> tuple[str, str]:
    """(what is climbed, in the words of the report; the target's full name).

    A target is climbed whose gradient is the update, or a multiple of it, in every setting of the
    bandit, where length plays no part. The mean reward is climbed too where each prompt's update is
    a multiple of its gradient, whatever the prompt.
    """
    if rows[0].size < EXACT:
        return "nothing", targets.MEAN
    bandits = bandit_rows(rows)
    common = [name for name in bandits[0].bias if all(name in row.bias for row in rows)]
    for name in common:
        if all(row.bias[name] < EXACT for row in bandits):
            return _kind(name), name
    scales = [row.scale[targets.MEAN] for row in bandits]
    if all((scale > 0).all() and (row.aside < EXACT).all()
           for scale, row in zip(scales, bandits, strict=True)):  # fmt: skip
        return targets.MEAN, targets.MEAN
    # An estimate of Z from a group draws the update to the mean reward, least in the largest.
    distances = max(bandits, key=lambda row: row.group_size).bias
    single = [name for name in common if _kind(name) != "pass@k" and "order" not in name]
    nearest = min(single, key=lambda name: distances[name])
    if targets.is_divergence(nearest) and distances[nearest] < NEAR:
        return "divergence", nearest
    return "other", targets.MEAN


def _kind(name: str) -> str:
    """The word of the report for a target."""
    if targets.is_divergence(name):
        return "divergence"
    for kind in ("pass@", targets.LOG):
        if name.startswith(kind):
            return "pass@k" if kind == "pass@" else kind
    return name


def _compare(
    method: Method, setting: tuple[Game, str, int, int], logits: np.ndarray, expected: Expected
) -> Row:
    game, kind, samples, stale = setting
    weight, knows_base = method.rewards[0][1] or 1.0, "base_logp" in method.chain.needs
    climbed = targets.reward_gradients(game, kind, samples, knows_base)
    slopes = {name: weight * slope for name, slope in climbed.items()}
    mean, update = slopes[targets.MEAN], expected.update
    aside = update - _scale(update, mean)[:, None, None] * mean
    size, square = _norm(update), float((expected.square).sum())
    smallest = EXACT * _norm(mean)
    rates = np.exp(_sample_logp(game, logits)) @ game.rewards["binary"]
    ends = expected.advantage.T
    flat = [None if np.isnan(end).all() else round(float(np.nanmean(end)), 12) for end in ends]
    return Row(
        game=game.name,
        rewards=kind,
        group_size=samples,
        staleness=stale,
        rate=rates,
        size=size / _norm(mean),
        cosine=_cosine(update, mean),
        bias={name: _distance(update, slope) for name, slope in slopes.items()},
        scale={name: _scale(update, slope) for name, slope in slopes.items()},
        aside=np.sqrt((aside**2).sum((1, 2))) / max(size, smallest),
        noise=square / size**2 - 1 if size > smallest else float("inf"),
        flat=(flat[0], flat[1]),
        flat_share=_norm(expected.failed + expected.passed) / max(size, smallest),
        skipped=float(expected.skipped.max()),
    )


def measure_penalty(method: Method) -> dict[str, Any] | None:
    """What the penalties of the loss climb by themselves, on the samples that they act on, in the
    smallest groups that the chain takes; None: there are none."""
    objective = method.objective
    if not objective.penalties:
        return None
    acts_on_all = objective._replace(penalties=()).acts_on_all
    nothing = NOTHING._replace(acts_on_all=acts_on_all)
    alone = method._replace(objective=objective._replace(surrogate=nothing))
    distances: dict[tuple[str, bool], list[float]] = {}
    cosines, size = [], 0.0
    for game in GAMES.values():
        numbers = SIZES[game.name, 1]
        samples = next((n for n in numbers if not _refusal(alone, game, n, 1)), None)
        if samples is None:
            continue
        tables = make_policies(game)
        tables = tables._replace(behavior=tables.policy)
        reward = game.rewards["binary"]
        update = expect(alone, game, samples, 1, reward, tables).update
        slopes = targets.penalty_gradients(game)
        cosines.append(_cosine(update, slopes[targets.REVERSE]))
        size = max(size, _norm(update))
        for name, slope in slopes.items():
            for backwards in (False, True):
                way = distances.setdefault((name, backwards), [])
                way.append(_distance(update, -slope if backwards else slope))
    nearest, backwards = min(distances, key=lambda way: sum(distances[way]))
    names = ", ".join(penalty.name for penalty in objective.penalties)
    reverse = (targets.REVERSE, False), (targets.REVERSE + targets.AT_STATES, False)
    exact = max(distances[nearest, backwards]) < EXACT
    return {
        "penalties": names,
        "climbs": "nothing" if size < EXACT**2 else nearest if exact else "other",
        "nearest": nearest,
        "backwards": backwards,
        "cosine": float(np.mean(cosines)),
        "bias": min(max(distances[way]) for way in reverse),
    }


def pulls_as_kl(method: Method, measured: dict[str, Any] | None) -> bool:
    """Whether the penalties that read the reference pull as the reverse KL does.

    Args:
      measured: what all penalties do, together.
    """
    penalties = method.objective.penalties
    readers = tuple(penalty for penalty in penalties if penalty.needs & OF_REFERENCE)
    if len(readers) < len(penalties):
        objective = method.objective._replace(penalties=readers)
        measured = measure_penalty(method._replace(objective=objective))
    return measured is None or measured["bias"] < EXACT


def _sample_logp(game: Game, logits: np.ndarray) -> np.ndarray:
    odds = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.where(game.mask, odds[:, game.state, game.tokens], 0).sum(-1)


def _norm(vector: np.ndarray) -> float:
    return float(np.sqrt((vector**2).sum()))


def _cosine(left: np.ndarray, right: np.ndarray) -> float:
    size = _norm(left) * _norm(right)
    return float((left * right).sum() / size) if size > EXACT**2 else 0.0


def _distance(update: np.ndarray, slope: np.ndarray) -> float:
    """How far an update is from the nearest multiple, not below 0, of a gradient; by its size."""
    factor = max(float((update * slope).sum()), 0) / float((slope**2).sum())
    size = _norm(update)
    return _norm(update - factor * slope) / size if size > EXACT**2 else 1.0


def _scale(update: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """[K], the multiple of the gradient in the update, on each prompt."""
    return (update * slope).sum((1, 2)) / (slope**2).sum((1, 2))
