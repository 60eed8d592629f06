"""Experiment files: what is refused, what is locked, and the config that each run gets."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from jaxgrpo.cli.main import main
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.experiments.compare import command, exchanges, results
from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.training import loop

ARMS = {"grpo": {"recipe": "grpo"}, "sign": {"recipe": "sign"}}


def tables(**changes):
    document = {
        "base": "quickstart",
        "dir": "runs/x",
        "control": "grpo",
        "learning_rates": [1e-4, 3e-4],
        "seeds": 2,
        "arms": ARMS,
        **changes,
    }
    return {name: value for name, value in document.items() if value is not None}


def load(tmp_path, **changes):
    file = tmp_path / "experiment.toml"
    file.write_text(tomli_w.dumps(tables(**changes)))
    return experiments.load(file)


def cases(tmp_path, **changes):
    return experiments.make_cases(load(tmp_path, **changes))


def problems(tmp_path, **changes):
    with pytest.raises(ConfigError) as refused:
        cases(tmp_path, **changes)
    return refused.value.problems


def test_a_run_has_the_config_of_the_base_but_for_what_is_said(tmp_path):
    all_cases = cases(tmp_path, set={"train": {"steps": 7}})
    assert [(case.arm, case.rate, case.seed) for case in all_cases[:4]] == [
        ("grpo", 1e-4, 0),
        ("grpo", 3e-4, 0),
        ("sign", 1e-4, 0),
        ("sign", 3e-4, 0),
    ]
    assert len(all_cases) == 8
    last = all_cases[-1].config
    base = configs.load("quickstart")
    assert (last.recipe, last.train.steps, last.train.seed) == ("sign", 7, 1)
    assert last.optimizer == dataclasses.replace(base.optimizer, learning_rate=3e-4)
    for table in ("model", "data", "rewards", "loss", "rollout", "eval", "mesh", "reference"):
        assert getattr(last, table) == getattr(base, table)
    assert last.run.dir == "runs/x/runs/sign/lr_0.0003/seed_1"
    assert configs.from_dict(tomllib.loads(configs.to_toml(last))) == last


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"train": {"steps": 3}}, "arms.b.train.steps: locked, the same in every arm"),
        ({"data.path": "x"}, "arms.b.data.path: locked"),
        ({"rollout": {"temperature": 0.5}}, "arms.b.rollout.temperature: locked"),
        ({"eval": {"samples": 3}}, "arms.b.eval.samples: locked"),
        ({"model": {"path": "y"}}, "arms.b.model.path: locked"),
        ({"optimizer": {"learning_rate": 1.0}}, "arms.b.learning_rates = [...]"),
        ({"recipie": "sign"}, "arms.b.recipie: unknown key; did you mean recipe?"),
    ],
)
def test_an_arm_may_not_differ_in_what_is_locked(tmp_path, arm, message):
    (problem,) = problems(tmp_path, arms={"grpo": {"recipe": "grpo"}, "b": arm})
    assert message in problem


def test_a_rate_that_no_float_holds_is_refused(tmp_path):
    (problem,) = problems(tmp_path, learning_rates=[10**400])
    assert problem.endswith(": expected a list of different rates, 0 or more, as [1e-4, 3e-4]")


def test_all_problems_come_at_once_with_the_nearest_name(tmp_path):
    messages = problems(
        tmp_path,
        base=None,
        bse="quickstart",
        control="gpro",
        seeds=[1, 1],
        learning_rates=[-1.0],
        tests=["sing"],
        level=2.0,
        set={"run": {"dir": "x"}, "optimizer.learning_rate": 1.0},
        train={"steps": 3},
    )
    text = "\n".join(messages)
    for expected in (
        "bse: unknown key; did you mean base?",
        "train: unknown key; a key of a config; write set.train",
        "seeds = [1, 1]: expected a number of seeds",
        "learning_rates = [-1.0]: expected a list of different rates",
        "level = 2.0: expected a number between 0 and 1",
        "set.run.dir: is the comparison's own",
        "set.optimizer.learning_rate: is what `learning_rates` is for",
        "control = \"gpro\": no arm 'gpro'; did you mean 'grpo'?",
        "tests = [\"sing\"]: no arm 'sing'; did you mean 'sign'?",
    ):
        assert expected in text
    assert len(messages) == 9


def test_problems_of_the_configs_name_the_arm(tmp_path):
    arms = {**ARMS, "odd": {"recipe": "gpro"}, "odder": {"loss": {"kl": {"use": "k9"}}}}
    messages = problems(tmp_path, arms=arms)
    assert [problem.partition(":")[0] for problem in messages] == ["arms.odd", "arms.odder"]
    assert "did you mean 'grpo'" in messages[0]
    (problem,) = problems(tmp_path, set={"train": {"stpes": 3}})
    assert problem == (
        'base = "quickstart" with set: train.stpes: unknown key; did you mean train.steps?'
    )


def test_seeds_are_set_apart_for_tuning_where_they_suffice(tmp_path):
    def split(**keys):
        experiment = load(tmp_path, **{"learning_rates": [0.1, 0.2], **keys})
        return len(experiment.seeds), experiment.tuning_seeds

    comparisons = len(load(tmp_path).tested)
    needed = exchanges.seeds_needed(comparisons, 0.05) or 0
    assert split(seeds=needed + 2) == (needed + 2, ())
    assert split(seeds=needed + 3) == (needed, (needed, needed + 1, needed + 2))
    assert split(seeds=30) == (20, tuple(range(20, 30)))
    assert split(seeds=30, tuning_seeds=[]) == (30, ())
    assert split(seeds=30, tuning_seeds=[40]) == (30, (40,))
    assert split(seeds=30, learning_rates=[0.1]) == (30, ())
    assert {case.seed for case in cases(tmp_path, seeds=30)} == set(range(30))


def test_seeds_are_those_that_a_run_can_take_and_a_large_number_is_no_number_of_them(tmp_path):
    for seeds in ([2**32], 20261128):
        (problem,) = problems(tmp_path, seeds=seeds)
        assert "1000 at most; or a list of different ones up to 4294967295, [3, 5], also" in problem
    assert cases(tmp_path, seeds=[2**32 - 1])[0].config.train.seed == 2**32 - 1


def test_an_environment_may_reward_alone_and_a_folder_be_in_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "mine.py").write_text("class Env: ...\n")
    changes = {"rewards": [], "environment": "mine.py:Env", "rollout.max_turns": 2}
    case = cases(tmp_path, set=changes, dir="~/x")[0]
    assert case.config.rewards == ()
    assert main(["compare", str(tmp_path / "experiment.toml"), "--dry-run"]) == 0
    assert case.path == Path("/home/me/x/runs/grpo/lr_0.0001/seed_0")


def test_tuning_seeds_are_others_and_the_control_is_not_tested(tmp_path):
    messages = problems(tmp_path, tuning_seeds=[1, 5], tests=["grpo"])
    assert any("tuning_seeds = [1]: among seeds too" in problem for problem in messages)
    assert any("'grpo' is the control" in problem for problem in messages)
    assert {case.seed for case in cases(tmp_path, tuning_seeds=[5])} == {0, 1, 5}


def test_group_sizes_differ_only_where_it_is_said_what_a_step_keeps(tmp_path):
    arms = {"grpo": {}, "two": {"rollout": {"group_size": 2}}}
    (problem,) = problems(tmp_path, arms=arms)
    assert "arms.two: rollout.group_size: say what a step keeps where it differs, hold" in problem
    for hold, prompts in (("samples", 128), ("prompts", 32)):  # the base: 32 x 8
        all_cases = cases(tmp_path, arms=arms, hold=hold)
        assert [case.config.rollout.prompts_per_step for case in all_cases[::2][:2]] == [
            32,
            prompts,
        ]
    (problem,) = problems(
        tmp_path, hold="samples", arms={"grpo": {}, "odd": {"rollout": {"group_size": 3}}}
    )
    assert "32 x 8 = 256 samples, which is no multiple of it" in problem


def test_bases_of_two_group_sizes_are_one_though_their_shares_of_flat_groups_differ(tmp_path):
    arms = {"grpo": {}, "two": {"rollout": {"group_size": 2}}}
    all_cases = cases(tmp_path, arms=arms, hold="samples", seeds=1, dir=str(tmp_path / "out"))

    def read(passes):
        outcomes: dict[tuple[str, float], dict[int, results.Outcome]] = {}
        for case, share in zip(all_cases, passes, strict=True):
            flat = share**case.config.rollout.group_size
            numbers = {"base/pass@1": share, "base/flat_groups": flat}
            outcome = results.Outcome(case, numbers, {}, np.zeros(1), np.zeros(1), {})
            outcomes[case.arm, case.rate] = {0: outcome}
        return outcomes

    assert results.mixtures(read([0.5] * 4)) == []
    (sign,) = results.mixtures(read([0.5, 0.5, 0.5, 0.6]))
    assert sign == "Seed 0: runs begin at different bases (base/pass@1 differ)."


def test_the_judge_of_evaluations_is_the_same_in_every_arm(tmp_path):
    arms = {"grpo": {}, "long": {"rewards": [{"use": "length"}, {"use": "arithmetic"}]}}
    (problem,) = problems(tmp_path, arms=arms)
    assert "name the judge, set.eval.scorer" in problem
    assert cases(tmp_path, arms=arms, set={"eval": {"scorer": "arithmetic"}})
    noisy = {"grpo": {}, "noisy": {"rewards": [{"use": "arithmetic", "flip": 0.07}]}}
    assert cases(tmp_path, arms=noisy)


def test_an_arm_may_have_a_teacher_or_experience_that_the_others_have_not(tmp_path):
    scores = [{"name": "teacher_logp", "policy": "./teacher"}]
    arms = {
        "grpo": {"recipe": "grpo"},
        "taught": {"recipe": "opd", "scores": scores},
        "again": {"experience": {"share": 0.5}},
    }
    by_arm = {case.arm: case.config for case in cases(tmp_path, arms=arms)}
    assert [len(config.scores) for config in by_arm.values()] == [0, 1, 0]
    assert by_arm["taught"].scores[0].policy == str(tmp_path / "teacher")
    assert [config.experience.share for config in by_arm.values()] == [0, 0, 0.5]
    del arms["again"]
    experiment = load(tmp_path, arms=arms)
    command._check_methods(experiment, experiments.make_cases(experiment))
    experiment = load(tmp_path, arms=arms, set={"scores": scores})
    with pytest.raises(ConfigError) as caught:
        command._check_methods(experiment, experiments.make_cases(experiment))
    (problem,) = caught.value.problems
    assert problem.startswith("arms.grpo: scores: no part of the method and no loss reads teacher_")


def test_differences_are_those_of_the_resolved_configs(tmp_path):
    arms = {
        "grpo": {},
        "noisy": {"rewards": [{"use": "arithmetic", "flip": 0.07}], "learning_rates": [0.0]},
        "own": {"advantage": [{"use": "sum_rewards"}, {"use": "sign"}]},
    }
    by_key = experiments.differences(cases(tmp_path, arms=arms))
    assert by_key == {
        "learning_rates": {"grpo": "[0.0001, 0.0003]", "noisy": "[0.0]", "own": "[0.0001, 0.0003]"},
        "advantage.0.use": {"grpo": "–", "noisy": "–", "own": '"sum_rewards"'},
        "advantage.1.use": {"grpo": "–", "noisy": "–", "own": '"sign"'},
        "recipe": {"grpo": '"grpo"', "noisy": '"grpo"', "own": "–"},
        "rewards.0.flip": {"grpo": "0.0", "noisy": "0.07", "own": "0.0"},
    }


def test_no_password_is_among_the_differences(tmp_path):
    (tmp_path / "mine.py").write_text("def judge(completions, url, **columns): ...\n")
    judge = {"use": "mine.py:judge", "url": "https://me:secret@host/?key=1"}
    arms = {"grpo": {}, "other": {"rewards": [{"use": "arithmetic"}, judge]}}
    by_key = experiments.differences(cases(tmp_path, arms=arms))
    url = '"https://me:...@host/?..."'
    assert by_key["rewards.1.url"] == {"grpo": "–", "other": url}


def test_an_arm_with_another_optimizer_keeps_what_every_optimizer_has(tmp_path):
    of_base = {"clip_norm": 0.3, "warmup_steps": 2, "schedule": "cosine", "weight_decay": 0.1}
    arms = {
        "grpo": {},
        "sgd": {"optimizer": {"use": "sgd", "momentum": 0.9}},
        "same": {"optimizer": {"use": "adamw", "b2": 0.9}},
        "dotted": {"optimizer.use": "sgd"},
    }
    all_cases = cases(
        tmp_path, arms=arms, seeds=1, learning_rates=[0.1], set={"optimizer": of_base}
    )
    base, sgd, same, dotted = (case.config.optimizer for case in all_cases)
    assert base.options["weight_decay"] == 0.1
    assert sgd == dataclasses.replace(base, use="sgd", options={"momentum": 0.9})
    assert same == dataclasses.replace(base, options={**base.options, "b2": 0.9})
    assert dotted == dataclasses.replace(base, use="sgd", options={})


def test_tracking_of_the_base_is_not_for_the_runs(tmp_path):
    raw, _ = configs.read_tables("quickstart")
    raw["tracking"] = {"wandb": {"project": "mine"}, "tensorboard": True}
    (tmp_path / "base.toml").write_text(tomli_w.dumps(raw))
    for case in cases(tmp_path, base="base.toml"):
        assert (case.config.tracking.wandb, case.config.tracking.tensorboard) == (None, False)


def test_a_dry_run_shows_the_plan_and_what_can_be_seen(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load(tmp_path, seeds=7)
    assert main(["compare", "experiment.toml", "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "28 runs: 2 arms" in shown
    assert "gives no p below 0.016" in shown
    assert main(["compare", "experiment.toml", "--dry-run", "--json"]) == 0
    streams = capsys.readouterr()
    plan = json.loads(streams.out)
    assert (plan["runs"], plan["finished"], streams.err) == (28, 0, "")
    assert plan["smallest"]["p"] == pytest.approx(2 / 2**7)
    assert plan["seeds"] == [*range(7)]
    for key, values in plan["differences"].items():
        assert key in shown
        assert len(values) == 2
    assert len(plan["learning_rates"]) == 2
    assert not (tmp_path / "runs").exists()
    assert main(["compare", "x3_g5", "--dry-run"]) == 2
    assert "did you mean 'x3_g" in capsys.readouterr().err


def test_a_run_that_leaves_the_working_directory_takes_no_other_run_along(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    first, *_ = cases(tmp_path)
    monkeypatch.setattr(loop, "take", lambda *_, **__: os.chdir(elsewhere))  # as a reward may do
    command.Runner().run(first)
    assert Path.cwd() == tmp_path


BROKEN = """
def forgets(tokens):
    return tokens.logp * tokens.weights, {}


def divides(tokens):
    return tokens.logp * (1 / len([])), {}


def reads(beta):
    raise KeyError("beta")


import dataclasses, jaxgrpo


def step(signal, rollouts):
    return dataclasses.replace(signal, value=signal.value * rollouts.fields["row"])


def column(signal, rollouts):
    return dataclasses.replace(signal, value=signal.value[:9, None])


def asks(signal, rollouts):
    if signal.value[0, 0] > 0:
        return signal


def begins(spec):
    return [][0]


def remembers():
    return jaxgrpo.AdvantageTransform("remembers", begins, None)
"""


def test_a_dry_run_traces_own_losses_of_every_arm(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(BROKEN)
    arms = {
        "grpo": {"recipe": "grpo"},
        "one": {"loss": {"surrogate": {"use": "mine.py:forgets"}}},
        "two": {"loss": {"kl": {"use": "mine.py:divides"}}},
        "three": {"loss": {"entropy": {"use": "mine.py:reads", "beta": 1.0}}},
    }
    load(tmp_path, arms=arms)
    assert main(["compare", "experiment.toml", "--dry-run"]) == 2
    errors = " ".join(capsys.readouterr().err.split())
    file = tmp_path / "mine.py"
    assert f"arms.one: surrogate forgets ({file}:forgets, line 3: " in errors
    assert "raised AttributeError: 'Tokens' object has no attribute 'weights'" in errors
    assert f"arms.two: penalty divides ({file}:divides, line 7: " in errors
    assert f"arms.three: entropy reads ({file}:reads, line 11: " in errors
    assert "Traceback" not in errors
    steps = {"four": "step", "five": "column", "six": "asks", "seven": "remembers"}
    for name, function in steps.items():
        arms[name] = {"advantage": [{"use": "sum_rewards"}, {"use": f"mine.py:{function}"}]}
    load(tmp_path, arms=arms)
    assert main(["compare", "experiment.toml", "--dry-run"]) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert f"arms.four: step ({file}:step, line " in errors
    assert "arms.five: column returned value" in errors
    assert f"arms.six: asks ({file}:asks, line " in errors
    assert "jnp.where(condition, a, b)" in errors
    assert f"arms.seven: remembers ({file}:begins, line " in errors
    for name in steps:
        del arms[name]
    arms["one"]["loss"]["surrogate"]["use"] = "clip"
    load(tmp_path, arms={name: arms[name] for name in ("grpo", "one")})
    assert main(["compare", "experiment.toml", "--dry-run"]) == 0


def test_a_run_that_train_finished_is_no_finished_run_of_a_comparison(tmp_path):
    first, *_ = cases(tmp_path, dir=str(tmp_path / "out"))
    first.path.mkdir(parents=True)
    (first.path / "config.toml").write_text(configs.to_toml(first.config))
    assert not command.is_finished(first)
    (first.path / "summary.json").write_text("{}")
    with pytest.raises(InputError, match=r"as jaxgrpo train leaves it.*remove the folder"):
        command.is_finished(first)
    (first.path / "successes").mkdir()
    (first.path / "successes" / f"step_{first.config.train.steps}.json").write_text("{}")
    assert command.is_finished(first)
