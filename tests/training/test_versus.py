"""The comparison with PyTorch: the same files, the same computation, ratios of neighbours."""

import dataclasses
import io
import json
import os
import platform
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks.common import most_memory, processor
from benchmarks.versus import __main__, contest, files, proof
from benchmarks.versus.contest import Step, ratios
from benchmarks.versus.work import PHASES, Work, parity, spread
from benchmarks.workloads import WORKLOADS, Workload, make_prompts, model_config
from jaxgrpo.config import files as configs
from jaxgrpo.models.hf import folders
from jaxgrpo.planning.topologies import StandIn

TINY = Workload(prompts=4, samples=4, shortest=4, longest=8, completion=8, ragged=True, flat=0.5)


@pytest.mark.full
@pytest.mark.slow
def test_the_files_hold_the_prompts_and_sizes_of_the_workload(tmp_path):
    written = files.write("S/C", tmp_path)
    assert Work.read(tmp_path) == written
    tokenizer = folders.read_tokenizer(written.model)
    prompts = make_prompts(WORKLOADS["C"], model_config("S").vocab_size)
    rollout = configs.from_dict(files.run_config(written)).rollout
    sizes = rollout.prompts_per_step, rollout.group_size, rollout.max_completion_tokens
    assert sizes == (len(written.rows()), WORKLOADS["C"].samples, WORKLOADS["C"].completion)
    for row, tokens, mask in zip(
        written.rows(), prompts.prompt_tokens, prompts.prompt_mask, strict=True
    ):
        assert tokenizer(row["prompt"])["input_ids"] == tokens[mask].tolist()


def test_rewards_tell_completions_apart_and_hard_prompts_earn_nothing():
    ids = [[3, 4], [3, 5], [4, 3], [3, 4, 6]]
    assert len(set(spread(completion_ids=ids))) == 4
    assert parity(completion_ids=ids, hard=[False] * 4) == [0, 0, 0, 1]
    assert parity(completion_ids=ids, hard=[True] * 4) == [0, 0, 0, 0]


def test_a_ratio_is_of_neighbours_and_on_ragged_work_per_token():
    ours = [Step(1.0, 100, {}), Step(2.0, 100, {}), Step(4.0, 100, {})]
    theirs = [Step(3.0, 300, {}), Step(8.0, 300, {}), Step(20.0, 300, {})]
    exact, ragged = (ratios(theirs, ours, exact=is_exact)["ratio"] for is_exact in (True, False))
    np.testing.assert_allclose((exact, ragged), (4.0, 4.0 / 3))


TELLER = """
import sys
from benchmarks.versus.work import Teller, Work
Teller(Work.read(sys.argv[1]), lambda: 3 * 2**30).stepped({"sample": 1, "reward": 0, "score": 0})
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_of_a_step_on_a_gpu_is_what_its_arrays_took_there(
    python, environment, tmp_path, device
):
    sizes: Any = dict.fromkeys(("prompts", "samples", "longest", "completion", "micro"), 1)
    names: Any = {"name": "S/A", "dtype": "float32", "reward": "spread", "folder": str(tmp_path)}
    Work(**sizes, **names, exact=True, pad=0, end=1, device=device).save()
    command = [python, "-c", TELLER, str(tmp_path)]
    line = subprocess.check_output(command, input="", env=environment(), text=True)
    step, place = contest.read_step(line), "device" if device == "cuda" else "process"
    gib = contest.most_memory(step, os.getpid())
    assert (gib == 3.0) == (device == "cuda")
    values = dict.fromkeys((*PHASES, "step", "tokens_per_second", "start"), 1.0)
    console = Console(record=True, width=200, file=io.StringIO())
    results = {"S/A": {"jaxgrpo": {**values, "gib": gib, "memory": place}}}
    __main__.show(results, console)
    __main__.show_own({"S/C": results["S/A"]}, {}, console)
    text = console.export_text()
    assert f"GB, {place}" in text
    assert ("3.22" in text) == (device == "cuda")
    assert ("memory, S/C: " in text) == (device == "cpu")  # a limit of a process


@dataclasses.dataclass(frozen=True)
class Counting(StandIn):
    """A device whose allocator counts, or does not."""

    peak: int | None = None

    def memory_stats(self) -> Any:
        return self.peak and {"peak_bytes_in_use": self.peak}


def test_memory_of_an_update_on_an_accelerator_is_what_its_arrays_took_there():
    gpu = Counting(0, "gpu", "NVIDIA H200", 0, peak=5 * 2**30)
    assert most_memory(gpu) == (5.0, "device")
    gib, place = most_memory(jax.devices()[0])
    assert (0.1 < gib < 1000, place) == (True, "process")
    with pytest.raises(SystemExit, match="NVIDIA H200: its allocator keeps no count"):
        most_memory(dataclasses.replace(gpu, peak=None))


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("model name\t: AMD EPYC 7B13\nflags\t\t: fpu sse2 avx avx2", "AMD EPYC 7B13, AVX2"),
        ("model name\t: Xeon @ 2.5GHz\nflags\t\t: avx2 avx avx512f", "Xeon @ 2.5GHz, AVX-512"),
        ("processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd40", "aarch64, NEON"),
        ("model name\t: old\nflags\t\t: fpu sse2", "old"),
        (None, "aarch64"),
    ],
)
def test_a_processor_is_named_with_its_widest_instructions(lines, name, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    file = tmp_path / "cpuinfo"
    if lines:
        file.write_text(f"{lines}\n\n")
    assert processor(file) == name


@pytest.mark.slow
def test_a_trainer_that_computes_on_a_cpu_is_not_compared_on_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["versus", "--device", "cuda"])
    with pytest.raises(SystemExit):
        __main__.options()
    assert "give --against torch" in capsys.readouterr().err


@pytest.mark.full
def test_plain_pytorch_has_our_loss_gradient_and_optimizer_step(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(proof, "WORKLOAD", TINY._replace(completion=24, flat=0.0))
    results = proof.show(tmp_path / "proof", ["torch"], Console(quiet=True))
    assert results.pop("value") != 0
    monkeypatch.setattr(proof, "LIMITS", {"loss": 0.0, "gradient": 0.0, "adamw": 0.0})
    with pytest.raises(SystemExit, match="different things"):
        proof.refuse_different(results, Console(quiet=True))


@pytest.mark.full
def test_contenders_take_steps_in_turn_and_their_sizes_are_checked(tmp_path):
    pytest.importorskip("torch")
    work = files.write("S/D", tmp_path, TINY)
    hard = [json.loads(line)["hard"] for line in (tmp_path / "prompts.jsonl").open()]
    assert hard == [True, True, False, False]
    sides = contest.contest(
        work, ["jaxgrpo", "torch"], pairs=3, limit=0.0, cache=tmp_path / "cache"
    )
    for side in sides.values():
        assert side["steps"] == 3
        assert 8 <= side["tokens"] <= 4 * 4 * 8
        phases = side["sample"] + side["reward"] + side["score"] + side["update"]
        assert phases == pytest.approx(side["step"], rel=0.5)
    assert sides["torch"]["low"] <= sides["torch"]["ratio"] <= sides["torch"]["high"]
    exact = dataclasses.replace(work, exact=True)
    with pytest.raises(contest.Failed, match="sampled"):
        contest.refuse_other_work(exact, "x", [Step(1.0, 9, {})])
