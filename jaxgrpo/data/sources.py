"""Rows from files, folders, the Hugging Face hub, tasks or Python, each with words for its place.

The form of its path tells what a source is: "task:NAME:SPLIT" is a built-in task; .jsonl, .csv and
.parquet are files; a folder, or else a name on the hub ("owner/name"), goes through the `datasets`
library. A URL is copied first, and is then a file or a folder. All give the same rows. The network
is used for names on the hub and URLs alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxgrpo.core.errors import InputError, one_line, refusing
from jaxgrpo.data import images, splits, storage, tasks
from jaxgrpo.data.written import as_lists, is_too_long, widened

Row = dict[str, Any]
Located = tuple[str, Row]
"""A row, and its place in words: "rows.jsonl, line 3". Rows are counted from 0, lines from 1."""


@runtime_checkable
class RowList(Protocol):
    """Rows that can be counted, and read more than once: a list of dicts or the like."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


@runtime_checkable
class DataSet(Protocol):
    """A `datasets.Dataset`."""

    @property
    def features(self) -> Any: ...
    def __len__(self) -> int: ...


@runtime_checkable
class Frame(Protocol):
    """A DataFrame of pandas."""

    def itertuples(self, *args: Any, **kwargs: Any) -> Any: ...


Rows = RowList | DataSet | Frame | Mapping[Any, Any]
"""Rows from Python; a mapping holds columns, or splits that are rows."""

FILES = (".jsonl", ".csv", ".parquet")
NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # on the hub
WEIGHTS = "*.safetensors"
MODEL_FILES = ("*.json", WEIGHTS, "*.txt", "*.jinja", "*.model")
OTHER_LAYOUTS = ("*/*.safetensors", "consolidated*.safetensors")
"""Files in which some models have the same weights again, for other readers than transformers."""
DATA_SET = "data set"
MEND = "write it as text, or take it out"
FORMS = "a .jsonl, .csv or .parquet file, a folder, owner/name on the hub, or task:NAME:SPLIT"


class Source(NamedTuple):
    """Where rows come from."""

    path: str
    subset: str | None = None  # of a data set of the hub that has several
    split: str | None = None  # of a folder or of the hub; None: the only one there is
    revision: str | None = None  # of the hub: a branch, tag or commit
    key: str = "data.path"  # the key of the config that named it, for messages
    delimiter: str = ","  # between the columns of a CSV file
    columns: tuple[str, str] | None = None  # of prompt and answer; None: as data names them
    columns_table: str = "data"  # the table of the config that names the columns, for messages

    @property
    def where(self) -> str:
        """What opens a message about it."""
        return f"{self.key} = {self.path!r}"

    @property
    def table(self) -> str:
        """The table of the config that holds its keys: data, eval or an entry, data.path[0]."""
        return self.key.rpartition(".")[0]


class Mixture(NamedTuple):
    """Sources whose rows stand one after the other, and how often each is drawn from."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    sizes: tuple[int, ...]  # rows of each

    def source_numbers(self, row: Any) -> np.ndarray:
        """The number of the source that each row is from."""
        return np.searchsorted(np.cumsum(self.sizes), row, side="right")

    def keeping(self, rows: Sequence[int]) -> Mixture:
        """With some of its rows only. Raises: InputError where a source has none of them."""
        sizes = np.bincount(
            self.source_numbers(np.asarray(rows)), minlength=len(self.sizes)
        ).tolist()
        for name, old_size, new_size in zip(self.names, self.sizes, sizes, strict=True):
            if not new_size:
                raise InputError(
                    f"data.path: no prompt of {name!r} fits: all {old_size} are longer than "
                    "rollout.max_prompt_tokens; raise it, or take the source out"
                )
        return self._replace(sizes=tuple(sizes))


class NotJSON(ValueError):
    """A text that is no JSON, or JSON of which a reader would take only a part.

    Args:
      problem: what is wrong with it; `where` in the text follows in the error's own words.
    """

    def __init__(self, problem: str, where: str = ""):
        self.problem = problem
        super().__init__(problem + where)


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says. Raises: NotJSON, also on a name that stands twice in an object."""

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise NotJSON(f"the name {twice!r} stands twice: only one of its values would be read")
        return entries

    try:
        return json.loads(text, object_pairs_hook=build_object)
    except json.JSONDecodeError as error:
        raise NotJSON(error.msg, f", line {error.lineno}, column {error.colno}") from error
    except RecursionError:
        raise NotJSON("lists or objects in one another, a thousand deep") from None


def read(source: Source, text_columns: Iterable[str] = ()) -> list[Located]:
    """The rows of a source, each with the columns it has.

    Args:
      text_columns: columns of a CSV file that are taken as they are written. In others what looks
        like numbers, dates or truth values becomes such.
    Raises: InputError if there is no such source, it cannot be read, or it holds no rows.
    """
    path = storage.local(source.path, source.key)
    if source.path.startswith(tasks.PREFIX):
        located = _counted(source.path, tasks.load(source.path))
    elif path.suffix in FILES and not path.is_dir():  # Spark writes folders called rows.parquet
        if not path.is_file():
            where = f"{source.key} = {str(path)!r}"
            raise InputError(f"{where} does not exist (looked for {path.absolute()})")
        is_jsonl = path.suffix == ".jsonl"
        located = list(_jsonl(path) if is_jsonl else _table(path, source, text_columns))
    elif path.is_dir() or is_name(source.path):
        data_set = _data_set(source, path)
        images.refuse_columns(source.where, data_set.features)
        with refusing(f"{source.where}: a value cannot be read ({{kind}}: {{reason}}): {MEND}"):
            located = _counted(source.path, _exact(data_set, data_set.features.arrow_schema))
    else:
        fault = "is no file of rows" if path.exists() else "does not exist"
        raise InputError(f"{source.where} {fault}: give {FORMS}")
    if not located:
        raise InputError(f"{source.where} holds no rows: give a source with at least one")
    return located


def from_python(dataset: Any, split: str | None = None) -> list[Located]:
    """The rows of a list of dicts, a dict of columns, a `datasets.Dataset` or a pandas DataFrame;
    of a DatasetDict, or a dict of splits, those of one split.

    Raises: InputError if it is none of these or holds no rows.
    """
    are_splits = isinstance(dataset, Mapping) and all(map(_are_rows, dataset.values()))
    if are_splits and any(not isinstance(rows, list) or rows for rows in dataset.values()):
        dataset = splits.select(dataset, split, "dataset", "data")
    if _is_column(dataset):  # of dicts
        dataset = _column("dataset", dataset)
    if isinstance(dataset, Mapping) or _is_frame(dataset):
        dataset = _rows_from_columns(dataset)
    is_iterable = hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    if isinstance(dataset, str) or not is_iterable or not hasattr(dataset, "__len__"):
        raise InputError(
            f"dataset is a {type(dataset).__name__}, whose rows cannot be counted or read again: "
            "give a datasets.Dataset, a list of dicts, a dict of columns or a pandas DataFrame; a "
            "file is named by data.path"
        )
    features = getattr(dataset, "features", None)
    images.refuse_columns("dataset", features)
    rows = list(dataset)
    if features:
        rows = _exact(rows, features.arrow_schema)
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InputError(
                f"dataset, row {place} is a {type(row).__name__}: give a dict {{column: value}} "
                "per row"
            )
        for name, value in row.items():
            problem = ""
            if not isinstance(name, str):
                problem = "has a name that is no text: write one"
            elif is_too_long(value):
                problem = "has a number that Python does not write: give a text"
            if problem:
                raise InputError(f"dataset, row {place}: column {name!r} {problem}")
    if not rows:
        raise InputError("dataset holds no rows: give at least one")
    return _counted("dataset", rows)


def _is_frame(value: Any) -> bool:
    """Whether it is a DataFrame of pandas, which need not be installed."""
    return type(value).__name__ == "DataFrame" and hasattr(value, "itertuples")


def _is_column(value: Any) -> bool:
    """Whether it is a column of a `datasets.Dataset`."""
    return type(value).__name__ == "Column" and hasattr(value, "features")


def _are_rows(value: Any) -> bool:
    """Whether an entry of a dict is a split and no column: a data set, a table, a list of dicts."""
    if hasattr(value, "column_names") or _is_frame(value):  # a Column has features too
        return True
    return isinstance(value, (list, tuple)) and all(isinstance(row, Mapping) for row in value)


def _rows_from_columns(table: Any) -> list[Row]:
    """The rows of a dict of columns or a DataFrame.

    Raises: InputError if columns have one name or other lengths, or one is no list.
    """
    names = [*table]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"dataset: column {twice[0]!r} stands twice: rename one of them")
    columns = {str(name): _column(name, table[name]) for name in names}
    lengths = {name: len(column) for name, column in columns.items()}
    if len({*lengths.values()}) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise InputError(f"dataset: columns of several lengths ({shown}): give all the same length")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _column(name: Any, values: Any) -> list[Any]:
    """The values of a column; of an array or a Series as of a table's column, its gaps None."""
    where = f"dataset: column {name!r}"
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
        raise InputError(f"{where} is a {type(values).__name__}: give a list with a value per row")
    if _is_column(values):
        import datasets

        features = datasets.Features({str(name): values.features})
        images.refuse_columns("dataset", features)
        rows = _exact(({str(name): value} for value in values), features.arrow_schema)
        return [row[str(name)] for row in rows]
    if not hasattr(values, "dtype"):
        return list(values)
    if values.dtype == object:
        return [None if is_gap(value) else as_lists(value) for value in values]
    import pyarrow as pa

    with refusing(
        f"{where} cannot be read ({{reason}}): give a list", pa.ArrowException, ValueError
    ):
        array = pa.array(values, from_pandas=True)
    return [widened(value, array.type) for value in array.to_pylist()]


def is_gap(value: Any) -> bool:
    """Whether pandas means by a value that there is none."""
    is_nan = isinstance(value, (float, np.floating)) and value != value
    return bool(is_nan) or type(value).__name__ in ("NAType", "NaTType")


def _counted(name: str, rows: Iterable[Mapping[str, Any]]) -> list[Located]:
    return [(f"{name}, row {place}", dict(row)) for place, row in enumerate(rows)]


def _jsonl(file: Path) -> Iterator[Located]:
    """The object of each line that is not blank."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                raw = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                # Not the error's own text: its "line 1" is not the file's.
                is_text = not isinstance(error, UnicodeDecodeError)
                reason = getattr(error, "problem", one_line(error))
                reason = reason if is_text else "bytes that are no UTF-8"
                raise InputError(f"{where}: not JSON ({reason}): mend the line") from error
            if not isinstance(raw, dict):
                kind = type(raw).__name__
                raise InputError(f"{where}: a JSON {kind}: write an object, {{column: value}}")
            yield where, raw


def _table(file: Path, source: Source, text_columns: Iterable[str]) -> list[Located]:
    """The rows of a CSV or Parquet file. The errors of pyarrow name the row or the column."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    def problem(error: Exception) -> str:
        hint = " (rows count the header as 1)" if "Row #" in str(error) else ""
        return f"{file}: {one_line(error)}{hint}: mend it"

    with refusing(problem):  # of a dozen kinds
        if file.suffix == ".parquet":
            table = parquet.ParquetFile(file).read()
        else:
            size = min(max(file.stat().st_size, 1), 2**31 - 1)  # no row is in two blocks
            table = csv.read_csv(
                file,
                # With threads errors name no row.
                read_options=csv.ReadOptions(use_threads=False, block_size=size),
                parse_options=csv.ParseOptions(delimiter=source.delimiter, newlines_in_values=True),
                convert_options=csv.ConvertOptions(
                    column_types={name: pa.string() for name in text_columns}
                ),
            )
        names = table.column_names  # a header may be no text
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{file}: column {twice[0]!r} stands twice: rename one of them")
    columns: dict[str, list[Any]] = {}
    for name in names:
        with refusing(f"{file}: column {name!r} cannot be read ({{kind}}: {{reason}}): {MEND}"):
            columns[name] = table[name].to_pylist()
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return _counted(str(file), _exact(rows, table.schema))


def _exact(rows: Iterable[Row], schema: Any) -> list[Row]:
    """The rows, with floats of narrow columns as their shortest numbers: 0.1, not 0.100000001."""
    narrow = [field for field in schema if "float" in str(field.type)]
    exact = [dict(row) for row in rows]
    for row in exact:
        row.update({f.name: widened(row[f.name], f.type) for f in narrow if f.name in row})
    return exact


def _data_set(source: Source, path: Path) -> Any:
    """The data set that `datasets` reads from a folder or the hub."""
    import datasets

    local = path.is_dir()
    name, revision = (str(path), None) if local else (source.path, source.revision)
    split = source.split
    saved = any((path / file).is_file() for file in ("dataset_dict.json", "state.json"))
    with refusing(lambda error: _failure(source, error, local)):  # of a dozen kinds
        home = path.resolve()  # as `datasets` names files
        if saved:  # by save_to_disk
            author = "dataset_dict.json or state.json"
            _refuse_files_elsewhere(source, home, _saved_files(home), author)
            data_set = splits.saved(
                datasets.load_from_disk(name), source.subset, split, source.where, source.table
            )
        else:
            if local:
                builder = datasets.load_dataset_builder(name, source.subset)
                parts = (builder.config.data_files or {}).values()
                files = (str(file) for part in parts for file in part)
                _refuse_files_elsewhere(source, home, files, "README.md")
            data_set = datasets.load_dataset(name, source.subset, split=split, revision=revision)
    return splits.select(data_set, split, source.where, source.table)


def _saved_files(folder: Path) -> Iterator[str]:
    """The files that the JSON of `save_to_disk` in a folder names, each before it is read."""
    homes, names = [folder], folder / "dataset_dict.json"
    if names.is_file():
        homes += [folder / split for split in parse_json(names.read_bytes())["splits"]]
    for state in [home / "state.json" for home in homes]:
        yield str(state)
        if state.is_file():
            for entry in parse_json(state.read_bytes())["_data_files"]:
                yield str(state.parent / entry["filename"])


def _refuse_files_elsewhere(
    source: Source, folder: Path, files: Iterable[str], author: str
) -> None:
    """Raises: InputError where a folder, as of a stranger's, names files that are not in it.

    Args: author: the file of the folder that names them.
    """
    for file in files:
        # Links are followed: the hub's cache is made of them.
        if not Path(os.path.abspath(file)).is_relative_to(folder):
            raise InputError(
                f"{source.where}: its {author} names {file}, which is not in the folder: take it "
                "out there, or put the file into the folder"
            )


def _failure(source: Source, error: Exception, local: bool) -> str:
    """What `datasets` could not do, in one line."""
    text = one_line(error)
    for word, key in {"split": "split", "onfig": "subset"}.items():
        if word in text and isinstance(error, ValueError):
            return f"{source.where}: {text} Set {source.table}.{key} to one of them"
    if problem := storage.unwritable(_causes(error), Path(source.path)):
        return f"{source.where}: {problem}: set HF_DATASETS_CACHE to a folder that takes files"
    if not local:
        return _explain(source, DATA_SET, error)
    cause = f" ({one_line(error.__cause__)})" if error.__cause__ else ""
    return f"{source.where} is no folder of rows: {text}{cause}: give {FORMS}"


def is_name(text: str) -> bool:
    """Whether a text has the form of a name on the hub, owner/name.

    >>> is_name("Qwen/Qwen3-0.6B"), is_name("./runs/base"), is_name("base")
    (True, False, False)
    """
    return NAME.fullmatch(text) is not None


def fetch_model(name: str, revision: str | None = None, with_weights: bool = True) -> Path:
    """The folder of a model of the hub, fetched unless the cache holds it.

    Args:
      with_weights: False leaves the weights out, unless the cache holds them.

    Raises: InputError with the cause and the remedy.
    """
    from huggingface_hub import snapshot_download

    source = Source(name, revision=revision, key="model.path")
    with refusing(lambda error: _explain(source, "model", error)):
        return Path(snapshot_download(name, revision=revision, **model_files(with_weights)))


def model_files(with_weights: bool) -> dict[str, Any]:
    """Patterns of the files of a model; without `with_weights` its weights are left out."""
    ignored = OTHER_LAYOUTS if with_weights else (WEIGHTS,)
    return {"allow_patterns": [*MODEL_FILES], "ignore_patterns": [*ignored]}


def _explain(source: Source, kind: str, error: BaseException) -> str:
    """What went wrong with a name on the hub, in one line that ends with what to do.

    Args:
      kind: "model" or DATA_SET.
    """
    from huggingface_hub import constants

    name = source.path
    kinds = {cls.__name__ for cause in _causes(error) for cls in type(cause).__mro__}
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == DATA_SET else ''}{name}"
    login = "log in with `hf auth login` or set HF_TOKEN"
    if "GatedRepoError" in kinds or "is a gated" in one_line(error):
        problem = f"it is gated: accept its terms at {page}, then {login}"
    elif "RevisionNotFoundError" in kinds or one_line(error).startswith("Revision "):
        problem = f"it has no revision {source.revision!r}: name a branch, tag or commit of {page}"
    elif kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        problem = f"it does not exist, or is private: check the name, or {login}"
    elif kinds & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError"}:
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub is out of reach"
        repo_type = " --repo-type dataset" if kind == DATA_SET else ""
        problem = (
            f"it is not in the local cache, and {cause}: give a local path, or run `hf download "
            f"{name}{repo_type}` where there is a network"
        )
    else:
        problem = (
            f"it could not be fetched ({type(error).__name__}: {one_line(error)}): check the name, "
            "or give a local path"
        )
    return f"{source.where} is no local path, and as a {kind} on the hub {problem}"


def _causes(error: BaseException | None) -> list[BaseException]:
    """An error and what it was raised from, the error first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
