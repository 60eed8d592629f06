"""Where whole runs come to rest: on a model that is a known table, by the public path.

The base answers "?" with one token, a .25, b .15 and c .10 (valid) or n .50 (not), and the harder
"!" with .10, .06, .04 and .80. What an objective leads to is then a number to be written down.
"""

from __future__ import annotations

import functools
from typing import Any

import comparisons
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tables

import jaxgrpo
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models.api import Caller
from jaxgrpo.models.attention import causal
from jaxgrpo.models.hf import folders

pytestmark = pytest.mark.slow

ANSWERS = "abcn"
BASE = np.array([0.25, 0.15, 0.10, 0.50])
HARDER = np.array([0.10, 0.06, 0.04, 0.80])
VALID = np.array([1.0, 1.0, 1.0, 0.0])
FILTERED = np.array([0.50, 0.30, 0.20])  # the base among valid answers
NEVER = -30.0  # the logit of every other token


@pytest.fixture(autouse=True)
def one_device():
    with comparisons.one_device():
        yield


@functools.cache
def tokenizer():
    return character_tokenizer("?!" + ANSWERS)


@functools.cache
def model():
    return tables.smallest(len(tokenizer()))


def ids(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A Hugging Face folder of the two tables, one along each of two dimensions.

    The layer adds nothing, and the last state of a question is 2 in a dimension of its own.
    """
    folder = tmp_path_factory.mktemp("table")
    params, embed, head = tables.blank(model())
    for dimension, (question, table) in enumerate({"?": BASE, "!": HARDER}.items()):
        embed[ids(question), dimension] = 2
        head[:, dimension] = NEVER / 2
        head[ids(ANSWERS), dimension] = np.log(table) / 2
    folders.save_model(model(), params, folder, tokenizer=tokenizer())
    return str(folder)


def chances(params: Any, question: str = "?") -> np.ndarray:
    """The probabilities of the four answers to a question."""
    token = jnp.asarray([ids(question)])
    position = jnp.zeros((1, 1), jnp.int32)
    attend = causal(position, jnp.ones((1, 1), bool))
    hidden, _ = model().apply(params, token, position, Caller(attend), None)
    logits = model().unembed(params, hidden)[0, 0].astype(jnp.float32)
    return np.asarray(jax.nn.softmax(logits))[ids(ANSWERS)]


def valid(completions, **columns):
    return [float(text in "abc") for text in completions]


def train(
    base: str, folder: Any, questions: str = "?", **changes: Any
) -> tuple[np.ndarray, jaxgrpo.Run]:
    """The probabilities at the end of a run, and the run."""
    config: dict[str, Any] = {
        "model": {"path": base},
        "data": {"prompt": "question", "answer": "", "chat_template": "none"},
        "loss": {},
        "optimizer": {"use": "sgd", "learning_rate": 0.5, "schedule": "linear", "clip_norm": 0.0},
        "rollout": {
            "prompts_per_step": 8,
            "group_size": 32,
            "max_prompt_tokens": 1,
            "max_completion_tokens": 1,
        },
        "train": {"steps": 200},
        "checkpoint": {"every": 1000},
        "tracking": {"tensorboard": False},
        "run": {"dir": str(folder / "r"), "report_every": 0, "samples_every": 0},
    }
    for name, value in changes.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    rows = [{"question": question} for question in questions]
    run = jaxgrpo.train(config, rewards=[valid], dataset=rows)
    return chances(run.learner.trainable), run


def test_the_checkpoint_is_the_table(base):
    params = folders.read_params(folders.find_folder(base), model())
    np.testing.assert_allclose(chances(params), BASE, rtol=0, atol=1e-6)
    np.testing.assert_allclose(chances(params, "!"), HARDER, rtol=0, atol=1e-6)


def check(trained: np.ndarray, validity: float, within: float = 0.005) -> None:
    """The success rate, and the shares of the right answers: always those of the base."""
    assert trained[:3].sum() == pytest.approx(validity, abs=within)
    np.testing.assert_allclose(trained[:3] / trained[:3].sum(), FILTERED, rtol=0, atol=0.01)


@pytest.mark.full
def test_kl_in_the_return_leads_to_the_tilted_base(base, tmp_path):
    beta = 0.5
    trained, run = train(
        base, tmp_path, recipe="rloo", loss={"kl": {"use": "k1_in_reward", "beta": beta}}
    )
    tilted = BASE * np.exp(VALID / beta)
    tilted /= tilted.sum()
    assert tilted[:3].sum() == pytest.approx(1 / (1 + np.exp(-2)))
    check(trained, tilted[:3].sum())
    distance = (tilted * np.log(tilted / BASE)).sum()
    logged = np.mean([line["add_kl_return/kl"] for line in run.metrics[-20:]])
    assert logged == pytest.approx(distance, abs=0.02)


@quick.long
@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("recipe", ["rloo", "dr_grpo"])
def test_both_undivided_recipes_lead_there_whatever_the_group_size(base, tmp_path, recipe, size):
    """At G = 2 a mean that holds the sample itself would halve the reward beside the KL."""
    rollout = {"prompts_per_step": 256 // size, "group_size": size}
    kl = {"use": "k1_in_reward", "beta": 0.5}
    trained, _ = train(base, tmp_path, recipe=recipe, loss={"kl": kl}, rollout=rollout)
    check(trained, 1 / (1 + np.exp(-2)))
    kl = {"use": "k1_in_reward", "target_validity": 0.9}
    trained, _ = train(base, tmp_path / "2", recipe=recipe, loss={"kl": kl}, rollout=rollout)
    check(trained, 0.9)


@pytest.mark.full
def test_a_target_validity_is_reached(base, tmp_path):
    kl = {"use": "k1_in_reward", "target_validity": 0.9}
    trained, run = train(base, tmp_path, recipe="rloo", loss={"kl": kl})
    check(trained, 0.9)
    last = {name.rpartition("/")[2]: value for name, value in run.metrics[-1].items()}
    # The base's rate, .5, is known from samples of a policy that has long left it.
    assert last["base_rate"] == pytest.approx(0.5, abs=0.005)
    assert last["beta"] == pytest.approx(1 / np.log(9), abs=0.01)
    assert last["rows_left_out"] == 0


@quick.long
def test_a_target_validity_is_the_mean_over_prompts_under_one_beta(base, tmp_path):
    kl = {"use": "k1_in_reward", "target_validity": 0.8}
    easy, run = train(base, tmp_path, "?!", recipe="rloo", loss={"kl": kl}, train={"steps": 300})
    hard = chances(run.learner.trainable, "!")
    # Found here by Newton's step on mean of 1 / (1 + odds of failure exp(-push)) = .8.
    push = 1.0
    for _ in range(50):
        rates = 1 / (1 + np.array([1.0, 4.0]) * np.exp(-push))
        push -= (rates.mean() - 0.8) / (rates * (1 - rates)).mean()
    check(easy, rates[0], within=0.01)
    check(hard, rates[1], within=0.01)
    assert (easy[:3].sum() + hard[:3].sum()) / 2 == pytest.approx(0.8, abs=0.005)
    assert run.metrics[-1]["add_kl_return_for_validity/beta"] == pytest.approx(1 / push, abs=0.01)


@pytest.mark.full
def test_alpha_dpg_leads_to_the_filtered_model(base, tmp_path):
    trained, _ = train(base, tmp_path, recipe="alpha_dpg")
    assert trained[:3].sum() > 0.99
    check(trained, 1.0, within=0.01)


@pytest.mark.full
def test_k3_in_the_loss_leads_elsewhere_than_its_value_says(base, tmp_path):
    """Its gradient is that of KL(reference || policy): E v - beta KL(base || policy) is climbed."""
    beta = 0.5
    trained, _ = train(
        base, tmp_path, recipe="rloo", loss={"kl": {"use": "forward_kl_k3", "beta": beta}}
    )
    # At rest policy (v - mu - beta) + beta base = 0 for each answer, mu being the success rate.
    low, high = 0.5, 1.0
    for _ in range(60):
        mu = (low + high) / 2
        policy = beta * BASE / (mu + beta - VALID)
        low, high = (mu, high) if policy.sum() > 1 else (low, mu)
    assert mu == pytest.approx(0.809, abs=1e-3)
    assert (policy * VALID).sum() == pytest.approx(mu)
    check(trained, mu)
    assert abs(trained[:3].sum() - 1 / (1 + np.exp(-2))) > 0.05
