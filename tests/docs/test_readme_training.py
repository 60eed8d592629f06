"""The first lines of Python in README.md train the base of the quickstart to a better model."""

import re
import subprocess

import pytest

BLOCK = re.compile(
    r"tests/docs/test_readme_training\.py runs it -->\n```python\n(.*?)```", re.DOTALL
)
SHOWN = "\nprint(run.summary['base']['accuracy'], run.summary['trained']['accuracy'])\n"


@pytest.mark.full
def test_the_lines_of_the_first_screen_train_a_model(tmp_path, python, environment, repository):
    (code,) = BLOCK.findall((repository / "README.md").read_text("utf-8"))
    assert len([line for line in code.splitlines() if line.strip()]) == 8
    variables = environment(XLA_FLAGS="")
    for command in (
        ["-m", "jaxgrpo", "make-base", "arithmetic", "runs/base"],
        ["-c", code + SHOWN],
    ):
        process = subprocess.run(
            [python, *command], cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
    before, trained = map(float, process.stdout.split()[-2:])
    assert trained > max(0.8, before)
