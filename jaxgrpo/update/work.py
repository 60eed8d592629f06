"""The operations of a training step, counted from what it sampled, scored and trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import NamedTuple

import jax
from jax import Array

from jaxgrpo.core.scores import Score, passes
from jaxgrpo.core.types import Rollouts
from jaxgrpo.losses import Objective
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model
from jaxgrpo.models.counts import count_weights
from jaxgrpo.update import packing

Scoring = list[tuple[Model, float]]
"""The model of each pass of scoring, and the share of samples that it reads."""


class Work(NamedTuple):
    """Numbers in the linear maps that a step multiplies each of its tokens with, and how often."""

    sampled: int  # layers and head; 0 where nothing is drawn
    scored: int  # those of the passes that the advantages read, on all samples
    trained: int  # of live samples: `count_trained`


def step_flops(work: Work, rollouts: Rollouts, values: Mapping[str, float]) -> float:
    """The operations of a step's matrix products, without scores of attention and recomputation.

        2 sampled (tokens + prompts) + 2 scored (tokens + prompts) + 2 trained (those that are live)

    Tokens are those of completions up to the last that was drawn, with replies and forced text.
    With `rollout.refill` sampled tokens and prompts are those of all rounds; a replay counts what
    its samples have cost.

    Args:
      values: metrics of the step.
    """
    counts = sharding.to_host(_count_tokens(rollouts.prompt_mask, rollouts.token_mask))
    prompts, drawn, tokens = map(float, counts)
    rounds = values.get("refill/groups", len(rollouts.row)) / len(rollouts.row)
    fed = values["num_tokens"] + rounds * (prompts + tokens - drawn)
    live = values["live_tokens"] * tokens + values["live_groups"] * prompts
    return 2.0 * (work.sampled * fed + work.scored * (prompts + tokens) + work.trained * live)


@jax.jit
def _count_tokens(prompt_mask: Array, token_mask: Array) -> tuple[Array, Array, Array]:
    """Tokens of prompts, those that were drawn, and completions up to the last of these."""
    return prompt_mask.sum(), token_mask.sum(), packing.up_to_last(token_mask).sum()


def count_trained(
    model: Model,
    objective: Objective,
    num_iterations: int,
    scoring: Iterable[tuple[Model, float]] = (),
) -> int:
    """`Work.trained`: 3 W for each update, W being the numbers of layers and head, 2 W with
    adapters; W more where the loss sees groups, and for a reference that the update runs; the
    head's again, as often, for each distribution that the loss compares; and passes of scoring.

    Args:
      scoring: as in `count_scored`, of live samples.
    """
    weights = count_weights(model)
    with_gradient = 2 if model.config.lora else 3
    update_passes = with_gradient + objective.reads_batch + len(objective.anchors)
    compared = len(objective.anchors) + len(objective.counts)
    trained = update_passes * weights.work + compared * with_gradient * weights.head
    return num_iterations * trained + count_scored(scoring)


def count_scored(scoring: Iterable[tuple[Model, float]]) -> int:
    """The numbers that passes of scoring multiply a token with.

    Args:
      scoring: the model of each pass, and the share of samples that it reads.
    """
    return sum(round(share * count_weights(scorer).work) for scorer, share in scoring)


def split_scoring(
    scores: Mapping[str, Score],
    chain_needs: Set[str],
    scored: Collection[str],
    find_model: Callable[[str], Model],
) -> tuple[Scoring, Scoring]:
    """The passes of scoring: those that advantages read, on all samples, and the rest.

    Args:
      chain_needs: fields that the chain reads.
      scored: names of all scores.
      find_model: gives the model of a policy.
    """
    by_chain = chain_needs & scores.keys()
    named = {field for name in by_chain if (field := scores[name].named_by)}
    on_all = {entry for entry, _ in passes(scores, by_chain | named)}
    split: tuple[Scoring, Scoring] = [], []
    for entry, _ in passes(scores, scored):
        split[entry not in on_all].append((find_model(entry.policy), entry.share))
    return split


def count_step(
    model: Model,
    objective: Objective,
    num_iterations: int,
    on_all: Scoring,
    on_live: Scoring,
    is_drawn: bool,
) -> Work:
    """The work of a run's steps.

    Args:
      on_all, on_live: as `split_scoring` gives them.
      is_drawn: whether the model draws the samples.
    """
    return Work(
        sampled=count_weights(model).work if is_drawn else 0,
        scored=count_scored(on_all),
        trained=count_trained(model, objective, num_iterations, on_live),
    )
