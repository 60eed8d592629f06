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

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import contest
from benchmarks.common import keep_memory, report
from benchmarks.contest import Row, in_turn, over, timer
from jaxgrpo.losses import Tokens, build_surrogate, registry, token_loss, token_mean
from jaxgrpo.models.logprobs import token_logprobs

B, T = 512, 2048
TOKENS, HIDDEN, VOCABULARY = 1024, 64, 8192  # small ones: the more, the less a surrogate weighs
LIMIT = 1.1
OPTIONS = {"by_sample": {"field": "replayed"}, "off_policy_mask": {"threshold": 0.1}}
CONSTANTS = (
    *("group_log_ratio", "behavior_logp", "token_draw", "clip_cov_tokens", "kl_cov_tokens"),
    *("label_log_sum", "label_count"),
)
"""Fields that are 0 here: a surrogate costs the same whatever they hold."""


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
        **{name: np.zeros(mask.shape, np.float32) for name in CONSTANTS},
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
    parser = contest.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="names of surrogates")
    arguments = parser.parse_args()
    keep_memory("benchmarks.losses")
    about, console = contest.begin()
    names = [name for name in registry.surrogates if not arguments.only or name in arguments.only]
    title = f"{TOKENS} tokens, hidden {HIDDEN}, vocabulary {VOCABULARY}, limit {LIMIT}"
    columns = ("surrogate", "x log-probs", "95%", "x unchunked", "95%", "within")
    result = contest.show(console, columns, measure_pass(names, arguments.repeats), title)
    title = f"{B} x {T} log-probs"
    columns = ("surrogate", "ns per token", "x bare clip", "95%", "no metrics")
    result |= contest.show(console, columns, measure_bare(names, arguments.repeats), title)
    report({**about, **result})


def measure_pass(names: list[str], repeats: int) -> Iterator[Row]:
    """Surrogates behind log-probs, over the log-probs alone."""
    random = np.random.default_rng(1)
    hidden, head = (
        jnp.asarray(random.normal(size=shape).astype(np.float32))
        for shape in ((1, TOKENS, HIDDEN), (HIDDEN, VOCABULARY))
    )
    targets = jnp.asarray(random.integers(0, VOCABULARY, (1, TOKENS)).astype(np.int32))
    arrays = {**batch(1, TOKENS), "targets": targets}
    rivals = {"alone": on_hidden(None, head), "unchunked": unchunked(head)}
    timers = {name: timer(call, hidden, arrays) for name, call in rivals.items()}
    for name in names:
        with_loss = timer(on_hidden(name, head), hidden, arrays)
        spent = in_turn({"loss": with_loss, **timers}, repeats, warm_up=1)
        ratios = [over(spent["loss"], spent[rival]) for rival in rivals]
        cells = [cell for ratio in ratios for cell in (f"{ratio.median:.3f}", ratio.ends)]
        slowest = max(ratio.median for ratio in ratios)
        numbers = zip(("x log-probs", "x unchunked"), ratios, strict=True)
        yield (
            name,
            (*cells, contest.within(slowest, LIMIT)),
            {measure: round(ratio.median, 3) for measure, ratio in numbers},
        )


def measure_bare(names: list[str], repeats: int) -> Iterator[Row]:
    """Surrogates on given log-probs, over the bare clip."""
    arrays = batch(B, T)
    reference = timer(jax.jit(jax.value_and_grad(bare)), arrays["logp"], arrays)
    for name in names:
        full, lean = (
            timer(ours(name, metrics), arrays["logp"], arrays) for metrics in (True, False)
        )
        spent = in_turn({"full": full, "lean": lean, "bare": reference}, repeats, warm_up=1)
        ratio, lean_ratio = (over(spent[form], spent["bare"]) for form in ("full", "lean"))
        nanoseconds = 1e9 * float(np.median(spent["full"])) / (B * T)
        yield (
            name,
            (
                f"{nanoseconds:.1f}",
                f"{ratio.median:.2f}",
                ratio.ends,
                f"{lean_ratio.median:.2f}",
            ),
            {
                "ns": round(nanoseconds, 1),
                "x bare": round(ratio.median, 2),
                "x bare, no metrics": round(lean_ratio.median, 2),
            },
        )


if __name__ == "__main__":
    main()
