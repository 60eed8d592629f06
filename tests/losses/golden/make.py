"""Writes peers.json: losses and gradients of TRL's trainer and verl's functions. Run by hand only.

    python -m venv peers
    peers/bin/pip install torch==2.13.0 verl==0.9.1 trl==1.16.0
    peers/bin/python tests/losses/golden/make.py

The functions are the peers' own. TRL's is a method of its trainer: it is called on a stand-in that
returns the log-probabilities instead of running a model. All in float64.
"""

# The peers are no dependency of ours.
# pyright: reportMissingImports=false

from __future__ import annotations

import collections
import json
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl.trainer.ppo.core_algos as verl
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from verl.workers.config import FSDPActorConfig

HERE = Path(__file__).parent
HAND = {  # small enough to be checked by hand
    "old": [[-1.0, -0.5, -2.0, -0.2], [-0.7, -1.5, 0.0, 0.0]],
    "new": [[-0.8, -0.9, -1.0, -0.21], [-0.2, -2.5, 0.0, 0.0]],
    "advantage": [1.0, -0.5],
    "length": [4, 2],
}
LONGEST = 8
TRL = {
    "grpo": {"loss_type": "grpo"},
    "grpo, clip higher": {"loss_type": "grpo", "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "two-sided": {"loss_type": "grpo", "delta": 1.5},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "cispo, cut": {"loss_type": "cispo", "epsilon_high": 1.3},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "luspo": {"loss_type": "luspo"},
    "luspo, sequence": {
        "loss_type": "luspo",
        "epsilon": 2e-3,
        "epsilon_high": 2.5e-3,
        "importance_sampling_level": "sequence",
    },
    "gspo": {
        "loss_type": "grpo",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "importance_sampling_level": "sequence",
    },
    "gspo, wide": {"loss_type": "dapo", "importance_sampling_level": "sequence"},
}
VERL = {
    "vanilla": {},
    "gspo": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "cispo": {},
    "geo_mean": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
    "dppo_tv": {"clip_ratio_c": 20.0},
}
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def tensors(batch):
    old, new, advantage = (
        torch.tensor(batch[name], dtype=torch.float64) for name in ("old", "new", "advantage")
    )
    mask = torch.tensor(np.arange(old.shape[1]) < np.array(batch["length"])[:, None]).double()
    return old, new.requires_grad_(), advantage, mask


def new_gradient(loss, new):
    return torch.autograd.grad(loss, new)[0].tolist()


def stand_in(new, options):
    """What TRL's method reads of its trainer; the model gives the log-probs `new`."""
    options = {
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "importance_sampling_level": "token",
        **options,
    }
    high = options["epsilon_high"]
    arguments = {
        "delta": options["delta"],
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
        "use_bias_correction_kl": True,
    }
    return types.SimpleNamespace(
        **{name: options.get(name) for name in ("loss_type", "importance_sampling_level")},
        epsilon_low=options["epsilon"],
        epsilon_high=options["epsilon"] if high is None else high,
        max_completion_length=LONGEST,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            num_processes=1,
            gather=lambda value: value,
            gather_for_metrics=lambda value: value,
            reduce=lambda value, reduction: value,
        ),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        args=types.SimpleNamespace(**arguments),
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )


def run_trl(batch, options, method=GRPOTrainer):
    old, new, advantage, mask = tensors(batch)
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantage,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    trainer: Any = stand_in(new, options)
    loss = method._compute_loss(trainer, None, inputs)
    return {"loss": loss.item(), "gradient": new_gradient(loss, new)}


def run_verl(batch, name, options, aggregation):
    old, new, advantage, mask = tensors(batch)
    settings = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **options}
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings
    )
    wide = advantage[:, None].expand_as(new)
    loss, _ = verl.get_policy_loss_fn(name)(
        old, new, wide, mask, loss_agg_mode=aggregation, config=config
    )
    return {"loss": loss.item(), "gradient": new_gradient(loss, new)}


def batch():
    """Eight samples, one of them without a token, with ratios on both sides of every bound."""
    random = np.random.default_rng(0)
    old = -random.exponential(size=(8, 6))
    new = old + 0.5 * random.normal(size=(8, 6))
    old[0, 1], new[0, 1], new[1] = -4.0, -0.2, old[1] + 1.2
    advantage = random.normal(size=8)
    advantage[:2] = -0.7, -1.1
    return {
        "old": old.round(3).tolist(),
        "new": new.round(3).tolist(),
        "advantage": advantage.round(3).tolist(),
        "length": [6, 5, 1, 4, 0, 6, 2, 3],
    }


def peers(golden_batch):
    results = {f"trl {name}": run_trl(golden_batch, options) for name, options in TRL.items()}
    results["trl gmpo"] = run_trl(golden_batch, {"epsilon": 0.4}, GMPOTrainer)
    for name, options in VERL.items():
        for aggregation in AGGREGATIONS:
            results[f"verl {name} {aggregation}"] = run_verl(
                golden_batch, name, options, aggregation
            )
    return results


def main():
    torch.set_default_dtype(torch.float64)  # that of temperatures in TRL
    golden = {
        "versions": {name: version(name) for name in ("verl", "trl", "torch")},
        "trl": TRL,
        "longest": LONGEST,
        "hand": {**HAND, "peers": peers(HAND)},
        "batch": {**batch(), "peers": peers(batch())},
    }
    (HERE / "peers.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
