"""What a surrogate costs: beside the log-probs that it reads, and beside the bare clip.

    python -m benchmarks.losses

Three measures, each of value and gradient with respect to what is differentiated:
  of the pass: log-probs from hidden states with a surrogate and its metrics behind them, over the
    same log-probs with a weighted sum behind them. Limit 1.1.
  of the unchunked form: the same, over PPO's bare clip behind a log-softmax of all logits at once,
    an array [tokens, vocabulary] that grows too large where it counts. Limit 1.1.
  of the bare clip: a surrogate on [B, T] log-probs over PPO's formula in one jnp expression, which
    has no metrics and no clamp, and lets NaN under the mask into the gradient; with and without
    the surrogate's metrics. No limit: on CPUs each further sum is a pass of its own over memory.
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

from benchmarks.advantages import compare, time_call
from benchmarks.common import describe, interval, keep_memory, report
from jaxgrpo.losses import Tokens, build_surrogate, registry, token_loss, token_mean
from jaxgrpo.models.logprobs import token_logprobs

B, T = 512, 2048
TOKENS, HIDDEN, VOCABULARY = 1024, 64, 8192  # small ones: the more, the less a surrogate weighs
LIMIT = 1.1
OPTIONS = {"by_sample": {"field": "replayed"}}


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


def surrogate_tokens(logp: jax.Array, arrays: dict[str, jax.Array]) -> Tokens:
    """What every surrogate reads."""
    names = ("proximal_logp", "advantage", "mask", "segment")
    return Tokens(logp=logp, **{name: arrays[name] for name in names}, fields=arrays)


def bare(logp: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
    """PPO's clip and nothing else."""
    ratio, advantage = jnp.exp(logp - arrays["proximal_logp"]), arrays["advantage"]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -jnp.where(arrays["mask"], arrays["weight"] * gain, 0).sum()


def ours(name: str, with_metrics: bool) -> Callable[..., Any]:
    """Loss and gradient as the update takes them, by the weights of the whole batch."""
    surrogate = build_surrogate(name, OPTIONS.get(name))

    def loss(logp: jax.Array, arrays: dict[str, jax.Array]) -> Any:
        value, metrics = token_loss(surrogate, [], surrogate_tokens(logp, arrays))
        total = jnp.where(arrays["mask"], arrays["weight"] * value, 0).sum()
        return total, metrics if with_metrics else ()

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def on_hidden(name: str | None, head: jax.Array) -> Callable[..., Any]:
    """Value and gradient with respect to hidden states; None: of the weighted log-probs."""
    surrogate = name and build_surrogate(name, OPTIONS.get(name))

    def loss(hidden: jax.Array, arrays: dict[str, jax.Array]) -> Any:
        logp, _ = token_logprobs(
            lambda hidden: hidden @ head, hidden, arrays["targets"], temperature=1.0
        )
        metrics = {}
        value = logp
        if surrogate:
            value, metrics = token_loss(surrogate, [], surrogate_tokens(logp, arrays))
        return jnp.where(arrays["mask"], arrays["weight"] * value, 0).sum(), metrics

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def unchunked(head: jax.Array) -> Callable[..., Any]:
    """PPO's clip behind the whole logits; value and gradient with respect to hidden states."""

    def loss(hidden: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        logp = jax.nn.log_softmax(hidden @ head)
        return bare(jnp.take_along_axis(logp, arrays["targets"][..., None], -1)[..., 0], arrays)

    return jax.jit(jax.value_and_grad(loss))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="names of surrogates")
    arguments = parser.parse_args()
    keep_memory("benchmarks.losses")
    about, console = describe(), Console(width=110)
    console.print(f"{about['device']}, jax {about['jax']}, commit {about['commit']}")
    names = [name for name in registry.surrogates if not arguments.only or name in arguments.only]
    result = measure_pass(console, names, arguments.repeats)
    result |= measure_bare(console, names, arguments.repeats)
    report({**about, **result})


def measure_pass(console: Console, names: list[str], repeats: int) -> dict[str, Any]:
    """Surrogates behind log-probs, over the log-probs alone."""
    random = np.random.default_rng(1)
    hidden, head = (
        jnp.asarray(random.normal(size=shape).astype(np.float32))
        for shape in ((1, TOKENS, HIDDEN), (HIDDEN, VOCABULARY))
    )
    targets = jnp.asarray(random.integers(0, VOCABULARY, (1, TOKENS)).astype(np.int32))
    arrays = {**batch(1, TOKENS), "targets": targets}
    rivals = {"alone": on_hidden(None, head), "unchunked": unchunked(head)}
    timers = {
        name: functools.partial(time_call, call, hidden, arrays) for name, call in rivals.items()
    }
    title = f"{TOKENS} tokens, hidden {HIDDEN}, vocabulary {VOCABULARY}, limit {LIMIT}"
    table = Table("surrogate", "x log-probs", "95%", "x unchunked", "95%", "within", title=title)
    result: dict[str, Any] = {}
    for name in names:
        with_loss = functools.partial(time_call, on_hidden(name, head), hidden, arrays)
        spent = compare({"whole": with_loss, **timers}, repeats)
        ratios = [against(spent, rival)["whole"] for rival in rivals]
        within = "yes" if all(median <= LIMIT for median, _, _ in ratios) else "NO"
        cells = [(f"{median:.3f}", f"{low:.2f} .. {high:.2f}") for median, low, high in ratios]
        table.add_row(name, *cells[0], *cells[1], within)
        result[f"x log-probs/{name}"] = round(ratios[0][0], 3)
        result[f"x unchunked/{name}"] = round(ratios[1][0], 3)
    console.print(table)
    return result


def measure_bare(console: Console, names: list[str], repeats: int) -> dict[str, Any]:
    """Surrogates on given log-probs, over the bare clip."""
    arrays = batch(B, T)
    timer = lambda call: functools.partial(time_call, call, arrays["logp"], arrays)  # noqa: E731
    reference = timer(jax.jit(jax.value_and_grad(bare)))
    title = f"{B} x {T} log-probs"
    table = Table("surrogate", "ns per token", "x bare clip", "95%", "no metrics", title=title)
    result: dict[str, Any] = {}
    for name in names:
        full, lean = (timer(ours(name, with_metrics)) for with_metrics in (True, False))
        spent = compare({"whole": full, "lean": lean, "alone": reference}, repeats)
        ratio = against(spent)
        median, low, high = ratio["whole"]
        nanoseconds = 1e9 * float(np.median(spent["whole"])) / (B * T)
        table.add_row(
            *(name, f"{nanoseconds:.1f}", f"{median:.2f}", f"{low:.2f} .. {high:.2f}"),
            f"{ratio['lean'][0]:.2f}",
        )
        result[f"ns/{name}"] = round(nanoseconds, 1)
        result[f"x bare/{name}"] = round(median, 2)
        result[f"x bare, no metrics/{name}"] = round(ratio["lean"][0], 2)
    console.print(table)
    return result


def against(
    spent: dict[str, list[float]], rival: str = "alone"
) -> dict[str, tuple[float, float, float]]:
    """Each contender's seconds over those of a rival, pair by pair."""
    return {
        name: interval(
            [
                seconds / rival_seconds
                for seconds, rival_seconds in zip(values, spent[rival], strict=True)
            ]
        )
        for name, values in spent.items()
    }


if __name__ == "__main__":
    main()
