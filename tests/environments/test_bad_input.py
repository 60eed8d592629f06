"""What bad environments, tools and templates get: a line before the run, or a stated answer in it.

Threads in which other trainers met the same are named beside the cases.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import bad_environments
import chatting
import jax
import pytest
import tomli_w
from quick import every_third

import jaxgrpo
from jaxgrpo.cli.main import main
from jaxgrpo.cli.make_base import base_config
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders

pytestmark = pytest.mark.fault(20)

CODE = Path(bad_environments.__file__)
FILES = {
    "syntax.py": "def look(:\n",
    "raises.py": "raise RuntimeError('no licence')\n",
    "named.jsonl": '{"prompt": "ab", "answer": "1", "environment": "gaem"}\n',
    "misspelt.jsonl": '{"prompt": "ab", "answer": "1", "enviroment": "game"}\n',
    "talks.jsonl": '{"prompt": "ab", "answer": "1", "conversations": []}\n' * 4,
    "rows.jsonl": '{"prompt": "ab", "answer": "1"}\n' * 4,
    "failing.jinja": "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}" + chatting.TEMPLATES["closed"],
    "unclosed.jinja": "{% for m in messages %}{{ m.content }",
    "mute.jinja": "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}" + chatting.CALLS
    + "{% endif %}<|end|>{% endfor %}",
    **{f"{name}.jinja": text for name, text in chatting.TEMPLATES.items()},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model that was not trained, and the files that the cases name."""
    path, tokenizer = tmp_path_factory.mktemp("bad"), chatting.tokenizer()
    model = decoder.build(base_config(len(tokenizer), 32, 1))
    folders.save_model(model, jax.jit(model.init)(jax.random.key(0)), path / "model", tokenizer)
    for name, text in FILES.items():
        (path / name).write_text(text.replace("<|end|>", "<end>"))
    shutil.copy(CODE, path / "mine.py")
    return path


def tables(folder: Path, run: Path, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl"), "chat_template": str(folder / "closed.jinja")},
        "rewards": [{"use": f"{folder}/mine.py:nothing"}],
        "optimizer": {"learning_rate": 1e-3},
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 2,
            "max_prompt_tokens": 300,
            "max_completion_tokens": 64,
        },
        "train": {"steps": 1},
        "eval": {"kl_to_base": False},
        "run": {"dir": str(run), "report": False},
    }
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        (values.setdefault(table, {}) if table else values)[name] = value
    return values


def placed(value: Any, folder: Path) -> Any:
    """A value of a case, with the path of its files."""
    if isinstance(value, str):
        is_file = value.split(":")[0].endswith((".py", ".jinja", ".jsonl"))
        return f"{folder}/{value}" if is_file else value
    if isinstance(value, dict):
        return {name: placed(entry, folder) for name, entry in value.items()}
    return [placed(entry, folder) for entry in value] if isinstance(value, list) else value


def tool(name: str) -> dict[str, Any]:
    return {"tools": [f"mine.py:{name}"]}


def env(name: str) -> dict[str, Any]:
    return {"environment": f"mine.py:{name}"}


def written(template: str) -> dict[str, Any]:
    return {**LOOK, "data.chat_template": f"{template}.jinja"}


LOOK = tool("look")
TWO = {"environment": {"game": "mine.py:Good", "shop": "mine.py:Looks"}}

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: (keys, where and what, what to do)
    "a tool that is not built in": ({"tools": ["pyton"]}, "unknown tool 'pyton'", "'python'"),
    "no file of tools": ({"tools": ["mime.py:look"]}, "there is no file", "mine.py"),
    "no tool of the name": (tool("lok"), "has no 'lok'", "did you mean 'look'"),
    "a tool that is a number": (tool("NUMBER"), "NUMBER is a int", "name a function"),
    "no module of tools": ({"tools": ["no_module:look"]}, "no module 'no_module'", "name a file"),
    "a tool without hints": (tool("untyped"), "untyped", "a type hint"),
    "a tool without docstring": (tool("undocumented"), "undocumented", "docstring"),
    "an argument without a line": (tool("unexplained"), "'words'", "Args:"),
    "an argument without name": (tool("starred"), "starred", "give each a name"),
    "a tool twice": ({"tools": ["mine.py:look"] * 2}, "two tools are called 'look'", "rename one"),
    "a syntax error": ({"tools": ["syntax.py:look"]}, "syntax.py, line 1", "SyntaxError"),
    "a file that raises": ({"tools": ["raises.py:look"]}, "raises.py:<module>", "no licence"),
    "tools as a text": ({"tools": "mine.py:look"}, "tools = ", "expected a list"),
    "no file of environments": ({"environment": "mime.py:Good"}, "there is no file", "mine.py"),
    "no class of the name": (env("Goood"), "no 'Goood'", "did you mean 'Good'"),
    "a name without a file": ({"environment": "Good"}, "'Good' names no class", "path/file.py"),
    "an object": (env("instance"), "instance is a Good", "name a class"),
    "a factory of nothing": (env("makes_nothing"), "NoneType has no", "reset(**"),
    "a class without reset": (env("NoReset"), "NoReset has no method", "reset(**"),
    "a class that wants more": (env("NeedsBoard"), "'board'", "no arguments"),
    "a class that raises": (env("NoLicence"), "mine.py:__init__", "no licence"),
    "a class that exits": (env("Exits"), "mine.py:__init__", "SystemExit"),
    "a method without hints": (env("Untyped"), "Untyped: no schema", "type hint"),
    # benchflow 903: two episodes wrote into the same place
    "one object for all": (env("shared"), "the same Good twice", "a new object"),
    "a tool and a method": (
        env("Looks") | LOOK, "both a tool 'look'", "rename one"
    ),
    "a column that is not there": (
        env("ColumnMissing"), "missing a required argument: 'board'", "**row"
    ),
    "a column too many": (env("ColumnUnexpected"), "'prompt'", "all by **row"),
    "no seed": (env("Unseeded"), "'seed'", "let it take"),
    # trl 6002: KeyError in the middle of a rollout
    "a misspelt column": (
        {**TWO, "data.path": "misspelt.jsonl"}, "row 0: there is no column", "mean 'enviroment'"
    ),
    "a misspelt environment": (
        {**TWO, "data.path": "named.jsonl"}, "row 0: .*'gaem'", "write one of game, shop"
    ),
    "a column of ours": (
        {**LOOK, "data.path": "talks.jsonl"}, "the column 'conversations' has the name", "rename it"
    ),
    "no environment at all": ({"environment": {}}, "environment = {}", "name at least one class"),
    # trl 6044: the difference of two renderings was off by the end of the turn
    "a template that closes no turn": (
        written("open"), "open.jinja ends a turn", "eos_token_id of generation_config.json"
    ),
    "a template without an end": (
        written("endless"), "ends a turn with none", "data.chat_template"
    ),
    "a template that shows no calls": (
        written("deaf"), "shows none of hermes", "mine.py:parse"
    ),
    "a template that writes no calls": (
        {**LOOK, "data.chat_template": "deaf.jinja", "rollout.call_format": "hermes"},
        "does not write calls of tools", "set data.chat_template",
    ),
    "a template that writes no answers": (
        written("mute"), "a message with role 'tool'", "chat_template"
    ),
    "a template that fails": (
        written("failing"), "no tools", "mend it"
    ),
    "a template that cannot be read": (
        written("unclosed"), "in line 1", "mend it"
    ),
    "an unknown format of calls": (
        {**LOOK, "rollout.call_format": "hermess"}, "unknown rollout.call_format", "'hermes'"
    ),
    "no parser of the name": (
        {**LOOK, "rollout.call_format": "mine.py:pars"}, "no 'pars'", "did you mean 'parse'"
    ),
    # verl 3948: a prompt over its limit silently lost the system prompt
    "tools that make prompts too long": (
        {**LOOK, "rollout.max_prompt_tokens": 20}, "than rollout.max_prompt_tokens", "set it to"
    ),
    # verl 6404: total and per-turn limits were confused
    "a turn longer than the sample": (
        {**LOOK, "rollout.max_turn_tokens": 100}, "max_turn_tokens = 100", "lower it"
    ),
    "one turn": ({**LOOK, "rollout.max_turns": 1}, "max_turns = 1", "2 or more"),
    "no time for calls": ({**LOOK, "rollout.call_timeout": 0.0}, "call_timeout = 0", "above 0"),
    "keys of turns alone": ({"rollout.max_turns": 3}, "nothing reads it", "leave it out"),
    "a reward that wants environments": (
        {"rewards": [{"use": "mine.py:wants_environments"}]}, "'environments'", "rename the"
    ),
    "rules of a column": (env("secret"), "the column 'secret'", "add it to the"),
    "rules that branch": (env("untraceable"), "mine.py:branching", "jnp.where"),
    "rules and tools": (env("untraceable") | LOOK, "rules in JAX", "leave out"),
    "rules and strings": (
        {"environment": "mine.py:untraceable", "rollout.stop_strings": ["x"]},
        "rollout.stop_strings", "end turns by a token",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    every_third(REFUSED),  # a third of them in `make test`
)
def test_it_is_refused_in_one_line_before_the_run(name, folder, tmp_path, capfd):
    changes, *parts = REFUSED[name]
    run, file = tmp_path / "run", tmp_path / "run.toml"
    changes = {key: placed(value, folder) for key, value in changes.items()}
    file.write_text(tomli_w.dumps(tables(folder, run, **changes)))
    for more in ([], ["--dry-run"]):
        assert main(["train", str(file), *more]) == 2
        out, errors = capfd.readouterr()
        assert "Traceback" not in out + errors
        # Problems of a config are in a list behind the name of its file.
        lines = [line for line in errors.splitlines() if line.startswith(("error: ", "  "))]
        assert len(lines) == (2 if ": 1 problem" in errors else 1), errors
        for part in parts:
            assert is_in(part, lines[-1]), lines[-1]
        assert not (run / "metrics.jsonl").exists()


def is_in(part: str, line: str) -> bool:
    """Whether a line has a text; ".*" is any text."""
    first, *rest = part.split(".*")
    return first in line and all(text in line.partition(first)[2] for text in rest)


def test_what_a_run_from_python_is_given_is_refused_alike(folder, tmp_path):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"environment_factory": bad_environments.shared}, "gives the same Good twice"),
        ({"environment_factory": lambda: bad_environments.instance}, "gives the same Good twice"),
        ({"tools": [bad_environments.starred]}, "starred has arguments that a call cannot name"),
    ]
    for options, message in cases:
        config = tables(folder, tmp_path / "run")
        with pytest.raises(jaxgrpo.InputError, match=message):
            jaxgrpo.train(config, **options)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


UNKNOWN = "{'error': 'Tool fly not found. There are: act'}"
UNREADABLE = 'a tool call that cannot be read: it has no "name" that is a text'
FINE = UNKNOWN, UNREADABLE, "fine"

ANSWERED: dict[str, tuple[str, tuple[str, ...] | None]] = {
    # class: (why it breaks; "": it does not, what the model reads behind its first turn)
    "Good": ("", FINE),
    "ActRaises": ("", (UNKNOWN, UNREADABLE, "{'error': 'no such place'}")),
    "ActNothing": ("", (UNKNOWN, UNREADABLE, "None")),
    "ActExits": ("", (UNKNOWN, UNREADABLE, "{'error': 'SystemExit: 3'}")),
    "AsyncExits": ("", (UNKNOWN, UNREADABLE, "{'error': 'SystemExit: 3'}")),
    "AsyncPanics": ("", (UNKNOWN, UNREADABLE, "{'error': 'Panic: out of bounds'}")),
    "AsyncFine": ("", FINE),  # in the loop in which the other exits
    "ActUnwritable": ("", (UNKNOWN, UNREADABLE, "{'error': 'no text'}")),
    "ActSurrogate": ("", (UNKNOWN, UNREADABLE, "a?b")),
    "ActWantsMore": ("", (UNKNOWN, UNREADABLE, "missing 1 required positional argument: 'place'")),
    "ActLong": ("", None),  # the answer leaves no room: the sample ends, as in TRL
    "ActSlow": ("act took more than 2 s", None),
    "ResetRaises": ("reset raised KeyError: 'board'", None),
    "ResetList": ("reset returned a list: return a text or None", None),
    "ResetLong": ("reset returned 200000 characters: return at most 100000", None),
    "ResetSlow": ("reset took more than 2 s", None),
    "ResetExits": ("reset raised RuntimeError: SystemExit: 3", None),
    "RewardRaises": ("get_reward raised RuntimeError: lost the board", FINE),
    "RewardText": ("get_reward returned the reward 'good': return a number", FINE),
    "RewardDigits": ("get_reward returned the reward '0.5': return a number", FINE),
    "RewardInfinite": ("get_reward returned the reward inf: return at most 1e+15", FINE),
    "RewardSlow": ("get_reward took more than 2 s", FINE),
    "RewardNone": ("", FINE),  # not scored, and nothing broke
    "Gym": ("", ("no",)),
    "ResetNothing": ("", ("no",)),  # OpenEnv 601
    "StepSaysNothing": ("", ("",)),
    "StepLong": ("", None),
    "StepNothing": ("step returned a NoneType: return observation, reward, done", None),
    "StepTwo": ("step returned a tuple: return observation, reward, done", None),
    "StepPaysText": ("step returned the reward 'much': return a number", None),
    "StepPaysInfinity": ("step returned the reward inf: return at most 1e+15", None),
    "StepRaises": ("step raised ValueError: illegal move", None),
}
UNSCORED = {name for name, (problem, _) in ANSWERED.items() if problem} | {"RewardNone"}


@pytest.fixture(scope="module")
def drawn(folder, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """The samples of a step in which each row has another environment, by its class."""
    path, names = tmp_path_factory.mktemp("run") / "run", [*ANSWERED]
    rows = [{"prompt": "ab", "answer": "", "environment": name} for name in names]
    changes = {
        "environment": {name: f"{folder}/mine.py:{name}" for name in names},
        "rollout.prompts_per_step": len(rows),
        "rollout.max_prompt_tokens": 64,
        "rollout.max_completion_tokens": 450,
        "rollout.max_turn_tokens": 4,
        "rollout.max_turns": 2,
        "rollout.call_timeout": 2.0,
        "rollout.call_format": f"{folder}/mine.py:parse",
        "rollout.segment_tokens": 4,
        "rollout.slots": 32,
        "run.report": True,
    }
    config = tables(folder, path, **changes)
    del config["data"]["path"]
    run = jaxgrpo.train(config, dataset=rows)
    broken = sum(bool(problem) for problem, _ in ANSWERED.values())
    assert run.metrics[0]["environment/broken"] == pytest.approx(broken / len(names))
    samples: dict[str, list[dict[str, Any]]] = {}
    for line in (path / "samples" / "step_1.jsonl").read_text().splitlines():
        row = json.loads(line)
        samples.setdefault(names[row["row"]], []).append(row)
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERED)
def test_it_is_answered_in_words_or_its_samples_are_not_scored(name, drawn):
    problem, replies = ANSWERED[name]
    assert len(drawn[name]) == 2
    for row in drawn[name]:
        assert row.get("problem", "") == problem
        assert (not row["rewards"] or row["rewards"].get(name) is None) == (name in UNSCORED)
        contents = [m["content"] for m in row["messages"] if m["role"] in ("tool", "user")]
        assert len(contents) == len(replies or ())
        for content, reply in zip(contents, replies or (), strict=True):
            assert reply in content
        # trl 6067: what `reset` said was dropped
        assert ("abgo" in row["prompt"]) == name.startswith(("Gym", "Step"))


@pytest.mark.slow
def test_an_observation_that_makes_a_prompt_too_long_ends_the_run_in_one_line(
    folder, tmp_path, capfd
):
    """verl 3948: the system prompt was lost."""
    file = tmp_path / "run.toml"
    changes = {"environment": f"{folder}/mine.py:Wordy"}
    file.write_text(tomli_w.dumps(tables(folder, tmp_path / "run", **changes)))
    assert main(["train", str(file)]) == 2
    out, errors = capfd.readouterr()
    assert "Traceback" not in out + errors
    assert "row 0: with what its environment says the prompt has" in errors
    assert "set rollout.max_prompt_tokens to as many" in errors


@pytest.mark.full
@pytest.mark.slow
def test_where_rows_have_no_prompt_the_environment_says_what_is_asked(folder, tmp_path):
    """trl 6349: its data sets need no column "prompt" where there is an environment."""
    message = [{"role": "user", "content": ""}]
    prompts = {}
    for name, column in {"named": {"prompt": message}, "none": {}}.items():
        config = tables(folder, tmp_path / name, environment=f"{folder}/mine.py:Gym")
        del config["data"]["path"]
        config["data"]["prompt"] = next(iter(column), "")
        jaxgrpo.train(config, dataset=[{"answer": "1", **column}] * 4)
        lines = (tmp_path / name / "samples" / "step_1.jsonl").read_text().splitlines()
        prompts[name] = [json.loads(line)["prompt"] for line in lines]
    assert prompts["none"] == prompts["named"]
    assert all(prompt == [{"role": "user", "content": "go"}] for prompt in prompts["none"])
    config["environment"] = f"{folder}/mine.py:ResetNothing"
    config["run"] = {"dir": str(tmp_path / "silent")}
    with pytest.raises(jaxgrpo.InputError, match="it has no prompt, and the environment's `reset`"):
        jaxgrpo.train(config, dataset=[{"answer": "1"}] * 4)
    del config["environment"]
    with pytest.raises(jaxgrpo.InputError, match=r'data\.prompt = "": nothing is asked'):
        jaxgrpo.train(config, dataset=[{"answer": "1"}] * 4)
