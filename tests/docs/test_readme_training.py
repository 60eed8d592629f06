"""The lines of Python in README.md that train: a better model, and one that uses a tool."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxgrpo
from jaxgrpo.config import files

BLOCK = re.compile(
    r"tests/docs/test_readme_training\.py runs it -->\n```python\n(.*?)```", re.DOTALL
)
BLOCKS = [
    # lines of code, base, metric that is shown, its least value
    (8, ["arithmetic", "runs/base"], "accuracy", 0.8),
    (8, ["calculator", "runs/calculator-base"], "pass@1", 0.85),
]


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_lines_of_the_page_train_a_model(tmp_path, python, environment, repository, number):
    blocks = BLOCK.findall((repository / "README.md").read_text("utf-8"))
    assert len(blocks) == len(BLOCKS)
    code, (lines, base, metric, least) = blocks[number], BLOCKS[number]
    assert len([line for line in code.splitlines() if line.strip()]) == lines
    shown = f"\nprint(run.summary['base']['{metric}'], run.summary['trained']['{metric}'])\n"
    variables = environment(XLA_FLAGS="")
    for command in (["-m", "jaxgrpo", "make-base", *base], ["-c", code + shown]):
        process = subprocess.run(
            [python, *command], cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
    before, trained = map(float, process.stdout.split()[-2:])
    assert trained > max(least, before)


def test_the_lines_for_a_model_and_data_of_ones_own_are_a_config_and_a_reward(
    repository, monkeypatch, tmp_path
):
    """Nothing is trained: the config is read, and the reward judges."""
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").touch()
    trained = {}

    def train(config, rewards):
        trained.update(config=files.make_config(config, {}, rewards), rewards=rewards)
        return SimpleNamespace(export=lambda out: Path(out))

    monkeypatch.setattr(jaxgrpo, "train", train)
    page = (repository / "README.md").read_text("utf-8")
    (code,) = re.findall(r"reads its config -->\n```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert trained["config"].data.path.endswith("train.jsonl")
    (reward,) = trained["rewards"]
    assert reward(["It is 72.", "27", ""], answer=[72, "72", "72"]) == [1.0, 0.0, 0.0]
