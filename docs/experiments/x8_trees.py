"""X8: samples that grow as the leaves of trees against chains, per token that is drawn.

python -m docs.experiments.x8_trees            # all, with the runs of x8_trees.toml
python -m docs.experiments.x8_trees --exact    # what is enumerated alone
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.bandit import Bandit
from docs.experiments.common import Check, Result, below
from docs.experiments.trained import Compared, take
from docs.experiments.x2_closed_forms import signal_to_noise
from docs.experiments.x3_advantages import BASE
from jaxgrpo import advantages
from jaxgrpo.advantages import sum_rewards, to_tokens, token_share_weights
from jaxgrpo.experiments.compare import report
from jaxgrpo.rollout import trees

NAME = "x8_trees"
LENGTH, TREES, BRANCHES = 6, 2, 2
LEAVES = TREES * BRANCHES
SHARED = range(LENGTH)  # tokens that the two leaves of a tree have in common
SEQUENCES = common.sequences(2, LENGTH)  # [64, T]
ONES, HALF = SEQUENCES.sum(1), LENGTH // 2
RIGHT = {
    "parity": ONES % 2,
    "the last half": SEQUENCES[:, HALF:].all(1),
    "more ones than zeros": ONES > HALF,
    "a random quarter": None,
    "all tokens": ONES == LENGTH,
    "the first half": SEQUENCES[:, :HALF].all(1),
}
"""What decides whether a sequence is right -> where it is; None: drawn with the policy."""

SEEDS = 4
RECIPES: dict[str, Any] = {
    "`dr_grpo`": "dr_grpo",
    "`tree_grpo`": "tree_grpo",
    "`tree_po`, not whitened": [sum_rewards(), advantages.tree_subgroup()],
    "`tree_rl`": "tree_rl",
    "`tree_process`, local": [sum_rewards(), advantages.tree_process(0.0, 1.0, 0.0)],
    "`dr_grpo`, shared tokens once": [
        *(sum_rewards(), advantages.subtract_group_mean(), to_tokens(), token_share_weights())
    ],
}


class Problem(NamedTuple):
    """A policy over sequences of bits, with a softmax for each prefix, and which are right."""

    policy: np.ndarray  # [N]
    right: np.ndarray  # [N] of 0 and 1
    score: np.ndarray  # [N, T, parameters], grad log pi of each token

    @property
    def rate(self) -> float:
        return float(self.policy @ self.right)

    @property
    def slope(self) -> np.ndarray:
        """The gradient of the success rate."""
        return (self.policy * self.right) @ self.score.sum(1)


@functools.cache
def make_policy(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Policy and score of a problem."""
    random = np.random.default_rng(seed)
    logits = jnp.asarray(0.5 * random.normal(size=(2**LENGTH - 1, 2)))
    state = common.prefixes(SEQUENCES, 2)

    def token_logp(logits: jax.Array) -> jax.Array:
        return common.token_logp(logits, state, SEQUENCES)

    score = jax.jacobian(token_logp)(logits).reshape(*SEQUENCES.shape, -1)
    return np.exp(np.asarray(token_logp(logits).sum(1))), np.asarray(score)


def make_problem(right: np.ndarray | None, seed: int) -> Problem:
    policy, score = make_policy(seed)
    if right is None:
        order = np.random.default_rng(seed).permutation(len(SEQUENCES))
        right = order < len(SEQUENCES) // 4
    return Problem(policy, np.asarray(right, float), score)


def tree_fields(shared: int) -> dict[str, np.ndarray]:
    """What a run brings with two trees, each of a chain and a branch behind so many tokens."""
    logp = np.zeros(LENGTH)
    leaves = [
        trees.Leaf(sample // 2, sample - sample % 2, shared * (sample % 2), logp)
        for sample in range(LEAVES)
    ]
    grown = trees.Trees("uniform", TREES, BRANCHES - 1, 1, 1, 1, LEAVES, LENGTH)
    return dict(
        zip(("tree", "ancestors", "token_depth"), trees.fields(grown, leaves, LENGTH), strict=True)
    )


def tree_advantages(recipe: Any) -> np.ndarray:
    """By shared tokens and pattern of rewards, of shared and of further tokens:
    [SHARED, 2, 2, 2, 2, leaf, 2]."""
    patterns = np.array(list(itertools.product([0.0, 1.0], repeat=LEAVES)))
    chain = advantages.build(recipe)
    rewards = np.tile(patterns, (len(SHARED), 1))
    batch: dict[str, Any] = {"token_mask": np.ones((*rewards.shape, LENGTH), bool)}
    for name in chain.needs:
        values = np.stack([tree_fields(shared)[name] for shared in SHARED])
        batch[name] = np.repeat(values, len(patterns), 0)
    value = np.asarray(advantages.evaluate(chain, rewards, **batch)[0])
    if value.ndim == 2:
        value = np.repeat(value[..., None], LENGTH, -1)
    return value[..., [0, -1]].reshape(len(SHARED), *(2,) * LEAVES, LEAVES, 2)


class Tree(NamedTuple):
    """One tree, by which of its two leaves are right: 4 patterns, in binary."""

    chance: np.ndarray  # [4]
    mean: np.ndarray  # [4, 4, parameters]: of the scores of (leaf, shared or further tokens)
    square: np.ndarray  # [4, 4, 4]: of their inner products
    within: np.ndarray  # [N], that the sequence is a leaf
    common: float  # share of the noise of (r - p) grad log pi that the shared part decides


def enumerate_tree(problem: Problem, shared: int) -> Tree:
    """All trees of a beginning and two ends."""
    begins, ends = 2**shared, 2 ** (LENGTH - shared)
    rows = np.array(list(itertools.product(range(begins), range(ends), range(ends))))
    leaves = rows[:, :1] * ends + rows[:, 1:]  # [R, 2]
    begin_chance = problem.policy.reshape(begins, ends).sum(1)
    chance = problem.policy[leaves].prod(1) / begin_chance[rows[:, 0]]
    parts = np.stack([problem.score[:, :shared].sum(1), problem.score[:, shared:].sum(1)], 1)
    scores = parts[leaves].reshape(len(rows), 4, -1)
    pattern = (problem.right[leaves] @ [2, 1]).astype(int)
    by_pattern = np.where(pattern == np.arange(4)[:, None], chance, 0)  # [4, R]
    total = by_pattern.sum(1)
    share = by_pattern / np.maximum(total, 1e-300)[:, None]
    inner = scores @ scores.transpose(0, 2, 1)
    mean, square = (np.tensordot(share, x, 1) for x in (scores, inner))
    within = np.zeros(len(problem.policy))
    np.add.at(within, leaves[:, 0], chance)
    np.add.at(within, leaves[:, 1], np.where(leaves[:, 0] == leaves[:, 1], 0, chance))
    term = (problem.right - problem.rate)[:, None] * problem.score.sum(1)
    signal = (problem.slope**2).sum()
    by_begin = (problem.policy[:, None] * term).reshape(begins, ends, -1).sum(1)
    between = ((by_begin**2).sum(1) / begin_chance).sum() - signal
    noise = problem.policy @ (term**2).sum(1) - signal
    return Tree(total, mean, square, within, float(between / noise))


class Group(NamedTuple):
    """The gradient of one group, (1/G) sum of A grad log pi, and what it was drawn for."""

    noise: float  # tr Cov g / (E g . u)^2 x tokens, u the direction of grad p
    cosine: float  # of E g and grad p
    flat: float  # chance that all leaves agree
    distinct: float  # different sequences
    tokens: int  # drawn

    @property
    def new_per_token(self) -> float:
        return self.distinct / self.tokens


def describe(problem: Problem, tree: Tree, shared: int, advantage: np.ndarray) -> Group:
    """Of two independent trees.

    Args:
      advantage: of every pattern of rewards, as `tree_advantages`.
    """
    value = advantage.reshape(4, 4, TREES, 4) / LEAVES  # [pattern, pattern, tree, (leaf, part)]
    chance = tree.chance[:, None] * tree.chance
    first = np.einsum("abi,aik->abk", value[:, :, 0], tree.mean)
    second = np.einsum("abi,bik->abk", value[:, :, 1], tree.mean)
    expected = np.tensordot(chance, first + second, 2)
    square = np.einsum("abi,aij,abj->ab", value[:, :, 0], tree.square, value[:, :, 0])
    square += np.einsum("abi,bij,abj->ab", value[:, :, 1], tree.square, value[:, :, 1])
    square += 2 * (first * second).sum(-1)
    norm = np.linalg.norm(problem.slope)
    along = expected @ problem.slope / norm
    tokens = TREES * (shared + BRANCHES * (LENGTH - shared))
    return Group(
        float(((chance * square).sum() - expected @ expected) / along**2 * tokens),
        float(along / np.linalg.norm(expected)),
        float(chance[0, 0] + chance[3, 3]),
        float((1 - (1 - tree.within) ** TREES).sum()),
        tokens,
    )


def fixed_baseline(problem: Problem) -> np.ndarray:
    """A = r - p of every pattern of rewards, as `tree_advantages`."""
    patterns = np.array(list(itertools.product([0.0, 1.0], repeat=LEAVES)))
    value = np.repeat((patterns - problem.rate)[..., None], 2, -1)
    return value.reshape(*(2,) * LEAVES, LEAVES, 2)


class Case(NamedTuple):
    """A problem and a shared part: groups of trees, each beside chains of as many samples."""

    kind: str
    shared: int
    common: float  # of `Tree`
    fixed: float  # noise per token with A = r - p: trees over chains
    groups: dict[str, Group]  # by recipe
    chains: Group  # of `dr_grpo`

    def ratio(self, recipe: str = "`dr_grpo`") -> float:
        """Noise per token, trees with a recipe over chains with `dr_grpo`."""
        return self.groups[recipe].noise / self.chains.noise

    @property
    def bound(self) -> float:
        """With A = r - p trees are less noisy per token where `common` is below it."""
        share = self.shared / LENGTH
        return share / (BRANCHES - (BRANCHES - 1) * share)

    @property
    def formula(self) -> float:
        """What `fixed` should be."""
        saved = self.shared / LENGTH * (BRANCHES - 1) / BRANCHES
        return (1 - saved) * (1 + (BRANCHES - 1) * self.common)


def find() -> list[Case]:
    """Every problem with every shared part."""
    tables = {name: tree_advantages(recipe) for name, recipe in RECIPES.items()}
    cases = []
    for kind, right in RIGHT.items():
        for problem in [make_problem(right, seed) for seed in range(SEEDS)]:
            grown = [enumerate_tree(problem, shared) for shared in SHARED]
            fixed = [
                describe(problem, tree, shared, fixed_baseline(problem)).noise
                for shared, tree in enumerate(grown)
            ]
            chains = describe(problem, grown[0], 0, tables["`dr_grpo`"][0])
            for shared, tree in enumerate(grown):
                groups = {
                    name: describe(problem, tree, shared, tables[name][shared]) for name in RECIPES
                }
                ratio = fixed[shared] / fixed[0]
                cases.append(Case(kind, shared, tree.common, ratio, groups, chains))
    return cases


def checks(cases: Sequence[Case]) -> list[Check]:
    grown = [case for case in cases if case.shared]
    quieter = {
        short: [case.ratio() < 1 for case in grown if (2 * case.shared <= LENGTH) == short]
        for short in (True, False)
    }
    counts = [f"{sum(cases)} of {len(cases)}" for cases in quieter.values()]
    flatter = [case.groups["`dr_grpo`"].flat - case.chains.flat for case in grown]
    parity, begins = (
        medians(cases, kind, lambda case: case.ratio()) for kind in ("parity", "the first half")
    )
    noisier = sum(case.ratio() > case.fixed for case in grown)
    return [
        below("A = r − p: trees over chains = (1 − s (b − 1)/b) (1 + (b − 1) c)",
              [case.fixed - case.formula for case in cases]),
        below("four chains: signal to noise by trees that share nothing = by X2's classes",
              chain_errors()),
        Check("trees are flat at least as often as chains, in every case",
              f"by {min(flatter):.3f} to {max(flatter):.3f}", min(flatter) > -1e-12),
        Check("trees are less noisy per token with half or less in common too (and with more)",
              f"{counts[0]} ({counts[1]})", sum(quieter[True]) > 0),
        Check("right by parity: trees are less noisy at every share (medians)",
              f"{min(parity):.2f} to {max(parity):.2f} times", max(parity) < 1),
        Check("right by the first half: they are noisier at every share (medians)",
              f"{min(begins):.2f} to {max(begins):.2f} times", min(begins) > 1),
        Check("compared with chains, trees are noisier with the group's mean than with r − p in"
              " most cases", f"{noisier} of {len(grown)}", 2 * noisier > len(grown)),
    ]  # fmt: skip


def chain_errors() -> list[float]:
    """X2's signal to noise of the chains of each rule, less that of the trees."""
    value = tree_advantages("dr_grpo")[0]
    rewards = np.array(list(itertools.product([0.0, 1.0], repeat=LEAVES)))
    errors = []
    for right in RIGHT.values():
        problem = make_problem(right, 0)
        chains = describe(problem, enumerate_tree(problem, 0), 0, value)
        game = Bandit(problem.policy, problem.right.astype(bool), problem.score.sum(1))
        ratio = signal_to_noise(game, rewards, value.reshape(-1, LEAVES, 2)[..., 0])
        errors.append(chains.tokens / chains.noise - ratio)
    return errors


def medians(cases: Sequence[Case], kind: str, number: Any) -> list[float]:
    """The median over the problems of a kind, by shared tokens from 1 on."""
    return [
        float(np.median([number(case) for case in cases if (case.kind, case.shared) == (kind, n)]))
        for n in SHARED[1:]
    ]


def tables(cases: Sequence[Case]) -> dict[str, str]:
    head = [f"{shared}/{LENGTH}" for shared in SHARED[1:]]
    numbers = {
        "noise": lambda case: case.ratio(),
        "common": lambda case: case.common,
        "flat": lambda case: case.groups["`dr_grpo`"].flat - case.chains.flat,
        "fixed": lambda case: case.fixed,
    }
    parts = {
        name: common.table(
            ["right by", *head], [[kind, *medians(cases, kind, number)] for kind in RIGHT]
        )
        for name, number in numbers.items()
    }
    half = [case for case in cases if 2 * case.shared == LENGTH]
    rows = []
    for name in RECIPES:
        by_kind = [[case for case in half if case.kind == kind] for kind in RIGHT]
        ratios = [float(np.median([case.ratio(name) for case in same])) for same in by_kind]
        rows.append([name, *ratios, min(case.groups[name].cosine for case in half)])
    parts["distinct"] = common.table(head, [medians(cases, "parity", new_leaves)])
    return parts | {"recipes": common.table(["advantage", *RIGHT, "least cosine"], rows)}


def figure(cases: Sequence[Case]) -> Figure:
    """Noise, flat groups and different leaves over the shared part."""
    drawing, (left, middle, right) = common.panels(3, 10.8, 3.4)
    share = [shared / LENGTH for shared in SHARED[1:]]
    for kind in RIGHT:
        left.plot(share, medians(cases, kind, lambda case: case.ratio()), "o-", ms=3)
        flat = medians(cases, kind, lambda case: case.groups["`dr_grpo`"].flat - case.chains.flat)
        middle.plot(share, flat, "o-", ms=3, label=kind)
    new = medians(cases, "parity", new_leaves)
    right.plot(share, new, "ko-", ms=3)
    left.axhline(1, color="k", lw=0.8)
    middle.legend(fontsize=6.5, title="right by", title_fontsize=7)
    left.set(title="noise per token, trees over chains", xlabel="share in common")
    middle.set(title="flat groups, trees minus chains", xlabel="share in common")
    right.set(title="different leaves per token", xlabel="share in common")
    return drawing


def new_leaves(case: Case) -> float:
    """Different leaves per token, trees over chains."""
    return case.groups["`dr_grpo`"].new_per_token / case.chains.new_per_token


def exact() -> Result:
    """What is enumerated."""
    with jax.enable_x64(True):
        cases = find()
    return Result(tables(cases), checks(cases), lambda: figure(cases))


def trained(comparison: Compared) -> dict[str, str]:
    """Parts of the page about the runs."""
    by_title = {section.title: section for section in report.sections(*comparison)}
    answer, _, best = list(by_title.values())[:3]
    head, *lines = best.rows
    rows = []
    for arm, runs in report.best_runs(*comparison).items():
        tokens, flat, seconds = (
            float(np.mean([read(run) for run in runs]))
            for read in (
                lambda run: run.numbers["tokens"],
                lambda run: 1 - run.numbers["groups/mixed"],
                lambda run: run.numbers["time/seconds"],
            )
        )
        rows.append([arm, f"{tokens:,.0f}", flat, f"{seconds:.0f}"])
    return {
        "answer": "\n\n".join(answer.text),
        "trained": common.table(head, lines),
        "cost": common.table(["arm", "tokens drawn in a run", "flat groups", "seconds"], rows),
    }


def run() -> Result:
    """All of it. Takes the runs that are missing."""
    result = exact()
    return result._replace(parts=result.parts | trained(take(NAME, "arithmetic", BASE)))


if __name__ == "__main__":
    common.command(NAME, exact if "--exact" in sys.argv else run)
