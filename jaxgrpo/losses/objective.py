"""What an update minimises, sum(weight * (surrogate + penalties)): for a trainer, and on arrays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters.partial_eval import dce_jaxpr

from jaxgrpo.core.errors import InputError, explaining_own_code
from jaxgrpo.core.metrics import Mean, Metrics, as_metrics
from jaxgrpo.core.scores import OF_PASS, policy_field
from jaxgrpo.core.types import refuse_other_state
from jaxgrpo.losses.penalties import Penalty
from jaxgrpo.losses.reductions import Reduction, dense_ids, packed_weights
from jaxgrpo.losses.registry import Spec, build_penalty, build_reduction, build_surrogate
from jaxgrpo.losses.sequences import with_group_ratio
from jaxgrpo.losses.surrogates import BatchField, Surrogate, Tokens


class Objective(NamedTuple):
    """What an update of a run minimises, and what it needs for that.

    >>> Objective(build_surrogate("clip"), build_reduction("token_mean"), proximal="trainer").needs
    frozenset({'trainer_logp'})
    """

    surrogate: Surrogate
    reduction: Reduction
    penalties: tuple[Penalty, ...] = ()
    penalties_on: str = "all"  # "live": dead samples are free of penalties, and leave the update
    proximal: str = "behavior"  # the policy ratios are measured from; "trainer" scores it again

    @property
    def needs(self) -> frozenset[str]:
        """The fields that must be there before the update."""
        update_fields = (field.name for field in self.batch_fields)
        prior_fields = self.fields_read.difference(OF_PASS, update_fields)
        return prior_fields | ({"trainer_logp"} if self.proximal == "trainer" else frozenset())

    @property
    def entropy(self) -> Literal["gradient", "value"]:
        """How the update's pass gives the entropy: differentiated for a penalty, or for the log."""
        return "gradient" if "policy_entropy" in self.fields_read else "value"

    @property
    def per_token(self) -> bool:
        """Whether the loss of a token depends on no other token."""
        return self.surrogate.per_token and all(penalty.per_token for penalty in self.penalties)

    @property
    def anchors(self) -> frozenset[str]:
        """The frozen policies that the update itself runs."""
        pass_fields = self.fields_read & OF_PASS.keys()
        return frozenset(OF_PASS[name] for name in pass_fields) - {"trainer"}

    @property
    def batch_fields(self) -> tuple[BatchField, ...]:
        """What an update computes from all its micro-batches before it takes the gradient."""
        return with_group_ratio(self.surrogate.batch_fields, self.fields_read)

    @property
    def reads_batch(self) -> bool:
        """Whether an update has a pass over all its micro-batches before that with gradients."""
        return bool(self.batch_fields)

    @property
    def acts_on_all(self) -> bool:
        """Whether samples without an advantage move the parameters, or count for those that do."""
        penalizes_all = bool(self.penalties) and self.penalties_on == "all"
        return penalizes_all or self.surrogate.acts_on_all or self.reads_batch

    @property
    def counts(self) -> dict[str, int]:
        """Fields of likeliest tokens -> how many there are; the update's pass gives what the policy
        makes of each (`core.scores.policy_field`)."""
        return {name: k for penalty in self.penalties for name, k in penalty.counts}

    @property
    def at_student_tokens(self) -> frozenset[str]:
        """Of these fields those of the policy's likeliest tokens, not of the scorer's."""
        return frozenset().union(*(penalty.at_student_tokens for penalty in self.penalties))

    @property
    def fields_read(self) -> frozenset[str]:
        """The fields that surrogate and penalties read, whatever gives them."""
        return self.surrogate.needs.union(*(penalty.needs for penalty in self.penalties))

    def trace(self) -> None:
        """Runs surrogate, penalties, reduction and what they read of an update on shapes.

        Raises: InputError where own code fails, reads a field that it does not declare, gives
        something of another form than it should, or cannot be compiled.

        >>> Objective(build_surrogate("clip"), build_reduction("token_mean")).trace()
        """
        shapes, fields = self._shapes()

        def total(logp: Array, arrays: Any, fields: Any, states: Any) -> Any:
            tokens = Tokens(**{**arrays, "logp": logp}, fields=fields)
            loss, metrics = token_loss(self.surrogate, self.penalties, tokens, states)
            return loss.sum(), self.observe(states, metrics)

        slope, states = jax.grad(total, has_aux=True), jax.tree.map(jnp.asarray, self.init())
        _, after = jax.eval_shape(slope, shapes["logp"], shapes, fields, states)
        for name, state in states.items():
            refuse_other_state(f"penalty {name}", state, after[name])
        _trace_weights(self.reduction)
        _trace_batch_fields(self, shapes, fields)

    def proximal_readers(self) -> list[str]:
        """Surrogate and penalties whose loss depends on proximal_logp: metrics do not count.

        >>> parts = build_surrogate("clip"), build_reduction("token_mean")
        >>> Objective(*parts, (build_penalty({"use": "k2", "beta": 1}),)).proximal_readers()
        ['surrogate clip']
        """
        shapes, fields = self._shapes()
        fields = {n: fields[n] for n in fields.keys() - {field.name for field in self.batch_fields}}
        parts = (f"surrogate {self.surrogate.name}", *(f"penalty {p.name}" for p in self.penalties))

        def compute(proximal_logp: Array, arrays: Any, fields: Any, ids: Array, states: Any) -> Any:
            tokens = Tokens(**{**arrays, "proximal_logp": proximal_logp}, fields=fields)
            tokens = with_batch_fields(self.batch_fields, tokens, ids)
            rest = (penalty.compute(tokens, *states[penalty.name]) for penalty in self.penalties)
            return [loss for loss, _ in (self.surrogate.compute(tokens), *rest)]

        states = {p.name: () if p.init is None else (p.init(),) for p in self.penalties}
        arrays = shapes["proximal_logp"], shapes, fields, shapes["segment"], states
        jaxpr = jax.make_jaxpr(compute)(*arrays).jaxpr
        used = (dce_jaxpr(jaxpr, [name == part for name in parts])[1][0] for part in parts)
        return [part for part, is_used in zip(parts, used, strict=True) if is_used]

    def _shapes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays of a few tokens, and the fields that are read of them, as shapes."""
        real, kinds = jnp.float32, {"mask": jnp.bool_, "segment": jnp.int32}
        kinds |= dict.fromkeys(("logp", "proximal_logp", "advantage"), real)
        shapes: dict[str, Any] = {n: jax.ShapeDtypeStruct((2, 3), kinds[n]) for n in kinds}
        fields: dict[str, Any] = dict.fromkeys(self.fields_read, shapes["logp"])
        for name, k in self.counts.items():
            fields[name] = jax.ShapeDtypeStruct((2, 3, 2, k + 1), real)
            fields[policy_field(name)] = jax.ShapeDtypeStruct((2, 3, k + 1), real)
        return shapes, fields

    def init(self) -> dict[str, Any]:
        """name of a penalty -> what it remembers before the first update."""
        states = {}
        for penalty in self.penalties:
            if penalty.init is not None:
                with explaining_own_code(f"penalty {penalty.name}"):
                    states[penalty.name] = penalty.init()
        return states

    def observe(self, state: Mapping[str, Any], metrics: Metrics) -> dict[str, Any]:
        """What the penalties remember after an update with these metrics."""
        states = {}
        for penalty in self.penalties:
            if penalty.observe is not None:
                observed = _as_reported(penalty.name, metrics)
                with explaining_own_code(f"penalty {penalty.name}"):
                    states[penalty.name] = penalty.observe(state[penalty.name], observed)
        return states


def token_loss(
    surrogate: Surrogate,
    penalties: Sequence[Penalty],
    tokens: Tokens,
    states: Mapping[str, Any] | None = None,
) -> tuple[Array, Metrics]:
    """(surrogate + penalties per token, metrics), 0 where masked; multiply by the weights and sum.

    Where several parts report a metric of one name, that of the first has it; a later penalty's is
    PENALTY/NAME.

    Args:
      states: name of a penalty -> what it remembers; of penalties with an `init`.

    Raises: InputError if a penalty's state is missing, or a part returns something else than
    (loss per token, metrics).

    >>> token_loss(build_surrogate("clip"), [], Tokens.from_ratios([1.0, 0.5]))[0].tolist()
    [-1.0, -0.5]
    """
    name = f"surrogate {surrogate.name}"
    with explaining_own_code(name):
        loss, metrics = _checked(name, surrogate.compute(tokens), tokens)
    for penalty in penalties:
        name = f"penalty {penalty.name}"
        state = () if penalty.init is None else (_penalty_state(penalty, states or {}),)
        with explaining_own_code(name):
            value, penalty_metrics = _checked(name, penalty.compute(tokens, *state), tokens)
        loss, metrics = loss + value, _with_metrics(metrics, penalty.name, penalty_metrics)
    return loss, metrics


def _with_metrics(metrics: Metrics, part: str, further: Metrics) -> Metrics:
    """Metrics and those of a further part: one whose name is taken is PART/NAME, or PART_2/NAME."""
    merged = dict(metrics)
    for key, metric in further.items():
        numbered = (f"{part}_{number}/{key}" for number in itertools.count(2))
        names = itertools.chain([key, f"{part}/{key}"], numbered)
        merged[next(name for name in names if name not in merged)] = metric
    return merged


def _as_reported(part: str, metrics: Metrics) -> Metrics:
    """Metrics, those of a part whose names were taken under its names again."""
    prefix = f"{part}/"
    renamed = {key: metric for key, metric in metrics.items() if key.startswith(prefix)}
    return {**metrics, **{key.removeprefix(prefix): metric for key, metric in renamed.items()}}


def policy_loss(
    surrogate: Spec | Surrogate,
    reduction: Spec | Reduction,
    logp: Array,
    proximal_logp: Array,
    advantage: Array,
    mask: Array,
    segment: Array | None = None,
    group: Array | None = None,
    *,
    penalties: Sequence[Spec | Penalty] = (),
    states: Mapping[str, Any] | None = None,
    surrogate_options: Mapping[str, Any] | None = None,
    reduction_options: Mapping[str, Any] | None = None,
    **fields: Array,
) -> tuple[Array, Metrics]:
    """The loss of plain arrays, a whole batch; differentiate it with respect to logp.

    Args:
      surrogate, reduction, penalties: a name, with ..._options, {"use": name, **options}, or it.
      logp, proximal_logp, advantage: [B, T]; or the advantage [B], of each row.
      mask: [B, T], True at tokens that the policy chose.
      segment: [B, T], sequence ids within each row, 0 = padding. None: each row is a sequence.
      group: prompt ids, [B] of each row, or [B, T]; any numbers: for prompt_mean, gvpo, ...
      states: name of a penalty -> what it remembers, of those with an `init` (adaptive_entropy):
        penalty.init() in the first update, then penalty.observe(state, metrics) of the one before.
      fields: [B, T, ...] each, what surrogate and penalties read: reference_logp, ...

    Returns: (loss [], metrics).  Raises: InputError on other shapes, unknown names, no state.

    >>> logp, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    >>> float(policy_loss("clip", "token_mean", logp, logp, jnp.ones(1), mask)[0])
    -1.0
    """
    advantage = _along(advantage, mask, segment)
    _check_shapes(logp, proximal_logp=proximal_logp, advantage=advantage, mask=mask)
    _check_shapes(logp, True, **fields)
    reduction_part = build_reduction(reduction, reduction_options)
    weight, mask, segment = _layout(reduction_part, mask, segment, group)
    tokens = Tokens(logp, proximal_logp, advantage, mask, segment, fields)
    surrogate_part = build_surrogate(surrogate, surrogate_options)
    objective = Objective(surrogate_part, reduction_part, (*map(build_penalty, penalties),))
    ids = None
    if group is not None:
        ids = dense_ids(_along(group, mask).reshape(-1)).reshape(mask.shape)
    tokens = with_batch_fields(objective.batch_fields, tokens, ids)
    per_token, metrics = token_loss(surrogate_part, objective.penalties, tokens, states)
    loss = (weight.astype(per_token.dtype) * per_token).sum()
    # As in a run, this is the loss, whatever a part of one's own reports under that name.
    return loss, metrics | {"loss": Mean(total=loss, weight=jnp.ones((), loss.dtype))}


def with_batch_fields(
    batch_fields: Sequence[BatchField], tokens: Tokens, group: Array | None = None
) -> Tokens:
    """The tokens of a whole batch with what an update would compute of them, unless they have it.

    Args:
      group: ids from 0, of the shape of the tokens. None: what reads them is left out, and its
        reader says what it misses.
    """
    ids = jnp.zeros(tokens.mask.shape, jnp.int32) if group is None else group
    fields = {
        field.name: field.compute(tokens, ids, ids.size)
        for field in batch_fields
        if field.name not in tokens.fields and (group is not None or not field.by_group)
    }
    return dataclasses.replace(tokens, fields={**tokens.fields, **fields})


def _trace_weights(reduction: Reduction) -> None:
    """Runs a reduction on shapes. Raises: InputError unless it gives a float for each token."""
    mask, where = jax.ShapeDtypeStruct((2, 3, 4), jnp.bool_), f"reduction {reduction.name}"
    with explaining_own_code(where):
        weights: Any = jax.eval_shape(reduction.weights, mask)
    shape, dtype = getattr(weights, "shape", None), getattr(weights, "dtype", None)
    if shape != mask.shape or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(
            f"{where} gave weights of shape {shape} and dtype {dtype} for a mask {mask.shape}: give"
            " a float for each token, 0 where masked"
        )


def _trace_batch_fields(
    objective: Objective, shapes: Mapping[str, Any], fields: Mapping[str, Any]
) -> None:
    """Computes what an update makes of its batch on shapes, of the tokens' arrays and fields.

    Raises: InputError where own code fails, or does not give a number for each token.
    """
    mask = shapes["mask"]
    ids = jax.ShapeDtypeStruct(mask.shape, jnp.int32)
    for field in objective.batch_fields:

        def compute(arrays: Any, fields: Any, ids: Array, run: Any = field.compute) -> Any:
            return run(Tokens(**arrays, fields=fields), ids, mask.size)

        where = f"surrogate {objective.surrogate.name}: {field.name}"
        with explaining_own_code(where):
            value: Any = jax.eval_shape(compute, shapes, fields, ids)
        if getattr(value, "shape", None) != mask.shape:
            raise InputError(
                f"{where} has shape {getattr(value, 'shape', None)}, expected a number for each"
                f" token, {mask.shape}"
            )


def _checked(where: str, computed: Any, tokens: Tokens) -> tuple[Array, Metrics]:
    """What a part's `compute` returned, with plain numbers as means over the unmasked tokens."""
    if not isinstance(computed, tuple) or len(computed) != 2:
        kind = type(computed).__name__
        raise InputError(f"{where} returned {kind}, expected (loss per token, metrics): add {{}}")
    loss, reported = computed
    shape = getattr(loss, "shape", ())
    if shape != tokens.logp.shape:
        raise InputError(
            f"{where} returned a loss of shape {shape}, expected one number per token,"
            f" {tokens.logp.shape} as tokens.logp: the reduction weighs and adds them"
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise InputError(f"{where} returned a loss of dtype {loss.dtype}, expected floats")
    return loss, as_metrics(where, reported, tokens.mask.sum())


def _penalty_state(penalty: Penalty, states: Mapping[str, Any]) -> Any:
    name = penalty.name
    if name not in states:
        raise InputError(
            f"{name} remembers something from one update to the next: give states = {{{name!r}:"
            " penalty.init()} in the first, and penalty.observe(state, metrics) in each later one"
        )
    return states[name]


def _layout(
    reduction: Reduction, mask: Array, segment: Array | None, group: Array | None
) -> tuple[Array, Array, Array]:
    """(token weights, mask, segment ids from 1), [B, T] each."""
    mask, ids = mask.astype(bool), jnp.ones(mask.shape, jnp.int32)
    if segment is not None:
        _check_shapes(mask, segment=segment)
        mask, ids = mask & (segment != 0), _ids_from_1(segment)
    if group is not None:
        group = _along(group, mask)
        _check_shapes(mask, group=group)
    if reduction.divisor is None and segment is None and group is None:
        return reduction.weights(mask[:, None, :])[:, 0], mask, ids
    return packed_weights(reduction, mask, ids, group), mask, ids


def _ids_from_1(segment: Array) -> Array:
    """Any ids as numbers from 1 to T within each row, 0 where they are 0."""
    in_sequence = segment != 0
    # Padding takes on the row's smallest id, so that there are no more ids than positions.
    smallest = jnp.where(in_sequence, segment, jnp.iinfo(segment.dtype).max).min(-1, keepdims=True)
    return jnp.where(in_sequence, dense_ids(jnp.where(in_sequence, segment, smallest)) + 1, 0)


def _along(value: Array, mask: Array, segment: Array | None = None) -> Array:
    """[B] as [B, T], and other shapes as they are."""
    if value.ndim != 1:
        return value
    if segment is not None:
        raise InputError("advantage [B] is one number per row: with segment give it as [B, T]")
    return jnp.broadcast_to(value[:, None], (value.shape[0], mask.shape[-1]))


def _check_shapes(logp: Array, may_go_on: bool = False, /, **arrays: Array) -> None:
    """Args: may_go_on: whether arrays may have axes behind B and T."""
    for name, array in arrays.items():
        shape = array.shape[:2] if may_go_on else array.shape
        if logp.ndim != 2 or shape != logp.shape:
            rows = ", or the advantage [B], one for each row" if name == "advantage" else ""
            raise InputError(
                f"{name} has shape {array.shape} and logp {logp.shape}: both must be [B, T]{rows}"
            )
