"""`jaxgrpo probe --methods` and `atlas.methods`: what users name, and what they get."""

import functools
import json

import jax
import numpy as np
import pytest
import small_run

from jaxgrpo import advantages as adv
from jaxgrpo.cli import main
from jaxgrpo.config import files
from jaxgrpo.core.errors import InputError
from jaxgrpo.experiments.probe.command import probe
from jaxgrpo.training.loop import train
from jaxgrpo.training.records.logbook import Clock
from jaxgrpo.training.records.report import maps
from jaxgrpo.training.records.report.html import write_report
from jaxgrpo.training.records.report.record import read_run
from jaxgrpo.training.setup import setup
from jaxgrpo.update.atlas import Atlas, Atlases

NAMES = ("grpo", "dr_grpo", "loss.surrogate=reinforce", "rloo+loss.reduction=sequence_mean")


def group_of_99():
    return adv.chain(adv.sum_rewards(), adv.leave_one_out_pass_at_k(99))


def closed(completions, **columns):
    raise RuntimeError("no service")


def refused(tmp_path, methods, message, **options):
    with pytest.raises(InputError, match=message):
        probe(small_run.write(tmp_path / "run.toml", tmp_path / "run"), methods=methods, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["grpo"], "give two or more"),
        ("grpo,sign", r"give a list of names, as \['grpo', 'sign'\]"),
        (["grpo", "gpro"], "no recipe is called 'gpro': did you mean 'grpo'"),
        (["grpo", "grpo"], "grpo is there twice"),
        (["grpo", "optimizer.learning_rate=1"], "is no part of a method"),
        (["grpo", "loss.surrogate=clap"], "clap"),
        (["grpo", "alpha_dpg"], "reads base"),
        (["grpo", "opd"], "opd: reads teacher_logp"),
        (["grpo", f"{__file__}:missing"], "has no 'missing'"),
        (["grpo", "recipe=absent.py:f"], "there is no file"),
        (["grpo", "loss.surrogate=absent.py:f"], "there is no file"),
        (["grpo", f"{__file__}:group_of_99"], "k=99"),
    ],
)
def test_names_that_are_no_methods_are_refused_before_anything_is_sampled(
    tmp_path, monkeypatch, methods, message
):
    monkeypatch.setattr(Atlases, "draw", None)
    refused(tmp_path, methods, message)


def test_an_atlas_is_of_the_devices_that_its_config_names(tmp_path):
    absent = {"platform": "tpu"}
    refused(tmp_path, ["grpo", "sign"], 'platform = "tpu": JAX found cpu devices', mesh=absent)


def test_options_of_the_other_probe_are_refused(tmp_path):
    refused(
        tmp_path, ["grpo", "sign"], "--samples: an atlas is of the samples of a step", samples=4
    )


@pytest.mark.full
def test_the_command_compares_each_pair_and_draws_them(tmp_path, capsys):
    config = small_run.write(tmp_path / "run.toml", tmp_path / "run")
    words = [str(config), "--methods", ",".join(NAMES), "--html", str(tmp_path / "page.html")]
    assert main.main(["probe", *words, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert tuple(numbers["methods"]) == NAMES
    cosines = np.array(numbers["cosines"], float)
    np.testing.assert_allclose(np.diag(cosines), 1)
    np.testing.assert_allclose(cosines, cosines.T)
    # On its own samples a policy's ratio is 1, and clipping changes nothing.
    assert cosines[0, 2] == pytest.approx(1, abs=1e-4)
    assert numbers["norms"][2] == pytest.approx(1, rel=1e-4)
    assert "loss.surrogate=reinforce" not in (page := (tmp_path / "page.html").read_text())
    assert "image/svg+xml" in page  # names are in the picture alone


@pytest.mark.full
def test_a_reward_that_fails_leaves_no_update_and_is_shown(tmp_path, capsys):
    rewards = [{"use": f"{__file__}:closed", "on_error": "unscored"}]
    config = small_run.write(tmp_path / "run.toml", tmp_path / "run", rewards=rewards)
    assert main.main(["probe", str(config), "--methods", "grpo,sign", "--json"]) == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out)["cosines"] == [[None, None], [None, None]]
    assert streams.err.count("rewards.closed raised RuntimeError on completion") == 1


@pytest.mark.full
@pytest.mark.slow
def test_a_run_logs_its_atlas_shows_it_and_trains_as_without(tmp_path):
    atlas = {"atlas.methods": ["rloo", "dr_grpo"], "atlas.every": 2}
    alone = train(small_run.config(tmp_path / "alone"))
    run = train(small_run.config(tmp_path / "run", **atlas, **{"run.report": True}))
    assert run.summary["parameter_hash"] == alone.summary["parameter_hash"]
    pairs = [{name for name in line if name.startswith(maps.COSINE)} for line in run.metrics]
    assert [bool(names) for names in pairs] == [True, True, False]
    names = ("run/rloo", "run/dr_grpo", "rloo/dr_grpo")
    assert pairs[0] == {f"{maps.COSINE}{pair}" for pair in names}
    latest = maps.latest(read_run(run.path))
    assert latest is not None
    step, atlas_map = latest
    assert (step, atlas_map.names[0]) == (2, "run")
    assert "Updates of methods" in write_report(run.path).read_text()


@pytest.mark.slow
def test_metrics_name_own_code_as_the_config_does(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jaxgrpo import advantages\ndef chain(): return advantages.sign()\n"
    )
    tables = small_run.tables(tmp_path / "run", **{"atlas.methods": ["mine.py:chain"]})
    run = setup(files.from_dict(tables, source=tmp_path / "run.toml"))
    assert run.atlases is not None
    assert run.atlases.names == ("run", "mine.py:chain")


@pytest.mark.full
def test_on_a_run_the_cosines_are_those_of_its_updates_within_three_hundredths(tmp_path):
    """The step of plain descent that a run of each recipe makes of the same samples."""
    recipes = ("grpo", "dr_grpo", "passk", "reinforce")
    sgd = {"optimizer": {"use": "sgd", "learning_rate": 1.0, "clip_norm": 0.0}}
    sizes = {"rollout.prompts_per_step": 16, "rollout.group_size": 8}
    run = setup(small_run.config(tmp_path / "run", **{"atlas.methods": recipes, **sizes}, **sgd))
    live_groups, clock = functools.partial(run.live_groups, run.learner), Clock(lambda phase: None)
    _, collected = run.collect(run.sync(run.learner), 0, run.stream, live_groups, clock)
    assert run.atlases is not None
    atlas = run.atlases.draw(run.learner, collected.rollouts)
    moves = []
    for recipe in recipes:
        with_recipe = setup(small_run.config(tmp_path / recipe, recipe=recipe, **sizes, **sgd))
        learner, prepared = with_recipe.prepare(with_recipe.learner, collected.rollouts)
        before = [np.array(leaf) for leaf in jax.tree.leaves(learner.trainable)]
        learner, _ = with_recipe.update(learner, prepared.batches)
        after = jax.tree.leaves(learner.trainable)
        moved = [np.ravel(leaf - old) for leaf, old in zip(after, before, strict=True)]
        moves.append(np.concatenate(moved).astype(np.float64))
    steps = np.stack(moves)
    want = Atlas(recipes, steps @ steps.T)
    np.testing.assert_allclose(atlas.cosines[1:, 1:], want.cosines, atol=0.03)
    np.testing.assert_allclose(atlas.norms[1:], want.norms, rtol=0.03)
    assert want.cosines.min() < 0.9
