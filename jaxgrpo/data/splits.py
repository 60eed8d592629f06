"""The split that a config names, of what has several: by its name, or a part of it, "train[:10%]".

Of files `datasets` reads only such a part. What `save_to_disk` wrote, and a DatasetDict from
Python, is there as it is, and is cut here by the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxgrpo.core.errors import InputError, refusing


def select(data_set: Any, split: str | None, where: str, table: str) -> Any:
    """The rows of one split, where `data_set` has splits.

    Args:
      split: a name, or parts as `datasets` writes them, "train[:10%]", "a+b[5:]"; None: the only
        one that there is.
      where: opens messages.
      table: of the config, whose key is split.

    Raises: InputError where there is no such split.
    """
    if not isinstance(data_set, Mapping):
        return data_set
    if split is None and len(data_set) == 1:
        return next(iter(data_set.values()))
    if split in data_set:
        return data_set[split]
    if _names_parts(split) and all(hasattr(rows, "select") for rows in data_set.values()):
        return _cut(data_set, str(split), f"{where}: {table}.split = {split!r}")
    problem = "several splits" if split is None else f"no split {split!r}"
    names = ", ".join(map(str, data_set))
    raise InputError(f"{where} has {problem}: set {table}.split to one of {names}")


def saved(data_set: Any, subset: str | None, split: str | None, where: str, table: str) -> Any:
    """What `save_to_disk` wrote; a single data set as the split that it was, if one is asked for.

    Args:
      subset: of the config; the others as in `select`.

    Raises: InputError for a subset, and for another split than the single one that was saved.
    """
    problem = None if subset is None else ("has no subsets", "subset")
    single: Any = None if isinstance(data_set, Mapping) else data_set
    if single is not None and split not in (None, str(single.split)):
        if problem is None and single.split is not None and _names_parts(split):
            return {str(single.split): single}
        problem = f"holds a single data set, of the split {single.split}", "split"
    if problem:
        raise InputError(
            f"{where}, which save_to_disk wrote, {problem[0]}: leave {table}.{problem[1]} out"
        )
    return data_set


def _names_parts(split: str | None) -> bool:
    """Whether it is no name, but says which parts of splits are read."""
    return split is not None and ("[" in split or "+" in split)


def _cut(data_set: Mapping[Any, Any], split: str, where: str) -> Any:
    """The rows of parts of splits, one part after the next."""
    import datasets

    sizes = {str(name): len(rows) for name, rows in data_set.items()}
    remedy = "name splits that there are, and their rows as [:1000], [10%:] or [5:25]"
    with refusing(f"{where} cannot be read ({{reason}}): {remedy}", ValueError):
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
        rows = [data_set[part.splitname].select(range(part.from_, part.to)) for part in parts]
        return rows[0] if len(rows) == 1 else datasets.concatenate_datasets(rows)
