"""Models that scores read beside the run's own: of the same tokenizer, of any size, not trained."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxgrpo.config.keys import ScoreKeys
from jaxgrpo.config.scoring import make_scores
from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.core.scores import SCORES, Score, choice_field
from jaxgrpo.core.types import Params
from jaxgrpo.data.prompts import name_row
from jaxgrpo.data.written import text_of_value
from jaxgrpo.losses import Objective
from jaxgrpo.models import attention, decoder, sequences, sharding
from jaxgrpo.models.api import Model, ModelConfig
from jaxgrpo.models.hf import folders
from jaxgrpo.training.pretrained import Pretrained
from jaxgrpo.update.forward import Teacher, param_layout
from jaxgrpo.update.packing import Geometry

KEY = "scores.policy"
"""The key that names a model, for messages."""


def find_teachers(
    paths: Sequence[str], pretrained: Pretrained, kernel: str, geometry: Geometry
) -> dict[str, Teacher]:
    """Path -> each model that scores of a run read beside its own; see `find_teacher`."""
    return {path: find_teacher(path, pretrained, kernel, geometry) for path in paths}


def find_teacher(path: str, pretrained: Pretrained, kernel: str, geometry: Geometry) -> Teacher:
    """The model of a folder, or of a name on the hub, beside a run's own, without weights.

    Args:
      pretrained: the run's own; without a tokenizer for a plan, which uses no network.
      kernel: `model.attention`.

    Raises: InputError where there is none, its tokens are others, or it has too few positions.
    """
    if pretrained.tokenizer is None and not Path(path).expanduser().is_dir():
        raise InputError(f'{KEY} = "{path}": no folder here, and a plan uses no network: fetch it')
    folder = folders.find_folder(path, None, False, KEY)
    mesh, dtype = pretrained.mesh, pretrained.model.config.dtype
    fetch = functools.partial(folders.find_folder, path, key=KEY)
    config = folders.read_config(folder, text_only=True, fetch=fetch)
    config = dataclasses.replace(config, dtype=dtype)
    if pretrained.tokenizer is not None:
        _refuse_other_tokens(path, folder, pretrained)
        tokenizer, size = pretrained.tokenizer, config.vocab_size
        ends = folders.read_end_tokens(folder, tokenizer, size)
        without_text = folders.tokens_without_text(tokenizer, ends, size)
        config = dataclasses.replace(config, without_text=without_text)
    check_positions(path, config, geometry.max_prompt_tokens, geometry.max_completion_tokens)
    model = decoder.build(config, constrain=sharding.constrain(mesh))
    platform = mesh.devices.flat[0].platform
    return Teacher(
        model,
        attention.choose_kernel(
            kernel,
            platform,
            config,
            row=geometry.longest,
            samples_per_row=geometry.samples_per_row,
            mesh=mesh,
        ),
    )


def check_positions(path: str, config: ModelConfig, prompt: int, completion: int) -> None:
    """Raises: InputError where a model that scores has no positions for so many tokens."""
    label = f'{KEY} = "{path}": a prompt of {prompt} tokens and a completion of {completion}'
    total = prompt + completion
    if total > config.max_positions:
        raise InputError(
            f"{label} are {total} tokens, but the config.json of the model says "
            f"max_position_embeddings = {config.max_positions}: make one of them shorter"
        )
    sequences.check_length(config, total, label, "make one of them shorter")


def _refuse_other_tokens(path: str, folder: Path, pretrained: Pretrained) -> None:
    """Raises: InputError where a token has another id, or is no token there."""
    if difference := compare_tokens(folders.read_tokenizer(folder), pretrained.tokenizer):
        raise InputError(
            f'{KEY} = "{path}": its tokenizer is another than that of model.path = '
            f"{pretrained.path}: {difference}. A score is of the tokens that were sampled, so take "
            "a model with the same tokenizer"
        )


def compare_tokens(first: Any, second: Any) -> str | None:
    """How many tokens of two tokenizers have other ids, or are in one alone; None if none."""
    ids, second_ids = first.get_vocab(), second.get_vocab()
    all_texts = ids.keys() | second_ids.keys()
    different = sorted(text for text in all_texts if ids.get(text) != second_ids.get(text))
    shown = ", ".join(map(repr, different[:3]))
    return f"{len(different)} of {len(all_texts)} tokens differ, as {shown}" if shown else None


def read_teachers(teachers: Mapping[str, Teacher], mesh: Mesh) -> dict[str, Params]:
    """The weights of each, in its dtype, over the mesh."""
    return {
        path: folders.read_params(
            folders.find_folder(path, key=KEY), model, None, param_layout(model, mesh)
        )
        for path, (model, _) in teachers.items()
    }


def read_choices(
    entries: Sequence[ScoreKeys], rows: Sequence[Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    """Which of its policies scores each row: the fields `scores.choice_field`, int32 [rows].

    Raises: InputError with the first row whose column names none of them.
    """
    choices: dict[str, np.ndarray] = {}
    for index, entry in enumerate(entries):
        if not entry.policies:
            continue
        names, where = [*entry.policies], f"scores[{index}].policies"
        values = [row.get(entry.choose_by) for row in rows]
        texts = [str(value) if str(value) in names else text_of_value(value) for value in values]
        for place, text in enumerate(texts):
            if text not in names:
                raise InputError(
                    f"{where}: {name_row(rows, place)} has {entry.choose_by} = {values[place]!r}, "
                    f"which is none of them: {suggest(text, names)}"
                )
        numbers = [names.index(text) for text in texts]
        choices[choice_field(entry.name)] = np.asarray(numbers, np.int32)
    return choices


def method_scores(
    entries: Sequence[ScoreKeys], read_by_chain: frozenset[str], objective: Objective
) -> dict[str, Score]:
    """The scores that a method may read: those of every run, and those of a config.

    Raises: InputError for one that nothing reads, likeliest tokens that no loss counts, and where
    something else is read as them.
    """
    refuse_unread(entries, read_by_chain | objective.needs)
    scores = make_scores(entries, objective.counts, objective.at_student_tokens)
    for name, score in scores.items():
        is_likeliest = score.quantity == "likeliest"
        if is_likeliest and not score.count:
            raise InputError(
                f'scores: {name} has quantity = "likeliest", and no loss says how many tokens: set '
                f'loss.kl = {{ use = "top_k_divergence", score = "{name}", k = 20, beta = 1.0 }}'
            )
        if score.count and not is_likeliest:
            raise InputError(
                f'loss.kl: top_k_divergence reads {name}, whose quantity is "{score.quantity}": '
                'set it to "likeliest"'
            )
    return scores


def refuse_too_many(counts: Mapping[str, int], models: Sequence[Model]) -> None:
    """Raises: InputError where no token would be left beside the likeliest ones that a loss counts.

    Args:
      counts: `Objective.counts`.
      models: that are trained or score.
    """
    fewest = min(model.config.vocab_size for model in models)
    for name, count in counts.items():
        if count >= fewest:
            raise InputError(
                f"loss.kl: top_k_divergence compares the k = {count} likeliest tokens of {name}, "
                f"and all others together, of {fewest} tokens: set k to {fewest - 1} or less"
            )


def refuse_unread(entries: Sequence[ScoreKeys], needs: frozenset[str]) -> None:
    """Raises: InputError for a score that no part of the method reads."""
    unread = [entry.name for entry in entries if entry.name not in needs]
    if unread:
        read = ", ".join(sorted(needs & SCORES.keys())) or "none"
        raise InputError(
            f"scores: no part of the method and no loss reads {', '.join(unread)} (of the scores "
            f'it reads {read}): name it in a part, as {{ use = "score_mean", score = '
            f'"{unread[0]}" }}, or leave it out'
        )
