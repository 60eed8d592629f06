"""Chains in other people's programs: under shard_map, stage by stage, without calls to the host."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import laws
import numpy as np
import pytest
import torch
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec
from law_examples import basics

from jaxgrpo import advantages as adv
from jaxgrpo.advantages import chains
from jaxgrpo.core.errors import InputError
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
    return {label: laws.run(transform, rollouts)[0] for label, transform in group_level().items()}


@pytest.mark.slow
def test_inside_shard_map_over_prompts_groups_are_judged_as_on_one_device():
    rollouts = laws.make_rollouts()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("data")
    specs = jax.tree.map(lambda leaf: split if leaf.ndim else PartitionSpec(), rollouts)
    sharded_signals = jax.shard_map(signals, mesh=mesh, in_specs=(specs,), out_specs=split)
    sharded, plain = jax.jit(sharded_signals)(rollouts), jax.jit(signals)(rollouts)
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


@pytest.mark.slow
def test_no_part_or_recipe_calls_back_to_the_host():
    program = jax.make_jaxpr(laws.run_all)(laws.make_rollouts())
    names = set(primitives(program.jaxpr))
    assert {"reduce_sum", "select_n"} <= names
    assert asks_the_host(names) == set()


def test_a_part_that_calls_back_would_be_found():
    def talks(signal: Signal, rollouts):
        jax.debug.print("{}", signal.value)
        return signal

    transform = adv.chain(adv.sum_rewards(), talks)
    run = jax.jit(lambda rollouts: laws.run(transform, rollouts))
    program = jax.make_jaxpr(run)(laws.make_rollouts())
    assert asks_the_host(primitives(program.jaxpr))


@pytest.mark.parametrize("label", ["divide_by_group_std 0", "per_reward 0", "to_tokens 1"])
def test_the_last_stage_of_a_trace_is_what_the_chain_gives(label):
    rollouts, transform = laws.make_rollouts(), group_level()[label]
    stages = chains.trace(transform, rollouts)
    signal, _, metrics = adv.compute(transform, rollouts)
    assert [stage.name for stage in stages] == ["rewards", *(key for key, _ in transform.steps)]
    first, last = stages[0].signal, stages[-1].signal
    assert isinstance(first, dict)
    assert isinstance(last, Signal)
    assert set(first) == set(rollouts.rewards)
    np.testing.assert_array_equal(last.value, signal.value)
    np.testing.assert_array_equal(last.mask, signal.mask)
    reported = {f"{stage.name}/{name}" for stage in stages for name in stage.metrics}
    assert reported == set(metrics)


NAN = float("nan")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = [[1.0, NAN, 0.5, 0.0]]  # every dtype of FLOATS holds these exactly
PLAIN = {
    "lists": [[1, None, 0.5, False]],
    "tuples": ((1.0, None, 0.5, 0.0),),
    "objects": np.array([[1.0, None, 0.5, 0.0]], object),
    "rows of arrays": [np.array(HALVES[0], np.float32)],
    "rows of tensors": [torch.tensor(HALVES[0], requires_grad=True)],
    **{str(dtype): torch.tensor(HALVES, dtype=dtype, requires_grad=True) for dtype in FLOATS},
}


@pytest.mark.parametrize("form", PLAIN)
def test_the_rewards_of_any_framework_are_the_same_rewards(form):
    value, mask = adv.evaluate("dr_grpo", PLAIN[form], truncated=None)
    assert mask.tolist() == [[True, False, True, True]]
    assert value.tolist() == [[0.5, 0, 0, -0.5]]  # less their mean, 0.5


def test_masks_and_fields_may_be_tensors_too():
    rewards, cut = [[0.0, 0.0, 3.0]], torch.tensor([[False, True, False]])
    steps = ["sum_rewards", "mask_truncated", "subtract_group_mean"]
    value, mask = adv.evaluate(steps, rewards, truncated=cut, row=torch.tensor([7]))
    assert (value.tolist(), mask.tolist()) == ([[-1.5, 0, 1.5]], [[True, False, True]])
    assert adv.evaluate("dr_grpo", rewards, ~cut)[0].tolist() == [[-1.5, 0, 1.5]]


@pytest.mark.parametrize(
    ("rewards", "more", "message"),
    [
        ([[1, 0], [1]], {}, "reward 'reward'[1] has 1 entries, but reward 'reward'[0] has 2"),
        ({"a": [[1, 0], 1]}, {}, "reward 'a'[1] has one number, but reward 'a'[0] has 2 entries"),
        ([[1, 0], [1]], {}, "must have the same length; fill up with None = not scored"),
        ([[1, "0"]], {}, "reward 'reward'[0][1] = '0', a str: expected a number, or None = not"),
        ([1, 0], {}, "reward 'reward' has shape (2,), expected [P, G]: one row per prompt"),
        ([[10**400]], {}, "reward 'reward': "),
        ([[1, 0]], {"mask": [[True, None]]}, "mask[0][1] is None: give a number; only rewards may"),
        ([[1, 0]], {"truncated": [[True]]}, "truncated has shape (1, 1), expected [P, G] = [1, 2]"),
        ([[1, 0]], {"row": [[1, 2]]}, "row has shape (1, 2), expected [P] = [1]"),
        (
            [[1, 0]],
            {"token_mask": [[[1], [1]]], "behavior_logp": [[[0.0, 0], [0, 0]]]},
            "behavior_logp has shape (1, 2, 2), expected [P, G, T] = [1, 2, 1]",
        ),
        (
            [[1, 0]],
            {"token_mask": [[[1], [1, 1]]]},
            "token_mask[0][1] has 2 entries, but token_mask[0][0] has 1 entries",
        ),
    ],
)
def test_plain_data_of_a_wrong_form_is_named_with_its_place(rewards, more, message):
    with pytest.raises(InputError, match=re.escape(message)):
        adv.evaluate("dr_grpo", rewards, **more)
