"""A layer of a decoder: what mixes tokens, and what each token passes by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxgrpo.models.api import Caller, DeltaKind, LayerKind, ModelConfig, Rope
from jaxgrpo.models.delta import GatedDelta
from jaxgrpo.models.layers import Angles, Attention, FeedForward, Norm, RMSNorm


class Block(nnx.Module):
    """One layer: h += mixer(norm(h)); h += feed_forward(norm(h)), each times residual_scale.

    `config.norms` says whether a branch is normed before it, after it (then not before) or both.
    """

    def __init__(self, config: ModelConfig, kind: LayerKind, rngs: nnx.Rngs):
        def norm(*places: str) -> Norm:
            built = config.norms in places
            return RMSNorm({"norm": config.hidden_size}, config) if built else jax.nn.identity

        self.attention_norm: Norm = norm("before", "both")
        self.feed_forward_norm: Norm = norm("before", "both")
        mixer = kind.mixer
        if isinstance(mixer, DeltaKind):
            self.delta: GatedDelta = GatedDelta(config, mixer, rngs)
        else:
            self.attention: Attention = Attention(config, rngs)
        self.feed_forward: FeedForward = FeedForward(config, kind.feed.size, rngs)
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
    ) -> tuple[Array, Any]:
        """
        Args:
          angles: those of each way to turn that the model has.
        """
        branch, mixer = self.attention_norm(hidden), kind.mixer
        if isinstance(mixer, DeltaKind):
            branch, memory = self.delta(branch, caller.recur, memory, mixer)
        else:
            turn, attend = angles[mixer.rope], caller.attend
            branch, memory = self.attention(branch, turn, attend, memory, mixer)
        hidden = hidden + self.scaled(self.attention_out_norm(branch))
        branch = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + self.scaled(self.feed_forward_out_norm(branch)), memory

    def scaled(self, branch: Array) -> Array:
        return branch if self.scale == 1.0 else branch * jnp.asarray(self.scale, branch.dtype)
