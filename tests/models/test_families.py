"""Every family beside transformers in PyTorch: loaded, computed, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import jax
import numpy as np
import pytest
from quick import full_but

import jaxgrpo
from jaxgrpo.core.types import Params
from jaxgrpo.models.api import Model
from jaxgrpo.models.hf.families import FAMILIES

CLOSE = 2e-4  # of logits, which are of order 1
BATCH = checkpoints.batch()


class FamilyCase(NamedTuple):
    """A family's rich small model in PyTorch and ours, and what each computes of one batch."""

    folder: Path
    theirs: Any
    model: Model
    params: Params
    expected: np.ndarray  # logits
    logits: np.ndarray


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    theirs = checkpoints.saved(checkpoints.transformers_config(request.param), folder)
    model, params = jaxgrpo.load_model(folder)
    expected = checkpoints.transformers_logits(theirs, *BATCH)
    logits = np.asarray(jaxgrpo.logits(model, params, *BATCH))
    return FamilyCase(folder, theirs, model, params, expected, logits)


EXPORTED = {"llama", "gemma2", "phi3", "qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3"}
"""Plain, fused, with experts of each way of storing them, with states, with latents."""


def test_logits_are_those_of_transformers_whichever_side_is_padded(case):
    """And of such a size that a window, a norm or a scale that does nothing would be seen."""
    real = BATCH[1].astype(bool)
    np.testing.assert_allclose(case.logits[real], case.expected[real], atol=CLOSE, rtol=0)
    assert 0.2 < case.logits[real].std() < 20


@pytest.mark.slow
@pytest.mark.parametrize("case", full_but(EXPORTED, sorted(FAMILIES)), indirect=True)
def test_in_float64_logits_are_those_of_transformers_to_the_last_digits(case):
    expected = checkpoints.exact_transformers_logits(case.folder, *BATCH)
    logits = checkpoints.exact_logits(case.folder, *BATCH)
    real = BATCH[1].astype(bool)
    np.testing.assert_allclose(logits[real], expected[real], atol=1e-12, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    full_but(("llama", "gemma2"), sorted(FAMILIES)),
    indirect=True,
)
def test_log_probs_are_those_of_the_logits(case):
    tokens, mask = BATCH
    token_logp = np.asarray(jaxgrpo.token_logp(case.model, case.params, tokens, mask))
    logp = np.asarray(jax.nn.log_softmax(case.logits))
    before = np.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    follows = (mask[:, 1:] * mask[:, :-1]).astype(bool)
    np.testing.assert_allclose(token_logp[:, 1:], np.where(follows, before, 0), atol=1e-5)
    assert not token_logp[:, 0].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    full_but(EXPORTED, sorted(FAMILIES)),
    indirect=True,
)
def test_an_export_is_the_checkpoint_bit_for_bit(case, tmp_path):
    from transformers import AutoModelForCausalLM

    theirs = case.theirs
    jaxgrpo.save_model(case.model, case.params, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(again) is type(theirs)
    expected, exported = theirs.state_dict(), again.state_dict()
    assert expected.keys() == exported.keys()
    assert all((expected[name] == exported[name]).all() for name in expected)
    np.testing.assert_array_equal(checkpoints.transformers_logits(again, *BATCH), case.expected)


@pytest.mark.full
@pytest.mark.slow
def test_gradients_of_experts_and_routers_are_those_of_transformers(tmp_path):
    """Of the mean square of all logits."""
    import torch

    theirs = checkpoints.saved(checkpoints.transformers_config("qwen3_moe"), tmp_path)
    model, params = jaxgrpo.load_model(tmp_path)
    tokens = np.random.default_rng(0).integers(3, checkpoints.VOCAB, (2, checkpoints.LENGTH))

    def loss(params):
        return (jaxgrpo.logits(model, params, tokens, np.ones_like(tokens)) ** 2).mean()

    layer = jax.jit(jax.grad(loss))(params)["blocks"]["0"]["experts"]
    (theirs(torch.as_tensor(tokens)).logits ** 2).mean().backward()
    block = theirs.model.layers[0].mlp
    size = layer["gate"]["kernel"].shape[-1]
    gate_up = block.experts.gate_up_proj.grad.numpy().swapaxes(1, 2)
    expected = {
        "gate": gate_up[..., :size],
        "up": gate_up[..., size:],
        "down": block.experts.down_proj.grad.numpy().swapaxes(1, 2),
        "router": block.gate.weight.grad.numpy().T,
    }
    for name, gradient in expected.items():
        error = np.linalg.norm(layer[name]["kernel"][0] - gradient)
        assert error < 2e-4 * np.linalg.norm(gradient), name
