"""`jaxgrpo completion`: a script that makes a shell complete commands, options and keys."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxgrpo.cli.commands import COMMANDS, JOIN, JOINING, TARGET, list_flags
from jaxgrpo.config.files import shipped
from jaxgrpo.config.keys import HINTS, KEYS, SECTIONS

WITH_CONFIG = (
    *("train", "plan", "sft", "check"),
    *(name for name, command in COMMANDS.items() if TARGET in command),
)
"""Commands that take the name of a shipped config."""

SETTABLE = (*(name for name in HINTS if name not in SECTIONS), *KEYS)
"""What --set takes: keys beside the tables, as recipe, and those of tables."""

SCRIPT = """\
# jaxgrpo completion {shell} > FILE, and `source FILE` in ~/.{shell}rc
_jaxgrpo() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} option= place
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {commands} -- "$word"))
    return
  fi
  for ((place = COMP_CWORD - 1; place > 1; place--)); do
    case ${{COMP_WORDS[place]}} in -*) option=${{COMP_WORDS[place]}}; break ;; esac
  done
  case $word in
    -*)
      case $command in
{options}
      esac
      return ;;
  esac
  case "$command $option" in
{values}
    *" --set")
      compopt -o nospace 2> /dev/null
      COMPREPLY=($(compgen -W {keys} -- "$word")) ;;
    {with_config}) COMPREPLY=($(compgen -W {configs} -- "$word") $(compgen -f -- "$word")) ;;
  esac
}}
complete -o default -F _jaxgrpo jaxgrpo
"""
"""For bash; zsh runs the same. Where it finds nothing, files are completed."""

ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"
FISH = "complete -c jaxgrpo"


def completion(shell: str) -> int:
    """Prints the script. Returns the exit code.

    Args:
      shell: bash, zsh or fish.
    """
    if shell == "fish":
        print(*_fish(), sep="\n")  # noqa: T201
        return 0
    text = SCRIPT.format(
        shell=shell,
        commands=_quoted(COMMANDS),
        options="\n".join(_options()),
        values="\n".join(_values()),
        keys=_quoted(f"{key}=" for key in SETTABLE),
        configs=_quoted(shipped()),
        with_config="|".join(f'"{name} "' for name in WITH_CONFIG),
    )
    print((ZSH if shell == "zsh" else "") + text, end="")  # noqa: T201
    return 0


def _options() -> Iterator[str]:
    """A case for each command: its options."""
    for name in COMMANDS:
        flags = _quoted(list_flags(name))
        yield f'        {name}) COMPREPLY=($(compgen -W {flags} -- "$word")) ;;'


def _values() -> Iterator[str]:
    """A case for each option or place that takes one of some words."""
    for name, (_, _, *arguments) in COMMANDS.items():
        for words, options in arguments:
            if choices := options.get("choices"):
                yield f"    {_places(name, words)}) {_reply(choices)} ;;"


def _fish() -> Iterator[str]:
    """The script for fish: a line for each command, option and place that takes some words."""
    yield "# jaxgrpo completion fish > ~/.config/fish/completions/jaxgrpo.fish"
    yield f"set -l keys {_quoted(f'{key}=' for key in SETTABLE)}"
    yield f"{FISH} -n __fish_use_subcommand -f -l version -d 'show the version'"
    yield f"{FISH} -s h -l help -d 'show what there is'"
    yield f'{FISH} -n "__fish_contains_opt set" -a "$keys"'  # --set takes several values
    for name, (text, _, *arguments) in COMMANDS.items():
        yield f"{FISH} -n __fish_use_subcommand -f -a {name} -d {shlex.quote(text)}"
        join_arguments = [([flag], {"help": help_text}) for flag, (_, _, help_text) in JOIN.items()]
        for words, options in (*arguments, *(join_arguments if name in JOINING else ())):
            if line := _fish_argument(words, options):
                yield f'{FISH} -n "__fish_seen_subcommand_from {name}" {line}'
        if name in WITH_CONFIG:
            yield f'{FISH} -n "__fish_seen_subcommand_from {name}" -a {_quoted(shipped())}'


def _fish_argument(words: Sequence[str], options: Mapping[str, Any]) -> str:
    """What `complete` of fish needs of an argument; nothing of a place that takes any word."""
    flags = [word for word in words if word.startswith("-")]
    parts = [f"-s {word[1:]}" if len(word) == 2 else f"-l {word[2:]}" for word in flags]
    if choices := options.get("choices"):
        parts.append(f"-x -a {_quoted(choices)}" if flags else f"-f -a {_quoted(choices)}")
    elif "--set" in flags:
        parts.append('-r -a "$keys"')
    elif flags and options.get("action") != "store_true":
        parts.append("-r")
    if flags and options.get("help"):
        parts.append(f"-d {shlex.quote(options['help'])}")
    return " ".join(parts)


def _places(name: str, words: Sequence[str]) -> str:
    """What a word may follow: the flags of an option, or no option."""
    flags = [word for word in words if word.startswith("-")] or [""]
    return "|".join(f'"{name} {flag}"' for flag in flags)


def _reply(words: Iterable[str]) -> str:
    return f'COMPREPLY=($(compgen -W {_quoted(words)} -- "$word"))'


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))
