"""A batch whose samples are answered by rules in JAX, within the engine's loop."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxgrpo.core.types import Prompts
from jaxgrpo.environments.conversations import Conversation, Key, hash_state, sample_seed
from jaxgrpo.environments.history import History
from jaxgrpo.environments.rules import Answering, State, reset_all
from jaxgrpo.rewards.calling import RewardLog
from jaxgrpo.rollout.dialogue import Record, Reply, turn_fields
from jaxgrpo.rollout.engine import Request, Turn


class TracedDialogue:
    """The conversations of one batch with rules: what they said is read off the tokens.

    Args:
      answering: of the engine.
      history: of the chat template.
      rows: of the data set.
      columns: of numbers, of all rows.
      longest: tokens of a sample, with those that answer it.
      seed: of what is random in the rules, with step, ordinal and sample.
    """

    def __init__(
        self,
        answering: Answering,
        history: History,
        rows: Sequence[Mapping[str, Any]],
        columns: Mapping[str, np.ndarray],
        longest: int,
        seed: Sequence[int],
    ):
        self.answering, self.history = answering, history
        self.rows, self.columns = rows, columns
        self.longest, self.seed = longest, seed
        self._record = Record({}, {}, {}, {})
        self._first: dict[Key, State] = {}
        self._turns: dict[Key, Turn] = {}
        self._ordinals: list[int] = []  # by place
        self._rows: dict[int, int] = {}  # by ordinal
        self._cut = 0  # samples whose reply left no room

    def open(self, prompts: Any, group_size: int) -> tuple[Prompts, dict[Key, np.ndarray]]:
        """As `Dialogue.open`; rules say nothing first."""
        self._ordinals = prompts.ordinal.tolist()
        self._rows = dict(zip(self._ordinals, prompts.row.tolist(), strict=True))
        places = {ordinal: place for place, ordinal in enumerate(self._ordinals)}
        keys = [(ordinal, sample) for ordinal in places for sample in range(group_size)]
        rows = prompts.row[[places[ordinal] for ordinal, _ in keys]]
        step = int(prompts.step)
        seeds = np.asarray([sample_seed(*self.seed, step, *key) for key in keys], np.int32)
        states = reset_all(self.answering.rules, self.columns, rows, seeds)
        for number, key in enumerate(keys):
            place = places[key[0]]
            ids = prompts.prompt_tokens[place][prompts.prompt_mask[place]]
            self._record.states[key] = [hash_state(ids.tobytes())]
            self._first[key] = jax.tree.map(lambda leaf, n=number: leaf[n], states)
        return prompts, {}

    @property
    def waiting(self) -> Collection[Key]:
        """None: the engine answers all."""
        return ()

    def first_state(self, key: Key) -> State:
        """As `Dialogue.first_state`."""
        return self._first[key]

    def limit(self, key: Key, offset: int) -> int:
        """All that is left of a sample: the engine ends turns."""
        del key
        return self.longest - offset

    def take(self, request: Request, turn: Turn) -> bool:
        """Takes a sample that has ended. Returns: False."""
        key, answered = (turn.ordinal, turn.sample), turn.answered
        assert answered is not None
        self._turns[key] = turn
        self._record.ends[key] = ends = answered.ends.tolist()
        stops = self.history.stop_tokens
        self._record.cut[key] = [int(turn.tokens[end - 1]) not in stops for end in ends]
        self._record.rewards[key] = answered.rewards.tolist()
        for text in self._replies(turn):
            self._record.states[key].append(hash_state(text.encode()))
        is_answered = len(answered.rewards) == len(ends)
        self._cut += is_answered and not answered.is_done and len(ends) < self.answering.turns
        return False

    def replies(self, is_idle: bool) -> list[Reply]:
        """None: the engine has answered."""
        del is_idle
        return []

    def spoken(self, places: Iterable[Any], samples: int) -> list[Conversation]:
        """As `Dialogue.spoken`, in every process."""
        ordinals = [self._ordinals[int(place)] for place in places]
        return [self._conversation((o, s)) for o in ordinals for s in range(samples)]

    def without_broken(
        self, scores: Mapping[str, np.ndarray], log: RewardLog
    ) -> tuple[dict[str, np.ndarray], RewardLog]:
        """All as they are: no sample is answered by what can break."""
        return dict(scores), log

    def fields(self, ordinals: Sequence[int], mask: np.ndarray) -> dict[str, np.ndarray]:
        """As `turn_fields`."""
        return turn_fields(self._record, self.answering.turns, ordinals, mask)

    def metrics(self, samples: int) -> dict[str, float]:
        """As `Dialogue.metrics`."""
        ends = self._record.ends
        return {
            "turns/mean": sum(map(len, ends.values())) / max(1, len(ends)),
            "turns/cut": self._cut / samples,
        }

    def _conversation(self, key: Key) -> Conversation:
        turn = self._turns[key]
        assert turn.answered is not None
        total = sum(reward for reward in self._record.rewards[key] if not math.isnan(reward))
        prompt = self.rows[self._rows[key[0]]]["prompt"]
        talk = Conversation(self.answering.rules.name, None, lambda: total, prompt)
        replies = [*self._replies(turn), None]
        pairs = zip(turn.answered.begins, turn.answered.ends, replies, strict=True)
        for begin, end, reply in pairs:
            text = self.history.spoken(turn.tokens[begin:end].tolist())
            talk.messages.append({"role": "assistant", "content": text})
            if reply is not None:
                talk.messages.append({"role": "user", "content": reply})
        return talk

    def _replies(self, turn: Turn) -> list[str]:
        """What stands between the turns of a sample, without the template's words."""
        assert turn.answered is not None
        frame, texts = self.answering.frame, []
        for end, begin in zip(turn.answered.ends[:-1], turn.answered.begins[1:], strict=True):
            has_ended = turn.tokens[end - 1] in self.history.stop_tokens
            lead = len(frame.before) + (0 if has_ended else len(frame.closing))
            ids = turn.tokens[end + lead : begin - len(frame.after)]
            texts.append(self.history.words(ids.tolist()))
        return texts
