"""The pad token's row of the embedding: what reading it teaches, as in torch's nn.Embedding."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxgrpo
from jaxgrpo.models.hf.families import FAMILIES, model_config

PAD = 5


def gradients(folder, theirs, pad: int = PAD) -> tuple[Any, Any]:
    """Of the sum of log-probs of tokens, some of which are `pad`: (ours, torch's)."""
    import torch

    model, params = jaxgrpo.load_model(folder)
    tokens = np.random.default_rng(0).integers(0, checkpoints.VOCAB, (3, 12))
    tokens[:, 3::4] = pad
    mask = np.ones_like(tokens)

    def total(params: Any) -> jax.Array:
        return jaxgrpo.token_logp(model, params, tokens, mask).sum()

    ours = jax.grad(total)(params)
    token_tensor = torch.as_tensor(tokens)
    logp = theirs(token_tensor).logits.log_softmax(-1)[:, :-1]
    logp.gather(-1, token_tensor[:, 1:, None]).sum().backward()
    return ours, dict(theirs.named_parameters())


def close(actual, expected) -> None:
    expected = expected.grad.numpy()
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pad",
    [PAD, *(pytest.param(pad, marks=pytest.mark.full) for pad in (PAD - checkpoints.VOCAB, None))],
)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_embedding_and_head_are_those_of_torch(tied, pad, tmp_path):
    config = checkpoints.transformers_config("qwen3", pad_token_id=pad, tie_word_embeddings=tied)
    ours, named = gradients(tmp_path, checkpoints.saved(config, tmp_path))
    table = np.asarray(ours["embed"]["table"])
    close(table, named["model.embed_tokens.weight"])
    if not tied:
        close(ours["head"]["table"], named["lm_head.weight"])
    # Of a tied table the head's part is left.
    assert (table[PAD] == 0).all() == (pad is not None and not tied)


@pytest.mark.slow
def test_a_family_that_names_no_pad_token_takes_that_of_transformers(tmp_path):
    fields = checkpoints.config_fields("gemma2")
    del fields["pad_token_id"]
    theirs = checkpoints.redrawn(fields, tmp_path)
    assert theirs.model.embed_tokens.padding_idx == 0
    ours, named = gradients(tmp_path, theirs, pad=0)
    close(ours["embed"]["table"], named["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_pad_token_of_each_family_is_that_of_transformers(family):
    from transformers import CONFIG_MAPPING

    config = checkpoints.transformers_config(family, vocab_size=200_000)
    fields = json.loads(config.to_json_string())
    cases: tuple[dict[str, Any], ...] = ({}, {"pad_token_id": None}, {"pad_token_id": 7})
    for pad_fields in cases:
        read = {
            name: value for name, value in fields.items() if name != "pad_token_id"
        } | pad_fields
        expected = CONFIG_MAPPING[family](**pad_fields).pad_token_id
        read["architectures"] = [FAMILIES[family].architecture]
        assert model_config(read, "config.json").pad_token == expected


def test_a_pad_token_that_the_model_lacks_is_no_row_and_other_values_are_refused():
    fields = checkpoints.config_fields("qwen3")
    size = fields["vocab_size"]
    for beyond in (size, -size - 1):
        assert model_config(fields | {"pad_token_id": beyond}, "c").pad_token is None
    with pytest.raises(jaxgrpo.InputError, match=r"pad_token_id = '<pad>': expected a token id"):
        model_config(fields | {"pad_token_id": "<pad>"}, "c")


@pytest.mark.slow
def test_values_and_other_rows_are_as_without_a_pad_token():
    plain = tiny.UNIFORM
    padded = dataclasses.replace(plain, pad_token=PAD)
    tokens = np.array([[PAD, 7, PAD, 9]])

    def loss_and_gradient(config):
        def total(params):
            return jnp.square(jaxgrpo.logits(tiny.model(config), params, tokens, tokens > 0)).sum()

        return jax.value_and_grad(total)(tiny.params())

    (plain_loss, before), (padded_loss, after) = loss_and_gradient(plain), loss_and_gradient(padded)
    assert plain_loss == padded_loss
    moved = np.asarray(before["embed"]["table"] != after["embed"]["table"]).any(1)
    assert np.flatnonzero(moved).tolist() == [PAD]
    for name in ("head", "blocks"):
        assert jax.tree.all(jax.tree.map(jnp.array_equal, before[name], after[name]))
