"""Mistakes in what a user gave, told apart from defects of the program."""

from __future__ import annotations

from collections.abc import Sequence


class InputError(ValueError):
    """What was given cannot be used. A command prints the message alone and exits with 2.

    The message says where, what was given, what was expected, what to do.
    """


class NotGiven(InputError):
    """Something is read that nobody gave.

    Args:
      name: of the field or attribute that is missing.
    """

    def __init__(self, name: str, message: str):
        self.name = name
        super().__init__(message)


class ConfigError(InputError):
    """Everything that is wrong with a config, in one message.

    Args:
      source: the file, or whatever the config was read from.
      problems: one message each, beginning with the path of the key.
    """

    def __init__(self, source: str, problems: Sequence[str]):
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {item}" for item in problems)]))
