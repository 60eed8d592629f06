"""Surrogates with one ratio per sequence, exact whatever else is packed into the same row, and
what they read of the sequences of a group.

The tokens of a sequence have the same `segment` id within a row, the last axis; 0 is padding. They
may stand anywhere in the row, in any order.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics
from jaxgrpo.core.scores import GROUP_LOG_RATIO
from jaxgrpo.losses.surrogates import (
    LOG_RATIO_LIMIT,
    BatchField,
    Surrogate,
    Tokens,
    check_bounds,
    clamp_log_ratio,
    clip_where_it_gains,
    cut_metrics,
    log_ratio,
    ratio_metrics,
    ratio_surrogate,
)


def segment_sum(
    value: Float[Array, "*rows Q"],
    mask: Bool[Array, "*rows Q"],
    segment: Int[Array, "*rows Q"],
) -> Float[Array, "*rows Q"]:
    """At each position the sum over the unmasked entries of its segment.

    Ids are 0 .. Q within each row. Work and memory grow with Q: sums by id, then looked up.
    Exact under any packing and sharding of rows; on GPUs the order of the additions, and with it
    the last bit, is fixed only under --xla_gpu_deterministic_ops, as for an embedding's gradient.

    >>> value, segment = jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.array([1, 2, 1, 2])
    >>> segment_sum(value, jnp.array([True, True, True, False]), segment).tolist()
    [5.0, 2.0, 5.0, 2.0]
    """
    shape = value.shape
    ids = segment.reshape(-1, shape[-1])
    terms = jnp.where(mask, value, 0).reshape(ids.shape)

    def row(terms: Array, ids: Array) -> Array:
        return jnp.zeros(shape[-1] + 1, terms.dtype).at[ids].add(terms)[ids]

    return jax.vmap(row)(terms, ids).reshape(shape)


def segment_mean(
    value: Float[Array, "*rows Q"],
    mask: Bool[Array, "*rows Q"],
    segment: Int[Array, "*rows Q"],
) -> Float[Array, "*rows Q"]:
    """At each position the mean over the unmasked entries of its segment; 0 where there are none.

    As `segment_sum`.

    >>> value, segment = jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.array([1, 2, 1, 2])
    >>> segment_mean(value, jnp.array([True, True, True, False]), segment).tolist()
    [2.5, 2.0, 2.5, 2.0]
    """
    number = segment_sum(jnp.ones_like(value), mask, segment)
    return segment_sum(value, mask, segment) / jnp.maximum(number, 1)


def group_log_ratio(
    tokens: Tokens, group: Int[Array, "*rows Q"], count: int
) -> Float[Array, "*rows Q"]:
    """At each position the mean log ratio of its group's sequences, as a constant of the loss.

        h_i = sum_t (logp - proximal_logp),   result = mean over i of h_i

    over unmasked tokens and sequences that have any. Surrogates that need "group_log_ratio" read
    it: an update computes it from all its micro-batches before it takes the gradient, and
    `policy_loss` from `group`.

    Args:
      group: ids 0 .. count - 1, the same at all positions of a sequence.

    >>> tokens = Tokens.from_ratios([[2.0, 2.0], [1.0, 4.0], [1.0, 1.0]])
    >>> log_ratio = group_log_ratio(tokens, jnp.array([[0, 0], [1, 1], [1, 1]]), 2)
    >>> print(jnp.exp(log_ratio).round(2))  # of 4 alone, and of 4 and 1
    [[4. 4.]
     [2. 2.]
     [2. 2.]]
    """
    change = jax.lax.stop_gradient(tokens.log_ratio_to(tokens.proximal_logp))
    sequence = segment_sum(change, tokens.mask, tokens.segment)
    # Each sequence counts once, at its last unmasked token: no long sum of small shares.
    last = last_tokens(tokens)
    total = jnp.zeros(count, sequence.dtype).at[group].add(jnp.where(last, sequence, 0))
    number = jnp.zeros(count, jnp.int32).at[group].add(last.astype(jnp.int32))
    return (total / jnp.maximum(number, 1).astype(total.dtype))[group]


def with_group_ratio(
    fields: tuple[BatchField, ...], needs: frozenset[str]
) -> tuple[BatchField, ...]:
    """What an update makes of its batch, with `group_log_ratio` if it is needed and not there."""
    if GROUP_LOG_RATIO not in needs.difference(field.name for field in fields):
        return fields
    return (*fields, BatchField(GROUP_LOG_RATIO, group_log_ratio, by_group=True))


def last_tokens(tokens: Tokens) -> Bool[Array, "*rows Q"]:
    """True at the last unmasked token of each sequence."""
    mask, width = tokens.mask, tokens.mask.shape[-1]

    def row(mask: Array, ids: Array) -> Array:
        place = jnp.where(mask, jnp.arange(width), -1)
        return mask & (jnp.full(width + 1, -1).at[ids].max(place)[ids] == place)

    ids = tokens.segment.reshape(-1, width)
    return jax.vmap(row)(mask.reshape(ids.shape), ids).reshape(mask.shape)


def gspo(low: float = 3e-4, high: float = 4e-4) -> Surrogate:
    """PPO's clip on one ratio per sequence, the geometric mean of its tokens' ratios.

        s_i = exp(mean_t (logp - proximal_logp))
        loss = -min(s_i A, clip(s_i, 1 - low, 1 + high) A), at every token

    A token's gradient is that of the mean over its sequence, so that with advantages that differ
    within a sequence it gets their mean; `gspo_token` gives each its own. The bounds are a
    thousandth of the usual ones since the ratio is a mean. `sequence_mean` makes it the paper's
    loss; with `sequence_sum` it is LUSPO (each sequence times its length).

    Args:
      low, high: how far the sequence's ratio may fall and rise.

    Metrics: `ratio_metrics` of s_i; clip_ratio/low_mean, high_mean, region_mean, shares of tokens.
    Raises: InputError unless 0 <= low <= 1 and high >= 0.
    Source: Zheng et al. 2025, arXiv 2507.18071, equations 5 and 7; bounds of its section 5.1.

    The mean of ratios 4 and 1 is 2, and clipped for A = 1:

    >>> loss, _ = gspo(0.5, 0.5).compute(Tokens.from_ratios([[4.0, 1.0], [4.0, 1.0]], [[1], [-1]]))
    >>> print(loss.round(2))
    [[-1.5 -1.5]
     [ 2.   2. ]]
    """
    check_bounds("gspo", low, high)

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        rho, metrics = clip_where_it_gains(jnp.exp(log_rho), weight, tokens.mask, low, high)
        return -rho * weight, metrics

    return ratio_surrogate("gspo", rule, mean_log_ratio)


def gspo_token(low: float = 3e-4, high: float = 4e-4) -> Surrogate:
    """GSPO whose gradient goes to each token with its own advantage.

        s_it = stop_gradient(s_i) exp(logp - stop_gradient(logp))
        loss = -min(s_it A, clip(s_it, 1 - low, 1 + high) A)

    Values are those of `gspo`. Gradients are too, if advantage and weight are the same at all
    tokens of a sequence.

    Args:
      low, high: as for `gspo`.

    Metrics: as `gspo`.  Raises: InputError unless 0 <= low <= 1 and high >= 0.
    Source: Zheng et al. 2025, arXiv 2507.18071, equation 14. verl clamps log s_it at 10 from
    above, here +-20.

    >>> loss, _ = gspo_token(0.5, 1.5).compute(Tokens.from_ratios([4.0, 1.0], [1, 3]))
    >>> print(loss.round(2))
    [-2. -6.]
    """
    check_bounds("gspo_token", low, high)

    def compute(tokens: Tokens) -> tuple[Array, Metrics]:
        log_rho, clamped = jax.lax.stop_gradient(mean_log_ratio(tokens))
        weight = tokens.without_gradient(tokens.advantage)
        # Clamped sequences are constant, as in the other surrogates.
        token_log_ratio = jnp.where(clamped, 0, tokens.log_ratio_to(tokens.logp))
        rho, metrics = clip_where_it_gains(
            jnp.exp(log_rho + token_log_ratio), weight, tokens.mask, low, high
        )
        return -rho * weight, ratio_metrics(log_rho, clamped, tokens.mask) | metrics

    return Surrogate("gspo_token", compute)


def gmpo(low: float = 0.4, high: float = 0.4) -> Surrogate:
    """The geometric mean of ratios that were clipped one by one.

        u = logp - proximal_logp, at most high where A > 0, at least -low where A < 0
        loss = -exp(mean_t u) A, at every token

    Clipped tokens get no gradient; the others share their sequence's.

    Args:
      low, high: bounds of the log ratio, not of the ratio.

    Metrics: `ratio_metrics` of the sequence's ratio; clip_ratio/low_mean, high_mean and
    region_mean of its tokens'.  Raises: InputError unless both are finite and not negative.
    Source: Zhao et al. 2025, arXiv 2507.20673. Meant for `sequence_mean`.

    Of ratios 4 and 1 the first is cut at 2.25, the mean of 2.25 and 1 is 1.5:

    >>> loss, _ = gmpo(high=math.log(2.25)).compute(Tokens.from_ratios([4.0, 1.0], [1, 2]))
    >>> print(loss.round(2))
    [-1.5 -3. ]
    """
    if not (0 <= low < math.inf and 0 <= high < math.inf):
        raise InputError(f"gmpo: low = {low}, high = {high}; expected finite numbers >= 0")

    def compute(tokens: Tokens) -> tuple[Array, Metrics]:
        mask, weight = tokens.mask, tokens.without_gradient(tokens.advantage)
        change = tokens.log_ratio_to(tokens.proximal_logp)
        above = mask & (weight > 0) & (change > high)
        below = mask & (weight < 0) & (change < -low)
        change = jnp.where(above, high, jnp.where(below, -low, change))
        log_rho, clamped = clamp_log_ratio(segment_mean(change, mask, tokens.segment), mask)
        metrics = ratio_metrics(log_rho, clamped, mask) | cut_metrics(below, above, mask)
        return -jnp.exp(log_rho) * weight, metrics

    return Surrogate("gmpo", compute)


def vespo(
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Surrogate:
    """REINFORCE weighted by a smooth function of the whole sequence's ratio, a product.

        W_i = exp(clip(sum_t (logp - proximal_logp), log 1e-8, 20))
        loss = -stop_gradient(exp(lambda) W^k exp(-lambda W)) A logp

    The weight is 1 at W = 1 and falls on both sides of k / lambda.

    Args:
      k_positive, lambda_positive: where A >= 0.
      k_negative, lambda_negative: where A < 0.

    Metrics: `ratio_metrics` of W, clamped at its two bounds.
    Raises: InputError unless all are positive.
    Source: VESPO, arXiv 2602.10693; numbers and bounds as in TRL. Its token-wise clamp at +-20
    comes before the sum, as there.

    The weight is 1 where the product of the ratios is; elsewhere e W exp(-W) here, 0.74 at W = 2:

    >>> tokens = Tokens.from_ratios([[2.0, 0.5], [2.0, 1.0]])
    >>> loss, _ = vespo(k_positive=1.0, lambda_positive=1.0).compute(tokens)
    >>> print(loss.round(2))  # -log 2, log 2; -0.74 log 2, 0
    [[-0.69  0.69]
     [-0.51 -0.  ]]
    """
    options = (k_positive, lambda_positive, k_negative, lambda_negative)
    if not all(0 < option < math.inf for option in options):
        raise InputError(f"vespo: k and lambda = {options}, expected positive numbers")

    def measure(tokens: Tokens) -> tuple[Array, Array]:
        token_log_ratio, clamped = jax.lax.stop_gradient(log_ratio(tokens))
        total = segment_sum(token_log_ratio, tokens.mask, tokens.segment)
        log_rho = jnp.clip(total, math.log(1e-8), LOG_RATIO_LIMIT)
        return log_rho, clamped | (tokens.mask & (total != log_rho))

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        k = jnp.where(weight >= 0, k_positive, k_negative).astype(weight.dtype)
        slope = jnp.where(weight >= 0, lambda_positive, lambda_negative).astype(weight.dtype)
        phi = jnp.exp(k * log_rho - slope * jnp.expm1(log_rho))
        return -phi * weight * tokens.unmasked(tokens.logp), {}

    return ratio_surrogate("vespo", rule, measure)


def topr(level: str = "sequence", cap: float = 1.0) -> Surrogate:
    """REINFORCE that weighs what is to become rarer by how likely it still is, and nothing else.

        loss = -A logp                                         where A > 0
               -stop_gradient(min(R, cap)) A logp              where A < 0
        R = prod_t exp(logp - proximal_logp), or at level "token" the token's own factor

    Good samples of any older policy are learnt from in full. Bad ones lose their weight as the
    policy leaves them, so that none is pushed down without end, as with the plain score function.

    Args:
      level: "sequence", the ratio of the whole sample, or "token".
      cap: the largest ratio where A < 0.

    Metrics: `ratio_metrics` of R; clip_ratio/high_mean: tokens with A < 0 whose ratio was cut.
    Raises: InputError unless cap is positive, on another level.
    Source: TOPR, Le Roux et al. 2025, arXiv 2503.14286, whose sign is that of the reward. ROLL and
    Trinity-RFT take the token's ratio. `sequence_sum` is the paper's sum.

    >>> tokens = Tokens.from_ratios([[0.5, 0.5], [0.5, 0.5]], [[1], [-1]])
    >>> print(topr().compute(tokens)[0].round(2))  # log 2, and a quarter of -log 2
    [[ 0.69  0.69]
     [-0.17 -0.17]]
    """
    check_level("topr", level)
    if not 0 < cap < math.inf:
        raise InputError(f"topr: cap = {cap}, expected a positive ratio; 1 is usual")

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        rho, mask = jnp.exp(jax.lax.stop_gradient(log_rho)), tokens.mask
        above = mask & (weight < 0) & (rho > cap)
        factor = jnp.where(weight < 0, jnp.minimum(rho, cap), 1)
        cut = cut_metrics(jnp.zeros_like(mask), above, mask)
        return -factor * weight * tokens.unmasked(tokens.logp), cut

    return ratio_surrogate("topr", rule, log_ratio if level == "token" else _total_log_ratio)


def mirror_descent(tau: float = 0.1, level: str = "sequence") -> Surrogate:
    """REINFORCE, with a price on the squared log ratio to the proximal policy.

        token:     -A logp_t + tau h_t^2 / 2,  h_t = logp_t - proximal_logp_t
        sequence:  -A logp_t at every token, + tau H^2 / 2 in all, spread over them;  H = sum_t h_t

    At ratio 1 it is `reinforce`. For rewards r and advantages r - mean r the policy of least loss
    over a sequence is the proximal one times exp(r / tau), normalised, up to what the mean over a
    group misses of the normaliser; `gvpo` centres h too and misses nothing. None needs weights,
    whatever policy drew the samples. The price acts at any distance, and where A is 0 too: all
    unmasked samples stay in the update.

    Args:
      tau: in units of reward per nat.
      level: "sequence" or "token".

    Metrics: `ratio_metrics`, of the product of a sequence's ratios at its level, clamped for them
    alone.
    Raises: InputError unless tau is positive, on another level.
    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.2, a form of online policy mirror descent;
    Trinity-RFT's OPMD is another. tau is not published; 0.1 is ours. ROLL (`kimi15`) and verl
    (`dro`, the loss of arXiv 2405.19107) have level "token". Kimi: `sequence_sum`.

    >>> tokens = Tokens.from_ratios([[math.e, math.e]], [[1.0]])
    >>> print(mirror_descent(0.5).compute(tokens)[0])  # -1 + 0.5 x 2 x 2 / 2 / 2
    [[-0.5 -0.5]]
    >>> print(mirror_descent(0.5, "token").compute(tokens)[0])  # -1 + 0.5 / 2
    [[-0.75 -0.75]]
    """
    check_level("mirror_descent", level)
    if not 0 < tau < math.inf:
        raise InputError(f"mirror_descent: tau = {tau}, expected a positive price of a nat squared")

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        # Not the clamped log ratio: the price would have no slope where the policy went farthest.
        mask, change = tokens.mask, tokens.log_ratio_to(tokens.proximal_logp)
        number = jnp.ones_like(change)
        if level == "sequence":
            number = segment_sum(number, mask, tokens.segment)
            change = segment_sum(change, mask, tokens.segment)
        squares = 0.5 * tau * jnp.square(change) / jnp.maximum(number, 1)
        return jnp.where(mask, squares, 0) - weight * tokens.unmasked(tokens.logp), {}

    measure = log_ratio if level == "token" else _total_log_ratio
    return ratio_surrogate("mirror_descent", rule, measure)._replace(acts_on_all=True)


def gvpo(beta: float = 0.1) -> Surrogate:
    """The squared distance of a sequence's log ratio, centred in its group, from A / beta.

        h_i = sum_t (logp - proximal_logp),   m = mean of h over the group's unmasked sequences
        loss = (beta (h_i - m) - A)^2 / (2 beta) in all, spread over the tokens

    The gradient is -(A - beta (h_i - m)) grad h_i: at ratio 1 that of `reinforce`, and 0 once each
    sequence's ratio is as its advantage asks. For rewards r and advantages r - mean r, `dr_grpo`,
    the only minimum over all policies is the proximal one times exp(r / beta), normalised: the best
    reward at a price of beta per nat of KL to the proximal policy. It is the same whatever the
    samples are drawn from, so that none need weights.

    m is the mean at the current parameters, a constant of the loss. Its gradient would add
    nothing where A adds up to 0 in each group, over the unmasked sequences, and all weigh alike.
    A flat group teaches too: A is 0 there, and the loss draws the ratios of its sequences
    together, as the KL asks. So all unmasked samples stay in the update.

    Args:
      beta: in units of reward per nat; 0.1 in the authors' runs.

    Needs: group_log_ratio, m at each token.
    Metrics: `ratio_metrics` of exp(h_i), clamped for them alone.
    Raises: InputError unless beta is positive; if `policy_loss` is not told the `group`.
    Source: Zhang et al. 2025, arXiv 2504.19599. `sequence_sum` makes it the paper's loss, a mean
    over samples. The authors' recipe for verl gives beta G / (G - 1) times the sum over prompts
    of the mean over their samples.

    A sequence of ratio e in a group whose mean is 0 is where A = beta asks it to be:

    >>> tokens = Tokens.from_ratios([[math.e], [1.0]], [[0.5], [0.5]], group_log_ratio=0.0)
    >>> loss, _ = gvpo(0.5).compute(tokens)
    >>> print(loss.round(2))
    [[0.  ]
     [0.25]]
    """
    if not (0 < beta < math.inf):
        raise InputError(f"gvpo: beta = {beta}, expected a positive price of a nat; 0.1 is usual")

    def compute(tokens: Tokens) -> tuple[Array, Metrics]:
        mask, about = tokens.mask, "the mean log ratio of each group's sequences (give `group`)"
        mean = tokens.without_gradient(tokens.field(GROUP_LOG_RATIO, "gvpo", about))
        change = tokens.log_ratio_to(tokens.proximal_logp)
        total = segment_sum(change, mask, tokens.segment)
        number = segment_sum(jnp.ones_like(change), mask, tokens.segment)
        miss = beta * (total - mean) - tokens.without_gradient(tokens.advantage)
        loss = jnp.where(mask, miss**2 / (2 * beta * jnp.maximum(number, 1)), 0)
        return loss, ratio_metrics(*clamp_log_ratio(total, mask), mask)

    return Surrogate("gvpo", compute, frozenset({GROUP_LOG_RATIO}), acts_on_all=True)


def check_level(name: str, level: str) -> None:
    """Raises: InputError unless the level is "token" or "sequence"."""
    if level not in ("token", "sequence"):
        raise InputError(f'{name}: level = {level!r}, expected "token" or "sequence"')


def _total_log_ratio(tokens: Tokens) -> tuple[Array, Array]:
    """(log of the product of a sequence's ratios, where it was clamped)."""
    change = tokens.log_ratio_to(tokens.proximal_logp)
    total = segment_sum(change, tokens.mask, tokens.segment)
    return clamp_log_ratio(jnp.where(tokens.mask, total, 0), tokens.mask)


def mean_log_ratio(tokens: Tokens) -> tuple[Array, Array]:
    """(log of the geometric mean of a sequence's ratios, where it was clamped)."""
    change = tokens.log_ratio_to(tokens.proximal_logp)
    mean = segment_mean(change, tokens.mask, tokens.segment)
    return clamp_log_ratio(mean, tokens.mask)
