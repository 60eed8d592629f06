"""What Monty lacks of Python is counted as lacking, and what can be supplied is."""

import sys

import pytest

from jaxgrpo.rewards import monty, programs

PROBLEM = monty.find_problem()
pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=f"monty: {PROBLEM}")
TESTS = programs.make_tests("", ["assert double(3) == 6"])


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("callable(3)", "unsupported"),
        ("import sys\nsys.setrecursionlimit(9)", "unsupported"),
        ("from collections import OrderedDict", "unsupported"),
        ("int.from_bytes(b'a')", "unsupported"),
        ("raise KeyError(3)", "unsupported"),
        ("nothing", "failed"),
        ("import math\nmath.nothing", "failed"),
        ("from math import nothing", "failed"),
        ("[].nothing", "failed"),
    ],
)
def test_a_program_that_needs_what_monty_lacks_is_unsupported(program, problem):
    """It counted as a program with a mistake."""
    assert monty.run(program, "", 1.0, False).problem == problem
    body = program.replace("\n", "\n    ")
    called = f"def double(value):\n    {body}\n    return 2 * value"
    lack = problem if problem == "unsupported" else ""
    assert monty.judge(called, TESTS, 1.0, True) == programs.Verdict(0, 1, lack)


def test_a_lack_does_not_matter_where_the_tests_pass():
    program = "def double(value):\n    try:\n        vars()\n    except NameError:\n        pass\n"
    verdict = monty.judge(f"{program}    return 2 * value", TESTS, 1.0, True)
    assert verdict == programs.Verdict(1, 1)


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("assert callable(3) and double(3) == 6", "broken"),
        ("import sys\nsys.exit\nassert double(3) == 6", "broken"),
        ("double(3)\ncallable(3)", ""),
        ("assert nothing and double(3) == 6", ""),
    ],
)
def test_tests_that_need_what_monty_lacks_are_broken(case, problem):
    tests = TESTS._replace(cases=(case,))
    verdict = monty.judge("def double(value): return 2 * value", tests, 1.0, True)
    assert verdict == programs.Verdict(0, 1, problem)


def test_no_module_is_loaded_on_the_word_of_a_program():
    name = next(name for name in ("this", "antigravity") if name not in sys.modules)
    program = f"raise AttributeError(\"module '{name}' has no attribute 's'\")"
    assert monty.run(program, "", 1.0, False).problem == "failed"
    assert name not in sys.modules


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("exit()", ""),
        ("quit(0)", ""),
        ("exit(None)", ""),
        ("raise SystemExit", ""),
        ("exit(3)", "failed"),
        ("exit('no')", "failed"),
        ("raise SystemExit('no')", "failed"),
    ],
)
@pytest.mark.parametrize("shows_value", [False, True])
def test_a_program_in_monty_may_end_by_exit_and_quit(end, problem, shows_value):
    printed = monty.run(f"print(1)\n{end}\nprint(2)", "", 1.0, shows_value)
    assert printed == programs.Printed("1\n", problem)


@pytest.mark.parametrize("names", [" EOFError", " (EOFError, ValueError)", " Exception", ""])
def test_a_program_in_monty_reads_up_to_the_end_of_its_input(names):
    program = f"while True:\n    try:\n        print(input())\n    except{names}:\n        break\n"
    printed = monty.run(f"{program}print('end')", "1\n2\n", 1.0, False)
    assert printed == programs.Printed("1\n2\nend\n")


@pytest.mark.parametrize("error", ["IOError", "EnvironmentError", "EOFError"])
def test_exceptions_with_another_name_in_monty_are_raised_and_caught(error):
    raising = f"raise {error}('no')"
    caught = f"try:\n        {raising}\n    except {error}:\n        return 2 * value"
    program = f"def double(value):\n    {caught}"
    assert monty.judge(program, TESTS, 1.0, True) == programs.Verdict(1, 1)
    tests = TESTS._replace(cases=(f"try:\n    double(3)\nexcept {error}:\n    pass",))
    program = f"def double(value):\n    {raising}"
    assert monty.judge(program, tests, 1.0, True) == programs.Verdict(1, 1)


@pytest.mark.parametrize(
    ("program", "case"),
    [
        ("def first(count): return range(count)", "assert list(first(3)) == [0, 1, 2]"),
        ("def first(count): return range(count)", "assert first(3) == range(3)"),
        ("def first(count): return range(count, -2, -2)", "assert first(2) == range(2, -2, -2)"),
        ("def first(count): return iter([count])", "assert list(first(3)) == [3]"),
        ("def first(count): return {count: 1}.keys()", "assert sorted(first(3)) == [3]"),
        ("def first(count): return {count: 1}.items()", "assert list(first(3)) == [(3, 1)]"),
        ("def total(values): return sum(values)", "assert total(range(5)) == 10"),
        ("def total(values): return sum(values)", "assert total(values={2: 1}.keys()) == 2"),
        ("def total(values): return sum(values)", "assert total(iter([1, 2])) == 3"),
        ("def same(value): return value", "assert same('range(0, 3)') == 'range(0, 3)'"),
        ("list = type = range = 1\ndef same(value): return value", "assert same(3) == 3"),
        ("def list(values): return 3", "assert list(range(2)) == 3"),
    ],
)
def test_ranges_views_and_iterators_go_in_and_out_of_monty(program, case):
    """Their texts did, so right programs failed."""
    tests = programs.make_tests("", [case])
    assert monty.judge(program, tests, 1.0, True) == programs.Verdict(1, 1)


@pytest.mark.parametrize(
    ("program", "case", "problem"),
    [
        ("def first(count): return range(count)", "assert first(3) == 'range(0, 3)'", ""),
        (
            "def first(count): return [range(3)]",
            "assert first(3) == ['range(0, 3)']",
            "unsupported",
        ),
        ("def first(count): return slice(3)", "assert first(3)", "unsupported"),
        ("def first(count): return first", "assert first(3)", "unsupported"),
        ("def first(count): return 3", "assert first([range(3)]) == 3", "broken"),
        ("def first(count): return 3", "assert first(slice(3)) == 3", "broken"),
        ("def first(count): return 3", "assert first(count=lambda: 3) == 3", "broken"),
        ("def first(count): return 3\n_to_tests = first", "assert first(3) == 3", ""),
    ],
)
def test_no_text_stands_for_a_value_that_monty_does_not_hand_out(program, case, problem):
    tests = programs.make_tests("", [case])
    assert monty.judge(program, tests, 1.0, True) == programs.Verdict(0, 1, problem)
