"""Seconds of the update alone, and how they follow what is live, on samples that are given.

    python -m benchmarks.update [--model S|M|V] [--workload A|B|C] [--tokens 1280] [--repeats 3]

Lengths of C are drawn as its samples end: with 0.8 to 2% a token. Rewards are random, and equal in
the groups that are to be dead, so that their advantages are 0. Prints the best of the repeats with
all groups live, with half and with a quarter, and the memory that the process used at most, or on a
GPU its arrays there.

The floor is the time of the matrix products with weights alone, forward and backward, each at the
rate that JAX reaches here for its shape; attention, norms and the softmax are not in it.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import (
    describe,
    keep_memory,
    matmul_rate,
    most_memory,
    report,
    timed,
    verdict,
)
from benchmarks.step import build
from benchmarks.workloads import SMALL, WORKLOADS, Workload, make_prompts, matrices
from jaxgrpo.core.types import Rollouts
from jaxgrpo.models.api import ModelConfig
from jaxgrpo.update.step import build_steps

SHARES = (1.0, 0.5, 0.25)
LIMITS = {"S": 2.5, "M": 2.0, "V": 2.0}  # the update with all groups live, over its floor


def make_rollouts(workload: Workload, vocab: int, share: float) -> Rollouts:
    """Rollouts of which `share` of the groups is live."""
    random = np.random.default_rng(0)
    shape = workload.prompts, workload.samples
    length = np.full(shape, workload.completion)
    if workload.ragged:
        ends = random.geometric(random.uniform(0.008, 0.02, shape))
        length = np.minimum(ends, workload.completion)
    mask = np.arange(workload.completion) < length[..., None]
    reward = random.normal(size=shape).astype(np.float32)
    reward[round(workload.prompts * share) :] = 0
    tokens = np.where(mask, random.integers(2, vocab, mask.shape), 0).astype(np.int32)
    rollouts: Any = {
        "completion_tokens": tokens,
        "token_mask": mask,
        "behavior_logp": np.where(mask, -np.log(vocab), 0).astype(np.float32),
        "rewards": {"reward": reward},
        "truncated": length == workload.completion,
        "policy_version": np.zeros(shape, np.int32),
        "fields": {},
    }
    return jax.tree.map(jnp.asarray, Rollouts(**vars(make_prompts(workload, vocab)), **rollouts))


def floor(config: ModelConfig, tokens: int, completion: int, passes: int) -> float:
    """Seconds of the products of weights in `passes` micro-batches of equal size.

    Args:
      tokens: of completions, and of prompts counted once, in all passes together.
      completion: of them those of completions, which alone meet the head.
    """
    weights = [(tokens // passes, *matrix, config.num_layers) for matrix in matrices(config)]
    weights.append((completion // passes, config.hidden_size, config.vocab_size, 1))
    seconds, rates = 0.0, {}
    for rows, inner, outer, times in weights:
        # The product itself, the gradient of what goes in, and that of the weight.
        for shape in ((rows, inner, outer), (rows, outer, inner), (inner, rows, outer)):
            rate = rates[shape] = rates.get(shape) or matmul_rate(*shape)
            seconds += times * 2 * rows * inner * outer / rate
    return passes * seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SMALL, default="S")
    parser.add_argument("--workload", choices=("A", "B", "C"), default="C")
    parser.add_argument("--tokens", type=int, help="per micro-batch; by default as in training")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    keep_memory("benchmarks.update")
    workload = WORKLOADS[arguments.workload]
    blueprint, state = build(arguments.model, arguments.workload, arguments.tokens)
    steps, vocab = build_steps(blueprint), blueprint.model.config.vocab_size
    result: dict[str, Any] = {
        **describe(),
        "model": arguments.model,
        "workload": arguments.workload,
    }
    for share in SHARES:
        rollouts, spent = make_rollouts(workload, vocab, share), []
        for _ in range(arguments.repeats + 1):
            state, prepared = steps.prepare(state, rollouts)
            (state, _), seconds = timed(steps.update, state, prepared.batches)
            spent.append(seconds)
        number = int(prepared.batches[0].num_live)
        density = float(prepared.metrics["update/density"].result())
        print(f"{share:4.0%} live {min(spent[1:]):7.3f} s, {number} micro-batches, {density:.2f}")
        result[f"live {share}"] = {"seconds": min(spent[1:]), "density": density}
        if share == 1:
            completion = int(rollouts.token_mask.sum())
            tokens = completion + int(rollouts.prompt_mask.sum()) - workload.prompts
            least = floor(blueprint.model.config, tokens, completion, number)
            times, limit = min(spent[1:]) / least, LIMITS[arguments.model]
            comparison = f"{times:.2f} times below it, limit {limit}: {verdict(times <= limit)}"
            print(f"floor {least:.3f} s, {comparison}")
            result["floor"] = {"seconds": least, "times": times}
    peak, place = most_memory(jax.local_devices()[0])
    print(
        f"{blueprint.geometry.tokens} tokens a micro-batch, at most {peak:.1f} GiB of the {place}"
    )
    report({**result, "tokens": blueprint.geometry.tokens, "gib": peak, "memory": place})


if __name__ == "__main__":
    main()
