"""What those need who carry the project on: workflows, forms, hooks, citation, Makefile.

Each file is parsed, and each checker finds a fault that is planted in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
import yaml_files
from packaging.specifiers import SpecifierSet

import jaxgrpo

REPOSITORY = Path(__file__).resolve().parent.parent.parent
WORKFLOWS = REPOSITORY / ".github" / "workflows"
FORMS = REPOSITORY / ".github" / "ISSUE_TEMPLATE"
MAKEFILE = (REPOSITORY / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

ACTION = re.compile(r"[\w-]+/[\w-]+@(release/)?v\d+")
PERMISSIONS = {"contents": {"read"}, "pages": {"write"}, "id-token": {"write"}}
"""What a job may ask for, at most."""
EVENTS = {"push", "pull_request", "workflow_call"}
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
CITATION_REQUIRED = {"cff-version", "message", "title", "authors"}
CITATION_FIELDS = CITATION_REQUIRED | {
    *("abstract", "commit", "contact", "date-released", "doi", "identifiers", "keywords"),
    *("license", "license-url", "preferred-citation", "references", "repository"),
    *("repository-artifact", "repository-code", "type", "url", "version"),
}


# Workflows


def workflow(name: str) -> Any:
    return yaml_files.read(WORKFLOWS / f"{name}.yml")


def workflow_problems(document: Any) -> list[str]:
    """What GitHub would refuse, or what asks for more than it needs."""
    problems = [
        f"without {key}"
        for key in ("name", "on", "permissions", "concurrency", "jobs")
        if key not in document
    ]
    problems += [f"event {event}" for event in document.get("on", {}) if event not in EVENTS]
    if document.get("permissions") != {"contents": "read"}:
        problems.append("permissions of all jobs: more than contents: read")
    for name, job in document.get("jobs", {}).items():
        problems += [f"{name}: {problem}" for problem in job_problems(job, document["jobs"])]
    return problems


def job_problems(job: Any, jobs: Any) -> Iterator[str]:
    needs = job.get("needs", [])
    for name in [needs] if isinstance(needs, str) else needs:
        if name not in jobs:
            yield f"needs {name}, which is no job"
    for scope, level in job.get("permissions", {}).items():
        if level not in PERMISSIONS.get(scope, set()):
            yield f"permission {scope}: {level}"
    if "uses" in job:
        if "steps" in job or not (REPOSITORY / job["uses"]).is_file():
            yield f"uses {job['uses']}"
        return
    yield from (f"without {key}" for key in ("runs-on", "timeout-minutes") if key not in job)
    steps = job.get("steps") or []
    if not steps:
        yield "without steps"
    for number, step in enumerate(steps, 1):
        yield from (f"step {number}: {problem}" for problem in step_problems(step, job))


def step_problems(step: Any, job: Any) -> Iterator[str]:
    if ("uses" in step) == ("run" in step):
        yield "needs one of uses and run"
    if "uses" in step and not ACTION.fullmatch(step["uses"]):
        yield f"{step['uses']} is not pinned to a major version"
    if "secrets." in str(step):
        yield "reads a secret"
    for variables in matrix(job):
        text = expanded(str(step), variables)
        yield from (f"unknown matrix.{name}" for name in re.findall(r"\{ matrix\.(\w+)", text))
        script = expanded(step.get("run", ""), variables)
        yield from (f"no target {name}" for name in make_targets(script) if name not in TARGETS)
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        if checked.returncode:
            yield f"no shell script: {checked.stderr.strip()}"


def matrix(job: Any) -> list[dict[str, str]]:
    return job.get("strategy", {}).get("matrix", {}).get("include", [{}])


def expanded(text: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        text = text.replace(f"${{{{ matrix.{name} }}}}", value)
    return text


def make_targets(text: str) -> list[str]:
    """The targets of the calls of make in a text."""
    return re.findall(r"(?:^|[`;&|] *)make ([a-z][\w-]*)", text, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(file.stem for file in WORKFLOWS.iterdir()))
def test_a_workflow_is_one_that_runs_and_asks_for_little(name):
    assert workflow_problems(workflow(name)) == []


STEPS = ("jobs", "test", "steps")


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("permissions",), None, "without permissions"),
        (("permissions",), {"contents": "write"}, "more than contents: read"),
        (("on",), {"pull_request_target": {}}, "event pull_request_target"),
        (("jobs", "test", "permissions"), {"packages": "write"}, "permission packages: write"),
        (("jobs", "test", "needs"), "build", "needs build, which is no job"),
        (("jobs", "test", "timeout-minutes"), None, "without timeout-minutes"),
        (("jobs", "test"), {"uses": "./.github/workflows/none.yml"}, "uses ./.github/workflows/no"),
        (STEPS, [], "without steps"),
        ((*STEPS, 0), {"name": "nothing"}, "needs one of uses and run"),
        ((*STEPS, 0, "uses"), "actions/checkout@main", "not pinned to a major version"),
        ((*STEPS, 2, "run"), "make tests", "no target tests"),
        ((*STEPS, 2, "run"), "make ${{ matrix.targets }}", "unknown matrix.targets"),
        ((*STEPS, 2, "run"), "if true; then", "no shell script"),
        ((*STEPS, 2, "env"), {"TOKEN": "${{ secrets.TOKEN }}"}, "reads a secret"),
        (
            ("jobs", "test", "strategy", "matrix", "include", 0, "target"),
            "check",
            "no target check",
        ),
    ],
)
def test_a_fault_of_a_workflow_is_found(path, value, problem):
    problems = workflow_problems(yaml_files.changed(workflow("tests"), path, value))
    assert any(problem in text for text in problems), problems


def test_a_key_that_stands_twice_is_found():
    with pytest.raises(yaml.YAMLError, match="stands twice: run"):
        yaml_files.parse("run: a\nrun: b\n")


def test_all_tests_run_on_the_oldest_python_and_the_quick_ones_on_others():
    document = workflow("tests")
    assert {"push", "pull_request"} <= document["on"].keys()
    rows = [(row["python"], row["target"]) for row in matrix(document["jobs"]["test"])]
    oldest, *newer = [("3.11", "test"), ("3.12", "test-fast"), ("3.13", "test-fast")]
    assert rows == [oldest, ("3.11", "test-oldest"), ("3.13", "test-newest"), *newer]
    prefix = "Programming Language :: Python :: 3."
    assert [f"{prefix}{python[2:]}" for python, _ in (oldest, *newer)] == [
        classifier for classifier in PROJECT["classifiers"] if classifier.startswith(prefix)
    ]
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert "3.11" in allowed
    assert "3.10" not in allowed


def test_the_workflows_run_all_that_ci_runs():
    script = (REPOSITORY / ".ci" / "run").read_text()
    ci_targets = make_targets(script.replace("exec make", "make"))
    job = workflow("tests")["jobs"]["test"]
    (full,) = (row for row in matrix(job) if row["target"] == "test")
    steps = [*job["steps"], *workflow("docs")["jobs"]["build"]["steps"]]
    runs = "\n".join(expanded(step.get("run", ""), full) for step in steps)
    assert ci_targets
    assert set(ci_targets) <= set(make_targets(runs))


def test_pages_are_published_from_main_alone():
    jobs = workflow("docs")["jobs"]
    assert jobs["deploy"]["if"] == "github.ref == 'refs/heads/main'"
    assert jobs["deploy"]["needs"] == "build"
    runs = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert make_targets(runs) == ["site"]
    (upload,) = (step for step in jobs["build"]["steps"] if "upload-pages" in step.get("uses", ""))
    assert upload["with"]["path"] == "site"
    assert upload["if"] == jobs["deploy"]["if"]


def test_only_the_last_job_of_a_release_can_publish_and_after_the_tests():
    document = workflow("release")
    assert document["on"] == {"push": {"tags": ["v*"]}}
    jobs = document["jobs"]
    publishers = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert publishers == ["publish"]
    assert jobs["publish"]["environment"] == "pypi"
    assert sorted(jobs["publish"]["needs"]) == ["build", "tests"]
    assert [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    assert "workflow_call" in workflow("tests")["on"]


@pytest.mark.parametrize(
    ("tag", "code"), [(f"v{jaxgrpo.__version__}", 0), (jaxgrpo.__version__, 1), ("v9.9.9", 1)]
)
def test_a_tag_that_is_not_the_version_ends_the_release(tag, code):
    result = release_step("The tag is the version", REPOSITORY, GITHUB_REF_NAME=tag)
    assert result.returncode == code, result.stderr
    assert (f"the tag is {tag}" in result.stdout) == bool(code)


@pytest.mark.parametrize(
    ("repository", "code"),
    [("", 1), ("https://host.org/me/another", 1), ("https://host.org/me/jaxgrpo", 0)],
)
def test_a_package_that_does_not_say_where_it_lives_ends_the_release(tmp_path, repository, code):
    text = (REPOSITORY / "pyproject.toml").read_text()
    line, count = re.subn(r"(?m)^repository = .*$", f'repository = "{repository}"', text)
    assert count == 1
    (tmp_path / "pyproject.toml").write_text(line)
    variables = {"GITHUB_SERVER_URL": "https://host.org", "GITHUB_REPOSITORY": "me/jaxgrpo"}
    result = release_step("The package says where it lives", tmp_path, **variables)
    assert result.returncode == code, result.stderr
    assert ('repository = "https://host.org/me/jaxgrpo"' in result.stdout) == bool(code)


def release_step(name: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the script of a step of the job `build` in a folder, as GitHub does."""
    steps = workflow("release")["jobs"]["build"]["steps"]
    (script,) = (step["run"] for step in steps if step.get("name") == name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
    )


def test_the_changelog_has_the_version_its_day_and_what_is_not_released():
    heads = re.findall(r"^## (.+)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "Unreleased"
    versions = [re.fullmatch(r"(\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)", head) for head in heads[1:]]
    assert all(versions)
    assert next(match[1] for match in versions if match) == jaxgrpo.__version__
    assert [date.fromisoformat(match[2]) for match in versions if match]


# Issues and pull requests


def form_problems(form: Any) -> list[str]:
    problems = [f"without {key}" for key in ("name", "description", "body") if not form.get(key)]
    fields = form.get("body") or []
    questions = [field for field in fields if field.get("type") != "markdown"]
    names = [field.get("id") for field in questions]
    labels = [field.get("attributes", {}).get("label") for field in questions]
    if not questions:
        problems.append("asks for nothing")
    if len({*names}) < len(names) or len({*labels}) < len(labels):
        problems.append("an id or a label stands twice")
    for field in fields:
        kind, attributes = field.get("type"), field.get("attributes", {})
        if kind not in FIELDS:
            problems.append(f"type {kind}")
        needed = "value" if kind == "markdown" else "label"
        if not attributes.get(needed):
            problems.append(f"a {kind} without {needed}")
        if kind in ("dropdown", "checkboxes") and not attributes.get("options"):
            problems.append(f"a {kind} without options")
        if kind != "markdown" and not re.fullmatch(r"[\w-]+", str(field.get("id") or "")):
            problems.append(f"a {kind} without an id")
        if not isinstance(field.get("validations", {}).get("required", False), bool):
            problems.append("required is true or false")
    return problems


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_a_form_of_an_issue_is_one(name):
    assert form_problems(yaml_files.read(FORMS / f"{name}.yml")) == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("name",), None, "without name"),
        (("description",), "", "without description"),
        (("body",), [], "asks for nothing"),
        (("body", 1, "type"), "text", "type text"),
        (("body", 1, "id"), "command", "stands twice"),
        (("body", 1, "id"), None, "a textarea without an id"),
        (("body", 1, "attributes", "label"), None, "a textarea without label"),
        (("body", 0, "attributes"), {}, "a markdown without value"),
        (("body", 1, "type"), "dropdown", "a dropdown without options"),
        (("body", 1, "validations", "required"), "yes", "required is true or false"),
    ],
)
def test_a_fault_of_a_form_is_found(path, value, problem):
    form = yaml_files.read(FORMS / "bug_report.yml")
    problems = form_problems(yaml_files.changed(form, path, value))
    assert any(problem in text for text in problems), problems


def test_a_report_of_a_bug_needs_all_that_shows_it_again():
    body = yaml_files.read(FORMS / "bug_report.yml")["body"]
    required = {f["id"] for f in body if f.get("validations", {}).get("required")}
    assert required == {"seen", "expected", "command", "config", "doctor"}
    labels = [field["attributes"].get("label") for field in body]
    assert "Output of `jaxgrpo doctor`" in labels


def test_issues_are_written_by_a_form():
    assert yaml_files.read(FORMS / "config.yml") == {"blank_issues_enabled": False}


def pages() -> list[Path]:
    names = ("SECURITY.md", "CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md")
    return [REPOSITORY / name for name in names]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_and_targets_of_the_pages_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", text)
    for target, anchor in links:
        assert (page.parent / target).is_file(), target
        if anchor:
            heads = re.findall(r"^#+ (.+)$", (page.parent / target).read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads]
    assert [name for name in make_targets(text) if name not in TARGETS] == []
    assert links or make_targets(text)


# Citation, hooks and the Makefile


def citation_problems(citation: Any) -> list[str]:
    problems = [f"without {key}" for key in sorted(CITATION_REQUIRED - citation.keys())]
    problems += [f"unknown {key}" for key in sorted(citation.keys() - CITATION_FIELDS)]
    expected = {
        "cff-version": "1.2.0",
        "type": "software",
        "version": jaxgrpo.__version__,
        "license": PROJECT["license"],
    }
    problems += [
        f"{key} is {citation.get(key)}, not {value}"
        for key, value in expected.items()
        if str(citation.get(key)) != value
    ]
    names = [author.get("name") or author.get("family-names") for author in citation["authors"]]
    return problems + ["an author without a name"] * (not names or not all(names))


def test_the_citation_names_the_version_and_the_licence_of_the_package():
    assert "version" in PROJECT["dynamic"]  # so that __version__ is the one place
    assert citation_problems(yaml_files.read(REPOSITORY / "CITATION.cff")) == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("title",), None, "without title"),
        (("author",), "someone", "unknown author"),
        (("version",), "9.9.9", "version is 9.9.9"),
        (("license",), "MIT", "license is MIT"),
        (("cff-version",), "1.1.0", "cff-version is 1.1.0"),
        (("authors",), [{"email": "a@b"}], "an author without a name"),
    ],
)
def test_a_fault_of_the_citation_is_found(path, value, problem):
    citation = yaml_files.read(REPOSITORY / "CITATION.cff")
    assert any(problem in p for p in citation_problems(yaml_files.changed(citation, path, value)))


def test_every_variable_that_the_makefile_uses_is_set_in_it():
    """make takes an unset variable for an empty text, and a recipe then leaves out its command."""
    used = set(re.findall(r"\$\((\w+)\)", MAKEFILE))
    assert used - set(re.findall(r"^(?:\S+: )?(\w+) [:?]?=", MAKEFILE, re.MULTILINE)) == set()
    assert {"PYTHON", "BIN", "JOBS"} <= used


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_a_python_that_is_too_old_ends_make_before_an_environment_is_made(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((REPOSITORY / name).read_bytes())
    old_python = tmp_path / "python3.10"
    old_python.write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} -c "import sys\n'
        "sys.version, sys.version_info = '3.10.12 (main)', (3, 10, 12)\n$1\"\n"
    )
    old_python.chmod(0o755)
    command = ["make", "quickstart", f"PYTHON={old_python}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    message = f"jaxgrpo needs Python 3.11 or newer, but {old_python} is 3.10.12: name another one"
    assert message in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_hooks_run_what_make_lint_runs():
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    (folder,) = re.findall(r"^BIN := (\S+)$", MAKEFILE, re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", folder) for line in recipe.splitlines()]
    config = yaml_files.read(REPOSITORY / ".pre-commit-config.yaml")
    (repository,) = config["repos"]
    assert repository["repo"] == "local"
    hooks = repository["hooks"]
    assert [hook["entry"] for hook in hooks] == commands
    for hook in hooks:
        assert {"id", "name", "files"} <= hook.keys()
        assert hook["language"] == "system"
        assert hook["pass_filenames"] is False  # the commands name what they check
        assert re.search(hook["files"], "jaxgrpo/cli/main.py")
        assert re.search(hook["files"], "pyproject.toml")
        assert not re.search(hook["files"], "README.md")
        assert set(hook["stages"]) <= set(config["default_install_hook_types"])
