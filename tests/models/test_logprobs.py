"""Token log-probs: exact, in chunks as in one piece, and never whole in memory."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxgrpo.models import sharding
from jaxgrpo.models.logprobs import token_logprobs, token_rank

BINS, LENGTH, WIDTH, VOCAB = 2, 23, 8, 50
CHUNKS = {"whole": 10**9, "several": 8 * VOCAB, "one token": VOCAB, "ragged": 7 * VOCAB}


def make(dtype):
    rng = np.random.default_rng(0)
    return {
        "hidden": rng.normal(size=(BINS, LENGTH, WIDTH)).astype(dtype),
        "head": rng.normal(size=(WIDTH, VOCAB)).astype(dtype),
        "bias": rng.normal(size=VOCAB).astype(dtype),
        "targets": rng.integers(0, VOCAB, (BINS, LENGTH)).astype(np.int32),
        "for_logp": rng.normal(size=(BINS, LENGTH)).astype(dtype),
        "for_entropy": rng.normal(size=(BINS, LENGTH)).astype(dtype),
    }


def project(head, bias, hidden):
    """A head with a bias and Gemma's soft cap: not linear, so nothing may assume that it is."""
    z = hidden @ head + jnp.expand_dims(bias, (0, 1))
    return 30 * jnp.tanh(z / 30)


def chunked(case, temperature=0.7, **options):
    unembed = functools.partial(project, case["head"], case["bias"])
    return token_logprobs(
        unembed, case["hidden"], case["targets"], temperature=temperature, **options
    )


def unchunked(case, temperature=0.7):
    logp = jax.nn.log_softmax(project(case["head"], case["bias"], case["hidden"]) / temperature, -1)
    target_logp = jnp.take_along_axis(logp, case["targets"][..., None], -1)[..., 0]
    return target_logp, -(jnp.exp(logp) * logp).sum(-1)


def objective(floats, case, values):
    """A loss whose gradient by logp and by the entropy differs from token to token."""
    logp, entropy = values({**case, **floats})
    loss = (logp * case["for_logp"]).sum()
    if entropy is not None:
        loss = loss + (entropy * case["for_entropy"]).sum()
    return loss, (logp, entropy)


def evaluate(case, values):
    floats = {name: case[name] for name in ("hidden", "head", "bias")}
    run = jax.value_and_grad(functools.partial(objective, values=values), has_aux=True)
    return jax.jit(run)(floats, case)


def assert_equal(got, want, tolerance):
    same = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(same, got, want)


def numpy_values(case, temperature=0.7):
    wide = {name: value.astype(np.float64) for name, value in case.items() if name != "targets"}
    z = 30 * np.tanh((wide["hidden"] @ wide["head"] + wide["bias"]) / 30) / temperature
    prob = np.exp(z - z.max(-1, keepdims=True))
    prob /= prob.sum(-1, keepdims=True)
    target_probability = np.take_along_axis(prob, case["targets"][..., None], -1)[..., 0]
    return np.log(target_probability), -(prob * np.log(prob)).sum(-1)


@pytest.mark.parametrize(("dtype", "atol"), [(np.float32, 2e-5), (np.float64, 1e-13)])
def test_values_equal_numpy_in_float64(dtype, atol):
    with jax.enable_x64(dtype is np.float64):
        case = make(dtype)
        run = functools.partial(chunked, entropy="value", logits_per_chunk=4 * VOCAB)
        values = jax.jit(run)(case)
        for got, want in zip(values, numpy_values(case), strict=True):
            assert got.dtype == dtype
            np.testing.assert_allclose(got, want, atol=atol)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("limit", CHUNKS.values(), ids=CHUNKS)
def test_gradients_equal_those_of_the_unchunked_form_in_float64(limit):
    with jax.enable_x64(True):
        case = make(np.float64)
        run = functools.partial(chunked, entropy="gradient", logits_per_chunk=limit)
        got, want = evaluate(case, run), evaluate(case, unchunked)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), got, want
        )


@pytest.mark.parametrize("limit", [10**9, 7 * VOCAB])
def test_the_entropy_carries_gradient_only_where_that_is_asked_for(limit):
    with jax.enable_x64(True):
        case = make(np.float64)
        no_entropy = {**case, "for_entropy": np.zeros((BINS, LENGTH))}
        _, want = evaluate(no_entropy, unchunked)
        for mode in ("none", "value"):
            run = functools.partial(chunked, entropy=mode, logits_per_chunk=limit)
            (_, (_, entropy)), got = evaluate(case, run)
            assert (entropy is None) == (mode == "none")
            assert_equal(got, want, 1e-12)


def test_logits_of_any_size_give_finite_values_and_gradients():
    case = make(np.float32)
    case["hidden"] *= 1e4  # by the soft cap, logits of +-30 at temperature 0.01: +-3000
    run = functools.partial(chunked, temperature=0.01, entropy="gradient")
    for leaf in jax.tree.leaves(evaluate(case, run)):
        assert np.isfinite(leaf).all()


def test_a_bfloat16_head_sums_its_gradient_over_chunks_in_float32():
    """Summed in bfloat16, 2048 chunks of equal gradients would stop growing at 256 of them."""
    length, vocab = 2048, 4
    head = jnp.zeros((1, vocab), jnp.bfloat16)
    hidden = jnp.ones((1, length, 1), jnp.bfloat16)
    targets = jnp.zeros((1, length), jnp.int32)

    def loss(head):
        unembed = lambda x: jnp.matmul(x, head, preferred_element_type=jnp.float32)  # noqa: E731
        logp, _ = token_logprobs(unembed, hidden, targets, logits_per_chunk=vocab)
        assert logp.dtype == jnp.float32
        return logp.sum()

    gradient = jax.jit(jax.grad(loss))(head)
    assert gradient.dtype == jnp.bfloat16
    want = length * np.array([0.75, -0.25, -0.25, -0.25])
    np.testing.assert_array_equal(gradient[0].astype(jnp.float32), want)


def test_the_entropy_is_paid_for_only_where_it_is_asked_for():
    case = make(np.float32)

    def operations(mode):
        def loss(floats, case):
            values = chunked({**case, **floats}, entropy=mode)
            return sum(value.sum() for value in values if value is not None), values

        floats = {name: case[name] for name in ("hidden", "head", "bias")}
        gradient = jax.jit(jax.grad(loss, has_aux=True))
        compiled: Any = gradient.lower(floats, case).compile()
        return compiled.cost_analysis()["flops"]

    none, value, gradient = map(operations, ("none", "value", "gradient"))
    assert none < value < gradient
    # Multiply-add of weight and shifted logits: two operations per logit at least.
    assert value - none >= 2 * BINS * LENGTH * VOCAB


ELEMENTS = re.compile(r"\b(?:f32|bf16|f64|s32|u32|pred)\[([\d,]+)\]")


def buffers(text, apart):
    """Sizes of all arrays in a compiled program, in elements, but those of shapes `apart`."""
    shapes = {tuple(map(int, match.split(","))) for match in ELEMENTS.findall(text)}
    squeezed = {tuple(size for size in shape if size > 1) for shape in shapes}
    return sorted(int(np.prod(shape)) for shape in squeezed - apart)


def test_at_a_large_vocabulary_no_buffer_exceeds_a_sixteenth_of_the_logits():
    tokens, vocab, width = 4096, 151_936, 1024
    hidden = jax.ShapeDtypeStruct((1, tokens, width), jnp.float32)
    table = jax.ShapeDtypeStruct((vocab, width), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def loss(hidden, table, targets):
        unembed = lambda x: jnp.einsum("...e,ve->...v", x, table)  # noqa: E731
        logp, entropy = token_logprobs(unembed, hidden, targets, entropy="gradient")
        assert entropy is not None
        return logp.sum() + entropy.sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    compiled: Any = gradient.lower(hidden, table, targets).compile()
    parameter = {(vocab, width), (width, vocab)}
    largest = buffers(compiled.as_text(), parameter)[-1]
    assert vocab <= largest <= tokens * vocab // 16
    memory = compiled.memory_analysis()
    head = 4 * vocab * width
    # The sum over chunks is the result's own buffer; one chunk's addend and its logits come on top.
    assert memory.temp_size_in_bytes <= 2 * head + 4 * tokens * vocab / 4


@pytest.mark.parametrize("axes", [{"tensor": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_a_sharded_vocabulary_stays_sharded_and_changes_nothing(axes):
    mesh = sharding.make_mesh(**{"data": 1, **axes})
    with jax.enable_x64(True):
        check_sharded(mesh)


def check_sharded(mesh):
    bins, length, vocab, width = 2, 24, 64, 8
    rng = np.random.default_rng(1)
    hidden, table = rng.normal(size=(bins, length, width)), rng.normal(size=(vocab, width))
    targets = rng.integers(0, vocab, (bins, length)).astype(np.int32)

    def loss(hidden, table, targets):
        unembed = lambda x: jnp.einsum("...e,ve->...v", x, table)  # noqa: E731
        logp, entropy = token_logprobs(
            unembed, hidden, targets, entropy="gradient", logits_per_chunk=8 * vocab
        )
        assert entropy is not None
        return (logp * jnp.square(entropy)).sum(), (logp, entropy)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    places = (PartitionSpec("data"), PartitionSpec("tensor"), PartitionSpec("data"))
    layout = tuple(NamedSharding(mesh, place) for place in places)
    program: Any = jax.jit(run, in_shardings=layout).lower(hidden, table, targets).compile()
    got = program(*map(jax.device_put, (hidden, table, targets), layout))
    want = jax.jit(run)(hidden, table, targets)
    assert_equal(got, want, 1e-11)
    # Logits of one chunk, whole along the vocabulary, stand nowhere in the program.
    full_rows = {
        shape for shape in ELEMENTS.findall(program.as_text()) if shape.endswith(f",{vocab}")
    }
    assert not full_rows
    assert f",{vocab // mesh.shape['tensor']}]" in program.as_text()


@pytest.mark.parametrize("limit", CHUNKS.values(), ids=CHUNKS)
def test_ranks_are_places_in_a_stable_sort_of_the_logits(limit):
    """Whole numbers make many logits equal; then lower ids come first."""
    rng = np.random.default_rng(3)
    hidden = rng.integers(-1, 2, (BINS, LENGTH, WIDTH)).astype(np.float32)
    table = rng.integers(-1, 2, (WIDTH, VOCAB)).astype(np.float32)
    targets = rng.integers(0, VOCAB, (BINS, LENGTH)).astype(np.int32)
    logits = hidden.astype(np.float64) @ table
    order = np.argsort(-logits, axis=-1, kind="stable")
    expected = np.argmax(order == targets[..., None], axis=-1)
    equal = (np.sort(logits) == np.take_along_axis(logits, targets[..., None], -1)).sum(-1)
    assert (equal > 1).mean() > 0.5
    assert len(set(expected.ravel().tolist())) > 20
    unembed = lambda x: x @ table  # noqa: E731
    run = jax.jit(functools.partial(token_rank, unembed, logits_per_chunk=limit))
    rank = run(hidden, targets)
    np.testing.assert_array_equal(rank, expected)


def test_a_token_without_probability_is_behind_all_and_a_nan_behind_these():
    logits = jnp.asarray([[[1.0, -jnp.inf, 0.5, -jnp.inf], [jnp.nan, 0.0, 1.0, 2.0]]])
    ranks = [
        np.asarray(token_rank(lambda x: x, logits, jnp.full((1, 2), token, jnp.int32)))[0].tolist()
        for token in range(4)
    ]
    assert [rank for rank, _ in ranks] == [0, 2, 1, 3]
    assert ranks[0][1] == 4
