"""The experiments that train on the small tasks: their files, their pages, and X7 as it is run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quick
import tomli_w

from docs.experiments import (
    common,
    shortcut,
    three_formats,
    trained,
    x5_shortcut,
    x7_calibration,
    x13_formats,
    x17_anchoring,
)
from jaxgrpo.cli.main import main
from jaxgrpo.experiments.compare import experiment as experiments

FILES = {page: page.FILE for page in (x5_shortcut, x13_formats, x17_anchoring)} | {
    x7_calibration: experiments.SHIPPED_EXPERIMENTS / "x7_calibration.toml"
}


def place(page: Any, folder: Path, **changes: dict[str, Any]) -> Path:
    """The file of a comparison in a folder, with one seed and other keys for every arm."""
    text = FILES[page].read_text()
    for name in ("../../runs/shortcut", "../../runs/formats"):
        text = text.replace(name, str(folder))
    text = re.sub(r'"(\w+\.py:)', rf'"{common.FOLDER}/\1', text)
    tables = tomllib.loads(text) | {"seeds": 1, "dir": str(folder / "out")}
    for name, keys in {"model": {"path": str(folder / "base")}, **changes}.items():
        tables["set"][name] = {**tables["set"].get(name, {}), **keys}
    file = folder / "experiment.toml"
    file.write_text(tomli_w.dumps(tables))
    return file


def take(page: Any, folder: Path, base_steps: int | None = None, **changes: dict[str, Any]):
    """The comparison, with a base of so many steps."""
    trained.prepare(page.TASK, folder / "base", base_steps)
    return trained.take(place(page, folder, **changes), page.TASK, folder / "base")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("page", FILES, ids=lambda page: page.NAME)
def test_the_files_of_experiments_are_right(page, tmp_path):
    file = place(page, tmp_path)
    if not isinstance(page.TASK, str):
        trained.write_rows(page.TASK, tmp_path)
    assert main(["compare", str(file), "--dry-run"]) == 0
    patterns = experiments.make_cases(experiments.load(file))[0].config.eval.formats
    expected = {"shortcut": {"copies": shortcut.COPIED}, "formats": three_formats.PATTERNS}
    assert patterns == expected.get(getattr(page.TASK, "name", ""), {})


@pytest.mark.parametrize("page", quick.long_but([x5_shortcut], FILES), ids=lambda page: page.NAME)
def test_a_smoke_fills_every_part_of_its_page_and_draws_its_figure(page, tmp_path):
    steps, prompts = {"steps": 2}, {"prompts": 8, "samples": 16, "every": 0}
    result = page.result(take(page, tmp_path, 40, train=steps, eval=prompts))
    (complete, *_) = result.checks
    assert complete.holds
    text = common.written(page.NAME, result)
    for part in result.parts.values():
        assert part.strip()
        assert part in text
    common.save(result.figure(), tmp_path / "figure.png")


@quick.long
def test_rlcr_is_calibrated_to_a_known_chance_at_the_accuracy_of_the_answer_alone(tmp_path):
    """By one run, whose confidences may settle a step of their grid beside the right ones."""
    comparison = take(x7_calibration, tmp_path)
    complete, _, *checks = x7_calibration.checks(comparison)
    assert [check for check in (complete, *checks) if not check.holds] == []
    assert comparison.mean("rlcr", "eval/ece") < 0.1


def test_the_best_possible_numbers_are_those_of_a_calibrated_model():
    best = x7_calibration.best_possible()
    assert best["pass@1"] == pytest.approx(0.6 + 0.3 / 2 + 0.1 / 4, abs=0.03)
    assert best["brier"] == pytest.approx(0.3 / 4 + 0.1 * 3 / 16, abs=0.015)
    # Pairs of a right and a wrong answer: .6 : .15 : .025 against 0 : .15 : .075 of chances 1, .5
    # and .25.
    right, wrong = np.array([0.6, 0.15, 0.025]) / 0.775, np.array([0.0, 0.15, 0.075]) / 0.225
    area = right[0] + right[1] * (wrong[1] / 2 + wrong[2]) + right[2] * wrong[2] / 2
    assert best["auroc"] == pytest.approx(area, abs=0.02)


def test_the_weight_of_a_rare_success_is_that_of_the_derivation():
    assert x5_shortcut.weight(2, 0.02) == pytest.approx(1)
    ratios = [x5_shortcut.weight(size, 1e-6) / x5_shortcut.weight(size, 0.5) for size in (8, 64)]
    assert ratios == pytest.approx([1.43, 4.0], abs=0.05)


def test_exact_flows_keep_shares_and_sampled_gradients_follow_the_plain_one():
    share = np.array([0.2, 0.5, 0.3])
    lead = x13_formats.SUCCESS - share @ x13_formats.SUCCESS
    # d logits = J (s D) with J the Jacobian of the softmax, and ds = J d logits.
    jacobian = np.diag(share) - np.outer(share, share)
    np.testing.assert_allclose(x13_formats.softmax_flow(share), jacobian @ (share * lead))
    np.testing.assert_allclose(x13_formats.natural_flow(share), jacobian @ lead)
    for flow in (x13_formats.softmax_flow, x13_formats.natural_flow):
        assert flow(share).sum() == pytest.approx(0, abs=1e-12)
    winner, step = x13_formats.simulate(32, 1.0)
    assert (winner == 2).all()
    exact = x13_formats.follow(x13_formats.softmax_flow, 200, 1 - 1 / x13_formats.SIZE)
    assert np.median(step) == pytest.approx((exact[:, 2] < 0.9).sum(), rel=0.1)
