"""Which files of own code each command runs: those of the list in docs/configuration.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import pytest
import tomli_w

from jaxgrpo.cli.main import main
from jaxgrpo.cli.make_base import base_config
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders
from jaxgrpo.training import stored_policy

KINDS = {
    "first": "def f(completions, **columns):\n    return [0.0] * len(completions)\n",
    "second": "def f(completions, **columns):\n    return [0.0] * len(completions)\n",
    "scorer": "def f(completions, **columns):\n    return [0.0] * len(completions)\n",
    "step": "def f(signal, rollouts):\n    return signal\n",
    "surrogate": "from jaxgrpo.losses.surrogates import clip as f\n",
    "environment": "from jaxgrpo.environments.games import NumberGuess as f\n",
    "format": "def f(text):\n    return text, []\n",
}
"""Kind of own code -> what its file holds, beside a line that says that it was run."""

WORDS = {
    "first": "reward",
    "second": "rewards",
    "scorer": "eval.scorer",
    "step": "chain",
    "surrogate": "loss",
    "environment": "environments",
}
"""Kind -> the word that names it in the list."""

DATA = ("--data", "task:number_guess:test", "--num-prompts", "1", "-n", "2")
SAMPLE = ("sample", "{run}", "--prompts", "{home}/p.jsonl", "--out", "{home}/o")
RUNS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "eval": (("eval", "{run}", *DATA), {"scorer", "environment"}),
    "probe": (("probe", "{run}", *DATA), {"first", "environment"}),
    "sample": (SAMPLE, {"environment"}),
    "serve": (("serve", "{run}", "--port", "0"), set()),
    "check CONFIG": (("check", "{run}/config.toml"), {"first", "second", "step", "surrogate"}),
    "report": (("report", "{run}", "--text"), set()),
    "model": (("model", "{run}"), set()),
    "export": (("export", "{run}", "{home}/out"), set()),
    "rescore": (("rescore", "{run}", "--rewards", "f"), set()),
}  # fmt: skip
"""Command of the list -> its words, and the kinds of own code that it runs."""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A run folder with a model, and own code of every kind beside it."""
    home = tmp_path_factory.mktemp("home")
    task = tasks.find("number_guess")
    tokenizer = character_tokenizer(task.alphabet, task.chat_template)
    model = decoder.build(base_config(len(tokenizer), 32, 1))
    params = jax.jit(model.init)(jax.random.key(0))
    folders.save_model(model, params, home / "run" / "model", tokenizer)
    for kind, text in KINDS.items():
        note = f"from pathlib import Path\nPath(__file__).with_suffix('.run').touch()\n{text}"
        (home / f"{kind}.py").write_text(note)
    use = {kind: f"{home}/{kind}.py:f" for kind in KINDS}
    sizes = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 8}
    tables = {
        "model": {"path": str(home / "run" / "model")},
        "data": {"path": "task:number_guess:train"},
        "rewards": [{"use": use["first"]}, {"use": use["second"], "name": "g"}],
        "advantage": [{"use": "sum_rewards"}, {"use": use["step"]}],
        "loss": {"surrogate": {"use": use["surrogate"]}},
        "environment": use["environment"],
        "eval": {"data": "task:number_guess:test", "scorer": use["scorer"], "kl_to_base": False},
        "optimizer": {"learning_rate": 1e-4},
        "rollout": {**sizes, "max_completion_tokens": 48, "call_format": use["format"]},
        "train": {"steps": 1},
        "run": {"dir": str(home / "run")},
    }
    (home / "run" / "config.toml").write_text(tomli_w.dumps(tables))
    (home / "p.jsonl").write_text('{"prompt": "guess", "secret": 3}\n')
    return home


@pytest.mark.full
@pytest.mark.parametrize("command", RUNS)
def test_a_command_runs_the_own_code_that_the_list_says(command, home, monkeypatch, repository):
    def stop(*_: object) -> None:
        raise InputError("everything is loaded")

    monkeypatch.setattr(stored_policy.StoredPolicy, "read_params", stop)
    for name in [name for name in sys.modules if name.startswith("own_")]:
        monkeypatch.delitem(sys.modules, name)
    for file in home.glob("*.run"):
        file.unlink()
    words, kinds = RUNS[command]
    main([word.format(home=home, run=home / "run") for word in words])
    assert {file.stem for file in home.glob("*.run")} == kinds
    page = (repository / "docs" / "configuration.md").read_text()
    (row,) = re.findall(rf"^- [^:]*`{command}`[^:]*: (.*)$", page, re.MULTILINE)
    for kind in kinds:
        assert WORDS[kind] in row
