"""Where whole runs come to rest: on a model that is a known table, by the public path.

The base answers one question with one token, a .25, b .15 and c .10 (valid) or n .50 (not). What an
objective leads to is then a number that can be written down.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgrpo
from jaxgrpo.io import huggingface
from jaxgrpo.models import decoder
from jaxgrpo.models.attention import causal
from jaxgrpo.models.config import ModelConfig
from jaxgrpo.tasks.tokenizer import character_tokenizer

pytestmark = pytest.mark.slow

ANSWERS = "abcn"
BASE = np.array([0.25, 0.15, 0.10, 0.50])
VALID = np.array([1.0, 1.0, 1.0, 0.0])
FILTERED = np.array([0.50, 0.30, 0.20])  # the base among valid answers
NEVER = -30.0  # the logit of every other token
WIDTH = 4


@functools.cache
def tokenizer():
    return character_tokenizer("?" + ANSWERS)


@functools.cache
def model():
    config = ModelConfig(
        vocab_size=len(tokenizer()),
        hidden_size=WIDTH,
        intermediate_size=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
    )
    return decoder.build(config)


def ids(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


@functools.cache
def logits_of_table() -> np.ndarray:
    logits = np.full(len(tokenizer()), NEVER)
    logits[ids(ANSWERS)] = np.log(BASE)
    return logits


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A Hugging Face folder of the table: the layer adds nothing, and the last state is ones."""
    folder = tmp_path_factory.mktemp("table")
    params = jax.tree.map(np.asarray, model().init(jax.random.key(0)))
    silent = lambda path, leaf: leaf * ("down" not in str(path) and "out" not in str(path))  # noqa: E731
    params["blocks"] = jax.tree_util.tree_map_with_path(silent, params["blocks"])
    params["embed"] = jax.tree.map(np.ones_like, params["embed"])
    rows = np.repeat(logits_of_table()[:, None] / WIDTH, WIDTH, 1)
    params["head"] = jax.tree.map(lambda leaf: rows.astype(leaf.dtype), params["head"])
    huggingface.save_model(folder, model(), params, tokenizer=tokenizer())
    return str(folder)


def chances(params: Any) -> np.ndarray:
    """The probabilities of the four answers to the question."""
    token = jnp.asarray([ids("?")])
    position = jnp.zeros((1, 1), jnp.int32)
    attend = causal(position, jnp.ones((1, 1), bool))
    hidden, _ = model().apply(params, token, position, attend, None)
    logits = model().unembed(params, hidden)[0, 0].astype(jnp.float32)
    return np.asarray(jax.nn.softmax(logits))[ids(ANSWERS)]


def valid(completions, **columns):
    return [float(text in "abc") for text in completions]


def train(base: str, folder: Any, **changes: Any) -> tuple[np.ndarray, jaxgrpo.training.Run]:
    """The probabilities at the end of a run, and the run."""
    tables = {
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
        tables[name] = {**tables.get(name, {}), **value} if isinstance(value, dict) else value
    run = jaxgrpo.train(tables, rewards=[valid], dataset=[{"question": "?"}])
    return chances(run.state.trainable), run


def test_the_checkpoint_is_the_table(base):
    params = huggingface.read_params(huggingface.find_folder(base), model())
    np.testing.assert_allclose(chances(params), BASE, rtol=0, atol=1e-6)


def check(found: np.ndarray, validity: float, within: float = 0.005) -> None:
    """The success rate, and the shares of the right answers: always those of the base."""
    assert found[:3].sum() == pytest.approx(validity, abs=within)
    np.testing.assert_allclose(found[:3] / found[:3].sum(), FILTERED, rtol=0, atol=0.01)


def test_kl_in_the_return_leads_to_the_tilted_base(base, tmp_path):
    beta = 0.5
    found, run = train(
        base, tmp_path, recipe="rloo", loss={"kl": {"use": "k1_in_reward", "beta": beta}}
    )
    tilted = BASE * np.exp(VALID / beta)
    tilted /= tilted.sum()
    assert tilted[:3].sum() == pytest.approx(1 / (1 + np.exp(-2)))
    check(found, tilted[:3].sum())
    distance = (tilted * np.log(tilted / BASE)).sum()
    logged = np.mean([line["add_kl_return/kl"] for line in run.metrics[-20:]])
    assert logged == pytest.approx(distance, abs=0.02)


def test_a_target_validity_is_reached(base, tmp_path):
    kl = {"use": "k1_in_reward", "target_validity": 0.9}
    found, run = train(base, tmp_path, recipe="rloo", loss={"kl": kl})
    check(found, 0.9)
    last = {name.rpartition("/")[2]: value for name, value in run.metrics[-1].items()}
    # The base's rate, .5, is known from samples of a policy that has long left it.
    assert last["base_rate"] == pytest.approx(0.5, abs=0.005)
    assert last["beta"] == pytest.approx(1 / np.log(9), abs=0.01)
    assert last["rows_left_out"] == 0


def test_alpha_dpg_leads_to_the_filtered_model(base, tmp_path):
    found, _ = train(base, tmp_path, recipe="alpha_dpg")
    assert found[:3].sum() > 0.99
    check(found, 1.0, within=0.01)


def test_k3_in_the_loss_leads_elsewhere_than_its_value_says(base, tmp_path):
    """Its gradient is that of KL(reference || policy): E v - beta KL(base || policy) is climbed."""
    beta = 0.5
    found, _ = train(
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
    check(found, mu)
    assert abs(found[:3].sum() - 1 / (1 + np.exp(-2))) > 0.05
