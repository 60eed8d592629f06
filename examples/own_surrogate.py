"""A surrogate is what a loss makes of each token; here a power of the ratio weighs the advantage.

loss.surrogate = { use = "examples/own_surrogate.py:power_of_ratio", power = 0.5 }
"""

import jax.numpy as jnp

from jaxgrpo.losses import Surrogate, log_ratio


def power_of_ratio(power=0.5):
    """loss = -A rho^power / power: at 1 importance sampling, towards 0 REINFORCE."""

    def compute(tokens):
        log_rho, clamped = log_ratio(tokens)  # of trained to proximal policy, 0 where masked
        weight = jnp.exp(power * log_rho)
        advantage = tokens.without_gradient(tokens.advantage)
        share = clamped.sum() / jnp.maximum(tokens.mask.sum(), 1)
        return -advantage * weight / power, {"power_of_ratio/clamped": share}

    return Surrogate("power_of_ratio", compute)
