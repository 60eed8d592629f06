"""What a run's programs are built from, and the forward pass that scoring and updating share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.core.records import EXPERTS
from jaxgrpo.core.scores import OF_ANSWERS, POLICIES, SCORES, Score, policy_field
from jaxgrpo.core.types import WEIGHTS, Learner, Params, TrainBatch
from jaxgrpo.losses import Objective, Tokens, token_loss
from jaxgrpo.models import logprobs, lora, sharding
from jaxgrpo.models.api import Model
from jaxgrpo.models.attention import XLA, Kernel
from jaxgrpo.models.decoder import Remat, tokens_with_text
from jaxgrpo.models.distributions import full_kl, likeliest, shortened
from jaxgrpo.models.logprobs import Entropy, Head, token_logprobs
from jaxgrpo.models.products import rounded
from jaxgrpo.models.sharding import AnyMesh
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.update import spectrum
from jaxgrpo.update.balance import Balance
from jaxgrpo.update.flat import (
    Flat,
    filled,
    flatten,
    flatten_rows,
    hidden_states,
    in_rows,
    recorded_support,
)
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
    logits_per_chunk: int | None = None  # of the update's passes, as in `logprobs.token_logprobs`
    remat: Remat = "full"  # that the model is built with
    balance: Balance = Balance()  # of experts
    trains_texts: bool = False  # samples are texts of the data, which no policy drew

    @property
    def samples_on(self) -> Mesh:
        """The mesh of the sampler and of evaluation."""
        return self.mesh if self.sampling_mesh is None else self.sampling_mesh

    @property
    def drawn_at(self) -> float | None:
        """The temperature of the draws; None: no policy drew the samples."""
        return None if self.trains_texts else self.sampling.temperature

    @property
    def has_two_meshes(self) -> bool:
        return self.samples_on != self.mesh

    @property
    def passes(self) -> Pass:
        """What scoring and update compute micro-batches with."""
        # Greedy sampling has no distribution: its ratios are those of the model itself.
        temperature = self.sampling.temperature or 1.0
        return Pass(
            self.model,
            self.mesh,
            self.geometry.tokens,
            temperature,
            self.kernel,
            self.logits_per_chunk,
            replays=EXPERTS in dict(self.geometry.records),
        )

    @property
    def update_needs(self) -> frozenset[str]:
        """The fields that must be there before the update."""
        return self.objective.needs | ({EXPERTS} if any(self.balance) else set[str]())

    @property
    def scored(self) -> frozenset[str]:
        """The fields that passes of models have to give, for the method or for each other."""
        read = frozenset((self.chain.needs | self.objective.needs) & self.scores.keys())
        return read | self.naming(read)

    def naming(self, names: Collection[str]) -> set[str]:
        """The scores that name the tokens of these."""
        return {field for name in names if (field := self.scores[name].named_by)}

    @property
    def policies(self) -> list[str]:
        """What the method reads beside the trained policy, of `scores.POLICIES`."""
        names = {policy for name in self.scored for policy in self.scores[name].scored_by}
        names |= {OF_ANSWERS[name].policy for name in self.chain.needs & OF_ANSWERS.keys()}
        return sorted((names & {*POLICIES} - {"trainer"}) | self.objective.anchors)

    def policy_model(self, policy: str) -> Model:
        """The model of a policy, or of a teacher by its path."""
        teacher = self.teachers.get(policy)
        return self.model if teacher is None else teacher.model

    def score_pass(self, score: Score, policy: str) -> Pass:
        """What a pass of a policy that gives a score is computed with."""
        settings = self.passes
        is_trainer = policy == "trainer" and score.prompt is None
        settings = settings._replace(replays=settings.replays and is_trainer)
        if teacher := self.teachers.get(policy):
            settings = settings._replace(model=teacher.model, kernel=teacher.kernel)
        temperature = settings.temperature if score.temperature is None else score.temperature
        return settings._replace(temperature=temperature)


class Teacher(NamedTuple):
    """A model other than the run's own, of the same tokenizer, that is not trained."""

    model: Model
    kernel: Kernel = XLA


Unembed = Callable[[Array], Array]
"""hidden -> logits"""


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
    distributions: Collection[str] = (),
) -> tuple[Array, dict[str, Array]]:
    """One micro-batch under `params`, against the whole distributions of `reference` if given.

    Args:
      distributions: fields of likeliest tokens, of which there is a `scores.policy_field` too.
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
        count=filled(flat, fullest),
        support=recorded_support(micro, flat),
    )
    fields = {} if values is None else {"policy_entropy": values}
    fields |= rerouted
    unembed = functools.partial(model.unembed, params)
    for name in distributions:
        ids = _named_tokens(micro, flat, name)
        options: Any = {"temperature": temperature, "logits_per_chunk": logits_per_chunk}
        fields[policy_field(name)] = shortened(unembed, hidden, ids, **options)
    if reference is not None:
        fields["full_kl"], fields["full_kl_clamped"] = full_kl(
            unembed,
            hidden,
            functools.partial(model.unembed, reference),
            hidden_states(model, reference, micro, flat, kernel)[0],
            temperature=temperature,
            logits_per_chunk=logits_per_chunk,
        )
    return jax.tree.map(functools.partial(in_rows, micro, flat), (logp, fields))


def _named_tokens(micro: TrainBatch, flat: Flat, name: str) -> Array:
    """The token ids [D, N, k] of a field of likeliest tokens, at the flat tokens."""
    return flatten_rows(flat, micro.fields[name])[..., 0, :-1].astype(jnp.int32)


def score(
    settings: Pass, params: Params, micro: TrainBatch, scores: Mapping[str, Score]
) -> dict[str, Array]:
    """The scores of a micro-batch by one pass, [D, R, Q] each, 0 at padding; no gradient."""
    model, mesh, size, temperature, kernel, logits_per_chunk, replays = settings
    flat = flatten(micro, size)
    hidden, _ = hidden_states(model, params, micro, flat, kernel, replays)
    quantities = {score.quantity for score in scores.values()}
    head = output_head(model, mesh, params)
    unembed = functools.partial(head.unembed, head.as_read(head.weights))
    values = token_values(settings, head, unembed, hidden, micro, flat, quantities)
    rows, fields = functools.partial(in_rows, micro, flat), {}
    for name, entry in scores.items():
        if entry.quantity == "effective_rank":
            fields[name] = spectrum.ranks_along(mesh, rows(hidden), micro.segment, entry.stride)
        elif entry.quantity == "likeliest":
            ids = _named_tokens(micro, flat, entry.named_by) if entry.named_by else None
            sizes: Any = {"count": entry.count, "logits_per_chunk": logits_per_chunk}
            sizes["shards"] = mesh.shape["tensor"]
            top = likeliest(unembed, hidden, ids=ids, temperature=temperature, **sizes)
            fields[name] = rows(top)
        else:
            fields[name] = rows(values[entry.quantity])
    return fields


def token_values(
    settings: Pass,
    head: Head | Unembed,
    unembed: Unembed,
    hidden: Array,
    micro: TrainBatch,
    flat: Flat,
    quantities: Set[str],
) -> dict[str, Array]:
    """Those of some `scores.QUANTITIES` that are a number for each target, [D, N]; no gradient.

    Args:
      head: what gives log-probs, as `logprobs.token_logprobs` takes it.
      unembed: what gives the others.
    """
    temperature, logits_per_chunk = settings.temperature, settings.logits_per_chunk
    values: dict[str, Any] = {}
    drawn_among: Any = {"count": flat.count, "support": recorded_support(micro, flat)}
    if quantities & {"logp", "entropy"}:
        values["logp"], values["entropy"] = token_logprobs(
            head,
            hidden,
            flat.targets,
            temperature=temperature,
            entropy="value" if "entropy" in quantities else "none",
            logits_per_chunk=logits_per_chunk,
            **drawn_among,
        )
    if "rank" in quantities:
        values["rank"] = logprobs.token_rank(unembed, hidden, flat.targets)
    if "collision" in quantities:
        # With f(x) = logsumexp(z / x) the sum of squares is exp(f(x / 2) - 2 f(x)), and z goes.
        warm, cold = (
            token_logprobs(head, hidden, flat.targets, temperature=x, **drawn_among)[0]
            for x in (temperature, temperature / 2)
        )
        values["collision"] = jnp.exp(jnp.minimum(2 * warm - cold, 0))
    config = settings.model.config
    numbers = {"confidence": logprobs.LIKELIEST, "certainty": config.vocab_size}
    for quantity in sorted(quantities & numbers.keys()):
        values[quantity] = logprobs.token_confidence(
            unembed,
            hidden,
            k=numbers[quantity],
            has_text=tokens_with_text(config.vocab_size, config.without_text),
            shards=settings.mesh.shape["tensor"],
            temperature=temperature,
        )
    return values


def score_batch(
    settings: Pass, params: Params, batch: TrainBatch, scores: Mapping[str, Score]
) -> dict[str, Array]:
    """The scores of a batch by one pass, [K, D, R, Q, ...]; 0 in micro-batches not live."""
    return in_micro_batches(lambda micro: score(settings, params, micro, scores), batch)


def in_micro_batches(
    function: Callable[[TrainBatch], dict[str, Array]], batch: TrainBatch
) -> dict[str, Array]:
    """What a function gives for each micro-batch, side by side; 0 for those that are not live."""
    first = jnp.int32(0)

    # Jitted so that it is traced once, for its shapes and for the loop.
    @functools.partial(jax.jit, inline=True)
    def values(index: Array) -> dict[str, Array]:
        return function(micro_batch(batch, index))

    def body(index: Array, carry: Any) -> Any:
        return {name: carry[name].at[index].set(value) for name, value in values(index).items()}

    shapes = jax.eval_shape(values, first)
    count = len(batch.tokens)
    start = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), shapes)
    return jax.lax.fori_loop(first, batch.num_live, body, start)


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
      fullest: as in `forward`.
      sums: as in `logprobs.loss_of_tokens`.
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
        count=filled(flat, fullest),
        sums=sums,
        support=recorded_support(micro, flat),
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
        narrow = jax.tree.map(lambda x, spec: rounded(x, spec.dtype), weights, model.shapes[name])
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
    rules = sharding.sampling_rules(mesh, model.config.kinds)
    return sharding.param_shardings(
        mesh, model.axes, model.shapes, rules, keys="tensor, fsdp or sampling_tensor"
    )


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
