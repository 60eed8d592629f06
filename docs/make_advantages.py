"""Computes the table of recipes in docs/advantages.md, and names them in docs/configuration.md.

    python -m docs.make_advantages     (make docs)

Each recipe is run on one batch with a group of 4 for every number of successes, 0 to 4. Paper and
"use it when" come from the recipe's docstring: "Source: ... arXiv 2402.03300", and a paragraph that
begins "Use it when".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from docs.pages import FOLDER, between, markdown, paper, paragraph, write
from jaxgrpo.advantages import AdvantageTransform, build, compute, registry
from jaxgrpo.advantages.registry import plain_rollouts
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Signal

SAMPLES = 4
TOKENS = 2
HEADER = (
    *("recipe", "chain", "paper", "judged by", "all fail", "all pass", "1 of 4 right"),
    "use it when",
)
SUCCESS = (np.arange(SAMPLES) < np.arange(SAMPLES + 1)[:, None]).astype(np.float32)
"""[5, 4]: row n has n successes."""

REWARDS: dict[str, dict[str, np.ndarray]] = {
    "rlcr": {
        "accuracy": SUCCESS,
        "brier": np.full_like(SUCCESS, 0.75),  # every sample says that it is sure to one half
        "format": np.ones_like(SUCCESS),
    }
}
"""Rewards of recipes that want them by name; the others get SUCCESS as their only one."""


def fields(success: np.ndarray = SUCCESS) -> dict[str, np.ndarray]:
    """On-policy samples of two tokens: all policies agree; right answers are judged likelier."""
    prompts, samples = success.shape
    token = np.ones((prompts, samples, TOKENS), np.float32)
    tree = np.broadcast_to(np.arange(samples) // 2, success.shape)
    leaf = np.broadcast_to(3 + np.arange(samples), success.shape)
    answer = np.stack([success - 1.5, np.full_like(success, -0.2)], -1)
    logp_fields = ("behavior_logp", "trainer_logp", "reference_logp", "base_logp")
    return {
        **dict.fromkeys(logp_fields, -token),
        "token_mask": token.astype(bool),
        "completion_tokens": np.arange(token.size).reshape(token.shape),  # all texts differ
        "truncated": np.zeros_like(success, bool),
        "token_entropy": token,
        "token_confidence": token,
        "self_certainty": token * success[..., None],
        "token_collision": 0.5 * token,
        "effective_rank": token,
        "token_value": 0 * token,
        "planning": token.astype(bool) & (np.arange(TOKENS) == 0),
        "token_depth": np.broadcast_to(np.arange(TOKENS) + 1, token.shape),
        "answer_logp": answer,
        "answer_mask": np.ones((prompts, 2), bool),
        "cut_answer_logp": np.stack([np.full_like(success, -1.7), answer.sum(-1)], -1),
        "thought_tokens": np.full(success.shape, TOKENS),
        "answer_reached": np.ones_like(success, bool),
        "answered": token.astype(bool) & (np.arange(TOKENS) == TOKENS - 1),
        "masked_answer_logp": np.full((prompts, 2), -1.0, np.float32),
        "turn": np.zeros(token.shape, np.int32),
        "turn_reward": 0 * token[..., :1],
        "state_hash": np.zeros((*success.shape, 1), np.int32),
        "turn_truncated": np.zeros((*success.shape, 1), bool),
        "rubric": np.ones_like(success),
        "classes": np.broadcast_to(np.arange(samples), success.shape),
        "tree": tree,
        "ancestors": np.stack([0 * tree, 1 + tree, leaf], -1),
        "row": np.arange(prompts),
    }


def run(name: str, rows: slice = slice(None)) -> Signal:
    """What a recipe, in its first step, leaves of the groups."""
    rewards = REWARDS.get(name, {"reward": SUCCESS})
    arrays = {key: value[rows] for key, value in fields().items()}
    rollouts, spec = plain_rollouts({k: value[rows] for k, value in rewards.items()}, **arrays)
    recipe = build(name)
    return jax.jit(functools.partial(compute, recipe))(rollouts, recipe.init(spec))[0]


def table(recipes: Mapping[str, Callable[..., Any]] = registry.recipes) -> str:
    """The table of all recipes, in Markdown."""
    return markdown(HEADER, [_row(name, recipes[name]) for name in sorted(recipes)])


def _row(name: str, factory: Callable[..., Any]) -> list[str]:
    recipe = build(name)
    chain = " → ".join(f"`{key}`" for key, _ in recipe.steps)
    try:
        signal = run(name)
        outcomes = [outcome(signal, group) for group in (0, SAMPLES, 1)]
        judged = _judged_by(name, recipe, signal)
    except InputError as error:
        outcomes, judged = [f"needs more: {str(error).partition(':')[0]}", "", ""], ""
    cells = [f"`{name}`", chain, paper(factory), judged, *outcomes, use_when(factory)]
    return [cell.replace("|", "/") or "–" for cell in cells]


def outcome(signal: Signal, group: int) -> str:
    """The advantages of one group in words, equal neighbours together."""
    value, mask = np.asarray(signal.value)[group], np.asarray(signal.mask)[group]
    if not mask.any():
        return "left out"
    samples = [_number(number, unmasked) for number, unmasked in zip(value, mask, strict=True)]
    if len(set(samples)) == 1:
        return samples[0] if samples[0] == "0" else f"{samples[0]} each"
    parts: list[list[Any]] = []
    for sample in samples:
        if parts and parts[-1][0] == sample:
            parts[-1][1] += 1
        else:
            parts.append([sample, 1])
    return ", ".join(f"{count} × {text}" if count > 1 else text for text, count in parts)


def _number(value: np.ndarray, mask: np.ndarray) -> str:
    """One sample: a number, or one for each token where they differ; · where masked."""
    texts = [
        f"{number:+.3g}" if number else "0" if unmasked else "·"
        for number, unmasked in zip(np.atleast_1d(value), np.atleast_1d(mask), strict=True)
    ]
    return texts[0] if len(set(texts)) == 1 else f"({' '.join(texts)})"


def _judged_by(name: str, recipe: AdvantageTransform, signal: Signal) -> str:
    """What an advantage depends on.

    On the batch, if it changes where the other groups are left out; else on its group, if a sample
    of the same reward and place gets another one in another group.
    """
    value = np.asarray(signal.value)
    alone = np.asarray(run(name, slice(1, 2)).value)[0]
    pairs = [(value[0, -1], value[1, -1]), (value[1, 0], value[SAMPLES, 0])]
    batch = not np.allclose(alone, value[1], atol=1e-5)
    group = not all(np.allclose(left, right, atol=1e-5) for left, right in pairs)
    scope = "batch" if batch else "group" if group else "sample"
    _, spec = plain_rollouts(REWARDS.get(name, {"reward": SUCCESS}), **fields())
    return f"{scope}, memory" if jax.tree.leaves(recipe.init(spec)) else scope


def use_when(factory: Callable[..., Any]) -> str:
    """The text after "Use it when"."""
    return paragraph(factory, "Use it when").rstrip(".")


def pages() -> dict[Path, str]:
    """Every page with a computed part -> what it should hold."""
    names = ", ".join(f"`{name}`" for name in sorted(registry.recipes))
    written = {
        "advantages.md": ("<!-- table -->\n", "\n<!-- end of table -->", table()),
        "configuration.md": ("<!-- recipes -->", "<!-- end -->", names),
    }
    return {
        FOLDER / name: between((FOLDER / name).read_text(), *markers)
        for name, markers in written.items()
    }


if __name__ == "__main__":
    write(pages())
