"""Every surrogate with every reduction on one batch [P, G, T], in one jitted function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.core.metrics import accumulate_dtype
from jaxgrpo.losses import (
    Tokens,
    build_entropy,
    build_penalty,
    build_reduction,
    build_surrogate,
    registry,
    token_loss,
)

P, G, T = 4, 3, 6
OPTIONS = {
    "constant": {"length": 5.0},
    "by_sample": {"field": "replayed"},
    "gspo": {"low": 0.05, "high": 0.05},  # so that some sequences are within, others beyond
    "gspo_token": {"low": 0.05, "high": 0.05},
    "dppo_tv": {"low": 0.02, "high": 0.02},
    "dynamic_clip": {"low": 0.02, "high": 0.02},
    "off_policy_mask": {"threshold": 0.1},
}
BATCH_FIELDS = ("clip_cov_tokens", "kl_cov_tokens", "label_log_sum", "label_count")
FIELDS = ("replayed", "group_log_ratio", "behavior_logp", "token_draw", *BATCH_FIELDS)
"""What surrogates read beside log-probs and advantages."""
NO_SCORE = {"rewards_as_labels"}
"""Surrogates whose gradient on policy is no multiple of REINFORCE's."""
SURROGATES = {name: build_surrogate(name, OPTIONS.get(name)) for name in registry.surrogates}
SURROGATES["cispo with two bounds"] = build_surrogate("cispo", {"low": 0.8, "high": 1.2})
REDUCTIONS = {name: build_reduction(name, OPTIONS.get(name)) for name in registry.reductions}
REDUCTIONS["sequence_mean of all"] = build_reduction("sequence_mean", {"count_empty": True})
BY_SEQUENCE = ("k2", "forward_kl_k3", "reverse_kl_off_policy")
PENALTIES = [
    *(build_penalty(name, {"beta": 0.1}) for name in registry.penalties),
    *(build_penalty(name, {"beta": 0.1, "level": "sequence"}) for name in BY_SEQUENCE),
    *(build_entropy("bonus", {"coefficient": 0.1}), build_entropy("adaptive", {"target": 1.0})),
]
STATES = {penalty.name: penalty.init() for penalty in PENALTIES if penalty.init is not None}
CASES = {name: (surrogate, []) for name, surrogate in SURROGATES.items()}
CASES["clip with penalties"] = SURROGATES["clip"], PENALTIES
COUNTS_MASKED_ROWS = {"sequence_mean of all"}
BOUNDED = {
    *("clip", "dual_clip", "gspo", "gspo_token", "gmpo", "dppo_tv"),
    *("dynamic_clip", "clip_cov", "off_policy_mask"),
}
BY_PROBABILITY = {"dppo_tv", "dynamic_clip"}
"""Those whose bounds depend on the token's probability."""
SLOPE_AT_1 = {"shaped_ratio": 0.1 / 1.1**2}
"""The gradient on policy as a multiple of REINFORCE's; 1 for the others."""
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}


def make_batch(dtype):
    """Arrays [P, G, T] with an empty row and a group without advantage."""
    random = np.random.default_rng(0)
    logp = -random.exponential(size=(P, G, T))
    proximal, reference = (logp + 0.4 * random.normal(size=(P, G, T)) for _ in range(2))
    advantage = np.repeat(random.normal(size=(P, G, 1)), T, 2)
    advantage[2] = 0  # a flat group, in the denominator all the same
    mask = np.arange(T) < random.integers(1, T + 1, (P, G, 1))
    mask[1, 2] = False
    replayed = np.repeat(np.arange(P * G).reshape(P, G, 1) % 3 == 0, T, 2)
    arrays = {
        "logp": logp,
        "proximal": proximal,
        "advantage": advantage,
        "reference": reference,
        "replayed": replayed,
        "group_log_ratio": np.repeat(random.normal(size=(P, 1)), G * T).reshape(P, G, T),
        "behavior_logp": proximal + 0.1 * random.normal(size=(P, G, T)),
        "token_draw": random.random((P, G, T)),
        "clip_cov_tokens": random.random((P, G, T)) < 0.2,
        "kl_cov_tokens": random.random((P, G, T)) < 0.2,
        "label_log_sum": 1 + random.random((P, G, T)),
        "label_count": random.integers(1, 4, (P, G, T)),
    }
    return {name: jnp.asarray(leaf, dtype) for name, leaf in arrays.items()} | {
        "mask": jnp.asarray(mask),
        "segment": jnp.ones((P, G, T), jnp.int32),
    }


@jax.jit
def reduce_all(mask):
    return {name: reduction.weights(mask) for name, reduction in REDUCTIONS.items()}


@jax.jit
def evaluate_all(batch, weights):
    """case -> (reduction -> loss, reduction -> gradient, metrics), with weights of the whole."""
    stacked = jnp.stack(list(weights.values()))

    def evaluate(logp, surrogate, penalties):
        reference = batch["reference"]
        fields = {"reference_logp": reference, "full_kl": reference, "policy_entropy": reference}
        fields |= {name: batch[name] for name in FIELDS}
        fields["teacher_top"] = two_token_score(jnp.where(batch["mask"], reference, jnp.nan))
        fields["policy:teacher_top"] = two_token_score(jnp.where(batch["mask"], logp, 0))[..., 1, :]
        tokens = Tokens(
            logp=logp,
            proximal_logp=batch["proximal"],
            advantage=batch["advantage"],
            mask=batch["mask"],
            segment=batch["segment"],
            fields=fields,
        )
        return token_loss(surrogate, penalties, tokens, STATES)

    results = {}
    for name, (surrogate, penalties) in CASES.items():
        value, pull, metrics = jax.vjp(
            lambda logp, s=surrogate, p=penalties: evaluate(logp, s, p), batch["logp"], has_aux=True
        )
        weight = stacked.astype(value.dtype)
        losses = (weight * value[None]).reshape(len(stacked), -1).sum(1)
        (gradients,) = jax.vmap(pull)(weight)
        results[name] = (
            dict(zip(weights, losses, strict=True)),
            dict(zip(weights, gradients, strict=True)),
            metrics,
        )
    return results


def two_token_score(score):
    """A distribution over two tokens, as scores of likeliest tokens are, from a number for each."""
    score = score.astype(accumulate_dtype(score.dtype))
    logp = jnp.stack([jax.nn.log_sigmoid(score), jax.nn.log_sigmoid(-score)], -1)
    return jnp.stack([jnp.broadcast_to(jnp.array([7, -1], logp.dtype), logp.shape), logp], -2)


def evaluate_batch(batch):
    return evaluate_all(batch, reduce_all(batch["mask"]))


def check_equal(left, right, tolerance):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance),
        left,
        right,
    )


def check_changed(plain, changed, back, tolerance, without=()):
    """`changed` is `plain` once its gradients have been brought back into place."""
    for name, (loss, gradient, metrics) in plain.items():
        changed_loss, moved, counted = changed[name]
        keys = loss.keys() - set(without)
        check_equal({k: loss[k] for k in keys}, {k: changed_loss[k] for k in keys}, tolerance)
        returned = {k: back(np.asarray(moved[k])) for k in keys}
        check_equal({k: gradient[k] for k in keys}, returned, tolerance)
        check_equal(metrics, counted, tolerance)


def pick(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)
