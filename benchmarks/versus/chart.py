"""The picture of a comparison: seconds of a step by phase, with the ratio over a peer's bar.

    python -m benchmarks.versus.chart OUT.png PRINTED [PRINTED ...]

draws what several runs of the comparison printed; their last lines are JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.versus.contest import OURS
from benchmarks.versus.work import PHASES

COLOURS = {"sample": "#4477aa", "reward": "#ccbb44", "score": "#aa3377", "update": "#66ccee"}


def draw(results: Mapping[str, Mapping[str, Any]], file: Path, about: Mapping[str, Any]) -> None:
    """One panel per workload, since their steps differ by a factor of twenty."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1,
        len(results),
        figsize=(2.2 * len(results) + 0.6, 3.6),
        squeeze=False,
        layout="constrained",
    )
    for panel, (name, sides) in zip(panels[0], results.items(), strict=True):
        for place, values in enumerate(sides.values()):
            below = 0.0
            for phase in PHASES:
                panel.bar(place, values[phase], 0.7, below, color=COLOURS[phase], label=phase)
                below += values[phase]
        for place, (side, values) in enumerate(sides.items()):
            if side != OURS:
                text = f"{values['ratio']:.1f}x"
                panel.text(place, 1.01 * values["step"], text, ha="center", va="bottom", size=11)
        panel.set_title(name, size=11)
        panel.set_xticks(range(len(sides)), list(sides), size=9)
        panel.margins(y=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("seconds of one training step")
    handles, labels = panels[0][0].get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    figure.legend(
        shown.values(), shown, loc="outside lower center", ncols=len(PHASES), frameon=False
    )
    figure.suptitle(f"One step on {about['device']}: less is better", size=10)
    figure.savefig(file, dpi=130)


def main() -> None:
    out, *printed = map(Path, sys.argv[1:])
    runs = [json.loads(file.read_text().splitlines()[-1]) for file in printed]
    results = {name: sides for run in runs for name, sides in run.items() if "/" in name}
    draw(results, out, runs[0])


if __name__ == "__main__":
    main()
