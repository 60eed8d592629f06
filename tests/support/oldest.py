"""Prints the lowest version that pyproject.toml allows of each package, as constraints for pip.

    python tests/support/oldest.py    # part of `make test-oldest`

torch, the oracle of the model tests, is that of constraints.txt: the package does not need it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,-]+\])?(?:>=|==)(?P<version>[\w.]+)")


def lowest(requirements: list[str]) -> list[str]:
    """A line NAME==VERSION for each package. Raises: ValueError without one lowest version."""
    versions: dict[str, str] = {}
    for requirement in requirements:
        match = REQUIREMENT.match(requirement)
        if match is None:
            raise ValueError(f"pyproject.toml: {requirement!r} has no lowest version")
        name, version = match.groups()
        if versions.setdefault(name, version) != version:
            raise ValueError(f"pyproject.toml: {name}>={version}, elsewhere >={versions[name]}")
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def requirements() -> list[str]:
    """Those of the package and of its extras."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *chain(*project["optional-dependencies"].values())]


def main() -> None:
    constraints = (REPOSITORY / "constraints.txt").read_text().splitlines()
    torch = [line for line in constraints if line.startswith("torch==")]
    sys.stdout.write("\n".join([*lowest(requirements()), *torch]) + "\n")


if __name__ == "__main__":
    main()
