"""The host's part of a step: which prompts, what the tokens say, how rewards judge them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgrpo import sharding
from jaxgrpo.io.conversations import for_rewards
from jaxgrpo.prompts import PromptPolicy, make_prompts
from jaxgrpo.rewards import RewardFunction, call_rewards
from jaxgrpo.types import Prompts, Rollouts, TrainState


def put_prompts(mesh: Mesh, prompts: Prompts) -> Prompts:
    """Host prompts on the mesh: P over the bins, the step everywhere."""

    def put(leaf: Any) -> Array:
        return sharding.put(leaf, sharding.named(mesh, *("bins", None)[: np.ndim(leaf)]))

    return jax.tree.map(put, prompts)


def make_selector(
    mesh: Mesh, policy: PromptPolicy, encoded: Sequence[np.ndarray], geometry: Any, seed: int
) -> Callable[[TrainState], tuple[Prompts, TrainState]]:
    """The function that asks the prompt policy for the next step's prompts."""

    def select(state: TrainState) -> tuple[Prompts, TrainState]:
        cursor = int(sharding.to_host(state.cursor))
        ordinals = policy.select(state.prompt_policy_state, cursor, geometry.num_prompts)
        prompts = make_prompts(
            ordinals,
            encoded,
            max_prompt_tokens=geometry.max_prompt_tokens,
            seed=seed,
            step=int(sharding.to_host(state.step)),
        )
        after = sharding.put(np.int32(ordinals.max() + 1), sharding.replicated(mesh))
        return put_prompts(mesh, prompts), dataclasses.replace(state, cursor=after)

    return select


def decode_texts(tokenizer: Any, tokens: np.ndarray, mask: np.ndarray) -> list[str]:
    """Texts of [N, T] tokens, up to the last one sampled, without special tokens."""
    return tokenizer.batch_decode(completion_ids(tokens, mask), skip_special_tokens=True)


def completion_ids(tokens: Any, mask: Any) -> list[list[int]]:
    """Token ids of [N, T] completions, up to the last one sampled."""
    length = np.where(mask.any(-1), mask.shape[-1] - np.argmax(mask[:, ::-1], axis=-1), 0)
    return [row[:end].tolist() for row, end in zip(tokens, length, strict=True)]


def judge_texts(
    tokenizer: Any,
    functions: Mapping[str, RewardFunction],
    rows: Sequence[Mapping[str, Any]],
    row: np.ndarray,
    tokens: np.ndarray,
    mask: np.ndarray,
) -> dict[str, np.ndarray]:
    """Calls rewards on completions [P, G, T]; columns come from the data rows, once per sample.

    With several processes each judges its share of the groups and all get every score.

    Returns: name -> float32 [P, G], NaN = not scored.
    """
    groups, samples, steps = tokens.shape
    count, mine = jax.process_count(), jax.process_index()
    own = np.arange(groups) % count == mine
    chosen = [rows[index] for index in row[own] for _ in range(samples)]
    flat_tokens = tokens[own].reshape(-1, steps)
    flat_mask = mask[own].reshape(-1, steps)
    columns = {name: [entry[name] for entry in chosen] for name in rows[0] if name != "prompt"}
    prompts, completions = for_rewards(
        [entry["prompt"] for entry in chosen], decode_texts(tokenizer, flat_tokens, flat_mask)
    )
    scores = call_rewards(
        functions,
        prompts=prompts,
        completions=completions,
        completion_ids=completion_ids(flat_tokens, flat_mask),
        columns=columns,
    )
    whole = {}
    for name, values in scores.items():
        # Scores of others stay -inf, below any that a reward may return, until all are gathered.
        part = np.full((groups, samples), -np.inf, np.float32)
        part[own] = values.reshape(-1, samples)
        whole[name] = _gather_max(part) if count > 1 else part
    return whole


def make_rewarder(
    mesh: Mesh,
    tokenizer: Any,
    functions: Mapping[str, RewardFunction],
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, np.ndarray],
) -> Callable[[Rollouts], Rollouts]:
    """The function that judges rollouts and adds the scores to them.

    Args:
      columns: numeric columns of the data, [rows, ...], that the method needs as fields.
    """

    def reward(rollouts: Rollouts) -> Rollouts:
        host = sharding.to_host((rollouts.row, rollouts.completion_tokens, rollouts.token_mask))
        scores = judge_texts(tokenizer, functions, rows, *host)
        layout = sharding.named(mesh, "bins", None)
        placed = {name: sharding.put(value, layout) for name, value in scores.items()}
        by_prompt = sharding.named(mesh, "bins")
        fields = {
            name: sharding.put(column[host[0]], by_prompt) for name, column in columns.items()
        }
        return dataclasses.replace(rollouts, rewards=placed, fields={**rollouts.fields, **fields})

    return reward


def _gather_max(part: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    everyone = np.asarray(multihost_utils.process_allgather(part))
    owner = np.argmax(~np.isneginf(everyone), axis=0)  # NaN, not scored, belongs to its judge too
    return np.take_along_axis(everyone, owner[None], axis=0)[0]
