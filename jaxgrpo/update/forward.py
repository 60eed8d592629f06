"""What a run's programs are built from, and the forward pass that scoring and updating share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.core.scores import OF_ANSWERS, POLICIES, SCORES, Score
from jaxgrpo.core.types import WEIGHTS, Learner, Params, TrainBatch
from jaxgrpo.losses import Objective, Tokens, token_loss
from jaxgrpo.models import delta, logprobs, lora, routing, sharding
from jaxgrpo.models.api import (
    AttentionKind,
    Caller,
    DeltaKind,
    Model,
    custom_vjp,
    memory_per_layer,
    stacked_memory,
)
from jaxgrpo.models.attention import XLA, Kernel
from jaxgrpo.models.decoder import Remat
from jaxgrpo.models.logprobs import Entropy, Head, full_kl, token_logprobs
from jaxgrpo.models.recurrence import DeltaInputs
from jaxgrpo.models.sharding import AnyMesh
from jaxgrpo.rollout.dialogue import FORK
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.update import spectrum
from jaxgrpo.update.moments import map_params
from jaxgrpo.update.packing import Geometry


class Blueprint(NamedTuple):
    """Everything static that the jitted functions of a run are built from."""

    model: Model
    chain: AdvantageTransform
    objective: Objective
    optimizer: optax.GradientTransformation
    geometry: Geometry
    sampling: SamplingSettings
    mesh: Mesh
    reward_weights: Mapping[str, float] | None = None  # of the logged reward; None: all 1
    compact: bool = True  # False keeps dead samples in the update: slower, the same result
    num_iterations: int = 1  # how often the rollouts of a step are trained on
    kernel: Kernel = XLA  # of attention: see models.attention.choose_kernel
    sampling_mesh: Mesh | None = None  # the same devices in the same order; None: `mesh`
    recipe: AdvantageTransform | None = None
    """The beginning of the chain that says which groups are live, without what loss.kl and
    loss.mismatch add; None: all of it"""
    on_no_live_sample: str = "step"  # of the optimizer with a gradient of 0; "skip": the schedule's
    scores: Mapping[str, Score] = SCORES  # that chain and objective may need
    teachers: Mapping[str, Teacher] = {}  # path -> a model that scores read
    answer_cuts: int = 4  # parts of a thought behind which a reference answer is scored
    ema_decay: float = 0.99  # of the policy "ema", where something reads it
    logits_per_chunk: int | None = None  # of the update's passes, as of `logprobs.token_logprobs`
    remat: Remat = "full"  # that the model is built with

    @property
    def samples_on(self) -> Mesh:
        """The mesh of the sampler and of evaluation."""
        return self.mesh if self.sampling_mesh is None else self.sampling_mesh

    @property
    def has_two_meshes(self) -> bool:
        return self.samples_on != self.mesh

    @property
    def passes(self) -> Pass:
        """What scoring and update compute micro-batches with."""
        # Greedy sampling has no distribution: its ratios are those of the model itself.
        temperature = self.sampling.temperature or 1.0
        sizes = self.geometry.tokens, temperature, self.kernel, self.logits_per_chunk
        return Pass(self.model, self.mesh, *sizes, replays=self.geometry.routed is not None)

    @property
    def scored(self) -> frozenset[str]:
        """The fields that passes of models have to give."""
        return frozenset((self.chain.needs | self.objective.needs) & self.scores.keys())

    @property
    def policies(self) -> list[str]:
        """What the method reads beside the trained policy, of `scores.POLICIES`."""
        names = {self.scores[name].policy for name in self.scored}
        names |= {OF_ANSWERS[name].policy for name in self.chain.needs & OF_ANSWERS.keys()}
        return sorted((names & {*POLICIES} - {"trainer"}) | self.objective.anchors)

    def policy_model(self, policy: str) -> Model:
        """The model of a policy, or of a teacher by its path."""
        teacher = self.teachers.get(policy)
        return self.model if teacher is None else teacher.model

    def score_pass(self, score: Score) -> Pass:
        """What a pass that gives a score is computed with."""
        settings = self.passes
        is_trainer = score.policy == "trainer" and score.prompt is None
        settings = settings._replace(replays=settings.replays and is_trainer)
        if teacher := self.teachers.get(score.policy):
            settings = settings._replace(model=teacher.model, kernel=teacher.kernel)
        temperature = settings.temperature if score.temperature is None else score.temperature
        return settings._replace(temperature=temperature)


class Teacher(NamedTuple):
    """A model other than the run's own, of the same tokenizer, that is not trained."""

    model: Model
    kernel: Kernel = XLA


class Pass(NamedTuple):
    """What a pass over micro-batches is computed with."""

    model: Model
    mesh: Mesh
    tokens: int  # N, of each bin
    temperature: float  # of the policy that is scored
    kernel: Kernel = XLA
    logits_per_chunk: int | None = None
    replays: bool = False  # recorded experts, where the micro-batch has them


def forward(
    settings: Pass,
    params: Params,
    micro: TrainBatch,
    entropy: Entropy = "none",
    reference: Params | None = None,
    fullest: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """One micro-batch under `params`, against the whole distributions of `reference` if given.

    Args:
      fullest: tokens of the fullest bin's rows, where `micro` has not all bins; None: it has.

    Returns: (log-probs of the chosen tokens, the quantities of OF_PASS and what goes with them),
    [D, R, Q] each, 0 at padding. There is a policy_entropy where `entropy` asks for it, with
    gradient for "gradient" only.
    """
    model, mesh, size, temperature, kernel, logits_per_chunk, replays = settings
    flat = flatten(micro, size)
    hidden, rerouted = hidden_states(model, params, micro, flat, kernel, replays)
    logp, values = token_logprobs(
        output_head(model, mesh, params),
        hidden,
        flat.targets,
        temperature=temperature,
        entropy=entropy,
        logits_per_chunk=logits_per_chunk,
        count=_filled(flat, fullest),
    )
    fields = {} if values is None else {"policy_entropy": values}
    fields |= rerouted
    if reference is not None:
        fields["full_kl"], fields["full_kl_clamped"] = full_kl(
            functools.partial(model.unembed, params),
            hidden,
            functools.partial(model.unembed, reference),
            hidden_states(model, reference, micro, flat, kernel)[0],
            temperature=temperature,
            logits_per_chunk=logits_per_chunk,
        )
    return jax.tree.map(functools.partial(in_rows, micro, flat), (logp, fields))


def score(
    settings: Pass, params: Params, micro: TrainBatch, scores: Mapping[str, Score]
) -> dict[str, Array]:
    """The scores of a micro-batch by one pass, [D, R, Q] each, 0 at padding; no gradient."""
    model, mesh, size, temperature, kernel, logits_per_chunk, replays = settings
    flat = flatten(micro, size)
    hidden, _ = hidden_states(model, params, micro, flat, kernel, replays)
    quantities = {score.quantity for score in scores.values()}
    head, values = output_head(model, mesh, params), {}
    if quantities & {"logp", "entropy"}:
        values["logp"], values["entropy"] = token_logprobs(
            head,
            hidden,
            flat.targets,
            temperature=temperature,
            entropy="value" if "entropy" in quantities else "none",
            logits_per_chunk=logits_per_chunk,
            count=flat.count,
        )
    if "rank" in quantities:
        unembed = functools.partial(head.unembed, head.as_read(head.weights))
        values["rank"] = logprobs.token_rank(unembed, hidden, flat.targets)
    if "confidence" in quantities:
        unembed = functools.partial(head.unembed, head.as_read(head.weights))
        number = min(logprobs.LIKELIEST, model.config.num_drawable)
        values["confidence"] = logprobs.token_confidence(
            unembed, hidden, k=number, temperature=temperature
        )
    rows, fields = functools.partial(in_rows, micro, flat), {}
    for name, entry in scores.items():
        if entry.quantity == "effective_rank":
            fields[name] = spectrum.ranks_along(mesh, rows(hidden), micro.segment, entry.stride)
        else:
            fields[name] = rows(values[entry.quantity])
    return fields


def loss_of_tokens(
    settings: Pass,
    objective: Objective,
    params: Params,
    micro: TrainBatch,
    states: Mapping[str, Any],
    fullest: Array | None = None,
    sums: Any = None,
) -> tuple[Array, Array, dict[str, Array], Any]:
    """(loss of a micro-batch, what `forward` returns, without gradient, and sums), in one pass.

    For an objective whose loss of a token depends on no other token.

    Args:
      fullest: as of `forward`.
      sums: as of `logprobs.loss_of_tokens`.
    """
    model, mesh, size, temperature, kernel, logits_per_chunk, replays = settings
    flat = flatten(micro, size)
    hidden, rerouted = hidden_states(model, params, micro, flat, kernel, replays)
    names = sorted(objective.fields_read & micro.fields.keys())
    token_inputs = {
        **{name: getattr(micro, name) for name in ("proximal_logp", "advantage", "mask", "weight")},
        "fields": {name: micro.fields[name] for name in names},
    }

    loss, logp, entropy, sums = logprobs.loss_of_tokens(
        output_head(model, mesh, params),
        hidden,
        flat.targets,
        functools.partial(_cost, objective),
        jax.tree.map(functools.partial(flatten_rows, flat), token_inputs),
        states,
        temperature=temperature,
        entropy=objective.entropy,
        logits_per_chunk=logits_per_chunk,
        count=_filled(flat, fullest),
        sums=sums,
    )
    rows = functools.partial(in_rows, micro, flat)
    fields = {} if entropy is None else {"policy_entropy": rows(entropy)}
    return loss, rows(logp), fields | jax.tree.map(rows, rerouted), sums


def _cost(
    objective: Objective, logp: Array, entropy: Array | None, token_inputs: Any, states: Any
) -> Array:
    """The weighted loss of each token, 0 where it does not count: `logprobs.Cost`."""
    mask, pass_fields = token_inputs["mask"], {} if entropy is None else {"policy_entropy": entropy}
    tokens = Tokens(
        logp=jnp.where(mask, logp, 0),
        proximal_logp=token_inputs["proximal_logp"],
        advantage=token_inputs["advantage"],
        mask=mask,
        segment=mask.astype(jnp.int32),
        fields={**token_inputs["fields"], **pass_fields},
    )
    per_token, _ = token_loss(objective.surrogate, objective.penalties, tokens, states)
    return jnp.where(mask, token_inputs["weight"] * per_token, 0)


def head_name(model: Model) -> str:
    """The parameters that are the output head."""
    return "embed" if model.config.tie_embeddings else "head"


def output_head(model: Model, mesh: Mesh, params: Params) -> Head:
    """The output head, gathered over fsdp in the model's dtype once for all chunks of tokens."""
    name = head_name(model)
    training_layout = param_layout(model, mesh)[name]
    gathered_layout = param_layout(model, mesh, sharding.SAMPLING)[name]

    def as_read(weights: Params) -> Params:
        narrow = jax.tree.map(
            lambda leaf, spec: leaf.astype(spec.dtype), weights, model.shapes[name]
        )
        return jax.lax.with_sharding_constraint(narrow, gathered_layout)

    return Head(
        weights=params[name],
        unembed=lambda weights, hidden: model.unembed({name: weights}, hidden),
        as_read=as_read,
        as_held=lambda sums: jax.tree.map(sharding.sum_over_bins, sums, training_layout),
    )


def head_sums(model: Model, mesh: Mesh, per_token: bool) -> tuple[Params, Params]:
    """(shapes, layouts) of what the passes of an update add the head's gradient to, bin by bin.

    {name of the head: [D, ...] as its weights}; {} where it is not trained, or passes over the
    logits are two and the gradient of each micro-batch is added up by itself.
    """
    if model.config.lora is not None or not per_token:
        return {}, {}
    name, bins = head_name(model), sharding.num_bins(mesh)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((bins, *leaf.shape), leaf.dtype), model.shapes[name]
    )
    gathered = param_layout(model, mesh, sharding.SAMPLING)[name]
    return {name: shapes}, {name: jax.tree.map(sharding.layout_per_bin, gathered)}


class Flat(NamedTuple):
    """The real tokens of a micro-batch side by side: rows first, then prompts, then nothing.

    Layers and head compute these N tokens. Rows and prompts, with their padding, are only for
    attention: their positions, [D, R * Q] and [D, A * S], are one dimension of size M here.
    """

    tokens: Array  # [D, N] int32
    position: Array  # [D, N] int32
    targets: Array  # [D, N] int32, of the rows
    origin: Array  # [D, N] int32, the place in M of each token; M: none
    place: Array  # [D, M] int32, the token of each place in M; N: padding
    count: Array  # [D] int32, tokens of the rows


def flatten(micro: TrainBatch, size: int) -> Flat:
    """The tokens of a micro-batch that are real, in `size` places of each bin."""
    bins, prompts, width = micro.prompt_tokens.shape
    position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (bins, prompts, width))
    real = _joined(micro.segment > 0, position < micro.prompt_length[..., None])
    place = jnp.where(real, jnp.cumsum(real, 1, dtype=jnp.int32) - 1, size)
    indices = jnp.arange(real.shape[1], dtype=jnp.int32)
    no_origin = jnp.full(size, real.shape[1], jnp.int32)
    origin = jax.vmap(lambda place: no_origin.at[place].set(indices, mode="drop"))(place)
    return Flat(
        tokens=_picked(_joined(micro.tokens, micro.prompt_tokens), origin),
        position=_picked(_joined(micro.position, position), origin),
        targets=_picked(micro.targets.reshape(bins, -1), origin),
        origin=origin,
        place=place,
        count=(micro.segment > 0).sum((1, 2), dtype=jnp.int32),
    )


def fullest(micro: TrainBatch) -> Array:
    """[]: the tokens of the fullest bin's rows."""
    return (micro.segment > 0).sum((1, 2), dtype=jnp.int32).max()


def _filled(flat: Flat, fullest: Array | None) -> Array:
    """[D]: tokens of rows that the head computes. It takes as many chunks as the fullest bin needs,
    and the parts of `sharding.over_data` are computed in one loop, so in all of them the same."""
    return flat.count if fullest is None else jnp.broadcast_to(fullest, flat.count.shape)


def hidden_states(
    model: Model,
    params: Params,
    micro: TrainBatch,
    flat: Flat,
    kernel: Kernel = XLA,
    replays: bool = False,
) -> tuple[Array, dict[str, Array]]:
    """Hidden states [D, N, E]: each prompt once, and rows that read the keys of their prompts.

    Where it replays recorded experts, of rows alone, there is REROUTED [D, N] beside them.
    """
    bins, prompts, width = micro.prompt_tokens.shape
    rows, places = micro.segment.shape[1:], micro.segment[0].size
    position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (bins, prompts, width))
    prompt_real = position < micro.prompt_length[..., None]
    attend_prompts = kernel.causal(position, prompt_real)
    segment, alone = micro.segment, ()
    if (fork := micro.fields.get(FORK)) is not None:  # a rewritten conversation is a segment too
        segment = jnp.where(segment > 0, segment * segment.shape[-1] + fork, 0)
        alone = (fork > 0,)
    placed = segment, micro.position, micro.row_prompt, micro.prompt_length
    attend_rows = kernel.rows_with_prefix(*placed, *alone)
    recur_packed = delta.packed(micro.segment, micro.row_prompt, prompt_real)

    def apart(leaf: Array) -> tuple[Array, Array]:
        """[D, N, ...] as rows [D, R, Q, ...] and prompts [D, A, S, ...]."""
        leaf = moved(leaf, flat.place, flat.origin)
        row_part = leaf[:, :places].reshape(bins, *rows, *leaf.shape[2:])
        return row_part, leaf[:, places:].reshape(bins, prompts, width, *leaf.shape[2:])

    def together(row_out: Array, prompt_out: Array) -> Array:
        return moved(_joined(row_out, prompt_out), flat.origin, flat.place)

    def attend(query: Array, key: Array, value: Array, memory: None, kind: AttentionKind):
        row_parts, prompt_parts = zip(*map(apart, (query, key, value)), strict=True)
        prompt_out, prefix = attend_prompts(*prompt_parts, memory, kind)
        row_out, _ = attend_rows(*row_parts, prefix, kind)
        return together(row_out, prompt_out), memory

    def recur(inputs: DeltaInputs, memory: None, kind: DeltaKind):
        del kind
        row_parts, prompt_parts = zip(*map(apart, inputs[:5]), strict=True)
        parts = (DeltaInputs(*leaves, inputs.filters) for leaves in (row_parts, prompt_parts))
        return together(*recur_packed(*parts)), memory

    caller = Caller(attend, recur=recur)
    record = micro.fields.get(routing.EXPERTS) if replays else None
    if record is None:
        hidden, _ = model.apply(params, flat.tokens, flat.position, caller, None)
        return hidden, {}
    config = model.config
    # What is picked from nowhere is 0, which is an expert.
    record = _picked(record.reshape(bins, places, *record.shape[3:]) + 1, flat.origin) - 1
    memory = routing.with_records(config, (None,) * config.num_layers, record)
    caller, stacked = caller._replace(route=routing.replay), stacked_memory(config, memory)
    hidden, memory = model.apply(params, flat.tokens, flat.position, caller, stacked)
    _, others = routing.without_records(config, memory_per_layer(config, memory))
    return hidden, {REROUTED: jnp.stack(others).mean(0, dtype=jnp.float32)}


REROUTED = "rerouted"
"""Field of a pass: the share of layers whose router would have chosen other experts."""


def flatten_rows(flat: Flat, values: Array) -> Array:
    """Values [D, R, Q] of rows at the flat tokens [D, N]; 0 at those of prompts."""
    return _picked(values.reshape(len(values), -1), flat.origin)


def in_rows(micro: TrainBatch, flat: Flat, values: Array) -> Array:
    """Values [D, N, ...] of the flat tokens as rows [D, R, Q, ...]; 0 at padding."""
    place = flat.place[:, : micro.segment[0].size]
    return moved(values, place, flat.origin).reshape(*micro.segment.shape, *values.shape[2:])


@custom_vjp()
def moved(values: Array, source: Array, target: Array) -> Array:
    """Entries [D, m, ...] of values [D, n, ...] at source [D, m]; 0 where that is n or more.

    No entry is moved twice. So the gradient is moved back by `target` [D, n], the inverse of
    `source`, and not added up entry by entry.
    """
    del target
    return _picked(values, source)


def _moved(values: Array, source: Array, target: Array) -> tuple[Array, Array]:
    return _picked(values, source), target


moved.defvjp(_moved, lambda target, gradient: (_picked(gradient, target), None, None))


def _picked(values: Array, source: Array) -> Array:
    return jax.vmap(lambda row, index: row.at[index].get(mode="fill", fill_value=0))(values, source)


def _joined(rows: Array, prompts: Array) -> Array:
    """[D, R, Q, ...] and [D, A, S, ...] as one [D, R * Q + A * S, ...]."""
    parts = (leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:]) for leaf in (rows, prompts))
    return jnp.concatenate([*parts], axis=1)


def held_dtype(model: Model) -> str:
    """The dtype in which trained parameters are held, at least float32.

    bfloat16 has 8 bits: a step of 1e-6 from a weight of 0.02 would be rounded away.
    """
    return str(jnp.promote_types(model.config.dtype, jnp.float32))


def as_computed(model: Model, params: Params) -> Params:
    """Parameters, all or those that are trained, in the dtypes that the model computes in."""
    shapes = model.shapes if params.keys() == model.shapes.keys() else trained(model, model.shapes)
    return jax.tree.map(lambda leaf, spec: leaf.astype(spec.dtype), params, shapes)


def trained(model: Model, tree: Params) -> Params:
    """The part that is trained of a tree like the parameters: adapters, if the model has any."""
    return tree if model.config.lora is None else lora.split(tree)[0]


def full_params(params: Params, frozen: Mapping[str, Params]) -> Params:
    """The parameters of a policy: with adapters, those of its own and the weights of all."""
    return lora.join(params, frozen[WEIGHTS]) if WEIGHTS in frozen else params


def params_of(learner: Learner, name: str = "trainer") -> Params:
    """The parameters of one of a learner's policies, or of a teacher, as its model takes them."""
    policy = learner.trainable if name == "trainer" else learner.frozen[name]
    return full_params(policy, learner.frozen) if name in POLICIES else policy


def read_by_update(learner: Learner, anchors: Collection[str]) -> dict[str, Params]:
    """What is frozen and the update program reads: the anchors, and the weights under adapters."""
    names = {*anchors, *({WEIGHTS} & learner.frozen.keys())}
    return {name: learner.frozen[name] for name in sorted(names)}


def micro_batch(batch: TrainBatch, index: Array) -> TrainBatch:
    """Micro-batch `index` of a batch: every array without its leading K."""
    take = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)  # noqa: E731
    sliceable = dataclasses.replace(batch, num_live=jnp.zeros(batch.tokens.shape[0], jnp.int32))
    return jax.tree.map(take, sliceable)


def param_layout(model: Model, mesh: Mesh, rules: sharding.Rules = sharding.TRAINING) -> Params:
    """The shardings of the parameters."""
    return sharding.param_shardings(mesh, model.axes, model.shapes, rules)


def sampling_layout(model: Model, mesh: Mesh) -> Params:
    """The shardings of the parameters as the sampler reads them, on the mesh that it has."""
    arguments = (mesh, model.axes, model.shapes, sharding.SAMPLING)
    return sharding.param_shardings(*arguments, keys="tensor, fsdp or sampling_tensor")


def trained_layout(model: Model, mesh: Mesh) -> Params:
    """The shardings of what is trained."""
    return trained(model, param_layout(model, mesh))


def opt_layout(model: Model, mesh: AnyMesh, optimizer: optax.GradientTransformation) -> Any:
    """The shardings of the optimizer's state: moments as their parameters, the rest everywhere.

    A moment of another shape than its parameter's, as a row or column of adafactor's, is small.
    """
    replicated = sharding.replicated(mesh)
    shapes, axes = (trained(model, tree) for tree in (model.shapes, model.axes))
    return map_params(
        optimizer,
        lambda leaf, layout, param: layout if leaf.shape == param.shape else replicated,
        jax.eval_shape(optimizer.init, shapes),
        sharding.param_shardings(mesh, axes, shapes),
        shapes,
        transform_non_params=lambda _: replicated,
    )
