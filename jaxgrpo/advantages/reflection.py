"""Rewards from how certain a known answer becomes after a sample's thought (R3), per token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, Streams
from jaxgrpo.advantages.streams import add_stream, any_mask, stream
from jaxgrpo.core.errors import InputError, find
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.ranking import top_share
from jaxgrpo.core.scores import REACHED, SCORERS, answer_field
from jaxgrpo.core.types import Rollouts, Signal

LOWEST_LOGP = -30.0
"""Answer log-probs are cut here, in nats: one of -inf would own all variance."""

_WEIGHTS: dict[str, Callable[[Array, Array, Any], Array]] = {
    "var": lambda variance, tokens, share: variance,
    "sigma": lambda variance, tokens, share: jnp.sqrt(variance),
    "top": lambda variance, tokens, share: (
        top_share(variance, tokens, share) & (variance > 0)
    ).astype(variance.dtype),
    "uniform": lambda variance, tokens, share: tokens.astype(variance.dtype),
}
"""Kind -> (variance [P, J], answer tokens [P, J], share) -> weights before they are normalised."""
_SPREADS: dict[str, Callable[[Array, Array], Array]] = {
    "weighted": lambda variance, weights: (weights * variance).sum(-1),
    "max": lambda variance, weights: jnp.sqrt(variance.max(-1, initial=0)),
}
"""Kind -> (variance, weights [P, J]) -> how much a prompt varies, [P]."""
_NAME = "reasoning_reflection"


def reasoning_reflection(
    kind: str = "var",
    drop: Scheduled = 0.2,
    threshold: Scheduled = 0.0,
    spread: str = "weighted",
    share: Scheduled = 0.1,
    masked_thought: bool = False,
    propagation: float | None = None,
    scorer: str = "trainer",
) -> AdvantageTransform:
    """R3: adds the stream "r3", the weighted log-prob of a known answer after each thought.

        v[p, j]  = variance over the samples of l[p, g, j]       (stats.cross_rollout_variance)
        w[p, j]  = v, sqrt(v), 1 or [j is in the top share], divided by its sum over j
        r3[p, g] = sum_j w[p, j] (l[p, g, j] - b[p, j] + c[p, g, j])

    Tokens that every thought makes equally likely say nothing about thoughts: variance weighs them
    0. The same variance is the filter of queries: a prompt is masked in the stream, so in the sum
    too, unless its spread is above `threshold` and not in the lowest `drop` of the batch. So
    prompts without an answer token, with fewer than two samples or with equal samples go. Where
    nothing varies the weights are uniform. l is cut at -30 nats. A sample takes part while a
    stream still has it; one with a NaN in its answer is not scored, nor is any of a prompt with a
    NaN in its masked_answer_logp.

    Args:
      kind: "var", "sigma", "top" or "uniform".
      drop: share of the batch's prompts that go, lowest spread first, rounded down; equals stay.
      threshold: of the spread, in nats^2 (weighted) or nats (max); what is not above it goes.
      spread: "weighted", sum_j w v, or "max", the largest sqrt(v).
      share: of a prompt's answer tokens that "top" takes, rounded up; never those with v = 0.
      masked_thought: b = masked_answer_logp, the answer's log-probs without a thought; else 0.
      propagation: gamma, per token, of c[j] = the sum over earlier k that weigh more than uniform
        of log P_k(j) (`log_propagation`): what the answer's own beginning gave away is not the
        thought's merit. None: c = 0. Costs J times the rest.
      scorer: "trainer"; "base", which is frozen (its fields are base_answer_logp, ...); or
        "reference", the base until `reference.reset_every` makes it a lagged copy.

    Fields: answer_logp [P, G, J], the answer forced after each sample's thought; answer_mask and
    masked_answer_logp [P, J]. In training a pass scores `data.answer` behind `data.answer_prefix`.
    Streams: [P, G] each -> and "r3".  Raises: InputError on unknown options and other shapes.
    Metrics: dropped, share of prompts that the filter took; spread, its mean over prompts.
    Source: DRO, arXiv 2506.13351, without the form of weights; "var" and what drops are ours.

    >>> from jaxgrpo.advantages import evaluate, sum_rewards
    >>> fields = {"answer_logp": [[[-1.0], [-3.0]]], "answer_mask": [[True]]}
    >>> evaluate([reasoning_reflection(), sum_rewards()], [[0.0, 0.0]], **fields)[0].tolist()
    [[-1.0, -3.0]]
    """
    options = _Options(kind, drop, threshold, spread, share, masked_thought, propagation, scorer)
    return _transform(options)


def answer_length(beta: Scheduled = 1.0, field: str = "answer_tokens") -> AdvantageTransform:
    """Adds the stream "answer_length": 1 where a sample's own answer is as long as the known one.

        r[p, g] = 1 - beta |J[p] - n[p, g]| / J[p],    J = the tokens in answer_mask

    It judges the answer, not the thought; its weight in the sum is DRO's lambda. Prompts without an
    answer token are masked.

    Args:
      beta: what an answer of length 0 or 2J loses; a number or a function of the step.
      field: name of the field n [P, G], tokens of the sample's own answer.

    Streams: [P, G] each -> and "answer_length".  Raises: InputError where the name is taken.
    Source: DRO, arXiv 2506.13351.

    >>> from jaxgrpo.advantages import evaluate, sum_rewards
    >>> fields = {"answer_tokens": [[2.0, 3.0]], "answer_mask": [[True, True]]}
    >>> evaluate([answer_length(), sum_rewards()], [[1.0, 0.0]], **fields)[0].tolist()
    [[2.0, 0.5]]
    """

    def closeness(rollouts: Rollouts) -> Array:
        name, reward = "answer_length", base.floating(next(iter(rollouts.rewards.values())))
        tokens = base.read_field(name, "answer_mask", rollouts, (len(reward), None), "[P, J]")
        wide = reward.dtype
        target_length = tokens.astype(bool).sum(-1, keepdims=True).astype(wide)
        length = base.read_field(name, field, rollouts, reward.shape, "[P, G]").astype(wide)
        missed = jnp.abs(target_length - length) / jnp.maximum(target_length, 1)
        value = 1 - base.at_step(beta, rollouts, wide) * missed
        return jnp.where(target_length > 0, value, jnp.nan)

    step = stream("answer_length", closeness, needs=("answer_mask", field))
    return step._replace(name="answer_length")


def answer_probability(
    over: str = "mean",
    masked_thought: bool = False,
    scorer: str = "trainer",
    must_reach: bool = False,
) -> AdvantageTransform:
    """Adds the stream "answer_probability": how probable a known answer is after each thought.

        mean:     r[p, g] = mean_j exp(l[p, g, j])       over the answer's tokens
        product:  r[p, g] = exp(sum_j l[p, g, j])        what a verifier of it pays on average
        masked_thought:  clip(r[p, g] - r[p] without a thought, 0, 1)
        must_reach:      0 where the sample never came to an answer of its own

    Args:
      over: "mean" or "product".
      masked_thought: whether what the answer has without a thought is taken off.
      scorer: "trainer", "base" or "reference", as in `reasoning_reflection`.
      must_reach: whether samples without an answer of their own, and those cut, have 0.

    Fields: answer_logp [P, G, J], answer_mask [P, J]; where masked masked_answer_logp [P, J]; with
      must_reach answer_reached [P, G].  Streams: [P, G] each -> and "answer_probability".
    Metrics: without_thought, what was taken off, over prompts; with masked_thought alone.
    Source: mean, RLPR, arXiv 2506.18254; product with must_reach, VeriFree, arXiv 2505.21493.

    >>> from jaxgrpo.advantages import evaluate, sum_rewards
    >>> fields = {"answer_logp": [[[0.0, -30.0], [0.0, 0.0]]], "answer_mask": [[True, True]]}
    >>> evaluate([answer_probability(), sum_rewards()], [[0.0, 0.0]], **fields)[0].tolist()
    [[0.5, 1.0]]
    """
    name, field = "answer_probability", answer_field("answer_logp", scorer)
    base.check_choice(name, ("mean", "product"), over=over)
    base.check_choice(name, SCORERS, scorer=scorer)
    masked = answer_field("masked_answer_logp", scorer) if masked_thought else None

    def make(streams: Streams, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        logp, without, tokens, scored = _read(streams, rollouts, field, masked, name)
        scored = scored & tokens.any(-1, keepdims=True)
        value = _probability(over, logp, tokens[:, None])
        metrics: Metrics = {}
        if masked is not None:
            prior = _probability(over, without, tokens)[:, None]
            value = jnp.clip(value - prior, 0, 1)
            metrics = {"without_thought": mean(prior, scored.any(-1, keepdims=True))}
        if must_reach:
            value = jnp.where(_reached(name, rollouts, value.shape), value, 0)
        return Signal(value=value.astype(_dtype(streams)), mask=scored), metrics

    reached = REACHED if must_reach else None
    return add_stream(name, name, make, base.needed_fields("answer_mask", field, masked, reached))


def _probability(over: str, logp: Array, tokens: Array) -> Array:
    """Of an answer with these tokens, over their last axis."""
    tokens = jnp.broadcast_to(tokens, logp.shape)
    if over == "product":
        return jnp.exp(jnp.where(tokens, logp, 0).sum(-1))
    return stats.mean(jnp.exp(logp), tokens, axis=-1)[..., 0]


def perplexity_rank(efficiency: Scheduled = 0.0, scorer: str = "trainer") -> AdvantageTransform:
    """Adds the stream "perplexity_rank": a sample's place in its group by a known answer's
    perplexity after its thought.

        q[p, g] = exp(-mean_j l[p, g, j] / max(1, 1 + log10 n[p, g])),   n the thought's tokens
        r[p, g] = 1 - (samples with a lower q) / N + efficiency e[p, g]
        e[p, g] = (others with a higher q and a longer thought) / (N - 1)

    The best of N samples has 1, the worst 1 / N; equal ones share the mean of their places. Places
    do not depend on how likely the answer is at all, which perplexities of long answers do. Samples
    that never came to an answer of their own, or were cut, have 0 and no place: none of the N.

    Args:
      efficiency: weight of e, which pays short thoughts that help; a number or schedule.
      scorer: "trainer", "base" or "reference", as in `reasoning_reflection`.

    Fields: answer_logp [P, G, J], answer_mask [P, J], thought_tokens and answer_reached [P, G].
    Streams: [P, G] each -> and "perplexity_rank".
    Metrics: perplexity, the mean of exp(-mean_j l) over samples with a place.
    Source: NOVER, arXiv 2505.16022, as in its code, where all that lack its format have 0; its
    scorer follows the policy (`scorer = "reference"` with `reference.reset_every`).

    >>> from jaxgrpo.advantages import evaluate, sum_rewards
    >>> fields = {"answer_logp": [[[-1.0], [-3.0]]], "answer_mask": [[True]]}
    >>> fields |= {"thought_tokens": [[1, 1]], "answer_reached": [[True, True]]}
    >>> evaluate([perplexity_rank(), sum_rewards()], [[0.0, 0.0]], **fields)[0].tolist()
    [[1.0, 0.5]]
    """
    name, field = "perplexity_rank", answer_field("answer_logp", scorer)
    base.check_choice(name, SCORERS, scorer=scorer)
    base.check_at_least(name, 0, efficiency=efficiency)

    def make(streams: Streams, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        logp, _, tokens, scored = _read(streams, rollouts, field, None, name)
        scored = scored & tokens.any(-1, keepdims=True)
        cost = -stats.mean(logp, jnp.broadcast_to(tokens[:, None], logp.shape), axis=-1)[..., 0]
        placed = scored & _reached(name, rollouts, scored.shape)
        length = base.read_field(name, "thought_tokens", rollouts, scored.shape, "[P, G]")
        length = jnp.where(placed, length, 0).astype(cost.dtype)
        score = cost / jnp.maximum(1 + jnp.log10(jnp.maximum(length, 1)), 1)
        place, helps = _places(score, length, placed)
        value = 1 - place + base.at_step(efficiency, rollouts, cost.dtype) * helps
        value = jnp.where(placed, value, 0).astype(_dtype(streams))
        return Signal(value=value, mask=scored), {"perplexity": mean(jnp.exp(cost), placed)}

    needs = base.needed_fields("answer_mask", "thought_tokens", field, REACHED)
    return add_stream(name, name, make, needs)


def _places(score: Array, length: Array, placed: Array) -> tuple[Array, Array]:
    """Of each sample [P, G] the share of its group that has a lower score, with half of the equal
    ones, and the share of the others that have a higher one and a longer thought."""
    pairs = placed[:, :, None] & placed[:, None, :]
    row, column = score[:, :, None], score[:, None, :]

    def count(flags: Array) -> Array:
        return (pairs & flags).sum(-1).astype(score.dtype)

    number = stats.count(placed).astype(score.dtype)
    place = count(column < row) + (count(column == row) - 1) / 2
    helps = count((column > row) & (length[:, None, :] > length[:, :, None]))
    return place / jnp.maximum(number, 1), helps / jnp.maximum(number - 1, 1)


def log_propagation(logp: Array, distance: Array, gamma: float) -> Array:
    """log P_k(j): how likely answer token j is for what token k before it gave away.

        P_k(j) = p_k + (1 - p_k)(1 - exp(-gamma d)),   p_k = exp(logp),   d = distance = j - k > 0

    In logs: logaddexp(logp - gamma d, log(1 - exp(-gamma d))), which loses no digits at either end.
    Goes to log p_k as gamma d -> 0 and to 0 as it grows.

    Source: DRO, arXiv 2506.13351, its second problem.
    """
    decay = gamma * distance
    decayed = jnp.minimum(logp, 0) - decay
    return jnp.minimum(jnp.logaddexp(decayed, jnp.log(-jnp.expm1(-decay))), 0)


class _Options(NamedTuple):
    """The arguments of `reasoning_reflection`."""

    kind: str
    drop: Scheduled
    threshold: Scheduled
    spread: str
    share: Scheduled
    masked_thought: bool
    propagation: float | None
    scorer: str

    @property
    def fields(self) -> tuple[str, str | None]:
        """The fields of log-probs after and without a thought."""
        masked = answer_field("masked_answer_logp", self.scorer) if self.masked_thought else None
        return answer_field("answer_logp", self.scorer), masked


def _transform(options: _Options) -> AdvantageTransform:
    find(f"{_NAME} kind", options.kind, _WEIGHTS)
    find(f"{_NAME} spread", options.spread, _SPREADS)
    prompts, tokens = "a share in [0, 1) of the prompts", "a share in (0, 1] of the tokens"
    base.check(_NAME, prompts, lambda drop: 0 <= drop < 1, drop=options.drop)
    base.check(_NAME, tokens, lambda share: 0 < share <= 1, share=options.share)
    rate = "a rate above 0, or none at all"
    base.check(_NAME, rate, lambda gamma: gamma > 0, propagation=options.propagation)
    base.check_choice(_NAME, SCORERS, scorer=options.scorer)
    needs = base.needed_fields("answer_mask", *options.fields)
    step = add_stream(_NAME, "r3", partial(_r3, options), needs)
    compares = callable(options.drop) or options.drop > 0
    return step._replace(relative=True, compares_groups=compares)


def _r3(options: _Options, streams: Streams, rollouts: Rollouts) -> tuple[Signal, Metrics]:
    logp, baseline, tokens, scored = _read(streams, rollouts, *options.fields)
    scored_tokens = scored[..., None] & tokens[:, None]
    reference_sample = logp[jnp.arange(len(logp)), jnp.argmax(scored, axis=1)][:, None]
    variance = stats.cross_rollout_variance(logp, scored_tokens, reference_sample)[:, 0]
    share = base.at_step(options.share, rollouts, logp.dtype)
    weights = _normalise(_WEIGHTS[options.kind](variance, tokens, share), tokens)
    certainty = logp - baseline[:, None]
    if options.propagation is not None:
        certainty = certainty + _propagated(logp, _heavy(weights, tokens), options.propagation)
    value = jnp.where(scored_tokens, weights[:, None] * certainty, 0).sum(-1)
    live_prompts, spread = scored.any(1), _SPREADS[options.spread](variance, weights)
    passes = spread > base.at_step(options.threshold, rollouts, spread.dtype)
    if callable(options.drop) or options.drop > 0:
        drop = base.at_step(options.drop, rollouts, spread.dtype)
        passes = passes & top_share(spread, live_prompts, 1 - drop, axis=0)
    r3_signal = Signal(value=value.astype(_dtype(streams)), mask=scored & passes[:, None])
    return r3_signal, {"dropped": mean(~passes, live_prompts), "spread": mean(spread, live_prompts)}


def _dtype(streams: Streams) -> Any:
    """Of the streams, and so of one that is added."""
    return next(iter(streams.values())).value.dtype


class _Answers(NamedTuple):
    logp: Array  # [P, G, J], cut below; any number where not scored or no token
    baseline: Array  # [P, J], 0 without one
    tokens: Array  # [P, J] bool
    scored: Array  # [P, G] bool


def _read(
    streams: Streams, rollouts: Rollouts, field: str, masked: str | None, name: str = _NAME
) -> _Answers:
    """The answer's log-probs, checked and made finite."""
    live_samples = any_mask(streams)
    logp = stats.widen(base.read_field(name, field, rollouts))
    if logp.ndim != 3 or logp.shape[:2] != live_samples.shape:
        raise InputError(
            f"{name}: {field} has shape {logp.shape}, expected [P, G, J] with [P, G] ="
            f" {live_samples.shape}: log-probs of the answer's tokens after each sample's thought"
        )
    expected = (logp.shape[0], logp.shape[2])
    tokens = base.read_field(name, "answer_mask", rollouts, expected, "[P, J]").astype(bool)
    baseline = jnp.zeros(expected, logp.dtype)
    if masked is not None:
        baseline = base.read_field(name, masked, rollouts, expected, "[P, J]")
        baseline = baseline.astype(logp.dtype)
    has_logp, has_baseline = logp < jnp.inf, baseline < jnp.inf  # NaN is not
    scored = live_samples & ((has_logp & has_baseline[:, None]) | ~tokens[:, None]).all(-1)
    baseline = jnp.maximum(jnp.where(has_baseline & tokens, baseline, 0), LOWEST_LOGP)
    logp = jnp.maximum(jnp.where(has_logp & tokens[:, None], logp, 0), LOWEST_LOGP)
    return _Answers(logp, baseline, tokens, scored)


def _reached(name: str, rollouts: Rollouts, shape: tuple[int, ...]) -> Array:
    """Which samples came to an answer of their own, [P, G]."""
    return base.read_field(name, REACHED, rollouts, shape, "[P, G]").astype(bool)


def _normalise(weights: Array, tokens: Array) -> Array:
    """Weights that sum to 1 over the answer's tokens; uniform where all are 0."""
    total = weights.sum(-1, keepdims=True)
    even = tokens.astype(weights.dtype)
    number = jnp.maximum(even.sum(-1, keepdims=True), 1)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), even / number)


def _heavy(weights: Array, tokens: Array) -> Array:
    """The reflective tokens: those that weigh more than they would under uniform weights."""
    return tokens & (weights > _normalise(jnp.zeros_like(weights), tokens))


def _propagated(logp: Array, heavy: Array, gamma: float) -> Array:
    """sum over heavy k < j of log P_k(j), one k at a time: no [J, J] array per sample."""
    position = jnp.arange(logp.shape[-1])[None, None]

    def add(k: Array, total: Array) -> Array:
        distance = position - k
        logp_k = lax.dynamic_index_in_dim(logp, k, -1)
        counts = lax.dynamic_index_in_dim(heavy, k, -1)[:, None] & (distance > 0)
        factor = log_propagation(logp_k, jnp.maximum(distance, 1).astype(logp.dtype), gamma)
        return total + jnp.where(counts, factor, 0)

    return lax.fori_loop(0, logp.shape[-1], add, jnp.zeros_like(logp))
