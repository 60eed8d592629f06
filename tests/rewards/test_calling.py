"""What a reward is told, what it may log, async rewards, and what follows where one raises."""

import asyncio
import copy
import dataclasses
import functools
import gc
import time
import warnings
from threading import Lock
from typing import Any

import numpy as np
import pytest

from jaxgrpo.rewards import Reward, RewardError, TrainerState, bind, call_rewards, callable_name

PROMPTS = ["1+1=", "1+1=", "2+3="]
COMPLETIONS = ["2", "3", "5"]
IDS = [[4], [5], [7, 1]]
STATE = TrainerState(global_step=30, max_steps=120, epoch=0.5, num_train_epochs=2)


def call(on_error=None, **functions):
    modes = on_error or {}
    rewards = [
        Reward(name, function, on_error=modes.get(name, "raise"))
        for name, function in functions.items()
    ]
    return call_rewards(rewards, PROMPTS, COMPLETIONS, IDS, {}, trainer_state=STATE)


def test_a_reward_may_change_with_the_step():
    def annealed(completions, trainer_state, **columns):
        progress = trainer_state.global_step / trainer_state.max_steps
        return [1 - progress] * len(completions)

    scores, _ = call(annealed=annealed)
    np.testing.assert_array_equal(scores["annealed"], [0.75] * 3)


def test_a_misspelt_attribute_of_the_trainer_state_names_the_nearest():
    with pytest.raises(RewardError, match=r"no 'global_steps': did you mean 'global_step'\?"):
        call(mine=lambda completions, trainer_state: trainer_state.global_steps)


def test_the_trainer_state_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        STATE.global_step = 7  # pyright: ignore[reportAttributeAccessIssue]


def test_logged_columns_and_metrics_come_back():
    def mine(completions, log_extra, log_metric, **columns):
        log_extra("found", [len(text) for text in completions])
        log_metric("found/mean", 1.0)
        log_metric("found/mean", np.float32(2.0))
        log_metric("nothing", float("nan"))
        return [0.0] * len(completions)

    _, log = call(mine=mine)
    assert log.extra == {"found": [1, 1, 1]}
    assert log.numbers() == {"found/mean": 1.5}
    assert (log.failed, log.messages) == ({}, {})


def test_a_column_logged_in_pieces_is_put_together():
    def mine(completions, log_extra):
        for text in completions:
            log_extra("twice", [text * 2])
        return [0.0] * len(completions)

    assert call(mine=mine)[1].extra == {"twice": ["22", "33", "55"]}


def test_a_column_that_two_rewards_log_bears_their_names():
    def logging(value):
        def reward(completions, log_extra):
            log_extra("gold", [value] * 3)
            return [0.0] * 3

        return reward

    assert call(a=logging(1), b=logging(2))[1].extra == {"a/gold": [1] * 3, "b/gold": [2] * 3}


def test_a_metric_that_two_rewards_log_is_one_mean():
    def logging(value):
        def reward(completions, log_metric):
            log_metric("seconds", value)
            return [0.0] * 3

        return reward

    assert call(a=logging(1), b=logging(2))[1].numbers() == {"seconds": 1.5}


def test_what_is_no_json_is_logged_as_its_text():
    entries = [np.arange(2), {"a": (1, np.float32(0.5)), "b": Ellipsis}, 10**5000]

    def mine(completions, log_extra):
        log_extra("found", entries)
        return [0.0] * 3

    stored = [[0, 1], {"a": [1, 0.5], "b": "Ellipsis"}, "an int that cannot be written"]
    assert call(mine=mine)[1].extra == {"found": stored}


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (lambda extra, metric: extra("found", [1]), r"log_extra\('found', \.\.\.\) got 1 values"),
        (lambda extra, metric: extra("found", "abc"), "got a str: give a list with one value"),
        (lambda extra, metric: extra("found", 3), "got a int: give a list"),
        (lambda extra, metric: metric("m", "high"), r"log_metric\('m', 'high'\): give a number"),
        (lambda extra, metric: metric("m\ud800", 1), r"log_metric\('m.ud800', .*: character 1 is"),
    ],
)
@pytest.mark.parametrize("mode", ["raise", "unscored"])
def test_logging_something_else_is_refused_in_either_mode(log, message, mode):
    def mine(completions, log_extra, log_metric):
        log(log_extra, log_metric)
        return [0.0] * 3

    with pytest.raises(RewardError, match=message):
        call({"mine": mode}, mine=mine)


def sleeping(seconds, score):
    async def reward(completions, **columns):
        await asyncio.sleep(seconds)
        return [score] * len(completions)

    return reward


def test_async_rewards_run_at_the_same_time_and_keep_their_order():
    began = time.monotonic()
    scores, _ = call(
        slow=sleeping(0.5, 1), sync=lambda completions: [0.0] * 3, quick=sleeping(0.4, 2)
    )
    assert time.monotonic() - began < 0.8
    assert {name: values[0] for name, values in scores.items()} == {
        "slow": 1,
        "sync": 0,
        "quick": 2,
    }
    assert list(scores) == ["slow", "sync", "quick"]


def test_async_rewards_work_inside_a_running_loop():
    async def notebook():
        return call(mine=sleeping(0.01, 3))[0]

    np.testing.assert_array_equal(asyncio.run(notebook())["mine"], [3, 3, 3])


def test_async_objects_partials_and_what_they_keep_between_calls():
    class Judge:
        def __init__(self):
            self.lock = None

        async def __call__(self, completions, scale, **columns):
            self.lock = self.lock or asyncio.Lock()  # bound to the loop that first waits on it
            async with self.lock:
                await asyncio.sleep(0)
            return [scale] * len(completions)

    judge = bind("judge", Judge(), {"scale": 2.0})
    for _ in range(2):
        np.testing.assert_array_equal(call(judge=judge)[0]["judge"], [2, 2, 2])


def test_an_async_exception_is_reported_with_its_sample():
    async def mine(completions):
        await asyncio.sleep(0)
        return [1 / (int(text) - 3) for text in completions]

    with pytest.raises(
        RewardError, match=r"mine raised ZeroDivisionError on completion 1: .*"
    ) as e:
        call(mine=mine, other=sleeping(0, 1))
    assert "completion = '3'" in str(e.value)
    assert isinstance(e.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_an_async_reward_that_ends_the_process_fails_and_does_not_hang_it(end):
    async def mine(completions):
        raise end("stop")

    with pytest.raises(RewardError, match=f"mine raised {end.__name__} on completion 0: stop"):
        call(mine=mine)
    np.testing.assert_array_equal(call(mine=sleeping(0, 1))[0]["mine"], [1, 1, 1])


@pytest.mark.slow
def test_a_sync_failure_leaves_no_coroutine_behind():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RewardError, match="raised ZeroDivisionError"):
            call(waiting=sleeping(0, 1), bad=lambda completions: 1 / 0)
        gc.collect()


def failing(kind, calls):
    def reward(completions, log_metric, log_extra):
        calls.append(len(completions))
        log_metric("tried", 1.0)
        log_extra("seen", completions)
        if "3" in completions:
            raise OSError("no grader")
        return [1.0] * len(completions)

    async def later(completions, log_metric, log_extra):
        return reward(completions, log_metric, log_extra)

    return reward if kind == "sync" else later


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_exception_may_leave_the_batch_unscored_and_counted(kind):
    calls = []
    scores, log = call(
        {"mine": "unscored", "calm": "unscored"},
        mine=failing(kind, calls),
        calm=lambda completions: [2.0] * 3,
    )
    assert np.isnan(scores["mine"]).all()
    np.testing.assert_array_equal(scores["calm"], [2, 2, 2])
    assert log.numbers() == {"rewards/mine/errors": 3, "rewards/calm/errors": 0}
    assert log.extra == {}
    assert list(log.messages) == ["mine"]
    assert "mine raised OSError on completion 1: no grader" in log.messages["mine"]
    assert "completion = '3'" in log.messages["mine"]
    assert calls[0] == 3


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_default_ends_the_run(kind):
    with pytest.raises(RewardError, match="mine raised OSError"):
        call({"calm": "unscored"}, mine=failing(kind, []), calm=lambda completions: [2.0] * 3)


def test_a_wrong_number_of_values_ends_the_run_in_either_mode():
    with pytest.raises(RewardError, match="returned 1 values for 3 completions"):
        call({"mine": "unscored"}, mine=lambda completions: [1.0])


def test_the_search_for_the_sample_ends_in_time(monkeypatch):
    monkeypatch.setattr("jaxgrpo.rewards.calling.SEARCH", 0.05)

    def mine(completions):
        time.sleep(0.1)
        raise OSError("no grader")

    with pytest.raises(RewardError, match=r"on completions 0 to \d+ together"):
        call_rewards([Reward("mine", mine)], ["p"] * 64, ["c"] * 64, [[1]] * 64, {})


def test_no_completions_leave_no_errors():
    never: Any = lambda completions: 1 / 0  # noqa: E731
    _, log = call_rewards([Reward("mine", never, on_error="unscored")], [], [], [], {})
    assert log.numbers() == {"rewards/mine/errors": 0}


def test_a_reward_is_called_as_its_function_or_class():
    class Penalty:
        def __call__(self, completions):
            return [0.0]

    class Named(Penalty):
        __name__ = "overlong"

    assert callable_name(len) == "len"
    assert callable_name(Penalty()) == "Penalty"
    assert callable_name(Named()) == "overlong"
    assert callable_name(functools.partial(functools.partial(len), [])) == "len"


def test_what_a_reward_changes_in_place_reaches_no_other_reward_and_not_the_data():
    columns = {"cases": [{"ids": [1]}, {"ids": [2]}, {"ids": [3]}]}
    columns_before = {
        "prompts": PROMPTS,
        "completions": COMPLETIONS,
        "completion_ids": IDS,
        **columns,
    }
    before, received = copy.deepcopy(columns_before), {}

    def changes(prompts, completions, completion_ids, cases):
        for values in (prompts, completions, completion_ids):
            values.reverse()
        completion_ids[0].append(9)
        cases[0]["ids"].clear()
        return [0.0] * 3

    def looks(**keywords):
        received.update({key: keywords[key] for key in columns_before})
        return [0.0] * 3

    rewards = [Reward("changes", changes), Reward("looks", looks)]
    call_rewards(rewards, PROMPTS, COMPLETIONS, IDS, columns)
    assert received == before
    assert columns_before == before


def test_a_failure_is_found_although_the_reward_empties_its_lists():
    def mine(completions):
        while completions:
            if completions.pop(0) == "3":
                raise OSError("no grader")
        return [0.0] * 3

    with pytest.raises(RewardError, match="mine raised OSError on completion 1"):
        call(mine=mine)


def test_a_column_without_a_copy_is_refused():
    mine = Reward("mine", lambda completions, judge: [0.0])
    with pytest.raises(RewardError, match=r"'judge' holds a value that cannot be copied .*lock"):
        call_rewards([mine], ["p"], ["c"], [[1]], {"judge": [Lock()]})
