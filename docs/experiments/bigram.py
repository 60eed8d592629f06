"""A bigram policy over 81 sequences, what it can be trained on, and what it is like afterwards.

Gradients are exact, by enumeration; of many starts the best counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from docs.experiments import common

V, T = 3, 4
SEQUENCES = common.sequences(V, T)
N = len(SEQUENCES)
STATE = np.concatenate([np.zeros((N, 1), int), 1 + SEQUENCES[:, :-1]], 1)
"""[81, T]: a bigram policy has a softmax for the first token and one after each token."""
SHAPE = (1 + V, V)
RATE, STARTS = 0.1, 24
DRAWS = 256


class Task(NamedTuple):
    """A base model and what is right; with a leading axis, many."""

    base: Any  # [1 + V, V] logits; NumPy's float64, where it stands for one task
    valid: Any  # [81] bool

    def log_base(self) -> Array:
        return log_policy(self.base)

    def log_target(self) -> Array:
        """log p_* of the valid, 0 elsewhere."""
        log_base = jnp.where(self.valid, self.log_base(), -jnp.inf)
        return jnp.where(self.valid, log_base - jax.nn.logsumexp(log_base), 0)

    def target(self) -> Array:
        return jnp.where(self.valid, jnp.exp(self.log_target()), 0)

    def rate(self) -> Array:
        return jnp.where(self.valid, jnp.exp(self.log_base()), 0).sum()


def log_policy(logits: Array) -> Array:
    """Log-probs of all sequences, [81]: of a bigram policy, or of a free table of 81 logits."""
    if logits.ndim == 1:
        return jax.nn.log_softmax(logits)
    return common.token_logp(logits, STATE, SEQUENCES).sum(1)


def task(seed: int, number: int, spread: float) -> Task:
    """`number` valid sequences; base logits of deviation `spread`, 0: uniform."""
    random = np.random.default_rng(seed)
    base = spread * random.normal(size=SHAPE) if spread else np.zeros(SHAPE)
    valid = np.zeros(N, bool)
    valid[random.permutation(N)[:number]] = True
    return Task(base, valid)


def stack(tasks: list[Task]) -> Task:
    return Task(*map(jnp.stack, zip(*tasks, strict=True)))


def kl_to_base(logits: Array, problem: Task) -> Array:
    logp = log_policy(logits)
    return (jnp.exp(logp) * (logp - problem.log_base())).sum()


def kl_control(logits: Array, problem: Task, push: Array) -> Array:
    """-J = KL(pi || a) / push - E v, push = 1 / b."""
    success = jnp.where(problem.valid, jnp.exp(log_policy(logits)), 0).sum()
    return kl_to_base(logits, problem) / push - success


def divergence(logits: Array, problem: Task, alpha: Array) -> Array:
    """D_alpha(pi || p) = (1 - sum pi^alpha p^(1 - alpha)) / (alpha (1 - alpha)); 0: KL(p || pi)."""
    logp, log_target = log_policy(logits), problem.log_target()
    forward = (problem.target() * (log_target - logp)).sum()
    power = jnp.where(alpha > 0, alpha, 0.5)
    overlap = jnp.where(problem.valid, jnp.exp(power * logp + (1 - power) * log_target), 0).sum()
    return jnp.where(alpha > 0, (1 - overlap) / (power * (1 - power)), forward)


Loss = Callable[[Array, Task, Array], Array]


def descend(loss: Callable[[Array], Array], start: Array, steps: int) -> tuple[Array, Array]:
    """Adam on exact gradients: (logits, loss)."""
    adam = optax.adam(optax.cosine_decay_schedule(RATE, steps))

    def step(carry: Any, _: Any) -> tuple[Any, None]:
        logits, state = carry
        update, state = adam.update(jax.grad(loss)(logits), state)
        return (optax.apply_updates(logits, update), state), None

    (logits, _), _ = jax.lax.scan(step, (start, adam.init(start)), None, length=steps)
    return logits, loss(logits)


def starts(problem: Task) -> Array:
    """[STARTS, 1 + V, V]: the base, ways to the likeliest valid sequences, random ones."""
    order = jnp.argsort(jnp.where(problem.valid, -problem.log_base(), jnp.inf))[:8]
    steps = np.zeros((N, *SHAPE))
    np.add.at(steps, (np.arange(N)[:, None], STATE, SEQUENCES), 3.0)
    towards = jnp.asarray(steps)[order]
    noise = 2 * np.random.default_rng(0).normal(size=(STARTS - 9, *SHAPE))
    return problem.base + jnp.concatenate([jnp.zeros((1, *SHAPE)), towards, jnp.asarray(noise)])


def best(loss: Loss, problem: Task, strength: Array, steps: int = 3000) -> tuple[Array, Array]:
    """(logits of the best of all starts, share of starts that reach it)."""
    objective = lambda logits: loss(logits, problem, strength)  # noqa: E731
    logits, values = jax.vmap(lambda start: descend(objective, start, steps))(starts(problem))
    return logits[values.argmin()], (values < values.min() + 1e-4).mean()


def sweep(loss: Loss, tasks: Task, strengths: Any, steps: int = 3000) -> tuple[Array, Array]:
    """`best` of tasks [K] x strengths [S]."""
    best_of_strengths = jax.vmap(lambda problem, s: best(loss, problem, s, steps), (None, 0))
    return jax.jit(jax.vmap(best_of_strengths, (0, None)))(tasks, jnp.asarray(strengths))


class Numbers(NamedTuple):
    """What a policy is like."""

    success: Array  # E v
    top: Array  # probability of the likeliest sequence
    frequent: Array  # valid sequences above 1%
    coverage: Array  # mass of p_* that 256 samples are expected to meet
    entropy: Array  # nats
    kl: Array  # to the base


@jax.jit
def describe(logits: Array, problem: Task) -> Numbers:
    logp = log_policy(logits)
    policy = jnp.exp(logp)
    met = 1 - (1 - policy) ** DRAWS
    return Numbers(
        jnp.where(problem.valid, policy, 0).sum(),
        policy.max(),
        ((policy > 0.01) & problem.valid).sum(),
        (problem.target() * met).sum(),
        -(policy * logp).sum(),
        kl_to_base(logits, problem),
    )


describe_all = jax.jit(jax.vmap(jax.vmap(describe, (0, None))))
"""Of logits [K, S, ...] and tasks [K]."""


def at(numbers: Numbers, *place: int) -> Numbers:
    return Numbers(*(value[place] for value in numbers))


def single_sequence(problem: Task) -> int:
    """The likeliest valid sequence that a bigram policy can say alone."""
    one_way = [
        len({(s, t) for s, t in zip(state, tokens, strict=True)}) == len(set(state))
        for state, tokens in zip(STATE, SEQUENCES, strict=True)
    ]
    possible = np.asarray(problem.valid) & np.array(one_way)
    return int(np.where(possible, np.asarray(problem.log_base()), -np.inf).argmax())


def count_matched(problem: Task) -> Array:
    """The bigram policy of least KL(p_* || pi), in closed form: expected counts, normalised."""
    counts = np.zeros(SHAPE)
    np.add.at(counts, (STATE, SEQUENCES), np.asarray(problem.target())[:, None])
    return jnp.log(jnp.asarray(counts / np.maximum(counts.sum(1, keepdims=True), 1e-300)) + 1e-300)
