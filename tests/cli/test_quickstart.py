"""The shipped example learns; without information in the reward it does not."""

import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quickstarts
import small_run
from engines import draw_all, make_engine
from quick import long, long_but
from rich.console import Console

from jaxgrpo.cli import start
from jaxgrpo.core.types import Prompts
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders as huggingface
from jaxgrpo.models.hf.families import FAMILIES
from jaxgrpo.rollout.engine import SamplingSettings

pytestmark = pytest.mark.full  # `make readme` runs the command too
TASK = tasks.find("arithmetic")
TOKENIZER = character_tokenizer(TASK.alphabet)
PAD, END = 0, 1
LIMIT = 300  # seconds that `jaxgrpo quickstart` may take on two cores


def environment() -> dict[str, str]:
    """That of a user, with its devices and its compiler."""
    return {**os.environ, "XLA_FLAGS": "", "NO_COLOR": "1", "COLUMNS": "120"}


def run(python: str, folder: Path, *arguments: str) -> tuple[str, dict[str, Any], float]:
    """A command as a user gives it: (output, summary, seconds)."""
    began = time.monotonic()
    process = small_run.command(python, *arguments, cwd=folder, env=environment())
    output, _ = process.communicate(timeout=2 * LIMIT)
    assert process.returncode == 0, output
    [summary] = folder.glob("runs/*/summary.json")
    return output, json.loads(summary.read_text()), time.monotonic() - began


@pytest.fixture(scope="module")
def shipped(tmp_path_factory, python):
    """(folder, output, summary, seconds) of `jaxgrpo quickstart` in an empty folder."""
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, *run(python, folder, "quickstart")


def test_the_quickstart_lifts_greedy_accuracy_within_its_time(shipped):
    _, _, summary, seconds = shipped
    assert quickstarts.judge(summary) == []
    assert seconds <= LIMIT


def test_the_base_is_bimodal_and_training_makes_groups_agree_on_success(shipped):
    _, _, summary, _ = shipped
    base, trained = summary["base"], summary["trained"]
    assert base["accuracy/level_1"] > 0.9 > 0.3 > base["accuracy/level_2"]
    assert base["pass@1"] < base["pass@4"] < base["pass@16"]
    # Were success equally likely everywhere, groups of 8 would agree far less often.
    p = base["pass@1"]
    assert base["flat_groups"] > 10 * (p**8 + (1 - p) ** 8)
    assert trained["flat_groups"] > base["flat_groups"]


def test_the_table_at_the_end_has_the_numbers_of_the_summary(shipped):
    folder, output, summary, _ = shipped
    for name in ["accuracy", "pass@1", "pass@4", "pass@16", "flat_groups"]:
        [row] = re.findall(rf"^.*\b{re.escape(name)} .*$", output, re.MULTILINE)[-1:]
        numbers = [float(number) for number in re.findall(r"\d\.\d{3}", row)]
        expected = [summary["base"][name], summary["trained"][name]]
        assert numbers == pytest.approx(expected, abs=5e-4)
    assert (folder / "runs" / "quickstart" / "model" / "model.safetensors").exists()
    assert f"{summary['time/tokens_per_second']:,.0f}" in output


def test_a_summary_of_fewer_samples_than_a_group_has_is_shown(tmp_path, capsys):
    numbers = {"accuracy": 0.5, "pass@1": 0.4}
    speed = {"time/seconds": 3.0, "time/tokens_per_second": None}
    summary = {"base": numbers, "trained": numbers, **speed, "model": "m", "metrics": "m"}
    start._show(Console(), tmp_path, summary)
    assert "pass@1" in (output := capsys.readouterr().out)
    assert "flat_groups" not in output


def test_lines_of_steps_lead_with_reward_and_end_with_loss(shipped):
    _, output, _, _ = shipped
    lines = re.findall(r"^ +\d+ reward .*$", output, re.MULTILINE)
    assert len(lines) == 60
    order = [lines[-1].index(word) for word in ("reward", "live", "gradient", "loss")]
    assert order == sorted(order)
    assert all(len(line) <= 80 for line in lines)


@pytest.fixture(scope="module")
def base(shipped):
    """The base model of the quickstart: (folder, the line that was printed of it)."""
    folder, output, *_ = shipped
    (line,) = re.findall(r"^.*runs/base: .*$", output, re.MULTILINE)
    return folder / "runs" / "base", line


def judge(folder, group_size: int, temperature: float) -> tuple[np.ndarray, np.ndarray, list]:
    """Scores [P, G] on the test problems, their levels [P], and the texts, P lists of G."""
    rows = tasks.load("task:arithmetic:test")
    model = decoder.build(huggingface.read_config(folder))
    params = huggingface.read_params(folder, model)
    tokens = jnp.array([TOKENIZER(row["prompt"])["input_ids"] for row in rows])
    order = jnp.arange(len(rows))
    prompts = Prompts(
        prompt_tokens=tokens,
        prompt_mask=jnp.ones(tokens.shape, bool),
        ordinal=order,
        row=order,
        step=jnp.int32(0),
    )
    settings = SamplingSettings(24, temperature, (END,), PAD)
    key = jax.random.key_data(jax.random.key(1))
    rollouts = draw_all(make_engine(model, settings, prompts), params, prompts, key, group_size)
    texts = [
        TOKENIZER.batch_decode(group, skip_special_tokens=True)
        for group in np.asarray(rollouts.completion_tokens).tolist()
    ]
    scores = [
        TASK.score(group, [row["answer"]] * group_size)
        for group, row in zip(texts, rows, strict=True)
    ]
    return np.array(scores), np.array([row["level"] for row in rows]), texts


def test_greedy_base_is_right_without_a_carry_and_careless_with_one(base):
    scores, level, _ = judge(base[0], 1, 0.0)
    assert 0.3 < scores.mean() < 0.65
    assert scores[level == 1].mean() > 0.97
    assert scores[level > 1].mean() < 0.1


def test_success_of_the_sampled_base_is_bimodal_over_the_prompts(base):
    scores, level, texts = judge(base[0], 16, 1.0)
    success = scores.mean(1)
    assert success[level == 1].mean() > 0.94
    assert 0.15 < success[level == 2].mean() < 0.27
    assert 0.03 < success[level == 3].mean() < 0.15
    middle = (success > 0.5) & (success < 0.8)
    assert middle.mean() < 0.05
    # Groups of 8 hold a right and a wrong sample for most prompts with one carry.
    first = scores[:, :8]
    mixed = first.max(1) > first.min(1)
    assert mixed[level == 2].mean() > 0.65
    worked = {text.prompt for text in TASK.corpus()}
    rows = tasks.load("task:arithmetic:test")
    assert not worked & {row["prompt"] for row in rows}
    solved = [
        text in arithmetic.solutions(*map(int, row["prompt"][:-1].split("+")))
        for row, group in zip(rows, texts, strict=True)
        for text in group
    ]
    assert np.mean(solved) > 0.96


def test_the_line_printed_has_the_size_and_a_loss_near_its_floor(base):
    folder, line = base
    model = decoder.build(huggingface.read_config(folder))
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(model.shapes)]
    assert sum(sizes) == 99_712
    form = r"runs/base: 99,712 parameters, loss ([\d.]+) nats per token \(.* below ([\d.]+)\)"
    ((loss, floor),) = re.findall(form, line)
    assert float(floor) < float(loss) < float(floor) + 0.005


@pytest.mark.parametrize("name", long_but(["lora"], quickstarts.VARIANTS))
def test_another_family_and_adapters_learn_as_much(shipped, name):
    summary = quickstarts.run(name, shipped[0], env=environment(), timeout=2 * LIMIT)
    assert quickstarts.judge(summary) == []
    saved = quickstarts.run_folder(name, shipped[0]) / "model"
    family = name if name in FAMILIES else "qwen3"
    assert json.loads((saved / "config.json").read_text())["model_type"] == family
    scores, *_ = judge(saved, 1, 0.0)  # of adapters: the weights with them added
    assert scores.mean() == pytest.approx(summary["trained"]["accuracy"], abs=0.01)


def control(python, shipped, tmp_path, reward):
    base = shipped[0] / "runs" / "base"
    _, summary, _ = run(
        python,
        tmp_path,
        *("train", "quickstart", "--set", f"model.path={base}", "train.steps=40", "eval.every=0"),
        *(f'rewards=[{{use="{small_run.__file__}:{reward}"}}]', "eval.scorer=arithmetic"),
    )
    return summary["trained"]["accuracy"] - summary["base"]["accuracy"]


def test_a_coin_flip_for_a_reward_teaches_nothing(python, shipped, tmp_path):
    assert control(python, shipped, tmp_path, "coin") < 0.15


def test_a_negated_reward_makes_it_worse(python, shipped, tmp_path):
    assert control(python, shipped, tmp_path, "negated") < 0


@long
def test_another_seed_learns_too(python, tmp_path):
    _, summary, _ = run(python, tmp_path, "quickstart", "--set", "train.seed=1")
    assert summary["trained"]["accuracy"] >= 0.80
