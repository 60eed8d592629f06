"""What a contender is asked to do, its rewards, and how it tells of its steps. Without JAX.

A contender is a process. It takes its first step at once and says so in a line of JSON on its
standard output; then it takes one step for every line that it reads, and ends with its input.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "work.json"
THREADS = 2  # of PyTorch on a CPU, and the cores that all contenders share
PHASES = ("sample", "reward", "score", "update")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A step of training, as sizes: what files.py writes beside the model and the prompts."""

    name: str
    folder: str
    prompts: int
    samples: int  # of each prompt
    longest: int  # tokens of a prompt
    completion: int  # tokens at most, or exactly
    exact: bool
    micro: int  # samples that PyTorch updates on at once
    dtype: str
    device: str  # "cpu" or "cuda"
    reward: str  # "spread" or "parity"
    pad: int
    end: int
    learning_rate: float = 1e-9  # lengths stay as they are

    def save(self) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (Path(self.folder) / FILE).write_text(text)

    @staticmethod
    def read(folder: str | Path) -> Work:
        return Work(**json.loads((Path(folder) / FILE).read_text()))

    @property
    def model(self) -> Path:
        return Path(self.folder) / "model"

    def rows(self) -> list[dict[str, Any]]:
        lines = (Path(self.folder) / "prompts.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def generation(most: int, end: int | None, pad: int, **more: Any) -> Any:
    """Of transformers, to draw at most so many tokens from the whole distribution.

    Args:
      end: the token that ends a sample; None: none does.
      more: further arguments of its GenerationConfig.
    """
    from transformers import GenerationConfig

    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    sizes = {"max_new_tokens": most, "eos_token_id": end, "pad_token_id": pad}
    return GenerationConfig(**sampling, **sizes, **more)


def spread(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A number in [0, 1) for each completion that every one of its tokens changes."""
    return [zlib.crc32(str(list(ids)).encode()) / 2**32 for ids in completion_ids]


def parity(completion_ids: Sequence[Sequence[int]], hard: Sequence[bool], **_: Any) -> list[float]:
    """1 where the number of tokens is odd, and 0 for every sample of a hard prompt."""
    pairs = zip(completion_ids, hard, strict=True)
    return [0.0 if never else float(len(ids) % 2) for ids, never in pairs]


class Teller:
    """Tells of the steps of this process, and waits between them.

    Args:
      device_bytes: the most that the arrays of this process have taken of a GPU so far.
    """

    def __init__(self, work: Work, device_bytes: Callable[[], int]) -> None:
        self.device_bytes = device_bytes if work.device == "cuda" else lambda: None
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a library prints is no message
        self.began = time.perf_counter()
        self.tokens = 0
        self._reward: Callable[..., list[float]] = {"spread": spread, "parity": parity}[work.reward]

    def reward(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """The reward of the workload, which also counts the tokens that were sampled."""
        self.tokens += sum(map(len, completion_ids))
        return self._reward(completion_ids=completion_ids, **columns)

    def stepped(self, phases: Mapping[str, float]) -> None:
        """Ends a step: its seconds, those of its phases, its tokens. Returns when the next is due.

        Args:
          phases: "sample", "reward" and "score"; "update" is all the rest.
        """
        seconds = time.perf_counter() - self.began
        update_seconds = seconds - sum(phases.values())
        message = {"seconds": seconds, "tokens": self.tokens, "update": update_seconds, **phases}
        message["device_bytes"] = self.device_bytes()
        print(json.dumps(message), file=self.out, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # what is left of the run is nobody's
        self.began, self.tokens = time.perf_counter(), 0
