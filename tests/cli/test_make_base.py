"""The warm start: what it learns from, that it learns it, and that it does so reproducibly."""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgrpo.cli import make_base
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Prompts
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.attention import causal
from jaxgrpo.models.hf import folders as huggingface
from jaxgrpo.rollout.sampler import SamplingSettings, make_sampler, sample

TASK = tasks.find("arithmetic")
TOKENIZER = character_tokenizer(TASK.alphabet)
PAD, END = 0, 1
make_small = functools.partial(make_base.make_base, steps=25, batch=8, hidden_size=32)


@pytest.fixture(scope="module")
def base(shipped):
    """The base model of the quickstart: (folder, the line that was printed of it)."""
    folder, output, *_ = shipped
    (line,) = re.findall(r"^.*runs/base: .*$", output, re.MULTILINE)
    return folder / "runs" / "base", line


def judge(folder, group_size: int, temperature: float) -> tuple[np.ndarray, np.ndarray, list]:
    """Scores [P, G] on the test problems, their levels [P], and the texts, P lists of G."""
    rows = tasks.load("task:arithmetic:test")
    model = decoder.build(huggingface.read_config(folder))
    params = huggingface.read_params(folder, model)
    tokens = jnp.array([TOKENIZER(row["prompt"])["input_ids"] for row in rows])
    order = jnp.arange(len(rows))
    prompts = Prompts(
        prompt_tokens=tokens,
        prompt_mask=jnp.ones(tokens.shape, bool),
        ordinal=order,
        row=order,
        step=jnp.int32(0),
    )
    settings = SamplingSettings(group_size, 24, temperature, (END,), PAD)
    key = jax.random.key_data(jax.random.key(1))
    rollouts = sample(make_sampler(model, settings), params, prompts, key)
    texts = [
        TOKENIZER.batch_decode(group, skip_special_tokens=True)
        for group in np.asarray(rollouts.completion_tokens).tolist()
    ]
    scores = [
        TASK.score(group, [row["answer"]] * group_size)
        for group, row in zip(texts, rows, strict=True)
    ]
    return np.array(scores), np.array([row["level"] for row in rows]), texts


@pytest.mark.slow
def test_greedy_base_is_right_without_a_carry_and_careless_with_one(base):
    scores, level, _ = judge(base[0], 1, 0.0)
    assert 0.3 < scores.mean() < 0.65
    assert scores[level == 1].mean() > 0.97
    assert scores[level > 1].mean() < 0.1


@pytest.mark.slow
def test_success_of_the_sampled_base_is_bimodal_over_the_prompts(base):
    scores, level, texts = judge(base[0], 16, 1.0)
    success = scores.mean(1)
    assert success[level == 1].mean() > 0.94
    assert 0.15 < success[level == 2].mean() < 0.27
    assert 0.03 < success[level == 3].mean() < 0.15
    middle = (success > 0.5) & (success < 0.8)
    assert middle.mean() < 0.05
    # Groups of 8 hold a right and a wrong sample for most prompts with one carry.
    first = scores[:, :8]
    mixed = first.max(1) > first.min(1)
    assert mixed[level == 2].mean() > 0.65
    worked = {text.prompt for text in TASK.corpus()}
    rows = tasks.load("task:arithmetic:test")
    assert not worked & {row["prompt"] for row in rows}
    known = [
        text in arithmetic.solutions(*map(int, row["prompt"][:-1].split("+")))
        for row, group in zip(rows, texts, strict=True)
        for text in group
    ]
    assert np.mean(known) > 0.96


@pytest.mark.slow
def test_the_line_printed_has_the_size_and_a_loss_near_its_floor(base):
    folder, line = base
    model = decoder.build(huggingface.read_config(folder))
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(model.shapes)]
    assert sum(sizes) == 99_712
    form = r"runs/base: 99,712 parameters, loss ([\d.]+) nats per token \(.* below ([\d.]+)\)"
    ((loss, floor),) = re.findall(form, line)
    assert float(floor) < float(loss) < float(floor) + 0.005


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small base of seed 3, hardly trained: (folder, what progress was told)."""
    out, told = tmp_path_factory.mktemp("small") / "model", []
    make_small(out, seed=3, progress=lambda *seen: told.append(seen))
    return out, told


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(small, tmp_path):
    for seed in (3, 4):
        make_small(tmp_path / str(seed), seed=seed)
    folders = (small[0], tmp_path / "3", tmp_path / "4")
    first, same, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == same
    assert first != other


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


def test_progress_is_told_after_each_dispatch_and_at_the_end(small):
    assert [done for done, _, _ in small[1]] == [20, 25]
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
    model = decoder.build(make_base.base_config(16, 32, 2), remat=False)
    return model, model.init(jax.random.key(0)), corpus


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
    hidden, _ = model.apply(params, tokens, position, attend, None)
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
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "arithmetc"}, "did you mean 'arithmetic'"),
        ({"steps": 0}, "steps = 0: give 1 or more"),
        ({"batch": 0}, "batch = 0: give 1 or more"),
        ({"num_layers": 0}, "num_layers = 0"),
    ],
)
def test_bad_arguments_are_refused_before_training(tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as refused:
        make_base.make_base(tmp_path / "base", **options)
    assert isinstance(refused.value, InputError) or "num_layers" in options
    assert not (tmp_path / "base").exists()
