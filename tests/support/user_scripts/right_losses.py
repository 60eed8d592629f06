"""A loss of its own, written here and named in a config; the loop by hand; a comparison."""

from typing import Any

import jax.numpy as jnp
from jax import Array

import jaxgrpo as jg
from jaxgrpo.experiments.compare import compare
from jaxgrpo.losses import Penalty, Surrogate, Tokens, log_ratio


def power_of_ratio(power: float = 0.5) -> Surrogate:
    """loss = -A rho^power / power."""

    def compute(tokens: Tokens) -> tuple[Array, dict[str, Any]]:
        log_rho, clamped = log_ratio(tokens)
        advantage = tokens.without_gradient(tokens.advantage)
        share = clamped.sum() / jnp.maximum(tokens.mask.sum(), 1)
        return -advantage * jnp.exp(power * log_rho) / power, {"clamped": share}

    return Surrogate("power_of_ratio", compute)


def pull(strength: float = 0.01) -> Penalty:
    """strength * |log ratio to the reference|."""

    def compute(tokens: Tokens) -> tuple[Array, dict[str, Any]]:
        distance = jnp.abs(tokens.logp - tokens.fields["reference_logp"])
        return strength * jnp.where(tokens.mask, distance, 0), {}

    return Penalty("pull", compute, needs=frozenset({"reference_logp"}))


def by_hand(config: jg.Config) -> str:
    """The loop of `jg.train`, step by step."""
    run = jg.setup(config)
    learner, stream = run.learner, run.stream
    for step in range(config.train.steps):
        stream, collected = run.collect(run.sync(learner), step, stream)
        learner, prepared = run.prepare(learner, collected.rollouts)
        learner, metrics = run.update(learner, prepared.batches)
        print({name: metric.result() for name, metric in metrics.items()})
    return jg.parameter_hash(learner.trainable)


def main(base: str) -> int:
    surrogate = {"use": f"{__file__}:power_of_ratio", "power": 0.25}
    config = jg.load_config("quickstart", [f"model.path={base}", "train.steps=2"])
    jg.train(config, loss={"surrogate": surrogate}, run={"dir": "runs/power"})
    pulled: dict[str, Any] = {"loss.kl.use": f"{__file__}:pull", "loss.kl.strength": 0.02}
    jg.train(config, **pulled, run={"dir": "runs/pulled"})
    print(by_hand(config))
    compare("own_losses.toml", dry_run=True)
    return 0
