"""A family of one's own: the one of examples/, beside transformers, and what is refused."""

from __future__ import annotations

import json
import pkgutil
from typing import Any

import checkpoints
import minimal_config
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxgrpo
from jaxgrpo.config import own_code
from jaxgrpo.core.errors import InputError
from jaxgrpo.models.hf import families, folders
from jaxgrpo.models.hf.families import Family
from jaxgrpo.training import fingerprints, pretrained

ERNIE = "transformers.models.ernie4_5.modeling_ernie4_5"
LAYERS = [checkpoints.SLIDING, checkpoints.FULL, checkpoints.SLIDING]


@pytest.fixture(scope="module")
def reference(repository):
    return f"{repository}/examples/own_family.py:family"


@pytest.fixture(scope="module")
def family(reference):
    return own_code.load(reference, None, Family, "family")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))


@pytest.fixture(scope="module")
def vault(tmp_path_factory):
    """(transformers' model, its folder)."""
    from transformers import VaultGemmaConfig

    folder = tmp_path_factory.mktemp("vaultgemma")
    sizes = {**checkpoints.SIZES, "sliding_window": checkpoints.WINDOW, "layer_types": LAYERS}
    caps: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    config = VaultGemmaConfig(**sizes, **caps, query_pre_attn_scalar=9)
    return checkpoints.saved(config, folder), folder


@pytest.mark.slow
def test_the_family_of_the_examples_computes_what_transformers_does(vault, family, tmp_path):
    theirs, folder = vault
    model, params = jaxgrpo.load_model(folder, family=family)
    windows = [kind.window for kind in model.config.attention]
    assert windows == [checkpoints.WINDOW, None, checkpoints.WINDOW]
    tokens, mask = checkpoints.batch()
    exported = np.asarray(jaxgrpo.logits(model, params, tokens, mask))
    real = mask.astype(bool)
    expected = checkpoints.transformers_logits(theirs, tokens, mask)
    np.testing.assert_allclose(exported[real], expected[real], atol=2e-4, rtol=0)
    assert expected[real].std() > 0.2
    jaxgrpo.save_model(model, params, tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    expected, exported = theirs.state_dict(), again.state_dict()
    assert expected.keys() == exported.keys()
    assert all((expected[name] == exported[name]).all() for name in expected)


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "hunyuan_v1_dense"])
def test_norms_of_heads_whose_neighbours_turn_together_are_read_and_written_so(
    name, tmp_path, monkeypatch
):
    """Of each head, of all heads as one vector, and behind the turn; by Ernie's turn of pairs."""
    turn = pkgutil.resolve_name(f"{ERNIE}:apply_rotary_pos_emb")
    monkeypatch.setattr(f"transformers.models.{name}.modeling_{name}.apply_rotary_pos_emb", turn)
    theirs = checkpoints.saved(checkpoints.transformers_config(name), tmp_path / "base")
    tokens, mask = checkpoints.batch()
    expected = checkpoints.transformers_logits(theirs, tokens, mask)
    fields = _fields(tmp_path / "base") | {"model_type": "paired"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(fields))
    family = families.FAMILIES[name]._replace(model_type="paired", in_pairs=True)
    model, params = jaxgrpo.load_model(tmp_path / "base", family=family)
    logits, real = np.asarray(jaxgrpo.logits(model, params, tokens, mask)), mask.astype(bool)
    np.testing.assert_allclose(logits[real], expected[real], atol=2e-4, rtol=0)
    jaxgrpo.save_model(model, params, tmp_path / "ours")
    stored, ours = (load_file(tmp_path / n / "model.safetensors") for n in ("base", "ours"))
    assert stored.keys() == ours.keys()
    assert all((stored[tensor] == ours[tensor]).all() for tensor in stored)


def _fields(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_config_names_a_family_and_its_file_is_own_code(vault, reference):
    config = minimal_config.read(f"model.path={vault[1]}", f"model.family={reference}")
    with pytest.raises(
        InputError, match=r"model_type = 'vaultgemma' is not built: .*model\.family"
    ):
        folders.read_config(vault[1])
    folder, stored = pretrained.find_config(config.model)
    assert (folder, stored.family) == (vault[1], "vaultgemma")
    assert folders.read_config(folder) == stored  # registered: whatever reads it finds it
    assert "own_family.py" in fingerprints.config_facts(config)["own code"]


def test_what_a_config_names_wrongly_is_said_in_one_message():
    assert minimal_config.problems("model.family=llama", "train.steps=0") == (
        "train.steps = 0: expected 1 or more",
        'model.family = "llama": expected a family of your own, "path/file.py:family"; leave it '
        "out for one that is built in",
    )
    (problem,) = minimal_config.problems("model.family=/none/mine.py:family")
    assert problem == "model.family: there is no file /none/mine.py, named by " + repr(
        "/none/mine.py:family"
    )


def test_a_reference_to_something_else_names_the_families_of_the_file(reference):
    with pytest.raises(InputError, match="read is a function: name a family"):
        own_code.load(reference.replace(":family", ":read"), None, Family, "family")
    with pytest.raises(InputError, match="has no 'famly': did you mean 'family'"):
        own_code.load(reference.replace(":family", ":famly"), None, Family, "family")


def test_a_family_may_be_registered_again_but_replaces_no_other(family):
    families.register(family)
    families.register(family)
    again = family._replace(harmless=())  # the cell of a notebook, run again
    families.register(again)
    assert families.find_family("vaultgemma") is again
    with pytest.raises(
        InputError, match=r'"vaultgemma" is that of own_own_family_\w+\.read already'
    ):
        families.register(family._replace(read=_fields))
    with pytest.raises(InputError, match='"llama" is built in and cannot be replaced'):
        families.register(family._replace(model_type="llama"))


def test_a_folder_of_another_family_is_refused(vault, family):
    renamed = family._replace(model_type="vaultgemma9")
    with pytest.raises(InputError, match="model_type = 'vaultgemma', but the family given is"):
        folders.read_config(vault[1], renamed)
