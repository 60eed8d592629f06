"""More wrong input of the kinds that bad_commands has few of, and the table of all of it."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path

import bad_commands
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bad_commands import (
    DEFINES,
    JOB,
    Change,
    Wrong,
    fields,
    put,
    reward,
    rows,
    says,
    sets,
    template,
    tensors,
    variables,
)
from safetensors.numpy import save_file

RESUME = ("train", "{home}/run.toml", "--resume", "auto")


def run_folder(name: str = "", content: str | bytes | None = b"") -> Change:
    """A run that has logged two steps, with one of its files replaced; None: a folder in its place.

    Its checkpoint of step 2 is no checkpoint yet: it has no manifest.
    """

    def change(home: Path) -> None:
        run = home / "r"
        for folder in ("checkpoints/2", "samples"):
            (run / folder).mkdir(parents=True)
        lines = [json.dumps({"step": step, "reward": 0.5}) + "\n" for step in (1, 2)]
        (run / "metrics.jsonl").write_text("".join(lines))
        (run / "config.toml").write_bytes((home / "run.toml").read_bytes())
        if not name:
            return
        file = run / name
        if content is None:
            file.unlink(missing_ok=True)
            file.mkdir(parents=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            put(f"r/{name}", content)(home)

    return change


def damaged(message: str, name: str, content: str | bytes | None, *argv: str) -> Wrong:
    """A run folder with a file that is not what the run wrote."""
    return Wrong("checkpoint", message, argv or RESUME, run_folder(name, content))


def linked(name: str, target: str) -> Change:
    """A link in the folder of a run."""

    def change(home: Path) -> None:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(target, home / name)

    return change


def pipe(name: str) -> Change:
    """A named pipe, which nobody writes into."""

    def change(home: Path) -> None:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).unlink(missing_ok=True)
        os.mkfifo(home / name)

    return change


def adapter(message: str, config: dict[str, object], **arrays: np.ndarray) -> Wrong:
    """A PEFT folder with this adapter_config.json and these weights."""

    def change(home: Path) -> None:
        usual = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
        (home / "adapter_config.json").write_text(json.dumps({**usual, **config}))
        if arrays:
            save_file(arrays, home / "adapter_model.safetensors")

    return sets("adapter", message, "lora.path={home}", change=change)


def rollouts(message: str, content: bytes) -> Wrong:
    """A file of rollouts."""
    argv = ("replay", "{home}/x.safetensors", "--config", "{home}/run.toml")
    return Wrong("rollouts", message, argv, put("x.safetensors", content))


def index(text: str) -> Change:
    """An index of shards in place of the weights."""

    def change(home: Path) -> None:
        (home / "base" / "model.safetensors").unlink()
        put("base/model.safetensors.index.json", text)(home)

    return change


def safetensors(header: object, data: bytes = b"") -> bytes:
    """A file of tensors with this header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def parquet(**columns: object) -> bytes:
    """A file of one row with a prompt and these columns."""
    file = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["1+1="], **columns}), file)
    return file.getvalue()


EVAL, EXPORT = ("eval", "{home}/r"), ("export", "{home}/r", "{home}/out")
ANSWERS = (*bad_commands.EVAL, "--answers")
STEPS = b'{"step": 1}\n'

CHECKPOINTS = [
    damaged("config.toml", "config.toml", "[model\n"),
    damaged("config.toml", "config.toml", b"\xff\xfe\x00"),
    damaged("config.toml", "config.toml", None),
    damaged("config.toml", "config.toml", b"\xff\xfe\x00", *RESUME, "--dry-run"),
    damaged("config.toml", "config.toml", None, *RESUME, "--dry-run"),
    damaged("rewards is no list", "config.toml", "rewards = 5\n", "report", "{home}/r"),
    damaged("rewards is no list", "config.toml", "rewards = 5\n", "samples", "{home}/r"),
    damaged("config.toml", "config.toml", "[model\n", *EVAL),
    damaged("config.toml", "config.toml", b"\xff\xfe\x00", *EVAL),
    damaged("config.toml", "config.toml", None, *EVAL),
    damaged("config.toml", "config.toml", "[model\n", *EXPORT),
    damaged("config.toml", "config.toml", b"\0", *EXPORT),
    damaged("r/config.toml: 9 problems", "config.toml", "train = 1\n"),
    damaged("metrics.jsonl, line 1", "metrics.jsonl", b"no json\n" + STEPS),
    damaged("metrics.jsonl, line 1", "metrics.jsonl", b"[1]\n" + STEPS),
    damaged("metrics.jsonl, line 1", "metrics.jsonl", b'{"stop": 1}\n' + STEPS),
    damaged("metrics.jsonl, line 1", "metrics.jsonl", b'{"step": "1"}\n' + STEPS),
    damaged("metrics.jsonl, line 1", "metrics.jsonl", b"\xff\n" + STEPS),
    damaged("metrics.jsonl is a folder", "metrics.jsonl", None),
    damaged("metrics.jsonl, line 1", "metrics.jsonl", b"no json\n" + STEPS, "report", "{home}/r"),
    damaged("summary.json is a folder", "summary.json", None),
    damaged("rewritten.json is a folder", "rewritten.json", None),
    damaged("replay.json is a folder", "replay.json", None),
    damaged("code is no folder", "code", b""),
    damaged("model is no folder", "model", b""),
    damaged("rollouts is no folder", "rollouts", b""),
    damaged(
        "r/model: the run has written no model", "", b"", *EVAL, "--data", "task:arithmetic:test"
    ),
    damaged("no complete checkpoint", "", b"", *EXPORT),
    damaged("3", "", b"", *EVAL, "--step", "3"),
    *(
        damaged(f"{name}: is a file of the run", "", b"", *ANSWERS, f"{{home}}/r/{name}")
        for name in ("metrics.jsonl", "config.toml")
    ),
    Wrong("checkpoint", "not empty.*--resume auto", change=run_folder()),
    Wrong("checkpoint", "r/samples is no folder|not empty", RESUME, linked("r/samples", "nowhere")),
    Wrong("checkpoint", "r/checkpoints is no folder", RESUME, linked("r/checkpoints", "absent")),
    Wrong("checkpoint", "run.dir|r", RESUME, linked("r", "r")),
    Wrong("checkpoint", "lock", RESUME, linked("r/.lock", "../run.toml")),
    Wrong("checkpoint", "r/.lock is no file", RESUME, pipe("r/.lock")),
    Wrong("checkpoint", "r/metrics.jsonl is no file", RESUME, pipe("r/metrics.jsonl")),
]

ROLLOUTS = [
    rollouts("x.safetensors", b""),
    rollouts("x.safetensors", b"\x80\x04."),
    rollouts("x.safetensors", struct.pack("<Q", 1 << 62) + b"{}"),
    rollouts("x.safetensors", safetensors({})),
    rollouts("x.safetensors", safetensors([1])),
    rollouts("x.safetensors", safetensors({"a": 5})),
    rollouts(
        "x.safetensors",
        safetensors({"step": {"dtype": "I32", "shape": [], "data_offsets": [0, 4]}}, b"\0" * 4),
    ),
    Wrong(
        "rollouts",
        "x.safetensors",
        ("replay", "{home}/x.safetensors", "--config", "{home}/run.toml"),
        pipe("x.safetensors"),
    ),
    says("absent", "replay", "{home}/absent", "--config", "{home}/run.toml", kind="rollouts"),
    says("base", "replay", "{home}/base", "--config", "{home}/run.toml", kind="rollouts"),
]

LORA = np.ones((2, 2), np.float32)
ADAPTERS = [
    adapter("adapter_model", {}),
    adapter("r = 0|adapter_config", {"r": 0}),
    adapter("r|adapter_config", {"r": "two"}),
    adapter("bias", {"bias": "all"}, x=LORA),
    adapter("use_dora", {"use_dora": True}, x=LORA),
    adapter("modules_to_save", {"modules_to_save": ["lm_head"]}, x=LORA),
    adapter("rank_pattern|adapter", {"rank_pattern": {"q_proj": 0}}, x=LORA),
    adapter("nothing|adapter", {"target_modules": ["nothing"]}, x=LORA),
    adapter("adapter_model.safetensors|x", {}, x=LORA),
    adapter("lora_alpha|adapter", {"lora_alpha": "many"}, x=LORA),
    adapter("PREFIX|peft_type", {"peft_type": "PREFIX_TUNING"}),
    sets("adapter", "run.toml|lora.path", "lora.path={home}/run.toml"),
    sets("adapter", "lora.targets", "lora.rank=2", "lora.targets=["),
    sets("adapter", "lora.alpha", "lora.rank=2", "lora.alpha=many"),
]

MESHES = [
    sets("mesh", "mesh.data = 1.5: expected a whole", "mesh.data=1.5"),
    sets("mesh", "mesh.fsdp = 0: expected", "mesh.fsdp=0"),
    sets("mesh", "mesh.context = 0: expected", "mesh.context=0"),
    sets("mesh", "mesh.tensor|tensor", "mesh.tensor=7"),
    sets("mesh", "mesh.sampling_tensor = -1: expected", "mesh.sampling_tensor=-1"),
    sets("mesh", "mesh.sampling_tensor|sampling_tensor", "mesh.sampling_tensor=3"),
    sets("mesh", "mesh.platform = 1|platform", "mesh.platform=1"),
    sets("mesh", "prompts_per_step", "mesh.data=4", "rollout.prompts_per_step=3"),
    sets("mesh", "slices = 0: expected", "plan.topology=v5e:4x4", "plan.slices=0"),
    says("v9|topology", "plan", "{home}/run.toml", "--topology", "v9:4x4", kind="mesh"),
]

SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "here", "SLURM_NTASKS": "2"}
SLURM |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
VARIABLES = [
    variables("HOST:PORT", **JOB | {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:"}),
    variables("HOST:PORT|COORDINATOR", **JOB | {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:port"}),
    variables("HOST:PORT|COORDINATOR", **JOB | {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:99999"}),
    variables("whole numbers", **JOB | {"JAX_NUM_PROCESSES": "0"}),
    variables("whole numbers", **JOB | {"JAX_NUM_PROCESSES": "-2"}),
    variables("whole numbers", **JOB | {"JAX_NUM_PROCESSES": "1e1"}),
    variables("set all three", JAX_PROCESS_ID="0"),
    variables("set all three", JAX_COORDINATOR_ADDRESS="127.0.0.1:9"),
    variables("OmpiCluster does .KeyError", OMPI_MCA_orte_hnp_uri="1.0;tcp://10.0.0.1:5"),
    variables("SlurmCluster does .ValueError", **SLURM | {"SLURM_NTASKS": "two"}),
]

OUTPUTS = [
    says("a.jsonl: is a link", *ANSWERS, "{home}/a.jsonl", change=linked("a.jsonl", "rows.jsonl")),
    says("a.jsonl: is a link", *ANSWERS, "{home}/a.jsonl", change=linked("a.jsonl", "nowhere")),
    says("a.jsonl: is no file", *ANSWERS, "{home}/a.jsonl", change=pipe("a.jsonl")),
]

COLUMNS = [
    sets("columns", "nothing", "data.path={home}/rows.jsonl", "data.prompt={{nothing}}"),
    sets("columns", "prompt", "data.path={home}/rows.jsonl", "data.prompt={{prompt"),
    sets("columns", "completion", "data.path={home}/rows.jsonl", "data.completion=text"),
    sets("columns", "policies|teacher|column", "data.path={home}/rows.jsonl",
         'scores=[{name="x", policies="who"}]'),
    sets("columns", "answer|0", "data.path={home}/rows.jsonl", "data.answer={{answer.a}}"),
    sets("columns", "data.prompt = 5: expected", "data.path={home}/rows.jsonl", "data.prompt=5"),
    sets("columns", "delimiter", "data.path={home}/rows.jsonl", "data.delimiter=;;"),
    sets("columns", "split", "data.path={home}/rows.jsonl", "data.split=train"),
    rows("twice|column|prompt", "prompt,prompt\n1+1=,2\n", "rows.csv"),
    rows("answer|column", '{"prompt": "1+1=", "answer": [["2"], {"a": NaN}]}\n{"prompt": 1}\n'),
    rows("prompt", '{"prompt": true, "answer": "2"}\n'),
    rows("prompt", '{"prompt": "", "answer": "2"}\n'),
    rows("line 1: answer inf", '{"prompt": "1+1=", "answer": 1e999}\n'),
    rows("column 'when' cannot be read", parquet(when=pa.array([5 * 10**17], pa.timestamp("us"))),
         "rows.parquet"),
    rows("answer b'2' holds bytes", parquet(answer=[b"2"]), "rows.parquet"),
    rows("no chat template", '{"prompt": [{"role": "robot", "content": "1+1="}], "answer": "2"}\n'),
]  # fmt: skip

TEMPLATES = [
    template("t.jinja|template", "{{ messages | no_such_filter }}"),
    template("t.jinja|template", "{{ nothing.at.all }}"),
    template("t.jinja|template", "{{ 1 / 0 }}"),
    template("t.jinja|template", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    template("t.jinja|template", "{% set x = 'y' * 10**9 %}{{ x }}"),
    template("t.jinja|template", "{% while true %}{% endwhile %}"),
    template("t.jinja|template|prompt", ""),
    template("t.jinja|template|prompt", "the same for all"),
    Wrong("template", "t.jinja", ("train", "{home}/run.toml", "--set",
          "data.chat_template={home}/t.jinja"), put("t.jinja", b"\xff\xfe")),
    sets("template", "no such file; give a Jinja", "data.chat_template={home}/base"),
    sets("template", "chat_template_kwargs", "data.chat_template_kwargs=[1]"),
    sets("template", "template_time", "data.template_time=yesterday"),
]  # fmt: skip

TOKENIZERS = [
    Wrong("tokenizer", "tokenizer", change=put("base/tokenizer.json", "null")),
    Wrong("tokenizer", "tokenizer", change=put("base/tokenizer.json", "[" * 100_000)),
    Wrong("tokenizer", "tokenizer", change=fields("tokenizer.json", model={"type": "Nonsense"})),
    Wrong("tokenizer", "tokenizer", change=fields("tokenizer.json", model={"type": "BPE"})),
    Wrong("tokenizer", "tokenizer", change=put("base/tokenizer_config.json", "[]")),
    Wrong("tokenizer", "tokenizer_config", change=put("base/tokenizer_config.json", b"\xff")),
    Wrong("tokenizer", "eos|end", change=fields("tokenizer_config.json", eos_token="<absent>")),
    Wrong("tokenizer", "generation_config", change=put("base/generation_config.json", "{")),
    Wrong("tokenizer", "eos_token_id|generation_config",
          change=put("base/generation_config.json", '{"eos_token_id": "two"}')),
    Wrong("tokenizer", "eos_token_id|generation_config|10000",
          change=put("base/generation_config.json", '{"eos_token_id": 10000}')),
]  # fmt: skip

WEIGHTS = [
    Wrong("weights", "model.norm.weight", change=tensors(
        lambda t: t.update({"model.norm.weight": np.ones((1, 1, 1), np.float32)}))),
    Wrong("weights", "C64|complex|model.norm", change=tensors(
        lambda t: t.update({"model.norm.weight": np.ones(32, np.complex64)}))),
    *(
        Wrong("weights", "index.json|rows.jsonl", change=index(text))
        for text in ("{", "[]", "{}", '{"weight_map": {"a": "../rows.jsonl"}}',
                     '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "absent.safetensors"}}')
    ),
    Wrong("weights", "model.safetensors", change=pipe("base/model.safetensors")),
    *(
        Wrong("weights", "model.safetensors", change=put("base/model.safetensors", safetensors(
            {"model.norm.weight": {**values, "data_offsets": [0, 4]}}, b"\0" * 4)))
        for values in ({"dtype": "F32", "shape": [-1]}, {"dtype": "F99", "shape": [1]})
    ),
]  # fmt: skip

UNSPEAKABLE = """
class Odd(Exception):
    def __str__(self):
        raise RuntimeError

    __repr__ = __float__ = __str__


"""
REWARDS = [
    reward("digits", DEFINES + "return [None, 'x'][:len(completions)]\n"),
    reward("digits", DEFINES + "return {1.0}\n"),
    reward("digits", DEFINES + "return completions\n"),
    reward("digits", DEFINES + "return iter([])\n"),
    reward("digits", DEFINES + "raise SystemExit(0)\n"),
    reward("digits", DEFINES + "raise MemoryError\n"),
    reward("digits", DEFINES + "return digits(completions)\n"),
    reward("digits", "class digits:\n    pass\n"),
    reward("digits", "def digits(*texts):\n    return [1.0]\n"),
    reward("digits.*cannot be written", UNSPEAKABLE + DEFINES + "raise Odd\n"),
    reward("digits.*cannot be written", UNSPEAKABLE + DEFINES + "return [Odd()] * 2\n"),
    reward("digits", "def digits():\n    return [1.0]\n"),
    reward("mine.py", "raise BaseException\n"),
    reward("mine.py", "raise GeneratorExit\n"),
    reward("mine.py", "import os\nraise OSError('no such grader')\n"),
    sets("reward", "weight", 'rewards=[{use="{home}/mine.py:digits", weight="much"}]'),
    sets("reward", "on_error", 'rewards=[{use="{home}/mine.py:digits", on_error="ignore"}]'),
    sets("reward", "timeout", 'rewards=[{use="{home}/mine.py:digits", timeout=-1}]'),
    sets("reward", "mine.py", 'rewards=[{use="{home}/mine.py"}]'),
]

WRONG: dict[str, Wrong] = bad_commands.WRONG | {
    f"{wrong.kind} {number} more": wrong
    for group in (
        *(
            OUTPUTS,
            CHECKPOINTS,
            ROLLOUTS,
            ADAPTERS,
            MESHES,
            VARIABLES,
            COLUMNS,
            TEMPLATES,
            TOKENIZERS,
        ),
        *(WEIGHTS, REWARDS),
    )
    for number, wrong in enumerate(group)
}
"""Name -> what is refused; each is tried by `tests/reliability/test_bad_commands.py`."""
