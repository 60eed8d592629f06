"""What config.json of a model with a text part says in two places: which field counts."""

from __future__ import annotations

import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.models.hf import families

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("text_only", [True, False])
@pytest.mark.parametrize("odd", [["gemma3"], {}, 3, None])
def test_a_model_type_that_is_no_text_is_refused_as_an_unknown_one(odd, text_only):
    def refusal(full: object, text: object) -> str:
        fields = {"model_type": full, "text_config": {**SIZES, "model_type": text}}
        with pytest.raises(InputError) as caught:
            families.model_config(fields, "a test", text_only=text_only)
        return str(caught.value)

    message = f"model_type = {odd!r}: text models are read from gemma3, mistral3, "
    assert message in refusal(odd, "gemma3_text")
    assert f"model_type = {odd!r} is not built: Known: arcee, " in refusal("llava", odd)
