"""What a run takes of a device's memory: counted and planned, printed, and refused if too much."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shutil
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_run
import tiny
from checkpointed import small_run_state

from benchmarks.workloads import qwen3_0p6b
from jaxgrpo import advantages, losses
from jaxgrpo.config.keys import CheckpointKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Learner
from jaxgrpo.models import counts, decoder, sharding
from jaxgrpo.models.api import ModelConfig
from jaxgrpo.models.hf import folders
from jaxgrpo.planning import preview, programs, topologies
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots import capacity
from jaxgrpo.rollout.slots.capacity import Sizes
from jaxgrpo.rollout.slots.programs import make_programs
from jaxgrpo.training import loop, memory, parameters, setup
from jaxgrpo.training.processes import host
from jaxgrpo.update import packing
from jaxgrpo.update.forward import Blueprint, opt_layout, param_layout
from jaxgrpo.update.moments import in_bfloat16
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.step import build_steps

pytestmark = pytest.mark.slow

QWEN3_0P6B = dataclasses.replace(qwen3_0p6b(), dtype="float32")
GIB = 2**30


def blueprint(config: ModelConfig, geometry: Geometry, devices: int = 1, **mesh: int) -> Blueprint:
    device_mesh = sharding.make_mesh(**mesh, devices=jax.devices()[:devices])
    steps = geometry.max_completion_tokens
    return Blueprint(
        model=decoder.build(config, constrain=sharding.constrain(device_mesh)),
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=optax.adamw(1e-3),
        geometry=geometry,
        sampling=SamplingSettings(steps, 1.0, (tiny.END,), tiny.PAD, 16),
        mesh=device_mesh,
    )


def on(layout, shapes):
    return jax.tree.map(
        lambda leaf, placement: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement),
        shapes,
        layout,
    )


def total(compiled) -> int:
    """The bytes that a program and what it reads take on a device."""
    analysis = compiled.memory_analysis()
    out = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + out


SMALL = dataclasses.replace(tiny.UNIFORM, num_layers=8, vocab_size=256)
LONG = Geometry(8, 8, 32, 192, 2, 1568)


@pytest.fixture(scope="module")
def sharded() -> Blueprint:
    return blueprint(SMALL, LONG, devices=2, fsdp=2)


# With few slots a third is a second copy of one layer's cache, made between segments.
@pytest.mark.full
@pytest.mark.parametrize(
    ("slots", "above", "kv_cache_dtype"),
    [
        pytest.param(0, 0.15, "auto", id="all-auto"),
        pytest.param(16, 0.25, "bfloat16", id="few-bfloat16", marks=pytest.mark.full),
        pytest.param(0, 0.15, "bfloat16", id="all-bfloat16", marks=pytest.mark.full),
        pytest.param(16, 0.25, "auto", id="few-auto", marks=pytest.mark.full),
    ],
)
def test_what_decoding_takes_covers_what_xla_plans_and_little_more(
    sharded, slots, above, kv_cache_dtype
):
    sharded = sharded._replace(
        sampling=sharded.sampling._replace(slots=slots, kv_cache_dtype=kv_cache_dtype)
    )
    programs = make_programs(sharded.model, sharded.sampling, sharded.mesh)
    params = on(param_layout(sharded.model, sharded.mesh, sharding.SAMPLING), sharded.model.shapes)
    split = jax.jit(programs.split).lower(params).compile()
    params = on(split.output_shardings, jax.eval_shape(programs.split, params))
    groups = LONG.num_prompts, LONG.group_size, LONG.max_prompt_tokens
    sizes = Sizes.for_prompts(slots, 2, *groups)
    begin = programs.begin.lower(sizes).compile()
    state = on(begin.output_shardings, jax.eval_shape(lambda: programs.begin(sizes)))
    enough = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(sharded.mesh))
    planned = total(programs.decode.lower(not slots, params, state, enough).compile())
    counted = memory.count(sharded, ())
    assert 0.97 * planned <= counted.sampler + counted.decode <= (1 + above) * planned
    layer_cache = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state.memory[0][1])
    )
    assert counted.decode > SMALL.num_layers * layer_cache


@pytest.mark.full
def test_what_an_update_takes_is_what_xla_plans(sharded):
    program = build_steps(sharded).update_program
    params = on(param_layout(sharded.model, sharded.mesh), sharded.model.shapes)
    opt_state = on(
        opt_layout(sharded.model, sharded.mesh, sharded.optimizer),
        jax.eval_shape(sharded.optimizer.init, params),
    )
    small: Any = {"step": None, "advantage_state": (), "frozen": {}}
    learner = Learner(trainable=params, opt_state=opt_state, **small)
    planned = memory.plan(program, sharded.geometry, sharded.objective, sharded.mesh, learner)
    counted = memory.count(sharded, ())._replace(update=planned)
    shard = sum(leaf.size for leaf in jax.tree.leaves(params)) * 4 / 2
    assert counted.parameters == pytest.approx(shard, rel=0.05)  # norms are on every device
    assert counted.optimizer == pytest.approx(2 * counted.parameters, rel=0.01)
    inputs_of_layers = SMALL.num_layers * LONG.tokens * SMALL.hidden_size * 4
    assert planned > counted.parameters + inputs_of_layers  # gradients, and what layers recompute
    assert counted.peak == counted.persistent + max(planned, counted.sampler + counted.decode)


def test_moments_in_bfloat16_are_counted_as_half(sharded):
    full, half = (
        memory.count(sharded._replace(optimizer=optimizer), ()).optimizer
        for optimizer in (optax.adamw(1e-3), in_bfloat16(optax.adamw(1e-3)))
    )
    assert half == pytest.approx(full / 2, abs=16)  # counts of updates


def test_the_abstract_batch_is_what_gather_makes():
    shape = (LONG.num_prompts, LONG.group_size)
    sizes = {"steps": LONG.max_completion_tokens, "width": LONG.max_prompt_tokens}

    def gathered():
        rollouts = tiny.rollouts(np.ones(shape), **sizes)
        zero = jnp.zeros(rollouts.token_mask.shape)
        lengths = jax.eval_shape(packing.measure_lengths, rollouts)
        filled = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), lengths)
        everyone = packing.plan(filled, np.ones(shape, bool), LONG)
        fields = {"behavior_logp": zero, "reference_logp": zero, "sampled_now": zero == 0}
        return packing.gather(rollouts, everyone, zero, zero, rollouts.token_mask, fields)

    batch = packing.abstract_batch(LONG, frozenset({"reference_logp", "policy_entropy"}))
    describe = functools.partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
    assert describe(batch) == describe(jax.eval_shape(gathered))


def test_the_slots_of_a_run_are_as_many_as_fit(monkeypatch):
    geometry = Geometry(64, 8, 512, 1024, 1, 16384)
    wide = memory.count(blueprint(QWEN3_0P6B, geometry), ())
    # All samples at once, in float32: 512 of 16 + 3 x 352 columns, and 64 prompts of 511.
    assert wide.decode / GIB == pytest.approx(124.5, abs=0.5)
    narrow = blueprint(dataclasses.replace(QWEN3_0P6B, dtype="bfloat16"), geometry)
    monkeypatch.setattr(capacity, "SLOTS_OF_CPU", 1 << 20)  # as on an accelerator, as is the next
    monkeypatch.setattr(capacity, "COPYING", ())
    for gigabytes, least, most in ((80, 400, 512), (32, 100, 180), (16, 20, 60)):
        monkeypatch.setattr(memory, "device_bytes", lambda mesh, size=gigabytes: int(size * 1e9))
        mesh, kept_bytes = narrow.mesh, memory.count(narrow, ()).persistent
        free = memory.free_beside(
            mesh, kept_bytes + memory.weights_to_sample(narrow.model, mesh, mesh)
        )
        slots = capacity.fitting_slots(narrow.model, narrow.sampling, mesh, 64, 8, 512, free)
        fitted = narrow._replace(sampling=narrow.sampling._replace(slots=slots))
        assert least <= fitted.sampling.slots <= most, gigabytes
        counted = memory.count(fitted, ())
        assert counted.peak <= memory.SHARE * gigabytes * 1e9
        more = fitted._replace(sampling=fitted.sampling._replace(slots=fitted.sampling.slots + 8))
        all_slots = fitted.sampling.slots == 512
        assert all_slots or memory.count(more, ()).peak > memory.SHARE * gigabytes * 1e9


def test_a_run_that_does_not_fit_is_refused_before_its_weights_are_read(tmp_path, monkeypatch):
    config = small_run.config(tmp_path / "r")
    monkeypatch.setattr(folders, "read_params", None)
    monkeypatch.setattr(memory, "device_bytes", lambda _mesh: 1 << 16)
    message = r"(?s)does not fit its devices \(memory: .*iB of .*take (fewer|a smaller) "
    for build in (setup.setup, preview.dry_run):
        with pytest.raises(InputError, match=message):
            build(config)


def test_a_control_group_limits_the_memory_of_a_host(tmp_path):
    machine, membership = host.memory_bytes(tmp_path, tmp_path / "none"), tmp_path / "cgroup"
    second, first = tmp_path / "memory.max", tmp_path / "memory" / "memory.limit_in_bytes"
    job = tmp_path / "job_7" / "memory.max"
    for file in (first, job):
        file.parent.mkdir()
    for line, file in (("0::/job_7/step_0", job), ("0::/", second), ("4:cpu,memory:/a", first)):
        membership.write_text(f"9:pids:/a\n{line}\n")
        for text, expected in ((f"{1 << 20}\n", 1 << 20), ("max\n", machine), ("9" * 19, machine)):
            file.write_text(text)
            assert host.memory_bytes(tmp_path, membership) == expected, (line, text)


def test_a_kernel_that_does_not_tell_what_a_process_has_taken_is_one_that_does_not_tell(
    tmp_path, monkeypatch
):
    """As gVisor's, which has the file and not the line."""
    status = tmp_path / "status"
    monkeypatch.setattr(host, "STATUS", status)
    assert host.most_taken() is None
    status.write_text("Name:\tpython\nVmRSS:\t  100 kB\n")
    assert host.most_taken() is None
    status.write_text("Name:\tpython\nVmHWM:\t  100 kB\nVmRSS:\t   90 kB\n")
    assert host.most_taken() == 102_400


@pytest.mark.full
def test_a_dry_run_prints_the_memory_of_a_device(tmp_path, capsys):
    several = {"train.minibatches": 2, "train.num_iterations": 3}
    refill = {"rollout.refill": {"factor": 3.5}}
    preview.dry_run(small_run.config(tmp_path / "r", **refill, **several))
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    size = r"[\d.]+ (B|KiB|MiB|GiB)"
    for pattern in (
        rf"memory {size} of {size} on each device at the most",
        rf"kept parameters {size}, optimizer {size}, copies 0 B",
        rf"sampling decode state {size}, working memory {size}",
        rf"update working memory {size}",
        rf"process {size} beside those",
        rf"disk {size} at the most: 2 x {size} of checkpoints, model {size}; {size} are free",
    ):
        assert any(re.fullmatch(pattern, line) for line in lines), pattern
    budget = (
        r"24 tokens, \d+ decoded at once; flat groups are replaced until 24 groups are generated"
    )
    assert re.search(budget, " ".join(lines))
    assert "3 steps draw at least 24 " in " ".join(lines)
    assert "rows); a step makes 6: 3 x 2 minibatches of 4 prompts" in " ".join(lines)


MEASURED = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "jaxgrpo", "train", *sys.argv[1:]], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""  # of the largest process


@pytest.mark.full
def test_the_memory_that_a_dry_run_tells_is_what_a_process_takes(tmp_path, python, environment):
    """Within 15%, of a random model of 27 million parameters."""
    shutil.copytree(small_run.base(), tmp_path / "fields")
    file = tmp_path / "fields" / "config.json"
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes, "vocab_size": 4096}))
    model = decoder.build(folders.read_config(tmp_path / "fields"))
    tokenizer = folders.read_tokenizer(tmp_path / "fields")
    folders.save_model(model, jax.jit(model.init)(jax.random.key(0)), tmp_path / "model", tokenizer)
    changes = {"model.path": str(tmp_path / "model"), "checkpoint.every": 100}
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)

    def printed(*options: str) -> str:
        """Nothing is compiled before, which takes the most."""
        cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / f"cache{len(options)}")}
        command = [python, "-c", MEASURED, str(file), *options]
        run = subprocess.run(
            command, env=environment(1, **cache), capture_output=True, text=True, check=True
        )
        return run.stdout

    stated = re.search(r"memory +([\d.]+) (MiB|GiB) of", printed("--dry-run"))
    assert stated is not None
    measured = int(printed().splitlines()[-1])
    power = {"MiB": 2, "GiB": 3}[stated[2]]
    assert float(stated[1]) * 1024**power == pytest.approx(measured, rel=0.15)


@pytest.mark.full
@pytest.mark.parametrize("rank", [4, 0])
def test_the_disk_that_a_dry_run_tells_is_what_a_run_takes(tmp_path, rank):
    config = small_run.config(
        tmp_path / "r", **{"checkpoint.keep": 1, "checkpoint.every": 1, "lora.rank": rank}
    )
    run = setup.setup(config)
    saves = parameters.count_saves(config.checkpoint, config.eval.every, config.train.steps)
    line = preview.disk_line(config.checkpoint, saves, config.run.dir, run.learner, run.stream)
    assert "2 x " in line  # the one that stays, and the next
    step, model = map(
        float, re.findall(r"([\d.]+) KiB of checkpoints, model ([\d.]+) KiB", line)[0]
    )
    loop.train(config)
    leaves = json.loads((tmp_path / "r/checkpoints/3/meta.json").read_text())["leaves"].values()
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in leaves]
    assert sum(sizes) / 2**10 == pytest.approx(step, abs=0.1)
    files = [file.stat().st_size for file in (tmp_path / "r").glob("**/*.safetensors")]
    assert sum(files) / 2**10 == pytest.approx(model, rel=0.2)  # with the names of the tensors


def test_best_steps_are_saved_too_and_count_on_the_disk_and_in_memory():
    keys = CheckpointKeys(every=100, keep=1, keep_best="eval/accuracy")
    assert parameters.count_saves(keys, 10, 100) == 10
    assert parameters.count_saves(keys, 30, 100) == 4
    assert parameters.count_saves(CheckpointKeys(every=30), 10, 100) == 4
    state = small_run_state(1)
    line = preview.disk_line(keys, 10, "gs://bucket/run", *state)
    assert "3 x " in line  # the last one, the best one, and the next
    assert parameters.save_copy_bytes(parameters.to_save(*state), 10) > 50_000
    assert parameters.save_copy_bytes(parameters.to_save(*state), 1) == 0


def test_a_micro_batch_has_no_more_tokens_than_fit_beside_what_a_run_keeps(monkeypatch):
    sizes = (64, 8, 512, 1024)
    wide = blueprint(QWEN3_0P6B, Geometry(*sizes, 1, 8704))
    persistent = memory.count(wide, ()).persistent
    numbers = QWEN3_0P6B.vocab_size * QWEN3_0P6B.hidden_size
    # The sum and one of a micro-batch; what persists are weights and two moments.
    gradients = 2 * persistent // 3
    head = 2 * 4 * numbers  # as it is read, and its gradient
    beside = gradients + head + 3 * 4 * 256 * QWEN3_0P6B.vocab_size  # and a chunk's logits
    each = counts.activations(decoder.build(QWEN3_0P6B), "full")

    def fitting(tokens: float) -> int:
        limit = (persistent + beside + tokens * each) / memory.SHARE
        monkeypatch.setattr(memory, "device_bytes", lambda _mesh: int(limit) + 1)
        parts = wide.model, wide.mesh, wide.optimizer, wide.geometry, persistent, "full"
        return memory.fitting_geometry(*parts).tokens

    monkeypatch.setitem(packing.TOKENS, "cpu", packing.ELSEWHERE)
    assert fitting(1e6) == packing.default_tokens(sizes, 1, packing.ELSEWHERE)
    assert fitting(5000) == packing.default_tokens(sizes, 1, 5000) < packing.ELSEWHERE
    assert fitting(-1e3) == packing.default_tokens(sizes, 1, 0) >= wide.geometry.widest


@pytest.mark.full
def test_the_dtype_of_a_runs_cache_is_that_of_its_sampler_and_of_what_is_counted(tmp_path):
    counted = []
    for dtype in ("auto", "bfloat16"):
        run = setup.setup(small_run.config(tmp_path / "r", **{"rollout.kv_cache_dtype": dtype}))
        assert run.blueprint.sampling.kv_cache_dtype == dtype
        counted.append(memory.count(run.blueprint, ()).decode)
    wide, narrow = counted
    assert wide / 2 < narrow < 0.6 * wide  # tokens and log-probs are as before


def test_a_dry_run_for_more_devices_than_there_are_plans_its_mesh(tmp_path, capsys):
    changes = {"mesh": {"fsdp": 8, "platform": "tpu"}, "plan.topology": "v5e:2x4"}
    config = small_run.config(tmp_path / "r", **changes)
    preview.dry_run(config)
    shown = " ".join(capsys.readouterr().out.split())
    available = len(jax.devices())
    assert "mesh data 1, fsdp 8, tensor 1, context 1 planned not built: " in shown
    verb = "is" if available == 1 else "are"
    assert f"for 8 devices (v5e), and there {verb} {available}; memory is by formula" in shown
    assert "of 15.8 GiB on each device" in shown
    assert "rewards on row 0, whose answer is" in shown
    assert re.search(r"first prompt row \d+, \d+ tokens: '\d+\+", shown)
    with pytest.raises(InputError, match=f"= 8 devices, but there are {available}"):
        loop.train(small_run.config(tmp_path / "r", mesh={"fsdp": 8}))


@pytest.mark.full
def test_what_a_planned_mesh_takes_is_what_the_mesh_takes(tmp_path):
    config = small_run.config(tmp_path / "r", mesh={"fsdp": 2, "tensor": 1, "data": 2})
    run = setup.setup(config)
    devices = [topologies.StandIn(place, "cpu", "cpu", 2**34) for place in range(4)]
    grid = run.inputs.pretrained.mesh
    array = np.array(devices).reshape(grid.devices.shape)
    mesh = jax.sharding.Mesh(array, sharding.AXES, axis_types=grid.axis_types)
    planned = setup.setup(config, mesh=mesh, make_learner=programs.abstract_learner)
    counted, expected = (memory.count(side.blueprint, ()) for side in (planned, run))
    assert counted == expected
    leaves = map(jax.tree.leaves, (planned.learner.opt_state, run.learner.opt_state))
    for planned_leaf, leaf in zip(*leaves, strict=True):
        shard = leaf.sharding.shard_shape(leaf.shape)
        assert planned_leaf.sharding.shard_shape(planned_leaf.shape) == shard


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": {"fsdp": 16}, "plan.topology": "v5e:2x4"}, "= 16 devices, but there are 8"),
        ({"mesh": {"fsdp": 16}}, "rollout.prompts_per_step = 8: must be a multiple of 16"),
        ({"mesh": {"fsdp": 8}, "data.path": "none.jsonl"}, "none.jsonl"),
    ],
)
def test_a_planned_mesh_that_does_not_fit_is_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        preview.dry_run(small_run.config(tmp_path / "r", **changes))
