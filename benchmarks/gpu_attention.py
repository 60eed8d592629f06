"""Attention of an update and of decoding on one GPU: XLA's operations beside cuDNN and Pallas.

    python -m benchmarks.gpu_attention

The update's rows hold several samples behind a prompt that they share. cuDNN takes the samples and
the prompt in two calls (`models/kernels/cudnn_packed.py`). Decoding reads caches with heads before
positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.gpu import decode_attention

from benchmarks import common
from benchmarks.common import timed
from jaxgrpo.models.api import AttentionKind, KeyValue
from jaxgrpo.models.kernels import cudnn_packed

REPEATS = 20
HEADS, KV_HEADS, SIZE = 16, 8, 128  # Qwen3-0.6B
SCALE = 1 / math.sqrt(SIZE)


class Rows(NamedTuple):
    """Packed rows of at most `samples` of random lengths, behind prompts of at most `prompt`.

    One row is full; those after it have a sample less each, down to none, with nothing behind the
    last, and prompts get shorter. So whatever rows may leave empty is part of the error. Behind
    each sample there may be a `gap` too, as where layers recur.
    """

    number: int = 16
    tokens: int = 2048
    samples: int = 4
    prompt: int = 512
    gap: int = 0

    def lengths(self) -> np.ndarray:
        """Places of each sample with its gap, 0 behind the last, int32 [B, M]."""
        random = np.random.default_rng(0)
        cuts = random.integers(64, self.tokens - 64, (self.number, self.samples - 1))
        ends = np.pad(np.sort(cuts), [(0, 0), (0, 1)], constant_values=self.tokens)
        number = self.samples - np.arange(self.number) % (self.samples + 1)
        lengths = np.diff(ends, prepend=0)
        return np.where(np.arange(self.samples) < number[:, None], lengths, 0).astype(np.int32)

    def segments(self) -> np.ndarray:
        """The number of each token's sample within its row, from 1, and 0 at none, int32 [B, T]."""
        segments = np.zeros((self.number, self.tokens), np.int32)
        for row, lengths in enumerate(self.lengths()):
            for sample, (end, length) in enumerate(zip(lengths.cumsum(), lengths, strict=True), 1):
                real = max(length - self.gap, min(length, 1))
                segments[row, end - length : end - length + real] = sample
        return segments

    def starts(self) -> np.ndarray:
        """The first place of each token's sample, int32 [B, T]."""
        ends = np.cumsum(self.lengths(), 1, dtype=np.int32)
        starts = np.pad(ends, [(0, 0), (1, 0)])
        return np.take_along_axis(starts, np.maximum(self.segments() - 1, 0), 1)

    def prompts(self) -> np.ndarray:
        """Tokens of the prompt of each row, int32 [B]."""
        return self.prompt - 17 * np.arange(self.number, dtype=np.int32)

    def flop(self) -> float:
        """Of the products of one forward pass."""
        lengths = np.maximum(self.lengths() - self.gap, 0).astype(float)
        pairs = (lengths**2).sum() / 2 + (lengths.sum(1) * self.prompts()).sum()
        return 4 * HEADS * SIZE * pairs


def plain(rows: Rows, q: Array, k: Array, v: Array, pk: Array, pv: Array) -> Array:
    """All scores at once. Shapes: q [B, T, H, D]; k, v [B, T, K, D]; pk, pv [B, S, K, D]."""
    segment, place = jnp.asarray(rows.segments()), jnp.arange(rows.tokens)
    keys, values = jnp.concatenate([pk, k], 1), jnp.concatenate([pv, v], 1)
    grouped = q.reshape(*q.shape[:2], KV_HEADS, HEADS // KV_HEADS, SIZE)
    score = jnp.einsum("btkgd,bskd->bkgts", grouped, keys, preferred_element_type=jnp.float32)
    same = segment[:, :, None] == segment[:, None, :]
    causal = same & (place[:, None] >= place)[None]
    prompt = jnp.arange(rows.prompt) < jnp.asarray(rows.prompts())[:, None]
    prompt = jnp.broadcast_to(prompt[:, None], (*causal.shape[:2], rows.prompt))
    attends = jnp.concatenate([prompt, causal], 2)[:, None, None]
    weight = jax.nn.softmax(jnp.where(attends, SCALE * score, -jnp.inf)).astype(q.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weight, values).reshape(q.shape)
    return jnp.where((segment > 0)[..., None, None], out, 0)


def packed(rows: Rows) -> Callable[..., Array]:
    """The same by the kernel of updates: two calls of cuDNN and their log-sum-exps."""
    segment, before = (jnp.asarray(leaf)[None] for leaf in (rows.segments(), rows.prompts()))
    from_start = jnp.arange(rows.tokens) - jnp.asarray(rows.starts())[None]
    prompts = jnp.arange(rows.number)[None], before
    placed = segment, before[..., None] + from_start, *prompts
    attend = cudnn_packed.rows_with_prefix(*placed, most=rows.samples)

    def attention(q: Array, *rest: Array) -> Array:
        query, key, value, *prompt = (leaf[None] for leaf in (SCALE * q, *rest))
        return attend(query, key, value, KeyValue(*prompt), AttentionKind())[0][0]

    return attention


class Slots(NamedTuple):
    """Slots that decode: a cache [N, K, L, D] with heads before positions."""

    number: int = 256
    length: int = 1536

    def live(self) -> np.ndarray:
        """Tokens in each slot, int32 [N]."""
        return np.random.default_rng(1).integers(64, self.length, self.number).astype(np.int32)

    def bytes(self) -> float:
        """Of the keys and values that a step has to read."""
        return float(self.live().sum()) * KV_HEADS * SIZE * 2 * 2


def decode_plain(slots: Slots, q: Array, k: Array, v: Array) -> Array:
    """All scores at once. Shapes: q [N, H, D]; k, v [N, K, L, D]."""
    grouped = q.reshape(slots.number, KV_HEADS, -1, SIZE)
    score = jnp.einsum("nkgd,nksd->nkgs", grouped, k, preferred_element_type=jnp.float32)
    live = jnp.arange(slots.length) < jnp.asarray(slots.live())[:, None]
    weight = jax.nn.softmax(jnp.where(live[:, None, None], SCALE * score, -jnp.inf))
    return jnp.einsum("nkgs,nksd->nkgd", weight.astype(q.dtype), v).reshape(q.shape)


def decode_pallas(slots: Slots, q: Array, k: Array, v: Array) -> Array:
    """The same by JAX's kernel for one head of keys, run over slots and heads."""
    rows = slots.number * KV_HEADS
    live = jnp.repeat(jnp.asarray(slots.live()), KV_HEADS)
    options = {"block_k": 64, "k_splits": 2, "num_warps": 4, "num_stages": 3}
    keys, values = (cache.reshape(rows, slots.length, SIZE) for cache in (k, v))
    queries = q.reshape(rows, -1, SIZE)
    out: Any = decode_attention.mqa(queries, keys, values, kv_seq_len=live, **options)
    return out.reshape(q.shape)


def decode_cudnn(slots: Slots, q: Array, k: Array, v: Array) -> Array:
    """The same by cuDNN."""
    out: Any = cudnn.dot_product_attention(
        q[:, :, None], k, v, q_seqlen=jnp.ones(slots.number, jnp.int32),
        kv_seqlen=jnp.asarray(slots.live()), scale=SCALE, mask_type=cudnn.MaskType.PADDING,
        qkv_layout="BNTH",
    )  # fmt: skip
    return out[:, :, 0]


def _arrays(*shapes: tuple[int, ...]) -> list[Array]:
    random = np.random.default_rng(2)
    return [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes]


def _milliseconds(function: Callable[..., Any], *arrays: Array) -> tuple[Any, float]:
    jitted = jax.jit(function)
    jax.block_until_ready(jitted(*arrays))
    return jitted(*arrays), 1e3 * min(timed(jitted, *arrays)[1] for _ in range(REPEATS))


def _error(value: Any, reference: Any) -> float:
    """The largest relative error, in norms, of arrays beside others."""
    pairs = zip(jax.tree.leaves(value), jax.tree.leaves(reference), strict=True)
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in wide)


def update_lines(rows: Rows) -> list[str]:
    """Forward and backward of both, with the error of cuDNN's output and gradients."""
    row, prompt = (rows.number, rows.tokens), (rows.number, rows.prompt)
    keys = (KV_HEADS, SIZE)
    shapes = (*row, HEADS, SIZE), *[(*row, *keys)] * 2, *[(*prompt, *keys)] * 2
    *arrays, slope = _arrays(*shapes, shapes[0])

    def train(function: Callable[..., Array]) -> Callable[..., Any]:
        def train_step(slope: Array, *arrays: Array) -> Any:
            out, pull = jax.vjp(function, *arrays)
            return out, pull(slope)

        return train_step

    lines, reference = [], None
    for name, function in (
        ("XLA", functools.partial(plain, rows)),
        ("cuDNN, joined", packed(rows)),
    ):
        value, milliseconds = _milliseconds(train(function), slope, *arrays)
        reference = value if reference is None else reference
        rate = 3.5 * rows.flop() / milliseconds / 1e9
        line = f"update, {name}: {milliseconds:.2f} ms, {rate:.0f} TFLOP/s"
        lines.append(f"{line}, error {_error(value, reference):.1e}")
    return lines


def decode_lines(slots: Slots) -> list[str]:
    """One step's attention over the slots by all three."""
    cache = (slots.number, KV_HEADS, slots.length, SIZE)
    arrays = _arrays((slots.number, HEADS, SIZE), cache, cache)
    lines, reference = [], None
    for name, function in (
        ("XLA", decode_plain), ("Pallas", decode_pallas), ("cuDNN", decode_cudnn),
    ):  # fmt: skip
        value, milliseconds = _milliseconds(functools.partial(function, slots), *arrays)
        reference = value if reference is None else reference
        rate = slots.bytes() / milliseconds / 1e6
        line = f"decode, {name}: {milliseconds:.3f} ms, {rate:.0f} GB/s of live keys and values"
        lines.append(f"{line}, error {_error(value, reference):.1e}")
    return lines


def main() -> None:
    print(common.describe())
    for rows in (Rows(), Rows(gap=48)):
        print(f"samples apart by {rows.gap} places")
        for line in update_lines(rows):
            print(line, flush=True)
    for line in decode_lines(Slots()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
