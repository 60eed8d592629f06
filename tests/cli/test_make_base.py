"""The warm start: what it learns from, that it learns it, and that it does so reproducibly."""

import functools
import json
import math

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxgrpo
from jaxgrpo.cli import make_base
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.api import Caller
from jaxgrpo.models.attention import causal
from jaxgrpo.models.hf import folders as huggingface
from jaxgrpo.models.hf.families import FAMILIES, config_fields

pytestmark = pytest.mark.slow

TASK = tasks.find("arithmetic")
TOKENIZER = character_tokenizer(TASK.alphabet)
PAD, END = 0, 1
make_small = functools.partial(make_base.make_base, steps=25, batch=8, hidden_size=32)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small base of seed 3, hardly trained: (folder, what progress was told)."""
    out, reports = tmp_path_factory.mktemp("small") / "model", []
    make_small(out, seed=3, progress=lambda *numbers: reports.append(numbers))
    return out, reports


@pytest.mark.full
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(small, tmp_path):
    for seed in (3, 4):
        make_small(tmp_path / str(seed), seed=seed)
    folders = (small[0], tmp_path / "3", tmp_path / "4")
    first, same, reseeded = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == same
    assert first != reseeded


def test_the_folder_is_an_ordinary_one_with_its_tokenizer(small):
    config = json.loads((small[0] / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["vocab_size"] == 16
    tokenizer = huggingface.read_tokenizer(small[0])
    assert tokenizer("47+38=")["input_ids"] == TOKENIZER("47+38=")["input_ids"]
    assert tokenizer.eos_token_id == config["eos_token_id"] == END
    assert tokenizer.pad_token_id == config["pad_token_id"] == PAD
    generation = json.loads((small[0] / "generation_config.json").read_text())
    assert generation["eos_token_id"] == END


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_base_of_another_family_computes_what_transformers_does(family, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    make_small(tmp_path / "base", family=family)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager", dtype=torch.float32
    )
    assert theirs.config.model_type == family
    tokens = np.random.default_rng(0).integers(2, 16, (2, 30))  # longer than a window
    mask = np.ones_like(tokens)
    expected = checkpoints.transformers_logits(theirs.eval(), tokens, mask)
    logits = jaxgrpo.logits(*huggingface.load_model(tmp_path / "base"), tokens, mask)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert expected.std() > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_base_whose_config_can_be_saved(family):
    config = make_base.base_config(16, family=family)
    assert config.family == family
    assert config_fields(config, "float32")["model_type"] == family
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(decoder.build(config).shapes)]
    gates = 0 if config.gated else config.num_layers * config.hidden_size * config.intermediate_size
    assert 99_000 < sum(sizes) + gates < 101_000


def test_progress_is_told_after_each_dispatch_and_at_the_end(small):
    assert [step for step, _, _ in small[1]] == [20, 25]
    assert {steps for _, steps, _ in small[1]} == {25}
    assert all(0 < loss < 2 * math.log(16) for _, _, loss in small[1])


@pytest.fixture(scope="module")
def tiny():
    """(model, parameters, corpus of 3 texts)"""
    texts = [
        tasks.Worked("1+1=", "2", 0.5),
        tasks.Worked("1+12=", "3 13", 0.375),
        tasks.Worked("1+12=", "13", 0.125),
    ]
    corpus = make_base.encode(texts, TOKENIZER)
    model = decoder.build(make_base.base_config(16, 32, 2), remat="none")
    return model, jax.jit(model.init)(jax.random.key(0)), corpus


def test_texts_are_right_padded_and_only_solution_and_end_are_learned(tiny):
    corpus = tiny[2]
    decoded = TOKENIZER.batch_decode(corpus.tokens.tolist())
    assert decoded == [
        "1+1=2<end><pad><pad><pad><pad>",
        "1+12=3 13<end>",
        "1+12=13<end><pad><pad>",
    ]
    rows = ["....xx....", ".....xxxxx", ".....xxx.."]
    assert corpus.learned.tolist() == [[mark == "x" for mark in row] for row in rows]


def test_loss_floor_is_the_entropy_per_learned_token(tiny):
    # One prompt has one solution; the other, half of all draws, two at 3/4 and 1/4.
    nats = 0.5 * -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    learned = 0.5 * 2 + 0.375 * 5 + 0.125 * 3
    assert make_base.entropy(tiny[2]) == pytest.approx(nats / learned)


def test_loss_is_the_mean_cross_entropy_of_learned_tokens(tiny):
    model, params, corpus = tiny
    tokens, learned = jnp.asarray(corpus.tokens), jnp.asarray(corpus.learned)
    position = jnp.broadcast_to(jnp.arange(10), tokens.shape)
    attend = causal(position, jnp.ones(tokens.shape, bool))
    hidden, _ = model.apply(params, tokens, position, Caller(attend), None)
    logits = np.asarray(model.unembed(params, hidden), np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = [
        -logp[row, place - 1, corpus.tokens[row, place]]
        for row, place in np.argwhere(corpus.learned)
    ]
    loss = make_base._loss(model, params, tokens, learned)
    assert float(loss) == pytest.approx(np.mean(nats), rel=1e-5)


def test_one_dispatch_of_two_steps_is_two_dispatches_of_one(tiny):
    model, params, corpus = tiny
    optimizer = optax.sgd(0.1)
    dispatch = jax.jit(functools.partial(make_base._dispatch, model, optimizer))
    data = (jnp.asarray(corpus.tokens), jnp.asarray(corpus.learned))
    drawn = jnp.array([[0, 1, 1], [2, 0, 1]])
    start = (params, optimizer.init(params))
    (together, _), losses = dispatch(start, *data, drawn, 2)
    carry, first = dispatch(start, *data, drawn, 1)
    (apart, _), second = dispatch(carry, *data, drawn[::-1], 1)
    np.testing.assert_array_equal(losses, [first[0], second[0]])
    assert first[1] == 0  # steps beyond the count are not made
    for actual, expected in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "arithmetc"}, "did you mean 'arithmetic'"),
        ({"steps": 0}, "steps = 0: give 1 or more"),
        ({"batch": 0}, "batch = 0: give 1 or more"),
        ({"family": "lama"}, "did you mean 'llama'"),
        pytest.param({"num_layers": 0}, "num_hidden_layers = 0", marks=pytest.mark.full),
    ],
)
def test_bad_arguments_are_refused_before_training(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        make_base.make_base(tmp_path / "base", **options)
    assert not (tmp_path / "base").exists()
