"""Reading, checking, writing and comparing configs."""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from minimal_config import MINIMAL, problems, read, tables

from jaxgrpo.config import files, keys
from jaxgrpo.config.files import make_config
from jaxgrpo.core.errors import ConfigError, InputError


def test_what_is_left_out_has_its_default():
    got = read()
    assert got.recipe == "grpo"
    assert got.advantage is None
    assert got.loss == keys.LossKeys(
        surrogate={"use": "clip"}, reduction={"use": "token_mean"}, kl=None
    )
    assert got.optimizer.clip_norm == 1.0
    assert got.eval.data is None


def test_a_whole_number_is_right_where_a_fraction_may_stand():
    temperature = read("rollout.temperature=2").rollout.temperature
    assert temperature == 2
    assert type(temperature) is float


def test_a_file_may_begin_with_the_mark_of_its_encoding(tmp_path):
    (tmp_path / "run.toml").write_text(MINIMAL, encoding="utf-8-sig")
    assert files.load(tmp_path / "run.toml").train.steps == 10


def test_nothing_changes_a_config():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().train.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "train.stepz: unknown key; did you mean train.steps?"),
        ("trian.seed=3", "trian: unknown key; did you mean train?"),
        (
            "rollout.learning_rate=3",
            "rollout.learning_rate: unknown key; did you mean optimizer.learning_rate?",
        ),
        ("temperature=3", "temperature: unknown key; did you mean rollout.temperature?"),
        ("run.zzz=3", "run.zzz: unknown key; the keys here are dir"),
        ("optimizer.clip_nrom=3", "optimizer.clip_nrom: unknown key; did you mean"),
        ("optimizer.weight_decai=3", "optimizer.weight_decai: optax.adamw has no such option; did"),
        ("optimizer.use=adamm", 'optimizer.use = "adamm"'.replace('"', "'")),
        ("train.steps=1.5", "train.steps = 1.5: expected a whole number"),
        ("train.steps=true", "train.steps = true: expected a whole number"),
        ('train.steps="10"', 'train.steps = "10": expected a whole number'),
        ("train.steps=0", "train.steps = 0: expected 1 or more"),
        ("optimizer.learning_rate=true", "optimizer.learning_rate = true: expected a number"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate = -1.0: expected 0 or more"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate = nan: expected a finite number"),
        ("rollout.temperature=0", "rollout.temperature = 0.0: expected 1e-06 to 1000000"),
        ("rollout.group_size=0", "rollout.group_size = 0: expected 1 or more"),
        ("run.dir=3", 'run.dir = 3: expected a text in quotes, "..."'),
        ('run.dir=""', 'run.dir = "": expected some text'),
        ("model.dtype=float16", 'model.dtype = "float16": expected "float32" or "bfloat16"'),
        ("mesh.platform=gpus", 'mesh.platform = "gpus": expected "auto" or "cpu" or "gpu" or'),
        ("train=3", "train = 3: expected a table, [train], as train = { steps = ... }"),
        ("loss.kl=3", 'loss.kl = 3: expected a table, { use = "..." }'),
        ("loss.kl.beta=1", 'loss.kl = {"beta": 1}: names no part; add use = "..."'),
        ("recipe=gropo", "recipe: unknown recipe 'gropo': did you mean 'grpo'?"),
        ("rewards=[]", 'rewards = []: expected a list of tables, rewards = [{ use = "..." }]'),
        ("rewards.0.weigth=1", "rewards[0].weigth: unknown key; did you mean weight?"),
        ("rewards.0.use=arithmetics", "rewards[0]: unknown reward 'arithmetics': did you"),
        ("rewards.0.scale=2", "rewards[0]: rewards.arithmetic: no option 'scale'"),
        ("rewards.0.use=mine.py", "unknown reward 'mine.py': name its function too, as mine.py:"),
        ("recipe=mine.py", "recipe: unknown recipe 'mine.py': name its function too, as mine.py:"),
        ("rewards.0.use=mine.py:f", "rewards[0]: there is no file"),
        ('advantage=["sign"]', 'advantage = ["sign"]: expected a list of tables'),
        ('advantage=[{use="sing"}]', "advantage[0]: unknown part 'sing': did you mean 'sign'?"),
        ('advantage=[{use="sum_rewards"}, {use="sing"}]', "advantage[1]: unknown part 'sing'"),
        ("data.path=task:aritmetic:train", "unknown task 'aritmetic': did you mean 'arithmetic'?"),
        ("data.path=task:arithmetic:trian", "no split 'trian': take train or test"),
        ("data.path=rows.csv", "there is no such file; relative paths begin at the folder of"),
        ("data.path=rows.txt", "does not exist; give a .jsonl, .csv or .parquet file, a folder"),
        ("data.split=test", 'data.split: "task:arithmetic:train" has none; leave it out'),
        ("eval.split=test", 'eval.split = "test": there is nothing to evaluate on; name eval.data'),
        ("data.delimiter=;", 'data.delimiter = ";": no .csv file is read; leave it out'),
        ('data.prompt="{a"', "data.prompt = '{a': the brace at character 0 has no partner"),
        ("data.chat_template=chat.jinja", "there is no such file; give a Jinja file"),
        ("data.chat_template_kwargs=3", "= 3: expected a table, { name = value }"),
        ("data.too_long=cut", 'data.too_long = "cut": expected "error" or "drop"'),
        ("model.revision=v1", "is a local path; leave it out, or name a model on the hub"),
        ("eval.data=rows.jsonl", "there is no such file; relative paths begin at the folder of"),
        ("eval.every=5", "eval.every = 5: there is nothing to evaluate on; name eval.data"),
        ("optimizer.warmup_steps=11", "optimizer.warmup_steps = 11: more than train.steps = 10"),
        ("train.minibatches=3", "train.minibatches = 3: does not divide rollout.prompts_per_step"),
        ("train.num_iterations=0", "train.num_iterations = 0: expected 1 or more"),
        ("optimizer.state_dtype=float16", '"float16": expected "float32" or "bfloat16"'),
        ("optimizer.use=moun", "optimizer.use = 'moun': optax has no such optimizer; try muon"),
        ("rollout.group_size=1", "rollout.group_size = 1: grpo compares the samples of a prompt"),
        ("train.steps", "--set train.steps: expected table.key=value"),
        ("train.steps=True", "--set train.steps=True: True would be a text; write true"),
        ("data.chat_template_kwargs.thinks=False", "False would be a text; write false"),
        ("data.system=null", "--set data.system=null: null would be a text; write nothing"),
        ("loss.entropy=None", "None would be a text; write nothing behind the =, which leaves"),
        ("optimizer.b2=.5", "--set optimizer.b2=.5: .5 would be a text; write 0.5"),
        ("train.steps=[1", "--set train.steps=[1: the value is not TOML"),
        ("data.prompt={a} b", """; a text is quoted twice, --set 'data.prompt="{a} b"'"""),
        ("run.dir.x=1", "--set run.dir.x=1: run.dir.x does not lead to a key of the config"),
        ("rewards.3.weight=1", "rewards.3.weight does not lead to a key of the config"),
    ],
)
def test_a_mistake_is_one_problem_that_says_where_and_what_to_do(override, message):
    (problem,) = problems(override)
    assert message in problem


def test_warm_up_and_schedules_count_the_updates_of_all_steps():
    several = ("train.num_iterations=3", "train.minibatches=2")
    assert read(*several, "optimizer.warmup_steps=60").train.updates == 60
    (problem,) = problems(*several, "optimizer.warmup_steps=61")
    assert "train.steps x train.num_iterations x train.minibatches = 60 updates" in problem


def test_all_mistakes_come_in_one_message():
    with pytest.raises(ConfigError) as caught:
        read("train.stepz=3", "rollout.group_sise=3", "model.dtype=int8", "recipe=gropo")
    assert str(caught.value).splitlines()[0] == "config: 4 problems"
    for word in ("train.steps?", "rollout.group_size?", "bfloat16", "'grpo'?"):
        assert word in str(caught.value)


def test_a_local_folder_has_no_revision(tmp_path):
    (problem,) = problems(f"data.path={tmp_path}", "data.revision=v1")
    assert problem.startswith('data.revision: "/')
    assert problem.endswith(" has none; leave it out")


def test_a_run_may_be_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert read("run.dir=~/runs/x").run.dir == "/home/me/runs/x"
    assert read("run.dir=runs/~x").run.dir == "runs/~x"


def test_dates_of_toml_are_texts_at_any_depth():
    got = read("data.chat_template_kwargs={day=2026-11-25, more=[{at=09:30:00}]}")
    assert got.data.chat_template_kwargs == {"day": "2026-11-25", "more": [{"at": "09:30:00"}]}
    assert read("data.template_time=2026-11-25T09:30:00").data.template_time == (
        "2026-11-25T09:30:00"
    )
    assert files.entries(files.to_tables(got))  # JSON of all of it
    assert files.resume_difference(got, files.from_text(files.to_toml(got), "here")) == []


def test_a_misspelt_required_key_is_not_reported_missing_too():
    raw = tomllib.loads(MINIMAL)
    raw["rolout"] = raw.pop("rollout")
    raw["train"] = {"stepz": 3}
    with pytest.raises(ConfigError) as caught:
        files.from_dict(raw)
    assert len(caught.value.problems) == 2


def test_missing_keys_are_named_with_what_belongs_there():
    with pytest.raises(ConfigError) as caught:
        files.from_dict({})
    messages = caught.value.problems
    assert "rollout.group_size: missing; expected a whole number, 1 or more" in messages
    assert len(messages) == 9


def test_a_recipe_beside_a_chain_is_a_contradiction():
    (problem,) = problems("recipe=sign", 'advantage=[{use="sum_rewards"}]')
    assert "both given" in problem


def test_a_recipe_that_is_set_replaces_a_chain_and_is_replaced_by_one():
    chain = [{"use": "sum_rewards"}, {"use": "sign"}]
    with_chain = tables(advantage=chain)
    for got in (
        files.from_dict(with_chain, ["recipe = dr_grpo"]),
        make_config(with_chain, {"recipe": "dr_grpo"}),
    ):
        assert (got.recipe, got.advantage) == ("dr_grpo", None)
    set_chain = 'advantage=[{use="sum_rewards"}, {use="sign"}]'
    for got in (
        files.from_dict(tables(recipe="dr_grpo"), [set_chain]),
        make_config(tables(recipe="dr_grpo"), {"advantage": chain}),
        files.from_dict(with_chain, ["advantage.1.threshold=0.5"]),
    ):
        assert got.recipe is None
        assert got.advantage is not None
        assert [part["use"] for part in got.advantage] == ["sum_rewards", "sign"]
    with pytest.raises(ConfigError, match="are both given"):
        make_config(tables(), {"recipe": "grpo", "advantage": chain})


def test_a_chain_stands_in_the_place_of_the_default_recipe():
    got = read('advantage=[{use="sum_rewards"}, {use="sign", threshold=0.5}]')
    assert got.recipe is None
    assert got.advantage == ({"use": "sum_rewards"}, {"use": "sign", "threshold": 0.5})


def test_one_sample_per_prompt_is_enough_for_sign():
    assert read("rollout.group_size=1", "recipe=sign").rollout.group_size == 1


def test_two_rewards_of_one_name_are_refused_until_one_is_named():
    (problem,) = problems('rewards=[{use="arithmetic"}, {use="arithmetic"}]')
    assert problem.startswith("rewards[1]: 'arithmetic' is the name of rewards[0] too")
    got = read('rewards=[{use="arithmetic"}, {use="arithmetic", name="again", weight=2}]')
    assert [(reward.name, reward.weight) for reward in got.rewards] == [(None, 1), ("again", 2)]


def test_overrides_are_toml_or_plain_text_and_reach_into_lists():
    got = read("run.dir=runs/7", "rewards.0.weight=2", "train.seed=3", "train.seed=4")
    assert got.run.dir == "runs/7"
    assert got.rewards[0].weight == 2
    assert got.train.seed == 4


def test_options_alone_are_those_of_the_default_part():
    assert read("loss.surrogate.high=1").loss.surrogate == {"use": "clip", "high": 1}


def test_another_part_does_not_inherit_the_options_of_the_one_before():
    bounds = "loss.surrogate={ use = 'clip', low = 0.1, high = 0.3 }"
    assert read(bounds, "loss.surrogate.use=cispo").loss.surrogate == {"use": "cispo"}
    surrogate = read(bounds, "loss.surrogate.use=clip").loss.surrogate
    assert surrogate == {"use": "clip", "low": 0.1, "high": 0.3}
    changed = make_config(read(bounds), {"loss.surrogate.use": "gspo"})
    assert changed.loss.surrogate == {"use": "gspo"}
    replacement = read("loss.surrogate.use=cispo", "loss.surrogate.high=4.0").loss.surrogate
    assert replacement == {"use": "cispo", "high": 4.0}
    before = tables(recipe={"use": "grpo", "eps": 1e-4}, rewards=[{"use": "length", "cache": 8}])
    before["rewards"][0]["weight"] = 2.0
    replaced = files.from_dict(before, ["recipe.use=sign", "rewards.0.use=arithmetic"])
    assert (replaced.recipe, replaced.rewards[0].options) == ({"use": "sign"}, {})
    assert replaced.rewards[0].weight == 2.0


def test_another_optimizer_keeps_its_own_options_alone_however_it_is_written():
    before = read("optimizer.weight_decay=0.1", "optimizer.clip_norm=2.0")
    nested = {"optimizer": {"b1": 0.8, "use": "adam"}}
    dotted = {"optimizer.use": "adam", "optimizer.b1": 0.8}
    for optimizer in (make_config(before, nested).optimizer, make_config(before, dotted).optimizer):
        assert optimizer.options == {"b1": 0.8}
        assert optimizer.clip_norm == 2.0


def test_values_of_python_are_those_of_toml(tmp_path):
    changes = {
        "run": {"dir": tmp_path / "r"},
        "train": {"steps": np.int64(7)},
        "optimizer": {"learning_rate": np.float32(1e-6), "b2": jnp.asarray(0.5)},
        "rollout.stop_strings": np.array(["a", "b"]),
    }
    config = make_config(tables(), changes)
    assert config.run.dir == str(tmp_path / "r")
    assert (config.train.steps, type(config.train.steps)) == (7, int)
    assert (config.optimizer.learning_rate, config.optimizer.options) == (1e-6, {"b2": 0.5})
    assert config.rollout.stop_strings == ("a", "b")
    assert files.from_text(files.to_toml(config), "run") == config


def test_none_from_python_leaves_a_key_or_a_table_unset():
    before = read('loss.kl={use="k2", beta=0.1}', "eval.data=task:arithmetic:test", "eval.every=5")
    assert make_config(before, {"loss": {"kl": None}}).loss.kl is None
    assert make_config(before, {"eval": None, "rollout.slots": None}).eval == keys.EvalKeys()
    assert make_config({**tables(), "recipe": None}).recipe == "grpo"
    with pytest.raises(ConfigError, match=r"train\.steps = null: expected a whole number"):
        make_config(before, {"train.steps": None})
    with pytest.raises(ConfigError, match="evall: unknown key"):
        make_config(before, {"evall": None})


def test_nothing_behind_an_override_leaves_a_key_or_a_table_unset():
    before = tables(loss={"kl": {"use": "k2", "beta": 0.1}}, eval={"data": "task:sums:test"})
    got = files.from_dict(before, ["loss.kl=", "eval=", "data.system = ", "data.answer="])
    assert (got.loss.kl, got.eval.data, got.data.system) == (None, None, None)
    assert got.data.answer == ""
    assert files.from_dict(before, ["eval.data="]).eval == keys.EvalKeys()
    got = files.from_dict({**before, "environment": "a.b:C", "tools": ["python"]}, ["environment="])
    assert (got.environment, got.tools) == (None, ("python",))
    assert read("recipe=dapo", "advantage=", "tools=").recipe == "dapo"
    chain = {"advantage": [{"use": "sum_rewards"}]}
    assert files.from_dict({**before, **chain}, ["recipe="]).method is None
    assert problems("rewards=")[0].startswith("rewards: missing; give at least one")
    (problem,) = problems("model.dtype=")
    assert problem.startswith('model.dtype = "": expected')


def test_tables_of_any_kind_are_changed_key_by_key():
    raw = {
        name: types.MappingProxyType(v) if isinstance(v, dict) else v
        for name, v in tables().items()
    }
    changed = make_config(raw, {"rollout": {"group_size": 2}})
    assert changed == read("rollout.group_size=2")


@pytest.mark.parametrize("name", ["train.steps.more", "rewards.5.weight", "rewards.first.weight"])
def test_a_name_from_python_that_leads_nowhere_is_named(name):
    with pytest.raises(ConfigError, match=rf"{name}: does not lead to a key of the config"):
        make_config(read(), {name: 1})


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (
            {"rewards": len},
            r"rewards is a builtin_function_or_method: give a list, rewards=\[len\]",
        ),
        ({"rewards": "math"}, r"rewards is a str: give a list, rewards=\['math'\]"),
        (
            {"rewards": iter([len])},
            r"rewards is a list_iterator: give a list, rewards=\[\*rewards\]",
        ),
        ({"tools": len}, r"tools is a builtin_function_or_method: give a list, tools=\[len\]"),
        ({"rewards": [{"use": "math"}]}, "rewards holds a table: give functions and names"),
        ({"advantage": "grpo"}, 'advantage is a str: give a chain, .* recipe="grpo"'),
        ({"advantage": lambda signal, rollouts: signal}, "advantage is a function: give a chain"),
    ],
)
def test_an_object_from_python_of_another_kind_is_refused_with_what_to_write(objects, message):
    with pytest.raises(InputError, match=message):
        files.refuse_other_objects(
            **{**dict.fromkeys(("rewards", "advantage", "tools")), **objects}
        )
    files.refuse_other_objects([len, "math"], None, ())
    files.refuse_other_objects({"a": len}, None, ["python"])


def test_other_keys_of_the_optimizer_are_options_of_the_factory():
    assert read("optimizer.b2=0.95").optimizer.options == {"b2": 0.95}
    muon = read("optimizer.use=muon", "optimizer.beta=0.9").optimizer  # a name of TRL's too
    assert muon.options == {"beta": 0.9}


def test_paths_begin_at_the_folder_of_the_file_and_those_of_overrides_here(tmp_path, monkeypatch):
    file_folder, working_folder = tmp_path / "there", tmp_path / "here"
    for folder in (file_folder, working_folder):
        folder.mkdir()
        (folder / "mine.py").touch()
    (file_folder / "rows.jsonl").touch()
    text = MINIMAL.replace('use = "arithmetic"', 'use = "mine.py:score"')
    (file_folder / "a.toml").write_text(text.replace("task:arithmetic:train", "rows.jsonl"))
    monkeypatch.chdir(working_folder)
    got = files.load("../there/a.toml", ["loss.surrogate.use=mine.py:mine"])
    assert got.model.path == f"{file_folder}/base"
    assert got.data.path == got.resolve("rows.jsonl") == f"{file_folder}/rows.jsonl"
    assert got.own_files == (file_folder / "mine.py", working_folder / "mine.py")
    assert got.run.dir == "runs/x"
    assert got.resolve("task:arithmetic:train") == "task:arithmetic:train"


def test_a_name_on_the_hub_stays_unless_a_path_of_that_name_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").touch()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "model").mkdir()
    named = ["model.path=Qwen/Qwen3-0.6B", "data.path=openai/gsm8k", "data.split=train"]
    got = read(*named, "eval.data=data/rows.jsonl", "model.revision=v1.0")
    assert (got.model.path, got.data.path) == ("Qwen/Qwen3-0.6B", "openai/gsm8k")
    assert got.eval.data == f"{tmp_path}/data/rows.jsonl"
    assert read("model.path=own/model").model.path == f"{tmp_path}/own/model"
    assert read("model.path=./own/base").model.path == f"{tmp_path}/own/base"


def test_an_empty_answer_and_a_table_of_any_names_are_values():
    changes = ['data.answer=""', "data.chat_template_kwargs.enable_thinking=false"]
    got = read(*changes)
    assert got.data.answer == ""
    assert got.data.chat_template_kwargs == {"enable_thinking": False}
    assert files.resume_difference(read(), got) == [
        'data.answer: "answer" -> ""',
        "data.chat_template_kwargs.enable_thinking: not set -> false",
    ]


def test_system_text_without_a_template_is_refused():
    (problem,) = problems("data.chat_template=none", "data.system=Be brief.")
    assert 'data.system: nothing reads it where data.chat_template = "none"' in problem


def test_a_written_config_is_read_back_equal(tmp_path):
    got = read(
        'advantage=[{use="sum_rewards", arithmetic=2.0}, {use="sign"}]',
        'loss.kl={use="k2", beta=0.1}',
        "eval.data=task:arithmetic:test",
        "eval.prompts=5",
        "optimizer.b1=0.8",
        "train.tokens_per_micro_batch=4096",
        "data.chat_template_kwargs.enable_thinking=false",
        'data.prompt="{prompt} Think."',
    )
    file = tmp_path / "config.toml"
    file.write_text(files.to_toml(got))
    assert files.load(file) == got
    assert tomllib.loads(files.to_toml(got))["optimizer"]["schedule"] == "constant"


def test_a_config_whose_environment_rewards_is_read_back_equal():
    tables = {name: value for name, value in tomllib.loads(MINIMAL).items() if name != "rewards"}
    config = files.from_dict({**tables, "environment": "gymnasium:FrozenLake-v1"})
    assert config.rewards == ()
    assert files.from_dict(tomllib.loads(files.to_toml(config))) == config
    with pytest.raises(ConfigError, match=r"rewards = \[\]: expected a list of tables"):
        files.from_dict({**tables, "rewards": []})


def test_evaluation_may_not_change_where_it_says_when_the_reference_is_reset():
    same = ('loss.kl={use="k2", beta=0.1}', "eval.data=task:arithmetic:test", "eval.every=2")
    for patience, count in ((0, 0), (3, 1)):
        before = (*same, f"reference.reset_patience={patience}")
        difference = files.resume_difference(read(*before), read(*before, "eval.every=4"))
        assert len(difference) == count


def test_a_run_may_go_on_longer_and_be_measured_otherwise():
    unlike = (
        "rewards.0.timeout=5",
        "rewards.0.on_error=unscored",
        "checkpoint.keep=5",
        "mesh.fsdp=2",
        "run.dir=b",
    )
    new = read("train.steps=20", "eval.data=task:arithmetic:test", "run.dir=b", *unlike)
    assert files.resume_difference(read(), new) == []


def test_every_other_change_is_listed_with_both_values():
    new = read("rollout.group_size=8", "optimizer.weight_decay=0.1", "recipe=dr_grpo")
    assert files.resume_difference(read(), new) == [
        "optimizer.weight_decay: not set -> 0.1",
        'recipe: "grpo" -> "dr_grpo"',
        "rollout.group_size: 4 -> 8",
    ]


def test_steps_may_not_change_under_a_schedule_that_ends_with_them():
    old = read("optimizer.schedule=linear")
    new = read("optimizer.schedule=linear", "train.steps=20")
    assert files.resume_difference(old, new) == ["train.steps: 10 -> 20"]


def test_the_updates_of_a_step_may_not_change():
    new = read("train.num_iterations=2", "optimizer.state_dtype=bfloat16")
    assert files.resume_difference(read(), new) == [
        'optimizer.state_dtype: "float32" -> "bfloat16"',
        "train.num_iterations: 1 -> 2",
    ]


def test_a_file_that_is_not_there_or_not_toml_is_said(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        files.load(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(ConfigError, match=r"not TOML: .*line 1"):
        files.load(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_text("[train]\nsteps = 3\nsteps = 4\n")
    with pytest.raises(ConfigError, match=r"not TOML: a key stands twice \(at line 3"):
        files.load(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        files.load("quickstrat")
    for name in ("bad", "bad.tml"):
        with pytest.raises(ConfigError, match=r"no such file; did you mean .*bad\.toml\?"):
            files.load(tmp_path / name)
    with pytest.raises(ConfigError, match="is a folder; give a TOML file"):
        files.load(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"is a folder; the config of the run in it is .*\.toml"):
        files.load(tmp_path)


def test_every_shipped_config_loads_by_name_and_begins_its_paths_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "quickstart" in files.shipped()
    for name, file in files.shipped().items():
        got = files.load(name)
        assert got.source == file
        assert got.folder == Path.cwd()
        assert not got.model.path.startswith(os.fspath(keys.SHIPPED))


def test_a_config_that_a_run_folder_holds_may_begin_with_the_mark_of_its_encoding():
    text = files.to_toml(read())
    assert files.from_text(f"\ufeff{text}", "RUN/config.toml") == files.from_text(text, "RUN")
