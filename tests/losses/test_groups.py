"""Losses that see groups: the mean log ratio of a group, and gvpo against its published loss."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import all_but

from jaxgrpo.core.errors import InputError
from jaxgrpo.losses import Objective, Tokens, build_surrogate, group_log_ratio, gvpo, policy_loss
from jaxgrpo.losses.registry import build_reduction

P, G, T = 4, 3, 5
BETA = 0.3
LAYOUTS = {"rows": (P * G, T), "a group a row": (P, G * T), "two groups a row": (P // 2, 2 * G * T)}


def batch():
    """Arrays [P, G, T]: a masked sample, a flat group, a group of one sample, a group of none."""
    random = np.random.default_rng(0)
    logp, old = (-random.exponential(size=(P, G, T)) for _ in range(2))
    mask = np.arange(T) < random.integers(1, T + 1, (P, G, 1))
    mask[0, 0, 0] = mask[0, 1, :4] = True
    mask[0, 1, 2] = mask[0, 2] = mask[2, 1:] = mask[3] = False  # a forced token, and samples
    reward = random.normal(size=(P, G))
    reward[1] = 1.0
    unmasked = mask.any(-1)
    mean = np.where(unmasked, reward, 0).sum(1) / np.maximum(unmasked.sum(1), 1)
    advantage = np.where(unmasked, reward - mean[:, None], 0)
    return np.where(mask, logp, np.nan), np.where(mask, old, np.nan), advantage, mask


def mean_by_hand(change, mask):
    """[P]: the mean over a group's unmasked sequences of the sums over their unmasked tokens."""
    means = np.zeros(len(change))
    for p, (rows, masks) in enumerate(zip(change, mask, strict=True)):
        sums = [row[m].sum() for row, m in zip(rows, masks, strict=True) if m.any()]
        means[p] = np.mean(sums) if sums else 0.0
    return means


def tokens_in(shape):
    """(tokens in rows of a shape, ids of their groups)."""
    logp, old, advantage, mask = batch()
    sample = np.arange(P * G).repeat(T).reshape(shape)
    segment = sample - sample.min(-1, keepdims=True) + 1
    wide = np.broadcast_to(advantage[..., None], mask.shape)
    arrays = {"logp": logp, "proximal_logp": old, "advantage": wide, "mask": mask}
    rows = {name: jnp.asarray(leaf.reshape(shape)) for name, leaf in arrays.items()}
    return Tokens(**rows, segment=jnp.asarray(segment, jnp.int32), fields={}), sample // G


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    all_but(["a group a row"], LAYOUTS),
)
def test_a_groups_mean_is_over_its_unmasked_sequences_however_they_are_packed(float64, layout):
    tokens, group = tokens_in(LAYOUTS[layout])
    logp, old, _, mask = batch()
    want = mean_by_hand(logp - old, mask)
    result = np.asarray(group_log_ratio(tokens, jnp.asarray(group), P))
    np.testing.assert_allclose(result, want[group], rtol=1e-12)
    assert (want[[0, 1, 2]] != 0).all()
    assert want[3] == 0  # of no sequence at all


def gvpo_by_hand(beta):
    """(loss, gradient [P, G, T]) of the mean over sequences, the mean log ratio held."""
    logp, old, advantage, mask = batch()
    change = np.where(mask, logp - old, 0)
    gap = beta * (change.sum(-1) - mean_by_hand(logp - old, mask)[:, None]) - advantage
    unmasked = mask.any(-1)
    loss = (gap**2)[unmasked].mean() / (2 * beta)
    return loss, np.where(mask, gap[..., None], 0) / unmasked.sum()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gvpo_is_its_formula_on_plain_arrays_packed_or_not(float64, layout):
    tokens, group = tokens_in(LAYOUTS[layout])
    segment = None if layout == "rows" else tokens.segment
    arrays = (
        tokens.proximal_logp,
        tokens.advantage,
        tokens.mask,
        segment,
        jnp.asarray(7 - 2 * group),
    )
    surrogate = {"use": "gvpo", "beta": BETA}

    @jax.jit
    @jax.value_and_grad
    def loss(logp):
        return policy_loss(surrogate, "sequence_sum", logp, *arrays)[0]

    value, gradient = loss(tokens.logp)
    want, slope = gvpo_by_hand(BETA)
    np.testing.assert_allclose(value, want, rtol=1e-12)
    np.testing.assert_allclose(gradient.reshape(P, G, T), slope, rtol=1e-12, atol=1e-15)
    flat, alone = slope[1], slope[2, 0]
    assert np.abs(flat).max() > 0.01  # no advantage, and ratios that are drawn together
    assert not alone.any()  # its ratio is the mean
    np.testing.assert_allclose(gradient.reshape(P, G, T)[2, 0], 0, atol=1e-15)


@pytest.mark.full
def test_a_groups_mean_may_be_given_to_the_loss_of_a_part_of_it(float64):
    tokens, group = tokens_in(LAYOUTS["rows"])
    mean = group_log_ratio(tokens, jnp.asarray(group), P)
    part = slice(0, 2)  # two of a group's three samples
    names = ("logp", "proximal_logp", "advantage", "mask")
    arrays = [getattr(tokens, name)[part] for name in names]
    loss, _ = policy_loss(
        gvpo(BETA), "sequence_sum", *arrays, group=jnp.zeros(2, int), group_log_ratio=mean[part]
    )
    logp, old, advantage, mask = (leaf[0] for leaf in batch())
    (center,) = mean_by_hand((logp - old)[None], mask[None])
    gap = BETA * (np.where(mask, logp - old, 0).sum(-1) - center) - advantage
    np.testing.assert_allclose(loss, (gap[part] ** 2).mean() / (2 * BETA), rtol=1e-12)


V = 3
SEQUENCES = np.array([*itertools.product(range(V), repeat=2)])  # [9, 2], every one there is


def sequence_logp(logits):
    """[P, N] log-probs of all sequences by tables of first tokens, and of second given first."""
    first, second = logits[:, 0], logits[:, 1:]
    log = jax.nn.log_softmax
    a, b = SEQUENCES.T
    return jnp.stack([log(first)[:, a], log(second)[:, a, b]], -1)


@pytest.fixture
def policies(float64):
    """(logits of a policy and of the proximal one [P, 1 + V, V], rewards [P, 9])."""
    random = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape))  # noqa: E731
    return draw(P, 1 + V, V), draw(P, 1 + V, V), draw(P, len(SEQUENCES))


@pytest.mark.full
@pytest.mark.slow
def test_its_gradient_is_that_of_the_published_loss_through_the_mean_too(policies):
    logits, old, reward = policies
    drawn = np.random.default_rng(2).integers(0, len(SEQUENCES), (P, G))
    pick = lambda table: jnp.take_along_axis(table, drawn, 1)  # noqa: E731
    centred = lambda x: x - x.mean(1, keepdims=True)  # noqa: E731

    def published(logits):
        """Half the squares over n - 1, added up over groups: verl-recipe's loss, nothing held."""
        log_ratio = (sequence_logp(logits) - sequence_logp(old)).sum(-1)
        gap = BETA * centred(pick(log_ratio)) - centred(pick(reward))
        return 0.5 * (gap**2).sum() / (G - 1)

    def ours(logits):
        logp, proximal = (
            jnp.take_along_axis(sequence_logp(table), drawn[..., None], 1).reshape(P * G, 2)
            for table in (logits, old)
        )
        advantage, mask = centred(pick(reward)).reshape(-1), jnp.ones((P * G, 2), bool)
        group = jnp.arange(P * G) // G
        arrays = logp, proximal, advantage, mask
        return policy_loss(gvpo(BETA), "sequence_sum", *arrays, group=group)[0]

    scale = BETA * G / (G - 1) * P
    np.testing.assert_allclose(published(logits), scale * ours(logits), rtol=1e-12)
    want, slope = jax.grad(published)(logits), jax.grad(ours)(logits)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(want, scale * slope, rtol=1e-9, atol=1e-14)


@pytest.mark.full
def test_the_policy_of_least_loss_is_the_best_at_this_price_of_kl(policies):
    """All sequences of one group: the loss of the proximal times exp(r / beta) is 0, as the KL
    that is paid for is least there; the loss of the proximal policy is not."""
    _, old, reward = policies
    log_joint = sequence_logp(old).sum(-1) + reward / BETA
    joint = jax.nn.log_softmax(log_joint).reshape(P, V, V)
    marginal = jax.nn.logsumexp(joint, -1)
    best = jnp.stack([marginal[:, :, None].repeat(V, 2), joint - marginal[..., None]], -1)
    best = best.reshape(P * V * V, 2)
    proximal = sequence_logp(old).reshape(P * V * V, 2)
    advantage = (reward - reward.mean(1, keepdims=True)).reshape(-1)
    mask, group = jnp.ones(best.shape, bool), jnp.arange(P).repeat(V * V)

    @jax.value_and_grad
    def loss(logp):
        arrays = logp, proximal, advantage, mask
        return policy_loss(gvpo(BETA), "sequence_sum", *arrays, group=group)[0]

    value, slope = loss(best)
    np.testing.assert_allclose(value, 0, atol=1e-24)
    np.testing.assert_allclose(slope, 0, atol=1e-12)
    assert loss(proximal)[0] > 0.1


def test_without_a_group_and_with_a_beta_that_is_no_price_it_is_refused():
    logp, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    with pytest.raises(InputError, match=r"gvpo reads fields\['group_log_ratio'\].*give `group`"):
        policy_loss("gvpo", "sequence_sum", logp, logp, logp, mask)
    for beta in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(InputError, match=f"gvpo: beta = {beta}, expected a positive price"):
            gvpo(beta)


def test_a_loss_that_sees_groups_or_prices_ratios_keeps_samples_without_an_advantage():
    reduction = build_reduction("sequence_sum")
    for surrogate, acts_on_all in (
        (gvpo(), True),
        (build_surrogate("clip"), False),
        (build_surrogate("mirror_descent"), True),  # its price acts on ratios alone
        (build_surrogate({"use": "by_sample", "field": "replayed", "then": "gvpo"}), True),
        (build_surrogate("clip")._replace(acts_on_all=True), True),
        (build_surrogate("clip")._replace(needs=frozenset({"group_log_ratio"})), True),
    ):
        objective = Objective(surrogate, reduction)
        objective.trace()
        assert objective.acts_on_all == acts_on_all
        assert "group_log_ratio" not in objective.needs  # no pass before the update makes it
