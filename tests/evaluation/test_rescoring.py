"""The second pass of an evaluation against plain passes over whole distributions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrpo.config.keys import EvalKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.evaluation.evaluate import Policy, Questions, make_evaluator
from jaxgrpo.evaluation.rescoring import Base, make_rescorer
from jaxgrpo.models import decoder, sharding
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.driver import SlotEngine

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def case():
    rollouts = tiny.rollouts(np.zeros((4, 6)), steps=5)
    ours, bases = tiny.params(), tiny.params(seed=1, scale=5.0)
    tables = [
        np.asarray(tiny.whole_tables(tiny.UNIFORM, values, rollouts, TEMPERATURE), np.float64)
        for values in (ours, bases)
    ]
    return rollouts, ours, bases, tables


def one_device():
    return sharding.make_mesh(devices=jax.devices()[:1])


def rescored(case, mesh=None, **options):
    rollouts, ours, bases, _ = case
    mesh = mesh or one_device()
    model = decoder.build(tiny.UNIFORM, constrain=sharding.constrain(mesh))
    layout = sharding.param_shardings(mesh, model.axes, model.shapes)
    ours, bases = jax.device_put(ours, layout), jax.device_put(bases, layout)
    run = make_rescorer(
        model,
        mesh,
        temperature=TEMPERATURE,
        quantities={"confidence", "logp", "rank"},
        base=Base(model, lambda: bases),
        **options,
    )
    assert run is not None
    return jax.device_get(run(ours, rollouts))


def expected(case):
    rollouts, _, _, (p, q) = case
    mask = np.asarray(rollouts.token_mask)
    tokens = np.asarray(rollouts.completion_tokens)[..., None]
    logp, base_logp = (np.take_along_axis(table, tokens, -1)[..., 0] for table in (p, q))
    far = (p - q) > 20
    values = {
        "confidence": -np.sort(p, axis=-1)[..., -20:].mean(-1),
        "kl": (np.exp(p) * np.minimum(p - q, 20)).sum(-1),
        "clamped": (np.exp(p) * far).sum(-1),
        "logp": logp,
        "rank": (p > logp[..., None]).sum(-1),
        "logp_gap": logp - base_logp,
    }
    return {name: np.where(mask, value, 0) for name, value in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens",
    [pytest.param(None, marks=pytest.mark.full), 16, pytest.param(48, marks=pytest.mark.full)],
)
def test_what_it_says_of_each_token_is_what_whole_distributions_say(case, tokens):
    scores, right = rescored(case, tokens=tokens), expected(case)
    assert scores.keys() == right.keys()
    for name, value in right.items():
        assert value.any() or name == "clamped"
        np.testing.assert_allclose(scores[name], value, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_four_devices_say_what_one_says(case, axis):
    """Prompts over two or four bins, the parameters and the vocabulary split in two."""
    single, four = rescored(case), rescored(case, sharding.make_mesh(**{axis: 2}))
    for name, value in single.items():
        np.testing.assert_allclose(four[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_the_base_itself_is_at_no_distance(case):
    rollouts, ours, _, _ = case
    model, mesh = tiny.model(), one_device()
    run = make_rescorer(model, mesh, temperature=1.0, base=Base(model, lambda: ours))
    assert run is not None
    scores = run(ours, rollouts)
    assert set(scores) == {"kl", "clamped", "logp_gap"}
    for value in scores.values():
        np.testing.assert_allclose(value, 0, atol=1e-6)


@pytest.mark.slow
def test_only_what_is_asked_for_is_run(case):
    rollouts, ours, _, _ = case
    model, mesh = tiny.model(), one_device()
    assert make_rescorer(model, mesh, temperature=1.0) is None
    run = make_rescorer(model, mesh, temperature=1.0, quantities={"confidence"})
    assert run is not None
    assert set(run(ours, rollouts)) == {"confidence"}
    run = make_rescorer(model, mesh, temperature=1.0, quantities={"logp"})
    assert run is not None
    assert set(run(ours, rollouts)) == {"logp"}


def test_a_base_with_another_vocabulary_is_refused():
    wider = tiny.model(tiny.UNIFORM.__class__(**{**vars(tiny.UNIFORM), "vocab_size": 41}))
    with pytest.raises(InputError, match="the base has 41 tokens and the model 40"):
        make_rescorer(tiny.model(), one_device(), temperature=1.0, base=Base(wider, dict))


def test_rewritten_conversations_are_not_scored_again_by_models_that_recur():
    hybrid, plain, mesh = tiny.model(tiny.HYBRID), tiny.model(), one_device()
    for model, base in ((hybrid, plain), (plain, hybrid)):
        parts = functools.partial(make_rescorer, model, mesh, temperature=1.0)
        parts = functools.partial(parts, base=Base(base, dict))
        assert parts() is not None
        with pytest.raises(InputError) as refused:
            parts(has_forks=True)
        assert str(refused.value).startswith('data.history = "fork": ')
        assert str(refused.value).endswith('set it to "exact"')
    assert make_rescorer(plain, mesh, temperature=1.0, quantities={"logp"}, has_forks=True)


def test_an_evaluation_of_rewritten_conversations_by_a_model_that_recurs_has_no_second_pass():
    settings = SamplingSettings(4, 1.0, (tiny.END,), tiny.PAD, max_turns=2, own_rows=True)
    model, mesh = tiny.model(tiny.HYBRID), one_device()
    engine = SlotEngine(model, settings._replace(slots=2), mesh, width=8)
    policy = Policy(model=model, tokenizer=None, mesh=mesh, engine=engine, group_size=2)
    questions = Questions([{"prompt": "a"}], [np.ones(1, np.int32)], Reward("right", zeros))
    make_evaluator(EvalKeys(samples=1), policy, questions)
    with pytest.raises(InputError, match=r'data.history = "fork": samples cannot be scored again'):
        make_evaluator(EvalKeys(samples=1, confidence=True), policy, questions)


def zeros(completions, **columns):
    return [0.0] * len(completions)


@pytest.mark.slow
def test_exact_and_estimated_kl_agree_in_expectation(case):
    """Samples of one token, in the proportions of the policy: their mean is the exact KL."""
    _, ours, bases, (p, q) = case
    exact = np.exp(p[0, 0, 0]) @ (p[0, 0, 0] - q[0, 0, 0])
    every = jnp.arange(tiny.VOCAB, dtype=jnp.int32)
    every_token = dataclasses.replace(
        tiny.rollouts(np.zeros((4, tiny.VOCAB)), steps=1),
        completion_tokens=jnp.broadcast_to(every[None, :, None], (4, tiny.VOCAB, 1)),
        token_mask=jnp.ones((4, tiny.VOCAB, 1), bool),
    )
    model = tiny.model()
    run = make_rescorer(
        model, one_device(), temperature=TEMPERATURE, base=Base(model, lambda: bases)
    )
    assert run is not None
    scores = jax.device_get(run(ours, every_token))
    estimated = np.exp(p[0, 0, 0]) @ scores["logp_gap"][0, :, 0]
    assert estimated == pytest.approx(exact, rel=1e-4)
    np.testing.assert_allclose(scores["kl"][0], exact, rtol=1e-4)
    assert not scores["clamped"].any()
