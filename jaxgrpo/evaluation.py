"""Evaluation on held-out prompts: greedy accuracy, unbiased pass@k, majority votes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgrpo import diagnostics, sharding
from jaxgrpo.assembly import Setup
from jaxgrpo.config import Config
from jaxgrpo.inputs import eval_source, load_prompts
from jaxgrpo.io.data import PromptData
from jaxgrpo.models.api import Model
from jaxgrpo.prompts import pad_prompts
from jaxgrpo.rewarding import extractor_of, resolve_scorer
from jaxgrpo.rewards import RewardFunction, TrainerState
from jaxgrpo.rollouts import completion_ids, judge_texts, put_prompts
from jaxgrpo.sampling import Sampler, SamplingSettings, make_sampler, sample
from jaxgrpo.steps import Share, alone
from jaxgrpo.types import Params

PURPOSE = 1  # folded into the key, so that evaluation never repeats training's draws
SUCCESS = 0.5  # a scorer's value above it is a success
RESAMPLES = 1000  # of the prompts, for 95% intervals


class Questions(NamedTuple):
    """What is asked, and who judges the answers."""

    rows: Sequence[Mapping[str, Any]]
    encoded: Sequence[np.ndarray]  # token ids of each row's prompt
    scorer: RewardFunction
    extract: Callable[[str], Hashable] | None = None  # completion -> the answer that is voted on


class Answers(NamedTuple):
    """Samples of one pass over the questions, on the host."""

    tokens: np.ndarray  # [N, n, T]
    mask: np.ndarray  # [N, n, T]
    logp: np.ndarray  # [N, n, T]
    truncated: np.ndarray  # [N, n]
    scores: np.ndarray  # [N, n]
    texts: list[list[str]]  # [N][n]


class Evaluation(NamedTuple):
    metrics: dict[str, float]
    greedy: Answers
    sampled: Answers


Evaluate = Callable[[Params, Array, int], Evaluation]
"""(sampling parameters, key data of the run, step) -> Evaluation"""


def questions_of(config: Config, held_out: PromptData, scorer: RewardFunction) -> Questions:
    """The first `eval.prompts` prompts, all by default, and who judges the answers."""
    count = config.eval.prompts
    extract = extractor_of(config, scorer)
    return Questions(held_out.rows[:count], held_out.encoded[:count], scorer, extract)


def evaluator_of(run: Setup, share: Share = alone) -> Evaluate:
    """The evaluation that a run's config asks for.

    Args:
      share: as of `assembly.setup`.
    """
    return share("evaluator", lambda: _make_evaluator_of(run))


def _make_evaluator_of(run: Setup) -> Evaluate:
    config = run.config
    held_out = run.held_out or load_prompts(config, run.chat, eval_source(config))
    questions = questions_of(config, held_out, resolve_scorer(config, run.rewards))
    geometry = run.parts.geometry
    return make_evaluator(
        run.model,
        run.tokenizer,
        run.mesh,
        questions,
        run.parts.sampling,
        samples=config.eval.samples,
        width=geometry.max_prompt_tokens,
        slots=geometry.num_prompts * geometry.group_size,
    )


def make_evaluator(
    model: Model,
    tokenizer: Any,
    mesh: Mesh,
    questions: Questions,
    settings: SamplingSettings,
    *,
    samples: int,
    width: int,
    slots: int,
) -> Evaluate:
    """The function that asks every question once greedily and `samples` times at temperature.

        accuracy          share of prompts whose likeliest answer is right
        pass@k, k = 1, 4, 16, ... up to `samples`: unbiased
        maj@k             share whose most frequent answer among k is right, where answers can be
                          extracted; ties go to the answer that came first
        flat_groups       expected share of groups of settings.group_size that all agree, unbiased
        accuracy/level_L, accuracy/source_S    greedy, where rows have such a column
        NAME/low, NAME/high    95% bootstrap interval over prompts, of accuracy, pass@k and maj@k

    Args:
      width: S, tokens that a prompt may have.
      slots: samples decoded at once, about.
    """
    constrain = sharding.constrain(mesh)
    settings = settings._replace(purpose=PURPOSE)
    greedy = make_sampler(model, settings._replace(group_size=1, temperature=0.0), constrain)
    sampled = make_sampler(model, settings._replace(group_size=samples), constrain)

    def evaluate(params: Params, key: Array, step: int) -> Evaluation:
        rest = (params, key, step, mesh, tokenizer, questions, width, slots)
        best, many = ask(greedy, *rest), ask(sampled, *rest)
        metrics = summarise(best, many, questions, settings.group_size)
        return Evaluation(metrics, best, many)

    return evaluate


def summarise(
    greedy: Answers, sampled: Answers, questions: Questions, group_size: int
) -> dict[str, float]:
    """The numbers of an evaluation, as `make_evaluator` names them."""
    right = greedy.scores[:, 0] > SUCCESS
    success = sampled.scores > SUCCESS
    samples = success.shape[1]
    count, every = jnp.asarray(success.sum(1)), jnp.full(len(success), samples)
    per_prompt: dict[str, np.ndarray] = {"accuracy": right.astype(float)}
    sizes = [4**power for power in range(20) if 4**power <= samples]
    for k in sizes:
        per_prompt[f"pass@{k}"] = np.asarray(diagnostics.pass_at_k(count, every, k))
    if questions.extract is not None:
        for k in sizes[1:]:
            per_prompt[f"maj@{k}"] = majority(sampled.texts, success, questions.extract, k)
    metrics: dict[str, float] = {}
    for name, values in per_prompt.items():
        metrics[name] = float(values.mean())
        metrics[f"{name}/low"], metrics[f"{name}/high"] = bootstrap(values)
    if group_size <= samples:
        metrics["flat_groups"] = float(diagnostics.flat_share(count, every, group_size).mean())
    for column in ("level", "source"):
        labels = np.array([str(row.get(column, "")) for row in questions.rows])
        for label in sorted(set(labels) - {""}):
            metrics[f"accuracy/{column}_{label}"] = float(right[labels == label].mean())
    metrics["mean_length"] = float(sampled.mask.sum(-1).mean())
    metrics["truncated"] = float(sampled.truncated.mean())
    metrics["unscored"] = float(np.isnan(sampled.scores).mean())
    return metrics


def majority(
    texts: Sequence[Sequence[str]],
    success: np.ndarray,
    extract: Callable[[str], Hashable],
    k: int,
) -> np.ndarray:
    """Per prompt, the share of disjoint blocks of k samples whose most frequent answer is right.

    Shapes: texts [N][n], success [N, n] -> [N]. Samples without an answer (None) do not vote; a
    block in which nobody votes is wrong.
    """
    shares = np.zeros(len(texts))
    for place, (row, right) in enumerate(zip(texts, success, strict=True)):
        blocks = range(0, len(row) - k + 1, k)
        for begin in blocks:
            answers = [extract(text) for text in row[begin : begin + k]]
            votes = Counter(answer for answer in answers if answer is not None)
            if votes:
                chosen = answers.index(votes.most_common(1)[0][0])
                shares[place] += right[begin + chosen] / len(blocks)
    return shares


def bootstrap(values: np.ndarray) -> tuple[float, float]:
    """The 95% percentile interval of the mean over prompts [N]; the same for the same values."""
    draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
    return float(low), float(high)


def answer_rows(
    answers: Answers, questions: Questions, step: int, name: str
) -> Iterator[dict[str, Any]]:
    """The samples of an evaluation as sample rows, like those of training."""
    for place, row in enumerate(questions.rows):
        ids = completion_ids(answers.tokens[place], answers.mask[place])
        for sample_, text in enumerate(answers.texts[place]):
            yield {
                "step": step,
                "ordinal": place,
                "row": place,
                "sample": sample_,
                "prompt": row["prompt"],
                "completion": text,
                "completion_ids": ids[sample_],
                "logps": answers.logp[place, sample_, : len(ids[sample_])].tolist(),
                "rewards": {name: float(answers.scores[place, sample_])},
                "advantage": None,
                "truncated": bool(answers.truncated[place, sample_]),
            }


def ask(
    sampler: Sampler,
    params: Params,
    key: Array,
    step: int,
    mesh: Mesh,
    tokenizer: Any,
    questions: Questions,
    width: int,
    slots: int,
) -> Answers:
    """One pass over the questions, in batches of one size, so that one program serves all."""
    bins = sharding.num_bins(mesh)
    count = len(questions.rows)
    size = math.ceil(max(1, min(count, slots // sampler.settings.group_size)) / bins) * bins
    parts: list[tuple[Any, ...]] = []
    for begin in range(0, count, size):
        # The last batch is filled up by repeating rows; what they give is dropped.
        chosen = np.arange(begin, begin + size) % count
        encoded = [questions.encoded[int(row)] for row in chosen]
        prompts = put_prompts(mesh, pad_prompts(encoded, width, chosen, chosen, step))
        rollouts = sample(sampler, params, prompts, key)
        host = sharding.to_host(
            (
                rollouts.completion_tokens,
                rollouts.token_mask,
                rollouts.behavior_logp,
                rollouts.truncated,
            )
        )
        scores, _ = judge_texts(
            tokenizer,
            {"scorer": questions.scorer},
            questions.rows,
            chosen,
            *host[:2],
            trainer_state=TrainerState(global_step=step),
        )
        real = min(size, count - begin)
        parts.append(tuple(leaf[:real] for leaf in (*host, scores["scorer"])))
    columns = zip(*parts, strict=True)
    tokens, mask, logp, truncated, judged = (np.concatenate(leaves) for leaves in columns)
    texts = [
        tokenizer.batch_decode(completion_ids(*pair), skip_special_tokens=True)
        for pair in zip(tokens, mask, strict=True)
    ]
    return Answers(tokens, mask, logp, truncated, judged, texts)
