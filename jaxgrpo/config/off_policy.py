"""Samples that another policy drew than the one that is trained: what weighs them, and what a
method may not read of them.

They are of older parameters, of a sampler in 8 bits, or texts of the data.
"""

from __future__ import annotations

import json

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.core.errors import InputError
from jaxgrpo.losses import Objective, Surrogate
from jaxgrpo.models.low_bit import DTYPES as LOW_BIT
from jaxgrpo.rollout.engine import SamplingSettings

WEIGHED_TWICE = (
    'with loss.proximal = "behavior" the surrogate\'s ratio begins at the sampler and holds '
    'this weight already; set loss.proximal = "trainer", or take a surrogate without a ratio, '
    "reinforce or on_policy"
)
"""Why weights of trainer over sampler and a ratio measured from the sampler exclude each other."""


def refuse_double_weights(chain: AdvantageTransform, surrogate: Surrogate, proximal: str) -> None:
    """Raises InputError if chain and surrogate both weigh by trainer over sampler."""
    if proximal == "behavior" and surrogate.weighs and chain.importance:
        step = next((name for name, step in chain.steps if step.importance), chain.name)
        raise InputError(f"{step}: {WEIGHED_TWICE}")


def completion_key(column: str) -> str:
    """How messages name the column of texts that take the place of samples."""
    return f'data.completion = "{column}"'


def refuse_weights(where: str, chain: AdvantageTransform, objective: Objective) -> None:
    """Raises: InputError where the method reads the log-probs of what drew its samples.

    Args:
      where: the key that brings texts instead, and its value.
    """
    readers = ["a weight of the chain"] if chain.importance else []
    if objective.proximal == "behavior":
        readers += objective.proximal_readers()
    if readers:
        raise InputError(
            f"{where}: {readers[0]} reads how likely samples were to the policy that drew them, and"
            ' that is not known for texts: set loss.proximal = "trainer", or take parts without a '
            'ratio, as surrogate = { use = "reinforce" } and kl = { use = "k2" }'
        )
    for part in (objective.surrogate, *objective.penalties):
        if "behavior_logp" in part.needs:
            raise InputError(
                f"{where}: {part.name} in the loss reads behavior_logp, and it is not known how "
                "likely texts were to what wrote them: give it an option that reads something "
                'else, as sampler = "proximal" with loss.proximal = "trainer", or leave it out'
            )


def refuse_all_stale(staleness: int, steps: int) -> None:
    """Raises: InputError if all samples of a run are of its first parameters."""
    if staleness and staleness >= steps - 1:
        raise InputError(
            f"rollout.staleness = {staleness}: each of train.steps = {steps} steps would train on "
            "samples of the first parameters; set it lower"
        )


def refuse_stale(
    chain: AdvantageTransform, objective: Objective, where: str, at: str | None = None
) -> None:
    """Raises InputError if nothing weighs samples of older parameters by how likely they are now.

    Args:
      where: the key that brings such samples, and its value.
      at: the field that is true at them alone; None: any sample may be such a one.
    """
    if name := _unweighed(chain, objective, at):
        raise InputError(
            f"{where}: {name} with loss.proximal = {json.dumps(objective.proximal)} takes samples "
            "of older parameters for samples of the newest; take a surrogate with a ratio, as "
            '{ use = "clip" }, with loss.proximal = "behavior", or weights, as loss.mismatch = '
            f'{{ use = "truncated_importance" }}{_beside_a_ratio(objective)}'
        )


def low_bit_line(
    chain: AdvantageTransform, objective: Objective, settings: SamplingSettings
) -> str:
    """What to set where nothing weighs what a sampler in 8 bits drew; "" where something does."""
    dtypes = {"kv_cache_dtype": settings.kv_cache_dtype, "weight_dtype": settings.weight_dtype}
    low = [f'rollout.{name} = "{dtype}"' for name, dtype in dtypes.items() if dtype in LOW_BIT]
    if not low or not (name := _unweighed(chain, objective)):
        return ""
    return (
        f"{' and '.join(low)}: {name} with loss.proximal = "
        f"{json.dumps(objective.proximal)} takes samples of the rounded policy for the trainer's "
        f'own; set loss.mismatch = {{ use = "truncated_importance" }}{_beside_a_ratio(objective)}'
    )


def _unweighed(chain: AdvantageTransform, objective: Objective, at: str | None = None) -> str:
    """The surrogate, or a side of it, whose samples do not count by how likely they are to the
    trainer now; "" where all do.  Args: at: as in `refuse_stale`."""
    surrogate = objective.surrogate
    names = surrogate.without_ratio(at) if objective.proximal == "behavior" else [surrogate.name]
    if chain.importance or not names:
        return ""
    return names[0] if names[0] == surrogate.name else f"{names[0]} in {surrogate.name}"


def _beside_a_ratio(objective: Objective) -> str:
    """What `loss.mismatch` takes where a part of the surrogate has a ratio (WEIGHED_TWICE)."""
    return ' with loss.proximal = "trainer"' if objective.surrogate.weighs else ""
