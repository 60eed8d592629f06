"""Pure statistics of groups: how many teach nothing, how many would by chance, and pass@k."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxgrpo.advantages import stats
from jaxgrpo.metrics import Mean, Metrics, maximum, mean, merge, minimum


def group_metrics(
    rewards: Mapping[str, Array], weights: Mapping[str, float] | None = None
) -> Metrics:
    """Rewards and shares of groups, of the weighted sum of the rewards (None: all weigh 1).

    A sample that one of the rewards could not score is left out, as in `sum_rewards`; a group
    without any scored sample is counted in no share. A group is flat where its scored rewards are
    all equal, or only one is scored:

        groups/all_fail  flat, and the reward is 0 or below
        groups/all_pass  flat, and the reward is above 0
        groups/mixed     not flat
        frac_reward_zero_std  flat (TRL's name)

    and reward (mean over samples), reward_std (mean over groups of the n - 1 deviation), and each
    reward's own rewards/NAME/mean and std (n - 1, over all samples) and the share that it could
    not score, rewards/NAME/unscored.
    Shapes: each reward [P, G].
    """
    total, mask = _summed(rewards, weights)
    flat = stats.is_flat(total, mask)
    _, high = stats.extremes(total, mask)
    scored = mask.any(axis=1, keepdims=True)
    own = [_own_metrics(name, reward) for name, reward in rewards.items()]
    return functools.reduce(merge, own) | {
        "reward": mean(total, mask),
        "reward_std": mean(stats.std(total, mask, ddof=1), scored),
        "frac_reward_zero_std": mean(flat, scored),
        "groups/all_fail": mean(flat & (high <= 0), scored),
        "groups/all_pass": mean(flat & (high > 0), scored),
        "groups/mixed": mean(~flat, scored),
    }


def _own_metrics(name: str, reward: Float[Array, "P G"]) -> Metrics:
    scored = jnp.isfinite(reward)
    value = jnp.where(scored, reward, 0)
    flat, mask = value.reshape(1, -1), scored.reshape(1, -1)
    return {
        f"rewards/{name}/mean": mean(value, scored),
        f"rewards/{name}/std": mean(stats.std(flat, mask, ddof=1), mask.any(keepdims=True)),
        f"rewards/{name}/unscored": mean(~scored),
    }


def completion_metrics(
    tokens: Int[Array, "P G T"], mask: Bool[Array, "P G T"], truncated: Bool[Array, "P G"]
) -> Metrics:
    """Lengths in tokens, how many were cut, and whether samples differ at all.

        completions/{mean,min,max}_length, and _terminated_length of those that ended by themselves
        completions/clipped_ratio  the share that the length limit cut
        groups/identical           the share of groups whose completions are all the same tokens
        num_tokens                 their sum

    A group of one sample is not identical to anything. Names as in TRL, but for `identical`;
    num_tokens is this step's, TRL's the sum over the run and with prompts.
    """
    length = mask.sum(-1)
    metrics: Metrics = {
        "completions/clipped_ratio": mean(truncated),
        "num_tokens": Mean(total=length.sum(dtype=jnp.float32), weight=jnp.float32(1)),
    }
    for name, chosen in {"length": None, "terminated_length": ~truncated}.items():
        for kind, reduce in {"mean": mean, "min": minimum, "max": maximum}.items():
            metrics[f"completions/{kind}_{name}"] = reduce(length, chosen)
    if mask.shape[1] > 1:
        shown = jnp.where(mask, tokens, -1)
        metrics["groups/identical"] = mean((shown == shown[:, :1]).all((1, 2)))
    return metrics


def live_groups(value: Array, mask: Array) -> Metrics:
    """live_groups: the share of groups with an unmasked value other than 0.

    Shapes: value and mask [P, G] or [P, G, T], as a chain returns them.
    """
    live = mask & (value != 0)
    return {"live_groups": mean(live.any(tuple(range(1, live.ndim))))}


def pass_at_k(correct: Int[Array, "P"], samples: Int[Array, "P"], k: int) -> Float[Array, "P"]:
    """The probability that k samples hold a success, unbiased, from `correct` of `samples`.

        1 - C(n - c, k) / C(n, k)

    NaN where n < k: k samples cannot be judged from fewer. Stable for any n: a product of k
    factors in [0, 1], never a binomial coefficient.

    Args:
      correct, samples: successes c and samples n per prompt.
      k: static, at least 1.

    Source: Chen et al. 2021, arXiv 2107.03374.
    """
    return 1 - _drawn_alike(samples - correct, samples, k)


def iid_flat_share(success_rate: Float[Array, ""], group_size: int) -> Float[Array, ""]:
    """The share of flat groups if every prompt had the same success rate.

        p^G + (1 - p)^G

    By Jensen's inequality the real share, E_x of the same at each prompt's own rate, is never
    smaller; at G = 2 the difference is 2 Var_x(p_x).

    Source: Gradient starvation, arXiv 2605.07689.
    """
    return success_rate**group_size + (1 - success_rate) ** group_size


def flat_share(
    correct: Int[Array, "P"], samples: Int[Array, "P"], group_size: int
) -> Float[Array, "P"]:
    """The probability that a group of G samples is flat, unbiased, from `correct` of `samples`.

        (C(c, G) + C(n - c, G)) / C(n, G)

    Putting c / n into p^G + (1 - p)^G instead overestimates, by the same inequality that makes
    the mean over prompts exceed `iid_flat_share`. NaN where n < G.
    """
    all_pass = _drawn_alike(correct, samples, group_size)
    return all_pass + _drawn_alike(samples - correct, samples, group_size)


def _drawn_alike(alike: Int[Array, "P"], samples: Int[Array, "P"], draws: int) -> Float[Array, "P"]:
    """C(alike, draws) / C(samples, draws) = prod_{j < draws} (alike - j) / (samples - j)."""
    if draws < 1:
        raise ValueError(f"{draws} draws: pass@k and group sizes begin at 1")
    dtype = jnp.result_type(float)
    taken = jnp.arange(draws, dtype=alike.dtype)[None, :]
    left = jnp.maximum(alike[:, None] - taken, 0).astype(dtype)
    among = jnp.maximum(samples[:, None] - taken, 1).astype(dtype)
    return jnp.where(samples >= draws, (left / among).prod(axis=1), jnp.nan)


def _summed(
    rewards: Mapping[str, Array], weights: Mapping[str, float] | None
) -> tuple[Float[Array, "P G"], Bool[Array, "P G"]]:
    total, mask = None, None
    for name, reward in rewards.items():
        weight = 1.0 if weights is None else weights[name]
        if weight == 0:
            continue
        scored = jnp.isfinite(reward)
        value = weight * stats.widen(jnp.where(scored, reward, 0))
        total = value if total is None else total + value
        mask = scored if mask is None else mask & scored
    if total is None or mask is None:
        raise ValueError("group_metrics needs at least one reward whose weight is not 0")
    return jnp.where(mask, total, 0), mask
