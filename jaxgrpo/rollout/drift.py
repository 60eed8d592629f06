"""How far the policy has moved on each row's last completion, by which SPO's tracker forgets.

    drift[p] = mean_t |logp_now(y_t) - logp_then(y_t)|

y is the last sample of the row's latest group, over the tokens that the policy chose; "then" is the
policy that drew it, "now" the one that samples. NaN where the row was not sampled before.

Source: SPO, arXiv 2509.13232, as in the authors' recipe for verl.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.types import Params, Rollouts, only_tokens
from jaxgrpo.models import sharding
from jaxgrpo.rollout.experience import Rank
from jaxgrpo.rollout.selection import PromptPolicy, with_memory

DRIFT = "drift"
"""Field [P] float32, in nats."""


class Drift(NamedTuple):
    """A prompt policy that brings DRIFT, and whose state holds each row's last completion too."""

    policy: PromptPolicy
    tokens: int  # T, of a completion at most; the state takes 8 T bytes for each row
    rank: Rank

    def init(self, num_rows: int) -> dict[str, Any]:
        return {
            "last_tokens": np.zeros((num_rows, self.tokens), np.int32),
            "last_logp": np.full((num_rows, self.tokens), np.nan, np.float32),  # NaN: not chosen
        }

    def observe(self, state: dict[str, Any], rollouts: Rollouts) -> dict[str, Any]:
        samples = rollouts.completion_tokens, rollouts.token_mask, rollouts.behavior_logp
        row, new_tokens, mask, logp = sharding.to_host((rollouts.row, *samples))
        last_tokens, last_logp = state["last_tokens"].copy(), state["last_logp"].copy()
        for place, index in enumerate(row):
            last_tokens[index] = new_tokens[place, -1]
            last_logp[index] = np.where(mask[place, -1], logp[place, -1], np.nan)
        return {"last_tokens": last_tokens, "last_logp": last_logp}

    def bring(self, state: dict[str, Any], params: Params, rollouts: Rollouts) -> dict[str, Any]:
        row = np.asarray(rollouts.row)
        then = state["last_logp"][row]
        mask = np.isfinite(then)
        last = only_tokens(rollouts, state["last_tokens"][row][:, None], mask[:, None])
        now = np.asarray(self.rank(params, last))[:, 0]
        change = np.where(mask, np.abs(now - then), 0).sum(-1)
        number = mask.sum(-1)
        drift = np.where(number > 0, change / np.maximum(number, 1), np.nan)
        return {DRIFT: drift.astype(np.float32)}

    def watch(self) -> PromptPolicy:
        """The policy as `policy` was, with this state."""
        return with_memory(self.policy, self.init, self.observe, self.bring)
