"""A batch whose samples have turns: who is answered, with what, and what is known of each turn.

With several processes each answers its share of the prompts, and all get every reply, so that all
submit the same requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Prompts
from jaxgrpo.environments.conversations import (
    Conversation,
    Conversations,
    Key,
    Reply,
    hash_state,
)
from jaxgrpo.environments.processes import ENDINGS
from jaxgrpo.environments.rules import State
from jaxgrpo.environments.serving.fields import Completion
from jaxgrpo.rewards.calling import RewardLog
from jaxgrpo.rollout.engine import COMPLETE, Request, Turn
from jaxgrpo.rollout.exchange import gather_json
from jaxgrpo.rollout.selection import pad_prompts

TURN, REWARD, STATE, CUT = "turn", "turn_reward", "state_hash", "turn_truncated"
FORK = "turn:fork"  # no column of data is called so
"""Field [P, G, T] int32: how often the conversation has been rewritten up to a token. Each number
stands for a sequence of its own: all before 1 behind the prompt, and then the rewritten
conversation, prompt and all, and what follows it."""
CALLS = "tools/call_frequency"
OF_CALLS = ("tools/failure_frequency", "tools/raised_frequency")
"""Metrics that are shares of the calls."""
RAISED = 0.9  # share of the calls that raise, above which their first error is shown
VERSION = "version"  # of each token that was drawn, as `Turn.version`; -1 elsewhere


class Turns(NamedTuple):
    """How a sample's turns are bounded."""

    most: int  # turns
    tokens: int  # of a turn, at most
    reply_after: int = 1  # segments of decoding between a turn's end and its reply, at least 1


@runtime_checkable
class Dialogue(Protocol):
    """What answers the samples of one batch."""

    def open(self, prompts: Any, group_size: int) -> tuple[Prompts, dict[Key, np.ndarray]]:
        """Begins the conversations.

        Returns: the prompts with what each environment says first, and what samples of one prompt
        to which different things are said begin with instead: the prompt is then what is common to
        all of them.

        Raises: InputError where a prompt is longer than prompts may be, or leaves no token to draw.
        """
        ...

    @property
    def waiting(self) -> Collection[Key]:
        """Samples that wait for a reply."""
        ...

    def first_state(self, key: Key) -> State:
        """What `Request.state` is."""
        ...

    def limit(self, key: Key, offset: int) -> int:
        """New tokens that a sample's next turn may have behind `offset` tokens."""
        ...

    def take(self, request: Request, turn: Turn) -> bool:
        """Takes a turn that has ended. Returns: whether it will be answered."""
        ...

    def replies(self, is_idle: bool) -> list[Reply]:
        """The replies that are due, of all processes.

        Args:
          is_idle: nothing else can be done: the next ones are due.
        """
        ...

    def spoken(self, places: Iterable[Any], samples: int) -> list[Conversation]:
        """The conversations of some groups, in the process that judges them."""
        ...

    def without_broken(
        self, scores: Mapping[str, np.ndarray], log: RewardLog
    ) -> tuple[dict[str, np.ndarray], RewardLog]:
        """The scores [P, G] without those of samples that cannot be scored, and the log with how
        an environment broke, of the first process in which one did."""
        ...

    def fields(self, ordinals: Sequence[int], mask: np.ndarray) -> dict[str, np.ndarray]:
        """As `turn_fields`, of the samples [P, G, T] of a batch that has ended."""
        ...

    def metrics(self, samples: int) -> dict[str, float]:
        """Of a batch of `samples` that has ended, over all processes."""
        ...


class Record(NamedTuple):
    """What is known of the turns of each sample."""

    ends: dict[Key, list[int]]  # where each turn ends, in tokens of the sample
    rewards: dict[Key, list[float]]  # of those that were answered
    states: dict[Key, list[int]]  # hashes of what was said before each turn
    cut: dict[Key, list[bool]]  # whether each turn was stopped by its limit


def turn_fields(
    record: Record, turns: int, ordinals: Sequence[int], mask: np.ndarray
) -> dict[str, np.ndarray]:
    """Fields of the samples [P, G, T] of a batch that has ended.

    Args:
      turns: K, of a sample at most.

    Returns: "turn" [P, G, T] int32, the turn of a token that was drawn and of what answers it, -1
    elsewhere; of each turn "turn_reward" [P, G, K] float32, 0 where there is none, "state_hash"
    [P, G, K] int32, of what was said before it, 0 where there is no such turn, and "turn_truncated"
    [P, G, K] bool, whether its limit stopped it.
    """
    numbers = np.full(mask.shape, -1, np.int32)
    shape = (*mask.shape[:2], turns)
    rewards, states, cut = (np.zeros(shape, kind) for kind in (np.float32, np.int32, np.bool_))
    drawn = np.where(mask.any(-1), mask.shape[-1] - np.argmax(mask[..., ::-1], axis=-1), 0)
    for place, ordinal in enumerate(ordinals):
        for sample in range(mask.shape[1]):
            at, key = (place, sample), (ordinal, sample)
            begin = int(np.argmax(mask[at]))
            # A reply belongs to the turn before it.
            starts = [begin]
            for end in record.ends[key][:-1]:
                behind = np.flatnonzero(mask[at][end:])
                starts.append(end + int(behind[0]) if len(behind) else int(drawn[at]))
            for number, start in enumerate(starts):
                numbers[at][start : drawn[at]] = number
            tables = (rewards, record.rewards), (states, record.states), (cut, record.cut)
            for array, values in tables:
                entries = np.nan_to_num(np.asarray(values.get(key, ()), np.float64))
                array[at][: len(entries)] = entries
    return {TURN: numbers, REWARD: rewards, STATE: states, CUT: cut}


class ThreadedDialogue:
    """The conversations of one batch with tools and environments that threads run.

    Args:
      conversations: of this process.
      bounds: of each sample.
      longest: tokens of a sample, with those that answer it.
      seed: of what is random in environments, with step, ordinal and sample.
    """

    def __init__(
        self, conversations: Conversations, bounds: Turns, longest: int, seed: Sequence[int]
    ):
        self.conversations, self.bounds, self.longest = conversations, bounds, longest
        self.seed = seed
        self._calls = 0  # of `replies`
        self._due: dict[Key, int] = {}  # samples that wait for a reply, and the call that gives it
        self._arrived: dict[Key, Reply] = {}  # and is not due
        self._broken: set[Key] = set()  # samples that cannot be scored
        self._ordinals: list[int] = []  # by place
        self._rows: dict[int, int] = {}  # by ordinal
        self._local: set[Key] = set()  # that this process answers
        self._record = Record({}, {}, {}, {})
        self._limits: dict[Key, int] = {}  # of the next turns, as what answers says
        self._forks: dict[Key, list[int]] = {}  # where rewritten conversations begin

    def open(self, prompts: Any, group_size: int) -> tuple[Prompts, dict[Key, np.ndarray]]:
        """As `Dialogue.open`."""
        ordinals, rows = prompts.ordinal.tolist(), prompts.row.tolist()
        self._ordinals, self._rows = ordinals, dict(zip(ordinals, rows, strict=True))
        places: dict[int, tuple[int, int, int]] = {}
        for place, ordinal in enumerate(ordinals):  # a prompt that is there twice: at the first
            places.setdefault(ordinal, (place, ordinal, rows[place]))
        step = int(prompts.step)
        seed = *self.seed, step
        opened = self.conversations.open([*places.values()], group_size, seed)
        self._local = {*opened}
        shares = gather_json([[*key, entry.tokens, entry.limit] for key, entry in opened.items()])
        entries = [entry for share in shares for entry in share]
        by_key = {(o, s): np.asarray(ids, np.int32) for o, s, ids, _ in entries}
        self._limits = {(o, s): limit for o, s, _, limit in entries}
        states = {key: [hash_state(ids.tobytes())] for key, ids in by_key.items()}
        self._record = Record({}, {}, states, {})
        width, common, begin = prompts.prompt_tokens.shape[1], {}, {}
        for ordinal in places:
            group = [by_key[ordinal, sample] for sample in range(group_size)]
            number = _common(group)
            where = f"row {places[ordinal][2]}: with what its environment says the prompt has"
            if not number:
                raise InputError(
                    f"{where} another first token in each sample: let `reset`, or a program's "
                    "first query, begin with what it says to all"
                )
            if number > width:
                raise InputError(
                    f"{where} {number} tokens: set rollout.max_prompt_tokens to as many"
                )
            if (count := max(map(len, group)) - number) >= self.longest:
                raise InputError(
                    f"{where} {count} tokens that differ between samples, which count in "
                    f"rollout.max_completion_tokens = {self.longest}: raise it, or let `reset` "
                    "begin with what it says to all"
                )
            common[ordinal] = group[0][:number]
            begin |= {(ordinal, sample): ids[number:] for sample, ids in enumerate(group)}
        tokens = [common[ordinal] for ordinal in ordinals]
        return pad_prompts(tokens, width, prompts.ordinal, prompts.row, step), begin

    @property
    def waiting(self) -> Collection[Key]:
        """As `Dialogue.waiting`."""
        return self._due.keys()

    def first_state(self, key: Key) -> State:
        """None: the engine answers nothing."""
        return None

    def limit(self, key: Key, offset: int) -> int:
        """As `Dialogue.limit`."""
        return min(self.bounds.tokens, self.longest - offset, self._limits[key])

    def take(self, request: Request, turn: Turn) -> bool:
        """Takes a turn that has ended. Returns: whether it will be answered.

        It is not where it is the sample's last, or leaves no room, unless its environment answers
        such turns too; nor where the sample was stopped. A turn that was cut at its limit is
        answered as it stands.
        """
        key, end = (turn.ordinal, turn.sample), request.offset + len(turn.tokens)
        self._record.ends.setdefault(key, []).append(end)
        self._record.cut.setdefault(key, []).append(turn.reason not in COMPLETE)
        is_cut = turn.reason == "length" and end < self.longest
        finish = "stop" if turn.reason in COMPLETE else "length"
        version = int(turn.version[0])
        completion = Completion(turn.tokens.tolist(), turn.logp.tolist(), finish, None, version)
        is_last = len(self._record.ends[key]) >= self.bounds.most or end >= self.longest
        is_skipped = is_last and not self.conversations.answers_last(self._rows[turn.ordinal])
        if is_skipped or not (is_cut or turn.reason in COMPLETE):
            if key in self._local:
                self.conversations.end(key, completion)
            return False
        self._due[key] = self._calls + self.bounds.reply_after
        if key in self._local:
            room = 0 if is_last else self.longest - end
            self.conversations.answer(key, completion, room)
        return True

    def replies(self, is_idle: bool) -> list[Reply]:
        """The replies that are due, of all processes; waits for those that have not come.

        A reply is taken a fixed number of calls after its turn, however early it came, so that no
        log-prob of what follows depends on the time that tools take.

        Args:
          is_idle: nothing else can be done: the next ones are due.
        """
        self._calls += 1
        now = min(self._due.values(), default=0) if is_idle else self._calls
        keys = [key for key, due in self._due.items() if due <= now]
        if not keys:
            return []
        local = [key for key in keys if key in self._local]
        while any(key not in self._arrived for key in local):
            new = self.conversations.replies()
            self._arrived |= {(reply.ordinal, reply.sample): reply for reply in new}
        shares = gather_json([self._arrived.pop(key) for key in local])
        by_key = {(entry[0], entry[1]): Reply(*entry) for share in shares for entry in share}
        for key in keys:
            del self._due[key]
            self._limits[key] = by_key[key].limit
            self._record.rewards.setdefault(key, []).append(by_key[key].reward)
            if by_key[key].tokens is not None:
                self._record.states[key].append(by_key[key].state)
            if by_key[key].is_fork:
                self._forks.setdefault(key, []).append(self._record.ends[key][-1])
        return [by_key[key] for key in keys]

    def spoken(self, places: Iterable[Any], samples: int) -> list[Conversation]:
        """As `Dialogue.spoken`; the process that judges a group answers it too."""
        ordinals = [self._ordinals[int(place)] for place in places]
        return [self.conversations.spoken((o, s)) for o in ordinals for s in range(samples)]

    def unscored(self, groups: int, samples: int) -> np.ndarray:
        """Which samples of the batch cannot be scored, [P, G] bool."""
        shares = gather_json([*self._problems()])
        broken = self._broken = {(key[0], key[1]) for share in shares for key in share}
        flags = [(self._ordinals[p], s) in broken for p in range(groups) for s in range(samples)]
        return np.reshape(flags, (groups, samples))

    def _problems(self) -> dict[Key, str]:
        """Which samples of this process cannot be scored, and why."""
        talks = {key: self.conversations.spoken(key) for key in sorted(self._local)}
        return {key: f"{talk.name}: {talk.problem}" for key, talk in talks.items() if talk.problem}

    def without_broken(
        self, scores: Mapping[str, np.ndarray], log: RewardLog
    ) -> tuple[dict[str, np.ndarray], RewardLog]:
        """As `Dialogue.without_broken`."""
        samples = next(iter(scores.values())).shape
        talks, unscored = self.conversations, self.unscored(*samples)
        scores = {name: np.where(unscored, np.nan, value) for name, value in scores.items()}
        raises = talks.counts["raised"] > RAISED * talks.counts["calls"]
        problem = next(iter(self._problems().values()), "")
        messages = _first_messages({"environment": problem, "tools": talks.error if raises else ""})
        return scores, log._replace(messages=log.messages | messages)

    def fields(self, ordinals: Sequence[int], mask: np.ndarray) -> dict[str, np.ndarray]:
        """As `turn_fields`."""
        fields = turn_fields(self._record, self.bounds.most, ordinals, mask)
        if not self.conversations.forks:
            return fields
        fork = np.zeros(mask.shape, np.int32)
        for place, sample in np.ndindex(mask.shape[:2]):
            for begin in self._forks.get((ordinals[place], sample), ()):
                fork[place, sample, begin:] += 1
        return fields | {FORK: fork}

    def metrics(self, samples: int) -> dict[str, float]:
        """As `Dialogue.metrics`."""
        total, endings = Counter[str](), Counter[str]()
        for counts, broken in gather_json(self.conversations.count()):
            total.update(counts)
            endings.update(broken)
        calls = total["calls"]
        failed = sum(total[name] for name in ("malformed", "unknown", "too_many", "raised"))
        failed += sum(total[name] for name in ENDINGS)
        forked = {"turns/forked": len(self._forks) / samples} if self.conversations.forks else {}
        return {
            **forked,
            "turns/mean": sum(map(len, self._record.ends.values()))
            / max(1, len(self._record.ends)),
            "turns/cut": total["cut"] / samples,
            CALLS: calls / samples,
            OF_CALLS[0]: failed / calls if calls else 0.0,
            OF_CALLS[1]: total["raised"] / calls if calls else 0.0,
            "environment/broken": len(self._broken) / samples,
            **{f"calls/{name}": float(total[name] + endings[name]) for name in ENDINGS},
        }


def all_rounds(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of the dialogues of a step, of all its rounds, which have as many samples each.

    Calls that went wrong are added up, shares of the calls are over all calls, and all else is over
    all samples.

    >>> rounds = [{"tools/call_frequency": n, "tools/raised_frequency": n / 3} for n in (1.0, 3.0)]
    >>> {name: round(value, 3) for name, value in all_rounds(rounds).items()}
    {'tools/call_frequency': 2.0, 'tools/raised_frequency': 0.833}
    """

    def joined(name: str) -> float:
        values = [counts[name] for counts in rounds]
        if name.startswith("calls/"):
            return sum(values)
        weights = [counts[CALLS] if name in OF_CALLS else 1.0 for counts in rounds]
        total = sum(weight * value for weight, value in zip(weights, values, strict=True))
        return total / sum(weights) if any(weights) else 0.0

    return {name: joined(name) for name in (rounds[0] if rounds else ())}


def _first_messages(messages: Mapping[str, str]) -> dict[str, str]:
    """Of each message that of the first process that has one, and says which of several it is: a
    file may be missing on one host alone. Called by all processes."""
    shares, first = gather_json(messages), {}
    for number, share in enumerate(shares):
        where = f"process {number}: " if len(shares) > 1 else ""
        for name, text in share.items():
            if text:
                first.setdefault(name, f"{where}{text}")
    return first


def _common(group: Sequence[np.ndarray]) -> int:
    """How many first tokens are the same in all."""
    shortest = min(map(len, group))
    differs = np.any([ids[:shortest] != group[0][:shortest] for ids in group], axis=0)
    return int(np.argmax(differs)) if differs.any() else shortest


Converse = Callable[[int, Sequence[int]], Dialogue]
"""(tokens of a sample, seed) -> the dialogue of a batch"""
