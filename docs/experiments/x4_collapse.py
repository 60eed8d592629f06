"""X4: a penalty against the base makes a misspecified policy collapse; divergences need not.

python -m docs.experiments.x4_collapse
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.bigram import (
    DRAWS,
    SHAPE,
    STARTS,
    N,
    Numbers,
    Task,
    at,
    count_matched,
    descend,
    describe,
    describe_all,
    divergence,
    kl_control,
    log_policy,
    single_sequence,
    stack,
    sweep,
    task,
)
from docs.experiments.common import Check, Result, below
from jaxgrpo import advantages

NAME = "x4_collapse"
TABLE = (3.0, 5.0, 10.0, 30.0)
SWEEP = np.arange(3, 6.01, 0.1)
ALPHAS = (0.0, 0.25, 0.5, 0.75)
SURVEY = 20


UNIFORM, RANDOM = task(3, 8, 0), task(1, 12, 1)


class Threshold(NamedTuple):
    """Where the optimum leaves the covering policies, observed and predicted, as 1 / b."""

    before: float  # last point of the sweep with E v < 1/2
    after: float  # the next one
    single: float  # predicted: the likeliest valid sequence alone beats the base
    fully_valid: float  # predicted: the nearest policy without a failure beats the base
    margin: float  # of the optima over the best of these and the base; not negative
    room: float  # of the free table's value over the optima; not negative


def threshold(problem: Task, numbers: Numbers, nearest: float) -> Threshold:
    """b = (1 - mu_c) / (KL of the collapsed - KL of q_c), where q_c is the base: KL 0, mu its rate.

    From the sweep, [S] each, and KL(nearest fully valid policy || base).
    """
    success = np.asarray(numbers.success)
    jump = int(np.argmax(success > 0.5))
    rate = float(problem.rate())
    alone = -float(problem.log_base()[single_sequence(problem)])
    value = success - np.asarray(numbers.kl) / SWEEP
    alternatives = np.maximum(rate, 1 - min(alone, nearest) / SWEEP)
    free = np.log(1 - rate + rate * np.exp(SWEEP)) / SWEEP
    return Threshold(
        float(SWEEP[jump - 1]),
        float(SWEEP[jump]),
        alone / (1 - rate),
        nearest / (1 - rate),
        float((value - alternatives).min()),
        float((free - value).min()),
    )


def pseudo_reward_errors(problem: Task) -> list[float]:
    """E[R grad log pi] of jaxgrpo's alpha_dpg against -(1 - alpha) grad D_alpha."""
    errors = []
    for seed, alpha in enumerate(ALPHAS):
        logits = jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE))
        part = advantages.alpha_dpg(alpha, cap=1e9, base_rate="rate")
        reward, _ = advantages.evaluate(
            advantages.chain(advantages.sum_rewards(), part),
            problem.valid[:, None] * 1.0,
            behavior_logp=log_policy(logits)[:, None, None],
            base_logp=problem.log_base()[:, None, None],
            token_mask=jnp.ones((N, 1, 1), bool),
            rate=jnp.full(N, problem.rate()),
        )
        weight = jnp.exp(log_policy(logits)) * reward[:, 0]
        expected = jnp.einsum("n,nsv->sv", weight, jax.jacobian(log_policy)(logits))
        exact = -(1 - alpha) * jax.grad(divergence)(logits, problem, jnp.asarray(alpha))
        errors.append(float(jnp.abs(expected - exact).max()))
    return errors


class Free(NamedTuple):
    """KL-control of a free table of 81 logits, by descent, against the closed forms."""

    push: np.ndarray  # [S], 1 / b
    success: np.ndarray
    errors: dict[str, np.ndarray]  # relation -> differences
    shared: float  # mean success of several prompts under the beta of target_validity(.9)


def free_table(problem: Task, prompts: Task) -> Free:
    """What the descent finds, where the policy can be anything."""
    push = np.array([0.25, 0.5, 1, 2, 3, 4, 5, 6])
    solve = jax.jit(
        lambda problem, push: descend(
            lambda logits: kl_control(logits, problem, push) * push, problem.log_base(), 3000
        )[0]
    )
    logits = jax.vmap(solve, (None, 0))(problem, jnp.asarray(push))
    numbers = jax.vmap(describe, (0, None))(logits, problem)
    rate, beta = problem.rate(), jnp.asarray(1 / push)
    logp = jax.vmap(log_policy)(logits)
    to_target = (problem.target() * (problem.log_target() - logp)).sum(1)
    rates = jax.vmap(Task.rate)(prompts)
    validity = advantages.target_validity(0.9, rates)
    many = jax.vmap(solve, (0, None))(prompts, 1 / validity.beta)
    each = jax.vmap(describe)(many, prompts).success
    errors = {
        "E v = mu(b)": numbers.success - advantages.mu_of_beta(beta, rate),
        "b = b(E v)": advantages.beta_of_mu(numbers.success, rate) / beta - 1,
        "KL(π‖a) = kappa(E v)": numbers.kl - advantages.kappa(numbers.success, rate),
        "KL(p_*‖π) = −log E v": to_target + jnp.log(numbers.success),
        f"target_validity = 0.9 of {len(rates)} prompts": each.mean() - 0.9,
    }
    return Free(
        push, np.asarray(numbers.success), jax.tree.map(np.asarray, errors), float(each.mean())
    )


def policy_rows(names: list[str], numbers: Numbers, problem: Task) -> list[list[Any]]:
    """The target first, then each policy."""
    target = np.asarray(problem.target())
    met = float((target * (1 - (1 - target) ** DRAWS)).sum())
    entropy = -float((target * problem.log_target()).sum())
    rows: list[list[Any]] = [
        ["p_* itself", 1.0, target.max(), int((target > 0.01).sum()), met, entropy, "–"]
    ]
    for index, name in enumerate(names):
        policy = at(numbers, index)
        *first, kl = policy._replace(frequent=int(policy.frequent))
        rows.append([name, *first, kl])
    return rows


class Findings(NamedTuple):
    control: Numbers  # [2 tasks, len(TABLE)]
    alphas: Numbers  # [2 tasks, len(ALPHAS)]
    swept: Numbers  # [2 tasks, len(SWEEP)]
    thresholds: list[Threshold]
    reached: tuple[float, float]  # least share of starts at the best: KL-control, divergences
    survey: tuple[Numbers, Numbers]  # of SURVEY tasks, [SURVEY, 1]: 1 / b = 10, alpha = 0
    free: Free
    closed: np.ndarray  # alpha 0 by descent less the closed form, success


def find() -> Findings:
    tasks = stack([UNIFORM, RANDOM])
    control, reached = sweep(kl_control, tasks, TABLE)
    apart, reached_apart = sweep(divergence, tasks, ALPHAS)
    along, _ = sweep(kl_control, tasks, SWEEP, 2000)
    collapsed, _ = sweep(kl_control, tasks, [200.0])
    swept = describe_all(along, tasks)
    nearest = describe_all(collapsed, tasks).kl[:, 0]
    many = stack([task(seed, 12, 1) for seed in range(SURVEY)])
    survey = tuple(
        describe_all(sweep(loss, many, [strength], 2000)[0], many)
        for loss, strength in ((kl_control, 10.0), (divergence, 0.0))
    )
    closed = [log_policy(apart[i, 0]) - log_policy(count_matched(t))
              for i, t in enumerate((UNIFORM, RANDOM))]  # fmt: skip
    return Findings(
        describe_all(control, tasks),
        describe_all(apart, tasks),
        swept,
        [threshold(t, at(swept, i), float(nearest[i])) for i, t in enumerate((UNIFORM, RANDOM))],
        (float(reached.min()), float(reached_apart.min())),
        survey,  # pyright: ignore[reportArgumentType]
        free_table(RANDOM, many),
        np.array([np.abs(np.expm1(np.asarray(each))).max() for each in closed]),
    )


def checks(findings: Findings) -> list[Check]:
    ten = TABLE.index(10.0)
    top = float(findings.control.top[1, ten])
    cover = [
        float(coverage)
        for coverage in (findings.alphas.coverage[1, 0], findings.control.coverage[1, ten])
    ]
    criteria = [
        Check("random base, 1/b = 10: one sequence has > .9", common.number(top), top > 0.9),
        Check(
            "random base: coverage at alpha = 0 is > 4 times that of KL-control at 1/b = 10",
            f"{cover[0] / cover[1]:.1f} times",
            cover[0] > 4 * cover[1],
        ),
    ]
    for name, jump in zip(("uniform", "random"), findings.thresholds, strict=True):
        where = f"E v passes 1/2 from {jump.before:.1f} to {jump.after:.1f}"
        near = abs(jump.after / jump.fully_valid - 1)
        criteria += [
            Check(
                f"{name} base: the jump comes before 1/b where one sequence alone must beat it",
                f"{where}; {jump.single:.2f}",
                jump.after <= jump.single,
            ),
            Check(
                f"{name} base: within 10% of where the nearest fully valid policy beats it",
                f"{jump.fully_valid:.2f}: {near:.0%} off",
                near < 0.1,
            ),
            Check(
                f"{name} base: the optima are worth more than either, and less than the free table",
                f"by {jump.margin:.1e} and {jump.room:.1e}",
                min(jump.margin, jump.room) > -1e-9,
            ),
        ]
    errors = pseudo_reward_errors(RANDOM)
    criteria.append(below("E[R grad log π] of alpha_dpg = −(1 − alpha) grad D_alpha", errors))
    criteria.append(below("alpha = 0 by descent is the count-matched bigram", findings.closed))
    criteria += [
        below(f"free table: {name}", differences)
        for name, differences in findings.free.errors.items()
    ]
    return criteria


def frontier_rows(findings: Findings) -> list[list[Any]]:
    """Coverage of each alpha beside the best of KL-control at its validity or a higher one."""
    rows: list[list[Any]] = []
    for index, name in enumerate(("uniform", "random")):
        success, coverage = (
            np.concatenate(
                [getattr(findings.swept, field)[index], getattr(findings.control, field)[index]]
            )
            for field in ("success", "coverage")
        )
        for place, alpha in enumerate(ALPHAS):
            policy = at(findings.alphas, index, place)
            best = coverage[success >= float(policy.success) - 1e-3].max()
            rows.append([name, f"{alpha:g}", policy.success, policy.coverage, best])
    return rows


def survey_text(findings: Findings) -> str:
    control, cover = findings.survey
    top, ratio = np.asarray(control.top)[:, 0], np.asarray(cover.coverage / control.coverage)[:, 0]
    few = np.asarray(control.frequent)[:, 0]
    success = np.asarray(cover.success)[:, 0]
    return (
        f"Of {SURVEY} random bases, at 1/b = 10: one sequence has more than .9 in"
        f" {(top > 0.9).sum()}, at most two valid sequences are above 1% in {(few <= 2).sum()}."
        f" Median top mass {np.median(top):.2f}; coverage at alpha = 0 is"
        f" {np.median(ratio):.1f} times that of KL-control (median;"
        f" {ratio.min():.1f} to {ratio.max():.1f}), at a validity of {np.median(success):.2f}."
        f" The best value is reached, to 1e-4, by at least {STARTS * findings.reached[0]:.0f} of"
        f" {STARTS} starts under KL-control and {STARTS * findings.reached[1]:.0f} under a"
        " divergence."
    )


def figure(findings: Findings) -> Figure:
    """E v and top mass over 1/b; the plane of validity and coverage; mu(b)."""
    drawing, (left, middle, right) = common.panels(3, 10.8, 3.5)
    for index, (name, colour) in enumerate((("uniform", "C0"), ("random", "C1"))):
        left.plot(
            SWEEP, findings.swept.success[index], "o-", ms=2.5, color=colour, label=f"{name}: E v"
        )
        left.plot(
            SWEEP, findings.swept.top[index], ":", color=colour, label=f"{name}: top sequence"
        )
        left.axvline(findings.thresholds[index].fully_valid, color=colour, lw=0.8, ls="--")
    left.set(xlabel="1/b", title="KL-control, bigram policy", ylim=(0, 1))
    left.text(3.02, 0.93, "dashed: predicted", fontsize=7)
    left.legend(fontsize=7, loc="center right")
    for index, (name, colour) in enumerate((("uniform", "C0"), ("random", "C1"))):
        swept, alphas = at(findings.swept, index), at(findings.alphas, index)
        middle.plot(swept.success, swept.coverage, ".", color=colour, label=f"{name}: KL-control")
        middle.plot(
            alphas.success, alphas.coverage, "s", ms=5, color=colour, label=f"{name}: alpha"
        )
        for alpha, x, y in zip(ALPHAS, alphas.success, alphas.coverage, strict=True):
            if alpha >= 0.5 or name == "uniform":
                put = {"va": "bottom" if alpha == 0 else "center", "fontsize": 7}
                middle.annotate(f"   {alpha:g}", (float(x), float(y)), **put)
    middle.set(xlabel="validity E v", title="coverage of p_*, 256 samples")
    middle.set(xlim=(0, 1.12), ylim=(0, 1.02))
    middle.legend(fontsize=7)
    push = np.linspace(0.1, 10, 100)
    right.plot(
        push, advantages.mu_of_beta(jnp.asarray(1 / push), RANDOM.rate()), "k-", label="mu(b)"
    )
    right.plot(findings.free.push, findings.free.success, "o", label="free table, by descent")
    right.plot(SWEEP, findings.swept.success[1], ".", color="C1", label="bigram policy")
    right.set(xlabel="1/b", title="E v, random base", ylim=(0, 1.05))
    right.legend(fontsize=7)
    return drawing


def run() -> Result:
    with jax.enable_x64(True):
        findings = find()
        header = ("policy", "E v", "top sequence", "valid > 1%", "coverage of p_*", "entropy",
                  "KL to base")  # fmt: skip
        names = [*(f"KL-control, 1/b = {push:g}" for push in TABLE),
                 *(f"alpha = {alpha:g}" for alpha in ALPHAS)]  # fmt: skip
        parts = {"survey": survey_text(findings)}
        for index, (name, problem) in enumerate((("uniform", UNIFORM), ("random", RANDOM))):
            halves = [at(findings.control, index), at(findings.alphas, index)]
            joined = Numbers(*(jnp.concatenate(pair) for pair in zip(*halves, strict=True)))
            parts[name] = common.table(header, policy_rows(names, joined, problem))
        rows = zip(("uniform", "random"), findings.thresholds, strict=True)
        parts["thresholds"] = common.table(
            ("base", "E v < 1/2 up to 1/b =", "above from", "predicted: one sequence",
             "predicted: nearest fully valid policy"),
            [[name, f"{jump.before:.1f}", f"{jump.after:.1f}", *jump[2:4]] for name, jump in rows],
        )  # fmt: skip
        parts["frontier"] = common.table(
            ("base", "alpha", "E v", "coverage", "best of KL-control at this E v or more"),
            frontier_rows(findings),
        )
        criteria = checks(findings)

    def draw() -> Figure:
        with jax.enable_x64(True):
            return figure(findings)

    return Result(parts, criteria, draw)


if __name__ == "__main__":
    common.command(NAME, run)
