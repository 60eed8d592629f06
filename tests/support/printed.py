"""What a command prints, for tests that ask for it in a process."""

from __future__ import annotations

from typing import Any

from jaxgrpo.cli.main import main


def printed(capsys: Any, *words: Any, code: int = 0) -> str:
    """The output of `jaxgrpo WORDS`; of one that is to fail with a code, its message."""
    assert main([*map(str, words)]) == code
    out = capsys.readouterr()
    return out.out if code == 0 else out.err
