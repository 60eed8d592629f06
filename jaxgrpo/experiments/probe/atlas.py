"""`jaxgrpo probe --methods`: what updates different methods would make of the same samples."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from jaxgrpo.config import files as configs
from jaxgrpo.config.contenders import make_contenders
from jaxgrpo.core.errors import InputError, without_passwords
from jaxgrpo.data.sources import Rows
from jaxgrpo.data.storage import Place
from jaxgrpo.rewards import RewardFunction, callable_name
from jaxgrpo.training import fingerprints
from jaxgrpo.training.collecting.growing import brought_fields, make_trees
from jaxgrpo.training.processes import peers, process
from jaxgrpo.training.records.console import show_table
from jaxgrpo.training.records.logbook import Clock
from jaxgrpo.training.records.report import blocks
from jaxgrpo.training.records.report.maps import NOTE, Map, draw_map
from jaxgrpo.training.rewarding import print_failures
from jaxgrpo.training.setup import setup
from jaxgrpo.training.stored_policy import NO_REWARD, config_for, source_or_rows
from jaxgrpo.update.atlas import Atlas, Atlases
from jaxgrpo.update.preparing import Preparer

TITLE = "cosines of updates, and lengths beside the first"


def probe_atlas(
    target: str | Place,
    methods: Sequence[str],
    data: str | Place | Rows | None,
    reward: str | RewardFunction | None,
    overrides: Sequence[str],
    tables: Mapping[str, Any],
) -> dict[str, Any]:
    """How alike the updates are that methods would make of the samples of a run's first step.

    Args:
      methods: recipes by name, and changes of the loss, as "dr_grpo+loss.reduction=constant".
      overrides: of the command line; `tables`: of Python, nested or dotted. The rest as in `probe`.

    Returns: "model", "methods" [M], "cosines" [M][M] and "norms" [M], lengths beside that of the
    first; None where an update of 0 leaves them undefined.
    Raises: InputError before anything is sampled, where one cannot be built, or nothing judges.
    """
    if len(methods) < 2:
        raise InputError("--methods: give two or more, as grpo,sign,dr_grpo")
    source, rows = source_or_rows(data)
    changes = {**tables, **({} if source is None else {"data.path": source})}
    changes |= {"rewards": [{"use": reward}]} if isinstance(reward, str) else {}
    config = config_for(target, changes, overrides, Console(highlight=False))
    functions = {callable_name(reward): reward} if callable(reward) else None
    if functions is None and NO_REWARD in [reward.use for reward in config.rewards]:
        raise InputError("nothing judges the samples; give --reward, as math")
    process.start(config.mesh.platform)
    peers.set_timeout(config.run.peer_timeout)
    facts = functools.partial(fingerprints.config_facts, config)
    fingerprints.refuse_other_start(facts, config.teachers, config.scorer_name)
    run = setup(config, rewards=functions, dataset=rows, check=fingerprints.refuse_other_rows)
    rollout, share = config.rollout, config.experience.share
    trees = make_trees(config.tree, rollout, share)
    named = methods, "--methods", configs.to_tables(config)
    try:
        atlases = Atlases(
            Preparer(run.blueprint),
            make_contenders(*named, config.source, run.rewards),
            len(run.inputs.prompts.rows),
            brought_fields(trees, rollout, share, config.has_turns),
        )
        live_groups = functools.partial(run.live_groups, run.learner)
        clock = Clock(lambda phase: None)
        _, collected = run.collect(run.sync(run.learner), 0, run.stream, live_groups, clock)
        print_failures(Console(highlight=False), collected.reward_log.messages)
        atlas = atlases.draw(run.learner, collected.rollouts)
    finally:
        run.inputs.close()
    return {"model": without_passwords(str(target)), **_numbers(atlas)}


def _numbers(atlas: Atlas) -> dict[str, Any]:
    first = atlas.norms[0]
    cosines = [[None if value != value else float(value) for value in row] for row in atlas.cosines]
    norms = [float(norm / first) if first else None for norm in atlas.norms]
    return {"methods": list(atlas.names), "cosines": cosines, "norms": norms}


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    """Prints the atlas as a table."""
    names = numbers["methods"]
    rows = [["", *names, "length"]]
    for name, cosines, norm in zip(names, numbers["cosines"], numbers["norms"], strict=True):
        rows.append([name, *(blocks.number(cosine, ".3f") for cosine in cosines)])
        rows[-1].append(blocks.number(norm))
    show_table(console, rows, title=TITLE)


def render(numbers: Mapping[str, Any]) -> str:
    """The atlas as an HTML page."""
    cosines = np.array(numbers["cosines"], float)
    norms = np.array([np.nan if norm is None else norm for norm in numbers["norms"]])
    svg = draw_map(Map(numbers["methods"], cosines, norms))
    body = f"<h1>Atlas</h1>\n{blocks.figure('Updates of methods', svg, NOTE.format(step=1))}"
    return blocks.document(f"atlas of {numbers['model']}", body)
