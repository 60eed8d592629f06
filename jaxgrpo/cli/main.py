"""The commands: `jaxgrpo ...`, also `python -m jaxgrpo ...`.

Each command imports what it needs when it runs, so that --help and a wrong option answer at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jaxgrpo

TARGET: dict[str, Any] = {
    "metavar": "MODEL|RUN|CONFIG",
    "help": "a model folder, a run folder, or a config whose model is meant",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code (runtime.EXIT_CODES)."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the help, the version or the mistake
        return int(stop.code or 0)
    from jaxgrpo.training import process

    return process.guard(lambda: arguments.command(arguments))


def run() -> None:
    """The console script."""
    sys.exit(main())


def _quickstart(arguments: argparse.Namespace) -> int | None:
    from jaxgrpo.cli import start as quickstart

    return quickstart.quickstart(overrides=arguments.set)


def _train(arguments: argparse.Namespace) -> int | None:
    from jaxgrpo.config import files
    from jaxgrpo.training import loop, setup

    read = files.load(arguments.config, arguments.set)
    if arguments.dry_run:
        setup.dry_run(read)
    else:
        loop.train(read, resume=arguments.resume)
    return 0


def _make_base(arguments: argparse.Namespace) -> int | None:
    from rich.console import Console

    from jaxgrpo.cli import start as quickstart
    from jaxgrpo.training import process

    console = Console(highlight=False)
    console.print(process.start())
    options = {name: getattr(arguments, name) for name in ("seed", "steps", "hidden_size")}
    given = {name: value for name, value in options.items() if value is not None}
    quickstart.make_base(console, arguments.out, arguments.task, **given)
    return 0


def _eval(arguments: argparse.Namespace) -> int | None:
    from jaxgrpo.cli import inference

    return inference.evaluate(
        arguments.target,
        data=arguments.data,
        scorer=arguments.scorer,
        samples=arguments.num_samples,
        prompts=arguments.num_prompts,
        rows_out=arguments.samples,
        json_out=arguments.json,
        base=arguments.base,
        overrides=arguments.set,
    )


def _probe(arguments: argparse.Namespace) -> int | None:
    from jaxgrpo.experiments.probe import command

    given = {name: getattr(arguments, name) for name in ("data", "reward", "samples", "level")}
    return command.main(
        arguments.target,
        **{name: value for name, value in given.items() if value is not None},
        prompts=arguments.num_prompts,
        json_out=arguments.json,
        html_out=arguments.html,
        overrides=arguments.set,
    )


def _sample(arguments: argparse.Namespace) -> int | None:
    from jaxgrpo.cli import inference

    return inference.write_samples(
        arguments.target,
        arguments.prompts,
        arguments.out,
        samples=arguments.num_samples,
        temperature=arguments.temperature,
        overrides=arguments.set,
    )


def _export(arguments: argparse.Namespace) -> int | None:
    from jaxgrpo.training import export as exporting
    from jaxgrpo.training import process

    print(process.start())  # noqa: T201
    out = exporting.export(arguments.run, arguments.out, arguments.step, arguments.dtype)
    print(f"{out}: model, tokenizer, generation config and model card")  # noqa: T201
    return 0


def _init(arguments: argparse.Namespace) -> int | None:
    from jaxgrpo.cli import start

    return start.init(arguments.dir)


def _report(arguments: argparse.Namespace) -> int | None:
    from jaxgrpo.training import report as reports

    return reports.report(arguments.run, text=arguments.text)


def _advantages(arguments: argparse.Namespace) -> int | None:
    from jaxgrpo.cli import advantages

    given = (arguments.rewards, arguments.option, arguments.field, arguments.lengths)
    return advantages.main(arguments.name, *given, as_json=arguments.json)


def _compare(arguments: argparse.Namespace) -> int | None:
    from jaxgrpo.experiments import compare as comparing

    return comparing.compare(arguments.experiment, dry_run=arguments.dry_run)


def _doctor(arguments: argparse.Namespace) -> int | None:
    from jaxgrpo.cli import doctor

    return doctor.main()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxgrpo",
        description="Group-relative reinforcement learning of language models in JAX.",
        epilog="exit codes: 0 done, 1 crashed, 2 wrong input, 130 or 143 stopped by a signal",
    )
    parser.add_argument("--version", action="version", version=f"jaxgrpo {jaxgrpo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    quickstart = commands.add_parser(
        "quickstart", help="make a small base model, train it with GRPO, evaluate both"
    )
    _add_set(quickstart)
    quickstart.set_defaults(command=_quickstart)

    train = commands.add_parser("train", help="train as a config says")
    train.add_argument("config", metavar="CONFIG", help="a TOML file, or a shipped config's name")
    train.add_argument(
        "--resume", choices=["auto"], help="go on where the run stopped, or start it"
    )
    train.add_argument(
        "--dry-run", action="store_true", help="show what would be run, without training"
    )
    _add_set(train)
    train.set_defaults(command=_train)

    _add_probe(commands)
    _add_inference(commands)
    _add_runs(commands)
    _add_compare(commands)
    _add_advantages(commands)
    _add_set_up(commands)
    return parser


def _add_compare(commands: argparse._SubParsersAction) -> None:
    compare = commands.add_parser(
        "compare", help="settle which arm is better: arms x learning rates x seeds from one base"
    )
    compare.add_argument(
        "experiment", metavar="EXPERIMENT", help="a TOML file, or a shipped experiment's name"
    )
    compare.add_argument(
        "--dry-run",
        action="store_true",
        help="check the file and all configs and show the plan, without a run",
    )
    compare.set_defaults(command=_compare)


def _add_advantages(commands: argparse._SubParsersAction) -> None:
    shown = commands.add_parser(
        "advantages", help="list recipes and parts, or show what one does step by step"
    )
    shown.add_argument("name", nargs="?", metavar="NAME|FILE.py:FUNCTION")
    for option, metavar, text in (
        ("--rewards", "[NAME=]R,R,...", "a group of rewards, nan: not scored; again for more"),
        ("--option", "KEY=VALUE", "of the recipe or part, as --option ddof=0"),
        ("--field", "NAME=VALUE", "what it reads beside rewards: truncated=0,0,0,1, or JSON"),
        ("--lengths", "N,N,...", "tokens of each sample, for what acts on tokens"),
    ):
        shown.add_argument(
            option, nargs="+", action="extend", default=[], metavar=metavar, help=text
        )
    shown.add_argument("--json", action="store_true", help="print it as JSON")
    shown.set_defaults(command=_advantages)


def _add_set_up(commands: argparse._SubParsersAction) -> None:
    init = commands.add_parser(
        "init", help="write a run.toml and a reward.py that train as they are"
    )
    init.add_argument("dir", nargs="?", default=".", metavar="DIR")
    init.set_defaults(command=_init)

    base = commands.add_parser("make-base", help="make a small base model for a built-in task")
    base.add_argument("task", metavar="TASK", help="the task, as arithmetic")
    base.add_argument("out", metavar="OUT", help="the folder to write")
    base.add_argument("--seed", type=int, metavar="N")
    base.add_argument("--steps", type=int, metavar="N", help="steps of the warm start")
    base.add_argument("--hidden-size", type=int, metavar="N")
    base.set_defaults(command=_make_base)

    doctor = commands.add_parser("doctor", help="show versions, devices, memory and disk")
    doctor.set_defaults(command=_doctor)


def _add_runs(commands: argparse._SubParsersAction) -> None:
    report = commands.add_parser("report", help="write RUN/report.html anew, or print a summary")
    report.add_argument("run", metavar="RUN", help="a run folder, of a run at any stage")
    report.add_argument("--text", action="store_true", help="print it instead")
    report.set_defaults(command=_report)

    export = commands.add_parser("export", help="write a step of a run as a Hugging Face folder")
    export.add_argument("run", metavar="RUN", help="a run folder")
    export.add_argument("out", metavar="OUT", help="the folder to write")
    export.add_argument("--step", default="last", help="last, best, or a number of steps")
    export.add_argument("--dtype", choices=["float32", "bfloat16"])
    export.set_defaults(command=_export)


def _add_probe(commands: argparse._SubParsersAction) -> None:
    probe = commands.add_parser(
        "probe", help="before training: would groups of samples carry signal?"
    )
    probe.add_argument("target", **TARGET)
    probe.add_argument("--data", help="as data.path; by default that of the run or config")
    probe.add_argument("--reward", help="judges success; by default the first of the run or config")
    probe.add_argument("-n", "--samples", type=int, metavar="N", help="per prompt, 16 by default")
    probe.add_argument("--num-prompts", type=int, metavar="N", help="of the data; all by default")
    probe.add_argument("--level", type=float, metavar="L", help="of intervals, 0.99 by default")
    probe.add_argument("--json", metavar="OUT", help="write the numbers")
    probe.add_argument("--html", metavar="OUT", help="write a page with plots")
    _add_set(probe)
    probe.set_defaults(command=_probe)


def _add_inference(commands: argparse._SubParsersAction) -> None:
    evaluate = commands.add_parser("eval", help="greedy accuracy, pass@k and majority votes")
    evaluate.add_argument("target", **TARGET)
    evaluate.add_argument("--data", help="as data.path; of a run: its eval.data by default")
    evaluate.add_argument("--scorer", help="a reward that judges success; of a run: its own")
    evaluate.add_argument("-n", "--num-samples", type=int, metavar="N", help="per prompt")
    evaluate.add_argument(
        "--num-prompts", type=int, metavar="N", help="of the data; all by default"
    )
    evaluate.add_argument(
        "--base", metavar="MODEL", help="measure the KL to this model; of a run: eval.kl_to_base"
    )
    evaluate.add_argument("--samples", metavar="OUT.jsonl", help="write every sample")
    evaluate.add_argument("--json", metavar="OUT", help="write the numbers")
    _add_set(evaluate)
    evaluate.set_defaults(command=_eval)

    sample = commands.add_parser("sample", help="sample completions for a file of prompts")
    sample.add_argument("target", **TARGET)
    sample.add_argument("--prompts", required=True, metavar="FILE", help="as data.path, or .txt")
    sample.add_argument("--out", required=True, metavar="OUT.jsonl")
    sample.add_argument("-n", "--num-samples", type=int, default=1, metavar="N", help="per prompt")
    sample.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token")
    _add_set(sample)
    sample.set_defaults(command=_sample)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="replace keys of the config, as --set train.steps=20 optimizer.learning_rate=1e-4",
    )
