"""Commands, targets of make and config keys that pages, examples and messages show exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxgrpo.cli import main
from jaxgrpo.cli.commands import COMMANDS, JOIN, JOINING
from jaxgrpo.config.keys import HINTS, KEYS, SECTIONS
from jaxgrpo.training.loop import Run
from jaxgrpo.training.setup import Setup

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
SOURCES = [
    REPOSITORY / "Dockerfile",
    *(path for path in sorted((REPOSITORY / "examples").rglob("*")) if path.is_file()),
    *sorted((REPOSITORY / "configs").rglob("*.toml")),
    *sorted((REPOSITORY / "jaxgrpo").rglob("*.py")),
]

SHELL = re.compile(r"^ *```(?:bash)?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
TOML = re.compile(r"^ *```toml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"(?:\$ |[A-Z_]+=\S+ |.*&& )*(?:jaxgrpo [a-z]|make [a-z])")
INLINE = re.compile(r"`((?:jaxgrpo|make) [^`]+)`")
KEY = re.compile(r"`([a-z]+\.[a-z_0-9]+)(?: = [^`]*)?`")
ENDS = {"&&", "||", "|", ">", ";"}
"""Words that end a command in a shell."""
OPTIONS = {f"optimizer.{name}" for name in ("b1", "b2", "eps", "weight_decay")}
"""Options of optax's adamw, which are no keys."""


def shell_lines(text: str) -> Iterator[str]:
    """The lines of a page's blocks that begin with a command."""
    for line in "".join(SHELL.findall(text)).replace("\\\n", " ").splitlines():
        if LINE.match(line):
            yield line.removeprefix("$ ")


def calls(line: str, program: str) -> Iterator[list[str]]:
    """The words behind each call of a program."""
    words = shlex.split(line, comments=True)
    for place, word in enumerate(words):
        if word == program:
            call = words[place + 1 :]
            yield call[: next((n for n, word in enumerate(call) if word in ENDS), len(call))]


def flags_for(command: str) -> set[str]:
    flags = {flag for names, _ in COMMANDS[command][2:] for flag in names}
    return flags | {"--help"} | ({*JOIN} if command in JOINING else set())


def is_key(name: str) -> bool:
    """Whether a config has this key, or one whose value it is a part of, as loss.kl.beta."""
    words = name.split(".")
    beginnings = {".".join(words[:length]) for length in range(1, len(words) + 1)}
    return name in OPTIONS or bool(beginnings & (KEYS.keys() | (HINTS.keys() - SECTIONS.keys())))


def call_problems(words: list[str]) -> Iterator[str]:
    """What is wrong with a command, which may leave arguments out."""
    command, *more = words or ["COMMAND"]
    if command in ("COMMAND", "...") or command.startswith("-"):
        return
    if command not in COMMANDS:
        yield f"{command} is no command"
    elif command == "launch":
        begins = next((place for place, word in enumerate(more) if word in COMMANDS), len(more))
        yield from call_problems(more[begins:])
    else:
        flags = [word.partition("=")[0] for word in more if re.match("--?[a-z]", word)]
        yield from (f"{command} has no {flag}" for flag in flags if flag not in flags_for(command))
        keys = [word.partition("=")[0] for word in more if re.match(r"[a-z]+\.[\w.]+ *=", word)]
        yield from (f"{key} is no key" for key in keys if not is_key(key.strip()))


def is_read(words: list[str]) -> bool:
    """Whether the program can read a command; if not, it prints why."""
    try:
        main._parser().parse_args(words)
    except SystemExit as stop:
        return not stop.code
    return True


def line_problems(line: str) -> Iterator[str]:
    for words in calls(line, "jaxgrpo"):
        yield from (f"{line}: {problem}" for problem in call_problems(words))
    for words in calls(line, "make"):
        targets = [word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)]
        yield from (f"{line}: make has no {name}" for name in targets if name not in TARGETS)


def inline_problems(text: str) -> list[str]:
    """What is wrong with the commands between backticks, also of messages with {values}."""
    lines = [
        " ".join(line.split()).replace("{", "").replace("}", "") for line in INLINE.findall(text)
    ]
    return [problem for line in lines for problem in line_problems(line)]


def key_problems(text: str) -> list[str]:
    """Names between backticks that look like keys and are none."""
    attributes = {f"run.{name}" for name in (*dir(Setup), *dir(Run))} | {"run.toml"}
    names = [name for name in KEY.findall(text) if name.partition(".")[0] in SECTIONS]
    return [name for name in names if not is_key(name) and name not in attributes]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_and_keys_of_a_page_exist(page, capsys):
    text = page.read_text(encoding="utf-8")
    lines = list(shell_lines(text))
    assert [problem for line in lines for problem in line_problems(line)] == []
    assert inline_problems(text) == []
    assert key_problems(text) == []
    for words in [words for line in lines for words in calls(line, "jaxgrpo")]:
        assert is_read(words), f"jaxgrpo {shlex.join(words)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_toml_with_keys_that_exist(page):
    for block in TOML.findall(page.read_text(encoding="utf-8")):
        tables = tomllib.loads(block)
        if "arms" not in tables:  # an experiment
            names = [
                f"{table}.{name}" if table in SECTIONS else table
                for table, value in tables.items()
                for name in (value if table in SECTIONS else [""])
            ]
            assert [name for name in names if not is_key(name)] == []


def test_the_commands_of_examples_configs_and_messages_exist():
    wrong = {
        str(file.relative_to(REPOSITORY)): problems
        for file in SOURCES
        if (problems := inline_problems(file.read_text(encoding="utf-8")))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`jaxgrpo trian run.toml`", "trian is no command"),
        ("`jaxgrpo eval RUN --scorers math`", "eval has no --scorers"),
        ("`jaxgrpo launch --processes 2 train --dry`", "train has no --dry"),
        ("`jaxgrpo train quickstart --set train.stepz=3`", "train.stepz is no key"),
        ("`jaxgrpo report RUN && jaxgrpo model M --text`", "model has no --text"),
        ("`make quick`", "make has no quick"),
    ],
)
def test_a_wrong_command_is_found(text, problem):
    (message,) = inline_problems(text)
    assert message.endswith(problem)


def test_a_wrong_key_is_found_and_a_right_one_is_not():
    text = (
        '`train.stepz`, `loss.kl = { use = "k2" }`, `optimizer.b2`, `run.export`, `rollout.tokens`'
    )
    assert key_problems(text) == ["train.stepz", "rollout.tokens"]
    assert is_key("loss.kl.beta")
    assert not is_key("train")


def test_the_lines_of_blocks_are_read_as_a_shell_does():
    page = "```\n$ jaxgrpo train a \\\n --set x.y=1  # jaxgrpo c\nB=1 jaxgrpo fit b | jq .c\n```\n"
    lines = list(shell_lines(page))
    assert [words for line in lines for words in calls(line, "jaxgrpo")] == [
        ["train", "a", "--set", "x.y=1"],
        ["fit", "b"],
    ]
