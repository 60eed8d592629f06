"""`jaxgrpo sample`: rows batch by batch, files that are continued, what is refused."""

import json
import re
import resource
import signal
import time

import jax
import numpy as np
import pytest
import small_run
import tomli_w

from jaxgrpo.cli import main as cli
from jaxgrpo.cli import sampling
from jaxgrpo.cli.make_base import base_config
from jaxgrpo.cli.sampling import SampleFile
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.evaluation import evaluate
from jaxgrpo.evaluation.evaluate import Questions
from jaxgrpo.experiments.probe import command
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders
from jaxgrpo.rewards import Reward
from jaxgrpo.training.fingerprints import config_facts
from jaxgrpo.training.stored_policy import config_for

PROMPTS = [f"{number}+{number + 1}=" for number in range(10, 20)]
SAMPLES = 2
BATCH = 4  # prompts: four samples per slot, two slots
SETTINGS = ("rollout.slots=2", "rollout.max_prompt_tokens=8")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model folder with random weights."""
    folder = tmp_path_factory.mktemp("sampling") / "base"
    tokenizer = character_tokenizer(tasks.find("arithmetic").alphabet)
    model = decoder.build(base_config(len(tokenizer), hidden_size=32))
    folders.save_model(model, jax.jit(model.init)(jax.random.key(0)), folder, tokenizer=tokenizer)
    return folder


@pytest.fixture
def sample(base, tmp_path, capsys):
    """sample(*options, prompts=..., out=...) -> (exit code, what was printed)"""

    def call(*options, prompts=PROMPTS, out="s.jsonl"):
        code = cli.main(list(map(str, arguments(base, tmp_path, prompts, out, *options))))
        streams = capsys.readouterr()
        return code, streams.out + streams.err

    return call


def arguments(base, folder, prompts, out, *options):
    prompt_file = folder / "p.txt"
    prompt_file.write_text("\n".join(prompts))
    files = ("--prompts", prompt_file, "--out", folder / out)
    sizes = ("--max-tokens", 6, "-n", SAMPLES)
    return "sample", base, *files, *sizes, *options, "--set", *SETTINGS


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.full
def test_an_interrupted_file_ends_byte_for_byte_as_one_that_was_not(sample, tmp_path):
    code, output = sample()
    assert code == 0, output
    assert "s.jsonl: 20 samples of 10 prompts written: " in output
    assert "tokens/s" in output
    uninterrupted = (tmp_path / "s.jsonl").read_bytes()
    rows = [(row["row"], row["sample"], row["prompt"]) for row in read(tmp_path / "s.jsonl")]
    assert rows == [(at, n, text) for at, text in enumerate(PROMPTS) for n in range(SAMPLES)]
    lines = uninterrupted.splitlines(keepends=True)
    for num_lines, torn in ((11, b'{"step": 0, "ordi'), (19, lines[19][:-1])):
        (tmp_path / "s.jsonl").write_bytes(b"".join(lines[:num_lines]) + torn)
        code, output = sample()
        assert code == 0, output
        before = num_lines // (BATCH * SAMPLES) * BATCH * SAMPLES
        assert f"20 samples of 10 prompts written, {before} of them from before: " in output
        assert (tmp_path / "s.jsonl").read_bytes() == uninterrupted
    written = (tmp_path / "s.jsonl").stat().st_mtime_ns
    code, output = sample()
    assert code == 0
    assert "20 samples of 10 prompts are there already" in output
    assert (tmp_path / "s.jsonl").stat().st_mtime_ns == written


@pytest.mark.full
def test_samples_are_drawn_at_the_temperature_of_the_config(sample, tmp_path):
    code, output = sample("--set", "rollout.temperature=0.5", prompts=PROMPTS[:1])
    assert code == 0, output
    assert json.loads((tmp_path / "s.jsonl.settings.json").read_text())["--temperature"] == 0.5


def test_all_tokens_can_be_sampled_from_of_a_run_that_took_its_support_again(tmp_path):
    file, support = tmp_path / "run.toml", ["rollout.top_k=5", "train.support=replay"]
    file.write_text(configs.to_toml(configs.load("quickstart", support)))
    for top_k, top_p, support in ((0, None, "full"), (None, 0.5, "full"), (None, None, "replay")):
        config = config_for(str(file), sampling.option_changes(None, top_k, top_p, 9))
        assert config.rollout.top_k == (5 if top_k is None else top_k)
        assert config.train.support == support


def test_no_command_repeats_the_draws_of_training_or_of_another(sample, monkeypatch):
    options = {}

    def stop(*_, **keywords):
        options.update(keywords)
        raise InputError("far enough")

    monkeypatch.setattr(sampling, "make_batches", stop)
    code, output = sample()
    assert (code, "far enough" in output) == (2, True)
    purposes = [0, evaluate.PURPOSE, command.PURPOSE, options["purpose"]]
    assert len(set(purposes)) == len(purposes)


@pytest.mark.full
def test_rows_that_belong_to_something_else_are_refused_until_told_to_overwrite(sample, tmp_path):
    file = tmp_path / "s.jsonl"
    assert sample("--temperature", 0)[0] == 0
    greedy = file.read_bytes()
    assert [row["completion"] for row in read(file)[::2]] == [
        row["completion"] for row in read(file)[1::2]
    ]
    refused = {
        "--temperature was 0.0 and is 1.0 now": sample(),
        "--samples was 2 and is 3 now": sample("--temperature", 0, "-n", 3),
        "rollout.top_k was 0 and is 5 now": sample("--temperature", 0, "--top-k", 5),
        "rollout.top_p was 1.0 and is 0.5 now": sample("--temperature", 0, "--top-p", 0.5),
        "--prompts was 10 rows, crc32 ": sample("--temperature", 0, prompts=PROMPTS[1:]),
    }
    for reason, (code, output) in refused.items():
        assert code == 2
        assert reason in output
        assert "--overwrite" in output
    assert file.read_bytes() == greedy
    file.write_bytes(greedy.replace(b'"10+11="', b'"10+12="', 1))
    code, output = sample("--temperature", 0)
    assert (code, "line 1 is not sample 0 of prompt 0" in output) == (2, True)
    (tmp_path / "s.jsonl.settings.json").unlink()
    code, output = sample("--temperature", 0)
    assert (code, "s.jsonl.settings.json beside it" in output) == (2, True)
    # The likeliest token of one: the same samples by another way.
    assert sample("--overwrite", "--top-k", 1)[0] == 0
    ids = [row["completion_ids"] for row in read(file)]
    assert ids == [json.loads(line)["completion_ids"] for line in greedy.splitlines()]
    assert max(map(len, ids)) <= 6


def test_rows_that_other_tools_or_other_code_answered_are_not_continued(base, tmp_path):
    config, out = tmp_path / "run.toml", tmp_path / "s.jsonl"
    (tmp_path / "helper.py").write_text("SUM = 3\n")
    (tmp_path / "own.py").write_text("import helper\n\nclass Env: ...\n\nclass Game: ...\n")
    (tmp_path / "judge.py").write_text("")
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    changes = {"model.path": str(base), "rewards": [{"use": "judge.py:score"}], "tools": ["python"]}
    changes |= {"data.chat_template": "t.jinja", "environment": "own.py:Env"}
    tables, _ = configs.read_tables("quickstart")
    configs.replace(tables, changes, tmp_path)
    scorer = Reward("scorer", lambda completions, **_: [0.0] * len(completions))
    questions = Questions([{"prompt": "1+1="}], [np.array([1])], scorer)

    def begin(**keys):
        config.write_text(tomli_w.dumps(tables | keys))
        with SampleFile(str(out)) as file:
            keys = config_for(str(config))
            names = keys.model.family, keys.environments, keys.tools, keys.rollout.call_format
            facts = sampling._facts(1, 1.0, config_facts(keys), questions)
            facts |= sampling._file_facts(*names, keys.data.chat_template)
            return file.resume(facts, ["1+1="], 1, 1, overwrite=False)

    begin()
    out.write_text(json.dumps({"row": 0, "sample": 0, "prompt": "1+1="}) + "\n")
    (tmp_path / "judge.py").write_text("changed = True")
    assert begin() == 1
    for keys, reason in (
        ({"tools": []}, "tools was ['python'] and is [] now"),
        ({"environment": str(tmp_path / "own.py:Game")}, "environment was "),
        ({"environment": {"a": str(tmp_path / "own.py:Env")}}, "environment.a was nothing and is "),
    ):
        with pytest.raises(InputError, match=re.escape(reason)):
            begin(**keys)
    for name, reason in (("helper.py", "own code was {'"), ("t.jinja", "the template was {'")):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(f"{before}\n")
        with pytest.raises(InputError, match=reason):
            begin()
        (tmp_path / name).write_text(before)
    assert begin() == 1


def test_what_cannot_be_sampled_is_said_before_anything_is_written(sample, tmp_path):
    code, output = sample("-n", 0)
    assert (code, "--samples 0" in output) == (2, True)
    code, output = sample("--temperature", -1)
    assert (code, "--temperature -1" in output) == (2, True)
    code, output = sample("--temperature", "inf")
    assert (code, "--temperature inf: give 1e-06 to 1e+06, or 0 for greedy" in output) == (2, True)
    code, output = sample("--set", "data.too_long=drop", prompts=[*PROMPTS, "1" * 9])
    assert (code, "1 of 11 prompts are longer than rollout.max" in output) == (2, True)
    assert "raise it, or take them out of the prompts" in output
    assert "left out" not in output
    code, output = sample("--top-p", 1.5)
    assert (code, "rollout.top_p = 1.5" in output) == (2, True)
    code, output = sample(out="none/s.jsonl")
    assert (code, "there is no folder" in output) == (2, True)
    for absent in ("q.jsonl", "q.txt", "What is 2 + 2?"):
        code, output = sample("--prompts", absent)
        assert (code, f"--prompts {absent}: there is no such file" in output) == (2, True)
    assert not (tmp_path / "s.jsonl").exists()
    code, output = sample("--overwrite", out="p.txt")
    assert (code, "p.txt: the command reads this file; name another" in output) == (2, True)
    assert (tmp_path / "p.txt").read_text().splitlines() == PROMPTS
    with SampleFile(str(tmp_path / "s.jsonl")) as file:
        file.resume({}, PROMPTS, SAMPLES, BATCH, False)
        code, output = sample()
        assert (code, "another process writes samples into it" in output) == (2, True)


def test_a_full_disk_is_named_and_what_is_written_is_continued(tmp_path):
    rows = [{"prompt": "a" * 60, "row": row, "sample": 0} for row in range(9)]
    prompts, path = ["a" * 60] * 9, tmp_path / "s.jsonl"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write() -> int:
        with SampleFile(str(path)) as file:
            begin = file.resume({}, prompts, 1, 2, False)
            resource.setrlimit(resource.RLIMIT_FSIZE, (400, limit[1]))
            for place in range(begin, 9, 2):
                file.append(rows[place : place + 2])
        return begin

    try:
        with pytest.raises(OSError, match="File too large") as error:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert error.value.filename == str(path)
    with SampleFile(str(path)) as file:
        assert file.resume({}, prompts, 1, 2, False) == 4
        file.append(rows[4:])
    assert [row["row"] for row in read(path)] == [*range(9)]


@pytest.mark.full
def test_a_ctrl_c_leaves_whole_lines_to_go_on_with(base, tmp_path, python, environment, sample):
    many = PROMPTS * 200  # seconds of sampling
    words = arguments(base, tmp_path, many, "s.jsonl")[1:]
    process = small_run.command(python, "sample", *words, env=environment())
    file = tmp_path / "s.jsonl"
    while not (file.exists() and file.stat().st_size):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "Traceback" not in output
    assert "stopping after this batch" in output
    first_part = file.read_bytes()
    assert f"stopped; {len(first_part.splitlines())} of {len(many) * SAMPLES} samples are" in output
    assert first_part.endswith(b"\n")
    assert len(first_part.splitlines()) % (BATCH * SAMPLES) == 0
    code, notes = sample(prompts=many)
    assert code == 0, notes
    assert f", {len(first_part.splitlines())} of them from before: " in notes
    assert file.read_bytes().startswith(first_part)
    assert len(read(file)) == len(many) * SAMPLES


def test_only_line_feeds_end_a_prompt_of_a_text_file(tmp_path):
    file = tmp_path / "p.txt"
    file.write_bytes("\ufeff3+4=\u20285\r\n\n7+1=\x0c2\n".encode())
    prompts = ["3+4=\u20285", "7+1=\x0c2"]
    assert sampling._lines(str(file)) == [{"prompt": prompt} for prompt in prompts]
