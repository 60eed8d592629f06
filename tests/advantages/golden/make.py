"""Writes peers.json: what the advantage functions of verl and TRL return. Run by hand only.

    python -m venv peers
    peers/bin/pip install torch==2.13.0 verl==0.9.1 trl==1.16.0
    peers/bin/python tests/advantages/golden/make.py

The functions are the peers' own: verl's are called; TRL's stand inside a long method of its
trainer, whose lines from the mark of unscorable samples to the last `nan_to_num` are executed as
they are. All in float64, so that the numbers are those of the formulas; `flat_noise` is what the
same functions make of equal float32 rewards.
"""

# The peers are no dependency of ours.
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
import json
import textwrap
import types
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import verl.trainer.ppo.core_algos as verl
from omegaconf import OmegaConf
from trl.trainer import grpo_trainer as trl

HERE = Path(__file__).parent
NAN = float("nan")
TABLE = [
    [1.0, 0.0, 0.0, 0.0],
    [1.0, 1.0, 1.0, 0.0],
    [0.2, 0.9, 0.5, 0.5],
    [1.0, 0.0],
    [1.0, 1.0, 1.0, 1.0],
    [1.0],
]
VERL = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)


def run_verl(name, rewards, length, dtype=torch.float64, divide=True):
    """The advantage of each sample of rewards [P, G], of length [P, G] tokens."""
    rewards, length = np.asarray(rewards), np.asarray(length)
    mask = torch.tensor(np.arange(length.max()) < length.reshape(-1, 1)).to(dtype)
    last = torch.tensor(length.reshape(-1, 1) - 1)
    scores = torch.tensor(rewards.reshape(-1, 1)).to(dtype)
    arguments = {
        "token_level_rewards": torch.zeros_like(mask).scatter(1, last, scores),
        "response_mask": mask,
        "index": np.repeat(np.arange(len(rewards)), rewards.shape[1]),
        "config": OmegaConf.create({"norm_adv_by_std_in_grpo": divide, "gamma": 1.0}),
    }
    if name in ("grpo", "grpo_vectorized"):
        arguments["norm_adv_by_std_in_grpo"] = divide
    advantage = verl.get_adv_estimator_fn(name)(**arguments)[0]
    return per_sample(advantage, mask, rewards.shape)


def run_verl_gdpo(streams, weights, length):
    """GDPO of streams name -> [P, G]; it places each reward at the last token by itself."""
    length = np.asarray(length)
    shape = length.shape
    mask = torch.tensor(np.arange(length.max()) < length.reshape(-1, 1)).double()
    advantage = verl.compute_gdpo_outcome_advantage(
        token_level_rewards=torch.zeros_like(mask),
        response_mask=mask,
        index=np.repeat(np.arange(shape[0]), shape[1]),
        config=OmegaConf.create(
            {"gdpo_reward_keys": list(streams), "gdpo_reward_weights": list(weights)}
        ),
        non_tensor_batch={name: np.asarray(value).reshape(-1) for name, value in streams.items()},
        batch={"prompts": torch.zeros(len(mask), 0), "attention_mask": mask.long()},
    )[0]
    return per_sample(advantage, mask, shape)


def per_sample(advantage, mask, shape):
    """verl repeats one number over the tokens of a sample."""
    value = advantage[:, :1]
    assert torch.equal(advantage, value * mask)
    return value.reshape(shape).tolist()


def trl_lines():
    """The lines of TRL's trainer that turn rewards into advantages."""
    source = inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)
    first = source.index("unscorable_mask = torch.isnan")
    first = source.rindex("\n", 0, first) + 1
    end = "advantages = torch.nan_to_num(advantages, nan=0.0)"
    return textwrap.dedent(source[first : source.index(end) + len(end)])


def run_trl(streams, weights, scale="group", order="sum_then_normalize", dtype=torch.float64):
    """The advantages of streams, a list of [P, G]; NaN where a reward function returned None."""
    streams = np.asarray(streams)
    functions, shape = len(streams), streams.shape[1:]
    trainer = types.SimpleNamespace(
        multi_objective_aggregation=order,
        scale_rewards=scale,
        reward_weights=torch.tensor(weights, dtype=dtype),
        reward_funcs=[None] * functions,
    )
    names = {
        **vars(trl),
        "self": trainer,
        "rewards_per_func": torch.tensor(streams.reshape(functions, -1).T).to(dtype),
        "num_generations": shape[1],
        "device": torch.device("cpu"),
    }
    exec(trl_lines(), names)
    return names["advantages"].reshape(shape).tolist()


def batch():
    """Two rewards [6, 4] with a flat group, a group flat in one reward, and lengths."""
    random = np.random.default_rng(0)
    correct = random.integers(0, 2, (6, 4)).astype(float)
    correct[1], correct[2], correct[4] = 0, [1, 0, 0, 0], [1, 1, 0, 1]
    style = random.normal(size=(6, 4)).round(2)
    style[1] = 0.3
    return correct, style, random.integers(1, 9, (6, 4))


def unscored(correct, style):
    """The same where some rewards, and all rewards of some samples, are missing."""
    correct, style = correct.copy(), style.copy()
    correct[0, 1], style[0, 2], style[3, :3] = NAN, NAN, NAN
    correct[4, 3] = style[4, 3] = NAN
    correct[5], style[5] = NAN, NAN
    correct[5, 2], style[5, 2] = 1.0, 0.7
    return correct, style


def flat_noise():
    """Largest |advantage| of groups of 6 to 12 equal float32 rewards: it should be 0."""
    random = np.random.default_rng(1)
    constants = np.append(random.uniform(-1, 1, 400), 0.1).astype(np.float32)
    worst = {"verl grpo": 0.0, "trl group": 0.0}
    for size in range(6, 13):
        rewards = np.repeat(constants[:, None], size, 1)
        ours = run_verl("grpo", rewards, np.ones_like(rewards, int), torch.float32)
        worst["verl grpo"] = max(worst["verl grpo"], np.abs(ours).max())
        ours = run_trl([rewards], [1.0], dtype=torch.float32)
        worst["trl group"] = max(worst["trl group"], np.abs(ours).max())
    return {name: float(value) for name, value in worst.items()}


def clean(value):
    """NaN as null: JSON has no other word for it."""
    if isinstance(value, dict):
        return {name: clean(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(entry) for entry in value]
    return None if value != value else value


def table():
    rows = []
    for rewards in TABLE:
        row = {"rewards": rewards}
        single_group = np.ones((1, len(rewards)), int)
        for name in VERL[:6]:
            if len(rewards) > 1 or name != "grpo_passk":
                row[f"verl {name}"] = run_verl(name, [rewards], single_group)[0]
        row["verl grpo centred"] = run_verl("grpo", [rewards], single_group, divide=False)[0]
        for scale in ("group", "batch", "none"):
            row[f"trl {scale}"] = run_trl([[rewards]], [1.0], scale)[0]
        rows.append(row)
    return rows


def main():
    correct, style, length = batch()
    partly = unscored(correct, style)
    weights, orders = [1.0, 0.5], ("sum_then_normalize", "normalize_then_sum")
    total = weights[0] * correct + weights[1] * style
    golden = {
        "versions": {name: version(name) for name in ("verl", "trl", "torch")},
        "table": table(),
        "batch": {
            "correct": correct.tolist(),
            "style": style.tolist(),
            "length": length.tolist(),
            "weights": weights,
            "verl": {name: run_verl(name, total, length) for name in VERL}
            | {"gdpo": run_verl_gdpo({"correct": correct, "style": style}, weights, length)}
            | {"grpo_passk centred": run_verl("grpo_passk", total, length, divide=False)},
        },
        "partly": {
            "correct": partly[0].tolist(),
            "style": partly[1].tolist(),
            "weights": weights,
        },
        "flat_noise": flat_noise(),
    }
    for name, streams in (("batch", (correct, style)), ("partly", partly)):
        golden[name]["trl"] = {
            f"{order} {scale}": run_trl(streams, weights, scale, order)
            for order in orders
            for scale in ("group", "batch", "none")
        }
    (HERE / "peers.json").write_text(json.dumps(clean(golden), indent=1) + "\n")


if __name__ == "__main__":
    main()
