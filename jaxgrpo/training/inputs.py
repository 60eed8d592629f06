"""The model and the prompts of a run, read as its config says."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxgrpo.config.files import Config, flat, to_tables
from jaxgrpo.config.keys import DataKeys, EvalKeys, ModelKeys, PartKeys, RolloutKeys
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
from jaxgrpo.rollout.answers import Answers, read_answers
from jaxgrpo.training.collecting.replay import Replay, SavedRollouts, decisive_keys, read_files
from jaxgrpo.training.pretrained import Pretrained, check_length, find_config, find_model, make_mesh
from jaxgrpo.training.processes import process
from jaxgrpo.update.answers import CUT

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
        """Ends the processes that answer samples, and what programs wait for."""
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
    run_mesh = make_mesh(config.mesh) if mesh is None else mesh
    pretrained = find_model(
        config.model,
        config.lora,
        config.rollout,
        config.train.remat,
        run_mesh,
        fetch_weights=mesh is None,
    )
    folder, tokenizer, stored = pretrained.folder, pretrained.tokenizer, pretrained.model.config
    data, longest = config.data, config.rollout.max_prompt_tokens
    chat = make_chat(data, config.model.path, tokenizer, stored.vocab_size)
    chat, world = begin_conversations(
        chat,
        folder,
        config.rollout,
        data.forks,
        tools or config.tools,
        named_factories(environment) or config.environments,
    )
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
    has_rows = (dataset is not None and bool(data.prompt)) or rollouts is not None
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
    if source is None and keys.path is None and not keys.prompt:
        source = [{}]  # an environment has the data, as in TRL
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
    columns = columns or (keys.prompt, keys.answer)
    return prompts.load_rows(source, *columns, keys.split, keys.completion), None


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
    rows_by_title, answered = {}, []
    for index, part in enumerate(parts):
        source = Source(
            part.path,
            part.subset,
            part.split,
            part.revision,
            f"data.path[{index}].path",
            delimiter=keys.delimiter,
            columns_table=f"data.path[{index}]",
        )
        prompt, answer = _part_columns(keys, part)
        rows = prompts.load_rows(source, prompt, answer, completion=keys.completion)
        rows_by_title[part.title] = rows
        answered += [part.title] * bool(answer)
    weights = tuple(part.weight for part in parts)
    sizes = tuple(map(len, rows_by_title.values()))
    return prompts.join(rows_by_title, answered), Mixture(tuple(rows_by_title), weights, sizes)


def _part_columns(keys: DataKeys, part: PartKeys) -> tuple[str, str]:
    """The columns of prompt and answer of an entry of data.path."""
    names = TASK_COLUMNS if part.path.startswith(PREFIX) else (keys.prompt, keys.answer)
    stated = part.prompt, part.answer
    prompt, answer = (
        default if name is None else name for name, default in zip(stated, names, strict=True)
    )
    return prompt, answer


def eval_source(keys: EvalKeys, training: DataKeys, has_rows: bool = False) -> Source:
    """Where the evaluation's rows come from: subset and revision are those of the training data
    where it is the same source, and columns too where that is an entry of a list. A built-in task
    that the training data are not of keeps its columns, whatever theirs are called.

    Args: has_rows: whether the training data are no source, but rows from Python or saved ones.
    """
    if keys.data is None:
        raise InputError("eval.data: missing; there is nothing to evaluate on")
    is_task = keys.data.startswith(PREFIX)
    is_foreign = is_task and (has_rows or not _trains_on(training.path, keys.data))
    columns, columns_table = TASK_COLUMNS if is_foreign else None, "data"
    # Beside rows from Python `data` holds the subset and the revision of the evaluated source.
    same: DataKeys | PartKeys | None = training if training.path in (None, keys.data) else None
    if isinstance(training.path, tuple) and not has_rows:
        same = _same_part(keys, training.path)
        if same is not None:
            columns = _part_columns(training, same)
            columns_table = f"data.path[{training.path.index(same)}]"
    subset = same.subset if same is not None and keys.subset is None else keys.subset
    revision = None if same is None else same.revision
    place = keys.data, subset, keys.split, revision, "eval.data"
    return Source(*place, training.delimiter, columns, columns_table)


def _same_part(keys: EvalKeys, parts: Sequence[PartKeys]) -> PartKeys | None:
    """The entry of data.path whose source, or task, the evaluation's is; of several the one that
    has its subset. None where there is none, or they are read in several ways."""
    assert keys.data is not None
    same = [
        part
        for part in parts
        if part.path == keys.data
        or (keys.data.startswith(PREFIX) and _trains_on(part.path, keys.data))
    ]
    same = [part for part in same if part.subset == keys.subset] or same
    ways = {(part.subset, part.revision, part.prompt, part.answer) for part in same}
    return same[0] if len(ways) == 1 else None


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
    time = keys.template_time or process.broadcast(local_time)
    chat = conversations.make_chat(tokenizer, template, keys.system, options, path, time)
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


def shared_line(run_inputs: Inputs, number: int | None, has_environment: bool) -> str:
    """What to say of held-out prompts that are trained on too; empty where none are, or where an
    environment says what is asked.

    Args:
      number: of prompts that are evaluated, at most; None: all.
    """
    training, held_out = run_inputs.prompts, run_inputs.held_out
    if held_out is None or has_environment:
        return ""

    def questions(data: PromptData, number: int | None = None) -> Iterator[tuple[bytes, str]]:
        for ids, row in itertools.islice(zip(data.encoded, data.rows, strict=True), number):
            yield ids.tobytes(), str(row.get("answer"))

    evaluated = list(questions(held_out, number))
    trained = set(evaluated).intersection(questions(training))
    shared = sum(question in trained for question in evaluated)
    line = f"{shared} of {len(evaluated)} prompts are training prompts too, with the same answers"
    return line if shared else ""


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
