"""Surrogates of papers against their formulas in PyTorch: value and gradient, in float64.

Each formula is written from its source on padded rows, a sequence each, with autograd for the
gradient. Golden numbers of peers stand in test_peers.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxgrpo.losses import build_surrogate, policy_loss

B, T, G = 12, 7, 3
GROUP = np.arange(B) // G


@pytest.fixture(scope="module")
def batch():
    """Rows of a few groups; one is empty, one group has no advantage, ratios leave all bounds."""
    random = np.random.default_rng(3)
    logp = -random.exponential(size=(B, T))
    old = np.minimum(logp + 0.6 * random.normal(size=(B, T)), -1e-3)
    advantage = random.normal(size=B)
    advantage[GROUP == 1] = 0
    mask = np.arange(T) < random.integers(2, T + 1, (B, 1))
    mask[4] = False
    behavior, draw = old + 0.2 * random.normal(size=(B, T)), random.random((B, T))
    arrays = (logp, old, advantage, mask, behavior, draw)
    return [np.asarray(array) for array in arrays]


def mean_over(values, mask):
    return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def ce_gppo(lp, lo, a, m, **_):
    """arXiv 2509.20712 with beta 0.6 and 0.9, bounds 0.2 and 0.3."""
    rho = torch.exp(lp - lo)
    constant = rho.detach()
    scale = torch.ones_like(rho)
    scale = torch.where((a < 0) & (constant < 0.8), 0.6 * 0.8 / constant, scale)
    scale = torch.where((a > 0) & (constant > 1.3), 0.9 * 1.3 / constant, scale)
    return -scale * rho * a


def dynamic_clip(lp, lo, a, m, **_):
    """arXiv 2509.02333: the roots of (r - 1) r q = eps, dual clip at the cap of 3."""
    q, rho = torch.exp(lo), torch.exp(lp - lo)
    low = 0.5 + 0.5 * torch.sqrt(torch.clamp(1 - 4 * 0.16 / q, min=0))
    high = torch.clamp(0.5 + 0.5 * torch.sqrt(1 + 4 * 0.2 / q), max=3.0)
    loss = torch.maximum(-a * rho, -a * torch.minimum(torch.maximum(rho, low), high))
    return torch.where(a < 0, torch.minimum(loss, -3.0 * a), loss)


def topr(lp, lo, a, m, **_):
    """arXiv 2503.14286: the ratio of a whole sample, tapered to [0, 1] where it is bad."""
    ratio = torch.exp(((lp - lo) * m).sum(1, keepdim=True)).clamp(0, 1).detach()
    return -torch.where(a > 0, 1.0, ratio) * a * lp


def topr_token(lp, lo, a, m, **_):
    """ROLL's form."""
    return -torch.where(a > 0, 1.0, torch.exp(lp - lo).clamp(0, 1).detach()) * a * lp


def kimi(lp, lo, a, m, **_):
    """arXiv 2501.12599: the square of the whole sample's log ratio."""
    total = ((lp - lo) * m).sum(1, keepdim=True)
    return -a * lp + 0.5 * 0.3 * total**2 / m.sum(1, keepdim=True).clamp(min=1)


def kimi_token(lp, lo, a, m, **_):
    """ROLL's kimi15, verl's dro."""
    return -a * lp + 0.5 * 0.3 * (lp - lo) ** 2


def ppo(lp, lo, a):
    rho = torch.exp(lp - lo)
    return torch.maximum(-a * rho, -a * rho.clamp(0.8, 1.2)), rho


def opsm(lp, lo, a, m, behavior, **_):
    """arXiv 2512.02556, section 3.1, times PPO's clip."""
    loss, _ = ppo(lp, lo, a)
    drift = mean_over(behavior - lp.detach(), m)
    return loss * ((a >= 0) | (drift <= 0.1))


def covariance(lp, a, m):
    a = a.expand_as(lp)
    return (a - a[m].mean()) * (lp.detach() - lp.detach()[m].mean())


def clip_cov(lp, lo, a, m, draw, **_):
    """arXiv 2505.22617: of the tokens with 0.1 < c < 2 that PPO does not clip, k at random."""
    loss, rho = ppo(lp, lo, a)
    c, constant = covariance(lp, a, m), rho.detach()
    clipped = ((a > 0) & (constant > 1.2)) | ((a < 0) & (constant < 0.8))
    places = torch.nonzero(m & ~clipped & (c > 0.1) & (c < 2))
    k = max(1, int(0.08 * m.sum()))
    assert len(places) > k
    order = torch.argsort(draw[places[:, 0], places[:, 1]], descending=True)[:k]
    keep = torch.ones_like(loss)
    keep[places[order][:, 0], places[order][:, 1]] = 0
    return loss * keep


def kl_cov(lp, lo, a, m, **_):
    """arXiv 2505.22617: the price on the k tokens of the largest c."""
    c = covariance(lp, a, m).masked_fill(~m, -torch.inf).flatten()
    pays = torch.zeros_like(c)
    pays[torch.topk(c, max(1, int(0.1 * m.sum()))).indices] = 1
    return -torch.exp(lp - lo) * a + 0.7 * pays.reshape(lp.shape) * (lp - lo).abs()


CASES = {
    "ce_gppo": (ce_gppo, {"low": 0.2, "high": 0.3, "beta_low": 0.6, "beta_high": 0.9}),
    "dynamic_clip": (dynamic_clip, {"cap": 3.0}),
    "topr": (topr, {}),
    "topr token": (topr_token, {"level": "token"}),
    "mirror_descent": (kimi, {"tau": 0.3}),
    "mirror_descent token": (kimi_token, {"tau": 0.3, "level": "token"}),
    "off_policy_mask": (opsm, {"threshold": 0.1}),
    "clip_cov": (clip_cov, {"share": 0.08, "least": 0.1, "most": 2.0}),
    "kl_cov": (kl_cov, {"share": 0.1, "coefficient": 0.7}),
}


def in_torch(formula, arrays):
    """(loss, gradient) of the mean over tokens."""
    logp, old, advantage, mask, behavior, draw = (torch.tensor(array) for array in arrays)
    logp.requires_grad_(True)
    fields = {"behavior": behavior, "draw": draw}
    per_token = formula(logp, old, advantage[:, None], mask, **fields)
    loss = (per_token * mask).sum() / mask.sum()
    loss.backward()
    return loss.item(), np.asarray(logp.grad)


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_those_of_the_formula(float64, batch, case):
    formula, options = CASES[case]
    surrogate = build_surrogate(case.partition(" ")[0], options)
    logp, *rest = map(jnp.asarray, batch[:4])
    fields = {"behavior_logp": batch[4], "token_draw": batch[5]}
    fields = {name: jnp.asarray(fields[name]) for name in fields.keys() & surrogate.needs}

    @jax.jit
    @jax.value_and_grad
    def ours(logp):
        return policy_loss(surrogate, "token_mean", logp, *rest, **fields)[0]

    value, gradient = ours(logp)
    expected, slope = in_torch(formula, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(gradient, slope, rtol=1e-10, atol=1e-15)
    plain = in_torch(lambda lp, lo, a, m, **_: -a * lp, batch)[1]
    assert np.abs(slope - plain).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_slope_at_ratio_one_is_that_of_the_formula(float64, batch, case):
    formula, options = CASES[case]
    surrogate = build_surrogate(case.partition(" ")[0], options)
    arrays = batch[0], batch[0].copy(), *batch[2:]
    logp, *rest = map(jnp.asarray, arrays[:4])
    fields = {"behavior_logp": batch[4], "token_draw": batch[5]}
    fields = {name: jnp.asarray(fields[name]) for name in fields.keys() & surrogate.needs}
    gradient = jax.grad(
        lambda logp: policy_loss(surrogate, "token_mean", logp, *rest, **fields)[0]
    )(logp)
    np.testing.assert_allclose(gradient, in_torch(formula, arrays)[1], rtol=1e-10, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_so_many_tokens_pay_where_all_tie(share):
    logp, mask = jnp.full((4, 10), -1.0), jnp.ones((4, 10), bool)
    spec = {"use": "kl_cov", "share": share}
    metrics = policy_loss(spec, "token_mean", logp, logp - 0.1, jnp.zeros(4), mask)[1]
    assert metrics["clip_ratio/covariance_mean"].result() == pytest.approx(share)


def labels_in_torch(arrays, tau):
    """arXiv 2602.05630: the sum over groups of both logs, divided by the number of samples."""
    logp, old, advantage, mask, *_ = (torch.tensor(array) for array in arrays)
    logp.requires_grad_(True)
    score = mean_over(logp - old, mask)[:, 0] / tau
    total, unit = torch.zeros(()), torch.ones(1)
    for group in range(B // G):
        for sign in (1, -1):
            members = (torch.tensor(GROUP) == group) & (advantage * sign > 0) & mask.any(1)
            total = total + torch.log(torch.cat([unit, torch.exp(-sign * score[members])]).sum())
    loss = total / mask.any(1).sum()
    loss.backward()
    return loss.item(), np.asarray(logp.grad)


@pytest.mark.parametrize("tau", [0.5, 0.01])
def test_rewards_as_labels_is_two_classifiers_per_group(float64, batch, tau):
    logp, *rest = map(jnp.asarray, batch[:4])

    @jax.jit
    @jax.value_and_grad
    def ours(logp):
        spec = {"use": "rewards_as_labels", "tau": tau}
        return policy_loss(spec, "sequence_sum", logp, *rest, group=jnp.asarray(GROUP + 7))[0]

    value, gradient = ours(logp)
    expected, slope = labels_in_torch(batch, tau)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(gradient, slope, rtol=1e-10, atol=1e-15)
    assert np.abs(slope).max() > 1e-2
