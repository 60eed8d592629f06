"""What the benchmark of sampling compares: the same prompts, the same model, time per token."""

import json

import jax
import numpy as np
import pytest

from benchmarks import workload_c
from benchmarks.peers import Run, Transformers
from benchmarks.programs import deep_config
from benchmarks.sampling import in_turn, ratio, settings_of
from benchmarks.workloads import WORKLOADS, Workload, build, model_config, prompts_of
from jaxgrpo.config import files
from jaxgrpo.models.hf import folders
from jaxgrpo.rollout.sampler import make_sampler, sample

SMALL = Workload(prompts=2, samples=3, shortest=2, longest=9, completion=5)


@pytest.mark.slow
def test_training_on_c_has_the_prompts_and_sizes_of_the_benchmark(tmp_path):
    model, prompts = workload_c.write(tmp_path)
    tokenizer = folders.read_tokenizer(model)
    asked = prompts_of(WORKLOADS["C"], model_config("S").vocab_size)
    lines = prompts.read_text().splitlines()
    config = files.load(workload_c.CONFIG, [f"model.path={model}", f"data.path={prompts}"])
    rollout, work = config.rollout, WORKLOADS["C"]
    assert (rollout.max_prompt_tokens, rollout.max_completion_tokens) == (256, work.completion)
    assert (rollout.prompts_per_step, rollout.group_size) == (len(lines), work.samples)
    for line, tokens, mask in zip(lines, asked.prompt_tokens, asked.prompt_mask, strict=True):
        assert tokenizer(json.loads(line)["prompt"])["input_ids"] == tokens[mask].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_the_peer_has_our_model_and_counts_what_it_generates(ragged):
    pytest.importorskip("torch")
    work = SMALL._replace(ragged=ragged)
    model, params = build(deep_config(2), ragged)
    prompts = prompts_of(work, 512)
    peer = Transformers(model, params, prompts, work)
    key = jax.random.key_data(jax.random.key(0))
    rollouts = sample(make_sampler(model, settings_of(work, 64)), params, prompts, key)
    assert peer.difference(rollouts) < 1e-4
    tokens = [peer.run(seed).tokens for seed in range(3)]
    assert max(tokens) <= 2 * 3 * 5
    assert (min(tokens) == 2 * 3 * 5) is not ragged
    np.testing.assert_array_equal(peer.mask[0].bool(), prompts.prompt_mask[0][::-1])
    kept = peer.tokens[0][peer.mask[0].bool()]
    np.testing.assert_array_equal(kept, prompts.prompt_tokens[0][prompts.prompt_mask[0]])


def test_a_ratio_is_of_seconds_per_token_in_each_round():
    theirs = {1: Run(6.0, 100), 2: Run(8.0, 100), 3: Run(9.0, 100)}
    ours = {1: Run(1.0, 50), 2: Run(1.0, 50), 3: Run(4.0, 200)}
    runs = in_turn({"ours": ours.__getitem__, "peer": theirs.__getitem__}, rounds=3)
    median, low, high = ratio(runs, "peer", "ours")
    np.testing.assert_allclose((median, low, high), (4.0, 3.0, 4.5))
