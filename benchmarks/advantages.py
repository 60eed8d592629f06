"""What advantages cost: recipes on [P, G], parts on [P, G, T], beside TRL's and verl's formulas.

    python -m benchmarks.advantages

Limits: a recipe on 4096 x 16 samples 1 ms (with a tracker 5 ms); on tokens 4 times a copy of
the arrays it reads, 8 times where it takes quantiles. The peers' formulas are written out in torch
and run on the same rewards, in turn with ours; without torch they are left out, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from benchmarks import contest
from benchmarks.common import interval, keep_memory, report
from benchmarks.contest import Row, in_turn, over, timer, within
from jaxgrpo import advantages as adv
from jaxgrpo.advantages import registry
from jaxgrpo.core.types import Rollouts, Signal

P, G = 4096, 16
TOKEN_SHAPE = (256, 16, 1024)
RECIPE_SECONDS, TRACKER_SECONDS = 1e-3, 5e-3
TOKEN_COPIES, QUANTILE_COPIES = 4.0, 8.0


def rollouts(shape: tuple[int, int, int], seed: int = 0) -> Rollouts:
    """Rollouts with every field that a part reads by default, of random numbers."""
    random = np.random.default_rng(seed)
    num_prompts, group_size, tokens = shape

    def logp(*shape: int) -> np.ndarray:
        return -random.exponential(size=shape).astype(np.float32)

    mask = np.arange(tokens) < random.integers(1, tokens + 1, (num_prompts, group_size, 1))
    branch = random.integers(0, 2, shape[:2])
    leaf = 3 + np.broadcast_to(np.arange(group_size), shape[:2])
    fields = {
        **{name: logp(*shape) for name in ("reference_logp", "base_logp", "trainer_logp")},
        "token_entropy": -logp(*shape),
        "token_value": logp(*shape),
        "planning": random.random(shape) < 0.1,
        "answer_logp": logp(*shape),
        "answer_mask": mask[:, 0],
        "masked_answer_logp": logp(num_prompts, tokens),
        "rubric": random.integers(0, 2, shape[:2]).astype(np.float32),
        "classes": random.integers(0, 4, shape[:2]).astype(np.int32),
        "tree": branch.astype(np.int32),
        "ancestors": np.stack([0 * leaf, 1 + branch, leaf], -1).astype(np.int32),
        "token_depth": np.broadcast_to(np.arange(tokens) * 3 // tokens, shape).astype(np.int32),
    }
    rewards = {
        "correct": random.integers(0, 2, shape[:2]).astype(np.float32),
        "style": random.normal(size=shape[:2]).astype(np.float32),
    }
    everything: dict[str, Any] = {
        "prompt_tokens": np.zeros((num_prompts, 1), np.int32),
        "prompt_mask": np.ones((num_prompts, 1), bool),
        "completion_tokens": random.integers(0, 99, shape).astype(np.int32),
        "token_mask": mask,
        "behavior_logp": fields["trainer_logp"] + 1e-3 * logp(*shape),
        "rewards": rewards,
        "truncated": random.random(shape[:2]) < 0.1,
        "ordinal": np.arange(num_prompts, dtype=np.int32),
        "row": random.integers(0, num_prompts, num_prompts).astype(np.int32),
        "policy_version": np.zeros(shape[:2], np.int32),
        "step": np.int32(0),
        "fields": fields,
    }
    return jax.tree.map(jnp.asarray, Rollouts(**everything))


class Case:
    """A chain on rollouts, or on a signal of tokens; compiled as a function of what it reads."""

    def __init__(
        self, recipe: adv.AdvantageTransform, batch: Rollouts, signal: Signal | None = None
    ):
        state = recipe.init(adv.spec_of(batch, num_rows=batch.row.shape[0]))
        self.tracks = bool(jax.tree.leaves(state))
        self.needs = recipe.needs

        def run_recipe(signal: Signal | None, batch: Rollouts, state: Any) -> Any:
            if signal is None:
                return adv.compute(recipe, batch, state)
            return recipe.update(signal, state, batch)

        leaves, structure = jax.tree.flatten((signal, batch, state))
        traced, shapes = jax.make_jaxpr(run_recipe, return_shape=True)(signal, batch, state)
        self.rank = len(shapes[0].value.shape)
        _, used = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
        self.reads = [leaf for leaf, is_used in zip(leaves, used, strict=True) if is_used]
        returns = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes[0])]
        self.copied = max(
            self.reads, returns, key=lambda arrays: sum(array.nbytes for array in arrays)
        )
        self.traces: list[None] = []

        def run(reads: list[jax.Array]) -> Any:
            self.traces.append(None)
            remaining = iter(reads)
            filled = [
                next(remaining) if is_used else leaf
                for leaf, is_used in zip(leaves, used, strict=True)
            ]
            return run_recipe(*jax.tree.unflatten(structure, filled))

        self.run = jax.jit(run)

    def timer(self) -> Callable[[int], float]:
        return timer(self.run, self.reads)

    def refuse_further_traces(self, name: str) -> None:
        assert len(self.traces) == 1, f"{name} compiled more than once"


@jax.jit
def copied(arrays: list[jax.Array]) -> list[jax.Array]:
    """New arrays of the same sizes: what reading and writing them costs."""
    return [~leaf if leaf.dtype == bool else leaf + 1 for leaf in arrays]


def peers(rewards: np.ndarray) -> dict[str, Callable[[int], float]]:
    """TRL's and verl's group advantage in torch, on the same rewards."""
    try:
        import torch
    except ImportError:
        return {}
    values = torch.from_numpy(np.array(rewards))
    flat, index = values.reshape(-1), torch.arange(values.numel()) // G

    per_function, weights = flat[:, None], torch.ones(1)

    def deviation(groups: Any) -> Any:
        scored = ~torch.isnan(groups)
        squares = torch.nanmean((groups - torch.nanmean(groups, 1, keepdim=True)) ** 2, 1)
        number = scored.sum(1)
        squares = torch.where(number > 1, squares * number / (number - 1), torch.nan)
        return torch.sqrt(squares)

    def trl() -> Any:
        missing = torch.isnan(per_function).all(1)
        total = (per_function * weights[None]).nansum(1)
        total[missing] = torch.nan
        groups = total.view(-1, G)
        centre = torch.nanmean(groups, 1).repeat_interleave(G)
        scale = deviation(groups).repeat_interleave(G)
        value = (total - centre) / (scale + 1e-4)
        flat_groups = torch.isclose(scale, torch.zeros_like(scale))
        return torch.nan_to_num(value, nan=0.0), flat_groups

    def verl() -> Any:
        number = torch.zeros(P).index_add_(0, index, torch.ones_like(flat))
        centre = torch.zeros(P).index_add_(0, index, flat) / number
        residual = flat - centre[index]
        squares = torch.zeros(P).index_add_(0, index, residual * residual)
        scale = torch.sqrt(squares / (number - 1).clamp(min=1))
        return residual / (scale[index] + 1e-6)

    return {"TRL (torch)": timer(trl), "verl (torch)": timer(verl)}


TOKEN_PARTS: dict[str, dict[str, Any]] = {
    "clip_advantage": {"limit": 2.0},
    "whiten_batch": {},
    "hicra": {"alpha": 0.2},
    "kl_in_reward": {"beta": 0.01},
    "reward_to_go": {},
    "gae": {"gamma": 1.0, "lam": 1.0},
    "truncated_importance": {"level": "token"},
    "masked_importance": {"level": "token"},
    "geometric_rejection": {},
    "sequence_rejection": {},
    "token_share_weights": {},
}
"""Parts that take a signal of tokens."""
QUANTILES = {"reflection_top": {"kind": "top"}}
"""R3 by the highest share of its tokens, which takes a quantile per prompt."""


def several(name: str) -> dict[str, float]:
    """Recipes of several rewards get both; others the one in {0, 1}."""
    uses_both = name in ("gdpo", "dvao", "like_trl")
    return {"correct": 1.0, "style": 1.0 if uses_both else 0.0}


def cases(names: set[str] | None) -> tuple[dict[str, Case], dict[str, Case]]:
    """(recipes on samples, recipes and parts on tokens)."""
    samples, tokens = rollouts((P, G, 1)), rollouts(TOKEN_SHAPE)
    is_selected = lambda name: names is None or name in names  # noqa: E731
    on_samples, on_tokens = {}, {}
    for name in filter(is_selected, registry.recipes):
        recipe = adv.build(name, {"weights": several(name)})
        case = Case(recipe, tokens)
        reads_tokens = case.rank == 3 or any(leaf.ndim == 3 for leaf in case.reads)
        on_tokens |= {name: case} if reads_tokens else {}
        on_samples |= {} if reads_tokens else {name: Case(recipe, samples)}
    for name, options in filter(lambda item: is_selected(item[0]), TOKEN_PARTS.items()):
        mask = tokens.token_mask
        signal = Signal(value=jnp.where(mask, tokens.fields["token_value"], 0), mask=mask)
        on_tokens[name] = Case(adv.chain(registry.parts[name](**options)), tokens, signal)
    for name, options in filter(lambda item: is_selected(item[0]), QUANTILES.items()):
        step = {"use": "reasoning_reflection", **options}
        summed = {"use": "sum_rewards", "correct": 1.0, "style": 0.0, "r3": 1.0}
        on_tokens[name] = Case(adv.build([step, summed]), tokens)
    return on_samples, on_tokens


def main() -> None:
    parser = contest.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--only", nargs="*", help="names of recipes or parts")
    arguments = parser.parse_args()
    keep_memory("benchmarks.advantages")
    about, console = contest.begin()
    on_samples, on_tokens = cases(set(arguments.only) if arguments.only else None)
    rivals = peers(np.asarray(rollouts((P, G, 1)).rewards["correct"]))
    if not rivals:
        console.print("torch is not installed: the peers' formulas are left out")
    columns = ("recipe", "us", "95%", "limit", "within")
    rows = measure_samples(on_samples, rivals, arguments.repeats)
    result = contest.show(console, columns, rows, f"{P} x {G} samples")
    columns = ("chain", "ms", "copies", "95%", "limit", "within")
    rows = measure_tokens(on_tokens, max(5, arguments.repeats // 5))
    title = " x ".join(map(str, TOKEN_SHAPE)) + " tokens"
    report({**about, **result, **contest.show(console, columns, rows, title)})


def measure_samples(
    cases: Mapping[str, Case], rivals: Mapping[str, Callable[[int], float]], repeats: int
) -> Iterator[Row]:
    """Recipes on [P, G] and the peers' formulas, in microseconds."""
    timers = {name: case.timer() for name, case in cases.items()}
    for name, values in in_turn({**timers, **rivals}, repeats, warm_up=1).items():
        median, low, high = interval([1e6 * value for value in values])
        limit = None
        if name in cases:
            limit = (TRACKER_SECONDS if cases[name].tracks else RECIPE_SECONDS) * 1e6
            cases[name].refuse_further_traces(name)
        ends = f"{low:.0f} .. {high:.0f}"
        cells = (f"{median:.0f}", ends, f"{limit or '':}", within(median, limit))
        yield name, cells, {"us": round(median, 1)}


def measure_tokens(cases: Mapping[str, Case], repeats: int) -> Iterator[Row]:
    """Chains on [P, G, T], as multiples of a copy of what they read."""
    for name, case in cases.items():
        timers = {"chain": case.timer(), "copy": timer(copied, case.copied)}
        spent = in_turn(timers, repeats, warm_up=1)
        copies = over(spent["chain"], spent["copy"])
        limit = QUANTILE_COPIES if name in QUANTILES else TOKEN_COPIES
        case.refuse_further_traces(name)
        yield (
            name,
            (
                f"{1e3 * float(np.median(spent['chain'])):.1f}",
                f"{copies.median:.2f}",
                copies.ends,
                f"{limit:.0f}",
                within(copies.median, limit),
            ),
            {"copies": round(copies.median, 2)},
        )


if __name__ == "__main__":
    main()
