"""The engine as its interface says: requests at any time, turns as they end, turns that go on."""

import functools

import jax
import numpy as np
import pytest
import tiny
from engines import draw_all

from jaxgrpo.core.errors import InputError
from jaxgrpo.models import decoder, sharding
from jaxgrpo.rollout.batch import Batch, in_background
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.driver import SlotEngine

KEY = jax.random.key_data(jax.random.key(3))
GROUP, STEPS, WIDTH = 3, 24, 6


@functools.cache
def engine(**changes) -> SlotEngine:
    settings = SamplingSettings(STEPS, 1.0, (tiny.END,), tiny.PAD, 4)
    return SlotEngine(tiny.model(), settings._replace(**changes), width=WIDTH)


def requests(prompts, group=GROUP, **options):
    return Batch(prompts, group, engine().settings).requests(KEY, **options)


def poll_all(slots, version=0):
    """All turns that are under way, by (ordinal, sample)."""
    turns = {}
    while new_turns := slots.poll():
        turns |= {(turn.ordinal, turn.sample): turn for turn in new_turns}
    assert all((turn.version == version).all() for turn in turns.values())
    return turns


def assert_same(turns, expected, tolerance=1e-5):
    assert turns.keys() == expected.keys()
    for name, turn in turns.items():
        np.testing.assert_array_equal(turn.tokens, expected[name].tokens)
        np.testing.assert_allclose(turn.logp, expected[name].logp, atol=tolerance)
        assert turn.reason == expected[name].reason


def drawn_alone(requests, **changes):
    slots = engine(**changes)
    slots.load(tiny.params(), 0)
    slots.submit(requests)
    turns = poll_all(slots)
    slots.unload()
    return turns


@pytest.mark.full
@pytest.mark.parametrize("slots", [pytest.param(4, marks=pytest.mark.full), 0])
def test_requests_that_come_while_others_decode_are_drawn_as_by_themselves(slots):
    first, later = requests(tiny.prompts(12), group=1), requests(tiny.prompts(9, seed=5), greedy=1)
    later = [request._replace(ordinal=request.ordinal + 100) for request in later]
    expected = drawn_alone(first) | drawn_alone(later)
    busy = engine(slots=slots)
    busy.load(tiny.params(), 7)
    busy.submit(first)
    turns = {(turn.ordinal, turn.sample): turn for turn in busy.poll()}
    assert 0 < len(turns) < len(first)
    for begin in range(0, len(later), 10):
        busy.submit(later[begin : begin + 10])
        turns |= {(turn.ordinal, turn.sample): turn for turn in busy.poll()}
    turns |= poll_all(busy, version=7)
    busy.unload()
    assert_same(turns, expected)


@pytest.mark.full
@pytest.mark.slow
def test_groups_of_any_size_are_drawn_side_by_side():
    some_requests = requests(tiny.prompts(6))
    some_requests = [
        request for request in some_requests if request.sample <= request.ordinal % GROUP
    ]
    expected = drawn_alone(requests(tiny.prompts(6)))
    assert_same(
        drawn_alone(some_requests, slots=4),
        {(r.ordinal, r.sample): expected[r[:2]] for r in some_requests},
    )


@pytest.mark.full
@pytest.mark.slow
def test_a_turn_that_ends_at_its_limit_goes_on_as_if_it_had_not():
    unbroken = drawn_alone(requests(tiny.prompts(4)))
    some_requests = [request._replace(limit=5) for request in requests(tiny.prompts(4))]
    halves = drawn_alone(some_requests)
    assert {turn.reason for turn in halves.values()} == {"end", "length"}
    second = [
        request._replace(
            tokens=np.concatenate([request.tokens, halves[request[:2]].tokens]),
            offset=5,
            limit=STEPS - 5,
        )
        for request in some_requests
        if halves[request[:2]].reason == "length"
    ]
    rest = drawn_alone(second)
    assert len(rest) > 3
    for name, turn in halves.items():
        tail = rest.get(name)
        tokens = [turn.tokens, *([] if tail is None else [tail.tokens])]
        logp = [turn.logp, *([] if tail is None else [tail.logp])]
        np.testing.assert_array_equal(np.concatenate(tokens), unbroken[name].tokens)
        np.testing.assert_allclose(np.concatenate(logp), unbroken[name].logp, atol=3e-5)
        assert (tail or turn).reason == unbroken[name].reason


@pytest.mark.full
def test_no_slots_are_given_up_for_further_turns_while_samples_are_still_to_come():
    """Of prompt 1 four samples come, then their further turns, then four more samples."""
    slots = engine(max_completion_tokens=64, stop_tokens=())
    long, *short = requests(tiny.prompts(2), group=8)
    short = [request._replace(limit=4) for request in short]
    first, later = short[:-4], short[-4:]
    slots.load(tiny.params(), 0)
    slots.submit([long._replace(limit=64), *first], 8)
    turns = {turn.sample: turn for turn in slots.poll()}
    further = [
        request._replace(tokens=np.append(request.tokens, turns[request.sample].tokens), offset=4)
        for request in first[-4:]
    ]
    for more in (further, later):
        slots.submit(more)
        assert {turn.ordinal for turn in slots.poll()} == {1}  # and not once prompt 0 has ended
    assert {ordinal for ordinal, _ in poll_all(slots)} == {0}
    slots.unload()


@pytest.mark.full
def test_one_engine_serves_batches_of_several_group_sizes():
    shared = engine()
    for group, seed in ((3, 0), (5, 1), (3, 0)):
        prompts = tiny.prompts(4, seed=seed)
        rollouts = draw_all(shared, tiny.params(), prompts, KEY, group)
        expected = tiny.whole_logps(tiny.UNIFORM, tiny.params(), rollouts)
        assert rollouts.token_mask.shape[:2] == (4, group)
        np.testing.assert_allclose(rollouts.behavior_logp, expected, atol=3e-5)


@pytest.mark.full
def test_a_prompt_that_is_there_twice_is_drawn_once(monkeypatch):
    prompts = jax.tree.map(np.copy, tiny.prompts(4))
    for name in ("prompt_tokens", "prompt_mask", "ordinal", "row"):
        getattr(prompts, name)[3] = getattr(prompts, name)[1]
    assert len(requests(prompts)) == 3 * GROUP
    rollouts = draw_all(engine(), tiny.params(), prompts, KEY, GROUP)
    np.testing.assert_array_equal(rollouts.completion_tokens[3], rollouts.completion_tokens[1])
    assert rollouts.token_mask[3].any()


@pytest.mark.full
@pytest.mark.slow
def test_prompts_need_not_divide_over_the_devices():
    mesh = sharding.make_mesh(data=4)
    model = decoder.build(tiny.UNIFORM, constrain=sharding.constrain(mesh))
    layout = sharding.param_shardings(mesh, model.axes, model.shapes, sharding.SAMPLING)
    four = SlotEngine(model, engine().settings, mesh, width=WIDTH)
    four.load(jax.device_put(tiny.params(), layout), 0)
    four.submit(requests(tiny.prompts(5)))
    assert_same(poll_all(four), drawn_alone(requests(tiny.prompts(5))), tolerance=3e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 0}, "0 tokens behind 0, expected 1 or more"),
        ({"limit": STEPS + 1}, f"at most max_completion_tokens = {STEPS}"),
        ({"tokens": np.arange(2, 9)}, "7 tokens, expected 1 to 6"),
        ({"tokens": np.array([3, -1])}, r"prompt 0\[1\] = -1, expected a whole number"),
    ],
)
def test_a_request_that_cannot_be_drawn_is_refused_and_nothing_begins(changes, message):
    good, *_ = requests(tiny.prompts(1))
    slots = engine()
    slots.load(tiny.params(), 0)
    with pytest.raises(InputError, match=message):
        slots.submit([good, good._replace(**changes)])
    assert slots.poll() == []
    slots.unload()


def test_parameters_are_loaded_before_anything_is_drawn_and_not_in_between():
    slots = engine()
    slots.submit(requests(tiny.prompts(2)))
    with pytest.raises(ValueError, match="load them first"):
        slots.poll()
    with pytest.raises(ValueError, match="poll until all have ended"):
        slots.load(tiny.params(), 1)
    slots.unload()
    slots.load(tiny.params(), 1)
    assert slots.poll() == []
    slots.unload()


def test_what_is_made_in_the_background_ends_with_its_reader():
    yielded, is_closed = [], []

    def numbers():
        try:
            for number in range(1000):
                yielded.append(number)
                yield number
        finally:
            is_closed.append(True)

    assert [*in_background(numbers())] == [*range(1000)]
    yielded.clear()
    reader = in_background(numbers())
    assert next(reader) == 0
    reader.close()
    assert is_closed == [True, True]


def test_what_fails_in_the_background_fails_for_its_reader():
    def breaks():
        yield 1
        raise OSError("no device")

    reader = in_background(breaks())
    assert next(reader) == 1
    with pytest.raises(OSError, match="no device"):
        next(reader)
