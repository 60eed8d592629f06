"""`jaxgrpo compare` whole, on models that are known tables: its report, a kill, what it refuses."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import comparisons
import pytest
import quick
import tables
from comparisons import arm_tables, write

from jaxgrpo.cli.main import main
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.experiments.compare import command, report, results
from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.training import loop
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.reading import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def one_device():
    with comparisons.one_device():
        yield


def read_summary(case: experiments.Case) -> dict[str, Any]:
    return json.loads((case.path / "summary.json").read_text())


@pytest.mark.full
def test_identical_arms_with_identical_seeds_differ_by_exactly_0(compared):
    experiment, _, outcomes = compared
    for metric in ("eval/accuracy", "eval/pass@1", "reward", "tokens", "entropy"):
        first, second = (
            results.arm_values(experiment, outcomes, arm, metric) for arm in ("grpo", "twin")
        )
        assert (first == second).all()
    (row,) = [row for row in results.at_best(experiment, outcomes) if row.arm == "twin"]
    assert row.difference == (0, 0, 0)


def test_an_arm_that_does_not_learn_is_reported_worse_and_its_reverse_better(compared):
    experiment, cases, outcomes = compared
    (row,) = [row for row in results.at_best(experiment, outcomes) if row.arm == "frozen"]
    assert row.metric.value == 0, "no prompt's likeliest answer is right in the base"
    assert row.corrected == 2 / 2**6
    assert results.standing(experiment, row) == "worse"
    text = (Path(experiment.dir) / "tables.md").read_text()
    assert "frozen against grpo: worse. eval/accuracy differs by -" in text
    for case in cases:
        if case.arm == "frozen":
            base, trained = (outcomes["frozen", 0.0][case.seed].numbers[name]
                             for name in ("base/accuracy", "eval/accuracy"))  # fmt: skip
            assert base == trained == 0


def test_noise_flips_training_and_never_evaluation(compared):
    _, cases, outcomes = compared
    shares = []
    for case in cases:
        base = outcomes["grpo", 0.5][case.seed].numbers["base/pass@1"]
        assert outcomes[case.arm, case.rate][case.seed].numbers["base/pass@1"] == base
        lines = read_metrics(case.path)
        if case.arm == "noise":
            shares += [line["rewards/right/flipped"] for line in lines if "reward" in line]
    # 6 seeds x 6 steps x 64 samples, a fair coin each.
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=4 * 0.5 / (36 * 64) ** 0.5)
    rewards = [outcomes["noise", 0.5][seed].numbers["reward"] for seed in range(6)]
    assert sum(rewards) / 6 == pytest.approx(0.5, abs=0.05)


@pytest.mark.full
def test_a_run_is_the_same_config_run_by_train(compared, tmp_path):
    _, cases, _ = compared
    for case in (cases[0], cases[3], cases[-1]):
        config = configs.load(case.path / "config.toml")
        alone = loop.train(config, run={"dir": str(tmp_path / case.arm / str(case.seed))})
        again = configs.load(alone.path / "config.toml")
        assert again.run.dir != config.run.dir
        assert alone.summary["parameter_hash"] == read_summary(case)["parameter_hash"]
        clockless = [
            [{name: v for name, v in line.items() if not name.startswith("time/")} for line in of]
            for of in (read_metrics(alone.path), read_metrics(case.path))
        ]
        assert clockless[0] == clockless[1]


def test_everything_is_left_in_the_folder(compared):
    experiment, cases, outcomes = compared
    folder = Path(experiment.dir)
    with open(folder / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["arm", "lr", "seed", "metric", "value"]
    written = {(r["arm"], float(r["lr"]), int(r["seed"]), r["metric"]): r["value"] for r in rows}
    assert len(written) == len(rows)
    for (arm, rate), by_seed in outcomes.items():
        for seed, outcome in by_seed.items():
            for metric, value in outcome.numbers.items():
                assert float(written[arm, rate, seed, metric]) == value
    page = (folder / "report.html").read_text()
    assert page.count("data:image/svg+xml") == 7
    assert "no difference shown" not in page, "only one arm was to be tested"
    assert "| rewards.0.flip | 0.0 | 0.0 | 0.0 | 0.5 |" in (folder / "differences.md").read_text()
    assert (folder / "experiment.toml").read_bytes() == experiment.source.read_bytes()
    for case in cases:
        assert (case.path / "model" / "model.safetensors").exists()
        assert not (case.path / "checkpoints").exists()


def test_warnings_of_the_runs_are_told(compared):
    experiment, cases, _ = compared
    warned = {case.arm for case in cases if any(read_summary(case)["warnings"].values())}
    text = (Path(experiment.dir) / "tables.md").read_text()
    section = text.partition("## Warnings")[2].partition("\n## ")[0]
    assert warned, "else the example shows nothing"
    for arm in experiment.arms:
        assert (f"| {arm} |" in section) == (arm in warned)


@pytest.mark.full
def test_an_unknown_metric_is_refused_after_the_first_run(model, tmp_path, capsys):
    file = write(
        model, tmp_path, steps=1, arms={"a": {}, "b": {}}, control="a", metric="eval/pass@k"
    )
    assert main(["compare", str(file)]) == 2
    errors = capsys.readouterr().err
    assert "metric = 'eval/pass@k': no such number; did you mean 'eval/pass@" in errors
    assert len(list((tmp_path / "out/runs").glob("*/*/*"))) == 1


def test_a_second_start_touches_no_finished_run_and_writes_the_same(compared, capsys):
    experiment, cases, _ = compared
    folder = Path(experiment.dir)
    before = {file: file.stat().st_mtime_ns for file in (folder / "runs").rglob("*")}
    texts = [(folder / name).read_bytes() for name in ("tables.md", "results.csv")]
    assert main(["compare", str(experiment.source)]) == 0
    assert f"{len(cases)} of {len(cases)} runs are finished already" in capsys.readouterr().out
    assert before == {file: file.stat().st_mtime_ns for file in (folder / "runs").rglob("*")}
    assert texts == [(folder / name).read_bytes() for name in ("tables.md", "results.csv")]


@pytest.mark.full
def test_the_result_is_one_document_with_the_numbers_of_the_tables(compared, capsys):
    experiment, cases, outcomes = compared
    assert main(["compare", str(experiment.source), "--json"]) == 0
    streams = capsys.readouterr()
    assert f"{len(cases)} of {len(cases)} runs are finished already" in streams.err
    document = json.loads(streams.out)
    assert document["runs"] == document["finished"] == len(cases)
    assert document["differences"]["rewards.0.flip"] == dict.fromkeys(experiment.arms, 0.0) | {
        "noise": 0.5
    }
    tables = (Path(experiment.dir) / "tables.md").read_text()
    rows = {row["arm"]: row for row in document["best"]}
    for row in results.at_best(experiment, outcomes):
        shown = rows[row.arm]
        assert shown["estimate"] == row.metric._asdict()
        assert (shown["p"], shown["corrected_p"]) == (row.p, row.corrected)
        assert (shown["standing"] is None) == (row.arm != "frozen"), "the one that is tested"
        assert f"| {row.arm} | {row.rate:g} | {shown['estimate']['value']:.3f} |" in tables
    assert rows["grpo"]["minus_control"] is None
    assert {row["learning_rate"] for row in document["by_learning_rate"]} == {0.0, 0.5}
    for arm, entry in document["pass_at"].items():
        assert f"| {arm} | {entry['base'][0]:.3f} → {entry['trained'][0]:.3f} |" in tables
    for arm, shares in document["groups"].items():
        fail = shares["groups/all_fail"]
        assert f"| {arm} | {fail['first']:.3f}, {fail['last']:.3f} |" in tables
    for entry in document["warnings"]:
        among = f"{entry['in_runs']} of {entry['runs']}"
        assert (
            f"| {entry['arm']} | {entry['learning_rate']:g} | {entry['warning']} | {among} |"
            in tables
        )
    assert document["cost"].keys() == set(experiment.arms)
    assert document["mixtures"] == []
    assert document["distance"] == {}  # its runs measure none


@quick.long
def test_ten_arms_that_differ_by_chance_alone_yield_no_significant_difference(model, tmp_path):
    """The same noise share, drawn differently in each arm: by name of the reward."""
    arms = {
        f"same{i}": {"rewards": [{"use": tables.REWARD, "flip": 0.25, "name": f"r{i}"}]}
        for i in range(10)
    }
    file = write(
        model, tmp_path, steps=2, arms=arms, control="same0", seeds=9, metric="eval/pass@1"
    )
    assert main(["compare", str(file)]) == 0
    experiment = experiments.load(file)
    _, corrected, _ = results.detectable(experiment)
    assert corrected < experiment.level, "a difference could be shown"
    outcomes = results.read_all(experiments.make_cases(experiment))
    rows = [row for row in results.at_best(experiment, outcomes) if row.difference]
    assert len(rows) == 9
    assert all(row.difference and row.difference.value != 0 for row in rows)
    words = {results.standing(experiment, row) for row in rows}
    assert words == {"no difference shown"}
    answer = report.sections(experiment, outcomes)[0].text
    assert all("no difference shown" in line for line in answer)


@pytest.mark.full
def test_a_stop_signal_saves_and_says_how_to_go_on(model, tmp_path, monkeypatch, capsys):
    file = write(model, tmp_path, arms={"a": {}, "b": {}}, control="a", seeds=1)
    with monkeypatch.context() as patch:
        patch.setattr(process, "stop_requested", lambda step: step == 3)
        assert main(["compare", str(file)]) == 143
    errors = capsys.readouterr().err
    assert f"continue with: jaxgrpo compare {file}" in errors
    assert "jaxgrpo train" not in errors
    stopped = tmp_path / "out/runs/a/lr_0.5/seed_0"
    assert len(read_metrics(stopped)) == 1 + 3
    first = (stopped / "metrics.jsonl").read_bytes()
    assert main(["compare", str(file)]) == 0
    assert (stopped / "metrics.jsonl").read_bytes().startswith(first), "nothing is done again"
    assert len(read_metrics(stopped)) == 1 + 6


@pytest.mark.full
def test_seeds_can_be_judged_at_the_best_rates_alone_without_keeping_models(
    model, tmp_path, capsys
):
    """As many rows as if every rate were judged, and the same numbers, from two thirds of runs."""
    options: dict[str, Any] = {"control": "grpo", "learning_rates": [0.1, 0.5], "seeds": 2}
    options |= {"arms": {"grpo": {}, "sign": {"recipe": "sign"}}, "tuning_seeds": [9]}
    every = write(model, tmp_path / "every", steps=2, **options)
    file = write(
        model, tmp_path / "best", steps=2, judge_rates="best", keep_models=False, **options
    )
    assert main(["compare", str(every)]) == 0
    assert main(["compare", str(file)]) == 0
    assert "8 runs" in capsys.readouterr().out
    runs = sorted((tmp_path / "best/out/runs").glob("*/*/*"))
    assert len(runs) == 2 * 2 + 2 * 2
    assert not any((run / "model").exists() for run in runs)
    tables_md = [(tmp_path / name / "out/tables.md").read_text() for name in ("every", "best")]
    best = "## At each arm's best learning rate"
    first, second = (text[text.index(best) :].split("\n## ")[0] for text in tables_md)
    assert first == second
    assert "At learning rate" not in tables_md[1]
    assert "1 tuning seed" in tables_md[1]
    before = {run: (run / "summary.json").stat().st_mtime_ns for run in runs}
    assert main(["compare", str(file), "--json"]) == 0  # nothing is left to do
    document = json.loads(capsys.readouterr().out)
    assert (document["runs"], document["finished"], document["by_learning_rate"]) == (8, 8, [])
    rates = {row["arm"]: row["learning_rate"] for row in document["best"]}
    for arm, means in document["tuning"].items():
        assert means[str(rates[arm])] == max(means.values())
        folders = {run.parent.name for run in runs if run.parent.parent.name == arm}
        assert folders == {"lr_0.1", "lr_0.5"}
    assert before == {run: (run / "summary.json").stat().st_mtime_ns for run in runs}


HANG = 600
"""Seconds after which processes are held to hang: two at a time take 75 on two quiet cores, and
over 200 where other tests run beside them."""


@pytest.mark.full
def test_killed_and_started_again_it_repeats_nothing_and_gives_the_same_table(
    model, tmp_path, python, environment
):
    arms = {"grpo": {"recipe": "grpo"}, "sign": {"recipe": "sign"}}
    files = [
        write(model, tmp_path / name, steps=60, arms=arms, seeds=3) for name in ("whole", "killed")
    ]

    def start(file: Path) -> subprocess.Popen:
        return subprocess.Popen(
            [python, "-m", "jaxgrpo", "compare", str(file)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finished() -> list[Path]:
        return [path.parent for path in (tmp_path / "killed/out/runs").glob("*/*/*/summary.json")]

    def is_under_way() -> bool:
        """Whether a run has made some of its steps and not all, and others are finished."""
        logs = (tmp_path / "killed/out/runs").glob("*/*/*/metrics.jsonl")
        waiting = [log for log in logs if not (log.parent / "summary.json").exists()]
        return len(finished()) >= 2 and any(log.read_bytes().count(b"\n") > 10 for log in waiting)

    uninterrupted, doomed = map(start, files)
    started = time.monotonic()
    while not is_under_way() and doomed.poll() is None and time.monotonic() - started < HANG:
        time.sleep(0.01)
    doomed.send_signal(signal.SIGKILL)
    doomed.communicate()
    data = [file for run in finished() for file in run.rglob("*") if "checkpoints" not in str(file)]
    assert 2 <= len(finished()) < 6
    assert is_under_way()
    before = {file: file.stat().st_mtime_ns for file in data if file.is_file()}
    again = start(files[1])
    output, _ = again.communicate(timeout=HANG)
    assert again.returncode == 0, output
    assert "of 6 runs are finished already" in output
    assert before == {file: file.stat().st_mtime_ns for file in before}
    output, _ = uninterrupted.communicate(timeout=HANG)
    assert uninterrupted.returncode == 0, output
    uninterrupted_out, killed_out = ((tmp_path / name / "out") for name in ("whole", "killed"))
    assert (uninterrupted_out / "tables.md").read_bytes() == (killed_out / "tables.md").read_bytes()
    clockless = [
        [line for line in (folder / "results.csv").read_text().splitlines() if "time/" not in line]
        for folder in (uninterrupted_out, killed_out)
    ]
    assert clockless[0] == clockless[1]


def test_a_folder_that_holds_runs_of_another_config_is_refused(compared, model, tmp_path):
    experiment, *_ = compared
    shutil.copytree(experiment.dir, tmp_path / "out")
    arms = {"grpo": {"recipe": "grpo"}, "twin": {"recipe": "sign"}}
    file = write(model, tmp_path, arms=arms, seeds=1)
    cases = experiments.make_cases(experiments.load(file))
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
    file = write(model, tmp_path, arms=arm_tables(experiment), tests=["twin"])
    shutil.copy(tmp_path / "base.toml", tmp_path / "out")
    shutil.copy(file, tmp_path / "out" / "experiment.toml")
    text = (tmp_path / "out" / "experiment.toml").read_bytes()
    assert main(["compare", str(tmp_path / "out" / "experiment.toml")]) == 0
    assert (tmp_path / "out" / "experiment.toml").read_bytes() == text


@pytest.mark.full
def test_a_metric_without_a_value_in_some_run_is_refused_with_results_csv_there(
    compared, model, tmp_path, capsys
):
    experiment, cases, _ = compared
    shutil.copytree(experiment.dir, tmp_path / "out")
    file = write(model, tmp_path, arms=arm_tables(experiment))
    for name in ("results.csv", "tables.md"):
        (tmp_path / "out" / name).unlink()
    for place in (3, -1):
        run = tmp_path / "out" / cases[place].path.relative_to(experiment.dir)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines[-1]["eval/accuracy"] = None
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["compare", str(file)]) == 2
    errors = capsys.readouterr().err
    for case in (cases[3], cases[-1]):
        assert f"arm {case.arm}, learning rate {case.rate:g}, seed {case.seed}" in errors
    assert errors.count("learning rate") == 2
    assert "name another metric" in errors
    assert "eval/pass@1" in (tmp_path / "out" / "results.csv").read_text()
    file = write(model, tmp_path, arms=arm_tables(experiment), metric="eval/pass@1")
    assert main(["compare", str(file)]) == 0
    assert (tmp_path / "out" / "tables.md").exists()


def test_before_runs_are_taken_changed_own_code_of_finished_ones_is_told(
    compared, model, tmp_path, capsys
):
    experiment, cases, _ = compared
    shutil.copytree(experiment.dir, tmp_path / "out")
    file = write(model, tmp_path, arms=arm_tables(experiment))
    changed, missing = (
        tmp_path / "out" / case.path.relative_to(experiment.dir) for case in (cases[1], cases[-1])
    )
    for copied in (changed / "code").iterdir():
        copied.write_text(copied.read_text() + "# before")
    assert main(["compare", str(file), "--dry-run"]) == 0
    assert "own code has changed" not in capsys.readouterr().out, "no run is to be taken"
    shutil.rmtree(missing)
    assert main(["compare", str(file), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert f"own code has changed since 1 of {len(cases) - 1} finished runs" in " ".join(
        output.split()
    )
    assert not missing.exists()


def test_runs_of_other_weights_or_other_code_are_told(compared, tmp_path):
    experiment, cases, outcomes = compared
    assert results.mixtures(outcomes) == [], "whatever the arms' rewards are"
    changed = {key: dict(by_seed) for key, by_seed in outcomes.items()}
    run = changed["twin", 0.5][2]
    numbers = {**run.numbers, "base/pass@1": run.numbers["base/pass@1"] + 0.01}
    changed["twin", 0.5][2] = run._replace(numbers=numbers)
    (message,) = results.mixtures(changed)
    assert message == "Seed 2: runs begin at different bases (base/pass@1 differ)."
    shutil.copytree(experiment.dir, tmp_path / "out")
    user_file = tmp_path / "mine.py"
    user_file.write_text("now")
    named = dataclasses.replace(cases[0].config.rewards[0], use=f"{user_file}:reward")
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
    (message,) = results.mixtures(moved)
    assert message == f"Runs with 2 states of {user_file}."


@pytest.mark.full
def test_a_rate_at_which_a_run_diverges_is_named_and_can_be_taken_out(model, tmp_path, capsys):
    arms: dict[str, Any] = {"a": {}, "b": {"learning_rates": [0.5, 1e30]}}
    options: dict[str, Any] = {"steps": 1, "seeds": 1, "control": "a"}
    assert main(["compare", str(write(model, tmp_path, arms=arms, **options))]) == 5
    errors = capsys.readouterr().err
    assert "out/runs/b/lr_1e+30/seed_0: step 1: " in errors
    assert "take 1e+30 out of learning_rates, or of arms.b.learning_rates" in errors
    arms["b"] = {"learning_rates": [0.5]}
    assert main(["compare", str(write(model, tmp_path, arms=arms, **options))]) == 0
    assert "2 of 2 runs are finished already" in capsys.readouterr().out


FAILS = """
def fails(completions, trainer_state, **columns):
    assert trainer_state.global_step < 1, "in the second step"
    return [float("y" in text) for text in completions]
"""


@pytest.mark.full
def test_of_a_reward_that_fails_the_message_names_the_command_of_the_comparison(
    model, tmp_path, capsys
):
    (tmp_path / "mine.py").write_text(FAILS)
    rewards = {"rewards": [{"use": f"{tmp_path}/mine.py:fails"}]}
    options: dict[str, Any] = {"arms": {"a": {}, "b": {}}, "control": "a", "seeds": 1}
    file = write(model, tmp_path, steps=2, set=rewards, **options)
    assert main(["compare", str(file)]) == 3
    errors = " ".join(capsys.readouterr().err.split())
    assert f"jaxgrpo train does not finish: continue with: jaxgrpo compare {file}" in errors
    assert "remove " + str(tmp_path / "out/runs/a/lr_0.5/seed_0") + " first" in errors
