"""A kernel is chosen by platform; one that cannot compute a run's attention says why."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import Mesh

from jaxgrpo.core.errors import InputError
from jaxgrpo.models import sharding
from jaxgrpo.models.api import AttentionKind, LayerKind, ModelConfig
from jaxgrpo.models.attention import XLA, choose_kernel

MODEL = ModelConfig(
    vocab_size=13,
    hidden_size=16,
    intermediate_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    pattern=(LayerKind(AttentionKind(window=4)), LayerKind()),
)
CAPPED = dataclasses.replace(MODEL, pattern=(LayerKind(AttentionKind(soft_cap=50.0)),), head_dim=12)


@pytest.mark.parametrize(
    ("platform", "samples_per_row", "name"),
    [
        *(("cpu", 1, "xla"), ("tpu", None, "splash"), ("gpu", 1, "cudnn")),
        *(("gpu", 8, "xla"), ("gpu", None, "xla")),  # it has windows
    ],
)
def test_auto_is_the_kernel_of_the_platform_if_it_computes_the_same(
    platform, samples_per_row, name
):
    assert (
        choose_kernel("auto", platform, MODEL, row=64, samples_per_row=samples_per_row).name == name
    )


def test_cudnn_takes_rows_of_several_samples_without_windows_on_whole_rows():
    config = dataclasses.replace(MODEL, pattern=(LayerKind(),))
    assert choose_kernel("cudnn", "gpu", config, row=64, samples_per_row=8).name == "cudnn"
    mesh = sharding.make_mesh(context=4, devices=jax.devices())
    with pytest.raises(InputError, match="context = 4: a device must have whole rows"):
        choose_kernel("cudnn", "gpu", config, row=64, samples_per_row=8, mesh=mesh)
    with pytest.raises(InputError, match="windows in rows of several samples"):
        choose_kernel("cudnn", "gpu", MODEL, row=64, samples_per_row=8)


@dataclasses.dataclass(frozen=True)
class Gpu:
    compute_capability: str


@pytest.mark.parametrize(
    ("capability", "samples_per_row", "head_dim", "reason"),
    [
        (
            "8.6",
            8,
            128,
            "rows of several samples on compute capability 8.6: it takes 9.0 and above",
        ),
        ("8.0", 1, 256, "head_dim = 256: it takes multiples of 8 up to 128"),
        ("gfx942", 1, 128, "compute capability gfx942: it is for NVIDIA's GPUs"),
        ("8.0", 1, 128, None),
        ("9.0", 8, 256, None),
    ],
)
def test_cudnn_takes_what_the_gpu_can(capability, samples_per_row, head_dim, reason):
    mesh = Mesh(np.asarray([Gpu(capability)], object), ("context",))
    config = dataclasses.replace(MODEL, pattern=(LayerKind(),), head_dim=head_dim)
    sizes: Any = {"row": 64, "samples_per_row": samples_per_row, "mesh": mesh}
    kernel = choose_kernel("auto", "gpu", config, **sizes)
    assert kernel.name == ("cudnn" if reason is None else "xla")
    assert kernel.why == ("" if reason is None else f"cudnn cannot: {reason}")


def test_a_pass_with_other_rows_has_a_kernel_for_these():
    config = dataclasses.replace(MODEL, pattern=(LayerKind(),))
    for most in (8, 1):
        kernel = choose_kernel("auto", "gpu", config, row=64, samples_per_row=most)
        wider: Any = kernel.for_rows(80, 33)
        assert wider.rows_with_prefix.keywords == {"most": 33}
    windows = choose_kernel("auto", "gpu", MODEL, row=64, samples_per_row=1)
    assert "windows in rows of several samples" in windows.for_rows(64, 2).why
    splash = choose_kernel("auto", "tpu", config, row=64)
    assert splash.for_rows(80, 33).name == "splash"
    assert splash.for_rows(2**17, 33).name == "xla"
    assert XLA.for_rows(2**17, None) is XLA


def test_xla_computes_everything_everywhere():
    for platform in ("cpu", "tpu", "gpu"):
        assert choose_kernel("xla", platform, CAPPED, row=10**6) is XLA


def test_splash_takes_windows_soft_caps_and_several_samples_per_row():
    for config in (MODEL, CAPPED):
        assert choose_kernel("splash", "tpu", config, row=2**16).name == "splash"


def test_all_that_cudnn_cannot_compute_is_one_message():
    config = dataclasses.replace(CAPPED, dtype="float32")
    with pytest.raises(InputError) as caught:
        choose_kernel("cudnn", "tpu", config, row=64)
    assert str(caught.value).splitlines() == [
        'model.attention = "cudnn" cannot compute this run; set it to "xla":',
        "  model.dtype = float32: it takes bfloat16 or float16",
        "  head_dim = 12: it takes multiples of 8 up to 256",
        "  soft-capped scores: it has none",
        "  rows of any samples: their number must be bounded, and each see its prompt",
        "  platform tpu: it runs on another",
    ]


def test_all_that_splash_cannot_compute_is_one_message():
    mesh = sharding.make_mesh(context=4, devices=jax.devices())
    config = dataclasses.replace(MODEL, dtype="float64")
    with pytest.raises(InputError) as caught:
        choose_kernel("splash", "gpu", config, row=2**17, mesh=mesh)
    assert str(caught.value).splitlines() == [
        'model.attention = "splash" cannot compute this run; set it to "xla":',
        "  model.dtype = float64: it takes bfloat16 or float32",
        "  rows of 131072 tokens: it takes at most 65536",
        "  mesh.context = 4: a device must have whole rows",
        "  platform gpu: it runs on another",
    ]
    instead = choose_kernel("auto", "tpu", config, row=64)
    assert instead._replace(why="") == XLA
    assert instead.why == "splash cannot: model.dtype = float64: it takes bfloat16 or float32"


def test_an_unknown_kernel_is_answered_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'splash'"):
        choose_kernel("slpash", "tpu", MODEL, row=64)


def test_a_kernel_that_jax_has_left_out_is_refused_and_missed_on_its_platform_alone(monkeypatch):
    monkeypatch.delitem(sys.modules, "jaxgrpo.models.kernels.splash", raising=False)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.ops.tpu", None)
    kernel = choose_kernel("auto", "tpu", MODEL, row=64)
    assert kernel.name == "xla"
    assert kernel.why.startswith(f"splash cannot: JAX {jax.__version__} lacks what it is made of (")
    with pytest.raises(InputError, match="lacks what it is made of"):
        choose_kernel("splash", "tpu", MODEL, row=64)
    assert choose_kernel("auto", "cpu", MODEL, row=64) is XLA
    assert choose_kernel("auto", "gpu", MODEL, row=64, samples_per_row=1).name == "cudnn"


def test_rows_of_several_samples_are_left_to_xla_where_jax_has_another_backward_pass(monkeypatch):
    config = dataclasses.replace(MODEL, pattern=(LayerKind(),))

    def chosen_kernel(samples_per_row: int):
        return choose_kernel("auto", "gpu", config, row=64, samples_per_row=samples_per_row)

    assert chosen_kernel(8).name == "cudnn"
    rule = "_dot_product_attention_bwd_rule"
    monkeypatch.setattr(fused_attention_stablehlo, rule, lambda scale, res, novel: None)
    assert chosen_kernel(8).name == "xla"
    assert "takes other arguments (" in chosen_kernel(8).why
    assert "novel" in chosen_kernel(8).why
    monkeypatch.delattr(fused_attention_stablehlo, rule)
    assert "hides cuDNN's backward pass elsewhere" in chosen_kernel(8).why
    assert chosen_kernel(1).name == "cudnn"
