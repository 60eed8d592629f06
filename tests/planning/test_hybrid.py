"""The plan of a model most of whose layers recur: Qwen3.5 9B, by formula, on eight v6e chips."""

from __future__ import annotations

import jax
import pytest

from jaxgrpo.config import files
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import counts, lora, sharding
from jaxgrpo.models.api import DeltaKind
from jaxgrpo.planning import costs, plan, programs, topologies
from jaxgrpo.rollout.slots.capacity import capacity
from jaxgrpo.training.pretrained import check_recurrent

STATE = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
"""Bytes of a sample's states: 24 layers of 32 float32 matrices, and three inputs in bfloat16."""


@pytest.fixture(scope="module")
def run():
    read = files.load("qwen3_5_9b_lora_v6e")
    chips = topologies.topology(str(read.plan.topology), read.plan.slices)
    return programs.build_run(read, chips.devices), chips.chip


@pytest.mark.slow
def test_its_layers_and_weights_are_counted(run):
    model = run[0].blueprint.model
    kinds = [kind.mixer for kind in model.config.kinds if isinstance(kind.mixer, DeltaKind)]
    assert len(kinds) == 24
    base = sum(leaf.size for leaf in jax.tree.leaves(lora.base_model(model).shapes))
    assert 8.9e9 < base < 9.1e9
    # 5.2 million operations of a token in a layer, 1.2% of its products.
    flops = counts.count_recurrence(kinds[0]).flops
    assert 4.5e6 < flops < 6e6
    assert flops * 24 < 0.02 * 2 * counts.count_weights(model).active


@pytest.mark.slow
def test_states_of_slots_are_counted_and_it_fits(run):
    built, chip = run
    blueprint = built.blueprint
    settings = blueprint.sampling._replace(slots=64)
    sizes = blueprint.samples_on, 64, 4, 512
    needed = capacity(blueprint.model, settings, *sizes)
    bins, tensor = 2, blueprint.samples_on.shape["tensor"]
    assert needed.recurrent == 64 // bins * STATE // tensor
    assert plan.peak_bytes(plan.memory_parts(built)) <= chip.memory
    assert costs.program_work(built)["decode"].read > 2 * needed.recurrent


def test_what_states_do_not_go_with_is_refused_a_line_each(run):
    read = files.load("qwen3_5_9b_lora_v6e", ["mesh.fsdp=1", "mesh.context=2"])
    chips = topologies.topology(str(read.plan.topology), read.plan.slices)
    with pytest.raises(
        InputError, match=r"mesh\.context = 2: a state goes from token to token; .*"
    ):
        programs.build_run(read, chips.devices)
    geometry, mesh = run[0].blueprint.geometry, sharding.make_mesh(devices=jax.devices()[:1])
    check_recurrent(geometry, mesh)
    with pytest.raises(InputError) as refused:
        check_recurrent(geometry._replace(has_forks=True), mesh)
    _, line = str(refused.value).splitlines()
    assert line.strip().startswith('data.history = "fork": ')
    assert line.endswith('set it to "exact"')
    check_recurrent(geometry._replace(has_forks=True, recurs=False), mesh)


def test_what_recurs_is_computed_again_whatever_else_is(run):
    """By itself, in the backward pass of its layer (`recurrence.over_sequences`)."""
    built, _ = run
    blueprint, geometry = built.blueprint, built.blueprint.geometry
    config, prompts = blueprint.model.config, geometry.num_prompts
    width, steps = geometry.max_prompt_tokens, geometry.max_completion_tokens
    samples = prompts * geometry.group_size
    tokens = prompts * width + samples * steps
    kind = next(kind.mixer for kind in config.kinds if isinstance(kind.mixer, DeltaKind))
    recurrence = 24 * tokens * counts.count_recurrence(kind).flops
    forward = costs.forward_flops(blueprint.model, prompts, width, samples, steps)
    head = 2.0 * samples * steps * config.hidden_size * config.vocab_size
    scores = prompts * costs.attention_flops(config, 0, width)
    scores += samples * costs.attention_flops(config, width, steps)
    again = {
        "none": 0,
        "dots": 0,
        "attention": forward - head - (scores - recurrence),
        "full": forward - head,
    }
    for remat, layers in again.items():
        changed = built._replace(blueprint=blueprint._replace(remat=remat))
        work = costs.program_work(changed)["update"]
        assert work.executed - work.flops == pytest.approx(layers + recurrence)
