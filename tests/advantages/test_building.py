"""Names, options and own code as a config gives them, and what the package may load."""

from __future__ import annotations

import dataclasses
import doctest
import re
import subprocess
from typing import Any

import laws
import numpy as np
import pytest

from jaxgrpo.advantages import absolute, base, build, chain, evaluate, plain, registry, sign, stats
from jaxgrpo.core import errors
from jaxgrpo.core.errors import InputError

REWARDS = [[0.0, 1.0, 4.0]]


def clipped(limit=3.0):
    """A factory of a user: options in, function out."""

    def soft_clip(signal, rollouts):
        return dataclasses.replace(signal, value=signal.value.clip(-limit, limit))

    return soft_clip


def twice(signal, rollouts):
    return dataclasses.replace(signal, value=2 * signal.value)


def halved():
    return base.transform(lambda signal, rollouts: twice(signal, rollouts), name="halved")


def refuses(message: str):
    return pytest.raises(InputError, match=re.escape(message))


def test_a_list_of_steps_is_the_chain_of_their_factories():
    steps = [
        {"use": "sum_rewards", "reward": 2.0},
        {"use": twice},
        {"use": clipped, "limit": 3.0},
        clipped,
        {"use": halved},
        laws.soften,
        "mask_zero_variance",
    ]
    transform = build(steps)
    assert [key for key, _ in transform.steps] == [
        "sum_rewards", "twice", "clipped", "clipped_2", "halved", "soften", "mask_zero_variance",
    ]  # fmt: skip
    value, _ = evaluate(build(steps[:3]), REWARDS)
    assert value.tolist() == [[0, 3, 3]]
    assert evaluate(steps[:2], REWARDS)[0].tolist() == [[0, 4, 16]]


@pytest.mark.slow
def test_steps_for_each_reward_are_lists_in_the_list():
    inner = [{"use": "subtract_group_mean"}, {"use": "divide_by_group_std", "ddof": 0}]
    spec = [{"use": "per_reward", "transform": inner}, {"use": "sum_rewards"}]
    steps = [{"use": "per_reward", "transform": {"use": "subtract_group_mean"}}]
    rewards = {"a": [[0.0, 1.0]], "b": [[8.0, 0.0]]}
    np.testing.assert_allclose(evaluate(spec, rewards)[0], [[0, 0]], atol=1e-5)
    assert evaluate([*steps, "sum_rewards"], rewards)[0].tolist() == [[3.5, -3.5]]


def test_a_chain_is_shown_by_its_steps():
    shown = "<AdvantageTransform dr_grpo: sum_rewards -> subtract_group_mean>"
    assert repr(build("dr_grpo")) == shown
    assert repr(sign()) == "<AdvantageTransform sign>"


def test_recipes_are_found_by_name_with_their_options():
    value, _ = evaluate("grpo", REWARDS, options={"eps": 1.0, "ddof": 0})
    scored = np.array(REWARDS[0])
    np.testing.assert_allclose(value[0], (scored - scored.mean()) / (scored.std() + 1), rtol=1e-6)
    assert build(sign()).steps[0][0] == "sign"


def test_an_unknown_name_or_option_names_the_nearest():
    with refuses("unknown recipe 'gropo': did you mean 'grpo'? Known: "):
        build("gropo")
    with refuses("recipe grpo: unknown option 'epz': did you mean 'eps'? Known: ddof, eps, weigh"):
        build("grpo", {"epz": 1.0})
    with refuses("unknown recipe 'GRPO': did you mean 'grpo'?"):
        build("GRPO")
    assert errors.suggest("ETA", ["Beta", "alpha"]).startswith("did you mean 'Beta'?")
    with refuses("options belong to a recipe given by name"):
        build(chain(laws.soften), {"eps": 1.0})
    with refuses("per_reward: missing a required argument: 'transform'; it takes (transform"):
        build(["per_reward"])


def test_all_wrong_steps_come_in_one_message():
    with pytest.raises(InputError) as caught:
        build([{"use": "sum_reward"}, {"use": "sign", "treshold": 1}, {"name": "sign"}, "sign"])
    assert str(caught.value).splitlines() == [
        "advantage[0]: unknown part 'sum_reward': did you mean 'sum_rewards'? Known: "
        + ", ".join(sorted(registry.parts)),
        "advantage[1]: sign: unknown option 'treshold': did you mean 'threshold'? Known: threshold",
        "advantage[2]: {'name': 'sign'} names no part: write { use = 'sum_rewards', ... }",
    ]


def needing(signal, rollouts, *, limit):
    return signal


def correct_alone(streams, rollouts):
    return streams["correct"]


def test_own_code_is_told_how_to_take_options():
    with refuses("twice(signal, rollouts) takes no options: make it a factory, def twice(limit):"):
        build([{"use": twice, "limit": 3.0}])
    with refuses("needing(signal, rollouts, *, limit) gets signal and rollouts alone: give limit"):
        build([needing])
    with refuses("that step is jaxgrpo.advantages.combine(correct_alone); write a function"):
        build([correct_alone])
    with refuses("clipped: unknown option 'limt': did you mean 'limit'?"):
        build([{"use": clipped, "limt": 3.0}])
    with refuses("<lambda> returned int, expected a transform or a function"):
        build([{"use": lambda: 3}])
    with refuses("soften is a finished transform and takes no options"):
        build([{"use": laws.soften, "limit": 3.0}])
    with refuses("3 is neither a part's name, a transform nor a function"):
        build([{"use": 3}])


@pytest.mark.slow
def test_importing_the_core_loads_nothing_beyond_jax(python, environment):
    code = (
        "import sys, jax, jaxtyping; before = set(sys.modules)\n"
        "import jaxgrpo.advantages, jaxgrpo.losses, jaxgrpo.update.diagnostics\n"
        "more = {name for name in set(sys.modules) - before if not name.startswith('jaxgrpo')}\n"
        "assert not more, more\n"
        "assert not {'flax', 'optax', 'transformers'} & set(sys.modules)\n"
        "mine = sorted(name for name in sys.modules if name.startswith('jaxgrpo.'))\n"
        "assert not [name for name in mine if name.startswith('jaxgrpo.models')], mine\n"
        "print(jaxgrpo.advantages.evaluate('dr_grpo', [[0.0, 1.0]])[0].tolist())\n"
    )
    process = subprocess.run(
        [python, "-c", code], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "[[-0.5, 0.5]]"


@pytest.mark.slow
@pytest.mark.parametrize("module", [absolute, base, plain, registry, stats, errors])
def test_examples_in_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


def test_an_option_among_the_fields_of_plain_arrays_is_refused():
    options: list[dict[str, Any]] = [{"eps": 1e-4}, {"weights": {"reward": 1.0}}]
    for fields in options:
        with pytest.raises(InputError, match=f"{next(iter(fields))} is an option of grpo"):
            evaluate("grpo", [[1.0, 0.0]], **fields)
    evaluate("grpo", [[1.0, 0.0]], options={"eps": 1e-4}, truncated=[[True, False]])


def test_a_field_that_nothing_reads_is_refused_with_the_one_that_was_meant():
    def by_level(signal, rollouts):
        return dataclasses.replace(signal, value=signal.value * rollouts.fields["level"])

    rewards, level = [[1.0, 0.0]], np.array([[2.0, 3.0]], np.float32)
    with refuses("nothing in grpo reads the field 'trunctated': did you mean 'truncated'?"):
        evaluate("grpo", rewards, trunctated=[[True, False]])
    with refuses("nothing in alpha_dpg reads the field 'base_lopg': did you mean 'base_logp'?"):
        evaluate("alpha_dpg", rewards, base_lopg=[[[0.5], [0.5]]])
    with refuses("transform(function)._replace(needs=frozenset({'level'}))"):
        evaluate(["sum_rewards", by_level], rewards, level=level)
    step = base.transform(by_level)._replace(needs=frozenset({"level"}))
    assert evaluate(["sum_rewards", step], rewards, level=level)[0].tolist() == [[2, 0]]
