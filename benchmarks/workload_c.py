"""The model and the prompts of workload C at shape S as files, for `jaxgrpo train`.

    python -m benchmarks.workload_c [FOLDER]

The prompts are those of `python -m benchmarks.sampling --workloads S/C`, token by token: the
tokenizer has one Chinese character per token. Seconds per step are in the run's metrics.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.workloads import UNKNOWN, WORKLOADS, build, model_config, prompts_of
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models.hf import folders

CONFIG = Path(__file__).with_suffix(".toml")
DEFAULT = CONFIG.parent.parent / "runs" / "workload_c"
"""Where the config looks for both."""


def write(folder: Path) -> tuple[Path, Path]:
    """Writes the model and the prompts. Returns the places of both."""
    config = model_config("S")
    vocab = config.vocab_size
    special = UNKNOWN + 1
    tokenizer = character_tokenizer([chr(0x4E00 + place) for place in range(vocab - special)])
    model, params = build(config, ragged=True)
    folders.save_model(folder / "model", model, params, tokenizer=tokenizer)
    asked = prompts_of(WORKLOADS["C"], vocab)
    lines = [
        json.dumps({"prompt": tokenizer.decode(tokens[mask])})
        for tokens, mask in zip(asked.prompt_tokens, asked.prompt_mask, strict=True)
    ]
    (folder / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder / "model", folder / "prompts.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT)
    folder = parser.parse_args().folder
    model, prompts = write(folder)
    command = f"jaxgrpo train {CONFIG}"
    if folder.resolve() != DEFAULT.resolve():
        command += f" --set model.path={model} data.path={prompts} run.dir={folder / 'run'}"
    print(command)


if __name__ == "__main__":
    main()
