"""What is read from the text of a compiled program: written by hand, and of real programs."""

from __future__ import annotations

import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxgrpo.models import sharding
from jaxgrpo.models.kernels import expert_rows
from jaxgrpo.planning import hlo, topologies
from jaxgrpo.planning.hlo import Array

AXES = {"data": 2, "fsdp": 1, "tensor": 4, "context": 1}
"""Of eight devices: 0 to 3 differ in tensor, 0 and 4 in data."""


def module_text(*lines: str, before: str = "") -> str:
    """A program whose entry has these instructions."""
    entry = "\n".join(f"  {line}" for line in ("%p = f32[8,128]{1,0} parameter(0)", *lines))
    head = "ENTRY %main (p: f32[8,128]) -> f32[8] {"
    return "\n".join(["HloModule test", textwrap.dedent(before), head, entry, "}", ""])


def gathered(groups: str, axes: dict[str, int] | None = None) -> tuple[int, tuple[str, ...]]:
    """(devices of a group, axes of the mesh) of one collective with such groups."""
    line = f"ROOT %a = f32[8,512]{{1,0}} all-gather(%p), channel_id=1, {groups}, dimensions={{1}}"
    (gather,) = hlo.collectives(module_text(line), axes or AXES)
    return gather.group, gather.axes


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", (4, ("tensor",))),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", (2, ("data",))),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", (2, ("tensor",))),  # half of an axis
        ("replica_groups={{0,1,2,3,4,5,6,7}}", (8, ("data", "tensor"))),
        ("replica_groups={}", (8, ("data", "tensor"))),  # all
        ("replica_groups=[2,4]<=[8]", (4, ("tensor",))),
        ("replica_groups=[1,8]<=[8]", (8, ("data", "tensor"))),
        # [[0, 1, 2, 3], [4, 5, 6, 7]] turned round: 0 4 1 5 2 6 3 7, two by two.
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (2, ("data",))),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", (4, ("tensor",))),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", (2, ("data",))),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", (8, ("data", "tensor"))),
        # Devices 0 4 | 1 5 | 2 6 | 3 7 are a mesh of 4 x 2: its second axis is data.
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}",
            (2, ("data",)),
        ),
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
            (4, ("tensor",)),
        ),
        # A part of an axis: of 8 = 2 x 4 the outer two, then the inner four.
        ("replica_groups=mesh['a'=8] {'a':(1)2}", (2, ("data",))),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", (4, ("tensor",))),
    ],
)
def test_groups_of_devices_are_read_in_every_form(groups, expected):
    assert gathered(groups) == expected


def test_pairs_of_devices_extend_along_the_axis_in_which_they_differ():
    line = "ROOT %a = f32[8,128]{1,0} collective-permute(%p), channel_id=1, source_target_pairs="
    along_tensor = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    (permute,) = hlo.collectives(module_text(line + along_tensor), AXES)
    assert (permute.kind, permute.axes) == ("collective-permute", ("tensor",))
    (permute,) = hlo.collectives(module_text(line + "{{0,4},{4,0}}"), AXES)
    assert permute.axes == ("data",)
    assert permute.sent == 8 * 128 * 4


def test_groups_of_one_device_are_no_collective():
    line = "ROOT %a = f32[8,128]{1,0} all-reduce(%p), replica_groups={{0},{1},{2},{3}}, to_apply=%s"
    assert hlo.collectives(module_text(line), {"data": 4}) == []


@pytest.mark.parametrize(
    ("kind", "sent"),
    [  # of a result of S = 8 x 128 x 4 bytes on each of n = 4 devices
        ("all-gather", 3 / 4),  # what the others have of the result is sent on once
        ("all-to-all", 3 / 4),
        ("all-reduce", 2 * 3 / 4),  # added up in parts, which are then gathered
        ("reduce-scatter", 3),  # of an operand that is n times the result
    ],
)
def test_the_bytes_that_a_device_sends_are_those_of_algorithms_that_send_least(kind, sent):
    line = f"ROOT %a = f32[8,128]{{1,0}} {kind}(%p), replica_groups=[2,4]<=[8], to_apply=%s"
    (collective,) = hlo.collectives(module_text(line), AXES)
    assert collective.sent == pytest.approx(sent * 8 * 128 * 4)


def test_a_started_collective_counts_once_and_by_what_it_gives():
    lines = (
        "%s = (f32[8,128]{1,0}, f32[8,512]{1,0}) all-gather-start(%p), replica_groups=[2,4]<=[8]",
        "ROOT %d = f32[8,512]{1,0} all-gather-done(%s)",
    )
    (collective,) = hlo.collectives(module_text(*lines), AXES)
    assert collective.arrays == (Array("f32", (8, 512)),)
    lines = (
        "%s = (f32[8]{0}, bf16[16]{0}) all-reduce-start(%p, %p), replica_groups=[2,4]<=[8]",
        "ROOT %d = (f32[8]{0}, bf16[16]{0}) all-reduce-done(%s)",
    )
    (collective,) = hlo.collectives(module_text(*lines), AXES)
    assert collective.sent == pytest.approx(1.5 * (8 * 4 + 16 * 2))


PARTS = """
%begun (q: f32[8,128]) -> f32[8,512] {
  %q = f32[8,128]{1,0} parameter(0)
  ROOT %one = f32[8,512]{1,0} all-gather(%q), channel_id=7, replica_groups=[2,4]<=[8]
}

%ended (q: f32[8,128]) -> f32[8,512] {
  %q = f32[8,128]{1,0} parameter(0)
  ROOT %two = f32[8,512]{1,0} all-gather(%q), channel_id=CHANNEL, replica_groups=[2,4]<=[8]
}
"""


@pytest.mark.parametrize(("channel", "count"), [(7, 1), (8, 2)])
def test_parts_of_a_collective_share_their_channel_and_count_once(channel, count):
    lines = (
        "%a = f32[8,512]{1,0} fusion(%p), kind=kCustom, calls=%begun",
        "ROOT %b = f32[8,512]{1,0} fusion(%p), kind=kCustom, calls=%ended",
    )
    text = module_text(*lines, before=PARTS.replace("CHANNEL", str(channel)))
    assert len(hlo.collectives(text, AXES)) == count


def loop(
    condition: str, body: str, known_trips: str = "", name: str = "", inner: str = ""
) -> tuple[str, str]:
    """(the computations of a loop with an all-reduce, the instruction that runs it)."""
    computations = f"""
%cond{name} (c: (s32[], f32[8])) -> pred[] {{
  %c = (s32[], f32[8]{{0}}) parameter(0)
{textwrap.indent(textwrap.dedent(condition).strip(), "  ")}
}}

%body{name} (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %b = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[8]{{0}} get-tuple-element(%b), index=1
  %sum = f32[8]{{0}} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  {inner}
{textwrap.indent(textwrap.dedent(body).strip(), "  ")}
}}
"""
    config = f", backend_config={{{known_trips}}}" if known_trips else ""
    run = f"(s32[], f32[8]{{0}}) while(%t), condition=%cond{name}, body=%body{name}{config}"
    return computations, run


COUNTED = """
%limit = s32[] constant(LIMIT)
%now = s32[] get-tuple-element(%c), index=0
ROOT %less = pred[] compare(%now, %limit), direction=LT
"""
COMPUTED = """
%limit = s32[] get-tuple-element(%c), index=1
%now = s32[] get-tuple-element(%c), index=0
ROOT %less = pred[] compare(%now, %limit), direction=LT
"""
STEP = """
%step = s32[] constant(STEP)
%next = s32[] add(%i, %step)
ROOT %out = (s32[], f32[8]{0}) tuple(%next, %sum)
"""


def ended_at(limit: int) -> str:
    return COUNTED.replace("LIMIT", str(limit))


def by(step: int) -> str:
    return STEP.replace("STEP", str(step))


@pytest.mark.parametrize(
    ("condition", "body", "known_trips", "trips"),
    [
        (ended_at(10), by(1), "", 10),
        (ended_at(10), by(2), "", 5),
        (ended_at(9), by(2), "", 5),
        (ended_at(10), by(1), '"known_trip_count":{"n":"7"}', 7),  # XLA knows better
        (COMPUTED, by(1), "", 100),
        (ended_at(0).replace("LT", "GT"), by(1), "", 100),  # counted down from what is not known
    ],
    ids=["counted", "by two", "by two, odd", "known", "computed", "down"],
)
def test_trips_of_a_loop(condition, body, known_trips, trips):
    computations, run = loop(condition, body, known_trips)
    text = module_text(f"ROOT %w = {run}", before=computations)
    (collective,) = hlo.collectives(text, AXES, unknown=(100,))
    assert (collective.trips, collective.depth) == (trips, 1)


def test_trips_of_loops_within_loops_are_multiplied_and_ends_computed_are_told_by_level():
    innermost, run = loop(COMPUTED, by(1), name="3")
    middle, run_middle = loop(ended_at(4), by(1), name="2", inner=f"%w3 = {run}")
    outer, run_outer = loop(COMPUTED, by(1), name="1", inner=f"%w2 = {run_middle}")
    text = module_text(f"ROOT %w = {run_outer}", before=innermost + middle + outer)
    collectives = hlo.collectives(text, AXES, unknown=(3, 5))
    # The outermost is the first of unknown end; the one within the loop of 4 trips the second.
    assert sorted((collective.depth, collective.trips) for collective in collectives) == [
        (1, 3),
        (2, 12),
        (3, 60),
    ]
    assert sorted(collective.trips for collective in hlo.collectives(text, AXES, unknown=(3,))) == [
        3,
        12,
        36,
    ]


def test_a_collective_in_a_branch_counts_as_if_it_is_taken():
    branches = """
%yes (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} all-reduce(%q), replica_groups=[2,4]<=[8], to_apply=%add
}

%no (q: f32[8]) -> f32[8] {
  ROOT %q = f32[8]{0} parameter(0)
}
"""
    for computations in (
        "true_computation=%yes, false_computation=%no",
        "branch_computations={%no, %yes}",
    ):
        line = f"ROOT %c = f32[8]{{0}} conditional(%k, %p, %p), {computations}"
        assert len(hlo.collectives(module_text(line, before=branches), AXES)) == 1


def test_arrays_are_those_of_fusions_and_tuples_too():
    arrays = list(
        hlo.arrays(module_text("ROOT %t = (s8[3]{0}, pred[5]{0}) tuple(%p)", before=PARTS))
    )
    assert Array("f32", (8, 512)) in arrays
    assert (Array("s8", (3,)).bytes, Array("pred", (5,)).bytes, Array("bf16", (4,)).bytes) == (
        *(3, 5, 8),
    )
    assert Array("pred", (5,)) in arrays


def test_numbers_of_eight_bits_are_of_one_byte():
    (array,) = {
        candidate
        for candidate in hlo.arrays(module_text("ROOT %q = f8e4m3fn[16]{0} convert(%p)"))
        if candidate.shape == (16,)
    }
    assert array.bytes == 16


def summed_and_gathered(devices, platform: str) -> tuple[str, dict[str, int]]:
    """A real program: a sum over "tensor" in a loop of five trips, then a gather over "fsdp"."""
    mesh = sharding.make_mesh(fsdp=2, tensor=2, devices=devices)

    def body(x):
        summed = jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(jax.lax.psum(x, "tensor")), x)
        return jax.lax.all_gather(summed, "fsdp", tiled=True)

    spec = PartitionSpec("fsdp", None)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
    )
    argument = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=NamedSharding(mesh, spec))
    lowered = jax.jit(mapped).trace(argument).lower(lowering_platforms=(platform,))
    return str(lowered.compile().as_text()), dict(mesh.shape)


@pytest.mark.fault(3)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_real_program_has_the_collectives_of_its_source(platform):
    devices = jax.devices() if platform == "cpu" else topologies.topology("v5e:2x2").devices
    collectives = hlo.collectives(*summed_and_gathered(devices, platform))
    described = {
        (collective.kind, collective.axes, collective.trips, collective.depth, collective.arrays)
        for collective in collectives
    }
    assert described == {
        ("all-reduce", ("tensor",), 5, 1, (Array("f32", (128, 128)),)),
        ("all-gather", ("fsdp",), 1, 0, (Array("f32", (256, 128)),)),
    }
    assert len(collectives) == 2
    assert (
        sum(collective.sent * collective.trips for collective in collectives)
        == 5 * 128 * 128 * 4 + 128 * 128 * 4
    )


@pytest.mark.fault(3)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_reduce_scatter_of_a_real_program_is_one(platform):
    """A TPU makes it of an all-reduce and a slice, in a fusion. Three rings take a third each."""
    devices = jax.devices() if platform == "cpu" else topologies.topology("v5e:2x2").devices
    mesh = sharding.make_mesh(fsdp=4, devices=devices)
    layout = sharding.named(mesh, "embed", "vocab")
    argument = jax.ShapeDtypeStruct(
        (4, 6144, 1024), jnp.float32, sharding=sharding.named(mesh, "bins")
    )
    program = jax.jit(lambda parts: sharding.sum_over_bins(parts, layout))
    lowered = program.trace(argument).lower(lowering_platforms=(platform,))
    collectives = hlo.collectives(str(lowered.compile().as_text()), dict(mesh.shape))
    assert [collective.kind for collective in collectives] == ["reduce-scatter"]
    assert collectives[0].axes == ("fsdp",)
    assert sum(collective.sent for collective in collectives) == 3 * 1536 * 1024 * 4


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_loop_of_computed_end_takes_the_trips_it_is_told(platform):
    devices = jax.devices() if platform == "cpu" else topologies.topology("v5e:2x2").devices
    mesh = sharding.make_mesh(tensor=4, devices=devices)

    def body(x, count):
        return jax.lax.fori_loop(0, count, lambda _, x: jnp.tanh(jax.lax.psum(x, "tensor")), x)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    everywhere = sharding.replicated(mesh)
    arguments = (
        jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=everywhere),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
    )
    program = jax.jit(mapped).trace(*arguments).lower(lowering_platforms=(platform,)).compile()
    (collective,) = hlo.collectives(str(program.as_text()), dict(mesh.shape), unknown=(17,))
    assert (collective.kind, collective.trips, collective.axes) == ("all-reduce", 17, ("tensor",))


@pytest.mark.parametrize(("rows", "trips"), [(3, 3), (64, 0)])
def test_blocks_of_experts_run_as_often_as_where_all_experts_have_as_many_rows(rows, trips):
    """They are within loops of computed ends, whose trips are not theirs: of fewer rows than
    experts each has a block, and of more the first rows of all experts are one product."""

    def loss(x, kernel, expert):
        sorting = expert_rows.sort(expert, 4)
        through = lambda times, per_row, rows, weights: times(rows, weights[0])  # noqa: E731
        return expert_rows.passed(through, 1, x, sorting, [kernel]).sum()

    shapes = ((rows, 8), jnp.float32), ((4, 8, 8), jnp.float32), ((rows,), jnp.int32)
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()
    bodies, entry = hlo.computations(program.as_text() or "")
    loops = [
        instruction.tail
        for body in bodies.values()
        for instruction in body
        if instruction.code == "while" and "trips_" in instruction.tail
    ]
    placed = hlo.places(bodies, entry, (1000,))
    assert loops
    assert {placed[tail.split("body=%")[1].split(",")[0]].trips for tail in loops} == {trips}
    assert 1000 not in {place.trips for place in placed.values()}
