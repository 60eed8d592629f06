"""Sampling: a prompt is computed once per group, and slots that fall free take the next sample.

The host's part: it keeps the prompts' cache filled and the slots few, and reads what a segment of
decoding counted while the next one runs. The device's part is `jaxgrpo.rollout.decoding`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Params, Prompts, Rollouts
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model, params_per_layer
from jaxgrpo.models.sequences import check_tokens
from jaxgrpo.rollout import decoding, shrinking
from jaxgrpo.rollout.decoding import Engine
from jaxgrpo.rollout.shrinking import Price, Size, estimate_price, sizes_below, worthwhile
from jaxgrpo.rollout.state import DecodeState, Finished, Queue, Samples, SamplingSettings

CHUNK = 64  # prompt tokens of one row that are computed at once
CHUNK_TOKENS = 512  # of all rows of a bin
GROUPS_PER_FETCH = 8  # groups that are fetched at once for the caller that wants finished ones
COLUMNS = 32  # columns of the prompts' cache come in so many: unaligned rows are slow to read
ROWS_PER_SLOT = 3  # rows of the prompts' cache, times the group size, per slot: see `for_prompts`


class Sampler(NamedTuple):
    """The jitted programs of sampling; `sample` runs them."""

    settings: SamplingSettings
    vocab_size: int
    mesh: Mesh | None
    split: Callable[[Params], Params]
    begin: Callable[..., DecodeState]
    prefill: Callable[..., DecodeState]
    admit: Callable[..., DecodeState]
    decode: Callable[..., tuple[DecodeState, decoding.Counters]]
    staying: Callable[..., tuple[Array, Array]]
    take: Callable[..., Any]
    take_slots: Callable[..., Any]
    peek: Callable[..., tuple[Array, Array]]
    watch: Callable[[Samples], Array]
    cut: Callable[[DecodeState, np.ndarray], DecodeState]
    finish: Callable[[Samples, Prompts], Rollouts]
    price: Price | None  # of smaller sizes; None: all are worth it
    smaller: dict[Any, dict[Size, Any]]  # programs of smaller sizes, by what they were compiled for


class Sizes(NamedTuple):
    """What is fixed during a call, per bin."""

    bins: int  # D
    prompts: int  # P
    slots: int  # N
    rows: int  # A, of the prompts' cache
    width: int  # S, its columns

    @classmethod
    def for_prompts(cls, settings: SamplingSettings, bins: int, prompts: int, width: int) -> Sizes:
        """Sizes for `prompts` prompts of at most `width` tokens over all bins.

        Fewer rows than prompts are enough where samples wait for slots: the slots read some
        slots / G prompts that are under way, and others whose last samples are long.
        """
        per_bin, group = prompts // bins, settings.group_size
        slots = min(-(-settings.slots // bins) or per_bin * group, per_bin * group)
        rows = min(per_bin, max(2, -(-ROWS_PER_SLOT * slots // group)))
        # The last prompt token opens a slot, the others make up the row.
        columns = -(-max(1, width - 1) // COLUMNS) * COLUMNS
        return cls(bins, per_bin, slots, rows, columns)

    def aligned(self, settings: SamplingSettings) -> bool:
        """Whether each sample has a slot, and each prompt a row, from beginning to end."""
        samples = self.prompts * settings.group_size
        return self.rows == self.prompts and self.slots == samples


def chunk_shape(sizes: Sizes) -> tuple[int, int]:
    """How many rows of a bin are computed at once, and how many tokens of each."""
    width = min(CHUNK, sizes.width)
    return max(1, min(sizes.rows, CHUNK_TOKENS // width)), width


def make_sampler(model: Model, settings: SamplingSettings, mesh: Mesh | None = None) -> Sampler:
    """Jits what `sample` runs.

    Args:
      mesh: that parameters and prompts are laid out on; None: one device.
    """
    constrain = (lambda value, axes: value) if mesh is None else sharding.constrain(mesh)
    engine = Engine(model, settings, constrain, 1 if mesh is None else mesh.shape["tensor"])
    decode = functools.partial(decoding.segment, engine)
    # Elsewhere a step takes as long as it takes to read the weights, and runs are long.
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    on_cpu = platform == "cpu"
    return Sampler(
        settings=settings,
        vocab_size=model.config.vocab_size,
        mesh=mesh,
        split=functools.partial(params_per_layer, model.config),
        begin=jax.jit(functools.partial(_begin, engine), static_argnums=0),
        prefill=jax.jit(functools.partial(decoding.prefill, engine), donate_argnums=1),
        admit=jax.jit(functools.partial(decoding.admit, settings), donate_argnums=0),
        decode=jax.jit(decode, static_argnums=0, donate_argnums=2),
        staying=jax.jit(functools.partial(decoding.staying, settings), static_argnums=(1, 2)),
        take=jax.jit(decoding.take),
        take_slots=jax.jit(decoding.take_slots),
        peek=jax.jit(functools.partial(_peek, settings.group_size)),
        watch=jax.jit(lambda samples: jnp.where(_mask(samples), samples.tokens, -1)),
        cut=jax.jit(functools.partial(decoding.cut, settings), donate_argnums=0),
        finish=jax.jit(_finish),
        price=estimate_price(model, settings.calls) if on_cpu and settings.calls else None,
        smaller={},
    )


def sample(
    sampler: Sampler,
    params: Params,
    prompts: Prompts,
    key: ArrayLike,
    finished: Callable[[Finished], None] | None = None,
) -> Rollouts:
    """Draws G completions for every prompt from the policy `params`.

    A token is drawn by Gumbel-max from softmax(logits / temperature), cut to top_k, top_p and
    min_p, with the key folded from (key, purpose, step, ordinal, sample, token), so a sample
    depends on nothing else: not on the number of slots, and not on what is sampled beside it.

    Args:
      prompts: with `forced_prefix`, samples begin with tokens that are given.
      key: [2] uint32, the data of the run's key.
      finished: called with groups that have ended while others decode; not with the last ones.

    Returns: rollouts without rewards; `behavior_logp` is of the distribution drawn from (for
    temperature 0 of the model's own, at temperature 1). With settings.untempered the field
    "untempered_logp" is the model's own in any case.
    """
    return sample_counted(sampler, params, prompts, key, finished)[0]


def sample_counted(
    sampler: Sampler,
    params: Params,
    prompts: Prompts,
    key: ArrayLike,
    finished: Callable[[Finished], None] | None = None,
) -> tuple[Rollouts, Array]:
    """`sample`, and its slot-steps: decoding steps times slots, over all bins."""
    bins = 1 if sampler.mesh is None else sharding.num_bins(sampler.mesh)
    number, width = prompts.prompt_tokens.shape
    sizes = Sizes.for_prompts(sampler.settings, bins, number, width)
    _check(sampler.settings, prompts)
    if sampler.mesh is not None:
        key = sharding.put(key, sharding.replicated(sampler.mesh))
    state = sampler.begin(sizes, prompts, key)
    state = _Call(sampler, sizes, params, prompts, state, finished).run()
    return sampler.finish(state.samples, prompts), state.slot_steps


def _check(settings: SamplingSettings, prompts: Prompts) -> None:
    forced, longest = prompts.forced_prefix, settings.max_completion_tokens
    if forced is None:
        return
    shape = (len(prompts.ordinal), settings.group_size)
    if forced.ndim != 3 or forced.shape[:2] != shape or forced.shape[2] >= longest:
        raise InputError(
            f"forced_prefix has shape {list(forced.shape)}: expected [{shape[0]}, {shape[1]}, F] "
            f"with F below max_completion_tokens = {longest}, so that a token is left to draw"
        )


class _Call:
    """One call of `sample` under way."""

    def __init__(
        self,
        sampler: Sampler,
        sizes: Sizes,
        params: Params,
        prompts: Prompts,
        state: DecodeState,
        finished: Callable[[Finished], None] | None,
    ):
        self.sampler, self.sizes, self.state, self.finished = sampler, sizes, state, finished
        self.is_reported = np.zeros((sizes.bins, sizes.prompts), bool)
        self.searched = np.zeros((sizes.bins, sizes.prompts * sampler.settings.group_size), int)
        self.peeked: list[tuple[np.ndarray, tuple[Array, Array]]] = []
        self.params = sampler.split(params)
        tokens, mask = sharding.to_host((prompts.prompt_tokens, prompts.prompt_mask))
        check_tokens("prompt_tokens", tokens, mask, sampler.vocab_size)
        shape = (sizes.bins, sizes.prompts, -1)
        # The last token opens the slots, the others make up the row.
        self.length = mask.sum(-1).reshape(shape[:2]) - 1
        self.tokens = tokens.reshape(shape)
        self.row = np.zeros(shape[:2], np.int32)
        self.row_length = np.zeros((sizes.bins, sizes.rows), np.int32)
        self.ready = np.zeros(sizes.bins, np.int32)
        self.free = [list(range(sizes.rows)) for _ in range(sizes.bins)]
        self.rows_in_use: list[dict[int, int]] = [{} for _ in range(sizes.bins)]  # prompt -> row
        self.size = Size(sizes.slots, sizes.rows, sizes.aligned(sampler.settings))
        longest, price = sampler.settings.max_completion_tokens, sampler.price
        below = sizes_below(self.size)
        self.below = worthwhile(self.size, longest, price) if price and below else below
        self.programs: dict[Size, Any] = {}  # of smaller sizes, once one is needed
        self.is_first = False  # of all calls, to need one

    def run(self) -> DecodeState:
        """Decodes until every sample has ended."""
        self._fill()
        previous = None
        while True:
            smaller = self.below[0].slots if self.below else None
            self.state, counters = self._decode(np.int32(smaller or -1))
            # The segment before the one just dispatched: the device never waits for the host.
            if previous is not None:
                (live, drained, ended), drawn = sharding.to_host(previous)
                self._cut(drawn)
                self._tell(ended)
                if drained and live == 0:
                    break
                self._release(ended)
                self._fill()
                if drained and smaller and live <= smaller:
                    self._shrink()
            previous = counters, self._watched()
        self._compile_remaining_sizes()
        return self.state

    def _decode(self, enough: np.int32) -> tuple[DecodeState, decoding.Counters]:
        if self.size in self.programs:
            return self.programs[self.size].result()(self.params, self.state, enough)
        return self.sampler.decode(self.size.aligned, self.params, self.state, enough)

    def _watched(self) -> Array | None:
        """The drawn tokens of all samples, if their text can end them."""
        stop = self.sampler.settings.stop_strings
        return None if stop is None else self.sampler.watch(self.state.samples)

    def _cut(self, drawn: np.ndarray | None) -> None:
        """Ends the samples whose text holds a stop string; the device may be a segment ahead.

        Args:
          drawn: [D, M, T], -1 where no token was drawn.
        """
        settings = self.sampler.settings
        if settings.stop_strings is None or drawn is None:
            return
        number, length = (drawn >= 0).sum(-1), np.full(drawn.shape[:2], -1, np.int32)
        for place in zip(*np.nonzero(number > self.searched), strict=True):
            begin = int((drawn[place] >= 0).argmax())  # behind the forced tokens
            tokens = drawn[place][begin : begin + number[place]]
            fewest = settings.min_completion_tokens - begin
            end = settings.stop_strings.end(tokens, int(self.searched[place]), fewest)
            self.searched[place] = number[place] if end is None else drawn.shape[-1]
            length[place] = -1 if end is None else begin + end
        self.state = self.sampler.cut(self.state, length)

    def _tell(self, ended: np.ndarray) -> None:
        """Passes on the groups that were fetched last time, and begins to fetch the next ones."""
        if self.finished is None:
            return
        for places, arrays in self.peeked:
            tokens, mask = (array[: len(places)] for array in sharding.to_host(arrays))
            self.finished(Finished(places, tokens, mask))
        new_groups = np.flatnonzero((ended & ~self.is_reported).reshape(-1))
        self.is_reported = ended
        self.peeked = []
        for begin in range(0, len(new_groups), GROUPS_PER_FETCH):
            places = new_groups[begin : begin + GROUPS_PER_FETCH]
            filled = np.resize(places, GROUPS_PER_FETCH).astype(np.int32)
            self.peeked.append((places, self.sampler.peek(self.state.samples, filled)))

    def _release(self, ended: np.ndarray) -> None:
        """Frees the rows of prompts all of whose samples have ended."""
        for bin_, rows in enumerate(self.rows_in_use):
            for prompt in [prompt for prompt in rows if ended[bin_, prompt]]:
                self.free[bin_].append(rows.pop(prompt))

    def _fill(self) -> None:
        """Computes as many of the next prompts as there are free rows."""
        if not any(
            free and ready < self.sizes.prompts
            for free, ready in zip(self.free, self.ready, strict=True)
        ):
            return
        chunks = [self._next_chunks(bin_) for bin_ in range(self.sizes.bins)]
        side, width = chunk_shape(self.sizes)
        # Chunks of one prompt follow one another: all first ones, then all second ones.
        for level in range(max(map(len, chunks))):
            level_chunks = [
                bin_chunks[level] if level < len(bin_chunks) else [] for bin_chunks in chunks
            ]
            for begin in range(0, max(map(len, level_chunks)), side):
                batch = [bin_chunks[begin : begin + side] for bin_chunks in level_chunks]
                self._prefill(batch, side, width)
        # Copies: the device may read a host array after the call has returned.
        copies = (self.row.copy(), self.row_length.copy(), self.ready.copy())
        self.state = self.sampler.admit(self.state, *copies)

    def _next_chunks(self, bin_: int) -> list[list[tuple[int, int, int]]]:
        """Gives the bin's next prompts rows. Returns their chunks (prompt, row, start) by level."""
        levels: list[list[tuple[int, int, int]]] = []
        while self.free[bin_] and self.ready[bin_] < self.sizes.prompts:
            prompt, row = int(self.ready[bin_]), self.free[bin_].pop(0)
            self.rows_in_use[bin_][prompt] = row
            length = int(self.length[bin_, prompt])
            self.row[bin_, prompt], self.row_length[bin_, row] = row, length
            self.ready[bin_] += 1
            for level, start in enumerate(range(0, length, CHUNK)):
                levels.extend([] for _ in range(level + 1 - len(levels)))
                levels[level].append((prompt, row, start))
        return levels

    def _prefill(self, batch: list[list[tuple[int, int, int]]], side: int, width: int) -> None:
        shape = (self.sizes.bins, side)
        tokens = np.full((*shape, width), -1, np.int32)
        row, start = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for bin_, chunks in enumerate(batch):
            for place, (prompt, cache_row, begin) in enumerate(chunks):
                end = min(begin + width, int(self.length[bin_, prompt]))
                tokens[bin_, place, : end - begin] = self.tokens[bin_, prompt, begin:end]
                row[bin_, place], start[bin_, place] = cache_row, begin
        self.state = self.sampler.prefill(self.params, self.state, tokens, row, start)

    def _shrink(self) -> None:
        """Goes on with the next smaller size: the slots that decode, and the rows they read."""
        if not self.programs:
            self.programs = self._smaller_programs()
        size, old_size = self.below.pop(0), self.size
        state, take = self.state, self.sampler.take
        order, rows = self.sampler.staying(state, size.slots, old_size.aligned)
        slot_arrays = {"sample": state.sample, "live": state.live, "index": state.index}
        slot_arrays = take({**slot_arrays, "token": state.token}, order)
        memory, aligned = list(state.memory), size.aligned
        state = self.state = dataclasses.replace(
            state,
            **slot_arrays,
            row_length=take(state.row_length, rows) if aligned else state.row_length,
            memory=(),
        )
        # Layer by layer, so that the slots that leave are never in memory beside all that stay.
        for layer in range(len(memory)):
            prompts, ring = memory[layer]
            ring = self.sampler.take_slots(ring, order)
            memory[layer] = (take(prompts, rows) if aligned else prompts, ring)
            del prompts, ring
        self.state = dataclasses.replace(state, memory=tuple(memory))
        self.size = size

    def _compile_remaining_sizes(self) -> None:
        """In the first call that shrinks: what sizes need that it did not come to.

        So that no later call compiles, whatever the lengths of its samples.
        """
        if not self.is_first:
            return
        while self.below:
            self._shrink()
            if self.sampler.settings.stop_strings is not None:
                no_cuts = np.full(self.searched.shape, -1, np.int32)
                self.state = self.sampler.cut(self.state, no_cuts)
        for program in self.programs.values():
            program.result()

    def _smaller_programs(self) -> dict[Size, Any]:
        """The programs of all smaller sizes, which the first call that needs one compiles."""
        param_layout = tuple((leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(self.params))
        key = (self.sizes, param_layout)
        self.is_first = key not in self.sampler.smaller
        if self.is_first:
            self.sampler.smaller[key] = shrinking.compile_all(
                self.sampler.decode, self.params, self.state, self.below
            )
        return self.sampler.smaller[key]


def _begin(engine: Engine, sizes: Sizes, prompts: Prompts, key: Array) -> DecodeState:
    """The state before the first prompt is computed: nothing is ready."""
    settings, (bins, count) = engine.settings, sizes[:2]
    length = prompts.prompt_mask.sum(-1, dtype=jnp.int32)
    last = jnp.take_along_axis(prompts.prompt_tokens, length[:, None] - 1, axis=1)
    shape = (bins, count * settings.group_size)
    steps = (*shape, settings.max_completion_tokens)
    forced = prompts.forced_prefix
    zero = jnp.zeros(bins, jnp.int32)
    samples = Samples(
        keys=_sample_keys(key, settings, prompts).reshape(*shape, 2),
        forced=None if forced is None else forced.reshape(*shape, -1),
        tokens=jnp.full(steps, settings.pad_token, jnp.int32),
        logp=jnp.zeros(steps, jnp.float32),
        untempered=jnp.zeros(steps, jnp.float32) if settings.untempered else None,
        confidence=jnp.zeros(steps, jnp.float32) if settings.early_stop else None,
        length=jnp.zeros(shape, jnp.int32),
        stopped=jnp.zeros(shape, bool),
        ended=jnp.zeros(shape, bool),
    )
    row = jnp.zeros((bins, count), jnp.int32)
    queue = Queue(row=row, last=last.reshape(bins, count), ready=zero, next=zero)
    return decoding.first_state(engine, samples, queue, sizes.rows, sizes.width, sizes.slots)


def _sample_keys(key: Array, settings: SamplingSettings, prompts: Prompts) -> Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(key), settings.purpose)
    key = jax.random.fold_in(key, prompts.step)
    prompt_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, prompts.ordinal)
    fold_samples = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = jax.vmap(fold_samples, in_axes=(0, None))(prompt_keys, jnp.arange(settings.group_size))
    return jax.random.key_data(keys)


def _mask(samples: Samples) -> Array:
    """[D, M, T]: the tokens that were drawn."""
    index = jnp.arange(samples.tokens.shape[-1])
    mask = index < samples.length[..., None]
    if samples.forced is not None:
        mask &= index >= (samples.forced >= 0).sum(-1)[..., None]
    return mask


def _peek(group: int, samples: Samples, places: Array) -> tuple[Array, Array]:
    """Tokens and mask [n, G, T] of some groups [n], counted over all bins."""

    def take(array: Array) -> Array:
        return array.reshape(-1, group, array.shape[-1])[places]

    return take(samples.tokens), take(_mask(samples))


def _finish(samples: Samples, prompts: Prompts) -> Rollouts:
    def by_prompt(array: Array) -> Array:
        return array.reshape(len(prompts.ordinal), -1, *array.shape[2:])

    raw = samples.untempered
    return Rollouts(
        **vars(prompts),
        completion_tokens=by_prompt(samples.tokens),
        token_mask=by_prompt(_mask(samples)),
        behavior_logp=by_prompt(samples.logp),
        rewards={},
        truncated=by_prompt(~samples.stopped),
        policy_version=jnp.broadcast_to(prompts.step, by_prompt(samples.length).shape),
        fields={} if raw is None else {"untempered_logp": by_prompt(raw)},
    )
