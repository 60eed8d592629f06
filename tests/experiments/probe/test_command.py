"""`jaxgrpo probe` on models whose success rate on every prompt is known."""

from __future__ import annotations

import contextlib
import io
import json
import math

import comparisons
import minimal_config
import numpy as np
import pytest
import small_run
import tables
import tomli_w

from jaxgrpo.cli import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.experiments.probe import command

pytestmark = pytest.mark.slow

EQUAL = [0.4] * 200
BIMODAL = [0.0] * 80 + [1.0] * 40 + [0.5] * 80
SAMPLES = 16


@pytest.fixture(autouse=True, scope="module")
def one_device():
    """As of a comparison; `test_commands` probes on four."""
    with comparisons.one_device():
        yield


def probe(capsys, *arguments):
    code = main.main(["probe", *map(str, arguments)])
    streams = capsys.readouterr()
    return code, streams.out + streams.err


def document(capsys, *arguments):
    """What `probe ... --json` prints on stdout, and on stderr."""
    code = main.main(["probe", *map(str, arguments), "--json"])
    streams = capsys.readouterr()
    assert code == 0, streams.err
    return json.loads(streams.out), streams.err


def command_words(folder, *more):
    """The arguments of a probe of the table in a folder."""
    words = ("--data", folder / "data.jsonl", "--reward", tables.REWARD)
    return folder / "model", *words, *more, "--set", *tables.GEOMETRY, "data.answer=answer"


def test_rows_from_python_are_asked_beside_a_config_that_mixes_data(tmp_path):
    mixed = [{"path": "task:arithmetic:train"}, {"path": "task:confidence:train"}]
    file = tmp_path / "mix.toml"
    file.write_text(tomli_w.dumps(minimal_config.tables(data={"path": mixed})))
    config = command._config(str(file), {}, (), rows=[{"prompt": "1+1=", "answer": "2"}])
    assert config.data.paths == tuple(part["path"] for part in mixed)
    with pytest.raises(InputError, match=r"data.path mixes .*: give --data, one of them"):
        command._config(str(file), {}, ())


def test_a_run_on_rows_from_python_is_probed_on_its_evaluation_data(tmp_path):
    """The rows are gone. Samples, prompts and scorer are those of a probe all the same."""
    keys = {"data": "task:confidence:test", "samples": 3, "prompts": 7, "scorer": "math"}
    stored_tables = minimal_config.tables(data={}, eval=keys)
    (tmp_path / "config.toml").write_text(tomli_w.dumps(stored_tables))
    config = command._config(tmp_path, {}, ())
    probed = config.eval
    assert (probed.data, config.scorer_name) == ("task:confidence:test", "arithmetic")
    assert (probed.samples, probed.prompts) == (16, None)


def table(folder, rates):
    tables.write_model(folder / "model", rates)
    tables.write_data(folder / "data.jsonl", len(rates))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    rates_by_name = {"equal": EQUAL, "bimodal": BIMODAL}
    return {
        name: table(tmp_path_factory.mktemp(name), rates) for name, rates in rates_by_name.items()
    }


@pytest.fixture(scope="module")
def probes(folders):
    """What the command prints of each; its page lies beside the model."""
    read = {}
    for name, folder in folders.items():
        words = command_words(folder, "--json", "--html", folder / "out.html", "--samples", SAMPLES)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main.main(["probe", *map(str, words)]) == 0
        read[name] = json.loads(out.getvalue())
    return read


def flat(p, size):
    return p**size + (1 - p) ** size


def test_an_environment_that_rewards_alone_is_probed_by_it(tmp_path):
    (tmp_path / "mine.py").write_text("class Env: ...\n")
    file = small_run.write(
        tmp_path / "run.toml",
        tmp_path / "run",
        rewards=[],
        environment=f"{tmp_path}/mine.py:Env",
        **{"data.path": "task:arithmetic:train"},
    )
    config = command._config(file, {}, ())
    assert (config.rewards, config.scorer_name) == ((), "environment")
    assert config.eval.data == "task:arithmetic:train"


def test_a_table_of_eval_and_names_in_quotes_are_keys_of_a_probe(tmp_path):
    file = small_run.write(
        tmp_path / "run.toml", tmp_path / "run", **{"eval.samples": 3, "eval.prompts": 7}
    )
    table = 'eval = { data = "task:arithmetic:test", samples = 8, scorer = "math" }'
    keys = command._config(file, {}, [table]).eval
    assert (keys.data, keys.samples, keys.scorer) == ("task:arithmetic:test", 8, "math")
    keys = command._config(file, {}, ['eval . "samples" = 5']).eval
    assert (keys.samples, keys.prompts) == (5, None)


@pytest.mark.full
def test_on_equal_prompts_the_gap_is_zero_within_its_interval(probes):
    for size in (2, 4, 8, 16):
        group = probes["equal"]["degeneracy"][str(size)]
        low, high = group["ci"]
        assert low < 0 <= high
        assert group["gap"] == pytest.approx(group["measured"] - group["iid"], abs=1e-6)
        assert group["iid"] == pytest.approx(flat(0.4, size), abs=0.03)
    # Rates c / N put into p^G + (1 - p)^G find a gap where there is none.
    group = probes["equal"]["degeneracy"]["4"]
    rates = np.repeat(np.arange(SAMPLES + 1), probes["equal"]["success"]["histogram"]) / SAMPLES
    plugged = flat(rates, 4).mean() - flat(rates.mean(), 4)
    assert plugged - group["gap"] == pytest.approx(0.0475, abs=0.006)
    assert plugged > group["ci"][1]


def test_on_a_bimodal_table_degeneracy_and_pass_at_k_are_those_of_the_table(probes):
    bimodal = probes["bimodal"]
    iid = {2: 0.520, 4: 0.155, 8: 0.0175}
    for size, measured in {2: 0.800, 4: 0.650, 8: 0.603}.items():
        assert measured == pytest.approx(0.6 + 0.4 * flat(0.5, size), abs=5e-4)
        assert iid[size] == pytest.approx(flat(0.4, size), abs=5e-4)
        group = bimodal["degeneracy"][str(size)]
        # 80 prompts at a half, each with 16 samples: the estimate's deviation by enumeration.
        chance = np.array([math.comb(16, c) / 2**16 for c in range(17)])
        drawn = [
            (math.comb(c, size) + math.comb(16 - c, size)) / math.comb(16, size) for c in range(17)
        ]
        deviation = 0.4 * np.sqrt(chance @ np.square(drawn) - (chance @ drawn) ** 2) / np.sqrt(80)
        assert group["measured"] == pytest.approx(measured, abs=3 * deviation + 5e-4)
        # 1280 draws at a half; the 200 prompts were not drawn: 1 / 200 of the variance is missing.
        slope = size * abs(0.4 ** (size - 1) - 0.6 ** (size - 1))
        assert group["iid"] == pytest.approx(
            iid[size], abs=3 * slope * 0.4 * 0.5 / np.sqrt(1280) + 0.01
        )
        low, high = group["ci"]
        assert 0 < low < measured - iid[size] < high
    for k, value in {1: 0.400, 4: 0.575, 16: 0.600}.items():
        low, high = bimodal["pass_at"][str(k)]["ci"]
        assert low < value < high
        assert bimodal["pass_at"][str(k)]["value"] == pytest.approx(value, abs=0.02)
    assert bimodal["success"]["at_zero"] == pytest.approx(0.4, abs=0.005)
    assert bimodal["success"]["at_one"] == pytest.approx(0.2, abs=0.005)
    assert bimodal["success"]["histogram"][0] == 80


def test_live_groups_and_tokens_of_a_step_follow_from_the_table(probes):
    bimodal = probes["bimodal"]
    assert bimodal["prompts_per_step"] == 8
    for size in (2, 4, 8):
        group = bimodal["degeneracy"][str(size)]
        live = 1 - group["measured"]
        assert group["live_groups"] == pytest.approx(8 * live, abs=1e-4)
        assert group["live_tokens"] == pytest.approx(8 * live * size * 2, rel=1e-5)  # answer, end
        assert group["live_groups_per_1000_samples"] == pytest.approx(1000 * live / size, rel=1e-5)
        assert group["all_fail"] - group["all_pass"] == pytest.approx(0.2, abs=0.05)
        assert group["lucky"] == 0  # no prompt that is seldom right ever is
    assert bimodal["format"] == pytest.approx(
        {"cut": 0, "blank": 0, "tags": 0, "mean_tokens": 2}
        | {"mean_tokens_right": 2, "mean_tokens_wrong": 2}
    )
    assert bimodal["diversity"]["distinct_completions"] == pytest.approx(0.6 + 0.4 * 2, abs=0.02)
    assert bimodal["diversity"]["same_completion"] == pytest.approx(0.8, abs=0.02)
    assert bimodal["calibration"] is None
    assert bimodal["agreement"]["tokens"] == 200 * SAMPLES * 2
    assert bimodal["agreement"]["max"] < 1e-4


def test_the_page_holds_its_charts_and_the_advice(probes, folders):
    for name, folder in folders.items():
        page = (folder / "out.html").read_text()
        assert page.count("data:image/svg+xml;base64,") == 4
        assert probes[name]["advice"]
        assert "rollout.group_size = " in page
        assert "<script" not in page


def test_the_advice_tells_bimodal_from_equal_prompts(probes):
    says = {name: " ".join(item["says"] for item in of["advice"]) for name, of in probes.items()}
    assert "difficulty_band" in says["bimodal"]
    assert "`sign`" in says["bimodal"]
    assert "no filter of prompts" in says["equal"]
    assert "`sign`" not in says["equal"]


@pytest.mark.full
def test_a_disagreement_of_sampler_and_trainer_is_measured_and_told(folders, monkeypatch, capsys):
    draw = command.draw

    def shifted(*arguments):
        answers = draw(*arguments)
        return answers._replace(logp=answers.logp - np.where(answers.mask, 0.25, 0))

    monkeypatch.setattr(command, "draw", shifted)
    arguments = command_words(folders["equal"], "-n", 2, "--num-prompts", 5)
    code, output = probe(capsys, *arguments)
    assert code == 0, output
    agreement = document(capsys, *arguments)[0]["agreement"]
    assert agreement["tokens"] == 5 * 2 * 2
    assert agreement["mean"] == pytest.approx(0.25, abs=1e-5)
    assert agreement["kl"] == pytest.approx(math.exp(0.25) - 1.25, abs=1e-5)
    assert "sampler and trainer disagree by 0.25 nats per token" in " ".join(output.split())


@pytest.mark.full
def test_a_config_names_model_data_and_reward(folders, tmp_path, capsys):
    folder, file = folders["bimodal"], tmp_path / "run.toml"
    lines = {
        "model.path": folder / "model",
        "data.path": folder / "data.jsonl",
        "recipe": "grpo",
        "run.dir": "runs/none",
    }
    numbers = {
        "optimizer.learning_rate": 1e-3,
        "rollout.prompts_per_step": 40,
        "rollout.group_size": 4,
        "rollout.max_prompt_tokens": 1,
        "rollout.max_completion_tokens": 2,
        "train.steps": 1,
    }
    # An evaluation's own data, judge and numbers are not those of a probe.
    eval_data = tables.write_data(tmp_path / "other.jsonl", 9)
    lines |= {"eval.data": eval_data, "eval.scorer": "math"}
    numbers |= {"eval.samples": 3, "eval.prompts": 7}
    text = [f'{name} = "{value}"' for name, value in lines.items()]
    text += [f"{name} = {value}" for name, value in numbers.items()]
    file.write_text("\n".join([*text, f'rewards = [{{ use = "{tables.REWARD}" }}]']))
    probed, _ = document(capsys, file)
    assert (probed["reward"], probed["data"]) == ("right", str(folder / "data.jsonl"))
    assert (probed["samples"], probed["prompts"], probed["prompts_per_step"]) == (16, 200, 40)
    probed, _ = document(capsys, file, "-n", 2, "--set", "eval.prompts=120")
    assert (probed["reward"], probed["samples"], probed["prompts"]) == ("right", 2, 120)
    assert probed["degeneracy"]["2"]["measured"] == 1  # 80 prompts at 0, 40 at 1
    assert not (tmp_path / "runs").exists()
    text = file.read_text().replace(tables.REWARD, f"{__file__}:refuses_no")
    file.write_text(text)
    arguments = (file, "-n", 2, "--num-prompts", 120)
    code, output = probe(capsys, *arguments)
    assert (code, "no opinion of n" in output) == (2, True), output
    probed, shown = document(capsys, *arguments, "--set", "rewards.0.on_error=unscored")
    assert probed["success"]["unscored"] > 0.5
    assert shown.count("raised ValueError on completion") == 1
    assert 'left unscored, as on_error = "unscored" says' in shown
    assert "health" in {item["about"] for item in probed["advice"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["M", "--reward", "math"], "no prompts to probe with; give --data"),
        (["M", "--data", "task:arithmetic:test"], "nothing judges the answers; give --reward"),
        (["M", "--data", "D", "--reward", "R", "-n", "1"], "a group needs 2 or more"),
        (["M", "--data", "D", "--reward", "R", "--level", "99"], "expected a share from 0.5"),
        (["M", "--data", "D", "--reward", "R", "--html", "no/o.html"], "there is no folder no"),
        (["M", "--data", "D", "--reward", "R", "--html", "."], "is a folder"),
        (["M", "--data", "D", "--reward", "aritmetic"], "arithmetic"),
        (["M", "--data", "D", "--reward", f"{__file__}:needs_level"], "asks for 'level'"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_sampled(
    arguments, message, folders, monkeypatch, capsys
):
    monkeypatch.setattr(command, "draw", None)
    folder = folders["equal"]
    stand_for = {"M": folder / "model", "D": folder / "data.jsonl", "R": tables.REWARD}
    words = [stand_for.get(argument, argument) for argument in arguments]
    code, output = probe(capsys, *words, "--set", *tables.GEOMETRY)
    assert code == 2, output
    assert message in output


def refuses_no(completions, **columns):
    if "n" in completions:
        raise ValueError("no opinion of n")
    return [1.0] * len(completions)


def needs_level(completions, level, **columns):
    return level
