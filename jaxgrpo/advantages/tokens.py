"""From one value per sample to one per token."""

from __future__ import annotations

import jax.numpy as jnp

from jaxgrpo.advantages.base import AdvantageTransform, read, stateless
from jaxgrpo.errors import InputError
from jaxgrpo.metrics import Metrics
from jaxgrpo.types import Rollouts, Signal

_PLACES = ("all", "last")


def to_tokens(place: str = "all") -> AdvantageTransform:
    """Widens sample-level values to tokens.

        all:   a[p, g, t] = a[p, g] at every token that the policy chose
        last:  a[p, g, t] = a[p, g] at the last of them, 0 at the others, which stay unmasked

    Chains need it only before token-level steps: a signal [P, G] is trained on as under "all".

    Args:
      place: "all" or "last" (where a return is accumulated backwards from).

    Signal: [P, G] -> [P, G, T], mask = that of the sample on its token_mask. A sample without any
    token is masked throughout.  Raises: InputError on values that are already [P, G, T].
    """
    if place not in _PLACES:
        raise InputError(f"to_tokens: place = {place!r}, expected one of {', '.join(_PLACES)}")

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        tokens = read("to_tokens", rollouts, "token_mask").astype(bool)
        mask = tokens & signal.mask[..., None]
        at = tokens
        if place == "last":
            # The running count from the end is 1 at the last token and where none follows.
            at = tokens & (jnp.cumsum(tokens[..., ::-1], axis=-1)[..., ::-1] == 1)
        value = jnp.where(mask & at, signal.value[..., None], 0)
        return Signal(value=value, mask=mask), {}

    return stateless("to_tokens", apply, levels=(2,))
