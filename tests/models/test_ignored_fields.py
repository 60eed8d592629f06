"""Fields of config.json that the user says to ignore, and only where he does."""

from __future__ import annotations

import json

import checkpoints
import jax
import minimal_config
import numpy as np
import pytest

import jaxgrpo
from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import families, folders
from jaxgrpo.planning import programs
from jaxgrpo.training import pretrained

UNKNOWN = {"rotary_pct": 0.5, "alibi": True}
NAMES = list(UNKNOWN)


@pytest.fixture
def folder(tmp_path):
    tokenizer = character_tokenizer("0123456789")
    fields = checkpoints.config_fields("llama", vocab_size=len(tokenizer), eos_token_id=1)
    model = decoder.build(families.model_config({**fields, **UNKNOWN}, "a test", ignored=NAMES))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), model.shapes)
    jaxgrpo.save_model(model, params, tmp_path / "m", tokenizer)
    return tmp_path / "m"


def test_a_refusal_names_the_way_to_ignore_a_field(folder):
    assert json.loads((folder / "config.json").read_text()).items() >= UNKNOWN.items()
    with pytest.raises(InputError) as caught:
        folders.read_config(folder)
    for name in NAMES:
        assert f'or set model.ignore = ["{name}"] if it changes nothing' in str(caught.value)
    assert folders.read_config(folder, ignored=NAMES).vocab_size == 13
    with pytest.raises(InputError, match="alibi = True"):
        jaxgrpo.load_model(folder, ignore=["rotary_pct"])


def test_what_is_read_of_a_run_ignores_them(folder):
    config = minimal_config.read(f"model.path={folder}", f"model.ignore={NAMES}")
    config = minimal_config.read(
        f"model.path={folder}",
        f"model.ignore={NAMES}",
        "rollout.max_prompt_tokens=8",
        "rollout.max_completion_tokens=8",
    )
    start = config.model, config.lora, config.rollout, config.train.remat
    model = pretrained.find_model(*start, pretrained.make_mesh(config.mesh))
    assert pretrained.sampling_settings(config.rollout, model).stop_tokens == (1,)
    assert programs.read_model_config(config.model, config.lora) == model.model.config
    assert families.unread(model.model.config) == (
        "rotary_pct of config.json is not read (model.ignore); "
        "alibi of config.json is not read (model.ignore)"
    )


def test_a_file_that_the_export_could_not_read_is_refused_before_the_run(folder):
    """transformers takes the last of two values without a word."""
    (folder / "preprocessor_config.json").write_text('{"size": 1, "size": 2}')
    lengths = ("rollout.max_prompt_tokens=8", "rollout.max_completion_tokens=8")
    config = minimal_config.read(f"model.path={folder}", f"model.ignore={NAMES}", *lengths)
    start = config.model, config.lora, config.rollout, config.train.remat
    with pytest.raises(InputError, match=r"preprocessor_config\.json is not JSON .*twice"):
        pretrained.find_model(*start, pretrained.make_mesh(config.mesh))


def test_a_model_is_shown_with_fields_ignored(folder, capsys):
    options = [word for name in NAMES for word in ("--ignore", name)]
    assert main(["model", str(folder), *options]) == 0
    assert "rotary_pct of config.json is not read" in capsys.readouterr().out
    assert main(["model", str(folder)]) == 2
    assert 'model.ignore = ["alibi"]' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hidden_size", "rope_theta", "architectures"])
def test_a_field_that_is_read_cannot_be_ignored(name):
    fields = checkpoints.config_fields("llama")
    with pytest.raises(InputError, match=f"model.ignore has {name}, which is read"):
        families.model_config(fields, "a test", ignored=[name])


@pytest.mark.parametrize("fields", [{"is_causal": False}, {"quantization_config": {"bits": 8}}])
def test_a_field_that_must_be_on_or_off_is_ignored_where_the_user_says_so(fields):
    changed = {**checkpoints.config_fields("llama"), **fields}
    with pytest.raises(InputError, match=next(iter(fields))):
        families.model_config(changed, "a test")
    families.model_config(changed, "a test", ignored=list(fields))


def test_a_factor_that_transformers_does_not_read_is_said():
    rope = {**checkpoints.YARN, "attn_factor": 0.9}
    config = families.model_config(
        checkpoints.config_fields("qwen2", rope_parameters=rope), "a test"
    )
    assert families.unread(config) == "attn_factor of its rope is not read, as by transformers"
    plain = families.model_config(checkpoints.config_fields("qwen2"), "a test")
    assert families.unread(plain) == ""
