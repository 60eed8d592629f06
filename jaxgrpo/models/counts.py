"""What the layers of a model multiply and keep, counted from the shapes and axes of its kernels.

All that plans memory and time reads this count. A leaf "kernel" of a layer is a linear map, and so
are the two leaves of an adapter: its inputs are the first dimension if that is "embed", "latent" or
"rank", and all but the last otherwise. In front of them may be "layers", which are stacked, and
"experts", of which a token passes some.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgrpo.models.api import LAYERS, AttentionKind, DeltaKind, ExpertsKind, LayerKind, Model
from jaxgrpo.models.cache import cache_dtype
from jaxgrpo.models.decoder import Remat
from jaxgrpo.models.recurrence import CHUNK

MAPS = ("kernel", "lora_a", "lora_b")


class LinearMap(NamedTuple):
    """One linear map of a layer, or of layers that are stacked."""

    place: tuple[str, str]  # of the layer: a part of LAYERS, and its number there
    kind: LayerKind  # of the layer
    layers: int
    experts: int  # of a layer; 1: it is no expert's
    active: int  # of them, those that a token passes
    inputs: int
    outputs: int
    is_adapter: bool


def linear_maps(model: Model) -> Iterator[LinearMap]:
    """The linear maps of all layers, those of a layer one after another."""
    config = model.config
    all_axes = jax.tree.leaves(model.axes, is_leaf=lambda node: type(node) is tuple)
    paths = jax.tree_util.tree_leaves_with_path(model.shapes)
    for (path, spec), axes in zip(paths, all_axes, strict=True):
        names = [str(key.key) for key in path]
        if names[0] not in LAYERS or names[-1] not in MAPS:
            continue
        kind = (config.lead if names[0] == "lead" else config.pattern)[int(names[1])]
        sizes, counts = [*zip(axes, spec.shape, strict=True)], {"layers": 1, "experts": 1}
        while sizes[0][0] in counts:
            name, size = sizes.pop(0)
            counts[name] = size
        split = 1 if sizes[0][0] in ("embed", "latent", "rank") else -1
        inputs, outputs = (math.prod(size for _, size in part) for part in _halves(sizes, split))
        feed = kind.feed
        active = feed.top_k if "experts" in axes and isinstance(feed, ExpertsKind) else 1
        layers, experts = counts.values()
        place, is_adapter = (names[0], names[1]), names[-1] != "kernel"
        yield LinearMap(place, kind, layers, experts, active, inputs, outputs, is_adapter)


def _halves(sizes: list, split: int) -> tuple[list, list]:
    return sizes[:split], sizes[split:]


class Recurrence(NamedTuple):
    """What the gated delta rule of a layer costs a token (`models.recurrence`)."""

    flops: float  # of matrix products
    numbers: float  # of a chunk's arrays and states, for each of its tokens


def count_recurrence(kind: DeltaKind) -> Recurrence:
    """The rule in chunks of CHUNK tokens."""
    keys, values, state = kind.key_dim, kind.value_dim, kind.key_dim * kind.value_dim
    head = 2 * CHUNK * (keys + 2 * values) + CHUNK**2 / 3 + 6 * state
    numbers = 4 * CHUNK + 4 * keys + 3 * values + state / CHUNK
    shared = kind.key_heads * 4 * CHUNK * keys
    return Recurrence(kind.value_heads * head + shared, kind.value_heads * numbers)


class Weights(NamedTuple):
    """Numbers of weights."""

    layers: int  # of the linear maps of all layers
    active: int  # of them, those that a token is multiplied by, with 2 operations each
    head: int

    @property
    def work(self) -> int:
        """Those that a token is multiplied by."""
        return self.active + self.head

    @property
    def total(self) -> int:
        return self.layers + self.head


def count_weights(model: Model) -> Weights:
    """The weights of a model's products."""
    maps = [*linear_maps(model)]
    sizes = [linear.layers * linear.inputs * linear.outputs for linear in maps]
    return Weights(
        layers=sum(size * linear.experts for size, linear in zip(sizes, maps, strict=True)),
        active=sum(size * linear.active for size, linear in zip(sizes, maps, strict=True)),
        head=model.config.hidden_size * model.config.vocab_size,
    )


class Outputs(NamedTuple):
    """Numbers that a layer computes for a token."""

    part: str  # of LAYERS: where the layer is
    kind: LayerKind
    layers: int  # that are alike
    products: int  # outputs of its linear maps
    numbers: int  # of an update: those again, after norm or activation, and what the layer adds to


def layer_outputs(model: Model) -> Iterator[Outputs]:
    """What the layers compute for a token, those of a stack at once; adapters' outputs are few, or
    added to those of their map."""
    hidden = model.config.hidden_size
    kernels = (linear for linear in linear_maps(model) if not linear.is_adapter)
    for (part, _), group in itertools.groupby(kernels, lambda linear: linear.place):
        maps = [*group]
        kind, feed = maps[0].kind, maps[0].kind.feed
        products = sum(linear.active * linear.outputs for linear in maps)
        copies = feed.top_k if isinstance(feed, ExpertsKind) else 0  # a token at its experts
        numbers = 2 * products + (2 + 2 * copies) * hidden
        yield Outputs(part, kind, maps[0].layers, products, numbers)


def count_pieces(model: Model) -> int:
    """In how many numbers a product with weights of layers takes each of its inputs, as
    `products.product_in_pieces`: two with float32_activations beside weights in fewer bits."""
    is_narrow = jnp.dtype(model.config.dtype).itemsize < 4
    return 2 if model.config.float32_activations and is_narrow else 1


def activations(model: Model, remat: Remat) -> int:
    """Bytes of a token in an update: what layers keep, and a period of them at work.

        kept = layers x (what remat says) + periods x hidden states, in the model's dtype
               or in float32 (`float32_activations`)
        work = 4 x (E of all layers of a period + E of one of them), values and gradients in float32
        E    = 2 hidden + 2 outputs of the linear maps, 2 hidden at each expert, recurrence

    A period of the layers is computed again as a whole (`decoder.Remat`), so that all its values
    are there at once; recurrences are computed again one by one, and with "none" nothing is.

    Of layers of Qwen3-0.6B compiled for a TPU v5e, "full" takes 0.22 MB with four, as counted here;
    "dots" 18 kB more for each layer (25 here), "none" about 97 kB (106 here, in float32).
    """
    config, size = model.config, jnp.dtype(model.config.dtype).itemsize
    wide = max(4, size) if config.float32_activations else size
    copies = count_pieces(model)  # all of which "dots" keeps
    attended_size = jnp.dtype(cache_dtype("auto", config)).itemsize
    attended, outputs = config.num_heads * config.head_dim, [*layer_outputs(model)]
    inputs = config.hidden_size * wide * (remat in ("full", "attention"))
    periods = [[layer] for layer in outputs if layer.part != "blocks"]
    repeated = [layer for layer in outputs if layer.part == "blocks"]
    periods += [[layer] for layer in repeated] if remat == "none" else [repeated] * bool(repeated)

    def layer_bytes(layer: Outputs) -> int:
        by_attention = attended * isinstance(layer.kind.mixer, AttentionKind)
        saved = {
            "full": 0,
            "attention": by_attention * attended_size,
            "dots": layer.products * wide * copies,
        }
        return saved.get(remat, 4 * layer.numbers)

    def recurring(layer: Outputs) -> int:
        recurs = isinstance(mixer := layer.kind.mixer, DeltaKind)
        return math.ceil(count_recurrence(mixer).numbers) if recurs else 0

    def work(period: Sequence[Outputs]) -> int:
        values = 4 * sum(layer.numbers for layer in period)
        return values + max(4 * layer.numbers + 8 * recurring(layer) for layer in period)

    saved = sum(layer.layers * layer_bytes(layer) for layer in outputs)
    saved += inputs * sum(period[0].layers for period in periods)
    return saved + max(map(work, periods))
