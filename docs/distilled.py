"""A small model, taught by the quickstart's trained model and trained by its reward: the figure and
the table of docs/distillation.md.

    python -m docs.distilled

Makes what is missing in runs/: the quickstart's base and run, two small bases, and a run of each
method at each learning rate. All of it takes about ten minutes on two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

from docs.pages import FOLDER, between, markdown, write

RUNS = Path("runs")
TEACHER = RUNS / "quickstart"
BASES = {400: 60, 200: 100}
"""Steps of a base of 48 units -> steps of the runs that begin with it."""
METHODS = {
    "taught, JSD": ("top_k_divergence", "#1f6feb"),
    "taught, opd": ("opd", "#2a9d8f"),
    "by its reward": ("quickstart", "#d1495b"),
}
"""Name -> the shipped config, and its colour."""
RATES = {"1e-3": "-", "3e-4": ":"}
"""Learning rate -> line. The second is the quickstart's."""
EVERY = 20  # steps between evaluations

Curve = dict[int, float]
"""Finished steps -> pass@1 on 256 held-out sums, from 4 samples each."""
Key = tuple[int, str, str]
"""(steps of the base, method, learning rate)"""


def main() -> None:
    if not (TEACHER / "model").exists():
        jaxgrpo("quickstart")
    for base in BASES:
        if not small(base).exists():
            jaxgrpo(*f"make-base arithmetic {small(base)} --hidden-size 48 --steps {base}".split())
    keys = [(base, name, rate) for base in BASES for name in METHODS for rate in RATES]
    curves = {key: read_curve(key) for key in keys}
    draw(curves).savefig(FOLDER / "distillation.png", dpi=110, metadata={"Software": None})
    page = FOLDER / "distillation.md"
    problem = "there is no <!-- distilled --> ... <!-- end --> to write between"
    sides = "<!-- distilled -->\n", "<!-- end -->"
    write({page: between(page.read_text(), *sides, table(curves) + "\n", problem)})


def small(base: int) -> Path:
    """The folder of a small base; the one of the page is called runs/small."""
    return RUNS / ("small" if base == 400 else f"small-{base}")


def read_curve(key: Key) -> Curve:
    """The evaluations of a run, which is taken if it is missing."""
    base, name, rate = key
    config = METHODS[name][0]
    run = RUNS / f"{small(base).name}-{config}-{rate}"
    if not (run / "summary.json").exists():
        changes = [
            *(f"model.path=./{small(base)}", f"run.dir={run}", "run.report=false"),
            *(f"optimizer.learning_rate={rate}", f"train.steps={BASES[base]}"),
            *(f"eval.every={EVERY}", "eval.samples=4"),
        ]
        jaxgrpo("train", config, "--set", *changes)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["eval/pass@1"] for line in lines if "eval/pass@1" in line}


def table(curves: dict[Key, Curve]) -> str:
    """pass@1 of each run at its start, after some steps and at its end."""
    head = ("base", "method", "learning rate", "before", "after 20 steps", "at the end")
    rows = [
        (f"{base} steps", name, rate, *(f"{curve[step]:.3f}" for step in (0, EVERY, max(curve))))
        for (base, name, rate), curve in curves.items()
    ]
    return markdown(head, rows)


def draw(curves: dict[Key, Curve]) -> Figure:
    """pass@1 by steps, a panel for each base."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(BASES))
    for panel, base in zip(panels, BASES, strict=True):
        for name, (_, color) in METHODS.items():
            for rate, line in RATES.items():
                curve = curves[base, name, rate]
                panel.plot([*curve], [*curve.values()], line, color=color, label=f"{name}, {rate}")
        panel.set_title(f"a base of {base} steps", fontsize=10)
        panel.set_xlabel("step, 256 samples each")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("pass@1, held-out sums")
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def jaxgrpo(*arguments: str) -> None:
    """Runs a command of jaxgrpo.  Raises: SystemExit if it fails."""
    code = subprocess.run([sys.executable, "-m", "jaxgrpo", *arguments]).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
