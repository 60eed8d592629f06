"""Rotary frequencies beside those of transformers, type by type, without a model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.models.hf import rope
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.layers import rotary_angles

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FACTORS = [1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": FACTORS,
    "long_factor": FACTORS[::-1],
    "original_max_position_embeddings": 128,
}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "default, theta 1": {"rope_type": "default", "rope_theta": 1.0},
    "default, theta a million": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "linear, factor 1": {"rope_type": "linear", "factor": 1.0},
    "linear, factor below 1": {"rope_type": "linear", "factor": 0.5},
    "linear, by its older name": {"type": "linear", "factor": 3},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic, factor 1": {"rope_type": "dynamic", "factor": 1.0},
    "llama3": LLAMA3,
    "llama3, factor 1": {**LLAMA3, "factor": 1.0},
    "llama3, low is high": {**LLAMA3, "high_freq_factor": 1.0},
    "llama3, low above high": {**LLAMA3, "low_freq_factor": 6.0},
    "llama3, all between": {**LLAMA3, "low_freq_factor": 1e-6, "high_freq_factor": 100.0},
    "llama3, original length as the other": {
        name: value for name, value in LLAMA3.items() if "original" not in name
    },
    "yarn": YARN,
    "yarn, factor 1": {**YARN, "factor": 1.0},
    "yarn, factor below 1": {**YARN, "factor": 0.5},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, truncate null": {**YARN, "truncate": None},
    "yarn, betas": {**YARN, "beta_fast": 8, "beta_slow": 2.5},
    "yarn, betas beyond both ends": {**YARN, "beta_fast": 1e4, "beta_slow": 1e-6},
    "yarn, both betas before pair 0": {**YARN, "beta_fast": 1e5, "beta_slow": 1e4},
    "yarn, both betas after the last pair": {**YARN, "beta_fast": 1e-6, "beta_slow": 1e-7},
    "yarn, betas alike": {**YARN, "beta_fast": 2, "beta_slow": 2, "truncate": False},
    "yarn, betas in the other order": {**YARN, "beta_fast": 1, "beta_slow": 32},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, mscale alone": {**YARN, "mscale": 0.7},
    "yarn, attention_factor": {**YARN, "attention_factor": 1.7, "mscale": 2.0},
    "yarn, attention_factor null": {**YARN, "attention_factor": None, "beta_fast": None},
    "yarn, theta a million": {**YARN, "rope_theta": 1e6},
    "longrope": LONGROPE,
    "longrope, factor": {**LONGROPE, "factor": 32.0},
    "longrope, factor 1": {**LONGROPE, "factor": 1.0},
    "longrope, attention_factor": {**LONGROPE, "attention_factor": 1.2},
}


def at_position_1(turn: rope.Turn, head_dim: int) -> np.ndarray:
    """Cosine and sine of each pair's angle, times the scale."""
    with jax.disable_jit():  # each case would be a program of its own
        angles = rotary_angles(jnp.asarray([1]), turn.rope, head_dim)
    assert angles is not None
    assert angles[2] == 1  # growth of queries
    return np.asarray(angles[:2], float).reshape(2, -1)


def transformers_rope(rope_fields: dict[str, Any]) -> tuple[np.ndarray, float]:
    """(frequencies, scale)."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config: Any = LlamaConfig(
        head_dim=16, max_position_embeddings=512, rope_parameters={"rope_theta": 1e4, **rope_fields}
    )
    kind = config.rope_parameters["rope_type"]
    plain = LlamaRotaryEmbedding.compute_default_rope_parameters
    frequency, scale = ROPE_INIT_FUNCTIONS.get(kind, plain)(config)
    return frequency.numpy(), scale


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_scale_are_those_of_transformers(case):
    fields = Fields({"rope_parameters": CASES[case]})
    turn = rope.read_turn(fields, head_dim=16, max_positions=512)
    assert fields.problems == []
    cos, sin = at_position_1(turn, 16)
    frequency, scale = transformers_rope(CASES[case])
    # At position 1 the angle is the frequency, all of which are below pi here.
    np.testing.assert_allclose(np.arctan2(sin, cos), frequency, rtol=1e-5)
    np.testing.assert_allclose(np.hypot(cos, sin), scale, rtol=1e-6)
    limits = {"dynamic": 512, "longrope": 128}
    assert turn.limit == limits.get(CASES[case].get("rope_type", ""))


def test_a_share_of_the_head_turns_as_a_head_of_that_size_does():
    fields = Fields({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}})
    turn = rope.read_turn(fields, head_dim=32, max_positions=512, partial=True)
    cos, sin = at_position_1(turn, 32)
    angle = np.arctan2(sin, cos)
    np.testing.assert_allclose(angle, transformers_rope({"rope_type": "default"})[0], rtol=1e-5)


WRONG = {
    "theta 1 in yarn": ({**YARN, "rope_theta": 1.0}, "rope_theta"),
    "an original length of 1 in longrope": (
        {**LONGROPE, "original_max_position_embeddings": 1},
        "original_max_position_embeddings",
    ),
    "short factors": ({**LONGROPE, "short_factor": FACTORS[:-1]}, "short_factor"),
    "long factors": ({**LONGROPE, "long_factor": [1.0]}, "long_factor"),
    "no factor": ({"rope_type": "linear"}, "factor"),
    "a factor of 0": ({"rope_type": "linear", "factor": 0}, "factor"),
    "a null factor": ({**YARN, "factor": None}, "factor"),
    "an unknown key": ({**YARN, "beta_quick": 3}, "beta_quick"),
    "an unknown type": ({"rope_type": "proportional"}, "proportional"),
    "a share": ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "a share above 1": ({"partial_rotary_factor": 1e308}, "partial_rotary_factor = 1e+308: exp"),
    "a theta that is too small": ({"rope_theta": 1e-308}, "with rope_theta = 1e-308"),
    "a factor of waves that is too small": ({**LLAMA3, "factor": 1e-320}, "it gives angles"),
    "a factor that is too small": ({"type": "linear", "factor": 1e-320}, "it gives angles"),
    "a scale that is too large": ({**YARN, "attention_factor": 1e40}, "float32 cannot hold"),
    "a scale that is too small": ({**YARN, "mscale": 1, "mscale_all_dim": 1e308}, "float32"),
    "a beta that is too large": ({**YARN, "beta_fast": 1e308}, "it gives angles"),
    "a null type": ({"rope_type": None, "type": "linear", "factor": 2.0}, "rope_type"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_gives_no_rope_is_refused_by_name(case):
    rope_fields, name = WRONG[case]
    fields = Fields({"rope_parameters": rope_fields})
    rope.read_turn(fields, head_dim=16, max_positions=512)
    assert any("rope_parameters" in problem and name in problem for problem in fields.problems)


@pytest.mark.parametrize(
    ("head_dim", "alpha", "words"),
    [(2, 9.0, "alpha is for heads in which more"), (16, 1e308, "with rope_theta = 10000 and 512")],
)
def test_an_alpha_that_gives_no_theta_is_refused(head_dim, alpha, words):
    fields = Fields({"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": alpha}})
    rope.read_turn(fields, head_dim, max_positions=512, types=rope.WITH_ALPHA)
    assert [words in problem for problem in fields.problems] == [True]


def test_only_names_of_layers_make_tables_of_their_types():
    """An object that is a parameter, as some programs write sections, makes none."""
    flat = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": {"t": 1}}
    assert rope.tables({"rope_parameters": flat}) == {"": flat}
    by_type = {rope.FULL: {"rope_theta": 1e4}, rope.SLIDING: None}
    assert rope.tables({"rope_parameters": by_type}) == {rope.FULL: {"rope_theta": 1e4}}
