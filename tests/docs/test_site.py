"""The site of docs/ builds strictly, loads nothing from elsewhere and has every public word."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import zlib
from types import ModuleType

import pytest

import jaxgrpo
from docs import make_papers


def module(repository, name: str) -> ModuleType:
    """A module of docs/site/, which is no package: MkDocs loads its files one by one."""
    file = repository / "docs" / "site" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def site(repository, python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    run = subprocess.run(
        [python, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=repository,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.full
@pytest.mark.slow
def test_every_page_and_picture_is_in_the_site(repository, site):
    docs = repository / "docs"
    for file in [*docs.rglob("*.md"), *docs.rglob("*.png")]:
        place = file.relative_to(docs).with_suffix(".html" if file.suffix == ".md" else ".png")
        page = place.with_name("index.html") if place.name == "README.html" else place
        assert (site / page).is_file(), place
    assert not [*site.rglob("*.py")]


@pytest.mark.full
def test_the_site_loads_nothing_from_elsewhere(repository, site):
    assert module(repository, "check").check(site) == []


@pytest.mark.full
def test_every_public_word_has_its_place_in_the_api(site):
    text = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    documented = {line.split(" ")[0] for line in text.splitlines()}
    modules = {"advantages", "losses", "models", "rewards", "tasks", "__version__"}
    words = {f"jaxgrpo.{word}" for word in jaxgrpo.__all__ if word not in modules}
    words |= {f"jaxgrpo.advantages.{word}" for word in jaxgrpo.advantages.__all__}
    words |= {f"jaxgrpo.losses.{word}" for word in jaxgrpo.losses.__all__}
    words |= {f"jaxgrpo.rewards.{word}" for word in jaxgrpo.rewards.__all__}
    assert words - documented == set()


@pytest.mark.full
def test_sections_examples_and_fields_are_read_from_the_docstrings(site):
    page = (site / "api" / "advantages.html").read_text()
    begin = page.index('id="jaxgrpo.advantages.divide_by_group_std"')
    part = re.sub(r"<[^>]+>", "", page[begin : page.index("Source code in", begin)])
    assert "Parameters:" in part
    assert "Source: Shao et al. 2024" in part
    assert "&gt;&gt;&gt; from jaxgrpo.advantages import evaluate" in part
    assert "[P, G] bool, stopped by the length limit" in (site / "api" / "data.html").read_text()


@pytest.mark.full
def test_links_that_leave_the_docs_lead_to_pages_with_the_files(site):
    page = (site / "advantages.html").read_text()
    assert 'href="source/examples/own_advantage.py.html"' in page
    assert "soft_clip" in (site / "source" / "examples" / "own_advantage.py.html").read_text()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example/a.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//fonts.example/a.css">'),
        ("a.html", '<link rel="preconnect" href="https://fonts.example">'),
        ("a.html", '<img src="https://badges.example/a.svg">'),
        ("a.html", '<p style="background: url(https://pictures.example/a.png)"></p>'),
        ("a.html", "<style>@import 'https://fonts.example/a.css';</style>"),
        ("a.css", "@font-face { src: url(https://fonts.example/a.woff2) }"),
        ("a.js", 'load("https://unpkg.com/mermaid@11/dist/mermaid.min.js")'),
    ],
)
def test_what_is_loaded_from_elsewhere_is_found(repository, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert len(module(repository, "check").check(tmp_path)) == 1


def test_what_a_reader_follows_may_lead_anywhere(repository, tmp_path):
    links = '<a href="https://arxiv.org/abs/2402.03300"></a><script src="a.js"></script>'
    (tmp_path / "a.html").write_text(f'{links}<link rel="canonical" href="https://here.example">')
    assert module(repository, "check").check(tmp_path) == []


@pytest.mark.slow
def test_the_table_of_papers_is_what_the_script_computes():
    assert make_papers.page() == make_papers.PAGE.read_text(), "out of date: make docs"
    tests = make_papers.METHOD_TESTS.read_text()
    assert make_papers.method_tests() == tests, "out of date: make docs"


def test_every_paper_has_a_test_and_says_what_is_not_reproduced(repository):
    numbers = {mention.number for mention in make_papers.mentions()}
    assert not make_papers.NOT_REPRODUCED.keys() & make_papers.FORMULAS
    assert numbers == make_papers.NOT_REPRODUCED.keys() | make_papers.FORMULAS
    rows = re.findall(r"^\| \[(\d+\.\d+)\]\(.*$", make_papers.PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(numbers)
    for line in make_papers.PAGE.read_text().splitlines():
        if line.startswith("| ["):
            *_, test, experiment, lacks, _ = line.split("|")
            assert (repository / test.strip(" `")).is_file(), line
            for file in re.findall(r"\((experiments/\w+\.md)\)", experiment):
                assert (repository / "docs" / file).is_file(), line
            assert bool(lacks.strip()) == (line[3:13] not in make_papers.FORMULAS), line


def test_papers_are_read_with_what_they_are_called():
    text = (
        "Source: equation 8 of Gradient starvation, arXiv 2605.07689. DAPO's filter, arXiv "
        "2503.14476; Dr. GRPO, Liu et al. 2025, arXiv 2503.20783, and arXiv 2602.04879."
    )
    labels = {mention.number: mention.label for mention in make_papers.sources(text, "m", "f")}
    assert labels == {
        "2605.07689": "Gradient starvation",
        "2503.14476": "DAPO",
        "2503.20783": "Liu et al. 2025",
        "2602.04879": "",
    }
