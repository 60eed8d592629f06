"""The atlas: inner products of sketches against those of the gradients that updates follow."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from engines import make_blueprint

from jaxgrpo import advantages, losses
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import sharding
from jaxgrpo.models.api import LoraConfig
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update import sketches
from jaxgrpo.update.atlas import Atlas, Atlases, Contender, even_out
from jaxgrpo.update.preparing import Preparer
from jaxgrpo.update.step import build_steps

REWARDS = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], np.float32)
MEANS = {name: getattr(losses, name)() for name in ("token_mean", "sequence_mean")}
WAYS = {
    "grpo": ("grpo", losses.clip(), "token_mean"),
    "sign": ("sign", losses.clip(), "token_mean"),
    "by sequence": ("grpo", losses.clip(), "sequence_mean"),
    "passk": ("passk", losses.reinforce(), "sequence_mean"),
    "gvpo": ("dr_grpo", losses.gvpo(), "sequence_mean"),
}


def blueprint(config=tiny.UNIFORM, mesh=(1, 1, 1, 1), way="grpo"):
    recipe, surrogate, reduction = WAYS[way]
    return make_blueprint(
        config,
        (4, 4, 6, 5),
        100,
        mesh=mesh,
        temperature=0.8,
        geometry_options={"recurs": config.recurs},
        chain=advantages.build(recipe),
        objective=losses.Objective(surrogate, MEANS[reduction]),
    )


@functools.cache
def contenders():
    return {
        name: Contender(advantages.build(recipe), losses.Objective(surrogate, MEANS[reduction]))
        for name, (recipe, surrogate, reduction) in WAYS.items()
    }


def learner_and_rollouts(config, run, behavior):
    layout = sharding.param_shardings(run.mesh, run.model.axes, run.model.shapes)
    learner = first_learner(run, jax.device_put(tiny.params(config), layout), 8, ("reward",))
    rollouts = tiny.rollouts(REWARDS)
    if behavior == "trainer":
        logp = tiny.whole_logps(config, tiny.params(config), rollouts, 0.8)
        rollouts = dataclasses.replace(rollouts, behavior_logp=logp)
    return learner, rollouts


def exact(config, behavior):
    """The inner products of the steps that updates make, all parameters in one vector."""
    steps = []
    for way in WAYS:
        run = blueprint(config, way=way)
        learner, rollouts = learner_and_rollouts(config, run, behavior)
        functions = build_steps(run)
        learner, prepared = functions.prepare(learner, rollouts)
        before = jax.tree.map(np.asarray, learner.trainable)
        after = functions.update(learner, prepared.batches)[0].trainable
        moved = jax.tree.map(lambda new, old: np.ravel(np.asarray(new) - old), after, before)
        steps.append(np.concatenate(jax.tree.leaves(moved)).astype(np.float64))
    return np.stack(steps) @ np.stack(steps).T


def drawn(config, behavior, mesh=(1, 1, 1, 1)):
    run = blueprint(config, mesh)
    learner, rollouts = learner_and_rollouts(config, run, behavior)
    return Atlases(Preparer(run), contenders(), 8).draw(learner, rollouts)


@pytest.mark.full
@pytest.mark.parametrize("behavior", ["random", "trainer"])
def test_cosines_and_lengths_are_those_of_the_updates(behavior):
    want = Atlas(tuple(WAYS), exact(tiny.UNIFORM, behavior))
    atlas = drawn(tiny.UNIFORM, behavior)
    assert atlas.names == tuple(WAYS)
    np.testing.assert_allclose(atlas.cosines, want.cosines, atol=0.03)
    np.testing.assert_allclose(atlas.norms, want.norms, rtol=0.03)
    assert want.cosines.min() < 0.7  # the methods are not all alike


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(4, 1, 1, 1), (2, 2, 1, 1), (1, 1, 2, 1)])
def test_devices_draw_the_same_atlas(mesh):
    alone, divided = drawn(tiny.UNIFORM, "random"), drawn(tiny.UNIFORM, "random", mesh)
    np.testing.assert_allclose(divided.products, alone.products, rtol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    [dataclasses.replace(tiny.UNIFORM, lora=LoraConfig(rank=2, alpha=2.0)), tiny.HYBRID],
    ids=["lora", "hybrid"],
)
def test_adapters_and_states_have_their_own_gradients(config):
    want = Atlas(tuple(WAYS), exact(config, "trainer"))
    atlas = drawn(config, "trainer")
    np.testing.assert_allclose(atlas.cosines, want.cosines, atol=0.03)
    np.testing.assert_allclose(atlas.norms, want.norms, rtol=0.03)


def test_columns_of_a_large_array_do_not_collide():
    """Two gradients that live in one column of many rows: no period of the rows brings their
    entries together more often than chance does."""
    rng = np.random.default_rng(0)
    columns = np.zeros((2, 4096, 64), np.float32)
    columns[:, :, 3] = rng.normal(size=(2, 4096))
    dealt = sketches.deals({"w": columns[0]})
    sketch = np.asarray(sketches.fold(dealt, {"w": columns}, parts=2))
    norms = np.linalg.norm(sketch, axis=1)
    assert abs(sketch[0] @ sketch[1] / np.prod(norms) - np.vdot(*columns) / 4096) < 0.06
    np.testing.assert_allclose(norms, np.linalg.norm(columns.reshape(2, -1), axis=1), rtol=0.05)


def test_coefficients_are_even_where_they_differ_by_less_than_a_fiftieth():
    mask = np.array([[[True, True, False], [True, True, True]]])
    values = np.array([[[1.0, 1.01, 0.0], [-2.0, -2.0, -2.01]]])
    even = even_out(values, mask)
    assert even is not None
    np.testing.assert_allclose(even, [[1.005, -6.01 / 3]])
    assert even_out(values * [1.0, 1.1, 1.0], mask) is None


def test_an_update_of_nothing_has_no_cosine():
    atlas = Atlas(("a", "b"), np.array([[4.0, 0.0], [0.0, 0.0]]))
    assert atlas.metrics() == {"atlas/norm/a": 1.0, "atlas/norm/b": 0.0}


@pytest.mark.parametrize(
    ("recipe", "penalties", "message"),
    [
        (("alpha_dpg",), (), "reads base"),
        (("passk", {"k": 99}), (), "k=99"),
        (("l2t",), (), "cut_answer_logp, thought_tokens"),
        (("opd",), (), "reads teacher_logp, which the run"),
        (("hicra",), (), "reads planning, which the run"),
        (("gigpo",), (), "reads state_hash, turn, turn_reward, which the run"),
        (("grpo",), (losses.top_k_divergence(1.0),), "its loss reads policy:teacher_top"),
    ],
)
def test_what_an_atlas_cannot_show_is_refused(recipe, penalties, message):
    objective = losses.Objective(losses.reinforce(), MEANS["token_mean"], penalties)
    method = Contender(advantages.build(*recipe), objective)
    with pytest.raises(InputError, match=message):
        Atlases(Preparer(blueprint()), {"run": contenders()["grpo"], "extra": method}, 8)


def test_a_method_may_read_what_samples_bring_whatever_the_run_reads():
    objective = losses.Objective(losses.reinforce(), MEANS["token_mean"])
    methods = {name: Contender(advantages.build(name), objective) for name in ("grpo", "gigpo")}
    brought = ("turn", "turn_reward", "state_hash")
    assert Atlases(Preparer(blueprint()), methods, 8, brought).names == ("grpo", "gigpo")


@pytest.mark.slow
def test_a_method_that_reads_how_likely_texts_were_to_what_drew_them_is_refused():
    run = blueprint()._replace(trains_texts=True)
    objective = losses.Objective(losses.reinforce(), MEANS["token_mean"])
    steps = [{"use": "sum_rewards"}, {"use": "unlikeliness"}]
    methods = {"run": contenders()["passk"], "extra": Contender(advantages.build(steps), objective)}
    learner, rollouts = learner_and_rollouts(tiny.UNIFORM, run, "sampler")
    with pytest.raises(InputError, match=r"^extra: unlikeliness reads behavior_logp, and how"):
        Atlases(Preparer(run), methods, 8).draw(learner, rollouts)


def test_a_method_that_remembers_rows_is_drawn_too():
    method = Contender(
        advantages.build("spo"), losses.Objective(losses.reinforce(), MEANS["token_mean"])
    )
    Atlases(Preparer(blueprint()), {"run": contenders()["grpo"], "extra": method}, 8)
