"""What the terminal shows of samples and curves; nothing a model wrote acts on it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Column, Table

from jaxgrpo.training.records import console
from jaxgrpo.training.records.report.record import FINISHED, Record, RewardSum, visible

MARKUP = "[bold red]x[/bold red] [link=http://a]y[/link] \x1b[31m\x1b]0;title\x07 \r\x08[/]"


def row(completion: Any, reward: float | None, prompt: Any = "1+1=") -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "rewards": {"right": reward}}


def printed(texts) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, highlight=False, color_system=None)
    for text in texts:
        console.print(text)
    return out.getvalue()


def test_best_and_worst_are_those_of_most_and_least_weighted_reward():
    rows = [row("middle", 0.5), row("good", 1.0), row("none", None), row("bad", -1.0)]
    shown = printed(console.best_and_worst(rows, RewardSum({"right": 2.0})))
    assert shown == "  best, 2: 1+1=\n    good\n  worst, -2: 1+1=\n    bad\n"


def test_equal_rewards_show_one_sample_and_no_scores_a_line():
    shown = printed(console.best_and_worst([row("a", 0.0), row("b", 0.0)], RewardSum()))
    assert shown == "  all 2 scored the same, 0: 1+1=\n    a\n"
    assert "no completion of this step could be scored" in printed(
        console.best_and_worst([row("a", None)], RewardSum())
    )


def test_markup_and_escape_sequences_in_texts_do_not_act():
    shown = printed([console.excerpt("best", row(MARKUP, 1.0, prompt=MARKUP))])
    assert "[bold red]x[/bold red] [link=http://a]y[/link]" in shown
    assert "\\x1b[31m\\x1b]0;title\\x07" in shown
    assert not {"\x1b", "\x07", "\x08", "\r"} & set(shown)
    assert MARKUP[:20] in printed([console.warning(3, MARKUP)])


def test_letters_of_every_script_stay_as_they_are():
    text = "naïve\u00a0: 你好\u3000، می\u200cخواهم 👩\u200d🔬"
    assert visible(text) == text
    assert visible("\u202e\u2028\x9b\ud800\x00") == "\\u202e\\u2028\\x9b\\ud800\\x00"
    assert visible("\u061c\u200f") == "\\u061c\\u200f", "marks of direction, of all blocks"


def test_an_excerpt_has_few_lines_with_the_start_and_the_end():
    text = "\n".join(f"line {n}" for n in range(50))
    shown = printed([console.excerpt("best", row(text, 1.0, prompt="p" * 500))])
    lines = shown.splitlines()
    assert len(lines) == 5
    assert lines[0] == f"  best: …{'p' * 60}"
    assert [line.strip() for line in lines[1:]] == ["line 0", "line 1", "… 47 lines …", "line 49"]
    paragraph = printed([console.excerpt("best", row("word " * 2000, 1.0))])
    assert len(paragraph.splitlines()) == 5
    assert "(empty)" in printed([console.excerpt("best", row(" \n", 1.0))])


@pytest.mark.parametrize(
    ("values", "line"),
    [([3.0], "▁"), ([1.0, 1.0], "▁▁"), ([0.0, 3.5, 7.0], "▁▅█"), ([7.0, 0.0], "█▁")],
)
def test_a_sparkline_spans_lowest_to_highest(values, line):
    assert console.sparkline(values) == line


def test_a_long_sparkline_shows_means_of_stretches():
    assert console.sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"


def test_the_evaluation_has_each_metric_once_with_its_interval():
    ends = {"pass@4/low": 0.4375, "pass@4/high": 0.625, "accuracy/low": 0.0, "accuracy/high": 0.5}
    measured = {"pass@16": 0.75, "pass@4": 0.5, "accuracy": 0.25, **ends}
    line = {"step": 0, **{f"eval/{name}": value for name, value in measured.items()}}
    run = Record(
        name="r", status=FINISHED, config={}, lines=[line], summary={}, samples=[], warnings=[],
        active=frozenset(),
    )  # fmt: skip
    out = io.StringIO()
    console.show(Console(file=out, width=120, highlight=False, color_system=None), run)
    rows = [line.split("│")[1:3] for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["accuracy", "0.250 (0.000 to 0.500)"],
        ["pass@4", "0.500 (0.438 to 0.625)"],
        ["pass@16", "0.750"],
    ]


def test_a_pipe_and_a_narrow_terminal_cut_no_name():
    name = "eval/accuracy/source_a_data_set_with_a_long_name"
    values = {"eval/accuracy": 0.25, "eval/accuracy/low": 0.125, "eval/accuracy/high": 0.5}
    lines = [{"step": step, "reward": 0.5, name: 0.75, **values} for step in (0, 1)]
    run = Record(
        name="r", status=FINISHED, config={}, lines=lines, summary={}, samples=[], warnings=[],
        active=frozenset(),
    )  # fmt: skip
    out = io.StringIO()
    console.show(Console(file=out, width=40, highlight=False, color_system=None), run)
    assert name.removeprefix("eval/") in out.getvalue()
    assert "▁▁" in out.getvalue()
    assert "…" not in out.getvalue()


def test_a_table_that_is_wider_than_the_terminal_keeps_its_words():
    name, axes, number = "layer/attention/query/kernel", "embed 1024 x heads 16", "2,097,152"
    for wraps, pieces in ((True, axes.split()), (False, [axes])):
        first, last = Column("parameter", no_wrap=True), Column("numbers", no_wrap=True)
        table, out = Table(first, "axes of one", last), io.StringIO()
        table.add_row(name, axes, number)
        narrow = Console(file=out, width=20, highlight=False, color_system=None)
        console.show_whole(narrow, table, wraps=wraps)
        assert narrow.width == 20
        assert all(piece in out.getvalue() for piece in (name, *pieces, number)), out.getvalue()
        assert (axes in out.getvalue()) != wraps


def test_a_table_of_hundreds_of_samples_is_not_cut():
    numbers, out = " ".join(f"{number:.4f}" for number in range(512)), io.StringIO()
    narrow = Console(file=out, width=80, highlight=False, color_system=None)
    console.show_whole(narrow, console.terminal_table([["value"], [numbers]], no_wrap=True))
    assert numbers in out.getvalue()


def test_the_line_of_a_step_repeats_no_evaluation_of_an_earlier_one(capsys):
    display = console.Display(9, 0, active=True)
    display.evaluated(0, {"accuracy": 0.25, "accuracy/low": 0.125, "accuracy/high": 0.5})
    display.step(
        1,
        {"reward": 0.5, "live_groups": 1, "grad_norm": 0.1, "time/step": 2, "loss": 0.0},
    )
    evaluated, stepped = capsys.readouterr().out.splitlines()
    assert evaluated == "evaluated at step 0: accuracy 0.250 (95%: 0.125 to 0.500)"
    assert stepped == "   1 reward  0.500 live 100% gradient 1.0e-01 loss  0.0e+00 time 2.0s"


def test_no_line_of_a_log_is_broken(capsys):
    display = console.Display(9, 0, active=True)
    assert display.console.width < 110  # of a pipe
    values = {"accuracy": 0.25, "accuracy/low": 0.125, "accuracy/high": 0.5}
    display.evaluated(20, values | {f"pass@{k}": 0.5 for k in (1, 4, 16, 64)} | {"maj@64": 0.75})
    display.step(
        12345,
        {"reward": -123.5, "live_groups": 1, "grad_norm": 0.1, "time/step": 12345, "loss": -0.1},
    )
    display.say("/".join(["a folder"] * 30))
    evaluated, stepped, place = capsys.readouterr().out.splitlines()
    assert evaluated.endswith("pass@64 0.500, maj@64 0.750")
    assert stepped.endswith(" time 12345.0s")
    assert place.count("a folder") == 30
