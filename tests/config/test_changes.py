"""Options of commands change a config key by key: what they set and unset, and where they end."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as some
from minimal_config import problems, read, tables

from jaxgrpo.config import files
from jaxgrpo.config.files import make_config
from jaxgrpo.core.errors import ConfigError

TEXTS = some.text(some.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = some.integers(-(2**63), 2**63 - 1) | some.floats(allow_nan=False)
VALUES = some.recursive(
    some.booleans() | NUMBERS | TEXTS,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(some.dictionaries(TEXTS, VALUES, max_size=4))
def test_what_is_written_is_read_as_it_was(content):
    """Beside a library that writes TOML."""
    assert tomllib.loads(files.write_toml(content)) == content
    assert tomllib.loads(tomli_w.dumps(content)) == content


@pytest.mark.slow
def test_a_config_is_written_where_no_package_for_it_is_installed():
    code = (
        "import sys; sys.modules['tomli_w'] = None\n"
        "from jaxgrpo.config import files\n"
        "print(files.to_toml(files.load('quickstart')))"
    )
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert files.from_text(text.stdout, "run") == files.load("quickstart")


def test_a_name_of_a_folder_here_means_it_from_every_directory(tmp_path, monkeypatch):
    working, beside = tmp_path / "working", tmp_path / "beside"
    for folder in (working / "own" / "base", working / "own" / "rows", beside / "own"):
        folder.mkdir(parents=True)
    data = {"path": [{"path": "own/rows"}, {"path": "task:arithmetic:train"}, {"path": "a/hub"}]}
    inputs = {"model": {"path": "own/base"}, "data": data, "eval": {"data": "own/rows"}}
    (beside / "a.toml").write_text(tomli_w.dumps(tables(**inputs)))
    monkeypatch.chdir(working)
    config = files.load(beside / "a.toml")
    monkeypatch.chdir(tmp_path)
    for got in (config, files.from_text(files.to_toml(config), "config.toml")):
        assert got.model.path == f"{working}/own/base"
        assert got.data.paths == (f"{working}/own/rows", "task:arithmetic:train", "a/hub")
        assert got.eval.data == f"{working}/own/rows"
    assert files.load(beside / "a.toml").model.path == "own/base"
    (beside / "own" / "base").mkdir()
    monkeypatch.chdir(working)
    assert files.load(beside / "a.toml").model.path == f"{beside}/own/base"


FULL: dict[str, Any] = tables(
    rewards=[{"use": "length", "timeout": 5, "name": "a", "cache": 4}],
    scores=[{"name": "t", "policy": "reference", "temperature": 0.5}],
    loss={"kl": {"use": "k2", "beta": 0.1}, "surrogate": {"use": "clip", "low": 0.1}},
    data={"path": [{"path": "task:arithmetic:train", "name": "x"}]},
    optimizer={"learning_rate": 1e-3, "weight_decay": 0.1},
    eval={"data": "task:arithmetic:test", "formats": {"a": "x"}},
    tracking={"wandb": {"project": "p", "name": "n"}},
)


@pytest.mark.parametrize(
    ("option", "place", "left"),
    [
        ("rewards.0.timeout=", ("rewards", 0, "timeout"), None),
        ("rewards.0.name= ", ("rewards", 0, "name"), None),
        ("rewards.0.cache=", ("rewards", 0, "options"), {}),
        ("scores.0.temperature=", ("scores", 0, "temperature"), None),
        ("data.path.0.name=", ("data", "path", 0, "name"), None),
        ("optimizer.weight_decay=", ("optimizer", "options"), {}),
        ("loss.surrogate.low=", ("loss", "surrogate"), {"use": "clip"}),
        ("eval.formats.a=", ("eval", "formats"), {}),
        ("tracking.wandb.name=", ("tracking", "wandb"), {"project": "p"}),
    ],
)
def test_nothing_behind_a_key_unsets_it_at_any_depth(option, place, left):
    value: Any = files.from_dict(FULL, [option])
    for name in place:
        value = value[name] if isinstance(value, tuple) else getattr(value, name)
    assert value == left


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("optimizer.weight_decai=", "is not set, so that nothing can be unset; did you mean 'weig"),
        ("eval.formats.b=", "eval.formats.b is not set, so that nothing can be unset; Known: a"),
        ("loss.entropy.beta=", "loss.entropy.beta is not set, so that nothing can be unset"),
        ("train.stepz=", "train.stepz: unknown key; did you mean train.steps?"),
        ("loss.kl.use=", 'loss.kl.use = "": expected a text in quotes'),
        ('eval.formats.a=""', 'eval.formats.a = "": every text fits an empty pattern; write'),
        (
            "rewards.1.use=length",
            "to a key of the config: rewards has 1 entry, rewards.0; for more give the list, rewa",
        ),
        ("train.steps.most=1", "to a key of the config: train.steps = 10 has no entries"),
        (
            "train.steps=5\ntrain.seed=3",
            "behind the value is a line break, and more: give each key",
        ),
    ],
)
def test_an_option_that_leads_nowhere_says_where_it_ends(option, message):
    with pytest.raises(ConfigError) as caught:
        files.from_dict(FULL, [option])
    assert message in "".join(caught.value.problems)


def test_an_option_of_a_part_that_is_a_name_alone_says_how_to_write_both():
    part = 'recipe = "grpo" is a text; write recipe = { use = "grpo", eps = 0.0001 }'
    (problem,) = problems("recipe=grpo", "recipe.eps=1e-4")
    assert problem.endswith(f"recipe.eps does not lead to a key of the config: {part}")
    with pytest.raises(ConfigError, match=r"recipe.eps: does not lead to a key of the config: rec"):
        make_config(read("recipe=grpo"), {"recipe.eps": 1e-4})
    (problem,) = problems("recipe=grpo", "recipe.eps=")
    assert problem.endswith(': recipe = "grpo" has no entries')


def test_a_name_in_quotes_may_hold_what_separates_names():
    goals = read('rollout.goals."<|a.b|>"=0.5', "rollout.goals.'c=d' = 0.5").rollout.goals
    assert goals == {"<|a.b|>": 0.5, "c=d": 0.5}
    assert read('rollout."slots"=5').rollout.slots == 5
    (problem,) = problems('"rollout.slots"=5')
    assert problem.startswith("rollout.slots: unknown key; write it without quotes")
    assert read('data.chat_template_kwargs.a="""b\nc"""').data.chat_template_kwargs == {"a": "b\nc"}
