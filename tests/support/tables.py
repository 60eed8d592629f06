"""Hugging Face checkpoints whose success rate on each prompt is given, for tests that know truth.

A prompt is one token of its own, an answer "y" (right) or "n", then the end token.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.api import Model, ModelConfig
from jaxgrpo.models.hf import folders

RIGHT, WRONG = "yn"
REWARD = f"{__file__}:right"
SURE = 30.0  # the logit of what always happens, against 0; a rate below exp(-SURE) is 0
WIDTH = 4
GEOMETRY = ("rollout.max_prompt_tokens=1", "rollout.max_completion_tokens=2")
"""Overrides of a config that fit these prompts and answers."""


def right(completions: Sequence[str], **columns: Any) -> list[float]:
    """The reward: 1 for the right answer."""
    return [float(text == RIGHT) for text in completions]


def prompts(count: int) -> str:
    """As many one-token prompts."""
    return "".join(chr(0x4E00 + place) for place in range(count))


def smallest(vocab_size: int) -> Model:
    """One layer on states of WIDTH numbers."""
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
    )
    return decoder.build(config)


def blank(model: Model) -> tuple[Any, np.ndarray, np.ndarray]:
    """(parameters, their embedding, their head) of zeros to write into; the layer adds nothing."""
    params = jax.tree.map(np.array, jax.jit(model.init)(jax.random.key(0)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["blocks"]):
        leaf *= "down" not in str(path) and "out" not in str(path)
    (embed,), (head,) = jax.tree.leaves(params["embed"]), jax.tree.leaves(params["head"])
    embed[:], head[:] = 0, 0
    return params, embed, head


def write_model(folder: Path | str, rates: Sequence[float]) -> Path:
    """A model folder that answers prompt i right with probability rates[i].

    Its layer adds nothing, so the last token decides: a prompt stands at an angle whose cosine is
    logit(rate) / SURE, in the first two dimensions; a third says that an answer is due, the fourth
    that the end is.
    """
    tokenizer, model = _empty(len(rates))
    params, embed, head = blank(model)
    prompt_ids, answers = _ids(tokenizer, prompts(len(rates))), _ids(tokenizer, RIGHT + WRONG)
    cosine = np.array([_logit(rate) / SURE for rate in rates])
    embed[prompt_ids, 0], embed[prompt_ids, 1] = cosine, np.sqrt(1 - cosine**2)
    embed[prompt_ids, 2] = 1
    embed[answers, 3] = 1
    # The last norm makes every state's length sqrt(WIDTH): a prompt's was sqrt(2), an answer's 1.
    head[:, 2], head[answers, 2] = -SURE / np.sqrt(WIDTH / 2), 0
    head[answers[0], 0] = SURE / np.sqrt(WIDTH / 2)
    head[tokenizer.eos_token_id, 3] = SURE / np.sqrt(WIDTH)
    folders.save_model(model, params, Path(folder), tokenizer=tokenizer)
    return Path(folder)


def write_data(path: Path | str, count: int) -> Path:
    """The prompts as JSONL rows, in order."""
    lines = (json.dumps({"prompt": prompt, "answer": RIGHT}) for prompt in prompts(count))
    Path(path).write_text("".join(f"{line}\n" for line in lines))
    return Path(path)


@functools.cache
def _empty(count: int) -> tuple[Any, Model]:
    tokenizer = character_tokenizer(prompts(count) + RIGHT + WRONG)
    return tokenizer, smallest(len(tokenizer))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


def _logit(rate: float) -> float:
    if not math.exp(-SURE) < rate < 1 - math.exp(-SURE):
        return math.copysign(SURE, rate - 0.5)
    return math.log(rate / (1 - rate))
