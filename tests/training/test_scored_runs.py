"""Runs whose methods read scores: a teacher of another size, a mean of policies, other prompts."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import by_hand
import jax
import numpy as np
import pytest
import small_run
from resuming import assert_same_bits, died_and_resumed

from jaxgrpo.cli import make_base
from jaxgrpo.config import files as configs
from jaxgrpo.config import own_code
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.core.scores import prompt_field
from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.models import sharding
from jaxgrpo.training import loop
from jaxgrpo.training.inputs import read_inputs
from jaxgrpo.training.parameters import to_save
from jaxgrpo.training.prompted import read_prompts
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

GRPO = [{"use": "sum_rewards"}, {"use": "subtract_group_mean"}]
EMA = {"use": "add_kl_return", "reference": "ema", "beta": 0.1}
TEACHER = {"use": "add_kl_return", "reference": "teacher", "beta": 0.1}
HINTED = {"use": "add_kl_return", "reference": "hinted", "beta": 0.1}


@functools.cache
def teacher() -> str:
    """A model of another size with the tokenizer of `small_run.base`."""
    path = Path(tempfile.mkdtemp(prefix="jaxgrpo-test-teacher-"))
    make_base.make_base(path / "teacher", steps=2, batch=16, hidden_size=48)
    return str(path / "teacher")


def last_params(run):
    return sharding.to_host(run.learner.trainable)


@pytest.mark.full
def test_a_teacher_of_another_size_trains_a_run_and_is_in_no_checkpoint(tmp_path):
    scores = [{"name": "teacher_logp", "policy": teacher()}]
    changes = {"scores": scores, "advantage": [*GRPO, TEACHER], "checkpoint.every": 1}
    run = loop.train(small_run.config(tmp_path / "run", **changes))
    logged = small_run.metrics(tmp_path / "run")
    assert all(np.isfinite(row["add_kl_return/kl"]) for row in logged), logged[0]
    assert logged[0]["add_kl_return/kl"] > 0.1  # the teacher is another model
    assert teacher() in run.learner.frozen
    assert teacher() not in to_save(run.learner, run.stream).learner.frozen
    again = died_and_resumed(small_run.config(tmp_path / "again", **changes), 2)
    assert_same_bits(last_params(run), last_params(again))


@pytest.mark.full
def test_a_teacher_is_in_the_memory_that_a_run_counts(tmp_path):
    scores = [{"name": "teacher_logp", "policy": teacher()}]
    run = setup(small_run.config(tmp_path, scores=scores, advantage=[*GRPO, TEACHER]))
    weights = jax.tree.leaves(run.learner.frozen[teacher()])
    assert run.memory.copies == sum(leaf.addressable_shards[0].data.nbytes for leaf in weights)
    average = setup(small_run.config(tmp_path, advantage=[*GRPO, EMA])).memory
    assert average.copies == average.parameters


@pytest.mark.full
def test_its_own_model_as_teacher_says_what_the_trainer_says(tmp_path):
    scores = [{"name": "teacher_logp", "policy": small_run.base()}]
    changes = {"scores": scores, "advantage": [*GRPO, TEACHER], "train.steps": 1}
    loop.train(small_run.config(tmp_path, **changes))
    assert small_run.metrics(tmp_path)[0]["add_kl_return/kl"] == 0


@pytest.mark.full
def test_the_mean_of_the_policies_follows_the_trained_one_and_is_resumed(tmp_path):
    changes = {"advantage": [*GRPO, EMA], "reference.ema_decay": 0.25, "checkpoint.every": 1}
    config = small_run.config(tmp_path / "run", **changes)
    first = sharding.to_host(setup(config).learner.trainable)
    run = loop.train(config)
    again = died_and_resumed(small_run.config(tmp_path / "again", **changes), 2)
    average = sharding.to_host(run.learner.frozen["ema"])
    assert_same_bits(average, sharding.to_host(again.learner.frozen["ema"]))
    assert_same_bits(last_params(run), last_params(again))
    for mean, start, end in zip(
        *map(jax.tree.leaves, (average, first, last_params(run))), strict=True
    ):
        assert mean.dtype == np.float32
        is_between = np.abs(mean - end).max() <= np.abs(start - end).max()
        assert is_between
    moved = [
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (average, first)), strict=True)
    ]
    assert max(moved) > 0


@pytest.mark.full
def test_one_step_of_the_mean_is_its_formula(tmp_path):
    changes = {"advantage": [*GRPO, EMA], "reference.ema_decay": 0.25, "train.steps": 1}
    config = small_run.config(tmp_path, **changes)
    first = sharding.to_host(setup(config).learner.trainable)
    run = loop.train(config)
    average, last = sharding.to_host(run.learner.frozen["ema"]), last_params(run)
    for mean, start, end in zip(*map(jax.tree.leaves, (average, first, last)), strict=True):
        np.testing.assert_allclose(mean, 0.25 * start + 0.75 * end, rtol=1e-6, atol=1e-9)


@pytest.mark.full
def test_a_score_behind_another_prompt_and_ranks_are_resumed(tmp_path):
    rows = arithmetic.rows("train", 64)
    rows = [{**row, "hinted": f"{row['answer']}{row['prompt']}"} for row in rows]
    data = tmp_path / "hinted.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = [
        {"name": "hinted_logp", "prompt": "hinted"},
        {"name": "effective_rank", "quantity": "effective_rank", "stride": 4},
    ]
    changes = {
        "data.path": str(data),
        "scores": scores,
        "advantage": [*GRPO, HINTED, {"use": "shape_by_effective_rank"}],
        "checkpoint.every": 1,
    }
    run = loop.train(small_run.config(tmp_path / "run", **changes))
    logged = small_run.metrics(tmp_path / "run")
    assert all(row["shape_by_effective_rank/rank"] >= 1 for row in logged)
    assert logged[0]["add_kl_return/kl"] > 0  # a hint changes what is likely
    again = died_and_resumed(small_run.config(tmp_path / "again", **changes), 2)
    assert_same_bits(last_params(run), last_params(again))
    state = run.learner.advantage_state["shape_by_effective_rank"]
    assert int(state["batches"]) == 3


def hinted(row, completions):
    """What the column holds."""
    return row["hinted"]


def answered(row, completions):
    """A text of what the group has answered; samples may be empty."""
    SEEN.append((row["prompt"], completions))
    return "".join(sorted({text[-1:] for text in completions})) + row["prompt"]


def unfit(row, completions):
    return row["hint"]


def number(row, completions):
    return 3


def long(row, completions):
    return "1+1=" * 9


def empty(row, completions):
    return ""


SEEN = []
"""Of the module that a config loads from this file by its path."""


def hinted_rows(tmp_path):
    """Rows with a hint of equal length, as long as prompts may be."""
    rows = [row for row in arithmetic.rows("train", 400) if len(row["prompt"]) == 6]
    rows = [{**row, "hinted": f"{row['answer'][:1]}{row['prompt']}="} for row in rows[:64]]
    data = tmp_path / "hinted.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data.path": str(data)}


def behind(prompt, **changes):
    scores = [{"name": "hinted_logp", "prompt": prompt}]
    return {"scores": scores, "advantage": [*GRPO, HINTED], **changes}


@pytest.mark.full
def test_a_function_that_returns_the_column_gives_the_bits_of_the_column(tmp_path):
    changes = {**hinted_rows(tmp_path), "train.steps": 2}
    configurations = [
        small_run.config(tmp_path / name, **behind(prompt, **changes))
        for name, prompt in {"column": "hinted", "function": f"{__file__}:hinted"}.items()
    ]
    runs = [loop.train(config) for config in configurations]
    assert small_run.metrics(tmp_path / "column")[0]["add_kl_return/kl"] > 0
    assert_same_bits(*map(last_params, runs))
    assert small_run.metrics(tmp_path / "column") == small_run.metrics(tmp_path / "function")
    assert Path(__file__) in configurations[1].own_files


@pytest.mark.full
def test_a_function_sees_each_groups_completions_and_its_prompts_are_resumed(tmp_path):
    changes = behind(f"{__file__}:answered", **{"checkpoint.every": 1, "rollout.staleness": 1})
    changes |= {"loss.surrogate": {"use": "clip"}, "loss.proximal": "behavior"}
    changes["rollout.max_prompt_tokens"] = 12
    config = small_run.config(tmp_path / "run", **changes)
    calls = own_code.load(f"{__file__}:SEEN", expected=list, kind="list")
    run = setup(config)
    calls.clear()
    stream, collected = by_hand.collect(run, run.learner, run.stream)
    rollouts, tokenizer = sharding.to_host(collected.rollouts), run.inputs.pretrained.tokenizer
    assert len(calls) == 16  # of two steps, one of which waits
    tokens = rollouts.fields[prompt_field("answered")]
    for p, (prompt, completions) in enumerate(calls[:8]):
        ids = [
            rollouts.completion_tokens[p, g][rollouts.token_mask[p, g]].tolist() for g in range(4)
        ]
        texts = [tokenizer.decode(sample, skip_special_tokens=True) for sample in ids]
        assert (prompt, completions) == (run.inputs.prompts.rows[rollouts.row[p]]["prompt"], texts)
        expected = "".join(sorted({text[-1:] for text in texts})) + prompt
        assert tokenizer.decode(tokens[p][tokens[p] >= 0]) == expected
    assert (stream.waiting.ahead[0].fields[prompt_field("answered")] >= 0).any()
    finished = loop.train(config)
    again = died_and_resumed(small_run.config(tmp_path / "again", **changes), 2)
    assert_same_bits(last_params(finished), last_params(again))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("number", "row 0: it returned a int: return the other prompt as a text"),
        ("empty", "row 0: it returned an empty text: return the other prompt as a text"),
        ("long", "has 36 tokens, and rollout.max_prompt_tokens = 8: return a shorter text"),
        ("unfit", "raised KeyError: 'hint'"),
        ("nothing", "has no 'nothing'"),
    ],
)
def test_a_function_that_writes_no_prompt_is_refused_before_the_run(tmp_path, function, message):
    with pytest.raises(InputError) as caught:
        setup(small_run.config(tmp_path, **behind(f"{__file__}:{function}")))
    assert message in str(caught.value)
    assert f"{__file__}:{function}" in str(caught.value)


def test_scores_behind_a_function_have_the_largest_of_their_limits(tmp_path):
    scores: list[dict[str, Any]] = [
        {"name": name, "prompt": f"{__file__}:long"} for name in ("a", "b", "c")
    ]
    scores[1]["max_prompt_tokens"] = 40
    scores[2]["max_prompt_tokens"] = 36
    config = small_run.config(tmp_path, scores=scores)
    run_inputs = read_inputs(config, None, None, None)
    model = run_inputs.pretrained.model
    _, (function,) = read_prompts(
        config.scores, config.rollout, run_inputs, lambda policy: model, ["arithmetic"]
    )
    assert (function.limit, function.width) == (40, 40)


def test_prompts_of_one_name_are_refused_and_their_files_are_read_from_the_configs_folder(tmp_path):
    scores = [{"name": "a", "prompt": "hinted"}, {"name": "b", "prompt": "mine.py:hinted"}]
    with pytest.raises(ConfigError, match="is called hinted too; give the function another name"):
        small_run.config(tmp_path, scores=scores)
    (config,) = small_run.config(tmp_path, scores=scores[1:]).scores
    assert config.prompt == f"{Path.cwd()}/mine.py:hinted"


def other_tokenizer(tmp_path):
    """The teacher with one token renamed."""
    folder = tmp_path / "other"
    shutil.copytree(teacher(), folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    name = next(name for name, place in vocab.items() if place == max(vocab.values()))
    vocab[f"{name}!"] = vocab.pop(name)
    file.write_text(json.dumps(content))
    return str(folder)


@pytest.mark.full
def test_what_cannot_score_is_refused_in_one_line(tmp_path):
    def refused(**changes):
        with pytest.raises(InputError) as caught:
            setup(small_run.config(tmp_path, **changes))
        return str(caught.value)

    def teaching(policy, **more):
        scores = [{"name": "teacher_logp", "policy": policy, **more}]
        return {"scores": scores, "advantage": [*GRPO, TEACHER]}

    message = refused(**teaching(other_tokenizer(tmp_path)))
    assert "its tokenizer is another than that of model.path" in message
    assert "1 of " not in message
    assert "tokens differ, as" in message
    assert "scores.policy = " in refused(**teaching("./nowhere"))
    assert "the data have no such column; they have" in refused(
        **teaching("trainer", prompt="hint")
    )
    assert "no part of the method and no loss reads teacher_logp" in refused(
        scores=[{"name": "teacher_logp", "policy": teacher()}]
    )
    message = refused(advantage=[*GRPO, EMA], **{"lora.rank": 2})
    assert 'the method reads the policy "ema", and a mean of adapters is no mean' in message
    assert "nothing in the run reads the policy" in refused(**{"reference.ema_decay": 0.5})
    with pytest.raises(InputError, match="max_position_embeddings"):
        setup(small_run.config(tmp_path, **teaching(short_model(tmp_path))))


def short_model(tmp_path):
    """The teacher with positions for few tokens."""
    folder = tmp_path / "short"
    shutil.copytree(teacher(), folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 16}))
    return str(folder)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"name": "trainer_logp", "policy": "base"}], "it is built in, the logp by the trainer"),
        ([{"name": "a b"}], 'expected letters, digits and "_"'),
        ([{"name": "x"}, {"name": "x"}], "it stands twice"),
        ([{"name": "arithmetic"}], "a reward has this name"),
        ([{"name": "behavior_logp"}], "this is another field of a method"),
        ([{"name": "x", "stride": 3}], 'only quantity = "effective_rank" reads it'),
        (
            [{"name": "x", "quantity": "rank", "temperature": 0.5}],
            "a rank is the same at all of them",
        ),
        (
            [{"name": "x", "prompt": "hint", "max_prompt_tokens": 9}],
            "max_prompt_tokens = 9: only a prompt of your own function reads it, and this has the "
            'column "hint": leave it out',
        ),
        ([{"name": "x", "max_prompt_tokens": 9}], "and this has no prompt: leave it out"),
        ([{"name": "x", "choose_by": "level"}], "nothing reads it without policies: set them"),
        ([{"name": "prefix"}], "this is another field of a method"),
        ([{"name": "x", "quantity": "topk"}], '"logp" or "entropy"'),
        ([{"policy": "base"}], "scores[0].name: missing"),
        ([{"name": "x", "temprature": 1.0}], "did you mean scores[0].temperature?"),
        ("teacher", 'a list of tables, scores = [{ name = "..." }]'),
    ],
)
def test_entries_that_say_something_else_are_refused(tmp_path, entries, message):
    with pytest.raises(ConfigError) as caught:
        small_run.config(tmp_path, scores=entries)
    assert message in str(caught.value)


def test_a_config_with_scores_is_written_and_read_back(tmp_path):
    scores = [{"name": "teacher_logp", "policy": "./models/teacher", "temperature": 0.7}]
    config = small_run.config(tmp_path, scores=scores)
    assert config.scores[0].policy == str(Path.cwd() / "models/teacher")
    path = tmp_path / "config.toml"
    path.write_text(configs.to_toml(config))
    assert configs.load(path) == config
    plain = small_run.config(tmp_path)
    path.write_text(configs.to_toml(plain))
    assert configs.load(path) == plain
