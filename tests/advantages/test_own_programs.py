"""Chains in other people's programs: under shard_map, stage by stage, without calls to the host."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import laws
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec
from law_examples import basics

from jaxgrpo import advantages as adv
from jaxgrpo.advantages import chains
from jaxgrpo.core.types import Signal


def group_level():
    """Chains of parts and recipes whose advantages depend on their own group alone."""
    parts = {
        f"{name} {index}": adv.chain(*steps)
        for name, examples in basics.parts().items()
        for index, steps in enumerate(examples)
    }
    recipes = {name: adv.build(name) for name in ("grpo", "dr_grpo")}
    return {**parts, **recipes, "sign": adv.build("sign", {"weights": basics.BINARY})}


def signals(rollouts):
    return {label: laws.run(whole, rollouts)[0] for label, whole in group_level().items()}


def test_inside_shard_map_over_prompts_groups_are_judged_as_on_one_device():
    rollouts = laws.make_rollouts()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("data")
    given = jax.tree.map(lambda leaf: split if leaf.ndim else PartitionSpec(), rollouts)
    own = jax.shard_map(signals, mesh=mesh, in_specs=(given,), out_specs=split)
    sharded, plain = jax.jit(own)(rollouts), jax.jit(signals)(rollouts)
    for label in plain:
        np.testing.assert_array_equal(sharded[label].mask, plain[label].mask, err_msg=label)
        np.testing.assert_allclose(
            sharded[label].value, plain[label].value, 1e-6, 1e-6, err_msg=label
        )


def primitives(jaxpr) -> Iterator[str]:
    """The name of every primitive of a program and of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


HOST = ("callback", "infeed", "outfeed", "debug", "print")


def asks_the_host(names) -> set[str]:
    return {name for name in names if any(word in name for word in HOST)}


def test_no_part_or_recipe_calls_back_to_the_host():
    program = jax.make_jaxpr(laws.run_all)(laws.make_rollouts())
    names = set(primitives(program.jaxpr))
    assert {"reduce_sum", "select_n"} <= names
    assert asks_the_host(names) == set()


def test_a_part_that_calls_back_would_be_found():
    def talks(signal: Signal, rollouts):
        jax.debug.print("{}", signal.value)
        return signal

    whole = adv.chain(adv.sum_rewards(), talks)
    run = jax.jit(lambda rollouts: laws.run(whole, rollouts))
    program = jax.make_jaxpr(run)(laws.make_rollouts())
    assert asks_the_host(primitives(program.jaxpr))


@pytest.mark.parametrize("label", ["divide_by_group_std 0", "per_reward 0", "to_tokens 1"])
def test_the_last_stage_of_a_trace_is_what_the_chain_gives(label):
    rollouts, whole = laws.make_rollouts(), group_level()[label]
    stages = chains.trace(whole, rollouts)
    signal, _, metrics = adv.compute(whole, rollouts)
    assert [stage.name for stage in stages] == ["rewards", *(key for key, _ in whole.steps)]
    first, last = stages[0].signal, stages[-1].signal
    assert isinstance(first, dict)
    assert isinstance(last, Signal)
    assert set(first) == set(rollouts.rewards)
    np.testing.assert_array_equal(last.value, signal.value)
    np.testing.assert_array_equal(last.mask, signal.mask)
    reported = {f"{stage.name}/{name}" for stage in stages for name in stage.metrics}
    assert reported == set(metrics)
