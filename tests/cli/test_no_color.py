"""NO_COLOR: no escape sequence of colour on a terminal, from a table or from a run's display."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

COLOUR = re.compile(r"\x1b\[[\d;]*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[\d;]*m")
"""What sets the colour of text or of its background; bold and dim are none."""
OWN = """
import dataclasses


def odd(signal, rollouts):
    return dataclasses.replace(signal, value=signal.value / 0)
"""
DISPLAY = """
from jaxgrpo.training.records.console import Display, warning

display = Display(steps=4, finished_steps=0, active=True)
with display.bar:
    display.under_way("sampling", 1.0)
    display.say(warning(1, "all groups fail"))
    display.bar.update(display.bar.task_ids[0], completed=2)
    display.bar.refresh()
"""
PROGRAMS = {
    "table": ["-m", "jaxgrpo", "advantages", "mine.py:odd", "--rewards", "1,0"],
    "display": ["-c", DISPLAY],
}


def on_a_terminal(*command: str, **options) -> str:
    """What a command writes where its output is a terminal."""
    reader, terminal = os.openpty()
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, **options)
    os.close(terminal)
    text = b""
    try:
        while piece := os.read(reader, 4096):
            text += piece
    except OSError:  # Linux: no process has the terminal open any more
        pass
    finally:
        os.close(reader)
    assert process.wait(timeout=60) == 0, text.decode()
    return text.decode()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="how a terminal ends differs elsewhere")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("no_color", ["1", pytest.param("", marks=pytest.mark.full)])
def test_no_colour_is_written_where_it_is_not_wanted(
    python, environment, tmp_path, program, no_color
):
    (tmp_path / "mine.py").write_text(OWN)
    variables = environment(TERM="xterm-256color", NO_COLOR=no_color)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        variables.pop(name, None)
    text = on_a_terminal(python, *PROGRAMS[program], cwd=tmp_path, env=variables)
    assert "warning" in text
    assert bool(COLOUR.search(text)) == (no_color == ""), text
