"""docs/systems.md: its configs can be built, its commands and tests are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from jaxgrpo.config import files as configs

ROW = re.compile(
    r"\| (?P<system>[^|]+) \| (?P<how>.+) \| (?P<test>tests/[\w/]+\.py) \|(?P<lacks>[^|]*)\|"
)


@pytest.fixture(scope="module")
def rows(repository):
    page = (repository / "docs" / "systems.md").read_text()
    return [match for line in page.splitlines() if (match := ROW.fullmatch(line))]


def test_there_are_forty_one_systems_each_with_a_test_that_exists(rows, repository):
    assert len(rows) == 41
    assert len({row["system"] for row in rows}) == 41
    for row in rows:
        assert (repository / row["test"]).is_file(), row["test"]


def test_every_line_of_a_config_is_one_that_can_be_read(rows):
    for row in rows:
        tables, _ = configs.read_tables("quickstart")
        for text in re.findall(r"`([^`]+)`", row["how"]):
            if " = " in text:
                changes = tomllib.loads(text)
                if "advantage" in changes:
                    del tables["recipe"]
                configs.replace(tables, changes, Path.cwd())
                # Some lines only count with the others of their row.
        configs.from_dict(tables)


def test_every_command_is_one(rows):
    commands = [
        text
        for row in rows
        for text in re.findall(r"`([^`]+)`", row["how"])
        if text.startswith(("python", "jaxgrpo"))
    ]
    assert len(commands) == 11
    shown = r"python -m docs\.experiments\.x\w+|jaxgrpo (fit runs/NAME|plasticity runs/NAME \w+)"
    for text in commands:
        assert re.fullmatch(shown, text), text
