"""Rows from CSV and Parquet files, folders, the hub and Python."""

from __future__ import annotations

import datetime
import errno
import json
from pathlib import Path

import datasets
import minimal_config
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.prompts import load_rows
from jaxgrpo.data.sources import Source, from_python, read

ROWS = [{"question": "1+1", "gold": "2"}, {"question": "ü\n", "gold": "0"}]


def as_parquet(frame):
    """A DataFrame as the bytes of a file; what is read of it has arrays for lists."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pandas(frame), sink)
    return sink.getvalue()


def read_rows(located):
    return [row for _, row in located]


def test_a_csv_file_gives_named_columns_as_they_are_written_and_others_as_numbers(tmp_path):
    file = tmp_path / "rows.csv"
    text = '\ufeffq,gold,level,when\n"2,5\n+ 1",0042,3,\n"7",NA,4,2020-01-01\n'
    file.write_text(text, encoding="utf-8")
    first, second = load_rows(Source(str(file)), "{q} =", "gold")
    assert (first["q"], first["gold"], first["level"]) == ("2,5\n+ 1", "0042", 3)
    assert (second["q"], second["gold"], second["level"]) == ("7", "NA", 4)
    assert (first["when"], second["prompt"], second["answer"]) == (None, "7 =", "NA")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"q,a\nx,1\ny\n",
            r"rows.csv: .*Row #3: Expected 2 columns, got 1: y \(rows count",
        ),
        (b"q,a\nx,1\n\xff,2\n", r"rows.csv: .*column #0: Row #3: .*invalid UTF8"),
        (b"q,q\nx,1\n", r"rows.csv: column 'q' stands twice: rename one"),
        (b"", r"rows.csv: Empty CSV file: mend it"),
        (b"q,\xff\nx,1\n", r"rows.csv: 'utf-8' codec can't decode .*: mend it"),
        (b"q,a\n", r"data.path = '.*rows.csv' holds no rows"),
        (
            b"prompt;a\nx;1\n",
            r"rows.csv, row 0: no column 'q'; columns there: prompt;a; set data.prompt to one "
            r'\(or to "" where an environment says what is asked\), '
            r"or set data.delimiter to what is between the columns",
        ),
    ],
)
def test_a_bad_csv_file_is_named_with_its_row_or_column(tmp_path, content, message):
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_rows(Source(str(tmp_path / "rows.csv")), "q", "")


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_the_columns_of_a_csv_file_may_have_another_character_between_them(tmp_path, mark):
    file = tmp_path / "rows.csv"
    file.write_text(f"q{mark}gold\n1,5+1{mark}2,5\n", encoding="utf-8")
    (row,) = load_rows(Source(str(file), delimiter=mark), "q", "gold")
    assert (row["prompt"], row["answer"]) == ("1,5+1", "2,5")


def test_a_parquet_file_gives_its_types_and_conversations(tmp_path):
    file = tmp_path / "rows.parquet"
    prompt = [
        {"role": "system", "content": "Be brief.", "name": None},
        {"role": "user", "content": "1+1?", "name": "ann"},
    ]
    pq.write_table(pa.Table.from_pylist([{"prompt": prompt, "answer": 2}]), file)
    (row,) = load_rows(Source(str(file)), "prompt", "answer")
    assert row["answer"] == 2
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, prompt[1]]


def test_a_damaged_parquet_file_is_said(tmp_path):
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(InputError, match=r"rows.parquet: .*Parquet.*: mend it"):
        read(Source(str(tmp_path / "rows.parquet")))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            pa.array([5 * 10**17], pa.timestamp("us")),
            "OverflowError: date value out of range",
        ),  # year 17814
        (
            pa.array([1], pa.timestamp("us", "Nowhere/City")),
            "(UnknownTimeZoneError|ArrowInvalid): .+",  # with pytz, without
        ),
    ],
)
def test_a_value_that_python_cannot_hold_is_named_with_its_column(tmp_path, values, message):
    file = tmp_path / "data" / "rows.parquet"
    file.parent.mkdir()
    pq.write_table(pa.table({"q": ["1+1"], "when": values}), file)
    with pytest.raises(InputError, match=rf"column 'when' cannot be read \({message}\): write it"):
        read(Source(str(file)))
    with pytest.raises(InputError, match=r"data.path = .*: a value cannot be read .*: write it"):
        read(Source(str(file.parent)))


def test_bytes_are_no_answer(tmp_path):
    pq.write_table(pa.table({"q": ["1+1"], "gold": [b"2"]}), tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"row 0: answer b'2' holds bytes: write it as text"):
        load_rows(Source(str(tmp_path / "rows.parquet")), "q", "gold")


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (datetime.date(2024, 1, 2), "2024-01-02 is a date"),
        (datetime.datetime(2024, 1, 2, 3), "2024-01-02 03:00:00 is a datetime"),
        (datetime.time(3), "03:00:00 is a time"),
        (datetime.timedelta(hours=3), "3:00:00 is a timedelta"),
        ([datetime.date(2024, 1, 2)], "2024-01-02 is a date"),
    ],
)
def test_dates_and_times_are_no_answers(tmp_path, answer, name):
    rows = [{"q": "when?", "gold": None}, {"q": "when?", "gold": answer}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for source in (rows, Source(str(tmp_path / "rows.parquet"))):
        with pytest.raises(InputError, match=f"row 1: answer {name}, and nothing says how its"):
            load_rows(source, "q", "gold")
    with pytest.raises(InputError, match="row 0: answer 2024-01-02 is a datetime64, and nothing"):
        load_rows([{"q": "when?", "gold": np.datetime64("2024-01-02")}], "q", "gold")


def test_a_text_that_a_folder_takes_for_a_date_is_refused_as_answer(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"q": "when?", "gold": "2024-01-02"}\n')
    (row,) = load_rows(Source(str(tmp_path / "train.jsonl")), "q", "gold")
    assert row["answer"] == "2024-01-02"
    with pytest.raises(InputError, match=r"answer 2024-01-02 00:00:00 is a datetime.* name the .j"):
        load_rows(Source(str(tmp_path)), "q", "gold")


def test_a_row_of_a_csv_file_may_be_of_any_length(tmp_path):
    (tmp_path / "rows.csv").write_text(f"q,gold\n{'x' * 3_000_000},2\n1+1,2\n")
    first, second = load_rows(Source(str(tmp_path / "rows.csv")), "q", "gold")
    assert (len(first["prompt"]), second["prompt"]) == (3_000_000, "1+1")


@pytest.fixture
def folder(tmp_path):
    """A folder of two splits."""
    data = tmp_path / "data"
    data.mkdir()
    for name, part in (("train", ROWS), ("test", ROWS[1:])):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return data


def test_a_folder_gives_the_split_asked_for(folder):
    assert read_rows(read(Source(str(folder), split="train"))) == ROWS
    assert read_rows(read(Source(str(folder), split="train[1:]"))) == ROWS[1:]
    (folder / "train.jsonl").unlink()
    assert read_rows(read(Source(str(folder)))) == ROWS[1:]


def test_a_folder_may_be_called_as_a_file_is(tmp_path):
    folder = tmp_path / "rows.parquet"  # as Spark writes it
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "part-0.parquet")
    assert read_rows(read(Source(str(folder)))) == ROWS
    config = minimal_config.read(f"data.path={folder}", "data.split=train")
    assert config.data.path == str(folder)
    (problem,) = minimal_config.problems(f"data.path={folder}", "data.revision=main")
    assert problem.startswith("data.revision: ")


@pytest.mark.parametrize("name", ["../secret.txt", "{above}/secret.txt"])
def test_a_folder_whose_description_names_files_elsewhere_is_refused(folder, name):
    (folder.parent / "secret.txt").write_text("a\nb\n")
    names = f"configs:\n- config_name: default\n  data_files: {name}\n"
    (folder / "README.md").write_text(f"---\n{names.format(above=folder.parent)}---\n")
    with pytest.raises(InputError, match=r"its README.md names .*secret.txt, which is not in the"):
        read(Source(str(folder)))


def test_a_saved_data_set_that_names_files_elsewhere_is_refused(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "secret")
    (arrow,) = (tmp_path / "secret").glob("*.arrow")
    datasets.Dataset.from_list(ROWS[1:]).save_to_disk(tmp_path / "one")
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    for name in (f"../secret/{arrow.name}", str(arrow)):
        state["_data_files"] = [{"filename": name}]
        (tmp_path / "one" / "state.json").write_text(json.dumps(state))
        with pytest.raises(
            InputError, match=r"or state.json names .*secret.*, which is not in the"
        ):
            read(Source(str(tmp_path / "one")))
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "dataset_dict.json").write_text('{"splits": ["../secret"]}')
    with pytest.raises(InputError, match=r"dataset_dict.json or state.json names .*secret"):
        read(Source(str(tmp_path / "several")))
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    assert read_rows(read(Source(str(tmp_path / "link")))) == ROWS


def test_a_folder_written_by_save_to_disk_gives_its_rows(tmp_path):
    datasets.DatasetDict({"a": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    assert read_rows(read(Source(str(tmp_path / "saved")))) == ROWS
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert read_rows(read(Source(str(tmp_path / "one")))) == ROWS


def test_what_a_saved_data_set_does_not_have_is_refused(tmp_path):
    train = datasets.Dataset.from_list(ROWS, split=datasets.Split.TRAIN)
    for name, data_set in {"one": train, "several": datasets.DatasetDict({"a": train})}.items():
        data_set.save_to_disk(tmp_path / name)
        with pytest.raises(InputError, match=r"save_to_disk wrote, has no subsets: leave data.sub"):
            read(Source(str(tmp_path / name), subset="main"))
    assert read_rows(read(Source(str(tmp_path / "one"), split="train"))) == ROWS
    with pytest.raises(InputError, match=r"of the split train: leave eval.split out"):
        read(Source(str(tmp_path / "one"), split="test", key="eval.data"))


@pytest.mark.parametrize("split", ["train[:50%]", "train[1:]", "test+train[-1:]", "test"])
def test_a_part_of_what_was_saved_is_that_of_its_files(folder, tmp_path, split):
    data_sets = datasets.load_dataset(str(folder))
    data_sets.save_to_disk(tmp_path / "saved")
    expected = read_rows(read(Source(str(folder), split=split)))
    assert expected
    assert read_rows(read(Source(str(tmp_path / "saved"), split=split))) == expected
    assert read_rows(from_python(data_sets, split)) == expected


def test_parts_of_splits_that_are_not_there_are_refused(tmp_path):
    train = datasets.Dataset.from_list(ROWS, split=datasets.Split.TRAIN)
    train.save_to_disk(tmp_path / "one")
    assert read_rows(read(Source(str(tmp_path / "one"), split="train[:1]"))) == ROWS[:1]
    with pytest.raises(
        InputError, match=r"data.split = 'test\[:1\]' cannot be read \(Unknown split"
    ):
        read(Source(str(tmp_path / "one"), split="test[:1]"))
    with pytest.raises(
        InputError, match=r"'a\[x\]' cannot be read \(Unrecognized instruction form"
    ):
        from_python(datasets.DatasetDict({"a": train, "b": train}), "a[x]")
    with pytest.raises(InputError, match=r"no split 'a\[:1\]': set data.split to one of a, b"):
        from_python({"a": ROWS, "b": ROWS}, "a[:1]")


def test_a_split_that_is_not_there_or_not_named_is_said_with_those_there(folder, tmp_path):
    with pytest.raises(InputError, match=r"several splits: set eval.split to one of train, test"):
        read(Source(str(folder), key="eval.data"))
    with pytest.raises(InputError, match=r"Unknown split \"val\".*'train', 'test'.*data.split"):
        read(Source(str(folder), split="val"))
    with pytest.raises(InputError, match=r"BuilderConfig 'x' not found.* Set data.subset to one"):
        read(Source(str(folder), subset="x", split="train"))
    datasets.DatasetDict({"a": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=r"no split 'b': set data.split to one of a"):
        read(Source(str(tmp_path / "saved"), split="b"))


def test_a_cache_that_takes_no_files_is_named(folder, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("failed") from OSError(errno.EROFS, "Read-only file system", "/c/a")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(InputError, match=r"data': /c/a: Read-only file system: set HF_DATASETS_C"):
        read(Source(str(folder)))


def test_a_folder_that_holds_no_rows_is_said_in_one_message(tmp_path):
    with pytest.raises(InputError, match=r"is no folder of rows: .*doesn't contain any data files"):
        read(Source(str(tmp_path)))
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n{"a":\n')
    with pytest.raises(InputError, match=r"is no folder of rows: .*JSON parse error.*row 1"):
        read(Source(str(tmp_path)))


def test_a_source_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no.jsonl' does not exist \(looked for .*no.jsonl\)"):
        read(Source(str(tmp_path / "no.jsonl")))
    with pytest.raises(InputError, match=r"does not exist: give a .jsonl, .csv or .parquet file, "):
        read(Source(str(tmp_path / "rows")))
    (tmp_path / "rows.txt").touch()
    with pytest.raises(InputError, match=r"is no file of rows: give a \.jsonl"):
        read(Source(str(tmp_path / "rows.txt")))
    with pytest.raises(InputError, match="arithmetic"):
        read(Source("task:arithmetics:train"))


def test_rows_from_python_are_lists_of_dicts_or_data_sets():
    assert read_rows(from_python(ROWS)) == ROWS
    assert read_rows(from_python(datasets.Dataset.from_list(ROWS))) == ROWS
    splits = {"a": datasets.Dataset.from_list(ROWS), "b": datasets.Dataset.from_list(ROWS[1:])}
    splits = datasets.DatasetDict(**splits)
    assert read_rows(from_python(splits, "b")) == ROWS[1:]
    assert read_rows(from_python({"a": ROWS, "b": ROWS[1:]}, "b")) == ROWS[1:]


def test_columns_and_data_frames_are_rows_with_exact_numbers():
    columns = {
        "prompt": ["1+1=", [{"role": "user", "content": "2"}], "3"],
        "single": np.array([0.1, np.nan, 1e-5], np.float32),
        "count": np.arange(3),
        "mixed": [1, None, "x"],
    }
    names = ["prompt", "single", "count", "mixed"]
    values = [[0.1, 0, 1], [None, 1, None], [0.00001, 2, "x"]]
    pairs = zip(columns["prompt"], values, strict=True)
    rows = [dict(zip(names, [prompt, *entries], strict=True)) for prompt, entries in pairs]
    assert read_rows(from_python(columns)) == rows
    assert read_rows(from_python(pd.DataFrame(columns, index=[7, 7, 9]))) == rows
    assert read_rows(from_python({"train": pd.DataFrame(columns)})) == rows
    assert type(from_python(columns)[2][1]["count"]) is int
    talk = [{"role": "user", "content": "2", "tool_calls": [{"name": "f"}] * 2}]
    lists = pd.DataFrame({"prompt": [talk, talk], "gold": [["1", "2"], None]})
    arrays = pq.read_table(pa.BufferReader(as_parquet(lists))).to_pandas()
    assert type(arrays["prompt"][0]) is np.ndarray
    for frame in (lists, arrays):
        assert read_rows(from_python(frame)) == lists.to_dict("records")
        first, _ = load_rows(frame.to_dict("records"), "prompt", "gold")
        assert first["prompt"] == talk
    gaps = pd.DataFrame({"gold": pd.Series([pd.NA, pd.NaT, float("nan"), "2"], dtype=object)})
    assert [row["gold"] for row in read_rows(from_python(gaps))] == [None, None, None, "2"]


def test_columns_of_a_data_set_are_rows_however_many_there_are():
    rows = [{"q": "1+1", "level": 0.1, "entry": {"x": 0.1}}, {"q": "2", "level": 2, "entry": None}]
    single = datasets.Value("float32")
    kinds = {"q": datasets.Value("string"), "level": single, "entry": {"x": single}}
    data_set = datasets.Dataset.from_list(rows, datasets.Features(kinds))
    for names in (["q", "level", "entry"], ["q"], ["entry"]):
        columns = {name: data_set[name] for name in names}
        expected = [{name: row[name] for name in names} for row in read_rows(from_python(data_set))]
        assert read_rows(from_python(columns)) == expected
    assert expected[0] == {"entry": {"x": 0.1}}
    assert read_rows(from_python(data_set.select([0])["entry"])) == [{"x": 0.1}]
    with pytest.raises(InputError, match="dataset, row 0 is a str: give a dict"):
        from_python(data_set["q"])


def test_a_column_that_the_format_of_a_data_set_hides_is_not_read():
    rows = datasets.Dataset.from_dict({"prompt": ["a"], "score": np.array([0.1], np.float32)})
    assert read_rows(from_python(rows)) == [{"prompt": "a", "score": 0.1}]
    assert read_rows(from_python(rows.with_format(columns=["prompt"]))) == [{"prompt": "a"}]


def test_images_of_a_data_set_are_refused_before_they_are_decoded():
    kinds = {"prompt": datasets.Value("string"), "images": [datasets.Image()]}
    columns = {"prompt": ["a"], "images": [[{"bytes": b"no image", "path": None}]]}
    rows = datasets.Dataset.from_dict(columns, datasets.Features(kinds))
    with pytest.raises(InputError, match="dataset: column 'images' holds images, and models are"):
        from_python(rows)
    with pytest.raises(InputError, match="dataset: column 'images' holds images, and models are"):
        from_python({name: rows[name] for name in columns})


def test_values_of_numpy_are_of_the_kinds_of_python():
    values = [np.int64(1), 2.5, np.float32(3)], [np.bool_(True), False], [np.array(["a"]), ["b"]]
    for answers in values:
        rows = [
            {"q": kind(n), "gold": answer}
            for n, (kind, answer) in enumerate(zip([np.str_, str, str], answers, strict=False))
        ]
        assert [row["prompt"] for row in load_rows(rows, "q", "gold")] == [row["q"] for row in rows]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "dataset holds no rows"),
        ({"prompt": [], "answer": []}, "dataset holds no rows"),
        ("rows.jsonl", "dataset is a str, .* a file is named by data.path"),
        (Path("rows.jsonl"), "dataset is a PosixPath, .* a file is named by data.path"),
        ([{"a": 1}, ("a", 1)], "dataset, row 1 is a tuple: give a dict"),
        (
            [{"a": 1}, {"a": 1, 5: 2}],
            "row 1: column 5 has a name that is no text: write one",
        ),
        ([{"a": 10**5000}], "dataset, row 0: column 'a' has a number that Python does not write"),
        ({"train": [{}], "test": [{}]}, "dataset has several splits: set data.split to one of tr"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "whose rows cannot be counted"),
        ({}, "dataset holds no rows"),
        ({"prompt": "1+1=", "answer": "2"}, "column 'prompt' is a str: give a list"),
        ({"prompt": ["a", "b"], "answer": [1]}, r"several lengths \(prompt 2, answer 1\)"),
        ({"prompt": np.zeros((2, 2))}, "column 'prompt' cannot be read .*: give a list"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "column 'a' stands twice"),
    ],
)
def test_other_objects_from_python_are_refused(dataset, message):
    with pytest.raises(InputError, match=message):
        from_python(dataset)


def test_numbers_of_narrow_columns_are_their_shortest_and_written_without_exponent(tmp_path):
    values = {"half": pa.float16(), "single": pa.float32(), "double": pa.float64()}
    columns = {name: pa.array([0.1, None], kind) for name, kind in values.items()}
    table = pa.table({"q": pa.array([1e-5, 2.0], pa.float32()), **columns})
    pq.write_table(table, tmp_path / "rows.parquet")
    dataset = datasets.Dataset(table)
    dataset.save_to_disk(tmp_path / "saved")
    paths = [Source(str(tmp_path / name)) for name in ("rows.parquet", "saved")]
    for source in (*paths, dataset, dataset.with_format("numpy")):
        first, second = load_rows(source, "{q} is", "single")
        assert [first["prompt"], second["prompt"]] == ["0.00001 is", "2 is"]
        assert [first[name] for name in values] == [0.1] * 3
        assert first["answer"] == 0.1


def test_narrow_numbers_in_lists_and_structs_are_their_shortest(tmp_path):
    single = pa.float32()
    kinds = {
        "list": (pa.list_(single), [0.1, None]),
        "fixed": (pa.list_(pa.float16(), 2), [0.1, 2.0]),
        "struct": (pa.struct({"x": single, "float": pa.string()}), {"x": 0.1, "float": "0.1"}),
        "deep": (pa.list_(pa.struct({"y": pa.list_(single)})), [{"y": [0.1]}, {"y": None}]),
        "map": (pa.map_(pa.string(), single), [("k", 0.1)]),
        "word": (pa.dictionary(pa.int8(), pa.string()), "0.1"),
    }
    table = pa.table({name: pa.array([value, None], kind) for name, (kind, value) in kinds.items()})
    pq.write_table(table, tmp_path / "rows.parquet")
    rows = read_rows(read(Source(str(tmp_path / "rows.parquet"))))
    assert rows[0] == {name: value for name, (_, value) in kinds.items()}
    assert rows[1] == dict.fromkeys(kinds)
    dataset = datasets.Dataset(table.select(["list", "struct", "deep"]))
    for source in (dataset, dataset.with_format("numpy")):
        first = from_python(source)[0][1]
        assert first["list"][0] == 0.1
        assert first["struct"]["x"] == 0.1
        assert first["deep"][0]["y"] == [0.1]
