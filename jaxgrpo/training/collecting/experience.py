"""The experience of a run: right samples of earlier steps, built from its config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from jaxgrpo.config.keys import ExperienceKeys, RolloutKeys
from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.core.types import Params, Rollouts
from jaxgrpo.evaluation.rescoring import make_rescorer
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout.experience import Experiencer, Rank, no_experience, num_groups
from jaxgrpo.rollout.judging import RolloutSource, put_prompts
from jaxgrpo.rollout.policies import SuccessJudge
from jaxgrpo.training.collecting.growing import refuse_excluded, refuse_unread
from jaxgrpo.training.inputs import Inputs


def refuse(keys: ExperienceKeys, rollout: RolloutKeys, rewards: Sequence[Reward]) -> None:
    """Raises: InputError where a run cannot have experience, or keys act on none."""
    if not keys.share:
        return refuse_unread(keys, "experience.share", "0.5")
    where = f"experience.share = {keys.share:g}"
    refuse_excluded("experience.share", rollout)
    if rollout.group_size < 2:
        raise InputError(f"{where}: a group of one has no other sample; set rollout.group_size")
    if num_groups(keys.share, rollout.prompts_per_step) < 1:
        least = math.ceil(1e6 / rollout.prompts_per_step) / 1e6
        raise InputError(
            f"{where}: of rollout.prompts_per_step = {rollout.prompts_per_step} that is no whole "
            f"prompt; set it to {least:g} or more"
        )
    names = [reward.name for reward in rewards]
    if keys.reward is not None and keys.reward not in names:
        hint = suggest(keys.reward, names)
        raise InputError(f"experience.reward = {keys.reward!r} is none of the rewards: {hint}")


def with_experience(
    source: RolloutSource,
    keys: ExperienceKeys,
    rollout: RolloutKeys,
    run_inputs: Inputs,
    rewards: Sequence[Reward],
    seed: int,
    mesh: Mesh,
    sum_scored: bool = False,
) -> RolloutSource:
    """The source of a run that trains on right samples of earlier steps again; without
    `experience.share` the one that it is given.

    Args:
      seed, mesh: `train.seed`, and the mesh that the run samples on.
      sum_scored: as in `jaxgrpo.rollout.policies.build_policy`.

    Raises: InputError as `refuse`, and where saved rollouts are replayed.
    """
    refuse(keys, rollout, rewards)
    if not keys.share:
        return source
    if run_inputs.replay:
        raise InputError(
            f"experience.share = {keys.share:g}: a replay trains on what its files hold; leave the "
            "table experience out of the config, in a copy of it that you give by --config"
        )
    prompts, pretrained = run_inputs.prompts, run_inputs.pretrained
    weights = {reward.name: reward.weight for reward in rewards}
    experiencer = Experiencer(
        share=keys.share,
        start=keys.start,
        per_row=keys.per_row,
        judge=SuccessJudge(
            "experience", 0.0, keys.reward, keys.success, weights, sum_scored=sum_scored
        ),
        encoded=prompts.encoded,
        num_prompts=rollout.prompts_per_step,
        group_size=rollout.group_size,
        seed=seed,
        rank=make_rank(pretrained.model_on(mesh), mesh, rollout.temperature),
    )
    room = no_experience(keys.size, rollout.max_completion_tokens, len(prompts.rows))
    return source._replace(
        experiencer=experiencer, waiting=source.waiting._replace(experience=room)
    )


def make_rank(model: Model, mesh: Mesh, temperature: float) -> Rank:
    """Log-probs of samples under what `sync` gave, by the pass of evaluations.

    Args:
      model, mesh: that sample.
    """
    rescore = make_rescorer(model, mesh, temperature=temperature, quantities={"logp"})
    assert rescore is not None

    def rank(params: Params, rollouts: Rollouts) -> Any:
        return sharding.to_host(rescore(params, put_prompts(mesh, rollouts))["logp"])

    return rank
