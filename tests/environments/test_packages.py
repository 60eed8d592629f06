"""Environments of gymnasium and textarena, played through the partner that answers a sample."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.calls import hermes
from jaxgrpo.environments.packages import find
from jaxgrpo.environments.partners import make_kind

pytest.importorskip("gymnasium", reason="gymnasium is in the extras test and envs")


def textarena():
    return pytest.importorskip(
        "textarena", reason="textarena is in the extra envs, which `make test-all` installs"
    )


def kind(name):
    return make_kind(find(name), {}, (), lambda: hermes, 10.0, "environment")


def play(name, *turns, seed=3):
    """The partner after these turns, and its answers."""
    partner = kind(name).make()
    partner.open({"answer": "a column"}, seed)
    return partner, [partner.answer(turn) for turn in turns]


def reply_text(answer):
    return str(answer.messages[0]["content"]) if answer.messages else ""


def opening(partner, seed=0):
    return str(partner.open({}, seed))


LAKE = "gymnasium:FrozenLake-v1?is_slippery=false"
PATH = ["down", "I go Down.", "2", "Right? no: down", "down... or right", "3 is up, I go 2"]


def test_a_solved_frozen_lake_gives_one():
    partner, answers = play(LAKE, *PATH)
    assert [answer.reward for answer in answers] == [0, 0, 0, 0, 0, 1]
    assert reply_text(answers[2]) == "SFFF\nFHFH\nF[F]FH\nHFFG"
    assert answers[-1].messages == []
    assert partner.reward() == 1
    assert kind(LAKE).tools == ()
    assert kind(LAKE).has_reward


def test_a_hole_ends_it_without_reward():
    partner, answers = play(LAKE, "right", "down")
    assert reply_text(answers[0]) == "S[F]FF\nFHFH\nFFFH\nHFFG"
    assert answers[1].messages == []
    assert partner.reward() == 0


@pytest.mark.parametrize(
    "turn", ["", "hello", "7", "downstairs", "-1", "2.5", "<think>up</think>", "<think>up or right"]
)
def test_a_turn_without_an_action_is_answered_and_changes_nothing(turn):
    _, (answer, second) = play(LAKE, turn, "down")
    assert reply_text(answer) == "No action in this turn. Write one of: left, down, right, up."
    assert answer.reward == 0
    assert reply_text(second).startswith("SFFF\n[F]HFH")


def test_what_reset_says_is_the_state_and_the_actions():
    assert opening(kind(LAKE).make()) == (
        "[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up."
    )
    assert "The dealer shows" in opening(kind("gymnasium:Blackjack-v1").make())
    assert opening(kind("gymnasium:CartPole-v1").make()).endswith("Actions: 0, 1.")


def test_a_taxi_is_driven_by_what_the_text_says():
    """The passenger is fetched by the words alone; the walls of its map are in the grid."""
    partner = kind("gymnasium:Taxi-v4").make()
    text = opening(partner, 3)
    assert (
        "The taxi is in row 0, column 2, the passenger at red, the destination is yellow." in text
    )
    turns = ["south", "south", "west", "west", "north", "north", "pickup"]
    back = ["south", "south", "south", "south", "dropoff"]
    answers = [partner.answer(turn) for turn in turns]
    assert "the passenger at the taxi" in reply_text(answers[-1])
    answers += [partner.answer(turn) for turn in back]
    assert answers[-1].messages == []
    assert partner.reward() == 20 - (len(answers) - 1)


def test_a_cliff_costs_what_gymnasium_says():
    _, (answer, second) = play("gymnasium:CliffWalking-v1", "right", "up")
    assert answer.reward == -100
    assert second.reward == -1
    assert reply_text(second).splitlines()[2].startswith("x ")


def test_a_blackjack_ends_when_one_sticks():
    partner, answers = play("gymnasium:Blackjack-v1", "stick", seed=1)
    assert answers[-1].messages == []
    assert partner.reward() in (-1, 0, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gymnasium:FrozenLak-v1", "no 'FrozenLak-v1': did you mean FrozenLake-v1"),
        ("gymnasium:Pendulum-v1", "its actions are Box"),
        ("gymnasium:FrozenLake-v1?map_nam=8x8", "unexpected keyword argument 'map_nam'"),
        ("gymnasium:FrozenLake-v1?map_name", "write options once each"),
        ("gymnasium:FrozenLake-v1?is_slippery=False", "a text: write is_slippery=false"),
    ],
)
def test_what_cannot_be_played_gets_a_line(name, message):
    with pytest.raises(InputError, match=message) as caught:
        kind(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("package", ["gymnasium", "textarena"])
def test_without_the_package_a_line_says_how_to_get_it(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf'{package}, which is not .*"jaxgrpo\[envs\]"'):
        kind(f"{package}:Game-v0")


def test_own_code_is_not_looked_for_in_packages():
    assert find("mine.py:Game") is None
    assert find("my_package.games:Game") is None


def test_a_number_is_guessed_by_halves():
    textarena()
    low, high, partner = 1, 20, kind("textarena:GuessTheNumber-v0").make()
    assert "between 1 and 20" in opening(partner, 11)
    while True:
        answer = partner.answer(f"my guess: [{(low + high) // 2}]")
        if not answer.messages:
            break
        middle = (low + high) // 2
        low, high = (middle + 1, high) if "higher" in reply_text(answer) else (low, middle - 1)
    assert answer.reward == partner.reward() == 1
    opening(partner, 11)
    invalid = partner.answer("I do not know")
    assert "invalid move" in reply_text(invalid)
    assert partner.answer("again nothing").messages == []


def test_a_column_of_seeds_lets_all_samples_of_a_row_begin_alike():
    partner = kind("gymnasium:Taxi-v4").make()
    first = opening(partner, 1)
    assert opening(partner, 2) != first
    assert partner.open({"seed": 1}, 2) == first


def test_a_game_depends_on_its_seed_and_not_on_games_beside_it():
    textarena()
    make = find("textarena:2048-v0-mega-easy")
    assert make is not None

    def grids(seed):
        game = make()
        return [
            game.reset(seed),
            *(game.step(turn)[0] for turn in ["[up]", "[left]", "[down]"] * 5),
        ]

    random.seed(5)
    state = random.getstate()
    alone = [grids(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(grids, range(8))] == alone
    assert len({str(entry) for entry in alone}) == 8
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("textarena:GuesTheNumber-v0", "did you mean GuessTheNumber-v0 or"),
        ("textarena:ConnectFour-v0", "number of players has to be 2"),
        ("textarena:QuantumTicTacToe-v0", "is a game for several"),
        ("textarena:TwentyQuestions-v0", "API key not found"),
        ("textarena:Sudoku-v0?colour=red", "unexpected keyword argument 'colour'"),
    ],
)
def test_a_game_that_no_sample_can_play_gets_a_line(name, message, monkeypatch):
    textarena()
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(InputError, match=message) as caught:
        kind(name)
    assert "\n" not in str(caught.value)


def test_a_game_of_words_asks_for_its_lists_and_fetches_none(monkeypatch, tmp_path):
    textarena()
    import nltk  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr("socket.getaddrinfo", lambda *names, **options: pytest.fail("a look-up"))
    with pytest.raises(InputError, match=r"'words' is missing: fetch NLTK's lists once"):
        kind("textarena:Wordle-v0")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="its f-strings are right from 3.12 on")
def test_a_game_that_needs_a_later_python_says_so():
    textarena()
    with pytest.raises(InputError, match=r"is no Python 3.11 .*take Python 3.12 or later"):
        kind("textarena:Chess-v0")
