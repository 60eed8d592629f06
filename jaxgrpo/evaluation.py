"""Evaluation: greedy accuracy and unbiased pass@k of a policy on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxgrpo import diagnostics, sharding
from jaxgrpo.assembly import Setup, load_rows
from jaxgrpo.io import data
from jaxgrpo.prompts import host_prompts
from jaxgrpo.rewarding import resolve_scorer
from jaxgrpo.rollouts import judge_texts, put_prompts, trainer_state_of
from jaxgrpo.sampling import Sampler, make_sampler, sample
from jaxgrpo.types import Params, Prompts, Rollouts

PURPOSE = 1  # folded into the key, so that evaluation never repeats training's draws
SUCCESS = 0.5  # a scorer's value above it is a success

Evaluate = Callable[[Params, int], dict[str, float]]


def make_evaluator(setup: Setup) -> Evaluate:
    """The function (sampling parameters, step) -> metrics on `eval.data`.

    accuracy        share of prompts whose likeliest answer is right
    pass@k          k = 1, 4, 16, ... up to eval.samples, unbiased, from samples at
                    rollout.temperature
    flat_groups     expected share of groups of rollout.group_size that all agree, unbiased
    accuracy/level_L   greedy, where rows have a column "level"
    mean_length, truncated   of the samples
    """
    config = setup.config
    rows = load_rows(config, config.eval.data)[: config.eval.prompts]
    encoded = data.encode_prompts(rows, setup.tokenizer, config.rollout.max_prompt_tokens)
    scorer = {"scorer": resolve_scorer(config, setup.rewards)}
    settings = setup.parts.sampling._replace(purpose=PURPOSE)
    constrain = sharding.constrain(setup.mesh)
    greedy = make_sampler(setup.model, settings._replace(group_size=1, temperature=0.0), constrain)
    sampled = make_sampler(
        setup.model, settings._replace(group_size=config.eval.samples), constrain
    )

    def evaluate(params: Params, step: int) -> dict[str, float]:
        scores, _ = _scores(setup, greedy, params, rows, encoded, scorer, step)
        metrics = _by_level(rows, scores[:, 0] > SUCCESS)
        scores, lengths = _scores(setup, sampled, params, rows, encoded, scorer, step)
        success = scores > SUCCESS
        metrics |= _from_counts(success.sum(1), config.eval.samples, config.rollout.group_size)
        metrics["mean_length"] = float(lengths.mean())
        metrics["truncated"] = float((lengths >= config.rollout.max_completion_tokens).mean())
        return metrics

    return evaluate


def _by_level(rows: Sequence[Mapping[str, Any]], right: np.ndarray) -> dict[str, float]:
    metrics = {"accuracy": float(right.mean())}
    levels = np.array([str(row.get("level", "")) for row in rows])
    for level in sorted(set(levels) - {""}):
        metrics[f"accuracy/level_{level}"] = float(right[levels == level].mean())
    return metrics


def _from_counts(correct: np.ndarray, samples: int, group_size: int) -> dict[str, float]:
    """pass@k and the flat share from the successes [P] among `samples` each."""
    count, all_ = jnp.asarray(correct), jnp.full(correct.shape, samples)
    metrics = {}
    k = 1
    while k <= samples:
        metrics[f"pass@{k}"] = float(diagnostics.pass_at_k(count, all_, k).mean())
        k *= 4
    if group_size <= samples:
        metrics["flat_groups"] = float(diagnostics.flat_share(count, all_, group_size).mean())
    return metrics


def _scores(
    setup: Setup,
    sampler: Sampler,
    params: Params,
    rows: Sequence[Mapping[str, Any]],
    encoded: Sequence[np.ndarray],
    scorer: Mapping[str, Any],
    step: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and lengths [rows, samples], in batches of about the slots that training uses."""
    geometry = setup.parts.geometry
    bins = geometry.bins
    slots = geometry.num_prompts * geometry.group_size
    size = math.ceil(max(1, slots // sampler.settings.group_size) / bins) * bins
    scores, lengths = [], []
    for begin in range(0, len(rows), size):
        # The last batch is filled up by repeating its rows, so that one program serves all.
        chosen = np.arange(begin, begin + size) % len(rows)
        prompts = _prompts(chosen, encoded, geometry.max_prompt_tokens, step)
        rollouts = sample(sampler, params, put_prompts(setup.mesh, prompts), setup.state.key)
        values, length = _judge(setup, rollouts, rows, scorer)
        real = min(size, len(rows) - begin)
        scores.append(values[:real])
        lengths.append(length[:real])
    return np.concatenate(scores), np.concatenate(lengths)


def _judge(
    setup: Setup, rollouts: Rollouts, rows: Sequence[Mapping[str, Any]], scorer: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    row, tokens, mask = sharding.to_host(
        (rollouts.row, rollouts.completion_tokens, rollouts.token_mask)
    )
    state = trainer_state_of(rollouts, len(setup.rows), setup.config.train.steps)
    scores, _ = judge_texts(setup.tokenizer, scorer, rows, row, tokens, mask, trainer_state=state)
    return scores["scorer"], mask.sum(-1)


def _prompts(chosen: np.ndarray, encoded: Sequence[np.ndarray], width: int, step: int) -> Prompts:
    tokens = np.zeros((len(chosen), width), np.int32)
    mask = np.zeros((len(chosen), width), bool)
    for place, row in enumerate(chosen):
        tokens[place, : len(encoded[row])] = encoded[row]
        mask[place, : len(encoded[row])] = True
    return host_prompts(tokens, mask, chosen, chosen, step)
