"""Models and adapters replace what we wrote, and nothing that a user or a run still needs."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxgrpo.cli.make_base import base_config
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import adapters, folders, replacing

THEIRS = {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "{}"}
OURS = {**THEIRS, "README.md": "# Trained with jaxgrpo 0.2.0\n"}


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_model_of_ours_is_replaced_with_its_named_templates(tmp_path):
    templates = {"additional_chat_templates/tool_use.jinja": "{{ messages }}"}
    folders.refuse_unless_ours(written(tmp_path / "m", {**OURS, **templates}))


def test_a_tokenizer_with_named_templates_is_saved_a_second_time(tmp_path):
    tokenizer = character_tokenizer("0123456789")
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    model = decoder.build(base_config(len(tokenizer), 32, 1))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), model.shapes)
    for _ in range(2):
        folders.save_model(model, params, tmp_path / "m", tokenizer)
    name = f"{replacing.TEMPLATES}/tool_use.jinja"
    assert (tmp_path / "m" / name).read_text() == "{{ tools }}"
    before = folders.fingerprint(tmp_path / "m")
    (tmp_path / "m" / name).write_text("{{ other }}")
    after = folders.fingerprint(tmp_path / "m")
    assert {file for file in before if before[file] != after[file]} == {name}


@pytest.mark.parametrize(
    "file", ["notes.md", "additional_chat_templates/notes.md", "checkpoints/1/state"]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_that_we_do_not_write_is_refused_whatever_is_asked_for(tmp_path, file, overwrite):
    folder = written(tmp_path / "m", {**OURS, file: "mine"})
    with pytest.raises(InputError, match=f"holds {file.split('/1')[0]}"):
        folders.refuse_unless_ours(folder, overwrite=overwrite)


@pytest.mark.parametrize("card", [{}, {"README.md": "# Qwen3"}])
def test_a_model_of_someone_else_is_replaced_only_if_that_is_asked_for(tmp_path, card):
    folder = written(tmp_path / "m", {**THEIRS, **card})
    with pytest.raises(InputError, match="it is not replaced; choose another folder"):
        folders.refuse_unless_ours(folder)
    folders.refuse_unless_ours(folder, overwrite=True)


@pytest.mark.parametrize(
    "way", ["itself", "relative", "a link to it", "it links there", "its files link there", "in it"]
)
def test_the_base_of_a_run_is_never_replaced_however_it_is_named(tmp_path, monkeypatch, way):
    base = out = written(tmp_path / "base", OURS)
    if way == "relative":
        monkeypatch.chdir(written(tmp_path / "runs", {"a": ""}))
        out = Path("../base")
    elif way == "a link to it":
        out = tmp_path / "link"
        out.symlink_to(base)
    elif way == "it links there":
        base = tmp_path / "link"
        base.symlink_to(out)
    elif way == "its files link there":  # as the hub's cache does
        base = tmp_path / "snapshot"
        base.mkdir()
        for name in THEIRS:
            (base / name).symlink_to(out / name)
    elif way == "in it":
        base = written(out / "sub", OURS)
    with pytest.raises(InputError, match="from which this run was trained: they are never"):
        folders.refuse_unless_ours(out, [str(base)], overwrite=True)


def test_a_base_beside_or_around_the_folder_is_no_reason(tmp_path):
    base, out = written(tmp_path / "m", OURS), written(tmp_path / "m2", OURS)
    folders.refuse_unless_ours(out, [str(base), "owner/name"])
    folders.refuse_unless_ours(written(base / "out", OURS), [str(base)])


def test_an_adapter_of_someone_else_is_not_replaced(tmp_path):
    theirs = {"adapter_config.json": "{}", "adapter_model.safetensors": "x"}
    folder = written(tmp_path / "a", theirs)
    with pytest.raises(InputError, match="an adapter that jaxgrpo did not write"):
        adapters.refuse_unless_ours(folder)
    card = {"README.md": "# Trained with jaxgrpo\n"}
    adapters.refuse_unless_ours(written(folder, card))
    with pytest.raises(InputError, match="from which this run was trained"):
        adapters.refuse_unless_ours(folder, [str(folder)])


def test_a_link_keeps_pointing_where_the_new_folder_is(tmp_path):
    written(tmp_path / "disk" / "m", OURS)
    (tmp_path / "m").symlink_to(tmp_path / "disk" / "m")
    with replacing.replaced(tmp_path / "m", folders.refuse_unless_ours) as folder:
        written(folder, {"new/file": "new"})
    assert os.readlink(tmp_path / "m") == str(tmp_path / "disk" / "m")
    assert (tmp_path / "m" / "new" / "file").read_text() == "new"
    assert sorted(os.listdir(tmp_path / "disk")) == ["m"]


@pytest.mark.parametrize("name", [".m.partial", ".m.previous"])
def test_a_link_where_we_write_aside_loses_nothing(tmp_path, name):
    precious = written(tmp_path / "precious", {"file": "mine"})
    written(tmp_path / "m", OURS)
    (tmp_path / name).symlink_to(precious)
    with replacing.replaced(tmp_path / "m", folders.refuse_unless_ours) as folder:
        written(folder, {"file": "new"})
    assert (precious / "file").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["m", "precious"]
