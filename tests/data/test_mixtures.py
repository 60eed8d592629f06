"""Several sources in one stream: their proportions, columns, names, metrics and errors."""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_run
from minimal_config import problems, read

from jaxgrpo.cli.sampling import without_columns
from jaxgrpo.config.keys import DataKeys, EvalKeys, PartKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import prompts
from jaxgrpo.data.sources import Mixture
from jaxgrpo.rollout.policies import build_policy
from jaxgrpo.rollout.selection import BLOCK, _orders, row_of
from jaxgrpo.training import fingerprints, inputs, loop

MIXTURE = Mixture(("a", "b", "c"), (2.0, 1.0, 0.5), (30, 7, 50))
SEED = 3


def stream(mixture: Mixture, count: int, first: int = 0) -> np.ndarray:
    return row_of(np.arange(first, first + count), sum(mixture.sizes), SEED, mixture)


def test_sources_are_drawn_in_proportion_to_their_weights_from_the_first_prompt_on():
    source = MIXTURE.source_numbers(stream(MIXTURE, 3 * BLOCK))
    for number, weight in enumerate(MIXTURE.weights):
        drawn, share = np.cumsum(source == number), weight / sum(MIXTURE.weights)
        assert np.abs(drawn - share * np.arange(1, len(drawn) + 1)).max() <= 2
    pair = Mixture(("a", "b"), (2.0, 1.0), (9, 9))
    assert pair.source_numbers(stream(pair, 6)).tolist() == [0, 1, 0, 0, 1, 0]


def test_each_source_has_epochs_of_its_own_in_orders_of_their_own():
    rows = stream(MIXTURE, 2000)
    small = rows[MIXTURE.source_numbers(rows) == 1] - 30
    epochs = small[: 7 * (len(small) // 7)].reshape(-1, 7)
    np.testing.assert_array_equal(np.sort(epochs, 1), np.tile(np.arange(7), (len(epochs), 1)))
    assert len({tuple(epoch) for epoch in epochs}) > 10
    twins = Mixture(("a", "b"), (1.0, 1.0), (40, 40))
    rows = stream(twins, 80)
    assert (rows[rows < 40] != rows[rows >= 40] - 40).any()


def test_the_order_of_an_epoch_of_a_source_is_made_once_however_many_sources_there_are():
    mixture = Mixture(tuple("abcdef"), (1.0,) * 6, (2000, 2100, 2200, 2300, 2400, 900))
    _orders.cache_clear()
    for first in range(0, 2 * BLOCK, 64):
        stream(mixture, 64, first)
    orders: Any = _orders(mixture.sizes, SEED)
    assert [order.cache_info().misses for order in orders] == [1, 1, 1, 1, 1, 2]


def test_the_order_depends_on_the_seed_alone_and_one_source_is_the_plain_stream():
    rows = stream(MIXTURE, 2 * BLOCK + 5)
    places = np.array([BLOCK, 7, BLOCK - 1, 2 * BLOCK + 4])
    assert row_of(places, 87, SEED, MIXTURE).tolist() == rows[places].tolist()
    assert (row_of(np.arange(50), 87, SEED + 1, MIXTURE) != rows[:50]).any()
    alone = Mixture(("a",), (0.3,), (11,))
    np.testing.assert_array_equal(stream(alone, 9000), row_of(np.arange(9000), 11, SEED))


def test_a_policy_that_leaves_rows_out_reads_the_rows_of_the_mixture():
    policy = build_policy({"use": "difficulty_band"}, {"r": 1.0}, MIXTURE)
    state = policy.init(87, SEED)
    state["rate"][:30] = 1.0  # the first source is solved
    ordinals = np.concatenate([policy.select(state, 60 * step, 8) for step in range(20)])
    assert (row_of(ordinals, 87, SEED, MIXTURE) >= 30).all()


def test_rows_keep_their_columns_and_kinds_must_agree():
    first, second = [{"prompt": "1", "answer": "a", "x": 1}], [{"prompt": "2", "y": 2}]
    assert prompts.join({"a": first, "b": second}, ["a"]) == [
        {"prompt": "1", "answer": "a", "x": 1, "y": None},
        {"prompt": "2", "answer": None, "x": None, "y": 2},
    ]
    with pytest.raises(InputError, match=r"b, row 0: prompts of several kinds: a list here"):
        prompts.join({"a": first, "b": [{"prompt": [{"role": "user", "content": "2"}]}]}, ["a"])
    third = [{"prompt": "3", "answer": 7}, {"prompt": "3", "answer": "7 cm"}]
    assert [row["answer"] for row in prompts.join({"a": first, "b": third}, ["a"])[1:]] == [
        7,
        "7 cm",
    ]
    with pytest.raises(InputError, match=r"b, row 0: answers of several kinds: a number here"):
        prompts.join({"a": first, "b": third[:1]}, ["a", "b"])


def test_only_entries_that_name_a_column_of_answers_have_it_checked(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, answer in zip(paths, ("2", 2), strict=True):
        path.write_text(json.dumps({"prompt": "1+1", "answer": answer}) + "\n")
    named, unnamed = PartKeys(path=str(paths[0])), PartKeys(path=str(paths[1]), answer="")
    rows, _ = inputs.load_rows(DataKeys(path=(named, unnamed)))
    assert [row["answer"] for row in rows] == ["2", 2]


def test_a_source_that_loses_all_its_rows_is_named():
    assert MIXTURE.keeping([0, 31, 32, 86]).sizes == (1, 2, 1)
    with pytest.raises(InputError, match="no prompt of 'b' fits: all 7 are longer"):
        MIXTURE.keeping([0, 86])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('{ path = "none.jsonl" }', "data.path[1].path = "),
        ('{ path = "task:arithmetic:train", name = "b", weight = 0 }', "expected above 0"),
        ('{ path = "task:arithmetic:train", name = "b", weight = "2" }', "expected a number"),
        ('{ path = "task:arithmetic:train", wieght = 2 }', "did you mean data.path[1].weight?"),
        ("{ weight = 2.0 }", "data.path[1].path: missing"),
        ('{ path = "task:arithmetic:test" }', "'arithmetic' is the name of data.path[0] too"),
        ('{ path = "task:confidence:train", split = "x" }', "data.path[1].split: "),
        (
            '{ path = "task:confidence:train", prompt = "{" }',
            "data.path[1].prompt = '{': the brace at character 0 has no partner",
        ),
    ],
)
def test_a_mistake_in_a_mixture_is_one_problem(entry, message):
    (problem,) = problems(f'data.path=[{{ path = "task:arithmetic:train" }}, {entry}]')
    assert message in problem


def test_messages_about_an_entry_name_its_keys(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"text": "1+1", "level": null}\n')

    def refused(message: str, evaluated: EvalKeys | None = None, **changes: Any) -> None:
        part = PartKeys(path=str(tmp_path), **{"prompt": "text", "answer": "", **changes})
        data = DataKeys(path=(PartKeys(path="task:sums:train"), part))
        source = inputs.eval_source(evaluated, data) if evaluated else None
        with pytest.raises(InputError, match=message):
            inputs.load_rows(data, source)

    refused(r"several splits: set data.path\[1\].split to one of t")
    refused(r"Set data.path\[1\].split to one of them", split="val")
    wrong: Any = {"split": "train", "prompt": "question"}
    refused(r"columns there: text, level; set data.path\[1\].prompt to one$", **wrong)
    refused(r"set data.path\[1\].answer to one \(or to \"\"", split="train", answer="gold")
    refused(r"\(null\) where data.path\[1\].prompt needs a", split="train", prompt="{level}")
    held_out = EvalKeys(data=str(tmp_path), split="test")
    refused(r"set data.path\[1\].prompt to one$", held_out, prompt="question")


def test_an_evaluation_on_a_source_of_a_list_is_read_as_its_entry():
    hub = PartKeys(path="openai/gsm8k", prompt="question")
    main = dataclasses.replace(hub, subset="main", split="train", revision="v1")
    socratic = dataclasses.replace(hub, subset="socratic", name="by questions")
    task = PartKeys(path="task:arithmetic:train?size=8", prompt="{prompt} Think.")
    data = DataKeys(path=(main, task), answer="gold")

    def source(data, name, subset=None):
        return inputs.eval_source(EvalKeys(data=name, subset=subset, split="test"), data)

    same = source(data, "openai/gsm8k")
    assert same[:4] == ("openai/gsm8k", "main", "test", "v1")
    assert same.columns == ("question", "gold")
    assert source(data, "owner/other")[1:4] == (None, "test", None)
    assert source(data, "owner/other").columns is None
    assert source(data, "task:arithmetic:test").columns == ("{prompt} Think.", "answer")
    assert source(data, "task:sums:test").columns == ("prompt", "answer")
    several = DataKeys(path=(main, socratic))
    assert source(several, "openai/gsm8k", "main")[1:4] == ("main", "test", "v1")
    assert source(several, "openai/gsm8k")[1:4] == (None, "test", None)
    assert inputs.eval_source(EvalKeys(data="openai/gsm8k"), data, has_rows=True).columns is None


def test_prompts_that_are_sampled_have_the_column_prompt_also_where_they_are_of_an_entry():
    entry = 'data.path=[{ path = "owner/name", prompt = "question", answer = "gold" }]'
    config = read(entry, "eval.data=owner/name", "data.answer=")
    assert inputs.eval_source(config.eval, config.data).columns == ("question", "gold")
    config = dataclasses.replace(config, data=without_columns(config.data))
    assert inputs.eval_source(config.eval, config.data).columns == ("prompt", "")


def test_keys_of_one_source_and_a_list_of_texts_are_refused():
    entries = 'data.path=[{ path = "task:arithmetic:train" }]'
    (problem,) = problems(entries, "data.split=train")
    assert problem.endswith("data.path is a list; write it into the entries that it is for")
    (problem,) = problems('data.path=["a.jsonl", "b.jsonl"]')
    assert 'expected a list of tables, data.path = [{ path = "..." }]' in problem


def config(
    folder: Path,
    steps: int = 4,
    weight: float = 3.0,
    last: str = "19+19=",
    directory: str = "r",
) -> Any:
    hard = folder / "hard.jsonl"
    rows = [{"question": f"{n}+{n}=", "solution": str(2 * n), "level": n} for n in range(10, 20)]
    rows[-1]["question"] = last
    hard.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = [
        {"path": "task:arithmetic:train", "weight": weight},
        {"path": str(hard), "prompt": "{question}", "answer": "solution"},
    ]
    keys = {"data.path": parts, "rewards": [{"use": "arithmetic"}], "run.samples_every": 1}
    keys |= {"train.steps": steps}
    return small_run.config(folder / directory, **keys)


@pytest.mark.full
@pytest.mark.slow
def test_a_run_on_a_mixture_reports_its_sources_and_resumes_on_the_same_rows(tmp_path):
    uninterrupted = loop.train(config(tmp_path, directory="whole"))
    for line in uninterrupted.metrics:
        assert line["prompts/source_arithmetic"] == 0.75
        assert line["prompts/source_hard"] == 0.25
        mean = 0.75 * line["reward/source_arithmetic"] + 0.25 * line["reward/source_hard"]
        assert mean == pytest.approx(line["reward"])
    counts = collections.Counter(row["source"] for row in uninterrupted.samples)
    assert counts == {"arithmetic": 24, "hard": 8}
    loop.train(config(tmp_path, steps=2))
    again = loop.train(config(tmp_path), resume="auto")
    assert again.summary["parameter_hash"] == uninterrupted.summary["parameter_hash"]


@pytest.mark.full
def test_rows_of_every_source_and_weights_are_compared_between_processes_and_starts(tmp_path):
    def compared(**changes: Any) -> tuple[str, str]:
        read_inputs = inputs.read_inputs(config(tmp_path, **changes), None, None, None)
        read = read_inputs.prompts
        assert [len(read.rows), read.rows[-1]["level"], read.rows[0]["solution"]] == [
            3082,
            19,
            None,
        ]
        between = fingerprints.row_facts(read_inputs._replace(held_out=None))
        return between["data.path"], fingerprints.describe_rows(read.rows)

    first = compared()
    assert first[0].endswith("mixed as (('arithmetic', 'hard'), (3.0, 1.0), (3072, 10))")
    assert compared() == first
    heavier = compared(weight=2.0)
    assert (heavier[0] != first[0], heavier[1]) == (True, first[1])
    changed = compared(last="20+20=")
    assert (changed[0] != first[0], changed[1] != first[1]) == (True, True)
