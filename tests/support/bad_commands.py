"""Wrong commands, configs and files as a user gives them to jaxgrpo, each with what it is told."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

Change = Callable[[Path], object]


class Wrong(NamedTuple):
    """A command that is refused.

    Attributes:
      kind: of the input that is wrong.
      message: a pattern of what is printed: place, value, remedy.
      argv: of jaxgrpo; {home} is a folder with run.toml, a model, rows.jsonl and mine.py.
      change: what is done to the files there before.
      environment: variables.
    """

    kind: str
    message: str
    argv: tuple[str, ...] = ("train", "{home}/run.toml")
    change: Change | None = None
    environment: tuple[tuple[str, str], ...] = ()


def sets(kind: str, message: str, *overrides: str, change: Change | None = None) -> Wrong:
    """A config with keys replaced."""
    return Wrong(kind, message, ("train", "{home}/run.toml", "--set", *overrides), change)


def says(message: str, *argv: str, change: Change | None = None, kind: str = "command") -> Wrong:
    """A command line."""
    return Wrong(kind, message, argv, change)


def put(name: str, content: str | bytes) -> Change:
    """A file with this content."""

    def change(home: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (home / name).write_bytes(data)

    return change


def cut(name: str, size: int) -> Change:
    """The first bytes of a file; of a negative size all but the last."""
    return lambda home: (home / name).write_bytes((home / name).read_bytes()[:size])


def gone(name: str) -> Change:
    return lambda home: (home / name).unlink()


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Change:
    """The weights of the model, changed."""

    def write(home: Path) -> None:
        file = home / "base" / "model.safetensors"
        weights = load_file(file)
        change(weights)
        save_file(weights, file, metadata={"format": "pt"})

    return write


def fields(name: str, **values: object) -> Change:
    """A JSON file of the model with fields replaced."""

    def write(home: Path) -> None:
        file = home / "base" / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return write


def header(length: int, text: bytes = b"{}") -> Change:
    """A file of weights whose header says this length."""
    return put("base/model.safetensors", struct.pack("<Q", length) + text)


def rows(message: str, content: str | bytes, name: str = "rows.jsonl", *more: str) -> Wrong:
    """A file of data."""
    return sets("data", message, f"data.path={{home}}/{name}", *more, change=put(name, content))


def gguf(message: str, content: bytes) -> Wrong:
    argv = ("import", "{home}/model.gguf", "{home}/out")
    return Wrong("GGUF", message, argv, put("model.gguf", content))


def template(message: str, content: str) -> Wrong:
    path = "data.chat_template={home}/t.jinja"
    return sets("template", message, path, change=put("t.jinja", content))


def reward(message: str, body: str) -> Wrong:
    return Wrong("reward", message, change=put("mine.py", body))


def variables(message: str, **environment: str) -> Wrong:
    return Wrong("environment", message, environment=tuple(environment.items()))


JOB = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:9", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
HUGE = 10**400
"""A whole number that no float holds."""
DEFINES = "def digits(completions, **columns):\n    "
MAGIC = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)

EVAL = ("eval", "{home}/base", "--data", "{home}/rows.jsonl", "--scorer", "math")
PLAN = ("plan", "{home}/run.toml", "--topology", "v5e:2x2")
SAMPLE = ("sample", "{home}/base", "--prompts", "{home}/p.txt", "--out", "{home}/o.jsonl")

COMMANDS = [
    says("unknown command 'trian': did you mean 'train'", "trian"),
    says("unknown command 'xyz'", "xyz"),
    says("required: CONFIG", "train"),
    says("unrecognized arguments: --sett", "train", "{home}/run.toml", "--sett", "a=1"),
    says("there is no such file", "train", "{home}/absent.toml"),
    says("no shipped config: did you mean 'quickstart'", "train", "quickstrat"),
    says("invalid choice: 'always'", "train", "{home}/run.toml", "--resume", "always"),
    says("expected .*value", "train", "{home}/run.toml", "--set", "train.steps"),
    says("unknown key", "train", "{home}/run.toml", "--set", "train.stepz=3"),
    says("unknown", "train", "{home}/run.toml", "--set", "trian.steps=3"),
    says("launch: give a command", "launch"),
    says("expected 1 or more", "launch", "--processes", "0", "train", "x"),
    says("invalid int value: 'two'", "launch", "--processes", "two", "train", "x"),
    says("give all three", "train", "{home}/run.toml", "--process-id", "0"),
    says("no run folder|no folder|does not exist", "export", "{home}/absent", "{home}/out"),
    says("absent", "eval", "{home}/absent"),
    says("absent", "report", "{home}/absent"),
    says("required: --out", "sample", "{home}/absent", "--prompts", "{home}/rows.jsonl"),
    says("absent", "model", "{home}/absent"),
    says("mine.py.*no folder|mine.py", "model", "{home}/mine.py"),
    says("unknown recipe|no recipe|did you mean", "advantages", "grop", "--rewards", "1,0"),
    says("rewards", "advantages", "grpo", "--rewards", "1,x"),
    says("unknown|did you mean|invalid", "make-base", "arithmatic", "{home}/out"),
    says("run.toml, base is there already", "init", "{home}"),
    says("make-base: seed = -1: give 0 to", "make-base", "sums", "{home}/x", "--seed", "-1"),
    says("--profile: a dry run takes no", "train", "{home}/run.toml", "--dry-run", "--profile"),
    says("--lengths 3,4: give --rewards", "advantages", "grpo", "--lengths", "3,4"),
    says("--ascending: of what", "samples", "{home}", "--ascending"),
    says("--highest nan: what", "fit", "{home}", "--highest", "nan"),
    says("--level: an atlas", "probe", "{home}", "--methods", "grpo,sign", "--level", "0.9"),
    says("absent", "replay", "{home}/absent.safetensors"),
    says("no folder .*none; make", *EVAL, "--answers", "{home}/none/a.jsonl"),
    says("rows.jsonl: the command reads this file", *EVAL, "--answers", "{home}/rows.jsonl"),
    says("run.toml: the command reads", "eval", "{home}/run.toml", "--answers", "{home}/run.toml"),
    says("run.toml: the command reads", "probe", "{home}/run.toml", "--html", "{home}/run.toml"),
    says("run.toml: the command reads", "check", "{home}/run.toml", "--json", "{home}/run.toml"),
    says("below: .*rows.jsonl is a file: choose", "make-base", "sums", "{home}/rows.jsonl/below"),
    says("below: .*rows.jsonl is a file: choose", *PLAN, "--dump", "{home}/rows.jsonl/below"),
    says("--slices 0: expected", *PLAN, "--slices", "0"),
    says("p.txt: no text in UTF-8", *SAMPLE, change=put("p.txt", b"caf\xe9\n")),
    says("p.txt: holds no prompt; write one in each", *SAMPLE, change=put("p.txt", "\n\n")),
    says(
        "x.safetensors",
        "replay",
        "{home}/x.safetensors",
        "--config",
        "{home}/run.toml",
         change=put("x.safetensors", b"x"), kind="rollouts"),
    says(
        "base/model.safetensors",
        "replay",
        "{home}/base/model.safetensors",
        "--config",
        "{home}/run.toml",
        kind="rollouts",
    ),
]  # fmt: skip

CONFIGS = [
    sets("config", "train.steps = 0: expected", "train.steps=0"),
    sets("config", "train.steps = -1: expected", "train.steps=-1"),
    sets("config", "train.steps = 1.5: expected a whole", "train.steps=1.5"),
    sets("config", "train.steps = .many.: expected", "train.steps=many"),
    sets("config", "train.steps = true: expected", "train.steps=true"),
    sets("config", "learning_rate = -1.0: expected", "optimizer.learning_rate=-1"),
    sets("config", "learning_rate = nan", "optimizer.learning_rate=nan"),
    sets("config", "learning_rate = inf", "optimizer.learning_rate=inf"),
    sets("config", "optimizer.use = 'adamm'.*adam", "optimizer.use=adamm"),
    sets("config", "temperature", "rollout.temperature=-1"),
    sets("config", "top_p", "rollout.top_p=1.5"),
    sets("config", "top_k", "rollout.top_k=-2"),
    sets("config", "group_size = 0", "rollout.group_size=0"),
    sets("config", "prompts_per_step = 0", "rollout.prompts_per_step=0"),
    sets("config", "max_completion_tokens = 0", "rollout.max_completion_tokens=0"),
    sets("config", "max_prompt_tokens = 0", "rollout.max_prompt_tokens=0"),
    sets("config", "unknown recipe 'grop': did you mean 'grpo'", "recipe=grop"),
    sets("config", "surrogate", 'loss.surrogate={use="clipp"}'),
    sets("config", "reduction", 'loss.reduction={use="token_men"}'),
    sets("config", "beta", 'loss.kl={use="k2", beta=-1}'),
    sets("config", "loss.kl", 'loss.kl={use="k9", beta=0.1}'),
    sets("config", "dtype", "model.dtype=float17"),
    sets("config", "checkpoint.every = -1", "checkpoint.every=-1"),
    sets("config", "checkpoint.keep = 0", "checkpoint.keep=0"),
    sets("config", "keep_best", "checkpoint.keep_best=eval/accuracyy"),
    sets("config", "eval.samples = 0", "eval.samples=0", "eval.data=task:arithmetic:test"),
    sets("config", "lora.rank = -1", "lora.rank=-1"),
    sets("config", "lora.targets", "lora.rank=2", 'lora.targets=["nothing"]'),
    sets("config", "stop_strings", "rollout.stop_strings=[1]"),
    sets("config", "segment_tokens = 0|segment_tokens", "rollout.segment_tokens=0"),
    sets("config", "slots", "rollout.slots=-3"),
    sets("config", "rewards", "rewards=[]"),
    sets("config", "rewards", "rewards=[{weight=1.0}]"),
    sets("config", "use.*arithmetc|arithmetic", 'rewards=[{use="arithmetc"}]'),
    sets("config", "run.dir", "run.dir="),
    sets("config", "run.dir = .*is a file", "run.dir={home}/run.toml"),
    sets("config", "stuck_after", "run.stuck_after=-1"),
    sets("config", "seed", "train.seed=-1"),
    sets("config", "schedule", "optimizer.schedule=cosinus"),
    sets("config", "beta = inf: expected a fin", f'loss.kl={{use="forward_kl_k3", beta={HUGE}}}'),
    sets("config", "time_limit = inf", f'rewards=[{{use="math", time_limit={HUGE}}}]'),
    Wrong("config", "not TOML", change=put("run.toml", "[model\n")),
    Wrong("config", "not TOML", change=put("run.toml", b"\xff\xfe\x00")),
    Wrong("config", "missing|required|model.path", change=put("run.toml", "")),
    Wrong("config", "not TOML.*twice", change=put("run.toml", "a = 1\na = 2\n")),
    Wrong("config", "not TOML", change=put("run.toml", "x = " + "[" * 5_000)),
    Wrong("config", "not TOML", change=put("run.toml", b"a = 1\x00")),
]

MESHES = [
    sets("mesh", "3 devices|fsdp 3", "mesh.fsdp=3"),
    sets("mesh", "mesh.data = -1: expected", "mesh.data=-1"),
    sets("mesh", "expected", "mesh.tensor=-2"),
    sets("mesh", "mesh.fsdp = .all.: expected a whole", "mesh.fsdp=all"),
    sets("mesh", 'platform = "gpu"', "mesh.platform=gpu"),
    sets("mesh", "mesh.platform = .npu.: expected", "mesh.platform=npu"),
    sets("mesh", "devices|mesh", "mesh.data=1000000"),
    sets("mesh", "unknown key|mesh", "mesh.fsdpp=2"),
]

DATA = [
    rows("rows.jsonl.*(no rows|holds none|empty)", ""),
    rows("rows.jsonl.*(no rows|holds none|empty)", "\n\n\n"),
    rows("line 1: not JSON", "{"),
    rows("line 2", '{"prompt": "1+1=", "answer": "2"}\n[1, 2]\n'),
    rows("line 1", '"text"\n'),
    rows("line 1", "null\n"),
    rows("line 1", "1e5\n"),
    rows("prompt", '{"answer": "2"}\n'),
    rows("prompt", '{"prompt": 5, "answer": "2"}\n'),
    rows("prompt", '{"prompt": null, "answer": "2"}\n'),
    rows("prompt", '{"prompt": [], "answer": "2"}\n'),
    rows("prompt", '{"prompt": [{"role": "user"}], "answer": "2"}\n'),
    rows("role|prompt", '{"prompt": [{"content": "a"}], "answer": "2"}\n'),
    rows("prompt", '{"prompt": {"a": 1}, "answer": "2"}\n'),
    rows("line 1|utf-8|UTF-8", b"\xff\xfe{\x00"),
    rows("line 1", b"\x00\x00\x00\n"),
    rows("answers|column|promptt", '{"promptt": "1+1=", "answer": "2"}\n'),
    rows("line 1.*NaN|line 1|prompt", '{"prompt": NaN, "answer": "2"}\n'),
    rows("rows.parquet", b"PAR1", "rows.parquet"),
    rows("rows.parquet", b"", "rows.parquet"),
    rows("rows.parquet", b"PAR1" + b"\xff" * 400 + b"PAR1", "rows.parquet"),
    rows("rows.csv|column|prompt", "a,b\n1,2\n", "rows.csv"),
    rows("is no file of rows; give a .jsonl", "{", "rows.json"),
    rows("rows.xlsx|rows", b"PK", "rows.xlsx"),
    sets("data", "there is no such file", "data.path={home}/absent.jsonl"),
    sets("data", "base|folder", "data.path={home}/base"),
    sets("data", "task:arithmetik|arithmetic", "data.path=task:arithmetik:train"),
    sets("data", "task|split|trian", "data.path=task:arithmetic:trian"),
    sets("data", "task", "data.path=task:"),
    sets("data", "ftp|no bucket|not", "data.path=ftp://user:secret@host/rows.jsonl"),
    sets("columns", "question|column", "data.path={home}/rows.jsonl", "data.prompt=question"),
    sets("columns", "result|column", "data.path={home}/rows.jsonl", "data.answer=result"),
    sets("columns", "longer|max_prompt_tokens", "data.path={home}/rows.jsonl",
         "rollout.max_prompt_tokens=1"),
]  # fmt: skip

TEMPLATES = [
    sets("template", "absent.jinja|no such", "data.chat_template={home}/absent.jinja"),
    template("t.jinja", "{% for m in messages %}{{ m.content }"),
    template("t.jinja", "{% endfor %}"),
    template("t.jinja|template", "{{ messages[5].content }}"),
    template("t.jinja|template", "{{ raise_exception('no system prompt') }}"),
    template("t.jinja|template", "{{ ''.__class__.__mro__ }}"),
    template("t.jinja|template", "{% for a in range(10**9) %}{% endfor %}"),
    template("t.jinja|template", "{{ 'x' * 3000000000 }}"),
    template("t.jinja|template", "{% include 'other' %}"),
]

MODELS = [
    Wrong("model", "config.json", change=gone("base/config.json")),
    Wrong("model", "config.json", change=put("base/config.json", "{")),
    Wrong("model", "config.json", change=put("base/config.json", "[]")),
    Wrong("model", "model_type", change=put("base/config.json", "{}")),
    Wrong("model", "config.json", change=put("base/config.json", b"\xff\xff")),
    Wrong("model", "num_hidden_layers", change=fields("config.json", num_hidden_layers=10**7)),
    Wrong("model", "rope_theta", change=fields("config.json", rope_theta=HUGE)),
    Wrong("model", "rms_norm_eps", change=fields("config.json", rms_norm_eps=HUGE)),
    Wrong("model", "vocab_size", change=fields("config.json", vocab_size=10**12)),
    Wrong("model", "does not fit its devices", change=fields("config.json", hidden_size=10**9)),
    sets("model", "absent", "model.path={home}/absent"),
    sets("model", "run.toml", "model.path={home}/run.toml"),
    Wrong("tokenizer", "tokenizer", change=gone("base/tokenizer.json")),
    Wrong("tokenizer", "tokenizer", change=put("base/tokenizer.json", "{")),
    Wrong("tokenizer", "tokenizer", change=put("base/tokenizer.json", "{}")),
    Wrong("tokenizer", "tokenizer", change=put("base/tokenizer.json", b"\xff\xfe\xfd")),
    Wrong("tokenizer", "tokenizer_config", change=put("base/tokenizer_config.json", "{")),
    Wrong("tokenizer", "tokenizer", change=cut("base/tokenizer.json", 500)),
    Wrong("weights", "model.safetensors", change=gone("base/model.safetensors")),
    Wrong("weights", "model.safetensors", change=put("base/model.safetensors", b"")),
    Wrong("weights", "model.safetensors", change=put("base/model.safetensors", b"\x80\x04.")),
    Wrong("weights", "model.safetensors", change=cut("base/model.safetensors", 7)),
    Wrong("weights", "model.safetensors", change=cut("base/model.safetensors", 200)),
    Wrong("weights", "model.safetensors", change=cut("base/model.safetensors", -1)),
    Wrong("weights", "model.safetensors", change=header(1 << 62)),
    Wrong("weights", "model.safetensors", change=header(10**12)),
    Wrong("weights", "model.safetensors|missing", change=header(2)),
    Wrong("weights", "model.safetensors", change=header(3, b"[1]")),
    Wrong("weights", "missing", change=tensors(lambda t: t.pop("model.norm.weight"))),
    Wrong("weights", "unknown", change=tensors(lambda t: t.update(extra=np.zeros(3)))),
    Wrong("weights", "shape", change=tensors(
        lambda t: t.update({"model.norm.weight": np.zeros(7, np.float32)}))),
    Wrong("weights", "not finite", change=tensors(lambda t: t["model.norm.weight"].fill(np.nan))),
    Wrong("weights", "not finite", change=tensors(lambda t: t["model.norm.weight"].fill(np.inf))),
    Wrong("weights", "I8|int8", change=tensors(
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(np.int8)}))),
]  # fmt: skip

ADAPTERS = [
    sets("adapter", "absent|lora.path", "lora.path={home}/absent"),
    sets("adapter", "adapter_config|adapter", "lora.path={home}/base"),
    sets("adapter", "adapter_config", "lora.path={home}",
         change=put("adapter_config.json", "{")),
    sets("adapter", "adapter_config", "lora.path={home}",
         change=put("adapter_config.json", "[]")),
    sets("adapter", "peft_type|adapter", "lora.path={home}",
         change=put("adapter_config.json", '{"peft_type": "IA3"}')),
]  # fmt: skip

GGUFS = [
    says("absent", "import", "{home}/absent.gguf", "{home}/out", kind="GGUF"),
    gguf("model.gguf", b""),
    gguf("model.gguf", b"GGUF"),
    gguf("model.gguf", b"GGML" + b"\0" * 60),
    gguf("model.gguf", MAGIC),
    gguf("model.gguf", b"GGUF" + struct.pack("<IQQ", 1, 0, 0)),
    gguf("model.gguf", b"GGUF" + struct.pack("<IQQ", 99, 0, 0)),
    gguf("model.gguf", b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60)),
    gguf("model.gguf", MAGIC + struct.pack("<Q", 1 << 62)),
    gguf("model.gguf", MAGIC + b"\xff" * 100),
    gguf("model.gguf", MAGIC + struct.pack("<Q", 3) + b"abc" + struct.pack("<I", 77)),
    gguf("model.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 0)),
]

REWARDS = [
    Wrong("reward", "mine.py", change=gone("mine.py")),
    reward("mine.py.*digits|no 'digits'", "x = 1\n"),
    reward("mine.py", "def digits(:\n"),
    reward("mine.py", "1 / 0\n"),
    reward("mine.py", "import sys\nsys.exit(0)\n"),
    reward("mine.py", "import no_such_module\n"),
    reward("digits", "digits = 5\n"),
    reward("digits", "def digits(scores):\n    return scores\n"),
    reward("digits", "def digits(completions, no_column):\n    return [0.0]\n"),
    reward("digits", DEFINES + "return 'right'\n"),
    reward("digits", DEFINES + "return [0.0] * (1 + len(completions))\n"),
    reward("digits", DEFINES + "return [[1.0]] * len(completions)\n"),
    reward("digits", DEFINES + "return None\n"),
    reward("digits", DEFINES + "return ['1'] * len(completions)\n"),
    reward("digits", DEFINES + "raise ValueError('no grader')\n"),
    reward("digits", DEFINES + "return [10**400] * len(completions)\n"),
    reward("digits", DEFINES + "return [1e30] * len(completions)\n"),
    reward("digits", DEFINES + "return {'a': 1.0}\n"),
    reward("digits", DEFINES + "return [1j] * len(completions)\n"),
    reward("digits", DEFINES + "exit()\n"),
]

VARIABLES = [
    variables("JAX_PROCESS_ID is not: set all three", JAX_NUM_PROCESSES="2"),
    variables("whole numbers", **JOB | {"JAX_NUM_PROCESSES": "two"}),
    variables("whole numbers", **JOB | {"JAX_PROCESS_ID": "2"}),
    variables("whole numbers", **JOB | {"JAX_PROCESS_ID": "-1"}),
    variables("HOST:PORT", **JOB | {"JAX_COORDINATOR_ADDRESS": "nowhere"}),
]

WRONG: dict[str, Wrong] = {
    f"{wrong.kind} {number}": wrong
    for group in (
        *(COMMANDS, CONFIGS, MESHES, DATA, TEMPLATES, MODELS, ADAPTERS, GGUFS, REWARDS, VARIABLES),
    )
    for number, wrong in enumerate(group)
}
