"""Own code by name."""

from __future__ import annotations

import sys

import pytest

from jaxgrpo.config.own_code import file_of, is_reference, load, short_name
from jaxgrpo.core.errors import InputError


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


def test_files_of_one_name_in_two_folders_stay_apart(folder):
    other = folder / "other"
    other.mkdir()
    (other / "mine.py").write_text("def triple(x):\n    return 0\n")
    assert load("other/mine.py:triple", folder)(2) == 0
    assert load("mine.py:triple", folder)(2) == 6


def test_a_function_of_an_installed_module_is_found():
    assert load("os.path:basename")("a/b") == "b"


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


def test_a_file_that_fails_keeps_its_own_error_and_may_be_loaded_again(folder):
    file = folder / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        load("broken.py:f", folder)
    assert caught.value.__notes__ == ["while loading 'broken.py:f'"]
    file.write_text("def f():\n    return 1\n# longer, so that no cached bytecode is taken\n")
    assert load("broken.py:f", folder)() == 1


def test_names_tell_own_code_from_built_in_parts():
    assert [is_reference(name) for name in ("a.py:f", "a.b:f", "grpo")] == [True, True, False]
    assert [file_of(name) for name in ("x/a.py:f", "a.b:f", "grpo")] == ["x/a.py", None, None]
    assert [short_name(name) for name in ("x/a.py:f", "a.b:g", "grpo")] == ["f", "g", "grpo"]
