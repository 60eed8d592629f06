"""Draws docs/roofline.png: operations per byte of sampling and updates, and what chips allow.

    python -m docs.roofline     (from the repository's root)

Operations are the least by formula, as `jaxgrpo plan --formula` counts them, and so are the bytes
of decoding; those of updates on chips are of the compiled programs. Peaks of chips are their
makers'. What was measured stands here, with its source.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from docs.pages import FOLDER
from jaxgrpo.config.files import make_config
from jaxgrpo.core.chips import CHIPS
from jaxgrpo.planning import costs, programs, topologies

UPDATE_BYTES = {"h100:1": 8.0e12, "v5e:2x4": 681e9, "h200:1": 8.0e12}
"""That an update of Qwen3-0.6B moves on each chip (docs/performance.md, on chips not here)."""
SECONDS = {"h200:1": {"decode": 6.6e-3, "update": 4.49}, "cpu": {"decode": 0.179, "update": 25.3}}
"""Measured: of a step of decoding, and of an update (benchmarks/results/2026-11-27-h200.md and
2026-11-27-laptop.md)."""
CPU_PEAK, CPU_BANDWIDTH = 325e9, 21.3e9
"""Measured there: FLOP/s of a float32 product of 2,048 x 2,048 x 2,048, bytes/s of a sum."""
SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "head_dim": 64,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rope_theta": 1e5,
}
COLOURS = {"decode": "#4477aa", "update": "#cc6677"}


class Load(NamedTuple):
    """What a step of decoding, or an update, asks of one device."""

    flops: float
    moved: float  # bytes


def loads(run: Any, devices: int, update_bytes: float | None) -> dict[str, Load]:
    """Of a run by formula, updates with the compiled bytes where they are counted."""
    work = costs.program_work(run)
    steps = run.blueprint.sampling.segment_tokens
    decode, update = work["decode"], work["update"]
    return {
        "decode": Load(decode.flops / steps / devices, decode.read / steps),
        "update": Load(update.flops / devices, update_bytes or update.read),
    }


def on_chip(name: str) -> tuple[float, float, dict[str, Load]]:
    """Peak, bandwidth and loads of Qwen3-0.6B, 32 x 8 samples of 512 + 1,024 tokens."""
    devices = topologies.not_compiled_for(name, 1).devices
    changes = {"mesh.fsdp": len(devices), "rollout.slots": 256}
    run = programs.build_run(make_config("qwen3_0p6b_v5e", changes), devices)
    chip = CHIPS[name.split(":")[0]]
    return chip.flops, chip.bandwidth, loads(run, len(devices), UPDATE_BYTES[name])


def on_cpu() -> tuple[float, float, dict[str, Load]]:
    """Those of SmolLM2-135M in float32, 8 x 8 samples of 48 + 64 tokens."""
    changes = {"model.config": SMOLLM2, "rollout.max_completion_tokens": 64}
    run = programs.build_run(make_config("smollm2_sums", changes), jax.devices("cpu")[:1])
    return CPU_PEAK, CPU_BANDWIDTH, loads(run, 1, None)


def shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def draw_panel(panel: Any, title: str, platform: str) -> None:
    peak, bandwidth, each = on_cpu() if platform == "cpu" else on_chip(platform)
    intensity = np.geomspace(2, 2000, 200)
    panel.loglog(intensity, np.minimum(peak, bandwidth * intensity) / 1e12, color="black", lw=1)
    for name, load in each.items():
        place = load.flops / load.moved
        roof = min(peak, bandwidth * place)
        panel.plot(place, roof / 1e12, "o", mfc="white", color=COLOURS[name])
        text = f"{name}: {shown(load.flops / roof)} at least"
        seconds = SECONDS.get(platform, {}).get(name)
        if seconds is not None:
            rate = load.flops / seconds
            panel.plot(place, rate / 1e12, "o", color=COLOURS[name])
            panel.vlines(place, rate / 1e12, roof / 1e12, color=COLOURS[name], lw=1, ls=":")
            text += f"; took {shown(seconds)} (filled), {rate / roof:.0%} of the roof"
        filled = "white" if seconds is None else COLOURS[name]
        panel.plot([], [], "o", mfc=filled, color=COLOURS[name], label=text)
    panel.set_title(title, size=10)
    panel.set_xlabel("operations per byte")
    panel.legend(loc="lower right", fontsize=7.5, frameon=False)
    panel.grid(alpha=0.2)
    panel.set_ylim(peak / 2e3 / 1e12, 2 * peak / 1e12)


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    titles = {
        "h100:1": "H100, Qwen3-0.6B: published peaks, nothing ran",
        "v5e:2x4": "TPU v5e, one of 8 chips, Qwen3-0.6B: nothing ran",
        "h200:1": "H200, Qwen3-0.6B: measured",
        "cpu": "two CPU cores, SmolLM2-135M in float32: measured",
    }
    for panel, (platform, title) in zip(panels.flat, titles.items(), strict=True):
        draw_panel(panel, title, platform)
    for panel in panels[:, 0]:
        panel.set_ylabel("TFLOP/s of a device")
    figure.savefig(FOLDER / "roofline.png", dpi=110)


if __name__ == "__main__":
    main()
