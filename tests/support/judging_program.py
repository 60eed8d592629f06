"""One process of a few that judge the same texts: what it got, as its last line of JSON."""

import json
import sys

import numpy as np

from jaxgrpo.rewards import Reward, TrainerState
from jaxgrpo.rollout import judging
from jaxgrpo.training.processes import process


class Letters:
    """A tokenizer of letters: token 1 is "a"."""

    def batch_decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return ["".join(chr(96 + token) for token in row) for row in ids]


def main(mode: str) -> None:
    process.start("cpu")
    import jax

    mine = jax.process_index()

    def lengths(completions, log_extra, log_metric, **columns):
        log_extra("text", completions)
        if mine == 1:
            log_extra("second", [None, *completions[1:]])
        log_metric("calls", mine)
        return [len(text) + 0.1 if len(text) > 1 else None for text in completions]

    def breaks(completions, **columns):
        if mine == 1 and mode == "exit":
            sys.exit(3)
        if mine == 1:
            raise OSError("no grader here")
        return [1.0] * len(completions)

    tokens = np.arange(24).reshape(4, 2, 3) % 7
    judge = judging.Judge(
        Letters(),
        [
            Reward("lengths", lengths),
            Reward("breaks", breaks, on_error="unscored" if mode == "unscored" else "raise"),
        ],
        [{"prompt": f"p{row}"} for row in range(4)],
    )
    state = TrainerState(is_world_process_zero=mine == 0)
    scores, log = judge.rollouts(np.arange(4), tokens, tokens > 0, state)
    score_lists = {name: values.astype(float).tolist() for name, values in scores.items()}
    print(json.dumps([score_lists, log._asdict() | {"extra": log.extra, "numbers": log.numbers()}]))


if __name__ == "__main__":
    sys.exit(process.guard(lambda: main(sys.argv[1])))
