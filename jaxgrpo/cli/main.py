"""`jaxgrpo ...`, also `python -m jaxgrpo ...`: finds the command that is meant and runs it."""

from __future__ import annotations

import argparse
import difflib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jaxgrpo
from jaxgrpo.cli.commands import COMMANDS, JOIN, JOINING, list_flags
from jaxgrpo.cli.output import printing_on_stderr, until_closed
from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.training.processes import parent

CONFIG = "a config stands by itself, as jaxgrpo train run.toml"


def main(
    argv: Sequence[str] | None = None,
    run: Callable[[Callable[[], int]], int] = lambda command: command(),
) -> int:
    """Runs one command and returns its exit code (process.EXIT_CODES).

    Args:
      run: runs what takes long, by default in this process.
    """
    words = sys.argv[1:] if argv is None else argv
    command = next((word for word in words if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        hint = suggest(command, COMMANDS)
        sys.stderr.write(f"error: unknown command {command!r}: {hint}\n")
        return 2
    try:
        options = vars(_parser().parse_args(argv))
    except SystemExit as stop:  # argparse has printed the help, the version or the mistake
        code = int(stop.code or 0)
        return until_closed(lambda: code)
    try:
        _refuse_missing_folder()
        _join(options)
        if command == "launch":  # answers before JAX is loaded, and leaves it to its processes
            return pkgutil.resolve_name(options.pop("calls"))(**options)
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    # Without it the first line of most commands is that PyTorch was not found, which none needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return run(lambda: _guarded(options.pop("calls"), options))


def _guarded(calls: str, options: dict[str, Any]) -> int:
    if calls != COMMANDS["plan"][1]:  # it alone compiles for GPUs that are not here
        parent.hide_cuda()
    try:
        with parent.without_cuda_lines():
            from jaxgrpo.training.processes import process  # and JAX
    except ValueError as error:
        if "jax" not in str(error).lower():
            raise
        remedy = "mend the variable of that name, or unset it"
        sys.stderr.write(f"error: JAX cannot read its environment ({error}): {remedy}\n")
        return 2
    return process.guard(lambda: until_closed(lambda: _run_command(calls, options)))


def _run_command(calls: str, options: dict[str, Any]) -> int | None:
    """Runs a command. With --json it returns a `console.Document`, which is printed here; where
    --json takes the name of a file, the command writes it."""
    if options.get("as_json") is not True:
        return pkgutil.resolve_name(calls)(**options)
    with printing_on_stderr():
        answer = pkgutil.resolve_name(calls)(**options)
    if isinstance(answer, int):  # of a process that is not the first of its run
        return answer
    if sys.stdout is not None:
        sys.stdout.write(answer.text())
    return answer.code


def _join(options: dict[str, Any]) -> None:
    """Takes the options of JOIN out of what was given, and sets their variables.

    Raises: InputError where only some of them are given.
    """
    values = {flag: options.pop(_dest(flag), None) for flag in JOIN}
    flags = [flag for flag, value in values.items() if value is not None]
    if flags and len(flags) < len(JOIN):
        missing = ", ".join(flag for flag in JOIN if flag not in flags)
        raise InputError(
            f"{', '.join(flags)} without {missing}: give all three in every process, or none where "
            "a cluster or the environment says it"
        )
    for flag in flags:
        os.environ[JOIN[flag][0]] = str(values[flag])


def _dest(flag: str) -> str:
    return flag.strip("-").replace("-", "_")


def run() -> None:
    """The console script: a command runs in a child of this process."""
    parent.open_standard_files()
    parent.print_any_text()
    parent.keep_interrupts()
    sys.exit(main(run=parent.run))


def _refuse_missing_folder() -> None:
    """Raises: InputError where the working directory was removed: libraries ask for it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError(
            "the working directory was removed or moved: change to one that is there"
        ) from None


class _CommandParser(argparse.ArgumentParser):
    """The parser of a command. It refuses itself what it does not know: with the usage of this
    command and advice, where the parser of all commands would show its own."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        # argparse itself takes "-1" for a value, and "-1,0" or "-1e-3" for unknown options.
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self._words: list[str] = []

    def error(self, message: str) -> NoReturn:
        greedy = [action.option_strings for action in self._actions if action.nargs == "+"]
        flag = next((word for word in self._words if [word] in greedy), None)
        missing = message.rpartition(": ")[2]
        if flag and "arguments are required" in message and not missing.startswith("-"):
            message += f": {flag} takes all words up to the next option; write {missing} before it"
        words = [word.partition("=")[0] for word in self._words]
        flags = self._option_string_actions
        if "--config" in words and "--config" not in flags and "--set" in flags:
            message += f": {CONFIG}"
        super().error(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = [*(args or ())]
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            advice = _advice(list_flags(self.prog.rpartition(" ")[2]), unknown)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        return options, unknown


def _advice(flags: Sequence[str], unknown: Sequence[str]) -> str:
    """What to do about words that a command does not know: its nearest option, and how keys of a
    config are set.

    >>> _advice(["--resume", "--set"], ["--resum", "auto"])
    ': did you mean --resume? Keys of the config follow --set, as --set train.steps=20'
    >>> _advice(["--text"], ["out.html"])
    ''
    """
    names = {flag.lstrip("-"): flag for flag in flags}
    options = [word.partition("=")[0].lstrip("-") for word in unknown if word.startswith("--")]
    nearest = difflib.get_close_matches(options[0], names, n=1) if options else []
    texts = [f"did you mean {names[name]}?" for name in nearest]
    if "--set" in flags and options[:1] != ["config"]:
        texts.append("Keys of the config follow --set, as --set train.steps=20")
    return f": {' '.join(texts)}" if texts else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxgrpo",
        description="Group-relative reinforcement learning of language models in JAX.",
        epilog="exit codes: 0 done, 1 crashed, 2 wrong input, 3 a reward failed after step 1, "
        "4 stuck, 5 diverged, 6 another process lost, 74 disk full, 129, 130, 138 or 143 stopped "
        "by a signal, 141 output closed",
    )
    parser.add_argument("--version", action="version", version=f"jaxgrpo {jaxgrpo.__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for name, (text, calls, *arguments) in COMMANDS.items():
        command_parser = commands.add_parser(
            name, help=text, description=text, argument_default=argparse.SUPPRESS
        )
        command_parser.set_defaults(calls=calls)
        for flags, options in arguments:
            command_parser.add_argument(*flags, **options)
        if name in JOINING:
            group = command_parser.add_argument_group(
                "one of several processes, if no cluster says so"
            )
            for flag, (variable, metavar, text) in JOIN.items():
                help_text = f"{text}; as {variable} in the environment"
                group.add_argument(flag, metavar=metavar, help=help_text)
    return parser
