"""X3 in its smoke form, and the page and figure made of it."""

from __future__ import annotations

import tomllib

import pytest
import small_run
import tomli_w

from docs.experiments import common, x3_advantages
from jaxgrpo.cli.main import main
from jaxgrpo.experiments.compare import experiment as experiments

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["x3_g2", "x3_g4", "x3_paper"])
def test_the_shipped_experiments_are_right_but_for_what_they_say_is_missing(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where no runs are
    assert main(["compare", name, "--dry-run"]) == 0
    experiment = experiments.load(name)
    cases = experiments.cases_of(experiment)
    assert len(experiment.seeds) == 7
    assert {case.config.rollout.group_size for case in cases} == {2 if name == "x3_g2" else 4}
    if name != "x3_paper":
        assert len(cases) == 6 * 3 * (7 + 2)  # two seeds choose the rates
        rollout = cases[0].config.rollout
        assert rollout.prompts_per_step * rollout.group_size == 64


@pytest.mark.full
def test_the_smoke_form_becomes_a_page_and_a_figure(tmp_path):
    file = experiments.SHIPPED_EXPERIMENTS / "x3_g4.toml"
    tables = tomllib.loads(file.read_text())
    tables["arms"] = {name: tables["arms"][name] for name in ("grpo", "sign")}
    tables |= {"learning_rates": [1e-3], "seeds": 2, "tuning_seeds": []}
    tables["dir"] = str(tmp_path / "out")
    tables["set"]["train"] = {"steps": 3}
    tables["set"]["model"] = {"path": small_run.base()}
    tables["set"]["eval"] = {"every": 0, "prompts": 16, "samples": 4}
    (tmp_path / "x3_smoke.toml").write_text(tomli_w.dumps(tables))
    assert main(["compare", str(tmp_path / "x3_smoke.toml")]) == 0
    one = x3_advantages.read(experiments.load(tmp_path / "x3_smoke.toml"))
    result = x3_advantages.result(dict.fromkeys(x3_advantages.SIZES, one))
    assert [check for check in result.checks if not check.holds] == []
    text = common.written(x3_advantages.NAME, result)
    for part in ("sign against grpo: no difference shown", "| rate 0.001 |", "4 of 4", "8 runs, "):
        assert part in text
    assert "no difference can be shown, however large: take 6 seeds or more" in text
    assert len(result.figure().axes) == 8
