"""The tools and environments of a run: found, checked, and ready to answer its samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxgrpo.config import own_code
from jaxgrpo.config.keys import RolloutKeys
from jaxgrpo.config.reading import Values, show
from jaxgrpo.core.errors import InputError, cut, written
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.limits import TimedOut, left_after
from jaxgrpo.environments import calls, history, packages, rules
from jaxgrpo.environments.conversations import (
    THREADS,
    Conversation,
    Conversations,
    check_rows,
)
from jaxgrpo.environments.history import Frame, History
from jaxgrpo.environments.partners import Kind, make_kind
from jaxgrpo.environments.processes import UNREADABLE, Processes
from jaxgrpo.environments.rules import Answering, Rules, number_columns
from jaxgrpo.environments.serving.dialect import Dialect
from jaxgrpo.environments.serving.endpoint import is_program, make_program_kind
from jaxgrpo.environments.serving.fields import Limits
from jaxgrpo.environments.tools import find_built_in, make_tools
from jaxgrpo.rewards.protocol import Reward, reads_any
from jaxgrpo.rollout.dialogue import Converse, ThreadedDialogue, Turns
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.exchange import is_own
from jaxgrpo.rollout.traced import TracedDialogue

COLUMNS = ("environments", "conversations")
"""What rewards may ask for where samples are answered."""

KEYS = (
    *("max_turns", "max_turn_tokens", "reply_after"),
    *("call_format", "call_timeout", "call_workers", "call_memory"),
)
"""Keys of `rollout` about turns."""

NOT_WITH_TURNS = {
    "rollout.interrupt": "a turn would end where it is interrupted",
    "rollout.early_stop": "confidence is of a sample and not of its turns",
    "rollout.goals": "an environment's words would follow the goal",
    "rollout.prefixes": "an environment writes its own words into the prompt",
    "tree.branch": "a branch would need a copy of its parent's environment",
    "experience.share": "a kept sample would follow other words of its environment",
}
"""Keys that do not go with tools and environments, and why."""

Environment = Callable[..., Any] | Rules
"""What makes an environment, a program that asks for its turns, or rules in JAX"""

Factories = Environment | Mapping[str, Environment]
"""One of them, or several by their names"""


def check(values: Values) -> Iterator[str]:
    """Keys about turns that nothing reads, and keys that do not go with turns."""
    has_turns = bool(values.get("tools") or values.get("environment"))
    defaults = {field.name: field.default for field in dataclasses.fields(RolloutKeys)}
    for name in KEYS:
        value = values.get(f"rollout.{name}", defaults[name])
        if value != defaults[name] and not has_turns:
            yield (
                f"rollout.{name} = {show(value)}: nothing reads it without tools or an "
                "environment; leave it out"
            )
    if values.get("data.history", "exact") != "exact" and not has_turns:
        reason = "nothing reads it without tools or an environment"
        yield f'data.history = "fork": {reason}; leave it out'
    if values.get("data.prompt") == "" and not values.get("environment"):
        yield (
            'data.prompt = "": nothing is asked, for there is no environment whose `reset` could '
            "say it; write the column that has the prompts, or a template"
        )
    longest, of_turn = (values.get(f"rollout.max_{part}_tokens") for part in ("completion", "turn"))
    if has_turns and of_turn is not None and longest is not None and of_turn > longest:
        yield (
            f"rollout.max_turn_tokens = {of_turn}: a sample, all its turns and what answers them, "
            f"has at most rollout.max_completion_tokens = {longest}; lower it, or leave it out"
        )
    for name, reason in NOT_WITH_TURNS.items():
        if has_turns and values.get(name):
            yield f"{name}: with tools or an environment {reason}; leave one of the two out"
    if isinstance(values.get("environment"), Mapping) and not values["environment"]:
        yield "environment = {}: name at least one class, or leave it out"


class World(NamedTuple):
    """What answers the samples of a run: kinds of partners, or rules by which engines answer."""

    kinds: dict[str, Kind]
    answering: Answering | None  # how an engine answers by itself, without kinds
    chat: Chat
    stop_tokens: tuple[int, ...]
    bounds: Turns
    forks: bool = False  # as in `Conversations`
    processes: Processes | None = None  # of tools and environments; None: they run in threads

    def close(self) -> None:
        """Ends the processes of tools and environments, and what programs wait for; the next call
        begins others."""
        for kind in self.kinds.values():
            kind.close()
        if self.processes is not None:
            self.processes.close()

    def refuse_readers(self, rewards: Sequence[Reward]) -> None:
        """Raises: InputError with the first reward that reads objects of other processes."""
        for reward in rewards if self.processes is not None else ():
            if reads_any(reward.function, ("environments",)):
                raise InputError(f"rewards.{reward.name} reads `environments`: {UNREADABLE}")

    def sampling(self, settings: SamplingSettings) -> SamplingSettings:
        """How an engine draws samples that are answered.

        Raises: InputError where the engine cannot answer them by itself.
        """
        return _answered(settings, self.bounds, self.answering, self.forks)

    def converse(self, rows: Sequence[Mapping[str, Any]]) -> Converse:
        """What gives the dialogue of a batch of these rows.

        Raises: InputError with the first row that names no environment, where rules cannot begin
          with the rows, and with a column that rewards could not tell from ours.
        """
        for column in sorted({*COLUMNS}.intersection(*rows[:1])):
            raise InputError(
                f"data: the column {column!r} has the name of what rewards get where tools or "
                "environments answer samples: rename it"
            )
        if (answering := self.answering) is not None:
            columns = number_columns(rows)
            rules.check(answering.rules, columns, answering.tokens, "environment")
            parts = answering, History(self.chat, frozenset(self.stop_tokens)), rows, columns
            return lambda longest, seed: TracedDialogue(*parts, longest, seed)
        check_rows(self.kinds, rows)
        parts = self.kinds, self.chat, self.stop_tokens, rows, is_own, self.forks
        talks = Conversations(*parts)
        return lambda longest, seed: ThreadedDialogue(talks, self.bounds, longest, seed)

    @property
    def first_chat(self) -> Chat:
        """How prompts are written out: with the tools of a row's environment, or of the first."""
        if self.answering is not None:
            return self.chat
        tools = {name: kind.shown_in(self.chat).tools for name, kind in self.kinds.items()}
        return self.chat._replace(tools=next(iter(tools.values())), environments=tools)

    def rewards(self, beside: Sequence[Reward] = ()) -> list[Reward]:
        """What environments give, one for each class, with weight 1.

        Raises: InputError as `refuse_readers` of the rewards beside them.
        """
        self.refuse_readers(beside)
        names = dict.fromkeys(kind.name for kind in self.kinds.values() if kind.has_reward)
        if self.answering is not None:
            names = [self.answering.rules.name]
        return [Reward(name, _environment_reward(name)) for name in names]

    def scorer(self) -> Reward:
        """What judges samples by the environment of their row, whatever its class is."""
        names = [reward.name for reward in self.rewards()]
        return Reward(names[0] if len(names) == 1 else "environment", _environment_reward(None))


def make_world(
    tools: Sequence[str | Callable[..., Any]],
    environments: Mapping[str, str | Environment],
    rollout: RolloutKeys,
    chat: Chat,
    stop_tokens: Sequence[int],
    forks: bool = False,
) -> World | None:
    """What answers the samples of a run; None: nothing does.

    Args:
      tools: own code, by name or as it is, or names of built-in ones.
      environments: name -> what makes it; "" is the name of a single one.
      stop_tokens: of the model.
      forks: as in `Conversations`.

    Raises: InputError where own code is no tool or no environment, or the chat template cannot go
      on behind a turn.
    """
    if not tools and not environments:
        return None
    bounds = _bounds(rollout)
    factories = load_environments(environments, bool(tools))
    if rollout.call_workers:
        _refuse_unforked(factories)
    if isinstance(pure := factories.get(next(iter(factories), "")), Rules):
        return _traced_world(pure, bounds, chat, stop_tokens, forks)
    functions = make_tools([_resolve_tool(tool) for tool in tools], "tools")
    by_name: dict[str, Any] = {tool.name: tool.function for tool in functions}
    factories = {f"environment.{name}".rstrip("."): part for name, part in factories.items()}
    processes = None
    if rollout.call_workers:
        parts = {f"tools.{name}": tool for name, tool in by_name.items()} | factories
        processes = Processes(parts, rollout.call_workers, rollout.call_memory)
        by_name = {name: processes.tool(f"tools.{name}") for name in by_name}
    seconds = rollout.call_timeout
    parser = functools.partial(find_parser, rollout.call_format, chat, stop_tokens, seconds)
    kinds = {}
    for where, factory in (factories or {"environment": None}).items():
        name = where.removeprefix("environment").removeprefix(".")
        if factory is not None and is_program(factory):
            parts = factory, rollout, chat, stop_tokens, where, functions, forks, parser
            kinds[name] = _program_kind(*parts)
        else:
            parts = factory, by_name, tuple(functions), parser, seconds, where, processes
            kinds[name] = make_kind(*parts)
    for kind in kinds.values():
        shown = History(kind.shown_in(chat), frozenset(stop_tokens))
        history.check(shown, bool(kind.tools), forks)
    return World(kinds, None, chat, tuple(stop_tokens), bounds, forks, processes)


def _traced_world(
    pure: Rules, bounds: Turns, chat: Chat, stop_tokens: Sequence[int], forks: bool
) -> World:
    """What answers by rules in JAX."""
    if forks:
        raise InputError(
            'data.history = "fork": rules in JAX write behind what was drawn; leave it out, or '
            "write the environment as a class"
        )
    frame = History(chat, frozenset(stop_tokens)).frame()
    return World({}, _answering(pure, bounds, frame), chat, tuple(stop_tokens), bounds)


def _refuse_unforked(factories: Mapping[str, Any]) -> None:
    """Raises: InputError with the first part that runs in no process of its own."""
    for factory in factories.values():
        is_rules = isinstance(factory, Rules)
        if is_rules or is_program(factory):
            kind = "rules in JAX" if is_rules else "a program that asks for its turns"
            raise InputError(
                f"rollout.call_workers: the environment is {kind}, which runs in this process: "
                "leave call_workers out"
            )


def plan_sampling(
    settings: SamplingSettings,
    rollout: RolloutKeys,
    environments: Mapping[str, str],
    history: str,
) -> SamplingSettings:
    """As `World.sampling`, where no tokenizer is read: what its chat template writes around replies
    changes no size; `history` is `data.history`."""
    bounds, answering = _bounds(rollout), None
    for part in load_environments(environments).values():
        if isinstance(part, Rules):
            answering = _answering(part, bounds, Frame((), (), ()))
    return _answered(settings, bounds, answering, history == "fork")


def _bounds(rollout: RolloutKeys) -> Turns:
    longest = rollout.max_turn_tokens or rollout.max_completion_tokens
    return Turns(rollout.max_turns, longest, rollout.reply_after)


def _answering(pure: Rules, bounds: Turns, frame: Frame) -> Answering:
    return Answering(pure, bounds.most, bounds.tokens, frame)


def _answered(
    settings: SamplingSettings, bounds: Turns, answering: Answering | None, forks: bool
) -> SamplingSettings:
    if answering is None:
        return settings._replace(max_turns=bounds.most, own_rows=forks)
    if settings.stop_strings is not None:
        raise InputError(
            "rollout.stop_strings: rules in JAX see tokens and no text; end turns by a token "
            "(eos_token_id of generation_config.json) or write the environment as a class"
        )
    return settings._replace(answering=answering)


def load_environments(
    environments: Mapping[str, str | Environment], has_tools: bool = False
) -> dict[str, Any]:
    """What makes each environment, or the rules of a single one.

    Raises: InputError where one cannot be loaded, or there are others beside rules.
    """
    parts = {name: _load_environment(part) for name, part in environments.items()}
    is_pure = any(isinstance(part, Rules) for part in parts.values())
    if is_pure and (len(parts) > 1 or has_tools):
        raise InputError(
            "environment: rules in JAX answer all samples of a run by themselves: leave out tools "
            "and other environments, or write them as a class"
        )
    return parts


def _program_kind(
    program: Callable[..., Any],
    rollout: RolloutKeys,
    chat: Chat,
    stop_tokens: Sequence[int],
    where: str,
    tools: Sequence[Any],
    forks: bool,
    parser: Callable[[], calls.Parser],
) -> Kind:
    """What rows of a program talk to. Raises: InputError where there are tools beside it."""
    if tools:
        raise InputError(f"{where}: a program brings its own tools; leave `tools` out")
    longest = rollout.max_completion_tokens
    limits = Limits(
        vocab_size=chat.vocab_size or len(chat.tokenizer),
        longest=rollout.max_prompt_tokens + longest,
        max_tokens=min(longest, rollout.max_turn_tokens or longest),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        is_turn=True,
        ends=frozenset(stop_tokens),
        stop_strings=rollout.stop_strings,
    )
    dialect = Dialect("policy", chat, limits, parser, stop_tokens)
    return make_program_kind(program, dialect, stop_tokens, rollout.call_timeout, forks)


def _load_environment(part: Any) -> Any:
    """What makes an environment: of a package by its name, own code by name or as it is."""
    if not isinstance(part, str):
        return part
    return packages.find(part) or own_code.load(part, None, (Callable, Rules), "class")


def named_factories(environment: Factories | None) -> Mapping[str, Environment]:
    """Factories by name; that of a single environment has the name ""."""
    if environment is None or isinstance(environment, Mapping):
        return environment or {}
    return {"": environment}


def _resolve_tool(tool: str | Callable[..., Any]) -> Any:
    """The function of a tool, which is own code or built in."""
    if isinstance(tool, str) and not own_code.is_reference(tool):
        return find_built_in(tool)
    return own_code.resolve(tool)


def find_parser(name: str, chat: Chat, stop_tokens: Sequence[int], seconds: float) -> calls.Parser:
    """The parser of calls that `rollout.call_format` names. Raises: InputError for none.

    Args:
      seconds: that one of the user's own may take for a text.
    """
    if not own_code.is_reference(name):
        return calls.choose(name, History(chat, frozenset(stop_tokens)))
    function = own_code.load(name)

    def read(text: str) -> tuple[Any, bool]:
        reading = function(text)
        is_pair = isinstance(reading, tuple) and len(reading) == 2 and _is_series(reading[1])
        return (reading[0], [*reading[1]]) if is_pair else reading, is_pair  # or it yields

    def parse(text: str, before: str = "") -> calls.Reading:
        try:
            reading, is_pair = left_after(seconds, lambda: read(text))
        except TimedOut:
            problem = f"{name} took more than {seconds:g} s for it"
            return calls.Reading(text, [calls.unreadable(problem)])
        except Exception as error:
            return calls.Reading(text, [calls.unreadable(error)])
        if not is_pair:
            raise InputError(
                f'rollout.call_format = "{name}": it returned {cut(written(reading))}: return what '
                'was said and a list of calls, ("It is ", [{"name": "add", "arguments": {"a": 1}}])'
            )
        content = "" if reading[0] is None else str(reading[0])  # as in OpenAI's messages
        return calls.Reading(content, [calls.read(entry) for entry in reading[1]])

    return parse


def _is_series(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping))


def _environment_reward(name: str | None) -> Callable[..., list[float]]:
    """The reward that environments of a class give, None: of any, asked for side by side. Samples
    of others, which may have its name and give none, get 0 of it, which adds nothing: as unscored
    they would have no sum of rewards."""

    def sample_reward(talk: Conversation) -> float:
        is_judged = name is None or (talk.name == name and talk.has_reward)
        return talk.reward() if is_judged else 0.0

    def reward(conversations: Sequence[Conversation]) -> list[float]:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="jaxgrpo-rewards") as threads:
            return [*threads.map(sample_reward, conversations)]

    return reward
