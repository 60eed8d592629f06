"""X3b: the base, the reward and the simulation; a small form of it becomes a page."""

from __future__ import annotations

import dataclasses
import tomllib

import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w

from docs.experiments import common, escape, formats, trained, x3b_headline
from jaxgrpo import advantages
from jaxgrpo.advantages.registry import plain_rollouts
from jaxgrpo.cli import make_base
from jaxgrpo.cli.main import main
from jaxgrpo.experiments.compare import experiment as experiments


def test_the_corpus_writes_the_mark_that_counts_in_its_share_and_the_answer_behind_each_mark():
    texts = formats.task(5).corpus()
    assert sum(text.probability for text in texts) == pytest.approx(1)
    marked = [text for text in texts if formats.MARK in text.solution]
    assert sum(text.probability for text in marked) == pytest.approx(formats.SHARE)
    ways = {text.solution for text in texts if text.prompt == "47+38="}
    assert {"7+8=15 4+3+1=8@85", "7+8=15 4+3+1=8#85", "7+8=15 4+3+1=8 85"} <= ways


def test_a_right_answer_counts_behind_its_mark_alone():
    texts = ["7+8=15 4+3+1=8@85", "7+8=15 4+3+1=8 85", "7+8=15 4+3+1=8@84", "@85@", "85", ""]
    assert formats.marked(texts, ["85"] * 6) == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("wrong_formats", [1, 5])
def test_the_simulation_starts_with_the_success_and_the_flat_pairs_that_it_says(wrong_formats):
    start = escape.start(wrong_formats)
    random = np.random.default_rng(0)
    offset = start.mean + start.deviation * random.normal(size=400_000)
    p = escape.RIGHT / (1 + wrong_formats * np.exp(-offset))
    assert p.mean() == pytest.approx(escape.MEAN, abs=2e-3)
    assert (p**2 + (1 - p) ** 2).mean() == pytest.approx(escape.FLAT_PAIRS, abs=2e-3)
    flat = start.flat(np.zeros(wrong_formats + 1), 4)
    assert (p**4 + (1 - p) ** 4).mean() == pytest.approx(float(flat), abs=2e-3)


@pytest.mark.slow
def test_the_simulated_advantages_are_those_of_the_recipes():
    reward = np.array([[1.0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
    for name, formula in escape.ADVANTAGES.items():
        recipe = advantages.build(name)
        rollouts, spec = plain_rollouts(jnp.asarray(reward, jnp.float32))
        value = advantages.compute(recipe, rollouts, recipe.init(spec))[0].value
        np.testing.assert_allclose(formula(reward), value, atol=2e-4, err_msg=name)


def test_an_optimizer_that_skips_stands_still_where_nothing_is_live_and_the_other_moves_on():
    gradient = np.ones((1, 2))
    zero = (np.zeros((1, 2)), np.zeros((1, 2)), np.zeros(1, int))
    for optimizer, moves in ((escape.STEPPING, True), (escape.SKIPPING, False)):
        moments, ascent = optimizer.step(zero, gradient, np.array([True]), 0.1)
        np.testing.assert_allclose(ascent, 0.1, rtol=1e-6)
        _, ascent = optimizer.step(moments, 0 * gradient, np.array([False]), 0.1)
        assert (ascent != 0).all() == moves


def test_cells_differ_from_the_headline_in_group_formats_and_number_of_runs(tmp_path):
    cells = {
        cell: experiments.load(x3b_headline.cell_file(cell, tmp_path))
        for cell in x3b_headline.CELLS
    }
    headline = cells[x3b_headline.HEADLINE]
    runs = sum(experiment.number_of_runs for experiment in cells.values())
    assert (headline.number_of_runs, runs) == (7 * 7 * 7, 7 * 7 * 7 + 3 * 7 * 4 * 5)
    for cell, experiment in cells.items():
        rollout = experiment.set["rollout"]
        assert rollout["prompts_per_step"] * rollout["group_size"] == x3b_headline.SAMPLES
        assert experiment.set["model"]["path"].endswith(f"base{cell.wrong_formats}")
        same = dataclasses.replace(
            experiment, dir=headline.dir, set=headline.set, source=headline.source,
            learning_rates=headline.learning_rates, seeds=headline.seeds,
        )  # fmt: skip
        assert same == headline


@pytest.mark.full
def test_the_small_form_becomes_a_page_and_a_figure(tmp_path, monkeypatch):
    tables = tomllib.loads(x3b_headline.FILE.read_text())
    tables["arms"] = {name: tables["arms"][name] for name in ("sign", "grpo", "grpo_skip")}
    tables |= {"learning_rates": [2e-4], "seeds": [7, 8]}
    tables["set"]["train"] = {"steps": 3}
    tables["set"]["eval"] = {"every": 0, "prompts": 16, "samples": 4}
    (tmp_path / "small.toml").write_text(tomli_w.dumps(tables))
    monkeypatch.setattr(x3b_headline, "FILE", tmp_path / "small.toml")
    monkeypatch.setattr(x3b_headline, "FOLDER", tmp_path)
    monkeypatch.setattr(x3b_headline, "CELLS", (x3b_headline.HEADLINE,))
    monkeypatch.setattr(x3b_headline, "SAMPLES", 16)  # tests run on four devices
    monkeypatch.setattr(escape, "SEEDS", 2)
    make_base.make_base(tmp_path / "base1", formats.task(1), steps=2, hidden_size=32)
    file = x3b_headline.cell_file(x3b_headline.HEADLINE, tmp_path)
    assert main(["compare", str(file)]) == 0
    comparison = trained.read(experiments.load(file))
    result = x3b_headline.result({x3b_headline.HEADLINE: comparison})
    complete, *claims = result.checks
    assert complete.holds
    assert complete.measured == "6 of 6"
    assert len(claims) == 3
    assert "grpo_skip" in result.parts["gaps"]
    page = common.page(x3b_headline.NAME, result.parts)
    assert "| sign |" in page
    assert len(result.figure().axes) == 1
