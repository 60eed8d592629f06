"""docs/experiments: criteria hold, pages match the commands, failures are reported."""

from __future__ import annotations

import re
import tomllib

import jax
import numpy as np
import pytest
import small_run
import tomli_w
from matplotlib.figure import Figure

from docs.experiments import (
    bandit,
    common,
    trained,
    x1_degeneracy,
    x2_closed_forms,
    x4_collapse,
    x8_trees,
    x10_planning,
    x15_kl_uses,
    x16_flat_groups,
)
from jaxgrpo.experiments import compare
from jaxgrpo.experiments.compare import experiment as experiments

QUICK = (
    x15_kl_uses,
    *(
        pytest.param(module, marks=pytest.mark.full)
        for module in (x2_closed_forms, x10_planning, x16_flat_groups)
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", QUICK, ids=lambda module: getattr(module, "NAME", ""))
def test_the_criteria_hold_and_the_page_is_what_the_command_computes(experiment):
    result = experiment.run()
    assert [check for check in result.checks if not check.holds] == []
    text = (common.FOLDER / f"{experiment.NAME}.md").read_text()
    command = f"python -m docs.experiments.{experiment.NAME}"
    assert text == common.written(experiment.NAME, result), f"out of date: {command}"


@pytest.mark.full
@pytest.mark.slow
def test_the_enumerated_part_of_trees_holds_and_is_on_its_page():
    result = x8_trees.exact()
    assert [check for check in result.checks if not check.holds] == []
    text = (common.FOLDER / "x8_trees.md").read_text()
    assert text == common.written("x8_trees", result), "out of date: add --exact to its command"


@pytest.mark.full
def test_trees_and_chains_are_compared_by_what_was_drawn(tmp_path):
    shipped = tomllib.loads((experiments.SHIPPED_EXPERIMENTS / "x8_trees.toml").read_text())
    changes = {
        "model": {"path": small_run.base()},
        "rollout": {"prompts_per_step": 4, "group_size": 4},
        "train": {"steps": 1},
        "eval": {"every": 0, "prompts": 4, "samples": 2},
    }
    file = tmp_path / "small.toml"
    small = shipped | {"seeds": [0], "tests": [], "dir": str(tmp_path / "runs"), "set": changes}
    del small["tests"], shipped["arms"]["likely_trees"]  # its programs take long to compile
    file.write_text(tomli_w.dumps(small))
    assert compare.compare(file) == 0
    comparison = trained.read(experiments.load(file))
    parts = x8_trees.trained(comparison)
    assert [line.split(" | ")[0] for line in parts["cost"].splitlines()[2:]] == [
        *("| chains", "| trees")
    ]
    text = common.page("x8_trees", parts)  # the page has a place for every part
    assert "not been taken" not in text
    for arm, by_seed in comparison.outcomes.items():
        (outcome,) = by_seed.values()
        longest = 4 * (4 if arm[0] == "chains" else 6) * 24
        assert 0 < outcome.numbers["tokens"] < longest


@pytest.mark.full
def test_the_criteria_of_degeneracy_hold_on_a_smaller_base_and_fewer_prompts():
    result = x1_degeneracy.run(prompts=96, samples=32, steps=240, batch=32)
    assert [check for check in result.checks if not check.holds] == []
    assert result.figure().axes[0].get_title() == "prompts by success rate"
    common.written("x1_degeneracy", result)  # the page has a place for every part


def test_2_var_p_is_measured_without_the_noise_of_the_samples():
    random = np.random.default_rng(0)
    p = random.choice([0.1, 0.9, 0.5], size=4000)
    right = random.random((4000, 8)) < p[:, None]
    assert x1_degeneracy.twice_the_variance(right) == pytest.approx(2 * p.var(), abs=0.01)
    assert 2 * right.mean(1).var() > 2 * p.var() + 0.03  # what the rates themselves would say
    equal = x1_degeneracy.shuffled(right)
    assert x1_degeneracy.twice_the_variance(equal) == pytest.approx(0, abs=0.01)
    flat = np.array([[1, 1, 0, 0], [0, 1, 0, 0]], bool)
    assert x1_degeneracy.counted(flat, 2) == 0.75


@pytest.mark.full
def test_the_criteria_of_the_collapse_hold():
    assert [check for check in x4_collapse.run().checks if not check.holds] == []


def test_every_page_is_listed_with_its_command_and_shows_its_figure():
    listed = (common.FOLDER / "README.md").read_text()
    pages = sorted(path.stem for path in common.FOLDER.glob("x*.md"))
    assert pages == sorted(re.findall(r"`python -m docs\.experiments\.(\w+)`", listed))
    for name in pages:
        text = (common.FOLDER / f"{name}.md").read_text()
        assert f"python -m docs.experiments.{name}\n" in text
        assert f"({name}.png)" in text
        assert (common.FOLDER / f"{name}.png").exists()
        assert f"({name}.md)" in listed
        assert "**NO**" not in text


def test_a_criterion_that_fails_is_written_and_ends_the_command_with_1(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(common, "FOLDER", tmp_path)
    markers = "<!-- checks -->\n<!-- end of checks -->\n<!-- numbers --><!-- end of numbers -->\n"
    (tmp_path / "x0.md").write_text(f"# X0\n{markers}")
    good = common.below("one", [0.0, -1e-10])
    bad = common.below("two", np.nan)
    assert (good.holds, good.measured) == (True, "below 1e-09")
    for checks, code in (([good], 0), ([good, bad], 1)):
        result = common.Result({"numbers": "1 | 2"}, checks, Figure)
        with pytest.raises(SystemExit) as ended:
            common.command("x0", lambda result=result: result)
        assert int(ended.value.code or 0) == code
    text = (tmp_path / "x0.md").read_text()
    assert "<!-- numbers -->\n1 | 2\n<!-- end of numbers -->" in text
    assert "| two: error < 1e-09 | nan | **NO** |" in text
    assert "FAIL two" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has no <!-- more -->"):
        common.page("x0", {"more": ""})


def test_numbers_are_rounded_to_three_digits():
    row = common.table(("a", "|b|"), [(0.039999, 1.0), (12.3456, 3), (1e-5, 0.0)]).splitlines()
    assert row[0] == "| a | \\|b\\| |"
    assert row[2:] == ["| 0.0400 | 1.000 |", "| 12.346 | 3 |", "| 1.00e-05 | 0 |"]


@pytest.mark.full
@pytest.mark.slow
def test_a_wrong_closed_form_would_be_noticed(monkeypatch):
    with jax.enable_x64(True):
        groups = x2_closed_forms.groups()
        (first, *_) = x2_closed_forms.weight_checks(groups)
        assert first.holds
        wrong = ("1", lambda size, p: 1.0 + 1e-8)
        monkeypatch.setitem(x2_closed_forms.CLOSED, "rloo", wrong)
        (first, *_) = x2_closed_forms.weight_checks(groups)
        assert not first.holds


@pytest.mark.slow
def test_the_bandit_has_the_success_rate_that_was_asked_for():
    with jax.enable_x64(True):
        game = bandit.bandit(0.3, spread=1.0)
        assert game.rate == pytest.approx(0.3, abs=1e-12)
        means = 0.3 * game.class_mean(True) + 0.7 * game.class_mean(False)
        np.testing.assert_allclose(means, 0, atol=1e-12)
        np.testing.assert_allclose(0.3 * game.class_mean(True), bandit.slope(game), atol=1e-12)
