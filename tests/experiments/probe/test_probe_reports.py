"""A probe's page and terminal text: what they show, and that no name acts in them."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from pictures import legends, pictures
from rich.console import Console

from jaxgrpo.experiments.probe import report

EVIL = "<script>alert(1)</script>[bold]\x1b[31m"
NAN = float("nan")


def group(**changes: Any) -> dict[str, Any]:
    return {
        "measured": 0.75,
        "iid": 0.5,
        "gap": 0.25,
        "ci": (0.125, 0.375),
        "all_fail": 0.5,
        "all_pass": 0.25,
        "live_groups": 2.0,
        "live_tokens": 321.0,
        "live_groups_per_1000_samples": 125.0,
        "lucky": NAN,
        **changes,
    }


@pytest.fixture
def numbers() -> dict[str, Any]:
    unknown = group(iid=NAN, gap=NAN, ci=(NAN, NAN))
    return {
        "model": EVIL,
        "data": "d[/bold].jsonl",
        "reward": "math",
        "prompts": 8,
        "samples": 4,
        "temperature": 1.0,
        "prompts_per_step": 8,
        "level": 0.95,
        "success": {
            "rate": 0.375,
            "ci": (0.25, 0.5),
            "at_zero": 0.5,
            "at_one": 0.25,
            "histogram": [4, 1, 1, 0, 2],
            "unscored": 0.0,
        },
        "pass_at": {1: {"value": 0.375, "ci": (0.25, 0.5)}, 2: {"value": 0.5, "ci": (NAN, NAN)}},
        "degeneracy": {2: group(), 4: unknown},
        "diversity": {"distinct_completions": 3.0, "same_completion": 0.25},
        "format": {"cut": 0.125, "mean_tokens_right": NAN},
        "calibration": None,
        "agreement": {"mean": 1e-7, "max": 1e-6, "kl": 0.0, "tokens": 99},
        "advice": [
            {"about": "filter", "says": f"do {EVIL}", "why": "so", "numbers": ["success.at_zero"]}
        ],
    }


def test_the_terminal_shows_each_number_once(numbers):
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False, color_system=None, force_terminal=True)
    report.show(console, numbers)
    text = out.getvalue()
    assert "\x1b[31m" not in text
    assert "[bold]" in text
    assert "math" in text
    rows = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    assert "0 of 4 4 50.0% ███████████████" in rows
    assert "4 of 4 2 25.0% ████████" in rows
    assert "3 of 4 0 0.0%" in rows
    assert "pass@1 0.375 0.250 to 0.500" in rows
    assert "pass@2 0.500 –" in rows
    assert "2 0.750 0.500 0.250 0.500 0.250 0.125 to 0.375 2.0 321 125 –" in rows
    assert "4 0.750 0.500 0.250 – – – 2.0 321 125 –" in rows
    assert "two completions of a prompt are the same 25.0%" in rows
    assert "of right ones –" in rows
    assert "95% interval" in text


def test_long_numbers_fit_the_terminal(numbers):
    long = group(ci=(-0.125, -0.1), live_groups=255.5, live_tokens=123456.0, lucky=0.25)
    numbers["degeneracy"] = {16: long}
    numbers["success"] |= {"unscored": 0.125}
    out = io.StringIO()
    report.show(Console(file=out, width=100, color_system=None), numbers)
    text = out.getvalue()
    assert "…" not in text
    assert re.search("-0.125 to -0.100 +255.5 +123456 +125 +0.250", text)
    assert "12.5% of the samples could not be scored" in " ".join(text.split())


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_narrow_terminal_or_pipe_cuts_nothing(numbers, width):
    numbers["samples"], numbers["success"]["histogram"] = 4, [800, 0, 0, 0, 0]
    out = io.StringIO()
    report.show(Console(file=out, width=width, color_system=None), numbers)
    text = out.getvalue()
    assert "…" not in text
    assert re.search(rf"0 of 4 +800 +100.0% +{'█' * report.BAR}", text)
    assert re.search(r"sampler against trainer, largest +1.00e-06 nats per token", text)
    assert visible_in(text, "<script>alert(1)</script>[bold]")


def visible_in(text: str, word: str) -> bool:
    """Whether a word is in the text, whatever its lines."""
    return word in re.sub(r"\s", "", text)


def test_the_page_draws_four_charts_even_where_numbers_are_missing(numbers):
    page = report.render(numbers)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "(success.at_zero)" in page
    texts = pictures(page)
    assert len(texts) == 4
    assert [legends(text) for text in texts] == [(0, 0), (1, 0), (0, 0), (0, 0)], "over no bar"
    for text, title in zip(texts, ("success rate", "Flat", "Live", "pass@k"), strict=True):
        assert title in text
    assert report.render(numbers) == page


def test_a_probe_of_which_nothing_is_known_is_shown_all_the_same(numbers):
    unknown = dict.fromkeys(group(), NAN) | {"ci": (NAN, NAN)}
    numbers |= {
        "pass_at": {1: {"value": NAN, "ci": (NAN, NAN)}},
        "degeneracy": {2: unknown, 4: unknown},
        "success": dict.fromkeys(("rate", "at_zero", "at_one"), NAN)
        | {"ci": (NAN, NAN), "histogram": [0] * 5, "unscored": 1.0},
    }
    out = io.StringIO()
    report.show(Console(file=out, width=100), numbers)
    assert "pass@1 – –" in re.sub(r" +", " ", out.getvalue())
    assert report.render(numbers).count("<figure>") == 4


@pytest.mark.parametrize("samples", [2, 3, 4, 5, 8, 16, 17, 64])
def test_bars_of_the_terminal_hold_every_count_once(samples):
    ranges = report.ranges(samples)
    assert [count for among in ranges for count in among] == list(range(samples + 1))
    assert (ranges[0], ranges[-1]) == (range(1), range(samples, samples + 1))
    assert len(ranges) <= 6
