"""The uses of k1, k2 and k3 on a policy that is a table: jaxgrpo's parts, others written out.

x15_kl_uses.py measures them all; docs/make_losses.py makes the table of docs/losses.md of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient

from docs.experiments import common
from jaxgrpo import advantages
from jaxgrpo.losses import Tokens, build_penalty, build_surrogate

V, T = 3, 3
SEQUENCES = common.sequences(V, T)
STATE = common.prefixes(SEQUENCES, V)
SHAPE = (int(STATE.max()) + 1, V)
MASK = np.ones(SEQUENCES.shape, bool)

REVERSE, FORWARD = "KL(π‖ref)", "KL(ref‖π)"
STATES, FORWARD_STATES = f"{REVERSE} at each visited state", f"{FORWARD} at each visited state"
OLD_STATES = f"{REVERSE} at each state that old visits"
NOTHING = "nothing"
K3_REWARD = f"{REVERSE} − {FORWARD}"
K3_TOKENS = f"{REVERSE} − ({FORWARD_STATES})"
K2_REWARD = f"E ½l² − {REVERSE}"
K2_TOKENS = f"E Σ ½l² − ({STATES})"


class Use(NamedTuple):
    """A way to use an estimator: its loss is differentiated, what is held is a reward."""

    name: str
    level: str
    part: str  # how jaxgrpo calls it; "" where it is not offered, and written out in this file
    gradient: str  # of what, by the targets' names; "" where we know of none
    loss: Any  # Terms -> loss of each sequence [27]
    old: bool = False  # sequences are drawn from another policy


class Terms(NamedTuple):
    """Log-probs of all 27 sequences, [27, T] each; only `logp` carries gradient."""

    logits: Array
    anchor: Array  # logits of the reference
    logp: Array
    reference: Array
    old: Array

    @property
    def token(self) -> Array:
        return self.logp - self.reference

    @property
    def sequence(self) -> Array:
        return self.token.sum(1)

    def ratio(self) -> Array:
        return jnp.exp((self.logp - self.old).sum(1))


def terms(logits: Array, anchor: Array, old: Array) -> Terms:
    logp = [common.token_logp(table, STATE, SEQUENCES) for table in (logits, anchor, old)]
    return Terms(logits, anchor, logp[0], *map(stop_gradient, logp[1:]))


def k2(log_ratio: Array) -> Array:
    return log_ratio**2 / 2


def k3(log_ratio: Array) -> Array:
    return jnp.expm1(-log_ratio) + log_ratio


def rewarded(charge: Array, policy_terms: Terms) -> Array:
    """The loss of REINFORCE with reward -charge: its gradient is charge * grad log pi."""
    return stop_gradient(charge) * policy_terms.logp.sum(1)


def loss_tokens(
    policy_terms: Terms, proximal: Array, advantage: Array, fields: dict[str, Array]
) -> Tokens:
    """What a loss of jaxgrpo reads, each row one sequence."""
    return Tokens(
        logp=policy_terms.logp,
        proximal_logp=proximal,
        advantage=advantage,
        mask=jnp.asarray(MASK),
        segment=jnp.ones(MASK.shape, jnp.int32),
        fields=fields,
    )


def penalty(name: str, level: str = "token"):
    """A penalty of jaxgrpo.losses, summed over tokens."""
    part = build_penalty(name, {"beta": 1.0} | ({} if name == "full_kl" else {"level": level}))

    def loss(policy_terms: Terms) -> Array:
        fields = {"reference_logp": policy_terms.reference, "full_kl": at_states(policy_terms)}
        return part.compute(
            loss_tokens(policy_terms, policy_terms.old, 0 * policy_terms.logp, fields)
        )[0].sum(1)

    return loss


def in_reward(*steps: Any):
    """A chain of jaxgrpo.advantages on rewards of 0, then the clipped ratio, which is 1."""
    chain = advantages.build(["sum_rewards", {"use": "to_tokens", "place": "last"}, *steps])

    def loss(policy_terms: Terms) -> Array:
        advantage, _ = advantages.evaluate(
            chain,
            jnp.zeros((len(SEQUENCES), 1)),
            token_mask=MASK[:, None],
            trainer_logp=stop_gradient(policy_terms.logp)[:, None],
            reference_logp=policy_terms.reference[:, None],
        )
        tokens = loss_tokens(policy_terms, stop_gradient(policy_terms.logp), advantage[:, 0], {})
        return build_surrogate("clip").compute(tokens)[0].sum(1)

    return loss


def at_states(policy_terms: Terms) -> Array:
    """KL at each visited state, over the vocabulary, [27, T]."""
    logp, anchor = jax.nn.log_softmax(policy_terms.logits), jax.nn.log_softmax(policy_terms.anchor)
    return (jnp.exp(logp) * (logp - stop_gradient(anchor))).sum(1)[STATE]


def straight_through(policy_terms: Terms) -> Array:
    """The value of k3 with the gradient of k2."""
    square = k2(policy_terms.token)
    return (stop_gradient(k3(policy_terms.token) - square) + square).sum(1)


def token_ratio(policy_terms: Terms, value: Array) -> Array:
    return (jnp.exp(policy_terms.logp - policy_terms.old) * value).sum(1)


USES = (
    Use("k1 as loss", "either", "", NOTHING, lambda x: x.sequence),
    Use("k1 in the reward", "sequence", "", REVERSE, lambda x: rewarded(x.sequence, x)),
    Use("k1 in the reward, to go", "token", "`k1_in_reward`", REVERSE,
        in_reward({"use": "add_kl_return", "beta": 1.0})),
    Use("k1 in the reward, own token", "token", "part `kl_in_reward`", STATES,
        in_reward({"use": "kl_in_reward", "beta": 1.0})),
    Use("k2 as loss", "sequence", '`k2`, `level = "sequence"`', REVERSE, penalty("k2", "sequence")),
    Use("k2 as loss", "token", "`k2`", STATES, penalty("k2")),
    Use("k3 value, k2 gradient", "token", "", STATES, straight_through),
    Use("whole vocabulary as loss", "token", "`full_kl`", STATES, penalty("full_kl")),
    Use("k3 as loss", "sequence", '`forward_kl_k3`, `level = "sequence"`', FORWARD,
        penalty("forward_kl_k3", "sequence")),
    Use("k3 as loss", "token", "`forward_kl_k3`", FORWARD_STATES, penalty("forward_kl_k3")),
    Use("k2 in the reward", "sequence", "", K2_REWARD, lambda x: rewarded(k2(x.sequence), x)),
    Use("k2 in the reward", "token", "", K2_TOKENS, lambda x: rewarded(k2(x.token).sum(1), x)),
    Use("k3 in the reward", "sequence", "", K3_REWARD, lambda x: rewarded(k3(x.sequence), x)),
    Use("k3 in the reward", "token", "", K3_TOKENS, lambda x: rewarded(k3(x.token).sum(1), x)),
    Use("old: ρ k1 as loss", "sequence", "", REVERSE, lambda x: x.ratio() * x.sequence, True),
    Use("old: ρ k3 as loss", "sequence", '`reverse_kl_off_policy`, `level = "sequence"`', REVERSE,
        penalty("reverse_kl_off_policy", "sequence"), True),
    Use("old: held ρ, k2 as loss", "sequence", "", REVERSE,
        lambda x: stop_gradient(x.ratio()) * k2(x.sequence), True),
    Use("old: held ρ, k1 in the reward", "sequence", "", REVERSE,
        lambda x: rewarded(x.ratio() * x.sequence, x), True),
    Use("old: ρ k1 as loss", "token", "", OLD_STATES, lambda x: token_ratio(x, x.token), True),
    Use("old: ρ k3 as loss", "token", "`reverse_kl_off_policy`", OLD_STATES,
        penalty("reverse_kl_off_policy"), True),
    Use("old: k1 in the reward", "sequence", "", "", lambda x: rewarded(x.sequence, x), True),
    Use("old: k2 as loss", "token", "`k2`", "", penalty("k2"), True),
    Use("old: k3 as loss", "token", "`forward_kl_k3`", "", penalty("forward_kl_k3"), True),
)  # fmt: skip
"""ρ is the ratio of the whole sequence, or the token's own. "old:" is drawn from another policy."""
