"""Two processes of two devices each train as one process of four."""

import json
from collections import Counter

import numpy as np
import pytest
import small_run
from processes import together
from safetensors.numpy import load_file

from jaxgrpo.cli.main import main
from jaxgrpo.data import tasks

pytestmark = pytest.mark.slow

MESH = {"mesh": {"data": 2, "fsdp": 2}, "optimizer": {"use": "sgd", "learning_rate": 0.1}}


MEMORY = {
    "recipe": "spo",
    "rollout.prompts": {"use": "spo_priority", "decay": 0.1, "reward": "digits", "success": 0.9},
}
"""A chain and a prompt policy that remember rows."""


RECORDER = '''
import json
import os


def record(completions, completion_ids, prompts, trainer_state, **columns):
    """A reward that appends a line per sample it judges."""
    with open(os.environ["RECORD"] + os.environ.get("JAX_PROCESS_ID", ""), "a") as file:
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            file.write(json.dumps([trainer_state.global_step, prompt, ids]) + "\\n")
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]
'''


def start(fork_server, environment, count, devices, *arguments, **more):
    """`count` started processes of so many devices each, that train as one run."""
    each = together(count) if count > 1 else [{}]
    return [
        fork_server.start(*arguments, env=environment(devices=devices, **more, **variables))
        for variables in each
    ]


def end(processes, timeout=570):
    """Waits for the processes. Returns their outputs."""
    outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def start_two(fork_server, environment, *configs):
    """Two started processes of two devices each, that train as one run, by one config or two."""
    return [
        fork_server.start(
            *("train", configs[index % len(configs)]), env=environment(devices=2, **variables)
        )
        for index, variables in enumerate(together())
    ]


ADAPTERS = {"lora": {"rank": 2, "alpha": 4.0}}
WARMUP = {"rollout.early_stop": {"percentile": 50, "warmup": 2, "window": 2, "tokens": 5}}
FULL = ({}, ADAPTERS, WARMUP)
SHRINKING = {"rollout.slots": 32}  # as many as samples: they become fewer as samples end


@pytest.mark.fault(7)
@pytest.mark.parametrize(
    "more",
    [{}, *(pytest.param(SHRINKING | more, marks=pytest.mark.full) for more in FULL)],
    ids=["weights", "fewer slots", "adapters", "warmup"],
)
def test_two_processes_train_three_steps_like_one(more, tmp_path, fork_server, environment):
    rows = tasks.load("task:arithmetic:train", count=8)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = {**MESH, **MEMORY, **more, "data.path": str(tmp_path / "rows.jsonl")}
    folders = {count: tmp_path / f"r{count}" for count in (1, 2)}
    files = {
        count: small_run.write(tmp_path / f"{count}.toml", folder, **changes)
        for count, folder in folders.items()
    }
    processes = start_two(fork_server, environment, files[2])
    assert main(["train", str(files[1])]) == 0  # meanwhile
    end(processes, timeout=300)
    single, two = (small_run.metrics(folders[count]) for count in (1, 2))
    assert [line["step"] for line in two] == [1, 2, 3]
    for left, right in zip(single, two, strict=True):
        # Means of float32 are summed in another order; one other token would show in 1e-3.
        assert left["reward"] == pytest.approx(right["reward"], rel=1e-6)
        assert left["prompts/eligible"] == right["prompts/eligible"]
        assert left["prompts/skipped"] == right["prompts/skipped"]
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
    assert two[-1]["prompts/skipped"] > 0
    weights = [load_file(folders[count] / "model" / "model.safetensors") for count in (1, 2)]
    for name, value in weights[0].items():
        np.testing.assert_allclose(value, weights[1][name], atol=1e-5)
    summary = json.loads((folders[2] / "summary.json").read_text())
    assert summary["step"] == 3
    assert (folders[2] / "checkpoints" / "3").exists()
    adapter_files = [
        folder / "adapter" / "adapter_model.safetensors" for folder in folders.values()
    ]
    assert [file.exists() for file in adapter_files] == ["lora" in more] * 2
    if "lora" in more:
        single, two = map(load_file, adapter_files)
        for name, value in single.items():
            np.testing.assert_allclose(value, two[name], atol=1e-5)


@pytest.mark.fault(20)
def test_a_mistake_ends_both_processes_with_one_message(tmp_path, fork_server, environment):
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **{"mesh.fsdp": 3})
    processes = start_two(fork_server, environment, file)
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 2, output
        assert "fsdp 3" in output
        assert "Traceback" not in output


@pytest.mark.fault(20)
@pytest.mark.full
def test_processes_with_other_configs_or_data_both_refuse(tmp_path, fork_server, environment):
    rows = [{"prompt": f"1{n}+20=", "answer": f"{n + 30}"} for n in range(9)]
    files = []
    for number in (0, 1):
        data = tmp_path / f"rows_{number}.jsonl"
        rows[3]["answer"] = str(number)
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        changes = {**MESH, "data.path": str(data)}
        files.append(small_run.write(tmp_path / f"{number}.toml", tmp_path / "r", **changes))
    for process in start_two(fork_server, environment, *files):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 2, output
        assert "data.path: process 1 has 9 rows, crc32" in output
        assert "give every process of a run the same config" in output


@pytest.mark.full
def test_processes_train_and_go_on_in_copies_of_a_folder_at_other_paths(
    tmp_path, fork_server, environment
):
    rows = [{"prompt": f"1{n}+20=", "answer": f"{n + 30}"} for n in range(9)]
    files = [tmp_path / name / "run.toml" for name in ("first", "second")]
    for steps, resume in ((1, ()), (2, ("--resume", "auto"))):
        for file in files:
            file.parent.mkdir(exist_ok=True)
            (file.parent / "rows.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
            (file.parent / "judge.py").write_text(RECORDER)
            changes = {**MESH, "train.steps": steps, "data.path": str(file.parent / "rows.jsonl")}
            changes["rewards"] = [{"use": f"{file.parent / 'judge.py'}:record"}]
            small_run.write(file, tmp_path / "r", **changes)
        record = {"RECORD": str(tmp_path / "record")}
        words = (("train", file, *resume) for file in files)
        variables = (environment(devices=2, **record, **each) for each in together())
        end([fork_server.start(*w, env=v) for w, v in zip(words, variables, strict=True)])
    assert [line["step"] for line in small_run.metrics(tmp_path / "r")] == [1, 2]


@pytest.mark.fault(20)
@pytest.mark.full
@pytest.mark.parametrize("command", ["sft", "eval", "sample"])
def test_other_commands_refuse_processes_with_other_configs_too(
    command, tmp_path, fork_server, environment
):
    asks = {"eval.data": "task:arithmetic:test", "eval.prompts": 3}
    (tmp_path / "prompts.txt").write_text("1+1=")
    more = {"sample": ("--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "out.jsonl")}
    processes = []
    for number, variables in enumerate(together()):
        changes = {**MESH, **asks, "train.seed": number}
        file = small_run.write(tmp_path / f"{number}.toml", tmp_path / "r", **changes)
        words = (command, file, *more.get(command, ()))
        processes.append(fork_server.start(*words, env=environment(devices=2, **variables)))
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 2, output
        assert "train.seed: process 1 has 1, process 0 has 0: give every process" in output


def rewarded(folder, name):
    """What all processes of a run judged, and how often: step, prompt, token ids of a sample."""
    files = folder.glob(f"{name}*")
    return Counter(line for file in files for line in file.read_text().splitlines())


@pytest.mark.fault(7)
@pytest.mark.full
def test_one_two_and_four_processes_take_the_same_ten_steps_and_judge_each_sample_once(
    tmp_path, fork_server, environment
):
    judge = tmp_path / "judge.py"
    judge.write_text(RECORDER)
    changes = {**MESH, "rewards": [{"use": f"{judge}:record"}], "train.steps": 10}
    for count in (1, 2, 4):
        file = small_run.write(tmp_path / f"{count}.toml", tmp_path / f"r{count}", **changes)
        record = str(tmp_path / f"record_{count}_")
        end(start(fork_server, environment, count, 4 // count, "train", file, RECORD=record))
    single, *several = (small_run.metrics(tmp_path / f"r{count}") for count in (1, 2, 4))
    assert len(single) == 10
    weights = [load_file(tmp_path / f"r{n}" / "model" / "model.safetensors") for n in (1, 2, 4)]
    judged, size = rewarded(tmp_path, "record_1_"), 8 * 4  # prompts of a step x samples of a group
    steps = Counter(json.loads(line)[0] for line in judged.elements())
    assert [steps[step] for step in range(1, 10)] == [size] * 9
    tried = steps[0] - size  # texts that every process tries its rewards on before step 1
    assert 0 < tried <= 2
    for metrics, count, run_weights in zip(several, (2, 4), weights[1:], strict=True):
        for left, right in zip(single, metrics, strict=True):
            assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)
            assert left["reward"] == pytest.approx(right["reward"], rel=1e-6)
        for name, value in weights[0].items():
            np.testing.assert_allclose(value, run_weights[name], atol=1e-5)
        mine = rewarded(tmp_path, f"record_{count}_")
        assert judged - mine == Counter(), "missing"
        assert (mine - judged).total() == (count - 1) * tried
        assert {json.loads(line)[0] for line in mine - judged} == {0}
        shares = [len(file.read_text().splitlines()) for file in tmp_path.glob(f"record_{count}_*")]
        assert max(shares) == min(shares)


@pytest.mark.fault(10)
@pytest.mark.full
@pytest.mark.parametrize("order", [(2, 1, 2), (2, 4, 2), (1, 2, 4)])
def test_a_run_goes_on_with_another_number_of_processes(order, tmp_path, fork_server, environment):
    straight = small_run.write(tmp_path / "whole.toml", tmp_path / "whole", **MESH)
    end(start(fork_server, environment, 1, 4, "train", straight))
    run = tmp_path / "run"
    for steps, count in enumerate(order, start=1):
        file = small_run.write(tmp_path / "run.toml", run, **MESH, **{"train.steps": steps})
        again = ("--resume", "auto")
        end(start(fork_server, environment, count, 4 // count, "train", file, *again))
    for left, right in zip(
        small_run.metrics(tmp_path / "whole"), small_run.metrics(run), strict=True
    ):
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)
        assert left["reward"] == pytest.approx(right["reward"], rel=1e-6)
    single, two = (load_file(f / "model" / "model.safetensors") for f in (tmp_path / "whole", run))
    for name, value in single.items():
        np.testing.assert_allclose(value, two[name], atol=1e-5)
