"""How far the policy has moved on each row's last completion, by which SPO's tracker forgets.

    drift[p] = mean_t |logp_now(y_t) - logp_then(y_t)|

y is the last sample of the row's latest group that was drawn for it, over the tokens that the
policy chose, behind the prompt that it was drawn behind; "then" is the policy that drew it, "now"
the one that samples. NaN where the row was not sampled before.

Source: SPO, arXiv 2509.13232, as in the authors' recipe for verl.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.types import REPLAYED, Params, Rollouts, only_tokens
from jaxgrpo.models import sharding
from jaxgrpo.rollout.experience import Rank
from jaxgrpo.rollout.selection import PromptPolicy, with_memory

DRIFT = "drift"
"""Field [P] float32, in nats."""


class Drift(NamedTuple):
    """A prompt policy that brings DRIFT, and whose state holds each row's last completion too, with
    its prompt: 8 T + 4 S bytes for each row."""

    policy: PromptPolicy
    tokens: int  # T, of a completion at most
    prompt_tokens: int  # S, of a prompt
    rank: Rank

    def init(self, num_rows: int) -> dict[str, Any]:
        return {
            "last_prompt": np.full((num_rows, self.prompt_tokens), -1, np.int32),  # -1: no token
            "last_tokens": np.zeros((num_rows, self.tokens), np.int32),
            "last_logp": np.full((num_rows, self.tokens), np.nan, np.float32),  # NaN: not chosen
        }

    def observe(self, state: dict[str, Any], rollouts: Rollouts) -> dict[str, Any]:
        samples = rollouts.completion_tokens, rollouts.token_mask, rollouts.behavior_logp
        row, new_tokens, mask, logp = sharding.to_host((rollouts.row, *samples))
        prompt, fresh = _prompts(rollouts), _last_fresh(rollouts)
        after = {name: array.copy() for name, array in state.items() if name != "policy"}
        for place, index in enumerate(row):
            at = place, fresh[place]
            after["last_prompt"][index] = prompt[place]
            after["last_tokens"][index] = new_tokens[at]
            after["last_logp"][index] = np.where(mask[at], logp[at], np.nan)
        return after

    def bring(self, state: dict[str, Any], params: Params, rollouts: Rollouts) -> dict[str, Any]:
        row = np.asarray(rollouts.row)
        then = state["last_logp"][row]
        mask = np.isfinite(then)
        number = mask.sum(-1)
        # An environment, or `rollout.prefixes`, may write other words into the prompt now.
        prompt = np.where(number[:, None] > 0, state["last_prompt"][row], _prompts(rollouts))
        arrays: Any = {"prompt_tokens": np.maximum(prompt, 0), "prompt_mask": prompt >= 0}
        behind = dataclasses.replace(rollouts, **arrays)
        last = only_tokens(behind, state["last_tokens"][row][:, None], mask[:, None])
        now = np.asarray(self.rank(params, last))[:, 0]
        change = np.where(mask, np.abs(now - then), 0).sum(-1)
        drift = np.where(number > 0, change / np.maximum(number, 1), np.nan)
        return {DRIFT: drift.astype(np.float32)}

    def watch(self) -> PromptPolicy:
        """The policy as `policy` was, with this state."""
        return with_memory(self.policy, self.init, self.observe, self.bring)


def _prompts(rollouts: Rollouts) -> np.ndarray:
    """Tokens of the prompts [P, S], -1 behind the last."""
    tokens, mask = sharding.to_host((rollouts.prompt_tokens, rollouts.prompt_mask))
    return np.where(mask, tokens, np.int32(-1))


def _last_fresh(rollouts: Rollouts) -> np.ndarray:
    """[P]: of each group the last sample that is not one of an earlier step."""
    samples = np.shape(rollouts.truncated)[1]
    replayed = rollouts.fields.get(REPLAYED, np.zeros(np.shape(rollouts.truncated), bool))
    is_fresh = ~np.asarray(sharding.to_host(replayed), bool)
    return samples - 1 - np.argmax(is_fresh[:, ::-1], axis=1)
