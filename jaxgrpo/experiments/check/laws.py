"""What an update keeps when its batch is changed: laws, each a comparison of two batches.

The batch has four groups of samples of one to three tokens, two of the groups flat: of four samples
each, or of eight or two where the chain takes no groups of four. A pull is minus the derivative of
the loss with respect to the log-prob of a token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgrpo.advantages import AdvantageTransform, chains
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal
from jaxgrpo.experiments.check.expectation import STEP, count_refused, draw, judge
from jaxgrpo.experiments.check.games import Game, Policies
from jaxgrpo.experiments.check.method import Method
from jaxgrpo.losses import Objective, Tokens, token_loss
from jaxgrpo.update.batch_losses import batch_loss, loss_tokens

TOLERANCE = 1e-9
"""Of the largest number of a batch, as are the others: a loss may divide by thousands of tokens."""
ROUNDED = 1e-5
"""For own code that computes in float32."""
UP_TO_EPS = 1e-3
"""For rewards times a constant: deviations have an eps added before they divide."""
SHIFT, SCALE = 0.5, 2.0
NUDGE = 1e-4
"""Of log ratios, at most, for how a pull grows with the ratio: within every surrogate's bounds."""
LATE = 1000
"""Another step."""
FAR = 0.4
"""Of log ratios, for where a token has moved against its advantage: beyond PPO's bounds."""
P, T = 4, 3
SIZES = (4, 8, 2)
"""Samples of a group: the first that the chain takes. Of eight, the four below come twice."""
REWARDS = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]], float)
NEIGHBOURS = np.array([[1, 0, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 1]], float)
"""The same first group among others."""
LENGTHS = np.array([[1, 3, 2, 2], [2, 1, 3, 1], [1, 2, 3, 3], [3, 1, 2, 2]])
CUT = {(0, 2), (3, 0)}
"""(group, sample) that the limit has cut."""

LAWS = {
    "shift invariance": "a constant added to all rewards changes nothing",
    "scale invariance": "rewards times a constant change nothing",
    "order of samples": "samples of a group may come in any order",
    "order of groups": "groups may come in any order",
    "groups apart": "a group's advantages do not depend on the other groups",
    "unscored samples": "a sample that could not be scored counts as one that was not drawn",
    "masked samples": "the reward of a sample that is left out has no influence on the others",
    "masked tokens": "what masked tokens hold has no influence, and they are not pulled",
    "mask shrinks": "no step of the chain brings a masked sample back",
    "every step": "another number of the step changes nothing; a schedule makes it matter",
    "past state": "what a step remembers is from before the batch that it judges",
    "length": "the pull on a token does not depend on how many tokens its sample has",
    "micro-batches": "the gradients of the parts of a batch add up to that of the batch",
    "packing": "samples may share a row",
    "stale ratio": "stale samples are weighed by the ratio of the policy to the one that drew them",
    "way back": "a token that moved against its advantage is still pulled back",
    "finite": "every update is a number; a run skips a step with one that is not, and so does this",
    "group size": "the expected update is the same for every group size",
    "unit scale": "the expected update is the gradient of what it climbs, not a multiple of it",
    "KL": "a penalty pulls as KL(policy || reference) does",
}
"""Name -> what holds where the law does. The last four follow from expected updates."""


class Pull(NamedTuple):
    """What a method makes of a batch, [P, G, T] each, in the dtype of its chain."""

    pull: np.ndarray
    advantage: np.ndarray
    mask: np.ndarray
    refused: float  # samples left out because of the value of their reward


Run = Callable[[Rollouts], Pull]


def check_laws(method: Method) -> dict[str, bool]:
    """Name of each law of one batch -> whether the method keeps it.

    Raises: InputError if its chain takes no groups of one of SIZES.
    """
    samples, state = _begin(method)
    rollouts = make_batch(method, samples)
    plain = method.objective._replace(penalties=())
    bare = method._replace(objective=plain)
    if jax.tree.leaves(state):
        state = jax.jit(method.chain.update)(chains.start(rollouts), state, rollouts)[1]
    program = jax.jit(functools.partial(_pull, bare))

    def run(rollouts: Rollouts) -> Pull:
        return Pull(*jax.tree.map(np.asarray, program(rollouts, state)))

    reference = run(rollouts)
    laws = dict(_chain_laws(run, reference, rollouts, method.reward_names[0]))
    laws |= dict(_loss_laws(method, run, reference, rollouts))
    laws["unscored samples"] &= _is_as_not_drawn(method, rollouts)
    return laws | _step_laws(method.chain, rollouts, state)


def _begin(method: Method) -> tuple[int, Any]:
    """The samples of a group, and what the chain remembers before the first batch of such groups.

    Raises: InputError if its chain takes no groups of one of SIZES.
    """
    problems = []
    for samples in SIZES:
        size = RolloutSpec(P, samples, 1, T, method.reward_names, num_rows=P)
        try:
            return samples, method.chain.init(size)
        except InputError as error:
            problems.append(str(error))
    raise InputError(
        f"check {method.name}: the laws compare batches with groups of {SIZES[0]} samples, or of "
        f"{' or '.join(map(str, SIZES[1:]))}, whatever the config's, and its chain takes none of "
        f"these sizes: {problems[0]}"
    )


def make_batch(method: Method, samples: int = SIZES[0]) -> Rollouts:
    """The batch: the same in every call, in float64. Its samples are of the trained policy."""
    random = np.random.default_rng(1)
    length, shape = _widened(LENGTHS, samples).ravel(), (P * samples, T)
    tokens, state = random.integers(0, 3, (2, *shape), np.int32)
    truncated = np.zeros(REWARDS.shape, bool)
    truncated[tuple(np.array([*CUT]).T)] = True
    truncated = _widened(truncated, samples).ravel()
    mask = np.arange(T) < length[:, None]
    game = Game("laws", tokens, mask, state, truncated, (3, 3), {})
    policy, reference = map(jnp.asarray, random.normal(size=(2, P, 3, 3)))
    index = jnp.arange(P * samples).reshape(P, samples)
    tables = Policies(policy, policy, reference)
    return draw(method, game, tables, jnp.asarray(_widened(REWARDS, samples).ravel()), index)


def _widened(rows: np.ndarray, samples: int) -> np.ndarray:
    """[P, 4] -> [P, samples]: of more than four they come again."""
    return np.tile(rows, -(-samples // rows.shape[1]))[:, :samples]


def _reordered(number: int) -> np.ndarray:
    """The places 0 to number - 1, 7 at most, in another order: none stays where it is."""
    places = np.array([6, 2, 7, 5, 3, 1, 4, 0])
    return places[places < number]


def _current(logp: Array) -> dict[str, Array]:
    """What an update's pass gives, where it comes from no table of logits."""
    unit = jnp.ones_like(logp)
    return {"logp": logp, "policy_entropy": unit, "full_kl": unit}


def _pull(method: Method, rollouts: Rollouts, state: Any) -> tuple[Array, Array, Array, Any]:
    advantage, mask, metrics = judge(method.chain, rollouts, state)

    def loss(logp: Array) -> Array:
        current = _current(logp)
        return batch_loss(method.objective, current, rollouts, advantage, mask)

    slope = jax.grad(loss)(rollouts.fields["trainer_logp"])
    pull, advantage = (jnp.where(jnp.isfinite(x), x, 0) for x in (-slope, advantage))
    return pull.astype(advantage.dtype), advantage, mask, count_refused(metrics)


def _chain_laws(
    run: Run, before: Pull, rollouts: Rollouts, name: str
) -> Iterator[tuple[str, bool]]:
    """The laws of changed rewards, orders and lengths. Args: name: of the game's reward."""
    replace = functools.partial(dataclasses.replace, rollouts)
    rewards, samples = np.asarray(rollouts.rewards[name]), rollouts.truncated.shape[1]

    def rewarded(value: Any) -> Pull:
        return run(replace(rewards={**rollouts.rewards, name: jnp.asarray(value)}))

    after = rewarded(rewards + SHIFT)
    yield "shift invariance", not after.refused and _same(after.pull, before.pull)
    after = rewarded(rewards * SCALE)
    near = _near(after.pull, before.pull, UP_TO_EPS)
    yield "scale invariance", not after.refused and near
    order = _reordered(samples)
    by_sample = take_samples(rollouts, order)
    yield "order of samples", _same(run(by_sample).pull, before.pull[:, order])
    order = _reordered(P)
    by_group = jax.tree.map(lambda leaf: leaf[order] if leaf.ndim else leaf, rollouts)
    yield "order of groups", _same(run(by_group).pull, before.pull[order])
    after = rewarded(_widened(NEIGHBOURS, samples))
    pairs = (after.advantage, before.advantage), (after.mask, before.mask)
    yield "groups apart", all(_same(left[0], right[0]) for left, right in pairs)
    yield "unscored samples", _unscored(run, rollouts, name)
    after = rewarded(np.where(before.mask.any(-1), rewards, 1 - rewards))
    stays = before.mask & after.mask
    yield "masked samples", _same(np.where(stays, after.pull, 0), np.where(stays, before.pull, 0))
    yield "masked tokens", _masked_tokens(run, before, rollouts)
    after = run(replace(token_mask=rollouts.token_mask[:, ::-1]))
    # The first token is there in both; masks of samples may be other ones by their lengths.
    yield "length", _same(after.pull[..., 0], before.pull[..., 0])
    later = rollouts.policy_version + (LATE - STEP)
    after = run(replace(step=jnp.int32(LATE), policy_version=later))
    yield "every step", _same(after.pull, before.pull)


def take_samples(rollouts: Rollouts, places: np.ndarray) -> Rollouts:
    """The rollouts with the samples of each group that stand at some places, or are True."""
    shape = rollouts.truncated.shape

    def take(leaf: Array) -> Array:
        return leaf[:, places] if leaf.shape[:2] == shape else leaf

    return jax.tree.map(take, rollouts)


def _unscored(run: Run, rollouts: Rollouts, name: str) -> bool:
    """Whether a sample that no reward could score may say anything."""
    is_out = np.zeros(rollouts.truncated.shape, bool)
    is_out[0, 1] = True
    rewards = {
        key: jnp.where(is_out, jnp.nan, value) if key == name else value
        for key, value in rollouts.rewards.items()
    }
    unscored = dataclasses.replace(rollouts, rewards=rewards)
    spoiled = _spoil(unscored, jnp.asarray(is_out[..., None] & np.ones(T, bool)))
    spoiled = dataclasses.replace(
        spoiled,
        token_mask=rollouts.token_mask & ~is_out[..., None] | is_out[..., None],
        truncated=rollouts.truncated ^ is_out,
    )
    before, after = run(unscored), run(spoiled)
    return _same(after.pull, before.pull) and not before.pull[0, 1].any()


def _is_as_not_drawn(method: Method, rollouts: Rollouts) -> bool:
    """Whether the others of each group are judged as if its second sample had not been drawn."""
    is_out = np.arange(rollouts.truncated.shape[1]) == 1
    rewards = {name: jnp.where(is_out, jnp.nan, x) for name, x in rollouts.rewards.items()}
    unscored = dataclasses.replace(rollouts, rewards=rewards)

    @jax.jit
    def run(rollouts: Rollouts) -> tuple[Array, Array]:
        size = RolloutSpec(P, rollouts.truncated.shape[1], 1, T, method.reward_names, num_rows=P)
        state = method.chain.update(chains.start(rollouts), method.chain.init(size), rollouts)[1]
        return judge(method.chain, rollouts, state)[:2]

    try:
        fewer = run(take_samples(rollouts, ~is_out))
    except InputError:  # a chain that takes no groups of that size
        return True
    return all(_same(x[:, ~is_out], y) for x, y in zip(run(unscored), fewer, strict=True))


def _masked_tokens(run: Run, before: Pull, rollouts: Rollouts) -> bool:
    after = run(_spoil(rollouts, ~rollouts.token_mask))
    return (
        _same(after.pull, before.pull) and not before.pull[~np.asarray(rollouts.token_mask)].any()
    )


def _spoil(rollouts: Rollouts, places: Array) -> Rollouts:
    """The rollouts with other contents at some places [P, G, T]."""

    def spoil(value: Array) -> Array:
        if value.shape != rollouts.token_mask.shape:
            return value
        return jnp.where(
            places, jnp.asarray(jnp.nan if value.dtype == float else 7, value.dtype), value
        )

    return dataclasses.replace(
        rollouts,
        completion_tokens=spoil(rollouts.completion_tokens),
        behavior_logp=spoil(rollouts.behavior_logp),
        fields={name: spoil(value) for name, value in rollouts.fields.items()},
    )


def _loss_laws(
    method: Method, run: Run, before: Pull, rollouts: Rollouts
) -> Iterator[tuple[str, bool]]:
    """The laws of ratios, and of how a batch is cut and laid out."""
    logp = rollouts.fields["trainer_logp"]

    def drawn(log_ratio: Any) -> Rollouts:
        version = rollouts.policy_version - 1
        behavior_logp = logp - log_ratio
        return dataclasses.replace(rollouts, behavior_logp=behavior_logp, policy_version=version)

    # Each token by another number: a mean over the tokens of a sample is no token's ratio.
    nudge = NUDGE / 5 * (1 + np.arange(logp.size).reshape(logp.shape) % 5)
    nudged = drawn(nudge)
    after = run(nudged)
    advantage = before.advantage if method.chain.importance else after.advantage
    moved = np.abs(before.advantage) > TOLERANCE * np.abs(before.advantage).max()
    scale = np.where(moved, advantage / np.where(moved, before.advantage, 1), 1)
    total = np.where(rollouts.token_mask, nudge, 0).sum(-1, keepdims=True)
    yield (
        "stale ratio",
        any(
            np.allclose(after.pull, before.pull * scale * np.exp(change), rtol=NUDGE**1.5, atol=0)
            for change in (nudge, total)
        ),
    )
    after = run(drawn(-FAR * np.sign(before.advantage)))
    same_sign = after.mask & moved & (after.advantage * before.advantage > 0)
    towards = after.pull * np.sign(after.advantage)
    yield "way back", bool((towards[same_sign] > 0).all())
    judged = before.advantage, before.mask
    whole_batch, *parts, packed = _layouts(method.objective, nudged, *judged)
    yield "micro-batches", all(_same(part, whole_batch) for part in parts)
    yield "packing", _same(packed, whole_batch)


def _layouts(
    objective: Objective, rollouts: Rollouts, advantage: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The gradient by log-prob, a row for each sample, of a batch, of its halves, of its single
    tokens where the objective says that none depends on another, and of rows of two samples."""
    logp = rollouts.fields["trainer_logp"]
    live = (advantage != 0).any(-1, keepdims=True) | objective.acts_on_all
    alive = jnp.asarray(mask & live)
    tokens = loss_tokens(objective, _current(logp), rollouts, jnp.asarray(advantage), alive)
    weight = objective.reduction.weights(jnp.asarray(mask)).reshape(tokens.logp.shape)

    @jax.jit
    def slope(tokens: Tokens, weight: Array) -> Array:
        def loss(logp: Array) -> Array:
            current = dataclasses.replace(tokens, logp=logp)
            per_token, _ = token_loss(
                objective.surrogate, objective.penalties, current, objective.init()
            )
            return (weight * per_token).sum()

        return jax.grad(loss)(tokens.logp)

    half = len(tokens.logp) // 2
    halves = [
        slope(*jax.tree.map(lambda leaf: leaf[rows], (tokens, weight)))  # noqa: B023
        for rows in (slice(half), slice(half, None))
    ]
    wide = jax.tree.map(lambda leaf: leaf.reshape(half, -1), (tokens, weight))
    segment = jnp.repeat(jnp.arange(1, 3, dtype=jnp.int32)[None], half, 0).repeat(T, 1)
    packed = slope(dataclasses.replace(wide[0], segment=segment), wide[1])
    single = []
    if objective.per_token:
        single = [slope(*jax.tree.map(lambda leaf: leaf.reshape(-1, 1), (tokens, weight)))]
    layouts = slope(tokens, weight), np.concatenate(halves), *single, packed
    return tuple(np.asarray(layout).reshape(tokens.logp.shape) for layout in layouts)


def _step_laws(chain: AdvantageTransform, rollouts: Rollouts, state: Any) -> dict[str, bool]:
    """The laws of each step by itself: of its mask, and of what it remembers."""

    @jax.jit
    def run(state: Any) -> list[tuple[Any, Any, Any]]:
        stages = chains.trace(chain, rollouts, state)
        outcomes = []
        for stage, (key, step) in zip(stages, chain.steps, strict=False):
            inputs = stage.signal
            if step.kind == "signal->signal" and not isinstance(inputs, Signal):
                (inputs,) = inputs.values()
            output = step.update(inputs, state[key], rollouts)[0]
            moved = jax.tree.map(_move_neighbours, inputs)
            outcomes.append((inputs, output, step.update(moved, state[key], rollouts)[0]))
        return outcomes

    shrinks, past = True, True
    for (key, _), (inputs, output, moved) in zip(chain.steps, run(state), strict=True):
        if isinstance(inputs, Signal) and isinstance(output, Signal):
            mask = np.asarray(inputs.mask)
            mask = mask.reshape(mask.shape + (1,) * (output.mask.ndim - mask.ndim))
            shrinks &= not (np.asarray(output.mask) & ~mask).any()
        if jax.tree.leaves(state[key]):
            first = [np.asarray(signal.value)[0, 0] for signal in (output, moved)]
            past &= _same(*first)
    return {"mask shrinks": shrinks, "past state": past}


def _move_neighbours(leaf: Array) -> Array:
    """A value with other numbers for all groups but the first."""
    return leaf if leaf.dtype == bool else jnp.concatenate([leaf[:1], (1 - leaf[1:]) / 2])


def _same(left: Any, right: Any) -> bool:
    left, right = np.asarray(left), np.asarray(right)
    return _near(left, right, TOLERANCE if np.result_type(left, right) == np.float64 else ROUNDED)


def _near(left: np.ndarray, right: np.ndarray, tolerance: float) -> bool:
    """Whether arrays differ by no more than a share of the largest number in them."""
    sizes = np.abs(np.stack([left, right]).astype(float))
    largest = sizes.max(initial=0, where=np.isfinite(sizes))
    return bool(np.allclose(left, right, rtol=0, atol=tolerance * largest))


def broken(laws: Mapping[str, bool | None]) -> list[str]:
    """The names of the laws that do not hold, in the order of LAWS."""
    return [name for name in LAWS if laws.get(name) is not None and not laws[name]]
