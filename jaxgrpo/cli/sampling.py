"""`jaxgrpo sample`: completions for a file of prompts, written batch by batch.

OUT.jsonl holds the rows; OUT.jsonl.settings.json says what they are samples of. A second start
continues a file only if it would have written the same rows itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxgrpo.config import own_code
from jaxgrpo.config.keys import DataKeys, is_path
from jaxgrpo.config.ranges import HEAT
from jaxgrpo.config.tables import SampleOverrides
from jaxgrpo.core.errors import InputError, refusing
from jaxgrpo.data import storage
from jaxgrpo.data.chat import CHOICES
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.data.sources import FORMS, parse_json
from jaxgrpo.data.storage import Place, checksum, write_atomically
from jaxgrpo.evaluation.evaluate import (
    Batches,
    Questions,
    answer_rows,
    make_asker,
    make_batches,
)
from jaxgrpo.rewards import Reward
from jaxgrpo.training import inputs
from jaxgrpo.training.fingerprints import (
    code_checksums,
    config_facts,
    describe_rows,
    file_checksums,
)
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.console import telling
from jaxgrpo.training.records.folder import Closing, plain
from jaxgrpo.training.records.report.html import check_writable
from jaxgrpo.training.rewarding import print_failures
from jaxgrpo.training.stored_policy import StoredPolicy, config_for, find_policy, seed_key

ACT = ("model.", "lora.", "data.", "rollout.", "tools", "environment", "mesh.", "train.seed")
"""What the names of keys that act on samples begin with."""

PURPOSE = 3  # folded into the key: draws of neither training, evaluation nor probe come again
ROUNDS = 4  # samples of a batch per slot: rows come soon, and few slots idle while a batch ends

MUCH = 1.1
"""The rate without the first batch is shown where it is so many times the rate with it."""


def sample(
    target: str | Place,
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    samples: int = 1,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    **overrides: Unpack[SampleOverrides],
) -> list[dict[str, Any]]:
    """Samples completions of prompts, as `jaxgrpo sample` draws them.

    Args:
      target: a model folder, a run folder, a config file, or a shipped config's name.
      prompts: texts, or lists of messages.
      samples: of each prompt.
      temperature, top_k, top_p, max_tokens: by default as the run or config says; the temperature 0
        takes the likeliest token.
      overrides: tables of the config, train={"seed": 1}, as in `train`.

    Returns: a row for each sample, in the order of the prompts: "prompt", "completion",
    "completion_ids", "logps", "truncated" and others, as in a run's samples.
    Raises: InputError before anything is sampled, if an argument cannot be used.
    """
    if isinstance(prompts, str):
        raise InputError(f"prompts = {prompts!r}: give a list of prompts, as [{prompts!r}]")
    own_code.forget_changed()
    _check(samples, temperature)
    changes = {**overrides, **option_changes(None, top_k, top_p, max_tokens)}
    console, rows = Console(highlight=False), [{"prompt": prompt} for prompt in prompts]
    config = config_for(target, changes, console=console)
    policy, questions = _unjudged(find_policy(console, config, rows, temperature=temperature))
    ask = make_asker(policy, questions, samples, rounds=ROUNDS, purpose=PURPOSE)
    with contextlib.closing(policy), telling(console, "sampling"):
        answers = ask(policy.read_params(), seed_key(config.train.seed), 0)
    print_failures(console, answers.messages)
    return [{**row, "rewards": {}} for row in answer_rows(answers, questions, "none")]


def write_samples(
    target: str,
    prompts: str,
    out: str,
    *,
    samples: int = 1,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    overwrite: bool = False,
    overrides: Sequence[str] = (),
) -> int:
    """Samples `samples` completions per prompt into a file of sample rows, batch by batch.

    Rows of an earlier start with the same model, prompts and settings are kept, and the file ends
    byte for byte as it would have without the interruption.

    Args:
      prompts: as data.path, with the column "prompt"; or a .txt file, one prompt per line.
      temperature, top_k, top_p, max_tokens: by default as the run or config says, as in `sample`.
      overwrite: begins again, whatever `out` holds.

    Raises: InputError where `out` holds rows of something else.
    """
    _check(samples, temperature)
    check_writable(out, inputs=[target, prompts])
    console, rows = Console(highlight=False), _lines(prompts)
    changes = option_changes(None if rows else prompts, top_k, top_p, max_tokens)
    config = config_for(target, changes, overrides, console)
    config = dataclasses.replace(config, data=without_columns(config.data))
    process.start(config.mesh.platform)
    config = config.at_time(config.data.template_time or _template_time(out, overwrite))
    policy, questions = _unjudged(find_policy(console, config, rows, temperature=temperature))
    batches = make_batches(policy, questions, samples, rounds=ROUNDS, purpose=PURPOSE)
    code = config.model.family, config.environments, config.tools, config.rollout.call_format
    files, settings = _file_facts(*code, config.data.chat_template), config_facts(config)
    facts = _facts(samples, policy.engine.settings.temperature, settings, questions) | files
    texts = [row["prompt"] for row in questions.rows]
    with SampleFile(out) as file:
        resume = functools.partial(file.resume, facts, texts, samples, batches.size, overwrite)
        finished_prompts = process.broadcast(resume)
        message = "are there already; to sample them again: --overwrite"
        if finished_prompts < len(texts):
            ask = functools.partial(_ask, console, policy, questions, batches)
            message = ask(seed_key(config.train.seed), finished_prompts, samples, file)
    count = f"{samples * len(texts)} samples of {len(texts)} prompts"
    if process.is_main():
        console.print(f"{out}: {count} {message}", soft_wrap=True, markup=False)
    return 0


def _unjudged(
    policy_and_prompts: tuple[StoredPolicy, PromptData],
) -> tuple[StoredPolicy, Questions]:
    """The policy, and prompts whose samples are answered, where it has turns, and not judged.

    Raises: InputError where some were left out: rows would not have the numbers of their prompts.
    """
    policy, prompts = policy_and_prompts
    if prompts.dropped:
        raise InputError(
            f"{prompts.dropped} of {len(prompts.rows) + prompts.dropped} prompts are longer than "
            f"rollout.max_prompt_tokens = {policy.engine.width}, and a file of samples has all of "
            "them: raise it, or take them out of the prompts"
        )
    converse = policy.converse(prompts.rows)
    scorer = Reward("scorer", _judge_nothing)
    return policy, Questions(prompts.rows, prompts.encoded, scorer, converse=converse)


class SampleFile(Closing):
    """A file of sample rows that grows; only process 0 opens it."""

    def __init__(self, path: str):
        self.path: Path = Path(path)
        self.settings: Path = self.path.with_name(f"{self.path.name}.settings.json")
        self._file: Any = None

    def resume(
        self,
        facts: Mapping[str, Any],
        prompts: Sequence[Any],
        samples: int,
        size: int,
        overwrite: bool,
    ) -> int:
        """Opens the file behind its last finished batch. Returns: the prompts that are done.

        Args:
          facts: what the rows are samples of, JSON values.
          size: prompts of a batch.
          overwrite: leaves nothing of what is there.
        Raises: InputError where other rows are there, or another process writes them.
        """
        self._open()
        if overwrite or not self.path.stat().st_size:
            # First no rows, then the settings: at no time are old rows beside new settings.
            self._file.truncate(0)
            write_atomically(self.settings, json.dumps(facts, indent=2) + "\n")
            return 0
        self._refuse_other(facts)
        ends = self._ends(prompts, samples)
        finished_prompts = len(ends) // samples
        # The batch that was not finished is sampled again as a whole.
        if finished_prompts < len(prompts):
            finished_prompts = finished_prompts // size * size
        end = ends[finished_prompts * samples - 1] if finished_prompts else 0
        if end < self.path.stat().st_size:
            self._file.truncate(end)
        return finished_prompts

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds rows, and has them leave this process. Raises: OSError that names the file."""
        lines = (json.dumps(plain(dict(row)), ensure_ascii=False) + "\n" for row in rows)
        try:
            self._file.write("".join(lines).encode("utf-8", "backslashreplace"))
            self._file.flush()
        except OSError as error:
            self._file.raw.close()  # without what is not written: it is sampled again
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        try:
            self._file = open(self.path, "ab", opener=storage.open_file)  # noqa: SIM115 - close()
        except OSError as error:
            raise InputError(
                f"--out {self.path} cannot be written ({error.strerror}): name a file in a folder "
                "that is there and that you may write to"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"--out {self.path}: another process writes samples into it: wait for it or stop "
                "it, or name another --out"
            ) from error
        except OSError:  # a file system without locks
            pass

    def _refuse_other(self, facts: Mapping[str, Any]) -> None:
        try:
            old_facts = dict(parse_json(self.settings.read_bytes()))
        except (OSError, ValueError, TypeError):
            raise InputError(
                f"--out {self.path}: it holds something, and {self.settings.name} beside it, which "
                "would say of what these are samples, cannot be read: name another --out, or start "
                "again with --overwrite"
            ) from None
        new_facts = json.loads(json.dumps(facts))
        names = [
            name
            for name in {**new_facts, **old_facts}
            if new_facts.get(name) != old_facts.get(name)
        ]
        if names:
            old_value, new_value = (
                side.get(names[0], "nothing") for side in (old_facts, new_facts)
            )
            more = f" (and {len(names) - 1} more differ)" if len(names) > 1 else ""
            raise InputError(
                f"--out {self.path} holds samples of something else: {names[0]} was {old_value} "
                f"and is {new_value} now{more}: give what it was begun with, name another --out, "
                "or start again with --overwrite"
            )

    def _ends(self, prompts: Sequence[Any], samples: int) -> list[int]:
        """Where each row of the file ends, in bytes; a last line without its end is left out."""
        ends, position = [], 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                place, sample = divmod(number, samples)
                expected = place, sample, plain(prompts[place]) if place < len(prompts) else None
                if _identity(line) != expected:
                    raise InputError(
                        f"--out {self.path}, line {number + 1} is not sample {sample} of prompt "
                        f"{place}: {line[:60]!r}; name another --out, or start again with "
                        "--overwrite"
                    )
                position += len(line)
                ends.append(position)
        return ends


def pace(tokens: Sequence[int], seconds: Sequence[float]) -> str:
    """Tokens and seconds of the batches of this start, and their quotient.

    >>> pace([100, 100, 100], [8.0, 1.0, 1.0])
    '300 tokens in 10.0 s, 30 tokens/s (100 after the first batch, which compiles)'
    """
    rate = sum(tokens) / sum(seconds)
    text = f"{sum(tokens):,} tokens in {sum(seconds):.1f} s, {rate:,.0f} tokens/s"
    if len(tokens) == 1:
        return f"{text} (one batch, with its compilation)"
    later_rate = sum(tokens[1:]) / sum(seconds[1:])
    if later_rate > MUCH * rate:
        text += f" ({later_rate:,.0f} after the first batch, which compiles)"
    return text


def _ask(
    console: Console,
    policy: StoredPolicy,
    questions: Questions,
    batches: Batches,
    key: Any,
    finished_prompts: int,
    samples: int,
    file: SampleFile,
) -> str:
    """Samples the batches that are left and writes their rows. Returns: what that took.

    Raises: process.StopRequested after a stop signal, behind the rows of the batch under way.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[pace]}"))
    bar = Progress(
        *(TextColumn("sampling"), *columns, TimeRemainingColumn(compact=True)),
        console=console,
        disable=not process.is_main(),
        transient=True,
    )
    params, count = policy.read_params(), len(questions.rows)
    tokens, seconds, reported = [], [], set[str]()
    stopping = process.stop_signals(after="batch")
    with contextlib.closing(policy), bar, telling(console, "sampling"), stopping:
        task = bar.add_task(
            "", total=count * samples, completed=finished_prompts * samples, pace=""
        )
        for begin in range(finished_prompts, count, batches.size):
            started = time.perf_counter()
            answers = batches.ask(begin, params, key, 0)
            seconds.append(time.perf_counter() - started)
            tokens.append(int(answers.mask.sum()))
            print_failures(console, answers.messages, reported)
            if process.is_main():
                rows = answer_rows(answers, questions, "none", begin)
                file.append({**row, "rewards": {}} for row in rows)
            rate_text = f"{tokens[-1] / seconds[-1]:,.0f} tokens/s"
            bar.update(task, advance=len(answers.texts) * samples, pace=rate_text)
            end = begin + len(answers.texts)
            if process.stop_requested(begin) and end < count:
                raise process.StopRequested(
                    f"stopped; {end * samples} of {count * samples} samples are written: "
                    "the same command without --overwrite continues"
                )
    note = f", {finished_prompts * samples} of them from before" if finished_prompts else ""
    return f"written{note}: {pace(tokens, seconds)}"


def _check(samples: int, temperature: float | None) -> None:
    if samples < 1:
        raise InputError(f"--samples {samples}: completions per prompt; give 1 or more")
    check_temperature(temperature)


def check_temperature(temperature: float | None) -> None:
    """Raises: InputError unless it is 0, for greedy, one that a config may have, or None."""
    if temperature and not HEAT["at_least"] <= temperature <= HEAT["at_most"]:
        limits = "{at_least:g} to {at_most:g}".format(**HEAT)
        raise InputError(f"--temperature {temperature:g}: give {limits}, or 0 for greedy")


def option_changes(
    data: str | None, top_k: int | None, top_p: float | None, max_tokens: int | None
) -> dict[str, Any]:
    """Keys of the config that the options stand for; None: as it is."""
    cut = top_k is not None or top_p is not None
    return {
        "data.prompt": "prompt",
        "data.answer": "",
        "eval.data": data,
        "rollout.top_k": top_k,
        "rollout.top_p": top_p,
        "rollout.max_completion_tokens": max_tokens,
        # Training refuses the cut otherwise, and to take again what is drawn among all tokens.
        "loss.proximal": "trainer" if cut else None,
        "train.support": "full" if cut else None,
    }


def without_columns(data: DataKeys) -> DataKeys:
    """The keys with entries of `data.path` that say no columns: those of `option_changes` are read,
    also where the prompts are of the source of an entry."""
    if not isinstance(data.path, tuple):
        return data
    path = tuple(dataclasses.replace(part, prompt=None, answer=None) for part in data.path)
    return dataclasses.replace(data, path=path)


def _template_time(out: str, overwrite: bool) -> str:
    """The time that a chat template writes, the same in all processes: that of the file's first
    start, or now, where it begins."""
    return process.broadcast(lambda: (None if overwrite else _begun_at(out)) or inputs.local_time())


def _begun_at(out: str) -> str | None:
    """The time that the chat template wrote for the rows of a file, if it wrote one."""
    file = SampleFile(out)
    try:
        is_new = not file.path.stat().st_size
        return None if is_new else json.loads(file.settings.read_bytes())["data.template_time"]
    except (OSError, ValueError, TypeError, KeyError):  # `resume` refuses what is damaged
        return None


def _facts(
    samples: int, temperature: float, settings: Mapping[str, Any], questions: Questions
) -> dict[str, Any]:
    """What samples depend on beside files, as JSON values.

    Args:
      settings: `config_facts` of the config that they are drawn by.
    """
    keys = {name: value for name, value in settings.items() if name.startswith(ACT)}
    model = checksum([json.dumps(keys.pop("model.path")).encode()])
    return {
        "--samples": samples,
        "--temperature": temperature,
        "the model": f"crc32 {model}",
        "the purpose of the draws": PURPOSE,
        "--prompts": describe_rows(questions.rows, questions.encoded),
        **keys,
    }


def _file_facts(
    family: str | None,
    environments: Mapping[str, str],
    tools: Sequence[str],
    call_format: str,
    template: str,
) -> dict[str, Any]:
    """What is in the files of own code and of the chat template that samples depend on.

    Args: as keys of the config.
    """
    code = filter(None, [family, *environments.values(), *tools, call_format])
    template_files = [] if template in CHOICES else [Path(template)]
    return {"own code": code_checksums(code), "the template": file_checksums(template_files)}


def _identity(line: bytes) -> tuple[Any, ...] | None:
    """(row, sample, prompt) of a line; None if it is no sample row."""
    try:
        entry = json.loads(line)
        return entry["row"], entry["sample"], entry["prompt"]
    except (ValueError, TypeError, KeyError):
        return None


def _judge_nothing(completions: Sequence[Any]) -> list[None]:
    return [None] * len(completions)


def _lines(path: str) -> list[dict[str, str]] | None:
    """The prompts of a .txt file; None: `path` is as data.path.

    Raises: InputError where nothing is there, since a config would name its own key.
    """
    file = Path(os.path.expanduser(path))
    if is_path(path, Path.cwd()) and not os.path.exists(file):
        raise InputError(
            f"--prompts {path}: there is no such file: give a .txt with a prompt in each line, or "
            f"rows with a column prompt, {FORMS}"
        )
    if not path.endswith(".txt"):
        return None
    if not file.is_file():
        raise InputError(f"--prompts {path}: a .txt of prompts is a file of this machine")
    with refusing(f"--prompts {path}: no text in UTF-8 ({{reason}}): save it as that", ValueError):
        text = file.read_bytes().decode("utf-8-sig")
    lines = text.split("\n")  # no other line ends, as .jsonl
    if not text.strip():
        raise InputError(f"--prompts {path}: holds no prompt; write one in each line")
    return [{"prompt": line.removesuffix("\r")} for line in lines if line.strip()]
