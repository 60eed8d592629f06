"""`jaxgrpo fit`: known sigmoids come back, and compute is counted from tokens."""

from __future__ import annotations

import dataclasses
import io
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import planned
import pytest
import small_run
from rich.console import Console

from jaxgrpo.cli.main import main
from jaxgrpo.core import scores
from jaxgrpo.core.errors import InputError
from jaxgrpo.experiments import fit
from jaxgrpo.experiments.fit import Curve, fit_curve, foretell, sigmoid
from jaxgrpo.models import decoder
from jaxgrpo.models.api import LoraConfig
from jaxgrpo.models.counts import count_weights
from jaxgrpo.models.hf import folders
from jaxgrpo.planning import topologies
from jaxgrpo.training.loop import train
from jaxgrpo.update import work

TRUE = {"ceiling": 0.61, "middle": 2542.0, "steepness": 1.92}  # ScaleRL's 8B run at 14k tokens


def curve(points=40, noise=0.003, last=20_000.0, seed=0, start=0.3) -> Curve:
    compute = np.linspace(last / points, last, points)
    value = sigmoid(compute, start, *TRUE.values())
    return Curve(
        "made", start, compute, value + np.random.default_rng(seed).normal(0, noise, points)
    )


def test_numbers_come_back_from_a_noisy_curve():
    fits = [fit_curve(curve(seed=seed)) for seed in range(5)]
    assert all(sigmoid_fit.undetermined == () for sigmoid_fit in fits)
    for name, share in {"ceiling": 0.02, "middle": 0.05, "steepness": 0.05}.items():
        values = [getattr(sigmoid_fit, name) for sigmoid_fit in fits]
        assert np.mean(values) == pytest.approx(TRUE[name], rel=share)


def test_halfway_lies_at_the_middle_and_the_curve_only_grows():
    exact = fit_curve(curve(noise=0.0))
    assert exact.at(np.array(exact.middle)) == pytest.approx((exact.start + exact.ceiling) / 2)
    assert (np.diff(exact.at(np.geomspace(1, 1e6, 50))) > 0).all()
    assert exact[1:4] == pytest.approx(list(TRUE.values()), rel=1e-3)


@pytest.mark.parametrize("height", [0.0, 0.5, 1.0])
def test_a_constant_curve_says_nothing(height):
    flat = Curve("flat", height, np.linspace(1.0, 10.0, 6), np.full(6, height))
    assert fit_curve(flat).undetermined


@pytest.mark.slow
def test_intervals_hold_the_truth():
    noisy = curve(points=25)
    intervals = fit.bootstrap(noisy, fit_curve(noisy))
    for name, (low, high) in intervals.items():
        assert low < TRUE[name] < high
        assert high - low < 0.5 * TRUE[name]


@pytest.mark.slow
@pytest.mark.parametrize("falls", [False, True])
def test_intervals_of_the_ceiling_stay_within_the_range_in_which_the_curve_is_fitted(falls):
    """Resampled residuals lift points above what the metric cannot exceed, and below all others."""
    compute = np.linspace(1.0, 12.0, 12)
    value = np.array([0.7, 0.93, 0.97, 0.95, 1, 1, 0.98, 1, 1, 1, 0.99, 1])
    start, value = (0.5, 0.5 - 0.03 * compute) if falls else (0.3, value)
    points = Curve("points", start, compute, value)
    low, high = fit.bootstrap(points, fit_curve(points))["ceiling"]
    assert min(start, value.min()) <= low <= high <= 1


def test_half_of_the_compute_foretells_the_rest_where_the_bend_is_in_it():
    outlook = foretell(curve(points=60, last=16_000.0))
    assert outlook.points == 30
    assert outlook.error < 0.02
    assert outlook.ends == pytest.approx(outlook.actual, abs=0.03)


def test_what_a_curve_does_not_say_is_named():
    """A straight line has no ceiling: the highest value that there can be is taken."""
    compute = np.linspace(1, 10, 12)
    line = Curve("line", 0.0, compute, 0.03 * compute)
    assert "ceiling" in fit_curve(line).undetermined
    flat = Curve("flat", 0.5, compute, np.full(12, 0.5))
    assert fit_curve(flat).undetermined == fit.NAMES


def test_too_few_points_and_unknown_metrics_are_refused(tmp_path):
    def write(lines):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "metrics.jsonl").write_text(text)

    write([{"step": step, "reward": 0.1} for step in range(1, 9)])
    with pytest.raises(InputError, match=r"metrics\.jsonl has no flops"):
        fit.read_curve(str(tmp_path), "reward")
    write([{"step": step, "reward": 0.1, "flops": 2.0} for step in range(1, 9)])
    with pytest.raises(InputError, match="no metric 'rewrd': did you mean 'reward'"):
        fit.read_curve(str(tmp_path), "rewrd")
    with pytest.raises(InputError, match="2 values of reward after the first and --skip 6"):
        fit.read_curve(str(tmp_path), "reward", skip=6)
    read = fit.read_curve(str(tmp_path), "reward")
    assert read.compute.tolist() == [2, 4, 6, 8, 10, 12, 14]  # the first value is the start
    with pytest.raises(InputError, match="4 points in the first half"):
        foretell(read._replace(compute=np.array([1.0, 2, 3, 4, 21, 30, 40])))


@pytest.mark.full
def test_a_curve_above_what_the_metric_cannot_exceed_is_refused(tmp_path, capsys):
    lines = [{"step": step, "reward": 3 - 3 / step, "flops": 2.0} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ["fit", str(tmp_path), "--metric", "reward"]
    assert main(words) == 2
    assert "reward reaches 2.625, and --highest is 1: give what it" in capsys.readouterr().err
    assert main([*words, "--highest", "3", "--json"]) == 0
    (numbers,) = json.loads(capsys.readouterr().out)["runs"].values()
    assert numbers["ceiling"] == pytest.approx(3, rel=1e-2)  # 3 C / (C + 2), C of the steps before
    share = curve(5, noise=0.0)
    fit.refuse_above(share._replace(value=share.value * 0 + np.float32(1.0000001)), "reward", 1.0)


def test_a_metric_of_training_lies_at_the_compute_of_the_policy_that_drew_its_samples(tmp_path):
    """In step 1 that is the base, and an evaluation of step 1 is behind its update."""
    lines: list[dict[str, float]] = [{"step": 0, "eval/accuracy": 0.1}]
    for step in range(1, 9):
        lines.append({"step": step, "reward": step / 10, "eval/accuracy": 0.1, "flops": 2.0**step})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    drawn, evaluated = (fit.read_curve(str(tmp_path), name) for name in ("reward", "eval/accuracy"))
    assert drawn.start == 0.1
    assert drawn.value.tolist() == [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    assert drawn.compute.tolist() == [2, 6, 14, 30, 62, 126, 254]
    assert evaluated.compute.tolist() == [2, 6, 14, 30, 62, 126, 254, 510]


@pytest.mark.parametrize("points", [5, 8, 20])
def test_enlarged_residuals_give_intervals_that_cover_as_often_as_is_said(points):
    """A sigmoid that is linear in its numbers, so that a fit is one product."""
    compute = curve(points).compute
    slopes = []
    for place, number in enumerate(TRUE.values()):
        ends = [[*TRUE.values()], [*TRUE.values()]]
        ends[0][place], ends[1][place] = 0.999 * number, 1.001 * number
        low, high = (sigmoid(compute, 0.3, *numbers) for numbers in ends)
        slopes.append(high - low)
    solve, random = np.linalg.pinv(np.transpose(slopes)), np.random.default_rng(0)
    missed = np.zeros(2)
    for _ in range(500):
        noise = random.normal(size=points)
        estimate = solve @ noise  # the truth is 0
        residuals = noise - np.transpose(slopes) @ estimate
        draws = random.integers(0, points, (200, points))
        for place, drawn in enumerate((fit.enlarged(residuals), residuals)):
            low, high = np.quantile(estimate + drawn[draws] @ solve.T, [0.025, 0.975], axis=0)
            missed[place] += ((low > 0) | (high < 0)).mean() / 500
    assert missed[0] == pytest.approx(0.06, abs=0.025)
    assert missed[1] > 0.085, "by the residuals as they are"


def test_the_fit_of_a_run_fits_a_terminal_of_80_columns():
    numbers = fit_curve(curve())._asdict() | {"points": 40, "flops": 2e4}
    numbers["intervals"] = dict.fromkeys(fit.NAMES, (0.123, 12300.0))
    console = Console(file=(screen := io.StringIO()), width=80)
    fit.show_table(console, fit._rows({"runs/first": numbers}), title="reward over compute")
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("(0.123 to 1.23e+04)" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("changes", "passes", "heads"),
    [
        ({}, 3, 0),
        ({"train.num_iterations": 2}, 6, 0),
        ({"lora": {"rank": 4, "alpha": 4.0}}, 2, 0),
        ({"loss": {"surrogate": {"use": "gvpo"}}}, 4, 0),
        ({"loss": {"kl": {"use": "k2", "beta": 0.1}}}, 4, 0),
        ({"loss": {"kl": {"use": "full_kl", "beta": 0.1}}}, 4, 3),
        ({"loss": {"kl": {"use": "full_kl", "beta": 0.1}}, "train.num_iterations": 2}, 8, 6),
    ],
)
def test_passes_of_all_weights_and_of_the_head_alone_are_counted(changes, passes, heads):
    blueprint = planned.run(devices=topologies.stand_ins("v5e:2x2", 1), **changes).blueprint
    weights = count_weights(blueprint.model)
    entries = scores.passes(blueprint.scores, blueprint.scored)
    scoring = [(blueprint.policy_model(entry.policy), entry.share) for entry, _ in entries]
    sizes = blueprint.model, blueprint.objective, blueprint.num_iterations
    counted = work.count_trained(*sizes, scoring)
    assert counted == passes * weights.work + heads * weights.head


def count_step(blueprint):
    needs = blueprint.chain.needs
    split = work.split_scoring(blueprint.scores, needs, blueprint.scored, blueprint.policy_model)
    sizes = blueprint.model, blueprint.objective, blueprint.num_iterations
    return work.count_step(*sizes, *split, is_drawn=True)


def test_scores_that_advantages_read_are_counted_on_all_samples():
    devices = topologies.stand_ins("v5e:2x2", 1)
    blueprint = planned.run(devices=devices, recipe="top_entropy").blueprint
    weights = count_weights(blueprint.model).work
    assert count_step(blueprint) == work.Work(weights, weights, 3 * weights)
    penalty: Any = {"loss": {"kl": {"use": "k2", "beta": 0.1}}}  # which the loss alone reads
    blueprint = planned.run(devices=devices, **penalty).blueprint
    assert count_step(blueprint) == work.Work(weights, 0, 4 * weights)


def test_what_is_read_between_drawn_tokens_is_counted_as_they_are():
    """Two drawn tokens, a reply of two between them, and what nothing reads behind the last."""
    rollouts: Any = SimpleNamespace(
        prompt_mask=np.ones((1, 3), bool),
        token_mask=np.array([[[True, False, False, True, False, False]] * 2]),
        row=np.zeros(1),
    )
    values = {"num_tokens": 4.0, "live_tokens": 0.5, "live_groups": 1.0}
    counted = work.step_flops(work.Work(100, 10, 1), rollouts, values)
    assert counted == 2 * (100 * (3 + 8) + 10 * (3 + 8) + 1 * (3 + 4))


@pytest.mark.full
@pytest.mark.slow
def test_a_run_counts_its_operations_and_the_command_fits_them(tmp_path, capsys):
    changes = {"train.steps": 7, "rollout.refill": {"factor": 2.0}, "lora.rank": 4}
    run = train(small_run.config(tmp_path / "r", **changes))
    config = folders.read_config(small_run.base())
    config = dataclasses.replace(config, lora=LoraConfig(rank=4, alpha=32.0))
    weights = count_weights(decoder.build(config)).work
    lines = small_run.metrics(run.path)
    for line in lines:
        prompts = 6 * line["refill/groups"]  # "12+34=" has 6 tokens at the most
        sampled = 2 * weights * line["num_tokens"]
        most = sampled + 2 * weights * (prompts + 2 * (line["num_tokens"] + prompts))
        assert sampled < line["flops"] <= most
    capsys.readouterr()
    assert main(["fit", str(run.path), "--metric", "reward", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)["runs"][str(run.path)]
    # The reward of the last step is of the policy before its update.
    assert numbers["flops"] == pytest.approx(sum(line["flops"] for line in lines[:-1]))
    assert numbers["points"] == 6
    assert main(["fit", str(run.path), "--metric", "reward"]) == 0
    assert "reward over compute" in capsys.readouterr().out
