"""Sampling by vLLM, in a process of another Python, which has vLLM and neither JAX nor jaxgrpo.

    PYTHON benchmarks/versus/vllm_samples.py FOLDER

FOLDER holds a checkpoint, as `save_model` writes it, and `sampling.json` (`Sampling`). For each
line of JSON that the process reads it writes one: {"score": tokens} gets {"logp": of all but the
first}, anything else is a round and gets {"seconds", "tokens"}. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

FILE = "sampling.json"


class Sampling(NamedTuple):
    """What a round draws, from the whole distribution."""

    prompts: list[list[int]]  # token ids
    samples: int  # of each prompt
    completion: int  # tokens at most, or exactly
    end: int | None  # None: no sample ends before
    dtype: str


def make_engine(folder: str, work: Sampling) -> Any:
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    return LLM(
        model=folder,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=work.dtype,
        max_model_len=max(map(len, work.prompts)) + work.completion + 1,
        max_num_seqs=len(work.prompts) * work.samples,
        disable_log_stats=True,
    )


def draw(engine: Any, work: Sampling) -> dict[str, float]:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    settings = SamplingParams(
        n=work.samples,
        temperature=1.0,
        max_tokens=work.completion,
        ignore_eos=True,
        stop_token_ids=None if work.end is None else [work.end],
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in work.prompts]
    began = time.perf_counter()
    answers = engine.generate(prompts, settings, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = sum(len(sample.token_ids) for answer in answers for sample in answer.outputs)
    return {"seconds": seconds, "tokens": tokens}


def score(engine: Any, tokens: list[int]) -> dict[str, list[float]]:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    settings = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = engine.generate([{"prompt_token_ids": tokens}], settings, use_tqdm=False)
    pairs = zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)
    return {"logp": [entry[token].logprob for entry, token in pairs]}


def main() -> None:
    # vLLM prints on standard output, from C too: that becomes standard error.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder = sys.argv[1]
    work = Sampling(**json.loads((Path(folder) / FILE).read_text()))
    engine = make_engine(folder, work)
    for line in sys.stdin:
        request = json.loads(line)
        answer = score(engine, request["score"]) if "score" in request else draw(engine, work)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
