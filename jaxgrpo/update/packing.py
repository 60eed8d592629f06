"""The update batch: a host plan of who goes where, and the one jitted gather that moves it.

A micro-batch computes a fixed number of tokens, and how many of them there are follows what is
live: samples that teach nothing are left out, a prompt is computed once for as many of its samples
as fit, and several short completions share a row. The plan is a pure function of lengths and live
flags, the same in every process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.core import records
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Mean, Metrics
from jaxgrpo.core.scores import OF_PASS
from jaxgrpo.core.types import Rollouts, TrainBatch
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Constrain, Model
from jaxgrpo.models.recurrence import chunk_size
from jaxgrpo.rollout.dialogue import FORK
from jaxgrpo.update.batch_losses import per_token

ROUND = 32
"""The tokens of a micro-batch are a multiple of this, so that meshes divide them."""

TOKENS = {"cpu": 1280}
"""By platform, the tokens that a bin computes at a time unless a run says otherwise.

On two cores (docs/performance.md) 1024 to 2048 take the same time, and the fewer there are, the
closer the time follows what is live."""
ELSEWHERE = 16384
WITH_EXPERTS = {"cpu": 2560}  # .87 of a step's time (benchmarks/results/2026-11-29-experts.md)


class Geometry(NamedTuple):
    """The static sizes of a run's batches."""

    num_prompts: int  # P
    group_size: int  # G
    max_prompt_tokens: int  # S
    max_completion_tokens: int  # T, and Q, the positions of a row
    bins: int  # D
    tokens: int  # N, of prompts and completions, computed per bin and micro-batch
    minibatches: int = 1  # into which a step's prompts are dealt, one update each
    has_forks: bool = False  # samples have the field `dialogue.FORK`
    records: records.Shapes = ()  # that updates take again
    recurs: bool = False  # models have layers with states, which begin with a chunk

    @property
    def longest(self) -> int:
        """Tokens of the longest row or prompt."""
        return max(self.max_completion_tokens, self.max_prompt_tokens)

    @property
    def samples_per_row(self) -> int | None:
        """The most, for those of a row are of one group; None: any number, some without prompt."""
        return None if self.has_forks else self.group_size

    @property
    def align(self) -> int:
        """Samples of a row begin at multiples of it."""
        return chunk_size(self.max_completion_tokens) if self.recurs else 1

    def for_models(self, models: Iterable[Model]) -> Geometry:
        """The same for updates and scores of these models."""
        return self._replace(recurs=any(model.config.recurs for model in models))

    @property
    def prompts_per_update(self) -> int:
        return self.num_prompts // self.minibatches

    @property
    def widest(self) -> int:
        """The tokens of the longest completion beside its prompt, whose last token opens it."""
        return self.max_prompt_tokens - 1 + self.max_completion_tokens

    @property
    def rows(self) -> int:
        """R, per bin and micro-batch. One more than full rows need, since rows of mixed lengths are
        not full."""
        full = (self.tokens - self.max_prompt_tokens + 1) // self.max_completion_tokens
        return min(self.prompts_per_update * self.group_size, full + (full > 1))

    @property
    def prompts_per_bin(self) -> int:
        """A, prompts per bin and micro-batch: two samples each are expected to be live.

        Fewer, down to those of whole groups and one that is cut, where the attention of so many
        prompts would take more than half of that of the rows, which read a prompt each.
        """
        share = max(0.5, min(1.0, 2 / self.group_size))
        width, steps = self.max_prompt_tokens, self.max_completion_tokens
        whole_group_prompts = math.ceil((self.rows - 1) / self.group_size) + 1
        cheap = self.rows * steps * (width + steps) // (2 * width**2)
        most = min(math.ceil(self.rows * share), max(whole_group_prompts, cheap))
        return min(self.prompts_per_update, most)

    @property
    def micro_batches(self) -> int:
        """K, enough for any update: each holds so many rows, however long they and prompts are."""
        least = min(self.tokens // self.widest, self.rows, self.prompts_per_bin)
        return -(-self.prompts_per_update * self.group_size // (least * self.bins))


class Lengths(NamedTuple):
    """Tokens that an update computes of each prompt and each sample."""

    prompt: Any  # [P] int32, without the last prompt token, which opens every sample
    completion: Any  # [P, G] int32, up to the last token that the policy chose


class Plan(NamedTuple):
    """Who goes where. Rows count k * D * R + d * R + r."""

    row: np.ndarray  # [P, G] int32, of each sample; -1: left out
    start: np.ndarray  # [P, G] int32, its first position there
    segment: np.ndarray  # [P, G] int32, its number there, from 1
    prompt: np.ndarray  # [K, D, A] int32, prompts; -1: empty
    row_prompt: np.ndarray  # [K, D, R] int32, index into A
    num_live: np.ndarray  # [] int32, micro-batches to run


_Sample = tuple[int, int]
"""(length, number in its group)"""


class _Row(NamedTuple):
    """Samples of one group that share a row."""

    samples: list[int]
    tokens: int
    end: int  # behind its last sample


def make_geometry(
    sizes: tuple[int, int, int, int],
    mesh: Mesh,
    tokens: int | None,
    minibatches: int = 1,
    room: int | None = None,
    has_forks: bool = False,
    has_experts: bool = False,
) -> Geometry:
    """The sizes P, G, S, T of a run on a mesh; `tokens` = None: those of `default_tokens`.

    Args:
      room: the tokens of a micro-batch that fit into memory; None: any number.
      has_forks, has_experts: as in `Geometry`, and as a model that it is for.
    """
    bins, update_sizes = sharding.num_bins(mesh), (sizes[0] // minibatches, *sizes[1:])
    most = (WITH_EXPERTS if has_experts else TOKENS).get(mesh.devices.flat[0].platform, ELSEWHERE)
    tokens = tokens or default_tokens(update_sizes, bins, most if room is None else min(most, room))
    return Geometry(*sizes, bins, tokens, minibatches, has_forks)


def default_tokens(sizes: tuple[int, int, int, int], bins: int, room: int) -> int:
    """The tokens of a micro-batch of a run that gives no number.

    As many whole groups as there is `room` for, or as many of the longest completions of a group
    that is too large. At least four micro-batches make the update, where it has as many groups, so
    that less is computed where some are dead.

    Args:
      sizes: P, G, S, T of an update.
    """
    prompts, samples, width, steps = sizes
    group_tokens = width - 1 + samples * steps
    most = max(1, prompts // (4 * bins))
    if group_tokens <= room:
        tokens = group_tokens * min(room // group_tokens, most)
    else:
        tokens = width - 1 + steps * max(1, (room - width + 1) // steps)
    return -(-tokens // ROUND) * ROUND


def check_geometry(geometry: Geometry) -> None:
    """Raises: InputError if the longest sample does not fit a micro-batch, or all are too many."""
    if geometry.tokens < geometry.widest:
        raise InputError(
            f"train.tokens_per_micro_batch = {geometry.tokens}: a completion of "
            f"rollout.max_completion_tokens = {geometry.max_completion_tokens} beside a prompt of "
            f"rollout.max_prompt_tokens = {geometry.max_prompt_tokens} takes {geometry.widest}; "
            "give at least that"
        )
    prompts, samples, _, steps = geometry[:4]
    rows = max(prompts * samples, geometry.micro_batches * geometry.bins * geometry.rows)
    if rows * steps > np.iinfo(np.int32).max:
        raise InputError(
            f"rollout.prompts_per_step = {prompts}: {samples} samples of {steps} tokens each take "
            f"{rows * steps} places in micro-batches, and int32 tells 2147483647 apart; take fewer"
        )


def measure_lengths(rollouts: Rollouts) -> Lengths:
    """What `plan` reads of rollouts. Forced text behind the last chosen token teaches nothing."""
    prompt = rollouts.prompt_mask.sum(-1, dtype=jnp.int32) - 1
    return Lengths(prompt, up_to_last(rollouts.token_mask).sum(-1, dtype=jnp.int32))


def deal(lengths: Lengths, live: np.ndarray, geometry: Geometry) -> list[np.ndarray]:
    """Which prompts [P / minibatches] each minibatch of a step has, in ascending order.

    The longest by live tokens first, each to the minibatch with the fewest live tokens that has not
    got its number of prompts, the first of several. A pure function of its arguments, the same in
    every process.
    """
    size = np.where(live, lengths.completion, 0).sum(1)
    tokens = np.zeros(geometry.minibatches, np.int64)
    dealt: list[list[int]] = [[] for _ in tokens]
    for prompt in np.argsort(-size, kind="stable").tolist():
        takes = [len(prompts) < geometry.prompts_per_update for prompts in dealt]
        minibatch = int(np.where(takes, tokens, np.iinfo(np.int64).max).argmin())
        dealt[minibatch].append(prompt)
        tokens[minibatch] += size[prompt]
    return [np.sort(np.asarray(prompts, np.int32)) for prompts in dealt]


def plan(lengths: Lengths, live: np.ndarray, geometry: Geometry) -> Plan:
    """Places the live samples [P, G] in as few micro-batches as it finds.

    Those of a minibatch, if there are several: live samples of more prompts may not fit.

    Completions of a group share rows, first fit by decreasing length. Groups enter micro-batches
    whole where that fits, best fit by decreasing size, and in pieces where it does not; a prompt is
    computed once for each piece. Every bin gets as many micro-batches as the others, or one less.
    """
    placeable = live & (lengths.completion > 0)
    prompts = lengths.prompt.tolist()
    groups = {
        p: sorted(
            ((int(lengths.completion[p, g]), g) for g in np.flatnonzero(row).tolist()), reverse=True
        )
        for p, row in enumerate(placeable)
        if row.any()
    }
    tokens = sum(prompts[p] for p in groups) + int(lengths.completion[placeable].sum())
    fewest = -(-tokens // (geometry.tokens * geometry.bins))
    for num_live in range(fewest, geometry.micro_batches + 1):
        slots = _deal(groups, prompts, num_live * geometry.bins, geometry)
        if slots is not None:
            return _written(slots, lengths, num_live, geometry)
    raise AssertionError("a plan of all micro-batches holds any update")


def _in_rows(samples: list[_Sample], width: int, room: int, count: int, align: int) -> list[_Row]:
    """Samples of one group in rows of `width`, first fit in their order, each at a multiple of
    `align`.

    Those are left out for which there is no room for so many tokens, or no row of so many.
    """
    rows: list[_Row] = []
    for length, sample in samples:
        if length > room:
            continue
        for index, row in enumerate(rows):
            end = _rounded_up(row.end, align) + length
            if end <= width:
                rows[index] = _Row([*row.samples, sample], row.tokens + length, end)
                break
        else:
            if len(rows) == count:
                continue
            rows.append(_Row([sample], length, length))
        room -= length
    return rows


_Slot = list[tuple[int, list[_Row]]]
"""What one bin computes in one micro-batch: prompts, with rows of each."""


def _deal(
    groups: dict[int, list[_Sample]], prompts: list[int], count: int, geometry: Geometry
) -> list[_Slot] | None:
    """The groups in so many slots; None if they do not fit."""
    slots: list[_Slot] = [[] for _ in range(count)]
    tokens, width = np.full(count, geometry.tokens), geometry.max_completion_tokens
    rows = np.full(count, geometry.rows)
    open_prompts = np.full(count, geometry.prompts_per_bin)
    size = {p: prompts[p] + sum(length for length, _ in samples) for p, samples in groups.items()}
    for prompt in sorted(groups, key=lambda p: (-size[p], p)):
        unplaced = groups[prompt]
        while unplaced:
            need = prompts[prompt] + sum(length for length, _ in unplaced)
            piece = _in_rows(unplaced, width, need, len(unplaced), geometry.align)
            takes_any = (rows > 0) & (open_prompts > 0)
            fits = takes_any & (tokens >= need) & (rows >= len(piece))
            if fits.any():
                slot = int(np.where(fits, tokens, geometry.tokens + 1).argmin())
            elif takes_any.any():
                slot = int(np.where(takes_any, tokens, -1).argmax())
                room = int(tokens[slot]) - prompts[prompt]
                piece = _in_rows(unplaced, width, room, int(rows[slot]), geometry.align)
            if not takes_any.any() or not piece:
                return None
            slots[slot].append((prompt, piece))
            tokens[slot] -= prompts[prompt] + sum(row.tokens for row in piece)
            rows[slot] -= len(piece)
            open_prompts[slot] -= 1
            placed = {sample for row in piece for sample in row.samples}
            unplaced = [sample for sample in unplaced if sample[1] not in placed]
    return slots


def _rounded_up(size: Any, align: int) -> Any:
    return -(-size // align) * align


def _written(slots: list[_Slot], lengths: Lengths, num_live: int, geometry: Geometry) -> Plan:
    """The plan of slots, the fullest first: no bin has two of them while another has none."""
    prompts = lengths.prompt.tolist()
    sizes = [sum(prompts[p] + sum(row.tokens for row in r) for p, r in slot) for slot in slots]
    shape = (geometry.micro_batches, geometry.bins)
    row = np.full((geometry.num_prompts, geometry.group_size), -1, np.int32)
    start, segment = np.zeros_like(row), np.zeros_like(row)
    prompt = np.full((*shape, geometry.prompts_per_bin), -1, np.int32)
    row_prompt = np.zeros((*shape, geometry.rows), np.int32)
    for place, number in enumerate(np.argsort(-np.asarray(sizes), kind="stable")):
        bin_place, count = divmod(place, geometry.bins), 0
        for index, (p, rows) in enumerate(slots[number]):
            prompt[bin_place][index] = p
            for bin_row in rows:
                samples = np.asarray(bin_row.samples)
                size = _rounded_up(lengths.completion[p, bin_row.samples], geometry.align)
                row[p, samples] = place * geometry.rows + count
                start[p, samples] = np.cumsum(size) - size
                segment[p, samples] = np.arange(len(samples)) + 1
                row_prompt[bin_place][count] = index
                count += 1
    return Plan(row, start, segment, prompt, row_prompt, np.asarray(num_live, np.int32))


def work(plan: Plan, lengths: Lengths, geometry: Geometry) -> Metrics:
    """How well a plan's micro-batches are filled.

    update/micro_batches    that each bin computes for one update
    update/density          real tokens / tokens computed, prompts and completions
    update/row_density      real positions of the rows in use / all of them
    """
    prompts = plan.prompt[plan.prompt >= 0]
    completions = int(lengths.completion[plan.row >= 0].sum())
    computed = int(plan.num_live) * geometry.bins * geometry.tokens
    positions = len(np.unique(plan.row[plan.row >= 0])) * geometry.max_completion_tokens
    real = completions + int(lengths.prompt[prompts].sum())

    def ratio(total: int, weight: int) -> Mean:
        return Mean(total=jnp.float32(total), weight=jnp.float32(weight))

    return {
        "update/micro_batches": ratio(int(plan.num_live), 1),
        "update/density": ratio(real, computed),
        "update/row_density": ratio(completions, positions),
    }


def gather(
    rollouts: Rollouts,
    plan: Plan,
    advantage: Array,
    weight: Array,
    mask: Array,
    fields: dict[str, Array],
    constrain: Constrain = lambda value, axes: value,
) -> TrainBatch:
    """Moves samples into the rows that the plan gives them. Pure; jitted by the caller. `constrain`
    lays an array out on the caller's mesh by logical axis names: D over the bins.

    Shapes: advantage, weight, mask and fields [], [P], [P, G] or [P, G, T, ...].
    """
    position, real = _positions(rollouts)
    source = _sources(plan, real)

    def move(value: Array) -> Array:
        wide = per_token(value, rollouts)
        trailing = wide.shape[3:]
        is_real = jnp.expand_dims(source >= 0, [*range(4, 4 + len(trailing))])
        return jnp.where(is_real, wide.reshape(-1, *trailing)[source], jnp.asarray(0, wide.dtype))

    length = rollouts.prompt_mask.sum(-1, dtype=jnp.int32)  # [P]
    last = jnp.take_along_axis(rollouts.prompt_tokens, length[:, None] - 1, axis=1)
    first = per_token(last, rollouts)[..., :1]
    tokens = jnp.concatenate([first, rollouts.completion_tokens[..., :-1]], axis=-1)
    prompt = jnp.maximum(plan.prompt, 0)
    forks = {FORK: rollouts.fields[FORK]} if FORK in rollouts.fields else {}
    recorded = records.in_rows(rollouts.fields, source)
    prompt_length = jnp.where(plan.prompt >= 0, length[prompt] - 1, 0)
    within = jnp.arange(rollouts.prompt_tokens.shape[1]) < prompt_length[..., None]
    batch = TrainBatch(
        prompt_tokens=jnp.where(within, rollouts.prompt_tokens[prompt], 0),
        prompt_length=prompt_length,
        tokens=move(tokens),
        targets=move(rollouts.completion_tokens),
        segment=move(jnp.asarray(plan.segment)),
        position=move(position),
        advantage=move(advantage),
        weight=move(weight),
        mask=move(mask),
        proximal_logp=move(rollouts.behavior_logp),
        fields={name: move(value) for name, value in (fields | forks).items()} | recorded,
        prompt=jnp.asarray(plan.prompt),
        row_prompt=jnp.asarray(plan.row_prompt),
        num_live=jnp.asarray(plan.num_live),
    )
    return jax.tree.map(functools.partial(_over_bins, constrain), batch)


def _positions(rollouts: Rollouts) -> tuple[Array, Array]:
    """[P, G, T] each: position of what each token is drawn from, and whether it is computed.

    The first token of a rewritten conversation is not: nothing is before it. It is read where the
    second one is drawn, as a prompt's last token opens a sample.
    """
    length = rollouts.prompt_mask.sum(-1, dtype=jnp.int32)
    place = jnp.arange(rollouts.token_mask.shape[-1], dtype=jnp.int32)
    position, real = length[:, None, None] - 1 + place, up_to_last(rollouts.token_mask)
    fork = rollouts.fields.get(FORK)
    if fork is None:
        return position, real
    is_first = jnp.diff(fork, axis=-1, prepend=0) > 0
    begin = jax.lax.cummax(jnp.where(is_first, place, 0), axis=2)
    return jnp.where(fork > 0, place - begin - 1, position), real & ~is_first


def abstract_batch(
    geometry: Geometry, needs: Collection[str], counts: Mapping[str, int] = {}
) -> TrainBatch:
    """The shapes and dtypes of the batch of an update that `gather` makes; `needs` are fields that
    the objective reads, and `counts` its `Objective.counts`."""
    sizes = geometry.micro_batches, geometry.bins
    prompts, rows = geometry.prompts_per_bin, geometry.rows
    width, steps = geometry.max_prompt_tokens, geometry.max_completion_tokens

    def abstract(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*sizes, *shape), jnp.dtype(dtype))

    per_token = abstract("float32", rows, steps)
    token, names = abstract("int32", rows, steps), {"behavior_logp", *needs}
    flag = abstract("bool", rows, steps)
    fields = dict.fromkeys(sorted(names - OF_PASS.keys()), per_token)
    fields |= {name: abstract("float32", rows, steps, 2, k + 1) for name, k in counts.items()}
    fields |= {FORK: token} if geometry.has_forks else {}
    for name, shape in geometry.records:
        fields[name] = abstract(records.DTYPES[name].__name__, rows, steps, *shape)
    arrays: Any = {
        "prompt_tokens": abstract("int32", prompts, width),
        "prompt_length": abstract("int32", prompts),
        **dict.fromkeys(("tokens", "targets", "segment", "position"), token),
        **dict.fromkeys(("advantage", "weight", "proximal_logp"), per_token),
        "mask": flag,
        "fields": fields | {"sampled_now": flag},
        "prompt": abstract("int32", prompts),
        "row_prompt": abstract("int32", rows),
        "num_live": jax.ShapeDtypeStruct((), jnp.int32),
    }
    return TrainBatch(**arrays)


def _over_bins(constrain: Constrain, leaf: Array) -> Array:
    return constrain(leaf, (None, "bins", *[None] * (leaf.ndim - 2))) if leaf.ndim else leaf


def scatter(values: Array, plan: Plan, token_mask: Array) -> Array:
    """The way back: row values [K, D, R, Q, ...] to samples; 0 if a token had no place.

    Args:
      token_mask: [P, G, T], of the rollouts.
    """
    place = _places(plan, up_to_last(token_mask))
    return values.reshape(-1, *values.shape[4:]).at[place].get(mode="fill", fill_value=0)


def _sources(plan: Plan, real: Array) -> Array:
    """[K, D, R, Q], the token of the flat samples at each position; -1: padding."""
    rows = *plan.row_prompt.shape, real.shape[-1]
    source = jnp.full(math.prod(rows), -1, jnp.int32)
    place = _places(plan, real).reshape(-1)
    indices = jnp.arange(place.size, dtype=jnp.int32)
    return source.at[place].set(indices, mode="drop").reshape(rows)


def _places(plan: Plan, real: Array) -> Array:
    """[P, G, T], where each token stands in the flat rows; beyond their end if nowhere."""
    steps = real.shape[-1]
    place = plan.row[..., None] * steps + plan.start[..., None] + jnp.arange(steps)
    return jnp.where(real & (plan.row[..., None] >= 0), place, plan.row_prompt.size * steps)


def up_to_last(token_mask: Array) -> Array:
    """True up to the last token the policy chose: forced text after it teaches nothing."""
    return jnp.flip(jnp.cumsum(jnp.flip(token_mask, -1), -1) > 0, -1)
