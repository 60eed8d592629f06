"""The notebook runs from its first cell to its last, as Jupyter runs it."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def notebook(repository):
    return nbformat.read(repository / "examples" / "notebook.ipynb", as_version=4)


def test_it_is_stored_without_outputs(notebook):
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) >= 6
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count] == []


@pytest.mark.full
def test_every_cell_runs_in_a_kernel_and_the_reward_rises(notebook, tmp_path, environment):
    # A kernel has a running event loop, which the run's own loops must tolerate.
    extra = nbformat.v4.new_code_cell(CHECK)
    notebook = notebook.copy()
    notebook.cells = [*notebook.cells, extra]
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=environment(devices=1, XLA_FLAGS=""))  # 440 steps: worth optimising
    assert extra_output(client) == "True True True"
    assert (tmp_path / "runs" / "notebook" / "report.html").exists()


CHECK = """
import asyncio

asyncio.get_running_loop()
rises = sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 > 0.05
print(rises, len(rewards) == run.summary["step"] == 40, (exported / "tokenizer.json").exists())
"""


def extra_output(client: NotebookClient) -> str:
    """What the last cell printed."""
    return "".join(out["text"] for out in client.nb.cells[-1].outputs).strip()
