"""Checkpoints under faults: kills, damaged files, a full disk, several processes."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpointed import small
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes import free_port

from jaxgrpo.core.errors import InputError
from jaxgrpo.training import step_files
from jaxgrpo.training.checkpoints import Checkpoints, parameter_hash
from jaxgrpo.training.step_files import damage


def equal(left: Any, right: Any) -> bool:
    """Whether two trees hold the same bytes of the same types."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    arrays = [(np.asarray(a), np.asarray(b)) for a, b in pairs]
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in arrays)


@pytest.mark.fault(11)
def test_every_flipped_bit_is_found_and_the_step_before_is_taken(saved, caplog):
    draw = random.Random(0)
    files = sorted(p for p in (saved / "3").rglob("*") if p.is_file() and p.stat().st_size)
    assert len(files) > 5
    for file in files:
        good = file.read_bytes()
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        file.write_bytes(bad)
        problem = damage(saved / "3")
        assert problem is not None, file
        if file.name != "manifest.json":  # a flip there may rename what it lists
            assert str(file) in problem
        file.write_bytes(good)
    assert damage(saved / "3") is None

    arrays = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(arrays.read_bytes())
    data[len(data) // 2] ^= 1
    arrays.write_bytes(data)
    with Checkpoints(saved) as checkpoints, caplog.at_level(logging.WARNING):
        restored, meta = checkpoints.restore(small(0))
        assert equal(restored, small(2))
        assert meta == {"step": 2}
        (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("jaxgrpo")]
        assert f"step 3 is damaged: {arrays} was written as" in warning
        with pytest.raises(InputError, match=r"step 3 is damaged: .*: choose another step"):
            checkpoints.restore(small(0), step=3)
        checkpoints.save(3, small(30), {})  # the run gets there again
        restored, _ = checkpoints.restore(small(0), step=3)
        assert equal(restored, small(30))


@pytest.mark.fault(12)
def test_files_cut_short_or_gone_are_found(saved):
    largest = max(
        (p for p in (saved / "3").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-1])
    (saved / "2" / "meta.json").unlink()
    (saved / "1" / "manifest.json").write_text("{}")
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.latest() == 3
        with pytest.raises(InputError) as caught:
            checkpoints.restore(small(0))
    message = str(caught.value)
    assert f"step 3 is damaged: {largest} was written as" in message
    assert f"step 2 is damaged: {saved / '2' / 'meta.json'} is missing" in message
    assert f"step 1 is damaged: {saved / '1' / 'manifest.json'} cannot be read" in message
    assert message.endswith("start again in another run.dir")


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    ("name", "entry", "problem"),
    [
        ("state/d", [1], "cannot be read"),
        ("/dev/zero", [1, 2], "lists /dev/zero, which is no file of the step"),
        ("state/../../1/meta.json", [1, 2], "which is no file of the step"),
    ],
)
def test_a_manifest_that_lists_what_no_step_has_is_damage(saved, name, entry, problem):
    file = saved / "3" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({**manifest, "files": {**manifest["files"], name: entry}}))
    message = damage(saved / "3")
    assert message is not None
    assert message.startswith(str(file))
    assert problem in message


@pytest.fixture
def unreadable(monkeypatch) -> Callable[[int], None]:
    """Makes the meta.json of step 3 fail by an error of the system when it is read."""
    read = step_files.fingerprint

    def fail_by(number: int) -> None:
        def read_with_fault(path):
            if path.name == "meta.json" and path.parent.name == "3":
                raise OSError(number, os.strerror(number))
            return read(path)

        monkeypatch.setattr(step_files, "fingerprint", read_with_fault)

    return fail_by


@pytest.mark.fault(12)
def test_a_file_on_a_bad_sector_is_damage(saved, unreadable):
    unreadable(errno.EIO)
    assert damage(saved / "3") == f"{saved / '3' / 'meta.json'} cannot be read (Input/output error)"
    with Checkpoints(saved) as checkpoints:
        assert equal(checkpoints.restore(small(0))[0], small(2))


@pytest.mark.fault(12)
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_a_file_that_cannot_be_read_now_ends_the_start_and_its_step_stays(
    number, saved, unreadable, monkeypatch
):
    """The step before is not taken: the next save would then remove the newer one."""
    unreadable(number)
    message = rf"meta.json cannot be read \({os.strerror(number)}\), and may be intact: try again"
    with Checkpoints(saved) as checkpoints, pytest.raises(InputError, match=message):
        checkpoints.restore(small(0))
    monkeypatch.undo()
    with Checkpoints(saved) as checkpoints:
        assert equal(checkpoints.restore(small(0))[0], small(3))


@pytest.mark.fault(12)
def test_a_file_that_a_bucket_has_no_more_is_damage(saved, monkeypatch):
    """Clients of buckets raise FileNotFoundError without a number of the system."""

    def read(path):
        raise FileNotFoundError(str(path))

    monkeypatch.setattr(step_files, "fingerprint", read)
    assert "meta.json cannot be read" in str(damage(saved / "3"))


@pytest.mark.fault(12)
def test_a_name_that_no_file_can_have_is_damage(saved):
    file = saved / "3" / "manifest.json"
    manifest = json.loads(file.read_text())
    long_name = {f"state/{'a' * 5_000}": [1, 2]}
    file.write_text(json.dumps({"files": {**manifest["files"], **long_name}}))
    assert "cannot be read (File name too long)" in str(damage(saved / "3"))


@pytest.mark.fault(12)
def test_a_step_that_another_process_removes_while_it_is_read_is_said(saved, monkeypatch):
    restore = ocp.Checkpointer.restore

    def restore_too_late(reader, *arguments, **options):
        shutil.rmtree(saved / "3")
        return restore(reader, *arguments, **options)

    monkeypatch.setattr(ocp.Checkpointer, "restore", restore_too_late)
    message = r"manifest.json cannot be read .*: it was there when the step was checked; start ag"
    with Checkpoints(saved) as checkpoints, pytest.raises(InputError, match=message):
        checkpoints.restore(small(0))


@pytest.mark.fault(12)
def test_a_step_without_its_manifest_is_no_step_and_is_cleared_away(saved):
    (saved / "3" / "manifest.json").unlink()
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        restored, _ = checkpoints.restore(small(0))
        assert equal(restored, small(2))
        assert (saved / "3").exists()  # another trainer's save may be under way: reading leaves it
        checkpoints.save(3, small(3), {})
        checkpoints.wait()
        assert checkpoints.latest() == 3


@pytest.mark.fault(13)
def test_a_save_that_fails_says_so_and_leaves_the_step_before(saved):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"weight": np.random.default_rng(0).normal(size=1 << 19)}  # 4 MiB that do not compress
    with Checkpoints(saved, keep=3) as checkpoints:
        checkpoints.restore(small(0))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # as a full disk would
            checkpoints.save(4, large, {})
            with pytest.raises(OSError, match=r"could not be saved: .*complete steps: \[1, 2, 3\]"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert sorted(path.name for path in saved.iterdir()) == ["1", "2", "3"]
        checkpoints.save(4, large, {})
        restored, _ = checkpoints.restore(large)
    assert equal(restored, large)


SAVE_FOR_EVER = """
import sys, itertools, numpy as np, jax.numpy as jnp
from jaxgrpo.training.checkpoints import Checkpoints

def state(step):
    draw = np.random.default_rng(step).normal(size=1 << 20)
    return {"a": jnp.asarray(draw, jnp.float32), "b": draw, "step": np.array(step)}

checkpoints = Checkpoints(sys.argv[1])
first = checkpoints.latest() or 0
if first:
    restored, meta = checkpoints.restore(state(0))
    assert meta == {"step": int(restored["step"])} == {"step": first}, (meta, first)
    np.testing.assert_array_equal(restored["b"], state(first)["b"])
    np.testing.assert_array_equal(restored["a"], state(first)["a"])
print("ready", first, flush=True)
for step in itertools.count(first + 1):
    checkpoints.save(step, state(step), {"step": step})
    print("saving", step, flush=True)
"""


@pytest.mark.fault(8)
@pytest.mark.full
def test_a_kill_at_any_moment_leaves_a_complete_step(tmp_path, python, environment):
    draw, last = random.Random(0), 0
    command = [python, "-c", SAVE_FOR_EVER, str(tmp_path)]
    for _ in range(6):
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            ready = run.stdout.readline().split()
            assert ready[:1] == ["ready"], ready
            first = int(ready[1])
            assert first >= last
            for _ in range(2):  # the second save begins when the first is complete
                saving = int(run.stdout.readline().split()[1])
            time.sleep(draw.uniform(0.0, 0.15))
            run.kill()
        last = saving - 1
    with Checkpoints(tmp_path) as checkpoints:
        newest = checkpoints.latest()
        assert newest is not None
        assert newest >= last >= 6
        draws = np.random.default_rng(newest).normal(size=1 << 20)
        expected = {"a": jnp.asarray(draws, jnp.float32), "b": draws, "step": np.array(newest)}
        restored, _ = checkpoints.restore(expected)
    assert equal(restored, expected)


TWO_PROCESSES = """
import sys, os, logging
import jax, numpy as np, jax.numpy as jnp
from pathlib import Path
folder, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxgrpo.training.checkpoints import Checkpoints, parameter_hash
from jaxgrpo.training.records.folder import SAMPLE_KEYS, RunFolder

mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
def put(array, *axes):
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, P(*axes)), lambda index: array[index])
def state(step):
    weight = np.random.default_rng(step).normal(size=(8, 6)).astype(np.float32)
    return {"sharded": put(weight, "fsdp"), "everywhere": put(weight + 1), "host": weight + 2,
            "own": jnp.asarray(weight) + 3}
def same(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert type(a) is type(b), (type(a), type(b))
        if isinstance(a, jax.Array):
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
                np.testing.assert_array_equal(x.data, y.data)
        else:
            np.testing.assert_array_equal(a, b)

with RunFolder(folder) as run, Checkpoints(run.checkpoints) as checkpoints:
    for step in (1, 2, 3):
        run.write_metrics(step, {"loss": 0.5})
        checkpoints.save(step, state(step), {"step": step})
    def rows():
        digest = parameter_hash(state(3))  # gathers: hangs unless every process comes here
        yield dict.fromkeys(SAMPLE_KEYS, digest)
    run.write_samples(3, rows())
    restored, meta = checkpoints.restore(state(0))
    assert meta == {"step": 3}
    same(restored, state(3))
    multihost_utils.sync_global_devices("before the damage")
    if process == 0:
        home = run.checkpoints / "3" / "state"
        file = max((p for p in home.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    restored, meta = checkpoints.restore(state(0))
    assert meta == {"step": 2}
    same(restored, state(2))
    try:
        checkpoints.restore(state(0), step=3)
    except ValueError as error:
        assert "step 3" in str(error) or process == 1
        say("refused")
    checkpoints.save(4, state(4), {"step": 4})
    digest = parameter_hash(state(4))
say(f"hash {digest}")
"""


SAY = """
import sys
lines = open(sys.argv.pop(), "w")
def say(text):
    print(text, file=lines, flush=True)
"""


@pytest.fixture
def two(python, environment, tmp_path_factory):
    """two(code, *arguments) -> what each of two processes says; the code gets port and number last.

    They write to files: Gloo's threads write to the output, in the middle of a line too.
    """
    port, folder = free_port(), tmp_path_factory.mktemp("said")

    def run(code, *arguments):
        files = [folder / "0", folder / "1"]
        workers = [
            subprocess.Popen(
                [python, "-c", SAY + code, *map(str, [*arguments, port, process, file])],
                env=environment(devices=2),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process, file in enumerate(files)
        ]
        try:
            results = [worker.communicate(timeout=100) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        for worker, (_, error) in zip(workers, results, strict=True):
            assert worker.returncode == 0, error[-3000:]
        return [file.read_text() for file in files]

    return run


APART = """
import sys
import jax, numpy as np
*folders, port, number = sys.argv[1:]
number = int(number)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, number, initialization_timeout=60)
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import sharding
from jaxgrpo.training import fingerprints, memory
from jaxgrpo.training.processes import host, process
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.records import lock
from jaxgrpo.training.records.folder import RunFolder

lock.VISIBLE = 1.0
host.memory_bytes = lambda: (8 + number) << 30
say(memory.device_bytes(sharding.make_mesh(data=4)))

def missing():
    raise InputError(f"process {number} found nothing")

def asked():
    return {"train.seed": number, "train.steps": 3}

with Checkpoints(folders[number]) as checkpoints:
    say(process.broadcast(checkpoints.steps))
    for call in (
        lambda: process.broadcast(missing),
        lambda: fingerprints.refuse_unless_alike(asked, "mend it"),
        lambda: fingerprints.refuse_unless_alike(missing if number else asked, "mend it"),
        lambda: checkpoints.restore({"weight": np.zeros(500, np.float32)}),
        lambda: RunFolder(f"{folders[1]} {number}"),
    ):
        try:
            say(call())
        except InputError as error:
            say(error)
"""


@pytest.mark.fault(20)
@pytest.mark.full
def test_what_two_processes_find_otherwise_is_refused_by_both_alike(saved, tmp_path, two):
    texts = two(APART, saved, tmp_path / "another disk")
    lines, peer_lines = (text.splitlines() for text in texts)
    assert lines == peer_lines
    assert int(lines.pop(0)) == 2 << 30, "four devices share the smaller memory of one host"
    assert lines[:3] == [
        "[1, 2, 3]",
        "process 0 found nothing",
        "train.seed: process 1 has 1, process 0 has 0: mend it",
    ]
    assert lines[3].startswith("problem: process 1 has process 1 found nothing, process 0 has noth")
    assert lines[4].startswith("step 3: process 1 has none, process 0 has [")
    assert lines[4].endswith("put run.dir on a file system that all processes share")
    assert lines[5].startswith(f"run.dir = {tmp_path / 'another disk'} 0: process 1 does not find")
    assert not (tmp_path / "another disk 1").exists()


@pytest.mark.full
@pytest.mark.fault(10)
@pytest.mark.slow
def test_two_processes_save_together_and_one_restores_it(tmp_path, two):
    folder = tmp_path / "run"
    results = two(TWO_PROCESSES, folder)
    assert all("refused" in out for out in results)
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    weight = np.random.default_rng(4).normal(size=(8, 6)).astype(np.float32)
    expected = {
        "sharded": jax.device_put(weight, NamedSharding(mesh, PartitionSpec("fsdp"))),
        "everywhere": jax.device_put(weight + 1, NamedSharding(mesh, PartitionSpec())),
        "host": weight + 2,
        "own": jnp.asarray(weight) + 3,
    }
    digests = {out.split("hash ")[1].strip() for out in results}
    assert digests == {parameter_hash(expected)}
    with Checkpoints(folder / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [2, 4]
        restored, meta = checkpoints.restore(expected)
    assert equal(restored, expected)
    assert meta == {"step": 4}
    assert (folder / "metrics.jsonl").read_text().count("\n") == 3
    assert (folder / "samples" / "step_3.jsonl").read_text().count("\n") == 1
