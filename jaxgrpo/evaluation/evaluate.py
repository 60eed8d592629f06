"""Evaluation on held-out prompts: greedy accuracy, unbiased pass@k, votes, calibration, drift."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.config.files import Config
from jaxgrpo.core.types import Params
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.evaluation import diversity, voting
from jaxgrpo.evaluation.rescoring import Rescore
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model
from jaxgrpo.rewards import RewardFunction, TrainerState, answers
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout.judging import completion_ids, decode_texts, judge_texts, put_prompts
from jaxgrpo.rollout.sampler import Sampler, SamplingSettings, make_sampler, sample
from jaxgrpo.rollout.selection import pad_prompts
from jaxgrpo.update import diagnostics

PURPOSE = 1  # folded into the key, so that evaluation never repeats training's draws
SUCCESS = 0.5  # a scorer's value above it is a success
RESAMPLES = 1000  # of the prompts, for 95% intervals


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Questions(NamedTuple):
    """What is asked, who judges the answers, and how they are looked at."""

    rows: Sequence[Mapping[str, Any]]
    encoded: Sequence[np.ndarray]  # token ids of each row's prompt
    scorer: RewardFunction
    extract: Callable[[str], Hashable] | None = None  # completion -> the answer that is voted on
    formats: Mapping[str, str] = NOTHING  # name -> regular expression
    weighing: voting.Weighing = voting.Weighing()
    on_error: str = "raise"  # or "unscored": what follows where the scorer raises


class Answers(NamedTuple):
    """Samples of one pass over the questions, on the host."""

    tokens: np.ndarray  # [N, n, T]
    mask: np.ndarray  # [N, n, T]
    logp: np.ndarray  # [N, n, T]
    truncated: np.ndarray  # [N, n]
    scores: np.ndarray  # [N, n]
    texts: list[list[str]]  # [N][n]
    rescored: Mapping[str, np.ndarray] = NOTHING  # name -> [N, n, T], of a second pass


class Evaluation(NamedTuple):
    metrics: dict[str, float]
    greedy: Answers
    sampled: Answers


Evaluate = Callable[[Params, Array, int], Evaluation]
"""(sampling parameters, key data of the run, step) -> Evaluation"""


def questions_of(config: Config, held_out: PromptData, scorer: Reward) -> Questions:
    """The first `eval.prompts` prompts, all by default, and who judges the answers."""
    count = config.eval.prompts
    asked = config.eval
    return Questions(
        held_out.rows[:count],
        held_out.encoded[:count],
        scorer.function,
        extractor_of(config, scorer.function),
        asked.formats,
        voting.Weighing(asked.confidence_window, asked.confidence_kept),
        scorer.on_error,
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
    rescore: Rescore | None = None,
) -> Evaluate:
    """The function that asks every question once greedily and `samples` times at temperature.

        accuracy          share of prompts whose likeliest answer is right
        pass@k, k = 1, 4, 16, ... up to `samples`: unbiased
        maj@k             share whose most frequent answer among k is right, where answers can be
                          extracted; ties go to the answer that came first
        deepconf@k/NAME   the same where votes weigh what a summary of confidence says
        kl_to_base        KL(policy || base) of whole completions, exact at each sampled position;
                          kl_to_base_estimated from the log-probs of the sampled tokens alone
        flat_groups       expected share of groups of settings.group_size that all agree, unbiased
        accuracy/level_L, accuracy/source_S    greedy, where rows have such a column
        NAME/low, NAME/high    95% bootstrap interval over prompts, of all above but the last two
        distinct_completions, distinct_answers    of a prompt, in the mean

    and what `jaxgrpo.evaluation.diversity` and `.voting` say of formats and confidences.

    Args:
      width: S, tokens that a prompt may have.
      slots: samples decoded at once, about.
      rescore: a second pass over the samples, for deepconf@k and kl_to_base; None: without.
    """
    constrain = sharding.constrain(mesh)
    settings = settings._replace(purpose=PURPOSE)
    greedy = make_sampler(model, settings._replace(group_size=1, temperature=0.0), constrain)
    sampled = make_sampler(model, settings._replace(group_size=samples), constrain)

    def evaluate(params: Params, key: Array, step: int) -> Evaluation:
        rest = (params, key, step, mesh, tokenizer, questions, width, slots)
        best, many = ask(greedy, *rest), ask(sampled, *rest, rescore)
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
    answers = answers_of(sampled, questions)
    traces = _traces(sampled, questions)
    sizes = [4**power for power in range(20) if 4**power <= samples]
    per_prompt: dict[str, np.ndarray] = {"accuracy": right.astype(float)}
    for k in sizes:
        per_prompt[f"pass@{k}"] = np.asarray(diagnostics.pass_at_k(count, every, k))
    if answers is not None:
        per_prompt |= voting.votes(answers, success, sizes[1:], questions.weighing.kept, traces)
    if "kl" in sampled.rescored:
        for name, of in {"kl_to_base": "kl", "kl_to_base_estimated": "logp_gap"}.items():
            per_prompt[name] = sampled.rescored[of].sum(-1, dtype=float).mean(-1)
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
    return metrics | _looks(sampled, questions, answers, traces)


def _looks(
    sampled: Answers,
    questions: Questions,
    answers: voting.Answered | None,
    traces: Mapping[str, np.ndarray],
) -> dict[str, float]:
    """Variety, formats and confidences of the samples."""
    success, scored = sampled.scores > SUCCESS, np.isfinite(sampled.scores)
    shown = np.where(sampled.mask, sampled.tokens, -1)
    ids = [[completion.tobytes() for completion in row] for row in shown]
    metrics = {"distinct_completions": diversity.distinct(ids)}
    if answers is not None:
        metrics["distinct_answers"] = diversity.distinct(answers)
    metrics |= diversity.stated_metrics(sampled.texts, success, scored)
    if questions.formats:
        metrics |= diversity.format_metrics(sampled.texts, success, questions.formats)
    metrics |= voting.confidence_metrics(success, scored, traces)
    if "clamped" in sampled.rescored:
        number = max(1, sampled.mask.sum())
        metrics["kl_to_base_clamped"] = float(sampled.rescored["clamped"].sum() / number)
    return metrics


def answers_of(sampled: Answers, questions: Questions) -> voting.Answered | None:
    """The answers that the samples give, [N][n]; None where they cannot be read off."""
    if questions.extract is None:
        return None
    return [[questions.extract(text) for text in row] for row in sampled.texts]


def _traces(sampled: Answers, questions: Questions) -> dict[str, np.ndarray]:
    """Summaries of confidence [N, n] by name; none where it was not asked for."""
    if "confidence" not in sampled.rescored:
        return {}
    tokens = sampled.rescored["confidence"]
    return voting.confidences(tokens, sampled.mask, questions.weighing.window)


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
    rescore: Rescore | None = None,
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
            on_error={"scorer": questions.on_error},
        )
        more = {} if rescore is None else sharding.to_host(rescore(params, rollouts))
        real = min(size, count - begin)
        parts.append((*host, scores["scorer"], more))
        parts[-1] = jax.tree.map(lambda leaf, real=real: leaf[:real], parts[-1])
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    tokens, mask, logp, truncated, judged, rescored = whole
    texts = [decode_texts(tokenizer, *pair) for pair in zip(tokens, mask, strict=True)]
    return Answers(tokens, mask, logp, truncated, judged, texts, rescored)


def extractor_of(config: Config, scorer: RewardFunction) -> Callable[[str], Hashable] | None:
    """What reads the answer off a completion, for votes; None where the scorer knows none."""
    use = config.eval.scorer or (config.rewards[0].use if config.rewards else "")
    return answers.get(use) or getattr(getattr(scorer, "func", scorer), "extract", None)
