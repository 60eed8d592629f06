"""X15: which use of which KL estimator has which gradient, and how noisy it is.

    python -m docs.experiments.x15_kl_uses
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.common import Check, Result, below, cosine
from jaxgrpo import advantages
from jaxgrpo.losses import build_penalty, build_surrogate

NAME = "x15_kl_uses"
V, T = 3, 3
SEQUENCES = common.sequences(V, T)
STATE = common.prefixes(SEQUENCES, V)
SHAPE = (int(STATE.max()) + 1, V)
MASK = np.ones(SEQUENCES.shape, bool)
POLICIES = 200
NEAR = 0.1
IN_REWARD = ({"use": "kl_in_reward", "beta": 1.0}, {"use": "reward_to_go"})

REVERSE, FORWARD = "KL(π‖ref)", "KL(ref‖π)"
STATES, FORWARD_STATES = "per state, KL(π‖ref)", "per state, KL(ref‖π)"
OLD_STATES = "per state of old, KL(π‖ref)"
NOTHING = "nothing: 0"
K3_REWARD = "KL(π‖ref) − KL(ref‖π)"
K3_TOKENS = "KL(π‖ref) − per state, KL(ref‖π)"
K2_REWARD = "E ½l² − KL(π‖ref)"
K2_TOKENS = "E Σ ½l² − per state, KL(π‖ref)"


class Use(NamedTuple):
    """A way to use an estimator: its loss is differentiated, what is held is a reward."""

    name: str
    level: str
    made: str  # of jaxgrpo, or written out here
    gradient: str  # of what, by the targets' names; "" where we know of none
    loss: Any  # Terms -> loss of each sequence [27]
    old: bool = False  # sequences are drawn from another policy


class Terms(NamedTuple):
    """Log-probs of all 27 sequences, [27, T] each; only `logp` carries gradient."""

    logits: Array
    anchor: Array  # logits of the reference
    logp: Array
    reference: Array
    old: Array

    @property
    def token(self) -> Array:
        return self.logp - self.reference

    @property
    def whole(self) -> Array:
        return self.token.sum(1)

    def ratio(self) -> Array:
        return jnp.exp((self.logp - self.old).sum(1))


def terms(logits: Array, anchor: Array, old: Array) -> Terms:
    logp = [common.token_logp(each, STATE, SEQUENCES) for each in (logits, anchor, old)]
    return Terms(logits, anchor, logp[0], *map(stop_gradient, logp[1:]))


def k2(log_ratio: Array) -> Array:
    return log_ratio**2 / 2


def k3(log_ratio: Array) -> Array:
    return jnp.expm1(-log_ratio) + log_ratio


def rewarded(charge: Array, given: Terms) -> Array:
    """The loss of REINFORCE with reward -charge: its gradient is charge * grad log pi."""
    return stop_gradient(charge) * given.logp.sum(1)


def penalty(name: str):
    """A penalty of jaxgrpo.losses, summed over tokens."""
    part = build_penalty(name, {"beta": 1.0})

    def loss(given: Terms) -> Array:
        fields = {"reference_logp": given.reference}
        zero = jnp.zeros_like(given.logp)
        return part.compute(given.logp, given.logp, zero, MASK, MASK, fields)[0].sum(1)

    return loss


def in_reward(*steps: Any):
    """A chain of jaxgrpo.advantages on rewards of 0, then the clipped ratio, which is 1."""
    chain = advantages.build(["sum_rewards", {"use": "to_tokens", "place": "last"}, *steps])

    def loss(given: Terms) -> Array:
        advantage, _ = advantages.evaluate(
            chain,
            jnp.zeros((len(SEQUENCES), 1)),
            token_mask=MASK[:, None],
            trainer_logp=stop_gradient(given.logp)[:, None],
            reference_logp=given.reference[:, None],
        )
        held, clip = stop_gradient(given.logp), build_surrogate("clip")
        return clip.compute(given.logp, held, advantage[:, 0], MASK, MASK, {})[0].sum(1)

    return loss


def full_vocabulary(given: Terms) -> Array:
    """KL at each visited state, summed over the vocabulary."""
    logp, anchor = jax.nn.log_softmax(given.logits), jax.nn.log_softmax(given.anchor)
    return (jnp.exp(logp) * (logp - stop_gradient(anchor))).sum(1)[STATE].sum(1)


def straight_through(given: Terms) -> Array:
    """The value of k3 with the gradient of k2."""
    square = k2(given.token)
    return (stop_gradient(k3(given.token) - square) + square).sum(1)


def token_ratio(given: Terms, value: Array) -> Array:
    return (jnp.exp(given.logp - given.old) * value).sum(1)


HERE = "written out"
USES = (
    Use("k1 as loss", "either", HERE, NOTHING, lambda x: x.whole),
    Use("k1 in reward", "sequence", HERE, REVERSE, lambda x: rewarded(x.whole, x)),
    Use("k1 in reward, to go", "token", "`kl_in_reward`, `reward_to_go`", REVERSE,
        in_reward(*IN_REWARD)),
    Use("k1 in reward, own token", "token", "`kl_in_reward`", STATES, in_reward(IN_REWARD[0])),
    Use("k2 as loss", "sequence", HERE, REVERSE, lambda x: k2(x.whole)),
    Use("k2 as loss", "token", "`k2`", STATES, penalty("k2")),
    Use("k3 value, k2 gradient", "token", HERE, STATES, straight_through),
    Use("whole vocabulary as loss", "token", HERE, STATES, full_vocabulary),
    Use("k3 as loss", "sequence", HERE, FORWARD, lambda x: k3(x.whole)),
    Use("k3 as loss", "token", "`forward_kl_k3`", FORWARD_STATES, penalty("forward_kl_k3")),
    Use("k2 in reward", "sequence", HERE, K2_REWARD, lambda x: rewarded(k2(x.whole), x)),
    Use("k2 in reward", "token", HERE, K2_TOKENS, lambda x: rewarded(k2(x.token).sum(1), x)),
    Use("k3 in reward", "sequence", HERE, K3_REWARD, lambda x: rewarded(k3(x.whole), x)),
    Use("k3 in reward", "token", HERE, K3_TOKENS, lambda x: rewarded(k3(x.token).sum(1), x)),
    Use("old: ρ k1", "sequence", HERE, REVERSE, lambda x: x.ratio() * x.whole, True),
    Use("old: ρ k3", "sequence", HERE, REVERSE, lambda x: x.ratio() * k3(x.whole), True),
    Use("old: held ρ, k2", "sequence", HERE, REVERSE,
        lambda x: stop_gradient(x.ratio()) * k2(x.whole), True),
    Use("old: held ρ, k1 in reward", "sequence", HERE, REVERSE,
        lambda x: rewarded(x.ratio() * x.whole, x), True),
    Use("old: ρ_t k1_t", "token", HERE, OLD_STATES, lambda x: token_ratio(x, x.token), True),
    Use("old: ρ_t k3_t", "token", HERE, OLD_STATES, lambda x: token_ratio(x, k3(x.token)), True),
    Use("old: k1 in reward", "sequence", HERE, "", lambda x: rewarded(x.whole, x), True),
    Use("old: k2 as loss", "token", "`k2`", "", penalty("k2"), True),
    Use("old: k3 as loss", "token", "`forward_kl_k3`", "", penalty("forward_kl_k3"), True),
)  # fmt: skip


def targets(logits: Array, anchor: Array, old: Array) -> dict[str, Array]:
    """Name -> gradient with respect to the logits, from the definitions, by autodiff."""

    def whole(logits: Array) -> Array:
        return common.token_logp(logits, STATE, SEQUENCES).sum(1)

    def reverse(logits: Array) -> Array:
        return (jnp.exp(whole(logits)) * (whole(logits) - whole(anchor))).sum()

    def forward(logits: Array) -> Array:
        return (jnp.exp(whole(anchor)) * (whole(anchor) - whole(logits))).sum()

    def half_square(logits: Array, token: bool) -> Array:
        ratio = whole(logits) - whole(anchor)
        if token:
            logp = [common.token_logp(each, STATE, SEQUENCES) for each in (logits, anchor)]
            ratio = logp[0] - logp[1]
        square = ratio**2 / 2
        return (jnp.exp(whole(logits)) * (square.sum(1) if token else square)).sum()

    def visits(policy: Array) -> Array:
        """Expected visits of each state, [S], held."""
        chance = stop_gradient(jnp.exp(whole(policy)))
        return jnp.zeros(SHAPE[0]).at[STATE].add(chance[:, None])

    def per_state(logits: Array, policy: Array, back: bool) -> Array:
        logp, other = jax.nn.log_softmax(logits), jax.nn.log_softmax(anchor)
        one, two = (other, logp) if back else (logp, other)
        return visits(policy) @ (jnp.exp(one) * (one - two)).sum(1)

    grad = jax.grad
    found = {
        NOTHING: jnp.zeros(SHAPE),
        REVERSE: grad(reverse)(logits),
        FORWARD: grad(forward)(logits),
        STATES: grad(per_state)(logits, logits, False),
        FORWARD_STATES: grad(per_state)(logits, logits, True),
        OLD_STATES: grad(per_state)(logits, old, False),
    }
    found[K3_REWARD] = found[REVERSE] - found[FORWARD]
    found[K3_TOKENS] = found[REVERSE] - found[FORWARD_STATES]
    found[K2_REWARD] = grad(half_square)(logits, False) - found[REVERSE]
    found[K2_TOKENS] = grad(half_square)(logits, True) - found[STATES]
    return found


class Found(NamedTuple):
    """Of one policy, or with a leading axis of many."""

    gradient: Array  # [uses, S, V], expected
    spread: Array  # [uses], sqrt(tr Cov) of one sequence's gradient
    target: dict[str, Array]  # name -> [S, V]
    value: Array  # [6]: mean of k1, k2, k3 of whole sequences, then of sums over tokens
    deviation: Array  # [6]
    divergence: Array  # []: KL(pi || ref), by states
    old_value: Array  # [2]: E of rho k1, rho k3 under old


def measure(logits: Array, anchor: Array, old: Array) -> Found:
    """Everything, by enumeration."""
    given = terms(logits, anchor, old)
    chance, chance_old = (jnp.exp(each.sum(1)) for each in (given.logp, given.old))

    def losses(logits: Array) -> Array:
        now = terms(logits, anchor, old)
        return jnp.stack([use.loss(now) for use in USES])

    slope = jax.jacobian(losses)(logits)  # [uses, 27, S, V]
    off = np.array([use.old for use in USES])[:, None]
    weight = jnp.where(off, chance_old[None], chance[None])
    mean = jnp.einsum("un,unsv->usv", weight, slope)
    square = jnp.einsum("un,unsv->u", weight, slope**2)
    spread = jnp.sqrt(jnp.maximum(square - (mean**2).sum((1, 2)), 0))
    token, whole = given.token, given.whole
    each = [whole, k2(whole), k3(whole), token.sum(1), k2(token).sum(1), k3(token).sum(1)]
    values = jnp.stack(each)
    value = values @ chance
    deviation = jnp.sqrt((values - value[:, None]) ** 2 @ chance)
    divergence = full_vocabulary(given) @ chance
    old_value = jnp.stack([whole, k3(whole)]) @ (given.ratio() * chance_old)
    found = targets(logits, anchor, old)
    return Found(mean, spread, found, value, deviation, divergence, old_value)


def policies(number: int, distance: float | None = None) -> tuple[Array, Array, Array]:
    """(policy, reference, old) logits [number, S, V]; a reference far away, or at a distance."""
    drawn = np.random.default_rng(0).normal(size=(3, number, *SHAPE))
    logits, anchor, old = jnp.asarray(drawn)
    if distance is not None:
        anchor = logits + distance * anchor
    return logits, anchor, logits + 0.3 * old


def use_rows(far: Found, near: Found) -> list[list[Any]]:
    """One row for each use: of policy 0, and over all policies."""
    rows = []
    for index, use in enumerate(USES):
        gradient = far.gradient[:, index]
        row: list[Any] = [use.name, use.level, use.made, use.gradient or "neither"]
        for name in (REVERSE, FORWARD):
            if use.gradient == NOTHING:
                row.append("–")
                continue
            low, middle, high = np.quantile(cosine(gradient, far.target[name]), (0.1, 0.5, 0.9))
            same = low > 1 - 1e-9
            row.append("1" if same else f"{middle:+.2f} ({low:+.2f} to {high:+.2f})")
        for found in (far, near):
            size = jnp.linalg.norm(found.target[REVERSE].reshape(len(gradient), -1), axis=1)
            row.append(float(jnp.median(found.spread[:, index] / size)))
        rows.append(row)
    return rows


def value_rows(far: Found, near: Found) -> list[list[Any]]:
    """Values and deviations of the estimators, medians over policies."""
    rows = []
    for index, name in enumerate(("k1", "k2", "k3")):
        for level, place in (("sequence", index), ("token", index + 3)):
            row: list[Any] = [name, level]
            for found in (far, near):
                exact = found.divergence
                row += [
                    float(jnp.median(found.value[:, place] / exact)),
                    float(jnp.median(found.deviation[:, place] / exact)),
                ]
            rows.append(row)
    return rows


def checks(far: Found, near: Found) -> list[Check]:
    kinds: dict[str, list[Any]] = {}
    for found in (far, near):
        for index, use in enumerate(USES):
            if use.gradient:
                error = found.gradient[:, index] - found.target[use.gradient]
                kinds.setdefault(use.gradient, []).append(np.abs(error).max())
    exact = [far.value[:, [0, 2, 3, 5]], near.value[:, [0, 2, 3, 5]]]
    truth = [found.divergence[:, None] for found in (far, near)]
    unlike = [
        float(cosine(far.gradient[:, index], far.target[REVERSE]).min())
        for index, use in enumerate(USES)
        if use.name == "k3 as loss"
    ]
    return [
        *(below(f"gradient of {kind}", errors) for kind, errors in kinds.items()),
        below("E k1 = E k3 = KL(π‖ref), sequences and tokens",
              [np.abs(a - b).max() for a, b in zip(exact, truth, strict=True)]),
        below("E_old ρ k1 = E_old ρ k3 = KL(π‖ref)", far.old_value - far.divergence[:, None]),
        Check("k3 as loss is not the gradient of KL(π‖ref): some cosine < 0.9",
              f"down to {max(unlike):.2f}", max(unlike) < 0.9),
    ]  # fmt: skip


def figure(far: Found) -> Figure:
    """Noise of the values over the distance; cosines with the gradient of KL(pi || ref)."""
    drawing = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = drawing.subplots(1, 2, width_ratios=(1, 1.25))
    distances = np.geomspace(0.03, 2, 15)
    run = jax.jit(jax.vmap(measure))
    found = [run(*policies(32, float(distance))) for distance in distances]
    kl = [float(jnp.median(each.divergence)) for each in found]
    for index, name in enumerate(("k1", "k2", "k3")):
        noise = [float(jnp.median(each.deviation[:, index] / each.divergence)) for each in found]
        left.plot(kl, noise, "o-", ms=3, label=name)
    left.set(xscale="log", yscale="log", xlabel="KL(π‖ref) in nats", title="deviation / KL")
    left.set_ylabel("of one sequence")
    left.legend()
    left.grid(alpha=0.3)
    shown = [i for i, use in enumerate(USES) if use.gradient != NOTHING]
    cosines = [np.asarray(cosine(far.gradient[:, i], far.target[REVERSE])) for i in shown]
    right.boxplot(
        cosines, orientation="horizontal", showfliers=False, whis=(10, 90), widths=0.5,
        medianprops={"color": "C3"},
    )  # fmt: skip
    words = [f"{USES[i].name}, {USES[i].level}" for i in shown]
    right.set_yticks(range(1, len(words) + 1), words, fontsize=7)
    right.invert_yaxis()
    right.axvline(0, color="k", lw=0.8)
    right.set_title(f"cosine with grad KL(π‖ref), {len(cosines[0])} policies")
    right.grid(alpha=0.3, axis="x")
    return drawing


def run(number: int = POLICIES) -> Result:
    with jax.enable_x64(True):
        run = jax.jit(jax.vmap(measure))
        far, near = run(*policies(number)), run(*policies(number, NEAR))
        cosines = "median (10% to 90%)"
        noise = "√tr Cov / norm of grad KL"
        uses = common.table(
            ("use", "level", "made by", "gradient of", f"cosine with KL(π‖ref), {cosines}",
             f"with KL(ref‖π), {cosines}", f"{noise}, far", "near"), use_rows(far, near),
        )  # fmt: skip
        values = common.table(
            ("estimator", "level", "mean / KL, far", "deviation / KL, far", "mean / KL, near",
             "deviation / KL, near"), value_rows(far, near),
        )  # fmt: skip
        medians = [common.number(float(jnp.median(each.divergence))) for each in (far, near)]
        said = f"Median KL(π‖ref): {medians[0]} nats far, {medians[1]} near; {number} policies."
        parts = {"uses": uses, "values": values, "distance": said}
        found = checks(far, near)

    def draw() -> Figure:
        with jax.enable_x64(True):
            return figure(far)

    return Result(parts, found, draw)


if __name__ == "__main__":
    common.command(NAME, run)
