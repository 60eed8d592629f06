"""`jaxgrpo import`: a model in a GGUF file becomes a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from jaxgrpo.models.gguf.importing import import_gguf
from jaxgrpo.training.records.console import Document, facts


def main(file: str, out: str, *, overwrite: bool = False, as_json: bool = False) -> int | Document:
    """Writes the folder and says what was read. Returns the exit code.

    Raises: InputError where the file cannot be read whole, or the folder may not be replaced.
    """
    summary = import_gguf(file, out, overwrite)
    if as_json:
        return Document({**summary, "out": out})
    console = Console(highlight=False)
    facts(console, lines(summary))
    line = f"{out}: a Hugging Face folder; next: jaxgrpo model {out}"
    console.print(line, soft_wrap=True, markup=False)
    return 0


def lines(summary: Mapping[str, Any]) -> dict[str, str]:
    """What to print of what `import_gguf` returns.

    >>> lines({"model": "Small", "family": "llama", "parameters": 37248, "tensors": {"Q4_0": 9},
    ...        "dtype": "float32", "tokenizer": "SentencePiece", "tokens": 300,
    ...        "chat_template": False})["tensors"]
    '9 Q4_0'
    """
    return {
        "model": f"{summary['model']} ({summary['family']})",
        "parameters": f"{summary['parameters']:,}",
        "tensors": ", ".join(f"{count} {kind}" for kind, count in summary["tensors"].items()),
        "written in": summary["dtype"],
        "tokenizer": f"{summary['tokens']} tokens, {summary['tokenizer']}",
        "chat template": "yes" if summary["chat_template"] else "none",
    }
