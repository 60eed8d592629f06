"""`jaxgrpo plasticity`: a task learned from a trained model and from its base."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import tomllib

import comparisons
import numpy as np
import pytest
import tables
import tomli_w
from rich.console import Console

from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.evaluation.intervals import ratio_interval
from jaxgrpo.experiments import plasticity
from jaxgrpo.training import loop


def wrong(completions, **columns):
    """The second task: what the first one calls wrong."""
    return [float(text == tables.WRONG) for text in completions]


def test_an_area_is_the_mean_height_of_the_curve():
    lines = [{"step": 0, "x": 0.5}, {"step": 1}, {"step": 2, "x": 1.5}, {"step": 4, "x": None}]
    assert plasticity.area([*lines, {"step": 6, "x": 0.5}], "x") == pytest.approx(1.0)
    with pytest.raises(InputError, match=r"r/1: 0 values of 'rewrd'.*did you mean 'reward'"):
        plasticity.area([{"step": 1, "reward": 0.5}], "rewrd", "r/1")
    with pytest.raises(InputError, match="1 values of 'reward'"):
        plasticity.area([{"step": 1, "reward": 0.5}], "reward", "r/1")


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((0.5, 0.9), "0.700 (95% 0.500 to 0.900 over seeds): the trained model learns less than"),
        ((1.1, 1.9), "0.700 (95% 1.100 to 1.900 over seeds): the trained model learns more than"),
        ((0.5, 1.2), "0.700 (95% 0.500 to 1.200 over seeds): no difference shown"),
        ((-np.inf, np.inf), "0.700: no difference shown"),
        ((np.nan, np.nan), "0.700: no difference shown"),
    ],
)
def test_a_difference_is_shown_where_the_interval_does_not_hold_1(ends, words):
    arm = {"model": "m", "areas": [0.5, 0.7]}
    numbers = {"metric": "reward", "seeds": [0, 1], "trained": arm, "base": arm, "ratio": 0.7}
    console = Console(file=(screen := io.StringIO()), width=80)
    plasticity.show(console, {**numbers, "low": ends[0], "high": ends[1]})
    assert f"plasticity {words}" in screen.getvalue()


def test_the_areas_of_seven_seeds_fit_a_terminal_of_80_columns():
    arm = {"model": "runs/first/model", "areas": [0.5] * 7}
    numbers = {"metric": "reward", "seeds": list(range(7)), "trained": arm, "base": arm}
    console = Console(file=(screen := io.StringIO()), width=80)
    plasticity.show(console, {**numbers, "ratio": 1.0, "low": 0.875, "high": 1.125})
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("0.500" in line for line in lines) == 1 + 7, "the mean and the seeds are rows"


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """(folder of a run on the first task, config of the second)."""
    folder = tmp_path_factory.mktemp("plasticity")
    tables.write_model(folder / "model", comparisons.RATES)
    tables.write_data(folder / "data.jsonl", len(comparisons.RATES))
    comparisons.write(folder, folder, steps=8, arms={"a": {}, "b": {}})
    config = tomllib.loads((folder / "base.toml").read_text())
    config["optimizer"]["learning_rate"] = 3.0
    with comparisons.one_device():
        run = loop.train(config, run={"dir": str(folder / "first"), "report": False})
    config["rewards"] = [{"use": f"{__file__}:wrong"}]
    config["eval"]["every"] = 2
    (folder / "second.toml").write_text(tomli_w.dumps(config))
    return run.path, folder / "second.toml"


def areas_by_hand(folder, arm, metric, seeds=2):
    """By rectangles and triangles, from the files alone."""
    areas = []
    for seed in range(seeds):
        (file,) = folder.glob(f"runs/{arm}/lr_*/seed_{seed}/metrics.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        points = [(line["step"], line[metric]) for line in lines if metric in line]
        total = 0.0
        for (start, low), (end, high) in itertools.pairwise(points):
            total += (end - start) * min(low, high) + (end - start) * abs(high - low) / 2
        areas.append(total / (points[-1][0] - points[0][0]))
    return np.array(areas)


@pytest.mark.full
@pytest.mark.slow
def test_a_model_trained_on_the_opposite_learns_less_than_its_base(setting, tmp_path, capsys):
    run, task = setting
    words = ["plasticity", str(run), str(task), "--seeds", "2", "--dir", str(tmp_path / "out")]
    with comparisons.one_device():
        assert main([*words, "--json", "--set", "train.steps=6"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    for arm in ("trained", "base"):
        by_hand = areas_by_hand(tmp_path / "out", arm, "reward")
        assert numbers[arm]["areas"] == pytest.approx(by_hand.tolist())
    ratio = np.mean(numbers["trained"]["areas"]) / np.mean(numbers["base"]["areas"])
    assert numbers["ratio"] == pytest.approx(ratio)
    assert numbers["ratio"] < 0.9
    ends = ratio_interval(*(np.array(numbers[arm]["areas"]) for arm in ("trained", "base")))
    expected_ends = [end if np.isfinite(end) else None for end in ends]
    assert [numbers["low"], numbers["high"]] == expected_ends
    assert numbers["trained"]["model"] == str(run / "model")
    assert numbers["base"]["model"] == str(task.parent / "model")
    # Finished runs are not taken again, and the arms differ in their model alone.
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("summary.json")}
    assert len(times) == 4
    configs = []
    for arm in ("trained", "base"):
        (file,) = (tmp_path / "out").glob(f"runs/{arm}/lr_*/seed_1/config.toml")
        config = tomllib.loads(file.read_text())
        config["run"].pop("dir")
        configs.append(config)
    assert configs[0].pop("model") != configs[1].pop("model")
    assert configs[0] == configs[1]
    with comparisons.one_device():
        assert main([*words, "--metric", "eval/pass@1", "--set", "train.steps=6"]) == 0
    output = capsys.readouterr().out
    assert "eval/pass@1 over steps" in output
    by_hand = [areas_by_hand(tmp_path / "out", arm, "eval/pass@1") for arm in ("trained", "base")]
    assert f"plasticity {by_hand[0].mean() / by_hand[1].mean():.3f}" in output
    assert all(file.stat().st_mtime_ns == time for file, time in times.items())


@pytest.mark.slow
def test_what_cannot_be_compared_is_refused_before_a_run(setting, tmp_path, capsys):
    run, task = setting
    model = run / "model"
    tokens = tmp_path / "tokens"
    shutil.copytree(model, tokens)
    character_tokenizer("abc").save_pretrained(tokens)
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    shutil.copy(run / "config.toml", unfinished)
    config = tomllib.loads(task.read_text())
    unevaluated = tmp_path / "unevaluated.toml"
    unevaluated.write_text(tomli_w.dumps({**config, "eval": {}}))
    adapted = tmp_path / "adapted"
    adapted.mkdir()
    lora = {**config, "lora": {"path": str(tmp_path)}}
    (adapted / "config.toml").write_text(tomli_w.dumps(lora))
    for words, message in (
        (["runs/none", str(task)], "plasticity runs/none: no run and no model folder"),
        ([str(unfinished), str(task)], "the run has no model yet"),
        ([str(task.parent / "model"), str(task)], "is the base itself"),
        ([str(tokens), str(task)], "its tokenizer is another than that of its base"),
        (
            [str(model), str(task), "--seeds", "0"],
            "--seeds 0: expected a number of seeds, 1 to 1000",
        ),
        ([str(model), str(tmp_path / "no.toml")], "there is no such file"),
        ([str(model), str(unevaluated)], "eval.data: missing"),
        ([str(adapted), str(task)], "began from the adapters"),
    ):
        assert main(["plasticity", *words, "--dir", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
