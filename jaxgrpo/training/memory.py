"""What a run keeps in the memory of one device, and whether the device has that much.

What is kept between steps and the state of decoding are counted before anything is allocated. The
working memory of an update is what XLA plans for its program, which `--dry-run` compiles.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxgrpo.core import records
from jaxgrpo.core.chips import CHIPS, JAX_SHARE, find_chip
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Learner
from jaxgrpo.evaluation import rescoring
from jaxgrpo.losses import Objective
from jaxgrpo.models import decoder, lora, low_bit, routing, sharding
from jaxgrpo.models.api import LAYERS, Model
from jaxgrpo.models.counts import activations
from jaxgrpo.models.logprobs import LOGITS_PER_CHUNK, chunk_tokens
from jaxgrpo.models.sharding import AnyMesh
from jaxgrpo.rollout.exchange import gather_json
from jaxgrpo.rollout.slots.capacity import LOGITS, capacity
from jaxgrpo.training.processes import host
from jaxgrpo.update import packing
from jaxgrpo.update.forward import (
    Blueprint,
    held_dtype,
    opt_layout,
    read_by_update,
    sampling_layout,
    trained,
    trained_layout,
)

EVAL_BASE = "eval.kl_to_base"
"""The copy of the base that evaluations measure the KL to, among the policies in memory."""

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"  # a variable that JAX reads, as these
GPU_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""The second is an older name; JAX refuses both at once."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
COMPILING = 300 * 2**20
"""What the process of a run on a CPU takes above that of its dry run, which compiles the update
alone: 0.2 to 0.7 GiB with 8 and 30 layers (JAX 0.10.2, two cores), the more where nothing is in
the compile cache."""
SHARE = 0.85
"""Of a device's memory that is planned for where slots and tokens are not given. The rest is for
what XLA adds to what is counted here."""

CHUNKS = (2048, 1024, 512)
"""Tokens of a bin whose logits are there at a time on a GPU or TPU, as memory allows.

These have 240 to 560 FLOP for a byte of memory (core/chips.py). A chunk of n tokens takes 6 n FLOP
for each weight of the head, reads it twice, and reads and writes its float32 sum: 12 bytes. So 480
to 1,120 tokens balance, and beyond twice as many little is gained.
"""

REMATS: dict[str, tuple[decoder.Remat, ...]] = {"gpu": ("dots", "attention"), "tpu": ("attention",)}
"""Platform -> what updates may recompute where memory allows, the fastest first; else "full".

By the bytes and products of the compiled update of Qwen3-0.6B (docs/performance.md): on an H100
"dots" and "attention" move the same, and "dots" multiplies an eighth less; on a v5e "dots" moves a
tenth more. "none" moves more than both: it keeps float32 arrays too.
"""


class Memory(NamedTuple):
    """Bytes on one device."""

    parameters: int  # that are trained
    optimizer: int
    copies: int  # of other policies and models that the method reads
    sampler: int  # working memory of decoding: weights as it reads them, logits, a layer's keys
    decode: int  # keys and values of slots and prompts, tokens of all completions of a step
    update: int = 0  # working memory of the update's program; 0: not known yet
    evaluation: int = 0  # of a CPU: of the second pass of evaluations, with the base that it reads
    frozen: int = 0  # weights under adapters, which all policies share
    process: int = 0  # of a CPU: what the process takes beside its arrays (`process_bytes`)

    @property
    def persistent(self) -> int:
        """From one step to the next."""
        return self.parameters + self.frozen + self.optimizer + self.copies

    @property
    def peak(self) -> int:
        phases = self.sampler + self.decode, self.update, self.evaluation
        return self.process + self.persistent + max(phases)

    def lines(self, limit: int) -> dict[str, str]:
        """What to print: name -> bytes in words."""
        update = shown(self.update) if self.update else "not known"
        frozen = f"frozen weights {shown(self.frozen)}, " if self.frozen else ""
        return {
            "memory": f"{shown(self.peak)} of {shown(limit)} on each device at the most",
            "  kept": f"parameters {shown(self.parameters)}, {frozen}"
            f"optimizer {shown(self.optimizer)}, copies {shown(self.copies)}",
            "  sampling": f"decode state {shown(self.decode)}, "
            f"working memory {shown(self.sampler)}",
            "  update": f"working memory {update}",
            **({"  evaluation": f"{shown(self.evaluation)}"} if self.evaluation else {}),
            **({"  process": f"{shown(self.process)} beside those"} if self.process else {}),
        }


def count(blueprint: Blueprint, copies: Collection[str]) -> Memory:
    """The memory of a run on each of its devices, but for the update's working memory.

    Args:
      copies: names of other policies that the run holds.
    """
    model = blueprint.model
    copy_bytes = _bytes(trained(model, model.shapes), trained_layout(model, blueprint.mesh))
    parameter_bytes, optimizer = training_bytes(model, blueprint.mesh, blueprint.optimizer)
    geometry = blueprint.geometry
    decoding = capacity(
        model,
        blueprint.sampling,
        blueprint.samples_on,
        geometry.num_prompts,
        geometry.group_size,
        geometry.max_prompt_tokens,
    )
    base = parameters(model, blueprint.samples_on) if EVAL_BASE in copies else 0
    second_pass = 0
    if rereads_base(blueprint.samples_on):
        beside = rescoring.second_pass_bytes(model.config.hidden_size, model.config.vocab_size)
        beside //= blueprint.samples_on.shape["tensor"]
        base, second_pass = 0, base and base + beside
    num_copies = len({*copies} - {EVAL_BASE, "ema"})
    average = parameter_bytes if "ema" in copies else 0  # in the bits of what is trained
    teachers = blueprint.teachers.values()
    teacher_bytes = sum(parameters(teacher.model, blueprint.mesh) for teacher in teachers)
    return Memory(
        parameters=parameter_bytes,
        optimizer=optimizer,
        copies=num_copies * copy_bytes + average + base + teacher_bytes,
        sampler=weights_to_sample(
            model, blueprint.mesh, blueprint.samples_on, blueprint.sampling.weight_dtype
        )
        + decoding.working,
        decode=decoding.state,
        frozen=parameters(model, blueprint.mesh) - copy_bytes if model.config.lora else 0,
        evaluation=second_pass,
    )


def rereads_base(mesh: Mesh) -> bool:
    """Whether a run reads the base again for each evaluation that measures the KL to it: on a CPU,
    where a second reads a model of the size that is trained. Elsewhere it stays in memory."""
    return mesh.devices.flat[0].platform == "cpu"


def training_bytes(model: Model, mesh: AnyMesh, optimizer: Any) -> tuple[int, int]:
    """Bytes of the parameters that are trained, and of the optimizer's state.

    Args:
      optimizer: as in `make_optimizer`.
    """
    dtype = jnp.dtype(held_dtype(model))
    shapes, axes = (trained(model, tree) for tree in (model.shapes, model.axes))
    trained_shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    moments = jax.eval_shape(optimizer.init, trained_shapes)
    layout = sharding.param_shardings(mesh, axes, trained_shapes)
    return _bytes(trained_shapes, layout), _bytes(moments, opt_layout(model, mesh, optimizer))


def fitting_passes(
    setting: str,
    model: Model,
    mesh: Mesh,
    optimizer: Any,
    geometry: packing.Geometry,
    persistent: int,
    objective: Objective | None = None,
) -> tuple[int | None, decoder.Remat]:
    """How an update's passes are computed: the logits of a chunk, and what is recomputed.

    Of CHUNKS, and then of REMATS where `setting` is "auto", the first with which an update fits.

    Args:
      setting: `train.remat`.
      persistent, objective: as in `fitting_geometry`.

    Returns: (`logits_per_chunk` of `logprobs.token_logprobs`, remat)
    """
    platform, vocab = mesh.devices.flat[0].platform, model.config.vocab_size
    default = decoder.choose_remat(setting, platform)

    def fits(logits: int | None, remat: decoder.Remat) -> bool:
        parts = update_bytes(model, mesh, optimizer, geometry.tokens, remat, logits, objective)
        return sum(parts.values()) <= free_beside(mesh, persistent)

    chunks = () if platform == "cpu" else (max(LOGITS_PER_CHUNK, n * vocab) for n in CHUNKS)
    logits = next((logits for logits in chunks if fits(logits, default)), None)
    remats: tuple[decoder.Remat, ...] = REMATS.get(platform, ()) if setting == "auto" else ()
    fitting: list[decoder.Remat] = [remat for remat in remats if fits(logits, remat)]
    return logits, fitting[0] if fitting else default


def fitting_geometry(
    model: Model,
    mesh: Mesh,
    optimizer: Any,
    geometry: packing.Geometry,
    persistent: int,
    remat: decoder.Remat,
    logits_per_chunk: int | None = None,
    objective: Objective | None = None,
) -> packing.Geometry:
    """The geometry with fewer tokens in a micro-batch, where the activations of those that it has
    by default do not fit beside `update_bytes`; never fewer than the longest sample takes.

    Args:
      persistent: bytes of what the run keeps, on each device.
      objective: as in `update_bytes`.
    """
    settings = remat, logits_per_chunk, objective
    parts = update_bytes(model, mesh, optimizer, geometry.tokens, *settings)
    bytes_per_token = parts.pop("activations") / geometry.tokens
    room = int(free_beside(mesh, persistent + sum(parts.values())) / bytes_per_token)
    rest = geometry.minibatches, room, geometry.has_forks, routing.has_experts(model.config.kinds)
    fitting = packing.make_geometry(geometry[:4], mesh, None, *rest)
    return fitting._replace(records=geometry.records, recurs=geometry.recurs)


def update_bytes(
    model: Model,
    mesh: Mesh,
    optimizer: Any,
    tokens: int,
    remat: decoder.Remat,
    logits_per_chunk: int | None = None,
    objective: Objective | None = None,
) -> dict[str, int]:
    """Working memory of an update on each device, by formula: what for -> bytes.

    gradients: of a micro-batch and their sum, in the dtype that is trained
    weights: as they are computed with, if that is another dtype
    head: as the chunks read it, and its gradient of each bin, in float32
    logits: of a chunk of tokens, `LOGITS` times float32
    activations: what layers keep of a micro-batch's tokens, and a period of them at work
    distributions: that the loss compares: for each the head and its gradient in float32, and an
      anchor's head as the chunks read it

    Args:
      tokens: of a micro-batch, in each bin.
      objective: None: one that compares no distributions.
    """
    config, tensor = model.config, mesh.shape["tensor"]
    parameter_bytes, _ = training_bytes(model, mesh, optimizer)
    narrow = config.dtype != held_dtype(model)
    numbers = config.hidden_size * config.vocab_size // tensor
    gathered = numbers * jnp.dtype(config.dtype).itemsize
    chunk = chunk_tokens(config.vocab_size, tokens, logits_per_chunk)
    anchors = 0 if objective is None else len(objective.anchors)
    compared = 0 if objective is None else anchors + len(objective.counts)
    return {
        "gradients": 2 * parameter_bytes,
        "weights": parameters(model, mesh) if narrow and config.lora is None else 0,
        "head": gathered + (0 if config.lora else 4 * numbers),
        "logits": LOGITS * 4 * chunk * config.vocab_size // tensor,
        # A bin's tokens are divided over the axis "context".
        "activations": activations(model, remat) * tokens // mesh.shape["context"],
        "distributions": compared * 4 * numbers * (1 if config.lora else 2) + anchors * gathered,
    }


def plan(
    program: Any, geometry: packing.Geometry, objective: Objective, mesh: Mesh, learner: Learner
) -> int:
    """The working memory that XLA plans for the update program, which is compiled for it.

    Beside it lies what `beside_update` counts.

    Args:
      program: `update_program` of `update.step.Steps`.
      learner: of the run; its arrays are not read.
    """
    *arguments, batch = update_arguments(geometry, objective, mesh, learner)
    compiled = program.lower(*arguments, batch).compile()
    analysis = compiled.memory_analysis()
    if analysis is None:  # a platform that does not tell
        return 0
    new_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    program_bytes = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + new_outputs
    return program_bytes - on_device(arguments) + beside_update(geometry, batch)


def beside_update(geometry: packing.Geometry, batch: Any) -> int:
    """Bytes of a step's other minibatches, and of what was recorded of its samples."""
    sizes = geometry.num_prompts, geometry.group_size, geometry.max_completion_tokens
    recorded = math.prod(sizes) // geometry.bins * records.token_bytes(geometry.records)
    return (geometry.minibatches - 1) * on_device(batch) + recorded


def update_arguments(
    geometry: packing.Geometry, objective: Objective, mesh: Mesh, learner: Learner
) -> tuple[Any, ...]:
    """What the update program of a run is compiled for: its learner, and the shapes of a batch."""
    anchors = read_by_update(learner, objective.anchors)
    batch = packing.abstract_batch(geometry, objective.needs, objective.counts)

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        names = (None, "bins", *[None] * len(leaf.shape))[: len(leaf.shape)]
        layout = sharding.named(mesh, *names)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)

    changing = (learner.trainable, learner.opt_state, learner.objective_state)
    return (*changing, anchors, jax.tree.map(placed, batch))


def refuse_too_large(memory: Memory, mesh: Mesh) -> None:
    """Raises: InputError where a device has less memory than the run takes."""
    limit = device_bytes(mesh)
    if memory.peak <= limit:
        return
    parts = "; ".join(f"{name.strip()}: {text}" for name, text in memory.lines(limit).items())
    remedy = _remedy(memory, limit)
    if mesh.devices.flat[0].platform == "gpu" and not any(map(os.environ.get, GPU_SHARES)):
        remedy += f"; JAX takes {JAX_SHARE:.0%} of a GPU's memory, with {GPU_SHARES[0]}=0.9 more"
    raise InputError(f"the run does not fit its devices ({parts}): take {remedy}")


def _remedy(memory: Memory, limit: int) -> str:
    """What would take less of what takes too much: what is kept, or else the largest phase."""
    if memory.process + memory.persistent > limit:
        adapters = "" if memory.frozen else "adapters in place of all weights (lora.rank), "
        return (
            f"a smaller model, {adapters}or mesh.fsdp over more devices: what is kept from step to "
            "step is too much by itself"
        )
    remedies = {
        "fewer rollout.slots, or shorter completions": memory.sampler + memory.decode,
        "a smaller train.tokens_per_micro_batch, or mesh.fsdp": memory.update,
        "eval.kl_to_base = false": memory.evaluation,
    }
    widths = 'model.dtype = "bfloat16" halves what is computed with, and more devices share it'
    return f"{max(remedies, key=lambda remedy: remedies[remedy])}; {widths}"


def device_bytes(mesh: Mesh) -> int:
    """The bytes of memory that a device of the mesh gives; CPU devices share their host's.

    Of several processes the fewest, since all compile the same program: each of them calls this.
    Of devices that do not say it, those of `core.chips.CHIPS`: they are compiled for and not here,
    or the allocator that was chosen for a GPU keeps no count.

    Raises: InputError where it is not in that table either.
    """
    size, sharers = _local_bytes(mesh)
    reported, on_host = gather_json([os.uname().nodename, size, sharers]), Counter[str]()
    for name, _, sharers in reported:
        on_host[name] += sharers
    return min(size // max(1, on_host[name]) for name, size, _ in reported)


def _local_bytes(mesh: Mesh) -> tuple[int, int]:
    """Bytes of this process's smallest device, or of its host and how many devices share it."""
    devices = mesh.local_devices or [*mesh.devices.flat]  # of stand-ins a process may have none
    try:
        stats = [device.memory_stats() or {} for device in devices]
    except jax.errors.JaxRuntimeError:  # they are compiled for, and not here
        return _published(devices[0].device_kind), 0
    if sizes := [entry["bytes_limit"] for entry in stats if "bytes_limit" in entry]:
        return min(sizes), 0
    if devices[0].platform != "cpu":
        return _published(devices[0].device_kind), 0
    return host.memory_bytes(), len(devices)


def _published(kind: str) -> int:
    chip = find_chip(kind)
    if chip is None:
        allocator = os.environ.get(ALLOCATOR)
        remedy = f"; with {ALLOCATOR} = {allocator} JAX does not say it: unset that" * bool(
            allocator
        )
        raise InputError(f"{kind}: its memory is not known; known are {', '.join(CHIPS)}{remedy}")
    return chip.memory


def shown(count: int) -> str:
    """Bytes in words.

    >>> shown(3 * 2**30 // 2)
    '1.5 GiB'
    """
    power = min(int(math.log2(max(count, 1)) // 10), len(UNITS) - 1)
    return f"{count / 1024**power:.{min(power, 1)}f} {UNITS[power]}"


def weights_to_sample(
    model: Model, mesh: Mesh, sampling_mesh: Mesh, weight_dtype: str = "auto"
) -> int:
    """Bytes of the weights that only the sampler reads: in the model's dtype and laid out for it
    where the trained ones are not, each layer's apart, since layers are read one by one, and a copy
    of what the update overwrites.

    A sync writes them at once, without a stacked copy beside them, but from mesh to mesh and where
    adapters alone are trained (`update.step.Steps.sync`). Where adapters are merged to sample, what
    a sync gathered or moved stays beside the merged copy, and beside one in 8 bits too. On a CPU
    XLA converts that before each segment.

    Args:
      mesh: where the parameters given to the sampler lie.
      weight_dtype: as in `SamplingSettings`.
    """
    all_weights, layer_weights = bytes_to_sample(model, sampling_mesh)
    copy = copied_to_sample(model, sampling_mesh, weight_dtype)
    if sampling_mesh != mesh:
        return all_weights + layer_weights + copy
    if mesh.shape["fsdp"] > 1 or (model.config.lora is None and weight_dtype == "auto"):
        return all_weights + copy
    if weight_dtype != "auto":
        return copy
    layout, is_cast = sampling_layout(model, mesh), model.config.dtype != held_dtype(model)
    is_merged = lora.are_merged_to_sample(model, mesh.devices.flat[0].platform)
    apart = copy if is_merged else layer_weights
    return apart + (_bytes(trained(model, model.shapes), trained(model, layout)) * is_cast)


def bytes_to_sample(model: Model, mesh: Mesh) -> tuple[int, int]:
    """Bytes of the weights in the model's dtype, laid out for sampling: all, and of blocks."""
    layout = sampling_layout(model, mesh)
    return _bytes(model.shapes, layout), _bytes(model.shapes["blocks"], layout["blocks"])


def copied_to_sample(model: Model, mesh: Mesh, weight_dtype: str = "auto") -> int:
    """Bytes of the copy in 8 bits, or of layers with adapters merged, from which samples are drawn;
    0: from the weights themselves. On a CPU what is in 8 bits is converted back beside it.

    Args:
      weight_dtype: as in `SamplingSettings`.
    """
    platform = mesh.devices.flat[0].platform
    trees = [
        {part: tree[part] for part in LAYERS if part in tree}
        for tree in (model.shapes, sampling_layout(model, mesh))
    ]
    merged_layers = _bytes(*(lora.split(tree)[1] for tree in trees))
    if weight_dtype == "auto":
        return merged_layers * lora.are_merged_to_sample(model, platform)
    sampled = decoder.build(low_bit.sampler_config(model, platform, weight_dtype))
    copy = _bytes(sampled.shapes, sampling_layout(sampled, mesh))
    return copy + (merged_layers if platform == "cpu" else 0)


def parameters(model: Model, mesh: AnyMesh) -> int:
    """Bytes of one copy of the parameters, in the model's dtype."""
    return _bytes(model.shapes, sharding.param_shardings(mesh, model.axes, model.shapes))


def process_bytes(mesh: Mesh, copy_bytes: int) -> int:
    """Bytes of the memory of each CPU device that this process takes beside the arrays of a run:
    what it has taken so far for libraries, rows, programs and compiling them, COMPILING for those
    to come, and the copy of a state that is being saved (`parameters.save_copy_bytes`). 0 on other
    devices, and where the system does not tell."""
    most = host.most_taken()
    if mesh.devices.flat[0].platform != "cpu" or most is None:
        return 0
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    beside_arrays = max(0, most - sum(shard.data.nbytes for shard in shards))
    return (beside_arrays + COMPILING + copy_bytes) // len(mesh.local_devices)


def free_beside(mesh: Mesh, used_bytes: int) -> int:
    """Bytes of each device that may be used beside what is taken already."""
    return max(0, int(SHARE * device_bytes(mesh)) - used_bytes)


def on_device(tree: Any) -> int:
    """Bytes on one device of arrays, or of shapes with shardings."""

    def leaf_bytes(leaf: Any) -> int:
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize

    return sum(map(leaf_bytes, jax.tree.leaves(tree)))


def _bytes(shapes: Any, layouts: Any) -> int:
    """Of a tree of shapes on one device, by a tree of shardings."""
    placed = jax.tree.map(
        lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
        shapes,
        layouts,
    )
    return on_device(placed)
