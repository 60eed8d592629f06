"""`jaxgrpo import`: a model in a GGUF file becomes a Hugging Face folder."""

from __future__ import annotations

from rich.console import Console

from jaxgrpo.models.gguf.importing import import_gguf
from jaxgrpo.training.console import facts


def main(file: str, out: str, *, overwrite: bool = False) -> int:
    """Writes the folder and says what was read. Returns the exit code.

    Raises: InputError where the file cannot be read whole, or the folder may not be replaced.
    """
    console = Console(highlight=False)
    facts(console, import_gguf(file, out, overwrite))
    console.print(f"{out}: a Hugging Face folder; next: jaxgrpo model {out}", soft_wrap=True)
    return 0
