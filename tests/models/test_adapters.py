"""Adapter folders beside PEFT: loaded, computed, saved, and refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import jax
import numpy as np
import pytest
import tiny

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Params
from jaxgrpo.models import decoder, lora
from jaxgrpo.models.api import LINEAR, LoraConfig, Model
from jaxgrpo.models.hf import adapters, families, folders
from jaxgrpo.models.hf.families import FAMILIES

CLOSE = 2e-4  # of logits, which are of order 1
BATCH = checkpoints.batch()
REAL = BATCH[1].astype(bool)

OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": "all-linear", "use_rslora": True},
    "qwen2": {
        "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
        "exclude_modules": ["o_proj"],
    },
    "gemma3_text": {"target_modules": r".*\.(o_proj|gate_proj|k_proj)"},
    "qwen3_5_text": {"target_modules": "all-linear"},
    "qwen3_next": {"target_modules": ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]},
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]},  # two hold several maps
    # PEFT writes these as parameters of experts, with twice the rank for gate and up
    "qwen3_moe": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "olmoe": {"target_modules": ["k_proj"], "target_parameters": ["experts.gate_up_proj"]},
}
"""What is adapted, by the family; everything in the others."""
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
OPTIONS["qwen3_next"]["target_parameters"] = EXPERTS
OPTIONS |= {
    family: {"target_modules": "all-linear", "target_parameters": EXPERTS}
    for family in ["gpt_oss", "granitemoe"]
}
OPTIONS["qwen3_5_moe_text"] = {
    "target_modules": ["q_proj", "k_proj", "in_proj_qkv", "out_proj", "shared_expert_gate"],
    "target_parameters": [*EXPERTS, "shared_expert.gate_proj.weight"],
}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
OPTIONS |= {
    family: {
        "target_modules": [*_ATTENTION, *_LATENT],
        "target_parameters": [*EXPERTS, "shared_experts.up_proj.weight"],
    }
    for family in ["glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"]
}
"""There PEFT takes "all-linear" for routers too, which are refused."""
GIVEN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
"""The fields of adapter_config.json that must be there."""


class AdapterCase(NamedTuple):
    """A random adapter of a family's small model in PEFT, and what each side computes with it."""

    folder: Path  # with base and adapter
    theirs: Any  # base and adapter
    model: Model
    base: Params
    adapter: Params
    expected: np.ndarray  # logits
    without: np.ndarray


QUICK = {"llama", "phi3", "qwen3_moe", "qwen3_next", "deepseek_v3"}
"""A family of each kind: plain, fused, with experts, with states, with latents."""
FEW = [
    family if family in QUICK else pytest.param(family, marks=pytest.mark.full)
    for family in FAMILIES
]


@pytest.fixture(scope="module", params=FEW)
def case(request, tmp_path_factory):
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp(request.param)
    theirs = checkpoints.saved(checkpoints.transformers_config(request.param), folder / "base")
    without = checkpoints.transformers_logits(theirs, *BATCH)
    options = OPTIONS.get(request.param, {"target_modules": "all-linear"})
    # Scores of latents are products of four adapted maps, whose rounding large adapters enlarge.
    options |= {"spread": 0.15} if "kv_lora_rank" in theirs.config else {}
    wrapped = checkpoints.peft_model(theirs, folder / "adapter", **options)
    model, params = jaxgrpo.load_model(folder / "base", adapter=folder / "adapter")
    adapter, base = lora.split(params)
    expected = checkpoints.transformers_logits(wrapped, *BATCH)
    return AdapterCase(folder, wrapped, model, base, adapter, expected, without)


@pytest.mark.slow
def test_an_adapter_of_peft_computes_the_same(case):
    logits = np.asarray(jaxgrpo.logits(case.model, lora.join(case.adapter, case.base), *BATCH))
    base, adapter = case.folder / "base", case.folder / "adapter"
    assert checkpoints.distance(case.theirs, base, logits, *BATCH, CLOSE, adapter) <= CLOSE
    assert np.abs(case.expected - case.without)[REAL].max() > 0.1


@pytest.mark.slow
def test_a_saved_adapter_is_the_one_that_was_read_and_peft_loads_it(case, tmp_path):
    from peft import PeftModel
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    adapters.save(case.model, case.adapter, tmp_path / "ours", base=str(case.folder / "base"))
    expected, saved = (
        load_file(folder / adapters.WEIGHTS)
        for folder in (case.folder / "adapter", tmp_path / "ours")
    )
    assert expected.keys() == saved.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(saved[name], tensor)
    theirs = AutoModelForCausalLM.from_pretrained(case.folder / "base", attn_implementation="eager")
    wrapped = PeftModel.from_pretrained(theirs, str(tmp_path / "ours")).eval()
    np.testing.assert_array_equal(checkpoints.transformers_logits(wrapped, *BATCH), case.expected)


@pytest.mark.full
@pytest.mark.slow
def test_the_merged_model_is_an_ordinary_folder(case, tmp_path):
    from transformers import AutoModelForCausalLM

    jaxgrpo.save_model(case.model, lora.join(case.adapter, case.base), tmp_path / "merged")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    logits = checkpoints.transformers_logits(theirs, *BATCH)
    np.testing.assert_allclose(logits[REAL], case.expected[REAL], atol=CLOSE, rtol=0)


def written(folder: Path, **changes: Any) -> Path:
    """An adapter folder without weights."""
    folder.mkdir(exist_ok=True)
    (folder / adapters.CONFIG).write_text(json.dumps({**GIVEN, **changes}))
    return folder


@pytest.mark.slow
def test_what_peft_writes_by_default_is_read(tmp_path):
    config = adapters.read_config(written(tmp_path), tiny.UNIFORM)
    assert config == LoraConfig(rank=4, alpha=8.0, targets="attention/query")
    eva = written(tmp_path, init_lora_weights="eva", eva_config={"rho": 2.0})
    assert adapters.read_config(eva, tiny.UNIFORM) == config
    assert adapters.read_config(written(tmp_path, layers_to_transform=[]), tiny.UNIFORM) == config
    everything = adapters.targets_from_peft("all-linear", tiny.UNIFORM)
    assert LoraConfig(rank=1, alpha=1.0, targets=everything).modules == LINEAR[:7]


@pytest.mark.parametrize("excluded", [["o_proj", "lm_head"], r".*(\.o_proj|lm_head|visual.*)"])
def test_modules_that_peft_leaves_out_have_no_adapter(excluded, tmp_path):
    """Those of images, mostly, beside a text model's."""
    folder = written(
        tmp_path, target_modules=r".*(q_proj|o_proj|lm_head)", exclude_modules=excluded
    )
    assert adapters.read_config(folder, tiny.UNIFORM).targets == "attention/query"
    some = written(tmp_path, exclude_modules=["model.layers.1.self_attn.q_proj"])
    with pytest.raises(InputError, match=r"q_proj in layers \[0.*\] only: adapt all"):
        adapters.read_config(some, tiny.UNIFORM)
    odd = written(tmp_path, exclude_modules=[1])
    with pytest.raises(InputError, match=r"exclude_modules = \[1\]: expected a text or a list"):
        adapters.read_config(odd, tiny.UNIFORM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA': known are LORA"),
        ({"use_dora": True}, "use_dora = True: not built"),
        ({"bias": "all"}, "bias = 'all': known are none"),
        ({"lora_bias": True}, "lora_bias = True: not built"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .*: not built"),
        ({"layer_replication": [[0, 1]]}, "not built, .* computes; take another adapter$"),
        ({"layers_to_transform": [1]}, "layers_to_transform = .*: not built"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True: not built"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa': it may change the weights"),
        ({"r": 0}, "r = 0: expected a whole number, 1 or more"),
        ({"target_modules": None}, "target_modules = None: expected"),
        ({"target_modules": "("}, "target_modules = .*: is no regular expression"),
        ({"target_modules": ["c_attn"]}, "matches none of .*self_attn.q_proj"),
        ({"target_modules": ["q_proj", "lm_head"]}, "has lm_head: only linear maps"),
        ({"target_modules": r"model\.layers\.1\..*q_proj"}, "q_proj in layers .1. only"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        adapters.read_config(written(tmp_path, **changes), tiny.UNIFORM)


OF_ATTENTION = r".*self_attn\..*"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_an_expression_over_all_modules_of_attention_is_read_where_peft_takes_it(family, tmp_path):
    """They have no norms of queries and keys; sinks are no module."""
    peft = pytest.importorskip("peft")
    theirs = checkpoints.saved(checkpoints.transformers_config(family), tmp_path / "base")
    expected = "|".join(LINEAR[:4])
    config = folders.read_config(tmp_path / "base")
    assert adapters.targets_from_peft(OF_ATTENTION, config) == expected
    wrapped = checkpoints.peft_model(theirs, tmp_path / "theirs", target_modules=OF_ATTENTION)
    stored = {name: tensor.clone() for name, tensor in wrapped.named_parameters()}
    model, params = jaxgrpo.load_model(tmp_path / "base", adapter=tmp_path / "theirs")
    assert model.config.lora is not None
    assert model.config.lora.targets == expected
    adapters.save(model, lora.split(params)[0], tmp_path / "ours")
    fields = json.loads((tmp_path / "ours" / adapters.CONFIG).read_text())
    assert fields["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    again = peft.PeftModel.from_pretrained(wrapped.unload(), str(tmp_path / "ours"))
    assert {name for name, _ in again.named_parameters()} == stored.keys()
    assert all(tensor.equal(stored[name]) for name, tensor in again.named_parameters())


def test_an_expression_that_takes_a_norm_in_is_refused_as_by_peft(tmp_path):
    pytest.importorskip("peft")
    theirs = checkpoints.saved(checkpoints.transformers_config("qwen3"), tmp_path / "base")
    with pytest.raises(ValueError, match="Qwen3RMSNorm"):
        checkpoints.peft_model(theirs, tmp_path / "theirs", target_modules=OF_ATTENTION)
    with pytest.raises(InputError, match=r"has self_attn.q_norm: only linear maps .* these alone"):
        adapters.targets_from_peft(OF_ATTENTION, folders.read_config(tmp_path / "base"))


@pytest.mark.parametrize(
    ("family", "target", "module"),
    [
        ("qwen3_5_text", ".*(q_proj|conv1d)", "linear_attn.conv1d"),
        ("qwen3", ["q_proj", "lm_head"], "lm_head"),  # it is the embedding
        ("gpt_oss", ["q_proj", "self_attn"], "self_attn"),
    ],
)
def test_a_module_that_has_no_adapter_is_not_passed_over(family, target, module):
    config = families.model_config(checkpoints.config_fields(family), "config.json")
    with pytest.raises(InputError, match=f"has {module}: only linear maps"):
        adapters.targets_from_peft(target, config)


PHI = dataclasses.replace(
    tiny.UNIFORM,
    family="phi3",
    query_key_norm="none",
    fused=tuple(FAMILIES["phi3"].fused.values()),
)


@pytest.mark.full
def test_a_fused_tensor_has_one_adapter_whose_parts_share_a(tmp_path):
    from safetensors.numpy import load_file

    targets = adapters.targets_from_peft(["qkv_proj", "down_proj"], PHI)
    everything = adapters.targets_from_peft("all-linear", PHI)
    assert LoraConfig(rank=2, alpha=1.0, targets=everything).modules == LINEAR[:7]
    settings = LoraConfig(rank=2, alpha=1.0, targets=targets)
    model = decoder.build(dataclasses.replace(PHI, lora=settings))
    adapter, _ = lora.split(jax.jit(model.init)(jax.random.key(0)))
    layer = adapter["blocks"]["0"]
    assert {name: set(layer["attention"][name]) for name in layer["attention"]} == {
        "query": {"lora_a", "lora_b"},
        "key": {"lora_b"},
        "value": {"lora_b"},
    }
    assert set(layer["feed_forward"]) == {"down"}
    adapters.save(model, adapter, tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / adapters.WEIGHTS)
    prefix = "base_model.model.model.layers.0.self_attn.qkv_proj"
    assert saved[f"{prefix}.lora_A.weight"].shape == (2, 32)
    assert saved[f"{prefix}.lora_B.weight"].shape == (4 * 8 + 2 * 2 * 8, 2)
    fields = json.loads((tmp_path / "adapter" / adapters.CONFIG).read_text())
    assert fields["target_modules"] == ["down_proj", "qkv_proj"]
    assert adapters.read_config(tmp_path / "adapter", PHI) == settings


@pytest.mark.slow
@pytest.mark.parametrize("targets", [".*", "attention/(query|key)"])
def test_a_part_of_a_fused_tensor_has_no_adapter_of_its_own(tmp_path, targets):
    settings = LoraConfig(rank=1, alpha=1.0, targets=targets)
    model = decoder.build(dataclasses.replace(PHI, fused=(), lora=settings))
    adapter, _ = lora.split(jax.jit(model.init)(jax.random.key(0)))
    assert "lora_a" in adapter["blocks"]["0"]["attention"]["key"]
    with pytest.raises(InputError, match="which is one map in family phi3: adapt "):
        adapters.save(model, adapter, tmp_path / "adapter")


@pytest.mark.full
@pytest.mark.parametrize("case", ["llama"], indirect=True)
def test_an_adapter_in_the_folder_of_its_base_is_read_with_it_or_refused(case, tmp_path):
    """transformers adds it to the model, where PEFT is installed."""
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(case.folder / "base", tmp_path / "both")
    for file in adapters.adapter_files(case.folder / "adapter"):
        shutil.copyfile(file, folder / file.name)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = checkpoints.transformers_logits(theirs, *BATCH)
    np.testing.assert_allclose(expected[REAL], case.expected[REAL], atol=1e-5, rtol=0)
    with pytest.raises(InputError, match=r"holds an adapter beside the model .*lora\.path"):
        jaxgrpo.load_model(folder)
    with pytest.raises(InputError, match="holds an adapter beside the model"):
        jaxgrpo.load_model(folder, adapter=case.folder / "adapter")
    model, params = jaxgrpo.load_model(folder, adapter=folder)
    logits = np.asarray(jaxgrpo.logits(model, params, *BATCH))
    np.testing.assert_allclose(logits[REAL], expected[REAL], atol=CLOSE, rtol=0)


def test_an_adapter_is_no_model_and_is_not_read_from_a_pickle(tmp_path):
    adapter = written(tmp_path / "adapter")
    with pytest.raises(InputError, match=r"this is an adapter: name it by lora\.path"):
        folders.read_config(adapter)
    with pytest.raises(InputError, match=r"owner/name/adapter_config\.json does .*hf download"):
        adapters.read_config(tmp_path / "owner/name", tiny.UNIFORM)
    (adapter / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"only as adapter_model\.bin, a pickle, .*safetensors"):
        adapters.read_config(adapter, tiny.UNIFORM)
    (adapter / adapters.WEIGHTS).write_bytes(b"x")
    with pytest.raises(InputError, match="no readable safetensors file"):
        adapters.read_config(adapter, tiny.UNIFORM)


WHOLE_ALPHA = """
import sys
import jax
from jaxgrpo.models import decoder, lora
from jaxgrpo.models.api import LoraConfig, ModelConfig
from jaxgrpo.models.hf import adapters

sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim"), 8)
sizes |= dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), 1)
model = decoder.build(ModelConfig(**sizes, lora=LoraConfig(rank=1, alpha=2)))
adapters.save(model, lora.init(model, jax.random.key(0)), sys.argv[1])
"""


@pytest.mark.full
def test_an_adapter_whose_alpha_is_a_whole_number_is_saved(tmp_path, python, environment):
    """In a process of its own: types are not checked there."""
    command = [python, "-c", WHOLE_ALPHA, str(tmp_path / "adapter")]
    subprocess.run(command, check=True, env=environment())
    assert json.loads((tmp_path / "adapter" / adapters.CONFIG).read_text())["lora_alpha"] == 2


@pytest.mark.full
def test_tensors_that_do_not_fit_are_refused_and_a_foreign_folder_stays(tmp_path):
    def built(rank: int) -> Model:
        return decoder.build(
            dataclasses.replace(tiny.UNIFORM, lora=LoraConfig(rank=rank, alpha=1.0))
        )

    adapter = lora.init(built(2), jax.random.key(0))
    adapters.save(built(2), adapter, tmp_path / "adapter", "owner/name", revision="stage1")
    fields = json.loads((tmp_path / "adapter" / adapters.CONFIG).read_text())
    assert (fields["base_model_name_or_path"], fields["revision"]) == ("owner/name", "stage1")
    adapters.save(built(2), adapter, tmp_path / "adapter")
    with pytest.raises(InputError, match=r"shape \(2, 32\), but adapter_config.json asks for"):
        adapters.read_params(tmp_path / "adapter", built(3))
    foreign = tmp_path / "adapter" / "thesis.txt"
    foreign.write_text("all of it")
    with pytest.raises(InputError, match=r"holds thesis.txt, which is no file of an adapter"):
        adapters.save(built(2), adapter, tmp_path / "adapter")
    assert foreign.exists()
