"""GSM8K from end to end: a checkpoint of transformers, own data and rewards, and back again."""

from __future__ import annotations

import math

import gsm8k
import numpy as np
import pytest
import whole_logits
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import jaxgrpo
from jaxgrpo.models.decoder import build
from jaxgrpo.models.hf.folders import read_config, read_params
from jaxgrpo.rewards import gsm8k_answer

pytestmark = pytest.mark.full

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
CONFIG = """\
rewards = [
  { use = "gsm8k_answer" },
  { use = "own.py:letters", weight = 0.5 },
]

[model]
path = "./base"

[data]
path = "train.jsonl"
prompt = "{question} Let's think step by step and output the final answer after \\"####\\"."
system = "You are careful."
chat_template_kwargs = { enable_thinking = false }
too_long = "drop"

[optimizer]
learning_rate = 0.02

[rollout]
prompts_per_step = 16
group_size = 8
max_prompt_tokens = 224
max_completion_tokens = 12
segment_tokens = 12

[train]
steps = 3

[eval]
data = "test.jsonl"
prompts = 64
samples = 2
scorer = "own.py:judge"
"""
OWN_CODE = '''\
from pathlib import Path

from jaxgrpo.rewards import gsm8k_answer


def letters(completions, **columns):
    """Dense: a random model never answers right."""
    return [sum(map(str.islower, text)) / len(text) if text else None for text in completions]


def judge(completions, answer, question, **columns):
    """gsm8k_answer, noting each problem that it judges a completion of."""
    with Path(__file__).with_name("judged").open("a") as file:
        file.writelines(f"{text!r}\\n" for text in question)
    return gsm8k_answer(completions=completions, answer=answer)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gsm8k")
    gsm8k.source(folder, "train", 200)
    gsm8k.source(folder, "test", 120)
    gsm8k.checkpoint(folder / "base", hidden_size=128)
    (folder / "own.py").write_text(OWN_CODE)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    """Three steps, by the config as a user writes it."""
    (folder / "run.toml").write_text(CONFIG)
    return jaxgrpo.train(folder / "run.toml", run={"dir": str(folder / "run")})


@pytest.fixture(scope="module")
def exported(run, folder):
    return run.export(folder / "exported")


def test_every_weight_of_the_checkpoint_has_changed(folder, exported):
    before, after = (load_file(at / "model.safetensors") for at in (folder / "base", exported))
    assert before.keys() == after.keys()
    assert [name for name, weight in after.items() if np.array_equal(weight, before[name])] == []


def test_the_dense_reward_rises_by_more_than_chance(run):
    first, _, third = run.metrics[-3:]
    error = math.hypot(first["rewards/letters/std"], third["rewards/letters/std"]) / math.sqrt(
        16 * 8
    )
    assert third["rewards/letters/mean"] - first["rewards/letters/mean"] > 3 * error
    assert first["live_groups"] == third["live_groups"] == 1
    assert all("rewards/gsm8k_answer/mean" in line for line in run.metrics[-3:])


def test_the_model_is_evaluated_on_64_problems_before_and_after(run, folder):
    # The greedy answer and two samples of each problem, before the first step and after the last.
    judged = (folder / "judged").read_text().splitlines()
    assert len(judged) == 2 * 64 * (1 + 2)
    assert len(set(judged)) == 64
    assert {line["step"] for line in run.metrics if "eval/accuracy" in line} == {0, 3}
    assert {"accuracy", "pass@1", "truncated"} <= run.summary["base"].keys()
    assert run.summary["trained"].keys() == run.summary["base"].keys()


def test_gold_answers_of_the_data_are_right_answers(folder):
    rows = gsm8k.rows("test", 64)
    answers = [row["answer"] for row in rows]
    assert gsm8k_answer(completions=answers, answer=answers) == [1.0] * 64


def test_transformers_reads_the_exported_model_with_equal_logits(run, folder, exported):
    tokens = np.random.default_rng(0).integers(3, gsm8k.VOCABULARY, size=(4, 48))
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype="float32").eval()
    expected = whole_logits.torch_logits(theirs, tokens)
    assert expected.std() > 0.1
    model = build(read_config(exported))
    # Of the parameters as training left them, and of those that are read back.
    for params in (run.learner.trainable, read_params(exported, model)):
        ours = whole_logits.our_logits(model, params, tokens)
        assert np.abs(ours - expected).max() < 1e-4


def test_the_exported_tokenizer_writes_the_prompts_that_were_trained_on(run, exported):
    config = jaxgrpo.load_config(run.path / "config.toml")
    prompts = jaxgrpo.setup(config).inputs.prompts
    words = AutoTokenizer.from_pretrained(exported)
    for row, encoded in zip(prompts.rows[:8], prompts.encoded[:8], strict=True):
        messages = [
            {"role": "system", "content": "You are careful."},
            {"role": "user", "content": f"{row['question']} {INSTRUCTION}"},
        ]
        text = words.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        assert words(text, add_special_tokens=False)["input_ids"] == encoded.tolist()
        assert text.endswith("<think>\n\n</think>\n\n")
