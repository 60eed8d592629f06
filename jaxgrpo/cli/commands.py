"""What commands are called, what they take and which function each calls.

The function is imported when its command runs, so that --help and a wrong option answer at once. It
gets each argument under its name, or its `dest`; an option that is not given is left to its default
there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

Argument = tuple[list[str], dict[str, Any]]
"""What `add_argument` gets: flags and options."""


def argument(
    flags: str, metavar: str | None = None, text: str | None = None, **more: Any
) -> Argument:
    """An argument by its position ("out") or an option ("-n --samples")."""
    return flags.split(), {"metavar": metavar, "help": text, **more}


def output(flags: str, metavar: str, text: str, **more: Any) -> Argument:
    """A file to write. A shell leaves the ~ of --out=~/x.jsonl as it is."""
    return argument(flags, metavar, text, type=os.path.expanduser, **more)


def switch(flag: str, text: str, **more: Any) -> Argument:
    return [flag], {"action": "store_true", "help": text, **more}


def several(flag: str, metavar: str, text: str, **more: Any) -> Argument:
    """An option that takes one value or more, and may be given again for more."""
    return argument(flag, metavar, text, nargs="+", action="extend", **more)


def samples(default: str, read: Callable[[str], int] = int) -> Argument:
    """How many per prompt: one option in every command. --num-samples is its older name."""
    flags = "-n --samples --num-samples"
    return argument(flags, "N", f"per prompt, {default}", type=read, dest="samples")


def prompts(default: str) -> Argument:
    """How many of the data are asked."""
    return argument("--num-prompts", "N", f"of the data; {default}", type=int, dest="prompts")


def _count(text: str) -> int:
    """Of `eval`, whose answers are samples too."""
    try:
        return int(text)
    except ValueError:
        problem = f"{text!r} is no whole number; to write answers to a file: --answers FILE"
        raise argparse.ArgumentTypeError(problem) from None


TARGET = argument(
    "target",
    "MODEL|RUN|CONFIG",
    "a model folder or owner/name, a run folder, or a config: a TOML file or a shipped one's name",
)
SET = several(
    "--set",
    "KEY=VALUE",
    "replace keys of the config, as --set train.steps=20 optimizer.learning_rate=1e-4",
    dest="overrides",
)

JSON = switch("--json", "print one JSON document instead; notes go to stderr", dest="as_json")

DRAWING = (
    argument("--top-k", "K", "draw from the K likeliest tokens, as rollout.top_k", type=int),
    argument("--top-p", "P", "draw from a nucleus of probability P, as rollout.top_p", type=float),
    argument("--max-tokens", "N", "of a completion, as rollout.max_completion_tokens", type=int),
)
"""How a model is drawn from."""

SHELLS = ["bash", "zsh", "fish"]

RESUME = argument(
    "--resume",
    None,
    "go on where the run stopped, or start it; without this a run folder that exists is refused",
    choices=["auto"],
)

JOINING = ("train", "replay", "sft", "probe", "eval", "sample", "compare", "doctor")
"""Commands of which several processes may run as one."""

JOIN = {
    "--coordinator": ("JAX_COORDINATOR_ADDRESS", "HOST:PORT", "where process 0 listens"),
    "--num-processes": ("JAX_NUM_PROCESSES", "N", "how many the run has"),
    "--process-id": ("JAX_PROCESS_ID", "I", "the number of this process, from 0"),
}
"""Option -> the variable that it stands for, its value and what it says."""

COMMANDS: dict[str, tuple[Any, ...]] = {
    "quickstart": (
        "make a small base model, train it with GRPO, evaluate both",
        "jaxgrpo.cli.start:quickstart",
        argument("--family", "NAME", "of the model, as llama; its base and run have own folders"),
        JSON,
        SET,
    ),
    "init": (
        "write a run.toml, a reward.py and all else that training takes, to begin with",
        "jaxgrpo.cli.init:init",
        argument("folder", "DIR", "the folder to write into, . by default", nargs="?"),
        argument("--model", "MODEL", "a folder or owner/name; by default a small new base"),
    ),
    "make-base": (
        "make a small base model for a built-in task",
        "jaxgrpo.cli.start:make_base",
        argument("task", "TASK", "the task, as arithmetic"),
        argument("out", "OUT", "the folder to write"),
        argument("--family", "NAME", "of the model, as gemma3_text; qwen3 by default"),
        argument("--seed", "N", "of weights and draws, 0 by default", type=int),
        argument("--steps", "N", "of the warm start; by default the task's, 800 or more", type=int),
        argument("--hidden-size", "N", "64 by default", type=int),
    ),
    "train": (
        "train as a config says",
        "jaxgrpo.cli.start:train",
        argument("config", "CONFIG", "a TOML file, or a shipped config's name"),
        RESUME,
        switch("--dry-run", "check everything, call every reward and show the plan; train nothing"),
        switch("--profile", "trace the second step into RUN/profile: TensorBoard, Perfetto"),
        SET,
    ),
    "plan": (
        "whether a config fits on chips that are not here, and how fast it can be",
        "jaxgrpo.planning.command:main",
        argument("config", "CONFIG", "a TOML file, or a shipped config's name"),
        argument(
            "--topology",
            "CHIP:SIZES",
            "as v5e:4x4, v6e:16x16, v5p:4x4x4, h100:8x8 (hosts x GPUs); by default plan.topology",
        ),
        argument("--slices", "N", "slices of that topology, 1 by default", type=int),
        switch("--formula", "compile nothing: what the formulas say, in seconds"),
        switch("--search", "compile the fastest meshes, too"),
        JSON,
        argument("--dump", "DIR", "write the text of the compiled programs"),
        SET,
    ),
    "launch": (
        "run a command in several processes of this machine, as a cluster would",
        "jaxgrpo.cli.launch:main",
        argument("--processes", "N", "2 by default", type=int),
        argument(
            "--devices-per-process",
            "M",
            "CPU devices or GPUs of each; one by default",
            type=int,
            dest="devices",
        ),
        argument("command", "COMMAND ...", "as train CONFIG", nargs=argparse.REMAINDER),
    ),
    "replay": (
        "train on rollouts that were saved, without sampling or rewarding",
        "jaxgrpo.cli.start:replay",
        argument("files", "FILE", "files of rollouts, one per step, in turn", nargs="+"),
        argument("--config", None, "as for train; by default that of the run that wrote the files"),
        RESUME,
        SET,
    ),
    "sft": (
        "a supervised warm start: train on the reference answers of the data",
        "jaxgrpo.experiments.sft:main",
        argument("config", "CONFIG", "as for train; its rewards, method and [eval] are not read"),
        RESUME,
        switch("--dry-run", "show the plan, the first prompt and its answer; train nothing"),
        SET,
    ),
    "probe": (
        "before training: would groups of samples carry signal?",
        "jaxgrpo.experiments.probe.command:main",
        TARGET,
        argument("--data", None, "as data.path; by default that of the run or config"),
        argument("--reward", None, "judges success; by default the first of the run or config"),
        samples("16 by default"),
        prompts("all by default"),
        argument("--level", "L", "of intervals, 0.99 by default", type=float),
        argument(
            "--methods",
            "A,B,…",
            "instead: how alike the updates of methods are, as grpo,sign,loss.surrogate=gspo",
        ),
        JSON,
        output("--html", "OUT", "write a page with plots", dest="html_out"),
        SET,
    ),
    "eval": (
        "greedy accuracy, pass@k and majority votes",
        "jaxgrpo.cli.inference:print_evaluation",
        TARGET,
        argument("--data", None, "as data.path; of a run: its eval.data by default"),
        argument("--scorer", None, "a reward that judges success; else that of the run or config"),
        samples("by default eval.samples of the run or config, 16 of a model folder", _count),
        prompts("by default eval.prompts of the run or config, else all"),
        argument("--base", "MODEL", "measure the KL to this model; of a run: as eval.kl_to_base"),
        output(
            "--answers",
            "OUT.jsonl",
            "write every answer: the greedy one of each prompt, then its samples",
        ),
        JSON,
        SET,
    ),
    "sample": (
        "sample completions for a file of prompts; continues where it was interrupted",
        "jaxgrpo.cli.sampling:write_samples",
        TARGET,
        argument("--prompts", "FILE", "as data.path, or .txt", required=True),
        output("--out", "OUT.jsonl", "a line for each sample", required=True),
        samples("1 by default"),
        argument(
            "--temperature", None, "as rollout.temperature; 0: the likeliest token", type=float
        ),
        *DRAWING,
        switch("--overwrite", "start again; by default sampling continues where OUT.jsonl ends"),
        SET,
    ),
    "serve": (
        "answer OpenAI's and vLLM's requests for a model over HTTP, on this machine alone",
        "jaxgrpo.cli.serve:serve",
        TARGET,
        argument("--host", None, "127.0.0.1 by default; 0.0.0.0: other machines may ask too"),
        argument("--port", "N", "8000 by default; 0: a free one", type=int),
        argument("--name", None, "of the model in requests; by default its folder's"),
        argument("--temperature", None, "of all samples, as rollout.temperature", type=float),
        *DRAWING,
        SET,
    ),
    "model": (
        "show what a model is, what it takes of each device and what can be done with it",
        "jaxgrpo.cli.model:main",
        TARGET,
        argument("--dtype", None, "as model.dtype", choices=["float32", "bfloat16"]),
        argument("--revision", None, "of the hub, as model.revision"),
        argument("--family", "FILE.py:NAME", "a family of your own, as model.family"),
        argument("--ignore", "FIELD", "of config.json, as in model.ignore", action="append"),
        switch("--text-only", "the text part alone, as model.text_only"),
        JSON,
        SET,
    ),
    "import": (
        "write a Hugging Face folder from a model in a GGUF file",
        "jaxgrpo.cli.importing:main",
        argument("file", "FILE.gguf", "of llama, qwen2, qwen3 or gemma3; of a split one any part"),
        argument("out", "OUT", "the folder to write"),
        switch("--overwrite", "replace a model there that was not imported"),
        JSON,
    ),
    "report": (
        "write RUN/report.html again, or print a summary",
        "jaxgrpo.training.records.report.html:report",
        argument("run", "RUN", "a run folder, of a run at any stage"),
        switch("--text", "print it instead"),
        JSON,
    ),
    "samples": (
        "show samples of a step of a run, whole, with their rewards, advantages and lengths",
        "jaxgrpo.cli.samples:show_samples",
        argument("run", "RUN", "a run folder, of a run at any stage"),
        argument(
            "--step", "N", "that has samples (run.samples_every); by default the last", type=int
        ),
        argument("--sort", None, "the highest first", choices=["reward", "length", "advantage"]),
        switch("--ascending", "the lowest first"),
        argument("--contains", "TEXT", "only those with it in their prompt or completion"),
        argument("--limit", "N", "how many to show, 10 by default", type=int),
        JSON,
    ),
    "rescore": (
        "judge the saved samples of a run again, by other rewards and without its model",
        "jaxgrpo.cli.rescore:rescore",
        argument("run", "RUN", "a run folder, of a run at any stage"),
        several(
            "--rewards",
            "NAME",
            "of the run, built in, or file.py:function; several: their weighted sum too",
            required=True,
        ),
        argument("--step", "N", "that has samples; by default each that has some", type=int),
        output("--out", "OUT.jsonl", "write a line for each sample, with both judgements"),
        JSON,
        SET,
    ),
    "diff": (
        "show two runs side by side: in what their configs differ, and their metrics",
        "jaxgrpo.cli.diff:diff",
        argument("runs", "RUN", "run folders, of runs at any stage", nargs=2),
        output("--out", "FILE", "draw the curves of both over each other: .html or .png"),
        JSON,
    ),
    "fit": (
        "fit a run's curve over its compute, and predict its second half",
        "jaxgrpo.experiments.fit:main",
        argument("runs", "RUN", "run folders", nargs="+"),
        argument("--metric", "NAME", "of metrics.jsonl; eval/accuracy by default"),
        switch("--half", "fit the first half of the compute too, and compare with the rest"),
        argument("--skip", "N", "steps to leave out at the beginning, 0 by default", type=int),
        argument("--highest", "X", "what the metric cannot exceed, 1.0 by default", type=float),
        JSON,
    ),
    "methods": (
        "list what a config can name: recipes, parts, losses, rewards, prompt policies, scores",
        "jaxgrpo.cli.methods:main",
        JSON,
    ),
    "export": (
        "write a step of a run as a Hugging Face folder",
        "jaxgrpo.cli.inference:export",
        argument("run", "RUN", "a run folder"),
        argument("out", "OUT", "the folder to write"),
        argument("--step", None, "last, best, or a number of steps; last by default"),
        argument("--dtype", None, "as trained by default", choices=["float32", "bfloat16"]),
        switch("--overwrite", "replace a model there that jaxgrpo did not write"),
    ),
    "compare": (
        "which method is better: arms x learning rates x seeds from one base",
        "jaxgrpo.experiments.compare:compare",
        argument("path", "EXPERIMENT", "a TOML file, or a shipped experiment's name"),
        switch("--dry-run", "check the file, configs and own losses, and show the plan"),
        JSON,
    ),
    "plasticity": (
        "how well a trained model still learns: a config trained from it and from its base",
        "jaxgrpo.experiments.plasticity:main",
        argument("trained", "A", "a run folder, or a model folder whose base is B's model.path"),
        argument("task", "B", "a TOML file, or a shipped config's name"),
        argument("--seeds", "N", "5 by default", type=int),
        argument("--metric", "NAME", "of metrics.jsonl; reward by default"),
        argument("--dir", "DIR", "for the runs; B's run.dir-plasticity by default", dest="folder"),
        JSON,
        SET,
    ),
    "advantages": (
        "list recipes and parts, or show what one does step by step",
        "jaxgrpo.cli.advantages:main",
        argument("name", "NAME|FILE.py:FUNCTION", nargs="?"),
        several(
            "--rewards", "[NAME=]R,R,...", "a group of rewards, nan: not scored; again for more"
        ),
        several(
            "--option", "KEY=VALUE", "of the recipe or part, as --option ddof=0", dest="options"
        ),
        several(
            "--field",
            "NAME=VALUE",
            "what it reads beside rewards: truncated=0,0,0,1, or JSON",
            dest="fields",
        ),
        several("--lengths", "N,N,...", "tokens of each sample, for what acts on tokens"),
        JSON,
    ),
    "losses": (
        "list surrogates, penalties and reductions, or show the loss and gradient of one",
        "jaxgrpo.cli.losses:main",
        argument("name", "NAME|FILE.py:FUNCTION", nargs="?"),
        argument(
            "--ratio", "R,R,...", "of the policy to the one that sampled; 0.5 to 6", dest="ratios"
        ),
        argument("--advantage", "A,A,...", "1,-1 by default", dest="advantages"),
        several("--option", "KEY=VALUE", "of the part, as --option high=0.28", dest="options"),
        several("--field", "NAME=VALUE", "what it reads: reference_logp=-0.5", dest="fields"),
        switch("--one-sequence", "the ratios are of the tokens of one sequence"),
        JSON,
    ),
    "check": (
        "what a method climbs: its exact expected update on small games, and the laws it breaks",
        "jaxgrpo.experiments.check.command:main",
        argument("method", "METHOD", "a recipe, a surrogate, a config, or FILE.py:FUNCTION"),
        output("--figure", "OUT", "draw it: .png or .svg"),
        output(
            "--json",
            "OUT",
            "write one JSON document; without OUT print it instead",
            dest="as_json",
            nargs="?",
            const=True,
        ),
    ),
    "completion": (
        "print a script that makes a shell complete commands, options and keys",
        "jaxgrpo.cli.completion:completion",
        argument("shell", "|".join(SHELLS), "which sources the script", choices=SHELLS),
    ),
    "doctor": (
        "show versions, devices, memory, disk and what is missing, for a bug report",
        "jaxgrpo.cli.doctor:main",
        JSON,
    ),
}
"""name -> what it does, "package.module:function", and its arguments."""


def list_flags(name: str) -> list[str]:
    """The options of a command.

    >>> list_flags("doctor")[-2:]
    ['--process-id', '--help']
    """
    _, _, *arguments = COMMANDS[name]
    flags = [flag for words, _ in arguments for flag in words if flag.startswith("-")]
    return [*flags, *(JOIN if name in JOINING else ()), "--help"]
