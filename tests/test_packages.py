"""The source distribution and the wheel: what they hold, what they say, and what they need."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import oldest
import pytest
from packaging.requirements import Requirement

import hatch_build
import jaxgrpo

NAME = f"jaxgrpo-{jaxgrpo.__version__}"
ADDRESS = "https://host.org/me/jaxgrpo"
RELATIVE = re.compile(r"\]\((?!https?:)[^)]*\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class Distributions(NamedTuple):
    """An unpacked source distribution, the wheel of the checkout, and the wheel of the former."""

    source: Path
    wheel: Path
    wheel_of_source: Path


@pytest.fixture(scope="module")
def distributions(repository, python, tmp_path_factory) -> Distributions:
    def build(target: str, folder: Path) -> Path:
        out = tmp_path_factory.mktemp("dist")
        command = [python, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        (file,) = out.iterdir()
        return file

    archive = build("sdist", repository)
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    source = folder / NAME
    return Distributions(source, build("wheel", repository), build("wheel", source))


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {*archive.namelist()}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_string(archive.read(f"{NAME}.dist-info/METADATA").decode())


def relative_files(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_the_source_distribution_holds_every_file_of_the_repository(repository, distributions):
    archived = relative_files(distributions.source) - {"PKG-INFO"}
    assert {".github/workflows/tests.yml", ".gitignore", "benchmarks/common.py"} <= archived
    if (repository / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        run = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True)
        tracked = {name for name in run.stdout.splitlines() if (repository / name).is_file()}
        assert archived == tracked
    for name in archived:
        file, original = distributions.source / name, repository / name
        assert file.read_bytes() == original.read_bytes(), name
        assert os.access(file, os.X_OK) == os.access(original, os.X_OK), name


@pytest.mark.slow
def test_the_wheel_of_the_source_distribution_is_that_of_the_checkout(distributions):
    assert distributions.wheel_of_source.read_bytes() == distributions.wheel.read_bytes()


def test_the_wheel_holds_the_package_and_its_configs_and_nothing_else(repository, distributions):
    files = relative_files(repository / "jaxgrpo")
    package = {
        f"jaxgrpo/{name}" for name in files if name.endswith((".py", "py.typed", "cli/tests.json"))
    }
    configs = {f"jaxgrpo/configs/{name}" for name in relative_files(repository / "configs")}
    assert {"jaxgrpo/py.typed", "jaxgrpo/cli/main.py"} <= package
    assert {"jaxgrpo/configs/quickstart.toml", "jaxgrpo/configs/experiments/x3_g2.toml"} <= configs
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    expected = package | configs | {f"{NAME}.dist-info/{name}" for name in about}
    assert names(distributions.wheel) == expected


@pytest.mark.full
def test_an_installed_package_finds_its_configs(distributions, tmp_path, python, environment):
    with zipfile.ZipFile(distributions.wheel) as archive:
        archive.extractall(tmp_path)
    program = "import jaxgrpo.config.files as c; print(c.shipped()['quickstart'])"
    run = subprocess.run(
        [python, "-c", program],
        env=environment(PYTHONPATH=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str(tmp_path / "jaxgrpo" / "configs" / "quickstart.toml")


def test_the_package_says_what_it_is_and_for_whom(distributions):
    fields = metadata(distributions.wheel)
    assert (fields["Name"], fields["Version"]) == ("jaxgrpo", jaxgrpo.__version__)
    assert (fields["License-Expression"], fields["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert {"grpo", "jax"} <= {*fields["Keywords"].split(",")}
    assert "Typing :: Typed" in (fields.get_all("Classifier") or [])
    assert fields["Description-Content-Type"].startswith("text/markdown")


def test_the_package_says_what_the_page_and_the_address_of_the_repository_give(
    repository, distributions
):
    hooks = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]
    address = hooks["hooks"]["custom"]["repository"]
    fields = metadata(distributions.wheel)
    urls = dict(line.split(", ") for line in fields.get_all("Project-URL") or [])
    assert urls == hatch_build.urls(address, jaxgrpo.__version__)
    text = (repository / "README.md").read_text()
    description = hatch_build.description(text, address, jaxgrpo.__version__)
    assert str(fields.get_payload()).strip() == description.strip()


def test_without_an_address_the_description_names_files_of_the_archive(distributions):
    page = (distributions.source / "README.md").read_text()
    text = FENCE.sub("", hatch_build.description(page, "", jaxgrpo.__version__))
    assert RELATIVE.findall(text) == []
    assert "a real model (docs/real-model.md)" in text
    files = re.findall(r" \(((?:docs|examples|benchmarks)/[^)]+)\)", text)
    assert len(files) > 30
    assert [file for file in files if not (distributions.source / file).is_file()] == []


def test_with_an_address_links_and_pictures_lead_to_files_of_this_version(distributions):
    page = (distributions.source / "README.md").read_text()
    version = f"v{jaxgrpo.__version__}"
    text = FENCE.sub("", hatch_build.description(page, ADDRESS, jaxgrpo.__version__))
    assert RELATIVE.findall(text) == []
    assert f"]({ADDRESS}/raw/{version}/docs/benchmarks.png)" in text
    files = re.findall(rf"\({ADDRESS}/(?:blob|raw)/{version}/([^)#]+)", text)
    assert len(files) > 30
    urls = hatch_build.urls(ADDRESS, jaxgrpo.__version__)
    assert urls.pop("Source") == ADDRESS
    assert urls.pop("Issues") == f"{ADDRESS}/issues"
    assert urls.keys() == {"Documentation", "Changelog"}
    files += [url.removeprefix(f"{ADDRESS}/blob/{version}/") for url in urls.values()]
    assert [file for file in files if not (distributions.source / file).is_file()] == []


def test_code_and_links_that_lead_anywhere_stay_as_they_are():
    text = "[a](https://b.org/c) [d](#e)\n```\n[x](y)\n```\n"
    assert hatch_build.description(text, ADDRESS, "1.0") == text
    assert hatch_build.description(text, "", "1.0") == text + hatch_build.WITHOUT_ADDRESS
    assert hatch_build.description("[CHANGELOG.md](CHANGELOG.md)", "", "1").startswith("CHANGELOG")


@pytest.mark.parametrize("address", ["host.org/me/it", "https://host.org", f"{ADDRESS}/"])
def test_an_address_that_is_none_is_refused(tmp_path, address):
    hook = hatch_build.Metadata(str(tmp_path), {"repository": address})
    with pytest.raises(ValueError, match="expected https://HOST/OWNER/NAME"):
        hook.update({"version": "1.0"})


def test_the_lowest_version_of_each_requirement_is_tested(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    versions = dict(line.split("==") for line in oldest.lowest(oldest.requirements()))
    assert {Requirement(line).name for line in project["dependencies"]} <= versions.keys()
    for requirement in map(Requirement, oldest.requirements()):
        assert requirement.specifier.contains(versions[requirement.name])


def test_the_versions_that_are_installed_for_the_tests_are_allowed(repository):
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    for requirement in map(Requirement, oldest.requirements()):
        if version := pins.get(requirement.name.lower()):
            assert requirement.specifier.contains(version), requirement


@pytest.mark.parametrize(
    ("requirements", "problem"),
    [
        (["libtpu"], "'libtpu' has no lowest version"),
        (["jax<1"], "'jax<1' has no lowest version"),
        (["jax>=0.9", "jax[tpu]>=0.10; extra == 'tpu'"], "jax>=0.10, elsewhere >=0.9"),
    ],
)
def test_a_requirement_without_one_lowest_version_is_refused(requirements, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        oldest.lowest(requirements)
