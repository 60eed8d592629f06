"""What config.json of a model with a text part says in two places: which field counts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.models.hf import families, folders, texts, wrapped

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
    assert f"model_type = {odd!r} is not built: " in refusal("llava", odd)


TIED = wrapped.TIED
SIGHT = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2}
SIGHT |= {"patch_size": 14, "out_hidden_size": 32, "num_position_embeddings": 16}


def full_logits(folder: Path) -> np.ndarray:
    """Those of transformers at real tokens."""
    from transformers import AutoModelForImageTextToText

    options = {"attn_implementation": "eager", "output_loading_info": True}
    pair: Any = AutoModelForImageTextToText.from_pretrained(folder, **options)
    model, loaded = pair
    assert not loaded["missing_keys"]
    tokens, mask = checkpoints.batch()
    return checkpoints.transformers_logits(model.eval(), tokens, mask)[mask.astype(bool)]


@pytest.mark.parametrize("has_head", [True, False])
def test_a_head_counts_where_the_text_of_qwen3_5_alone_is_tied(has_head, tmp_path):
    """transformers takes the field of the class, which is false where config.json has none, and
    would draw a head that the files lack: an export says that the head is the embedding."""
    from transformers import CONFIG_MAPPING

    sizes = {name: size for name, size in checkpoints.SIZES.items() if name != "pad_token_id"}
    make_config: Any = CONFIG_MAPPING["qwen3_5"]
    text = {**sizes, **checkpoints.RICH["qwen3_5_text"], TIED: True}
    tokens = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58}
    config = make_config(text_config=text, vision_config=SIGHT, vision_end_token_id=57, **tokens)
    checkpoints.saved(config, base := tmp_path / "base")
    fields = json.loads((base / "config.json").read_text())
    fields.pop(TIED)
    assert fields["text_config"][TIED] is True
    (base / "config.json").write_text(json.dumps(fields))
    stored = load_file(base / "model.safetensors")
    embedding = stored["model.language_model.embed_tokens.weight"]
    del stored["lm_head.weight"]
    with_head = stored | {"lm_head.weight": embedding.copy()}
    metadata = {"format": "pt"}
    save_file(with_head, base / "model.safetensors", metadata=metadata)
    expected = full_logits(base)
    save_file(with_head if has_head else stored, base / "model.safetensors", metadata=metadata)
    model, params = jaxgrpo.load_model(base, text_only=True)
    assert model.config.tie_embeddings is not has_head
    jaxgrpo.save_model(model, params, tmp_path / "ours", base=base)
    assert json.loads((tmp_path / "ours/config.json").read_text())[TIED] is not has_head
    assert load_file(tmp_path / "ours/model.safetensors").keys() == (
        with_head.keys() if has_head else stored.keys()
    )
    np.testing.assert_allclose(full_logits(tmp_path / "ours"), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "text", "full", "head", "is_tied"),
    [
        ("gemma3", None, None, False, True),
        ("gemma3", None, None, True, True),
        ("gemma3", False, None, True, False),
        ("gemma3", True, False, False, False),
        ("mistral3", None, None, True, False),
        ("mistral3", None, None, False, True),
        ("mistral3", None, True, True, False),
        ("mistral3", True, None, True, True),
        ("qwen3_5", None, None, False, False),
        ("qwen3_5", True, None, True, False),
        ("qwen3_5", True, None, False, True),
        ("qwen3_5", False, True, False, True),
    ],
)
def test_whether_a_head_is_tied_is_said_beside_the_text(model_type, text, full, head, is_tied):
    """By the class where the field is left out; where the two differ, by the files."""
    content = {**SIZES, "model_type": wrapped.WRAPPERS[model_type].model_type}
    fields = {
        "model_type": model_type,
        "text_config": content | ({} if text is None else {TIED: text}),
    }
    fields |= {} if full is None else {TIED: full}
    resolved = wrapped.resolve_tied(fields, lambda: head)
    config = families.model_config(resolved, "a test", text_only=True)
    assert config.tie_embeddings is is_tied
    assert families.config_fields(config, "float32")[TIED] is is_tied


@pytest.mark.parametrize(
    ("full", "text", "ends"),
    [
        ({"eos_token_id": None}, {"eos_token_id": [2, 5]}, (3, 2, 5)),
        ({}, {"eos_token_id": [2, 5]}, (3, 2, 5)),
        ({"eos_token_id": 7}, {"eos_token_id": [2, 5]}, (3, 7)),
        ({"eos_token_id": None}, {}, (3,)),  # that of the tokenizer, whatever the class assumes
    ],
)
def test_end_tokens_of_the_text_count_where_there_are_none_beside_it(full, text, ends, tmp_path):
    """As with transformers, which takes no null for a token."""
    from transformers import AutoConfig, GenerationConfig

    base, out = tmp_path / "base", tmp_path / "out"
    fields = {"model_type": "mistral3", "vision_config": {"model_type": "pixtral"}, **full}
    fields["text_config"] = {**SIZES, "model_type": "mistral", **text}
    base.mkdir()
    (base / "config.json").write_text(json.dumps(fields))
    assert folders.read_end_tokens(base, SimpleNamespace(eos_token_id=3), 61) == ends
    theirs = GenerationConfig.from_model_config(AutoConfig.from_pretrained(base)).eos_token_id
    if len(ends) > 1:
        assert theirs == (list(ends[1:]) if len(ends) > 2 else ends[1])
        out.mkdir()
        texts.write(out, fields, {"eos_token_id": theirs}, base=base)
        assert not (out / "generation_config.json").exists()
