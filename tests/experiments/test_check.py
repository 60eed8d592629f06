"""`jaxgrpo check`: expected updates beside an enumeration, mistakes, what it says of parts."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import minimal_config
import numpy as np
import pytest
from quick import full_but
from rich.console import Console

from jaxgrpo import advantages as adv
from jaxgrpo.advantages import build
from jaxgrpo.cli.main import main
from jaxgrpo.config import files
from jaxgrpo.core.errors import InputError
from jaxgrpo.experiments.check import command, verdict
from jaxgrpo.experiments.check.expectation import draw, expect
from jaxgrpo.experiments.check.games import GAMES, Policies, make_policies
from jaxgrpo.experiments.check.laws import LAWS, broken, check_laws
from jaxgrpo.experiments.check.method import make_method, read_method
from jaxgrpo.losses import Surrogate, build_entropy, build_penalty, build_surrogate
from jaxgrpo.update.batch_losses import loss_tokens

MISTAKES = Path(__file__).parents[1] / "support" / "mistakes.py"
SMALL: verdict.Sizes = {
    ("bandit", 1): (2, 3),
    ("bigram", 1): (2,),
    ("bandit", 2): (2,),
    ("bigram", 2): (2,),
}
UNIT, SIZE, SCALE = "unit scale", "group size", "scale invariance"
SHIFT, APART = "shift invariance", "groups apart"


# The papers' formulas, r [M, G] of M groups, and log-probs of the samples [M, G].


def centred(r, *_):
    return r - r.mean(1, keepdims=True)


def normalised(r, *_):
    deviation = r.std(1, ddof=1, keepdims=True)
    return np.where(np.ptp(r, axis=1, keepdims=True) > 0, centred(r) / (deviation + 1e-6), 0)


def leave_one_out(r, *_):
    return r - (r.sum(1, keepdims=True) - r) / (r.shape[1] - 1)


def best_less_second(r, *_):
    ordered = np.sort(r, axis=1)
    gap = (ordered[:, -1] - ordered[:, -2]) / (r.std(1, ddof=1) + 1e-6)
    return np.where(np.arange(r.shape[1]) == r.argmax(1)[:, None], gap[:, None], 0)


def above_mean(r, *_):
    mean = r.mean(1, keepdims=True)
    return np.where(mean > 0, (r - mean) / np.where(mean > 0, mean, 1), 0)


def towards_filtered(r, logp, base_logp):
    """alpha 0.5, cap 10, Z the group's mean of base v / policy, at most 1 and at least 1e-4."""
    weight = np.exp(base_logp - logp) * r
    z = np.minimum(weight.mean(1, keepdims=True), 1)
    pseudo = np.minimum(np.sqrt(weight / np.where(z > 0, z, 1e-4)) - 1, 10)
    flat = np.ptp(pseudo, axis=1, keepdims=True) == 0
    return np.where(flat, 0, leave_one_out(pseudo))


LOGGED = {"arithmetic": 0.0, "digits": 0.7}
FORMULAS = {
    "grpo": normalised,
    "dr_grpo": centred,
    "rloo": leave_one_out,
    "sign": lambda r, *_: 2 * r - 1,
    "reinforce": lambda r, *_: r,
    "passk": best_less_second,
    "maxrl": above_mean,
    "alpha_dpg": towards_filtered,
}


def enumerate_update(game, logits, reference, reward, samples, formula):
    """(expected update [S, V], expected square of its norm), term by term in NumPy."""
    shifted = logits - logits.max(-1, keepdims=True)
    policy = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    anchor = np.exp(reference) / np.exp(reference).sum(-1, keepdims=True)
    logp, base_logp, slopes = [], [], []
    for tokens, states, mask in zip(game.tokens, game.state, game.mask, strict=True):
        slope, total, base_total = np.zeros_like(logits), 0.0, 0.0
        for token, state in zip(tokens[mask], states[mask], strict=True):
            slope[state] -= policy[state]
            slope[state, token] += 1
            total += np.log(policy[state, token])
            base_total += np.log(anchor[state, token])
        logp.append(total)
        base_logp.append(base_total)
        slopes.append(slope)
    logp, base_logp, slopes = np.array(logp), np.array(base_logp), np.array(slopes)
    index = np.array(list(itertools.product(range(len(logp)), repeat=samples)))
    advantage = formula(reward[index], logp[index], base_logp[index])
    updates = np.einsum("mg,mgsv->msv", advantage / samples, slopes[index])
    chance = np.exp(logp[index].sum(1))
    return np.einsum("m,msv->sv", chance, updates), chance @ (updates**2).sum((1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    full_but(("grpo", "maxrl", "alpha_dpg"), FORMULAS),
)
def test_the_expected_update_is_that_of_the_papers_formula(name):
    for game in GAMES.values():
        tables, reward = make_policies(game), game.rewards["binary"]
        with jax.enable_x64(True):
            drawn = tables._replace(behavior=tables.policy)
            expected = expect(read_method(name), game, 3, 1, reward, drawn)
        for place, logits in enumerate(tables.policy):
            update, square = enumerate_update(
                game, logits, tables.reference[place], reward, 3, FORMULAS[name]
            )
            np.testing.assert_allclose(expected.update[place], update, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(expected.square[place], square, rtol=1e-9)


MISTAKEN = {
    "batch_deviation": {"groups apart", "unscored samples"},
    "mean_of_all": {"unscored samples", SCALE},
    "raw_rewards": {"unscored samples", SCALE},
    "across_prompts": {"groups apart", SCALE},
    "at_the_last_token": {"length", SCALE},
    "says_per_token": {"micro-batches", "stale ratio", SCALE},
    "ratio_upside_down": {"stale ratio", SCALE},
    "weight_with_gradient": {"way back", SCALE},
    "shifted_tokens": {"length", "packing", "way back", SCALE},
    "times_length": {"length", SCALE},
    "mask_after_mean": {"masked samples", SCALE},
    "grown_mask": {"mask shrinks", SCALE, "shift invariance"},
    "sees_its_batch": {"past state", "groups apart", SCALE, "shift invariance"},
    "mean_per_micro_batch": {"micro-batches", SCALE},
    "clipped_on_the_wrong_side": {"way back", SCALE},
    "without_ratio": {"stale ratio", SCALE},
}
"""What laws of one batch say of each mistake. SCALE is no mistake: the plain method breaks it."""


@pytest.mark.parametrize(
    "name",
    full_but(("mean_of_all", "without_ratio"), MISTAKEN),
)
def test_a_mistake_is_found_by_the_law_that_it_breaks(name):
    with jax.enable_x64(True):
        assert set(broken(check_laws(read_method(f"{MISTAKES}:{name}")))) == MISTAKEN[name]


def test_the_plain_method_breaks_no_law_but_scale_invariance():
    with jax.enable_x64(True):
        assert broken(check_laws(make_method("plain"))) == [SCALE]


@pytest.mark.full
def test_a_baseline_that_holds_its_sample_leaves_out_a_share_and_a_reward_twice_doubles():
    report = verdict.check(read_method(f"{MISTAKES}:sees_itself"), SMALL)
    np.testing.assert_allclose(report.scale, [1 / 2, 2 / 3], rtol=1e-9)
    assert set(broken(report.laws)) == {SCALE, SIZE, UNIT}
    report = verdict.check(read_method(f"{MISTAKES}:reward_twice"), SMALL)
    np.testing.assert_allclose(report.scale, [2, 2], rtol=1e-9)
    assert set(broken(report.laws)) == {SCALE, UNIT}


@pytest.mark.full
def test_bounds_that_hold_back_good_samples_alone_weigh_prompts():
    report = verdict.check(read_method(f"{MISTAKES}:one_left_out_of_the_bounds"), SMALL)
    assert (report.climbs, report.target) == ("mean reward", "mean reward")
    assert set(broken(report.laws)) == {SCALE, UNIT}
    # Failures alone are moved, by the success rate of the others.
    for row in verdict.bandit_rows(verdict.main_rows(report.rows)):
        np.testing.assert_allclose(row.scale["mean reward"], row.rate, rtol=1e-9)


@pytest.mark.full
def test_an_update_that_is_no_number_is_named_and_counts_as_a_run_counts_it():
    report = verdict.check(read_method(f"{MISTAKES}:bare_deviation"), SMALL)
    assert set(broken(report.laws)) >= {"finite"}
    settings = [(row.game, row.rewards, row.group_size) for row in report.rows]
    row = report.rows[settings.index(("bandit", "binary", 3))]
    flat = (row.rate**3 + (1 - row.rate) ** 3).max()
    assert row.skipped == pytest.approx(flat, rel=1e-9)
    assert report.flat_groups == {"all_fail": np.inf, "all_pass": np.inf, "share": 0}
    text = "\n".join(command.describe(report))
    assert "not a number: the update of up to" in text
    assert "all fail: not a number; all pass: not a number" in text
    # A method that leaves flat groups out has the same updates.
    parts = adv.subtract_group_mean(), adv.divide_by_group_std(eps=0.0, ddof=0)
    guarded = adv.chain(adv.sum_rewards(), adv.mask_zero_variance(), *parts)
    expected = verdict.check(make_method("guarded", guarded), SMALL)
    assert (report.climbs, report.target) == (expected.climbs, expected.target)
    np.testing.assert_allclose(report.scale, expected.scale, rtol=1e-9)
    np.testing.assert_allclose(report.cosine, expected.cosine, rtol=1e-9)
    assert expected.laws["finite"]


@pytest.mark.full
def test_a_kl_of_the_wrong_direction_is_named():
    report = verdict.check(read_method(f"{MISTAKES}:k3_for_reverse_kl"), SMALL)
    assert report.penalty is not None
    assert report.penalty["climbs"] == "KL(reference || policy) at each visited state"
    assert set(broken(report.laws)) == {SCALE, "KL"}
    right = make_method("k2", penalties=(build_penalty({"use": "k2", "beta": 0.1}),))
    with jax.enable_x64(True):
        penalty = verdict.measure_penalty(right) or {}
    assert penalty["climbs"] == "KL(policy || reference) at each visited state"
    assert penalty["bias"] < 1e-9


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "climbs", "says"),
    [
        (
            "kl_upwards",
            "KL(policy || reference) at each visited state",
            "the wrong way: it climbs KL(policy || reference) at each visited state",
        ),
        ("k1_in_the_loss", "nothing", "does nothing in the first update"),
        ("less_entropy", "entropy", "the wrong way: it descends entropy"),
    ],
)
def test_a_penalty_that_pulls_the_wrong_way_or_not_at_all_is_named(name, climbs, says):
    method = read_method(f"{MISTAKES}:{name}")
    with jax.enable_x64(True):
        penalty = verdict.measure_penalty(method) or {}
        assert verdict.pulls_as_kl(method, penalty) == (name == "less_entropy")
    assert penalty["climbs"] == climbs
    assert penalty["backwards"] == (climbs != "nothing")
    (line,) = command.describe_penalty(penalty)
    assert says in line


@pytest.mark.full
def test_an_entropy_beside_a_kl_does_not_hide_that_it_pulls_as_one():
    parts = (
        build_penalty({"use": "k2", "beta": 0.1}),
        build_entropy({"use": "bonus", "coefficient": 0.1}),
    )
    method = make_method("both", penalties=parts)
    with jax.enable_x64(True):
        assert verdict.pulls_as_kl(method, verdict.measure_penalty(method))


def best_of_pairs(signal, rollouts):
    """What a sample adds to the best of two, on average over the others of its group."""
    value = signal.value
    adds = jnp.maximum(value[:, :, None] - value[:, None, :], 0).sum(2)
    return dataclasses.replace(signal, value=adds / (value.shape[1] - 1))


def earlier_deviation():
    """A centred reward, divided by a deviation of the batches before."""

    def update(signal, deviation, rollouts):
        count = jnp.maximum(signal.mask.sum(1, keepdims=True), 1)
        value = signal.value - signal.value.sum(1, keepdims=True) / count
        value = jnp.where(signal.mask, value, 0)
        after = 0.9 * deviation + 0.1 * jnp.sqrt((value**2).sum() / signal.mask.sum())
        return dataclasses.replace(signal, value=value / deviation), after, {}

    return adv.AdvantageTransform("earlier_deviation", lambda spec: jnp.ones(()), update)


def by_the_step(signal, rollouts):
    return dataclasses.replace(signal, value=signal.value / rollouts.step)


@pytest.mark.full
@pytest.mark.parametrize(
    ("step", "target"),
    [(best_of_pairs, "pass@2"), (adv.divide_by_group_mean(), "log success to order G")],
)
def test_a_target_of_the_size_of_the_smallest_group_is_named(step, target):
    method = make_method("mine", adv.chain(adv.sum_rewards(), step))
    with jax.enable_x64(True):
        rows = verdict.measure(method, 1, {("bandit", 1): (2, 3), ("bigram", 1): ()})
    main = verdict.main_rows(rows)
    assert verdict.name_target(main)[1] == target
    np.testing.assert_allclose([row.bias[target] for row in main], 0, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("stale", [False, True])
def test_stale_samples_are_of_the_step_before(stale):
    game, method = GAMES["bandit"], make_method("plain")
    tables = make_policies(game)
    first = Policies(*(jnp.asarray(table[:1]) for table in tables))
    first = first if stale else first._replace(behavior=first.policy)
    rollouts = draw(method, game, first, jnp.ones(4), jnp.array([[0, 1]]))
    assert (np.asarray(rollouts.step - rollouts.policy_version) == stale).all()
    tokens = loss_tokens(
        method.objective._replace(surrogate=build_surrogate(by_age)),
        {"logp": rollouts.behavior_logp},
        rollouts,
        jnp.ones((1, 2, 1)),
        rollouts.token_mask,
    )
    assert (np.asarray(tokens.fields["sampled_now"]) != stale).all()


def by_age():
    return Surrogate("by_age", lambda tokens: (tokens.logp, {}), frozenset({"sampled_now"}))


@pytest.mark.full
@pytest.mark.parametrize(
    ("step", "laws"),
    [(earlier_deviation, set()), (by_the_step, {SCALE, SHIFT, "every step"})],
)
def test_memory_of_earlier_batches_is_no_mistake_and_a_schedule_is_named(step, laws):
    step = step() if step is earlier_deviation else step
    method = make_method("mine", adv.build([adv.sum_rewards(), step]))
    with jax.enable_x64(True):
        assert set(broken(check_laws(method))) == {SCALE} | laws


@pytest.mark.parametrize("name", ["gmpo", pytest.param("gspo", marks=pytest.mark.full)])
def test_a_mean_over_the_sequence_is_no_ratio_of_tokens(name):
    with jax.enable_x64(True):
        assert set(broken(check_laws(read_method(name)))) == {SCALE, "stale ratio"}


@pytest.mark.full
def test_a_wrong_sign_descends_in_text_json_and_figure(tmp_path, capsys):
    file, figure = tmp_path / "out.json", tmp_path / "out.svg"
    words = ["check", f"{MISTAKES}:wrong_sign", "--json", str(file), "--figure", str(figure)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("climbs none of the targets: it descends the mean reward, times -1\n")
    assert "breaks: unit scale: " in text
    numbers = json.loads(file.read_text())
    keys = {"climbs", "cosine", "scale", "bias", "noise", "flat_groups", "laws"}
    assert keys < numbers.keys()
    assert numbers["laws"].keys() == LAWS.keys()
    assert (numbers["climbs"], round(numbers["cosine"], 9)) == ("other", -1)
    np.testing.assert_allclose(numbers["scale"], [-1, -1], rtol=1e-9)
    assert figure.read_text().count("wrong_sign: climbs none of the targets") == 1


OWN_CODE = """
import jax.numpy as jnp

def three(signal, rollouts, options): return signal
def number(): return 3
def asks(signal, rollouts):
    return signal if signal.value.sum() > 0 else signal
def wide(tokens): return jnp.zeros(3), {}
"""
WRONG = {
    "missing.py:f": "there is no file",
    "own.py:nothing": "own.py has no 'nothing'",
    "own.py:three": "takes signal, rollouts, options: expected (signal, rollouts) -> signal",
    "own.py:number": "number() returned int, expected a chain",
    "own.py:asks": "asks (",
    "own.py:wide": "surrogate wide returned a loss of shape (3,)",
    "own.py": "name the function too, as own.py:my_advantage",
    "grop": "no recipe, surrogate, reduction or config is called so: did you mean 'grpo'?",
    "token_men": "did you mean 'token_mean'?",
    "missing.toml": "missing.toml",
    "tree_rl": "tree_process reads ancestors, [P, G, D]",
    "l2t": "add_information_gain reads cut_answer_logp, a score of reference answers by a model",
    "rank_learning": "reads effective_rank, which is of the hidden states of a model",
    "gigpo": "turn_normalise reads state_hash, [P, G, K], what was said before each turn",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_checked_is_refused_with_the_reason(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(OWN_CODE)
    monkeypatch.chdir(tmp_path)
    assert main(["check", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert WRONG[name] in error


def test_a_config_is_checked_with_its_loss_and_the_weights_of_its_rewards(repository):
    method = read_method(str(repository / "configs" / "rlcr.toml"))
    assert dict(method.rewards) == {"accuracy": 0.5, "brier": 0.5, "format": 0.5}
    objective = read_method("qwen3_0p6b_v5e").objective
    assert (objective.surrogate.name, objective.reduction.name) == ("clip", "token_mean")
    assert read_method("modular_sum").rewards == (("reward", 1.0),)


RETURNED = """
import jaxgrpo as jg
def steps():
    return [jg.sum_rewards(), jg.subtract_group_mean()]
def recipe():
    return "dr_grpo"
def score(power=1):
    return lambda tokens: (-tokens.advantage * tokens.logp**power, {})
@jg.transform
def finished(signal, rollouts):
    return signal
"""


def test_what_a_config_takes_from_own_code_is_taken_here_too(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(RETURNED)
    names = {
        function: [name for name, _ in read_method(f"{file}:{function}").chain.steps]
        for function in ("steps", "recipe", "finished")
    }
    assert names["steps"] == names["recipe"] == ["sum_rewards", "subtract_group_mean"]
    assert names["finished"] == ["sum_rewards", "finished"]
    assert read_method(f"{file}:score").objective.surrogate.name == "score"


def sum_of_all():
    """A recipe of own code, which gets no weights from a config."""
    return [adv.sum_rewards(), adv.subtract_leave_one_out_mean()]


@pytest.mark.parametrize(
    ("changes", "rewards"),
    [
        ({}, {"digits": 0.5, "arithmetic": 0.0}),
        ({"recipe": {"use": "grpo", "weights": LOGGED}}, {"digits": 0.7, "arithmetic": 0.0}),
        ({"advantage": [{"use": "sum_rewards", **LOGGED}]}, {"digits": 1.0, "arithmetic": 1.0}),
        ({"advantage": [{"use": "sum_rewards"}]}, {"digits": 0.5, "arithmetic": 0.0}),
        ({"recipe": f"{__file__}:sum_of_all"}, {"digits": 1.0, "arithmetic": 1.0}),
    ],
)
def test_the_reward_of_the_games_is_one_that_counts(tmp_path, changes, rewards):
    entries = [
        {"use": "arithmetic", "weight": 0.0},
        {"use": "length", "name": "digits", "weight": 0.5},
    ]
    file = tmp_path / "run.toml"
    tables = minimal_config.tables(rewards=entries, **changes)
    file.write_text(files.to_toml(files.from_dict(tables, source=file)))
    assert read_method(str(file)).rewards == tuple(rewards.items())


def test_groups_that_a_chain_refuses_and_files_that_cannot_be_written_are_told(tmp_path, capsys):
    for words, says in {
        ("grpo", "--figure", "out.pdf"): "name a file that ends with .png or .svg",
        ("grpo", "--json", str(tmp_path / "none" / "out.json")): "there is no folder",
    }.items():
        assert main(["check", *words]) == 2
        assert says in capsys.readouterr().err
    method = make_method("best", build("passk", {"k": 9}))
    with jax.enable_x64(True), pytest.raises(InputError, match="takes no groups of 2, 4, 8"):
        verdict.measure(method, 1, verdict.SIZES)


@pytest.mark.parametrize("where", ["all", "live"])
def test_a_penalty_is_measured_on_the_samples_it_acts_on_in_groups_the_chain_takes(
    where, monkeypatch
):
    monkeypatch.setattr(verdict, "SIZES", {("bandit", 1): (2, 3), ("bigram", 1): (2,)})
    kl = build_penalty({"use": "k2", "beta": 0.1})
    method = make_method("pairs", build("passk", {"k": 2}), penalties=(kl,))  # no groups of 2
    method = method._replace(objective=method.objective._replace(penalties_on=where))
    with jax.enable_x64(True):
        penalty = verdict.measure_penalty(method) or {}
    # On live samples alone, those of groups with one success, it pulls as no KL does.
    assert penalty["climbs"].startswith("KL(policy || reference)" if where == "all" else "other")


@pytest.mark.full
def test_a_chain_of_large_groups_is_held_to_the_laws_in_groups_of_eight():
    best_of_four = make_method("best", build("passk", {"k": 4}))
    with jax.enable_x64(True):
        assert set(broken(check_laws(best_of_four))) == {SCALE, SHIFT}  # rewards are 0 or 1
        with pytest.raises(InputError, match="groups of 4 samples, or of 8 or 2, whatever"):
            check_laws(make_method("first", build("ttrl", {"count": 32})))


@pytest.mark.full
def test_a_chain_that_takes_one_group_size_is_not_said_to_be_the_same_for_every_size(capsys):
    report = verdict.check(make_method("pairs", build("passk", {"k": 2})), SMALL)
    assert report.laws[SIZE] is None
    assert SIZE not in broken(report.laws)
    command.show(Console(), report)
    assert f"not judged: {SIZE}" in capsys.readouterr().out


def test_laws_hold_relative_to_the_size_of_the_update():
    """A loss that divides by the longest completion pulls by millionths."""
    method = make_method("long", build("dr_grpo"), reduction={"use": "constant", "length": 4096.0})
    with jax.enable_x64(True):
        assert broken(check_laws(method)) == [SCALE]
