"""Parts that read scores of tokens: what passes of models say of samples, or of known answers.

Scores are `core.scores.SCORES` and those of the table `[[scores]]` of a config.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, Streams
from jaxgrpo.advantages.stats import clamp, log_ratio
from jaxgrpo.advantages.streams import add_stream, any_mask
from jaxgrpo.advantages.tokens import at_tokens, discounted
from jaxgrpo.core.metrics import Metrics, mean, minimum
from jaxgrpo.core.ranking import top_share
from jaxgrpo.core.scores import ANSWERED, SCORERS, answer_field
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal

_SHAPE, _BASELINE = "shape_by_effective_rank", "subtract_optimal_token_baseline"
_MEASURED = ("rank", "velocity", "acceleration")
_LARGEST = 5.0
"""Relative deviations of a rank are cut here, as in github.com/hf618/VERL."""


def score_mean(
    score: str = "token_entropy", sign: float = 1.0, name: str | None = None
) -> AdvantageTransform:
    """Adds a stream: the mean of a score over the tokens of each sample, as a reward.

        r[p, g] = sign * mean_t score[p, g, t]     over the tokens that the policy chose

    With self_certainty it rewards what the policy is sure of (the recipe `intuitor`), with
    token_confidence the same of the likeliest tokens, with token_entropy and sign -1 low entropy;
    with the log-probs of a model, text that the model finds likely. With weight 0 in
    the sum it is only logged. A policy's opinion of itself can be climbed without getting better:
    look at an evaluation.

    Args:
      score: the field [P, G, T], by its name in `[[scores]]` or of every run.
      sign: 1 or -1, or any factor.
      name: of the stream; None: that of the score.

    Streams: [P, G] each -> and the new one.  Raises: InputError where the name is taken.
    Metrics: mean, over the samples that it scores; those without a token or with a score that is
    not finite are masked.
    Source: certainty, Intuitor, arXiv 2505.19590; entropy, RENT, arXiv 2505.22660.

    >>> from jaxgrpo.advantages import evaluate, sum_rewards
    >>> fields = {"token_entropy": [[[2.0, 1.0], [0.5, 9.0]]], "token_mask": [[[1, 1], [1, 0]]]}
    >>> steps = [score_mean(sign=-1.0), sum_rewards()]
    >>> evaluate(steps, [[0.0, 0.0]], **fields)[0].tolist()
    [[-1.5, -0.5]]
    """

    def make(streams: Streams, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        tokens = base.read("score_mean", rollouts, "token_mask").astype(bool)
        value = stats.widen(
            base.read_field("score_mean", score, rollouts, tokens.shape, "[P, G, T]")
        )
        count = tokens.sum(-1).astype(value.dtype)
        average = sign * jnp.where(tokens, value, 0).sum(-1) / jnp.maximum(count, 1)
        like = next(iter(streams.values())).value
        signal = base.finite(average.astype(like.dtype), any_mask(streams) & (count > 0))
        return signal, {"mean": mean(signal.value, signal.mask)}

    needs = base.needed_fields(score)
    return add_stream("score_mean", name or score, make, needs)


def keep_top_entropy(
    share: Scheduled = 0.2, score: str = "token_entropy", denominator: str = "keep"
) -> AdvantageTransform:
    """Leaves an advantage to the tokens of the highest entropy alone: where the text forks.

        a[p, g, t]  at the `share` of the batch's unmasked tokens of the highest score, else 0

    Put it last. The entropies are of the policy before the step and compared over all its tokens,
    those of flat groups too.

    Args:
      share: in (0, 1]; a number or a function of the step. Tokens that tie with the last one stay.
      score: the field [P, G, T] that is compared.
      denominator: "keep" leaves the others in the mask with value 0, so that penalties act on them
        and the denominator of the loss counts them; "shrink" masks them.

    Signal: [P, G] or [P, G, T] -> [P, G, T], mask unchanged, or cut.
    Metrics: entropy, the mean score of the tokens that stay; lowest, the least of them.
    Source: Beyond the 80/20 rule, Wang et al. 2025, arXiv 2506.01939 (share 0.2, in each batch).
      TRL's `top_entropy_quantile` interpolates: at times it keeps one token less.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"token_entropy": [[[2.0, 0.1], [0.3, 1.0]]], "token_mask": [[[1, 1], [1, 1]]]}
    >>> evaluate(keep_top_entropy(0.5), [[1.0, -1.0]], **fields)[0].tolist()
    [[[1.0, 0.0], [0.0, -1.0]]]
    """
    name = "keep_top_entropy"
    base.check(name, "a share in (0, 1]", lambda share: 0 < share <= 1, share=share)
    base.check_choice(name, ("keep", "shrink"), denominator=denominator)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        wide = at_tokens(name, signal, rollouts)
        shape = wide.value.shape
        entropy = stats.widen(base.read_field(name, score, rollouts, shape, "[P, G, T]"))
        finite = wide.mask & jnp.isfinite(entropy)
        part = base.at_step(share, rollouts, jnp.float32)
        top = top_share(entropy, finite, part, axis=(0, 1, 2))
        mask = top if denominator == "shrink" else wide.mask
        metrics: Metrics = {"entropy": mean(entropy, top), "lowest": minimum(entropy, top)}
        return Signal(value=jnp.where(top, wide.value, 0), mask=mask), metrics

    step = base.stateless(name, apply, needs=frozenset({score}))
    return step._replace(compares_groups=callable(share) or share < 1)


def subtract_optimal_token_baseline() -> AdvantageTransform:
    """Subtracts from each token's return a mean of the group's, by their gradients so far.

        w[p, g, t] = 1 - 2 pi(token) + sum_v pi(v)^2      the square of the gradient by the logits
        W[p, g, t] = sum over the unmasked tokens up to t of w[p, g]
        B[p, t]    = sum_g W[p, g, t] a[p, g, t] / sum_g W[p, g, t]
        a[p, g, t] - B[p, t]

    This baseline makes the variance least, as far as tokens' gradients are alike but for the
    logits. It holds the sample itself, as a group's mean does. Where one sample alone is as long
    its advantage is 0. Values [P, G] are the return of all tokens of a sample; behind
    `reward_to_go` they differ. Flat groups stay exactly 0.

    Reads trainer_logp and token_collision, sum_v pi(v)^2, [P, G, T] each: one pass gives both.
    Signal: [P, G] or [P, G, T] -> [P, G, T], mask unchanged.
    Metrics: spread, the mean over groups of max_t B - min_t B.
    Source: Optimal Token Baseline, arXiv 2602.07078, as in verl's `optimal_token_baseline` without
      weights of the sampler's mismatch; its option handle_zero_tail, true by default, sets B = 0
      where one sample alone is as long.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"token_mask": [[[1], [1]]], "trainer_logp": [[[-99.0], [-99.0]]]}
    >>> fields["token_collision"] = [[[0.5], [0.5]]]  # w = 1.5 of both
    >>> evaluate(subtract_optimal_token_baseline(), [[1.0, 0.0]], **fields)[0].tolist()
    [[[0.5], [-0.5]]]
    """
    needs = frozenset({"trainer_logp", "token_collision"})
    return base.stateless(_BASELINE, _less_token_baseline, needs=needs, relative=True, shrinks=True)


def _less_token_baseline(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
    wide = at_tokens(_BASELINE, signal, rollouts)
    value, mask = stats.widen(wide.value), wide.mask
    logp, collision = (
        stats.widen(base.read_field(_BASELINE, field, rollouts, mask.shape, "[P, G, T]"))
        for field in ("trainer_logp", "token_collision")
    )
    square = jnp.where(mask, 1 - 2 * jnp.exp(logp) + collision, 0)
    weight = jnp.where(mask, jnp.cumsum(jnp.maximum(square, 0), axis=-1), 0)
    group = stats.summary(value, mask)  # of each token; equal returns differ by exactly 0
    weight = jnp.where(weight.sum(1, keepdims=True) > 0, weight, mask.astype(weight.dtype))
    total = jnp.where(mask, weight * (value - group.near), 0).sum(1, keepdims=True)
    above = total / jnp.maximum(weight.sum(1, keepdims=True), jnp.finfo(weight.dtype).tiny)
    less = jnp.where(group.flat, 0, (value - group.near) - above)
    baseline, anywhere = group.near + above, mask.any(1, keepdims=True)
    high = jnp.where(anywhere, baseline, -jnp.inf).max(-1)
    low = jnp.where(anywhere, baseline, jnp.inf).min(-1)
    metrics: Metrics = {"spread": mean(high - low, anywhere.any(-1))}
    return Signal(value=jnp.where(mask, less, 0).astype(wide.value.dtype), mask=mask), metrics


def distill(
    share: Scheduled = 1.0, gamma: Scheduled = 0.0, teacher: str = "teacher"
) -> AdvantageTransform:
    """Mixes each advantage with how much likelier its token is to a teacher than to the policy.

        d[p, g, t] = teacher_logp[p, g, t] - trainer_logp[p, g, t], within +-20
        D[p, g, t] = sum_(s >= t) gamma^(n(s) - n(t)) d[p, g, s],  n(t) = unmasked tokens before t
        (1 - share) a[p, g, t] + share D[p, g, t]

    On the policy's own samples, gamma 0 has per state the gradient of -KL(policy || teacher), and
    gamma 1 that of the whole sequences' KL, with more noise. D is exactly 0 where both give all
    tokens the same log-prob, and where the teacher has no prompt for a sample (NaN in the field).

    Args:
      share, gamma: of D, and per token; in [0, 1], a number or a function of the step.
      teacher: whose log-probs are read, from the field `{teacher}_logp` of `[[scores]]`.

    Signal: [P, G] or [P, G, T] -> [P, G, T], mask that of the samples at their tokens; with
    share = 1 without samples that have no teacher.
    Metrics: kl, the mean of -d, estimates KL(policy || teacher); shares scored, log_ratio_clamped.
    Source: on-policy distillation, GKD, arXiv 2306.13649, and MiniLLM, arXiv 2306.08543; as an
    advantage in Tinker's cookbook, NeMo-RL and verl.

    >>> from jaxgrpo.advantages import evaluate, sum_rewards
    >>> fields = {"trainer_logp": [[[-2.0, -1.0]]], "teacher_logp": [[[-1.0, -1.5]]]}
    >>> fields["token_mask"] = [[[True, True]]]
    >>> evaluate([sum_rewards(), distill(gamma=1.0)], [[7.0]], **fields)[0].tolist()
    [[[0.5, -0.5]]]
    """
    base.check_share("distill", share=share, gamma=gamma)
    teacher_logp = f"{teacher}_logp"

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        signal = at_tokens("distill", signal, rollouts)
        value, shape = stats.widen(signal.value), signal.value.shape
        policy, target = (
            base.read_field("distill", name, rollouts, shape, "[P, G, T]")
            for name in ("trainer_logp", teacher_logp)
        )
        scored = signal.mask & ~jnp.isnan(target)
        gain, clamped = clamp(log_ratio(target, policy, scored))
        weight, decay = (base.at_step(x, rollouts, value.dtype) for x in (share, gamma))
        to_go = discounted(gain.astype(value.dtype), signal.mask, decay)
        taught = scored if share == 1 else signal.mask
        mixed = jnp.where(taught, (1 - weight) * value + weight * to_go, 0)
        metrics: Metrics = {"kl": mean(-gain, scored), "scored": mean(scored, signal.mask)}
        metrics["log_ratio_clamped"] = mean(clamped, scored)
        return Signal(value=mixed.astype(signal.value.dtype), mask=taught), metrics

    return base.stateless("distill", apply, needs=frozenset({"trainer_logp", teacher_logp}))


def train_on_answers(weight: Scheduled = 1.0, scorer: str = "trainer") -> AdvantageTransform:
    """Puts the known answer behind each thought, in place of what followed it, and trains it by
    its probability.

        a[p, g, t] = a[p, g]                                    at the thought
        a[p, g, t] = weight exp(sum_j answer_logp[p, g, j])     at the answer's tokens

    With the product of `answer_probability` as reward, the two are the whole gradient of the
    expected probability of the answer, by the thought and by the answer. The ratio of an answer's
    tokens begins at 1; one for which `rollout.max_completion_tokens` leaves no room is left out. A
    sample that never came to an answer of its own gets none, and stays as it was drawn.

    Args:
      weight: 0 or more; a number or a function of the step.
      scorer: whose probability it is, as in `answer_probability`.

    Fields: answered [P, G, T], answer_logp [P, G, J], and the scorer's, answer_mask [P, J].
    Signal: [P, G] or [P, G, T] -> [P, G, T], answers in its mask where the sample is.
    Metrics: room, the share of samples behind whose thought the answer stands.
    Source: VeriFree, arXiv 2505.21493, its second term.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"answer_logp": [[[0.0]]], "answer_mask": [[True]], "token_mask": [[[1, 1]]]}
    >>> evaluate(train_on_answers(), [[2.0]], answered=[[[False, True]]], **fields)[0].tolist()
    [[[2.0, 1.0]]]
    """
    name, field = "train_on_answers", answer_field("answer_logp", scorer)
    base.check_at_least(name, 0, weight=weight)
    base.check_choice(name, SCORERS, scorer=scorer)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        wide = at_tokens(name, signal, rollouts)
        prompts, samples, _ = wide.mask.shape
        answered = base.read_field(name, ANSWERED, rollouts, wide.mask.shape, "[P, G, T]")
        answered = answered.astype(bool)
        tokens = base.read_field(name, "answer_mask", rollouts, (prompts, None), "[P, J]")
        tokens = tokens.astype(bool)[:, None]
        shape = prompts, samples, tokens.shape[-1]
        answer_logp = base.read_field(name, field, rollouts, shape, "[P, G, J]")
        total = jnp.where(tokens, answer_logp, 0).sum(-1, keepdims=True)
        probability = jnp.where(total < jnp.inf, jnp.exp(total), 0)  # NaN is not scored
        value = base.at_step(weight, rollouts, probability.dtype) * probability
        value = jnp.where(answered, value.astype(wide.value.dtype), wide.value)
        room = mean(answered.any(-1), wide.mask.any(-1))
        return base.with_value(wide, value), {"room": room}

    # Ratios of answers begin at answer_logp, whatever policy weighs them.
    needs = frozenset((ANSWERED, "answer_logp", "answer_mask", field))
    return base.stateless(name, apply, needs=needs)


def shape_by_effective_rank(
    kappa: float = 2.0,
    scale: Scheduled = 1.0,
    gain: float = 1.5,
    decay: float = 0.3,
    score: str = "effective_rank",
) -> AdvantageTransform:
    """Adds to each advantage a share of its size, where a sample's hidden states spread more, or
    spread faster, than of late.

        m_1, m_2, ... = the effective rank up to each stride of the sample, and up to its end
        d_j  = m_j - mean_(k < j) m_k        rank = m at the end, velocity = mean_j d_j,
                                             acceleration = mean_j (d_j - d_(j-1))
        x'   = clip((x - u) / |u|, -5, 5),   u the running mean of x over earlier batches
        b    = sigmoid(gain acceleration')
        aux  = scale (b tanh(rank') + (1 - b) tanh(velocity'))
        a[p, g] + min(max(aux, 0), |a[p, g]| / kappa)

    The bonus is never negative, of failures too: their advantage comes nearer to 0, and never
    changes its sign (kappa >= 1). Flat groups stay at 0, and count for u unless `rollout.refill`
    discards them. In the first batch, which has no u, there is no bonus. A sample with too few
    strides for a velocity or an acceleration counts 0 for x' alone.

    Args:
      kappa: at least 1; the bonus is at most |a| / kappa.
      scale: of the bonus; a number or a function of the step. 0 only measures.
      gain: of the acceleration in the share b of the rank.
      decay: u <- decay u + (1 - decay) x; 0 keeps the last batch's.
      score: the field [P, G, T] with the rank at each stride and at the end of a sample, 0 at the
        other tokens; its stride is that of the score.

    Signal: [P, G] or [P, G, T], mask unchanged.  State: the running means, and how many batches.
    Metrics: rank, velocity, acceleration, their means; bonus, its mean over unmasked samples.
    Source: VERL (Velocity-Exploiting Rank-Learning), arXiv 2509.23808, with kappa, gain and decay
      of github.com/hf618/VERL. There scale falls as rewards rise, u begins at 0, no velocity is 0.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"effective_rank": [[[1.0, 2.0], [1.0, 1.0]]], "token_mask": [[[1, 1], [1, 1]]]}
    >>> evaluate(shape_by_effective_rank(), [[1.0, -1.0]], **fields)[0].tolist()  # the first batch
    [[1.0, -1.0]]
    """
    base.check(_SHAPE, "a number from 1 on", lambda value: value >= 1, kappa=kappa)
    base.check(_SHAPE, "a share in [0, 1)", lambda value: 0 <= value < 1, decay=decay)
    base.check_at_least(_SHAPE, 0, scale=scale)

    def init(spec: RolloutSpec) -> dict[str, Array]:
        return {"means": jnp.zeros(3), "batches": jnp.zeros((), jnp.int32)}

    shaper = _Shaper(kappa, scale, gain, decay, score)
    return AdvantageTransform(_SHAPE, init, shaper.update, frozenset({score}))


class _Shaper(NamedTuple):
    """The options of `shape_by_effective_rank`, and its update."""

    kappa: float
    scale: Scheduled
    gain: float
    decay: float
    score: str

    def update(self, signal: Signal, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        mask, value, has_means = signal.mask, stats.widen(signal.value), state["batches"] > 0
        alive = mask if mask.ndim == 2 else mask.any(-1)
        tokens = base.read(_SHAPE, rollouts, "token_mask").astype(bool) & alive[..., None]
        ranks = base.read_field(_SHAPE, self.score, rollouts, tokens.shape, "[P, G, T]")
        measured = _movement(jnp.where(tokens, stats.widen(ranks), 0))
        batch = jnp.stack([*map(_mean, measured.value, measured.measurable)])
        old, is_measured = state["means"].astype(batch.dtype), measured.measurable.any((1, 2))
        bonus = base.at_step(self.scale, rollouts, batch.dtype) * _bonus(measured, old, self.gain)
        bonus = jnp.where(has_means, jnp.maximum(bonus, 0), 0)
        bonus = bonus if value.ndim == 2 else bonus[..., None]
        added = jnp.minimum(bonus, jnp.abs(value) / self.kappa)
        # 0 is the mean of what no batch has measured yet, as in `_bonus`.
        mixed = jnp.where(old == 0, batch, self.decay * old + (1 - self.decay) * batch)
        means = jnp.where(is_measured, mixed, old)
        new_state = {"means": means.astype(state["means"].dtype), "batches": state["batches"] + 1}
        sizes = zip(_MEASURED, measured.value, measured.measurable, strict=True)
        metrics: Metrics = {name: mean(x, measurable) for name, x, measurable in sizes}
        metrics["bonus"] = mean(added, mask)
        return base.with_value(signal, value + added), new_state, metrics


class _Movement(NamedTuple):
    """Rank, velocity and acceleration of samples."""

    value: Array  # [3, P, G]
    measurable: Array  # [3, P, G] bool


def _movement(ranks: Array) -> _Movement:
    """Of the ranks [P, G, T] at some tokens, 0 at the others."""
    is_point, dtype = ranks > 0, ranks.dtype
    number = jnp.cumsum(is_point, -1, dtype=jnp.int32)
    count = number[..., -1]

    def divided(total: Array, divisor: Array) -> Array:
        return total / jnp.maximum(divisor, 1).astype(dtype)

    def at(values: Array, place: Array | int) -> Array:
        return jnp.where(is_point & (number == place), values, 0).sum(-1)

    earlier = divided(jnp.cumsum(ranks, -1) - ranks, number - 1)
    change = jnp.where(is_point & (number > 1), ranks - earlier, 0)
    last = count[..., None]
    velocity = divided(change.sum(-1), count - 1)
    # The differences add up to that of the last and the first.
    acceleration = divided(at(change, last) - at(change, 2), count - 2)
    measurable = jnp.stack([count >= least for least in (1, 2, 3)])
    return _Movement(jnp.stack([at(ranks, last), velocity, acceleration]), measurable)


def _bonus(measured: _Movement, means: Array, gain: float) -> Array:
    """Before scale and limits, [P, G]."""
    means = means.astype(measured.value.dtype)[:, None, None]
    size = jnp.where(means == 0, 1, jnp.abs(means))
    relative = jnp.clip((measured.value - means) / size, -_LARGEST, _LARGEST)
    rank, velocity, acceleration = jnp.where(measured.measurable & (means != 0), relative, 0)
    share = jax.nn.sigmoid(gain * acceleration)
    return share * jnp.tanh(rank) + (1 - share) * jnp.tanh(velocity)


def _mean(values: Array, mask: Array) -> Array:
    """Of all samples of a batch that have one, [], 0 where none has."""
    return jnp.where(mask, values, 0).sum() / jnp.maximum(mask.sum(), 1).astype(values.dtype)
