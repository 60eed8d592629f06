"""alpha-DPG and f-DPG: their gradients by enumeration, their numbers against NumPy."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from jaxgrpo import advantages as adv
from jaxgrpo.advantages.registry import plain_rollouts
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Mean

ALPHAS = {f"alpha {alpha}": alpha for alpha in (0.0, 0.25, 0.5, 0.75, 0.9)}
V, T = 3, 3
SEQUENCES = np.array(list(itertools.product(range(V), repeat=T)))
DIVERGENCES = {  # f(t), and what f(t) / t goes to
    "forward_kl": (lambda t: -jnp.log(t), 0.0),
    "js": (lambda t: t * jnp.log(2 * t / (t + 1)) + jnp.log(2 / (t + 1)), np.log(2)),
    "tv": (lambda t: jnp.abs(t - 1) / 2, 0.5),
    "chi2": (lambda t: 1 / t - 2 + t, 1.0),
}


def amari(alpha):
    """(f, f(t) / t in the limit) of the alpha-divergence."""
    if alpha == 0:
        return lambda t: -jnp.log(t) + t - 1, 1.0
    f = lambda t: (t**alpha - alpha * t - (1 - alpha)) / (alpha * (alpha - 1))  # noqa: E731
    return f, 1 / (1 - alpha)


class Toy(NamedTuple):
    """A policy and a base of one softmax per prefix, over three tokens of three values."""

    policy: np.ndarray  # [prefix, V] logits
    base: np.ndarray
    valid: np.ndarray  # [27] bool

    def token_logp(self, logits):  # [27, T]
        logp = jax.nn.log_softmax(jnp.asarray(logits))
        first, second = SEQUENCES.T[:2]
        prefix = np.stack([0 * first, 1 + first, 1 + V + V * first + second], 1)
        return logp[prefix, SEQUENCES]

    def filtered(self):
        """(p [27], Z)."""
        base = np.exp(np.asarray(self.token_logp(self.base)).sum(1)) * self.valid
        return base / base.sum(), base.sum()


def toy(seed=0) -> Toy:
    random = np.random.default_rng(seed)
    logits = random.normal(size=(2, 1 + V + V * V, V))
    return Toy(logits[0], logits[1], random.random(V**T) < 0.4)


def fields(policy, base, **more) -> dict[str, Any]:
    """Token log-probs [P, G, T] as rollouts hold them."""
    tokens = np.ones(policy.shape, bool)
    return {"behavior_logp": policy, "base_logp": base, "token_mask": tokens} | more


def parts(**options):
    """Every alpha and divergence: name -> chain."""
    table = {name: adv.alpha_dpg(alpha, **options) for name, alpha in ALPHAS.items()}
    table |= {name: adv.f_dpg(name, **options) for name in DIVERGENCES}
    return {name: adv.chain(adv.sum_rewards(), part) for name, part in table.items()}


def advantages(chains, rewards, rollout_fields):
    """name -> advantages, all in one program, as float64 NumPy."""

    @jax.jit
    def run(rewards, columns):
        return {
            name: adv.evaluate(transform, rewards, **columns)[0]
            for name, transform in chains.items()
        }

    return jax.tree.map(
        np.asarray, run(jnp.asarray(rewards), jax.tree.map(jnp.asarray, rollout_fields))
    )


def slopes(game: Toy):
    """(d log pi(y) / d logits [27, ...], probabilities [27])."""
    sequence_logp = lambda logits: game.token_logp(logits).sum(1)  # noqa: E731
    return np.asarray(jax.jacobian(sequence_logp)(game.policy)), np.exp(
        np.asarray(sequence_logp(game.policy))
    )


def divergence_slope(game: Toy, f, limit):
    """The gradient of D_f(pi || p) = sum p f(pi / p) + limit pi(p = 0), by autodiff."""
    target, _ = game.filtered()
    inside = game.valid

    def value(logits):
        policy = jnp.exp(game.token_logp(logits).sum(1))
        ratio = policy[inside] / target[inside]
        return (target[inside] * f(ratio)).sum() + limit * policy[~inside].sum()

    return np.asarray(jax.grad(value)(game.policy))


@pytest.mark.slow
def test_expected_gradients_are_those_of_the_divergences():
    """Alone, with Z known and no cap: E[R d log pi] = -(1 - alpha) d D_alpha, and -d D_f."""
    with jax.enable_x64(True):
        game = toy()
        _, z = game.filtered()
        logp = [game.token_logp(logits)[:, None] for logits in (game.policy, game.base)]
        rate = np.full(V**T, z)
        rollout_fields = fields(*logp, difficulty=rate)
        reward = advantages(
            parts(cap=1e9, base_rate="difficulty"), game.valid[:, None] * 1.0, rollout_fields
        )
        slope, chance = slopes(game)
        for name, value in reward.items():
            expected = np.einsum("i,i,ijk", chance, value[:, 0], slope)
            alpha = ALPHAS.get(name)
            f, limit = DIVERGENCES[name] if alpha is None else amari(alpha)
            scale = 1.0 if alpha is None else 1 - alpha
            target_slope = -scale * divergence_slope(game, f, limit)
            np.testing.assert_allclose(expected, target_slope, atol=1e-12)
            assert np.abs(target_slope).max() > 1e-3


@pytest.mark.slow
def test_leaving_oneself_out_does_not_change_the_expected_gradient():
    """All 729 pairs of samples of one prompt, with Z known."""
    with jax.enable_x64(True):
        game = toy(1)
        pairs = np.array(list(itertools.product(range(V**T), repeat=2)))
        logp = [np.asarray(game.token_logp(logits))[pairs] for logits in (game.policy, game.base)]
        rollout_fields = fields(*logp, difficulty=np.full(len(pairs), game.filtered()[1]))
        value = advantages(
            {0.5: parts(cap=1e9, base_rate="difficulty")["alpha 0.5"]},
            game.valid[pairs] * 1.0,
            rollout_fields,
        )[0.5]
        slope, chance = slopes(game)
        weight = chance[pairs].prod(1)
        expected = np.einsum("i,ig,igjk", weight, value, slope[pairs]) / 2
        np.testing.assert_allclose(expected, -0.5 * divergence_slope(game, *amari(0.5)), atol=1e-12)


@pytest.mark.full
@pytest.mark.slow
def test_samples_of_another_policy_give_the_same_expected_gradient():
    """All pairs drawn from q; alpha 0 with Z known is GDC++: p / q - pi / q for a sample alone."""
    with jax.enable_x64(True):
        game = toy(4)
        sampler = game.policy + 0.3 * toy(5).policy
        p, z = game.filtered()
        slope, chance = slopes(game)
        sampler_logp = np.asarray(game.token_logp(sampler))
        q = np.exp(sampler_logp.sum(1))
        pairs = np.array(list(itertools.product(range(V**T), repeat=2)))
        logp = [np.asarray(game.token_logp(logits)) for logits in (game.policy, game.base)]

        def run(places):
            rollout_fields = fields(sampler_logp[places], logp[1][places])
            rollout_fields |= {"trainer_logp": logp[0][places]}
            rollout_fields |= {"difficulty": np.full(len(places), z)}
            chains = parts(cap=1e9, base_rate="difficulty", off_policy=True)
            return advantages(chains, game.valid[places] * 1.0, rollout_fields)

        alone, values = run(np.arange(V**T)[:, None]), run(pairs)
        np.testing.assert_allclose(alone["alpha 0.0"][:, 0], (p - chance) / q, rtol=1e-9)
        weight = q[pairs].prod(1)
        for name, value in values.items():
            expected = np.einsum("i,ig,igjk", weight, value, slope[pairs]) / 2
            alpha = ALPHAS.get(name)
            f, limit = DIVERGENCES[name] if alpha is None else amari(alpha)
            scale = 1.0 if alpha is None else 1 - alpha
            target_slope = -scale * divergence_slope(game, f, limit)
            np.testing.assert_allclose(expected, target_slope, atol=1e-10, err_msg=name)
        # The baseline costs nothing in expectation and takes variance away: E |w g|^2 falls.
        norm = (slope**2).sum((1, 2))
        with_baseline = (q * alone["alpha 0.0"][:, 0] ** 2 * norm).sum()
        assert with_baseline < 0.9 * (q * (p / q) ** 2 * norm).sum()


def test_weighed_by_a_ratio_of_1_nothing_changes_but_what_flat_groups_get():
    random = np.random.default_rng(2)
    value = (random.random((20, 4)) < 0.5) * 1.0
    policy, base = -random.exponential(size=(2, 20, 4, 3))
    on = advantages(parts(), value, fields(policy, base))
    off = advantages(parts(off_policy=True), value, fields(policy, base, trainer_logp=policy))
    for name, expected in on.items():
        np.testing.assert_allclose(off[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    assert adv.alpha_dpg(off_policy=True).importance
    assert not adv.alpha_dpg().importance


def test_the_estimate_of_z_is_unbiased_where_it_is_not_clipped():
    """Over all pairs: E[mean of a v / pi] = Z; with ratios below 1 the bound of 1 never bites."""
    with jax.enable_x64(True):
        game = toy(2)
        ratio = np.exp(
            np.asarray(game.token_logp(game.base)).sum(1)
            - np.asarray(game.token_logp(game.policy)).sum(1)
        )
        game = game._replace(valid=game.valid & (ratio < 1))
        pairs = np.array(list(itertools.product(range(V**T), repeat=2)))
        logp = [np.asarray(game.token_logp(logits))[pairs] for logits in (game.policy, game.base)]
        transform = adv.chain(adv.sum_rewards(), adv.alpha_dpg(0.0, floor=1e-300))
        value = advantages({0: transform}, game.valid[pairs] * 1.0, fields(*logp))[0]
        single_success = game.valid[pairs].sum(1) == 1
        # One success of two: R = n / 1 - 1 whatever its ratio, as the ratio cancels against Z.
        np.testing.assert_allclose(np.abs(value[single_success]), 2.0)
        run = jax.jit(
            jax.vmap(lambda rewards, policy, base: z_estimate(transform, rewards, policy, base))
        )
        estimates = run(game.valid[pairs][:, None] * 1.0, logp[0][:, None], logp[1][:, None])
        _, chance = slopes(game)
        np.testing.assert_allclose(
            (chance[pairs].prod(1) * estimates).sum(), game.filtered()[1], 1e-10
        )


def z_estimate(transform, rewards, policy, base):
    rollouts = make(rewards, policy, base)
    z = adv.compute(transform, rollouts)[2]["alpha_dpg/z"]
    assert isinstance(z, Mean)
    return z.total


def make(rewards, policy, base, row=None):
    nothing = dict.fromkeys(type(laws.make_rollouts()).__dataclass_fields__)
    columns = {
        "rewards": {"reward": rewards},
        "behavior_logp": policy,
        "fields": {"base_logp": base},
        "token_mask": jnp.ones(policy.shape, bool),
        "step": jnp.int32(0),
        "row": row,
    }
    return type(laws.make_rollouts())(**{**nothing, **columns})


def oracle(value, policy, base, alpha, cap=10.0):
    """alpha-DPG of one group, sample by sample; None = not scored."""
    live = [i for i, v in enumerate(value) if v is not None]
    if not live:
        return np.zeros(len(value))
    odds = {i: np.exp(base[i] - policy[i]) if value[i] else 0.0 for i in live}
    z = min(np.mean(list(odds.values())), 1) or 1e-4
    reward = {i: min((odds[i] / z) ** (1 - alpha) - 1, cap) for i in live}
    out = np.zeros(len(value))
    for i in live:
        rest = [reward[j] for j in live if j != i]
        out[i] = reward[i] - np.mean(rest) if rest else reward[i]
    return out


def test_groups_are_those_of_the_papers_code_with_every_edge():
    values = [
        [1, 0, 0, 1],
        [0, 0, 0, 0],  # all fail: 0
        [1, 1, 1, 1],  # all pass: not 0
        [1, None, None, None],  # alone: R itself
        [0, None, None, None],
        [None] * 4,
        [1, None, 0, 1],
    ]
    random = np.random.default_rng(0)
    policy, base = (-random.exponential(size=(7, 4, 5)) for _ in range(2))
    tokens = np.arange(5) < random.integers(1, 6, (7, 4, 1))
    tokens[0, 0] = False  # an empty completion, log-probs 0 and 0
    base[6, 3, 0] = -np.inf  # the base cannot say it: a failure
    policy[~tokens], base[~tokens] = np.nan, np.inf
    rewards = np.array([[np.nan if v is None else v for v in row] for row in values], float)
    policies, bases = (np.where(tokens, leaf, 0).sum(-1) for leaf in (policy, base))
    with jax.enable_x64(True):
        rollout_fields = fields(policy, base) | {"token_mask": tokens}
        chains = {
            alpha: adv.chain(adv.sum_rewards(), adv.alpha_dpg(alpha, cap=1.5))
            for alpha in ALPHAS.values()
        }
        by_alpha = advantages(chains, rewards, rollout_fields)
    for alpha, value in by_alpha.items():
        for row, label in enumerate(values):
            expected = oracle(label, policies[row], bases[row], alpha, cap=1.5)
            np.testing.assert_allclose(value[row], expected, atol=1e-12, err_msg=str((alpha, row)))
        assert (value[1] == 0).all()
        assert (value[2] != 0).all()
        assert value[4].tolist() == [-1, 0, 0, 0]


def test_alpha_near_one_is_leave_one_out_and_its_next_term_is_an_anchor():
    random = np.random.default_rng(1)
    value = (random.random((50, 4)) < 0.5) * 1.0
    logp = [-random.exponential(size=(50, 4, 2)) for _ in range(2)]
    rate = random.uniform(0.1, 0.9, 50)
    gap = 1e-6
    with jax.enable_x64(True):
        transform = adv.chain(
            adv.sum_rewards(), adv.alpha_dpg(1 - gap, base_rate="difficulty", cap=1e9)
        )
        result = advantages({0: transform}, value, fields(*logp, difficulty=rate))[0]
    left_out = lambda r: r - (r.sum(1, keepdims=True) - r) / 3  # noqa: E731
    np.testing.assert_allclose(result, left_out(value), atol=1e-4)
    anchor = left_out(value * ((logp[1] - logp[0]).sum(-1) - np.log(rate)[:, None]))
    np.testing.assert_allclose((result - left_out(value)) / gap, anchor, rtol=1e-3, atol=1e-4)


def test_at_the_filtered_model_nothing_is_pushed():
    """pi = p on the valid sequences: all odds agree, so each advantage is exactly 0."""
    with jax.enable_x64(True):
        game = toy(3)
        target, z = game.filtered()
        logp = np.log(target[game.valid])[None, :, None]
        base = logp + np.log(z)
        successes = np.ones(logp.shape[:2])
        rollout_fields = fields(logp, base, difficulty=np.array([z]))
        values = advantages(parts(base_rate="difficulty"), successes, rollout_fields)
    for name, value in values.items():
        if name != "tv":  # its pseudo-reward jumps between -1/2 and 1/2 at agreement
            np.testing.assert_allclose(value, 0, atol=1e-12, err_msg=str(name))


@pytest.mark.full
def test_long_sequences_stay_in_logs_and_the_cap_holds():
    policy = np.full((1, 3, 1000), -3.0, np.float32)
    base = policy - np.array([[[2.0], [-2.0], [0.0]]], np.float32)  # ratios of e^-2000, e^2000, 1
    values = advantages(parts(), [[1.0, 1.0, 0.0]], fields(policy, base))
    for name in ALPHAS:
        np.testing.assert_allclose(values[name], [[-5.5, 11.0, -5.5]], rtol=1e-6)
    for value in values.values():
        assert np.isfinite(value).all()


def test_running_z_is_the_mean_over_the_rows_samples_so_far():
    transform = adv.chain(adv.sum_rewards(), adv.alpha_dpg(0.0, z="running", cap=100.0))
    with pytest.raises(InputError, match="z = 'running' remembers every row"):
        transform.init(adv.spec_of(laws.make_rollouts()))
    row = jnp.array([1, 1, 0], jnp.int32)
    base = jnp.log(jnp.array([[[0.5], [0.5]], [[0.25], [0.25]], [[0.5], [0.5]]]))
    rewards = jnp.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    rollouts = make(rewards, jnp.zeros_like(base), base, row)
    state = transform.init(adv.spec_of(rollouts, num_rows=3))
    step = jax.jit(lambda state: adv.compute(transform, rollouts, state))
    for _ in range(2):
        signal, state, _ = step(state)
        # Row 1: (0.5 + 0 + 0.25 + 0.25) / 4 = 0.25 in both batches; R = 0.5 / 0.25 - 1 and -1.
        np.testing.assert_allclose(signal.value, [[2, -2], [0, 0], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(state["alpha_dpg"]["total"], [0, 2, 0], rtol=1e-6)
    np.testing.assert_allclose(state["alpha_dpg"]["count"], [4, 8, 0])


def test_metrics_say_what_was_refused_capped_and_unsupported():
    base = jnp.array([[[0.0], [-jnp.inf], [0.0], [0.0]]])
    policy = jnp.array([[[-9.0], [0.0], [0.0], [0.0]]])
    rollouts = make(jnp.array([[1.0, 1.0, 0.0, 0.5]]), policy, base)
    transform = adv.chain(adv.sum_rewards(), adv.alpha_dpg(0.0, cap=1.0))
    signal, _, metrics = jax.jit(lambda rollouts: adv.compute(transform, rollouts))(rollouts)
    assert signal.mask.tolist() == [[True, True, True, False]]
    shares = {name.split("/")[1]: metric.result() for name, metric in metrics.items()}
    assert shares["refused"] == 0.25
    assert shares["capped"] == shares["unsupported"] == pytest.approx(1 / 3)
    assert shares["z"] == 1


def test_wrong_options_are_refused():
    logp = np.zeros((1, 2, 1))
    for make_part, message in (
        (lambda: adv.alpha_dpg(1.0), r"alpha = 1.0, expected a number in \[0, 1\)"),
        (lambda: adv.alpha_dpg(cap=np.inf), "cap = inf, expected a finite number"),
        (lambda: adv.alpha_dpg(floor=0.0), "floor = 0.0, expected"),
        (lambda: adv.alpha_dpg(z="grup"), "did you mean 'group'"),
        (lambda: adv.f_dpg("reverse_kl"), "infinite ones left out.*forward_kl"),
    ):
        with pytest.raises(InputError, match=message):
            make_part()
    for recipe in ("alpha_dpg", "f_dpg"):
        with pytest.raises(InputError, match=r"in \{0, 1\} but got 0.5: give threshold"):
            adv.evaluate(recipe, [[0.5, 1.0]], **fields(logp, logp))
        with pytest.raises(InputError, match="needs the field 'base_logp'"):
            adv.evaluate(recipe, [[0.0, 1.0]], behavior_logp=logp, token_mask=logp == 0)
    wrong, transform = (
        fields(logp, logp, difficulty=np.ones(2)),
        parts(base_rate="difficulty")["tv"],
    )
    with pytest.raises(InputError, match=r"difficulty has shape \(2,\), expected one base"):
        adv.evaluate(transform, [[0.0, 1.0]], **wrong)


@pytest.mark.full
def test_a_schedule_that_arrives_at_one_is_leave_one_out():
    logp = jnp.full((1, 3, 2), -1.0)
    fields = {"token_mask": jnp.ones((1, 3, 2), bool), "base_logp": logp, "behavior_logp": 2 * logp}
    arrived = {"alpha": lambda step: 1.0 + 0.0 * step.astype(jnp.float32)}
    value, _ = adv.evaluate("alpha_dpg", [[1.0, 0.0, 0.0]], options=arrived, **fields)
    np.testing.assert_allclose(value, [[1.0, -0.5, -0.5]], rtol=1e-6)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("part", [adv.alpha_dpg, adv.f_dpg])
def test_a_prompt_whose_base_rate_is_not_known_has_no_target_and_is_masked(part):
    logp, rewards = np.log([[[0.5], [0.2]]] * 3), np.array([[1.0, 0.0]] * 3)
    transform, rollout_fields = (
        adv.chain(adv.sum_rewards(), part(base_rate="rate")),
        fields(logp, logp),
    )
    value, mask = adv.evaluate(
        transform, rewards, rate=np.array([np.nan, 0.5, np.inf]), **rollout_fields
    )
    assert mask.tolist() == [[False] * 2, [True] * 2, [False] * 2]
    alone, _ = adv.evaluate(transform, rewards, rate=np.full(3, 0.5), **rollout_fields)
    np.testing.assert_array_equal(value[1], alone[1])
    assert (value[1] != 0).all()


@pytest.mark.slow
def test_right_samples_of_earlier_steps_say_nothing_of_the_bases_success_rate():
    """Of the two that were drawn one is right, and base and policy agree on all: Z is 1/2."""
    names = ("base_logp", "behavior_logp", "trainer_logp")
    arrays: dict[str, Any] = {name: np.full((1, 3, 1), -1.0) for name in names}
    arrays |= {"token_mask": np.ones((1, 3, 1), bool), "replayed": [[0, 0, 1]]}
    rollouts, spec = plain_rollouts([[1.0, 0.0, 1.0]], **arrays)
    for recipe in ("alpha_dpg", "f_dpg"):
        _, _, metrics = adv.compute(adv.build(recipe), rollouts)
        assert metrics[f"{recipe}/z"].result() == pytest.approx(0.5)
    part = adv.add_kl_return_for_validity(0.9)
    recipe = adv.chain(part)
    _, state, _ = adv.compute(recipe, rollouts, recipe.init(spec))
    total, count = (float(state[part.name][name][0]) for name in ("total", "count"))
    assert (total, count) == (1, 2)
