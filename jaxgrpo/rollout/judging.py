"""The host's part of a step: selects prompts, decodes completions, has rewards judge them.

With several processes each judges its share, and all get everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Prompts, Rollouts, Stream, Waiting
from jaxgrpo.data.sources import Mixture
from jaxgrpo.data.written import storable
from jaxgrpo.environments.conversations import Conversation
from jaxgrpo.models import sharding
from jaxgrpo.rewards.calling import SPOKEN, RewardLog, flipped, merge_metrics
from jaxgrpo.rewards.protocol import Reward, RewardError, TrainerState
from jaxgrpo.rewards.registry import is_per_sample
from jaxgrpo.rollout.answers import Answers
from jaxgrpo.rollout.batch import Drawing, Groups, in_background
from jaxgrpo.rollout.dialogue import Dialogue
from jaxgrpo.rollout.exchange import gather_json, is_own
from jaxgrpo.rollout.experience import Experiencer
from jaxgrpo.rollout.goals import Goals
from jaxgrpo.rollout.prefixes import Prefixes
from jaxgrpo.rollout.selection import PromptPolicy, pad_prompts, row_of
from jaxgrpo.rollout.texts import Texts, among_all, call_on_texts, completion_ids, decode_texts

Select = Callable[..., tuple[Stream, Prompts]]
"""(stream, finished steps, number=None) -> (stream, prompts of the next step as host arrays), as
many as a step has or `number`"""


class RolloutSource(NamedTuple):
    """What the rollouts of a run come from."""

    policy: PromptPolicy
    select: Select
    draw: Callable[..., Drawing]  # (params, prompts, key), as `rollout.batch.draw`
    reward: Callable[..., tuple[Stream, Rollouts, RewardLog]]
    """(stream, rollouts, early=(), params=None, dialogue=None) -> (stream, rollouts with their
    scores, what rewards logged); the parameters are those that sampled"""
    waiting: Waiting  # of the first stream
    answers: Answers | None  # of each row, where the chain reads what a pass over them gives
    goals: Goals | None = None  # that samples begin with
    prefixes: Prefixes | None = None  # that prompts begin with
    experiencer: Experiencer | None = None  # where right samples of earlier steps come again


def put_prompts(mesh: Mesh, tree: Any) -> Any:
    """Prompts, or host arrays with one entry per prompt, on the mesh: P over the bins."""

    def put(leaf: Any) -> Array:
        return sharding.put(leaf, sharding.named(mesh, *("bins", None)[: np.ndim(leaf)]))

    return jax.tree.map(put, tree)


def make_selector(
    policy: PromptPolicy,
    encoded: Sequence[np.ndarray],
    num_prompts: int,
    width: int,
    seed: int,
    mixture: Mixture | None = None,
    prefixes: Prefixes | None = None,
) -> Select:
    """The function that asks the prompt policy for the next step's prompts.

    Args:
      encoded: token ids of each row's prompt.
      num_prompts: of a step.
      width: tokens that a prompt may have.
      seed: of the run, which orders the rows.
      prefixes: that prompts begin with; the policy then watches them.
    """

    def select(stream: Stream, step: int, number: int | None = None) -> tuple[Stream, Prompts]:
        count = num_prompts if number is None else number
        selection = policy.select(stream.prompt_policy_state, int(stream.cursor), count)
        ordinals = _checked_ordinals(policy.name, selection, count)
        rows = row_of(ordinals, len(encoded), seed, mixture)
        tokens = [encoded[row] for row in rows]
        if prefixes is not None:
            tokens = prefixes.tokens(stream.prompt_policy_state, ordinals, rows)
        prompts = pad_prompts(tokens, width, ordinals, rows, step)
        # A policy may choose earlier places alone, and later ones must not come twice for that.
        cursor = np.asarray(max(int(stream.cursor), int(ordinals.max()) + 1), np.int32)
        return dataclasses.replace(stream, cursor=cursor), prompts

    return select


def _checked_ordinals(name: str, ordinals: Any, count: int) -> np.ndarray:
    """What a prompt policy chose, as the array of whole numbers that it has to be."""
    expected = f"expected {count} ordinals as an integer array [{count}], each 0 or more"
    if not isinstance(ordinals, np.ndarray):
        raise InputError(
            f"rollout.prompts: select of {name} returned a {type(ordinals).__name__}, {expected}: "
            "return np.asarray(chosen, np.int32)"
        )
    if ordinals.shape != (count,) or ordinals.dtype.kind not in "iu":
        shown = f"{ordinals.dtype} {list(ordinals.shape)}"
        raise InputError(f"rollout.prompts: select of {name} returned {shown}, {expected}")
    if ordinals.min() < 0 or ordinals.max() >= np.iinfo(np.int32).max:
        lowest, highest = ordinals.min(), ordinals.max()
        raise InputError(
            f"rollout.prompts: select of {name} returned ordinals from {lowest} to {highest}, "
            f"{expected} and within int32"
        )
    return ordinals


class Judged(NamedTuple):
    """What some of the rewards say of some groups."""

    places: np.ndarray  # [n] int, which groups of the rollouts
    scores: dict[str, np.ndarray]  # name -> float32 [n, G], NaN = not scored
    log: RewardLog


def _spoken(talks: Sequence[Conversation]) -> dict[str, list[Any]]:
    """What was said in conversations, by the names of sample rows, as JSON holds it."""
    names = ("prompt", "messages", "problem")
    return {name: [storable(getattr(talk, name)) for talk in talks] for name in names}


class Judge(NamedTuple):
    """Rewards with all that they are called with beside the completions."""

    tokenizer: Any
    rewards: Sequence[Reward]
    rows: Sequence[Mapping[str, Any]]  # of the data set

    @property
    def per_sample(self) -> list[Reward]:
        """The rewards that may judge groups before all have ended."""
        return [reward for reward in self.rewards if is_per_sample(reward.function)]

    def groups(
        self,
        rewards: Sequence[Reward],
        places: np.ndarray,
        row: np.ndarray,
        tokens: np.ndarray,
        mask: np.ndarray,
        state: Any,
        talks: Sequence[Conversation] = (),
    ) -> Judged:
        """Calls rewards on groups in this process. Shapes: places, row [n]; tokens, mask [n, G, T].

        Samples whose environment broke are left out of the calls, and have NaN.

        Args:
          rewards: those to call.
          talks: of the n x G samples, where they were answered.
        """
        _, samples, steps = tokens.shape
        count = len(row) * samples
        numbers = np.flatnonzero([not talk.problem for talk in talks] or np.ones(count))
        groups = numbers // samples
        repeated_rows = [self.rows[index] for index in row[groups].tolist()]
        sound = [talks[number] for number in numbers.tolist()] if talks else []
        ids = completion_ids(*(a.reshape(-1, steps)[numbers] for a in (tokens, mask)))
        texts = Texts(
            [talk.prompt for talk in sound] or [entry["prompt"] for entry in repeated_rows],
            decode_texts(self.tokenizer, ids),
            ids,
            groups.tolist(),
            [talk.messages for talk in sound],
        )
        names = [name for name in self.rows[0] if name != "prompt"]
        columns = {name: [entry[name] for entry in repeated_rows] for name in names}
        living: dict[str, list[Any]] = {}
        if talks:
            environments = [talk.environment for talk in sound]
            living = {"conversations": sound, "environments": environments}
        scores, log = call_on_texts(rewards, texts, columns, state, living)
        if talks:
            log = merge_logs([log], [numbers], count, 1)
            log = log._replace(columns={**log.columns, SPOKEN: _spoken(talks)})
        table = among_all(scores, numbers, count)
        return Judged(places, {n: np.reshape(v, (-1, samples)) for n, v in table.items()}, log)

    def rollouts(
        self,
        row: np.ndarray,
        tokens: np.ndarray,
        mask: np.ndarray,
        state: TrainerState | None = None,
        early: Sequence[Judged] = (),
        dialogue: Dialogue | None = None,
    ) -> tuple[dict[str, np.ndarray], RewardLog]:
        """Calls each reward once on completions [P, G, T]; columns come from the data rows.

        With several processes each judges its share of the groups and all get everything.

        Args:
          early: what the rewards in `per_sample` have said of groups of this process's share. They
            are called on its other groups, the other rewards on all groups of the share.
          dialogue: where samples were answered; those that cannot be scored are NaN.

        Returns: name -> float32 [P, G], NaN = not scored; what the rewards logged, samples in
        order.
        Raises: RewardError as `call_rewards` does, in every process.
        """
        groups, samples = tokens.shape[:2]
        share = np.flatnonzero(is_own(np.arange(groups)))
        calls = [(self.rewards, share)]
        if early:
            unjudged = np.setdiff1d(share, np.concatenate([part.places for part in early]))
            late = [reward for reward in self.rewards if not is_per_sample(reward.function)]
            calls = [(self.per_sample, unjudged), (late, share)]

        def call() -> list[Judged]:
            parts = list(early)
            for rewards, places in calls:
                if rewards and (places.size or not early):
                    talks = [] if dialogue is None else dialogue.spoken(places, samples)
                    parts.append(
                        self.groups(
                            rewards, places, row[places], tokens[places], mask[places], state, talks
                        )
                    )
            return parts

        parts = _gather_judged(call)
        scores = {name: np.empty((groups, samples), np.float32) for name, *_ in self.rewards}
        for part in parts:
            for name, values in part.scores.items():
                scores[name][part.places] = values
        logs = [_weighed(part, samples) for part in parts]
        log = merge_logs(logs, [part.places for part in parts], groups, samples)
        return (scores, log) if dialogue is None else dialogue.without_broken(scores, log)


def judge_early(
    judge: Judge,
    ended: Generator[Groups],
    row: np.ndarray,
    progress: TrainerState,
    dialogue: Dialogue | None = None,
) -> list[Judged]:
    """Calls the rewards in `judge.per_sample` on this process's groups as they end.

    Drawing goes on in a thread meanwhile, which mostly waits for the devices; the rewards run in
    this one, so that their time limits, which need the main thread, hold.

    Args:
      row: [P], of the batch's prompts.

    With several processes a reward that fails is left to `Judge.rollouts`, which calls it again and
    fails in all of them.

    Raises: RewardError as the rewards do; drawing then ends with the next groups.
    """
    early, has_failed = [], False
    with contextlib.closing(in_background(ended)) as batches:
        for groups in batches:
            is_local = is_own(groups.places)
            if has_failed or not is_local.any():
                continue
            places, tokens, mask = (array[is_local] for array in groups)
            talks = [] if dialogue is None else dialogue.spoken(places, tokens.shape[1])
            try:
                early.append(
                    judge.groups(
                        judge.per_sample, places, row[places], tokens, mask, progress, talks
                    )
                )
            except Exception:
                if jax.process_count() == 1:
                    raise
                has_failed = True
    return early


def _weighed(part: Judged, samples: int) -> RewardLog:
    """Its log, whose metrics count once per completion.

    So a mean that a reward logs of each of its calls becomes that of all completions.
    """
    size = len(part.places) * samples
    sums = part.log.metrics.items() if size else ()
    return part.log._replace(
        metrics={n: (total / count * size, size) for n, (total, count) in sums}
    )


def _gather_judged(call: Callable[[], list[Judged]]) -> list[Judged]:
    """What all processes judged; if it fails in one it fails in all: none waits."""
    if jax.process_count() == 1:
        return call()
    try:
        parts = call()
    except Exception as error:
        is_reward = isinstance(error, RewardError)
        message = str(error) if is_reward else "".join(traceback.format_exception(error)).rstrip()
        gather_json(message)
        if is_reward:
            raise RewardError(f"process {jax.process_index()}: {message}") from error
        raise
    shares = gather_json(
        [
            [part.places.tolist(), {n: v.tolist() for n, v in part.scores.items()}, part.log]
            for part in parts
        ]
    )
    for process, share in enumerate(shares):
        if isinstance(share, str):
            raise RewardError(f"process {process}: {share}")

    def read(places: Any, scores: Any, log: Any) -> Judged:
        values = {name: np.asarray(value, np.float32) for name, value in scores.items()}
        return Judged(np.asarray(places, int), values, RewardLog(*log))

    return [read(*part) for share in shares for part in share]


def merge_logs(
    logs: Sequence[RewardLog], places: Sequence[np.ndarray], groups: int, samples: int
) -> RewardLog:
    """Several logs as one; a column that no log has for a group is None there.

    Args:
      places: for each log, which of the groups it is of.
      samples: of each group.
    """
    merged: dict[str, dict[str, list[Any]]] = {}
    failed: Counter[str] = Counter()
    messages: dict[str, str] = {}
    for log, log_places in zip(logs, places, strict=True):
        indices = (np.asarray(log_places)[:, None] * samples + np.arange(samples)).ravel()
        for reward, columns in log.columns.items():
            for column, values in columns.items():
                reward_columns = merged.setdefault(reward, {})
                entries = reward_columns.setdefault(column, [None] * (groups * samples))
                for index, value in zip(indices, values, strict=True):
                    entries[index] = value
        failed.update(log.failed)
        messages = {**log.messages, **messages}
    return RewardLog(merged, merge_metrics(log.metrics for log in logs), failed, messages)


AddFields = Callable[[Rollouts, Sequence[Sequence[int]]], dict[str, np.ndarray]]
"""(rollouts that are judged, tokens of the P x G completions) -> fields"""


def make_rewarder(
    policy: PromptPolicy,
    judge: Judge,
    columns: Mapping[str, np.ndarray],
    add_fields: Sequence[AddFields],
    score_answers: Callable[[Any, Rollouts], dict[str, Any]],
    steps: int,
    seed: int,
) -> Callable[..., tuple[Stream, Rollouts, RewardLog]]:
    """The function that judges rollouts, host arrays, and shows them to the prompt policy.

    The policy sees them here since every group that is generated is judged, once, whether or not it
    is trained on. A function of its own could be forgotten in a loop, and the policy would learn
    nothing.

    Args:
      columns: numeric columns of the data, [rows, ...], that the method needs as fields.
      add_fields: what makes further fields of the completions.
      score_answers: (parameters that sampled, rollouts) -> further fields that the policy needs.
      steps: of the run, for the rewards' `trainer_state`.
      seed: of the run; it decides which 0/1 rewards are flipped (`flip`).
    """

    def reward(
        stream: Stream,
        rollouts: Rollouts,
        early: Sequence[Judged] = (),
        params: Any = None,
        dialogue: Dialogue | None = None,
    ) -> tuple[Stream, Rollouts, RewardLog]:
        arrays = rollouts.row, rollouts.completion_tokens, rollouts.token_mask
        row, tokens, mask = map(np.asarray, arrays)
        progress = rollout_progress(rollouts, len(judge.rows), steps)
        scores, log = judge.rollouts(row, tokens, mask, progress, early, dialogue)
        ordinal = np.asarray(rollouts.ordinal)
        scores, log = flipped(scores, log, judge.rewards, seed, progress.global_step, ordinal)
        fields: Any = rollouts.fields | {name: column[row] for name, column in columns.items()}
        if policy.bring is not None:
            fields |= policy.bring(stream.prompt_policy_state, params, rollouts)
        length = tokens.shape[-1]
        ids = completion_ids(tokens.reshape(-1, length), mask.reshape(-1, length))
        judged = dataclasses.replace(rollouts, rewards={**scores})
        for add in add_fields:
            fields |= add(judged, ids)
        judged = dataclasses.replace(judged, fields=fields)
        observed = dataclasses.replace(judged, fields=fields | score_answers(params, judged))
        policy_state = policy.observe(stream.prompt_policy_state, observed)
        return dataclasses.replace(stream, prompt_policy_state=policy_state), judged, log

    return reward


def rollout_progress(rollouts: Prompts, num_rows: int, max_steps: int) -> TrainerState:
    """The progress of the run when these rollouts are judged."""
    step, ordinal = sharding.to_host((rollouts.step, rollouts.ordinal))
    return step_progress(int(step), int(ordinal.min()), len(ordinal), num_rows, max_steps)


def progress_after(
    step: int, *, max_steps: int, num_prompts: int = 0, num_rows: int = 0
) -> TrainerState:
    """The progress of a run behind a step, as evaluations have it: epochs are those of runs whose
    steps each take the next `num_prompts` places of the prompt stream; 0 where no run goes on.

    Args: as in `step_progress`.
    """
    return step_progress(step, step * num_prompts, num_prompts, num_rows, max_steps)


def step_progress(
    step: int, ordinal: int, num_prompts: int, num_rows: int, max_steps: int
) -> TrainerState:
    """The progress of a run whose step begins with a place in the prompt stream.

    Args:
      num_prompts: of a step.
      num_rows: of the training data; 0: they are not read, and epochs are 0.
      max_steps: of the run.
    """
    main = jax.process_index() == 0
    return TrainerState(
        global_step=step,
        max_steps=max_steps,
        epoch=ordinal / num_rows if num_rows else 0.0,
        num_train_epochs=math.ceil(max_steps * num_prompts / num_rows) if num_rows else 0,
        is_world_process_zero=main,
        is_local_process_zero=main,
    )
