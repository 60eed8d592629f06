"""Computes the tables of docs/losses.md.

    python -m docs.make_losses     (make docs)

Surrogates and penalties: formula and paper come from the docstring (its first indented block;
"Source: ... arXiv 2402.03300"), the pull from differentiating a sequence of one token. KL: the
uses of docs/experiments/kl_uses.py, whose gradients x15_kl_uses.py enumerates.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from docs.experiments.common import cosine
from docs.experiments.kl_uses import REVERSE, USES
from docs.experiments.x15_kl_uses import measure, policies
from docs.pages import FOLDER, between, markdown, paper, write
from jaxgrpo.losses import Tokens, build_surrogate, registry, with_batch_fields

PAGE = FOLDER / "losses.md"

PEERS = {
    "clip": "TRL `grpo`, `dapo`, `dr_grpo`; verl `vanilla`; with `delta` TRL `delta`",
    "dual_clip": "verl `vanilla` (`clip_ratio_c`), SkyRL `dual_clip`",
    "gspo": 'TRL `importance_sampling_level = "sequence"`, NeMo RL',
    "gspo_token": "verl and SkyRL `gspo`",
    "cispo": "TRL, verl, SkyRL `cispo`",
    "sapo": "TRL, verl, SkyRL `sapo`",
    "gmpo": "verl `geo_mean`",
    "vespo": "TRL `vespo`",
    "gvpo": "verl-recipe `gvpo`",
    "topr": "ROLL, Trinity-RFT `topr`, by token",
    "mirror_descent": 'with `level = "token"` ROLL `kimi15`, verl `dro`',
    "clip_cov": "verl, SkyRL `clip_cov`",
    "kl_cov": "verl, SkyRL `kl_cov`",
    "rewards_as_labels": "ms-swift `real`",
    "off_policy_mask": "TRL `off_policy_mask_threshold`, slime (OPSM)",
    "dppo_tv": "verl `dppo_tv`",
    "reinforce": "verl `gpg`",
    "on_policy": "NeMo RL",
    "k2": "verl `k2` (`mse`)",
    "forward_kl_k3": "TRL `beta`; verl `low_var_kl`; slime `low_var_kl`",
    "reverse_kl_off_policy": "TRL `use_bias_correction_kl`; at ratio 1 verl `k3+`",
    "top_k_divergence": "TRL `sdpo`, `gold`; verl `forward_kl_topk`",
    "entropy_bonus": "TRL `entropy_coef`; verl `entropy_coeff`",
    "adaptive_entropy": "TRL `use_adaptive_entropy`",
}
"""What other libraries call a part; none that we know has the parts that are not listed."""

OF_OTHERS = {
    "by_sample": "that of `then`, or of `otherwise`",
    "off_policy_mask": "that of `then`, or 0",
}
"""What to say of a surrogate that is made of others."""

SOURCES = ("paper", "elsewhere")
RATIOS = (0.5, 1.0, 1.5, 6.0)
POLICIES = 50
SAME = 1e-9
"""Gradients that differ by less, in every policy, are the same."""


def surrogates() -> str:
    """The table of surrogates, in Markdown."""
    table = registry.surrogates
    ratios = ", ".join(f"{ratio:g}" for ratio in RATIOS)
    header = ("surrogate", "per token", f"pull at ratio {ratios}: A = 1; A = -1", *SOURCES)
    rows = [
        (f"`{name}`", formula(table[name]), pull(name), paper(table[name]), peers(name))
        for name in sorted(table)
    ]
    return markdown(header, rows)


def pull(name: str) -> str:
    """-d loss / d logp of a sequence of one token, by its ratio, for both signs of A."""
    if name in OF_OTHERS:
        return OF_OTHERS[name]
    part = build_surrogate(name)

    by_group = [field for field in part.batch_fields if field.by_group]
    constants = dict.fromkeys(part.needs - {field.name for field in by_group}, 0.0)

    def loss(logp: Array, advantage: float) -> Array:
        tokens = Tokens.from_ratios(jnp.ones((1, 1)), advantage, **constants)
        tokens = dataclasses.replace(tokens, logp=logp.reshape(1, 1))
        tokens = with_batch_fields(by_group, tokens, jnp.zeros((1, 1), jnp.int32))
        return part.compute(tokens)[0].sum()

    slope = jax.jit(jax.vmap(jax.grad(loss), (0, None)))
    log_ratio = jnp.log(jnp.asarray(RATIOS))
    signs = [-np.asarray(slope(log_ratio, sign)) for sign in (1.0, -1.0)]
    return "; ".join(", ".join(_number(value) for value in row) for row in signs)


def kl_uses() -> str:
    """The table of uses of KL estimators, in Markdown."""
    distances = compare()
    header = (
        "use",
        "level",
        "here",
        "its gradient is that of",
        "cosine with ∇KL(π‖ref)",
        "its value",
    )
    rows = []
    for index, use in enumerate(USES):
        use_distances = {name: np.asarray(value)[:, index] for name, value in distances.items()}
        matches = [
            name
            for name in use_distances
            if name.startswith("gradient ") and (use_distances[name] < SAME).all()
        ]
        gradient = matches[0].removeprefix("gradient ") if matches else "none of these"
        value = REVERSE if (use_distances["value"] < SAME).all() else "–"
        zero = (use_distances["gradient nothing"] < SAME).all()
        angle = "–" if zero else f"{use_distances['cosine'].mean():.2f}"
        if gradient == REVERSE:
            gradient, angle = f"**{gradient}**", "1"
        rows.append((use.name, use.level, use.part or "–", gradient, angle, value))
    return markdown(header, rows)


@functools.cache
def compare() -> dict[str, np.ndarray]:
    """[policies, uses]: distances to the targets' gradients, cosine, distance of the value."""
    with jax.enable_x64(True):
        measurement = jax.jit(jax.vmap(measure))(*policies(POLICIES))
        apart = {
            f"gradient {name}": np.abs(measurement.gradient - target[:, None]).max((2, 3))
            for name, target in measurement.target.items()
        }
        reverse = measurement.target[REVERSE]
        cosines = [cosine(measurement.gradient[:, index], reverse) for index in range(len(USES))]
        value = np.abs(measurement.expected - measurement.divergence[:, None])
        return apart | {"cosine": np.stack(cosines, 1), "value": value}


def penalties() -> str:
    """The table of penalties, in Markdown."""
    tables = {"loss.kl": registry.penalties, "loss.entropy": registry.entropies}
    rows = [
        (f"`{key}` `{name}`", formula(factory), paper(factory), peers(factory.__name__))
        for key, table in tables.items()
        for name, factory in sorted(table.items())
    ]
    return markdown(("penalty", "per token", *SOURCES), rows)


def formula(factory: Callable[..., Any]) -> str:
    """The first indented block of the docstring, on one line."""
    doc = inspect.getdoc(factory) or ""
    match = re.search(r"\n\n((?:    .*\n?)+)", doc)
    lines = [" ".join(line.split()) for line in (match[1] if match else "").splitlines()]
    return "; ".join(f"`{line.rstrip(';').replace('|', chr(8739))}`" for line in lines) or "–"


def peers(name: str) -> str:
    return PEERS.get(name, "–")


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) > 1e-6 else "0"


def page(text: str) -> str:
    """The page with its tables computed again."""
    tables = {"surrogates": surrogates, "penalties": penalties, "kl": kl_uses}
    for name, make in tables.items():
        problem = f"there is no <!-- {name} --> ... <!-- end --> to write between"
        text = between(text, f"<!-- {name} -->\n", "\n<!-- end -->", make(), problem)
    return text


if __name__ == "__main__":
    write({PAGE: page(PAGE.read_text())})
