"""The programs of the sampler: copies in compiled text are found, and no step compiles late."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.programs import compilations, large_copies, late_compilations
from benchmarks.workloads import Workload

PROGRAM = """
HloModule jit__segment, is_scheduled=true

%fused_copy (param_0: f32[8,64]) -> f32[64,8] {
  %param_0 = f32[8,64]{1,0} parameter(0)
  %transpose.1 = f32[64,8]{0,1} transpose(%param_0), dimensions={1,0}
  ROOT %copy.1 = f32[64,8]{1,0} copy(%transpose.1), metadata={op_name="jit(f)/while/body"}
}

%fused_sum (param_0.1: f32[8,64], param_1.1: f32[]) -> f32[8] {
  %param_0.1 = f32[8,64]{1,0} parameter(0)
  %param_1.1 = f32[] parameter(1)
  %transpose.2 = f32[64,8]{0,1} transpose(%param_0.1), dimensions={1,0}
  ROOT %reduce.1 = f32[8]{0} reduce(%transpose.2, %param_1.1), dimensions={0}, to_apply=%add
}

%body (state: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %state = (s32[], f32[8,64]{1,0:T(8,128)}) parameter(0)
  %cache = f32[8,64]{1,0} get-tuple-element(%state), index=1
  %moved = f32[64,8]{1,0} fusion(%cache), kind=kLoop, calls=%fused_copy
  %zero = f32[] constant(0)
  %sum = f32[8]{0} fusion(%cache, %zero), kind=kLoop, calls=%fused_sum
  %small = f32[8,8]{1,0} copy(%other)
  %half = bf16[8,64]{0,1:T(8,128)(2,1)S(1)} copy(%cache)
  %start = (f32[8,64]{1,0}, f32[8,64]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%cache)
  ROOT %next = (s32[], /*index=1*/f32[8,64]{1,0}) tuple(%zero, %cache)
}

ENTRY %main (cache: f32[8,64]) -> f32[64,8] {
  %cache.1 = f32[8,64]{1,0} parameter(0)
  %pair = (s32[], f32[64,8]{1,0}) fusion(%cache.1), kind=kLoop, calls=%fused_copy
  ROOT %turned = f32[64,8]{1,0} transpose(%cache.1), dimensions={1,0}
}
"""
CACHE = 8 * 64 * 4  # bytes
SMALL = Workload(prompts=2, samples=3, shortest=3, longest=12, completion=16, ragged=True)


def test_a_copy_as_large_as_a_cache_is_found_alone_and_in_a_fusion_that_writes_it():
    names = [copy.partition(" =")[0] for copy in large_copies(PROGRAM, CACHE)]
    assert names == ["body: moved", "main: pair", "main: turned"]


def test_a_copy_in_half_the_precision_has_half_the_bytes():
    copies = large_copies(PROGRAM, CACHE // 2)
    assert "body: half = bf16[8,64]{0,1:T(8,128)(2,1)S(1)} copy" in copies
    assert len(copies) == 4


def test_a_transpose_that_a_reduction_reads_and_a_prefetch_are_no_copies():
    names = " ".join(large_copies(PROGRAM, 8 * 8 * 4))
    assert "small" in names
    assert "sum" not in names
    assert "start" not in names


@pytest.mark.parametrize(("function", "count"), [(lambda x: x.T, 1), (lambda x: x + 1, 0)])
def test_the_text_of_a_real_program_is_read(function, count):
    text = jax.jit(function).lower(jnp.ones((96, 128))).compile().as_text() or ""
    assert len(large_copies(text, 96 * 128 * 4)) == count
    assert large_copies(text, 96 * 128 * 4 + 1) == []


def test_a_compilation_is_counted_once():
    double = jax.jit(lambda x: 2 * x)
    values = [jnp.ones(size) for size in (5, 5, 6)]
    with compilations() as seconds:
        for value in values:
            double(value)
    double(jnp.ones(7))
    assert len(seconds) == 2


@pytest.mark.slow
def test_ragged_steps_compile_nothing_after_the_first_ones():
    assert late_compilations(SMALL, steps=12, warm_up=3) == 0
