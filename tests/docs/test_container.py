"""The container image: its file is parsed, and its commands run with another program for pip."""

from __future__ import annotations

import os
import subprocess
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]

INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
    *("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}


def instructions(text: str) -> list[tuple[str, str]]:
    """(name, value) of each line of a Dockerfile. Raises: ValueError for what is none."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    parsed = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, value = line.partition(" ")
        if name not in INSTRUCTIONS or not value.strip():
            raise ValueError(f"no instruction: {line}")
        parsed.append((name, value.strip()))
    if next(name for name, _ in parsed if name != "ARG") != "FROM":
        raise ValueError("FROM must come first")
    return parsed


@pytest.fixture(scope="module")
def image() -> list[tuple[str, str]]:
    return instructions((REPOSITORY / "Dockerfile").read_text())


def values(image: list[tuple[str, str]], name: str) -> list[str]:
    return [value for instruction, value in image if instruction == name]


@pytest.mark.parametrize(
    "text", ["FROM a\nRUNS b", "FROM a\nRUN", "RUN b\nFROM a", "ARG A=1\nRUN b"]
)
def test_a_line_that_is_no_instruction_is_found(text):
    with pytest.raises(ValueError, match=r"instruction|FROM must come first"):
        instructions(text)


def test_the_image_starts_jaxgrpo_and_not_as_root(image):
    (source,) = values(image, "FROM")
    (python,) = (v.partition("=")[2] for v in values(image, "ARG") if v.startswith("PYTHON="))
    assert source.replace("${PYTHON}", python) == "python:3.12-slim"
    assert values(image, "USER")[-1] == "jaxgrpo"
    assert any("useradd" in run and run.endswith(" jaxgrpo") for run in values(image, "RUN"))
    assert values(image, "ENTRYPOINT") == [f'["{next(iter(PROJECT["scripts"]))}"]']


def test_what_the_image_copies_is_there_and_is_not_ignored(image):
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    sources = [name for value in values(image, "COPY") for name in value.split()[:-1]]
    assert "*" in ignored
    assert sorted(sources) == sorted(allowed)
    assert [name for name in sources if not (REPOSITORY / name).exists()] == []
    built = SETTINGS["tool"]["hatch"]["build"]
    wheel = built["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], "hatch_build.py", "README.md"}
    assert needed | set(PROJECT["license-files"]) <= set(sources)


def installed(image: list[tuple[str, str]], tmp_path: Path, **arguments: str) -> list[list[str]]:
    """What the RUN lines give to pip, which is not run. Raises: CalledProcessError."""
    record = tmp_path / "record"
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {record}\n")
    pip.chmod(0o755)
    defaults = dict(value.split("=", 1) for value in values(image, "ARG"))
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    for script in values(image, "RUN"):
        if "pip" in script:
            variables = {**defaults, **arguments, "PATH": path}
            subprocess.run(["sh", "-c", script], env=variables, check=True, capture_output=True)
    return [line.split() for line in record.read_text().splitlines()]


@pytest.mark.parametrize("accelerator", ["", "cpu", "cuda12", "cuda13", "tpu"])
def test_an_accelerator_of_the_image_is_an_extra_of_jax(image, tmp_path, accelerator):
    arguments = {"ACCELERATOR": accelerator} if accelerator else {}
    first, second = installed(image, tmp_path, **arguments)
    assert first[:-1] == second[:-1] == ["install", "--no-cache-dir", "-c", "constraints.txt"]
    jax = Requirement(first[-1])
    assert jax.name == "jax"
    assert jax.extras == {accelerator or "cpu"}
    assert jax.extras <= set(metadata("jax").get_all("Provides-Extra") or [])
    extras = Requirement(second[-1].replace(".", "jaxgrpo", 1)).extras
    assert extras == {"gcs", "math", "sandbox"}
    assert extras <= PROJECT["optional-dependencies"].keys()


def test_an_accelerator_that_there_is_not_ends_the_build(image, tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as error:
        installed(image, tmp_path, ACCELERATOR="cuda11")
    assert b"expected cpu, cuda12, cuda13 or tpu" in error.value.stderr
    assert not (tmp_path / "record").exists()
