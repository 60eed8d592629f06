"""How a conversation goes on behind a turn: the tokens between it and the next one.

What a model wrote stays the ids that it drew. What comes between two turns (the end of the first,
the messages that answer it, the opening of the next) is what the chat template writes there. It is
read off a rendering of a short conversation: all that follows a turn, from the token that ends it
on. Nothing is tokenised twice, and the tokens of earlier turns never change: a template that drops
thoughts of earlier turns drops none here. `History.write` renders a conversation again, whole.

Without a chat template the answers follow a turn as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxgrpo.core.errors import InputError, cut
from jaxgrpo.data import chat as chats
from jaxgrpo.data.chat import Chat, Message

QUESTION = {"role": "user", "content": "jaxgrpo question"}
TURN = "jaxgrpoturn"  # instead of what a model wrote
ANSWER = "jaxgrpoanswer"
TOOL = "jaxgrpo_tool"
ID = "jaxgrpo00"  # of a call: nine letters and digits, as Mistral's templates ask for
WHERE = "a conversation with several turns"


class Frame(NamedTuple):
    """The tokens of a chat template around what answers a turn."""

    closing: tuple[int, ...]  # behind a turn that did not end itself
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def size(self) -> int:
        """Tokens, at most."""
        return sum(map(len, self))


class History(NamedTuple):
    """Continues conversations of one tokenizer and template."""

    chat: Chat
    stop_tokens: frozenset[int]

    def between(
        self, messages: Sequence[Message], last_token: int | None, called: str = TOOL
    ) -> list[int]:
        """The tokens between a turn and the next one.

        Args:
          messages: what answers the turn: all of the tool, or one of the user.
          last_token: of the turn; None: nothing was drawn.
          called: as in `text`.
        """
        if self.chat.template is None:
            return chats.encode(self.chat, "".join(message["content"] for message in messages))
        ids = chats.encode(self.chat, self.text(messages, called))
        # The model has drawn the token that the template ends a turn with; another one that ends
        # turns stands in its place.
        return ids[last_token in self.stop_tokens and ids[0] in self.stop_tokens :]

    def text(
        self, messages: Sequence[Message], called: str = TOOL, before: Sequence[Message] = ()
    ) -> str:
        """What the template writes behind a turn, from the token that ends it on.

        Args:
          called: the tool that the first message answers, where that has no name: some templates
            write an answer with the name that is in the call, as GPT-OSS's.
          before: turns and answers in front of the turn.

        Raises: InputError where it ends turns with none of the model's stop tokens.
        """
        word = _word_for_turn(messages)
        turn: Message = {"role": "assistant", "content": word}
        if messages[0]["role"] == "tool":
            turn = _turn_with_call(messages[0].get("name", called), {word: word})
        _, behind = self._around([*before, turn, *messages], word)
        return behind[self._end(behind) :]

    def written(self, turn: Message) -> tuple[str, str]:
        """What the template writes of a turn with a call, behind what opens it, and the token that
        ends it. Its last value is TURN; empty: the template does not write it. Raises: as `text`.
        """
        answer = {"role": "tool", "name": TOOL, "content": ANSWER}
        calls = [{**call, "id": ID} for call in turn["tool_calls"]]
        begun, behind = self._around([{**turn, "tool_calls": calls}, answer])
        if not begun:
            return "", ""
        end, opening = self._end(behind), self.opening()
        stop = next(stop for stop in self._stops() if behind.startswith(stop, end))
        if not begun.startswith(opening):  # what is written again may lack a thought
            opening = opening.rpartition("<think>")[0]
        return (begun + behind[:end]).removeprefix(opening), stop

    def opening(self) -> str:
        """What the template writes up to a first turn; empty without one."""
        return _render(self.chat, [QUESTION], is_limited=False) if self.chat.template else ""

    def _around(self, messages: Sequence[Message], word: str = TURN) -> tuple[str, str]:
        """What the template writes behind a question, up to the last word of a turn and behind."""
        text = _render(self.chat, [QUESTION, *messages], is_limited=False)
        begun, turn, behind = text.rpartition(word)  # a call has it as name and value
        return begun + turn, behind if turn else ""

    def _end(self, behind: str) -> int:
        """Where the first stop token is. Raises: InputError where there is none."""
        places = [behind.find(stop) for stop in self._stops()]
        if not any(place >= 0 for place in places):
            stops = ", ".join(map(repr, self._stops()))
            raise InputError(
                f"{self.chat.name} ends a turn with none of the tokens that end samples ({stops}): "
                "set data.chat_template to one that does, or add what it writes to eos_token_id of "
                "generation_config.json, in a copy of the model's folder"
            )
        return min(place for place in places if place >= 0)

    def write(self, prompt: str | Sequence[Message], messages: Sequence[Message]) -> str:
        """What the template writes of a conversation, up to the opening of the next turn.

        Args:
          prompt: of the row; messages follow it.

        Raises: InputError where the template fails.
        """
        begun = chats.with_system(self.chat, prompt, WHERE)
        if messages and begun[-1]["role"] == "assistant":  # the first turn continues it
            begun, messages = begun[:-1], chats.with_start(begun, messages)
        return _render(self.chat, [*begun, *messages], is_limited=False)

    def encode(self, text: str) -> list[int]:
        """The tokens of what the template has written."""
        return chats.encode(self.chat, text)

    def frame(self) -> Frame:
        """What stands around a message of the user, whatever it says.

        Raises: InputError where tokens of the template reach into the message.
        """
        if self.chat.template is None:
            return Frame((), (), ())
        text = self.text([{"role": "user", "content": ANSWER}])
        before, _, after = text.partition(ANSWER)
        parts = [chats.encode(self.chat, part) for part in (before, ANSWER, after)]
        if [*parts[0], *parts[1], *parts[2]] != chats.encode(self.chat, text):
            raise InputError(
                f"{self.chat.name}: its tokens reach into the messages that answer turns: rules in "
                "JAX need a template that sets messages apart by tokens of its own"
            )
        closed = parts[0][0] in self.stop_tokens
        return Frame(tuple(parts[0][:closed]), tuple(parts[0][closed:]), tuple(parts[2]))

    def spoken(self, ids: Sequence[int]) -> str:
        """The text of a turn without the token that ended it."""
        return self.words(ids[:-1] if ids and ids[-1] in self.stop_tokens else ids)

    def words(self, ids: Sequence[int]) -> str:
        """The text of tokens, every one of them."""
        return self.chat.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _stops(self) -> list[str]:
        return [self.chat.tokenizer.decode([token]) for token in sorted(self.stop_tokens)]


def check(history: History, has_tools: bool, forks: bool) -> None:
    """Refuses a template that cannot go on behind a turn.

    Args:
      forks: whether a conversation is written again where what is behind a turn is not enough.

    Raises: InputError where it does not show tools, or write calls or answers; where `History.text`
      cannot tell where a turn ends; or where, without forks, it is another text in a conversation
      of more turns.
    """
    chat = history.chat
    if chat.template is None:
        return
    role, turn = "user", {"role": "assistant", "content": TURN}
    if has_tools:
        role, turn = "tool", _turn_with_call(TOOL, {TURN: TURN})
    answer = {"role": role, "content": ANSWER} | ({"name": TOOL} if has_tools else {})
    text = _render(chat, [QUESTION, turn, answer])
    words = {TURN: "a turn of the assistant", ANSWER: f"a message with role {role!r} behind a turn"}
    if has_tools:
        words = {TOOL: "calls of tools", TURN: "the arguments of calls"} | words
    for word, kind in words.items():
        if word not in text:
            raise InputError(
                f"{chat.name} does not write {kind}: set data.chat_template to one that does"
            )
    without = chat._replace(template=chat.written_template, tools=())
    if chat.tools and text == _render(without, [QUESTION, turn, answer]):
        raise InputError(
            f"{chat.name} does not show the tools that there are: set data.chat_template to one "
            "that writes `tools`"
        )
    once, again = history.text([answer]), history.text([answer], before=[turn, answer])
    if once != again and not forks:
        raise InputError(
            f"{chat.name} writes the same answer in another way behind a second turn "
            f"({cut(repr(again))}, first {cut(repr(once))}), as where it numbers messages: set "
            'data.history = "fork", which writes such conversations again'
        )


def _word_for_turn(answers: Sequence[Message]) -> str:
    """A word in place of a turn that no answer to it holds, as one of this file's would TURN."""
    tails = [t for answer in answers for t in re.findall(f"{TURN}(n*)", answer["content"])]
    return TURN + "n" * (1 + max(map(len, tails)) if tails else 0)


def _turn_with_call(name: str, arguments: Mapping[str, Any]) -> Message:
    function = {"name": name, "arguments": arguments}
    call = {"type": "function", "function": function, "id": ID}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def write_in_some_form(write: Callable[[list[Message]], str], messages: Sequence[Message]) -> str:
    """What a template writes of a conversation with calls: some templates read arguments as JSON in
    a text, as DeepSeek's, and some refuse calls and answers without an id, as Mistral's.

    Raises: InputError as `write` does of the messages as they are, where it takes no form.
    """
    forms = [[*messages]]
    if any(message["role"] == "tool" for message in messages):
        forms.append([*map(_with_arguments_as_text, messages)])
        forms += [[*map(_with_id, form)] for form in forms]
    problems = []
    for form in forms:
        try:
            return write(form)
        except InputError as error:
            problems.append(error)
    raise problems[0]


def _render(chat: Chat, messages: Sequence[Message], is_limited: bool = True) -> str:
    write = lambda form: chats.render(chat, form, WHERE, is_limited=is_limited)  # noqa: E731
    try:
        return write_in_some_form(write, messages)
    except InputError:  # some refuse answers without calls, as GPT-OSS's: where none could be read
        called = _with_calls(messages)
        if called == [*messages]:
            raise
        return write_in_some_form(write, called)


def _with_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with an empty call in turns without calls that tools answer."""
    behind = [*messages[1:], {"role": ""}]
    return [
        _turn_with_call(answer.get("name", TOOL), {}) | {"content": message["content"]}
        if message["role"] == "assistant"
        and answer["role"] == "tool"
        and not message.get("tool_calls")
        else message
        for message, answer in zip(messages, behind, strict=True)
    ]


def _with_id(message: Message) -> Message:
    if message["role"] == "tool":
        return {"tool_call_id": ID, **message}
    calls = [{"id": ID, **call} for call in message.get("tool_calls") or []]
    return {**message, "tool_calls": calls} if calls else message


def _with_arguments_as_text(message: Message) -> Message:
    calls = [
        {**call, "function": {**function, "arguments": _as_text(function["arguments"])}}
        for call in message.get("tool_calls") or []
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def _as_text(arguments: Any) -> str:
    """Arguments as JSON in a text, in the characters that templates' `tojson` writes."""
    is_text = isinstance(arguments, str)
    return arguments if is_text else json.dumps(arguments, ensure_ascii=False)
