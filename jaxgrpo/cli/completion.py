"""`jaxgrpo completion`: a script that makes bash or zsh complete commands, options and keys."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from jaxgrpo.cli.main import COMMANDS, JOIN, JOINING
from jaxgrpo.config.files import shipped
from jaxgrpo.config.keys import KEYS

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
    "train "|"plan ") COMPREPLY=($(compgen -W {configs} -- "$word") $(compgen -f -- "$word")) ;;
  esac
}}
complete -o default -F _jaxgrpo jaxgrpo
"""
"""For bash; zsh runs the same. Where it finds nothing, files are completed."""

ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def completion(shell: str) -> int:
    """Prints the script. Returns the exit code.

    Args:
      shell: bash or zsh.
    """
    text = SCRIPT.format(
        shell=shell,
        commands=_quoted(COMMANDS),
        options="\n".join(_options()),
        values="\n".join(_values()),
        keys=_quoted(f"{key}=" for key in KEYS),
        configs=_quoted(shipped()),
    )
    print((ZSH if shell == "zsh" else "") + text, end="")  # noqa: T201
    return 0


def _options() -> Iterator[str]:
    """A case for each command: its options."""
    for name, (_, _, *arguments) in COMMANDS.items():
        flags = [flag for words, _ in arguments for flag in words if flag.startswith("-")]
        flags += [*(JOIN if name in JOINING else ()), "--help"]
        yield f'        {name}) COMPREPLY=($(compgen -W {_quoted(flags)} -- "$word")) ;;'


def _values() -> Iterator[str]:
    """A case for each option or place that takes one of some words."""
    for name, (_, _, *arguments) in COMMANDS.items():
        for words, more in arguments:
            if choices := more.get("choices"):
                yield f"    {_places(name, words)}) {_reply(choices)} ;;"


def _places(name: str, words: Sequence[str]) -> str:
    """What a word may follow: the flags of an option, or no option."""
    flags = [word for word in words if word.startswith("-")] or [""]
    return "|".join(f'"{name} {flag}"' for flag in flags)


def _reply(words: Iterable[str]) -> str:
    return f'COMPREPLY=($(compgen -W {_quoted(words)} -- "$word"))'


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))
