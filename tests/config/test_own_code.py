"""Own code by name."""

from __future__ import annotations

import sys
from pathlib import Path

import minimal_config
import pytest

from jaxgrpo import advantages
from jaxgrpo.config.contenders import make_contenders
from jaxgrpo.config.files import from_dict, make_config, to_tables
from jaxgrpo.config.own_code import (
    find_source,
    forget_changed,
    is_reference,
    load,
    load_part,
    named_file,
    short_name,
    with_imports,
)
from jaxgrpo.core.errors import ConfigError, InputError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("FACTOR = 3\n")
    (tmp_path / "mine.py").write_text(
        "from helper_of_mine import FACTOR\ncalls = []\ndef triple(x):\n    return FACTOR * x\n"
    )
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("helper_of_mine", None)


def test_a_file_is_found_from_the_given_folder_and_may_import_what_lies_beside_it(folder):
    assert load("mine.py:triple", folder)(2) == 6


def test_an_absolute_path_needs_no_folder(folder):
    assert load(f"{folder}/mine.py:triple")(2) == 6


def test_a_file_is_run_once_however_often_it_is_named(folder):
    assert load("mine.py:triple", folder) is load("./mine.py:triple", folder)


def test_a_file_that_has_changed_is_run_again_once_it_is_forgotten(folder):
    first = load("mine.py:triple", folder)
    forget_changed()
    assert load("mine.py:triple", folder) is first
    (folder / "helper_of_mine.py").write_text("FACTOR = 1 + 9\n")
    assert load("mine.py:triple", folder)(2) == 6
    forget_changed()
    assert load("mine.py:triple", folder)(2) == 20
    helper = sys.modules["helper_of_mine"]
    (folder / "mine.py").write_text(
        "from helper_of_mine import FACTOR\ntriple = lambda x: -FACTOR\n"
    )
    forget_changed()
    assert load("mine.py:triple", folder)(2) == -10
    assert sys.modules["helper_of_mine"] is helper
    (folder / "mine.py").unlink()
    forget_changed()
    with pytest.raises(InputError, match="there is no file"):
        load("mine.py:triple", folder)


def test_a_module_of_another_folder_is_not_taken_for_the_one_beside_a_file(folder):
    load("mine.py:triple", folder)
    second = folder / "second"
    second.mkdir()
    for name in ("mine.py", "helper_of_mine.py"):
        (second / name).write_text((folder / name).read_text())
    with pytest.raises(
        InputError, match=r"imports helper_of_mine and would get .* and not .*second"
    ):
        load("mine.py:triple", second)
    del sys.modules["helper_of_mine"]
    sys.path.remove(str(folder))
    assert load("mine.py:triple", second)(2) == 6


def test_files_of_one_name_in_two_folders_stay_apart(folder):
    second_folder = folder / "other"
    second_folder.mkdir()
    (second_folder / "mine.py").write_text("def triple(x):\n    return 0\n")
    assert load("other/mine.py:triple", folder)(2) == 0
    assert load("mine.py:triple", folder)(2) == 6


def test_a_function_of_an_installed_module_is_found():
    assert load("os.path:basename")("a/b") == "b"


def test_a_part_may_be_finished_as_a_decorator_leaves_it(folder):
    (folder / "parts.py").write_text(
        "import jaxgrpo\n\n@jaxgrpo.transform\ndef kept(signal, rollouts):\n    return signal\n\n"
        "PAIR = 1, 2\n"
    )
    build = load_part(f"{folder}/parts.py:kept")
    assert (build.__name__, build().name) == ("kept", "kept")
    with pytest.raises(InputError, match="PAIR is a tuple: name a function"):
        load_part(f"{folder}/parts.py:PAIR")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("absent.py:f", "there is no file .*absent.py; .* holds helper_of_mine.py, mine.py"),
        ("mine.py:tripel", "no 'tripel': did you mean 'triple'"),
        ("mine.py:calls", "calls is a list: name a function"),
        ("mine.py:", "names no function"),
        ("triple", "names no function"),
        ("no_such_package.rewards:f", "no module 'no_such_package': install it, or name a file"),
    ],
)
def test_what_cannot_be_found_is_said(folder, reference, message):
    with pytest.raises(InputError, match=message):
        load(reference, folder)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 3\n1 / 0\n", "broken.py:<module>, line 2: 1 / 0): it raised ZeroDivisionError: div"),
        ("import sys\nsys.exit(0)\n", "line 2: sys.exit(0)): it raised SystemExit: 0"),
        ("def f(:\n", "broken.py, line 1: def f(:): it raised SyntaxError: invalid syntax"),
        ("import absent\n", "line 1: import absent): it raised ModuleNotFoundError: No module"),
        ("import bad_neighbour\n", "bad_neighbour.py, line 2: )): it raised SyntaxError: unmatch"),
        ("raise ValueError('x' * 50_000_000)\n", "it raised ValueError: xxx"),
        ("class E(BaseException): pass\nraise E('mine')\n", "it raised E: mine"),
    ],
)
def test_what_a_file_raises_is_one_message_and_it_may_be_loaded_again(folder, text, problem):
    (folder / "bad_neighbour.py").write_text("x = 3\n)\n")
    file = folder / "broken.py"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        load("broken.py:f", folder)
    message = str(caught.value)
    assert message.startswith("'broken.py:f' cannot be loaded (")
    assert problem in message
    assert "\n" not in message
    assert len(message) < 7000
    file.write_text(f"def f():\n    return 1\n# {'longer ' * len(text[:100])}\n")
    assert load("broken.py:f", folder)() == 1


def test_names_tell_own_code_from_built_in_parts():
    assert [is_reference(name) for name in ("a.py:f", "a.b:f", "grpo")] == [True, True, False]
    assert [named_file(name) for name in ("x/a.py:f", "a.b:f", "grpo")] == ["x/a.py", None, None]
    assert [short_name(name) for name in ("x/a.py:f", "a.b:g", "grpo")] == ["f", "g", "grpo"]


def test_the_files_of_own_code_are_those_beside_it_that_it_imports_and_theirs(tmp_path):
    texts = {
        "mine.py": "import helper, numpy, jaxgrpo\nfrom package.inner import deep\n",
        "helper.py": "import mine\nfrom package import name\n",
        "unused.py": "",
        "later.py": "",
        "package/__init__.py": "from . import near\nname = 1\n",
        "package/near.py": "from .inner.deep import x\n",
        "package/inner/deep.py": "def x():\n    import later\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    files = {str(file.relative_to(tmp_path)) for file in with_imports([tmp_path / "mine.py"])}
    assert files == texts.keys() - {"unused.py"}
    inner = with_imports([tmp_path / "package" / "near.py"])
    assert [file.name for file in inner] == ["near.py", "deep.py", "later.py"]
    (tmp_path / "broken.py").write_text("import helper\n(")
    for alone in ("broken.py", "missing.py"):
        assert with_imports([tmp_path / alone]) == (tmp_path / alone,)


def test_the_source_of_a_module_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "my_package" / "rewards.py").touch()
    (tmp_path / "my_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_source("my_package.rewards:score") == tmp_path / "my_package" / "rewards.py"
    assert find_source("my_package:score") == tmp_path / "my_package" / "__init__.py"
    assert find_source("my_module:score") == tmp_path / "my_module.py"
    assert find_source("a/mine.py:score") == Path("a/mine.py")
    for name in (
        "grpo",
        "python:score",
        "my_package.none:score",
        "no_such:score",
    ):
        assert find_source(name) is None
    transformers = find_source("transformers.models.auto:x")
    assert transformers is not None
    assert with_imports([transformers]) == (transformers,)  # installed: not followed


def test_own_code_that_a_config_names_lies_beside_it(tmp_path):
    named = {
        "eval": {"scorer": "mine.py:score"},
        "rewards": [{"use": "mine.py:score"}],
        "loss": {"surrogate": {"use": "mine.py:score"}},
        "recipe": "mine.py:score",
        "model": {"path": "./base", "family": "mine.py:score"},
    }
    with pytest.raises(ConfigError) as refused:
        from_dict(minimal_config.tables(**named), source=tmp_path / "run.toml")
    assert sum("there is no file" in problem for problem in refused.value.problems) == 5
    (tmp_path / "mine.py").touch()
    config = from_dict(minimal_config.tables(**named), source=tmp_path / "run.toml")
    expected = f"{tmp_path}/mine.py:score"
    uses = [config.rewards[0].use, config.loss.surrogate["use"], config.recipe]
    assert [config.eval.scorer, config.model.family, *uses] == [expected] * 5


@pytest.mark.parametrize("folder_name", ["code", "c++", "lr=1"])
def test_methods_of_an_atlas_name_code_beside_the_config(tmp_path, monkeypatch, folder_name):
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / folder_name
    folder.mkdir()
    (folder / "mine.py").write_text(
        "from jaxgrpo import advantages, losses\n"
        "def chain(): return advantages.chain(advantages.sum_rewards(), name='mine')\n"
        "def low_clip(): return losses.clip(low=0.1)._replace(name='low')\n"
    )
    methods = ["sign", "mine.py:chain", "grpo+loss.surrogate=mine.py:low_clip"]
    methods += ["mine.py:chain+loss.surrogate={ use = 'mine.py:low_clip' }"]
    tables = minimal_config.tables(atlas={"methods": methods})
    config = from_dict(tables, source=folder / "run.toml")
    assert config.own_files == (folder / "mine.py",)
    stored = from_dict(to_tables(config))  # as in the folder of a run
    assert stored.atlas == config.atlas
    contenders = make_contenders(stored.atlas.methods, "atlas.methods", tables, None, ())
    chains = [contender.chain.name for contender in contenders.values()]
    surrogates = [contender.objective.surrogate.name for contender in contenders.values()]
    assert [name == "mine" for name in chains] == [False, True, False, True]
    assert surrogates == ["clip", "clip", "low", "low"]


def test_an_object_of_python_is_asked_for_where_it_may_be_given_again():
    with pytest.raises(
        InputError, match=r"object mine: give it again, .*evaluate\(\.\.\., scorer="
    ):
        load("python:mine")


@pytest.mark.parametrize(
    ("more", "argument"),
    [
        ({"rewards": [len]}, "rewards=[...]"),
        ({"rewards": {"short": len}}, "rewards=[...]"),
        ({"rewards": [{"use": len}]}, "rewards=[...]"),
        ({"advantage": advantages.chain(advantages.sum_rewards())}, "advantage=chain(...)"),
        ({"recipe": advantages.chain(advantages.sum_rewards())}, "advantage=chain(...)"),
        ({"tools": [len]}, "tools=[...]"),
        ({"environment": Path}, "environment_factory=..."),
        ({"environment": {"game": Path}}, "environment_factory=..."),
    ],
)
def test_objects_of_python_in_a_config_are_told_which_argument_takes_them(more, argument):
    with pytest.raises(ConfigError) as refused:
        make_config(minimal_config.tables(**more))
    (problem,) = refused.value.problems
    assert problem.endswith(f"are given beside the config, train(config, {argument})")
