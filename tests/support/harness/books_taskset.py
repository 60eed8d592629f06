"""The book of `books` as a taskset of verifiers, in whose environment this is imported.

What verifiers has noted of each sample goes into the file TRACES.
"""

from __future__ import annotations

import json
import os

import books
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

__all__ = ["Books"]


class Data(vf.TaskData):
    answer: str


class Shelf(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def look_up(self, key: str) -> str:
        """Looks a key up."""
        return books.look_up(key)


class LookUp(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        with open(os.environ["TRACES"], "a") as file:
            parts = [
                {"tokens": part.token_ids, "drawn": part.sampled_mask, "logp": part.logprobs}
                for part in trace.branches
            ]
            print(json.dumps({"branches": parts, "turns": trace.num_turns}), file=file)
        return float(trace.last_reply == self.data.answer)


class Books(vf.Taskset[LookUp, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Shelf(vf.SharedToolsetConfig())]

    def load(self):
        for key, answer in books.BOOK.items():
            yield LookUp(Data(prompt=f"{key}=", answer=answer), self.config.task)


if __name__ == "__main__":
    Shelf.run()
