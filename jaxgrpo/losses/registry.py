"""Surrogates, reductions and penalties by name, as a config writes them or as TRL calls them."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.errors import InputError, as_names, build
from jaxgrpo.core.metrics import Metrics, as_metrics, mean, merge
from jaxgrpo.losses import bounds, covariance, labels
from jaxgrpo.losses import penalties as terms
from jaxgrpo.losses import reductions as weights
from jaxgrpo.losses import sequences as per_sequence
from jaxgrpo.losses import surrogates as per_token
from jaxgrpo.losses.penalties import Penalty
from jaxgrpo.losses.reductions import Reduction
from jaxgrpo.losses.surrogates import BatchField, Surrogate, Tokens

Spec = str | Mapping[str, Any] | Callable[..., Any]
"""A name, or {"use": name or an own factory, option: value, ...}. For surrogates and penalties also
an own function of tokens, which is the computation itself."""

LossPart = TypeVar("LossPart", Surrogate, Reduction, Penalty)


def _by_name(*factories: Callable[..., LossPart]) -> dict[str, Callable[..., LossPart]]:
    return {factory.__name__: factory for factory in factories}


surrogates: dict[str, Callable[..., Surrogate]] = _by_name(
    *(per_token.clip, per_token.dual_clip, per_sequence.gspo, per_sequence.gspo_token),
    *(per_token.cispo, per_token.sapo, per_sequence.gmpo, per_sequence.vespo, per_token.dppo_tv),
    *(per_sequence.gvpo, per_token.reinforce, per_token.on_policy, per_token.shaped_ratio),
    *(bounds.ce_gppo, bounds.dynamic_clip, per_sequence.topr, per_sequence.mirror_descent),
    *(covariance.clip_cov, covariance.kl_cov, labels.rewards_as_labels),
)
reductions: dict[str, Callable[..., Reduction]] = _by_name(
    *(weights.token_mean, weights.sequence_mean, weights.sequence_sum),
    *(weights.constant, weights.prompt_mean),
)
penalties: dict[str, Callable[..., Penalty]] = _by_name(
    *(terms.k2, terms.forward_kl_k3, terms.reverse_kl_off_policy, terms.full_kl),
    terms.top_k_divergence,
)
"""Uses of the KL divergence to the reference that act in the loss."""

entropies: dict[str, Callable[..., Penalty]] = {
    "bonus": terms.entropy_bonus,
    "adaptive": terms.adaptive_entropy,
}

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
"""TRL's, of `like_trl`."""


def build_surrogate(spec: Spec | Surrogate, options: Mapping[str, Any] | None = None) -> Surrogate:
    """The surrogate that a spec names. Raises: InputError with the nearest name or option."""
    return _build("surrogate", Surrogate, surrogates, spec, options)


def build_reduction(spec: Spec | Reduction, options: Mapping[str, Any] | None = None) -> Reduction:
    """The reduction that a spec names. Raises: InputError with the nearest name or option."""
    return _build("reduction", Reduction, reductions, spec, options)


def build_penalty(spec: Spec | Penalty, options: Mapping[str, Any] | None = None) -> Penalty:
    """The penalty that a spec names. Raises: InputError with the nearest name or option."""
    return _build("penalty", Penalty, penalties, spec, options)


def build_entropy(spec: Spec | Penalty, options: Mapping[str, Any] | None = None) -> Penalty:
    """The entropy term that a spec names. Raises: InputError with the nearest name or option."""
    return _build("entropy", Penalty, entropies, spec, options)


def by_sample(
    field: str, then: Spec | Surrogate = "shaped_ratio", otherwise: Spec | Surrogate = "clip"
) -> Surrogate:
    """One surrogate where a field is true, another elsewhere: replayed and fresh samples.

        loss = then's where field != 0, otherwise's where field == 0

    Each sees its own tokens alone, in what an update computes of its whole batch too: `gvpo` the
    ratios of its own samples. A field that changes within a sequence splits it in two. One that is
    NaN, as of an unscored sample, is not true.

    Args:
      field: name of the field, one number per token or sample.
      then, otherwise: as `build_surrogate` takes them.

    Metrics: both's, over all tokens together.  Raises: InputError if fields lack the field.
    Source: ExGRPO, arXiv 2510.02245, whose groups mix replayed and fresh samples.

    >>> tokens = Tokens.from_ratios([1.5, 1.5], replayed=jnp.array([1, 0]))
    >>> mixed = by_sample("replayed", {"use": "shaped_ratio", "offset": 0.5}, "reinforce")
    >>> loss, _ = mixed.compute(tokens)
    >>> print(loss.round(2))  # -1.5 / (1.5 + 0.5); -log 1.5
    [-0.75 -0.41]
    """
    then_surrogate, otherwise_surrogate = build_surrogate(then), build_surrogate(otherwise)

    def compute(tokens: Tokens) -> tuple[Array, Metrics]:
        first, second = (_select(field, side, tokens) for side in (True, False))
        then_loss, metrics = _measured(then_surrogate, first)
        otherwise_loss, otherwise_metrics = _measured(otherwise_surrogate, second)
        return jnp.where(first.mask, then_loss, otherwise_loss), merge(metrics, otherwise_metrics)

    pair = then_surrogate, otherwise_surrogate
    fields = _restrict(field, True, pair[0]) + _restrict(field, False, pair[1])
    names = [entry.name for entry in fields]
    if len(set(names)) < len(names):
        raise InputError(f"by_sample: both make {names[0]} of the whole update: use one of them")
    return Surrogate(
        "by_sample",
        compute,
        needs=frozenset({field}).union(*(part.needs for part in pair)),
        weighs=any(part.weighs for part in pair),
        per_token=all(part.per_token for part in pair),
        acts_on_all=any(part.acts_on_all for part in pair),
        batch_fields=tuple(fields),
        sides=((field, True, then_surrogate), (field, False, otherwise_surrogate)),
    )


def _measured(part: Surrogate, tokens: Tokens) -> tuple[Array, Metrics]:
    """A part's loss and metrics, of which plain numbers count by the tokens that it has."""
    loss, reported = part.compute(tokens)
    return loss, as_metrics(f"surrogate {part.name}", reported, tokens.mask.sum())


def _select(field: str, side: bool, tokens: Tokens) -> Tokens:
    """The tokens with the others masked than those where the field is true, or false."""
    value = tokens.field(field, "by_sample", "one number per token")
    is_true = (value != 0) & (value == value)  # NaN is not true
    return dataclasses.replace(tokens, mask=tokens.mask & (is_true == side))


def _restrict(field: str, side: bool, part: Surrogate) -> list[BatchField]:
    """What an update makes for one side, of its tokens alone."""

    def restrict(compute: Callable[..., Array]) -> Callable[..., Array]:
        return lambda tokens, *groups: compute(_select(field, side, tokens), *groups)

    entries = per_sequence.with_group_ratio(part.batch_fields, part.needs)
    return [entry._replace(compute=restrict(entry.compute)) for entry in entries]


def off_policy_mask(
    threshold: float, then: Spec | Surrogate = "clip", sampler: str = "behavior"
) -> Surrogate:
    """A surrogate without the bad samples that the policy has left already.

        loss = 0 where A < 0 and mean_t (behavior_logp - logp) > threshold, then's elsewhere

    The mean is over a sequence and estimates the KL of the policy that drew it to the current one.
    Such samples keep their place in the denominator.

    Args:
      threshold: in nats per token, above 0.
      then: the surrogate of the others, as `build_surrogate` takes it.
      sampler: "behavior", whose log-probs the sampler reported, or "proximal".

    Metrics: then's; off_policy/masked, the share of tokens.
    Raises: InputError unless threshold is positive, on another sampler.
    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1 (off-policy sequence masking); its
    threshold is not published.

    >>> tokens = Tokens.from_ratios([[0.5, 0.5], [0.5, 0.5]], [[1], [-1]])
    >>> print(off_policy_mask(0.5, sampler="proximal").compute(tokens)[0])  # log 2 > 0.5
    [[-0.5 -0.5]
     [ 0.   0. ]]
    """
    if not 0 < threshold < math.inf:
        raise InputError(f"off_policy_mask: threshold = {threshold}, expected nats above 0")
    if sampler not in ("behavior", "proximal"):
        raise InputError(
            f'off_policy_mask: sampler = {sampler!r}, expected "behavior" or "proximal"'
        )
    part, needs = build_surrogate(then), {"behavior_logp"} if sampler == "behavior" else set()

    def compute(tokens: Tokens) -> tuple[Array, Metrics]:
        about = "the sampler's log-prob of each token"
        drawn = tokens.proximal_logp
        if sampler == "behavior":
            drawn = tokens.field("behavior_logp", "off_policy_mask", about)
        drift = -jax.lax.stop_gradient(tokens.log_ratio_to(drawn))
        drift = per_sequence.segment_mean(drift, tokens.mask, tokens.segment)
        bad = tokens.mask & (tokens.without_gradient(tokens.advantage) < 0)
        left = bad & (drift > threshold)
        loss, metrics = part.compute(tokens)
        return jnp.where(left, 0, loss), {**metrics, "off_policy/masked": mean(left, tokens.mask)}

    return part._replace(
        name="off_policy_mask", compute=compute, needs=part.needs | needs, per_token=False
    )


surrogates |= {"by_sample": by_sample, "off_policy_mask": off_policy_mask}


def like_trl(
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_sampling_level: str = "token",
    max_completion_length: int = 512,
    *,
    delta: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Surrogate, Reduction]:
    """(surrogate, reduction) with the loss and gradient of TRL 1.16.0's GRPOTrainer.

    Arguments and defaults are GRPOConfig's. TRL's loss of one optimizer step is the mean over its
    micro-batches of what each of them gives; this is the loss of the whole step, which is the same
    if loss_type is "dapo", "cispo" or "vespo", or if there is one micro-batch.

    Surprises kept: `epsilon_high` of "cispo" bounds the ratio itself, and without it epsilon does;
    rows without a token in the loss count as sequences.

    Raises: InputError on unknown names; on a level of "sequence" with "cispo" and "sapo", which
    no paper has; on delta if its clip would undo the other (below 1 + epsilon_high).
    Source: TRL 1.16.0, trainer/grpo_trainer.py, _compute_loss.

    >>> surrogate, reduction = like_trl("dr_grpo", max_completion_length=1024)
    >>> surrogate.name, reduction.name
    ('clip', 'constant')
    """
    _check_trl(loss_type, importance_sampling_level, delta)
    high = epsilon if epsilon_high is None else epsilon_high
    if loss_type == "cispo":
        surrogate = per_token.cispo(high=high)
    elif loss_type == "sapo":
        surrogate = per_token.sapo(sapo_temperature_pos, sapo_temperature_neg)
    elif loss_type == "vespo":
        surrogate = per_sequence.vespo(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)
    elif importance_sampling_level == "sequence":
        surrogate = per_sequence.gspo(epsilon, high)
    else:
        surrogate = per_token.clip(epsilon, high, delta)
    return surrogate, _trl_reduction(loss_type, max_completion_length)


def _trl_reduction(loss_type: str, max_completion_length: int) -> Reduction:
    if loss_type in ("grpo", "sapo"):
        return weights.sequence_mean(count_empty=True)
    if loss_type == "dr_grpo":
        return weights.constant(max_completion_length, count_empty=True)
    if loss_type == "luspo":
        return weights.sequence_sum(count_empty=True)
    return weights.token_mean()


def _build(
    role: str,
    kind: type[LossPart],
    table: Mapping[str, Callable[..., LossPart]],
    spec: Any,
    options: Mapping[str, Any] | None,
) -> LossPart:
    spec = {**(spec if isinstance(spec, Mapping) else {"use": spec}), **(options or {})}
    part, part_options = spec.get("use"), {key: spec[key] for key in spec if key != "use"}
    if kind is not Reduction and takes_tokens(part):
        name = getattr(part, "__name__", role)
        if part_options:
            raise InputError(
                f"{role} {name}{inspect.signature(part)} takes no options: make it a factory, "
                f"def {name}({', '.join(part_options)}): return lambda tokens: ..."
            )
        part = kind(name, part)
    elif not isinstance(part, kind):
        part = build(role, spec, table)
    elif part_options:
        raise InputError(f"{role} {part.name} is finished and takes no options: {part_options}")
    computation: Any = part
    if kind is not Reduction and takes_tokens(computation):  # a factory of the computation
        part = kind(getattr(spec["use"], "__name__", role), computation)
    if not isinstance(part, kind):
        name = getattr(spec["use"], "__name__", spec["use"])
        raise InputError(
            f"{role} {name} gave {type(part).__name__}, expected a {kind.__name__} or a function"
            f" that returns one, {kind.__name__}(name, compute)"
        )
    if isinstance(part, (Surrogate, Penalty)):
        needs = as_names(f"{role} {part.name}", part.needs)
        part = part if needs == part.needs else part._replace(needs=needs)
        _check_arguments(role, part)
    return part


def takes_tokens(use: Any) -> bool:
    """Whether it is the computation itself, a function of `tokens`, and not a factory.

    What else it takes must have a default, which it keeps.
    """
    if not callable(use) or isinstance(use, (Surrogate, Penalty)):
        return False
    parameters = inspect.signature(use).parameters.values()
    return [p.name for p in parameters if p.default is p.empty] == ["tokens"]


def _check_arguments(role: str, part: Surrogate | Penalty) -> None:
    """Refuses a `compute` that takes other arguments than it is called with, and a memory that is
    never read or never moves."""
    remembers = getattr(part, "init", None) is not None
    if remembers != (getattr(part, "observe", None) is not None):
        raise InputError(f"{role} {part.name}: init and observe go together: give both, or neither")
    functions = [("compute", part.compute, ("tokens", "state")[: 1 + remembers])]
    for field in getattr(part, "batch_fields", ()):
        functions.append((field.name, field.compute, ("tokens", "group", "count")))
    for name, function, arguments in functions:
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise InputError(
                f"{role} {part.name}: {error}: write {name}({', '.join(arguments)}), and read"
                f" {', '.join(f'tokens.{field}' for field in Tokens.__dataclass_fields__)}"
            ) from None


def _check_trl(loss_type: str, importance_sampling_level: str, delta: float | None) -> None:
    if loss_type not in LOSS_TYPES:
        raise InputError(f"like_trl: loss_type = {loss_type!r}, expected one of {LOSS_TYPES}")
    if importance_sampling_level not in ("token", "sequence"):
        raise InputError(
            f"like_trl: importance_sampling_level = {importance_sampling_level!r}, expected 'token'"
            " or 'sequence'"
        )
    refused = loss_type in ("cispo", "sapo") or delta is not None
    if importance_sampling_level == "sequence" and refused:
        raise InputError(
            f"like_trl: importance_sampling_level = 'sequence' goes with {', '.join(CLIPPED)}"
            " without delta; leave it at 'token'"
        )
