"""What turns cost: conversations beside samples of one turn, and who answers them.

    python -m benchmarks.turns [--turns 3,8] [--replies 8,64,512] [--slots 16] [--rounds 5]

64 samples of model S (benchmarks/workloads.py) take so many turns of at most 64 tokens, which end
by themselves, and each turn is answered by 8 tokens and what the template writes around them: by a
class in Python that answers at once or in 50 ms, or by rules in JAX, traced into the loop. All are
drawn in turn, beside samples of one turn with as much room. "Wall" is over the larger of what tools
take and what decoding takes: all tokens, those of replies too, at the speed of samples of one turn.

Then, with 3 turns: longer replies, in chunks, as on a GPU, and fed one by one, as on a CPU; and
fewer slots than samples, with tools that take 300 ms: samples that wait for them give up their
slots to others, or keep them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks import contest
from benchmarks.common import report, timed
from benchmarks.contest import over, within
from benchmarks.workloads import END, PAD, UNKNOWN, build, make_prompts, model_config
from benchmarks.workloads import Workload as Prompting
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.data.tasks.templates import MARKS, TEMPLATE
from jaxgrpo.environments import calls
from jaxgrpo.environments.conversations import Conversations
from jaxgrpo.environments.history import History
from jaxgrpo.environments.partners import make_kind
from jaxgrpo.environments.rules import Answering, Rules
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.dialogue import TURN as TURN_OF
from jaxgrpo.rollout.dialogue import Converse, ThreadedDialogue, Turns
from jaxgrpo.rollout.engine import SEGMENT_OF_TURNS, SamplingSettings
from jaxgrpo.rollout.slots import capacity, table
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.traced import TracedDialogue

PROMPTING = Prompting(prompts=8, samples=8, shortest=32, longest=64, completion=64, ragged=True)
TURN = PROMPTING.completion  # tokens at most
REPLY, DELAY = 8, 0.05
LATER = 2  # segments, of some 40 ms each, that others decode while a tool takes 50 ms
SLOW, MUCH_LATER = 0.3, 14  # and with few slots, whose segments are shorter
MAX_SLOT_STEPS = 1.3  # per token, over those without turns
MAX_WALL = 1.2  # over the larger of decoding and tools
MAX_RULES = 0.5  # of the seconds of the class in Python

LETTERS = [chr(0x4E00 + number) for number in range(512 - UNKNOWN - 1 - len(MARKS))]
TOKENIZER = character_tokenizer([*MARKS, *LETTERS], TEMPLATE)
HISTORY = History(Chat(TOKENIZER, TEMPLATE, "the template", None, {}), frozenset([END]))


class Run(NamedTuple):
    """A batch that was drawn."""

    seconds: float
    tokens: int  # drawn
    slot_steps: int
    decoded: int  # tokens that were drawn or given

    def per_token(self) -> float:
        return self.seconds / self.tokens

    def steps_per_token(self) -> float:
        return self.slot_steps / self.tokens


def environment(reply: int, delay: float) -> type:
    """A class that answers each turn by so many tokens, after so many seconds."""

    class Partner:
        def reset(self, seed: int) -> None:
            del seed

        def step(self, text: str) -> tuple[str, float, bool]:
            time.sleep(delay)
            return "".join(LETTERS[:reply]), 0.0, False

    return Partner


def rules(reply: int) -> Rules:
    """The same in JAX."""
    words = jnp.asarray(TOKENIZER("".join(LETTERS[:reply]))["input_ids"], jnp.int32)

    def step(state: Any, tokens: Any, length: Any) -> tuple[Any, ...]:
        del tokens, length
        return state, words, jnp.int32(reply), jnp.float32(0), jnp.asarray(False)

    return Rules(lambda key, row: jnp.int32(0), step)


class Contender:
    """A way to draw the samples.

    Args:
      turns: of a sample, answered by `answers`; without it a sample has one turn, as long as all.
      reply_after: as `rollout.reply_after`.
      slots: as `rollout.slots`.
    """

    def __init__(
        self,
        turns: int,
        reply: int,
        answers: type | Rules | None,
        reply_after: int = 1,
        slots: int = 0,
    ) -> None:
        frame = HISTORY.frame()
        self.words = reply + sum(map(len, frame))
        longest = turns * TURN + (turns - 1) * self.words
        config = model_config("S")
        assert config.vocab_size == len(TOKENIZER)
        self.prompts = make_prompts(PROMPTING, config.vocab_size)
        self.model, self.params = build(config, ragged=True)
        rows = [{"prompt": [{"role": "user", "content": "?"}]}] * PROMPTING.prompts
        settings = SamplingSettings(longest, 1.0, (END,), PAD, slots=slots)
        self.converse: Converse | None = None
        if isinstance(answers, Rules):
            answering = Answering(answers, turns, TURN, frame)
            settings = settings._replace(answering=answering)
            self.converse = lambda *sizes: TracedDialogue(answering, HISTORY, rows, {}, *sizes)
        elif answers is not None:
            settings = settings._replace(max_turns=turns, segment_tokens=SEGMENT_OF_TURNS)
            kind = make_kind(answers, {}, (), lambda: calls.hermes, 60.0, "environment")
            talks = Conversations({"": kind}, HISTORY.chat, [END], rows)
            bounds = Turns(turns, TURN, reply_after)
            self.converse = lambda *sizes: ThreadedDialogue(talks, bounds, *sizes)
        self.engine = SlotEngine(self.model, settings, width=PROMPTING.longest)

    def run(self, seed: int) -> Run:
        key = jax.random.key_data(jax.random.key(seed))
        drawing = draw(
            *(self.engine, self.params, self.prompts, key, PROMPTING.samples),
            converse=self.converse,
        )
        rollouts, seconds = timed(drawing.finish)
        tokens = int(rollouts.token_mask.sum())
        is_decoded = (
            rollouts.fields[TURN_OF] >= 0 if TURN_OF in rollouts.fields else rollouts.token_mask
        )
        return Run(seconds, tokens, int(self.engine.slot_steps), int(is_decoded.sum()))


def ways(turns: int) -> dict[str, Contender]:
    return {
        "one turn": Contender(turns, REPLY, None),
        "rules in JAX": Contender(turns, REPLY, rules(REPLY)),
        "class, at once": Contender(turns, REPLY, environment(REPLY, 0.0)),
        "class, 50 ms": Contender(turns, REPLY, environment(REPLY, DELAY), LATER),
    }


def compare(turns: int, rounds: int, console: Console) -> dict[str, Any]:
    """Draws each way in turn, after a first run of each."""
    contenders: Mapping[str, Callable[[int], Run]] = {
        name: contender.run for name, contender in ways(turns).items()
    }
    runs = contest.in_turn(contenders, rounds, warm_up=2)
    alone, at_once = runs["one turn"], runs["class, at once"]

    def row(name: str) -> contest.Row:
        mine = runs[name]
        seconds = over(map(Run.per_token, mine), map(Run.per_token, alone))
        steps = over(map(Run.steps_per_token, mine), map(Run.steps_per_token, alone))
        rival = over([run.seconds for run in mine], [run.seconds for run in at_once])
        tools = (turns - 1) * DELAY if name == "class, 50 ms" else 0.0
        pairs = zip(mine, alone, strict=True)
        floors = [max(tools, run.decoded * plain.per_token()) for run, plain in pairs]
        wall = over([run.seconds for run in mine], floors)
        most = MAX_RULES if name == "rules in JAX" else None
        cells = [
            f"{np.median([run.seconds for run in mine]):.2f}",
            f"{np.mean([run.tokens for run in mine]):.0f}",
            f"{seconds.median:.2f} [{seconds.ends}]",
            f"{steps.median:.2f} {within(steps.median, MAX_SLOT_STEPS)}",
            f"{wall.median:.2f} {within(wall.median, MAX_WALL)}",
            f"{rival.median:.2f} {within(rival.median, most)}",
        ]
        measures = {"seconds": seconds.median, "slot_steps": steps.median, "wall": wall.median}
        return name, cells, measures | {"over_class": rival.median}

    columns = ("", "s", "tokens", "s/token", "slot-steps", "wall", "over class")
    return contest.show(console, columns, map(row, runs), f"{turns} turns; ratios to one turn")


def long_replies(replies: Sequence[int], rounds: int, console: Console) -> dict[str, Any]:
    """What replies of so many tokens take, with 3 turns."""

    def row(reply: int) -> contest.Row:
        contender = Contender(3, reply, environment(reply, 0.0))

        def run(least_chunked: int) -> Callable[[int], Run]:
            def run_seed(seed: int) -> Run:
                table.LEAST_CHUNKED = {jax.default_backend(): least_chunked}
                return contender.run(seed)

            return run_seed

        ways = {"chunks": run(0), "fed": run(10**6)}
        runs = contest.in_turn(ways, rounds, warm_up=2)
        seconds = [[run.seconds for run in runs[name]] for name in ways]
        ratio = over(*seconds)
        cells = [f"{np.median(values):.2f}" for values in seconds]
        return str(reply), [*cells, f"{ratio.median:.2f} [{ratio.ends}]"], {"ratio": ratio.median}

    columns = ("reply", "s, in chunks", "s, fed", "ratio")
    return contest.show(console, columns, map(row, replies), "3 turns, answered at once")


def few_slots(slots: int, rounds: int, console: Console) -> dict[str, Any]:
    """What it is worth that samples which wait for slow tools give up their slots."""
    tool = environment(REPLY, SLOW)
    moving, staying = (Contender(3, REPLY, tool, MUCH_LATER, slots) for _ in range(2))

    def run(contender: Contender, platforms: Sequence[str]) -> Callable[[int], Run]:
        def run_seed(seed: int) -> Run:
            capacity.PARKING = tuple(platforms)
            return contender.run(seed)

        return run_seed

    ways = {
        "give up their slots": run(moving, [jax.default_backend()]),
        "keep them": run(staying, ()),
    }
    runs = contest.in_turn(ways, rounds, warm_up=2)
    before = runs["keep them"]

    def row(name: str) -> contest.Row:
        mine = runs[name]
        seconds = over(map(Run.per_token, mine), map(Run.per_token, before))
        steps = np.median([run.steps_per_token() for run in mine])
        cells = [f"{np.median([run.seconds for run in mine]):.2f}", f"{steps:.2f}"]
        measures = {"seconds": seconds.median, "slot_steps": steps}
        return name, [*cells, f"{seconds.median:.2f} [{seconds.ends}]"], measures

    columns = ("samples that wait", "s", "slot-steps per token", "s, ratio")
    return contest.show(console, columns, map(row, ways), f"{slots} slots, tools of {SLOW} s")


def main() -> None:
    parser = contest.parser(__doc__)
    parser.add_argument("--turns", type=contest.names, default=["3", "8"])
    parser.add_argument("--replies", type=contest.names, default=["8", "64", "512"])
    parser.add_argument("--slots", type=int, default=16, help="0: leaves this out")
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    about, console = contest.begin(120)
    results = {turns: compare(int(turns), words.rounds, console) for turns in words.turns}
    if words.replies:
        replies = [int(reply) for reply in words.replies]
        results["replies"] = long_replies(replies, words.rounds, console)
    if words.slots:
        results["slots"] = few_slots(words.slots, words.rounds, console)
    report(about | {"turns": results})


if __name__ == "__main__":
    main()
