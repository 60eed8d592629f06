"""docs/advantages.md: its table is computed again, its own step is trained."""

from __future__ import annotations

import re
import subprocess

import jax.numpy as jnp
import pytest
import small_run

from docs import make_advantages as maker
from jaxgrpo.advantages import chain, registry, sum_rewards, to_tokens
from jaxgrpo.config import files
from jaxgrpo.core.types import Signal
from jaxgrpo.training import loop


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs" / "advantages.md").read_text()


def blocks(page, language):
    code_blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for name, text in code_blocks if name == language]


@pytest.mark.full
@pytest.mark.slow
def test_the_pages_are_what_the_script_computes():
    for path, text in maker.pages().items():
        assert path.read_text() == text, f"{path.name} is out of date: make docs"


@pytest.mark.parametrize("name", registry.recipes)
def test_every_recipe_says_where_it_is_from_and_when_to_use_it(name):
    factory = registry.recipes[name]
    assert maker.paper(factory), f'{name}: its docstring needs "Source: ..., arXiv ..."'
    assert maker.use_when(factory), f'{name}: its docstring needs a paragraph "Use it when ..."'


def test_what_imitates_a_library_names_the_library_and_not_a_paper():
    assert maker.paper(registry.recipes["like_trl"]) == "TRL 1.16, GRPOTrainer"
    assert maker.paper(registry.recipes["like_verl"]).startswith("verl 0.9.1")


def test_outcomes_tell_zero_from_left_out_and_equal_neighbours_together():
    value = jnp.array([[0, 0, 0], [0, 0, 0], [1.5, -0.5, -0.5], [0, 0, 2]])
    mask = jnp.array([[1, 1, 1], [0, 0, 0], [1, 1, 1], [0, 1, 1]], bool)
    words = [maker.outcome(Signal(value=value, mask=mask), group) for group in range(4)]
    assert words == ["0", "left out", "+1.5, 2 × -0.5", "·, 0, +2"]
    tokens = Signal(value=value[None], mask=mask[None])
    assert maker.outcome(tokens, 0) == "0, ·, (+1.5 -0.5 -0.5), (· 0 +2)"


@pytest.mark.slow
def test_the_table_tells_sample_group_and_batch_and_says_what_is_missing(monkeypatch):
    def needy():
        """Reads what nobody has.

        Use it when
        there is more. Really.

        Source: Someone 1999, chapter 2. It differs.
        """
        step = to_tokens()._replace(needs=frozenset({"soul"}))
        return chain(sum_rewards(), step, name="needy")

    def centre(signal, rollouts):
        return Signal(value=signal.value - signal.value.mean(), mask=signal.mask)

    monkeypatch.setitem(registry.recipes, "needy", needy)
    monkeypatch.setitem(registry.recipes, "centre", lambda: chain(sum_rewards(), centre))
    recipes = {name: registry.recipes[name] for name in ("needy", "centre", "grpo", "sign")}
    rows = {
        line.split("`")[1]: [cell.strip() for cell in line.split("|")[1:-1]]
        for line in maker.table(recipes).splitlines()[2:]
    }
    assert rows["needy"][2] == "Someone 1999, chapter 2"
    assert rows["needy"][4] == "needs more: to_tokens needs the field 'soul'"
    assert rows["needy"][7] == "there is more. Really"
    assert rows["centre"][3:6] == ["batch", "-0.5 each", "+0.5 each"]
    assert rows["grpo"][3:7] == ["group", "0", "0", "+1.5, 3 × -0.5"]
    assert rows["sign"][3:7] == ["sample", "-1 each", "+1 each", "+1, 3 × -1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "document", ["README.md", pytest.param("docs/advantages.md", marks=pytest.mark.full)]
)
def test_what_the_command_prints_is_what_the_documents_show(
    repository, document, python, environment
):
    (shown,) = [b for b in blocks((repository / document).read_text(), "") if b.startswith("$")]
    command, _, expected = shown.removeprefix("$ jaxgrpo ").partition("\n")
    run = subprocess.run(
        [python, "-m", "jaxgrpo", *command.split()],
        env=environment(), cwd=repository, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line.rstrip() for line in run.stdout.splitlines()] == expected.splitlines()


@pytest.mark.full
@pytest.mark.slow
def test_the_pages_step_with_memory_trains_from_toml_and_resumes_bit_for_bit(page, tmp_path):
    (code,) = [block for block in blocks(page, "python") if "def running_baseline" in block]
    code = code[: code.index("\nmine = ")]
    imports = "import dataclasses\nimport jax.numpy as jnp\nimport jaxgrpo as jg\n"
    (tmp_path / "my_advantages.py").write_text(imports + code)

    def train(name, steps, **more):
        file = small_run.write(tmp_path / f"{name}.toml", tmp_path / name)
        user_step = '{ use = "my_advantages.py:running_baseline", decay = 0.95 }'
        text = f'advantage = [{{ use = "sum_rewards" }}, {user_step}]\n' + re.sub(
            r"^recipe = .*\n", "", file.read_text(), flags=re.MULTILINE
        )
        file.write_text(text)
        return loop.train(files.load(file, [f"train.steps={steps}"]), **more)

    straight = train("straight", 4)
    train("broken", 2)
    resumed = train("broken", 4, resume="auto")
    assert resumed.summary["parameter_hash"] == straight.summary["parameter_hash"]
    assert small_run.metrics(resumed.path) == small_run.metrics(straight.path)
    baseline = float(resumed.learner.advantage_state["running_baseline"])
    assert baseline == float(straight.learner.advantage_state["running_baseline"]) != 0
