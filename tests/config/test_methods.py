"""The steps that loss.kl and loss.mismatch add to the chain of a run."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from decimal import Decimal

import minimal_config
import numpy as np
import pytest
import small_run

from jaxgrpo import advantages, losses
from jaxgrpo.config import files, methods, off_policy
from jaxgrpo.config.contenders import make_contenders, split_names
from jaxgrpo.config.keys import RolloutKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.training import loop, setup

KL = {"use": "k1_in_reward", "beta": 0.05}
WEIGHTS = {"use": "truncated_importance", "level": "token", "cap": 2.0}


def steps(folder, advantage=None, **changes) -> list[str]:
    config = small_run.config(folder, **changes)
    recipe = methods.make_recipe(advantage or config.named_chain, ())
    return [name for name, _ in methods.make_chain(config.loss, recipe).steps]


def zeros(completions, **columns):
    return [0.0 for _ in completions]


def halved(signal, rollouts):
    return dataclasses.replace(signal, value=signal.value / 2)


@pytest.mark.slow
def test_they_stand_behind_any_chain_weights_last_and_nothing_stands_there_without_them(tmp_path):
    options = {"loss.kl": KL, "loss.mismatch": WEIGHTS, "loss.proximal": "trainer"}
    tail = ["add_kl_return", "truncated_importance"]
    recipe = steps(tmp_path, recipe="rloo")
    assert steps(tmp_path, recipe="rloo", **options) == [*recipe, *tail]
    parts = [{"use": "sum_rewards"}, {"use": "sign", "threshold": 0.5}]
    config = small_run.config(tmp_path, advantage=parts, **options)
    transform = methods.make_chain(config.loss, methods.make_recipe(config.named_chain, ()))
    assert [name for name, _ in transform.steps] == ["sum_rewards", "sign", *tail]
    token_chain = advantages.chain(advantages.sum_rewards(), advantages.to_tokens())
    assert steps(tmp_path, token_chain, **options) == ["sum_rewards", "to_tokens", *tail]


@pytest.mark.slow
def test_a_function_of_ones_own_may_correct_the_mismatch(tmp_path):
    part = {"use": f"{__file__}:halved"}
    assert steps(tmp_path, **{"loss.mismatch": part})[-1] == "halved"
    wrong = {"use": f"{__file__}:scaled", "factr": 2.0}
    with pytest.raises(InputError, match=r"^loss.mismatch: scaled: unknown option 'factr'"):
        steps(tmp_path, **{"loss.mismatch": wrong})


def scaled(factor=1.0):
    return [advantages.sum_rewards(), advantages.subtract_constant(factor)]


def broken():
    return [advantages.sum_rewards(), 1 / 0]


def step_alone():
    return halved


def test_a_recipe_of_ones_own_is_a_function_that_returns_a_chain():
    def make(name, **options):
        return methods.make_recipe({"use": f"{__file__}:{name}", **options}, ())

    steps = [name for name, _ in make("scaled", factor=0.5).steps]
    assert steps == ["sum_rewards", "subtract_constant"]
    for name, message in {
        "halved": "recipe halved: missing a required argument: 'signal'; it takes (signal, roll",
        "step_alone": "recipe step_alone returned function, expected a chain, jaxgrpo.chain(...),",
        "broken": "raised ZeroDivisionError: division by zero",
    }.items():
        with pytest.raises(InputError, match=re.escape(message)):
            make(name)
    with pytest.raises(InputError, match=r"recipe scaled: unknown option 'factr': did you mean 'f"):
        make("scaled", factr=1.0)


@advantages.transform
def doubled(signal, rollouts):
    return dataclasses.replace(signal, value=2 * signal.value)


HIGH_CLIP = losses.clip(high=0.28)._replace(name="high_clip")


def test_a_finished_part_is_named_as_a_function_is():
    part = {"use": f"{__file__}:doubled"}
    chain = methods.make_recipe([{"use": "sum_rewards"}, part], ())
    assert [name for name, _ in chain.steps] == ["sum_rewards", "doubled"]
    assert [name for name, _ in methods.make_recipe(part, ()).steps] == ["doubled"]
    with pytest.raises(InputError, match=r"^advantage\[0\]: doubled: unknown option 'factor'"):
        methods.make_recipe([{**part, "factor": 3.0}], ())
    surrogate = {"use": f"{__file__}:HIGH_CLIP"}
    config = files.from_dict(minimal_config.tables(loss={"surrogate": surrogate}))
    assert methods.make_objective(config.loss, 8).surrogate.name == "high_clip"


def test_names_of_methods_hold_tables_with_commas():
    text = "grpo, recipe={ use = 'passk', k = 2 }+loss.surrogate={ use = 'clip', high = 0.28 }"
    names = split_names(text)
    tables = minimal_config.tables(data={"path": "gone.jsonl"})  # a replay's need not be there
    contenders = make_contenders(names, "--methods", tables, None, ())
    assert [name.partition("=")[0] for name in contenders] == ["grpo", "recipe"]
    chain, objective = contenders[names[1]]
    assert [name for name, _ in chain.steps] == ["sum_rewards", "leave_one_out_pass_at_k"]
    assert objective.surrogate.name == "clip"


def test_a_kl_in_the_return_is_no_penalty_and_the_others_are():
    assert methods.build_penalties(KL) == ()
    assert methods.build_penalties(None) == methods.build_tail(None, None) == ()
    (penalty,) = methods.build_penalties({"use": "k2", "beta": 0.1})
    assert penalty.name == "k2"
    assert methods.build_tail({"use": "k2", "beta": 0.1}, None) == ()


def test_a_kl_of_what_the_policy_drew_is_refused_where_known_answers_are_trained():
    recipe = 'recipe={use="verifree", weights={arithmetic=0}}'
    part = {"use": "add_kl_return", "beta": 0.1}
    answers = [{"use": "sum_rewards"}, part, {"use": "train_on_answers"}]

    def chain(named, *overrides):
        config = minimal_config.read(recipe, *overrides)
        return methods.make_chain(config.loss, methods.make_recipe(named or config.named_chain, ()))

    for arguments in ((None, 'loss.kl={use="k1_in_reward", beta=0.1}'), (answers,)):
        with pytest.raises(InputError, match="add_kl_return charges for the tokens that the poli"):
            chain(*arguments)
    assert chain(None, 'loss.kl={use="k2", beta=0.1}').name == "verifree"


def make_chain(transform, *overrides, refills=False):
    loss = minimal_config.read(*overrides).loss
    return methods.make_chain(loss, methods.make_recipe(transform, ()), refills)


def test_what_python_brings_may_not_compare_groups_that_are_refilled():
    drop = advantages.mask_low_variance(drop=0.5)
    total, inner = advantages.sum_rewards(), advantages.chain(drop, name="inner")
    each = advantages.per_reward(drop)
    for steps, name in (
        ((total, drop), drop.name),
        ((total, inner), "inner"),
        ((each, total), each.name),
    ):
        transform = advantages.chain(*steps)
        with pytest.raises(InputError, match=rf"^{name} compares the groups of a batch"):
            make_chain(transform, refills=True)
        make_chain(transform)


def test_what_python_brings_may_not_remember_flat_groups_that_are_refilled():
    band, total = advantages.mask_difficulty_band(), advantages.sum_rewards()
    inner = advantages.chain(band, name="inner")
    kl = 'loss.kl={use="k1_in_reward", target_validity=0.9}'
    cases: dict[str, tuple[list[advantages.AdvantageTransform], list[str]]] = {
        band.name: ([total, band], []),
        "inner": ([total, inner], []),
        "add_kl_return_for_validity": ([total], [kl]),
    }
    for name, (steps, overrides) in cases.items():
        transform = advantages.chain(*steps, advantages.subtract_group_mean())
        with pytest.raises(InputError, match=rf"^{name} remembers all groups, and rollout.refill"):
            make_chain(transform, *overrides, refills=True)
        make_chain(transform, *overrides)


def test_what_python_brings_may_not_weigh_twice_either(tmp_path):
    weights = advantages.chain(advantages.sum_rewards(), advantages.truncated_importance())
    inner = advantages.chain(advantages.truncated_importance(), name="inner")
    nested = advantages.chain(advantages.sum_rewards(), inner)
    each = advantages.per_reward(advantages.masked_importance(level="sequence"))
    clip, plain = (losses.build_surrogate(name) for name in ("clip", "reinforce"))
    user_surrogate = losses.Surrogate("own", clip.compute)
    for chain, step in ((weights, "truncated_importance"), (nested, "inner"), (each, "per_reward")):
        for surrogate in (clip, user_surrogate):
            with pytest.raises(InputError, match=f"^{step}.*: with loss.proximal = .behavior"):
                off_policy.refuse_double_weights(chain, surrogate, "behavior")
            off_policy.refuse_double_weights(chain, surrogate, "trainer")
        off_policy.refuse_double_weights(chain, plain, "behavior")
    with pytest.raises(InputError, match="holds this weight already"):
        setup.setup(small_run.config(tmp_path), advantage=weights)


@pytest.mark.parametrize("surrogate", ["gvpo", "mirror_descent", "kl_cov", "clip"])
def test_penalties_on_live_samples_need_a_surrogate_that_lets_the_dead_leave(surrogate):
    loss = minimal_config.read(
        f"loss.surrogate.use={surrogate}", 'loss.kl={use="k2", beta=0.1}', "loss.penalties_on=live"
    ).loss
    if surrogate == "clip":
        assert not methods.make_objective(loss, 8).acts_on_all
        return
    message = f'loss.penalties_on = "live": {surrogate} keeps samples without an advantage'
    with pytest.raises(InputError, match=message):
        methods.make_objective(loss, 8)


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({}, [0.5, 1.0]),
        ({"right": 1.0, "short": 2.0}, [2.0, 1.0]),
        ({"right": 0, "short": 1}, [1, 0]),
    ],
)
@pytest.mark.parametrize("use", ["sum_rewards", "sum_scored"])
def test_a_sum_in_a_chain_that_names_no_weights_takes_those_of_the_rewards(use, options, total):
    rewards = [Reward("right", zeros), Reward("short", zeros, weight=0.5)]
    chain = methods.make_recipe([{"use": use, **options}], rewards)
    scores = {"right": [[0.0, 1.0]], "short": [[1.0, 0.0]]}
    assert advantages.evaluate(chain, scores)[0].tolist() == [total]
    even = [reward._replace(weight=1.0) for reward in rewards]
    chain = methods.make_recipe([{"use": use}], even)
    assert advantages.evaluate(chain, scores)[0].tolist() == [[1.0, 1.0]]


def test_a_stream_that_a_part_adds_weighs_1_beside_weighed_rewards():
    rewards = [Reward("right", zeros), Reward("short", zeros, weight=0.5)]
    parts = [{"use": "score_mean"}, {"use": "sum_rewards"}]
    chain = methods.make_recipe(parts, rewards)
    scores = {"right": [[0.0, 1.0]], "short": [[1.0, 0.0]]}
    tokens = {"token_mask": np.ones((1, 2, 1), bool), "token_entropy": np.array([[[2.0], [4.0]]])}
    assert advantages.evaluate(chain, scores, **tokens)[0].tolist() == [[2.5, 5.0]]


@pytest.mark.slow
def test_dvao_in_a_chain_takes_the_weights_of_the_rewards_beside_eps():
    rewards = [Reward("right", zeros), Reward("short", zeros, weight=3.0)]
    scores = {"right": [[0.0, 1.0]], "short": [[2.0, 0.0]]}
    chain = methods.make_recipe([{"use": "dvao", "eps": 0.0}], rewards)
    # Means 1/2 and 1, deviations 1/2 and 1: (1 (-1/2) + 3 (1)) / (1 (1/2) + 3 (1))
    assert advantages.evaluate(chain, scores)[0].tolist() == [
        [pytest.approx(2.5 / 3.5), pytest.approx(-2.5 / 3.5)]
    ]


@pytest.mark.full
def test_a_run_with_both_says_what_they_did(tmp_path):
    changes = {"loss.kl": KL, "loss.mismatch": WEIGHTS, "loss.proximal": "trainer"}
    run = loop.train(small_run.config(tmp_path / "r", recipe="rloo", **changes))
    first, second, _ = run.metrics
    assert first["add_kl_return/kl"] == 0 < second["add_kl_return/kl"]
    for line in run.metrics:
        # The sampler is the trainer but for rounding.
        assert line["truncated_importance/effective_sample_size"] == pytest.approx(1, abs=1e-4)
        assert line["truncated_importance/capped"] == 0
        assert "kl" not in line


def test_fields_from_the_data_are_exact_numbers_or_refused():
    def column(*values):
        return methods.needed_columns(frozenset({"x"}), [{"x": value} for value in values], [])["x"]

    assert column(Decimal("0.1"), 2).tolist() == [0.1, 2.0]
    assert column([1, 2], [3, 4]).shape == (2, 2)
    assert column([Decimal(1), 2]).tolist() == [[1, 2]]
    for values, message in {
        (1, None): "row 1 holds None: write numbers",
        ((1, 2), (1,)): r"row 1 holds \(1,\): write numbers, the same count",
        (((1,), (1, 2)),): "row 0 holds .*: write numbers",
        (1, "2"): "row 1 holds '2': write numbers",
        (1, 3_000_000_000): "row 1 holds 3000000000: give numbers of at most 2.14748e",
        (1.0, 1e39): "row 1 holds 1e.39: give numbers of at most 3.40282e",
    }.items():
        with pytest.raises(InputError, match=message):
            column(*values)


def test_a_loss_reads_one_number_of_a_row_a_sample_or_a_token():
    columns = {"flag": np.ones(6), "flags": np.ones((6, 4))}
    methods.refuse_wide(frozenset({"flag"}), columns, (6,))
    with pytest.raises(
        InputError, match=r"the loss reads flags, which has shape \[6, 4\], .* \[6\]:"
    ):
        methods.refuse_wide(frozenset({"flags", "flag"}), columns, (6,))
    for shape in ((6,), (6, 4), (6, 4, 5), (6, 4, 5, 2)):  # fields of saved rollouts
        methods.refuse_wide(frozenset({"x"}), {"x": np.ones(shape)}, (6, 4, 5))
    with pytest.raises(
        InputError, match=r"x, which has shape \[6, 3\].*\[6\] or \[6, 4\] or \[6, 4, 5\]"
    ):
        methods.refuse_wide(frozenset({"x"}), {"x": np.ones((6, 3))}, (6, 4, 5))


@pytest.mark.slow
def test_a_column_with_a_number_for_each_sample_is_refused_before_a_loss_reads_it(tmp_path):
    rows = [{**row, "flags": [1, 0, 1, 0]} for row in arithmetic.rows("train", 8)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loss = {"use": "by_sample", "field": "flags"}
    with pytest.raises(InputError, match=r"the loss reads flags, which has shape \[8, 4\]"):
        setup.setup(small_run.config(tmp_path, **{"loss.surrogate": loss, "data.path": str(data)}))


@pytest.mark.parametrize(
    "steps",
    [
        [{"use": "unlikeliness"}],
        [{"use": "geometric_rejection"}],
        [{"use": "to_tokens"}, {"use": "kl_in_reward", "beta": 0.1, "policy": "behavior"}],
    ],
)
def test_no_part_of_a_chain_reads_how_likely_texts_were_to_what_wrote_them(steps):
    chain, reader = advantages.build([{"use": "sum_rewards"}, *steps]), steps[-1]["use"]
    rollout = RolloutKeys(
        prompts_per_step=2, group_size=4, max_prompt_tokens=3, max_completion_tokens=5
    )
    rewards = [Reward("zeros", zeros)]
    trace = functools.partial(methods.trace_chain, rollout, chain, rewards, 4, {})
    trace()
    with pytest.raises(InputError, match=f"data.completion: {reader} reads behavior_logp"):
        trace(trains_texts=True)
    chain = advantages.build("grpo")
    methods.trace_chain(rollout, chain, rewards, 4, {}, trains_texts=True)


MASK = {"use": "off_policy_mask", "threshold": 1.0, "then": "reinforce", "sampler": "proximal"}
REVERSE_KL = {"use": "reverse_kl_off_policy", "beta": 0.1}


@pytest.mark.parametrize(
    ("loss", "reader"),
    [
        ({"surrogate": {"use": "clip"}}, "surrogate clip"),
        ({"surrogate": MASK}, "surrogate off_policy_mask"),
        ({"kl": REVERSE_KL}, "penalty reverse_kl_off_policy"),
    ],
)
def test_no_part_of_a_loss_measures_texts_from_the_policy_that_drew_them(loss, reader):
    def refuse(**changes):
        loss_tables = {"surrogate": {"use": "reinforce"}, **loss, **changes}
        config = files.from_dict(minimal_config.tables(loss=loss_tables))
        objective = methods.make_objective(config.loss, 8)
        off_policy.refuse_weights("data.completion", advantages.build("grpo"), objective)

    refuse(proximal="trainer")
    refuse(surrogate={"use": "reinforce"}, kl={"use": "k2", "beta": 0.1})
    with pytest.raises(InputError, match=f"^data.completion: {reader} reads how likely samples"):
        refuse()


def test_no_method_of_an_atlas_measures_texts_from_the_policy_that_drew_them():
    tables = minimal_config.tables(loss={"surrogate": {"use": "reinforce"}})
    data = {**tables["data"], "completion": "solution"}
    for name in ("loss.surrogate=clip", 'loss.kl={ use = "reverse_kl_off_policy", beta = 1.0 }'):
        make_contenders([name], "--methods", tables, None, ())
        with pytest.raises(InputError, match=r'data.completion = "solution": .* how likely'):
            make_contenders([name], "--methods", {**tables, "data": data}, None, ())


REPLAYED = {"use": "by_sample", "field": "replayed"}


@pytest.mark.parametrize(
    ("surrogate", "at", "name"),
    [
        ({"use": "clip"}, None, None),
        ({"use": "reinforce"}, "replayed", "reinforce"),
        ({**REPLAYED, "then": "shaped_ratio", "otherwise": "clip"}, None, None),
        ({**REPLAYED, "then": "shaped_ratio", "otherwise": "on_policy"}, "replayed", None),
        ({**REPLAYED, "then": "shaped_ratio", "otherwise": "on_policy"}, None, "on_policy in by"),
        ({**REPLAYED, "then": "reinforce", "otherwise": "clip"}, "replayed", "reinforce in by"),
        ({**REPLAYED, "field": "new", "otherwise": "on_policy"}, "replayed", "on_policy in by"),
        (
            {"use": "off_policy_mask", "threshold": 1.0, "then": {**REPLAYED, "then": "reinforce"}},
            None,
            "reinforce in off_policy_mask",
        ),
    ],
)
def test_each_side_of_a_surrogate_weighs_the_stale_samples_that_it_takes(surrogate, at, name):
    def refuse(chain, proximal="behavior"):
        config = files.from_dict(minimal_config.tables(loss={"surrogate": surrogate}))
        objective = methods.make_objective(config.loss, 8)._replace(proximal=proximal)
        off_policy.refuse_stale(chain, objective, "rollout.staleness = 1", at)

    grpo = advantages.build("grpo")
    refuse(advantages.extend(grpo, advantages.truncated_importance()), "trainer")
    if name is None:
        refuse(grpo)
    else:
        with pytest.raises(InputError, match=f"^rollout.staleness = 1: {name}"):
            refuse(grpo)
    with pytest.raises(InputError, match=f"^rollout.staleness = 1: {surrogate['use']} with"):
        refuse(grpo, "trainer")
