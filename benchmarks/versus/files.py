"""A workload as files that every contender reads: a model folder, prompts and a list of sizes.

    python -m benchmarks.versus.files S/C FOLDER

The second argument gets `model`, `prompts.jsonl`, `work.json`, and `run.toml` for `jaxgrpo train`.
The tokenizer has one character per token, so that a text has the same tokens everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from benchmarks.contest import parser as make_parser
from benchmarks.versus.work import Work
from benchmarks.workloads import (
    END,
    PAD,
    UNKNOWN,
    WORKLOADS,
    Workload,
    build,
    make_prompts,
    model_config,
)
from jaxgrpo.config.files import write_toml
from jaxgrpo.core.types import Params
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models.hf import folders

MICRO = {"V": 8, "Q": 8}
"""Samples whose logits PyTorch holds at once, where those of all would not fit."""
FIRST, SURROGATES = 0x4E00, range(0xD800, 0xE000)


def write(name: str, folder: Path, workload: Workload | None = None, device: str = "cpu") -> Work:
    """Writes the files of a workload, such as "S/C", and says what is in them.

    Args:
      workload: instead of the one that the name means.
    """
    letter, kind = name.split("/")
    workload = workload or WORKLOADS[kind]
    config = model_config(letter)
    special = UNKNOWN + 1
    count = config.vocab_size - special
    points = (point for point in range(FIRST, 0x110000) if point not in SURROGATES)
    alphabet = [chr(point) for point, _ in zip(points, range(count), strict=False)]
    tokenizer = character_tokenizer(alphabet)
    model, params = build(config, workload.ragged)
    if not workload.ragged:
        params = never_ending(params)
    folders.save_model(model, params, folder / "model", tokenizer, {"eos_token_id": END})
    prompts = make_prompts(workload, config.vocab_size)
    flat = round(workload.flat * workload.prompts)
    lines = [
        json.dumps({"prompt": tokenizer.decode(tokens[mask]), "hard": row < flat})
        for row, (tokens, mask) in enumerate(
            zip(prompts.prompt_tokens, prompts.prompt_mask, strict=True)
        )
    ]
    (folder / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    work = Work(
        name=name,
        folder=str(folder.resolve()),
        prompts=workload.prompts,
        samples=workload.samples,
        longest=workload.longest,
        completion=workload.completion,
        exact=not workload.ragged,
        micro=MICRO.get(letter, workload.prompts * workload.samples),
        dtype=config.dtype,
        device=device,
        reward="parity" if flat else "spread",
        pad=PAD,
        end=END,
    )
    work.save()
    return work


def never_ending(params: Params) -> Params:
    """The parameters of a model whose samples do not end, so that nobody has to forbid it.

    Component 0 of every embedding is alike, and the end token's output weight far below it.
    """
    table = params["embed"]["table"]
    if "head" not in params:  # one table is both
        return params | {"embed": {"table": table.at[:, 0].set(8.0).at[END, 0].set(-8.0)}}
    head = params["head"]["table"].at[END, 0].set(-5.0)
    return params | {"embed": {"table": table.at[:, 0].set(1.0)}, "head": {"table": head}}


def run_config(work: Work, steps: int = 11) -> dict[str, Any]:
    """The config by which jaxgrpo trains on a workload, as tables."""
    folder = Path(work.folder)
    return {
        "recipe": "like_trl",
        "rewards": [{"use": f"benchmarks.versus.work:{work.reward}", "name": "reward"}],
        "model": {"path": str(folder / "model"), "dtype": work.dtype},
        "data": {"path": str(folder / "prompts.jsonl"), "answer": "", "chat_template": "none"},
        "loss": {"surrogate": {"use": "clip", "low": 0.2, "high": 0.2}},  # TRL's defaults
        "optimizer": {"learning_rate": work.learning_rate, "weight_decay": 0.0, "clip_norm": 1.0},
        "rollout": {
            "prompts_per_step": work.prompts,
            "group_size": work.samples,
            "max_prompt_tokens": work.longest,
            "max_completion_tokens": work.completion,
        },
        "train": {"steps": steps},
        "mesh": {"platform": "cpu" if work.device == "cpu" else "gpu"},
        "checkpoint": {"every": 10**6},  # none but the last
        "tracking": {"tensorboard": False},
        "run": {"dir": str(folder / "run"), "samples_every": 0, "report": False},
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("workload", metavar="WORKLOAD", help="such as S/C")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    work = write(arguments.workload, arguments.folder)
    (arguments.folder / "run.toml").write_text(write_toml(run_config(work)))
    print(f"jaxgrpo train {arguments.folder / 'run.toml'}")


if __name__ == "__main__":
    main()
