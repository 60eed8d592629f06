"""Symptoms of a policy that is taught by accidents: repetition, odd lengths, drift."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxgrpo.core.metrics import Metrics, mean

N_GRAM = 4
"""Tokens in a run that counts as repeated where it stands twice."""


def repetition(
    tokens: Int[Array, "P G T"], mask: Bool[Array, "P G T"], n: int = N_GRAM
) -> Float[Array, "P G"]:
    """The share of a completion's runs of n tokens that stood in it before.

        1 - distinct n-grams / n-grams

    0: none comes twice; near 1: a loop. Only n-grams without a masked token count; NaN where there
    is none. Exact, by sorting the n-grams of each completion.

    Source: a detector of degenerate behaviour, after arXiv 2605.28388; n is ours.
    """
    count = tokens.shape[-1] - n + 1
    if count < 1:
        return jnp.full(tokens.shape[:-1], jnp.nan)
    whole = jnp.stack([mask[..., i : i + count] for i in range(n)]).all(0)
    grams = [jnp.where(whole, tokens[..., i : i + count], -1) for i in range(n)]
    grams = jax.lax.sort(grams, num_keys=n)  # what is left out comes first
    new = jnp.stack([gram[..., 1:] != gram[..., :-1] for gram in grams]).any(0)
    real = grams[0] >= 0
    distinct = real[..., 0].astype(jnp.int32) + (new & real[..., 1:]).sum(-1)
    number = real.sum(-1)
    return jnp.where(number > 0, 1 - distinct / jnp.maximum(number, 1), jnp.nan)


def symptom_metrics(
    tokens: Int[Array, "P G T"], mask: Bool[Array, "P G T"], rare: Bool[Array, "P G"]
) -> Metrics:
    """Repetition and length of all completions, and of rare successes among them.

        completions/repetition         mean of `repetition` over those that have an n-gram
        rare_success/repetition        the same of rare successes
        rare_success/relative_length   mean of their length over the median length of their group

    Rare successes that repeat themselves, or are far shorter than the rest, are accidents that the
    policy takes as exemplars. The last two are NaN in a step without a rare success.

    Args:
      rare: as `jaxgrpo.update.diagnostics.rare_successes` finds them.

    Source: arXiv 2605.28388: one lucky sample shortened completions from 511 to 46 tokens.
    """
    repeated = repetition(tokens, mask)
    known = jnp.isfinite(repeated)
    length = mask.sum(-1).astype(repeated.dtype)
    relative = length / jnp.maximum(jnp.median(length, axis=1, keepdims=True), 1)
    return {
        "completions/repetition": mean(repeated, known),
        "rare_success/repetition": mean(repeated, known & rare),
        "rare_success/relative_length": mean(relative, rare),
    }


def drift_metrics(
    logp: Float[Array, "P G T"],
    other_logp: Float[Array, "P G T"],
    mask: Bool[Array, "P G T"],
    name: str,
) -> Metrics:
    """kl_to_NAME_estimated: KL(policy || other) of whole completions, from samples of the policy.

        mean over completions of sum_t logp - other_logp

    In nats per completion; unbiased, so it may be negative in one step. Completions without an
    unmasked token are left out.

    Args:
      logp: of the policy that sampled.
      name: of the other policy, "base" or "reference".

    Source: the estimator k1 of Schulman 2020, over sequences.
    """
    total = jnp.where(mask, logp - other_logp, 0).sum(-1)
    return {f"kl_to_{name}_estimated": mean(total, mask.any(-1))}
