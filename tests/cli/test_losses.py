"""`jaxgrpo losses` in process: lists, loss and gradient by ratio, and what own code gets wrong."""

from __future__ import annotations

import json
import math

import pytest
from printed import printed
from quick import full_but

from jaxgrpo.losses import registry

OWN = """
import jax.numpy as jnp
from jaxgrpo.losses import Penalty, Surrogate, log_ratio


def plain(tokens):
    return -tokens.logp * tokens.advantage, {}


def branches(tokens):
    if tokens.logp.sum() > 0:
        return tokens.logp, {}
    return tokens.logp, {}


def mean_of_sequence():
    def compute(tokens):
        log_rho, _ = log_ratio(tokens)
        rho = jnp.exp(log_rho.mean(-1, keepdims=True))
        return -rho * tokens.without_gradient(tokens.advantage), {}

    return Surrogate("mean_of_sequence", compute, per_token=True)


def square(scale):
    def compute(tokens):
        far = tokens.log_ratio_to(tokens.field("column", "square", "a column"))
        return scale * far**2, {"far": far.max()}

    return Penalty("square", compute, needs=frozenset({"column"}))


def infinite():
    def compute(tokens):
        return tokens.unmasked(tokens.logp) / 0.0, {}

    return Surrogate("infinite", compute)
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    return file


def output(capsys, *arguments, code=0):
    text = printed(capsys, "losses", *arguments, code=code)
    return text if code == 0 else " ".join(text.split())


def shown(capsys, *arguments):
    return json.loads(output(capsys, *arguments, "--json"))


def test_every_part_is_listed_and_described(capsys):
    text = output(capsys)
    tables = (registry.surrogates, registry.penalties, registry.entropies, registry.reductions)
    for table in tables:
        for name in table:
            assert f"{name} " in text
    listed = shown(capsys)
    assert listed["penalties (loss.kl)"].keys() == registry.penalties.keys()
    assert "--option beta=0.1 shows what it does" in output(capsys, "k2")
    assert "options: (" in output(capsys, "token_mean")
    for name in ("k2", "token_mean"):  # k2 lacks an option: it cannot be shown at work
        about = shown(capsys, name)
        assert about.keys() == {"name", "description", "options"}
        assert about["description"] in output(capsys, name)
        assert f"options: {about['options']}" in output(capsys, name)


@pytest.mark.slow
def test_loss_and_gradient_of_clip_are_those_of_the_paper(capsys):
    document = shown(capsys, "clip", "--ratio", "0.5,1,1.5", "--option", "high=0.28")
    rows = [tuple(round(value, 3) for value in row.values()) for row in document["rows"]]
    assert rows == [
        (1, 0.5, -0.5, -0.5),
        (1, 1, -1, -1),
        (1, 1.5, -1.28, 0),
        (-1, 0.5, 0.8, 0),
        (-1, 1, 1, 1),
        (-1, 1.5, 1.5, 1.5),
    ]
    assert document["no_gradient"] == {
        "1": [[pytest.approx(1.28, abs=5e-3), None]],
        "-1": [[None, pytest.approx(0.8, abs=5e-3)]],
    }
    assert document["problems"] == []
    text = output(capsys, "clip", "--ratio", "0.5,1,1.5", "--option", "high=0.28")
    assert "A = 1: no gradient at ratios from 1.28 up" in text
    assert " 1    1.5  -1.28            0\n" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    full_but(("clip", "gspo", "gvpo", "topr"), sorted(registry.surrogates.keys() - {"by_sample"})),
)
def test_a_built_in_surrogate_has_no_problem(capsys, name):
    options = ("--option", "threshold=0.1") if name == "off_policy_mask" else ()
    assert shown(capsys, name, *options)["problems"] == []


def test_a_penalty_reads_its_fields(capsys):
    arguments = ("k2", "--option", "beta=0.1", "--ratio", "1", "--field", "reference_logp=-2")
    (row,) = shown(capsys, *arguments)["rows"]
    assert row["loss"] == pytest.approx(0.1 * 2 * 2 / 2)
    assert row["dloss/dlogp"] == pytest.approx(0.1 * 2)
    (row,) = shown(capsys, "bonus", "--option", "coefficient=0.5", "--ratio", "1")["rows"]
    assert row["dloss/dpolicy_entropy"] == pytest.approx(-0.5)
    assert row["dloss/dlogp"] == 0


@pytest.mark.slow
def test_ratios_of_one_sequence_share_what_a_sequence_has(capsys):
    document = shown(capsys, "gspo", "--ratio", "0.9,1", "--advantage", "1", "--one-sequence")
    mean = math.sqrt(0.9)
    assert [row["loss"] for row in document["rows"]] == pytest.approx([-mean, -mean])
    apart = shown(capsys, "gspo", "--ratio", "0.9,1", "--advantage", "1")
    assert [row["loss"] for row in apart["rows"]] == pytest.approx([-0.9, -1])


@pytest.mark.slow
def test_own_code_is_shown_and_its_faults_are_named(capsys, user_file):
    document = shown(capsys, f"{user_file}:plain", "--ratio", "1,2", "--advantage", "3")
    assert [row["dloss/dlogp"] for row in document["rows"]] == [-3, -3]
    (problem,) = document["problems"]
    assert problem.startswith("a masked token that holds NaN counts: ")
    masked, problem = shown(capsys, f"{user_file}:mean_of_sequence")["problems"]
    assert masked.startswith("a masked token that holds NaN counts"), "it is in the mean"
    assert "it says per_token = True, but" in problem
    assert "the loss at ratio 0.5 and A = 1 is -inf" in output(capsys, f"{user_file}:infinite")
    arguments = ("--option", "scale=2", "--field", "column=-1", "--ratio", "1")
    document = shown(capsys, f"{user_file}:square", *arguments)
    assert document["rows"][0]["loss"] == pytest.approx(2)
    assert document["metrics"]["1"] == {"far": pytest.approx(1)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("clipp",), "did you mean 'clip'"),
        (("clip", "--ratio", "0,1"), "--ratio 0,1: expected ratios above 0"),
        (("clip", "--option", "hihg=1"), "unknown option 'hihg': did you mean 'high'"),
        (("k2", "--option", "beta=1", "--field", "x=1"), "k2 reads no such field"),
        (("k2", "--option", "beta=1", "--field", "reference_logp=1,2"), "expected one number"),
        (("--ratio", "1"), "losses --ratio: give a NAME too"),
        (("--one-sequence",), "losses --one-sequence: give a NAME too"),
        (("token_mean", "--ratio", "1"), "losses token_mean --ratio: a reduction is described"),
        (("token_mean", "--json", "--one-sequence"), "token_mean --one-sequence: a reduction"),
        (("OWN:square", "--option", "scale=1"), "square reads columns of the data: give --field"),
        (("OWN:square",), "missing a required argument: 'scale'"),
        (("OWN:branches",), "mine.py:branches, line 11: if tokens.logp.sum() > 0:) asks whether"),
    ],
)
def test_what_cannot_be_shown_is_refused(capsys, user_file, arguments, message):
    replaced = (word.replace("OWN", str(user_file)) for word in arguments)
    assert message in output(capsys, *replaced, code=2)
