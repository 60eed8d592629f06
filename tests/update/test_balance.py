"""Even loads of experts: the auxiliary loss against other computations; corrections that move.

Advantages are 1e-30: all samples are live, and the auxiliary loss is all that has a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import cpu_mesh, make_blueprint, take_step

import jaxgrpo
from jaxgrpo import advantages
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.records import EXPERTS, no_record
from jaxgrpo.models import decoder, lora, routing, sharding
from jaxgrpo.models.api import (
    Caller,
    DenseKind,
    ExpertsKind,
    LayerKind,
    LoraConfig,
    highest_scores,
    memory_per_layer,
)
from jaxgrpo.models.attention import causal
from jaxgrpo.rollout.engine import record_shapes
from jaxgrpo.update.balance import Balance, make_balance, replays
from jaxgrpo.update.forward import param_layout
from jaxgrpo.update.step import build_steps

pytestmark = pytest.mark.slow

SOFTMAX = ExpertsKind(number=6, top_k=2, size=16)
SIGMOID = SOFTMAX._replace(scores="sigmoid", groups=3, top_groups=2, shared=16)
UNIFORM = dataclasses.replace(tiny.UNIFORM, pattern=(LayerKind(feed=SOFTMAX),))
MIXED = dataclasses.replace(  # a lead, one period of two, and one layer that is left over
    tiny.UNIFORM,
    family="glm4_moe",
    num_layers=4,
    lead=(LayerKind(feed=SIGMOID._replace(number=9)),),
    pattern=(LayerKind(feed=SIGMOID), LayerKind(feed=DenseKind())),
)
BIASED = dataclasses.replace(UNIFORM, pattern=(LayerKind(feed=SIGMOID),))
ADAPTED = dataclasses.replace(UNIFORM, lora=LoraConfig(rank=2, alpha=4.0))
PROMPTS, GROUP, WIDTH, STEPS = 4, 3, 6, 5
TINY_ADVANTAGE = 1e-30
LOSS, MOVES, BOTH = Balance(1.0), Balance(rate=0.25), Balance(1.0, 0.25)


@functools.cache
def params(config):
    """Routers whose experts are used unevenly, and adapters that do something."""
    rng = np.random.default_rng(2)
    scales = {"router/kernel": 20.0, "router/correction": 0.0, "lora_b": 0.0}

    def redraw(path, leaf):
        place = "/".join(str(entry.key) for entry in path)
        scale = next((scales[end] for end in scales if place.endswith(end)), 1.0)
        spread = 0.3 if scale == 0 else 0.0
        return leaf * (scale or 1) + jnp.asarray(spread * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(redraw, tiny.params(config))


def sequences(rollouts):
    """(tokens, whether each is real, which ones open a token that was drawn) [P * G, S + T], and
    their places [P * G, T]."""
    length = np.repeat(np.asarray(rollouts.prompt_mask).sum(-1), GROUP)[:, None]
    drawn = np.asarray(rollouts.token_mask).reshape(-1, STEPS)
    tokens = np.pad(np.repeat(rollouts.prompt_tokens, GROUP, 0), ((0, 0), (0, STEPS)))
    place = length + np.arange(STEPS)
    np.put_along_axis(tokens, place, np.reshape(rollouts.completion_tokens, (-1, STEPS)), 1)
    real = np.arange(tokens.shape[1]) < length + drawn.sum(-1, keepdims=True)
    opens = np.zeros(tokens.shape, bool)
    np.put_along_axis(opens, place - 1, drawn, 1)
    return tokens, real, opens, place - 1


def watched(config, values, tokens, real):
    """(experts, shares) of each layer with experts, [B, Q, ...], by a plain pass over sequences."""

    def route(scores, shares, memory, kind):
        experts, _ = highest_scores(scores, shares, memory, kind)
        return experts, (experts, shares)

    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    caller = Caller(causal(position, jnp.asarray(real)), route=route)
    _, memory = decoder.build(config).apply(values, jnp.asarray(tokens), position, caller, None)
    return routing.without_records(config.kinds, memory_per_layer(config, memory))[1]


def with_record(rollouts, experts, place):
    """Rollouts that hold the experts [layers, B, Q, k] of what each token was drawn from."""
    record = no_record(EXPERTS, *rollouts.token_mask.shape, len(experts), experts[0].shape[-1])
    drawn = np.asarray(rollouts.token_mask)
    for number, layer in enumerate(experts):
        chosen_here = np.take_along_axis(np.asarray(layer), place[..., None], 1)
        chosen_here = chosen_here.reshape(*drawn.shape, -1)
        record[:, :, :, number] = np.where(drawn[..., None], chosen_here, record[:, :, :, number])
    return dataclasses.replace(rollouts, fields={EXPERTS: record})


def aux_loss(feeds, opens, experts, layers_of_shares):
    """The formula, over whole sequences: mean over layers of E sum_e f_e P_e."""
    total, count = 0.0, opens.sum()
    for feed, chosen_experts, shares in zip(feeds, experts, layers_of_shares, strict=True):
        is_expert = jnp.asarray(chosen_experts)[..., None] == jnp.arange(feed.number)
        loads = (is_expert & opens[..., None, None]).sum((0, 1, 2)) / count
        total += feed.number * (loads * jnp.where(opens[..., None], shares, 0)).sum() / count
    return total / len(feeds)


@functools.cache
def drawn(config):
    """Random completions, with the experts that a plain pass gives each of their tokens."""
    rewards = np.full((PROMPTS, GROUP), TINY_ADVANTAGE, np.float32)
    rollouts = jax.tree.map(np.asarray, tiny.rollouts(rewards, STEPS, WIDTH))
    tokens, real, _, place = sequences(rollouts)
    experts = [experts for experts, _ in watched(config, params(config), tokens, real)]
    return with_record(rollouts, experts, place)


@functools.cache
def steps(config, balance=LOSS, mesh=(1, 1, 1), tokens=64, remat: Any = "full"):
    constrain = sharding.constrain(cpu_mesh(*mesh))
    blueprint = make_blueprint(
        config,
        (PROMPTS, GROUP, WIDTH, STEPS),
        tokens,
        mesh=mesh,
        geometry_options={"records": record_shapes(config.kinds, 0)},
        model=decoder.build(config, constrain=constrain, remat=remat),
        chain=advantages.build("reinforce"),
        balance=balance,
    )
    return build_steps(blueprint), blueprint


def updated(config, rollouts=None, **options):
    """(metrics, what each parameter moved by) of one update."""
    rollouts = drawn(config) if rollouts is None else rollouts
    functions, blueprint = steps(config, **options)
    layout = param_layout(blueprint.model, blueprint.mesh)
    return take_step(functions, blueprint, jax.device_put(params(config), layout), rollouts)


def assert_close(tree, expected, tolerance=2e-4):
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    for leaf, value in leaves:
        assert np.linalg.norm(leaf - value) <= tolerance * (np.linalg.norm(value) + 1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "dtype", "tolerance"),
    [(UNIFORM, "float64", 1e-9), (MIXED, "float64", 1e-9), (ADAPTED, "float32", 2e-5)],
    ids=["softmax", "sigmoid", "lora"],
)
def test_value_and_gradient_are_the_formula_over_whole_sequences(config, dtype, tolerance):
    """Of several micro-batches, and of layers that are unrolled and scanned."""
    with jax.enable_x64(dtype == "float64"):
        compare_with_formula(dataclasses.replace(config, dtype=dtype), tolerance)


def compare_with_formula(config, tolerance):
    tokens, real, opens, _ = sequences(drawn(config))
    feeds = [kind.feed for kind in config.kinds if isinstance(kind.feed, ExpertsKind)]
    learned, frozen = lora.split(params(config)) if config.lora else (params(config), {})

    @jax.jit
    @jax.value_and_grad
    def plain(learned):
        values = lora.join(learned, frozen) if config.lora else learned
        layers = watched(config, values, tokens, real)
        experts = [jax.lax.stop_gradient(experts) for experts, _ in layers]
        return aux_loss(feeds, opens, experts, [shares for _, shares in layers])

    value, gradient = plain(learned)
    remat = "none" if config.lora else "full"
    metrics, moved = updated(config, tokens=32, remat=remat)
    assert metrics["update/micro_batches"] > 1
    assert metrics["routing/aux_loss"] == pytest.approx(float(value), rel=tolerance)
    assert metrics["loss"] == pytest.approx(float(value), rel=tolerance)
    assert abs(value - feeds[0].top_k) > 0.01  # that of even loads
    assert_close(moved, gradient, tolerance)


@pytest.mark.full
def test_value_and_gradient_of_routers_are_those_of_transformers(tmp_path):
    """Of each layer by itself: transformers adds up the layers first, here they are averaged."""
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    config = checkpoints.transformers_config("qwen3_moe", vocab_size=tiny.VOCAB)
    theirs = checkpoints.saved(config, tmp_path)
    model, values = jaxgrpo.load_model(tmp_path, dtype="float32")
    rewards = np.full((PROMPTS, GROUP), TINY_ADVANTAGE, np.float32)
    rollouts = jax.tree.map(np.asarray, tiny.rollouts(rewards, STEPS, WIDTH))
    tokens, real, opens, place = sequences(rollouts)
    arrays = torch.as_tensor(tokens), torch.as_tensor(real.astype(int))
    logits = theirs(*arrays, output_router_logits=True, use_cache=False).router_logits
    experts = [layer.topk(2)[1].reshape(*tokens.shape, 2).numpy() for layer in logits]
    rollouts = with_record(rollouts, experts, place)
    by_layer = [load_balancing_loss_func((x,), 6, 2, torch.as_tensor(opens)) for x in logits]
    value = torch.stack([torch.as_tensor(loss) for loss in by_layer]).mean()
    value.backward()
    metrics, moved = take_step(*steps(model.config), values, rollouts)
    assert metrics["routing/aux_loss"] == pytest.approx(value.item(), rel=1e-5)
    layers = moved["blocks"]["0"], moved["rest"]["0"]
    routers = [np.squeeze(layer["experts"]["router"]["kernel"]) for layer in layers]
    gradient = {name: weight.grad for name, weight in theirs.named_parameters()}
    expected = [gradient[f"model.layers.{i}.mlp.gate.weight"].T for i in (0, 2)]
    assert_close(routers, [leaf.numpy() for leaf in expected])
    assert_close(moved["embed"]["table"], gradient["model.embed_tokens.weight"].numpy())


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 1)])
def test_four_devices_make_the_update_of_one(mesh):
    (metrics, moved), (single, expected) = (
        updated(BIASED, mesh=sizes, balance=BOTH) for sizes in (mesh, (1, 1, 1))
    )
    assert metrics["routing/aux_loss"] == pytest.approx(single["routing/aux_loss"], rel=1e-5)
    assert_close(moved, expected)


@pytest.mark.full
@pytest.mark.parametrize("config", [BIASED, MIXED])
def test_corrections_move_by_the_sign_of_what_their_expert_lacks_of_the_mean(config):
    """Of live tokens alone; and nothing else moves."""
    rollouts, mixed = drawn(config), config is MIXED
    rewards = rollouts.rewards["reward"].copy()
    rewards[1] = 0
    rollouts = dataclasses.replace(rollouts, rewards={"reward": rewards})
    _, moved = updated(config, rollouts, balance=MOVES)
    live = rollouts.token_mask & (rewards != 0)[..., None]
    record = rollouts.fields[EXPERTS][live].astype(np.int64)
    numbers = (9, 6, 6) if mixed else (6, 6)
    for layer, (moves, number) in enumerate(zip(corrections(moved), numbers, strict=True)):
        load = np.bincount(record[:, layer].ravel(), minlength=number).astype(np.float64)
        assert len({*np.sign(load.mean() - load)}) > 1
        np.testing.assert_allclose(moves, -0.25 * np.sign(load.mean() - load), atol=1e-6)
    leaves = jax.tree_util.tree_leaves_with_path(moved)
    assert [np.any(leaf) for path, leaf in leaves if path[-1].key != "correction"] == [False] * (
        len(leaves) - (3 if mixed else 1)
    )


def corrections(tree):
    """The corrections of each layer with experts, in their order."""
    layers = [tree[part][i] for part in ("lead", "blocks", "rest") for i in tree.get(part, {})]
    arrays = [layer["experts"]["router"]["correction"] for layer in layers if "experts" in layer]
    return [row for array in arrays for row in array.reshape(-1, array.shape[-1])]


@pytest.mark.full
def test_without_a_live_sample_or_with_a_broken_one_corrections_stay():
    rollouts = drawn(BIASED)
    rewards = rollouts.rewards["reward"]
    flat = dataclasses.replace(rollouts, rewards={"reward": 0 * rewards})
    broken = dataclasses.replace(
        rollouts, behavior_logp=np.full_like(rollouts.behavior_logp, np.nan)
    )
    for changed in (flat, broken):
        metrics, moved = updated(BIASED, changed, balance=MOVES)
        skipped = metrics["skipped_updates/no_live_sample"], metrics["skipped_updates/not_finite"]
        assert sorted(skipped) == [0, 1]
        assert not any(np.any(leaf) for leaf in corrections(moved))


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "balance", "count"), [(UNIFORM, Balance(0.03), 20), (BIASED, Balance(rate=0.03), 30)]
)
def test_an_uneven_load_becomes_even(config, balance, count):
    """Of the same tokens in every update, which are routed again before each."""
    values, rollouts = params(config), drawn(config)
    tokens, real, _, place = sequences(rollouts)
    route = jax.jit(lambda values: watched(config, values, tokens, real))
    lines = []
    for _ in range(count):
        rollouts = with_record(rollouts, [experts for experts, _ in route(values)], place)
        metrics, moved = take_step(*steps(config, balance), values, rollouts)
        values = jax.tree.map(np.subtract, values, moved)
        lines.append(metrics)
    loads = [line["routing/load"] for line in lines]
    assert loads[0] > 1.5
    assert np.mean(loads[-5:]) < 1.3
    if balance.coefficient:
        assert lines[0]["routing/aux_loss"] > 2.2 > 2.05 > lines[-1]["routing/aux_loss"]


def test_what_cannot_be_balanced_is_refused():
    cases = {
        r"train\.router_aux_loss_coef = 0\.01: qwen3 has no experts": (tiny.UNIFORM, (0.01, 0)),
        r"router_bias_update_rate = 0\.001: qwen3 has no experts": (tiny.UNIFORM, (0, 0.001)),
        r"routers of qwen3 have no e_score_correction_bias": (UNIFORM, (0, 0.001)),
        r"with lora\.rank or lora\.path these stay": (
            dataclasses.replace(MIXED, lora=ADAPTED.lora),
            (0, 0.001),
        ),
    }
    for message, (config, (coefficient, rate)) in cases.items():
        with pytest.raises(InputError, match=message):
            make_balance(coefficient, rate, decoder.build(config))


def test_routing_of_a_model_without_experts_is_refused():
    dense, mixture = map(decoder.build, (tiny.UNIFORM, UNIFORM))
    with pytest.raises(InputError, match=r'routing = "fresh": nothing reads it, since qwen3 has n'):
        replays("fresh", dense)
    assert (replays("fresh", mixture), replays("replay", mixture)) == (False, True)
    assert replays("replay", dense)
