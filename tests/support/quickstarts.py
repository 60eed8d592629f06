"""The quickstart in other families and by LoRA, all held to one bar: `make quickstarts`.

    python tests/support/quickstarts.py

Bases and runs go to runs/ of the working directory, beside those of `jaxgrpo quickstart`; what is
there already is used.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BASE = (0.3, 0.65)  # greedy accuracy of the base: it has mistakes to lose
TRAINED = 0.85  # and of the trained model, at least

VARIANTS: dict[str, tuple[str, ...]] = {
    # Qwen3's layers without norms of queries and keys.
    "llama": ("--family", "llama"),
    # Windows, two ropes, norms of (1 + weight) on both sides, scaled embeddings.
    "gemma3_text": ("--family", "gemma3_text"),
    # A layer with a gated delta rule, and one with gated attention on a quarter of turned heads.
    "qwen3_5_text": ("--family", "qwen3_5_text"),
    # Four experts, of which each token passes two.
    "qwen3_moe": ("--family", "qwen3_moe"),
    # The same of five with biases and a clamp; sinks, and a window in every second layer.
    "gpt_oss": ("--family", "gpt_oss"),
    # Ten times the learning rate, all linear maps and alpha = 32, as in LoRA Without Regret
    # (Schulman et al. 2025, thinkingmachines.ai/blog/lora).
    "lora": (
        *("--set", "lora.rank=8", "lora.alpha=32", "optimizer.learning_rate=3e-3"),
        "run.dir=runs/quickstart-lora",
    ),
}
"""Name -> options of `jaxgrpo quickstart`, whose run is then runs/quickstart-NAME."""


def main() -> int:
    """Runs them all; exit code 1 if one fails or misses the bar."""
    lines, missed = [], []
    for name in VARIANTS:
        began = time.monotonic()
        say(f"quickstart: {name}")
        try:
            summary = run(name, Path())
        except subprocess.CalledProcessError as error:
            problems, shown = [f"exit code {error.returncode}"], "failed"
        else:
            problems, shown = judge(summary), "{:.3f} -> {:.3f}".format(*accuracies(summary))
        lines.append(f"{name:12} {shown:16} {time.monotonic() - began:4.0f} s")
        missed += [f"{name}: {problem}" for problem in problems]
    say("\n".join(["greedy accuracy of base and trained model", *lines, *missed]))
    return int(bool(missed))


def run(name: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Runs a variant in `folder` and gives what its summary.json says.

    Raises: subprocess.CalledProcessError if the command fails.
    """
    command = [sys.executable, "-m", "jaxgrpo", "quickstart", *VARIANTS[name]]
    subprocess.run(command, cwd=folder, check=True, **options)
    return json.loads((run_folder(name, folder) / "summary.json").read_text())


def run_folder(name: str, folder: Path) -> Path:
    return folder / "runs" / f"quickstart-{name}"


def accuracies(summary: dict[str, Any]) -> tuple[float, float]:
    """Greedy accuracy of the base and of the trained model."""
    return summary["base"]["accuracy"], summary["trained"]["accuracy"]


def judge(summary: dict[str, Any]) -> list[str]:
    """Why a run misses the bar; [] if it does not."""
    before, after = accuracies(summary)
    problems = []
    if not BASE[0] <= before <= BASE[1]:
        problems.append(f"the base has {before:.3f}, not {BASE[0]} to {BASE[1]}")
    if after < TRAINED:
        problems.append(f"the trained model has {after:.3f}, less than {TRAINED}")
    return problems


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
