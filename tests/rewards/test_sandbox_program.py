"""What runs in bubblewrap, without bubblewrap around it."""

import json
import subprocess
import sys

import pytest

from jaxgrpo.rewards import bubblewrap, programs


def run_bare(content: str, role: str, *options: str) -> tuple[int, str]:
    """The exit code and the output of what runs in bubblewrap, without that around it."""
    words = bubblewrap.PROGRAM.read_text(), role, "5", str(programs.MEMORY), "0", *options
    command = [sys.executable, "-P", "-s", "-S", "-B", "-c", *words]
    process = subprocess.run(command, input=content, capture_output=True, text=True)
    return process.returncode, process.stdout


def test_an_annotation_that_names_nothing_is_an_error_as_in_python():
    """Annotations were texts, as in the file that runs programs: a program that Python does not
    run, for a lack of `from typing import List`, passed."""
    code = "def double(value: {}[int]):\n    return value * 2\n"
    call = '\n["call", "double", ["tuple", 3], ["dict"]]\n'
    right, wrong = code.format("list"), code.format("List")
    assert run_bare(right, "run", "0", str(len(right))) == (0, "")
    assert run_bare(wrong, "run", "0", str(len(wrong))) == (1, "")
    assert "NameError" in run_bare(wrong, "run", "1", str(len(wrong)))[1]
    assert run_bare(json.dumps(right) + call, "calls") == (0, '["value", 6]\n')
    assert run_bare(json.dumps(wrong) + call, "calls") == (1, "")


def test_a_program_sees_no_arguments_of_what_runs_it():
    """One that reads a file where one is named took ours for a file."""
    code = "import sys\nprint(sys.argv, input())\n"
    assert run_bare(f"{code}3\n", "run", "0", str(len(code))) == (0, "['program.py'] 3\n")


@pytest.mark.parametrize(("word", "exit_code"), [("exit()", 0), ("quit(3)", 3), ("exit", 0)])
def test_a_program_may_end_by_exit_and_quit(word, exit_code):
    """They were missing, and a program that ended so early got 0."""
    code = f"print(1)\n{word}\n"
    expected = exit_code, "1\n"
    assert run_bare(code, "run", "0", str(len(code))) == expected


@pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration", "ValueError"])
def test_what_a_program_raises_ends_no_loop_of_the_tests(error):
    """`all(map(...))` held for no values where the program raised StopIteration."""
    cases = [
        "assert all(map(lambda pair: double(pair[0]) == pair[1], [(3, 6)]))",
        "for _ in map(double, [3]):\n    pass",
    ]
    lines = [["", cases, ["double"]], *[["error", error, "no"]] * len(cases)]
    exit_code, printed = run_bare("".join(f"{json.dumps(line)}\n" for line in lines), "tests")
    verdicts = [json.loads(line)[0] for line in printed.splitlines()]
    assert (exit_code, verdicts) == (0, ["call", "failed"] * len(cases))


@pytest.mark.parametrize(
    ("case", "verdicts"),
    [
        ("assert double(lambda: 3) == 6", ["broken"]),
        ("assert double([{3: lambda: 3}]) == 6", ["broken"]),
        ("assert double(value=len) == 6", ["broken"]),
        ("assert double(3) == 6 and double(len) == 6", ["call", "broken"]),
        ("assert double(double(number) for number in [3]) == 6", ["call", "failed"]),
        ("assert double(3) == 6 and len(3)", ["call", "failed"]),
    ],
)
def test_tests_that_pass_what_is_no_plain_value_are_broken(case, verdicts):
    """Programs got 0 by them, whatever they did."""
    answer = ["error", "TypeError", "no"] if "for" in case else ["value", 6]
    lines = [["", [case], ["double"]], answer]
    exit_code, printed = run_bare("".join(f"{json.dumps(line)}\n" for line in lines), "tests")
    assert (exit_code, [json.loads(line)[0] for line in printed.splitlines()]) == (0, verdicts)


def test_what_a_program_returns_that_is_no_plain_value_is_its_error():
    code = "def double(value):\n    return double\n"
    call = '\n["call", "double", ["tuple", 3], ["dict"]]\n'
    exit_code, printed = run_bare(json.dumps(code) + call, "calls")
    answer = ["error", "NotPlain", "a function is no plain value"]
    assert (exit_code, json.loads(printed)) == (0, answer)


@pytest.mark.parametrize(
    "code",
    [
        "import ctypes",
        "import _ctypes",
        "class Name(str):\n    __hash__ = str.__hash__\n    __eq__ = lambda *_: False\n"
        "__import__(Name('_ctypes'))",
        "import _imp, importlib.util as util\n"
        "place = util.find_spec('_json').origin.replace('_json', '_ctypes')\n"
        "_imp.create_dynamic(util.spec_from_file_location('any._ctypes', place))",
        "import os, sys\nos.execv(sys.executable, ['python', '-c', 'import _ctypes'])",
        "import _xxsubinterpreters\n_xxsubinterpreters.create()",
        "import sys\nframe = sys._getframe()\n"
        "while frame:\n    for value in [*frame.f_globals.values(), *frame.f_locals.values()]:\n"
        "        if getattr(value, '__name__', '') == 'refuse':\n"
        "            value.__code__ = (lambda event, args: None).__code__\n"
        "    frame = frame.f_back\nimport _ctypes",
        "import gc\ngc.get_objects()",
        "import gc\ngc.get_referrers(1)",
        "try:\n    import ctypes\nexcept ImportError as error:\n"
        "    names = error.__traceback__.tb_next.tb_frame.f_globals\n"
        "    names.update(str=list, ImportError=len, PermissionError=len)\nimport _ctypes",
    ],
)
def test_a_program_has_no_ctypes_though_it_be_a_part_of_python(code):
    """A Python that has it built in has no file of it that could be hidden."""
    assert run_bare(code, "run", "0", str(len(code))) == (1, "")


@pytest.mark.slow
def test_the_library_is_there_without_ctypes():
    modules = """
        argparse ast asyncio base64 bisect calendar collections concurrent.futures copy csv ctypes
        curses dataclasses datetime decimal difflib doctest email fractions functools hashlib heapq
        html http.client inspect io itertools json logging math multiprocessing.pool numbers
        operator os pathlib pickle platform pprint queue random re secrets socket sqlite3
        statistics string struct subprocess tempfile textwrap threading time timeit traceback
        typing unittest urllib.request uuid xml.etree.ElementTree zipfile zoneinfo
    """
    code = (
        f"import importlib\nfor name in {modules!r}.split():\n    try:\n        "
        "importlib.import_module(name)\n    except ImportError:\n        print(name)\n"
    )
    assert run_bare(code, "run", "0", str(len(code))) == (0, "ctypes\n")
