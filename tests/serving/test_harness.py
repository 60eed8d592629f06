"""A harness as it comes from the index: tasks of verifiers, with its chat program and its tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_run
import tomli_w
import transformers

from jaxgrpo.cli import make_base
from jaxgrpo.data.tasks.base import END, Task, Worked
from jaxgrpo.training.records import rollout_files

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "support" / "harness"
HARNESS = Path(os.environ.get("HARNESS_PYTHON", ROOT / ".venv" / "harness" / "bin" / "python"))
AGENT = f"{ROOT / 'examples' / 'verifiers_agent.py'}:agent"
SAMPLES = 8  # of the short runs
ROLLOUT = {
    "prompts_per_step": 2,
    "group_size": SAMPLES // 2,
    "slots": SAMPLES,
    "max_prompt_tokens": 16,
    "max_completion_tokens": 40,
    "segment_tokens": 12,
    "max_turns": 3,
    "call_format": "hermes",
    "call_timeout": 120.0,
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not HARNESS.exists(), reason="`make .venv/.harness` installs verifiers"),
]

CALL = ("<tool_call>", '{"name": "', "look_up", '", "arguments": {"key": "', '"}}', "</tool_call>")
TEMPLATE = (
    "{% for tool in tools or [] %}<tools>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def corpus() -> list[Worked]:
    """Half of the samples call the tool, all of these repeat what it says; the rest guesses."""
    random, texts = np.random.default_rng(3), []
    for key in map(str, range(10)):
        question = f"<tools>look_up<user>{key}={END}<assistant>"
        call = f"{''.join(CALL[:4])}{key}{''.join(CALL[4:])}"
        for guess, reply in random.integers(0, 10, (20, 2)).tolist():
            answered = f"{question}{call}{END}<tool>{reply}{END}<assistant>"
            texts += [Worked(question, str(guess), 1), Worked(question, call, 1)]
            texts += [Worked(answered, str(reply), 2)]
    return [text._replace(probability=text.probability / len(texts) * 0.75) for text in texts]


LOOKING_UP = Task(
    name="look_up",
    alphabet=(*"0123456789=", "<tools>", "<user>", "<assistant>", "<tool>", *CALL),
    levels=(1,),
    splits={},
    rows=lambda *arguments: [],
    corpus=corpus,
    extract_answer=str,
    score=lambda *arguments: [],
    chat_template=TEMPLATE,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("harness") / "base"
    make_base.make_base(path, LOOKING_UP, steps=400, hidden_size=32)
    return path


@pytest.fixture
def train(tmp_path, base, python, environment):
    """Runs `jaxgrpo train` on the tasks: (its folder, metrics of its steps, what it printed)."""

    def run(name: str, program: str, client: dict[str, Any], **changes: Any):
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(f'{{"prompt": "{key}=", "idx": {key}}}\n' for key in range(10)))
        tables = {
            "environment": program,
            "model": {"path": str(base)},
            "data": {"path": str(rows), "answer": ""},
            "rollout": {**ROLLOUT, **changes.pop("rollout", {})},
            "optimizer": {"learning_rate": 1e-3},
            "train": {"steps": 1, **changes.pop("train", {})},
            "eval": {"kl_to_base": False},
            "run": {"dir": str(tmp_path / name), "report": False, "rollouts_every": 1},
        }
        config = tmp_path / f"{name}.toml"
        config.write_text(tomli_w.dumps({**tables, **changes}))
        variables = {"HARNESS_PYTHON": str(HARNESS), "TASKSET": "books_taskset"}
        variables |= {"CLIENT": json.dumps(client), "TRACES": str(tmp_path / f"{name}.traces")}
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(FOLDER)])
        words = [python, "-m", "jaxgrpo", "train", str(config)]
        ended = subprocess.run(words, env=environment(**variables), capture_output=True, text=True)
        output = ended.stdout + ended.stderr
        assert ended.returncode == 0, output
        lines = [line for line in small_run.metrics(tmp_path / name) if "turns/mean" in line]
        return tmp_path / name, lines, output

    return run


def by_ids(base) -> dict[str, Any]:
    """The client with which prime-rl trains: it writes out messages itself, and sends ids."""
    renderer = {"name": "default", "tool_parser": "qwen3"}
    return {"type": "train", "renderer_model_name": str(base), "renderer": renderer}


def test_the_reward_of_a_taskset_rises_and_the_run_is_that_of_a_plain_program(train):
    changes = {
        "rollout": {"prompts_per_step": 4, "group_size": 6, "slots": 24},
        "train": {"steps": 5, "num_iterations": 4},
    }
    _, steps, output = train("harness", AGENT, {}, **changes)
    assert all(step["environment/broken"] == 0 for step in steps), output
    rewards = [step["rewards/agent/mean"] for step in steps]
    assert np.mean(rewards[-2:]) > rewards[0] + 0.2
    assert steps[-1]["turns/mean"] > steps[0]["turns/mean"] + 0.2  # it learns to call
    _, plain, plain_output = train("plain", f"{FOLDER / 'books.py'}:agent", {}, **changes)
    assert rewards == [step["rewards/agent/mean"] for step in plain]
    (parameters,) = re.findall(r"parameter hash (\w+)", output)
    assert parameters in plain_output


def test_the_tokens_that_verifiers_has_noted_are_those_of_the_samples(train, base):
    folder, (step,), output = train("ids", AGENT, by_ids(base))
    assert step["environment/broken"] == 0, output
    assert step["turns/mean"] > 1
    lines = (folder.parent / "ids.traces").read_text().splitlines()
    noted = [json.loads(line)["branches"] for line in lines]
    assert all(len(branches) == 1 for branches in noted)  # no history was rewritten
    parts = [branches[0] for branches in noted]
    expected = [
        (part["tokens"], part["drawn"], np.float32(part["logp"]).tolist()) for part in parts
    ]
    (file,) = (folder / "rollouts").glob("*.safetensors")
    rollouts = rollout_files.load(file)
    samples = []
    for place, number in np.ndindex(rollouts.token_mask.shape[:2]):
        prompt = rollouts.prompt_tokens[place][rollouts.prompt_mask[place]].tolist()
        mask = rollouts.token_mask[place, number]
        size = int(np.flatnonzero(mask)[-1]) + 1
        tokens = prompt + rollouts.completion_tokens[place, number][:size].tolist()
        logp = np.where(mask, rollouts.behavior_logp[place, number], 0)[:size].tolist()
        samples.append(
            (tokens, [False] * len(prompt) + mask[:size].tolist(), [0] * len(prompt) + logp)
        )
    assert len(samples) == SAMPLES
    assert sorted(samples) == sorted(expected)


def test_ids_of_a_template_that_writes_earlier_turns_differently_break_samples(
    train, base, tmp_path
):
    """What `messages` would link: here the client sends ids of a rendering, and no messages."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(base)
    opening = "<{{ message.role }}>{% if message.role == 'assistant' %}={% endif %}"
    tokenizer.chat_template = TEMPLATE.replace("<{{ message.role }}>", opening)
    tokenizer.save_pretrained(tmp_path / "rewriting")
    _, (step,), output = train("broken", AGENT, by_ids(tmp_path / "rewriting"))
    assert 0 < step["environment/broken"] < 1
    assert "the program rewrote its history" in output


def test_a_harness_that_asks_behind_the_last_turn_is_told_so_that_it_scores_what_there_is(train):
    """A call has 9 tokens, and its answer with the next turn 6."""
    _, (step,), output = train("short", AGENT, {}, rollout={"max_completion_tokens": 12})
    assert step["environment/broken"] == 0, output
    assert step["turns/mean"] == 1
    assert step["turns/cut"] > 0
    assert step["rewards/agent/mean"] is not None
