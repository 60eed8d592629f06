"""Which losses of a token depend on no other token: they say so, and it is true.

An update relies on it: it takes the gradient of such a loss in the pass that computes log-probs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import loss_pairs
import numpy as np
import pytest

from jaxgrpo.losses import Tokens

TERMS = {**loss_pairs.SURROGATES} | {
    f"{penalty.name} {number}": penalty for number, penalty in enumerate(loss_pairs.PENALTIES)
}
T = 4


@pytest.fixture(scope="module")
def jacobians() -> dict[str, np.ndarray]:
    """name -> [T, T], the derivatives of each token's loss with respect to each log-prob."""
    random = np.random.default_rng(0)
    logp = jnp.asarray(-random.exponential(size=T) - 0.5, jnp.float32)
    constants = {
        name: logp + 0.02 * jnp.asarray(random.normal(size=T), jnp.float32)
        for name in ("proximal", "reference_logp", "full_kl", "policy_entropy")
    }
    fields = {name: value for name, value in constants.items() if name != "proximal"}
    fields |= {"full_kl_clamped": jnp.zeros(T), "replayed": jnp.arange(T) % 2}
    fields |= {name: jnp.ones(T) for name in loss_pairs.FIELDS if name != "replayed"}
    target = loss_pairs.two_token_score(constants["reference_logp"])

    def policy_top(logp):
        return loss_pairs.two_token_score(logp)[..., 1, :]

    def loss(logp, term):
        tokens = Tokens(
            logp=logp,
            proximal_logp=constants["proximal"],
            advantage=jnp.ones(T),
            mask=jnp.ones(T, bool),
            segment=jnp.ones(T, jnp.int32),
            fields=fields | {"teacher_top": target, "policy:teacher_top": policy_top(logp)},
        )
        state = () if getattr(term, "init", None) is None else (term.init(),)
        return term.compute(tokens, *state)[0]

    every = jax.jit(lambda x: {name: jax.jacrev(loss)(x, term) for name, term in TERMS.items()})
    return jax.tree.map(np.asarray, every(logp))


@pytest.mark.slow
def test_a_loss_per_token_depends_on_no_other_token(jacobians):
    for name, term in TERMS.items():
        apart = jacobians[name] * (1 - np.eye(T))
        if term.per_token:
            assert not apart.any(), name


@pytest.mark.slow
def test_those_over_sequences_do_not_say_that_they_are_per_token(jacobians):
    reaching = {name for name, of in jacobians.items() if (of * (1 - np.eye(T))).any()}
    assert {"gspo", "gmpo", "gvpo", "mirror_descent", "rewards_as_labels"} <= reaching
    assert not {name for name in reaching if TERMS[name].per_token}
    per_token = {name for name, term in TERMS.items() if term.per_token}
    assert {"clip", "cispo", "clip_cov", "reinforce", "k2 0", "entropy_bonus 8"} <= per_token
