"""Evaluation on held-out prompts: greedy accuracy, unbiased pass@k, votes, calibration, drift."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxgrpo.config.keys import EvalKeys
from jaxgrpo.config.world import COLUMNS
from jaxgrpo.core import records
from jaxgrpo.core.errors import InputError, one_line, own_line, written
from jaxgrpo.core.types import Params, Rollouts
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.evaluation import diversity, voting
from jaxgrpo.evaluation.intervals import bootstrap, mean_of_shares
from jaxgrpo.evaluation.rescoring import Base, Rescore, make_rescorer
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model
from jaxgrpo.rewards import (
    Reward,
    RewardError,
    RewardFunction,
    TrainerState,
    answers,
    check,
    check_rows,
)
from jaxgrpo.rewards.protocol import callable_name
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.dialogue import Converse
from jaxgrpo.rollout.judging import Judge, put_prompts
from jaxgrpo.rollout.selection import pad_prompts
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.texts import completion_ids, completion_spans, decode_texts
from jaxgrpo.update import diagnostics

PURPOSE = 1  # folded into the key, so that evaluation never repeats training's draws
ROUNDS = 16  # samples of a batch per slot; more: fewer slots idle while a batch ends
KL = "kl_to_base"
SUCCESS = 0.5  # a scorer's value above it is a success
SHOWN = 300  # characters of a completion in a message
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A model to sample from, without its weights, and what draws its samples."""

    model: Model
    tokenizer: Any
    mesh: Mesh
    engine: SlotEngine
    group_size: int  # of its training
    goal: np.ndarray | None = None  # [F] int32: tokens that every answer begins with


Progress = Callable[[int], TrainerState]
"""finished steps -> the progress of the run behind them"""


def no_progress(step: int) -> TrainerState:
    """The progress of what is no run and has no scorer that asks for it."""
    return TrainerState(global_step=step)


class Questions(NamedTuple):
    """What is asked, who judges the answers, and how they are analysed."""

    rows: Sequence[Mapping[str, Any]]
    encoded: Sequence[np.ndarray]  # token ids of each row's prompt
    scorer: Reward
    extract: Callable[[str], Hashable] | None = None  # completion -> the answer that is voted on
    formats: Mapping[str, str] = NOTHING  # name -> regular expression
    weighing: voting.Weighing = voting.Weighing()
    converse: Converse | None = None  # what answers samples, as `draw` takes it
    progress: Progress = no_progress  # for the scorer's `trainer_state`


class Answers(NamedTuple):
    """Samples of one pass over the questions, on the host."""

    tokens: np.ndarray  # [N, n, T]
    mask: np.ndarray  # [N, n, T]
    logp: np.ndarray  # [N, n, T]
    truncated: np.ndarray  # [N, n]
    scores: np.ndarray  # [N, n]
    texts: list[list[str]]  # [N][n]
    rescored: Mapping[str, np.ndarray] = NOTHING  # name -> [N, n, T], of a second pass
    messages: Mapping[str, str] = NOTHING  # why samples could not be scored, as in a RewardLog

    def columns(self, begin: int, end: int) -> Answers:
        """Some of the samples of each question."""
        arrays = jax.tree.map(lambda leaf: leaf[:, begin:end], self._replace(texts=[], messages={}))
        return arrays._replace(texts=[row[begin:end] for row in self.texts], messages=self.messages)

    @property
    def right(self) -> np.ndarray:
        """Which samples are a success, [N, n]."""
        return self.scores > SUCCESS

    @property
    def scored(self) -> np.ndarray:
        """Which samples could be scored, [N, n]."""
        return np.isfinite(self.scores)


Ask = Callable[..., Answers]
"""(sampling parameters, key data of the run, step, before_batch=None) -> Answers; the last one is
called before each batch of questions, and what it raises ends the pass"""


class Batches(NamedTuple):
    """Questions in batches of `size`."""

    size: int
    ask: Callable[[int, Params, ArrayLike, int], Answers]
    """(first question, sampling parameters, key data of the run, step) -> Answers of that batch"""


class Evaluation(NamedTuple):
    metrics: dict[str, float]
    greedy: Answers
    sampled: Answers
    messages: Mapping[str, str] = NOTHING  # as in Answers


Evaluate = Callable[..., Evaluation]
"""(sampling parameters, key data of the run, step, before_batch=None) -> Evaluation, as `Ask`"""


def make_questions(
    keys: EvalKeys,
    held_out: PromptData,
    scorer: Reward,
    use: str,
    progress: Progress,
    answering: Callable[[Sequence[Mapping[str, Any]]], Converse | None] | None = None,
) -> Questions:
    """The first `eval.prompts` prompts, all by default, and who judges the answers.

    Args:
      use: the name of the scorer in the config.
      progress: of the run.
      answering: rows -> what answers their samples; None: nothing.

    Raises: InputError as `check_scorer`.
    """
    rows = held_out.rows[: keys.prompts]
    converse = None if answering is None else answering(rows)
    check_scorer(scorer, rows, converse is not None)
    return Questions(
        rows,
        held_out.encoded[: keys.prompts],
        scorer._replace(name="scorer"),
        find_extractor(use, scorer.function),
        keys.formats,
        voting.Weighing(keys.confidence_window, keys.confidence_kept),
        converse,
        progress,
    )


def check_scorer(scorer: Reward, rows: Sequence[Mapping[str, Any]], is_answered: bool) -> None:
    """Refuses a scorer that cannot be called on the rows that are asked.

    Args:
      is_answered: whether tools or environments answer samples.

    Raises: InputError where it asks for a column that is not there, or with the first row that it
      cannot judge.
    """
    columns = [*(name for name in rows[0] if name != "prompt"), *(COLUMNS if is_answered else ())]
    try:
        check(scorer.name, scorer.function, columns)
    except RewardError as error:
        raise InputError(f"the rows that are asked: {error}") from None
    check_rows(scorer.function, rows)


def make_evaluator(
    keys: EvalKeys,
    policy: Policy,
    questions: Questions,
    base: Base | None = None,
    tokens: int | None = None,
) -> Evaluate:
    """The function that asks every question once greedily and eval.samples times at temperature.

        accuracy          share of prompts whose likeliest answer is right
        pass@k, k = 1, 4, 16, ... up to eval.samples: unbiased
        maj@k             share whose most frequent answer among k is right, if answers can be
                          extracted; ties go to the answer that came first
        deepconf@k/NAME   the same with votes weighted by a summary of the tokens' confidence
        kl_to_base        KL(policy || base) of whole completions, exact at each sampled position;
                          kl_to_base_estimated from the log-probs of the sampled tokens alone
        flat_groups       expected share of groups of policy.group_size that all agree, unbiased
        accuracy/level_L, accuracy/source_S    greedy, if rows have such a column
        NAME/low, NAME/high    95% bootstrap interval over prompts, of all above but the last two;
                               of shares equal for all prompts Hoeffding's; one prompt's KL has none
        distinct_completions, distinct_answers    different ones per prompt, mean over prompts

    and the metrics of formats and confidences in `jaxgrpo.evaluation.diversity` and `.voting`.

    Args:
      base: the policy that kl_to_base is measured from; None: without.
      tokens: of a micro-batch of the second pass, as `train.tokens_per_micro_batch`.

    Raises: InputError as `make_rescorer`.
    """
    rescore = make_rescorer(
        policy.model,
        policy.mesh,
        temperature=policy.engine.settings.temperature,
        quantities={"confidence"} if keys.confidence else set(),
        base=base,
        tokens=tokens,
        has_forks=policy.engine.settings.own_rows,
    )
    samples = keys.samples
    # The likeliest answer is one sample more, so that one set of programs draws all.
    ask = make_asker(policy, questions, samples + 1, rescore, greedy=1, purpose=PURPOSE)

    def evaluate(params: Params, key: ArrayLike, step: int, **options: Any) -> Evaluation:
        answers = ask(params, key, step, **options)
        greedy, sampled = answers.columns(samples, samples + 1), answers.columns(0, samples)
        metrics = summarise(greedy, sampled, questions, policy.group_size)
        return Evaluation(metrics, greedy, sampled, answers.messages)

    return evaluate


def summarise(
    greedy: Answers, sampled: Answers, questions: Questions, group_size: int
) -> dict[str, float]:
    """The numbers of an evaluation, as `make_evaluator` names them."""
    right, success = greedy.right[:, 0], sampled.right
    samples = success.shape[1]
    successes, totals = jnp.asarray(success.sum(1)), jnp.full(len(success), samples)
    answers = extract_answers(sampled, questions)
    traces = _traces(sampled, questions)
    sizes = powers(4, samples)
    per_prompt: dict[str, np.ndarray] = {"accuracy": right.astype(float)}
    for k in sizes:
        per_prompt[f"pass@{k}"] = np.asarray(diagnostics.pass_at_k(successes, totals, k))
    if answers is not None:
        per_prompt |= voting.votes(
            answers, success, sizes[1:], questions.weighing.voter_share, traces
        )
    if "kl" in sampled.rescored:
        for name, field in {KL: "kl", f"{KL}_estimated": "logp_gap"}.items():
            per_prompt[name] = sampled.rescored[field].sum(-1, dtype=float).mean(-1)
    metrics: dict[str, float] = {}
    for name, values in per_prompt.items():
        metrics[name] = float(values.mean())
        if len(values) > 1 or not name.startswith(KL):  # one distance says nothing of others
            metrics[f"{name}/low"], metrics[f"{name}/high"] = _interval(name, values)
    if group_size <= samples:
        metrics["flat_groups"] = float(diagnostics.flat_share(successes, totals, group_size).mean())
    for column in ("level", "source"):
        labels = np.array([_label(row.get(column)) for row in questions.rows])
        for label in sorted(set(labels) - {""}):
            metrics[f"accuracy/{column}_{label}"] = float(right[labels == label].mean())
    metrics["mean_length"] = float(sampled.mask.sum(-1).mean())
    metrics["truncated"] = float(sampled.truncated.mean())
    metrics["unscored"] = float(np.isnan(sampled.scores).mean())
    ids = diversity.completion_keys(sampled.tokens, sampled.mask)
    metrics["distinct_completions"] = diversity.distinct(ids)
    if answers is not None:
        metrics["distinct_answers"] = diversity.distinct(answers)
    metrics |= diversity.stated_metrics(sampled.texts, success, sampled.scored)
    if questions.formats:
        metrics |= diversity.format_metrics(sampled.texts, success, questions.formats)
    metrics |= voting.confidence_metrics(success, sampled.scored, traces)
    if "clamped" in sampled.rescored:
        number = max(1, sampled.mask.sum())
        metrics[f"{KL}_clamped"] = float(sampled.rescored["clamped"].sum() / number)
    return metrics


def _interval(name: str, values: np.ndarray) -> tuple[float, float]:
    """The 95% interval over prompts. No resample shows how far a share that is the same for all of
    them, as where every prompt is solved, may be from the mean of further ones."""
    if not name.startswith(KL) and np.ptp(values) == 0:
        return mean_of_shares(values, 0.95)
    low, high = bootstrap(values).tolist()
    return low, high


def _label(value: Any) -> str:
    """What a row has in a column, as a part of a metric's name; "" for None: it has nothing. Halves
    of surrogate pairs, which no tracker takes, are written in escapes."""
    return "" if value is None else str(value).encode("utf-8", "backslashreplace").decode()


def extract_answers(sampled: Answers, questions: Questions) -> voting.FinalAnswers | None:
    """The answers that the samples give, [N][n]; None if nothing can read them.

    Raises: RewardError where the code that reads them fails, or gives what cannot be compared.
    """
    extract = questions.extract
    if extract is None:
        return None
    return [[_extract(extract, text) for text in row] for row in sampled.texts]


def _extract(extract: Callable[[str], Hashable], text: str) -> Hashable:
    try:
        answer = extract(text)
        hash(answer)  # a list has none
        return answer if answer == answer else None  # NaN would be no vote's winner
    except (Exception, SystemExit) as error:
        place, line = own_line(error)
        where = f" in {place}: {line}" if place else ""
        raise RewardError(
            f"{callable_name(extract)}, which reads the answer of a completion, raised "
            f"{type(error).__name__}: {one_line(error)}{where}; the completion is "
            f"{written(text)[:SHOWN]}: return a text or a number, None where there is no answer"
        ) from error


def powers(base: int, largest: int) -> tuple[int, ...]:
    """1, base, base^2, ... up to `largest`."""
    return tuple(base**power for power in range(20) if base**power <= largest)


def _traces(sampled: Answers, questions: Questions) -> dict[str, np.ndarray]:
    """Summaries of confidence [N, n] by name; none if they were not computed."""
    tokens = sampled.rescored.get("confidence")
    window = questions.weighing.window
    return {} if tokens is None else voting.confidences(tokens, sampled.mask, window)


def answer_rows(
    answers: Answers, questions: Questions, name: str, begin: int = 0
) -> Iterator[dict[str, Any]]:
    """The samples of an evaluation as sample rows, like those of training, of step 0.

    Args:
      begin: the question that the first answers belong to.
    """
    for place, texts in enumerate(answers.texts):
        ids = completion_ids(answers.tokens[place], answers.mask[place])
        spans = completion_spans(answers.mask[place])
        for sample_, text in enumerate(texts):
            yield {
                "step": 0,
                "ordinal": begin + place,
                "row": begin + place,
                "sample": sample_,
                "prompt": questions.rows[begin + place]["prompt"],
                "completion": text,
                "completion_ids": ids[sample_],
                "logps": answers.logp[place, sample_, spans[sample_]].tolist(),
                "rewards": {name: float(answers.scores[place, sample_])},
                "advantage": None,
                "truncated": bool(answers.truncated[place, sample_]),
            }


def make_asker(
    policy: Policy,
    questions: Questions,
    samples: int,
    rescore: Rescore | None = None,
    **options: Any,
) -> Ask:
    """The function that samples answers to every question and has them judged.

    Args: as in `make_batches`.
    """
    size, ask_batch = make_batches(policy, questions, samples, rescore, **options)

    def ask(
        params: Params,
        key: ArrayLike,
        step: int,
        before_batch: Callable[[], None] | None = None,
    ) -> Answers:
        batches = []
        for begin in range(0, len(questions.rows), size):
            if before_batch is not None:
                before_batch()
            batches.append(ask_batch(begin, params, key, step))
        texts = [text for batch in batches for text in batch.texts]
        arrays = (batch._replace(texts=[], messages={}) for batch in batches)
        all_answers = jax.tree.map(lambda *leaves: np.concatenate(leaves), *arrays)
        messages = {name: text for batch in batches[::-1] for name, text in batch.messages.items()}
        return all_answers._replace(texts=texts, messages=messages)

    return ask


def make_batches(
    policy: Policy,
    questions: Questions,
    samples: int,
    rescore: Rescore | None = None,
    *,
    rounds: int = ROUNDS,
    purpose: int = 0,
    greedy: int = 0,
) -> Batches:
    """The function that asks one batch of the questions, and how many are in a batch.

    All batches have one size, so that they share one compiled program. An answer depends on its
    question's place and not on which batches were asked before.

    Args:
      samples: per question.
      rounds: samples of a batch per slot.
      purpose, greedy: as in `rollout.batch.draw`.
    """
    mesh, engine, count = policy.mesh, policy.engine, len(questions.rows)
    bins = sharding.num_bins(mesh)
    slots = engine.slots_for(_rounded_up(count, bins), samples, rounds)
    size = batch_size(count, max(1, rounds * slots // samples), bins)
    engine.expect(samples, math.ceil(count / size))
    judge = Judge(policy.tokenizer, [questions.scorer], questions.rows)
    draw_samples = functools.partial(
        draw, engine, purpose=purpose, greedy=greedy, converse=questions.converse
    )

    def ask(begin: int, params: Params, key: ArrayLike, step: int) -> Answers:
        # The last batch is filled up by repeating rows, whose answers are not judged.
        rows = np.arange(begin, begin + size) % count
        encoded = [questions.encoded[int(row)] for row in rows]
        prompts = pad_prompts(encoded, engine.width, rows, rows, step)
        if policy.goal is not None:
            goal: Any = np.broadcast_to(policy.goal, (size, samples, len(policy.goal)))
            prompts = dataclasses.replace(prompts, forced_prefix=goal)
        drawing = draw_samples(params, prompts, key, samples)
        batch: Any = drawing.finish()
        arrays = batch.completion_tokens, batch.token_mask, batch.behavior_logp, batch.truncated
        again = _second_pass(rescore, params, mesh, batch)
        arrays = jax.tree.map(lambda x: x[: count - begin], (rows, *arrays, again))
        judged_rows, tokens, mask, logp, truncated, rescored = arrays
        state, name = questions.progress(step), questions.scorer.name
        scores, log = judge.rollouts(judged_rows, tokens, mask, state, dialogue=drawing.dialogue)
        texts = [decode_texts(policy.tokenizer, ids) for ids in map(completion_ids, tokens, mask)]
        return Answers(tokens, mask, logp, truncated, scores[name], texts, rescored, log.messages)

    return Batches(size, ask)


def _second_pass(
    rescore: Rescore | None, params: Params, mesh: Mesh, batch: Rollouts
) -> dict[str, np.ndarray]:
    """What rescoring gives for a batch, on the host; nothing without it."""
    if rescore is None:
        return {}
    # Records of experts have numbers for each layer of each token, and nothing here reads them.
    plain = dataclasses.replace(batch, fields=records.without(batch.fields, ()))
    return sharding.to_host(rescore(params, put_prompts(mesh, plain)))


def batch_size(count: int, most: int, bins: int) -> int:
    """The size of batches of `count` questions, as many in every bin: as few batches as `most`
    questions in each allow, all of about one size, so that the last is filled up with few.

    >>> batch_size(100, 96, 1), batch_size(10, 4, 1), batch_size(10, 4, 4), batch_size(3, 96, 4)
    (50, 4, 4, 4)
    """
    most = _rounded_up(min(count, most), bins)
    return _rounded_up(math.ceil(count / math.ceil(count / most)), bins)


def _rounded_up(prompts: int, bins: int) -> int:
    return math.ceil(prompts / bins) * bins


def find_extractor(use: str, scorer: RewardFunction) -> Callable[[str], Hashable] | None:
    """The function that reads the answer of a completion, for votes; None if there is none."""
    return answers.get(use) or getattr(getattr(scorer, "func", scorer), "extract", None)
