"""The decoder's forms agree: one causal pass, decoding, rows that share a prompt; any depth."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import large_params

from jaxgrpo.models.api import (
    AttentionKind,
    Caller,
    LayerKind,
    Model,
    ModelConfig,
    Rope,
    memory_per_layer,
    params_per_layer,
)
from jaxgrpo.models.attention import Sharing, causal, decode, rows_with_prefix
from jaxgrpo.models.cache import Cache, Ring, settled
from jaxgrpo.models.decoder import UNROLLED, build

UNIFORM = ModelConfig(
    vocab_size=13,
    hidden_size=16,
    intermediate_size=20,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
LOCAL, GLOBAL = LayerKind(AttentionKind(window=4)), LayerKind(AttentionKind(rope=Rope(theta=1e6)))
LOCAL_GLOBAL = dataclasses.replace(
    UNIFORM,
    num_layers=4,  # one period and a layer left over
    pattern=(LOCAL, LOCAL, GLOBAL),
    tie_embeddings=True,
    activation="gelu_tanh",
    norm_offset=1.0,
    norms="both",
    embedding_scale=4.0,
    query_scale=0.5,
)
CONFIGS = {"uniform": UNIFORM, "local/global": LOCAL_GLOBAL}


@pytest.fixture(params=CONFIGS, scope="module")
def model(request) -> Model:
    return build(CONFIGS[request.param])


@pytest.fixture(scope="module")
def params(model):
    return large_params(model)


RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 13, size=length) for length in (7, 4)]
COMPLETIONS = [[RNG.integers(0, 13, size=5) for _ in range(2)] for _ in PROMPTS]
SLOTS = 8  # prompt positions, padding included


def one_pass(model, params, tokens):
    """Logits [B, Q, V] of whole sequences [B, Q]."""
    tokens = jnp.asarray(tokens)
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model.apply(params, tokens, position, Caller(causal(position, position >= 0)), None)
    return model.unembed(params, hidden)


def expected_logits(model, params, filler=0):
    """Logits [P, G, T, V] from which each completion token is drawn, by one causal pass."""
    tokens, real = np.zeros((4, 12), int), np.zeros((4, 12), bool)
    for p, prompt in enumerate(PROMPTS):
        for g, completion in enumerate(COMPLETIONS[p]):
            tokens[2 * p + g, : len(prompt) + 4] = [*prompt, *completion[:-1]]
            real[2 * p + g, : len(prompt) + 4] = True
    tokens = jnp.where(real, tokens, filler)
    logits = one_pass(model, params, tokens).reshape(2, 2, 12, 13)
    starts = [len(prompt) - 1 for prompt in PROMPTS]
    return jnp.stack([logits[p, :, start : start + 5] for p, start in enumerate(starts)])


def prefill(model, params, filler=0):
    """Stacked memory of the prompts [P, S] without their last tokens, and their lengths [P]."""
    tokens = np.zeros((2, SLOTS), int)
    for p, prompt in enumerate(PROMPTS):
        tokens[p, : len(prompt) - 1] = prompt[:-1]
    length = jnp.asarray([len(prompt) - 1 for prompt in PROMPTS])
    tokens = jnp.where(np.arange(SLOTS) < length[:, None], tokens, filler)
    position = jnp.broadcast_to(jnp.arange(SLOTS), tokens.shape)
    attend = causal(position, position < length[:, None])
    return model.apply(params, tokens, position, Caller(attend), None)[1], length


def decoded_logits(model, params, filler=0):
    """Logits [P, G, T, V], one decoding step after another; the last prompt token opens."""
    stacked, length = prefill(model, params, filler)
    fed = np.stack(
        [
            [np.concatenate([prompt[-1:], completion[:-1]]) for completion in completions]
            for prompt, completions in zip(PROMPTS, COMPLETIONS, strict=True)
        ]
    )
    kv_heads, head_dim = model.config.num_kv_heads, model.config.head_dim

    def zeros(columns):
        key = jnp.zeros((4, kv_heads, head_dim, columns))  # one bin of four slots
        return Cache(key, key.mT)

    empty = Ring(zeros(2), (zeros(4), zeros(4)))
    memory = tuple(
        (Cache(jnp.moveaxis(prefix.key, 1, 3)[None], prefix.value.swapaxes(1, 2)[None]), empty)
        for prefix in memory_per_layer(model.config, stacked)
    )
    apart = params_per_layer(model.config, params)

    def step(memory, index):
        position = jnp.repeat(length + index, 2)[None, :, None]
        tokens = jax.lax.dynamic_slice_in_dim(jnp.asarray(fed), index, 1, axis=2)
        attend = decode(index, jnp.full((1, 4), index), length[None], Sharing(None, None))
        hidden, memory = model.apply(
            apart, tokens.reshape(1, 4, 1), position, Caller(attend), memory
        )
        memory = tuple((prompts, settled(ring, index + 1)) for prompts, ring in memory)
        return memory, model.unembed(params, hidden).reshape(2, 2, -1)

    return jnp.moveaxis(jax.lax.scan(step, memory, jnp.arange(5))[1], 0, 2)


def row_logits(model, params, filler=0):
    """Logits [P, G, T, V] by rows [1, 3, 12]: samples (0, 0), then (1, 0) and (1, 1), then (0, 1).

    Prompts enter as [D, A, S]: one bin.
    """
    stacked_in_p, length = prefill(model, params, filler)
    tokens, segment, position = np.zeros((3, 1, 3, 12), int)
    places = {(0, 0): (0, 0, 1), (1, 0): (1, 0, 1), (1, 1): (1, 5, 2), (0, 1): (2, 2, 1)}
    for (p, g), (row, start, number) in places.items():
        span = slice(start, start + 5)
        tokens[0, row, span] = np.concatenate([PROMPTS[p][-1:], COMPLETIONS[p][g][:-1]])
        segment[0, row, span] = number
        position[0, row, span] = len(PROMPTS[p]) - 1 + np.arange(5)

    def in_bin(leaf):  # [..., P, S, kv, d] -> [..., 1, P, S, kv, d]
        return jnp.expand_dims(leaf, -5)

    stacked = jax.tree.map(in_bin, stacked_in_p)
    tokens = jnp.where(segment > 0, tokens, filler)
    segment, position = jnp.asarray(segment), jnp.asarray(position)
    attend = rows_with_prefix(segment, position, jnp.asarray([[0, 1, 0]]), length[None])
    hidden, written = model.apply(params, tokens, position, Caller(attend), stacked)
    assert not jax.tree.leaves(written)
    logits = model.unembed(params, hidden)[0]
    return jnp.stack(
        [
            jnp.stack([logits[row, at : at + 5] for row, at, _ in (places[p, 0], places[p, 1])])
            for p in (0, 1)
        ]
    )


@pytest.fixture(scope="module")
def logits(model, params):
    """Name of a form -> its logits [P, G, T, V] given what stands in padding; compiled once."""
    forms = {"one pass": expected_logits, "decode": decoded_logits, "rows": row_logits}
    jitted = {
        name: jax.jit(lambda params, filler, form=form: form(model, params, filler))
        for name, form in forms.items()
    }
    return lambda name, filler=0: jitted[name](params, filler)


@pytest.mark.slow
def test_decoding_step_by_step_gives_the_logits_of_one_causal_pass(logits):
    expected = logits("one pass")
    np.testing.assert_allclose(logits("decode"), expected, atol=2e-5)
    assert expected.dtype == jnp.float32
    assert float(jnp.std(expected)) > 0.1  # or nothing would be compared


@pytest.mark.slow
def test_rows_that_share_a_prompt_give_the_logits_of_one_causal_pass(logits):
    np.testing.assert_allclose(logits("rows"), logits("one pass"), atol=2e-5)


@pytest.mark.full
def test_what_stands_in_padding_has_no_influence(logits):
    for form in ("one pass", "decode", "rows"):
        np.testing.assert_array_equal(logits(form, 0), logits(form, 9))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_reaches_parameters_through_the_prompts_keys_and_values(name):
    weight = np.random.default_rng(5).normal(size=(2, 2, 5, 13))
    with jax.enable_x64(True):  # so that only a missing term can make a difference
        model = build(dataclasses.replace(CONFIGS[name], dtype="float64"))
        params = large_params(model)

        def gradient(form):
            return jax.jit(
                jax.grad(lambda params: (jax.nn.log_softmax(form(model, params)) * weight).sum())
            )(params)

        plain, shared = gradient(expected_logits), gradient(row_logits)
        for (path, numeric), expected in zip(
            jax.tree_util.tree_leaves_with_path(plain), jax.tree.leaves(shared), strict=True
        ):
            assert numeric.dtype == jnp.float64
            distance = float(jnp.linalg.norm(numeric - expected) / jnp.linalg.norm(numeric))
            assert distance < 1e-11, (path, distance)


@pytest.mark.full
def test_unrolled_layers_give_what_the_scan_gives(model, params):
    tokens, position = jnp.asarray([PROMPTS[0]]), jnp.arange(7)[None]
    attend = causal(position, position >= 0)
    no_memory = (None,) * model.config.num_layers

    @jax.jit
    def forms(params):
        apart = params_per_layer(model.config, params)
        calls = ((params, None), (params, no_memory), (apart, no_memory))
        return [
            model.apply(values, tokens, position, Caller(attend), form) for values, form in calls
        ]

    (scanned, stacked), (unrolled, memory), (before, _) = forms(params)
    np.testing.assert_array_equal(before, unrolled)
    np.testing.assert_allclose(unrolled, scanned, atol=1e-5)
    for ours, theirs in zip(memory, memory_per_layer(model.config, stacked), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)


@pytest.mark.full
def test_the_window_and_the_base_frequency_of_a_layer_kind_matter():
    model = build(LOCAL_GLOBAL)
    patterns = [(GLOBAL,) * 3, (LOCAL, LOCAL, LayerKind())]
    variants = [build(dataclasses.replace(LOCAL_GLOBAL, pattern=pattern)) for pattern in patterns]
    tokens = np.concatenate([PROMPTS[0], COMPLETIONS[0][0]])[None]

    @jax.jit
    def last_logits(params):
        return [one_pass(each, params, tokens)[0, -1] for each in (model, *variants)]

    unchanged, *changed = last_logits(large_params(model))
    for logits in changed:
        assert float(jnp.abs(logits - unchanged).max()) > 1e-2


def test_the_program_does_not_grow_with_depth():
    def lines(depth: int) -> int:
        model = build(dataclasses.replace(UNIFORM, num_layers=depth))

        def loss(params, tokens):
            position = jnp.broadcast_to(jnp.arange(6), tokens.shape)
            attend = causal(position, position >= 0)
            return model.unembed(
                params, model.apply(params, tokens, position, Caller(attend), None)[0]
            ).sum()

        tokens = jax.ShapeDtypeStruct((2, 6), jnp.int32)
        return jax.jit(jax.grad(loss)).lower(model.shapes, tokens).as_text().count("\n")

    shallow, deep = lines(2), lines(8)
    assert shallow > 100
    assert abs(deep - shallow) <= 0.02 * shallow


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("config", [UNIFORM, LOCAL_GLOBAL], ids=["uniform", "local"])
def test_layers_unrolled_give_the_values_and_the_memory_of_layers_scanned(config):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 13, size=(2, 16)))
    position = jnp.broadcast_to(jnp.arange(16), tokens.shape)
    params = large_params(build(config))

    def run(remat):
        attend = causal(position, position >= 0)
        model = build(config, remat=remat)
        return jax.jit(lambda p: model.apply(p, tokens, position, Caller(attend), None))(params)

    assert config.num_layers <= UNROLLED
    unrolled, scanned = run("none"), run("full")
    assert jax.tree.structure(unrolled) == jax.tree.structure(scanned)
    for a, b in zip(jax.tree.leaves(unrolled), jax.tree.leaves(scanned), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


REMATS = ("full", "attention", "dots", "none")


@pytest.mark.full
@pytest.mark.slow
def test_recomputing_activations_changes_no_gradient_and_saves_memory():
    config = dataclasses.replace(UNIFORM, num_layers=12)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 13, size=(4, 64)))
    position = jnp.broadcast_to(jnp.arange(64), tokens.shape)
    compiled = {}
    for remat in REMATS:
        model = build(config, remat=remat)

        def loss(params, model=model):
            attend = causal(position, position >= 0)
            hidden, _ = model.apply(params, tokens, position, Caller(attend), None)
            return (model.unembed(params, hidden) ** 2).sum()

        compiled[remat] = jax.jit(jax.grad(loss)).lower(model.shapes).compile()
    params = large_params(build(config))
    plain = compiled["none"](params)
    for remat in REMATS[:-1]:
        gradient = compiled[remat](params)
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain), strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    needed = [compiled[remat].memory_analysis().temp_size_in_bytes for remat in REMATS]
    assert needed == sorted(needed)
    assert needed[0] < 0.5 * needed[-1]
