"""Reasoning reflection and the filtered-model family."""

from __future__ import annotations

from typing import Any

from jaxgrpo import advantages as adv
from law_examples.basics import BINARY


def parts() -> dict[str, list[tuple[Any, ...]]]:
    return {
        "reasoning_reflection": [
            (adv.reasoning_reflection(masked_thought=True, propagation=0.1), adv.sum_rewards()),
            (
                adv.reasoning_reflection("top", drop=0.0, spread="max", share=0.5),
                adv.sum_rewards(r3=1.0, **dict.fromkeys(BINARY, 0.0)),
            ),
        ],
        "add_information_gain": [
            (adv.sum_rewards(), adv.subtract_group_mean(), adv.add_information_gain(0.5, 0.1, 1.0)),
            (
                adv.sum_rewards(),
                adv.subtract_group_mean(),
                adv.to_tokens(),
                adv.add_information_gain(beta=0.2),
            ),
        ],
        "answer_probability": [
            (adv.answer_probability(masked_thought=True), adv.sum_rewards()),
            (adv.answer_probability("product"), adv.sum_rewards()),
        ],
        "perplexity_rank": [(adv.perplexity_rank(efficiency=0.5), adv.sum_rewards())],
        "keep_thoughts": [(adv.sum_rewards(), adv.subtract_group_mean(), adv.keep_thoughts())],
        "train_on_answers": [
            (adv.sum_rewards(), adv.subtract_group_mean(), adv.train_on_answers(0.5))
        ],
        "answer_length": [(adv.answer_length(field="classes"), adv.sum_rewards())],
        "alpha_dpg": [
            (adv.sum_rewards(), adv.alpha_dpg(threshold=0.5, z="running")),
            (adv.sum_rewards(**BINARY), adv.alpha_dpg(base_rate="difficulty")),
            (adv.sum_rewards(**BINARY), adv.alpha_dpg(0.0, off_policy=True)),
        ],
        "f_dpg": [(adv.sum_rewards(**BINARY), adv.f_dpg("chi2"))],
    }


def recipes() -> dict[str, list[Any]]:
    return {
        "dro_r3": [adv.build("dro_r3", {"weights": {"correct": 0.2, "style": 0.0, "r3": 1.0}})],
        "rlpr": [adv.build("rlpr", {"weights": BINARY})],
        "verifree": [adv.build("verifree", {"weights": BINARY})],
        "nover": [adv.build("nover", {"weights": BINARY})],
        "l2t": [adv.build("l2t", {"weights": BINARY, "beta": 0.5})],
        "alpha_dpg": [adv.build("alpha_dpg", {"weights": BINARY})],
        "f_dpg": [adv.build("f_dpg", {"threshold": 0.5})],
    }
