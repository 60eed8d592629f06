"""Confidence of tokens and of whole completions, against definitions in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.evaluation.voting import trace_confidence
from jaxgrpo.models.api import NEVER
from jaxgrpo.models.logprobs import token_confidence
from jaxgrpo.models.sharding import highest

pytestmark = pytest.mark.usefixtures("float64")

BINS, LENGTH, VOCAB = 2, 23, 50


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(0, 3, (BINS, LENGTH, VOCAB))


def likeliest_confidence(logits, k, temperature=1.0, **options):
    run = lambda z: token_confidence(  # noqa: E731
        lambda x: x, z, k=k, temperature=temperature, **options
    )
    return np.asarray(jax.jit(run)(jnp.asarray(logits)))


def confidence_by_numpy(logits, k, temperature=1.0):
    z = logits / temperature
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return -np.sort(logp, axis=-1)[..., -k:].mean(-1)


@pytest.mark.parametrize("tokens", [1, 4, 23])
@pytest.mark.parametrize("k", [1, 20, VOCAB])
def test_token_confidence_is_the_mean_of_the_likeliest_in_any_chunks(logits, k, tokens):
    confidence = likeliest_confidence(logits, k, 0.7, logits_per_chunk=tokens * VOCAB)
    np.testing.assert_allclose(confidence, confidence_by_numpy(logits, k, 0.7), rtol=1e-12)


@pytest.mark.parametrize("shards", [3, 4, 25])
def test_the_likeliest_of_parts_of_the_vocabulary_are_those_of_all(logits, shards):
    tied = np.round(logits) + 0.0  # zeros of one sign
    for k in (1, 7, 20):
        values, ids = highest(jnp.asarray(tied), k, shards)
        np.testing.assert_array_equal(ids, np.argsort(-tied, axis=-1, kind="stable")[..., :k])
        np.testing.assert_array_equal(values, -np.sort(-tied, axis=-1)[..., :k])
    confidence = likeliest_confidence(logits, 7, 0.7, shards=shards)
    np.testing.assert_allclose(confidence, confidence_by_numpy(logits, 7, 0.7), rtol=1e-12)


def test_token_confidence_does_not_see_a_shift_of_the_logits(logits):
    shifted = logits + np.arange(LENGTH)[None, :, None]
    np.testing.assert_allclose(
        likeliest_confidence(shifted, 20), likeliest_confidence(logits, 20), rtol=1e-12
    )


def test_more_candidates_than_tokens_are_all_tokens_and_give_the_kl_from_uniform(logits):
    confidence = likeliest_confidence(logits, VOCAB + 9)
    np.testing.assert_array_equal(confidence, likeliest_confidence(logits, VOCAB))
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    kl = (1 / VOCAB * (np.log(1 / VOCAB) - logp)).sum(-1)
    np.testing.assert_allclose(confidence, np.log(VOCAB) + kl, rtol=1e-12)


def test_with_ten_tokens_that_can_be_drawn_the_confidence_is_of_these_ten(logits):
    ten = logits[..., :10]
    expected = confidence_by_numpy(ten, 10)
    np.testing.assert_allclose(likeliest_confidence(ten, 20), expected, rtol=1e-12)
    padded = np.concatenate([ten, np.full((BINS, LENGTH, 6), -np.inf)], axis=-1)
    np.testing.assert_allclose(likeliest_confidence(padded, 10), expected, rtol=1e-12)
    # Among 20 are tokens without any probability: a caller asks for as many as can be drawn.
    assert (likeliest_confidence(padded, 20) == np.inf).all()


@pytest.mark.parametrize("k", [3, 10, 16, 99])
def test_tokens_without_text_play_no_part_however_many_are_asked_for(logits, k):
    has_text = np.arange(16) % 3 != 0  # 10 tokens
    padded = np.where(has_text, logits[..., :16], NEVER)
    expected = confidence_by_numpy(logits[..., :16][..., has_text], k, 0.7)
    confidence = likeliest_confidence(padded, k, 0.7, has_text=has_text)
    np.testing.assert_allclose(confidence, expected, rtol=1e-12)


def test_flat_distributions_have_the_least_confidence_and_peaked_ones_more():
    flat, peaked = np.zeros((1, 1, VOCAB)), np.zeros((1, 1, VOCAB))
    peaked[..., 3] = 10
    assert likeliest_confidence(flat, 20)[0, 0] == pytest.approx(np.log(VOCAB))
    assert likeliest_confidence(peaked, 20)[0, 0] > likeliest_confidence(flat, 20)[0, 0]


def test_no_buffer_holds_all_logits():
    length, vocab = 512, 4096
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, length, 16), (16, vocab))]

    def temporary(tokens):
        run = lambda x, w: token_confidence(  # noqa: E731
            lambda y: y @ w, x, logits_per_chunk=tokens * vocab
        )
        memory = jax.jit(run).lower(*shapes).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    logits_bytes = length * vocab * 4
    assert temporary(length) >= logits_bytes
    assert temporary(8) < logits_bytes / 4


def window_means(values, n):
    """Means of every window; of a short completion the one mean; of none 0."""
    if len(values) <= n:
        return [np.mean(values) if len(values) else 0.0]
    return [np.mean(values[i : i + n]) for i in range(len(values) - n + 1)]


def expected(values, n):
    windows = window_means(values, n)
    lowest = sorted(windows)[: max(1, len(windows) // 10)]
    mean = np.mean(values) if len(values) else 0.0
    return [mean, min(windows), np.mean(lowest), windows[-1]]


@pytest.fixture
def traces():
    rng = np.random.default_rng(1)
    length = np.array([0, 1, 3, 4, 5, 17, 39, 40])
    # Forced tokens in between are left out, so a row's own tokens are joined.
    mask = (np.arange(40) < length[:, None]) & (rng.random((8, 40)) < 0.8)
    mask[-1] = True
    return rng.gamma(2, 4, (8, 40)), mask


def all_four(confidence, mask, n):
    run = jax.jit(trace_confidence, static_argnums=2)
    return np.stack(run(jnp.asarray(confidence), jnp.asarray(mask), n), axis=1)


@pytest.mark.parametrize("n", [1, 2, 4, 40, 2048])
def test_summaries_are_those_of_all_windows_one_by_one(traces, n):
    confidence, mask = traces
    one_by_one = [expected(row[live], n) for row, live in zip(confidence, mask, strict=True)]
    holes = np.where(mask, confidence, np.nan)  # what is masked may hold anything
    np.testing.assert_allclose(all_four(holes, mask, n), one_by_one, rtol=1e-9, atol=1e-12)


def test_a_window_as_long_as_the_completion_gives_its_mean(traces):
    confidence, mask = traces
    mean, least, bottom, tail = all_four(confidence, mask, 40).T
    for summary in (least, bottom, tail):
        np.testing.assert_allclose(summary, mean, rtol=1e-12)


def test_the_least_window_is_below_the_lowest_tenth_and_that_below_their_mean(traces):
    confidence, mask = traces
    _, least, bottom, _ = all_four(confidence, mask, 2).T
    means = [
        np.mean(window_means(row[live], 2)) for row, live in zip(confidence, mask, strict=True)
    ]
    assert (least <= bottom + 1e-12).all()
    assert (bottom <= np.array(means) + 1e-12).all()
    assert least[-1] < bottom[-1] < means[-1]


def test_short_windows_late_in_a_long_completion_are_exact_in_float32():
    rng = np.random.default_rng(2)
    confidence = rng.gamma(2, 4, (1, 20_000)).astype(np.float32)
    confidence[:, -9:] = 1.25
    mask = np.ones(confidence.shape, bool)
    summaries = all_four(confidence, mask, 4)[0]
    np.testing.assert_allclose(summaries, expected(confidence[0].astype(float), 4), atol=1e-3)


def test_a_window_without_a_token_is_refused():
    with pytest.raises(ValueError, match="window = 0"):
        trace_confidence(jnp.ones((1, 2)), jnp.ones((1, 2), bool), 0)
