"""What a step costs at the least: operations, bytes of memory, bytes between devices.

All prompts and completions are as long as they may be, and every sample is live, so that a step
takes no more than this. The formulas are written out where they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxgrpo.core.chips import Chip
from jaxgrpo.core.types import Params
from jaxgrpo.models import sharding
from jaxgrpo.models.api import (
    EXPERT_MAPS,
    LAYERS,
    AttentionKind,
    DeltaKind,
    ExpertsKind,
    LayerKind,
    Model,
    ModelConfig,
)
from jaxgrpo.models.counts import activations, count_pieces, count_recurrence, count_weights
from jaxgrpo.models.logprobs import chunk_tokens
from jaxgrpo.planning.hlo import Collective
from jaxgrpo.planning.programs import Run, placed, sampler_params, scoring_passes
from jaxgrpo.planning.traffic import Traffic
from jaxgrpo.rollout.slots.capacity import Sizes, capacity, chunk_shape
from jaxgrpo.training import memory
from jaxgrpo.update import packing
from jaxgrpo.update.forward import sampling_layout
from jaxgrpo.update.packing import Geometry

RECOMPUTED = {"none": 0, "dots": 0, "attention": 1, "full": 1}
"""train.remat -> forward passes of the layers that a backward pass takes again."""


class Work(NamedTuple):
    """What one call of a program does, and how many calls a step makes. Over all devices."""

    calls: int
    flops: float  # of matrix products, without what is computed again
    executed: float  # with it
    read: float  # bytes of memory that each device reads and writes at the least
    loops: tuple[int, ...]  # trips of the loops whose end is computed, from the outermost


class Bound(NamedTuple):
    """Seconds of a step that a program takes at the least, by what limits it."""

    compute: float
    memory: float
    links: float  # between neighbours
    network: float  # between slices or hosts
    launches: float = 0.0  # of kernels

    @property
    def seconds(self) -> float:
        """With perfect overlap of the five."""
        return max(self)

    @property
    def limit(self) -> str:
        """The name of the largest."""
        return self._fields[int(np.argmax(self))]


def attention_flops(config: ModelConfig, before: int, tokens: int, cached: bool = False) -> float:
    """Of `tokens` queries behind `before` others: 4 heads head_dim per pair that is seen, or of
    latents 2 heads times the sizes of a key and a value, which are others where a sampler keeps
    them (`cached`).

    Position p, from 0, sees p + 1 keys, or those of its window. Layers that recur do as much for
    each token (`counts.count_recurrence`).
    """
    visible_keys = np.arange(before + 1, before + tokens + 1, dtype=np.float64)

    def per_head(kind: AttentionKind) -> float:
        value = kind.latent.value if kind.latent else config.head_dim
        size = sum(config.cached(kind)[1:]) if cached else config.head_dim + value
        return 2.0 * size * float(np.minimum(visible_keys, kind.window or math.inf).sum())

    recurrence = _recurrence_flops(config.kinds, tokens)
    return config.num_heads * sum(map(per_head, config.attention)) + recurrence


def _recurrence_flops(kinds: Sequence[LayerKind], tokens: int) -> float:
    """The part of `attention_flops` that layers do which recur."""
    mixers = [kind.mixer for kind in kinds if isinstance(kind.mixer, DeltaKind)]
    return tokens * sum(count_recurrence(mixer).flops for mixer in mixers)


def forward_flops(model: Model, prompts: int, width: int, samples: int, steps: int) -> float:
    """A pass over prompts, each once, and over all samples, with the head at each sample's tokens.

        prompts (2 L width + attention(0, width))
        + samples (steps (2 L + 2 H) + attention(width, steps))

    with L weights of layers that a token passes, and H = hidden x vocabulary.
    """
    config, weights = model.config, count_weights(model)
    prompt_flops = 2.0 * weights.active * width + attention_flops(config, 0, width)
    sample_flops = 2.0 * weights.work * steps + attention_flops(config, width, steps)
    return prompts * prompt_flops + samples * sample_flops


def second_pieces_flops(model: Model, prompts: int, width: int, samples: int, steps: int) -> float:
    """What `forward_flops` takes more where inputs are multiplied with weights of layers in two
    pieces (`count_pieces`): 2 L (prompts width + samples steps); elsewhere 0.

    L counts experts too, which take one piece: of mixtures this is too much.
    """
    tokens = prompts * width + samples * steps
    return 2.0 * count_weights(model).active * tokens * (count_pieces(model) - 1)


def program_work(run: Run) -> dict[str, Work]:
    """The work of each program, by its name."""
    return {
        "sync": Work(1, 0.0, 0.0, 2.0 * memory.on_device(sampler_params(run)), (1,)),
        **_sampling_work(run),
        **_training_work(run),
    }


def _sampling_work(run: Run) -> dict[str, Work]:
    """Prefill reads the weights of layers for every chunk of prompts. Decoding reads them and the
    head at every token, half of the caches, since they fill up, and the states of layers that
    recur, which it writes too."""
    blueprint, geometry = run.blueprint, run.blueprint.geometry
    config, settings = blueprint.model.config, blueprint.sampling
    prompts, group = geometry.num_prompts, geometry.group_size
    width, steps = geometry.max_prompt_tokens, geometry.max_completion_tokens
    mesh = blueprint.samples_on
    sizes = Sizes.for_prompts(
        settings.slots, sharding.num_bins(mesh), prompts, group, width, settings.turn_tokens
    )
    sampled = run.engine.programs.model
    params = placed(sampled.shapes, sampling_layout(sampled, mesh))
    side, chunk = chunk_shape(sizes)
    kinds = dict.fromkeys(LAYERS, config.pattern) | {"lead": config.lead}
    layers = _layer_bytes(kinds, params, side * chunk)
    head = memory.on_device(params["embed" if config.tie_embeddings else "head"])
    prefills = math.ceil(sizes.prompts / side) * math.ceil(max(1, width - 1) / chunk)
    numbers = count_weights(blueprint.model)
    attended = attention_flops(config, 0, width, True), attention_flops(config, width, steps, True)
    prompt_flops = prompts * (2.0 * numbers.active * width + attended[0])
    sample_flops = prompts * group * (2.0 * steps * numbers.work + attended[1])
    occupied = capacity(blueprint.model, settings, mesh, prompts, group, width)
    state = (occupied.state - occupied.recurrent) / 2 + 2 * occupied.recurrent
    rounds = math.ceil(sizes.prompts * group / sizes.slots) * steps
    segments = math.ceil(rounds / settings.segment_tokens)
    read = settings.segment_tokens * (_layer_bytes(kinds, params, sizes.slots) + head + state)
    second = second_pieces_flops(blueprint.model, prompts, width, 0, 0) / prefills
    prefill = _work_computed_once(prefills, prompt_flops, layers, 1)
    decode = _work_computed_once(segments, sample_flops, read, settings.segment_tokens)
    second_decoded = second_pieces_flops(blueprint.model, 0, 0, prompts * group, steps) / segments
    return {
        "prefill": prefill._replace(executed=prefill.executed + second),
        "decode": decode._replace(executed=decode.executed + second_decoded),
    }


def _layer_bytes(kinds: Mapping[str, Sequence[LayerKind]], params: Params, tokens: int) -> float:
    """Bytes of the weights of layers that so many tokens read at once on each device: of experts no
    more than they can pass, `tokens` times top_k.

    Args:
      kinds: of each part of the model's layers.
      params: of shapes with shardings.
    """
    total = 0.0
    for part in LAYERS:
        for place, layer in params.get(part, {}).items():
            total += memory.on_device(layer)
            feed = kinds[part][int(place)].feed
            if isinstance(feed, ExpertsKind):
                maps = [layer["experts"][name.removeprefix("experts/")] for name in EXPERT_MAPS]
                unread = max(0.0, 1 - tokens * feed.top_k / feed.number)
                total -= unread * memory.on_device(maps)
    return total


def _work_computed_once(calls: int, flops: float, read: float, trips: int) -> Work:
    """Of a program that computes nothing twice. Args: flops: of all calls; read: of one."""
    return Work(calls, flops / calls, flops / calls, float(read), (trips,))


def _training_work(run: Run) -> dict[str, Work]:
    """An update's passes, of which one comes before the others where the loss sees groups.

    It reads the weights in each pass of a micro-batch, adds a gradient to a sum (read and written),
    writes and reads what layers keep, and reads and writes parameters and moments once.
    """
    blueprint, geometry = run.blueprint, run.blueprint.geometry
    config, train, remat = blueprint.model.config, run.config.train, blueprint.remat
    samples = geometry.num_prompts * geometry.group_size
    sizes = geometry.max_prompt_tokens, samples, geometry.max_completion_tokens
    size = jnp.dtype(config.dtype).itemsize
    weights = size * count_weights(blueprint.model).total / blueprint.mesh.shape["tensor"]
    micro, tokens, _ = full_batch(geometry)
    chunks = math.ceil(
        tokens / chunk_tokens(config.vocab_size, geometry.tokens, blueprint.logits_per_chunk)
    )
    trained_bytes = memory.on_device(run.learner.trainable)
    activation_bytes = (
        activations(blueprint.model, remat) * geometry.tokens / blueprint.mesh.shape["context"]
    )
    objective = blueprint.objective
    readings = 2 + RECOMPUTED[remat] + objective.reads_batch + len(objective.anchors)
    micro_bytes = readings * weights + 3 * trained_bytes + 2 * activation_bytes
    read = micro * micro_bytes + 2 * (trained_bytes + memory.on_device(run.learner.opt_state))
    calls = train.num_iterations * train.minibatches
    loops = (micro, chunks)
    minibatches = train.minibatches  # which share the step's samples
    flops, executed = (count / minibatches for count in _update_flops(run, *sizes))
    return {
        **_scoring_work(run, sizes, micro, loops),
        "update": Work(calls, flops, executed, read, loops),
    }


def _update_flops(run: Run, width: int, samples: int, steps: int) -> tuple[float, float]:
    """Of one update with all samples: (without what is computed again, with it).

    Three passes, the forward one and two for gradients: of what each product reads, and of weights,
    which under adapters have none. Scores and recurrences are products of what was computed, and
    take all three.
    A distribution that the loss compares takes the head's products once more, and an anchor a
    forward pass. Where the loss of a token depends on others, logits are computed again in the
    backward pass; of distributions they always are, and recurrences too.
    """
    blueprint, prompts = run.blueprint, run.blueprint.geometry.num_prompts
    config, remat, objective = blueprint.model.config, blueprint.remat, blueprint.objective
    forward = forward_flops(blueprint.model, prompts, width, samples, steps)
    head = 2.0 * samples * steps * config.hidden_size * config.vocab_size
    anchors = len(objective.anchors)
    compared = anchors + len(objective.counts)
    attended = prompts * attention_flops(config, 0, width)
    attended += samples * attention_flops(config, width, steps)
    flops = (3 + objective.reads_batch + anchors) * forward + 3 * compared * head
    if config.lora is not None:
        flops -= forward - attended + compared * head
    recurrence = _recurrence_flops(config.kinds, prompts * width + samples * steps)
    again = forward - head
    if remat == "attention":  # which is kept, but for recurrences
        again -= attended - recurrence
    logits_again = 0 if objective.per_token else 1 + compared + anchors
    passes = 1 + RECOMPUTED[remat] + objective.reads_batch + anchors
    again = RECOMPUTED[remat] * again + recurrence + logits_again * head
    again += passes * second_pieces_flops(blueprint.model, prompts, width, samples, steps)
    return flops, flops + again


def _scoring_work(
    run: Run, sizes: tuple[int, int, int], micro: int, loops: tuple[int, ...]
) -> dict[str, Work]:
    """Of all passes that score, as calls of their mean: teachers may be of another size.

    Args:
      sizes: positions of a prompt, samples, positions of a completion.
      micro: micro-batches of a pass, each of which reads the weights.
    """
    blueprint, minibatches = run.blueprint, run.config.train.minibatches
    scored_by = [scoring_pass for scoring_pass, _ in scoring_passes(run)]
    flops, read = [], []
    for policy, _, _, share in scored_by:
        model = blueprint.policy_model(policy)
        weights = jnp.dtype(model.config.dtype).itemsize * count_weights(model).total
        prompts = blueprint.geometry.num_prompts
        flops.append(share * forward_flops(model, prompts, *sizes) / minibatches)
        read.append(share * micro * weights / blueprint.mesh.shape["tensor"])
    calls, mean = minibatches * len(scored_by), lambda values: sum(values) / max(1, len(values))
    return {"score": Work(calls, mean(flops), mean(flops), mean(read), loops)}


def full_batch(geometry: Geometry) -> tuple[int, int, int]:
    """What an update takes whose prompts and completions are as long as they may be.

    Returns: (micro-batches: fewer than `Geometry.micro_batches`, which hold samples of any lengths;
    completion tokens of the fullest bin of one; prompts that are computed, one again for each piece
    of a group that is cut)
    """
    prompts, samples = geometry.num_prompts, geometry.group_size
    lengths = packing.Lengths(
        np.full(prompts, geometry.max_prompt_tokens - 1, np.int32),
        np.full((prompts, samples), geometry.max_completion_tokens, np.int32),
    )
    live = np.zeros((prompts, samples), bool)
    live[: geometry.prompts_per_update] = True
    plan = packing.plan(lengths, live, geometry)
    bins = plan.row[plan.row >= 0] // geometry.rows  # of each sample
    tokens = int(np.bincount(bins).max()) * geometry.max_completion_tokens
    return int(plan.num_live), tokens, int((plan.prompt >= 0).sum())


def program_bound(
    work: Work,
    collectives: Sequence[Collective],
    chip: Chip,
    devices: int,
    islands: Mapping[str, int],
    traffic: Traffic | None = None,
) -> Bound:
    """The least seconds of a program in a step, from the makers' figures of a chip.

    The host is not in it: it dispatches a segment of decoding before it reads the one before
    (`SlotEngine`), and a segment takes longer than the host needs for one.

    Args:
      islands: axis of the mesh -> how many islands (slices, or hosts of GPUs) it crosses.
      traffic: of the compiled program; None: what is moved is by formula, and no kernel is counted.
    """
    links = network = 0.0
    for collective in collectives:
        sent = collective.sent * collective.trips
        crossed = math.prod(islands.get(axis, 1) for axis in collective.axes)
        if crossed > 1:
            # What all devices of an island need, or give a sum of, each sends a part of.
            parts = (
                collective.group // crossed
                if collective.kind in ("all-gather", "all-reduce")
                else 1
            )
            network += collective._replace(group=crossed).sent * collective.trips / parts
        if collective.group > crossed:
            links += max(sent / chip.link, collective.trips * _latency(collective, chip))
    moved, kernels = traffic or (work.read, 0)
    return Bound(
        compute=work.calls * work.executed / (devices * chip.flops),
        memory=work.calls * moved / chip.bandwidth,
        links=work.calls * links,
        network=work.calls * network / chip.network,
        launches=work.calls * kernels * chip.launch,
    )


def _latency(collective: Collective, chip: Chip) -> float:
    """Seconds of a collective that sends next to nothing."""
    rounds = {"all-reduce": 2, "collective-permute": 1 / max(1, collective.group - 1)}
    hops = rounds.get(collective.kind, 1) * (collective.group - 1)
    return chip.call + hops * chip.hop
