"""`jaxgrpo diff`: what differs between two runs, in whatever style their configs are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pictures import legends, pictures

from jaxgrpo.cli.main import main
from jaxgrpo.training.records.folder import RunFolder

REWARDS = {
    "inline": 'rewards = [{ use = "mine.py:right" }, { use = "math", weight = 2.0 }]',
    "tables": '[[rewards]]\nname = "right"\nuse = "mine.py:right"\n'
    '[[rewards]]\nweight = 2.0\nuse = "math"\nname = "math"',
}


def write(folder: Path, rewards: str = "inline", steps: int = 3, **changes: str) -> str:
    """A run that was killed after some steps; its path."""
    keys = {"optimizer": "learning_rate = 1e-4", "data": 'path = "rows"', **changes}
    tables = "".join(f"[{name}]\n{line}\n" for name, line in keys.items())
    config = f'{REWARDS[rewards]}\n{tables}[run]\ndir = "{folder}"\n'
    with RunFolder(folder) as run:
        run.write_config(config)
        run.write_metrics(0, {"eval/accuracy": 0.25, "eval/accuracy/low": 0.2})
        for step in range(1, steps + 1):
            values = {"reward": step / 4, "grad_norm": 2.0, "kl": None, "time/sample": 1.0}
            run.write_metrics(step, values | {"groups/all_fail": 0.5, "groups/mixed": 0.5})
    return str(folder)


def lines(text: str) -> list[list[str]]:
    """The cells of each row of the tables."""
    rows = [line.strip("│┃").replace("┃", "│").split("│") for line in text.splitlines()]
    return [[cell.strip() for cell in row] for row in rows]


def test_two_styles_of_the_same_rewards_are_the_same_config(tmp_path, capsys):
    first, second = write(tmp_path / "a"), write(tmp_path / "b", "tables")
    assert main(["diff", first, second]) == 0
    assert "Both runs have the same config and the same own code." in capsys.readouterr().out


def test_the_keys_that_differ_are_shown_with_both_values_and_no_other(tmp_path, capsys):
    first = write(tmp_path / "a", train="seed = 1")
    second = write(
        tmp_path / "b", "tables", optimizer="learning_rate = 3e-4", data=f'path = "{"x" * 200}"'
    )
    for folder, text in ((first, "def right(): return 1"), (second, "def right(): return 2")):
        (Path(folder) / "code").mkdir()
        (Path(folder) / "code" / "mine.py").write_text(text)
        (Path(folder) / "code" / "__pycache__").mkdir()
    assert main(["diff", first, second]) == 0
    output = capsys.readouterr().out
    rows = lines(output.partition("The last number")[0])
    keys = [row[0] for row in rows if len(row) == 3 and row[0]]
    assert keys == ["key", "optimizer.learning_rate", "data.path", "train.seed", "code/mine.py"]
    assert ["optimizer.learning_rate", "0.0001", "0.0003"] in rows
    assert ["train.seed", "1", "–"] in rows
    assert output.count("x") >= 200, "no value is cut"


def test_the_last_metrics_stand_side_by_side_with_their_difference(tmp_path, capsys):
    first, second = write(tmp_path / "a", steps=3), write(tmp_path / "b", steps=1)
    assert main(["diff", first, second]) == 0
    rows = lines(capsys.readouterr().out)
    assert ["", "a", "b", "difference"] in rows
    assert ["finished steps", "3", "1", ""] in rows
    assert ["reward", "0.75", "0.25", "-0.5"] in rows
    names = [row[0] for row in rows]
    assert names.index("eval/accuracy") < names.index("reward")
    assert not {"kl", "eval/accuracy/low"} & {*names}, "no number, or the end of an interval"


def test_no_password_is_printed_or_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    url = 'path = ["https://me:{}@host/a:b,c@d.jsonl"]'
    first = write(tmp_path / "a", data=url.format("secret"))
    second = write(tmp_path / "b", data=url.format("another"))
    page = tmp_path / "d.html"
    assert main(["diff", first, second, "--out", str(page)]) == 0
    assert main(["diff", first, second, "--json"]) == 0
    text = capsys.readouterr().out + page.read_text()
    assert "secret" not in text
    assert "another" not in text
    assert text.count("https://me:...@host") == 6, "that they differ is shown"


def test_a_name_in_brackets_is_no_markup(tmp_path, capsys):
    first, second = write(tmp_path / "b"), write(tmp_path / "a", train="seed = 1")
    moved = Path(first).rename(tmp_path / "[b]a")  # a run does not begin in such a folder
    assert main(["diff", str(moved), second]) == 0
    rows = lines(capsys.readouterr().out)
    assert ["key", "[b]a", "a"] in rows
    assert ["", "[b]a", "a", "difference"] in rows


def test_the_page_draws_every_chart_with_the_curves_of_both(tmp_path, capsys):
    first, second = write(tmp_path / "first run"), write(tmp_path / "$second_", "tables", steps=1)
    out = tmp_path / "d.html"
    assert main(["diff", first, second, "--out", str(out)]) == 0
    drawn = pictures(out.read_text())
    titles = ("Reward", "Evaluation", "Groups", "Gradient norm", "Seconds per step")
    assert len(drawn) == len(titles)
    for svg, title in zip(drawn, titles, strict=True):
        assert title in svg
        assert "first run" in svg
        assert "$second_" in svg
        assert legends(svg) == (1, 0)
    assert "all fail, first run" in drawn[2]
    main(["diff", first, second, "--out", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_bytes() == out.read_bytes()


def test_a_picture_holds_them_too(tmp_path):
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert main(["diff", first, second, "--out", str(tmp_path / "d.png")]) == 0
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_the_same_name_are_called_by_their_paths(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("x", "y"):
        Path(folder).mkdir()
        write(tmp_path / folder / "run")
    assert main(["diff", "x/run", "y/run"]) == 0
    assert ["", "x/run", "y/run", "difference"] in lines(capsys.readouterr().out)


def test_the_numbers_are_one_document(tmp_path, capsys):
    first = write(tmp_path / "a", train="seed = 1")
    second = write(tmp_path / "b", "tables", steps=1, data='path = "other"')
    (Path(first) / "code").mkdir()
    (Path(first) / "code" / "mine.py").write_text("def right(): return 1")
    assert main(["diff", first, second, "--json", "--out", str(tmp_path / "d.html")]) == 0
    streams = capsys.readouterr()
    assert streams.err == f"written: {tmp_path / 'd.html'}\n"
    document = json.loads(streams.out)
    code = document["config"].pop("code/mine.py")
    assert code[0].startswith("crc32 ")
    assert code[1] is None
    assert document["config"] == {"data.path": ["rows", "other"], "train.seed": [1, None]}
    assert (document["runs"], document["steps"]) == (["a", "b"], [3, 1])
    assert document["metrics"]["reward"] == {"last": [0.75, 0.25], "difference": -0.5}
    assert not {"kl", "eval/accuracy/low"} & document["metrics"].keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "./a"), "this is one run twice; give two run folders"),
        (("a", "none"), "none: there is no such folder"),
        (("a", "b", "--out", "d.svg"), "--out d.svg: name a file that ends in .html or .png"),
        (("a", "b", "--out", "no/d.png"), "there is no folder no; make it first"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write(tmp_path / name)
    assert main(["diff", *words]) == 2
    assert message in capsys.readouterr().err
