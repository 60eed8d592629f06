"""report.html: what it shows, and that nothing a model wrote is more than text in it."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from pictures import legends, pictures
from report_pages import ALLOWED, EVIL, Seen, record, row

from jaxgrpo.training.records import alarms
from jaxgrpo.training.records.report import blocks, charts
from jaxgrpo.training.records.report import html as page
from jaxgrpo.training.records.report.record import Record


def test_what_a_model_a_data_set_or_a_user_wrote_is_text():
    run = record(
        name=EVIL,
        config={"model": {"path": EVIL}, "recipe": EVIL, "rollout": {"group_size": EVIL}},
        samples=[
            row(completion=EVIL, prompt=[{"role": EVIL, "content": EVIL}], rewards={EVIL: 1.0}),
            row(sample=1, completion={"parts": EVIL}, rewards={EVIL: None}),
        ],
        warnings=[alarms.Alarm(EVIL, 2, EVIL)],
    )
    run.lines[-1][f"rewards/{EVIL}/mean"] = 0.5
    run.lines[-1][f"eval/{EVIL}"] = 0.5
    parsed = Seen(page.render(run))
    assert {tag for tag, _ in parsed.tags} <= ALLOWED
    for tag, attributes in parsed.tags:
        assert not [name for name in attributes if name.startswith("on")]
        if tag == "img":
            assert (attributes["src"] or "").startswith("data:image/svg+xml;base64,")
    shown = '<img src=x onerror="alert(1)"></pre></td><script>alert(2)</script>'
    assert parsed.text.count(shown) >= 8
    assert "\\u202e\\x1b[31m\\udc80'&amp;" in parsed.text
    for panel, svg in charts.draw(run):
        assert "<script>" not in svg.replace("&lt;script&gt;", ""), panel.title


def test_the_page_loads_and_runs_nothing():
    text = page.render(record())
    assert blocks.POLICY in text
    assert "default-src 'none'" in blocks.POLICY
    assert "script" not in blocks.POLICY
    for tag, attributes in Seen(text).tags:
        for name in ("src", "href"):
            if name in attributes:
                assert (attributes[name] or "").startswith("data:"), tag


def images(run: Record) -> list[str]:
    parsed = Seen(page.render(run))
    return [attributes["alt"] or "" for tag, attributes in parsed.tags if tag == "img"]


def test_no_legend_covers_a_curve():
    assert [legends(svg) for svg in pictures(page.render(record()))] == [
        (0, 0), (1, 0), (1, 0), (0, 0)
    ]  # fmt: skip


def test_a_chart_is_there_for_what_was_logged_and_for_nothing_else():
    assert images(record()) == ["Reward", "Evaluation", "Groups", "Gradient norm"]
    with_kl = record()
    with_kl.lines[-1]["kl"] = 0.5
    assert "KL" in images(with_kl)


def test_the_page_shows_where_the_run_stands():
    text = Seen(page.render(record())).text
    for part in ("run", "finished", "step 3 of 3", "model base", "0.250 → 0.750", "50"):
        assert part in text
    assert "a/b" not in text


def test_a_first_evaluation_after_some_steps_is_not_called_the_base():
    assert "accuracy, base → now" in page._tiles(record())
    late = [line for line in record().lines if line["step"] > 0]
    late[0] |= {"eval/accuracy": 0.5}
    tiles = page._tiles(record(lines=late))
    assert tiles["accuracy, step 1 → now"] == "0.500 → 0.750"


def test_the_evaluation_table_holds_first_last_and_change():
    run = record()
    rows = page._evaluation(run)
    text = Seen(rows).text
    assert text.index("accuracy") < text.index("pass@4") < text.index("pass@16")
    assert "0.2500.750+0.500" in text
    assert "pass@160.500––" in text  # not measured again


def with_intervals(**changes: Any) -> Record:
    """The run of `record`, whose evaluations say how sure they are."""
    run = record(**changes)
    for line in (run.lines[0], run.lines[-1]):
        for name in [name for name in line if name.startswith("eval/")]:
            line |= {f"{name}/low": line[name] - 0.125, f"{name}/high": line[name] + 0.125}
    return run


def test_an_interval_is_the_band_of_its_curve_and_no_curve_of_its_own():
    (panel,) = [panel for panel in charts.PANELS if panel.title == "Evaluation"]
    curves = charts._curves(panel, with_intervals())
    assert list(curves) == ["accuracy", "pass@4", "pass@16"]
    low, high = curves["accuracy"].band or ((), ())
    assert (list(low), list(high)) == ([0.125, 0.625], [0.375, 0.875])
    assert charts._curves(panel, record())["accuracy"].band is None
    plain, banded = (
        next(svg for drawn, svg in charts.draw(run) if drawn.title == "Evaluation")
        for run in (record(), with_intervals())
    )
    assert banded.count("<path") > plain.count("<path")
    assert "/high" not in banded


def test_the_mean_of_a_single_reward_is_drawn_beside_what_weighs_it():
    panel = charts.PANELS[0]
    assert [*charts._curves(panel, record())] == ["weighted sum"], "both are the same"
    for weight, labels in ((1.0, ["weighted sum"]), (0.0, ["weighted sum", "right"])):
        config = {"rewards": [{"use": "right", "weight": weight}]}
        assert [*charts._curves(panel, record(config=config))] == labels


def test_more_curves_than_colours_are_told_apart_by_their_dashes():
    run = record()
    for line in run.lines[1:]:
        line |= {f"rewards/r{number}/mean": 0.1 * number for number in range(8)}
    svg = next(svg for panel, svg in charts.draw(run) if panel.title == "Reward")
    assert "stroke-dasharray" in svg
    assert "stroke-dasharray" not in charts.draw(record())[0][1]


def test_the_evaluation_table_has_each_metric_once_with_its_interval():
    text = Seen(page._evaluation(with_intervals())).text
    assert "accuracy0.250 (0.125 to 0.375)0.750 (0.625 to 0.875)+0.500" in text
    assert "/low" not in text


def test_a_warning_holds_or_is_over():
    def alarm(step: int) -> alarms.Alarm:
        return alarms.Alarm("kl", step, "far away")

    run = record(warnings=[alarm(3), alarm(9)], active=frozenset({"kl"}))
    text = Seen(page.render(run)).text
    assert "step 3, over: far away" in text
    assert "step 9, holds: far away" in text
    assert "None so far" in Seen(page.render(record())).text


def test_groups_that_taught_most_stand_first_and_a_prompt_stands_once():
    advantages = [(0, 0, 0.1), (0, 1, -0.1), (1, 0, -2.0), (1, 1, [1.0, 3.0])]
    samples = [
        row(ordinal=o, sample=s, prompt=f"prompt {o}", advantage=a) for o, s, a in advantages
    ]
    text = Seen(page.render(record(samples=samples))).text
    assert text.index("prompt 1") < text.index("prompt 0")
    assert text.count("prompt 1") == text.count("prompt 0") == 1
    assert "+2.00" in text


def test_a_long_completion_is_cut_and_says_by_how_much():
    long = "x" * (blocks.MAX_CHARACTERS + 1234)
    text = Seen(page.render(record(samples=[row(completion=long)]))).text
    assert "x… (1,234 more characters)" in text
    assert "x" * (blocks.MAX_CHARACTERS + 1) not in text


def test_an_empty_run_has_a_page():
    run = record(lines=[], samples=[], config={}, summary={})
    text = Seen(page.render(run)).text
    assert "No step is finished yet" in text
    assert "step 0 of ?" in text


def test_a_long_run_is_drawn_by_the_means_of_its_stretches():
    steps, values = np.arange(1, 901.0), np.arange(900.0)
    thin_steps, thin = charts._thin(steps, values)
    assert len(thin) == len(thin_steps) == charts.MAX_POINTS
    assert thin[0] == pytest.approx(np.mean([0, 1, 2]))
    assert thin_steps[-1] == pytest.approx(np.mean([898, 899, 900]))


def test_a_running_mean_takes_what_there_is():
    mean = charts._running_mean(np.array([1.0, 2.0, 6.0, 4.0]), 3)
    assert mean.tolist() == pytest.approx([1.0, 1.5, 3.0, 4.0])


def test_names_with_mathematics_or_a_leading_underscore_are_labels():
    run = record()
    for line in run.lines[1:]:
        line |= {"rewards/$x$/mean": 0.1, "rewards/_own/mean": 0.2, "rewards/正确/mean": 0.3}
    ((_, svg),) = [drawn for drawn in charts.draw(run) if drawn[0].title == "Reward"]
    assert "$x$" in svg
    assert "_own" in svg
    assert "正确" in svg, "without a warning that the font lacks them"


def test_the_same_run_draws_the_same_bytes():
    assert charts.draw(record()) == charts.draw(record())


def test_charts_hold_the_numbers_of_the_run():
    data = [a["src"] for tag, a in Seen(page.render(record())).tags if tag == "img"]
    svg = base64.b64decode((data[0] or "").partition(",")[2]).decode()
    assert "Reward" in svg
    assert svg.count("<path") > 3


def test_messages_are_shown_by_role():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    text = Seen(page.render(record(samples=[row(prompt=messages)]))).text
    assert "user: hi\nassistant: ho" in text
    assert json.dumps(messages) not in text
