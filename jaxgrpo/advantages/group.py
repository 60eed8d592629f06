"""Baselines and scales taken from the samples of one prompt; then pass@k, and pairs of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.absolute import successes
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal

_SINGLETONS = ("zero", "raw")


def subtract_group_mean(singleton: str = "zero") -> AdvantageTransform:
    """Subtracts the mean over the samples of a prompt.

        a[p, g] = r[p, g] - mean_g r[p, g]

    Uses unmasked samples only. Exactly 0 in flat groups (max == min) and with fewer than two
    unmasked samples, where the mean says nothing.

    Args:
      singleton: of a group with one unmasked sample: "zero", or "raw": its value as it is (verl).

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2; alone, it is the advantage of
    Dr. GRPO, Liu et al. 2025, arXiv 2503.20783. verl keeps a single sample's raw reward.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(subtract_group_mean(), [[1.0, 0.0, 0.0, 1.0]])[0].tolist()
    [[0.5, -0.5, -0.5, 0.5]]
    """

    def centred(value: Array, mask: Array, group: stats.Summary, rollouts: Rollouts) -> Array:
        return group.centred(value)

    return _unless_flat("subtract_group_mean", centred, singleton)._replace(
        shrinks=True, alone=float(singleton == "raw")
    )


def divide_by_group_std(
    eps: Scheduled = 1e-6, ddof: int = 1, singleton: str = "zero"
) -> AdvantageTransform:
    """Divides each value by the standard deviation of its group.

        a[p, g] = r[p, g] / (std_g r[p, g] + eps)

    Uses unmasked samples only. Exactly 0 in flat groups (max == min) and with fewer than two
    unmasked samples, also without a baseline before it. The standard deviation is that of the
    values it gets; a baseline before it, the same for a whole group, does not change it.

    Args:
      eps: added to the standard deviation, in units of reward; a number or a function of the step.
      ddof: 0 divides by n, 1 by n - 1.
      singleton: of a group with one unmasked sample: "zero", or "raw": a deviation of 1 (verl).

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2. The paper gives neither eps nor
    ddof; TRL takes ddof 1 and eps 1e-4, verl ddof 1 and eps 1e-6.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(divide_by_group_std(eps=0.0, ddof=0), [[3.0, 1.0], [1.0, 1.0]])[0].tolist()
    [[3.0, 1.0], [0.0, 0.0]]
    """
    base.check_divisor("divide_by_group_std", eps, ddof)

    def divided(value: Array, mask: Array, group: stats.Summary, rollouts: Rollouts) -> Array:
        std = jnp.sqrt(stats.variance(value, mask, ddof=ddof, about=group))
        eps_value = base.at_step(eps, rollouts, value.dtype)
        # Where the group is flat the divisor may be 0: it is replaced, not only its quotient.
        divisor = jnp.where(group.flat, 1 + eps_value, std + eps_value)
        divisor = jnp.where(divisor > 0, divisor, jnp.inf)  # eps 0 and a variance that underflows
        return value / divisor

    return _unless_flat("divide_by_group_std", divided, singleton, scales=True)


def subtract_leave_one_out_mean(singleton: str = "zero") -> AdvantageTransform:
    """Subtracts from each sample the mean of the others of its prompt.

        a[p, g] = r[p, g] - sum_{j != g} r[p, j] / (n - 1) = n / (n - 1) (r[p, g] - mean_g r)

    The baseline does not know its own sample, so the expected gradient is that of the mean reward;
    with the mean over all samples it is (1 - 1/n) of it. n counts unmasked samples. Exactly 0 in
    flat groups and with fewer than two unmasked samples.

    Args:
      singleton: of a group with one unmasked sample: "zero", or "raw": its value as it is.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: RLOO, Ahmadian et al. 2024, arXiv 2402.14740. verl's `rloo` keeps a single sample's
    raw reward, its `rloo_vectorized` gives 0.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(subtract_leave_one_out_mean(), [[1.0, 0.0, 0.5]])[0].tolist()
    [[0.75, -0.75, 0.0]]
    """

    def left_out(value: Array, mask: Array, group: stats.Summary, rollouts: Rollouts) -> Array:
        number = group.count.astype(value.dtype)
        return number / jnp.maximum(number - 1, 1) * group.centred(value)

    return _unless_flat("subtract_leave_one_out_mean", left_out, singleton)


def subtract_group_median() -> AdvantageTransform:
    """Subtracts the median over the samples of a prompt: one outlier does not move the others.

        a[p, g] = r[p, g] - median_g r[p, g]

    The median of an even number is the mean of the middle two. With rewards in {0, 1} the larger
    side gets 0: of 1 0 0 0 only the success is trained on. Uses unmasked samples only; exactly 0 in
    flat groups and with fewer than two unmasked samples.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: MC-GRPO, arXiv 2601.22582, which draws an odd number of samples and leaves the middle
    one out of the update; here its advantage is 0.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(subtract_group_median(), [[1.0, 0.0, 0.0, 0.0]])[0].tolist()
    [[1.0, 0.0, 0.0, 0.0]]
    """

    def centred(value: Array, mask: Array, group: stats.Summary, rollouts: Rollouts) -> Array:
        return value - _median(value, mask)

    return _unless_flat("subtract_group_median", centred)


def subtract_length_weighted_mean(singleton: str = "zero") -> AdvantageTransform:
    """Subtracts the mean over the samples of a prompt, each weighing as many tokens as it has.

        a[p, g] = r[p, g] - sum_g L[p, g] r[p, g] / sum_g L[p, g]        L = sum_t token_mask

    The baseline of least variance where a sample's squared gradient grows as its length. Without
    any token the baseline is 0. Exactly 0 in flat groups and with fewer than two unmasked samples.

    Args:
      singleton: of a group with one unmasked sample: "zero", or "raw": its value as it is (verl).

    Signal: [P, G] -> [P, G], mask unchanged; reads token_mask [P, G, T].  Raises: InputError on
    token-level values [P, G, T].
    Source: OPO, Hao et al. 2025, arXiv 2505.23585.

    >>> from jaxgrpo.advantages import evaluate
    >>> lengths = [[[True, True, True], [True, False, False]]]
    >>> evaluate(subtract_length_weighted_mean(), [[1.0, 0.0]], token_mask=lengths)[0].tolist()
    [[0.25, -0.75]]
    """

    def centred(value: Array, mask: Array, group: stats.Summary, rollouts: Rollouts) -> Array:
        tokens = base.read("subtract_length_weighted_mean", rollouts, "token_mask").astype(bool)
        length = jnp.where(mask, tokens.sum(-1, dtype=jnp.int32), 0).astype(value.dtype)
        total = length.sum(1, keepdims=True)
        # Weights that add up to 1 first: length times a huge reward would overflow.
        share = length / jnp.maximum(total, 1)
        apart = value - jnp.where(total > 0, group.near, 0)
        return apart - jnp.where(mask, share * apart, 0).sum(1, keepdims=True)

    part = _unless_flat("subtract_length_weighted_mean", centred, singleton)
    # By 1 - 1/n on average over the samples.
    return part._replace(shrinks=True, alone=float(singleton == "raw"))


def divide_by_group_mean(eps: Scheduled = 0.0) -> AdvantageTransform:
    """Divides each value by the mean of its group: the fewer succeed, the more each weighs.

        a[p, g] = r[p, g] / (mean_g r[p, g] + eps),  0 where the mean is not above 0

    A scale, not a baseline: put it before subtract_group_mean(), which leaves a mean of 0. A flat
    group of successes gets 1 throughout, and 0 behind that baseline.

    Args:
      eps: added to the mean, in units of reward; a number or a function of the step.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: MaxRL, arXiv 2602.02710: with rewards in {0, 1} the expected gradient is that of
    sum_{k <= G} pass@k / k, the log-likelihood of success cut after G terms.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(divide_by_group_mean(), [[1.0, 0.0, 0.0, 0.0]])[0].tolist()
    [[4.0, 0.0, 0.0, 0.0]]
    """
    base.check_divisor("divide_by_group_mean", eps)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        mean = stats.mean(value, signal.mask)
        positive = mean > 0
        divisor = jnp.where(positive, mean + base.at_step(eps, rollouts, value.dtype), 1)
        return base.with_value(signal, jnp.where(positive, value / divisor, 0)), {}

    return base.stateless("divide_by_group_mean", apply, levels=(2,))


def normalise_with_virtual_rewards(
    count: int = 4, top: float = 1.0, eps: Scheduled = 1e-6, ddof: int = 1
) -> AdvantageTransform:
    """Normalises within the group; a flat group as if further samples were in it.

        v_j = top (K + 1 - j) / (K + 1),  j = 1 ... K
        a[p, g] = (r[p, g] - m) / (s + eps)

    m and s are mean and standard deviation of the group's rewards; in a flat group of these and of
    the K virtual rewards, which lie evenly between 0 and `top`. So a group of failures is pushed
    down and one of successes up, each by the same for all its samples. Nothing else sees virtual
    rewards: the loss is of the real samples alone.

    Args:
      count: K, the virtual rewards of a flat group.
      top: the highest reward that there is.
      eps, ddof: as in `divide_by_group_std`.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Metrics: collapsed, the share of groups that are flat (the paper's advantage collapse rate).
    Source: AVSPO, arXiv 2605.21125, by a secondary note, which gives neither K nor the deviation's
    divisor; K = 4 is ours. A single sample counts as a flat group here.

    >>> from jaxgrpo.advantages import evaluate
    >>> virtual = normalise_with_virtual_rewards(count=1, eps=0.0, ddof=0)
    >>> evaluate(virtual, [[1.0, 0.0], [0.0, None]])[0].tolist()
    [[1.0, -1.0], [-1.0, 0.0]]
    """
    name = "normalise_with_virtual_rewards"
    base.check_whole(name, count=count)
    base.check(name, "a finite number", lambda top: abs(top) < float("inf"), top=top)
    base.check_divisor(name, eps, ddof)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value, mask = stats.widen(signal.value), signal.mask
        group = stats.summary(value, mask)
        places = jnp.arange(count, 0, -1, dtype=value.dtype)
        virtual = jnp.broadcast_to(top * places / (count + 1), (len(value), count))
        is_flat = group.flat & (group.count > 0)
        widened = jnp.concatenate([value, virtual], axis=1)
        in_group = jnp.concatenate([mask, jnp.broadcast_to(is_flat, virtual.shape)], axis=1)
        wide = stats.summary(widened, in_group)
        std = jnp.sqrt(stats.variance(widened, in_group, ddof=ddof, about=wide))
        divisor = std + base.at_step(eps, rollouts, value.dtype)
        centred = wide.centred(value)
        normalised = jnp.where(divisor > 0, centred / jnp.where(divisor > 0, divisor, 1), 0)
        return base.with_value(signal, normalised), {"collapsed": mean(is_flat, group.count > 0)}

    part = base.stateless(name, apply, levels=(2,), shrinks=True)
    return part._replace(alone=count / (count + 1))  # a single sample is of a flat group


def max_minus_second() -> AdvantageTransform:
    """The best sample of a prompt gets what it is ahead of the second; all others get 0.

        a[p, g] = r[p, g] - max_{j != g} r[p, j]   where that is above 0, else 0

    This is the best of the group less the best without the sample: what it adds to pass@G. Two
    that share the first place add nothing: 0. Uses unmasked samples only; exactly 0 in flat groups
    and with fewer than two unmasked samples. Behind divide_by_group_std() it is verl's
    `grpo_passk`.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: pass@k training, arXiv 2503.19595. The expected gradient is that of the expected best
    reward of G, over G; verl refuses single samples.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(max_minus_second(), [[4.0, 1.0, 3.0]])[0].tolist()
    [[1.0, 0.0, 0.0]]
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value, mask = stats.widen(signal.value), signal.mask
        group = stats.summary(value, mask)
        first = mask & (value == group.high)
        runners_up = stats.summary(value, mask & ~first)
        alone = (group.count == runners_up.count + 1) & (group.count > 1)
        ahead = group.high - jnp.where(alone, runners_up.high, group.high)
        return base.with_value(signal, jnp.where(alone & first, ahead, 0)), {}

    return base.stateless("max_minus_second", apply, levels=(2,), relative=True)


def leave_one_out_pass_at_k(
    k: int, threshold: Scheduled | None = None, std: bool = False
) -> AdvantageTransform:
    """The exact leave-one-out advantage of pass@k, estimated from all n samples of the prompt.

        U = 1 - C(n - c, k) / C(n, k)                     c successes of n unmasked samples
        a[p, g] = n (U - U without sample g)
        std:  a / sqrt(U (1 - U)) (n - k) / (n k), so sqrt((1 - U) / U) for a success

    As U is unbiased, and U without g independent of g, the expected gradient is exactly that of
    pass@k, k (1 - p)^(k - 1) times that of the success rate p. k = 1 is leave-one-out (RLOO).
    Groups with n - c < k give 0: U is 1 already. Exactly 0 in flat groups, and where n <= k, which
    says nothing without g.

    Args:
      k: samples of which one has to succeed, from 1 to group_size - 1; for k = group_size take
        max_minus_second.
      threshold: the lowest reward that is a success; None: rewards must be 0 or 1.
      std: whether the advantage is divided by the deviation of "one of k succeeds", as if all
        subsets of k samples were groups; then groups weigh alike, and it is no gradient of pass@k.

    Signal: [P, G] -> [P, G].  Other rewards as with `sign`; so is the metric "refused".
    Raises: InputError unless k is whole and from 1 to group_size - 1.  Metrics: too_few, the share
    of groups with unmasked samples, but no more than k.
    Source: the estimator of Chen et al. 2021, arXiv 2107.03374; as a reward, arXiv 2505.15201; std:
    pass@k training, Chen et al. 2025, arXiv 2508.10751, its analytical form.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(leave_one_out_pass_at_k(1), [[1.0, 0.0, 0.0]])[0].tolist()
    [[1.0, -0.5, -0.5]]
    """
    base.check_whole("leave_one_out_pass_at_k", k=k)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        signal, success, metrics = successes("leave_one_out_pass_at_k", signal, threshold, rollouts)
        number = stats.count(signal.mask)
        value = _leave_one_out(success, signal.mask, k, stats.widen(signal.value).dtype, std)
        few = {"too_few": mean(number <= k, number > 0)}
        return base.with_value(signal, value), {**metrics, **few}

    def accepts(spec: RolloutSpec) -> None:
        if spec.group_size <= k:
            raise InputError(
                f"rollout.group_size = {spec.group_size}: leave_one_out_pass_at_k(k={k}) leaves one"
                " sample out of more than k: draw more samples or lower k; for k = group_size take"
                " max_minus_second"
            )

    name = "leave_one_out_pass_at_k"
    return base.stateless(name, apply, levels=(2,), relative=True, accepts=accepts)


def contrastive_pairs() -> AdvantageTransform:
    """Compares each sample with each other of its prompt: pairs won less pairs lost.

        a[p, g] = (#{j: r[p, j] < r[p, g]} - #{j: r[p, j] > r[p, g]}) / n

    With rewards in {0, 1} this is (1/n) sum over pairs (success, failure) of +1 for the success
    and -1 for the failure, and equals less the group mean. Other rewards enter by their order
    only, so an outlier counts as any other. Uses unmasked samples only; exactly 0 in flat groups
    and with fewer than two unmasked samples.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: the pairwise reading of centring, Gradient starvation, arXiv 2605.07689; ranks are ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(contrastive_pairs(), [[9.0, 1.0, 0.0, 0.0]])[0].tolist()
    [[0.75, 0.25, -0.5, -0.5]]
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value, mask = signal.value, signal.mask
        # [P, other, sample]
        lower = mask[:, :, None] & (value[:, :, None] < value[:, None])
        higher = mask[:, :, None] & (value[:, :, None] > value[:, None])
        won, lost = lower.sum(1, dtype=jnp.int32), higher.sum(1, dtype=jnp.int32)
        dtype = stats.widen(value).dtype
        number = jnp.maximum(stats.count(mask), 1).astype(dtype)
        return base.with_value(signal, (won - lost).astype(dtype) / number), {}

    return base.stateless("contrastive_pairs", apply, levels=(2,), relative=True, shrinks=True)


def _unless_flat(
    name: str,
    formula: Callable[[Array, Array, stats.Summary, Rollouts], Array],
    singleton: str = "zero",
    scales: bool = False,
) -> AdvantageTransform:
    """The part that gives exactly 0 in flat groups, and what `formula` gives in the others.

    Args:
      formula: (value in at least float32, mask, summary of the groups, rollouts) -> value.
      singleton: what a group with one unmasked sample gets: "zero", or "raw": the sample's value,
        or what `formula` gives if it `scales`.
    """
    base.check_choice(name, _SINGLETONS, singleton=singleton)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        group = stats.summary(signal.value, signal.mask)
        value = stats.widen(signal.value)
        advantage = formula(value, signal.mask, group, rollouts)
        new_value = jnp.where(group.flat, 0, advantage)
        if singleton == "raw":
            new_value = jnp.where(group.count == 1, advantage if scales else value, new_value)
        return base.with_value(signal, new_value), {}

    return base.stateless(name, apply, levels=(2,), relative=True)


def _median(value: Float[Array, "P G"], mask: Bool[Array, "P G"]) -> Float[Array, "P 1"]:
    """The median of unmasked entries; its value for groups without any does not matter."""
    number = stats.count(mask)
    order = jnp.sort(jnp.where(mask, value, jnp.inf), axis=1)
    low, high = jnp.maximum(number - 1, 0) // 2, jnp.minimum(number // 2, value.shape[1] - 1)
    # Halved before they are added: two huge rewards would overflow.
    return jnp.take_along_axis(order, low, 1) / 2 + jnp.take_along_axis(order, high, 1) / 2


def _leave_one_out(success: Array, mask: Array, k: int, dtype: Any, std: bool) -> Array:
    """n (U - U without the sample) of pass@k, [P, G]; 0 in groups without a success or n <= k.

    With `std` over the deviation of U's subsets, and by (n - k) / (n k).
    """
    number = stats.count(mask).astype(dtype)
    wins = stats.count(mask & success).astype(dtype)
    losses = number - wins
    # C(n - c, k) / C(n, k), the chance that k of them all fail, factor by factor.
    drawn = jnp.arange(k, dtype=dtype)[None, :]
    failure_chances = jnp.maximum(losses - drawn, 0) / jnp.maximum(number - drawn, 1)
    failure = failure_chances.prod(axis=1, keepdims=True)
    gain = number * k * failure / jnp.maximum(number - k, 1)
    if std:
        gain = jnp.sqrt(failure / jnp.where(failure < 1, 1 - failure, 1))
    value = jnp.where(success, gain, -gain * wins / jnp.maximum(losses, 1))
    return jnp.where((number > k) & (wins > 0), value, 0)
