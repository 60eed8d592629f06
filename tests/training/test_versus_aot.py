"""The updates compiled ahead of time: what is counted in them, and our half with a tiny model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.versus import aot, counts, tunix_step
from jaxgrpo.core.chips import CHIPS
from jaxgrpo.planning import hlo
from jaxgrpo.planning.topologies import Topology
from jaxgrpo.planning.traffic import read_traffic

TINY = (
    *("model.config.vocab_size=512", "model.config.hidden_size=32"),
    *("model.config.intermediate_size=64", "model.config.num_hidden_layers=2"),
    *("model.config.num_attention_heads=4", "model.config.num_key_value_heads=4"),
    *("model.config.head_dim=8", "rollout.prompts_per_step=4", "rollout.group_size=2"),
    *("rollout.max_prompt_tokens=8", "rollout.max_completion_tokens=16", "rollout.slots=4"),
)

PROGRAM = """
HloModule m

%body.1 (b.0: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %b.0 = (s32[], f32[4,8]) parameter(0)
  %i.0 = s32[] get-tuple-element(%b.0), index=0
  %w.0 = f32[4,8]{1,0} get-tuple-element(%b.0), index=1
  %part.0 = f32[1,8]{1,0} fusion(%w.0, %i.0), kind=kLoop, calls=%sliced.1
  %near.0 = f32[1,8]{1,0:S(1)} negate(%part.0)
  ROOT %t.0 = (s32[], f32[4,8]) tuple(%i.0, %w.0)
}

%sliced.1 (p.0: f32[4,8], p.1: s32[]) -> f32[1,8] {
  %p.0 = f32[4,8]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %s.0 = f32[1,8]{1,0} dynamic-slice(%p.0, %p.1, %p.1), dynamic_slice_sizes={1,8}
}

%end.1 (c.0: (s32[], f32[4,8])) -> pred[] {
  %c.0 = (s32[], f32[4,8]) parameter(0)
  ROOT %less.0 = pred[] constant(true)
}

ENTRY %main.1 (a.0: f32[4,8]) -> f32[4,8] {
  %a.0 = f32[4,8]{1,0} parameter(0)
  %start.0 = s32[] constant(0)
  %given.0 = (s32[], f32[4,8]) tuple(%start.0, %a.0)
  %loop.0 = (s32[], f32[4,8]) while(%given.0), condition=%end.1, body=%body.1
  %out.0 = f32[4,8]{1,0} get-tuple-element(%loop.0), index=1
  ROOT %twice.0 = f32[4,8]{1,0} add(%out.0, %out.0)
}
"""

PARTS = """
HloModule m

%first.1 (p.0: f32[2]) -> f32[4] {
  %p.0 = f32[2] parameter(0)
  ROOT %g.0 = f32[4]{0} all-gather(%p.0), channel_id=7, replica_groups=[1,2]<=[2], dimensions={0}
}

%second.1 (p.1: f32[2]) -> f32[4] {
  %p.1 = f32[2] parameter(0)
  ROOT %g.1 = f32[4]{0} all-gather(%p.1), channel_id=7, replica_groups=[1,2]<=[2], dimensions={0}
}

%body.1 (b.0: f32[2]) -> f32[2] {
  %b.0 = f32[2] parameter(0)
  %f.0 = f32[4]{0} fusion(%b.0), kind=kOutput, calls=%second.1
  ROOT %r.0 = f32[2] negate(%b.0)
}

%end.1 (c.0: f32[2]) -> pred[] {
  %c.0 = f32[2] parameter(0)
  ROOT %less.0 = pred[] constant(true)
}

ENTRY %main.1 (a.0: f32[2]) -> f32[2] {
  %a.0 = f32[2] parameter(0)
  %f.1 = f32[4]{0} fusion(%a.0), kind=kOutput, calls=%first.1
  ROOT %loop.0 = f32[2] while(%a.0), condition=%end.1, body=%body.1
}
"""


def test_products_are_counted_as_often_as_loops_run():
    def step(x, _):
        return x @ jnp.ones((4, 4)), None

    def program(x, count):
        x, _ = jax.lax.scan(step, x, None, length=3)  # 3 x 2 x (2 x 4 x 4)
        return jax.lax.fori_loop(0, count, lambda _, x: x @ jnp.ones((4, 4)), x)  # 5 x 64

    traced = jax.jit(program).trace(jnp.ones((2, 4)), 5)
    assert counts.products(traced.jaxpr, (5,)) == 3 * 64 + 5 * 64


def test_what_a_backward_pass_computes_again_counts_again():
    def loss(x):
        return (jax.checkpoint(lambda x: jnp.sin(x @ jnp.ones((4, 4))))(x)).sum()

    traced = jax.jit(jax.grad(loss)).trace(jnp.ones((2, 4)))
    assert counts.products(traced.jaxpr) == 3 * 64  # forward, again, and of the input's gradient


def test_a_loop_that_reads_slices_moves_slices_and_on_chip_memory_moves_nothing():
    sliced = 2 * 32 + 4  # a row of 8 float32 is read and written, and its index is read
    assert read_traffic(PROGRAM, (5,)) == (5 * (sliced + 32) + 3 * 128, 5 * 2 + 1)


SLICES = """
HloModule m

%wrapped.1 (p.0: f32[16,8]) -> f32[2,8] {
  %p.0 = f32[16,8]{1,0} parameter(0)
  ROOT %s.0 = f32[2,8]{1,0:S(1)} slice(%p.0), slice={[0:2], [0:8]}
}

ENTRY %main.1 (a.0: f32[16,8]) -> f32[4,8] {
  %a.0 = f32[16,8]{1,0:T(8,128)} parameter(0)
  %i.0 = s32[] constant(0)
  %first.0 = ((f32[16,8]{1,0:T(8,128)}), f32[4,8]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%a.0)
  %first.1 = f32[4,8]{1,0:T(8,128)S(1)} slice-done(%first.0)
  %next.0 = ((f32[16,8]{1,0}, s32[], s32[]), f32[2,8]{1,0}, s32[]) dynamic-slice-start(%a.0, %i.0)
  %next.1 = f32[2,8]{1,0} dynamic-slice-done(%next.0)
  %near.0 = f32[1,8]{1,0:S(1)} slice(%a.0), slice={[0:1], [0:8]}
  %near.1 = f32[1,4]{1,0:S(1)} slice(%near.0), slice={[0:1], [0:4]}
  %far.0 = ((f32[16,8]{1,0}), f32[2,8]{1,0:S(1)}, s32[]) async-start(%a.0), calls=%wrapped.1
  %far.1 = f32[2,8]{1,0:S(1)} async-done(%far.0), calls=%wrapped.1
}
"""


def test_a_slice_moves_its_own_bytes_and_not_those_of_its_source():
    read = 4 * 8 * (4 + 2 + 1 + 2)  # of the array in main memory; nothing of what is on the chip
    written = 4 * 8 * 2  # the one that is not on the chip
    assert read_traffic(SLICES).moved == read + written


PLANNED = """
HloModule m

ENTRY %main.1 (a.0: f32[4]) -> f32[4] {
  %a.0 = f32[4]{0} parameter(0)
  %b.0 = f32[1024]{0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %k.0 = f32[4]{0} custom-call(%a.0), custom_call_target="tpu_custom_call"
}
"""


def test_room_that_a_compiler_sets_aside_is_not_moved():
    assert read_traffic(PLANNED) == (2 * 16, 1)


def test_a_collective_in_parts_counts_once():
    (collective,) = hlo.collectives(PARTS, {"fsdp": 2}, (6,))
    assert (collective.trips, collective.sent) == (1, 8)


@pytest.mark.full
@pytest.mark.slow
def test_our_update_is_compiled_and_counted_with_a_tiny_model():
    devices = tuple(jax.devices())
    cpus = Topology("cpu", CHIPS["v5e"], 1, devices)
    costs = aot.compare(aot.MODELS["0.6B"], cpus, ["jaxgrpo"], TINY)["jaxgrpo"]
    assert costs["fits"]
    assert costs["sent"] > 0
    assert costs["moved"] > costs["arguments"]
    assert costs["peak"] == costs["arguments"] + costs["temporaries"] + costs["outputs"]
    linear = 2 * (32 * 8 * 16 + 3 * 32 * 64)
    tokens = 8 * 24
    least = 3 * 2 * linear * tokens + 3 * 2 * 32 * 512 * 8 * 16
    assert least <= costs["flops"] * len(devices) <= 2 * least


def test_memory_that_the_arguments_alone_exceed_is_not_compiled_for():
    program = jax.jit(lambda x: x @ x).trace(jnp.ones((4, 4)))
    huge = 2**40
    lowered = aot.Lowered(program, huge, 2, (1,), 0.0, {}, None)
    devices = Topology("cpu", CHIPS["v5e"], 1, tuple(jax.devices()[:1]))
    costs = aot.measured(lowered, devices)
    assert costs == {"calls": 2, "flops": 2 * 128, "arguments": huge, "fits": False}


def test_tunix_shards_as_on_the_devices_it_is_compiled_for():
    devices = jax.devices()
    mesh = tunix_step.device_mesh(devices[::-1], len(devices), 1)
    with tunix_step.on(mesh):
        np.testing.assert_array_equal(jax.devices(), devices[::-1])
    assert jax.devices() == devices
