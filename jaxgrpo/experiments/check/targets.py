"""What an update may be the gradient of: functions of a policy, differentiated exactly.

Of a policy pi on a prompt, with the reward r of every sample y, p = E r and the filtered model
f(y) = base(y) [y succeeds] / Z:

    mean reward    E r
    pass@k         E of the highest of k rewards; with rewards in {0, 1} 1 - (1 - p)^k
    log success    log p, or its series cut after n terms, -sum_{k <= n} (1 - p)^k / k
    divergence     minus a divergence of pi from f
    KL             minus a divergence of pi from the reference, which a penalty should climb
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgrpo.experiments.check.games import GAMES, Game, make_policies, sample_logp

MEAN = "mean reward"
LOG = "log success"
REVERSE, FORWARD = "KL(policy || reference)", "KL(reference || policy)"
AT_STATES = " at each visited state"
ENTROPY = "entropy"
ALPHAS = (0.25, 0.5, 0.75)
LARGEST = 8
"""Samples of a group."""

Objective = Callable[[Array, Array, Array], Array]
"""(logits [S, V], reference's logits, reward [N]) -> a number that is climbed."""


def reward_gradients(game: Game, kind: str, samples: int, filtered: bool) -> dict[str, np.ndarray]:
    """Name of each target that rewards define -> its gradient [K, S, V] at each policy of a game.

    Args:
      kind: of rewards, "binary" or "graded".
      samples: G, of a group: "pass@G" is that of so many, as "log success to order G" and "G - 1".
      filtered: whether the method knows the base, so that divergences from f come into question.
    """
    slopes = _gradients(game.name, kind)
    by_size = {
        MEAN: MEAN,
        LOG: LOG,
        "pass@G": f"pass@{samples}",
        f"{LOG} to order G - 1": f"{LOG} to order {samples - 1}",
        f"{LOG} to order G": f"{LOG} to order {samples}",
        **{f"pass@{k}": f"pass@{k}" for k in range(2, samples + 1)},
        **{name: name for name in slopes if filtered and is_divergence(name)},
    }
    return {name: slopes[source] for name, source in by_size.items()}


def penalty_gradients(game: Game) -> dict[str, np.ndarray]:
    """Name of each target of a penalty -> its gradient [K, S, V] at each policy of a game."""
    return _gradients(game.name, "")


@functools.lru_cache
def _gradients(name: str, kind: str) -> dict[str, np.ndarray]:
    """Args: kind: of rewards; "": of penalties."""
    game = GAMES[name]
    climbed = _reward_targets(game) if kind else _penalty_targets(game)
    tables = make_policies(game)
    pair = jnp.asarray(tables.policy), jnp.asarray(tables.reference)
    reward = jnp.asarray(game.rewards[kind or "binary"])

    @jax.jit
    @jax.vmap
    def run(logits: Array, reference: Array) -> dict[str, Array]:
        return {name: jax.grad(climb)(logits, reference, reward) for name, climb in climbed.items()}

    return {name: np.asarray(slope) for name, slope in run(*pair).items()}


def _reward_targets(game: Game) -> dict[str, Objective]:
    """The targets that rewards define, of groups of up to LARGEST samples."""

    def mean(logits: Array, reference: Array, reward: Array) -> Array:
        return jnp.exp(sample_logp(game, logits)) @ reward

    def highest(k: int, logits: Array, reference: Array, reward: Array) -> Array:
        order = jnp.argsort(reward)
        below = jnp.cumsum(jnp.exp(sample_logp(game, logits))[order]) ** k
        return jnp.diff(below, prepend=0.0) @ reward[order]

    def log(terms: int | None, logits: Array, reference: Array, reward: Array) -> Array:
        failure = 1 - mean(logits, reference, reward)
        if terms is None:
            return jnp.log1p(-failure)
        return -jnp.stack([failure**k / k for k in range(1, terms + 1)]).sum()

    sizes = range(1, LARGEST + 1)
    return {
        MEAN: mean,
        LOG: functools.partial(log, None),
        **{f"pass@{k}": functools.partial(highest, k) for k in sizes},
        **{f"{LOG} to order {terms}": functools.partial(log, terms) for terms in sizes},
        **_divergences(game),
    }


def _penalty_targets(game: Game) -> dict[str, Objective]:
    """What a penalty may climb: minus a KL to the reference, or the entropy."""

    def visits(logits: Array) -> Array:
        """Expected visits of each state, [S], held."""
        chance = jax.lax.stop_gradient(jnp.exp(sample_logp(game, logits)))
        each = jnp.where(game.mask, chance[:, None], 0)
        return jnp.zeros(game.shape[0]).at[game.state].add(each)

    def kl(forward: bool, logits: Array, reference: Array, reward: Array) -> Array:
        pair = sample_logp(game, logits), sample_logp(game, reference)
        return -_kl(*(pair[::-1] if forward else pair))

    def at_states(forward: bool, logits: Array, reference: Array, reward: Array) -> Array:
        pair = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
        return -(visits(logits) @ _kl(*(pair[::-1] if forward else pair)))

    def entropy(logits: Array, reference: Array, reward: Array) -> Array:
        logp = jax.nn.log_softmax(logits)
        return -(visits(logits) @ (jnp.exp(logp) * logp).sum(-1))

    return {
        REVERSE: functools.partial(kl, False),
        REVERSE + AT_STATES: functools.partial(at_states, False),
        FORWARD: functools.partial(kl, True),
        FORWARD + AT_STATES: functools.partial(at_states, True),
        ENTROPY: entropy,
    }


def _divergences(game: Game) -> dict[str, Objective]:
    """Minus divergences of the policy from the base, filtered by success."""

    def pair(logits: Array, reference: Array, reward: Array) -> tuple[Array, Array]:
        filtered = jnp.exp(sample_logp(game, reference)) * (reward > 0)
        return jnp.exp(sample_logp(game, logits)), filtered / filtered.sum()

    def overlap(alpha: float, *arguments: Array) -> Array:
        policy, model = pair(*arguments)
        return (policy**alpha * model ** (1 - alpha)).sum() / alpha

    def forward(*arguments: Array) -> Array:
        policy, model = pair(*arguments)
        return model @ jnp.log(policy)

    def jensen(*arguments: Array) -> Array:
        policy, model = pair(*arguments)
        middle = (policy + model) / 2
        logs = jnp.log(jnp.where(model > 0, model, 1)), jnp.log(policy), jnp.log(middle)
        return -(model @ (logs[0] - logs[2]) + policy @ (logs[1] - logs[2]))

    def chi_square(*arguments: Array) -> Array:
        policy, model = pair(*arguments)
        return -(model**2 / policy).sum()

    alphas = {f"alpha-divergence, alpha {a:g}": functools.partial(overlap, a) for a in ALPHAS}
    return {
        "KL(filtered || policy)": forward,
        **alphas,
        "Jensen-Shannon divergence": jensen,
        "chi-square divergence": chi_square,
    }


def is_divergence(name: str) -> bool:
    """Whether a target of `reward_targets` is a divergence from the filtered model."""
    return name != MEAN and not name.startswith(("pass@", LOG))


def _kl(left: Array, right: Array) -> Array:
    """KL along the last axis, of two arrays of log-probs."""
    return (jnp.exp(left) * (left - right)).sum(-1)
