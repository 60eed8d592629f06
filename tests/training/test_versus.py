"""The comparison with PyTorch: the same files, the same computation, ratios of neighbours."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from rich.console import Console

from benchmarks.versus import __main__, contest, files, proof
from benchmarks.versus.contest import Step, ratios
from benchmarks.versus.work import Work, parity, spread
from benchmarks.workloads import WORKLOADS, Workload, make_prompts, model_config
from jaxgrpo.config import files as configs
from jaxgrpo.models.hf import folders

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
