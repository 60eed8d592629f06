"""Advantages of samples that have turns: what each turn earned, and among which it is compared.

The fields, by their default names:

    turn            [P, G, T] int      the turn that a token belongs to, -1 for none
    turn_reward     [P, G, K] float    what the environment gave for each turn; 0: nothing
    state_hash      [P, G, K] int      what the model had read before each turn: equal is equal
    turn_truncated  [P, G, K] bool     whether its limit stopped the turn

A run with tools or environments brings them (docs/environments.md).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base, stats, tokens, trees
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, Signal

_BASELINES = ("turn", "none")


def turn_returns(
    gamma: Scheduled = 1.0,
    baseline: str = "turn",
    turn: str = "turn",
    turn_reward: str = "turn_reward",
    scale: Scheduled = 1.0,
) -> AdvantageTransform:
    """Gives the tokens of a turn what is earned from this turn on.

        R[k] = sum_{j >= k} gamma^(j - k) r[j],   r[j] = scale turn_reward[j], r[last] += r - sum r
        a[t] = R[k] - mean_g R[k],   k the turn of token t

    The reward of the sample that its turns did not bring, beyond rounding, counts at its last turn,
    so that the rewards of the turns add up to it. The mean is over the samples of the group that
    have a turn of that number. With one turn it is centred GRPO.

    Args:
      gamma: the discount; a number or a function of the step.
      baseline: "turn", that mean; "none" subtracts nothing.
      turn, turn_reward: names of the fields.
      scale: the environment's weight in the sum of the rewards; a number or a function of the step.

    Signal: [P, G], rewards -> [P, G, T], mask = that of the sample on its token_mask.
    Raises: InputError on values that are already [P, G, T].
    Metrics: turns, the mean number of turns.
    Source: reward-to-go, Sutton and Barto 2018 (13.4), by turns; the mean is a group's baseline.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"turn": [[[0, 1], [0, 1]]], "turn_reward": [[[1.0, 0.0], [0.0, 0.0]]]}
    >>> fields["token_mask"] = [[[True, True], [True, True]]]
    >>> evaluate(turn_returns(), [[1.0, 1.0]], **fields)[0].tolist()
    [[[0.0, -0.5], [0.0, 0.5]]]
    """
    base.check_choice("turn_returns", _BASELINES, baseline=baseline)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        turns = _drawn_turns("turn_returns", turn, rollouts)
        rewards = _turn_rewards("turn_returns", turn_reward, scale, turns, rollouts)
        returns, valid = _returns(signal, turns, rewards, base.at_step(gamma, rollouts, float))
        if baseline == "turn":
            group = stats.summary(returns, valid)
            returns = jnp.where(group.flat, 0, group.centred(returns))
        spread = _on_turns(jnp.where(valid, returns, 0), turns)
        mask = (turns >= 0) & signal.mask[..., None]
        value = jnp.where(mask, spread, 0).astype(signal.value.dtype)
        return Signal(value=value, mask=mask), {"turns": mean(valid.sum(-1), signal.mask)}

    needs = frozenset({turn, turn_reward})
    options: Any = dict.fromkeys(("relative", "shrinks"), baseline == "turn")
    return base.stateless("turn_returns", apply, needs=needs, levels=(2,), **options)


def turn_normalise(
    gamma: Scheduled = 0.95,
    weight: Scheduled = 1.0,
    std: bool = True,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    turn: str = "turn",
    turn_reward: str = "turn_reward",
    state: str = "state_hash",
    scale: Scheduled = 1.0,
) -> AdvantageTransform:
    """Normalises a sample among its group and each turn among turns in its state, and adds both.

        a[t] = (r - mean_group r) / (std_group r + eps)
             + weight (R[k] - mean_same R[k]) / (std_same R[k] + eps),   k the turn of token t

    R as in `turn_returns`; "same" are the turns of all samples of the group, of any number, before
    which the model had read the same (equal `state`). A part is exactly 0 where all are equal
    or there are fewer than two. Without turns that meet it is GRPO.

    Args:
      gamma: the discount; a number or a function of the step.
      weight: of the second part; a number or a function of the step.
      std: False subtracts the two means only.
      eps: added to the standard deviations, in units of reward; a number or a function of the step.
      ddof: 0 divides the variances by n, 1 by n - 1.
      turn, turn_reward, state: names of the fields.
      scale: as in `turn_returns`.

    Signal: [P, G], rewards -> [P, G, T], mask = that of the sample on its token_mask.
    Raises: InputError on values that are already [P, G, T].
    Metrics: alone, the share of turns that no other turn of the group shares a state with.
    Source: GiGPO, arXiv 2505.10978 (episode and step advantages, and their sum).

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"turn": [[[0, 1], [0, 1]]], "turn_reward": [[[1.0, 0.0], [0.0, 0.0]]]}
    >>> fields |= {"state_hash": [[[7, 8], [7, 9]]], "token_mask": [[[True] * 2] * 2]}
    >>> evaluate(turn_normalise(1.0, std=False), [[1.0, 0.0]], **fields)[0].tolist()
    [[[1.0, 0.5], [-1.0, -0.5]]]
    """
    base.check_divisor("turn_normalise", eps, ddof)
    fields, numbers = (turn, turn_reward, state), (scale, gamma, weight, eps)
    apply = functools.partial(_turn_normalised, fields, numbers, std, ddof)
    # Not relative: a sample that meets one state twice says something by itself, and pays its KL.
    part = base.stateless("turn_normalise", apply, needs=frozenset(fields), levels=(2,))
    return part._replace(shrinks=True, alone=1.0)


def keep_turns(
    first: int | None = None, last: int | None = None, turn: str = "turn"
) -> AdvantageTransform:
    """Masks the tokens of all turns of a sample but its first or its last ones.

        token t stays where turn[t] < first or turn[t] >= n - last,  n the turns of the sample

    Put it behind the baseline and behind what shares a reward out to turns. What is masked leaves
    the denominator of the loss too. Samples with fewer turns keep all of them.

    Args:
      first, last: how many; one of the two, or both.
      turn: name of the field.

    Signal: [P, G] or [P, G, T] -> [P, G, T], mask cut.  Raises: InputError without a number.
    Metrics: masked, the share of tokens that went.
    Source: the last turn alone is `mask_history` in LLaMA-Factory's supervised training.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"turn": [[[0, 1, 1]]], "token_mask": [[[True, True, True]]]}
    >>> evaluate(keep_turns(last=1), [[1.0]], **fields)[1].tolist()
    [[[False, True, True]]]
    """
    name = "keep_turns"
    base.check_whole(name, first=first, last=last)
    if first is None and last is None:
        raise InputError("keep_turns: neither first nor last is given: say how many turns stay")

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        turns = _drawn_turns(name, turn, rollouts)
        number = turns.max(-1, keepdims=True) + 1
        keep = (turns < (first or 0)) | (turns >= number - (last or 0))
        return _without(tokens.at_tokens(name, signal, rollouts), ~keep)

    return base.stateless(name, apply, needs=frozenset({turn}))


def mask_truncated_turns(
    turn: str = "turn", turn_truncated: str = "turn_truncated"
) -> AdvantageTransform:
    """Masks the tokens of turns that their limit cut; the other turns of the sample stay.

        token t goes where turn[t] was stopped by rollout.max_turn_tokens, or by the sample's limit

    `mask_truncated` takes a sample out whose last turn was cut, with all of its turns.

    Args:
      turn, turn_truncated: names of the fields.

    Signal: [P, G] or [P, G, T] -> [P, G, T], mask cut.
    Metrics: masked, the share of tokens that went.
    Source: DAPO's overlong filtering, arXiv 2503.14476, section 3.4, by turns, which are ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"turn": [[[0, 1]]], "turn_truncated": [[[True, False]]]}
    >>> evaluate(mask_truncated_turns(), [[1.0]], token_mask=[[[True, True]]], **fields)[1].tolist()
    [[[False, True]]]
    """
    name = "mask_truncated_turns"

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        turns = _drawn_turns(name, turn, rollouts)
        cut = _read_by_turn(name, turn_truncated, turns, rollouts).astype(bool)
        gone = _on_turns(cut, turns)
        return _without(tokens.at_tokens(name, signal, rollouts), gone)

    return base.stateless(name, apply, needs=frozenset({turn, turn_truncated}))


def _without(signal: Signal, gone: Array) -> tuple[Signal, Metrics]:
    masked = dataclasses.replace(signal, mask=signal.mask & ~gone)
    return masked, {"masked": mean(gone, signal.mask)}


def _turn_normalised(
    fields: Sequence[str],
    numbers: Sequence[Scheduled],
    std: bool,
    ddof: int,
    signal: Signal,
    rollouts: Rollouts,
) -> tuple[Signal, Metrics]:
    """Args: fields, numbers: turn, turn_reward, state; scale, gamma, weight, eps."""
    turns = _drawn_turns("turn_normalise", fields[0], rollouts)
    rewards = _turn_rewards("turn_normalise", fields[1], numbers[0], turns, rollouts)
    shape = rewards.shape, "[P, G, K]"
    states = base.read_field("turn_normalise", fields[2], rollouts, *shape)
    gamma, weight, eps = (base.at_step(number, rollouts, rewards.dtype) for number in numbers[1:])
    returns, valid = _returns(signal, turns, rewards, gamma)
    episode = _among_samples(signal, std, eps, ddof)
    step, alone = _among_states(returns, valid, states, std, eps, ddof)
    spread = episode[..., None] + _on_turns(weight * step, turns)
    mask = (turns >= 0) & signal.mask[..., None]
    spread = jnp.where(mask, spread, 0).astype(signal.value.dtype)
    return Signal(value=spread, mask=mask), {"alone": mean(alone, valid)}


def _drawn_turns(name: str, field: str, rollouts: Rollouts) -> Array:
    """The turn of each token that the policy chose, -1 elsewhere."""
    drawn = base.read(name, rollouts, "token_mask").astype(bool)
    turns = base.read_field(name, field, rollouts, drawn.shape, "[P, G, T]")
    return jnp.where(drawn, turns.astype(jnp.int32), -1)


def _read_by_turn(name: str, field: str, turns: Array, rollouts: Rollouts) -> Array:
    """A field of turns [P, G, K]."""
    return base.read_field(name, field, rollouts, (*turns.shape[:2], None), "[P, G, K]")


def _turn_rewards(
    name: str, field: str, scale: Scheduled, turns: Array, rollouts: Rollouts
) -> Array:
    """What each turn brings to the sum of the rewards, [P, G, K]."""
    rewards = stats.widen(_read_by_turn(name, field, turns, rollouts))
    return rewards * base.at_step(scale, rollouts, rewards.dtype)


def _returns(
    signal: Signal, turns: Array, rewards: Array, gamma: float | Array
) -> tuple[Array, Array]:
    """R [P, G, K], and which turns there are; those of masked samples are none."""
    number = turns.max(-1, keepdims=True) + 1  # [P, G, 1]
    index = jnp.broadcast_to(jnp.arange(rewards.shape[-1], dtype=jnp.int32), rewards.shape)
    valid = (index < number) & signal.mask[..., None]
    rewards = jnp.where(valid, rewards, 0)
    value = stats.widen(signal.value).astype(rewards.dtype)
    rest = value - rewards.sum(-1)
    # Of turns that brought all of it the rounding of their sum is left, which is no reward: else
    # turns with equal futures would differ by it, and a deviation of that size would divide.
    size = jnp.abs(value) + jnp.abs(rewards).sum(-1)
    rest = jnp.where(jnp.abs(rest) <= stats.rounding_of_sum(rewards.shape[-1], size), 0, rest)
    rewards = rewards + jnp.where(index == number - 1, rest[..., None], 0)
    rewards = jnp.where(valid, rewards, 0)
    total, returns = jnp.zeros_like(rest), []
    for turn in range(rewards.shape[-1] - 1, -1, -1):
        total = rewards[..., turn] + jnp.asarray(gamma, rewards.dtype) * total
        returns.append(total)
    return jnp.stack(returns[::-1], axis=-1), valid


def _among_samples(signal: Signal, std: bool, eps: float | Array, ddof: int) -> Array:
    """[P, G]: a sample normalised among its group."""
    value = stats.widen(signal.value)
    group = stats.summary(value, signal.mask)
    variance = stats.variance(value, signal.mask, ddof=ddof, about=group)
    return trees.normalised(group, value, variance, std, eps)


def _among_states(
    returns: Array, valid: Array, states: Array, std: bool, eps: float | Array, ddof: int
) -> tuple[Array, Array]:
    """[P, G, K]: a turn normalised among the turns in its state, and whether it is alone there."""
    steps, members, ids = (array.reshape(len(returns), -1) for array in (returns, valid, states))
    same = trees.node_summary(steps, ids, members)
    variance = trees.node_variance(steps, ids, members, same, ddof)
    part = jnp.where(members, trees.normalised(same, steps, variance, std, eps), 0)
    return part.reshape(returns.shape), (same.count < 2).reshape(returns.shape)


def _on_turns(values: Array, turns: Array) -> Array:
    """[P, G, K] -> [P, G, T] by the turn of the token; 0 for none. Few turns: no gather."""
    spread = jnp.zeros(turns.shape, values.dtype)
    for turn in range(values.shape[-1]):
        spread = jnp.where(turns == turn, values[..., turn, None], spread)
    return spread
