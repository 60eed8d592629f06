"""A decoding step compiled for an H100 that is not here: launches, bytes, no conditional."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from planned import NEEDS_CUDA

from benchmarks.programs import large_copies
from jaxgrpo.config import files
from jaxgrpo.planning import programs
from jaxgrpo.planning.topologies import topology
from jaxgrpo.planning.traffic import Traffic, read_traffic

# Programs for devices that are not here cannot be read back.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
LAYERS = 28
COMPILED = 3, 4  # of which the others follow: each has the same operations
QWEN3 = (
    *("mesh.fsdp=1", "mesh.tensor=1", "rollout.slots=256"),
    *("rollout.max_prompt_tokens=256", "rollout.max_completion_tokens=512"),
)
"""Qwen3-0.6B, 32 prompts with 8 samples each, all of them in slots at once"""
AVERAGE = {"decode_slots": 0.5}
"""The share of the slots' caches that a step reads, on average over samples of 512 tokens."""


@functools.cache
def step_program(layers: int, *overrides: str) -> str:
    """The text of the decode program."""
    overrides = (*QWEN3, f"model.config.num_hidden_layers={layers}", *overrides)
    devices = topology("h100:1x1").devices
    run = programs.build_run(files.load("qwen3_0p6b_v5e", overrides), devices)
    (program,) = programs.compiled(run, {"decode"})
    return program.compiled.as_text()


def per_step(*overrides: str) -> Traffic:
    """What a step of all layers moves and launches, from programs of fewer layers."""

    def measure_loop(text: str) -> np.ndarray:
        twice, once = (np.array(read_traffic(text, (trips,), AVERAGE)) for trips in (2, 1))
        return twice - once

    few, more = (measure_loop(step_program(layers, *overrides)) for layers in COMPILED)
    return Traffic(*(few + (LAYERS - COMPILED[0]) * (more - few)))


@pytest.mark.slow
@NEEDS_CUDA
def test_a_step_of_256_slots_is_450_kernels_and_13_gigabytes_without_a_conditional():
    assert " conditional(" not in step_program(COMPILED[0])
    step = per_step()
    assert step.kernels <= 450
    assert step.moved <= 13e9


@pytest.mark.slow
@NEEDS_CUDA
def test_with_adapters_it_is_no_more_than_480_kernels():
    assert per_step("lora.rank=16").kernels <= 480


@pytest.mark.full
@NEEDS_CUDA
def test_keys_and_values_in_fp8_are_read_by_the_same_kernels():
    step = per_step("rollout.kv_cache_dtype=fp8")
    assert step.kernels <= 450
    assert step.moved <= 8.5e9


@pytest.mark.full
@NEEDS_CUDA
def test_where_samples_wait_for_slots_it_is_450_kernels_too():
    assert " conditional(" not in step_program(COMPILED[0], "rollout.slots=64")
    assert per_step("rollout.slots=64").kernels <= 450


@NEEDS_CUDA
def test_no_cache_is_copied():
    values = 256 * 8 * 512 * 128  # of a layer's keys
    assert large_copies(step_program(COMPILED[0]), values * 2) == []
