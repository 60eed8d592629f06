"""A plan as tables for the terminal, and as numbers for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxgrpo.config.keys import MeshKeys
from jaxgrpo.models import sharding
from jaxgrpo.planning import advice
from jaxgrpo.planning.advice import Candidate
from jaxgrpo.planning.costs import Bound, Work
from jaxgrpo.planning.plan import Plan, Planned, each_axis, needed, peak_bytes
from jaxgrpo.training.memory import shown
from jaxgrpo.training.method import attention_lines
from jaxgrpo.training.records.console import facts, show_table, show_whole, terminal_table


def show_changes(
    console: Console, nearest: Candidate, mesh: MeshKeys, prompts_per_step: int, devices: int
) -> None:
    """Prints what was changed of a config for other devices than its own."""
    sizes = ", ".join(f"{axis} {getattr(mesh, axis)}" for axis in sharding.AXES)
    text = (
        f"the config's mesh ({sizes}; {prompts_per_step} prompts a step) does not "
        f"fit {devices} devices: planned with --set {nearest.overrides}"
    )
    console.print(text, markup=False, soft_wrap=True)


def show_formula(console: Console, plan: Plan) -> None:
    """Prints what is known before anything is compiled."""
    facts(console, _head(plan))
    show_whole(console, _formula_table(plan))
    title = f"by formula a step takes {plan.seconds:.3g} s at the least, without what devices send"
    _show_costs(console, plan.formula, title)
    peak, limit = shown(peak_bytes(plan.parts)), shown(plan.limit)
    console.print(f"by formula each device takes {peak} of {limit}", soft_wrap=True)


def show_program(console: Console, program: Planned) -> None:
    """Prints a line of a program that has been compiled."""
    console.print(
        f"{program.name}: peak {shown(program.peak)}, {program.bound.seconds:.3g} s of a step at "
        f"the least ({program.bound.limit}); compiled in {program.seconds:.0f} s",
        soft_wrap=True,
    )


def show_compiled(console: Console, plan: Plan) -> None:
    """Prints what the compiler says, and whether the run fits."""
    if plan.planned:
        _show_memory(console, plan)
        costs = {program.name: (program.work, program.bound) for program in plan.planned}
        title = "seconds of a step at the least, by the chip's published rates"
        _show_costs(console, costs, title)
        _show_counts(console, plan)
        show_whole(console, _traffic(plan))
    _verdict(console, plan)


def show_remedies(console: Console, remedies: list[Candidate], in_time: bool = True) -> None:
    """Prints what should fit. A line is not broken, so that it can be copied.

    Args: in_time: whether all that may change was tried before the time for it was over.
    """
    if not (remedies or in_time):
        console.print(f"nothing was found that should fit in {advice.SECONDS:g} s, and not all was")
        console.print("tried: try meshes, rollout.slots, train.remat, lora.rank by --formula --set")
        return
    if not remedies:
        console.print("no mesh, micro-batch, slots, remat or LoRA was found that should fit: take")
        console.print("more or larger chips, a smaller model, or shorter prompts and completions")
        return
    console.print("should fit, by formula; --search compiles:")
    for remedy in remedies:
        console.print(f"  --set {advice.shown(remedy)}", markup=False, soft_wrap=True)


def plan_numbers(plan: Plan, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A plan for JSON: bytes, seconds and operations, per device where it is not said otherwise.

    Args:
      changes: keys of the config that were changed for the topology, with their values.
    """
    blueprint, geometry = plan.run.blueprint, plan.run.blueprint.geometry
    return {
        "topology": plan.topology.title,
        "chip": plan.topology.chip._asdict(),
        "devices": len(plan.topology.devices),
        "mesh": dict(blueprint.mesh.shape),
        "changes": dict(changes),
        "prompts": geometry.num_prompts,
        "group_size": geometry.group_size,
        "max_completion_tokens": geometry.max_completion_tokens,
        "slots": blueprint.sampling.slots,
        "tokens_per_micro_batch": geometry.tokens,
        "bins": geometry.bins,
        "micro_batches": geometry.micro_batches,
        "attention": blueprint.kernel.name,
        "decoding": plan.run.engine.programs.attention.name,
        "remat": blueprint.remat,
        "parts_by_formula": plan.parts,
        "peak_by_formula": peak_bytes(plan.parts),
        "seconds_by_formula": {name: bound.seconds for name, (_, bound) in plan.formula.items()},
        "programs": {program.name: _program_numbers(program) for program in plan.planned},
        "peak": plan.peak,
        "limit": plan.limit,
        "fits": plan.fits,
        "problem": plan.problem,
        "step": {
            "seconds_at_least": plan.seconds,
            "completion_tokens": plan.tokens,
            "tokens_per_second_at_most": plan.tokens / plan.seconds if plan.seconds else None,
            "collective_bytes": sum(_sent_bytes(program) for program in plan.planned),
        },
    }


def _program_numbers(program: Planned) -> dict[str, Any]:
    return {
        **{
            name: getattr(program, name)
            for name in ("arguments", "temporaries", "outputs", "beside")
        },
        "peak": program.peak,
        "donated": program.donated,
        "aliased": program.aliased,
        "calls": program.work.calls,
        "flops_of_all_devices": program.work.flops,
        "executed_flops_of_all_devices": program.work.executed,
        "moved": program.traffic.moved,
        "moved_by_formula": program.work.read,
        "kernels": program.traffic.kernels,
        "collectives": sum(collective.trips for collective in program.collectives),
        "collective_bytes": {
            f"{kind} over {'+'.join(axes)}": sent
            for (kind, axes), sent in each_axis(program.collectives).items()
        },
        "bound_seconds": program.bound._asdict(),
        "bound": program.bound.limit,
        "compile_seconds": program.seconds,
    }


def _sent_bytes(program: Planned) -> float:
    """Bytes that a device sends in a step."""
    return program.work.calls * sum(each_axis(program.collectives).values())


def _head(plan: Plan) -> dict[str, str]:
    blueprint, geometry = plan.run.blueprint, plan.run.blueprint.geometry
    mesh = ", ".join(f"{name} {size}" for name, size in blueprint.mesh.shape.items())
    return {
        "devices": f"{plan.topology.title}; {shown(plan.limit)} each ({plan.topology.chip.source})",
        "mesh": mesh,
        "a step": f"{geometry.num_prompts} prompts x {geometry.group_size} samples of at most "
        f"{geometry.max_completion_tokens} tokens, {blueprint.sampling.slots} decoded at once",
        "an update": f"at most {geometry.micro_batches} micro-batches of {geometry.bins} bins x "
        f"{geometry.tokens} tokens, remat {blueprint.remat}",
        **attention_lines(blueprint.kernel, blueprint.teachers, plan.run.engine),
    }


def _show_memory(console: Console, plan: Plan) -> None:
    rows = [["program", "takes", "temporary", "gives", "beside", "peak", "compiled"]]
    for program in plan.planned:
        sizes = (program.arguments, program.temporaries, program.outputs, program.beside)
        sizes_text = map(shown, (*sizes, program.peak))
        rows.append([program.name, *sizes_text, f"{program.seconds:.0f} s"])
    show_table(console, rows, title="memory of each device, as compiled")


def _show_costs(console: Console, costs: Mapping[str, tuple[Work, Bound]], title: str) -> None:
    bounds = [bound for _, bound in costs.values()]
    columns = [name for name in Bound._fields if any(getattr(bound, name) for bound in bounds)]
    rows = [["program", "calls", "TFLOP", *columns, "bound"]]
    for name, (work, bound) in costs.items():
        values = (getattr(bound, column) for column in columns)
        seconds = (f"{value:.4f}" if value else "" for value in values)
        flops = f"{work.calls * work.executed / 1e12:,.1f}"
        rows.append([name, str(work.calls), flops, *seconds, bound.limit])
    show_table(console, rows, text=(0, -1), title=title)


def _show_counts(console: Console, plan: Plan) -> None:
    rows = [["program", "moved", "by formula", "kernels", "collectives"]]
    for program in plan.planned:
        calls, (moved, kernels) = program.work.calls, program.traffic
        sizes = shown(int(calls * moved)), shown(int(calls * program.work.read))
        trips = sum(collective.trips for collective in program.collectives)
        rows.append([program.name, *sizes, f"{calls * kernels:,}", f"{calls * trips:,}"])
    title = "main memory that each device moves in a step, as compiled, and what it runs"
    show_table(console, rows, title=title)


def _traffic(plan: Plan) -> Table:
    rows = [["program", "collective", "axes", "bytes"]]
    for program in plan.planned:
        for (kind, axes), sent in each_axis(program.collectives).items():
            if sent * program.work.calls >= 2**20:
                count = shown(int(sent * program.work.calls))
                rows.append([program.name, kind, " + ".join(axes), count])
    return terminal_table(rows, text=(0, 1, 2), title="bytes that each device sends in a step")


def _formula_table(plan: Plan) -> Table:
    sizes = [[name, shown(size)] for name, size in plan.parts.items() if size]
    title = "what lies in memory, by formula"
    return terminal_table([["what", "each device"], *sizes], title=title)


def _verdict(console: Console, plan: Plan) -> None:
    if plan.fits:
        rate, how = plan.tokens / plan.seconds, "fits" if plan.planned else "fits by formula"
        console.print(
            f"{how}: {shown(plan.peak)} of {shown(plan.limit)}; a step of {plan.tokens:,} "
            f"completion tokens takes {plan.seconds:.3g} s at the least, "
            f"{rate:,.0f} tokens/s at the most",
            soft_wrap=True,
        )
        return
    demand = needed(plan.problem)
    reason = (
        f"the compiler asks for {shown(demand)}" if demand else plan.problem or shown(plan.peak)
    )
    largest = ", ".join(f"{name} {shown(size)}" for name, size in advice.blame(plan))
    console.print(f"does not fit {shown(plan.limit)}: {reason}", markup=False, soft_wrap=True)
    console.print(f"largest, by formula: {largest}", markup=False, soft_wrap=True)
