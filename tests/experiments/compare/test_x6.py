"""X6 in a small form: runs, page and figure; and the arithmetic of its curves."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
import tomli_w

from docs.experiments import common, x6_reflection
from docs.experiments.x6_reflection import Curve, crossing
from jaxgrpo.cli import make_base
from jaxgrpo.experiments.compare import experiment as experiments


def test_the_arms_differ_in_the_reward_and_the_filter_alone(tmp_path):
    tables = tomllib.loads(x6_reflection.FILE.read_text())
    tables["set"]["data"]["path"] = "task:report:train"  # the rows are made by the command
    file = tmp_path / "x6.toml"
    file.write_text(tomli_w.dumps(tables))
    cases = experiments.make_cases(experiments.load(file))
    assert len(cases) == 24
    filters = {case.arm: dict(case.config.rollout.prompts)["use"] for case in cases}
    for arm, use in filters.items():
        assert use == ("query_filter" if arm.endswith("_filter") else "sequential")
    for kind in ("correct", *x6_reflection.KINDS):
        plain, filtered = (
            next(case.config for case in cases if case.arm == arm)
            for arm in (kind, f"{kind}_filter")
        )
        assert (plain.recipe, plain.advantage) == (filtered.recipe, filtered.advantage)


def test_the_target_is_reached_between_two_evaluations():
    curve = Curve(np.array([0.0, 10, 20, 30]), np.array([0.0, 5, 6, 9]), np.array([0.1, 0.6, 1, 0]))
    assert crossing(curve, curve.steps) == pytest.approx(15)
    assert crossing(curve, curve.tokens) == pytest.approx(5.5)
    assert np.isnan(crossing(curve._replace(accuracy=np.full(4, 0.7)), curve.steps))
    assert crossing(curve._replace(accuracy=np.ones(4)), curve.steps) == 0


@pytest.mark.full
def test_the_smoke_form_becomes_a_page_and_a_figure(tmp_path):
    make_base.make_base(tmp_path / "base", "report", steps=60, batch=32, hidden_size=32)
    tables = tomllib.loads(x6_reflection.FILE.read_text())
    tables["arms"] = {name: tables["arms"][name] for name in ("correct", "var", "var_filter")}
    tables |= {"seeds": 1, "dir": str(tmp_path / "out")}
    tables["set"]["train"] = {"steps": 4}
    tables["set"]["model"] = {"path": str(tmp_path / "base")}
    tables["set"]["data"]["path"] = "task:report:train"
    tables["set"]["eval"] |= {"every": 2, "prompts": 16}
    file = tmp_path / "x6_smoke.toml"
    file.write_text(tomli_w.dumps(tables))
    result = x6_reflection.measure(file, batches=1)
    assert "3 runs" in result.checks[1].measured
    assert result.checks[1].holds
    assert "| var_filter | 0 of 1 | – | – |" in common.written(x6_reflection.NAME, result)
    assert [len(axes.lines) for axes in result.figure().axes] == [6, 6]
