"""The prompts that a config names: of the training data, and of the evaluation's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxgrpo.config.files import Config
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import chat as conversations
from jaxgrpo.data import prompts
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.data.sources import FORMS, Source
from jaxgrpo.data.tasks import PREFIX


def load_prompts(
    config: Config,
    chat: Chat,
    source: Source | Iterable[Any] | None = None,
) -> PromptData:
    """The prompts of a source or of rows from Python; of the training data by default.

    Raises: InputError where they cannot be read, or become no prompts that fit.
    """
    keys = config.data
    if source is None:
        if keys.path is None:
            raise InputError(
                f"data.path: missing; give {FORMS}, or rows from Python, train(..., dataset=rows)"
            )
        source = Source(keys.path, keys.subset, keys.split, keys.revision)
    task = isinstance(source, Source) and source.path.startswith(PREFIX)
    # A built-in task has columns of its own, whatever those of the training data are called.
    prompt, answer = ("prompt", "answer") if task else (keys.prompt, keys.answer)
    rows = prompts.load_rows(source, prompt, answer, keys.split)
    return prompts.prepare(rows, chat, config.rollout.max_prompt_tokens, keys.too_long)


def eval_source(config: Config) -> Source:
    """Where the evaluation's rows come from: subset and revision are those of the training data
    where it is the same source."""
    keys, training = config.eval, config.data
    if keys.data is None:
        raise InputError("eval.data: missing; there is nothing to evaluate on")
    same = keys.data == training.path
    subset = training.subset if same and keys.subset is None else keys.subset
    revision = training.revision if same else None
    return Source(keys.data, subset, keys.split, revision, key="eval.data")


def make_chat(config: Config, tokenizer: Any) -> Chat:
    """How prompts are written out. A template from a file becomes the tokenizer's own, so that the
    trained model is saved with the one it knows."""
    keys = config.data
    options = keys.chat_template_kwargs
    chat = conversations.make_chat(
        tokenizer, keys.chat_template, keys.system, options, config.model.path
    )
    if keys.chat_template not in conversations.CHOICES:
        tokenizer.chat_template = chat.template
    return chat


def dropped_line(config: Config, rows: int, dropped: int) -> str:
    """What to say of prompts that were left out."""
    return (
        f"{dropped} of {rows + dropped} prompts left out: longer than rollout.max_prompt_tokens = "
        f"{config.rollout.max_prompt_tokens}"
    )
