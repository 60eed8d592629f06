"""Samples that go on after a turn: with what others say in between, in any slot, at any time."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from lettering import Letters

from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.serving.dialect import Prompted
from jaxgrpo.environments.serving.fields import Wish
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import AttentionKind, LayerKind
from jaxgrpo.models.sequences import call_alone
from jaxgrpo.rollout.batch import Batch
from jaxgrpo.rollout.desk import Desk
from jaxgrpo.rollout.engine import Request, SamplingSettings
from jaxgrpo.rollout.slots import capacity, decoding, driver, replying, table
from jaxgrpo.rollout.slots.capacity import Sizes
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.slots.state import Drawn
from jaxgrpo.rollout.stopping import StopStrings

KEY = jax.random.key_data(jax.random.key(3))
WINDOWS = dataclasses.replace(
    tiny.UNIFORM, pattern=(LayerKind(AttentionKind(window=29)), LayerKind())
)
"""Its rings have few columns more than the window, which samples are longer than."""
PROMPTS, GROUP, WIDTH, STEPS, LIMIT = 5, 3, 6, 48, 8


def settings(**changes):
    return SamplingSettings(STEPS, 1.0, (tiny.END,), tiny.PAD, 4, max_turns=4)._replace(**changes)


def reply(sample, turn):
    """What is said between two turns: 0 to 9 tokens."""
    random = np.random.default_rng([*sample, turn])
    return random.integers(3, tiny.VOCAB, random.integers(0, 10)).astype(np.int32)


@pytest.fixture
def in_chunks(monkeypatch):
    """Replies of 3 tokens or more are computed in chunks of 4, of two samples at a time."""
    monkeypatch.setattr(table, "LEAST_CHUNKED", {"cpu": 3})
    for module in (table, replying):
        monkeypatch.setattr(module, "CHUNK", 4)
    monkeypatch.setattr(table, "CHUNK_TOKENS", 8)


def converse(turns, delay=0, config=tiny.UNIFORM, mesh=None, **changes):
    """Every sample in `turns` turns of at most LIMIT tokens, whose replies come `delay` polls late
    at most. Returns: (ordinal, sample) -> tokens, log-probs and reasons of its turns; its request
    for the last one; the slot-steps."""
    prompts, sampling = tiny.prompts(PROMPTS, WIDTH), settings(**changes)
    model, params = tiny.model(config), tiny.params(config)
    if mesh is not None:
        model = decoder.build(config, constrain=sharding.constrain(mesh))
        layout = sharding.param_shardings(mesh, model.axes, model.shapes, sharding.SAMPLING)
        params = jax.device_put(params, layout)
    engine = SlotEngine(model, sampling, mesh, width=prompts.prompt_tokens.shape[1])
    engine.load(params, 0)
    first = Batch(prompts, GROUP, sampling).requests(KEY)
    first = [request._replace(limit=LIMIT) for request in first]
    requests = {(request.ordinal, request.sample): request for request in first}
    spoken = {sample: [] for sample in requests}
    engine.submit(first, GROUP)
    random, waiting, polls, running = np.random.default_rng(delay), [], 0, len(first)
    while running:
        going_on = [(request.ordinal, request.sample) for _, request in waiting]
        ended, polls, more = engine.poll(len(waiting), going_on), polls + 1, []
        for turn in ended:
            sample = turn.ordinal, turn.sample
            spoken[sample].append(turn)
            words, request = reply(sample, len(spoken[sample])), requests[sample]
            offset = request.offset + len(turn.tokens) + len(words)
            if len(spoken[sample]) == turns or offset >= STEPS:
                running -= 1
                continue
            requests[sample] = request._replace(
                tokens=np.concatenate([request.tokens, turn.tokens, words]),
                offset=offset,
                limit=min(LIMIT, STEPS - offset),
            )
            waiting.append((polls + int(random.integers(0, delay + 1)), requests[sample]))
        more = [request for due, request in waiting if due <= polls]
        waiting = [entry for entry in waiting if entry[0] > polls]
        engine.submit(more)
    engine.unload()
    return spoken, requests, int(engine.slot_steps)


@functools.cache
def expected(config=tiny.UNIFORM):
    return converse(4, config=config)


def assert_same(spoken, config=tiny.UNIFORM):
    for sample, turns in expected(config)[0].items():
        assert [turn.reason for turn in spoken[sample]] == [turn.reason for turn in turns]
        for turn, alike in zip(spoken[sample], turns, strict=True):
            np.testing.assert_array_equal(turn.tokens, alike.tokens)
            np.testing.assert_allclose(turn.logp, alike.logp, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "delay", "read"),
    [
        (4, 6, 64),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((0, 9, 2), (4, 0, 64), (7, 3, 1))
        ),
    ],
)
def test_tokens_depend_neither_on_slots_nor_on_when_a_reply_comes(monkeypatch, slots, delay, read):
    for module in (decoding, driver):  # samples that a segment gives back, and others are asked for
        monkeypatch.setattr(module, "READ", read)
    assert_same(converse(4, delay, slots=slots)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (tiny.UNIFORM, None),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (tiny.LOCAL_GLOBAL, None),
                (tiny.HYBRID, None),
                (tiny.HYBRID, {"data": 2, "tensor": 2}),
            )
        ),
    ],
    ids=["full", "windows", "states", "four devices"],
)
def test_others_decode_in_the_slots_of_samples_that_wait_for_replies(monkeypatch, config, mesh):
    axes = {} if mesh is None else {"mesh": sharding.make_mesh(**mesh)}
    spoken, _, slot_steps = converse(4, 8, config, slots=4, **axes)
    assert_same(spoken, config)
    monkeypatch.setattr(capacity, "PARKING", ())
    spoken, _, in_slots = converse(4, 8, config, slots=4, **axes)
    assert_same(spoken, config)
    assert slot_steps < 0.9 * in_slots


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "config"),
    [
        (4, tiny.UNIFORM),
        pytest.param(6, tiny.LOCAL_GLOBAL, marks=pytest.mark.full),
        pytest.param(6, tiny.HYBRID, marks=pytest.mark.full),
    ],
    ids=["full", "windows", "states"],
)
def test_replies_in_chunks_are_those_that_are_fed(in_chunks, slots, config):
    expected(config)
    assert_same(converse(4, 2, config, slots=slots)[0], config)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "tensor": 2}])
def test_tokens_are_those_of_one_device_on_four(axes):
    assert_same(converse(4, 3, mesh=sharding.make_mesh(**axes))[0])


@pytest.mark.full
def test_samples_with_states_have_the_tokens_of_one_device_on_four():
    mesh = sharding.make_mesh(data=2, tensor=2)
    assert_same(converse(4, 3, tiny.HYBRID, mesh, slots=8)[0], tiny.HYBRID)


@pytest.mark.full
def test_windows_reach_back_over_turns():
    config = tiny.LOCAL_GLOBAL
    assert_same(converse(4, 2, config, slots=6)[0], config)


@pytest.mark.full
def test_slots_become_fewer_as_conversations_end():
    all_slots = PROMPTS * GROUP
    spoken, _, slot_steps = converse(4, 6, slots=all_slots)
    assert_same(spoken)
    assert slot_steps % all_slots  # it would be 0 if all slots took all steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        tiny.UNIFORM,
        *(pytest.param(c, marks=pytest.mark.full) for c in (tiny.LOCAL_GLOBAL, tiny.HYBRID)),
    ],
    ids=["full", "windows", "states"],
)
def test_log_probs_are_those_of_the_whole_conversation(config):
    assert_log_probs(*expected(config)[:2], config)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "slots"),
    [(tiny.UNIFORM, 0), (tiny.UNIFORM, 4), (WINDOWS, 4)],
    ids=["full", "few slots", "windows"],
)
def test_turns_that_stop_strings_end_go_on_behind_them(config, slots):
    strings = StopStrings(Letters(), ["F", "BC"])
    spoken, requests, _ = converse(4, 2, config, slots=slots, stop_strings=strings)
    reasons = {turn.reason for turns in spoken.values() for turn in turns}
    assert {"string", "length"} <= reasons
    assert_log_probs(spoken, requests, config)


@pytest.mark.slow
def test_states_are_refused_where_strings_would_take_tokens_back():
    with pytest.raises(InputError, match=r"rollout.stop_strings: .* states"):
        converse(2, config=tiny.HYBRID, stop_strings=StopStrings(Letters(), ["F"]))


@functools.partial(jax.jit, static_argnums=0)
def whole_pass(config, params, tokens):
    """Log-probs [n, V] of one pass over a conversation, padded at its end for one program."""
    position = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    caller = call_alone(position, jnp.ones_like(position, bool))
    hidden, _ = tiny.model(config).apply(params, tokens[None], position, caller, None)
    logits = tiny.model(config).unembed(params, hidden)[0]
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def assert_log_probs(spoken, requests, config=tiny.UNIFORM):
    """That they are those of one pass over the whole conversation."""
    params = tiny.params(config)
    for sample, turns in spoken.items():
        tokens = np.concatenate([requests[sample].tokens, turns[-1].tokens])
        padded = np.pad(tokens, (0, WIDTH + STEPS - len(tokens)))
        logp = np.asarray(whole_pass(config, params, padded))
        end = len(tokens)
        for number, turn in enumerate(reversed(turns)):
            begin = end - len(turn.tokens)
            places = np.arange(begin, end)
            np.testing.assert_array_equal(tokens[places], turn.tokens)
            np.testing.assert_allclose(turn.logp, logp[places - 1, tokens[places]], atol=1e-5)
            end = begin - len(reply(sample, len(turns) - number - 1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_turns": 1}, r"prompt 0: a further turn, .* max_turns = 1"),
        ({}, r"prompt 0: its tokens are to be .* own_rows = False"),
    ],
    ids=["one turn", "rows have no room"],
)
def test_tokens_in_chunks_are_refused_where_the_settings_have_none(changes, reason):
    prompts, sampling = tiny.prompts(1), settings(**changes)
    engine = SlotEngine(tiny.model(), sampling, width=prompts.prompt_tokens.shape[1])
    engine.load(tiny.params(), 0)
    (request,) = Batch(prompts, 1, sampling).requests(KEY)
    tokens = np.append(request.tokens, np.int32(5))
    with pytest.raises(InputError, match=reason):
        engine.submit([request._replace(tokens=tokens, offset=1, limit=3, chunked=True)])


@pytest.mark.parametrize(
    ("prompt_tail", "end"), [(0, 2), (5, -1)], ids=["the sample's", "the prompt's"]
)
def test_the_fewest_tokens_count_those_of_the_sample_that_a_row_holds(prompt_tail, end):
    strings = StopStrings(Letters(), ["FG"])
    sampling = settings(stop_strings=strings, own_rows=True, min_completion_tokens=6)
    request = Request(0, 0, np.arange(8, dtype=np.int32), 5, LIMIT, np.asarray(KEY), chunked=True)
    request = request._replace(prompt_tail=prompt_tail)
    samples = table.Table(Sizes.for_prompts(1, 1, 1, 1, WIDTH, STEPS), sampling, "cpu")
    samples.add(table.group_requests([request]))
    samples.enter(0)
    drawn = sharding.to_host(Drawn(jnp.array([[3]]), jnp.array([[[-1, 5, 6, 7]]])))
    assert samples.stops(drawn, 0).tolist() == [[end]]


@pytest.mark.slow
def test_a_desk_draws_the_fewest_tokens_behind_a_prompt_of_any_length():
    sampling = settings(own_rows=True, min_completion_tokens=12)
    desk = Desk(SlotEngine(tiny.model(), sampling, width=WIDTH), WIDTH, 8, Letters(), seed=0)
    desk.open(tiny.params(), 0)
    try:
        prompt = [*range(3, 3 + WIDTH + 11)]
        (completions,) = desk.draw(Prompted(Wish([prompt], 64, STEPS - 11, False, seed=1)))
    finally:
        desk.close()
    lengths = [len(completion.tokens) for completion in completions if completion.finish == "stop"]
    assert lengths
    assert min(lengths) > 12
