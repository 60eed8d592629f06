"""Every family beside transformers in PyTorch: loaded, computed, exported."""

from __future__ import annotations

import checkpoints
import jax
import numpy as np
import pytest

import jaxgrpo
from jaxgrpo.models.hf.families import FAMILIES

CLOSE = 2e-4  # of logits, which are of order 1


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def both(request, tmp_path_factory):
    """(transformers' model, ours, its parameters, the folder) of a family's rich small model."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = checkpoints.saved(checkpoints.config_of(request.param), folder)
    return theirs, *jaxgrpo.load_model(folder), folder


def test_logits_are_those_of_transformers_whichever_side_is_padded(both):
    theirs, model, params, _ = both
    tokens, mask = checkpoints.batch()
    expected = checkpoints.logits_of(theirs, tokens, mask)
    found = np.asarray(jaxgrpo.logits(model, params, tokens, mask))
    real = mask.astype(bool)
    np.testing.assert_allclose(found[real], expected[real], atol=CLOSE, rtol=0)


def test_the_small_models_compute_what_a_plain_one_does_not(both):
    """The comparison could not see a window, a norm or a scale that does nothing."""
    _, model, params, _ = both
    tokens, mask = checkpoints.batch()
    found = np.asarray(jaxgrpo.logits(model, params, tokens, mask))
    assert 0.2 < found[mask.astype(bool)].std() < 20


def test_log_probs_are_those_of_the_logits(both):
    _, model, params, _ = both
    tokens, mask = checkpoints.batch()
    logp = jax.nn.log_softmax(jaxgrpo.logits(model, params, tokens, mask))
    found = np.asarray(jaxgrpo.token_logp(model, params, tokens, mask))
    before = np.take_along_axis(np.asarray(logp)[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    follows = (mask[:, 1:] * mask[:, :-1]).astype(bool)
    np.testing.assert_allclose(found[:, 1:], np.where(follows, before, 0), atol=1e-5)
    assert not found[:, 0].any()


def test_an_export_is_the_checkpoint_bit_for_bit(both, tmp_path):
    from transformers import AutoModelForCausalLM

    theirs, model, params, _ = both
    jaxgrpo.save_model(model, params, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(again) is type(theirs)
    expected, found = theirs.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    assert all((expected[name] == found[name]).all() for name in expected)
    tokens, mask = checkpoints.batch()
    np.testing.assert_array_equal(
        checkpoints.logits_of(again, tokens, mask), checkpoints.logits_of(theirs, tokens, mask)
    )
