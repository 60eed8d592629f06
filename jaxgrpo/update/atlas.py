"""The atlas: how alike the updates are that different methods would make of the same samples.

At parameters theta a method's update is a sum over tokens of a coefficient times grad log p. Chain,
reduction and surrogate give the coefficients without a pass of the model; the gradients are
sketched once for all methods.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jaxgrpo.advantages import AdvantageTransform, chains
from jaxgrpo.core.errors import InputError, NotGiven
from jaxgrpo.core.scores import ANSWERED, OF_ANSWERS, OF_BATCH, OF_PASS, Score, policy_field
from jaxgrpo.core.types import Learner, Rollouts, RolloutSpec
from jaxgrpo.losses import Objective
from jaxgrpo.models import sharding
from jaxgrpo.update.batch_losses import batch_loss
from jaxgrpo.update.preparing import Preparer
from jaxgrpo.update.sketches import Sketch, make_sketch

RUN = "run"
"""What the method of the run itself is called, the first of its atlases."""

EVEN = 0.02
"""Coefficients of a sample's tokens that differ by so much of their size (root mean square) are
taken for equal: that turns an update by at most so much of its length, a cosine by EVEN^2 / 2."""


class Contender(NamedTuple):
    """A method on the atlas."""

    chain: AdvantageTransform
    objective: Objective

    @property
    def needs(self) -> frozenset[str]:
        return self.chain.needs | self.objective.needs | {"trainer_logp"}


class Atlas(NamedTuple):
    """Inner products of the updates of methods, estimated from sketches."""

    names: tuple[str, ...]
    products: np.ndarray  # [M, M] float64

    @property
    def norms(self) -> np.ndarray:
        """[M]: the lengths of the updates."""
        return np.sqrt(np.diag(self.products))

    @property
    def cosines(self) -> np.ndarray:
        """[M, M]; NaN where an update is 0."""
        with np.errstate(invalid="ignore", divide="ignore"):
            cosines = self.products / np.outer(self.norms, self.norms)
        return np.clip(cosines, -1, 1)

    def metrics(self) -> dict[str, float]:
        """atlas/norm/A, the length beside that of the first, and atlas/cosine/A/B of each pair;
        without those that an update of 0 leaves undefined."""
        values: dict[str, float] = {}
        for place, name in enumerate(self.names):
            values[f"atlas/norm/{name}"] = float(self.norms[place] / (self.norms[0] or np.nan))
            for earlier, cosine in zip(self.names, self.cosines[:place, place], strict=False):
                values[f"atlas/cosine/{earlier}/{name}"] = float(cosine)
        return {name: value for name, value in values.items() if np.isfinite(value)}


class Atlases:
    """Draws atlases of some methods on the samples of a run."""

    def __init__(
        self,
        preparer: Preparer,
        contenders: Mapping[str, Contender],
        num_rows: int,
        brought: Collection[str] = (),
    ):
        """
        Args:
          preparer: of the run.
          contenders: name -> method.
          num_rows: of the data.
          brought: fields that samples bring beside those that the run's method reads.

        Raises: InputError where the run does not hold what a method reads, or does not fit it.
        """
        blueprint = preparer.blueprint
        policies = {"trainer", *blueprint.policies, *blueprint.teachers}
        mesh, sizes = blueprint.mesh, blueprint.geometry
        rewards = (*(blueprint.reward_weights or ()),)
        spec = RolloutSpec(*sizes[:4], rewards=rewards, num_rows=num_rows)
        fields = {*rewards, *brought, *blueprint.objective.needs}
        for name, contender in contenders.items():
            refuse(name, contender, blueprint.scores, policies, blueprint.chain.needs, fields)
            contender.chain.init(spec)
        self.names: tuple[str, ...] = tuple(contenders)
        self.needs: frozenset[str] = frozenset().union(*(c.needs for c in contenders.values()))
        self.preparer: Preparer = preparer
        tokens = sharding.rounded_up(mesh, sizes.widest, "sequence")
        self.sketch: Sketch = make_sketch(blueprint.passes._replace(tokens=tokens))
        self.coefficients: dict[str, Callable[[Rollouts], Array]] = {
            name: jax.jit(functools.partial(_coefficients, contender, spec, blueprint.trains_texts))
            for name, contender in contenders.items()
        }

    def draw(self, learner: Learner, rollouts: Rollouts) -> Atlas:
        """The atlas of a step's rollouts, before the learner is updated on them.

        Methods with a memory are taken as in their first step. A pass sketches every sample that
        moves some method, and one more all samples of a method whose coefficients differ within a
        sample.

        Raises: InputError where a method reads how likely texts were to what drew them.
        """
        rollouts = self._scored(learner, rollouts)
        mask = np.asarray(sharding.to_host(rollouts.token_mask))
        by_token = {}
        for name, compute in self.coefficients.items():
            try:
                by_token[name] = np.asarray(sharding.to_host(compute(rollouts)), np.float64)
            except NotGiven as error:
                if error.name != "behavior_logp":
                    raise
                raise InputError(
                    f"{name}: {str(error).partition(',')[0]}, and how likely texts of the data "
                    "(data.completion) were to what wrote them is not known: leave the method out"
                ) from None
        by_sample = {name: even_out(values, mask) for name, values in by_token.items()}
        moved = np.zeros(mask.shape[:2])
        for value in by_sample.values():
            moved += 0 if value is None else np.abs(value)
        sketches = self.sketch(learner, rollouts, mask * (moved > 0)[..., None])
        updates = []
        for name, value in by_sample.items():
            if value is None:
                update = self.sketch(learner, rollouts, by_token[name]).sum((0, 1))
            else:
                update = np.einsum("pg,pgk->k", value, sketches)
            updates.append(update.astype(np.float64))
        stacked = np.stack(updates)
        return Atlas(self.names, stacked @ stacked.T)

    def _scored(self, learner: Learner, rollouts: Rollouts) -> Rollouts:
        """The rollouts on the update's mesh, with all that the methods read."""
        preparer = self.preparer
        if preparer.blueprint.has_two_meshes:
            rollouts = preparer.move_rollouts(rollouts)
        scored, _ = preparer.with_fields(learner, preparer.recorded(rollouts), self.needs)
        now = scored.policy_version == learner.step
        return dataclasses.replace(scored, fields={**scored.fields, "sampled_now": now})


def without_pass(objective: Objective) -> Objective:
    """The objective without penalties that are no functions of log-probs, such as the entropy's."""
    penalties = (part for part in objective.penalties if not part.needs & OF_PASS.keys())
    return objective._replace(penalties=tuple(penalties))


def refuse(
    name: str,
    contender: Contender,
    scores: Mapping[str, Score],
    policies: Collection[str],
    read_by_run: Collection[str],
    brought: Collection[str] = (),
) -> None:
    """Raises: InputError where a run does not hold what a method reads.

    Args:
      policies: that the run holds; read_by_run: what its chain needs; brought: further fields.
    """
    if ANSWERED in contender.needs:
        raise InputError(
            f"{name}: trains known answers in place of what samples went on with, and an atlas is "
            "of one set of samples: leave the method out"
        )
    objective = contender.objective
    shortened = {policy_field(score) for part in objective.penalties for score, _ in part.counts}
    if read := sorted(shortened | objective.surrogate.needs & OF_PASS.keys()):
        raise InputError(
            f"{name}: its loss reads {', '.join(read)}, whose gradient is none of log-probs of "
            "samples: the atlas cannot show it; leave out atlas.methods, or the method"
        )
    needs = contender.needs
    scorers = (scores[need].scored_by for need in needs & scores.keys())
    lacking = {policy for names in scorers for policy in names}.difference(policies)
    lacking |= (needs & OF_ANSWERS.keys()).difference(read_by_run)
    present = {*scores, *OF_ANSWERS, *OF_BATCH, *OF_PASS, *read_by_run, *brought}
    lacking |= needs - present
    if lacking:
        raise InputError(
            f"{name}: reads {', '.join(sorted(lacking))}, which the run's method does not: the "
            "run does not make it; leave the method out, or draw the atlas in a run of it"
        )


def _coefficients(
    contender: Contender, spec: RolloutSpec, trains_texts: bool, rollouts: Rollouts
) -> Array:
    """[P, G, T]: minus the derivative of the loss in each token's log-prob, before an update.

    Raises: NotGiven where the chain reads the log-probs of what drew texts of the data.
    """
    chain, objective = contender.chain, without_pass(contender.objective)
    unknown: Any = {"behavior_logp": None} if trains_texts else {}
    drawn = dataclasses.replace(rollouts, **unknown)
    signal, *_ = chain.update(chains.start(drawn), chain.init(spec), drawn)
    advantage, mask = chains.at_tokens(signal, rollouts.token_mask)

    def loss(logp: Array) -> Array:
        return batch_loss(objective, {"logp": logp}, rollouts, advantage, mask)

    return -jax.grad(loss)(rollouts.fields["trainer_logp"])


def even_out(values: np.ndarray, mask: np.ndarray) -> np.ndarray | None:
    """[P, G]: the coefficient that all tokens of a sample have; None where they have several.

    Args: coefficients and the tokens that the policy chose, [P, G, T] each.
    """
    mean = (values * mask).sum(-1) / np.maximum(mask.sum(-1), 1)
    difference = np.where(mask, values - mean[..., None], 0)
    is_even = np.square(difference).sum() <= EVEN**2 * np.square(values).sum()
    return mean if is_even else None
