"""YAML as the programs read it that the files of the project are for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which PyYAML takes the last, and reads `on` as a text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        double = {str(name) for name in names if names.count(name) > 1}
        if double:
            raise yaml.constructor.ConstructorError(
                problem=f"stands twice: {', '.join(sorted(double))}", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if entry[0] != _BOOL or first in "tTfF"]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse(text: str) -> Any:
    """The one document of a YAML text. Raises: yaml.YAMLError, also for a key that stands twice.

    >>> parse("on: [push]\\nfail-fast: false")
    {'on': ['push'], 'fail-fast': False}
    """
    return yaml.load(text, _Loader)


def read(path: Path) -> Any:
    return parse(path.read_text(encoding="utf-8"))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path; None removes what is there."""
    result = copy.deepcopy(document)
    *above, last = path
    place = result
    for name in above:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return result
