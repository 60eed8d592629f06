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
from docs.experiments.kl_uses import (
    FORWARD,
    FORWARD_STATES,
    K2_REWARD,
    K2_TOKENS,
    K3_REWARD,
    K3_TOKENS,
    NOTHING,
    OLD_STATES,
    REVERSE,
    SEQUENCES,
    SHAPE,
    STATE,
    STATES,
    USES,
    at_states,
    k2,
    k3,
    terms,
)

NAME = "x15_kl_uses"
POLICIES = 200
NEAR = 0.1


def targets(logits: Array, anchor: Array, old: Array) -> dict[str, Array]:
    """Name -> gradient with respect to the logits, from the definitions, by autodiff."""

    def log_prob(logits: Array) -> Array:
        return common.token_logp(logits, STATE, SEQUENCES).sum(1)

    def reverse(logits: Array) -> Array:
        return (jnp.exp(log_prob(logits)) * (log_prob(logits) - log_prob(anchor))).sum()

    def forward(logits: Array) -> Array:
        return (jnp.exp(log_prob(anchor)) * (log_prob(anchor) - log_prob(logits))).sum()

    def half_square(logits: Array, token: bool) -> Array:
        ratio = log_prob(logits) - log_prob(anchor)
        if token:
            logp = [common.token_logp(table, STATE, SEQUENCES) for table in (logits, anchor)]
            ratio = logp[0] - logp[1]
        square = ratio**2 / 2
        return (jnp.exp(log_prob(logits)) * (square.sum(1) if token else square)).sum()

    def visits(policy: Array) -> Array:
        """Expected visits of each state, [S], held."""
        chance = stop_gradient(jnp.exp(log_prob(policy)))
        return jnp.zeros(SHAPE[0]).at[STATE].add(chance[:, None])

    def per_state(logits: Array, policy: Array, is_forward: bool) -> Array:
        logp, anchor_logp = jax.nn.log_softmax(logits), jax.nn.log_softmax(anchor)
        left, right = (anchor_logp, logp) if is_forward else (logp, anchor_logp)
        return visits(policy) @ (jnp.exp(left) * (left - right)).sum(1)

    grad = jax.grad
    gradients = {
        NOTHING: jnp.zeros(SHAPE),
        REVERSE: grad(reverse)(logits),
        FORWARD: grad(forward)(logits),
        STATES: grad(per_state)(logits, logits, False),
        FORWARD_STATES: grad(per_state)(logits, logits, True),
        OLD_STATES: grad(per_state)(logits, old, False),
    }
    gradients[K3_REWARD] = gradients[REVERSE] - gradients[FORWARD]
    gradients[K3_TOKENS] = gradients[REVERSE] - gradients[FORWARD_STATES]
    gradients[K2_REWARD] = grad(half_square)(logits, False) - gradients[REVERSE]
    gradients[K2_TOKENS] = grad(half_square)(logits, True) - gradients[STATES]
    return gradients


class Measurement(NamedTuple):
    """Of one policy, or with a leading axis of many."""

    gradient: Array  # [uses, S, V], expected
    spread: Array  # [uses], sqrt(tr Cov) of one sequence's gradient
    target: dict[str, Array]  # name -> [S, V]
    expected: Array  # [uses], the value
    value: Array  # [6]: mean of k1, k2, k3 of whole sequences, then of sums over tokens
    deviation: Array  # [6]
    divergence: Array  # []: KL(pi || ref), by states
    old_value: Array  # [2]: E of rho k1, rho k3 under old


def measure(logits: Array, anchor: Array, old: Array) -> Measurement:
    """Everything, by enumeration."""
    policy_terms = terms(logits, anchor, old)
    chance, chance_old = (jnp.exp(logp.sum(1)) for logp in (policy_terms.logp, policy_terms.old))

    def losses(logits: Array) -> Array:
        current = terms(logits, anchor, old)
        return jnp.stack([use.loss(current) for use in USES])

    slope = jax.jacobian(losses)(logits)  # [uses, 27, S, V]
    off = np.array([use.old for use in USES])[:, None]
    weight = jnp.where(off, chance_old[None], chance[None])
    mean = jnp.einsum("un,unsv->usv", weight, slope)
    square = jnp.einsum("un,unsv->u", weight, slope**2)
    expected = (weight * losses(logits)).sum(1)
    spread = jnp.sqrt(jnp.maximum(square - (mean**2).sum((1, 2)), 0))
    token, sequence = policy_terms.token, policy_terms.sequence
    estimates = [
        sequence,
        k2(sequence),
        k3(sequence),
        token.sum(1),
        k2(token).sum(1),
        k3(token).sum(1),
    ]
    values = jnp.stack(estimates)
    value = values @ chance
    deviation = jnp.sqrt((values - value[:, None]) ** 2 @ chance)
    divergence = at_states(policy_terms).sum(1) @ chance
    old_value = jnp.stack([sequence, k3(sequence)]) @ (policy_terms.ratio() * chance_old)
    target_gradients = targets(logits, anchor, old)
    return Measurement(
        mean, spread, target_gradients, expected, value, deviation, divergence, old_value
    )


def policies(number: int, distance: float | None = None) -> tuple[Array, Array, Array]:
    """(policy, reference, old) logits [number, S, V]; a reference far away, or at a distance."""
    drawn = np.random.default_rng(0).normal(size=(3, number, *SHAPE))
    logits, anchor, old = jnp.asarray(drawn)
    if distance is not None:
        anchor = logits + distance * anchor
    return logits, anchor, logits + 0.3 * old


def use_rows(far: Measurement, near: Measurement) -> list[list[Any]]:
    """One row for each use: of policy 0, and over all policies."""
    rows = []
    for index, use in enumerate(USES):
        gradient = far.gradient[:, index]
        row: list[Any] = [use.name, use.level, use.part or "written out", use.gradient or "none"]
        for name in (REVERSE, FORWARD):
            if use.gradient == NOTHING:
                row.append("–")
                continue
            low, middle, high = np.quantile(cosine(gradient, far.target[name]), (0.1, 0.5, 0.9))
            same = low > 1 - 1e-9
            row.append("1" if same else f"{middle:+.2f} ({low:+.2f} to {high:+.2f})")
        for measurement in (far, near):
            size = jnp.linalg.norm(measurement.target[REVERSE].reshape(len(gradient), -1), axis=1)
            row.append(float(jnp.median(measurement.spread[:, index] / size)))
        rows.append(row)
    return rows


def value_rows(far: Measurement, near: Measurement) -> list[list[Any]]:
    """Values and deviations of the estimators, medians over policies."""
    rows = []
    for index, name in enumerate(("k1", "k2", "k3")):
        for level, place in (("sequence", index), ("token", index + 3)):
            row: list[Any] = [name, level]
            for measurement in (far, near):
                exact = measurement.divergence
                row += [
                    float(jnp.median(measurement.value[:, place] / exact)),
                    float(jnp.median(measurement.deviation[:, place] / exact)),
                ]
            rows.append(row)
    return rows


def checks(far: Measurement, near: Measurement) -> list[Check]:
    kinds: dict[str, list[Any]] = {}
    for measurement in (far, near):
        for index, use in enumerate(USES):
            if use.gradient:
                error = measurement.gradient[:, index] - measurement.target[use.gradient]
                kinds.setdefault(use.gradient, []).append(np.abs(error).max())
    exact = [far.value[:, [0, 2, 3, 5]], near.value[:, [0, 2, 3, 5]]]
    truth = [measurement.divergence[:, None] for measurement in (far, near)]
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


def figure(far: Measurement) -> Figure:
    """Noise of the values over the distance; cosines with the gradient of KL(pi || ref)."""
    drawing, (left, right) = common.panels(2, 10, 4.2, width_ratios=(1, 1.25))
    distances = np.geomspace(0.03, 2, 15)
    run = jax.jit(jax.vmap(measure))
    measurements = [run(*policies(32, float(distance))) for distance in distances]
    kl = [float(jnp.median(measurement.divergence)) for measurement in measurements]
    for index, name in enumerate(("k1", "k2", "k3")):
        noise = [
            float(jnp.median(measurement.deviation[:, index] / measurement.divergence))
            for measurement in measurements
        ]
        left.plot(kl, noise, "o-", ms=3, label=name)
    left.set(xscale="log", yscale="log", xlabel="KL(π‖ref) in nats", title="deviation / KL")
    left.set_ylabel("of one sequence")
    left.legend()
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
    right.grid(visible=False, axis="y")
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
        medians = [
            common.number(float(jnp.median(measurement.divergence))) for measurement in (far, near)
        ]
        distances = (
            f"Median KL(π‖ref): {medians[0]} nats far, {medians[1]} near; {number} policies."
        )
        parts = {"uses": uses, "values": values, "distance": distances}
        criteria = checks(far, near)

    def draw() -> Figure:
        with jax.enable_x64(True):
            return figure(far)

    return Result(parts, criteria, draw)


if __name__ == "__main__":
    common.command(NAME, run)
