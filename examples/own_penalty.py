"""A penalty is added to the surrogate; here a squared KL that pulls no harder beyond a limit.

loss.kl = { use = "examples/own_penalty.py:huber_kl", beta = 0.01, limit = 1.0 }
"""

import jax.numpy as jnp

from jaxgrpo.losses import Penalty


def huber_kl(beta, limit=1.0):
    """beta l^2 / 2 where |l| <= limit, else beta limit (|l| - limit / 2); l = log(policy / ref)."""

    def compute(tokens):
        reference = tokens.field("reference_logp", "huber_kl", "log-probs of the reference")
        size = jnp.abs(tokens.log_ratio_to(reference))  # 0 where masked
        value = jnp.where(size <= limit, size**2 / 2, limit * (size - limit / 2))
        beyond = (size > limit).sum() / jnp.maximum(tokens.mask.sum(), 1)
        return beta * value, {"huber_kl/beyond": beyond}

    return Penalty("huber_kl", compute, needs=frozenset({"reference_logp"}))
