"""From one value per sample to one per token, and what is done to single tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.stats import clamp, log_ratio
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.scores import SCORERS, answer_field
from jaxgrpo.core.types import GENERATOR, Rollouts, Signal

_BLOCK = 32  # tokens
_PLACES = ("all", "last")
_POLICIES = ("trainer", "behavior")
_GAIN = "add_information_gain"
LOWEST_TOTAL = -1e4
"""Log-probs of whole answers are cut here, in nats."""


def to_tokens(place: str = "all") -> AdvantageTransform:
    """Widens sample-level values to tokens.

        all:   a[p, g, t] = a[p, g] at every token that the policy chose
        last:  a[p, g, t] = a[p, g] at the last of them, 0 at the others, which stay unmasked

    Chains need it only before token-level steps: a signal [P, G] is trained on as under "all".

    Args:
      place: "all" or "last" (where a return is accumulated backwards from).

    Signal: [P, G] -> [P, G, T], mask = that of the sample on its token_mask. A sample without any
    token is masked throughout.  Raises: InputError on values that are already [P, G, T].

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(to_tokens(), [[2.0]], token_mask=[[[True, True, False]]])[0].tolist()
    [[[2.0, 2.0, 0.0]]]
    """
    base.check_choice("to_tokens", _PLACES, place=place)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        wide = at_tokens("to_tokens", signal, rollouts)
        if place == "all":
            return wide, {}
        tokens = base.read("to_tokens", rollouts, "token_mask").astype(bool)
        # The running count from the end is 1 at the last token and where none follows.
        last = jnp.cumsum(tokens[..., ::-1], axis=-1)[..., ::-1] == 1
        return dataclasses.replace(wide, value=jnp.where(last, wide.value, 0)), {}

    return base.stateless("to_tokens", apply, levels=(2,))


def at_tokens(name: str, signal: Signal, rollouts: Rollouts) -> Signal:
    """A signal [P, G] at every token that the policy chose, for the step `name`; wider as it is."""
    if signal.value.ndim == 3:
        return signal
    mask = base.read(name, rollouts, "token_mask").astype(bool) & signal.mask[..., None]
    return Signal(value=jnp.where(mask, signal.value[..., None], 0), mask=mask)


def hicra(
    alpha: Scheduled = 0.2,
    field: str | None = None,
    grams: Sequence[Sequence[int]] | None = None,
    placebo: int | None = None,
    entropies: bool = False,
) -> AdvantageTransform:
    """Raises the advantage of planning tokens by a share of its size.

        a[p, g, t] + alpha |a[p, g, t]|  at planning tokens, a[p, g, t] at the others

    Positive advantages there are scaled by 1 + alpha, negative ones by 1 - alpha: a failed plan is
    blamed less, not more. An advantage of 0 stays 0: flat groups stay without signal.

    Args:
      alpha: in [0, 1), a number or a function of the step; from 1 on failures would be praised.
      field: bool [P, G, T], True on planning tokens; "planning" by default.
      grams: token ids of phrases, in place of a field: tokens of each unbroken occurrence plan.
      placebo: a seed: raises as many tokens of each sample, drawn at random, in their place.
      entropies: measures the entropy of planning tokens and of the others, of the trained policy.

    Signal: [P, G, T] -> [P, G, T], mask unchanged.  Raises: InputError on [P, G]: put to_tokens()
    before it. Reads token_entropy [P, G, T] with entropies.
    Metrics: planning, the share of tokens; with entropies planning_entropy and execution_entropy,
    nats per token; with grams semantic_entropy, -sum f log f over each gram's share f of all.
    Source: HICRA, arXiv 2509.03646, by a note whose prose, not its formula, blames failures more.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"token_mask": [[[True, True]]], "planning": [[[True, False]]]}
    >>> evaluate([to_tokens(), hicra(0.5)], [[-1.0]], **fields)[0].tolist()
    [[[-0.5, -1.0]]]
    """
    expected = "0 <= alpha < 1: from 1 on the planning of failed samples would be reinforced"
    base.check("hicra", expected, lambda alpha: 0 <= alpha < 1, alpha=alpha)
    if field is not None and grams is not None:
        raise InputError("hicra: field and grams both say which tokens plan: give one of them")
    phrases, name = None if grams is None else _phrases(grams), field or "planning"

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        planning, metrics = _planning(signal.mask, name, phrases, rollouts)
        metrics |= _entropies(signal.mask, planning, rollouts) if entropies else {}
        if placebo is not None:
            planning = _shuffled(planning, signal.mask, placebo, rollouts.step)
        value = stats.widen(signal.value)
        share = jnp.asarray(base.at_step(alpha, rollouts, value.dtype), value.dtype)
        factor = jnp.where(planning, jnp.where(value < 0, 1 - share, 1 + share), 1)
        return base.scaled(signal, factor), metrics

    needs = base.needed_fields(None if phrases else name, "token_entropy" if entropies else None)
    return base.stateless("hicra", apply, needs=needs, levels=(3,))


def add_information_gain(
    alpha: Scheduled = 1.0, beta: Scheduled = 0.0, clip: float = 10.0, scorer: str = "trainer"
) -> AdvantageTransform:
    """Adds to the tokens of each part of a thought what it tells of a known answer.

        l[k] = log pi(answer | prompt, first k of K parts of the thought)
        u[k] = clip(l[k] - l[k - 1], -clip, clip) - beta n[k] / T,    n[k] the tokens of part k
        a[p, g, t] + alpha (u[p, g, k(t)] - mean over the group's samples of u[p, ., k(t)])

    Without clip and beta the sum over k is l[K] - l[0], what the whole thought tells: that of the
    stream "r3" of `reasoning_reflection(kind="uniform", masked_thought=True)`, times the answer's
    tokens. A part earns its own gain, not what later parts make of it. Groups whose rewards are all
    equal have a signal too. Parts are equal shares of the thought's tokens, `data.answer_cuts` of
    them; a part without a token is in no mean. Tokens behind the thought get the signal alone. A
    sample with a NaN among its l is left as it is.

    Args:
      alpha: 0 or more, in units of advantage per nat; a number or a function of the step.
      beta: 0 or more, what a part as long as the longest completion T loses, in nats.
      clip: nats, above 0.
      scorer: "trainer", "base" or "reference", as in `reasoning_reflection`.

    Fields: cut_answer_logp [P, G, K + 1], thought_tokens [P, G].
    Signal: [P, G] or [P, G, T] -> [P, G, T], mask that of the samples at their tokens.
    Metrics: gain, the mean of l[K] - l[0]; first, the share of it that the first part has told.
    Source: L2T, arXiv 2505.10425, for gains by parts. Its second term, a bound on what a part has
      changed in the parameters, is replaced by the length; equal parts and the mean are ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"cut_answer_logp": [[[-3.0, -2.0, 0.0], [-3.0, -3.0, -3.0]]]}
    >>> fields |= {"thought_tokens": [[2, 2]], "token_mask": [[[1, 1], [1, 1]]]}
    >>> evaluate(add_information_gain(), [[0.0, 0.0]], **fields)[0].tolist()
    [[[0.5, 1.0], [-0.5, -1.0]]]
    """
    base.check_at_least(_GAIN, 0, alpha=alpha, beta=beta)
    base.check(_GAIN, "a number of nats above 0", lambda nats: nats > 0, clip=clip)
    base.check_choice(_GAIN, SCORERS, scorer=scorer)
    field = answer_field("cut_answer_logp", scorer)
    apply = _Gain(alpha, beta, clip, field).apply
    needs = base.needed_fields(field, "thought_tokens")
    return base.stateless(_GAIN, apply, needs=needs, relative=True)


def kl_in_reward(
    beta: Scheduled, reference: str = "reference", policy: str = "trainer"
) -> AdvantageTransform:
    """Charges each token for its distance from a reference policy, as part of the reward.

        r[p, g, t] - beta (policy_logp[p, g, t] - reference_logp[p, g, t])          (k1)

    Followed by `reward_to_go()` the expected gradient is exactly that of
    E[return] - beta KL(policy || reference). Put it behind the normalisation: divided by the
    standard deviation of a group, beta would be another one in every group. The whole tail:
    `to_tokens(place="last"), kl_in_reward(beta), reward_to_go()`. Behind a baseline that holds the
    sample itself the charge is 1 - 1/n of it, as with `add_kl_return`.

    Args:
      beta: at least 0, in units of advantage per nat; a number or a function of the step.
      reference: whose log-probs are read, from the field `{reference}_logp`.
      policy: "trainer" reads trainer_logp, of the same program as the reference; "behavior" what
        the sampler reported and spares a pass, with the sampler's rounding charged as distance.

    Signal: [P, G, T] -> [P, G, T], mask unchanged.  Raises: InputError on [P, G].
    Metrics: kl, the mean of k1 over unmasked tokens; log_ratio_clamped, the share of tokens whose
    |log ratio| is above 20 and counts as 20.
    Source: the KL-shaped reward of Ziegler et al. 2019, arXiv 1909.08593. verl and OpenRLHF add it
    before the advantage is normalised; we let the chain say where.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"trainer_logp": [[[-1.0, -2.0]]], "reference_logp": [[[-2.0, -2.0]]]}
    >>> steps = [to_tokens(), kl_in_reward(0.5)]
    >>> evaluate(steps, [[1.0]], token_mask=[[[True, True]]], **fields)[0].tolist()
    [[[0.5, 1.0]]]
    """
    base.check("kl_in_reward", "a number of at least 0", lambda beta: beta >= 0, beta=beta)
    base.check_choice("kl_in_reward", _POLICIES, policy=policy)
    needs = base.needed_fields(f"{reference}_logp", "trainer_logp" if policy == "trainer" else None)

    def apply(alone: float | None, signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        distance, clamped = _distance(policy, reference, signal.mask, rollouts)
        value = stats.widen(signal.value)
        charge = jnp.asarray(base.at_step(beta, rollouts, value.dtype), value.dtype)
        if alone is not None:
            charge = charge * base.share_left(signal.mask, value.dtype, alone)[..., None]
        charged = base.with_value(signal, value - charge * distance.astype(value.dtype))
        shares = {"kl": distance, "log_ratio_clamped": clamped}
        return charged, {name: mean(share, signal.mask) for name, share in shares.items()}

    return base.with_shrunk_form(
        lambda alone: base.stateless(
            "kl_in_reward", partial(apply, alone), needs=needs, levels=(3,)
        )
    )


def _distance(policy: str, reference: str, mask: Array, rollouts: Rollouts) -> tuple[Array, Array]:
    """The log ratio of policy and reference [P, G, T], and which of it was clamped."""
    shape = mask.shape, "[P, G, T]"
    if policy == "trainer":
        logp = base.read_field("kl_in_reward", "trainer_logp", rollouts, *shape)
    else:
        logp = base.read("kl_in_reward", rollouts, "behavior_logp")
    anchor = base.read_field("kl_in_reward", f"{reference}_logp", rollouts, *shape)
    return clamp(log_ratio(logp, anchor, mask))


def reward_to_go(gamma: Scheduled = 1.0) -> AdvantageTransform:
    """Sums the rewards of a token and of all behind it.

        a[p, g, t] = sum_(s >= t) gamma^(n(s) - n(t)) r[p, g, s],  n(t) = unmasked tokens before t

    Masked tokens (tool output, forced text) are passed over: they neither pay nor discount.
    With gamma 1 a reward at the last token comes back at every token: `to_tokens(place="last")`
    and this step are together `to_tokens()`.

    Args:
      gamma: in [0, 1], per token; a number or a function of the step.

    Signal: [P, G, T] -> [P, G, T], mask unchanged.  Raises: InputError on [P, G]: put
    to_tokens(place="last") before it.
    Source: the policy gradient theorem; the carry over masked tokens is that of REINFORCE++ in
    verl (older code starts again behind them).

    >>> from jaxgrpo.advantages import evaluate
    >>> steps = [to_tokens("last"), reward_to_go(gamma=0.5)]
    >>> evaluate(steps, [[1.0]], token_mask=[[[True, True, True]]])[0].tolist()
    [[[0.25, 0.5, 1.0]]]
    """
    base.check_share("reward_to_go", gamma=gamma)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)  # 0 where masked
        if not callable(gamma) and gamma == 1:
            return base.with_value(signal, sum_behind(value)), {}
        decay = base.at_step(gamma, rollouts, value.dtype)
        return base.with_value(signal, discounted(value, signal.mask, decay)), {}

    return base.stateless("reward_to_go", apply, levels=(3,))


def gae(
    gamma: Scheduled = 1.0, lam: Scheduled = 1.0, field: str = "token_value"
) -> AdvantageTransform:
    """Generalised advantage estimation: returns less the estimates of a critic.

        d[t] = r[t] + gamma v[next(t)] - v[t],  v = 0 behind the last token
        a[t] = d[t] + gamma lam a[next(t)]

    next(t) is the next unmasked token: masked ones are passed over and their estimate is not
    read. lam 1 is `reward_to_go(gamma)` less v[t]; lam 0 the one-step error.

    Args:
      gamma, lam: in [0, 1]; numbers or functions of the step.
      field: [P, G, T], the expected return before the token is chosen, in units of the rewards.
        There is no critic in training: rollouts of your own bring it.

    Signal: [P, G, T] -> [P, G, T], mask unchanged.  Raises: InputError on [P, G]: put
    to_tokens(place="last") before it.
    Source: Schulman et al. 2015, arXiv 1506.02438. verl whitens the result; a further step here.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"token_mask": [[[True, True]]], "token_value": [[[0.5, 0.75]]]}
    >>> evaluate([to_tokens("last"), gae()], [[1.0]], **fields)[0].tolist()
    [[[0.5, 0.25]]]
    """
    base.check_share("gae", gamma=gamma, lam=lam)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        mask, reward = signal.mask, stats.widen(signal.value)  # 0 where masked
        estimate = base.read_field("gae", field, rollouts, mask.shape, "[P, G, T]")
        estimate = jnp.where(mask, estimate.astype(reward.dtype), 0)
        if not callable(gamma) and not callable(lam) and gamma == lam == 1:
            return base.with_value(signal, sum_behind(reward) - estimate), {}
        shares = (base.at_step(share, rollouts, reward.dtype) for share in (gamma, lam))
        discount, trust = (jnp.asarray(share, reward.dtype) for share in shares)
        # What the token before sees: h[t] = (1 - lam) v[t] + lam (r[t] + gamma h[next(t)]).
        lambda_return = (1 - trust) * estimate + trust * reward
        lambda_return = discounted(lambda_return, mask, discount * trust)
        ahead = jnp.pad(lambda_return[..., 1:], ((0, 0), (0, 0), (0, 1)))
        return base.with_value(signal, reward + discount * ahead - estimate), {}

    return base.stateless("gae", apply, needs=frozenset({field}), levels=(3,))


def sum_behind(value: Array) -> Array:
    """The sum from each token to the end, [..., T], of finite values: others spoil the sample.

    In blocks: a product with a triangle of ones within, and what is behind the block is added; on
    CPUs 3 times as fast as a cumulative sum. Exact where no more than one entry is not 0.
    """
    value = jax.lax.optimization_barrier(value)  # what made it is slower inside the product
    number = value.shape[-1]
    missing = -number % _BLOCK
    padded = jnp.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, missing)]) if missing else value
    triangle = jnp.tril(jnp.ones((_BLOCK, _BLOCK), value.dtype))
    inner = jnp.matmul(
        padded.reshape(-1, _BLOCK), triangle, precision=jax.lax.Precision.HIGHEST
    ).reshape(*value.shape[:-1], -1, _BLOCK)
    if number <= _BLOCK:
        return inner.reshape(padded.shape)[..., :number]
    block_sums = inner[..., 0]
    later = jnp.pad(block_sums[..., 1:], [(0, 0)] * (value.ndim - 1) + [(0, 1)])
    total = inner + sum_behind(later)[..., None]
    return total.reshape(padded.shape)[..., :number]


def discounted(value: Array, mask: Array, decay: Any) -> Array:
    """a[t] = value[t] + decay * a[t + 1], where masked a[t + 1]; value must be 0 where masked."""
    carry = jnp.where(mask, jnp.asarray(decay, value.dtype), 1)

    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        # The scan runs from the end: `later` tokens come first.
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    return jax.lax.associative_scan(join, (value, carry), reverse=True, axis=value.ndim - 1)[0]


class _Gain(NamedTuple):
    """The options of `add_information_gain`, and what it does."""

    alpha: Scheduled
    beta: Scheduled
    clip: float
    field: str

    def apply(self, signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        signal = at_tokens(_GAIN, signal, rollouts)
        alive = signal.mask.any(-1)
        logp = stats.widen(base.read_field(_GAIN, self.field, rollouts))
        thought = base.read_field(_GAIN, "thought_tokens", rollouts, alive.shape, "[P, G]")
        thought = thought.astype(jnp.int32)
        gains = _gains(logp, thought, alive, self.clip)
        length, dtype = signal.value.shape[-1], logp.dtype
        cost = base.at_step(self.beta, rollouts, dtype) * gains.tokens.astype(dtype) / length
        worth = jnp.where(gains.mask, gains.value - cost, 0)
        group = stats.summary(worth, gains.mask)
        # Exactly 0 where all are equal, whose mean is rounded.
        centred = jnp.where(gains.mask & ~group.flat, group.centred(worth), 0)
        added = jnp.take_along_axis(centred, _part_indices(gains.tokens, length), axis=-1)
        within = jnp.arange(length, dtype=thought.dtype)[None, None] < thought[..., None]
        weight = base.at_step(self.alpha, rollouts, dtype)
        added = jnp.where(signal.mask & within, weight * added, 0)
        value = stats.widen(signal.value)
        return base.with_value(signal, value + added.astype(value.dtype)), _gain_metrics(gains)


class _Gains(NamedTuple):
    """What each of K parts of a thought tells, [P, G, K]."""

    value: Array  # clipped, in nats
    tokens: Array  # of each part
    mask: Array  # bool: the part has a token, and its sample is scored
    total: Array  # [P, G], of the whole thought, not clipped


def _gains(logp: Array, thought: Array, alive: Array, clip: float) -> _Gains:
    """Args: logp: [P, G, K + 1]."""
    if logp.ndim != 3 or logp.shape[:2] != alive.shape or logp.shape[2] < 2:
        raise InputError(
            f"{_GAIN}: cut_answer_logp has shape {logp.shape}, expected [P, G, K + 1] with [P, G] ="
            f" {alive.shape}: the answer's log-prob behind 0, 1, ..., K parts of each thought"
        )
    cuts = logp.shape[2] - 1
    ends = part_ends(thought, cuts)
    tokens = ends[..., 1:] - ends[..., :-1]
    scored = alive & ~jnp.isnan(logp).any(-1)
    finite = jnp.maximum(jnp.where(scored[..., None], logp, 0), LOWEST_TOTAL)
    change = finite[..., 1:] - finite[..., :-1]
    mask = scored[..., None] & (tokens > 0)
    value = jnp.where(mask, jnp.clip(change, -clip, clip), 0)
    return _Gains(value, tokens, mask, jnp.where(mask, change, 0).sum(-1))


def part_ends(thought: Array, cuts: int) -> Array:
    """The tokens of the first 0, 1, ..., K parts of thoughts [P, G], [P, G, K + 1]: equal parts,
    where that leaves a rest the earlier ones are longer."""
    return jnp.stack([-(-thought * k // cuts) for k in range(cuts + 1)], axis=-1)


def _part_indices(tokens: Array, length: int) -> Array:
    """The part that each of `length` tokens is in, [P, G, T]; the last one behind the thought."""
    ends = jnp.cumsum(tokens, -1, dtype=jnp.int32)
    behind = jnp.arange(length, dtype=jnp.int32)[None, None, :, None] >= ends[..., None, :]
    return jnp.minimum(behind.sum(-1, dtype=jnp.int32), tokens.shape[-1] - 1)


def _gain_metrics(gains: _Gains) -> Metrics:
    has_thought = gains.mask.any(-1)
    first = jnp.where(gains.mask[..., 0], gains.value[..., 0], 0)
    share = first / jnp.where(gains.total == 0, 1, gains.total)
    has_gain = has_thought & (gains.total != 0)
    return {"gain": mean(gains.total, has_thought), "first": mean(share, has_gain)}


def _phrases(grams: Sequence[Any]) -> dict[int, list[tuple[int, ...]]]:
    """The grams by their length; refuses what is not a list of non-empty lists of token ids."""
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for index, gram in enumerate(grams):
        ids = tuple(gram) if isinstance(gram, Sequence) and not isinstance(gram, str) else ()
        if not ids or not all(isinstance(token, int) and token >= 0 for token in ids):
            raise InputError(
                f"hicra: grams[{index}] = {gram!r}, expected a list of token ids, at least one:"
                " encode the phrase with the model's tokenizer"
            )
        by_length.setdefault(len(ids), []).append(ids)
    if not by_length:
        raise InputError("hicra: grams is empty: no token would be a planning token")
    return by_length


def _planning(
    mask: Array, field: str, phrases: dict[int, list[tuple[int, ...]]] | None, rollouts: Rollouts
) -> tuple[Array, Metrics]:
    """Planning tokens [P, G, T], by a field or by phrases, and metrics of both."""
    if phrases is None:
        planning = base.read_field("hicra", field, rollouts, mask.shape, "[P, G, T]").astype(bool)
        return planning, {"planning": mean(planning, mask)}
    token_mask = base.read("hicra", rollouts, "token_mask").astype(bool)
    tokens = base.read("hicra", rollouts, "completion_tokens")
    live = token_mask & mask.any(-1, keepdims=True)
    planning, counts = _occurs(jnp.where(live, tokens, -1), phrases)
    return planning, {
        "semantic_entropy": mean(_entropy(counts)),
        "planning": mean(planning, mask),
    }


def _entropies(mask: Array, planning: Array, rollouts: Rollouts) -> Metrics:
    """Of planning tokens and of the others."""
    entropy = base.read_field("hicra", "token_entropy", rollouts, mask.shape, "[P, G, T]")
    return {
        "planning_entropy": mean(entropy, mask & planning),
        "execution_entropy": mean(entropy, mask & ~planning),
    }


def _shuffled(planning: Array, mask: Array, seed: int, step: Array) -> Array:
    """As many unmasked tokens of each sample [..., T], drawn at random in each step."""
    key = jax.random.fold_in(jax.random.key(seed, impl=GENERATOR), step)
    order = jnp.where(mask, jax.random.uniform(key, mask.shape), jnp.inf)
    rank = jnp.argsort(jnp.argsort(order, axis=-1), axis=-1)
    return mask & (rank < (planning & mask).sum(-1, keepdims=True))


def _entropy(counts: Array) -> Array:
    """-sum f log f in nats of the shares f of counts [n]; 0 without any."""
    number = counts.astype(jnp.float32)
    share = number / jnp.maximum(number.sum(), 1)
    return -jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0).sum()


def _occurs(tokens: Array, phrases: dict[int, list[tuple[int, ...]]]) -> tuple[Array, Array]:
    """(True at every token of an occurrence, the occurrences of each phrase).

    Shape: tokens [P, G, T], -1 where not to be matched.
    """
    number, counts = tokens.shape[-1], []
    in_phrase = jnp.zeros(tokens.shape, bool)
    for length, grams in phrases.items():
        if length > number:
            counts += [jnp.int32(0) for _ in grams]
            continue
        starts = number - length + 1
        begins = jnp.zeros((*tokens.shape[:-1], starts), bool)
        for gram in grams:
            hit = tokens[..., :starts] == gram[0]
            for place in range(1, length):
                hit = hit & (tokens[..., place : place + starts] == gram[place])
            counts.append(hit.sum(dtype=jnp.int32))
            begins = begins | hit
        for place in range(length):
            in_phrase = in_phrase | jnp.pad(begins, ((0, 0), (0, 0), (place, length - 1 - place)))
    return in_phrase, jnp.stack(counts)
