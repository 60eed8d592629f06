"""The jitted functions of one training step: sample, prepare, update, sync.

prompts -> sample -> reward -> prepare (score, advantage) -> update -> log
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxgrpo import advantages
from jaxgrpo.core.metrics import Metrics, empty_like, maximum, mean, merge
from jaxgrpo.core.types import FIELDS, Params, Rollouts, TrainBatch, TrainState
from jaxgrpo.losses import Tokens, token_loss
from jaxgrpo.models import sharding
from jaxgrpo.models.logprobs import Entropy
from jaxgrpo.rollout import sampler as sampling
from jaxgrpo.update import diagnostics, packing
from jaxgrpo.update.forward import (
    Blueprint,
    as_computed,
    forward,
    loss_of_tokens,
    micro_batch,
    opt_layout,
    param_layout,
)

ANCHORS = ("base_logp", "reference_logp")
"""Fields that show, if a method asks for them, how far the policy has moved."""

FINITE = ("entropy", "sampling/sampling_logp_difference/mean")
"""Metrics of an update that must be finite, as its loss and gradient, for it to be applied."""

ROUNDING = {"float32": 1e-3, "bfloat16": 1.0}
"""Nats by which sampler and trainer may differ about one token, by the precision of products.

Beyond them it is no rounding. float32: the largest difference of tiny models is below 1e-5
(tests/update/test_agreement.py). bfloat16 has 8 bits: its logits, where stored, are 1/8 apart from
16 on. Of Qwen2.5-0.5B the differences between engines are 0.03 to 0.04 in the root mean square
(github.com/ServiceNow/Fast-LLM/pull/525), of Qwen3-1.7B up to 0.3 among 25 tokens
(github.com/vllm-project/vllm/issues/18352).
"""


class Prepared(NamedTuple):
    """What `prepare` returns: the batches to update on, and what the log shows of them."""

    batches: tuple[TrainBatch, ...]  # one per update, in order
    advantage: Array  # [P, G], the mean over a sample's tokens
    live: np.ndarray  # [P, G] bool, samples that can move the parameters
    metrics: Metrics


Share = Callable[[str, Callable[[], Any]], Any]
"""(name, make) -> what `make` gives, or gave an earlier run that shares it"""


def alone(name: str, make: Callable[[], Any]) -> Any:
    """Shares nothing."""
    return make()


Sample = Callable[..., Rollouts]
"""(params, prompts, key, finished=None) -> Rollouts, as `jaxgrpo.rollout.sampler.sample`. Another
engine may stand in its place; without `finished` rewards wait until it has ended."""
Prepare = Callable[[TrainState, Rollouts], tuple[TrainState, Prepared]]
Update = Callable[[TrainState, Sequence[TrainBatch]], tuple[TrainState, Metrics]]
Sync = Callable[[TrainState], Params]


class Steps(NamedTuple):
    """The functions of training: state in, state out. `update` donates the state it gets."""

    sample: Sample
    prepare: Prepare
    update: Update
    sync: Sync
    update_program: Any
    """the jitted (trainable, opt_state, objective_state, anchors, batch) -> (trainable, opt_state,
    objective_state, metrics) of `update`"""


def build_steps(blueprint: Blueprint, share: Share = alone) -> Steps:
    """Jits the functions of a training step for one model, method, geometry and mesh.

    Args:
      share: asked for "sampler", "update" and "method", the programs that runs may have in common.
    """
    sampler = share(
        "sampler",
        lambda: sampling.make_sampler(blueprint.model, blueprint.sampling, blueprint.mesh),
    )
    program = share("update", lambda: _update_program(blueprint))
    return Steps(
        sample=functools.partial(sampling.sample, sampler),
        prepare=Preparer(blueprint).prepare,
        update=functools.partial(_update, program, blueprint.objective.anchors),
        sync=_syncer(blueprint),
        update_program=program,
    )


def _syncer(blueprint: Blueprint) -> Sync:
    """Trained parameters as the sampler reads them: cast and gathered over fsdp, or as they are."""
    narrow = jnp.finfo(blueprint.model.config.dtype).bits < 32
    if blueprint.mesh.shape["fsdp"] == 1 and not narrow:
        return lambda state: state.trainable
    layout = param_layout(blueprint, sharding.SAMPLING)
    sync = jax.jit(functools.partial(as_computed, blueprint.model), out_shardings=layout)
    return lambda state: sync(state.trainable)


_Judged = tuple[Array, Array, Array]
"""(advantage, mask, tokens that the reduction counts), each [P, G, T]"""


class Preparer:
    """The jitted functions of `prepare`, and what the host does between them."""

    def __init__(self, blueprint: Blueprint):
        self.blueprint, geometry = blueprint, blueprint.geometry
        shape = geometry.num_prompts, geometry.group_size, geometry.max_completion_tokens
        self.sample_shape = shape
        self.score = jax.jit(functools.partial(_score, blueprint), static_argnums=2)
        self.judge = jax.jit(functools.partial(_judge, blueprint))
        self.weigh = jax.jit(functools.partial(_weigh, blueprint))
        constrain = sharding.constrain(blueprint.mesh)
        self.gather = jax.jit(functools.partial(packing.gather, constrain=constrain))
        self.scatter = jax.jit(packing.scatter)
        self.measure = jax.jit(packing.lengths_of)
        self.drift = jax.jit(diagnostics.drift_metrics, static_argnums=3)

    def prepare(self, state: TrainState, rollouts: Rollouts) -> tuple[TrainState, Prepared]:
        compact, geometry = self.blueprint.compact, self.blueprint.geometry
        lengths = sharding.to_host(self.measure(rollouts))
        rollouts = self.with_fields(state, rollouts, lengths)
        after, judged, live, per_sample, metrics = self.judge(state.advantage_state, rollouts)
        live = sharding.to_host(live)
        plans, batches = [], []
        for own, where in self.plans(lengths, live if compact else np.ones_like(live)):
            metrics = merge(metrics, packing.work(where, lengths, geometry))
            batches.append(self.assemble(state, rollouts, judged, own, where))
            plans.append(where)
        state = dataclasses.replace(state, advantage_state=after)
        for name in ANCHORS:
            if name not in rollouts.fields and name in batches[0].fields:
                # Of all completions or of none: those that the loss leaves out are no random ones.
                mask = rollouts.token_mask & bool(live.all() or not compact)
                rows = [batch.fields[name] for batch in batches]
                other = self.of_samples(rows, plans, rollouts.token_mask)
                drift = self.drift(rollouts.behavior_logp, other, mask, FIELDS[name].policy)
                metrics = merge(metrics, drift)
        updates = _in_order(batches, self.blueprint.num_iterations)
        return state, Prepared(updates, per_sample, live, metrics)

    def plans(
        self, lengths: packing.Lengths, live: np.ndarray
    ) -> Iterator[tuple[np.ndarray, packing.Plan]]:
        """(its prompts, the plan of their live samples) of each minibatch."""
        geometry = self.blueprint.geometry
        for own in packing.deal(lengths, live, geometry):
            member = np.isin(np.arange(len(live)), own)
            yield own, packing.plan(lengths, live & member[:, None], geometry)

    def with_fields(
        self, state: TrainState, rollouts: Rollouts, lengths: packing.Lengths
    ) -> Rollouts:
        """The rollouts with what the chain needs, scored on every sample."""
        names = self.blueprint.chain.needs & FIELDS.keys()
        if not names:
            return rollouts
        plans, scored = [], []
        zero = jnp.zeros(self.sample_shape, jnp.float32)
        for _, where in self.plans(lengths, np.ones(self.sample_shape[:2], bool)):
            batch = self.gather(rollouts, where, zero, zero, rollouts.token_mask, {})
            scored.append(self.score_fields(state, names, batch))
            plans.append(where)
        fields = {
            name: self.of_samples([one[name] for one in scored], plans, rollouts.token_mask)
            for name in sorted(names)  # in the same order in every process
        }
        return dataclasses.replace(rollouts, fields={**rollouts.fields, **fields})

    def of_samples(
        self, rows: Sequence[Array], plans: Sequence[packing.Plan], token_mask: Array
    ) -> Array:
        """Values [K, D, R, Q] in the rows of each minibatch as those of the samples, [P, G, T]."""
        parts = (
            self.scatter(values, where, token_mask)
            for values, where in zip(rows, plans, strict=True)
        )
        return functools.reduce(jnp.add, parts)  # no token has a place in two of them

    def assemble(
        self,
        state: TrainState,
        rollouts: Rollouts,
        judged: _Judged,
        own: np.ndarray,
        where: packing.Plan,
    ) -> TrainBatch:
        """The batch of one minibatch, with what only the loss needs scored on its samples alone."""
        needs, (advantage, mask, counted) = self.blueprint.objective.needs, judged
        weight = self.weigh(counted, mask, own)
        # As for the parts of a chain, a need may be the name of a reward.
        brought = {**rollouts.rewards, **rollouts.fields}
        known = {name: self.per_token(brought[name]) for name in needs & brought.keys()}
        known["behavior_logp"] = rollouts.behavior_logp
        known["sampled_now"] = self.per_token(rollouts.policy_version == state.step)
        batch = self.gather(rollouts, where, advantage, weight, mask, known)
        late = self.score_fields(state, (needs & FIELDS.keys()) - known.keys(), batch)
        batch = dataclasses.replace(batch, fields={**batch.fields, **late})
        if self.blueprint.objective.proximal == "trainer":
            batch = dataclasses.replace(batch, proximal_logp=batch.fields["trainer_logp"])
        return batch

    def score_fields(
        self, state: TrainState, names: Collection[str], batch: TrainBatch
    ) -> dict[str, Array]:
        """The named fields [K, D, R, Q], with one pass per policy that they ask for."""
        fields: dict[str, Array] = {}
        for policy in sorted({FIELDS[name].policy for name in names}):
            params = state.trainable if policy == "trainer" else state.frozen[policy]
            wanted = {name: FIELDS[name] for name in names if FIELDS[name].policy == policy}
            asked = "value" if "entropy" in {one.quantity for one in wanted.values()} else "none"
            logp, entropy = self.score(params, batch, asked)
            values = {"logp": logp, "entropy": entropy}
            fields |= {name: values[field.quantity] for name, field in wanted.items()}
        return fields

    def per_token(self, value: Array) -> Array:
        """A field [P], [P, G] or [P, G, T] at every token."""
        value = value.reshape(*value.shape, *[1] * (3 - value.ndim))
        return jnp.broadcast_to(value, self.sample_shape)


def _score(
    blueprint: Blueprint, params: Params, batch: TrainBatch, entropy: Entropy
) -> tuple[Array, Array | None]:
    """Log-probs and entropies [K, D, R, Q] under `params`; 0 in micro-batches that are not live."""

    def values(index: Array) -> tuple[Array, Array | None]:
        logp, fields = forward(blueprint, params, micro_batch(batch, index), entropy)
        return logp, fields.get("policy_entropy")

    def body(index: Array, carry: Any) -> Any:
        return jax.tree.map(lambda whole, one: whole.at[index].set(one), carry, values(index))

    shapes = jax.eval_shape(values, jnp.int32(0))
    start = jax.tree.map(lambda leaf: jnp.zeros(batch.tokens.shape, leaf.dtype), shapes)
    return jax.lax.fori_loop(0, batch.num_live, body, start)


def _judge(
    blueprint: Blueprint, state: Any, rollouts: Rollouts
) -> tuple[Any, _Judged, Array, Array, Metrics]:
    """The chain on the whole step, and who is alive.

    Returns: the chain's state, what batches are made of, live and mean advantage [P, G], metrics.
    """
    signal, state, metrics = blueprint.chain.update(advantages.start(rollouts), state, rollouts)
    tokens = rollouts.token_mask
    value, mask = signal.value, signal.mask
    if value.ndim == 2:
        value, mask = value[..., None], mask[..., None]
    mask = jnp.broadcast_to(mask, tokens.shape) & tokens
    advantage = jnp.where(mask, value, 0).astype(jnp.float32)
    live = (advantage != 0).any(-1)
    if blueprint.objective.penalties and blueprint.objective.penalties_on == "all":
        live = mask.any(-1)
    metrics = merge(
        metrics, _rollout_metrics(rollouts, live, advantage, mask, blueprint.reward_weights)
    )
    per_sample = advantage.sum(-1) / jnp.maximum(mask.sum(-1), 1)
    # The dead are not in the metrics of the update, which penalties may remember.
    alive = mask & live[..., None]
    everywhere = sharding.replicated(blueprint.mesh)
    state, live, per_sample, metrics = jax.lax.with_sharding_constraint(
        (state, live, per_sample, metrics), everywhere
    )
    return state, (advantage, alive, mask), live, per_sample, metrics


def _weigh(blueprint: Blueprint, counted: Array, mask: Array, own: Array) -> Array:
    """The reduction's weights [P, G, T] for the update of the prompts `own`; 0 elsewhere.

    They are normalised over `counted` tokens of these prompts, the whole batch of the update. The
    dead weigh nothing and carry no penalty, so that leaving them out changes nothing.
    """
    weight = blueprint.objective.reduction.weights(counted[own]).astype(jnp.float32)
    alive = mask[own].any(-1, keepdims=True)
    return jnp.zeros(mask.shape, jnp.float32).at[own].set(jnp.where(alive, weight, 0))


def _in_order(batches: Sequence[TrainBatch], num_iterations: int) -> tuple[TrainBatch, ...]:
    """The batch of each update of a step: all minibatches, as often as there are iterations.

    Only the first update is of the parameters that sampled.
    """

    flags = batches[0].fields["sampled_now"]
    nowhere = sharding.put(np.zeros(flags.shape, bool), flags.sharding)

    def later(batch: TrainBatch) -> TrainBatch:
        return dataclasses.replace(batch, fields={**batch.fields, "sampled_now": nowhere})

    first, *others = batches
    others = [later(batch) for batch in others]
    again = (later(first), *others) if num_iterations > 1 else ()
    return (first, *others, *again * (num_iterations - 1))


def _rollout_metrics(
    rollouts: Rollouts,
    live: Array,
    advantage: Array,
    mask: Array,
    weights: Mapping[str, float] | None,
) -> Metrics:
    """Metrics of rewards and completions, under TRL's names if TRL has one."""
    tokens = rollouts.token_mask
    metrics: Metrics = {
        "live_samples": mean(live),
        "live_groups": mean(live.any(-1)),
        "live_tokens": mean(live[..., None], tokens),
        "sampling/not_finite": mean(~jnp.isfinite(rollouts.behavior_logp), tokens),
    }
    metrics |= diagnostics.advantage_metrics(advantage, mask, rollouts.rewards, weights)
    texts = rollouts.completion_tokens, tokens
    metrics |= diagnostics.completion_metrics(*texts, rollouts.truncated)
    rare = diagnostics.rare_successes(rollouts.rewards, weights)
    metrics |= diagnostics.symptom_metrics(*texts, rare)
    for name in ANCHORS:
        if name in rollouts.fields:
            pair = (rollouts.behavior_logp, rollouts.fields[name])
            metrics |= diagnostics.drift_metrics(*pair, tokens, FIELDS[name].policy)
    return metrics | diagnostics.group_metrics(rollouts.rewards, weights)


_merge = jax.jit(merge)


def _update(
    program: Any, anchors: frozenset[str], state: TrainState, batches: Sequence[TrainBatch]
) -> tuple[TrainState, Metrics]:
    """All updates of a step, which is counted once; metrics are merged over them."""
    frozen = {name: state.frozen[name] for name in sorted(anchors)}
    changing, measured = [state.trainable, state.opt_state, state.objective_state], []
    for batch in batches:
        *changing, metrics = program(*changing, frozen, batch)
        measured.append(metrics)
    trainable, opt_state, objective_state = changing
    state = dataclasses.replace(
        state,
        step=state.step + 1,
        trainable=trainable,
        opt_state=opt_state,
        objective_state=objective_state,
    )
    last = {"weights/norm": measured[-1]["weights/norm"]}
    return state, functools.reduce(_merge, measured) | last


def _update_program(blueprint: Blueprint) -> Any:
    """One optimizer step on the gradient of a whole batch.

    Without a live sample, or if gradient, loss, log-probs or entropy are not finite, parameters,
    optimizer state and what the penalties remember stay as they are, and that is counted. The norm
    of the parameters is taken before and after: it is not finite if one of them is not.
    """

    def run(
        trainable: Params, opt_state: Any, objective_state: Any, anchors: Any, batch: TrainBatch
    ):
        loss_of = functools.partial(_loss, blueprint, objective_state, anchors)
        loss, grads, metrics = _accumulate(loss_of, param_layout(blueprint), trainable, batch)
        norm = optax.tree_utils.tree_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        for name in FINITE:
            finite &= jnp.isfinite(metrics[name].total)
        weights_before = optax.tree_utils.tree_norm(trainable)
        no_live = batch.num_live == 0

        def step(_):
            updates, new_state = blueprint.optimizer.update(grads, opt_state, trainable)
            observed = blueprint.objective.observe(objective_state, metrics)
            return optax.apply_updates(trainable, updates), new_state, observed

        old = (trainable, opt_state, objective_state)
        new = jax.lax.cond(finite & ~no_live, step, lambda _: old, None)
        weights_after = optax.tree_utils.tree_norm(new[0])
        counted = {
            "loss": loss,
            "grad_norm": norm,
            "weights/norm": weights_after,
            "skipped_updates/no_live_sample": no_live,
            "skipped_updates/not_finite": ~finite,
        }
        metrics |= {name: mean(value) for name, value in counted.items()}
        # Of several updates the largest, not the mean: one is enough to break a run.
        return *new, metrics | {"weights/growth": maximum(weights_after / weights_before)}

    everywhere = sharding.replicated(blueprint.mesh)
    layout = (param_layout(blueprint), opt_layout(blueprint), everywhere, everywhere)
    return jax.jit(run, donate_argnums=(0, 1), out_shardings=layout)


def _accumulate(
    loss_of: Callable[[Params, TrainBatch], Any],
    layout: Params,
    trainable: Params,
    batch: TrainBatch,
):
    """Loss, gradients and metrics summed over the live micro-batches, in one loop."""

    def one(index: Array):
        with_gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, metrics), grads = with_gradient(trainable, micro_batch(batch, index))
        return loss, grads, metrics

    def body(index: Array, carry):
        loss, grads, metrics = one(index)
        return carry[0] + loss, jax.tree.map(jnp.add, carry[1], grads), merge(carry[2], metrics)

    def zeros(leaf: Any, layout: Any) -> Array:
        wide = jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
        return jax.lax.with_sharding_constraint(wide, layout)

    loss, grads, metrics = jax.eval_shape(one, jnp.int32(0))
    start = jnp.zeros_like(loss), jax.tree.map(zeros, grads, layout), empty_like(metrics)
    return jax.lax.fori_loop(0, batch.num_live, body, start)


def rounding_of(blueprint: Blueprint) -> float | None:
    """The entry of ROUNDING for a run; None where its samples come from a cut distribution."""
    sampling = blueprint.sampling
    if sampling.is_cut:  # they differ by the probability that was cut
        return None
    # Accelerators multiply float32 in fewer bits unless JAX is set otherwise.
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    exact = precision in ("highest", "float32")
    on_cpu = blueprint.mesh.devices.flat[0].platform == "cpu"
    narrow = jnp.finfo(blueprint.model.config.dtype).bits < 32
    return ROUNDING["float32" if not narrow and (exact or on_cpu) else "bfloat16"]


def _loss(
    blueprint: Blueprint,
    objective_state: dict[str, Any],
    anchors: dict[str, Params],
    params: Params,
    micro: TrainBatch,
) -> tuple[Array, Metrics]:
    objective, loss = blueprint.objective, None
    if objective.per_token:
        loss, logp, fields = loss_of_tokens(blueprint, params, micro, objective_state)
    else:
        reference = anchors.get("reference")
        logp, fields = forward(blueprint, params, micro, objective.entropy, reference)
    logp = jnp.where(micro.mask, logp, 0)
    tokens = Tokens(
        logp=logp,
        proximal_logp=micro.proximal_logp,
        advantage=micro.advantage,
        mask=micro.mask,
        segment=micro.segment,
        fields=micro.fields | fields,
    )
    per_token, metrics = token_loss(
        objective.surrogate, objective.penalties, tokens, objective_state
    )
    behavior, now = micro.fields["behavior_logp"], micro.fields["sampled_now"]
    agreement = diagnostics.agreement_metrics(
        jax.lax.stop_gradient(logp), behavior, micro.mask, now, rounding_of(blueprint)
    )
    # An entropy term reports the entropy itself, which then replaces ours.
    entropy = mean(jax.lax.stop_gradient(fields["policy_entropy"]), micro.mask)
    metrics = {"entropy": entropy} | agreement | metrics
    if loss is None:
        loss = jnp.where(micro.mask, micro.weight * per_token, 0).sum()
    return loss, metrics
