"""What the keys of `loss` and `reference` must fulfil together, and with those that they act on.

A part of config_checks.py: silent where a value is missing, and yields its problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxgrpo.config.keys import ReferenceKeys
from jaxgrpo.config.own_code import is_reference
from jaxgrpo.config.reading import Values, show

METRIC = ReferenceKeys().reset_metric


def check(values: Values) -> Iterator[str]:
    """All problems of the loss and of the resets of its reference."""
    for check_some in (_penalties, _truncation, _mismatch, _resets):
        yield from check_some(values)


def _penalties(values: Values) -> Iterator[str]:
    from jaxgrpo.config.chain_tail import IN_REWARD

    kl = values.get("loss.kl", 0)
    none = kl is None or (kl and kl["use"] == IN_REWARD)
    none = none and values.get("loss.entropy", 0) is None
    if values.get("loss.penalties_on") == "live" and none:
        yield (
            'loss.penalties_on = "live": there is no penalty; add loss.kl = { use = "k2", beta = '
            "0.01 } or loss.entropy, or leave penalties_on out"
        )


def _truncation(values: Values) -> Iterator[str]:
    top_k, top_p = values.get("rollout.top_k", 0), values.get("rollout.top_p", 1.0)
    if top_p > 1:
        yield f"rollout.top_p = {top_p:g}: a probability; set it to 1 (off) or less"
        return
    name = f"rollout.top_k = {top_k}" if top_k else f"rollout.top_p = {top_p:g}"
    if (top_k or top_p < 1) and values.get("loss.proximal") == "behavior":
        yield (
            f"{name}: the sampler's log-probs are then those of the cut distribution and the "
            "trainer's of the whole one, so their ratio is off by the probability cut away; set "
            'loss.proximal = "trainer", or sample from all tokens'
        )


def _mismatch(values: Values) -> Iterator[str]:
    from jaxgrpo.config.chain_tail import weighed_twice

    if values.get("loss.proximal") != "behavior" or not _weighs(values.get("loss.surrogate")):
        return
    mismatch = values.get("loss.mismatch")
    parts = {f"loss.mismatch = {show(mismatch)}": mismatch} if mismatch else {}
    for index, part in enumerate(values.get("advantage", ())):
        parts[f"advantage[{index}] = {show(part)}"] = part
    for where, part in parts.items():
        if _is_importance(part):
            yield f"{where}: {weighed_twice()}"


def _weighs(surrogate: Mapping[str, Any] | None) -> bool:
    """Whether a surrogate holds a ratio; of own code it is seen when the run is built."""
    from jaxgrpo import losses

    try:
        return bool(surrogate) and losses.build_surrogate(surrogate).weighs
    except (ValueError, TypeError):  # own code, or reported with the other parts
        return False


def _is_importance(part: Mapping[str, Any]) -> bool:
    from jaxgrpo import advantages

    try:
        return advantages.build([part]).importance
    except (ValueError, TypeError):  # own code, or reported with the other parts
        return False


def _resets(values: Values) -> Iterator[str]:
    names = ("reset_every", "reset_kl_above", "reset_patience")
    metric = values.get("reference.reset_metric", METRIC)
    if metric != METRIC and values.get("reference.reset_patience") == 0:
        yield (
            f"reference.reset_metric = {show(metric)}: nothing reads it; set "
            "reference.reset_patience, the evaluations without a new best until a reset"
        )
    asked = [f"reference.{name}" for name in names if values.get(f"reference.{name}")]
    if not asked or "loss.kl" not in values:
        return
    kl = values["loss.kl"]
    # A chain of one's own may read the reference: that is seen when the run is built.
    own = "advantage" in values or _is_own(values.get("recipe"))
    if (kl is None and not own) or (kl and "target_validity" in kl):
        why = "there is no reference" if kl is None else "target_validity measures from the base"
        yield (
            f"{asked[0]}: {why}, so that nothing could be reset; take loss.kl = {{ use = "
            '"k2", beta = 0.001 }, or leave it out'
        )
    if values.get("reference.reset_patience"):
        if not metric.startswith("eval/"):
            yield f'reference.reset_metric = {show(metric)}: expected "eval/NAME"'
        if not values.get("eval.every", 1) or values.get("eval.data", 1) is None:
            yield (
                "reference.reset_patience: nothing is evaluated between the start and the end; set "
                "eval.data and eval.every"
            )


def _is_own(recipe: Any) -> bool:
    name = recipe["use"] if isinstance(recipe, Mapping) else recipe
    return name is not None and is_reference(name)
