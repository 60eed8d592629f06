"""The conversations of a batch: each sample with its partner, answered by threads.

An answer is computed while other samples decode, and what a sample says never depends on when it
comes. With several processes each answers its share of the prompts.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import queue
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.errors import InputError, refusing, suggest
from jaxgrpo.data import chat as chats
from jaxgrpo.data.chat import Chat, Message
from jaxgrpo.data.prompts import PLACEHOLDER
from jaxgrpo.environments.history import History
from jaxgrpo.environments.partners import LONGEST, Answer, Broken, Kind, Opening, Partner
from jaxgrpo.environments.serving.fields import Completion

THREADS = 64  # samples that are answered at once

Key = tuple[int, int]
"""(ordinal, sample)"""


class Reply(NamedTuple):
    """What follows a turn of a sample, as processes exchange it."""

    ordinal: int
    sample: int
    tokens: list[int] | None  # up to the next turn; None: the conversation is over
    reward: float  # of the turn; NaN: it has none
    state: int  # a hash of what was answered: equal answers are one state
    limit: int = LONGEST  # tokens of the next turn
    is_fork: bool = False  # the tokens are the whole conversation, rewritten


@dataclasses.dataclass
class Conversation:
    """One sample's, as rewards see it."""

    name: str  # of what gives its reward
    environment: Any  # the user's object; None: there is none
    total: Callable[[], float | None]  # what the environment gives. Raises: Broken
    prompt: Any = None  # of the row with what `reset` said
    messages: list[Message] = dataclasses.field(default_factory=list)  # the completion
    problem: str = ""  # why it cannot be scored; empty: it can
    ending: str = ""  # how a call ended its process or its time, if one did
    has_reward: bool = True  # its environment gives one

    def reward(self) -> float:
        """What its environment gives; NaN: nothing, or it breaks, which `problem` then says."""
        if self.problem:
            return math.nan
        try:
            value = self.total()
        except Broken as error:
            self.take_problem(error)
            return math.nan
        return math.nan if value is None else value

    def take_problem(self, error: Broken) -> None:
        """Leaves it unscored from now on."""
        self.problem, self.ending = str(error), error.ending


@dataclasses.dataclass(kw_only=True)
class _Talk(Conversation):
    """A conversation that goes on."""

    kind: Kind
    partner: Partner
    text: str = ""  # that its next turn follows, as the template wrote it last


class _Answered(NamedTuple):
    """What a thread hands back."""

    key: Key
    text: str  # of the turn
    last: int  # its last token
    room: int
    answer: Answer | BaseException


class Conversations:
    """Talks with the samples of one batch after another.

    Args:
      kinds: environment's name -> what its rows talk to; "" where rows name none.
      chat: how prompts are written out, without tools.
      stop_tokens: of the model.
      rows: of the data set.
      is_local: whether this process answers a place of the batch.
      forks: a sample goes on from its conversation as the template writes it again with each
        reply, and not from the tokens that it has read and drawn.
    """

    def __init__(
        self,
        kinds: Mapping[str, Kind],
        chat: Chat,
        stop_tokens: Sequence[int],
        rows: Sequence[Mapping[str, Any]],
        is_local: Callable[[int], bool] = lambda place: True,
        forks: bool = False,
    ):
        self.kinds, self.rows, self.is_local, self.forks = kinds, rows, is_local, forks
        self._histories = {
            kind: History(kind.shown_in(chat), frozenset(stop_tokens)) for kind in kinds.values()
        }
        self._pool: dict[Kind, list[Partner]] = {kind: [] for kind in kinds.values()}
        self._answers: queue.SimpleQueue[_Answered] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="jaxgrpo-turns")
        self.counts: Counter[str] = Counter()
        self.error: str = ""  # the first that a call of the batch raised
        self._running: dict[Key, _Talk] = {}
        self._prompts: dict[tuple[int, str | None], list[int]] = {}
        """Row and what its environment says first; where that is something, of the batch alone."""

    def open(
        self, places: Sequence[tuple[int, int, int]], samples: int, seed: Sequence[int]
    ) -> dict[Key, Opening]:
        """Begins the conversations of a batch; those of the batch before are forgotten.

        Args:
          places: (place, ordinal, row) of its prompts, each ordinal once.
          samples: of each.
          seed: with ordinal and sample it makes the seed of an environment.

        Returns: each sample's prompt, of this process's samples.
        """
        self._forget()
        self._prompts = {key: ids for key, ids in self._prompts.items() if key[1] is None}
        self.counts.clear()
        self.error = ""
        begun = []
        for place, ordinal, row in places:
            if not self.is_local(place):
                continue
            kind = self._kind(row)
            for sample in range(samples):
                partner = self._pool[kind].pop() if self._pool[kind] else kind.make()
                words = kind.name, partner.environment, partner.reward, self.rows[row]["prompt"]
                talk = _Talk(*words, has_reward=kind.has_reward, kind=kind, partner=partner)
                self._running[ordinal, sample] = talk
                begun.append(((ordinal, sample), row, sample_seed(*seed, ordinal, sample)))
        # Environments in threads, and templates here: their limits are of the process.
        words = self._threads.map(lambda entry: self._begin(*entry), begun)
        opened = {
            key: self._prompt(key, row, observation)
            for (key, row, _), observation in zip(begun, words, strict=True)
        }
        return opened | self._broken_openings(opened)

    def answers_last(self, row: int) -> bool:
        """Whether the last turn of a sample of a row is answered too."""
        return self._kind(row).answers_last

    def answer(self, key: Key, completion: Completion, room: int) -> None:
        """Has a turn answered; the reply comes by `replies`.

        Args:
          room: tokens that the sample may still have, of the reply and of what follows it; 0: the
            turn is the last.
        """
        self._running[key].partner.take(completion, is_last=not room)
        self._threads.submit(self._answer, key, completion.tokens, room)

    def replies(self) -> list[Reply]:
        """The replies that have come since the last call: at least one, which it waits for.

        Raises: what a fault of ours raised in a thread.
        """
        replies: list[Reply] = []
        while not replies or not self._answers.empty():
            replies.append(self._reply(self._answers.get()))
        return replies

    def spoken(self, key: Key) -> Conversation:
        """A sample's conversation so far, in the process that answers it."""
        return self._running[key]

    def count(self) -> tuple[Counter[str], Counter[str]]:
        """What calls of the batch were, and how those ended that broke an environment."""
        return self.counts, Counter(talk.ending for talk in self._running.values())

    def end(self, key: Key, completion: Completion) -> None:
        """Takes a last turn, which is not answered."""
        conversation = self._running[key]
        conversation.partner.take(completion, is_last=True)
        text = self._histories[conversation.kind].spoken(completion.tokens)
        conversation.messages.append(conversation.partner.read(text).as_message())

    def _kind(self, row: int) -> Kind:
        return self.kinds[_kind_name(self.kinds, self.rows[row])]

    def _forget(self) -> None:
        for conversation in self._running.values():
            if not conversation.problem:  # a broken one may still be running in a thread
                self._pool[conversation.kind].append(conversation.partner)
        self._running = {}

    def _begin(self, key: Key, row: int, seed: int) -> str | Opening | None:
        """What an environment says first."""
        try:
            return self._running[key].partner.open(_columns(self.kinds, self.rows[row]), seed)
        except Broken as error:
            self._running[key].take_problem(error)
            return None

    def _prompt(self, key: Key, row: int, observation: str | Opening | None) -> Opening:
        conversation = self._running[key]
        chat = self._histories[conversation.kind].chat
        if isinstance(observation, Opening):
            text = chat.tokenizer.decode(observation.tokens, clean_up_tokenization_spaces=False)
            conversation.prompt = observation.messages or text
            return observation
        prompt = conversation.prompt = joined(conversation.prompt, observation)
        if (row, observation) in self._prompts:  # as other samples of the row
            return Opening(self._prompts[row, observation], None)
        is_empty = not (prompt if isinstance(prompt, str) else prompt[-1]["content"])
        if is_empty and not conversation.problem:
            raise InputError(
                f"row {row}: it has no prompt, and the environment's `reset` returns no text: let "
                "it return what is asked, or write data.prompt"
            )
        try:
            text = chats.write(chat, prompt, f"row {row}", is_limited=False)
            ids = chats.encode(chat, text, special=chat.template is None)
        except InputError as error:
            if observation is None:
                raise
            conversation.prompt = self.rows[row]["prompt"]
            conversation.take_problem(Broken(f"reset: {error}"))
            return self._prompt(key, row, None)
        if not conversation.problem:  # the prompt may lack what `reset` would say
            self._prompts[row, observation] = ids
        return Opening(ids, None)

    def _broken_openings(self, opened: Mapping[Key, Opening]) -> dict[Key, Opening]:
        """Samples that broke begin as the first of their group that did not: the prompt of a group
        is what all its samples begin with, and would be cut down to the row's."""
        first: dict[int, Key] = {}
        for key in opened:
            if not self._running[key].problem:
                first.setdefault(key[0], key)
        openings: dict[Key, Opening] = {}
        for key in opened:
            if self._running[key].problem and (example := first.get(key[0])):
                self._running[key].prompt = self._running[example].prompt
                openings[key] = opened[example]
        return openings

    def _answer(self, key: Key, ids: list[int], room: int) -> None:
        conversation, text = self._running[key], ""
        try:  # a fault that stays in a thread would leave the run waiting for ever
            text = self._histories[conversation.kind].spoken(ids)
            if conversation.problem:
                raise Broken(conversation.problem, conversation.ending)
            answer: Answer | BaseException = conversation.partner.answer(text)
        except BaseException as error:
            answer = error
        self._answers.put(_Answered(key, text, ids[-1], room, answer))

    def _reply(self, answered: _Answered) -> Reply:
        key, text, last, room, answer = answered
        conversation = self._running[key]
        if isinstance(answer, Broken):
            conversation.messages.append({"role": "assistant", "content": text})
            conversation.take_problem(answer)
            return Reply(*key, None, math.nan, 0)
        if isinstance(answer, BaseException):
            raise answer
        self.counts["calls"] += answer.calls
        self.counts.update(answer.problems)
        self.error = self.error or answer.error
        conversation.messages.append(answer.reading.as_message())
        tokens, is_fork = answer.tokens, answer.is_fork
        if tokens is None and answer.messages and room:
            try:
                tokens, is_fork = self._continue(conversation, text, last, answer.messages)
            except InputError as error:  # by what the model wrote, where it is written again
                conversation.take_problem(Broken(str(error)))
                return Reply(*key, None, math.nan, 0)
        state = hash_state("\n".join(m["content"] for m in answer.messages).encode())
        if tokens is not None and len(tokens) >= room:  # no token would be left: as in TRL
            self.counts["cut"] += 1
            conversation.partner.take(None, is_last=True)
            tokens, is_fork = None, False
        if tokens is not None:
            conversation.messages += answer.messages
        return Reply(*key, tokens, answer.reward, state, answer.limit, is_fork)

    def _continue(
        self, talk: _Talk, text: str, last: int, answers: Sequence[Message]
    ) -> tuple[list[int], bool]:
        """The tokens that follow a turn; or, where the template writes another text than what was
        said so far, the conversation as it writes it, and True.

        Raises: InputError where the template fails.
        """
        history = self._histories[talk.kind]
        if self.forks and history.chat.template is not None:
            context = (talk.text or history.write(talk.prompt, [])) + text + history.text(answers)
            talk.text = history.write(talk.prompt, [*talk.messages, *answers])
            if talk.text != context:
                return history.encode(talk.text), True
        return history.between(answers, last), False


def hash_state(content: bytes) -> int:
    """A hash within int32 of what the model has read: equal content is one state."""
    return zlib.crc32(content) & 0x7FFFFFFF


def joined(prompt: Any, observation: str | None) -> Any:
    """A row's prompt with what `reset` said at the end of its last message, as in TRL.

    >>> joined("Play.", " Go."), joined([{"role": "user", "content": "Play."}], None)
    ('Play. Go.', [{'role': 'user', 'content': 'Play.'}])
    """
    if observation is None:
        return prompt
    if isinstance(prompt, str):
        return prompt + observation
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": last["content"] + observation}]


def check_rows(kinds: Mapping[str, Kind], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises InputError with the first row whose column "environment" names none of them, and where
    the environment of a row does not take its columns."""
    unchecked = {*kinds}
    for number, row in enumerate(rows):
        name = _kind_name(kinds, row)
        if not isinstance(name, str) or name not in kinds:
            names = ", ".join(sorted(kinds))
            if "environment" not in row:
                hint = suggest("environment", row)
                raise InputError(
                    f"row {number}: there is no column 'environment' ({hint}): write one of {names}"
                )
            raise InputError(
                f"row {number}: the column 'environment' holds {name!r}: write one of {names}"
            )
        if name in unchecked:
            unchecked.remove(name)
            kinds[name].check_row(_columns(kinds, row))


def _kind_name(kinds: Mapping[str, Kind], row: Mapping[str, Any]) -> Any:
    """What the column "environment" names; a single kind needs none, nor one without a name."""
    is_free = "" in kinds or (len(kinds) == 1 and "environment" not in row)
    return next(iter(kinds)) if is_free else row.get("environment")


def _columns(kinds: Mapping[str, Kind], row: Mapping[str, Any]) -> dict[str, Any]:
    """What `reset` gets, as in TRL: all columns of the data but that which names one of several,
    copied, since an environment may change them. Raises: InputError where one cannot be copied."""
    hidden = set[str]() if "" in kinds else {"environment"}
    if row.get("prompt") is PLACEHOLDER:
        hidden.add("prompt")

    def copied(name: str) -> Any:
        problem = f"data: the column {name!r} cannot be copied ({{kind}}: {{reason}}), and each "
        with refusing(f"{problem}sample gets a copy: keep such a value in the environment's file"):
            return copy.deepcopy(row[name])

    return {name: copied(name) for name in row if name not in hidden}


def sample_seed(*parts: int) -> int:
    """A seed within int32 of whole numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0] >> 1)
