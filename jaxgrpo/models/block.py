"""A layer: a mixer and a feed-forward part of the kinds that it is of, and the norms round them.

The kinds have files of their own; this one alone knows which there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax import Array

from jaxgrpo.models.api import (
    Caller,
    DeltaKind,
    ExpertsKind,
    LayerKind,
    LayerMemory,
    ModelConfig,
    Rope,
    Spread,
)
from jaxgrpo.models.delta import GatedDelta
from jaxgrpo.models.experts import Experts
from jaxgrpo.models.latent import LatentAttention
from jaxgrpo.models.layers import Angles, Attention, FeedForward, Norm, RMSNorm, scaled_by


class Block(nnx.Module):
    """One layer: h += mixer(norm(h)); h += feed_forward(norm(h)), each times residual_scale.

    The kind, or `config.norms`, says whether a branch is normed before it, after it (then not
    before) or both.
    With "parallel" h += attention(norm(h)) + feed_forward(norm(h)), of one norm.
    """

    def __init__(self, config: ModelConfig, kind: LayerKind, rngs: nnx.Rngs):
        norms = kind.norms or config.norms

        def norm(*places: str) -> Norm:
            built = norms in places
            return RMSNorm({"norm": config.hidden_size}, config) if built else jax.nn.identity

        self.parallel: bool = norms == "parallel"
        self.attention_norm: Norm = norm("before", "both", "parallel")
        self.feed_forward_norm: Norm = norm("before", "both")
        feed, mixer = kind.feed, kind.mixer
        if isinstance(mixer, DeltaKind):
            self.delta: GatedDelta = GatedDelta(config, mixer, rngs)
        else:
            attention = Attention if mixer.latent is None else LatentAttention
            self.attention: Attention | LatentAttention = attention(config, mixer, rngs)
        if isinstance(feed, ExpertsKind):
            self.experts: Experts = Experts(config, feed, rngs)
        else:
            self.feed_forward: FeedForward = FeedForward(config, feed.size, rngs)
        self.attention_out_norm: Norm = norm("after", "both")
        self.feed_forward_out_norm: Norm = norm("after", "both")
        self.scale: float = config.residual_scale

    def __call__(
        self,
        hidden: Array,
        angles: Mapping[Rope | None, Angles],
        caller: Caller,
        memory: Any,
        kind: LayerKind,
        spread: Spread,
    ) -> tuple[Array, Any]:
        """
        Args:
          angles: those of each way to turn that the model has.
        """
        feed, mixer, recorded = kind.feed, kind.mixer, None
        if isinstance(feed, ExpertsKind) and memory is not None:
            memory, recorded = memory
        normed = branch = self.attention_norm(hidden)
        if isinstance(mixer, DeltaKind):
            branch, memory = self.delta(branch, caller.recur, memory, mixer)
        else:
            branch, memory = self.attention(branch, angles[mixer.rope], caller, memory, mixer)
        hidden = hidden + scaled_by(self.attention_out_norm(branch), self.scale)
        branch = normed if self.parallel else self.feed_forward_norm(hidden)
        if isinstance(feed, ExpertsKind):
            branch, recorded = self.experts(branch, caller.route, spread, recorded, feed)
            memory = LayerMemory(memory, recorded)
        else:
            branch = self.feed_forward(branch)
        return hidden + scaled_by(self.feed_forward_out_norm(branch), self.scale), memory
