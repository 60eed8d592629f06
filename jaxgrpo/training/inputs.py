"""The model, the prompts and the rewards of a run: read, built and tried out as its config says."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
from rich.console import Console

from jaxgrpo.config import own_code
from jaxgrpo.config.files import Config, flat, to_tables
from jaxgrpo.config.keys import (
    DataKeys,
    EvalKeys,
    ModelKeys,
    PartKeys,
    RewardKeys,
    RolloutKeys,
)
from jaxgrpo.config.world import Environment, Factories, World, make_world, named_factories
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.scores import OF_ANSWERS
from jaxgrpo.data import chat as conversations
from jaxgrpo.data import prompts
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.data.sources import FORMS, Mixture, Rows, Source
from jaxgrpo.data.tasks import PREFIX
from jaxgrpo.models.hf import folders
from jaxgrpo.rewards.calling import RewardLog
from jaxgrpo.rewards.protocol import (
    Reward,
    RewardError,
    Rewards,
    TrainerState,
    callable_name,
    check,
)
from jaxgrpo.rewards.registry import Preview, build, check_rows, preview, with_lengths
from jaxgrpo.rollout.answers import Answers, answer_end_tokens, read_answers
from jaxgrpo.rollout.judging import decode_texts
from jaxgrpo.training.pretrained import Pretrained, check_length, find_config, find_model, make_mesh
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.console import facts
from jaxgrpo.training.replay import Replay, SavedRollouts, decisive_keys, read_files
from jaxgrpo.update.answers import CUT

SHOWN = 80  # characters of an answer
TASK_COLUMNS = ("prompt", "answer")  # of built-in tasks


class Inputs(NamedTuple):
    """What a run reads from disk, but for weights."""

    pretrained: Pretrained
    chat: Chat  # how prompts are written out
    prompts: PromptData
    held_out: PromptData | None  # of eval.data
    replay: Replay | None  # the rollouts that it trains on, if they are saved ones
    world: World | None = None  # what answers samples

    def close(self) -> None:
        """Ends the processes that answer samples, where there are any."""
        if self.world is not None:
            self.world.close()


def read_inputs(
    config: Config,
    dataset: Rows | None,
    rollouts: SavedRollouts | None,
    mesh: Mesh | None,
    tools: Sequence[Callable[..., Any] | str] = (),
    environment: Factories | None = None,
) -> Inputs:
    """Reads them. Each run reads the weights itself: its update overwrites them. Tools and
    environments replace those that the config names."""
    start = config.model, config.lora, config.rollout, config.train.remat
    run_mesh = make_mesh(config.mesh) if mesh is None else mesh
    pretrained = find_model(*start, run_mesh, fetch_weights=mesh is None)
    folder, tokenizer, stored = pretrained.folder, pretrained.tokenizer, pretrained.model.config
    data, longest = config.data, config.rollout.max_prompt_tokens
    chat = make_chat(data, config.model.path, tokenizer, stored.vocab_size)
    answers = tools or config.tools, named_factories(environment) or config.environments
    chat, world = begin_conversations(chat, folder, config.rollout, data.forks, *answers)
    replay = None
    if rollouts is None:
        training_prompts = load_prompts(data, longest, chat, dataset)
    elif dataset is not None:
        raise InputError("dataset and rollouts are both given: saved rollouts bring their prompts")
    else:
        run_keys = decisive_keys(flat(to_tables(config)))
        ends = folders.read_end_tokens(folder, tokenizer, stored.vocab_size)
        replay = read_files(config.rollout, run_keys, rollouts, tokenizer, stored, ends)
        training_prompts = replay.data
    has_rows = dataset is not None or rollouts is not None
    source = eval_source(config.eval, data, has_rows) if config.eval.data else None
    held_out = load_prompts(data, longest, chat, source) if source else None
    return Inputs(pretrained, chat, training_prompts, held_out, replay, world)


def begin_conversations(
    chat: Chat,
    folder: Path,
    rollout: RolloutKeys,
    forks: bool,
    tools: Sequence[str | Callable[..., Any]],
    environments: Mapping[str, str | Environment],
) -> tuple[Chat, World | None]:
    """How the prompts of a model's folder are written out, and what answers its samples.

    Args:
      chat: how they are where nothing answers samples.

    The others and errors are those of `make_world`.
    """
    assert chat.vocab_size is not None, "its prompts are read"
    ends = folders.read_end_tokens(folder, chat.tokenizer, chat.vocab_size)
    world = make_world(tools, environments, rollout, chat, ends, forks)
    return chat if world is None else world.first_chat, world


def load_prompts(
    keys: DataKeys,
    max_prompt_tokens: int,
    chat: Chat,
    source: Source | Rows | None = None,
) -> PromptData:
    """The prompts of a source or of rows from Python; of the training data by default.

    Raises: InputError where they cannot be read, or become no prompts that fit.
    """
    rows, mixture = load_rows(keys, source)
    return prompts.prepare(rows, chat, max_prompt_tokens, keys.too_long, mixture)


def load_rows(
    keys: DataKeys, source: Source | Rows | None = None
) -> tuple[list[dict[str, Any]], Mixture | None]:
    """The rows of `load_prompts`, and the sources that they are of, where there are several."""
    if source is None:
        if keys.path is None:
            raise InputError(
                f"data.path: missing; give {FORMS}, or rows from Python, train(..., dataset=rows)"
            )
        if isinstance(keys.path, tuple):
            return _load_mixture(keys, keys.path)
        source = Source(
            *(keys.path, keys.subset, keys.split, keys.revision), delimiter=keys.delimiter
        )
    columns = source.columns if isinstance(source, Source) else None
    return prompts.load_rows(source, *(columns or (keys.prompt, keys.answer)), keys.split), None


def load_run_rows(
    keys: DataKeys,
    model: ModelKeys,
    rollout: RolloutKeys,
    tools: Sequence[str],
    environments: Mapping[str, str],
) -> list[dict[str, Any]]:
    """The rows of a run's data by the numbers that its samples have, without its weights.

    Args: tables of its config.
    Raises: InputError as `load_prompts` does.
    """
    if keys.too_long != "drop":
        return load_rows(keys)[0]
    # Which ones are left out depends on their tokens.
    folder, stored = find_config(model, fetch_weights=False)
    tokenizer, size = folders.read_tokenizer(folder), stored.vocab_size
    chat = make_chat(keys, model.path, tokenizer, size)
    in_threads = dataclasses.replace(rollout, call_workers=0)  # nothing is answered
    chat, _ = begin_conversations(chat, folder, in_threads, keys.forks, tools, environments)
    return load_prompts(keys, rollout.max_prompt_tokens, chat).rows


def _load_mixture(
    keys: DataKeys, parts: Sequence[PartKeys]
) -> tuple[list[dict[str, Any]], Mixture]:
    """The rows of several sources, each read by its own keys where it has them."""
    rows_by_title = {}
    for index, part in enumerate(parts):
        location = (part.path, part.subset, part.split, part.revision, f"data.path[{index}].path")
        is_task = part.path.startswith(PREFIX)
        names = TASK_COLUMNS if is_task else (keys.prompt, keys.answer)
        prompt = names[0] if part.prompt is None else part.prompt
        answer = names[1] if part.answer is None else part.answer
        source = Source(*location, delimiter=keys.delimiter)
        rows_by_title[part.title] = prompts.load_rows(source, prompt, answer)
    weights = tuple(part.weight for part in parts)
    sizes = tuple(map(len, rows_by_title.values()))
    return prompts.join(rows_by_title), Mixture(tuple(rows_by_title), weights, sizes)


def eval_source(keys: EvalKeys, training: DataKeys, has_rows: bool = False) -> Source:
    """Where the evaluation's rows come from: subset and revision are those of the training data
    where it is the same source. A built-in task that the training data are not of keeps its
    columns, whatever theirs are called.

    Args: has_rows: whether the training data are no source, but rows from Python or saved ones.
    """
    if keys.data is None:
        raise InputError("eval.data: missing; there is nothing to evaluate on")
    is_same_source = keys.data == training.path
    subset = training.subset if is_same_source and keys.subset is None else keys.subset
    revision = training.revision if is_same_source else None
    is_task = keys.data.startswith(PREFIX)
    is_foreign = is_task and (has_rows or not _trains_on(training.path, keys.data))
    return Source(
        *(keys.data, subset, keys.split, revision, "eval.data", training.delimiter),
        columns=TASK_COLUMNS if is_foreign else None,
    )


def _trains_on(path: str | tuple[PartKeys, ...] | None, task: str) -> bool:
    """Whether data.path is of the task that a path names, or there is none.

    >>> _trains_on("task:arithmetic:train", "task:arithmetic:test?size=8")
    True
    """
    if not isinstance(path, str):
        return path is None
    return path.partition("?")[0].rpartition(":")[0] == task.partition("?")[0].rpartition(":")[0]


def make_chat(keys: DataKeys, path: str, tokenizer: Any, vocab_size: int | None = None) -> Chat:
    """How prompts are written out. A template from a file becomes the tokenizer's own, so that the
    trained model is saved with the one it knows.

    Args:
      path: `model.path`, for messages.
      vocab_size: of the model; None: no prompts are read.
    """
    template, options = keys.chat_template, keys.chat_template_kwargs
    settings = (template, keys.system, options, path)
    time = keys.template_time or process.broadcast(local_time)
    chat = conversations.make_chat(tokenizer, *settings, time)
    if template not in conversations.CHOICES:
        tokenizer.chat_template = chat.template
    return chat._replace(vocab_size=vocab_size)


def local_time() -> str:
    """The local time of this process, as data.template_time has it."""
    return datetime.datetime.now().isoformat(timespec="seconds")


def dropped_line(prompts: PromptData, max_prompt_tokens: int) -> str:
    """What to say of prompts that were left out."""
    return (
        f"{prompts.dropped} of {len(prompts.rows) + prompts.dropped} prompts left out: longer than "
        f"rollout.max_prompt_tokens = {max_prompt_tokens}"
    )


def load_answers(
    keys: DataKeys,
    rollout: RolloutKeys,
    pretrained: Pretrained,
    needs: frozenset[str],
    stop_tokens: Sequence[int],
    rows: Sequence[Mapping[str, Any]],
) -> Answers | None:
    """The reference answers that a method's chain reads; None if it reads none.

    Args:
      needs: of the chain.
      stop_tokens: that end a sample.

    Raises: InputError if a row has no answer, the model has no positions for the longest behind a
    thought, or a key about answers is given and nothing reads it.
    """
    prefix, limit = keys.answer_prefix, keys.max_answer_tokens
    if keys.answer_cuts != DataKeys().answer_cuts and not any(CUT in name for name in needs):
        raise InputError(
            f"data.answer_cuts = {keys.answer_cuts}: nothing reads it, since no part of the method "
            f'needs {CUT}; leave it out, or take recipe = "l2t"'
        )
    if not needs & OF_ANSWERS.keys():
        for name, value in {"answer_prefix": prefix, "max_answer_tokens": limit}.items():
            if value:
                raise InputError(
                    f"data.{name} = {value!r}: nothing reads it, since the method scores no "
                    'reference answer; leave it out, or take recipe = "dro_r3"'
                )
        return None
    if rollout.goals:
        raise InputError(
            "rollout.goals: a method that scores reference answers takes a completion for the "
            "thought, and a goal is none; leave one of the two out"
        )
    tokenizer, stored = pretrained.tokenizer, pretrained.model.config
    answers = read_answers(tokenizer, rows, prefix, stop_tokens, limit)
    prompts.check_tokens(rows, answers.forced, tokenizer, stored.vocab_size, "answer")
    check_length(rollout, pretrained.path, stored, answers.longest)
    return answers


def answers_line(answers: Answers) -> str:
    """What to say of reference answers."""
    prefix = f", after {answers.prefix!r}" if answers.prefix else ""
    cut = f"; {answers.num_cut} of {len(answers.counts)} are longer" if answers.num_cut else ""
    return f"at most {answers.counts.max()} tokens are scored behind each thought{prefix}{cut}"


def resolve_rewards(
    keys: Sequence[RewardKeys],
    max_completion_tokens: int,
    user_rewards: Rewards | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    folder: Path | None = None,
    columns: Sequence[str] = (),
) -> tuple[Reward, ...]:
    """The rewards of a run, each with a name of its own.

    Args:
      max_completion_tokens: that rewards of lengths compare with.
      user_rewards: functions, or names as a config may use them, instead of the config's rewards,
        each with weight 1. In a list they are called as their function is; a mapping names them.
      folder: where relative paths in `user_rewards` begin; those of the config are absolute.
      rows: of the data, whose columns have to be all that the rewards ask for.
      columns: what they may ask for besides.

    Raises: InputError where two have one name, one does not exist, asks for a missing column or
    cannot judge a row.
    """
    entries = [(entry.title, entry.use, entry) for entry in keys]
    if user_rewards is not None:
        is_named = isinstance(user_rewards, Mapping)
        pairs = user_rewards.items() if is_named else [(_name(use), use) for use in user_rewards]
        entries = [(name, use, RewardKeys(use=name)) for name, use in pairs]  # all by default
    counts = Counter(name for name, *_ in entries)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise InputError(
            f"rewards: {duplicates[0]!r} stands twice; give each a `name` of its own (from Python, "
            "rewards={name: function})"
        )
    rewards = tuple(
        Reward(
            name,
            _function(use, entry.options, max_completion_tokens, folder),
            entry.weight,
            entry.on_error,
            entry.flip,
            entry.timeout,
        )
        for name, use, entry in entries
    )
    for reward in rewards if rows else ():
        check(reward.name, reward.function, [*columns, *(n for n in rows[0] if n != "prompt")])
        check_rows(reward.function, rows)
    return rewards


def _name(use: Any) -> str:
    """What a reward given from Python is called."""
    return own_code.short_name(use) if isinstance(use, str) else callable_name(use)


def resolve_scorer(
    use: str | None,
    keys: Sequence[RewardKeys],
    max_completion_tokens: int,
    rewards: Sequence[Reward] = (),
) -> Reward:
    """What judges success in evaluations: `eval.scorer`, else the first reward, never flipped.

    Args:
      use: `eval.scorer`.
      keys: of the config's rewards, of which only the first is loaded, and only if it judges.
      rewards: of the run, if they are there already.
    """
    if use is None:
        rewards = rewards or resolve_rewards(keys[:1], max_completion_tokens)
        return rewards[0]._replace(flip=0.0)
    return Reward(own_code.short_name(use), _function(use, {}, max_completion_tokens), 1.0)


def with_logged(values: Mapping[str, float], log: RewardLog) -> dict[str, float]:
    """A step's metrics and those that rewards logged.

    Raises: RewardError where a reward logs under a name that the trainer uses.
    """
    logged = log.numbers()
    clashes = sorted(logged.keys() & (values.keys() | {"step"}))
    if clashes:
        raise RewardError(
            f"a reward calls log_metric({clashes[0]!r}, ...), the name of a metric of the trainer: "
            "give it another name"
        )
    return {**values, **logged}


def try_rewards(
    rewards: Sequence[Reward],
    row: Mapping[str, Any],
    tokenizer: Any,
    stop_tokens: Sequence[int],
    state: TrainerState,
) -> dict[str, Preview]:
    """What every reward gives the row's gold answer and the empty text, called as on samples.

    Args:
      stop_tokens: of the sampling; the answers end with the tokenizer's, if it is among them.
      state: of the run when its first samples are judged.

    Raises: RewardError where a reward returns the wrong number or type of values, or raises and
    does not leave its samples unscored.
    """
    end = answer_end_tokens(tokenizer, stop_tokens)
    return preview(
        {reward.name: reward.function for reward in rewards},
        row,
        lambda text: [*tokenizer(text, add_special_tokens=False)["input_ids"], *end],
        functools.partial(decode_texts, tokenizer),
        trainer_state=state,
        on_error={reward.name: reward.on_error for reward in rewards},
        timeout={reward.name: reward.timeout for reward in rewards},
    )


def gold_problem(rewards: Sequence[Reward], previews: Mapping[str, Preview]) -> str | None:
    """What to say of a gold answer that earns no more than the empty text; None if it earns more.

    A reward that weighs nothing, or did not score one of the two, has no say.
    """
    trials = [(r.weight, previews[r.name]) for r in rewards if r.name in previews]
    gains = [
        weight * (trial.gold - trial.empty)
        for weight, trial in trials
        if weight and trial.gold is not None and trial.empty is not None
    ]
    if not gains or sum(gains) > 0:
        return None
    return (
        "look: the gold answer of row 0 earns no more than the empty text. Right if a reward wants "
        "other words around it; else data.answer is not the column that the rewards compare with"
    )


def show_previews(
    console: Console,
    rewards: Sequence[Reward],
    row: Mapping[str, Any],
    previews: Mapping[str, Preview],
) -> None:
    """Prints what `try_rewards` gives, one line each."""
    if not previews:  # all of them read conversations
        return

    def score(value: float | None) -> str:
        return "not scored" if value is None else f"{value:g}"

    answer = row.get("answer")
    text = repr(answer) if len(repr(answer)) <= SHOWN else repr(answer)[:SHOWN] + "…"
    lines = {}
    for name, trial in previews.items():
        reading = "" if trial.reading is None else f" (read as {trial.reading})"
        gold = "" if answer is None else f"gold answer{reading}: {score(trial.gold)}, "
        problem = "" if trial.problem is None else f"; {trial.problem}"
        lines[f"  {name}"] = f"{gold}empty text: {score(trial.empty)}{problem}"
    row_text = "which has no answer" if answer is None else f"whose answer is {text}"
    console.print(f"rewards on row 0, {row_text}:", soft_wrap=True, markup=False)
    facts(console, lines)
    if problem := gold_problem(rewards, previews):
        console.print(problem, style="yellow", soft_wrap=True)


def _function(
    use: Any, options: Mapping[str, Any], max_completion_tokens: int, folder: Path | None = None
) -> Any:
    lengths = with_lengths(use, options, max_completion_tokens)
    return build(own_code.resolve(use, folder), **lengths)
