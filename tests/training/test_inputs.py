"""From a config's data keys to prompts, in a whole setup: templates, rewards, bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import by_hand
import datasets
import gsm8k
import minimal_config
import numpy as np
import pytest

from jaxgrpo.cli import main
from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import DataKeys, EvalKeys, PartKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import tasks
from jaxgrpo.data.prompts import PLACEHOLDER
from jaxgrpo.models.hf import folders
from jaxgrpo.planning import preview
from jaxgrpo.training import inputs, loop, stored_policy
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    gsm8k.checkpoint(folder)
    return str(folder)


def config(folder: Path, model: str, **changes) -> Config:
    """A run of one step on GSM8K's questions; changes are dotted keys, None takes a key out."""
    tables = {
        "model": {"path": model},
        "data": {"prompt": "question"},
        "rewards": [{"use": f"{__file__}:length"}],
        "optimizer": {"learning_rate": 1e-3},
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 2,
            "max_prompt_tokens": 256,
            "max_completion_tokens": 8,
            "segment_tokens": 8,
        },
        "train": {"steps": 1},
        "eval": {"kl_to_base": False},
        "run": {"dir": str(folder / "run")},
    }
    if "data.path" not in changes:
        changes["data.path"] = str(gsm8k.source(folder, count=40))
    for key, value in changes.items():
        table, _, name = key.partition(".")
        tables[table][name] = value
        if value is None:
            del tables[table][name]
    return configs.from_dict(tables)


def write(folder: Path, model: str) -> Path:
    """That config as a TOML file."""
    file = folder / "run.toml"
    file.write_text(configs.to_toml(config(folder, model)))
    return file


def length(completions, **columns):
    return [float(len(str(completion))) for completion in completions]


@pytest.mark.parametrize("count", [1000, pytest.param(None, marks=pytest.mark.full)])
def test_gsm8k_becomes_chat_prompts_within_the_limit(tmp_path, model, count):
    questions = gsm8k.rows(count=count)
    tokenizer = folders.read_tokenizer(model)
    changes = {"data.path": str(gsm8k.source(tmp_path, count=count)), "data.too_long": "drop"}
    changes |= {"data.prompt": "{question} Think.", "data.system": "Be brief."}
    run_config = config(tmp_path, model, **changes)
    chat = inputs.make_chat(run_config.data, model, tokenizer)
    got = inputs.load_prompts(run_config.data, run_config.rollout.max_prompt_tokens, chat)
    assert len(got.rows) + got.dropped == len(questions)
    assert len(got.rows) > 0.8 * len(questions)
    fitting = [row["question"] for row in got.rows]
    assert set(fitting) <= {row["question"] for row in questions}
    assert max(map(len, got.encoded)) <= 256
    for row, ids in zip(got.rows[:50], got.encoded[:50], strict=True):
        assert row["answer"].rpartition("#### ")[2].replace(",", "").lstrip("-").isdigit()
        assert tokenizer.decode(ids) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
            f"{row['question']} Think.<|im_end|>\n<|im_start|>assistant\n"
        )


@pytest.mark.full
def test_rewards_get_texts_for_texts_although_a_template_wraps_them(tmp_path, model):
    received = {}

    def see(prompts, completions, question, answer, **columns):
        received.update(prompts=prompts, question=question, answer=answer, completions=completions)
        return [0.0] * len(completions)

    run = setup(config(tmp_path, model), rewards=[see])
    by_hand.collect(run, run.learner, run.stream)
    assert received["prompts"] == received["question"]
    assert len(received["prompts"]) == 8
    assert set(received["question"]) <= {row["question"] for row in gsm8k.rows(count=40)}
    assert all(isinstance(text, str) for text in received["completions"])


@pytest.mark.full
def test_rewards_get_messages_for_messages_and_samples_show_them(tmp_path, model):
    received = {}

    def see(prompts, completions, **columns):
        received.update(prompts=prompts, completions=completions)
        return [float(len(message["content"])) for (message,) in completions]

    rows = [
        {"messages": [{"role": "user", "content": row["question"]}], "gold": row["answer"]}
        for row in gsm8k.rows(count=8)
    ]
    keys = {"data.path": "task:arithmetic:train", "data.prompt": "messages", "data.answer": "gold"}
    run_config = config(tmp_path, model, **keys)
    finished = loop.train(run_config, rewards=[see], dataset=datasets.Dataset.from_list(rows))
    assert received["prompts"][0] == received["prompts"][1]
    assert received["prompts"][0] in [row["messages"] for row in rows]
    assert {message["role"] for (message,) in received["completions"]} == {"assistant"}
    lines = (finished.path / "samples" / "step_1.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["prompt"] == received["prompts"][0]


def test_rows_from_python_need_no_data_path(tmp_path, model):
    run_config = config(tmp_path, model, **{"data.path": None})
    rows = gsm8k.rows(count=5)
    assert [row["prompt"] for row in setup(run_config, dataset=rows).inputs.prompts.rows] == [
        row["question"] for row in rows
    ]
    with pytest.raises(InputError, match=r"data.path: missing; give a .jsonl, .csv or .*dataset="):
        setup(run_config)


def test_without_data_an_environment_has_one_row():
    """As in TRL, whose `reset` then says what is asked."""
    ((row,), mixture) = inputs.load_rows(DataKeys(prompt="", answer=""))
    assert (row, mixture) == ({"prompt": PLACEHOLDER}, None)


def prompts_of_rows(keys, source):
    return [row["prompt"] for row in inputs.load_rows(keys, source)[0]]


def held_out_prompts(has_rows=False, **keys):
    data = DataKeys(**keys)
    evaluation = EvalKeys(data="task:demonstrated:test?size=3")
    return prompts_of_rows(data, inputs.eval_source(evaluation, data, has_rows))


def test_a_task_is_asked_by_the_column_or_template_that_data_prompt_names():
    plain = [row["prompt"] for row in tasks.load("task:demonstrated:test", 3)]
    shown = [row["shown"] for row in tasks.load("task:demonstrated:test", 3)]
    for path in (None, "task:demonstrated:train?size=2"):  # without training data, or with its
        assert held_out_prompts(path=path) == plain
        assert held_out_prompts(path=path, prompt="shown") == shown
        templated = held_out_prompts(path=path, prompt="Q: {prompt}")
        assert templated == [f"Q: {prompt}" for prompt in plain]
        with pytest.raises(InputError, match="no column 'show'"):
            held_out_prompts(path=path, prompt="show")
    trained = DataKeys(path="task:demonstrated:test?size=3", prompt="shown")
    assert prompts_of_rows(trained, None) == shown


def test_a_task_keeps_its_columns_beside_training_data_of_another_source():
    plain = [row["prompt"] for row in tasks.load("task:demonstrated:test", 3)]
    parts = (PartKeys(path="questions.jsonl"),)
    for path in ("questions.jsonl", "task:arithmetic:train", parts):
        assert held_out_prompts(path=path, prompt="question") == plain
    assert held_out_prompts(has_rows=True, path=None, prompt="question") == plain


def test_a_run_on_rows_from_python_is_evaluated_later_as_it_was_then(tmp_path):
    changes = {"data": {"prompt": "question"}, "eval": {"data": "task:demonstrated:test?size=3"}}
    text = configs.to_toml(configs.from_dict(minimal_config.tables(**changes)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(text)
    target = str(tmp_path / "run")
    run_config = stored_policy.config_for(target)
    source = stored_policy.eval_source_for(target, run_config.eval, run_config.data)
    plain = [row["prompt"] for row in tasks.load("task:demonstrated:test", 3)]
    assert prompts_of_rows(run_config.data, source) == plain


@pytest.mark.parametrize(
    ("evaluated", "left"),
    [("openai/gsm8k", ("main", "v1")), ("owner/name", (None, None)), ("a.csv", (None, None))],
)
def test_beside_rows_from_python_the_config_keeps_of_a_source_what_evaluations_read(
    evaluated, left, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("prompt;answer\n")
    keys = {"path": "openai/gsm8k", "subset": "main", "revision": "v1", "split": "train"}
    tables = minimal_config.tables(data=keys, eval={"data": evaluated, "kl_to_base": False})
    tables["data"] |= {"delimiter": ";"} if evaluated == "a.csv" else {}
    first = configs.make_config(tables, dataset=[])
    again = configs.make_config(first, dataset=[])  # as where it is resumed
    for run_config in (first, again):
        data, source = run_config.data, inputs.eval_source(run_config.eval, run_config.data)
        assert (data.path, data.split) == (None, "train")
        assert (data.subset, data.revision) == (source.subset, source.revision) == left
        assert data.delimiter == (";" if evaluated == "a.csv" else ",")
    (tmp_path / "rows.csv").write_text("prompt;answer\n")
    tables["data"] = {"path": "rows.csv", "delimiter": ";"}
    tables["eval"]["data"] = "owner/name"
    assert configs.make_config(tables, dataset=[]).data.delimiter == ","


def test_a_task_in_a_mixture_is_asked_as_its_entry_says():
    parts = [
        PartKeys(path="task:demonstrated:test?size=2", name="shown", prompt="shown"),
        PartKeys(path="task:demonstrated:test?size=2", name="plain"),
    ]
    rows = tasks.load("task:demonstrated:test", 2)
    texts = prompts_of_rows(DataKeys(path=tuple(parts), prompt="question"), None)
    assert texts == [row[column] for column in ("shown", "prompt") for row in rows]


@pytest.mark.full
def test_dropped_prompts_are_said_at_the_start_and_in_the_summary(tmp_path, model, capsys):
    rows = [{"question": "a " * n, "answer": ""} for n in (4, 4, 4, 4, 400, 500)]
    run_config = config(tmp_path, model, **{"data.too_long": "drop", "data.path": None})
    finished = loop.train(run_config, dataset=rows)
    notice = "2 of 6 prompts left out: longer than rollout.max_prompt_tokens = 256"
    assert capsys.readouterr().out.count(notice) == 1
    assert finished.summary["dropped_prompts"] == 2


@pytest.mark.full
def test_a_dry_run_shows_the_prompt_as_the_model_reads_it(tmp_path, model, capsys):
    rows = [{"question": "[b]How many?[/b] :smile:", "answer": "2"}] * 4
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    preview.dry_run(config(tmp_path, model, **{"data.path": str(file)}))
    shown = capsys.readouterr().out
    prompt = "<|im_start|>user\n[b]How many?[/b] :smile:<|im_end|>\n<|im_start|>assistant\n"
    count = len(folders.read_tokenizer(model)(prompt)["input_ids"])
    assert f"{count} tokens: {prompt!r}" in shown
    assert f"chat template  the chat template of {model}" in shown


def test_a_dry_run_runs_an_own_advantage_on_the_shapes_of_the_data(tmp_path, model):
    code_file = tmp_path / "own.py"
    code_file.write_text(
        "import dataclasses, jaxgrpo\n"
        "def scale(signal, rollouts):\n"
        "    factor = rollouts.fields['factors'] @ rollouts.fields['factors']\n"
        "    return dataclasses.replace(signal, value=signal.value * factor)\n"
        "def reads_factors():\n"
        "    return jaxgrpo.transform(scale)._replace(needs=frozenset({'factors'}))\n"
    )
    file = tmp_path / "rows.jsonl"
    row = {"question": "How many?", "answer": "2", "factors": [1.0, 2.0]}
    file.write_text(4 * f"{json.dumps(row)}\n")
    steps = [{"use": "sum_rewards"}, {"use": f"{code_file}:reads_factors"}]
    run_config = config(tmp_path, model, **{"data.path": str(file)})
    tables = configs.to_tables(run_config) | {"advantage": steps}
    del tables["recipe"]
    with pytest.raises(
        InputError, match=rf"scale \({code_file}:scale, line 3: factor = "
    ) as refused:
        preview.dry_run(configs.from_dict(tables))
    assert "got (2,) and (4,)" in str(refused.value)


@pytest.mark.full
def test_a_model_is_saved_with_the_template_it_was_trained_with(tmp_path, model):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    finished = loop.train(config(tmp_path, model, **{"data.chat_template": str(file)}))
    saved = folders.read_tokenizer(finished.path / "model")
    assert saved.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "[x]"


def test_an_evaluation_reads_the_subset_and_revision_of_the_same_source(tmp_path, model):
    keys = {"data.path": "openai/gsm8k", "data.subset": "main", "data.split": "train"}
    keys |= {"data.revision": "v1", "eval.split": "test"}
    same = config(tmp_path, model, **keys, **{"eval.data": "openai/gsm8k"})
    assert inputs.eval_source(same.eval, same.data)[:4] == ("openai/gsm8k", "main", "test", "v1")
    elsewhere = config(tmp_path, model, **keys, **{"eval.data": "owner/other"})
    source = inputs.eval_source(elsewhere.eval, elsewhere.data)[:4]
    assert source == ("owner/other", None, "test", None)


def spoil(model: str, folder: Path, name: str, content: str | None) -> str:
    """A copy of the model with one file of another content, or without it."""
    shutil.copytree(model, folder / "spoilt")
    file = folder / "spoilt" / name
    file.unlink()
    if content is not None:
        file.write_text(content)
    return str(folder / "spoilt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json does not exist: give the folder of a Hugging Face"),
        ("config.json", "{", "config.json is not JSON (Expecting"),
        ("tokenizer.json", "{", "its tokenizer cannot be read ("),
    ],
)
def test_a_spoilt_model_folder_is_one_message(tmp_path, model, capfd, name, content, message):
    folder = spoil(model, tmp_path, name, content)
    assert main.main(["train", str(write(tmp_path, folder))]) == 2
    errors = capfd.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


def test_a_model_that_names_no_end_token_anywhere_is_refused(tmp_path, model, capfd):
    tokenizer = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    folder = Path(spoil(model, tmp_path, "tokenizer_config.json", tokenizer))
    (folder / "generation_config.json").unlink()  # it may name one in the tokenizer's place
    fields = json.loads((folder / "config.json").read_text())
    del fields["eos_token_id"]  # and so may this
    (folder / "config.json").write_text(json.dumps(fields))
    assert main.main(["train", str(write(tmp_path, str(folder)))]) == 2
    assert "no end token" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=./nowhere", "nowhere' is no folder: give one that holds a Hugging Face model"),
        (
            "model.path=no/model",
            "as a model on the hub it is not in the local cache, and HF_HUB_OFF",
        ),
        (
            "data.path=no/data",
            "as a data set on the hub it is not in the local cache, and HF_HUB_O",
        ),
        (
            "data.prompt=questoin",
            "no column 'questoin' (did you mean 'question'?); columns there",
        ),
        (
            "data.answer=gold",
            "no column 'gold'; columns there: question, answer; set data.answer to",
        ),
        ("data.chat_template_kwargs.think=1", "does not read it; leave it out"),
        ("rollout.max_prompt_tokens=4", "prompts are longer than rollout.max_prompt_tokens = 4"),
        (
            "eval.data=no/data",
            "eval.data = 'no/data' is no local path, and as a data set on the hub",
        ),
    ],
)
def test_bad_input_is_one_message_before_anything_starts(tmp_path, model, capfd, override, message):
    assert main.main(["train", str(write(tmp_path, model)), "--set", override]) == 2
    errors = capfd.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_a_kernel_that_cannot_compute_the_run_is_refused_and_auto_names_its_own(tmp_path, model):
    with pytest.raises(InputError, match='splash" cannot compute this run') as caught:
        setup(config(tmp_path, model, **{"model.attention": "splash"}))
    assert str(caught.value).endswith("  platform cpu: it runs on another")
    run = setup(config(tmp_path, model))
    assert (run.blueprint.kernel.name, run.blueprint.kernel.why) == ("xla", "")


@pytest.mark.full
def test_evaluation_judges_conversations_too(tmp_path, model):
    rows = [
        {"question": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
        for row in gsm8k.rows(count=6)
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"eval.data": str(file), "eval.samples": 2, "eval.scorer": f"{__file__}:is_message"}
    finished = loop.train(config(tmp_path, model, **{"data.path": str(file)}, **keys))
    assert finished.summary["trained"]["accuracy"] == 1.0


def is_message(completions, prompts, **columns):
    right = [
        message["role"] == "assistant" and prompt[-1]["role"] == "user"
        for (message,), prompt in zip(completions, prompts, strict=True)
    ]
    return np.asarray(right, float)


def test_texts_to_train_on_stay_as_a_csv_file_has_them(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("prompt,solution,level\n1+1=,02,3\n")
    for path in (str(file), (PartKeys(path=str(file)),)):
        (row,), _ = inputs.load_rows(DataKeys(path=path, answer="", completion="solution"))
        assert (row["solution"], row["level"]) == ("02", 3)
