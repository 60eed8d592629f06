"""Programs that ask a URL for the turns of a sample, and end with its reward.

Each sample has a URL of its own. A query there is answered by the sample's next turn, and what the
program says in its next query is what answers that turn: the tokens behind all that the sample has
so far. So any agent that talks to such a URL can be trained, as it is.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import queue
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxgrpo.data.chat import Message
from jaxgrpo.environments.calls import Reading
from jaxgrpo.environments.history import TOOL, History
from jaxgrpo.environments.partners import (
    Answer,
    Broken,
    Kind,
    Opening,
    check_arguments,
    read_number,
    row_seed,
)
from jaxgrpo.environments.serving.dialect import Dialect, Prompted, read_conversation
from jaxgrpo.environments.serving.fields import Completion
from jaxgrpo.environments.serving.server import Document, Query, Refusal, Server
from jaxgrpo.rewards.protocol import accepted, callable_name

HOST = "127.0.0.1"
BASE_URL = "base_url"
"""The argument by which a function is known to be such a program."""

OVER = (
    "the sample has ended: it has as many turns or tokens as the run allows, "
    "its maximum context length"
)
"""In words by which agents know that a conversation is full, and end it without an error"""
REWRITTEN = (
    "the program rewrote its history: a query must repeat the messages or ids of the one before, "
    "with what was answered, go on behind them, and bring no further tools"
)


class _Question(NamedTuple):
    """The program waits for a turn."""

    prompted: Prompted
    tokens: list[int]  # behind what the sample has so far; of the first query: its prompt
    messages: list[Message]  # the same, as messages
    is_fork: bool = False  # the tokens are all that the program says now


class _Ended(NamedTuple):
    """The program has ended."""

    value: Any
    error: BaseException | None


class Session:
    """One sample's conversation, between a program's queries and the turns that answer them."""

    def __init__(self, dialect: Dialect, stop_tokens: Sequence[int], forks: bool = False):
        self.dialect, self.stop_tokens, self.forks = dialect, frozenset(stop_tokens), forks
        self.events: queue.SimpleQueue[_Question | _Ended] = queue.SimpleQueue()
        self.problem = ""  # why it cannot go on
        self.is_over = False  # no further query is answered
        self._answers: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: tuple[Prompted, Future[Completion]] | None = None  # a query and its turn
        self._is_waiting = False
        self._prompt: list[int] = []  # of the query before
        self._drawn: list[int] = []  # and its answer
        self._messages: list[Message] = []  # of both
        self._text = ""  # of both
        self._cut: list[str] = []  # what it leaves out at its end: to there, and the string alone
        self._tools: tuple[dict[str, Any], ...] = ()  # that the model has been shown
        self._last: tuple[Prompted, Completion] | None = None  # a query and its answer

    def draw(self, prompted: Prompted, is_retry: bool = False) -> list[list[Completion]]:
        """As `dialect.Draw`: the sample's next turn; the last one again where its query is repeated
        whole, as clients do whose connection broke, unless conversations may be rewritten. A turn
        that is being drawn is waited for where the client says that it asks for it again."""
        query = prompted, Future[Completion]()
        with self._lock:
            pending = self._pending = self._pending or query
        if pending is not query:
            if not is_retry or self.forks or pending[0] != prompted:
                raise Refusal(409, "the sample's turn is being drawn: ask for one after the other")
            return [[pending[1].result()]]
        try:
            query[1].set_result(self._turn(prompted))
        except BaseException as error:
            query[1].set_exception(error)
        finally:
            with self._lock:
                self._pending = None
        return [[query[1].result()]]

    def _turn(self, prompted: Prompted) -> Completion:
        wish = prompted.wish
        if len(wish.prompts) != 1 or wish.samples != 1:
            raise Refusal(400, "n: a turn of a sample is drawn once; leave it out", "n")
        if wish.is_greedy or wish.seed is not None:
            name = "temperature" if wish.is_greedy else "seed"
            raise Refusal(400, f"{name}: the run says how it samples; leave it out", name)
        if self._last and prompted == self._last[0] and not (self.forks or self.problem):
            return self._last[1]
        question = None if self.is_over else self._link(prompted)
        with self._lock:
            if self.is_over or question is None:
                raise self._refusal()
            self._is_waiting = True
        self.events.put(question)
        completion = self._answers.get()
        if completion is None:
            raise self._refusal()
        if completion.finish == "stop" and completion.tokens[-1] not in self.stop_tokens:
            completion = completion._replace(stop=self.dialect.stop_string(completion.tokens))
        if question.is_fork or not self._drawn:
            self._tools = prompted.tools
        self._prompt, self._drawn = wish.prompts[0], completion.tokens
        turn = self.dialect.message(completion, prompted)
        self._messages = [*prompted.messages, *read_conversation([turn])]
        text = self.dialect.text(completion, prompted.skips)
        self._text, self._cut = prompted.text + text if prompted.text else "", []
        if isinstance(completion.stop, str):
            uncut = self.dialect.text(completion._replace(stop=None), prompted.skips)
            self._cut = [uncut[len(text) :], completion.stop]
        self._last = prompted, completion
        return completion

    def _refusal(self) -> Refusal:
        return Refusal(409, self.problem) if self.problem else Refusal(400, OVER)

    def give(self, completion: Completion | None, is_last: bool) -> None:
        """Answers the query that waits; None: it is refused."""
        with self._lock:
            self.is_over = self.is_over or is_last
            if self._is_waiting:
                self._is_waiting = False
                self._answers.put(completion)

    def close(self, problem: str) -> None:
        """Refuses the query that waits, and all further ones."""
        self.problem = self.problem or problem
        self.give(None, is_last=True)

    def _link(self, prompted: Prompted) -> _Question:
        """What a query adds to the sample: by its ids, or else by its text or messages, of which
        other ids may be made than the model drew.

        Raises: Refusal where it does not go on behind what was drawn.
        """
        (prompt,), messages = prompted.wish.prompts, [*prompted.messages]
        if not self._drawn:
            return _Question(prompted, prompt, messages)
        begun, tokenizer = len(self._messages), self.dialect.chat.tokenizer
        has_same = 0 < begun < len(messages)
        has_same = has_same and _essence(messages[:begun]) == _essence(self._messages)
        is_shown = all(tool in self._tools for tool in prompted.tools)
        rest = messages[begun:] if has_same and is_shown else []
        tokens = self._behind(prompt)
        if tokens is None and self._text and prompted.text.startswith(self._text):
            text = prompted.text[len(self._text) :]
            drawn = max(filter(text.startswith, self._cut), key=len, default="")
            text = text.removeprefix(drawn)  # which programs put back
            tokens = self._behind_end(tokenizer(text, add_special_tokens=False)["input_ids"])
        if tokens is None and rest and all(message["role"] != "assistant" for message in rest):
            options = {**prompted.options}
            chat = self.dialect.chat._replace(tools=prompted.tools, options=options)
            history = History(chat, self.stop_tokens)
            has_end = self._drawn[-1] in self.stop_tokens
            context = [*self._prompt, *self._drawn[: -1 if has_end else None]]
            called = self._called(rest[0])
            text = history.words(context) + history.text(rest, called)
            if not self.forks or text == history.words(prompt):
                tokens = history.between(rest, self._drawn[-1], called)
        if tokens is None and self.forks:
            turns = [place for place, m in enumerate(messages, 1) if m["role"] == "assistant"]
            text = tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
            rest = messages[turns[-1] if turns else 0 :] or [{"role": "user", "content": text}]
            return _Question(prompted, prompt, rest, is_fork=True)
        if tokens is None:
            self.is_over, self.problem = True, REWRITTEN
            raise Refusal(409, REWRITTEN)
        text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return _Question(prompted, tokens, rest or [{"role": "user", "content": text}])

    def _called(self, answer: Message) -> str:
        """The tool that an answer is of: clients give the id of its call, and no name."""
        calls = self._messages[-1].get("tool_calls", [])
        names = {call["id"]: call["function"]["name"] for call in calls}
        return names.get(str(answer.get("tool_call_id")), next(iter(names.values()), TOOL))

    def _behind(self, prompt: list[int]) -> list[int] | None:
        """What of a prompt follows the prompt before and its answer; None: it begins otherwise.

        Where only ids but not texts hold the token that ended a turn, or a template writes another
        one for it, the one that was drawn stays.
        """
        before = self._prompt + self._drawn
        if prompt[: len(before)] == before:
            return prompt[len(before) :]
        before = before[:-1]
        if self._drawn[-1] not in self.stop_tokens or prompt[: len(before)] != before:
            return None
        return self._behind_end(prompt[len(before) :])

    def _behind_end(self, tokens: list[int]) -> list[int]:
        """What follows a turn, without a token that ends it where the turn has ended itself."""
        has_ended = self._drawn[-1] in self.stop_tokens and tokens != []
        return tokens[has_ended and tokens[0] in self.stop_tokens :]


class Sessions:
    """The sessions of this process, behind one server."""

    def __init__(self) -> None:
        # Kept by its partner and its program: one that broke is not used again.
        self._sessions = weakref.WeakValueDictionary[str, Session]()
        self._server = Server(HOST, 0, self._answer, self._admit)
        self._server.start()

    def open(self, session: Session) -> str:
        """Returns: the base URL of a session, which cannot be guessed."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = session
        return f"{self._server.url}/samples/{key}/v1"

    def close(self, base_url: str) -> None:
        """Forgets a session, and refuses what it still asks."""
        if session := self._sessions.pop(base_url.split("/")[-2], None):
            session.close("")

    def _admit(self, method: str, path: str, bearer: str) -> None:
        parts = path.split("/", 3)
        if len(parts) < 4 or parts[1] != "samples" or parts[2] not in self._sessions:
            raise Refusal(404, "there is no such sample, or it is over: ask base_url as it is")

    def _answer(self, query: Query) -> Document:
        _, _, key, route = query.path.split("/", 3)
        session = self._sessions.get(key)
        if session is None:
            raise Refusal(400, OVER)
        draw = functools.partial(session.draw, is_retry=query.is_retry)
        return session.dialect.answer(f"/{route}", query, draw)


_make_sessions = functools.cache(Sessions)
_making = threading.Lock()


def shared_sessions() -> Sessions:
    """Of this process: one server for all its runs, also where many threads begin at once."""
    with _making:
        return _make_sessions()


class ProgramPartner:
    """Runs a program in a thread; its queries are the conversation."""

    def __init__(
        self,
        program: Callable[..., Any],
        dialect: Dialect,
        stop_tokens: Sequence[int],
        seconds: float,
        forks: bool = False,
    ):
        self.environment: Any = program
        self._dialect, self._stop_tokens, self._forks = dialect, stop_tokens, forks
        self._name, self._seconds = callable_name(program), seconds
        self._base_url = ""
        self._session: Session | None = None
        self._question: _Question | None = None
        self._ended: _Ended | None = None

    def open(self, row: Mapping[str, Any], seed: int) -> Opening:
        if self._base_url:
            shared_sessions().close(self._base_url)
        self._session = Session(self._dialect, self._stop_tokens, self._forks)
        self._base_url = shared_sessions().open(self._session)
        self._question, self._ended = None, None
        arguments = _arguments(self.environment, row, seed)
        target, options = self._run, (self._session, {**arguments, BASE_URL: self._base_url})
        threading.Thread(target=target, args=options, name="jaxgrpo-program", daemon=True).start()
        question = self._next()
        if question is None:
            raise Broken(f"{self._name} ended before its first query")
        wish = question.prompted.wish
        return Opening(question.tokens, question.messages or None, wish.max_tokens)

    def take(self, completion: Completion | None, is_last: bool) -> None:
        if self._session is not None:
            self._session.give(completion, is_last)

    def read(self, text: str) -> Reading:
        if self._question is None:
            return Reading(text, [])
        return self._dialect.read(text, self._question.prompted)

    def answer(self, text: str) -> Answer:
        reading = self.read(text)
        question = self._next()
        if question is None:
            return Answer(reading, [])
        return Answer(
            reading,
            question.messages,
            calls=len(reading.calls),
            tokens=question.tokens,
            is_fork=question.is_fork,
            limit=question.prompted.wish.max_tokens,
        )

    def reward(self) -> float | None:
        while self._ended is None:
            self._next()
        value = self._ended.value
        return None if value is None else read_number(self._name, value)

    def close(self) -> None:
        """Refuses the query that waits, so that the program can end."""
        if self._base_url:
            shared_sessions().close(self._base_url)

    def _run(self, session: Session, arguments: Mapping[str, Any]) -> None:
        try:
            value = self.environment(**arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(_wait_for(value))
            session.events.put(_Ended(value, None))
        except BaseException as error:  # SystemExit ends a program, too
            session.events.put(_Ended(None, error))

    def _next(self) -> _Question | None:
        """The program's next query; None: it has ended. Raises: Broken where it failed."""
        session = self._session
        assert session is not None
        try:
            event = session.events.get(timeout=self._seconds)
        except queue.Empty:
            problem = f"{self._name} took more than {self._seconds:g} s"
            session.close(problem)
            raise Broken(problem) from None
        if isinstance(event, _Question):
            self._question = event
            return event
        session.is_over, self._ended = True, event
        if session.problem == REWRITTEN:
            raise Broken(REWRITTEN)
        if event.error is not None:
            raise Broken.raised(self._name, event.error) from event.error
        return None


def make_program_kind(
    program: Callable[..., Any],
    dialect: Dialect,
    stop_tokens: Sequence[int],
    seconds: float,
    forks: bool = False,
) -> Kind:
    """What rows talk to whose environment is a program: see `is_program`.

    Args:
      forks: it may rewrite its history.
    """
    parts, name = (program, dialect, stop_tokens, seconds, forks), callable_name(program)
    partners = weakref.WeakSet[ProgramPartner]()  # those that broke too, while they run

    def make() -> ProgramPartner:
        partner = ProgramPartner(*parts)
        partners.add(partner)
        return partner

    def close() -> None:
        for partner in [*partners]:
            partner.close()

    def check_row(row: Mapping[str, Any]) -> None:
        check_arguments(name, program, {BASE_URL: "", **_arguments(program, row, 0)})

    return Kind(name, make, (), True, check_row=check_row, close=close)


def _arguments(program: Callable[..., Any], row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """What a program is called with beside the URL: the columns and the seed that it names."""
    return accepted(program, {**row, **row_seed(row, seed)}, ())


def is_program(factory: Any) -> bool:
    """Whether it is a function with the argument `base_url`, and no factory of environments, as a
    class is, or what has an address already."""
    function = factory
    while isinstance(function, functools.partial):
        if BASE_URL in function.keywords:
            return False
        function = function.func
    if inspect.isclass(function):
        return False
    try:
        return BASE_URL in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


async def _wait_for(value: Any) -> Any:
    return await value


def _essence(messages: Sequence[Message]) -> list[Any]:
    """What of messages a template reads, without names that clients make up."""
    return [
        (
            message["role"],
            message.get("content") or "",
            [
                (call["function"]["name"], json.dumps(call["function"]["arguments"]))
                for call in message.get("tool_calls", [])
            ],
        )
        for message in messages
    ]
