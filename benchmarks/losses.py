"""What a surrogate costs: loss, metrics and gradient on [B, T] log-probs, beside the bare clip.

    python -m benchmarks.losses

The bare clip is PPO's formula in one jnp expression, weighted and summed, with no metrics, clamps
or care for what masked entries hold. Limit: 1.1 times its time for surrogates whose ratio is per
token. Those of whole sequences are measured beside, without a limit. Each is measured without its
metrics too, which says what they cost.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.advantages import compare, seconds_of
from benchmarks.common import describe, interval, report
from jaxgrpo.losses import build_surrogate, policy_loss, registry, token_loss, token_mean

B, T = 512, 2048
LIMIT = 1.1
OPTIONS = {"by_sample": {"field": "replayed"}}
OF_SEQUENCES = ("gspo", "gspo_token", "gmpo", "vespo")
NO_LIMIT = (*OF_SEQUENCES, "by_sample")  # two surrogates in one


def batch(rows: int, length: int) -> dict[str, jax.Array]:
    """Random log-probs of rows that are 50 to 100% full, one sequence each."""
    random = np.random.default_rng(0)
    logp = -random.exponential(size=(rows, length)).astype(np.float32)
    mask = np.arange(length) < random.integers(length // 2, length + 1, (rows, 1))
    arrays = {
        "logp": logp,
        "proximal_logp": logp + 0.1 * random.normal(size=logp.shape).astype(np.float32),
        "advantage": np.repeat(random.normal(size=(rows, 1)).astype(np.float32), length, 1),
        "mask": mask,
        "segment": np.ones(mask.shape, np.int32),
        "replayed": np.repeat(np.arange(rows)[:, None] % 2, length, 1).astype(np.float32),
    }
    arrays["weight"] = np.asarray(token_mean().weights(jnp.asarray(mask)[:, None])[:, 0])
    return jax.tree.map(jnp.asarray, arrays)


def bare(logp: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
    """PPO's clip and nothing else."""
    ratio, advantage = jnp.exp(logp - given["proximal_logp"]), given["advantage"]
    kept = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -jnp.where(given["mask"], given["weight"] * kept, 0).sum()


def ours(name: str, with_metrics: bool) -> Callable[..., Any]:
    """Loss and gradient as the update takes them, by the weights of the whole batch."""
    surrogate = build_surrogate(name, OPTIONS.get(name))
    names = ("proximal_logp", "advantage", "mask", "segment")

    def loss(logp: jax.Array, given: dict[str, jax.Array]) -> Any:
        fields = {"replayed": given["replayed"]}
        value, metrics = token_loss(surrogate, [], logp, *(given[name] for name in names), fields)
        total = jnp.where(given["mask"], given["weight"] * value, 0).sum()
        return total, metrics if with_metrics else ()

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def plain_arrays(name: str) -> Callable[..., Any]:
    """policy_loss on the same rows: its weights are computed too."""
    names = ("proximal_logp", "advantage", "mask")

    def loss(logp: jax.Array, given: dict[str, jax.Array]) -> Any:
        arrays = (given[key] for key in names)
        return policy_loss(name, "token_mean", logp, *arrays)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rows", type=int, default=B)
    parser.add_argument("--length", type=int, default=T)
    parser.add_argument("--only", nargs="*", help="names of surrogates")
    arguments = parser.parse_args()
    about, console = describe(), Console(width=110)
    console.print(f"{about['device']}, jax {about['jax']}, commit {about['commit']}")
    given = batch(arguments.rows, arguments.length)
    read = sum(given[name].nbytes for name in ("logp", "proximal_logp", "advantage", "weight"))
    read += given["mask"].nbytes + given["logp"].nbytes  # and the gradient written
    reference = jax.jit(jax.value_and_grad(bare))
    table = Table(
        *("surrogate", "ms", "x bare clip", "95%", "without metrics", "limit", "within"),
        title=f"{arguments.rows} x {arguments.length} tokens, loss and gradient",
    )
    result: dict[str, Any] = {"rows": arguments.rows, "length": arguments.length}
    timer = lambda call: functools.partial(seconds_of, call, given["logp"], given)  # noqa: E731
    chosen = [name for name in registry.surrogates if not arguments.only or name in arguments.only]
    for name in chosen:
        contenders = {
            "bare": timer(reference),
            "whole": timer(ours(name, with_metrics=True)),
            "lean": timer(ours(name, with_metrics=False)),
        }
        if name == "clip":
            contenders["arrays"] = timer(plain_arrays(name))
        spent = compare(contenders, arguments.repeats)
        ratio = {
            what: interval([a / b for a, b in zip(values, spent["bare"], strict=True)])
            for what, values in spent.items()
        }
        median, low, high = ratio["whole"]
        limit = None if name in NO_LIMIT else LIMIT
        table.add_row(
            name,
            f"{1e3 * float(np.median(spent['whole'])):.2f}",
            f"{median:.2f}",
            f"{low:.2f} .. {high:.2f}",
            f"{ratio['lean'][0]:.2f}",
            f"{limit or ''}",
            "" if limit is None else "yes" if median <= limit else "NO",
        )
        result[f"x/{name}"] = round(median, 3)
        result[f"x lean/{name}"] = round(ratio["lean"][0], 3)
        if name == "clip":
            seconds = float(np.median(spent["bare"]))
            result["bare ms"] = round(1e3 * seconds, 3)
            result["bare GB/s"] = round(read / seconds / 1e9, 1)
            result["x/policy_loss clip"] = round(ratio["arrays"][0], 3)
    console.print(table)
    console.print(f"the bare clip moves {read / 1e6:.0f} MB")
    report({**about, **result})


if __name__ == "__main__":
    main()
