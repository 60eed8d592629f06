"""Updates towards a teacher against PyTorch in float64, however the batch is laid out.

The oracle takes the logits of one plain causal pass per sample, of policy and teacher, to PyTorch
and differentiates the loss there; the gradient of the logits goes back through the plain pass.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from engines import cpu_mesh, make_blueprint

from jaxgrpo import advantages, losses
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import finalise
from jaxgrpo.core.scores import SCORES, Score, at_student_tokens, choice_field, prompt_field
from jaxgrpo.models import decoder, lora, sharding
from jaxgrpo.models.api import LoraConfig
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.forward import Teacher, param_layout, params_of
from jaxgrpo.update.step import build_steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("float64")]

P, G, WIDTH, STEPS, K = 4, 4, 6, 5, 3
RATE, TEMPERATURE, SHARE = 0.1, 0.8, 0.6
WIDE = dataclasses.replace(tiny.UNIFORM, dtype="float64")
ADAPTED = dataclasses.replace(WIDE, lora=LoraConfig(rank=2, alpha=4.0))
LARGER = dataclasses.replace(WIDE, hidden_size=48, num_layers=3, head_dim=12)
FIRST, SECOND = "models/first", "models/second"
REWARDS = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], np.float32)
CHOICE = np.array([0, 1, 1, 0], np.int32)


@functools.cache
def weights(path):
    """The parameters of a teacher."""
    return tiny.params(LARGER, seed=5) if path == FIRST else tiny.params(WIDE, seed=7)


@functools.cache
def rollouts():
    """Rollouts of which two samples have another prompt, and the rows a teacher each."""
    random = np.random.default_rng(8)
    shown = random.integers(2, tiny.VOCAB, (P, G, WIDTH + 3)).astype(np.int32)
    length = random.integers(2, WIDTH + 4, (P, G, 1))
    shown = np.where(np.arange(WIDTH + 3) < length, shown, -1)
    shown[0, 1] = shown[3] = -1  # has no prompt
    fields = {prompt_field("shown"): shown}
    fields |= {choice_field(name): CHOICE for name in ("several_logp", "several_top")}
    return tiny.rollouts(REWARDS, STEPS, WIDTH, fields=jax.tree.map(jnp.asarray, fields))


def scores(k=K):
    paths, shape = (FIRST, SECOND), "[P, G, T]"
    return SCORES | {
        "teacher_logp": Score(shape, FIRST, "logp"),
        "several_logp": Score(shape, "", "logp", policies=paths),
        "shown_logp": Score(shape, "trainer", "logp", prompt="shown"),
        "teacher_top": Score(shape, FIRST, "likeliest", count=k),
        "several_top": Score(shape, "", "likeliest", count=k, policies=paths),
        "shown_top": Score(shape, "trainer", "likeliest", prompt="shown", count=k),
        "self_top": Score(shape, "trainer", "likeliest", count=k),
        "self_logp": Score(shape, "trainer", "logp"),
    }


def by_advantage(teacher, gamma=0.5):
    """Chain and objective of the recipe opd."""
    options = {"share": SHARE, "gamma": gamma, "teacher": teacher}
    return advantages.build("opd", options), losses.Objective(losses.reinforce(), MEAN)


def by_divergence(score, alpha, k=K, top="teacher"):
    """Chain and objective of a divergence alone."""
    nothing = advantages.build([{"use": "sum_rewards", "reward": 0.0}])
    penalty = losses.top_k_divergence(0.7, alpha, score, k, top)
    return nothing, losses.Objective(losses.reinforce(), MEAN, (penalty,))


MEAN = losses.token_mean()


def updated(method, config=WIDE, mesh=(1, 1, 1, 1), tokens=100, k=K, logits=None):
    """(the step of SGD on all parameters, divided by the rate; metrics of update and `prepare`)."""
    grid = cpu_mesh(*mesh)
    build = lambda config: decoder.build(config, constrain=sharding.constrain(grid))  # noqa: E731
    chain, objective = method
    blueprint = make_blueprint(
        config,
        (P, G, WIDTH, STEPS),
        tokens,
        mesh=mesh,
        rate=RATE,
        temperature=TEMPERATURE,
        chain=chain,
        objective=objective,
        scores=at_student_tokens(scores(k), objective.at_student_tokens),
        logits_per_chunk=logits,
        teachers={FIRST: Teacher(build(LARGER)), SECOND: Teacher(build(WIDE))},
    )
    steps = build_steps(blueprint)
    frozen = {
        path: jax.device_put(weights(path), param_layout(teacher.model, grid))
        for path, teacher in blueprint.teachers.items()
    }
    params = jax.device_put(tiny.params(config), param_layout(blueprint.model, grid))
    learner = first_learner(blueprint, params, 8, ("reward",), frozen)
    before = jax.tree.map(np.asarray, params_of(learner))
    learner, prepared = steps.prepare(learner, put_prompts(grid, rollouts()))
    pieces = int(prepared.batches[0].num_live) * sharding.num_bins(grid)
    assert pieces > (tokens < 100) or not prepared.live.any()
    learner, metrics = steps.update(learner, prepared.batches)
    after = jax.tree.map(np.asarray, params_of(learner))
    step = jax.tree.map(lambda old, new: (old - new) / RATE, before, after)
    return step, finalise(metrics), finalise(prepared.metrics)


def behind_shown():
    """The samples behind their shown prompts, each a group by itself."""
    shown = rollouts().fields[prompt_field("shown")].reshape(P * G, -1)
    arrays = {
        name: getattr(rollouts(), name).reshape(P * G, 1, STEPS)
        for name in ("completion_tokens", "token_mask")
    }
    prompt = {"prompt_tokens": jnp.maximum(shown, 0), "prompt_mask": shown >= 0}
    return dataclasses.replace(rollouts(), **arrays, **prompt)


@functools.cache
def table(name):
    """The full log-probs [P, G, T, V] of a teacher, NaN without a prompt."""
    policy = tiny.params(WIDE)
    if name == "shown":
        values = tiny.whole_tables(WIDE, policy, behind_shown(), TEMPERATURE)
        has_prompt = behind_shown().prompt_mask.any(-1).reshape(P, G, 1, 1)
        return np.where(has_prompt, values.reshape(P, G, STEPS, -1), np.nan)
    first = np.asarray(tiny.whole_tables(LARGER, weights(FIRST), rollouts(), TEMPERATURE))
    if name == "teacher":
        return first
    second = np.asarray(tiny.whole_tables(WIDE, weights(SECOND), rollouts(), TEMPERATURE))
    return np.where(CHOICE[:, None, None, None] == 0, first, second)


def slope_by_hand(loss, config=WIDE):
    """The gradient of all parameters of a loss of log-probs [P, G, T, V] that PyTorch takes."""
    apply = functools.partial(tiny.whole_tables, config)
    values, pull = jax.vjp(lambda p: apply(p, rollouts(), TEMPERATURE), tiny.params(config))
    log_p = torch.tensor(np.asarray(values), requires_grad=True)
    total = loss(log_p)
    (d_log_p,) = torch.autograd.grad(total, log_p)
    (slope,) = pull(jnp.asarray(d_log_p.numpy()))
    return slope, float(total.detach())


def loss_of_advantage(name, gamma, log_p):
    """sum A log p / tokens, with A written out."""
    mask = torch.tensor(np.asarray(rollouts().token_mask))
    ids = torch.tensor(np.asarray(rollouts().completion_tokens, np.int64))[..., None]
    token_logp = torch.gather(log_p, -1, ids)[..., 0]
    gain = torch.gather(torch.tensor(table(name)), -1, ids)[..., 0] - token_logp.detach()
    gain = torch.nan_to_num(torch.where(mask, gain, 0.0), 0.0).clamp(-20, 20)
    to_go, behind = torch.zeros_like(gain), torch.zeros(P, G, dtype=gain.dtype)
    for t in reversed(range(STEPS)):
        behind = to_go[..., t] = gain[..., t] + gamma * behind
    rewards = torch.tensor(REWARDS, dtype=gain.dtype)
    baseline = (rewards.sum(1, keepdim=True) - rewards) / (G - 1)
    value = (1 - SHARE) * (rewards - baseline)[..., None] + SHARE * to_go
    # Samples whose advantage is 0 at all tokens weigh nothing and are counted all the same.
    return -torch.where(mask, value.float().double() * token_logp, 0.0).sum() / mask.sum()


def loss_of_divergence(name, alpha, k, log_p, top="teacher"):
    """The divergence of distributions that are cut to the k likeliest tokens and the rest."""
    mask = torch.tensor(np.asarray(rollouts().token_mask))
    log_q = torch.tensor(table(name))
    scored = mask & ~log_q[..., 0].isnan()
    log_q = torch.nan_to_num(log_q, -1.0)
    ids = (log_p.detach() if top == "student" else log_q).topk(k, -1).indices
    named = torch.zeros_like(log_q, dtype=torch.bool).scatter(-1, ids, True)

    def cut(values):
        rest = torch.logsumexp(values.masked_fill(named, -torch.inf), -1, keepdim=True)
        return torch.cat([torch.gather(values, -1, ids), rest], -1)

    p, q = cut(log_p), cut(log_q)
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
    if alpha in (0, 1):
        value = kl(q, p) if alpha == 0 else kl(p, q)
    else:
        mixed = torch.log((1 - alpha) * p.exp() + alpha * q.exp())
        value = (1 - alpha) * kl(p, mixed) + alpha * kl(q, mixed)
    return 0.7 * torch.where(scored, value, 0.0).sum() / mask.sum()


def assert_near(step, slope, tolerance=1e-5):
    for actual, expected in zip(*map(jax.tree.leaves, (step, slope)), strict=True):
        size = np.abs(expected).max() + 1e-12
        np.testing.assert_allclose(actual, expected, atol=tolerance * size)


LAYOUTS = {
    "micro-batches": {"tokens": 25},
    "4 devices": {"mesh": (1, 1, 2, 2), "tokens": 50},
    "4 bins": {"mesh": (2, 2, 1, 1), "tokens": 25},
}
CHUNKS = {"tokens": 25, "logits": 7 * tiny.VOCAB}
QUICK = {("shown", "micro-batches")}
"""Of the cases, by teacher and layout, those that are tried in every run of the tests."""


def cases(*methods):
    """Each method, whose first entry is its teacher, in each layout."""
    return [
        pytest.param(
            *method, layout, marks=[] if (method[0], layout) in QUICK else pytest.mark.full
        )
        for method in methods
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize(("name", "layout"), cases(["several"], ["shown"]))
def test_an_update_by_the_teachers_advantage_is_pytorchs(name, layout):
    step, *_ = updated(by_advantage(name), **LAYOUTS[layout])
    slope, _ = slope_by_hand(functools.partial(loss_of_advantage, name, 0.5))
    assert_near(step, slope)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "alpha", "layout"), cases(("teacher", 0.0), ("several", 1.0), ("shown", 0.5))
)
def test_an_update_by_a_divergence_is_pytorchs(name, alpha, layout):
    step, metrics, _ = updated(by_divergence(f"{name}_top", alpha), **LAYOUTS[layout])
    slope, loss = slope_by_hand(functools.partial(loss_of_divergence, name, alpha, K))
    assert_near(step, slope)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "alpha", "layout"),
    [
        ("shown", 0.5, {"mesh": (1, 1, 2, 2), "tokens": 50}),
        pytest.param("teacher", 1.0, CHUNKS, marks=pytest.mark.full),
        pytest.param("several", 0.0, {"mesh": (2, 2, 1, 1), "tokens": 25}, marks=pytest.mark.full),
        pytest.param("several", 1.0, {"mesh": (1, 1, 2, 2)} | CHUNKS, marks=pytest.mark.full),
        pytest.param("shown", 0.5, CHUNKS, marks=pytest.mark.full),
    ],
)
def test_a_divergence_at_the_students_tokens_is_pytorchs(name, alpha, layout):
    step, metrics, _ = updated(by_divergence(f"{name}_top", alpha, top="student"), **layout)
    by_hand = functools.partial(loss_of_divergence, name, alpha, K)
    slope, loss = slope_by_hand(functools.partial(by_hand, top="student"))
    assert_near(step, slope)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert abs(slope_by_hand(by_hand)[1] - loss) > 1e-3 * loss  # the teacher's are other tokens


def test_a_top_of_neither_is_refused():
    with pytest.raises(InputError, match="top = 'policy'; expected"):
        losses.top_k_divergence(1.0, top="policy")


@pytest.mark.full
def test_all_tokens_but_one_give_the_whole_kl():
    """As the distribution then has no tail of several tokens; by the sum over all of them."""
    k = tiny.VOCAB - 1
    _, metrics, _ = updated(by_divergence("teacher_top", 1.0, k), k=k)
    policy = np.asarray(tiny.whole_tables(WIDE, tiny.params(WIDE), rollouts(), TEMPERATURE))
    full = (np.exp(policy) * (policy - table("teacher"))).sum(-1)
    assert metrics["kl"] == pytest.approx(full[np.asarray(rollouts().token_mask)].mean(), rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("alpha", "config", "top"),
    [
        (0.3, WIDE, "student"),
        *((alpha, ADAPTED, top) for alpha in (0, 0.3, 1) for top in ("teacher", "student")),
        *((alpha, WIDE, "teacher") for alpha in (0, 0.3, 1)),
    ],
)
def test_a_policy_that_teaches_itself_by_a_divergence_moves_nothing(alpha, config, top):
    step, metrics, _ = updated(by_divergence("self_top", alpha, top=top), config=config, tokens=25)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(step))
    assert metrics["kl"] == 0


@pytest.mark.full
def test_a_policy_that_teaches_itself_gives_advantages_of_0():
    method = advantages.build("opd", {"teacher": "self"}), by_advantage("self")[1]
    step, _, prepared = updated(method, tokens=25)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(step))
    assert prepared["distill/kl"] == 0
    assert prepared["distill/scored"] == 1
    assert prepared["live_samples"] == 0


@pytest.mark.full
def test_adapters_learn_from_a_teacher():
    step, *_ = updated(by_divergence("teacher_top", 0.5), config=ADAPTED, tokens=25)
    slope, _ = slope_by_hand(functools.partial(loss_of_divergence, "teacher", 0.5, K), ADAPTED)
    adapters, expected = lora.split(step)[0], lora.split(slope)[0]
    assert_near(adapters, expected)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(lora.split(step)[1]))
