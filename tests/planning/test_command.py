"""`jaxgrpo plan`: offline and without weights, what it prints, writes and ends with."""

from __future__ import annotations

import json
import resource
import subprocess
import time
from typing import Any

import planned
import pytest
from rich.console import Console

from jaxgrpo.cli.main import main
from jaxgrpo.config import files
from jaxgrpo.core.errors import InputError
from jaxgrpo.planning import advice, command, plan, programs, report, topologies

OFFLINE = """
import socket, sys

def refused(*given, **named):
    raise OSError("no network here")

socket.socket.connect = socket.getaddrinfo = socket.create_connection = refused
from jaxgrpo.cli.main import main
"""
ONCE = "sys.exit(main(sys.argv[1:]))"
TWICE = """
from jaxgrpo.planning import plan

compiling, compiled = plan.plan, []

def plan_once(*given, **named):
    compiled[:] = compiled or [compiling(*given, **named)]
    return compiled[0]

plan.plan = plan_once
code = main(sys.argv[1:])
print("as JSON:", flush=True)
sys.exit(code or main([*sys.argv[1:], "--json"]))
"""
"""Prints a plan as tables and then as JSON; it is compiled once."""
PROGRAMS = ("sync", "prefill", "decode", "update")
MISFIT = ("llama31_8b_v6e", "--topology", "v5e:2x2", "--set", "mesh.fsdp=4", "mesh.tensor=1")


@pytest.fixture
def offline(python, environment):
    """`jaxgrpo ARGUMENTS` in a process that reaches no network."""

    def run(
        *arguments: str, stderr: int = subprocess.PIPE, program: str = ONCE
    ) -> subprocess.CompletedProcess[str]:
        command, stdout = [python, "-c", OFFLINE + program, *arguments], subprocess.PIPE
        how: dict[str, Any] = {"text": True, "env": environment(), "timeout": 560}
        return subprocess.run(command, stdout=stdout, stderr=stderr, **how)

    return run


@pytest.fixture
def small(tmp_path):
    """A config of a tiny model as a file."""

    def write(**changes: Any) -> str:
        file = tmp_path / "small.toml"
        file.write_text(files.to_toml(planned.config(**changes)))
        return str(file)

    return write


@pytest.mark.full
def test_what_fits_is_printed_written_and_ends_with_0(offline, small, tmp_path):
    texts = tmp_path / "hlo"
    options = ("--topology", "v5e:2x2", "--dump", str(texts))
    config = small(mesh={"fsdp": 4, "tensor": 2})
    process = offline("plan", config, *options, stderr=subprocess.STDOUT, program=TWICE)
    assert process.returncode == 0, process.stdout
    text, _, document = process.stdout.partition("as JSON:\n")
    lines = (
        "the config's mesh (data 0, fsdp 4, tensor 2, context 1; 8 prompts a step) does not fit "
        "4 devices: planned with --set mesh.fsdp=2",
        "by formula each device takes ",
        *(
            line
            for place, name in enumerate(PROGRAMS, start=1)
            for line in (f"compiling {name} ({place} of 4)", f"{name}: peak ")
        ),
        "fits: ",
    )
    places = [text.index(line) for line in lines]
    assert places == sorted(places), "the formula's answer comes before anything is compiled"
    assert "tokens/s at the most" in " ".join(text.split())
    assert "…" not in text, "a pipe has 80 columns"
    for name in PROGRAMS:
        assert (texts / f"{name}.hlo.txt").read_text().startswith("HloModule")
    printed = json.loads(document.removeprefix("looking for a mesh\n"))  # it is on stderr
    assert tuple(printed["programs"]) == PROGRAMS
    assert printed["changes"] == {"mesh.fsdp": 2}
    assert printed["fits"] is True
    assert printed["mesh"] == {"data": 1, "fsdp": 2, "tensor": 2, "context": 1}
    assert printed["peak"] == max(program["peak"] for program in printed["programs"].values())
    assert all(program["aliased"] >= program["donated"] for program in printed["programs"].values())
    assert printed["peak_by_formula"] < printed["limit"]
    assert printed["step"]["completion_tokens"] == 8 * 4 * 128
    assert (printed["remedies"], printed["searched"]) == ([], [])


@pytest.fixture
def uncompiled(monkeypatch):
    """Nothing may be compiled."""
    for name in ("compile_program", "compiled"):
        monkeypatch.setattr(programs, name, None)


def test_the_formula_alone_compiles_nothing(small, uncompiled, capsys):
    arguments = ["plan", small(), "--topology", "v5e:2x2", "--formula"]
    assert main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    places = [text.index(line) for line in ("by formula a step takes ", "fits by formula: ")]
    assert places == sorted(places)
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["programs"], printed["fits"]) == ({}, True)
    assert printed["peak"] == printed["peak_by_formula"] <= printed["limit"]
    seconds = printed["seconds_by_formula"]
    assert tuple(seconds) == PROGRAMS
    assert printed["step"]["seconds_at_least"] == sum(seconds.values()) > 0


def test_a_narrow_terminal_cuts_no_number_of_a_plan(small, uncompiled, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["plan", small(), "--topology", "v5e:2x2", "--formula"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    assert all(name in text for name in (*PROGRAMS, "caches and samples", "TFLOP", "compute"))


@pytest.mark.parametrize("name", ["h100:1x2", "v5e:1x2"])
def test_the_formula_needs_no_compiler_for_the_chips(small, uncompiled, monkeypatch, capsys, name):
    arguments = ["plan", small(mesh={"fsdp": 2}), "--topology", name]
    monkeypatch.setattr(topologies, "_described", None)  # as where there is none
    assert main([*arguments, "--formula"]) == 0
    assert f"{name}, 2 chips" in capsys.readouterr().out
    with pytest.raises(InputError, match="The compilers come with"):
        command.main(arguments[1], topology=name)


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_other_devices_is_replaced_by_one_that_does(
    small, uncompiled, monkeypatch, capsys
):
    chips = topologies.topology("v5e:2x2")
    peak = advice.by_formula(
        programs.build_run(planned.config(mesh={"data": 4}), chips.devices), chips
    )
    tight = chips._replace(chip=chips.chip._replace(memory=peak[0] - 1))
    monkeypatch.setattr(topologies, "topology", lambda *_: tight)
    options = ("--formula", "--json")
    assert main(["plan", small(mesh={"data": 4}), "--topology", "v5e:2x2", *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["changes"]
    assert printed["peak"] <= advice.ROOM * tight.chip.memory
    # A config's own devices are what it says they are.
    plan_keys = {"plan": {"topology": "v5e:2x2"}}
    main(["plan", small(mesh={"data": 4}, **plan_keys), *options])
    assert json.loads(capsys.readouterr().out)["changes"] == {}


def test_a_mesh_that_fits_other_devices_stays_where_it_leaves_little_room(
    small, uncompiled, monkeypatch, capsys
):
    """Also where another mesh leaves more."""
    mesh, chips = {"data": 4}, topologies.topology("v5e:2x2")
    run = programs.build_run(planned.config(mesh=mesh), chips.devices)
    peak, _ = advice.by_formula(run, chips)
    tight = chips._replace(chip=chips.chip._replace(memory=int(peak / 0.95)))
    monkeypatch.setattr(topologies, "topology", lambda *_: tight)
    arguments = ["plan", small(mesh=mesh), "--topology", "v5e:2x2", "--formula"]
    assert main(arguments) == 0
    assert "does not fit" not in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["fits"], printed["changes"], printed["peak"]) == (True, {}, peak)


@pytest.mark.slow
@pytest.mark.fault(4)
def test_what_does_not_fit_is_a_document_with_what_would_and_exit_code_1(
    small, monkeypatch, capsys
):
    chips = topologies.topology("v5e:2x2")
    peak = plan.peak_bytes(plan.memory_parts(programs.build_run(planned.config(), chips.devices)))
    tiny = chips._replace(chip=chips.chip._replace(memory=int(peak / plan.TOO_MUCH) - 1))
    monkeypatch.setattr(topologies, "topology", lambda *_: tiny)
    assert main(["plan", small(), "--topology", "v5e:2x2", "--json"]) == command.NO_FIT
    output = capsys.readouterr()
    begun = [line for line in output.err.split("\n") if " s now" not in line]  # on a slow machine
    assert begun == ["looking for a mesh", "looking for what fits", ""]
    printed = json.loads(output.out)
    assert (printed["fits"], printed["programs"], printed["peak_by_formula"]) == (False, {}, peak)
    assert "nothing was compiled" in printed["problem"]
    for remedy in printed["remedies"]:
        assert remedy["peak"] <= advice.ROOM * tiny.chip.memory
        assert remedy["changes"]


def test_a_remedy_is_printed_as_set_takes_it_in_one_line(small, capsys):
    """Also where it takes keys out of the config."""
    changes = {"mesh.data": 0, "rollout.slots": None, "train.tokens_per_micro_batch": None}
    remedy = advice.Candidate({**changes, "train.remat": "full", **advice.LORA}, 2**30, 1.0)
    report.show_remedies(Console(width=40), [remedy])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "--set" in line]
    overrides = line.partition("--set ")[2].partition("  (")[0].split()
    rollout, train = {"rollout.slots": 8}, {"train.tokens_per_micro_batch": 512}
    read = files.load(small(**rollout, **train), overrides)
    assert (read.rollout.slots, read.train.tokens_per_micro_batch) == (None, None)
    assert (read.train.remat, read.lora.rank) == ("full", advice.LORA["lora.rank"])


@pytest.mark.full
def test_a_search_that_ran_out_of_time_does_not_say_that_nothing_fits(
    small, uncompiled, monkeypatch, capsys
):
    chips = topologies.topology("v5e:2x2")
    tiny = chips._replace(chip=chips.chip._replace(memory=1))
    monkeypatch.setattr(topologies, "topology", lambda *_: tiny)
    monkeypatch.setattr(advice, "SECONDS", 0.0)
    arguments = ["plan", small(), "--topology", "v5e:2x2"]
    assert main(arguments) == command.NO_FIT
    text = " ".join(capsys.readouterr().out.split())
    assert "nothing was found that should fit in 0 s, and not all was tried" in text
    assert "more or larger chips" not in text
    monkeypatch.setattr(advice.Search, "_changes", lambda _: iter(()))
    monkeypatch.setattr(advice, "SECONDS", 100.0)
    assert main(arguments) == command.NO_FIT
    text = " ".join(capsys.readouterr().out.split())
    assert "no mesh, micro-batch, slots, remat or LoRA was found that should fit" in text


OTHERS = {
    "v5e:1x1": {"mesh.fsdp": 1, "mesh.tensor": 1},
    "v5e:2x2": {"mesh.fsdp": 2},  # tensor stays
    "v5e:4x4": {},  # data takes the rest
    "v5e:8x8": {"rollout.prompts_per_step": 32},  # the heads divide by 2
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_mesh_for_other_devices_is_the_nearest_that_can_be_built(name):
    config = planned.config(mesh={"fsdp": 4, "tensor": 2})
    chips = topologies.topology(name)
    nearest = advice.Search(config, chips).nearest()
    assert nearest.changes == OTHERS[name]
    run = programs.build_run(advice.Search(config, chips).changed(nearest.changes), chips.devices)
    assert run.blueprint.mesh.size == len(chips.devices)
    assert nearest.peak == plan.peak_bytes(plan.memory_parts(run))


def test_a_mesh_for_other_devices_is_one_that_fits_into_their_memory_if_there_is_one():
    config, chips = planned.config(mesh={"tensor": 2}), topologies.topology("v5e:2x2")
    peak = advice.Search(config, chips).nearest().peak  # with data 2
    small = chips._replace(chip=chips.chip._replace(memory=int(peak / advice.ROOM) - 1))
    nearest = advice.Search(config, small).nearest()
    assert nearest.changes == {"mesh.fsdp": 2}
    assert nearest.peak <= advice.ROOM * small.chip.memory


def test_a_sampling_mesh_that_does_not_divide_other_devices_is_left_out():
    config = planned.config(mesh={"fsdp": 8, "sampling_tensor": 2})
    nearest = advice.Search(config, topologies.topology("v5e:1x1")).nearest()
    assert nearest.changes == {"mesh.fsdp": 1, "mesh.sampling_tensor": 0}


@pytest.mark.fault(4)
@pytest.mark.full
def test_a_run_far_too_large_is_answered_at_once_with_what_is_to_blame_and_what_would_fit(offline):
    """Without compiling: 30 seconds of the processor's time, which other processes do not share."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = offline("plan", *MISFIT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 1, process.stderr
    text = " ".join(process.stdout.split())
    assert "nothing was compiled" in text
    assert "does not fit 15.8 GiB" in text
    assert "largest, by formula: " in text
    assert "optimizer 15.0 GiB" in text or "optimizer 14.9 GiB" in text  # 8.03e9 x 8 bytes / 4
    assert "should fit, by formula" in text
    assert "--set mesh." in text or "--set lora." in text
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 30


@pytest.mark.full
def test_the_remedy_compiles_and_fits():
    read = files.load(MISFIT[0], MISFIT[4:])
    chips = topologies.topology("v5e:2x2")
    remedy, *_ = advice.Search(read, chips).remedies(time.monotonic())
    run = programs.build_run(advice.Search(read, chips).changed(remedy.changes), chips.devices)
    remedied = plan.plan(run, chips, ("decode", "update"))
    assert remedied.problem == "", remedy
    assert remedied.fits, (remedy, remedied.peak)
    assert remedy.peak == pytest.approx(remedied.peak, rel=0.25)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {}, r"plan.topology: missing; give --topology, as v5e:4x4"),
        ({}, {"topology": "v5x:2x2"}, r"--topology v5x:2x2 .*expected a chip and sizes.*v5e"),
        ({"model": {"path": "a/model"}}, {"topology": "v5e:2x2"}, r"no folder here.*model.config"),
        ({"plan": {"topology": "v5e:1x1"}}, {}, r"= 4 devices, but there are 1:"),
        ({}, {"formula": True, "search": True}, r"--formula compiles nothing: leave out"),
        (  # whatever the mesh
            {"rewards": [{"use": "arithmetics"}]},
            {"topology": "v5e:1x1"},
            r"did you mean 'arithmetic'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(small, changes, options, message):
    with pytest.raises(InputError, match=message):
        command.main(small(**changes), **options)


@pytest.mark.slow
def test_a_refusal_ends_with_2_and_no_traceback(offline, small):
    process = offline("plan", small(), "--topology", "v5x:2x2")
    assert process.returncode == 2
    assert "Traceback" not in process.stderr + process.stdout
    assert "expected a chip and sizes" in " ".join((process.stderr + process.stdout).split())


def check_remedies(
    config: str, *overrides: str, memory: int | None = None
) -> list[advice.Candidate]:
    """The remedies, each read again as overrides. Args: memory: of a chip in place of v5e's."""
    chips = topologies.topology("v5e:2x2")
    chips = chips._replace(chip=chips.chip._replace(memory=memory or chips.chip.memory))
    remedies = advice.Search(files.load(config, overrides), chips).remedies(time.monotonic())
    for remedy in remedies:
        assert remedy.peak <= advice.ROOM * chips.chip.memory
        again = files.load(config, [*overrides, *remedy.overrides.split()])
        assert advice.by_formula(programs.build_run(again, chips.devices), chips) == (
            remedy.peak,
            remedy.seconds,
        )
    return remedies


@pytest.mark.slow
def test_a_remedy_is_the_config_with_its_changes(small):
    chips, alone = topologies.topology("v5e:2x2"), {"data": 4}
    config = small(mesh=alone)
    peak, _ = advice.by_formula(programs.build_run(files.load(config), chips.devices), chips)
    assert check_remedies(config, memory=int(peak / advice.ROOM) - 1)


@pytest.mark.full
def test_a_remedy_of_a_large_config_is_that_config_with_its_changes(monkeypatch):
    monkeypatch.setattr(advice, "SECONDS", 300.0)  # what is found, however slow the machine is
    assert check_remedies(MISFIT[0], *MISFIT[4:])
