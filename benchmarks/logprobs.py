"""What token log-probs cost in chunks, forward and backward, beside one whole array of logits.

    python -m benchmarks.logprobs [--tokens 512 --vocab 32768 --width 256] [--chunks 64 256]

The limit is 1.5 times the unchunked form, log_softmax and a gather differentiated by JAX: a
backward pass that recomputes needs four matrix products for its three. The products alone are timed
in the same rounds, and torch's form of the same where torch is installed. Memory is what the
compiler plans beside arguments and results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import contest
from benchmarks.common import keep_memory, report, timed
from jaxgrpo.models.logprobs import token_logprobs

LIMIT = 1.5
UNCHUNKED = "unchunked"
Arrays = dict[str, np.ndarray]


def arrays(tokens: int, vocab: int, width: int) -> Arrays:
    """Hidden states, head, targets, and the cotangent of each log-prob."""
    random = np.random.default_rng(0)
    return {
        "hidden": random.normal(size=(1, tokens, width)).astype(np.float32),
        "table": (random.normal(size=(vocab, width)) / np.sqrt(width)).astype(np.float32),
        "targets": random.integers(0, vocab, (1, tokens)).astype(np.int32),
        "weight": random.normal(size=(1, tokens)).astype(np.float32),
    }


def compute_logits(table: Array, hidden: Array) -> Array:
    return jnp.einsum("...e,ve->...v", hidden, table, preferred_element_type=jnp.float32)


def chunked(floats: Any, inputs: Any, **options: Any) -> Array:
    """The weighted sum of log-probs (and of entropies that carry gradient)."""
    unembed = functools.partial(compute_logits, floats["table"])
    logp, entropy = token_logprobs(unembed, floats["hidden"], inputs["targets"], **options)
    loss = (inputs["weight"] * logp).sum()
    return loss if entropy is None else loss + (inputs["weight"] * entropy).sum()


def unchunked(floats: Any, inputs: Any, entropy: bool = False) -> Array:
    logp = jax.nn.log_softmax(compute_logits(floats["table"], floats["hidden"]), axis=-1)
    value = jnp.take_along_axis(logp, inputs["targets"][..., None], axis=-1)[..., 0]
    if entropy:
        value = value - (jnp.exp(logp) * logp).sum(-1)
    return (inputs["weight"] * value).sum()


def products(floats: Any, inputs: Any) -> Any:
    """The three matrix products of the unchunked form, and nothing else that takes time."""
    del inputs
    logits = compute_logits(floats["table"], floats["hidden"])
    return logits @ floats["table"], jnp.einsum("dnv,dne->ve", logits, floats["hidden"])


class Contender:
    """A jitted function of (floats, inputs), with the temporary memory that its compiler plans."""

    def __init__(self, function: Callable[..., Any], floats: Any, inputs: Any):
        compiled = jax.jit(function).lower(floats, inputs).compile()
        self.seconds = lambda _: timed(compiled, floats, inputs)[1]
        memory = compiled.memory_analysis()
        self.bytes = None if memory is None else memory.temp_size_in_bytes


def torch_form(values: Arrays) -> Callable[[int], float] | None:
    """Seconds of torch's log_softmax and gather, forward and backward."""
    try:
        import torch
    except ImportError:
        return None
    hidden, table = (
        torch.from_numpy(values[name]).requires_grad_(True) for name in ("hidden", "table")
    )
    targets = torch.from_numpy(values["targets"]).long()[..., None]
    weight = torch.from_numpy(values["weight"])

    def once() -> None:
        hidden.grad = table.grad = None
        logp = torch.log_softmax(hidden @ table.T, dim=-1)
        (weight * logp.gather(-1, targets)[..., 0]).sum().backward()

    return lambda _: timed(once)[1]


def contenders(values: Arrays, chunks: list[int]) -> dict[str, Contender]:
    vocab = len(values["table"])
    on_device = jax.tree.map(jnp.asarray, values)
    floats = {name: on_device[name] for name in ("hidden", "table")}

    def gradient(loss: Callable[..., Array], **options: Any) -> Contender:
        loss_and_gradient = jax.value_and_grad(functools.partial(loss, **options))
        return Contender(loss_and_gradient, floats, on_device)

    result = {UNCHUNKED: gradient(unchunked), "chunked": gradient(chunked)}
    for tokens in chunks:
        limit = tokens * vocab
        result[f"chunks of {tokens}"] = gradient(chunked, logits_per_chunk=limit)
    result["unchunked, entropy"] = gradient(unchunked, entropy=True)
    result["chunked, entropy"] = gradient(chunked, entropy="gradient")
    result["products"] = Contender(products, floats, on_device)
    return result


def main() -> None:
    parser = contest.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="further chunk sizes")
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    keep_memory("benchmarks.logprobs")
    about, console = contest.begin()
    values = arrays(arguments.tokens, arguments.vocab, arguments.width)
    forms = contenders(values, arguments.chunks)
    calls: dict[str, Callable[[int], float]] = {
        name: contender.seconds for name, contender in forms.items()
    }
    rival = torch_form(values)
    if rival is None:
        console.print("torch is not installed: its form is left out")
    else:
        calls["torch"] = rival
    spent = contest.in_turn(calls, arguments.repeats, warm_up=2)
    flops = 6 * arguments.tokens * arguments.vocab * arguments.width
    gigaflops = flops / float(np.median(spent["products"])) / 1e9
    console.print(f"the products alone: {gigaflops:.0f} GFLOP/s")
    columns = ("form", "ms", "ratio", "95%", "MiB", "limit", "within")
    result = contest.show(console, columns, compared(forms, spent))
    report({**about, **vars(arguments), "gflops": round(gigaflops, 1), **result})


def compared(
    forms: Mapping[str, Contender], spent: Mapping[str, list[float]]
) -> Iterator[contest.Row]:
    """Each form, with its ratio to the unchunked form of the same round."""
    for name, seconds in spent.items():
        base = "unchunked, entropy" if name.endswith(", entropy") else UNCHUNKED
        ratio = contest.over(seconds, spent[base])
        milliseconds = 1e3 * float(np.median(seconds))
        memory = forms[name].bytes if name in forms else None
        limit = LIMIT if name.startswith("chunk") else None
        cells = (
            f"{milliseconds:.1f}",
            f"{ratio.median:.2f}",
            ratio.ends,
            "" if memory is None else f"{memory / 2**20:.0f}",
            f"{limit or ''}",
            contest.within(ratio.median, limit),
        )
        numbers = {"ms": round(milliseconds, 2), "ratio": round(ratio.median, 3)}
        yield name, cells, numbers | ({} if memory is None else {"bytes": memory})


if __name__ == "__main__":
    main()
