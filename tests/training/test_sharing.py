"""What runs of one process share, and that it changes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import small_run

from jaxgrpo.config import files as configs
from jaxgrpo.training import loop, memory, setup
from jaxgrpo.training.setup import DEPENDS, Shared
from jaxgrpo.training.stored_policy import evaluator_for_run

pytestmark = pytest.mark.slow

EVAL = {"eval.data": "task:arithmetic:test", "eval.prompts": 8, "eval.samples": 4}


def config(folder, **changes):
    return small_run.config(folder, **{**EVAL, "train.steps": 2, **changes})


def test_each_key_is_among_those_that_something_shared_depends_on_or_acts_on_nothing_shared():
    keys = configs.flat(configs.to_tables(configs.load("quickstart")))
    tables = set().union(*DEPENDS.values())
    left = {k for k in keys if not any(k == t or k.startswith(f"{t}.") for t in tables)}
    assert {key if key.startswith("train.") else key.partition(".")[0] for key in left} == {
        *("train.seed", "train.stop_after_not_finite"),
        *("run", "tracking", "plan", "checkpoint", "experience", "tree", "atlas"),
    }


def test_what_differs_only_by_seed_shares_everything_and_a_method_is_its_own(tmp_path):
    shared = Shared()
    rebuilt: list[str] = []

    def names(run_config):
        """What is made again for a config."""
        rebuilt.clear()
        share = shared.for_config(run_config)
        for name in DEPENDS:
            share(name, lambda name=name: rebuilt.append(name))
        return set(rebuilt)

    first = config(tmp_path / "a")
    assert names(first) == set(DEPENDS)
    assert names(config(tmp_path / "b", **{"train.seed": 1})) == set()
    assert names(dataclasses.replace(first, recipe="sign")) == {"method"}
    assert names(config(tmp_path / "longer", **{"train.steps": 3})) == {"evaluator"}
    rate = {"optimizer": {"learning_rate": 0.5}}
    assert names(config(tmp_path / "c", **rate)) == {"method", "update"}
    for several in ("minibatches", "num_iterations"):
        changes = {f"train.{several}": 2}
        assert names(config(tmp_path / several, **changes)) == {"method", "update"}
    assert names(config(tmp_path / "d", **{"eval.samples": 2})) == {"inputs", "evaluator"}
    size = names(config(tmp_path / "e", **{"rollout.group_size": 2}))
    assert size == {"method", "update", "engine", "evaluator"}
    penalty = {"loss": {"kl": {"use": "k2", "beta": 0.1}}}
    assert names(config(tmp_path / "f", **penalty)) == {"method", "update"}
    resets = {"reference": {"reset_every": 1}}
    assert names(config(tmp_path / "g", **penalty, **resets)) == {"method"}
    template = {"data.chat_template": "none"}
    assert names(config(tmp_path / "h", **template)) == {*DEPENDS} - {"update"}


def test_the_number_of_steps_matters_to_programs_only_where_the_rate_falls(tmp_path):
    """Scorers of evaluations read it."""
    shared, programs = Shared(), {"method", "update"}
    for schedule, again in (("constant", {"evaluator"}), ("linear", {"evaluator", *programs})):
        objects = []
        for steps in (3, 4):
            optimizer = {"learning_rate": 1e-3, "schedule": schedule, "warmup_steps": 1}
            changes = {"optimizer": optimizer, "train.steps": steps}
            share = shared.for_config(config(tmp_path, **changes))
            objects.append({name: share(name, lambda: object()) for name in DEPENDS})
        first, second = objects
        assert {name for name in DEPENDS if first[name] is not second[name]} == again


@pytest.mark.full
def test_a_run_that_shares_ends_as_one_that_does_not(tmp_path):
    shared = Shared()
    hashes = []
    for seed in (0, 1):
        run_config = config(tmp_path / f"shared{seed}", **{"train.seed": seed, "recipe": "rloo"})
        share = shared.for_config(run_config)
        run = loop.take(
            run_config,
            lambda built, share=share: evaluator_for_run(built, share),
            shown=False,
            share=share,
        )
        hashes.append(run.summary["parameter_hash"])
    assert hashes[0] != hashes[1]
    alone = loop.train(config(tmp_path / "alone", **{"train.seed": 1, "recipe": "rloo"}))
    assert alone.summary["parameter_hash"] == hashes[1]
    assert small_run.metrics(tmp_path / "alone") == small_run.metrics(tmp_path / "shared1")
    assert not (tmp_path / "alone" / "report.html").exists()


@pytest.mark.full
def test_noise_is_what_training_sees_and_evaluation_does_not(tmp_path):
    rewards = [{"use": f"{small_run.__file__}:nothing", "flip": 0.25}]
    changes = {"rewards": rewards, "optimizer": {"learning_rate": 0.0}}
    run = loop.train(config(tmp_path / "r", **changes))
    shares = [line["rewards/nothing/flipped"] for line in run.metrics if "reward" in line]
    assert shares == [line["reward"] for line in run.metrics if "reward" in line]
    # 64 draws at .25: four deviations of .054.
    assert np.mean(shares) > 0
    assert abs(np.mean(shares) - 0.25) < 0.22
    for line in run.metrics:
        assert line.get("eval/pass@1", 0) == 0


def test_an_update_is_shared_by_runs_that_have_room_for_as_many_tokens(tmp_path, monkeypatch):
    """What a run keeps beside an update is no part of its keys, and decides how long it may be."""
    shared, fit = Shared(), memory.fitting_geometry
    steps = []
    for name, part in {"grpo": 1, "sign": 2, "dr_grpo": 1}.items():

        def fitting(*arguments: Any, part: int = part) -> Any:
            geometry = fit(*arguments)
            return geometry._replace(tokens=geometry.tokens // part)

        monkeypatch.setattr(memory, "fitting_geometry", fitting)
        read = config(tmp_path / name, recipe=name)
        run = setup.setup(read, share=shared.for_config(read))
        steps.append((run.blueprint.geometry.tokens, run.steps.update_program))
    (wide, first), (narrow, second), (_, third) = steps
    assert wide == 2 * narrow
    assert first is third
    assert first is not second


def test_an_engine_leaves_room_for_what_each_run_that_shares_it_keeps(tmp_path, monkeypatch):
    """The second run keeps a copy of the weights beside it: fewer slots fit."""
    penalty = {"loss": {"kl": {"use": "k2", "beta": 0.1}}}
    sixteen = setup.setup(config(tmp_path / "a", **penalty, **{"rollout.slots": 16})).memory
    limit = sixteen.persistent + sixteen.sampler + sixteen.decode
    monkeypatch.setattr(memory, "device_bytes", lambda _mesh: int(limit / memory.SHARE) + 2)
    shared, runs = Shared(), []
    for changes in ({}, penalty):
        tables = small_run.tables(tmp_path / "r", **changes)
        del tables["rollout"]["slots"]
        read = configs.from_dict(tables)
        runs.append(setup.setup(read, share=shared.for_config(read)))
    assert runs[0].engine is runs[1].engine
    assert runs[1].memory.copies > runs[0].memory.copies == 0
    more, fewer = (run.blueprint.sampling.slots for run in runs)
    assert more > fewer >= 16
    for run in runs:
        assert run.memory.persistent + run.memory.sampler + run.memory.decode <= limit
    # Also of a run of the first config that comes behind.
    assert runs[0].engine.slots_for(*runs[0].blueprint.geometry[:2]) == fewer
