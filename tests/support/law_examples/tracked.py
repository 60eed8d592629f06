"""Parts with memory."""

from __future__ import annotations

from typing import Any

from jaxgrpo import advantages as adv
from law_examples.basics import BINARY


def parts() -> dict[str, list[tuple[Any, ...]]]:
    success = adv.sum_rewards(**BINARY)
    return {
        "ema_baseline": [(adv.sum_rewards(), adv.ema_baseline(initial=0.5))],
        "divide_by_running_scale": [
            (adv.sum_rewards(), adv.divide_by_running_scale()),
            (adv.sum_rewards(), adv.to_tokens(), adv.divide_by_running_scale(initial=2.0)),
        ],
        "subtract_tracked_success": [
            (success, adv.subtract_tracked_success()),
            (success, adv.subtract_tracked_success(drift="difficulty", initial="difficulty")),
        ],
        "mask_difficulty_band": [
            (success, adv.mask_difficulty_band(keep=0.9), adv.subtract_group_mean())
        ],
    }


def recipes() -> dict[str, list[Any]]:
    return {
        "ema": [adv.build("ema", {"weights": BINARY})],
        "spo": [adv.build("spo", {"weights": BINARY})],
    }
