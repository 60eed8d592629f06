"""What a step costs at the least: beside shapes, brute force, XLA's own count, and by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
import tiny
from engines import draw_all

from jaxgrpo.core.chips import CHIPS
from jaxgrpo.models import counts, decoder, products
from jaxgrpo.models.api import AttentionKind, Caller, LayerKind, ModelConfig
from jaxgrpo.models.attention import causal
from jaxgrpo.models.counts import count_weights
from jaxgrpo.models.hf import families
from jaxgrpo.planning import costs, plan, programs, topologies
from jaxgrpo.planning.costs import Work
from jaxgrpo.planning.hlo import Array, Collective
from jaxgrpo.planning.traffic import Traffic
from jaxgrpo.rollout.slots import shrinking
from jaxgrpo.rollout.slots.capacity import capacity
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training import memory
from jaxgrpo.update.forward import sampling_layout
from jaxgrpo.update.packing import Geometry

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 8,  # a period of six and two that are left over
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 7,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 16,
}


def models() -> dict[str, ModelConfig]:
    return {
        "llama": families.model_config(planned.LLAMA, "here"),
        "qwen3": families.model_config(planned.QWEN3, "here"),
        "gemma3": families.model_config(GEMMA, "here"),
    }


@pytest.mark.parametrize(
    ("platform", "remats"), [("gpu", ("dots", "attention")), ("tpu", ("attention",))]
)
def test_chunks_and_what_is_recomputed_are_the_first_that_fit_into_memory(
    platform, remats, monkeypatch
):
    chips = topologies.stand_ins({"gpu": "h100:4", "tpu": "v5e:2x2"}[platform], 1)
    run = planned.run(devices=chips, **{"model.attention": "xla"})
    blueprint, vocab = run.blueprint, run.blueprint.model.config.vocab_size
    assert (blueprint.logits_per_chunk, blueprint.remat) == (2048 * vocab, remats[0])
    assert blueprint.passes.logits_per_chunk == blueprint.logits_per_chunk
    long = blueprint.geometry._replace(tokens=8192)
    sizes = blueprint.model, blueprint.mesh, blueprint.optimizer

    def fitting(remat: Any, tokens: int, setting: str = "auto") -> tuple[int | None, str]:
        """Where as much memory is free as an update takes with so many tokens in a chunk."""
        parts = memory.update_bytes(*sizes, 8192, remat, tokens * vocab)
        limit = int((1000 + sum(parts.values())) / memory.SHARE) + 2
        monkeypatch.setattr(memory, "device_bytes", lambda _mesh: limit)
        logits, fitting_remat = memory.fitting_passes(setting, *sizes, long, 1000)
        return logits and logits // vocab, fitting_remat

    assert [fitting(remat, 2048) for remat in remats] == [(2048, remat) for remat in remats]
    chunks = [fitting("full", tokens)[0] for tokens in (2048, 2047, 512, 511)]
    assert chunks == [2048, 1024, 512, None]
    assert [fitting("full", 2048, setting)[1] for setting in ("auto", "none")] == ["full", "none"]


def test_on_a_cpu_chunks_and_what_is_recomputed_are_as_before():
    blueprint = planned.run(devices=jax.devices()[:4]).blueprint
    assert (blueprint.logits_per_chunk, blueprint.remat) == (None, "none")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_linear_weights_are_the_matrices_of_the_layers(name):
    config = models()[name]
    counted = 0
    for path, leaf in jax.tree.leaves_with_path(decoder.build(config).shapes):
        place = jax.tree_util.keystr(path)
        if ("attention" in place or "feed_forward" in place) and "kernel" in place:
            counted += math.prod(leaf.shape)
    assert counted > 0
    assert count_weights(decoder.build(config))[:2] == (counted, counted)


@pytest.mark.parametrize(("before", "tokens"), [(0, 1), (0, 23), (9, 14)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_attention_counts_each_pair_of_a_query_and_a_key_that_it_sees(name, before, tokens):
    config = models()[name]
    pairs = 0
    for kind in config.attention:
        for query in range(before, before + tokens):
            for key in range(query + 1):
                pairs += kind.window is None or query - key < kind.window
    expected = 4 * config.num_heads * config.head_dim * pairs
    assert costs.attention_flops(config, before, tokens) == expected


# One period of two kinds, so that nothing is in a loop, whose body XLA would count once.
UNROLLED = ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=640,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    pattern=(LayerKind(), LayerKind(AttentionKind(window=16))),
)


def count_flops(function: Any, *arguments: Any) -> float:
    """XLA's count of a compiled function."""
    counted: Any = jax.jit(function).lower(*arguments).compile().cost_analysis()
    return counted["flops"]


@pytest.mark.parametrize("with_head", [False, True])
def test_a_forward_pass_takes_the_operations_that_xla_counts(with_head):
    model, batch, length = decoder.build(UNROLLED), 2, 64
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def run(params, tokens):
        position = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        attend = causal(position, jnp.ones_like(position, bool))
        hidden, _ = model.apply(params, tokens, position, Caller(attend), None)
        return model.unembed(params, hidden) if with_head else hidden

    if with_head:
        flops = costs.forward_flops(decoder.build(UNROLLED), 0, 0, batch, length)
    else:
        flops = costs.forward_flops(decoder.build(UNROLLED), batch, length, 0, 0)
    # This pass computes all pairs, and masks those that are not seen.
    full_attention = 4.0 * UNROLLED.num_heads * UNROLLED.head_dim * UNROLLED.num_layers * length**2
    flops += batch * (full_attention - costs.attention_flops(UNROLLED, 0, length))
    # XLA counts norms, activations and softmax too.
    assert flops <= count_flops(run, model.shapes, tokens) <= 1.04 * flops


@pytest.mark.slow
def test_the_layers_of_a_period_that_is_computed_again_are_in_memory_together():
    """As XLA plans the backward pass: with a period of four layers it takes what the formula adds,
    and not as much as with a period of each layer."""
    tokens = jax.ShapeDtypeStruct((64, 32), jnp.int32)
    measured, counted = {}, {}
    for period in (1, 4):
        config = dataclasses.replace(
            UNROLLED, num_layers=16, hidden_size=64, head_dim=32, num_heads=2, num_kv_heads=1
        )
        config = dataclasses.replace(config, pattern=(LayerKind(),) * period)
        model = decoder.build(config, remat="full")

        def loss(params, tokens, model=model):
            position = jnp.broadcast_to(jnp.arange(32), tokens.shape)
            attend = causal(position, jnp.ones_like(position, bool))
            return model.apply(params, tokens, position, Caller(attend), None)[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(model.shapes, tokens).compile()
        analysis: Any = compiled.memory_analysis()
        measured[period] = analysis.temp_size_in_bytes / (64 * 32)
        counted[period] = counts.activations(model, "full")
    added = counted[4] - counted[1]
    assert added > counted[1]
    # On a CPU: for a v5e XLA plans two thirds of what is added.
    assert added < measured[4] - measured[1] < 1.4 * added, (measured, counted)


def test_what_is_at_work_is_a_period_or_a_layer_that_is_in_none():
    """Of 8 layers 6 are a period, and two are left, each by itself."""
    model = decoder.build(models()["gemma3"])
    first = next(counts.layer_outputs(model))
    hidden, attended, products = 48, 4 * 16, first.products
    numbers = 2 * products + 2 * hidden
    work, size = 4 * 6 * numbers + 4 * numbers, 4  # float32
    assert counts.activations(model, "full") == 3 * hidden * size + work
    assert counts.activations(model, "attention") == (3 * hidden + 8 * attended) * size + work
    assert counts.activations(model, "dots") == 8 * products * size + work
    assert counts.activations(model, "none") == 8 * 4 * numbers + 8 * numbers


def test_a_sample_costs_what_its_own_tokens_do_behind_a_prompt_that_is_computed_once():
    config = models()["gemma3"]
    together = costs.forward_flops(decoder.build(config), 3, 10, 3 * 4, 20)
    linear, _, head = count_weights(decoder.build(config))
    apart = 3 * (2 * linear * 10 + costs.attention_flops(config, 0, 10))
    # Attention of 30 tokens is that of the first 10, and of 20 behind them.
    behind = costs.attention_flops(config, 0, 30) - costs.attention_flops(config, 0, 10)
    apart += 12 * (20 * 2 * (linear + head) + behind)
    assert together == pytest.approx(apart)


def test_an_update_is_three_passes_of_all_tokens_and_with_adapters_two_of_linear_maps():
    """Scores take three: queries, keys and values have gradients whatever is trained."""
    remats: Any = {"full": {"train.remat": "full"}, "attention": {"train.remat": "attention"}}
    run = planned.run(**remats["full"])
    work, geometry = costs.program_work(run)["update"], run.blueprint.geometry
    config = run.blueprint.model.config
    width, steps = geometry.max_prompt_tokens, geometry.max_completion_tokens
    sizes = (width, 8 * 4, steps)
    forward = costs.forward_flops(run.blueprint.model, 8, *sizes)
    assert work.flops == pytest.approx(3 * forward)
    head = 2 * config.hidden_size * config.vocab_size * 8 * 4 * steps
    assert work.executed == pytest.approx(4 * forward - head)  # layers are computed again
    scores = 8 * costs.attention_flops(config, 0, width)
    scores += 8 * 4 * costs.attention_flops(config, width, steps)
    with_saved_attention = costs.program_work(planned.run(**remats["attention"]))["update"]
    assert with_saved_attention.flops == work.flops
    assert with_saved_attention.executed == pytest.approx(4 * forward - head - scores)
    adapted = planned.run(lora={"rank": 4, "alpha": 4.0})
    with_adapters = costs.forward_flops(adapted.blueprint.model, 8, *sizes)
    assert 1.01 * forward < with_adapters < 1.02 * forward
    expected = 2 * (with_adapters - scores) + 3 * scores
    assert costs.program_work(adapted)["update"].flops == pytest.approx(expected)


def test_activations_in_float32_multiply_twice_with_weights_of_layers():
    """In a forward pass, and again where layers are computed again; what is of use is the same."""
    narrow: Any = {"train.remat": "full", "model.dtype": "bfloat16"}
    in_float32 = narrow | {"model.float32_activations": True}
    plain, wide = planned.run(**narrow), planned.run(**in_float32)
    before, after = costs.program_work(plain), costs.program_work(wide)
    geometry, weights = plain.blueprint.geometry, count_weights(plain.blueprint.model).active
    prompts, samples = 8 * geometry.max_prompt_tokens, 8 * 4 * geometry.max_completion_tokens
    for name, tokens, passes in (("update", prompts + samples, 2), ("prefill", prompts, 1)):
        assert after[name].flops == before[name].flops
        more = (after[name].executed - before[name].executed) * after[name].calls
        assert more == pytest.approx(passes * 2 * weights * tokens)
    more = after["decode"].executed - before["decode"].executed
    assert more * after["decode"].calls == pytest.approx(2 * weights * samples)
    saved = [counts.activations(run.blueprint.model, "attention") for run in (plain, wide)]
    config = plain.blueprint.model.config
    assert saved[1] - saved[0] == 2 * config.hidden_size * config.num_layers


@pytest.mark.parametrize(("dtype", "pieces"), [("bfloat16", 2), ("float32", 1)])
def test_inputs_of_products_are_counted_in_as_many_pieces_as_they_are_multiplied_in(dtype, pieces):
    wide = planned.run(**{"model.dtype": "bfloat16", "model.float32_activations": True})
    model = wide.blueprint.model
    model = model._replace(config=dataclasses.replace(model.config, dtype=dtype))
    assert len(products.pieces(jnp.ones(3), dtype, most=2)) == pieces
    weights = count_weights(model).active
    assert costs.second_pieces_flops(model, 1, 2, 3, 5) == (pieces - 1) * 2 * weights * (2 + 15)
    plain = model._replace(config=dataclasses.replace(model.config, float32_activations=False))
    assert costs.second_pieces_flops(plain, 1, 2, 3, 5) == 0
    if dtype == "float32":
        assert counts.activations(model, "dots") == counts.activations(plain, "dots")


def test_a_reference_that_an_update_runs_and_logits_that_it_computes_twice_are_counted():
    full: Any = {"train.remat": "full"}
    run = planned.run(**full)
    geometry, config = run.blueprint.geometry, run.blueprint.model.config
    sizes = geometry.max_prompt_tokens, 8 * 4, geometry.max_completion_tokens
    forward = costs.forward_flops(run.blueprint.model, 8, *sizes)
    head = 2 * config.hidden_size * config.vocab_size * 8 * 4 * sizes[-1]

    def counted(**changes: Any) -> tuple[float, float, float]:
        """Of an update: operations, those that are computed again, bytes of its loss's own."""
        changed = planned.run(**full, **changes)
        work = costs.program_work(changed)["update"]
        return work.flops, work.executed - work.flops, plan.memory_parts(changed)["distributions"]

    again = forward - head  # of the layers
    numbers = config.hidden_size * config.vocab_size // 2  # of the head, over tensor 2
    assert counted() == pytest.approx((3 * forward, again, 0))
    by_sequence = {"surrogate": {"use": "gspo"}}
    assert counted(loss=by_sequence) == pytest.approx((3 * forward, again + head, 0))
    full_kl = {"kl": {"use": "full_kl", "beta": 0.1}}
    expected = 4 * forward + 3 * head, again + 3 * head, (4 + 4 + 2) * numbers
    assert counted(loss=full_kl) == pytest.approx(expected)
    scores = [{"name": "top", "policy": "base", "quantity": "likeliest"}]
    shortened = {"kl": {"use": "top_k_divergence", "beta": 1.0, "score": "top", "k": 5}}
    expected = 3 * forward + 3 * head, again + 2 * head, (4 + 4) * numbers
    assert counted(loss=shortened, scores=scores) == pytest.approx(expected)


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}


def test_few_slots_read_the_experts_that_they_pass_and_prompts_read_no_head():
    model = {"path": "none/here", "dtype": "bfloat16", "config": planned.QWEN3 | EXPERTS}
    few_slots: Any = {"rollout.slots": 4}  # of two bins
    run = planned.run(devices=topologies.stand_ins("v5e:2x2", 1), model=model, **few_slots)
    blueprint, geometry = run.blueprint, run.blueprint.geometry
    sampled, mesh = run.engine.programs.model, run.blueprint.samples_on
    leaves = jax.tree.leaves_with_path(
        programs.placed(sampled.shapes, sampling_layout(sampled, mesh))
    )

    def size(*names: str) -> int:
        """Bytes of the leaves whose places hold one of these names."""
        places = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
        return memory.on_device(
            [leaf for place, leaf in places if any(name in place for name in names)]
        )

    layers, maps = size("blocks", "rest"), size("gate", "up", "down")
    assert size("embed") > 0
    assert 0.5 * layers < maps < layers
    sizes = geometry.num_prompts, geometry.group_size, geometry.max_prompt_tokens
    state = capacity(blueprint.model, blueprint.sampling, mesh, *sizes).state
    work, segment = costs.program_work(run), blueprint.sampling.segment_tokens
    read = layers - maps * (1 - 2 * 2 / 16) + size("embed") + state / 2
    assert work["decode"].read == pytest.approx(segment * read)
    assert work["prefill"].read == layers


def test_several_updates_of_a_step_share_its_samples_or_repeat_them():
    once = costs.program_work(planned.run())["update"]
    in_halves: Any = {"train.minibatches": 2}
    halves = costs.program_work(planned.run(**in_halves))["update"]
    assert (halves.calls, halves.flops) == (2, pytest.approx(once.flops / 2))
    repeated: Any = {"train.num_iterations": 2}
    twice = costs.program_work(planned.run(**repeated))["update"]
    assert (twice.calls, twice.flops) == (2, pytest.approx(once.flops))


@pytest.mark.parametrize(
    ("geometry", "full"),
    [
        (Geometry(64, 8, 512, 1024, 4, 8704), 16),  # a group each: 511 + 8 x 1024 = 8703 tokens
        (Geometry(32, 8, 512, 1024, 8, 8704, minibatches=2), 2),
        (Geometry(8, 4, 64, 128, 2, 64 * 3), 16),  # a sample each
    ],
)
def test_a_full_update_takes_the_micro_batches_that_its_samples_fill(geometry, full):
    """A bound by more of them, enough for samples of any lengths, would be no bound."""
    assert costs.full_batch(geometry)[0] == full <= geometry.micro_batches


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, pytest.param(4, marks=pytest.mark.full)])
def test_sampling_calls_its_programs_as_often_as_it_says(slots, monkeypatch):
    """With prompts and completions as long as they may be."""
    prompts, group, width, steps = 6, 2, 150, 24
    changes = {
        "rollout.prompts_per_step": prompts,
        "rollout.group_size": group,
        "rollout.max_prompt_tokens": width,
        "rollout.max_completion_tokens": steps,
        "rollout.segment_tokens": 8,
        "rollout.slots": slots or prompts * group,
    }
    run = planned.run(devices=jax.devices()[:1], mesh={}, **changes)
    work = costs.program_work(run)
    called = {"prefill": 0, "decode": 0}
    # No token ends a sample, so that each is as long as it may be.
    settings = run.engine.settings._replace(stop_tokens=())
    engine = SlotEngine(run.blueprint.model, settings, run.engine.mesh, width=width)

    def counting(name: str) -> Any:
        function = getattr(engine.programs, name)

        def call(*arguments: Any) -> Any:
            called[name] += 1
            return function(*arguments)

        return call

    engine.programs = engine.programs._replace(
        prefill=counting("prefill"), decode=counting("decode")
    )
    monkeypatch.setattr(shrinking, "sizes_below", lambda size: [])  # one size to the end
    batch = tiny.prompts(prompts, width)
    full = np.random.default_rng(0).integers(2, 100, (prompts, width)).astype(np.int32)
    batch = dataclasses.replace(
        batch, prompt_tokens=full, prompt_mask=np.ones((prompts, width), bool)
    )
    params = run.blueprint.model.init(jax.random.key(0))
    drawn = draw_all(engine, params, batch, jax.random.key_data(jax.random.key(1)), group)
    assert np.asarray(drawn.token_mask).all()
    # Rows of the cache come free in turn, so that chunks of prompts may be less full than counted.
    assert work["prefill"].calls <= called["prefill"] <= work["prefill"].calls * (3 if slots else 1)
    # The host sees that all have ended while the device computes one segment more.
    assert work["decode"].calls <= called["decode"] <= work["decode"].calls + 2


def collective(kind: str, axes: tuple[str, ...], group: int, numbers: int, trips: int = 1):
    return Collective(kind, axes, (Array("f32", (numbers,)),), group, trips, 0, "")


def test_the_bound_of_a_program_by_hand():
    chip = CHIPS["v5e"]  # 197e12 operations, 819e9, 200e9 and 3.125e9 bytes a second
    work = Work(calls=3, flops=1e15, executed=2e15, read=5e9, loops=(1,))
    collectives = (
        collective("all-reduce", ("fsdp",), 4, 10**6, trips=7),  # 2 x 3/4 x 4e6 x 7 = 42e6
        collective("all-gather", ("tensor",), 2, 10**6),  # 1/2 x 4e6 = 2e6
    )
    bound = costs.program_bound(work, collectives, chip, 8, {"data": 1, "fsdp": 1})
    assert bound.compute == pytest.approx(3 * 2e15 / (8 * 197e12))
    assert bound.memory == pytest.approx(3 * 5e9 / 819e9)
    assert bound.links == pytest.approx(3 * 44e6 / 200e9)
    assert bound.network == 0
    assert (bound.limit, bound.seconds) == ("compute", bound.compute)


def test_full_samples_fill_the_micro_batches():
    one_each = Geometry(4, 2, 8, 16, bins=4, tokens=24)
    assert costs.full_batch(one_each) == (2, 16, 8)  # a prompt for each sample
    groups = Geometry(4, 2, 8, 16, bins=4, tokens=40)
    assert costs.full_batch(groups) == (1, 32, 4)


def test_launches_and_short_collectives_take_their_time():
    work = Work(calls=3, flops=1e6, executed=1e6, read=5e9, loops=(1,))
    kinds = "all-reduce", "all-gather", "collective-permute"
    short = [collective(kind, ("fsdp",), 4, 1, trips=100) for kind in kinds]
    for name, call in {"v5e": 0.0, "h100": 6.6e-6}.items():
        bound = costs.program_bound(
            work, short, CHIPS[name], 8, {}, Traffic(moved=7e9, kernels=500)
        )
        hops = 6 + 3 + 1  # twice round three others; once; to the next
        assert bound.links == pytest.approx(3 * 100 * (3 * call + hops * 0.5e-6))
        assert bound.memory == pytest.approx(3 * 7e9 / CHIPS[name].bandwidth)
        assert bound.launches == pytest.approx(3 * 500 * CHIPS[name].launch)
    assert 2e-6 < CHIPS["h100"].launch < 5e-6
    assert CHIPS["v5e"].launch == 0


def test_what_crosses_slices_is_bound_by_their_network():
    chip, work = CHIPS["v5e"], Work(1, 0.0, 0.0, 0.0, (1,))
    # Of 8 devices in 2 slices, the 4 of a slice send a part each over the network: of 4 MB that
    # two slices add up, each slice sends and gets half twice.
    across = collective("all-reduce", ("fsdp",), 8, 10**6)
    bound = costs.program_bound(work, (across,), chip, 8, {"fsdp": 2})
    assert bound.network == pytest.approx(4e6 / 4 / (25e9 / 8))
    assert bound.links == pytest.approx(across.sent / 200e9)
    # Each slice has one device of a group: nothing stays within.
    alone = collective("all-reduce", ("data",), 2, 10**6)
    bound = costs.program_bound(work, (alone,), chip, 8, {"data": 2})
    assert (bound.network, bound.links) == (pytest.approx(4e6 / (25e9 / 8)), 0)
    assert bound.limit == "network"
