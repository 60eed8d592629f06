"""A vocabulary that devices divide among them: the same samples, and never gathered in decoding."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import compiled_programs
import jax
import numpy as np
import planned
import pytest
import tiny
from engines import draw_all, make_engine

from jaxgrpo.models import decoder, sharding
from jaxgrpo.planning import plan, topologies
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.rollout.slots.drawing import block_width
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.stopping import EarlyStop

pytestmark = pytest.mark.slow

FILLED, WHOLE = 1187 * 8, 1187 * 16
"""Vocabularies of 75 blocks, of which the last is filled up, and of 1187, as many as Qwen3 has."""
KEY = jax.random.key_data(jax.random.key(3))
ONE_TOKEN = 2e-4
"""Nats: of sums that are rounded otherwise the nucleus may end one token earlier or later, and its
last tokens have about 1 / vocabulary of the probability."""
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "whole": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 40},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.06},  # at 0.05 a token is 3e-8 nats from the limit
    "ended late": {"temperature": 1.0, "min_completion_tokens": 4},
    "named": {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "support": 40},
    "confident": {"temperature": 1.0, "early_stop": EarlyStop(confidence=0.0, window=2)},
}


@pytest.mark.full
@pytest.mark.parametrize("vocab", [FILLED, WHOLE])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_samples_do_not_depend_on_the_devices_that_divide_the_vocabulary(name, vocab):
    """Of an odd number of blocks, so that one without tokens is added."""
    assert -(-vocab // block_width(vocab)) % 2 == 1
    config = dataclasses.replace(tiny.UNIFORM, vocab_size=vocab)
    settings = SamplingSettings(8, 1.0, (tiny.END,), tiny.PAD, 4)
    settings = settings._replace(**DISTRIBUTIONS[name])
    drawn = []
    for tensor in (1, 2):
        mesh = sharding.make_mesh(tensor=tensor, devices=jax.devices()[:tensor])
        model = decoder.build(config, constrain=sharding.constrain(mesh))
        layout = sharding.param_shardings(mesh, model.axes, model.shapes, sharding.SAMPLING)
        params = jax.device_put(tiny.params(config), layout)
        prompts = put_prompts(mesh, tiny.prompts(4, 6))
        drawn.append(draw_all(make_engine(model, settings, prompts, mesh), params, prompts, KEY, 3))
    single, two = drawn
    np.testing.assert_array_equal(single.completion_tokens, two.completion_tokens)
    np.testing.assert_array_equal(single.token_mask, two.token_mask)
    close = ONE_TOKEN if "top_p" in DISTRIBUTIONS[name] else 1e-5
    np.testing.assert_allclose(single.behavior_logp, two.behavior_logp, atol=close)
    assert len(np.unique(single.completion_tokens)) > 8  # not one token again and again
    assert np.asarray(single.completion_tokens).max() > vocab // 2  # of the second device's part


SOON = [("top_p", True)]
"""One way to draw; the others in `make test-all`."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        pytest.param(*case, marks=() if case in SOON else pytest.mark.full)
        for case in itertools.product(DISTRIBUTIONS, (True, False))
    ],
)
def test_decoding_gathers_nothing_as_large_as_the_vocabulary(name, tied, tmp_path):
    model = {"path": "none", "dtype": "bfloat16"}
    config = (planned.QWEN3 if tied else planned.LLAMA) | {"vocab_size": WHOLE}
    run = planned.run(model=model | {"config": config})
    blueprint = run.blueprint
    settings = blueprint.sampling._replace(**DISTRIBUTIONS[name])
    mesh, width = blueprint.samples_on, blueprint.geometry.max_prompt_tokens
    engine = SlotEngine(blueprint.model, settings, mesh, width=width)
    run = run._replace(blueprint=blueprint._replace(sampling=settings), engine=engine)
    chips = topologies.topology("v5e:2x2")
    decode_plan = plan.plan(run, chips, ("decode",), dump=tmp_path)
    text = (tmp_path / "decode.hlo.txt").read_text()
    compilation = compiled_programs.Compiled(decode_plan, {"decode": text})
    depths = [collective.depth for _, collective in compilation.collectives()]
    assert max(depths) >= 1  # there are some in the loop
    assert compiled_programs.gathered_vocabulary(compilation) == []
