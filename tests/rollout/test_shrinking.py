"""Fewer slots: which sizes follow one another, and that their programs take the state there is."""

import math

import jax
import numpy as np
import pytest
from engines import draw_all, make_engine

from benchmarks.programs import compilations, deep_config
from benchmarks.workloads import Workload, build, make_prompts
from jaxgrpo.models import sharding
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.shrinking import (
    ARITHMETIC,
    COMPILING,
    OVERHEAD,
    Price,
    Size,
    idle_steps,
    sizes_below,
    worthwhile,
)

RAGGED = Workload(prompts=8, samples=8, shortest=3, longest=12, completion=48, ragged=True)


def test_slots_get_rows_of_their_own_once_they_are_no_more_than_the_rows():
    shared = [Size(40, 16, False), Size(32, 16, False), Size(24, 16, False)]
    separate = [Size(16, 16, True), Size(8, 8, True), Size(4, 4, True)]
    assert sizes_below(Size(64, 16, False)) == shared + separate


def test_a_slot_for_every_sample_keeps_its_rows_until_they_are_few():
    assert sizes_below(Size(16, 2, True)) == [Size(8, 8, True), Size(4, 4, True)]
    assert sizes_below(Size(8, 8, True)) == [Size(4, 4, True)]
    assert sizes_below(Size(4, 4, True)) == []


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"fsdp": 2, "tensor": 2},
        *(pytest.param({axis: 2}, marks=pytest.mark.full) for axis in ("data", "tensor")),
    ],
)
def test_smaller_programs_are_compiled_once_and_take_the_state_as_it_is_laid_out(mesh):
    devices = jax.devices()[: math.prod(mesh.values())]
    mesh = sharding.make_mesh(**mesh, devices=devices)
    model, params = build(deep_config(1), True, mesh)
    settings = SamplingSettings(48, 1.0, RAGGED.stop_tokens, 0, slots=32)
    prompts = make_prompts(RAGGED, 512)
    engine = make_engine(model, settings, prompts, mesh)
    key = jax.random.key_data(jax.random.key(0))
    first = draw_all(engine, params, prompts, key, 8)
    ((_, programs),) = engine.compiled.items()
    assert {program.done() for program in programs.values()} == {True}
    with compilations() as seconds:
        again = draw_all(engine, params, prompts, key, 8)
    assert not seconds
    assert len(engine.compiled) == 1
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.parametrize(
    ("layers", "calls", "numbers"),
    [(2, 60, 1e5), (30, 1, 1.35e8), (30, 1000, 1.35e8), (2, 10**6, 1e5)],
)
def test_sizes_are_compiled_where_they_save_more_than_they_cost(layers, calls, numbers):
    slot_step = 2 * numbers / ARITHMETIC + OVERHEAD * layers
    price = Price(COMPILING[0] + COMPILING[1] * layers, calls * slot_step)
    size = Size(64, 16, False)
    sizes = worthwhile(size, 64, price)
    everything = sizes_below(size)
    assert set(sizes) <= set(everything)
    assert sizes == sorted(sizes, reverse=True)

    def cost(sizes):
        return len(sizes) * price.program + price.slot_step * idle_steps(64, sizes, 64)

    assert cost(sizes) <= min(cost(everything), cost([]))
    assert (len(sizes) <= 1) == (calls < 1000)


@pytest.mark.full
@pytest.mark.slow
def test_samples_of_few_calls_are_those_of_many_with_fewer_programs():
    model, params = build(deep_config(1), True)
    key = jax.random.key_data(jax.random.key(0))
    drawn, programs = [], []
    settings = SamplingSettings(48, 1.0, RAGGED.stop_tokens, 0, slots=16)
    for calls in (0, 1):
        prompts = make_prompts(RAGGED, 512)
        engine = make_engine(model, settings, prompts)
        engine.expect(8, calls)
        drawn.append(draw_all(engine, params, prompts, key, 8))
        programs.append([*engine.compiled.values()])
    many, few = drawn
    for name in ("completion_tokens", "token_mask", "truncated"):
        np.testing.assert_array_equal(getattr(many, name), getattr(few, name))
    # As with another number of slots: products of other sizes round in the last bit.
    np.testing.assert_allclose(many.behavior_logp, few.behavior_logp, rtol=1e-6)
    assert [len(of) for of in programs] == [1, 0]
