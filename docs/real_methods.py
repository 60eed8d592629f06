"""Computes the tables and the figure of docs/real-model.md that compare methods.

    python -m docs.real_methods [GSM8K]     (make real-methods)

Needs the base of `make real-model` in runs/smollm2. Makes the 37 runs of the experiments
smollm2_methods, smollm2_lora and smollm2_kl, asks their models what they forgot, and probes four
kinds of prompts: about two hours on two busy cores. Finished runs are not repeated. GSM8K is a
.jsonl file, or a data set of the hub; "openai/gsm8k" without it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxgrpo
from docs.experiments import common
from docs.experiments.trained import Compared, total_cost
from docs.real_model import BASE
from jaxgrpo.experiments import compare
from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.experiments.compare import report, results
from jaxgrpo.experiments.compare.results import Outcome
from jaxgrpo.models.hf.folders import read_tokenizer
from jaxgrpo.models.sequences import token_is_likeliest

PAGE = Path(__file__).resolve().parent / "real-model.md"
QUESTIONS = PAGE.with_name("general_questions.jsonl")
FRANCE = "What is the capital of France?"
METHODS, LORA, KL = "smollm2_methods", "smollm2_lora", "smollm2_kl"


def main(gsm8k: str = "openai/gsm8k") -> int:
    """Writes page and figure. Exit code 1 if a check of `checks` fails."""
    if not (BASE / "config.json").exists():
        sys.exit(f"{BASE} holds no model: run `make real-model` first")
    compared = {name: compare_runs(name) for name in (METHODS, LORA, KL)}
    parts = {
        "methods": methods_table(compared[METHODS]),
        "rates": rates_table(compared[METHODS]),
        "answer": "\n\n".join(report.sections(*compared[METHODS])[0].text),
        "lora": lora_table(compared[METHODS], compared[LORA]),
        "kl": kl_table(compared[KL]),
        "probe": probe_table(gsm8k),
        "cost": cost(compared),
    }
    PAGE.write_text(common.fill(PAGE.read_text(), parts, PAGE.name))
    draw(compared, PAGE.with_suffix(".png"))
    return common.say(checks(compared))


def compare_runs(name: str) -> Compared:
    """The comparison of a shipped experiment; its runs are made where they are missing."""
    compare.compare(name)
    experiment = experiments.load(name)
    cases = experiments.make_cases(experiment)
    return Compared(
        experiment,
        results.read_all([case for case in cases if (case.path / "summary.json").exists()]),
    )


def methods_table(compared: Compared) -> str:
    """Each method at its best rate, means over the judged seeds."""
    rows = []
    for arm, runs in report.best_runs(*compared).items():
        live = np.mean([run.curves["live_groups"] for run in runs], axis=0)
        rows.append([
            f"`{arm}`", f"{runs[0].case.rate:g}", *_scores(runs), f"{live[0]:.2f} → {live[-1]:.2f}",
        ])  # fmt: skip
    header = ["method", "rate", "pass@1, lowest to highest seed", "pass@4", "greedy", "live groups"]
    return common.table(header, [_base_row(compared), *rows])


def rates_table(compared: Compared) -> str:
    """pass@1 at each rate, of the tuning seed."""
    experiment, outcomes = compared
    rows = []
    for arm in experiment.arms:
        values = results.arm_values(
            experiment, outcomes, arm, experiment.metric, experiment.tuning_seeds
        )
        rows.append([f"`{arm}`", *(f"{value:.3f}" for value in values.mean(1))])
    return common.table(["method", *(f"{rate:g}" for rate in experiment.learning_rates)], rows)


def lora_table(full: Compared, adapted: Compared) -> str:
    """Adapters beside all weights: the methods and the seeds that both experiments have."""
    arms, seeds = adapted.experiment.arms, adapted.experiment.seeds
    rows = []
    for trained, compared in (("all weights", full), ("adapters, rank 16", adapted)):
        best = report.best_runs(*compared)
        for arm in arms:
            runs = [run for run in best[arm] if run.case.seed in seeds]
            rows.append([f"`{arm}`", trained, f"{runs[0].case.rate:g}", *_scores(runs)])
    return common.table(["method", "trained", "rate", "pass@1", "pass@4", "greedy"], rows)


def kl_table(compared: Compared) -> str:
    """What the penalty costs on the task, and what it saves of 30 general questions."""
    experiment, outcomes = compared
    base = recall(BASE)
    rows = [["base", _base_row(compared)[2], "0", *_recall_cells([base]), base.france]]
    for arm in experiment.arms:
        (rate,) = experiment.rates(arm)
        runs = [outcomes[arm, rate][seed] for seed in experiment.seeds]
        recalled = [recall(run.case.path / "model") for run in runs]
        kl = np.mean([run.numbers["eval/kl_to_base"] for run in runs])
        penalty = runs[0].case.config.loss.kl
        beta = penalty["beta"] if penalty else 0
        cells = [_spread([run.numbers["eval/pass@1"] for run in runs]), f"{kl:.2f}"]
        rows.append([f"{beta:g}", *cells, *_recall_cells(recalled), recalled[0].france])
    header = ["beta", "pass@1", "KL to the base", "nats per answer", "likeliest of 30", FRANCE]
    return common.table(header, rows)


class Recall(NamedTuple):
    """What a model makes of the general questions."""

    nats: float  # -log p of a right answer, mean over questions
    likeliest: int  # right answers whose tokens are all the likeliest ones
    france: str


def recall(folder: Path) -> Recall:
    """How likely a model finds right answers to the questions of general_questions.jsonl."""
    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    tokenizer, (model, params) = read_tokenizer(folder), jaxgrpo.load_model(folder)
    prompts = [_chat(tokenizer, row["question"]) for row in rows]
    answers = [tokenizer.encode(row["answer"], add_special_tokens=False) for row in rows]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens, mask, is_answer = (np.zeros((len(rows), length), int) for _ in range(3))
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = [*prompt, *answer]
        mask[row, :end] = 1
        is_answer[row, len(prompt) : end] = 1
    logp = np.asarray(jaxgrpo.token_logp(model, params, tokens, mask), float)
    hits = np.asarray(token_is_likeliest(model, params, tokens, mask))
    likeliest = (hits | (is_answer == 0)).all(1)
    question = [{"role": "user", "content": FRANCE}]
    (france,) = jaxgrpo.sample(str(folder), [question], temperature=0, max_tokens=16)
    nats = -(logp * is_answer).sum(1).mean()
    return Recall(float(nats), int(likeliest.sum()), france["completion"].strip())


def _chat(tokenizer: Any, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def probe_table(gsm8k: str) -> str:
    """Whether there is signal, by kind of prompt."""
    chat = {"data.prompt": "What is {first} + {second}?", **_lengths(80, 24)}
    probes: dict[str, tuple[str, str, int, dict[str, Any]]] = {
        "sums, four examples as text": (
            "task:sums:test",
            "sums",
            32,
            {"data.chat_template": "none", "rollout.stop_strings": ["\n"], **_lengths(48, 4)},
        ),
        "sums as a chat, first line judged": ("task:sums:test", "sums", 32, chat),
        "sums as a chat, last number judged": ("task:sums:test", "gsm8k_answer", 32, chat),
        "GSM8K as a chat": (gsm8k, "gsm8k_answer", 8, _gsm8k_keys(gsm8k)),
    }
    rows = []
    for name, (data, reward, prompts, keys) in probes.items():
        sizes = {**PROBED, "prompts": min(prompts, PROBED["prompts"])}
        probe = jaxgrpo.probe(str(BASE), data=data, reward=reward, **sizes, **GROUPS, **keys)
        rows.append(_probe_row(name, probe))
    header = [
        "kind of prompt",
        "prompts",
        "success",
        "pass@4",
        f"pass@{PROBED['samples']}",
        "flat groups of 8",
        "if equally hard",
    ]
    return common.table([*header, "Jensen gap, 99% interval"], rows)


PROBED: dict[str, Any] = {"samples": 16, "prompts": 32}
GROUPS: dict[str, Any] = {"rollout.prompts_per_step": 8, "rollout.group_size": 8}


def _gsm8k_keys(source: str) -> dict[str, Any]:
    words = 'Let\'s think step by step and output the final answer after "####".'
    keys = {"data.prompt": f"{{question}} {words}", "data.too_long": "drop", **_lengths(256, 128)}
    if not Path(source).exists():  # on the hub
        keys |= {"eval.subset": "main", "eval.split": "test"}
    return keys


def _lengths(prompt: int, completion: int) -> dict[str, int]:
    return {"rollout.max_prompt_tokens": prompt, "rollout.max_completion_tokens": completion}


def _probe_row(name: str, probe: Mapping[str, Any]) -> list[str]:
    group, passes = probe["degeneracy"][8], probe["pass_at"]
    most = max(passes)
    low, high = group["ci"] if group["ci"] else (None, None)
    gap = f"{group['gap']:.3f}" + (f", {low:.3f} to {high:.3f}" if low is not None else "")
    shares = [probe["success"]["rate"], passes[4]["value"], passes[most]["value"]]
    shares += [group["measured"], group["iid"]]
    return [name, str(probe["prompts"]), *(f"{value:.3f}" for value in shares), gap]


def cost(compared: Mapping[str, Compared]) -> str:
    """What the runs took."""
    runs, tokens, minutes = total_cost(compared.values())
    return (
        f"{runs} runs of 10 steps; {tokens:,.0f} tokens sampled in training, "
        f"{minutes:.0f} minutes of training without evaluation."
    )


def checks(compared: Mapping[str, Compared]) -> list[common.Check]:
    """That runs begin at one base, and that each method learns. Which is better is no criterion."""
    criteria = []
    for name, (experiment, outcomes) in compared.items():
        mixtures = results.mixtures(outcomes)
        same_base = common.Check(
            f"{name}: one base in each seed", "; ".join(mixtures) or "yes", not mixtures
        )
        criteria.append(same_base)
        for arm, runs in report.best_runs(experiment, outcomes).items():
            base_rate, trained_rate = (
                np.mean([run.numbers[f"{when}/pass@1"] for run in runs])
                for when in ("base", "eval")
            )
            claim = f"{name}, {arm}: pass@1 rises in ten steps"
            criteria.append(
                common.Check(
                    claim, f"{base_rate:.3f} → {trained_rate:.3f}", bool(trained_rate > base_rate)
                )
            )
    return criteria


def draw(compared: Mapping[str, Compared], file: Path) -> None:
    """Rewards over steps, differences from grpo, and LoRA."""
    figure, charts = common.panels(3, 13, 3.4)
    reward, difference, adapters = charts
    report.curves(reward, report.best_runs(*compared[METHODS]), "reward")
    report.forest(difference, *compared[METHODS])
    report.curves(adapters, report.best_runs(*compared[LORA]), "reward")
    titles = ["reward, all weights", "pass@1 minus grpo, by seed", "reward, adapters"]
    for axes, title in zip(charts, titles, strict=True):
        axes.set_title(title, fontsize=10)
    reward.legend(fontsize=7)
    adapters.legend(fontsize=7)
    common.save(figure, file)


def _base_row(compared: Compared) -> list[str]:
    runs = next(iter(report.best_runs(*compared).values()))
    return ["base", "–", *_scores(runs, "base"), "–"]


def _scores(runs: Sequence[Outcome], when: str = "eval") -> list[str]:
    values = {
        name: [run.numbers[f"{when}/{name}"] for run in runs]
        for name in ("pass@1", "pass@4", "accuracy")
    }
    means = [f"{np.mean(values[name]):.3f}" for name in ("pass@4", "accuracy")]
    return [_spread(values["pass@1"]), *means]


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _recall_cells(recalled: Sequence[Recall]) -> list[str]:
    nats = np.mean([model.nats for model in recalled])
    likeliest = np.mean([model.likeliest for model in recalled])
    return [f"{nats:.1f}", f"{likeliest:.1f}"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
