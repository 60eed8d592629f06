"""Tokens that the tokenizer has no text for: never drawn, and without probability everywhere."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
import tiny
from engines import draw_all, make_engine
from safetensors.numpy import load_file, save_file

import jaxgrpo
from jaxgrpo.cli import make_base
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import tasks
from jaxgrpo.evaluation.rescoring import Base, make_rescorer
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.hf import folders
from jaxgrpo.models.logprobs import token_logprobs
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.stopping import EarlyStop
from jaxgrpo.training import loop
from jaxgrpo.training.records import rollout_files
from jaxgrpo.training.setup import setup

SIZE = 32
METADATA = {"format": rollout_files.FORMAT, "version": rollout_files.VERSION}
KEY = jax.random.key_data(jax.random.key(3))
GAPS = dataclasses.replace(tiny.UNIFORM, without_text=((2, 5), (33, 40)))
HAS_TEXT = np.array([not (2 <= token < 5 or token >= 33) for token in range(tiny.VOCAB)])


def drawn(group=16, **changes):
    settings = SamplingSettings(32, 2.0, (tiny.END,), tiny.PAD)._replace(**changes)
    prompts = tiny.prompts(8)
    engine = make_engine(tiny.model(GAPS), settings, prompts)
    return draw_all(engine, tiny.params(), prompts, KEY, group)


@pytest.mark.full
def test_2000_tokens_at_temperature_2_all_have_text_and_the_log_probs_of_those_alone():
    rollouts = drawn()
    tokens = rollouts.completion_tokens[rollouts.token_mask]
    assert len(tokens) > 2000
    assert set(tokens) == set(np.flatnonzero(HAS_TEXT))
    # The oracle's model knows no tokenizer: its probabilities are divided by those with text.
    table = np.asarray(tiny.whole_tables(tiny.UNIFORM, tiny.params(), rollouts, 2.0), np.float64)
    share = np.exp(table[..., HAS_TEXT]).sum(-1)
    assert share[rollouts.token_mask].mean() < 0.9
    logp = np.take_along_axis(table, rollouts.completion_tokens[..., None], -1)[..., 0]
    want = np.where(rollouts.token_mask, logp - np.log(share), 0)
    np.testing.assert_allclose(rollouts.behavior_logp, want, atol=3e-5)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        *(pytest.param(cut, marks=pytest.mark.full) for cut in ({"top_k": 38}, {"min_p": 0.01})),
    ],
    ids=str,
)
def test_no_way_of_sampling_draws_them(changes):
    rollouts = drawn(**changes)
    assert HAS_TEXT[rollouts.completion_tokens[rollouts.token_mask]].all()
    assert (rollouts.behavior_logp > -30).all()


@pytest.mark.slow
def test_gradients_are_those_of_a_vocabulary_with_text_alone():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 6, 32)), jnp.float32)
    targets = rng.choice(np.flatnonzero(HAS_TEXT), (1, 6))

    def loss(params, unembed, targets):
        arguments = (lambda hidden: unembed(params, hidden), hidden, jnp.asarray(targets))
        logp, entropy = token_logprobs(*arguments, temperature=0.5, entropy="gradient")
        assert entropy is not None
        return (logp + 0.3 * entropy).sum()

    def small(params, hidden):
        return hidden @ params["head"]["table"][HAS_TEXT].T

    places = np.cumsum(HAS_TEXT)[targets] - 1
    slope = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    value, gradient = slope(tiny.params(), tiny.model(GAPS).unembed, targets)
    want_value, want = slope(tiny.params(), small, places)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    np.testing.assert_allclose(gradient["head"]["table"], want["head"]["table"], atol=1e-4)
    assert (np.asarray(gradient["head"]["table"])[~HAS_TEXT] == 0).all()


@pytest.mark.full
@pytest.mark.slow
def test_a_vocabulary_over_two_devices_gives_the_same_tokens():
    mesh = sharding.make_mesh(tensor=2, devices=jax.devices()[:2])
    model = decoder.build(GAPS, constrain=sharding.constrain(mesh))
    layout = sharding.param_shardings(mesh, model.axes, model.shapes, sharding.SAMPLING)
    settings = SamplingSettings(8, 2.0, (tiny.END,), tiny.PAD)
    prompts = tiny.prompts(8)
    params = jax.device_put(tiny.params(), layout)
    split = draw_all(make_engine(model, settings, prompts, mesh), params, prompts, KEY, 2)
    single = drawn(2, max_completion_tokens=8)
    np.testing.assert_array_equal(split.completion_tokens, single.completion_tokens)
    np.testing.assert_allclose(split.behavior_logp, single.behavior_logp, atol=3e-5)


@pytest.mark.full
@pytest.mark.slow
def test_a_confidence_is_of_tokens_with_text():
    # Where one token without text was among them each confidence would be above 1e18.
    stop = EarlyStop(confidence=1e6, window=1, tokens=tiny.VOCAB)
    assert (drawn(early_stop=stop).token_mask.sum(-1) == 1).all()


@pytest.mark.full
@pytest.mark.slow
def test_an_evaluation_measures_over_tokens_with_text():
    few = dataclasses.replace(tiny.UNIFORM, without_text=((2, 5), (14, tiny.VOCAB)))
    rollouts = tiny.rollouts(np.zeros((4, 4)))
    tokens = np.where(rollouts.token_mask, rollouts.completion_tokens % 2, tiny.PAD)
    rollouts = dataclasses.replace(rollouts, completion_tokens=jnp.asarray(tokens))
    # A base whose tokenizer has text for all tokens is compared on those of the policy.
    base = Base(tiny.model(), tiny.params)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    rescore = make_rescorer(
        tiny.model(few), mesh, temperature=1.0, quantities={"confidence", "certainty"}, base=base
    )
    assert rescore is not None
    measured = jax.tree.map(np.asarray, rescore(tiny.params(), rollouts))
    table = np.asarray(tiny.whole_tables(tiny.UNIFORM, tiny.params(), rollouts), np.float64)
    table = np.delete(table, [*range(2, 5), *range(14, tiny.VOCAB)], -1)
    want = np.log(np.exp(table).sum(-1)) - table.mean(-1)  # of 11 tokens, not of 20
    mask = np.asarray(rollouts.token_mask)
    for name in ("confidence", "certainty"):
        np.testing.assert_allclose(measured[name][mask], want[mask], rtol=1e-4)
    for name in ("kl", "clamped", "logp_gap"):
        np.testing.assert_allclose(measured[name], 0, atol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random model of 32 tokens, those without text the likeliest, and a tokenizer of fewer."""
    folder = tmp_path_factory.mktemp("base") / "base"
    tokenizer = make_base.character_tokenizer(tasks.find("arithmetic").alphabet)
    model = decoder.build(make_base.base_config(SIZE))
    params = jax.jit(model.init)(jax.random.key(0))
    assert len(tokenizer) < SIZE - 8
    folders.save_model(model, params, folder, tokenizer=tokenizer)
    return folder, len(tokenizer)


@pytest.mark.full
def test_a_run_draws_and_trains_on_tokens_with_text_alone(base, tmp_path):
    folder, size = base
    changes = {"model": {"path": str(folder)}, "rollout.temperature": 2.0}
    changes |= {"train.steps": 1, "run.rollouts_every": 1}
    run = loop.train(small_run.config(tmp_path / "run", **changes))
    (line,) = small_run.metrics(run.path)
    assert line["sampling/sampling_logp_difference/max"] < 1e-4
    (file,) = (run.path / "rollouts").iterdir()
    rollouts = rollout_files.load(file)
    tokens = np.asarray(rollouts.completion_tokens)[np.asarray(rollouts.token_mask)]
    assert tokens.max() < size
    rows = jaxgrpo.sample(run.path, ["1+1="], samples=16, temperature=2.0, max_tokens=24)
    assert max(token for row in rows for token in row["completion_ids"]) < size
    saved = load_file(file)
    saved["completion_tokens"][0, 1, 0] = size
    saved["token_mask"][0, 1, 0] = True
    save_file(saved, tmp_path / "x.safetensors", METADATA)
    with pytest.raises(InputError, match=rf"completion_tokens\[0, 1, 0\]: is {size}, .* has text"):
        setup(small_run.config(tmp_path / "r", **changes), rollouts=tmp_path / "x.safetensors")
    # Where no tokenizer is known logits are those of the weights.
    model, params = jaxgrpo.load_model(run.path / "model")
    logits = jaxgrpo.logits(model, params, np.zeros((1, 2), int), np.ones((1, 2), int))
    assert float(abs(logits).max()) < 100
