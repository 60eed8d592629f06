"""Even loads of experts: the auxiliary loss of routers, and corrections that move with the load.

Both read the experts that the sampler recorded, of all tokens of an update before any pass of it.
So neither depends on how the update is cut into micro-batches or divided over devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.records import EXPERTS, NONE
from jaxgrpo.core.types import Params, TrainBatch
from jaxgrpo.models import routing
from jaxgrpo.models.api import ExpertsKind, Model, stacked_memory
from jaxgrpo.update.flat import AUX_LOSS, LOADS


class Balance(NamedTuple):
    """What evens out the load of experts; 0 and 0: nothing."""

    coefficient: float = 0.0  # of the auxiliary loss
    rate: float = 0.0  # by which corrections move after an update


COEFFICIENT, RATE = "train.router_aux_loss_coef", "train.router_bias_update_rate"


def make_balance(coefficient: float, rate: float, model: Model) -> Balance:
    """The balance of updates of a model.

    Raises: InputError where its layers have no experts, and for a rate where their routers have no
    correction or it is not trained.
    """
    kinds, family = model.config.kinds, model.config.family
    feeds = [kind.feed for kind in kinds if isinstance(kind.feed, ExpertsKind)]
    balance = Balance(coefficient, rate)
    for key, value in zip((COEFFICIENT, RATE), balance, strict=True):
        if value and not feeds:
            raise InputError(f"{key} = {value:g}: {family} has no experts; leave it out")
    if rate and not all(feed.scores == "sigmoid" for feed in feeds):
        raise InputError(
            f"{RATE} = {rate:g}: the routers of {family} have no e_score_correction_bias, "
            f"as those of DeepSeek-V3 and GLM-4.5 do; set {COEFFICIENT}, or leave it out"
        )
    if rate and model.config.lora is not None:
        raise InputError(
            f"{RATE} = {rate:g}: the bias is one of the weights, and with lora.rank or "
            "lora.path these stay as they are; leave one of the two out"
        )
    return balance


def replays(setting: str, model: Model) -> bool:
    """Whether updates take the experts again that drew a token, by `train.routing`.

    Raises: InputError where it is "fresh" and no layer of the model has experts.
    """
    if setting == "fresh" and not routing.has_experts(model.config.kinds):
        raise InputError(
            f'train.routing = "fresh": nothing reads it, since {model.config.family} has no '
            "experts; leave it out"
        )
    return setting == "replay"


def counted(batch: TrainBatch) -> Array:
    """Whether each token, of a batch or a micro-batch, counts in its load: it is trained, and the
    experts that drew it are recorded. As its mask."""
    return batch.mask & (batch.fields[EXPERTS][..., 0, 0] != NONE)


def count_choices(model: Model, batch: TrainBatch) -> Array:
    """[layers, experts]: how many tokens of the update passed each expert, of those `counted`."""
    experts = jnp.where(counted(batch)[..., None, None], batch.fields[EXPERTS], NONE)
    return routing.tokens_per_expert(model.config.kinds, experts)


ComputeLoss = Callable[[Params, tuple[TrainBatch, Params], Array], tuple[Array, Any]]
"""(trainable, (micro-batch, what else is divided by bins), fullest) -> (loss, what the pass found:
log-probs, fields and more)"""
Move = Callable[[Any], Params]
"""What follows an optimizer's step."""


def even_out(
    balance: Balance, model: Model, compute_loss: ComputeLoss, batch: TrainBatch
) -> tuple[ComputeLoss, TrainBatch, Move]:
    """(the loss of an update with what the balance adds to it, the batch with what that reads, how
    corrections move once the update is taken)."""
    if not any(balance):
        return compute_loss, batch, lambda params: params
    choices = count_choices(model, batch)
    if balance.coefficient:
        compute_loss, batch = add_aux_loss(compute_loss, balance.coefficient, choices, batch)
    return compute_loss, batch, functools.partial(move_corrections, model, balance.rate, choices)


def add_aux_loss(
    compute_loss: ComputeLoss, coefficient: float, choices: Array, batch: TrainBatch
) -> tuple[ComputeLoss, TrainBatch]:
    """(a loss with the routers' auxiliary loss, the batch with the loads that it reads).

        coefficient * mean over layers of  E sum_e f_e P_e
        f_e = choices of expert e / tokens,    P_e = mean over tokens of share_e

    over all tokens of the update that are `counted`; share_e is the router's softmax over its E
    experts, or its sigmoids divided by their sum. f_e is constant, so the loss is a sum over
    tokens. Even loads make k of a layer, the experts of a token, and 1 expert for all makes E.

    Args:
      choices: `count_choices` of the batch.

    Source: Switch Transformer, arXiv 2101.03961, equations 4 to 6, with k choices a token as
    transformers counts them (`load_balancing_loss_func`). That adds up the layers before it
    multiplies f and P, so that an expert of one layer makes up for that of the same number in
    another; here each layer has its loss, as in the paper. Sigmoids: DeepSeek-V3, arXiv 2412.19437,
    equations 17 to 20, which has a loss for each sequence and divides it by k.
    """
    tokens = jnp.maximum(counted(batch).sum(dtype=choices.dtype), 1)
    sizes = *batch.mask.shape[:2], *choices.shape
    fields = {**batch.fields, LOADS: jnp.broadcast_to(choices / tokens, sizes)}

    def total(trainable: Params, by_bin: tuple[TrainBatch, Params], fullest: Array) -> Any:
        loss, outputs = compute_loss(trainable, by_bin, fullest)
        terms = jnp.where(counted(by_bin[0]), outputs[1][AUX_LOSS], 0)
        return loss + coefficient / tokens * terms.sum(), outputs

    return total, dataclasses.replace(batch, fields=fields)


def move_corrections(model: Model, rate: float, choices: Array, params: Params) -> Params:
    """The parameters, with the corrections of routers moved towards even loads.

        b_e <- b_e + rate * sign(mean over experts of choices - choices of e)

    Corrections have no gradient, so that the optimizer leaves them as they are.

    Args:
      choices: `count_choices` of the batch of the update; without a token nothing moves.

    Source: Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2.
    """
    rows, shifts = iter(choices), []
    for kind in model.config.kinds:
        if isinstance(kind.feed, ExpertsKind):
            row = next(rows)[: kind.feed.number]
            shifts.append(rate * jnp.sign(row.mean() - row))
        else:
            shifts.append(None)
    by_part = stacked_memory(model.config, tuple(shifts))

    def move(path: Any, leaf: Array) -> Array:
        part, layer, *names = (entry.key for entry in path)
        is_correction = names[-2:] == ["router", "correction"]
        return leaf + by_part[part][layer].astype(leaf.dtype) if is_correction else leaf

    return jax.tree_util.tree_map_with_path(move, params)
