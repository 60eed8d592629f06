"""The reward `python`, in each sandbox that this machine has."""

import contextlib
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hostile
import psutil
import pytest
from quick import all_but

from jaxgrpo import rewards
from jaxgrpo.core.errors import InputError
from jaxgrpo.rewards import bubblewrap, monty, programs, python
from jaxgrpo.rewards.protocol import RewardError

PROBLEMS = {name: module.find_problem() for name, module in python.SANDBOXES.items()}
SANDBOXES = [
    pytest.param(name, marks=pytest.mark.skipif(problem is not None, reason=f"{name}: {problem}"))
    for name, problem in PROBLEMS.items()
]
WAITED_FOR = {"endless loop that catches", "flood", "nested value"}
"""Programs that take seconds to be stopped; `make test` waits for an endless loop alone."""
MBPP = {
    "test_list": ["assert double(3) == 6", "assert double(5) == 10", "assert double([1]) == [1, 1]"]
}
RIGHT = "```python\ndef double(value):\n    return value * 2\n```"
HUMAN_EVAL = {
    "prompt": (
        "import math\n\n\ndef half(value):\n    return value / 2\n\n\n"
        'def root(value: float) -> float:\n    """Square root; see half."""\n'
    ),
    "test": (
        "METADATA = {}\n\n\ndef check(candidate):\n    for value in range(1, 50):\n"
        "        assert abs(candidate(value) ** 2 - value) < 1e-6\n"
        "        assert half(candidate(4)) == 1\n    assert isinstance(candidate(4), float)\n"
    ),
    "entry_point": "root",
}
BUILT_IN = {"test_list": ["assert sum(10, 15) == 25", "assert sum(1, 2) == 3"]}
NAMED = {"test_list": ["assert greet(name='a', self='b') == 'ab'"]}
NULL = "/dev/null"
SUMS = {"inputs": ["1 2\n", "10 20\n"], "outputs": ["3\n", "30\n"]}


def repeated(row, count) -> dict[str, Any]:
    return {column: [value] * count for column, value in row.items() if column != "prompt"}


def score(completion, row, name, prompt="", **options):
    prompts = [row.get("prompt", prompt)]
    answers = rewards.python_answer(
        prompts, [completion], sandbox=name, **options, **repeated(row, 1)
    )
    (value,) = answers
    return value


@pytest.fixture
def attacked(tmp_path, repository, monkeypatch):
    """What attacks aim at; its port must get no call and its folder no new file."""
    (tmp_path / "secret").write_text("6")
    monkeypatch.setenv("SECRET", "6")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        places = {
            "{folder}": str(tmp_path),
            "{port}": str(server.getsockname()[1]),
            "{repository}": str(repository),
            "{packages}": next(path for path in sys.path if path.endswith("site-packages")),
        }
        yield places
        with pytest.raises(TimeoutError):
            server.accept()
    assert [file.name for file in tmp_path.iterdir()] == ["secret"]


def running_programs():
    children = psutil.Process().children(recursive=True)
    names = set()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.add(child.name())
    return names & {"bwrap", "python3", "python", f"python3.{sys.version_info.minor}"}


@pytest.mark.fault(19)
@pytest.mark.slow
@pytest.mark.parametrize("name", SANDBOXES)
@pytest.mark.parametrize(
    "attack",
    all_but(WAITED_FOR, hostile.PROGRAMS),
)
def test_a_hostile_program_earns_nothing_and_leaves_nothing(attack, name, attacked):
    program = hostile.PROGRAMS[attack]
    for mark, value in attacked.items():
        program = program.replace(mark, value)
    before, began = running_programs(), time.monotonic()
    for row in (MBPP, {"inputs": ["3"], "outputs": ["6"]}):
        assert score(f"```python\n{program}\n```", row, name, time_limit=1.0) == 0
        assert score(f"```python\n{program}\n```", row, name, time_limit=1.0, partial=True) == 0
    assert time.monotonic() - began < 40
    assert running_programs() <= before


@pytest.mark.fault(19)
@pytest.mark.parametrize("name", SANDBOXES)
def test_a_program_that_sleeps_is_stopped(name):
    program = "import time\ntime.sleep(600)\nprint(6)"
    began = time.monotonic()
    chosen_sandbox = python.choose(name)
    chosen_sandbox.run(program, "", 0.5, False)
    assert time.monotonic() - began < programs.SLACK + 5


@pytest.mark.parametrize(
    ("case", "functions"),
    [
        ("assert set(double([1])) == {2}", ("double",)),
        ("assert math.isclose(area(2), 4)", ("area",)),
        ("assert copy([1]) == [1]", ("copy",)),
        ("assert sum(10, 15) == 6", ("sum",)),
    ],
)
def test_what_tests_call_is_a_function_of_the_program_though_python_has_the_name(case, functions):
    tests = programs.make_tests("", [case])
    assert tests.functions == functions
    assert tests.setup == ("import math\n" if "math" in case else "")


@pytest.mark.parametrize("name", SANDBOXES)
@pytest.mark.parametrize(
    ("completion", "row", "expected"),
    [
        (RIGHT, MBPP, 1),
        (f"First\n```python\nx = 1/0\n```\nthen\n{RIGHT}\nprints\n```text\n6\n```", MBPP, 1),
        (f"{RIGHT}\nOutput:\n```\n6\n```", MBPP, 1),
        (f"```\nx\n```\nthen\n{RIGHT.replace('python', '')}", MBPP, 1),
        ("<think>```python\nx\n```</think>def double(value): return value + value", MBPP, 1),
        ("def double(value): return value + value or print(1)", MBPP, 1),
        ("def double(value): return 6", MBPP, 0),
        (f"1. So:\n\n   {RIGHT.replace(chr(10), chr(10) + '   ')}\n\n2. It doubles.", MBPP, 1),
        ("double is easy", MBPP, 0),
        (f"<think>{RIGHT}\nWait", MBPP, 0),
        ("```bash\nls\n```", MBPP, 0),
        ("", MBPP, 0),
        ("    return math.sqrt(value)\n", HUMAN_EVAL, 1),
        ("```python\ndef root(value):\n    return value**0.5\n```", HUMAN_EVAL, 1),
        ("```python\ndef half(value): return 1\ndef root(value): return 0.0\n```", HUMAN_EVAL, 0),
        ("```python\ndef root(value): return math.sqrt(half(2 * value))\n```", HUMAN_EVAL, 1),
        ("def sum(first, second): return first + second", BUILT_IN, 1),
        ("def sum(first, second): return first - second", BUILT_IN, 0),
        ("def copy(values): return [*values]", {"test_list": ["assert copy([1]) == [1]"]}, 1),
        ("def greet(name, self): return name + self", NAMED, 1),
        ("a, b = map(int, input().split())\nprint(a + b)", SUMS, 1),
        ("print(3)", SUMS, 0),
        ("a, b = map(int, input().split())\nprint(a + b)\n1 / 0", SUMS, 0),
    ],
)
def test_programs_are_judged_by_their_tests(completion, row, expected, name):
    assert score(completion, row, name) == expected


@pytest.mark.parametrize("name", SANDBOXES)
def test_the_share_of_tests_is_the_score_where_that_is_asked_for(name):
    assert score("def double(value): return 6", MBPP, name, partial=True) == pytest.approx(1 / 3)
    assert score("print(3)", SUMS, name, partial=True) == 0.5
    assert score(RIGHT, MBPP, name, partial=True) == 1


VALUES = (
    "None",
    "True",
    "-(2**53)",
    "0.1 + 0.2",
    "float('inf')",
    "'ü\\n\"'",
    "b'\\x00'",
    "(1, [2, {3: (4,)}])",
    "{1, frozenset({2})}",
    "{(1, 2): {'a': None}}",
    "3 + 4j",
)


@pytest.mark.parametrize("name", SANDBOXES)
def test_values_are_the_same_on_both_sides(name):
    cases = [f"assert same({value}) == {value}" for value in VALUES]
    cases += ["assert type(same((1,))) is tuple", "assert same(1) is not True"]
    cases += ["assert same(value=[1]) == [1]", "value = same(float('nan'))\nassert value != value"]
    wrong = ["assert same([1]) == (1,)", "assert same('1') == 1", "assert same({1}) == {1, 2}"]
    row = {"test_list": [*cases, *wrong]}
    share = len(cases) / len(row["test_list"])
    assert score("def same(value): return value", row, name, partial=True) == share


@pytest.mark.parametrize("name", SANDBOXES)
def test_tests_may_expect_an_exception_and_hold_helpers(name):
    case = (
        "try:\n    halve('a')\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError\n"
        "assert math.isclose(halve(3), 1.5) and near(halve(1), 0.5)"
    )
    setup = "def near(a, b): return abs(a - b) < 1e-9"
    row = {"test_list": [case], "test_setup_code": setup, "test_imports": ["import math"]}
    assert score("def halve(value): return value / 2", row, name) == 1
    assert score("def halve(value): return 1.5", row, name) == 0


@pytest.mark.skipif(PROBLEMS["bwrap"] is not None, reason=f"bwrap: {PROBLEMS['bwrap']}")
def test_bubblewrap_runs_all_of_python():
    program = (
        "import heapq, sys\nfrom collections import Counter, deque\n\n\n"
        "class Heap(list):\n    def push(self, value):\n        heapq.heappush(self, value)\n\n\n"
        "def count(words): return Counter(words)\n"
        "def first(number): yield from range(number)\n"
        "def ends(values): return deque(values, 2)\n"
        "def big(number): return 7**number\n"
        "def smallest(values):\n    heap = Heap()\n    for value in values:\n"
        "        heap.push(value)\n    del values\n    return heap[0]\n"
    )
    cases = [
        "assert count(['a', 'a']) == {'a': 2}",
        "assert list(first(3)) == [0, 1, 2]",
        "assert collections.deque([2, 3]) == ends([1, 2, 3])",
        "assert smallest([3, 1, 2]) == 1",
        "assert big(10_000) == 7**10_000",
    ]
    assert score(program, {"test_list": cases}, "bwrap") == 1
    echo = "import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])\nsys.exit(0)"
    long = "\n".join(f"{number:099}" for number in range(5000))
    turned = "\n".join(f"{number:099}"[::-1] for number in range(5000))
    assert score(echo, {"inputs": [long], "outputs": [turned]}, "bwrap") == 1
    assert score("print(open(0).read())", {"inputs": ["x"], "outputs": ["x"]}, "bwrap") == 1


@pytest.mark.parametrize("name", SANDBOXES)
def test_what_says_nothing_of_a_program_is_counted(name):
    logged = {}
    endless = "while True: pass"
    broken = ["import there_is_none\nassert double(1) == 2"]
    columns: Any = {"test_list": [MBPP["test_list"], MBPP["test_list"], broken, broken]}
    completions = [endless, RIGHT, RIGHT, endless]
    scores = rewards.python_answer(
        [""] * 4, completions, name, 0.5, log_metric=logged.__setitem__, **columns
    )
    assert scores[:3] == [0.0, 1.0, None]
    assert logged["python/broken"] >= 0.25
    assert logged["python/stopped"] >= 0.25
    if name == "monty":
        program = "class A(dict): pass\ndef double(value): return value * 2"
        rewards.python_answer(
            [""], [program], name, log_metric=logged.__setitem__, **repeated(MBPP, 1)
        )
        assert logged["python/unsupported"] == 1


@pytest.mark.parametrize("name", SANDBOXES)
def test_equal_programs_are_run_once_and_others_side_by_side(name, monkeypatch):
    judged = []
    judge = python.judge
    monkeypatch.setattr(python, "judge", lambda *args: judged.append(args[1]) or judge(*args))
    completions = [RIGHT] * 5 + ["def double(value): return 0"]
    scores = rewards.python_answer(["p"] * 6, completions, name, **repeated(MBPP, 6))
    assert scores == [1.0] * 5 + [0.0]
    assert len(judged) == 2


@pytest.mark.skipif(PROBLEMS["monty"] is not None, reason=f"monty: {PROBLEMS['monty']}")
def test_programs_side_by_side_do_not_wait_for_each_other_s_processes(monkeypatch):
    """A program and its tests have one each: as many programs as there are processes had one, and
    waited for the second for ever."""
    monkeypatch.setattr(monty, "PROCESSES", 2)
    pool = monty._pool.__wrapped__()
    monkeypatch.setattr(monty, "_pool", lambda: pool)
    tests = programs.make_tests("", ["assert double(3) == 6"])
    code = "def double(value): return value * 2"
    with ThreadPoolExecutor(4) as threads:
        judged = [threads.submit(monty.judge, code, tests, 5.0, True) for _ in range(12)]
        assert [future.result(60) for future in judged] == [programs.Verdict(1, 1)] * 12


@pytest.mark.slow
@pytest.mark.skipif(PROBLEMS["monty"] is not None, reason=f"monty: {PROBLEMS['monty']}")
def test_what_a_program_in_monty_gives_and_asks_for_holds_up_nothing_outside():
    """A value of sixty lists was read here as one of 2^60, and a million names were looked up."""
    lists = "lists = [1]\nfor _ in range(60):\n    lists = [lists, lists]\n"
    names = "while True:\n    try:\n        nothing\n    except NameError:\n        pass\n"
    tests, began = programs.make_tests("", ["assert double(3) == 6"]), time.monotonic()
    assert not monty.judge(f"{lists}def double(value): return lists", tests, 1.0, True).passed
    assert monty.run(f"{lists}lists", "", 1.0, True).problem == "stopped"
    assert monty.run(names, "", 1.0, False).problem == "failed"
    assert time.monotonic() - began < 10
    assert monty.run("class A:\n    pass\nA()", "", 1.0, True).text == "<A object>\n"
    assert (
        monty.run("print(1)\n[{1: 'a'}, (2.5,)]", "", 1.0, True).text == "1\n[{1: 'a'}, (2.5,)]\n"
    )


@pytest.mark.slow
@pytest.mark.fault(19)
@pytest.mark.parametrize("name", SANDBOXES)
def test_an_interrupted_call_leaves_nothing_behind(name):
    completions = [f"while True: x = {number}" for number in range(20)]
    function = rewards.build("python", sandbox=name, time_limit=1.0)
    python = rewards.Reward("python", function, on_error="unscored", timeout=0.5)
    began, before = time.monotonic(), threading.active_count()
    values, log = rewards.call_rewards(
        [python],
        *(["p"] * 20, completions, [[1]] * 20, repeated(MBPP, 20)),
    )
    assert all(value != value for value in values["python"])
    assert "python" in log.messages
    assert time.monotonic() - began < 10
    while threading.active_count() > before and time.monotonic() - began < 20:
        time.sleep(0.05)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no tests: give it test_list"),
        ({"test_list": None, "inputs": ["1"]}, "no tests"),
        ({"test_list": []}, "test_list = '\\[\\]': expected a list of texts"),
        ({"test_list": "assert 1"}, "expected a list of texts"),
        ({"test_list": ["assert f(1 == 2"]}, "its tests are not Python"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs and 1 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "inputs = .* expected a list of texts"),
    ],
)
def test_rows_without_tests_are_refused_by_their_number(row, message):
    function = rewards.rewards["python"]
    with pytest.raises(InputError, match=f"row 1: rewards.python: .*{message}"):
        rewards.check_rows(function, [MBPP, row])
    rewards.check_rows(function, [MBPP, HUMAN_EVAL, SUMS])
    rewards.check_rows(rewards.rewards["math"], [row])


@pytest.mark.parametrize("name", SANDBOXES)
def test_a_row_without_tests_is_refused_in_a_call_too(name):
    with pytest.raises(RewardError, match="the row of 'Add two': no tests"):
        score(RIGHT, {}, name, prompt="Add two")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sandbox": "docker"}, "docker"),
        ({"time_limit": 0}, "time_limit = 0: expected seconds above 0"),
        ({"workers": 0}, "workers = 0: expected a whole number"),
        ({"partial": "yes"}, "partial = 'yes': expected true or false"),
    ],
)
def test_options_out_of_their_range_are_refused(options, message):
    with pytest.raises(RewardError, match=message):
        rewards.build("python", **options)


def test_without_a_sandbox_it_is_refused_with_what_to_install(monkeypatch):
    python.choose.cache_clear()
    for module in python.SANDBOXES.values():
        monkeypatch.setattr(module, "find_problem", lambda: "not here")
    with pytest.raises(RewardError, match=r"bwrap: not here; monty: not here.*apt install"):
        rewards.build("python")
    with pytest.raises(RewardError, match=r"monty: not here.*jaxgrpo\[sandbox\]"):
        rewards.build("python", sandbox="monty")


def test_bubblewrap_comes_first_and_monty_in_its_place_with_a_warning(monkeypatch):
    python.choose.cache_clear()
    for module in python.SANDBOXES.values():
        monkeypatch.setattr(module, "find_problem", lambda: None)
    assert python.choose(None).name == "bwrap"
    python.choose.cache_clear()
    monkeypatch.setattr(python.SANDBOXES["bwrap"], "find_problem", lambda: "not here")
    with pytest.warns(UserWarning, match="bubblewrap does not run here .not here."):
        assert python.choose(None).name == "monty"
    python.choose.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize("name", SANDBOXES)
def test_a_thousand_honest_programs_take_less_than_three_minutes(name):
    """`python -m benchmarks.sandbox` says how long they take; this limit suits a busy machine."""
    completions = [
        f"def double(value):\n    {number}\n    return 2 * value" for number in range(1000)
    ]
    columns = repeated({"test_list": MBPP["test_list"][:2]}, 1000)
    began = time.monotonic()
    assert rewards.python_answer(["p"] * 1000, completions, name, **columns) == [1.0] * 1000
    assert time.monotonic() - began < 180


def test_a_sandbox_shows_no_ctypes_and_no_packages_of_any_python():
    """The system's own were there beside ours, in folders of libraries."""
    options = [*bubblewrap._mounts(sys.executable)]
    triples = [*zip(options, options[1:], options[2:], strict=False)]
    bound = {place for kind, source, place in triples if kind == "--ro-bind" and source == place}
    covered = {place for kind, source, place in triples if (kind, source) == ("--ro-bind", NULL)}
    covered |= {place for kind, place, _ in triples if kind == "--tmpfs"}
    patterns = "python3*/*-packages", "python3*/*/_ctypes.*"
    folders = [Path(place) for place in bound if Path(place).is_dir()]
    shown = {str(file) for place in folders for pattern in patterns for file in place.glob(pattern)}
    assert shown
    assert shown - covered == set()
