"""What the benchmark of sampling compares: the same prompts, the same model, time per token."""

import os

import jax
import numpy as np
import pytest
from engines import draw_all, make_engine

from benchmarks.peers import Run, Transformers, Vllm
from benchmarks.programs import deep_config
from benchmarks.sampling import in_turn, ratio, work_settings
from benchmarks.workloads import OF_KINDS, WORKLOADS, Workload, build, make_prompts, model_config
from jaxgrpo.models import decoder
from jaxgrpo.planning.costs import forward_flops

SMALL = Workload(prompts=2, samples=3, shortest=2, longest=9, completion=5)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_the_peer_has_our_model_and_counts_what_it_generates(ragged):
    pytest.importorskip("torch")
    work = SMALL._replace(ragged=ragged)
    model, params = build(deep_config(2), ragged)
    prompts = make_prompts(work, 512)
    peer = Transformers(model, params, prompts, work)
    key = jax.random.key_data(jax.random.key(0))
    engine = make_engine(model, work_settings(work, 64), prompts)
    rollouts = draw_all(engine, params, prompts, key, work.samples)
    assert peer.difference(rollouts) < 1e-4
    tokens = [peer.run(seed).tokens for seed in range(3)]
    assert max(tokens) <= 2 * 3 * 5
    assert (min(tokens) == 2 * 3 * 5) is not ragged
    np.testing.assert_array_equal(peer.mask[0].bool(), prompts.prompt_mask[0][::-1])
    prompt_tokens = peer.tokens[0][peer.mask[0].bool()]
    np.testing.assert_array_equal(prompt_tokens, prompts.prompt_tokens[0][prompts.prompt_mask[0]])


@pytest.mark.full
@pytest.mark.parametrize("name", OF_KINDS)
def test_models_with_states_or_experts_do_the_work_of_the_dense_one(name):
    work = WORKLOADS["A"]
    sizes = work.prompts, work.longest, work.prompts * work.samples, work.completion
    flops, dense = (
        forward_flops(decoder.build(model_config(letter)), *sizes) for letter in (name, name[0])
    )
    assert flops == pytest.approx(dense, rel=0.02)


def test_a_ratio_is_of_seconds_per_token_in_each_round():
    theirs = {1: Run(6.0, 100), 2: Run(8.0, 100), 3: Run(9.0, 100)}
    ours = {1: Run(1.0, 50), 2: Run(1.0, 50), 3: Run(4.0, 200)}
    runs = in_turn({"ours": ours.__getitem__, "peer": theirs.__getitem__}, rounds=3)
    median, low, high = ratio(runs, "peer", "ours")
    np.testing.assert_allclose((median, low, high), (4.0, 3.0, 4.5))


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="vLLM has an environment of its own")
def test_vllm_has_our_model_and_counts_what_it_generates(ragged):
    work = SMALL._replace(ragged=ragged)
    model, params = build(deep_config(2), ragged)
    prompts = make_prompts(work, 512)
    engine = make_engine(model, work_settings(work, 64), prompts)
    key = jax.random.key_data(jax.random.key(0))
    rollouts = draw_all(engine, params, prompts, key, work.samples)
    peer = Vllm(model, params, prompts, work, os.environ["VLLM_PYTHON"])
    assert peer.difference(rollouts) < 1e-4
    assert (min(peer.run(seed).tokens for seed in range(3)) == 2 * 3 * 5) is not ragged
