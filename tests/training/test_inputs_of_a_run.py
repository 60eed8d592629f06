"""What a run reads from files, compared at a later start."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import re
import shutil

import jax
import numpy as np
import pytest
import small_run
from minimal_config import MINIMAL, read

import jaxgrpo
from jaxgrpo.config import files
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.core.types import Waiting
from jaxgrpo.planning import preview
from jaxgrpo.rollout.refill import no_groups
from jaxgrpo.training import fingerprints, loop, opening
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.setup import Shared, setup
from jaxgrpo.update.packing import Geometry

CODE = """import helper

def score(completions, **columns):
    return helper.scores(completions)
"""
HELPER = """def scores(completions):
    return [float(len(c) % 5) for c in completions]
"""
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def files_are_read_again(monkeypatch):
    """Runs share their programs, but not what they read, as runs of several processes do."""
    set_up, shared = opening.setup, Shared()

    def read_again(config, **python_objects):
        share = shared.for_config(config)

        def share_rest(name, make):
            return make() if name == "inputs" else share(name, make)

        return set_up(config, share=share_rest, **python_objects)

    monkeypatch.setattr(opening, "setup", read_again)


def refuse(config):
    opening.refuse_moved(config.source, config.run.dir)


def test_the_config_of_a_run_that_was_moved_begins_no_other_run(tmp_path, monkeypatch):
    """Nor does one whose run.dir is relative, from another working directory."""
    monkeypatch.chdir(tmp_path)
    run, moved = (tmp_path / "runs" / name for name in "xy")
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    (run / "config.toml").write_text(MINIMAL)
    refuse(files.load(run / "config.toml"))
    monkeypatch.chdir("/")
    message = f"run.dir = runs/x is /runs/x: add --set run.dir={run} to continue the run in {run};"
    with pytest.raises(InputError, match=message):
        refuse(files.load(run / "config.toml"))
    with pytest.raises(InputError, match=message):
        preview.dry_run(files.load(run / "config.toml"), resume=True)
    monkeypatch.chdir(tmp_path)
    run.rename(moved)
    with pytest.raises(InputError, match=f"is {run}: add --set run.dir={moved} to continue"):
        refuse(files.load(moved / "config.toml"))
    for folder in (moved, "runs/new"):
        refuse(files.load(moved / "config.toml", [f"run.dir={folder}"]))
    moved.joinpath("config.toml").rename(tmp_path / "config.toml")
    refuse(files.load(tmp_path / "config.toml"))


def test_a_config_of_the_users_in_the_folder_of_a_run_is_refused_and_stays(tmp_path):
    """That of a start which was killed before its first line is the run's."""
    file = tmp_path / "r" / "config.toml"
    file.parent.mkdir()
    file.write_text(f"# mine\n{files.to_toml(small_run.config(tmp_path / 'r'))}")
    before = file.read_bytes()
    for start in (
        lambda: preview.dry_run(files.load(file), resume=True),
        lambda: loop.train(file, resume="auto"),
        lambda: loop.train(file, resume="auto", train={"seed": 5}),
    ):
        with pytest.raises(InputError, match=f"{file}: no run has begun .* as {tmp_path}/r/run"):
            start()
        assert file.read_bytes() == before
    with RunFolder(tmp_path / "k") as folder:
        folder.rewind(None)
    opening.refuse_config_without_run(tmp_path / "k")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with a run of one step and all that it read."""
    folder = tmp_path_factory.mktemp("begun")
    shutil.copytree(small_run.base(), folder / "base")
    (folder / "base" / "tiktoken.model").write_text("YQ== 0")
    write_rows(folder / "rows.jsonl", ROWS)
    (folder / "mine.py").write_text(CODE)
    (folder / "helper.py").write_text(HELPER)
    (folder / "chat.jinja").write_text("{{ messages[0].content }}")
    loop.train(config(folder, 1))
    return folder


def config(folder, steps, **changes):
    return small_run.config(
        folder / "r",
        **{
            "model.path": str(folder / "base"),
            "data.path": str(folder / "rows.jsonl"),
            "data.chat_template": str(folder / "chat.jinja"),
            "rewards": [{"use": f"{folder / 'mine.py'}:score"}],
            "rollout.prompts": {"use": "difficulty_band"},
            "train.steps": steps,
            **changes,
        },
    )


def test_a_copy_of_a_folder_at_another_path_is_the_same_start(tmp_path):
    """As the processes of a run compare it; what its files hold is compared too."""
    facts = {}
    for name in ("first", "second", "third"):
        folder = tmp_path / name
        shutil.copytree(small_run.base(), folder / "base")
        write_rows(folder / "rows.jsonl", ROWS)
        for file in ("mine.py", "judge.py"):
            (folder / file).write_text(CODE)
        (folder / "helper.py").write_text(HELPER + "\n" * (name == "third"))
        (folder / "chat.jinja").write_text("{{ messages[0].content }}")
        evaluation = {"data": "task:arithmetic:test", "scorer": f"{folder / 'judge.py'}:score"}
        facts[name] = fingerprints.config_facts(config(folder, 1, eval=evaluation))
    assert facts["first"] == facts["second"]
    assert facts["first"]["rewards"][0]["use"] == "mine.py:score"
    assert {name for name, fact in facts["third"].items() if fact != facts["first"][name]} == {
        "own code"
    }


def reorder(folder):
    write_rows(folder / "rows.jsonl", ROWS[::-1])


def shorten(folder):
    write_rows(folder / "rows.jsonl", ROWS[:6])


def replace_answer(folder):
    write_rows(folder / "rows.jsonl", [*ROWS[:-1], {**ROWS[-1], "answer": "9"}])


def change_template(folder):
    (folder / "chat.jinja").write_text("{{ messages[0].content }} ")


def change_code(folder):
    (folder / "mine.py").write_text(CODE.replace("completions)", "completions[:])"))


def change_helper(folder):
    (folder / "helper.py").write_text(HELPER.replace("5", "7"))


def change_tokenizer(folder):
    file = folder / "base" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 77}))


def change_vocabulary(folder):
    (folder / "base" / "tiktoken.model").write_text("Yg== 0")


def change_base(folder):
    file = folder / "base" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4:] = bytes(4)
    file.write_bytes(data)


def change_order_and_code(folder):
    reorder(folder)
    change_code(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "kinds", "named"),
    [
        (reorder, ["rows"], "8 rows, crc32 "),
        (shorten, ["rows"], "-> 6 rows, crc32 "),
        (replace_answer, ["rows"], "rows.jsonl"),
        (change_template, ["template"], "chat.jinja"),
        (change_code, ["code"], "mine.py"),
        (change_helper, ["code"], "helper.py"),
        (change_tokenizer, ["tokenizer"], "tokenizer_config.json"),
        (change_vocabulary, ["tokenizer"], "tiktoken.model"),
        (change_base, ["base"], "model.safetensors"),
        (change_order_and_code, ["rows", "code"], "mine.py"),
    ],
)
def test_a_changed_input_is_named_and_refused(begun, change, kinds, named):
    files = [*begun.glob("*.*"), *(begun / "base").glob("*.*")]
    saved = {file: file.read_bytes() for file in files}
    change(begun)
    with pytest.raises(InputError) as refused:
        loop.train(config(begun, 2), resume="auto")
    with pytest.raises(InputError) as foreseen:
        preview.dry_run(config(begun, 2), resume=True)
    assert str(foreseen.value) == str(refused.value)
    for file, data in saved.items():
        file.write_bytes(data)
    _, *lines, remedy = str(refused.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == kinds
    assert named in lines[-1]
    assert f"--set run.allow_changes='{json.dumps(kinds)}'" in remedy


@pytest.mark.slow
def test_a_dry_run_continues_from_the_step_that_a_run_would_or_is_refused_as_that(tmp_path, capsys):
    changes = {"train.steps": 4, "checkpoint.every": 2}
    loop.train(small_run.config(tmp_path / "r", **changes))
    longer = small_run.config(tmp_path / "r", **{**changes, "train.steps": 5})
    (tmp_path / "r/checkpoints/4/meta.json").write_text("{}")
    preview.dry_run(longer, resume=True)
    assert "r, from step 2: rows, template" in capsys.readouterr().out
    (tmp_path / "r/checkpoints/2/meta.json").write_text("{}")
    for reason in ("step 2 is damaged", "of 4 steps and no checkpoint"):
        for start in (
            lambda: preview.dry_run(longer, resume=True),
            lambda: loop.train(longer, resume="auto"),
        ):
            with pytest.raises(InputError, match=reason):
                start()
        for file in (tmp_path / "r/checkpoints").glob("*/manifest.json"):
            file.unlink()


@pytest.mark.slow
def test_a_dry_run_without_the_config_of_the_run_compares_what_its_checkpoint_says(begun, capsys):
    file = begun / "r" / "config.toml"
    text = file.read_bytes()
    file.unlink()
    reorder(begun)
    for start in (
        lambda: preview.dry_run(config(begun, 2), resume=True),
        lambda: loop.train(config(begun, 2), resume="auto"),
    ):
        with pytest.raises(InputError, match=r"reads something else .*\n  rows: 8 rows"):
            start()
    write_rows(begun / "rows.jsonl", ROWS)
    capsys.readouterr()
    preview.dry_run(config(begun, 2), resume=True)
    assert "code are the same; config.toml is gone: that this" in capsys.readouterr().out
    file.write_bytes(text)


@pytest.mark.full
def test_the_same_files_and_an_allowed_change_continue(begun, capsys):
    """Which is allowed once: a second one is refused, with the config of the run too."""
    preview.dry_run(config(begun, 2), resume=True)
    notice = "r, from step 1: rows, template, tokenizer, base and code are the same"
    assert notice in capsys.readouterr().out
    with pytest.raises(InputError, match=r"optimizer.learning_rate"):
        preview.dry_run(config(begun, 2, **{"optimizer.learning_rate": 0.5}), resume=True)
    loop.train(config(begun, 2), resume="auto")
    change_code(begun)
    loop.train(config(begun, 3, **{"run.allow_changes": ["code"]}), resume="auto")
    assert files.load(begun / "r" / "config.toml").run.allow_changes == ()
    change_helper(begun)
    with pytest.raises(InputError, match=r"\n  code: helper\.py"):
        loop.train(begun / "r" / "config.toml", resume="auto", train={"steps": 4})
    (begun / "helper.py").write_text(HELPER)
    loop.train(config(begun, 4), resume="auto")  # compares with what was read last
    assert len(small_run.metrics(begun / "r")) == 4


@pytest.mark.full
def test_rows_from_python_are_compared_too(tmp_path):
    def train(steps, rows):
        return loop.train(
            small_run.config(tmp_path / "r", **{"train.steps": steps}), resume="auto", dataset=rows
        )

    train(1, ROWS)
    with pytest.raises(InputError, match=r"rows: 8 rows, crc32 .* unless given from Python"):
        train(2, ROWS[::-1])
    assert train(2, list(ROWS)).summary["step"] == 2


@pytest.mark.full
def test_rows_from_python_replace_the_path_of_the_config(tmp_path):
    """Its evaluation is asked the same prompts then and later, and it is resumed as it began."""
    questions = []

    def score(prompts, completions):
        questions.extend(prompts)
        return [float(len(text) % 2) for text in completions]

    def train(steps):
        return loop.train(
            small_run.config(tmp_path / "r", **{"train.steps": steps, **columns, **asking}),
            resume="auto",
            rewards=[score],
            dataset=rows,
        )

    rows = [{"question": row["prompt"], "gold": row["answer"]} for row in ROWS]
    columns = {"data.path": "task:arithmetic:train", "data.prompt": "question"}
    columns["data.answer"] = "gold"
    asking = {"eval.data": "task:arithmetic:test", "eval.prompts": 4, "eval.samples": 1}
    run = train(1)
    in_run = {*questions} - {row["prompt"] for row in ROWS}
    assert len(in_run) == 4
    assert files.load(run.path / "config.toml").data.path is None
    questions.clear()
    jaxgrpo.evaluate(run.path, scorer=score, samples=1)
    assert {*questions} == in_run
    assert train(2).summary["step"] == 2
    rows.reverse()
    with pytest.raises(InputError, match=r"rows: 8 rows, crc32 .* unless given from Python"):
        train(3)


def test_only_what_a_run_reads_can_be_allowed_to_change(tmp_path):
    with pytest.raises(ConfigError, match=r'"cod" is not "rows" or "template" or "tokenizer"'):
        small_run.config(tmp_path, **{"run.allow_changes": ["code", "cod"]})


def test_other_tokens_of_the_same_rows_are_refused_alone(tmp_path):
    config = small_run.config(tmp_path)
    settings = config.run, {"data.path": config.data.path, "model.path": config.model.path}
    before = {"rows": "2 rows, crc32 1", "template": {}, "prompts": "a"}
    with pytest.raises(InputError, match="other tokens for the same rows, template and tokenizer"):
        fingerprints.refuse_changes(*settings, before, {**before, "prompts": "b"})
    with pytest.raises(InputError) as refused:
        fingerprints.refuse_changes(*settings, before, {**before, "rows": "2 rows", "prompts": "b"})
    assert '["rows"]' in str(refused.value)


def test_an_allowed_change_of_code_allows_no_other_prompts(tmp_path):
    """Code and base make no prompts; rows, template and tokenizer do."""
    config = small_run.config(tmp_path, **{"run.allow_changes": ["code", "base", "rows"]})
    settings = config.run, {"data.path": config.data.path, "model.path": config.model.path}
    before = {"rows": "2 rows", "prompts": "a", "base": {"a": 1}, "code": {"mine.py": 1}}
    for kind in ("code", "base"):
        fingerprints.refuse_changes(*settings, before, {**before, kind: {}})
        with pytest.raises(InputError, match=r"\n  prompts: other tokens for the same rows"):
            fingerprints.refuse_changes(*settings, before, {**before, kind: {}, "prompts": "b"})
    changed = {**before, "rows": "3 rows", "code": {}, "prompts": "b"}
    fingerprints.refuse_changes(*settings, before, changed)


def test_groups_that_wait_need_their_rows_though_other_rows_are_allowed():
    room = no_groups(Geometry(3, 2, 6, 5, 1, 15), ("reward",), {})
    opening.refuse_missing_rows(Waiting(leftover=room), 1)  # there is none
    ordinal, row = np.array([8, 9, -1], np.int32), np.array([5, 7, 9], np.int32)
    waiting = dataclasses.replace(room, ordinal=ordinal, row=row)
    for groups in (Waiting(leftover=waiting), Waiting(ahead=(room, waiting))):
        opening.refuse_missing_rows(groups, 8)
        with pytest.raises(InputError, match=r"have 7 rows, .* is of row 7, counted from 0: put"):
            opening.refuse_missing_rows(groups, 7)


@pytest.mark.parametrize(
    "values",
    [
        (datetime.date(2026, 1, 2), datetime.date(2026, 1, 3)),
        (decimal.Decimal("0.1"), decimal.Decimal("0.10")),
        (b"a", b"b"),
        (np.arange(2000), np.arange(2000) % 1999),
        (np.float32(1), np.float32(2)),
        ({(1, 2): 3}, {(1, 2): 4}),
        ({"a", "b"}, {"a", "c"}),
    ],
)
def test_rows_are_told_apart_by_values_of_any_type(values):
    first, second = (
        fingerprints.describe_rows([{"prompt": "a", "more": [value]}]) for value in values
    )
    assert first != second
    assert first == fingerprints.describe_rows([{"prompt": "a", "more": [values[0]]}])


class Nameless:
    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize("value", [10**5000, Nameless()], ids=["digits", "repr"])
def test_a_row_that_cannot_be_written_is_named(value):
    with pytest.raises(InputError, match=r"row 1: a value cannot be written \(.*\): take it out"):
        fingerprints.describe_rows([{"prompt": "a"}, {"prompt": "a", "more": [value]}])


def test_objects_are_not_told_apart_by_their_place_in_memory():
    first, second = (
        fingerprints.describe_rows([{"prompt": "a", "more": object()}]) for _ in range(2)
    )
    assert first == second


def test_processes_compare_what_their_programs_are_made_by(monkeypatch, tmp_path):
    facts = fingerprints.program_facts()
    assert {*fingerprints.OPTIONS} <= jax.config.values.keys(), "JAX has another name for one"
    assert facts["jax"] == jax.__version__
    assert facts["jaxgrpo"].startswith(f"{jaxgrpo.__version__}, ")
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(jaxgrpo, "__file__", str(tmp_path / "__init__.py"))
    with jax.default_matmul_precision("bfloat16"):
        changed = fingerprints.program_facts()
    differing = {name for name in facts if facts[name] != changed[name]}
    assert differing == {"jaxgrpo", "jax_default_matmul_precision"}


@pytest.mark.parametrize(
    "option", ["samples=3", "prompts=5", "scorer=length", "formats={a='x'}", "confidence=true"]
)
def test_a_run_without_evaluation_refuses_what_only_evaluations_read(option):
    config = read(f"eval.{option}")  # `eval` and `probe` may have rows from Python
    key = re.escape(f"eval.{option.partition('=')[0]}")
    with pytest.raises(InputError, match=rf"^{key} = .*: nothing reads it without eval\.data; set"):
        setup(config)
