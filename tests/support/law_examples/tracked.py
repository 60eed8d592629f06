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
        "smooth_standardise": [(adv.sum_rewards(), adv.smooth_standardise())],
        "mask_below_running_deviation": [
            (adv.sum_rewards(), adv.mask_below_running_deviation(), adv.subtract_group_mean())
        ],
        "shape_by_effective_rank": [
            (adv.sum_rewards(), adv.subtract_group_mean(), adv.shape_by_effective_rank()),
            (adv.sum_rewards(), adv.to_tokens(), adv.shape_by_effective_rank(3.0, decay=0.0)),
        ],
        "mask_difficulty_band": [
            (success, adv.mask_difficulty_band(keep=0.9), adv.subtract_group_mean())
        ],
    }


def recipes() -> dict[str, list[Any]]:
    return {
        "dcpo_smooth": [adv.build("dcpo_smooth", {"weights": BINARY})],
        "ema": [adv.build("ema", {"weights": BINARY})],
        "rank_learning": [adv.build("rank_learning", {"weights": BINARY})],
        "spo": [adv.build("spo", {"weights": BINARY})],
    }
