"""The jitted functions of a training step behind sampling: prepare, update, sync.

prompts -> sample -> reward -> prepare (score, advantage) -> update -> log
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.core.metrics import Metrics, empty_like, maximum, mean, merge
from jaxgrpo.core.scores import SCORES
from jaxgrpo.core.types import Learner, Params, Rollouts, TrainBatch
from jaxgrpo.losses import BatchField, Objective, Tokens, token_loss
from jaxgrpo.losses.reductions import dense_ids
from jaxgrpo.losses.surrogates import RATIO_METRICS
from jaxgrpo.models import low_bit, sharding
from jaxgrpo.models.api import Model, params_per_layer
from jaxgrpo.models.cache import cache_dtype
from jaxgrpo.models.resharding import moved
from jaxgrpo.update import diagnostics
from jaxgrpo.update.balance import Balance, Move, counted, even_out
from jaxgrpo.update.diagnostics import Rounding
from jaxgrpo.update.flat import AUX_LOSS, REROUTED, fullest
from jaxgrpo.update.forward import (
    Blueprint,
    Pass,
    as_computed,
    forward,
    full_params,
    head_sums,
    loss_of_tokens,
    micro_batch,
    opt_layout,
    param_layout,
    params_of,
    read_by_update,
    sampling_layout,
    score_batch,
    trained_layout,
)
from jaxgrpo.update.optimizer import copy_schedule
from jaxgrpo.update.preparing import Prepared, Preparer

FINITE = ("entropy", "sampling/sampling_logp_difference/mean")
"""Metrics of an update that must be finite, as its loss and gradient, for it to be applied."""

ROUNDING = {
    "float32": Rounding(1e-3, 1e-4),
    "bfloat16": Rounding(1.0, 0.1),
    "8 bits": Rounding(5.0, 0.5),
}
"""What rounding explains of the difference of sampler and trainer, by the precision of products.

float32: tiny models differ by less than 1e-5 at any token (tests/update/test_agreement.py),
SmolLM2-135M by 5e-6 in the mean and 5e-5 at most. bfloat16 has 8 bits: SmolLM2-135M differs by
0.03 in the mean and up to 0.55 among 6,000 tokens (docs/performance.md), Qwen2.5-0.5B between
engines by 0.03 to 0.04 in the root mean square (github.com/ServiceNow/Fast-LLM/pull/525),
Qwen3-1.7B by up to 0.3 among 25 tokens (github.com/vllm-project/vllm/issues/18352). With a sampler
in 8 bits SmolLM2-135M differs by 0.05 to 0.15 in the mean and by up to 2.9. A random hybrid of four
layers, three with float32 states, differs by 0.03 in the mean and by up to 0.21 in bfloat16
(benchmarks/results/2026-11-27-hybrids.md): the limits are those of other models.
"""


Share = Callable[[str, Callable[[], Any]], Any]
"""(name, make) -> what `make` gives, or gave an earlier run that shares it"""


def share_nothing(name: str, make: Callable[[], Any]) -> Any:
    """Shares nothing."""
    return make()


Prepare = Callable[[Learner, Rollouts], tuple[Learner, Prepared]]
Update = Callable[[Learner, Sequence[TrainBatch]], tuple[Learner, Metrics]]
Sync = Callable[[Learner], Params]
"""What it returns stays valid when the learner it is made from is donated to an update, unless the
engine makes a copy of it in 8 bits: then that copy does, and parameters may be the learner's own.
"""


class Steps(NamedTuple):
    """The functions of training: learner in, learner out. `update` donates the one it gets."""

    prepare: Prepare
    live_groups: Callable[[Learner, Rollouts], np.ndarray]  # [P] bool: not flat
    update: Update
    sync: Sync
    score: Any  # the jitted pass of `prepare` that gives log-probs
    update_program: Any
    """the jitted (trainable, opt_state, objective_state, anchors, batch) -> (trainable, opt_state,
    objective_state, metrics) of `update`"""


def build_steps(blueprint: Blueprint, share: Share = share_nothing) -> Steps:
    """Jits the functions of a training step for one model, method, geometry and mesh.

    Args:
      share: asked for "update", the programs that runs may have in common, by the sizes for which
        they are compiled.
    """
    config, sampled = blueprint.model.config, blueprint.sampling
    weight_dtype = low_bit.DTYPES.get(sampled.weight_dtype, config.dtype)
    dtypes = config.dtype, cache_dtype(sampled.kv_cache_dtype, config), weight_dtype
    platform = blueprint.mesh.devices.flat[0].platform
    rounding = functools.partial(expected_rounding, sampled.is_cut, dtypes, platform)
    parts = blueprint.passes, blueprint.objective, blueprint.balance, blueprint.optimizer
    skips = blueprint.on_no_live_sample == "skip"
    # Ratios to what drew a text of the data are not known.
    has_ratios = not blueprint.trains_texts or blueprint.objective.proximal == "trainer"
    unmeasured = () if has_ratios else RATIO_METRICS
    measure = functools.partial(_measure, blueprint.objective, rounding, unmeasured)
    # What fits beside what a run keeps is in no config, and is compiled in.
    fitted = blueprint.geometry, blueprint.logits_per_chunk, blueprint.remat
    programs = share("update", dict)
    if fitted not in programs:
        programs[fitted] = _update_program(*parts, measure, skips)
    program, preparer, follow = programs[fitted], Preparer(blueprint), None
    if "ema" in blueprint.policies:
        follow = _follower(blueprint.ema_decay, trained_layout(blueprint.model, blueprint.mesh))
    return Steps(
        prepare=preparer.prepare,
        live_groups=preparer.live_groups,
        update=functools.partial(_update, program, follow, blueprint.objective.anchors),
        sync=_syncer(blueprint.model, blueprint.mesh, blueprint.samples_on, sampled.weight_dtype),
        score=preparer.score,
        update_program=program,
    )


def _syncer(model: Model, mesh: Mesh, sampling_mesh: Mesh, weight_dtype: str) -> Sync:
    """Trained parameters as the sampler takes them: each layer's apart, cast and laid out for it.

    No stacked copy of them stays beside those, and none of them is an array that an update of the
    learner overwrites: what jitted functions return is not, nor are frozen weights.
    """
    gathers, moves = mesh.shape["fsdp"] > 1, sampling_mesh != mesh
    narrow = jnp.finfo(model.config.dtype).bits < 32
    apart = functools.partial(params_per_layer, model.config)
    platform = sampling_mesh.devices.flat[0].platform
    sampled = low_bit.sampler_config(model, platform, weight_dtype)
    if sampled != model.config and not gathers and not moves:
        apart = lambda params: params  # noqa: E731  # the sampler makes a copy of its own
        if sampled.weight_dtype is not None:  # and casts
            return params_of
    if not gathers and not narrow and not moves:
        return lambda learner: _copied(learner.trainable, apart(params_of(learner)))
    cast = functools.partial(as_computed, model)
    if moves:
        layouts = param_layout(model, mesh), sampling_layout(model, sampling_mesh)
        move = jax.jit(lambda params: jax.tree.map(moved, cast(params), *layouts))
        return lambda learner: apart(move(params_of(learner)))
    if model.config.lora is None or gathers:
        layout = sampling_layout(model, sampling_mesh)
        sync = jax.jit(lambda params: apart(jax.lax.with_sharding_constraint(cast(params), layout)))
        return lambda learner: sync(params_of(learner))
    cast_adapters = jax.jit(cast, out_shardings=trained_layout(model, mesh))
    return lambda learner: apart(full_params(cast_adapters(learner.trainable), learner.frozen))


def _copied(donated: Params, params: Params) -> Params:
    """The parameters, with copies in the places of arrays that are in `donated` too."""
    shared = {id(leaf) for leaf in jax.tree.leaves(donated)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in shared else leaf, params)


_merge = jax.jit(merge)


def _follower(decay: float, layout: Any) -> Callable[[Params, Params], Params]:
    """(mean of what was trained, trained parameters) -> the mean after a step. It is overwritten.

    mean <- decay x mean + (1 - decay) x trained
    """

    def follow(average: Params, trainable: Params) -> Params:
        return jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, average, trainable)

    return jax.jit(follow, donate_argnums=0, out_shardings=layout)


def _update(
    program: Any,
    follow: Callable[[Params, Params], Params] | None,
    anchors: frozenset[str],
    learner: Learner,
    batches: Sequence[TrainBatch],
) -> tuple[Learner, Metrics]:
    """All updates of a step, which is counted once; metrics are merged over them."""
    frozen = read_by_update(learner, anchors)
    changing, measured = [learner.trainable, learner.opt_state, learner.objective_state], []
    for batch in batches:
        *changing, metrics = program(*changing, frozen, batch)
        measured.append(metrics)
    trainable, opt_state, objective_state = changing
    if follow is not None:
        average = follow(learner.frozen["ema"], trainable)
        learner = dataclasses.replace(learner, frozen={**learner.frozen, "ema": average})
    learner = dataclasses.replace(
        learner,
        step=learner.step + 1,
        trainable=trainable,
        opt_state=opt_state,
        objective_state=objective_state,
    )
    last = {"weights/norm": measured[-1]["weights/norm"]}
    return learner, functools.reduce(_merge, measured) | last


def _update_program(
    settings: Pass,
    objective: Objective,
    balance: Balance,
    optimizer: optax.GradientTransformation,
    measure: Callable[..., Metrics],
    skips: bool,
) -> Any:
    """One optimizer step on the gradient of a whole batch.

    Without a live sample the optimizer steps with a gradient of 0, or, with `skips`, only its
    schedule advances. If gradient, loss, log-probs or entropy are not finite, it
    stays as it is. Both are counted and change nothing that penalties remember. The norm of the
    parameters is taken before and after: it is not finite if one of them is not.
    """
    model, mesh = settings.model, settings.mesh

    def run(
        trainable: Params, opt_state: Any, objective_state: Any, anchors: Any, batch: TrainBatch
    ):
        compute_loss = functools.partial(_loss, settings, objective, objective_state, anchors)
        measure_now = functools.partial(measure, objective_state)
        head = head_sums(model, mesh, objective.per_token)
        if objective.reads_batch:
            current = full_params(trainable, anchors)
            batch = _with_batch_fields(settings, objective.batch_fields, current, batch)
        compute_loss, batch, move = even_out(balance, model, compute_loss, batch)
        loss, grads, metrics = _accumulate(
            compute_loss, measure_now, model, mesh, head, trainable, batch
        )
        norm = optax.tree_utils.tree_norm(grads)
        totals = [metrics[name].total for name in FINITE]
        finite = jnp.isfinite(jnp.stack([norm, loss, *totals])).all()
        weights_before = optax.tree_utils.tree_norm(trainable)
        no_live = batch.num_live == 0
        old = trainable, opt_state, objective_state
        new = _take(optimizer, objective, skips, move, old, grads, metrics, finite, no_live)
        weights_after = optax.tree_utils.tree_norm(new[0])
        measured = {"loss": loss, "grad_norm": norm, "weights/norm": weights_after}
        measured |= {
            "skipped_updates/no_live_sample": no_live,
            "skipped_updates/not_finite": ~finite,
        }
        # Of several updates the largest, not the mean: one is enough to break a run.
        growth = {"weights/growth": maximum(weights_after / weights_before)}
        return *new, metrics | {name: mean(value) for name, value in measured.items()} | growth

    layout = trained_layout(model, mesh), opt_layout(model, mesh, optimizer)
    layout = (*layout, sharding.replicated(mesh), sharding.replicated(mesh))
    return jax.jit(run, donate_argnums=(0, 1), out_shardings=layout)


def _with_batch_fields(
    settings: Pass, batch_fields: Sequence[BatchField], params: Params, batch: TrainBatch
) -> TrainBatch:
    """The batch with what its loss reads of all of it, at these parameters.

    Of all micro-batches, in a pass of its own before that with gradients: a group may be split over
    several.
    """
    (logp,) = score_batch(settings, params, batch, {"logp": SCORES["trainer_logp"]}).values()
    number = dense_ids(batch.prompt.reshape(-1)).reshape(batch.prompt.shape)
    row_group = jnp.take_along_axis(number, batch.row_prompt, -1)[..., None]
    group = jnp.broadcast_to(row_group, batch.mask.shape)
    tokens = _tokens(batch, logp, {})
    fields = {field.name: field.compute(tokens, group, number.size) for field in batch_fields}
    return dataclasses.replace(batch, fields={**batch.fields, **fields})


def _take(
    optimizer: optax.GradientTransformation,
    objective: Objective,
    skips: bool,
    move: Move,
    old: tuple[Params, Any, Any],
    grads: Params,
    metrics: Metrics,
    finite: Array,
    no_live: Array,
) -> tuple[Params, Any, Any]:
    """Parameters, optimizer's and objective's state after the step; `old`, if it is not taken."""
    trainable, opt_state, objective_state = old

    def skip(_):
        stepped = optimizer.update(grads, opt_state, trainable)[1]
        return trainable, copy_schedule(stepped, opt_state), objective_state

    def step(_):
        updates, new_state = optimizer.update(grads, opt_state, trainable)
        observed = objective.observe(objective_state, metrics)
        observed = _where(no_live, objective_state, observed)  # nothing was measured
        return move(optax.apply_updates(trainable, updates)), new_state, observed

    branches, way = [lambda _: old, step], jnp.where(finite, 1, 0)
    if skips:
        branches, way = [*branches, skip], jnp.where(finite & no_live, 2, way)
    return jax.lax.switch(way, branches, None)


def _where(condition: Array, first: Any, second: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, condition), first, second)


def _accumulate(
    compute_loss: Callable[..., Any],
    measure: Callable[..., Metrics],
    model: Model,
    mesh: Mesh,
    head: tuple[Params, Params],
    trainable: Params,
    batch: TrainBatch,
):
    """Loss, gradients and metrics summed over the live micro-batches, in one loop.

    Over the axis "data", across which a network may be slow, gradients are added up after the loop,
    once; over "fsdp" in each micro-batch, since each device has room for its part of them only. Of
    the head each bin has its whole gradient anyway, and it is added up after the loop too.

    Args:
      head: `head_sums`.
    """
    first, layout = jnp.int32(0), trained_layout(model, mesh)
    if mesh.shape["data"] > 1:
        layout = jax.tree.map(sharding.layout_per_part, layout)
    # Jitted so that it is traced once, for its shapes and for the loop.
    run_micro_batch = jax.jit(
        functools.partial(_micro_batch, compute_loss, measure, mesh), inline=True
    )

    def body(index: Array, carry):
        loss, grads, metrics, head_carry = run_micro_batch(trainable, batch, index, carry[3])
        summed = jax.tree.map(jnp.add, carry[1], grads)
        return carry[0] + loss, summed, merge(carry[2], metrics), head_carry

    def zeros(leaf: Any, layout: Any) -> Array:
        wide = jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
        return jax.lax.with_sharding_constraint(wide, layout)

    sums = jax.tree.map(zeros, *head)
    loss, grads, metrics, _ = jax.eval_shape(run_micro_batch, trainable, batch, first, sums)
    start = jnp.zeros_like(loss), jax.tree.map(zeros, grads, layout), empty_like(metrics), sums
    loss, grads, metrics, sums = jax.lax.fori_loop(first, batch.num_live, body, start)
    return loss, _over_devices(model, mesh, grads, sums), metrics


def _micro_batch(
    compute_loss: Callable[..., Any],
    measure: Callable[..., Metrics],
    mesh: Mesh,
    trainable: Params,
    batch: TrainBatch,
    index: Array,
    head: Params,
) -> tuple[Array, Params, Metrics, Params]:
    """Loss, gradients, metrics of micro-batch `index`, and `head_sums` with what it adds to them.

    Where the mesh has several parts of "data" gradients are [data, ...], each of one part.
    """
    micro, with_gradient = micro_batch(batch, index), jax.value_and_grad(compute_loss, has_aux=True)
    by_parts = mesh.shape["data"] > 1
    if by_parts:
        with_gradient = sharding.over_data(mesh, with_gradient)
    (loss, outputs), grads = with_gradient(trainable, (micro, head), fullest(micro))
    if by_parts:  # [data, fsdp, ...] as [D, ...]
        outputs = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)
    logp, fields, head = outputs
    return loss.sum(), grads, measure(micro, logp, fields), head


def _over_devices(model: Model, mesh: Mesh, grads: Params, head: Params) -> Params:
    """Gradients whole, laid out as the parameters: what the loop left apart is added up."""
    layout = trained_layout(model, mesh)
    if mesh.shape["data"] > 1:
        added_up = jax.tree.map(lambda leaf: leaf.sum(0), grads)
        grads = jax.lax.with_sharding_constraint(added_up, layout)
    for name, bin_sums in head.items():
        summed = jax.tree.map(sharding.sum_over_bins, bin_sums, layout[name])
        grads = grads | {name: jax.tree.map(jnp.add, grads[name], summed)}
    return grads


def expected_rounding(is_cut: bool, dtypes: Collection[str], platform: str) -> Rounding | None:
    """The entry of ROUNDING for a run; None where its samples come from a cut distribution.

    Args:
      dtypes: of the model, and of the keys, values and weights that the sampler keeps.
    """
    if is_cut:  # they differ by the probability that was cut
        return None
    # Accelerators multiply float32 in fewer bits unless JAX is set otherwise.
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    exact = precision in ("highest", "float32")
    size = min(jnp.dtype(dtype).itemsize for dtype in dtypes)
    if size == 1:
        return ROUNDING["8 bits"]
    return ROUNDING["float32" if size >= 4 and (exact or platform == "cpu") else "bfloat16"]


def _loss(
    settings: Pass,
    objective: Objective,
    objective_state: dict[str, Any],
    anchors: dict[str, Params],
    trainable: Params,
    by_bin: tuple[TrainBatch, Params],
    fullest: Array,
) -> tuple[Array, tuple[Array, dict[str, Array], Params]]:
    """The loss of a micro-batch, and what its pass found: log-probs and fields [D, R, Q].

    Args:
      by_bin: the micro-batch, and what it adds the head's gradient to, if anything: `head_sums`.
    """
    micro, head = by_bin
    params = full_params(trainable, anchors)
    if objective.per_token:
        sums = next(iter(head.values()), None)
        arguments = (settings, objective, params, micro, objective_state, fullest, sums)
        loss, logp, fields, sums = loss_of_tokens(*arguments)
        return loss, (logp, fields, dict.fromkeys(head, sums))
    reference = anchors.get("reference")
    reference = None if reference is None else full_params(reference, anchors)
    arguments = settings, params, micro, objective.entropy, reference, fullest, objective.counts
    outputs = forward(*arguments)
    tokens = _tokens(micro, *outputs)
    per_token, _ = token_loss(objective.surrogate, objective.penalties, tokens, objective_state)
    return jnp.where(micro.mask, micro.weight * per_token, 0).sum(), (*outputs, head)


def _measure(
    objective: Objective,
    rounding: Callable[[], Rounding | None],
    unmeasured: Collection[str],
    objective_state: dict[str, Any],
    micro: TrainBatch,
    logp: Array,
    fields: dict[str, Array],
) -> Metrics:
    """The metrics of a micro-batch, from what its pass found, but for those `unmeasured`."""
    tokens = _tokens(micro, logp, fields)
    _, metrics = token_loss(objective.surrogate, objective.penalties, tokens, objective_state)
    metrics = {name: value for name, value in metrics.items() if name not in unmeasured}
    behavior, sampled_now = micro.fields["behavior_logp"], micro.fields["sampled_now"]
    agreement = diagnostics.agreement_metrics(
        tokens.logp, behavior, micro.mask, sampled_now, rounding()
    )
    # An entropy term reports the entropy itself, which then replaces ours.
    if REROUTED in fields:
        agreement["routing/rerouted"] = mean(fields[REROUTED], micro.mask)
    if AUX_LOSS in fields:
        agreement["routing/aux_loss"] = mean(fields[AUX_LOSS], counted(micro))
    return {"entropy": mean(fields["policy_entropy"], micro.mask)} | agreement | metrics


def _tokens(micro: TrainBatch, logp: Array, fields: dict[str, Array]) -> Tokens:
    """A micro-batch as losses read it."""
    return Tokens(
        logp=jnp.where(micro.mask, logp, 0),
        proximal_logp=micro.proximal_logp,
        advantage=micro.advantage,
        mask=micro.mask,
        segment=micro.segment,
        fields=micro.fields | fields,
    )
