"""What `logits` and `token_logp` take: whole numbers that are tokens of the model, and a mask."""

import jax
import numpy as np
import pytest
import tiny

import jaxgrpo
from jaxgrpo.core.errors import InputError

TOKENS, MASK = np.array([[1, 2, 3]]), np.ones((1, 3), bool)


@pytest.mark.parametrize("function", [jaxgrpo.logits, jaxgrpo.token_logp])
@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        (TOKENS * 1.0, MASK, r"^tokens of dtype float64: give whole numbers, as int32$"),
        ([[1.0, 2.0, 3.0]], MASK, "tokens of dtype float64"),
        (TOKENS > 1, MASK, "tokens of dtype bool"),
        ([["a", "b", "c"]], MASK, "tokens of dtype"),
        ([[1, None, 3]], MASK, "tokens of dtype object"),
        ([[1], [2, 3]], MASK, r"tokens: .* give whole numbers, as int32 \[B, T\]"),
        (-TOKENS, MASK, "tokens hold -1, which the mask counts as real: the model has .* 0 to 39"),
        (TOKENS + 2**40, MASK, "tokens hold 1099511627777"),
        (TOKENS, MASK * 0.5, "mask holds 0.5: give 1 or True at real tokens, else 0"),
        (TOKENS, MASK * np.nan, "mask holds nan"),
        (TOKENS, MASK * 2, "mask holds 2"),
        (TOKENS[0], MASK[0], r"expected \[B, T\] for both"),
    ],
)
def test_tokens_and_masks_that_cannot_be_meant_are_refused(function, tokens, mask, message):
    with pytest.raises(InputError, match=message):
        function(tiny.model(), tiny.params(), tokens, mask)


def test_padding_may_be_any_number_and_a_mask_of_any_dtype():
    model, params = tiny.model(), tiny.params()
    expected = jaxgrpo.token_logp(model, params, TOKENS, MASK)
    padded = np.pad(TOKENS, ((0, 0), (0, 1)), constant_values=-100)
    for mask in (np.array([[1, 1, 1, 0]]), [[True, True, True, False]], np.array([[1.0, 1, 1, 0]])):
        found = jaxgrpo.token_logp(model, params, padded, mask)
        np.testing.assert_array_equal(found[:, :3], expected)
    compiled = jax.jit(lambda tokens, mask: jaxgrpo.token_logp(model, params, tokens, mask))
    np.testing.assert_allclose(compiled(TOKENS, MASK), expected, atol=1e-6)
