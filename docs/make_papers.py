"""Computes the table of docs/papers.md: which part comes from which paper, and what holds it.

    python -m docs.make_papers     (make docs)

Papers are read off the docstrings, which give their sources as "Source: DAPO, arXiv 2503.14476".
The test is the file that names most of what comes from the paper, the experiments are the pages
that give it as their source. What is not reproduced is in the table below.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docs.pages import FOLDER, arxiv_link, between, markdown, write
from jaxgrpo.cli.methods import KINDS, papers
from jaxgrpo.cli.methods import TESTS as METHOD_TESTS

PACKAGE = FOLDER.parent / "jaxgrpo"
PAGE = FOLDER / "papers.md"
TESTS = FOLDER.parent / "tests"

TASKS = "what it gains in training: its tasks, and models of its size"
NOT_REPRODUCED = {
    "1506.02438": "learning to walk: a simulator, and a critic, which is not trained here",
    "1707.06347": "scores in games and locomotion: environments with many turns",
    "1904.09751": "ratings of texts by people",
    "1909.08593": "texts that people prefer: their ratings, and a reward model",
    "1912.09729": "the game that it plays",
    "2005.12729": "its ablations of PPO in locomotion: simulators",
    "2010.02840": "its test suites for Spider: databases that are chosen to tell queries apart",
    "2110.14168": "its verifiers: a second model that is trained to judge",
    "2206.00761": TASKS,
    "2306.08543": TASKS,
    "2306.13649": TASKS,
    "2302.08215": TASKS,
    "2402.03300": "its scores in mathematics: pretraining of 7B on 120B tokens",
    "2402.14740": TASKS,
    "2405.19107": TASKS,
    "2407.01082": "ratings of creative texts",
    "2412.06464": "language models of 1.3 billion parameters, trained from nothing",
    "2501.03262": TASKS,
    "2501.12599": "the model of Moonshot and its tasks",
    "2501.12948": "reasoning that emerges in a model of 671B",
    "2502.12272": TASKS,
    "2503.14286": TASKS,
    "2503.14476": "its score in AIME with 32B",
    "2503.19595": "pass@k gained in training; X2 has its expected gradient",
    "2503.20783": "its score in AIME with 7B; X2 has its expected gradient",
    "2504.07912": "which format wins at 150M and 1B; X13 trains a small model on three formats",
    "2505.10978": "its scores in ALFWorld and WebShop: environments of many turns and 1.5B to 7B",
    "2504.14945": "its gains from a stronger model's solutions: such solutions",
    "2504.16084": "its gains in AIME without labels: models that are right now and then",
    "2504.19599": TASKS,
    "2505.07291": "training by volunteers' machines",
    "2505.10425": "its savings of tokens in long thoughts",
    "2505.15201": "pass@k gained in training; X2 has its expected gradient",
    "2505.16022": TASKS,
    "2505.19590": TASKS,
    "2505.21493": TASKS,
    "2505.22312": "its scores in mathematics and code with 7B and 32B",
    "2505.22617": TASKS,
    "2505.22660": TASKS,
    "2505.23585": TASKS,
    "2505.24864": "2,000 steps of several tasks with 1.5B",
    "2506.01939": TASKS,
    "2506.02355": "its gains in theorem proving: a prover",
    "2506.11902": "its gains in mathematics; X8 has its noise",
    "2506.13351": "its gains in long answers: models with long thoughts, and judges",
    "2506.13585": "CISPO in half of DAPO's steps with 32B, and the model of 456B",
    "2506.18254": TASKS,
    "2507.16806": "its calibration in questions of several hops; rlcr shows it on a small task",
    "2507.18071": "stable training of a mixture of experts: experts",
    "2507.19457": "prompts that a model writes after reading failures: such a model",
    "2507.20673": TASKS,
    "2508.08221": TASKS,
    "2508.10751": "pass@k gained in training; X2 has its expected gradient without the deviation",
    "2508.15260": "its savings with long thoughts: windows of 2,048 tokens",
    "2508.17445": "its savings of hours on accelerators; X8 has its noise",
    "2509.02333": TASKS,
    "2509.02534": "diversity as a classifier sees it: that classifier",
    "2509.03646": "its gains in AIME: plans in the thoughts of large models",
    "2509.13232": "its majority votes in mathematics with 8B",
    "2509.19128": "its speed: sampling and training at the same time",
    "2509.20712": TASKS,
    "2509.21240": "its gains in questions of several hops: a search tool; X8 has its noise",
    "2509.23808": TASKS,
    "2510.02245": TASKS,
    "2510.13786": "curves over 100,000 hours of accelerators; the config scale_rl has its method",
    "2511.20347": TASKS,
    "2512.02556": "the model of 671B",
    "2512.05962": "coverage in Lean with 7B: a prover; X4 has it on an enumerated toy",
    "2601.05242": TASKS,
    "2601.18734": "its gains in mathematics; the config opsd shows it on a small task",
    "2601.20802": "its gains in code and science with 7B; the config sdpo shows it on a small task",
    "2601.22582": TASKS,
    "2602.02710": "its gains in training; X2 has its expected gradient",
    "2602.03025": "calls of tools in several turns: such tools",
    "2602.04879": TASKS,
    "2602.05630": TASKS,
    "2602.07078": TASKS,
    "2602.10693": TASKS,
    "2605.02375": "97% on one sequence of its bigram model; X4 collapses a base of its own",
    "2605.07689": "73.8 against 28.4 on GSM8K with 9B; X3 and X3b train small models",
    "2605.12484": "fewer steps and some 70% less KL at the same reward: GEPA's prompts, its tasks",
    "2605.21125": TASKS,
    "2605.25604": TASKS,
    "2605.28388": "shortcuts that hard problems teach large models",
    "2606.30406": "teachers of several domains with 30B; the config mopd has two on a small task",
}
"""Paper -> the headline that is not reproduced here, or what it would need."""

FORMULAS = {
    *("2104.09864", "2106.09685", "2107.03374", "2205.14135", "2306.15595", "2307.08691"),
    *("2208.07339", "2309.00071", "2312.03732", "2402.13753", "2405.04434", "2407.21783"),
    *("2101.03961", "2408.15664", "2412.19437"),
}
"""Papers whose formulas are all that is taken; tests compare them with transformers, or with a
plain computation."""


OF_ALL_PARTS = re.compile(
    r"test_(laws|names|english|chain|numerics|invariances|building|methods|own_programs"
    r"|live_groups|check|check_pages)"
)
"""Test files that name many parts and hold the oracle of none."""

TESTED = {
    "2101.03961": "`tests/update/test_balance.py`",
    "2306.13649": "`tests/update/test_distillation.py`",
    "2402.03300": "`tests/advantages/test_closed_forms.py`",
    "2205.14135": "`tests/models/test_kernels.py`",
    "2208.07339": "`tests/rollout/test_low_bit.py`",
    "2408.15664": "`tests/update/test_balance.py`",
    "2412.06464": "`tests/models/test_recurrence.py`",
    "2412.19437": "`tests/models/test_latents.py`",
    "2507.19457": "`tests/training/test_prefixes.py`",
    "2509.19128": "`tests/training/test_staleness.py`",
    "2510.13786": "`tests/training/test_scale_rl.py`",
    "2601.18734": "`tests/training/test_taught_by_itself.py`",
    "2601.20802": "`tests/training/test_distilled_runs.py`",
    "2606.30406": "`tests/training/test_taught_by_itself.py`",
}
"""Paper -> its test, where that calls what comes from the paper by other names."""


class Mention(NamedTuple):
    """A place in the code that names a paper as its source."""

    number: str
    label: str  # "" where the docstring gives the number alone
    module: str  # "jaxgrpo.advantages.masks"
    name: str  # of the function or class; "" for the module itself


def mentions() -> Iterator[Mention]:
    """Every source with a number in the docstrings of the package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        tree = ast.parse(file.read_text())
        for node in [tree, *tree.body]:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split())
                yield from sources(text, module, getattr(node, "name", ""))


def sources(text: str, module: str, name: str) -> Iterator[Mention]:
    """The papers of a docstring on one line."""
    for paper in papers(text):
        yield Mention(paper.number, paper.label, module, name)


def describe_kind(mention: Mention) -> tuple[str, str]:
    """What it is, with a link to its page, and its name; with dots if it is not chosen by name."""
    place = (mention.module, mention.name)
    for kind, (about, factories) in KINDS.items():
        for name, factory in factories.items():
            if (factory.__module__, getattr(factory, "__name__", "")) == place:
                return f"[{kind}]({about})", name
    public = mention.name and not mention.name.startswith("_")
    return "", f"{mention.module}.{mention.name}" if public else mention.module


def table(all_mentions: list[Mention]) -> str:
    """The table of papers, newest last, in Markdown."""
    rows = []
    for number in sorted({mention.number for mention in all_mentions}):
        paper_mentions = [mention for mention in all_mentions if mention.number == number]
        labels = ", ".join(
            dict.fromkeys(mention.label for mention in paper_mentions if mention.label)
        )
        by_kind: dict[str, list[str]] = {}
        for mention in paper_mentions:
            kind, name = describe_kind(mention)
            by_kind.setdefault(kind, []).append(f"`{name}`")
        order = sorted(by_kind, key=lambda kind: kind == "")
        cells = [f"{kind} {', '.join(dict.fromkeys(by_kind[kind]))}".strip() for kind in order]
        test = TESTED.get(number) or find_test(paper_mentions)
        holds = test, find_experiments(number)
        lacks = NOT_REPRODUCED.get(number, "")
        rows.append((arxiv_link(number), labels or "–", "; ".join(cells), *holds, lacks))
    header = ("paper", "called", "what comes from it", "test", "experiment", "not reproduced")
    return markdown(header, rows)


@functools.cache
def test_words() -> dict[Path, list[str]]:
    """The words of every test file that holds oracles."""
    return {
        file: re.findall(r"\w+", file.read_text())
        for file in sorted(TESTS.rglob("test_*.py"))
        if not OF_ALL_PARTS.fullmatch(file.stem)
    }


def find_test(paper_mentions: list[Mention]) -> str:
    """The test file of the same package that names most of what comes from a paper.

    A module that no config names has its file where the file is called as it is.
    """
    names, modules, packages = set[str](), set[str](), set[str]()
    for mention in paper_mentions:
        kind, name = describe_kind(mention)
        packages.add(mention.module.split(".")[1])
        names.add(name.rpartition(".")[2])
        modules |= set() if kind else {*mention.module.split(".")[2:]}

    def rank(file: Path) -> tuple[int, bool, bool, int]:
        words = test_words()[file]
        in_package = file.relative_to(TESTS).parts[0] in packages
        is_of_module = in_package and any(module in file.stem for module in modules)
        distinct = len(names.intersection(words))
        return distinct + 2 * is_of_module, in_package, is_of_module, sum(w in names for w in words)

    best = max(test_words(), key=rank)
    return f"`{best.relative_to(TESTS.parent)}`"


def find_experiments(number: str) -> str:
    """Links to the pages of experiments that give a paper as a source."""
    pages = sorted(
        (FOLDER / "experiments").glob("x*.md"),
        key=lambda page: int(re.findall(r"\d+", page.stem)[0]),
    )
    return ", ".join(
        f"[{page.stem.partition('_')[0].capitalize()}](experiments/{page.name})"
        for page in pages
        if number in page.read_text()
    )


def method_tests() -> str:
    """What `jaxgrpo methods` gives as tests: kind -> name -> file, as JSON."""
    tests: dict[str, dict[str, str]] = {}
    for kind, (_, factories) in KINDS.items():
        tests[kind] = {
            name: find_test([Mention("", "", factory.__module__, factory.__name__)]).strip("`")
            for name, factory in sorted(factories.items())
        }
    return json.dumps(tests, indent=1) + "\n"


def page() -> str:
    """What docs/papers.md should hold."""
    text = PAGE.read_text()
    return between(text, "<!-- papers -->\n", "\n<!-- end -->", table(list(mentions())))


if __name__ == "__main__":
    write({PAGE: page(), METHOD_TESTS: method_tests()})
