"""Calling rewards: what they get, what they may return, what is said when they fail."""

import functools
import importlib.util

import numpy as np
import pytest

from jaxgrpo import rewards
from jaxgrpo.core.errors import InputError
from jaxgrpo.rewards import Reward, RewardError, TrainerState, bind, build, call_rewards, check
from jaxgrpo.rewards.protocol import accepted, option_names
from jaxgrpo.rewards.registry import is_per_sample

PROMPTS = ["1+1=", "1+1=", "2+3="]
COMPLETIONS = ["2", "3", "5"]
IDS = [[4], [5], [7, 1]]
COLUMNS = {"answer": ["2", "2", "5"], "level": [1, 1, 2]}


def call(**functions) -> dict[str, np.ndarray]:
    rewards = [Reward(*pair) for pair in functions.items()]
    return call_rewards(rewards, PROMPTS, COMPLETIONS, IDS, COLUMNS)[0]


class Odd:
    """A list, a number and an error whose methods raise."""

    def __init__(self, error: Exception):
        self.error = error

    def __len__(self):
        raise self.error

    def __float__(self):
        raise self.error

    def __repr__(self):
        raise self.error


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


def returning(values):
    return lambda completions: values


def test_what_answered_samples_is_no_column_of_the_data():
    received = []

    def takes_all(completions, **columns):
        received.append(columns)
        return [0.0] * len(completions)

    def names_it(completions, conversations):
        return [float(talk is entry) for talk, entry in zip(conversations, talks, strict=True)]

    rewards, talks = [Reward("takes_all", takes_all)], [object(), object()]
    columns = {"conversations": [["a"], ["b"]], "environments": ["x", "y"]}
    arguments = PROMPTS[:2], COMPLETIONS[:2], IDS[:2]
    call_rewards(rewards, *arguments, columns)
    assert {name: received[0][name] for name in columns} == columns
    living = {"conversations": talks, "environments": talks}
    rewards.append(Reward("names_it", names_it))
    scores, _ = call_rewards(rewards, *arguments, {}, living=living)
    assert "conversations" not in received[1]
    assert received[1]["environments"] is talks
    assert scores["names_it"].tolist() == [1.0, 1.0]


def test_each_reward_becomes_one_float32_array_under_its_name():
    scores = call(right=build("arithmetic"), length=lambda completion_ids: map_len(completion_ids))
    np.testing.assert_array_equal(scores["right"], [1, 0, 1])
    np.testing.assert_array_equal(scores["length"], [1, 1, 2])
    assert {values.dtype for values in scores.values()} == {np.dtype("float32")}


def map_len(lists):
    return [len(entries) for entries in lists]


def test_none_and_nan_mean_not_scored():
    scores = call(some=returning([None, float("nan"), 0.5]))["some"]
    np.testing.assert_array_equal(np.isnan(scores), [True, True, False])
    assert scores[2] == 0.5


def test_booleans_integers_and_arrays_are_numbers():
    scores = call(flags=returning([True, False, 1]), array=returning(np.array([1, 2, 3])))
    np.testing.assert_array_equal(scores["flags"], [1, 0, 1])
    np.testing.assert_array_equal(scores["array"], [1, 2, 3])


def test_a_reward_gets_only_the_keywords_it_names():
    received = {}

    def narrow(completions, *, level):
        received.update(completions=completions, level=level)
        return [0.0] * 3

    call(narrow=narrow)
    assert received == {"completions": COMPLETIONS, "level": [1, 1, 2]}


def test_a_reward_with_kwargs_gets_everything():
    received = {}

    def wide(**keywords):
        received.update(keywords)
        return [0.0] * 3

    call(wide=wide)
    assert isinstance(received.pop("trainer_state"), TrainerState)
    assert callable(received.pop("log_extra"))
    assert callable(received.pop("log_metric"))
    everything = {"prompts": PROMPTS, "completions": COMPLETIONS, "completion_ids": IDS}
    assert received == {**everything, **COLUMNS}


def test_a_reward_that_names_groups_gets_them():
    def grouped(completions, group_ids):
        return group_ids

    assert call(grouped=grouped)["grouped"].tolist() == [0, 1, 2]
    with pytest.raises(RewardError, match="column 'group_ids' has a name that rewards get"):
        call_rewards([Reward("grouped", grouped)], ["p"], ["c"], [[1]], {"group_ids": [7]})


def test_no_completions_give_no_scores_and_no_call():
    scores, _ = call_rewards([Reward("never", lambda completions: [1 / 0])], [], [], [], {})
    assert scores["never"].shape == (0,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "rewards.mine returned 2 values for 3 completions"),
        (1.0, "rewards.mine returned a float: return a list"),
        (None, "rewards.mine returned a NoneType"),
        ("abc", "rewards.mine returned a str"),
        ({"a": 1, "b": 2, "c": 3}, "rewards.mine returned a dict"),
        ({1.0, 2.0, 3.0}, "rewards.mine returned a set"),
        (np.zeros((3, 1)), r"rewards.mine returned an array of shape \(3, 1\)"),
        ([0.0, "1.0", 0.0], "rewards.mine returned '1.0' for completion 1, a str"),
        ([0.0, 0.0, [1.0]], r"rewards.mine returned \[1.0\] for completion 2, a list"),
        ([float("inf"), 0.0, 0.0], "returned inf for completion 0: give a number from"),
        # Its square is no float32: with grpo every advantage of the group would be 0.
        ([1e30, 0.0, 0.0], r"returned 1e\+30 for completion 0: give a number from -1e\+15 to 1e"),
        ([0.0, 1e300, 0.0], r"returned 1e\+300 for completion 1: give a number"),
        ([0.0, 1 + 1j, 0.0], r"returned \(1\+1j\) for completion 1, a complex: return a list"),
        (np.ones(3, np.complex64), "for completion 0, a complex64: return a list"),
        (Odd(OSError("gone")), r"returned a Odd that cannot be read \(OSError: gone\): return"),
        ([0.0, Odd(OSError("gone")), 0.0], "an Odd that cannot be written for completion 1, a Odd"),
    ],
)
def test_anything_else_than_one_number_each_is_refused_by_name(values, message):
    with pytest.raises(RewardError, match=message):
        call(mine=returning(values))


def test_an_exception_is_reported_with_the_sample_that_causes_it():
    def mine(completions, answer):
        return [1 / (int(text) - 3) for text in completions]

    with pytest.raises(RewardError) as failure:
        call(mine=mine)
    message = str(failure.value)
    assert "rewards.mine raised ZeroDivisionError on completion 1: division by zero" in message
    assert "prompt = '1+1='" in message
    assert "completion = '3'" in message
    assert "answer = '2'" in message
    assert "level" not in message
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


def test_an_exception_that_cannot_say_what_it_is_is_reported():
    def mine(completions):
        raise Unspeakable

    message = "raised Unspeakable on completion 0: an Unspeakable that cannot be written"
    with pytest.raises(RewardError, match=message):
        call(mine=mine)


def test_an_exception_that_no_single_completion_causes_says_so():
    def mine(completions):
        if len(completions) > 1:
            raise OSError("no grader")
        return [0.0]

    with pytest.raises(RewardError, match=r"raised OSError on completions 1 to 2 together"):
        call_rewards([Reward("mine", mine)], PROMPTS, COMPLETIONS, IDS, {})


def test_a_long_text_is_cut_in_a_message():
    with pytest.raises(RewardError) as failure:
        call_rewards([Reward("mine", lambda completions: [1 / 0])], ["p"], ["x" * 9000], [[1]], {})
    assert len(str(failure.value)) < 1000
    assert "(9002 characters)" in str(failure.value)


def test_a_missing_column_is_named_before_anything_is_called():
    with pytest.raises(RewardError, match=r"asks for 'gold', which does not exist .*answer, level"):
        call(mine=lambda completions, gold: 1 / 0)


def test_a_column_with_the_name_of_a_standard_keyword_is_refused():
    with pytest.raises(RewardError, match="column 'completions' has a name"):
        check("mine", returning([]), ["completions", "answer"])


@pytest.mark.parametrize("function", [lambda: [0.0], lambda *texts: [0.0], lambda texts, /: [0.0]])
def test_a_function_that_takes_nothing_by_keyword_is_refused(function):
    with pytest.raises(RewardError, match=r"rewards\.mine takes no argument by keyword, and rew"):
        check("mine", function, [])


def test_something_that_cannot_be_called_is_refused():
    with pytest.raises(RewardError, match=r"rewards\.mine is a str: give a function"):
        check("mine", "arithmetic", [])


def test_columns_of_another_length_are_refused():
    with pytest.raises(ValueError, match="3 completions but 1 entries of 'answer'"):
        call_rewards([], PROMPTS, COMPLETIONS, IDS, {"answer": ["2"]})


def test_options_are_fixed_and_no_column_replaces_them():
    def near(completions, answer, level=0):
        return [level] * len(completions) if isinstance(level, int) else level

    bound = bind("near", near, {"level": 7})
    np.testing.assert_array_equal(call(near=bound)["near"], [7, 7, 7])
    np.testing.assert_array_equal(call(near=near)["near"], [1, 1, 2])


@pytest.mark.parametrize("name", ["format", "length", "consensus", "brier"])
def test_no_column_is_an_option_of_a_built_in_reward(name):
    """Problems of programming contests have a time_limit each, on which the reward failed."""
    options = dict.fromkeys(option_names(rewards.rewards[name]), 1)
    assert options
    assert accepted(rewards.rewards[name], options) == options
    assert accepted(build(name), options) == {}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="it is not installed")
def test_no_column_is_an_option_of_a_scorer():
    text = "So 4.<confidence>1</confidence>"
    columns = {"time_limit": [2.0], "workers": ["x"], "answer": ["4"]}
    assert build("accuracy", scorer="math")(completions=[text], **columns) == [1.0]


def test_an_unknown_option_is_refused_with_those_there_are():
    def near(completions, tolerance=0.1):
        return [tolerance] * len(completions)

    with pytest.raises(RewardError, match="no option 'tolerence': it takes tolerance"):
        build(near, tolerence=1.0)
    with pytest.raises(RewardError, match="no option 'wieght': it takes none"):
        build("arithmetic", wieght=1.0)


def test_callable_objects_and_partial_functions_are_rewards():
    class Constant:
        def __call__(self, completions, **columns):
            return [sorted(columns).index("level")] * len(completions)

    scaled = functools.partial(lambda completions, scale: [scale] * len(completions), scale=2)
    scores = call(constant=Constant(), scaled=scaled)
    np.testing.assert_array_equal(scores["constant"], [2, 2, 2])
    np.testing.assert_array_equal(scores["scaled"], [2, 2, 2])


def test_an_unknown_name_comes_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'arithmetic'"):
        build("arithmetics")


TASK_COLUMNS = {"sql": ["database"], "reasoning_gym": ["entry"]}


def test_every_built_in_reward_takes_the_protocol():
    for name, function in rewards.rewards.items():
        check(name, function, ["answer", *TASK_COLUMNS.get(name, ())])


def test_a_reward_that_makes_rewards_is_told_apart():
    def get_penalty(limit=3):
        return lambda completions: [float(limit)] * len(completions)

    with pytest.raises(RewardError, match="returned a function: it makes a reward and is none"):
        call(penalty=get_penalty)
    np.testing.assert_array_equal(call(penalty=get_penalty(2))["penalty"], [2, 2, 2])


def test_the_built_in_rewards_judge_samples_by_themselves_and_others_say_so():
    def mine(completions, limit=1, **columns):
        return [0.0] * len(completions)

    class Mine:
        per_sample = True

        def __call__(self, completions):
            return [0.0] * len(completions)

    assert all(is_per_sample(function) for function in rewards.rewards.values())
    assert is_per_sample(build("length", max_tokens=4))
    assert not is_per_sample(build(mine, limit=2))
    assert is_per_sample(Mine())
    mine.per_sample = True
    assert is_per_sample(build(functools.partial(mine), limit=2))
