"""The tools and environments of a run: found, checked, and ready to answer its samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxgrpo.config import own_code
from jaxgrpo.config.keys import LARGEST, RolloutKeys
from jaxgrpo.config.reading import Values, show
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.chat import Chat
from jaxgrpo.environments import calls, history
from jaxgrpo.environments.conversations import Conversation, Conversations, check_rows
from jaxgrpo.environments.history import History
from jaxgrpo.environments.partners import Kind, make_kind
from jaxgrpo.environments.tools import find_built_in, make_tools
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout.dialogue import Converse, Dialogue, Turns
from jaxgrpo.rollout.exchange import is_own

COLUMNS = ("environments", "conversations")
"""What rewards may ask for where samples are answered."""

KEYS = ("max_turns", "max_turn_tokens", "call_format", "call_timeout", "reply_after")
"""Keys of `rollout` about turns."""

EXCLUDED = {
    "rollout.interrupt": "a turn would end where it is interrupted",
    "rollout.early_stop": "confidence is of a sample and not of its turns",
    "rollout.goals": "an environment's words would follow the goal",
    "rollout.prefixes": "an environment writes its own words into the prompt",
    "tree.branch": "a branch would need a copy of its parent's environment",
    "experience.share": "a kept sample would follow other words of its environment",
}
"""Keys that do not go with tools and environments, and why."""

Factories = Callable[[], Any] | Mapping[str, Callable[[], Any]]
"""What makes an environment, or what makes each of several, by their names"""


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
    for name, reason in EXCLUDED.items():
        if has_turns and values.get(name):
            yield f"{name}: with tools or an environment {reason}; leave one of the two out"
    if isinstance(values.get("environment"), Mapping) and not values["environment"]:
        yield "environment = {}: name at least one class, or leave it out"


class World(NamedTuple):
    """What answers the samples of a run."""

    kinds: dict[str, Kind]
    chat: Chat
    stop_tokens: tuple[int, ...]
    bounds: Turns

    def converse(self, rows: Sequence[Mapping[str, Any]]) -> Converse:
        """What gives the dialogue of a batch of these rows.

        Raises: InputError with the first row that names no environment.
        """
        check_rows(self.kinds, rows)
        talks = Conversations(self.kinds, self.chat, self.stop_tokens, rows, is_own)
        return lambda longest, seed: Dialogue(talks, self.bounds, longest, seed)

    @property
    def first_chat(self) -> Chat:
        """How prompts are written out with the tools of the first environment."""
        kind = next(iter(self.kinds.values()))
        return self.chat._replace(tools=tuple(tool.schema for tool in kind.tools))

    def rewards(self) -> list[Reward]:
        """What environments give, one for each class, with weight 1."""
        names = dict.fromkeys(kind.name for kind in self.kinds.values() if kind.has_reward)
        return [Reward(name, _environment_reward(name), 1.0) for name in names]


def make_world(
    tools: Sequence[str | Callable[..., Any]],
    environments: Mapping[str, str | Callable[[], Any]],
    rollout: RolloutKeys,
    chat: Chat,
    stop_tokens: Sequence[int],
) -> World | None:
    """What answers the samples of a run; None: nothing does.

    Args:
      tools: own code, by name or as it is, or names of built-in ones.
      environments: name -> what makes it; "" is the name of a single one.
      stop_tokens: of the model.

    Raises: InputError where own code is no tool or no environment, or the chat template cannot go
      on behind a turn.
    """
    if not tools and not environments:
        return None
    functions = make_tools([_resolve_tool(tool) for tool in tools], "tools")
    by_name = {tool.name: tool.function for tool in functions}
    parse = _parser(rollout.call_format, chat)
    kinds = {}
    for name, factory in (environments or {"": None}).items():
        where = f"environment.{name}" if name else "environment"
        parts = by_name, tuple(functions), parse, rollout.call_timeout, where
        make = None if factory is None else own_code.resolve(factory)
        kinds[name] = make_kind(make, *parts)
    bounds = Turns(rollout.max_turns, rollout.max_turn_tokens or LARGEST, rollout.reply_after)
    world = World(kinds, chat, tuple(stop_tokens), bounds)
    for kind in kinds.values():
        schemas = tuple(tool.schema for tool in kind.tools)
        history.check(
            History(chat._replace(tools=schemas), frozenset(stop_tokens)), bool(kind.tools)
        )
    return world


def named_factories(environment: Factories | None) -> Mapping[str, Callable[[], Any]]:
    """Factories by name; that of a single environment has the name ""."""
    if environment is None or isinstance(environment, Mapping):
        return environment or {}
    return {"": environment}


def _resolve_tool(tool: str | Callable[..., Any]) -> Any:
    """The function of a tool, which is own code or built in."""
    if isinstance(tool, str) and not own_code.is_reference(tool):
        return find_built_in(tool)
    return own_code.resolve(tool)


def _parser(name: str, chat: Chat) -> calls.Parser:
    if not own_code.is_reference(name):
        return calls.choose(name, chat.template, chat.tokenizer)
    function = own_code.load(name)

    def parse(text: str) -> calls.Reading:
        reading = function(text)
        if not isinstance(reading, tuple) or len(reading) != 2:
            kind = type(reading).__name__
            raise InputError(
                f'rollout.call_format = "{name}": it returned a {kind}: return what was said and '
                'the calls, ("It is ", [{"name": "add", "arguments": {"a": 1}}])'
            )
        return calls.Reading(str(reading[0]), [calls.read(entry) for entry in reading[1]])

    return parse


def _environment_reward(name: str) -> Callable[..., list[float]]:
    """The reward that environments of a class give; others are not scored by it."""

    def reward(conversations: Sequence[Conversation]) -> list[float]:
        return [
            talk.reward() if type(talk.partner.environment).__name__ == name else math.nan
            for talk in conversations
        ]

    return reward
