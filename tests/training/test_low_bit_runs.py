"""Runs that sample in 8 bits and train in float32: they learn, resume, evaluate, and say so."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import small_run

import jaxgrpo
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.models.counts import count_weights
from jaxgrpo.planning import costs, programs
from jaxgrpo.planning.topologies import stand_ins

pytestmark = pytest.mark.slow

LOW = {"rollout.kv_cache_dtype": "fp8", "rollout.weight_dtype": "int8"}
GAP = "sampling/sampling_logp_difference/mean"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    evaluated = {"eval": {"data": "task:arithmetic:test", "prompts": 8, "kl_to_base": True}}
    folder = tmp_path_factory.mktemp("low") / "run"
    return jaxgrpo.train(small_run.config(folder, **LOW, **evaluated))


@pytest.mark.full
def test_log_probs_are_stored_of_the_sampler_and_differ_from_the_trainers(finished):
    steps = [line for line in finished.metrics if GAP in line]
    assert len(steps) == 3
    for line in steps:
        assert 1e-5 < line[GAP] < 0.3
        assert line["sampling/disagreement"] < 1
        assert line["skipped_updates/not_finite"] == 0
    # Evaluations sample in 8 bits, and measure the policy that is trained.
    assert finished.metrics[0]["eval/kl_to_base"] == pytest.approx(0, abs=1e-6)


@pytest.mark.full
def test_a_resumed_run_ends_as_the_uninterrupted_one(tmp_path):
    uninterrupted = jaxgrpo.train(small_run.config(tmp_path / "whole", **LOW))
    jaxgrpo.train(small_run.config(tmp_path / "run", **LOW, **{"train.steps": 2}))
    resumed = jaxgrpo.train(small_run.config(tmp_path / "run", **LOW), resume="auto")
    assert resumed.summary["parameter_hash"] == uninterrupted.summary["parameter_hash"]


@pytest.mark.full
@pytest.mark.parametrize("changes", [{"lora.rank": 4}, {"model.dtype": "bfloat16"}], ids=str)
def test_adapters_and_bfloat16_are_rounded_too(changes, tmp_path):
    run = jaxgrpo.train(small_run.config(tmp_path / "run", **LOW, **changes))
    gaps = [line[GAP] for line in run.metrics if GAP in line]
    assert 1e-5 < min(gaps) < max(gaps) < 0.3
    for leaf in jax.tree.leaves(run.learner.trainable):
        assert np.isfinite(leaf).all()


@pytest.mark.full
def test_on_a_mesh_the_run_is_that_of_a_device(tmp_path):
    alone = jaxgrpo.train(small_run.config(tmp_path / "a", **LOW, **{"mesh.data": 4}))
    divided = jaxgrpo.train(small_run.config(tmp_path / "b", **LOW, **{"mesh.fsdp": 4}))
    left, right = (run.metrics[0] for run in (alone, divided))
    assert left["reward"] == pytest.approx(right["reward"], abs=1e-6)
    assert left[GAP] == pytest.approx(right[GAP], rel=0.05)


@pytest.mark.full
def test_a_run_that_corrects_nothing_says_so(tmp_path, capsys):
    uncorrected = {"loss.proximal": "trainer", "train.steps": 1}
    jaxgrpo.train(small_run.config(tmp_path / "run", **LOW, **uncorrected))
    assert 'set loss.mismatch = { use = "truncated_importance" }' in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("rollout.weight_dtype", '"auto" or "int8" or "fp8"'),
        ("rollout.kv_cache_dtype", '"auto" or "float32" or "bfloat16" or "fp8"'),
    ],
)
def test_other_formats_are_refused(key, allowed, tmp_path):
    with pytest.raises(InputError, match=f'{key} = "int4"') as refused:
        configs.from_dict(small_run.tables(tmp_path, **{key: "int4"}))
    assert allowed in str(refused.value)


def test_a_plan_counts_fewer_bytes_for_decoding():
    def read(*overrides: str) -> tuple[float, Any]:
        run = programs.build_run(configs.load("qwen3_0p6b_v5e", overrides), devices)
        return costs.program_work(run)["decode"].read, run

    devices = stand_ins("v5e:2x4", 1)
    wide, run = read()
    segment = run.blueprint.sampling.segment_tokens
    weights, _ = read("rollout.weight_dtype=int8")
    saved_bytes = count_weights(run.blueprint.model).layers  # bfloat16 has one byte more
    assert wide - weights == pytest.approx(segment * saved_bytes, rel=0.01)
    caches, low = read("rollout.kv_cache_dtype=fp8")
    halves = segment * run.memory.decode / 4
    assert wide - caches == pytest.approx(halves, rel=0.01)
    assert low.memory.decode == pytest.approx(run.memory.decode / 2, rel=0.01)
