"""Programs that completions hold, the tests that rows have for them, and what a sandbox is.

A test runs in a process that the program cannot reach: another sandbox, to which the program's
answers come as plain values. So neither the tests nor what they expect are anywhere near the
program while it runs, and no comparison is the program's own.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxgrpo.core.errors import InputError
from jaxgrpo.rewards.builtin import after_thought

MEMORY = 512 * 2**20  # bytes that a program may map
PRINTED = 4 * 2**20  # bytes that it may print
SLACK = 5.0  # seconds of wall time beyond those of processor time

COLUMNS = (
    *("test_list", "test_imports", "test_setup_code"),
    *("test", "entry_point"),
    *("inputs", "outputs"),
)
"""Of MBPP, of HumanEval, and of pairs of texts"""

_FENCED = re.compile(
    r"^([ \t]*)```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL
)
_LANGUAGES = ("", "python", "python3", "py")


class Tests(NamedTuple):
    """Test cases that call the functions of a program."""

    setup: str  # what is executed before them
    cases: tuple[str, ...]  # programs, each of which passes unless it raises
    functions: tuple[str, ...]  # the names that mean functions of the program


class Pairs(NamedTuple):
    """What a program reads, and what it has to print."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Printed(NamedTuple):
    """What a program printed."""

    text: str
    problem: str = ""  # "failed", "stopped" (at a limit), "unsupported"; empty: none


class Verdict(NamedTuple):
    """How a program did in the tests of its row."""

    passed: int
    total: int
    problem: str = ""  # as in Printed, or "broken": the tests themselves do not run


class Sandbox(NamedTuple):
    """What runs programs so that they reach nothing."""

    name: str
    run: Callable[[str, str, float, bool], Printed]
    """(program, its input, seconds of processor time, whether as at a prompt) -> what it prints: at
    a prompt the value of a last expression too, and what it raises."""
    judge: Callable[[str, Tests, float, bool], Verdict]
    """(program, tests, seconds for all of them, whether to stop at the first that fails)"""


def find_program(completion: str) -> str:
    r"""The program of a completion: its last block labelled Python, or else its last one without a
    label, or all of it if it has no blocks. What has no label behind one that has is taken for what
    the program prints. A block that is indented, as in a list, loses the indent of its fence.

    Only what follows a `</think>` is read, if there is one. "" if no block is Python, or a thought
    that begins with `<think>` has not ended.

    >>> find_program("So:\n```python\nprint(1)\n```\nIt prints\n```\n1\n```")
    'print(1)\n'
    """
    text = after_thought(completion)
    blocks = _FENCED.findall(text)
    last = {
        bool(language): re.sub(rf"^[ \t]{{0,{len(indent)}}}", "", code, flags=re.M)
        for indent, language, code in blocks
        if language.lower() in _LANGUAGES
    }
    return last.get(True, last.get(False, "" if blocks else text))


def read_tests(row: Mapping[str, Any]) -> Tests | Pairs:
    """The tests of a row, from the columns of MBPP, of HumanEval, or of pairs of texts.

    Raises: InputError where it has none, or some that cannot be read.
    """
    if row.get("test_list") is not None:
        cases = _texts("test_list", row["test_list"])
        imports = row.get("test_imports")
        lines = [] if imports is None or len(imports) == 0 else _texts("test_imports", imports)
        setup = "\n".join([*lines, row.get("test_setup_code") or ""])
        return make_tests(setup, cases)
    if row.get("test") is not None and row.get("entry_point") is not None:
        prompt, entry = row.get("prompt"), row["entry_point"]
        helpers = helper_code(prompt, entry) if isinstance(prompt, str) else ""
        return make_tests(f"{helpers}\n{row['test']}", [f"check({entry})"], str(entry))
    if row.get("inputs") is not None and row.get("outputs") is not None:
        inputs, outputs = (_texts(name, row[name]) for name in ("inputs", "outputs"))
        if len(inputs) != len(outputs):
            raise InputError(f"{len(inputs)} inputs and {len(outputs)} outputs: give one for each")
        return Pairs(tuple(inputs), tuple(outputs))
    raise InputError(
        "no tests: give it test_list (assertions, as in MBPP), test and entry_point (as in "
        "HumanEval), or inputs and outputs (what a program reads and prints)"
    )


def make_tests(setup: str, cases: Sequence[str], entry_point: str = "") -> Tests:
    """Tests whose free names are modules of Python's library, or else functions of the program.

    What tests call is no module, so a program's `copy` is its own. Where no function of the program
    is left, as in MBPP's `assert sum(10, 15) == 6`, the first that a test calls is one.

    Args:
      entry_point: a function of the program, whatever it is called.

    Raises: InputError on what is not Python.
    """
    try:
        trees = [ast.parse(code) for code in (setup, *cases)]
        nodes = [node for tree in trees for node in ast.walk(tree)]
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"its tests are not Python ({error})") from None
    names = dict.fromkeys(
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )
    bound, called = _bound_names(nodes), {*_called_names(nodes), entry_point}
    free = [name for name in names if name not in {*bound, *dir(builtins)} or name == entry_point]
    functions = [name for name in free if name in called or name not in sys.stdlib_module_names]
    modules = [f"import {name}\n" for name in free if name not in functions]
    if not functions:
        calls = _called_names(node for tree in trees[1:] for node in ast.walk(tree))
        functions = [name for name in calls if name not in bound][:1]
    return Tests("".join(modules) + setup, tuple(cases), tuple(functions))


def helper_code(prompt: str, entry_point: str) -> str:
    """What a prompt that is Python defines beside the function that it asks for: HumanEval's tests
    use it, and must not use a program's own version. "" for another prompt."""
    try:
        tree = ast.parse(prompt)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    tree.body = [node for node in tree.body if getattr(node, "name", None) != entry_point]
    return ast.unparse(tree)


def complete_program(program: str, prompt: Any, entry_point: Any) -> str:
    """A program with what a prompt that is Python, as HumanEval's, gives it.

    A text without the function is what a model without a chat wrote behind the prompt. A program
    with it may use what the prompt imports and defines besides.
    """
    if not isinstance(prompt, str) or not isinstance(entry_point, str):
        return program
    definition = re.compile(rf"^[ \t]*def[ \t]+{re.escape(entry_point)}\b", re.M)
    if not definition.search(prompt):
        return program
    if not definition.search(program):
        return prompt + program
    has_future = "from __future__" in program  # nothing may come before such a line
    return program if has_future else f"{helper_code(prompt, entry_point)}\n{program}"


def is_same_text(printed: str, expected: str) -> bool:
    r"""Whether two outputs are equal but for white space at the ends of lines and at the end.

    >>> is_same_text("1 2 \n3\n\n", "1 2\n3"), is_same_text("12", "1 2")
    (True, False)
    """
    lines = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (printed, expected))
    first, second = lines
    return first == second


def _called_names(nodes: Iterable[ast.AST]) -> dict[str, None]:
    """The names that code calls, in the order of the nodes."""
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    return dict.fromkeys(function.id for function in calls if isinstance(function, ast.Name))


def _bound_names(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that code binds itself."""
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.alias(name=name, asname=alias):
                names.add(alias or name.partition(".")[0])
            case ast.ExceptHandler(name=str(name)):
                names.add(name)
    return names


def _texts(name: str, values: Any) -> list[str]:
    """Raises: InputError unless it is a list of at least one text."""
    is_list = not isinstance(values, (str, bytes, Mapping)) and hasattr(values, "__len__")
    if not is_list or len(values) == 0 or not all(isinstance(value, str) for value in values):
        raise InputError(f"{name} = {str(values)[:60]!r}: expected a list of texts")
    return [str(value) for value in values]
