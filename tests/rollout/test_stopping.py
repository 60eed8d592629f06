"""What ends a sample beside an end token: strings in its text, and too little confidence."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from engines import draw_all
from lettering import Letters
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxgrpo.models.logprobs import confidence_from_logits
from jaxgrpo.rollout.engine import Request, SamplingSettings
from jaxgrpo.rollout.slots import table
from jaxgrpo.rollout.slots.capacity import Sizes
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.slots.state import Drawn
from jaxgrpo.rollout.stopping import EarlyStop, StopStrings
from jaxgrpo.rollout.texts import decode_texts
from jaxgrpo.rollout.trees import DEPTH, Trees

KEY = jax.random.key_data(jax.random.key(3))
GROUP, STEPS = 3, 12


@functools.cache
def engine(width, **changes):
    settings = SamplingSettings(STEPS, 1.0, (tiny.END,), tiny.PAD, 8)
    return SlotEngine(tiny.model(), settings._replace(**changes), width=width)


def run(prompts=None, **changes):
    prompts = tiny.prompts(9, seed=5) if prompts is None else prompts
    width = prompts.prompt_tokens.shape[1]
    return draw_all(engine(width, **changes), tiny.params(), prompts, KEY, GROUP)


def byte_tokenizer():
    """A tokenizer whose tokens are bytes, so that letters beyond ASCII take several."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def fallback_tokenizer():
    """A tokenizer of Llama 2's kind: token n below 256 is byte n, and characters that are no tokens
    are written by these."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_rewards_get_the_text_in_which_stop_strings_are_found():
    """A tokenizer of Llama 3's kind would take out the space: "1. 2"."""
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["1", "2", ".", "x"])}, "x")
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    ids = [0, 2, 1]
    assert StopStrings(tokenizer, [" ."]).end(np.asarray(ids), 0) == 2
    assert decode_texts(tokenizer, [ids]) == ["1 . 2"] != tokenizer.batch_decode([ids])


def test_the_end_is_the_token_that_completes_the_first_string():
    tokenizer = byte_tokenizer()
    stop = StopStrings(tokenizer, ["</a>", "é"])
    tokens = np.asarray(tokenizer("è 12</a</a> é")["input_ids"])
    assert stop.end(tokens, 0) == len(tokenizer("è 12</a</a>")["input_ids"])
    assert stop.end(tokens[:-4], 0) is None
    # Fewest tokens: a string that is complete before ends the sample as soon as it may end.
    assert stop.end(tokens, 0, fewest=len(tokens)) == len(tokens)


def test_bytes_in_a_row_neither_hide_nor_hold_a_stop_string():
    tokenizer = fallback_tokenizer()
    stop = StopStrings(tokenizer, ["\n"])
    tokens = np.asarray(tokenizer("a繁體\n字字字字")["input_ids"])
    assert {stop.end(tokens[:size], 7) for size in range(8, 21)} == {8}
    malformed = np.array([0xFF, *[ord("\n")] * 20])  # its text is 21 times U+FFFD
    assert {stop.end(malformed, searched) for searched in range(20)} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("fewest", [0, 50])
@pytest.mark.parametrize(
    ("make", "text", "strings"),
    [
        (byte_tokenizer, "aéb</x>é", ["aé", "</x"]),
        (fallback_tokenizer, "繁體❤️\n字 a", ["\n體\n", "\na"]),
    ],
    ids=["bytes", "characters or bytes"],
)
def test_looking_piece_by_piece_finds_the_same_end(make, text, strings, fewest):
    """Of all its tokens in any order, and of its characters in any order with some stray bytes."""
    tokenizer, random = make(), np.random.default_rng(0)
    stop = StopStrings(tokenizer, strings)
    single = [[token] for token in tokenizer(text)["input_ids"]]
    characters = [tokenizer(letter)["input_ids"] for letter in text] * 5 + single[:1]
    ends = 0
    for trial in range(60):
        pieces = single if trial % 2 else characters
        places = random.integers(0, len(pieces), 200)
        tokens = np.concatenate([pieces[place] for place in places])[:200]
        sizes = range(max(1, fewest), 201)
        prefixes = (n for n in sizes if stop.end(tokens[:n], n - 1, fewest) == n)
        texts = (n for n in sizes if stop._is_in(tokens[:n]))
        want, searched, end = next(texts, None), 0, None
        assert next(prefixes, None) == want
        while end is None and searched < len(tokens):
            upto = searched + int(random.integers(1, 40))
            end, searched = stop.end(tokens[:upto], searched, fewest), upto
        assert end == stop.end(tokens, 0, fewest) == want
        ends += want is not None
    assert 10 < ends < 60


def test_the_work_of_a_search_grows_with_the_tokens_and_not_with_their_square():
    tokenizer, sizes = byte_tokenizer(), []
    stop = StopStrings(tokenizer, ["</x"])
    text = stop._text
    stop._text = lambda tokens: sizes.append(len(tokens)) or text(tokens)
    tokens = np.asarray(tokenizer("a" * 2000 + "</x")["input_ids"])
    assert stop.end(tokens, 0) == len(tokens) == 2003
    assert sum(sizes) < 10 * len(tokens)


def cut(plain, ends):
    """Lengths of samples and which are ended, if `ends(tokens, place)` gives a length or None."""
    length = plain.token_mask.sum(-1)
    new, ended = length.copy(), np.zeros(length.shape, bool)
    for place in np.ndindex(length.shape):
        end = ends(plain.completion_tokens[place][: length[place]], place)
        if end is not None:
            new[place], ended[place] = end, True
    assert 3 < (new < length).sum() < length.size
    return new, ended


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(
            pytest.param(changes, marks=pytest.mark.full)
            for changes in ({"segment_tokens": 5}, {"slots": 1}, {"slots": 8})
        ),
    ],
)
def test_samples_end_exactly_with_a_stop_string(changes):
    plain = run(min_completion_tokens=3)
    strings = ["F", "BC", "Z"]
    stop = StopStrings(Letters(), strings)
    stopped = run(stop_strings=stop, min_completion_tokens=3, **changes)

    def end(tokens, _):
        text = Letters().decode(tokens, False)
        counts = (n for n in range(3, len(text) + 1) if any(s in text[:n] for s in strings))
        return next(counts, None)

    length, ended = cut(plain, end)
    live = np.arange(STEPS) < length[..., None]
    np.testing.assert_array_equal(stopped.token_mask, live)
    np.testing.assert_array_equal(
        stopped.completion_tokens, np.where(live, plain.completion_tokens, tiny.PAD)
    )
    np.testing.assert_allclose(
        stopped.behavior_logp, np.where(live, plain.behavior_logp, 0), atol=1e-5
    )
    np.testing.assert_array_equal(stopped.truncated, plain.truncated & ~ended)


@pytest.mark.full
@pytest.mark.slow
def test_a_forced_prefix_holds_no_stop_string():
    prompts = tiny.prompts()
    forced = np.full((4, GROUP, 3), -1, np.int32)
    forced[:, 0], forced[:, 1, 0] = [5, 5, 5], 7
    prompts = dataclasses.replace(prompts, forced_prefix=forced)
    plain = run(prompts=prompts)
    stopped = run(prompts=prompts, stop_strings=StopStrings(Letters(), ["F"]))
    for place in np.ndindex(4, GROUP):
        drawn = plain.completion_tokens[place][plain.token_mask[place]]
        hits = np.flatnonzero(drawn == 5)
        want = drawn[: hits[0] + 1] if hits.size else drawn
        np.testing.assert_array_equal(
            stopped.completion_tokens[place][stopped.token_mask[place]], want
        )


@pytest.mark.parametrize(("drawn", "end"), [(2, 3), (0, -1)], ids=["a branch", "a goal"])
def test_a_string_may_begin_in_tokens_that_a_branch_has_of_another_sample(drawn, end):
    """Tokens 2, 3, 4 are C, D, E: behind "CD" the first letter that is drawn completes "CDE"."""
    strings = StopStrings(Letters(), ["CDE"])
    settings = SamplingSettings(STEPS, 1.0, (tiny.END,), tiny.PAD, 4, stop_strings=strings)
    tokens, key = np.array([9, 2, 3], np.int32), np.asarray(KEY)
    request = Request(0, 0, tokens, 2, STEPS - 2, key, drawn=drawn)
    samples = table.Table(Sizes.for_prompts(1, 1, 1, 1, 4), settings, "cpu")
    samples.add(table.group_requests([request]))
    samples.enter(0)
    on_host: Any = np.array([[2]]), np.array([[[-1, -1, 4, 5]]], np.int32)
    newest = Drawn(*on_host)
    assert samples.stops(newest, 0).tolist() == [[end]]


@pytest.mark.full
def test_leaves_of_trees_end_with_the_first_string_of_their_text():
    """Each string is an F and the letter behind it, so that branches begin within strings too."""
    strings = ["F" + Letters().decode([token], False) for token in range(tiny.VOCAB)]
    trees = Trees("uniform", 1, 8, 1, 1, 1, 9, STEPS)
    prompts = tiny.prompts(9, seed=5)
    slots = engine(prompts.prompt_tokens.shape[1], stop_strings=StopStrings(Letters(), strings))
    leaves = draw_all(slots, tiny.params(), prompts, KEY, trees.group_size, grown=trees)
    depth, within = leaves.fields[DEPTH], 0
    for place in np.ndindex(leaves.truncated.shape):
        text = Letters().decode(leaves.completion_tokens[place][leaves.token_mask[place]], False)
        first = text.find("F")
        if 0 <= first < len(text) - 1:
            assert first + 2 == len(text)
            within += depth[place][first + 1] != depth[place][first]
    assert within > 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 4])
def test_samples_end_where_the_last_tokens_have_too_little_confidence(slots):
    plain, window, temperature = run(temperature=0.8), 4, 0.8
    tables = tiny.whole_tables(tiny.UNIFORM, tiny.params(), plain, temperature)
    confidence = np.asarray(confidence_from_logits(tables, 5), np.float64)
    begins = range(STEPS - window + 1)
    windows = np.stack([confidence[..., i : i + window].mean(-1) for i in begins])
    threshold = float(np.quantile(windows[0], 0.2))

    def end(tokens, place):
        low = np.flatnonzero(windows[(slice(None), *place)] < threshold)
        counts = low[low + window <= len(tokens)] + window
        return counts[0] if counts.size else None

    length, ended = cut(plain, end)
    stop = EarlyStop(threshold, window, tokens=5)
    stopped = run(temperature=0.8, early_stop=stop, slots=slots)
    live = np.arange(STEPS) < length[..., None]
    np.testing.assert_array_equal(stopped.token_mask, live)
    np.testing.assert_array_equal(
        stopped.completion_tokens, np.where(live, plain.completion_tokens, tiny.PAD)
    )
    np.testing.assert_array_equal(stopped.truncated, plain.truncated | ended)
    never = run(temperature=0.8, early_stop=EarlyStop(-np.inf, window, 5))
    np.testing.assert_array_equal(never.completion_tokens, plain.completion_tokens)
