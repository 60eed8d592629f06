"""The games: both forms on all turns of a few words, against the rules as they are written down."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import playing
import pytest

from jaxgrpo.config import world
from jaxgrpo.config.keys import RolloutKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.tasks import load, modular_sum, number_guess
from jaxgrpo.data.tasks.base import END, character_tokenizer, token_ids
from jaxgrpo.data.tasks.templates import TEMPLATE
from jaxgrpo.environments.history import Frame
from jaxgrpo.environments.rules import Answering, Rules, check, number_columns, reset_all

WORDS = {
    "number_guess": ["01", "07", "08", "15", "guess", "?"],
    "modular_sum": ["0", "3", "8", "+", "no"],
}


def steps(game, row, texts):
    """What both forms say to turns: (reply, reward, done) of each, until one is done."""
    tokenizer = character_tokenizer(game.task.alphabet)
    environment, outcomes = game.environment(), []
    takes = {name: row[name] for name in ("secret", "numbers") if name in row}
    environment.reset(seed=0, **takes)
    columns = {name: jnp.asarray(value) for name, value in number_columns([row]).items()}
    state = game.rules.reset(jax.random.key(0), {name: value[0] for name, value in columns.items()})
    step = jax.jit(game.rules.step)
    for text in texts:
        observation, reward, is_done = environment.step(text)
        ids = tokenizer(text)["input_ids"]
        tokens = np.full(4, -1, np.int32)
        tokens[: len(ids)] = ids
        state, reply, size, traced_reward, traced_done = step(state, tokens, len(ids))
        words = tokenizer.decode(np.asarray(reply)[: int(size)].tolist())
        assert (words, bool(traced_done)) == (observation, is_done), text
        assert float(traced_reward) == pytest.approx(reward)
        outcomes.append((observation, reward, is_done))
        if is_done:
            break
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", playing.GAMES)
def test_both_forms_answer_every_turn_of_up_to_three_words_alike(name):
    game = playing.GAMES[name]
    row = {"prompt": "", "answer": "", "secret": 8, "numbers": [8, 5, 8, 9, 1]}
    row = {key: value for key, value in row.items() if key in game.task.rows("train", 1, 0)[0]}
    for size in range(4):
        for words in itertools.product(WORDS[name], repeat=size):
            steps(game, row, ["".join(words)])


def test_a_search_by_halves_finds_every_number_in_the_fewest_questions():
    questions = []
    for row in load("task:number_guess:train", number_guess.HIGHEST):
        low, high, outcomes = 1, number_guess.HIGHEST, []
        while not outcomes or not outcomes[-1][2]:
            texts = [f"{number:02}" for number in _halves(row["secret"], low, high)]
            outcomes = steps(playing.GAMES["number_guess"], row, texts)
        questions.append(len(outcomes))
        most = number_guess.TURNS
        assert outcomes[-1][1] == pytest.approx((most + 1 - len(outcomes)) / most)
    assert np.mean(questions) == pytest.approx(number_guess.FEWEST)


def _halves(secret, low, high):
    while True:
        middle = (low + high) // 2
        yield middle
        if middle == secret:
            return
        low, high = (low, middle - 1) if secret < middle else (middle + 1, high)


def test_sums_are_checked_one_by_one_and_a_wrong_one_may_be_tried_again():
    (row,) = load("task:modular_sum:train", 1)
    right = [str(sum(row["numbers"][:n]) % 10) for n in range(2, modular_sum.DIGITS + 1)]
    wrong = str((int(right[0]) + 1) % 10)
    outcomes = steps(playing.GAMES["modular_sum"], row, [wrong, *right])
    assert [reply for reply, _, _ in outcomes] == [
        "no",
        *(f"+{n}" for n in row["numbers"][2:]),
        "done",
    ]
    assert sum(reward for _, reward, _ in outcomes) == pytest.approx(1)
    assert row["answer"] == right[-1]


@pytest.mark.parametrize("task", [number_guess, modular_sum])
def test_the_corpus_is_what_the_chat_template_and_the_environment_write(task):
    name = task.__name__.rpartition(".")[2]
    game, tokenizer = playing.GAMES[name], character_tokenizer(task.ALPHABET, TEMPLATE)
    texts = task.corpus()
    assert sum(text.probability for text in texts) == pytest.approx(1)
    for text in texts[:200]:
        assert tokenizer.unk_token_id not in tokenizer(text.prompt + text.solution)["input_ids"]
        turns = text.prompt.removesuffix("<assistant>").split(END)[:-1]
        roles = [turn[1 : turn.index(">")] for turn in turns]
        words = [turn[turn.index(">") + 1 :] for turn in turns]
        messages = [{"role": r, "content": w} for r, w in zip(roles, words, strict=True)]
        render = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert render == text.prompt
    assert game.task.splits.keys() == {"train", "test"}


ROWS = [{"prompt": "x", "secret": 3, "share": 0.5, "big": 1 << 40, "words": ["a"], "pair": [1, 2]}]
COLUMNS = number_columns(ROWS)


def test_lists_of_several_lengths_are_no_column_of_numbers():
    rows = [{"edges": [[1, 2], [3]], "pair": [[1, 2], [3, 4]]}] * 2
    assert [*number_columns(rows)] == ["pair"]
    assert number_columns([{"edges": [1]}, {"edges": [1, 2]}]) == {}


def test_arrays_and_numbers_of_numpy_are_columns_of_numbers():
    row = {"board": np.arange(4, dtype=np.uint8).reshape(2, 2), "small": np.uint8(200)}
    columns = number_columns([{**row, "is_on": np.bool_(True), "large": np.uint64(1 << 40)}] * 2)
    types = {name: (column.dtype.name, column.shape) for name, column in columns.items()}
    expected = {"board": ("int32", (2, 2, 2)), "small": ("int32", (2,)), "is_on": ("bool", (2,))}
    assert types == expected
    assert columns["small"].tolist() == [200, 200]


def test_a_state_may_hold_keys():
    """As rules that draw would have it; on the host it is arrays."""

    def shuffle(state, tokens, length):
        key, number = state
        key, now = jax.random.split(key)
        reply = jax.random.randint(now, (1,), 0, 1000)
        return (key, number), reply, jnp.int32(1), jnp.float32(0), jnp.bool_(False)

    rules = Rules(lambda key, row: (key, row["secret"]), shuffle)
    check(rules, COLUMNS, 4, "environment")
    seeds = np.asarray([5, 6], np.int32)
    states = reset_all(rules, COLUMNS, np.zeros(2, np.int32), seeds)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(states))
    step = jax.jit(jax.vmap(Answering(rules, 2, 4, Frame((), (), ())).step))
    tokens, lengths = jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32)
    for _ in range(2):
        states, replies, *_ = step(states, tokens, lengths)
    for place, seed in enumerate(seeds.tolist()):
        state = jax.random.key(seed), jnp.int32(3)
        for _ in range(2):
            state, reply, *_ = shuffle(state, None, None)
        assert replies[place] == reply


def test_rules_get_the_columns_that_are_numbers():
    types = {name: (column.dtype.name, column.shape) for name, column in COLUMNS.items()}
    expected = {"secret": ("int32", (1,)), "share": ("float32", (1,)), "pair": ("int32", (1, 2))}
    assert types == expected


def begin(key, row):
    return row["secret"]


def step(state, tokens, length):
    return state, tokens[:1], jnp.int32(1), jnp.float32(0), length > 3


BAD = {
    "a column that is missing": (
        lambda key, row: row["answer"],
        step,
        "asks for the column 'answer', and those of numbers are secret, share, pair",
    ),
    "a state of another form": (
        begin,
        lambda state, *rest: (state + 0.5, *step(state, *rest)[1:]),
        r"step makes a state float32\[\] of int32\[\]",
    ),
    "too few parts": (begin, lambda state, *rest: (state, 1.0), "step returns a tuple: return"),
    "a reply of floats": (
        begin,
        lambda state, *rest: (state, jnp.zeros(3), *step(state, *rest)[2:]),
        r"step replies with float32\[3\]: give int32 tokens",
    ),
    "a reward for each token": (
        begin,
        lambda state, tokens, n: (state, tokens, n, tokens * 1.0, n > 1),
        r"step gives reward as float32\[4\]: give a scalar",
    ),
    "a state in a list": (
        begin,
        lambda state, *rest: ([state], *step(state, *rest)[1:]),
        r"step makes a state PyTreeDef\(\[\*\]\) of int32\[\] of int32\[\]",
    ),
    "a reply in a list": (
        begin,
        lambda state, tokens, n: (state, [tokens], *step(state, tokens, n)[2:]),
        r"step replies with PyTreeDef\(\[\*\]\) of int32\[4\]: give int32 tokens",
    ),
    "no reward": (
        begin,
        lambda state, tokens, n: (state, tokens, n, None, n > 1),
        r"step gives reward as PyTreeDef\(None\) of no array: give a scalar",
    ),
    "a branch on a value": (
        begin,
        lambda state, tokens, n: step(state, tokens, n if n > 1 else n + 1),
        "environment.*a branch on a traced value|environment.*traced",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_rules_that_cannot_be_traced_are_refused(name):
    reset, step_, message = BAD[name]
    with pytest.raises(InputError, match=message):
        check(Rules(reset, step_), COLUMNS, 4, "environment")


@pytest.mark.parametrize("name", playing.GAMES)
def test_a_template_without_calls_will_do_for_an_environment_and_not_for_tools(name):
    game = playing.GAMES[name]
    tokenizer = character_tokenizer(game.task.alphabet, game.task.chat_template)
    chat = Chat(tokenizer, game.task.chat_template, "its template", None, {})
    rollout = RolloutKeys(
        prompts_per_step=1, group_size=2, max_prompt_tokens=8, max_completion_tokens=64
    )
    stops = [token_ids(game.task.alphabet)[END]]
    for environment, reward in ((game.environment, game.environment.__name__), (game.rules, name)):
        answers = world.make_world((), {"": environment}, rollout, chat, stops)
        assert answers is not None
        assert [entry.name for entry in answers.rewards()] == [reward]
    with pytest.raises(InputError, match="the chat template shows none of"):
        world.make_world((hint,), {}, rollout, chat, stops)


def hint(number: int) -> str:
    """Gives a hint.

    Args:
        number: of the hint
    """
    return str(number)
