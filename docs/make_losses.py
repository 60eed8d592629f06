"""Computes the tables of docs/losses.md.

    python docs/make_losses.py     (make docs)

Surrogates and penalties: formula and paper come from the docstring (its first indented block;
"Source: ... arXiv 2402.03300"), the pull from differentiating a sequence of one token. KL: all
sequences of random policies over 3 tokens are enumerated, in float64, and gradients compared.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient

from jaxgrpo.errors import InputError
from jaxgrpo.losses import build_penalty, build_surrogate, registry

PAGE = Path(__file__).resolve().parent / "losses.md"

PEERS = {
    "clip": "TRL `grpo`, `dapo`, `dr_grpo`; verl `vanilla`; with `delta` TRL `delta`",
    "dual_clip": "verl `vanilla` (`clip_ratio_c`), SkyRL `dual_clip`",
    "gspo": 'TRL `importance_sampling_level = "sequence"`, NeMo RL',
    "gspo_token": "verl and SkyRL `gspo`",
    "cispo": "TRL, verl, SkyRL `cispo`",
    "sapo": "TRL, verl, SkyRL `sapo`",
    "gmpo": "verl `geo_mean`",
    "vespo": "TRL `vespo`",
    "dppo_tv": "verl `dppo_tv`",
    "reinforce": "verl `gpg`",
    "on_policy": "NeMo RL",
    "k2": "verl `k2` (`mse`)",
    "forward_kl_k3": "TRL `beta`; verl `low_var_kl`; slime `low_var_kl`",
    "reverse_kl_off_policy": "TRL `use_bias_correction_kl`; at ratio 1 verl `k3+`",
    "entropy_bonus": "TRL `entropy_coef`; verl `entropy_coeff`",
    "adaptive_entropy": "TRL `use_adaptive_entropy`",
}
"""What others call a part; of those that are not here nobody else has one we know of."""

RATIOS = (0.5, 1.0, 1.5, 6.0)
V, T = 3, 3
POLICIES = 50
SEQUENCES = np.array(list(itertools.product(range(V), repeat=T)))
STATES = np.stack([0 * SEQUENCES[:, 0], 1 + SEQUENCES[:, 0], 4 + SEQUENCES[:, :2] @ [3, 1]], 1)
SAME = 1e-9
"""Gradients that differ by less, in every policy, are the same."""


def surrogates(table: Mapping[str, Callable[..., Any]] = registry.surrogates) -> str:
    """The table of surrogates, in Markdown."""
    ratios = ", ".join(f"{ratio:g}" for ratio in RATIOS)
    rows = [
        f"| surrogate | per token | pull at ratio {ratios}: A = 1; A = -1 | paper | elsewhere |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(table):
        cells = [f"`{name}`", formula(table[name]), pull(name), paper(table[name]), peers(name)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def pull(name: str) -> str:
    """-d loss / d logp of a sequence of one token, by its ratio, for both signs of A."""
    try:
        part = build_surrogate(name)
    except InputError as error:
        return f"by its options: {str(error).partition(': ')[2].partition(';')[0]}"
    mask = jnp.ones((1, 1), bool)

    def loss(logp: Array, advantage: float) -> Array:
        given = (jnp.zeros((1, 1)), jnp.full((1, 1), advantage), mask, mask.astype(jnp.int32), {})
        return part.compute(logp.reshape(1, 1), *given)[0].sum()

    slope = jax.jit(jax.vmap(jax.grad(loss), (0, None)))
    log_ratio = jnp.log(jnp.asarray(RATIOS))
    signs = [-np.asarray(slope(log_ratio, sign)) for sign in (1.0, -1.0)]
    return "; ".join(", ".join(_number(value) for value in row) for row in signs)


class Terms(NamedTuple):
    """A policy's log-probs of all sequences, [27, T] each; only `logp` and `kl` have gradient."""

    logp: Array
    reference: Array
    old: Array
    kl: Array  # at each visited state, over the vocabulary

    @property
    def token(self) -> Array:
        return self.logp - self.reference

    @property
    def whole(self) -> Array:
        return self.token.sum(1)


class Use(NamedTuple):
    """A use of a KL estimator as a loss of each sequence."""

    name: str
    level: str
    here: str  # how it is called here; "": not offered
    loss: Callable[[Terms], Array]  # -> [27]
    old: bool = False  # sequences are drawn from another policy


def penalty(name: str, level: str = "token") -> Callable[[Terms], Array]:
    """A penalty of jaxgrpo, summed over the tokens of each sequence."""
    part = build_penalty(name, {"beta": 1.0} | ({} if name == "full_kl" else {"level": level}))

    def loss(given: Terms) -> Array:
        fields = {"reference_logp": given.reference, "full_kl": given.kl}
        rows = jnp.ones(given.logp.shape, jnp.int32)
        mask = rows > 0
        return part.compute(given.logp, given.old, given.logp, mask, rows, fields)[0].sum(1)

    return loss


def rewarded(charge: Array, given: Terms) -> Array:
    """REINFORCE with the reward -charge: its gradient is charge * grad logp."""
    return (stop_gradient(charge) * given.logp).sum(1)


def to_go(value: Array) -> Array:
    return jnp.cumsum(value[:, ::-1], 1)[:, ::-1]


def spread(value: Array) -> Array:
    return jnp.broadcast_to(value[:, None], (len(SEQUENCES), T))


def square(log_ratio: Array) -> Array:
    return log_ratio**2 / 2


def third(log_ratio: Array) -> Array:
    return jnp.expm1(-log_ratio) + log_ratio


USES = (
    Use("k1 as loss", "either", "", lambda x: x.whole),
    Use("k1 in the reward", "sequence", "", lambda x: rewarded(spread(x.whole), x)),
    Use("k1 in the reward, to go", "token", "`k1_in_reward`",
        lambda x: rewarded(to_go(x.token), x)),
    Use("k2 as loss", "sequence", '`k2`, `level = "sequence"`', penalty("k2", "sequence")),
    Use("k2 as loss", "token", "`k2`", penalty("k2")),
    Use("k2 in the reward", "sequence", "", lambda x: rewarded(spread(square(x.whole)), x)),
    Use("k2 in the reward, to go", "token", "", lambda x: rewarded(to_go(square(x.token)), x)),
    Use("k3 as loss", "sequence", '`forward_kl_k3`, `level = "sequence"`',
        penalty("forward_kl_k3", "sequence")),
    Use("k3 as loss", "token", "`forward_kl_k3`", penalty("forward_kl_k3")),
    Use("k3 in the reward", "sequence", "", lambda x: rewarded(spread(third(x.whole)), x)),
    Use("k3 in the reward, to go", "token", "", lambda x: rewarded(to_go(third(x.token)), x)),
    Use("whole vocabulary as loss", "token", "`full_kl`", penalty("full_kl")),
    Use("ρ k1 as loss, off policy", "sequence", "",
        lambda x: jnp.exp((x.logp - x.old).sum(1)) * x.whole, old=True),
    Use("ρ k3 as loss, off policy", "sequence", '`reverse_kl_off_policy`, `level = "sequence"`',
        penalty("reverse_kl_off_policy", "sequence"), old=True),
    Use("ρ k3 as loss, off policy", "token", "`reverse_kl_off_policy`",
        penalty("reverse_kl_off_policy"), old=True),
)  # fmt: skip

REVERSE, FORWARD = "KL(π‖ref)", "KL(ref‖π)"


def kl_uses() -> str:
    """The table of uses of KL estimators, in Markdown."""
    found = compare()
    lines = [
        "| use | level | here | its gradient is that of | cosine with ∇KL(π‖ref) | its value |",
        "|---|---|---|---|---|---|",
    ]
    for index, use in enumerate(USES):
        one = {name: np.asarray(value)[:, index] for name, value in found.items()}
        same = [name for name in one if name.startswith("gradient ") and (one[name] < SAME).all()]
        gradient = same[0].removeprefix("gradient ") if same else "none of these"
        value = REVERSE if (one["value"] < SAME).all() else "–"
        zero = (one["gradient nothing"] < SAME).all()
        cosine = "–" if zero else f"{one['cosine'].mean():.2f}"
        if gradient == REVERSE:
            gradient, cosine = f"**{gradient}**", "1"
        cells = (use.name, use.level, use.here or "–", gradient, cosine, value)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@functools.cache
def compare() -> dict[str, np.ndarray]:
    """[policies, uses]: distances to the targets' gradients, cosine, distance of the value."""
    with jax.enable_x64(True):
        logits = np.random.default_rng(0).normal(size=(POLICIES, 3, 13, V))
        return jax.tree.map(np.asarray, jax.jit(jax.vmap(_compare))(jnp.asarray(logits)))


def _compare(logits: Array) -> dict[str, Array]:
    """Of one policy, reference and old policy, logits [3, 13, 3]."""
    policy, reference, old = logits
    targets = {name: jax.grad(f)(policy) for name, f in _targets(reference, old).items()}
    reverse = targets[REVERSE]

    def expected(policy: Array, use: Use) -> Array:
        given = terms(policy, reference, old if use.old else stop_gradient(policy))
        return (jnp.exp(given.old.sum(1)) * use.loss(given)).sum()

    both = [jax.value_and_grad(expected)(policy, use) for use in USES]
    divergence = _targets(reference, old)[REVERSE](policy)
    found = {
        f"gradient {name}": jnp.stack([jnp.abs(g - target).max() for _, g in both])
        for name, target in targets.items()
    }
    size = lambda x: jnp.sqrt((x**2).sum())  # noqa: E731
    cosine = [(g * reverse).sum() / jnp.maximum(size(g) * size(reverse), 1e-30) for _, g in both]
    value = [jnp.abs(v - divergence) for v, _ in both]
    return found | {"cosine": jnp.stack(cosine), "value": jnp.stack(value)}


def _targets(reference: Array, old: Array) -> dict[str, Callable[[Array], Array]]:
    """Name -> what is differentiated with respect to the policy's logits."""

    def sequences(left: Array, right: Array) -> Array:
        one, other = (jax.nn.log_softmax(x)[STATES, SEQUENCES].sum(1) for x in (left, right))
        return (jnp.exp(one) * (one - other)).sum()

    def states(left: Array, right: Array, visitor: Array) -> Array:
        p, q = jax.nn.log_softmax(left), jax.nn.log_softmax(right)
        visits = jnp.exp(jax.nn.log_softmax(visitor)[STATES, SEQUENCES].sum(1))
        return (stop_gradient(visits)[:, None] * (jnp.exp(p) * (p - q)).sum(1)[STATES]).sum()

    return {
        REVERSE: lambda x: sequences(x, reference),
        FORWARD: lambda x: sequences(reference, x),
        "nothing": lambda x: 0 * x.sum(),
        f"{REVERSE} at each visited state": lambda x: states(x, reference, x),
        f"{FORWARD} at each visited state": lambda x: states(reference, x, x),
        f"{REVERSE} at each state that old visits": lambda x: states(x, reference, old),
    }


def terms(policy: Array, reference: Array, old: Array) -> Terms:
    tables = [jax.nn.log_softmax(x) for x in (policy, reference, old)]
    logp, anchor, sampler = (table[STATES, SEQUENCES] for table in tables)
    kl = (jnp.exp(tables[0]) * (tables[0] - tables[1])).sum(1)[STATES]
    return Terms(logp, anchor, stop_gradient(sampler), kl)


def penalties() -> str:
    """The table of penalties, in Markdown."""
    lines = ["| penalty | per token | paper | elsewhere |", "|---|---|---|---|"]
    for key, table in (("loss.kl", registry.penalties), ("loss.entropy", registry.entropies)):
        for name, factory in sorted(table.items()):
            other = peers(factory.__name__)
            cells = (f"`{key}` `{name}`", formula(factory), paper(factory), other)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def formula(factory: Callable[..., Any]) -> str:
    """The first indented block of the docstring, on one line."""
    doc = inspect.getdoc(factory) or ""
    found = re.search(r"\n\n((?:    .*\n?)+)", doc)
    lines = [" ".join(line.split()) for line in (found[1] if found else "").splitlines()]
    return "; ".join(f"`{line.rstrip(';').replace('|', chr(8739))}`" for line in lines) or "–"


def paper(factory: Callable[..., Any]) -> str:
    """Links to the papers of "Source:"; without a number, its first sentence."""
    doc = inspect.getdoc(factory) or ""
    found = re.search(r"Source:(.*?)(?=\n\n|\Z)", doc, re.DOTALL)
    source = " ".join(found[1].split()) if found else ""
    numbers = dict.fromkeys(re.findall(r"arXiv:? ?(\d{4}\.\d{4,5})", source))
    links = [f"[{number}](https://arxiv.org/abs/{number})" for number in numbers]
    return ", ".join(links) or re.split(r"[.;] |[.;]$", source)[0] or "–"


def peers(name: str) -> str:
    return PEERS.get(name, "–")


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) > 1e-6 else "0"


def page(text: str) -> str:
    """The page with its tables computed anew."""
    tables = {"surrogates": surrogates, "penalties": penalties, "kl": kl_uses}
    for name, make in tables.items():
        before, found, rest = text.partition(f"<!-- {name} -->\n")
        _, closed, after = rest.partition("\n<!-- end -->")
        if not found or not closed:
            raise SystemExit(f"there is no <!-- {name} --> ... <!-- end --> to write between")
        text = f"{before}{found}{make()}{closed}{after}"
    return text


if __name__ == "__main__":
    old_text = PAGE.read_text()
    new_text = page(old_text)
    PAGE.write_text(new_text)
    sys.stdout.write(f"{PAGE}: {'as it was' if new_text == old_text else 'written'}\n")
