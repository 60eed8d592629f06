"""Prepare and update: the numbers of a plain oracle, however the batch is laid out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from engines import CLIPPED, make_blueprint

from benchmarks.programs import compilations
from jaxgrpo import advantages, losses
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import finalise
from jaxgrpo.models import sharding
from jaxgrpo.models.api import LoraConfig
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.training.checkpoints import parameter_hash
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.step import build_steps

pytestmark = pytest.mark.slow

MIXED = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], np.float32)
FLAT = np.ones((4, 4), np.float32)
TEMPERATURE = 0.8
BETA = 0.3
RATE = 10.0  # large, so that steps stand out of the rounding of parameters near 1

WITH_KL = CLIPPED._replace(penalties=(losses.k2(BETA),))
WITH_FULL_KL = CLIPPED._replace(penalties=(losses.full_kl(BETA),))
WITH_BONUS = CLIPPED._replace(penalties=(losses.entropy_bonus(BETA),))
WITH_CONTROL = CLIPPED._replace(
    penalties=(losses.adaptive_entropy(target=3.0, coefficient=BETA, delta=0.01),)
)


@functools.cache
def blueprint(
    objective=CLIPPED,
    config=tiny.UNIFORM,
    recipe="grpo",
    mesh=(1, 1, 1, 1),
    tokens=100,
    compact=True,
    optimizer="sgd",
    minibatches=1,
    num_iterations=1,
    on_no_live_sample="step",
):
    return make_blueprint(
        config,
        (4, 4, 6, 5),
        tokens,
        mesh=mesh,
        temperature=TEMPERATURE,
        geometry_options={"minibatches": minibatches},
        chain=advantages.build(recipe),
        objective=objective,
        optimizer=optax.inject_hyperparams(getattr(optax, optimizer))(learning_rate=RATE),
        compact=compact,
        num_iterations=num_iterations,
        on_no_live_sample=on_no_live_sample,
    )


@functools.cache
def built(**options):
    """The blueprint and their jitted functions, compiled once for all tests that share them."""
    step_blueprint = blueprint(**options)
    return step_blueprint, build_steps(step_blueprint)


@functools.cache
def run(rewards="mixed", reference=0, behavior="random", **options):
    """One update from fixed rollouts: (prepared, parameters before and after, metrics)."""
    return stepped(rewards, reference, behavior, **options)[:4]


@functools.cache
def stepped(
    rewards="mixed", reference=0, behavior="random", steps_before=0, measured=None, **options
):
    """As `run`, with the objective's state after it.

    So many updates come before, or a control of the entropy is told what was measured before.
    """
    step_blueprint, steps = built(**options)
    config = options.get("config", tiny.UNIFORM)
    layout = sharding.param_shardings(
        step_blueprint.mesh, step_blueprint.model.axes, step_blueprint.model.shapes
    )
    values = jax.device_put(tiny.params(config), layout)
    learner = first_learner(step_blueprint, values, 8, ("reward",))
    if "reference" in learner.frozen:
        reference_params = jax.device_put(tiny.params(config, seed=reference), layout)
        learner = dataclasses.replace(learner, frozen={"reference": reference_params})
    rollouts = tiny.rollouts({"mixed": MIXED, "flat": FLAT, "nan": FLAT * np.nan}[rewards])
    if behavior == "trainer":
        logp = tiny.whole_logps(config, tiny.params(config), rollouts, TEMPERATURE)
        rollouts = dataclasses.replace(rollouts, behavior_logp=logp)
    if behavior == "nan":
        poisoned = rollouts.behavior_logp.at[0, 0, 0].set(jnp.nan)
        rollouts = dataclasses.replace(rollouts, behavior_logp=poisoned)
    rollouts = put_prompts(step_blueprint.mesh, rollouts)
    if measured is not None:
        control = learner.objective_state["adaptive_entropy"] | {"entropy": jnp.float32(measured)}
        learner = dataclasses.replace(learner, objective_state={"adaptive_entropy": control})
    for _ in range(steps_before):
        learner, prepared = steps.prepare(learner, rollouts)
        learner, _ = steps.update(learner, prepared.batches)
    before = jax.tree.map(np.asarray, learner.trainable)
    learner, prepared = steps.prepare(learner, rollouts)
    after, metrics = steps.update(learner, prepared.batches)
    remembered = jax.tree.map(np.asarray, after.objective_state)
    return (
        *(prepared, before, jax.tree.map(np.asarray, after.trainable), finalise(metrics)),
        remembered,
    )


def in_float64(config=tiny.UNIFORM, **options):
    """As `run`, without what float32 rounds."""
    with jax.enable_x64(True):
        return stepped(config=dataclasses.replace(config, dtype="float64"), **options)[:4]


def moved(result):
    """The step that the parameters made."""
    return jax.tree.map(lambda after, before: after - before, result[2], result[1])


def assert_near(left, right, tolerance):
    """Every leaf, by its norm."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True
    ):
        error, size = np.linalg.norm(a - b), np.linalg.norm(b)
        assert error <= tolerance * size, f"{jax.tree_util.keystr(path)}: {error} of {size}"


def assert_same_step(left, right, tolerance=1e-5):
    assert_near(moved(left), moved(right), tolerance)
    np.testing.assert_allclose(left[3]["loss"], right[3]["loss"], atol=1e-5, rtol=1e-5)


def oracle_step(config, beta=0.0, reference=0, penalty="k2"):
    """SGD on the loss written out: one causal pass per sample, the whole batch at once."""
    rollouts = tiny.rollouts(MIXED)
    centred = MIXED - MIXED.mean(1, keepdims=True)
    advantage = centred / (MIXED.std(1, ddof=1, keepdims=True) + 1e-6)
    mask = np.asarray(rollouts.token_mask)
    tables = functools.partial(
        tiny.whole_tables, config, rollouts=rollouts, temperature=TEMPERATURE
    )
    anchor = tables(tiny.params(config, seed=reference))
    tokens = rollouts.completion_tokens[..., None]
    pick = lambda table: jnp.take_along_axis(table, tokens, -1)[..., 0]  # noqa: E731

    def loss(params):
        table = tables(params)
        logp = jnp.where(mask, pick(table), 0)
        ratio = jnp.exp(logp - rollouts.behavior_logp)
        signal = advantage[..., None]
        clipped = jnp.minimum(ratio * signal, jnp.clip(ratio, 0.8, 1.2) * signal)
        kinds = {
            "k2": 0.5 * (logp - pick(anchor)) ** 2,
            "full_kl": (jnp.exp(table) * (table - anchor)).sum(-1),
            "bonus": (jnp.exp(table) * table).sum(-1),
        }
        return jnp.where(mask, beta * kinds[penalty] - clipped, 0).sum() / mask.sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(tiny.params(config))
    return value, jax.tree.map(lambda leaf: np.asarray(-RATE * leaf), gradient)


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    [tiny.UNIFORM, pytest.param(tiny.LOCAL_GLOBAL, marks=pytest.mark.full)],
    ids=["uniform", "local"],
)
def test_the_update_is_a_step_down_the_plain_loss(config):
    value, want = oracle_step(config)
    result = run(config=config)
    np.testing.assert_allclose(result[3]["loss"], value, rtol=1e-4, atol=1e-6)
    assert_near(moved(result), want, 1e-4)


@pytest.mark.full
def test_a_penalty_acts_on_every_sample_from_reference_logps_scored_by_the_trainer():
    value, want = oracle_step(tiny.UNIFORM, BETA, reference=7)
    result = run(objective=WITH_KL, reference=7)
    assert result[0].live.all()
    np.testing.assert_allclose(result[3]["loss"], value, rtol=1e-4)
    assert_near(moved(result), want, 1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("objective", "penalty"),
    [(WITH_FULL_KL, "full_kl"), pytest.param(WITH_BONUS, "bonus", marks=pytest.mark.full)],
)
def test_penalties_over_the_vocabulary_make_the_step_of_the_plain_loss(objective, penalty):
    value, want = oracle_step(tiny.UNIFORM, BETA, reference=7, penalty=penalty)
    result = run(objective=objective, reference=7)
    assert result[0].live.all()
    np.testing.assert_allclose(result[3]["loss"], value, rtol=1e-4)
    assert_near(moved(result), want, 1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("objective", "measured"),
    [(WITH_KL, None), (WITH_CONTROL, 0.5), (WITH_FULL_KL, None), (WITH_BONUS, None)],
    ids=["k2", "control", "full_kl", "bonus"],
)
def test_penalties_on_live_samples_only_let_the_dead_leave(objective, measured):
    objective = objective._replace(penalties_on="live")
    options = {"objective": objective, "reference": 7, "measured": measured}
    live = stepped(tokens=25, **options)
    np.testing.assert_array_equal(live[0].live.any(1), [True, False, False, True])
    complete = stepped(compact=False, **options)
    assert (live[0].batches[0].num_live, complete[0].batches[0].num_live) == (2, 1)
    assert_same_step(live, complete)
    np.testing.assert_equal(live[3].keys(), complete[3].keys())
    for name in live[3]:
        np.testing.assert_allclose(live[3][name], complete[3][name], rtol=1e-4, err_msg=name)
    assert_near(live[4], complete[4], 1e-6)


def test_entropy_and_kl_are_of_live_samples_and_the_estimate_is_of_all_tokens():
    rollouts = tiny.rollouts(MIXED)
    tables = functools.partial(
        tiny.whole_tables, tiny.UNIFORM, rollouts=rollouts, temperature=TEMPERATURE
    )
    table, anchor = (np.asarray(tables(tiny.params(seed=seed)), np.float64) for seed in (0, 7))
    everyone = np.asarray(rollouts.token_mask)
    live = everyone & (MIXED.std(1) > 0)[:, None, None]
    entropy = -(np.exp(table) * table).sum(-1)
    tokens = np.asarray(rollouts.completion_tokens)[..., None]
    ratio = np.take_along_axis(anchor - table, tokens, -1)[..., 0]
    kl = np.exp(ratio) - ratio - 1  # k3
    estimate = -np.asarray(rollouts.behavior_logp)[everyone].mean()
    on_live = {"objective": WITH_KL._replace(penalties_on="live"), "reference": 7}
    for options, counted in (
        ({}, live),
        (on_live, live),
        ({**on_live, "objective": WITH_KL}, everyone),
    ):
        prepared, _, _, metrics = run(**options)
        np.testing.assert_allclose(metrics["entropy"], entropy[counted].mean(), rtol=1e-5)
        if options:
            np.testing.assert_allclose(metrics["kl"], kl[counted].mean(), rtol=1e-4)
        estimated = finalise(prepared.metrics)["entropy_estimated"]
        np.testing.assert_allclose(estimated, estimate, rtol=1e-6)
    assert abs(entropy[live].mean() - entropy[everyone].mean()) > 0.01
    assert abs(kl[live].mean() - kl[everyone].mean()) > 0.1
    prepared, _, _, metrics = run("flat")
    assert np.isnan(metrics["entropy"])
    np.testing.assert_allclose(finalise(prepared.metrics)["entropy_estimated"], estimate, rtol=1e-6)


def test_an_entropy_control_acts_from_the_second_update_on_what_the_first_measured():
    first, second = (stepped(objective=WITH_CONTROL, steps_before=n) for n in (0, 1))
    assert first[3]["entropy_coefficient"] == 0
    assert_near(moved(first), moved(run()), 1e-5)
    remembered = first[4]["adaptive_entropy"]
    np.testing.assert_allclose(remembered["entropy"], first[3]["entropy"], rtol=1e-6)
    sign = 1 if first[3]["entropy"] < 3.0 else -1
    np.testing.assert_allclose(remembered["coefficient"], BETA + 0.01 * sign, rtol=1e-6)
    assert first[3]["entropy"] < 3.0
    np.testing.assert_allclose(second[3]["entropy_coefficient"], BETA + 0.01, rtol=1e-6)


def test_an_update_that_is_skipped_leaves_the_entropy_control_as_it_was():
    for options in ({"rewards": "nan"}, {"behavior": "nan"}):
        remembered = stepped(objective=WITH_CONTROL, **options)[4]["adaptive_entropy"]
        assert remembered["entropy"] == np.inf
        assert remembered["coefficient"] == np.float32(BETA)


@pytest.mark.full
@pytest.mark.parametrize(
    "objective",
    [
        CLIPPED,
        CLIPPED._replace(reduction=losses.sequence_mean()),
        CLIPPED._replace(reduction=losses.constant(5)),
    ],
    ids=["token_mean", "sequence_mean", "constant"],
)
def test_leaving_out_the_dead_changes_nothing_but_the_work(objective):
    compact, complete = run(objective=objective, tokens=25), run(objective=objective, compact=False)
    assert (compact[0].batches[0].num_live, complete[0].batches[0].num_live) == (2, 1)
    # Each sample has one first token.
    lengths = tiny.rollouts(MIXED).token_mask.sum(-1)[np.asarray(compact[0].live)]
    assert len(lengths) == 8
    assert int((compact[0].batches[0].segment > 0).sum()) == int(lengths.sum())
    assert_same_step(compact, complete)


@pytest.mark.full
@pytest.mark.parametrize(("tokens", "number"), [(10, 13), (50, 2), (25, 3), (16, 5)])
def test_micro_batches_add_up_to_the_whole(tokens, number):
    result = run(objective=WITH_KL, tokens=tokens)
    assert_same_step(result, run(objective=WITH_KL))
    assert result[0].batches[0].num_live == number


@pytest.mark.parametrize(
    "mesh",
    [
        (2, 2, 1, 1),
        *(
            pytest.param(mesh, marks=pytest.mark.full)
            for mesh in [(4, 1, 1, 1), (1, 4, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1)]
        ),
    ],
    ids=str,
)
def test_four_devices_make_the_step_of_one(mesh):
    assert_same_step(run(mesh=mesh, tokens=25, objective=WITH_KL), run(objective=WITH_KL))


@pytest.mark.full
def test_four_devices_make_the_step_of_one_with_adapters():
    # The first update moves B alone, as B is 0 before it; the second moves A too, and multiplies
    # what rounding did to the first by a hundred: in float32 that is the tolerance itself.
    adapted = dataclasses.replace(tiny.UNIFORM, lora=LoraConfig(rank=2, alpha=4.0))
    single, *several = (
        in_float64(config=adapted, steps_before=1, **options)
        for options in (
            {},
            {"mesh": (1, 2, 2, 1), "tokens": 24},
            {"mesh": (2, 2, 1, 1), "tokens": 24},
        )
    )
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(moved(single))) > 0
    for many in several:
        assert_same_step(many, single, 1e-9)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(1, 2, 2, 1), (2, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("objective", [WITH_FULL_KL, WITH_BONUS], ids=["full_kl", "bonus"])
def test_penalties_over_the_vocabulary_are_the_same_with_the_vocabulary_split(objective, mesh):
    split = run(mesh=mesh, tokens=24, objective=objective, reference=7)
    assert_same_step(split, run(objective=objective, reference=7))


@pytest.mark.full
def test_a_ratio_of_sequences_is_the_same_where_gradients_are_added_up_after_the_loop():
    objective = CLIPPED._replace(surrogate=losses.gspo())
    assert not objective.per_token
    many = in_float64(mesh=(2, 2, 1, 1), tokens=25, objective=objective)
    assert_same_step(many, in_float64(objective=objective), 1e-9)


def test_the_sequence_can_be_split_over_devices():
    # Widths 6 and 5 do not divide by 2: the check of the data says so before anything compiles.
    mesh = sharding.make_mesh(data=2, context=2)
    with pytest.raises(InputError, match=r"max_completion_tokens = 5.*multiple of 2"):
        sharding.check_divides(mesh, "rollout.max_completion_tokens", 5, "sequence")


@pytest.mark.parametrize("recipe", ["dr_grpo", pytest.param("sign", marks=pytest.mark.full)])
def test_recipes_reach_the_update(recipe):
    result = run(recipe=recipe)
    want = MIXED - MIXED.mean(1, keepdims=True) if recipe == "dr_grpo" else 2 * MIXED - 1
    np.testing.assert_allclose(result[0].advantage, want, atol=1e-6)
    alive = (want != 0).any(1)
    np.testing.assert_array_equal(result[0].live.any(1), alive)


@pytest.mark.fault(18)
@pytest.mark.parametrize("rewards", ["flat", "nan"])
def test_a_step_without_a_live_sample_that_is_skipped_changes_not_one_byte(rewards):
    prepared, before, after, metrics = run(
        rewards=rewards, optimizer="adamw", on_no_live_sample="skip"
    )
    assert not prepared.live.any()
    assert parameter_hash(before) == parameter_hash(after)
    assert metrics["skipped_updates/no_live_sample"] == 1
    assert metrics["skipped_updates/not_finite"] == 0


@pytest.mark.fault(18)
def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    _, before, after, metrics = run(behavior="nan")
    assert parameter_hash(before) == parameter_hash(after)
    assert metrics["skipped_updates/not_finite"] == 1


def test_the_norm_of_the_weights_is_taken_before_and_after():
    prepared, before, after, metrics = run()
    norms = [
        np.sqrt(sum(np.square(np.asarray(leaf, float)).sum() for leaf in jax.tree.leaves(params)))
        for params in (before, after)
    ]
    assert norms[0] != norms[1]
    np.testing.assert_allclose(metrics["weights/norm"], norms[1], rtol=1e-5)
    np.testing.assert_allclose(metrics["weights/growth"], norms[1] / norms[0], rtol=1e-5)
    assert prepared.metrics["sampling/not_finite"].result() == 0
    prepared, _, _, skipped = run(behavior="nan")
    np.testing.assert_allclose(skipped["weights/growth"], 1, rtol=1e-6)
    assert prepared.metrics["sampling/not_finite"].result() > 0


def test_ratios_are_1_when_behavior_and_trainer_agree():
    metrics = run(behavior="trainer")[3]
    np.testing.assert_allclose(metrics["ratio_max"], 1, atol=1e-4)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4


def test_the_trainer_can_score_its_own_proximal_policy():
    metrics = run(objective=CLIPPED._replace(proximal="trainer"))[3]
    np.testing.assert_allclose(metrics["ratio_max"], 1, atol=1e-6)
    assert metrics["sampling/sampling_logp_difference/max"] > 0.1  # the random behaviour policy


def test_a_second_step_compiles_nothing():
    step_blueprint, steps = built(mesh=(1, 2, 2, 1), tokens=24, minibatches=2, num_iterations=2)
    layout = sharding.param_shardings(
        step_blueprint.mesh, step_blueprint.model.axes, step_blueprint.model.shapes
    )
    learner = first_learner(step_blueprint, jax.device_put(tiny.params(), layout), 8, ("reward",))
    counts = []
    for _ in range(2):
        with compilations() as seconds:
            learner, prepared = steps.prepare(learner, tiny.rollouts(MIXED))
            assert len(prepared.batches) == 4
            learner, _ = steps.update(learner, prepared.batches)
        counts.append(len(seconds))
    assert counts[0] > 0
    assert counts[1] == 0
    for leaf, expected in zip(
        jax.tree.leaves(learner.trainable), jax.tree.leaves(layout), strict=True
    ):
        assert leaf.sharding == expected


def test_padding_carries_nothing_into_the_update():
    step_blueprint, steps = built()
    clean = tiny.rollouts(MIXED)
    junk = dataclasses.replace(
        clean,
        prompt_tokens=jnp.where(clean.prompt_mask, clean.prompt_tokens, 9),
        completion_tokens=jnp.where(clean.token_mask, clean.completion_tokens, 11),
        behavior_logp=jnp.where(clean.token_mask, clean.behavior_logp, jnp.nan),
    )
    hashes = []
    for rollouts in (clean, junk):
        learner = first_learner(step_blueprint, tiny.params(), 8, ("reward",))
        learner, prepared = steps.prepare(learner, rollouts)
        learner, _ = steps.update(learner, prepared.batches)
        hashes.append(parameter_hash(learner.trainable))
    assert hashes[0] == hashes[1]


def test_a_surrogate_may_go_by_a_reward_as_a_part_of_a_chain_may():
    by_reward = losses.by_sample("reward", "clip", "clip")
    assert_same_step(run(objective=CLIPPED._replace(surrogate=by_reward)), run())
