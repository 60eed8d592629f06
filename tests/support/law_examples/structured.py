"""Single tokens, off-policy weights, trees and diversity."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxgrpo import advantages as adv


def parts() -> dict[str, list[tuple[Any, ...]]]:
    start = (adv.sum_rewards(), adv.subtract_group_mean())
    last = (*start, adv.to_tokens(place="last"))
    every = (*start, adv.to_tokens())
    return {
        "hicra": [
            (*every, adv.hicra(entropies=True)),
            (*every, adv.hicra(alpha=_growing, grams=[[3], [1, 2], [777, 777]])),
        ],
        "kl_in_reward": [
            (*last, adv.kl_in_reward(_growing), adv.reward_to_go()),
            (*last, adv.kl_in_reward(0.1, reference="base", policy="behavior")),
        ],
        "add_kl_return": [
            (*start, adv.add_kl_return(_growing)),
            (*every, adv.add_kl_return(0.1, reference="base")),
        ],
        "add_kl_return_for_validity": [
            (*start, adv.add_kl_return_for_validity(0.9, reward="correct")),
            (*every, adv.add_kl_return_for_validity(0.9, "style", _growing, "difficulty")),
        ],
        "reward_to_go": [(*last, adv.reward_to_go(gamma=0.9))],
        "gae": [(*last, adv.gae(gamma=0.9, lam=0.8))],
        "truncated_importance": [
            (*every, adv.truncated_importance(cap=1.05)),
            (*start, adv.truncated_importance(cap=_cap, level="sequence")),
        ],
        "masked_importance": [
            (*every, adv.masked_importance(low=0.9, high=1.05, denominator="shrink")),
            (*every, adv.masked_importance(high=1.1, level="sequence")),
        ],
        "geometric_rejection": [(*start, adv.geometric_rejection(high=1.05))],
        "sequence_rejection": [
            (*every, adv.sequence_rejection(high=1.2, denominator="shrink")),
        ],
        "tree_normalise": [
            (adv.sum_rewards(), adv.tree_normalise()),
            (adv.sum_rewards(), adv.tree_normalise(eps=_growing, ddof=0)),
        ],
        "tree_process": [(adv.sum_rewards(), adv.tree_process())],
        "tree_subgroup": [(adv.sum_rewards(), adv.tree_subgroup(weighting="size"))],
        "token_share_weights": [(*every, adv.token_share_weights())],
        **_turn_parts(),
        **_token_parts(),
        "darling": [
            (adv.sum_rewards(), adv.darling()),
            (adv.sum_rewards(), adv.darling(field="classes", floor=_growing)),
        ],
        "unlikeliness": [(adv.sum_rewards(), adv.unlikeliness())],
    }


def _turn_parts() -> dict[str, list[tuple[Any, ...]]]:
    start = (adv.sum_rewards(), adv.subtract_group_mean())
    return {
        "turn_returns": [
            (adv.sum_rewards(), adv.turn_returns(_growing)),
            (*start, adv.turn_returns(0.9, baseline="none", scale=0.5)),
        ],
        "turn_normalise": [
            (adv.sum_rewards(), adv.turn_normalise(scale=_growing)),
            (adv.sum_rewards(), adv.turn_normalise(_growing, _growing, ddof=0)),
        ],
        "keep_turns": [
            (*start, adv.keep_turns(last=1)),
            (adv.sum_rewards(), adv.turn_returns(), adv.keep_turns(first=1, last=1)),
        ],
        "mask_truncated_turns": [
            (*start, adv.mask_truncated_turns()),
            (*start, adv.to_tokens(), adv.mask_truncated_turns()),
        ],
    }


def _token_parts() -> dict[str, list[tuple[Any, ...]]]:
    start = (adv.sum_rewards(), adv.subtract_group_mean())
    return {
        "keep_top_entropy": [
            (*start, adv.to_tokens(), adv.keep_top_entropy(0.1)),
            (*start, adv.keep_top_entropy(_share, denominator="shrink")),
        ],
        "subtract_optimal_token_baseline": [
            (adv.sum_rewards(), adv.subtract_optimal_token_baseline()),
            (
                *(adv.sum_rewards(), adv.to_tokens(place="last"), adv.reward_to_go(0.9)),
                adv.subtract_optimal_token_baseline(),
            ),
        ],
    }


def recipes() -> dict[str, list[Any]]:
    return {
        "hicra": [adv.build("hicra")],
        "darling": [adv.build("darling", {"field": "classes"})],
        "tree_grpo": [adv.build("tree_grpo")],
        "tree_rl": [adv.build("tree_rl")],
        "tree_po": [adv.build("tree_po")],
        "gigpo": [adv.build("gigpo")],
        "intuitor": [adv.build("intuitor")],
        "top_entropy": [adv.build("top_entropy")],
        "optimal_token_baseline": [adv.build("optimal_token_baseline")],
    }


def _growing(step: jax.Array) -> jax.Array:
    """A schedule."""
    return 0.1 * step.astype(jnp.float32)


def _share(step: jax.Array) -> jax.Array:
    """A schedule within (0, 1]."""
    return 1 / (1 + step.astype(jnp.float32))


def _cap(step: jax.Array) -> jax.Array:
    """A schedule that stays above 1."""
    return 1 + 0.01 * step.astype(jnp.float32)
