"""Rewards that never come back, end the process, or leave threads behind."""

import asyncio
import os
import re
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxgrpo.data import limits as data_limits
from jaxgrpo.rewards import Reward, RewardError, call_rewards, calling, limits
from jaxgrpo.training.processes import process

pytestmark = pytest.mark.fault(17)

ENDLESS = re.compile("(a+)+$")


def call(timeout=None, on_error=None, **functions):
    modes, limits = on_error or {}, timeout or {}
    rewards = [
        Reward(name, function, on_error=modes.get(name, "raise"), timeout=limits.get(name))
        for name, function in functions.items()
    ]
    return call_rewards(rewards, ["p"] * 3, ["a", "b", "c"], [[1]] * 3, {})


def sleeps(completions):
    time.sleep(60)


def loops(completions):
    while True:
        pass


def matches(completions):
    """Holds the interpreter's lock for years: no other thread could interrupt it."""
    ENDLESS.match("a" * 60 + "b")


def waits_for_a_lock(completions):
    lock = threading.Lock()
    with lock, lock:
        pass


def catches_mistakes(completions):
    try:
        time.sleep(60)
    except Exception:
        return [0.0] * len(completions)


def catches_once(completions):
    try:
        time.sleep(60)
    except:  # noqa: E722
        time.sleep(60)


async def awaits(completions):
    await asyncio.sleep(60)


HUNG = [sleeps, loops, matches, waits_for_a_lock, catches_mistakes, catches_once, awaits]


@pytest.mark.slow
@pytest.mark.parametrize("hung", HUNG, ids=lambda function: function.__name__)
def test_a_reward_that_hangs_ends_at_its_timeout(hung):
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"rewards\.mine was not done .* timeout = 0\.2 s"):
        call({"mine": 0.2}, mine=hung)
    assert time.monotonic() - began < 5
    assert limits.running() is None


@pytest.mark.parametrize("hung", [sleeps, awaits])
def test_a_hung_reward_may_leave_its_samples_unscored_while_others_score(hung):
    scores, log = call(
        {"mine": 0.2, "calm": 9.0},
        {"mine": "unscored"},
        mine=hung,
        calm=lambda completions: [1.0, 2.0, 3.0],
    )
    assert np.isnan(scores["mine"]).all()
    np.testing.assert_array_equal(scores["calm"], [1, 2, 3])
    assert log.numbers() == {"rewards/mine/errors": 3}
    assert "not done with 3 completions within timeout = 0.2 s" in log.messages["mine"]


def test_a_limit_that_is_kept_changes_nothing():
    mine = {"mine": lambda completions: [0.1, 0.2, None]}
    np.testing.assert_array_equal(call({"mine": 9.0}, **mine)[0]["mine"], call(**mine)[0]["mine"])


def test_a_timer_that_ran_before_goes_on_after_a_reward():
    import signal

    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(RewardError):
            call({"mine": 0.1}, mine=sleeps)
        time.sleep(0.4)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rang == [1]


def test_an_async_reward_that_blocks_its_loop_ends_the_run_and_the_next_call_works(monkeypatch):
    monkeypatch.setattr(calling, "SLACK", 0.2)

    async def blocks(completions):
        time.sleep(2)

    async def quick(completions):
        await asyncio.sleep(0)
        return [1.0] * 3

    with pytest.raises(RewardError, match=r"rewards\.mine: blocked the event loop"):
        call({"mine": 0.1}, {"mine": "unscored"}, mine=blocks)
    np.testing.assert_array_equal(call(mine=quick)[0]["mine"], [1, 1, 1])


def test_a_limit_outside_the_main_thread_is_refused():
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(call, {"mine": 1.0}, mine=sleeps).exception(timeout=10)
    assert isinstance(refused, RewardError)
    assert "a limit works in the main thread only" in str(refused)


def test_threads_that_a_hung_reward_leaves_are_known_as_long_as_they_live():
    end = threading.Event()

    def mine(completions):
        ThreadPoolExecutor(1).submit(end.wait).result()

    with pytest.raises(RewardError):
        call({"mine": 0.2}, mine=mine)
    assert limits.has_left_threads()
    end.set()


FORKED: list[int] = []


def forks(completions):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks
        FORKED.append(os.fork())
    return [1.0] * len(completions)


def forks_and_raises(completions):
    forks(completions)
    if FORKED[-1] == 0:
        raise ValueError("in the child")
    return [1.0] * len(completions)


@pytest.mark.fault(14)
@pytest.mark.parametrize("raises", [False, True])
def test_a_reward_that_takes_the_stop_signals_gives_them_back(raises):
    """As libraries do that it loads: the run would not hear that it is to stop."""

    def takes(completions):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as scripts do that are read by `head`
        return 1 / 0 if raises else [0.0] * len(completions)

    assert set(data_limits.STOPS) == set(process.STOP_SIGNALS)
    with process.stop_signals():
        call(on_error={"takes": "unscored"}, timeout={"takes": 60.0}, takes=takes)
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.stop_requested(1)
        assert signal.getsignal(signal.SIGINT) is process._on_signal
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN


def test_a_timer_that_a_reward_leaves_does_not_go_off_within_the_run():
    """As of a time limit of its own, behind a return in front of signal.alarm(0)."""
    before = signal.getsignal(signal.SIGALRM)

    def late(*_):
        raise TimeoutError

    def begins(completions):
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return [0.0] * len(completions)

    try:
        call(begins=begins)
        time.sleep(0.3)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("forking", [forks, forks_and_raises])
def test_a_process_that_a_reward_forks_does_not_come_back_into_the_run(forking, capfd):
    trainer = os.getpid()
    try:
        scores, _ = call(mine=forking)
    finally:
        if os.getpid() != trainer:  # it would run the other tests
            os._exit(0)
    np.testing.assert_array_equal(scores["mine"], [1, 1, 1])
    assert os.waitstatus_to_exitcode(os.waitpid(FORKED[-1], 0)[1]) == 1
    line = "rewards.mine: a process that it forked did not end by itself, and is ended\n"
    assert line in capfd.readouterr().err


def leaves(completions):
    sys.exit(0)


async def leaves_later(completions):
    await asyncio.sleep(0)
    sys.exit(0)


@pytest.mark.parametrize("leaving", [leaves, leaves_later])
def test_a_reward_that_exits_has_failed_like_one_that_raises(leaving):
    with pytest.raises(RewardError, match=r"mine raised SystemExit on completion 0: 0"):
        call(mine=leaving)
    scores, log = call(on_error={"mine": "unscored"}, mine=leaving)
    assert np.isnan(scores["mine"]).all()
    assert log.failed == {"mine": 3}
