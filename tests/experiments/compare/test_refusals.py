"""What `jaxgrpo compare` refuses or warns of in a folder that holds runs already."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from comparisons import arms_of, write

from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.experiments.compare import command, results
from jaxgrpo.experiments.compare import experiment as experiments

pytestmark = pytest.mark.slow


def test_a_folder_that_holds_runs_of_another_config_is_refused(compared, model, tmp_path):
    experiment, *_ = compared
    shutil.copytree(experiment.dir, tmp_path / "out")
    arms = {"grpo": {"recipe": "grpo"}, "twin": {"recipe": "sign"}}
    file = write(model, tmp_path, arms=arms, seeds=1)
    cases = experiments.cases_of(experiments.load(file))
    assert command.is_finished(cases[0]), "moved, and still the same run"
    with pytest.raises(InputError, match=r"(?s)twin.*another config.*recipe: grpo -> sign"):
        command.is_finished(cases[1])
    before = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    assert len(before) == 5
    for option in ([], ["--dry-run"]):
        assert main(["compare", str(file), *option]) == 2
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}


def test_an_experiment_may_stand_in_its_own_folder(compared, model, tmp_path):
    experiment, *_ = compared
    shutil.copytree(experiment.dir, tmp_path / "out")
    file = write(model, tmp_path, arms=arms_of(experiment), tests=["twin"])
    shutil.copy(tmp_path / "base.toml", tmp_path / "out")
    shutil.copy(file, tmp_path / "out" / "experiment.toml")
    text = (tmp_path / "out" / "experiment.toml").read_bytes()
    assert main(["compare", str(tmp_path / "out" / "experiment.toml")]) == 0
    assert (tmp_path / "out" / "experiment.toml").read_bytes() == text


def test_a_metric_without_a_value_in_some_run_is_refused_with_results_csv_there(
    compared, model, tmp_path, capsys
):
    experiment, cases, _ = compared
    shutil.copytree(experiment.dir, tmp_path / "out")
    file = write(model, tmp_path, arms=arms_of(experiment))
    for name in ("results.csv", "tables.md"):
        (tmp_path / "out" / name).unlink()
    for place in (3, -1):
        run = tmp_path / "out" / cases[place].path.relative_to(experiment.dir)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines[-1]["eval/accuracy"] = None
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["compare", str(file)]) == 2
    said = capsys.readouterr().err
    for case in (cases[3], cases[-1]):
        assert f"arm {case.arm}, learning rate {case.rate:g}, seed {case.seed}" in said
    assert said.count("learning rate") == 2
    assert "name another metric" in said
    assert "eval/pass@1" in (tmp_path / "out" / "results.csv").read_text()
    file = write(model, tmp_path, arms=arms_of(experiment), metric="eval/pass@1")
    assert main(["compare", str(file)]) == 0
    assert (tmp_path / "out" / "tables.md").exists()


def test_before_runs_are_taken_changed_own_code_of_finished_ones_is_told(
    compared, model, tmp_path, capsys
):
    experiment, cases, _ = compared
    shutil.copytree(experiment.dir, tmp_path / "out")
    file = write(model, tmp_path, arms=arms_of(experiment))
    changed, missing = (
        tmp_path / "out" / case.path.relative_to(experiment.dir) for case in (cases[1], cases[-1])
    )
    for copied in (changed / "code").iterdir():
        copied.write_text(copied.read_text() + "# before")
    assert main(["compare", str(file), "--dry-run"]) == 0
    assert "own code has changed" not in capsys.readouterr().out, "no run is to be taken"
    shutil.rmtree(missing)
    assert main(["compare", str(file), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"own code has changed since 1 of {len(cases) - 1} finished runs" in " ".join(
        said.split()
    )
    assert not missing.exists()


def test_runs_of_other_weights_or_other_code_are_told(compared, tmp_path):
    experiment, cases, outcomes = compared
    assert results.mixtures(outcomes) == [], "whatever the arms' rewards are"
    changed = {key: dict(by_seed) for key, by_seed in outcomes.items()}
    run = changed["twin", 0.5][2]
    numbers = {**run.numbers, "base/pass@1": run.numbers["base/pass@1"] + 0.01}
    changed["twin", 0.5][2] = run._replace(numbers=numbers)
    (said,) = results.mixtures(changed)
    assert said == "Seed 2: runs begin at different bases (base/pass@1 differ)."
    shutil.copytree(experiment.dir, tmp_path / "out")
    own = tmp_path / "mine.py"
    own.write_text("now")
    named = dataclasses.replace(cases[0].config.rewards[0], use=f"{own}:reward")
    moved = {}
    for case in cases[:3]:
        folder = tmp_path / "out" / case.path.relative_to(experiment.dir)
        shutil.rmtree(folder / "code")
        (folder / "code").mkdir()
        (folder / "code" / "mine.py").write_text("now" if case != cases[1] else "then")
        config = dataclasses.replace(
            case.config,
            rewards=(named,),
            run=dataclasses.replace(case.config.run, dir=str(folder)),
        )
        case = case._replace(config=config)
        assert results.has_other_code(case) == (case.arm == cases[1].arm)
        moved[case.arm, case.rate] = {0: outcomes[case.arm, case.rate][0]._replace(case=case)}
    (said,) = results.mixtures(moved)
    assert said == f"Runs with 2 states of {own}."
