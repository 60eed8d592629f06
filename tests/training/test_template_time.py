"""Chat templates that write the date: that of a run's first start, wherever it is read again."""

from __future__ import annotations

import datetime
import json

import gsm8k
import pytest
import small_run
from rich.console import Console

from jaxgrpo.cli.main import main
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.data.chat import Chat, make_chat, write, writes_time
from jaxgrpo.models.hf import folders
from jaxgrpo.training import inputs, loop, stored_policy
from jaxgrpo.training.records import rollout_files

SECONDS = "{{ strftime_now('%H%M%S') }}+{{ messages[-1]['content'] }}"
LLAMA = (
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- endif %}Today Date: {{ date_string }} {{ messages[-1]['content'] }}"
)
"""How Llama 3.2's template writes the date."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return gsm8k.tokenizer(tmp_path_factory.mktemp("tokenizer"))


def template_chat(tokenizer, tmp_path, template: str, time: str | None, **options) -> Chat:
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    return make_chat(tokenizer, str(file), None, options, "base", time)


def test_a_template_writes_the_time_that_it_is_given(tokenizer, tmp_path):
    chat = template_chat(tokenizer, tmp_path, SECONDS, "2026-11-25T09:36:21")
    assert write(chat, "2+2?", "row 0") == "093621+2+2?"
    llama = template_chat(tokenizer, tmp_path, LLAMA, "2026-11-25")
    assert write(llama, "2+2?", "row 0") == "Today Date: 25 Nov 2026 2+2?"
    free = write(
        template_chat(tokenizer, tmp_path, "{{ strftime_now('%Y') }} 2+2?", None), "2+2?", ""
    )
    assert free == f"{datetime.datetime.now():%Y} 2+2?"


def test_a_date_of_ones_own_goes_before_the_time(tokenizer, tmp_path):
    chat = template_chat(tokenizer, tmp_path, LLAMA, "2026-11-25", date_string="26 Jul 2024")
    assert write(chat, "2+2?", "row 0") == "Today Date: 26 Jul 2024 2+2?"
    assert not writes_time(chat, ["2+2?"])


def test_a_template_that_writes_the_time_is_told_from_one_that_does_not(tokenizer, tmp_path):
    now = "2026-11-25T09:36:21"
    only_long = "{{ messages[-1]['content'] }}{% if messages[-1]['content'] | length > 3 %}"
    only_long += "{{ strftime_now('%j') }}{% endif %}"
    assert writes_time(template_chat(tokenizer, tmp_path, SECONDS, now), ["2"])
    assert not writes_time(template_chat(tokenizer, tmp_path, only_long, now), ["1", "2"])
    assert writes_time(template_chat(tokenizer, tmp_path, only_long, now), ["1", "2+2?"])
    plain = template_chat(tokenizer, tmp_path, "{{ messages[-1]['content'] }}", now)
    assert plain.time is None
    assert not writes_time(plain, ["2+2?"])


def test_the_function_itself_is_no_variable(tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"strftime_now: is a function; set data\.template_time"):
        template_chat(tokenizer, tmp_path, SECONDS, None, strftime_now="25 Nov")


def test_a_date_is_read_with_and_without_quotes(tmp_path):
    run_config = small_run.config(tmp_path, **{"data.template_time": datetime.date(2026, 11, 25)})
    assert run_config.data.template_time == "2026-11-25"
    tables = small_run.tables(tmp_path)
    for text in ("2026-11-25T09:30:00", '"2026-11-25T09:30:00"'):
        read = configs.from_dict(tables, [f"data.template_time={text}"])
        assert read.data.template_time == "2026-11-25T09:30:00"


@pytest.mark.parametrize("time", ["now", "25 Nov 2026", "2026-13-01"])
def test_a_time_that_is_none_is_refused(tmp_path, time):
    with pytest.raises(ConfigError, match=r"data\.template_time = .*: expected a date"):
        small_run.config(tmp_path, **{"data.template_time": time})


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock is a day, an hour and a second later."""
    first, more = datetime.datetime(2026, 11, 25, 9, 36, 21), datetime.timedelta(1, 3601)
    times = (first + more * n for n in range(99))
    monkeypatch.setattr(inputs, "local_time", lambda: next(times).isoformat())


@pytest.fixture
def begun(tmp_path, clock):
    """The config, as a file, of a run of one step that has ended."""
    (tmp_path / "chat.jinja").write_text(SECONDS)
    changes = {
        "data.chat_template": str(tmp_path / "chat.jinja"),
        "rollout.max_prompt_tokens": 16,
        "run.rollouts_every": 1,
        "eval.data": "task:arithmetic:test",
        "eval.prompts": 4,
        "eval.samples": 2,
        "train.steps": 1,
    }
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)
    loop.train(file)
    return file


def trained_on(run, step: int) -> list[str]:
    """The prompts of a step, as the model read them."""
    rollouts = rollout_files.load(run / "rollouts" / f"{step:08}.safetensors")
    tokenizer = folders.read_tokenizer(run / "model")
    rows = zip(rollouts.prompt_tokens, rollouts.prompt_mask, strict=True)
    return [tokenizer.decode(tokens[mask]).replace(" ", "") for tokens, mask in rows]


@pytest.mark.full
def test_later_starts_of_train_eval_and_sample_write_the_time_of_the_first(begun, tmp_path, capsys):
    run, first = tmp_path / "r", "2026-11-25T09:36:21"
    assert configs.load(run / "config.toml").data.template_time == first
    assert all(text.startswith("093621+") for text in trained_on(run, 1))
    before = small_run.metrics(run)
    loop.train(begun, resume="auto", train={"steps": 2})
    assert all(text.startswith("093621+") for text in trained_on(run, 2))
    assert small_run.metrics(run)[:2] == before  # nor was the base evaluated again
    with pytest.raises(InputError, match=r'template_time: "2026-11-25T09:36:21" -> "2026-11-26"'):
        loop.train(begun, resume="auto", data={"template_time": "2026-11-26"})

    _, questions = stored_policy.find_policy(
        Console(), stored_policy.config_for(str(run))
    )  # as `eval` does
    tokenizer = folders.read_tokenizer(run / "model")
    texts = [tokenizer.decode(tokens).replace(" ", "") for tokens in questions.encoded]
    assert all(text.startswith("093621+") for text in texts)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), ("--set", "data.template_time=2026-11-24")],
)
def test_samples_of_a_file_are_of_the_time_of_its_first_start(clock, tmp_path, capsys, options):
    (tmp_path / "chat.jinja").write_text(SECONDS)
    (tmp_path / "p.txt").write_text("1+1=\n2+2=\n")
    sizes = ["rollout.max_prompt_tokens=16", "rollout.max_completion_tokens=4", "rollout.slots=1"]
    keys = [*sizes, f"data.chat_template={tmp_path / 'chat.jinja'}", *options[1:]]
    out = tmp_path / "s.jsonl"
    command = ["sample", small_run.base(), "--prompts", str(tmp_path / "p.txt"), "--out", str(out)]
    assert main([*command, "--set", *keys]) == 0
    rows = out.read_bytes()
    time = json.loads((tmp_path / "s.jsonl.settings.json").read_text())["data.template_time"]
    assert time == ("2026-11-24" if options else "2026-11-25T09:36:21")
    out.write_bytes(rows.splitlines(keepends=True)[0])
    assert main([*command, "--set", *keys]) == 0, capsys.readouterr().err
    assert out.read_bytes() == rows
    assert main([*command, "--overwrite", "--set", *keys]) == 0
    again = json.loads((tmp_path / "s.jsonl.settings.json").read_text())["data.template_time"]
    assert again == ("2026-11-24" if options else "2026-11-26T10:36:22")


@pytest.mark.full
@pytest.mark.slow
def test_a_dry_run_says_that_the_template_writes_the_time(tmp_path, capsys):
    (tmp_path / "chat.jinja").write_text(SECONDS)
    changes = {"data.chat_template": str(tmp_path / "chat.jinja"), "rollout.max_prompt_tokens": 16}
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)
    command = ["train", str(file), "--dry-run", "--set", "data.template_time=2026-11-25"]
    assert main(command) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert (
        "it writes the date or time, now 2026-11-25: a run writes that of its first start" in output
    )
    assert "'000000+" in output
