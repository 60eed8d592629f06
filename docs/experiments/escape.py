"""The escape from a rare format, simulated: a softmax over formats that all prompts share.

    p_x = c softmax(logits + offset_x e_0)[0]

Format 0 is the one that counts, `c` the chance that its answer is right, offset_x how near a prompt
is to it. Offsets are normal: with mean and deviation such that p has the mean .31 and the share of
flat pairs E[p^2 + (1 - p)^2] .84, near those of arXiv 2605.07689, .25 to .33 and .90.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

RIGHT = 0.9
MEAN, FLAT_PAIRS = 0.31, 0.84
STEPS, SEEDS = 200, 200
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
WEIGHTS = WEIGHTS / WEIGHTS.sum()

ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sign": lambda reward: 2 * reward - 1,
    "grpo": lambda reward: _over(_centred(reward), reward.std(-1, ddof=1, keepdims=True)),
    "dr_grpo": lambda reward: _centred(reward),
    "rloo": lambda reward: _centred(reward) * reward.shape[-1] / (reward.shape[-1] - 1),
    "reinforce": lambda reward: reward,
}
"""rewards [..., G] -> advantages"""


def _centred(reward: np.ndarray) -> np.ndarray:
    return reward - reward.mean(-1, keepdims=True)


def _over(value: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    return np.where(deviation > 0, value / np.where(deviation > 0, deviation, 1), 0)


class Start(NamedTuple):
    """The offsets of prompts, normal, and the wrong formats that share the rest of the softmax."""

    mean: float
    deviation: float
    wrong_formats: int

    def success(self, logits: np.ndarray) -> np.ndarray:
        """E over prompts of p, by quadrature: logits [..., K + 1] -> [...]."""
        return self._rates(logits) @ WEIGHTS

    def flat(self, logits: np.ndarray, size: int) -> np.ndarray:
        """The share of groups that agree: E[p^G + (1 - p)^G], [...]."""
        p = self._rates(logits)
        return (p**size + (1 - p) ** size) @ WEIGHTS

    def _rates(self, logits: np.ndarray) -> np.ndarray:
        offset = self.mean + self.deviation * NODES
        margin = logits[..., :1] + offset - _log_sum(logits[..., 1:])[..., None]
        return RIGHT / (1 + np.exp(-margin))


def _log_sum(logits: np.ndarray) -> np.ndarray:
    return np.log(np.exp(logits).sum(-1))


@functools.cache
def start(wrong_formats: int) -> Start:
    """Mean and deviation of the offsets, by bisection: all logits are 0."""
    logits = np.zeros(wrong_formats + 1)

    def mean_for(deviation: float) -> float:
        def success(mean: float) -> float:
            return float(Start(mean, deviation, wrong_formats).success(logits))

        return _bisect(success, MEAN, -30, 30)

    def flat_for(deviation: float) -> float:
        return float(Start(mean_for(deviation), deviation, wrong_formats).flat(logits, 2))

    deviation = _bisect(flat_for, FLAT_PAIRS, 0.1, 30)
    return Start(mean_for(deviation), deviation, wrong_formats)


def _bisect(function: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Where an increasing function has the value."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return low


class Optimizer(NamedTuple):
    """What makes steps of gradients: SGD, or Adam that acts on flat batches or skips them."""

    name: str
    adam: bool
    skips: bool = False

    def step(
        self, moments: tuple[np.ndarray, ...], gradient: np.ndarray, live: np.ndarray, rate: float
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """(moments, ascent of the logits) of each run. Shapes: gradient [S, K + 1]; live [S]."""
        if not self.adam:
            return moments, rate * gradient
        first, second, count = moments
        acts = live | (not self.skips)
        count = count + acts
        acts = acts[:, None]
        first = np.where(acts, 0.9 * first + 0.1 * gradient, first)
        second = np.where(acts, 0.999 * second + 0.001 * gradient**2, second)
        passed = np.maximum(count, 1)[:, None]
        scaled = np.sqrt(second / (1 - 0.999**passed)) + 1e-8
        return (first, second, count), np.where(acts, rate * first / (1 - 0.9**passed) / scaled, 0)


SGD = Optimizer("SGD", adam=False)
STEPPING = Optimizer("Adam, steps on flat batches", adam=True)
SKIPPING = Optimizer("Adam, skips them", adam=True, skips=True)


@functools.cache
def final_success(
    advantage: str, size: int, wrong_formats: int, optimizer: Optimizer, rate: float
) -> float:
    """Success after STEPS steps of one prompt and `size` samples each, a mean over SEEDS runs."""
    random = np.random.default_rng([size, wrong_formats])  # the same draws for every method
    offsets = start(wrong_formats)
    logits = np.zeros((SEEDS, wrong_formats + 1))
    moments = (np.zeros_like(logits), np.zeros_like(logits), np.zeros(SEEDS, int))
    for _ in range(STEPS):
        shifted = logits.copy()
        shifted[:, 0] += offsets.mean + offsets.deviation * random.normal(size=SEEDS)
        policy = np.exp(shifted - _log_sum(shifted)[:, None])
        drawn = (random.random((SEEDS, size, 1)) > policy.cumsum(-1)[:, None, :-1]).sum(-1)
        reward = ((drawn == 0) & (random.random((SEEDS, size)) < RIGHT)).astype(float)
        value = ADVANTAGES[advantage](reward)
        score = (drawn[..., None] == np.arange(wrong_formats + 1)) - policy[:, None]
        gradient = (value[..., None] * score).mean(1)
        moments, ascent = optimizer.step(moments, gradient, (value != 0).any(1), rate)
        logits = logits + ascent
    return float(offsets.success(logits).mean())
