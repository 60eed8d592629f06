"""The rewards of a run: built as its config says, and tried out."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxgrpo.config import own_code
from jaxgrpo.config.keys import RewardKeys
from jaxgrpo.config.world import COLUMNS, World
from jaxgrpo.core.errors import InputError
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
from jaxgrpo.rollout.answers import answer_end_tokens
from jaxgrpo.rollout.texts import decode_texts
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.alarms import NEEDS_WORKERS
from jaxgrpo.training.records.console import facts

SHOWN = 80  # characters of an answer
NOTES = {
    "environment": "an environment broke: its sample is not scored (environment/broken counts "
    "them, in evaluations unscored)",
    "tools": "nearly all calls of tools raise, this one first (in training "
    f"tools/raised_frequency); in threads, {NEEDS_WORKERS}",
}
"""What is said of messages that are not of a reward."""
UNSCORED = 'left unscored, as on_error = "unscored" says'


def resolve_rewards(
    keys: Sequence[RewardKeys],
    max_completion_tokens: int,
    user_rewards: Rewards | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    folder: Path | None = None,
    world: World | None = None,
) -> tuple[Reward, ...]:
    """The rewards of a run, each with a name of its own.

    Args:
      max_completion_tokens: that rewards of lengths compare with.
      user_rewards: functions, or names as a config may use them, instead of the config's rewards,
        each with weight 1. In a list they are called as their function is; a mapping names them.
      folder: where relative paths in `user_rewards` begin; those of the config are absolute.
      rows: of the data, whose columns have to be all that the rewards ask for.
      world: the run's tools and environments: rewards may ask for conversations, and an environment
        may bring a reward.

    Raises: InputError where two have one name, one does not exist, asks for a missing column or
    cannot judge a row.
    """
    entries = [(entry.title, entry.use, entry) for entry in keys]
    if user_rewards is not None:
        is_named = isinstance(user_rewards, Mapping)
        pairs = user_rewards.items() if is_named else [(_name(use), use) for use in user_rewards]
        entries = [(name, use, RewardKeys(use=name)) for name, use in pairs]  # all by default
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
    columns = () if world is None else COLUMNS
    for reward in rewards if rows else ():
        check(reward.name, reward.function, [*columns, *(n for n in rows[0] if n != "prompt")])
        check_rows(reward.function, rows)
    rewards += () if world is None else tuple(world.rewards(rewards))
    counts = Counter(reward.name for reward in rewards)
    if duplicates := sorted(name for name, count in counts.items() if count > 1):
        raise InputError(
            f"rewards: {duplicates[0]!r} stands twice; give each a `name` of its own (from Python, "
            "rewards={name: function})"
        )
    return rewards


def _name(use: Any) -> str:
    """What a reward given from Python is called."""
    return own_code.short_name(use) if isinstance(use, str) else callable_name(use)


def resolve_scorer(
    use: str | None,
    keys: Sequence[RewardKeys],
    max_completion_tokens: int,
    rewards: Sequence[Reward] = (),
    world: World | None = None,
) -> Reward:
    """What judges success in evaluations: `eval.scorer`, else the first reward, never flipped, else
    the environment of each row.

    Args:
      use: `eval.scorer`.
      keys: of the config's rewards, of which only the first is loaded, and only if it judges.
      rewards: of the run, with those of environments, if they are there already.
      world: the run's tools and environments.

    Raises: InputError where nothing judges.
    """
    if use is not None:
        return Reward(own_code.short_name(use), _function(use, {}, max_completion_tokens))
    rewards = rewards or resolve_rewards(keys[:1], max_completion_tokens, world=world)
    if not rewards:
        raise InputError(
            "rewards: missing, and the environment has no get_reward, so nothing judges the "
            "answers: set eval.scorer (eval --scorer, probe --reward), as gsm8k_answer, math, or "
            "path/file.py:function"
        )
    if world is not None and len(rewards) == len(world.rewards()):  # of environments alone
        return world.scorer()
    return rewards[0]._replace(flip=0.0)


LATER = ("step", "learning_rate", "flops", "reference/resets")
LATER_TABLES = ("time/", "eval/", "atlas/", "goals/")
"""Names, and beginnings of names, of metrics that a step gets behind those of its update."""


def with_logged(values: Mapping[str, float], log: RewardLog) -> dict[str, float]:
    """The metrics of an update and those that rewards logged.

    Raises: RewardError where a reward logs under a name that the trainer uses.
    """
    logged = log.numbers()
    clashes = sorted(n for n in logged if n in values or n in LATER or n.startswith(LATER_TABLES))
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
    does not leave its samples unscored, or logs a metric under a name of LATER or LATER_TABLES.
    """
    end = answer_end_tokens(tokenizer, stop_tokens)
    return preview(
        rewards,
        row,
        lambda text: [*tokenizer(text, add_special_tokens=False)["input_ids"], *end],
        functools.partial(decode_texts, tokenizer),
        trainer_state=state,
        check_log=functools.partial(with_logged, {}),
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


def say_failures(
    say: Callable[[str], object], messages: Mapping[str, str], reported: set[str]
) -> None:
    """Says what failed and why samples are not scored, once for each name.

    Args:
      say: prints a text.
      messages: of a `RewardLog`.
      reported: names that need no further words; those of `messages` are added.
    """
    for name, message in messages.items():
        if name not in reported:
            reported.add(name)
            say(f"{message}\n{NOTES.get(name, UNSCORED)}")


def print_failures(
    console: Console, messages: Mapping[str, str], reported: set[str] | None = None
) -> None:
    """As `say_failures`, in the first process; `reported` for commands that call it again."""
    if process.is_main():
        say = functools.partial(console.print, markup=False, soft_wrap=True)
        say_failures(say, messages, set() if reported is None else reported)


def _function(
    use: Any, options: Mapping[str, Any], max_completion_tokens: int, folder: Path | None = None
) -> Any:
    lengths = with_lengths(use, options, max_completion_tokens)
    return build(own_code.resolve(use, folder), **lengths)
