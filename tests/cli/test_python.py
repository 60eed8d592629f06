"""jg.evaluate, jg.probe and jg.sample: what the commands give, from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tables

import jaxgrpo as jg
from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError

RATES = (0.25, 0.4, 0.75, 1.0)
SIZES: dict[str, Any] = {"rollout": {"max_prompt_tokens": 1, "max_completion_tokens": 2}}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("python")
    tables.write_model(directory / "model", RATES)
    tables.write_data(directory / "data.jsonl", len(RATES))
    return directory


@pytest.fixture
def call_options(folder) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """(model, what Python asks, the same words of a command)"""
    data = str(folder / "data.jsonl")
    words = ("--data", data, "-n", "4", "--num-prompts", "3", "--set", *tables.GEOMETRY)
    return str(folder / "model"), {"data": data, "samples": 4, "prompts": 3, **SIZES}, words


def command(capsys: Any, *words: str) -> Any:
    """The JSON that a command prints."""
    capsys.readouterr()  # what calls from Python printed
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def as_json(value: Any) -> Any:
    """As JSON holds it: no NaN, lists and texts."""
    from jaxgrpo.training.records.folder import plain

    return json.loads(json.dumps(plain(value)))


def test_evaluate_gives_the_numbers_of_the_command(call_options, capsys):
    model, options, words = call_options
    options = {**options, "data": Path(options["data"])}
    numbers = jg.evaluate(model, scorer=tables.REWARD, **options)
    assert as_json(numbers) == command(capsys, "eval", model, "--scorer", tables.REWARD, *words)
    assert numbers["accuracy"] == pytest.approx(1 / 3)  # the likeliest answers: n, n, y
    assert numbers["pass@1/low"] <= numbers["pass@1"] <= numbers["pass@1/high"]


@pytest.mark.full
def test_probe_gives_the_numbers_of_the_command(call_options, capsys):
    model, options, words = call_options
    options = {**options, "data": Path(options["data"])}
    numbers = jg.probe(model, reward=tables.REWARD, level=0.9, **options)
    words = ("--level", "0.9", "--reward", tables.REWARD, *words)
    assert as_json(numbers) == command(capsys, "probe", model, *words)
    assert (numbers["prompts"], numbers["samples"], numbers["level"]) == (3, 4, 0.9)
    assert {"about", "says", "why"} <= numbers["advice"][0].keys()


@pytest.mark.full
def test_sample_gives_the_rows_of_the_command(call_options, folder, tmp_path):
    model, _, _ = call_options
    prompts = list(tables.prompts(len(RATES)))
    rows = jg.sample(model, prompts, samples=3, **SIZES)
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    out = tmp_path / "s.jsonl"
    words = ("--prompts", str(tmp_path / "p.txt"), "--out", str(out), "-n", "3")
    assert main(["sample", model, *words, "--set", *tables.GEOMETRY]) == 0
    assert as_json(rows) == [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows[::3]] == prompts
    assert [row["completion"] for row in rows[-3:]] == ["y"] * 3, "always right"


@pytest.mark.full
def test_functions_and_rows_of_python_are_taken_as_they_are(call_options):
    model, options, _ = call_options
    rows = [{"prompt": prompt, "answer": "y"} for prompt in tables.prompts(3)]
    judged: list[Any] = []

    def wrong(completions, answer, **columns):
        judged.extend(answer)
        return [float(text != right) for text, right in zip(completions, answer, strict=True)]

    options = {**options, "data": rows}
    votes = {**options, "eval": {"confidence": True}}  # which need no eval.data
    right, turned = (
        jg.evaluate(model, scorer=scorer, **votes) for scorer in (tables.REWARD, wrong)
    )
    assert turned["pass@1"] == pytest.approx(1 - right["pass@1"])
    area = "deepconf/mean/auroc"
    assert turned[area] == pytest.approx(1 - right[area])
    assert {*judged} == {"y"}
    assert len(judged) == 3 * (4 + 1), "what fills up a batch of four devices is not judged"
    numbers = jg.probe(model, reward=wrong, **options)
    assert (numbers["reward"], numbers["data"]) == ("wrong", "rows")


MISSPELT: dict[str, Any] = {"rolout": {}}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: jg.evaluate(model), "nothing to evaluate on"),
        (lambda model: jg.evaluate(model, data=[{"prompt": "a"}]), "nothing judges the answers"),
        (lambda model: jg.probe(model), "no prompts to probe with"),
        (lambda model: jg.sample(model, "a"), "give a list of prompts"),
        (lambda model: jg.sample(model, ["a"], samples=0), "give 1 or more"),
        (lambda model: jg.sample(model, ["a"], **MISSPELT), "did you mean rollout?"),
        (lambda model: jg.evaluate("none", data=[{"prompt": "a"}], scorer="math"), "none"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_words_of_the_command(folder, call, message):
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        call(str(folder / "model"))
