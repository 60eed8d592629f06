"""`rollout.prefixes`: texts in front of prompts, drawn by the rows that they win."""

from __future__ import annotations

import collections
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import resuming
import small_run

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Rollouts
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.prompts import PromptData, encode
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.rollout.policies import no_positive_resampling
from jaxgrpo.rollout.prefixes import PREFIX, Prefixes, make_prefixes, put_before
from jaxgrpo.rollout.selection import sequential
from jaxgrpo.training.loop import train
from jaxgrpo.training.records import rollout_files
from jaxgrpo.training.setup import setup

TOKENIZER = character_tokenizer("0123456789+= ")
CHAT = Chat(TOKENIZER, None, "none", None, {})
ROWS = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n}"} for n in range(1, 9)]
TEXTS = ["", "7 ", "1+1=2 "]
WEIGHTS = {"right": 1.0, "style": 0.0}


def make(keys, rows=None, limit=12) -> Prefixes | None:
    rows = rows or [dict(row) for row in ROWS]
    prompts = PromptData(rows, encode(rows, CHAT), 0)
    return make_prefixes(keys, prompts, CHAT, limit, WEIGHTS, seed=5)


def population(**keys) -> Prefixes:
    prefixes = make({"texts": TEXTS, "every": 3, **keys})
    assert prefixes is not None
    return prefixes


def judged(step, row, prefix, right) -> Rollouts:
    """What an `observe` reads of rollouts."""
    right = np.asarray(right, np.float32)
    count, samples = right.shape
    tokens = np.zeros((count, samples, 1), np.int32)
    arrays = {
        "prompt_tokens": tokens[:, 0],
        "prompt_mask": tokens[:, 0] == 0,
        "ordinal": np.arange(count, dtype=np.int32),
        "row": np.asarray(row, np.int32),
        "step": np.asarray(step, np.int32),
        "completion_tokens": tokens,
        "token_mask": tokens == 0,
        "behavior_logp": tokens.astype(np.float32),
        "rewards": {"right": right, "style": 1 - right},
        "truncated": tokens[..., 0] > 0,
        "policy_version": tokens[..., 0],
        "fields": {PREFIX: np.asarray(prefix, np.int32)},
    }
    return Rollouts(**arrays)  # pyright: ignore[reportArgumentType]


def wins_by_hand(batches, every, texts):
    """The wins after all batches (step, rows, prefixes, success rates), by dictionaries."""
    rates = collections.defaultdict(dict)  # row -> text -> rate
    wins = [1] * texts
    for step, rows, prefixes, new_rates in batches:
        for row, prefix, rate in zip(rows, prefixes, new_rates, strict=True):
            if rate is not None:
                rates[int(row)][int(prefix)] = rate
        if (step + 1) % every:
            continue
        telling = [by_text for by_text in rates.values() if len({*by_text.values()}) > 1]
        if set(range(texts)) <= {text for by_text in telling for text in by_text}:
            wins = [
                sum(by_text.get(text) == max(by_text.values()) for by_text in telling)
                for text in range(texts)
            ]
    return wins


@pytest.mark.parametrize("every", [1, 3])
def test_scripted_rewards_move_the_weights_as_counted_by_hand(every):
    prefixes = population(every=every)
    policy = prefixes.watch(sequential())
    state = policy.init(6, 0)
    assert state["wins"].tolist() == [1, 1, 1]
    random, batches, history = np.random.default_rng(0), [], []
    for step in range(24):
        row, prefix = random.integers(0, 6, 4), random.integers(0, 3, 4)
        right = (random.random((4, 2)) < np.array([0.2, 0.5, 0.9])[prefix][:, None]).astype(float)
        right[random.random((4, 2)) < 0.2] = np.nan
        rates = [None if np.isnan(group).all() else np.nanmean(group) for group in right]
        batches.append((step, row, prefix, rates))
        state = policy.observe(state, judged(step, row, prefix, right))
        history.append(state["wins"].tolist())
        assert history[-1] == wins_by_hand(batches, every, 3)
    assert len({tuple(wins) for wins in history}) > 3
    assert history[-1][2] > history[-1][0]


def test_what_wins_nowhere_is_not_drawn_and_the_others_in_proportion():
    prefixes = population()
    wins = np.array([1, 0, 3], np.int32)
    ordinals = np.arange(5000)
    drawn = prefixes.draw(wins, ordinals)
    assert (drawn != 1).all()
    # Four standard errors of 5,000 draws.
    assert (drawn == 2).mean() == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / 5000))
    np.testing.assert_array_equal(prefixes.draw(wins, np.array([17, 3])), drawn[[17, 3]])
    assert (prefixes._replace(seed=6).draw(wins, ordinals) != drawn).any()
    assert drawn.dtype == np.int32


def test_rows_where_all_are_equal_say_nothing_and_a_text_waits_for_one_that_tells():
    policy = population(every=1).watch(sequential())

    def wins(*groups):
        row, prefix, right = zip(*groups, strict=True)
        return policy.observe(policy.init(4, 0), judged(0, row, prefix, right))["wins"].tolist()

    fail, half, won = [0.0, 0.0], [0.0, 1.0], [1.0, 1.0]
    flat = [(0, 0, fail), (0, 1, fail), (0, 2, fail), (1, 0, won), (1, 1, won), (1, 2, won)]
    assert wins(*flat) == [1, 1, 1]
    assert wins(*flat, (2, 0, half), (2, 1, fail)) == [1, 1, 1]  # text 2 was on no such row
    assert wins(*flat, (2, 0, half), (2, 1, fail), (2, 2, half)) == [1, 0, 1]
    assert wins(*flat, (2, 0, half), (2, 1, fail), (3, 2, won), (3, 0, fail)) == [1, 0, 1]


def test_the_policy_inside_selects_and_learns_as_it_does_alone():
    inner = no_positive_resampling(weights=WEIGHTS)
    policy = population().watch(inner)
    alone, state = inner.init(8, 3), policy.init(8, 3)
    for step in range(4):
        ordinals = policy.select(state, 8 * step, 4)
        np.testing.assert_array_equal(ordinals, inner.select(alone, 8 * step, 4))
        rollouts = judged(step, ordinals % 8, [0, 1, 2, 0], np.eye(4)[:, :2])
        alone, state = inner.observe(alone, rollouts), policy.observe(state, rollouts)
    resuming.assert_same_bits(state["policy"], alone)
    assert policy.chance is not None
    assert inner.chance is not None
    np.testing.assert_array_equal(policy.chance(state, 4), inner.chance(alone, 4))


def test_a_text_is_written_in_front_of_the_prompt_or_of_the_first_message_of_the_user():
    prefixes = population()
    for text, encoded in zip(TEXTS, prefixes.encoded, strict=True):
        texts = [str(TOKENIZER.decode(ids)) for ids in encoded]
        assert [line.replace(" ", "") for line in texts] == [
            (text + row["prompt"]).replace(" ", "") for row in ROWS
        ]
        assert [ids.dtype for ids in encoded] == [np.int32] * 8
    turns = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": text} for role, text in turns]
    texts = [message["content"] for message in put_before(messages, "T ")]
    assert texts == ["S", "T a", "b", "c"]
    assert messages[1]["content"] == "a"
    with pytest.raises(InputError, match="no message of the user"):
        put_before(messages[:1], "T ")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"texts": []}, "expected { texts = "),
        ({"texts": "7 "}, "expected { texts = "),
        ({"texts": ["7", "7"]}, "different texts"),
        ({"texts": [7]}, "expected { texts = "),
        ({"every": 0}, "and a number of steps"),
        ({"every": 2.0}, "and a number of steps"),
        ({"often": 2}, "expected { texts = "),
        ({"success": "all"}, "may say what a success is"),
        ({"reward": "rihgt"}, "reward = 'rihgt' is none of the rewards: did you mean 'right'"),
        (
            {"texts": ["", "1+1=2 2+2=4 "]},
            "'1+1=2 2+2=4 ': 8 of 8 prompts with it are longer than rollout.max_prompt_tokens = "
            "12 (the longest has 16 tokens): set it to 16",
        ),
    ],
)
def test_what_is_no_population_is_refused(keys, message):
    with pytest.raises(InputError) as caught:
        make({"texts": TEXTS, "every": 3, **keys})
    assert str(caught.value).startswith("rollout.prefixes")
    assert message in str(caught.value)


def by_prefix(**options):
    """An advantage that reads the number of the text, [P]."""

    def centred(signal, rollouts):
        number = rollouts.fields[PREFIX].astype(jnp.float32)[:, None]
        value = jnp.where(signal.mask, signal.value - 0.1 * number, 0)
        return dataclasses.replace(signal, value=value)

    return jaxgrpo.transform(centred)._replace(needs=frozenset({PREFIX}))


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture(scope="module")
def changes(rows_file):
    """Of runs whose rows come again in each step, with other texts."""
    return {
        "data.path": str(rows_file),
        "rollout.prefixes": {"texts": TEXTS, "every": 2, "reward": "digits", "success": 0.9},
        "rollout.max_prompt_tokens": 12,
        "advantage": [{"use": "sum_rewards"}, {"use": f"{__file__}:by_prefix"}],
        "train.steps": 5,
        "checkpoint.every": 2,
        "run.rollouts_every": 1,
        "run.samples_every": 1,
    }


@pytest.fixture(scope="module")
def run(changes, tmp_path_factory):
    return train(small_run.config(tmp_path_factory.mktemp("prefixes") / "r", **changes))


@pytest.mark.full
@pytest.mark.slow
def test_one_empty_text_is_the_plain_run_bit_for_bit(tmp_path):
    hashes = []
    for name, texts in (("plain", None), ("empty", [""])):
        prefixes = texts and {"texts": texts, "every": 1}
        keys = {} if prefixes is None else {"rollout.prefixes": prefixes}
        keys |= {"rollout.prompts": {"use": "no_positive_resampling"}}
        finished = train(small_run.config(tmp_path / name, **keys))
        hashes.append(finished.summary["parameter_hash"])
        lines = small_run.metrics(finished.path)
        assert all(line.pop("prompts/prefix_0", 1) == 1 for line in lines)
        for line in lines:
            assert line.pop("reward/prefix_0", line["reward"]) == pytest.approx(line["reward"])
        hashes.append(lines)
    assert hashes[:2] == hashes[2:]


@pytest.mark.slow
def test_each_prompt_was_sampled_with_the_text_that_its_field_says(run, changes):
    batches, drawn = [], set()
    for number, file in enumerate(sorted((run.path / "rollouts").glob("*.safetensors"))):
        rollouts = rollout_files.load(file)
        prefix = np.asarray(rollouts.fields[PREFIX])
        assert prefix.dtype == np.int32
        assert prefix.shape == (8,)
        expected = [
            TOKENIZER(TEXTS[text] + ROWS[row]["prompt"], add_special_tokens=False)["input_ids"]
            for text, row in zip(prefix, np.asarray(rollouts.row), strict=True)
        ]
        lengths = np.asarray(rollouts.prompt_mask).sum(1)
        assert lengths.tolist() == [len(ids) for ids in expected]
        digits = np.asarray(rollouts.rewards["digits"])
        assert np.isfinite(digits).any(1).all()
        right = np.where(np.isfinite(digits), digits >= np.float32(0.9), np.nan)
        batches.append((number, np.asarray(rollouts.row), prefix, np.nanmean(right, 1).tolist()))
        drawn |= {*prefix.tolist()}
    assert drawn == {0, 1, 2}
    state = run.stream.prompt_policy_state
    assert state["wins"].tolist() == wins_by_hand(batches, 2, 3)
    assert state["wins"].tolist() != [1, 1, 1]
    line = small_run.metrics(run.path)[-1]
    rows = [json.loads(text) for text in (run.path / "samples/step_5.jsonl").open()]
    assert [row["prefix"] for row in rows[::4]] == [TEXTS[text] for text in batches[-1][2]]
    assert [row["prompt"] for row in rows[::4]] == [ROWS[row]["prompt"] for row in batches[-1][1]]
    shares = [line[f"prompts/prefix_{number}"] for number in range(3)]
    assert shares == pytest.approx([(batches[-1][2] == number).mean() for number in range(3)])


@pytest.mark.full
@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(changes, tmp_path):
    waiting = {**changes, "rollout.refill": {"factor": 2.0}, "rollout.staleness": 1}
    waiting |= {"advantage": [{"use": "sum_rewards"}, {"use": "subtract_group_mean"}]}
    again = train(small_run.config(tmp_path / "again", **waiting))
    resumed = resuming.died_and_resumed(small_run.config(tmp_path / "r", **waiting), step=3)
    assert resumed.summary["parameter_hash"] == again.summary["parameter_hash"]
    resuming.assert_same_bits(resumed.stream, again.stream)
    assert PREFIX in again.stream.waiting.ahead[0].fields
    assert again.stream.prompt_policy_state["wins"].tolist() != [1, 1, 1]


@pytest.mark.full
@pytest.mark.slow
def test_a_replay_of_its_files_reads_the_field_and_ends_with_its_parameters(run, changes, tmp_path):
    files = sorted((run.path / "rollouts").glob("*.safetensors"))
    with pytest.raises(InputError, match=r"replay: with rollout.prefixes prompts begin as"):
        train(small_run.config(tmp_path / "refused", **changes), rollouts=files)
    plain = {name: value for name, value in changes.items() if name != "rollout.prefixes"}
    again = train(small_run.config(tmp_path / "r", **plain), rollouts=files)
    assert again.summary["parameter_hash"] == run.summary["parameter_hash"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rollout.max_prompt_tokens": 8}, "'1+1=2 ': 8 of 8 prompts with it are longer"),
        (
            {"experience.share": 0.5},
            "with rollout.prefixes a kept sample would follow another prompt",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(changes, more, message, tmp_path):
    with pytest.raises(InputError) as caught:
        setup(small_run.config(tmp_path, **{**changes, **more}))
    assert message in str(caught.value)
