"""Mistakes that are made in advantages and losses, each as a user would write it, for
`jaxgrpo check`; tests/experiments/test_check.py says by what each is found."""

import dataclasses

import jax
import jax.numpy as jnp

import jaxgrpo as jg
from jaxgrpo.losses import Penalty, Surrogate, log_ratio
from jaxgrpo.losses.sequences import segment_mean


def with_value(signal, value):
    return dataclasses.replace(signal, value=value)


def count(signal):
    return jnp.maximum(signal.mask.sum(1, keepdims=True), 1)


def centre(signal):
    return signal.value - signal.value.sum(1, keepdims=True) / count(signal)


def others_mean(signal):
    total = signal.value.sum(1, keepdims=True)
    return (total - signal.value) / jnp.maximum(count(signal) - 1, 1)


def leave_one_out(signal):
    return jnp.where(signal.mask, signal.value - others_mean(signal), 0)


def wrong_sign(signal, rollouts):
    return with_value(signal, -leave_one_out(signal))


def batch_deviation(signal, rollouts):
    return with_value(signal, centre(signal) / (signal.value.std() + 1e-6))


def bare_deviation(signal, rollouts):
    """0 / 0 where all samples of a group agree."""
    return with_value(signal, centre(signal) / signal.value.std(1, keepdims=True))


def sees_itself(signal, rollouts):
    return with_value(signal, centre(signal))


def mean_of_all(signal, rollouts):
    """Counts samples that could not be scored as failures."""
    return with_value(signal, signal.value - signal.value.mean(1, keepdims=True))


def raw_rewards(signal, rollouts):
    """NaN for a whole group where one of its rewards is NaN."""
    return with_value(signal, signal.value - rollouts.rewards["reward"].mean(1, keepdims=True))


def across_prompts(signal, rollouts):
    return with_value(signal, signal.value - signal.value.mean(0, keepdims=True))


def at_the_last_token():
    return jg.chain(jg.sum_rewards(), jg.subtract_group_mean(), jg.to_tokens("last"))


def reward_twice(signal, rollouts):
    return with_value(signal, 2 * leave_one_out(signal))


def times_length(signal, rollouts):
    return with_value(signal, leave_one_out(signal) * rollouts.token_mask.sum(-1))


def mask_after_mean():
    return jg.chain(jg.sum_rewards(), jg.subtract_group_mean(), jg.mask_truncated())


def grown_mask():
    def bring_back(signal, rollouts):
        return dataclasses.replace(signal, mask=jnp.ones_like(signal.mask))

    return jg.chain(jg.sum_rewards(), jg.mask_truncated(), bring_back)


def sees_its_batch():
    def init(spec):
        return jnp.zeros(())

    def update(signal, baseline, rollouts):
        baseline = 0.5 * baseline + 0.5 * signal.value.sum() / jnp.maximum(signal.mask.sum(), 1)
        return with_value(signal, signal.value - baseline), baseline, {}

    return jg.AdvantageTransform("sees_its_batch", init, update)


def k3_for_reverse_kl():
    def compute(tokens):
        log = tokens.log_ratio_to(tokens.fields["reference_logp"])
        return 0.1 * jnp.where(tokens.mask, jnp.exp(-log) - 1 + log, 0), {}

    return Penalty("k3", compute, needs=frozenset({"reference_logp"}))


def kl_upwards():
    """Gives minus a penalty."""

    def compute(tokens):
        log = tokens.log_ratio_to(tokens.fields["reference_logp"])
        return -0.05 * jnp.square(log), {}

    return Penalty("kl_upwards", compute, needs=frozenset({"reference_logp"}))


def k1_in_the_loss():
    """The log ratio itself, whose expected gradient is 0."""

    def compute(tokens):
        return 0.1 * tokens.log_ratio_to(tokens.fields["reference_logp"]), {}

    return Penalty("k1", compute, needs=frozenset({"reference_logp"}))


def less_entropy():
    def compute(tokens):
        return 0.1 * tokens.unmasked(tokens.fields["policy_entropy"]), {}

    return Penalty("less_entropy", compute, needs=frozenset({"policy_entropy"}))


def says_per_token():
    """Reads its sequence, and says that it does not."""

    def compute(tokens):
        ratio = jnp.exp(segment_mean(log_ratio(tokens)[0], tokens.mask, tokens.segment))
        return -ratio * tokens.without_gradient(tokens.advantage), {}

    return Surrogate("says_per_token", compute, per_token=True)


def ratio_upside_down(tokens):
    return jnp.exp(-log_ratio(tokens)[0]) * tokens.without_gradient(tokens.advantage), {}


def weight_with_gradient(tokens):
    """cispo whose ratio is no constant."""
    ratio = jnp.clip(jnp.exp(log_ratio(tokens)[0]), 0, 5)
    weight = ratio * tokens.without_gradient(tokens.advantage)
    return -weight * tokens.unmasked(tokens.logp), {}


def one_left_out_of_the_bounds(tokens):
    """clip(ratio, 0.2, 1 - 0.2)."""
    ratio, weight = jnp.exp(log_ratio(tokens)[0]), tokens.without_gradient(tokens.advantage)
    return -jnp.minimum(ratio * weight, jnp.clip(ratio, 0.2, 0.8) * weight), {}


def shifted_tokens(tokens):
    """The advantage of each token on the log-prob of the one before it."""
    advantage = jnp.roll(tokens.without_gradient(tokens.advantage), 1, axis=-1)
    return -jnp.exp(log_ratio(tokens)[0]) * advantage, {}


def mean_per_micro_batch(tokens):
    ratio = jnp.exp(log_ratio(tokens)[0])
    number = jnp.maximum(tokens.mask.sum(), 1)
    return -ratio * tokens.without_gradient(tokens.advantage) / number, {}


def clipped_on_the_wrong_side():
    def compute(tokens):
        ratio, weight = jnp.exp(log_ratio(tokens)[0]), tokens.without_gradient(tokens.advantage)
        return -jnp.maximum(ratio * weight, jnp.clip(ratio, 0.8, 1.2) * weight), {}

    return Surrogate("wrong_side", compute)


def without_ratio(tokens):
    logp = tokens.unmasked(tokens.logp)
    return -jnp.exp(logp - jax.lax.stop_gradient(logp)) * tokens.without_gradient(
        tokens.advantage
    ), {}
