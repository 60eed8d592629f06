"""Runs whose samples are answered: by tools, by environments of both protocols, from TOML."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import psutil
import pytest
import small_run
import tomli_w
from quick import full_but
from resuming import died_and_resumed
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxgrpo import evaluate, probe, sample
from jaxgrpo.cli import make_base
from jaxgrpo.cli.main import main
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders
from jaxgrpo.rewards.python import choose
from jaxgrpo.training import loop
from jaxgrpo.training.records.reading import read_samples
from jaxgrpo.training.records.rollout_files import load as load_rollouts
from jaxgrpo.training.setup import setup

CODE = '''
import os
import time


def parse(text):
    return text, [{"name": "look", "arguments": {"words": text}}] if "=" in text else []


def parse_code(text):
    return text, [{"name": "python", "arguments": {"code": "print(6 * 7)"}}]


def look(words: str) -> str:
    """Looks.

    Args:
        words: for what
    """
    return str(len(words))


class Count:
    def reset(self, **row):
        assert row["answer"]
        self.count = 0
        return "1+"

    def look(self, words: str) -> str:
        """Looks.

        Args:
            words: for what
        """
        self.count += 1
        return str(self.count)

    def get_reward(self):
        return float(self.count)


class Longer:
    def reset(self, seed):
        self.length = 3 + seed % 5

    def step(self, text):
        return "+", float(len(text) > self.length), len(text) > 9


class Fragile(Count):
    def look(self, words: str) -> str:
        """Looks.

        Args:
            words: for what
        """
        kind = sum(map(ord, words)) % 5
        if kind == 0:
            os._exit(3)
        if kind == 1:
            time.sleep(600)
        return super().look(words)


def tools_used(completions, environments, **columns):
    return [float(environment.count) for environment in environments]
'''


OTHERS = """
import jaxgrpo as jg


def agent(base_url, **row):
    return 1.0


rules = jg.Rules(lambda key, row: 0, lambda state, tokens, length: state, "nothing")
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(CODE)
    return path


def options(folder, mine, **changes):
    values = {
        "rollout.max_completion_tokens": 40,
        "rollout.max_prompt_tokens": 12,
        "rollout.call_format": f"{mine}:parse",
        "rollout.max_turns": 3,
        "checkpoint.every": 1,
        "run.rollouts_every": 1,
    }
    return small_run.tables(folder / "run", **{**values, **changes})


def train(folder, mine, **changes):
    return loop.train(configs.from_dict(options(folder, mine, **changes)))


WAYS = {
    "tools": {"tools": ["{mine}:look"]},
    "trl": {"environment": "{mine}:Count"},
    "gym": {"environment": "{mine}:Longer", "rollout.call_format": "auto"},
}
EACH = pytest.mark.parametrize("name", full_but(["trl"], WAYS))


def way(name, mine):
    def named(value):
        if isinstance(value, list):
            return [named(entry) for entry in value]
        return value.replace("{mine}", str(mine))

    return {key: named(value) for key, value in WAYS[name].items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, mine):
    """A finished run of each of WAYS, by its name."""

    @functools.cache
    def run(name):
        return train(tmp_path_factory.mktemp(name), mine, **way(name, mine), **{"run.report": True})

    return run


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:python. bubblewrap does not run here")
def test_the_built_in_tool_answers_in_a_run(tmp_path, mine):
    try:
        choose(None)
    except InputError as error:
        pytest.skip(str(error))
    changes = {"tools": ["python"], "rollout.call_format": f"{mine}:parse_code", "train.steps": 1}
    run = train(tmp_path, mine, **changes)
    lines = (run.path / "samples" / "step_1.jsonl").read_text().splitlines()
    assert all("42" in json.loads(line)["completion"] for line in lines)


def test_a_built_in_tool_that_does_not_exist_is_refused(tmp_path, mine):
    with pytest.raises(InputError, match="unknown tool 'pyton': did you mean 'python'"):
        train(tmp_path, mine, tools=["pyton"])


@pytest.mark.slow
@EACH
def test_a_run_trains_and_says_what_its_turns_were(runs, name):
    run = runs(name)
    lines = small_run.metrics(run.path)
    assert len(lines) == 3
    for line in lines:
        assert 1 <= line["turns/mean"] <= 3
        assert line["environment/broken"] == 0
        assert (line["tools/call_frequency"] > 0) == (name != "gym")
        # The update computes what the engine drew, behind replies too.
        assert line["sampling/mean_disagreement"] is None or line["sampling/mean_disagreement"] < 1
    assert any(line["live_groups"] > 0 for line in lines)
    names = {"tools": [], "trl": ["Count"], "gym": ["Longer"]}[name]
    assert all(f"rewards/{reward}/mean" in lines[0] for reward in names)
    rollouts = load_rollouts(run.path / "rollouts" / "00000001.safetensors")
    turn, mask = rollouts.fields["turn"], rollouts.token_mask
    assert set(np.unique(turn)) <= {-1, 0, 1, 2}
    assert (turn[mask] >= 0).all()
    assert (~mask & (turn >= 0)).any()
    last = load_rollouts(run.path / "rollouts" / "00000003.safetensors")
    np.testing.assert_array_equal(last.fields["version"], np.where(last.token_mask, 2, -1))


@pytest.mark.full
@pytest.mark.slow
def test_it_resumes_bit_for_bit(tmp_path, runs, mine):
    unbroken = runs("trl")
    tables = options(tmp_path / "parts", mine, **way("trl", mine))
    loop.train(configs.from_dict({**tables, "train": {"steps": 1}}))
    resumed = loop.train(configs.from_dict(tables), resume="auto")
    assert weights(resumed) == weights(unbroken)


@pytest.fixture
def forks(tmp_path, mine):
    """Changes for a run whose template leaves some digits out of earlier turns."""
    path = tmp_path / "forgetful.jinja"
    words = "m.content" + "".join(f" | replace('{digit}', '')" for digit in range(5))
    path.write_text(
        "{% for m in messages %}{{ "
        + words
        + " if m.role == 'assistant' else m.content }}<end>{% endfor %}"
    )
    return {
        "environment": f"{mine}:Longer",
        "rollout.call_format": "auto",
        "rollout.max_completion_tokens": 64,
        "rollout.max_turn_tokens": 8,
        "data.chat_template": str(path),
        "data.history": "fork",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"train.minibatches": 2}, marks=pytest.mark.full),
        pytest.param({"rollout.refill": {"factor": 2.0}}, marks=pytest.mark.full),
        pytest.param({"rollout.staleness": 1}, marks=pytest.mark.full),
    ],
    ids=["minibatches", "refill", "staleness"],
)
def test_a_run_whose_conversations_are_rewritten_resumes_bit_for_bit(
    tmp_path, mine, forks, changes
):
    unbroken = train(tmp_path / "whole", mine, **forks, **changes)
    tables = options(tmp_path / "parts", mine, **forks, **changes)
    resumed = died_and_resumed(configs.from_dict(tables), 2)
    assert resumed.summary["parameter_hash"] == unbroken.summary["parameter_hash"]
    for line in small_run.metrics(unbroken.path):
        assert line["turns/forked"] > 0
        if "rollout.staleness" not in changes and "train.minibatches" not in changes:
            assert line["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.full
def test_saved_rollouts_that_were_rewritten_are_trained_on_as_in_their_run(tmp_path, mine, forks):
    run = train(tmp_path, mine, **forks)
    files = sorted((run.path / "rollouts").iterdir())
    assert load_rollouts(files[0]).fields["turn:fork"].any()
    assert any(turn["forked"] for row in read_samples(run.path) for turn in row["turns"])
    with safe_open(files[0], "numpy") as file:
        arrays, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    arrays["fields.turn:fork"] = 1 - arrays["fields.turn:fork"]
    save_file(arrays, tmp_path / "wrong.safetensors", metadata)
    with pytest.raises(InputError, match=r"fields.turn:fork\[0, 0, 0\]: is 1, expected that of"):
        load_rollouts(tmp_path / "wrong.safetensors")
    again = options(tmp_path / "again", mine, **forks)
    again["rewards"] = [
        *options(tmp_path, mine)["rewards"],
        {"use": "arithmetic", "name": "Longer"},
    ]
    del again["environment"], again["data"]["history"]
    again["rollout"] = {k: v for k, v in again["rollout"].items() if not k.startswith("max_turn")}
    del again["rollout"]["call_format"]
    # The files say that there are rewritten conversations, and not the config.
    assert not setup(configs.from_dict(again)).blueprint.geometry.has_forks
    assert setup(configs.from_dict(again), rollouts=files).blueprint.geometry.has_forks
    replayed = loop.train(configs.from_dict(again), rollouts=files)
    assert replayed.summary["parameter_hash"] == run.summary["parameter_hash"]
    tokenizer = folders.read_tokenizer(small_run.base())
    hybrid = decoder.build(make_base.base_config(len(tokenizer), 32, family="qwen3_5_text"))
    params = jax.jit(hybrid.init)(jax.random.key(0))
    folders.save_model(hybrid, params, tmp_path / "hybrid", tokenizer=tokenizer)
    again["model"] = {"path": str(tmp_path / "hybrid")}
    with pytest.raises(InputError, match=r"rewritten \(fields\.turn:fork of files\) begins"):
        setup(configs.from_dict(again), rollouts=files)


@pytest.mark.full
def test_methods_of_an_atlas_read_what_files_of_rollouts_hold(tmp_path, mine):
    changes = {**way("trl", mine), "recipe": "grpo", "atlas": {"methods": ["gigpo"], "every": 1}}
    run = train(tmp_path, mine, **changes, **{"train.steps": 1})
    files = sorted((run.path / "rollouts").iterdir())
    again = options(tmp_path / "again", mine, **changes, **{"train.steps": 1})
    replayed = loop.train(configs.from_dict(again), rollouts=files)
    (expected,), (line,) = small_run.metrics(run.path), small_run.metrics(replayed.path)
    assert line["atlas/norm/gigpo"] == expected["atlas/norm/gigpo"] > 0
    with safe_open(files[0], "numpy") as file:
        arrays, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    del arrays["fields.turn_reward"]
    save_file(arrays, tmp_path / "less.safetensors", metadata)
    with pytest.raises(InputError, match=r"gigpo: reads turn_reward, which the run's method does"):
        setup(configs.from_dict(again), rollouts=[tmp_path / "less.safetensors"])


@pytest.mark.full
@pytest.mark.slow
def test_scores_of_whole_samples_are_refused_where_conversations_are_rewritten(
    tmp_path, mine, forks
):
    chain = [{"use": "subtract_group_mean"}, {"use": "add_kl_return", "beta": 0.1}]
    behind_another = {
        "scores": [{"name": "hinted_logp", "prompt": "answer"}],
        "advantage": [{"use": "sum_rewards"}, *chain[:1], {**chain[1], "reference": "hinted"}],
    }
    for changes in ({"recipe": "dro_r3"}, behind_another, {"recipe": "rank_learning"}):
        message = r'"fork": the method reads \w+, which takes a sample for one sequence'
        with pytest.raises(InputError, match=message):
            train(tmp_path, mine, **forks, **changes)


@pytest.mark.full
def test_a_reward_sees_environments_and_several_are_chosen_by_the_row(tmp_path, mine):
    rows = [
        {"prompt": "1+1=", "answer": "2", "environment": ["count", "longer"][n % 2]}
        for n in range(8)
    ]
    environments = {"count": f"{mine}:Count", "longer": f"{mine}:Longer"}
    tables = options(tmp_path, mine, environment=environments)
    del tables["data"]
    run = loop.train(configs.from_dict(tables), dataset=rows)
    lines = small_run.metrics(run.path)
    assert all(
        line[f"rewards/{name}/unscored"] == 0 for line in lines for name in ("Count", "Longer")
    )
    assert any(line["live_groups"] > 0 for line in lines)
    with pytest.raises(InputError, match=r"row 3: the column 'environment' holds 'game'"):
        loop.train(
            configs.from_dict({**tables, "run": {"dir": str(tmp_path / "other")}}),
            dataset=[*rows[:3], {**rows[3], "environment": "game"}],
        )


def weights(run):
    return (run.path / "model" / "model.safetensors").read_bytes()


@pytest.mark.full
def test_a_run_is_the_same_in_threads_and_with_any_number_of_processes(tmp_path, mine):
    before = set(psutil.Process().children(recursive=True))  # what other tests' libraries keep
    runs = {
        workers: train(
            tmp_path / str(workers), mine, **way("trl", mine), **{"rollout.call_workers": workers}
        )
        for workers in (0, 2, 4)
    }
    assert weights(runs[0]) == weights(runs[2]) == weights(runs[4])
    gym = [
        train(tmp_path / f"gym{n}", mine, **way("gym", mine), **{"rollout.call_workers": n})
        for n in (0, 3)
    ]
    assert weights(gym[0]) == weights(gym[1])
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.full
def test_samples_whose_process_ends_are_counted_by_name_and_not_trained_on(tmp_path, mine):
    changes = {"environment": f"{mine}:Fragile", "rollout.call_timeout": 2.0, "train.steps": 1}
    runs = [
        train(tmp_path / str(n), mine, **changes, **{"rollout.call_workers": n}) for n in (2, 4)
    ]
    assert weights(runs[0]) == weights(runs[1])
    lines, alike = (small_run.metrics(run.path) for run in runs)
    names = ("calls/crashed", "calls/timed_out", "calls/memory", "environment/broken")
    assert [[line[name] for name in names] for line in lines] == [
        [line[name] for name in names] for line in alike
    ]
    assert sum(line["calls/crashed"] for line in lines) > 0
    assert sum(line["calls/timed_out"] for line in lines) > 0
    for line in lines:
        broken = line["environment/broken"]
        assert line["rewards/Fragile/unscored"] == pytest.approx(broken)
        ended = line["calls/crashed"] + line["calls/timed_out"]
        assert broken == pytest.approx(ended / len(read_samples(runs[0].path)))
    problems = {row.get("problem") for row in read_samples(runs[0].path)}
    assert problems <= {None, "look ended its process", "look took more than 2 s"}


@pytest.mark.slow
def test_what_runs_in_no_process_of_its_own_is_refused(tmp_path, mine):
    on = {"rollout.call_workers": 2}
    with pytest.raises(InputError, match=r"rewards.tools_used reads `environments`: with rollout"):
        train(tmp_path, mine, **way("trl", mine), **on, rewards=[{"use": f"{mine}:tools_used"}])
    for name, words in (("agent", "a program that asks"), ("rules", "rules in JAX")):
        path = mine.with_name("others.py")
        path.write_text(OTHERS)
        with pytest.raises(InputError, match=f"rollout.call_workers: the environment is {words}"):
            train(tmp_path, mine, environment=f"{path}:{name}", **on)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.max_turns": 3}, "rollout.max_turns = 3: nothing reads it without tools"),
        ({"rollout.call_format": "hermes"}, "rollout.call_format = .*: nothing reads it"),
        ({"rollout.call_workers": 2}, "rollout.call_workers = 2: nothing reads it"),
        ({"environment": 3}, 'environment = 3: expected a class, "mine.py:Env"'),
        ({"environment": {"a": 1}}, "environment.a = 1: expected a class"),
        ({"environment": {}}, "environment = {}: name at least one class"),
        ({"tools": "look"}, 'tools = "look": expected a list of texts'),
        (
            {"tools": ["mine.py:look"], "rollout.interrupt": {"after": 3, "text": "="}},
            "rollout.interrupt: with tools or an environment a turn would end",
        ),
        ({"data.history": "fork"}, 'data.history = "fork": nothing reads it without tools'),
        ({"data.history": "forks"}, 'data.history = "forks": expected "exact" or "fork"'),
        (
            {"environment": "mine.py:Env", "tree.branch": "uniform"},
            "tree.branch: with tools or an environment a branch would need",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        configs.from_dict(small_run.tables(tmp_path, **changes))


def test_rewards_may_be_missing_where_an_environment_is_there_to_give_one(tmp_path):
    tables = small_run.tables(tmp_path, environment="mine.py:Env")
    del tables["rewards"]
    assert configs.from_dict(tables).rewards == ()


@pytest.mark.full
def test_commands_that_ask_a_run_answer_its_samples_too(tmp_path, mine):
    run = train(tmp_path, mine, **way("trl", mine), **{"train.steps": 1})
    request = {"data": "task:arithmetic:test", "samples": 4, "prompts": 4}
    # It is called above 0 times, and only where samples are answered.
    metrics = evaluate(str(run.path), scorer=f"{mine}:tools_used", **request)
    assert metrics["pass@1"] > 0
    assert probe(str(run.path), reward=f"{mine}:tools_used", **request)
    rows = sample(str(run.path), ["1+1="], samples=8)
    assert len(rows) == 8
    assert {row["completion"][:2] for row in rows}


@pytest.mark.full
@pytest.mark.slow
def test_a_dry_run_with_an_environment_alone_shows_what_would_be_trained(tmp_path, mine, capsys):
    tables = options(tmp_path, mine, environment=f"{mine}:Count")
    del tables["rewards"]
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(tables))
    assert main(["train", str(file), "--dry-run"]) == 0
    assert not (tmp_path / "run").exists()
    assert "Count" in capsys.readouterr().out


@pytest.mark.slow
@EACH
def test_saved_samples_hold_their_turns_and_what_was_said(runs, name):
    run = runs(name)
    rollouts = load_rollouts(run.path / "rollouts" / "00000001.safetensors")
    rows = read_samples(run.path)
    assert len(rows) == rollouts.truncated.size
    replied = 0
    for number, row in enumerate(rows):
        place = divmod(number, rollouts.truncated.shape[1])
        spans = [(turn["tokens"], turn["reply_tokens"]) for turn in row["turns"]]
        mask = np.trim_zeros(rollouts.token_mask[place]).tolist()
        assert mask == [
            drawn for span in spans for drawn in (*[True] * span[0], *[False] * span[1])
        ]
        assert len(row["completion_ids"]) == len(mask)
        assert not any(
            logp for logp, is_drawn in zip(row["logps"], mask, strict=True) if not is_drawn
        )
        rewards = [turn["reward"] for turn in row["turns"]]
        assert rewards == rollouts.fields["turn_reward"][place][: len(rewards)].tolist()
        roles = [message["role"] for message in row["messages"]]
        assert roles.count("assistant") == len(row["turns"])
        assert roles.count("user" if name == "gym" else "tool") == sum(
            bool(turn["reply"]) for turn in row["turns"]
        )
        assert row["prompt"].endswith("=1+") == (name == "trl")
        replied += len(roles) - len(row["turns"])
    assert replied
    assert "Conversations of step 1" in (run.path / "report.html").read_text()
