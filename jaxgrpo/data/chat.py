"""Conversations, [{"role": "user", "content": "..."}], and the chat templates that write them out.

A prompt is a text or such a list. With a chat template, a text becomes one user message.
Rewards get conversations as TRL gives them: prompts as lists of messages, each completion as
[{"role": "assistant", "content": text}]; prompts that are texts and their completions stay texts.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import functools
import json
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgrpo.core.errors import InputError, one_line, refusing
from jaxgrpo.data import limits
from jaxgrpo.data.written import storable

Message = dict[str, Any]
Conversation = list[Message]

CHOICES = ("auto", "none")
"""Values of data.chat_template that are no file."""

_BY_ROLE = "the role of a prompt's last message decides it"
OURS = {
    "add_generation_prompt": _BY_ROLE,
    "continue_final_message": _BY_ROLE,
    "messages": "the prompt is what it holds",
    "tools": "the key tools says which there are",
}
"""Variables of chat templates that no option sets -> what does."""

TOOL_TEMPLATE = "tool_use"
"""The name of the template that transformers takes where there are tools, if a tokenizer has it."""

CLOCK = "strftime_now"
"""The function by which chat templates write the date or the time."""

_clock = threading.Lock()
"""Of transformers, which is one for all threads."""

SECONDS, MEMORY, WRITTEN = 10.0, 2**30, 1_000_000
"""What a template may take for a prompt: time, bytes, and characters beside those of messages."""

TIMES = ("1999-01-02T03:04:05.6", "2048-12-31T23:58:59.7")
"""Two times that no format writes alike."""


class Chat(NamedTuple):
    """How prompts are written out."""

    tokenizer: Any  # renders the template, with its special tokens
    template: str | None  # Jinja text; None: prompts are texts and go as they are
    name: str  # words for the template, or for why there is none
    system: str | None
    options: dict[str, Any]
    vocab_size: int | None = None  # of the model: a tokenizer may have more tokens; None: as many
    time: str | None = None  # in ISO 8601, for CLOCK; None: the template does not read it
    tools: tuple[dict[str, Any], ...] = ()  # schemas that every rendering is given
    environments: Mapping[str, tuple[dict[str, Any], ...]] = {}  # those by a row's environment
    tool_template: str | None = None  # where there are tools; None: the same template

    @property
    def written_template(self) -> str | None:
        """The template that renders: of several, as transformers takes them, that for tools."""
        return (self.tool_template if self.tools else None) or self.template

    def for_row(self, row: Mapping[str, Any]) -> Chat:
        """How its prompt is written out, with the tools of its environment."""
        name = str(row.get("environment"))
        return self._replace(tools=self.environments.get(name, self.tools))


def read_messages(value: Any, where: str) -> Conversation:
    """A prompt column's list of messages, checked. Entries that are None, however deep, are left
    out: tables have them where messages, or calls of tools, lack a key that others have. Other
    values are `storable`: messages are written to files. A message of calls alone has the text "".

    Raises: InputError if it is no list of messages with a role and a text.
    """
    if not len(value):
        raise InputError(f"{where} holds no message: write at least one, by the user")
    messages = []
    for place, message in enumerate(storable(list(value))):
        entries = message if isinstance(message, Mapping) else {}
        if entries.get("content") is None and entries.get("tool_calls"):
            entries = {**entries, "content": ""}
        if not all(isinstance(entries.get(name), str) for name in ("role", "content")):
            raise InputError(
                f'{where}, message {place}: expected {{"role": "user", "content": "some text"}} '
                f"but got {_shown(message)}"
            )
        messages.append(_without_absent(entries))
    return messages


def _without_absent(value: Any) -> Any:
    """A value of JSON without the entries of objects that are None."""
    if isinstance(value, Mapping):
        return {name: _without_absent(entry) for name, entry in value.items() if entry is not None}
    return [*map(_without_absent, value)] if isinstance(value, list) else value


def for_rewards(
    prompts: Sequence[Any], completions: Sequence[str], answered: Sequence[Conversation] = ()
) -> tuple[list[Any], list[Any]]:
    """Prompts and completions as rewards get them.

    A last message by the assistant is the beginning of the completion, and leaves the prompt.

    Args:
      answered: the messages of each completion, where samples have turns.

    Source: TRL's GRPOTrainer; it removes that message from the data set's own list, we from a copy.
    >>> for_rewards(["2+2="], ["4"])
    (['2+2='], ['4'])
    >>> for_rewards([[{"role": "user", "content": "2+2?"}]], ["4"])[1]
    [[{'role': 'assistant', 'content': '4'}]]
    """
    reward_prompts: list[Any] = []
    reward_completions: list[Any] = []
    turns = answered or [[{"role": "assistant", "content": text}] for text in completions]
    for messages, text, spoken in zip(prompts, completions, turns, strict=True):
        if isinstance(messages, str):
            reward_prompts.append(messages)
            reward_completions.append(text)
            continue
        reward_prompts.append(list(messages[:-1] if _is_begun(messages) else messages))
        reward_completions.append(with_start(messages, spoken))
    return reward_prompts, reward_completions


def with_start(prompt: Sequence[Message], messages: Sequence[Message]) -> Conversation:
    """What was said behind a prompt; the first message has the text that the prompt begins it with.

    >>> begun = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}]
    >>> with_start(begun, [{"role": "assistant", "content": " 4"}])
    [{'role': 'assistant', 'content': 'It is 4'}]
    """
    if not (messages and _is_begun(prompt)):
        return list(messages)
    first, *rest = messages
    return [{**first, "content": prompt[-1]["content"] + first["content"]}, *rest]


def make_chat(
    tokenizer: Any,
    choice: str,
    system: str | None,
    options: Mapping[str, Any],
    path: str,
    time: str | None = None,
) -> Chat:
    """How the prompts of a run are written out.

    Args:
      choice: "auto" takes the tokenizer's own template if it has one; "none"; or a Jinja file.
      system: the text of a system message in front of every conversation.
      options: variables of the template, as enable_thinking.
      path: model.path, for messages.
      time: what a template writes that asks for the time, in ISO 8601; None: when it asks.

    Raises: InputError if the template cannot be found, there is none although a system text or an
    option for one is given, it does not read an option, or one is a truth value in quotes.
    """
    template, name = _find(tokenizer, choice, path)
    if template is None:
        template_settings = {"data.system": system, "data.chat_template_kwargs": options}
        for key in filter(template_settings.get, template_settings):
            raise InputError(
                f"{key} is given, but there is no chat template ({name}): name a Jinja file by "
                "data.chat_template, or write the text into data.prompt"
            )
    named = getattr(tokenizer, "chat_template", None) if choice == "auto" else None
    tool_template = named.get(TOOL_TEMPLATE) if isinstance(named, Mapping) else None
    chat = Chat(tokenizer, template, name, system, dict(options), tool_template=tool_template)
    check_options(chat, options, "data.chat_template_kwargs")
    for option, value in options.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise InputError(
                f"data.chat_template_kwargs.{option} = {value!r}: a text, which templates take for "
                f"true: write {value.lower()} without quotes"
            )
    return chat._replace(time=time) if CLOCK in _names_read(chat) else chat


def check_options(chat: Chat, options: Iterable[str], where: str) -> None:
    """Raises InputError with the first variable that the template does not read, or that prompts
    and tools set.

    Args:
      where: they are given.
    """
    names = _names_read(chat)
    for option in options:
        if option in OURS:
            raise InputError(f"{where}.{option}: {OURS[option]}; leave it out")
        if option == CLOCK:
            raise InputError(
                f"{where}.{option}: is a function; set data.template_time to the time that it "
                "writes"
            )
        if option not in names:
            matches = difflib.get_close_matches(str(option), names, n=1)
            hint = f"did you mean {matches[0]!r}?" if matches else "leave it out"
            raise InputError(f"{where}.{option}: {chat.name} does not read it; {hint}")


def write(
    chat: Chat,
    prompt: str | Conversation,
    where: str,
    is_opened: bool | None = None,
    is_limited: bool = True,
) -> str:
    """One prompt as text, with the special tokens that the template writes; `is_opened` and
    `is_limited` as in `render`.

    Raises: InputError if the template fails, leaves out the text of a message or white space of one
      that the model continues, or there is no template for a conversation. Thoughts of the
      assistant's earlier messages, before </think>, may be left out.
    """
    if chat.template is None:
        if isinstance(prompt, str):
            return prompt
        raise InputError(
            f"{where}: the prompt is a list of messages, but there is no chat template "
            f"({chat.name}): name a Jinja file by data.chat_template, or write prompts as texts"
        )
    messages = with_system(chat, prompt, where)
    text = render(chat, messages, where, is_opened, is_limited)
    squeezed = _squeezed(text)
    for place, message in enumerate(messages):
        is_last = is_opened is None and place == len(messages) - 1
        forms = _forms(message["content"], is_last or message["role"] != "assistant")
        if not any(_squeezed(form) in squeezed for form in forms):
            raise _lost(chat, messages, place, where)
        if call := next((name for name in _called_names(message) if name not in text), None):
            raise InputError(
                f"{where}: {chat.name} does not write the call of {call!r} in "
                f"{_message_words(chat, place)}: set data.chat_template to a template that writes "
                "tool_calls, or write the call into the message's text"
            )
    start, is_begun = messages[-1]["content"], is_opened is None and _is_begun(messages)
    is_stripped = is_begun and not text.endswith(start)
    if is_begun and start[:1].isspace():  # what is there may be the template's own
        shorter = [*messages[:-1], {**messages[-1], "content": start[1:]}]
        is_stripped |= text == render(chat, shorter, where, is_limited=is_limited)
    if is_stripped:
        raise InputError(
            f"{where}: {chat.name} strips white space off the message that the model is to "
            f"continue, {_shown(start)}: take the white space out of the message, or set "
            "data.chat_template to a template that writes it"
        )
    return text


def check_roles(chat: Chat, prompts: Mapping[str, str | Conversation]) -> None:
    """Refuses a template that leaves out messages, once for each sequence of roles in the prompts.

    `write` looks for the text of each message, and may find a short or a repeated one by chance.
    Here each text ends with a mark that is nowhere else.

    Args:
      prompts: by the words for their rows.

    Raises: InputError if a mark is not in what the template writes.
    """
    if chat.template is None:
        return
    first: dict[tuple[str, ...], tuple[str, Conversation]] = {}
    for row, prompt in prompts.items():
        messages = with_system(chat, prompt, row)
        first.setdefault(tuple(message["role"] for message in messages), (row, messages))
    for row, messages in first.values():
        marked = [
            {**message, "content": f"{message['content']}jaxgrpo{place}mark"}
            for place, message in enumerate(messages)
        ]
        text = render(chat, marked, row)
        for place, message in enumerate(messages):
            if message["content"] and f"jaxgrpo{place}mark" not in text:
                raise _lost(chat, messages, place, row)


def writes_time(chat: Chat, prompts: Iterable[str | Conversation]) -> bool:
    """Whether the template writes the date or the time into one of these prompts."""
    early, late = (chat._replace(time=time) for time in TIMES)
    return chat.time is not None and any(
        write(early, prompt, "a prompt") != write(late, prompt, "a prompt") for prompt in prompts
    )


def with_system(chat: Chat, prompt: str | Sequence[Message], where: str) -> Conversation:
    """A prompt as messages, behind the text of `data.system`. Raises: InputError where it has one
    of its own."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if chat.system is None:
        return messages
    if messages[0]["role"] == "system":
        raise InputError(
            f"{where}: the conversation opens with a system message, and data.system is given: "
            "take one of them out"
        )
    return [{"role": "system", "content": chat.system}, *messages]


def render(
    chat: Chat,
    messages: Sequence[Message],
    where: str,
    is_opened: bool | None = None,
    is_limited: bool = True,
) -> str:
    """Messages as text.

    Args:
      where: opens messages.
      is_opened: whether the next turn of the assistant is opened behind them; None: it is, unless
        the last one is the assistant's, which the model then continues, or an empty one of it.
      is_limited: in time, memory and length; limits of memory are of the whole process, so that no
        thread may set them.

    Raises: InputError with the template's name where it fails, takes too long or writes too much.
    """
    if is_opened is None and _is_empty(messages):
        messages, is_opened = messages[:-1], True
    is_begun = is_opened is None and _is_begun(messages)
    # Whatever the template raises, or jinja2 about it.
    render = functools.partial(
        chat.tokenizer.apply_chat_template,
        list(messages),
        tools=[*chat.tools] or None,  # Llama's template writes of tools where they are []
        chat_template=chat.written_template,
        tokenize=False,
        add_generation_prompt=not is_begun if is_opened is None else is_opened,
        continue_final_message=is_begun,
        **chat.options,
    )
    failing = refusing(lambda error: f"{where}: {_failure(chat.name, error)}")
    memory = limits.memory(MEMORY) if is_limited else contextlib.nullcontext()
    with _clock_at(chat.time), failing, memory:
        try:
            text: str = limits.within(SECONDS, render) if is_limited else render()
        except limits.TimedOut:
            raise TimeoutError(f"it takes more than {SECONDS:g} s") from None
        if len(text) > WRITTEN + 2 * sum(len(message["content"]) for message in messages):
            raise ValueError(f"it writes {len(text):,} characters")
    return text


def encode(chat: Chat, text: str, special: bool = False) -> list[int]:
    """The tokens of a text that is written already.

    Args:
      special: whether the tokenizer adds special tokens.

    Raises: InputError on a token that the model has no embedding for.
    """
    ids = list(chat.tokenizer(text, add_special_tokens=special)["input_ids"])
    if chat.vocab_size is not None and (token := max(ids, default=0)) >= chat.vocab_size:
        raise InputError(
            f"the text has the token {token}, {chat.tokenizer.convert_ids_to_tokens(token)!r}, but "
            f"the model has embeddings for 0 to {chat.vocab_size - 1}: take it out of the text"
        )
    return ids


@contextlib.contextmanager
def _clock_at(time: str | None) -> Iterator[None]:
    """Within it CLOCK tells this time. transformers defines it, and takes no other one."""
    if time is None:
        yield
        return
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    moment = datetime.datetime.fromisoformat(time)
    with _clock:
        clock, module.datetime = module.datetime, types.SimpleNamespace(now=lambda: moment)
        try:
            yield
        finally:
            module.datetime = clock


def _forms(content: str, is_full: bool) -> list[str]:
    """A message's text as templates write it: as it is, as JSON, or without an earlier thought."""
    texts = [content] if is_full else [content, content.rpartition("</think>")[2]]
    return [form for text in texts for form in (text, json.dumps(text, ensure_ascii=False)[1:-1])]


def _called_names(message: Message) -> Iterator[str]:
    """The tools that a message calls."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            yield name


def _squeezed(text: str) -> str:
    """A text without spaces and line ends, which templates strip."""
    return "".join(text.split())


def _lost(chat: Chat, messages: Conversation, place: int, where: str) -> InputError:
    message, words = messages[place], _message_words(chat, place)
    return InputError(
        f"{where}: {chat.name} does not write the text of {words}, {_shown(message['content'])} "
        f"with role {message['role']!r}: use a role that the template writes, usually user, "
        "assistant or system, or set data.chat_template to a template that writes it"
    )


def _message_words(chat: Chat, place: int) -> str:
    """Words for a message, behind that of data.system."""
    is_ours = chat.system is not None and place == 0
    return "data.system" if is_ours else f"message {place - (chat.system is not None)}"


def _names_read(chat: Chat) -> set[str]:
    """The words of its templates that are no text: what they may read."""
    import jinja2

    text = "\n".join(filter(None, (chat.template, chat.tool_template)))
    with refusing(lambda error: _failure(chat.name, error), jinja2.TemplateError):
        return {word for _, kind, word in jinja2.Environment().lex(text) if kind == "name"}


def _failure(name: str, error: Exception) -> str:
    line = getattr(error, "lineno", None)
    where = f" in line {line}" if line else ""
    is_large = isinstance(error, MemoryError)
    reason = f"it takes more than {MEMORY >> 30} GiB" if is_large else one_line(error)
    return (
        f"{name} fails{where} ({type(error).__name__}: {reason}): "
        "mend it or the prompt, or set data.chat_template"
    )


def _find(tokenizer: Any, choice: str, path: str) -> tuple[str | None, str]:
    """The template (None: prompts go as they are), and words for it."""
    if choice == "none":
        return None, 'data.chat_template = "none"'
    if choice == "auto":
        if not getattr(tokenizer, "chat_template", None):
            return None, f"the tokenizer of {path} has none"
        problem = (
            f"model.path = {path}: {{reason}}: write the template to use to a file and set "
            "data.chat_template to it"
        )
        with refusing(problem, ValueError):
            return tokenizer.get_chat_template(), f"the chat template of {path}"
    problem = (
        f'data.chat_template = {choice!r} cannot be read ({{kind}}): give a Jinja file, "auto" or '
        '"none"'
    )
    with refusing(problem, OSError, UnicodeDecodeError):
        return Path(choice).expanduser().read_text("utf-8-sig"), f"the chat template {choice}"


def _is_begun(messages: Sequence[Message]) -> bool:
    """Whether the model continues a message that the prompt begins."""
    return messages[-1]["role"] == "assistant"


def _is_empty(messages: Sequence[Message]) -> bool:
    """Whether the last message is the assistant's and says nothing: continued by transformers, it
    may lose the line end that opens a turn."""
    last = messages[-1]
    return _is_begun(messages) and not any(last[name] for name in last.keys() - {"role", "name"})


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
