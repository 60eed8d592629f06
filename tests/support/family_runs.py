"""A small model of each family, as a run samples from it and updates it, and as whole sequences.

Whole sequences are computed in float64, so that only the other way has an error.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import attended
import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import optax
import recurrent
import tiny
from engines import draw_all, make_engine
from jax import Array

import jaxgrpo
from jaxgrpo import advantages, losses
from jaxgrpo.core.metrics import finalise
from jaxgrpo.core.types import Learner, Params, Rollouts
from jaxgrpo.models import decoder, recurrence, sharding
from jaxgrpo.models.api import AttentionKind, Caller, DeltaKind, Model
from jaxgrpo.models.attention import XLA, Kernel
from jaxgrpo.models.recurrence import DeltaInputs
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update import packing
from jaxgrpo.update.forward import Blueprint, param_layout
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.preparing import Preparer
from jaxgrpo.update.step import Steps, build_steps

PROMPTS, GROUP, WIDTH = 4, 3, 9  # P, G and S: one prompt has one token, one has nine
SHORT = 12  # tokens of the longest completion of an update
HYBRID = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
CHUNKED = 140  # the same where layers recur: two chunks, and a part of a third
LONG = 40  # of a sampled one: more than the 32 columns in which decoding keeps a window

KINDS = {"llama", "gemma2", "phi3", "qwen3_moe", "gpt_oss", "qwen3_5_text", "deepseek_v3"}
"""Families that differ most: plain, with soft caps, with fused weights, with experts of two kinds,
with states, with latents."""

CLOSE = 2e-6
"""Of log-probs that are computed in float64 and kept in float32."""


def shortest(family: str) -> int:
    """Tokens of the longest completion of an update, with which rows have several samples."""
    return CHUNKED if family in HYBRID else SHORT


@functools.cache
def read(family: str, dtype: str = "float32") -> tuple[Model, Params]:
    """The family's rich small model, with a vocabulary and positions that fit the tests."""
    changes: dict[str, Any] = {"vocab_size": 64}
    if family == "phi3":  # longrope scales angles by the ratio of the two
        changes |= {"max_position_embeddings": 128, "original_max_position_embeddings": 64}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.saved(checkpoints.transformers_config(family, **changes), Path(folder))
        model, params = jaxgrpo.load_model(folder, dtype="float32")
    with jax.enable_x64(dtype == "float64"):
        model = decoder.build(dataclasses.replace(model.config, dtype=dtype))
    return model, jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params)


class Run(NamedTuple):
    """A run of a family's model before its first step, and the functions of its steps."""

    family: str
    blueprint: Blueprint
    steps: Steps
    preparer: Preparer
    learner: Learner

    def spread(self, tree: Any) -> Any:
        """Arrays of prompts, over the bins of the mesh."""
        return put_prompts(self.blueprint.mesh, tree)


def run(
    family: str,
    completion: int,
    *,
    kernel: Kernel = XLA,
    devices: int = 1,
    dtype: str = "float32",
) -> Run:
    """Args: completion: its most tokens. devices: 1, or 4 as fsdp 2 x tensor 2."""
    along = 1 if devices == 1 else 2
    mesh = sharding.make_mesh(fsdp=along, tensor=along, devices=jax.devices()[:devices])
    model, params = read(family, dtype)
    sizes = (PROMPTS, GROUP, WIDTH, completion, sharding.num_bins(mesh))
    blueprint = Blueprint(
        model=decoder.build(model.config, constrain=sharding.constrain(mesh)),
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.reinforce(), losses.token_mean()),
        optimizer=optax.trace(1.0),  # its state after the first update is the gradient
        geometry=Geometry(*sizes, tokens=WIDTH + 2 * completion, recurs=model.config.recurs),
        # Half as many slots as samples: each is used again.
        sampling=SamplingSettings(completion, 1.0, (2,), 0, segment_tokens=8, slots=6),
        mesh=mesh,
        kernel=kernel,
    )
    params = jax.device_put(params, param_layout(blueprint.model, blueprint.mesh))
    learner = first_learner(blueprint, params, PROMPTS, ("reward",))
    return Run(family, blueprint, build_steps(blueprint), Preparer(blueprint), learner)


@functools.cache
def sampled(family: str, devices: int) -> Rollouts:
    """What a run samples for `tiny.prompts`, in float64; its log-probs are float32."""
    with jax.enable_x64(True):
        family_run = run(family, LONG, devices=devices, dtype="float64")
        blueprint, prompts = family_run.blueprint, tiny.prompts(PROMPTS, WIDTH)
        params = family_run.steps.sync(family_run.learner)
        key = np.asarray(jax.random.key_data(jax.random.key(0)))
        engine = make_engine(blueprint.model, blueprint.sampling, prompts, blueprint.mesh)
        return draw_all(engine, params, prompts, key, GROUP)


class UpdateInputs(NamedTuple):
    """Rollouts of an update, and what each of their log-probs is weighed with."""

    rollouts: Rollouts
    weight: np.ndarray  # [P, G, T]


@functools.cache
def update_inputs(alone: bool, steps: int = SHORT) -> UpdateInputs:
    """Random completions of random lengths. Args: alone: each is too long to share a row."""
    rollouts = jax.tree.map(np.asarray, tiny.rollouts(np.zeros((PROMPTS, GROUP)), steps, WIDTH))
    rng = np.random.default_rng(2)
    if alone:
        length = rng.integers(steps // 2 + 1, steps + 1, (PROMPTS, GROUP, 1))
        rollouts = dataclasses.replace(rollouts, token_mask=np.arange(steps) < length)
    weight = rng.normal(size=rollouts.token_mask.shape) * rollouts.token_mask
    return UpdateInputs(rollouts, weight.astype(np.float32))


def packed(family_run: Run, alone: bool) -> tuple[Rollouts, Array, packing.Plan]:
    """The inputs of the update, on the mesh, and its plan of several micro-batches."""
    rollouts, weight = family_run.spread(update_inputs(alone, shortest(family_run.family)))
    lengths = sharding.to_host(family_run.preparer.measure(rollouts))
    everyone = np.ones((PROMPTS, GROUP), bool)
    plan = packing.plan(lengths, everyone, family_run.blueprint.geometry)
    assert plan.num_live > 1
    assert (plan.segment.max() == 1) == alone
    return rollouts, weight, plan


def scored(family_run: Run, alone: bool) -> np.ndarray:
    """Log-probs [P, G, T] of these inputs, by packed rows that share their prompts."""
    rollouts, weight, plan = packed(family_run, alone)
    batch = family_run.preparer.gather(rollouts, plan, weight, weight, rollouts.token_mask, {})
    geometry = family_run.blueprint.geometry
    names = ("trainer_logp",)
    call = (family_run.learner.trainable, batch, names, geometry, "trainer")
    scores = family_run.preparer.score(*call)
    logp = scores["trainer_logp"]
    return sharding.to_host(family_run.preparer.scatter(logp, plan, rollouts.token_mask))


def updated(family_run: Run, alone: bool) -> tuple[float, Params]:
    """An update whose loss is -sum(weight * log-probs): the largest difference of its log-probs
    from those of `plain`, and its gradient."""
    rollouts, weight, plan = packed(family_run, alone)
    mask = rollouts.token_mask
    fields = {
        "behavior_logp": family_run.spread(plain(family_run.family, alone)[0]),
        "sampled_now": mask,
    }
    batch = family_run.preparer.gather(rollouts, plan, weight, jnp.ones_like(weight), mask, fields)
    learner, metrics = family_run.steps.update(family_run.learner, [batch])
    return finalise(metrics)["sampling/sampling_logp_difference/max"], learner.opt_state.trace


@functools.cache
def plain(family: str, alone: bool) -> tuple[np.ndarray, Params]:
    """Log-probs [P, G, T] of these inputs, and the gradient of `updated`, by the formula."""
    model, params = read(family, "float64")
    rollouts, weight = update_inputs(alone, shortest(family))

    def loss(params: Params):
        logp = whole_sequence_logp(functools.partial(by_formula, model, params), rollouts)
        return -(weight * logp).sum(), logp

    with jax.enable_x64(True):
        (_, logp), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return jax.tree.map(np.asarray, (logp, gradient))


def by_formula(model: Model, params: Params, tokens: np.ndarray, mask: np.ndarray) -> Array:
    """`token_logp` of rows padded on the right, with nothing of it but the layers."""
    at = np.arange(tokens.shape[1])
    position = np.broadcast_to(at, tokens.shape)

    def attend(query, key, value, memory, kind: AttentionKind, sinks=None):
        ago = at[:, None] - at
        visible = (ago >= 0) & (ago < (kind.window or len(at)))
        return attended.formula(query, key, value, visible, kind.soft_cap, sinks), memory

    def recur(inputs: DeltaInputs, memory: None, kind: DeltaKind):
        real, start = jnp.ones(tokens.shape, bool), recurrence.first_state(inputs)
        return recurrent.token_by_token(inputs, real, start)[0], memory

    caller = Caller(attend, recur=recur)
    hidden, _ = model.apply(params, jnp.asarray(tokens), jnp.asarray(position), caller, None)
    logp = jax.nn.log_softmax(model.unembed(params, hidden))
    target_logp = jnp.take_along_axis(logp[:, :-1], jnp.asarray(tokens)[:, 1:, None], -1)[..., 0]
    return jnp.where(mask, jnp.pad(target_logp, ((0, 0), (1, 0))), 0)


def whole_sequence_logp(
    logp_of: Callable[[np.ndarray, np.ndarray], Array], rollouts: Rollouts
) -> Array:
    """Log-probs [P, G, T] by a function of (tokens, mask), each [B, S + T]: every prompt with each
    of its completions as a sequence of its own."""
    prompt_mask, drawn = np.asarray(rollouts.prompt_mask), np.asarray(rollouts.token_mask)
    rows, steps = drawn.shape[0] * drawn.shape[1], drawn.shape[2]
    tokens = np.zeros((rows, prompt_mask.shape[1] + steps), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, (p, g) in enumerate(np.ndindex(drawn.shape[:2])):
        prompt = rollouts.prompt_tokens[p][prompt_mask[p]]
        sequence = np.concatenate([prompt, rollouts.completion_tokens[p, g][drawn[p, g]]])
        tokens[row, : len(sequence)], mask[row, : len(sequence)] = sequence, True
    logp = logp_of(tokens, mask)
    begin = prompt_mask.sum(-1).repeat(drawn.shape[1])[:, None]
    completion_logp = jnp.take_along_axis(logp, begin + np.arange(steps), axis=1)
    return jnp.where(drawn, completion_logp.reshape(drawn.shape), 0)
