"""A prompt policy decides which prompts come next; here rows that were solved rest for some steps.

rollout.prompts = { use = "examples/own_prompts.py:rest_when_solved", steps = 5 }
"""

import numpy as np

from jaxgrpo.models.sharding import to_host
from jaxgrpo.rollout.selection import PromptPolicy, row_of


def rest_when_solved(steps=5, reward="arithmetic"):
    """Rows of which all samples got 1 or more are left out of the next `steps` selections."""

    def init(num_rows, seed):
        return {"rest": np.zeros(num_rows, np.int32), "seed": np.asarray(seed % 2**64, np.uint64)}

    def select(state, cursor, n):
        rows = len(state["rest"])
        ahead = np.arange(cursor, cursor + rows + n, dtype=np.int32)  # places in the stream
        resting = state["rest"][row_of(ahead, rows, int(state["seed"]))] > 0
        return np.concatenate([ahead[~resting], ahead[resting]])[:n]  # n, even if all rest

    def observe(state, rollouts):
        row, value = to_host((rollouts.row, rollouts.rewards[reward]))
        rest = np.maximum(state["rest"] - 1, 0)
        rest[row[(value >= 1).all(axis=1)]] = steps
        return {**state, "rest": rest}

    return PromptPolicy("rest_when_solved", init, select, observe)
