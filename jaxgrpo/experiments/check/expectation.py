"""The exact expected update of a method on a game: every batch by its chance, in float64.

What runs is the method itself: its chain, its loss and jax.grad. Numbers of an update are those of
a step on one prompt; where a chain compares groups, of one of two prompts, times two.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgrpo.advantages import AdvantageTransform, chains
from jaxgrpo.core.metrics import Mean, Metric
from jaxgrpo.core.scores import POLICIES
from jaxgrpo.core.types import Rollouts, RolloutSpec
from jaxgrpo.experiments.check.games import GAMES, Game, Policies, groups, token_logp
from jaxgrpo.experiments.check.method import Method
from jaxgrpo.update.batch_losses import batch_loss

STEP = 1
"""At which a method is judged: schedules have their value there."""


class Expected(NamedTuple):
    """Of each policy of a family, [K, ...]: the mean over all batches, by their chance."""

    update: np.ndarray  # [K, S, V], minus the gradient of the loss
    square: np.ndarray  # [K], of the norm of the update of one group
    failed: np.ndarray  # [K, S, V], the part of the update that comes from groups that all fail
    passed: np.ndarray  # [K, S, V], and that all pass
    advantage: np.ndarray  # [K, 2], mean over the samples of those groups; NaN: all masked
    skipped: np.ndarray  # [K], the chance of a batch whose update is not finite: it counts as 0
    refused: bool  # whether the chain leaves out a reward because of its value


def expect(
    method: Method,
    game: Game,
    samples: int,
    prompts: int,
    reward: np.ndarray,
    tables: Policies,
) -> Expected:
    """The expected update of a step on groups of `samples`, each of one policy of the tables.

    Args:
      prompts: 1, or 2 if a group is to have another beside it, of the next policy.
      reward: [N], of each sample of the game.
    """
    neighbours = (np.arange(len(tables.policy))[:, None] + np.arange(prompts)) % len(tables.policy)
    state = first_state(method, game, samples, prompts, tables, reward)
    program = _program(method, game.name, samples, prompts)
    by_prompt = Policies(*(table[neighbours] for table in tables))
    numbers = program(by_prompt, jnp.asarray(reward), state)
    *sums, refused = jax.tree.map(np.asarray, numbers)
    return Expected(*sums, refused=bool(refused.any()))


@functools.lru_cache(32)
def _program(method: Method, name: str, samples: int, prompts: int) -> Any:
    """(tables [K, P, S, V], reward [N], state) -> the fields of Expected, compiled."""
    game = GAMES[name]
    batches = jnp.asarray(groups(game, prompts, samples))

    @jax.jit
    def run(tables: Policies, reward: Array, state: Any) -> Any:
        return jax.lax.map(lambda tables: mean(tables, reward, state), tables)

    def mean(tables: Policies, reward: Array, state: Any) -> Any:
        drawn = jax.vmap(lambda logits: token_logp(game, logits))(tables.behavior)
        chance = jnp.where(game.mask, drawn, 0).sum(-1)  # [P, N]

        def weigh(index: Array) -> tuple[Array, ...]:
            step = functools.partial(update, method, game, tables, reward, state, index)
            slope, (advantage, mask, metrics) = step()
            weight = jnp.exp(jnp.take_along_axis(chance, index, 1).sum())
            tokens = jnp.maximum(mask[0].sum(), 1)
            refused = count_refused(metrics)
            value = jnp.where(mask[0].any(), advantage[0].sum() / tokens, jnp.nan)
            finite = jnp.isfinite(slope).all() & jnp.isfinite(advantage).all()
            slope = jnp.where(finite, -prompts * slope[0], 0)  # as a run skips such a step
            return (
                slope,
                weight,
                jnp.where(finite, value, jnp.inf),
                finite,
                refused,
                reward[index[0]],
            )

        slope, weight, value, finite, refused, rewards = jax.vmap(weigh)(batches)
        flat = (rewards == rewards[:, :1]).all(1)
        ends = [flat & (rewards[:, 0] == end) for end in (reward.min(), reward.max())]
        total = functools.partial(jnp.einsum, "b,bsv->sv")
        shares = [jnp.where(end, weight, 0) for end in ends]
        means = jnp.stack([(jnp.where(share > 0, share * value, 0)).sum() / share.sum()
                           for share in shares])  # fmt: skip
        square = (weight * (slope**2).sum((1, 2))).sum()
        parts = [total(share, slope) for share in shares]
        skipped = jnp.where(finite, 0, weight).sum()
        return total(weight, slope), square, *parts, means, skipped, (refused > 0).any()

    return run


def update(
    method: Method,
    game: Game,
    tables: Policies,
    reward: Array,
    state: Any,
    index: Array,
) -> tuple[Array, Any]:
    """The gradient [P, S, V] of the loss of a batch, and (advantage, mask, metrics of the chain).

    Args:
      tables: [P, S, V] each.  reward: [N].  index: [P, G], which samples of the game were drawn.
    """
    rollouts = draw(method, game, tables, reward, index)
    advantage, mask, metrics = judge(method.chain, rollouts, state)

    def loss(logits: Array) -> Array:
        current = quantities(game, logits, tables.reference, index)
        return batch_loss(method.objective, current, rollouts, advantage, mask)

    return jax.grad(loss)(tables.policy), (advantage, mask, metrics)


def judge(
    chain: AdvantageTransform, rollouts: Rollouts, state: Any
) -> tuple[Array, Array, Mapping[str, Metric]]:
    """(advantage [P, G, T], mask, metrics) of a method's chain."""
    signal, _, metrics = chain.update(chains.start(rollouts), state, rollouts)
    return *chains.at_tokens(signal, rollouts.token_mask), metrics


def count_refused(metrics: Mapping[str, Metric]) -> Array:
    """Samples that the chain has left out because of the value of their reward, []."""
    totals = [
        metric.total
        for name, metric in metrics.items()
        if name.endswith("/refused") and isinstance(metric, Mean)
    ]
    return jnp.asarray(sum(totals))


def quantities(game: Game, logits: Array, reference: Array, index: Array) -> dict[str, Array]:
    """What the update's own pass gives of each token, [P, G, T], with its gradient."""
    logp, anchor = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    place = jnp.arange(len(index))[:, None, None]
    state, token = jnp.asarray(game.state)[index], jnp.asarray(game.tokens)[index]
    by_state = {
        "policy_entropy": -(jnp.exp(logp) * logp).sum(-1),
        "full_kl": (jnp.exp(logp) * (logp - anchor)).sum(-1),
    }
    current = {name: value[place, state] for name, value in by_state.items()}
    return {"logp": logp[place, state, token], **current}


def draw(method: Method, game: Game, tables: Policies, reward: Array, index: Array) -> Rollouts:
    """The rollouts of a batch; the method's first reward is the game's, others are 0."""
    prompts, place = len(index), jnp.arange(len(index))[:, None]

    def pick(value: np.ndarray | Array) -> Array:
        return jnp.asarray(value)[index]

    mask = pick(game.mask)
    logp = {
        name: jnp.where(mask, jax.vmap(lambda row: token_logp(game, row))(table)[place, index], 0)
        for name, table in tables._asdict().items()
    }
    first, *rest = method.reward_names
    is_stale = (tables.behavior != tables.policy).any()
    chances = jax.nn.log_softmax(tables.policy)[place[..., None], pick(game.state)]
    of_tables = {
        "token_entropy": -(jnp.exp(chances) * chances).sum(-1),
        "token_collision": jnp.exp(2 * chances).sum(-1),
        "self_certainty": -chances.mean(-1),
    }
    fields = {
        f"{name}_logp": logp["policy" if name == "trainer" else "reference"] for name in POLICIES
    }
    return Rollouts(
        prompt_tokens=jnp.zeros((prompts, 1), jnp.int32),
        prompt_mask=jnp.ones((prompts, 1), bool),
        ordinal=jnp.arange(prompts, dtype=jnp.int32),
        row=jnp.arange(prompts, dtype=jnp.int32),
        step=jnp.int32(STEP),
        completion_tokens=pick(game.tokens),
        token_mask=mask,
        behavior_logp=logp["behavior"],
        rewards={first: reward[index], **{name: jnp.zeros(index.shape) for name in rest}},
        truncated=pick(game.truncated),
        policy_version=jnp.full(index.shape, jnp.where(is_stale, STEP - 1, STEP), jnp.int32),
        fields={**fields, **of_tables, "classes": index},
    )


def spec(method: Method, game: Game, samples: int, prompts: int) -> RolloutSpec:
    """What the chain may know of the batches, whose prompts are the rows of the data."""
    length = game.tokens.shape[1]
    return RolloutSpec(prompts, samples, 1, length, method.reward_names, num_rows=prompts)


def first_state(
    method: Method,
    game: Game,
    samples: int,
    prompts: int,
    tables: Policies,
    reward: np.ndarray,
) -> Any:
    """What the chain remembers of one batch in which each sample of the game was drawn in turn."""
    state = method.chain.init(spec(method, game, samples, prompts))
    if not jax.tree.leaves(state):
        return state
    size = len(game.tokens)
    index = jnp.arange(prompts * samples).reshape(prompts, samples) % size
    rows = Policies(*(jnp.asarray(table[:prompts]) for table in tables))
    rollouts = draw(method, game, rows, jnp.asarray(reward), index)
    return jax.jit(method.chain.update)(chains.start(rollouts), state, rollouts)[1]
