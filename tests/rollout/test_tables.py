"""The checkpoints of tables.py are the tables that they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tables

from jaxgrpo.models import decoder
from jaxgrpo.models.api import Caller
from jaxgrpo.models.attention import causal
from jaxgrpo.models.hf import folders

RATES = [0.0, 0.4, 0.9, 1.0, 0.015]


@pytest.mark.full
@pytest.mark.slow
def test_each_prompt_has_its_success_rate_and_an_answer_is_followed_by_the_end(tmp_path):
    folder = tables.write_model(tmp_path / "model", RATES)
    tokenizer = folders.read_tokenizer(folder)
    model = decoder.build(folders.read_config(folder))
    params = folders.read_params(folder, model)
    ids = tokenizer(tables.prompts(len(RATES)) + "yn")["input_ids"]
    token = jnp.asarray(ids)[:, None]
    position = jnp.zeros_like(token)
    attend = causal(position, jnp.ones_like(token, bool))
    hidden, _ = model.apply(params, token, position, Caller(attend), None)
    chance = np.asarray(jax.nn.softmax(model.unembed(params, hidden)[:, 0]))
    right, wrong = ids[-2:]
    np.testing.assert_allclose(chance[:-2, right], RATES, rtol=0, atol=1e-5)
    np.testing.assert_allclose(chance[:-2, wrong], 1 - np.array(RATES), rtol=0, atol=1e-5)
    np.testing.assert_allclose(chance[-2:, tokenizer.eos_token_id], 1, rtol=0, atol=1e-5)
