"""Seconds of one training step, by phase, on workloads with exact lengths.

    python -m benchmarks.step [--model S,SR,SX] [--workload A|B] [--repeats 5] [--tokens 2048]

Models and workloads are those of the comparison with TRL and Tunix: every completion has its full
length, one update per batch, float32 AdamW, no reward but a random one. (The ragged workload C:
`python -m benchmarks.versus`.) Several models take their steps in turn, and each is compared with
the first. The floor is the arithmetic of the matrix products and of attention with each prompt
computed once, at the rate that JAX reaches here for a large product; softmax and memory traffic
are not in it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from benchmarks import contest
from benchmarks.common import matmul_rate, report, timed
from benchmarks.workloads import MODELS, WORKLOADS, Workload, make_prompts, model_config
from jaxgrpo import advantages, losses
from jaxgrpo.core.types import Learner
from jaxgrpo.models import decoder, routing, sharding
from jaxgrpo.models.api import ModelConfig
from jaxgrpo.planning.costs import forward_flops
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update import packing
from jaxgrpo.update.forward import Blueprint, param_layout
from jaxgrpo.update.step import build_steps


def floor_flops(blueprint: Blueprint) -> float:
    """FLOPs of one step: a pass that samples, and an update of three times that."""
    geometry = blueprint.geometry
    prompts, samples = geometry.num_prompts, geometry.num_prompts * geometry.group_size
    sizes = geometry.max_prompt_tokens, samples, geometry.max_completion_tokens
    return 4 * forward_flops(blueprint.model, prompts, *sizes)


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
    model = decoder.build(config, constrain=sharding.constrain(mesh), remat=resolved_remat)
    geometry = packing.make_geometry(
        sizes, mesh, tokens, has_experts=routing.has_experts(config.kinds)
    )
    return Blueprint(
        model=model,
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=optax.adamw(1e-6),
        geometry=geometry.for_models([model]),
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
    parser = contest.parser(__doc__)
    parser.add_argument("--model", type=contest.names, default="S", help="such as S,SR,SX")
    parser.add_argument("--workload", choices=fixed, default="A")
    parser.add_argument("--tokens", type=int, help="per micro-batch; by default as in training")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if not {*arguments.model} <= {*MODELS}:
        parser.error(f"--model {','.join(arguments.model)}: choose from {', '.join(MODELS)}")
    about, console = contest.begin()
    rate = matmul_rate(2048, 2048, 2048)
    console.print(f"{rate / 1e9:.0f} GFLOP/s in a 2048^3 product")
    runs = {name: Run(name, arguments.workload, arguments.tokens) for name in arguments.model}
    spent = contest.in_turn({name: run.step for name, run in runs.items()}, arguments.repeats, 1)
    first = next(iter(spent.values()))
    rows = []
    for name, phases in spent.items():
        floor = floor_flops(runs[name].blueprint) / rate
        seconds = {phase: float(np.median([run[phase] for run in phases])) for phase in first[0]}
        over = contest.over(*([run["step"] for run in times] for times in (phases, first)))
        cells = [*(f"{value:.3f}" for value in seconds.values()), f"{floor:.3f}"]
        seconds |= {"floor": floor, "over first": over.median}
        rows.append((name, [*cells, f"{over.median:.2f} [{over.ends}]"], seconds))
    columns = ("model", *(f"{phase}, s" for phase in first[0]), "floor, s", "step over the first's")
    numbers = contest.show(console, columns, rows)
    report({**about, "workload": arguments.workload, **numbers, "gflops": rate / 1e9})


class Run:
    """A model on a workload, which takes one step after another."""

    def __init__(self, name: str, workload: str, tokens: int | None):
        self.blueprint, self.learner = build(name, workload, tokens)
        self.steps, mesh = build_steps(self.blueprint), self.blueprint.mesh
        width = self.blueprint.geometry.max_prompt_tokens
        self.engine = SlotEngine(self.blueprint.model, self.blueprint.sampling, mesh, width=width)
        self.prompts = make_prompts(WORKLOADS[workload], self.blueprint.model.config.vocab_size)

    def step(self, seed: int) -> dict[str, float]:
        """Takes a step. Returns the seconds of its phases, and of all of it."""
        geometry, key = self.blueprint.geometry, np.zeros(2, np.uint32)
        shape = geometry.num_prompts, geometry.group_size
        params = self.steps.sync(self.learner)
        drawing = draw(self.engine, params, self.prompts, key, geometry.group_size)
        rollouts, sample = timed(drawing.finish)
        reward: Any = np.random.default_rng(seed + 1).normal(size=shape).astype(np.float32)
        rollouts = dataclasses.replace(rollouts, rewards={"reward": reward})
        rollouts = put_prompts(self.blueprint.mesh, rollouts)
        (learner, prepared), prepare = timed(self.steps.prepare, self.learner, rollouts)
        (self.learner, _), update = timed(self.steps.update, learner, prepared.batches)
        phases = {"sample": sample, "prepare": prepare, "update": update}
        return {**phases, "step": sum(phases.values())}


if __name__ == "__main__":
    main()
