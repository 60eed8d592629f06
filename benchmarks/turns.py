"""What turns cost: conversations beside samples of one turn, and who answers them.

    python -m benchmarks.turns [--turns 3,8] [--replies 8,64,512] [--rounds 5]

64 samples of model S (benchmarks/workloads.py) take so many turns of at most 64 tokens, which end
by themselves, and each turn is answered by 8 tokens: by a class in Python that answers at once or
in 50 ms, or by rules in JAX, traced into the loop. All are drawn in turn, beside samples of one
turn with as much room. A sample that is answered from Python leaves its slot, and what it holds is
computed again in chunks when it goes on.

Then, with 3 turns, what that computing again takes, for longer replies: its seconds, and the share
of its tokens whose keys and values the engine had before. Moving keys and values instead could save
that share at most.
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
from jaxgrpo.rollout.dialogue import Converse, ThreadedDialogue, Turns
from jaxgrpo.rollout.engine import SEGMENT_OF_TURNS, Request, SamplingSettings
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.traced import TracedDialogue

PROMPTING = Prompting(prompts=8, samples=8, shortest=32, longest=64, completion=64, ragged=True)
TURN = PROMPTING.completion  # tokens at most
REPLY, DELAY = 8, 0.05
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
    computing: float = 0.0  # seconds of chunks: of prompts, replies and what was drawn before
    known_before: float = 0.0  # of the tokens in chunks of further turns, what the engine had

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
    """

    def __init__(self, turns: int, reply: int, answers: type | Rules | None):
        frame = HISTORY.frame()
        self.words = reply + sum(map(len, frame))
        longest = turns * TURN + (turns - 1) * self.words
        config = model_config("S")
        assert config.vocab_size == len(TOKENIZER)
        self.prompts = make_prompts(PROMPTING, config.vocab_size)
        self.model, self.params = build(config, ragged=True)
        rows = [{"prompt": [{"role": "user", "content": "?"}]}] * PROMPTING.prompts
        settings = SamplingSettings(longest, 1.0, (END,), PAD)
        self.converse: Converse | None = None
        if isinstance(answers, Rules):
            answering = Answering(answers, turns, TURN, frame)
            settings = settings._replace(answering=answering)
            self.converse = lambda *sizes: TracedDialogue(answering, HISTORY, rows, {}, *sizes)
        elif answers is not None:
            settings = settings._replace(max_turns=turns, segment_tokens=SEGMENT_OF_TURNS)
            kind = make_kind(answers, {}, (), lambda: calls.hermes, 60.0, "environment")
            talks = Conversations({"": kind}, HISTORY.chat, [END], rows)
            self.converse = lambda *sizes: ThreadedDialogue(talks, Turns(turns, TURN), *sizes)
        self.engine = SlotEngine(self.model, settings, width=PROMPTING.longest)

    def run(self, seed: int) -> Run:
        key = jax.random.key_data(jax.random.key(seed))
        drawing = draw(
            *(self.engine, self.params, self.prompts, key, PROMPTING.samples),
            converse=self.converse,
        )
        rollouts, seconds = timed(drawing.finish)
        return Run(seconds, int(rollouts.token_mask.sum()), int(self.engine.slot_steps))

    def run_by_parts(self, seed: int) -> Run:
        """As `run`, with the devices' work awaited before and after each chunk."""
        programs, submit = self.engine.programs, self.engine.submit
        seconds, computed, known_before = 0.0, 0, 0

        def timed_prefill(params: Any, state: Any, *rest: Any) -> Any:
            nonlocal seconds
            jax.block_until_ready(state)
            state, took = timed(programs.prefill, params, state, *rest)
            seconds += took
            return state

        def counted(requests: Sequence[Request], group_size: int = 0) -> None:
            nonlocal computed, known_before
            further = [request for request in requests if request.offset]
            computed += sum(len(request.tokens) - 1 for request in further)
            known_before += sum(len(request.tokens) - 1 - self.words for request in further)
            submit(requests, group_size)

        self.engine.programs = programs._replace(prefill=timed_prefill)
        self.engine.submit = counted
        result = self.run(seed)
        self.engine.programs, self.engine.submit = programs, submit
        return result._replace(computing=seconds, known_before=known_before / computed)


def ways(turns: int) -> dict[str, Contender]:
    return {
        "one turn": Contender(turns, REPLY, None),
        "rules in JAX": Contender(turns, REPLY, rules(REPLY)),
        "class, at once": Contender(turns, REPLY, environment(REPLY, 0.0)),
        "class, 50 ms": Contender(turns, REPLY, environment(REPLY, DELAY)),
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
        floors = [max(tools, run.tokens * plain.per_token()) for run, plain in pairs]
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


def compute_again(replies: Sequence[int], rounds: int, console: Console) -> dict[str, Any]:
    """What it takes to compute again what samples hold, with 3 turns."""

    def row(reply: int) -> contest.Row:
        contender = Contender(3, reply, environment(reply, 0.0))
        runs = [contender.run_by_parts(seed) for seed in range(rounds + 2)][2:]
        computing = float(np.median([run.computing / run.seconds for run in runs]))
        known_before = float(np.mean([run.known_before for run in runs]))
        cells = [f"{np.median([run.seconds for run in runs]):.2f}"]
        cells += [f"{share:.2f}" for share in (computing, known_before, computing * known_before)]
        return str(reply), cells, {"computing": computing, "could_save": computing * known_before}

    columns = ("reply", "s", "share of it computing", "known before", "to save at most")
    return contest.show(console, columns, map(row, replies), "3 turns, answered at once")


def main() -> None:
    parser = contest.parser(__doc__)
    parser.add_argument("--turns", type=contest.names, default=["3", "8"])
    parser.add_argument("--replies", type=contest.names, default=["8", "64", "512"])
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    about, console = contest.begin(120)
    results = {turns: compare(int(turns), words.rounds, console) for turns in words.turns}
    if words.replies:
        replies = [int(reply) for reply in words.replies]
        results["again"] = compute_again(replies, words.rounds, console)
    report(about | {"turns": results})


if __name__ == "__main__":
    main()
