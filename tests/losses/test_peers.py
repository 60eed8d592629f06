"""Losses and gradients that TRL's trainer and verl's functions return (golden/make.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.losses import build_reduction, like_trl, policy_loss, sequence_mean

GOLDEN = json.loads((Path(__file__).parent / "golden" / "peers.json").read_text())
BATCHES = ("hand", "batch")
VERL = {
    "vanilla": {"use": "dual_clip"},
    "gspo": {"use": "gspo_token", "low": 3e-4, "high": 4e-4},
    "cispo": {"use": "cispo", "low": 0.8, "high": 1.2},
    "dppo_tv": {"use": "dppo_tv"},
    "sapo": {"use": "sapo"},
    "geo_mean": {"use": "gmpo"},
}
FORCED = {"sapo": sequence_mean(), "geo_mean": sequence_mean(count_empty=True)}
"""What these are in verl, whatever aggregation is asked for."""
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
}


def ours():
    """name of a golden value -> (surrogate, reduction) here that must give it."""
    pairs: dict[str, tuple[Any, Any]] = {
        f"trl {name}": like_trl(**options, max_completion_length=GOLDEN["longest"])
        for name, options in GOLDEN["trl"].items()
    }
    pairs["trl gmpo"] = "gmpo", sequence_mean(count_empty=True)
    for name, surrogate in VERL.items():
        for peer, reduction in AGGREGATIONS.items():
            pairs[f"verl {name} {peer}"] = surrogate, FORCED.get(name, reduction)
    return pairs


@pytest.fixture(scope="module")
def our_losses():
    """batch -> name -> (loss, gradient) of ours, in float64 and in one program per batch."""

    @jax.jit
    def every(new, old, advantage, mask):
        return {
            name: jax.value_and_grad(
                lambda new, pair=pair: policy_loss(pair[0], pair[1], new, old, advantage, mask)[0]
            )(new)
            for name, pair in ours().items()
        }

    results = {}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        for batch in BATCHES:
            arrays_of_peers = GOLDEN[batch]
            arrays = (jnp.asarray(arrays_of_peers[key]) for key in ("new", "old", "advantage"))
            mask = (
                np.arange(len(arrays_of_peers["old"][0]))
                < np.array(arrays_of_peers["length"])[:, None]
            )
            results[batch] = jax.tree.map(np.asarray, every(*arrays, jnp.asarray(mask)))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
def test_loss_and_gradient_are_those_of_the_peers(our_losses, batch):
    peers, length = GOLDEN[batch]["peers"], np.array(GOLDEN[batch]["length"])
    # TRL's GMPO gives a row without tokens the ratio 1, so that its loss is -A, a constant.
    of_nothing = -np.where(length == 0, GOLDEN[batch]["advantage"], 0).mean()
    assert set(ours()) == set(peers)
    for name, (loss, gradient) in our_losses[batch].items():
        # verl divides by lengths + 1e-8.
        tolerance = 1e-7 if name.startswith("verl") else 1e-12
        expected = peers[name]["loss"] - (of_nothing if name == "trl gmpo" else 0)
        np.testing.assert_allclose(loss, expected, tolerance, tolerance, err_msg=name)
        np.testing.assert_allclose(
            gradient, peers[name]["gradient"], tolerance, tolerance, err_msg=name
        )


@pytest.mark.slow
def test_every_bound_of_the_peers_is_reached_by_the_batch(our_losses):
    """Golden values that no bound has touched would prove little."""
    peers = GOLDEN["batch"]["peers"]
    masked = np.arange(6) >= np.array(GOLDEN["batch"]["length"])[:, None]
    for name in ("trl grpo", "trl two-sided", "trl gspo", "trl gmpo", "verl dppo_tv token-mean"):
        still = np.asarray(peers[name]["gradient"]) == 0
        assert (still & ~masked).any(), name
    for first, second in [
        ("trl grpo", "trl two-sided"),
        ("trl grpo", "trl grpo, clip higher"),
        ("trl cispo", "trl cispo, cut"),
        ("trl luspo", "trl luspo, sequence"),
    ]:
        assert abs(peers[first]["loss"] - peers[second]["loss"]) > 1e-3


def test_the_peers_published_numbers_stand():
    """What the table of the peers' losses says, to its six digits."""
    peers = GOLDEN["hand"]["peers"]
    for name, loss in {
        "trl bnpo": -0.472668,
        "trl grpo": -0.201456,
        "trl dr_grpo": -0.177251,
        "verl vanilla seq-mean-token-sum": -1.418005,
        "trl gspo": -0.250275,
        "trl cispo": 0.646980,
        "trl sapo": -0.681384,
        "trl gmpo": -0.261505,
        "trl vespo": -0.046596,
    }.items():
        assert peers[name]["loss"] == pytest.approx(loss, abs=5e-7), name


def test_what_trl_does_not_have_is_refused():
    for options, message in [
        ({"loss_type": "ppo"}, "loss_type = 'ppo', expected one of"),
        ({"importance_sampling_level": "word"}, "expected 'token' or 'sequence'"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "leave it at 'token'"),
        ({"delta": 1.1}, "delta = 1.1, expected a ratio above 1 + high = 1.2"),
    ]:
        with pytest.raises(InputError, match=message.replace("+", r"\+")):
            like_trl(**options)
    assert build_reduction(like_trl()[1]).name == "token_mean"
