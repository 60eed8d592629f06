"""Checkpoints: exact, on any sharding, and strict about what they are given."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpointed import small
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Learner, Stream, Waiting
from jaxgrpo.training import checkpoints as checkpoints_module
from jaxgrpo.training.checkpoints import Checkpoints, parameter_hash
from jaxgrpo.training.parameters import Saved
from jaxgrpo.training.step_files import damage


def sharding(shape: tuple[int, ...], names: tuple[str, ...], *axes: str | None) -> NamedSharding:
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, PartitionSpec(*axes))


def over_four(*axes: str | None) -> NamedSharding:
    return sharding((4,), ("fsdp",), *axes)


def saved_run(step: int = 3, seed: int = 0) -> Saved:
    """With every kind of leaf: sharded, replicated, bfloat16, host, empty, strange bits."""
    draw = np.random.default_rng(seed)
    params = {
        "embed": jax.device_put(draw.normal(size=(8, 4)).astype(np.float32), over_four("fsdp")),
        "blocks": {
            "0": {"scale": jax.device_put(jnp.full((2, 4), -0.0, jnp.bfloat16), over_four())}
        },
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    nans = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 1], np.uint32).view(np.float32)
    learner = Learner(
        step=jax.device_put(jnp.int32(step), over_four()),
        trainable=params,
        frozen={},
        opt_state=optimizer.init(params),
        advantage_state={"ema": {"mean": jnp.float32(0.25), "per row: a|b.c é": jnp.ones((3, 2))}},
    )
    stream = Stream(
        prompt_policy_state={"seen": np.arange(5), "none": np.zeros((0, 2)), "odd": nans},
        cursor=np.asarray(24, np.int32),
        key=np.asarray(jax.random.key_data(jax.random.key(7))),
    )
    return Saved(learner, stream)


def abstract(state: Any, place: NamedSharding | None = None) -> Any:
    """What to ask for: the same leaves, device arrays on `place` or where they are."""

    def describe(leaf):
        if isinstance(leaf, (np.ndarray, np.generic)):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place or leaf.sharding)

    return jax.tree.map(describe, state)


def bits(tree: Any) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in leaves]
    return [(name, str(array.dtype), array.shape, array.tobytes()) for name, array in arrays]


def test_learner_and_stream_come_back_bit_for_bit(tmp_path):
    state, meta = saved_run(), {"config": {"recipe": "grpo"}, "note": [1, None, "é"]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, meta)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 3
        restored, restored_meta = checkpoints.restore(abstract(state))
    assert restored_meta == meta
    assert bits(restored) == bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        if isinstance(old, jax.Array):
            assert new.sharding == old.sharding
        else:
            assert type(new) is np.ndarray
            assert new.flags.writeable
    assert restored.stream.waiting == Waiting()
    assert type(restored.learner.opt_state[1][0]).__name__ == "ScaleByAdamState"


def test_a_state_saved_on_four_devices_restores_on_other_shardings(tmp_path):
    state = saved_run()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, {})
        single = NamedSharding(jax.sharding.Mesh(jax.devices()[2:3], ("fsdp",)), PartitionSpec())
        for place in (over_four(), single):
            restored, _ = checkpoints.restore(abstract(state, place))
            assert bits(restored) == bits(state)
            assert restored.learner.trainable["embed"].sharding == place
        square = sharding((2, 2), ("fsdp", "tensor"), "tensor", "fsdp")
        target = abstract(state)
        embed = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=square)
        target.learner.trainable["embed"] = embed
        restored, _ = checkpoints.restore(target)
        assert restored.learner.trainable["embed"].sharding == square
        assert bits(restored) == bits(state)


def test_arrays_may_be_donated_and_overwritten_as_soon_as_save_returns(tmp_path):
    spoil = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    draw = np.random.default_rng(0)
    values = [draw.normal(size=(256, 1024)).astype(np.float32) for _ in range(3)]
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(1, 6):
            host = values[2].copy()
            device = [jax.device_put(values[0], over_four("fsdp")), jnp.asarray(values[1].copy())]
            checkpoints.save(step, {"device": device, "host": host}, {})
            device = spoil(device)
            host[:] = -1
            restored, _ = checkpoints.restore(abstract({"device": device, "host": host}))
            for old, new in zip(values, [*restored["device"], restored["host"]], strict=True):
                np.testing.assert_array_equal(old, new)


def change(state: Saved, **leaves: Any) -> Saved:
    target = abstract(state)
    target.learner.trainable.update(leaves)
    return target


def test_another_dtype_shape_or_tree_is_an_error_that_names_the_leaf(tmp_path):
    state, place = saved_run(), over_four()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, {})

        def refuses(target, message):
            with pytest.raises(InputError, match=message) as caught:
                checkpoints.restore(target)
            assert str(tmp_path / "3") in str(caught.value)
            assert "\n" not in str(caught.value)
            assert "set run.dir to another folder" in str(caught.value)

        half = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=place)
        refuses(
            change(state, embed=half),
            r"trainable/embed is stored as float32 \[8, 4\] and asked for as bfloat16 \[8, 4\]:",
        )
        wide = jax.ShapeDtypeStruct((8, 5), jnp.float32, sharding=place)
        refuses(change(state, embed=wide), r"stored as float32 \[8, 4\] .* as float32 \[8, 5\]")
        refuses(
            change(state, head=wide, tail=wide),
            r"trainable/head is stored as nothing .* as float32 \[8, 5\] \(and 1 more\)",
        )
        pruned = abstract(state)
        del pruned.learner.trainable["embed"]
        refuses(pruned, r"trainable/embed is stored as float32 \[8, 4\] and asked for as nothing")
        host = change(state)
        host.stream.prompt_policy_state["seen"] = np.arange(5, dtype=np.int32)
        refuses(host, r"prompt_policy_state/seen is stored as int64 \[5\] and asked for as int32")


def test_what_no_checkpoint_can_hold_is_refused_before_anything_is_written(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="count is int: a state holds arrays only"):
            checkpoints.save(1, {"count": 1}, {})
        with pytest.raises(ValueError, match=r"key is a typed key: keep jax.random.key_data"):
            checkpoints.save(1, {"key": jax.random.key(0)}, {})
        with pytest.raises(ValueError, match="two leaves of the state are called a/b"):
            checkpoints.save(1, {"a": {"b": np.ones(1)}, "a/b": np.ones(1)}, {})
        with pytest.raises(ValueError, match="meta of step 1 must hold JSON values only"):
            checkpoints.save(1, small(1), {"x": np.ones(1)})
        assert list(tmp_path.iterdir()) == []
        checkpoints.save(1, small(1), {})
        bare = {**small(1), "weight": jax.ShapeDtypeStruct((500,), jnp.float32)}
        with pytest.raises(ValueError, match="weight is asked for without a sharding"):
            checkpoints.restore(bare)
    with pytest.raises(InputError, match=r"checkpoint.keep = 0: set it to 1 or more"):
        Checkpoints(tmp_path, keep=0)


def test_numpy_scalars_count_as_arrays(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"count": np.int64(5)}, {})
        restored, _ = checkpoints.restore({"count": np.int64(0)})
    assert restored["count"].dtype == np.int64
    assert int(restored["count"]) == 5


def test_only_the_newest_steps_stay(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (2, 4, 6, 10):
            checkpoints.save(step, small(step), {})
        checkpoints.wait()
        assert checkpoints.steps() == [6, 10]
        restored, _ = checkpoints.restore(abstract(small(0)), step=6)
        assert bits(restored) == bits(small(6))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "6"]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder whose files cannot be removed."""
    if os.geteuid():
        folder.chmod(0o500)
    elif subprocess.run(["chattr", "+i", folder], capture_output=True).returncode:
        pytest.skip("root removes everything from this file system")
    try:
        yield
    finally:
        if os.geteuid():
            folder.chmod(0o700)
        else:
            subprocess.run(["chattr", "-i", folder], check=True)


@pytest.mark.parametrize("part", ["", "state"])
def test_an_old_step_that_cannot_be_removed_fails_no_save_and_is_said(part, tmp_path, caplog):
    """Nor does one of which a part stays."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, small(1), {})
        checkpoints.wait()
        with locked(tmp_path / "1" / part):
            for step in (2, 3, 4):
                checkpoints.save(step, small(step), {})
                checkpoints.wait()
        assert checkpoints.steps() == ([4] if part else [1, 4])
        assert ("/1 is no step any more" if part else "older steps stay in") in caplog.text
        checkpoints.save(5, small(5), {})
        checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


def test_a_step_is_on_the_disk_before_its_manifest_says_that_it_is_complete(tmp_path, monkeypatch):
    """Else a power cut may leave a manifest, and of the files that it lists the names."""
    flushed: set[int] = set()
    flush, write = os.fsync, checkpoints_module.write_atomically

    def flush_and_note(descriptor: int) -> None:
        flush(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def write_behind_the_others(path: Path, content: str) -> None:
        if path.name == "manifest.json":
            files = [path.parent, *path.parent.rglob("*")]
            assert len(files) > 5
            assert [file for file in files if file.stat().st_ino not in flushed] == []
        write(path, content)

    monkeypatch.setattr(os, "fsync", flush_and_note)
    monkeypatch.setattr(checkpoints_module, "write_atomically", write_behind_the_others)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(1), {})
        checkpoints.wait()
        assert checkpoints.steps() == [1]


def test_a_step_that_was_moved_and_linked_to_is_removed_without_a_loss(tmp_path):
    with Checkpoints(tmp_path / "run", 1) as checkpoints:
        checkpoints.save(1, small(1), {})
        checkpoints.wait()
        (tmp_path / "run" / "1").rename(tmp_path / "disk")
        (tmp_path / "run" / "1").symlink_to(tmp_path / "disk")
        checkpoints.save(2, small(2), {})
        checkpoints.wait()
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["2"]
    assert damage(tmp_path / "disk") is None


def test_a_folder_without_checkpoints_is_named(tmp_path):
    folder = tmp_path / "none"
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(InputError, match=f"{folder} holds no complete checkpoint"):
            checkpoints.restore(abstract(small(0)))
        assert not folder.exists()  # reading makes nothing
        checkpoints.save(1, small(1), {})
        with pytest.raises(InputError, match=r"no complete step 7 \(steps there: \[1\]\)"):
            checkpoints.restore(abstract(small(0)), step=7)


def test_saving_the_same_step_again_does_nothing_and_steps_go_forward(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, small(2), {})
        checkpoints.wait()
        before = (tmp_path / "2" / "manifest.json").stat().st_mtime_ns
        checkpoints.save(2, small(2), {})
        checkpoints.wait()
        assert (tmp_path / "2" / "manifest.json").stat().st_mtime_ns == before
        with pytest.raises(ValueError, match="step 1 cannot be saved after step 2"):
            checkpoints.save(1, small(1), {})


def test_a_folder_of_another_run_is_not_written_over(saved):
    with Checkpoints(saved) as checkpoints:
        with pytest.raises(InputError, match=r"already holds steps \[1, 2, 3\]: go on .* --resume"):
            checkpoints.save(4, small(4), {})
        assert checkpoints.steps() == [1, 2, 3]


def test_going_on_from_an_older_step_drops_the_newer_ones(saved):
    with Checkpoints(saved, keep=3) as checkpoints:
        checkpoints.restore(abstract(small(0)), step=1)
        checkpoints.save(1, small(1), {})  # nothing to do
        assert checkpoints.steps() == [1, 2, 3]
        checkpoints.save(2, small(20), {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
        restored, _ = checkpoints.restore(abstract(small(0)))
    assert bits(restored) == bits(small(20))


def rewrite(home, **changes):
    """Changes entries of a step's meta.json, and lists it in the manifest as it is now."""
    meta = json.loads((home / "meta.json").read_text()) | changes
    (home / "meta.json").write_text(json.dumps(meta))
    listed = json.loads((home / "manifest.json").read_text())
    data = (home / "meta.json").read_bytes()
    listed["files"]["meta.json"] = [len(data), zlib.crc32(data)]
    (home / "manifest.json").write_text(json.dumps(listed))


def test_a_step_of_another_format_or_under_another_name_is_refused(saved):
    rewrite(saved / "3", format=2)
    with Checkpoints(saved) as checkpoints:
        with pytest.raises(InputError, match=r"3/meta.json has format 2, and this jaxgrpo reads 1"):
            checkpoints.restore(abstract(small(0)))
        (saved / "2").rename(saved / "7")
        with pytest.raises(InputError, match=r"/7 holds step 2 and not 7: give it its own name"):
            checkpoints.restore(abstract(small(0)), step=7)


def test_a_manifest_that_lists_no_state_is_damage(saved):
    (saved / "3" / "manifest.json").write_text('{"files": {}}')
    assert "does not list meta.json and the files of state/" in (damage(saved / "3") or "")
    with Checkpoints(saved) as checkpoints:
        restored, meta = checkpoints.restore(abstract(small(0)))
    assert meta == {"step": 2}
    assert bits(restored) == bits(small(2))


def test_the_parameter_hash_is_the_sha256_of_names_types_shapes_and_bytes():
    params = {"b": {"w": jnp.arange(6.0).reshape(2, 3)}, "a": jnp.ones(2, jnp.bfloat16)}
    digest = hashlib.sha256()
    digest.update(b"a|bfloat16|(2,)|" + b"\x80\x3f" * 2)
    digest.update(b"b/w|float32|(2, 3)|" + np.arange(6, dtype="<f4").tobytes())
    assert parameter_hash(params) == digest.hexdigest()


def test_the_parameter_hash_sees_every_change_and_neither_sharding_nor_parts(monkeypatch):
    weight = np.arange(8, dtype=np.float32)
    original = parameter_hash({"w": jnp.asarray(weight)})
    assert parameter_hash({"w": jax.device_put(weight, over_four("fsdp"))}) == original
    assert parameter_hash({"w": weight}) == original
    monkeypatch.setattr("jaxgrpo.training.checkpoints.GATHERED", 3 * weight.itemsize)
    assert parameter_hash({"w": weight}) == original
    assert parameter_hash({"w": jax.device_put(weight, over_four("fsdp"))}) == original
    variants = [
        {"v": weight},
        {"w": weight.reshape(2, 4)},
        {"w": weight.view(np.int32)},
        {"w": np.nextafter(weight, 1, dtype=np.float32)},
        {"w": weight, "z": weight},
    ]
    assert len({original, *map(parameter_hash, variants)}) == 6
