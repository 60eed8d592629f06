"""Seconds of one training step, by phase, on workloads with exact lengths.

    python -m benchmarks.step [--model S|M|V] [--workload A|B] [--repeats 5] [--tokens 2048]

Models and workloads are those of the comparison with TRL and Tunix: every completion has its full
length, one update per batch, float32 AdamW, no reward but a random one. (The ragged workload C:
`python -m benchmarks.versus`.) The floor is the arithmetic of the matrix
products with each prompt computed once, at the rate that JAX reaches here for a large product;
attention, softmax and memory traffic are not in it.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from benchmarks.common import describe, interval, matmul_rate, report, timed
from benchmarks.workloads import SMALL, WORKLOADS, Workload, model_config
from jaxgrpo import advantages, losses
from jaxgrpo.core.types import Learner
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import ModelConfig
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.rollout.selection import pad_prompts
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update import packing
from jaxgrpo.update.forward import Blueprint, param_layout
from jaxgrpo.update.step import build_steps


def floor_flops(name: str, workload: str) -> float:
    """Matrix-product FLOPs of one step: prefill, decode, and an update of three times that."""
    hidden, layers, vocab = SMALL[name]
    work = WORKLOADS[workload]
    heads = hidden // 64
    attention = hidden * 64 * (2 * heads + 2 * (heads // 2))
    body = layers * (attention + 3 * hidden * 3 * hidden)
    sampled = work.prompts * work.samples * work.completion
    generate = 2 * (body * (work.prompts * work.longest + sampled) + hidden * vocab * sampled)
    return 4 * generate


def make_blueprint(
    config: ModelConfig, work: Workload, mesh: Mesh, tokens: int | None = None, remat: str = "auto"
) -> Blueprint:
    """GRPO of a workload, on devices that need not be there.

    Args:
      tokens: per micro-batch; None: as in training.
      remat: as `train.remat`.
    """
    resolved_remat = decoder.choose_remat(remat, mesh.devices.flat[0].platform)
    sizes = (work.prompts, work.samples, work.longest, work.completion)
    return Blueprint(
        model=decoder.build(config, constrain=sharding.constrain(mesh), remat=resolved_remat),
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=optax.adamw(1e-6),
        geometry=packing.make_geometry(sizes, mesh, tokens),
        sampling=SamplingSettings(work.completion, 1.0, (), 0, work.completion),
        mesh=mesh,
    )


def build(name: str, workload: str, tokens: int | None) -> tuple[Blueprint, Learner]:
    work, mesh = WORKLOADS[workload], sharding.make_mesh()
    blueprint = make_blueprint(model_config(name), work, mesh, tokens)
    init = jax.jit(
        blueprint.model.init, out_shardings=param_layout(blueprint.model, blueprint.mesh)
    )
    params = init(jax.random.key(0))
    return blueprint, first_learner(blueprint, params, 1000, ("reward",))


def main() -> None:
    fixed = [name for name, work in WORKLOADS.items() if not work.ragged]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SMALL, default="S")
    parser.add_argument("--workload", choices=fixed, default="A")
    parser.add_argument("--tokens", type=int, help="per micro-batch; by default as in training")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    about = describe()
    rate = matmul_rate(2048, 2048, 2048)
    flops = floor_flops(arguments.model, arguments.workload)
    print(f"{about['device']}, jax {about['jax']}, {rate / 1e9:.0f} GFLOP/s in a 2048^3 product")
    blueprint, learner = build(arguments.model, arguments.workload, arguments.tokens)
    spent = measure(blueprint, learner, arguments.repeats)
    floor = flops / rate
    result: dict[str, Any] = {**about, "model": arguments.model, "workload": arguments.workload}
    for phase, values in spent.items():
        median, low, high = interval(values)
        print(f"{phase:8} {median:7.3f} s  [{low:.3f}, {high:.3f}]")
        result[phase] = median
    print(f"floor    {floor:7.3f} s, {result['step'] / floor:.2f} times below the step")
    report({**result, "floor": floor, "gflops": rate / 1e9})


def measure(blueprint: Blueprint, learner: Learner, repeats: int) -> dict[str, list[float]]:
    """Seconds of each phase, the first (compiling) step left out."""
    steps, geometry, mesh = build_steps(blueprint), blueprint.geometry, blueprint.mesh
    width, samples = geometry.max_prompt_tokens, geometry.group_size
    engine = SlotEngine(blueprint.model, blueprint.sampling, mesh, width=width)
    rng = np.random.default_rng(0)
    shape = (geometry.num_prompts, width)
    order, key = np.arange(geometry.num_prompts), np.zeros(2, np.uint32)
    tokens = rng.integers(2, blueprint.model.config.vocab_size, shape)
    prompts = pad_prompts(list(tokens), width, order, order, 0)
    spent: dict[str, list[float]] = {"sample": [], "prepare": [], "update": [], "step": []}
    for step in range(repeats + 1):
        drawing = draw(engine, steps.sync(learner), prompts, key, samples)
        rollouts, sample = timed(drawing.finish)
        reward: Any = rng.normal(size=(geometry.num_prompts, samples)).astype(np.float32)
        rollouts = dataclasses.replace(rollouts, rewards={"reward": reward})
        rollouts = put_prompts(mesh, rollouts)
        (learner, prepared), prepare = timed(steps.prepare, learner, rollouts)
        (learner, _), update = timed(steps.update, learner, prepared.batches)
        if step:
            phases = (sample, prepare, update, sample + prepare + update)
            for name, value in zip(spent, phases, strict=True):
                spent[name].append(value)
    return spent


if __name__ == "__main__":
    main()
