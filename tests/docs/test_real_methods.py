"""docs/real_methods.py: what its experiments compare, and the command itself in one step."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import comparisons
import pytest
import quick
import tomli_w

from docs import real_methods, real_model
from jaxgrpo.config.keys import SHIPPED
from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.models.gguf.importing import import_gguf

EXPERIMENTS = {real_methods.METHODS: 30, real_methods.LORA: 4, real_methods.KL: 3}
"""The shipped experiments, and how many runs each has."""
ARMS = {"grpo", "sign", "beta_0", "beta_01"}
"""Those of a smaller run: adapters are compared with all weights arm by arm."""


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_experiments_differ_in_what_the_page_compares(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = experiments.load(name)
    cases = experiments.make_cases(experiment)
    assert experiment.number_of_runs == EXPERIMENTS[name]
    assert {case.config.train.steps for case in cases} == {10}
    assert {case.config.lora.rank for case in cases} == {16 if name == real_methods.LORA else 0}
    keys = {
        key.removesuffix(".use").removesuffix(".beta") for key in experiments.differences(cases)
    }
    assert keys == {"loss.kl" if name == real_methods.KL else "recipe"}
    assert experiment.keep_models == (name == real_methods.KL)  # which are asked questions


def test_there_are_thirty_general_questions_and_their_answers():
    rows = [json.loads(line) for line in real_methods.QUESTIONS.read_text().splitlines()]
    assert len(rows) == len({row["question"] for row in rows}) == 30
    assert rows[0] == {
        "question": real_methods.FRANCE,
        "answer": "The capital of France is Paris.",
    }
    assert all(row["question"].endswith("?") and row["answer"].endswith(".") for row in rows)


@quick.long
def test_the_command_makes_runs_asks_models_probes_and_writes_the_page(
    tmp_path, monkeypatch, capsys
):
    """With one step, one seed and few prompts; GSM8K has two problems."""
    monkeypatch.chdir(tmp_path)
    import_gguf(real_model.gguf_file(), real_model.BASE)
    for name in EXPERIMENTS:
        shorter(name, tmp_path / f"{name}.toml")
        monkeypatch.setattr(
            real_methods, name.split("_")[1].upper(), str(tmp_path / f"{name}.toml")
        )
    page = Path(shutil.copy(real_methods.PAGE, tmp_path))
    monkeypatch.setattr(real_methods, "PAGE", page)
    monkeypatch.setattr(real_methods, "PROBED", {"samples": 8, "prompts": 2})
    problems = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in (2, 3)]
    Path("gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    with comparisons.one_device():
        code = real_methods.main("gsm8k.jsonl")
    printed = capsys.readouterr().out
    assert code == ("FAIL" in printed)  # one step need not teach anything
    assert "one base in each seed: yes" in printed
    text = page.read_text()
    for arm in ("grpo", "sign"):
        assert f"| `{arm}` |" in text
    assert "The capital of France is Paris." in text  # what the base says
    assert (tmp_path / "real-model.png").stat().st_size > 10_000


def shorter(name: str, file: Path) -> None:
    """The shipped experiment `name` with two arms, one step, one rate and one judged seed."""
    tables: dict[str, Any] = tomllib.loads(
        (SHIPPED / "experiments" / f"{name}.toml").read_text(encoding="utf-8")
    )
    tables |= {"seeds": [0], "dir": str(file.with_suffix("")), "base": "smollm2_sums"}
    tables["learning_rates"] = tables["learning_rates"][:1]
    tables["arms"] = {arm: keys for arm, keys in tables["arms"].items() if arm in ARMS}
    tables["set"] = {
        **tables.get("set", {}),
        "train": {"steps": 1},
        "rollout": {"prompts_per_step": 2, "group_size": 4},
        "eval": {"prompts": 4, "samples": 4},
        "model": {"path": str(real_model.BASE.absolute())},
    }
    file.write_text(tomli_w.dumps(tables))
