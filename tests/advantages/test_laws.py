"""What holds for every part and recipe, present and future (`laws.chains`)."""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxgrpo.advantages import registry
from jaxgrpo.advantages.chains import spec_of, trace_shapes
from jaxgrpo.core.errors import InputError

TOLERANCE = {np.float64: 1e-12, np.float32: 2e-5}
EVERY, RECIPES = jax.jit(laws.run_all), jax.jit(laws.run_recipes)


def compiled(rollouts):
    """All parts and recipes in float64, the recipes in float32 or less."""
    wide = rollouts.behavior_logp.dtype == np.float64
    return (EVERY if wide else RECIPES)(rollouts)


@pytest.fixture(
    params=[np.float64, pytest.param(np.float32, marks=pytest.mark.full)],
    ids=["float64", "float32"],
)
def dtype(request):
    """Laws hold in float64 up to 1e-12, over all parts; float32 is a spot check of the recipes."""
    with jax.enable_x64(request.param is np.float64):
        yield request.param


def check_equal(left, right, tolerance: float) -> None:
    assert left.keys() == right.keys()
    for label in left:
        for actual, expected in zip(
            jax.tree.leaves(left[label]), jax.tree.leaves(right[label]), strict=True
        ):
            np.testing.assert_allclose(actual, expected, tolerance, tolerance, err_msg=label)


def permuted(outcome, index):
    return {
        label: jax.tree.map(lambda leaf: leaf[index], signal)
        for label, (signal, _, _) in outcome.items()
    }


@pytest.mark.slow
def test_every_recipe_runs_on_shapes_alone():
    rollouts = laws.make_rollouts()
    spec = spec_of(rollouts, num_rows=laws.ROWS)
    for label, transform in laws.chains().items():
        if label.startswith("recipe "):
            trace_shapes(transform, spec, rollouts.fields)


@pytest.mark.slow
def test_masked_samples_and_padding_have_no_influence(dtype):
    rollouts = laws.make_rollouts(dtype)
    check_equal(compiled(rollouts), compiled(laws.garble(rollouts)), 0)


@pytest.mark.slow
def test_a_permuted_group_gives_permuted_advantages(dtype):
    rollouts = laws.make_rollouts(dtype)
    order = np.random.default_rng(1).permutation(laws.G)

    def samples(leaf):
        return leaf[:, order] if leaf.shape[:2] == (laws.P, laws.G) else leaf

    def exchangeable(outcome):
        """All but what keeps the first samples, which are others after a permutation."""
        firsts = ("keep_samples", "ttrl")
        return {
            label: value for label, value in outcome.items() if not any(n in label for n in firsts)
        }

    moved = exchangeable(compiled(jax.tree.map(samples, rollouts)))
    plain = permuted(exchangeable(compiled(rollouts)), (slice(None), order))
    check_equal(plain, permuted(moved, ...), TOLERANCE[dtype])


@pytest.mark.slow
def test_permuted_prompts_give_permuted_advantages_unless_ordered(dtype):
    rollouts = laws.make_rollouts(dtype)
    order = np.random.default_rng(2).permutation(laws.P)
    moved = compiled(jax.tree.map(lambda leaf: leaf[order] if leaf.ndim else leaf, rollouts))
    free = {label for label, transform in laws.chains().items() if not transform.ordered}
    plain = {key: value for key, value in compiled(rollouts).items() if key in free}
    moved = {key: value for key, value in moved.items() if key in free}
    check_equal(permuted(plain, order), permuted(moved, ...), TOLERANCE[dtype])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recipe ", ""], ids=["recipes", "all"])
def test_a_group_is_as_live_alone_as_among_any_others_unless_groups_are_compared(float64, kind):
    rollouts = laws.make_rollouts(float64)
    relative = {label: chain for label, chain in laws.chains().items() if chain.relative}
    relative |= laws.behind_a_baseline()
    transforms = {label: chain for label, chain in relative.items() if label.startswith(kind)}

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def live(group, neighbour):
        places = jnp.where(jnp.arange(laws.P) == group, group, neighbour)
        batch = jax.tree.map(lambda leaf: leaf[places] if leaf.ndim else leaf, rollouts)
        flags = {}
        for label, transform in transforms.items():
            value, tokens = laws.run(transform, batch)[0].value[group], batch.token_mask[group]
            value = value if value.ndim == 2 else value[:, None]
            flags[label] = ((value != 0) & tokens).any()
        return flags

    several = jnp.isfinite(sum(rollouts.rewards.values())).sum(1) > 1
    # One of the others has no scored sample: the group is alone.
    live_flags = live(jnp.flatnonzero(several), jnp.arange(laws.P))
    changed = {label for label, flags in live_flags.items() if (flags != flags[:, :1]).any()}
    assert changed == {
        label for label, transform in transforms.items() if transform.compares_groups
    }


def test_a_part_with_memory_is_not_refilled_or_says_what_it_remembers_then():
    rollouts, counts_flat = laws.make_rollouts(), {}
    for transform in laws.chains().values():
        state = laws.first_state(transform, rollouts)
        for key, step in transform.steps:
            if step.name in registry.parts and jax.tree.leaves(state[key]):
                counts_flat[step.name] = step.counts_flat
    pages = {name: str(registry.parts[name].__doc__) for name in counts_flat}
    assert [name for name, page in pages.items() if "`rollout.refill`" not in page] == []
    assert {name for name, counts in counts_flat.items() if counts} == {
        *("mask_difficulty_band", "mask_below_running_deviation", "smooth_standardise"),
        *("add_kl_return_for_validity", "alpha_dpg"),
    }


@pytest.mark.slow
def test_a_field_of_another_shape_is_refused_by_its_name():
    """It ended in an error of JAX, or was spread over samples or tokens."""
    rollouts = laws.make_rollouts()
    spec = spec_of(rollouts, num_rows=laws.ROWS)
    several = {"mask_low_variance": 2, "mask_untaught": 4}  # these take a field of that rank too
    readers = {
        (label.split()[0], field): transform
        for label, transform in laws.chains().items()
        for field in transform.needs & rollouts.fields.keys()
    }
    for (part, field), transform in readers.items():
        value = rollouts.fields[field]
        shapes = [(*value.shape, 1)]
        shapes += [value.shape[:-1]] * (value.ndim > 1)
        shapes += [(laws.P, laws.G - 1, *value.shape[2:])] * (value.shape[1:2] == (laws.G,))
        for shape in shapes:
            if part == "recipe" or len(shape) == several.get(part):
                continue
            array = jax.ShapeDtypeStruct(shape, value.dtype)
            with pytest.raises(InputError, match=" has shape ") as refused:
                trace_shapes(transform, spec, {**rollouts.fields, field: array})
            assert field in str(refused.value), (part, field, shape)


def test_values_are_finite_and_zero_where_masked(dtype):
    for label, (signal, _, _) in compiled(laws.make_rollouts(dtype)).items():
        value, mask = np.asarray(signal.value), np.asarray(signal.mask)
        assert np.isfinite(value).all(), label
        assert (value[~mask] == 0).all(), label
        assert mask.any(), label


def test_masks_only_shrink(dtype):
    rollouts = laws.make_rollouts(dtype)
    missing = ~np.isfinite(np.asarray(rollouts.rewards["correct"]))
    missing &= ~np.isfinite(np.asarray(rollouts.rewards["style"]))
    assert missing.sum() == len(laws.MISSING)
    for label, (signal, _, _) in compiled(rollouts).items():
        mask = np.asarray(signal.mask)
        assert not mask[missing].any(), label
        if mask.ndim == 3:
            assert not mask[~np.asarray(rollouts.token_mask)].any(), label


@pytest.mark.full
def test_state_keeps_structure_and_dtype_and_a_step_is_traced_once(float64):
    traces = []

    @jax.jit
    def step(rollouts, states):
        traces.append(None)
        return {
            label: laws.run(transform, rollouts, states[label])
            for label, transform in laws.chains().items()
        }

    first = laws.make_rollouts(float64)
    states = {
        label: laws.first_state(transform, first) for label, transform in laws.chains().items()
    }
    for seed in range(3):
        outcome = step(laws.make_rollouts(float64, seed), states)
        after = {label: state for label, (_, state, _) in outcome.items()}
        assert jax.tree.structure(after) == jax.tree.structure(states)
        for old, new in zip(jax.tree.leaves(states), jax.tree.leaves(after), strict=True):
            assert (old.shape, old.dtype) == (new.shape, new.dtype)
        states = after
    assert len(traces) == 1
    assert float(states["own 0"]["running_mean"]["count"]) > 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.float32, np.float64], ids=["32", "64"])
def test_four_devices_give_what_one_gives(kind):
    with jax.enable_x64(kind is np.float64):
        check_four_devices(kind)


def check_four_devices(kind):
    rollouts = laws.make_rollouts(kind)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(leaf):
        return jax.device_put(leaf, split if leaf.ndim else replicated)

    spread = compiled(jax.tree.map(place, rollouts))
    assert len(spread["recipe grpo 0"][0].value.sharding.device_set) == 4
    check_equal(compiled(rollouts), spread, TOLERANCE[kind])


@pytest.mark.full
def test_jit_gives_what_plain_calls_give(float64):
    rollouts = laws.make_rollouts(float64)
    check_equal(compiled(rollouts), laws.run_all(rollouts), TOLERANCE[float64])


@pytest.mark.slow
def test_no_gradient_flows_through(float64):
    rollouts = laws.make_rollouts(float64)

    @jax.jit
    def slope(rewards, fields, behavior_logp):
        def total(rewards, fields, behavior_logp):
            scaled_rollouts = dataclasses.replace(
                rollouts,
                rewards=rewards,
                fields={**rollouts.fields, **fields},
                behavior_logp=behavior_logp,
            )
            outcome = laws.run_all(scaled_rollouts)
            return sum(jnp.square(signal.value).sum() for signal, _, _ in outcome.values())

        return jax.grad(total, argnums=(0, 1, 2))(rewards, fields, behavior_logp)

    rewards = {name: jnp.nan_to_num(leaf) for name, leaf in rollouts.rewards.items()}
    slopes = slope(rewards, floating(rollouts.fields), rollouts.behavior_logp)
    for leaf in jax.tree.leaves(slopes):
        assert (np.asarray(leaf) == 0).all()


def floating(fields):
    return {name: leaf for name, leaf in fields.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "float64",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("float32", "bfloat16", "float16")
        ),
    ],
)
def test_rewards_of_every_dtype_are_computed_in_at_least_float32(name):
    with jax.enable_x64(name == "float64"):
        rollouts = laws.make_rollouts(np.float64 if name == "float64" else np.float32)
        rewards = {key: leaf.astype(name) for key, leaf in rollouts.rewards.items()}
        typed_rollouts = dataclasses.replace(rollouts, rewards=rewards)
        wide = "float64" if name == "float64" else "float32"
        rewards = {key: leaf.astype(wide) for key, leaf in rewards.items()}
        same = compiled(dataclasses.replace(rollouts, rewards=rewards))
        for label, (signal, _, _) in compiled(typed_rollouts).items():
            assert signal.value.dtype == wide, label
            np.testing.assert_array_equal(signal.value, same[label][0].value, label)
            value, mask = np.asarray(signal.value, np.float64), np.asarray(signal.mask)
            assert np.isfinite(value).all(), label
            assert (value[~mask] == 0).all(), label


@pytest.mark.full
def test_parts_work_under_vmap(float64):
    rollouts = [laws.make_rollouts(float64, seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rollouts)
    batched = jax.jit(jax.vmap(laws.run_all))(stacked)
    for index, single in enumerate(rollouts):
        alone = jax.tree.map(operator.itemgetter(index), batched)
        check_equal(alone, compiled(single), TOLERANCE[float64])
