"""`jaxgrpo advantages` in process: lists, each step of a chain, and what wrong input is told."""

from __future__ import annotations

import doctest
import json

import numpy as np
import pytest
from printed import printed

from jaxgrpo.advantages import registry
from jaxgrpo.cli import advantages
from jaxgrpo.core.errors import InputError

OWN = '''
import dataclasses
import jax.numpy as jnp
from jaxgrpo import AdvantageTransform


def twice(signal, rollouts):
    return dataclasses.replace(signal, value=2 * signal.value)


def plus(amount):
    """Adds a number."""
    return lambda signal, rollouts: dataclasses.replace(signal, value=signal.value + amount)


def judged():
    return AdvantageTransform(
        "judged",
        lambda spec: (),
        lambda signal, state, rollouts: (signal, state, {}),
        needs=frozenset({"answer_logp", "doubt", "base_logp"}),
    )
'''


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    return file


def output(capsys, *arguments, code=0):
    return printed(capsys, "advantages", *arguments, code=code)


def shown(capsys, *arguments):
    return json.loads(output(capsys, *arguments, "--json"))


def test_every_recipe_and_part_is_listed_with_its_first_line(capsys):
    text = output(capsys)
    listed = json.loads(output(capsys, "--json"))
    assert set(listed["recipes"]) == set(registry.recipes)
    assert set(listed["parts"]) == set(registry.parts)
    for name, line in (listed["recipes"] | listed["parts"]).items():
        assert name in text
        assert len(line) > 10, f"{name} has no docstring"


def test_a_name_alone_is_described_with_its_options(capsys):
    text = output(capsys, "grpo")
    assert "a[p, g] = (r[p, g] - mean_g r) / (std_g r + eps)" in text
    assert "arXiv 2402.03300" in text
    assert "options: (eps: 'Scheduled' = 1e-06, ddof: 'int' = 1" in text
    assert "Masks samples" in output(capsys, "mask_truncated")
    about = shown(capsys, "grpo")
    assert about["name"] == "grpo"
    assert about["description"] in text
    assert f"options: {about['options']}" in text


def test_a_part_that_shares_its_name_with_a_recipe_is_described_behind_it(capsys):
    recipe, _, part = output(capsys, "darling").partition("The part darling: ")
    assert "as in the part `darling`" in recipe
    assert "max((n - |class of g|) / (n - 1), floor)" in part
    assert shown(capsys, "darling")["part"]["description"] in part


def test_sign_keeps_a_group_that_always_fails_alive(capsys):
    lines = output(capsys, "sign", "--rewards", "0,0,0,0").splitlines()
    assert lines[0].split() == ["step", "stream", "group", "value", "mask"]
    assert lines[1].split() == ["rewards", "reward", "1", *"0000", *"1111"]
    assert lines[2].split() == ["sum_rewards", "1", *"0000", *"1111"]
    assert lines[3].split() == ["sign", "1", *["-1"] * 4, *"1111"]
    assert lines[-1] == "alive (unmasked and not 0): group 1: 4 of 4"


@pytest.mark.slow
def test_value_and_mask_are_those_after_each_step(capsys):
    steps = shown(capsys, "dr_grpo", "--rewards", "1,0,0,nan", "--rewards", "1,1,1,1")
    assert [step["step"] for step in steps["steps"]] == [
        "rewards", "sum_rewards", "subtract_group_mean",
    ]  # fmt: skip
    first, _, last = steps["steps"]
    assert first["streams"]["reward"]["value"] == [[1, 0, 0, 0], [1, 1, 1, 1]]
    assert last["value"][0] == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0])
    assert last["mask"] == [[True, True, True, False], [True] * 4]
    assert steps["alive"] == [[True, True, True, False], [False] * 4]


@pytest.mark.full
def test_several_rewards_are_named_and_weighed(capsys):
    rewards = ("--rewards", "correct=1,0", "style=.5,.25")
    weights = ("--option", "weights={correct=1, style=2}")
    steps = shown(capsys, "dr_grpo", *rewards, *weights)["steps"]
    assert steps[0]["streams"]["style"]["value"] == [[0.5, 0.25]]
    assert steps[1]["value"] == [[2, 0.5]]
    assert steps[2]["value"] == [[0.75, -0.75]]
    # A part by itself gets the sum that it lacks, before it or behind it.
    alone = shown(capsys, "subtract_group_mean", *rewards)["steps"]
    assert [step["step"] for step in alone] == ["rewards", "sum_rewards", "subtract_group_mean"]
    inner = ("--option", "transform=subtract_group_mean")
    steps = shown(capsys, "per_reward", *rewards, *inner)["steps"]
    assert steps[1]["streams"]["style"]["value"] == [[0.125, -0.125]]
    assert steps[2]["value"] == [[0.625, -0.625]]


def test_tokens_are_shown_sample_by_sample(capsys):
    text = output(capsys, "to_tokens", "--rewards", "1,-1", "--lengths", "2,1")
    assert [line.split() for line in text.splitlines()[2:4]] == [
        ["to_tokens", "1.1", "1", "1", "1", "1"],
        ["1.2", "-1", "0", "1", "0"],
    ]


def test_fields_are_lists_for_each_group_or_for_all_or_json(capsys):
    two = ("--rewards", "0,1", "1,1")
    for field in ("truncated=0,1", "truncated=[[0, 1], [0, 1]]"):
        steps = shown(capsys, "mask_truncated", *two, "--field", field)
        assert steps["steps"][-1]["mask"] == [[True, False], [True, False]]
        assert steps["metrics"] == {"mask_truncated/masked": 0.5}
    fields = advantages.read_fields(["row=4", "row=7", "classes=0,1", "doubt=.5,.25"], (2, 2))
    assert fields["row"].tolist() == [4, 7]
    assert fields["row"].dtype == int
    assert fields["classes"].tolist() == [[0, 1], [0, 1]]
    assert fields["doubt"].tolist() == [[0.5, 0.25], [0.5, 0.25]]
    unknown = advantages.read_fields(["classes=0,nan"], (1, 2))["classes"]
    np.testing.assert_array_equal(unknown, [[0, np.nan]])  # a class of its own to darling
    for field, expected in {"row=0.5": "whole numbers", "truncated=0,nan": "true or false"}.items():
        with pytest.raises(InputError, match=f"--field {field[:3]}.*: expected {expected}"):
            advantages.read_fields([field], (1, 2))


@pytest.mark.slow
def test_no_value_of_a_large_group_is_cut_in_a_narrow_console(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    rewards = [f"0.{number:03}" for number in range(1, 33)]
    text = output(capsys, "subtract_group_mean", "--rewards", ",".join(rewards))
    assert "…" not in text
    (line,) = (line for line in text.splitlines() if line.startswith("rewards"))
    assert line.split()[-64:] == [*(f"{float(reward):.4g}" for reward in rewards), *["1"] * 32]


def test_rewards_whose_advantage_would_be_lost_are_refused(capsys):
    for huge in ("1e20,0", "1e39,0", "0,-3e38"):
        assert "reward 'reward' holds" in output(capsys, "grpo", "--rewards", huge, code=2)
    assert shown(capsys, "grpo", "--rewards", "1e15,0")["steps"][-1]["value"][0][0] > 0.7


def test_own_code_is_run_from_its_file(capsys, user_file):
    assert shown(capsys, f"{user_file}:twice", "--rewards", "1,3")["steps"][-1]["value"] == [[2, 6]]
    plus = (f"{user_file}:plus", "--rewards", "1,3", "--option", "amount=0.5")
    assert shown(capsys, *plus)["steps"][-1]["value"] == [[1.5, 3.5]]
    assert "Adds a number." in output(capsys, f"{user_file}:plus")


def test_everything_that_is_needed_is_named_with_how_to_give_it(capsys, user_file):
    message = output(capsys, f"{user_file}:judged", "--rewards", "1,0", code=2)
    assert "judged needs more than rewards:" in message
    assert (
        "  answer_logp [P, G, J], log-probs of the reference answer's tokens behind each thought, "
        "by the trainer policy: --field answer_logp='[[...], ...]'" in message
    )
    assert "  doubt: a reward, or a column of the data: --field doubt=0.5,1,0,0" in message
    # What is given for each token says nothing without the tokens.
    assert "  base_logp [P, G, T], log-prob of each token, by the base policy" in message
    assert "  token_mask [P, G, T]" in message
    message = output(capsys, "to_tokens", "--rewards", "1,0", code=2)
    assert "--lengths 3,2,4,1 (tokens of each sample)" in message
    message = output(capsys, "mask_truncated", "--rewards", "1,0", code=2)
    assert "whether the length limit cut the sample: --field truncated=0,1,1,0" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gropo"], "unknown recipe or part 'gropo': did you mean 'grpo'?"),
        (["gropo", "--rewards", "1,0"], "did you mean 'grpo'?"),
        (["--rewards", "1,0"], "advantages --rewards 1,0: give a NAME too"),
        (["grpo", "--field", "row=1"], "give --rewards 1,0,0,0 too"),
        (["grpo", "--rewards", "1;0"], "--rewards 1;0: expected numbers with commas between"),
        (["grpo", "--rewards", "1,0", "1,0,0"], "--rewards: samples differ in number (1,0: 2, "),
        (["grpo", "--rewards", "a=1,0", "b=1,0", "a=0,0"], "groups differ in number (a: 2, b: 1)"),
        (["grpo", "--rewards", "1,0", "--option", "eps"], "--option eps: expected key=value"),
        (["grpo", "--rewards", "1,0", "--option", "epz=1"], "did you mean 'eps'?"),
        (["grpo", "--rewards", "1,0", "--field", "row"], "--field row: expected name=value"),
        (["grpo", "--rewards", "1,0", "--field", "x=[1"], "not JSON"),
        (
            ["grpo", "--rewards", "1,0", "--field", "x=[" + "9" * 5000],
            "not JSON: Exceeds the limit",
        ),
        (["grpo", "--rewards", "1,0", "--field", "x=[[1],[1,2]]"], "x: its lists differ in length"),
        *(
            (
                ["grpo", "--rewards", "1,0", "--field", f"x=[[0, {entry}]]"],
                "or an entry is no number",
            )
            for entry in ('"a"', '{"a": 1}', "9" * 400)
        ),
        (
            ["grpo", "--rewards", "1,0", "--field", "step=[]"],
            "step has shape (0,), expected one number",
        ),
        (
            ["grpo", "--rewards", "1,0", "--field", "step=3,4"],
            "step has shape (2,), expected one number",
        ),
        (
            ["grpo", "--rewards", "1,0", "--option", "eps=" + "9" * 400],
            "--option eps = inf: expected a finite number",
        ),
        (
            ["mask_truncated", "--rewards", "1,0", "--field", "truncated=1,0,0"],
            "--field truncated has shape (1, 3), expected [1, 2]",
        ),
        (["to_tokens", "--rewards", "1,0", "--lengths", "3,nan"], "--lengths nan: expected number"),
        (["to_tokens", "--rewards", "1,0", "--lengths", "1e12,1"], "--lengths 1e+12: expected num"),
        (["to_tokens", "--rewards", "1,0", "--lengths", "2.5,1"], "of tokens, 0 to 10000"),
        (["to_tokens", "--rewards", "1,0", "--lengths=-1,1"], "--lengths -1: expected numbers of"),
        (["sign", "--rewards", "1,0.5"], "sign takes rewards in {0, 1} but got 0.5"),
        (["no.py:f", "--rewards", "1,0"], "there is no file"),
    ],
)
def test_wrong_input_is_told_in_one_message(arguments, message, capsys):
    errors = output(capsys, *arguments, code=2)
    assert message in errors
    assert errors.startswith("error: ")
    assert "Traceback" not in errors


def test_examples_in_docstrings_hold():
    assert doctest.testmod(advantages).attempted
    assert doctest.testmod(advantages).failed == 0


def test_what_belongs_to_a_prompt_may_be_one_list():
    fields = advantages.read_fields(["row=4,7"], (2, 3))
    assert fields["row"].tolist() == [4, 7]
    assert advantages.read_fields(["row=4"], (2, 3))["row"].tolist() == [4, 4]
    for step in ("step=3", "step=[3]", "step=[[3]]"):
        assert advantages.read_fields([step], (2, 3))["step"].tolist() == 3


def test_a_field_that_nothing_reads_is_refused_one_with_two_equals_signs_too(capsys):
    arguments = ("grpo", "--rewards", "1,0", "--field")
    assert "reads the field 'x=y'" in output(capsys, *arguments, "x=y=1,0", code=2)
    error = output(capsys, *arguments, "trunctated=1,0", code=2)
    assert "nothing in grpo reads the field 'trunctated': did you mean 'truncated'?" in error


ODD = """
import dataclasses
import jax.numpy as jnp
from jaxgrpo import AdvantageTransform


def log(signal, rollouts):
    return dataclasses.replace(signal, value=jnp.log(signal.value))


def one_less(signal, rollouts):
    return dataclasses.replace(signal, value=signal.value - 1, mask=signal.mask | True)


def branch(signal, rollouts):
    return signal if signal.value.sum() > 0 else dataclasses.replace(signal, value=-signal.value)


def counted():
    update = lambda signal, state, rollouts: (signal, state, {"count": 7})
    return AdvantageTransform("counted", lambda spec: (), update)
"""


@pytest.mark.full
def test_what_an_own_step_does_wrong_is_named_with_its_place(capsys, tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(ODD)
    rewards = ("--rewards", "1,2,nan", "1,0,3")
    (infinite, masked) = shown(capsys, f"{file}:log", *rewards)["problems"]
    assert infinite.startswith("log made -inf of group 2, sample 2; 1 of 5 values are inf or NaN")
    assert masked.startswith("log left -inf at a masked place, group 1, sample 3: the chain sets")
    left, unmasked = shown(capsys, f"{file}:one_less", *rewards)["problems"]
    assert left.startswith("one_less left -1.0 at a masked place, group 1, sample 3")
    assert unmasked.startswith("one_less unmasked -1.0 at a masked place, group 1, sample 3")
    assert "warning: one_less left -1.0" in output(capsys, f"{file}:one_less", *rewards)
    assert shown(capsys, f"{file}:counted", *rewards)["metrics"] == {"counted/count": 7}
    assert shown(capsys, "grpo", *rewards)["problems"] == []


def test_an_own_step_that_only_runs_uncompiled_is_refused(capsys, tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(ODD)
    assert "jnp.where" in output(capsys, f"{file}:branch", "--rewards", "1,0", code=2)


@pytest.mark.parametrize("name", ["combine", "stream"])
def test_a_part_that_takes_a_function_says_how_to_be_shown(capsys, user_file, name):
    error = output(capsys, name, "--rewards", "1,0", code=2)
    message = f"{name} takes a function, which text cannot give: write a step of your own"
    assert message in error
    assert "advantage[0]" not in error
    options = ("--option", "name=x", "--option", "function=mine.py:plus")
    assert message in output(capsys, name, "--rewards", "1,0", *options, code=2)
    assert message in output(capsys, name)  # instead of "--rewards 1,0,0,0 shows ..."
    user_file.write_text(
        "import jaxgrpo.advantages as adv\n"
        "def combine():\n"
        "    return adv.combine(lambda streams, rollouts: streams['b'], name='second')\n"
        "def stream():\n"
        "    return adv.stream('ones', lambda rollouts: 0 * rollouts.rewards['a'] + 1)\n"
    )
    steps = shown(capsys, f"{user_file}:{name}", "--rewards", "a=1,0", "--rewards", "b=2,3")[
        "steps"
    ]
    assert steps[-1]["value"] == {"combine": [[2, 3]], "stream": [[4, 4]]}[name]
