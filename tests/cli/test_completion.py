"""The completion of shells: bash runs the script, and must give every command and option."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from jaxgrpo.cli.commands import COMMANDS, JOINING
from jaxgrpo.cli.main import main
from jaxgrpo.config.keys import KEYS


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """complete("train --re") -> what bash would offer for the last word."""
    folder = tmp_path_factory.mktemp("completion")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "run.toml").touch()

    def offered(line: str) -> list[str]:
        words = line.split(" ")
        lines = [
            f"source {shlex.quote(str(folder / 'script'))}",
            f"COMP_WORDS=(jaxgrpo {' '.join(map(shlex.quote, words))})",
            f"COMP_CWORD={len(words)}",
            "_jaxgrpo",
            "printf '%s\\n' \"${COMPREPLY[@]}\"",
        ]
        process = subprocess.run(
            ["bash", "-uc", "\n".join(lines)],
            cwd=folder, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert process.stderr == ""
        return process.stdout.split()

    return folder, offered


@pytest.fixture(autouse=True)
def script(complete, capsys):
    folder, _ = complete
    assert main(["completion", "bash"]) == 0
    (folder / "script").write_text(capsys.readouterr().out)


def test_every_command_and_each_of_its_options_is_offered(complete):
    _, offered = complete
    assert set(offered("")) == set(COMMANDS)
    assert offered("sam") == ["sample", "samples"]
    for name, (_, _, *arguments) in COMMANDS.items():
        flags = {flag for words, _ in arguments for flag in words if flag.startswith("-")}
        assert flags | {"--help"} <= set(offered(f"{name} -")), name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("samples runs/first --sort ", ["reward", "length", "advantage"]),
        ("samples runs/first --sort le", ["length"]),
        ("train run.toml --resume ", ["auto"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("import m.gguf out --", ["--overwrite", "--json", "--help"]),
        ("doctor --js", ["--json"]),
        ("sft quickst", ["quickstart"]),
        ("train run.toml --set train.steps=3 optimizer.learning_r", ["optimizer.learning_rate="]),
        ("train quickst", ["quickstart"]),
        ("train run", ["run.toml"]),
        ("report runs/fi", []),
        ("unknown --", []),
    ],
)
def test_values_are_offered_where_they_are_known(complete, line, expected):
    assert complete[1](line) == expected


def test_every_key_is_offered(complete):
    beside = {"rewards=", "recipe=", "advantage=", "scores=", "tools=", "environment="}
    assert set(complete[1]("eval run --set ")) == {f"{key}=" for key in KEYS} | beside


def test_fish_gets_every_command_and_each_of_its_options(capsys):
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, (text, _, *arguments) in COMMANDS.items():
        use = f"complete -c jaxgrpo -n __fish_use_subcommand -f -a {name} -d {shlex.quote(text)}"
        assert use in lines
        start = f'complete -c jaxgrpo -n "__fish_seen_subcommand_from {name}" '
        option_lines = [line for line in lines if line.startswith(start)]
        offered = {word for line in option_lines for word in shlex.split(line)}
        for words, more in arguments:
            flags = [word.lstrip("-") for word in words if word.startswith("-")]
            assert {*flags} <= offered, (name, words)
            assert not more.get("choices") or " ".join(more["choices"]) in offered
        assert ("coordinator" in offered) == (name in JOINING)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("jaxgrpo sam", ["sample", "samples"]),
        ("jaxgrpo import m.gguf --", ["--help", "--json", "--overwrite"]),
        ("jaxgrpo samples run --sort le", ["length"]),
        ("jaxgrpo train x --set train.steps=3 optimizer.learning_r", ["optimizer.learning_rate="]),
        ("jaxgrpo train quickst", ["quickstart"]),
    ],
)
def test_fish_completes(capsys, tmp_path, line, expected):
    assert main(["completion", "fish"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    command = f"source script; complete -C {shlex.quote(line)}"
    process = subprocess.run(
        ["fish", "--no-config", "-c", command],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [offer.split("\t")[0] for offer in process.stdout.splitlines()] == expected


def test_zsh_gets_the_same_through_its_bash_functions(complete, capsys):
    assert main(["completion", "zsh"]) == 0
    before, _, script = capsys.readouterr().out.partition("\n")
    assert before.endswith("&& bashcompinit")
    bash = (complete[0] / "script").read_text()
    assert script.partition("\n")[2] == bash.partition("\n")[2]
