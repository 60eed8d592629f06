"""What an update of Qwen3-0.6B moves on chips that are not here: 256 samples of 512 + 1,024 tokens.

All 28 layers are compiled: they are a loop, so that fewer would not compile faster.
"""

from __future__ import annotations

import math

import compiled_programs
import pytest
from planned import NEEDS_CUDA

from jaxgrpo.planning import hlo, topologies

RECIPE = "qwen3_0p6b_v5e"
ONE_DEVICE = ("mesh.fsdp=1", "mesh.tensor=1")


@pytest.mark.full
def test_an_update_on_eight_v5e_moves_700_gb_of_each_chip(tmp_path):
    """681. 863 before chunks of 2,048 tokens, 724 where attention is computed again, and 717 where
    tokens are sliced into rows and prompts."""
    compiled = compiled_programs.compiled(RECIPE, tmp_path, names=("update",))
    assert compiled_programs.problems(compiled) == []
    (planned,) = compiled.plan.planned
    assert compiled.plan.run.blueprint.remat == "attention"
    assert planned.traffic.moved <= 700e9
    assert planned.peak <= 0.5 * topologies.CHIPS["v5e"].memory


@pytest.mark.fault(5)
@pytest.mark.slow
@NEEDS_CUDA
def test_an_update_on_an_h100_holds_no_scores_and_moves_11_tb_at_the_most(tmp_path):
    """28.3 TB before, with attention by XLA, everything computed again, chunks of 256 tokens."""
    chips = {"topology": "h100:1x1", "names": ("update",)}
    compiled = compiled_programs.compiled(RECIPE, tmp_path, *ONE_DEVICE, **chips)
    run, text = compiled.plan.run, compiled.texts["update"]
    (planned,) = compiled.plan.planned
    geometry, heads = run.blueprint.geometry, run.blueprint.model.config.num_heads
    assert (run.blueprint.kernel.name, run.blueprint.remat) == ("cudnn", "dots")
    calls = {name: text.count(f'"__cudnn$fmhaSoftmax{name}"') for name in ("", "Backward")}
    assert min(calls.values()) >= 3  # of prompts, of samples, and of samples to prompts
    tokens, prompt = geometry.max_completion_tokens, geometry.max_prompt_tokens - 1
    widths = {prompt, prompt + 1, tokens + prompt, tokens + prompt + 1}
    for array in set(hlo.arrays(text)):  # a block of scores: of heads, for queries and keys
        is_scores = (
            widths & {*array.shape[-2:]} and math.prod(array.shape) >= heads * tokens * prompt
        )
        assert not (is_scores and array.dtype == "f32"), array
    assert planned.traffic.moved <= 11e12
    assert planned.peak <= 0.5 * topologies.CHIPS["h100"].memory
