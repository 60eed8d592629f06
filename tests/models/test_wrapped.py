"""Models whose text part is one of several, beside the class of transformers that has them all."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import jax
import minimal_config
import numpy as np
import pytest
import small_run
from checkpoints import FULL, SLIDING
from quick import full_but
from safetensors.numpy import load_file, save_file

import jaxgrpo
from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Params
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder, lora
from jaxgrpo.models.api import ExpertsKind, LoraConfig, Model
from jaxgrpo.models.hf import adapters, families, folders, wrapped
from jaxgrpo.planning import programs
from jaxgrpo.training import loop, pretrained, teachers
from jaxgrpo.update import packing

CLOSE = 2e-4  # of logits, which are of order 1
BATCH = checkpoints.batch()
REAL = BATCH[1].astype(bool)
LETTERS = "".join(map(chr, range(65, 65 + checkpoints.VOCAB - 3)))

SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 28}
SIGHT |= {"num_attention_heads": 2, "patch_size": 14}
QWEN_SIGHT = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2}
QWEN = ("qwen3_5", "qwen3_5_moe")
QWEN_SIGHT |= {"patch_size": 14, "out_hidden_size": 32, "num_position_embeddings": 16}
GEMMA: dict[str, Any] = {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 5}


def config_with_images(kind: str, tied: bool) -> Any:
    """A small Gemma 3, Mistral Small 3, Ministral 3 or Qwen3.5, also with experts, with images."""
    from transformers import CONFIG_MAPPING

    sizes = {name: value for name, value in checkpoints.SIZES.items() if name != "pad_token_id"}
    indices = {"image_token_index": 60, "tie_word_embeddings": tied}
    if kind == "gemma3":
        indices |= {"boi_token_index": 59, "eoi_token_index": 58, "mm_tokens_per_image": 4}
        text, sight = {**sizes, **GEMMA, "pad_token_id": 0}, SIGHT
    elif kind in QWEN:
        indices = {"tie_word_embeddings": tied, "image_token_id": 60, "video_token_id": 59}
        indices |= {"vision_start_token_id": 58, "vision_end_token_id": 57}
        text, sight = {**sizes, **checkpoints.RICH[f"{kind}_text"]}, QWEN_SIGHT
    else:
        text = {**sizes, "model_type": kind.removesuffix("3"), "sliding_window": 5}
        if kind == "ministral3":
            text |= {"model_type": kind, "rope_parameters": checkpoints.GROWING}
            kind = "mistral3"
        sight = {**SIGHT, "model_type": "pixtral", "head_dim": 16}
    make_config: Any = CONFIG_MAPPING[kind]
    return make_config(text_config=text, vision_config=dict(sight), **indices)


class Case(NamedTuple):
    """A model with images, our model of its text, and what each computes."""

    folder: Path
    theirs: Any
    model: Model
    params: Params
    expected: np.ndarray  # logits


CASES = [(kind, tied) for kind in ("gemma3", "mistral3") for tied in (True, False)]
CASES += [("ministral3", False), *((kind, False) for kind in QWEN)]

FEW = pytest.mark.parametrize(
    "case",
    full_but((("gemma3", True), ("qwen3_5_moe", False)), CASES),
    ids=str,
    indirect=True,
)
"""For what takes long: with tied and with other tables, with states and experts."""


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param[0])
    theirs = checkpoints.saved(config_with_images(*request.param), folder, max_shard_size="60KB")
    character_tokenizer(LETTERS).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    model, params = jaxgrpo.load_model(folder, text_only=True)
    return Case(folder, theirs, model, params, checkpoints.transformers_logits(theirs, *BATCH))


@pytest.mark.slow
def test_the_text_part_computes_what_the_full_model_does(case):
    logits = np.asarray(jaxgrpo.logits(case.model, case.params, *BATCH))
    np.testing.assert_allclose(logits[REAL], case.expected[REAL], atol=CLOSE, rtol=0)
    assert 0.2 < case.expected[REAL].std() < 20


def tensors(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}


def test_an_export_is_the_full_checkpoint_bit_for_bit(case, tmp_path):
    """Under the names that were read; a file at a time."""
    options = {"base": case.folder, "max_shard_bytes": 60_000}
    jaxgrpo.save_model(case.model, case.params, tmp_path / "ours", **options)
    ours, theirs = tensors(tmp_path / "ours"), tensors(case.folder)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 3
    for name in ("tokenizer.json", "preprocessor_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (case.folder / name).read_bytes()
    stored, written = (
        json.loads((folder / "config.json").read_text())
        for folder in (case.folder, tmp_path / "ours")
    )
    assert written.pop("text_config").items() >= stored.pop("text_config").items()
    assert written == stored


@FEW
def test_what_was_trained_is_in_the_full_model_of_an_export(case, tmp_path):
    trained = jax.tree.map(lambda leaf: leaf * 1.25, case.params)
    jaxgrpo.save_model(case.model, trained, tmp_path / "ours", base=case.folder)
    again = type(case.theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    logits = np.asarray(jaxgrpo.logits(case.model, trained, *BATCH))
    full = checkpoints.transformers_logits(again, *BATCH)
    np.testing.assert_allclose(full[REAL], logits[REAL], atol=CLOSE, rtol=0)
    before, after = case.theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    carried = [name for name in before if "language_model" not in name and "lm_head" not in name]
    assert len(carried) > 10
    assert all((before[name] == after[name]).all() for name in carried)
    changed = "model.language_model.layers.0.input_layernorm.weight"
    assert not (before[changed] == after[changed]).all()


@pytest.mark.parametrize("case", CASES[2:4], ids=str, indirect=True)
def test_a_head_in_the_files_counts_where_the_two_fields_of_it_differ(case, tmp_path):
    """As transformers 5 writes Ministral 3, whose class it takes to be tied, its text not."""
    base = tmp_path / "base"
    shutil.copytree(case.folder, base)
    fields = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    fields["text_config"]["tie_word_embeddings"] = False
    (base / "config.json").write_text(json.dumps(fields))
    model, params = jaxgrpo.load_model(base, text_only=True)
    is_tied = not any(name.endswith("lm_head.weight") for name in tensors(base))
    assert model.config.tie_embeddings == case.model.config.tie_embeddings == is_tied
    again = type(case.theirs).from_pretrained(base, attn_implementation="eager").eval()
    np.testing.assert_array_equal(checkpoints.transformers_logits(again, *BATCH), case.expected)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, case.params)))
    jaxgrpo.save_model(model, params, tmp_path / "ours", base=base)
    written = json.loads((tmp_path / "ours/config.json").read_text())
    assert written["tie_word_embeddings"] is is_tied
    assert tensors(tmp_path / "ours").keys() == tensors(base).keys()


@pytest.mark.full
def test_both_ways_of_writing_the_names_are_read_and_kept(case, tmp_path):
    """As modules are called today, and as they were before transformers 4.52 and are on the hub."""
    old = wrapped.SPELLINGS[1]
    if case.model.config.recurs:
        return  # it is younger than the other way
    renamed = {}
    for name, array in tensors(case.folder).items():
        text = name.removeprefix(old.head)
        is_text = name.startswith(old.head)
        renamed[wrapped.SPELLINGS[0].name(text) if is_text else f"model.{name}"] = array
    shutil.copytree(case.folder, tmp_path / "new", ignore=shutil.ignore_patterns("model*"))
    save_file(renamed, tmp_path / "new/model.safetensors", metadata={"format": "pt"})
    model, params = jaxgrpo.load_model(tmp_path / "new", text_only=True)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, case.params)))
    jaxgrpo.save_model(model, params, tmp_path / "ours", base=tmp_path / "new")
    assert tensors(tmp_path / "ours").keys() == renamed.keys()
    again = type(case.theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    np.testing.assert_array_equal(checkpoints.transformers_logits(again, *BATCH), case.expected)


@pytest.mark.full
@FEW
def test_without_the_key_one_line_names_it(case, capsys):
    with pytest.raises(InputError, match=r"set model\.text_only = true to train its text part"):
        jaxgrpo.load_model(case.folder)
    assert main(["model", str(case.folder)]) == 2
    assert "model.text_only = true" in capsys.readouterr().err
    assert main(["model", str(case.folder), "--text-only"]) == 0
    assert case.model.config.family in capsys.readouterr().out


@FEW
def test_a_run_reads_the_text_part(case):
    lengths = ("rollout.max_prompt_tokens=8", "rollout.max_completion_tokens=8")
    config = minimal_config.read(f"model.path={case.folder}", "model.text_only=true", *lengths)
    start = config.model, config.lora, config.rollout, config.train.remat
    run_model = pretrained.find_model(*start, pretrained.make_mesh(config.mesh))
    model = run_model.model
    assert model.config.text_only
    assert model.config.family == case.model.config.family
    assert programs.read_model_config(config.model, config.lora).text_only
    assert families.unread(model.config).startswith("of the ")
    sizes = packing.Geometry(1, 1, 8, 8, bins=1, tokens=16)
    teacher = teachers.find_teacher(str(case.folder), run_model, "xla", sizes)
    assert teacher.model.config.text_only


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "is_text", [True, pytest.param(False, marks=pytest.mark.full)], ids=["text", "endings"]
)
@FEW
def test_adapters_have_the_names_that_peft_gives_them(case, is_text, tmp_path):
    """Of the text alone; PEFT takes a list of endings for the modules of images too."""
    pytest.importorskip("peft")
    from peft import PeftModel

    def full() -> Any:
        again = type(case.theirs).from_pretrained(case.folder, attn_implementation="eager")
        return again.eval()

    has_experts = any(isinstance(kind.feed, ExpertsKind) for kind in case.model.config.kinds)
    linear = "out_proj" if has_experts else "down_proj"  # experts have no adapters
    names = rf".*language_model.*\.(q_proj|{linear})" if is_text else ["q_proj", linear]
    peft = checkpoints.peft_model(full(), tmp_path / "theirs", target_modules=names)
    if not is_text and not case.model.config.recurs:  # where images have other names
        with pytest.raises(InputError, match=r"unknown: .*vision_tower"):
            jaxgrpo.load_model(case.folder, text_only=True, adapter=tmp_path / "theirs")
        return
    model, params = jaxgrpo.load_model(case.folder, text_only=True, adapter=tmp_path / "theirs")
    expected = checkpoints.transformers_logits(peft, *BATCH)
    logits = np.asarray(jaxgrpo.logits(model, params, *BATCH))
    np.testing.assert_allclose(logits[REAL], expected[REAL], atol=CLOSE, rtol=0)
    assert np.abs(expected - case.expected)[REAL].max() > 0.1
    adapters.save(model, lora.split(params)[0], tmp_path / "ours", base=str(case.folder))
    ours, theirs = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    again = PeftModel.from_pretrained(full(), tmp_path / "ours").eval()
    np.testing.assert_array_equal(checkpoints.transformers_logits(again, *BATCH), expected)
    jaxgrpo.save_model(model, params, tmp_path / "merged", base=case.folder)
    assert tensors(tmp_path / "merged").keys() == tensors(case.folder).keys()


@FEW
def test_adapters_of_the_text_alone_are_read(case, tmp_path):
    """As PEFT names them over AutoModelForCausalLM, which takes the text out of a Qwen3.5; a rank
    may be said of a module's whole name."""
    text = json.loads((case.folder / "config.json").read_text())["text_config"]
    architecture = families.FAMILIES[text["model_type"]].architecture
    config = families.model_config({**text, "architectures": [architecture]}, "a test")
    settings = LoraConfig(rank=2, alpha=4.0, targets="attention/(query|out)")
    plain = decoder.build(dataclasses.replace(config, lora=settings))
    adapter = jax.tree.map(lambda leaf: leaf + 0.2, lora.init(plain, jax.random.key(0)))
    adapters.save(plain, adapter, tmp_path / "plain")
    loaded = jaxgrpo.load_model(case.folder, text_only=True, adapter=tmp_path / "plain")
    read = lora.split(loaded[1])[0]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, read, adapter)))
    file = tmp_path / "plain/adapter_config.json"
    fields = json.loads(file.read_text()) | {"target_modules": r"model\.layers\.\d+\.\w+\.q_proj"}
    for start in ("model", r"model\.language_model", r"language_model\.model"):
        pattern = {rf"{start}\.layers\.\d+\.self_attn\.q_proj": 3}
        file.write_text(json.dumps(fields | {"rank_pattern": pattern}))
        read = adapters.read_config(tmp_path / "plain", case.model.config)
        assert (read.targets, read.ranks) == ("attention/query", (("attention/query", 3, 4.0),))


@pytest.mark.full
@FEW
def test_peft_finds_the_full_model_of_an_adapter_and_adapts_its_text(case, tmp_path):
    auto = pytest.importorskip("peft").AutoPeftModelForCausalLM
    settings = LoraConfig(rank=2, alpha=4.0, targets="attention/query")
    adapted = dataclasses.replace(case.model.config, lora=settings)
    model = decoder.build(adapted)
    adapter = jax.tree.map(lambda leaf: leaf + 0.2, lora.init(model, jax.random.key(0)))
    adapters.save(model, adapter, tmp_path / "ours", base=str(case.folder))
    assert adapters.read_config(tmp_path / "ours", case.model.config) == settings
    shutil.copyfile(case.folder / "tokenizer_config.json", tmp_path / "ours/tokenizer_config.json")
    shutil.copyfile(case.folder / "tokenizer.json", tmp_path / "ours/tokenizer.json")
    theirs = auto.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    expected = checkpoints.transformers_logits(theirs, *BATCH)
    logits = np.asarray(jaxgrpo.logits(model, lora.join(adapter, case.params), *BATCH))
    np.testing.assert_allclose(logits[REAL], expected[REAL], atol=CLOSE, rtol=0)
    assert np.abs(expected - case.expected)[REAL].max() > 0.01


@pytest.mark.full
def test_a_run_trains_resumes_and_exports_the_text_part(tmp_path):
    base = tmp_path / "base"
    theirs = checkpoints.saved(config_with_images("gemma3", True), base)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(f"{small_run.base()}/{name}", base / name)
    changes = {"model.path": str(base), "model.text_only": True, "checkpoint.every": 1}
    loop.train(small_run.config(tmp_path / "run", **changes, **{"train.steps": 2}))
    run = loop.train(small_run.config(tmp_path / "run", **changes), resume="auto")
    stored_base = tensors(base)
    carried = [name for name in stored_base if not name.startswith("language_model.")]
    for folder in (run.path / "model", run.export(tmp_path / "out")):
        stored = tensors(Path(folder))
        assert stored.keys() == stored_base.keys()
        assert all(np.array_equal(stored[name], stored_base[name]) for name in carried)
        again = type(theirs).from_pretrained(folder, attn_implementation="eager").eval()
        expected = checkpoints.transformers_logits(again, *BATCH)
        logits = jaxgrpo.logits(*jaxgrpo.load_model(folder, text_only=True), *BATCH)
        np.testing.assert_allclose(np.asarray(logits)[REAL], expected[REAL], atol=CLOSE, rtol=0)
        changed = "language_model.model.embed_tokens.weight"
        assert not np.array_equal(stored[changed], stored_base[changed])


def test_an_export_needs_the_rest_of_the_model(case, tmp_path):
    with pytest.raises(InputError, match="give the folder that it was read from as base="):
        jaxgrpo.save_model(case.model, case.params, tmp_path / "ours")


@pytest.mark.parametrize(
    ("changes", "text", "problem"),
    [
        ({"model_type": "llava"}, {}, "model_type = 'llava': text models are read from gemma3, "),
        ({"architectures": ["Another"]}, {}, "architectures = .*only Gemma3ForConditional"),
        ({"a_field_of_tomorrow": 3}, {}, "a_field_of_tomorrow = 3: not built"),
        ({}, {"a_field_of_tomorrow": 3}, "a_field_of_tomorrow = 3: not built"),
        ({}, {"model_type": "gemma9_text"}, "model_type = 'gemma9_text' is not built"),
        ({"quantization_config": {"bits": 8}}, {}, "quantization_config = "),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes, text, problem):
    fields = json.loads(config_with_images("gemma3", True).to_json_string())
    fields = {**fields, **changes, "text_config": {**fields["text_config"], **text}}
    with pytest.raises(InputError, match=problem):
        families.model_config(fields, "a test", text_only=True)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("named", [True, False])
def test_text_config_need_not_name_the_model_of_the_text(kind, named):
    """transformers takes that of the class, also where text_config names the class's."""
    fields = json.loads(config_with_images(kind, False).to_json_string())
    text_type = fields["text_config"].pop("model_type")
    fields["text_config"] |= {"model_type": kind} if named else {}
    config = families.model_config(fields, "a test", text_only=True)
    assert config.family == text_type
    written = families.config_fields(config, "float32")
    assert written["text_config"]["model_type"] == text_type


def test_a_field_of_the_text_may_stand_beside_text_config_too():
    """As some programs write it; with another value it is not known which one counts."""
    fields = json.loads(config_with_images("gemma3", True).to_json_string())
    size = fields["text_config"]["hidden_size"]
    config = families.model_config({**fields, "hidden_size": size}, "a test", text_only=True)
    assert config.hidden_size == size
    with pytest.raises(InputError, match=f"hidden_size = {size + 1}: not built"):
        families.model_config({**fields, "hidden_size": size + 1}, "a test", text_only=True)


def test_a_wrapper_that_is_not_read_is_refused_at_once():
    """Not first for want of a key, and then for good."""
    fields = json.loads(config_with_images("gemma3", True).to_json_string())
    with pytest.raises(InputError, match="text models are read from gemma3, ") as caught:
        families.model_config({**fields, "model_type": "llava"}, "a test")
    assert "text_only" not in str(caught.value)


def test_the_config_of_gemma_3_4b_is_complete():
    """It leaves out what transformers assumes. Read off the published file."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    fields = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {"model_type": "gemma3_text", **text},
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    config = families.model_config(fields, "a test", text_only=True)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262_208, 8, 4)
    assert (config.tie_embeddings, config.dtype) == (True, "bfloat16")
    written = families.config_fields(config, "float32")
    assert written["torch_dtype"] == "float32"
    assert "dtype" not in written["text_config"]


def test_the_config_of_qwen3_8_27b_is_complete():
    """It names the gate of layers that recur, and says twice what share of a head turns. Read off
    what a program writes that is compared with the published file."""
    heads = {"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256}
    linear = {"linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128}
    linear |= {"linear_num_value_heads": 48, "linear_value_head_dim": 128}
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
    rope |= {"partial_rotary_factor": 0.25, "rope_theta": 10_000_000}
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": 248_320,
    }
    text |= {"hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64}
    text |= {"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True}
    text |= {"full_attention_interval": 4, "hidden_act": "silu", "initializer_range": 0.02}
    text |= {"layer_types": [*["linear_attention"] * 3, FULL] * 16, "mamba_ssm_dtype": "float32"}
    text |= {"max_position_embeddings": 262_144, "mtp_num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    text |= {"mtp_use_dedicated_embeddings": False, "output_gate_type": "swish", "use_cache": True}
    text |= {"bos_token_id": 248_044, "eos_token_id": 248_044, "pad_token_id": None}
    text |= {"partial_rotary_factor": 0.25, "rope_parameters": rope, "tie_word_embeddings": False}
    text |= heads | linear
    fields: dict[str, Any] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
    }
    fields |= {"image_token_id": 248_056, "video_token_id": 248_057, "tie_word_embeddings": False}
    fields |= {"vision_start_token_id": 248_053, "vision_end_token_id": 248_054}
    fields |= {"language_model_only": False, "text_config": text, "vision_config": {"depth": 27}}
    config = families.model_config(fields, "a test", text_only=True)
    assert (config.num_layers, config.num_heads, config.tie_embeddings) == (64, 24, False)
    text["output_gate_type"] = "sigmoid"
    with pytest.raises(InputError, match="output_gate_type = 'sigmoid': known are silu, swish"):
        families.model_config(fields, "a test", text_only=True)


def test_a_folder_without_the_text_model_is_refused(case, tmp_path):
    shutil.copytree(case.folder, tmp_path / "m", ignore=shutil.ignore_patterns("model*"))
    sight = {n: a for n, a in tensors(case.folder).items() if "language_model" not in n}
    save_file(sight, tmp_path / "m/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"no tensor is called model\.language_model\.\* or"):
        jaxgrpo.load_model(tmp_path / "m", text_only=True)


def test_a_text_model_that_transformers_took_out_of_a_full_one_is_read(case, tmp_path):
    """Qwen3.5's is saved under the full model's names, and written so again."""
    if not case.model.config.recurs:
        return
    fields = json.loads((case.folder / "config.json").read_text())["text_config"]
    fields["architectures"] = [families.FAMILIES[fields["model_type"]].architecture]
    text = {n: a for n, a in tensors(case.folder).items() if "language_model" in n or "lm_" in n}
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(fields))
    save_file(text, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    model, params = jaxgrpo.load_model(tmp_path / "base")
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, case.params)))
    jaxgrpo.save_model(model, params, tmp_path / "ours", base=tmp_path / "base")
    assert tensors(tmp_path / "ours").keys() == text.keys()


def test_text_config_alone_beside_all_tensors_of_a_full_model_is_read(case, tmp_path):
    """As by transformers, which ignores those of images; an export keeps them."""
    if not case.model.config.recurs:
        return
    full = json.loads((case.folder / "config.json").read_text())
    fields = {**full["text_config"], "architectures": full["architectures"]}
    shutil.copytree(case.folder, tmp_path / "base")
    (tmp_path / "base/config.json").write_text(json.dumps(fields))
    model, params = jaxgrpo.load_model(tmp_path / "base")
    assert not model.config.text_only
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, case.params)))
    jaxgrpo.save_model(model, params, tmp_path / "ours", base=tmp_path / "base")
    ours, theirs = tensors(tmp_path / "ours"), tensors(case.folder)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_tensors_that_transformers_ignores_are_carried(tmp_path, monkeypatch):
    """As those of layers that predict further tokens: by a list of the family, or as numbered
    behind the model's layers."""
    fields = checkpoints.config_fields("llama")
    checkpoints.redrawn(fields, tmp_path / "base")
    stored = load_file(tmp_path / "base/model.safetensors")
    numbers = np.arange(6, dtype=np.int64)
    layer = {"model.layers.3.mlp.up_proj.weight": numbers.astype(np.float16)}
    more = {"mtp.layers.0.weight": numbers} | layer

    def read(more: dict[str, np.ndarray]) -> Any:
        save_file(stored | more, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
        return jaxgrpo.load_model(tmp_path / "base")

    with pytest.raises(InputError, match=r"unknown: model\.layers\.3\..*, mtp\.layers\.0\.weight"):
        read(more)
    family = families.FAMILIES["llama"]._replace(carried=("mtp.",))
    monkeypatch.setitem(families.FAMILIES, "llama", family)
    with pytest.raises(InputError, match=r"unknown: model\.layers\.3\.mlp\.up_proj\.weight: "):
        read(more)
    more["model.layers.3.eh_proj.weight"] = numbers
    model, params = read(more)
    jaxgrpo.save_model(model, params, tmp_path / "ours", base=tmp_path / "base")
    exported = load_file(tmp_path / "ours/model.safetensors")
    assert exported.keys() == stored.keys() | more.keys()
    for name, tensor in more.items():
        np.testing.assert_array_equal(exported[name], tensor)
        assert exported[name].dtype == tensor.dtype
    assert folders.read_dtypes(tmp_path / "base", model)["I64"] == 2
