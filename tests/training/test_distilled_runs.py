"""Runs that a teacher teaches: one, several by row, the policy itself behind another prompt, and
on texts of the data; and what is refused before they begin."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import by_hand
import jax
import numpy as np
import pytest
import small_run
import tiny
from resuming import assert_same_bits, died_and_resumed

from jaxgrpo.cli import make_base
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.core.scores import choice_field, prompt_field
from jaxgrpo.data.chat import make_chat
from jaxgrpo.data.prompts import encode
from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import sharding
from jaxgrpo.planning import programs
from jaxgrpo.training import loop
from jaxgrpo.training.prompted import PromptFunction, _with_column, successful_sibling
from jaxgrpo.training.setup import setup
from jaxgrpo.training.teachers import read_choices, refuse_too_many

pytestmark = pytest.mark.slow

SIBLING = "jaxgrpo.training.prompted:successful_sibling"
DEVICE = jax.devices()[:1]
REINFORCE = {"loss.surrogate": {"use": "reinforce"}}
NO_REWARD = [{"use": "sum_rewards", "arithmetic": 0.0, "digits": 0.0}]


@functools.cache
def teacher() -> str:
    """A model of another size with the tokenizer of `small_run.base`."""
    path = Path(tempfile.mkdtemp(prefix="jaxgrpo-test-teacher-"))
    make_base.make_base(path / "teacher", steps=30, batch=32, hidden_size=48)
    return str(path / "teacher")


def data(tmp_path, **columns):
    """A file of rows with further columns, each a function of the row and its place."""
    rows = [
        {**row, **{name: make(row, place) for name, make in columns.items()}}
        for place, row in enumerate(arithmetic.rows("train", 48))
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data.path": str(path)}


def by_row(tmp_path, name=lambda row, place: ("small", "large")[place % 2], **entry):
    """A run in which each row names its teacher."""
    policies = {"small": "base", "large": teacher()}
    return {
        **REINFORCE,
        "scores": [{"name": "teacher_logp", "policies": policies, **entry}],
        "recipe": "opd",
        **data(tmp_path, teacher=name),
    }


def divergence(**options):
    """A run whose loss is a divergence from the teacher alone."""
    return {
        **REINFORCE,
        "scores": [{"name": "teacher_top", "policy": teacher(), "quantity": "likeliest"}],
        "advantage": NO_REWARD,
        "loss.kl": {"use": "top_k_divergence", "beta": 1.0, "k": 8, **options},
    }


@pytest.mark.full
def test_a_teacher_by_row_scores_the_rows_that_name_it_and_is_counted(tmp_path):
    run = setup(small_run.config(tmp_path, **by_row(tmp_path)))
    _, collected = by_hand.collect(run, run.learner, run.stream)
    rollouts = collected.rollouts
    choice = sharding.to_host(rollouts.fields[choice_field("teacher_logp")])
    assert set(choice.tolist()) == {0, 1}
    rows = run.inputs.prompts.rows
    names = [rows[row]["teacher"] for row in sharding.to_host(rollouts.row)]
    assert [("small", "large")[number] for number in choice] == names
    weights = jax.tree.leaves(run.learner.frozen[teacher()])
    size = sum(leaf.addressable_shards[0].data.nbytes for leaf in weights)
    assert run.memory.copies == size + run.memory.parameters  # and the base


def test_a_row_names_its_teacher_by_a_number_too(tmp_path):
    entry = {"name": "teacher_logp", "policies": {"1": "base", "2": "ema"}, "choose_by": "level"}
    (score,) = small_run.config(tmp_path, scores=[entry]).scores
    rows = [{"level": level} for level in (2, 1, "2", 1.0, np.float32(2))]
    choices = read_choices([score], rows)
    assert choices[choice_field("teacher_logp")].tolist() == [1, 0, 1, 0, 1]
    score = dataclasses.replace(score, policies={"0.5": "base", "1.0": "ema"})
    choices = read_choices([score], [{"level": 1.0}, {"level": 0.5}])
    assert choices[choice_field("teacher_logp")].tolist() == [1, 0]


@pytest.mark.full
def test_a_plan_has_the_pass_that_names_the_students_tokens(tmp_path):
    planned = programs.build_run(small_run.config(tmp_path, **divergence(top="student")), DEVICE)
    policies = [scoring.policy for scoring, _ in programs.scoring_passes(planned)]
    assert sorted(policies) == sorted([teacher(), "trainer"])


def test_a_plan_counts_the_teacher_and_the_likeliest_tokens(tmp_path):
    config = small_run.config(tmp_path, **divergence())
    planned = programs.build_run(config, DEVICE)
    run = setup(config)
    assert planned.memory.copies == run.memory.copies > 0
    *_, batch = programs.update_arguments(planned)
    assert batch.fields["teacher_top"].shape == (*batch.tokens.shape, 2, 9)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["by row", "divergence", "sibling"])
def test_a_distilled_run_is_resumed_bit_for_bit(tmp_path, kind):
    changes = {
        "by row": by_row(tmp_path),
        "divergence": divergence(alpha=0.5),
        "sibling": {**sibling(), "rewards": [{"use": f"{small_run.__file__}:digits"}]},
    }[kind]
    run = loop.train(small_run.config(tmp_path / "run", **changes, **{"checkpoint.every": 1}))
    logged = small_run.metrics(tmp_path / "run")
    distance = [row["distill/kl" if "distill/kl" in row else "kl"] for row in logged]
    assert np.isfinite(distance).all()
    again = died_and_resumed(
        small_run.config(tmp_path / "again", **changes, **{"checkpoint.every": 1}), 2
    )
    assert_same_bits(*(sharding.to_host(r.learner.trainable) for r in (run, again)))


def sibling(**entry):
    """SDPO: the mean of the policies, behind the prompt and a right answer of the group."""
    score = {"name": "teacher_logp", "policy": "ema", "prompt": SIBLING, "max_prompt_tokens": 128}
    return {
        "scores": [{**score, **entry}],
        "recipe": "sdpo",
        "reference.ema_decay": 0.95,
        "loss.surrogate": {"use": "cispo", "high": 2.0},
    }


def test_a_sibling_is_shown_to_the_samples_of_a_group_that_has_a_right_one():
    row, texts = {"prompt": "1+1="}, ["3", "2", "5"]
    shown = successful_sibling(row, texts, {"right": [0.0, 1.0, float("nan")], "style": [1, 1, 1]})
    assert shown[1] is None  # its own answer is the only right one
    assert shown[0] == shown[2]
    assert shown[0].startswith("1+1=")
    assert "\n2\n" in shown[0]
    assert successful_sibling(row, texts, {"right": [0.0, 0.0, 0.5]}) == [None] * 3
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}]
    first, _ = successful_sibling({"prompt": messages}, ["3", "2"], {"right": [0.0, 1.0]})
    assert first[:1] == messages[:1]
    assert first[1]["content"].startswith("1+1=")
    assert messages[1]["content"] == "1+1="


def feedback(row, completions, rewards):
    """A prompt with the first character of a sample, where it was wrong."""
    scores = rewards["arithmetic"]
    return [
        None if score > 0.5 else f"{row['prompt']}{text[:1]}{row['prompt']}"
        for text, score in zip(completions, scores, strict=True)
    ]


def test_texts_that_a_template_trims_to_the_same_tokens_are_prompts():
    tokenizer = character_tokenizer("abc", "{{ messages[0]['content'] | trim }}")
    chat = make_chat(tokenizer, "auto", None, {}, "model")
    function = PromptFunction(
        *("scores[0].prompt", prompt_field("f"), lambda row, completions: ["a", None, "a\n"]),
        *([{"prompt": "b"}], chat),
        limit=4,
        width=4,
        samples=3,
        by_sample=True,
    )
    first, second, third = (ids.tolist() for ids in function.encode(0, [""] * 3, {}))
    assert (first, second) == (tokenizer("a")["input_ids"], [])
    assert third == first
    with pytest.raises(InputError, match="the 2 rows differ, but all prompts are the same 1 tok"):
        encode([{"prompt": "a"}, {"prompt": "a\n"}], chat)


@pytest.mark.full
def test_feedback_stands_before_each_sample_and_none_leaves_it_out(tmp_path):
    changes = sibling(prompt=f"{__file__}:feedback", policy="trainer", max_prompt_tokens=24)
    del changes["reference.ema_decay"]
    run = setup(small_run.config(tmp_path, **changes))
    _, collected = by_hand.collect(run, run.learner, run.stream)
    rollouts, tokenizer = collected.rollouts, run.inputs.pretrained.tokenizer
    prompts = sharding.to_host(rollouts.fields[prompt_field("feedback")])
    right = sharding.to_host(rollouts.rewards["arithmetic"]) > 0.5
    assert prompts.shape[:2] == right.shape
    assert ((prompts >= 0).any(-1) == ~right).all()
    places = zip(*np.nonzero(~right), strict=True)
    for p, g in [*places][:5]:
        text = tokenizer.decode(prompts[p, g][prompts[p, g] >= 0])
        question = run.inputs.prompts.rows[int(rollouts.row[p])]["prompt"]
        assert text.startswith(question)
        assert text.endswith(question)
    rewards = rollouts.rewards["arithmetic"].at[0, 0].set(1.0)
    prompts = rollouts.fields[prompt_field("feedback")].at[0, 0].set(-1)
    fields = {**rollouts.fields, prompt_field("feedback"): prompts}
    rollouts = rollouts.__class__(
        **{
            **vars(rollouts),
            "fields": fields,
            "rewards": {**rollouts.rewards, "arithmetic": rewards},
        }
    )
    _, prepared = run.prepare(run.learner, rollouts)
    scored = prepared.metrics["distill/scored"].result()
    assert 0 < float(scored) < 1
    assert np.isfinite(sharding.to_host(prepared.advantage)).all()


@pytest.mark.full
def test_a_mean_over_taught_samples_leaves_the_others_out(tmp_path):
    (score,) = sibling(name="teacher_top", quantity="likeliest", policy="base")["scores"]
    changes = divergence(top="student", alpha=0.5) | {"scores": [score]}
    changes["advantage"] = [*NO_REWARD, {"use": "mask_untaught", "score": "teacher_top"}]
    run = setup(small_run.config(tmp_path, **changes))
    _, collected = by_hand.collect(run, run.learner, run.stream)
    rollouts = collected.rollouts
    prompts = rollouts.fields[prompt_field("successful_sibling")]
    # No sample of the first group has a teacher, and one of the second lacks it.
    prompts = prompts.at[0].set(-1).at[1:].set(prompts[1:].max((1, 2), keepdims=True).clip(1))
    fields = {**rollouts.fields, prompt_field("successful_sibling"): prompts.at[1, 2].set(-1)}
    rollouts = dataclasses.replace(rollouts, fields=fields)
    learner, prepared = run.prepare(run.learner, rollouts)
    taught = np.ones(rollouts.truncated.shape, bool)
    taught[0] = taught[1, 2] = False
    np.testing.assert_array_equal(prepared.live, taught)
    assert float(prepared.metrics["mask_untaught/masked"].result()) == pytest.approx(
        1 - taught.mean()
    )
    (batch,) = prepared.batches
    weight = sharding.to_host(batch.weight)
    number = sharding.to_host(rollouts.token_mask)[taught].sum()
    np.testing.assert_allclose(weight[weight > 0], 1 / number, rtol=1e-6)
    assert (weight > 0).sum() == number
    _, metrics = run.update(learner, prepared.batches)
    assert np.isfinite(float(metrics["kl"].result()))
    assert float(metrics["grad_norm"].result()) > 0


def texts(tmp_path, **columns):
    """A run on right answers that stand in the data."""
    return {
        "data.completion": "solution",
        "rollout.group_size": 1,
        **data(tmp_path, solution=lambda row, place: f"={row['answer']}", **columns),
    }


@pytest.mark.full
def test_texts_of_the_data_take_the_place_of_samples(tmp_path):
    run = setup(small_run.config(tmp_path, **divergence(), **texts(tmp_path)))
    _, collected = by_hand.collect(run, run.learner, run.stream)
    rollouts, tokenizer = collected.rollouts, run.inputs.pretrained.tokenizer
    rows = run.inputs.prompts.rows
    for p, row in enumerate(sharding.to_host(rollouts.row)):
        ids = sharding.to_host(rollouts.completion_tokens[p, 0])
        ids = ids[sharding.to_host(rollouts.token_mask[p, 0])]
        assert tokenizer.decode(ids, skip_special_tokens=True) == rows[row]["solution"]
        assert ids[-1] in run.blueprint.sampling.stop_tokens
    learner, prepared = run.prepare(run.learner, rollouts)
    _, metrics = run.update(learner, prepared.batches)
    assert prepared.live.all()
    assert float(metrics["kl"].result()) > 0
    assert float(metrics["grad_norm"].result()) > 0


@pytest.mark.full
def test_the_recipe_takes_texts_too(tmp_path):
    scores = [{"name": "teacher_logp", "policy": teacher()}]
    changes = {**REINFORCE, **texts(tmp_path), "scores": scores, "recipe": "opd"}
    loop.train(small_run.config(tmp_path / "run", **changes))
    logged = small_run.metrics(tmp_path / "run")
    assert all(row["distill/scored"] == 1 and np.isfinite(row["distill/kl"]) for row in logged)
    # No policy drew the texts: nothing is measured from its log-probs, and nothing warns of them.
    assert not {"entropy_estimated", "policy_kl", "ratio_max"} & logged[0].keys()
    # Files of texts have none of the data's columns, and are still no samples of the policy.
    saved = {**changes, "run.rollouts_every": 1, "train.steps": 1}
    run = loop.train(small_run.config(tmp_path / "saved", **saved))
    files = sorted((run.path / "rollouts").iterdir())
    again = loop.train(small_run.config(tmp_path / "again", **saved), rollouts=files)
    assert again.summary["parameter_hash"] == run.summary["parameter_hash"]
    (line,), (expected,) = (small_run.metrics(entry.path) for entry in (again, run))
    assert line["flops"] == expected["flops"]
    assert not {"entropy_estimated", "policy_kl", "ratio_max"} & line.keys()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"].keys() <= {
        "all fail",
        "all pass",
        "flat",
    }


@pytest.mark.full
def test_texts_bring_the_policy_nearer_to_its_teacher(tmp_path):
    changes = {**divergence(), **texts(tmp_path), "train.steps": 12}
    loop.train(small_run.config(tmp_path / "run", **changes))
    distance = [row["kl"] for row in small_run.metrics(tmp_path / "run")]
    assert np.mean(distance[-3:]) < 0.7 * distance[0]


def test_as_many_likeliest_tokens_as_there_are_leave_none_for_the_tail():
    model = tiny.model()
    wide = model._replace(config=dataclasses.replace(model.config, vocab_size=10**6))
    refuse_too_many({"teacher_top": tiny.VOCAB - 1}, [model, wide])
    refuse_too_many({}, [model])
    for models in ([model], [wide, model]):
        with pytest.raises(InputError, match=f"set k to {tiny.VOCAB - 1} or less"):
            refuse_too_many({"teacher_top": tiny.VOCAB}, models)


@pytest.mark.full
def test_what_cannot_teach_is_refused_before_a_run_begins(tmp_path):
    def refused(changes, **more):
        with pytest.raises(InputError) as caught:
            setup(small_run.config(tmp_path, **{**changes, **more}))
        return str(caught.value)

    misspelt = lambda row, place: "lagre" if place == 5 else "large"  # noqa: E731
    message = refused(by_row(tmp_path, misspelt))
    assert "row 5 (line 6) has teacher = 'lagre', which is none of them: did you mean" in message
    message = refused(by_row(tmp_path, choose_by="school"))
    assert "row 0 (line 1) has school = None, which is none of them" in message
    message = refused({**divergence(), "scores": [{"name": "teacher_top", "policy": teacher()}]})
    assert 'reads teacher_top, whose quantity is "logp": set it to "likeliest"' in message
    assert "tokens: set k to" in refused(divergence(k=20))  # of 18 in all
    chain = [{"use": "sum_rewards"}, {"use": "score_mean", "score": "teacher_top"}]
    message = refused({**divergence(), "advantage": chain[::-1]})
    assert "score_mean: teacher_top has shape" in message
    assert "expected [P, G, T]" in message
    alone = {**divergence(), "advantage": [chain[0], {"use": "mask_untaught"}]}
    message = refused({name: value for name, value in alone.items() if name != "loss.kl"})
    assert 'has quantity = "likeliest", and no loss says how many tokens' in message
    written = {**texts(tmp_path), "advantage": NO_REWARD}
    message = refused({**written, "loss.surrogate": {"use": "clip"}})
    assert 'set loss.proximal = "trainer"' in message
    mask = {"use": "off_policy_mask", "threshold": 1.0, "then": "reinforce"}
    message = refused({**written, "loss.surrogate": mask, "loss.proximal": "trainer"})
    assert "off_policy_mask in the loss reads behavior_logp" in message
    assert "row 0 (line 1) holds '=" in refused({**REINFORCE, **written, "rollout.group_size": 2})
    assert "have no such column" in refused({**REINFORCE, **written, "data.completion": "answers"})
    message = refused({**REINFORCE, **written, "rollout.max_completion_tokens": 2})
    assert "rollout.max_completion_tokens = 2: set it to that or more" in message
    message = refused(
        {**REINFORCE, **written, "rollout.early_stop": {"confidence": 1.0, "window": 4}}
    )
    assert "data.completion: with rollout.early_stop no text is stopped" in message
    message = refused(sibling(prompt=f"{__file__}:too_few"))
    assert "it returned a list of 1: return one entry for each sample" in message


def too_few(row, completions, rewards):
    return [None]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"policy": "base", "policies": {"a": "base"}}, "leave one of the two out"),
        ({"policies": {"a": 3}}, 'expected { name = "model" }'),
        ({"policies": ["base"]}, "expected a table"),
        ({"quantity": "likeliest", "count": 3}, "scores[0].count: unknown key"),
    ],
)
def test_entries_that_say_something_else_are_refused(tmp_path, entry, message):
    with pytest.raises(ConfigError) as caught:
        small_run.config(tmp_path, scores=[{"name": "teacher_logp", **entry}])
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [None, 3, [], [{"role": "user"}], float("nan")])
def test_a_column_of_prompts_for_scores_names_the_row_that_holds_none(value):
    rows = [{"prompt": "1+1=", "hint": "two"}, {"prompt": "2+2=", "hint": value}]
    assert _with_column(rows[:1], "hint", "scores[0].prompt")[0]["prompt"] == "two"
    with pytest.raises(InputError, match=r"^scores\[0\].prompt: row 1: column 'hint'"):
        _with_column(rows, "hint", "scores[0].prompt")
