"""A policy that is sampled and not trained: what it takes, how many slots that leaves, refusals."""

import jax
import numpy as np
import pytest
import small_run
import tiny
from rich.console import Console

from jaxgrpo.cli import main as cli
from jaxgrpo.config import files
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import memory_per_layer, params_per_layer
from jaxgrpo.planning import programs, topologies
from jaxgrpo.rollout.slots.capacity import fitting_slots
from jaxgrpo.training import memory, sampled_memory, stored_policy
from jaxgrpo.training.pretrained import Pretrained, make_mesh, make_sampling_settings

GIB = 2**30


def on_one(topology: str, config: str, *changes: str):
    """The model of a config, and its mesh of one chip, for which nothing is compiled."""
    keys = files.load(config, [*changes, "mesh.fsdp=1", "mesh.tensor=1", "mesh.data=0"])
    mesh = make_mesh(keys.mesh, topologies.not_compiled_for(topology, 1).devices)
    model_config = programs.read_model_config(keys.model, keys.lora)
    model = decoder.build(model_config, constrain=sharding.constrain(mesh))
    return model, make_sampling_settings(keys.rollout, (0,), 0), mesh


@pytest.mark.slow
def test_the_weights_of_a_stored_policy_are_there_once():
    model, settings, mesh = on_one("v6e:1x1", "llama31_8b_v6e")
    sampled = sampled_memory.count(model, mesh)
    assert sampled == (memory.parameters(model, mesh), 0, 0, 0)
    free = memory.free_beside(mesh, sampled.persistent)
    settings = settings._replace(max_completion_tokens=1024)
    assert 40 <= fitting_slots(model, settings, mesh, 64, 8, 512, free) <= 90
    blocks = memory.bytes_to_sample(model, mesh)[1]
    again = sampled_memory.count(model, mesh, has_base=True, has_second_pass=True)
    assert again.base == sampled.weights
    assert blocks < again.second_pass < blocks + 5 * GIB
    low = sampled_memory.count(model, mesh, "int8")
    assert 0.5 * sampled.weights < low.copy < 0.6 * sampled.weights


@pytest.mark.slow
def test_no_more_slots_are_counted_than_there_are_samples():
    model, settings, mesh = on_one("v6e:1x1", "llama31_8b_v6e")

    def count(slots: int, prompts: int) -> int:
        changed = settings._replace(slots=slots)
        return sampled_memory.least_decoding(model, changed, mesh, prompts, 8, 512)

    assert count(10**8, 2) == count(16, 2) > count(8, 2) > count(0, 2)
    assert count(64, 100) > count(64, 2)


@pytest.mark.slow
def test_what_fits_no_slot_is_refused_with_what_to_do():
    model, settings, mesh = on_one("v5e:1x1", "llama31_8b_v6e", "model.dtype=float32")
    sampled = sampled_memory.count(model, mesh)
    decoding = sampled_memory.least_decoding(model, settings, mesh, 1, 8, 512)
    with pytest.raises(InputError) as refusal:
        sampled_memory.refuse_too_large("base", model, mesh, sampled, decoding)
    text = str(refusal.value)
    assert "base does not fit: " in text
    assert 'take model.dtype = "bfloat16", mesh.tensor over more devices' in text


def test_a_second_pass_that_does_not_fit_names_both_keys_that_ask_for_it():
    model, _, mesh = on_one("v5e:1x1", "llama31_8b_v6e")
    sampled = sampled_memory.SampledMemory(2**30, 0, 0, second_pass=2**44)
    with pytest.raises(InputError) as refusal:
        sampled_memory.refuse_too_large("base", model, mesh, sampled, decoding=2**30)
    text = str(refusal.value)
    assert "eval.kl_to_base = false" in text
    assert "eval.confidence" in text
    assert "rollout.slots" not in text


@pytest.mark.slow
def test_a_model_is_refused_before_its_weights_are_fetched(monkeypatch, capsys, tmp_path):
    path, prompts = small_run.base(), tmp_path / "prompts.txt"
    prompts.write_text("1+1=")
    sample = ["sample", path, "--prompts", str(prompts), "--out", str(tmp_path / "s.jsonl")]
    config = stored_policy.config_for(path, {"data.answer": ""})
    policy, _ = stored_policy.find_policy(Console(), config, [{"prompt": "1+1="}])
    sampled = sampled_memory.count(policy.model, policy.mesh)

    def fetch(_pretrained):
        raise AssertionError("fetched")

    monkeypatch.setattr(Pretrained, "with_weights", fetch)
    monkeypatch.setattr(memory, "device_bytes", lambda _mesh: sampled.persistent + 10_000)
    assert cli.main(sample) == 2
    error = capsys.readouterr().err
    assert "does not fit" in error
    assert "take fewer rollout.slots, a shorter rollout.max_prompt_tokens or max_comp" in error
    monkeypatch.setattr(memory, "device_bytes", lambda _mesh: 10_000)
    assert cli.main(sample) == 2
    assert 'take model.dtype = "bfloat16"' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("config", [tiny.LOCAL_GLOBAL, tiny.HYBRID], ids=["attention", "hybrid"])
def test_layers_apart_are_those_of_the_stack_which_is_freed(config):
    params = tiny.params(config)
    expected = params_per_layer(config, params)
    stacked = jax.tree.leaves(params["blocks"])
    apart = sampled_memory.release(params["blocks"])
    released = {**expected, "layers": memory_per_layer(config, {**params, "blocks": apart})}
    assert all(leaf.is_deleted() for leaf in stacked)
    jax.tree.map(np.testing.assert_array_equal, released, expected)
