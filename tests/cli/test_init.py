"""What `jaxgrpo init` writes: for a small base, and for a model by its size and chat template."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import tables

from jaxgrpo.cli import init
from jaxgrpo.cli.main import main
from jaxgrpo.config import files
from jaxgrpo.config.own_code import load
from jaxgrpo.models.hf import folders

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tables.write_model(tmp_path_factory.mktemp("init") / "model", (0.5,))


@pytest.fixture(scope="module")
def chat_model(model, tmp_path_factory) -> Path:
    folder = tables.write_model(tmp_path_factory.mktemp("init") / "chat", (0.5,))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert folders.read_tokenizer(folder).chat_template
    return folder


@pytest.mark.slow
def test_a_project_for_a_model_is_a_right_config_and_makes_no_base(
    chat_model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(chat_model.parent)
    folder = tmp_path / "first run"
    assert main(["init", str(folder), "--model", "chat"]) == 0
    printed = capsys.readouterr().out
    assert f"train:   cd {shlex.quote(str(folder))} && jaxgrpo train" in printed
    assert "rows:    sums; put yours into data.jsonl and test.jsonl" in printed
    assert {path.name for path in folder.iterdir()} == set(init.file_texts(init.SMALL))
    config = files.load(folder / "run.toml")
    assert config.model.path == str(chat_model)
    assert config.data.prompt == "What is {question}? Answer with the number only."
    assert (config.rollout.max_completion_tokens, config.rollout.stop_strings) == (256, ())
    assert config.optimizer.learning_rate == 1e-4, "it is tiny"
    assert config.eval.data == str(folder / "test.jsonl")
    train, test = (
        set((folder / name).read_text().splitlines()) for name in ("data.jsonl", "test.jsonl")
    )
    assert not train & test, "held out"
    assert main(["init", str(folder), "--model", "chat"]) == 2
    assert "test.jsonl is there already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_may_be_named_from_the_home_folder(chat_model, monkeypatch):
    monkeypatch.setenv("HOME", str(chat_model.parent))
    assert init.project_for("~/chat").model == str(chat_model)


def test_a_model_that_would_think_is_told_not_to(chat_model, tmp_path):
    folder = shutil.copytree(chat_model, tmp_path / "thinks")
    (folder / "chat_template.jinja").write_text(
        f"{TEMPLATE}{{% if enable_thinking %}}{{% endif %}}"
    )
    no_thoughts = {"enable_thinking": False}
    for model, kwargs in ((chat_model, None), (folder, no_thoughts)):
        config = files.tomllib.loads(init.run_toml(init.project_for(str(model))))
        assert config["data"].get("chat_template_kwargs") == kwargs


def test_a_model_without_a_chat_template_completes_text_to_the_end_of_the_line(model):
    project = init.project_for(str(model))
    assert (project.prompt, project.stop) == ("{question}=", "\n")
    assert 'rollout.stop_strings = ["\\n"]' in init.run_toml(project)


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [(1e5, 1e-4), (1.35e8, 1e-5), (6e8, 3e-6), (1e9, 1e-6), (8e9, 1e-6), (7e10, 1e-6)],
)
def test_the_rate_falls_with_the_size(parameters, rate):
    assert init.rate_for(int(parameters)) == rate
    project = init.SMALL._replace(rate=rate, model='a "model" of \\ signs 😀')
    config = files.tomllib.loads(init.run_toml(project))
    assert config["optimizer"]["learning_rate"] == rate
    assert config["model"]["path"] == project.model


def test_the_reward_reads_the_last_number_in_every_form_of_text(tmp_path):
    (tmp_path / "reward.py").write_text(init.REWARD)
    correct = load(f"{tmp_path}/reward.py:correct")
    texts = ["46", "12+34 is 46.", "46 or 47", "-46", "none", ""]
    assert correct(texts, ["46"] * 6) == [1, 1, 0, 0, 0, 0]
    assert correct(["46"], [46]) == [1], "as JSON may have it"


def test_no_model_is_refused_before_anything_is_written(tmp_path, capsys):
    assert main(["init", str(tmp_path / "a"), "--model", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_comparison_has_as_many_seeds_as_a_p_below_the_level_takes(tmp_path):
    from jaxgrpo.experiments.compare import experiment, results

    for name, text in init.file_texts(init.SMALL).items():
        (tmp_path / name).write_text(text)
    written = experiment.load(tmp_path / "experiment.toml")
    assert results.detectable(written)[1] <= written.level
    assert not written.tuning_seeds
    assert json.loads((tmp_path / "test.jsonl").read_text().splitlines()[0]).keys() == {
        "question",
        "answer",
    }
