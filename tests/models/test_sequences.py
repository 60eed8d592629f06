"""Whole sequences: which tokens `logits` and `token_logp` take."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.models.sequences import check_tokens

FUNCTIONS = [jaxgrpo.logits, jaxgrpo.token_logp]
MASK = np.array([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2, 3], [4, 40, 5]], r"tokens\[1, 1\] = 40, expected a whole number from 0 to 39"),
        ([[1, 2, -1], [4, 5, 6]], r"tokens\[0, 2\] = -1, expected"),
        ([[1, 2, 3], [2**32, 5, 6]], r"tokens\[1, 0\] = 4294967296, expected"),
    ],
    ids=["above", "negative", "int64"],
)
def test_tokens_that_the_model_does_not_have_are_refused(function, tokens, message):
    with pytest.raises(InputError, match=message):
        function(tiny.model(), tiny.params(), np.array(tokens), MASK)
    if np.max(tokens) < 2**31:
        with pytest.raises(InputError, match=message):
            function(tiny.model(), tiny.params(), jnp.array(tokens), jnp.array(MASK))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_mask_of_other_numbers_than_0_and_1_is_refused(function):
    for mask in (2 * MASK, jnp.array(-MASK)):
        with pytest.raises(InputError, match=r"mask holds -?\d: give 1 or True at real tokens"):
            function(tiny.model(), tiny.params(), np.ones((2, 3), int), mask)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_arrays_without_a_token_are_refused(function, shape):
    message = re.escape(f"{shape}: expected [B, T] for both, with B and T of 1 or more")
    with pytest.raises(InputError, match=message):
        function(tiny.model(), tiny.params(), np.zeros(shape, int), np.zeros(shape, int))


def test_what_is_no_whole_number_is_no_token():
    for tokens in (np.zeros((1, 2)), np.zeros((1, 2), bool)):
        with pytest.raises(InputError, match=f"tokens: holds {tokens.dtype}, expected a whole"):
            check_tokens("tokens", tokens, np.ones((1, 2), bool), 8)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_padding_may_be_any_token_and_traced_ones_are_not_looked_at(function):
    tokens = np.array([[1, 2, 39], [4, 0, 0]])
    want = function(tiny.model(), tiny.params(), tokens, MASK)
    padded = np.where(MASK, tokens, -100)
    traced = jax.jit(lambda tokens, mask: function(tiny.model(), tiny.params(), tokens, mask))
    for values in (function(tiny.model(), tiny.params(), padded, MASK), traced(padded, MASK)):
        np.testing.assert_allclose(values[MASK == 1], want[MASK == 1], rtol=1e-5, atol=1e-5)
